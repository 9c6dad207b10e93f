//! Admits one benchmark at a time, and only on a quiet machine.

use super::machine::CpuTimes;
use super::{MeasureError, Options};
use std::fs::File;
use std::time::{Duration, Instant};

/// Largest share of the CPUs that may be in use on a quiet machine.
const BUSY_SHARE_MAX: f64 = 0.05;

/// Waits until no other benchmark runs. The lock is released when the value is dropped or the process ends.
pub fn lock_machine() -> Result<File, MeasureError> {
    let path = std::env::temp_dir().join("ginnel-bench.lock");
    let file = File::options().create(true).append(true).open(path)?;
    if file.try_lock().is_err() {
        println!("waiting until another benchmark has ended");
        file.lock()?;
    }
    Ok(file)
}

/// Waits up to a minute (`QUIET_SECONDS`) for the machine to become quiet.
pub fn wait_until_quiet(options: &Options) -> Result<(), MeasureError> {
    if options.smoke {
        return Ok(());
    }
    let timeout = std::env::var("QUIET_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(60);
    let give_up = Instant::now() + Duration::from_secs(timeout);
    loop {
        let before = CpuTimes::read()?;
        std::thread::sleep(Duration::from_secs(1));
        let busy = CpuTimes::read()?.since(&before).busy_share();
        if busy <= BUSY_SHARE_MAX {
            return Ok(());
        }
        let percent = 100.0 * busy;
        if options.force {
            println!("other programs use {percent:.0} % of the machine; measuring anyway because of --force");
            return Ok(());
        }
        if Instant::now() >= give_up {
            let why = format!(
                "other programs use {percent:.0} % of the machine: stop them, or measure anyway with --force"
            );
            return Err(MeasureError::Skipped(why));
        }
    }
}
