//! Effects of a call on another socket of the same process, which have arrived when the call returns.

use crate::sys::{Fd, Fixture, word};
use libc::{
    EPOLL_CTL_ADD, EPOLLIN, MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_WR, SO_LINGER, SOCK_DGRAM, SOCK_NONBLOCK,
    SOCK_STREAM, SOL_SOCKET,
};

/// Opens a connection whose both ends are at host `a`, without a wait between the calls.
fn own_connection(w: &Fixture<'_>, listener: Fd, at: u16) -> [Fd; 2] {
    let opened = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
    w.a.connect(opened, &w.at_a(at)).unwrap();
    [opened, w.a.accept4(listener, SOCK_NONBLOCK).unwrap()]
}

pub fn effects_on_own_connections(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(SOCK_NONBLOCK);
    for round in 0..20 {
        let [one, other] = own_connection(w, listener, at);
        let set = w.a.epoll_create().unwrap();
        w.a.epoll_ctl(set, EPOLL_CTL_ADD, other, EPOLLIN as u32, 7).unwrap();
        w.a.send(one, b"some bytes", 0).unwrap();
        w.log("epoll_wait", w.a.epoll_wait(set, 4, 0));
        w.log("FIONREAD", w.a.readable_bytes(other));
        w.log("recv", w.a.recv(other, 20, MSG_DONTWAIT));
        w.log("recv without data", w.a.recv(other, 20, MSG_DONTWAIT));
        w.a.send(other, b"an answer", 0).unwrap();
        w.log("poll", w.ready(w.a, one));
        w.a.recv(one, 20, 0).unwrap();
        w.a.shutdown(one, SHUT_WR).unwrap();
        w.log("poll after shutdown", w.ready(w.a, other));
        w.a.close(other).unwrap();
        w.log("poll after close", w.ready(w.a, one));
        [one, set].into_iter().for_each(|fd| w.a.close(fd).unwrap());

        let [one, other] = own_connection(w, listener, at);
        w.a.close(other).unwrap();
        w.log("send after close", w.a.send(one, b"1", MSG_NOSIGNAL));
        w.log("send after the reset", w.a.send(one, b"2", MSG_NOSIGNAL));
        w.a.close(one).unwrap();

        let [one, other] = own_connection(w, listener, at);
        if round % 2 == 0 {
            w.a.setsockopt(one, SOL_SOCKET, SO_LINGER, &[word(1), word(0)].concat()).unwrap();
        } else {
            w.a.send(other, b"unread", 0).unwrap();
            w.log("what is not read", w.ready(w.a, one));
        }
        w.a.close(one).unwrap();
        w.log("recv after a reset", w.a.recv(other, 20, 0));
        w.a.close(other).unwrap();

        let one = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
        w.a.connect(one, &w.at_a(at)).unwrap();
        w.a.send(one, b"the only bytes", 0).unwrap();
        w.a.close(one).unwrap();
        let other = w.a.accept4(listener, SOCK_NONBLOCK);
        w.log("accept after the peer's close", other.is_ok());
        let other = other.unwrap();
        w.log("recv after the peer's close", w.a.recv(other, 20, 0));
        w.log("recv of the end", w.a.recv(other, 20, 0));
        w.a.close(other).unwrap();

        let one = w.a.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
        w.log("connect", w.a.connect(one, &w.at_a(at)));
        w.log("poll after connect", w.ready(w.a, one));
        let other = w.a.accept4(listener, 0).unwrap();
        [one, other].into_iter().for_each(|fd| w.a.close(fd).unwrap());
    }
}

pub fn datagrams_to_own_sockets(w: &mut Fixture<'_>) {
    let [one, other] = [0; 2].map(|_| {
        let socket = w.a.socket(w.domain(), SOCK_DGRAM).unwrap();
        w.a.bind(socket, &w.at_a(0)).unwrap();
        socket
    });
    let to = w.a.getsockname(other).unwrap();
    for round in 0..20 {
        for part in 0..=round % 4 {
            w.log("send", w.a.send_to(one, &[part; 5], Some(&to), &[], 0));
        }
        w.log("poll", w.ready(w.a, other));
        for _ in 0..5 {
            w.log("recv", w.a.recv(other, 20, MSG_DONTWAIT));
        }
    }
}

pub mod tests {
    crate::cases! {
        ; over_loopback {
            effects_on_own_connections
            datagrams_to_own_sockets
        }
    }
}
