//! Just enough of Redis' RESP and of memcached's text protocol to know whether a value was found, and where each answer ends.
//!
//! Both answer with a line, which may announce a number of bytes that follow with a line's end behind them; memcached then has one more line.

use super::http::decimal;
use super::{BadResponse, ParseProgress, Parser, ParserState, PartialResponses};

/// Longest line: of those that are read, errors are the longest.
// limit: bytes of a redis or memcached line
const LINE_BYTES_MAX: usize = 4 << 10;
/// Longest value that is believed: Redis' longest.
// limit: bytes of a received value
const VALUE_BYTES_MAX: u64 = 512 << 20;
/// What ends a line, and a value.
const CRLF: &[u8; 2] = b"\r\n";

/// A value was found, or what was asked for was done.
const FOUND: u16 = 200;
/// There is no such value.
const MISSING: u16 = 404;
/// The server says that something is wrong.
const ERROR: u16 = 500;

/// What a line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplyLine {
    /// It is the whole answer.
    Complete(u16),
    /// So many bytes follow.
    Value(u64),
}

impl Parser {
    /// Reads on.
    pub(super) fn read_redis(
        &mut self,
        bytes: &[u8],
        records: &mut PartialResponses,
    ) -> Result<ParseProgress, BadResponse> {
        self.read_values(bytes, records, redis, false)
    }

    /// Reads on.
    pub(super) fn read_memcached(
        &mut self,
        bytes: &[u8],
        records: &mut PartialResponses,
    ) -> Result<ParseProgress, BadResponse> {
        self.read_values(bytes, records, memcached, true)
    }

    /// Reads on; `understand` is what lines mean. With `has_end` an answer with a value ends with a line `END`.
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
                        // Only one key was asked for.
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
                    check_crlf(&rest[..here as usize], self.left)?;
                    self.left -= here;
                    used += here as usize;
                    if self.left == 0 {
                        if !has_end {
                            return Ok(self.complete(used));
                        }
                        self.state = ParserState::Closing;
                    }
                }
                // States of another language.
                ParserState::Chunked | ParserState::UntilClose => return Err(BadResponse),
            }
        }
        Ok(ParseProgress::More)
    }

    /// What the line says whose rest begins `bytes`, and how many of them belong to it; `None` if its end is not there.
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

/// Fails if the last bytes of what is to come of a value, as far as `bytes` has them, do not end a line. `left` counts them from the start of `bytes`.
fn check_crlf(bytes: &[u8], left: u64) -> Result<(), BadResponse> {
    let from_end = |n: u64| left.checked_sub(n).and_then(|at| bytes.get(usize::try_from(at).ok()?));
    let is = |byte: Option<&u8>, wanted: u8| byte.is_none_or(|byte| *byte == wanted);
    if is(from_end(2), CRLF[0]) && is(from_end(1), CRLF[1]) { Ok(()) } else { Err(BadResponse) }
}

/// What a line of RESP says.
fn redis(line: &[u8]) -> Result<ReplyLine, BadResponse> {
    match line.split_first() {
        Some((b'$', b"-1")) => Ok(ReplyLine::Complete(MISSING)),
        Some((b'$', digits)) => parse_length(digits),
        Some((b'+', _)) => Ok(ReplyLine::Complete(FOUND)),
        Some((b'-', _)) => Ok(ReplyLine::Complete(ERROR)),
        Some((b':', number)) => {
            let digits = number.strip_prefix(b"-").unwrap_or(number);
            decimal(digits).map(|_| ReplyLine::Complete(FOUND)).ok_or(BadResponse)
        }
        // Arrays are no answer to what is asked here.
        _ => Err(BadResponse),
    }
}

/// What a line of memcached says.
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

    /// The statuses of all answers in `bytes` shown in pieces of `step`; 0 stands for an error.
    fn read(language: Protocol, bytes: &[u8], step: usize) -> Vec<u16> {
        let (mut parser, mut records, mut statuses) =
            (Parser::default(), PartialResponses::default(), Vec::new());
        'all: for mut chunk in bytes.chunks(step) {
            while !chunk.is_empty() {
                match parser.read(chunk, language, &mut records) {
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

    fn check(language: Protocol, table: &[(&str, &[u16])]) {
        for (bytes, expected) in table {
            for step in [1, 2, 3, 5, 7, 10_000] {
                assert_eq!(read(language, bytes.as_bytes(), step), *expected, "{bytes:?} by {step}");
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
                // What looks like an answer may be a part of a value.
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
        for language in [Protocol::Redis, Protocol::Memcached] {
            let bytes = format!("-{}", "x".repeat(2 * LINE_BYTES_MAX));
            for step in [1, 1000, 100_000] {
                assert_eq!(read(language, bytes.as_bytes(), step), [0], "{language:?} by {step}");
            }
        }
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
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
            for language in [Protocol::Redis, Protocol::Memcached] {
                let (whole, pieces) = (read(language, bytes.as_bytes(), 1 << 20), read(language, bytes.as_bytes(), step));
                prop_assert_eq!(whole, pieces);
            }
        }
    }
}
