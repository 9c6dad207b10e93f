//! The log of a stack, which outlives it.

use crate::fixture::{Fixture, RunningProgram, signal, skipped, wait_until};
use crate::restart::shard_process;
use crate::restart_devices::{over_af_xdp, over_tap};
use ginnel::run_dir::logs::StackLog;
use ginnel_testkit::interop::{Namespace, programs_unavailable, unavailable};
use ginnel_testkit::skip;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::process::{Command, Stdio};
use std::time::Duration;
use tracing::Level;

fn log(fixture: &Fixture, name: &str) -> String {
    fixture.run_ok(&["log", name])
}

/// Asserts that lines with these texts are in the log, in this order, and that each line has a time.
#[track_caller]
fn assert_in_order(log: &str, expected: &[&str]) {
    let mut lines = log.lines();
    for text in expected {
        assert!(lines.any(|line| line.contains(text)), "{text:?} is not in its place:\n{log}");
    }
    for line in log.lines() {
        assert!(line.starts_with("20") || line.starts_with("    "), "{line}");
    }
}

fn pid_of_stack(fixture: &Fixture, name: &str) -> u32 {
    fs::read_to_string(fixture.path().join("run").join(name).join("lock")).unwrap().trim().parse().unwrap()
}

#[test]
fn log_has_start_programs_and_end() {
    if skipped("log_has_start_programs_and_end") {
        return;
    }
    let fixture = Fixture::new("log-life");
    let none = fixture.run(&["log"]);
    assert_eq!(none.status.code(), Some(1), "{none:?}");
    assert!(String::from_utf8(none.stderr).unwrap().contains("no stack of this user has a log"));
    let options = ["--device", "memory", "--address", "10.5.0.1/24", "--loopback", "stack"];
    let up = fixture.start_stack("lab", &options);
    fixture.script_output(&["--stack", "lab"], "s = server('127.0.0.1', 7001)");
    fixture.run_ok(&["down", "lab"]);
    drop(up);
    let version = concat!("ginnel ", env!("CARGO_PKG_VERSION"), " starts the stack \"lab\" (ginnel up)");
    assert_in_order(
        &log(&fixture, "lab"),
        &[
            version,
            "device memory: memory inside the process, link link0: 10.5.0.1/24",
            "127.0.0.0/8 and ::1 belong to the stack",
            "programs can attach",
            "\"python3",
            ") ended",
            "SIGTERM: the stack ends",
            "the stack has ended",
        ],
    );
    // The only log needs no name; an unknown name is told which logs there are.
    assert_eq!(fixture.run_ok(&["log"]), log(&fixture, "lab"));
    assert_eq!(fixture.run_ok(&["log", "lab", "-n", "2"]).lines().count(), 2);
    assert!(fixture.run_ok(&["log", "--list"]).starts_with("lab "));
    let unknown = fixture.run(&["log", "web"]);
    let message = String::from_utf8(unknown.stderr).unwrap();
    assert_eq!(message, "ginnel: no stack named \"web\" has a log; there are logs of: lab\n");
}

/// Nothing that explains a death is lost when the dead stack's directory is removed, or when it starts again.
#[test]
fn death_is_in_the_log_after_the_next_start() {
    if skipped("death_is_in_the_log_after_the_next_start") {
        return;
    }
    let fixture = Fixture::new("log-death");
    let first = fixture.start_stack("lab", &["--loopback", "stack"]);
    let pid = pid_of_stack(&fixture, "lab");
    signal(pid, "KILL");
    wait_until("it is gone", || fixture.run_ok(&["stat", "--list"]).is_empty());
    let death = format!("the stack has ended without a word: its process {pid} was killed");
    assert_in_order(&log(&fixture, "lab"), &["starts the stack", "programs can attach", &death]);
    let second = fixture.start_stack("lab", &["--loopback", "stack"]);
    assert_in_order(
        &log(&fixture, "lab"),
        &["starts the stack", &death, "starts the stack", "programs can attach"],
    );
    drop((first, second));
}

#[test]
fn failed_start_is_in_the_log() {
    let fixture = Fixture::new("log-start");
    let failed = fixture.run(&["up", "lab", "--device", "af_xdp:missing0", "--address", "10.5.0.1/24"]);
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    let message = String::from_utf8(failed.stderr).unwrap();
    let cause = message.trim_end().strip_prefix("ginnel: ").unwrap();
    assert_in_order(
        &log(&fixture, "lab"),
        &["AF_XDP on missing0", &format!("was not started, or stops: {cause}")],
    );
}

/// Standard error of a stack in the background is its log.
#[test]
fn last_error_is_in_the_log_once() {
    if skipped("last_error_is_in_the_log_once") {
        return;
    }
    let fixture = Fixture::new("log-last");
    let up = fixture.start_stack("lab", &["--loopback", "stack", "--on-stack-death", "kill"]);
    let supervisor = pid_of_stack(&fixture, "lab");
    signal(shard_process(supervisor).unwrap(), "KILL");
    // A zombie has no executable.
    wait_until("the stack has ended", || fs::read_link(format!("/proc/{supervisor}/exe")).is_err());
    let log = fixture.run_ok(&["log", "lab"]);
    assert_eq!(log.matches("the stack has ended: signal 9").count(), 1, "{log}");
    assert!(log.contains("ERROR the stack stops: the stack has ended: signal 9"), "{log}");
    drop(up);
}

#[test]
fn log_is_followed_across_stacks() {
    if skipped("log_is_followed_across_stacks") {
        return;
    }
    let fixture = Fixture::new("log-follow");
    drop(fixture.start_stack("lab", &["--loopback", "stack"]));
    let mut follower =
        fixture.ginnel(&["log", "lab", "--follow", "-n", "1"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().ends_with("the stack has ended"));
    drop(fixture.start_stack("lab", &["--loopback", "stack"]));
    // Blocks until the entry is there; the time limit of the test run ends it otherwise.
    let all: Vec<String> = lines.by_ref().take_while(|line| !line.ends_with("the stack has ended")).collect();
    assert_in_order(&all.join("\n"), &["starts the stack", "programs can attach", "SIGTERM"]);
    follower.kill().unwrap();
    follower.wait().unwrap();
}

/// Opens a log whose files take one entry each, and has one entry in its previous file.
fn rotated_log(fixture: &Fixture) -> StackLog {
    fs::create_dir(fixture.path().join("run")).unwrap();
    let log = StackLog::open(&fixture.path().join("run/lab"), 1, 3).unwrap();
    log.append(Level::INFO, "entry 0").unwrap();
    fs::rename(log.files().current, log.files().previous).unwrap();
    log
}

#[test]
fn log_without_a_current_file_is_shown() {
    let fixture = Fixture::new("log-previous");
    let _log = rotated_log(&fixture);
    assert!(log(&fixture, "lab").ends_with("INFO  entry 0\n"));
    assert!(fixture.run_ok(&["log"]).ends_with("INFO  entry 0\n"));
}

#[test]
fn log_is_followed_through_rotations() {
    let fixture = Fixture::new("log-rotations");
    let log = rotated_log(&fixture);
    let mut follower = fixture.ginnel(&["log", "lab", "-f"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.next().unwrap().ends_with("entry 0"));
    // Each entry is in a file of its own, so two rotations may fall between two looks of the follower.
    for entry in (1..40).step_by(2) {
        for entry in [entry, entry + 1] {
            log.append(Level::INFO, &format!("entry {entry}")).unwrap();
        }
        for entry in [entry, entry + 1] {
            let line = lines.next().unwrap();
            assert!(line.ends_with(&format!("entry {entry}")), "{entry}: {line}");
        }
    }
    follower.kill().unwrap();
    follower.wait().unwrap();
}

#[test]
fn reached_limits_and_refused_programs_are_in_the_log() {
    if skipped("reached_limits_and_refused_programs_are_in_the_log") {
        return;
    }
    let fixture = Fixture::new("log-limits");
    fs::write(fixture.path().join("small.toml"), "[channel]\nlisteners_max = 1\n[run]\nlog_bytes = 65536\n")
        .unwrap();
    let options = ["--loopback", "stack", "--config", "small.toml", "--clients-max", "1"];
    let _up = fixture.start_stack("lab", &options);
    let script = "
s = server('127.0.0.1', 7001)
try: server('127.0.0.1', 7002)
except OSError as e: print(e.errno)
open('there', 'w').close(); signal.pause()";
    let _first = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    wait_until("the program listens", || fixture.path().join("there").exists());
    let second = fixture.script(&["--stack", "lab"], "server('127.0.0.1', 7003)");
    let refused = RunningProgram::new(second).wait_for_output();
    assert!(!refused.status.success(), "{refused:?}");
    wait_until("the limits are in the log", || {
        let log = log(&fixture, "lab");
        ["channel.listeners_refused", "channel.clients_refused"].iter().all(|counter| log.contains(counter))
    });
    let log = log(&fixture, "lab");
    assert_in_order(
        &log,
        &[
            "was refused: it is full: 1 programs and threads of this user are attached, the limit channel.clients_max",
        ],
    );
    let of_listeners = log.lines().filter(|line| line.contains("channel.listeners_refused"));
    let of_listeners: Vec<&str> = of_listeners.collect();
    assert_eq!(of_listeners.len(), 1, "{log}");
    assert!(of_listeners[0].ends_with("to raise: channel.listeners_max"), "{log}");
    // The output of a stack in the background follows the log to its next file.
    let files = fixture.path().join("run/.logs");
    let fill = "x".repeat(70_000);
    fs::OpenOptions::new()
        .append(true)
        .open(files.join("lab.log"))
        .and_then(|mut file| std::io::Write::write_all(&mut file, fill.as_bytes()))
        .unwrap();
    fixture.run_ok(&["down", "lab", "--force"]);
    assert!(fs::read_to_string(files.join("lab.log.1")).unwrap().ends_with(&fill));
    assert!(fs::metadata(files.join("lab.log")).unwrap().len() < 65_536);
}

#[test]
fn interface_that_goes_down_and_up_is_in_the_log() {
    let test = "interface_that_goes_down_and_up_is_in_the_log";
    if let Some(reason) = unavailable() {
        return skip(test, &reason);
    }
    if skipped(test) {
        return;
    }
    let fixture = Fixture::new("log-device");
    let namespace = Namespace::new().unwrap();
    let inside = |command: Command| namespace.run(|| Ok::<_, std::io::Error>(RunningProgram::new(command)));
    let options = ["up", "lab", "--device", "tap:web0", "--address", "10.9.0.2/24"];
    let _up = inside(fixture.ginnel(&[&options[..], &["--kernel-address", "10.9.0.1/24"]].concat())).unwrap();
    wait_until("it serves", || fixture.path().join("run/lab/ready").exists());
    let script = "
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
while True:
    try: u.sendto(b'x', ('10.9.0.1', 9))
    except OSError: pass
    time.sleep(0.01)";
    let _program = inside(fixture.script(&["--stack", "lab"], script)).unwrap();
    wait_until("the program runs", || log(&fixture, "lab").contains("\"python3"));
    namespace.ip("link set web0 down").unwrap();
    wait_until("it is down", || {
        log(&fixture, "lab").contains("interface web0 does not transmit: it is down")
    });
    namespace.ip("link set web0 up").unwrap();
    wait_until("it is up", || log(&fixture, "lab").contains("interface web0 transmits again"));
}

/// Starts a stack whose interface is in `host`, without a program.
fn start_in_namespace(fixture: &Fixture, options: &[&str], host: &Namespace) -> RunningProgram {
    let up = fixture.ginnel(&[&["up", "lab", "--address", "10.9.0.2/24"], options].concat());
    let stack = host.run(|| Ok::<_, std::io::Error>(RunningProgram::new(up))).unwrap();
    wait_until("it serves", || fixture.path().join("run/lab/ready").exists());
    stack
}

/// Changes an interface, waits for the entry about the stack's interface, and restores it.
fn assert_change_and_return(fixture: &Fixture, namespace: &Namespace, interface: &str, change: &str) {
    let count = |text: &str| log(fixture, "lab").matches(text).count();
    let again = "interface web0 is up and has a carrier again";
    let before = count(again);
    namespace.ip(&format!("link set {interface} down")).unwrap();
    wait_until(change, || count(change) > 0);
    namespace.ip(&format!("link set {interface} up")).unwrap();
    wait_until(again, || count(again) > before);
    assert_eq!((count(change), count(again)), (1, before + 1), "{}", log(fixture, "lab"));
}

#[test]
fn af_xdp_interface_without_its_carrier_is_in_the_log() {
    let test = "af_xdp_interface_without_its_carrier_is_in_the_log";
    over_af_xdp(test, |options, host, clients| {
        let fixture = Fixture::new("log-carrier");
        let _stack = start_in_namespace(&fixture, options, host);
        assert_change_and_return(&fixture, clients, "web1", "interface web0 has no carrier");
        assert_change_and_return(&fixture, host, "web0", "interface web0 is down");
    });
}

#[test]
fn tap_interface_of_a_silent_stack_is_in_the_log() {
    over_tap("tap_interface_of_a_silent_stack_is_in_the_log", |options, host, _| {
        let fixture = Fixture::new("log-silent");
        let _stack = start_in_namespace(&fixture, options, host);
        // The watch looks at the interface for the first time within a second.
        std::thread::sleep(Duration::from_millis(1500));
        assert_change_and_return(&fixture, host, "web0", "interface web0 is down");
    });
}

/// The interface of the stack is a bridge, whose driver is not one of those with local senders.
#[test]
fn late_partial_checksums_are_in_the_log() {
    let test = "late_partial_checksums_are_in_the_log";
    if let Some(reason) = programs_unavailable(&["ethtool"]) {
        return skip(test, &reason);
    }
    over_af_xdp(test, |_, host, clients| {
        let fixture = Fixture::new("log-checksums");
        for change in ["link add lan0 type bridge", "link set web0 master lan0", "link set lan0 up"] {
            host.ip(change).unwrap();
        }
        let offload = |state: &str| {
            let arguments = ["-K", "web1", "tx", state];
            let output = clients.run(|| Command::new("ethtool").args(arguments).output()).unwrap();
            assert!(output.status.success(), "{output:?}");
        };
        offload("off");
        let stack = start_in_namespace(&fixture, &["--device", "af_xdp:lan0"], host);
        let script = "
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('10.9.0.2', 7001)); signal.alarm(0)
while True: u.sendto(*u.recvfrom(100))";
        let program = fixture.script(&["--stack", "lab"], script);
        let _program = host.run(|| Ok::<_, std::io::Error>(RunningProgram::new(program))).unwrap();
        let client = clients.run(|| UdpSocket::bind("10.9.0.1:0")).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        client.connect("10.9.0.2:7001").unwrap();
        let asks = || client.send(b"x").is_ok() && client.recv(&mut [0; 9]).is_ok();
        wait_until("it answers", asks);
        for _ in 0..2000 {
            wait_until("it answers again", asks);
        }
        assert!(!log(&fixture, "lab").contains("checksums"));
        offload("on");
        let entry = "without complete checksums were dropped (drop.partial_transport_checksum)";
        wait_until(entry, || !asks() && log(&fixture, "lab").contains(entry));
        assert!(!asks());
        // The last entries are written at the end.
        stack.signal("TERM");
        assert!(stack.wait_for_output().status.success());
        let log = log(&fixture, "lab");
        assert_eq!(log.matches(entry).count(), 1, "{log}");
        assert!(
            log.contains("Set partial_checksums=on for an AF_XDP or DPDK device, or \"ethtool -K\""),
            "{log}"
        );
    });
}
