//! When datagrams came: `SO_TIMESTAMP` and its like, of which one is on at a time (`sock_set_timestamp`), and `SO_TIMESTAMPING` (`sock_set_timestamping`).

use core::ffi::c_int;
use core::time::Duration;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

/// Numbers of those whose times are 64 bits wide everywhere; here all are.
const TIMESTAMP_NEW: c_int = 63;
const TIMESTAMPNS_NEW: c_int = 64;
const TIMESTAMPING_NEW: c_int = 65;

/// Flags of `SO_TIMESTAMPING` (`SOF_TIMESTAMPING_…`, `linux/net_tstamp.h`).
const RX_SOFTWARE: u32 = 1 << 3;
const SOFTWARE: u32 = 1 << 4;
const OPT_ID: u32 = 1 << 7;
const OPT_TSONLY: u32 = 1 << 11;
const OPT_STATS: u32 = 1 << 12;
const BIND_PHC: u32 = 1 << 15;
const OPT_ID_TCP: u32 = 1 << 16;
/// All that there are in Linux 6.18.
const FLAGS_MASK: u32 = (1 << 19) - 1;

/// Which control messages say it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimestampOptions {
    /// The number of the option that was switched on last, which is the message's, too; 0 is none.
    name: u8,
    /// What `SO_TIMESTAMPING` was told, and whether by its newer number, which is the message's then.
    flags: u32,
    is_new: bool,
}

ginnel::codec_struct!(TimestampOptions { name, flags, is_new });

impl TimestampOptions {
    /// Whether an option of `SOL_SOCKET` is one of those that are on or off.
    pub fn is_timestamp(name: c_int) -> bool {
        matches!(name, libc::SO_TIMESTAMP | libc::SO_TIMESTAMPNS | TIMESTAMP_NEW | TIMESTAMPNS_NEW)
    }

    /// Whether it is the one with flags.
    pub fn is_timestamping(name: c_int) -> bool {
        matches!(name, libc::SO_TIMESTAMPING | TIMESTAMPING_NEW)
    }

    /// Switches one on, or all off.
    pub fn set(&mut self, name: c_int, on: bool) {
        // Cannot truncate: the numbers are below 65.
        self.name = if on { name as u8 } else { 0 };
    }

    /// Whether one is on. The newer one of seconds and microseconds says so also of nanoseconds.
    pub fn get(self, name: c_int) -> bool {
        let on = c_int::from(self.name);
        on == name || name == TIMESTAMP_NEW && on == TIMESTAMPNS_NEW
    }

    /// Sets the flags of `SO_TIMESTAMPING`. `can_count`: it is a socket whose messages, or bytes, have numbers.
    ///
    /// # Errors
    /// `EINVAL` for flags that there are not, or that go not together; `EOPNOTSUPP` for a clock of a device.
    pub fn set_flags(&mut self, name: c_int, value: &[u8], can_count: bool) -> Result<(), Errno> {
        let bytes = value.first_chunk().ok_or(Errno::INVAL)?;
        let flags = u32::from_ne_bytes(*bytes);
        let has = |flag| flags & flag != 0;
        let counts_anew = has(OPT_ID) && self.flags & OPT_ID == 0;
        if flags & !FLAGS_MASK != 0
            || has(OPT_ID_TCP) && !has(OPT_ID)
            || counts_anew && !can_count
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

    /// `struct so_timestamping`. The newer number says only what was set by it.
    pub fn flags(self, name: c_int) -> Vec<u8> {
        let told = name == libc::SO_TIMESTAMPING || self.is_new;
        [if told { self.flags } else { 0 }, 0].map(u32::to_ne_bytes).concat()
    }

    pub fn are_on(self) -> bool {
        self.name != 0 || self.flags & RX_SOFTWARE != 0
    }

    /// The control message's number and value, of what came at so many microseconds, of which the lowest 32 bits are known; `None` has come before anybody asked, so it comes now
    /// (`__sock_recv_timestamp`).
    pub fn timestamp_cmsg(self, came: Option<u32>) -> Option<(c_int, [u8; 16])> {
        if self.name == 0 {
            return None;
        }
        let name = c_int::from(self.name);
        let at = time_of(came);
        let fraction = match name {
            libc::SO_TIMESTAMP | TIMESTAMP_NEW => at.subsec_micros(),
            _ => at.subsec_nanos(),
        };
        Some((name, time_pair(at.as_secs(), fraction)))
    }

    /// The same of `SO_TIMESTAMPING`: three times, of which devices would give the last (`struct scm_timestamping`).
    pub fn timestamping_cmsg(self, came: Option<u32>) -> Option<(c_int, [u8; 48])> {
        if self.flags & RX_SOFTWARE == 0 || self.flags & SOFTWARE == 0 {
            return None;
        }
        let at = time_of(came);
        let mut value = [0; 48];
        value[..16].copy_from_slice(&time_pair(at.as_secs(), at.subsec_nanos()));
        Some((if self.is_new { TIMESTAMPING_NEW } else { libc::SO_TIMESTAMPING }, value))
    }
}

/// When it was so many microseconds, of which the lowest 32 bits are known.
fn time_of(came: Option<u32>) -> Duration {
    let now = clock_gettime(ClockId::Realtime);
    let now = Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32);
    let passed = came.map_or(0, |came| (now.as_micros() as u32).wrapping_sub(came));
    now.saturating_sub(Duration::from_micros(passed.into()))
}

/// Seconds and a fraction of one, as they stand in memory.
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
    fn what_came_a_while_ago_is_told_as_of_then() {
        let mut stamps = TimestampOptions::default();
        assert_eq!(stamps.timestamp_cmsg(None), None);
        stamps.set(libc::SO_TIMESTAMP, true);
        let seconds = |came| {
            let (name, value) = stamps.timestamp_cmsg(came).unwrap();
            assert_eq!(name, libc::SO_TIMESTAMP);
            u64::from_ne_bytes(value[..8].try_into().unwrap())
        };
        let now = seconds(None);
        let micros = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros();
        let before = seconds(Some((micros as u32).wrapping_sub(1_000_000_000)));
        assert!((999..=1001).contains(&(now - before)), "{now} {before}");
    }
}
