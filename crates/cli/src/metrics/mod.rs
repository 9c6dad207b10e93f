//! The exporter of metrics, in Prometheus' text format over HTTP. There is one exporter, for stacks
//! (`ginnel metrics`) and for a monitor (`ginnel monitor --metrics`).
//!
//! ```text
//! listener ─► a thread for each connection (connection) ─► source of samples ─► exposition (text format)
//! ```
//!
//! A source only reads what others publish, so that no scrape costs a shard anything.

mod connection;
mod exposition;
pub mod monitor;
pub mod stacks;

pub use exposition::{Exposition, MetricKind};

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Most connections of an exporter at a time.
// limit: connections of an exporter
const CONNECTIONS_MAX: usize = 16;
/// Pause after an error of `accept`, for example because no descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Answer to a connection beyond the limit.
const BUSY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n";

/// Something whose samples are exported.
pub trait MetricSource: Send + Sync {
    /// Adds the current samples.
    fn collect(&self, out: &mut Exposition);
}

/// Counters of the exporter itself.
#[derive(Debug, Default)]
pub struct ExporterCounters {
    /// Scrapes that were answered.
    pub scrapes: AtomicU64,
    /// Connections that were refused because there were too many, or no thread for them.
    pub refused: AtomicU64,
}

/// State that the connections of an exporter share.
struct ExporterState {
    source: Box<dyn MetricSource>,
    counters: ExporterCounters,
    connections: AtomicUsize,
}

/// Answers scrapes at `address` in threads of its own, for as long as the process lives. Returns the address,
/// whose port was chosen by the kernel if it was 0.
///
/// # Errors
/// The address cannot be used, or there is no thread.
pub fn serve(address: SocketAddr, source: Box<dyn MetricSource>) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address)?;
    let address = listener.local_addr()?;
    let state = Arc::new(ExporterState {
        source,
        counters: ExporterCounters::default(),
        connections: AtomicUsize::new(0),
    });
    thread::Builder::new().name("metrics".into()).spawn(move || {
        for client in listener.incoming() {
            match client {
                Ok(client) => state.clone().admit(client),
                Err(_) => thread::sleep(ACCEPT_PAUSE),
            }
        }
    })?;
    Ok(address)
}

impl ExporterState {
    /// Serves a connection in a thread of its own, unless there are too many.
    fn admit(self: Arc<Self>, client: TcpStream) {
        if self.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
            self.leave();
            return self.refuse(client);
        }
        let state = self.clone();
        let thread = thread::Builder::new().name("scrape".into()).spawn(move || {
            // An error of the connection concerns its client alone, who notices it.
            let _ = connection::serve(client, || state.scrape());
            state.leave();
        });
        if thread.is_err() {
            self.leave();
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn leave(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn refuse(&self, mut client: TcpStream) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        // The answer fits into the socket's buffer.
        let _ = client.set_nonblocking(true);
        let _ = client.write_all(BUSY);
    }

    /// Returns the current samples as text.
    fn scrape(&self) -> String {
        let mut out = Exposition::default();
        self.source.collect(&mut out);
        let scrapes = self.counters.scrapes.fetch_add(1, Ordering::Relaxed) + 1;
        let refused = self.counters.refused.load(Ordering::Relaxed);
        out.add("exporter.scrapes", MetricKind::Counter, "Scrapes that were answered.", &[], scrapes);
        let help = "Connections that were refused because there were too many.";
        out.add("exporter.refused", MetricKind::Counter, help, &[], refused);
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        out.add("build.info", MetricKind::Gauge, "Version of the exporter; the value is 1.", &version, 1);
        out.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    struct Constant;

    impl MetricSource for Constant {
        fn collect(&self, out: &mut Exposition) {
            out.add("test.value", MetricKind::Gauge, "A value.", &[], 7);
        }
    }

    fn exchange(address: SocketAddr, request: &[u8]) -> String {
        let mut client = TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        client.write_all(request).unwrap();
        let mut answer = Vec::new();
        // A refused connection may be reset after its answer.
        let _ = client.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    fn exporter() -> SocketAddr {
        serve("127.0.0.1:0".parse().unwrap(), Box::new(Constant)).unwrap()
    }

    #[test]
    fn requests_are_answered_by_path_and_method() {
        let address = exporter();
        for (request, status, contained) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "200", "ginnel_test_value 7\n"),
            ("GET /metrics?x=1 HTTP/1.0\r\n\r\n", "200", "ginnel_exporter_scrapes_total 2\n"),
            ("HEAD /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "200", "content-length: "),
            ("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "200", "/metrics"),
            ("GET /other HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "404", "/metrics"),
            (
                "POST /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
                "405",
                "allow: GET, HEAD",
            ),
            ("GET\r\n\r\n", "400", ""),
            ("\x16\x03\x01\x02\x00\x01", "400", ""),
        ] {
            let answer = exchange(address, request.as_bytes());
            assert_eq!(answer.split(' ').nth(1), Some(status), "{request:?}: {answer}");
            assert!(answer.contains(contained), "{request:?}: {answer}");
        }
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(100_000));
        let answer = exchange(address, long.as_bytes());
        assert!(answer.is_empty() || answer.contains(" 431 "), "{answer}");
    }

    #[test]
    fn a_connection_may_scrape_several_times() {
        let address = exporter();
        let request = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(3);
        let last = "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let answer = exchange(address, (request + last).as_bytes());
        for scrapes in 1..=4 {
            assert!(answer.contains(&format!("ginnel_exporter_scrapes_total {scrapes}\n")), "{answer}");
        }
    }

    // limit: connections of an exporter
    #[test]
    fn connections_beyond_the_limit_are_refused() {
        let address = exporter();
        let idle: Vec<_> = (0..CONNECTIONS_MAX).map(|_| TcpStream::connect(address).unwrap()).collect();
        // Connections are admitted in their order.
        let answer = exchange(address, b"");
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        drop(idle);
        let text = loop {
            let answer = exchange(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            if answer.starts_with("HTTP/1.1 200 ") {
                break answer;
            }
            thread::sleep(Duration::from_millis(5));
        };
        let refused = text.lines().find_map(|line| line.strip_prefix("ginnel_exporter_refused_total "));
        assert!(refused.unwrap().parse::<u64>().unwrap() >= 1, "{text}");
    }
}
