//! Listeners: the queue of connections, and their addresses.

use crate::sys::Fixture;
use libc::{AF_INET, SHUT_RD, SOCK_NONBLOCK, SOCK_STREAM};

pub fn accept_finds_earlier_connections(w: &mut Fixture<'_>) {
    let (listener, port) = w.listener(SOCK_NONBLOCK);
    let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
    w.b.connect(b, &w.at_a(port)).unwrap();
    w.settle();
    w.log("accept", w.a.accept4(listener, 0).is_ok());
}

pub fn accept_order_is_arrival_order(w: &mut Fixture<'_>) {
    let (listener, port) = w.listener(SOCK_NONBLOCK);
    let connect = |w: &mut Fixture<'_>| {
        let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(port)).unwrap();
        crate::sys::port(&w.b.getsockname(b).unwrap())
    };
    let mut connected = vec![connect(w), connect(w)];
    let mut accepted = Vec::new();
    let mut accept = |w: &mut Fixture<'_>| {
        w.wait(w.a, listener, libc::POLLIN);
        let fd = w.a.accept4(listener, 0).unwrap();
        accepted.push(crate::sys::port(&w.a.getpeername(fd).unwrap()));
    };
    accept(w);
    connected.extend([connect(w), connect(w)]);
    w.settle();
    (0..3).for_each(|_| accept(w));
    w.log("order equal", connected == accepted);
}

pub fn backlog_limits_pending_connections(w: &mut Fixture<'_>) {
    for backlog in [0, 1, 3] {
        let (listener, port) = w.listener(SOCK_NONBLOCK);
        w.a.listen(listener, backlog).unwrap();
        // An `accept` before the first connection must not change how many connections can wait.
        w.log("no connection yet", w.a.accept4(listener, 0));
        let mut connecting = Vec::new();
        for _ in 0..6 {
            let b = w.b.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
            w.log("connect", w.b.connect(b, &w.at_a(port)));
            connecting.push(b);
            w.settle();
        }
        let waiting = connecting.iter().filter(|b| w.ready(w.b, **b) == "OUT|WRNORM").count();
        w.log("connected", waiting);
        let accepted = core::iter::from_fn(|| w.a.accept4(listener, 0).ok()).count();
        w.log("accepted", accepted);
        for fd in connecting {
            w.b.close(fd).unwrap();
        }
    }
}

pub fn shutdown_releases_automatic_port(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    w.a.listen(fd, 8).unwrap();
    let name = w.a.getsockname(fd).unwrap();
    w.log("shutdown", w.a.shutdown(fd, SHUT_RD));
    w.log("getsockname after shutdown", w.a.getsockname(fd) == Ok(name.clone()));
    let other = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    w.log("bind by another socket", w.a.bind(other, &name));
}

pub fn shutdown_keeps_bound_address(w: &mut Fixture<'_>) {
    let (fd, _) = w.listener(0);
    w.log("shutdown", w.a.shutdown(fd, SHUT_RD));
    w.log("listen again", w.a.listen(fd, 8));
    let name = w.a.getsockname(fd).unwrap();
    w.log("address equal", name[4..8] == w.at_a(0)[4..8]);
}

pub mod tests {
    crate::cases! {
        accept_finds_earlier_connections
        accept_order_is_arrival_order
        backlog_limits_pending_connections
        shutdown_releases_automatic_port
        shutdown_keeps_bound_address
    }
}
