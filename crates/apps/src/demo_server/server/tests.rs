//! The server with a transport that records what is sent, and accepts as much as a test says.

use super::*;
use std::collections::BTreeMap;

/// Clients have handles from 1 on, backends from 101 on.
const CLIENT: u32 = 1;
const BACKEND: u32 = 101;
const REQUEST: &str = "GET /a HTTP/1.1\r\nHost: x\r\n\r\n";

#[derive(Debug, Default)]
struct Wire {
    sent: BTreeMap<u32, Vec<u8>>,
    /// Bytes that each connection still accepts; without an entry, any number.
    room: BTreeMap<u32, usize>,
    connects: Vec<(SocketAddr, u32)>,
    refuses_connects: bool,
    /// Ends of connections, in order.
    ends: Vec<(&'static str, u32)>,
    resumed: Vec<u32>,
}

impl StackConnections<u32> for Wire {
    fn connect(&mut self, to: SocketAddr, token: u32) -> Option<u32> {
        if self.refuses_connects {
            return None;
        }
        self.connects.push((to, token));
        Some(BACKEND - 1 + self.connects.len() as u32)
    }

    fn send(&mut self, conn: u32, bytes: &[u8]) -> usize {
        let len = match self.room.get_mut(&conn) {
            Some(room) => {
                let len = bytes.len().min(*room);
                *room -= len;
                len
            }
            None => bytes.len(),
        };
        self.sent.entry(conn).or_default().extend_from_slice(&bytes[..len]);
        len
    }

    fn finish(&mut self, conn: u32) {
        self.ends.push(("finish", conn));
    }

    fn close(&mut self, conn: u32) {
        self.ends.push(("close", conn));
    }

    fn abort(&mut self, conn: u32) {
        self.ends.push(("abort", conn));
    }

    fn resume_reading(&mut self, conn: u32) {
        self.resumed.push(conn);
    }
}

struct Fixture {
    server: DemoCore<u32>,
    counters: Arc<WorkerCounters>,
    wire: Wire,
    /// Token of the client.
    token: u32,
}

impl Fixture {
    fn new(keepalive: bool, backends: &[&str]) -> Self {
        let options = DemoServerOptions {
            workers: None,
            first_core: None,
            listen: Vec::new(),
            backend: backends.iter().map(|backend| backend.parse().unwrap()).collect(),
            log: None,
            keepalive,
            verbose: false,
            debug: false,
        };
        let counters: Arc<WorkerCounters> = Arc::default();
        let mut server = DemoCore::new(&options, 0, Arc::clone(&counters), None, Instant::ZERO);
        let token = server.accepted(CLIENT);
        Self { server, counters, wire: Wire::default(), token }
    }

    fn proxy(keepalive: bool) -> Self {
        Self::new(keepalive, &["10.0.0.1:80", "10.0.0.2:80"])
    }

    fn client(&mut self, bytes: &str) -> usize {
        self.server.data(self.token, CLIENT, bytes.as_bytes(), &mut self.wire)
    }

    fn connected(&mut self, backend: u32) {
        let token = self.wire.connects[(backend - BACKEND) as usize].1;
        self.server.connected(token, backend, &mut self.wire);
    }

    fn backend(&mut self, backend: u32, bytes: &str) -> usize {
        let token = self.wire.connects[(backend - BACKEND) as usize].1;
        self.server.data(token, backend, bytes.as_bytes(), &mut self.wire)
    }

    fn backend_closed(&mut self, backend: u32) {
        let token = self.wire.connects[(backend - BACKEND) as usize].1;
        self.server.peer_closed(token, backend, &mut self.wire);
    }

    fn sent(&mut self, conn: u32) -> String {
        String::from_utf8(self.wire.sent.remove(&conn).unwrap_or_default()).unwrap()
    }

    fn ends(&mut self) -> Vec<(&'static str, u32)> {
        core::mem::take(&mut self.wire.ends)
    }
}

#[test]
fn without_keepalive_a_connection_ends_after_one_response() {
    let mut naive = Fixture::new(false, &[]);
    assert_eq!(naive.client(REQUEST), REQUEST.len());
    let response = naive.sent(CLIENT);
    assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
    assert!(response.contains("Content-Length: 64\r\n") && response.contains("Connection: close\r\n"));
    assert_eq!(response.split_once("\r\n\r\n").unwrap().1.len(), 64);
    assert_eq!(naive.ends(), [("close", CLIENT)]);
    let counts = naive.counters.counts();
    assert_eq!((counts.connections, counts.requests, counts.responses, counts.open), (1, 1, 1, 0));
    // The end of the connection, which the server did not wait for, has no effect.
    naive.server.closed(naive.token, CLIENT, &mut naive.wire);
    assert_eq!(naive.counters.counts(), counts);
}

#[test]
fn pipelined_requests_are_answered_however_they_are_cut() {
    let requests = [
        REQUEST,
        "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        "HEAD / HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ]
    .concat();
    for step in [1, 3, 17, 1000] {
        let mut naive = Fixture::new(true, &[]);
        for part in requests.as_bytes().chunks(step) {
            let part = core::str::from_utf8(part).unwrap();
            assert_eq!(naive.client(part), part.len(), "step {step}");
        }
        let text = naive.sent(CLIENT);
        assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 6, "step {step}");
        assert_eq!(text.matches("Content-Length: 64").count(), 6);
        assert_eq!(text.matches("This page").count(), 5, "HEAD has no body");
        assert_eq!(text.matches("Connection: close").count(), 1);
        assert_eq!(naive.ends(), [("close", CLIENT)], "step {step}");
    }
}

#[test]
fn a_client_that_does_not_read_is_not_served() {
    let mut naive = Fixture::new(true, &[]);
    naive.wire.room.insert(CLIENT, 100);
    let two = REQUEST.repeat(2);
    assert_eq!(naive.client(&two), REQUEST.len());
    assert_eq!(naive.counters.counts().responses, 1);
    naive.wire.room.remove(&CLIENT);
    naive.server.writable(naive.token, CLIENT, &mut naive.wire);
    assert_eq!(naive.wire.resumed, [CLIENT]);
    assert_eq!(naive.client(REQUEST), REQUEST.len());
    assert_eq!(naive.sent(CLIENT).matches("This page").count(), 2);
}

/// A head within a response would be taken for bytes of its body.
#[test]
fn a_malformed_body_resets_a_client_whose_response_has_begun() {
    let mut proxy = Fixture::proxy(true);
    let request = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(proxy.client(request), request.len());
    proxy.connected(BACKEND);
    proxy.backend(BACKEND, "HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc");
    assert!(proxy.sent(CLIENT).ends_with("\r\n\r\nabc"));
    proxy.client("zz\r\n");
    assert_eq!(proxy.sent(CLIENT), "");
    assert_eq!(proxy.ends(), [("abort", CLIENT), ("abort", BACKEND)]);
}

#[test]
fn malformed_requests_are_refused_and_drained() {
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "400"),
        ("GET / HTTP/1.1\nHost: x\n\n", "400"),
        ("BREW / HTTP/1.1\r\nHost: x\r\n\r\n", "501"),
        ("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz", "400"),
        (&format!("GET /{} HTTP/1.1\r\n", "a".repeat(9000)), "414"),
        (&format!("GET / HTTP/1.1\r\nX: {}", "a".repeat(17_000)), "431"),
    ] {
        for backends in [&[][..], &["10.0.0.1:80"]] {
            let mut server = Fixture::new(true, backends);
            if request.ends_with("xyz") && !backends.is_empty() {
                // The body is read when it can be passed on.
                let head = request.len() - "xyz".len();
                assert_eq!(server.client(request), head);
                server.connected(BACKEND);
                assert_eq!(server.client("xyz"), "xyz".len());
            } else {
                assert_eq!(server.client(request), request.len());
            }
            let response = server.sent(CLIENT);
            assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {response}");
            // A close would be a reset if more bytes arrived.
            assert_eq!(server.ends().last(), Some(&("finish", CLIENT)));
            assert_eq!(server.client("more"), 4);
            server.server.peer_closed(server.token, CLIENT, &mut server.wire);
            assert_eq!(server.ends(), [("close", CLIENT)]);
            let counts = server.counters.counts();
            assert_eq!((counts.errors, counts.open), (1, 0));
        }
    }
}

#[test]
fn a_proxy_keeps_both_connections_open() {
    let mut proxy = Fixture::proxy(true);
    assert_eq!(proxy.client(REQUEST), REQUEST.len());
    assert_eq!(proxy.wire.connects[0].0, "10.0.0.1:80".parse().unwrap());
    assert_eq!(proxy.sent(BACKEND), "", "nothing is sent before the connection is established");
    proxy.connected(BACKEND);
    let relayed = "GET /a HTTP/1.1\r\nHost: x\r\nVia: 1.1 ginnel\r\nConnection: keep-alive\r\n\r\n";
    assert_eq!(proxy.sent(BACKEND), relayed);
    let response = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nKeep-Alive: timeout=5\r\n\r\nabc";
    for part in response.as_bytes().chunks(7) {
        proxy.backend(BACKEND, core::str::from_utf8(part).unwrap());
    }
    let expected = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: keep-alive\r\n\r\nabc";
    assert_eq!(proxy.sent(CLIENT), expected);
    proxy.client(REQUEST);
    assert_eq!(proxy.sent(BACKEND), relayed);
    let chunked =
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    assert_eq!(proxy.backend(BACKEND, chunked), chunked.len());
    let response = proxy.sent(CLIENT);
    assert!(
        !response.contains("Content-Length") && response.ends_with("3\r\nabc\r\n0\r\n\r\n"),
        "{response}"
    );
    assert_eq!(proxy.ends(), []);
    let counts = proxy.counters.counts();
    assert_eq!((counts.requests, counts.responses, counts.backend_connects), (2, 2, 1));
    // The backend ends the idle connection: the next request gets another one, to the other backend.
    proxy.backend_closed(BACKEND);
    assert_eq!(proxy.ends(), [("close", BACKEND)]);
    proxy.client(REQUEST);
    assert_eq!(proxy.wire.connects[1].0, "10.0.0.2:80".parse().unwrap());
}

#[test]
fn a_proxy_without_keepalive_ends_both_connections() {
    let mut proxy = Fixture::proxy(false);
    proxy.client(REQUEST);
    proxy.connected(BACKEND);
    assert!(proxy.sent(BACKEND).ends_with("Connection: close\r\n\r\n"));
    proxy.backend(BACKEND, "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx");
    let expected = "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx";
    assert_eq!(proxy.sent(CLIENT), expected);
    assert_eq!(proxy.ends(), [("close", BACKEND), ("close", CLIENT)]);
    assert_eq!(proxy.counters.counts().open, 0);
}

#[test]
fn a_response_may_end_with_the_connection() {
    let mut proxy = Fixture::proxy(true);
    proxy.client(REQUEST);
    proxy.connected(BACKEND);
    proxy.backend(BACKEND, "HTTP/1.0 200 OK\r\n\r\nuntil ");
    proxy.backend(BACKEND, "the end");
    assert_eq!(proxy.ends(), []);
    proxy.backend_closed(BACKEND);
    assert_eq!(proxy.sent(CLIENT), "HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nuntil the end");
    assert_eq!(proxy.ends(), [("close", BACKEND), ("close", CLIENT)]);
}

#[test]
fn pipelined_requests_wait_for_the_response() {
    let mut proxy = Fixture::proxy(true);
    let two = REQUEST.repeat(2);
    assert_eq!(proxy.client(&two), REQUEST.len());
    proxy.connected(BACKEND);
    proxy.backend(BACKEND, "HTTP/1.1 204 No Content\r\n\r\n");
    assert_eq!(proxy.wire.resumed, [CLIENT]);
    assert_eq!(proxy.client(REQUEST), REQUEST.len());
    assert_eq!(proxy.sent(BACKEND).matches("GET").count(), 2);
}

#[test]
fn bodies_wait_for_space_at_the_other_side() {
    let mut proxy = Fixture::proxy(true);
    let head = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n";
    assert_eq!(proxy.client(&format!("{head}01234")), head.len());
    proxy.connected(BACKEND);
    assert_eq!(proxy.wire.resumed, [CLIENT]);
    proxy.wire.room.insert(BACKEND, 3);
    assert_eq!(proxy.client("0123456789"), 3);
    proxy.wire.room.remove(&BACKEND);
    proxy.server.writable(proxy.wire.connects[0].1, BACKEND, &mut proxy.wire);
    assert_eq!(proxy.wire.resumed, [CLIENT, CLIENT]);
    assert_eq!(proxy.client("3456789"), 7);
    assert!(proxy.sent(BACKEND).ends_with("\r\n\r\n0123456789"));
    proxy.wire.room.insert(CLIENT, 10);
    let response = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd";
    assert_eq!(proxy.backend(BACKEND, response), response.len() - 4);
    proxy.wire.room.insert(CLIENT, 1000);
    proxy.server.writable(proxy.token, CLIENT, &mut proxy.wire);
    assert_eq!(proxy.wire.resumed[2..], [BACKEND]);
    assert_eq!(proxy.backend(BACKEND, "abcd"), 4);
    assert!(proxy.sent(CLIENT).ends_with("\r\n\r\nabcd"));
}

#[test]
fn interim_responses_reach_only_clients_that_know_them() {
    for (request, count) in [(REQUEST, 1), ("GET / HTTP/1.0\r\n\r\n", 0)] {
        let mut proxy = Fixture::proxy(true);
        proxy.client(request);
        proxy.connected(BACKEND);
        proxy.backend(BACKEND, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        let response = proxy.sent(CLIENT);
        assert_eq!(response.matches("100 Continue").count(), count);
        assert_eq!(response.matches("200 OK").count(), 1);
    }
    let mut naive = Fixture::new(true, &[]);
    naive.client("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n");
    assert_eq!(naive.sent(CLIENT), "HTTP/1.1 100 Continue\r\n\r\n");
    naive.client("x");
    assert!(naive.sent(CLIENT).starts_with("HTTP/1.1 200 OK"));
}

#[test]
fn a_failed_backend_is_reported() {
    // No connection at all.
    let mut proxy = Fixture::proxy(true);
    proxy.wire.refuses_connects = true;
    proxy.client(REQUEST);
    assert!(proxy.sent(CLIENT).starts_with("HTTP/1.1 502 Bad Gateway"));
    assert_eq!(proxy.ends(), [("finish", CLIENT)]);
    // A connection that is refused later; a response that is none; another protocol.
    for bytes in ["", "SSH-2.0-OpenSSH\r\n", "HTTP/1.1 101 Switching Protocols\r\n\r\n"] {
        let mut proxy = Fixture::proxy(true);
        proxy.client(REQUEST);
        if bytes.is_empty() {
            let token = proxy.wire.connects[0].1;
            proxy.server.closed(token, BACKEND, &mut proxy.wire);
        } else {
            proxy.connected(BACKEND);
            proxy.backend(BACKEND, bytes);
        }
        assert!(proxy.sent(CLIENT).starts_with("HTTP/1.1 502 Bad Gateway"), "{bytes}");
        let counts = proxy.counters.counts();
        assert_eq!((counts.backend_failures, counts.errors), (1, 1));
    }
    // In the middle of a response, only a reset tells the client.
    let mut proxy = Fixture::proxy(true);
    proxy.client(REQUEST);
    proxy.connected(BACKEND);
    proxy.backend(BACKEND, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc");
    proxy.backend_closed(BACKEND);
    assert_eq!(proxy.ends(), [("abort", CLIENT), ("abort", BACKEND)]);
    assert_eq!(proxy.counters.counts().open, 0);
}

#[test]
fn a_client_that_leaves_takes_its_backend_along() {
    let mut proxy = Fixture::proxy(true);
    proxy.client(REQUEST);
    proxy.connected(BACKEND);
    proxy.server.closed(proxy.token, CLIENT, &mut proxy.wire);
    assert_eq!(proxy.ends(), [("abort", BACKEND)]);
    // The slot's next client has another handle; late events of the last session have no effect.
    let token = proxy.server.accepted(2);
    assert_eq!(token, proxy.token);
    assert_eq!(proxy.backend(BACKEND, "late"), 4);
    assert_eq!(proxy.server.data(token, 2, REQUEST.as_bytes(), &mut proxy.wire), REQUEST.len());
    assert_eq!(proxy.wire.connects.len(), 2);
}

#[test]
fn silent_clients_are_reset_after_a_minute() {
    let mut naive = Fixture::new(true, &[]);
    naive.client("GET / HT");
    naive.server.tick(Instant::from_millis(59_000), &mut naive.wire);
    assert_eq!(naive.ends(), []);
    naive.server.tick(Instant::from_millis(66_000), &mut naive.wire);
    assert_eq!(naive.ends(), [("abort", CLIENT)]);
    assert_eq!((naive.counters.counts().timeouts, naive.counters.counts().open), (1, 0));
    // A client that was refused has a few seconds to close.
    let token = naive.server.accepted(2);
    naive.server.data(token, 2, b"\n", &mut naive.wire);
    assert_eq!(naive.ends(), [("finish", 2)]);
    naive.server.tick(Instant::from_millis(77_000), &mut naive.wire);
    assert_eq!(naive.ends(), [("abort", 2)]);
}
