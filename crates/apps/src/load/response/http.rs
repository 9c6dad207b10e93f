//! Parses just enough of HTTP to find the status and the end of each response (RFC 9112 §6.3).

use super::{BadResponse, ParseProgress, Parser, ParserState, PartialResponses, RETAINED_BYTES_MAX};
use crate::httpd::head::trim;
use crate::resp::decimal;

/// Longest head in bytes; servers send a few hundred.
// limit: bytes of a response's head
pub const HEAD_BYTES_MAX: usize = 64 << 10;
/// How the end of a body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseFraming {
    /// Content-Length.
    Length(u64),
    /// Transfer-Encoding: chunked.
    Chunked,
    /// The body ends with the connection.
    UntilClose,
}

/// The parsed head of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseHead {
    /// Status.
    pub status: u16,
    /// Framing of the body; responses to HEAD and some statuses have none whatever this says.
    pub framing: ResponseFraming,
    /// True if the server closes the connection after the response.
    pub close: bool,
}

impl Parser {
    /// Parses further bytes. With `to_head` the response answers a HEAD request and has no body, whatever its
    /// fields say.
    pub(super) fn read_http(
        &mut self,
        bytes: &[u8],
        to_head: bool,
        records: &mut PartialResponses,
    ) -> Result<ParseProgress, BadResponse> {
        let mut used = 0;
        while used < bytes.len() {
            let rest = &bytes[used..];
            match self.state {
                ParserState::Start => match records.last.head(rest)? {
                    Some((len, head)) => {
                        used += len;
                        if self.begin_body(head, to_head, records) {
                            return Ok(self.complete(used));
                        }
                    }
                    None => {
                        self.partial = records.take();
                        records.get(self.partial).bytes.extend_from_slice(rest);
                        self.state = ParserState::Head;
                        return Ok(ParseProgress::More);
                    }
                },
                ParserState::Head => {
                    let Some((len, head)) = self.more_of_head(rest, records)? else {
                        return Ok(ParseProgress::More);
                    };
                    used += len;
                    if self.begin_body(head, to_head, records) {
                        return Ok(self.complete(used));
                    }
                }
                ParserState::Length => {
                    let here = self.left.min(rest.len() as u64);
                    self.left -= here;
                    used += here as usize;
                    if self.left == 0 {
                        return Ok(self.complete(used));
                    }
                }
                ParserState::Chunked => {
                    let reader = &mut records.get(self.partial).body;
                    used += reader.read(rest).map_err(|_| BadResponse)?;
                    if reader.is_done() {
                        self.release(records);
                        return Ok(self.complete(used));
                    }
                }
                ParserState::UntilClose => used = bytes.len(),
                // States of other protocols.
                ParserState::Closing | ParserState::ClosingHead => return Err(BadResponse),
            }
        }
        Ok(ParseProgress::More)
    }

    /// Returns true if the response is complete with its head.
    fn begin_body(&mut self, head: ResponseHead, to_head: bool, records: &mut PartialResponses) -> bool {
        if (100..200).contains(&head.status) {
            self.state = ParserState::Start; // an interim response; the real one follows
            return false;
        }
        (self.status, self.close) = (head.status, head.close);
        if to_head || matches!(head.status, 204 | 304) {
            return true;
        }
        match head.framing {
            ResponseFraming::Length(0) => return true,
            ResponseFraming::Length(left) => (self.state, self.left) = (ParserState::Length, left),
            ResponseFraming::Chunked => {
                self.partial = records.take();
                self.state = ParserState::Chunked;
            }
            ResponseFraming::UntilClose => {
                self.state = ParserState::UntilClose;
                self.close = true;
            }
        }
        false
    }

    /// Appends to the head in the record. If its end has arrived, returns how many of `bytes` belong to it,
    /// and the parsed head.
    fn more_of_head(
        &mut self,
        bytes: &[u8],
        records: &mut PartialResponses,
    ) -> Result<Option<(usize, ResponseHead)>, BadResponse> {
        let buffer = &mut records.get(self.partial).bytes;
        let before = buffer.len();
        let room = HEAD_BYTES_MAX.saturating_sub(before).min(bytes.len());
        buffer.extend_from_slice(&bytes[..room]);
        match parse_head(buffer)? {
            Some((len, head)) => {
                self.release(records);
                Ok(Some((len - before, head)))
            }
            None if room < bytes.len() => Err(BadResponse),
            None => Ok(None),
        }
    }
}

/// The last parsed head. Within a second a server sends equal heads for one page, and comparing is much
/// faster than parsing.
#[derive(Debug, Default)]
pub(super) struct LastHead {
    bytes: Vec<u8>,
    head: Option<ResponseHead>,
}

impl LastHead {
    /// Returns the result of [`parse_head`], without parsing if the head equals the last one.
    fn head(&mut self, bytes: &[u8]) -> Result<Option<(usize, ResponseHead)>, BadResponse> {
        if let Some(head) = self.head.filter(|_| bytes.starts_with(&self.bytes)) {
            return Ok(Some((self.bytes.len(), head)));
        }
        let parsed = parse_head(bytes)?;
        if let Some((len, head)) = parsed.filter(|(len, _)| *len <= RETAINED_BYTES_MAX) {
            self.bytes.clear();
            self.bytes.extend_from_slice(&bytes[..len]);
            self.head = Some(head);
        }
        Ok(parsed)
    }
}

/// Parses the head at the start of `bytes` and returns its length, or `None` if its end has not arrived.
/// Lines may end with a bare LF.
///
/// # Errors
/// Returns an error if `bytes` do not begin with the head of a response.
pub fn parse_head(bytes: &[u8]) -> Result<Option<(usize, ResponseHead)>, BadResponse> {
    let (version, status) = match bytes {
        [b'H', b'T', b'T', b'P', b'/', b'1', b'.', minor @ (b'0' | b'1'), b' ', a, b, c, after, ..]
            if [a, b, c].iter().all(|d| d.is_ascii_digit()) && matches!(after, b' ' | b'\r' | b'\n') =>
        {
            let digit = |d: &u8| u16::from(d - b'0');
            (*minor, digit(a) * 100 + digit(b) * 10 + digit(c))
        }
        // Too short to decide.
        _ if bytes.len() < 13 && may_be_status_line(bytes) => return Ok(None),
        _ => return Err(BadResponse),
    };
    let mut at = match memchr::memchr(b'\n', &bytes[12..]) {
        Some(offset) => 12 + offset + 1,
        None => return Ok(None),
    };
    let mut fields = ResponseFields { close: version == b'0', ..ResponseFields::default() };
    loop {
        // Only an empty line and the first letters of relevant names need a closer look.
        match bytes.get(at) {
            Some(b'\r') => match bytes.get(at + 1) {
                Some(b'\n') => return Ok(Some((at + 2, fields.head(status)))),
                Some(_) => return Err(BadResponse),
                None => return Ok(None),
            },
            Some(b'\n') => return Ok(Some((at + 1, fields.head(status)))),
            None => return Ok(None),
            Some(_) => {}
        }
        let Some(len) = memchr::memchr(b'\n', &bytes[at..]) else { return Ok(None) };
        let line = &bytes[at..at + len];
        if matches!(line[0], b'c' | b'C' | b't' | b'T') {
            fields.read(line.strip_suffix(b"\r").unwrap_or(line))?;
        }
        at += len + 1;
    }
}

/// Returns true if `bytes` can be the beginning of a status line.
fn may_be_status_line(bytes: &[u8]) -> bool {
    let start = b"HTTP/1.";
    let n = bytes.len().min(start.len());
    bytes[..n] == start[..n]
}

/// The header fields that determine framing and the end of the connection.
#[derive(Default)]
struct ResponseFields {
    length: Option<u64>,
    chunked: bool,
    close: bool,
}

impl ResponseFields {
    fn read(&mut self, line: &[u8]) -> Result<(), BadResponse> {
        let Some(colon) = memchr::memchr(b':', line) else { return Err(BadResponse) };
        let (name, value) = (&line[..colon], trim(&line[colon + 1..]));
        match colon {
            14 if name.eq_ignore_ascii_case(b"content-length") => {
                let length = decimal(value).ok_or(BadResponse)?;
                if self.length.is_some_and(|other| other != length) {
                    return Err(BadResponse);
                }
                self.length = Some(length);
            }
            17 if name.eq_ignore_ascii_case(b"transfer-encoding") => {
                let last = value.rsplit(|b| *b == b',').next().map(trim);
                if !last.is_some_and(|c| c.eq_ignore_ascii_case(b"chunked")) {
                    return Err(BadResponse);
                }
                self.chunked = true;
            }
            10 if name.eq_ignore_ascii_case(b"connection") => {
                for option in value.split(|b| *b == b',').map(trim) {
                    if option.eq_ignore_ascii_case(b"close") {
                        self.close = true;
                    } else if option.eq_ignore_ascii_case(b"keep-alive") {
                        self.close = false;
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    const fn head(&self, status: u16) -> ResponseHead {
        let framing = match (self.chunked, self.length) {
            (true, _) => ResponseFraming::Chunked,
            (false, Some(length)) => ResponseFraming::Length(length),
            (false, None) => ResponseFraming::UntilClose,
        };
        ResponseHead { status, framing, close: self.close }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::response::Protocol;
    use proptest::prelude::*;

    /// Parses `bytes` in parts of `step` bytes, then signals FIN. Status 0 stands for an error.
    fn read(bytes: &[u8], step: usize, to_head: bool) -> Vec<(u16, bool)> {
        let (mut parser, mut records, mut responses) =
            (Parser::default(), PartialResponses::default(), Vec::new());
        for mut chunk in bytes.chunks(step) {
            while !chunk.is_empty() {
                match parser.read(chunk, Protocol::Http { head: to_head }, &mut records) {
                    Ok(ParseProgress::More) => break,
                    Ok(ParseProgress::Complete(used, response)) => {
                        responses.push((response.status, response.close));
                        assert!(parser.is_at_start());
                        chunk = &chunk[used..];
                    }
                    Err(BadResponse) => {
                        responses.push((0, true));
                        parser.reset(&mut records);
                        assert_eq!(records.in_use(), 0);
                        return responses;
                    }
                }
            }
        }
        responses.extend(parser.end().map(|r| (r.status, r.close)));
        parser.reset(&mut records);
        assert_eq!(records.in_use(), 0);
        responses
    }

    const OK: &str =
        "HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 3\r\nContent-Type: text/plain\r\n\r\nabc";

    #[test]
    fn responses_are_framed() {
        let two = OK.repeat(2);
        let table: [(&str, &[(u16, bool)]); 20] = [
            (OK, &[(200, false)]),
            (&two, &[(200, false), (200, false)]),
            ("HTTP/1.1 204 No Content\r\n\r\n", &[(204, false)]),
            ("HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", &[(304, false)]),
            ("HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length:0\r\n\r\n", &[(200, true)]),
            ("HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", &[(200, true)]),
            ("HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx", &[(200, false)]),
            ("HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", &[(200, false)]),
            ("HTTP/1.1 200 OK\nContent-Length: 1\n\nx", &[(200, false)]),
            (
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
                &[(404, false)],
            ),
            (
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x\r\nabc\r\n0\r\nA: b\r\n\r\n",
                &[(200, false)],
            ),
            ("HTTP/1.1 200 OK\r\n\r\nuntil the end", &[(200, true)]),
            ("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc", &[]),
            ("HTTP/1.1 200 OK\r\nContent-Length: 1", &[]),
            ("HTTP/2 200 OK\r\n\r\n", &[(0, true)]),
            ("HTTP/1.1 2x0 OK\r\n\r\n", &[(0, true)]),
            ("<html>not a status line</html>", &[(0, true)]),
            ("HTTP/1.1 200 OK\r\nContent-Length: 1x\r\n\r\n", &[(0, true)]),
            ("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", &[(0, true)]),
            ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", &[(0, true)]),
        ];
        for (bytes, expected) in table {
            for step in [1, 2, 7, 10_000] {
                assert_eq!(read(bytes.as_bytes(), step, false), expected, "{bytes:?} by {step}");
            }
        }
    }

    #[test]
    fn a_response_to_head_has_no_body() {
        let head = OK.strip_suffix("abc").unwrap().repeat(2);
        assert_eq!(read(head.as_bytes(), 5, true), [(200, false), (200, false)]);
    }

    // limit: bytes of a response's head
    #[test]
    fn an_endless_head_is_an_error() {
        let bytes = format!("HTTP/1.1 200 OK\r\n{}", "X: y\r\n".repeat(20_000));
        assert_eq!(read(bytes.as_bytes(), 1000, false), [(0, true)]);
    }

    proptest! {
        #[test]
        fn fragmentation_does_not_matter(
            parts in proptest::collection::vec(prop_oneof![
                Just(OK.to_owned()),
                Just("HTTP/1.1 404 Not Found\r\n".to_owned()),
                Just("Content-Length: 2\r\n\r\n".to_owned()),
                Just("Transfer-Encoding: chunked\r\n\r\n".to_owned()),
                Just("2\r\nab\r\n0\r\n\r\n".to_owned()),
                "[ -~\r\n]{0,10}",
            ], 0..6),
            step in 1usize..50,
        ) {
            let bytes = parts.concat();
            let (whole, pieces) = (read(bytes.as_bytes(), 1 << 20, false), read(bytes.as_bytes(), step, false));
            prop_assert_eq!(whole, pieces);
        }
    }
}
