//! Parses responses: just enough of each protocol to find the status and the end of each response.
//!
//! A generator must be faster than the server it measures. So a response whose head or line arrived in one
//! part is parsed in place; only parts are copied, into a record that the connection borrows.
//!
//! Each protocol is a method of [`Parser`] in a file of its own. The protocols share the parser's state,
//! because a session speaks only one of them; otherwise the state would take more than 16 bytes per
//! connection.

pub mod http;
mod values;

use crate::httpd::body::BodyReader;

/// Largest capacity with which a buffer returns to the pool; a larger one is freed.
const RETAINED_BYTES_MAX: usize = 8 << 10;
/// Index that stands for no record.
const NONE: u32 = u32::MAX;

/// Protocol of the responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1.
    Http {
        /// True if the responses answer HEAD requests and have no bodies.
        head: bool,
    },
    /// Redis' RESP, version 2: bulk strings, simple strings, integers and errors.
    Redis,
    /// memcached's text protocol: values, confirmations and errors.
    Memcached,
}

/// Names of the status classes of HTTP.
const HTTP_CLASSES: [&str; 6] = ["0xx", "1xx", "2xx", "3xx", "4xx", "5xx"];
/// Names of the status classes of values; only "hit", "miss" and "error" occur.
const VALUE_CLASSES: [&str; 6] = ["0", "1", "hit", "3", "miss", "error"];

impl Protocol {
    /// Returns the names of the classes, which are the hundreds of the status.
    pub const fn classes(self) -> [&'static str; 6] {
        match self {
            Self::Http { .. } => HTTP_CLASSES,
            Self::Redis | Self::Memcached => VALUE_CLASSES,
        }
    }
}

/// The received bytes are not a response of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadResponse;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParserState {
    /// Before the first byte of a response.
    Start,
    /// The record has a part of a head or of a line.
    Head,
    /// `left` bytes of a body are to come.
    Length,
    /// The record's reader finds the end of a chunked body.
    Chunked,
    UntilClose,
    /// A value is complete; the line that ends the response is to come.
    Closing,
    /// The record has a part of the line that ends the response.
    ClosingHead,
}

/// State of parsing a connection's responses: 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Parser {
    /// Bytes of a body or a value that are to come.
    left: u64,
    /// Index of the borrowed record, or [`NONE`].
    partial: u32,
    status: u16,
    state: ParserState,
    close: bool,
}

/// A complete response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// Status as in HTTP. A value has 200 if it was found, 404 if not, and 500 after an error.
    pub status: u16,
    /// True if the server closes the connection after the response.
    pub close: bool,
}

/// Result of [`Parser::read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseProgress {
    /// All bytes were used, and the response is not complete.
    More,
    /// These many bytes completed a response.
    Complete(usize, Response),
}

impl Default for Parser {
    fn default() -> Self {
        Self { left: 0, partial: NONE, status: 0, state: ParserState::Start, close: false }
    }
}

impl Parser {
    /// Returns true if the next byte is the first of a response.
    pub fn is_at_start(&self) -> bool {
        self.state == ParserState::Start
    }

    /// Parses further bytes. After an error the parser must be reset.
    ///
    /// # Errors
    /// The bytes are not a response of the protocol.
    #[inline]
    pub fn read(
        &mut self,
        bytes: &[u8],
        protocol: Protocol,
        records: &mut PartialResponses,
    ) -> Result<ParseProgress, BadResponse> {
        match protocol {
            Protocol::Http { head } => self.read_http(bytes, head, records),
            Protocol::Redis => self.read_redis(bytes, records),
            Protocol::Memcached => self.read_memcached(bytes, records),
        }
    }

    /// Handles the server's FIN. Returns the response if the FIN completes it.
    pub fn end(&mut self) -> Option<Response> {
        (self.state == ParserState::UntilClose).then(|| {
            self.state = ParserState::Start;
            Response { status: self.status, close: true }
        })
    }

    /// Returns the borrowed record to the pool and resets the state.
    pub fn reset(&mut self, records: &mut PartialResponses) {
        self.release(records);
        *self = Self::default();
    }

    fn complete(&mut self, used: usize) -> ParseProgress {
        self.state = ParserState::Start;
        ParseProgress::Complete(used, Response { status: self.status, close: self.close })
    }

    fn release(&mut self, records: &mut PartialResponses) {
        if self.partial != NONE {
            records.put_back(core::mem::replace(&mut self.partial, NONE));
        }
    }
}

/// A response of which only a part has arrived.
#[derive(Debug)]
struct PartialResponse {
    /// The received part of a head or a line.
    bytes: Vec<u8>,
    body: BodyReader,
}

/// Pool of the records that connections borrow, at most one each; and the last parsed head.
#[derive(Debug, Default)]
pub struct PartialResponses {
    records: Vec<PartialResponse>,
    free: Vec<u32>,
    last: http::LastHead,
}

impl PartialResponses {
    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.records.push(PartialResponse { bytes: Vec::new(), body: BodyReader::chunked() });
            self.records.len() as u32 - 1
        })
    }

    fn get(&mut self, index: u32) -> &mut PartialResponse {
        &mut self.records[index as usize]
    }

    fn put_back(&mut self, index: u32) {
        let record = &mut self.records[index as usize];
        record.bytes.clear();
        record.bytes.shrink_to(RETAINED_BYTES_MAX);
        record.body = BodyReader::chunked();
        self.free.push(index);
    }

    /// Returns the number of records in use.
    pub fn in_use(&self) -> usize {
        self.records.len() - self.free.len()
    }
}
