//! Detects CPU steal: the host took a processor away, which real-time tests tolerate for a few milliseconds
//! only.
//!
//! This is the only place that repeats a test: [`repeat_if_stalled`] repeats a run that failed while a
//! processor stalled, because such a run shows nothing. A run that failed on a steady machine counts.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Longest stall that every test in real time tolerates: that of packet scripts.
const TOLERATED_STALL: Duration = Duration::from_millis(4);
/// Time between two wake-ups of a detector thread.
const DETECTOR_PERIOD: Duration = Duration::from_millis(1);
/// A detector that wakes up later than this reports a stall. A stall may begin just after a wake-up, so the
/// detector is late by the length of the stall less one period.
const STALL_THRESHOLD: Duration = Duration::from_millis(2);
const _: () = assert!(
    DETECTOR_PERIOD.as_nanos() + STALL_THRESHOLD.as_nanos() < TOLERATED_STALL.as_nanos(),
    "a stall that tests do not tolerate would go unnoticed"
);
/// Longest time for repetitions: afterwards a run that failed counts as failed, although it stalled.
const REPEAT_TIME_MAX: Duration = Duration::from_secs(150);
/// Time without a stall that a repetition waits for.
const STEADY_PERIOD: Duration = Duration::from_millis(500);
/// Longest wait for a steady period.
const STEADY_WAIT_MAX: Duration = Duration::from_secs(5);

/// The end of the last stall of any processor.
static LAST_STALL: Mutex<Option<Instant>> = Mutex::new(None);

fn last_stall() -> MutexGuard<'static, Option<Instant>> {
    LAST_STALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a detector thread on each processor, once in a process.
fn start_detectors() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let Ok(allowed) = sched_getaffinity(None) else { return };
        for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)) {
            thread::spawn(move || detect_steal(cpu));
        }
    });
}

fn detect_steal(cpu: usize) {
    let mut single_cpu = CpuSet::new();
    single_cpu.set(cpu);
    if sched_setaffinity(None, &single_cpu).is_err() {
        return;
    }
    loop {
        let before = Instant::now();
        thread::sleep(DETECTOR_PERIOD);
        let now = Instant::now();
        if now - before > DETECTOR_PERIOD + STALL_THRESHOLD {
            *last_stall() = Some(now);
        }
    }
}

/// Returns whether a processor stalled since `since`. Sleeps 5 ms first, because a detector reports a stall
/// after its end.
fn stalled_since(since: Instant) -> bool {
    thread::sleep(DETECTOR_PERIOD + TOLERATED_STALL);
    last_stall().is_some_and(|last| last > since)
}

/// Waits for a steady period, for five seconds at most.
fn wait_until_steady() {
    let start = Instant::now();
    while stalled_since(Instant::now() - STEADY_PERIOD) && start.elapsed() < STEADY_WAIT_MAX {
        thread::sleep(DETECTOR_PERIOD);
    }
}

/// Runs a test that depends on real time; repeats a run that failed while a processor stalled, for 150 s at
/// most. Returns the number of runs.
///
/// # Errors
/// The failure of the first run that failed without a stall, or of the last run after 150 s.
pub fn repeat_if_stalled<E>(run: impl FnMut() -> Result<(), E>) -> Result<u32, E> {
    repeat_within(REPEAT_TIME_MAX, run)
}

fn repeat_within<E>(time_max: Duration, mut run: impl FnMut() -> Result<(), E>) -> Result<u32, E> {
    start_detectors();
    let deadline = Instant::now() + time_max;
    for runs in 1.. {
        let start = Instant::now();
        match run() {
            Ok(()) => return Ok(runs),
            Err(_) if stalled_since(start) && Instant::now() < deadline => wait_until_steady(),
            Err(failure) => return Err(failure),
        }
    }
    unreachable!("the deadline ends the loop before the count overflows")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serialises the tests, because they share the detectors' report.
    static SERIAL: Mutex<()> = Mutex::new(());

    fn lock_serial() -> MutexGuard<'static, ()> {
        SERIAL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn runs_are_repeated_only_after_a_stall() {
        let _serial = lock_serial();
        let mut runs = 0;
        let ended = repeat_if_stalled(|| {
            runs += 1;
            // The fifth run reports no stall; a real one may add more runs.
            *last_stall() = (runs < 5).then(Instant::now);
            Err::<(), _>(runs)
        });
        assert_eq!(ended, Err(runs));
        assert!(runs >= 5, "{runs}");

        let mut runs = 0;
        let ended = repeat_if_stalled(|| {
            runs += 1;
            *last_stall() = Some(Instant::now());
            if runs < 5 { Err(runs) } else { Ok(()) }
        });
        assert_eq!(ended, Ok(5));
    }

    #[test]
    fn permanent_stall_ends_the_repetition() {
        let _serial = lock_serial();
        let start = Instant::now();
        let mut runs = 0;
        let ended = repeat_within(Duration::from_secs(1), || {
            runs += 1;
            *last_stall() = Some(Instant::now());
            Err::<(), _>(runs)
        });
        assert_eq!(ended, Err(runs));
        assert!(runs >= 2 && start.elapsed() >= Duration::from_secs(1), "{runs}");
    }
}
