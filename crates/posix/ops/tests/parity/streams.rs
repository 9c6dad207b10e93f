//! Connections: establishment, data transfer and closing.

use crate::sys::{ALL, Fixture, control, names, port, word};
use libc::{
    AF_INET, IPPROTO_TCP, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC, MSG_WAITALL, SHUT_RD, SHUT_RDWR,
    SHUT_WR, SO_RCVTIMEO, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET, TCP_QUICKACK,
};
use rustix::io::Errno;
use std::time::{Duration, SystemTime};

pub fn bytes_in_both_directions(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.log("send", w.b.send(b, b"hello", 0));
    w.wait(w.a, a, libc::POLLIN);
    w.log("bytes queued", w.a.readable_bytes(a));
    w.log("peek", w.a.recv(a, 3, MSG_PEEK));
    w.log("truncate", w.a.recv(a, 2, MSG_TRUNC));
    w.log("recv", w.a.recv(a, 100, 0));
    w.log("empty", w.a.recv(a, 100, MSG_DONTWAIT));
    w.log("reply", w.a.send(a, b"and back", 0));
    w.log("all bytes", w.b.recv(b, 8, MSG_WAITALL));
    w.log("zero-length buffer", w.b.recv(b, 0, MSG_DONTWAIT));
    w.log("unknown flag", w.b.send(b, b"x", libc::MSG_FASTOPEN | MSG_NOSIGNAL).is_err());
}

pub fn eof_follows_the_data(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.b.send(b, b"last", 0).unwrap();
    w.log("shutdown", w.b.shutdown(b, libc::SHUT_WR));
    w.wait(w.a, a, libc::POLLRDHUP);
    w.log("poll", w.ready(w.a, a));
    w.log("recv", w.a.recv(a, 100, 0));
    w.log("recv at the end", w.a.recv(a, 100, 0));
    w.log("send after the peer's end", w.a.send(a, b"still", 0));
    w.log("recv of the peer", w.b.recv(b, 100, 0));
    w.log("send after shutdown", w.b.send(b, b"x", MSG_NOSIGNAL));
    w.log("close", w.a.close(a));
    w.wait(w.b, b, libc::POLLHUP);
    w.log("poll after both", w.ready(w.b, b));
    w.log("recv after both", w.b.recv(b, 1, 0));
    w.log("send after both", w.b.send(b, b"x", MSG_NOSIGNAL));
    w.log("shutdown after both", w.b.shutdown(b, libc::SHUT_RDWR));
}

pub fn reset_is_reported_once(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let linger = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    w.log("linger", w.b.setsockopt(b, libc::SOL_SOCKET, libc::SO_LINGER, &linger));
    w.b.close(b).unwrap();
    w.wait(w.a, a, libc::POLLHUP);
    w.log("poll", w.ready(w.a, a));
    w.log("recv", w.a.recv(a, 1, 0));
    w.log("poll again", w.ready(w.a, a));
    w.log("recv again", w.a.recv(a, 1, 0));
    w.log("send", w.a.send(a, b"x", MSG_NOSIGNAL));
    w.log("error", w.a.getsockopt(a, libc::SOL_SOCKET, libc::SO_ERROR));
}

/// A reset ends a call that waits for space after it has sent something. The call returns how much it has
/// sent; the next one reports the reset, and only the one after that is `EPIPE` with its signal.
pub fn reset_while_a_sender_waits(w: &mut Fixture<'_>) {
    const LEN: usize = 64 << 20;
    let linger = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    for flags in [MSG_NOSIGNAL, MSG_NOSIGNAL | libc::MSG_OOB] {
        let (a, b) = w.connection();
        w.b.setsockopt(b, SOL_SOCKET, libc::SO_LINGER, &linger).unwrap();
        let sent = std::thread::scope(|scope| {
            let sys = w.a;
            let sender = scope.spawn(move || sys.send(a, &vec![0; LEN], flags));
            w.settle();
            w.b.close(b).unwrap();
            sender.join().unwrap()
        });
        w.log("sent in part", sent.is_ok_and(|sent| sent > 0 && sent < LEN));
        w.log("poll", w.ready(w.a, a));
        w.log("next send", w.a.send(a, b"x", MSG_NOSIGNAL));
        w.log("last send", w.a.send(a, b"x", MSG_NOSIGNAL));
        w.log("recv", w.a.recv(a, 1, 0));
    }
}

pub fn close_with_unread_data_resets(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.b.send(b, b"never read", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.a.close(a).unwrap();
    w.wait(w.b, b, libc::POLLHUP);
    w.log("poll", w.ready(w.b, b));
    w.log("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.log("error again", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.log("send", w.b.send(b, b"x", MSG_NOSIGNAL));
    w.log("recv", w.b.recv(b, 1, 0));
}

/// Proxies respond like this when they are done with a client.
pub fn data_before_a_reset_arrives(w: &mut Fixture<'_>) {
    let linger = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    for unread in [false, true] {
        let (a, b) = w.connection();
        if unread {
            w.b.send(b, b"never read", 0).unwrap();
            w.wait(w.a, a, libc::POLLIN);
        } else {
            w.a.setsockopt(a, libc::SOL_SOCKET, libc::SO_LINGER, &linger).unwrap();
        }
        w.log("reply", w.a.send(a, &[7; 3000], 0));
        w.log("close", w.a.close(a));
        w.wait(w.b, b, libc::POLLHUP);
        w.log("bytes queued", w.b.readable_bytes(b));
        w.log("reply", w.b.recv(b, 4000, MSG_WAITALL).map(|bytes| bytes.len()));
        w.log("end", w.b.recv(b, 1, 0));
        w.log("after the end", w.b.recv(b, 1, 0));
    }
}

pub fn connect_works_after_refusal(w: &mut Fixture<'_>) {
    let (listener, port) = w.listener(0);
    w.a.close(listener).unwrap();
    let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
    w.log("connect", w.b.connect(b, &w.at_a(port)));
    w.log("poll", w.ready(w.b, b));
    w.log("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.log("again", w.b.connect(b, &w.at_a(port)));
    let (_listener, port) = w.listener(0);
    w.log("connect to a listener", w.b.connect(b, &w.at_a(port)));
    w.log("connect when connected", w.b.connect(b, &w.at_a(port)));
    let b = w.b.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    let (listener, port) = w.listener(0);
    w.a.close(listener).unwrap();
    w.log("nonblocking connect", w.b.connect(b, &w.at_a(port)));
    w.wait(w.b, b, libc::POLLHUP);
    w.log("poll", w.ready(w.b, b));
    w.log("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.log("poll after the error", w.ready(w.b, b));
}

pub fn nonblocking_connect(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(SOCK_NONBLOCK);
    w.log("no connection yet", w.a.accept4(listener, 0));
    let b = w.b.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.log("poll", names(w.wait(w.b, b, libc::POLLOUT).cast_unsigned().into()));
    w.log("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.log("connect again", w.b.connect(b, &w.at_a(at)));
    w.log("third connect", w.b.connect(b, &w.at_a(at)));
    w.log("readable", names(w.wait(w.a, listener, ALL).cast_unsigned().into()));
    let a = w.a.accept4(listener, SOCK_NONBLOCK).unwrap();
    w.log("no further connection", w.a.accept4(listener, 0));
    w.log("unknown flags", w.a.accept4(listener, 1));
    w.log("recv", w.a.recv(a, 1, 0));
    let peer = port(&w.a.getpeername(a).unwrap());
    let own = port(&w.b.getsockname(b).unwrap());
    w.log("ports agree", peer == own);
    w.log("port", port(&w.a.getsockname(a).unwrap()) == at);
}

pub fn unconnected_sockets(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    w.log("poll", w.ready(w.a, fd));
    w.log("recv", w.a.recv(fd, 1, 0));
    w.log("send", w.a.send(fd, b"x", MSG_NOSIGNAL));
    w.log("shutdown", w.a.shutdown(fd, libc::SHUT_WR));
    w.log("accept", w.a.accept4(fd, 0));
    w.log("peer", w.a.getpeername(fd));
    w.log("getsockname", w.a.getsockname(fd));
    w.log("short address", w.a.bind(fd, &w.at_a(0)[..15]));
    w.log("wrong family", w.a.bind(fd, &[10; 28]));
    w.log("foreign address", w.a.bind(fd, &[2, 0, 0, 0, 192, 0, 2, 77, 0, 0, 0, 0, 0, 0, 0, 0]));
    w.log("bind", w.a.bind(fd, &w.at_a(0)));
    w.log("bind again", w.a.bind(fd, &w.at_a(0)));
    w.log("port assigned", port(&w.a.getsockname(fd).unwrap()) != 0);
    w.log("listen", w.a.listen(fd, 1));
    w.log("listen again", w.a.listen(fd, 2));
    w.log("poll of a listener", w.ready(w.a, fd));
    w.log("recv of a listener", w.a.recv(fd, 1, 0));
    w.log("send of a listener", w.a.send(fd, b"x", MSG_NOSIGNAL));
    w.log("connect of a listener", w.a.connect(fd, &w.at_b(1)));
    w.log("peer of a listener", w.a.getpeername(fd));
    w.log("listens", w.a.getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN));
    w.log("close", w.a.close(fd));
    w.log("close again", w.a.close(fd));
    w.log("recv after close", w.a.recv(fd, 1, 0));
    w.log("invalid descriptor", w.a.connect(-1, &w.at_b(1)));
}

pub fn duplicated_descriptors(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let copy = w.a.dup(a).unwrap();
    w.log("close one", w.a.close(a));
    w.log("send on the other", w.a.send(copy, b"x", 0));
    w.log("received", w.b.recv(b, 1, 0));
    w.log("still open", w.b.recv(b, 1, MSG_DONTWAIT));
    w.log("set the nonblocking flag", w.a.set_nonblocking(copy, true));
    let third = w.a.dup(copy).unwrap();
    w.log("nonblocking flag of a duplicate", w.a.recv(third, 1, 0));
    w.a.close(copy).unwrap();
    w.a.close(third).unwrap();
    w.wait(w.b, b, libc::POLLRDHUP);
    w.log("end of file", w.b.recv(b, 1, 0));
}

pub fn full_buffers(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.b.set_nonblocking(b, true).unwrap();
    let chunk = [7; 65_536];
    let mut sent = 0;
    loop {
        match w.b.send(b, &chunk, 0) {
            Ok(count) => sent += count,
            Err(error) => {
                assert_eq!(error, Errno::AGAIN);
                w.settle();
                if w.b.send(b, &chunk[..1], 0) == Err(Errno::AGAIN) {
                    break;
                }
                sent += 1;
            }
        }
    }
    w.log("poll when full", w.ready(w.b, b));
    let mut received = 0;
    while received < sent {
        let bytes = w.a.recv(a, 1 << 20, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
        received += bytes.len();
    }
    w.wait(w.b, b, libc::POLLOUT);
    w.log("all bytes", received == sent);
    w.log("poll when empty", w.ready(w.b, b));
}

pub fn shutdown_of_reading(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.log("shutdown", w.a.shutdown(a, libc::SHUT_RD));
    w.log("poll", w.ready(w.a, a));
    w.log("recv", w.a.recv(a, 1, 0));
    w.b.send(b, b"after all", 0).unwrap();
    w.settle();
    w.log("recv of queued data", w.a.recv(a, 100, 0));
    w.log("recv at the end", w.a.recv(a, 100, 0));
    w.log("invalid direction", w.a.shutdown(a, 3));
    w.log("both", w.a.shutdown(a, libc::SHUT_RDWR));
    w.log("poll after both", w.ready(w.a, a));
    w.wait(w.b, b, libc::POLLRDHUP);
    w.log("peer", w.ready(w.b, b));
}

pub fn msg_more(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.log("first part with MSG_MORE", w.b.send(b, b"ab", libc::MSG_MORE));
    w.log("writev", w.b.sendv(b, &[b"c", b"de"], libc::MSG_MORE));
    w.log("last part", w.b.send(b, b"f", 0));
    w.log("all bytes", w.a.recv(a, 6, libc::MSG_WAITALL));
    // An acknowledgement would release the byte.
    w.settle();
    w.log("held with MSG_MORE", w.b.send(b, b"x", libc::MSG_MORE));
    w.log("empty send", w.b.send(b, b"", 0));
    w.log("empty writev", w.b.sendv(b, &[b"", b""], 0));
    w.settle();
    w.log("nothing is released", w.ready(w.a, a));
    w.log("last part", w.b.send(b, b"y", 0));
    w.log("both parts", w.a.recv(a, 2, libc::MSG_WAITALL));
    w.log("first part with MSG_MORE", w.b.send(b, b"gh", libc::MSG_MORE));
    w.log("shutdown", w.b.shutdown(b, libc::SHUT_WR));
    w.log("available bytes", w.a.recv(a, 3, libc::MSG_WAITALL));
    w.log("end of file", w.a.recv(a, 3, 0));
}

pub fn data_after_full_shutdown_resets(w: &mut Fixture<'_>) {
    for ways in [[SHUT_RDWR, SHUT_RDWR], [SHUT_RD, SHUT_WR], [SHUT_WR, SHUT_RD]] {
        let (a, b) = w.connection();
        w.b.send(b, b"before", 0).unwrap();
        w.wait(w.a, a, libc::POLLIN);
        for way in ways {
            w.log("shutdown", w.a.shutdown(a, way));
        }
        w.settle();
        w.log("recv", w.a.recv(a, 10, 0));
        w.log("no event", w.ready(w.a, a));
        w.log("send", w.b.send(b, b"after", MSG_NOSIGNAL));
        w.wait(w.b, b, libc::POLLHUP);
        w.log("sender", w.ready(w.b, b));
        w.log("second send", w.b.send(b, b"x", MSG_NOSIGNAL));
        w.log("receiver", w.ready(w.a, a));
        w.log("send of the receiver", w.a.send(a, b"x", MSG_NOSIGNAL));
        w.log("second send", w.a.send(a, b"x", MSG_NOSIGNAL));
    }
}

pub fn shutdown_before_connect_result(w: &mut Fixture<'_>) {
    let connecting = |w: &mut Fixture<'_>, to| {
        let b = w.b.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
        w.log("connect", w.b.connect(b, &w.at_a(to)));
        w.settle();
        b
    };
    let (listener, port) = w.listener(0);
    let b = connecting(w, port);
    w.log("shutdown", w.b.shutdown(b, SHUT_WR));
    w.log("connect after establishment", w.b.connect(b, &w.at_a(port)));
    w.a.close(listener).unwrap();
    let b = connecting(w, port);
    w.log("shutdown", w.b.shutdown(b, SHUT_WR));
    w.log("connect after refusal", w.b.connect(b, &w.at_a(port)));
}

pub fn vectored_io_and_select(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.log("sendv", w.b.sendv(b, &[b"ab", b"", b"cde"], 0));
    w.wait(w.a, a, libc::POLLIN);
    w.log(
        "select",
        w.a.select(&[vec![a], vec![a], vec![a]]).map(|(count, sets)| (count, sets.map(|s| s.len()))),
    );
    w.log("recvv", w.a.recvv(a, &[1, 3, 9], 0));
}

pub fn recv_timeout(w: &mut Fixture<'_>) {
    let (a, _b) = w.connection();
    let time = [0i64.to_ne_bytes(), 1000i64.to_ne_bytes()].concat();
    w.a.setsockopt(a, SOL_SOCKET, SO_RCVTIMEO, &time).unwrap();
    w.log("recv", w.a.recv(a, 1, 0));
    w.log("recv of zero bytes", w.a.recv(a, 0, 0));
}

/// Receive timestamps of a stream: the time of the last segment that a read returned.
pub fn timestamps_of_streams(w: &mut Fixture<'_>) {
    const NEW: i32 = 65;
    let (a, b) = w.connection();
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let on = |w: &Fixture<'_>, name, value: u32| w.a.setsockopt(a, SOL_SOCKET, name, &value.to_ne_bytes());
    let options = [
        (libc::SO_TIMESTAMP, 1_000_000),
        (libc::SO_TIMESTAMPNS, 1_000_000_000),
        (63, 1_000_000),
        (64, 1_000_000_000),
        (libc::SO_TIMESTAMPING, 1_000_000_000),
        (NEW, 1_000_000_000),
    ];
    w.log("on", on(w, libc::SO_TIMESTAMP, 1));
    // The kernel begins to take timestamps with a delay.
    w.settle();
    for (name, units) in options {
        let is_timestamping = matches!(name, libc::SO_TIMESTAMPING | NEW);
        w.log("on", on(w, name, if is_timestamping { 0x18 } else { 1 }));
        w.settle();
        w.b.send(b, b"abc", 0).unwrap();
        w.wait(w.a, a, libc::POLLIN);
        for flags in [libc::MSG_PEEK, 0] {
            let mut got = w.a.recv_from(a, 3, 200, flags).unwrap();
            let word = |from: usize| u64::from_ne_bytes(got.control[from..from + 8].try_into().unwrap());
            let arrival =
                Duration::from_secs(word(16)) + Duration::from_nanos(word(24) * (1_000_000_000 / units));
            w.log("timestamp is recent", now().saturating_sub(arrival) < Duration::from_secs(5));
            got.control.splice(16..32, []);
            w.log("message", (got.bytes, got.control, got.flags));
        }
        if is_timestamping {
            w.log("off", on(w, name, 0));
        }
        w.log("off", on(w, libc::SO_TIMESTAMP, 0));
    }
    w.b.send(b, b"abc", 0).unwrap();
    w.log("off", w.a.recv_from(a, 3, 200, 0).map(|got| (got.bytes, got.control, got.flags)));
    w.log("on", (on(w, libc::SO_TIMESTAMP, 1), w.a.setsockopt(a, libc::IPPROTO_TCP, 36, &word(1))));
    w.settle();
    w.b.send(b, b"late", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    std::thread::sleep(Duration::from_millis(1100));
    w.log("on again", on(w, libc::SO_TIMESTAMP, 1));
    w.settle();
    w.log("no control buffer", w.a.recv_from(a, 1, 0, 0).map(|got| (got.bytes, got.control, got.flags)));
    let mut got = w.a.recv_from(a, 2, 200, 0).unwrap();
    let arrival = u64::from_ne_bytes(got.control[16..24].try_into().unwrap());
    w.log("arrival time", now().as_secs() - arrival >= 1);
    got.control.splice(16..32, []);
    w.log("with TCP_INQ", (got.bytes, got.control));
    // Bytes that are peeked at an offset have their own time.
    let before = now() - Duration::from_millis(500);
    w.b.send(b, b"more", 0).unwrap();
    w.settle();
    w.log("peek offset", w.a.setsockopt(a, SOL_SOCKET, libc::SO_PEEK_OFF, &word(1)));
    let got = w.a.recv_from(a, 1, 200, libc::MSG_PEEK).unwrap();
    let word_at = |from: usize| u64::from_ne_bytes(got.control[from..from + 8].try_into().unwrap());
    let arrival = Duration::from_secs(word_at(16)) + Duration::from_micros(word_at(24));
    w.log("peeked at an offset", (got.bytes, arrival > before));
    w.log("no peek offset", w.a.setsockopt(a, SOL_SOCKET, libc::SO_PEEK_OFF, &(-1i32).to_ne_bytes()));
    w.log("all but one", w.a.recv(a, 4, 0));
    // The time of the next byte.
    w.log("no space", w.a.recv_from(a, 0, 200, libc::MSG_DONTWAIT).map(|got| got.control.len()));
    w.b.close(b).unwrap();
    w.wait(w.a, a, libc::POLLRDHUP);
    w.log("rest", w.a.recv_from(a, 9, 200, 0).map(|got| got.control.len()));
    w.log("end of file", w.a.recv_from(a, 9, 200, 0).map(|got| got.control));
}

/// Linux has `SO_PRIORITY` here since 6.14 only.
pub fn control_messages_of_streams(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let long = [control(SOL_SOCKET, libc::SCM_RIGHTS, &word(0)), control(SOL_SOCKET, 999, &word(0))].concat();
    let mut malformed = control(SOL_SOCKET, libc::SO_MARK, &word(0));
    malformed[0] = 33;
    let mut short_header = control(SOL_SOCKET, libc::SO_MARK, &word(0));
    short_header[0] = 15;
    let cases = [
        ("unknown", control(SOL_SOCKET, 999, &word(0))),
        ("unknown without a value", control(SOL_SOCKET, 999, &[])),
        ("unknown after a known one", long),
        ("another level", control(libc::IPPROTO_IP, libc::IP_TTL, &word(0))),
        ("a level that does not exist", control(999, 1, &word(0))),
        ("mark of wrong length", control(SOL_SOCKET, libc::SO_MARK, &[0; 2])),
        ("descriptors", control(SOL_SOCKET, libc::SCM_RIGHTS, &word(0))),
        ("credentials", control(SOL_SOCKET, libc::SCM_CREDENTIALS, &[0; 12])),
        ("times", control(SOL_SOCKET, libc::SO_TIMESTAMPING, &word(2))),
        ("times that a message cannot request", control(SOL_SOCKET, libc::SO_TIMESTAMPING, &word(16))),
        ("times of wrong length", control(SOL_SOCKET, libc::SO_TIMESTAMPING, &[0; 8])),
        ("transmission time", control(SOL_SOCKET, libc::SCM_TXTIME, &[0; 8])),
        ("longer than the buffer", malformed),
        ("shorter than its header", short_header),
        ("a buffer without a message", vec![0; 8]),
    ];
    for (number, (label, control)) in (0u8..).zip(&cases) {
        w.log(label, w.b.send_to(b, &[number], None, control, MSG_NOSIGNAL));
        w.log("nothing to send", w.b.send_to(b, b"", None, control, MSG_NOSIGNAL));
        w.log("urgent", w.b.send_to(b, b"", None, control, MSG_NOSIGNAL | libc::MSG_OOB));
    }
    w.b.shutdown(b, SHUT_WR).unwrap();
    w.log("received", w.a.recv(a, 100, MSG_WAITALL));
    for (label, control) in &cases {
        w.log(label, w.b.send_to(b, b"after shutdown", None, control, MSG_NOSIGNAL));
    }
    let unconnected = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
    for (label, control) in &cases[..2] {
        w.log(label, w.b.send_to(unconnected, b"x", None, control, MSG_NOSIGNAL));
    }
}

pub fn setsockopt_after_reset(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.b.close(b).unwrap();
    w.wait(w.a, a, libc::POLLRDHUP);
    w.a.send(a, b"x", 0).unwrap();
    w.wait(w.a, a, libc::POLLHUP);
    w.log("setsockopt", w.a.setsockopt(a, IPPROTO_TCP, TCP_QUICKACK, &1i32.to_ne_bytes()));
}

/// A connection that is shut down in its handshake reports that.
pub fn shutdown_while_connecting(w: &mut Fixture<'_>) {
    let listener = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
    w.a.bind(listener, &w.at_a(0)).unwrap();
    w.a.listen(listener, 0).unwrap();
    let at = port(&w.a.getsockname(listener).unwrap());
    let all: Vec<_> = (0..32)
        .map(|number| {
            if number == 4 {
                // The queue is full then. SYNs that arrive together are all answered before it is.
                w.settle();
            }
            let fd = w.b.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
            let _ = w.b.connect(fd, &w.at_a(at));
            fd
        })
        .collect();
    w.settle();
    for (fd, how) in all.into_iter().skip(29).zip([SHUT_RD, SHUT_WR, SHUT_RDWR]) {
        w.log("connecting", w.ready(w.b, fd));
        w.log("shutdown", w.b.shutdown(fd, how));
        w.log("poll", w.ready(w.b, fd));
        match how {
            SHUT_RD => w.log("error", w.b.getsockopt(fd, SOL_SOCKET, libc::SO_ERROR)),
            SHUT_WR => w.log("send", w.b.send(fd, b"x", MSG_NOSIGNAL)),
            _ => w.log("recv", w.b.recv(fd, 1, 0)),
        }
        w.log("poll again", w.ready(w.b, fd));
        w.log("recv", w.b.recv(fd, 1, 0));
        w.log("send", w.b.send(fd, b"x", MSG_NOSIGNAL));
        w.log("connect", w.b.connect(fd, &w.at_a(at)));
        w.log("poll in the second handshake", w.ready(w.b, fd));
    }
}

/// A fixed send buffer limits what is queued for a peer that does not read, and `poll` reports space when a
/// third of it is free. The kernel exceeds the size by up to a segment over loopback.
pub fn send_buffer_limits_what_is_queued(w: &mut Fixture<'_>) {
    for size in [50_000, 100_000, 200_000] {
        let (a, b) = w.connection();
        w.a.setsockopt(a, SOL_SOCKET, libc::SO_RCVBUF, &word(4096)).unwrap();
        w.b.setsockopt(b, SOL_SOCKET, libc::SO_SNDBUF, &word(size)).unwrap();
        let block = [0; 1000];
        // Ends when the peer's window is full, too.
        for _ in 0..20 {
            while w.b.send(b, &block, MSG_DONTWAIT | MSG_NOSIGNAL).is_ok() {}
            w.settle();
        }
        let queued = w.b.query(b, libc::TIOCOUTQ).unwrap();
        let expected = 2 * size;
        let is_expected = (queued - expected).abs() * 3 <= expected;
        w.log("queued", if is_expected { expected } else { queued });
        w.log("poll", w.ready(w.b, b));
        // Reading all of what the peer sends ends the shortage.
        let mut read = 0;
        while !w.ready(w.b, b).contains("OUT") && read < 10 * size {
            read += w.a.recv(a, 4096, MSG_DONTWAIT).map_or(0, |bytes| bytes.len()) as i32;
            w.a.catch_up();
            w.b.catch_up();
        }
        w.log("writable before all is read", read < expected + 200_000);
        w.log("send", w.b.send(b, &block, MSG_DONTWAIT));
    }
}

/// With default buffers a peer that does not read takes what fits in Linux's default receive buffer, and
/// reading makes room for more.
pub fn unread_data_fill_the_default_receive_buffer(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let block = [0; 4000];
    let (mut sent, mut idle) = (0, 0);
    while idle < 10 {
        let before = sent;
        while let Ok(count) = w.b.send(b, &block, MSG_DONTWAIT | MSG_NOSIGNAL) {
            sent += count as i32;
        }
        idle = if sent == before { idle + 1 } else { 0 };
        w.settle();
    }
    let taken = sent - w.b.query(b, libc::TIOCOUTQ).unwrap();
    let expected = 120_000;
    w.log("taken", if (taken - expected).abs() * 5 <= expected { expected } else { taken });
    w.log("poll when full", w.ready(w.b, b));
    let mut read = 0;
    while !w.ready(w.b, b).contains("OUT") && read < sent {
        read += w.a.recv(a, 65_536, MSG_DONTWAIT).map_or(0, |bytes| bytes.len()) as i32;
        w.a.catch_up();
        w.b.catch_up();
    }
    w.log("writable before all is read", read < sent);
}

/// A set that has found the fixed send buffer full reports the space that acknowledgements free.
pub fn epoll_reports_a_freed_send_buffer(w: &mut Fixture<'_>) {
    for flags in [libc::EPOLLOUT, libc::EPOLLOUT | libc::EPOLLET] {
        let (a, b) = w.connection();
        w.a.setsockopt(a, SOL_SOCKET, libc::SO_RCVBUF, &word(4096)).unwrap();
        w.b.setsockopt(b, SOL_SOCKET, libc::SO_SNDBUF, &word(20_000)).unwrap();
        for _ in 0..10 {
            while w.b.send(b, &[0; 1000], MSG_DONTWAIT | MSG_NOSIGNAL).is_ok() {}
            w.settle();
        }
        let set = w.b.epoll_create().unwrap();
        w.b.epoll_ctl(set, libc::EPOLL_CTL_ADD, b, flags as u32, 5).unwrap();
        w.log("full", w.b.epoll_wait(set, 4, 0));
        let mut idle = 0;
        // Longer than a sender waits before it probes a closed window.
        while idle < 30 {
            let read = w.a.recv(a, 65_536, MSG_DONTWAIT).map_or(0, |bytes| bytes.len());
            idle = if read == 0 { idle + 1 } else { 0 };
            if read == 0 {
                w.settle();
            }
        }
        w.log("free", w.b.epoll_wait(set, 4, 10_000));
    }
}

pub mod tests {
    crate::cases! {
        data_after_full_shutdown_resets
        shutdown_before_connect_result
        shutdown_while_connecting
        send_buffer_limits_what_is_queued
        unread_data_fill_the_default_receive_buffer
        epoll_reports_a_freed_send_buffer
        vectored_io_and_select
        recv_timeout
        setsockopt_after_reset
        bytes_in_both_directions
        eof_follows_the_data
        reset_is_reported_once
        reset_while_a_sender_waits
        close_with_unread_data_resets
        data_before_a_reset_arrives
        connect_works_after_refusal
        nonblocking_connect
        unconnected_sockets
        duplicated_descriptors
        full_buffers
        shutdown_of_reading
        msg_more
        control_messages_of_streams
        timestamps_of_streams
    }
}
