//! Where PSH stands inside a burst. It is on the last segment of what was queued (RFC 9293 §3.9.1.2); and, as Linux does it, on the last of the segments that leave as one packet for
//! segmentation offload to cut, if they are two or more, so that a receiver that gathers segments hands them on. Devices that cut nothing get the same segments, so how many would be in
//! one packet is reckoned as Linux does: what leaves in a millisecond, and more the nearer the peer is (`tcp_tso_autosize`).

use super::Tcp;
use super::active::MsgMore;
use super::conn::Flags;
use super::output::SendQuota;

/// Bytes of the longest packet, to a peer whose round trip is below half a millisecond; half as many for each half millisecond more.
const GSO_MAX_SIZE: u64 = 65_536;

/// A burst that is being sent.
#[derive(Default)]
pub(super) struct Burst {
    /// Segments in the packet that would be.
    segments: u32,
    /// Segments that it takes, once that matters; 0 before.
    tso_segs: u32,
}

impl Burst {
    /// Whether the next segment is the first of a packet.
    #[inline]
    pub fn begins(&self) -> bool {
        self.segments == 0
    }

    /// Whether PSH goes on the next segment, of `len` bytes; not asked for the last one of all.
    #[inline]
    pub fn pushes(&mut self, tcp: &Tcp, idx: u32, allowance: &SendQuota, len: u32) -> bool {
        if len > allowance.mss {
            // A packet that the device cuts. It is as long as the device likes.
            self.segments = 0;
            return true;
        }
        self.segments += 1;
        if self.segments < 2 {
            return false;
        }
        let most = match self.tso_segs {
            0 => tcp.tso_segs(idx, allowance.mss).max(1),
            known => known,
        };
        self.tso_segs = most;
        if self.segments < most && tcp.another_follows(idx, allowance, len) || most < 2 {
            return false;
        }
        self.segments = 0;
        true
    }
}

impl Tcp {
    /// Segments that Linux would put into one packet.
    #[cold]
    pub(super) fn tso_segs(&self, idx: u32, mss: u32) -> u32 {
        let c = &self.conns[idx];
        let in_flight = self.active[c.active].rtx_queue.in_flight();
        let least = self.config.push_segments_min.into();
        let most =
            tso_autosize(least, mss, c.cwnd.max(in_flight), c.cwnd < c.ssthresh / 2, c.srtt, c.min_rtt);
        // Never more than half a window (`tcp_cwnd_test`).
        most.min(c.cwnd / 2)
    }

    /// Whether another segment leaves behind one of `len` bytes, as far as windows and Nagle's algorithm say it.
    #[inline]
    fn another_follows(&self, idx: u32, a: &SendQuota, len: u32) -> bool {
        let unsent = a.unsent - len;
        let fits = unsent.min(a.window.saturating_sub(len));
        // Mostly it is a whole one.
        a.cwnd_quota > 1 && (fits >= a.mss || fits > 0 && fits == unsent && !self.nagle_holds_partial(idx))
    }

    /// Whether a segment that is not whole waits.
    #[cold]
    fn nagle_holds_partial(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        c.has(Flags::CORK) || b.msg_more == MsgMore::Expected || !c.has(Flags::NODELAY) && b.snd_sml.is_some()
    }
}

/// The same, `least` at the least, for a window of so many segments, which doubles or does not, and the smoothed round trip, in eighths of a microsecond, and the shortest, in microseconds.
fn tso_autosize(least: u32, mss: u32, window: u32, doubles: bool, srtt: u32, min_rtt: u32) -> u32 {
    // Percent of what the window allows in a round trip (`tcp_update_pacing_rate`).
    let rate = if doubles { 200 } else { 120 };
    let percent_seconds = 8 * 1_000_000 / 100;
    let in_a_second = u64::from(mss) * u64::from(window) * rate * percent_seconds;
    // The millisecond is one of 1,024 in a second.
    let far = in_a_second.checked_div(srtt.into()).map_or(GSO_MAX_SIZE, |bytes| bytes >> 10);
    let near = GSO_MAX_SIZE.checked_shr(min_rtt >> 9).unwrap_or(0);
    ((far + near).min(GSO_MAX_SIZE) as u32 / mss).max(least)
}

#[cfg(test)]
mod tests {
    use super::tso_autosize;

    #[test]
    fn far_peers_get_two_segments_at_a_time_and_near_ones_more() {
        for (round_trip_us, expected) in [(100_000, 2), (10_000, 2), (5_000, 4), (1_000, 52), (100, 65)] {
            let together = tso_autosize(2, 1000, 10, true, round_trip_us << 3, round_trip_us);
            assert_eq!(together, expected, "{round_trip_us}");
        }
        assert_eq!(tso_autosize(2, 1000, 10, true, 0, u32::MAX), 65, "not measured");
        assert_eq!(tso_autosize(2, 1000, 10, false, 5_000 << 3, 5_000), 2, "past slow start");
    }
}
