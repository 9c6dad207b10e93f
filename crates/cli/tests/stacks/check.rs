//! `ginnel check`.

use crate::fixture::{Fixture, PRELUDE, RunningProgram, built_library, python, signal, skipped, wait_until};
use crate::restart::{shard_process, supervisor_of};
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};

/// Returns the report of `ginnel check` and its exit status.
fn check(fixture: &Fixture, pid: u32) -> (Value, Option<i32>) {
    let output = fixture.run(&["check", &pid.to_string(), "--json"]);
    (
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}")),
        output.status.code(),
    )
}

/// Returns the rows of the report without their descriptors, in the order of the descriptors.
fn socket_rows(report: &Value) -> Vec<String> {
    let row = |row: &Value| {
        let cells =
            ["kind", "local", "remote", "state", "where", "why"].map(|name| row[name].as_str().unwrap());
        cells.join("|")
    };
    report["sockets"].as_array().unwrap().iter().map(row).collect()
}

#[test]
fn copies_of_a_connecting_socket_show_its_port() {
    if skipped("copies_of_a_connecting_socket_show_its_port") {
        return;
    }
    let fixture = Fixture::new("copies");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script = "
s = server('127.0.0.1', 7305); c = socket.socket(); c.setblocking(False); c.connect_ex(s.getsockname())
copy = c.dup(); other = os.dup2(c.fileno(), 60); c.close(); select.select([], [copy], [])
d = socket.socket(); d.setblocking(False); d.connect_ex(s.getsockname()); child = os.fork()
if child: open('facts', 'w').write(f'{copy.getsockname()[1]} {d.getsockname()[1]} {child}')
time.sleep(50)";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    let facts = || std::fs::read_to_string(fixture.path().join("facts")).unwrap_or_default();
    wait_until("all is open", || facts().split(' ').count() == 3);
    let facts = facts();
    let [copy, d, child] = facts.split(' ').map(|n| n.parse::<u32>().unwrap()).collect::<Vec<_>>()[..] else {
        panic!("{facts}")
    };
    for pid in [program.pid(), child] {
        let found = socket_rows(&check(&fixture, pid).0);
        let count = |port: u32| {
            found
                .iter()
                .filter(|row| row.starts_with(&format!("tcp|127.0.0.1:{port}|127.0.0.1:7305|")))
                .count()
        };
        assert_eq!((count(copy), count(d)), (2, 1), "{pid}: {found:#?}");
    }
}

#[test]
fn udp_sockets_are_shown_once_decided() {
    if skipped("udp_sockets_are_shown_once_decided") {
        return;
    }
    let fixture = Fixture::new("datagrams");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script = "
new = lambda: socket.socket(type=socket.SOCK_DGRAM)
bound = new(); bound.bind(('127.0.0.1', 7306)); everywhere = new(); everywhere.bind(('0.0.0.0', 7307))
open_ = new(); connected = new(); connected.connect(('127.0.0.1', 7306)); sent = new(); sent.sendto(b'x', ('127.0.0.1', 7306))
open('facts', 'w').write(f'{connected.getsockname()[1]} {sent.getsockname()[1]}')
time.sleep(50)";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    let facts = || std::fs::read_to_string(fixture.path().join("facts")).unwrap_or_default();
    wait_until("all is open", || facts().split(' ').count() == 2);
    let facts = facts();
    let (connected, sent) = facts.split_once(' ').unwrap();
    let found = socket_rows(&check(&fixture, program.pid()).0);
    let expected = [
        "udp|127.0.0.1:7306||UNCONN|stack|reached over the stack".into(),
        "udp|0.0.0.0:7307||UNCONN|both|wildcard address: receives from the stack and from the kernel".into(),
        "udp|||UNCONN|open|undecided until it is bound, connects or sends".into(),
        format!("udp|127.0.0.1:{connected}|127.0.0.1:7306|ESTAB|stack|reached over the stack"),
        format!("udp|0.0.0.0:{sent}||UNCONN|stack|reached over the stack"),
    ];
    assert_eq!(found[..5], expected, "{found:#?}");
}

#[test]
fn each_socket_is_shown_with_a_reason() {
    if skipped("each_socket_is_shown_with_a_reason") {
        return;
    }
    let fixture = Fixture::new("check");
    let _up = fixture.start_stack("lab", &["--device", "memory", "--address", "10.5.0.1/24"]);
    let script = "
x, y = socket.socketpair(socket.AF_UNIX)
s = server('10.5.0.1', 7301); c = socket.create_connection(('10.5.0.1', 7301)); a, _ = s.accept()
w = server('0.0.0.0', 0)
k = server('127.0.0.1', 0); d = socket.create_connection(k.getsockname())
u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('127.0.0.1', 0))
fresh = socket.socket(); bound = socket.socket(); bound.bind(('10.5.0.1', 7302))
e = select.epoll()
# One that is closed leaves nothing, and its number may be another's.
gone = socket.socket(); gone.close()
copy = a.dup(); c.shutdown(socket.SHUT_WR)
open('facts', 'w').write(' '.join(str(one.getsockname()[1]) for one in (c, w, k, d, u)))
time.sleep(50)";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    let facts = || std::fs::read_to_string(fixture.path().join("facts")).unwrap_or_default();
    wait_until("all is open", || facts().split(' ').count() == 5);
    let facts = facts();
    let [c, w, k, d, u] = facts.split(' ').collect::<Vec<_>>().try_into().unwrap();
    wait_until("the FIN has arrived", || {
        socket_rows(&check(&fixture, program.pid()).0).iter().any(|row| row.contains("CLOSE-WAIT"))
    });
    let (text, status) = check(&fixture, program.pid());
    assert_eq!(status, Some(0), "{text}");
    assert_eq!((text["accelerated"].as_bool(), text["stack"].as_str()), (Some(true), Some("lab")));
    let since = text["since_ms"].as_u64().unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
    assert!(since <= now && now - since < 60_000, "{since} {now}");
    let found = socket_rows(&text);
    let stream = format!("tcp|10.5.0.1:7301|10.5.0.1:{c}|CLOSE-WAIT|stack|reached over the stack");
    let expected = [
        "unix|||ESTAB|kernel|Unix socket".to_string(),
        "unix|||ESTAB|kernel|Unix socket".into(),
        "tcp|10.5.0.1:7301||LISTEN|stack|the stack has the address".into(),
        format!("tcp|10.5.0.1:{c}|10.5.0.1:7301|FIN-WAIT-2|stack|reached over the stack"),
        stream.clone(),
        format!(
            "tcp|0.0.0.0:{w}||LISTEN|both|wildcard address: accepts connections from the stack and from the kernel"
        ),
        format!("tcp|127.0.0.1:{k}||LISTEN|kernel|the stack does not have the address"),
        format!("tcp|127.0.0.1:{d}|127.0.0.1:{k}|ESTAB|kernel|the stack has no route to the destination"),
        format!("udp|127.0.0.1:{u}||UNCONN|kernel|the stack does not have the address"),
        "tcp|||UNCONN|open|undecided until it is bound, listens or connects".into(),
        "tcp|10.5.0.1:7302||UNCONN|stack|the stack has the address".into(),
        "epoll||||both|waits for sockets of the stack and of the kernel".into(),
        stream,
    ];
    for row in &expected {
        let count = |all: &[String]| all.iter().filter(|other| *other == row).count();
        assert_eq!(count(&found), count(&expected), "{row}: {found:#?}");
    }
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    let table = fixture.run_ok(&["check", &program.pid().to_string()]);
    assert!(table.starts_with(&format!("process {} (python3", program.pid())), "{table}");
    assert_eq!(table.lines().count(), 2 + expected.len(), "{table}");
    let line = table.lines().find(|line| line.contains("wildcard")).unwrap();
    assert!(line.contains(&format!(" 0.0.0.0:{w} ")) && line.contains(" both "), "{line}");
}

#[test]
fn children_and_execed_programs_have_own_reports() {
    if skipped("children_and_execed_programs_have_own_reports") {
        return;
    }
    let fixture = Fixture::new("books");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script = "
s = server('127.0.0.1', 7303); os.set_inheritable(s.fileno(), True)
pid = os.fork()
if not pid:
    t = server('127.0.0.1', 7304)
    open('child', 'w').write(str(os.getpid())); time.sleep(50)
pid = os.fork()
if not pid: os.execv(sys.executable, [sys.executable, '-c', 'import os, time; open(\"image\", \"w\").write(str(os.getpid())); time.sleep(50)'])
time.sleep(50)";
    let parent = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    let pid =
        |name: &str| -> Option<u32> { std::fs::read_to_string(fixture.path().join(name)).ok()?.parse().ok() };
    wait_until("all are there", || pid("child").is_some() && pid("image").is_some());
    let listener = |port: u16| format!("tcp|127.0.0.1:{port}||LISTEN|stack|the stack has the address");
    let expected = [
        (parent.pid(), vec![listener(7303)]),
        (pid("child").unwrap(), vec![listener(7303), listener(7304)]),
        (pid("image").unwrap(), vec![listener(7303)]),
    ];
    for (pid, expected) in &expected {
        let mut found = socket_rows(&check(&fixture, *pid).0);
        found.sort();
        assert_eq!(found, *expected);
    }
    for (pid, _) in &expected[1..] {
        let _ = Command::new("kill").arg(pid.to_string()).status();
    }
}

#[test]
fn a_process_without_a_stack_gets_the_reason() {
    if skipped("a_process_without_a_stack_gets_the_reason") {
        return;
    }
    let fixture = Fixture::new("without");
    // A build of the library takes longer than the programs run.
    built_library();
    let script = format!("{PRELUDE}\ns = server('127.0.0.1', 0); open('there', 'w').close(); time.sleep(50)");
    let there = fixture.path().join("there");
    let reason_of = |mut command: Command| {
        let _ = std::fs::remove_file(&there);
        command.args(["-c", &script]).current_dir(fixture.path());
        let program = RunningProgram::new(command);
        wait_until("it runs", || there.exists());
        let (text, status) = check(&fixture, program.pid());
        assert_eq!((status, text["accelerated"].as_bool()), (Some(1), Some(false)), "{text}");
        let why = text["why_not"].as_str().unwrap().to_string();
        assert!(socket_rows(&text)[0].ends_with(&format!("|LISTEN|kernel|not attached: {why}")), "{text}");
        why
    };
    let plain = || Command::new(python().unwrap());
    assert_eq!(reason_of(plain()), "not started with ginnel run");
    let mut removed = plain();
    removed.env("GINNEL_STACK", "/nowhere");
    assert_eq!(reason_of(removed), "LD_PRELOAD was removed from its environment");
    // A program whose stack ends.
    let up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let program =
        RunningProgram::new(fixture.script(&["--stack", "lab"], "open('runs', 'w').close(); time.sleep(50)"));
    wait_until("it runs", || fixture.path().join("runs").exists());
    assert_eq!(check(&fixture, program.pid()).1, Some(0));
    drop(up);
    let why = check(&fixture, program.pid()).0["why_not"].as_str().unwrap().to_string();
    assert!(why.contains("has ended"), "{why}");
    // Servers overwrite their environment with a title.
    let up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script = "
import ctypes
s = server('127.0.0.1', 7001)
begin, end = map(int, open('/proc/self/stat').read().rsplit(') ', 1)[1].split()[47:49])
ctypes.memset(begin, 120, end - begin)
open('titled', 'w').close(); time.sleep(50)";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    wait_until("it has a title", || fixture.path().join("titled").exists());
    let environment = std::fs::read(format!("/proc/{}/environ", program.pid())).unwrap();
    assert!(environment.starts_with(b"xxxx"), "{}", String::from_utf8_lossy(&environment));
    assert_eq!(check(&fixture, program.pid()).1, Some(0));
    drop(up);
    let why = check(&fixture, program.pid()).0["why_not"].as_str().unwrap().to_string();
    let directory = fixture.path().join("run/lab");
    assert_eq!(why, format!("its stack \"lab\" ({}) has ended", directory.display()));
    // A Unix socket needs no stack.
    let pair = "a, b = socket.socketpair(); open('pair', 'w').close(); time.sleep(50)";
    let mut command = plain();
    command.args(["-c", &format!("{PRELUDE}\n{pair}")]).current_dir(fixture.path());
    let program = RunningProgram::new(command);
    wait_until("it has a pair", || fixture.path().join("pair").exists());
    let rows = socket_rows(&check(&fixture, program.pid()).0);
    assert!(rows.len() == 2 && rows.iter().all(|row| row.ends_with("|kernel|Unix socket")), "{rows:?}");
    let nobody = fixture.run(&["check", "4194304"]);
    assert_eq!(nobody.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&nobody.stderr).contains("no process has the id 4194304"));
}

#[test]
fn stopped_shards_are_reported_soon() {
    if skipped("stopped_shards_are_reported_soon") {
        return;
    }
    let fixture = Fixture::new("stopped-shards");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let script = "
s = server('127.0.0.1', 7308); c = socket.create_connection(s.getsockname())
open('there', 'w').close(); time.sleep(50)";
    let program = RunningProgram::new(fixture.script(&["--stack", "lab"], script));
    wait_until("the program is connected", || fixture.path().join("there").exists());
    let shards = shard_process(supervisor_of(&fixture, "lab")).unwrap();
    signal(shards, "STOP");
    let begun = Instant::now();
    let (report, status) = check(&fixture, program.pid());
    let elapsed = begun.elapsed();
    signal(shards, "CONT");
    assert_eq!((status, report["accelerated"].as_bool()), (Some(1), Some(false)), "{report}");
    let why_not = report["why_not"].as_str().unwrap();
    let expected = "the shards of its stack \"lab\" do not answer within 2 s";
    assert!(why_not.starts_with(expected) && why_not.ends_with("see ginnel log lab"), "{why_not}");
    assert!(elapsed < Duration::from_secs(8), "{elapsed:?}");
    let rows = socket_rows(&report);
    assert_eq!(rows[0], "tcp|127.0.0.1:7308||LISTEN|stack|the stack has the address", "{rows:#?}");
    assert!(rows[1].contains("|127.0.0.1:7308||stack|"), "its state is unknown: {rows:#?}");
    wait_until("the shards answer again", || check(&fixture, program.pid()).1 == Some(0));
}
