//! Tests in real time on a machine that others use, too: a processor may be taken away for longer than a test can bear.
//!
//! A run that failed while the machine stood still says nothing of what it tests, and is made again.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a witness sleeps.
const DETECTOR_PERIOD: Duration = Duration::from_millis(2);
/// What a witness that comes later than this reports. Scripts bear this much.
const STALL_THRESHOLD: Duration = Duration::from_millis(4);
/// A machine that stood still in each attempt for so long is too busy for tests in real time.
const RETRY_TIME_MAX: Duration = Duration::from_secs(150);
/// The next attempt waits until no processor stood still for so long,
const STEADY_PERIOD: Duration = Duration::from_millis(500);
/// but no longer than this.
const STEADY_WAIT_MAX: Duration = Duration::from_secs(5);

/// When a processor came back the last time.
static LAST_STALL: Mutex<Option<Instant>> = Mutex::new(None);

fn last_stall() -> MutexGuard<'static, Option<Instant>> {
    LAST_STALL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a witness on each processor, once in a process.
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
    let mut one = CpuSet::new();
    one.set(cpu);
    if sched_setaffinity(None, &one).is_err() {
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

/// Whether a processor stood still since then.
fn stalled_since(since: Instant) -> bool {
    // One that stands still as the run ends is heard of behind it.
    thread::sleep(DETECTOR_PERIOD + STALL_THRESHOLD);
    last_stall().is_some_and(|last| last > since)
}

/// Waits for a moment in which an attempt is worth it.
fn wait_until_steady() {
    let start = Instant::now();
    while stalled_since(Instant::now() - STEADY_PERIOD) && start.elapsed() < STEADY_WAIT_MAX {
        thread::sleep(DETECTOR_PERIOD);
    }
}

/// Runs what depends on real time until it passes, and says at which attempt; or the last failure, once it failed `attempts` times while the machine ran, or
/// for [`PATIENCE`] while it did not.
pub fn retry_in_real_time<E>(attempts: u32, run: impl FnMut() -> Result<(), E>) -> Result<u32, E> {
    retry_within(RETRY_TIME_MAX, attempts, run)
}

fn retry_within<E>(
    patience: Duration,
    attempts: u32,
    mut run: impl FnMut() -> Result<(), E>,
) -> Result<u32, E> {
    start_detectors();
    let deadline = Instant::now() + patience;
    let (mut failed, mut excused) = (0, 0);
    loop {
        let start = Instant::now();
        match run() {
            Ok(()) => return Ok(failed + excused + 1),
            Err(_) if stalled_since(start) && Instant::now() < deadline => {
                excused += 1;
                wait_until_steady();
            }
            Err(failure) => {
                failed += 1;
                if failed >= attempts || Instant::now() >= deadline {
                    return Err(failure);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One at a time: what a witness of one reports is seen by the others.
    static SERIAL: Mutex<()> = Mutex::new(());

    fn lock_serial() -> MutexGuard<'static, ()> {
        SERIAL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[test]
    fn a_failure_counts_unless_the_machine_stood_still() {
        let _alone = lock_serial();
        let mut runs = 0;
        let ended = retry_in_real_time(3, || {
            runs += 1;
            Err::<(), _>(runs)
        });
        assert_eq!(ended, Err(runs));
        assert!(runs >= 3, "{runs}");

        let mut runs = 0;
        let ended = retry_in_real_time(1, || {
            runs += 1;
            // As a witness that was late does.
            *last_stall() = Some(Instant::now());
            if runs < 5 { Err(runs) } else { Ok(()) }
        });
        assert_eq!(ended, Ok(5));
    }

    #[test]
    fn a_machine_that_always_stands_still_is_given_up() {
        let _alone = lock_serial();
        let start = Instant::now();
        let mut runs = 0;
        let ended = retry_within(Duration::from_secs(1), 1, || {
            runs += 1;
            *last_stall() = Some(Instant::now());
            Err::<(), _>(runs)
        });
        assert_eq!(ended, Err(runs));
        assert!(runs >= 2 && start.elapsed() >= Duration::from_secs(1), "{runs}");
    }
}
