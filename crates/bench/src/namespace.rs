//! A network namespace of our own, for benches with the Linux kernel at the other end: the program runs itself again inside of one, which vanishes with it.

use crate::benches::ALL;
use crate::harness::MeasureError;
use ginnel_measure::namespace;
use std::fs;
use std::process::Command;

/// Whether this process is inside.
pub fn is_inside() -> bool {
    namespace::is_inside()
}

/// Runs this program again with the same options for one bench, inside of a namespace.
pub fn run(bench: &str) -> Result<(), MeasureError> {
    let skipped = |why: String| MeasureError::Skipped(format!("needs a network namespace and TAP: {why}"));
    let tun = fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    tun.map_err(|e| skipped(format!("/dev/net/tun: {e}")))?;
    let options = std::env::args().skip(1).filter(|word| ALL.iter().all(|b| b.name != word));
    let status = namespace::run(core::iter::once(bench.to_owned()).chain(options)).map_err(skipped)?;
    if status.success() { Ok(()) } else { Err(MeasureError::Failed("inside of the namespace".into())) }
}

/// Prepares the namespace. To be called inside of it, before the first connection.
pub fn prepare() -> Result<(), MeasureError> {
    namespace::prepare().map_err(MeasureError::Skipped)
}

/// Lets the kernel do its part of receiving from `interface` on the CPU of the client, and not on ours, where the frames are written.
/// Returns whether it could be arranged.
pub fn receive_on(interface: &str, cpu: usize) -> bool {
    // The namespace's own devices are only to be seen in a view of /sys that was made inside.
    let rps = format!("/sys/class/net/{interface}/queues/rx-0/rps_cpus");
    if fs::metadata(&rps).is_err() {
        _ = Command::new("mount").args(["-t", "sysfs", "sysfs", "/sys"]).status();
    }
    fs::write(rps, format!("{:x}", 1u64 << cpu)).is_ok()
}
