//! Where PSH stands inside a burst. It is on the last segment of what was queued (RFC 9293 §3.9.1.2); and, as Linux does it, on the last of the segments that leave as one packet for
//! segmentation offload to cut, if they are two or more, so that a receiver that gathers segments hands them on. Devices that cut nothing get the same segments, so how many would be in
//! one packet is reckoned as Linux does: what leaves in a millisecond, and more the nearer the peer is (`tcp_tso_autosize`).

use super::Tcp;
use super::busy::More;
use super::conn::Flags;
use super::output::Allowance;

/// Bytes of the longest packet, to a peer whose round trip is below half a millisecond; half as many for each half millisecond more.
const MOST_BYTES: u64 = 65_536;

/// A burst that is being sent.
#[derive(Default)]
pub(super) struct Burst {
    /// Segments in the packet that would be.
    count: u32,
    /// Segments that it takes, once that matters; 0 before.
    most: u32,
}

impl Burst {
    /// Whether the next segment is the first of a packet.
    #[inline]
    pub fn begins(&self) -> bool {
        self.count == 0
    }

    /// Whether PSH goes on the next segment, of `len` bytes; not asked for the last one of all.
    #[inline]
    pub fn pushes(&mut self, tcp: &Tcp, idx: u32, allowance: &Allowance, len: u32) -> bool {
        if len > allowance.mss {
            // A packet that the device cuts. It is as long as the device likes.
            self.count = 0;
            return true;
        }
        self.count += 1;
        if self.count < 2 {
            return false;
        }
        let most = match self.most {
            0 => tcp.segments_together(idx, allowance.mss).max(1),
            known => known,
        };
        self.most = most;
        if self.count < most && tcp.another_follows(idx, allowance, len) || most < 2 {
            return false;
        }
        self.count = 0;
        true
    }
}

impl Tcp {
    /// Segments that Linux would put into one packet.
    #[cold]
    pub(super) fn segments_together(&self, idx: u32, mss: u32) -> u32 {
        let c = &self.conns[idx];
        let in_flight = self.busy[c.busy].sent.in_flight();
        let least = self.config.push_segments_min.into();
        let most =
            segments_together(least, mss, c.cwnd.max(in_flight), c.cwnd < c.ssthresh / 2, c.srtt, c.min_rtt);
        // Never more than half a window (`tcp_cwnd_test`).
        most.min(c.cwnd / 2)
    }

    /// Whether another segment leaves behind one of `len` bytes, as far as windows and Nagle's algorithm say it.
    #[inline]
    fn another_follows(&self, idx: u32, a: &Allowance, len: u32) -> bool {
        let unsent = a.unsent - len;
        let fits = unsent.min(a.window.saturating_sub(len));
        // Mostly it is a whole one.
        a.segments > 1 && (fits >= a.mss || fits > 0 && fits == unsent && !self.holds_small(idx))
    }

    /// Whether a segment that is not whole waits.
    #[cold]
    fn holds_small(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        let b = &self.busy[c.busy];
        c.has(Flags::CORK) || b.more == More::Expected || !c.has(Flags::NODELAY) && b.small_end.is_some()
    }
}

/// The same, `least` at the least, for a window of so many segments, which doubles or does not, and the smoothed round trip, in eighths of a microsecond, and the shortest, in microseconds.
fn segments_together(least: u32, mss: u32, window: u32, doubles: bool, srtt: u32, min_rtt: u32) -> u32 {
    // Percent of what the window allows in a round trip (`tcp_update_pacing_rate`).
    let rate = if doubles { 200 } else { 120 };
    let percent_seconds = 8 * 1_000_000 / 100;
    let in_a_second = u64::from(mss) * u64::from(window) * rate * percent_seconds;
    // The millisecond is one of 1,024 in a second.
    let far = in_a_second.checked_div(srtt.into()).map_or(MOST_BYTES, |bytes| bytes >> 10);
    let near = MOST_BYTES.checked_shr(min_rtt >> 9).unwrap_or(0);
    ((far + near).min(MOST_BYTES) as u32 / mss).max(least)
}

#[cfg(test)]
mod tests {
    use super::segments_together;

    #[test]
    fn far_peers_get_two_segments_at_a_time_and_near_ones_more() {
        for (round_trip_us, expected) in [(100_000, 2), (10_000, 2), (5_000, 4), (1_000, 52), (100, 65)] {
            let together = segments_together(2, 1000, 10, true, round_trip_us << 3, round_trip_us);
            assert_eq!(together, expected, "{round_trip_us}");
        }
        assert_eq!(segments_together(2, 1000, 10, true, 0, u32::MAX), 65, "not measured");
        assert_eq!(segments_together(2, 1000, 10, false, 5_000 << 3, 5_000), 2, "past slow start");
    }
}
