//! Sockets that are bound again after their connection has ended.

use crate::sys::{Fd, Fixture, Sys, port, word};
use libc::{
    AF_UNSPEC, MSG_DONTWAIT, SHUT_RDWR, SHUT_WR, SO_ERROR, SO_LINGER, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET,
};

/// An address of the family `AF_UNSPEC`.
fn no_address() -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&(AF_UNSPEC as u16).to_ne_bytes());
    bytes
}

/// Returns whether a socket has this address, with a port.
fn is_at(sys: &dyn Sys, fd: Fd, at: &[u8]) -> bool {
    let name = sys.getsockname(fd).unwrap();
    let ip = if name[0] == libc::AF_INET as u8 { 4..8 } else { 8..24 };
    name[ip.clone()] == at[ip] && port(&name) != 0
}

/// Logs what a socket of host `b` does after its connection has ended: it can be bound, but is of no other
/// use until it is disconnected.
fn log_rebound(w: &mut Fixture<'_>, fd: Fd, peer: &[u8]) {
    let at = w.at_b(0);
    w.log("bind", w.b.bind(fd, &at));
    w.log("address", is_at(w.b, fd, &at));
    w.log("bind again", w.b.bind(fd, &at));
    w.log("listen", w.b.listen(fd, 10));
    w.log("connect", w.b.connect(fd, peer));
    w.log("peer", w.b.getpeername(fd));
    w.log("recv", w.b.recv(fd, 9, MSG_DONTWAIT));
    w.log("poll", w.ready(w.b, fd));
    let name = w.b.getsockname(fd).unwrap();
    w.log("disconnect", w.b.connect(fd, &no_address()));
    w.log("name is kept", w.b.getsockname(fd).as_ref() == Ok(&name));
    w.log("listen after disconnect", w.b.listen(fd, 10));
    let client = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("connection to it", w.a.connect(client, &name));
    let accepted = w.b.accept4(fd, 0).unwrap();
    // The peer ends first, so no connection in TIME-WAIT is left here.
    w.a.close(client).unwrap();
    w.settle();
    w.b.close(accepted).unwrap();
    w.settle();
    w.log("stop to listen", w.b.shutdown(fd, SHUT_RDWR));
    // The stack has chosen the port, so it is free now.
    let other = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("bind of another socket", w.b.bind(other, &name));
    w.b.close(other).unwrap();
    w.b.close(fd).unwrap();
}

pub fn ended_connections_can_be_bound(w: &mut Fixture<'_>) {
    for bound in [false, true] {
        let (listener, at) = w.listener(0);
        let peer = w.at_a(at);
        let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
        if bound {
            w.b.bind(b, &w.at_b(0)).unwrap();
        }
        w.b.connect(b, &peer).unwrap();
        let a = w.a.accept4(listener, 0).unwrap();
        w.log("open", w.b.bind(b, &w.at_b(0)));
        w.a.send(a, b"unread", 0).unwrap();
        w.b.shutdown(b, SHUT_WR).unwrap();
        w.settle();
        w.log("half closed", w.b.bind(b, &w.at_b(0)));
        w.log("CLOSE_WAIT", w.a.bind(a, &w.at_a(0)));
        w.a.close(a).unwrap();
        w.settle();
        log_rebound(w, b, &peer);
        w.a.close(listener).unwrap();
    }
}

/// Repeats the last calls of `shutdown_reuse` of Linux's selftest `tls`, which follow each other immediately.
pub fn bind_follows_shutdown_at_once(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let peer = w.at_a(at);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.connect(b, &peer).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    w.b.shutdown(b, SHUT_RDWR).unwrap();
    w.a.shutdown(a, SHUT_RDWR).unwrap();
    w.a.close(a).unwrap();
    log_rebound(w, b, &peer);
    w.a.close(listener).unwrap();
}

/// A socket keeps the port that the program has chosen, so there is no other one to bind.
pub fn chosen_ports_outlive_the_connection(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let probe = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.bind(probe, &w.at_b(0)).unwrap();
    let own = port(&w.b.getsockname(probe).unwrap());
    w.b.close(probe).unwrap();
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.bind(b, &w.at_b(own)).unwrap();
    w.b.connect(b, &w.at_a(at)).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    w.a.setsockopt(a, SOL_SOCKET, SO_LINGER, &[word(1), word(0)].concat()).unwrap();
    w.a.close(a).unwrap();
    w.settle();
    w.log("bind", w.b.bind(b, &w.at_b(0)));
    w.log("error", w.b.getsockopt(b, SOL_SOCKET, SO_ERROR));
    w.log("name is kept", port(&w.b.getsockname(b).unwrap()) == own);
    w.b.close(b).unwrap();
    w.a.close(listener).unwrap();
}

pub fn accepted_and_reset_connections_can_be_bound(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    w.b.setsockopt(b, SOL_SOCKET, SO_LINGER, &[word(1), word(0)].concat()).unwrap();
    w.b.close(b).unwrap();
    w.settle();
    let at = w.at_a(0);
    w.log("bind", w.a.bind(a, &at));
    w.log("address", is_at(w.a, a, &at));
    w.log("error", w.a.getsockopt(a, SOL_SOCKET, SO_ERROR));
    w.log("listen", w.a.listen(a, 1));
    w.log("shutdown", w.a.shutdown(a, SHUT_RDWR));
    // The address is reserved as long as the socket is open.
    let name = w.a.getsockname(a).unwrap();
    let other = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("in use", w.a.bind(other, &name));
    w.a.close(a).unwrap();
    w.log("free", w.a.bind(other, &name));
    w.a.close(other).unwrap();
}

/// The sockets are bound before and after a call has reported that the connection was refused.
pub fn refused_connections_can_be_bound(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    w.a.close(listener).unwrap();
    let to = w.at_a(at);
    for reported in [false, true] {
        let b = w.b.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
        w.log("connect", w.b.connect(b, &to));
        w.settle();
        if reported {
            w.log("result", w.b.connect(b, &to));
        }
        w.log("bind", w.b.bind(b, &w.at_b(0)));
        w.log("address", is_at(w.b, b, &w.at_b(0)));
        let own = port(&w.b.getsockname(b).unwrap());
        if !reported {
            w.log("listen", w.b.listen(b, 1));
            w.log("result", w.b.connect(b, &to));
        }
        w.log("name is kept", port(&w.b.getsockname(b).unwrap()) == own);
        w.log("bind again", w.b.bind(b, &w.at_b(0)));
        w.log("listen", w.b.listen(b, 1));
        w.log("still that name", port(&w.b.getsockname(b).unwrap()) == own);
        w.b.close(b).unwrap();
    }
}

/// `IP_BIND_ADDRESS_NO_PORT`: the address replaces that of the connection, and `connect` chooses a port.
pub fn ended_connections_can_be_bound_without_port(w: &mut Fixture<'_>) {
    let (listener, at) = w.listener(0);
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.b.connect(b, &w.at_a(at)).unwrap();
    let a = w.a.accept4(listener, 0).unwrap();
    w.a.setsockopt(a, SOL_SOCKET, SO_LINGER, &[word(1), word(0)].concat()).unwrap();
    w.a.close(a).unwrap();
    w.settle();
    w.b.setsockopt(b, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, &word(1)).unwrap();
    for _ in 0..2 {
        w.log("bind", w.b.bind(b, &w.at_b(0)));
        w.log("name", w.b.getsockname(b).unwrap() == w.at_b(0));
    }
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.log("disconnect", w.b.connect(b, &no_address()));
    w.log("name", w.b.getsockname(b).unwrap() == w.at_b(0));
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.log("address", is_at(w.b, b, &w.at_b(0)));
    w.b.close(b).unwrap();
    w.a.close(listener).unwrap();
}

pub mod tests {
    crate::cases! {
        ;
        over_loopback {
            bind_follows_shutdown_at_once
        };
        both {
            ended_connections_can_be_bound
            chosen_ports_outlive_the_connection
            accepted_and_reset_connections_can_be_bound
            refused_connections_can_be_bound
            ended_connections_can_be_bound_without_port
        }
    }
}
