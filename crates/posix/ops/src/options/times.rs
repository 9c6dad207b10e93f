//! Time options of TCP and other rare options, which are stored with the integers that differ from their
//! defaults.

use super::table::{AcceptedValues, IntFormat};
use super::{OptionValue, SocketOptionState, StackOption};
use core::ffi::c_int;
use core::time::Duration;
use ginnel::SaveSyn;
use rustix::io::Errno;

/// A kernel tick in µs: Linux takes and reports these times in ticks (`CONFIG_HZ=250`).
const TICK_US: u32 = 4000;

/// A time option.
#[derive(Clone, Copy)]
pub(super) struct TimeOption {
    number: c_int,
    linux_name: &'static str,
    stack_option: StackOption,
    /// The option's unit, in µs.
    unit_us: u32,
    least: c_int,
    most: c_int,
}

/// `TCP_RTO_MAX_MS`, from 1 s to `TCP_RTO_MAX_SEC`.
pub(super) const RTO_MAX: TimeOption = TimeOption {
    number: 44,
    linux_name: "TCP_RTO_MAX_MS",
    stack_option: StackOption::RtoMax,
    unit_us: 1000,
    least: 1000,
    most: 120_000,
};
/// `TCP_RTO_MIN_US`, from `TCP_TIMEOUT_MIN` (two ticks) to `TCP_RTO_MIN`.
pub(super) const RTO_MIN: TimeOption = short(45, "TCP_RTO_MIN_US", StackOption::RtoMin);
/// `TCP_DELACK_MAX_US`, from `TCP_TIMEOUT_MIN` to `TCP_DELACK_MAX`.
pub(super) const DELACK_MAX: TimeOption = short(46, "TCP_DELACK_MAX_US", StackOption::DelayedAckMax);

const TIMES: [TimeOption; 3] = [RTO_MAX, RTO_MIN, DELACK_MAX];

const fn short(number: c_int, linux_name: &'static str, stack_option: StackOption) -> TimeOption {
    TimeOption {
        number,
        linux_name,
        stack_option,
        unit_us: 1,
        // Rounded up, this is two ticks.
        least: TICK_US.cast_signed() + 1,
        most: 200_000,
    }
}

/// Returns the time option of this number.
pub(super) fn find(number: c_int) -> Option<TimeOption> {
    TIMES.into_iter().find(|time| time.number == number)
}

impl SocketOptionState {
    /// Sets a time option, rounded up to ticks.
    ///
    /// # Errors
    /// `EINVAL` out of its range.
    pub(super) fn set_time(&mut self, time: TimeOption, value: &[u8]) -> Result<(), Errno> {
        let value = AcceptedValues::Within(time.least, time.most).apply(IntFormat::Int.read(value)?, 0, 0)?;
        let tick = (TICK_US / time.unit_us).cast_signed();
        // Cannot overflow: the value is at most 200,000.
        self.ints.set(time.linux_name, (value + tick - 1) / tick * tick);
        self.mark_set(time.stack_option);
        Ok(())
    }

    /// Returns the value of a time option; the default is the maximum.
    pub(super) fn time_value(&self, time: TimeOption) -> OptionValue {
        OptionValue::int(self.ints.get(time.linux_name).unwrap_or(time.most))
    }

    /// Returns a time option as a duration.
    pub(super) fn duration_of(&self, time: TimeOption) -> Duration {
        let value = self.ints.get(time.linux_name).unwrap_or(time.most).unsigned_abs();
        Duration::from_micros(u64::from(value) * u64::from(time.unit_us))
    }

    /// Returns `IP_MINTTL` or `IPV6_MINHOPCOUNT`.
    pub(super) fn min_ttl(&self, v4: bool) -> u8 {
        let linux_name = if v4 { "IP_MINTTL" } else { "IPV6_MINHOPCOUNT" };
        // Cannot truncate: larger values are not accepted.
        self.ints.get(linux_name).map_or(0, |ttl| ttl as u8)
    }

    /// Sets `IP_MINTTL`, for which one byte suffices, or `IPV6_MINHOPCOUNT`.
    ///
    /// # Errors
    /// `EINVAL` for values outside of 0 to 255.
    pub(super) fn set_min_ttl(&mut self, v4: bool, value: &[u8]) -> Result<(), Errno> {
        let format = if v4 { IntFormat::IntOrByte } else { IntFormat::Int };
        let ttl = AcceptedValues::Within(0, 255).apply(format.read(value)?, 0, 0)?;
        self.ints.set(if v4 { "IP_MINTTL" } else { "IPV6_MINHOPCOUNT" }, ttl);
        self.mark_set(StackOption::MinTtl);
        Ok(())
    }

    /// Returns what a listener keeps of SYNs (`TCP_SAVE_SYN`).
    pub(super) fn save_syn(&self) -> SaveSyn {
        match self.ints.get("TCP_SAVE_SYN") {
            Some(1) => SaveSyn::Packet,
            Some(2) => SaveSyn::Frame,
            _ => SaveSyn::Off,
        }
    }

    /// Sets `TCP_SAVE_SYN`.
    ///
    /// # Errors
    /// `EINVAL` for values other than 0, 1 and 2.
    pub(super) fn set_save_syn(&mut self, value: &[u8]) -> Result<(), Errno> {
        let value = AcceptedValues::Within(0, 2).apply(IntFormat::Int.read(value)?, 0, 0)?;
        self.ints.set("TCP_SAVE_SYN", value);
        Ok(())
    }
}
