//! TCP socket options with effects that programs observe.

use crate::sys::{World, port, word};
use libc::{IPPROTO_IPV6, IPPROTO_TCP, MSG_PEEK, SO_RCVBUF, SO_SNDBUF, SOCK_STREAM, SOL_SOCKET};

const SO_BUF_LOCK: i32 = 72;
const TCP_INQ: i32 = 36;
const IPV6_PATHMTU: i32 = 61;
const IPV6_MINHOPCOUNT: i32 = 73;
const RTO_MAX_MS: i32 = 44;
const RTO_MIN_US: i32 = 45;
const DELACK_MAX_US: i32 = 46;

pub fn how_much_waits(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.say("at first", w.a.getsockopt(a, IPPROTO_TCP, TCP_INQ));
    w.say("neither", w.a.setsockopt(a, IPPROTO_TCP, TCP_INQ, &word(2)));
    w.b.send(b, b"0123456789", 0).unwrap();
    w.settle();
    w.say("not asked for", w.a.recv_from(a, 1, 100, 0));
    w.say("on", w.a.setsockopt(a, IPPROTO_TCP, TCP_INQ, &word(1)));
    w.say("is", w.a.getsockopt(a, IPPROTO_TCP, TCP_INQ));
    w.say("some", w.a.recv_from(a, 3, 100, 0));
    w.say("a look", w.a.recv_from(a, 3, 100, MSG_PEEK));
    w.say("no room", w.a.recv_from(a, 1, 0, 0));
    w.say("all", w.a.recv_from(a, 100, 100, 0));
    w.say("nothing", w.a.recv_from(a, 100, 100, libc::MSG_DONTWAIT));
    w.b.send(b, b"last", 0).unwrap();
    w.b.close(b).unwrap();
    w.wait(w.a, a, libc::POLLRDHUP);
    w.say("some of the last", w.a.recv_from(a, 3, 100, 0));
    w.say("the last", w.a.recv_from(a, 3, 100, 0));
    w.say("the end", w.a.recv_from(a, 3, 100, 0));
    let set = w.a.setsockopt(a, IPPROTO_TCP, TCP_INQ, &word(0));
    w.say("off", (set, w.a.recv_from(a, 3, 100, 0)));
}

pub fn windows_are_clamped(w: &mut World<'_>) {
    let fd = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    let clamp = |w: &World<'_>| w.b.getsockopt(fd, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP);
    w.say("none", clamp(w));
    for value in [1, 5000, -1, 0, i32::MIN, 8192] {
        let set = w.b.setsockopt(fd, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, &word(value));
        w.say("set", (value, set, clamp(w)));
    }
    let (listener, at) = w.listener(0);
    w.say("connect", w.b.connect(fd, &w.at_a(at)));
    let a = w.a.accept4(listener, libc::SOCK_NONBLOCK).unwrap();
    w.say("stays", clamp(w));
    w.say("no more", w.b.setsockopt(fd, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, &word(0)));
    w.say("larger", (w.b.setsockopt(fd, IPPROTO_TCP, libc::TCP_WINDOW_CLAMP, &word(30_000)), clamp(w)));
    let mut sent = 0;
    while let Ok(count) = w.a.send(a, &[7; 4096], 0) {
        sent += count;
    }
    let mut got = 0;
    while got < sent {
        got += w.b.recv(fd, 1 << 16, 0).unwrap().len();
    }
    w.say("all arrive", got == sent);
}

pub fn buffers_are_locked(w: &mut World<'_>) {
    let fd = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
    let locks = |w: &World<'_>| w.a.getsockopt(fd, SOL_SOCKET, SO_BUF_LOCK);
    w.say("none", locks(w));
    w.say("receiving", (w.a.setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &word(10_000)), locks(w)));
    w.say("sending", (w.a.setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &word(10_000)), locks(w)));
    for value in [0, 1, 2, 3, 4, -1] {
        w.say("set", (value, w.a.setsockopt(fd, SOL_SOCKET, SO_BUF_LOCK, &word(value)), locks(w)));
    }
}

pub fn a_small_buffer(w: &mut World<'_>) {
    let (listener, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.say("as small as can be", w.b.setsockopt(b, SOL_SOCKET, SO_RCVBUF, &word(1)));
    w.say("connect", w.b.connect(b, &w.at_a(at)));
    let a = w.a.accept4(listener, 0).unwrap();
    w.say("and on a connection", w.a.setsockopt(a, SOL_SOCKET, SO_RCVBUF, &word(1)));
    w.a.send(a, b"through", 0).unwrap();
    w.say("through", w.b.recv(b, 10, 0));
}

pub fn what_is_told_of_paths(w: &mut World<'_>) {
    let (listener, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.say("none yet", w.b.getsockopt(b, IPPROTO_IPV6, IPV6_PATHMTU));
    w.say("connect", w.b.connect(b, &w.at_a(at)));
    let told = w.b.getsockopt(b, IPPROTO_IPV6, IPV6_PATHMTU);
    // The MTU differs between kernel and stack.
    w.say(
        "a path",
        told.map(|told| (told.len(), told[..28].iter().all(|byte| *byte == 0), told[28..] != [0; 4])),
    );
    w.say("cannot be set", w.b.setsockopt(b, IPPROTO_IPV6, IPV6_PATHMTU, &[0; 32]));
    w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_CONGESTION, b"cubic").unwrap();
    w.say("nothing", w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_CC_INFO));
    w.say("cannot be set", w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_CC_INFO, &[0; 32]));
    w.a.close(listener).unwrap();
}

pub fn accepted_when_something_came(w: &mut World<'_>) {
    let (listener, at) = w.listener(libc::SOCK_NONBLOCK);
    let defer =
        |w: &World<'_>, s: i32| w.a.setsockopt(listener, IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, &word(s));
    w.say("deferred", defer(w, 1));
    let dial = |w: &World<'_>| {
        let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(at)).unwrap();
        w.settle();
        b
    };
    let (first, second) = (dial(w), dial(w));
    w.say("nothing to accept", (w.ready(w.a, listener), w.a.accept4(listener, 0).is_ok()));
    w.b.send(second, b"second", 0).unwrap();
    w.say("the second", w.wait(w.a, listener, libc::POLLIN));
    let a = w.a.accept4(listener, 0).unwrap();
    w.say("with what it brought", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    w.say("and no other", w.a.accept4(listener, 0).is_ok());
    // After the timeout, the connection is accepted without data.
    w.say("the first", w.wait(w.a, listener, libc::POLLIN));
    let a = w.a.accept4(listener, 0).unwrap();
    w.say("has brought nothing", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    w.b.send(first, b"late", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.say("later", w.a.recv(a, 10, 0));
    w.say("longer", defer(w, 60));
    let third = dial(w);
    w.say("nothing to accept", w.ready(w.a, listener));
    w.b.close(third).unwrap();
    w.say("its end", w.wait(w.a, listener, libc::POLLIN));
    let a = w.a.accept4(listener, 0).unwrap();
    w.say("is all there is", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    let fourth = dial(w);
    w.b.setsockopt(fourth, SOL_SOCKET, libc::SO_LINGER, &[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    w.b.close(fourth).unwrap();
    w.settle();
    w.say("a reset is nobody's", w.a.accept4(listener, 0).is_ok());
    w.say("at once", defer(w, 0));
    let fifth = dial(w);
    w.say("to be accepted", (w.ready(w.a, listener), w.a.accept4(listener, 0).is_ok()));
    w.b.close(fifth).unwrap();
    w.say("deferred again", defer(w, 60));
    dial(w);
    w.say("the listener goes", w.a.close(listener));
}

pub fn times_of_single_sockets(w: &mut World<'_>) {
    let (listener, at) = w.listener(0);
    let times = [
        (RTO_MAX_MS, [1000, 40_000, 120_000], [0, 999, 120_001]),
        (RTO_MIN_US, [8000, 40_000, 200_000], [0, 1000, 200_001]),
        (DELACK_MAX_US, [8000, 40_000, 200_000], [0, 1000, 200_001]),
    ];
    for (name, good, bad) in times {
        let is = |w: &World<'_>| w.a.getsockopt(listener, IPPROTO_TCP, name);
        w.say("at first", (name, is(w)));
        for value in good.into_iter().chain(bad).chain([-1, i32::MAX, good[1]]) {
            let set = w.a.setsockopt(listener, IPPROTO_TCP, name, &word(value));
            w.say("set", (value, set, is(w)));
        }
        w.say("too short", w.a.setsockopt(listener, IPPROTO_TCP, name, &[1, 0]));
    }
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.say("before it connects", w.b.setsockopt(b, IPPROTO_TCP, RTO_MIN_US, &word(8000)));
    w.b.connect(b, &w.at_a(at)).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    for (name, ..) in times {
        w.say("the listener's", (name, w.a.getsockopt(a, IPPROTO_TCP, name)));
    }
    w.say("its own", w.b.getsockopt(b, IPPROTO_TCP, RTO_MIN_US));
    w.a.send(a, b"through", 0).unwrap();
    w.say("through", w.b.recv(b, 10, 0));
    // The RTO in `tcp_info` is this minimum, or the value derived from the round-trip time.
    w.b.send(b, b"back", 0).unwrap();
    w.say("and back", w.a.recv(a, 10, 0));
    w.settle();
    let rto = |info: Vec<u8>| u32::from_ne_bytes(info[8..12].try_into().unwrap());
    let told = w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_INFO).map(|info| rto(info) < 200_000);
    w.say("a short time-out", told);
}

pub fn syns_are_kept(w: &mut World<'_>) {
    let (listener, at) = w.listener(0);
    let save = |w: &World<'_>, value: i32| {
        let set = w.a.setsockopt(listener, IPPROTO_TCP, libc::TCP_SAVE_SYN, &word(value));
        (value, set, w.a.getsockopt(listener, IPPROTO_TCP, libc::TCP_SAVE_SYN))
    };
    let saved =
        |w: &World<'_>, fd: i32, room: usize| w.a.getsockopt_into(fd, IPPROTO_TCP, libc::TCP_SAVED_SYN, room);
    let dial = |w: &World<'_>| {
        let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(at)).unwrap();
        (w.a.accept4(listener, 0).unwrap(), b)
    };
    w.say("cannot be set", w.a.setsockopt(listener, IPPROTO_TCP, libc::TCP_SAVED_SYN, &word(1)));
    w.say("nothing", saved(w, listener, 200));
    let (a, _) = dial(w);
    w.say("nobody asked", saved(w, a, 200));
    for value in [3, -1, 2, 1] {
        w.say("save", save(w, value));
    }
    let (a, b) = dial(w);
    w.say("inherited", w.a.getsockopt(a, IPPROTO_TCP, libc::TCP_SAVE_SYN));
    w.say("the other end has none", w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_SAVED_SYN));
    w.say("no room", saved(w, a, 0).is_err());
    let small = saved(w, a, 30);
    let syn = saved(w, a, 200).unwrap();
    // Each stack chooses its own options in the SYN.
    let short = small.map_err(|(error, needed)| (error, needed == syn.len()));
    w.say("too little room", short);
    let (version, header) = (syn[0] >> 4, if syn[0] >> 4 == 4 { 20 } else { 40 });
    let from = u16::from_be_bytes([syn[header], syn[header + 1]]) == port(&w.b.getsockname(b).unwrap());
    let to = u16::from_be_bytes([syn[header + 2], syn[header + 3]]) == at;
    let whole = syn.len() == header + usize::from(syn[header + 12] >> 4) * 4;
    w.say("it is that SYN", (version, from, to, whole, syn[header + 13] & 0x3f));
    w.say("only once", saved(w, a, 200));
    w.say("with the link's header", save(w, 2));
    let (a, _) = dial(w);
    let syn = saved(w, a, 200).unwrap();
    w.say("14 bytes before it", (syn[12..14].to_vec(), syn[14] >> 4));
    w.say("none any more", save(w, 0));
    let (a, _) = dial(w);
    w.say("nothing", saved(w, a, 200));
}

pub fn too_many_hops(w: &mut World<'_>) {
    let v6 = w.domain() == libc::AF_INET6;
    let (level, least, own) = match v6 {
        false => (libc::IPPROTO_IP, libc::IP_MINTTL, libc::IP_TTL),
        true => (IPPROTO_IPV6, IPV6_MINHOPCOUNT, libc::IPV6_UNICAST_HOPS),
    };
    let (listener, at) = w.listener(libc::SOCK_NONBLOCK);
    let is = |w: &World<'_>| w.a.getsockopt(listener, level, least);
    w.say("any", is(w));
    for value in [1, 0, 255, 256, -1, 70] {
        w.say("set", (value, w.a.setsockopt(listener, level, least, &word(value)), is(w)));
    }
    w.say("a byte", (w.a.setsockopt(listener, level, least, &[70]), is(w)));
    w.say("nothing", w.a.setsockopt(listener, level, least, &[]));
    let far = w.b.socket(w.domain(), SOCK_STREAM | libc::SOCK_NONBLOCK).unwrap();
    w.b.setsockopt(far, level, own, &word(69)).unwrap();
    w.say("from afar", w.b.connect(far, &w.at_a(at)));
    w.settle();
    w.say("nobody comes", (w.ready(w.a, listener), w.ready(w.b, far)));
    let near = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(near, level, own, &word(70)).unwrap();
    w.say("near enough", w.b.connect(near, &w.at_a(at)));
    w.wait(w.a, listener, libc::POLLIN);
    let a = w.a.accept4(listener, 0).unwrap();
    w.say("inherited", w.a.getsockopt(a, level, least));
    w.say("further away now", w.b.setsockopt(near, level, own, &word(64)));
    w.b.send(near, b"lost?", 0).unwrap();
    w.settle();
    w.say("nothing comes", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    w.say("as far as that", w.a.setsockopt(a, level, least, &word(64)));
    w.wait(w.a, a, libc::POLLIN);
    w.say("it comes again", w.a.recv(a, 10, libc::MSG_DONTWAIT));
    w.say("the listener, too", w.a.setsockopt(listener, level, least, &word(0)));
    w.say("comes", w.wait(w.b, far, libc::POLLOUT));
    w.say("no error", w.b.getsockopt(far, SOL_SOCKET, libc::SO_ERROR));
}

/// `IP_LOCAL_PORT_RANGE`.
const RANGE: i32 = 51;

/// Returns the first of `count` consecutive ports that are free in the kernel.
fn free_ports(count: u16) -> u16 {
    let is_free = |port: u16| {
        let any = (core::net::Ipv6Addr::UNSPECIFIED, port);
        std::net::TcpListener::bind(any).is_ok() && std::net::UdpSocket::bind(any).is_ok()
    };
    let start = std::process::id() as u16 % 1000 * 16;
    let mut places = (0..100).map(|step| 33_000 + start + step * 16);
    places.find(|first| (*first..first + count).all(is_free)).expect("some ports are free")
}

pub fn ports_of_a_range(w: &mut World<'_>) {
    let first = free_ports(10);
    let range = |low: u16, high: u16| (u32::from(first + high) << 16 | u32::from(first + low)).to_ne_bytes();
    for kind in [SOCK_STREAM, libc::SOCK_DGRAM] {
        let mut fds = Vec::new();
        for _ in 0..5 {
            let fd = w.a.socket(w.domain(), kind).unwrap();
            w.a.setsockopt(fd, libc::IPPROTO_IP, RANGE, &range(0, 3)).unwrap();
            w.say("bind", w.a.bind(fd, &w.at_a(0)));
            fds.push(fd);
        }
        let mut ports: Vec<u16> =
            fds[..4].iter().map(|fd| port(&w.a.getsockname(*fd).unwrap()) - first).collect();
        ports.sort_unstable();
        w.say("all of them", ports);
        fds.iter().for_each(|fd| w.a.close(*fd).unwrap());
    }
    let (_, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(b, libc::IPPROTO_IP, RANGE, &range(8, 8)).unwrap();
    w.say("connect", w.b.connect(b, &w.at_a(at)));
    w.say("from", port(&w.b.getsockname(b).unwrap()) - first);
    let other = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(other, libc::IPPROTO_IP, RANGE, &range(8, 8)).unwrap();
    w.say("none is left", w.b.connect(other, &w.at_a(at)));
    w.say(
        "without waiting in vain",
        w.b.setsockopt(b, SOL_SOCKET, libc::SO_LINGER, &[1, 0, 0, 0, 0, 0, 0, 0]),
    );
    w.b.close(b).unwrap();
}

/// Ports of a connection in TIME_WAIT: available at once to a socket that binds the port, but not for
/// automatic selection.
pub fn ports_in_time_wait(w: &mut World<'_>) {
    let (listener, at) = w.listener(0);
    // Above the ports of the case below, which may run concurrently.
    let first = free_ports(14) + 12;
    for bound in [true, false] {
        let own = first + u16::from(bound);
        let socket = |w: &mut World<'_>| {
            let fd = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
            if bound {
                w.b.setsockopt(fd, SOL_SOCKET, libc::SO_REUSEADDR, &word(1)).unwrap();
                w.b.bind(fd, &w.at_b(own)).unwrap();
            } else {
                let range = u32::from(own) << 16 | u32::from(own);
                w.b.setsockopt(fd, libc::IPPROTO_IP, RANGE, &range.to_ne_bytes()).unwrap();
            }
            fd
        };
        let b = socket(w);
        w.say("connect", w.b.connect(b, &w.at_a(at)));
        if bound {
            let other = socket(w);
            w.say("while it is open", w.b.connect(other, &w.at_a(at)));
            w.b.close(other).unwrap();
        }
        let a = w.a.accept4(listener, 0).unwrap();
        w.b.close(b).unwrap();
        w.say("its end", w.a.recv(a, 1, 0));
        w.a.close(a).unwrap();
        // Waits until the last acknowledgement was sent.
        std::thread::sleep(core::time::Duration::from_millis(100));
        let next = socket(w);
        w.say("at once", w.b.connect(next, &w.at_a(at)));
        w.b.close(next).unwrap();
    }
}

pub fn addresses_without_ports(w: &mut World<'_>) {
    let (listener, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    let (level, name) = (libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT);
    w.say("no port", w.b.setsockopt(b, level, name, &word(1)));
    w.say("bind", w.b.bind(b, &w.at_b(0)));
    w.say("none", port(&w.b.getsockname(b).unwrap()));
    w.say("its address", w.b.getsockname(b).unwrap()[4..] == w.at_b(0)[4..]);
    w.say("again", w.b.bind(b, &w.at_b(0)));
    w.say("connect", w.b.connect(b, &w.at_a(at)));
    let own = w.b.getsockname(b).unwrap();
    w.say("from there", (own[4..] == w.at_b(0)[4..], port(&own) != 0));
    let a = w.a.accept4(listener, 0).unwrap();
    w.say("by name", w.a.getpeername(a).unwrap() == own);
    let other = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(other, level, name, &word(1)).unwrap();
    w.say("bind", w.b.bind(other, &w.at_b(0)));
    w.say("listen", w.b.listen(other, 1));
    w.say("has one now", port(&w.b.getsockname(other).unwrap()) != 0);
    let named = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.setsockopt(named, level, name, &word(1)).unwrap();
    let free = free_ports(1);
    w.say("a port that is named", w.b.bind(named, &w.at_b(free)));
    w.say("is kept", port(&w.b.getsockname(named).unwrap()) == free);
}

pub mod tests {
    crate::cases! {
        ; alone {
            addresses_without_ports
            ports_in_time_wait
            ports_of_a_range
        }
        ; both {
            accepted_when_something_came
            how_much_waits
            times_of_single_sockets
            syns_are_kept
            too_many_hops
            windows_are_clamped
            buffers_are_locked
            a_small_buffer
            what_is_told_of_paths
        }
    }
}
