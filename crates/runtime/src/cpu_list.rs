//! Lists of CPUs as the kernel writes them (`0-3,8`), and the CPUs that it keeps for programs that name them.

use rustix::thread::{CpuSet, sched_setaffinity};
use std::fs;
use std::thread;

/// Largest CPU number plus one.
const CPUS_MAX: u32 = 8192;
/// CPUs on which the kernel runs only threads that were pinned there (`isolcpus`, cpuset partitions).
const ISOLATED: &str = "/sys/devices/system/cpu/isolated";
/// CPUs without a periodic timer interrupt while they run one thread (`nohz_full`).
const NOHZ_FULL: &str = "/sys/devices/system/cpu/nohz_full";

/// Parses a list. Returns `None` if it is malformed.
pub fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= CPUS_MAX {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Formats a list.
pub fn format_list(cpus: &[u32]) -> String {
    let mut sorted = cpus.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for cpu in sorted {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => parts.push((cpu, cpu)),
        }
    }
    let part = |(first, last): (u32, u32)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    };
    parts.into_iter().map(part).collect::<Vec<_>>().join(",")
}

/// Returns the isolated CPUs that this process may use. They are not in the affinity mask with which programs
/// start; a container's cpuset may exclude them.
pub fn isolated() -> Vec<u32> {
    match read(ISOLATED) {
        listed if listed.is_empty() => listed,
        listed => usable(listed),
    }
}

/// Returns those CPUs to which a thread can be pinned.
fn usable(cpus: Vec<u32>) -> Vec<u32> {
    let may_pin = |cpu: &u32| {
        let mut set = CpuSet::new();
        if *cpu as usize >= CpuSet::MAX_CPU {
            return false;
        }
        set.set(*cpu as usize);
        sched_setaffinity(None, &set).is_ok()
    };
    // A thread of its own, so that the caller's mask stays.
    let thread = thread::spawn(move || cpus.into_iter().filter(may_pin).collect());
    thread.join().unwrap_or_default()
}

/// Returns the CPUs whose timer interrupt stops while they run one thread.
pub fn nohz_full() -> Vec<u32> {
    read(NOHZ_FULL)
}

/// Returns the CPUs in a file; none if the kernel lacks it, or writes no list (`(null)`).
fn read(path: &str) -> Vec<u32> {
    fs::read_to_string(path).ok().and_then(|text| parse_list(&text)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::sched_getaffinity;

    #[test]
    fn only_cpus_of_the_cpuset_are_usable() {
        let mask = sched_getaffinity(None).unwrap();
        let first = (0..1024).find(|&cpu| mask.is_set(cpu as usize)).unwrap();
        assert_eq!(usable(vec![first, 1023, 8000]), [first], "this machine has fewer than 1,024 CPUs");
        assert!(sched_getaffinity(None).unwrap() == mask);
    }

    #[test]
    fn lists_are_parsed_and_formatted() {
        assert_eq!(parse_list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(parse_list("\n"), Some(vec![]));
        assert_eq!(format_list(&[8, 0, 2, 1, 1]), "0-2,8");
        for wrong in ["a", "3-1", "1-", "0-99999999"] {
            assert_eq!(parse_list(wrong), None, "{wrong}");
        }
    }
}
