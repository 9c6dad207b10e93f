//! `ginnel ss -K`: closes sockets, and the programs read what they read on Linux after `ss -K`.

use crate::fixture::{
    Fixture, GINNEL, RunningProgram, copy_program, python, run_to_end, skipped, wait_until,
};
use ginnel_testkit::skip;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Closes sockets by the command in the environment, and prints what a program notices: the events of
/// `poll`, and the results of calls.
const SCRIPT: &str = "
import errno, subprocess, select, shlex, threading
def kill(*words):
    done = subprocess.run(shlex.split(os.environ['KILL']) + list(words), capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done
    return len(done.stdout.splitlines())
def result(call, *arguments):
    try: return call(*arguments)
    except OSError as e: return errno.errorcode.get(e.errno, 'timed out')
def events(*sockets):
    poll = select.poll(); [poll.register(s) for s in sockets]
    ready = dict(poll.poll(0)); return [ready.get(s.fileno(), 0) for s in sockets]
s = server('127.0.0.1', 0); port = s.getsockname()[1]
def pair():
    c = socket.create_connection(s.getsockname()); a, _ = s.accept(); return c, a
c, a = pair(); other, end = pair()
a.send(b'unread'); select.select([c], [], [])
local = c.getsockname()[1]
print('closed', kill('-Htn', 'sport', '=', f':{local}', 'dport', '=', f':{port}'))
select.select([a], [], [])
print('events', events(c, a, other, end))
print('client', result(c.recv, 9), result(c.recv, 9), result(c.send, b'x'), result(c.recv, 9))
print('server', result(a.recv, 9), result(a.recv, 9))
print('again', kill('-Htn', 'sport', '=', f':{local}', 'dport', '=', f':{port}'))
# A call that waits.
c, a = pair(); results = []
thread = threading.Thread(target=lambda: results.append(result(c.recv, 9))); thread.start(); time.sleep(0.2)
print('closed', kill('-Htn', 'sport', '=', f':{c.getsockname()[1]}', 'dport', '=', f':{port}')); thread.join()
print('waiting', results, result(c.getsockopt, socket.SOL_SOCKET, socket.SO_ERROR))
# In other states.
c, a = pair(); a.shutdown(socket.SHUT_WR); select.select([c], [], [])
print('closed', kill('-Htn', 'state', 'close-wait', 'sport', '=', f':{c.getsockname()[1]}'))
print('close-wait', result(c.recv, 9), result(c.recv, 9)); select.select([a], [], []); print('fin-wait-2', result(a.recv, 9))
c, a = pair(); ends = ('sport', '=', f':{c.getsockname()[1]}', 'dport', '=', f':{port}'); c.close(); a.recv(1); a.close(); time.sleep(0.1)
print('time-wait', kill('-Htn', 'state', 'time-wait', *ends), kill('-Htn', 'state', 'time-wait', *ends))
print('untouched', result(other.send, b'x'), result(end.recv, 9))
";

/// The rest of [`SCRIPT`]: listeners, in processes that share one, with a call that waits and with epoll.
const LISTENERS: &str = "
child = os.fork()
if not child:
    poll = select.epoll(); poll.register(s, select.EPOLLIN)
    ready = poll.poll(20)
    open('child', 'w').write(f'{[e for _, e in ready]} {result(s.accept)}'); os._exit(0)
t = server('127.0.0.1', 0); results = []
thread = threading.Thread(target=lambda: results.append(result(s.accept))); thread.start(); time.sleep(0.3)
waiting = socket.create_connection(t.getsockname())
print('closed', kill('-Htnl', 'sport', '=', f':{port}'), kill('-Htnl', 'sport', '=', f':{t.getsockname()[1]}')); thread.join(); os.wait()
print('accept', results, open('child').read())
print('events', events(s, t), result(waiting.recv, 1))
print('error', s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), result(s.accept))
print('refused', result(socket.create_connection, ('127.0.0.1', port)), s.getsockname()[1] == port)
s.listen(); c = socket.create_connection(s.getsockname()); print('again', result(s.accept)[0].getpeername() == c.getsockname())
";

/// The rest of [`LISTENERS`]: calls and children that come after the close.
const AFTERWARDS: &str = "
u = server('127.0.0.1', 0); there = u.getsockname()[1]; u.settimeout(20)
print('closed', kill('-Htnl', 'sport', '=', f':{there}')); print('later', result(u.accept), result(u.accept))
u = server('127.0.0.1', 0); there = u.getsockname()[1]
print('closed', kill('-Htnl', 'sport', '=', f':{there}'))
child = os.fork()
if not child:
    poll = select.epoll(); poll.register(u, select.EPOLLIN)
    ready = poll.poll(20)
    open('child', 'w').write(f'{[e for _, e in ready]} {result(u.accept)}'); os._exit(0)
os.wait(); print('forked', open('child').read())
";

/// The rest of [`AFTERWARDS`]: UDP sockets, connected with and without an address of their own, and
/// unconnected.
const DATAGRAMS: &str = "
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 0)); there = u.getsockname()[1]
def connected(at):
    c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); at and c.bind(at); c.connect(('127.0.0.1', there)); return c
for at in [None, ('127.0.0.1', 0)]:
    c = connected(at); mine = c.getsockname()[1]; results = []
    thread = threading.Thread(target=lambda: results.append(result(c.recv, 9))); thread.start(); time.sleep(0.2)
    print('closed', kill('-Hun', 'sport', '=', f':{mine}', 'dport', '=', f':{there}')); thread.join()
    print('datagram', results, result(c.getpeername), c.getsockname()[1] == mine, result(c.send, b'x'))
    c.sendto(b'still', ('127.0.0.1', there)); print('still', result(u.recvfrom, 9)[0])
    c = connected(at)
    print('closed', kill('-Hun', 'sport', '=', f':{c.getsockname()[1]}', 'dport', '=', f':{there}'))
    print('events', events(c), c.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), events(c))
print('closed', kill('-Hunl', 'sport', '=', f':{there}'))
print('unconnected', events(u), result(u.recv, 9), u.getsockname()[1] == there)
u.settimeout(1); c = connected(None); c.send(b'again'); print('again', result(u.recv, 9))
# A port that the program has chosen stays, one that was chosen for it does not.
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); probe.bind(('127.0.0.1', 0)); chosen = probe.getsockname()[1]; probe.close()
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', chosen)); u.settimeout(20)
print('closed', kill('-Hunl', 'sport', '=', f':{chosen}'))
print('chosen', events(u), result(u.recv, 9), u.getsockname() == ('127.0.0.1', chosen))
there = chosen; c = connected(None); c.send(b'again'); print('again', result(u.recv, 9))
";

/// Listeners that share an address: connections of the first must not move to the second, which is closed,
/// too.
const SHARED: &str = "
r = server('127.0.0.1', 0, reuse_port=True); there = r.getsockname()[1]; r2 = server('127.0.0.1', there, reuse_port=True)
waiting = [socket.create_connection(r.getsockname(), timeout=20) for _ in range(8)]
print('shared', kill('-Htnl', 'sport', '=', f':{there}'), {result(c.recv, 1) for c in waiting})
";

/// Returns what the script prints if it runs on the kernel, or `None` if this kernel closes no sockets.
fn kernel_output(fixture: &Fixture, script: &str) -> Option<String> {
    let mut command = fixture.script(&["--stack", "kernel"], script);
    command.env("KILL", "ss -K");
    let output = run_to_end(command);
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    if !text.contains("closed 1") {
        return None;
    }
    assert!(output.status.success(), "{output:?}");
    Some(text)
}

/// Runs a script on a stack, where it closes sockets of that stack.
fn stack_output(fixture: &Fixture, script: &str) -> String {
    let mut command = fixture.script(&["--stack", "lab"], script);
    command.env("KILL", format!("env -u LD_PRELOAD -u GINNEL_STACK {GINNEL} ss lab -K"));
    let output = run_to_end(command);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn programs_notice_closed_sockets_as_on_linux() {
    let name = "programs_notice_closed_sockets_as_on_linux";
    if skipped(name) {
        return;
    }
    let fixture = Fixture::new("kill");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script = [SCRIPT, LISTENERS, AFTERWARDS, DATAGRAMS].concat();
    let ours = stack_output(&fixture, &script);
    assert_eq!(ours.matches("closed 1").count(), 12, "{ours}");
    assert!(ours.contains("client b'unread' ECONNABORTED EPIPE b''\nserver ECONNRESET b''\n"), "{ours}");
    match kernel_output(&fixture, &script) {
        Some(theirs) => assert_eq!(ours, theirs),
        None => skip(name, "ss -K of this kernel, as a reference"),
    }
    let shared = stack_output(&fixture, &[SCRIPT, SHARED].concat());
    assert!(shared.ends_with("shared 2 {'ECONNRESET'}\n"), "{shared}");
}

#[test]
fn closed_output_does_not_stop_closing() {
    let name = "closed_output_does_not_stop_closing";
    if skipped(name) {
        return;
    }
    let fixture = Fixture::new("kill-head");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script = "
import subprocess, shlex, errno
s = server('127.0.0.1', 7602); pairs = []
for _ in range(300):
    c = socket.create_connection(s.getsockname()); pairs.append((c, s.accept()[0]))
command = os.environ['KILL'] + ' -Hn sport = :7602 | head -n 1'
done = subprocess.run(['bash', '-o', 'pipefail', '-c', command], capture_output=True, text=True)
aborted = 0
for _, a in pairs:
    try: a.recv(1)
    except OSError as e: aborted += e.errno == errno.ECONNABORTED
print(done.returncode, len(done.stdout.splitlines()), repr(done.stderr), aborted)";
    assert_eq!(stack_output(&fixture, script), "0 1 '' 300\n");
}

#[test]
fn only_the_owner_and_root_may_close_sockets() {
    let name = "only_the_owner_and_root_may_close_sockets";
    if skipped(name) {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return skip(name, "only root can be another user");
    }
    let fixture = Fixture::new("kill-foreign");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script = "
s = server('127.0.0.1', 7601); c = socket.create_connection(s.getsockname()); a, _ = s.accept()
open('there', 'w').close(); c.recv(1); print('end')";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    wait_until("it is connected", || fixture.path().join("there").exists());
    let binary = fixture.path().join("ginnel");
    copy_program(GINNEL.as_ref(), &binary);
    let run = fixture.path().join("run");
    let as_nobody = || {
        let mut command = Command::new(&binary);
        command.args(["ss", "lab", "-K", "dport", "=", ":7601"]).uid(65_534).gid(65_534).current_dir("/");
        let output = command.env("GINNEL_RUN_DIR", &run).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(as_nobody().contains("it belongs to user 0, whose stacks are only for that user and root"));
    // The stack checks who asks even if its files let everybody pass.
    for path in [run.clone(), run.join("lab"), run.join("lab/inspect")] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let request = "
import sys, socket, os
os.setgroups([]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(b'kill 1\\n')
print(s.makefile().read(), end='')";
    let output =
        Command::new(python().unwrap()).args(["-c", request]).arg(run.join("lab/inspect")).output().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "!\tonly user 0 and root may close sockets of this stack\n",
        "{output:?}"
    );
    for path in [run.clone(), run.join("lab")] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).unwrap();
    }
    let shown = fixture.run_ok(&["ss", "lab", "-H", "-K", "-p", "dport", "=", ":7601"]);
    assert!(shown.lines().count() == 1 && shown.contains(&format!(",pid={},", program.pid())), "{shown}");
    let output = program.wait_for_output();
    assert!(String::from_utf8_lossy(&output.stderr).contains("ConnectionAbortedError"), "{output:?}");
}
