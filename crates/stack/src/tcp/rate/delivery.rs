//! Samples of the delivery rate (draft-cheng-iccrg-delivery-rate-estimation, as `tcp_rate.c` of Linux takes
//! them): how much was delivered between the transmission of a segment and its acknowledgement.
//!
//! ```text
//!   first_tx_mstamp ──────── send interval ────────► xmit_ts
//!          delivered_mstamp (then) ──── ack interval ────► now
//! ```
//!
//! The longer one of the two intervals counts, so that compressed acknowledgements do not exaggerate the
//! rate. Segments that were sent in one call share a record, since the connection's state is equal for all of
//! them.

use crate::tcp::active::ActiveConn;
use crate::tcp::conn::Tcb;
use crate::tcp::rtx_queue::{DeliveredSegment, Delivery, EVER_RETRANS, RtxQueue};
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Records for which an unused state keeps its memory.
const SPARE_RECORDS: usize = 64;

/// Records of transmissions that are kept at most. Segments of older records give no samples.
const RECORDS_MAX: usize = 8192;

/// State of the connection when segments were sent.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct TxRecord {
    xmit_ts: Instant,
    first_tx_mstamp: Instant,
    delivered_mstamp: Instant,
    delivered: u32,
    is_app_limited: bool,
}

/// The state from which samples are computed; its fields have the names of Linux's `struct tcp_sock`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct DeliveryRate {
    /// Segments delivered since this state was created.
    pub delivered: u32,
    /// When `delivered` last grew, or when the current flight began.
    pub delivered_mstamp: Instant,
    /// When the most recently sent segment of those delivered was sent, or when the current flight began.
    first_tx_mstamp: Instant,
    /// Until `delivered` exceeds this number, segments are sent by an application that does not fill the
    /// window; 0 if the application is not the limit.
    pub app_limited: u32,
    /// True if a full-sized segment waited to be sent after the last output.
    pub has_more: bool,
    /// Segments and µs of the last sample that the application did not limit, or the best one that it
    /// limited.
    rate_delivered: u32,
    rate_interval_us: u64,
    is_rate_network_limited: bool,
    /// In order of time.
    records: VecDeque<TxRecord>,
}

/// Facts from before an acknowledgement was processed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AckBefore {
    pub snd_una: SeqNumber,
    pub in_flight: u32,
    /// Segments ever marked lost.
    pub lost: u32,
    /// When the retransmission timer was due.
    pub timer_at: Instant,
    /// The transmission of which the acknowledgement covers only some segments.
    partial: Option<DeliveredSegment>,
}

impl AckBefore {
    /// Collects the facts before `ack` is processed.
    pub fn of(c: &Tcb, b: &ActiveConn, ack: SeqNumber) -> Self {
        let partial = b.rtx_queue.entry_around(ack).filter(|entry| {
            // At least one complete segment is covered.
            entry.segments > 1 && (ack - entry.seq) as u32 >= c.mss()
        });
        Self {
            snd_una: c.snd_una,
            in_flight: b.rtx_queue.in_flight(),
            lost: b.rtx_queue.lost,
            timer_at: b.timer_at,
            partial: partial.map(DeliveredSegment::from),
        }
    }
}

/// Returns the round-trip time in µs of the latest sent segment that was acknowledged selectively, else of
/// the latest sent one that was acknowledged cumulatively (`ca_rtt_us`). If retransmitted data are
/// acknowledged, the acknowledgement of the other data waited for them, and a segment that was marked lost
/// may have arrived long before its report.
fn ca_rtt_us(now: Instant, delivery: &Delivery) -> Option<u32> {
    let is_prompt = !delivery.has_retrans_acked && delivery.sacked == 0;
    let at = delivery.last_sackt.or(delivery.last_ackt.filter(|_| is_prompt))?;
    Some(now.micros_since(at) as u32)
}

/// A sample (Linux's `struct rate_sample`).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RateSample {
    /// `delivered` when the segment was sent.
    pub prior_delivered: u32,
    /// Segments delivered since then; `None` without a sample.
    pub delivered: Option<u32>,
    /// The time that this took in µs; `None` if it is too short to be meaningful.
    pub interval_us: Option<u64>,
    /// Round-trip time in µs of the latest sent segment that was never retransmitted.
    pub rtt_us: Option<u32>,
    /// Segments that the acknowledgement marked lost.
    pub losses: u32,
    /// Segments that the acknowledgement delivered.
    pub acked_sacked: u32,
    pub prior_in_flight: u32,
    /// True if the segment was sent while the application was the limit.
    pub is_app_limited: bool,
    /// True if the peer has probably delayed the acknowledgement.
    pub is_ack_delayed: bool,
}

impl DeliveryRate {
    /// Returns the state to its initial value, with intervals that begin at `now`.
    pub(super) fn reset(&mut self, now: Instant) {
        let mut records = core::mem::take(&mut self.records);
        records.clear();
        if records.capacity() > SPARE_RECORDS {
            records = VecDeque::new();
        }
        *self = Self { records, first_tx_mstamp: now, delivered_mstamp: now, ..Self::default() };
    }

    /// Releases the memory of the queue of records if it is empty.
    pub fn release_memory(&mut self) {
        if self.records.is_empty() {
            self.records = VecDeque::new();
        }
    }

    /// Returns the bytes of memory of the queue of records.
    pub fn list_bytes(&self) -> usize {
        self.records.capacity() * size_of::<TxRecord>()
    }

    /// Records the state for segments that are sent at `now`, while `packets_out` segments are in flight.
    /// Returns whether a record was added.
    pub(super) fn on_send(&mut self, now: Instant, packets_out: u32) -> bool {
        if packets_out == 0 {
            // The flight begins: the idle time before it counts for neither interval.
            self.first_tx_mstamp = now;
            self.delivered_mstamp = now;
        }
        if self.records.back().is_some_and(|last| last.xmit_ts == now) {
            return false;
        }
        if self.records.len() >= RECORDS_MAX {
            self.records.pop_front();
        }
        self.records.push_back(TxRecord {
            xmit_ts: now,
            first_tx_mstamp: self.first_tx_mstamp,
            delivered_mstamp: self.delivered_mstamp,
            delivered: self.delivered,
            is_app_limited: self.app_limited != 0,
        });
        true
    }

    /// Removes the newest record, because nothing was sent.
    pub(super) fn drop_unused_record(&mut self) {
        self.records.pop_back();
    }

    /// Removes records that no segment in flight refers to.
    pub fn prune(&mut self, queue: &RtxQueue) {
        let Some(front) = queue.front() else { return self.records.clear() };
        if !front.has(EVER_RETRANS) {
            // Original transmissions are in order of time, and retransmissions are later than all of them.
            while self.records.front().is_some_and(|record| record.xmit_ts < front.xmit_ts) {
                self.records.pop_front();
            }
        }
    }

    /// Takes the sample of an acknowledgement (`tcp_rate_skb_delivered`, `tcp_rate_gen`).
    pub fn sample(
        &mut self,
        now: Instant,
        before: &AckBefore,
        delivery: &Delivery,
        c: &Tcb,
        lost: u32,
    ) -> RateSample {
        let mut sample = RateSample {
            losses: lost.wrapping_sub(before.lost),
            acked_sacked: delivery.delivered,
            prior_in_flight: before.in_flight,
            rtt_us: ca_rtt_us(now, delivery),
            ..RateSample::default()
        };
        if delivery.delivered > 0 {
            self.delivered = self.delivered.wrapping_add(delivery.delivered);
            self.delivered_mstamp = now;
        }
        let newest = match (delivery.most_recent, before.partial) {
            (Some(a), Some(b)) if b.xmit_ts > a.xmit_ts => Some(b),
            (a, b) => a.or(b),
        };
        let record = newest.and_then(|newest| self.record_at(newest.xmit_ts));
        if self.app_limited != 0 && (self.delivered.wrapping_sub(self.app_limited) as i32) > 0 {
            // The segments that the application limited are acknowledged.
            self.app_limited = 0;
        }
        let Some(record) = record else { return sample };
        let xmit_ts = record.xmit_ts;
        self.first_tx_mstamp = xmit_ts;
        sample.prior_delivered = record.delivered;
        sample.is_app_limited = record.is_app_limited;
        let delivered = self.delivered.wrapping_sub(record.delivered);
        sample.delivered = Some(delivered);
        // A single segment that is smaller than the full size: its acknowledgement waited for a second one.
        sample.is_ack_delayed = delivered == 1 && ((c.snd_una - before.snd_una) as u32) < c.mss();
        let send_us = xmit_ts.micros_since(record.first_tx_mstamp);
        let ack_us = now.micros_since(record.delivered_mstamp);
        let interval_us = send_us.max(ack_us);
        if interval_us < u64::from(c.min_rtt) || interval_us == 0 {
            // Nothing is delivered faster than in a round-trip time: the segment was marked lost by mistake.
            return sample;
        }
        sample.interval_us = Some(interval_us);
        let is_better = u128::from(delivered) * u128::from(self.rate_interval_us)
            >= u128::from(self.rate_delivered) * u128::from(interval_us);
        if !sample.is_app_limited || is_better {
            (self.rate_delivered, self.rate_interval_us) = (delivered, interval_us);
            self.is_rate_network_limited = !sample.is_app_limited;
        }
        sample
    }

    fn record_at(&self, xmit_ts: Instant) -> Option<TxRecord> {
        let at = self.records.partition_point(|record| record.xmit_ts < xmit_ts);
        self.records.get(at).copied().filter(|record| record.xmit_ts == xmit_ts)
    }

    /// Records that the application is the limit while `in_flight` segments are in flight
    /// (`tcp_rate_check_app_limited`).
    pub fn set_app_limited(&mut self, in_flight: u32) {
        self.app_limited = self.delivered.wrapping_add(in_flight).max(1);
    }

    /// Returns the delivery rate in bytes per second (`tcp_compute_delivery_rate`); 0 before the first
    /// sample.
    pub fn bytes_per_second(&self, mss: u32) -> u64 {
        (u64::from(self.rate_delivered) * u64::from(mss) * 1_000_000)
            .checked_div(self.rate_interval_us)
            .unwrap_or(0)
    }

    /// Returns whether the application limited the sample that [`bytes_per_second`](Self::bytes_per_second)
    /// reports.
    pub fn is_rate_app_limited(&self) -> bool {
        !self.is_rate_network_limited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1000;

    /// A connection that sends one segment per call and is told what arrives.
    struct Flow {
        rate: DeliveryRate,
        c: Tcb,
        out: u32,
    }

    impl Flow {
        fn new() -> Self {
            let mut c = Tcb { min_rtt: 1000, ..Tcb::vacant() };
            (c.peer_mss, c.pmtu) = (MSS as u16, 1500);
            Self { rate: DeliveryRate::default(), c, out: 0 }
        }

        fn send(&mut self, ms: u64) {
            self.rate.on_send(Instant::from_millis(ms), self.out);
            self.out += 1;
        }

        fn ack(&mut self, ms: u64, sent_ms: u64, segments: u32) -> RateSample {
            let xmit_ts = Instant::from_millis(sent_ms);
            let newest = DeliveredSegment { xmit_ts, end_seq: SeqNumber(0), is_retransmitted: false };
            let delivery = Delivery {
                delivered: segments,
                most_recent: Some(newest),
                last_ackt: Some(xmit_ts),
                ..Delivery::default()
            };
            let before = AckBefore {
                snd_una: self.c.snd_una,
                in_flight: self.out,
                lost: 0,
                timer_at: Instant::MAX,
                partial: None,
            };
            self.c.snd_una += segments * MSS;
            self.out -= segments;
            self.rate.sample(Instant::from_millis(ms), &before, &delivery, &self.c, 0)
        }
    }

    #[test]
    fn rate_counts_the_longer_interval() {
        let mut flow = Flow::new();
        for ms in [100, 101, 102, 103] {
            flow.send(ms);
        }
        let first = flow.ack(110, 100, 1);
        assert_eq!((first.delivered, first.interval_us, first.rtt_us), (Some(1), Some(10_000), Some(10_000)));
        // Three acknowledgements that were compressed into one: sent in 3 ms, acknowledged 12 ms after the
        // flight began.
        let rest = flow.ack(112, 103, 3);
        assert_eq!((rest.delivered, rest.interval_us), (Some(4), Some(12_000)));
        assert_eq!(flow.rate.bytes_per_second(MSS), 4 * 1_000_000_000 / 12_000);
        assert!(!flow.rate.is_rate_app_limited());
    }

    #[test]
    fn idle_time_does_not_lower_the_rate() {
        let mut flow = Flow::new();
        flow.send(100);
        flow.ack(110, 100, 1);
        flow.send(9000);
        assert_eq!(flow.ack(9010, 9000, 1).interval_us, Some(10_000));
    }

    #[test]
    fn app_limited_samples_are_marked_until_delivered() {
        let mut flow = Flow::new();
        flow.send(100);
        flow.send(101);
        flow.rate.set_app_limited(2);
        flow.send(102);
        assert!(!flow.ack(111, 101, 2).is_app_limited);
        assert_ne!(flow.rate.app_limited, 0);
        assert!(flow.ack(112, 102, 1).is_app_limited);
        assert_eq!(flow.rate.app_limited, 0);
        flow.send(113);
        assert!(!flow.ack(123, 113, 1).is_app_limited);
    }

    #[test]
    fn too_short_interval_gives_no_rate() {
        let mut flow = Flow::new();
        flow.c.min_rtt = 20_000;
        flow.send(100);
        let sample = flow.ack(110, 100, 1);
        assert_eq!((sample.delivered, sample.interval_us), (Some(1), None));
        assert_eq!(flow.rate.bytes_per_second(MSS), 0);
    }

    #[test]
    fn round_trip_time_excludes_time_of_recovery() {
        let (now, early, late) =
            (Instant::from_millis(900), Instant::from_millis(100), Instant::from_millis(880));
        let cumulative = Delivery { delivered: 2, last_ackt: Some(early), ..Delivery::default() };
        assert_eq!(ca_rtt_us(now, &cumulative), Some(800_000));
        let filled = Delivery { has_retrans_acked: true, ..cumulative };
        assert_eq!(ca_rtt_us(now, &filled), None);
        assert_eq!(ca_rtt_us(now, &Delivery { last_sackt: Some(late), ..filled }), Some(20_000));
        // The only report of a segment that was marked lost.
        assert_eq!(ca_rtt_us(now, &Delivery { sacked: 1, ..cumulative }), None);
    }

    #[test]
    fn memory_of_many_records_is_released() {
        let mut flow = Flow::new();
        for ms in 0..1000 {
            flow.send(1 + ms);
        }
        flow.rate.release_memory();
        assert!(flow.rate.list_bytes() >= 1000 * size_of::<TxRecord>(), "they are in use");
        flow.rate.reset(Instant::from_millis(2000));
        assert_eq!(flow.rate.list_bytes(), 0);
        flow.send(2000);
        flow.rate.reset(Instant::from_millis(2001));
        assert_ne!(flow.rate.list_bytes(), 0, "few records cost nothing");
        flow.rate.release_memory();
        assert_eq!(flow.rate.list_bytes(), 0);
    }

    // limit: transmissions of a paced connection that can give a sample
    #[test]
    fn oldest_records_are_dropped_beyond_maximum() {
        let mut flow = Flow::new();
        for ms in 0..RECORDS_MAX as u64 + 1 {
            flow.send(1 + ms);
        }
        assert_eq!(flow.rate.records.len(), RECORDS_MAX);
        assert_eq!(flow.ack(9000, 1, 1).delivered, None);
        assert!(flow.ack(9000, 2, 1).delivered.is_some());
    }
}
