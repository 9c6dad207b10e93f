//! Calls in unusual states of a socket: before it listens, without a connection, after `shutdown`.

use crate::sys::{Fixture, port};
use libc::{EPOLL_CTL_ADD, EPOLLIN, EPOLLOUT, SOCK_NONBLOCK, SOCK_STREAM};

pub fn listener_added_to_a_set_before_listen(w: &mut Fixture<'_>) {
    let set = w.a.epoll_create().unwrap();
    let listener = w.a.socket(w.domain(), SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    w.log("add", w.a.epoll_ctl(set, EPOLL_CTL_ADD, listener, (EPOLLIN | EPOLLOUT) as u32, 1));
    w.log("not listening", w.a.epoll_wait(set, 4, 0));
    w.a.bind(listener, &w.at_a(0)).unwrap();
    w.a.listen(listener, 4).unwrap();
    w.log("no connection", w.a.epoll_wait(set, 4, 0));
    let at = port(&w.a.getsockname(listener).unwrap());
    let b = w.b.socket(w.domain(), SOCK_STREAM).unwrap();
    w.log("connect", w.b.connect(b, &w.at_a(at)));
    w.log("connection", w.a.epoll_wait(set, 4, 10_000));
    w.log("accept", w.a.accept4(listener, 0).is_ok());
}

pub mod tests {
    crate::cases! {
        ; both {
            listener_added_to_a_set_before_listen
        }
    }
}
