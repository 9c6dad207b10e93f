//! Processes that this one has inherited, as process 1 of a container does.

use ginnel_posix_ops::ffi;
use rustix::process::{Pid, WaitOptions, waitpid};

/// Reaps ended children that this process has inherited. Stops at the first one for which `is_own` is true,
/// because other code waits for it. Must be called by the first thread of the process.
pub fn reap_orphans(is_own: impl Fn(Pid) -> bool) {
    while let Some(ended) = ffi::ended_child().and_then(Pid::from_raw) {
        if is_own(ended) || waitpid(Some(ended), WaitOptions::NOHANG).is_err() {
            return;
        }
    }
}
