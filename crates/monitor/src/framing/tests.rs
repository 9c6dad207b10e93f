use super::*;
use crate::rules::{ByteTest, Endianness, LengthPrefix};

/// Returns the messages of a stream that arrives in parts of `step` bytes, with the position of each end; the
/// last entry is `None` if the framing is lost.
fn messages(
    protocol: &Protocol,
    direction: usize,
    bytes: &[u8],
    method: RequestMethod,
    step: usize,
) -> Vec<Option<(MessageKind, usize)>> {
    let (mut framing, mut found, mut at) = (Framing::default(), Vec::new(), 0);
    for part in bytes.chunks(step) {
        let mut used = 0;
        while used < part.len() {
            let Ok(step) = framing.advance(protocol, direction, &part[used..], method) else {
                found.push(None);
                return found;
            };
            assert!(step.used > 0);
            used += step.used;
            if step.is_complete {
                found.push(Some((framing.kind(), at + used)));
                assert!(framing.is_at_start());
            }
        }
        at += part.len();
    }
    if framing.end() {
        found.push(Some((framing.kind(), at)));
    }
    found
}

const REQUEST_KIND: MessageKind = MessageKind::Request { is_high: false, method: RequestMethod::Other };

/// A stream, and kind and length of each message in it.
type Case<'a> = (&'a [u8], &'a [(MessageKind, usize)]);

/// Checks that the streams consist of messages of these kinds and lengths, however they are cut.
fn check(protocol: &Protocol, direction: usize, cases: &[Case<'_>]) {
    check_responses(protocol, direction, RequestMethod::Other, cases);
}

/// As [`check`], for responses to requests with this method.
fn check_responses(protocol: &Protocol, direction: usize, method: RequestMethod, cases: &[Case<'_>]) {
    for (bytes, expected) in cases {
        let mut end = 0;
        let expected: Vec<_> = expected
            .iter()
            .map(|(kind, len)| {
                end += len;
                Some((*kind, end))
            })
            .collect();
        for step in [1, 2, 3, 7, 100_000] {
            let text = String::from_utf8_lossy(bytes);
            let found = messages(protocol, direction, bytes, method, step);
            assert_eq!(found, expected, "{text:?} in parts of {step}");
        }
    }
}

fn check_lost(protocol: &Protocol, direction: usize, cases: &[&[u8]]) {
    for bytes in cases {
        for step in [1, 5, 100_000] {
            let text = String::from_utf8_lossy(&bytes[..bytes.len().min(60)]);
            let found = messages(protocol, direction, bytes, RequestMethod::Other, step);
            assert_eq!(found.last(), Some(&None), "{text:?} by {step}");
        }
    }
}

// limit: bytes of a monitored message's head
#[test]
fn http_requests_are_framed() {
    let with = |method| MessageKind::Request { is_high: false, method };
    let two = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET /bc HTTP/1.1\r\nHost: x\r\n\r\n";
    check(
        &Protocol::Http,
        REQUEST,
        &[
            (two, &[(REQUEST_KIND, 28), (REQUEST_KIND, 29)]),
            (b"HEAD / HTTP/1.1\r\n\r\n", &[(with(RequestMethod::Head), 19)]),
            (b"CONNECT a:443 HTTP/1.1\r\n\r\n", &[(with(RequestMethod::Connect), 26)]),
            (b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", &[(REQUEST_KIND, 41)]),
            (
                b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
                &[(REQUEST_KIND, 60)],
            ),
            (
                b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                &[(REQUEST_KIND, 77)],
            ),
            (
                b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, \r\nTransfer-Encoding:\r\nContent-Length: x\r\n\r\n0\r\n\r\n",
                &[(REQUEST_KIND, 93)],
            ),
            (b"\r\nGET / HTTP/1.1\r\n\r\n", &[(REQUEST_KIND, 20)]),
            (b"GET / HTTP/1.1\r\n", &[]),
        ],
    );
    let long = [&b"GET / HTTP/1.1\r\n"[..], &b"A: b\r\n".repeat(HEAD_BYTES_MAX / 6)].concat();
    check_lost(&Protocol::Http, REQUEST, &[b"\x16\x03\x01\x02\x00", b"hello world\r\n\r\n", &long]);
}

#[test]
fn http_responses_are_framed() {
    use MessageKind::{LastResponse, Response, Unsolicited};
    check(
        &Protocol::Http,
        RESPONSE,
        &[
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", &[(Response, 40)]),
            (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No\r\n\r\n", &[(Unsolicited, 25), (Response, 19)]),
            (b"HTTP/1.1 304 Not\r\nContent-Length: 99\r\n\r\n", &[(Response, 40)]),
            (b"HTTP/1.1 101 Switching\r\n\r\n", &[(LastResponse, 26)]),
            (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", &[(Response, 32)]),
            (
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2;x=y\r\nab\r\n0\r\nT: u\r\n\r\n",
                &[(Response, 75)],
            ),
        ],
    );
    check_lost(
        &Protocol::Http,
        RESPONSE,
        &[
            b"SSH-2.0-x\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        ],
    );
}

#[test]
fn http_responses_depend_on_the_method() {
    use MessageKind::{LastResponse, Response, Unsolicited};
    let found = &b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"[..];
    let refused = &b"HTTP/1.1 407 No\r\nContent-Length: 2\r\n\r\nab"[..];
    let switches = &b"HTTP/1.1 101 Switching\r\n\r\n"[..];
    check_responses(
        &Protocol::Http,
        RESPONSE,
        RequestMethod::Head,
        &[(found, &[(Response, 38)]), (&refused[..38], &[(Response, 38)]), (switches, &[(LastResponse, 26)])],
    );
    check_responses(
        &Protocol::Http,
        RESPONSE,
        RequestMethod::Connect,
        &[
            (found, &[(LastResponse, 38)]),
            (b"HTTP/1.1 204 No\r\n\r\n", &[(LastResponse, 19)]),
            (refused, &[(Response, 40)]),
            (b"HTTP/1.1 100 Go\r\n\r\n", &[(Unsolicited, 19)]),
        ],
    );
}

#[test]
fn redis_commands_and_replies_are_framed() {
    use MessageKind::{OneWay, Response, Unsolicited};
    check(
        &Protocol::Redis,
        REQUEST,
        &[
            (b"*2\r\n$3\r\nGET\r\n$1\r\na\r\nPING\r\n", &[(REQUEST_KIND, 20), (REQUEST_KIND, 6)]),
            (b"*1\r\n$4\r\n\r\n\r\n\r\n\r\n", &[(REQUEST_KIND, 14), (OneWay { is_high: false }, 2)]),
            (b"*0\r\n", &[(OneWay { is_high: false }, 4)]),
        ],
    );
    check(
        &Protocol::Redis,
        RESPONSE,
        &[
            (b"+OK\r\n:1\r\n-ERR x\r\n$-1\r\n$0\r\n\r\n", &[5, 4, 8, 5, 6].map(|len| (Response, len))),
            (b"*2\r\n*1\r\n:1\r\n$1\r\na\r\n*0\r\n", &[(Response, 19), (Response, 4)]),
            (b"%1\r\n+a\r\n#t\r\n>1\r\n+m\r\n_\r\n", &[(Response, 12), (Unsolicited, 8), (Response, 3)]),
            (b"|1\r\n+k\r\n+v\r\n~1\r\n,1.5\r\n", &[(Response, 22)]),
        ],
    );
    check_lost(
        &Protocol::Redis,
        REQUEST,
        &[b"\x16\x03\x01\r\n", b"*x\r\n", b"*1\r\n%%\r\n", b"*99999999999999\r\n"],
    );
    check_lost(&Protocol::Redis, RESPONSE, &[b"GET\r\n", b"$99999999999\r\n", b":1\n"]);
}

#[test]
fn iot_messages_have_labels() {
    let protocol = Protocol::Iot { message_bytes: 10 };
    let message = |kind, label| [0, 0, 0, 1, 9, kind, label, 0, 0, 0];
    let stream = [message(1, 2), message(0, 2), message(0, 0), message(1, 0)].concat();
    let kinds = [
        MessageKind::Request { is_high: true, method: RequestMethod::Other },
        MessageKind::OneWay { is_high: true },
        MessageKind::OneWay { is_high: false },
        REQUEST_KIND,
    ];
    check(&protocol, REQUEST, &[(&stream, &kinds.map(|kind| (kind, 10)))]);
    let answer = &ginnel_apps::iot::message::ANSWER_OK[..];
    check(&protocol, RESPONSE, &[(&answer.repeat(2), &[(MessageKind::Response, 146); 2])]);
    check_lost(&protocol, REQUEST, &[&message(2, 0)]);
    check_lost(&protocol, RESPONSE, &[b"HTTP/1.1 200 OK\r\n"]);
}

#[test]
fn length_prefixes_follow_their_rule() {
    let prefix = LengthPrefix {
        offset_bytes: 1,
        width_bytes: 2,
        endianness: Endianness::Little,
        added_bytes: 3,
        message_bytes_max: 1000,
        high: Some(ByteTest { offset_bytes: 3, value: 7 }),
        one_way: Some(ByteTest { offset_bytes: 0, value: b'h' }),
    };
    let big = LengthPrefix { endianness: Endianness::Big, offset_bytes: 0, ..prefix };
    let protocol = Protocol::LengthPrefixed(Box::new(LengthPrefixRule { request: prefix, response: big }));
    let high = MessageKind::Request { is_high: true, method: RequestMethod::Other };
    check(
        &protocol,
        REQUEST,
        &[(
            b"r\x02\x00\x07xr\x00\x00h\x01\x00zr\x01\x00\x08",
            &[(high, 5), (REQUEST_KIND, 3), (MessageKind::OneWay { is_high: false }, 4), (REQUEST_KIND, 4)],
        )],
    );
    check(
        &protocol,
        RESPONSE,
        &[(b"\x00\x02abc\x00\x00h", &[(MessageKind::Response, 5), (MessageKind::Response, 3)])],
    );
    check_lost(&protocol, REQUEST, &[b"r\xff\xff\x00"]);
}

#[test]
fn missing_bytes_within_a_body_are_skipped() {
    let mut framing = Framing::default();
    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n";
    framing.advance(&Protocol::Http, RESPONSE, head, RequestMethod::Other).unwrap();
    assert_eq!((framing.skip(99), framing.skip(1)), (Ok(false), Ok(true)));
    assert!(framing.is_at_start());
    framing.advance(&Protocol::Http, RESPONSE, head, RequestMethod::Other).unwrap();
    assert_eq!(framing.skip(101), Err(LostFraming));
    framing.reset();
    assert_eq!(framing.skip(1), Err(LostFraming));
}
