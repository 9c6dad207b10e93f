//! The limit of open descriptors. A stack's process has a few descriptors for each attached process, so it
//! may need more than the usual soft limit of 1,024. Programs keep the limit that they would have without
//! Ginnel: some use numbers below it with select(2), or close every number below it.

use ginnel_devices::resource_limit::resource_limit;
use rustix::process::{Resource, Rlimit, setrlimit};
use std::sync::OnceLock;

/// The limit before [`raise`].
static ORIGINAL: OnceLock<Rlimit> = OnceLock::new();

/// Raises the soft limit of this process to the hard limit.
pub fn raise() {
    let limit = *ORIGINAL.get_or_init(|| resource_limit(Resource::Nofile));
    // Raising the soft limit up to the hard limit is always permitted.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Calls `start`, which starts a program, with the limit that this process had before [`raise`].
pub fn with_original<T>(start: impl FnOnce() -> T) -> T {
    let Some(original) = ORIGINAL.get() else { return start() };
    let raised = resource_limit(Resource::Nofile);
    // Both are always permitted: the hard limit does not change.
    let _ = setrlimit(Resource::Nofile, *original);
    let started = start();
    let _ = setrlimit(Resource::Nofile, raised);
    started
}
