//! UDP sockets.

use crate::sys::{Fd, Fixture, control, port, word};
use core::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use libc::{
    AF_INET, AF_INET6, AF_UNSPEC, IPPROTO_IP, IPPROTO_IPV6, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC,
    SO_ERROR, SOCK_DGRAM, SOCK_NONBLOCK, SOL_SOCKET,
};

/// Creates a bound socket at host `a` and an unbound one at host `b`. Returns them and the port of the
/// former.
pub fn pair(w: &Fixture<'_>) -> (Fd, Fd, u16) {
    let a = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.a.bind(a, &w.at_a(0)).unwrap();
    let at = port(&w.a.getsockname(a).unwrap());
    (a, w.b.socket(w.domain(), SOCK_DGRAM).unwrap(), at)
}

pub fn datagram_boundaries(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.log("poll of new sockets", (w.ready(w.a, a), w.ready(w.b, b)));
    w.log("empty", w.a.recv(a, 10, MSG_DONTWAIT));
    w.log("send", w.b.send_to(b, b"first", Some(&to), &[], 0));
    w.log("empty", w.b.send_to(b, b"", Some(&to), &[], 0));
    w.log("third", w.b.send_to(b, b"third one", Some(&to), &[], 0));
    w.wait(w.a, a, libc::POLLIN);
    w.settle();
    w.log("poll", w.ready(w.a, a));
    w.log("bytes of the next", w.a.readable_bytes(a));
    w.log("peek", w.a.recv(a, 100, MSG_PEEK));
    let got = w.a.recv_from(a, 3, 0, 0).unwrap();
    let own = port(&w.b.getsockname(b).unwrap());
    w.log(
        "truncated",
        (got.count, got.bytes, got.flags == MSG_TRUNC, port(&got.from) == own, got.from.len()),
    );
    w.log("bytes of the empty", w.a.readable_bytes(a));
    w.log("empty datagram", w.a.recv(a, 10, 0));
    let got = w.a.recv_from(a, 3, 0, MSG_TRUNC).unwrap();
    w.log("full length", (got.count, got.bytes));
    w.log("no further result", w.a.recv(a, 10, MSG_DONTWAIT));
    let answer = w.at_b(own);
    w.log("reply", w.a.send_to(a, b"back", Some(&answer), &[], 0));
    w.log("received", w.b.recv(b, 10, 0));
    w.log("MSG_OOB", w.a.recv(a, 10, libc::MSG_OOB | MSG_DONTWAIT));
    w.log("send with MSG_OOB", w.a.send_to(a, b"x", Some(&answer), &[], libc::MSG_OOB));
}

pub fn datagram_lengths(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    for len in [1, 1400, 1472, 1473, 9000, 32_000, 65_000, 65_507] {
        let bytes: Vec<u8> = (0..len).map(|at: u32| (at % 251) as u8).collect();
        w.log("send", (len, w.b.send_to(b, &bytes, Some(&to), &[], 0)));
        w.wait(w.a, a, libc::POLLIN);
        w.log("next", w.a.readable_bytes(a));
        let peeked = w.a.recv(a, 5, MSG_PEEK);
        w.log("peek", peeked);
        w.log("equal", w.a.recv(a, 70_000, 0) == Ok(bytes));
    }
    for len in [65_508, 65_535, 65_536, 100_000] {
        w.log("too long", (len, w.b.send_to(b, &vec![0; len], Some(&to), &[], 0)));
    }
}

pub fn many_datagrams(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    for round in 0..40u32 {
        for number in 0..50u32 {
            let bytes = [round.to_ne_bytes(), number.to_ne_bytes()].concat();
            w.b.send_to(b, &bytes, Some(&to), &[], 0).unwrap();
        }
        for number in 0..50u32 {
            let bytes = w.a.recv(a, 100, 0).unwrap();
            assert_eq!(bytes, [round.to_ne_bytes(), number.to_ne_bytes()].concat());
        }
    }
    w.log("none left", w.a.recv(a, 1, MSG_DONTWAIT));
}

pub fn connected_sockets(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.log("no destination", w.b.send(b, b"x", 0));
    w.log("no peer", w.b.getpeername(b));
    w.log("shutdown of nothing", w.b.shutdown(b, libc::SHUT_RD));
    let b = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.log("connect", w.b.connect(b, &to));
    w.log("peer", port(&w.b.getpeername(b).unwrap()) == at);
    let own = w.b.getsockname(b).unwrap();
    w.log("own address", own[4..8] != [0; 4] && port(&own) != 0);
    w.log("send", w.b.send(b, b"hello", 0));
    w.log("recv", w.a.recv(a, 100, 0));
    let other_sender = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.a.send_to(other_sender, b"from a stranger", Some(&w.at_b(port(&own))), &[], 0).unwrap();
    w.settle();
    w.log("from another sender", w.b.recv(b, 100, MSG_DONTWAIT));
    let mut unspecified = vec![0; 16];
    unspecified[..2].copy_from_slice(&(AF_UNSPEC as u16).to_ne_bytes());
    w.log("disconnect", w.b.connect(b, &unspecified));
    w.log("no peer after disconnect", w.b.getpeername(b));
    w.log("no destination after disconnect", w.b.send(b, b"x", 0));
    // A port that the program chose stays, one that was chosen for it does not.
    for chosen in [0, 7_321] {
        let bound = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
        w.log("bind", w.b.bind(bound, &w.at_b(chosen)));
        w.log("connect a bound socket", w.b.connect(bound, &to));
        w.log("disconnect a bound socket", w.b.connect(bound, &unspecified));
        w.log("port after disconnect", port(&w.b.getsockname(bound).unwrap()));
        w.log("disconnect again", w.b.connect(bound, &unspecified));
        w.log("port after it", port(&w.b.getsockname(bound).unwrap()));
        w.log("close", w.b.close(bound));
    }
    w.log("connect again", w.b.connect(b, &to));
    w.log("third connect", w.b.connect(b, &to));
    w.log("shutdown", w.b.shutdown(b, libc::SHUT_WR));
    w.log("send after it", w.b.send(b, b"x", MSG_NOSIGNAL));
    w.log("shutdown of both", w.b.shutdown(b, libc::SHUT_RDWR));
    w.log("poll", w.ready(w.b, b));
    w.log("recv at the end", w.b.recv(b, 1, 0));
    w.log("listen", w.b.listen(b, 1));
    w.log("accept", w.b.accept4(b, 0));
}

pub fn port_unreachable(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    w.a.close(a).unwrap();
    w.settle();
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.log("send", w.b.send(b, b"x", 0));
    w.settle();
    w.log("poll", w.ready(w.b, b));
    w.log("pending error", w.b.recv(b, 1, MSG_DONTWAIT));
    w.log("second time", w.b.recv(b, 1, MSG_DONTWAIT));
    w.log("send", w.b.send(b, b"x", 0));
    w.settle();
    w.log("as an option", w.b.getsockopt(b, SOL_SOCKET, SO_ERROR));
    w.log("second time", w.b.getsockopt(b, SOL_SOCKET, SO_ERROR));
    w.log("send", w.b.send(b, b"x", 0));
    w.settle();
    w.log("error of the next call", w.b.send(b, b"x", 0));
    w.settle();
    // Unconnected sockets do not get the error.
    let other = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.log("send to an unused port", w.b.send_to(other, b"x", Some(&w.at_a(at)), &[], 0));
    w.settle();
    w.log("no error", w.b.recv(other, 1, MSG_DONTWAIT));
}

pub fn addresses(w: &mut Fixture<'_>) {
    let (a, _, at) = pair(w);
    let second = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.log("in use", w.a.bind(second, &w.at_a(at)));
    w.log("foreign address", w.a.bind(second, &[2, 0, 0, 0, 192, 0, 2, 77, 0, 0, 0, 0, 0, 0, 0, 0]));
    w.log("short", w.a.bind(second, &w.at_a(at)[..15]));
    w.log("bind", w.a.bind(second, &w.at_a(0)));
    w.log("bind again", w.a.bind(second, &w.at_a(0)));
    w.log("port 0", w.a.send_to(second, b"x", Some(&w.at_b(0)), &[], 0));
    w.log("short destination", w.a.send_to(second, b"x", Some(&w.at_b(1)[..8]), &[], 0));
    w.a.close(a).unwrap();
    let third = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.log("bind after close", w.a.bind(third, &w.at_a(at)));
    let on = 1i32.to_ne_bytes();
    let shared: Vec<_> = (0..2)
        .map(|_| {
            let fd = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
            w.a.setsockopt(fd, SOL_SOCKET, libc::SO_REUSEPORT, &on).unwrap();
            fd
        })
        .collect();
    w.log("first bind", w.a.bind(shared[0], &w.at_a(0)));
    let at = port(&w.a.getsockname(shared[0]).unwrap());
    w.log("second bind", w.a.bind(shared[1], &w.at_a(at)));
    w.log("type", w.a.getsockopt(shared[0], SOL_SOCKET, libc::SO_TYPE));
    w.log("protocol", w.a.getsockopt(shared[0], SOL_SOCKET, libc::SO_PROTOCOL));
    w.log("TCP option", w.a.setsockopt(shared[0], libc::IPPROTO_TCP, libc::TCP_NODELAY, &on));
    // Senders are distributed, and each one stays with one socket.
    let mut got = [0; 2];
    for _ in 0..32 {
        let b = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
        w.b.send_to(b, b"1", Some(&w.at_a(at)), &[], 0).unwrap();
        w.b.send_to(b, b"2", Some(&w.at_a(at)), &[], 0).unwrap();
        w.b.close(b).unwrap();
    }
    w.settle();
    for (fd, got) in shared.iter().zip(&mut got) {
        while w.a.recv(*fd, 10, MSG_DONTWAIT).is_ok() {
            *got += 1;
        }
    }
    w.log("distributed", (got[0] + got[1], got[0] % 2, got[0] > 8, got[1] > 8));
}

pub fn control_messages(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let on = 1i32.to_ne_bytes();
    for name in [libc::IP_PKTINFO, libc::IP_RECVTTL, libc::IP_RECVTOS] {
        w.log("enable option", w.a.setsockopt(a, IPPROTO_IP, name, &on));
    }
    w.log("ttl", w.b.setsockopt(b, IPPROTO_IP, libc::IP_TTL, &33i32.to_ne_bytes()));
    w.log("tos", w.b.setsockopt(b, IPPROTO_IP, libc::IP_TOS, &0i32.to_ne_bytes()));
    w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
    let mut got = w.a.recv_from(a, 10, 200, 0).unwrap();
    w.log("control", (got.count, got.flags, got.control.len()));
    // Interface index and addresses differ between kernel and stack.
    let own = w.at_a(0)[4..8].to_vec();
    w.log("local address", (got.control[20..24] == own, got.control[24..28] == own));
    got.control[16..28].fill(0);
    w.log("rest", got.control);
    w.b.send_to(b, b"y", Some(&w.at_a(at)), &[], 0).unwrap();
    let got = w.a.recv_from(a, 10, 30, 0).unwrap();
    w.log("short control buffer", (got.control.len(), got.flags & libc::MSG_CTRUNC != 0));
    let peer = port(&w.b.getsockname(b).unwrap());
    let info = [&[0; 4][..], &own, &[0; 4]].concat();
    let source = control(IPPROTO_IP, libc::IP_PKTINFO, &info);
    w.log("send from an address", w.a.send_to(a, b"z", Some(&w.at_b(peer)), &source, 0));
    let got = w.b.recv_from(b, 10, 0, 0).unwrap();
    w.log("source address equal", got.from[4..8] == own);
    let unknown = control(IPPROTO_IP, 77, &info);
    w.log("unknown", w.a.send_to(a, b"z", Some(&w.at_b(peer)), &unknown, 0));
    let short = control(IPPROTO_IP, libc::IP_PKTINFO, &info[..8]);
    w.log("too short", w.a.send_to(a, b"z", Some(&w.at_b(peer)), &short, 0));
}

pub fn broadcast_requires_so_broadcast(w: &mut Fixture<'_>) {
    let (_, b, at) = pair(w);
    // A route is necessary without a bound source address.
    w.b.bind(b, &w.at_b(0)).unwrap();
    let mut all = w.at_a(at);
    all[4..8].copy_from_slice(&[255; 4]);
    w.log("without SO_BROADCAST", w.b.send_to(b, b"x", Some(&all), &[], 0));
    w.log("set SO_BROADCAST", w.b.setsockopt(b, SOL_SOCKET, libc::SO_BROADCAST, &1i32.to_ne_bytes()));
}

pub fn epoll_and_timeouts(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let set = w.a.epoll_create().unwrap();
    let events = (libc::EPOLLIN | libc::EPOLLET) as u32;
    w.log("add", w.a.epoll_ctl(set, libc::EPOLL_CTL_ADD, a, events, 5));
    w.log("no event", w.a.epoll_wait(set, 4, 0));
    w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
    w.log("second time", w.a.epoll_wait(set, 4, 10_000));
    w.log("no second event", w.a.epoll_wait(set, 4, 0));
    w.b.send_to(b, b"y", Some(&w.at_a(at)), &[], 0).unwrap();
    w.log("again", w.a.epoll_wait(set, 4, 10_000));
    w.log("both", (w.a.recv(a, 10, 0), w.a.recv(a, 10, 0)));
    let limit = [0i64.to_ne_bytes(), 20_000i64.to_ne_bytes()].concat();
    w.log("set SO_RCVTIMEO", w.a.setsockopt(a, SOL_SOCKET, libc::SO_RCVTIMEO, &limit));
    w.log("timeout", w.a.recv(a, 1, 0));
    let other = w.a.socket(w.domain(), SOCK_DGRAM | SOCK_NONBLOCK).unwrap();
    w.log("immediately", w.a.recv(other, 1, 0));
}

pub fn receive_timestamps(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    w.b.send_to(b, b"before anybody asked", Some(&w.at_a(at)), &[], 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    for (name, units) in
        [(libc::SO_TIMESTAMP, 1_000_000), (libc::SO_TIMESTAMPNS, 1_000_000_000), (63, 1_000_000)]
    {
        w.log("on", w.a.setsockopt(a, SOL_SOCKET, name, &1i32.to_ne_bytes()));
        for other in [libc::SO_TIMESTAMP, libc::SO_TIMESTAMPNS, 63, 64] {
            w.log("value", w.a.getsockopt(a, SOL_SOCKET, other));
        }
        w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
        w.settle();
        let mut got = w.a.recv_from(a, 100, 100, 0).unwrap();
        let word = |from: usize| u64::from_ne_bytes(got.control[from..from + 8].try_into().unwrap());
        let arrival = std::time::Duration::from_secs(word(16))
            + std::time::Duration::from_nanos(word(24) * (1_000_000_000 / units));
        let passed = now().saturating_sub(arrival);
        w.log("timestamp is recent", passed < std::time::Duration::from_secs(5));
        got.control.splice(16..32, []);
        w.log("message", (got.bytes, got.control, got.flags));
    }
    w.log("last", w.a.recv(a, 100, 0));
    w.log("off", w.a.setsockopt(a, SOL_SOCKET, libc::SO_TIMESTAMPNS, &0i32.to_ne_bytes()));
    w.b.send_to(b, b"y", Some(&w.at_a(at)), &[], 0).unwrap();
    w.log("no timestamp", w.a.recv_from(a, 100, 100, 0).map(|got| (got.bytes, got.control)));
    let (c, at) = (w.a.socket(w.domain(), SOCK_DGRAM).unwrap(), w.at_a(0));
    w.log("before bind", w.a.setsockopt(c, SOL_SOCKET, libc::SO_TIMESTAMP, &1i32.to_ne_bytes()));
    w.a.bind(c, &at).unwrap();
    let at = w.at_a(port(&w.a.getsockname(c).unwrap()));
    w.b.send_to(b, b"z", Some(&at), &[], 0).unwrap();
    w.wait(w.a, c, libc::POLLIN);
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let got = w.a.recv_from(c, 100, 100, 0).unwrap();
    let arrival = u64::from_ne_bytes(got.control[16..24].try_into().unwrap());
    w.log("arrival time", (now().as_secs() - arrival) >= 1);
}

/// Hop limit and traffic class of a single datagram, independent of the socket's.
pub fn hop_limit_and_class_per_datagram(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let v4 = w.domain() == libc::AF_INET;
    let (level, other) = if v4 { (IPPROTO_IP, IPPROTO_IPV6) } else { (IPPROTO_IPV6, IPPROTO_IP) };
    let of = |v4: bool| match v4 {
        true => [libc::IP_TTL, libc::IP_TOS, libc::IP_RECVTTL, libc::IP_RECVTOS],
        false => [libc::IPV6_HOPLIMIT, libc::IPV6_TCLASS, libc::IPV6_RECVHOPLIMIT, libc::IPV6_RECVTCLASS],
    };
    let [hops, class, recv_hops, recv_class] = of(v4);
    for name in [recv_hops, recv_class] {
        w.log("enable option", w.a.setsockopt(a, level, name, &word(1)));
    }
    let to = w.at_a(at);
    let each = |w: &mut Fixture<'_>, label: &str, control: &[u8]| {
        let sent = w.b.send_to(b, b"x", Some(&to), control, 0);
        w.log(label, sent);
        if sent.is_ok() {
            let got = w.a.recv_from(a, 10, 200, 0).unwrap();
            w.log("received", (got.bytes, got.control));
        }
    };
    each(w, "without control messages", &[]);
    let both = [control(level, hops, &word(33)), control(level, class, &word(0x2a))].concat();
    // The first datagram to a destination takes another code path than later ones.
    each(w, "both", &both);
    each(w, "both again", &both);
    each(w, "without control messages", &[]);
    for value in [1, 255, 256, 0, -1, -2] {
        each(w, &format!("hops {value}"), &control(level, hops, &word(value)));
        each(w, &format!("class {value}"), &control(level, class, &word(value)));
    }
    for value in [&[7][..], &[0, 0], &[0; 8]] {
        each(w, "hops as bytes", &control(level, hops, value));
        each(w, "class as bytes", &control(level, class, value));
    }
    let [hops, class, ..] = of(!v4);
    each(
        w,
        "messages of the other IP version",
        &[control(other, hops, &word(33)), control(other, class, &word(4))].concat(),
    );
}

/// `SO_TIMESTAMPING`: accepted values, and timestamps of received datagrams.
pub fn so_timestamping(w: &mut Fixture<'_>) {
    const NEW: i32 = 65;
    let names = [libc::SO_TIMESTAMPING, NEW];
    for kind in [SOCK_DGRAM, libc::SOCK_STREAM] {
        let fd = w.a.socket(w.domain(), kind).unwrap();
        for bit in 0..32 {
            let flags = (1u32 << bit).to_ne_bytes();
            let taken = w.a.setsockopt(fd, SOL_SOCKET, names[bit % 2], &flags);
            let is = names.map(|name| w.a.getsockopt(fd, SOL_SOCKET, name));
            w.log("flag", (bit, taken, is));
        }
        for flags in [0x1080u32, 0x1_0080, 0x1800, 0x88, 0] {
            w.log("flags", (flags, w.a.setsockopt(fd, SOL_SOCKET, NEW, &flags.to_ne_bytes())));
        }
        w.log("clock", w.a.setsockopt(fd, SOL_SOCKET, NEW, &[8, 0, 0, 0, 3, 0, 0, 0]));
        w.log("too short", w.a.setsockopt(fd, SOL_SOCKET, NEW, &[8, 0]));
        w.a.close(fd).unwrap();
    }
    let (a, b, at) = pair(w);
    let software = 0x18u32.to_ne_bytes();
    for (number, name) in names.into_iter().enumerate() {
        w.log("on", w.a.setsockopt(a, SOL_SOCKET, name, &software));
        // The kernel begins to take timestamps with a delay.
        w.settle();
        if number == 1 {
            w.log("both", w.a.setsockopt(a, SOL_SOCKET, 63, &1i32.to_ne_bytes()));
        }
        w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
        let mut got = w.a.recv_from(a, 100, 200, 0).unwrap();
        // Seconds and nanoseconds, after those of the other message.
        for time in [16..32, 48..64].into_iter().skip(1 - number).take(1 + number) {
            let time = if number == 0 { 16..32 } else { time };
            w.log("timestamp", got.control[time.clone()].iter().any(|byte| *byte != 0));
            got.control[time].fill(0);
        }
        w.log("message", (got.bytes, got.control, got.flags));
    }
    w.log("transmit timestamps only", w.a.setsockopt(a, SOL_SOCKET, NEW, &0x10u32.to_ne_bytes()));
    w.log("off", w.a.setsockopt(a, SOL_SOCKET, 63, &0i32.to_ne_bytes()));
    w.b.send_to(b, b"y", Some(&w.at_a(at)), &[], 0).unwrap();
    w.log("no timestamp", w.a.recv_from(a, 100, 200, 0).map(|got| got.bytes));
}

/// An address without a port, addresses of the other family, and disconnecting.
pub fn addresses_of_both_families(w: &mut Fixture<'_>) {
    let any = |port| crate::sys::address(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port));
    let mapped = |address: &[u8]| {
        let v4 = Ipv4Addr::from(<[u8; 4]>::try_from(&address[4..8]).unwrap());
        crate::sys::address(SocketAddr::new(v4.to_ipv6_mapped().into(), port(address)))
    };
    let named = |w: &Fixture<'_>, fd| {
        w.a.getsockname(fd).map(|name| (name[..2].to_vec(), name[4..].to_vec(), port(&name) != 0))
    };
    let v6 = |ip: Ipv6Addr, port| crate::sys::address(SocketAddr::new(ip.into(), port));
    let (peer, to) = {
        let peer = w.b.socket(AF_INET, SOCK_DGRAM).unwrap();
        w.b.bind(peer, &w.at_b(0)).unwrap();
        (peer, w.at_b(port(&w.b.getsockname(peer).unwrap())))
    };
    let fd = w.a.socket(AF_INET, SOCK_DGRAM).unwrap();
    w.log("connect to port 0", w.a.connect(fd, &w.at_b(0)));
    w.log("getpeername", w.a.getpeername(fd));
    w.log("send", w.a.send(fd, b"x", 0));
    w.log("send to port 0", w.a.send_to(fd, b"x", Some(&w.at_b(0)), &[], 0));
    let unspecified = vec![0; 16];
    let free = w.a.socket(AF_INET, SOCK_DGRAM).unwrap();
    w.a.bind(free, &any(0)).unwrap();
    let number = port(&w.a.getsockname(free).unwrap());
    w.a.close(free).unwrap();
    for (label, local) in [
        ("unbound", None),
        ("bound", Some(w.at_a(0))),
        ("wildcard", Some(any(0))),
        ("wildcard and port", Some(any(number))),
        ("address and port", Some(w.at_a(number))),
    ] {
        let fd = w.a.socket(AF_INET, SOCK_DGRAM).unwrap();
        if let Some(local) = local {
            w.a.bind(fd, &local).unwrap();
        }
        w.a.connect(fd, &to).unwrap();
        w.log(label, w.a.connect(fd, &unspecified));
        let local = w.at_a(0);
        let is_local = |name: Vec<u8>| (name[4..8] == local[4..8], port(&name) == number);
        w.log("name", w.a.getsockname(fd).map(is_local));
        w.log("send again", w.a.send_to(fd, b"y", Some(&to), &[], 0));
        let name = named(w, fd);
        w.log("name", name.map(|(family, _, has_port)| (family, has_port)));
        w.a.close(fd).unwrap();
    }
    let fd = w.a.socket(AF_INET6, SOCK_DGRAM).unwrap();
    w.log("an IPv4 address", w.a.connect(fd, &to));
    w.log("peer", w.a.getpeername(fd) == Ok(mapped(&to)));
    w.log("then an IPv6 address", w.a.send_to(fd, b"x", Some(&v6(Ipv6Addr::LOCALHOST, 9)), &[], 0));
    w.log("connect", w.a.connect(fd, &v6(Ipv6Addr::LOCALHOST, 9)));
    w.log("peer", w.a.getpeername(fd) == Ok(mapped(&to)));
    w.log("send", w.a.send(fd, b"from v6", 0));
    w.wait(w.b, peer, libc::POLLIN);
    let only = w.a.socket(AF_INET6, SOCK_DGRAM).unwrap();
    w.a.setsockopt(only, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &word(1)).unwrap();
    w.log("IPv6 only", w.a.connect(only, &to));
    w.log("mapped", w.a.connect(only, &mapped(&to)));
    w.log("send", w.a.send_to(only, b"x", Some(&mapped(&to)), &[], 0));
    for kind in [SOCK_DGRAM, libc::SOCK_STREAM] {
        let fd = w.a.socket(AF_INET6, kind).unwrap();
        w.a.bind(fd, &mapped(&w.at_a(0))).unwrap();
        w.log("from a mapped address", w.a.connect(fd, &v6(Ipv6Addr::LOCALHOST, 9)));
    }
}

/// `IPV6_ADDRFORM` turns a connected IPv6 socket into an IPv4 socket.
pub fn addrform(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let address = w.at_a(at);
    let v4 = Ipv4Addr::from(<[u8; 4]>::try_from(&address[4..8]).unwrap());
    let mapped = crate::sys::address(SocketAddr::new(v4.to_ipv6_mapped().into(), at));
    for kind in [libc::SOCK_STREAM, SOCK_DGRAM] {
        let fd = w.b.socket(AF_INET6, kind).unwrap();
        let set = |w: &Fixture<'_>, value: &[u8]| w.b.setsockopt(fd, libc::IPPROTO_IPV6, 1, value);
        w.log("unconnected", set(w, &word(AF_INET)));
        w.b.connect(fd, &mapped).unwrap();
        w.log("AF_INET6", set(w, &word(AF_INET6)));
        w.log("too short", set(w, &[2, 0]));
        w.log("connected", set(w, &word(AF_INET)));
        w.log("domain", w.b.getsockopt(fd, SOL_SOCKET, libc::SO_DOMAIN));
        w.log("peer", w.b.getpeername(fd) == Ok(address.clone()));
        w.log("again", set(w, &word(AF_INET)).is_err());
        w.log("send", w.b.send(fd, b"x", 0));
    }
    w.a.close(listener).unwrap();
}

/// The original destination address of datagrams.
pub fn original_destination(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let (level, name) = if w.domain() == AF_INET { (libc::IPPROTO_IP, 20) } else { (libc::IPPROTO_IPV6, 74) };
    w.log("on", w.a.setsockopt(a, level, name, &word(1)));
    w.log("is", w.a.getsockopt(a, level, name));
    w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
    let mut got = w.a.recv_from(a, 100, 200, 0).unwrap();
    let expected = w.at_a(at);
    w.log("address", got.control.get(16..16 + expected.len()) == Some(&expected));
    got.control.truncate(16);
    w.log("control message", got.control);
}

/// After `SHUT_RD` datagrams are still received, and a call that does not wait finds none.
pub fn shutdown_keeps_datagrams(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    w.b.bind(b, &w.at_b(0)).unwrap();
    let from = w.at_b(port(&w.b.getsockname(b).unwrap()));
    w.a.connect(a, &from).unwrap();
    let send = |w: &Fixture<'_>| w.b.send_to(b, b"kept", Some(&w.at_a(at)), &[], 0).unwrap();
    send(w);
    w.wait(w.a, a, libc::POLLIN);
    w.log("shutdown", w.a.shutdown(a, libc::SHUT_RD));
    w.log("queued", w.a.recv(a, 9, MSG_DONTWAIT));
    w.log("none", w.a.recv(a, 9, MSG_DONTWAIT));
    w.log("none, blocking", w.a.recv(a, 9, 0));
    send(w);
    w.settle();
    w.log("later", w.a.recv(a, 9, MSG_DONTWAIT));
}

/// How many datagrams a receive buffer keeps: within a fifth of the kernel's number.
pub fn receive_buffer_limits_datagrams(w: &mut Fixture<'_>) {
    for (buffer, len, expected) in [(2048, 1, 4), (2048, 1000, 1), (10_000, 1, 24), (10_000, 1000, 8)] {
        let (a, b, at) = pair(w);
        w.a.setsockopt(a, SOL_SOCKET, libc::SO_RCVBUF, &word(buffer)).unwrap();
        for _ in 0..60 {
            w.b.send_to(b, &vec![0; len], Some(&w.at_a(at)), &[], 0).unwrap();
            // Datagrams that arrive together are not distributed over several turns of the stack.
            w.a.catch_up();
        }
        w.settle();
        let kept = core::iter::from_fn(|| w.a.recv(a, 2000, MSG_DONTWAIT).ok()).count();
        let is_expected = kept.abs_diff(expected) * 5 <= expected;
        w.log("kept", if is_expected { expected } else { kept });
        w.a.close(a).unwrap();
    }
}

/// `SIOCGSTAMP`: when the datagram arrived that was received last.
pub fn arrival_of_the_last_datagram(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    w.log("before", w.a.arrival(a));
    for label in ["first", "second"] {
        w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
        w.wait(w.a, a, libc::POLLIN);
        w.log("recv", w.a.recv(a, 9, 0));
        w.log(label, w.a.arrival(a));
    }
    let stream = w.a.socket(w.domain(), libc::SOCK_STREAM).unwrap();
    w.log("stream", w.a.arrival(stream));
}

pub mod tests {
    crate::cases! {
        addresses
        control_messages
        broadcast_requires_so_broadcast
        addresses_of_both_families
        addrform
        ; both {
            datagram_boundaries
            datagram_lengths
            many_datagrams
            connected_sockets
            port_unreachable
            receive_timestamps
            so_timestamping
            arrival_of_the_last_datagram
            original_destination
            shutdown_keeps_datagrams
            receive_buffer_limits_datagrams
            hop_limit_and_class_per_datagram
            epoll_and_timeouts
        }
    }
}
