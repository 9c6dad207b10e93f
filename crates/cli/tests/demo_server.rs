//! `ginnel demo-server` as a server and as a proxy, on the kernel and on Ginnel over TAP.

use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::skip;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");

/// A running server, which is killed at the end of the test.
struct Server {
    child: Child,
    output: BufReader<ChildStdout>,
    first_line: String,
}

impl Server {
    /// Starts a server and waits for its first line.
    fn start(words: &str) -> Self {
        let mut command = Command::new(GINNEL);
        command.arg("demo-server").args(words.split_whitespace()).stdout(Stdio::piped());
        command.env("GINNEL_RUN_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("demo-server"));
        let mut child = command.spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut first_line = String::new();
        output.read_line(&mut first_line).unwrap();
        Self { child, output, first_line }
    }

    /// Stops the server and returns what it has printed after its first line.
    fn stop(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let mut text = String::new();
        self.output.read_to_string(&mut text).unwrap();
        assert!(self.child.wait().unwrap().success(), "{text}");
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A server that was stopped has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the numbers of a row of a table.
fn row(text: &str, name: &str) -> Vec<u64> {
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let rows = text.lines().map(cells).find(|cells| cells.get(1).is_some_and(|first| first == name));
    let row = rows.unwrap_or_else(|| panic!("no row {name}: {text}"));
    row[2..row.len() - 1].iter().map(|number| number.replace(',', "").parse().unwrap()).collect()
}

fn sum(text: &str, name: &str) -> u64 {
    row(text, name).iter().sum()
}

/// Requests `count` pages, and checks that each is answered.
fn load(url: &str, count: u64, words: &str) {
    let mut command = Command::new(GINNEL);
    command.args(["load", "http", "--stack", "kernel", "--json", "--quiet", "-c", "20", "-n"]);
    command.arg(count.to_string()).args(words.split_whitespace()).arg(url);
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{url} {words}: {}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("\"failures\":{}"), "{url} {words}: {text}");
    assert!(text.contains(&format!("\"statuses\":{{\"2xx\":{count}}}")), "{url} {words}: {text}");
}

fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

#[test]
fn kernel_proxy_serves_all_addresses_with_all_backends() {
    let [a, b, x, y] = free_ports();
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    for (flags, keepalive) in [("", false), ("-k", true)] {
        let naive = Server::start(&format!("--stack kernel -w 2 -a 127.0.0.1:{a} -a 127.0.0.1:{b} {flags}"));
        let listen = format!("-a 127.0.0.1:{x} -a 127.0.0.1:{y}");
        let backends = format!("-x 127.0.0.1:{a} -x 127.0.0.1:{b}");
        let log_flags = format!("-v -d -o {}", log.display());
        let proxy = Server::start(&format!("--stack kernel -w 3 {listen} {backends} {flags} {log_flags}"));
        let expected =
            format!("demo-server on 127.0.0.1:{x} 127.0.0.1:{y}, proxy for 127.0.0.1:{a} 127.0.0.1:{b}");
        assert!(proxy.first_line.starts_with(&expected), "{}", proxy.first_line);
        for port in [x, y] {
            load(&format!("http://127.0.0.1:{port}/"), 300, flags);
        }
        let (proxy, naive) = (proxy.stop(), naive.stop());
        assert_eq!(row(&proxy, "requests").len(), 3);
        for text in [&proxy, &naive] {
            assert_eq!((sum(text, "requests"), sum(text, "responses")), (600, 600), "{text}");
            assert_eq!((sum(text, "errors"), sum(text, "backend failures")), (0, 0), "{text}");
            assert_eq!(sum(text, "connections") < 600, keepalive, "{text}");
        }
        assert_eq!(sum(&proxy, "backend connects"), sum(&proxy, "connections"), "{proxy}");
        assert_eq!(sum(&proxy, "open"), 0, "{proxy}");
        let lines = std::fs::read_to_string(&log).unwrap();
        let accepted = lines.lines().filter(|line| line.starts_with("accepted ")).count();
        assert_eq!(accepted as u64, sum(&proxy, "connections"));
    }
}

#[test]
fn rates_are_printed_every_second() {
    let [port] = free_ports();
    let mut server = Server::start(&format!("--stack kernel -v -a 127.0.0.1:{port}"));
    for _ in 0..2 {
        let mut line = String::new();
        server.output.read_line(&mut line).unwrap();
        assert!(line.starts_with("Request/s 0; by worker 0; connections/s 0"), "{line}");
    }
    server.stop();
}

/// Waits until `address` accepts connections.
fn wait_for(namespace: &Namespace, address: &str) {
    let until = Instant::now() + Duration::from_secs(60);
    while namespace.run(|| TcpStream::connect(address)).is_err() {
        assert!(Instant::now() < until, "nobody listens on {address}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ginnel_proxy_relays_on_one_to_four_shards() {
    if let Some(reason) = unavailable() {
        return skip("ginnel_proxy_relays_on_one_to_four_shards", &reason);
    }
    let namespace = Namespace::new().unwrap();
    // The kernel sends router solicitations and group reports otherwise, which the primary shard processes.
    namespace.sysctl("net.ipv6.conf.default.disable_ipv6", "1").unwrap();
    let start = |words: &str| namespace.run(|| Ok(Server::start(words))).unwrap();
    let naive = start("--stack kernel -k -a 0.0.0.0:8000 -a 0.0.0.0:8001");
    let mut asked = 0;
    for workers in 1..=4 {
        let stack = "--device tap:demo0 --address 10.9.0.2/24 --kernel-address 10.9.0.1/24";
        let backends = "-x 10.9.0.1:8000 -x 10.9.0.1:8001";
        let proxy = start(&format!("-k -w {workers} -a 10.9.0.2:80 {backends} {stack}"));
        wait_for(&namespace, "10.9.0.2:80");
        for flags in ["-k", ""] {
            let in_namespace = || {
                load("http://10.9.0.2/", 400, flags);
                Ok(())
            };
            namespace.run(in_namespace).unwrap();
        }
        let text = proxy.stop();
        assert_eq!((sum(&text, "requests"), sum(&text, "responses")), (800, 800), "{text}");
        assert_eq!((sum(&text, "errors"), sum(&text, "backend failures")), (0, 0), "{text}");
        assert_eq!(row(&text, "requests").len(), workers);
        // The kernel knows the hash, so every packet arrives at the shard that owns it, but for one that may
        // arrive while the shards start.
        assert!(sum(&text, "frames forwarded") <= 1, "{text}");
        assert_eq!(sum(&text, "forwards dropped"), 0, "{text}");
        asked += 800;
    }
    assert_eq!(sum(&naive.stop(), "requests"), asked);
}

#[test]
fn wrong_options_are_named() {
    for (words, problem) in [
        ("--stack kernel --device tap:x", "--device cannot be combined with --stack kernel"),
        ("--device memory", "--device memory has nothing at its other end"),
        (
            "--stack kernel -c 1000 -w 2 -a 127.0.0.1:9",
            "--first-core 1000: with 2 worker(s) it needs CPU 1000",
        ),
        ("--stack kernel -a 127.0.0.1:9 -a 127.0.0.1:9", "--listen 127.0.0.1:9 is given twice"),
        ("--stack kernel -a 192.0.2.1:9", "listen on 192.0.2.1:9: Cannot assign requested address"),
        ("--stack kernel -a 127.0.0.1:9 -o /no/log", "--log /no/log: No such file or directory"),
        ("-a 10.9.0.2:80", "--device is missing"),
    ] {
        let mut command = Command::new(GINNEL);
        let output = command.arg("demo-server").args(words.split_whitespace()).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(problem), "{words}: {text}");
    }
}
