//! The end of connections that several processes share, with and without `SO_LINGER`, as on the kernel: only
//! the last close ends a connection, whatever the way by which another process got the socket.

use crate::fixture::{Fixture, skipped};

/// Prints for each way and option what the peer sees after the first close, and after the last one.
const SCRIPT: &str = "
import array, subprocess
listener = server('127.0.0.1', 7200)
def peer_sees(s, timeout):
    s.settimeout(timeout)
    try: return s.recv(10)
    except TimeoutError: return 'open'
    except ConnectionResetError: return 'reset'
def pair(linger, unread):
    c = socket.create_connection(('127.0.0.1', 7200)); a, _ = listener.accept()
    if linger is not None: a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', *linger))
    if unread:
        c.sendall(b'unread'); a.recv(1, socket.MSG_PEEK)
    return c, a
def wait_for(pid): assert os.waitpid(pid, 0)[1] == 0
def fork_and_child_closes(a):
    pid = os.fork()
    if pid == 0: a.close(); os._exit(0)
    wait_for(pid); return a.close
def fork_and_parent_closes(a):
    r, w = os.pipe(); pid = os.fork()
    if pid == 0: os.close(w); os.read(r, 1); os._exit(0)
    os.close(r); a.close()
    def last(): os.close(w); wait_for(pid)
    return last
def spawn_with_closed_fds(a):
    subprocess.run(['/bin/true'], close_fds=True, check=True); return a.close
def spawn_with_inherited_fd(a):
    subprocess.run(['/bin/true'], pass_fds=[a.fileno()], check=True); return a.close
def exec_drops_it(a):
    pid = os.fork()
    if pid == 0: os.set_inheritable(a.fileno(), False); os.execv('/bin/true', ['true'])
    wait_for(pid); return a.close
def passed_and_closed(a):
    left, right = socket.socketpair()
    left.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [a.fileno()]))])
    a.close()
    _, rights, _, _ = right.recvmsg(1, 100); got = array.array('i'); got.frombytes(rights[0][2][:4])
    return lambda: os.close(got[0])
def killed_child(a):
    pid = os.fork()
    if pid == 0: signal.pause()
    os.kill(pid, 9); os.waitpid(pid, 0); return a.close
def set_by_the_child(a):
    pid = os.fork()
    if pid == 0: a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); a.close(); os._exit(0)
    wait_for(pid); return a.close
def killed_last(a):
    r, w = os.pipe(); pid = os.fork()
    if pid == 0: os.write(w, b'x'); signal.pause()
    os.read(r, 1); a.close()
    def last(): os.kill(pid, 9); os.waitpid(pid, 0)
    return last
ways = [fork_and_child_closes, fork_and_parent_closes, spawn_with_closed_fds, spawn_with_inherited_fd, exec_drops_it,
        passed_and_closed, killed_child, set_by_the_child, killed_last]
for way in ways:
    for linger in [None, (1, 0), (1, 1)]:
        for unread in [False, True]:
            c, a = pair(linger, unread)
            last = way(a)
            # Nothing happens, for a short time; the last close has to arrive, however long that takes.
            first = peer_sees(c, 0.02)
            last()
            print(way.__name__, linger, 'unread' if unread else 'read', first, peer_sees(c, 10), flush=True)
            c.close()
";

#[test]
fn only_the_last_close_resets_a_shared_connection() {
    if skipped("only_the_last_close_resets_a_shared_connection") {
        return;
    }
    let fixture = Fixture::new("linger");
    let on_kernel = fixture.script_output(&["--stack", "kernel"], SCRIPT);
    assert_eq!(on_kernel.lines().count(), 54, "{on_kernel}");
    assert!(on_kernel.contains("fork_and_child_closes (1, 0) read open reset\n"), "{on_kernel}");
    assert_eq!(fixture.script_output(&["--loopback", "stack"], SCRIPT), on_kernel);
}
