//! Listeners on all addresses, which have a half in the kernel.

use crate::kernel::Kernel;
use crate::stack::{OnStack, Stacks};
use crate::sys::{self, Fd, Sys, port};
use ginnel_posix_ops::OpsConfig;
use libc::{AF_INET, SOCK_STREAM};
use rustix::io::Errno;
use std::net::SocketAddr;

fn config() -> OpsConfig {
    OpsConfig {
        takes: |ip| !ip.is_loopback(),
        kernel_listen: true,
        descriptors_kept: 8,
        ..OpsConfig::default()
    }
}

fn at(ip: &str, port: u16) -> Vec<u8> {
    sys::address(SocketAddr::new(ip.parse().unwrap(), port))
}

fn listener(on: &OnStack) -> (Fd, u16) {
    let fd = on.socket(AF_INET, SOCK_STREAM).unwrap();
    on.bind(fd, &at("0.0.0.0", 0)).unwrap();
    on.listen(fd, 8).unwrap();
    (fd, port(&on.getsockname(fd).unwrap()))
}

fn dial(from: &dyn Sys, ip: &str, port: u16) -> Result<Fd, Errno> {
    let fd = from.socket(AF_INET, SOCK_STREAM).unwrap();
    from.connect(fd, &at(ip, port)).map(|()| fd).inspect_err(|_| from.close(fd).unwrap())
}

#[test]
fn connections_come_by_the_stack_and_by_the_kernel() {
    let stacks = Stacks::with(config);
    let (fd, port) = listener(stacks.a());
    let by_kernel = dial(&Kernel, "127.0.0.1", port).unwrap();
    let accepted = stacks.a().accept4(fd, 0).unwrap();
    assert!(!stacks.a().0.owns(accepted), "it is the kernel's");
    Kernel.send(by_kernel, b"kernel", 0).unwrap();
    assert_eq!(Kernel.recv(accepted, 10, 0).unwrap(), b"kernel");
    let by_stack = dial(stacks.b(), "10.0.0.1", port).unwrap();
    let accepted = stacks.a().accept4(fd, 0).unwrap();
    stacks.b().send(by_stack, b"stack", 0).unwrap();
    assert_eq!(stacks.a().recv(accepted, 10, 0).unwrap(), b"stack");
}

#[test]
fn the_kernels_half_goes_with_the_last_descriptor_and_not_before() {
    let stacks = Stacks::with(config);
    let (first, port) = listener(stacks.a());
    let copy = stacks.a().dup(first).unwrap();
    stacks.a().close(first).unwrap();
    let by_kernel = dial(&Kernel, "127.0.0.1", port).unwrap();
    let accepted = stacks.a().accept4(copy, 0).unwrap();
    Kernel.close(accepted).unwrap();
    Kernel.close(by_kernel).unwrap();
    stacks.a().close(copy).unwrap();
    assert_eq!(dial(&Kernel, "127.0.0.1", port), Err(Errno::CONNREFUSED));
}

#[test]
fn sockets_to_others_become_the_kernels() {
    let stacks = Stacks::with(config);
    let there = Kernel.socket(AF_INET, SOCK_STREAM).unwrap();
    Kernel.bind(there, &at("127.0.0.1", 0)).unwrap();
    Kernel.listen(there, 1).unwrap();
    let port = port(&Kernel.getsockname(there).unwrap());
    let fd = stacks.a().socket(AF_INET, SOCK_STREAM).unwrap();
    let on = 1i32.to_ne_bytes();
    stacks.a().setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &on).unwrap();
    stacks.a().connect(fd, &at("127.0.0.1", port)).unwrap();
    assert!(!stacks.a().0.owns(fd));
    assert_eq!(
        Kernel.getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY).unwrap(),
        on,
        "options come along"
    );
    let accepted = Kernel.accept4(there, 0).unwrap();
    Kernel.send(fd, b"x", 0).unwrap();
    assert_eq!(Kernel.recv(accepted, 1, 0).unwrap(), b"x");
}
