//! Values of TCP's options that are no plain numbers.

use super::OptionValue;
use ginnel::CongestionControl;
use rustix::io::Errno;

/// Bytes of a name of an algorithm (`TCP_CA_NAME_MAX`).
const CONGESTION_NAME_BYTES: usize = 16;

pub(super) fn congestion(value: &[u8]) -> Result<CongestionControl, Errno> {
    if value.is_empty() {
        return Err(Errno::INVAL);
    }
    let name = value.get(..CONGESTION_NAME_BYTES - 1).unwrap_or(value);
    match name.split(|byte| *byte == 0).next().unwrap_or_default() {
        b"cubic" => Ok(CongestionControl::Cubic),
        b"reno" => Ok(CongestionControl::NewReno),
        _ => Err(Errno::NOENT),
    }
}

pub(super) fn congestion_name(kind: CongestionControl) -> OptionValue {
    let mut name = match kind {
        CongestionControl::Cubic => b"cubic".to_vec(),
        CongestionControl::NewReno => b"reno".to_vec(),
    };
    name.resize(CONGESTION_NAME_BYTES, 0);
    OptionValue::truncatable(name)
}

/// `TCP_DEFER_ACCEPT` is kept as a number of SYN+ACKs, so times read back as what these take.
pub(super) mod defer_accept {
    /// Time until the second SYN+ACK, and between two of them at the most, in seconds.
    const FIRST_S: u32 = 1;
    const MOST_S: u32 = 120;

    /// What a number of seconds becomes (`secs_to_retrans`, `retrans_to_secs`).
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
