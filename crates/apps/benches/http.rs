//! Measures nanoseconds per request in the server and in the generator, without a network. Run with `cargo
//! bench -p ginnel-apps --bench http`. The figures are medians of the rounds.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel::{Conn, Instant};
use ginnel_apps::httpd::limits::ServerOptions;
use ginnel_apps::httpd::response::DateText;
use ginnel_apps::httpd::server::{Server, Transport};
use ginnel_apps::httpd::site::{FileId, Site, SiteOptions};
use ginnel_apps::load::plan::{Closer, Plan};
use ginnel_apps::load::session::{Network, Session};
use ginnel_apps::load::sources::Sources;
use ginnel_apps::load::stats::Failure;
use ginnel_apps::load::urls::{RequestStyle, Requests};
use std::hint::black_box;
use std::sync::Arc;

const ROUNDS: usize = 31;
const TURNS: u32 = 20_000;
const CONNECTIONS: u32 = 64;

const SMALL: &[u8] = b"GET /index.html HTTP/1.1\r\nHost: 10.0.0.1\r\nUser-Agent: ginnel\r\n\r\n";
const BROWSER: &[u8] = b"GET /index.html HTTP/1.1\r\nHost: www.example.com\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:140.0) \
Gecko/20100101 Firefox/140.0\r\nAccept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8\r\nAccept-Language: \
en-US,en;q=0.5\r\nAccept-Encoding: gzip, deflate, br, zstd\r\nConnection: keep-alive\r\nUpgrade-Insecure-Requests: 1\r\n\
Sec-Fetch-Dest: document\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-Site: none\r\nSec-Fetch-User: ?1\r\nPriority: u=0, i\r\n\r\n";

/// A network that accepts everything.
struct Null;

impl Transport for Null {
    fn send(&mut self, _: Conn, bytes: &[u8]) -> usize {
        black_box(bytes).len()
    }
    fn send_file(&mut self, _: Conn, _: FileId, _: u64, _: u64) -> bool {
        true
    }
    fn finish(&mut self, _: Conn) {}
    fn close(&mut self, _: Conn) {}
    fn abort(&mut self, _: Conn) {}
    fn resume_reading(&mut self, _: Conn) {}
    fn outstanding(&mut self, _: Conn) -> Option<u32> {
        None
    }
}

impl Network for Null {
    fn connect(&mut self, _: u32, _: SocketAddr, _: Option<IpAddr>) -> Result<(), Failure> {
        Ok(())
    }
    fn send(&mut self, _: u32, bytes: &[u8]) -> usize {
        black_box(bytes).len()
    }
    fn close(&mut self, _: u32) {}
    fn abort(&mut self, _: u32) {}
}

fn main() {
    let mut response = Vec::new();
    println!("{:<44} {:>9}", "", "ns");
    for (name, request, same) in [
        ("server, short request, the same again", SMALL, true),
        ("server, short request, always another", SMALL, false),
        ("server, browser's request, the same again", BROWSER, true),
        ("server, browser's request, always another", BROWSER, false),
    ] {
        let ns = serve(request, same, &mut response);
        println!("{name:<44} {ns:>9.1}");
    }
    println!("{:<44} {:>9.1}", "generator, keep-alive", generate(false, &response));
    println!("{:<44} {:>9.1}", "generator, short connection", generate(true, &response));
}

/// Returns the median of the rounds, each of which runs `TURNS` turns for `CONNECTIONS` connections.
fn median(mut turn: impl FnMut(u32)) -> f64 {
    let mut results = Vec::new();
    for _ in 0..ROUNDS {
        let clock = std::time::Instant::now();
        for i in 0..TURNS {
            turn(i % CONNECTIONS);
        }
        results.push(clock.elapsed().as_nanos() as f64 / f64::from(TURNS));
    }
    results.sort_by(f64::total_cmp);
    results[ROUNDS / 2]
}

fn serve(request: &[u8], same: bool, response: &mut Vec<u8>) -> f64 {
    let root = std::env::temp_dir().join(format!("ginnel-bench-{}", std::process::id()));
    std::fs::create_dir_all(&root).expect("a directory");
    std::fs::write(root.join("index.html"), "x".repeat(64)).expect("a file");
    let site = Site::read(&root, &SiteOptions::default(), &DateText::new(0)).expect("a site");
    std::fs::remove_dir_all(&root).expect("the directory goes");
    let mut server = Server::new(site, ServerOptions::default(), Instant::ZERO, Duration::ZERO);
    for index in 0..CONNECTIONS {
        server.accepted(Instant::ZERO, Conn::new(index, 1));
    }
    struct Keep<'a>(&'a mut Vec<u8>);
    impl Transport for Keep<'_> {
        fn send(&mut self, _: Conn, bytes: &[u8]) -> usize {
            self.0.clear();
            self.0.extend_from_slice(bytes);
            bytes.len()
        }
        fn send_file(&mut self, _: Conn, _: FileId, _: u64, _: u64) -> bool {
            true
        }
        fn finish(&mut self, _: Conn) {}
        fn close(&mut self, _: Conn) {}
        fn abort(&mut self, _: Conn) {}
        fn resume_reading(&mut self, _: Conn) {}
        fn outstanding(&mut self, _: Conn) -> Option<u32> {
            None
        }
    }
    server.data(Instant::ZERO, Conn::new(0, 1), request, &mut Keep(response));
    assert!(response.starts_with(b"HTTP/1.1 200 OK\r\n"));
    // The query makes the request distinct without changing its length.
    let mut request =
        String::from_utf8(request.to_vec()).expect("ASCII").replace("index.html", "?000000000").into_bytes();
    let mut number = 0u32;
    median(|i| {
        if !same {
            number = number.wrapping_add(0x9E37_79B9);
            for (digit, byte) in request[6..14].iter_mut().enumerate() {
                *byte = b'a' + (number >> (4 * digit) & 15) as u8;
            }
        }
        server.data(Instant::ZERO, Conn::new(i, 1), black_box(&request), &mut Null);
    })
}

fn generate(short: bool, response: &[u8]) -> f64 {
    let plan = Plan {
        connections: CONNECTIONS,
        requests_per_connection: if short { 1 } else { u32::MAX },
        pipeline: 1,
        rate: None,
        setup: Duration::ZERO,
        warmup: Duration::ZERO,
        duration: Some(Duration::from_secs(3600)),
        requests: None,
        timeout: Duration::from_secs(3600),
        give_up: None,
        closer: Closer::Server,
        seed: 1,
    };
    let style = RequestStyle { close: short, ..RequestStyle::default() };
    let requests = Requests::new("10.0.0.1", &[("/".to_owned(), 1)], &style).expect("a request");
    let target = SocketAddr::from(([10, 0, 0, 1], 80));
    let now = Instant::from_millis(1);
    let sources = Sources::new(&[], 0, 1);
    let mut session = Session::new(plan, Arc::new(requests), vec![target], sources, Arc::default(), now);
    session.poll(now, &mut Null);
    for slot in 0..CONNECTIONS {
        session.connected(slot, now, &mut Null);
    }
    let later = Instant::from_millis(2);
    median(|slot| {
        session.data(slot, black_box(response), later, &mut Null);
        if short {
            session.peer_closed(slot, later, &mut Null);
            session.connected(slot, later, &mut Null);
        }
    })
}
