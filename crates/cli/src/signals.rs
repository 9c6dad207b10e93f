//! SIGINT and SIGTERM stop the shards gracefully; a second signal ends the process at once. SIGHUP does not
//! end a stack in the background.

use crate::failure::Failure;
use ginnel::StopFlag;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use std::sync::Arc;

/// Returns a flag that the first SIGINT or SIGTERM sets.
pub fn stop_on_signal() -> Result<StopFlag, Failure> {
    let stop = StopFlag::new().map_err(|e| Failure::running(format!("stop flag: {e}")))?;
    let mut signals =
        Signals::new([SIGINT, SIGTERM]).map_err(|e| Failure::running(format!("signal handlers: {e}")))?;
    let flag = stop.clone();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                let name = low_level::signal_name(signal).unwrap_or("signal");
                if flag.is_set() {
                    tracing::info!("{name} again: the process ends at once");
                    // 128 plus the signal's number: the exit code that shells report for a process that a
                    // signal ended.
                    std::process::exit(128 + signal);
                }
                tracing::info!("{name}: the stack ends");
                flag.stop();
            }
        })
        .map_err(|e| Failure::running(format!("signal thread: {e}")))?;
    Ok(stop)
}

/// Makes SIGHUP have no effect on this process. Programs that it starts have the default action.
pub fn ignore_hangup() -> Result<(), Failure> {
    // The flag is never read: a handler that does nothing.
    signal_hook::flag::register(SIGHUP, Arc::default())
        .map(drop)
        .map_err(|e| Failure::running(format!("signal handlers: {e}")))
}
