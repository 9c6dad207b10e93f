//! RACK: time-based loss detection (RFC 8985 §6).

use super::rtx_queue::{DeliveredSegment, Delivery, RtxQueue, SentAt};
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Recoveries for which a widened reordering window lasts without another DSACK (RFC 8985 §6.2, step 4).
const PERSIST_ROUNDS: u8 = 16;

/// Largest reordering degree in segments (`tcp_max_reordering`).
const REORDERING_MAX: u32 = 300;

/// State of RACK for one connection.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Rack {
    /// Transmission time (RACK.xmit_ts) and end (RACK.end_seq) of the most recently sent segment that was
    /// delivered.
    most_recent: Option<SentAt>,
    /// Round-trip time of the last segment in sequence of the latest delivery (RACK.rtt), in µs. Segments are
    /// given this time plus the reordering window to arrive.
    rtt_us: u64,
    /// Highest sequence number that is known to have arrived (RACK.fack).
    pub fack: Option<SeqNumber>,
    /// True if an original transmission was delivered below a later one, or a retransmission was spurious
    /// (RACK.reordering_seen).
    pub reordering_seen: bool,
    /// How many times an original transmission was delivered below a later one (`reord_seen`).
    pub reord_seen: u32,
    /// Largest reordering degree observed, in segments; 0 if it never exceeded the configured one.
    reordering: u16,
    /// Multiplier of the reordering window (RACK.reo_wnd_mult), less one.
    reo_wnd_mult_minus_1: u8,
    /// Recoveries for which the widened window still lasts (RACK.reo_wnd_persist).
    reo_wnd_persist: u8,
    /// No other DSACK is counted before this sequence number is acknowledged (RACK.dsack_round).
    dsack_round: Option<SeqNumber>,
}

/// Connection state that RACK reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RackInput {
    pub now: Instant,
    /// Smallest round-trip time in µs; `u32::MAX` before the first sample.
    pub min_rtt_us: u32,
    pub srtt_us: u32,
    pub in_recovery: bool,
    pub sacked_out: u32,
    pub dup_thresh: u32,
    pub mss: u32,
    /// True if the acknowledgement echoes a timestamp from before the last transmission of the most recent
    /// delivered segment, so it may acknowledge the original transmission. False without timestamps.
    pub echo_is_older_than_retransmission: bool,
}

impl Rack {
    /// Processes what an acknowledgement delivered (steps 1 to 3).
    pub fn on_delivery(&mut self, delivery: &Delivery, fack: Option<SeqNumber>, input: &RackInput) {
        if let Some(fack) = fack
            && self.fack.is_none_or(|known| fack.gt(known))
        {
            self.fack = Some(fack);
        }
        if let Some(low) = delivery.reord {
            self.on_reordering(low, delivery.reord_kinds, input);
        }
        let Some(n) = delivery.most_recent else { return };
        // An acknowledgement of a retransmitted segment may be one of the original transmission: step 2
        // ignores such segments.
        let ambiguous = |n: &DeliveredSegment| {
            let too_soon = input.now.micros_since(n.xmit_ts) < u64::from(input.min_rtt_us);
            n.is_retransmitted && (input.echo_is_older_than_retransmission || too_soon)
        };
        // A segment that was sent later may be acknowledged sooner. As on Linux, the round-trip time is that
        // of the last segment in sequence, which gives the segments sent with it as much time.
        let last = delivery
            .last_in_sequence
            .filter(|last| !ambiguous(last))
            .map(|last| last.xmit_ts)
            .or(delivery.last_ackt);
        if let Some(at) = last {
            self.rtt_us = input.now.micros_since(at);
        }
        if ambiguous(&n) {
            return;
        }
        let sent_at = SentAt { xmit_ts: n.xmit_ts, end_seq: n.end_seq };
        if self.most_recent.is_none_or(|known| sent_at.sent_after(known.xmit_ts, known.end_seq)) {
            self.most_recent = Some(sent_at);
        }
    }

    /// Records that an original transmission arrived after segments that were sent later
    /// (`tcp_check_sack_reordering`).
    #[cold]
    fn on_reordering(&mut self, low: SeqNumber, kinds: u8, input: &RackInput) {
        self.reordering_seen = true;
        self.reord_seen = self.reord_seen.saturating_add(kinds.into());
        let bytes = self.fack.map_or(0, |fack| (fack - low).max(0) as u32);
        let segments = bytes.div_ceil(input.mss.max(1)).min(REORDERING_MAX);
        if segments > self.reordering(input.dup_thresh) {
            self.reordering = segments as u16;
        }
    }

    /// Returns the reordering degree in segments: the configured one, or a larger one that was observed.
    pub fn reordering(&self, configured: u32) -> u32 {
        configured.max(self.reordering.into())
    }

    /// Processes an acknowledgement of exactly one transmission, which was never retransmitted and ends at
    /// the highest sequence number known to have arrived.
    #[inline]
    pub fn on_in_order(&mut self, xmit_ts: Instant, end_seq: SeqNumber, rtt_us: u64) {
        self.fack = Some(end_seq);
        self.rtt_us = rtt_us;
        let sent_at = SentAt { xmit_ts, end_seq };
        if self.most_recent.is_none_or(|known| sent_at.sent_after(known.xmit_ts, known.end_seq)) {
            self.most_recent = Some(sent_at);
        }
    }

    /// Widens the reordering window, because a DSACK reports that a retransmission was spurious (step 4).
    pub fn on_dsack(&mut self, snd_una: SeqNumber, snd_nxt: SeqNumber) {
        if self.dsack_round.is_some_and(|round| snd_una.lt(round)) {
            return;
        }
        self.dsack_round = Some(snd_nxt);
        self.reo_wnd_mult_minus_1 = self.reo_wnd_mult_minus_1.saturating_add(1);
        self.reo_wnd_persist = PERSIST_ROUNDS;
        self.reordering_seen = true;
    }

    /// Counts the end of a recovery: a widened window lasts for a number of recoveries.
    pub fn on_recovery_end(&mut self) {
        self.reo_wnd_persist = self.reo_wnd_persist.saturating_sub(1);
        if self.reo_wnd_persist == 0 {
            self.reo_wnd_mult_minus_1 = 0;
        }
    }

    /// Returns how much later than the segments sent with it a segment may still arrive (RACK.reo_wnd).
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

    /// Marks lost segments (step 5). Returns the number of newly marked segments, and when to check again if
    /// some may have been reordered.
    pub fn detect_loss(&self, queue: &mut RtxQueue, input: &RackInput) -> (u32, Option<Instant>) {
        let Some(most_recent) = self.most_recent else { return (0, None) };
        queue.mark_lost_by_time(
            most_recent,
            Duration::from_micros(self.rtt_us) + self.reo_wnd(input),
            input.now,
        )
    }
}
