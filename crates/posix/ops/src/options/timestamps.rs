//! Receive timestamps: `SO_TIMESTAMP` and its variants, of which one is on at a time (`sock_set_timestamp`),
//! and `SO_TIMESTAMPING` (`sock_set_timestamping`).

use core::ffi::c_int;
use core::time::Duration;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

/// Numbers of the variants with 64-bit times. On 64-bit machines the other variants have them, too.
const TIMESTAMP_NEW: c_int = 63;
const TIMESTAMPNS_NEW: c_int = 64;
const TIMESTAMPING_NEW: c_int = 65;

/// Flags of `SO_TIMESTAMPING` (`SOF_TIMESTAMPING_…`, `linux/net_tstamp.h`).
pub(crate) const TX_HARDWARE: u32 = 1;
pub(crate) const TX_SOFTWARE: u32 = 1 << 1;
const RX_SOFTWARE: u32 = 1 << 3;
pub(crate) const SOFTWARE: u32 = 1 << 4;
pub(crate) const OPT_ID: u32 = 1 << 7;
pub(crate) const TX_SCHED: u32 = 1 << 8;
pub(crate) const TX_ACK: u32 = 1 << 9;
pub(crate) const OPT_CMSG: u32 = 1 << 10;
pub(crate) const OPT_TSONLY: u32 = 1 << 11;
const OPT_STATS: u32 = 1 << 12;
const BIND_PHC: u32 = 1 << 15;
pub(crate) const OPT_ID_TCP: u32 = 1 << 16;
pub(crate) const TX_COMPLETION: u32 = 1 << 18;
/// Flags that a message may have, too (`SOF_TIMESTAMPING_TX_RECORD_MASK`).
pub(crate) const TX_RECORD_MASK: u32 = TX_HARDWARE | TX_SOFTWARE | TX_SCHED | TX_ACK | TX_COMPLETION;
/// All flags of Linux 6.18.
const FLAGS_MASK: u32 = (1 << 19) - 1;

/// Which timestamps a socket reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimestampOptions {
    /// Number of the option that was enabled last, which is also the type of the control message; 0 is none.
    name: u8,
    /// Flags of `SO_TIMESTAMPING`, and whether they were set by `SO_TIMESTAMPING_NEW`, which is the type of
    /// the control message then.
    flags: u32,
    is_new: bool,
}

ginnel::codec_struct!(TimestampOptions { name, flags, is_new });

impl TimestampOptions {
    /// Returns whether an option of `SOL_SOCKET` is `SO_TIMESTAMP` or a variant.
    pub fn is_timestamp(name: c_int) -> bool {
        matches!(name, libc::SO_TIMESTAMP | libc::SO_TIMESTAMPNS | TIMESTAMP_NEW | TIMESTAMPNS_NEW)
    }

    /// Returns whether an option of `SOL_SOCKET` is `SO_TIMESTAMPING` or `SO_TIMESTAMPING_NEW`.
    pub fn is_timestamping(name: c_int) -> bool {
        matches!(name, libc::SO_TIMESTAMPING | TIMESTAMPING_NEW)
    }

    /// Enables one variant, or disables all.
    pub fn set(&mut self, name: c_int, on: bool) {
        // Cannot truncate: the numbers are below 65.
        self.name = if on { name as u8 } else { 0 };
    }

    /// Returns whether a variant is enabled. `SO_TIMESTAMP_NEW` also reports `SO_TIMESTAMPNS_NEW`.
    pub fn get(self, name: c_int) -> bool {
        let on = c_int::from(self.name);
        on == name || name == TIMESTAMP_NEW && on == TIMESTAMPNS_NEW
    }

    /// Sets the flags of `SO_TIMESTAMPING`. `has_ids` tells that the socket's datagrams or bytes are
    /// numbered.
    ///
    /// # Errors
    /// `EINVAL` for unknown flags and invalid combinations, `EOPNOTSUPP` for a hardware clock.
    pub fn set_flags(&mut self, name: c_int, value: &[u8], has_ids: bool) -> Result<(), Errno> {
        let bytes = value.first_chunk().ok_or(Errno::INVAL)?;
        let flags = u32::from_ne_bytes(*bytes);
        let has = |flag| flags & flag != 0;
        let enables_ids = has(OPT_ID) && self.flags & OPT_ID == 0;
        if flags & !FLAGS_MASK != 0
            || has(OPT_ID_TCP) && !has(OPT_ID)
            || enables_ids && !has_ids
            || has(OPT_STATS) && !has(OPT_TSONLY)
        {
            return Err(Errno::INVAL);
        }
        if has(BIND_PHC) {
            return Err(Errno::OPNOTSUPP);
        }
        (self.flags, self.is_new) = (flags, name == TIMESTAMPING_NEW);
        Ok(())
    }

    /// Returns whether a flag is set.
    pub fn has(self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// Returns the flags that ask for transmit timestamps of each message.
    pub fn tx_flags(self) -> u32 {
        self.flags & TX_RECORD_MASK
    }

    /// Returns `struct so_timestamping`. `SO_TIMESTAMPING_NEW` returns only flags that it has set itself.
    pub fn flags(self, name: c_int) -> Vec<u8> {
        let is_reported = name == libc::SO_TIMESTAMPING || self.is_new;
        [if is_reported { self.flags } else { 0 }, 0].map(u32::to_ne_bytes).concat()
    }

    pub fn are_on(self) -> bool {
        self.name != 0 || self.flags & RX_SOFTWARE != 0
    }

    /// Returns type and value of the control message. `arrived_us` holds the lowest 32 bits of the arrival
    /// time in µs; `None` stands for a datagram that arrived before timestamps were enabled, which gets the
    /// current time (`__sock_recv_timestamp`).
    pub fn timestamp_cmsg(self, arrived_us: Option<u32>) -> Option<(c_int, [u8; 16])> {
        if self.name == 0 {
            return None;
        }
        Some(self.timestamp_cmsg_at(time_of(arrived_us)))
    }

    /// Returns type and value of the control message of the variant that is enabled, for this time.
    pub fn timestamp_cmsg_at(self, at: Duration) -> (c_int, [u8; 16]) {
        let name = c_int::from(self.name);
        let fraction = match name {
            libc::SO_TIMESTAMP | TIMESTAMP_NEW => at.subsec_micros(),
            _ => at.subsec_nanos(),
        };
        (name, time_pair(at.as_secs(), fraction))
    }

    /// Returns type and value of the control message of `SO_TIMESTAMPING`: three times, of which only the
    /// first, the software's, is set (`struct scm_timestamping`).
    pub fn timestamping_cmsg(self, arrived_us: Option<u32>) -> Option<(c_int, [u8; 48])> {
        if self.flags & RX_SOFTWARE == 0 || self.flags & SOFTWARE == 0 {
            return None;
        }
        Some(self.timestamping_cmsg_at(time_of(arrived_us)))
    }

    /// Returns type and value of the control message of `SO_TIMESTAMPING` for this time.
    pub fn timestamping_cmsg_at(self, at: Duration) -> (c_int, [u8; 48]) {
        let mut value = [0; 48];
        value[..16].copy_from_slice(&time_pair(at.as_secs(), at.subsec_nanos()));
        (if self.is_new { TIMESTAMPING_NEW } else { libc::SO_TIMESTAMPING }, value)
    }

    /// Returns whether a variant of `SO_TIMESTAMP` is enabled.
    pub fn has_variant(self) -> bool {
        self.name != 0
    }
}

/// Returns the time whose lowest 32 bits in µs are `arrived_us`, or the current time.
pub(crate) fn time_of(arrived_us: Option<u32>) -> Duration {
    let now = clock_gettime(ClockId::Realtime);
    let now = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32);
    let elapsed = arrived_us.map_or(0, |arrived_us| (now.as_micros() as u32).wrapping_sub(arrived_us));
    now.saturating_sub(Duration::from_micros(elapsed.into()))
}

/// Returns seconds and a fraction as `struct timespec` or `struct timeval` has them in memory.
fn time_pair(seconds: u64, fraction: u32) -> [u8; 16] {
    let mut value = [0; 16];
    value[..8].copy_from_slice(&seconds.to_ne_bytes());
    value[8..].copy_from_slice(&u64::from(fraction).to_ne_bytes());
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn past_arrival_reports_its_own_time() {
        let mut timestamps = TimestampOptions::default();
        assert_eq!(timestamps.timestamp_cmsg(None), None);
        timestamps.set(libc::SO_TIMESTAMP, true);
        let seconds = |arrived_us| {
            let (name, value) = timestamps.timestamp_cmsg(arrived_us).unwrap();
            assert_eq!(name, libc::SO_TIMESTAMP);
            u64::from_ne_bytes(value[..8].try_into().unwrap())
        };
        let now = seconds(None);
        let micros = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros();
        let before = seconds(Some((micros as u32).wrapping_sub(1_000_000_000)));
        assert!((999..=1001).contains(&(now - before)), "{now} {before}");
    }
}
