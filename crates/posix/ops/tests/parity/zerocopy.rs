//! `MSG_ZEROCOPY` and its completions.

use crate::sys::{Fd, Fixture, port, word};
use core::ffi::c_int;
use libc::{MSG_DONTWAIT, SOCK_DGRAM, SOL_SOCKET};

const QUEUE: c_int = libc::MSG_ERRQUEUE | MSG_DONTWAIT;

/// The peer reads and answers, so that everything is acknowledged and the kernel's completions are there.
pub fn sending_without_copies(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let zerocopy = |w: &Fixture<'_>| w.a.getsockopt(a, SOL_SOCKET, libc::SO_ZEROCOPY);
    let acknowledge = |w: &Fixture<'_>, bytes: usize| {
        let mut left = bytes;
        while left > 0 {
            w.wait(w.b, b, libc::POLLIN);
            left -= w.b.recv(b, left, 0).unwrap().len();
        }
        w.b.send(b, b"!", 0).unwrap();
        w.wait(w.a, a, libc::POLLIN);
        w.a.recv(a, 1, 0).unwrap();
    };
    let set = |w: &Fixture<'_>, value: c_int| w.a.setsockopt(a, SOL_SOCKET, libc::SO_ZEROCOPY, &word(value));
    w.log("off", (zerocopy(w), w.a.recv_from(a, 9, 100, QUEUE)));
    w.log("the flag alone", w.a.send(a, b"abc", libc::MSG_ZEROCOPY));
    acknowledge(w, 3);
    w.log("no completion", (w.ready(w.a, a), w.a.recv_from(a, 9, 100, QUEUE)));
    w.log("values", [2, -1, 1].map(|value| set(w, value)));
    w.log("short value", w.a.setsockopt(a, SOL_SOCKET, libc::SO_ZEROCOPY, &[1]));
    w.log("on", zerocopy(w));
    let poll_set = w.a.epoll_create().unwrap();
    w.log("add", w.a.epoll_ctl(poll_set, libc::EPOLL_CTL_ADD, a, libc::EPOLLET as u32, 5));
    w.log("nothing sent", w.a.send(a, b"", libc::MSG_ZEROCOPY));
    w.log("without the flag", w.a.send(a, b"abc", 0));
    acknowledge(w, 3);
    w.log("no completion", (w.ready(w.a, a), w.a.epoll_wait(poll_set, 4, 0)));
    for bytes in [1, 20_000, 3] {
        w.log("send", w.a.send(a, &vec![7; bytes], libc::MSG_ZEROCOPY));
        acknowledge(w, bytes);
    }
    w.wait(w.a, a, libc::POLLERR);
    w.log("edge", w.a.epoll_wait(poll_set, 4, 0));
    w.log("ready", w.ready(w.a, a));
    w.log("with urgent events", w.a.setsockopt(a, SOL_SOCKET, libc::SO_SELECT_ERR_QUEUE, &word(1)));
    w.log("ready", w.ready(w.a, a));
    w.log("no pending error", w.a.getsockopt(a, SOL_SOCKET, libc::SO_ERROR));
    w.log("completions", w.a.recv_from(a, 9, 100, QUEUE));
    w.log("none left", (w.a.recv_from(a, 9, 100, QUEUE), w.a.recv(a, 9, QUEUE), w.ready(w.a, a)));
    w.log("parts", w.a.sendv(a, &[b"ab", b"cde"], libc::MSG_ZEROCOPY));
    acknowledge(w, 5);
    w.wait(w.a, a, libc::POLLERR);
    w.log("short control buffer", w.a.recv_from(a, 9, 20, QUEUE));
    w.log("send", w.a.send(a, b"f", libc::MSG_ZEROCOPY));
    acknowledge(w, 1);
    w.wait(w.a, a, libc::POLLERR);
    w.log("no control buffer", w.a.recv(a, 9, QUEUE));
    w.log("send", w.a.send(a, b"g", libc::MSG_ZEROCOPY));
    acknowledge(w, 1);
    w.wait(w.a, a, libc::POLLERR);
    w.log("numbers go on", w.a.recv_from(a, 9, 100, QUEUE).map(|got| got.control));
    w.log("off again", (set(w, 0), w.a.send(a, b"h", libc::MSG_ZEROCOPY)));
    acknowledge(w, 1);
    w.log("no completion", w.ready(w.a, a));
}

pub fn datagrams_without_copies(w: &mut Fixture<'_>) {
    let (a, b) = (w.a.socket(w.domain(), SOCK_DGRAM).unwrap(), w.b.socket(w.domain(), SOCK_DGRAM).unwrap());
    w.log("bind", w.b.bind(b, &w.at_b(0)));
    let to = w.at_b(port(&w.b.getsockname(b).unwrap()));
    let send = |w: &Fixture<'_>, a: Fd, bytes: &[u8]| {
        let sent = w.a.send_to(a, bytes, Some(&to), &[], libc::MSG_ZEROCOPY);
        w.wait(w.b, b, libc::POLLIN);
        (sent, w.b.recv(b, 2000, 0).map(|bytes| bytes.len()))
    };
    w.log("the flag alone", send(w, a, b"abc"));
    w.log("on", w.a.setsockopt(a, SOL_SOCKET, libc::SO_ZEROCOPY, &word(1)));
    w.log("send", send(w, a, b"abc"));
    w.log("send", send(w, a, &[1; 1400]));
    w.wait(w.a, a, libc::POLLERR);
    w.log("ready", w.ready(w.a, a));
    w.log("completions", w.a.recv_from(a, 9, 100, QUEUE));
    w.log("none left", (w.a.recv_from(a, 9, 100, QUEUE), w.ready(w.a, a)));
}

pub mod tests {
    crate::cases! {
        sending_without_copies
        datagrams_without_copies
    }
}
