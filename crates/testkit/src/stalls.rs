//! Tests in real time on a machine that others use, too: a processor may be taken away for longer than a test can bear.
//!
//! A run that failed while the machine stood still says nothing of what it tests, and is made again.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a witness sleeps.
const TICK: Duration = Duration::from_millis(2);
/// What a witness that comes later than this reports. Scripts bear this much.
const LATE: Duration = Duration::from_millis(4);
/// Failures on a machine that stood still that are looked at in vain: then it is too busy for tests in real time.
const EXCUSED: u32 = 15;

/// When a processor came back the last time.
static SEEN: Mutex<Option<Instant>> = Mutex::new(None);

fn seen() -> MutexGuard<'static, Option<Instant>> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a witness on each processor, once in a process.
fn watch() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let Ok(allowed) = sched_getaffinity(None) else { return };
        for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)) {
            thread::spawn(move || witness(cpu));
        }
    });
}

fn witness(cpu: usize) {
    let mut one = CpuSet::new();
    one.set(cpu);
    if sched_setaffinity(None, &one).is_err() {
        return;
    }
    loop {
        let before = Instant::now();
        thread::sleep(TICK);
        let now = Instant::now();
        if now - before > TICK + LATE {
            *seen() = Some(now);
        }
    }
}

/// Whether a processor stood still since then.
fn stood_still(since: Instant) -> bool {
    // One that stands still as the run ends is heard of behind it.
    thread::sleep(TICK + LATE);
    seen().is_some_and(|last| last > since)
}

/// Runs what depends on real time until it passes, and says at which attempt; or the last failure, once it failed `attempts` times while the machine ran, or
/// many more while it did not.
pub fn in_real_time<E>(attempts: u32, mut run: impl FnMut() -> Result<(), E>) -> Result<u32, E> {
    watch();
    let (mut failed, mut excused) = (0, 0);
    loop {
        let start = Instant::now();
        match run() {
            Ok(()) => return Ok(failed + excused + 1),
            Err(_) if excused < EXCUSED && stood_still(start) => excused += 1,
            Err(failure) => {
                failed += 1;
                if failed >= attempts {
                    return Err(failure);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_counts_unless_the_machine_stood_still() {
        let mut runs = 0;
        let ended = in_real_time(3, || {
            runs += 1;
            Err::<(), _>(runs)
        });
        assert_eq!(ended, Err(runs));
        assert!((3..=3 + EXCUSED).contains(&runs), "{runs}");

        let mut runs = 0;
        let ended = in_real_time(1, || {
            runs += 1;
            // As a witness that was late does.
            *seen() = Some(Instant::now());
            if runs < 5 { Err(runs) } else { Ok(()) }
        });
        assert_eq!(ended, Ok(5));
    }
}
