//! SIGINT, SIGTERM and SIGHUP stop the shards gracefully; a second SIGINT or SIGTERM ends the process at
//! once, unless it must remove files first. SIGHUP does not end a stack in the background.
//!
//! The kernel ignores signals to process 1 of a PID namespace, as in a container, that have no handler. So
//! that process has handlers for those that end other processes.

use crate::failure::Failure;
use core::sync::atomic::{AtomicBool, Ordering};
use ginnel::StopFlag;
use rustix::process::getpid;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use std::sync::{Arc, LazyLock};

/// Signals that end process 1 as they end others.
const ENDING: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT];

/// For each of [`ENDING`], whether it ends process 1: until the command handles it in another way.
static IS_ENDING: LazyLock<[Arc<AtomicBool>; 4]> =
    LazyLock::new(|| ENDING.map(|_| Arc::new(AtomicBool::new(true))));

/// Set by [`ignore_hangup`].
static IGNORES_HANGUP: AtomicBool = AtomicBool::new(false);

/// Returns a flag that the first SIGINT, SIGTERM or SIGHUP sets; SIGHUP unless this process ignores it. The
/// next SIGINT or SIGTERM ends the process. `what` ends with the first signal, as in "the stack"; the log
/// says so.
pub fn stop_on_signal(what: &'static str) -> Result<StopFlag, Failure> {
    let mut signals = vec![SIGINT, SIGTERM];
    if !is_ignored(SIGHUP) && !IGNORES_HANGUP.load(Ordering::SeqCst) {
        signals.push(SIGHUP);
    }
    watch(&signals, move |signal, is_first| {
        let name = low_level::signal_name(signal).unwrap_or("signal");
        if is_first {
            tracing::info!("{name}: {what} ends");
        } else if signal != SIGHUP {
            // The shell and the kernel may each send SIGHUP when a terminal hangs up.
            tracing::info!("{name} again: the process ends at once");
            crate::log::write_omitted();
            // 128 plus the signal's number: the exit code that shells report for a process that a signal
            // ended.
            std::process::exit(128 + signal);
        }
    })
}

/// Returns a flag that SIGINT, SIGTERM or SIGHUP sets. More signals have no effect, so that the process can
/// stop its programs and remove its files; it must end within seconds.
pub fn stop_and_clean_up_on_signal() -> Result<StopFlag, Failure> {
    watch(&[SIGINT, SIGTERM, SIGHUP], |_, _| ())
}

/// Makes the signals of [`ENDING`] end this process with the exit code that shells report, until the command
/// [handles](set_handled) them. Has an effect only on process 1 of a PID namespace.
pub fn end_process_1_on_signal() -> Result<(), Failure> {
    if !getpid().is_init() {
        return Ok(());
    }
    let signals = ENDING.into_iter().zip(&*IS_ENDING).filter(|(signal, _)| !is_ignored(*signal));
    for (signal, is_ending) in signals {
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, is_ending.clone())
            .map_err(|e| Failure::running(format!("signal handlers: {e}")))?;
    }
    Ok(())
}

/// Must be called when this process has handlers of its own for these signals.
pub fn set_handled(signals: &[i32]) {
    let handled = ENDING.iter().zip(&*IS_ENDING).filter(|(signal, _)| signals.contains(signal));
    handled.for_each(|(_, is_ending)| is_ending.store(false, Ordering::SeqCst));
}

/// Returns a flag that SIGINT, SIGTERM or SIGHUP sets, unless this process was started with the signal
/// ignored. Each signal calls `interrupt` with its number after that, and does not end the process.
pub fn on_interrupt(interrupt: impl Fn(i32) + Send + 'static) -> Result<StopFlag, Failure> {
    let signals: Vec<i32> =
        [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal)).collect();
    watch(&signals, move |signal, _| interrupt(signal))
}

/// Returns a flag that the first of these signals sets. `handle` gets the number of each signal, and whether
/// it is the first. The flag is set before.
fn watch(signals: &[i32], handle: impl Fn(i32, bool) + Send + 'static) -> Result<StopFlag, Failure> {
    let stop = StopFlag::new().map_err(|e| Failure::running(format!("stop flag: {e}")))?;
    let mut received =
        Signals::new(signals).map_err(|e| Failure::running(format!("signal handlers: {e}")))?;
    let flag = stop.clone();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in received.forever() {
                let is_first = !flag.is_set();
                flag.stop();
                handle(signal, is_first);
            }
        })
        .map_err(|e| Failure::running(format!("signal thread: {e}")))?;
    set_handled(signals);
    Ok(stop)
}

/// Makes SIGHUP have no effect on this process. Programs that it starts have the default action, unless this
/// process was started with the signal ignored.
pub fn ignore_hangup() -> Result<(), Failure> {
    IGNORES_HANGUP.store(true, Ordering::SeqCst);
    ignore(SIGHUP)
}

/// Makes a file that grows beyond `RLIMIT_FSIZE` an error of the call (`EFBIG`) instead of the end of this
/// process. Programs that it starts have the default action of the signal, unless this process was started
/// with the signal ignored.
pub fn ignore_file_size_limit() -> Result<(), Failure> {
    ignore(SIGXFSZ)
}

/// Returns whether this process was started with the signal ignored (proc(5), `SigIgn`).
pub fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (signal - 1) & 1 != 0)
}

fn ignore(signal: i32) -> Result<(), Failure> {
    if is_ignored(signal) {
        // Programs that this process starts ignore it as well, as nohup(1) and others want.
        return Ok(());
    }
    // The flag is never read: a handler that does nothing.
    signal_hook::flag::register(signal, Arc::default())
        .map_err(|e| Failure::running(format!("signal handlers: {e}")))?;
    set_handled(&[signal]);
    Ok(())
}
