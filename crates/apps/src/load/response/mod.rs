//! Reads responses: just enough of each language to know what they say in a word, and where each one ends.
//!
//! A generator must be faster than the server it measures, so a response whose head or line is in one piece is read where it lies; only what
//! comes in pieces is copied, into a record that the connection borrows meanwhile.
//!
//! A language is a method of [`Parser`] that reads on, in a file of its own. The parser's state is one for all, since a session speaks one
//! language: it would otherwise take more than 16 bytes of each connection.

mod http;
mod values;

use crate::httpd::body::BodyReader;

/// A buffer that grew beyond this is given back instead of kept.
const RETAINED_BYTES_MAX: usize = 8 << 10;
/// No record.
const NONE: u32 = u32::MAX;

/// How a server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// HTTP/1.1; `head` says that responses answer HEAD and have no bodies whatever they say.
    Http {
        /// Without bodies.
        head: bool,
    },
    /// Redis' RESP, version 2: bulk strings, simple strings, integers and errors.
    Redis,
    /// memcached's text protocol: values, what is stored, and errors.
    Memcached,
}

/// What each class of status means in HTTP.
const HTTP_CLASSES: [&str; 6] = ["0xx", "1xx", "2xx", "3xx", "4xx", "5xx"];
/// The same of values that are asked for by keys. The others do not occur.
const VALUE_CLASSES: [&str; 6] = ["0", "1", "hit", "3", "miss", "error"];

impl Protocol {
    /// Names of the classes that statuses fall into: their hundreds.
    pub const fn classes(self) -> [&'static str; 6] {
        match self {
            Self::Http { .. } => HTTP_CLASSES,
            Self::Redis | Self::Memcached => VALUE_CLASSES,
        }
    }
}

/// Why a response cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadResponse;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParserState {
    /// Nothing of a response has come.
    Start,
    /// A part of a head, or of a line, lies in the record.
    Head,
    /// `left` bytes of a body are to come.
    Length,
    /// The record's reader finds the end.
    Chunked,
    UntilClose,
    /// A value is complete, and the line that ends the response is to come.
    Closing,
    /// A part of that line lies in the record.
    ClosingHead,
}

/// Where the reading of a connection's responses stands: 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Parser {
    left: u64,
    partial: u32,
    status: u16,
    state: ParserState,
    close: bool,
}

/// A response that is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// Status, as of HTTP: a value that was found has 200, one that was not 404, an error 500.
    pub status: u16,
    /// The server closes the connection now.
    pub close: bool,
}

/// What [`Parser::read`] came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseProgress {
    /// All bytes were used, and the response is not complete.
    More,
    /// A response was completed with this many bytes.
    Complete(usize, Response),
}

impl Default for Parser {
    fn default() -> Self {
        Self { left: 0, partial: NONE, status: 0, state: ParserState::Start, close: false }
    }
}

impl Parser {
    /// The next byte will be the first of a response.
    pub fn is_at_start(&self) -> bool {
        self.state == ParserState::Start
    }

    /// Reads on. After an error the parser is of no use any more and must be reset.
    ///
    /// # Errors
    /// It is not the language.
    #[inline]
    pub fn read(
        &mut self,
        bytes: &[u8],
        language: Protocol,
        records: &mut PartialResponses,
    ) -> Result<ParseProgress, BadResponse> {
        match language {
            Protocol::Http { head } => self.read_http(bytes, head, records),
            Protocol::Redis => self.read_redis(bytes, records),
            Protocol::Memcached => self.read_memcached(bytes, records),
        }
    }

    /// The server closed. Some if that completes a response.
    pub fn end(&mut self) -> Option<Response> {
        (self.state == ParserState::UntilClose).then(|| {
            self.state = ParserState::Start;
            Response { status: self.status, close: true }
        })
    }

    /// Gives back what it borrowed and begins anew.
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

/// What a response in pieces needs.
#[derive(Debug)]
struct PartialResponse {
    /// Of a head or a line: what has come.
    bytes: Vec<u8>,
    body: BodyReader,
}

/// Records that connections borrow, one at most each; and the head read last.
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

    /// Records that are lent.
    pub fn in_use(&self) -> usize {
        self.records.len() - self.free.len()
    }
}
