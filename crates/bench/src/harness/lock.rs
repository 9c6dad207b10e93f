//! One benchmark at a time on this machine, and only on a quiet one.

use super::machine::CpuTimes;
use super::{MeasureError, Options};
use std::fs::File;
use std::time::{Duration, Instant};

/// A machine with less than this share of its CPUs in use is quiet.
const BUSY_SHARE_MAX: f64 = 0.05;

/// Waits until no other benchmark runs. The lock goes with the value (and with the process).
pub fn lock_machine() -> Result<File, MeasureError> {
    let path = std::env::temp_dir().join("ginnel-bench.lock");
    let file = File::options().create(true).append(true).open(path)?;
    if file.try_lock().is_err() {
        println!("another benchmark runs; waiting");
        file.lock()?;
    }
    Ok(file)
}

/// Waits up to a minute (`QUIET_SECONDS`) for the other programs of the machine to calm down.
pub fn wait_until_quiet(options: &Options) -> Result<(), MeasureError> {
    if options.smoke {
        return Ok(());
    }
    let patience = std::env::var("QUIET_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(60);
    let give_up = Instant::now() + Duration::from_secs(patience);
    loop {
        let before = CpuTimes::read()?;
        std::thread::sleep(Duration::from_secs(1));
        let busy = CpuTimes::read()?.since(&before).busy_share();
        if busy <= BUSY_SHARE_MAX {
            return Ok(());
        }
        let percent = 100.0 * busy;
        if options.force {
            println!("other programs use {percent:.0} % of the machine; measuring all the same");
            return Ok(());
        }
        if Instant::now() >= give_up {
            let why =
                format!("other programs use {percent:.0} % of the machine (--force measures all the same)");
            return Err(MeasureError::Skipped(why));
        }
    }
}
