//! What the stack's end of a channel counts.

use crate::stats::CounterKind;
use core::ops::Add;

/// What the stack's end has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelStats {
    /// Bells answered.
    pub doorbells: u64,
    /// Sockets that were left for the next turn, because they had more to send than is taken of one in a turn, or because their domain had all of its turn: so that others had theirs.
    pub chunks: u64,
    /// Datagrams that nobody took in time.
    pub datagrams_dropped: u64,
    /// Connections that clients accepted.
    pub accepted: u64,
    /// Offers that were not taken in time and went to another client.
    pub offers_revoked: u64,
    /// Positions, numbers and rings that cannot be: each cost its client a connection, or bells.
    pub violations: u64,
    /// Domains that were refused because there were `channel.domains_max`.
    pub domains_refused: u64,
    /// Clients that were refused because there were `channel.clients_max`.
    pub clients_refused: u64,
    /// Sockets that were refused because there were `channel.sockets_max`, or as many as `channel.buffer_bytes_max` allows.
    pub sockets_refused: u64,
    /// Listeners that were refused because a domain had as many as it can have.
    pub listeners_refused: u64,
    /// Options that connections did not get, because so many different ones were in use.
    pub options_refused: u64,
    /// Times that a connection filled its buffer and there was no large one left: there were `channel.large_buffers_max`.
    pub large_buffers_refused: u64,
    /// Bytes that the engine was to send from large buffers, without copying them.
    pub zero_copy_bytes: u64,
    /// Those of them that were copied after all, because a client wanted their room.
    pub zero_copy_bytes_copied: u64,
}

impl Add for ChannelStats {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            doorbells: self.doorbells + other.doorbells,
            chunks: self.chunks + other.chunks,
            datagrams_dropped: self.datagrams_dropped + other.datagrams_dropped,
            accepted: self.accepted + other.accepted,
            offers_revoked: self.offers_revoked + other.offers_revoked,
            violations: self.violations + other.violations,
            domains_refused: self.domains_refused + other.domains_refused,
            clients_refused: self.clients_refused + other.clients_refused,
            sockets_refused: self.sockets_refused + other.sockets_refused,
            listeners_refused: self.listeners_refused + other.listeners_refused,
            options_refused: self.options_refused + other.options_refused,
            large_buffers_refused: self.large_buffers_refused + other.large_buffers_refused,
            zero_copy_bytes: self.zero_copy_bytes + other.zero_copy_bytes,
            zero_copy_bytes_copied: self.zero_copy_bytes_copied + other.zero_copy_bytes_copied,
        }
    }
}

impl ChannelStats {
    /// Tells each with its name.
    pub(super) fn report(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        let Self {
            doorbells: bells,
            chunks: portions,
            datagrams_dropped,
            accepted,
            offers_revoked,
            violations,
            domains_refused,
            clients_refused,
            sockets_refused,
            listeners_refused,
            options_refused,
            large_buffers_refused,
            zero_copy_bytes: lent_bytes,
            zero_copy_bytes_copied: lent_bytes_copied,
        } = *self;
        for (name, count) in [
            ("channel.bells", bells),
            ("channel.portions", portions),
            ("channel.datagrams_dropped", datagrams_dropped),
            ("channel.accepted", accepted),
            ("channel.offers_revoked", offers_revoked),
            ("channel.violations", violations),
            ("channel.domains_refused", domains_refused),
            ("channel.clients_refused", clients_refused),
            ("channel.sockets_refused", sockets_refused),
            ("channel.listeners_refused", listeners_refused),
            ("channel.options_refused", options_refused),
            ("channel.large_buffers_refused", large_buffers_refused),
            ("channel.lent_bytes", lent_bytes),
            ("channel.lent_bytes_copied", lent_bytes_copied),
        ] {
            report(CounterKind::Counter, name, count);
        }
    }
}
