//! Epoll sets.

use crate::sys::{Fd, World, names};
use libc::{
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLET, EPOLLEXCLUSIVE, EPOLLIN, EPOLLONESHOT, EPOLLOUT,
    EPOLLRDHUP,
};

const IN: u32 = EPOLLIN as u32;
const OUT: u32 = EPOLLOUT as u32;
const RDHUP: u32 = EPOLLRDHUP as u32;
const ET: u32 = EPOLLET as u32;
const ONESHOT: u32 = EPOLLONESHOT as u32;
const EXCLUSIVE: u32 = EPOLLEXCLUSIVE as u32;

/// Waits for events, for up to 10 seconds.
fn next(w: &World<'_>, set: Fd) -> Vec<(String, u64)> {
    let events = w.a.epoll_wait(set, 8, 10_000).unwrap();
    events.into_iter().map(|(events, data)| (names(events), data)).collect()
}

/// Returns current events without waiting.
fn now(w: &World<'_>, set: Fd) -> Vec<(String, u64)> {
    let events = w.a.epoll_wait(set, 8, 0).unwrap();
    events.into_iter().map(|(events, data)| (names(events), data)).collect()
}

pub fn level_triggered(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.say("add", w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN, 7));
    w.say("twice", w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN, 7));
    w.say("nothing", now(w, set));
    w.b.send(b, b"xy", 0).unwrap();
    w.say("something", next(w, set));
    w.say("still there", now(w, set));
    w.a.recv(a, 1, 0).unwrap();
    w.say("one byte left", now(w, set));
    w.a.recv(a, 1, 0).unwrap();
    w.say("all read", now(w, set));
    w.say("writable", w.a.epoll_ctl(set, EPOLL_CTL_MOD, a, IN | OUT | RDHUP, 8));
    w.say("at once", now(w, set));
    w.b.close(b).unwrap();
    w.wait(w.a, a, libc::POLLRDHUP);
    w.say("the end", now(w, set));
    w.say("delete", w.a.epoll_ctl(set, EPOLL_CTL_DEL, a, 0, 0));
    w.say("again", w.a.epoll_ctl(set, EPOLL_CTL_DEL, a, 0, 0));
    w.say("modify what is gone", w.a.epoll_ctl(set, EPOLL_CTL_MOD, a, IN, 0));
    w.say("nothing any more", now(w, set));
}

pub fn edge_triggered(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.say("add", w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN | OUT | RDHUP | ET, 1));
    w.say("writable once", next(w, set));
    w.say("no more", now(w, set));
    w.b.send(b, b"x", 0).unwrap();
    w.say("readable once", next(w, set));
    w.say("no more", now(w, set));
    w.b.send(b, b"y", 0).unwrap();
    w.say("again, though not read", next(w, set));
    w.say("rearmed", w.a.epoll_ctl(set, EPOLL_CTL_MOD, a, IN | ET, 2));
    w.say("still readable", now(w, set));
    w.a.recv(a, 10, 0).unwrap();
    w.say("read", now(w, set));
    w.b.close(b).unwrap();
    w.say("the end", next(w, set));
}

pub fn one_shot(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN | ONESHOT, 1).unwrap();
    w.b.send(b, b"x", 0).unwrap();
    w.say("once", next(w, set));
    w.b.send(b, b"y", 0).unwrap();
    w.settle();
    w.say("not again", now(w, set));
    w.say("rearmed", w.a.epoll_ctl(set, EPOLL_CTL_MOD, a, IN | ONESHOT, 2));
    w.say("again", now(w, set));
    w.b.close(b).unwrap();
    w.settle();
    w.say("not even the end", now(w, set));
}

pub fn a_listener_and_several_entries(w: &mut World<'_>) {
    let (listener, port) = w.listener(libc::SOCK_NONBLOCK);
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, listener, IN | EXCLUSIVE, 9).unwrap();
    w.say("cannot be changed", w.a.epoll_ctl(set, EPOLL_CTL_MOD, listener, IN, 9));
    let mut ends = Vec::new();
    for number in 0..3 {
        let b = w.b.socket(libc::AF_INET, libc::SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(port)).unwrap();
        w.say("somebody", next(w, set));
        let a = w.a.accept4(listener, 0).unwrap();
        w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN, number).unwrap();
        ends.push((a, b));
    }
    w.say("nobody", now(w, set));
    for (_, b) in &ends {
        w.b.send(*b, b"x", 0).unwrap();
        w.settle();
    }
    let mut three = now(w, set);
    three.sort();
    w.say("all three", three);
    let two = w.a.epoll_wait(set, 2, 0).unwrap().len();
    w.say("as many as asked for", two);
    let (first, _) = ends[0];
    let copy = w.a.dup(first).unwrap();
    w.say("close", w.a.close(first));
    w.say("its copy keeps it", now(w, set).len());
    w.say("not by its name", w.a.epoll_ctl(set, EPOLL_CTL_DEL, first, 0, 0));
    w.a.close(copy).unwrap();
    w.say("gone with the last", now(w, set).len());
}

pub fn sets_in_sets(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let (inner, outer) = (w.a.epoll_create().unwrap(), w.a.epoll_create().unwrap());
    w.a.epoll_ctl(inner, EPOLL_CTL_ADD, a, IN, 1).unwrap();
    w.say("add", w.a.epoll_ctl(outer, EPOLL_CTL_ADD, inner, IN, 2));
    w.say("itself", w.a.epoll_ctl(inner, EPOLL_CTL_ADD, inner, IN, 3));
    w.say("a circle", w.a.epoll_ctl(inner, EPOLL_CTL_ADD, outer, IN, 3));
    w.say("quiet", now(w, outer));
    w.b.send(b, b"x", 0).unwrap();
    w.say("through both", next(w, outer));
    w.say("poll says so too", w.ready(w.a, outer));
    w.say("the inner", now(w, inner));
    w.a.recv(a, 1, 0).unwrap();
    w.say("quiet again", now(w, outer));
    w.say("bad set", w.a.epoll_ctl(a, EPOLL_CTL_ADD, inner, IN, 0));
    w.say("no room", w.a.epoll_wait(a, 1, 0));
}

pub fn descriptors_of_the_kernel(w: &mut World<'_>) {
    let (a, b) = w.connection();
    let set = w.a.epoll_create().unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&event);
    w.say("add", w.a.epoll_ctl(set, EPOLL_CTL_ADD, number, IN, 1));
    w.a.epoll_ctl(set, EPOLL_CTL_ADD, a, IN, 2).unwrap();
    rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
    w.say("the kernel's", next(w, set));
    w.b.send(b, b"x", 0).unwrap();
    w.wait(w.a, a, libc::POLLIN);
    let mut seen = Vec::new();
    for _ in 0..16 {
        seen.extend(now(w, set));
    }
    seen.sort();
    seen.dedup();
    w.say("both", seen);
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let file = std::os::fd::AsRawFd::as_raw_fd(&file);
    w.say("not a file", w.a.epoll_ctl(set, EPOLL_CTL_ADD, file, IN, 3));
}

pub mod tests {
    crate::cases! {
        level_triggered
        edge_triggered
        one_shot
        a_listener_and_several_entries
        sets_in_sets
        descriptors_of_the_kernel
    }
}
