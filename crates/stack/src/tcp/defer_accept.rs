//! Deferred connections (`TCP_DEFER_ACCEPT`): an acknowledgement without data does not complete the handshake
//! of a listener that defers. The connection stays half-open until data or FIN arrive. SYN+ACK is sent again
//! when the time is over, and the next acknowledgement creates the connection (`tcp_check_req`,
//! `syn_ack_recalc`).

use super::Tcp;
use super::conn::{Flags, Tcb};
use super::input::Segment;
use super::listen::{SYNACK_DEFERRED, listener_of};
use crate::events::CloseReason;
use crate::ip::Network;

impl Tcp {
    /// Decides about the end of a passive handshake if the listener defers connections or was closed. Returns
    /// false if the segment must not be processed further.
    #[cold]
    pub(super) fn may_establish_passive(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) -> bool {
        if !self.listeners.is_open(listener_of(self.conns[idx].token)) && !self.migrate_half_open(idx) {
            self.send_reset(net, seg);
            self.destroy(idx, CloseReason::Aborted);
            return false;
        }
        let timeouts = self.defer_accept(idx);
        let c = &mut self.conns[idx];
        if c.retries < timeouts && seg.end() == c.rcv_nxt {
            c.rttvar |= SYNACK_DEFERRED;
            self.stats.accepts_deferred += 1;
            return false;
        }
        if is_deferred(c) {
            // Time-outs without a SYN+ACK are no sign of congestion.
            c.retries = u8::from(c.retries >= timeouts);
        }
        true
    }

    /// Returns the time-outs during which the listener of a half-open connection defers it.
    fn defer_accept(&self, idx: u32) -> u8 {
        self.listeners.get(listener_of(self.conns[idx].token)).options.socket.defer_accept
    }

    /// Lets a time-out of a deferred connection pass without a SYN+ACK, unless it is the last one. Returns
    /// whether it did.
    #[cold]
    pub(super) fn skips_syn_ack(&mut self, idx: u32) -> bool {
        let (timeouts, now_ms) = (self.defer_accept(idx), self.now_ms());
        let c = &mut self.conns[idx];
        let skips = c.retries.saturating_add(1) < timeouts && !c.has(Flags::ACTIVE_OPEN);
        if skips {
            c.retries += 1;
            c.last_rx = now_ms;
        }
        skips
    }

    /// Returns whether the deferral of a connection is not over.
    #[cold]
    pub(super) fn is_within_deferral(&self, idx: u32) -> bool {
        self.conns[idx].retries < self.defer_accept(idx)
    }
}

/// Returns whether an acknowledgement without data was dropped.
fn is_deferred(c: &Tcb) -> bool {
    c.rttvar & SYNACK_DEFERRED != 0
}
