//! SYN cookies (RFC 4987 §3.6): handshakes without half-open connections.
//!
//! ```text
//!   sequence number of the SYN+ACK:  | period : 5 | MSS index : 3 | keyed hash : 24 |
//!   low six bits of its timestamp:   | ECN : 1 | SACK : 1 | window scale : 4 (15 = none) |
//! ```

use super::demux::FlowKey;
use super::secrets::Secrets;
use crate::time::Instant;

/// Length of a period. A cookie is valid in its own period and the next one.
const PERIOD_SECONDS: u64 = 64;

/// Segment sizes that a cookie can encode; a peer's MSS is rounded down to one of them.
const MSS_V4: [u16; 8] = [216, 536, 1024, 1240, 1360, 1440, 1460, 8960];
const MSS_V6: [u16; 8] = [536, 1024, 1220, 1360, 1420, 1440, 4312, 8940];

/// Options that a cookie encodes besides the addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CookieOptions {
    pub mss: u16,
    /// Encoded only if timestamps are in use.
    pub window_scale: Option<u8>,
    pub sack: bool,
    pub ecn: bool,
}

fn period(now: Instant) -> u32 {
    (now.as_millis() / 1000 / PERIOD_SECONDS) as u32
}

fn table(key: &FlowKey) -> &'static [u16; 8] {
    if key.remote.is_v4() { &MSS_V4 } else { &MSS_V6 }
}

/// Returns the sequence number of a SYN+ACK that encodes a connection, for a peer that announced `mss`.
pub(crate) fn make(secrets: &Secrets, key: &FlowKey, peer_sequence: u32, mss: u16, now: Instant) -> u32 {
    let index = table(key).iter().rposition(|m| *m <= mss).unwrap_or(0) as u32;
    let t = period(now);
    let hash = secrets.cookie(key, peer_sequence, t, index) & 0x00ff_ffff;
    (t & 31) << 27 | index << 24 | hash
}

/// Returns the MSS of a cookie that was acknowledged, if the cookie is authentic and fresh.
pub(crate) fn check(
    secrets: &Secrets,
    key: &FlowKey,
    peer_sequence: u32,
    cookie: u32,
    now: Instant,
) -> Option<u16> {
    let current = period(now);
    let age = current.wrapping_sub(cookie >> 27) & 31;
    if age > 1 {
        return None;
    }
    let index = cookie >> 24 & 7;
    let hash = secrets.cookie(key, peer_sequence, current.wrapping_sub(age), index) & 0x00ff_ffff;
    (hash == cookie & 0x00ff_ffff).then(|| table(key)[index as usize])
}

/// Returns a timestamp at or shortly before `value` whose low bits encode the options.
pub(crate) fn encode_timestamp(value: u32, options: &CookieOptions) -> u32 {
    let bits = u32::from(options.window_scale.unwrap_or(15) & 15)
        | u32::from(options.sack) << 4
        | u32::from(options.ecn) << 5;
    let with = value & !63 | bits;
    // Never a time in the future.
    if with.wrapping_sub(value) as i32 > 0 { with.wrapping_sub(64) } else { with }
}

/// Returns the options of the timestamp that the peer echoes.
pub(crate) fn decode_timestamp(echo: u32, mss: u16) -> CookieOptions {
    let scale = (echo & 15) as u8;
    CookieOptions {
        mss,
        window_scale: (scale != 15).then_some(scale.min(14)),
        sack: echo >> 4 & 1 != 0,
        ecn: echo >> 5 & 1 != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{IpAddr, Ipv4Addr};

    fn key(port: u16) -> FlowKey {
        FlowKey {
            remote: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)).into(),
            local: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)).into(),
            remote_port: port,
            local_port: 80,
        }
    }

    #[test]
    fn cookie_returns_mss_rounded_down() {
        let secrets = Secrets::new(&[7; 32]);
        let now = Instant::from_millis(1_000_000);
        for (announced, got) in [(1460, 1460), (1459, 1440), (536, 536), (9000, 8960), (100, 216)] {
            let cookie = make(&secrets, &key(4000), 99, announced, now);
            assert_eq!(check(&secrets, &key(4000), 99, cookie, now), Some(got));
        }
    }

    #[test]
    fn foreign_or_old_cookie_is_rejected() {
        let secrets = Secrets::new(&[7; 32]);
        let now = Instant::from_millis(1_000_000);
        let cookie = make(&secrets, &key(4000), 99, 1460, now);
        assert_eq!(check(&secrets, &key(4001), 99, cookie, now), None);
        assert_eq!(check(&secrets, &key(4000), 98, cookie, now), None);
        assert_eq!(check(&secrets, &key(4000), 99, cookie ^ 1 << 24, now), None);
        let later = |s: u64| Instant::from_millis(1_000_000 + s * 1000);
        assert!(check(&secrets, &key(4000), 99, cookie, later(60)).is_some());
        assert_eq!(check(&secrets, &key(4000), 99, cookie, later(130)), None);
    }

    #[test]
    fn timestamp_encodes_options_and_never_runs_ahead() {
        for value in [0u32, 1, 63, 64, 1000, u32::MAX - 3, u32::MAX] {
            for scale in [None, Some(0), Some(7), Some(14)] {
                let o = CookieOptions { mss: 1460, window_scale: scale, sack: true, ecn: false };
                let ts = encode_timestamp(value, &o);
                assert_eq!(decode_timestamp(ts, 1460), o);
                assert!(value.wrapping_sub(ts) < 64);
            }
        }
    }
}
