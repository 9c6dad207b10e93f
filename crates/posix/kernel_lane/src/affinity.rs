//! CPU affinity of the calling thread.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Returns the CPUs that the thread may use; an empty set if the kernel does not tell them.
pub fn allowed() -> CpuSet {
    sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new())
}

/// Returns the numbers of CPUs in a set, in ascending order.
pub fn cpus(set: &CpuSet) -> impl Iterator<Item = u32> + '_ {
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32)
}

/// Returns the CPU that the thread is pinned to; `None` if it may use several.
pub fn pinned() -> Option<u32> {
    let set = allowed();
    let mut numbers = cpus(&set);
    numbers.next().filter(|_| numbers.next().is_none())
}

/// Pins the thread to one of its CPUs: that with the smallest result of `load`. Returns that CPU, or `None`
/// if the kernel refuses.
pub fn pin_to_least(load: impl Fn(u32) -> usize) -> Option<u32> {
    let set = allowed();
    let cpu = cpus(&set).min_by_key(|cpu| load(*cpu))?;
    let mut one = CpuSet::new();
    one.set(cpu as usize);
    sched_setaffinity(None, &one).ok().map(|()| cpu)
}

/// Returns whether the process has other threads, which the affinity of the calling one does not move.
pub fn has_other_threads() -> bool {
    // The link count of a directory is two, and one more for each subdirectory: here, for each thread.
    rustix::fs::stat("/proc/self/task").is_ok_and(|task| task.st_nlink > 3)
}

#[cfg(test)]
mod tests {
    use super::{allowed, cpus, has_other_threads, pin_to_least, pinned};

    #[test]
    fn a_thread_is_pinned_within_its_cpus() {
        std::thread::spawn(|| {
            let before: Vec<u32> = cpus(&allowed()).collect();
            let last = *before.last().unwrap();
            assert_eq!(pin_to_least(|cpu| usize::from(cpu != last)), Some(last));
            assert_eq!(pinned(), Some(last));
            assert_eq!(pin_to_least(|_| 0), Some(last), "the mask never grows");
            assert!(has_other_threads());
        })
        .join()
        .unwrap();
    }
}
