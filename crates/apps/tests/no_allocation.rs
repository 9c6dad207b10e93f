//! In steady state the server of files does not allocate, for all kinds of requests: small files, files as
//! sources, HEAD, preconditions, ranges, errors, and fragmented requests.

use core::time::Duration;
use ginnel::{Conn, Instant};
use ginnel_apps::httpd::limits::ServerOptions;
use ginnel_apps::httpd::response::DateText;
use ginnel_apps::httpd::server::{Server, Transport};
use ginnel_apps::httpd::site::{FileId, Site, SiteOptions};
use ginnel_testkit::alloc_counter::{CountingAllocator, count_allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A transport that accepts everything, at most `room` bytes per call.
struct Sink {
    bytes: u64,
    room: usize,
}

impl Transport for Sink {
    fn send(&mut self, _: Conn, bytes: &[u8]) -> usize {
        let n = bytes.len().min(self.room);
        self.bytes += n as u64;
        n
    }
    fn send_file(&mut self, _: Conn, _: FileId, _: u64, len: u64) -> bool {
        self.bytes += len;
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

fn server() -> (tempfile::TempDir, Server) {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("index.html"), "x".repeat(64)).unwrap();
    std::fs::write(root.path().join("large.bin"), vec![1; 100_000]).unwrap();
    let site = Site::read(root.path(), &SiteOptions::default(), &DateText::new(0)).unwrap();
    let server = Server::new(site, ServerOptions::default(), Instant::ZERO, Duration::from_secs(1));
    (root, server)
}

const REQUESTS: [&[u8]; 7] = [
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /large.bin HTTP/1.1\r\nHost: a\r\nUser-Agent: x\r\nAccept: */*\r\n\r\n",
    b"HEAD /large.bin HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /large.bin HTTP/1.1\r\nHost: a\r\nRange: bytes=5-99\r\n\r\n",
    b"GET /%69ndex.html HTTP/1.1\r\nHost: a\r\nIf-None-Match: *\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
];

/// Sends each request on a new connection and on a persistent one, whole and fragmented, with and without
/// free send buffer.
fn round(server: &mut Server, now: &mut Instant, generation: &mut u32) {
    for (room, step) in [(usize::MAX, usize::MAX), (usize::MAX, 7), (50, usize::MAX)] {
        let stays = Conn::new(0, *generation);
        server.accepted(*now, stays);
        for request in REQUESTS {
            let own = Conn::new(1, *generation);
            server.accepted(*now, own);
            for conn in [stays, own] {
                let mut sink = Sink { bytes: 0, room };
                for piece in request.chunks(step.min(request.len())) {
                    assert_eq!(server.data(*now, conn, piece, &mut sink), piece.len());
                }
                for _ in 0..20 {
                    server.writable(*now, conn, &mut sink);
                }
                assert!(sink.bytes > 100);
            }
            server.closed(own);
            *generation += 1;
        }
        server.closed(stays);
        *now += Duration::from_secs(1);
        server.tick(*now, &mut Sink { bytes: 0, room: 0 });
    }
}

#[test]
fn requests_allocate_nothing() {
    let (_root, mut server) = server();
    let (mut now, mut generation) = (Instant::ZERO, 0);
    for _ in 0..100 {
        round(&mut server, &mut now, &mut generation);
    }
    let ((), made) = count_allocations(|| {
        for _ in 0..100 {
            round(&mut server, &mut now, &mut generation);
        }
    });
    assert_eq!(made.count, 0);
}
