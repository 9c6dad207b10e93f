//! `ginnel iot` over TAP, with redis-servers that it starts itself, a client on the kernel, and `ginnel load
//! iot` on all its stacks.

use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::redis::{RedisServer, redis_unavailable};
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

/// Runs `ginnel load` in the namespace of a server. Returns its exit status, its report and its errors.
fn load(server: &IotServer, options: &[&str]) -> (Option<i32>, serde_json::Value, String) {
    let mut command = Command::new(GINNEL);
    command.arg("load").args(options).args(["--json", "--quiet"]);
    command.env("GINNEL_RUN_DIR", server.folder.join("run"));
    let output = server.namespace.run(|| command.output()).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {errors}"));
    (output.status.code(), report, errors)
}

#[test]
fn load_iot_accounts_for_every_message() {
    if skipped("load_iot_accounts_for_every_message") {
        return;
    }
    let mut server = IotServer::start("iot-load", &["--gateway", "10.9.0.1", "--priorities"]);
    server.wait_for_line(&["iot on"]);
    drop(server.connect());
    server.namespace.sysctl("net.ipv4.ip_forward", "1").unwrap();
    let svg = server.folder.join("load.svg");
    let device = ["--device", "tap:load0", "--address", "10.8.0.2/24", "--gateway", "10.8.0.1"];
    let own = [&device[..], &["--kernel-address", "10.8.0.1/24", "--ips", "4"]].concat();
    let stacks: [(&str, &[&str]); 3] =
        [("kernel", &["--source", "10.9.0.1"]), ("light", &own), ("ginnel", &own)];
    let mut sent = 0;
    for (stack, own) in stacks {
        // 2,000 connections send 2.5 messages each.
        let common = ["iot", "--dest", "10.9.0.2", "-c", "2000", "-b", "50", "-e", "1", "-s", "1", "-w", "0"];
        let more = ["-l", "64", "-r", "0.05", "--low-share", "0.05", "-d", "2.5", "--timeout", "60"];
        let picture = ["--svg", svg.to_str().unwrap(), "--network-stack", stack];
        let (status, report, errors) = load(&server, &[&common[..], &more, &picture, own].concat());
        let messages = &report["messages"];
        assert_eq!(report["achieved"]["connections"], 2_000, "{stack}: {report}");
        assert_eq!(
            (&messages["due"], &messages["sent"]),
            (&5_000.into(), &5_000.into()),
            "{stack}: {report}"
        );
        assert_eq!((&messages["heartbeats"], &messages["unanswered"]), (&4_500.into(), &0.into()), "{stack}");
        for kind in ["high", "low"] {
            assert_eq!(messages[kind]["answered"], 250, "{stack}: {report}");
            assert_eq!(report["latency_ns"][kind]["count"], 250);
        }
        assert_eq!((&messages["is_complete"], &messages["answered_error"]), (&true.into(), &0.into()));
        // Only the rate may be missed, on a busy machine.
        let missed: Vec<_> = report["missed"].as_array().unwrap().iter().map(ToString::to_string).collect();
        assert!(missed.iter().all(|m| m.contains("messages/s were achieved")), "{stack}: {missed:?}");
        assert_eq!(status, Some(i32::from(!missed.is_empty())), "{stack}: {errors}");
        assert!(std::fs::read_to_string(&svg).unwrap().contains("urgent requests (p99"));
        sent += 5_000;
    }
    server.signal("-TERM");
    assert!(server.child.wait().unwrap().success());
    // The server has counted what the generators sent.
    for (line, count) in [
        ("| messages", sent),
        ("| of these urgent", 750),
        ("| of these requests", 1_500),
        ("| answers", 1_500),
    ] {
        let text = server.wait_for_line(&[line]);
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        assert_eq!(digits, count.to_string(), "{text}");
    }
}

#[test]
fn load_says_what_was_not_reached() {
    if skipped("load_says_what_was_not_reached") {
        return;
    }
    let server = IotServer::start("iot-load-refused", &[]);
    drop(server.connect());
    // Nobody listens on this port.
    let options = ["iot", "10.9.0.2:81", "-c", "5", "-s", "0", "-w", "0", "-d", "0.5", "--timeout", "1"];
    let (status, report, errors) = load(&server, &[&options[..], &["--stack", "kernel"]].concat());
    let expected = "0 of 5 connections were open when the first message was due";
    assert_eq!((status, report["missed"][0].as_str()), (Some(1), Some(expected)), "{report}");
    assert!(errors.contains(&format!("ginnel: load iot: {expected}; ")), "{errors}");
    assert!(report["failures"]["connect refused"].as_u64() > Some(4), "{report}");
}

/// An agent of a run, in a namespace of its own behind that of the server.
struct LoadAgent {
    child: Child,
    /// Lines of its standard error.
    lines: mpsc::Receiver<String>,
    _namespace: Namespace,
}

impl LoadAgent {
    /// Starts agent `number` and waits until it has joined its group.
    fn start(server: &IotServer, number: u32, redis: &str, options: &[&str]) -> Self {
        let namespace = Namespace::new().unwrap();
        let far = format!("to-agent{number}");
        namespace.connect("eth0", &server.namespace, &far, 1500).unwrap();
        namespace.ip(&format!("addr add 10.10.{number}.2/24 dev eth0")).unwrap();
        server.namespace.ip(&format!("addr add 10.10.{number}.1/24 dev {far}")).unwrap();
        namespace.ip(&format!("route add default via 10.10.{number}.1")).unwrap();
        let mut command = Command::new(GINNEL);
        command.args(["load", "iot", "10.9.0.2", "--stack", "kernel", "--json", "-l", "64"]);
        command.args(["--agents", "2", "--redis", redis]).args(options);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = namespace.run(|| command.spawn()).unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (to, lines) = mpsc::channel();
        std::thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| to.send(line)));
        let agent = Self { child, lines, _namespace: namespace };
        agent.wait_for_line(&format!("agent {number} of 2 has joined"));
        agent
    }

    fn wait_for_line(&self, text: &str) {
        while !self
            .lines
            .recv_timeout(TIMEOUT)
            .unwrap_or_else(|_| panic!("no line with {text}"))
            .contains(text)
        {}
    }

    /// Waits for the end. Returns the exit status and the standard output.
    fn end(mut self) -> (Option<i32>, String) {
        let mut output = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
        (self.child.wait().unwrap().code(), output)
    }
}

impl Drop for LoadAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn load_agents_in_namespaces_share_one_plan() {
    if skipped("load_agents_in_namespaces_share_one_plan") {
        return;
    }
    let server = IotServer::start("iot-agents", &["--gateway", "10.9.0.1"]);
    drop(server.connect());
    server.namespace.sysctl("net.ipv4.ip_forward", "1").unwrap();
    let _redis = RedisServer::on_unix_socket(&server.folder, "agents.sock");
    let redis = format!("unix:{}", server.folder.join("agents.sock").display());
    let options = ["-c", "501", "-e", "1", "-s", "1", "-w", "0", "-d", "2", "-r", "0.1", "--timeout", "60"];
    let agents = [1, 2].map(|number| LoadAgent::start(&server, number, &redis, &options));
    let [(status, output), (second, nothing)] = agents.map(LoadAgent::end);
    let report: serde_json::Value = serde_json::from_str(&output).unwrap();
    let (messages, missed) = (&report["messages"], report["missed"].to_string());
    // Both sent their shares: half of the connections, and 10 % of all messages.
    assert_eq!((&messages["due"], &messages["sent"]), (&1_002.into(), &1_002.into()), "{report}");
    assert_eq!((&messages["high"]["answered"], &messages["is_complete"]), (&100.into(), &true.into()));
    assert_eq!(report["latency_ns"]["high"]["count"], 100);
    assert_eq!(report["achieved"]["connections"], 501);
    assert!(missed == "[]" || missed.contains("messages/s were achieved"), "{missed}");
    assert_eq!((status, second), (Some(i32::from(missed != "[]")), Some(0)));
    assert_eq!(nothing, "", "the first agent prints the report");
}

#[test]
fn a_dead_load_agent_is_named() {
    if skipped("a_dead_load_agent_is_named") {
        return;
    }
    let server = IotServer::start("iot-dead-agent", &["--gateway", "10.9.0.1"]);
    drop(server.connect());
    server.namespace.sysctl("net.ipv4.ip_forward", "1").unwrap();
    let _redis = RedisServer::on_unix_socket(&server.folder, "agents.sock");
    let redis = format!("unix:{}", server.folder.join("agents.sock").display());
    let options = ["-c", "10", "-e", "1", "-s", "0", "-w", "0", "-d", "1", "-r", "1", "--run", "fatal"];
    let [first, mut second] = [1, 2].map(|number| LoadAgent::start(&server, number, &redis, &options));
    // It has fixed the start, and dies before the first message or after some.
    second.child.kill().unwrap();
    let pid = second.child.id();
    second.child.wait().unwrap();
    let (status, output) = first.end();
    let report: serde_json::Value = serde_json::from_str(&output).unwrap();
    let dead = report["missed"][0].as_str().unwrap();
    assert!(dead.starts_with("agent 2 (") && dead.contains(&format!(", process {pid})")), "{dead}");
    assert!(report["missed"].to_string().contains("5 of 10 messages became due"), "{report}");
    assert_eq!((status, &report["messages"]["is_complete"]), (Some(1), &true.into()));
}

#[test]
fn load_refuses_what_it_cannot_do() {
    let device = ["--device", "tap:x", "--address", "10.9.0.2/24"];
    let kernel = ["--stack", "kernel"];
    for (options, stack, expected) in [
        (&["iot", "10.0.0.1", "-c", "100000000"][..], &kernel[..], "--connections 100000000 is too many"),
        (&["iot", "10.0.0.1", "--ips", "3"], &kernel, "--source 3 needs the address of a stack"),
        (
            &["iot", "10.0.0.1", "--stack", "kernel"],
            &device,
            "--device cannot be combined with --stack kernel",
        ),
        (&["iot", "10.0.0.1"], &["--device", "memory"], "--device memory has no server at its other end"),
        (
            &["iot", "10.0.0.1", "--mode", "precision", "--coalesce-us", "9"],
            &device,
            "--coalesce-us delays messages",
        ),
        (&["iot", "10.0.0.1", "--smp", "2", "--stack", "light"], &device, "--workers 2 needs"),
        (&["echo", "10.0.0.1", "--low-share", "0.1"], &device, "--low-share"),
        (&["iot"], &device, "SERVER"),
        (
            &["iot", "10.0.0.1", "-c", "56465", "--ips", "2"],
            &device,
            "56465 connections need more ports than there are: source addresses: 2, with 28232 ports each; give more",
        ),
        (
            &["echo", "10.0.0.1", "-c", "32769", "--stack", "light"],
            &device,
            "32769 connections need more ports than there are: source addresses: 1, with 32768 ports each",
        ),
    ] {
        let output = Command::new(GINNEL).arg("load").args(options).args(stack).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(expected) && !output.status.success(), "{options:?}: {error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let output = Command::new(GINNEL).args(["load", "iot", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for text in
        ["-r and -t mean something else in", "\"load http -t\" is its timeout", "\"load http -r\" is a rate"]
    {
        assert!(help.replace('\n', " ").contains(text), "{text}");
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
