//! RESP2, the protocol of Redis: encodes commands, and decodes replies that arrive in pieces.

use core::fmt;

/// Longest line in bytes. The longest lines are error messages.
// limit: bytes of a redis or memcached line
pub const LINE_BYTES_MAX: usize = 4 << 10;
/// Largest value in bytes that is accepted: Redis' limit.
// limit: bytes of a received value
pub const VALUE_BYTES_MAX: u64 = 512 << 20;
/// Deepest nesting of arrays that is accepted. Redis' own replies have at most four levels.
// limit: nesting of arrays in a redis reply
const DEPTH_MAX: usize = 8;
/// The end of a line and of a value.
pub const CRLF: &[u8; 2] = b"\r\n";

/// Bytes that are not a reply of Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadReply;

impl fmt::Display for BadReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("what the server sent is not RESP2")
    }
}

impl std::error::Error for BadReply {}

/// A line with which a reply begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyLine<'a> {
    /// A status, such as `OK`.
    Simple(&'a [u8]),
    /// An error; its first word is its kind.
    Error(&'a [u8]),
    /// A number.
    Integer,
    /// No value (`$-1` or `*-1`).
    Null,
    /// This many bytes of a value and a CRLF follow.
    Bulk(u64),
    /// This many replies follow.
    Array(u64),
}

/// Parses a line without its CRLF.
///
/// # Errors
/// If no reply begins with the line.
pub fn parse_line(line: &[u8]) -> Result<ReplyLine<'_>, BadReply> {
    let (kind, rest) = line.split_first().ok_or(BadReply)?;
    match (kind, rest) {
        (b'+', text) => Ok(ReplyLine::Simple(text)),
        (b'-', text) => Ok(ReplyLine::Error(text)),
        (b':', number) => {
            let digits = number.strip_prefix(b"-").unwrap_or(number);
            decimal(digits).map(|_| ReplyLine::Integer).ok_or(BadReply)
        }
        (b'$' | b'*', b"-1") => Ok(ReplyLine::Null),
        (b'$', digits) => {
            decimal(digits).filter(|len| *len <= VALUE_BYTES_MAX).map(ReplyLine::Bulk).ok_or(BadReply)
        }
        (b'*', digits) => decimal(digits).map(ReplyLine::Array).ok_or(BadReply),
        _ => Err(BadReply),
    }
}

/// Parses an unsigned decimal number. Returns `None` for other bytes, and if it does not fit.
pub fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// Appends a command with its arguments to `out`.
pub fn encode_command(out: &mut Vec<u8>, words: &[&[u8]]) {
    encode_length(out, b'*', words.len());
    for word in words {
        encode_length(out, b'$', word.len());
        out.extend_from_slice(word);
        out.extend_from_slice(CRLF);
    }
}

fn encode_length(out: &mut Vec<u8>, kind: u8, len: usize) {
    /// Digits of the largest `u64`.
    const DIGITS_MAX: usize = 20;
    let (mut digits, mut start, mut rest) = ([0; DIGITS_MAX], DIGITS_MAX, len);
    loop {
        start -= 1;
        digits[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.push(kind);
    out.extend_from_slice(&digits[start..]);
    out.extend_from_slice(CRLF);
}

/// A complete reply. Values and elements of arrays are skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// A status, such as `OK`.
    Simple(&'a [u8]),
    /// An error; its first word is its kind.
    Error(&'a [u8]),
    /// A number.
    Integer,
    /// No value.
    Null,
    /// A value of this many bytes.
    Bulk(u64),
    /// An array of this many elements.
    Array(u64),
}

/// Decodes a stream of replies.
#[derive(Debug, Default)]
pub struct ReplyDecoder {
    /// The beginning of a line whose end has not arrived.
    line: Vec<u8>,
    /// Bytes of a value and its CRLF that have not arrived, and the length of the value.
    value: Option<(u64, u64)>,
    /// For each array that has not ended, from the outside: the elements that have not arrived.
    arrays: Vec<u64>,
    /// The length of the outermost array.
    array_len: u64,
}

impl ReplyDecoder {
    /// Decodes further bytes, and calls `on_reply` with each reply that is complete. After an error the
    /// stream cannot be continued.
    ///
    /// # Errors
    /// [`BadReply`] if the bytes are not RESP2, or exceed a limit of this module.
    pub fn decode(&mut self, mut bytes: &[u8], mut on_reply: impl FnMut(Reply<'_>)) -> Result<(), BadReply> {
        while !bytes.is_empty() {
            if let Some((left, len)) = &mut self.value {
                let here = (*left).min(bytes.len() as u64);
                // The cast cannot truncate: `here` is at most the length of the slice.
                let (value, rest) = bytes.split_at(here as usize);
                check_crlf(value, *left)?;
                (*left, bytes) = (*left - here, rest);
                if *left == 0 {
                    let reply = Reply::Bulk(*len);
                    self.value = None;
                    self.complete(reply, &mut on_reply);
                }
                continue;
            }
            let end = memchr::memchr(b'\n', bytes);
            let (piece, rest) = bytes.split_at(end.map_or(bytes.len(), |end| end + 1));
            if self.line.len() + piece.len() > LINE_BYTES_MAX {
                return Err(BadReply);
            }
            bytes = rest;
            if end.is_none() {
                self.line.extend_from_slice(piece);
            } else if self.line.is_empty() {
                self.read_line(piece, &mut on_reply)?;
            } else {
                let mut line = core::mem::take(&mut self.line);
                line.extend_from_slice(piece);
                self.read_line(&line, &mut on_reply)?;
                line.clear();
                self.line = line;
            }
        }
        Ok(())
    }

    /// Returns whether all replies so far are complete.
    pub fn is_at_start(&self) -> bool {
        self.line.is_empty() && self.value.is_none() && self.arrays.is_empty()
    }

    fn read_line(&mut self, line: &[u8], on_reply: &mut impl FnMut(Reply<'_>)) -> Result<(), BadReply> {
        let reply = match parse_line(line.strip_suffix(CRLF).ok_or(BadReply)?)? {
            ReplyLine::Bulk(len) => {
                self.value = Some((len + CRLF.len() as u64, len));
                return Ok(());
            }
            ReplyLine::Array(len @ 1..) => {
                if self.arrays.len() == DEPTH_MAX {
                    return Err(BadReply);
                }
                if self.arrays.is_empty() {
                    self.array_len = len;
                }
                self.arrays.push(len);
                return Ok(());
            }
            ReplyLine::Array(len) => Reply::Array(len),
            ReplyLine::Simple(text) => Reply::Simple(text),
            ReplyLine::Error(text) => Reply::Error(text),
            ReplyLine::Integer => Reply::Integer,
            ReplyLine::Null => Reply::Null,
        };
        self.complete(reply, on_reply);
        Ok(())
    }

    /// Records that a reply, or an element of an array, is complete.
    fn complete(&mut self, reply: Reply<'_>, on_reply: &mut impl FnMut(Reply<'_>)) {
        if self.arrays.is_empty() {
            return on_reply(reply);
        }
        while let Some(left) = self.arrays.last_mut() {
            *left -= 1;
            if *left > 0 {
                return;
            }
            self.arrays.pop();
        }
        on_reply(Reply::Array(self.array_len));
    }
}

/// Checks that the CRLF at the end of a value is correct, as far as `bytes` has it. `left` bytes of the value
/// and its CRLF are to come, counted from the start of `bytes`.
///
/// # Errors
/// If it is not.
pub fn check_crlf(bytes: &[u8], left: u64) -> Result<(), BadReply> {
    let from_end = |n: u64| left.checked_sub(n).and_then(|at| bytes.get(usize::try_from(at).ok()?));
    let is = |byte: Option<&u8>, wanted: u8| byte.is_none_or(|byte| *byte == wanted);
    if is(from_end(2), CRLF[0]) && is(from_end(1), CRLF[1]) { Ok(()) } else { Err(BadReply) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use redis_protocol::resp2::decode::decode;
    use redis_protocol::resp2::encode::encode;
    use redis_protocol::resp2::types::OwnedFrame as Frame;

    /// Decodes in pieces of `step` bytes, and shows the replies; an error ends the list.
    fn read(bytes: &[u8], step: usize) -> Vec<String> {
        let (mut decoder, mut replies) = (ReplyDecoder::default(), Vec::new());
        for piece in bytes.chunks(step) {
            if decoder.decode(piece, |reply| replies.push(show(reply))).is_err() {
                replies.push("error".to_owned());
                return replies;
            }
        }
        if !decoder.is_at_start() {
            replies.push("more".to_owned());
        }
        replies
    }

    fn show(reply: Reply<'_>) -> String {
        match reply {
            Reply::Simple(text) => format!("+{}", String::from_utf8_lossy(text)),
            Reply::Error(text) => format!("-{}", String::from_utf8_lossy(text)),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn replies_are_decoded_in_pieces_of_any_size() {
        for (bytes, expected) in [
            ("+OK\r\n$3\r\nabc\r\n", &["+OK", "Bulk(3)"][..]),
            ("$-1\r\n*-1\r\n$0\r\n\r\n", &["Null", "Null", "Bulk(0)"]),
            (":12\r\n:-3\r\n-ERR bad\r\n", &["Integer", "Integer", "-ERR bad"]),
            ("*0\r\n*2\r\n+a\r\n*2\r\n$1\r\n\n\r\n:1\r\n+b\r\n", &["Array(0)", "Array(2)", "+b"]),
            ("*1\r\n*0\r\n", &["Array(1)"]),
            ("$4\r\n\r\n+O\r\n", &["Bulk(4)"]),
            ("$3\r\nab", &["more"]),
            ("*1\r\n", &["more"]),
            ("+O", &["more"]),
            ("+OK\n", &["error"]),
            ("$1\r\nab\r\n", &["error"]),
            ("$-2\r\n", &["error"]),
            ("*x\r\n", &["error"]),
            (":\r\n", &["error"]),
            ("\r\n", &["error"]),
            ("HTTP/1.1 200 OK\r\n", &["error"]),
        ] {
            for step in 1..=bytes.len() {
                assert_eq!(read(bytes.as_bytes(), step), expected, "{bytes:?} in pieces of {step}");
            }
        }
    }

    // limit: bytes of a received value
    #[test]
    fn longer_value_is_refused() {
        assert_eq!(read(format!("${VALUE_BYTES_MAX}\r\n").as_bytes(), 99), ["more"]);
        assert_eq!(read(format!("${}\r\n", VALUE_BYTES_MAX + 1).as_bytes(), 99), ["error"]);
    }

    // limit: nesting of arrays in a redis reply
    #[test]
    fn deeper_nesting_is_refused() {
        let nested = |depth| "*1\r\n".repeat(depth) + "+x\r\n";
        assert_eq!(read(nested(DEPTH_MAX).as_bytes(), 7), ["Array(1)"]);
        assert_eq!(read(nested(DEPTH_MAX + 1).as_bytes(), 7), ["error"]);
    }

    // limit: bytes of a redis or memcached line
    #[test]
    fn endless_line_is_refused() {
        for step in [1, 1000, 100_000] {
            assert_eq!(read(&[b'-'; LINE_BYTES_MAX + 1], step), ["error"]);
            let longest = format!("-{}\r\n", "x".repeat(LINE_BYTES_MAX - 3));
            assert_eq!(read(longest.as_bytes(), step).len(), 1);
        }
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let leaf = prop_oneof![
            "[a-zA-Z ]{0,12}".prop_map(|text| Frame::SimpleString(text.into_bytes())),
            "[A-Z]{1,8} [a-z]{0,8}".prop_map(Frame::Error),
            any::<i64>().prop_map(Frame::Integer),
            proptest::collection::vec(any::<u8>(), 0..40).prop_map(Frame::BulkString),
            Just(Frame::Null),
        ];
        leaf.prop_recursive(3, 12, 4, |inner| proptest::collection::vec(inner, 0..4).prop_map(Frame::Array))
    }

    fn expected(frame: &Frame) -> String {
        match frame {
            Frame::SimpleString(text) => format!("+{}", String::from_utf8_lossy(text)),
            Frame::Error(text) => format!("-{text}"),
            Frame::Integer(_) => "Integer".to_owned(),
            Frame::BulkString(value) => format!("Bulk({})", value.len()),
            Frame::Array(elements) => format!("Array({})", elements.len()),
            Frame::Null => "Null".to_owned(),
        }
    }

    proptest! {
        #[test]
        fn replies_equal_those_of_redis_protocol(
            frames in proptest::collection::vec(frame(), 0..6),
            step in 1usize..60,
        ) {
            let mut bytes = Vec::new();
            for frame in &frames {
                let mut one = vec![0; 4096];
                let len = encode(&mut one, frame, false).unwrap();
                bytes.extend_from_slice(&one[..len]);
            }
            let wanted: Vec<String> = frames.iter().map(expected).collect();
            prop_assert_eq!(read(&bytes, step), wanted);
        }

        #[test]
        fn commands_are_what_redis_protocol_decodes(
            words in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 1..5),
        ) {
            let mut bytes = Vec::new();
            encode_command(&mut bytes, &words.iter().map(Vec::as_slice).collect::<Vec<_>>());
            let (frame, len) = decode(&bytes).unwrap().unwrap();
            prop_assert_eq!(len, bytes.len());
            prop_assert_eq!(frame, Frame::Array(words.into_iter().map(Frame::BulkString).collect()));
        }

        #[test]
        fn arbitrary_bytes_do_not_depend_on_pieces(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(b'\r'), Just(b'\n'), Just(b'$'),
                Just(b'*'), Just(b'1'), Just(b'+')], 0..60),
            step in 1usize..20,
        ) {
            prop_assert_eq!(read(&bytes, step), read(&bytes, 1000));
        }
    }
}
