//! Where PSH is set inside of a burst. PSH is on the last segment of the queued data (RFC 9293 §3.9.1.2) and,
//! as on Linux, on the last segment of each packet of two or more segments that Linux would hand to
//! segmentation offload, so that a receiver that coalesces segments delivers them. Devices without offload
//! get equal segments, so the number of segments of such a packet is computed as Linux does: the data of one
//! millisecond, and more the nearer the peer is (`tcp_tso_autosize`).

use super::Tcp;
use super::active::MsgMore;
use super::conn::Flags;
use super::output::SendQuota;

/// Bytes of the largest packet, which is sent to a peer with a round-trip time below half a millisecond;
/// halved for each further half millisecond.
const GSO_MAX_SIZE: u64 = 65_536;

/// A burst that is being sent.
#[derive(Default)]
pub(super) struct Burst {
    /// Segments so far in the packet that Linux would send.
    segments: u32,
    /// Segments that this packet takes; 0 before it was computed.
    tso_segs: u32,
}

impl Burst {
    /// Returns whether the next segment is the first one of a packet.
    #[inline]
    pub fn begins(&self) -> bool {
        self.segments == 0
    }

    /// Returns whether the next segment, of `len` bytes, has PSH; not called for the last segment of the
    /// queued data.
    #[inline]
    pub fn pushes(&mut self, tcp: &Tcp, idx: u32, allowance: &SendQuota, len: u32) -> bool {
        if len > allowance.mss {
            // The device segments this packet, and its own limit decides about the size.
            self.segments = 0;
            return true;
        }
        self.segments += 1;
        if self.segments < 2 {
            return false;
        }
        let tso_segs = match self.tso_segs {
            0 => tcp.tso_segs(idx, allowance.mss).max(1),
            known => known,
        };
        self.tso_segs = tso_segs;
        if self.segments < tso_segs && tcp.another_follows(idx, allowance, len) || tso_segs < 2 {
            return false;
        }
        self.segments = 0;
        true
    }
}

impl Tcp {
    /// Returns the number of segments that Linux would put into one packet.
    #[cold]
    pub(super) fn tso_segs(&self, idx: u32, mss: u32) -> u32 {
        let c = &self.conns[idx];
        let in_flight = self.active[c.active].rtx_queue.in_flight();
        let min_segs = self.config.push_segments_min.into();
        let segs =
            tso_autosize(min_segs, mss, c.cwnd.max(in_flight), c.cwnd < c.ssthresh / 2, c.srtt, c.min_rtt);
        // At most half of the window (`tcp_cwnd_test`).
        segs.min(c.cwnd / 2)
    }

    /// Returns whether another segment follows one of `len` bytes, as far as windows and Nagle's algorithm
    /// decide about it.
    #[inline]
    fn another_follows(&self, idx: u32, a: &SendQuota, len: u32) -> bool {
        let unsent = a.unsent - len;
        let fits = unsent.min(a.window.saturating_sub(len));
        // Usually the next segment is full-sized.
        a.cwnd_quota > 1 && (fits >= a.mss || fits > 0 && fits == unsent && !self.nagle_holds_partial(idx))
    }

    /// Returns whether Nagle's algorithm or a cork holds back a partial segment.
    #[cold]
    fn nagle_holds_partial(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        c.has(Flags::CORK) || b.msg_more == MsgMore::Expected || !c.has(Flags::NODELAY) && b.snd_sml.is_some()
    }
}

/// Returns the segments of one packet, at least `min_segs`, for a window of `window` segments, which doubles
/// in each round if `is_slow_start`. `srtt` is in eighths of a microsecond, `min_rtt` in microseconds.
fn tso_autosize(min_segs: u32, mss: u32, window: u32, is_slow_start: bool, srtt: u32, min_rtt: u32) -> u32 {
    // Percent of the rate at which the window is sent per round trip (`tcp_update_pacing_rate`).
    let rate = if is_slow_start { 200 } else { 120 };
    let percent_seconds = 8 * 1_000_000 / 100;
    let per_second = u64::from(mss) * u64::from(window) * rate * percent_seconds;
    // Linux divides the second into 1,024 parts, not 1,000.
    let by_rate = per_second.checked_div(srtt.into()).map_or(GSO_MAX_SIZE, |bytes| bytes >> 10);
    let by_min_rtt = GSO_MAX_SIZE.checked_shr(min_rtt >> 9).unwrap_or(0);
    ((by_rate + by_min_rtt).min(GSO_MAX_SIZE) as u32 / mss).max(min_segs)
}

#[cfg(test)]
mod tests {
    use super::tso_autosize;

    #[test]
    fn near_peers_get_larger_packets_than_far_ones() {
        for (round_trip_us, expected) in [(100_000, 2), (10_000, 2), (5_000, 4), (1_000, 52), (100, 65)] {
            let segs = tso_autosize(2, 1000, 10, true, round_trip_us << 3, round_trip_us);
            assert_eq!(segs, expected, "{round_trip_us}");
        }
        assert_eq!(tso_autosize(2, 1000, 10, true, 0, u32::MAX), 65, "no round-trip time sample");
        assert_eq!(tso_autosize(2, 1000, 10, false, 5_000 << 3, 5_000), 2, "after slow start");
    }
}
