//! TCP socket options with effects that programs observe.

use crate::sys::{Fixture, port, word};
use libc::{IPPROTO_IPV6, IPPROTO_TCP, MSG_PEEK, SO_RCVBUF, SO_SNDBUF, SOCK_STREAM, SOL_SOCKET};

const SO_BUF_LOCK: i32 = 72;
const TCP_INQ: i32 = 36;
const IPV6_PATHMTU: i32 = 61;
const IPV6_MINHOPCOUNT: i32 = 73;
const RTO_MAX_MS: i32 = 44;
const RTO_MIN_US: i32 = 45;
const DELACK_MAX_US: i32 = 46;

pub fn tcp_inq(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.log("at first", w.a.getsockopt(a, IPPROTO_TCP, TCP_INQ));
    w.log("invalid value", w.a.setsockopt(a, IPPROTO_TCP, TCP_INQ, &word(2)));
    w.b.send(b, b"0123456789", 0).unwrap();
    w.settle();
    w.log("option off", w.a.recv_from(a, 1, 100, 0));
    w.log("on", w.a.setsockopt(a, IPPROTO_TCP, TCP_INQ, &word(1)));
    w.log("value", w.a.getsockopt(a, IPPROTO_TCP, TCP_INQ));
    w.log("part", w.a.recv_from(a, 3, 100, 0));
    w.log("peek", w.a.recv_from(a, 3, 100, MSG_PEEK));
    w.log("no control buffer", w.a.recv_from(a, 1, 0, 0));
    w.log("all", w.a.recv_from(a, 100, 100, 0));
    w.log("empty", w.a.recv_from(a, 100, 100, libc::MSG_DONTWAIT));
    w.b.send(b, b"last", 0).unwrap();
    w.b.close(b).unwrap();
    w.wait(w.a, a, libc::POLLRDHUP);
    w.log("first part of the last bytes", w.a.recv_from(a, 3, 100, 0));
    w.log("last", w.a.recv_from(a, 3, 100, 0));
    w.log("end of file", w.a.recv_from(a, 3, 100, 0));
    let set = w.a.setsockopt(a, IPPROTO_TCP, TCP_INQ, &word(0));
    w.log("off", (set, w.a.recv_from(a, 3, 100, 0)));
}

pub fn window_clamp(w: &mut Fixture<'_>) {
    let fd = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    let clamp = |w: &Fixture<'_>| w.b.getsockopt(fd, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP);
    w.log("default", clamp(w));
    for value in [1, 5000, -1, 0, i32::MIN, 8192] {
        let set = w.b.setsockopt(fd, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, &word(value));
        w.log("set", (value, set, clamp(w)));
    }
    let (listener, at) = w.listener(0);
    w.log("connect", w.b.connect(fd, &w.at_a(at)));
    let a = w.a.accept4(listener, libc::SOCK_NONBLOCK).unwrap();
    w.log("after connect", clamp(w));
    w.log("no further result", w.b.setsockopt(fd, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, &word(0)));
    w.log("larger", (w.b.setsockopt(fd, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, &word(30_000)), clamp(w)));
    let mut sent = 0;
    while let Ok(count) = w.a.send(a, &[7; 4096], 0) {
        sent += count;
    }
    let mut got = 0;
    while got < sent {
        got += w.b.recv(fd, 1 << 16, 0).unwrap().len();
    }
    w.log("all arrive", got == sent);
}

pub fn buf_lock(w: &mut Fixture<'_>) {
    let fd = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
    let locks = |w: &Fixture<'_>| w.a.getsockopt(fd, SOL_SOCKET, SO_BUF_LOCK);
    w.log("default", locks(w));
    w.log("set SO_RCVBUF", (w.a.setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &word(10_000)), locks(w)));
    w.log("set SO_SNDBUF", (w.a.setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &word(10_000)), locks(w)));
    for value in [0, 1, 2, 3, 4, -1] {
        w.log("set", (value, w.a.setsockopt(fd, SOL_SOCKET, SO_BUF_LOCK, &word(value)), locks(w)));
    }
}

pub fn minimal_receive_buffer(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("smallest buffer", w.b.setsockopt(b, SOL_SOCKET, SO_RCVBUF, &word(1)));
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    let a = w.a.accept4(listener, 0).unwrap();
    w.log("on a connection", w.a.setsockopt(a, SOL_SOCKET, SO_RCVBUF, &word(1)));
    w.a.send(a, b"through", 0).unwrap();
    w.log("delivered", w.b.recv(b, 10, 0));
}

pub fn path_mtu_and_cc_info(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("none yet", w.b.getsockopt(b, IPPROTO_IPV6, IPV6_PATHMTU));
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    let value = w.b.getsockopt(b, IPPROTO_IPV6, IPV6_PATHMTU);
    // The MTU differs between kernel and stack.
    w.log(
        "connected",
        value.map(|value| (value.len(), value[..28].iter().all(|byte| *byte == 0), value[28..] != [0; 4])),
    );
    w.log("setsockopt", w.b.setsockopt(b, IPPROTO_IPV6, IPV6_PATHMTU, &[0; 32]));
    w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_CONGESTION, b"cubic").unwrap();
    w.log("empty", w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_CC_INFO));
    w.log("setsockopt", w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_CC_INFO, &[0; 32]));
    w.a.close(listener).unwrap();
}

pub fn defer_accept(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(libc::SOCK_NONBLOCK);
    let defer =
        |w: &Fixture<'_>, s: i32| w.a.setsockopt(listener, IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, &word(s));
    w.log("deferred", defer(w, 1));
    let dial = |w: &Fixture<'_>| {
        let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(at)).unwrap();
        w.settle();
        b
    };
    let (first, second) = (dial(w), dial(w));
    w.log("no connection ready", (w.ready(w.a, listener), w.a.accept4(listener, 0).is_ok()));
    w.b.send(second, b"second", 0).unwrap();
    w.log("second connection", w.wait(w.a, listener, libc::POLLIN));
    let a = w.a.accept4(listener, 0).unwrap();
    w.log("first data", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    w.log("no other connection", w.a.accept4(listener, 0).is_ok());
    // After the timeout, the connection is accepted without data.
    w.log("first connection", w.wait(w.a, listener, libc::POLLIN));
    let a = w.a.accept4(listener, 0).unwrap();
    w.log("no data", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    w.b.send(first, b"late", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.log("later", w.a.recv(a, 10, 0));
    w.log("longer timeout", defer(w, 60));
    let third = dial(w);
    w.log("no connection ready", w.ready(w.a, listener));
    w.b.close(third).unwrap();
    w.log("end of file", w.wait(w.a, listener, libc::POLLIN));
    let a = w.a.accept4(listener, 0).unwrap();
    w.log("end of file", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    let fourth = dial(w);
    w.b.setsockopt(fourth, SOL_SOCKET, libc::SO_LINGER, &[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    w.b.close(fourth).unwrap();
    w.settle();
    w.log("accept after a reset", w.a.accept4(listener, 0).is_ok());
    w.log("deferral off", defer(w, 0));
    let fifth = dial(w);
    w.log("connection ready", (w.ready(w.a, listener), w.a.accept4(listener, 0).is_ok()));
    w.b.close(fifth).unwrap();
    w.log("deferred again", defer(w, 60));
    dial(w);
    w.log("close the listener", w.a.close(listener));
}

pub fn rto_and_delack_options(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let times = [
        (RTO_MAX_MS, [1000, 40_000, 120_000], [0, 999, 120_001]),
        (RTO_MIN_US, [8000, 40_000, 200_000], [0, 1000, 200_001]),
        (DELACK_MAX_US, [8000, 40_000, 200_000], [0, 1000, 200_001]),
    ];
    for (name, good, bad) in times {
        let is = |w: &Fixture<'_>| w.a.getsockopt(listener, IPPROTO_TCP, name);
        w.log("at first", (name, is(w)));
        for value in good.into_iter().chain(bad).chain([-1, i32::MAX, good[1]]) {
            let set = w.a.setsockopt(listener, IPPROTO_TCP, name, &word(value));
            w.log("set", (value, set, is(w)));
        }
        w.log("too short", w.a.setsockopt(listener, IPPROTO_TCP, name, &[1, 0]));
    }
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("before connect", w.b.setsockopt(b, IPPROTO_TCP, RTO_MIN_US, &word(8000)));
    w.b.connect(b, &w.at_a(at)).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    for (name, ..) in times {
        w.log("inherited value", (name, w.a.getsockopt(a, IPPROTO_TCP, name)));
    }
    w.log("own value", w.b.getsockopt(b, IPPROTO_TCP, RTO_MIN_US));
    w.a.send(a, b"through", 0).unwrap();
    w.log("delivered", w.b.recv(b, 10, 0));
    // The RTO in `tcp_info` is this minimum, or the value derived from the round-trip time.
    w.b.send(b, b"back", 0).unwrap();
    w.log("reply", w.a.recv(a, 10, 0));
    w.settle();
    let rto = |info: Vec<u8>| u32::from_ne_bytes(info[8..12].try_into().unwrap());
    let value = w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_INFO).map(|info| rto(info) < 200_000);
    w.log("short RTO", value);
}

pub fn tcp_save_syn(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let save = |w: &Fixture<'_>, value: i32| {
        let set = w.a.setsockopt(listener, IPPROTO_TCP, libc::TCP_SAVE_SYN, &word(value));
        (value, set, w.a.getsockopt(listener, IPPROTO_TCP, libc::TCP_SAVE_SYN))
    };
    let saved = |w: &Fixture<'_>, fd: i32, capacity: usize| {
        w.a.getsockopt_into(fd, IPPROTO_TCP, libc::TCP_SAVED_SYN, capacity)
    };
    let dial = |w: &Fixture<'_>| {
        let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(at)).unwrap();
        (w.a.accept4(listener, 0).unwrap(), b)
    };
    w.log("setsockopt", w.a.setsockopt(listener, IPPROTO_TCP, libc::TCP_SAVED_SYN, &word(1)));
    w.log("empty", saved(w, listener, 200));
    let (a, _) = dial(w);
    w.log("TCP_SAVE_SYN off", saved(w, a, 200));
    for value in [3, -1, 2, 1] {
        w.log("save", save(w, value));
    }
    let (a, b) = dial(w);
    w.log("inherited", w.a.getsockopt(a, IPPROTO_TCP, libc::TCP_SAVE_SYN));
    w.log("client socket", w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_SAVED_SYN));
    w.log("no control buffer", saved(w, a, 0).is_err());
    let small = saved(w, a, 30);
    let syn = saved(w, a, 200).unwrap();
    // Each stack chooses its own options in the SYN.
    let short = small.map_err(|(error, needed)| (error, needed == syn.len()));
    w.log("short buffer", short);
    let (version, header) = (syn[0] >> 4, if syn[0] >> 4 == 4 { 20 } else { 40 });
    let from = u16::from_be_bytes([syn[header], syn[header + 1]]) == port(&w.b.getsockname(b).unwrap());
    let to = u16::from_be_bytes([syn[header + 2], syn[header + 3]]) == at;
    let has_full_length = syn.len() == header + usize::from(syn[header + 12] >> 4) * 4;
    w.log("content of the SYN", (version, from, to, has_full_length, syn[header + 13] & 0x3f));
    w.log("second read", saved(w, a, 200));
    w.log("save with link header", save(w, 2));
    let (a, _) = dial(w);
    let syn = saved(w, a, 200).unwrap();
    w.log("link header", (syn[12..14].to_vec(), syn[14] >> 4));
    w.log("save off", save(w, 0));
    let (a, _) = dial(w);
    w.log("empty", saved(w, a, 200));
}

pub fn minttl_drops_distant_segments(w: &mut Fixture<'_>) {
    let v6 = w.domain() == libc::AF_INET6;
    let (level, least, own) = match v6 {
        false => (libc::IPPROTO_IP, libc::IP_MINTTL, libc::IP_TTL),
        true => (IPPROTO_IPV6, IPV6_MINHOPCOUNT, libc::IPV6_UNICAST_HOPS),
    };
    let (listener, at) = w.listener(libc::SOCK_NONBLOCK);
    let is = |w: &Fixture<'_>| w.a.getsockopt(listener, level, least);
    w.log("default", is(w));
    for value in [1, 0, 255, 256, -1, 70] {
        w.log("set", (value, w.a.setsockopt(listener, level, least, &word(value)), is(w)));
    }
    w.log("option of one byte", (w.a.setsockopt(listener, level, least, &[70]), is(w)));
    w.log("empty", w.a.setsockopt(listener, level, least, &[]));
    let far = w.b.socket(w.domain(), SOCK_STREAM | libc::SOCK_NONBLOCK).unwrap();
    w.b.setsockopt(far, level, own, &word(69)).unwrap();
    w.log("connect with low TTL", w.b.connect(far, &w.at_a(at)));
    w.settle();
    w.log("no connection", (w.ready(w.a, listener), w.ready(w.b, far)));
    let near = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(near, level, own, &word(70)).unwrap();
    w.log("connect with sufficient TTL", w.b.connect(near, &w.at_a(at)));
    w.wait(w.a, listener, libc::POLLIN);
    let a = w.a.accept4(listener, 0).unwrap();
    w.log("inherited", w.a.getsockopt(a, level, least));
    w.log("lower the TTL", w.b.setsockopt(near, level, own, &word(64)));
    w.b.send(near, b"lost?", 0).unwrap();
    w.settle();
    w.log("no data", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    w.log("lower the minimum", w.a.setsockopt(a, level, least, &word(64)));
    w.wait(w.a, a, libc::POLLIN);
    w.log("data after lowering the minimum", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    w.log("listener without minimum", w.a.setsockopt(listener, level, least, &word(0)));
    w.log("connection completes", w.wait(w.b, far, libc::POLLOUT));
    w.log("no error", w.b.getsockopt(far, SOL_SOCKET, libc::SO_ERROR));
}

/// Option that restricts automatic ports: the first one in the low 16 bits, the last one in the high 16 bits.
pub const IP_LOCAL_PORT_RANGE: i32 = 51;

/// Returns the first of `count` consecutive ports that are free in the kernel.
fn free_ports(count: u16) -> u16 {
    let is_free = |port: u16| {
        let any = (core::net::Ipv6Addr::UNSPECIFIED, port);
        std::net::TcpListener::bind(any).is_ok() && std::net::UdpSocket::bind(any).is_ok()
    };
    let start = std::process::id() as u16 % 1000 * 16;
    let mut candidates = (0..100).map(|step| 33_000 + start + step * 16);
    candidates.find(|first| (*first..first + count).all(is_free)).expect("some ports are free")
}

pub fn local_port_range(w: &mut Fixture<'_>) {
    let first = free_ports(10);
    let range = |low: u16, high: u16| (u32::from(first + high) << 16 | u32::from(first + low)).to_ne_bytes();
    for kind in [SOCK_STREAM, libc::SOCK_DGRAM] {
        let mut fds = Vec::new();
        for _ in 0..5 {
            let fd = w.a.socket(w.domain(), kind).unwrap();
            w.a.setsockopt(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range(0, 3)).unwrap();
            w.log("bind", w.a.bind(fd, &w.at_a(0)));
            fds.push(fd);
        }
        let mut ports: Vec<u16> =
            fds[..4].iter().map(|fd| port(&w.a.getsockname(*fd).unwrap()) - first).collect();
        ports.sort_unstable();
        w.log("all connections", ports);
        fds.iter().for_each(|fd| w.a.close(*fd).unwrap());
    }
    let (_, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(b, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range(8, 8)).unwrap();
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.log("from", port(&w.b.getsockname(b).unwrap()) - first);
    let other = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(other, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range(8, 8)).unwrap();
    w.log("none left", w.b.connect(other, &w.at_a(at)));
    w.log("set SO_LINGER", w.b.setsockopt(b, SOL_SOCKET, libc::SO_LINGER, &[1, 0, 0, 0, 0, 0, 0, 0]));
    w.b.close(b).unwrap();
}

/// Ports of a connection in TIME_WAIT: available at once to a socket that binds the port, but not for
/// automatic selection.
pub fn ports_in_time_wait(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    // Above the ports of the case below, which may run concurrently.
    let first = free_ports(14) + 12;
    for bound in [true, false] {
        let own = first + u16::from(bound);
        let socket = |w: &mut Fixture<'_>| {
            let fd = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
            if bound {
                w.b.setsockopt(fd, SOL_SOCKET, libc::SO_REUSEADDR, &word(1)).unwrap();
                w.b.bind(fd, &w.at_b(own)).unwrap();
            } else {
                let range = u32::from(own) << 16 | u32::from(own);
                w.b.setsockopt(fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range.to_ne_bytes()).unwrap();
            }
            fd
        };
        let b = socket(w);
        w.log("connect", w.b.connect(b, &w.at_a(at)));
        if bound {
            let other = socket(w);
            w.log("connect while the first is open", w.b.connect(other, &w.at_a(at)));
            w.b.close(other).unwrap();
        }
        let a = w.a.accept4(listener, 0).unwrap();
        w.b.close(b).unwrap();
        w.log("end of file", w.a.recv(a, 1, 0));
        w.a.close(a).unwrap();
        // Waits until the last acknowledgement was sent.
        std::thread::sleep(core::time::Duration::from_millis(100));
        let next = socket(w);
        w.log("deferral off", w.b.connect(next, &w.at_a(at)));
        w.b.close(next).unwrap();
    }
}

pub fn bind_address_no_port(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    let (level, name) = (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT);
    w.log("set IP_BIND_ADDRESS_NO_PORT", w.b.setsockopt(b, level, name, &word(1)));
    w.log("bind", w.b.bind(b, &w.at_b(0)));
    w.log("default", port(&w.b.getsockname(b).unwrap()));
    w.log("address equal", w.b.getsockname(b).unwrap()[4..] == w.at_b(0)[4..]);
    w.log("again", w.b.bind(b, &w.at_b(0)));
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    let own = w.b.getsockname(b).unwrap();
    w.log("bound address", (own[4..] == w.at_b(0)[4..], port(&own) != 0));
    let a = w.a.accept4(listener, 0).unwrap();
    w.log("peer address", w.a.getpeername(a).unwrap() == own);
    let other = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(other, level, name, &word(1)).unwrap();
    w.log("bind", w.b.bind(other, &w.at_b(0)));
    w.log("listen", w.b.listen(other, 1));
    w.log("port after listen", port(&w.b.getsockname(other).unwrap()) != 0);
    let named = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(named, level, name, &word(1)).unwrap();
    let free = free_ports(1);
    w.log("bind to a port", w.b.bind(named, &w.at_b(free)));
    w.log("port equal", port(&w.b.getsockname(named).unwrap()) == free);
}

/// A `connect` that is refused has chosen a port, which the socket has as its name only.
pub fn refused_connect_chooses_a_port(w: &mut Fixture<'_>) {
    let first = free_ports(8);
    let range = (u32::from(first + 7) << 16 | u32::from(first)).to_ne_bytes();
    let to = w.at_a(0);
    for (no_port, restricted, bound) in [
        (true, true, true),
        (true, false, true),
        (false, true, false),
        (false, false, false),
        (false, true, true),
    ] {
        let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
        if restricted {
            w.b.setsockopt(b, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range).unwrap();
        }
        w.b.setsockopt(b, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &word(no_port.into())).unwrap();
        if bound {
            w.b.bind(b, &w.at_b(0)).unwrap();
        }
        for _ in 0..2 {
            w.log("connect", w.b.connect(b, &to));
            let name = w.b.getsockname(b).unwrap();
            let own = port(&name);
            w.log("port", (own != 0, !restricted || (first..first + 8).contains(&own)));
            w.log("address", name[4..] == w.at_b(0)[4..]);
            let other = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
            w.log("the port is free", w.b.bind(other, &w.at_b(own)));
            w.b.close(other).unwrap();
        }
        let (listener, at) = w.listener(0);
        w.log("connect to a listener", w.b.connect(b, &w.at_a(at)));
        w.log("address", w.b.getsockname(b).unwrap()[4..] == w.at_b(0)[4..]);
        w.b.close(b).unwrap();
        w.a.close(listener).unwrap();
    }
}

/// `connect` or the first datagram of a UDP socket chooses the port.
pub fn datagrams_choose_a_port(w: &mut Fixture<'_>) {
    let first = free_ports(8);
    let range = (u32::from(first + 7) << 16 | u32::from(first)).to_ne_bytes();
    let a = w.a.socket(w.domain(), libc::SOCK_DGRAM).unwrap();
    w.a.bind(a, &w.at_a(0)).unwrap();
    let to = w.at_a(port(&w.a.getsockname(a).unwrap()));
    let nobody = w.at_a(0);
    for (restricted, connects) in [(true, true), (true, false), (false, true), (false, false)] {
        let b = w.b.socket(w.domain(), libc::SOCK_DGRAM).unwrap();
        if restricted {
            w.b.setsockopt(b, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &range).unwrap();
        }
        w.b.setsockopt(b, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &word(1)).unwrap();
        for _ in 0..2 {
            w.log("bind", w.b.bind(b, &w.at_b(0)));
            w.log("name", w.b.getsockname(b).unwrap() == w.at_b(0));
        }
        w.log("poll", w.ready(w.b, b));
        w.log("nothing arrives", w.b.recv(b, 9, libc::MSG_DONTWAIT));
        w.log("not connected", w.b.send(b, b"x", 0));
        if connects {
            w.log("connect", w.b.connect(b, &nobody));
        } else {
            w.log("send", w.b.send_to(b, b"from", Some(&to), &[], 0));
            let received = w.a.recv_from(a, 9, 0, 0).unwrap();
            w.log("received", (received.bytes, received.from == w.b.getsockname(b).unwrap()));
        }
        let name = w.b.getsockname(b).unwrap();
        let own = port(&name);
        w.log("port", (own != 0, !restricted || (first..first + 8).contains(&own)));
        w.log("address", name[4..] == w.at_b(0)[4..]);
        w.log("bind", w.b.bind(b, &w.at_b(0)));
        let mut unspecified = [0; 16];
        unspecified[..2].copy_from_slice(&(libc::AF_UNSPEC as u16).to_ne_bytes());
        w.log("disconnect", w.b.connect(b, &unspecified));
        w.log("name", w.b.getsockname(b).unwrap() == w.at_b(0));
        w.b.close(b).unwrap();
    }
    w.log("bind to a port", {
        let b = w.b.socket(w.domain(), libc::SOCK_DGRAM).unwrap();
        w.b.setsockopt(b, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &word(1)).unwrap();
        let bound = w.b.bind(b, &w.at_b(first));
        (bound, port(&w.b.getsockname(b).unwrap()) == first)
    });
}

pub mod tests {
    crate::cases! {
        ; over_loopback {
            bind_address_no_port
            refused_connect_chooses_a_port
            datagrams_choose_a_port
            ports_in_time_wait
            local_port_range
        }
        ; both {
            defer_accept
            tcp_inq
            rto_and_delack_options
            tcp_save_syn
            minttl_drops_distant_segments
            window_clamp
            buf_lock
            minimal_receive_buffer
            path_mtu_and_cc_info
        }
    }
}
