//! httpd at its limits: the largest accepted request, the smallest refused one, and that the next client is
//! served.

use super::common::{SERVER, UNIX, parse};
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{CloseReason, Config, Conn, ConnectOptions, Context, Error, Handler, Instant, Shard};
use ginnel_apps::httpd::{Httpd, HttpdOptions};
use ginnel_apps::load::{HttpOptions, LoadHandler, LoadOptions, Report, SharedStats};
use ginnel_devices::memory::{self, MemoryConfig};
use std::sync::Arc;

/// Returns a server with limits of 100 bytes for the request line, 300 for the head and 50 for the body. Its
/// page has `page_bytes` bytes.
fn httpd(page_bytes: usize) -> (tempfile::TempDir, Httpd) {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("index.html"), vec![b'x'; page_bytes]).unwrap();
    let path = root.path().to_str().unwrap();
    let limits = ["--line-max", "100", "--head-max", "300", "--body-max", "50"];
    let options: HttpdOptions = parse(&[&[path, "--listen", "0.0.0.0:80"], &limits[..]].concat());
    (root, Httpd::with_clock(&options, || UNIX).unwrap())
}

/// Returns two shards; `change` changes the server's configuration.
fn shards<C: Handler>(
    server: Httpd,
    client: C,
    change: impl FnOnce(&mut Config),
) -> (Shard<Httpd>, Shard<C>, Instant) {
    let now = Instant::from_millis(1000);
    let (a, b) = memory::pair(MemoryConfig::default());
    let config = |address: &str| {
        let device = DeviceConfig::new("cable", DeviceKind::Memory);
        Config::single(device, &[address.parse().unwrap()], &[])
    };
    let mut server_config = config(&format!("{SERVER}/16"));
    change(&mut server_config);
    let server = Shard::builder(server_config).handler(server).device("cable", a).seed([1; 32]).now(now);
    let client =
        Shard::builder(config("10.0.0.2/16")).handler(client).device("cable", b).seed([2; 32]).now(now);
    (server.build().unwrap(), client.build().unwrap(), now)
}

fn run<C: Handler>(server: &mut Shard<Httpd>, client: &mut Shard<C>, mut now: Instant, limit: Duration) {
    let end = now + limit;
    loop {
        let a = server.poll_once(now).unwrap();
        let b = client.poll_once(now).unwrap();
        if b.stopped {
            return;
        }
        assert!(now < end, "not done after {limit:?}");
        let next = [a.next_deadline, b.next_deadline].into_iter().flatten().min();
        let soon = now + Duration::from_micros(1);
        now = if a.work + b.work > 0 { soon } else { next.expect("somebody waits").max(soon) };
    }
}

/// Sends each request on a connection of its own, one after the other, and stores the responses.
struct Requests {
    requests: Vec<Vec<u8>>,
    answers: Vec<String>,
}

impl Requests {
    fn next(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        if self.answers.len() == self.requests.len() {
            cx.stop();
            return Ok(());
        }
        self.answers.push(String::new());
        cx.connect(format!("{SERVER}:80").parse().unwrap(), ConnectOptions::default()).map(|_| ())
    }
}

impl Handler for Requests {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.next(cx)
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let request = &self.requests[self.answers.len() - 1];
        assert_eq!(cx.send(conn, request).unwrap(), request.len());
        cx.shutdown_write(conn).unwrap();
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        self.answers.last_mut().unwrap().push_str(core::str::from_utf8(data).unwrap());
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, _: Conn, reason: CloseReason) {
        assert_eq!(reason, CloseReason::Normal, "{:?}", self.answers.last());
        self.next(cx).unwrap();
    }
}

/// Returns a request whose request line, head and body have these lengths.
fn request(line: usize, head: usize, body: usize) -> Vec<u8> {
    let first = format!("GET /?{} HTTP/1.1\r\n", "q".repeat(line - 17));
    let rest = format!("Host: a\r\nContent-Length: {body}\r\n");
    let filler = head - first.len() - rest.len() - 7;
    [first, rest, format!("X: {}\r\n\r\n", "h".repeat(filler)), "b".repeat(body)].concat().into_bytes()
}

/// Returns a request with `count` fields of minimal length.
fn fields(count: usize) -> Vec<u8> {
    format!("GET / HTTP/1.1\r\nHost:a\r\n{}\r\n", "a:\r\n".repeat(count - 1)).into_bytes()
}

// limit: header fields of a request
// limit: httpd --body-max
// limit: httpd --head-max
// limit: httpd --line-max
#[test]
fn limits_are_exact_to_the_byte() {
    assert_eq!(request(100, 300, 50).len(), 350);
    let table = [
        (request(100, 300, 50), "200"),
        (request(101, 250, 0), "414"),
        (request(50, 301, 0), "431"),
        (request(50, 200, 51), "413"),
        (fields(64), "200"),
        (fields(65), "431"),
        (request(100, 300, 50), "200"),
    ];
    let (requests, codes): (Vec<_>, Vec<_>) = table.into_iter().unzip();
    let (_root, server) = httpd(64);
    let client = Requests { requests, answers: Vec::new() };
    let (mut server, mut client, now) = shards(server, client, |_| {});
    run(&mut server, &mut client, now, Duration::from_secs(100));
    let answers = &client.handler().answers;
    let got: Vec<_> = answers.iter().map(|a| a.get(9..12).unwrap_or("nothing")).collect();
    assert_eq!(got, codes);
    assert_eq!(server.handler().server().counters().errors, 4);
}

// limit: httpd at every limit of the engine
#[test]
fn a_server_at_all_limits_answers_everyone() {
    let (_root, server) = httpd(20_000);
    let words = ["http://10.0.0.1/", "-n", "400", "-c", "32", "--timeout", "10m"];
    let job = parse::<HttpOptions>(&words).job().unwrap();
    let outcome = SharedStats::default();
    let client = LoadHandler::new(job.clone(), 0, 1, Arc::default(), Arc::clone(&outcome));
    let (mut server, mut client, now) = shards(server, client, |config| {
        config.tcp.connections_max = 8;
        config.tcp.half_open_max = 2;
        config.tcp.time_wait_max = 4;
        config.tcp.buffer_pool_bytes = 1 << 16;
        config.tcp.send_buffer_bytes = 4096;
        config.network.neighbours_max = 16;
        config.shard.timers_max = 1;
        config.shard.commands_max = 1;
    });
    run(&mut server, &mut client, now, Duration::from_secs(3600));
    let report = Report::new(&job, &outcome.lock().unwrap().take().unwrap());
    assert_eq!((report.requests.completed, report.statuses["2xx"]), (400, 400), "{report}");
    assert!(report.failures.is_empty(), "{report}");
    assert!(server.handler().server().counters().connections >= 400);
}
