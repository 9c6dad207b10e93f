//! Multicast groups: options, memberships with source filters, and what members receive. All cases name the
//! loopback interface, because the route to groups is the host's own.

use crate::sys::{Fd, Fixture, address, port, word};
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use libc::{
    AF_INET, IP_ADD_MEMBERSHIP, IP_DROP_MEMBERSHIP, IP_MULTICAST_IF, IP_MULTICAST_LOOP, IP_MULTICAST_TTL,
    IPPROTO_IP, IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, IPV6_DROP_MEMBERSHIP, IPV6_MULTICAST_HOPS,
    IPV6_MULTICAST_IF, IPV6_MULTICAST_LOOP, MSG_DONTWAIT, SO_BROADCAST, SO_REUSEADDR, SOCK_DGRAM, SOL_SOCKET,
};

/// Options for which libc has no names.
const IP_MSFILTER: c_int = 41;
const MCAST_JOIN_GROUP: c_int = 42;
const MCAST_BLOCK_SOURCE: c_int = 43;
const MCAST_UNBLOCK_SOURCE: c_int = 44;
const MCAST_LEAVE_GROUP: c_int = 45;
const MCAST_JOIN_SOURCE_GROUP: c_int = 46;
const MCAST_LEAVE_SOURCE_GROUP: c_int = 47;
const MCAST_MSFILTER: c_int = 48;
const IP_MULTICAST_ALL: c_int = 49;
const IPV6_MULTICAST_ALL: c_int = 29;

/// The index of loopback.
const LO: u32 = 1;

/// Returns a group of the family of the hosts.
fn group(w: &Fixture<'_>, last: u8) -> IpAddr {
    if w.domain() == AF_INET {
        Ipv4Addr::new(239, 1, 2, last).into()
    } else {
        Ipv6Addr::new(0xff15, 0, 0, 0, 0, 0, 0, last.into()).into()
    }
}

/// Returns a unicast address of the family of the hosts.
fn source(w: &Fixture<'_>, last: u8) -> IpAddr {
    if w.domain() == AF_INET {
        Ipv4Addr::new(127, 0, 0, last).into()
    } else {
        Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last.into()).into()
    }
}

/// Returns an address as `struct sockaddr_storage`.
fn storage(ip: IpAddr) -> Vec<u8> {
    let mut bytes = address(SocketAddr::new(ip, 0));
    bytes.resize(128, 0);
    bytes
}

fn group_req(interface: u32, group: IpAddr) -> Vec<u8> {
    [interface.to_ne_bytes().to_vec(), vec![0; 4], storage(group)].concat()
}

fn source_req(interface: u32, group: IpAddr, source: IpAddr) -> Vec<u8> {
    [group_req(interface, group), storage(source)].concat()
}

fn group_filter(interface: u32, group: IpAddr, mode: u32, sources: &[IpAddr]) -> Vec<u8> {
    let counts = [mode.to_ne_bytes(), (sources.len() as u32).to_ne_bytes()].concat();
    let sources: Vec<u8> = sources.iter().flat_map(|source| storage(*source)).collect();
    [group_req(interface, group), counts, sources].concat()
}

/// Returns `struct ip_mreqn` or `struct ipv6_mreq`.
fn mreq(group: IpAddr, index: u32) -> Vec<u8> {
    match group {
        IpAddr::V4(v4) => [&v4.octets()[..], &[0; 4], &index.to_ne_bytes()].concat(),
        IpAddr::V6(v6) => [&v6.octets()[..], &index.to_ne_bytes()].concat(),
    }
}

/// Returns the level, and the options that join and leave.
fn membership(w: &Fixture<'_>) -> (c_int, c_int, c_int) {
    if w.domain() == AF_INET {
        (IPPROTO_IP, IP_ADD_MEMBERSHIP, IP_DROP_MEMBERSHIP)
    } else {
        (IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, IPV6_DROP_MEMBERSHIP)
    }
}

pub fn join_and_leave_errors(w: &mut Fixture<'_>) {
    let (level, add, drop) = membership(w);
    let (first, second, host) = (group(w, 1), group(w, 2), source(w, 9));
    for is_bound in [false, true] {
        let fd = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
        if is_bound {
            let any = if first.is_ipv4() {
                IpAddr::V4(Ipv4Addr::UNSPECIFIED)
            } else {
                IpAddr::V6(Ipv6Addr::UNSPECIFIED)
            };
            w.log("bind", w.a.bind(fd, &address(SocketAddr::new(any, 0))));
        }
        let len_max = if first.is_ipv4() { 7 } else { 19 };
        for len in [0, 4, len_max] {
            w.log("too short", (len, w.a.setsockopt(fd, level, add, &mreq(first, LO)[..len])));
        }
        for (label, option, value) in [
            ("leave before", drop, mreq(first, LO)),
            ("no group", add, mreq(host, LO)),
            ("no interface", add, mreq(first, 9_999)),
            ("join", add, mreq(first, LO)),
            ("join again", add, mreq(first, LO)),
            ("join another", add, mreq(second, LO)),
            ("leave", drop, mreq(first, LO)),
            ("leave again", drop, mreq(first, LO)),
            ("leave elsewhere", drop, mreq(second, 9_999)),
            ("join again", add, mreq(first, LO)),
            ("MCAST_JOIN_GROUP again", MCAST_JOIN_GROUP, group_req(LO, first)),
            ("MCAST_LEAVE_GROUP", MCAST_LEAVE_GROUP, group_req(LO, first)),
            ("MCAST_LEAVE_GROUP again", MCAST_LEAVE_GROUP, group_req(LO, first)),
            ("MCAST_JOIN_GROUP", MCAST_JOIN_GROUP, group_req(LO, first)),
            ("too short", MCAST_JOIN_GROUP, group_req(LO, first)[..135].to_vec()),
            ("wrong family", MCAST_JOIN_GROUP, vec![0; 136]),
        ] {
            w.log(label, w.a.setsockopt(fd, level, option, &value));
        }
        w.log("getsockopt", w.a.getsockopt(fd, level, add));
        w.log("close", w.a.close(fd));
    }
}

pub fn source_filter_errors(w: &mut Fixture<'_>) {
    let level = membership(w).0;
    let (first, second) = (group(w, 1), group(w, 2));
    let fd = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    let of = |w: &Fixture<'_>, last| source_req(LO, first, source(w, last));
    for (label, option, value) in [
        ("block before", MCAST_BLOCK_SOURCE, of(w, 1)),
        ("leave source before", MCAST_LEAVE_SOURCE_GROUP, of(w, 1)),
        ("too short", MCAST_JOIN_SOURCE_GROUP, of(w, 1)[..263].to_vec()),
        ("wrong family", MCAST_JOIN_SOURCE_GROUP, vec![0; 264]),
        ("join source", MCAST_JOIN_SOURCE_GROUP, of(w, 1)),
        ("join source again", MCAST_JOIN_SOURCE_GROUP, of(w, 1)),
        ("join another", MCAST_JOIN_SOURCE_GROUP, of(w, 2)),
        ("block in this mode", MCAST_BLOCK_SOURCE, of(w, 3)),
        ("leave a source", MCAST_LEAVE_SOURCE_GROUP, of(w, 1)),
        ("leave it again", MCAST_LEAVE_SOURCE_GROUP, of(w, 1)),
        ("leave the last source", MCAST_LEAVE_SOURCE_GROUP, of(w, 2)),
        ("no membership", MCAST_LEAVE_GROUP, group_req(LO, first)),
        ("join", MCAST_JOIN_GROUP, group_req(LO, first)),
        ("unblock", MCAST_UNBLOCK_SOURCE, of(w, 1)),
        ("block", MCAST_BLOCK_SOURCE, of(w, 1)),
        ("block again", MCAST_BLOCK_SOURCE, of(w, 1)),
        ("join source in this mode", MCAST_JOIN_SOURCE_GROUP, of(w, 2)),
        ("unblock", MCAST_UNBLOCK_SOURCE, of(w, 1)),
        ("filter", MCAST_MSFILTER, group_filter(LO, first, 1, &[source(w, 1), source(w, 2)])),
        ("unknown mode", MCAST_MSFILTER, group_filter(LO, first, 2, &[])),
        ("filter too short", MCAST_MSFILTER, group_filter(LO, first, 1, &[])[..143].to_vec()),
        ("filter without membership", MCAST_MSFILTER, group_filter(LO, second, 0, &[source(w, 1)])),
        ("filter of no group", MCAST_MSFILTER, group_filter(LO, source(w, 1), 0, &[])),
        ("empty filter", MCAST_MSFILTER, group_filter(LO, first, 1, &[])),
        ("left", MCAST_LEAVE_GROUP, group_req(LO, first)),
        ("empty filter again", MCAST_MSFILTER, group_filter(LO, first, 1, &[])),
    ] {
        w.log(label, w.a.setsockopt(fd, level, option, &value));
    }
    w.log("join", w.a.setsockopt(fd, level, MCAST_JOIN_GROUP, &group_req(LO, first)));
    for last in 1..70 {
        let value = of(w, last);
        w.log("block", (last, w.a.setsockopt(fd, level, MCAST_BLOCK_SOURCE, &value)));
    }
    for count in [9, 10, 11, 63, 64, 65] {
        let sources: Vec<_> = (1..=count).map(|last| source(w, last)).collect();
        let value = group_filter(LO, first, 0, &sources);
        w.log("long filter", (count, w.a.setsockopt(fd, level, MCAST_MSFILTER, &value)));
    }
}

pub fn source_filters_are_returned(w: &mut Fixture<'_>) {
    let level = membership(w).0;
    let (first, second) = (group(w, 1), group(w, 2));
    let fd = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    let empty = group_filter(LO, first, 0, &[]);
    w.log("before", w.a.source_filter(fd, level, MCAST_MSFILTER, &empty));
    w.log("join", w.a.setsockopt(fd, level, MCAST_JOIN_GROUP, &group_req(LO, first)));
    w.log("too short", w.a.source_filter(fd, level, MCAST_MSFILTER, &empty[..143]));
    w.log("another group", w.a.source_filter(fd, level, MCAST_MSFILTER, &group_filter(LO, second, 0, &[])));
    let host = group_filter(LO, source(w, 1), 0, &[]);
    w.log("no group", w.a.source_filter(fd, level, MCAST_MSFILTER, &host));
    for mode in [0, 1] {
        let sources = [3, 1, 2].map(|last| source(w, last));
        let filter = group_filter(LO, first, mode, &sources);
        w.log("set", w.a.setsockopt(fd, level, MCAST_MSFILTER, &filter));
        for room in [0, 2, 3, 5] {
            let query = group_filter(LO, first, 7, &vec![source(w, 9); room]);
            let got = w.a.source_filter(fd, level, MCAST_MSFILTER, &query);
            // The kernel fills in more of the addresses' padding than others need.
            w.log(
                "get",
                got.map(|got| (got.len(), got[136..144].to_vec(), got.get(144..152).map(<[u8]>::to_vec))),
            );
        }
    }
    if w.domain() == AF_INET {
        let query =
            |count: u8| [&[239, 1, 2, 1, 127, 0, 0, 1, 9, 0, 0, 0, count, 0, 0, 0][..], &[0; 12]].concat();
        for count in [0, 2, 3] {
            w.log("get IP_MSFILTER", w.a.source_filter(fd, level, IP_MSFILTER, &query(count)));
        }
        w.log("too short", w.a.source_filter(fd, level, IP_MSFILTER, &query(0)[..15]));
    }
}

pub fn ipv4_membership_structures(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_DGRAM).unwrap();
    let lo = [127, 0, 0, 1];
    let join = |last: u8| [[239, 1, 2, last], lo].concat();
    let of = |last: u8| [[239, 1, 2, 1], lo, [127, 0, 0, last]].concat();
    let filter = |mode: u8, count: u8, sources: &[u8]| {
        let mut value = [[239, 1, 2, 1], lo, [mode, 0, 0, 0], [count, 0, 0, 0]].concat();
        sources.iter().for_each(|last| value.extend([127, 0, 0, *last]));
        value
    };
    for (label, option, value) in [
        ("by address", IP_ADD_MEMBERSHIP, join(1)),
        ("again by index", IP_ADD_MEMBERSHIP, mreq([239, 1, 2, 1].into(), LO)),
        ("unknown address", IP_ADD_MEMBERSHIP, [[239, 1, 2, 3], [192, 0, 2, 77]].concat()),
        ("leave", IP_DROP_MEMBERSHIP, join(1)),
        ("add source", libc::IP_ADD_SOURCE_MEMBERSHIP, of(1)),
        ("wrong length", libc::IP_ADD_SOURCE_MEMBERSHIP, of(1)[..11].to_vec()),
        ("drop source", libc::IP_DROP_SOURCE_MEMBERSHIP, of(1)),
        ("block", libc::IP_BLOCK_SOURCE, of(1)),
        ("join", IP_ADD_MEMBERSHIP, join(1)),
        ("block", libc::IP_BLOCK_SOURCE, of(1)),
        ("unblock", libc::IP_UNBLOCK_SOURCE, of(1)),
        ("filter", IP_MSFILTER, filter(0, 2, &[1, 2])),
        ("too short", IP_MSFILTER, filter(0, 3, &[1, 2])),
        ("unknown mode", IP_MSFILTER, filter(7, 0, &[])),
        ("leave by filter", IP_MSFILTER, filter(1, 0, &[])),
        ("left", IP_DROP_MEMBERSHIP, join(1)),
    ] {
        w.log(label, w.a.setsockopt(fd, IPPROTO_IP, option, &value));
    }
    for last in 0..23 {
        w.log("many", (last, w.a.setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &join(last))));
    }
}

pub fn multicast_option_values(w: &mut Fixture<'_>) {
    let fd = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    let options = [IP_MULTICAST_TTL, IP_MULTICAST_LOOP, IP_MULTICAST_ALL].map(|name| (IPPROTO_IP, name));
    let of_v6 =
        [IPV6_MULTICAST_HOPS, IPV6_MULTICAST_LOOP, IPV6_MULTICAST_ALL].map(|name| (IPPROTO_IPV6, name));
    let is_v6 = w.domain() != AF_INET;
    for (level, name) in options.into_iter().chain(of_v6.into_iter().filter(|_| is_v6)) {
        w.log("default", (name, w.a.getsockopt(fd, level, name)));
        for value in [-2, -1, 0, 1, 2, 255, 256] {
            w.log("set", (value, w.a.setsockopt(fd, level, name, &word(value))));
            w.log("get", w.a.getsockopt(fd, level, name));
        }
        for len in [0, 1, 3] {
            w.log("short", (len, w.a.setsockopt(fd, level, name, &[1, 0, 0][..len])));
            w.log("get", w.a.getsockopt(fd, level, name));
        }
        w.log("one byte", w.a.getsockopt_into(fd, level, name, 1));
    }
    let mreqn = |address: [u8; 4], index: u32| [[0; 4], address, index.to_ne_bytes()].concat();
    for value in [
        vec![127, 0, 0, 1],
        vec![192, 0, 2, 7],
        vec![0; 4],
        vec![1, 2, 3],
        mreqn([127, 0, 0, 1], 0)[..8].to_vec(),
        mreqn([0; 4], LO),
        mreqn([0; 4], 9_999),
        mreqn([127, 0, 0, 1], LO),
        mreqn([0; 4], 0),
    ] {
        w.log("interface", (value.clone(), w.a.setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &value)));
        w.log("get", w.a.getsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF));
    }
    if is_v6 {
        for value in [LO, 9_999, 0] {
            let set = w.a.setsockopt(fd, IPPROTO_IPV6, IPV6_MULTICAST_IF, &value.to_ne_bytes());
            w.log("interface", (value, set));
            w.log("get", w.a.getsockopt(fd, IPPROTO_IPV6, IPV6_MULTICAST_IF));
        }
    }
}

/// Creates a socket that shares a port: 0 chooses one. Returns it and the port.
fn receiver(w: &Fixture<'_>, ip: [u8; 4], at: u16) -> (Fd, u16) {
    let fd = w.a.socket(AF_INET, SOCK_DGRAM).unwrap();
    w.a.setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &word(1)).unwrap();
    w.a.bind(fd, &address((IpAddr::from(ip), at).into())).unwrap();
    (fd, port(&w.a.getsockname(fd).unwrap()))
}

/// Sends a datagram to a group or broadcast address, and logs which sockets receive it.
fn deliver(w: &mut Fixture<'_>, sender: Fd, to: [u8; 4], at: u16, receivers: &[Fd]) {
    let to = address((IpAddr::from(to), at).into());
    w.log("send", w.a.send_to(sender, b"to all", Some(&to), &[], 0));
    w.settle();
    for fd in receivers {
        let got = w.a.recv_from(*fd, 100, 0, MSG_DONTWAIT);
        w.log("received", got.map(|got| (got.bytes, got.from[4..8].to_vec())));
        w.log("once", w.a.recv(*fd, 100, MSG_DONTWAIT));
    }
}

pub fn members_receive_copies(w: &mut Fixture<'_>) {
    let (joined, at) = receiver(w, [0; 4], 0);
    let bound = receiver(w, [239, 1, 2, 1], at).0;
    let idle = receiver(w, [0; 4], at).0;
    let other = receiver(w, [239, 1, 2, 2], at).0;
    let host = receiver(w, [127, 0, 0, 1], at).0;
    let all = [joined, bound, idle, other, host];
    let sender = w.a.socket(AF_INET, SOCK_DGRAM).unwrap();
    w.log("interface", w.a.setsockopt(sender, IPPROTO_IP, IP_MULTICAST_IF, &[127, 0, 0, 1]));
    let group = [239, 1, 2, 1];
    let join = [group, [127, 0, 0, 1]].concat();
    deliver(w, sender, group, at, &all);
    w.log("join", w.a.setsockopt(joined, IPPROTO_IP, IP_ADD_MEMBERSHIP, &join));
    deliver(w, sender, group, at, &all);
    w.log("members only", w.a.setsockopt(idle, IPPROTO_IP, IP_MULTICAST_ALL, &word(0)));
    deliver(w, sender, group, at, &all);
    let local = [group, [127, 0, 0, 1], [127, 0, 0, 1]].concat();
    w.log("block", w.a.setsockopt(joined, IPPROTO_IP, libc::IP_BLOCK_SOURCE, &local));
    deliver(w, sender, group, at, &all);
    w.log("one source", w.a.setsockopt(idle, IPPROTO_IP, libc::IP_ADD_SOURCE_MEMBERSHIP, &local));
    deliver(w, sender, group, at, &all);
    w.log("unblock", w.a.setsockopt(joined, IPPROTO_IP, libc::IP_UNBLOCK_SOURCE, &local));
    // The loopback interface ignores the option, because it returns every packet.
    w.log("no loop", w.a.setsockopt(sender, IPPROTO_IP, IP_MULTICAST_LOOP, &word(0)));
    deliver(w, sender, group, at, &all);
    w.log("leave", w.a.setsockopt(joined, IPPROTO_IP, IP_DROP_MEMBERSHIP, &join));
    w.log("close", w.a.close(idle));
    deliver(w, sender, group, at, &[joined, bound, other, host]);
}

pub fn membership_before_bind(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_DGRAM).unwrap();
    let join = [[239, 1, 2, 1], [127, 0, 0, 1]].concat();
    w.log("join", w.a.setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &join));
    w.log("bind", w.a.bind(fd, &address((IpAddr::from([0; 4]), 0).into())));
    let at = port(&w.a.getsockname(fd).unwrap());
    let sender = w.a.socket(AF_INET, SOCK_DGRAM).unwrap();
    w.log("interface", w.a.setsockopt(sender, IPPROTO_IP, IP_MULTICAST_IF, &[127, 0, 0, 1]));
    w.log("connect", w.a.connect(sender, &address((IpAddr::from([239, 1, 2, 1]), at).into())));
    let own = w.a.getsockname(sender).unwrap();
    w.log("own address", own[4..8].to_vec());
    w.log("send", w.a.send(sender, b"connected", 0));
    w.settle();
    w.log("received", w.a.recv(fd, 100, MSG_DONTWAIT));
}

pub fn broadcast_over_loopback(w: &mut Fixture<'_>) {
    let (first, at) = receiver(w, [0; 4], 0);
    let second = receiver(w, [0; 4], at).0;
    let host = receiver(w, [127, 0, 0, 1], at).0;
    let bound = receiver(w, [127, 255, 255, 255], at).0;
    let sender = w.a.socket(AF_INET, SOCK_DGRAM).unwrap();
    let all = [first, second, host, bound];
    deliver(w, sender, [127, 255, 255, 255], at, &all);
    w.log("permit", w.a.setsockopt(sender, SOL_SOCKET, SO_BROADCAST, &word(1)));
    deliver(w, sender, [127, 255, 255, 255], at, &all);
}

pub mod tests {
    crate::cases! {
        ; over_loopback {
            join_and_leave_errors
            source_filter_errors
            source_filters_are_returned
            ipv4_membership_structures
            multicast_option_values
            members_receive_copies
            membership_before_bind
            broadcast_over_loopback
        }
    }
}
