//! DPDK's environment abstraction layer, which a process starts once.

use super::config::{DpdkConfig, EalOptions, HugePages};
use super::{errors, ffi, log};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io;
use std::sync::{Mutex, PoisonError};

/// Options and result of the start of EAL. A failed start cannot be repeated.
static STARTED: Mutex<Option<(EalOptions, StartResult)>> = Mutex::new(None);

/// The error of EAL, which is returned again.
type StartResult = Result<(), (io::ErrorKind, String)>;

/// Kibibytes of the sizes of huge pages on x86-64 and on 64-bit ARM with pages of 4 KiB.
const HUGE_PAGE_KIB: [u64; 3] = [2048, 65_536, 1_048_576];

/// Starts EAL unless it runs already.
///
/// # Errors
/// EAL does not start, did not start when it was tried before, or runs with other options.
pub(super) fn start(config: &DpdkConfig) -> io::Result<()> {
    let options = &config.options.eal;
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((first, result)) = &*started {
        result.as_ref().map_err(|(kind, problem)| io::Error::new(*kind, problem.clone()))?;
        if first != options {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "EAL runs already with other values of huge, memory_mib or eal: a process has one EAL, so all its dpdk devices need equal values",
            ));
        }
        return Ok(());
    }
    // An error before EAL was called does not prevent another attempt.
    let result = start_first(config)?;
    *started = Some((options.clone(), result.as_ref().copied().map_err(|e| (e.kind(), e.to_string()))));
    result
}

/// Starts EAL. The outer error is one that occurred before EAL was called.
fn start_first(config: &DpdkConfig) -> io::Result<io::Result<()>> {
    let options = &config.options.eal;
    let (needed, free) = (u64::from(options.memory_mib), free_huge_mib());
    let huge = match options.huge {
        HugePages::Auto => free >= needed,
        HugePages::On if free < needed => return Err(errors::no_huge_pages(needed, free)),
        HugePages::On => true,
        HugePages::Off => false,
    };
    let mut arguments = Vec::new();
    for argument in arguments_of(config, huge, first_cpu()) {
        let argument = CString::new(argument)?;
        // EAL keeps pointers to its arguments.
        arguments.push(&*Box::leak(argument.into_boxed_c_str()));
    }
    log::clear();
    let result = run_start(arguments);
    let text = log::take();
    let result = result?.map_err(|error| errors::start(error, &text, needed));
    if result.is_ok() {
        tracing::info!(huge, memory_mib = options.memory_mib, "DPDK's EAL runs");
    }
    Ok(result)
}

/// Starts EAL on a thread of its own. EAL binds the thread that starts it to a CPU, and its other threads
/// inherit that thread's signal mask: they must not take the signals of the process.
fn run_start(arguments: Vec<&'static CStr>) -> io::Result<Result<(), rustix::io::Errno>> {
    let thread = std::thread::Builder::new().name("dpdk-start".into()).spawn(move || {
        super::signals::block_all();
        ffi::start(arguments, log::sink)
    })?;
    thread.join().map_err(|_| io::Error::other("the thread that starts EAL panicked"))
}

/// Returns the arguments of EAL. The thread that starts EAL becomes its only core; shards register as threads
/// that EAL did not create.
fn arguments_of(config: &DpdkConfig, huge: bool, cpu: usize) -> Vec<String> {
    let options = &config.options.eal;
    let mut arguments: Vec<String> = ["ginnel", "--no-telemetry"].map(Into::into).into();
    // Neither leaves files: memory in huge pages is anonymous, and other processes cannot attach.
    arguments.extend(
        if huge { vec!["--in-memory"] } else { vec!["--no-huge", "--no-shconf"] }.into_iter().map(Into::into),
    );
    arguments.extend(["-m".into(), options.memory_mib.to_string()]);
    arguments.extend(["--lcores".into(), format!("0@{cpu}")]);
    // EAL gives the drivers of PCI devices their arguments now: later ones would be ignored.
    let own = config.options.device_arguments(&config.port);
    let mut pci = BTreeMap::new();
    for device in config.all_ports.iter().chain([&own]) {
        let address = device.split(',').next().unwrap_or_default();
        if DpdkConfig::is_pci(address) {
            pci.insert(address, device.clone());
        }
    }
    if pci.is_empty() {
        arguments.push("--no-pci".into());
    }
    arguments.extend(pci.into_values().flat_map(|device| ["-a".to_owned(), device]));
    arguments.extend(options.arguments.iter().cloned());
    arguments
}

/// Returns the first CPU that the calling thread may use.
fn first_cpu() -> usize {
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_else(|_| rustix::thread::CpuSet::new());
    (0..rustix::thread::CpuSet::MAX_CPU).find(|&cpu| set.is_set(cpu)).unwrap_or(0)
}

/// Returns the MiB of huge pages that no process uses.
fn free_huge_mib() -> u64 {
    let free = |kib: u64| {
        let path = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/free_hugepages");
        let pages: u64 = std::fs::read_to_string(path).ok()?.trim().parse().ok()?;
        Some(pages * kib / 1024)
    };
    HUGE_PAGE_KIB.into_iter().filter_map(free).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_follow_the_options() {
        let options = "memory_mib=64,eal=--log-level+8".parse().expect("valid");
        let virtual_port = DpdkConfig { port: "net_tap0".into(), options, ..DpdkConfig::default() };
        assert_eq!(
            arguments_of(&virtual_port, false, 3).join(" "),
            "ginnel --no-telemetry --no-huge --no-shconf -m 64 --lcores 0@3 --no-pci --log-level 8"
        );
        let pci = DpdkConfig {
            port: "0000:03:00.0".into(),
            options: "args=rx_vec=0+b=c".parse().expect("valid"),
            all_ports: vec!["0000:04:00.0,a=1".into(), "0000:03:00.0".into(), "net_tap0".into()],
            ..DpdkConfig::default()
        };
        assert_eq!(
            arguments_of(&pci, true, 0).join(" "),
            "ginnel --no-telemetry --in-memory -m 256 --lcores 0@0 -a 0000:03:00.0,rx_vec=0,b=c -a 0000:04:00.0,a=1"
        );
    }
}
