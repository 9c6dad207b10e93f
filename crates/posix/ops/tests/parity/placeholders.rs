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

fn closed_on_exec(fd: i32) -> bool {
    Kernel.fd_flags(fd).unwrap() & libc::FD_CLOEXEC != 0
}

fn open(on: &OnStack, kind: i32) -> i32 {
    on.socket(AF_INET, SOCK_STREAM | kind).unwrap()
}

#[test]
fn a_new_socket_has_the_flag_it_was_asked_for_whoever_had_its_number_before() {
    let stacks = Stacks::with(config);
    let on = stacks.a();
    for (before, now) in [(0, SOCK_CLOEXEC), (SOCK_CLOEXEC, 0), (0, 0), (SOCK_CLOEXEC, SOCK_CLOEXEC)] {
        let old = open(on, before);
        on.close(old).unwrap();
        let fd = open(on, now);
        assert_eq!(closed_on_exec(fd), now == SOCK_CLOEXEC, "{before} then {now}");
        on.close(fd).unwrap();
    }
}

#[test]
fn what_the_program_changed_is_not_kept() {
    let stacks = Stacks::with(config);
    let on = stacks.a();
    let fd = open(on, 0);
    Kernel.set_fd_flags(fd, libc::FD_CLOEXEC).unwrap();
    on.0.note_fd_flags_changed(fd);
    on.close(fd).unwrap();
    let next = open(on, 0);
    assert!(!closed_on_exec(next));
    // A copy does not inherit `FD_CLOEXEC`.
    let first = open(on, SOCK_CLOEXEC);
    let copy = on.dup(first).unwrap();
    on.close(first).unwrap();
    on.close(copy).unwrap();
    for _ in 0..2 {
        assert!(closed_on_exec(open(on, SOCK_CLOEXEC)));
    }
}

#[test]
fn nothing_that_is_kept_goes_to_another_program() {
    let stacks = Stacks::with(config);
    let on = stacks.a();
    let fd = open(on, 0);
    on.close(fd).unwrap();
    assert!(!closed_on_exec(fd), "it is kept as it was");
    let execing = on.0.prepare_exec().unwrap();
    assert!(closed_on_exec(fd));
    drop(execing);
    assert!(!closed_on_exec(fd), "the program did not begin, and this one goes on");
    assert_eq!(open(on, 0), fd);
    Kernel.close(Kernel.dup(fd).unwrap()).unwrap();
}

#[test]
fn what_is_kept_is_closed_to_the_program() {
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
    assert_eq!(open(on, 0), fd);
    assert_eq!(on.listen(fd, 1), Ok(()));
}

#[test]
fn a_number_that_the_program_gave_to_something_else_is_no_sockets() {
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
