// httpd and the load generator on separate stacks.

use crate::common::{SERVER, UNIX, parse};
use core::time::Duration;
use ginnel::{CloseReason, Conn, ConnectOptions, Context, Error, Handler, SocketOptions};
use ginnel_apps::corpus;
use ginnel_apps::httpd::{Httpd, HttpdOptions};
use ginnel_apps::load::{LoadOptions, Job, LoadHandler, HttpOptions, SharedStats, Report};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn httpd(root: &Path, options: &[&str]) -> Httpd {
    let root = root.to_str().unwrap();
    let options: HttpdOptions = parse(&[&[root, "--listen", "0.0.0.0:80"], options].concat());
    Httpd::with_clock(&options, || UNIX).unwrap()
}

/// Returns a generator and its results, which are set at the end.
fn load(options: &[&str]) -> (LoadHandler, SharedStats, Job) {
    let job = parse::<HttpOptions>(options).job().unwrap();
    let outcome = SharedStats::default();
    let handler = LoadHandler::new(job.clone(), 0, 1, Arc::default(), Arc::clone(&outcome));
    (handler, outcome, job)
}

/// Runs a generator against a server. Returns the report, and the pair with the server's counters.
fn measure(
    server: Httpd,
    words: &[&str],
    faults: Option<&str>,
    sources: &[&str],
) -> (Report, Pair<Httpd, LoadHandler>) {
    let (client, outcome, job) = load(words);
    let mut pair = Pair::new(server, client, faults, sources);
    pair.run(Duration::from_secs(600));
    let stats = outcome.lock().unwrap().take().unwrap();
    (Report::new(&job, &stats), pair)
}

fn small_site() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("index.html"), "x".repeat(64)).unwrap();
    root
}

const URL: &str = "http://10.0.0.1/";
const ONE_SOURCE: &[&str] = &["10.0.0.2/16"];

#[test]
fn short_connections_are_all_answered() {
    let root = small_site();
    let (report, pair) = measure(httpd(root.path(), &[]), &[URL, "-n", "2000", "-c", "16"], None, ONE_SOURCE);
    assert_eq!((report.requests.completed, report.statuses["2xx"]), (2000, 2000));
    assert!(report.failures.is_empty(), "{report}");
    let counters = pair.server.handler().server().counters();
    assert_eq!((counters.connections, counters.responses, counters.errors), (2000, 2000, 0));
}

#[test]
fn pipelining_uses_the_requested_connections() {
    let root = small_site();
    let words = [URL, "-k", "--pipeline", "8", "-n", "5000", "-c", "4"];
    let (report, pair) = measure(httpd(root.path(), &[]), &words, None, ONE_SOURCE);
    assert_eq!((report.requests.completed, report.failures.len()), (5000, 0));
    assert_eq!(pair.server.handler().server().counters().connections, 4);
}

#[test]
fn the_server_releases_every_connection() {
    let root = small_site();
    for close in ["server", "client", "reset"] {
        let words = [URL, "-n", "300", "-c", "10", "--close", close];
        let (report, mut pair) = measure(httpd(root.path(), &[]), &words, None, ONE_SOURCE);
        assert_eq!((report.requests.completed, report.failures.len()), (300, 0), "{close}: {report}");
        for _ in 0..10_000 {
            pair.now += Duration::from_millis(1);
            pair.server.poll_once(pair.now).unwrap();
            pair.client.poll_once(pair.now).unwrap();
        }
        assert_eq!(pair.server.handler().server().counters().open, 0, "{close}");
    }
}

#[test]
fn requests_over_ipv6_are_answered() {
    let root = small_site();
    let server = httpd(root.path(), &["--listen", "[::]:80"]);
    let (client, outcome, job) =
        load(&["http://[fd00::1]/", "-n", "500", "-c", "8", "--source", "fd00::2"]);
    let mut pair = Pair::at("fd00::1/64", server, client, Some("delay=1ms loss=1%"), &["fd00::2/64"]);
    pair.run(Duration::from_secs(600));
    let report = Report::new(&job, &outcome.lock().unwrap().take().unwrap());
    assert_eq!((report.requests.completed, report.failures.len()), (500, 0), "{report}");
}

#[test]
fn a_stopping_server_finishes_its_responses() {
    let root = small_site();
    fs::write(root.path().join("large.bin"), vec![7; 3_000_000]).unwrap();
    let words = ["http://10.0.0.1/large.bin", "-k", "-n", "8", "-c", "8", "--timeout", "30s"];
    let (client, outcome, _) = load(&words);
    let mut pair = Pair::new(httpd(root.path(), &[]), client, Some("delay=10ms"), ONE_SOURCE);
    let mut is_stopping = false;
    loop {
        let server = pair.server.poll_once(pair.now).unwrap();
        pair.client.poll_once(pair.now).unwrap();
        if server.stopped {
            break;
        }
        // During the transfers.
        if !is_stopping && pair.server.handler().server().counters().responses == 8 {
            pair.server.with(pair.now, |handler, cx| handler.stopping(cx));
            is_stopping = true;
        }
        pair.now += Duration::from_micros(50);
        assert!(pair.now.as_millis() < 60_000, "it does not end");
    }
    assert_eq!(pair.server.handler().server().counters().open, 0);
    pair.run(Duration::from_secs(60));
    let stats = outcome.lock().unwrap().take().unwrap();
    assert_eq!((stats.counters.completed, stats.counters.failures.iter().sum::<u64>()), (8, 0));
}

#[test]
fn a_download_may_exceed_every_timeout() {
    let root = small_site();
    fs::write(root.path().join("large.bin"), vec![7; 2_000_000]).unwrap();
    for options in [&["--close", "server"][..], &["-k"]] {
        let words =
            [&["http://10.0.0.1/large.bin", "-n", "1", "-c", "1", "--timeout", "1h"], options].concat();
        let server = httpd(root.path(), &["--idle-timeout", "5s", "--linger-timeout", "1s"]);
        let (report, pair) = measure(server, &words, Some("rate=200kbit delay=20ms"), ONE_SOURCE);
        assert_eq!((report.requests.completed, report.failures.len()), (1, 0), "{report}");
        assert!(report.latency_ns.total.max > 60_000_000_000, "{report}");
        assert_eq!(pair.server.handler().server().counters().timeouts, 0);
    }
}

#[test]
fn open_loops_with_many_sources_keep_their_rate() {
    let root = small_site();
    let addresses: Vec<String> = (1..=20).map(|i| format!("10.0.1.{i}/16")).collect();
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    // Neighbours are resolved during the warm-up.
    let words =
        [&[URL, "--rate", "2000", "-d", "2s", "-w", "200ms", "-c", "500"][..], &["--source", "10.0.1.1-20"]]
            .concat();
    let (report, _) = measure(httpd(root.path(), &[]), &words, Some("delay=5ms"), &addresses);
    assert_eq!((report.requests.started, report.requests.not_started), (4000, 0), "{report}");
    assert!(report.failures.is_empty(), "{report}");
    // Two round trips of 20 ms: the delay of both devices in both directions.
    let p99 = report.latency_ns.total.p99;
    assert!((40_000_000..41_000_000).contains(&p99), "{report}");
    assert!(report.warnings.is_empty(), "{report}");
}

#[test]
fn open_loop_requests_start_exactly_when_due() {
    let root = small_site();
    // 142,857.14 ns apart, so that the due times have different distances to the ticks of the timer wheel.
    let table: [&[&str]; 3] = [&["-c", "50"], &["-k", "-c", "50"], &["-c", "50", "--poisson"]];
    for kind in table {
        let words = [&[URL, "--rate", "7000", "-d", "500ms", "-w", "50ms"], kind].concat();
        let (report, pair) = measure(httpd(root.path(), &[]), &words, None, ONE_SOURCE);
        assert!(report.requests.started > 3_300 && report.requests.not_started == 0, "{kind:?} {report}");
        let lag = report.latency_ns.lag.as_ref().unwrap();
        // Simulated time advances by at least a microsecond.
        assert!(lag.max <= 1_000, "{kind:?}: up to {} ns late", lag.max);
        assert!(pair.client.handler().is_done());
    }
}

#[test]
fn loss_only_costs_time() {
    let root = small_site();
    let words = [URL, "-n", "1000", "-c", "20", "--timeout", "60s"];
    let (report, _) = measure(httpd(root.path(), &[]), &words, Some("delay=1ms loss=2%"), ONE_SOURCE);
    assert_eq!((report.requests.completed, report.failures.len()), (1000, 0), "{report}");
}

/// Fetches a list of paths over several connections, and stores the hash of each body.
struct Fetcher {
    paths: Vec<String>,
    next: usize,
    connections: BTreeMap<Conn, (usize, Vec<u8>)>,
    hashes: BTreeMap<String, Vec<u8>>,
    parallel: usize,
}

impl Fetcher {
    fn new(paths: Vec<String>, parallel: usize) -> Self {
        Self { paths, next: 0, connections: BTreeMap::new(), hashes: BTreeMap::new(), parallel }
    }

    fn ask(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let Some(path) = self.paths.get(self.next) else {
            if self.hashes.len() == self.paths.len() {
                cx.stop();
            }
            return;
        };
        let request = format!("GET {path} HTTP/1.1\r\nHost: {SERVER}\r\n\r\n");
        assert_eq!(cx.send(conn, request.as_bytes()).unwrap(), request.len());
        self.connections.insert(conn, (self.next, Vec::new()));
        self.next += 1;
    }
}

impl Handler for Fetcher {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        for _ in 0..self.parallel {
            let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
            let options = ConnectOptions { socket, ..ConnectOptions::default() };
            cx.connect(format!("{SERVER}:80").parse().unwrap(), options)?;
        }
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.ask(cx, conn);
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let (page, received) = self.connections.get_mut(&conn).unwrap();
        received.extend_from_slice(data);
        let Some(end) = received.windows(4).position(|w| w == b"\r\n\r\n") else { return data.len() };
        let head = core::str::from_utf8(&received[..end]).unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        let length = head.split("\r\n").find_map(|l| l.strip_prefix("Content-Length: ")).unwrap();
        let body = &received[end + 4..];
        let length: usize = length.parse().unwrap();
        assert!(body.len() <= length);
        if body.len() == length {
            self.hashes.insert(self.paths[*page].clone(), Sha256::digest(body).to_vec());
            self.ask(cx, conn);
        }
        data.len()
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, reason: CloseReason) {
        panic!("a connection ended: {reason:?}");
    }
}

/// Fetches the corpus and compares every page with its file.
fn fetch_corpus(httpd_options: &[&str], faults: Option<&str>, pages_max: usize) {
    let directory = tempfile::tempdir().unwrap();
    let mut pages = corpus::write(directory.path(), 1).unwrap();
    pages.truncate(pages_max);
    let site = directory.path().join("site");
    let paths: Vec<String> = pages.iter().map(|p| p.path.clone()).collect();
    let server = httpd(&site, httpd_options);
    let mut pair = Pair::new(server, Fetcher::new(paths, 8), faults, ONE_SOURCE);
    pair.run(Duration::from_secs(3600));
    let hashes = &pair.client.handler().hashes;
    assert_eq!(hashes.len(), pages.len());
    for page in &pages {
        let file = fs::read(site.join(&page.path[1..])).unwrap();
        assert_eq!(hashes[&page.path], Sha256::digest(&file).to_vec(), "{}", page.path);
    }
}

#[test]
fn corpus_pages_arrive_unchanged() {
    fetch_corpus(&[], None, corpus::PAGES);
}

#[test]
fn streamed_corpus_pages_arrive_unchanged() {
    fetch_corpus(&["--memory", "0"], None, corpus::PAGES);
}

#[test]
fn pages_arrive_unchanged_over_a_faulty_link() {
    fetch_corpus(&[], Some("delay=2ms loss=1% duplicate=1% reorder=2% corrupt=0.5%"), 60);
    fetch_corpus(&["--memory", "0"], Some("delay=2ms loss=2%"), 30);
}
