use super::*;
use proptest::prelude::*;

const ROOM: HeaderBuffer<'static> = [const { MaybeUninit::uninit() }; HEADERS_MAX];

/// Returns a summary of the parsed request, or the status that refuses it.
fn outcome(head: &str) -> Result<String, u16> {
    let mut buffer = ROOM;
    parse(head.as_bytes(), &mut buffer)
        .map(|r| {
            let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
            format!(
                "{:?} {}{} keep={} {:?}{}",
                r.method,
                text(r.path),
                r.query.map_or(String::new(), |q| format!("?{}", text(q))),
                r.keep_alive,
                r.body,
                if r.expects_continue { " 100" } else { "" }
            )
        })
        .map_err(Status::code)
}

fn scan(bytes: &[u8]) -> Result<Option<usize>, u16> {
    Scanner::default().find_end(bytes, &Limits::default()).map_err(Status::code)
}

#[test]
fn valid_requests_are_parsed() {
    let table = [
        ("GET / HTTP/1.1\r\nHost: a\r\n\r\n", "Get / keep=true None"),
        ("GET / HTTP/1.0\r\n\r\n", "Get / keep=false None"),
        ("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "Get / keep=true None"),
        ("GET / HTTP/1.0\r\nConnection: Keep-Alive, close\r\n\r\n", "Get / keep=false None"),
        (
            "HEAD /a?b=c?d HTTP/1.1\r\nhOsT: a:80\r\nConnection: foo , CLOSE\r\n\r\n",
            "Head /a?b=c?d keep=false None",
        ),
        ("OPTIONS * HTTP/1.1\r\nHost:\r\n\r\n", "Options * keep=true None"),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n", "Other / keep=true Length(12)"),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", "Other / keep=true None"),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\nExpect: 100-Continue\r\n\r\n",
            "Other / keep=true Chunked 100",
        ),
        ("CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "Other a:443 keep=true None"),
        ("GET http://a HTTP/1.1\r\nHost: b\r\n\r\n", "Get / keep=true None"),
        ("GET HTTP://a:80/x?y HTTP/1.1\r\nHost: b\r\n\r\n", "Get /x?y keep=true None"),
        ("GET http://a?y HTTP/1.1\r\nHost: b\r\n\r\n", "Get /?y keep=true None"),
        ("\r\nGET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", "Get / keep=true None"),
        ("GET / HTTP/1.0\r\nExpect: tea\r\n\r\n", "Get / keep=false None"),
    ];
    for (head, expected) in table {
        assert_eq!(outcome(head).as_deref(), Ok(expected), "{head:?}");
    }
}

#[test]
fn invalid_requests_are_refused() {
    let table = [
        // syntax
        ("GET /\r\n\r\n", 400),
        ("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET / HTTP/1.1 \r\nHost: a\r\n\r\n", 400),
        ("GET / http/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET / HTTP/11\r\nHost: a\r\n\r\n", 400),
        ("GE(T / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n", 400), // obs-fold
        ("GET / HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nNonsense\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\n: empty\r\n\r\n", 400),
        // version
        ("GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        ("GET / HTTP/1.2\r\nHost: a\r\n\r\n", 505),
        ("GET / HTTP/0.9\r\n\r\n", 505),
        ("PRI * HTTP/2.0\r\n\r\n", 505),
        ("\r\nGET / HTTP/3.0\r\nHost: a\r\n\r\n", 505),
        // method and target
        ("BREW / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        ("get / HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        ("GET * HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET a HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET https://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET http:///x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET http://u@a/x HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        ("GET /#top HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        // Host
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        ("GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
        // framing
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 1\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x1\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n", 413),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", 400),
        (
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
        ),
        ("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", 501),
        ("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nExpect: tea\r\n\r\n", 417),
    ];
    for (head, status) in table {
        assert_eq!(outcome(head), Err(status), "{head:?}");
    }
}

#[test]
fn too_many_fields_are_431() {
    let head = |n: usize| format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: y\r\n".repeat(n));
    assert!(outcome(&head(HEADERS_MAX - 1)).is_ok());
    assert_eq!(outcome(&head(HEADERS_MAX)), Err(431));
}

#[test]
fn the_first_empty_line_ends_the_head() {
    assert_eq!(scan(b""), Ok(None));
    assert_eq!(scan(b"GET / HTTP/1.1\r\nHost: a\r\n"), Ok(None));
    assert_eq!(scan(b"GET / HTTP/1.1\r\nHost: a\r\n\r"), Ok(None));
    assert_eq!(scan(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET"), Ok(Some(27)));
    assert_eq!(scan(b"\r\n\r\nG\r\n\r\n"), Ok(Some(9)));
    assert_eq!(scan(b"\r\n\r\n\r\n\r\n\r\nG\r\n\r\n"), Err(400));
}

#[test]
fn a_bare_lf_is_refused_anywhere() {
    for bytes in ["\n", "GET / HTTP/1.1\n", "GET / HTTP/1.1\r\nHost: a\n", "GET / HTTP/1.1\r\n\n"] {
        assert_eq!(scan(bytes.as_bytes()), Err(400), "{bytes:?}");
    }
}

#[test]
fn each_limit_has_its_status() {
    let limits = Limits { line_bytes_max: 50, head_bytes_max: 100, body_bytes_max: 0 };
    let scan = |bytes: String| Scanner::default().find_end(bytes.as_bytes(), &limits).map_err(Status::code);
    assert_eq!(scan("x".repeat(50)), Ok(None));
    assert_eq!(scan("x".repeat(51)), Err(414));
    assert_eq!(scan(format!("{}\r\n", "x".repeat(48))), Ok(None));
    assert_eq!(scan(format!("{}\r\n", "x".repeat(49))), Err(414));
    assert_eq!(scan(format!("GET\r\n{}", "x".repeat(95))), Ok(None));
    assert_eq!(scan(format!("GET\r\n{}", "x".repeat(96))), Err(431));
    assert_eq!(scan(format!("GET\r\n{}\r\n\r\n", "x".repeat(91))), Ok(Some(100)));
    assert_eq!(scan(format!("GET\r\n{}\r\n\r\n", "x".repeat(92))), Err(431));
}

/// Fragments of requests, so that random input reaches deep into the parser.
fn fragment() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(b"GET / HTTP/1.1\r\n".to_vec()),
        Just(b"Host: a\r\n".to_vec()),
        Just(b"\r\n".to_vec()),
        Just(b"\n".to_vec()),
        Just(b"Content-Length: 3\r\n".to_vec()),
        Just(b"Transfer-Encoding: chunked\r\n".to_vec()),
        Just(b"Range: bytes=0-\r\n".to_vec()),
        proptest::collection::vec(any::<u8>(), 0..20),
    ]
}

/// Parses with [`Scanner`] and [`parse`]: returns the length of the head, and a summary of the request or the
/// status; `None` if more bytes are needed.
fn parse_by_scanner(bytes: &[u8], limits: &Limits) -> Option<(usize, Result<String, Status>)> {
    let end = Scanner::default().find_end(bytes, limits).ok()??;
    let mut buffer = ROOM;
    Some((end, parse(&bytes[..end], &mut buffer).map(|r| format!("{r:?}"))))
}

#[test]
fn only_plain_requests_are_parsed_in_place() {
    let at_once = |bytes: &str| {
        let mut buffer = ROOM;
        parse_complete_head(bytes.as_bytes(), &mut buffer, &Limits::default()).map(|(len, _)| len)
    };
    assert_eq!(at_once("GET / HTTP/1.1\r\nHost: a\r\n\r\nGET"), Some(27));
    for peculiar in [
        "\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET / HTTP/1.1\nHost: a\n\n",
        "GET / HTTP/1.1\r\nHost: a\r\n\n",
        "GET / HTTP/1.1\r\nHost: a\r\n",
        "",
    ] {
        assert_eq!(at_once(peculiar), None, "{peculiar:?}");
    }
}

#[test]
fn any_line_end_respects_the_size_limit() {
    let limits = Limits { line_bytes_max: 40, head_bytes_max: 90, body_bytes_max: 0 };
    let bytes = format!("GET / HTTP/1.1\r\nHost: {}\n", "a".repeat(69));
    assert_eq!(bytes.len(), 92);
    assert_eq!(Scanner::default().find_end(bytes.as_bytes(), &limits), Err(Status::HeaderFieldsTooLarge));
    assert_eq!(
        Scanner::default().find_end(&bytes.as_bytes()[..91], &limits),
        Err(Status::HeaderFieldsTooLarge)
    );
    let bytes = bytes.replace("aa\n", "\n");
    assert_eq!(Scanner::default().find_end(bytes.as_bytes(), &limits), Err(Status::BadRequest));
}

proptest! {
    #[test]
    fn both_parsers_agree(parts in proptest::collection::vec(fragment(), 0..8), small: bool) {
        let bytes = parts.concat();
        let max = if small { 40 } else { 1000 };
        let limits = Limits { line_bytes_max: max, head_bytes_max: 2 * max, body_bytes_max: 0 };
        let mut buffer = ROOM;
        if let Some((len, request)) = parse_complete_head(&bytes, &mut buffer, &limits) {
            let at_once = Some((len, request.map(|r| format!("{r:?}"))));
            prop_assert_eq!(at_once, parse_by_scanner(&bytes, &limits));
        }
    }

    #[test]
    fn fragmentation_does_not_change_the_scan_result(
        parts in proptest::collection::vec(fragment(), 0..8),
        step in 1usize..40,
    ) {
        let bytes = parts.concat();
        let limits = Limits { line_bytes_max: 40, head_bytes_max: 90, body_bytes_max: 0 };
        let whole = Scanner::default().find_end(&bytes, &limits);
        let mut scanner = Scanner::default();
        let mut pieces = Ok(None);
        let mut end = 0;
        while end < bytes.len() && pieces == Ok(None) {
            end = (end + step).min(bytes.len());
            pieces = scanner.find_end(&bytes[..end], &limits);
        }
        prop_assert_eq!(pieces, whole);
    }

    #[test]
    fn any_head_parses_without_panic(parts in proptest::collection::vec(fragment(), 0..8)) {
        let bytes = parts.concat();
        if let Ok(Some(end)) = Scanner::default().find_end(&bytes, &Limits::default()) {
            let mut buffer = ROOM;
            let _ = parse(&bytes[..end], &mut buffer);
        }
    }
}
