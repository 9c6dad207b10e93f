//! Open file descriptions that several processes share: a change by one applies to all, as on the kernel.

use crate::fixture::{Fixture, skipped};

/// Runs a script on the kernel and on a stack, which must give the same output, and returns the output.
#[track_caller]
fn run_on_both(fixture: &Fixture, script: &str) -> String {
    let on_kernel = fixture.script_output(&["--stack", "kernel"], script);
    std::fs::write(fixture.path().join("two.toml"), "[shards]\ncount = 2\n").unwrap();
    for options in [&["--loopback", "stack"][..], &["--config", "two.toml", "--loopback", "stack"]] {
        assert_eq!(fixture.script_output(options, script), on_kernel, "{options:?}");
    }
    on_kernel
}

/// Two processes that act in turn, and print the state of a socket.
const ALTERNATING_PRELUDE: &str = "
import fcntl
here, there = socket.socketpair(socket.AF_UNIX)
def turn(way): way.send(b'.'); way.recv(1)
def waits(x): return not fcntl.fcntl(x, fcntl.F_GETFL) & os.O_NONBLOCK
def set_waits(x, on): fcntl.fcntl(x, fcntl.F_SETFL, 0 if on else os.O_NONBLOCK)
def tries(f):
    try: return f()
    except OSError as e: return e.strerror
L, T = socket.SOL_SOCKET, socket.IPPROTO_TCP
def options(x):
    return [x.getsockopt(*o) for o in ((L, socket.SO_KEEPALIVE), (T, socket.TCP_NODELAY), (T, socket.TCP_KEEPIDLE), (L, socket.SO_RCVLOWAT))] + [
        x.getsockopt(L, socket.SO_RCVTIMEO, 16), x.getsockopt(L, socket.SO_LINGER, 8)]
def say(*what): print(*what, flush=True)
s = server('127.0.0.1', 0); at = s.getsockname(); c = socket.create_connection(at); a, _ = s.accept()
";

#[test]
fn parent_and_child_share_flags_and_options() {
    let test = "parent_and_child_share_flags_and_options";
    if skipped(test) {
        return;
    }
    let fixture = Fixture::new("descriptions");
    let script = format!(
        "{ALTERNATING_PRELUDE}
child = os.fork()
if not child:
    there.recv(1)
    set_waits(a, False); set_waits(s, False)
    a.setsockopt(L, socket.SO_KEEPALIVE, 1); a.setsockopt(T, socket.TCP_NODELAY, 1); a.setsockopt(T, socket.TCP_KEEPIDLE, 77)
    a.setsockopt(L, socket.SO_RCVLOWAT, 3); a.setsockopt(L, socket.SO_LINGER, struct.pack('ii', 1, 5))
    turn(there)
    say('child', waits(a), waits(s), waits(c), options(a)[:4])
    begun = time.monotonic(); say(tries(lambda: os.read(a.fileno(), 9)), 0.2 < time.monotonic() - begun < 2)
    # What it accepts is its own.
    set_waits(s, True); b, _ = s.accept(); say(waits(b), os.read(b.fileno(), 9))
    turn(there); os._exit(0)
turn(here)
say(waits(a), waits(s), waits(c), options(a), options(c))
say(tries(lambda: os.read(a.fileno(), 9)), tries(lambda: socket.socket(fileno=os.dup(s.fileno())).accept()[0]))
set_waits(a, True); a.setsockopt(T, socket.TCP_KEEPIDLE, 78); a.setsockopt(L, socket.SO_RCVTIMEO, struct.pack('ll', 0, 300000))
d = socket.create_connection(at); d.sendall(b'here')
turn(here); say(waits(s)); here.send(b'.'); os.waitpid(child, 0); say(waits(a), options(a)[:4])"
    );
    let text = run_on_both(&fixture, &script);
    assert!(text.contains("Resource temporarily unavailable") && text.contains("b'here'"), "{text}");
}

#[test]
fn timestamps_that_a_child_asks_for_are_taken() {
    if skipped("timestamps_that_a_child_asks_for_are_taken") {
        return;
    }
    // SO_TIMESTAMPING: of what is sent, by software, without the packet.
    let script = format!(
        "{ALTERNATING_PRELUDE}
child = os.fork()
if not child: c.setsockopt(L, 37, 1 << 1 | 1 << 4 | 1 << 11); os._exit(0)
os.waitpid(child, 0); c.sendall(b'x'); exactly(a, 1)
p = select.poll(); p.register(c, 0); p.poll(10000)
say(tries(lambda: len(c.recvmsg(1, 200, socket.MSG_ERRQUEUE)[1])))"
    );
    assert_eq!(run_on_both(&Fixture::new("child-stamps"), &script), "2\n");
}

#[test]
fn a_passed_socket_shares_the_senders_description() {
    if skipped("a_passed_socket_shares_the_senders_description") {
        return;
    }
    let fixture = Fixture::new("sent");
    // The receiver is another program, which was started before the connection was opened.
    let script = format!(
        "{ALTERNATING_PRELUDE}
import subprocess
NEXT = '''
import os, sys, socket, struct, fcntl
there = socket.socket(fileno=int(sys.argv[1]))
if len(sys.argv) > 2: a = socket.socket(fileno=int(sys.argv[2]))
else: a = socket.socket(fileno=socket.recv_fds(there, 1, 1)[1][0])
def waits(x): return not fcntl.fcntl(x, fcntl.F_GETFL) & os.O_NONBLOCK
print(waits(a), a.getsockopt(6, 1), flush=True)
there.send(b'.'); there.recv(1)
print(waits(a), a.getsockopt(6, 1), flush=True)
fcntl.fcntl(a, fcntl.F_SETFL, 0); a.setsockopt(6, 4, 55)
there.send(b'.'); there.recv(1)
'''
for sent in (True, False):
    keep = [there.fileno()] + ([] if sent else [a.fileno()])
    other = subprocess.Popen([sys.executable, '-c', NEXT] + [str(fd) for fd in keep], pass_fds=keep)
    if sent: socket.send_fds(here, [b'.'], [a.fileno()])
    here.recv(1)
    set_waits(a, False); a.setsockopt(T, socket.TCP_NODELAY, 1)
    turn(here)
    say(waits(a), a.getsockopt(T, socket.TCP_KEEPIDLE))
    a.setsockopt(T, socket.TCP_NODELAY, 0); a.setsockopt(T, socket.TCP_KEEPIDLE, 66)
    here.send(b'.'); other.wait()
c.sendall(b'still here'); say(a.recv(99))"
    );
    let text = run_on_both(&fixture, &script);
    assert_eq!(text.matches("True 55").count(), 2, "{text}");
}

/// The error of a refused `connect`, and a disconnect, apply to all processes: a later `connect` of another
/// process is a new attempt.
const RECONNECT: &str = "
import ctypes, errno
libc = ctypes.CDLL(None)
at = ('127.0.0.1', 7431)
def name(number): return errno.errorcode.get(number, number)
def in_child(s, then):
    r, w = os.pipe(); child = os.fork()
    if not child:
        os.read(r, 1); print('child', name(s.connect_ex(at)), flush=True)
        p = select.poll(); p.register(s, select.POLLOUT); p.poll(20000)
        print(s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), s.getpeername() == at, flush=True)
        s.sendall(b'hello'); os._exit(0)
    then(); os.write(w, b'x'); a, _ = l.accept(); print(exactly(a, 5), os.waitpid(child, 0)[1], flush=True)
s = socket.socket(); s.setblocking(False); print(name(s.connect_ex(at)))
p = select.poll(); p.register(s, select.POLLOUT); print(bool(p.poll(20000)), flush=True)
def refused():
    global l
    print('parent', name(s.connect_ex(at)), flush=True); l = server(*at)
in_child(s, refused)
s.close(); s = socket.create_connection(at); old, _ = l.accept(); s.setblocking(False)
def disconnected(): print('parent', libc.connect(s.fileno(), b'\\0' * 16, 16), flush=True)
in_child(s, disconnected)";

#[test]
fn connect_after_a_refusal_tries_again() {
    if skipped("connect_after_a_refusal_tries_again") {
        return;
    }
    let fixture = Fixture::new("again");
    let text = run_on_both(&fixture, RECONNECT);
    assert!(text.starts_with("EINPROGRESS\nTrue\nparent ECONNREFUSED\nchild EINPROGRESS\n"), "{text}");
}

#[test]
fn the_last_listen_sets_the_backlog() {
    if skipped("the_last_listen_sets_the_backlog") {
        return;
    }
    let fixture = Fixture::new("backlog");
    // A child that uses a listener first after the parent's second `listen`, then a child that calls `listen`
    // itself. The number of concurrent connects is limited to the backlog.
    let script = format!(
        "{ALTERNATING_PRELUDE}
def many(x, most, within):
    x.setblocking(False)
    made = []
    for _ in range(40):
        one = socket.socket(); one.setblocking(False); one.connect_ex(x.getsockname()); made.append(one)
    end = time.monotonic() + within
    def came(): return sum(len(one) for one in select.select([], made, [], 0)[1:2])
    while came() < most and time.monotonic() < end: time.sleep(0.01)
    return came() >= most
for last in 'parent', 'child':
    x = server('127.0.0.1', 0); x.listen(1 if last == 'parent' else 100)
    child = os.fork()
    if not child:
        there.recv(1)
        x.setblocking(False)
        say(tries(x.accept))
        if last == 'child': x.listen(1)
        turn(there); os._exit(0)
    x.listen(100)
    turn(here)
    # Two, on each of two shards.
    say(last, many(x, 40, 10) if last == 'parent' else many(x, 5, 1))
    here.send(b'.'); os.waitpid(child, 0)"
    );
    let text = run_on_both(&fixture, &script);
    assert!(text.contains("parent True") && text.contains("child False"), "{text}");
}

#[test]
fn the_last_close_frees_the_port() {
    if skipped("the_last_close_frees_the_port") {
        return;
    }
    let fixture = Fixture::new("last");
    // The last process to close the listener has created or inherited it; another process then binds the port
    // at once.
    let script = format!(
        "{ALTERNATING_PRELUDE}
at = s.getsockname(); s.close(); c.close(); a.close()
other = os.fork()
if not other:
    here.close()
    while there.recv(1):
        x = socket.socket(); x.setsockopt(L, socket.SO_REUSEADDR, 1); x.bind(at); x.listen(); x.close(); there.send(b'.')
    os._exit(0)
there.close()
for n in range(60):
    x = socket.socket(); x.setsockopt(L, socket.SO_REUSEADDR, 1); x.bind(at); x.listen()
    if n % 2:
        one, two = socket.socketpair()
        child = os.fork()
        if not child:
            two.recv(1); x.close(); two.send(b'.'); two.recv(1); os._exit(0)
        x.close(); turn(one)
    elif n % 4: x.shutdown(socket.SHUT_RD); x.close()
    else: x.close()
    turn(here)
    if n % 2: one.send(b'.'); os.waitpid(child, 0)
here.close(); say('free', os.waitpid(other, 0)[1])"
    );
    assert_eq!(run_on_both(&fixture, &script), "free 0\n");
}

/// Processes that share a bound socket all listen on it, as workers do that call `listen` on what a master
/// has bound.
const LISTEN_TOGETHER: &str = "
import subprocess
WORKER = '''
import os, sys, socket
s = socket.socket(fileno=int(sys.argv[1])); w = int(sys.argv[2])
'''
SERVE = '''
s.listen(100); os.write(w, b'l'); c, _ = s.accept(); c.sendall(b'worker'); s.close(); os.write(w, b'a')
'''
def together(how, host, port):
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind((host, port))
    r, w = os.pipe(); os.set_inheritable(w, True)
    if how == 'fork':
        child = os.fork()
        if not child: exec(SERVE, {'s': s, 'w': w, 'os': os}); os._exit(0)
    else:
        argv = [sys.executable, '-c', WORKER + SERVE, str(s.fileno()), str(w)]
        child = subprocess.Popen(argv, pass_fds=[s.fileno(), w]).pid
    assert os.read(r, 1) == b'l'
    s.listen(100); clients = [socket.create_connection(('127.0.0.1', port)) for _ in range(20)]
    assert os.read(r, 1) == b'a'
    s.settimeout(20); rest = [s.accept()[0] for _ in range(19)]; [a.sendall(b'master') for a in rest]
    print(how, host, sorted(c.recv(9) for c in clients)[-2:], os.waitpid(child, 0)[1], flush=True)
    # Nobody listens any more.
    s.close()
    try: socket.create_connection(('127.0.0.1', port))
    except OSError as e: print(os.strerror(e.errno), flush=True)
for at, (how, host) in enumerate([(how, host) for how in ['fork', 'exec'] for host in ['127.0.0.1', '0.0.0.0']]):
    together(how, host, 7432 + at)
# Another socket at the address is refused as before.
first, second = socket.socket(), socket.socket()
for s in (first, second): s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('127.0.0.1', 7436))
first.listen()
try: second.listen()
except OSError as e: print(os.strerror(e.errno))";

#[test]
fn processes_may_listen_together_on_a_bound_socket() {
    if skipped("processes_may_listen_together_on_a_bound_socket") {
        return;
    }
    let text = run_on_both(&Fixture::new("together"), LISTEN_TOGETHER);
    assert_eq!(text.matches("[b'master', b'worker'] 0\nConnection refused\n").count(), 4, "{text}");
    assert!(text.ends_with("\nAddress already in use\n"), "{text}");
}
