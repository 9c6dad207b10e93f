//! Errors that a user reads if a program does not get onto a stack, or a command does not reach one.

use crate::fixture::{
    Fixture, GINNEL, RunningProgram, copy_program, python, run_to_end, signal, skipped, wait_until,
};
use ginnel_testkit::interop::{Namespace, programs_unavailable};
use ginnel_testkit::skip;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

/// Makes a socket and waits. A process that gets no socket writes the error.
const USE_STACK: &str = "
try: s = socket.socket(); text = 'attached'
except OSError as e: text = os.strerror(e.errno)
open(f'of-{os.getpid()}', 'w').write(text); time.sleep(50)";
/// Overwrites the environment of the process, as nginx and redis do with a title.
const OVERWRITE_ENVIRONMENT: &str = "
import ctypes
begin, end = map(int, open('/proc/self/stat').read().rsplit(') ', 1)[1].split()[47:49])
ctypes.memset(begin, 0, end - begin)";
/// A user without privileges.
const NOBODY: u32 = 65_534;

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the first line that `ginnel check` prints.
fn check(fixture: &Fixture, pid: u32) -> String {
    let output = fixture.run(&["check", &pid.to_string()]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(&output);
    text.lines().next().unwrap_or_default().into()
}

/// Returns what a process with the script [`USE_STACK`] has got.
fn result_of(fixture: &Fixture, pid: u32) -> String {
    let path = fixture.path().join(format!("of-{pid}"));
    let read = || std::fs::read_to_string(&path).unwrap_or_default();
    wait_until("the program has tried", || !read().is_empty());
    read()
}

fn pid_of_stack(fixture: &Fixture, name: &str) -> u32 {
    let lock = fixture.path().join("run").join(name).join("lock");
    std::fs::read_to_string(lock).unwrap().trim().parse().unwrap()
}

// limit: channel.clients_max
#[test]
fn a_full_stack_names_its_limit() {
    if skipped("a_full_stack_names_its_limit") {
        return;
    }
    let fixture = Fixture::new("full");
    let _up = fixture.start_stack("lab", &["--loopback", "stack", "--clients-max", "2"]);
    // The second child finds no room, and neither does a program that would inherit a socket.
    let script = "
s = server('127.0.0.1', 7401); s.set_inheritable(True); pids = []
for _ in range(2):
    pids.append(os.fork())
    if not pids[-1]: signal.alarm(0); time.sleep(50)
open('children', 'w').write(f'{pids[0]} {pids[1]}')
while not os.path.exists('go'): time.sleep(0.01)
os.execv('/bin/sleep', ['sleep', '0.01'])";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    let facts = || std::fs::read_to_string(fixture.path().join("children")).unwrap_or_default();
    wait_until("the children run", || facts().split(' ').count() == 2);
    let children: Vec<u32> = facts().split(' ').map(|pid| pid.parse().unwrap()).collect();
    const FULL: &str = "it is full: 2 programs and threads of this user are attached, the limit channel.clients_max (raise it with --clients-max)";
    let first = check(&fixture, children[0]);
    assert!(first.contains(" is accelerated by the stack \"lab\""), "{first}");
    let second = check(&fixture, children[1]);
    let expected = format!(" is not accelerated: cannot attach this child process to the stack: {FULL}");
    assert!(second.ends_with(&expected), "{second}");

    let refused = RunningProgram::new(fixture.script(&["--stack", "lab"], USE_STACK));
    assert_eq!(result_of(&fixture, refused.pid()), "Network is down");
    let control = fixture.path().join("run/lab/control");
    let reason = format!("cannot attach to {}: {FULL}", control.display());
    let report = check(&fixture, refused.pid());
    assert!(report.ends_with(&format!(" is not accelerated: {reason}")), "{report}");
    refused.signal("TERM");
    let message = stderr(&refused.wait_for_output());
    assert_eq!(message, format!("ginnel: cannot attach to the stack {}: {FULL}\n", control.display()));

    std::fs::write(fixture.path().join("go"), "").unwrap();
    let until_exec = || check(&fixture, program.pid()).contains("no process has the id");
    wait_until("the next program has ended", || {
        until_exec() || check(&fixture, program.pid()).contains("(sleep)")
    });
    children.iter().for_each(|pid| signal(pid, "KILL"));
    let message = stderr(&program.wait_for_output());
    let lines: Vec<&str> = message.lines().collect();
    let [child, sockets] = lines[..] else { panic!("{message}") };
    assert_eq!(
        child,
        format!(
            "ginnel: cannot attach this child process to the stack: {FULL}; the child uses the kernel's network"
        )
    );
    assert_eq!(
        sockets,
        format!(
            "ginnel: the next program inherits none of this program's sockets: the stack refused the request: {FULL}"
        )
    );
}

/// The stack has few descriptors, in one process or in two. It refuses programs, and does not end.
#[test]
fn a_stack_without_descriptors_says_so() {
    if skipped("a_stack_without_descriptors_says_so") {
        return;
    }
    for on_death in ["fail", "restart"] {
        let fixture = Fixture::new("few");
        let options = ["--loopback", "stack", "--on-stack-death", on_death];
        let up = fixture.ginnel(&[&["up", "lab", "--background"], &options[..]].concat());
        let mut limited = Command::new("sh");
        limited.args(["-c", "ulimit -n 40; exec \"$0\" \"$@\"", GINNEL]).args(up.get_args());
        limited
            .envs(up.get_envs().filter_map(|(name, value)| Some((name, value?))))
            .current_dir(fixture.path());
        let started = run_to_end(limited);
        assert!(started.status.success(), "{started:?}");
        let stack = pid_of_stack(&fixture, "lab");
        let programs: Vec<RunningProgram> =
            (0..24).map(|_| RunningProgram::new(fixture.script(&["--stack", "lab"], USE_STACK))).collect();
        // All of them have tried before the first one ends.
        let (attached, refused): (Vec<_>, Vec<_>) =
            programs.into_iter().partition(|program| result_of(&fixture, program.pid()) == "attached");
        drop(attached);
        assert!(!refused.is_empty(), "{on_death}: the limit was not reached");
        for program in &refused {
            program.signal("TERM");
        }
        for program in refused {
            let message = stderr(&program.wait_for_output());
            let reason = "its process has no descriptor left: raise its hard limit (ulimit -Hn, or LimitNOFILE= of its unit)\n";
            assert!(message.ends_with(reason) && message.lines().count() == 1, "{on_death}: {message}");
        }
        // Nobody is attached any more.
        assert_eq!(
            fixture.script_output(&["--stack", "lab"], "s = socket.socket(); print('attached')"),
            "attached\n"
        );
        assert_eq!(pid_of_stack(&fixture, "lab"), stack);
        let log = fixture.run_ok(&["log", "lab"]);
        assert!(!log.contains("the stack has ended"), "no process of the stack died: {log}");
        fixture.run_ok(&["down", "lab", "--force"]);
    }
}

#[test]
fn dead_and_ended_stacks_are_distinguished() {
    if skipped("dead_and_ended_stacks_are_distinguished") {
        return;
    }
    let fixture = Fixture::new("dead");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let attached = RunningProgram::new(fixture.script(&["--stack", "lab"], USE_STACK));
    assert_eq!(result_of(&fixture, attached.pid()), "attached");
    let stack = pid_of_stack(&fixture, "lab");
    signal(stack, "KILL");
    let is_dead = || std::fs::read_to_string(format!("/proc/{stack}/stat")).is_err();
    wait_until("the stack is dead", is_dead);
    let control = fixture.path().join("run/lab/control");
    let start_on_stack = || {
        let mut command = Command::new(python().unwrap());
        command
            .args(["-c", "pass"])
            .env("LD_PRELOAD", crate::fixture::built_library())
            .env("GINNEL_STACK", &control);
        let output = run_to_end(command);
        assert_eq!(output.status.code(), Some(125), "{output:?}");
        stderr(&output)
    };
    let subject = format!("ginnel: cannot attach to the stack {}", control.display());
    assert_eq!(
        start_on_stack(),
        format!(
            "{subject}: its process is dead, and has left its directory behind: Connection refused (os error 111)\n"
        )
    );
    let dead = fixture.run(&["run", "--stack", "lab", "--", "true"]);
    assert_eq!(dead.status.code(), Some(125), "{dead:?}");
    let expected = format!(
        "ginnel: the stack \"lab\" is dead: its process {stack} was killed or crashed (see \"ginnel log lab\"); its directory is removed now\n"
    );
    assert_eq!(stderr(&dead), expected);
    assert_eq!(
        start_on_stack(),
        format!("{subject}: it has ended, or never ran: No such file or directory (os error 2)\n")
    );
    let ended = fixture.run(&["run", "--stack", "lab", "--", "true"]);
    assert!(
        stderr(&ended).starts_with("ginnel: no stack named \"lab\" runs, nor any other of this user"),
        "{ended:?}"
    );
    let report = check(&fixture, attached.pid());
    let directory = control.parent().unwrap().display();
    let expected = format!(" is not accelerated: its stack \"lab\" ({directory}) has ended");
    assert!(report.ends_with(&expected), "{report}");
}

#[test]
fn a_stopped_stack_is_said_not_to_answer() {
    if skipped("a_stopped_stack_is_said_not_to_answer") {
        return;
    }
    let fixture = Fixture::new("stopped");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let attached = RunningProgram::new(fixture.script(&["--stack", "lab"], USE_STACK));
    assert_eq!(result_of(&fixture, attached.pid()), "attached");
    let stack = pid_of_stack(&fixture, "lab");
    signal(stack, "STOP");
    let pid = attached.pid().to_string();
    let late = RunningProgram::new(fixture.script(&["--stack", "lab"], "socket.socket()"));
    let [down, check] =
        [&["down", "lab"][..], &["check", &pid]].map(|words| RunningProgram::new(fixture.ginnel(words)));
    let silent = "no answer within 10 s: the stack's process is stopped or overloaded";
    let (down, check, late) = (down.wait_for_output(), check.wait_for_output(), late.wait_for_output());
    signal(stack, "CONT");
    assert_eq!(
        stderr(&down),
        format!(
            "ginnel: the stack \"lab\" (process {stack}) does not tell which programs use it: {silent}: use --force to end it anyway\n"
        )
    );
    let report = String::from_utf8_lossy(&check.stdout).into_owned();
    let expected =
        format!(" is not accelerated: its stack \"lab\" (process {stack}) does not answer: {silent}\n");
    assert!(report.contains(&expected), "{report}");
    assert!(
        stderr(&late).contains(": reply of the stack, whose process is stopped or overloaded: timed out\n"),
        "{late:?}"
    );
}

#[test]
fn another_user_is_told_whose_stack_it_is() {
    if skipped("another_user_is_told_whose_stack_it_is") {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return skip("another_user_is_told_whose_stack_it_is", "only root can be another user");
    }
    let fixture = Fixture::new("foreign");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let attached = RunningProgram::new(fixture.script(&["--stack", "lab"], USE_STACK));
    assert_eq!(result_of(&fixture, attached.pid()), "attached");
    // Where any user may execute it.
    let binary = fixture.path().join("ginnel");
    let library = fixture.path().join("libginnel.so");
    for (from, to) in [(GINNEL.as_ref(), &binary), (crate::fixture::built_library(), &library)] {
        copy_program(from, to);
        std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let run = fixture.path().join("run");
    let as_nobody = |words: &[&str], run_dir: &std::path::Path| {
        let mut command = Command::new(&binary);
        command.args(words).uid(NOBODY).gid(NOBODY).current_dir("/").env_remove("XDG_RUNTIME_DIR");
        stderr(&run_to_end_with(command.env("GINNEL_LIBRARY", &library).env("GINNEL_RUN_DIR", run_dir)))
    };
    let foreign = format!(
        "ginnel: {}: Permission denied (os error 13): it belongs to user 0, whose stacks are only for that user and root\n",
        run.display()
    );
    for words in [&["stat"][..], &["ss"], &["run", "--stack", "lab", "--", "true"], &["down", "lab"]] {
        assert_eq!(as_nobody(words, &run), foreign, "{words:?}");
    }
    let nowhere = fixture.path().join("nowhere");
    let pid = attached.pid();
    let denied = as_nobody(&["check", &pid.to_string()], &nowhere);
    let expected =
        "belongs to user 0: only that user and root may check it (Permission denied (os error 13))\n";
    assert!(denied.ends_with(expected), "{denied}");
    // A program that was started on the stack, and is another user's.
    let mut program = Command::new("/bin/cat");
    program.arg("/dev/null").uid(NOBODY).gid(NOBODY).env("LD_PRELOAD", &library);
    program.env("GINNEL_STACK", run.join("lab/control"));
    let quiet = run_to_end_with(&mut program);
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "it uses no network: {quiet:?}");
    let mut program = Command::new("bash");
    program.args(["-c", "echo > /dev/tcp/127.0.0.1/1"]).uid(NOBODY).gid(NOBODY).env("LD_PRELOAD", &library);
    program.env("GINNEL_STACK", run.join("lab/control"));
    let message = stderr(&run_to_end_with(&mut program));
    let control = run.join("lab/control");
    let expected = format!(
        "ginnel: cannot attach to the stack {}: it belongs to user 0: Permission denied (os error 13)\n",
        control.display()
    );
    assert!(message.starts_with(&expected), "{message}");
    // Root finds the stack wherever it is.
    let mut elsewhere = fixture.ginnel(&["check", &pid.to_string()]);
    elsewhere.env("GINNEL_RUN_DIR", &nowhere);
    let report = String::from_utf8(run_to_end(elsewhere).stdout).unwrap();
    assert!(report.contains(" is accelerated by the stack \"lab\""), "{report}");
}

/// As [`run_to_end`], for a command that is borrowed.
fn run_to_end_with(command: &mut Command) -> Output {
    command.output().unwrap()
}

#[test]
fn a_program_on_the_kernel_shows_why() {
    if skipped("a_program_on_the_kernel_shows_why") {
        return;
    }
    let fixture = Fixture::new("kernel");
    let reason = "ginnel run started it on the kernel's network: ";
    for (options, cause) in [
        (&["--stack", "kernel"][..], "started with --stack kernel"),
        (
            &["--stack", "lab", "--on-missing", "kernel"],
            "no stack named \"lab\" runs, nor any other of this user (",
        ),
    ] {
        let program = RunningProgram::new(fixture.script(options, USE_STACK));
        assert_eq!(result_of(&fixture, program.pid()), "attached", "to the kernel");
        let report = check(&fixture, program.pid());
        assert!(report.contains(&format!(" is not accelerated: {reason}{cause}")), "{report}");
    }
    // Without its environment, a program does not tell.
    let script = format!("{OVERWRITE_ENVIRONMENT}{USE_STACK}");
    for (options, expected) in [
        (&["--stack", "kernel"][..], "not started with ginnel run, or with --stack kernel"),
        (
            &["--stack", "kernel", "--listen-spawn", "auto"],
            "ginnel run started it on the kernel's network: started with --stack kernel --listen-spawn",
        ),
    ] {
        let program = RunningProgram::new(fixture.script(options, &script));
        assert_eq!(result_of(&fixture, program.pid()), "attached", "to the kernel");
        let report = check(&fixture, program.pid());
        assert!(report.contains(&format!(" is not accelerated: {expected}")), "{report}");
    }
}

#[test]
fn a_stack_without_programs_is_not_upgraded() {
    let fixture = Fixture::new("unsupervised");
    let echo = ["echo", "--loopback", "stack", "--listen", "127.0.0.1:7007", "--name", "lab"];
    let stack = RunningProgram::new(fixture.ginnel(&echo));
    wait_until("the stack runs", || !fixture.run_ok(&["stat", "--list"]).is_empty());
    let output = fixture.run(&["upgrade", "lab"]);
    assert_eq!(output.status.code(), Some(1));
    let expected = format!(
        "ginnel: the stack \"lab\" was not upgraded: its shards are threads of process {}, which is neither \"ginnel up\" nor \"ginnel run\": restart that process\n",
        stack.pid()
    );
    assert_eq!(stderr(&output), expected);
}

#[test]
fn words_after_two_dashes_are_no_options_of_up() {
    let fixture = Fixture::new("dashes");
    let output = fixture.run(&["up", "--background", "--loopback", "stack", "--", "lab"]);
    assert!(output.status.success(), "{output:?}");
    fixture.run_ok(&["down", "lab"]);
}

/// A socket on a wildcard address takes its port on the kernel, too.
#[test]
fn a_port_of_another_stack_names_that_stack() {
    if skipped("a_port_of_another_stack_names_that_stack") {
        return;
    }
    let fixture = Fixture::new("ports");
    let _ups = ["first", "second"].map(|name| fixture.start_stack(name, &["--loopback", "stack"]));
    let script = "
t = server('0.0.0.0', 0); u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('0.0.0.0', 0))
open('ports', 'w').write(f'{t.getsockname()[1]} {u.getsockname()[1]} .'); time.sleep(50)";
    // As nginx and redis do.
    let script = format!("{OVERWRITE_ENVIRONMENT}{script}");
    let owner = RunningProgram::new(fixture.script(&["--stack", "first"], &script));
    let facts = || std::fs::read_to_string(fixture.path().join("ports")).unwrap_or_default();
    wait_until("both are bound", || facts().ends_with('.'));
    let facts = facts();
    let ports: Vec<&str> = facts.split(' ').collect();
    for (kind, port) in [("STREAM", ports[0]), ("DGRAM", ports[1])] {
        let script = format!(
            "
s = socket.socket(type=socket.SOCK_{kind})
try: s.bind(('0.0.0.0', {port})); print('bound')
except OSError as e: print(os.strerror(e.errno))"
        );
        let run = |options: &[&str]| {
            let output = run_to_end(fixture.script(options, &script));
            assert!(output.status.success(), "{output:?}");
            (String::from_utf8_lossy(&output.stdout).trim_end().to_string(), stderr(&output))
        };
        let (result, message) = run(&["--stack", "second"]);
        assert_eq!(result, "Address already in use", "{kind}");
        let expected = format!(
            " (process {}) on the stack \"first\" has port {port} on the kernel, which a socket on a wildcard address takes, too: start one of the programs with \"ginnel run --kernel-listen off\" to have the port on both stacks",
            owner.pid()
        );
        assert!(message.trim_end().ends_with(&expected) && message.lines().count() == 1, "{kind}: {message}");
        let (result, message) = run(&["--stack", "second", "--kernel-listen", "off"]);
        assert_eq!((&*result, &*message), ("bound", ""), "{kind}");
        // The port is in use on the program's own stack: there is no other way out.
        let (result, message) = run(&["--stack", "first"]);
        assert_eq!((&*result, &*message), ("Address already in use", ""), "{kind}");
    }
}

#[test]
fn a_tap_without_permission_names_the_ways_out() {
    if let Some(reason) = programs_unavailable(&["setpriv"]) {
        return skip("a_tap_without_permission_names_the_ways_out", &reason);
    }
    let namespace = Namespace::new().unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-net_admin", GINNEL, "echo", "--device", "tap:web0"]);
    command.args(["--address", "10.9.0.2/24"]);
    let output = namespace.run(|| command.output()).unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(
        text,
        "ginnel: device web0: TAP web0: opening /dev/net/tun: Operation not permitted (os error 1); let root create it \
         for this user once (ip tuntap add NAME mode tap user USER, and its addresses), or give CAP_NET_ADMIN, or use a \
         device that needs no permission (--device memory, --memif)\n"
    );
}
