//! HTTP: the server's parser of requests, and the load generator's parsers of HTTP, Redis and memcached
//! responses.
//!
//! The segmentation of input and the send space must not change the output. Every response of the server must
//! be framed, so that a client finds its end.

use core::cell::RefCell;
use core::time::Duration;
use ginnel::{Conn, Instant};
use ginnel_apps::httpd::limits::ServerOptions;
use ginnel_apps::httpd::response::DateText;
use ginnel_apps::httpd::server::Server;
use ginnel_apps::httpd::server::recorder::Recorder;
use ginnel_apps::httpd::site::{Site, SiteOptions};
use ginnel_apps::load::response::{ParseProgress, Parser, PartialResponses, Protocol};
use std::fs;
use std::path::PathBuf;

/// Longer inputs are truncated to this many bytes, more than a request head may have.
const INPUT_BYTES_MAX: usize = 20 << 10;
/// Time of day: Sun, 06 Nov 1994 08:49:37 GMT.
const UNIX_TIME: u64 = 784_111_777;
/// Interim response to a client that waits before it sends a body.
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A server that serves all inputs of a thread, because reading its site takes longer than an input.
struct HttpFixture {
    server: Server,
    files: Vec<Vec<u8>>,
    now: Instant,
    generation: u32,
}

thread_local! {
    static FIXTURE: RefCell<Option<HttpFixture>> = const { RefCell::new(None) };
}

fn create_site() -> PathBuf {
    let root = std::env::temp_dir().join(format!("ginnel-fuzz-http-{}", std::process::id()));
    fs::create_dir_all(root.join("a b")).expect("a directory in the temporary one");
    let files = [("index.html", 11), ("a b/index.html", 3), ("empty.txt", 0), ("large.bin", 5000)];
    for (name, len) in files {
        let bytes: Vec<u8> = (0..len).map(|i| b'a' + (i % 23) as u8).collect();
        fs::write(root.join(name), bytes).expect("a file in the temporary directory");
        let file = fs::File::open(root.join(name)).expect("the file that was written");
        let modified = std::time::UNIX_EPOCH + Duration::from_secs(UNIX_TIME - 1000);
        file.set_modified(modified).expect("a writable modification time");
    }
    root
}

impl HttpFixture {
    fn new() -> Self {
        let root = create_site();
        let date = DateText::new(UNIX_TIME);
        let site = Site::read(&root, &SiteOptions::default(), &date).expect("the site");
        let files = Recorder::files_of(&site);
        // The site is in memory now.
        let _ = fs::remove_dir_all(root);
        let now = Instant::from_millis(5_000);
        let server = Server::new(site, ServerOptions::default(), now, Duration::from_secs(UNIX_TIME));
        Self { server, files, now, generation: 0 }
    }

    /// Serves one connection, on which the client sends `data` in `pieces` and reads `room` bytes at a time.
    fn serve_connection(&mut self, data: &[u8], pieces: &mut dyn FnMut() -> usize, room: usize) -> Recorder {
        self.generation += 1;
        let conn = Conn::new(0, self.generation);
        let mut net = Recorder { files: core::mem::take(&mut self.files), room, ..Recorder::default() };
        self.server.accepted(self.now, conn);
        let mut unread = Vec::new();
        let mut rest = data;
        while !net.has_ended() {
            if unread.is_empty() && rest.is_empty() {
                break;
            }
            let n = pieces().clamp(1, rest.len().max(1)).min(rest.len());
            unread.extend_from_slice(&rest[..n]);
            rest = &rest[n..];
            self.feed(conn, &mut unread, &mut net, room);
        }
        if !net.has_ended() && unread.is_empty() {
            self.server.peer_closed(conn, &mut net);
        }
        while !net.has_ended() && net.room == 0 {
            self.drain_output(conn, &mut unread, &mut net, room);
        }
        self.server.closed(conn);
        self.files = core::mem::take(&mut net.files);
        net
    }

    /// Passes unread bytes to the server and reads its answers, until there is no progress.
    fn feed(&mut self, conn: Conn, unread: &mut Vec<u8>, net: &mut Recorder, room: usize) {
        for _ in 0..100_000 {
            net.resumed = false;
            let consumed = self.server.data(self.now, conn, unread, net);
            assert!(consumed <= unread.len(), "more bytes consumed than passed");
            unread.drain(..consumed);
            if net.has_ended() || unread.is_empty() {
                return;
            }
            if net.room == 0 {
                self.drain_output(conn, unread, net, room);
            } else if !net.resumed {
                return;
            }
        }
        panic!("the server makes no progress with {} bytes", unread.len());
    }

    fn drain_output(&mut self, conn: Conn, unread: &mut Vec<u8>, net: &mut Recorder, room: usize) {
        net.room = room;
        self.server.writable(self.now, conn, net);
        self.server.read_disk(self.now, net);
        if net.resumed && !unread.is_empty() && !net.has_ended() {
            net.resumed = false;
            let consumed = self.server.data(self.now, conn, unread, net);
            unread.drain(..consumed);
        }
    }
}

/// Runs one input. The first byte selects requests for the server (even) or responses for the generator
/// (odd); if its bit 1 is set, it also limits the send space of the server. The second byte determines the
/// segmentation of the rest.
///
/// # Panics
/// If segmentation changes the output, or a response has no end.
pub fn run(data: &[u8]) {
    let [choice, cut, rest @ ..] = &data[..data.len().min(INPUT_BYTES_MAX)] else { return };
    if choice & 1 == 0 { requests(rest, *cut, *choice) } else { responses(rest, *cut) }
}

/// Returns the lengths of pieces, derived from a byte of the input.
fn pieces(cut: u8) -> impl FnMut() -> usize {
    let mut state = u32::from(cut);
    move || {
        state = state.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        1 + (state >> 16) as usize % (usize::from(cut) + 1)
    }
}

fn requests(data: &[u8], cut: u8, choice: u8) {
    FIXTURE.with_borrow_mut(|fixture| {
        let fixture = fixture.get_or_insert_with(HttpFixture::new);
        let unsegmented = fixture.serve_connection(data, &mut || usize::MAX, usize::MAX);
        let room = if choice & 2 == 0 { usize::MAX } else { 1 + usize::from(choice) * 3 };
        let segmented = fixture.serve_connection(data, &mut pieces(cut), room);
        check_framing(&unsegmented, data);
        check_framing(&segmented, data);
        let statuses = |net: &Recorder| statuses(&net.output);
        // A head that is both too long and malformed gets the error that is detected first, which depends on
        // its segmentation.
        if !statuses(&unsegmented).contains(&400)
            && !statuses(&segmented).contains(&400)
            && data.len() < 8 << 10
        {
            let (unsegmented_text, segmented_text) =
                (final_responses(&unsegmented.output), final_responses(&segmented.output));
            assert_eq!(
                unsegmented_text,
                segmented_text,
                "segmentation changes the response to {}",
                text(data)
            );
            assert_eq!(unsegmented.has_ended(), segmented.has_ended(), "segmentation changes the end");
        }
    });
}

fn text(bytes: &[u8]) -> String {
    bytes.escape_ascii().to_string()
}

/// Returns the output without 100 (Continue), which the server omits if the body has begun to arrive (RFC
/// 9110 §10.1.1) and truncates if the client ends.
fn final_responses(output: &[u8]) -> String {
    let output = &output[..output.len() - truncated_continue_len(output)];
    text(output).replace(&text(CONTINUE), "")
}

/// Returns the length of a truncated 100 (Continue) at the end of the output.
fn truncated_continue_len(output: &[u8]) -> usize {
    (1..CONTINUE.len()).rev().find(|&n| output.ends_with(&CONTINUE[..n])).unwrap_or(0)
}

/// Returns the status of every status line in the output. No file of the site contains a status line.
fn statuses(output: &[u8]) -> Vec<u16> {
    let mut statuses = Vec::new();
    for (at, _) in output.windows(9).enumerate().filter(|(_, w)| *w == b"HTTP/1.1 ") {
        let digits = output.get(at + 9..at + 12).and_then(|d| core::str::from_utf8(d).ok());
        statuses.push(digits.and_then(|d| d.parse().ok()).expect("a status is a number"));
    }
    statuses
}

/// Checks that a client can find the end of each response.
fn check_framing(net: &Recorder, data: &[u8]) {
    const KNOWN: [u16; 19] =
        [100, 200, 206, 301, 304, 400, 404, 405, 408, 412, 413, 414, 416, 417, 431, 500, 501, 503, 505];
    let statuses = statuses(&net.output);
    if let Some(unknown) = statuses.iter().find(|s| !KNOWN.contains(s)) {
        panic!("status {unknown} in response to {}", text(data));
    }
    let head_requested = data.windows(4).any(|w| w == b"HEAD");
    if head_requested || net.aborted {
        return;
    }
    let (mut parser, mut records) = (Parser::default(), PartialResponses::default());
    let mut rest = &net.output[..];
    while !rest.is_empty() {
        match parser.read(rest, Protocol::Http { head: false }, &mut records) {
            Ok(ParseProgress::Complete(used, response)) => {
                rest = &rest[used..];
                assert!(!response.close || rest.is_empty(), "a response after the last one");
                assert!(
                    !response.close || net.has_ended(),
                    "the connection stays open after the last response"
                );
            }
            Ok(ParseProgress::More) => break,
            Err(_) => panic!("an unreadable response to {}: {}", text(data), text(rest)),
        }
    }
    // A client that ends in the middle of a request gets only responses that were sent before.
    let expects_continue = data.to_ascii_lowercase().windows(12).any(|w| w == b"100-continue");
    let truncated = expects_continue && truncated_continue_len(rest) == rest.len();
    assert!(
        parser.is_at_start() || parser.end().is_some() || rest.is_empty() && statuses == [100] || truncated,
        "a response without an end to {}: {}",
        text(data),
        text(&net.output)
    );
}

/// Returns status and connection-close flag of each response that a parser found, and whether all input was
/// valid.
fn parse_stream(
    protocol: Protocol,
    data: &[u8],
    mut pieces: impl FnMut() -> usize,
) -> (Vec<(u16, bool)>, bool) {
    let (mut parser, mut records) = (Parser::default(), PartialResponses::default());
    let mut parsed = Vec::new();
    let mut rest = data;
    while !rest.is_empty() {
        let n = pieces().min(rest.len());
        let mut piece = &rest[..n];
        rest = &rest[n..];
        while !piece.is_empty() {
            match parser.read(piece, protocol, &mut records) {
                Ok(ParseProgress::More) => break,
                Ok(ParseProgress::Complete(used, response)) => {
                    assert!(used <= piece.len(), "more bytes consumed than passed");
                    parsed.push((response.status, response.close));
                    piece = &piece[used..];
                }
                Err(_) => {
                    parser.reset(&mut records);
                    assert_eq!(records.in_use(), 0, "records are still in use");
                    return (parsed, false);
                }
            }
        }
    }
    parsed.extend(parser.end().map(|r| (r.status, r.close)));
    parser.reset(&mut records);
    assert_eq!(records.in_use(), 0, "records are still in use");
    (parsed, true)
}

fn responses(data: &[u8], cut: u8) {
    for protocol in [Protocol::Http { head: false }, Protocol::Redis, Protocol::Memcached] {
        let unsegmented = parse_stream(protocol, data, || usize::MAX);
        let segmented = parse_stream(protocol, data, pieces(cut));
        if data.len() < 8 << 10 {
            assert_eq!(
                unsegmented,
                segmented,
                "segmentation changes the result for {} as {protocol:?}",
                text(data)
            );
        }
    }
}

/// Returns the handwritten seed inputs.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let requests = [
        ("get", "GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
        (
            "pipelined",
            "GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /a%20b/ HTTP/1.1\r\nHost: a\r\n\r\nGET /none HTTP/1.1\r\nHost: a\r\n\r\n",
        ),
        ("http-1.0", "GET /empty.txt HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET / HTTP/1.0\r\n\r\n"),
        ("range", "GET /large.bin HTTP/1.1\r\nHost: a\r\nRange: bytes=10-19\r\n\r\n"),
        (
            "ranges",
            "GET /large.bin HTTP/1.1\r\nHost: a\r\nRange: bytes=0-1,-5\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\nRange: bytes=99-\r\n\r\n",
        ),
        (
            "conditional",
            "GET / HTTP/1.1\r\nHost: a\r\nIf-None-Match: *\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\nIf-Modified-Since: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n",
        ),
        (
            "body",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        ),
        (
            "chunked",
            "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;x=1\r\nhello\r\n0\r\nA: b\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        ),
        ("expect", "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok"),
        (
            "smuggle",
            "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        ),
        ("head", "HEAD /large.bin HTTP/1.1\r\nHost: a\r\n\r\nOPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"),
        (
            "path-traversal",
            "GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\nGET /a%2e%2e/%00 HTTP/1.1\r\nHost: a\r\n\r\n",
        ),
        ("version", "GET / HTTP/9.9\r\n\r\n"),
        ("close", "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
        ("directory", "GET /a%20b HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("bare-lf", "GET / HTTP/1.1\nHost: a\n\n"),
    ];
    let responses = [
        (
            "length",
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        ),
        ("chunks", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"),
        ("until-close", "HTTP/1.0 200 OK\r\n\r\nall of this"),
        ("interim", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"),
        ("closing", "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"),
        ("nonsense", "HTTP/1.1 2x0\r\n\r\n"),
        ("redis", "+OK\r\n$3\r\nabc\r\n$-1\r\n:7\r\n-ERR no\r\n"),
        ("memcached", "STORED\r\nVALUE k 0 3\r\nabc\r\nEND\r\nEND\r\nSERVER_ERROR no\r\n"),
    ];
    let with = |choice: u8, text: &str| [&[choice, 7], text.as_bytes()].concat();
    let requests = requests.iter().enumerate().map(|(i, (name, text))| (*name, with(i as u8 * 2, text)));
    requests.chain(responses.iter().map(|(name, text)| (*name, with(1, text)))).collect()
}
