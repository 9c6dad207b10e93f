//! One direction of an impaired link: frames enter with the current time, and leave when they arrive, unless
//! they are lost.

use super::spec::{Impairment, Probability};
use super::stats::DirectionStats;
use crate::random::Random;
use ginnel_stack::time::Instant;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Maximum number of buffers kept for reuse: more than a link with a usual delay holds, but a limited amount
/// of memory.
const SPARE_BUFFERS_MAX: usize = 4096;

/// A frame in flight.
struct InFlightFrame {
    arrival: Instant,
    /// Sequence number, which orders frames with equal arrival times.
    number: u64,
    frame: Vec<u8>,
}

impl PartialEq for InFlightFrame {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for InFlightFrame {}

impl PartialOrd for InFlightFrame {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for InFlightFrame {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

impl InFlightFrame {
    fn key(&self) -> (Instant, u64) {
        (self.arrival, self.number)
    }
}

/// Random decisions about one frame.
///
/// All values are drawn for each frame, whatever the configuration, so that the faults of the n-th frame
/// depend on the seed and n alone.
struct FaultSample {
    lost: bool,
    duplicated: bool,
    reordered: bool,
    corrupted: bool,
    /// Uniform in −1 … 1 times the jitter, in units of 2⁻³¹.
    jitter: i64,
    /// Random value that selects the bit to flip.
    bit: u64,
}

/// One direction of a link.
pub(super) struct Pipeline {
    impairment: Impairment,
    random: Random,
    stats: DirectionStats,
    /// True if the last frame was lost in a burst of losses (with `loss_burst`).
    in_burst: bool,
    /// Time at which the link has transmitted the whole queue.
    link_free_at: Instant,
    /// End of transmission and length of each queued frame.
    queue: VecDeque<(Instant, usize)>,
    queued_bytes: u64,
    /// Latest arrival of a frame that was not reordered; later frames do not arrive before it.
    last_arrival: Instant,
    in_flight: BinaryHeap<Reverse<InFlightFrame>>,
    in_flight_bytes: u64,
    last_number: u64,
    spare_buffers: Vec<Vec<u8>>,
}

impl Pipeline {
    pub(super) fn new(impairment: Impairment, seed: u64, stats: DirectionStats) -> Self {
        Self {
            impairment,
            random: Random::new(seed),
            stats,
            in_burst: false,
            link_free_at: Instant::ZERO,
            queue: VecDeque::new(),
            queued_bytes: 0,
            last_arrival: Instant::ZERO,
            in_flight: BinaryHeap::new(),
            in_flight_bytes: 0,
            last_number: 0,
            spare_buffers: Vec::new(),
        }
    }

    /// Offers a wire frame to the link.
    pub(super) fn offer(&mut self, now: Instant, frame: &[u8]) {
        self.stats.offered.fetch_add(1, Relaxed);
        let sample = self.sample();
        if sample.lost {
            self.stats.lost.fetch_add(1, Relaxed);
            return;
        }
        let mut copy = self.spare_buffers.pop().unwrap_or_default();
        copy.extend_from_slice(frame);
        if sample.corrupted {
            self.corrupt(&mut copy, sample.bit);
        }
        if sample.duplicated {
            self.stats.duplicated.fetch_add(1, Relaxed);
            let mut duplicate = self.spare_buffers.pop().unwrap_or_default();
            duplicate.extend_from_slice(&copy);
            self.enqueue(now, duplicate, &sample);
        }
        self.enqueue(now, copy, &sample);
    }

    /// Returns the arrival time of the next frame.
    pub(super) fn next_arrival(&self) -> Option<Instant> {
        self.in_flight.peek().map(|Reverse(next)| next.arrival)
    }

    /// Returns the next frame that has arrived. The caller gives the buffer back with `recycle`.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Vec<u8>> {
        if self.next_arrival()? > now {
            return None;
        }
        let Reverse(next) = self.in_flight.pop()?;
        self.in_flight_bytes -= next.frame.len() as u64;
        self.stats.delivered.fetch_add(1, Relaxed);
        Some(next.frame)
    }

    /// Returns the next frame that has arrived, without removing it.
    pub(super) fn peek(&self, now: Instant) -> Option<&[u8]> {
        self.in_flight.peek().filter(|Reverse(next)| next.arrival <= now).map(|Reverse(next)| &next.frame[..])
    }

    pub(super) fn recycle(&mut self, mut buffer: Vec<u8>) {
        if self.spare_buffers.len() < SPARE_BUFFERS_MAX {
            buffer.clear();
            self.spare_buffers.push(buffer);
        }
    }

    fn sample(&mut self) -> FaultSample {
        FaultSample {
            lost: self.draw_loss(),
            duplicated: self.draw_event(self.impairment.duplicate),
            reordered: self.draw_event(self.impairment.reorder),
            corrupted: self.draw_event(self.impairment.corrupt),
            jitter: (self.random.next_u64() >> 32) as i64 - (1 << 31),
            bit: self.random.next_u64(),
        }
    }

    fn draw_event(&mut self, probability: Probability) -> bool {
        self.random.below(1_000_000_000) < u64::from(probability.billionths())
    }

    fn draw_loss(&mut self) -> bool {
        let Some(burst) = self.impairment.loss_burst else { return self.draw_event(self.impairment.loss) };
        // Gilbert's model: all frames are lost in the bad state and none in the good state. The bad state
        // ends with probability 1 / mean length; the good state ends so that the share of time in the bad
        // state is `loss`.
        let draw = self.random.unit();
        let (loss, length) = (self.impairment.loss.share(), f64::from(burst) / 1000.0);
        self.in_burst = if self.in_burst {
            loss >= 1.0 || draw >= 1.0 / length
        } else {
            loss >= 1.0 || draw < loss / (1.0 - loss) / length
        };
        self.in_burst
    }

    fn corrupt(&mut self, frame: &mut [u8], bit: u64) {
        let from = self.impairment.corrupt_from as usize;
        let Some(part) = frame.get_mut(from..).filter(|part| !part.is_empty()) else { return };
        let bit = ((u128::from(bit) * (part.len() as u128 * 8)) >> 64) as usize;
        part[bit / 8] ^= 1 << (bit % 8);
        self.stats.corrupted.fetch_add(1, Relaxed);
    }

    /// Returns how many frames waited for transmission, or were being transmitted, at the time of the last
    /// [`Pipeline::remove_sent`].
    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Returns the time at which the last bit of a queued frame has left: of the frame with `before` frames
    /// in front of it, or `None` if the queue is shorter.
    pub(super) fn sent_at(&self, before: usize) -> Option<Instant> {
        self.queue.get(before).map(|&(sent, _)| sent)
    }

    /// Removes from the queue the frames whose last bit has left by `now`.
    pub(super) fn remove_sent(&mut self, now: Instant) {
        while self.queue.front().is_some_and(|&(sent, _)| sent <= now) {
            self.queued_bytes -= self.queue.pop_front().map_or(0, |(_, len)| len as u64);
        }
    }

    fn enqueue(&mut self, now: Instant, frame: Vec<u8>, sample: &FaultSample) {
        self.remove_sent(now);
        let len = frame.len() as u64;
        let is_full = self.queue.len() >= self.impairment.limit as usize
            || self.queued_bytes + len > self.impairment.limit_bytes;
        if is_full {
            self.stats.queue_full.fetch_add(1, Relaxed);
            return self.recycle(frame);
        }
        if self.in_flight_bytes + len > self.impairment.memory {
            self.stats.out_of_memory.fetch_add(1, Relaxed);
            return self.recycle(frame);
        }
        let sent = self.transmit(now, frame.len());
        let arrival = self.arrival(sent, sample);
        self.last_number += 1;
        self.in_flight_bytes += len;
        self.in_flight.push(Reverse(InFlightFrame { arrival, number: self.last_number, frame }));
    }

    /// Queues a frame for transmission. Returns the time at which its last bit has left.
    fn transmit(&mut self, now: Instant, len: usize) -> Instant {
        let (rate, gap) = (self.impairment.rate, self.impairment.gap);
        if rate.is_none() && gap.is_zero() {
            return now;
        }
        let nanos = rate.map_or(0, |rate| (len as u128 * 8 * 1_000_000_000).div_ceil(u128::from(rate)));
        let start = self.link_free_at.max(now);
        let sent = start + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.link_free_at = sent.max(start + gap);
        self.queue.push_back((sent, len));
        self.queued_bytes += len as u64;
        sent
    }

    fn arrival(&mut self, sent: Instant, sample: &FaultSample) -> Instant {
        let delay = self.impairment.delay.as_nanos() as i128;
        let jitter = (self.impairment.jitter.as_nanos() as i128 * i128::from(sample.jitter)) >> 31;
        let arrival = sent + Duration::from_nanos(u64::try_from(delay + jitter).unwrap_or(0));
        if sample.reordered {
            self.stats.reordered.fetch_add(1, Relaxed);
            return arrival + self.impairment.reorder_delay;
        }
        self.last_arrival = self.last_arrival.max(arrival);
        self.last_arrival
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::LinkSpec;
    use std::sync::Arc;

    fn pipeline(spec: &str, seed: u64) -> Pipeline {
        Pipeline::new(LinkSpec::parse(spec).expect("valid").up, seed, Arc::default())
    }

    fn at(micros: u64) -> Instant {
        Instant::from_micros(micros)
    }

    fn frame(number: u32, len: usize) -> Vec<u8> {
        let mut frame = vec![0; len];
        frame[..4].copy_from_slice(&number.to_be_bytes());
        frame
    }

    /// Returns arrival time and number of all frames that arrive, in order.
    fn drain(pipeline: &mut Pipeline) -> Vec<(u64, u32)> {
        let mut arrived = Vec::new();
        while let Some(next) = pipeline.next_arrival() {
            if next > Instant::ZERO {
                assert!(pipeline.pop(Instant::from_nanos(next.as_nanos() - 1)).is_none(), "too early");
            }
            let frame = pipeline.pop(next).expect("due");
            arrived.push((next.as_micros(), u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]])));
            pipeline.recycle(frame);
        }
        arrived
    }

    #[test]
    fn perfect_link_delivers_immediately_in_order() {
        let mut link = pipeline("", 1);
        (0..100).for_each(|number| link.offer(at(7), &frame(number, 100)));
        assert_eq!(drain(&mut link), (0..100).map(|number| (7, number)).collect::<Vec<_>>());
    }

    #[test]
    fn rate_and_delay_add_up() {
        let mut link = pipeline("rate=8mbit delay=10ms", 1);
        (0..3).for_each(|number| link.offer(at(0), &frame(number, 1000)));
        link.offer(at(50_000), &frame(3, 500));
        assert_eq!(drain(&mut link), [(11_000, 0), (12_000, 1), (13_000, 2), (60_500, 3)]);
    }

    #[test]
    fn a_gap_keeps_frames_apart() {
        let mut link = pipeline("gap=2ms delay=10ms", 1);
        (0..3).for_each(|number| link.offer(at(0), &frame(number, 1000)));
        link.offer(at(5_000), &frame(3, 1000));
        link.offer(at(50_000), &frame(4, 1000));
        let expected = [(10_000, 0), (12_000, 1), (14_000, 2), (16_000, 3), (60_000, 4)];
        assert_eq!(drain(&mut link), expected);
        // The rate is slower than the gap for long frames, and faster for short ones.
        let mut link = pipeline("gap=2ms rate=8mbit", 1);
        for (number, len) in [(0, 500), (1, 3_000), (2, 500), (3, 500)] {
            link.offer(at(0), &frame(number, len));
        }
        assert_eq!(drain(&mut link), [(500, 0), (5_000, 1), (5_500, 2), (7_500, 3)]);
    }

    // limit: frames in front of a slow link
    #[test]
    fn a_gap_makes_frames_wait_in_the_queue() {
        let mut link = pipeline("gap=1ms limit=10", 1);
        (0..20).for_each(|number| link.offer(at(0), &frame(number, 100)));
        assert_eq!((link.stats.queue_full.load(Relaxed), drain(&mut link).len()), (9, 11));
    }

    // limit: frames in front of a slow link
    #[test]
    fn queue_limit_excludes_frames_in_flight() {
        let mut link = pipeline("rate=8mbit delay=1s limit=10", 1);
        (0..20).for_each(|number| link.offer(at(0), &frame(number, 1000)));
        assert_eq!(link.stats.queue_full.load(Relaxed), 10);
        link.offer(at(1_000), &frame(20, 1000));
        link.offer(at(1_000), &frame(21, 1000));
        assert_eq!(link.stats.queue_full.load(Relaxed), 11, "the queue accepts a frame after one was sent");
        assert_eq!(drain(&mut link).len(), 11);

        let mut link = pipeline("rate=8mbit limit-bytes=2500B", 1);
        (0..5).for_each(|number| link.offer(at(0), &frame(number, 1000)));
        assert_eq!(link.stats.queue_full.load(Relaxed), 3);
    }

    // limit: bytes of delayed frames
    #[test]
    fn memory_is_bounded_even_without_a_rate() {
        let mut link = pipeline("delay=1s memory=64KiB", 1);
        (0..100).for_each(|number| link.offer(at(0), &frame(number, 1024)));
        assert_eq!(link.stats.out_of_memory.load(Relaxed), 36);
        assert_eq!(drain(&mut link).len(), 64);
        link.offer(at(2_000_000), &frame(0, 1024));
        assert_eq!(drain(&mut link).len(), 1);
    }

    #[test]
    fn jitter_spreads_but_does_not_reorder() {
        let mut link = pipeline("delay=10ms jitter=5ms", 3);
        (0..1000u32).for_each(|number| link.offer(at(u64::from(number) * 10_000), &frame(number, 100)));
        let delays: Vec<u64> = drain(&mut link)
            .into_iter()
            .zip(0..)
            .map(|((arrival, number), expected)| {
                assert_eq!(number, expected);
                arrival - u64::from(number) * 10_000
            })
            .collect();
        assert!(delays.iter().all(|delay| (5_000..=15_000).contains(delay)));
        assert!(delays.iter().any(|&delay| delay < 6_000) && delays.iter().any(|&delay| delay > 14_000));
        let mean = delays.iter().sum::<u64>() / 1000;
        assert!((9_500..10_500).contains(&mean), "{mean}");

        (0..1000).for_each(|number| link.offer(at(20_000_000 + u64::from(number)), &frame(number, 100)));
        assert!(drain(&mut link).iter().map(|&(_, number)| number).is_sorted());
    }

    #[test]
    fn fault_probabilities_match_the_configuration() {
        let mut link = pipeline("loss=2% duplicate=3% reorder=4% corrupt=5%", 9);
        (0..100_000).for_each(|number| link.offer(at(number), &frame(number as u32, 100)));
        let close = |counter: &std::sync::atomic::AtomicU64, expected: u64| {
            let counted = counter.load(Relaxed);
            assert!(counted.abs_diff(expected) < expected / 10, "{counted} instead of {expected}");
        };
        close(&link.stats.lost, 2_000);
        close(&link.stats.duplicated, 98_000 * 3 / 100);
        close(&link.stats.reordered, 101_000 * 4 / 100);
        close(&link.stats.corrupted, 98_000 * 5 / 100);
        let arrived = drain(&mut link).len() as u64;
        assert_eq!(arrived, 100_000 - link.stats.lost.load(Relaxed) + link.stats.duplicated.load(Relaxed));
    }

    #[test]
    fn loss_runs_have_the_configured_length() {
        for (spec, loss, length) in
            [("loss=5% loss-burst=4", 0.05, 4.0), ("loss=50% loss-burst=1.5", 0.5, 1.5)]
        {
            let mut link = pipeline(spec, 2);
            (0..200_000).for_each(|number| link.offer(at(0), &frame(number, 20)));
            let arrived: Vec<u32> = drain(&mut link).into_iter().map(|(_, number)| number).collect();
            let runs = arrived.windows(2).filter(|pair| pair[1] - pair[0] > 1).count() as f64;
            let lost = 200_000.0 - arrived.len() as f64;
            assert!((lost / 200_000.0 / loss - 1.0).abs() < 0.05, "{spec}: {lost} lost");
            assert!((lost / runs / length - 1.0).abs() < 0.05, "{spec}: runs of {}", lost / runs);
        }
        let mut link = pipeline("loss=100% loss-burst=3", 2);
        (0..100).for_each(|number| link.offer(at(0), &frame(number, 20)));
        assert!(drain(&mut link).is_empty());
    }

    #[test]
    fn reordered_frame_is_overtaken() {
        let mut link = pipeline("delay=5ms reorder=10% reorder-delay=300us", 4);
        (0..1000u32).for_each(|number| link.offer(at(u64::from(number) * 100), &frame(number, 100)));
        let arrived = drain(&mut link);
        let late = arrived.iter().filter(|&&(time, number)| time == u64::from(number) * 100 + 5_300).count();
        let on_time =
            arrived.iter().filter(|&&(time, number)| time == u64::from(number) * 100 + 5_000).count();
        assert_eq!(late + on_time, 1000);
        assert_eq!(late as u64, link.stats.reordered.load(Relaxed));
        assert!(!arrived.iter().map(|&(_, number)| number).is_sorted());
    }

    #[test]
    fn corruption_flips_one_bit_after_the_header() {
        let mut hit = [false; 40 * 8];
        let mut link = pipeline("corrupt=100%", 5);
        for _ in 0..10_000 {
            link.offer(at(0), &[0; 40]);
            let frame = link.pop(at(0)).expect("no loss");
            let bits: Vec<usize> = (0..320).filter(|bit| frame[bit / 8] & 1 << (bit % 8) != 0).collect();
            assert_eq!(bits.len(), 1);
            hit[bits[0]] = true;
        }
        assert!(hit[..14 * 8].iter().all(|&hit| !hit), "the Ethernet header is unchanged");
        assert!(hit[14 * 8..].iter().all(|&hit| hit), "every other bit is flipped eventually");
        let mut link = pipeline("corrupt=100% corrupt-from=0", 5);
        let mut header_hit = false;
        for _ in 0..1000 {
            link.offer(at(0), &[0; 20]);
            header_hit |= link.pop(at(0)).is_some_and(|frame| frame[..14] != [0; 14]);
        }
        assert!(header_hit);
        link.offer(at(0), &[]);
        let mut link = pipeline("corrupt=100%", 5);
        link.offer(at(0), &[0; 14]);
        assert_eq!(link.pop(at(0)), Some(vec![0; 14]), "the frame has no payload");
    }

    #[test]
    fn faults_depend_on_seed_and_frame_number() {
        let fates = |spec: &str, seed: u64, pace: u64| {
            let mut link = pipeline(spec, seed);
            (0..2000).for_each(|number| link.offer(at(u64::from(number) * pace), &frame(number, 60)));
            drain(&mut link).into_iter().map(|(_, number)| number).collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(fates("loss=10%", 1, 0), fates("loss=10%", 1, 50));
        assert_eq!(
            fates("loss=10%", 1, 0),
            fates("loss=10% delay=3ms jitter=2ms reorder=5% duplicate=5%", 1, 9)
        );
        assert_ne!(fates("loss=10%", 1, 0), fates("loss=10%", 2, 0));
    }
}
