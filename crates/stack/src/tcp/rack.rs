//! RACK: loss detection by time (RFC 8985 §6).

use super::sent_queue::{Delivery, Newest, SentQueue};
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;

/// Rounds a widened reordering window lasts without another DSACK (RFC 8985 §6.2 step 4).
const PERSIST_ROUNDS: u8 = 16;

/// Segments of reordering that are believed at the most (`tcp_max_reordering`).
const DEGREE_MAX: u32 = 300;

/// State of RACK.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rack {
    /// When the most recently sent delivered segment was sent, and its end.
    newest: Option<(Instant, SeqNumber)>,
    /// The round trip that is waited for: that of what was acknowledged last.
    rtt_us: u64,
    /// Highest sequence number known to have arrived (RACK.fack).
    pub highest: Option<SeqNumber>,
    /// An original transmission was delivered below a later one, or a retransmission was for nothing.
    pub reordering_seen: bool,
    /// How often the former was seen.
    pub reorderings: u32,
    /// How far below, in segments, at the most; 0 for what the configuration says.
    degree: u16,
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
    pub mss: u32,
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
        if let Some(low) = delivery.reordered {
            self.on_reordering(low, delivery.reorderings, input);
        }
        let Some(n) = delivery.newest else { return false };
        // An acknowledgement of a retransmitted segment may be one of the original: step 2 leaves those out.
        let ambiguous = |n: &Newest| {
            let too_soon = input.now.micros_since(n.at) < u64::from(input.min_rtt_us);
            n.retransmitted && (input.echo_is_older_than_retransmission || too_soon)
        };
        // What was sent later may have come back sooner. The longer of both, as on Linux, gives the rest of what was sent with the former as much time.
        let last = delivery.last.filter(|last| !ambiguous(last)).map(|last| last.at).or(delivery.last_at);
        if let Some(at) = last {
            self.rtt_us = input.now.micros_since(at);
        }
        if ambiguous(&n) {
            return false;
        }
        let newer = self.newest.is_none_or(|(at, end)| n.at > at || (n.at == at && n.end.gt(end)));
        if newer {
            self.newest = Some((n.at, n.end));
        }
        newer
    }

    /// An original transmission arrived behind others that were sent after it (`tcp_check_sack_reordering`).
    #[cold]
    fn on_reordering(&mut self, low: SeqNumber, kinds: u8, input: &RackInput) {
        self.reordering_seen = true;
        self.reorderings = self.reorderings.saturating_add(kinds.into());
        let bytes = self.highest.map_or(0, |highest| (highest - low).max(0) as u32);
        let segments = bytes.div_ceil(input.mss.max(1)).min(DEGREE_MAX);
        if segments > self.degree(input.dup_threshold) {
            self.degree = segments as u16;
        }
    }

    /// Segments by which others may be ahead of one that still arrives: what the configuration says, or more that was seen.
    pub fn degree(&self, configured: u32) -> u32 {
        configured.max(self.degree.into())
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
