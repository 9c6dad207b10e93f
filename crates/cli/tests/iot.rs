//! `ginnel iot` over TAP, with redis-servers that it starts itself and a client on the kernel.

use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::redis::redis_unavailable;
use ginnel_testkit::skip;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");
/// Upper limit of every wait, however busy the machine is.
const TIMEOUT: Duration = Duration::from_secs(60);
const ANSWER_BYTES: usize = 146;
/// Length of a message in the configuration file of these tests.
const MESSAGE_BYTES: usize = 64;

/// A server with its configuration file. It is killed when the value is dropped.
struct IotServer {
    namespace: Namespace,
    child: Child,
    folder: PathBuf,
    /// Lines of its standard output.
    lines: mpsc::Receiver<String>,
}

impl IotServer {
    fn start(name: &str, options: &[&str]) -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("iot.toml");
        // The servers that the command line starts take the place of this one.
        let text = "[iot]\nmessage_bytes = 64\nkeys = 10\nstat_print = true\nredis = [\"unix:/nowhere\"]\n";
        std::fs::write(&file, text).unwrap();
        let namespace = Namespace::new().unwrap();
        let mut command = Command::new(GINNEL);
        command.arg("iot").arg("-f").arg(&file).args(["--start-redis", "2", "--device", "tap:iot0"]);
        command.args(["--address", "10.9.0.2/24", "--kernel-address", "10.9.0.1/24"]).args(options);
        command.env("GINNEL_RUN_DIR", folder.join("run")).env("TMPDIR", &folder);
        let mut child = namespace.run(|| command.stdout(Stdio::piped()).spawn()).unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (to, lines) = mpsc::channel();
        std::thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| to.send(line)));
        Self { namespace, child, folder, lines }
    }

    fn connect(&self) -> TcpStream {
        let end = Instant::now() + TIMEOUT;
        loop {
            match self.namespace.run(|| TcpStream::connect("10.9.0.2:80")) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
                    return stream;
                }
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for a line of the output that contains all of these texts.
    fn wait_for_line(&self, texts: &[&str]) -> String {
        let mut seen = String::new();
        loop {
            let Ok(line) = self.lines.recv_timeout(TIMEOUT) else { panic!("no line with {texts:?}: {seen}") };
            if texts.iter().all(|text| line.contains(text)) {
                return line;
            }
            seen += &format!("{line}\n");
        }
    }

    /// Returns the process ids of its redis-servers.
    fn redis_servers(&self) -> Vec<u32> {
        let pids = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| stat(*pid).is_some_and(|(_, parent)| parent == self.child.id())).collect()
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }
}

/// Returns the name and the parent of a process that has not ended.
fn stat(pid: u32) -> Option<(String, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (before, after) = text.rsplit_once(')')?;
    let mut words = after.split_whitespace();
    let is_alive = words.next()? != "Z";
    let parent = words.next()?.parse().ok()?;
    is_alive.then(|| (before.split_once('(').unwrap().1.to_owned(), parent))
}

fn wait_until_gone(pids: &[u32]) {
    let end = Instant::now() + TIMEOUT;
    while pids.iter().any(|pid| stat(*pid).is_some_and(|(name, _)| name == "redis-server")) {
        assert!(Instant::now() < end, "{pids:?} still run");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Drop for IotServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn message(kind: u8, label: u8) -> Vec<u8> {
    let mut bytes = vec![b'x'; MESSAGE_BYTES];
    (bytes[5], bytes[6]) = (kind, label);
    bytes
}

/// Sends heartbeats and requests, and reads the answers to the requests and the end of the stream.
fn exchange(server: &IotServer) {
    let mut stream = server.connect();
    for _ in 0..5 {
        stream.write_all(&[message(0, 0), message(1, 2), message(1, 0), message(0, 2)].concat()).unwrap();
    }
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answers = Vec::new();
    stream.read_to_end(&mut answers).unwrap();
    assert_eq!(answers.len(), 10 * ANSWER_BYTES);
    for answer in answers.chunks(ANSWER_BYTES) {
        assert!(answer.starts_with(b"HTTP/1\x031 200 OK\r\n"), "{}", String::from_utf8_lossy(answer));
    }
}

fn skipped(test: &str) -> bool {
    let reason = unavailable().or_else(redis_unavailable);
    if let Some(reason) = &reason {
        skip(test, reason);
    }
    reason.is_some()
}

#[test]
fn kernel_client_is_answered_and_lines_are_printed() {
    if skipped("kernel_client_is_answered_and_lines_are_printed") {
        return;
    }
    for options in [&[][..], &["--placement", "split"], &["-w", "2", "--priorities"]] {
        let mut server = IotServer::start("iot", options);
        server.wait_for_line(&["iot on 0.0.0.0:80", "unix:"]);
        // The first line is printed after two seconds.
        server.wait_for_line(&["packets "]);
        exchange(&server);
        let line = server.wait_for_line(&["messages 20: 10 high, 10 low"]);
        assert!(
            line.contains("requests 10: 5 high, 5 low; responses 10; failed 0; flows 0; backlog 0;"),
            "{line}"
        );
        let redis = server.redis_servers();
        assert_eq!(redis.len(), 2, "{options:?}");
        assert!(redis.iter().all(|pid| stat(*pid).unwrap().0 == "redis-server"));
        server.signal("-TERM");
        assert!(server.child.wait().unwrap().success());
        for line in ["| connections", "| messages", "| done"] {
            let text = server.wait_for_line(&[line]);
            let expected = if line == "| connections" { "1 |" } else { "20 |" };
            assert!(text.ends_with(expected), "{text}");
        }
        wait_until_gone(&redis);
        let left = std::fs::read_dir(&server.folder).unwrap().flatten();
        let left: Vec<_> = left.filter(|e| e.file_name().to_string_lossy().contains("redis")).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn killed_command_leaves_no_redis_server() {
    if skipped("killed_command_leaves_no_redis_server") {
        return;
    }
    let mut server = IotServer::start("iot-killed", &[]);
    exchange(&server);
    let redis = server.redis_servers();
    assert_eq!(redis.len(), 2);
    server.signal("-KILL");
    server.child.wait().unwrap();
    wait_until_gone(&redis);
}

#[test]
fn errors_name_what_is_wrong() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("iot-errors-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("iot.toml");
    let stack = ["--device", "tap:iot1", "--address", "10.9.0.2/24"];
    for (text, options, expected) in [
        ("[iot]\n\nkeys = 0\n", &[][..], "iot.toml:3: iot.keys: invalid value '0'"),
        ("[iot]\nkey = 1\n", &[], "iot.toml:2: iot.key: unknown key: docs/iot.md lists the keys"),
        ("[iot]\nredis = [[1]]\n", &[], "iot.toml:2: iot.redis: must be a number, a boolean, a text"),
        ("iot = 1\n", &[], "iot.toml:1: iot: must be a table"),
        ("[tcp]\nrto_min_ms = 0\n[iot]\n", &[], "iot.toml:2: tcp.rto_min_ms: 0 is outside"),
        ("[tcp]\nrto = 0\n[iot]\n", &[], "iot.toml:2: tcp.rto: unknown field"),
        ("", &["--stat-print=2000"], "invalid value '2000' for '--stat-print[=<CPU>]'"),
        ("[run]\ndirectory = false\n", &["--stat-print"], "--stat-print needs the published counters"),
        ("", &["--start-redis", "1"], "redis-server"),
    ] {
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(GINNEL);
        command.arg("iot").arg("-f").arg(&file).args(stack).args(options).env("PATH", &folder);
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(expected) && error.lines().count() <= 2, "{text:?} {options:?}: {error}");
        assert!(!output.status.success());
    }
    std::fs::remove_dir_all(folder).unwrap();
}
