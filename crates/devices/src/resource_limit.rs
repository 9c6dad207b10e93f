//! Limits of the process (getrlimit(2)).
#![allow(unsafe_code)] // rustix takes for granted that the kernel answers

use core::sync::atomic::{AtomicBool, Ordering};
use rustix::process::{Resource, Rlimit};

/// See [`assume_unlimited`].
static IS_UNLIMITED: AtomicBool = AtomicBool::new(false);

/// Makes all limits count as infinite from now on. Must be called before the program installs a seccomp
/// filter, which may end a program that asks for a limit.
pub fn assume_unlimited() {
    IS_UNLIMITED.store(true, Ordering::Relaxed);
}

/// Returns a limit of this process. A limit counts as infinite if the kernel does not tell it, as under a
/// seccomp filter that refuses prlimit64(2).
pub fn resource_limit(resource: Resource) -> Rlimit {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    if !IS_UNLIMITED.load(Ordering::Relaxed) {
        // SAFETY: libc writes one structure, and leaves it as it is after an error.
        unsafe { libc::getrlimit(resource as _, &raw mut limit) };
    }
    let finite = |value| (value != libc::RLIM_INFINITY).then_some(value);
    Rlimit { current: finite(limit.rlim_cur), maximum: finite(limit.rlim_max) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::process::getrlimit;

    #[test]
    fn limits_are_those_of_the_kernel() {
        for resource in [Resource::Nofile, Resource::Fsize, Resource::Memlock, Resource::Core] {
            assert_eq!(resource_limit(resource), getrlimit(resource), "{resource:?}");
        }
    }
}
