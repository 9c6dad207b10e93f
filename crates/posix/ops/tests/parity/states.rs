//! Calls in unusual states of a socket: before it listens, without a connection, after `shutdown`.

use crate::kernel::Kernel;
use crate::sys::{Fd, Fixture, Sys, address, control, port, word};
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use libc::{
    AF_INET6, AF_UNIX, AF_UNSPEC, EPOLL_CTL_ADD, EPOLLIN, EPOLLOUT, IPPROTO_IP, IPPROTO_IPV6, MSG_DONTWAIT,
    MSG_NOSIGNAL, MSG_OOB, SO_COOKIE, SO_PEERNAME, SOCK_DGRAM, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET,
};
use rustix::fd::AsRawFd;

pub fn listener_added_to_a_set_before_listen(w: &mut Fixture<'_>) {
    let set = w.a.epoll_create().unwrap();
    let listener = w.a.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    w.log("add", w.a.epoll_ctl(set, EPOLL_CTL_ADD, listener, (EPOLLIN | EPOLLOUT) as u32, 1));
    w.log("not listening", w.a.epoll_wait(set, 4, 0));
    w.a.bind(listener, &w.at_a(0)).unwrap();
    w.a.listen(listener, 4).unwrap();
    w.log("no connection", w.a.epoll_wait(set, 4, 0));
    let at = port(&w.a.getsockname(listener).unwrap());
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.log("connection", w.a.epoll_wait(set, 4, 10_000));
    w.log("accept", w.a.accept4(listener, 0).is_ok());
}

pub fn urgent_receive_without_a_connection(w: &mut Fixture<'_>) {
    let fd = w.a.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    w.log("new socket", w.a.recv(fd, 1, MSG_OOB));
    w.log("shutdown", w.a.shutdown(fd, libc::SHUT_RDWR));
    w.log("shut down", w.a.recv(fd, 1, MSG_OOB));
    w.log("other data", w.a.recv(fd, 1, 0));
    let (listener, _) = w.listener(SOCK_NONBLOCK);
    w.log("listener", w.a.recv(listener, 1, MSG_OOB));
}

/// Flags of `send` that Linux does not evaluate for TCP.
pub fn other_flags_of_send_are_ignored(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let flags =
        [libc::MSG_PEEK, libc::MSG_TRUNC, libc::MSG_WAITALL, libc::MSG_ERRQUEUE, 0x10, 1 << 18, 1 << 27];
    for flag in flags {
        w.log("send", w.a.send(a, b"abc", flag));
        w.log("received", w.b.recv(b, 3, libc::MSG_WAITALL));
    }
    let unconnected = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("not connected", w.a.send(unconnected, b"abc", libc::MSG_WAITALL | MSG_NOSIGNAL));
}

pub fn connect_to_a_group_or_broadcast(w: &mut Fixture<'_>) {
    let groups: [IpAddr; 2] = match w.domain() {
        AF_INET6 => [Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1).into(); 2],
        _ => [Ipv4Addr::BROADCAST.into(), Ipv4Addr::new(224, 0, 0, 1).into()],
    };
    for group in groups {
        let fd = w.a.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
        w.a.bind(fd, &w.at_a(0)).unwrap();
        w.log("connect", w.a.connect(fd, &address(SocketAddr::new(group, 9))));
        w.log("events", w.ready(w.a, fd));
    }
}

pub fn shutdown_of_datagrams_survives_connect(w: &mut Fixture<'_>) {
    let fd = w.a.socket(w.domain(), SOCK_DGRAM | SOCK_NONBLOCK).unwrap();
    w.log("new socket", w.ready(w.a, fd));
    w.log("shutdown", w.a.shutdown(fd, libc::SHUT_RD));
    w.log("events", w.ready(w.a, fd));
    w.log("shutdown", w.a.shutdown(fd, libc::SHUT_WR));
    w.log("events", w.ready(w.a, fd));
    w.a.bind(fd, &w.at_a(0)).unwrap();
    w.log("bound", w.ready(w.a, fd));
    w.log("connect", w.a.connect(fd, &w.at_b(9)));
    w.log("connected", w.ready(w.a, fd));
    w.log("send", w.a.send(fd, b"x", MSG_NOSIGNAL));
    let mut nobody = w.at_a(0);
    nobody[..2].copy_from_slice(&(AF_UNSPEC as u16).to_ne_bytes());
    w.log("disconnect", w.a.connect(fd, &nobody));
    w.log("disconnected", w.ready(w.a, fd));
}

/// `write_band` of `poll`, which sockets of datagrams have and connections do not.
pub fn priority_band_is_writable(w: &mut Fixture<'_>) {
    let band = |w: &Fixture<'_>, fd: Fd| {
        let mut fds = [libc::pollfd { fd, events: libc::POLLWRBAND, revents: 0 }];
        (w.a.poll(&mut fds, 0), fds[0].revents)
    };
    let datagrams = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.log("unbound", band(w, datagrams));
    w.a.bind(datagrams, &w.at_a(0)).unwrap();
    w.log("bound", band(w, datagrams));
    let (a, _) = w.connection();
    w.log("connection", band(w, a));
}

pub fn control_messages_of_other_levels(w: &mut Fixture<'_>) {
    let b = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.b.bind(b, &w.at_b(0)).unwrap();
    let to = w.at_b(port(&w.b.getsockname(b).unwrap()));
    let a = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    let other_ip = if w.domain() == AF_INET6 { IPPROTO_IP } else { IPPROTO_IPV6 };
    let cases = [
        ("unknown level", control(999, 1, &word(1))),
        ("other version of IP", control(other_ip, 77, &word(1))),
        ("priority", control(SOL_SOCKET, libc::SO_PRIORITY, &word(6))),
        ("short priority", control(SOL_SOCKET, libc::SO_PRIORITY, &[1])),
        ("descriptors", control(SOL_SOCKET, libc::SCM_RIGHTS, &word(0))),
        ("unknown of sockets", control(SOL_SOCKET, 999, &word(1))),
        ("unknown of datagrams", control(libc::IPPROTO_UDP, 999, &word(1))),
    ];
    for (label, control) in cases {
        let sent = w.a.send_to(a, b"x", Some(&to), &control, 0);
        let is_sent = sent.is_ok();
        w.log(label, sent);
        if is_sent {
            w.log("received", w.b.recv(b, 9, 0));
        }
    }
}

pub fn splice_of_a_datagram_ends_at_the_count(w: &mut Fixture<'_>) {
    let b = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.b.bind(b, &w.at_b(0)).unwrap();
    let to = w.at_b(port(&w.b.getsockname(b).unwrap()));
    let a = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.a.send_to(a, b"hello world", Some(&to), &[], 0).unwrap();
    w.wait(w.b, b, libc::POLLIN);
    let (read_end, write_end) = rustix::pipe::pipe().unwrap();
    w.log("splice", w.b.splice(b, write_end.as_raw_fd(), 5, 0));
    let mut bytes = [0; 16];
    w.log("in the pipe", rustix::io::read(&read_end, &mut bytes).map(|count| bytes[..count].to_vec()));
    w.log("no rest", w.b.recv(b, 16, MSG_DONTWAIT));
}

pub fn sendfile_from_what_is_no_file(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let (read_end, write_end) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&write_end, b"pipe").unwrap();
    w.log("pipe", w.a.sendfile(a, read_end.as_raw_fd(), None, 4));
    w.log("pipe with an offset", w.a.sendfile(a, read_end.as_raw_fd(), Some(&mut 0), 4));
    let directory = std::fs::File::open("/").unwrap();
    w.log("directory", w.a.sendfile(a, directory.as_raw_fd(), None, 4));
    w.log("socket", w.a.sendfile(a, a, None, 4));
    let zeros = std::fs::File::open("/dev/zero").unwrap();
    w.log("device", w.a.sendfile(a, zeros.as_raw_fd(), None, 4));
    w.log("received", w.b.recv(b, 9, 0));
    let empty = rustix::fs::memfd_create("empty", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    w.log("empty file", w.a.sendfile(a, empty.as_raw_fd(), None, 4));
}

pub fn options_with_short_and_long_buffers(w: &mut Fixture<'_>) {
    let (a, _) = w.connection();
    for space in [0, 4, 7] {
        w.log("cookie", w.a.getsockopt_into(a, SOL_SOCKET, SO_COOKIE, space));
    }
    w.log("whole cookie", w.a.getsockopt_into(a, SOL_SOCKET, SO_COOKIE, 8).map(|value| value.len()));
    let name = w.a.getpeername(a).unwrap();
    for space in [0, 4, name.len(), name.len() + 1] {
        w.log("peer name", w.a.getsockopt_into(a, SOL_SOCKET, SO_PEERNAME, space).map(|value| value.len()));
    }
    let v6 = w.a.socket(AF_INET6, SOCK_DGRAM).unwrap();
    for value in [0, 1, 2, 255, -1] {
        w.log("set class", w.a.setsockopt(v6, IPPROTO_IPV6, libc::IPV6_TCLASS, &word(value)));
        w.log("class", w.a.getsockopt(v6, IPPROTO_IPV6, libc::IPV6_TCLASS));
    }
}

/// All sockets of a network namespace have its number.
pub fn number_of_the_network_namespace(w: &mut Fixture<'_>) {
    const SO_NETNS_COOKIE: c_int = 71;
    let local = Kernel.socket(AF_UNIX, SOCK_STREAM).unwrap();
    let number = Kernel.getsockopt_into(local, SOL_SOCKET, SO_NETNS_COOKIE, 8).unwrap();
    Kernel.close(local).unwrap();
    let (a, b) = w.connection();
    let (here, there, domain) = (w.a, w.b, w.domain());
    let kinds =
        [(domain, SOCK_STREAM), (domain, SOCK_DGRAM), (AF_INET6, SOCK_STREAM), (AF_INET6, SOCK_DGRAM)];
    let unbound = kinds.map(|(domain, kind)| (here, here.socket(domain, kind).unwrap()));
    for (host, fd) in [(here, a), (there, b)].into_iter().chain(unbound) {
        for space in [0, 4, 7, 9, 16] {
            w.log("other lengths", host.getsockopt_into(fd, SOL_SOCKET, SO_NETNS_COOKIE, space));
        }
        let got = host.getsockopt_into(fd, SOL_SOCKET, SO_NETNS_COOKIE, 8);
        w.log("is that of the thread", got.map(|got| got == number));
        for len in [0, 4, 8] {
            w.log("set", host.setsockopt(fd, SOL_SOCKET, SO_NETNS_COOKIE, &number[..len]));
        }
    }
}

pub mod tests {
    crate::cases! {
        ; both {
            listener_added_to_a_set_before_listen
            urgent_receive_without_a_connection
            other_flags_of_send_are_ignored
            connect_to_a_group_or_broadcast
            shutdown_of_datagrams_survives_connect
            priority_band_is_writable
            control_messages_of_other_levels
            splice_of_a_datagram_ends_at_the_count
            sendfile_from_what_is_no_file
            options_with_short_and_long_buffers
            number_of_the_network_namespace
        }
    }
}
