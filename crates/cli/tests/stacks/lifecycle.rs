//! Starting and stopping stacks.

use crate::fixture::{Fixture, RunningProgram, TIMEOUT, built_library, run_to_end, skipped, wait_until};
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::Command;

#[test]
fn a_stack_runs_until_stopped() {
    if skipped("a_stack_runs_until_stopped") {
        return;
    }
    let fixture = Fixture::new("kept");
    let up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let directory = fixture.path().join("run/lab");
    assert!(directory.join("ready").exists());
    let twice = fixture.run(&["up", "lab", "--background", "--loopback", "stack"]);
    let stderr = String::from_utf8(twice.stderr).unwrap();
    assert_eq!((twice.status.code(), stderr.lines().count()), (Some(1), 1), "{stderr}");
    assert!(stderr.contains("\"lab\" runs already"), "{stderr}");
    let waiting = RunningProgram::new(
        fixture.script(&["--stack", "lab"], "s = server('127.0.0.1', 7001); s.accept()[0].sendall(b'bye')"),
    );
    let lists = |state: &str, text: &str| {
        fixture.run_ok(&["ss", "lab", "-a", "state", state]).lines().any(|line| line.contains(text))
    };
    wait_until("the program listens", || lists("listening", "127.0.0.1:7001"));
    let refused = fixture.run(&["down", "lab"]);
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("python3") && stderr.contains(&format!("({})", waiting.pid())), "{stderr}");
    let stdout = fixture.script_output(
        &["--stack", "lab"],
        "print(exactly(socket.create_connection(('127.0.0.1', 7001)), 9).decode())",
    );
    assert_eq!(stdout, "bye\n");
    assert!(waiting.wait_for_output().status.success());
    // No program uses the stack any more.
    fixture.run_ok(&["down", "lab"]);
    assert!(!directory.exists());
    assert_eq!(fixture.run(&["down", "lab"]).status.code(), Some(1));
    drop(up);
}

#[test]
fn programs_survive_a_forced_stop() {
    if skipped("programs_survive_a_forced_stop") {
        return;
    }
    let fixture = Fixture::new("force");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script =
        "s = server('127.0.0.1', 7001); c = socket.create_connection(('127.0.0.1', 7001)); a, _ = s.accept()
open('there', 'w').close()
try: print('got', a.recv(10))
except OSError as e: print(type(e).__name__)";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    wait_until("the program waits", || fixture.path().join("there").exists());
    fixture.run_ok(&["down", "lab", "--force"]);
    let output = program.wait_for_output();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "ConnectionResetError\n");
}

/// Programs could use a full core after their stack was killed: every way of waiting returned an error at
/// once, and was called again.
#[test]
fn a_killed_stack_causes_no_busy_loop() {
    let test = "a_killed_stack_causes_no_busy_loop";
    if skipped(test) {
        return;
    }
    let fixture = Fixture::new("killed");
    std::fs::write(fixture.path().join("two.toml"), "[shards]\ncount = 2\n").unwrap();
    let up =
        RunningProgram::new(fixture.ginnel(&["up", "lab", "--config", "two.toml", "--loopback", "stack"]));
    wait_until("it serves", || fixture.path().join("run/lab/ready").exists());
    let script = "
s = server('127.0.0.1', 7001); t = server('127.0.0.1', 7002); t.setblocking(False)
cs = [socket.create_connection(('127.0.0.1', 7001)) for _ in range(8)]; as_ = [s.accept()[0] for _ in cs]
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 7003))
ends = []
def again(f):
    while True:
        try: f()
        except OSError: pass
def accepts(): s.accept()
def receives(): u.recv(100)
def loop(all_, wait, make):
    p = make()
    for x in all_: p.register(x, select.POLLIN)
    by = {x.fileno(): x for x in all_}
    while True:
        for fd, ev in p.poll(wait):
            try:
                if by[fd] is t: t.accept()
                elif not by[fd].recv(9): raise ConnectionResetError
            except BlockingIOError: pass
            except ConnectionResetError: ends.append(fd); p.unregister(fd); by[fd].close()
            except OSError as e: assert e.errno == 100
        if not wait: time.sleep(0.0005)
waiting = [lambda: again(accepts), lambda: again(receives), lambda: loop(cs[:4] + [t], None, select.epoll),
    lambda: loop(cs[4:] + [t], None, select.poll), lambda: loop(as_, 0, select.poll)]
for w in waiting: threading.Thread(target=w, daemon=True).start()
open('there', 'w').close()
while len(ends) < 16: time.sleep(0.01)
# Children find the same.
child = os.fork()
if not child:
    threading.Thread(target=lambda: again(accepts), daemon=True).start()
    threading.Thread(target=lambda: loop([t], None, select.epoll), daemon=True).start()
    time.sleep(1); open('child', 'w').write(str(time.process_time())); os._exit(0)
begun = time.process_time(); time.sleep(1); own = time.process_time() - begun
os.waitpid(child, 0)
def refused(f):
    try: f()
    except OSError as e: return e.errno == 100
print(len(ends), len(set(ends)), own < 0.3, float(open('child').read()) < 0.3)
print(refused(lambda: socket.create_connection(('127.0.0.1', 7001))), refused(lambda: server('127.0.0.1', 7009)))
sys.stdout.flush(); os._exit(0)";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    wait_until("the program waits", || fixture.path().join("there").exists());
    std::thread::sleep(std::time::Duration::from_millis(200));
    up.signal("KILL");
    let output = program.wait_for_output();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "16 16 True True\nTrue True\n", "{output:?}");
}

/// Each listener and UDP socket reports `ENETDOWN` to one call, as a pending error of Linux, and again a
/// second later. Every thread that waits gets it at once.
#[test]
fn sockets_report_the_end_once_a_second() {
    if skipped("sockets_report_the_end_once_a_second") {
        return;
    }
    let fixture = Fixture::new("rounds");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script = "
s = server('127.0.0.1', 7001); t = server('127.0.0.1', 7002); t.setblocking(False)
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 7003)); u.setblocking(False)
errors = []
def accept():
    try: s.accept()
    except OSError as e: errors.append(e.errno)
waiting = [threading.Thread(target=accept) for _ in range(4)]
for w in waiting: w.start()
calls = {t.fileno(): t.accept, u.fileno(): lambda: u.recv(9)}
reports = {fd: [] for fd in calls}
p = select.epoll()
for fd in calls: p.register(fd, select.EPOLLIN)
open('there', 'w').close()
polls = 0
while min(map(len, reports.values())) < 3:
    for fd, event in p.poll():
        polls += 1
        # A program that retries at once does not get the error again.
        for _ in range(100):
            try: calls[fd]()
            except BlockingIOError: pass
            except OSError as e: reports[fd].append(time.monotonic()); errors.append(e.errno)
for w in waiting: w.join()
print(len(errors) - sum(map(len, reports.values())), set(errors), polls < 20,
    all(times[2] - times[0] >= 0.9 for times in reports.values()))";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    let pid = program.pid();
    wait_until("the program waits", || fixture.path().join("there").exists());
    fixture.run_ok(&["down", "lab", "--force"]);
    let output = program.wait_for_output();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "4 {100} True True\n", "{output:?}");
    let log = fixture.run_ok(&["log", "lab"]);
    assert!(log.contains(&format!("(process {pid}) goes on without the stack")), "{log}");
}

/// A blocked `accept` used to wait for ever.
#[test]
fn blocked_calls_end_with_a_killed_stack() {
    if skipped("blocked_calls_end_with_a_killed_stack") {
        return;
    }
    let fixture = Fixture::new("blocked");
    let up = RunningProgram::new(fixture.ginnel(&["up", "lab", "--loopback", "stack"]));
    wait_until("it serves", || fixture.path().join("run/lab/ready").exists());
    let script = "
s = server('127.0.0.1', 7001); quiet = server('127.0.0.1', 7002); peer = server('127.0.0.1', 7005)
c = socket.create_connection(('127.0.0.1', 7005))
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 7003))
dual = server('0.0.0.0', 0); port = dual.getsockname()[1]
e = select.epoll(); e.register(s, select.EPOLLIN)
p = select.poll(); p.register(u, select.POLLIN); p.register(quiet, select.POLLIN)
# The accept queue is full: this connection stays incomplete.
full = socket.socket(); full.bind(('127.0.0.1', 7004)); full.listen(0); held = [socket.socket() for _ in range(3)]
for h in held: h.setblocking(False); h.connect_ex(('127.0.0.1', 7004))
calls = [s.accept, lambda: u.recv(9), lambda: c.recv(9), lambda: [x for _, x in e.poll()], lambda: [x for _, x in p.poll()],
    lambda: select.select([s], [], [])[0] == [s], lambda: dual.accept()[0].recv(4)]
results = [None] * len(calls)
def call(at):
    try: results[at] = calls[at]()
    except OSError as error: results[at] = -error.errno
threads = [threading.Thread(target=call, args=(at,), daemon=True) for at in range(len(calls))]
for t in threads: t.start()
open('there', 'w').close()
for t in threads[:-1]: t.join()
# The UDP socket reports its error to `recv` or to `poll`.
print(results[:3], {x & 24 for x in results[3]}, {x & 24 for x in results[4]}, results[5], flush=True)
with open('port', 'w') as f: f.write(str(port))
os.rename('port', 'ended')
threads[-1].join(); print(results[-1])";
    let mut command = fixture.script(&["--stack", "lab"], script);
    command.env("PYTHONUNBUFFERED", "1");
    let program = RunningProgram::new(command);
    wait_until("the program waits", || fixture.path().join("there").exists());
    std::thread::sleep(std::time::Duration::from_millis(200));
    up.signal("KILL");
    wait_until("its calls end", || fixture.path().join("ended").exists());
    // A listener that the kernel serves, too, goes on with that.
    let port = fs::read_to_string(fixture.path().join("ended")).unwrap().parse::<u16>().unwrap();
    std::io::Write::write_all(&mut std::net::TcpStream::connect(("127.0.0.1", port)).unwrap(), b"here")
        .unwrap();
    let output = program.wait_for_output();
    assert!(output.status.success(), "{output:?}");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(printed, "[-100, -100, -104] {24} {24} True\nb'here'\n");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.lines().count() == 1 && stderr.contains("has ended"), "{stderr}");
}

#[test]
fn the_service_manager_learns_of_start_and_end() {
    let fixture = Fixture::new("notify");
    let path = fixture.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut up = fixture.ginnel(&["up", "lab", "--loopback", "stack"]);
    up.env("NOTIFY_SOCKET", &path);
    let up = RunningProgram::new(up);
    let message = || {
        let mut bytes = [0; 99];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };
    assert_eq!(message(), "READY=1");
    assert!(fixture.path().join("run/lab/ready").exists(), "programs can attach");
    up.signal("TERM");
    assert_eq!(message(), "STOPPING=1");
    assert!(up.wait_for_output().status.success());
    manager.set_nonblocking(true).unwrap();
    assert!(manager.recv(&mut [0; 9]).is_err(), "no other process of the stack sends a message");
}

#[test]
fn a_hangup_ends_no_background_stack() {
    let fixture = Fixture::new("hangup");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let lock = fs::read_to_string(fixture.path().join("run/lab/lock")).unwrap();
    let hang_up = || Command::new("kill").args(["-HUP", lock.trim()]).status().unwrap();
    assert!(hang_up().success());
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(hang_up().success(), "it runs");
    fixture.run_ok(&["down", "lab"]);
}

#[test]
fn a_hangup_ends_a_foreground_stack_gracefully() {
    let fixture = Fixture::new("hangup-front");
    let lock = fixture.path().join("run/lab/lock");
    let up = RunningProgram::new(fixture.ginnel(&["up", "lab", "--loopback", "stack"]));
    wait_until("the stack runs", || fixture.path().join("run/lab/ready").exists());
    up.signal("HUP");
    up.signal("HUP");
    assert_eq!(up.wait_for_output().status.code(), Some(0));
    assert!(!lock.exists());
    let log = fixture.run_ok(&["log", "lab"]);
    assert!(log.contains("SIGHUP: the stack ends") && log.contains("the stack has ended\n"), "{log}");
}

#[test]
fn on_missing_decides_without_a_stack() {
    let fixture = Fixture::new("missing");
    let run = |options: &[&str]| {
        let output = fixture.run(&[&["run"], options, &["--", "echo", "here"]].concat());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.contains("no stack named \"lab\" runs"), "{stderr}");
        (output.status.code(), output.stdout)
    };
    assert_eq!(run(&["--stack", "lab"]), (Some(125), vec![]));
    assert_eq!(run(&["--stack", "lab", "--on-missing=fail"]), (Some(125), vec![]));
    assert_eq!(run(&["--stack", "lab", "--on-missing=kernel"]), (Some(0), b"here\n".to_vec()));
    // A device that does not exist, so that the program's own stack cannot be created.
    let own = ["run", "--device", "af_xdp:no-such", "--address", "10.0.0.1/24"];
    let own = |policy| fixture.run(&[&own[..], &[policy, "--", "echo", "here"]].concat());
    assert_eq!(own("--on-missing=fail").status.code(), Some(125));
    let fallen = own("--on-missing=kernel");
    assert_eq!((fallen.status.code(), &fallen.stdout[..]), (Some(0), &b"here\n"[..]));
    assert!(String::from_utf8(fallen.stderr).unwrap().contains("no-such"));
}

#[test]
fn usage_errors_are_reported_in_any_case() {
    if skipped("usage_errors_are_reported_in_any_case") {
        return;
    }
    let fixture = Fixture::new("usage");
    for on_death in ["restart", "fail"] {
        for on_missing in ["fail", "kernel"] {
            let options = ["--on-stack-death", on_death, "--on-missing", on_missing, "--cpu", "1000"];
            let output = fixture
                .run(&[&["run", "--loopback", "stack"], &options[..], &["--", "echo", "here"]].concat());
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!((output.status.code(), &*output.stdout), (Some(2), &b""[..]), "{options:?}: {text}");
            assert_eq!(text.lines().count(), 1, "{text}");
            assert!(text.contains("shard.cpu: CPU 1000 is not in this process's affinity mask"), "{text}");
        }
    }
}

#[test]
fn on_missing_decides_without_a_library() {
    let fixture = Fixture::new("library");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let cases: [(&[&str], &str); 3] = [
        (&["--loopback", "stack"], "GINNEL_LIBRARY"),
        (&["--stack", "lab"], "GINNEL_LIBRARY"),
        (&["--stack", "kernel", "--listen-spawn", "bound"], "GINNEL_KERNEL_LIBRARY"),
    ];
    for (options, variable) in cases {
        let run = |policy| {
            let mut command = fixture.ginnel(&[&["run", policy], options, &["--", "echo", "here"]].concat());
            command.env(variable, fixture.path().join("none.so"));
            let output = crate::fixture::run_to_end(command);
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert!(stderr.lines().count() == 1 && stderr.contains("none.so is missing"), "{stderr}");
            assert!(stderr.contains(variable), "{stderr}");
            (output.status.code(), output.stdout)
        };
        assert_eq!(run("--on-missing=fail"), (Some(125), vec![]), "{options:?}");
        assert_eq!(run("--on-missing=kernel"), (Some(0), b"here\n".to_vec()), "{options:?}");
    }
}

#[test]
fn a_program_waits_for_a_starting_stack() {
    let test = "a_program_waits_for_a_starting_stack";
    if skipped(test) {
        return;
    }
    let fixture = Fixture::new("starting");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    // Begins as a stack does before it opens its devices; this process stands for the stack's.
    let directory = fixture.path().join("run/slow");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let lock = fs::File::create(directory.join("lock")).unwrap();
    lock.lock().unwrap();
    fs::write(directory.join("lock"), std::process::id().to_string()).unwrap();
    let script = "s = server('127.0.0.1', 7301); print(s.getsockname()[1])";
    let start = || RunningProgram::new(fixture.script(&["--stack", "slow"], script));
    let no_programs = start().wait_for_output();
    let stderr = String::from_utf8(no_programs.stderr).unwrap();
    assert!(no_programs.status.code() == Some(125) && stderr.contains("does not admit programs"), "{stderr}");

    fs::write(directory.join("listen-spawn"), "off").unwrap();
    let program = start();
    std::thread::sleep(std::time::Duration::from_secs(1));
    std::os::unix::fs::symlink(fixture.path().join("run/lab/control"), directory.join("control")).unwrap();
    fs::write(directory.join("ready"), "").unwrap();
    let output = program.wait_for_output();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"7301\n"[..]), "{output:?}");

    // The stack ends instead, as if a device could not be opened.
    fs::remove_file(directory.join("ready")).unwrap();
    let program = start();
    std::thread::sleep(std::time::Duration::from_secs(1));
    fs::rename(&directory, fixture.path().join("ended")).unwrap();
    let output = program.wait_for_output();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    assert!(stderr.contains("no stack named \"slow\" runs"), "{stderr}");
}

#[test]
fn the_stack_name_kernel_is_reserved() {
    let fixture = Fixture::new("kernel");
    let refused = fixture.run(&["up", "kernel", "--loopback", "stack"]);
    assert_eq!(refused.status.code(), Some(2));
    // As in a script that runs on a stack itself.
    let script = "echo ${LD_PRELOAD-none} ${GINNEL_STACK-none}";
    let mut command = fixture.ginnel(&["run", "--stack", "kernel", "--", "sh", "-c", script]);
    command.env("LD_PRELOAD", "/nowhere/libginnel.so").env("GINNEL_STACK", "/nowhere");
    let output = crate::fixture::run_to_end(command);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "none none\n");
}

#[test]
fn a_new_stack_removes_stale_directories() {
    let fixture = Fixture::new("stale");
    let mut killed = Vec::new();
    for name in ["one", "two"] {
        let up = RunningProgram::new(fixture.ginnel(&["up", name, "--loopback", "stack"]));
        wait_until("it serves", || fixture.path().join("run").join(name).join("ready").exists());
        up.signal("KILL");
        killed.push(up.wait_for_output());
        assert!(fixture.path().join("run").join(name).exists());
    }
    let _up = fixture.start_stack("three", &["--loopback", "stack"]);
    let left = fs::read_dir(fixture.path().join("run")).unwrap();
    let mut left: Vec<_> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    assert_eq!(left, [".lock", ".logs", "three"]);
}

#[test]
fn a_stack_outlives_the_fork_of_a_daemon() {
    if skipped("a_stack_outlives_the_fork_of_a_daemon") {
        return;
    }
    let fixture = Fixture::new("daemon");
    let script = "s = server('127.0.0.1', 7001)
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open('daemon', 'w').write(str(os.getpid()))
def end(*_):
    open('ended', 'w').close()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
while True:
    a, _ = s.accept(); a.sendall(b'here'); a.close()";
    let program = RunningProgram::new(fixture.script(&["--name", "lab", "--loopback", "stack"], script));
    wait_until("the daemon is there", || {
        fs::read_to_string(fixture.path().join("daemon")).is_ok_and(|s| !s.is_empty())
    });
    let ask = "print(exactly(socket.create_connection(('127.0.0.1', 7001)), 9).decode())";
    for _ in 0..2 {
        assert_eq!(fixture.script_output(&["--stack", "lab"], ask), "here\n");
    }
    // The daemon gets the signal that the program would have got in the foreground.
    program.signal("TERM");
    assert_eq!(program.wait_for_output().status.code(), Some(0));
    assert!(fixture.path().join("ended").exists());
}

#[test]
fn unpreloadable_programs_are_refused_by_default() {
    let fixture = Fixture::new("image");
    // A minimal statically linked executable: an ELF header without program headers.
    let mut image = vec![0; 64];
    image[..6].copy_from_slice(b"\x7fELF\x02\x01");
    let path = fixture.path().join("static");
    fs::write(&path, image).unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    for options in [&["--loopback", "stack"][..], &["--stack", "lab"]] {
        let output = fixture.run(&[&["run"], options, &["--", "./static"]].concat());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(125), 1), "{stderr}");
        assert!(
            stderr.contains("./static is statically linked") && stderr.contains("--on-missing=kernel"),
            "{stderr}"
        );
        let asked = fixture.run(&[&["run", "--on-missing=kernel"], options, &["--", "./static"]].concat());
        let stderr = String::from_utf8(asked.stderr).unwrap();
        assert!(
            stderr.contains("LD_PRELOAD has no effect; ./static runs on the kernel's network"),
            "{stderr}"
        );
    }
}

/// libc's fork hooks do not run for a fork by system call number (vsftpd isolates its sessions this way).
#[test]
fn a_raw_fork_system_call_keeps_sockets() {
    if skipped("a_raw_fork_system_call_keeps_sockets") {
        return;
    }
    let script = "
import ctypes, platform
number = {'x86_64': 56, 'aarch64': 220}[platform.machine()]
libc = ctypes.CDLL(None)
s = server('127.0.0.1', 7415); c = socket.create_connection(s.getsockname()); a, _ = s.accept()
child = libc.syscall(number, ctypes.c_long(signal.SIGCHLD), None, None, None, None)
if child == 0:
    a.sendall(b'by the child'); got = exactly(a, 2); os._exit(got != b'ok')
a.close(); print(exactly(c, 12)); c.sendall(b'ok'); print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), c.recv(9))";
    let fixture = Fixture::new("clone");
    assert_eq!(fixture.script_output(&["--loopback", "stack"], script), "b'by the child'\n0 b''\n");
}

/// Returns true if this test, which becomes another user, cannot run.
fn skipped_as_another_user(test: &str) -> bool {
    if !rustix::process::geteuid().is_root() {
        ginnel_testkit::skip(test, "not root");
        return true;
    }
    skipped(test)
}

/// Programs started through `setpriv`, `su` or a login server are on the stack as the other user, with memory
/// of their own and without the right to bind low ports.
#[test]
fn programs_of_another_user_use_the_stack() {
    const NAME: &str = "programs_of_another_user_use_the_stack";
    if skipped_as_another_user(NAME) {
        return;
    }
    // Needs a program that other users may execute: the test's Python may be accessible to root only.
    if !std::path::Path::new("/usr/bin/perl").exists() {
        ginnel_testkit::skip(NAME, "no perl");
        return;
    }
    let fixture = Fixture::new("another-user");
    fs::write(fixture.path().join("low.toml"), "[run]\nunprivileged_port_start = 1024\n").unwrap();
    // One is started before the stack is used and one afterwards. Both are shells that start a program.
    let script = "
import os, sys
inner = '''use Socket; my ($at, $tcp) = (inet_aton(q(127.0.0.1)), getprotobyname(q(tcp)) || 6);
    socket(L, PF_INET, SOCK_STREAM, $tcp); my $low = bind(L, sockaddr_in(74, $at)) ? q(bound) : $!;
    socket(S, PF_INET, SOCK_STREAM, $tcp); bind(S, sockaddr_in($ARGV[0], $at)) && listen(S, 1) or die $!;
    socket(C, PF_INET, SOCK_STREAM, $tcp); connect(C, sockaddr_in(7433, $at)) or die $!; syswrite(C, qq($> $low));
    accept(P, S) or die $!; sysread(P, my $line, 9); syswrite(P, uc $line)'''
go, goes = os.pipe()
def as_nobody(port):
    child = os.fork()
    if not child:
        os.read(go, 1); os.setgid(65534); os.setuid(65534)
        os.execv('/bin/sh', ['sh', '-c', 'perl -e \"$0\" $1; exit $?', inner, str(port)])
    return child
early = as_nobody(7434)
import socket
s = socket.create_server(('127.0.0.1', 7433)); late = as_nobody(7435); os.write(goes, b'..')
for _ in range(2): print(s.accept()[0].recv(99))
for port, child in (7434, early), (7435, late):
    c = socket.create_connection(('127.0.0.1', port)); c.sendall(b'loud')
    print(c.recv(9), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)";
    let options = ["--loopback", "stack", "--config", "low.toml"];
    let output = run_to_end(fixture.script_without_prelude(&options, script));
    assert!(output.status.success(), "{output:?}");
    let expected = "b'65534 Permission denied'\n".repeat(2) + &"b'LOUD' 0\n".repeat(2);
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{output:?}");
}

/// A program of another user that was not started from inside the stack runs as long as it uses no network.
#[test]
fn programs_of_other_uids_are_not_admitted() {
    const NAME: &str = "programs_of_other_uids_are_not_admitted";
    if skipped_as_another_user(NAME) {
        return;
    }
    if !std::path::Path::new("/bin/bash").exists() {
        ginnel_testkit::skip(NAME, "no bash");
        return;
    }
    let fixture = Fixture::new("stranger");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let stranger = |policy: &str, script: &str| {
        let mut command = Command::new("/bin/bash");
        command.args(["-c", script]).uid(65_534).gid(65_534).current_dir("/");
        command
            .env("LD_PRELOAD", built_library())
            .env("GINNEL_STACK", fixture.path().join("run/lab/control"));
        command.env("GINNEL_ON_MISSING", policy);
        let output = run_to_end(command);
        let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        (output.status.code(), stdout, stderr)
    };
    assert_eq!(stranger("fail", "/bin/echo hello; exit 3"), (Some(3), "hello\n".into(), String::new()));
    let connect = "echo 1; exec 3<>/dev/tcp/127.0.0.1/7436; echo 2";
    let (code, stdout, stderr) = stranger("fail", connect);
    // bash reports each socket that it does not get, and continues.
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.starts_with("1\n"), "{stdout}{stderr}");
    let reported = stderr.lines().filter(|line| line.starts_with("ginnel: "));
    assert_eq!(reported.filter(|line| line.contains("Permission denied")).count(), 1, "{stderr}");
    let (_, stdout, stderr) = stranger("kernel", connect);
    // The kernel refuses the connection, and bash continues.
    assert!(stdout.starts_with("1\n"), "{stdout}{stderr}");
    assert_eq!(stderr.matches("goes on with the kernel's network").count(), 1, "{stderr}");
}

/// Ctrl-C while `ginnel up --background` waits for the addresses of the stack, which are not ready for two
/// seconds (duplicate address detection), ends the background process, too.
#[test]
fn an_interrupted_start_leaves_no_stack() {
    if skipped("an_interrupted_start_leaves_no_stack") {
        return;
    }
    let options = ["--background", "--device", "memory", "--address", "fd00:5::1/64"];
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        // On a machine that stands still for two seconds, the signal comes after the start.
        let is_interrupted = (0..5).any(|_| {
            let fixture = Fixture::new("interrupted");
            let _stopped = fixture.stopped_at_end("lab");
            let up = RunningProgram::new(fixture.ginnel(&[&["up", "lab"], &options[..]].concat()));
            wait_until("the stack opens", || fixture.path().join("run/lab").exists());
            up.signal(signal);
            let output = up.wait_for_output();
            if output.status.success() {
                return false;
            }
            assert_eq!(output.status.code(), Some(code), "{output:?}");
            assert!(!fixture.path().join("run/lab").exists(), "{output:?}");
            true
        });
        assert!(is_interrupted, "{signal} always came too late");
    }
}
