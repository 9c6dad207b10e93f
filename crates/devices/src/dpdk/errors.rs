//! Explains errors of DPDK: their cause and the remedy.

use rustix::io::Errno;
use std::io;

/// Lines at the end of DPDK's log that an error quotes.
const LINES_QUOTED: usize = 3;

/// Permissions that drivers without an adapter need.
const NEEDS: [(&str, &str); 4] = [
    ("net_tap", "CAP_NET_ADMIN and /dev/net/tun"),
    ("net_af_packet", "CAP_NET_RAW"),
    ("net_af_xdp", "CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF and CAP_PERFMON"),
    ("net_pcap", "CAP_NET_RAW"),
];

fn kind_of(error: Errno, log: &str) -> io::ErrorKind {
    match error {
        _ if is_denied(error, log) => io::ErrorKind::PermissionDenied,
        Errno::PERM => io::ErrorKind::Other,
        error => io::Error::from(error).kind(),
    }
}

/// Returns whether a permission is missing. Many drivers return -1, which is `EPERM`, for any error.
fn is_denied(error: Errno, log: &str) -> bool {
    error == Errno::ACCESS || log.contains("Permission denied") || log.contains("Operation not permitted")
}

/// Returns the last lines of DPDK's log in parentheses, or nothing.
fn quoted(log: &str) -> String {
    let lines: Vec<&str> = log.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(LINES_QUOTED)..];
    if last.is_empty() { String::new() } else { format!(" (DPDK says: {})", last.join("; ")) }
}

/// Capabilities by the numbers of their bits.
const CAPABILITIES: [(&str, u32); 4] =
    [("CAP_NET_ADMIN", 12), ("CAP_NET_RAW", 13), ("CAP_BPF", 39), ("CAP_PERFMON", 38)];
const CAP_SYS_ADMIN: u32 = 21;

/// Checks that a process with these effective capabilities may use the driver of a port.
///
/// # Errors
/// `PermissionDenied` with the capabilities that are missing.
pub(super) fn missing_capabilities(port: &str, effective: u64) -> Result<(), io::Error> {
    let Some((driver, needs)) = NEEDS.iter().find(|(driver, _)| port.starts_with(driver)) else {
        return Ok(());
    };
    let has = |bit: u32| effective & 1 << bit != 0;
    let is_missing = |&(name, bit): &(&str, u32)| {
        // Before Linux 5.8, CAP_SYS_ADMIN stood for the newest two.
        needs.contains(name) && !has(bit) && !(bit >= 38 && has(CAP_SYS_ADMIN))
    };
    let missing: Vec<&str> = CAPABILITIES.iter().filter(|c| is_missing(c)).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let problem = format!(
        "{driver} needs {needs}, and this process lacks {} (root, or AmbientCapabilities= of a systemd unit)",
        missing.join(", ")
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, problem))
}

/// Returns the effective capabilities of the calling thread.
pub(super) fn effective_capabilities() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    // If the kernel does not tell, it refuses what is not permitted later.
    line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).unwrap_or(u64::MAX)
}

/// Too few huge pages are free.
pub(super) fn no_huge_pages(needed_mib: u64, free_mib: u64) -> io::Error {
    let problem = format!(
        "huge=on needs {needed_mib} MiB of free huge pages, and {free_mib} MiB are free: reserve more (\"sysctl vm.nr_hugepages={}\"), set a smaller memory_mib, or set huge=off",
        needed_mib.div_ceil(2)
    );
    io::Error::new(io::ErrorKind::OutOfMemory, problem)
}

/// Returns whether a line of the log explains a failure by huge pages. EAL also notes sizes of which the
/// machine has no pages, which is no failure.
fn is_about_huge_pages(line: &str) -> bool {
    let line = line.to_lowercase();
    line.contains("hugepage") && !(line.contains("no available") && line.contains("reported"))
}

/// EAL did not start.
pub(super) fn start(error: Errno, log: &str, memory_mib: u64) -> io::Error {
    let cause = if is_denied(error, log) {
        "the process lacks a permission: for huge pages and PCI devices it needs root, or access to /dev/vfio and a higher limit of locked memory".to_owned()
    } else if log.lines().any(is_about_huge_pages) {
        "huge pages cannot be used: set huge=off, or reserve them (\"sysctl vm.nr_hugepages=…\")".to_owned()
    } else if log.contains("Cannot probe devices") {
        "the driver of a PCI device does not take it: see the driver's arguments in the key args, and whether the device is bound to vfio-pci".to_owned()
    } else if error == Errno::NOMEM {
        format!("{memory_mib} MiB of memory are not available: set a smaller memory_mib")
    } else {
        "an argument may be wrong: see the key eal".to_owned()
    };
    io::Error::new(kind_of(error, log), format!("EAL does not start: {cause}{}", quoted(log)))
}

/// No port was found or created.
pub(super) fn probe(port: &str, is_pci: bool, error: Errno, log: &str, ports: u16) -> io::Error {
    let need = NEEDS.iter().find(|(driver, _)| port.starts_with(driver));
    let unknown = io::ErrorKind::NotFound;
    let (kind, cause) = if is_denied(error, log) {
        let what = need.map_or("access to the device (root, or the group of /dev/vfio)", |(_, what)| what);
        (io::ErrorKind::PermissionDenied, format!("needs {what}"))
    } else if is_pci {
        (unknown, "there is no such PCI device with a driver of DPDK: bind it to vfio-pci (\"dpdk-devbind.py --bind=vfio-pci …\")".to_owned())
    } else if need.is_none() && !port.starts_with("net_") {
        (unknown, "DPDK has no driver of this name: a port is a PCI address (0000:03:00.0), or a driver and a number (net_tap0, net_af_packet0)".to_owned())
    } else {
        (
            kind_of(error, log),
            format!(
                "the driver does not create the port, and EAL has {ports} others: see its arguments in the key args"
            ),
        )
    };
    io::Error::new(kind, format!("{cause}: {error}{}", quoted(log)))
}

/// A step of the configuration of a port failed.
pub(super) fn open(step: &str, error: Errno, log: &str, buffers_mib: u64, memory_mib: u32) -> io::Error {
    let cause = match error {
        Errno::NOMEM if step == "allocating buffers" => format!(
            ": the buffers of all queues need {buffers_mib} MiB, and EAL has {memory_mib} MiB: set a larger memory_mib, or fewer buffers"
        ),
        Errno::NOMEM => {
            format!(": EAL has {memory_mib} MiB: set a larger memory_mib, a smaller ring, or fewer buffers")
        }
        _ => String::new(),
    };
    io::Error::new(kind_of(error, log), format!("{step}{cause}: {error}{}", quoted(log)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_cause_and_remedy() {
        for (error, words) in [
            (no_huge_pages(256, 4), "\"sysctl vm.nr_hugepages=128\""),
            (start(Errno::INVAL, "EAL: Cannot get hugepage information.", 64), "huge=off"),
            (start(Errno::ACCESS, "", 64), "/dev/vfio"),
            (start(Errno::INVAL, "EAL: hugepage: Permission denied", 64), "lacks a permission"),
            (start(Errno::INVAL, "EAL: No available 1048576 kB hugepages reported", 64), "may be wrong"),
            (start(Errno::NOTSUP, "EAL: Cannot probe devices", 64), "the key args"),
            (start(Errno::NOMEM, "", 64), "64 MiB"),
            (start(Errno::INVAL, "a\nb\n\nc\nd", 64), "(DPDK says: b; c; d)"),
            (
                probe("net_tap0", false, Errno::INVAL, "ioctl: Operation not permitted", 0),
                "needs CAP_NET_ADMIN",
            ),
            (probe("net_af_packet0", false, Errno::ACCESS, "", 0), "needs CAP_NET_RAW"),
            (missing_capabilities("net_tap0", 0).expect_err("none"), "net_tap needs CAP_NET_ADMIN"),
            (probe("0000:03:00.0", true, Errno::NODEV, "", 0), "vfio-pci"),
            (probe("eth0", false, Errno::NODEV, "", 0), "no driver of this name"),
            (probe("net_ring0", false, Errno::INVAL, "", 2), "EAL has 2 others"),
            (open("allocating buffers", Errno::NOMEM, "", 76, 64), "need 76 MiB, and EAL has 64 MiB"),
            (open("starting the port", Errno::IO, "", 0, 0), "starting the port: "),
            (open("starting the port", Errno::NOMEM, "", 76, 64), "EAL has 64 MiB: set a larger memory_mib"),
        ] {
            assert!(error.to_string().contains(words), "{error}");
        }
        let denied = probe("net_tap0", false, Errno::INVAL, "Permission denied", 0);
        assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
    }
}
