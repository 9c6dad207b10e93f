//! Signals of a terminal and of the program itself, which reach the program without the help of `ginnel run`.

use crate::fixture::{
    Fixture, GINNEL, built_library, python, run_to_end, skipped, skipped_without_pid_namespaces,
};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Runs its arguments on a terminal of their own, types Ctrl-C and Ctrl-\, changes the size, and sends SIGINT
/// and SIGUSR1 to the first process. Prints what the terminal shows.
///
/// `ginnel run` passes on all signals that it has when it looks for them, in any order, and then looks again.
/// So what it had before the first of two SIGUSR2 is passed on when the second one arrives.
const TERMINAL: &str = r"
import fcntl, os, pty, signal, struct, sys, termios
signal.alarm(50)
pid, master = pty.fork()
if not pid: os.execv(sys.argv[1], sys.argv[1:])
shown = b''
def read():
    global shown
    try: part = os.read(master, 1000)
    except OSError: return False
    shown += part
    return part
def await_(text, count=1):
    while shown.count(text) < count: assert read(), shown
# A second signal arrives before those that follow.
def await_all(text, count=1):
    await_(text, count)
    for _ in range(2):
        before = shown.count(b'got 12.')
        os.kill(pid, signal.SIGUSR2); await_(b'got 12.', before + 1)
await_(b'ready')
os.write(master, b'\x03'); await_all(b'got 2.')
os.write(master, b'\x1c'); await_all(b'got 3.')
fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack('4H', 30, 90, 0, 0)); await_all(b'got 28.')
os.kill(pid, signal.SIGINT); await_all(b'got 2.', 2)
os.kill(pid, signal.SIGUSR1)
while read(): pass
print(shown.decode().split('counts')[1].strip(), os.waitpid(pid, 0)[1])
";

/// Counts signals until SIGUSR1, all but SIGUSR2.
const PROGRAM: &str = r"
import os, signal, sys
if sys.argv[1] == 'alone': os.setpgid(0, 0)
counts = {}
def note(number, frame):
    counts[number] = counts.get(number, 0) + 1
    os.write(1, f'got {number}.'.encode())
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, note)
print('ready', flush=True)
while signal.SIGUSR1 not in counts: signal.sigtimedwait([], 0.01)
del counts[signal.SIGUSR2]
print('counts', sorted((int(number), count) for number, count in counts.items()))
";

/// Runs its arguments after the first one on a terminal of their own, and hangs up. Prints the file that its
/// first argument names, and the status of the process.
const HANG_UP: &str = r"
import os, pty, signal, sys
signal.alarm(50)
pid, master = pty.fork()
if not pid: os.execv(sys.argv[2], sys.argv[2:])
shown = b''
while b'ready\r\n' not in shown: shown += os.read(master, 1000)
os.close(master)
status = os.waitpid(pid, 0)[1]
print(open(sys.argv[1]).read(), status)
";

/// Writes to a file how often SIGHUP and SIGCONT arrived. Ends after 20 s without SIGHUP. Whatever
/// `ginnel run` passes on besides arrives before the second SIGUSR2, as for [`TERMINAL`].
const HUNG_UP_PROGRAM: &str = r"
import os, signal, sys
signal.alarm(20)
if sys.argv[2] == 'alone': os.setpgid(0, 0)
counts = {}
def note(number, frame): counts[number] = counts.get(number, 0) + 1
for number in (signal.SIGHUP, signal.SIGCONT, signal.SIGUSR2): signal.signal(number, note)
print('ready', flush=True)
while not {signal.SIGHUP, signal.SIGCONT} <= set(counts): signal.sigtimedwait([], 0.01)
for number in range(1, 3) if sys.argv[2] != 'leader' else ():
    # By another process: no process gets back a signal that it has sent.
    os.system(f'kill -s USR2 {os.getppid()}')
    while counts.get(signal.SIGUSR2) != number: signal.sigtimedwait([], 0.01)
counts.pop(signal.SIGUSR2, None)
counts = sorted((int(number), count) for number, count in counts.items())
with open(sys.argv[1], 'w') as file: file.write(str(counts))
";

/// Returns the signals of a terminal that hangs up, which a program has counted. `command` begins the command
/// line of the program, which is in the process group of `ginnel run` or in one of its own.
fn counts_at_hang_up(command: &[&str], group: &str) -> String {
    let fixture = Fixture::new(&format!("hang-up-{group}-{}", command.len()));
    let file = fixture.path().join("counts").display().to_string();
    let mut hang_up = Command::new(python().unwrap());
    hang_up.args(["-c", HANG_UP, &file]).args(command);
    hang_up.args([python().unwrap(), "-c", HUNG_UP_PROGRAM, &file, group]);
    hang_up.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    let output = run_to_end(hang_up);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the signals that a program has counted, in the process group of `ginnel run` or in one of its own.
fn counts(group: &str) -> String {
    let fixture = Fixture::new(&format!("terminal-{group}"));
    let mut command = Command::new(python().unwrap());
    command.args(["-c", TERMINAL, GINNEL, "run", "--loopback", "stack", "--", python().unwrap()]);
    command.args(["-c", PROGRAM, group]);
    command.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    let output = run_to_end(command);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn signals_of_the_terminal_arrive_once() {
    if skipped("signals_of_the_terminal_arrive_once") {
        return;
    }
    // SIGINT of Ctrl-C and that for "ginnel run", SIGQUIT, SIGUSR1, and SIGWINCH.
    let expected = "[(2, 2), (3, 1), (10, 1), (28, 1)] 0\n";
    assert_eq!(counts("together"), expected);
    assert_eq!(counts("alone"), expected, "forwarded to another process group");
}

/// Signals its process group, then `ginnel run` alone, and lets another process signal `ginnel run` twice, as
/// for [`TERMINAL`]. Prints how often each signal arrived.
const OWN_GROUP: &str = r"
import os, signal, subprocess
counts = {}
def note(number, frame): counts[number] = counts.get(number, 0) + 1
for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, note)
os.kill(0, signal.SIGHUP)
os.kill(os.getppid(), signal.SIGUSR1)
for number in range(1, 3):
    subprocess.run(['sh', '-c', f'kill -s USR2 {os.getppid()}'])
    while counts.get(signal.SIGUSR2) != number: signal.sigtimedwait([], 0.01)
print(sorted((int(number), count) for number, count in counts.items()))
";

#[test]
fn own_signals_are_not_sent_back() {
    if skipped("own_signals_are_not_sent_back") {
        return;
    }
    let fixture = Fixture::new("own-group");
    let mut command = Command::new(GINNEL);
    command.args(["run", "--loopback", "stack", "--", python().unwrap(), "-c", OWN_GROUP]).process_group(0);
    command.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    let output = run_to_end(command);
    // SIGHUP came directly, and SIGUSR2 through "ginnel run".
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[(1, 1), (12, 2)]\n", "{output:?}");
}

/// In a container that another process has entered, as `docker exec` does, the process group and the session
/// have no number: getpgid(2) and getsid(2) return 0.
#[test]
fn signals_are_forwarded_from_a_hidden_group() {
    let test = "signals_are_forwarded_from_a_hidden_group";
    if skipped(test) || skipped_without_pid_namespaces(test) {
        return;
    }
    let script = "
import os, signal
got = []
for number in (signal.SIGUSR1, signal.SIGHUP): signal.signal(number, lambda number, _: got.append(int(number)))
signal.alarm(30)
for name in ('USR1', 'HUP'): os.system(f'kill -s {name} {os.getppid()}')
while len(got) < 2: signal.sigtimedwait([], 0.01)
print(os.getpgrp(), os.getsid(0), sorted(got))";
    let fixture = Fixture::new("hidden-group");
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc", GINNEL, "run", "--loopback", "stack", "--"]);
    command.args([python().unwrap(), "-c", script]);
    command.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    let output = run_to_end(command);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 0 [1, 10]\n", "{output:?}");
}

#[test]
fn hang_up_of_the_terminal_arrives_once() {
    if skipped("hang_up_of_the_terminal_arrives_once") {
        return;
    }
    // The kernel sends SIGHUP and SIGCONT to the session leader alone.
    let expected = "[(1, 1), (18, 1)] 0\n";
    assert_eq!(counts_at_hang_up(&[], "leader"), expected, "without ginnel");
    let run = [GINNEL, "run", "--loopback", "stack", "--"];
    assert_eq!(counts_at_hang_up(&run, "together"), expected);
    assert_eq!(counts_at_hang_up(&run, "alone"), expected, "forwarded to another process group");
}

/// As with nohup(1), and in the background of a script. `ginnel run` still passes these signals on.
#[test]
fn ignored_signals_stay_ignored_in_the_program() {
    if skipped("ignored_signals_stay_ignored_in_the_program") {
        return;
    }
    let fixture = Fixture::new("ignored");
    let program = "
import os, signal
numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
print([signal.getsignal(number) == signal.SIG_IGN for number in numbers], flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
signal.signal(signal.SIGHUP, lambda *_: None)
# The handler of `ginnel run` comes after the start of the program.
while not signal.sigtimedwait(numbers, 0.05): os.system(f'kill -HUP {os.getppid()}')
print('passed on')";
    let words = [GINNEL, "run", "--loopback", "stack", "--", python().unwrap(), "-c", program];
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP INT QUIT; exec \"$@\"", "sh"]).args(words);
    command.env("GINNEL_LIBRARY", built_library()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    let output = run_to_end(command);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[True, True, True]\npassed on\n", "{output:?}");
}
