//! Proxy descriptors of closed sockets are kept for later sockets, which must be invisible to the program.

use crate::kernel::Kernel;
use crate::stack::{OnStack, Stacks};
use crate::sys::Sys;
use ginnel_posix_ops::OpsConfig;
use libc::{AF_INET, SOCK_CLOEXEC, SOCK_STREAM};
use rustix::io::Errno;
use std::os::fd::AsRawFd;

fn config() -> OpsConfig {
    OpsConfig { proxy_pool_max: 4, ..OpsConfig::default() }
}

fn is_cloexec(fd: i32) -> bool {
    Kernel.fd_flags(fd).unwrap() & libc::FD_CLOEXEC != 0
}

fn open(on: &OnStack, kind: i32) -> i32 {
    on.socket(AF_INET, SOCK_STREAM | kind).unwrap()
}

#[test]
fn reused_number_has_the_requested_cloexec() {
    let stacks = Stacks::with(config);
    let on = stacks.a();
    for (before, now) in [(0, SOCK_CLOEXEC), (SOCK_CLOEXEC, 0), (0, 0), (SOCK_CLOEXEC, SOCK_CLOEXEC)] {
        let old = open(on, before);
        on.close(old).unwrap();
        let fd = open(on, now);
        assert_eq!(is_cloexec(fd), now == SOCK_CLOEXEC, "{before} then {now}");
        on.close(fd).unwrap();
    }
}

#[test]
fn changed_descriptors_are_not_reused() {
    let stacks = Stacks::with(config);
    let on = stacks.a();
    let fd = open(on, 0);
    Kernel.set_fd_flags(fd, libc::FD_CLOEXEC).unwrap();
    on.0.note_fd_flags_changed(fd);
    on.close(fd).unwrap();
    let next = open(on, 0);
    assert!(!is_cloexec(next));
    // A copy does not inherit `FD_CLOEXEC`.
    let first = open(on, SOCK_CLOEXEC);
    let copy = on.dup(first).unwrap();
    on.close(first).unwrap();
    on.close(copy).unwrap();
    for _ in 0..2 {
        assert!(is_cloexec(open(on, SOCK_CLOEXEC)));
    }
}

#[test]
fn pooled_descriptors_are_closed_on_exec() {
    let stacks = Stacks::with(config);
    let on = stacks.a();
    let fd = open(on, 0);
    on.close(fd).unwrap();
    assert!(!is_cloexec(fd), "the pooled descriptor is unchanged");
    let exec_guard = on.0.prepare_exec().unwrap();
    assert!(is_cloexec(fd));
    drop(exec_guard);
    assert!(!is_cloexec(fd), "exec did not happen");
    // Other tests of this process may have closed a lower number meanwhile.
    let next = open(on, 0);
    assert!(next <= fd && !is_cloexec(next), "{next} instead of {fd}");
    Kernel.close(Kernel.dup(next).unwrap()).unwrap();
}

#[test]
fn pooled_descriptors_look_closed() {
    let stacks = Stacks::with(config);
    let on = stacks.a();
    let set = on.0.epoll_create1(0).unwrap();
    let fd = open(on, 0);
    on.close(fd).unwrap();
    assert!(on.0.handles(fd) && !on.0.owns(fd));
    assert_eq!(on.listen(fd, 1), Err(Errno::BADF));
    assert_eq!(on.set_nonblocking(fd, true), Err(Errno::BADF));
    assert_eq!(on.0.epoll_ctl(set, libc::EPOLL_CTL_DEL, fd, None), Err(Errno::BADF));
    assert_eq!(on.close(fd), Err(Errno::BADF));
    let mut polled = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }; 2];
    assert_eq!(on.poll(&mut polled, 1000), Ok(2));
    assert_eq!(polled.map(|polled| polled.revents), [libc::POLLNVAL; 2]);
    // Other tests of this process may have closed a lower number meanwhile.
    let next = open(on, 0);
    assert!(next <= fd, "{next} instead of {fd}");
    assert_eq!(on.listen(next, 1), Ok(()));
}

#[test]
fn replaced_descriptors_leave_the_pool() {
    let stacks = Stacks::with(config);
    let on = stacks.a();
    let fd = open(on, 0);
    on.close(fd).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    Kernel.dup_to(file.as_raw_fd(), fd).unwrap();
    on.0.forget_fd(fd);
    assert!(!on.0.handles(fd));
    assert_ne!(open(on, 0), fd);
    Kernel.close(fd).unwrap();
}
