//! Sockets that share a port.

use crate::sys::{Fd, Fixture, Sys, port};
use libc::{
    AF_INET, MSG_DONTWAIT, SO_REUSEADDR, SO_REUSEPORT, SOCK_DGRAM, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET,
};
use rustix::io::Errno;
use rustix::thread::{Uid, set_thread_res_uid};

/// Creates a socket with `SO_REUSEPORT`, bound to an address of host `a`.
fn reuseport_socket(sys: &dyn Sys, kind: i32, at: &[u8]) -> Result<Fd, Errno> {
    let fd = sys.socket(AF_INET, kind).unwrap();
    sys.setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &1i32.to_ne_bytes()).unwrap();
    sys.bind(fd, at).map(|()| fd).inspect_err(|_| sys.close(fd).unwrap())
}

/// Calls `act` on a thread of another user.
fn as_nobody<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    let nobody = Uid::from_raw(65_534);
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // Changes the user of this thread only.
            set_thread_res_uid(nobody, nobody, nobody).unwrap();
            act()
        });
        thread.join().unwrap()
    })
}

pub fn reuseport_requires_equal_users(w: &mut Fixture<'_>) {
    if !rustix::process::geteuid().is_root() {
        return ginnel_testkit::skip("reuseport_requires_equal_users", "only root can be another user");
    }
    for kind in [SOCK_STREAM, SOCK_DGRAM] {
        let first = reuseport_socket(w.a, kind, &w.at_a(0)).unwrap();
        let at = w.at_a(port(&w.a.getsockname(first).unwrap()));
        let sys = w.a;
        w.log("another user", as_nobody(|| reuseport_socket(sys, kind, &at)).err());
        let second = reuseport_socket(w.a, kind, &at);
        w.log("equal user", second.is_ok());
        if kind == SOCK_STREAM {
            w.log("listen", (w.a.listen(first, 3), w.a.listen(second.unwrap(), 3)));
            w.log("another user, of listeners", as_nobody(|| reuseport_socket(sys, kind, &at)).err());
            let third = reuseport_socket(w.a, kind, &at);
            w.log("third", third.map(|fd| w.a.listen(fd, 3)));
        }
        // `SO_REUSEADDR` is not `SO_REUSEPORT`.
        let plain = w.a.socket(AF_INET, kind).unwrap();
        w.a.setsockopt(plain, SOL_SOCKET, SO_REUSEADDR, &1i32.to_ne_bytes()).unwrap();
        w.log("bind without SO_REUSEPORT", w.a.bind(plain, &at));
        // In the other order: another user binds first.
        let other = as_nobody(|| reuseport_socket(sys, kind, &w.at_a(0))).unwrap();
        let at = w.at_a(port(&w.a.getsockname(other).unwrap()));
        w.log("root at another user's port", reuseport_socket(w.a, kind, &at).err());
        w.log("equal user", as_nobody(|| reuseport_socket(sys, kind, &at)).is_ok());
    }
}

/// Connections that wait at a closed listener are reset by Linux even if another listener has the same port
/// (`net.ipv4.tcp_migrate_req` is off by default); the stack moves them to that listener. None is lost.
pub fn pending_connections_end_with_their_listener(w: &mut Fixture<'_>) {
    const CONNECTIONS: usize = 32;
    let first = reuseport_socket(w.a, SOCK_STREAM | SOCK_NONBLOCK, &w.at_a(0)).unwrap();
    let at = w.at_a(port(&w.a.getsockname(first).unwrap()));
    let second = reuseport_socket(w.a, SOCK_STREAM | SOCK_NONBLOCK, &at).unwrap();
    for listener in [first, second] {
        w.a.listen(listener, 64).unwrap();
    }
    let open = |w: &Fixture<'_>| {
        let fd = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
        w.b.connect(fd, &at).unwrap();
        fd
    };
    let all: Vec<Fd> = (0..CONNECTIONS).map(|_| open(w)).collect();
    w.settle();
    // A connection accepted before the close stays open.
    w.wait(w.a, first, libc::POLLIN);
    let accepted = w.a.accept4(first, 0).unwrap();
    w.a.close(first).unwrap();
    w.settle();
    let results: Vec<_> = all.iter().map(|fd| w.b.recv(*fd, 1, MSG_DONTWAIT).err()).collect();
    let reset = results.iter().filter(|result| **result == Some(Errno::CONNRESET)).count();
    let mut waiting = 0;
    while let Ok(fd) = w.a.accept4(second, 0) {
        w.a.close(fd).unwrap();
        waiting += 1;
    }
    w.log("every connection reset or accepted", (waiting > 0, 1 + reset + waiting));
    w.log("send on an accepted connection", w.a.send(accepted, b"here", 0));
    w.settle();
    let recipients =
        all.iter().filter(|fd| w.b.recv(**fd, 9, MSG_DONTWAIT).as_deref() == Ok(b"here")).count();
    w.log("recipients", recipients);
    // The remaining listener gets all further connections.
    let more: Vec<Fd> = (0..CONNECTIONS).map(|_| open(w)).collect();
    w.settle();
    let count = core::iter::from_fn(|| w.a.accept4(second, 0).ok()).count();
    w.log("later connections", (more.len(), count));
}

pub fn addresses_in_use(w: &mut Fixture<'_>) {
    let reuse = 1i32.to_ne_bytes();
    let socket = |w: &Fixture<'_>, share: bool| {
        let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
        if share {
            w.a.setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, &reuse).unwrap();
        }
        fd
    };
    let (first, second, third) = (socket(w, true), socket(w, true), socket(w, false));
    w.log("first", w.a.bind(first, &w.at_a(0)));
    let at = port(&w.a.getsockname(first).unwrap());
    w.log("shared", w.a.bind(second, &w.at_a(at)));
    w.log("not shared", w.a.bind(third, &w.at_a(at)));
    w.log("listen", w.a.listen(first, 1));
    w.log("second listen", w.a.listen(second, 1));
    let fourth = socket(w, true);
    w.log("bind next to a listener", w.a.bind(fourth, &w.at_a(at)));
    w.a.close(first).unwrap();
    w.log("after the listener", w.a.listen(second, 1));
}

pub fn reuseport_listeners(w: &mut Fixture<'_>) {
    let on = 1i32.to_ne_bytes();
    let socket = |w: &Fixture<'_>, shared: bool| {
        let fd = w.a.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
        if shared {
            w.a.setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, &on).unwrap();
        }
        fd
    };
    let members = [socket(w, true), socket(w, true), socket(w, true)];
    w.log("first", w.a.bind(members[0], &w.at_a(0)));
    let at = port(&w.a.getsockname(members[0]).unwrap());
    w.log("listens", w.a.listen(members[0], 64));
    for member in &members[1..] {
        w.log("further bind", w.a.bind(*member, &w.at_a(at)));
        w.log("listen", w.a.listen(*member, 64));
    }
    let exclusive = socket(w, false);
    w.log("bind without SO_REUSEPORT", w.a.bind(exclusive, &w.at_a(at)));
    let connect = |w: &Fixture<'_>| {
        let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(at)).map(|()| b)
    };
    let clients: Vec<_> = (0..60).map(|_| connect(w).unwrap()).collect();
    w.settle();
    let accept_all = |w: &Fixture<'_>, member: i32| {
        core::iter::from_fn(|| w.a.accept4(member, 0).ok()).collect::<Vec<_>>()
    };
    let accepted: Vec<_> = members.iter().map(|member| accept_all(w, *member)).collect();
    let counts: Vec<usize> = accepted.iter().map(Vec::len).collect();
    w.log("all connections", counts.iter().sum::<usize>());
    w.log("distributed", counts.iter().all(|count| *count >= 5));
    accepted.iter().flatten().for_each(|fd| w.a.close(*fd).unwrap());
    clients.iter().for_each(|fd| w.b.close(*fd).unwrap());
    // Connections that wait at a closed member are reset with it, or move to another member.
    let clients: Vec<_> = (0..30).map(|_| connect(w).unwrap()).collect();
    w.settle();
    w.log("close of a member", w.a.close(members[0]));
    w.settle();
    let reset = clients.iter().filter(|fd| w.b.recv(**fd, 1, MSG_DONTWAIT) == Err(Errno::CONNRESET)).count();
    let left = accept_all(w, members[1]).len() + accept_all(w, members[2]).len();
    w.log("reset or pending elsewhere", reset + left);
    w.log("other listeners accept", connect(w).is_ok());
    w.a.close(members[1]).unwrap();
    w.log("last listener", connect(w).is_ok());
    w.a.close(members[2]).unwrap();
    w.log("connect without listener", connect(w));
}

/// Logs whether sockets with and without `SO_REUSEADDR` can be bound to a port of host `a`.
fn log_binds(w: &mut Fixture<'_>, when: &str, port: u16) {
    let mut others = vec![("same address", w.at_a(port))];
    if w.domain() == AF_INET {
        let any = std::net::SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), port);
        others.push(("wildcard", crate::sys::address(any)));
    }
    for (label, at) in others {
        for options in [&[][..], &[SO_REUSEADDR], &[SO_REUSEPORT]] {
            let fd = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
            for option in options {
                w.a.setsockopt(fd, SOL_SOCKET, *option, &1i32.to_ne_bytes()).unwrap();
            }
            w.log(&format!("{when}, {label}, {options:?}"), w.a.bind(fd, &at));
            w.a.close(fd).unwrap();
        }
    }
}

/// The port of a listener that was closed, and ports of sockets that connected, while their connections are
/// open, in FIN_WAIT2, and in TIME_WAIT.
pub fn bind_next_to_connections(w: &mut Fixture<'_>) {
    let on = 1i32.to_ne_bytes();
    for option in [None, Some(SO_REUSEADDR), Some(SO_REUSEPORT)] {
        let socket = |w: &Fixture<'_>| {
            let fd = w.a.socket(w.domain(), SOCK_STREAM).unwrap();
            if let Some(option) = option {
                w.a.setsockopt(fd, SOL_SOCKET, option, &on).unwrap();
            }
            fd
        };
        let listener = socket(w);
        w.a.bind(listener, &w.at_a(0)).unwrap();
        w.a.listen(listener, 4).unwrap();
        let at = port(&w.a.getsockname(listener).unwrap());
        let peer = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
        w.b.connect(peer, &w.at_a(at)).unwrap();
        let accepted = w.a.accept4(listener, 0).unwrap();
        w.a.close(listener).unwrap();
        log_binds(w, "accepted", at);
        w.a.close(accepted).unwrap();
        w.settle();
        log_binds(w, "FIN_WAIT2", at);
        w.b.close(peer).unwrap();
        w.settle();
        log_binds(w, "TIME_WAIT", at);
        // A port that `connect` or `bind` chose.
        for bound in [false, true] {
            let listener = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
            w.b.bind(listener, &w.at_b(0)).unwrap();
            w.b.listen(listener, 4).unwrap();
            let to = w.at_b(port(&w.b.getsockname(listener).unwrap()));
            let fd = socket(w);
            if bound {
                w.a.bind(fd, &w.at_a(0)).unwrap();
            }
            w.a.connect(fd, &to).unwrap();
            let local = w.a.getsockname(fd).unwrap();
            w.log("local address", local[4..] == w.at_a(0)[4..]);
            let peer = w.b.accept4(listener, 0).unwrap();
            log_binds(w, "connected", port(&local));
            w.a.close(fd).unwrap();
            // Otherwise the peer's FIN may be the first.
            w.settle();
            w.b.close(peer).unwrap();
            w.settle();
            log_binds(w, "closed", port(&local));
        }
    }
}

#[cfg(test)]
pub mod tests {
    crate::cases! {
        addresses_in_use
        reuseport_listeners
        reuseport_requires_equal_users
        pending_connections_end_with_their_listener
        bind_next_to_connections
    }
}
