//! Signals that come while a call waits.

use crate::kernel::{self, Handler};
use crate::stack::Stacks;
use crate::sys::{Fd, Fixture, Sys, port};
use ginnel_posix_ops::UserSliceMut;
use libc::{AF_INET, MSG_WAITALL, SIGUSR1, SIGUSR2, SOCK_STREAM};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const OBSERVATION_TIME: Duration = Duration::from_millis(40);

/// Waits until a thread sleeps or has ended, which may be late on a busy machine.
fn wait_until_asleep(thread: i32) {
    let path = format!("/proc/self/task/{thread}/stat");
    // The state follows the thread's name, which is in parentheses.
    let runs = |stat: String| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['R', 'D']));
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end && std::fs::read_to_string(&path).is_ok_and(runs) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a thread that is about to make a blocking call sleeps in it.
pub fn wait_in_call(thread: i32) {
    std::thread::sleep(OBSERVATION_TIME);
    wait_until_asleep(thread);
}

/// Records the result of a call that is interrupted by a signal while it waits. If the call continues to
/// wait, `then` ends it.
fn interrupted(
    w: &mut Fixture<'_>,
    label: &str,
    signal: i32,
    call: impl Fn(&dyn Sys) -> String + Sync,
    then: impl FnOnce(&Fixture<'_>),
) {
    let (sys, ran) = (w.a, kernel::handler_runs());
    let line = std::thread::scope(|scope| {
        let (sender, receiver) = std::sync::mpsc::channel();
        let call = &call;
        let thread = scope.spawn(move || {
            sender.send(kernel::this_thread()).unwrap();
            call(sys)
        });
        let number = receiver.recv().unwrap();
        wait_in_call(number);
        let waited = !thread.is_finished();
        kernel::interrupt(number, signal);
        std::thread::sleep(OBSERVATION_TIME);
        wait_until_asleep(number);
        let continues = !thread.is_finished();
        if continues {
            then(w);
        }
        let result = thread.join().unwrap();
        format!(
            "waited {waited}, handler ran {}, continues {continues}: {result}",
            kernel::handler_runs() - ran
        )
    });
    w.log(label, line);
}

fn recv(w: &mut Fixture<'_>, label: &str, signal: i32, ends: (Fd, Fd)) {
    let (a, b) = ends;
    let call = move |sys: &dyn Sys| format!("{:?}", sys.recv(a, 10, 0));
    interrupted(w, label, signal, call, |w| {
        let _ = w.b.send(b, b"x", 0);
    });
}

/// Interrupts `send` on a connection whose peer does not read. Filling it takes long: the rest of a window
/// that is less than a segment is used only when a window probe is due.
fn send(w: &mut Fixture<'_>, signal: i32, (a, b): (Fd, Fd)) {
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
    let drain = |w: &Fixture<'_>| {
        w.b.set_nonblocking(b, true).unwrap();
        for _ in 0..20 {
            while w.b.recv(b, 1 << 20, 0).is_ok() {}
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let call = move |sys: &dyn Sys| format!("{:?}", sys.send(a, b"x", 0));
    interrupted(w, "send", signal, call, drain);
}

fn all_calls(w: &mut Fixture<'_>, label: &str, signal: i32, with_send: bool) {
    let (a, b) = w.connection();
    w.log("handlers", label);
    recv(w, "recv", signal, (a, b));
    w.b.send(b, b"abc", 0).unwrap();
    let call = move |sys: &dyn Sys| format!("{:?}", sys.recv(a, 10, MSG_WAITALL));
    interrupted(w, "recv with MSG_WAITALL", signal, call, |w| {
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
    recv(w, "recv with a timeout", signal, (a, b));
    let far = w.a.socket(AF_INET, SOCK_STREAM).unwrap();
    w.log("port", port(&w.a.getsockname(far).unwrap()));
    for fd in [a, listener, set, far] {
        w.a.close(fd).unwrap();
    }
    w.b.close(b).unwrap();
}

pub fn signals_interrupt_blocking_calls(w: &mut Fixture<'_>) {
    for (restarting, interrupting) in [(true, false), (false, true), (true, true)] {
        kernel::set_handler(SIGUSR1, if restarting { Handler::Restarts } else { Handler::None });
        kernel::set_handler(SIGUSR2, if interrupting { Handler::Interrupts } else { Handler::None });
        w.a.handlers_changed();
        if restarting {
            all_calls(w, "with SA_RESTART", SIGUSR1, interrupting);
        }
        if interrupting {
            all_calls(w, "without SA_RESTART", SIGUSR2, false);
        }
    }
    kernel::set_handler(SIGUSR1, Handler::None);
    kernel::set_handler(SIGUSR2, Handler::None);
}

pub mod tests {
    crate::cases! {
        signals_interrupt_blocking_calls
    }
}

/// Data of the handler: the stacks, and both ends of a connection between them.
static HANDLER_DATA: OnceLock<(Stacks, Fd, Fd)> = OnceLock::new();
/// Calls of the handler that succeeded, and calls that failed because the interrupted thread was using the
/// sockets.
static SUCCEEDED: AtomicUsize = AtomicUsize::new(0);
static DEFERRED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn call_sockets(_: i32) {
    let Some((stacks, a, _)) = HANDLER_DATA.get() else { return };
    // The handler allocates no memory, because the interrupted code may be in the allocator.
    let mut byte = [0];
    match stacks.a().0.recv(*a, &mut [UserSliceMut::new(&mut byte)], libc::MSG_PEEK | libc::MSG_DONTWAIT) {
        Ok(_) => SUCCEEDED.fetch_add(1, Ordering::Relaxed),
        Err(_) => DEFERRED.fetch_add(1, Ordering::Relaxed),
    };
}

#[test]
fn handlers_may_call_socket_functions() {
    let stacks = Stacks::start();
    let (a, b) = Fixture::new(stacks.a(), stacks.b(), crate::stack::ADDRESSES).connection();
    // A byte is always available, so a call that finds none was deferred.
    stacks.b().send(b, b"xy", 0).unwrap();
    let mut fds = [libc::pollfd { fd: a, events: libc::POLLIN, revents: 0 }];
    stacks.a().poll(&mut fds, 10_000).unwrap();
    let (stacks, a, _) = HANDLER_DATA.get_or_init(|| (stacks, a, b));
    kernel::set_handler_function(libc::SIGURG, call_sockets);
    let (sender, receiver) = std::sync::mpsc::channel();
    let end = Instant::now() + Duration::from_secs(1);
    let calls = std::thread::scope(|scope| {
        let busy = scope.spawn(move || {
            sender.send(kernel::this_thread()).unwrap();
            let mut calls = 0;
            while Instant::now() < end {
                let mut fds = [libc::pollfd { fd: *a, events: libc::POLLIN, revents: 0 }];
                assert_eq!(stacks.a().poll(&mut fds, 0), Ok(1));
                calls += 1;
            }
            calls
        });
        let thread = receiver.recv().unwrap();
        while !busy.is_finished() {
            kernel::interrupt(thread, libc::SIGURG);
        }
        busy.join().unwrap()
    });
    let (succeeded, deferred) = (SUCCEEDED.load(Ordering::Relaxed), DEFERRED.load(Ordering::Relaxed));
    assert!(
        calls > 100 && succeeded > 0 && deferred > 0,
        "{calls} calls, {succeeded} succeeded, {deferred} deferred"
    );
}
