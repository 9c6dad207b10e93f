//! Connections: establishment, data transfer and closing.

use crate::sys::{ALL, World, names, port};
use libc::{
    AF_INET, MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC, MSG_WAITALL, SOCK_NONBLOCK, SOCK_STREAM,
};
use rustix::io::Errno;

pub fn bytes_go_both_ways(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.say("send", w.b.send(b, b"hello", 0));
    w.wait(w.a, a, libc::POLLIN);
    w.say("bytes waiting", w.a.readable_bytes(a));
    w.say("peek", w.a.recv(a, 3, MSG_PEEK));
    w.say("truncate", w.a.recv(a, 2, MSG_TRUNC));
    w.say("recv", w.a.recv(a, 100, 0));
    w.say("nothing left", w.a.recv(a, 100, MSG_DONTWAIT));
    w.say("answer", w.a.send(a, b"and back", 0));
    w.say("all of it", w.b.recv(b, 8, MSG_WAITALL));
    w.say("no room", w.b.recv(b, 0, MSG_DONTWAIT));
    w.say("unknown flag", w.b.send(b, b"x", libc::MSG_FASTOPEN | MSG_NOSIGNAL).is_err());
}

pub fn an_end_is_read_behind_the_bytes(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.b.send(b, b"last", 0).unwrap();
    w.say("shutdown", w.b.shutdown(b, libc::SHUT_WR));
    w.wait(w.a, a, libc::POLLRDHUP);
    w.say("poll", w.ready(w.a, a));
    w.say("recv", w.a.recv(a, 100, 0));
    w.say("recv at the end", w.a.recv(a, 100, 0));
    w.say("send after the peer's end", w.a.send(a, b"still", 0));
    w.say("recv of the other", w.b.recv(b, 100, 0));
    w.say("send after shutdown", w.b.send(b, b"x", MSG_NOSIGNAL));
    w.say("close", w.a.close(a));
    w.wait(w.b, b, libc::POLLHUP);
    w.say("poll after both", w.ready(w.b, b));
    w.say("recv after both", w.b.recv(b, 1, 0));
    w.say("send after both", w.b.send(b, b"x", MSG_NOSIGNAL));
    w.say("shutdown after both", w.b.shutdown(b, libc::SHUT_RDWR));
}

pub fn a_reset_is_an_error_once(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let linger = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    w.say("linger", w.b.setsockopt(b, libc::SOL_SOCKET, libc::SO_LINGER, &linger));
    w.b.close(b).unwrap();
    w.wait(w.a, a, libc::POLLHUP);
    w.say("poll", w.ready(w.a, a));
    w.say("recv", w.a.recv(a, 1, 0));
    w.say("poll again", w.ready(w.a, a));
    w.say("recv again", w.a.recv(a, 1, 0));
    w.say("send", w.a.send(a, b"x", MSG_NOSIGNAL));
    w.say("error", w.a.getsockopt(a, libc::SOL_SOCKET, libc::SO_ERROR));
}

pub fn unread_bytes_at_close_reset_the_peer(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.b.send(b, b"never read", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    w.a.close(a).unwrap();
    w.wait(w.b, b, libc::POLLHUP);
    w.say("poll", w.ready(w.b, b));
    w.say("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.say("error again", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.say("send", w.b.send(b, b"x", MSG_NOSIGNAL));
    w.say("recv", w.b.recv(b, 1, 0));
}

/// Proxies respond like this when they are done with a client.
pub fn what_was_written_before_a_reset_arrives(w: &mut World<'_>) {
    let linger = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    for unread in [false, true] {
        let (a, b) = w.connection();
        if unread {
            w.b.send(b, b"never read", 0).unwrap();
            w.wait(w.a, a, libc::POLLIN);
        } else {
            w.a.setsockopt(a, libc::SOL_SOCKET, libc::SO_LINGER, &linger).unwrap();
        }
        w.say("answer", w.a.send(a, &[7; 3000], 0));
        w.say("close", w.a.close(a));
        w.wait(w.b, b, libc::POLLHUP);
        w.say("waiting", w.b.readable_bytes(b));
        w.say("answer", w.b.recv(b, 4000, MSG_WAITALL).map(|bytes| bytes.len()));
        w.say("end", w.b.recv(b, 1, 0));
        w.say("after it", w.b.recv(b, 1, 0));
    }
}

pub fn refused_connections_can_be_tried_again(w: &mut World<'_>) {
    let (listener, port) = w.listener(0);
    w.a.close(listener).unwrap();
    let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
    w.say("connect", w.b.connect(b, &w.at_a(port)));
    w.say("poll", w.ready(w.b, b));
    w.say("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.say("again", w.b.connect(b, &w.at_a(port)));
    let (_listener, port) = w.listener(0);
    w.say("elsewhere", w.b.connect(b, &w.at_a(port)));
    w.say("connected already", w.b.connect(b, &w.at_a(port)));
    let b = w.b.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    let (listener, port) = w.listener(0);
    w.a.close(listener).unwrap();
    w.say("without waiting", w.b.connect(b, &w.at_a(port)));
    w.wait(w.b, b, libc::POLLHUP);
    w.say("poll", w.ready(w.b, b));
    w.say("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.say("poll after the error", w.ready(w.b, b));
}

pub fn connecting_without_waiting(w: &mut World<'_>) {
    let (listener, at) = w.listener(SOCK_NONBLOCK);
    w.say("nobody yet", w.a.accept4(listener, 0));
    let b = w.b.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    w.say("connect", w.b.connect(b, &w.at_a(at)));
    w.say("poll", names(w.wait(w.b, b, libc::POLLOUT).cast_unsigned().into()));
    w.say("error", w.b.getsockopt(b, libc::SOL_SOCKET, libc::SO_ERROR));
    w.say("connect again", w.b.connect(b, &w.at_a(at)));
    w.say("and again", w.b.connect(b, &w.at_a(at)));
    w.say("readable", names(w.wait(w.a, listener, ALL).cast_unsigned().into()));
    let a = w.a.accept4(listener, SOCK_NONBLOCK).unwrap();
    w.say("nobody else", w.a.accept4(listener, 0));
    w.say("unknown flags", w.a.accept4(listener, 1));
    w.say("recv", w.a.recv(a, 1, 0));
    let peer = port(&w.a.getpeername(a).unwrap());
    let own = port(&w.b.getsockname(b).unwrap());
    w.say("names agree", peer == own);
    w.say("port", port(&w.a.getsockname(a).unwrap()) == at);
}

pub fn sockets_that_are_not_connected(w: &mut World<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    w.say("poll", w.ready(w.a, fd));
    w.say("recv", w.a.recv(fd, 1, 0));
    w.say("send", w.a.send(fd, b"x", MSG_NOSIGNAL));
    w.say("shutdown", w.a.shutdown(fd, libc::SHUT_WR));
    w.say("accept", w.a.accept4(fd, 0));
    w.say("peer", w.a.getpeername(fd));
    w.say("name", w.a.getsockname(fd));
    w.say("short address", w.a.bind(fd, &w.at_a(0)[..15]));
    w.say("family", w.a.bind(fd, &[10; 28]));
    w.say("not ours", w.a.bind(fd, &[2, 0, 0, 0, 192, 0, 2, 77, 0, 0, 0, 0, 0, 0, 0, 0]));
    w.say("bind", w.a.bind(fd, &w.at_a(0)));
    w.say("twice", w.a.bind(fd, &w.at_a(0)));
    w.say("a port", port(&w.a.getsockname(fd).unwrap()) != 0);
    w.say("listen", w.a.listen(fd, 1));
    w.say("listen again", w.a.listen(fd, 2));
    w.say("poll of a listener", w.ready(w.a, fd));
    w.say("recv of a listener", w.a.recv(fd, 1, 0));
    w.say("send of a listener", w.a.send(fd, b"x", MSG_NOSIGNAL));
    w.say("connect of a listener", w.a.connect(fd, &w.at_b(1)));
    w.say("peer of a listener", w.a.getpeername(fd));
    w.say("listens", w.a.getsockopt(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN));
    w.say("close", w.a.close(fd));
    w.say("close again", w.a.close(fd));
    w.say("recv of nothing", w.a.recv(fd, 1, 0));
    w.say("no such address", w.a.connect(-1, &w.at_b(1)));
}

pub fn addresses_in_use(w: &mut World<'_>) {
    let reuse = 1i32.to_ne_bytes();
    let socket = |w: &World<'_>, share: bool| {
        let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
        if share {
            w.a.setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, &reuse).unwrap();
        }
        fd
    };
    let (first, second, third) = (socket(w, true), socket(w, true), socket(w, false));
    w.say("first", w.a.bind(first, &w.at_a(0)));
    let at = port(&w.a.getsockname(first).unwrap());
    w.say("shared", w.a.bind(second, &w.at_a(at)));
    w.say("not shared", w.a.bind(third, &w.at_a(at)));
    w.say("listen", w.a.listen(first, 1));
    w.say("second listen", w.a.listen(second, 1));
    let fourth = socket(w, true);
    w.say("beside a listener", w.a.bind(fourth, &w.at_a(at)));
    w.a.close(first).unwrap();
    w.say("after the listener", w.a.listen(second, 1));
}

pub fn listeners_that_share_a_port(w: &mut World<'_>) {
    let on = 1i32.to_ne_bytes();
    let socket = |w: &World<'_>, shared: bool| {
        let fd = w.a.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
        if shared {
            w.a.setsockopt(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, &on).unwrap();
        }
        fd
    };
    let members = [socket(w, true), socket(w, true), socket(w, true)];
    w.say("first", w.a.bind(members[0], &w.at_a(0)));
    let at = port(&w.a.getsockname(members[0]).unwrap());
    w.say("listens", w.a.listen(members[0], 64));
    for member in &members[1..] {
        w.say("another", w.a.bind(*member, &w.at_a(at)));
        w.say("listens, too", w.a.listen(*member, 64));
    }
    let stranger = socket(w, false);
    w.say("who does not share", w.a.bind(stranger, &w.at_a(at)));
    let dial = |w: &World<'_>| {
        let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(at)).map(|()| b)
    };
    let clients: Vec<_> = (0..60).map(|_| dial(w).unwrap()).collect();
    w.settle();
    let take =
        |w: &World<'_>, member: i32| core::iter::from_fn(|| w.a.accept4(member, 0).ok()).collect::<Vec<_>>();
    let taken: Vec<_> = members.iter().map(|member| take(w, *member)).collect();
    let counts: Vec<usize> = taken.iter().map(Vec::len).collect();
    w.say("all of them", counts.iter().sum::<usize>());
    w.say("shared out", counts.iter().all(|count| *count >= 5));
    taken.iter().flatten().for_each(|fd| w.a.close(*fd).unwrap());
    clients.iter().for_each(|fd| w.b.close(*fd).unwrap());
    // Connections that wait at a closed member are reset with it.
    let clients: Vec<_> = (0..30).map(|_| dial(w).unwrap()).collect();
    w.settle();
    w.say("a member goes", w.a.close(members[0]));
    w.settle();
    let reset = clients.iter().filter(|fd| w.b.recv(**fd, 1, MSG_DONTWAIT) == Err(Errno::CONNRESET)).count();
    let left = take(w, members[1]).len() + take(w, members[2]).len();
    w.say("reset, or with the others", (reset > 0, reset + left));
    w.say("others go on", dial(w).is_ok());
    w.a.close(members[1]).unwrap();
    w.say("the last one", dial(w).is_ok());
    w.a.close(members[2]).unwrap();
    w.say("nobody", dial(w));
}

pub fn copies_of_a_descriptor(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let copy = w.a.dup(a).unwrap();
    w.say("close one", w.a.close(a));
    w.say("send on the other", w.a.send(copy, b"x", 0));
    w.say("arrives", w.b.recv(b, 1, 0));
    w.say("still open", w.b.recv(b, 1, MSG_DONTWAIT));
    w.say("shared flag", w.a.set_nonblocking(copy, true));
    let third = w.a.dup(copy).unwrap();
    w.say("seen by all", w.a.recv(third, 1, 0));
    w.a.close(copy).unwrap();
    w.a.close(third).unwrap();
    w.wait(w.b, b, libc::POLLRDHUP);
    w.say("the end", w.b.recv(b, 1, 0));
}

pub fn full_buffers(w: &mut World<'_>) {
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
    w.say("poll when full", w.ready(w.b, b));
    let mut received = 0;
    while received < sent {
        let bytes = w.a.recv(a, 1 << 20, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 7));
        received += bytes.len();
    }
    w.wait(w.b, b, libc::POLLOUT);
    w.say("all of it", received == sent);
    w.say("poll when empty", w.ready(w.b, b));
}

pub fn shutting_down_reading(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.say("shutdown", w.a.shutdown(a, libc::SHUT_RD));
    w.say("poll", w.ready(w.a, a));
    w.say("recv", w.a.recv(a, 1, 0));
    w.b.send(b, b"after all", 0).unwrap();
    w.settle();
    w.say("recv what came", w.a.recv(a, 100, 0));
    w.say("recv at the end", w.a.recv(a, 100, 0));
    w.say("wrong way", w.a.shutdown(a, 3));
    w.say("both", w.a.shutdown(a, libc::SHUT_RDWR));
    w.say("poll after both", w.ready(w.a, a));
    w.wait(w.b, b, libc::POLLRDHUP);
    w.say("the peer", w.ready(w.b, b));
}

pub fn more_is_to_come(w: &mut World<'_>) {
    let (a, b) = w.connection();
    w.say("some", w.b.send(b, b"ab", libc::MSG_MORE));
    w.say("in parts", w.b.sendv(b, &[b"c", b"de"], libc::MSG_MORE));
    w.say("the last", w.b.send(b, b"f", 0));
    w.say("all of it", w.a.recv(a, 6, libc::MSG_WAITALL));
    w.say("some", w.b.send(b, b"gh", libc::MSG_MORE));
    w.say("and no more", w.b.shutdown(b, libc::SHUT_WR));
    w.say("what there was", w.a.recv(a, 3, libc::MSG_WAITALL));
    w.say("the end", w.a.recv(a, 3, 0));
}

pub mod tests {
    crate::cases! {
        bytes_go_both_ways
        an_end_is_read_behind_the_bytes
        a_reset_is_an_error_once
        unread_bytes_at_close_reset_the_peer
        what_was_written_before_a_reset_arrives
        refused_connections_can_be_tried_again
        connecting_without_waiting
        sockets_that_are_not_connected
        addresses_in_use
        copies_of_a_descriptor
        listeners_that_share_a_port
        full_buffers
        shutting_down_reading
        more_is_to_come
    }
}
