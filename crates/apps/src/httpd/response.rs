//! Response heads.

use super::status::Status;
use crate::date::{self, DATE_BYTES};

/// Methods that files support, for the Allow field.
pub const ALLOW: &str = "GET, HEAD, OPTIONS";

/// The Date field directly follows the status line, so that it can be found and updated in a prepared head.
const DATE_FIELD: &[u8] = b"\r\nDate: ";

/// Says what happens to the connection after the response, and which header field announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// The connection stays open; HTTP/1.1 needs no Connection field for that.
    Keep,
    /// The connection stays open; HTTP/1.0 needs `Connection: keep-alive`.
    KeepExplicit,
    /// The server closes the connection.
    Close,
}

/// The value of the Date field, updated once per second.
#[derive(Clone, Copy, Debug)]
pub struct DateText {
    second: u64,
    text: [u8; DATE_BYTES],
}

impl DateText {
    /// Formats a time in seconds since 1970.
    pub fn new(second: u64) -> Self {
        Self { second, text: date::format(second) }
    }

    /// Returns the time in seconds since 1970.
    pub const fn second(&self) -> u64 {
        self.second
    }
}

/// Appends one head to a buffer.
pub struct HeadWriter<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> HeadWriter<'a> {
    /// Begins a head with the status line, Date and Server.
    pub fn new(out: &'a mut Vec<u8>, status: Status, date: &DateText) -> Self {
        out.extend_from_slice(b"HTTP/1.1 ");
        out.extend_from_slice(status.line().as_bytes());
        out.extend_from_slice(DATE_FIELD);
        out.extend_from_slice(&date.text);
        out.extend_from_slice(b"\r\nServer: ginnel\r\n");
        Self { out }
    }

    /// Adds a field. `value` must have no control characters.
    pub fn field(&mut self, name: &str, value: &[u8]) -> &mut Self {
        self.out.extend_from_slice(name.as_bytes());
        self.out.extend_from_slice(b": ");
        self.out.extend_from_slice(value);
        self.out.extend_from_slice(b"\r\n");
        self
    }

    /// Adds Content-Length.
    pub fn length(&mut self, bytes: u64) -> &mut Self {
        self.out.extend_from_slice(b"Content-Length: ");
        decimal(bytes, self.out);
        self.out.extend_from_slice(b"\r\n");
        self
    }

    /// Adds Content-Range for `len` bytes from `start` of a file of `size` bytes.
    pub fn content_range(&mut self, start: u64, len: u64, size: u64) -> &mut Self {
        self.out.extend_from_slice(b"Content-Range: bytes ");
        decimal(start, self.out);
        self.out.push(b'-');
        decimal(start + len - 1, self.out);
        self.out.push(b'/');
        decimal(size, self.out);
        self.out.extend_from_slice(b"\r\n");
        self
    }

    /// Adds the Connection field, if one is needed, and the empty line.
    pub fn end(&mut self, persistence: Persistence) {
        self.out.extend_from_slice(match persistence {
            Persistence::Keep => b"\r\n",
            Persistence::KeepExplicit => b"Connection: keep-alive\r\n\r\n".as_slice(),
            Persistence::Close => b"Connection: close\r\n\r\n",
        });
    }
}

/// Appends `value` in decimal digits.
pub fn decimal(mut value: u64, out: &mut Vec<u8>) {
    let mut digits = [0; 20];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            return out.extend_from_slice(&digits[start..]);
        }
    }
}

/// Appends a response without a file. Its body is the text of the status line, or empty for 200. `field` is
/// an additional field.
pub fn write_plain(
    out: &mut Vec<u8>,
    status: Status,
    date: &DateText,
    field: Option<(&str, &[u8])>,
    persistence: Persistence,
    is_head: bool,
) {
    let body = if status == Status::Ok { "" } else { status.line() };
    let mut head = HeadWriter::new(out, status, date);
    if let Some((name, value)) = field {
        head.field(name, value);
    }
    if status == Status::MethodNotAllowed {
        head.field("Allow", ALLOW.as_bytes());
    }
    if body.is_empty() {
        head.length(0).end(persistence);
        return;
    }
    head.field("Content-Type", b"text/plain; charset=utf-8").length(body.len() as u64 + 1).end(persistence);
    if !is_head {
        out.extend_from_slice(body.as_bytes());
        out.push(b'\n');
    }
}

/// A response that is prepared in advance: the head and, for a small file, the body.
#[derive(Clone, Debug)]
pub struct PreparedResponse {
    bytes: Box<[u8]>,
    head_bytes: u32,
    /// The second of the Date field.
    second: u64,
}

impl PreparedResponse {
    /// Offset of the date in the head of a 200 response.
    const DATE_AT: usize = "HTTP/1.1 200 OK\r\nDate: ".len();

    /// Creates a response from the head of a 200 response, as [`HeadWriter`] wrote it for `date`, and the
    /// body.
    pub fn new(mut head: Vec<u8>, body: &[u8], date: &DateText) -> Self {
        debug_assert_eq!(&head[Self::DATE_AT..Self::DATE_AT + DATE_BYTES], &date.text);
        let head_bytes = head.len() as u32;
        head.extend_from_slice(body);
        Self { bytes: head.into(), head_bytes, second: date.second }
    }

    /// Returns head and body, with the date updated.
    pub fn whole(&mut self, date: &DateText) -> &[u8] {
        self.refresh_date(date);
        &self.bytes
    }

    /// Returns the head alone, with the date updated.
    pub fn head(&mut self, date: &DateText) -> &[u8] {
        self.refresh_date(date);
        &self.bytes[..self.head_bytes as usize]
    }

    fn refresh_date(&mut self, date: &DateText) {
        if self.second != date.second {
            self.second = date.second;
            self.bytes[Self::DATE_AT..Self::DATE_AT + DATE_BYTES].copy_from_slice(&date.text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(
        status: Status,
        field: Option<(&str, &[u8])>,
        persistence: Persistence,
        is_head: bool,
    ) -> String {
        let mut out = Vec::new();
        write_plain(&mut out, status, &DateText::new(0), field, persistence, is_head);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn plain_responses_have_exact_framing() {
        assert_eq!(
            plain(Status::NotFound, None, Persistence::Keep, false),
            "HTTP/1.1 404 Not Found\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nServer: ginnel\r\n\
             Content-Type: text/plain; charset=utf-8\r\nContent-Length: 14\r\n\r\n404 Not Found\n"
        );
        assert_eq!(
            plain(Status::MethodNotAllowed, None, Persistence::KeepExplicit, false),
            "HTTP/1.1 405 Method Not Allowed\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nServer: ginnel\r\n\
             Allow: GET, HEAD, OPTIONS\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 23\r\n\
             Connection: keep-alive\r\n\r\n405 Method Not Allowed\n"
        );
        assert_eq!(
            plain(Status::Ok, Some(("Allow", b"GET")), Persistence::Close, false),
            "HTTP/1.1 200 OK\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nServer: ginnel\r\n\
             Allow: GET\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
    }

    #[test]
    fn every_status_has_exact_framing() {
        let lines = [
            "206 Partial Content",
            "301 Moved Permanently",
            "304 Not Modified",
            "400 Bad Request",
            "404 Not Found",
            "405 Method Not Allowed",
            "408 Request Timeout",
            "412 Precondition Failed",
            "413 Content Too Large",
            "414 URI Too Long",
            "416 Range Not Satisfiable",
            "417 Expectation Failed",
            "431 Request Header Fields Too Large",
            "500 Internal Server Error",
            "501 Not Implemented",
            "503 Service Unavailable",
            "505 HTTP Version Not Supported",
        ];
        for (status, line) in Status::ALL[1..].iter().zip(lines) {
            let allow = if line.starts_with("405") { "Allow: GET, HEAD, OPTIONS\r\n" } else { "" };
            let expected = format!(
                "HTTP/1.1 {line}\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nServer: ginnel\r\n{allow}\
                 Content-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{line}\n",
                line.len() + 1
            );
            assert_eq!(plain(*status, None, Persistence::Close, false), expected);
        }
    }

    #[test]
    fn a_response_to_head_ends_with_its_head() {
        for status in Status::ALL {
            assert!(plain(status, None, Persistence::Keep, true).ends_with("\r\n\r\n"));
        }
    }

    #[test]
    fn numbers_are_decimal() {
        for value in [0, 9, 10, 1234567890, u64::MAX] {
            let mut out = Vec::new();
            decimal(value, &mut out);
            assert_eq!(out, value.to_string().into_bytes());
        }
    }

    #[test]
    fn a_prepared_response_has_the_current_date() {
        let head = |date: &DateText| {
            let mut head = Vec::new();
            HeadWriter::new(&mut head, Status::Ok, date).length(2).end(Persistence::Keep);
            head
        };
        let days = [0, 1, 2, 3].map(|day| DateText::new(day * 86_400));
        let mut prepared = PreparedResponse::new(head(&days[0]), b"ab", &days[0]);
        assert_eq!(prepared.head(&days[0]), head(&days[0]));
        // Either function updates the date.
        assert_eq!(prepared.head(&days[1]), head(&days[1]));
        assert_eq!(prepared.whole(&days[2]), [head(&days[2]), b"ab".to_vec()].concat());
        assert_eq!(prepared.head(&days[3]), head(&days[3]));
        let text = String::from_utf8(prepared.whole(&days[1]).to_vec()).unwrap();
        assert!(text.contains("\r\nDate: Fri, 02 Jan 1970 00:00:00 GMT\r\n"), "{text}");
    }
}
