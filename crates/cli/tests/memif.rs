//! `ginnel httpd` and `ginnel load http` as two processes over memif, and the effects of killing one of them.

mod temp_folder;

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use temp_folder::TempFolder;

const TIMEOUT: Duration = Duration::from_secs(20);

impl TempFolder {
    fn memif(&self, role: &str) -> String {
        format!("socket={},role={role},id=5,secret=word", self.0.join("socket").display())
    }
}

/// A running server.
struct HttpdProcess(Child);

impl HttpdProcess {
    fn start(folder: &TempFolder, role: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
        command.arg("httpd").arg(folder.0.join("site")).args(["--memif", &folder.memif(role)]);
        command.args(["--address", "10.7.0.1/24", "--address", "fd07::1/64"]);
        Self(command.stdout(Stdio::piped()).spawn().unwrap())
    }

    /// The server listens after duplicate address detection of its IPv6 address.
    fn start_and_wait(folder: &TempFolder, role: &str, client: &str) -> Self {
        let server = Self::start(folder, role);
        let deadline = Instant::now() + TIMEOUT;
        let one = ["-n", "1", "-c", "1", "-t", "2s", "http://10.7.0.1/index.html"];
        loop {
            let output = load(folder, client, &one).output().unwrap();
            if String::from_utf8(output.stdout).unwrap().contains("\"failures\":{}") {
                return server;
            }
            assert!(Instant::now() < deadline, "the server does not answer");
        }
    }

    /// Returns the number of open descriptors and of mappings of shared memory.
    fn mapped_regions(&self) -> (usize, usize) {
        let process = Path::new("/proc").join(self.0.id().to_string());
        let maps = std::fs::read_to_string(process.join("maps")).unwrap();
        let mappings = maps.lines().filter(|line| line.contains("memfd:ginnel-memif")).count();
        (std::fs::read_dir(process.join("fd")).unwrap().count(), mappings)
    }

    /// Sends SIGTERM, and returns what the server prints.
    fn report(mut self) -> String {
        let id = self.0.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        let mut text = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for HttpdProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn load(folder: &TempFolder, role: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
    command.args(["load", "http", "--json", "--quiet", "--memif", &folder.memif(role)]);
    let six = arguments.iter().any(|argument| argument.contains("[fd07::1]"));
    command.args(["--address", if six { "fd07::2/64" } else { "10.7.0.2/24" }]).args(arguments);
    command
}

/// Runs a load, all of whose requests must be answered.
fn assert_all_answered(folder: &TempFolder, role: &str, requests: &str, arguments: &[&str]) {
    let arguments = [&["-n", requests, "-c", "10"], arguments].concat();
    let output = load(folder, role, &arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("\"failures\":{}"), "{arguments:?}: {text}");
    assert!(text.contains(&format!("\"statuses\":{{\"2xx\":{requests}}}")), "{arguments:?}: {text}");
}

#[test]
fn two_processes_talk_http_over_memif() {
    for (server, client) in [("server", "client"), ("client", "server")] {
        let folder = TempFolder::new(&format!("memif-{server}"));
        let _server = HttpdProcess::start_and_wait(&folder, server, client);
        assert_all_answered(&folder, client, "2000", &["-k", "http://10.7.0.1/index.html"]);
        assert_all_answered(&folder, client, "500", &["http://[fd07::1]/index.html"]);
        assert_all_answered(&folder, client, "50", &["-k", "http://10.7.0.1/large.bin"]);
        assert_all_answered(&folder, client, "500", &["--stack", "light", "http://10.7.0.1/index.html"]);
    }
}

#[test]
fn a_server_survives_killed_clients() {
    let folder = TempFolder::new("memif-killed-client");
    let server = HttpdProcess::start_and_wait(&folder, "server", "client");
    let alone = |expected: Option<(usize, usize)>| {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let holdings = server.mapped_regions();
            if holdings.1 == 0 && expected.is_none_or(|expected| holdings == expected) {
                return holdings;
            }
            assert!(Instant::now() < deadline, "{holdings:?} instead of {expected:?}");
            thread::sleep(Duration::from_millis(50));
        }
    };
    // The control channel closes soon after the memory is unmapped.
    alone(None);
    thread::sleep(Duration::from_millis(200));
    let before = alone(None);
    for _ in 0..5 {
        let mut client = load(&folder, "client", &["-d", "60s", "-c", "20", "http://10.7.0.1/large.bin"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + TIMEOUT;
        while server.mapped_regions().1 == 0 {
            assert!(Instant::now() < deadline, "the client does not connect");
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(100));
        client.kill().unwrap();
        client.wait().unwrap();
        alone(Some(before));
    }
    assert_all_answered(&folder, "client", "100", &["-k", "http://10.7.0.1/index.html"]);
}

#[test]
fn a_client_survives_a_restarted_server() {
    let folder = TempFolder::new("memif-killed-server");
    let first = HttpdProcess::start_and_wait(&folder, "server", "client");
    // Connections of the first server may fail; later ones must not.
    let requests = ["-d", "6s", "-c", "4", "-t", "1s", "http://10.7.0.1/index.html"];
    let client = load(&folder, "client", &requests).stdout(Stdio::piped()).spawn().unwrap();
    thread::sleep(Duration::from_secs(1));
    first.kill();
    thread::sleep(Duration::from_millis(500));
    let second = HttpdProcess::start(&folder, "server");
    let connected = Instant::now() + TIMEOUT;
    while second.mapped_regions().1 == 0 {
        assert!(Instant::now() < connected, "the client does not come back");
        thread::sleep(Duration::from_millis(5));
    }
    let output = client.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    // The client has noticed the interruption.
    assert!(text.contains("\"failures\":{\""), "{text}");
    // The second server has answered requests, as it reports at its end.
    let report = second.report();
    let responses = report.lines().find_map(|line| line.strip_prefix("| responses"));
    let responses = responses.map(|rest| rest.replace([' ', '|', ','], "").parse::<u64>());
    assert!(matches!(responses, Some(Ok(10..))), "{report}");
}

#[test]
fn two_shards_have_two_memif_queues() {
    let folder = TempFolder::new("memif-shards");
    let memif = |role| format!("{},queues=2", folder.memif(role));
    let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
    command.arg("httpd").arg(folder.0.join("site")).args(["--shards", "2", "--memif", &memif("server")]);
    command.args(["--address", "10.7.0.1/24"]);
    let _server = HttpdProcess(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut client = Command::new(env!("CARGO_BIN_EXE_ginnel"));
    client.args([
        "load",
        "http",
        "--json",
        "--quiet",
        "--memif",
        &memif("client"),
        "--address",
        "10.7.0.2/24",
    ]);
    client.args(["-n", "500", "-c", "10", "http://10.7.0.1/index.html"]);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let output = client.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        // Both shards answer; otherwise half of the connections would time out. Before the server is ready
        // none is answered.
        if text.contains("\"failures\":{}") && text.contains("\"statuses\":{\"2xx\":500}") {
            break;
        }
        assert!(Instant::now() < deadline, "{text} {}", String::from_utf8_lossy(&output.stderr));
    }
    // The generator has the same number of shards, and several addresses.
    client.args(["--shards", "2", "--source", "10.7.0.10-13"]);
    let output = client.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\"failures\":{}"), "{text} {}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("\"statuses\":{\"2xx\":500}"), "{text}");
    assert!(text.contains("\"workers\":2,\"shards\":true"), "{text}");
}

/// Four shards serve two interfaces with two queues each: the first one by the shards 2 and 3, the second one
/// by 0 and 1.
#[test]
fn memif_queues_belong_to_configured_shards() {
    let folder = TempFolder::new("memif-device-shards");
    let socket = |link: usize| folder.0.join(format!("socket{link}")).display().to_string();
    let memif = |link: usize, role: &str| format!("socket={},role={role},queues=2", socket(link));
    let mut text = "[shards]\ncount = 4\n[run]\nname = \"links\"\n".to_owned();
    for (link, shards) in ["[2, 3]", "[0, 1]"].into_iter().enumerate() {
        text += &format!(
            "[[device]]\nname = \"m{link}\"\nkind = \"memif\"\nmemif = \"{}\"\nshards = {shards}\n\
             [[link]]\nname = \"l{link}\"\ndevice = \"m{link}\"\naddresses = [\"10.{}.0.1/24\"]\n",
            memif(link, "server"),
            7 + link,
        );
    }
    let config = folder.0.join("links.toml");
    std::fs::write(&config, text).unwrap();
    let ginnel = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
        command.env("XDG_RUNTIME_DIR", &folder.0);
        command
    };
    let mut server = ginnel();
    server.arg("httpd").arg(folder.0.join("site")).arg("--config").arg(&config);
    let _server = HttpdProcess(server.stdout(Stdio::piped()).spawn().unwrap());
    let counters = |name: &str| -> Vec<u64> {
        let output = ginnel().args(["stat", "links", "--json", "--since-start"]).output().unwrap();
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let value = |shard: &serde_json::Value| shard["counters"][name].as_u64().expect(name);
        report["shards"].as_array().unwrap().iter().map(value).collect()
    };
    for link in 0..2 {
        let network = format!("10.{}.0", 7 + link);
        let load = |requests: &str, connections: &str| {
            let mut client = ginnel();
            client.args(["load", "http", "--json", "--quiet", "--memif", &memif(link, "client")]);
            client.args(["--address", &format!("{network}.2/24"), "--shards", "2"]);
            client.args(["-n", requests, "-c", connections, "--source", &format!("{network}.10-13")]);
            client.arg(format!("http://{network}.1/index.html"));
            let output = client.output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let statuses = format!("\"statuses\":{{\"2xx\":{requests}}}");
            let is_complete = text.contains("\"failures\":{}") && text.contains(&statuses);
            (is_complete, format!("{text} {}", String::from_utf8_lossy(&output.stderr)))
        };
        // The server may not listen yet. Once it has answered, no request may fail.
        let deadline = Instant::now() + TIMEOUT;
        while !load("2", "2").0 {
            assert!(Instant::now() < deadline, "no answer on link {link}");
        }
        let (is_complete, report) = load("500", "10");
        assert!(is_complete, "{report}");
    }
    let served = [[false, false, true, true], [true, true, false, false]];
    for (link, served) in served.into_iter().enumerate() {
        let received = counters(&format!("device.m{link}.rx_frames"));
        assert_eq!([0, 1, 2, 3].map(|shard| received[shard] > 0), served, "m{link}: {received:?}");
    }
    let opened = counters("tcp.passive_opens");
    assert!(opened.iter().all(|&opened| opened > 20), "{opened:?}");
    for crossed in ["shard.frames_relayed", "shard.forwards_dropped", "shard.hashes_mismatched"] {
        assert_eq!(counters(crossed), [0; 4], "{crossed}");
    }
}
