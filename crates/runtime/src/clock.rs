//! The clock. Nothing else in this crate reads the time.

use ginnel_stack::time::Instant;
use rustix::time::{ClockId, clock_gettime};

/// Returns the time of the monotonic clock of the machine, which all threads and processes share. Takes about
/// 20 ns, without a system call.
pub fn now() -> Instant {
    let t = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(t.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(t.tv_nsec).unwrap_or(0);
    Instant::from_nanos(seconds * 1_000_000_000 + nanos)
}

#[cfg(test)]
mod tests {
    use super::now;

    #[test]
    fn time_is_monotonic() {
        let mut last = now();
        for _ in 0..1000 {
            let next = now();
            assert!(next >= last);
            last = next;
        }
    }
}
