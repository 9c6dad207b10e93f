//! Programs that confine themselves, as sshd and vsftpd do with the part that talks to strangers: what this library needs afterwards it must have before.

use crate::{Ops, lock, sleep};

impl Ops {
    /// The program is about to give up descriptors or system calls: what a call sleeps on is made now. Best effort, as there may be nothing to be had already.
    pub fn prepare_for_sandbox(&self) {
        if let Ok(mut lane) = self.lock() {
            let _ = sleep::preallocate(&mut lane);
            let _ = self.signals.handlers();
        }
    }

    /// The program is about to give up system calls. One that handlers are put off by stays behind, as it sends signals.
    pub fn prepare_for_seccomp(&self) {
        self.prepare_for_sandbox();
        lock::disable_deferral();
    }

    /// Bytes of addresses that the stack's memory takes up in this process, which a program that limits its own (`RLIMIT_AS`) does not know of.
    pub fn address_bytes(&self) -> u64 {
        self.lock().map_or(0, |lane| lane.client.all().iter().map(|client| client.mapping().bytes()).sum())
    }

    /// System calls that this library makes where a program makes its own: what a filter (`seccomp(2)`) must admit besides what the program wants.
    pub const fn system_calls() -> &'static [i64] {
        &[
            libc::SYS_read,
            libc::SYS_write,
            libc::SYS_close,
            libc::SYS_fcntl,
            libc::SYS_dup3,
            libc::SYS_futex,
            libc::SYS_ppoll,
            libc::SYS_eventfd2,
            libc::SYS_signalfd4,
            libc::SYS_epoll_create1,
            libc::SYS_epoll_ctl,
            libc::SYS_epoll_pwait,
            libc::SYS_epoll_pwait2,
            libc::SYS_sendmsg,
            libc::SYS_recvmsg,
            libc::SYS_rt_sigaction,
            libc::SYS_rt_sigprocmask,
            libc::SYS_rt_sigreturn,
            libc::SYS_clock_gettime,
        ]
    }
}
