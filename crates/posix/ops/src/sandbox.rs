//! Programs that sandbox themselves, as sshd and vsftpd do with the part that talks to strangers: the library
//! must acquire what it needs before.

use crate::{Ops, lock, sleep, standard_error};
use ginnel::resource_limit;
use rustix::fd::RawFd;

impl Ops {
    /// Must be called before the program gives up descriptors or system calls. Creates what a call sleeps on,
    /// as far as the limits allow.
    pub fn prepare_for_sandbox(&self) {
        if let Ok(mut state) = self.lock() {
            let _ = sleep::preallocate(&mut state);
            let _ = self.signals.handlers();
        }
    }

    /// Closes the pooled descriptors that a new limit of descriptors excludes: a socket must not get a number
    /// above it.
    pub fn apply_descriptor_limit(&self, limit: u64) {
        if let (Ok(first), Ok(mut state)) = (RawFd::try_from(limit), self.lock()) {
            state.proxy_fds.close_pooled(first, RawFd::MAX);
        }
    }

    /// Must be called before the program installs a seccomp filter. Stops deferring signals, because that
    /// takes a system call which sends signals, and asking for limits, which takes prlimit64(2).
    pub fn prepare_for_seccomp(&self) {
        self.prepare_for_sandbox();
        lock::disable_deferral();
        resource_limit::assume_unlimited();
        standard_error::never_open();
    }

    /// Returns how much address space the stack's memory occupies in this process. A program that sets
    /// `RLIMIT_AS` does not know of it.
    pub fn address_bytes(&self) -> u64 {
        self.lock().map_or(0, |state| state.client.all().iter().map(|client| client.mapping().bytes()).sum())
    }

    /// Returns the system calls that the library makes on behalf of the program. A seccomp filter must admit
    /// them besides those of the program.
    pub const fn system_calls() -> &'static [i64] {
        &[
            libc::SYS_read,
            libc::SYS_write,
            libc::SYS_pwritev2,
            libc::SYS_fstat,
            libc::SYS_close,
            libc::SYS_fcntl,
            libc::SYS_dup3,
            libc::SYS_futex,
            libc::SYS_ppoll,
            libc::SYS_pselect6,
            libc::SYS_eventfd2,
            libc::SYS_signalfd4,
            libc::SYS_epoll_create1,
            libc::SYS_epoll_ctl,
            libc::SYS_epoll_pwait,
            libc::SYS_epoll_pwait2,
            libc::SYS_sendto,
            libc::SYS_sendmsg,
            libc::SYS_recvmsg,
            libc::SYS_rt_sigaction,
            libc::SYS_rt_sigprocmask,
            libc::SYS_rt_sigpending,
            libc::SYS_rt_sigtimedwait,
            libc::SYS_rt_sigreturn,
            libc::SYS_clock_gettime,
        ]
    }
}
