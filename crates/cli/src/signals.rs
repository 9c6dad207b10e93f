//! SIGINT and SIGTERM end the shards in good order; a second one ends the process at once.

use crate::failure::Failure;
use ginnel::StopFlag;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// A flag that the first signal sets.
pub fn stop_on_signal() -> Result<StopFlag, Failure> {
    let stop = StopFlag::new().map_err(|e| Failure::running(format!("stop flag: {e}")))?;
    let mut signals =
        Signals::new([SIGINT, SIGTERM]).map_err(|e| Failure::running(format!("signals: {e}")))?;
    let flag = stop.clone();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                if flag.is_set() {
                    // As a shell expects of a process ended by this signal.
                    std::process::exit(128 + signal);
                }
                flag.stop();
            }
        })
        .map_err(|e| Failure::running(format!("thread for signals: {e}")))?;
    Ok(stop)
}
