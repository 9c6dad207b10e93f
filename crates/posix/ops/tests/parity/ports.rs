//! Sockets that share a port.

use crate::sys::{Fd, Sys, World, port};
use libc::{
    AF_INET, MSG_DONTWAIT, SO_REUSEADDR, SO_REUSEPORT, SOCK_DGRAM, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET,
};
use rustix::io::Errno;
use rustix::thread::{Uid, set_thread_res_uid};

/// Creates a socket with `SO_REUSEPORT`, bound to an address of host `a`.
fn sharer(sys: &dyn Sys, kind: i32, at: &[u8]) -> Result<Fd, Errno> {
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

pub fn a_port_is_shared_among_sockets_of_one_user(w: &mut World<'_>) {
    if !rustix::process::geteuid().is_root() {
        return ginnel_testkit::skip(
            "a_port_is_shared_among_sockets_of_one_user",
            "only root can be another user",
        );
    }
    for kind in [SOCK_STREAM, SOCK_DGRAM] {
        let first = sharer(w.a, kind, &w.at_a(0)).unwrap();
        let at = w.at_a(port(&w.a.getsockname(first).unwrap()));
        let sys = w.a;
        w.say("another user", as_nobody(|| sharer(sys, kind, &at)).err());
        let second = sharer(w.a, kind, &at);
        w.say("the same", second.is_ok());
        if kind == SOCK_STREAM {
            w.say("listen", (w.a.listen(first, 3), w.a.listen(second.unwrap(), 3)));
            w.say("another user, of listeners", as_nobody(|| sharer(sys, kind, &at)).err());
            let third = sharer(w.a, kind, &at);
            w.say("a third", third.map(|fd| w.a.listen(fd, 3)));
        }
        // `SO_REUSEADDR` is not `SO_REUSEPORT`.
        let plain = w.a.socket(AF_INET, kind).unwrap();
        w.a.setsockopt(plain, SOL_SOCKET, SO_REUSEADDR, &1i32.to_ne_bytes()).unwrap();
        w.say("one that does not share", w.a.bind(plain, &at));
        // In the other order: another user binds first.
        let their = as_nobody(|| sharer(sys, kind, &w.at_a(0))).unwrap();
        let at = w.at_a(port(&w.a.getsockname(their).unwrap()));
        w.say("of root, at another user's", sharer(w.a, kind, &at).err());
        w.say("of that user", as_nobody(|| sharer(sys, kind, &at)).is_ok());
    }
}

/// Connections that wait at a closed listener are reset, even if another listener has the same port
/// (`net.ipv4.tcp_migrate_req` is off).
pub fn connections_that_wait_at_a_listener_go_with_it(w: &mut World<'_>) {
    const CONNECTIONS: usize = 32;
    let first = sharer(w.a, SOCK_STREAM | SOCK_NONBLOCK, &w.at_a(0)).unwrap();
    let at = w.at_a(port(&w.a.getsockname(first).unwrap()));
    let second = sharer(w.a, SOCK_STREAM | SOCK_NONBLOCK, &at).unwrap();
    for listener in [first, second] {
        w.a.listen(listener, 64).unwrap();
    }
    let open = |w: &World<'_>| {
        let fd = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
        w.b.connect(fd, &at).unwrap();
        fd
    };
    let all: Vec<Fd> = (0..CONNECTIONS).map(|_| open(w)).collect();
    w.settle();
    // A connection accepted before the close stays open.
    w.wait(w.a, first, libc::POLLIN);
    let taken = w.a.accept4(first, 0).unwrap();
    w.a.close(first).unwrap();
    w.settle();
    let how: Vec<_> = all.iter().map(|fd| w.b.recv(*fd, 1, MSG_DONTWAIT).err()).collect();
    let reset = how.iter().filter(|how| **how == Some(Errno::CONNRESET)).count();
    let mut waiting = 0;
    while let Ok(fd) = w.a.accept4(second, 0) {
        w.a.close(fd).unwrap();
        waiting += 1;
    }
    w.say("none is lost in between", (reset > 0, waiting > 0, 1 + reset + waiting));
    w.say("what was accepted goes on", w.a.send(taken, b"here", 0));
    w.settle();
    let heard = all.iter().filter(|fd| w.b.recv(**fd, 9, MSG_DONTWAIT).as_deref() == Ok(b"here")).count();
    w.say("to one", heard);
    // The remaining listener gets all further connections.
    let more: Vec<Fd> = (0..CONNECTIONS).map(|_| open(w)).collect();
    w.settle();
    let count = core::iter::from_fn(|| w.a.accept4(second, 0).ok()).count();
    w.say("later ones", (more.len(), count));
}

#[cfg(test)]
pub mod tests {
    crate::cases! {
        a_port_is_shared_among_sockets_of_one_user
        connections_that_wait_at_a_listener_go_with_it
    }
}
