//! Signals that come while a call waits.

use crate::kernel::{self, Handler};
use crate::stack::Stacks;
use crate::sys::{Fd, Sys, World, port};
use libc::{AF_INET, MSG_WAITALL, SIGUSR1, SIGUSR2, SOCK_STREAM};
use std::io::IoSliceMut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const WHILE: Duration = Duration::from_millis(40);

/// Waits until a thread sleeps or has ended, which may be late on a busy machine.
fn until_it_rests(thread: i32) {
    let path = format!("/proc/self/task/{thread}/stat");
    // The state follows the thread's name, which is in parentheses.
    let runs = |stat: String| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['R', 'D']));
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end && std::fs::read_to_string(&path).is_ok_and(runs) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Records the result of a call that is interrupted by a signal while it waits. If the call continues to
/// wait, `then` ends it.
fn interrupted(
    w: &mut World<'_>,
    what: &str,
    signal: i32,
    call: impl Fn(&dyn Sys) -> String + Sync,
    then: impl FnOnce(&World<'_>),
) {
    let (sys, ran) = (w.a, kernel::handled());
    let line = std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let call = &call;
        let thread = scope.spawn(move || {
            tell.send(kernel::this_thread()).unwrap();
            call(sys)
        });
        let number = told.recv().unwrap();
        std::thread::sleep(WHILE);
        until_it_rests(number);
        let waited = !thread.is_finished();
        kernel::interrupt(number, signal);
        std::thread::sleep(WHILE);
        until_it_rests(number);
        let goes_on = !thread.is_finished();
        if goes_on {
            then(w);
        }
        let result = thread.join().unwrap();
        format!("waited {waited}, handler ran {}, goes on {goes_on}: {result}", kernel::handled() - ran)
    });
    w.say(what, line);
}

fn recv(w: &mut World<'_>, what: &str, signal: i32, ends: (Fd, Fd)) {
    let (a, b) = ends;
    let call = move |sys: &dyn Sys| format!("{:?}", sys.recv(a, 10, 0));
    interrupted(w, what, signal, call, |w| {
        let _ = w.b.send(b, b"x", 0);
    });
}

/// Interrupts `send` on a connection whose peer does not read. Filling it takes long: the rest of a window
/// that is less than a segment is used only when a window probe is due.
fn send(w: &mut World<'_>, signal: i32, (a, b): (Fd, Fd)) {
    let chunk = vec![7; 1 << 20];
    w.a.set_nonblocking(a, true).unwrap();
    let mut quiet = 0;
    while quiet < 12 {
        quiet += 1;
        while w.a.send(a, &chunk, 0).is_ok() || w.a.send(a, b"x", 0).is_ok() {
            quiet = 0;
        }
        w.settle();
    }
    w.a.set_nonblocking(a, false).unwrap();
    let drain = |w: &World<'_>| {
        w.b.set_nonblocking(b, true).unwrap();
        for _ in 0..20 {
            while w.b.recv(b, 1 << 20, 0).is_ok() {}
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let call = move |sys: &dyn Sys| format!("{:?}", sys.send(a, b"x", 0));
    interrupted(w, "send", signal, call, drain);
}

fn all_calls(w: &mut World<'_>, what: &str, signal: i32, with_send: bool) {
    let (a, b) = w.connection();
    w.say("handlers", what);
    recv(w, "recv", signal, (a, b));
    w.b.send(b, b"abc", 0).unwrap();
    let call = move |sys: &dyn Sys| format!("{:?}", sys.recv(a, 10, MSG_WAITALL));
    interrupted(w, "recv of more than there is", signal, call, |w| {
        let _ = w.b.send(b, b"0123456789", 0);
    });
    let _ = w.a.recv(a, 100, libc::MSG_DONTWAIT);
    let (listener, at) = w.listener(0);
    let call = move |sys: &dyn Sys| format!("{:?}", sys.accept4(listener, 0).is_ok());
    interrupted(w, "accept", signal, call, |w| {
        let b = w.b.socket(AF_INET, SOCK_STREAM).unwrap();
        w.b.connect(b, &w.at_a(at)).unwrap();
    });
    if with_send {
        send(w, signal, (a, b));
    }
    let call = move |sys: &dyn Sys| {
        let mut fds = [libc::pollfd { fd: a, events: libc::POLLIN, revents: 0 }];
        format!("{:?}", sys.poll(&mut fds, 10_000))
    };
    interrupted(w, "poll", signal, call, |w| {
        let _ = w.b.send(b, b"x", 0);
    });
    let set = w.a.epoll_create().unwrap();
    w.a.epoll_ctl(set, libc::EPOLL_CTL_ADD, a, libc::EPOLLIN as u32, 1).unwrap();
    let call = move |sys: &dyn Sys| format!("{:?}", sys.epoll_wait(set, 1, -1));
    interrupted(w, "epoll_wait", signal, call, |w| {
        let _ = w.b.send(b, b"x", 0);
    });
    let limit = [10i64.to_ne_bytes(), 0i64.to_ne_bytes()].concat();
    w.a.setsockopt(a, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &limit).unwrap();
    recv(w, "recv with a time-out", signal, (a, b));
    let far = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    w.say("port", port(&w.a.getsockname(far).unwrap()));
    for fd in [a, listener, set, far] {
        w.a.close(fd).unwrap();
    }
    w.b.close(b).unwrap();
}

pub fn handlers_and_calls_that_wait(w: &mut World<'_>) {
    for (restarting, interrupting) in [(true, false), (false, true), (true, true)] {
        kernel::handle(SIGUSR1, if restarting { Handler::Restarts } else { Handler::None });
        kernel::handle(SIGUSR2, if interrupting { Handler::Interrupts } else { Handler::None });
        w.a.handlers_changed();
        if restarting {
            all_calls(w, "one that restarts", SIGUSR1, interrupting);
        }
        if interrupting {
            all_calls(w, "one that does not", SIGUSR2, false);
        }
    }
    kernel::handle(SIGUSR1, Handler::None);
    kernel::handle(SIGUSR2, Handler::None);
}

pub mod tests {
    crate::cases! {
        handlers_and_calls_that_wait
    }
}

/// Data of the handler: the stacks, and both ends of a connection between them.
static OF_HANDLERS: OnceLock<(Stacks, Fd, Fd)> = OnceLock::new();
/// Calls of the handler that succeeded, and calls that failed because the interrupted thread was using the
/// sockets.
static CAME_THROUGH: AtomicUsize = AtomicUsize::new(0);
static PUT_OFF: AtomicUsize = AtomicUsize::new(0);

extern "C" fn call_sockets(_: i32) {
    let Some((stacks, a, _)) = OF_HANDLERS.get() else { return };
    // The handler allocates no memory, because the interrupted code may be in the allocator.
    let mut byte = [0];
    match stacks.a().0.recv(*a, &mut [IoSliceMut::new(&mut byte)], libc::MSG_PEEK | libc::MSG_DONTWAIT) {
        Ok(_) => CAME_THROUGH.fetch_add(1, Ordering::Relaxed),
        Err(_) => PUT_OFF.fetch_add(1, Ordering::Relaxed),
    };
}

#[test]
fn handlers_may_call_functions_of_sockets_whatever_they_interrupt() {
    let stacks = Stacks::start();
    let (a, b) = World::new(stacks.a(), stacks.b(), crate::stack::ADDRESSES).connection();
    // A byte is always available, so a call that finds none was deferred.
    stacks.b().send(b, b"xy", 0).unwrap();
    let mut fds = [libc::pollfd { fd: a, events: libc::POLLIN, revents: 0 }];
    stacks.a().poll(&mut fds, 10_000).unwrap();
    let (stacks, a, _) = OF_HANDLERS.get_or_init(|| (stacks, a, b));
    kernel::handle_by(libc::SIGURG, call_sockets);
    let (tell, told) = std::sync::mpsc::channel();
    let end = Instant::now() + Duration::from_secs(1);
    let calls = std::thread::scope(|scope| {
        let busy = scope.spawn(move || {
            tell.send(kernel::this_thread()).unwrap();
            let mut calls = 0;
            while Instant::now() < end {
                let mut fds = [libc::pollfd { fd: *a, events: libc::POLLIN, revents: 0 }];
                assert_eq!(stacks.a().poll(&mut fds, 0), Ok(1));
                calls += 1;
            }
            calls
        });
        let thread = told.recv().unwrap();
        while !busy.is_finished() {
            kernel::interrupt(thread, libc::SIGURG);
        }
        busy.join().unwrap()
    });
    let (through, put_off) = (CAME_THROUGH.load(Ordering::Relaxed), PUT_OFF.load(Ordering::Relaxed));
    assert!(calls > 100 && through > 0 && put_off > 0, "{calls} calls, {through} through, {put_off} put off");
}
