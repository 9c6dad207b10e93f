//! One direction of a simulated link.

use super::HostId;
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::time::Instant;

/// Properties of a link. Probabilities are between 0 and 1.
#[derive(Clone, Debug)]
pub struct LinkModel {
    /// Propagation delay.
    pub delay: Duration,
    /// Maximum additional delay, uniformly distributed; frames may overtake each other.
    pub jitter: Duration,
    /// Rate in bits per second; 0 is infinite.
    pub rate_bps: u64,
    /// Queue limit in bytes, above which frames are dropped. Without effect if the rate is infinite.
    pub queue_bytes: usize,
    /// IP packets above this size in bytes are dropped silently.
    pub mtu: usize,
    /// Probability that a frame is lost.
    pub loss: f64,
    /// Probability that a frame is delivered twice.
    pub duplicate: f64,
    /// Probability that a frame is delayed by `reorder_delay`.
    pub reorder: f64,
    /// Delay of reordered frames.
    pub reorder_delay: Duration,
    /// Probability that one bit after the Ethernet header is flipped.
    pub corrupt: f64,
}

impl Default for LinkModel {
    fn default() -> Self {
        Self {
            delay: Duration::from_millis(1),
            jitter: Duration::ZERO,
            rate_bps: 0,
            queue_bytes: usize::MAX,
            mtu: usize::MAX,
            loss: 0.0,
            duplicate: 0.0,
            reorder: 0.0,
            reorder_delay: Duration::from_millis(2),
            corrupt: 0.0,
        }
    }
}

/// Counters of a link direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Frames sent.
    pub frames: u64,
    /// Bytes sent, including Ethernet headers.
    pub bytes: u64,
    /// Frames lost at random.
    pub lost: u64,
    /// Frames dropped because they exceed the MTU.
    pub oversized: u64,
    /// Frames dropped because the queue was full.
    pub overflowed: u64,
    /// Frames with a flipped bit.
    pub corrupted: u64,
}

pub(super) struct Link {
    pub from: HostId,
    pub to: HostId,
    pub model: LinkModel,
    pub stats: LinkStats,
    /// Time at which the last queued frame has been serialized.
    free_at: Instant,
}

impl Link {
    pub fn new(from: HostId, to: HostId, model: LinkModel) -> Self {
        Self { from, to, model, stats: LinkStats::default(), free_at: Instant::ZERO }
    }

    /// Returns the arrival time and content of each delivered copy of a frame: none, one or two.
    pub fn send(&mut self, now: Instant, frame: &[u8], rng: &mut Random) -> Vec<(Instant, Vec<u8>)> {
        let m = &self.model;
        self.stats.frames += 1;
        self.stats.bytes += frame.len() as u64;
        // Length of the Ethernet header.
        if frame.len().saturating_sub(14) > m.mtu {
            self.stats.oversized += 1;
            return Vec::new();
        }
        let mut leaves = now;
        if m.rate_bps > 0 {
            let start = self.free_at.max(now);
            let waiting = (start - now).as_secs_f64() * m.rate_bps as f64 / 8.0;
            if waiting as usize > m.queue_bytes {
                self.stats.overflowed += 1;
                return Vec::new();
            }
            // Preamble, FCS and inter-frame gap take 24 bytes per frame.
            let bits = (frame.len() as u64 + 24) * 8;
            leaves = start + Duration::from_nanos(bits * 1_000_000_000 / m.rate_bps);
            self.free_at = leaves;
        }
        if m.loss > 0.0 && rng.chance(m.loss) {
            self.stats.lost += 1;
            return Vec::new();
        }
        let mut at = leaves + m.delay;
        if !m.jitter.is_zero() {
            at += Duration::from_nanos(rng.below(m.jitter.as_nanos() as u64));
        }
        if m.reorder > 0.0 && rng.chance(m.reorder) {
            at += m.reorder_delay;
        }
        let mut bytes = frame.to_vec();
        if m.corrupt > 0.0 && rng.chance(m.corrupt) && bytes.len() > 14 {
            let bit = rng.below((bytes.len() as u64 - 14) * 8);
            bytes[14 + bit as usize / 8] ^= 1 << (bit % 8);
            self.stats.corrupted += 1;
        }
        let mut out = vec![(at, bytes)];
        if m.duplicate > 0.0 && rng.chance(m.duplicate) {
            let duplicate = out[0].clone();
            out.push((duplicate.0 + Duration::from_micros(10), duplicate.1));
        }
        out
    }
}
