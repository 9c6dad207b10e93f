//! Tells whether the numbers in /proc are those of this PID namespace.

use std::sync::LazyLock;

/// Returns whether /proc was mounted for the PID namespace of this process. Otherwise the numbers in its
/// files are those of other processes.
pub fn is_own_proc() -> bool {
    static IS_OWN: LazyLock<bool> = LazyLock::new(|| {
        std::fs::read_link("/proc/self")
            .is_ok_and(|link| link.as_os_str() == &*std::process::id().to_string())
    });
    *IS_OWN
}
