//! TCP Fast Open: `MSG_FASTOPEN`, and `connect` whose SYN waits for data.

use crate::sys::{Fd, Fixture, word};
use libc::{
    IPPROTO_TCP, MSG_DONTWAIT, MSG_FASTOPEN, MSG_NOSIGNAL, MSG_OOB, MSG_WAITALL, SOCK_NONBLOCK, SOCK_STREAM,
};

/// `connect` with this address disconnects.
const UNSPEC: [u8; 16] = [0; 16];
const TCP_FASTOPEN_NO_COOKIE: i32 = 34;

fn socket(w: &Fixture<'_>, flags: i32) -> Fd {
    w.b.socket(w.domain(), SOCK_STREAM | flags).unwrap()
}

/// Returns a listener that opens connections fast, and its port.
fn listener(w: &mut Fixture<'_>) -> (Fd, u16) {
    let (fd, port) = w.listener(0);
    w.a.setsockopt(fd, IPPROTO_TCP, libc::TCP_FASTOPEN, &word(8)).unwrap();
    (fd, port)
}

/// Makes the client learn a cookie of the server.
fn learn_cookie(w: &mut Fixture<'_>, listener: Fd, port: u16) {
    let b = socket(w, 0);
    w.b.send_to(b, b"x", Some(&w.at_a(port)), &[], MSG_FASTOPEN).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    w.a.close(a).unwrap();
    w.b.close(b).unwrap();
}

/// Returns a client socket that has connected with `TCP_FASTOPEN_CONNECT`, the listener, and the listener's
/// port.
fn deferred(w: &mut Fixture<'_>) -> (Fd, Fd, u16) {
    let (fd, port) = listener(w);
    learn_cookie(w, fd, port);
    let b = socket(w, SOCK_NONBLOCK);
    w.log("set", w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, &word(1)));
    w.log("connect", w.b.connect(b, &w.at_a(port)));
    (b, fd, port)
}

/// Returns the state, whether data of the SYN were acknowledged, and `tcpi_fastopen_client_fail`.
fn info(w: &Fixture<'_>, is_client: bool, fd: Fd) -> (u8, bool, u8) {
    let sys = if is_client { w.b } else { w.a };
    let bytes = sys.getsockopt(fd, IPPROTO_TCP, libc::TCP_INFO).unwrap();
    (bytes[0], bytes[5] & 32 != 0, bytes[7] >> 1 & 3)
}

pub fn option_is_checked(w: &mut Fixture<'_>) {
    let b = socket(w, 0);
    let name = libc::TCP_FASTOPEN_CONNECT;
    for value in [-1, 2, 1, 0, 1] {
        w.log("set", (value, w.b.setsockopt(b, IPPROTO_TCP, name, &word(value))));
        w.log("get", w.b.getsockopt(b, IPPROTO_TCP, name));
    }
    w.log("short", w.b.setsockopt(b, IPPROTO_TCP, name, &[1]));
    let (fd, _) = w.listener(0);
    w.log("of a listener", w.a.setsockopt(fd, IPPROTO_TCP, name, &word(1)));
    w.log("invalid of a listener", w.a.setsockopt(fd, IPPROTO_TCP, name, &word(2)));
    let (a, b) = w.connection();
    w.log("of a connection", w.b.setsockopt(b, IPPROTO_TCP, name, &word(1)));
    w.log("of an accepted connection", w.a.getsockopt(a, IPPROTO_TCP, name));
    w.log("cookie of a connection", w.b.setsockopt(b, IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE, &word(1)));
}

pub fn destination_is_checked(w: &mut Fixture<'_>) {
    let b = socket(w, SOCK_NONBLOCK);
    let (_, port) = w.listener(0);
    let to = w.at_a(port);
    let send =
        |w: &Fixture<'_>, to: Option<&[u8]>| w.b.send_to(b, b"x", to, &[], MSG_FASTOPEN | MSG_NOSIGNAL);
    w.log("none", send(w, None));
    w.log("send", w.b.send(b, b"x", MSG_FASTOPEN | MSG_NOSIGNAL));
    w.log("short", send(w, Some(&to[..1])));
    w.log("family alone", send(w, Some(&to[..2])));
    w.log("cut off", send(w, Some(&to[..12])));
    w.log("unspecified family", send(w, Some(&UNSPEC)));
    let mut other = to.clone();
    other[..2].copy_from_slice(&77u16.to_ne_bytes());
    w.log("other family", send(w, Some(&other)));
    w.log("poll", w.ready(w.b, b));
    let (fd, _) = w.listener(0);
    w.log("listener", w.a.send_to(fd, b"x", Some(&to), &[], MSG_FASTOPEN | MSG_NOSIGNAL));
    let (a, b) = w.connection();
    w.log("connection", w.b.send_to(b, b"x", Some(&to), &[], MSG_FASTOPEN | MSG_NOSIGNAL));
    w.log("accepted connection", w.a.send(a, b"x", MSG_FASTOPEN | MSG_NOSIGNAL));
    w.log("disconnects", w.b.send_to(b, b"x", Some(&UNSPEC), &[], MSG_FASTOPEN | MSG_NOSIGNAL));
    w.log("nothing arrived", w.a.recv(a, 10, MSG_DONTWAIT));
    let udp = w.b.socket(w.domain(), libc::SOCK_DGRAM).unwrap();
    w.log("UDP", w.b.send_to(udp, b"x", Some(&to), &[], MSG_FASTOPEN));
}

pub fn syn_carries_data_with_a_cookie(w: &mut Fixture<'_>) {
    let (fd, port) = listener(w);
    for _ in 0..3 {
        let b = socket(w, 0);
        w.log("send", w.b.send_to(b, b"hello", Some(&w.at_a(port)), &[], MSG_FASTOPEN));
        let a = w.a.accept4(fd, 0).unwrap();
        w.wait(w.a, a, libc::POLLIN);
        w.log("recv", w.a.recv(a, 10, 0));
        w.log("client", info(w, true, b));
        w.log("server", info(w, false, a));
        w.log("answer", w.a.send(a, b"answer", 0));
        w.wait(w.b, b, libc::POLLIN);
        w.log("recv", w.b.recv(b, 10, 0));
        w.log("again", w.b.send_to(b, b"x", Some(&w.at_a(port)), &[], MSG_FASTOPEN | MSG_NOSIGNAL));
        w.log("more", w.b.send(b, b"more", 0));
        w.wait(w.a, a, libc::POLLIN);
        w.log("recv", w.a.recv(a, 10, 0));
        w.b.close(b).unwrap();
        w.a.close(a).unwrap();
    }
}

pub fn nonblocking_send_without_a_cookie(w: &mut Fixture<'_>) {
    let (fd, port) = listener(w);
    let b = socket(w, SOCK_NONBLOCK);
    w.log("send", w.b.send_to(b, b"hello", Some(&w.at_a(port)), &[], MSG_FASTOPEN));
    w.wait(w.b, b, libc::POLLOUT);
    w.log("poll", w.ready(w.b, b));
    w.log("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    // The handshake is complete, which no call has reported yet.
    w.log("send", w.b.send_to(b, b"hello", Some(&w.at_a(port)), &[], MSG_FASTOPEN));
    w.log("send", w.b.send_to(b, b"hello", Some(&w.at_a(port)), &[], MSG_FASTOPEN | MSG_NOSIGNAL));
    let a = w.a.accept4(fd, 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.log("recv", w.a.recv(a, 10, 0));
    w.log("client", info(w, true, b));
    w.log("server", info(w, false, a));
}

pub fn nonblocking_send_with_a_cookie(w: &mut Fixture<'_>) {
    let (fd, port) = listener(w);
    learn_cookie(w, fd, port);
    let b = socket(w, SOCK_NONBLOCK);
    w.log("send", w.b.send_to(b, b"hello", Some(&w.at_a(port)), &[], MSG_FASTOPEN));
    let a = w.a.accept4(fd, 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.log("recv", w.a.recv(a, 10, 0));
    w.wait(w.b, b, libc::POLLOUT);
    w.log("client", info(w, true, b));
    w.log("send", w.b.send(b, b"more", 0));
    w.wait(w.a, a, libc::POLLIN);
    w.log("recv", w.a.recv(a, 10, 0));
    // A message without bytes sends the cookie alone.
    let b = socket(w, SOCK_NONBLOCK);
    w.log("nothing", w.b.send_to(b, b"", Some(&w.at_a(port)), &[], MSG_FASTOPEN));
    let a = w.a.accept4(fd, 0).unwrap();
    w.wait(w.b, b, libc::POLLOUT);
    w.log("client", info(w, true, b));
    w.log("server", info(w, false, a).1);
    w.log("blocking", {
        let b = socket(w, 0);
        w.b.send_to(b, b"", Some(&w.at_a(port)), &[], MSG_FASTOPEN)
    });
}

pub fn refused_connections(w: &mut Fixture<'_>) {
    let (fd, port) = listener(w);
    learn_cookie(w, fd, port);
    w.a.close(fd).unwrap();
    let b = socket(w, 0);
    w.log("send", w.b.send_to(b, b"hello", Some(&w.at_a(port)), &[], MSG_FASTOPEN));
    w.log("poll", w.ready(w.b, b));
    w.log("again", w.b.send_to(b, b"hello", Some(&w.at_a(port)), &[], MSG_FASTOPEN));
    w.log("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    let b = socket(w, SOCK_NONBLOCK);
    w.log("nonblocking", w.b.send_to(b, b"hello", Some(&w.at_a(port)), &[], MSG_FASTOPEN));
    w.wait(w.b, b, libc::POLLHUP);
    w.log("poll", w.ready(w.b, b));
    w.log("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.log("set", w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, &word(1)));
    let b = socket(w, 0);
    w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, &word(1)).unwrap();
    w.log("connect", w.b.connect(b, &w.at_a(port)));
    w.log("send", w.b.send(b, b"hello", MSG_NOSIGNAL));
    w.log("send", w.b.send(b, b"hello", MSG_NOSIGNAL));
    w.log("poll", w.ready(w.b, b));
}

pub fn connect_waits_for_data(w: &mut Fixture<'_>) {
    let (b, fd, port) = deferred(w);
    w.log("poll", w.ready(w.b, b));
    w.log("connect again", w.b.connect(b, &w.at_a(port)));
    w.log("recv", w.b.recv(b, 10, 0));
    w.log("getpeername", w.b.getpeername(b));
    w.log("has port", crate::sys::port(&w.b.getsockname(b).unwrap()) != 0);
    w.log("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.log("client", info(w, true, b));
    w.log("unsent", w.b.query(b, libc::TIOCOUTQ));
    w.log("set", w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, &word(1)));
    w.log("get", w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT));
    w.log("listen", w.b.listen(b, 1));
    w.log("send", w.b.sendv(b, &[b"he", b"", b"llo"], 0));
    let a = w.a.accept4(fd, 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.log("recv", w.a.recv(a, 10, 0));
    w.wait(w.b, b, libc::POLLOUT);
    w.log("poll", w.ready(w.b, b));
    w.log("client", info(w, true, b));
    w.log("connect", w.b.connect(b, &w.at_a(port)));
    w.log("connect", w.b.connect(b, &w.at_a(port)));
}

pub fn connect_without_a_cookie(w: &mut Fixture<'_>) {
    let (fd, port) = listener(w);
    let b = socket(w, 0);
    w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, &word(1)).unwrap();
    w.log("connect", w.b.connect(b, &w.at_a(port)));
    w.log("connect again", w.b.connect(b, &w.at_a(port)));
    w.log("client", info(w, true, b));
    let a = w.a.accept4(fd, 0).unwrap();
    w.log("server", info(w, false, a));
    // The option remains.
    w.log("disconnect", w.b.connect(b, &UNSPEC));
    w.log("get", w.b.getsockopt(b, IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT));
    w.log("client", info(w, true, b));
    w.log("connect", w.b.connect(b, &w.at_a(port)));
    w.log("client", info(w, true, b));
    w.log("send", w.b.send(b, b"hello", 0));
    let a = w.a.accept4(fd, 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.log("recv", w.a.recv(a, 10, 0));
    w.log("client", info(w, true, b));
}

pub fn deferred_connection_is_given_up(w: &mut Fixture<'_>) {
    let (b, _, port) = deferred(w);
    w.log("disconnect", w.b.connect(b, &UNSPEC));
    w.log("poll", w.ready(w.b, b));
    w.log("client", info(w, true, b));
    w.log("connect", w.b.connect(b, &w.at_a(port)));
    w.log("shutdown", w.b.shutdown(b, libc::SHUT_WR));
    w.log("poll", w.ready(w.b, b));
    w.log("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.log("connect", w.b.connect(b, &w.at_a(port)));
    w.log("send", w.b.send(b, b"x", MSG_NOSIGNAL | MSG_FASTOPEN));
    w.log("close", w.b.close(b));
}

pub fn deferred_connection_in_epoll(w: &mut Fixture<'_>) {
    let (b, fd, _) = deferred(w);
    let set = w.b.epoll_create().unwrap();
    let events = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP) as u32;
    w.b.epoll_ctl(set, libc::EPOLL_CTL_ADD, b, events, 1).unwrap();
    w.log("deferred", w.b.epoll_wait(set, 8, 1000));
    w.log("nothing", w.b.send(b, b"", 0));
    let a = w.a.accept4(fd, 0).unwrap();
    w.wait(w.b, b, libc::POLLOUT);
    w.log("connected", w.b.epoll_wait(set, 8, 1000));
    w.log("client", info(w, true, b));
    w.log("send", w.b.send(b, b"hello", 0));
    w.wait(w.a, a, libc::POLLIN);
    w.log("recv", w.a.recv(a, 10, 0));
}

/// Records what arrives until the end of the stream, and the urgent byte.
fn log_stream(w: &mut Fixture<'_>, listener: Fd) {
    let a = w.a.accept4(listener, 0).unwrap();
    w.log("recv", w.a.recv(a, 1000, MSG_WAITALL));
    w.log("urgent", w.a.recv(a, 1, MSG_OOB | MSG_DONTWAIT));
    w.log("end", w.a.recv(a, 1000, MSG_WAITALL));
    w.a.close(a).unwrap();
}

pub fn urgent_byte_and_fast_open(w: &mut Fixture<'_>) {
    let (fd, port) = listener(w);
    // The first SYN has no cookie, and none of the bytes.
    for (len, flags) in [(3, 0), (3, 0), (3, MSG_DONTWAIT), (600, 0)] {
        let b = socket(w, 0);
        // The SYN takes 496 bytes.
        w.b.setsockopt(b, IPPROTO_TCP, libc::TCP_MAXSEG, &word(536)).unwrap();
        let bytes: Vec<u8> = (0..len).map(|i| b'a' + (i % 23) as u8).collect();
        let flags = flags | MSG_FASTOPEN | MSG_OOB;
        w.log("send", w.b.send_to(b, &bytes, Some(&w.at_a(port)), &[], flags));
        w.wait(w.b, b, libc::POLLOUT);
        w.log("client", info(w, true, b));
        w.b.shutdown(b, libc::SHUT_WR).unwrap();
        log_stream(w, fd);
        w.b.close(b).unwrap();
    }
}

pub fn urgent_byte_sends_a_deferred_syn(w: &mut Fixture<'_>) {
    let (nonblocking, fd, port) = deferred(w);
    let blocking = socket(w, 0);
    w.b.setsockopt(blocking, IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, &word(1)).unwrap();
    w.log("connect", w.b.connect(blocking, &w.at_a(port)));
    for b in [nonblocking, blocking] {
        w.log("send", w.b.send(b, b"x", MSG_OOB).unwrap());
        w.wait(w.b, b, libc::POLLOUT);
        w.log("client", info(w, true, b));
        w.b.shutdown(b, libc::SHUT_WR).unwrap();
        log_stream(w, fd);
    }
}

pub fn cookies_can_be_unnecessary(w: &mut Fixture<'_>) {
    let (fd, port) = listener(w);
    w.a.setsockopt(fd, IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE, &word(1)).unwrap();
    let b = socket(w, SOCK_NONBLOCK);
    w.log("set", w.b.setsockopt(b, IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE, &word(1)));
    let to = w.at_a(port);
    w.log("send", w.b.send_many(b, &[(b"hello", Some(&to))], MSG_FASTOPEN));
    let a = w.a.accept4(fd, 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.log("recv", w.a.recv(a, 10, 0));
    w.wait(w.b, b, libc::POLLOUT);
    w.log("client", info(w, true, b));
    w.log("server", info(w, false, a));
}

pub mod tests {
    crate::cases! {
        option_is_checked
        ; both {
            destination_is_checked
            syn_carries_data_with_a_cookie
            nonblocking_send_without_a_cookie
            nonblocking_send_with_a_cookie
            refused_connections
            connect_waits_for_data
            connect_without_a_cookie
            deferred_connection_is_given_up
            deferred_connection_in_epoll
            urgent_byte_and_fast_open
            urgent_byte_sends_a_deferred_syn
            cookies_can_be_unnecessary
        }
    }
}
