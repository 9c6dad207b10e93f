//! Round trip time and retransmission time-out (RFC 6298, with Linux's smaller minimum).

use super::config::TcpConfig;
use super::conn::Tcb;
use core::time::Duration;

/// Takes one measurement, in µs. By Karn's rule the caller never passes one of a retransmitted segment, unless
/// timestamps tell the two apart (RFC 7323 §4).
#[inline(always)]
pub(crate) fn on_sample(c: &mut Tcb, config: &TcpConfig, rtt_us: u32) {
    let r = rtt_us.clamp(1, 1 << 27);
    let floor = config.rto_min_ms * 1000;
    if c.srtt == 0 {
        // RFC 6298 §2.2: SRTT = R, RTTVAR = R/2, K = 4.
        c.srtt = r << 3;
        c.rttvar = (r * 2).max(floor);
    } else {
        // RFC 6298 §2.3 with beta = 1/4 and alpha = 1/8. `rttvar` holds K × RTTVAR, never below the floor, so that a
        // steady path keeps RTO = SRTT + rto_min as on Linux.
        let srtt = c.srtt >> 3;
        let deviation = (srtt.abs_diff(r)).saturating_mul(4);
        let var = c.rttvar - (c.rttvar >> 2) + (deviation >> 2);
        c.rttvar = var.max(floor);
        c.srtt = c.srtt - (c.srtt >> 3) + r;
    }
    c.min_rtt = c.min_rtt.min(r);
}

/// The time-out of data if even the handshake measured nothing, because its segments had to be repeated (RFC 6298 §5.7).
const RTO_UNMEASURED_US: u64 = 3_000_000;

/// The retransmission time-out in µs, doubled `backoff` times and bounded (RFC 6298 §5.5 and §2.5).
#[inline]
pub(crate) fn rto_us(c: &Tcb, config: &TcpConfig, backoff: u8) -> u64 {
    let max = u64::from(config.rto_max_seconds) * 1_000_000;
    let base = if c.srtt == 0 {
        let initial = u64::from(config.rto_initial_ms) * 1000;
        if c.state.is_synchronized() { initial.max(RTO_UNMEASURED_US) } else { initial }
    } else {
        u64::from(c.srtt >> 3) + u64::from(c.rttvar)
    };
    // Cannot overflow: 2^33 µs at the most, shifted by 20.
    (base << backoff.min(20)).min(max)
}

/// The same as a duration.
pub(crate) fn rto(c: &Tcb, config: &TcpConfig, backoff: u8) -> Duration {
    Duration::from_micros(rto_us(c, config, backoff))
}

/// The upper bound of any retransmission time-out.
pub(crate) fn rto_max(config: &TcpConfig) -> Duration {
    Duration::from_secs(config.rto_max_seconds.into())
}

/// How long `retries` time-outs last in all, with the time-out doubling from the minimum: Linux bounds attempts by this time, so that a
/// connection with a short round trip does not give up within seconds (RFC 1122 §4.2.3.5 asks for at least 100 s).
pub(crate) fn give_up_after(config: &TcpConfig, retries: u8, base: Duration) -> Duration {
    let mut total = Duration::ZERO;
    let mut step = base;
    for _ in 0..=retries {
        total += step;
        step = (step * 2).min(rto_max(config));
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fresh() -> Tcb {
        Tcb { min_rtt: u32::MAX, ..Tcb::vacant() }
    }

    #[test]
    fn without_a_sample_the_initial_timeout_counts() {
        assert_eq!(rto(&fresh(), &TcpConfig::default(), 0), Duration::from_secs(1));
    }

    #[test]
    fn a_steady_path_has_rtt_plus_the_minimum() {
        let config = TcpConfig::default();
        let mut c = fresh();
        for _ in 0..200 {
            on_sample(&mut c, &config, 50_000);
        }
        assert_eq!(c.srtt >> 3, 50_000);
        assert_eq!(rto(&c, &config, 0), Duration::from_millis(250));
        assert_eq!(c.min_rtt, 50_000);
    }

    #[test]
    fn a_jump_raises_the_timeout_above_the_new_round_trip() {
        let config = TcpConfig::default();
        let mut c = fresh();
        for _ in 0..50 {
            on_sample(&mut c, &config, 10_000);
        }
        on_sample(&mut c, &config, 400_000);
        assert!(rto(&c, &config, 0) > Duration::from_millis(400));
    }

    #[test]
    fn back_off_doubles_and_stops_at_the_maximum() {
        let config = TcpConfig::default();
        let c = fresh();
        assert_eq!(rto(&c, &config, 3), Duration::from_secs(8));
        assert_eq!(rto(&c, &config, 7), Duration::from_secs(120));
        assert_eq!(rto(&c, &config, 255), Duration::from_secs(120));
    }

    #[test]
    fn fifteen_retries_take_linux_924_seconds() {
        let total = give_up_after(&TcpConfig::default(), 15, Duration::from_millis(200));
        assert_eq!(total, Duration::from_millis(924_600));
    }

    #[test]
    fn samples_of_any_size_do_not_overflow() {
        let config = TcpConfig::default();
        let mut c = fresh();
        for r in [u32::MAX, 0, 1, u32::MAX, 1 << 30] {
            on_sample(&mut c, &config, r);
            assert!(rto(&c, &config, 0) <= Duration::from_secs(120));
        }
    }
}
