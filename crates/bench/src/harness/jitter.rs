//! Jitter of the machine: how long threads that never sleep are kept from running.

use super::machine::{Cpus, pin};
use core::time::Duration;
use std::io;
use std::time::Instant;

/// Time for which the threads run.
const TIME: Duration = Duration::from_secs(5);
/// Part of the time for which the longest pause is one sample.
const SLICE: Duration = Duration::from_millis(1);

/// Pauses of threads that do nothing but read the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Jitter {
    /// 99.9th percentile of the longest pause in each millisecond.
    pub p99_9: Duration,
    /// Longest pause.
    pub longest: Duration,
}

/// Measures the jitter of both CPUs at the same time, and returns the larger values.
pub fn measure(cpus: Cpus) -> io::Result<Jitter> {
    let both = [cpus.server, cpus.client];
    let measured: Vec<io::Result<Jitter>> = std::thread::scope(|scope| {
        let threads = both.map(|cpu| scope.spawn(move || pin(cpu).map(|()| watch(TIME))));
        threads.into_iter().map(|thread| thread.join().expect("the thread does not panic")).collect()
    });
    let mut worst = Jitter::default();
    for jitter in measured {
        let jitter = jitter?;
        worst.p99_9 = worst.p99_9.max(jitter.p99_9);
        worst.longest = worst.longest.max(jitter.longest);
    }
    Ok(worst)
}

fn watch(time: Duration) -> Jitter {
    let mut pauses = Vec::with_capacity((time.as_millis() / SLICE.as_millis()) as usize + 1);
    let start = Instant::now();
    let (mut last, mut slice_end, mut longest) = (start, start + SLICE, Duration::ZERO);
    while last - start < time {
        let now = Instant::now();
        longest = longest.max(now - last);
        last = now;
        if now >= slice_end {
            pauses.push(core::mem::take(&mut longest));
            slice_end = now + SLICE;
        }
    }
    pauses.sort_unstable();
    let rank = (pauses.len() * 999).div_ceil(1000).saturating_sub(1);
    let at = |rank: usize| pauses.get(rank).copied().unwrap_or_default();
    Jitter { p99_9: at(rank), longest: at(pauses.len().saturating_sub(1)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_pause_is_at_least_the_percentile() {
        let jitter = watch(Duration::from_millis(50));
        assert!(jitter.longest >= jitter.p99_9 && jitter.p99_9 > Duration::ZERO, "{jitter:?}");
    }
}
