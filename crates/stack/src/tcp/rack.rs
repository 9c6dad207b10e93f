//! RACK: loss detection by time (RFC 8985 §6).

use super::sent_queue::{Delivery, SentQueue};
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;

/// Rounds a widened reordering window lasts without another DSACK (RFC 8985 §6.2 step 4).
const PERSIST_ROUNDS: u8 = 16;

/// State of RACK.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rack {
    /// When the most recently sent delivered segment was sent, and its end.
    newest: Option<(Instant, SeqNumber)>,
    /// Its round trip time.
    rtt_us: u64,
    /// Highest sequence number known to have arrived (RACK.fack).
    pub highest: Option<SeqNumber>,
    /// An original transmission was delivered below a later one.
    pub reordering_seen: bool,
    /// Multiplier of the reordering window, less one.
    steps: u8,
    persist: u8,
    /// No other DSACK counts until this was acknowledged.
    dsack_round: Option<SeqNumber>,
}

/// What RACK reads of the connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RackInput {
    pub now: Instant,
    pub min_rtt_us: u32,
    pub srtt_us: u32,
    pub in_recovery: bool,
    pub sacked_out: u32,
    pub dup_threshold: u32,
    /// Timestamp echoed by this acknowledgement and that of the newest delivered segment's last transmission, if timestamps are on.
    pub echo_is_older_than_retransmission: bool,
}

impl Rack {
    /// Steps 1 to 3: takes over what an acknowledgement delivered. Returns whether the newest delivered segment is a newer one now.
    pub fn on_delivery(
        &mut self,
        delivery: &Delivery,
        highest: Option<SeqNumber>,
        input: &RackInput,
    ) -> bool {
        if let Some(h) = highest
            && self.highest.is_none_or(|old| h.gt(old))
        {
            self.highest = Some(h);
        }
        self.reordering_seen |= delivery.reordered;
        let Some(n) = delivery.newest else { return false };
        let rtt_us = input.now.micros_since(n.at);
        // An acknowledgement of a retransmitted segment may be one of the original: step 2 leaves those out.
        let too_soon = rtt_us < u64::from(input.min_rtt_us);
        if n.retransmitted && (input.echo_is_older_than_retransmission || too_soon) {
            return false;
        }
        self.rtt_us = rtt_us;
        let newer = self.newest.is_none_or(|(at, end)| n.at > at || (n.at == at && n.end.gt(end)));
        if newer {
            self.newest = Some((n.at, n.end));
        }
        newer
    }

    /// The same for an acknowledgement of the one segment in flight, never retransmitted and up to the highest sequence number known.
    #[inline]
    pub fn on_in_order(&mut self, at: Instant, end: SeqNumber, rtt_us: u64) {
        self.highest = Some(end);
        self.rtt_us = rtt_us;
        if self.newest.is_none_or(|(newest, last)| at > newest || (at == newest && end.gt(last))) {
            self.newest = Some((at, end));
        }
    }

    /// Step 4: a DSACK says that a retransmission was for nothing, so the reordering window was too small.
    pub fn on_dsack(&mut self, snd_una: SeqNumber, snd_nxt: SeqNumber) {
        if self.dsack_round.is_some_and(|round| snd_una.lt(round)) {
            return;
        }
        self.dsack_round = Some(snd_nxt);
        self.steps = self.steps.saturating_add(1);
        self.persist = PERSIST_ROUNDS;
        self.reordering_seen = true;
    }

    /// A recovery ended: the widened window lasts for a number of recoveries.
    pub fn on_recovery_end(&mut self) {
        self.persist = self.persist.saturating_sub(1);
        if self.persist == 0 {
            self.steps = 0;
        }
    }

    /// How long after its peers a segment may still arrive.
    fn reorder_window(&self, input: &RackInput) -> Duration {
        if !self.reordering_seen && (input.in_recovery || input.sacked_out >= input.dup_threshold) {
            return Duration::ZERO;
        }
        if input.min_rtt_us == u32::MAX {
            return Duration::ZERO;
        }
        let step = u64::from(input.min_rtt_us / 4);
        Duration::from_micros((step * (u64::from(self.steps) + 1)).min(u64::from(input.srtt_us)))
    }

    /// Step 5: marks what is lost. Returns the number of segments and when to look again.
    pub fn detect_loss(&self, queue: &mut SentQueue, input: &RackInput) -> (u32, Option<Instant>) {
        let Some(newest) = self.newest else { return (0, None) };
        queue.mark_lost_by_time(
            newest,
            Duration::from_micros(self.rtt_us) + self.reorder_window(input),
            input.now,
        )
    }
}
