//! Round-trip time and retransmission time-out (RFC 6298, with Linux's smaller minimum; RFC 8961 §4 asks any
//! time-out for the properties that hold here).

use super::conn::Tcb;
use super::profile::Profile;
use core::time::Duration;

/// Takes one sample in µs. By Karn's rule callers never pass a sample of a retransmitted segment, unless
/// timestamps distinguish the transmissions (RFC 7323 §4).
#[inline(always)]
pub(crate) fn on_sample(c: &mut Tcb, profile: &Profile, rtt_us: u32) {
    let r = rtt_us.clamp(1, 1 << 27);
    let floor = profile.rto_min_us();
    if c.srtt == 0 {
        // RFC 6298 §2.2: SRTT = R, RTTVAR = R/2, K = 4.
        c.srtt = r << 3;
        c.rttvar = (r * 2).max(floor);
    } else {
        // RFC 6298 §2.3 with beta = 1/4 and alpha = 1/8. `rttvar` is K × RTTVAR and never below the minimum,
        // so that a steady path has RTO = SRTT + rto_min as on Linux.
        let srtt = c.srtt >> 3;
        let deviation = (srtt.abs_diff(r)).saturating_mul(4);
        let var = c.rttvar - (c.rttvar >> 2) + (deviation >> 2);
        c.rttvar = var.max(floor);
        c.srtt = c.srtt - (c.srtt >> 3) + r;
    }
    c.min_rtt = c.min_rtt.min(r);
}

/// Time-out of data in µs if the handshake gave no sample because its segments were retransmitted (RFC 6298
/// §5.7).
const RTO_UNMEASURED_US: u64 = 3_000_000;

/// Returns the retransmission time-out in µs, doubled `backoff` times and bounded (RFC 6298 §5.5 and §2.5).
#[inline]
pub(crate) fn rto_us(c: &Tcb, profile: &Profile, backoff: u8) -> u64 {
    let base = if c.srtt == 0 {
        let initial = profile.rto_initial_us();
        if c.state.is_synchronized() { initial.max(RTO_UNMEASURED_US) } else { initial }
    } else {
        u64::from(c.srtt >> 3) + u64::from(c.rttvar)
    };
    // Cannot overflow: at most 2^33 µs, shifted by 20.
    (base << backoff.min(20)).min(profile.rto_max_us())
}

/// Returns the retransmission time-out as a duration.
pub(crate) fn rto(c: &Tcb, profile: &Profile, backoff: u8) -> Duration {
    Duration::from_micros(rto_us(c, profile, backoff))
}

/// Linux's `TCP_RTO_MIN`, which bounds window probes (`tcp_probe0_base`) and the time to give up
/// (`retransmits_timed_out`) whatever the configured minimum of the retransmission time-out is.
const LINUX_RTO_MIN_US: u64 = 200_000;

/// Returns the time after which a closed window is probed, doubled `backoff` times and bounded (RFC 9293
/// §3.8.6.1: the first probe follows after the retransmission time-out, and the interval grows
/// exponentially).
pub(crate) fn probe_timeout(c: &Tcb, profile: &Profile, backoff: u8) -> Duration {
    let base = rto_us(c, profile, 0).max(LINUX_RTO_MIN_US);
    Duration::from_micros((base << backoff.min(20)).min(profile.rto_max_us()))
}

/// Returns the upper bound of any retransmission time-out.
pub(crate) fn rto_max(profile: &Profile) -> Duration {
    Duration::from_micros(profile.rto_max_us())
}

/// Returns how long a transmission and `retries` retransmissions of it wait in total if the time-out doubles
/// from 200 ms. Linux bounds attempts by this time, so that a connection with a short round-trip time or a
/// smaller minimum of the time-out does not give up within seconds (RFC 1122 §4.2.3.5 asks for at least
/// 100 s).
pub(crate) fn give_up_after(profile: &Profile, retries: u8) -> Duration {
    let mut total = Duration::ZERO;
    let mut step = Duration::from_micros(LINUX_RTO_MIN_US);
    for _ in 0..=retries {
        total += step;
        step = (step * 2).min(rto_max(profile));
    }
    total
}

#[cfg(test)]
mod tests {
    use super::super::config::TcpConfig;
    use super::*;

    fn default_profile() -> Profile {
        Profile::from_config(&TcpConfig::default())
    }

    fn new_tcb() -> Tcb {
        Tcb { min_rtt: u32::MAX, ..Tcb::vacant() }
    }

    #[test]
    fn initial_rto_applies_without_sample() {
        assert_eq!(rto(&new_tcb(), &default_profile(), 0), Duration::from_secs(1));
    }

    #[test]
    fn a_steady_path_has_rtt_plus_the_minimum() {
        let config = default_profile();
        let mut c = new_tcb();
        for _ in 0..200 {
            on_sample(&mut c, &config, 50_000);
        }
        assert_eq!(c.srtt >> 3, 50_000);
        assert_eq!(rto(&c, &config, 0), Duration::from_millis(250));
        assert_eq!(c.min_rtt, 50_000);
    }

    #[test]
    fn rto_exceeds_new_rtt_after_jump() {
        let config = default_profile();
        let mut c = new_tcb();
        for _ in 0..50 {
            on_sample(&mut c, &config, 10_000);
        }
        on_sample(&mut c, &config, 400_000);
        assert!(rto(&c, &config, 0) > Duration::from_millis(400));
    }

    #[test]
    fn back_off_doubles_and_stops_at_the_maximum() {
        let config = default_profile();
        let c = new_tcb();
        assert_eq!(rto(&c, &config, 3), Duration::from_secs(8));
        assert_eq!(rto(&c, &config, 7), Duration::from_secs(120));
        assert_eq!(rto(&c, &config, 255), Duration::from_secs(120));
    }

    #[test]
    fn fifteen_retries_take_linux_924_seconds() {
        let total = give_up_after(&default_profile(), 15);
        assert_eq!(total, Duration::from_millis(924_600));
    }

    #[test]
    fn socket_options_bound_the_rto() {
        let mut profile = default_profile();
        profile.set_rto_min(Duration::from_millis(5));
        profile.set_rto_max(Duration::from_secs(2));
        let mut c = new_tcb();
        for _ in 0..200 {
            on_sample(&mut c, &profile, 1000);
        }
        assert_eq!(rto(&c, &profile, 0), Duration::from_millis(6));
        assert_eq!(rto(&c, &profile, 255), Duration::from_secs(2));
        assert_eq!(rto(&new_tcb(), &profile, 4), Duration::from_secs(2));
        assert_eq!(
            give_up_after(&profile, 4),
            Duration::from_secs(5),
            "0.2, 0.4, 0.8, 1.6 s, then the maximum"
        );
    }

    #[test]
    fn samples_of_any_size_do_not_overflow() {
        let config = default_profile();
        let mut c = new_tcb();
        for r in [u32::MAX, 0, 1, u32::MAX, 1 << 30] {
            on_sample(&mut c, &config, r);
            assert!(rto(&c, &config, 0) <= Duration::from_secs(120));
        }
    }
}
