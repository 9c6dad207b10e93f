//! Descriptor numbers: which numbers sockets get, and programs that close or overwrite descriptors that they
//! do not own.

use crate::fixture::{Fixture, PRELUDE, python, run_to_end, skipped};
use std::process::Command;

const LOOPBACK: [&str; 2] = ["--loopback", "stack"];

/// Closes and overwrites all descriptors except its own, up to 20 below the limit; the library uses the
/// highest 20 numbers if it can have no others.
const CLOSE_AND_OVERWRITE: &str = "
import resource
def talks(s):
    c = socket.create_connection(s.getsockname()); a, _ = s.accept(); c.sendall(b'in'); got = a.recv(9)
    p = select.poll(); p.register(a, select.POLLIN); quiet = p.poll(30)
    e = select.epoll(); e.register(c, select.EPOLLIN); idle = e.poll(0.03); a.sendall(b'out'); busy = e.poll(5); e.close()
    return got == b'in' and (quiet, idle) == ([], []) and busy == [(c.fileno(), select.EPOLLIN)]
s = server('127.0.0.1', 7410); results = [talks(s)]
null = os.open('/dev/null', os.O_RDWR)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
def everywhere(end):
    mine = (0, 1, 2, s.fileno(), null)
    for n in range(3, end):
        if n in mine: continue
        try: os.close(n)
        except OSError: pass
    results.append(talks(s))
    for n in range(3, end):
        if n not in mine: os.dup2(null, n)
    results.append(talks(s))
    for n in range(3, end):
        if n not in mine: os.close(n)
    results.append(talks(s))
everywhere(min(soft, 1024) - 20)
# Numbers that a program chooses which may have thousands of them.
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard)); everywhere(min(4096, hard) - 20)
os.closerange(null + 1, 5000); results.append(talks(s))
child = os.fork(); s = server('127.0.0.1', 7411 + (child == 0)); everywhere(min(4096, hard) - 20)
if child: results.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
if not child: os._exit(not all(results))
print(all(results), len(results))";

#[test]
fn a_program_may_overwrite_any_descriptor() {
    if skipped("a_program_may_overwrite_any_descriptor") {
        return;
    }
    assert_eq!(Fixture::new("reckless").script_output(&LOOPBACK, CLOSE_AND_OVERWRITE), "True 12\n");
}

/// Forks while no descriptor is free. Such a child has no connection to the stack.
const FORK_AT_THE_LIMIT: &str = "
import resource
s = server('127.0.0.1', 7414); resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
fds = []
try:
    while True: fds.append(os.open('/dev/null', os.O_RDONLY))
except OSError as e: print(os.strerror(e.errno))
child = os.fork()
if not child: os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for fd in fds: os.close(fd)
c = socket.create_connection(s.getsockname()); a, _ = s.accept(); c.sendall(b'in'); print(a.recv(9))";

/// The expected output is that of the program on the kernel.
#[test]
fn forking_works_without_free_descriptors() {
    if skipped("forking_works_without_free_descriptors") {
        return;
    }
    let fixture = Fixture::new("forkfull");
    let on_kernel = fixture.script_output(&["--stack", "kernel"], FORK_AT_THE_LIMIT);
    assert_eq!(on_kernel, "Too many open files\n7\nb'in'\n");
    assert_eq!(fixture.script_output(&LOOPBACK, FORK_AT_THE_LIMIT), on_kernel);
}

/// Forks while no descriptor is free below the soft limit. Such a child uses its sockets.
const FORK_AT_THE_SOFT_LIMIT: &str = "
import resource
s = server('127.0.0.1', 7415); hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
fds = []
try:
    while True: fds.append(os.open('/dev/null', os.O_RDONLY))
except OSError as e: print(os.strerror(e.errno))
child = os.fork()
if not child:
    for fd in fds[:4]: os.close(fd)
    c = socket.create_connection(s.getsockname()); c.sendall(b'of the child'); c.recv(1)
    os._exit(resource.getrlimit(resource.RLIMIT_NOFILE) != (64, hard))
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (64, hard), len(fds) > 40)
try: os.close(os.open('/dev/null', os.O_RDONLY))
except OSError as e: print(os.strerror(e.errno))
os.close(fds.pop()); a, _ = s.accept(); print(exactly(a, 12)); a.sendall(b'.')
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
";

/// The expected output is that of the program on the kernel.
#[test]
fn forking_works_above_the_soft_limit() {
    if skipped("forking_works_above_the_soft_limit") {
        return;
    }
    let fixture = Fixture::new("forkraise");
    let on_kernel = fixture.script_output(&["--stack", "kernel"], FORK_AT_THE_SOFT_LIMIT);
    let expected = "Too many open files\nTrue True\nToo many open files\nb'of the child'\n0\n";
    assert_eq!(on_kernel, expected);
    assert_eq!(fixture.script_output(&LOOPBACK, FORK_AT_THE_SOFT_LIMIT), expected);
}

/// Forks while no descriptor is free below the soft limit. Counts how many memfds with a descriptor report
/// the child has, and how many of them are its parent's.
const REPORT_AT_THE_SOFT_LIMIT: &str = "
import resource
def reports():
    fds = [fd for fd in range(3, 5000) if os.path.exists(f'/proc/self/fd/{fd}')]
    return {os.fstat(fd).st_ino for fd in fds if 'ginnel-descriptors' in os.readlink(f'/proc/self/fd/{fd}')}
s = server('127.0.0.1', 7418); hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
fds = []
try:
    while True: fds.append(os.open('/dev/null', os.O_RDONLY))
except OSError: pass
before = reports(); child = os.fork(); own = reports()
if not child: print(len(own), len(own & before), flush=True); os._exit(0)
print(len(own), len(own & before), os.waitpid(child, 0)[1])";

#[test]
fn child_at_the_soft_limit_has_a_report() {
    if skipped("child_at_the_soft_limit_has_a_report") {
        return;
    }
    let output = Fixture::new("forkreport").script_output(&LOOPBACK, REPORT_AT_THE_SOFT_LIMIT);
    let mut lines: Vec<_> = output.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["1 0", "1 1 0"]);
}

/// Makes a call without a free descriptor while the stack does not answer. Another process, which is not
/// attached, looks meanwhile how often the soft limit is raised.
const CALL_ON_A_STOPPED_STACK: &str = "
import os, resource, signal, time, _socket
signal.alarm(50)
stack, program = os.getppid(), os.getpid()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
def limit(): return next(l for l in open(f'/proc/{program}/limits') if l.startswith('Max open files')).split()[3]
r, w = os.pipe(); observer = os.fork()
if not observer:
    os.read(r, 1); seen = []; end = time.monotonic() + 1
    try:
        while time.monotonic() < end: seen.append(limit() != '64'); time.sleep(0.005)
    finally: os.kill(stack, signal.SIGCONT)
    print(2 * sum(seen) < len(seen), flush=True); os._exit(0)
PREPARE
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
files = []
try:
    while True: files.append(os.open('/dev/null', os.O_RDONLY))
except OSError: pass
os.kill(stack, signal.SIGSTOP); os.write(w, b'.')
CALL
os.waitpid(observer, 0)
";

#[test]
fn limit_is_not_raised_while_the_stack_is_silent() {
    if skipped("limit_is_not_raised_while_the_stack_is_silent") {
        return;
    }
    let fork = "child = os.fork()
if not child: os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))";
    // The library attaches in the first call. A number is free for the socket alone.
    let attach = "def attempt():
    try: _socket.socket(); return 'socket'
    except OSError as error: return os.strerror(error.errno)
print(attempt()); os.close(files.pop()); print(attempt())";
    for (prepare, call, expected) in
        [("_socket.socket()", fork, "True\n7\n"), ("", attach, "True\nToo many open files\nsocket\n")]
    {
        let script = CALL_ON_A_STOPPED_STACK.replace("PREPARE", prepare).replace("CALL", call);
        let output = run_to_end(Fixture::new("silent").script_without_prelude(&LOOPBACK, &script));
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{output:?}");
    }
}

/// Attaches and forks while no descriptor is free below a soft limit that is as high as the numbers of the
/// library. Prints how many reports the process and its child have.
const ATTACH_AT_A_HIGH_LIMIT: &str = "
import os, resource, _socket
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
def reports():
    fds = [fd for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}')]
    return sum('ginnel-descriptors' in os.readlink(f'/proc/self/fd/{fd}') for fd in fds)
resource.setrlimit(resource.RLIMIT_NOFILE, (2100, hard))
files = []
try:
    while True: files.append(os.open('/dev/null', os.O_RDONLY))
except OSError as e: print(os.strerror(e.errno), flush=True)
FREE
try: _socket.socket(); print('attached', flush=True)
except OSError as e: print(os.strerror(e.errno), flush=True)
while len(files) > 2000: os.close(files.pop())
s = _socket.socket(); s.bind(('127.0.0.1', 7419)); s.listen()
try:
    while True: files.append(os.open('/dev/null', os.O_RDONLY))
except OSError as e: pass
child = os.fork()
if child: status = os.waitpid(child, 0)[1]
for fd in range(20): os.close(files.pop())
if not child: print(reports(), flush=True); c = _socket.socket(); c.connect(s.getsockname()); os._exit(7)
print(reports(), os.waitstatus_to_exitcode(status))";

/// The library needs numbers for two shards.
#[test]
fn a_process_at_a_high_limit_has_the_stack() {
    if skipped("a_process_at_a_high_limit_has_the_stack") {
        return;
    }
    let options = ["--shards", "2", "--loopback", "stack"];
    // Some numbers are free, fewer than the library needs.
    for free in 0..12 {
        let script =
            ATTACH_AT_A_HIGH_LIMIT.replace("FREE", &format!("for _ in range({free}): os.close(files.pop())"));
        let output = run_to_end(Fixture::new("highlimit").script_without_prelude(&options, &script));
        assert!(output.status.success(), "{output:?}");
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(stdout.starts_with("Too many open files\n"), "{free}: {output:?}");
        assert!(stdout.ends_with("\n1\n1 7\n"), "{free}: {output:?}");
    }
}

/// Forks while only the numbers of standard input, output and error are free: those are the program's.
const CLOSED_STANDARD_FDS: &str = "
import resource
log = os.dup(2); s = server('127.0.0.1', 7416)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
fds = []
try:
    while True: fds.append(os.open('/dev/null', os.O_RDONLY))
except OSError: pass
for fd in (0, 1, 2): os.close(fd)
child = os.fork()
if not child: os._exit([os.open('/dev/zero', os.O_RDWR) for _ in range(3)] != [0, 1, 2])
free = [os.open('/dev/zero', os.O_RDWR) for _ in range(3)]
os.write(log, b'%d %a' % (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), free))";

#[test]
fn standard_descriptors_are_left_to_the_program() {
    if skipped("standard_descriptors_are_left_to_the_program") {
        return;
    }
    let fixture = Fixture::new("stdfds");
    for stack in [&["--stack", "kernel"][..], &LOOPBACK] {
        let output = run_to_end(fixture.script(stack, CLOSED_STANDARD_FDS));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "0 [0, 1, 2]", "{stack:?}");
    }
}

#[test]
fn overwriting_works_with_a_low_descriptor_limit() {
    if skipped("overwriting_works_with_a_low_descriptor_limit") {
        return;
    }
    let fixture = Fixture::new("few");
    // Both limits, and the soft limit alone; in the latter case the library's descriptors are above the soft
    // limit.
    for limit in ["ulimit -n 256", "ulimit -Sn 256"] {
        let script = format!("{limit} && exec \"$0\" -c \"$1\"");
        let mut command = fixture
            .ginnel(&[&["run"], &LOOPBACK[..], &["--", "sh", "-c", &script, python().unwrap()]].concat());
        command.arg(format!("{PRELUDE}{CLOSE_AND_OVERWRITE}"));
        let output = run_to_end(command);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "True 12\n", "{limit}: {output:?}");
    }
}

/// Creates, duplicates, overwrites and closes sockets in a deterministic pseudo-random order.
#[test]
fn sockets_have_the_kernels_descriptor_numbers() {
    if skipped("sockets_have_the_kernels_descriptor_numbers") {
        return;
    }
    let script = "
import random
files, sockets, results = [], [], []
def new(s): sockets.append(s); results.append(s.fileno())
for n in range(12):
    new(socket.socket()); files.append(os.open('/dev/null', os.O_RDONLY))
for step in range(300):
    r = random.Random(step); kind = r.choice(['socket', 'socket', 'close', 'close', 'file', 'dup', 'over'])
    if kind == 'socket': new(socket.socket(type=r.choice([socket.SOCK_STREAM, socket.SOCK_DGRAM])))
    elif kind == 'close' and sockets: sockets.pop(step * 7 % len(sockets)).close()
    elif kind == 'file' and files: os.close(files.pop(step * 5 % len(files)))
    elif kind == 'dup' and sockets: new(socket.socket(fileno=os.dup(sockets[0].fileno())))
    elif kind == 'over' and sockets: os.dup2(sockets[0].fileno(), sockets[-1].fileno())
while sockets: sockets.pop().close()
# What is opened next is its standard input.
os.close(0); new(socket.socket()); sockets.pop().close(); results.append(os.open('/dev/null', os.O_RDONLY))
print(results)";
    let mut kernel = Command::new(python().unwrap());
    kernel.args(["-c", &format!("{PRELUDE}{script}")]);
    let kernel = String::from_utf8(run_to_end(kernel).stdout).unwrap();
    assert!(kernel.len() > 500, "{kernel}");
    assert_eq!(Fixture::new("numbers").script_output(&LOOPBACK, script), kernel);
}

#[test]
fn closed_descriptors_are_closed_despite_reserved_numbers() {
    if skipped("closed_descriptors_are_closed_despite_reserved_numbers") {
        return;
    }
    let script = "
import fcntl
s = socket.socket(); n = s.fileno(); s.close()
calls = [lambda: os.read(n, 0), lambda: os.read(n, 5), lambda: os.readv(n, []), lambda: os.write(n, b''), lambda: os.dup(n), lambda: os.dup2(n, 50),
    lambda: fcntl.fcntl(n, fcntl.F_GETFD), lambda: os.close(n)]
def failed(call):
    try: return call()
    except OSError as e: return e.errno
print([failed(call) for call in calls])";
    assert_eq!(Fixture::new("closed").script_output(&LOOPBACK, script), "[9, 9, 9, 9, 9, 9, 9, 9]\n");
}

/// Polls epoll sets whose kernel descriptors become ready during the call.
const POLL_EPOLL_SETS: &str = "
def written_later():
    r, w = os.pipe(); t = threading.Thread(target=lambda: (time.sleep(0.1), os.write(w, b'x'))); t.start()
    return r
def poll(fd): p = select.poll(); p.register(fd, select.POLLIN); return len(p.poll(20000)) == 1
def select_in(fd): return select.select([fd], [], [], 20)[0] == [fd]
def epoll(fd): e = select.epoll(); e.register(fd, select.EPOLLIN); return len(e.poll(20)) == 1
def nested(fd): e = select.epoll(); e.register(fd, select.EPOLLIN); return poll(e.fileno())
s = server('127.0.0.1', 7412); start = time.monotonic()
for wait in (poll, select_in, epoll, nested):
    e = select.epoll(); e.register(s, select.EPOLLIN); r = written_later(); e.register(r, select.EPOLLIN)
    print(wait.__name__, wait(e.fileno()), e.poll(0) == [(r, select.EPOLLIN)])
print(time.monotonic() - start < 10)";

#[test]
fn polling_an_epoll_set_waits_for_its_kernel_descriptors() {
    if skipped("polling_an_epoll_set_waits_for_its_kernel_descriptors") {
        return;
    }
    let output = Fixture::new("polled").script_output(&LOOPBACK, POLL_EPOLL_SETS);
    assert_eq!(output, "poll True True\nselect_in True True\nepoll True True\nnested True True\nTrue\n");
}
