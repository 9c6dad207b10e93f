//! Times at which datagrams are to be sent: `SO_TXTIME` and `SCM_TXTIME`.

use crate::stack::Stacks;
use crate::sys::{Fd, Fixture, Sys, control, port, word};
use core::time::Duration;
use libc::{AF_INET, MSG_DONTWAIT, MSG_ERRQUEUE, SCM_TXTIME, SO_TXTIME, SOCK_DGRAM, SOCK_STREAM, SOL_SOCKET};
use rustix::io::Errno;
use rustix::time::{ClockId, DynamicClockId, clock_gettime, clock_gettime_dynamic};
use std::net::{Ipv4Addr, SocketAddr};

const DEADLINE_MODE: i32 = 1;
const REPORT_ERRORS: i32 = 2;
const MS: i64 = 1_000_000;

/// Returns a `struct sock_txtime`.
fn txtime(clock: i32, flags: i32) -> Vec<u8> {
    [word(clock), word(flags)].concat()
}

pub fn option_of_departures(w: &mut Fixture<'_>) {
    for kind in [SOCK_STREAM, SOCK_DGRAM] {
        let fd = w.a.socket(w.domain(), kind).unwrap();
        let get = |w: &Fixture<'_>, space| w.a.getsockopt_into(fd, SOL_SOCKET, SO_TXTIME, space);
        w.log("default", [0, 4, 7, 8, 16].map(|space| get(w, space)));
        let values = [
            txtime(libc::CLOCK_MONOTONIC, 0),
            txtime(libc::CLOCK_MONOTONIC, REPORT_ERRORS),
            txtime(libc::CLOCK_TAI, DEADLINE_MODE | REPORT_ERRORS),
            txtime(libc::CLOCK_REALTIME, DEADLINE_MODE),
            txtime(libc::CLOCK_BOOTTIME, 0),
            txtime(77, 0),
            txtime(-1, 0),
            txtime(libc::CLOCK_MONOTONIC, 4),
            txtime(libc::CLOCK_MONOTONIC, -1),
            txtime(libc::CLOCK_MONOTONIC, 0)[..7].to_vec(),
            [txtime(libc::CLOCK_MONOTONIC, 0), vec![0]].concat(),
            word(1).to_vec(),
            Vec::new(),
        ];
        for value in values {
            let set = w.a.setsockopt(fd, SOL_SOCKET, SO_TXTIME, &value);
            w.log("set", (value, set, get(w, 8)));
        }
    }
}

pub fn departures_need_the_option(w: &mut Fixture<'_>) {
    let (a, b) = (w.a.socket(w.domain(), SOCK_DGRAM).unwrap(), w.b.socket(w.domain(), SOCK_DGRAM).unwrap());
    w.a.bind(a, &w.at_a(0)).unwrap();
    let to = w.at_a(port(&w.a.getsockname(a).unwrap()));
    let soon = nanos(clock_gettime(ClockId::Monotonic)) + 5 * MS;
    let times = [
        ("none", control(SOL_SOCKET, SCM_TXTIME, &[0; 8])),
        ("past", control(SOL_SOCKET, SCM_TXTIME, &1i64.to_ne_bytes())),
        ("soon", control(SOL_SOCKET, SCM_TXTIME, &soon.to_ne_bytes())),
        ("short", control(SOL_SOCKET, SCM_TXTIME, &[1; 4])),
        ("long", control(SOL_SOCKET, SCM_TXTIME, &[1; 16])),
        ("twice", [0i64, 1].map(|at| control(SOL_SOCKET, SCM_TXTIME, &at.to_ne_bytes())).concat()),
    ];
    for is_on in [false, true] {
        if is_on {
            let value = txtime(libc::CLOCK_MONOTONIC, REPORT_ERRORS);
            w.log("on", w.b.setsockopt(b, SOL_SOCKET, SO_TXTIME, &value));
        }
        for (label, cmsg) in &times {
            let sent = w.b.send_to(b, label.as_bytes(), Some(&to), cmsg, 0);
            w.log(label, sent);
            if sent.is_ok() {
                w.wait(w.a, a, libc::POLLIN);
                w.log("received", w.a.recv(a, 100, 0));
            }
        }
    }
    w.log("no error", w.b.recv_from(b, 100, 100, MSG_ERRQUEUE | MSG_DONTWAIT));
    let (accepted, stream) = w.connection();
    w.log("on", w.b.setsockopt(stream, SOL_SOCKET, SO_TXTIME, &txtime(libc::CLOCK_MONOTONIC, 0)));
    for (label, cmsg) in &times {
        w.log(label, w.b.send_to(stream, label.as_bytes(), None, cmsg, 0));
    }
    w.b.shutdown(stream, libc::SHUT_WR).unwrap();
    w.log("received", w.a.recv(accepted, 100, libc::MSG_WAITALL));
}

fn nanos(time: rustix::time::Timespec) -> i64 {
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn now(clock: i32) -> i64 {
    match clock {
        libc::CLOCK_TAI => nanos(clock_gettime_dynamic(DynamicClockId::Tai).unwrap()),
        _ => nanos(clock_gettime(ClockId::Monotonic)),
    }
}

/// A sender whose datagrams have times, and a receiver, over the loopback of a stack.
struct Timed<'a> {
    host: &'a dyn Sys,
    from: Fd,
    to: Fd,
    clock: i32,
}

impl<'a> Timed<'a> {
    fn new(host: &'a dyn Sys, clock: i32, flags: i32) -> Self {
        let [from, to] = [0, 1].map(|_| host.socket(AF_INET, SOCK_DGRAM).unwrap());
        host.bind(to, &crate::sys::address(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))).unwrap();
        host.connect(from, &host.getsockname(to).unwrap()).unwrap();
        host.setsockopt(from, SOL_SOCKET, SO_TXTIME, &txtime(clock, flags)).unwrap();
        Self { host, from, to, clock }
    }

    fn send(&self, bytes: &[u8], at: i64) -> Result<usize, Errno> {
        let cmsg = control(SOL_SOCKET, SCM_TXTIME, &at.to_ne_bytes());
        self.host.send_to(self.from, bytes, None, &cmsg, MSG_DONTWAIT)
    }

    /// Receives a datagram, and returns it with the time on the clock.
    fn received(&self) -> (Vec<u8>, i64) {
        let mut fds = [libc::pollfd { fd: self.to, events: libc::POLLIN, revents: 0 }];
        assert_eq!(self.host.poll(&mut fds, 20_000), Ok(1), "no datagram");
        (self.host.recv(self.to, 70_000, MSG_DONTWAIT).unwrap(), now(self.clock))
    }
}

#[test]
fn datagrams_leave_in_the_order_of_their_times() {
    let stacks = Stacks::alone();
    for clock in [libc::CLOCK_MONOTONIC, libc::CLOCK_TAI] {
        let timed = Timed::new(stacks.a(), clock, 0);
        let start = now(clock);
        for (byte, ms) in [(b'd', 160), (b'b', 80), (b'c', 120), (b'e', 160), (b'a', 40)] {
            timed.send(&[byte], start + ms * MS).unwrap();
        }
        stacks.a().send(timed.from, b"0", 0).unwrap();
        for (byte, ms) in [(b'0', 0), (b'a', 40), (b'b', 80), (b'c', 120), (b'd', 160), (b'e', 160)] {
            let (bytes, at) = timed.received();
            assert_eq!(bytes, [byte]);
            assert!(at >= start + ms * MS, "{byte} came {} ns early", start + ms * MS - at);
        }
    }
}

#[test]
fn late_and_distant_datagrams_follow_the_clock() {
    let stacks = Stacks::alone();
    let queue = MSG_ERRQUEUE | MSG_DONTWAIT;
    let timed = Timed::new(stacks.a(), libc::CLOCK_MONOTONIC, REPORT_ERRORS);
    timed.send(b"late", now(timed.clock) - 1000 * MS).unwrap();
    timed.send(b"beyond the horizon", now(timed.clock) + 11_000 * MS).unwrap();
    timed.send(b"in time", now(timed.clock) + MS).unwrap();
    assert_eq!((timed.received().0, timed.received().0), (b"late".to_vec(), b"in time".to_vec()));
    assert_eq!(stacks.a().recv_from(timed.from, 100, 100, queue).err(), Some(Errno::AGAIN));
    for flags in [0, REPORT_ERRORS, REPORT_ERRORS | DEADLINE_MODE] {
        let timed = Timed::new(stacks.a(), libc::CLOCK_TAI, flags);
        let late = now(timed.clock) - MS;
        timed.send(b"late", late).unwrap();
        let ahead = now(timed.clock) + 60 * MS;
        timed.send(b"in time", ahead).unwrap();
        let (bytes, at) = timed.received();
        assert_eq!(bytes, b"in time");
        assert_eq!(at >= ahead, flags & DEADLINE_MODE == 0, "a deadline is the last time, not the first");
        let report = stacks.a().recv_from(timed.from, 100, 100, queue);
        if flags & REPORT_ERRORS == 0 {
            assert_eq!(report.err(), Some(Errno::AGAIN));
            continue;
        }
        let report = report.unwrap();
        assert!(report.bytes.ends_with(b"late"));
        let (info, data) = (late as u32, (late >> 32) as u32);
        // EINVAL, SO_EE_ORIGIN_TXTIME, SO_EE_CODE_TXTIME_INVALID_PARAM.
        let expected = [&word(22)[..], &[6, 0, 1, 0], &info.to_ne_bytes(), &data.to_ne_bytes()].concat();
        assert_eq!(report.control[8..16], [word(libc::IPPROTO_IP), word(libc::IP_RECVERR)].concat());
        assert_eq!(report.control[16..32], expected);
    }
}

/// A socket holds as much as its buffer has room for, and its close loses nothing.
// limit: bytes of datagrams that a socket holds until their time
#[test]
fn held_datagrams_are_limited_and_outlive_their_socket() {
    let stacks = Stacks::alone();
    let timed = Timed::new(stacks.a(), libc::CLOCK_MONOTONIC, 0);
    stacks.a().setsockopt(timed.to, SOL_SOCKET, libc::SO_RCVBUF, &word(1 << 22)).unwrap();
    let at = now(timed.clock) + 1500 * MS;
    let mut held = 0u32;
    let full = loop {
        match timed.send(&[&held.to_ne_bytes()[..], &[0; 1000]].concat(), at) {
            Ok(_) => held += 1,
            Err(error) if held > 0 && now(timed.clock) < at => {
                assert_eq!(error, Errno::AGAIN);
                // The stack may be about to take what was written.
                std::thread::sleep(Duration::from_millis(20));
                match timed.send(&[&held.to_ne_bytes()[..], &[0; 1000]].concat(), at) {
                    Ok(_) => held += 1,
                    Err(error) => break error,
                }
            }
            Err(error) => panic!("{error}"),
        }
        assert!(held < 20_000, "no limit");
    };
    assert_eq!(full, Errno::AGAIN);
    stacks.a().close(timed.from).unwrap();
    for number in 0..held {
        let (bytes, received) = timed.received();
        assert_eq!(bytes[..4], number.to_ne_bytes(), "of {held}");
        assert!(received >= at);
    }
}

pub mod tests {
    crate::cases! {
        ; both {
            option_of_departures
            departures_need_the_option
        }
    }
}
