//! CPU affinity of a shard's thread.

use crate::cpu_list;
use crate::error::Error;
use ginnel_stack::error::ConfigError;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Pins the calling thread to one CPU, chosen by the configuration key `key`. Never widens the mask that the
/// user gave the process, except to isolated CPUs, which the kernel leaves out of every mask: another CPU
/// outside it is refused.
pub(crate) fn pin(key: &str, cpu: u32) -> Result<(), Error> {
    check_allowed(cpu, key)?;
    let mut set = CpuSet::new();
    set.set(cpu as usize);
    sched_setaffinity(None, &set).map_err(|e| Error::io(format!("{key}: pin to CPU {cpu}"), e))
}

/// Calls `act` pinned to a CPU, if one is given, and restores the thread's mask.
pub(crate) fn with_pinned<R>(
    key: &str,
    cpu: Option<u32>,
    act: impl FnOnce() -> Result<R, Error>,
) -> Result<R, Error> {
    let Some(cpu) = cpu else { return act() };
    let before = sched_getaffinity(None).map_err(|e| Error::io("CPU affinity mask", e))?;
    pin(key, cpu)?;
    let result = act();
    sched_setaffinity(None, &before).map_err(|e| Error::io("CPU affinity mask", e))?;
    result
}

/// Checks that the process may use a CPU. `key` is the configuration key that names it.
pub(crate) fn check_allowed(cpu: u32, key: &str) -> Result<(), Error> {
    let mask = sched_getaffinity(None).map_err(|e| Error::io("CPU affinity mask", e))?;
    if is_in(&mask, cpu) {
        return Ok(());
    }
    check_isolated(&mask, &cpu_list::isolated(), cpu).map_err(|problem| ConfigError::new(key, problem).into())
}

fn is_in(mask: &CpuSet, cpu: u32) -> bool {
    (cpu as usize) < CpuSet::MAX_CPU && mask.is_set(cpu as usize)
}

/// Checks a CPU that is not in the affinity mask.
fn check_isolated(mask: &CpuSet, isolated: &[u32], cpu: u32) -> Result<(), String> {
    if (cpu as usize) < CpuSet::MAX_CPU && isolated.contains(&cpu) {
        return Ok(());
    }
    let list: Vec<u32> = (0..CpuSet::MAX_CPU as u32).filter(|&cpu| is_in(mask, cpu)).collect();
    let also = match isolated {
        [] => String::new(),
        isolated => format!(", nor isolated: {}", cpu_list::format_list(isolated)),
    };
    let mask = cpu_list::format_list(&list);
    Err(format!("CPU {cpu} is not in this process's affinity mask: {mask}{also}"))
}

#[cfg(test)]
mod tests {
    use super::{check_isolated, pin, with_pinned};
    use rustix::thread::{CpuSet, sched_getaffinity};

    #[test]
    fn isolated_cpus_may_be_named() {
        let mut mask = CpuSet::new();
        [0, 1, 4].into_iter().for_each(|cpu| mask.set(cpu));
        assert_eq!(check_isolated(&mask, &[2, 3], 3), Ok(()));
        let refused = check_isolated(&mask, &[2, 3], 5).unwrap_err();
        assert_eq!(refused, "CPU 5 is not in this process's affinity mask: 0-1,4, nor isolated: 2-3");
        let refused = check_isolated(&mask, &[], 5).unwrap_err();
        assert_eq!(refused, "CPU 5 is not in this process's affinity mask: 0-1,4");
        assert!(check_isolated(&mask, &[5000], 5000).is_err(), "beyond the kernel's masks");
    }

    #[test]
    fn pinning_stays_within_the_affinity_mask() {
        std::thread::spawn(|| {
            let allowed = sched_getaffinity(None).unwrap();
            let first = (0..1024).find(|&c| allowed.is_set(c)).unwrap();
            let mask = || sched_getaffinity(None).unwrap();
            let inside = with_pinned("shard.cpu", Some(first as u32), || Ok(mask().count()));
            assert_eq!((inside.unwrap(), mask() == allowed), (1, true));
            pin("shard.cpu", first as u32).unwrap();
            let now = sched_getaffinity(None).unwrap();
            assert_eq!((now.count(), now.is_set(first)), (1, true));
            let other = if first == 0 { 1 } else { 0 };
            let refused = pin("shard.cpu", other).unwrap_err().to_string();
            assert!(refused.starts_with("shard.cpu: CPU "), "{refused}");
        })
        .join()
        .unwrap();
    }
}
