//! RFC 5681: additive increase, multiplicative decrease.

use crate::tcp::conn::Tcb;

/// Grows the window by one segment for each window of acknowledged segments.
pub(crate) fn additive_increase(c: &mut Tcb, snd_cwnd_cnt: &mut u32, acked: u32) {
    *snd_cwnd_cnt += acked;
    while *snd_cwnd_cnt >= c.cwnd {
        *snd_cwnd_cnt -= c.cwnd;
        c.cwnd += 1;
    }
}

/// Returns half of the window, at least two segments (RFC 5681 §3.1, equation 4, with cwnd for FlightSize as
/// on Linux).
pub(crate) fn threshold(c: &Tcb) -> u32 {
    (c.cwnd / 2).max(2)
}
