//! Epoll sets.

use crate::sys::{Fd, Fixture, names};
use libc::{
    AF_INET, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, EPOLLEXCLUSIVE, EPOLLIN, EPOLLONESHOT,
    EPOLLOUT, EPOLLRDHUP, EPOLLRDNORM, SHUT_RD, SHUT_WR, SO_RCVLOWAT, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET,
};

const IN: u32 = EPOLLIN as u32;
const OUT: u32 = EPOLLOUT as u32;
const RDHUP: u32 = EPOLLRDHUP as u32;
const ET: u32 = EPOLLET as u32;
const ONESHOT: u32 = EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = EPOLLEXCLUSIVE as u32;

/// Waits for events, for up to 10 seconds.
fn next(w: &Fixture<'_>, set: Fd) -> Vec<(String, u64)> {
    let events = w.a.epoll_wait(set, 8, 10_000).unwrap();
    events.into_iter().map(|(events, data)| (names(events), data)).collect()
}

/// Returns current events without waiting.
fn now(w: &Fixture<'_>, set: Fd) -> Vec<(String, u64)> {
    let events = w.a.epoll_wait(set, 8, 0).unwrap();
    events.into_iter().map(|(events, data)| (names(events), data)).collect()
}

pub fn level_triggered(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.log("add", w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN, 7));
    w.log("add again", w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN, 7));
    w.log("empty", now(w, set));
    w.b.send(b, b"xy", 0).unwrap();
    w.log("readable", next(w, set));
    w.log("level-triggered", now(w, set));
    w.a.recv(a, 1, 0).unwrap();
    w.log("one byte left", now(w, set));
    w.a.recv(a, 1, 0).unwrap();
    w.log("after reading all", now(w, set));
    w.log("writable", w.a.epoll_ctl(set, EPOLL_CTL_MOD, a, IN | OUT | RDHUP, 8));
    w.log("writable event", now(w, set));
    w.b.close(b).unwrap();
    w.wait(w.a, a, libc::POLLRDHUP);
    w.log("end of file", now(w, set));
    w.log("delete", w.a.epoll_ctl(set, EPOLL_CTL_DEL, a, 0, 0));
    w.log("again", w.a.epoll_ctl(set, EPOLL_CTL_DEL, a, 0, 0));
    w.log("modify after delete", w.a.epoll_ctl(set, EPOLL_CTL_MOD, a, IN, 0));
    w.log("after delete", now(w, set));
}

pub fn edge_triggered(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.log("add", w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN | OUT | RDHUP | ET, 1));
    w.log("writable once", next(w, set));
    w.log("no event", now(w, set));
    w.b.send(b, b"x", 0).unwrap();
    w.log("readable once", next(w, set));
    w.log("no event", now(w, set));
    w.b.send(b, b"y", 0).unwrap();
    w.log("next edge without reading", next(w, set));
    w.log("rearmed", w.a.epoll_ctl(set, EPOLL_CTL_MOD, a, IN | ET, 2));
    w.log("still readable", now(w, set));
    w.a.recv(a, 10, 0).unwrap();
    w.log("after reading", now(w, set));
    w.b.close(b).unwrap();
    w.log("end of file", next(w, set));
}

pub fn one_shot(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN | ONESHOT, 1).unwrap();
    w.b.send(b, b"x", 0).unwrap();
    w.log("first event", next(w, set));
    w.b.send(b, b"y", 0).unwrap();
    w.settle();
    w.log("no second event", now(w, set));
    w.log("rearmed", w.a.epoll_ctl(set, EPOLL_CTL_MOD, a, IN | ONESHOT, 2));
    w.log("again", now(w, set));
    w.b.close(b).unwrap();
    w.settle();
    w.log("no event at end of file", now(w, set));
}

pub fn listener_and_several_entries(w: &mut Fixture<'_>) {
    let (listener, port) = w.listener(libc::SOCK_NONBLOCK);
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, listener, IN | EXCLUSIVE, 9).unwrap();
    w.log("modify EPOLLEXCLUSIVE", w.a.epoll_ctl(set, EPOLL_CTL_MOD, listener, IN, 9));
    let mut ends = Vec::new();
    for number in 0..3 {
        let b = w.b.socket(libc::AF_INET, libc::SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(port)).unwrap();
        w.log("listener ready", next(w, set));
        let a = w.a.accept4(listener, 0).unwrap();
        w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN, number).unwrap();
        ends.push((a, b));
    }
    w.log("no event", now(w, set));
    for (_, b) in &ends {
        w.b.send(*b, b"x", 0).unwrap();
        w.settle();
    }
    let mut three = now(w, set);
    three.sort();
    w.log("three sockets ready", three);
    let two = w.a.epoll_wait(set, 2, 0).unwrap().len();
    w.log("maxevents limits the result", two);
    let (first, _) = ends[0];
    let copy = w.a.dup(first).unwrap();
    w.log("close", w.a.close(first));
    w.log("duplicate keeps the entry", now(w, set).len());
    w.log("delete by closed number", w.a.epoll_ctl(set, EPOLL_CTL_DEL, first, 0, 0));
    w.a.close(copy).unwrap();
    w.log("after the last close", now(w, set).len());
}

pub fn nested_sets(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, a, IN, 1).unwrap();
    w.log("add", w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, IN, 2));
    w.log("add to itself", w.a.epoll_ctl(inner, EPOLL_CTL_ADD, inner, IN, 3));
    w.log("cycle", w.a.epoll_ctl(inner, EPOLL_CTL_ADD, outer, IN, 3));
    w.log("no event", now(w, outer));
    w.b.send(b, b"x", 0).unwrap();
    w.log("readable through both sets", next(w, outer));
    w.log("poll", w.ready(w.a, outer));
    w.log("inner set", now(w, inner));
    w.a.recv(a, 1, 0).unwrap();
    w.log("no event", now(w, outer));
    w.log("not an epoll set", w.a.epoll_ctl(a, EPOLL_CTL_ADD, inner, IN, 0));
    w.log("epoll_wait on a socket", w.a.epoll_wait(a, 1, 0));
}

pub fn kernel_descriptors(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&event);
    w.log("add", w.a.epoll_ctl(set, EPOLL_CTL_ADD, number, IN, 1));
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN, 2).unwrap();
    rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
    w.log("kernel descriptor", next(w, set));
    w.b.send(b, b"x", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    let mut seen = Vec::new();
    for _ in 0..16 {
        seen.extend(now(w, set));
    }
    seen.sort();
    seen.dedup();
    w.log("both", seen);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let file = std::os::fd::AsRawFd::as_raw_fd(&file);
    w.log("regular file", w.a.epoll_ctl(set, EPOLL_CTL_ADD, file, IN, 3));
}

pub fn exclusive_kernel_descriptors(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    let events: Vec<_> =
        (0..4).map(|_| rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap()).collect();
    let signal = |at: usize| {
        rustix::io::write(&events[at], &1u64.to_ne_bytes()).unwrap();
    };
    let take = |at: usize| rustix::io::read(&events[at], &mut [0u8; 8]).unwrap();
    for ((event, flags), data) in events.iter().zip([IN, IN, IN | ET, IN]).zip([1, 2, 3, u64::MAX]) {
        let fd = std::os::fd::AsRawFd::as_raw_fd(event);
        w.log("add", w.a.epoll_ctl(set, EPOLL_CTL_ADD, fd, flags | EXCLUSIVE, data));
        w.log("modify", w.a.epoll_ctl(set, EPOLL_CTL_MOD, fd, flags, data));
    }
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN, 5).unwrap();
    w.log("after the time-out", w.a.epoll_wait(set, 8, 10));
    signal(0);
    w.log("level-triggered", next(w, set));
    w.log("level-triggered", next(w, set));
    take(0);
    w.log("after reading", w.a.epoll_wait(set, 8, 10));
    signal(2);
    w.log("edge-triggered", next(w, set));
    w.log("no event", w.a.epoll_wait(set, 8, 10));
    for _ in 0..3 {
        w.b.send(b, b"x", 0).unwrap();
        w.log("socket", next(w, set));
        w.a.recv(a, 1, 0).unwrap();
        w.log("no event", w.a.epoll_wait(set, 1, 10));
    }
    // A sleep reports no more than the call asks for, and keeps the others.
    (0..4).for_each(signal);
    let mut seen = Vec::new();
    for _ in 0..12 {
        let one = w.a.epoll_wait(set, 1, 10_000).unwrap();
        w.log("one event", one.len());
        seen.extend(one.into_iter().map(|(events, data)| (names(events), data)));
    }
    seen.sort();
    w.log("edges are reported once", seen.iter().filter(|(_, data)| *data == 3).count());
    seen.dedup();
    w.log("all are reported", seen);
    for at in [0, 1, 3] {
        take(at);
    }
    w.log("after reading all", w.a.epoll_wait(set, 8, 10));
    let first = std::os::fd::AsRawFd::as_raw_fd(&events[0]);
    w.log("delete", w.a.epoll_ctl(set, EPOLL_CTL_DEL, first, 0, 0));
    signal(0);
    w.log("after delete", w.a.epoll_wait(set, 8, 10));
    w.log("poll of the set", w.ready(w.a, set));
    signal(1);
    w.log("poll of the set", w.ready(w.a, set));
    w.log("event", next(w, set));
}

pub fn shutdown_of_unconnected_socket_wakes(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK).unwrap();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, fd, IN | RDHUP | ET, 1).unwrap();
    w.log("new", w.a.epoll_wait(set, 8, 0));
    w.log("no event", w.a.epoll_wait(set, 8, 0));
    w.log("shutdown of writing", w.a.shutdown(fd, SHUT_WR));
    w.log("event", w.a.epoll_wait(set, 8, 0));
    w.log("shutdown of reading", w.a.shutdown(fd, SHUT_RD));
    w.log("event", w.a.epoll_wait(set, 8, 0));
    w.log("poll", w.ready(w.a, fd));
    w.log("recv", w.a.recv(fd, 1, 0));
}

pub fn lowering_rcvlowat_wakes(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN | OUT | ET, 1).unwrap();
    w.log("writable", w.a.epoll_wait(set, 8, 1000));
    let mark = |bytes: i32| w.a.setsockopt(a, SOL_SOCKET, SO_RCVLOWAT, &bytes.to_ne_bytes());
    w.log("mark of 10", mark(10));
    w.b.send(b, b"abc", 0).unwrap();
    w.settle();
    w.log("below the low-water mark", w.a.epoll_wait(set, 8, 0));
    w.log("mark of 3", mark(3));
    w.log("at the low-water mark", w.a.epoll_wait(set, 8, 0));
    w.log("first event", w.a.epoll_wait(set, 8, 0));
    w.log("mark of 1", mark(1));
    let _ = w.a.epoll_wait(set, 8, 0);
    w.b.send(b, b"d", 0).unwrap();
    w.settle();
    w.log("higher mark", mark(100));
    w.log("event stays queued", w.a.epoll_wait(set, 8, 0));
}

pub fn nested_set_wakes_as_readable(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, fd, OUT | ET, 1).unwrap();
    w.log("new", w.a.epoll_wait(inner, 8, 0));
    w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLRDNORM as u32, 2).unwrap();
    let _ = w.a.shutdown(fd, SHUT_WR);
    w.log("no matching event", w.a.epoll_wait(outer, 8, 0));
    w.log("inner set", w.a.epoll_wait(inner, 8, 0));
}

pub fn epoll_wait_is_no_edge_to_outer_set(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, fd, IN, 1).unwrap();
    w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, IN | ET, 2).unwrap();
    w.log("outer set", w.a.epoll_wait(outer, 8, 0));
    w.log("inner set", w.a.epoll_wait(inner, 8, 0));
    w.log("outer set again", w.a.epoll_wait(outer, 8, 0));
}

pub fn new_outer_set_reports_pending_events(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, a, IN | ET, 1).unwrap();
    w.b.send(b, b"x", 0).unwrap();
    w.settle();
    w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, EPOLLRDNORM as u32, 2).unwrap();
    w.log("outer set", w.a.epoll_wait(outer, 8, 0));
}

pub fn consumed_bytes_are_an_edge(w: &mut Fixture<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN | OUT | ET, 1).unwrap();
    w.log("writable", w.a.epoll_wait(set, 8, 1000));
    w.b.send(b, b"abc", 0).unwrap();
    w.settle();
    w.log("after reading", w.a.recv(a, 10, 0));
    w.log("writable again", w.a.epoll_wait(set, 8, 0));
}

pub fn modifying_a_ready_entry_is_no_edge(w: &mut Fixture<'_>) {
    let fd = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, fd, IN, 1).unwrap();
    w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, IN | ET, 2).unwrap();
    w.log("outer set", w.a.epoll_wait(outer, 8, 0));
    w.log("changed", w.a.epoll_ctl(inner, libc::EPOLL_CTL_MOD, fd, IN | OUT, 3));
    w.log("outer set again", w.a.epoll_wait(outer, 8, 0));
    w.log("inner set", w.a.epoll_wait(inner, 8, 0));
}

pub fn fionread_of_epoll_set(w: &mut Fixture<'_>) {
    let set = w.a.epoll_create().unwrap();
    w.log("FIONREAD", w.a.readable_bytes(set));
}

/// `EPIOCSPARAMS` and `EPIOCGPARAMS`: `busy_poll_usecs`, `busy_poll_budget`, `prefer_busy_poll` and a pad.
pub fn busy_poll_parameters(w: &mut Fixture<'_>) {
    let set = w.a.epoll_create().unwrap();
    w.log("at first", w.a.epoll_params(set));
    let params = |usecs: u32, budget: u16, prefer: u8, pad: u8| {
        let mut params = [0; 8];
        params[..4].copy_from_slice(&usecs.to_ne_bytes());
        params[4..6].copy_from_slice(&budget.to_ne_bytes());
        (params[6], params[7]) = (prefer, pad);
        params
    };
    for (label, value) in [
        ("all", params(5000, 64, 1, 0)),
        ("pad", params(1, 1, 0, 1)),
        ("preference", params(1, 1, 2, 0)),
        ("too long", params(u32::MAX, 1, 0, 0)),
        ("longest", params(i32::MAX as u32, 1, 0, 0)),
        ("large budget", params(2, u16::MAX, 0, 0)),
        ("none", params(0, 0, 0, 0)),
    ] {
        w.log(label, (w.a.set_epoll_params(set, value), w.a.epoll_params(set)));
    }
    let without = crate::kernel::without_network_capabilities(|| {
        [64, 65].map(|budget| w.a.set_epoll_params(set, params(3, budget, 0, 0)))
    });
    w.log("without capabilities", (without, w.a.epoll_params(set)));
    for kind in [libc::SOCK_STREAM, libc::SOCK_DGRAM] {
        let fd = w.a.socket(w.domain(), kind).unwrap();
        w.log("of a socket", (w.a.epoll_params(fd), w.a.set_epoll_params(fd, params(0, 0, 0, 0))));
    }
}

pub mod tests {
    crate::cases! {
        shutdown_of_unconnected_socket_wakes
        lowering_rcvlowat_wakes
        nested_set_wakes_as_readable
        epoll_wait_is_no_edge_to_outer_set
        new_outer_set_reports_pending_events
        consumed_bytes_are_an_edge
        modifying_a_ready_entry_is_no_edge
        fionread_of_epoll_set
        busy_poll_parameters
        level_triggered
        edge_triggered
        one_shot
        listener_and_several_entries
        nested_sets
        kernel_descriptors
        exclusive_kernel_descriptors
    }
}
