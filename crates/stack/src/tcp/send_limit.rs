//! The size of a send buffer, which grows with the congestion window (`tcp_sndbuf_expand`): data for two
//! windows, so that the next window can be sent as soon as the first one is acknowledged.

use super::Tcp;
use super::conn::NONE;

/// Kernel memory for a segment that is rounded up to a power of two together with the payload:
/// `MAX_TCP_HEADER` and `struct skb_shared_info`.
const SEGMENT_OVERHEAD: u32 = 640;

/// Further kernel memory for a segment: `struct sk_buff`.
const BUFFER_OVERHEAD: u32 = 256;

/// Smallest window in segments that is counted on (`TCP_INIT_CWND`): a send buffer has room for two windows.
const SEGMENTS_MIN: u32 = 10;

/// Largest payload of a segment over a link other than a loopback link.
const LINK_PAYLOAD_MAX: u32 = 9216;

/// Payload of a segment over Linux's loopback interface.
const LOOPBACK_PAYLOAD: u32 = 65_495;

impl Tcp {
    /// Returns how many bytes may be queued on a connection now.
    #[inline(never)]
    pub(super) fn send_buffer_limit(&self, idx: u32) -> u64 {
        let (c, profile) = (&self.conns[idx], self.profile(idx));
        let max = u64::from(profile.send_buffer_bytes);
        let first = u64::from(profile.send_buffer_first);
        if first >= max {
            return max;
        }
        let threshold = self.config.reordering_segments;
        let reordering =
            if c.active == NONE { threshold } else { self.active[c.active].rack.reordering(threshold) };
        let segments = c.cwnd.max(SEGMENTS_MIN).max(reordering + 1);
        let payload = match c.mss() + u32::from(c.option_bytes()) {
            payload @ ..=LINK_PAYLOAD_MAX => payload,
            _ => LOOPBACK_PAYLOAD,
        };
        let segment = (payload + SEGMENT_OVERHEAD).next_power_of_two() + BUFFER_OVERHEAD;
        (2 * u64::from(segments) * u64::from(segment)).clamp(first, max)
    }
}
