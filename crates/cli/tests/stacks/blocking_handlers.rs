//! Signal handlers that block on sockets while they interrupt a blocking call.

use crate::fixture::{Fixture, skipped};

const LOOPBACK: [&str; 2] = ["--loopback", "stack"];

/// The handler is installed from C: Python's own handlers run after the interrupted call.
const SCRIPT: &str = "
import ctypes
libc = ctypes.CDLL(None); libc.signal.restype = ctypes.c_void_p
s = server('127.0.0.1', 7413)
def pair():
    c = socket.create_connection(s.getsockname()); return c, s.accept()[0]
outer, inner, polled, of_another = pair(), pair(), pair(), pair()
results = []
def handler(number):
    results.append(inner[0].recv(9))
    p = select.poll(); p.register(polled[0], select.POLLIN); results.append([event for _, event in p.poll()])
    results.append(polled[0].recv(9))
kept = ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
libc.signal(signal.SIGUSR1, ctypes.cast(kept, ctypes.c_void_p))
def another(): results.append(of_another[0].recv(9))
def later():
    time.sleep(0.2)
    if MANY: threads[1].start(); time.sleep(0.1)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1); time.sleep(0.2)
    if MANY: of_another[1].sendall(b'another'); threads[1].join()
    inner[1].sendall(b'inner'); time.sleep(0.1); polled[1].sendall(b'polled'); time.sleep(0.1)
    outer[1].sendall(b'outer')
threads = [threading.Thread(target=later), threading.Thread(target=another)]
threads[0].start(); results.append(outer[0].recv(9)); threads[0].join()
print(results)";

#[test]
fn a_handler_may_block_in_the_leading_thread() {
    if skipped("a_handler_may_block_in_the_leading_thread") {
        return;
    }
    let fixture = Fixture::new("waits");
    let stdout = fixture.script_output(&LOOPBACK, &format!("MANY = False{SCRIPT}"));
    assert_eq!(stdout, "[b'inner', [1], b'polled', b'outer']\n");
}

#[test]
fn another_thread_takes_over_a_blocked_leader() {
    if skipped("another_thread_takes_over_a_blocked_leader") {
        return;
    }
    let fixture = Fixture::new("leads");
    let stdout = fixture.script_output(&LOOPBACK, &format!("MANY = True{SCRIPT}"));
    assert_eq!(stdout, "[b'another', b'inner', [1], b'polled', b'outer']\n");
}
