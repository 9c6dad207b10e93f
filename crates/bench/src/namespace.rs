//! A network namespace for benches with the Linux kernel at the other end. The program runs itself again
//! inside the namespace, which is removed with that process.

use crate::benches::ALL;
use crate::harness::MeasureError;
use ginnel_measure::namespace;
use std::fs;
use std::process::Command;

/// Returns true inside the namespace.
pub fn is_inside() -> bool {
    namespace::is_inside()
}

/// Makes this process, inside the namespace, end with the one outside.
pub fn end_with_parent() -> Result<(), MeasureError> {
    namespace::end_with_parent().map_err(MeasureError::Failed)
}

/// Runs this program again with the same options for one bench, inside a namespace.
pub fn run(bench: &str) -> Result<(), MeasureError> {
    let skipped = |why: String| MeasureError::Skipped(format!("needs a network namespace and TAP: {why}"));
    let tun = fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    tun.map_err(|e| skipped(format!("/dev/net/tun: {e}")))?;
    let options = std::env::args().skip(1).filter(|word| ALL.iter().all(|b| b.name != word));
    let status = namespace::run(core::iter::once(bench.to_owned()).chain(options)).map_err(skipped)?;
    if status.success() {
        Ok(())
    } else {
        Err(MeasureError::Failed("the bench failed inside its namespace (see above)".into()))
    }
}

/// Prepares the namespace. Must be called inside, before the first connection.
pub fn prepare() -> Result<(), MeasureError> {
    namespace::prepare().map_err(MeasureError::Skipped)
}

/// Moves the kernel's receive processing for `interface` to `cpu`, away from the CPU that writes the frames.
/// Returns true if that succeeded.
pub fn receive_on(interface: &str, cpu: usize) -> bool {
    // Devices of the namespace are only visible in a /sys that was mounted inside it.
    let rps = format!("/sys/class/net/{interface}/queues/rx-0/rps_cpus");
    if fs::metadata(&rps).is_err() {
        _ = Command::new("mount").args(["-t", "sysfs", "sysfs", "/sys"]).status();
    }
    fs::write(rps, format!("{:x}", 1u64 << cpu)).is_ok()
}
