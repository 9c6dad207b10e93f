//! Filters of sockets (`SO_ATTACH_FILTER`) that several processes share, and that outlive the process of the
//! shards.

use crate::fixture::{Fixture, RunningProgram, skipped, wait_until};
use crate::restart::{kill_shards, supervisor_of};
use std::fs;

/// Functions that attach and read filters. The program `DROP` drops datagrams that begin with `x`, `DROPS`
/// segments whose payload does.
const PRELUDE: &str = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def program(*lines): return b''.join(struct.pack('HBBI', *line) for line in lines)
KEEP, NONE = (6, 0, 0, 0xffffffff), (6, 0, 0, 0)
DROP = program((0x30, 0, 0, 8), (0x15, 0, 1, ord('x')), NONE, KEEP)
DROPS = program((0x30, 0, 0, 12), (0x74, 0, 0, 2), (0x54, 0, 0, 0x3c), (7, 0, 0, 0), (0x80, 0, 0, 0), (0x2d, 0, 2, 0),
    (0x50, 0, 0, 0), (0x15, 1, 0, ord('x')), KEEP, NONE)
def attach(s, code):
    buffer = ctypes.create_string_buffer(code, len(code))
    s.setsockopt(socket.SOL_SOCKET, 26, struct.pack('@HP', len(code) // 8, ctypes.addressof(buffer)))
def attached(s, space=64):
    count = ctypes.c_uint32(space); buffer = ctypes.create_string_buffer(8 * space)
    if libc.getsockopt(s.fileno(), socket.SOL_SOCKET, 26, buffer, ctypes.byref(count)) != 0: return -ctypes.get_errno()
    return buffer.raw[:8 * count.value]
def detach(s): s.setsockopt(socket.SOL_SOCKET, 27, 0)
def lock(s): s.setsockopt(socket.SOL_SOCKET, 44, 1)
def tries(f, *arguments):
    try: return f(*arguments)
    except OSError as e: return e.strerror
def datagrams(port):
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', port)); return u
";

#[test]
fn processes_share_filters_of_shared_sockets() {
    let test = "processes_share_filters_of_shared_sockets";
    if skipped(test) {
        return;
    }
    let fixture = Fixture::new("filters");
    let script = format!(
        "{PRELUDE}
here, there = socket.socketpair(socket.AF_UNIX)
def turn(way): way.send(b'.'); way.recv(1)
def say(*what): print(*what, flush=True)
u = datagrams(0); s = server('127.0.0.1', 0); u.settimeout(30)
t = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
def receive(*sent):
    # Every filter here keeps the last one.
    for text in (*sent, b'y end'): t.sendto(text, u.getsockname())
    return list(iter(lambda: u.recv(99), b'y end'))
def connection():
    c = socket.create_connection(s.getsockname()); a, _ = s.accept(); a.settimeout(0.3); return a, c
child = os.fork()
if not child:
    there.recv(1)
    attach(u, DROP); attach(s, DROPS); say('child', attached(u) == DROP, attached(s) == DROPS)
    turn(there)
    say('child', attached(u) == program(KEEP), tries(attach, s, DROP), tries(detach, s), attached(s) == DROPS)
    detach(u); say('child', attached(u), tries(detach, u))
    turn(there)
    a, c = connection(); say('child', attached(a) == DROPS, tries(attach, a, DROP))
    c.sendall(b'x'); say('child', tries(a.recv, 1))
    there.send(b'.'); os._exit(0)
say(attached(u), attached(s))
turn(here)
say(attached(u) == DROP, attached(s) == DROPS, receive(b'x1', b'y1', b'x2'))
attach(u, program(KEEP)); lock(s); say(receive(b'x3'))
turn(here)
say(attached(u), receive(b'x4'), tries(detach, s))
attach(u, DROP); here.send(b'.'); here.recv(1); os.wait()
# Another program.
for x in (u, s): x.set_inheritable(True)
os.execv(sys.executable, [sys.executable, '-c', REST, str(u.fileno()), str(s.fileno())])"
    );
    let rest = format!(
        "import os, sys, socket, struct{PRELUDE}
u, s = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
print(attached(u) == DROP, attached(s) == DROPS, tries(attach, s, DROP), tries(detach, u), tries(detach, u))"
    );
    let script = format!("REST = {rest:?}\n{script}");
    let on_kernel = fixture.script_output(&["--stack", "kernel"], &script);
    assert_eq!(on_kernel.lines().count(), 10, "{on_kernel}");
    fs::write(fixture.path().join("two.toml"), "[shards]\ncount = 2\n").unwrap();
    for options in [&["--loopback", "stack"][..], &["--config", "two.toml", "--loopback", "stack"]] {
        assert_eq!(fixture.script_output(options, &script), on_kernel, "{options:?}");
    }
}

/// A server whose socket two children share that know nothing of the filter, because they make no call before
/// the shards end. Afterwards one of them only asks for the filter, and the other one only for datagrams.
const SERVER: &str = "
UNKNOWN = program((0, 0, 0, 0x67696e6e), NONE)
u = datagrams(7004); s = server('127.0.0.1', 7005)
def child(run):
    pid = os.fork()
    if pid: return pid
    os.close(1); os.close(2)
    while not os.path.exists('children'): time.sleep(0.01)
    while True: time.sleep(0.01); run()
def asks():
    if attached(u) == UNKNOWN: open('asked', 'w').close()
def serves():
    try: got, peer = u.recvfrom(100, socket.MSG_DONTWAIT)
    except BlockingIOError: return
    u.sendto(b'child ' + got, peer)
children = [child(run) for run in (asks, serves)]
attach(u, DROP); attach(s, DROPS)
open('there', 'w').close()
while not os.path.exists('parent'): time.sleep(0.01)
u.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
open('restored', 'w').close()
a, _ = s.accept(); a.settimeout(30)
print(attached(u) == DROP, attached(s) == DROPS, attached(a) == DROPS, a.recv(1))
a.settimeout(0.5); print(tries(a.recv, 1))
for pid in children: os.kill(pid, signal.SIGKILL)";

/// Sends datagrams until one is answered, or some time is over.
const ASK: &str = "
t = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); t.settimeout(0.1)
def ask(text, attempts):
    for _ in range(attempts):
        try: t.sendto(text, ('127.0.0.1', 7004)); return t.recv(100)
        except OSError: pass
def drops(text):
    # A connected socket gets the error of a port that nobody has.
    c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); c.settimeout(0.1); c.connect(('127.0.0.1', 7004))
    for _ in range(10):
        c.send(text)
        try: return c.recv(100)
        except TimeoutError: pass
    return True
";

#[test]
fn filters_outlive_shards_or_refuse_all() {
    let test = "filters_outlive_shards_or_refuse_all";
    if skipped(test) {
        return;
    }
    let fixture = Fixture::new("filterdeath");
    fs::write(fixture.path().join("shards.toml"), "[shards]\ncount = 2\n").unwrap();
    let options = ["--loopback", "stack", "--config", "shards.toml", "--on-stack-death", "restart"];
    let _up = fixture.start_stack("lab", &options);
    let create = |name: &str| fs::write(fixture.path().join(name), "").unwrap();
    let on_lab = ["--stack", "lab"];
    let server = RunningProgram::new(fixture.script(&on_lab, &format!("{PRELUDE}{SERVER}")));
    wait_until("the filters are attached", || fixture.path().join("there").exists());
    kill_shards(supervisor_of(&fixture, "lab"));
    // The children open the socket first, and do not know the program.
    create("children");
    wait_until("a child sees the filter that drops everything", || fixture.path().join("asked").exists());
    let ask = |line: &str| fixture.script_output(&on_lab, &format!("{ASK}{line}"));
    assert_eq!(ask("print(drops(b'y'))"), "True\n", "without the program nothing passes");
    // The parent knows it.
    create("parent");
    wait_until("the parent has opened its sockets", || fixture.path().join("restored").exists());
    assert_eq!(ask("print(ask(b'y', 300), drops(b'x'), ask(b'y2', 300))"), "b'child y' True b'child y2'\n");
    let connect = "
c = socket.create_connection(('127.0.0.1', 7005)); c.sendall(b'y'); time.sleep(0.2); c.sendall(b'x'); time.sleep(1)";
    fixture.script_output(&on_lab, connect);
    let output = server.wait_for_output();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "True True True b'y'\nNone\n");
}

/// A server whose child knows the filter that the socket had before the shards ended. The child opens the
/// socket again only after the parent has attached another filter.
const LATE: &str = "
u = datagrams(7004); attach(u, program(KEEP))
child = os.fork()
if not child:
    os.close(1); os.close(2)
    while not os.path.exists('late'): time.sleep(0.01)
    while True: got, peer = u.recvfrom(100); u.sendto(b'child ' + got, peer)
open('there', 'w').close()
while not os.path.exists('parent'): time.sleep(0.01)
attach(u, DROP); lock(u)
open('attached', 'w').close()
while not os.path.exists('end'): time.sleep(0.01)
print(attached(u) == DROP, tries(attach, u, program(KEEP)))
os.kill(child, signal.SIGKILL)";

#[test]
fn late_processes_keep_newer_filters() {
    if skipped("late_processes_keep_newer_filters") {
        return;
    }
    let fixture = Fixture::new("laterfilter");
    let options = ["--loopback", "stack", "--on-stack-death", "restart"];
    let _up = fixture.start_stack("lab", &options);
    let create = |name: &str| fs::write(fixture.path().join(name), "").unwrap();
    let on_lab = ["--stack", "lab"];
    let server = RunningProgram::new(fixture.script(&on_lab, &format!("{PRELUDE}{LATE}")));
    wait_until("the socket is bound", || fixture.path().join("there").exists());
    kill_shards(supervisor_of(&fixture, "lab"));
    create("parent");
    wait_until("the parent has attached another filter", || fixture.path().join("attached").exists());
    create("late");
    let ask = |line: &str| fixture.script_output(&on_lab, &format!("{ASK}{line}"));
    let questions = "print(ask(b'y', 300), drops(b'x'))";
    assert_eq!(ask(questions), "b'child y' True\n");
    // The child has learned the filter, and opens the socket alone now.
    kill_shards(supervisor_of(&fixture, "lab"));
    assert_eq!(ask(questions), "b'child y' True\n", "once more");
    create("end");
    let output = server.wait_for_output();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "True Operation not permitted\n");
}

/// A server and its child that listen together on a socket that was bound before the fork. The server then
/// attaches a filter, which the child learns from the stack alone.
const TOGETHER: &str = "
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('127.0.0.1', 7006))
child = os.fork(); s.listen()
if not child:
    os.close(1); os.close(2); open('listens', 'w').close()
    while not os.path.exists('child'): time.sleep(0.01)
    s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF); open('restored', 'w').close()
    while True: s.accept()
while not os.path.exists('listens'): time.sleep(0.01)
attach(s, program(NONE)); open('there', 'w').close()
while not os.path.exists('end'): time.sleep(0.01)
print(attached(s) == program(NONE)); os.kill(child, signal.SIGKILL)";

/// A filter that the server has removed from its listener does not come back when its child, which got the
/// socket with the filter, listens as well.
const REMOVED: &str = "
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('127.0.0.1', 7008))
attach(s, program(NONE)); (down_end, down), (up, up_end) = os.pipe(), os.pipe()
child = os.fork()
if not child:
    os.read(down_end, 1); s.listen(); os.write(up_end, b'.'); os.read(down_end, 1); os._exit(0)
s.listen(); detach(s); os.write(down, b'.'); os.read(up, 1)
try: socket.create_connection(('127.0.0.1', 7008), timeout=3); print('connected')
except OSError as e: print(e)
os.write(down, b'.'); print(os.waitpid(child, 0)[1])";

/// The expected output is that of the program on the kernel.
#[test]
fn removed_filters_do_not_come_back() {
    if skipped("removed_filters_do_not_come_back") {
        return;
    }
    let fixture = Fixture::new("filterremoved");
    let script = format!("{PRELUDE}{REMOVED}");
    let run = |options: &[&str]| fixture.script_output(options, &script);
    let on_kernel = run(&["--stack", "kernel"]);
    assert_eq!(on_kernel, "connected\n0\n");
    for shards in ["1", "2"] {
        assert_eq!(run(&["--loopback", "stack", "--shards", shards]), on_kernel, "{shards} shards");
    }
}

#[test]
fn processes_that_listen_together_share_a_filter() {
    if skipped("processes_that_listen_together_share_a_filter") {
        return;
    }
    let fixture = Fixture::new("filtertogether");
    let _up = fixture.start_stack("lab", &["--loopback", "stack", "--on-stack-death", "restart"]);
    let create = |name: &str| fs::write(fixture.path().join(name), "").unwrap();
    let on_lab = ["--stack", "lab"];
    let server = RunningProgram::new(fixture.script(&on_lab, &format!("{PRELUDE}{TOGETHER}")));
    wait_until("the filter is attached", || fixture.path().join("there").exists());
    let connects = "
try: socket.create_connection(('127.0.0.1', 7006), timeout=1); print('connected')
except OSError as e: print(e)";
    assert_eq!(fixture.script_output(&on_lab, connects), "timed out\n");
    kill_shards(supervisor_of(&fixture, "lab"));
    // The child opens the listener first.
    create("child");
    wait_until("the child has opened the listener", || fixture.path().join("restored").exists());
    assert_eq!(fixture.script_output(&on_lab, connects), "timed out\n", "with new shards");
    create("end");
    assert_eq!(String::from_utf8(server.wait_for_output().stdout).unwrap(), "True\n");
}
