//! Times at which datagrams are to be sent (`SO_TXTIME`, `SCM_TXTIME`).
//!
//! With `CLOCK_MONOTONIC` the stack behaves as Linux's queueing discipline `fq` with its default parameters,
//! with other clocks as `etf`, each for the datagrams that have a time.

use crate::kernel_socket;
use crate::options::SocketOptionState;
use crate::sockaddr::Family;
use core::ffi::c_int;
use core::num::NonZeroU32;
use rustix::io::Errno;
use rustix::time::{ClockId, DynamicClockId, Timespec, clock_gettime, clock_gettime_dynamic};

/// The option's name in the table.
const NAME: &str = "SO_TXTIME";
/// Flags (`SOF_TXTIME_…`).
const DEADLINE_MODE: u32 = 1;
const REPORT_ERRORS: u32 = 2;
/// Bytes of `struct sock_txtime`.
const OPTION_BYTES: usize = 8;
/// Mark in the stored value that the option was set. The clock follows the flags.
const IS_SET: c_int = 1 << 16;
/// How far ahead a time may be (`fq`'s `horizon`).
const HORIZON_NS: u64 = 10_000_000_000;

/// Treatment of a datagram with a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Departure {
    /// It is sent at once.
    Now,
    /// It is sent when the monotonic clock has these lowest 32 bits of microseconds.
    At(NonZeroU32),
    /// It is dropped, and reported in the error queue if the program wants that.
    Dropped { is_reported: bool },
}

/// The option of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TxTime {
    clock: c_int,
    flags: u32,
}

impl TxTime {
    /// Returns what becomes of a datagram with this time, in ns of the socket's clock. `now` has the time of
    /// that clock and of the monotonic clock.
    fn departure(self, at: u64, [now, monotonic]: [u64; 2]) -> Departure {
        let is_strict = self.clock != libc::CLOCK_MONOTONIC;
        let is_reported = is_strict && self.flags & REPORT_ERRORS != 0;
        match at.checked_sub(now) {
            None if is_strict => Departure::Dropped { is_reported },
            None | Some(0) => Departure::Now,
            Some(_) if is_strict && self.flags & DEADLINE_MODE != 0 => Departure::Now,
            Some(ahead) if ahead > HORIZON_NS => Departure::Dropped { is_reported },
            // Cannot truncate in a way that matters: the stack has the upper bits. 0 stands for no time.
            Some(ahead) => {
                let at_us = monotonic.saturating_add(ahead).div_ceil(1000) as u32;
                Departure::At(NonZeroU32::new(at_us).unwrap_or(NonZeroU32::MIN))
            }
        }
    }
}

impl SocketOptionState {
    fn txtime(&self) -> Option<TxTime> {
        let stored = self.stored_int(NAME).filter(|stored| stored & IS_SET != 0)?;
        Some(TxTime {
            clock: stored >> 2 & 0xff,
            flags: stored.cast_unsigned() & (DEADLINE_MODE | REPORT_ERRORS),
        })
    }

    /// Returns whether datagrams may have times.
    pub fn has_departures(&self) -> bool {
        self.txtime().is_some()
    }

    /// Sets `SO_TXTIME`.
    ///
    /// # Errors
    /// `EINVAL`; `EPERM` for another clock than `CLOCK_MONOTONIC` without the capability.
    pub(crate) fn set_txtime(&mut self, family: Family, value: &[u8]) -> Result<(), Errno> {
        let (words, rest) = value.as_chunks::<4>();
        let ([clock, flags], []) = (words, rest) else { return Err(Errno::INVAL) };
        let (clock, flags) = (c_int::from_ne_bytes(*clock), u32::from_ne_bytes(*flags));
        if flags & !(DEADLINE_MODE | REPORT_ERRORS) != 0 {
            return Err(Errno::INVAL);
        }
        if clock != libc::CLOCK_MONOTONIC {
            // The kernel decides which clocks there are, and whether the program may choose this one.
            kernel_socket::try_option(family, libc::SOL_SOCKET, libc::SO_TXTIME, value)?;
        }
        self.store_int(NAME, IS_SET | clock << 2 | flags.cast_signed());
        Ok(())
    }

    /// Returns the value of `SO_TXTIME`.
    pub(crate) fn txtime_value(&self) -> [u8; OPTION_BYTES] {
        let TxTime { clock, flags } = self.txtime().unwrap_or(TxTime { clock: 0, flags: 0 });
        let mut value = [0; OPTION_BYTES];
        value[..4].copy_from_slice(&clock.to_ne_bytes());
        value[4..].copy_from_slice(&flags.to_ne_bytes());
        value
    }

    /// Returns what becomes of a datagram with this time, in ns of the socket's clock.
    #[cold]
    pub(crate) fn departure(&self, at: u64) -> Departure {
        let Some(txtime) = self.txtime() else { return Departure::Now };
        let nanos = |time: Timespec| {
            let (seconds, nanos) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
            seconds.saturating_mul(1_000_000_000).saturating_add(nanos)
        };
        let monotonic = nanos(clock_gettime(ClockId::Monotonic));
        let now = match txtime.clock {
            // All kernels have the clock.
            libc::CLOCK_TAI => clock_gettime_dynamic(DynamicClockId::Tai).map_or(monotonic, nanos),
            libc::CLOCK_REALTIME => nanos(clock_gettime(ClockId::Realtime)),
            _ => monotonic,
        };
        txtime.departure(at, [now, monotonic])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const NOW: [u64; 2] = [500_000 * MS, 1000 * MS];

    #[test]
    fn a_monotonic_time_never_reports() {
        let txtime = TxTime { clock: libc::CLOCK_MONOTONIC, flags: DEADLINE_MODE | REPORT_ERRORS };
        let departure = |ahead_us: i64| txtime.departure(NOW[0].wrapping_add_signed(ahead_us * 1000), NOW);
        assert_eq!([-1, 0].map(departure), [Departure::Now; 2]);
        assert_eq!(departure(7), Departure::At(NonZeroU32::new(1_000_007).unwrap()));
        assert_eq!(departure(10_000_001), Departure::Dropped { is_reported: false });
    }

    #[test]
    fn other_clocks_drop_what_is_late() {
        let departure = |flags, ahead_us: i64| {
            let txtime = TxTime { clock: libc::CLOCK_TAI, flags };
            txtime.departure(NOW[0].wrapping_add_signed(ahead_us * 1000), NOW)
        };
        assert_eq!(departure(0, -1), Departure::Dropped { is_reported: false });
        assert_eq!(departure(REPORT_ERRORS, -1), Departure::Dropped { is_reported: true });
        assert_eq!(departure(REPORT_ERRORS, 7), Departure::At(NonZeroU32::new(1_000_007).unwrap()));
        assert_eq!(departure(DEADLINE_MODE, 7), Departure::Now);
        assert_eq!(departure(DEADLINE_MODE, -7), Departure::Dropped { is_reported: false });
    }
}
