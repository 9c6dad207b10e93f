//! The machine: its CPUs, their load by other programs, and their cache line latency.

use crate::MeasureError;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// The two CPUs that a measurement uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus {
    /// The CPU of the server.
    pub server: usize,
    /// The CPU of the client.
    pub client: usize,
}

impl Cpus {
    /// Chooses the first two CPUs that this process may use.
    ///
    /// # Errors
    /// [`MeasureError::Skipped`] if there is only one.
    pub fn choose() -> Result<Self, MeasureError> {
        let allowed = sched_getaffinity(None).map_err(io::Error::from)?;
        let mut all = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        match (all.next(), all.next()) {
            (Some(server), Some(client)) => Ok(Self { server, client }),
            _ => Err(MeasureError::Skipped(
                "two CPUs are required: one for the server, one for its client".into(),
            )),
        }
    }
}

/// Pins the calling thread to a CPU.
pub fn pin(cpu: usize) -> io::Result<()> {
    let mut one = CpuSet::new();
    one.set(cpu);
    Ok(sched_setaffinity(None, &one)?)
}

/// Returns the CPU time of this process.
pub fn process_cpu_time() -> Duration {
    cpu_time(ClockId::ProcessCPUTime)
}

/// Returns the CPU time of the child processes that this process has waited for.
pub fn children_cpu_time() -> io::Result<Duration> {
    // proc(5): the name in parentheses may contain anything; cutime and cstime are fields 16 and 17 of the
    // line, in ticks of 10 ms.
    let text = std::fs::read_to_string("/proc/self/stat")?;
    let fields = text.rsplit_once(") ").map(|(_, rest)| rest).unwrap_or_default();
    let ticks = fields.split(' ').skip(13).take(2).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
    Ok(Duration::from_millis(10 * ticks))
}

/// Returns the CPU time of the calling thread.
pub fn thread_cpu_time() -> Duration {
    cpu_time(ClockId::ThreadCPUTime)
}

fn cpu_time(clock: ClockId) -> Duration {
    let t = clock_gettime(clock);
    Duration::new(t.tv_sec.unsigned_abs(), t.tv_nsec as u32)
}

/// Time of the CPUs by use, in ticks of 10 ms; each vector has an element for each CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    /// Time in which the CPU executed anything.
    pub busy: Vec<u64>,
    /// The part of `busy` spent in hard and soft interrupts. It belongs to no program; where packets cross
    /// the kernel, it is mostly caused by the measurement.
    pub interrupts: Vec<u64>,
    /// Idle time.
    pub idle: Vec<u64>,
    /// Time stolen by the hypervisor.
    pub stolen: Vec<u64>,
}

/// Ticks per second of /proc/stat, fixed by the kernel's ABI.
const TICKS_PER_SECOND: f64 = 100.0;

impl CpuTimes {
    /// Reads the current counters.
    pub fn read() -> io::Result<Self> {
        Ok(Self::parse(&std::fs::read_to_string("/proc/stat")?))
    }

    fn parse(text: &str) -> Self {
        let mut times = Self::default();
        for line in text.lines().filter(|l| l.starts_with("cpu") && !l.starts_with("cpu ")) {
            let f: Vec<u64> = line.split_whitespace().skip(1).map(|w| w.parse().unwrap_or(0)).collect();
            let at = |i: usize| f.get(i).copied().unwrap_or(0);
            // user, nice, system, idle, iowait, irq, softirq, steal
            times.busy.push(at(0) + at(1) + at(2) + at(5) + at(6));
            times.interrupts.push(at(5) + at(6));
            times.idle.push(at(3) + at(4));
            times.stolen.push(at(7));
        }
        times
    }

    /// Returns the difference to `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        let less = |a: &[u64], b: &[u64]| a.iter().zip(b).map(|(a, b)| a.saturating_sub(*b)).collect();
        Self {
            busy: less(&self.busy, &earlier.busy),
            interrupts: less(&self.interrupts, &earlier.interrupts),
            idle: less(&self.idle, &earlier.idle),
            stolen: less(&self.stolen, &earlier.stolen),
        }
    }

    fn total(&self) -> u64 {
        [&self.busy, &self.idle, &self.stolen].into_iter().flatten().sum()
    }

    /// Returns the busy share of all CPUs together.
    pub fn busy_share(&self) -> f64 {
        self.busy.iter().sum::<u64>() as f64 / (self.total() as f64).max(1.0)
    }

    /// Returns the share of all CPUs together that the hypervisor stole.
    pub fn steal_share(&self) -> f64 {
        self.stolen.iter().sum::<u64>() as f64 / (self.total() as f64).max(1.0)
    }

    /// Returns the share of each CPU that the hypervisor stole.
    pub fn stolen_shares(&self) -> Vec<f64> {
        let cpus = self.busy.iter().zip(&self.idle).zip(&self.stolen);
        cpus.map(|((b, i), s)| *s as f64 / ((b + i + s) as f64).max(1.0)).collect()
    }

    /// Returns the busy share of each CPU.
    pub fn busy_shares(&self) -> Vec<f64> {
        let cpus = self.busy.iter().zip(&self.idle).zip(&self.stolen);
        cpus.map(|((b, i), s)| *b as f64 / ((b + i + s) as f64).max(1.0)).collect()
    }

    /// Returns the share of all CPUs together that other programs used. `own` is the CPU time of the
    /// measurement itself.
    pub fn other_programs_share(&self, own: Duration) -> f64 {
        let seconds = |ticks: &[u64]| ticks.iter().sum::<u64>() as f64 / TICKS_PER_SECOND;
        let total = self.total() as f64 / TICKS_PER_SECOND;
        ((seconds(&self.busy) - seconds(&self.interrupts) - own.as_secs_f64()) / total.max(0.01)).max(0.0)
    }
}

/// Round trips per batch of the cache line measurement.
const ROUNDS: u32 = 2_000;
/// Number of batches, of which the median counts.
const BATCHES: usize = 15;

#[repr(align(128))]
struct CacheLine(AtomicU32);

/// Returns the round trip time of a cache line between the CPUs in nanoseconds.
pub fn cache_line_round_trip(cpus: Cpus) -> io::Result<f64> {
    let line = CacheLine(AtomicU32::new(0));
    let has_failed = AtomicBool::new(false);
    let pin = |cpu| pin(cpu).inspect_err(|_| has_failed.store(true, Ordering::Relaxed));
    let await_value = |value| await_value(&line, value, &has_failed);
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            pin(cpus.client)?;
            for odd in (1..2 * ROUNDS * BATCHES as u32).step_by(2) {
                if !await_value(odd) {
                    break;
                }
                line.0.store(odd + 1, Ordering::Release);
            }
            io::Result::Ok(())
        });
        let caller = scope.spawn(|| {
            pin(cpus.server)?;
            let mut batches = [0.0; BATCHES];
            let mut value = 0;
            for batch in &mut batches {
                let clock = std::time::Instant::now();
                for _ in 0..ROUNDS {
                    line.0.store(value + 1, Ordering::Release);
                    value += 2;
                    if !await_value(value) {
                        return Ok(0.0);
                    }
                }
                *batch = clock.elapsed().as_nanos() as f64 / f64::from(ROUNDS);
            }
            batches.sort_by(f64::total_cmp);
            io::Result::Ok(batches[BATCHES / 2])
        });
        echo.join().expect("the echo does not panic")?;
        caller.join().expect("the caller does not panic")
    })
}

/// Waits for a value. Returns false if the other thread has failed.
fn await_value(line: &CacheLine, value: u32, has_failed: &AtomicBool) -> bool {
    let mut spins = 0u32;
    while line.0.load(Ordering::Acquire) != value {
        core::hint::spin_loop();
        spins += 1;
        // On a busy machine the other thread may not be running.
        if spins.is_multiple_of(1 << 16) {
            if has_failed.load(Ordering::Relaxed) {
                return false;
            }
            std::thread::yield_now();
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_from_the_counters() {
        let before =
            CpuTimes::parse("cpu  9 9 9 9\ncpu0 10 0 10 100 0 0 0 0 0 0\ncpu1 0 0 0 100 0 0 0 0\nintr 5");
        let after =
            CpuTimes::parse("cpu  9 9 9 9\ncpu0 60 10 20 110 10 5 5 0 0 0\ncpu1 0 0 0 180 0 0 0 20\nintr 5");
        let d = after.since(&before);
        assert_eq!(
            (d.busy.as_slice(), d.idle.as_slice(), d.stolen.as_slice()),
            (&[80, 0][..], &[20, 80][..], &[0, 20][..])
        );
        assert_eq!(d.busy_share(), 0.4);
        assert_eq!(d.steal_share(), 0.1);
        assert_eq!(d.stolen_shares().iter().sum::<f64>() / d.stolen_shares().len() as f64, 0.1);
        assert_eq!(d.busy_shares(), [0.8, 0.0]);
        // A tenth of a second of interrupts belongs to no program.
        assert!((d.other_programs_share(Duration::from_millis(600)) - 0.05).abs() < 1e-9);
    }

    #[test]
    fn proc_stat_is_parsed() {
        let times = CpuTimes::read().unwrap();
        assert!(!times.busy.is_empty() && times.total() > 0);
    }
}
