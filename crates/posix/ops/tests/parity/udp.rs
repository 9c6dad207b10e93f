//! UDP sockets.

use crate::sys::{Fd, World, control, port, word};
use libc::{
    AF_UNSPEC, IPPROTO_IP, IPPROTO_IPV6, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC, SO_ERROR,
    SOCK_DGRAM, SOCK_NONBLOCK, SOL_SOCKET,
};

/// Creates a bound socket at host `a` and an unbound one at host `b`. Returns them and the port of the
/// former.
pub fn pair(w: &World<'_>) -> (Fd, Fd, u16) {
    let a = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.a.bind(a, &w.at_a(0)).unwrap();
    let at = port(&w.a.getsockname(a).unwrap());
    (a, w.b.socket(w.domain(), SOCK_DGRAM).unwrap(), at)
}

pub fn datagrams_keep_their_bounds(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.say("poll before", (w.ready(w.a, a), w.ready(w.b, b)));
    w.say("nothing", w.a.recv(a, 10, MSG_DONTWAIT));
    w.say("send", w.b.send_to(b, b"first", Some(&to), &[], 0));
    w.say("empty", w.b.send_to(b, b"", Some(&to), &[], 0));
    w.say("third", w.b.send_to(b, b"third one", Some(&to), &[], 0));
    w.wait(w.a, a, libc::POLLIN);
    w.settle();
    w.say("poll", w.ready(w.a, a));
    w.say("bytes of the next", w.a.readable_bytes(a));
    w.say("peek", w.a.recv(a, 100, MSG_PEEK));
    let got = w.a.recv_from(a, 3, 0, 0).unwrap();
    let own = port(&w.b.getsockname(b).unwrap());
    w.say("cut off", (got.count, got.bytes, got.flags == MSG_TRUNC, port(&got.from) == own, got.from.len()));
    w.say("bytes of the empty", w.a.readable_bytes(a));
    w.say("the empty", w.a.recv(a, 10, 0));
    let got = w.a.recv_from(a, 3, 0, MSG_TRUNC).unwrap();
    w.say("its length", (got.count, got.bytes));
    w.say("no more", w.a.recv(a, 10, MSG_DONTWAIT));
    let answer = w.at_b(own);
    w.say("answer", w.a.send_to(a, b"back", Some(&answer), &[], 0));
    w.say("arrives", w.b.recv(b, 10, 0));
    w.say("a flag of streams", w.a.recv(a, 10, libc::MSG_OOB | MSG_DONTWAIT));
    w.say("sent with it", w.a.send_to(a, b"x", Some(&answer), &[], libc::MSG_OOB));
}

pub fn datagrams_of_all_lengths(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    for len in [1, 1400, 1472, 1473, 9000, 32_000, 65_000, 65_507] {
        let bytes: Vec<u8> = (0..len).map(|at: u32| (at % 251) as u8).collect();
        w.say("send", (len, w.b.send_to(b, &bytes, Some(&to), &[], 0)));
        w.wait(w.a, a, libc::POLLIN);
        w.say("next", w.a.readable_bytes(a));
        let peeked = w.a.recv(a, 5, MSG_PEEK);
        w.say("peek", peeked);
        w.say("the same", w.a.recv(a, 70_000, 0) == Ok(bytes));
    }
    for len in [65_508, 65_535, 65_536, 100_000] {
        w.say("too long", (len, w.b.send_to(b, &vec![0; len], Some(&to), &[], 0)));
    }
}

pub fn many_datagrams(w: &mut World<'_>) {
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
    w.say("none is left", w.a.recv(a, 1, MSG_DONTWAIT));
}

pub fn a_fixed_other_end(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.say("no destination", w.b.send(b, b"x", 0));
    w.say("no peer", w.b.getpeername(b));
    w.say("shutdown of nothing", w.b.shutdown(b, libc::SHUT_RD));
    let b = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.say("connect", w.b.connect(b, &to));
    w.say("peer", port(&w.b.getpeername(b).unwrap()) == at);
    let own = w.b.getsockname(b).unwrap();
    w.say("an address of its own", own[4..8] != [0; 4] && port(&own) != 0);
    w.say("send", w.b.send(b, b"hello", 0));
    w.say("recv", w.a.recv(a, 100, 0));
    let stranger = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.a.send_to(stranger, b"from a stranger", Some(&w.at_b(port(&own))), &[], 0).unwrap();
    w.settle();
    w.say("of its peer only", w.b.recv(b, 100, MSG_DONTWAIT));
    let mut nobody = vec![0; 16];
    nobody[..2].copy_from_slice(&(AF_UNSPEC as u16).to_ne_bytes());
    w.say("disconnect", w.b.connect(b, &nobody));
    w.say("no peer again", w.b.getpeername(b));
    w.say("no destination again", w.b.send(b, b"x", 0));
    w.say("to another", w.b.connect(b, &to));
    w.say("and once more", w.b.connect(b, &to));
    w.say("shutdown", w.b.shutdown(b, libc::SHUT_WR));
    w.say("send after it", w.b.send(b, b"x", MSG_NOSIGNAL));
    w.say("shutdown of both", w.b.shutdown(b, libc::SHUT_RDWR));
    w.say("poll", w.ready(w.b, b));
    w.say("recv at the end", w.b.recv(b, 1, 0));
    w.say("listen", w.b.listen(b, 1));
    w.say("accept", w.b.accept4(b, 0));
}

pub fn nobody_there(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    w.a.close(a).unwrap();
    w.settle();
    w.say("connect", w.b.connect(b, &w.at_a(at)));
    w.say("send", w.b.send(b, b"x", 0));
    w.settle();
    w.say("poll", w.ready(w.b, b));
    w.say("the error", w.b.recv(b, 1, MSG_DONTWAIT));
    w.say("once", w.b.recv(b, 1, MSG_DONTWAIT));
    w.say("send", w.b.send(b, b"x", 0));
    w.settle();
    w.say("as an option", w.b.getsockopt(b, SOL_SOCKET, SO_ERROR));
    w.say("once", w.b.getsockopt(b, SOL_SOCKET, SO_ERROR));
    w.say("send", w.b.send(b, b"x", 0));
    w.settle();
    w.say("told to the next", w.b.send(b, b"x", 0));
    w.settle();
    // Unconnected sockets do not get the error.
    let other = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.say("send to nobody", w.b.send_to(other, b"x", Some(&w.at_a(at)), &[], 0));
    w.settle();
    w.say("no error", w.b.recv(other, 1, MSG_DONTWAIT));
}

pub fn addresses(w: &mut World<'_>) {
    let (a, _, at) = pair(w);
    let second = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.say("in use", w.a.bind(second, &w.at_a(at)));
    w.say("not ours", w.a.bind(second, &[2, 0, 0, 0, 192, 0, 2, 77, 0, 0, 0, 0, 0, 0, 0, 0]));
    w.say("short", w.a.bind(second, &w.at_a(at)[..15]));
    w.say("bind", w.a.bind(second, &w.at_a(0)));
    w.say("twice", w.a.bind(second, &w.at_a(0)));
    w.say("port 0", w.a.send_to(second, b"x", Some(&w.at_b(0)), &[], 0));
    w.say("a short destination", w.a.send_to(second, b"x", Some(&w.at_b(1)[..8]), &[], 0));
    w.a.close(a).unwrap();
    let third = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.say("free again", w.a.bind(third, &w.at_a(at)));
    let on = 1i32.to_ne_bytes();
    let shared: Vec<_> = (0..2)
        .map(|_| {
            let fd = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
            w.a.setsockopt(fd, SOL_SOCKET, libc::SO_REUSEPORT, &on).unwrap();
            fd
        })
        .collect();
    w.say("one", w.a.bind(shared[0], &w.at_a(0)));
    let at = port(&w.a.getsockname(shared[0]).unwrap());
    w.say("two", w.a.bind(shared[1], &w.at_a(at)));
    w.say("type", w.a.getsockopt(shared[0], SOL_SOCKET, libc::SO_TYPE));
    w.say("protocol", w.a.getsockopt(shared[0], SOL_SOCKET, libc::SO_PROTOCOL));
    w.say("of TCP", w.a.setsockopt(shared[0], libc::IPPROTO_TCP, libc::TCP_NODELAY, &on));
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
    w.say("shared out", (got[0] + got[1], got[0] % 2, got[0] > 8, got[1] > 8));
}

pub fn control_messages(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let on = 1i32.to_ne_bytes();
    for name in [libc::IP_PKTINFO, libc::IP_RECVTTL, libc::IP_RECVTOS] {
        w.say("asked for", w.a.setsockopt(a, IPPROTO_IP, name, &on));
    }
    w.say("ttl", w.b.setsockopt(b, IPPROTO_IP, libc::IP_TTL, &33i32.to_ne_bytes()));
    w.say("tos", w.b.setsockopt(b, IPPROTO_IP, libc::IP_TOS, &0i32.to_ne_bytes()));
    w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
    let mut got = w.a.recv_from(a, 10, 200, 0).unwrap();
    w.say("control", (got.count, got.flags, got.control.len()));
    // Interface index and addresses differ between kernel and stack.
    let own = w.at_a(0)[4..8].to_vec();
    w.say("our address", (got.control[20..24] == own, got.control[24..28] == own));
    got.control[16..28].fill(0);
    w.say("the rest", got.control);
    w.b.send_to(b, b"y", Some(&w.at_a(at)), &[], 0).unwrap();
    let got = w.a.recv_from(a, 10, 30, 0).unwrap();
    w.say("little room", (got.control.len(), got.flags & libc::MSG_CTRUNC != 0));
    let peer = port(&w.b.getsockname(b).unwrap());
    let info = [&[0; 4][..], &own, &[0; 4]].concat();
    let source = control(IPPROTO_IP, libc::IP_PKTINFO, &info);
    w.say("from an address", w.a.send_to(a, b"z", Some(&w.at_b(peer)), &source, 0));
    let got = w.b.recv_from(b, 10, 0, 0).unwrap();
    w.say("is it", got.from[4..8] == own);
    let unknown = control(IPPROTO_IP, 77, &info);
    w.say("unknown", w.a.send_to(a, b"z", Some(&w.at_b(peer)), &unknown, 0));
    let short = control(IPPROTO_IP, libc::IP_PKTINFO, &info[..8]);
    w.say("too short", w.a.send_to(a, b"z", Some(&w.at_b(peer)), &short, 0));
}

pub fn broadcasts_need_leave(w: &mut World<'_>) {
    let (_, b, at) = pair(w);
    let mut all = w.at_a(at);
    all[4..8].copy_from_slice(&[255; 4]);
    w.say("forbidden", w.b.send_to(b, b"x", Some(&all), &[], 0));
    w.say("leave", w.b.setsockopt(b, SOL_SOCKET, libc::SO_BROADCAST, &1i32.to_ne_bytes()));
}

pub fn epoll_and_time_outs(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let set = w.a.epoll_create().unwrap();
    let events = (libc::EPOLLIN | libc::EPOLLET) as u32;
    w.say("add", w.a.epoll_ctl(set, libc::EPOLL_CTL_ADD, a, events, 5));
    w.say("quiet", w.a.epoll_wait(set, 4, 0));
    w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
    w.say("once", w.a.epoll_wait(set, 4, 10_000));
    w.say("an edge", w.a.epoll_wait(set, 4, 0));
    w.b.send_to(b, b"y", Some(&w.at_a(at)), &[], 0).unwrap();
    w.say("again", w.a.epoll_wait(set, 4, 10_000));
    w.say("both", (w.a.recv(a, 10, 0), w.a.recv(a, 10, 0)));
    let limit = [0i64.to_ne_bytes(), 20_000i64.to_ne_bytes()].concat();
    w.say("limit", w.a.setsockopt(a, SOL_SOCKET, libc::SO_RCVTIMEO, &limit));
    w.say("in time", w.a.recv(a, 1, 0));
    let other = w.a.socket(w.domain(), SOCK_DGRAM | SOCK_NONBLOCK).unwrap();
    w.say("at once", w.a.recv(other, 1, 0));
}

pub fn when_datagrams_came(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    w.b.send_to(b, b"before anybody asked", Some(&w.at_a(at)), &[], 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    for (name, units) in
        [(libc::SO_TIMESTAMP, 1_000_000), (libc::SO_TIMESTAMPNS, 1_000_000_000), (63, 1_000_000)]
    {
        w.say("on", w.a.setsockopt(a, SOL_SOCKET, name, &1i32.to_ne_bytes()));
        for other in [libc::SO_TIMESTAMP, libc::SO_TIMESTAMPNS, 63, 64] {
            w.say("is", w.a.getsockopt(a, SOL_SOCKET, other));
        }
        w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
        w.settle();
        let mut got = w.a.recv_from(a, 100, 100, 0).unwrap();
        let word = |from: usize| u64::from_ne_bytes(got.control[from..from + 8].try_into().unwrap());
        let came = std::time::Duration::from_secs(word(16))
            + std::time::Duration::from_nanos(word(24) * (1_000_000_000 / units));
        let passed = now().saturating_sub(came);
        w.say("lately", passed < std::time::Duration::from_secs(5));
        got.control.splice(16..32, []);
        w.say("as", (got.bytes, got.control, got.flags));
    }
    w.say("the last", w.a.recv(a, 100, 0));
    w.say("off", w.a.setsockopt(a, SOL_SOCKET, libc::SO_TIMESTAMPNS, &0i32.to_ne_bytes()));
    w.b.send_to(b, b"y", Some(&w.at_a(at)), &[], 0).unwrap();
    w.say("none", w.a.recv_from(a, 100, 100, 0).map(|got| (got.bytes, got.control)));
    let (c, at) = (w.a.socket(w.domain(), SOCK_DGRAM).unwrap(), w.at_a(0));
    w.say("before it has an address", w.a.setsockopt(c, SOL_SOCKET, libc::SO_TIMESTAMP, &1i32.to_ne_bytes()));
    w.a.bind(c, &at).unwrap();
    let at = w.at_a(port(&w.a.getsockname(c).unwrap()));
    w.b.send_to(b, b"z", Some(&at), &[], 0).unwrap();
    w.wait(w.a, c, libc::POLLIN);
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let got = w.a.recv_from(c, 100, 100, 0).unwrap();
    let came = u64::from_ne_bytes(got.control[16..24].try_into().unwrap());
    w.say("as of then", (now().as_secs() - came) >= 1);
}

/// Hop limit and traffic class of a single datagram, independent of the socket's.
pub fn what_one_datagram_has_alone(w: &mut World<'_>) {
    let (a, b, at) = pair(w);
    let v4 = w.domain() == libc::AF_INET;
    let (level, other) = if v4 { (IPPROTO_IP, IPPROTO_IPV6) } else { (IPPROTO_IPV6, IPPROTO_IP) };
    let of = |v4: bool| match v4 {
        true => [libc::IP_TTL, libc::IP_TOS, libc::IP_RECVTTL, libc::IP_RECVTOS],
        false => [libc::IPV6_HOPLIMIT, libc::IPV6_TCLASS, libc::IPV6_RECVHOPLIMIT, libc::IPV6_RECVTCLASS],
    };
    let [hops, class, recv_hops, recv_class] = of(v4);
    for name in [recv_hops, recv_class] {
        w.say("asked for", w.a.setsockopt(a, level, name, &word(1)));
    }
    let to = w.at_a(at);
    let each = |w: &mut World<'_>, what: &str, control: &[u8]| {
        let sent = w.b.send_to(b, b"x", Some(&to), control, 0);
        w.say(what, sent);
        if sent.is_ok() {
            let got = w.a.recv_from(a, 10, 200, 0).unwrap();
            w.say("came", (got.bytes, got.control));
        }
    };
    each(w, "as the socket is", &[]);
    let both = [control(level, hops, &word(33)), control(level, class, &word(0x2a))].concat();
    // The first datagram to a destination takes another code path than later ones.
    each(w, "both", &both);
    each(w, "both again", &both);
    each(w, "as before", &[]);
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
        "of the other version",
        &[control(other, hops, &word(33)), control(other, class, &word(4))].concat(),
    );
}

/// `SO_TIMESTAMPING`: accepted values, and timestamps of received datagrams.
pub fn times_in_detail(w: &mut World<'_>) {
    const NEW: i32 = 65;
    let names = [libc::SO_TIMESTAMPING, NEW];
    for kind in [SOCK_DGRAM, libc::SOCK_STREAM] {
        let fd = w.a.socket(w.domain(), kind).unwrap();
        for bit in 0..32 {
            let flags = (1u32 << bit).to_ne_bytes();
            let taken = w.a.setsockopt(fd, SOL_SOCKET, names[bit % 2], &flags);
            let is = names.map(|name| w.a.getsockopt(fd, SOL_SOCKET, name));
            w.say("flag", (bit, taken, is));
        }
        for flags in [0x1080u32, 0x1_0080, 0x1800, 0x88, 0] {
            w.say("flags", (flags, w.a.setsockopt(fd, SOL_SOCKET, NEW, &flags.to_ne_bytes())));
        }
        w.say("a clock", w.a.setsockopt(fd, SOL_SOCKET, NEW, &[8, 0, 0, 0, 3, 0, 0, 0]));
        w.say("too short", w.a.setsockopt(fd, SOL_SOCKET, NEW, &[8, 0]));
        w.a.close(fd).unwrap();
    }
    let (a, b, at) = pair(w);
    let software = 0x18u32.to_ne_bytes();
    for (number, name) in names.into_iter().enumerate() {
        w.say("on", w.a.setsockopt(a, SOL_SOCKET, name, &software));
        // The kernel begins to take timestamps with a delay.
        w.settle();
        if number == 1 {
            w.say("both", w.a.setsockopt(a, SOL_SOCKET, 63, &1i32.to_ne_bytes()));
        }
        w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
        let mut got = w.a.recv_from(a, 100, 200, 0).unwrap();
        // Seconds and nanoseconds, after those of the other message.
        for time in [16..32, 48..64].into_iter().skip(1 - number).take(1 + number) {
            let time = if number == 0 { 16..32 } else { time };
            w.say("a time", got.control[time.clone()].iter().any(|byte| *byte != 0));
            got.control[time].fill(0);
        }
        w.say("as", (got.bytes, got.control, got.flags));
    }
    w.say("not of what comes", w.a.setsockopt(a, SOL_SOCKET, NEW, &0x10u32.to_ne_bytes()));
    w.say("off", w.a.setsockopt(a, SOL_SOCKET, 63, &0i32.to_ne_bytes()));
    w.b.send_to(b, b"y", Some(&w.at_a(at)), &[], 0).unwrap();
    w.say("none", w.a.recv_from(a, 100, 200, 0).map(|got| got.bytes));
}

pub mod tests {
    crate::cases! {
        addresses
        control_messages
        broadcasts_need_leave
        ; both {
            datagrams_keep_their_bounds
            datagrams_of_all_lengths
            many_datagrams
            a_fixed_other_end
            nobody_there
            when_datagrams_came
            times_in_detail
            what_one_datagram_has_alone
            epoll_and_time_outs
        }
    }
}
