//! Programs with open sockets that exec or start other programs.

use crate::fixture::{Fixture, RunningProgram, signal, skipped, wait_until};

const LOOPBACK: [&str; 2] = ["--loopback", "stack"];

/// Runs a script that execs the script in `NEXT`, and returns the output of both.
#[track_caller]
fn output_after_exec(fixture: &Fixture, first: &str, next: &str) -> String {
    let head =
        "NEXT = sys.argv[1]\ndef keep(*all_):\n    for s in all_: os.set_inheritable(s.fileno(), True)\n";
    let next = format!("import os, sys, socket, select, signal\nsignal.alarm(40)\n{next}");
    let mut command = fixture.script(&LOOPBACK, &format!("{head}{first}"));
    command.arg(next);
    let output = crate::fixture::run_to_end(command);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn sockets_survive_exec() {
    if skipped("sockets_survive_exec") {
        return;
    }
    let fixture = Fixture::new("becomes");
    // A listener with a connection in its queue, and an accepted connection with unread bytes, both in an
    // epoll set; and the client's end, which is close-on-exec.
    let first = "
s = server('127.0.0.1', 7101)
c = socket.create_connection(('127.0.0.1', 7101)); a, _ = s.accept()
a.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1); a.settimeout(7); a.setblocking(True)
c.sendall(b'queued'); waits = socket.create_connection(('127.0.0.1', 7101)); waits.sendall(b'waited')
e = select.epoll(); e.register(s, select.EPOLLIN); e.register(a, select.EPOLLIN | select.EPOLLET)
r, w = os.pipe(); os.set_inheritable(r, True); os.write(w, b'!'); e.register(r, select.EPOLLIN)
keep(s, a, e, waits)
seen = set()
while seen != {s.fileno(), a.fileno(), r}: seen |= {fd for fd, _ in e.poll()}
c.sendall(b' again'); time.sleep(0.1)
fds = [str(x) for x in (s.fileno(), a.fileno(), e.fileno(), waits.fileno(), c.fileno(), r)]
os.execve(sys.executable, [sys.executable, '-c', NEXT] + fds, {'ONLY': 'this'})";
    let next = "
S, A, E, W, C, R = map(int, sys.argv[1:])
assert 'GINNEL_INHERITED_SOCKETS' not in os.environ and os.environ['ONLY'] == 'this'
try: os.fstat(C); print('open')
except OSError: print('closed')
s, a, waits = (socket.socket(fileno=fd) for fd in (S, A, W))
print(s.getsockname(), a.getsockname()[1], a.getpeername()[0], a.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
e = select.epoll.fromfd(E)
seen = {}
while len(seen) < 3: seen |= {fd: ev for fd, ev in e.poll(5)}
print([seen[fd] for fd in (S, A, R)], e.poll(0) != [])
got = b''
while part := a.recv(100): got += part
print(got, 'and its end')
b, _ = s.accept(); print(b.recv(6)); b.sendall(b'back'); print(waits.recv(4))
a.close(); waits.close()
# The next program uses the stack as any other does.
d = socket.create_connection(s.getsockname()); f, _ = s.accept(); f.sendall(b'new'); print(d.recv(3))";
    let text = output_after_exec(&fixture, first, next);
    let expected = "closed
('127.0.0.1', 7101) 7101 127.0.0.1 1
[1, 1, 17] True
b'queued again' and its end
b'waited'
b'back'
b'new'
";
    assert_eq!(text, expected);
}

#[test]
fn every_exec_function_keeps_sockets() {
    if skipped("every_exec_function_keeps_sockets") {
        return;
    }
    let fixture = Fixture::new("ways");
    let first = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
py, fd = sys.executable.encode(), None
def strings(*all_): return (ctypes.c_char_p * (len(all_) + 1))(*all_, None)
def become(way, *argv):
    env = strings(b'A=1')
    if way == 'execl': libc.execl(py, *argv, None)
    if way == 'execlp': libc.execlp(py, *argv, None)
    if way == 'execle': libc.execle(py, *argv, None, env)
    if way == 'execv': libc.execv(py, strings(*argv))
    if way == 'execvp': libc.execvp(py, strings(*argv))
    if way == 'execvpe': libc.execvpe(py, strings(*argv), env)
    if way == 'fexecve': libc.fexecve(os.open(py, os.O_RDONLY), strings(*argv), env)
    if way == 'execveat': libc.execveat(-100, py, strings(*argv), env, 0)
    if way == 'syscall': libc.syscall(59, py, strings(*argv), env)
s = server('127.0.0.1', 7102); keep(s)
for way in ['execl', 'execlp', 'execle', 'execv', 'execvp', 'execvpe', 'fexecve', 'execveat', 'syscall']:
    if os.uname().machine != 'x86_64' and way == 'syscall': continue
    # An exec that fails changes nothing.
    assert libc.execv(b'/no/such/program', strings(b'x')) == -1 and ctypes.get_errno() == 2
    pid = os.fork()
    if not pid:
        become(way, b'python3', b'-c', NEXT.encode(), way.encode(), str(s.fileno()).encode(), b'4', b'5', b'6', b'7', b'8')
        os._exit(9)
    c = socket.create_connection(('127.0.0.1', 7102)); print(exactly(c, 99).decode(), flush=True)
    assert os.waitpid(pid, 0)[1] == 0";
    let next = "
s = socket.socket(fileno=int(sys.argv[2])); a, _ = s.accept()
a.sendall((' '.join(sys.argv[1:2] + sys.argv[3:])).encode())";
    let text = output_after_exec(&fixture, first, next);
    let ways: Vec<&str> = text.lines().map(|line| line.strip_suffix(" 4 5 6 7 8").expect(line)).collect();
    assert!(ways.len() >= 8 && ways[..3] == ["execl", "execlp", "execle"], "{text}");
}

#[test]
fn entries_without_values_hide_no_variables() {
    if skipped("entries_without_values_hide_no_variables") {
        return;
    }
    let fixture = Fixture::new("entries");
    // `LD_PRELOAD` and `GINNEL_STACK` without `=` are entries of the environment, but no variables.
    let first = "
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def strings(*all_): return (ctypes.c_char_p * (len(all_) + 1))(*all_, None)
s = server('127.0.0.1', 7104); keep(s)
argv = strings(b'python3', b'-c', NEXT.encode(), str(s.fileno()).encode())
libc.execve(sys.executable.encode(), argv, strings(b'LD_PRELOAD', b'GINNEL_STACK', b'A=1', b''))";
    let next = "
print(sorted(open('/proc/self/environ', 'rb').read().split(bytes(1)))[:3], os.environ['A'])
s = socket.socket(fileno=int(sys.argv[1]))
c = socket.create_connection(s.getsockname()); a, _ = s.accept(); a.sendall(b'served'); print(c.recv(9))";
    let text = output_after_exec(&fixture, first, next);
    assert_eq!(text, "[b'', b'', b'A=1'] 1\nb'served'\n");
}

#[test]
fn reserved_descriptors_are_not_inherited() {
    if skipped("reserved_descriptors_are_not_inherited") {
        return;
    }
    let fixture = Fixture::new("kept");
    // Sockets created from C are not close-on-exec, but their reserved descriptors are.
    let first = "
import ctypes
libc = ctypes.CDLL(None)
def start():
    pid = os.posix_spawn(sys.executable, [sys.executable, '-c', NEXT], {})
    assert os.waitpid(pid, 0)[1] == 0
start()
fds = [libc.socket(2, 1, 0) for _ in range(8)]
for fd in fds: libc.close(fd)
assert all(os.path.exists(f'/proc/self/fd/{fd}') for fd in fds), 'they are kept'
start()
# New sockets get the reserved numbers, and are not close-on-exec.
again = [libc.socket(2, 1, 0) for _ in range(8)]
assert set(again) == set(fds) and all(os.get_inheritable(fd) for fd in again)
for fd in again: libc.close(fd)
sys.stdout.flush()
os.execv(sys.executable, [sys.executable, '-c', NEXT])";
    let next = "
def is_socket(fd):
    try: return 'socket' in os.readlink('/proc/self/fd/' + fd)
    except OSError: return False
print(len([fd for fd in os.listdir('/proc/self/fd') if is_socket(fd)]))";
    let text = output_after_exec(&fixture, first, next);
    let counts: Vec<&str> = text.lines().collect();
    assert!(
        counts.len() == 3 && counts.iter().all(|count| *count == counts[0]),
        "as many as in the first program: {text}"
    );
}

#[test]
fn inetd_style_servers_get_their_connection() {
    if skipped("inetd_style_servers_get_their_connection") {
        return;
    }
    let fixture = Fixture::new("inetd");
    let first = "
import subprocess
s = server('127.0.0.1', 7103)
def started(how):
    c = socket.create_connection(('127.0.0.1', 7103)); a, _ = s.accept(); c.sendall(how.encode())
    c.shutdown(socket.SHUT_WR)
    argv = [sys.executable, '-c', NEXT]
    if how == 'fork':
        pid = os.fork()
        if not pid:
            os.dup2(a.fileno(), 0); os.dup2(a.fileno(), 1); a.close(); s.close(); os.execv(argv[0], argv)
    elif how == 'spawn':
        actions = [(os.POSIX_SPAWN_DUP2, a.fileno(), 0), (os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_CLOSE, s.fileno())]
        keep(s)
        pid = os.posix_spawn(argv[0], argv, {}, file_actions=actions)
    elif how == 'subprocess':
        p = subprocess.Popen(argv, stdin=a, stdout=a); pid = p.pid
    a.close()
    print(exactly(c, 99).decode(), flush=True)
    assert os.waitpid(pid, 0)[1] == 0
for how in ['fork', 'spawn', 'subprocess']: started(how)";
    // Its standard input reports the end, and its output ends when the program does.
    let next = "
got = b''
while part := os.read(0, 100): got += part
os.write(1, b'served ' + got)";
    assert_eq!(output_after_exec(&fixture, first, next), "served fork\nserved spawn\nserved subprocess\n");
}

#[test]
fn nginx_is_replaced_while_it_serves() {
    let test = "nginx_is_replaced_while_it_serves";
    if skipped(test) {
        return;
    }
    // With its absolute path, with which nginx starts itself again.
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let all = std::env::split_paths(&paths).map(|folder| folder.join("nginx"));
    let Some(program) = all.chain(["/usr/sbin/nginx".into()]).find(|path| path.exists()) else {
        ginnel_testkit::skip(test, "no nginx");
        return;
    };
    let program = program.display().to_string();
    let fixture = Fixture::new("upgrade");
    let at = fixture.path().display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("{name}_temp_path {at};\n"))
        .collect();
    let conf = format!(
        "error_log {at}/error.log notice; pid {at}/pid; worker_processes 2;\nevents {{}}\n\
         http {{ access_log off; {temporary} server {{ listen 127.0.0.1:8000; location / {{ return 200 ok; }} }} }}\n"
    );
    std::fs::write(fixture.path().join("nginx.conf"), conf).unwrap();
    // As a daemon, nginx's default: the stack runs until the last of its processes ends.
    let conf = format!("{at}/nginx.conf");
    let nginx = RunningProgram::new(fixture.ginnel(&[
        "run",
        "--name",
        "web",
        "--loopback",
        "stack",
        "--",
        &program,
        "-c",
        &conf,
    ]));
    let pid = |name: &str| {
        std::fs::read_to_string(fixture.path().join(name)).unwrap_or_default().trim().to_string()
    };
    let get =
        || fixture.run(&["run", "--stack", "web", "--", "curl", "-sg", "-m", "5", "http://127.0.0.1:8000/"]);
    wait_until("it serves", || get().stdout == b"ok");
    let old = pid("pid");
    signal(&old, "USR2");
    wait_until("the new one is there", || {
        let (before, now) = (pid("pid.oldbin"), pid("pid"));
        before == old && !now.is_empty() && now != old
    });
    let new = pid("pid");
    for step in ["both", "one"] {
        for n in 0..20 {
            assert_eq!(get().stdout, b"ok", "{step} {n}: {}", pid("error.log"));
        }
        if step == "both" {
            signal(&old, "QUIT");
            wait_until("the old one is gone", || pid("pid.oldbin").is_empty());
        }
    }
    signal(&new, "QUIT");
    let output = nginx.wait_for_output();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let log = pid("error.log");
    assert!(!["[emerg]", "[alert]", "[crit]", "[error]"].iter().any(|level| log.contains(level)), "{log}");
}
