//! Counters of the stack's end of a channel.

use crate::stats::CounterKind;
use core::ops::Add;
use serde::{Deserialize, Serialize};

/// Counters of the stack's end of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelStats {
    /// Doorbell notifications of clients that were processed.
    pub doorbells: u64,
    /// Times that a ring of doorbells, to a client or from one, was full. Its receiver looks at the flags of
    /// all sockets then, so that no event is lost.
    pub doorbell_rings_full: u64,
    /// Sockets whose work was continued in the next turn, because they had more to send than one turn takes
    /// of a socket, or because their domain's turn budget was used up.
    pub sockets_deferred: u64,
    /// Datagrams that were dropped because clients did not receive earlier ones in time.
    pub datagrams_dropped: u64,
    /// Datagrams of clients that were not sent because a device or a table had no room. A datagram waits for
    /// a device, but not for longer than 10 ms, and not if it must leave before a later request.
    pub datagrams_refused: u64,
    /// Connections that clients accepted.
    pub accepted: u64,
    /// Accepted connections, counted in `accepted`, that went to a client of another shard, because no client
    /// that prefers this one would take them.
    pub accepted_remote: u64,
    /// Offers that were not accepted in time and went to another client.
    pub offers_revoked: u64,
    /// Invalid positions, numbers and rings that clients wrote. Each cost the client a connection, or
    /// notifications.
    pub violations: u64,
    /// Domains that were refused because `channel.domains_max` was reached.
    pub domains_refused: u64,
    /// Clients that were refused because `channel.clients_max` was reached.
    pub clients_refused: u64,
    /// Sockets that were refused because `channel.sockets_max` or `channel.buffer_bytes_max` was reached.
    pub sockets_refused: u64,
    /// Listeners that were refused because `channel.listeners_max` was reached.
    pub listeners_refused: u64,
    /// Filters of sockets that were refused because `channel.filter_bytes_max` was reached, or too many
    /// different option sets were in use.
    pub filters_refused: u64,
    /// Options that connections did not get, because too many different option sets were in use.
    pub options_refused: u64,
    /// Times that a connection filled its buffer and got no large one, because `channel.large_buffers_max`
    /// was reached.
    pub large_buffers_refused: u64,
    /// Requests for the transmit timestamps of a write to a stream that were refused, because too many of the
    /// stream were awaited or not yet read. A program reads those that were taken, and asks once more.
    pub stamps_refused: u64,
    /// Bytes that were queued to be sent from large buffers without copying.
    pub zero_copy_bytes: u64,
    /// Bytes counted in `zero_copy_bytes` that were copied after all, because a client needed their space.
    pub zero_copy_bytes_copied: u64,
}

impl Add for ChannelStats {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            doorbells: self.doorbells + other.doorbells,
            doorbell_rings_full: self.doorbell_rings_full + other.doorbell_rings_full,
            sockets_deferred: self.sockets_deferred + other.sockets_deferred,
            datagrams_dropped: self.datagrams_dropped + other.datagrams_dropped,
            datagrams_refused: self.datagrams_refused + other.datagrams_refused,
            accepted: self.accepted + other.accepted,
            accepted_remote: self.accepted_remote + other.accepted_remote,
            offers_revoked: self.offers_revoked + other.offers_revoked,
            violations: self.violations + other.violations,
            domains_refused: self.domains_refused + other.domains_refused,
            clients_refused: self.clients_refused + other.clients_refused,
            sockets_refused: self.sockets_refused + other.sockets_refused,
            listeners_refused: self.listeners_refused + other.listeners_refused,
            filters_refused: self.filters_refused + other.filters_refused,
            options_refused: self.options_refused + other.options_refused,
            large_buffers_refused: self.large_buffers_refused + other.large_buffers_refused,
            stamps_refused: self.stamps_refused + other.stamps_refused,
            zero_copy_bytes: self.zero_copy_bytes + other.zero_copy_bytes,
            zero_copy_bytes_copied: self.zero_copy_bytes_copied + other.zero_copy_bytes_copied,
        }
    }
}

impl ChannelStats {
    /// Reports each counter with its name.
    pub(super) fn report(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        let Self {
            doorbells,
            doorbell_rings_full,
            sockets_deferred,
            datagrams_dropped,
            datagrams_refused,
            accepted,
            accepted_remote,
            offers_revoked,
            violations,
            domains_refused,
            clients_refused,
            sockets_refused,
            listeners_refused,
            filters_refused,
            options_refused,
            large_buffers_refused,
            stamps_refused,
            zero_copy_bytes,
            zero_copy_bytes_copied,
        } = *self;
        for (name, count) in [
            ("channel.doorbells", doorbells),
            ("channel.doorbell_rings_full", doorbell_rings_full),
            ("channel.sockets_deferred", sockets_deferred),
            ("channel.datagrams_dropped", datagrams_dropped),
            ("channel.datagrams_refused", datagrams_refused),
            ("channel.accepted", accepted),
            ("channel.accepted_remote", accepted_remote),
            ("channel.offers_revoked", offers_revoked),
            ("channel.violations", violations),
            ("channel.domains_refused", domains_refused),
            ("channel.clients_refused", clients_refused),
            ("channel.sockets_refused", sockets_refused),
            ("channel.listeners_refused", listeners_refused),
            ("channel.filters_refused", filters_refused),
            ("channel.options_refused", options_refused),
            ("channel.large_buffers_refused", large_buffers_refused),
            ("channel.stamps_refused", stamps_refused),
            ("channel.zero_copy_bytes", zero_copy_bytes),
            ("channel.zero_copy_bytes_copied", zero_copy_bytes_copied),
        ] {
            report(CounterKind::Counter, name, count);
        }
    }
}
