//! Values of TCP options that are not plain integers.

use super::OptionValue;
use ginnel::{BbrInfo, CongestionControl, FastOpenKeys, TcpInfo};
use rustix::io::Errno;

/// Bytes of an algorithm's name (`TCP_CA_NAME_MAX`).
const CONGESTION_NAME_BYTES: usize = 16;

pub(super) fn congestion(value: &[u8]) -> Result<CongestionControl, Errno> {
    if value.is_empty() {
        return Err(Errno::INVAL);
    }
    let name = value.get(..CONGESTION_NAME_BYTES - 1).unwrap_or(value);
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    CongestionControl::from_linux_name(name).ok_or(Errno::NOENT)
}

pub(super) fn congestion_name(kind: CongestionControl) -> OptionValue {
    let mut name = kind.linux_name().as_bytes().to_vec();
    name.resize(CONGESTION_NAME_BYTES, 0);
    OptionValue::truncatable(name)
}

/// Returns the value of `TCP_CC_INFO`: for BBR a `struct tcp_bbr_info`, all zeros before the socket is
/// connected; nothing for other algorithms.
pub(super) fn cc_info(kind: CongestionControl, info: Option<&TcpInfo>) -> OptionValue {
    if kind != CongestionControl::Bbr {
        return OptionValue::truncatable(Vec::new());
    }
    let BbrInfo { bandwidth, min_rtt_us, pacing_gain, cwnd_gain } =
        info.and_then(|info| info.bbr).unwrap_or_default();
    let words = [bandwidth as u32, (bandwidth >> 32) as u32, min_rtt_us, pacing_gain, cwnd_gain];
    OptionValue::truncatable(words.map(u32::to_ne_bytes).concat())
}

/// Parses the value of `SO_MAX_PACING_RATE`, of four or eight bytes, in bytes per second.
///
/// # Errors
/// `EINVAL`.
pub(super) fn pacing_rate(value: &[u8]) -> Result<u64, Errno> {
    if let Some(rate) = value.first_chunk() {
        return Ok(u64::from_ne_bytes(*rate));
    }
    let rate = u32::from_ne_bytes(*value.first_chunk().ok_or(Errno::INVAL)?);
    Ok(if rate == u32::MAX { u64::MAX } else { rate.into() })
}

/// Returns the value of `SO_MAX_PACING_RATE` for a buffer of `space` bytes: a word of eight bytes if there is
/// room, otherwise one of four.
pub(super) fn pacing_rate_value(rate: u64, space: usize) -> OptionValue {
    if space >= 8 {
        return OptionValue::truncatable(rate.to_ne_bytes().to_vec());
    }
    let rate = u32::try_from(rate).unwrap_or(u32::MAX);
    OptionValue::truncatable(rate.to_ne_bytes().to_vec())
}

/// Parses the keys of `TCP_FASTOPEN_KEY`: one or two, of 16 bytes each.
///
/// # Errors
/// `EINVAL` for another length.
pub(super) fn fastopen_keys(value: &[u8]) -> Result<FastOpenKeys, Errno> {
    let key = |words: &[[u8; 8]]| {
        words.first_chunk().map(|[a, b]| (u64::from_le_bytes(*a), u64::from_le_bytes(*b)))
    };
    match value.as_chunks::<8>() {
        (words, []) if matches!(words.len(), 2 | 4) => Ok((key(words), key(&words[2..]))),
        _ => Err(Errno::INVAL),
    }
}

/// Returns the keys as the value of `TCP_FASTOPEN_KEY`.
pub(super) fn fastopen_key_bytes((first, second): FastOpenKeys) -> Vec<u8> {
    [first, second].iter().flatten().flat_map(|(a, b)| [a.to_le_bytes(), b.to_le_bytes()]).flatten().collect()
}

/// Linux stores `TCP_DEFER_ACCEPT` as a number of SYN+ACKs, so the time reads back as the time that these
/// take.
pub(super) mod defer_accept {
    /// Time until the second SYN+ACK, and the maximum between two of them, in seconds.
    const FIRST_S: u32 = 1;
    const MOST_S: u32 = 120;

    /// Rounds a number of seconds as Linux does (`secs_to_retrans`, `retrans_to_secs`).
    pub fn seconds(asked: i32) -> u32 {
        let Some(asked) = u32::try_from(asked).ok().filter(|asked| *asked > 0) else { return 0 };
        let (mut time, mut period, mut count) = (FIRST_S, FIRST_S, 1);
        while asked > period && count < 255 {
            count += 1;
            time = (time * 2).min(MOST_S);
            period += time;
        }
        period
    }
}
