//! Transmit timestamps: `SO_TIMESTAMPING` and the error queue.

use crate::sys::{Fd, Fixture, Message, control, port, word};
use core::ffi::c_int;
use libc::{IPPROTO_IP, IPPROTO_IPV6, MSG_DONTWAIT, MSG_ERRQUEUE, SO_TIMESTAMPING, SOCK_DGRAM, SOL_SOCKET};
use rustix::io::Errno;

const TX_HARDWARE: u32 = 1;
const TX_SOFTWARE: u32 = 1 << 1;
const SOFTWARE: u32 = 1 << 4;
const OPT_ID: u32 = 1 << 7;
const TX_SCHED: u32 = 1 << 8;
const TX_ACK: u32 = 1 << 9;
const OPT_CMSG: u32 = 1 << 10;
const OPT_TSONLY: u32 = 1 << 11;
const TS_OPT_ID: c_int = 81;
const QUEUE: c_int = MSG_ERRQUEUE | MSG_DONTWAIT;

fn set(w: &Fixture<'_>, fd: Fd, flags: u32) -> Result<(), Errno> {
    w.a.setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPING, &flags.to_ne_bytes())
}

/// Returns an entry of the error queue with times as whether they are set, and addresses as whether they are
/// those of the sender: the end of the bytes and their number, the control messages, and the flags.
fn described(w: &Fixture<'_>, got: &Message) -> (usize, String, Vec<String>, c_int) {
    let own = w.at_a(0);
    let own = if w.domain() == libc::AF_INET { &own[4..8] } else { &own[8..24] };
    let (mut rest, mut controls) = (&got.control[..], Vec::new());
    while rest.len() >= 16 {
        let word = |at: usize| i32::from_ne_bytes(rest[at..at + 4].try_into().unwrap());
        let (len, level, kind) = (word(0) as usize, word(8), word(12));
        let value = &rest[16..len];
        let is_own = |at: usize| value.get(at..at + own.len()).is_some_and(|bytes| bytes == own);
        controls.push(match (level, kind) {
            (SOL_SOCKET, _) => {
                let times: Vec<bool> = value.chunks(16).map(|time| time.iter().any(|b| *b != 0)).collect();
                format!("{kind} {times:?}")
            }
            (IPPROTO_IP, libc::IP_PKTINFO) => format!("IP_PKTINFO {}", is_own(4)),
            (IPPROTO_IPV6, libc::IPV6_PKTINFO) => format!("IPV6_PKTINFO {}", value.len()),
            _ => {
                let family = u16::from_ne_bytes([value[16], value[17]]);
                let address_at = 16 + if w.domain() == libc::AF_INET { 4 } else { 8 };
                format!("{level} {kind} {:?} {family} {} {}", &value[..16], value.len(), is_own(address_at))
            }
        });
        rest = rest.get(len.next_multiple_of(8)..).unwrap_or_default();
    }
    let tail = &got.bytes[got.bytes.len().saturating_sub(5)..];
    (got.count, String::from_utf8_lossy(tail).into_owned(), controls, got.flags)
}

/// Logs the entries of the error queue, and the readiness before and after.
fn log(w: &mut Fixture<'_>, label: &str, fd: Fd) {
    let before = w.ready(w.a, fd);
    w.log(label, before);
    loop {
        match w.a.recv_from(fd, 100, 200, QUEUE) {
            Ok(got) => {
                let entry = described(w, &got);
                w.log("entry", (entry, got.from));
            }
            Err(error) => {
                w.log("end", (error, w.ready(w.a, fd)));
                return;
            }
        }
    }
}

/// Creates a sender at host `a` and a receiver at host `b`. Returns them and the receiver's address.
fn sender(w: &Fixture<'_>) -> (Fd, Fd, Vec<u8>) {
    let (a, b) = (w.a.socket(w.domain(), SOCK_DGRAM).unwrap(), w.b.socket(w.domain(), SOCK_DGRAM).unwrap());
    w.a.bind(a, &w.at_a(0)).unwrap();
    w.b.bind(b, &w.at_b(0)).unwrap();
    let to = w.at_b(port(&w.b.getsockname(b).unwrap()));
    // The kernel begins to take timestamps with a delay, and the first packet finds the neighbour.
    set(w, a, SOFTWARE).unwrap();
    w.a.send_to(a, b"", Some(&to), &[], 0).unwrap();
    w.wait(w.b, b, libc::POLLIN);
    w.b.recv(b, 1, 0).unwrap();
    w.settle();
    (a, b, to)
}

pub fn timestamps_of_datagrams(w: &mut Fixture<'_>) {
    let (a, b, to) = sender(w);
    let send = |w: &Fixture<'_>, bytes: &[u8]| {
        let sent = w.a.send_to(a, bytes, Some(&to), &[], 0);
        w.wait(w.b, b, libc::POLLIN);
        (sent, w.b.recv(b, 100, 0))
    };
    log(w, "none", a);
    for (label, flags) in [
        ("sent", SOFTWARE | TX_SOFTWARE),
        ("scheduled", SOFTWARE | TX_SCHED),
        ("hardware", SOFTWARE | TX_HARDWARE),
        ("acknowledged", SOFTWARE | TX_ACK),
        ("all", SOFTWARE | TX_SOFTWARE | TX_SCHED | TX_HARDWARE | TX_ACK),
        ("without the packet", SOFTWARE | TX_SOFTWARE | TX_SCHED | OPT_TSONLY),
        ("not reported", TX_SOFTWARE | OPT_TSONLY),
        ("with control messages", SOFTWARE | TX_SOFTWARE | OPT_CMSG),
        ("without a packet for them", SOFTWARE | TX_SOFTWARE | OPT_CMSG | OPT_TSONLY),
        ("numbered", SOFTWARE | TX_SOFTWARE | TX_SCHED | OPT_TSONLY | OPT_ID),
        ("hardware, numbered", SOFTWARE | TX_HARDWARE | OPT_ID),
        ("numbered after it", SOFTWARE | TX_SOFTWARE | OPT_TSONLY | OPT_ID),
        ("off", SOFTWARE),
        ("numbered again", SOFTWARE | TX_SOFTWARE | OPT_TSONLY | OPT_ID),
    ] {
        if flags & OPT_CMSG != 0 {
            let [v4, v6] = [(IPPROTO_IP, libc::IP_PKTINFO), (IPPROTO_IPV6, libc::IPV6_RECVPKTINFO)];
            let (level, name) = if w.domain() == libc::AF_INET { v4 } else { v6 };
            w.a.setsockopt(a, level, name, &word(1)).unwrap();
        }
        w.log(label, (set(w, a, flags), send(w, b"hello"), send(w, b"second")));
        log(w, label, a);
    }
    set(w, a, SOFTWARE | TX_SOFTWARE).unwrap();
    w.log("with SO_TIMESTAMP", w.a.setsockopt(a, SOL_SOCKET, libc::SO_TIMESTAMP, &word(1)));
    w.log("send", send(w, b"hello"));
    log(w, "both", a);
    w.a.setsockopt(a, SOL_SOCKET, libc::SO_TIMESTAMP, &word(0)).unwrap();
    w.log("urgent", w.a.setsockopt(a, SOL_SOCKET, libc::SO_SELECT_ERR_QUEUE, &word(1)));
    w.log("send", send(w, b"hello"));
    w.log("no pending error", w.a.getsockopt(a, SOL_SOCKET, libc::SO_ERROR));
    w.log(
        "short buffers",
        w.a.recv_from(a, 10, 16, QUEUE).map(|got| (got.count, got.control.len(), got.flags)),
    );
    log(w, "none left", a);
    w.log("send", send(w, b"hello"));
    w.log("without control messages", w.a.recv(a, 1000, QUEUE).map(|bytes| bytes.len()));
    w.log("none left", w.a.recv(a, 1000, QUEUE));
}

pub fn timestamps_of_single_datagrams(w: &mut Fixture<'_>) {
    let (a, b, to) = sender(w);
    let request = |flags: u32| control(SOL_SOCKET, SO_TIMESTAMPING, &flags.to_ne_bytes());
    let number = |number: u32| control(SOL_SOCKET, TS_OPT_ID, &number.to_ne_bytes());
    for flags in
        [SOFTWARE | OPT_TSONLY, SOFTWARE | OPT_TSONLY | OPT_ID, SOFTWARE | TX_SCHED | OPT_TSONLY | OPT_ID]
    {
        w.log("socket", (flags, set(w, a, flags)));
        for (label, cmsgs) in [
            ("nothing", request(0)),
            ("hardware", request(TX_HARDWARE)),
            ("sent", request(TX_SOFTWARE)),
            ("sent and scheduled", request(TX_SOFTWARE | TX_SCHED)),
            ("acknowledged", request(TX_ACK)),
            ("completed", request(1 << 18)),
            ("not of a message", request(SOFTWARE)),
            ("also not of a message", request(TX_SOFTWARE | OPT_ID)),
            ("long", control(SOL_SOCKET, SO_TIMESTAMPING, &[2, 0, 0, 0, 0, 0, 0, 0])),
            ("short", control(SOL_SOCKET, SO_TIMESTAMPING, &[2])),
            ("new", control(SOL_SOCKET, 65, &TX_SOFTWARE.to_ne_bytes())),
            ("number", [request(TX_SOFTWARE), number(77)].concat()),
            ("number alone", number(78)),
            ("short number", control(SOL_SOCKET, TS_OPT_ID, &[1])),
            ("after it", request(TX_SOFTWARE)),
            ("twice", [request(TX_SOFTWARE), request(TX_SCHED)].concat()),
            ("mark", control(SOL_SOCKET, libc::SO_MARK, &word(1))),
            ("priority", control(SOL_SOCKET, libc::SO_PRIORITY, &word(3))),
            ("departure", control(SOL_SOCKET, libc::SCM_TXTIME, &[0; 8])),
            ("unknown", control(SOL_SOCKET, 99, &word(0))),
            ("rights", control(SOL_SOCKET, libc::SCM_RIGHTS, &word(0))),
        ] {
            let sent = w.a.send_to(a, b"hello", Some(&to), &cmsgs, 0);
            w.log(label, sent);
            if sent.is_ok() {
                w.wait(w.b, b, libc::POLLIN);
                w.b.recv(b, 100, 0).unwrap();
            }
            log(w, label, a);
        }
    }
    w.log("without a message", w.a.send_to(a, b"hello", Some(&to), &[], 0));
    log(w, "without a message", a);
}

/// A datagram that several calls write has the timestamps that its first call asks for. One that is cut into
/// several has one number, and a failed call none.
pub fn timestamps_of_long_datagrams(w: &mut Fixture<'_>) {
    let (a, b, to) = sender(w);
    let request = control(SOL_SOCKET, SO_TIMESTAMPING, &TX_SOFTWARE.to_ne_bytes());
    w.log("numbers", set(w, a, SOFTWARE | OPT_TSONLY | OPT_ID));
    w.log("first", w.a.send_to(a, b"ab", Some(&to), &request, libc::MSG_MORE));
    log(w, "not yet", a);
    w.log("last", w.a.send_to(a, b"cd", Some(&to), &[], 0));
    w.wait(w.b, b, libc::POLLIN);
    w.log("received", w.b.recv(b, 100, 0));
    log(w, "after it", a);
    w.log("first", w.a.send_to(a, b"ab", Some(&to), &[], libc::MSG_MORE));
    w.log("on", set(w, a, SOFTWARE | OPT_TSONLY | OPT_ID | TX_SOFTWARE));
    w.log("last", w.a.send_to(a, b"cd", Some(&to), &request, 0));
    w.wait(w.b, b, libc::POLLIN);
    w.log("received", w.b.recv(b, 100, 0));
    log(w, "the first call decides", a);
    w.log("too long", w.a.send_to(a, &[0; 65_600], Some(&to), &[], 0));
    w.log("segments", w.a.setsockopt(a, libc::IPPROTO_UDP, libc::UDP_SEGMENT, &word(1000)));
    w.log("send", w.a.send_to(a, &[7; 2500], Some(&to), &[], 0));
    for _ in 0..3 {
        w.wait(w.b, b, libc::POLLIN);
        w.log("received", w.b.recv(b, 2000, 0).map(|bytes| bytes.len()));
    }
    log(w, "segments", a);
}

/// A connection: the peer reads and answers, so that everything is acknowledged.
pub fn timestamps_of_streams(w: &mut Fixture<'_>) {
    const OPT_ID_TCP: u32 = 1 << 16;
    let (a, b) = w.connection();
    set(w, a, SOFTWARE).unwrap();
    w.settle();
    let send = |w: &Fixture<'_>, bytes: &[u8], cmsgs: &[u8]| {
        let sent = w.a.send_to(a, bytes, None, cmsgs, 0);
        if sent.is_ok() {
            w.wait(w.b, b, libc::POLLIN);
            w.b.recv(b, 100, 0).unwrap();
            w.b.send(b, b"!", 0).unwrap();
            w.wait(w.a, a, libc::POLLIN);
            w.a.recv(a, 1, 0).unwrap();
            w.settle();
        }
        sent
    };
    let all = TX_SCHED | TX_SOFTWARE | TX_ACK;
    log(w, "none", a);
    for (label, flags) in [
        ("sent", SOFTWARE | OPT_TSONLY | TX_SOFTWARE),
        ("scheduled", SOFTWARE | OPT_TSONLY | TX_SCHED),
        ("acknowledged", SOFTWARE | OPT_TSONLY | TX_ACK),
        ("hardware", SOFTWARE | OPT_TSONLY | TX_HARDWARE),
        ("all", SOFTWARE | OPT_TSONLY | all),
        ("numbered", SOFTWARE | OPT_TSONLY | OPT_ID | all),
        ("off", SOFTWARE | OPT_TSONLY),
        ("numbered from the next byte on", SOFTWARE | OPT_TSONLY | OPT_ID | OPT_ID_TCP | all),
        ("not reported", OPT_TSONLY | TX_ACK),
    ] {
        w.log(label, (set(w, a, flags), send(w, b"hello", &[])));
        log(w, label, a);
        w.log("second", send(w, b"of six", &[]));
        log(w, label, a);
    }
    w.log("numbers", set(w, a, SOFTWARE | OPT_TSONLY | OPT_ID));
    let request = |flags: u32| control(SOL_SOCKET, SO_TIMESTAMPING, &flags.to_ne_bytes());
    let number = control(SOL_SOCKET, TS_OPT_ID, &word(7));
    for (label, cmsgs) in [
        ("one write", request(all)),
        ("nothing", request(0)),
        ("acknowledged", request(TX_ACK)),
        ("not of a message", request(SOFTWARE)),
        ("number", [request(TX_ACK), number].concat()),
    ] {
        w.log(label, send(w, b"hello", &cmsgs));
        log(w, label, a);
    }
    w.log("without a message", send(w, b"hello", &[]));
    log(w, "without a message", a);
    w.log("acknowledged", set(w, a, SOFTWARE | OPT_TSONLY | OPT_ID | TX_ACK));
    let set_of_one = w.a.epoll_create().unwrap();
    w.log("add", w.a.epoll_ctl(set_of_one, libc::EPOLL_CTL_ADD, a, libc::EPOLLET as u32, 5));
    w.log("none yet", w.a.epoll_wait(set_of_one, 4, 0));
    w.log("send", w.a.send(a, b"x", 0));
    w.log("edge", w.a.epoll_wait(set_of_one, 4, 10_000));
    log(w, "edge", a);
    // Whether urgent data has timestamps differs; the write after it has none.
    w.log("off", set(w, a, SOFTWARE | OPT_TSONLY));
    w.log("urgent", w.a.send_to(a, b"u", None, &request(TX_SOFTWARE), libc::MSG_OOB));
    w.wait(w.b, b, libc::POLLPRI);
    w.settle();
    while w.a.recv_from(a, 100, 200, QUEUE).is_ok() {}
    w.log("after it", send(w, b"hello", &[]));
    log(w, "after it", a);
}

pub mod tests {
    crate::cases! {
        ; both {
            timestamps_of_datagrams
            timestamps_of_single_datagrams
            timestamps_of_long_datagrams
            timestamps_of_streams
        }
    }
}
