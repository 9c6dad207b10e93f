//! Cases that the differential test has found.

use crate::sys::World;
use libc::{
    AF_INET, EPOLL_CTL_ADD, EPOLLET, EPOLLIN, EPOLLOUT, EPOLLRDHUP, EPOLLRDNORM, IPPROTO_TCP, MSG_NOSIGNAL,
    SHUT_RD, SHUT_RDWR, SHUT_WR, SO_RCVLOWAT, SO_RCVTIMEO, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET,
    TCP_QUICKACK,
};

const ET: u32 = EPOLLET as u32;
const IN: u32 = EPOLLIN as u32;
const OUT: u32 = EPOLLOUT as u32;

pub fn whoever_asks_first_finds_what_came_before(w: &mut World<'_>) {
    let (listener, port) = w.listener(SOCK_NONBLOCK);
    let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
    w.b.connect(b, &w.at_a(port)).unwrap();
    w.settle();
    w.say("accept", w.a.accept4(listener, 0).is_ok());
}

pub fn bytes_after_both_directions_were_shut_reset(w: &mut World<'_>) {
    for ways in [[SHUT_RDWR, SHUT_RDWR], [SHUT_RD, SHUT_WR], [SHUT_WR, SHUT_RD]] {
        let (a, b) = w.connection();
        w.b.send(b, b"before", 0).unwrap();
        w.wait(w.a, a, libc::POLLIN);
        for way in ways {
            w.say("shutdown", w.a.shutdown(a, way));
        }
        w.settle();
        w.say("what came before", w.a.recv(a, 10, 0));
        w.say("quiet", w.ready(w.a, a));
        w.say("nobody reads this", w.b.send(b, b"after", MSG_NOSIGNAL));
        w.wait(w.b, b, libc::POLLHUP);
        w.say("the sender", w.ready(w.b, b));
        w.say("sends again", w.b.send(b, b"x", MSG_NOSIGNAL));
        w.say("the other", w.ready(w.a, a));
        w.say("sends", w.a.send(a, b"x", MSG_NOSIGNAL));
        w.say("sends again", w.a.send(a, b"x", MSG_NOSIGNAL));
    }
}

pub fn shutting_down_what_is_not_connected(w: &mut World<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, fd, IN | EPOLLRDHUP as u32 | ET, 1).unwrap();
    w.say("new", w.a.epoll_wait(set, 8, 0));
    w.say("no more", w.a.epoll_wait(set, 8, 0));
    w.say("writing", w.a.shutdown(fd, SHUT_WR));
    w.say("wakes", w.a.epoll_wait(set, 8, 0));
    w.say("reading", w.a.shutdown(fd, SHUT_RD));
    w.say("wakes", w.a.epoll_wait(set, 8, 0));
    w.say("stays so", w.ready(w.a, fd));
    w.say("recv", w.a.recv(fd, 1, 0));
}

pub fn shutting_down_before_asking_how_connecting_went(w: &mut World<'_>) {
    let connecting = |w: &mut World<'_>, to| {
        let b = w.b.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
        w.say("connect", w.b.connect(b, &w.at_a(to)));
        w.settle();
        b
    };
    let (listener, port) = w.listener(0);
    let b = connecting(w, port);
    w.say("shutdown", w.b.shutdown(b, SHUT_WR));
    w.say("connected by then", w.b.connect(b, &w.at_a(port)));
    w.a.close(listener).unwrap();
    let b = connecting(w, port);
    w.say("shutdown", w.b.shutdown(b, SHUT_WR));
    w.say("refused by then", w.b.connect(b, &w.at_a(port)));
}

pub fn a_port_that_was_chosen_goes_with_the_listener(w: &mut World<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    w.a.listen(fd, 8).unwrap();
    let name = w.a.getsockname(fd).unwrap();
    w.say("shutdown", w.a.shutdown(fd, SHUT_RD));
    w.say("it still tells", w.a.getsockname(fd) == Ok(name.clone()));
    let other = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    w.say("others may have it", w.a.bind(other, &name));
}

pub fn an_address_that_was_named_stays_with_the_socket(w: &mut World<'_>) {
    let (fd, _) = w.listener(0);
    w.say("shutdown", w.a.shutdown(fd, SHUT_RD));
    w.say("listen again", w.a.listen(fd, 8));
    let name = w.a.getsockname(fd).unwrap();
    w.say("the same address", name[4..8] == w.at_a(0)[4..8]);
}

pub fn a_low_water_mark_wakes(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN | OUT | ET, 1).unwrap();
    w.say("writable", w.a.epoll_wait(set, 8, 1000));
    let mark = |bytes: i32| w.a.setsockopt(a, SOL_SOCKET, SO_RCVLOWAT, &bytes.to_ne_bytes());
    w.say("ten", mark(10));
    w.b.send(b, b"abc", 0).unwrap();
    w.settle();
    w.say("too few", w.a.epoll_wait(set, 8, 0));
    w.say("three", mark(3));
    w.say("enough", w.a.epoll_wait(set, 8, 0));
    w.say("once", w.a.epoll_wait(set, 8, 0));
    w.say("one", mark(1));
    let _ = w.a.epoll_wait(set, 8, 0);
    w.b.send(b, b"d", 0).unwrap();
    w.settle();
    w.say("more", mark(100));
    w.say("it was enough when it came", w.a.epoll_wait(set, 8, 0));
}

pub fn sets_around_a_set_hear_of_it_as_of_something_readable(w: &mut World<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, fd, OUT | ET, 1).unwrap();
    w.say("new", w.a.epoll_wait(inner, 8, 0));
    w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLRDNORM as u32, 2).unwrap();
    let _ = w.a.shutdown(fd, SHUT_WR);
    w.say("nothing for these events", w.a.epoll_wait(outer, 8, 0));
    w.say("the inner one", w.a.epoll_wait(inner, 8, 0));
}

pub fn taking_from_a_set_is_nothing_new_to_sets_around_it(w: &mut World<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, fd, IN, 1).unwrap();
    w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, IN | ET, 2).unwrap();
    w.say("the outer", w.a.epoll_wait(outer, 8, 0));
    w.say("the inner", w.a.epoll_wait(inner, 8, 0));
    w.say("the outer again", w.a.epoll_wait(outer, 8, 0));
}

pub fn as_many_wait_as_listen_says(w: &mut World<'_>) {
    for backlog in [0, 1, 3] {
        let (listener, port) = w.listener(SOCK_NONBLOCK);
        w.a.listen(listener, backlog).unwrap();
        // An earlier call was made while no connection existed.
        w.say("nobody yet", w.a.accept4(listener, 0));
        let mut connecting = Vec::new();
        for _ in 0..6 {
            let b = w.b.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
            w.say("connect", w.b.connect(b, &w.at_a(port)));
            connecting.push(b);
            w.settle();
        }
        let waiting = connecting.iter().filter(|b| w.ready(w.b, **b) == "OUT|WRNORM").count();
        w.say("connected", waiting);
        let accepted = core::iter::from_fn(|| w.a.accept4(listener, 0).ok()).count();
        w.say("accepted", accepted);
        for fd in connecting {
            w.b.close(fd).unwrap();
        }
    }
}

pub fn a_new_set_around_a_set_hears_what_came_before(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, a, IN | ET, 1).unwrap();
    w.b.send(b, b"x", 0).unwrap();
    w.settle();
    w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLRDNORM as u32, 2).unwrap();
    w.say("the outer", w.a.epoll_wait(outer, 8, 0));
}

pub fn bytes_that_came_and_went_are_an_edge(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN | OUT | ET, 1).unwrap();
    w.say("writable", w.a.epoll_wait(set, 8, 1000));
    w.b.send(b, b"abc", 0).unwrap();
    w.settle();
    w.say("read", w.a.recv(a, 10, 0));
    w.say("writable again", w.a.epoll_wait(set, 8, 0));
}

pub fn changing_what_is_in_the_list_already_is_nothing_new(w: &mut World<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, fd, IN, 1).unwrap();
    w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, IN | ET, 2).unwrap();
    w.say("the outer", w.a.epoll_wait(outer, 8, 0));
    w.say("changed", w.a.epoll_ctl(inner, libc::EPOLL_CTL_MOD, fd, IN | OUT, 3));
    w.say("the outer again", w.a.epoll_wait(outer, 8, 0));
    w.say("the inner", w.a.epoll_wait(inner, 8, 0));
}

pub fn connections_are_accepted_in_the_order_in_which_they_came(w: &mut World<'_>) {
    let (listener, port) = w.listener(SOCK_NONBLOCK);
    let come = |w: &mut World<'_>| {
        let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(port)).unwrap();
        crate::sys::port(&w.b.getsockname(b).unwrap())
    };
    let mut came = vec![come(w), come(w)];
    let mut went = Vec::new();
    let mut take = |w: &mut World<'_>| {
        w.wait(w.a, listener, libc::POLLIN);
        let fd = w.a.accept4(listener, 0).unwrap();
        went.push(crate::sys::port(&w.a.getpeername(fd).unwrap()));
    };
    take(w);
    came.extend([come(w), come(w)]);
    w.settle();
    (0..3).for_each(|_| take(w));
    w.say("in order", came == went);
}

pub fn what_was_left_in_revents_means_nothing(w: &mut World<'_>) {
    let (a, _b) = w.connection();
    let mut fds = [libc::pollfd { fd: a, events: libc::POLLIN, revents: -1 }];
    w.say("nothing is ready", w.a.poll(&mut fds, 0));
    w.say("of all that was there", fds[0].revents);
}

pub fn small_things(w: &mut World<'_>) {
    let set = w.a.epoll_create().unwrap();
    w.say("bytes of a set", w.a.readable_bytes(set));
    let (a, b) = w.connection();
    let time = [0i64.to_ne_bytes(), 1000i64.to_ne_bytes()].concat();
    w.a.setsockopt(a, SOL_SOCKET, SO_RCVTIMEO, &time).unwrap();
    w.say("in parts", w.b.sendv(b, &[b"ab", b"", b"cde"], 0));
    w.wait(w.a, a, libc::POLLIN);
    w.say(
        "select",
        w.a.select(&[vec![a], vec![a], vec![a]]).map(|(count, sets)| (count, sets.map(|s| s.len()))),
    );
    w.say("and back", w.a.recvv(a, &[1, 3, 9], 0));
    w.say("waits in vain", w.a.recv(a, 1, 0));
    w.say("waits with no room", w.a.recv(a, 0, 0));
    w.b.close(b).unwrap();
    w.wait(w.a, a, libc::POLLRDHUP);
    w.a.send(a, b"x", 0).unwrap();
    w.wait(w.a, a, libc::POLLHUP);
    w.say("option of what is over", w.a.setsockopt(a, IPPROTO_TCP, TCP_QUICKACK, &1i32.to_ne_bytes()));
}

pub mod tests {
    crate::cases! {
        whoever_asks_first_finds_what_came_before
        bytes_after_both_directions_were_shut_reset
        shutting_down_what_is_not_connected
        shutting_down_before_asking_how_connecting_went
        a_port_that_was_chosen_goes_with_the_listener
        a_low_water_mark_wakes
        an_address_that_was_named_stays_with_the_socket
        sets_around_a_set_hear_of_it_as_of_something_readable
        taking_from_a_set_is_nothing_new_to_sets_around_it
        as_many_wait_as_listen_says
        a_new_set_around_a_set_hears_what_came_before
        bytes_that_came_and_went_are_an_edge
        changing_what_is_in_the_list_already_is_nothing_new
        connections_are_accepted_in_the_order_in_which_they_came
        what_was_left_in_revents_means_nothing
        small_things
    }
}
