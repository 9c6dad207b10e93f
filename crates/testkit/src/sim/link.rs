//! One direction of a simulated link.

use super::HostId;
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::time::Instant;

/// What a link does to frames. Probabilities are between 0 and 1.
#[derive(Clone, Debug)]
pub struct LinkModel {
    /// Propagation delay.
    pub delay: Duration,
    /// Added at random, evenly distributed; frames may overtake each other.
    pub jitter: Duration,
    /// Bits per second; 0 is infinite.
    pub rate_bps: u64,
    /// Bytes that may wait for the line; beyond it frames are dropped. Only with a rate.
    pub queue_bytes: usize,
    /// IP packets larger than this are dropped, and nobody is told.
    pub mtu: usize,
    /// Share of frames lost.
    pub loss: f64,
    /// Share of frames delivered twice.
    pub duplicate: f64,
    /// Share of frames held back by `reorder_delay`.
    pub reorder: f64,
    /// How long they are held back.
    pub reorder_delay: Duration,
    /// Share of frames with one flipped bit behind the Ethernet header.
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

/// What a link did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Frames put on it.
    pub frames: u64,
    /// Bytes put on it.
    pub bytes: u64,
    /// Frames lost at random.
    pub lost: u64,
    /// Frames dropped because they were too large.
    pub oversized: u64,
    /// Frames dropped because its queue was full.
    pub overflowed: u64,
    /// Frames with a flipped bit.
    pub corrupted: u64,
}

pub(super) struct Link {
    pub from: HostId,
    pub to: HostId,
    pub model: LinkModel,
    pub stats: LinkStats,
    /// When the line is free again.
    free_at: Instant,
}

impl Link {
    pub fn new(from: HostId, to: HostId, model: LinkModel) -> Self {
        Self { from, to, model, stats: LinkStats::default(), free_at: Instant::ZERO }
    }

    /// When and in what condition a frame arrives: not at all, once or twice.
    pub fn send(&mut self, now: Instant, frame: &[u8], rng: &mut Random) -> Vec<(Instant, Vec<u8>)> {
        let m = &self.model;
        self.stats.frames += 1;
        self.stats.bytes += frame.len() as u64;
        // 14 bytes of Ethernet header.
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
            // 24 bytes of preamble, FCS and gap go with each frame.
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
            let again = out[0].clone();
            out.push((again.0 + Duration::from_micros(10), again.1));
        }
        out
    }
}
