//! Processes that this one has inherited, as process 1 of a container does.

use crate::failure::Failure;
use crate::served_stack::POLL_INTERVAL;
use ginnel_posix_ops::ffi;
use rustix::process::{Pid, WaitOptions, getpid, waitpid};
use std::thread::Builder;

/// Size of the stack of a command's thread in bytes: that of the first thread by default (`RLIMIT_STACK`).
const STACK_BYTES: usize = 8 << 20;

/// Runs a command. In process 1 of a PID namespace, as in a container, the command has a thread of its own,
/// whose children are not those of the first thread. The first thread inherits orphans, and reaps them
/// meanwhile. Must be called by the first thread.
pub fn reap_during(command: impl FnOnce() -> Result<(), Failure> + Send) -> Result<(), Failure> {
    if !getpid().is_init() {
        return command();
    }
    std::thread::scope(|scope| {
        let thread = Builder::new().name("command".into()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, command);
        let thread = thread.map_err(|e| Failure::running(format!("thread of the command: {e}")))?;
        while !thread.is_finished() {
            reap_orphans(|_| false);
            std::thread::sleep(POLL_INTERVAL);
        }
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Reaps ended children that this process has inherited. Stops at the first one for which `is_own` is true,
/// because other code waits for it. Must be called by the first thread of the process.
pub fn reap_orphans(is_own: impl Fn(Pid) -> bool) {
    while let Some(ended) = ffi::ended_child().and_then(Pid::from_raw) {
        if is_own(ended) || waitpid(Some(ended), WaitOptions::NOHANG).is_err() {
            return;
        }
    }
}
