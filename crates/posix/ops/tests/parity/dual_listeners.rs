//! Listeners and UDP sockets on all addresses, which also have a kernel socket (dual listeners).

use crate::kernel::Kernel;
use crate::stack::{OnStack, Stacks};
use crate::sys::{self, Fd, Sys, port};
use crate::tcp_options::IP_LOCAL_PORT_RANGE;
use ginnel_posix_ops::{OpsConfig, Timeout};
use libc::{AF_INET, SOCK_STREAM};
use rustix::io::Errno;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;

fn config() -> OpsConfig {
    OpsConfig {
        is_stack_address: |ip| !ip.is_loopback(),
        kernel_listen: true,
        proxy_pool_max: 8,
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

fn connect_to(from: &dyn Sys, ip: &str, port: u16) -> Result<Fd, Errno> {
    let fd = from.socket(AF_INET, SOCK_STREAM).unwrap();
    from.connect(fd, &at(ip, port)).map(|()| fd).inspect_err(|_| from.close(fd).unwrap())
}

/// Starts two stacks. All kernel sockets, those of the stacks and of the test, are in a namespace of their
/// own.
fn start() -> Stacks {
    crate::enter_own_namespace();
    Stacks::with(config)
}

#[test]
fn accepts_from_stack_and_kernel() {
    let stacks = start();
    let (fd, port) = listener(stacks.a());
    let by_kernel = connect_to(&Kernel, "127.0.0.1", port).unwrap();
    let accepted = stacks.a().accept4(fd, 0).unwrap();
    assert!(!stacks.a().0.owns(accepted), "the accepted socket belongs to the kernel");
    Kernel.send(by_kernel, b"kernel", 0).unwrap();
    assert_eq!(Kernel.recv(accepted, 10, 0).unwrap(), b"kernel");
    let by_stack = connect_to(stacks.b(), "10.0.0.1", port).unwrap();
    let accepted = stacks.a().accept4(fd, 0).unwrap();
    stacks.b().send(by_stack, b"stack", 0).unwrap();
    assert_eq!(stacks.a().recv(accepted, 10, 0).unwrap(), b"stack");
}

#[test]
fn port_zero_avoids_ports_of_stack_and_kernel() {
    let stacks = start();
    let on = stacks.a();
    // A range of two ports: the stack has one of them, the kernel the other or none.
    let range = (40_000u32 | 40_001 << 16).to_ne_bytes();
    let bind = |ip: &str, port: u16| {
        let fd = on.socket(AF_INET, SOCK_STREAM).unwrap();
        on.setsockopt(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range).unwrap();
        on.bind(fd, &at(ip, port)).map(|()| fd).inspect_err(|_| on.close(fd).unwrap())
    };
    for (taken, free) in [(40_000, 40_001), (40_001, 40_000)] {
        let holder = bind("10.0.0.1", taken).unwrap();
        for _ in 0..8 {
            let fd = bind("0.0.0.0", 0).unwrap();
            assert_eq!(port(&on.getsockname(fd).unwrap()), free);
            on.listen(fd, 8).unwrap();
            let by_kernel = connect_to(&Kernel, "127.0.0.1", free).unwrap();
            Kernel.close(by_kernel).unwrap();
            on.close(fd).unwrap();
        }
        let of_kernel = Kernel.socket(AF_INET, SOCK_STREAM).unwrap();
        Kernel.bind(of_kernel, &at("0.0.0.0", free)).unwrap();
        assert_eq!(bind("0.0.0.0", 0), Err(Errno::ADDRINUSE));
        Kernel.close(of_kernel).unwrap();
        on.close(holder).unwrap();
    }
}

#[test]
fn kernel_listener_closes_with_the_last_descriptor() {
    let stacks = start();
    let (first, port) = listener(stacks.a());
    let copy = stacks.a().dup(first).unwrap();
    stacks.a().close(first).unwrap();
    let by_kernel = connect_to(&Kernel, "127.0.0.1", port).unwrap();
    let accepted = stacks.a().accept4(copy, 0).unwrap();
    Kernel.close(accepted).unwrap();
    Kernel.close(by_kernel).unwrap();
    stacks.a().close(copy).unwrap();
    assert_eq!(connect_to(&Kernel, "127.0.0.1", port), Err(Errno::CONNREFUSED));
}

#[test]
fn duplicates_share_the_kernel_half_in_a_set() {
    let stacks = start();
    let on = stacks.a();
    let (fd, port) = listener(on);
    let (set, copy) = (on.epoll_create().unwrap(), on.dup(fd).unwrap());
    let add = |fd, data| on.epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN as u32, data);
    let delete = |fd| on.epoll_ctl(set, libc::EPOLL_CTL_DEL, fd, 0, 0);
    assert_eq!((add(fd, 1), add(copy, 2), add(copy, 3)), (Ok(()), Ok(()), Err(Errno::EXIST)));
    delete(fd).unwrap();
    let by_kernel = connect_to(&Kernel, "127.0.0.1", port).unwrap();
    assert_eq!(on.epoll_wait(set, 8, 10_000), Ok(vec![(libc::EPOLLIN as u32, 2)]));
    delete(copy).unwrap();
    assert_eq!(on.epoll_wait(set, 8, 0), Ok(Vec::new()));
    Kernel.close(by_kernel).unwrap();
}

#[test]
fn kernel_half_joins_the_sets_of_its_socket() {
    let stacks = start();
    let on = stacks.a();
    let set = on.epoll_create().unwrap();
    let add = |fd, data| on.epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN as u32, data).unwrap();
    let (fd, datagrams) = (on.socket(AF_INET, SOCK_STREAM).unwrap(), udp(on));
    add(fd, 1);
    add(datagrams, 2);
    let ports = [fd, datagrams].map(|fd| {
        on.bind(fd, &at("0.0.0.0", 0)).unwrap();
        port(&on.getsockname(fd).unwrap())
    });
    on.listen(fd, 8).unwrap();
    let by_kernel = connect_to(&Kernel, "127.0.0.1", ports[0]).unwrap();
    assert_eq!(on.epoll_wait(set, 8, 10_000), Ok(vec![(libc::EPOLLIN as u32, 1)]));
    on.epoll_ctl(set, libc::EPOLL_CTL_DEL, fd, 0, 0).unwrap();
    let sender = udp(&Kernel);
    Kernel.send_to(sender, b"x", Some(&at("127.0.0.1", ports[1])), &[], 0).unwrap();
    assert_eq!(on.epoll_wait(set, 8, 10_000), Ok(vec![(libc::EPOLLIN as u32, 2)]));
    [by_kernel, sender].into_iter().for_each(|fd| Kernel.close(fd).unwrap());
}

#[test]
fn kernel_event_that_cannot_be_written_stays_in_the_set() {
    let stacks = start();
    let on = stacks.a();
    let (set, events) = (on.epoll_create().unwrap(), (libc::EPOLLIN | libc::EPOLLET) as u32);
    let pipes = [(); 2].map(|()| rustix::pipe::pipe().unwrap());
    for ((reader, writer), data) in pipes.iter().zip(0..) {
        on.epoll_ctl(set, libc::EPOLL_CTL_ADD, reader.as_raw_fd(), events, data).unwrap();
        rustix::io::write(writer, b"x").unwrap();
    }
    let wait = |errors_from: usize| {
        on.0.epoll_wait_with(set, 8, Timeout::Zero, None, |at, _| {
            if at < errors_from { Ok(()) } else { Err(Errno::FAULT) }
        })
    };
    assert_eq!(wait(0), Err(Errno::FAULT));
    assert_eq!(wait(1), Ok(1));
    assert_eq!(on.epoll_wait(set, 8, 0).map(|events| events.len()), Ok(1));
    assert_eq!(on.epoll_wait(set, 8, 0), Ok(Vec::new()));
}

#[test]
fn connecting_to_kernel_address_moves_socket() {
    let stacks = start();
    let kernel_socket = Kernel.socket(AF_INET, SOCK_STREAM).unwrap();
    Kernel.bind(kernel_socket, &at("127.0.0.1", 0)).unwrap();
    Kernel.listen(kernel_socket, 1).unwrap();
    let port = port(&Kernel.getsockname(kernel_socket).unwrap());
    let fd = stacks.a().socket(AF_INET, SOCK_STREAM).unwrap();
    let on = 1i32.to_ne_bytes();
    stacks.a().setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &on).unwrap();
    stacks.a().connect(fd, &at("127.0.0.1", port)).unwrap();
    assert!(!stacks.a().0.owns(fd));
    assert_eq!(
        Kernel.getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY).unwrap(),
        on,
        "options are copied"
    );
    let accepted = Kernel.accept4(kernel_socket, 0).unwrap();
    Kernel.send(fd, b"x", 0).unwrap();
    assert_eq!(Kernel.recv(accepted, 1, 0).unwrap(), b"x");
}

fn udp(on: &dyn Sys) -> Fd {
    on.socket(AF_INET, libc::SOCK_DGRAM).unwrap()
}

#[test]
fn refused_bind_leaves_the_port_free_on_the_kernel() {
    let stacks = start();
    let on = stacks.a();
    for kind in [SOCK_STREAM, libc::SOCK_DGRAM] {
        let holder = on.socket(AF_INET, kind).unwrap();
        on.bind(holder, &at("10.0.0.1", 40_000)).unwrap();
        let refused = on.socket(AF_INET, kind).unwrap();
        assert_eq!(on.bind(refused, &at("0.0.0.0", 40_000)), Err(Errno::ADDRINUSE));
        let by_kernel = Kernel.socket(AF_INET, kind).unwrap();
        Kernel.bind(by_kernel, &at("0.0.0.0", 40_000)).unwrap();
        Kernel.close(by_kernel).unwrap();
        on.close(holder).unwrap();
        on.bind(refused, &at("0.0.0.0", 40_000)).unwrap();
        on.close(refused).unwrap();
    }
}

#[test]
fn port_zero_of_datagrams_avoids_ports_of_stack() {
    let stacks = start();
    let on = stacks.a();
    let range = (40_000u32 | 40_001 << 16).to_ne_bytes();
    let holder = udp(on);
    on.bind(holder, &at("10.0.0.1", 40_000)).unwrap();
    for _ in 0..16 {
        let fd = udp(on);
        on.setsockopt(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range).unwrap();
        on.bind(fd, &at("0.0.0.0", 0)).unwrap();
        assert_eq!(port(&on.getsockname(fd).unwrap()), 40_001);
        on.close(fd).unwrap();
    }
}

#[test]
fn datagrams_from_stack_and_kernel() {
    let stacks = start();
    let fd = udp(stacks.a());
    stacks.a().bind(fd, &at("0.0.0.0", 0)).unwrap();
    let bound = port(&stacks.a().getsockname(fd).unwrap());
    let set = stacks.a().epoll_create().unwrap();
    stacks.a().epoll_ctl(set, libc::EPOLL_CTL_ADD, fd, (libc::EPOLLIN | libc::EPOLLOUT) as u32, 1).unwrap();
    let (by_kernel, by_stack) = (udp(&Kernel), udp(stacks.b()));
    for (from, ip) in [(&Kernel as &dyn Sys, "127.0.0.1"), (stacks.b(), "10.0.0.1")] {
        let sender = if ip == "127.0.0.1" { by_kernel } else { by_stack };
        from.send_to(sender, ip.as_bytes(), Some(&at(ip, bound)), &[], 0).unwrap();
        let mut fds = [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }];
        assert_eq!(stacks.a().poll(&mut fds, 10_000), Ok(1), "{ip}");
        let got = stacks.a().recv_from(fd, 100, 0, 0).unwrap();
        assert_eq!(got.bytes, ip.as_bytes());
        stacks.a().send_to(fd, b"back", Some(&got.from), &[], 0).unwrap();
        assert_eq!(from.recv(sender, 100, 0).unwrap(), b"back");
    }
    stacks.a().close(fd).unwrap();
    // The epoll set, which is still open, does not keep the kernel socket.
    let other = udp(&Kernel);
    Kernel.bind(other, &at("0.0.0.0", bound)).unwrap();
}

#[test]
fn sending_to_kernel_address_moves_socket() {
    let stacks = start();
    let kernel_socket = udp(&Kernel);
    Kernel.bind(kernel_socket, &at("127.0.0.1", 0)).unwrap();
    let bound = port(&Kernel.getsockname(kernel_socket).unwrap());
    let to = at("127.0.0.1", bound);
    let (connects, sends, was_bound) = (udp(stacks.a()), udp(stacks.a()), udp(stacks.a()));
    stacks.a().connect(connects, &to).unwrap();
    Kernel.send(connects, b"1", 0).unwrap();
    stacks.a().send_to(sends, b"2", Some(&to), &[], 0).unwrap();
    stacks.a().bind(was_bound, &at("0.0.0.0", 0)).unwrap();
    stacks.a().connect(was_bound, &to).unwrap();
    Kernel.send(was_bound, b"3", 0).unwrap();
    for expected in [b"1", b"2", b"3"] {
        assert_eq!(Kernel.recv(kernel_socket, 10, 0).unwrap(), expected);
    }
    for fd in [connects, sends, was_bound] {
        assert!(!stacks.a().0.owns(fd));
    }
    // If the stack has no route, the kernel may have one.
    let far = udp(stacks.a());
    let _ = stacks.a().send_to(far, b"x", Some(&at("192.0.2.1", 9)), &[], 0);
    assert!(!stacks.a().0.owns(far));
    let near = udp(stacks.a());
    stacks.a().connect(near, &at("10.0.0.2", 9)).unwrap();
    assert!(stacks.a().0.owns(near));
}
