//! RACK: loss detection by time (RFC 8985 §6).

use super::rtx_queue::{DeliveredSegment, Delivery, RtxQueue};
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;

/// Rounds a widened reordering window lasts without another DSACK (RFC 8985 §6.2 step 4).
const PERSIST_ROUNDS: u8 = 16;

/// Segments of reordering that are believed at the most (`tcp_max_reordering`).
const REORDERING_MAX: u32 = 300;

/// State of RACK.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rack {
    /// When the most recently sent delivered segment was sent, and its end.
    most_recent: Option<(Instant, SeqNumber)>,
    /// The round trip that is waited for: that of what was acknowledged last.
    rtt_us: u64,
    /// Highest sequence number known to have arrived (RACK.fack).
    pub fack: Option<SeqNumber>,
    /// An original transmission was delivered below a later one, or a retransmission was for nothing.
    pub reordering_seen: bool,
    /// How often the former was seen.
    pub reord_seen: u32,
    /// How far below, in segments, at the most; 0 for what the configuration says.
    reordering: u16,
    /// Multiplier of the reordering window, less one.
    reo_wnd_mult_minus_1: u8,
    reo_wnd_persist: u8,
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
    pub dup_thresh: u32,
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
            && self.fack.is_none_or(|old| h.gt(old))
        {
            self.fack = Some(h);
        }
        if let Some(low) = delivery.reord {
            self.on_reordering(low, delivery.reord_kinds, input);
        }
        let Some(n) = delivery.most_recent else { return false };
        // An acknowledgement of a retransmitted segment may be one of the original: step 2 leaves those out.
        let ambiguous = |n: &DeliveredSegment| {
            let too_soon = input.now.micros_since(n.xmit_ts) < u64::from(input.min_rtt_us);
            n.is_retransmitted && (input.echo_is_older_than_retransmission || too_soon)
        };
        // What was sent later may have come back sooner. The longer of both, as on Linux, gives the rest of what was sent with the former as much time.
        let last = delivery
            .last_in_sequence
            .filter(|last| !ambiguous(last))
            .map(|last| last.xmit_ts)
            .or(delivery.last_ackt);
        if let Some(at) = last {
            self.rtt_us = input.now.micros_since(at);
        }
        if ambiguous(&n) {
            return false;
        }
        let newer =
            self.most_recent.is_none_or(|(at, end)| n.xmit_ts > at || (n.xmit_ts == at && n.end_seq.gt(end)));
        if newer {
            self.most_recent = Some((n.xmit_ts, n.end_seq));
        }
        newer
    }

    /// An original transmission arrived behind others that were sent after it (`tcp_check_sack_reordering`).
    #[cold]
    fn on_reordering(&mut self, low: SeqNumber, kinds: u8, input: &RackInput) {
        self.reordering_seen = true;
        self.reord_seen = self.reord_seen.saturating_add(kinds.into());
        let bytes = self.fack.map_or(0, |highest| (highest - low).max(0) as u32);
        let segments = bytes.div_ceil(input.mss.max(1)).min(REORDERING_MAX);
        if segments > self.reordering(input.dup_thresh) {
            self.reordering = segments as u16;
        }
    }

    /// Segments by which others may be ahead of one that still arrives: what the configuration says, or more that was seen.
    pub fn reordering(&self, configured: u32) -> u32 {
        configured.max(self.reordering.into())
    }

    /// The same for an acknowledgement of the one segment in flight, never retransmitted and up to the highest sequence number known.
    #[inline]
    pub fn on_in_order(&mut self, at: Instant, end: SeqNumber, rtt_us: u64) {
        self.fack = Some(end);
        self.rtt_us = rtt_us;
        if self.most_recent.is_none_or(|(newest, last)| at > newest || (at == newest && end.gt(last))) {
            self.most_recent = Some((at, end));
        }
    }

    /// Step 4: a DSACK says that a retransmission was for nothing, so the reordering window was too small.
    pub fn on_dsack(&mut self, snd_una: SeqNumber, snd_nxt: SeqNumber) {
        if self.dsack_round.is_some_and(|round| snd_una.lt(round)) {
            return;
        }
        self.dsack_round = Some(snd_nxt);
        self.reo_wnd_mult_minus_1 = self.reo_wnd_mult_minus_1.saturating_add(1);
        self.reo_wnd_persist = PERSIST_ROUNDS;
        self.reordering_seen = true;
    }

    /// A recovery ended: the widened window lasts for a number of recoveries.
    pub fn on_recovery_end(&mut self) {
        self.reo_wnd_persist = self.reo_wnd_persist.saturating_sub(1);
        if self.reo_wnd_persist == 0 {
            self.reo_wnd_mult_minus_1 = 0;
        }
    }

    /// How long after its peers a segment may still arrive.
    fn reo_wnd(&self, input: &RackInput) -> Duration {
        if !self.reordering_seen && (input.in_recovery || input.sacked_out >= input.dup_thresh) {
            return Duration::ZERO;
        }
        if input.min_rtt_us == u32::MAX {
            return Duration::ZERO;
        }
        let step = u64::from(input.min_rtt_us / 4);
        Duration::from_micros(
            (step * (u64::from(self.reo_wnd_mult_minus_1) + 1)).min(u64::from(input.srtt_us)),
        )
    }

    /// Step 5: marks what is lost. Returns the number of segments and when to look again.
    pub fn detect_loss(&self, queue: &mut RtxQueue, input: &RackInput) -> (u32, Option<Instant>) {
        let Some(newest) = self.most_recent else { return (0, None) };
        queue.mark_lost_by_time(newest, Duration::from_micros(self.rtt_us) + self.reo_wnd(input), input.now)
    }
}
