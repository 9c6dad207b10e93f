//! Parses just enough of Redis' RESP and of memcached's text protocol to find whether a value was found, and
//! the end of each response.
//!
//! Both respond with a line. The line may announce a number of bytes, which follow and end with CRLF.
//! memcached then sends one more line.

use super::{BadResponse, ParseProgress, Parser, ParserState, PartialResponses};
use crate::resp::{self, CRLF, LINE_BYTES_MAX, VALUE_BYTES_MAX, check_crlf, decimal, parse_line};

/// Status for a value that was found, or a command that was executed.
const FOUND: u16 = 200;
/// Status for a value that does not exist.
const MISSING: u16 = 404;
/// Status for an error of the server.
const ERROR: u16 = 500;

/// A parsed line of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplyLine {
    /// The line is the whole response.
    Complete(u16),
    /// This many bytes of a value follow.
    Value(u64),
}

impl Parser {
    /// Parses further bytes of RESP.
    pub(super) fn read_redis(
        &mut self,
        bytes: &[u8],
        records: &mut PartialResponses,
    ) -> Result<ParseProgress, BadResponse> {
        self.read_values(bytes, records, redis, false)
    }

    /// Parses further bytes of memcached's protocol.
    pub(super) fn read_memcached(
        &mut self,
        bytes: &[u8],
        records: &mut PartialResponses,
    ) -> Result<ParseProgress, BadResponse> {
        self.read_values(bytes, records, memcached, true)
    }

    /// Parses further bytes. `parse_line` parses lines; with `has_end` a response with a value ends with the
    /// line `END`.
    #[inline(always)]
    fn read_values(
        &mut self,
        bytes: &[u8],
        records: &mut PartialResponses,
        parse_line: fn(&[u8]) -> Result<ReplyLine, BadResponse>,
        has_end: bool,
    ) -> Result<ParseProgress, BadResponse> {
        let mut used = 0;
        while used < bytes.len() {
            let rest = &bytes[used..];
            match self.state {
                ParserState::Start | ParserState::Head | ParserState::Closing | ParserState::ClosingHead => {
                    let is_closing = matches!(self.state, ParserState::Closing | ParserState::ClosingHead);
                    let Some((len, reply)) = self.line(rest, records, |line| match is_closing {
                        // Only one key was requested.
                        true if line == b"END" => Ok(ReplyLine::Complete(FOUND)),
                        true => Err(BadResponse),
                        false => parse_line(line),
                    })?
                    else {
                        self.state = if is_closing { ParserState::ClosingHead } else { ParserState::Head };
                        return Ok(ParseProgress::More);
                    };
                    used += len;
                    match reply {
                        ReplyLine::Complete(status) => {
                            self.status = status;
                            return Ok(self.complete(used));
                        }
                        ReplyLine::Value(len) => {
                            (self.status, self.state, self.left) =
                                (FOUND, ParserState::Length, len + CRLF.len() as u64);
                        }
                    }
                }
                ParserState::Length => {
                    let here = self.left.min(rest.len() as u64);
                    check_crlf(&rest[..here as usize], self.left).map_err(|resp::BadReply| BadResponse)?;
                    self.left -= here;
                    used += here as usize;
                    if self.left == 0 {
                        if !has_end {
                            return Ok(self.complete(used));
                        }
                        self.state = ParserState::Closing;
                    }
                }
                // States of other protocols.
                ParserState::Chunked | ParserState::UntilClose => return Err(BadResponse),
            }
        }
        Ok(ParseProgress::More)
    }

    /// Parses a line: the part of it in the record, if any, and then `bytes`. Returns how many of `bytes`
    /// belong to the line, or `None` if its end has not arrived.
    fn line(
        &mut self,
        bytes: &[u8],
        records: &mut PartialResponses,
        parse_line: impl FnOnce(&[u8]) -> Result<ReplyLine, BadResponse>,
    ) -> Result<Option<(usize, ReplyLine)>, BadResponse> {
        let is_whole = matches!(self.state, ParserState::Start | ParserState::Closing);
        let end = memchr::memchr(b'\n', &bytes[..bytes.len().min(LINE_BYTES_MAX)]);
        if let (true, Some(end)) = (is_whole, end) {
            return Ok(Some((end + 1, parse_line(strip_crlf(&bytes[..=end])?)?)));
        }
        if is_whole {
            self.partial = records.take();
        }
        let pieces = &mut records.get(self.partial).bytes;
        let here = end.map_or(bytes.len(), |end| end + 1);
        if pieces.len() + here > LINE_BYTES_MAX {
            return Err(BadResponse);
        }
        pieces.extend_from_slice(&bytes[..here]);
        if end.is_none() {
            return Ok(None);
        }
        let reply = parse_line(strip_crlf(pieces)?)?;
        self.release(records);
        Ok(Some((here, reply)))
    }
}

fn strip_crlf(line: &[u8]) -> Result<&[u8], BadResponse> {
    line.strip_suffix(CRLF).ok_or(BadResponse)
}

/// Parses a line of RESP.
fn redis(line: &[u8]) -> Result<ReplyLine, BadResponse> {
    match parse_line(line) {
        Ok(resp::ReplyLine::Null) if line.starts_with(b"$") => Ok(ReplyLine::Complete(MISSING)),
        Ok(resp::ReplyLine::Bulk(len)) => Ok(ReplyLine::Value(len)),
        Ok(resp::ReplyLine::Simple(_) | resp::ReplyLine::Integer) => Ok(ReplyLine::Complete(FOUND)),
        Ok(resp::ReplyLine::Error(_)) => Ok(ReplyLine::Complete(ERROR)),
        // Arrays do not occur as responses to these requests.
        Ok(resp::ReplyLine::Null | resp::ReplyLine::Array(_)) | Err(resp::BadReply) => Err(BadResponse),
    }
}

/// Parses a line of memcached's protocol.
fn memcached(line: &[u8]) -> Result<ReplyLine, BadResponse> {
    match line {
        b"END" => Ok(ReplyLine::Complete(MISSING)),
        b"STORED" => Ok(ReplyLine::Complete(FOUND)),
        b"NOT_STORED" | b"ERROR" => Ok(ReplyLine::Complete(ERROR)),
        _ if line.starts_with(b"SERVER_ERROR ") || line.starts_with(b"CLIENT_ERROR ") => {
            Ok(ReplyLine::Complete(ERROR))
        }
        _ => {
            // VALUE key flags bytes
            let mut words = line.split(|byte| *byte == b' ');
            let (verb, key) = (words.next(), words.next());
            if verb != Some(b"VALUE") || key.is_none_or(<[u8]>::is_empty) {
                return Err(BadResponse);
            }
            words.next().and_then(decimal).ok_or(BadResponse)?;
            let found = parse_length(words.next().unwrap_or_default())?;
            if words.next().is_some() { Err(BadResponse) } else { Ok(found) }
        }
    }
}

fn parse_length(digits: &[u8]) -> Result<ReplyLine, BadResponse> {
    decimal(digits).filter(|len| *len <= VALUE_BYTES_MAX).map(ReplyLine::Value).ok_or(BadResponse)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::response::Protocol;
    use proptest::prelude::*;

    /// Returns the statuses of all responses in `bytes`, parsed in parts of `step` bytes; 0 stands for an
    /// error.
    fn read(protocol: Protocol, bytes: &[u8], step: usize) -> Vec<u16> {
        let (mut parser, mut records, mut statuses) =
            (Parser::default(), PartialResponses::default(), Vec::new());
        'all: for mut chunk in bytes.chunks(step) {
            while !chunk.is_empty() {
                match parser.read(chunk, protocol, &mut records) {
                    Ok(ParseProgress::More) => break,
                    Ok(ParseProgress::Complete(used, response)) => {
                        assert!(!response.close && parser.is_at_start() && records.in_use() == 0);
                        statuses.push(response.status);
                        chunk = &chunk[used..];
                    }
                    Err(BadResponse) => {
                        statuses.push(0);
                        break 'all;
                    }
                }
            }
        }
        assert_eq!(parser.end(), None, "the end of a connection completes nothing");
        parser.reset(&mut records);
        assert_eq!(records.in_use(), 0);
        statuses
    }

    fn check(protocol: Protocol, table: &[(&str, &[u16])]) {
        for (bytes, expected) in table {
            for step in [1, 2, 3, 5, 7, 10_000] {
                assert_eq!(read(protocol, bytes.as_bytes(), step), *expected, "{bytes:?} by {step}");
            }
        }
    }

    // limit: bytes of a received value
    #[test]
    fn answers_of_redis() {
        check(
            Protocol::Redis,
            &[
                ("$3\r\nabc\r\n", &[200]),
                ("$0\r\n\r\n$-1\r\n+OK\r\n:12\r\n:-3\r\n-ERR unknown\r\n", &[200, 404, 200, 200, 200, 500]),
                // A value may contain what looks like a response.
                ("$9\r\n$-1\r\n$-1\n\r\n$1\r\nx\r\n", &[200, 200]),
                ("$3\r\nabc", &[]),
                ("$3\r\nabc\r", &[]),
                ("$12", &[]),
                ("$3\r\nabcd\r\n", &[0]),
                ("$3\r\nabc\rx", &[0]),
                ("$3\nabc\r\n", &[0]),
                ("$x\r\n", &[0]),
                ("$-2\r\n", &[0]),
                ("$\r\n", &[0]),
                ("$536870913\r\n", &[0]),
                (":\r\n", &[0]),
                ("*1\r\n$1\r\nx\r\n", &[0]),
                ("\r\n", &[0]),
                ("HTTP/1.1 200 OK\r\n", &[0]),
            ],
        );
    }

    #[test]
    fn answers_of_memcached() {
        check(
            Protocol::Memcached,
            &[
                ("VALUE key 0 3\r\nabc\r\nEND\r\n", &[200]),
                ("VALUE key 0 0\r\n\r\nEND\r\nEND\r\nSTORED\r\nERROR\r\n", &[200, 404, 200, 500]),
                ("VALUE k 7 5\r\nEND\r\n\r\nEND\r\nVALUE k 7 1\r\nx\r\nEND\r\n", &[200, 200]),
                ("SERVER_ERROR out of memory\r\nCLIENT_ERROR bad\r\nNOT_STORED\r\n", &[500, 500, 500]),
                ("VALUE key 0 3\r\nabc\r\n", &[]),
                ("VALUE key 0 3\r\nabc\r\nEN", &[]),
                ("VALUE key 0 3\r\nabc\r\nVALUE key2 0 3\r\nabc\r\nEND\r\n", &[0]),
                ("VALUE key 0 3\r\nabcd\r\nEND\r\n", &[0]),
                ("VALUE key 0 3\r\nab\r\nEND\r\n", &[0]),
                ("VALUE key 0\r\n", &[0]),
                ("VALUE  0 3\r\n", &[0]),
                ("VALUE key x 3\r\n", &[0]),
                ("VALUE key 0 3 4 5\r\n", &[0]),
                ("VALUE key 0 -3\r\n", &[0]),
                ("END\n", &[0]),
                ("END \r\n", &[0]),
                ("$3\r\nabc\r\n", &[0]),
            ],
        );
    }

    // limit: bytes of a redis or memcached line
    #[test]
    fn an_endless_line_is_an_error() {
        for protocol in [Protocol::Redis, Protocol::Memcached] {
            let bytes = format!("-{}", "x".repeat(2 * LINE_BYTES_MAX));
            for step in [1, 1000, 100_000] {
                assert_eq!(read(protocol, bytes.as_bytes(), step), [0], "{protocol:?} by {step}");
            }
        }
    }

    proptest! {
        #[test]
        fn fragmentation_does_not_matter(
            parts in proptest::collection::vec(prop_oneof![
                Just("$2\r\nab\r\n".to_owned()),
                Just("$-1\r\n".to_owned()),
                Just("VALUE k 0 2\r\nab\r\nEND\r\n".to_owned()),
                Just("END\r\n".to_owned()),
                "[ -~\r\n]{0,10}",
            ], 0..6),
            step in 1usize..50,
        ) {
            let bytes = parts.concat();
            for protocol in [Protocol::Redis, Protocol::Memcached] {
                let (whole, pieces) = (read(protocol, bytes.as_bytes(), 1 << 20), read(protocol, bytes.as_bytes(), step));
                prop_assert_eq!(whole, pieces);
            }
        }
    }
}
