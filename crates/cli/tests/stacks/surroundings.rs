//! Programs in surroundings in which the stack or its library cannot be used: no program may use the kernel's
//! network by mistake.

use crate::fixture::{Fixture, GINNEL, built_library, python, run_to_end, skipped};
use ginnel_testkit::interop::build_kernel_library;
use ginnel_testkit::skip;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Output};

const WORDS: [&str; 6] = ["run", "--loopback", "stack", "--", "echo", "started"];

/// Runs a shell script. Its arguments are the path of `ginnel` and `words`.
fn run_by(fixture: &Fixture, script: &str, words: &[&str]) -> Output {
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", GINNEL]).args(words).current_dir(fixture.path());
    command.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    run_to_end(command)
}

/// Asserts that the program was not started, for a reason that the line on standard error tells.
#[track_caller]
fn assert_refused(output: &Output, cause: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*output.stdout), (Some(125), &b""[..]), "{text}");
    assert!(text.contains(cause) && text.lines().count() == 1, "{text}");
}

#[test]
fn library_that_cannot_be_preloaded_is_refused() {
    let fixture = Fixture::new("bad-library");
    let copy = |name: &str| {
        let path = fixture.path().join(name);
        std::fs::copy(built_library(), &path).unwrap();
        path
    };
    let run = |library: &OsStr| {
        let mut command = fixture.ginnel(&WORDS);
        command.env("GINNEL_LIBRARY", library);
        run_to_end(command)
    };
    for name in ["my libginnel.so", "a:libginnel.so", "$LIB.so"] {
        assert_refused(&run(copy(name).as_os_str()), "its path has a space, a colon or \"$\"");
    }
    std::fs::write(fixture.path().join("text.so"), "no library").unwrap();
    assert_refused(&run(fixture.path().join("text.so").as_os_str()), "it is no library of this machine");
    // The loader searches its own directories for such a name.
    copy("other.so");
    let mut command = fixture.ginnel(&["run", "--loopback", "stack", "--", "sh", "-c", "echo $LD_PRELOAD"]);
    command.env("GINNEL_LIBRARY", "other.so");
    let expected = format!("{}\n", fixture.path().join("other.so").display());
    assert_eq!(String::from_utf8_lossy(&run_to_end(command).stdout), expected);
}

#[test]
fn library_without_the_right_to_execute_is_refused() {
    let test = "library_without_the_right_to_execute_is_refused";
    let fixture = Fixture::new("noexec");
    std::fs::create_dir(fixture.path().join("lib")).unwrap();
    let mount = "mount -t tmpfs -o noexec none lib";
    let probe =
        Command::new("unshare").args(["--mount", "sh", "-c", mount]).current_dir(fixture.path()).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        return skip(test, "mounting needs CAP_SYS_ADMIN and unshare(1)");
    }
    let script = format!(
        "{mount} && cp \"$GINNEL_LIBRARY\" lib/ && export GINNEL_LIBRARY=\"$PWD/lib/libginnel.so\" && \"$@\""
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script, "sh", GINNEL]).args(WORDS).current_dir(fixture.path());
    command.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    assert_refused(&run_to_end(command), "\"noexec\"");
}

#[test]
fn stack_without_a_path_in_utf8_is_refused() {
    let fixture = Fixture::new("not-utf8");
    let directory = fixture.path().join(OsStr::from_bytes(b"r\xff"));
    let mut command = fixture.ginnel(&WORDS);
    command.env("GINNEL_RUN_DIR", &directory);
    assert_refused(&run_to_end(command), "only by a path in UTF-8");
    // Without `ginnel run`, the library refuses the stack.
    let mut command = Command::new("echo");
    command.arg("started").env("LD_PRELOAD", built_library()).env("GINNEL_STACK", directory.join("control"));
    assert_refused(&run_to_end(command), "its path is not UTF-8");
}

#[test]
fn failure_before_the_start_of_a_program_is_a_missing_stack() {
    let fixture = Fixture::new("file-size");
    let script = "ulimit -f 1; exec \"$@\"";
    let output = run_by(&fixture, script, &WORDS);
    assert_refused(&output, "ulimit -f");
    let on_kernel = [&WORDS[..3], &["--on-missing", "kernel"], &WORDS[3..]].concat();
    let output = run_by(&fixture, script, &on_kernel);
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"started\n"[..]), "{output:?}");
    std::fs::write(fixture.path().join("file"), "").unwrap();
    for (on_missing, code, printed) in [("fail", 125, ""), ("kernel", 0, "started\n")] {
        let words = [&WORDS[..3], &["--on-missing", on_missing], &WORDS[3..]].concat();
        let mut command = fixture.ginnel(&words);
        command.env("GINNEL_RUN_DIR", fixture.path().join("file/run"));
        let output = run_to_end(command);
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!((output.status.code(), &*text), (Some(code), printed), "{output:?}");
    }
}

#[test]
fn stack_without_address_space_is_refused() {
    let fixture = Fixture::new("address-space");
    for limit in ["100000", "300000"] {
        let script = format!("ulimit -v {limit}; exec \"$@\"");
        assert_refused(&run_by(&fixture, &script, &WORDS), &format!("(ulimit -v, now {limit}, "));
        let up = run_by(&fixture, &script, &["up", "lab", "--loopback", "stack"]);
        let text = String::from_utf8_lossy(&up.stderr);
        assert_eq!(up.status.code(), Some(1), "{text}");
        assert!(text.contains("ulimit -v") && text.lines().count() == 1, "{text}");
    }
}

#[test]
fn program_with_a_file_size_limit_uses_the_stack() {
    if skipped("program_with_a_file_size_limit_uses_the_stack") {
        return;
    }
    let script = "
import os, resource, socket
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
s = socket.create_server(('127.0.0.1', 7000))
if os.fork() == 0:
    os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])
print(os.wait()[1], flush=True)
c = socket.create_connection(('127.0.0.1', 7000))
c.send(b'x')
print(s.accept()[0].recv(1))";
    let fixture = Fixture::new("program-file-size");
    assert_eq!(fixture.script_output(&["--loopback", "stack"], script), "1\n0\nb'x'\n");
}

/// Defines `refuse`, which installs a seccomp filter that returns `action` for the system call `number`.
const FILTER: &str = "
import ctypes, os, sys
def refuse(number, action):
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, action), (0x06, 0, 0, 0x7fff0000)]
    class Instruction(ctypes.Structure):
        _fields_ = [('code', ctypes.c_ushort), ('jt', ctypes.c_ubyte), ('jf', ctypes.c_ubyte), ('k', ctypes.c_uint)]
    class Program(ctypes.Structure):
        _fields_ = [('len', ctypes.c_ushort), ('filter', ctypes.POINTER(Instruction))]
    program = Program(len(code), (Instruction * len(code))(*code))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
ERRNO_EPERM, KILL = 0x50001, 0x80000000
";
const PRLIMIT64: i32 = if cfg!(target_arch = "x86_64") { 302 } else { 261 };
const PIDFD_OPEN: i32 = 434;

/// Creates a command that runs `ginnel` with a filter: the system call `number` fails with `EPERM`.
fn without_call(fixture: &Fixture, number: i32, words: &[&str]) -> Command {
    let script = format!("{FILTER}\nrefuse({number}, ERRNO_EPERM)\nos.execv(sys.argv[1], sys.argv[1:])");
    let mut command = Command::new(python().unwrap());
    command.args(["-c", &script, GINNEL]).args(words).current_dir(fixture.path());
    command.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    command
}

#[test]
fn limits_that_the_kernel_hides_are_none() {
    if skipped("limits_that_the_kernel_hides_are_none") {
        return;
    }
    let fixture = Fixture::new("hidden-limits");
    let script = "
import socket
s = socket.create_server(('127.0.0.1', 7000))
c = socket.create_connection(('127.0.0.1', 7000))
c.send(b'x')
print(s.accept()[0].recv(1))";
    let words = ["run", "--loopback", "stack", "--", python().unwrap(), "-c", script];
    let output = run_to_end(without_call(&fixture, PRLIMIT64, &words));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "b'x'\n", "{output:?}");
}

#[test]
fn workers_have_listeners_though_limits_are_hidden() {
    if skipped("workers_have_listeners_though_limits_are_hidden") {
        return;
    }
    let fixture = Fixture::new("hidden-lane-limits");
    let script = "
import os, select, socket
s = socket.create_server(('127.0.0.1', 0))
if os.fork() == 0:
    select.select([s], [], [])
    s.accept()[0].sendall(b'x')
    os._exit(0)
print(socket.create_connection(s.getsockname()).recv(1), os.wait()[1])";
    let words = ["run", "--stack", "kernel", "--listen-spawn", "auto", "--", python().unwrap(), "-c", script];
    for limit in ["ulimit -Sn", "ulimit -Sn 256"] {
        let command = without_call(&fixture, PRLIMIT64, &words);
        let mut limited = Command::new("sh");
        limited.args(["-c", &format!("{limit}; exec \"$0\" \"$@\"")]);
        limited.arg(command.get_program()).args(command.get_args()).current_dir(fixture.path());
        limited.env("GINNEL_KERNEL_LIBRARY", build_kernel_library(GINNEL));
        let output = run_to_end(limited);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.ends_with("b'x' 0\n"), "{limit}: {output:?}");
        assert!(output.stderr.is_empty(), "{limit}: {output:?}");
    }
}

#[test]
fn sandboxed_program_is_not_killed_for_a_limit() {
    if skipped("sandboxed_program_is_not_killed_for_a_limit") {
        return;
    }
    let fixture = Fixture::new("killed-for-limit");
    // A low limit, because the library raises it for the descriptors of a child.
    let script = format!(
        "
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
s = server('127.0.0.1', 7000)
{FILTER}
refuse({PRLIMIT64}, KILL)
if os.fork():
    print(exactly(s.accept()[0], 5), os.wait()[1])
else:
    socket.create_connection(('127.0.0.1', 7000)).sendall(b'hello')"
    );
    assert_eq!(fixture.script_output(&["--loopback", "stack"], &script), "b'hello' 0\n");
}

#[test]
fn refused_pidfds_are_a_missing_stack() {
    if skipped("refused_pidfds_are_a_missing_stack") {
        return;
    }
    let fixture = Fixture::new("no-pidfds");
    assert_refused(&run_to_end(without_call(&fixture, PIDFD_OPEN, &WORDS)), "pidfd");
    let on_kernel = [&WORDS[..3], &["--on-missing", "kernel"], &WORDS[3..]].concat();
    let output = run_to_end(without_call(&fixture, PIDFD_OPEN, &on_kernel));
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"started\n"[..]), "{output:?}");
}
