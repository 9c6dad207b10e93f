//! `ginnel top` on a pipe and on a terminal, which script(1) makes.

mod temp_folder;

use ginnel::run_dir::restarts;
use ginnel_testkit::skip;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use temp_folder::TempFolder;

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");
const TIMEOUT: Duration = Duration::from_secs(60);
/// Sequences that switch a terminal to the alternate screen, and back.
const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";

/// A stack named "lab" in a runtime directory of its own.
struct Lab(TempFolder);

impl Lab {
    fn start(test: &str) -> Self {
        let lab = Self(TempFolder::new(test));
        let options = ["up", "lab", "--device", "memory", "--address", "10.5.0.1/24", "--background"];
        let started = lab.ginnel(&options).output().unwrap();
        assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
        lab
    }

    fn ginnel(&self, arguments: &[&str]) -> Command {
        self.command(GINNEL, arguments)
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.env("GINNEL_RUN_DIR", self.0.0.join("run")).env("TERM", "xterm").args(arguments);
        command
    }

    fn top(&self, arguments: &[&str]) -> Output {
        self.ginnel(&[&["top", "lab", "--interval", "0.1"], arguments].concat()).output().unwrap()
    }

    /// Starts `ginnel top` on a terminal, between two commands that print the terminal's modes. Returns it
    /// with what it has written so far, once it has drawn a picture.
    fn on_terminal(&self) -> (Child, String) {
        // Ctrl-C is sent to the shell, too, which some shells (dash) would not survive without the trap.
        let line = format!("trap : INT; stty -g; {GINNEL} top lab --interval 0.1; echo status $?; stty -g");
        let mut command = self.command("script", &["--quiet", "--return", "--command", &line, "/dev/null"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut seen = String::new();
        let until = Instant::now() + TIMEOUT;
        while !seen.contains("Nearest limit") {
            let mut buffer = [0; 4096];
            let count = child.stdout.as_mut().unwrap().read(&mut buffer).unwrap();
            assert!(count > 0 && Instant::now() < until, "{seen}");
            seen += &String::from_utf8_lossy(&buffer[..count]);
        }
        (child, seen)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.ginnel(&["down", "lab", "--force"]).output();
    }
}

/// Returns everything that a child has written, `seen` included, once it has ended.
fn rest_of(mut child: Child, mut seen: String) -> String {
    child.stdout.take().unwrap().read_to_string(&mut seen).unwrap();
    child.wait().unwrap();
    seen
}

/// Checks that the terminal is as it was, and that `top` ended with `status`.
fn assert_restored(seen: &str, status: &str) {
    let lines: Vec<&str> = seen.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.first(), lines.last(), "the modes of the terminal: {seen}");
    assert_eq!((seen.matches(ENTER).count(), seen.matches(LEAVE).count()), (1, 1), "{seen}");
    assert!(seen.contains(&format!("status {status}")), "{seen}");
}

/// Returns true, and prints a note, if the test cannot run here.
fn skipped(test: &str) -> bool {
    let missing = Command::new("script").arg("--version").output().is_err();
    if missing {
        skip(test, "no script");
    }
    missing
}

#[test]
fn a_pipe_gets_lines_or_json() {
    let lab = Lab::start("top-lines");
    let output = lab.top(&["-n", "2"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shards: Vec<&str> = text.lines().filter(|line| line.contains(" shard=0 busy=")).collect();
    assert!(shards.len() == 2 && shards.iter().all(|line| line.contains("connections=0 ")), "{text}");
    assert!(!text.contains('\x1b'), "{text:?}");
    let json = String::from_utf8(lab.top(&["-n", "2", "--json"]).stdout).unwrap();
    for line in json.lines() {
        let value: Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            (value["name"].as_str(), value["all"]["dropped_per_second"].as_f64()),
            (Some("lab"), Some(0.0))
        );
    }
    assert_eq!(json.lines().count(), 2);
    // The pages of shards that died stay.
    let directory = lab.0.0.join("run/lab");
    restarts::record_failed(&directory, true).unwrap();
    let mut child = lab.ginnel(&["top", "lab", "--interval", "0.1"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "lab: the shards start again (ginnel log lab says why)\n");
    restarts::record_failed(&directory, false).unwrap();
    while !line.contains(" shard=0 busy=") {
        line.clear();
        assert_ne!(out.read_line(&mut line).unwrap(), 0);
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // A reader that has seen enough is no error.
    let mut child = lab.ginnel(&["top", "lab", "--interval", "0.05"]).stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}

/// Returns the process of the shards.
fn shard_process(lab: &Lab) -> u32 {
    let directory = lab.0.0.join("run/lab");
    let is_of_shards = |pid: &u32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = words.split(|byte| *byte == 0).collect();
        words.contains(&&b"--shards-of"[..]) && words.contains(&directory.as_os_str().as_encoded_bytes())
    };
    let processes = std::fs::read_dir("/proc").unwrap();
    let mut pids = processes.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    pids.find(is_of_shards).unwrap()
}

#[test]
fn stopped_shards_are_not_idle() {
    let lab = Lab::start("top-silent");
    let pid = shard_process(&lab).to_string();
    let signal = |name: &str| assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    let mut child =
        lab.ginnel(&["top", "lab", "--interval", "0.1", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut wait_for = |answers: bool| {
        let until = Instant::now() + TIMEOUT;
        loop {
            let value: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            if value["shards"][0]["answers"] == answers {
                return value["shards"][0]["busy"].clone();
            }
            assert!(Instant::now() < until, "{value}");
        }
    };
    assert!(wait_for(true).is_number());
    signal("-STOP");
    let busy = wait_for(false);
    signal("-CONT");
    assert!(busy.is_null(), "{busy}");
    assert!(wait_for(true).is_number());
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn keys_end_and_the_terminal_is_restored() {
    let test = "keys_end_and_the_terminal_is_restored";
    if skipped(test) {
        return;
    }
    let lab = Lab::start("top-keys");
    for key in [b"q", b"\x03"] {
        let (mut child, seen) = lab.on_terminal();
        child.stdin.as_mut().unwrap().write_all(key).unwrap();
        assert_restored(&rest_of(child, seen), "0");
    }
}

/// Runs its arguments in the background of a terminal, types a key, which they cannot read there, and ends
/// them. Prints their status, and whether the terminal's modes are those of a new terminal.
const IN_BACKGROUND: &str = r"
import os, pty, signal, sys, termios, threading, time
signal.alarm(50)
from_leader, to_driver = os.pipe()
leader, master = pty.fork()
if not leader:
    for number in (signal.SIGTTIN, signal.SIGTTOU): signal.signal(number, signal.SIG_IGN)
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.execv(sys.argv[1], sys.argv[1:])
    os.write(to_driver, str(child).encode())
    os.write(to_driver, str(os.waitpid(child, 0)[1]).encode())
    while True: signal.pause()
child = int(os.read(from_leader, 20))
shown = b''
def read():
    global shown
    while True: shown += os.read(master, 1000)
threading.Thread(target=read, daemon=True).start()
def modes(): return termios.tcgetattr(master)[3] & (termios.ICANON | termios.ECHO)
while b'Nearest limit' not in shown: time.sleep(0.01)
assert modes() == 0
os.write(master, b'x'); time.sleep(0.5)
os.kill(child, signal.SIGTERM)
print(os.read(from_leader, 20).decode(), modes() == termios.ICANON | termios.ECHO, flush=True)
os.kill(leader, signal.SIGKILL)
os._exit(0)
";

#[test]
fn unreadable_keys_prevent_no_restoring() {
    let test = "unreadable_keys_prevent_no_restoring";
    if Command::new("python3").arg("--version").output().is_err() {
        skip(test, "no python3");
        return;
    }
    let lab = Lab::start("top-background");
    let arguments = ["-c", IN_BACKGROUND, GINNEL, "top", "lab", "--interval", "0.1"];
    let output = lab.command("python3", &arguments).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 True\n", "{output:?}");
}

#[test]
fn the_end_of_the_stack_is_said() {
    let test = "the_end_of_the_stack_is_said";
    if skipped(test) {
        return;
    }
    let lab = Lab::start("top-end");
    let (child, seen) = lab.on_terminal();
    assert!(lab.ginnel(&["down", "lab"]).status().unwrap().success());
    let seen = rest_of(child, seen);
    assert_restored(&seen, "0");
    assert!(seen.contains("the stack \"lab\" has ended"), "{seen}");
}

#[test]
fn the_death_of_the_stack_is_an_error() {
    let test = "the_death_of_the_stack_is_an_error";
    if skipped(test) {
        return;
    }
    let lab = Lab::start("top-death");
    let list = lab.ginnel(&["stat", "--list", "--json"]).output().unwrap();
    let list: Value = serde_json::from_slice(&list.stdout).unwrap();
    let (child, seen) = lab.on_terminal();
    assert!(Command::new("kill").args(["-9", &list[0]["pid"].to_string()]).status().unwrap().success());
    let seen = rest_of(child, seen);
    assert_restored(&seen, "1");
    assert!(seen.contains("the stack \"lab\" is dead"), "{seen}");
}

#[test]
fn wrong_command_lines_are_refused() {
    let lab = Lab::start("top-wrong");
    for (arguments, reason) in [
        (&["top", "nonesuch"][..], "no stack named \"nonesuch\" runs"),
        (&["top", "--interval", "0"], "not 0.05 to 86400 seconds"),
        (&["top", "--count", "0"], "0 is not in 1.."),
        (&["top", "--port", "80"], "--protocol"),
    ] {
        let output = lab.ginnel(arguments).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(reason), "{arguments:?}: {error}");
    }
}
