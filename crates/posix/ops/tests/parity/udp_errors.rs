//! Errors of datagrams as messages: `IP_RECVERR`, `IPV6_RECVERR` and `MSG_ERRQUEUE`.

use crate::sys::{Fd, Fixture, Message, port};
use libc::{AF_INET, IPPROTO_IP, IPPROTO_IPV6, MSG_DONTWAIT, MSG_ERRQUEUE, SO_ERROR, SOCK_DGRAM, SOL_SOCKET};

const ON: [u8; 4] = 1i32.to_ne_bytes();
const OFF: [u8; 4] = 0i32.to_ne_bytes();

/// Returns level and name of the option, by address family.
fn recverr(w: &Fixture<'_>) -> (i32, i32) {
    match w.domain() {
        AF_INET => (IPPROTO_IP, libc::IP_RECVERR),
        _ => (IPPROTO_IPV6, libc::IPV6_RECVERR),
    }
}

/// Returns an unused port of host `a`.
fn unused_port(w: &Fixture<'_>) -> u16 {
    let a = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
    w.a.bind(a, &w.at_a(0)).unwrap();
    let at = port(&w.a.getsockname(a).unwrap());
    w.a.close(a).unwrap();
    w.settle();
    at
}

/// Creates a socket of host `b` that requests errors.
fn socket_with_recverr(w: &mut Fixture<'_>) -> Fd {
    let b = w.b.socket(w.domain(), SOCK_DGRAM).unwrap();
    let (level, name) = recverr(w);
    w.log("enable option", w.b.setsockopt(b, level, name, &ON));
    b
}

/// Formats a message. Ports and addresses are compared with the expected ones instead of printed.
fn format_message(w: &Fixture<'_>, message: &Message, to: u16) -> String {
    let from = w.at_a(to);
    let mut control = message.control.clone();
    let mut offender = "none".into();
    if control.len() >= 48 {
        let address = control.split_off(32);
        offender = format!("{}", address[..2] == from[..2] && address[4..8] == from[4..8]);
        if w.domain() != AF_INET {
            offender = format!("{}", address[..2] == from[..2] && address[8..24] == from[8..24]);
        }
    }
    let sent_to = message.from == from;
    format!("{} {:?} {sent_to} {control:?} {offender} {:x}", message.count, message.bytes, message.flags)
}

pub fn error_queue(w: &mut Fixture<'_>) {
    let (at, b) = (unused_port(w), socket_with_recverr(w));
    let queue = MSG_ERRQUEUE | MSG_DONTWAIT;
    w.log("no data yet", w.b.recv_from(b, 10, 100, MSG_ERRQUEUE));
    w.log("send", w.b.send_to(b, b"a datagram", Some(&w.at_a(at)), &[], 0));
    w.wait(w.b, b, libc::POLLERR);
    w.settle();
    w.log("poll", w.ready(w.b, b));
    w.log("pending error", w.b.recv(b, 10, MSG_DONTWAIT));
    w.log("second time", w.b.recv(b, 10, MSG_DONTWAIT));
    w.log("poll", w.ready(w.b, b));
    let message = w.b.recv_from(b, 100, 200, queue).unwrap();
    w.log("error message", format_message(w, &message, at));
    w.log("second time", w.b.recv_from(b, 10, 100, queue));
    w.log("poll", w.ready(w.b, b));
    w.log("no pending error", w.b.getsockopt(b, SOL_SOCKET, SO_ERROR));
    w.log("send", w.b.send_to(b, b"next", Some(&w.at_a(at)), &[], 0));
    w.wait(w.b, b, libc::POLLERR);
    w.settle();
    let message = w.b.recv_from(b, 100, 200, queue).unwrap();
    w.log("error message first", format_message(w, &message, at));
    w.log("no pending error", w.b.recv(b, 10, MSG_DONTWAIT));
}

pub fn several_queued_errors(w: &mut Fixture<'_>) {
    let (at, b) = (unused_port(w), socket_with_recverr(w));
    let queue = MSG_ERRQUEUE | MSG_DONTWAIT;
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    for text in [&b"first"[..], b"second", b"third"] {
        w.log("send", w.b.send(b, text, 0));
        w.wait(w.b, b, libc::POLLERR);
        w.settle();
        w.log("pending", w.b.getsockopt(b, SOL_SOCKET, SO_ERROR));
    }
    let message = w.b.recv_from(b, 3, 200, queue).unwrap();
    w.log("truncated", format_message(w, &message, at));
    w.log("next error is pending", w.b.recv(b, 10, MSG_DONTWAIT));
    let message = w.b.recv_from(b, 100, 20, queue).unwrap();
    w.log("short control buffer", (message.count, message.control.len(), message.flags));
    let message = w.b.recv_from(b, 100, 0, queue).unwrap();
    w.log("no control buffer", (message.count, message.control, message.flags));
    w.log("poll", w.ready(w.b, b));
    w.log("send", w.b.send(b, b"x", 0));
    w.wait(w.b, b, libc::POLLERR);
    w.settle();
    let (level, name) = recverr(w);
    w.log("disable option", w.b.setsockopt(b, level, name, &OFF));
    w.log("none left", w.b.recv_from(b, 10, 100, queue));
    w.log("remaining error", w.b.recv(b, 10, MSG_DONTWAIT));
}

pub fn errors_wake_waiters(w: &mut Fixture<'_>) {
    let (at, b) = (unused_port(w), socket_with_recverr(w));
    let set = w.b.epoll_create().unwrap();
    w.log("add", w.b.epoll_ctl(set, libc::EPOLL_CTL_ADD, b, libc::EPOLLET as u32, 5));
    w.log("no EPOLLOUT requested", w.b.epoll_wait(set, 4, 0));
    w.b.send_to(b, b"x", Some(&w.at_a(at)), &[], 0).unwrap();
    w.log("EPOLLERR", w.b.epoll_wait(set, 4, 10_000));
    w.log("set SO_SELECT_ERR_QUEUE", w.b.setsockopt(b, SOL_SOCKET, libc::SO_SELECT_ERR_QUEUE, &ON));
    w.log("poll", w.ready(w.b, b));
    w.log("pending error", w.b.recv(b, 1, 0));
}

pub fn too_long_datagrams(w: &mut Fixture<'_>) {
    let (at, b) = (unused_port(w), socket_with_recverr(w));
    let longest = if w.domain() == AF_INET { 65_507 } else { 65_527 };
    let queue = MSG_ERRQUEUE | MSG_DONTWAIT;
    w.log("too long", w.b.send_to(b, &vec![0; longest + 1], Some(&w.at_a(at)), &[], 0));
    w.settle();
    w.log("poll", w.ready(w.b, b));
    w.log("no pending error", w.b.recv(b, 1, MSG_DONTWAIT));
    let mut message = w.b.recv_from(b, 100, 200, queue).unwrap();
    let fits = u32::from_ne_bytes(message.control[24..28].try_into().unwrap());
    w.log("path MTU", fits > 1000);
    message.control[24..28].fill(0);
    let unconnected = if w.domain() == AF_INET { 0 } else { at };
    w.log("error message", format_message(w, &message, unconnected));
    w.log("poll", w.ready(w.b, b));
    w.log("longer than any datagram", w.b.send_to(b, &vec![0; 65_536], Some(&w.at_a(at)), &[], 0));
    // IPv6 also reports this error as a message.
    let message =
        w.b.recv_from(b, 100, 200, queue).map(|message| (message.count, message.from, message.flags));
    w.log("message on IPv6", message.map(|(count, from, flags)| (count, port(&from) == at, flags)));
}

pub fn path_mtu(w: &mut Fixture<'_>) {
    let (at, b) = (unused_port(w), w.b.socket(w.domain(), SOCK_DGRAM).unwrap());
    let v4 = w.domain() == AF_INET;
    let (level, mtu, discover) = match v4 {
        true => (IPPROTO_IP, libc::IP_MTU, libc::IP_MTU_DISCOVER),
        false => (IPPROTO_IPV6, libc::IPV6_MTU, libc::IPV6_MTU_DISCOVER),
    };
    w.log("before connect", w.b.getsockopt(b, level, mtu));
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    let fits = u32::from_ne_bytes(w.b.getsockopt(b, level, mtu).unwrap().try_into().unwrap());
    w.log("connected", fits > 1000);
    for how in [2i32, 3] {
        w.log("never fragment", w.b.setsockopt(b, level, discover, &how.to_ne_bytes()));
        w.log("short datagram", w.b.send(b, &[1; 600], 0));
        w.settle();
        w.log("recv error", w.b.recv(b, 1, MSG_DONTWAIT));
        // Over the kernel's loopback, no valid datagram is too long.
        let longest = fits.min(65_535) as usize - if v4 { 28 } else { 48 };
        w.log("longest datagram", w.b.send(b, &vec![1; longest], 0) == Ok(longest));
        w.settle();
        w.log("recv error", w.b.recv(b, 1, MSG_DONTWAIT));
        w.log("too long", w.b.send(b, &vec![1; 65_535], 0));
    }
}

/// On the loopback, the error of a datagram is there when its `send` has returned.
pub fn errors_follow_sends_at_once(w: &mut Fixture<'_>) {
    for (connects, reports) in [(true, false), (true, true), (false, true)] {
        let at = unused_port(w);
        let b = if reports { socket_with_recverr(w) } else { w.b.socket(w.domain(), SOCK_DGRAM).unwrap() };
        let to = w.at_a(at);
        if connects {
            w.b.connect(b, &to).unwrap();
        }
        for text in [&b"first"[..], b"second", b"third", b"fourth"] {
            let to = if connects { None } else { Some(&to[..]) };
            w.log("send", w.b.send_to(b, text, to, &[], 0));
        }
        w.log("recv", w.b.recv(b, 10, MSG_DONTWAIT));
        w.b.close(b).unwrap();
    }
}

pub mod tests {
    crate::cases! {
        ; over_loopback {
            errors_follow_sends_at_once
        }; both {
            error_queue
            several_queued_errors
            errors_wake_waiters
            too_long_datagrams
            path_mtu
        }
    }
}
