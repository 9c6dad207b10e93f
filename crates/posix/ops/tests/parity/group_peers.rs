//! `connect` of UDP sockets that are bound to a group or broadcast address, which remains the address where
//! they receive.

use crate::sys::{Fd, Fixture, address, port, word};
use libc::{
    AF_INET, AF_UNSPEC, IP_ADD_MEMBERSHIP, IP_MULTICAST_IF, IPPROTO_IP, IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP,
    MSG_DONTWAIT, SO_BROADCAST, SO_REUSEADDR, SOCK_DGRAM, SOL_SOCKET,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The index of loopback, and its address as `struct in_addr`.
const LO: u32 = 1;
const INTERFACE: [u8; 4] = [127, 0, 0, 1];

/// Returns a group of the family of the hosts.
fn group(w: &Fixture<'_>) -> IpAddr {
    if w.domain() == AF_INET {
        Ipv4Addr::new(239, 1, 2, 3).into()
    } else {
        Ipv6Addr::new(0xff15, 0, 0, 0, 0, 0, 0, 3).into()
    }
}

/// Creates a socket of host `a` that is bound to an address and shares its port; 0 chooses one. Returns it
/// and the port.
fn bound(w: &Fixture<'_>, ip: IpAddr, at: u16) -> (Fd, u16) {
    let fd = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.a.setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &word(1)).unwrap();
    w.a.bind(fd, &address(SocketAddr::new(ip, at))).unwrap();
    (fd, port(&w.a.getsockname(fd).unwrap()))
}

/// Creates a socket of host `b` that sends to IPv4 groups over loopback.
fn sender(w: &Fixture<'_>) -> Fd {
    let fd = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    if w.domain() == AF_INET {
        w.b.setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &INTERFACE).unwrap();
    }
    w.b.bind(fd, &w.at_b(0)).unwrap();
    fd
}

fn join(w: &Fixture<'_>, fd: Fd) {
    let (level, name, octets) = match group(w) {
        IpAddr::V4(v4) => (IPPROTO_IP, IP_ADD_MEMBERSHIP, [&v4.octets()[..], &[0; 4]].concat()),
        IpAddr::V6(v6) => (IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, v6.octets().to_vec()),
    };
    w.a.setsockopt(fd, level, name, &[octets, LO.to_ne_bytes().to_vec()].concat()).unwrap();
}

/// Returns an address without its port, which differs from run to run.
fn without_port(mut address: Vec<u8>) -> Vec<u8> {
    address[2..4].fill(0);
    address
}

fn log_name(w: &mut Fixture<'_>, fd: Fd, at: u16) {
    let name = w.a.getsockname(fd).unwrap();
    assert_eq!(port(&name), at, "connect keeps the port");
    w.log("getsockname", without_port(name));
}

/// Logs what a socket has received.
fn log_received(w: &mut Fixture<'_>, fd: Fd) {
    for _ in 0..3 {
        w.log("received", w.a.recv(fd, 100, MSG_DONTWAIT));
    }
}

/// Logs a datagram of a connected socket as its peer sees it.
fn log_reply(w: &mut Fixture<'_>, fd: Fd, peer: Fd, at: u16) {
    w.log("send", w.a.send(fd, b"reply", 0));
    w.settle();
    let got = w.b.recv_from(peer, 100, 0, MSG_DONTWAIT).unwrap();
    assert_eq!(port(&got.from), at);
    w.log("reply", (got.bytes, without_port(got.from)));
}

pub fn group_socket_connects_to_one_sender(w: &mut Fixture<'_>) {
    let group = group(w);
    let (idle, at) = bound(w, group, 0);
    // Ending the association keeps a port that was named.
    let (fd, _) = bound(w, group, at);
    join(w, fd);
    let (chosen, other) = (sender(w), sender(w));
    let peer = w.at_b(port(&w.b.getsockname(chosen).unwrap()));
    let second = w.at_b(port(&w.b.getsockname(other).unwrap()));
    let to_group = address(SocketAddr::new(group, at));
    for (name, to) in [("first", Some(&peer)), ("second", Some(&second)), ("none", None)] {
        let unspecified = [&(AF_UNSPEC as u16).to_ne_bytes()[..], &peer[2..]].concat();
        w.log(name, w.a.connect(fd, to.unwrap_or(&unspecified)));
        log_name(w, fd, at);
        w.log("getpeername", w.a.getpeername(fd).map(without_port));
        // Linux has no route to IPv6 groups over loopback.
        if w.domain() == AF_INET {
            w.log("of the first", w.b.send_to(chosen, b"of the first", Some(&to_group), &[], 0));
            w.log("of the second", w.b.send_to(other, b"of the second", Some(&to_group), &[], 0));
        }
        w.log("to the host", w.b.send_to(chosen, b"to the host", Some(&w.at_a(at)), &[], 0));
        w.settle();
        log_received(w, fd);
        log_received(w, idle);
        if let Some(to) = to {
            let receiver = if *to == peer { chosen } else { other };
            // The answer to a datagram that no socket received may be pending.
            let _ = w.b.recv(receiver, 100, MSG_DONTWAIT);
            log_reply(w, fd, receiver, at);
        }
    }
}

pub fn group_socket_connects_to_a_group(w: &mut Fixture<'_>) {
    if w.domain() != AF_INET {
        return;
    }
    let group = group(w);
    let (fd, at) = bound(w, group, 0);
    join(w, fd);
    w.log("interface", w.a.setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &INTERFACE));
    let (receiver, to) = bound(w, group, 0);
    join(w, receiver);
    w.log("connect", w.a.connect(fd, &address(SocketAddr::new(group, to))));
    log_name(w, fd, at);
    w.log("send", w.a.send(fd, b"to the group", 0));
    w.settle();
    let got = w.a.recv_from(receiver, 100, 0, MSG_DONTWAIT).unwrap();
    assert_eq!(port(&got.from), at);
    w.log("received", (got.bytes, without_port(got.from)));
}

pub fn broadcast_socket_connects_to_a_host(w: &mut Fixture<'_>) {
    if w.domain() != AF_INET {
        return;
    }
    for broadcast in [[127, 255, 255, 255], [255; 4]] {
        let (fd, at) = bound(w, broadcast.into(), 0);
        let peer = sender(w);
        w.log("permit", w.b.setsockopt(peer, SOL_SOCKET, SO_BROADCAST, &word(1)));
        w.log("connect", w.a.connect(fd, &w.at_b(port(&w.b.getsockname(peer).unwrap()))));
        log_name(w, fd, at);
        log_reply(w, fd, peer, at);
        let to = address(SocketAddr::new([127, 255, 255, 255].into(), at));
        w.log("broadcast", w.b.send_to(peer, b"to all", Some(&to), &[], 0));
        w.settle();
        log_received(w, fd);
    }
}

pub mod tests {
    crate::cases! {
        ; over_loopback {
            group_socket_connects_to_one_sender
            group_socket_connects_to_a_group
            broadcast_socket_connects_to_a_host
        }
    }
}
