//! Request heads: finds their end (RFC 9112 §2.2) and parses what matters to a server of files.
//!
//! Framing is strict, because two parsers that disagree about the end of a request can be exploited (request
//! smuggling). Lines end with CRLF. A bare LF, an obsolete line fold, a space before a colon, Content-Length
//! together with Transfer-Encoding, and a repeated Content-Length are refused.

use super::status::Status;
use core::mem::MaybeUninit;
use httparse::Header;

/// Most header fields in one request.
// limit: header fields of a request
pub const HEADERS_MAX: usize = 64;
/// Most empty lines before a request line (RFC 9112 §2.2 asks for tolerating at least one).
const LEADING_LINES_MAX: usize = 4;

/// Limits on the size of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest request line in bytes; a longer one is answered with 414.
    pub line_bytes_max: usize,
    /// Longest head in bytes; a longer one is answered with 431.
    pub head_bytes_max: usize,
    /// Longest body in bytes, which is read and dropped; a longer one is answered with 413.
    pub body_bytes_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { line_bytes_max: 8 << 10, head_bytes_max: 16 << 10, body_bytes_max: 1 << 20 }
    }
}

/// Finds the end of a head that may arrive in several parts, and scans each byte once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scanner {
    /// Start of the line whose end has not been found.
    line_start: usize,
    /// Number of bytes scanned for the end of that line.
    scanned: usize,
    /// Empty lines before the request line.
    leading_lines: usize,
    /// True if the end of the request line was found.
    request_line_done: bool,
}

impl Scanner {
    /// The state at the start of a head.
    pub const NEW: Self = Self { line_start: 0, scanned: 0, leading_lines: 0, request_line_done: false };

    /// Returns the length of the head including the empty line at its end, or `None` if more bytes are
    /// needed. `bytes` begins with the head and has at least the bytes of the previous call. An error is the
    /// status to answer with.
    pub fn find_end(&mut self, bytes: &[u8], limits: &Limits) -> Result<Option<usize>, Status> {
        loop {
            let Some(offset) = memchr::memchr(b'\n', bytes.get(self.scanned..).unwrap_or_default()) else {
                self.scanned = bytes.len();
                return self.check_size(bytes.len(), limits).map(|()| None);
            };
            let end = self.scanned + offset;
            // The limits are checked up to the end of the line, as if these bytes had arrived first.
            self.check_size(end, limits)?;
            if end == self.line_start || bytes[end - 1] != b'\r' {
                return Err(Status::BadRequest); // a bare LF
            }
            let is_empty = end == self.line_start + 1;
            self.check_size(end + 1, limits)?;
            (self.line_start, self.scanned) = (end + 1, end + 1);
            if !is_empty {
                self.request_line_done = true;
            } else if self.request_line_done {
                return Ok(Some(end + 1));
            } else {
                self.leading_lines += 1;
                if self.leading_lines > LEADING_LINES_MAX {
                    return Err(Status::BadRequest);
                }
            }
        }
    }

    fn check_size(&self, seen: usize, limits: &Limits) -> Result<(), Status> {
        if !self.request_line_done && seen - self.line_start > limits.line_bytes_max {
            return Err(Status::UriTooLong);
        }
        if seen > limits.head_bytes_max {
            return Err(if self.request_line_done {
                Status::HeaderFieldsTooLarge
            } else {
                Status::UriTooLong
            });
        }
        Ok(())
    }
}

/// Request method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// GET
    Get,
    /// HEAD
    Head,
    /// OPTIONS
    Options,
    /// A method of RFC 9110 or RFC 5789 that does not apply to files: 405.
    Other,
}

/// HTTP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.0
    Http10,
    /// HTTP/1.1
    Http11,
}

/// Framing of a request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFraming {
    /// No body.
    None,
    /// Content-Length.
    Length(u64),
    /// Transfer-Encoding: chunked.
    Chunked,
}

/// A parsed request, which borrows the bytes of its head.
#[derive(Clone, Copy, Debug)]
pub struct Request<'h, 'b> {
    /// Method.
    pub method: Method,
    /// Version.
    pub version: Version,
    /// Path of the target as received, without the query; `*` for `OPTIONS *`.
    pub path: &'b [u8],
    /// Query of the target, without the question mark.
    pub query: Option<&'b [u8]>,
    /// True if the client allows the connection to stay open.
    pub keep_alive: bool,
    /// Framing of the body.
    pub body: BodyFraming,
    /// True if the client waits for 100 (Continue) before it sends the body.
    pub expects_continue: bool,
    /// True if there is a Range, If-Range, If-Match, If-None-Match, If-Modified-Since or If-Unmodified-Since
    /// field.
    pub is_conditional: bool,
    headers: &'h [Header<'b>],
}

impl<'b> Request<'_, 'b> {
    /// Returns the values of all fields called `name`, in order.
    pub fn values(&self, name: &'static str) -> impl Iterator<Item = &'b [u8]> {
        self.headers.iter().filter(move |h| h.name.eq_ignore_ascii_case(name)).map(|h| trim(h.value))
    }

    /// Returns the value of the field called `name` if there is exactly one.
    pub fn single(&self, name: &'static str) -> Option<&'b [u8]> {
        let mut values = self.values(name);
        values.next().filter(|_| values.next().is_none())
    }
}

/// Buffer for the header fields of one request, on the caller's stack.
pub type HeaderBuffer<'b> = [MaybeUninit<Header<'b>>; HEADERS_MAX];

/// Parses a complete head, as delimited by [`Scanner::find_end`]. An error is the status to answer with. The
/// connection must then be closed, because the start of the next request is not known for sure.
pub fn parse<'h, 'b>(head: &'b [u8], buffer: &'h mut HeaderBuffer<'b>) -> Result<Request<'h, 'b>, Status> {
    let mut parsed = httparse::Request::new(&mut []);
    let result = parsed.parse_with_uninit_headers(head, buffer);
    match result {
        Ok(httparse::Status::Complete(len)) if len == head.len() => {}
        Ok(_) => return Err(Status::BadRequest),
        Err(error) => return Err(status_of_parse_error(error, head)),
    }
    interpret(parsed)
}

/// Parses a complete head in one pass if it has none of the peculiarities that [`Scanner`] handles. Returns
/// its length and the result of [`parse`], or `None` if `bytes` must go through [`Scanner`].
pub fn parse_complete_head<'h, 'b>(
    bytes: &'b [u8],
    buffer: &'h mut HeaderBuffer<'b>,
    limits: &Limits,
) -> Option<(usize, Result<Request<'h, 'b>, Status>)> {
    let mut parsed = httparse::Request::new(&mut []);
    let Ok(httparse::Status::Complete(len)) = parsed.parse_with_uninit_headers(bytes, buffer) else {
        return None;
    };
    let line = parsed.method?.len() + parsed.path?.len() + "  HTTP/1.1\r\n".len();
    let is_plain = line <= limits.line_bytes_max
        && len <= limits.head_bytes_max
        && !matches!(bytes[0], b'\r' | b'\n')
        && !has_bare_lf(&bytes[..len]);
    is_plain.then(|| (len, interpret(parsed)))
}

/// Returns true if a line ends without CR. The first byte is not examined.
fn has_bare_lf(head: &[u8]) -> bool {
    // Written without branches, so that the compiler vectorizes the loop.
    let bare = head
        .iter()
        .zip(&head[1..])
        .fold(0, |bare, (before, byte)| bare | (u8::from(*byte == b'\n') & u8::from(*before != b'\r')));
    bare != 0
}

fn interpret<'h, 'b>(parsed: httparse::Request<'h, 'b>) -> Result<Request<'h, 'b>, Status> {
    let headers: &'h [Header<'b>] = parsed.headers;
    let (Some(method), Some(target), Some(minor)) = (parsed.method, parsed.path, parsed.version) else {
        return Err(Status::BadRequest);
    };
    let version = if minor == 0 { Version::Http10 } else { Version::Http11 };
    let method = parse_method(method)?;
    let fields = FramingFields::parse(headers, version)?;
    let (path, query) = parse_target(target.as_bytes(), method)?;
    Ok(Request {
        method,
        version,
        path,
        query,
        keep_alive: fields.keep_alive(version),
        body: fields.body(version)?,
        expects_continue: fields.expects_continue && version == Version::Http11,
        is_conditional: fields.is_conditional,
        headers,
    })
}

/// Returns the status for a head that the parser rejected.
fn status_of_parse_error(error: httparse::Error, head: &[u8]) -> Status {
    match error {
        httparse::Error::TooManyHeaders => Status::HeaderFieldsTooLarge,
        httparse::Error::Version => {
            // Only a well-formed HTTP version that is not supported gets 505.
            let line =
                head.split(|b| *b == b'\r').find(|line| !matches!(line, [] | [b'\n'])).unwrap_or_default();
            match line.rsplit(|b| *b == b' ').next() {
                Some([b'H', b'T', b'T', b'P', b'/', major, b'.', minor])
                    if major.is_ascii_digit() && minor.is_ascii_digit() =>
                {
                    Status::VersionNotSupported
                }
                _ => Status::BadRequest,
            }
        }
        _ => Status::BadRequest,
    }
}

fn parse_method(name: &str) -> Result<Method, Status> {
    match name {
        "GET" => Ok(Method::Get),
        "HEAD" => Ok(Method::Head),
        "OPTIONS" => Ok(Method::Options),
        "POST" | "PUT" | "DELETE" | "PATCH" | "TRACE" | "CONNECT" => Ok(Method::Other),
        _ => Err(Status::NotImplemented),
    }
}

/// Returns path and query of a target (RFC 9112 §3.2): origin-form, absolute-form, or `*` for OPTIONS.
fn parse_target(target: &[u8], method: Method) -> Result<(&[u8], Option<&[u8]>), Status> {
    if target.first() == Some(&b'/') {
        return split_query(target);
    }
    if method == Method::Other {
        return Ok((target, None)); // answered with 405 whatever it is; CONNECT has an authority here
    }
    if target == b"*" && method == Method::Options {
        return Ok((target, None));
    }
    // The authority of an absolute target replaces Host (RFC 9112 §3.2.2). The server has one site for all
    // authorities.
    let scheme = b"http://";
    match target.split_at_checked(scheme.len()) {
        Some((start, rest)) if start.eq_ignore_ascii_case(scheme) => {
            let end = rest.iter().position(|b| matches!(b, b'/' | b'?')).unwrap_or(rest.len());
            let (authority, path) = rest.split_at(end);
            if authority.is_empty() || !authority.iter().all(|b| is_host_byte(*b)) {
                return Err(Status::BadRequest);
            }
            match path.first() {
                None => Ok((b"/", None)),
                Some(b'?') => split_query(path).map(|(_, query)| (&b"/"[..], query)),
                Some(_) => split_query(path),
            }
        }
        _ => Err(Status::BadRequest),
    }
}

fn split_query(target: &[u8]) -> Result<(&[u8], Option<&[u8]>), Status> {
    if memchr::memchr(b'#', target).is_some() {
        return Err(Status::BadRequest); // a fragment is never sent (RFC 9110 §7.1)
    }
    Ok(match memchr::memchr(b'?', target) {
        Some(at) => (&target[..at], Some(&target[at + 1..])),
        None => (target, None),
    })
}

const fn is_host_byte(byte: u8) -> bool {
    // RFC 3986 §3.2.2 and a port; no user information.
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'.' | b'-' | b'_' | b'~' | b'%' | b'!' | b'$' | b'&' | b'\'' | b'(' | b')')
        || matches!(byte, b'*' | b'+' | b',' | b';' | b'=' | b':' | b'[' | b']')
}

/// The header fields that matter for framing and persistence.
#[derive(Default)]
struct FramingFields {
    hosts: u32,
    length: Option<u64>,
    transfer_encoding: Option<Result<(), Status>>,
    close: bool,
    keep_alive: bool,
    expects_continue: bool,
    is_conditional: bool,
}

impl FramingFields {
    fn parse(headers: &[Header<'_>], version: Version) -> Result<Self, Status> {
        let mut fields = Self::default();
        for header in headers {
            // The length distinguishes most field names without a comparison.
            match header.name.len() {
                4 if header.name.eq_ignore_ascii_case("host") => fields.host(header.value)?,
                5 if header.name.eq_ignore_ascii_case("range") => fields.is_conditional = true,
                6 if header.name.eq_ignore_ascii_case("expect") => fields.expect(header.value, version)?,
                8 if is_one_of(header.name, &["if-match", "if-range"]) => fields.is_conditional = true,
                10 if header.name.eq_ignore_ascii_case("connection") => fields.connection(header.value),
                13 if header.name.eq_ignore_ascii_case("if-none-match") => fields.is_conditional = true,
                14 if header.name.eq_ignore_ascii_case("content-length") => fields.length(header.value)?,
                17 if header.name.eq_ignore_ascii_case("transfer-encoding") => {
                    fields.encoding(header.value)?
                }
                17 if header.name.eq_ignore_ascii_case("if-modified-since") => fields.is_conditional = true,
                19 if header.name.eq_ignore_ascii_case("if-unmodified-since") => fields.is_conditional = true,
                _ => {}
            }
        }
        // RFC 9112 §3.2: an HTTP/1.1 request without Host is refused, and any request with two.
        if fields.hosts == 0 && version == Version::Http11 { Err(Status::BadRequest) } else { Ok(fields) }
    }

    fn host(&mut self, value: &[u8]) -> Result<(), Status> {
        self.hosts += 1;
        if self.hosts > 1 || !trim(value).iter().all(|b| is_host_byte(*b)) {
            Err(Status::BadRequest)
        } else {
            Ok(())
        }
    }

    fn expect(&mut self, value: &[u8], version: Version) -> Result<(), Status> {
        if trim(value).eq_ignore_ascii_case(b"100-continue") {
            self.expects_continue = true;
            return Ok(());
        }
        // RFC 9110 §10.1.1: HTTP/1.0 clients do not know Expect.
        if version == Version::Http10 { Ok(()) } else { Err(Status::ExpectationFailed) }
    }

    fn connection(&mut self, value: &[u8]) {
        for option in value.split(|b| *b == b',').map(trim) {
            self.close |= option.eq_ignore_ascii_case(b"close");
            self.keep_alive |= option.eq_ignore_ascii_case(b"keep-alive");
        }
    }

    /// RFC 9112 §6.3: a Content-Length that is not one number is refused; so is a repeated one.
    fn length(&mut self, value: &[u8]) -> Result<(), Status> {
        let digits = trim(value);
        if self.length.is_some() || digits.is_empty() {
            return Err(Status::BadRequest);
        }
        let mut length = 0u64;
        for digit in digits {
            if !digit.is_ascii_digit() {
                return Err(Status::BadRequest);
            }
            length = length
                .checked_mul(10)
                .and_then(|l| l.checked_add(u64::from(digit - b'0')))
                .ok_or(Status::ContentTooLarge)?;
        }
        self.length = Some(length);
        Ok(())
    }

    fn encoding(&mut self, value: &[u8]) -> Result<(), Status> {
        if self.transfer_encoding.is_some() {
            return Err(Status::BadRequest);
        }
        // Only “chunked” alone is supported (RFC 9112 §6.1: another coding is 501). Chunked is malformed
        // unless it is the last coding and appears once.
        let mut chunked = 0;
        let mut codings = 0;
        for coding in value.split(|b| *b == b',').map(trim) {
            codings += 1;
            chunked += u32::from(coding.eq_ignore_ascii_case(b"chunked"));
        }
        let is_last =
            value.rsplit(|b| *b == b',').next().is_some_and(|c| trim(c).eq_ignore_ascii_case(b"chunked"));
        self.transfer_encoding = Some(match (chunked, codings) {
            (1, 1) => Ok(()),
            (0, _) => Err(Status::NotImplemented),
            (1, _) if is_last => Err(Status::NotImplemented),
            _ => Err(Status::BadRequest),
        });
        Ok(())
    }

    const fn keep_alive(&self, version: Version) -> bool {
        !self.close && (self.keep_alive || matches!(version, Version::Http11))
    }

    fn body(&self, version: Version) -> Result<BodyFraming, Status> {
        match (self.transfer_encoding, self.length) {
            // RFC 9112 §6.1: both fields at once indicate request smuggling, and HTTP/1.0 has no transfer
            // codings.
            (Some(_), Some(_)) => Err(Status::BadRequest),
            (Some(_), None) if version == Version::Http10 => Err(Status::BadRequest),
            (Some(result), None) => result.map(|()| BodyFraming::Chunked),
            (None, Some(0) | None) => Ok(BodyFraming::None),
            (None, Some(length)) => Ok(BodyFraming::Length(length)),
        }
    }
}

fn is_one_of(name: &str, names: &[&str]) -> bool {
    names.iter().any(|n| name.eq_ignore_ascii_case(n))
}

/// Returns `value` without leading and trailing spaces and tabs.
pub fn trim(value: &[u8]) -> &[u8] {
    let is_text = |b: &u8| !matches!(b, b' ' | b'\t');
    let start = value.iter().position(is_text).unwrap_or(value.len());
    let end = value.iter().rposition(is_text).map_or(start, |last| last + 1);
    &value[start..end]
}

#[cfg(test)]
mod tests;
