//! A program's first use of the stack (attaching) while other threads run, signal handlers interrupt it, or
//! the process forks. The stack is stopped meanwhile, so that attaching takes as long as the test needs.

use crate::fixture::{Fixture, run_to_end, skipped};

const LOOPBACK: [&str; 2] = ["--loopback", "stack"];

#[test]
fn a_handler_may_interrupt_attaching() {
    if skipped("a_handler_may_interrupt_attaching") {
        return;
    }
    let script = "
import ctypes, os, signal, threading, time, _socket
signal.alarm(40)
libc = ctypes.CDLL(None); libc.signal.restype = ctypes.c_void_p
# The handler is `epoll_create`, which takes the number of the signal as its size.
libc.signal(signal.SIGUSR1, ctypes.cast(libc.epoll_create, ctypes.c_void_p))
stack, me = os.getppid(), threading.main_thread().ident
others = [threading.Thread(target=_socket.socket) for _ in range(3)]
def later():
    time.sleep(0.2)
    for thread in others: thread.start()
    time.sleep(0.1)
    for _ in range(3): signal.pthread_kill(me, signal.SIGUSR1); time.sleep(0.05)
    os.kill(stack, signal.SIGCONT)
meanwhile = threading.Thread(target=later)
os.kill(stack, signal.SIGSTOP); time.sleep(0.1)
meanwhile.start(); first = _socket.socket(); meanwhile.join()
for thread in others: thread.join()
import socket
s = socket.create_server(('127.0.0.1', 7411)); c = socket.create_connection(s.getsockname()); a, _ = s.accept(); c.sendall(b'in'); print(a.recv(9))";
    let output = run_to_end(Fixture::new("first").script_without_prelude(&LOOPBACK, script));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b'in'\n", "{output:?}");
}

#[test]
fn a_child_forked_during_attaching_attaches_itself() {
    if skipped("a_child_forked_during_attaching_attaches_itself") {
        return;
    }
    let script = "
import os, signal, threading, time, _socket
signal.alarm(40)
stack = os.getppid()
# Another process lets it go on: a thread of this one could not while `fork` waits.
os.posix_spawn('/bin/sh', ['sh', '-c', f'sleep 1; kill -CONT {stack}'], os.environ)
os.kill(stack, signal.SIGSTOP); time.sleep(0.1)
first = threading.Thread(target=_socket.socket); first.start(); time.sleep(0.2)
child = os.fork()
signal.alarm(40)
import socket
s = socket.create_server(('127.0.0.1', 7412 + (child == 0))); c = socket.create_connection(s.getsockname()); a, _ = s.accept(); c.sendall(b'in'); data = a.recv(9)
if not child: os._exit(data != b'in')
first.join(); print(data, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))";
    let output = run_to_end(Fixture::new("meanwhile").script_without_prelude(&LOOPBACK, script));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b'in' 0\n", "{output:?}");
}

/// A handler that has interrupted `malloc` may fork.
#[test]
fn a_fork_before_attaching_allocates_nothing() {
    if skipped("a_fork_before_attaching_allocates_nothing") {
        return;
    }
    let fixture = Fixture::new("fork-allocations");
    let program = fixture.compile_c("fork_allocations");
    let output = run_to_end(fixture.ginnel(&[&["run"], &LOOPBACK[..], &["--", &program]].concat()));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "child: 0, parent: 0\n", "{output:?}");
}
