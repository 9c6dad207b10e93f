//! CPU affinity of a shard's thread.

use crate::error::Error;
use ginnel_stack::error::ConfigError;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Pins the calling thread to one CPU, chosen by the configuration key `key`. Never widens the mask that the
/// user gave the process: a CPU outside it is refused.
pub(crate) fn pin(key: &str, cpu: u32) -> Result<(), Error> {
    check_allowed(cpu, key)?;
    let mut set = CpuSet::new();
    set.set(cpu as usize);
    sched_setaffinity(None, &set).map_err(|e| Error::io(format!("pin to CPU {cpu}"), e))
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
    let allowed = sched_getaffinity(None).map_err(|e| Error::io("CPU affinity mask", e))?;
    let cpu = cpu as usize;
    if cpu >= CpuSet::MAX_CPU || !allowed.is_set(cpu) {
        let list: Vec<String> =
            (0..CpuSet::MAX_CPU).filter(|&c| allowed.is_set(c)).map(|c| c.to_string()).collect();
        let problem = format!("CPU {cpu} is not in this process's affinity mask: {}", list.join(" "));
        return Err(ConfigError::new(key, problem).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{pin, with_pinned};
    use rustix::thread::sched_getaffinity;

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
