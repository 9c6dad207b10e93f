//! `MSG_PEEK` on UDP sockets, and `SO_PEEK_OFF`.

use crate::sys::{Fd, Fixture, word};
use crate::udp::pair;
use libc::{MSG_DONTWAIT, MSG_PEEK, MSG_TRUNC, SO_PEEK_OFF, SOCK_DGRAM, SOL_SOCKET};

fn set(w: &Fixture<'_>, fd: Fd, offset: i32) -> Result<(), rustix::io::Errno> {
    w.a.setsockopt(fd, SOL_SOCKET, SO_PEEK_OFF, &word(offset))
}

fn offset(w: &Fixture<'_>, fd: Fd) -> i32 {
    i32::from_ne_bytes(w.a.getsockopt(fd, SOL_SOCKET, SO_PEEK_OFF).unwrap().try_into().unwrap())
}

/// Logs a call that does not wait: its result, the bytes, the flags, and the offset after it.
fn log(w: &mut Fixture<'_>, label: &str, (fd, len, flags): (Fd, usize, i32)) {
    let got = w.a.recv_from(fd, len, 0, flags | MSG_DONTWAIT);
    let got = got.map(|got| (got.count, String::from_utf8_lossy(&got.bytes).into_owned(), got.flags));
    let at = offset(w, fd);
    w.log(label, (got, at));
}

/// Sends these datagrams to a socket, which is the first of the result.
fn queue_of(w: &Fixture<'_>, datagrams: &[&[u8]]) -> Fd {
    let (a, b, at) = pair(w);
    for datagram in datagrams {
        w.b.send_to(b, datagram, Some(&w.at_a(at)), &[], 0).unwrap();
    }
    w.wait(w.a, a, libc::POLLIN);
    w.settle();
    a
}

pub fn peeks_advance_through_the_queue(w: &mut Fixture<'_>) {
    let a = queue_of(w, &[b"0123456789", b"abcdef", b"UVW"]);
    w.log("at first", offset(w, a));
    log(w, "peek without offset", (a, 4, MSG_PEEK));
    w.log("on", set(w, a, 0));
    for len in [4, 4, 4, 1, 100, 3] {
        log(w, "peek", (a, len, MSG_PEEK));
    }
    log(w, "beyond the last", (a, 100, MSG_PEEK));
    log(w, "a part of the first", (a, 3, 0));
    log(w, "peek again", (a, 100, MSG_PEEK));
    w.log("next", w.a.readable_bytes(a));
    log(w, "the second", (a, 100, 0));
    log(w, "peek again", (a, 100, MSG_PEEK));
    w.log("poll", w.ready(w.a, a));
    log(w, "the third", (a, 100, 0));
    log(w, "none left", (a, 100, MSG_PEEK));
    w.log("off", set(w, a, -1));
    log(w, "none left", (a, 100, MSG_PEEK));
}

pub fn offset_within_and_beyond_datagrams(w: &mut Fixture<'_>) {
    let a = queue_of(w, &[b"0123456789", b"abcdef", b"UVW"]);
    for at in [0, 3, 9, 10, 11, 15, 16, 18, 19, 20, 1000, i32::MAX, -1, -7] {
        w.log("set", (at, set(w, a, at), offset(w, a)));
        log(w, "peek", (a, 100, MSG_PEEK));
    }
    w.log("short value", w.a.setsockopt(a, SOL_SOCKET, SO_PEEK_OFF, &[1, 0]));
    for (at, len) in [(0, 10), (0, 9), (4, 6), (4, 5), (4, 7), (10, 6), (12, 4)] {
        set(w, a, at).unwrap();
        log(w, "peek", (a, len, MSG_PEEK));
        set(w, a, at).unwrap();
        log(w, "with the length", (a, len, MSG_PEEK | MSG_TRUNC));
    }
    set(w, a, 12).unwrap();
    log(w, "received in parts", (a, 4, 0));
    log(w, "with the length", (a, 2, MSG_TRUNC));
    let parts = w.a.recvv(a, &[1, 1, 5], MSG_PEEK | MSG_DONTWAIT);
    w.log("peek at parts", (parts, offset(w, a)));
    set(w, a, 1).unwrap();
    let parts = w.a.recvv(a, &[1, 1, 5], MSG_PEEK | MSG_DONTWAIT);
    w.log("peek at parts", (parts, offset(w, a)));
}

pub fn empty_datagrams_are_peeked_once(w: &mut Fixture<'_>) {
    let a = queue_of(w, &[b"", b"abc", b"", b"", b"d"]);
    log(w, "without offset", (a, 100, MSG_PEEK));
    log(w, "without offset again", (a, 100, MSG_PEEK));
    set(w, a, 0).unwrap();
    for _ in 0..5 {
        log(w, "peek", (a, 100, MSG_PEEK));
    }
    set(w, a, 0).unwrap();
    for _ in 0..2 {
        log(w, "from the start", (a, 100, MSG_PEEK));
    }
    for _ in 0..5 {
        log(w, "receive", (a, 100, 0));
    }
    let a = queue_of(w, &[b"", b"", b"x"]);
    set(w, a, 0).unwrap();
    for _ in 0..4 {
        log(w, "peek", (a, 100, MSG_PEEK));
    }
    set(w, a, -1).unwrap();
    log(w, "off", (a, 100, MSG_PEEK));
}

pub fn peek_beyond_the_queue_waits(w: &mut Fixture<'_>) {
    let (a, b, at) = pair(w);
    let to = w.at_a(at);
    w.b.send_to(b, b"abc", Some(&to), &[], 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    set(w, a, 3).unwrap();
    let timeout = [0i64, 50_000].map(i64::to_ne_bytes).concat();
    w.a.setsockopt(a, SOL_SOCKET, libc::SO_RCVTIMEO, &timeout).unwrap();
    w.log("after the time-out", (w.a.recv(a, 10, MSG_PEEK), offset(w, a)));
    w.a.setsockopt(a, SOL_SOCKET, libc::SO_RCVTIMEO, &[0; 16]).unwrap();
    let (host, sender) = (w.a, w.b);
    let peeked = std::thread::scope(|scope| {
        let peek = scope.spawn(move || host.recv(a, 10, MSG_PEEK));
        std::thread::sleep(core::time::Duration::from_millis(50));
        sender.send_to(b, b"de", Some(&to), &[], 0).unwrap();
        peek.join().unwrap()
    });
    w.log("the next datagram", (peeked, offset(w, a)));
    w.log("several", (w.a.recv_many(a, 3, 10, MSG_DONTWAIT, None), offset(w, a)));
}

/// The offset of a socket that has no port yet, and of one that was disconnected.
pub fn peek_offset_stays_with_the_socket(w: &mut Fixture<'_>) {
    let a = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.log("before bind", (set(w, a, 2), offset(w, a)));
    w.a.bind(a, &w.at_a(0)).unwrap();
    let to = w.a.getsockname(a).unwrap();
    let b = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.b.send_to(b, b"abcd", Some(&w.at_a(crate::sys::port(&to))), &[], 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    log(w, "peek", (a, 1, MSG_PEEK));
    log(w, "peek", (a, 1, MSG_PEEK));
    log(w, "receive", (a, 3, 0));
}

/// Datagrams that are too long for a shared buffer.
pub fn peek_offset_in_long_datagrams(w: &mut Fixture<'_>) {
    let long: Vec<u8> = (0..65_507u32).map(|at| b'a' + (at % 23) as u8).collect();
    let a = queue_of(w, &[b"first", &long]);
    set(w, a, 3).unwrap();
    log(w, "peek", (a, 100, MSG_PEEK));
    log(w, "start of the long one", (a, 10, MSG_PEEK));
    log(w, "further", (a, 10, MSG_PEEK));
    set(w, a, 5 + 65_497).unwrap();
    log(w, "its end", (a, 100, MSG_PEEK));
    log(w, "after it", (a, 100, MSG_PEEK));
    log(w, "the first", (a, 100, 0));
    log(w, "the long one", (a, 10, 0));
}

pub mod tests {
    crate::cases! {
        peeks_advance_through_the_queue
        offset_within_and_beyond_datagrams
        empty_datagrams_are_peeked_once
        peek_beyond_the_queue_waits
        peek_offset_stays_with_the_socket
        peek_offset_in_long_datagrams
    }
}
