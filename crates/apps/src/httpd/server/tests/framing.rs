//! Every response byte for byte, and the boundaries of responses under any fragmentation.

use super::*;

/// Sends one request and returns the whole output.
fn exchange(request: &str) -> String {
    let outer = site_directory();
    let mut fixture = fixture(&outer);
    fixture.feed(request.as_bytes());
    let closes = fixture.has_ended();
    let output = fixture.take_output();
    assert_eq!(closes, output.contains("\r\nConnection: close\r\n"), "{output}");
    output
}

fn error(line: &str, field: &str, connection: &str) -> String {
    format!(
        "HTTP/1.1 {line}\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nServer: ginnel\r\n{field}\
         Content-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n{connection}\r\n{line}\n",
        line.len() + 1
    )
}

const CLOSE: &str = "Connection: close\r\n";

#[test]
fn files_are_answered_byte_for_byte() {
    let head = |connection: &str| {
        format!(
            "{HEAD_200}Content-Type: text/html; charset=utf-8\r\nContent-Length: 11\r\n{VALIDATORS_11}\
             Accept-Ranges: bytes\r\n{connection}\r\n"
        )
    };
    let part = |range: &str, len: u64, body: &str| {
        format!(
            "HTTP/1.1 206 Partial Content\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nServer: ginnel\r\n\
             Content-Type: text/html; charset=utf-8\r\nContent-Range: bytes {range}/11\r\nContent-Length: {len}\r\n\
             {VALIDATORS_11}Accept-Ranges: bytes\r\n\r\n{body}"
        )
    };
    let body = "<p>home</p>";
    let table = [
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", head("") + body),
        ("GET /index.html?x HTTP/1.1\r\nHost: a\r\n\r\n", head("") + body),
        ("GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n", head("") + body),
        ("HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", head("")),
        ("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", head(CLOSE) + body),
        ("GET / HTTP/1.0\r\n\r\n", head(CLOSE) + body),
        ("HEAD / HTTP/1.0\r\n\r\n", head(CLOSE)),
        ("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", head("Connection: keep-alive\r\n") + body),
        ("GET / HTTP/1.1\r\nHost: a\r\nRange: bytes=3-6\r\n\r\n", part("3-6", 4, "home")),
        ("GET / HTTP/1.1\r\nHost: a\r\nRange: bytes=-1\r\n\r\n", part("10-10", 1, ">")),
        ("GET / HTTP/1.1\r\nHost: a\r\nRange: bytes=0-1,4-5\r\n\r\n", head("") + body),
        ("HEAD / HTTP/1.1\r\nHost: a\r\nRange: bytes=0-1\r\n\r\n", head("")),
        (
            "GET / HTTP/1.1\r\nHost: a\r\nIf-Modified-Since: Sun, 06 Nov 1994 08:32:57 GMT\r\n\r\n",
            format!(
                "HTTP/1.1 304 Not Modified\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\nServer: ginnel\r\n\
                 {VALIDATORS_11}\r\n"
            ),
        ),
        ("GET /empty.txt HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", {
            let validators = VALIDATORS_11.replace("-b\"", "-0\"");
            format!(
                "{HEAD_200}Content-Type: text/plain; charset=utf-8\r\nContent-Length: 0\r\n{validators}\
                 Accept-Ranges: bytes\r\n{CLOSE}\r\n"
            )
        }),
        (
            "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
            format!("{HEAD_200}Allow: GET, HEAD, OPTIONS\r\nContent-Length: 0\r\n\r\n"),
        ),
    ];
    for (request, expected) in table {
        assert_eq!(exchange(request), expected, "{request:?}");
    }
}

#[test]
fn errors_are_answered_byte_for_byte() {
    let too_long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(9000));
    let too_large = format!("GET / HTTP/1.1\r\nX: {}\r\n", "x".repeat(17_000));
    let allow = "Allow: GET, HEAD, OPTIONS\r\n";
    let table = [
        ("GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n", error("404 Not Found", "", "")),
        ("GET /nothing HTTP/1.0\r\n\r\n", error("404 Not Found", "", CLOSE)),
        ("POST / HTTP/1.1\r\nHost: a\r\n\r\n", error("405 Method Not Allowed", allow, "")),
        (
            "GET /dir%20with%20space?a=b HTTP/1.1\r\nHost: a\r\n\r\n",
            error("301 Moved Permanently", "Location: /dir%20with%20space/?a=b\r\n", ""),
        ),
        (
            "GET //dir%20with%20space/./sub/.. HTTP/1.1\r\nHost: a\r\n\r\n",
            exchange("GET /dir%20with%20space/ HTTP/1.1\r\nHost: a\r\n\r\n"),
        ),
        ("GET / HTTP/1.1\r\nHost: a\r\nIf-Match: \"x\"\r\n\r\n", error("412 Precondition Failed", "", "")),
        (
            "GET / HTTP/1.1\r\nHost: a\r\nRange: bytes=11-\r\n\r\n",
            error("416 Range Not Satisfiable", "Content-Range: bytes */11\r\n", ""),
        ),
        ("GET /../x HTTP/1.1\r\nHost: a\r\n\r\n", error("400 Bad Request", "", "")),
        ("GET / HTTP/1.1\r\n\r\n", error("400 Bad Request", "", CLOSE)),
        ("GET / HTTP/1.1\nHost: a\n\n", error("400 Bad Request", "", CLOSE)),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n folded\r\n\r\n", error("400 Bad Request", "", CLOSE)),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n",
            error("413 Content Too Large", "", CLOSE),
        ),
        (&too_long, error("414 URI Too Long", "", CLOSE)),
        ("GET / HTTP/1.1\r\nHost: a\r\nExpect: tea\r\n\r\n", error("417 Expectation Failed", "", CLOSE)),
        (&too_large, error("431 Request Header Fields Too Large", "", CLOSE)),
        ("BREW / HTTP/1.1\r\nHost: a\r\n\r\n", error("501 Not Implemented", "", CLOSE)),
        ("GET / HTTP/3.0\r\nHost: a\r\n\r\n", error("505 HTTP Version Not Supported", "", CLOSE)),
    ];
    for (request, expected) in table {
        assert_eq!(exchange(request), expected, "{request:?}");
    }
}

#[test]
fn an_error_to_head_has_no_body() {
    for request in
        ["HEAD /nothing HTTP/1.1\r\nHost: a\r\n\r\n", "HEAD / HTTP/1.1\r\n\r\n", "HEAD / HTTP/1.1\n"]
    {
        let output = exchange(request);
        assert!(output.starts_with("HTTP/1.1 4") && output.ends_with("\r\n\r\n"), "{output}");
        assert_eq!(output.matches("\r\n\r\n").count(), 1, "{output}");
    }
}

#[test]
fn no_path_leaves_the_root() {
    for path in [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "/%2e%2e%2fsecret.txt",
        "/leak.txt",
        "//../secret.txt",
        "/dir%20with%20space/../../secret.txt",
        "/..\\secret.txt",
        "/..%5csecret.txt",
        "/%252e%252e/secret.txt",
        "/index.html/../../secret.txt",
        "/secret.txt%00.html",
        "/.%00./secret.txt",
        "/%c0%ae%c0%ae/secret.txt",
    ] {
        let output = exchange(&format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert!(
            output.starts_with("HTTP/1.1 400 ") || output.starts_with("HTTP/1.1 404 "),
            "{path}: {output}"
        );
        assert!(!output.contains("secret"), "{path}");
    }
}

/// A response, parsed independently of the server's code.
#[derive(Debug, PartialEq, Eq)]
struct ParsedResponse {
    status: u16,
    body: Vec<u8>,
    close: bool,
}

/// Splits a stream of responses by their framing. `is_head(i)` says whether the i-th request was HEAD. Panics
/// if anything is malformed or left over.
fn split_responses(mut stream: &[u8], is_head: impl Fn(usize) -> bool) -> Vec<ParsedResponse> {
    let mut responses = Vec::new();
    while !stream.is_empty() {
        let text = String::from_utf8_lossy(stream);
        let end = text.find("\r\n\r\n").expect("a whole head");
        let mut lines = text[..end].split("\r\n");
        let status: u16 =
            lines.next().unwrap().strip_prefix("HTTP/1.1 ").expect("a status line")[..3].parse().unwrap();
        let fields: Vec<(&str, &str)> = lines.map(|l| l.split_once(": ").expect("a field")).collect();
        let value = |name| fields.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
        let length: usize = value("Content-Length").map_or(0, |v| v.parse().unwrap());
        let close = value("Connection") == Some("close");
        assert!(status == 304 || status == 100 || value("Content-Length").is_some());
        stream = &stream[end + 4..];
        if status == 100 {
            continue;
        }
        let length = if is_head(responses.len()) { 0 } else { length };
        responses.push(ParsedResponse { status, body: stream[..length].to_vec(), close });
        stream = &stream[length..];
        assert!(!close || stream.is_empty(), "nothing follows a response that closes");
    }
    responses
}

/// Generates a request, whether it is HEAD, and the expected status and body.
fn request() -> impl Strategy<Value = (String, bool, u16, Vec<u8>)> {
    let large = large_file();
    let ok = |path: &'static str, body: &[u8]| {
        let body = body.to_vec();
        prop_oneof![
            Just((format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n"), false, 200, body.clone())),
            Just((format!("HEAD {path} HTTP/1.1\r\nHost: a\r\n\r\n"), true, 200, vec![])),
            (0..body.len().max(1), 0..body.len().max(1)).prop_map(move |(a, b)| {
                let (first, last) = (a.min(b), a.max(b));
                let text = format!("GET {path} HTTP/1.1\r\nHost: a\r\nRange: bytes={first}-{last}\r\n\r\n");
                (text, false, 206, body[first..=last].to_vec())
            }),
        ]
    };
    prop_oneof![
        4 => ok("/", b"<p>home</p>"),
        4 => ok("/large.bin", &large),
        1 => Just(("GET /no HTTP/1.1\r\nHost: a\r\n\r\n".to_owned(), false, 404, b"404 Not Found\n".to_vec())),
        1 => (0usize..300).prop_map(|n| {
            let text = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {n}\r\n\r\n{}", "G".repeat(n));
            (text, false, 405, b"405 Method Not Allowed\n".to_vec())
        }),
        1 => (1usize..300).prop_map(|n| {
            let text = format!(
                "GET / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n\
                 {n:x};e\r\n{}\r\n0\r\nT: u\r\n\r\n",
                "\r".repeat(n)
            );
            (text, false, 200, b"<p>home</p>".to_vec())
        }),
        1 => Just((
            "GET / HTTP/1.1\r\nHost: a\r\nIf-None-Match: *\r\n\r\n".to_owned(), false, 304, vec![]
        )),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_fragmentation_keeps_responses_in_order(
        requests in proptest::collection::vec(request(), 1..8),
        pieces in proptest::collection::vec(1usize..200, 1..20),
        rooms in proptest::collection::vec(1usize..100_000, 1..20),
        streamed: bool,
    ) {
        let outer = site_directory();
        let mut fixture = if streamed { streaming_fixture(&outer) } else { fixture(&outer) };
        fixture.net.room = 0;
        let wire: Vec<u8> = requests.iter().flat_map(|r| r.0.bytes()).collect();
        let (mut at, mut turn) = (0, 0);
        while at < wire.len() {
            let end = (at + pieces[turn % pieces.len()]).min(wire.len());
            fixture.feed(&wire[at..end]);
            fixture.make_room(rooms[turn % rooms.len()]);
            (at, turn) = (end, turn + 1);
        }
        for _ in 0..10_000 {
            if fixture.unread.is_empty() && fixture.server.slot(CONN).unwrap().phase == ConnectionPhase::Idle {
                break;
            }
            fixture.make_room(50_000);
        }
        let responses = split_responses(&fixture.net.output, |i| requests[i].1);
        prop_assert_eq!(responses.len(), requests.len());
        for (response, (_, _, status, body)) in responses.iter().zip(&requests) {
            prop_assert_eq!((response.status, response.close), (*status, false));
            prop_assert!(response.body == *body);
        }
        prop_assert!(!fixture.has_ended());
        prop_assert_eq!(fixture.server.exchanges.in_use(), 0);
    }

    #[test]
    fn any_input_gives_well_formed_responses(
        parts in proptest::collection::vec(
            prop_oneof![
                Just(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec()),
                Just(b"HEAD".to_vec()),
                Just(b"GET /large.bin HTTP/1.1\r\n".to_vec()),
                Just(b"Host: a\r\n".to_vec()),
                Just(b"Range: bytes=5-\r\n".to_vec()),
                Just(b"Transfer-Encoding: chunked\r\n".to_vec()),
                Just(b"Content-Length: 5\r\n".to_vec()),
                Just(b"Expect: 100-continue\r\n".to_vec()),
                Just(b"\r\n".to_vec()),
                Just(b"3\r\nabc\r\n0\r\n\r\n".to_vec()),
                proptest::collection::vec(any::<u8>(), 0..30),
            ],
            0..12,
        ),
        step in 1usize..100,
        end in 0u8..3,
    ) {
        let outer = site_directory();
        let mut fixture = fixture(&outer);
        let wire = parts.concat();
        for chunk in wire.chunks(step) {
            fixture.feed(chunk);
        }
        prop_assert!(fixture.unread.is_empty());
        match end {
            0 => fixture.close_by_peer(),
            1 => fixture.pass_seconds(200),
            _ => {}
        }
        // Only the server knows here which requests it answered, and a HEAD request among them would be
        // missing its body.
        if !wire.windows(4).any(|w| w == b"HEAD") {
            for response in split_responses(&fixture.net.output, |_| false) {
                prop_assert!((200..=505).contains(&response.status));
            }
        }
        fixture.server.closed(CONN);
        prop_assert_eq!(fixture.server.exchanges.in_use(), 0);
    }
}
