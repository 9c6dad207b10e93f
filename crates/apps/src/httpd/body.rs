//! The end of message bodies (RFC 9112 §6–7). A server of files drops request bodies, but must find their end
//! to find the next request. The demo server relays bodies of requests and responses.

use super::head::BodyFraming;
use super::status::Status;

/// Most bytes of chunk extensions in one body.
const EXTENSION_BYTES_MAX: u32 = 4 << 10;
/// Most bytes of trailer fields in one body.
const TRAILER_BYTES_MAX: u32 = 8 << 10;

/// Finds the end of a body that may arrive in several parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BodyReader {
    state: BodyState,
    /// Bytes that further chunks may have within the limit. Not used with Content-Length.
    allowance: u64,
    /// Bytes of extensions and of trailers so far.
    extension_bytes: u32,
    trailer_bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyState {
    /// Bytes still to be skipped of a body with Content-Length.
    Length(u64),
    /// Within the digits of a chunk's size.
    Size { value: u64, digits: u8 },
    /// LF must follow the CR of the size line.
    SizeLf { value: u64 },
    /// Skips an extension of a chunk of this size.
    Extension { value: u64 },
    /// Bytes still to be skipped of a chunk.
    Data(u64),
    /// CR must follow the chunk.
    DataCr,
    /// LF must follow the CR after the chunk.
    DataLf,
    /// At the start of a line of the trailer section.
    TrailerStart,
    /// Within a line of the trailer section.
    Trailer,
    /// LF must follow the CR at the end of a trailer line.
    TrailerLf,
    /// LF must follow the CR of the last, empty line.
    LastLf,
    /// The body has ended.
    Done,
}

impl BodyReader {
    /// Creates a reader for a body of at most `bytes_max` bytes. A larger declared length is refused at once,
    /// with the status to answer with.
    pub fn new(framing: BodyFraming, bytes_max: u64) -> Result<Self, Status> {
        let state = match framing {
            BodyFraming::None | BodyFraming::Length(0) => BodyState::Done,
            BodyFraming::Length(length) if length > bytes_max => return Err(Status::ContentTooLarge),
            BodyFraming::Length(length) => BodyState::Length(length),
            BodyFraming::Chunked => BodyState::Size { value: 0, digits: 0 },
        };
        Ok(Self { state, allowance: bytes_max, extension_bytes: 0, trailer_bytes: 0 })
    }

    /// Creates a reader for a chunked body of any length.
    pub const fn chunked() -> Self {
        let state = BodyState::Size { value: 0, digits: 0 };
        Self { state, allowance: u64::MAX, extension_bytes: 0, trailer_bytes: 0 }
    }

    /// Returns true if the end of the body was found.
    pub fn is_done(&self) -> bool {
        self.state == BodyState::Done
    }

    /// Reads `bytes` and returns how many of them belong to the body: all of them, unless the body ends
    /// earlier. An error is the status to answer with.
    pub fn read(&mut self, bytes: &[u8]) -> Result<usize, Status> {
        let mut used = 0;
        while used < bytes.len() && self.state != BodyState::Done {
            used += match self.state {
                BodyState::Length(left) | BodyState::Data(left) => self.skip(left, bytes.len() - used),
                _ => {
                    self.state = self.step(bytes[used])?;
                    1
                }
            };
        }
        Ok(used)
    }

    /// Skips data of which `left` bytes are to come and `present` bytes are here; returns how many were
    /// skipped.
    fn skip(&mut self, left: u64, present: usize) -> usize {
        let here = left.min(present as u64);
        let left = left - here;
        self.state = match (self.state, left) {
            (BodyState::Length(_), 0) => BodyState::Done,
            (BodyState::Length(_), _) => BodyState::Length(left),
            (_, 0) => BodyState::DataCr,
            _ => BodyState::Data(left),
        };
        here as usize
    }

    fn step(&mut self, byte: u8) -> Result<BodyState, Status> {
        match (self.state, byte) {
            (BodyState::Size { value, digits }, b'0'..=b'9' | b'a'..=b'f' | b'A'..=b'F') => {
                if digits == 15 {
                    return Err(Status::ContentTooLarge); // 16 digits might overflow
                }
                let digit = (byte as char).to_digit(16).unwrap_or_default();
                Ok(BodyState::Size { value: value << 4 | u64::from(digit), digits: digits + 1 })
            }
            (BodyState::Size { digits: 0, .. }, _) => Err(Status::BadRequest),
            (BodyState::Size { value, .. }, b'\r') => Ok(BodyState::SizeLf { value }),
            (BodyState::Size { value, .. }, b';') => Ok(BodyState::Extension { value }),
            (BodyState::Extension { value }, b'\r') => Ok(BodyState::SizeLf { value }),
            (BodyState::Extension { .. }, b'\n') => Err(Status::BadRequest),
            (BodyState::Extension { value }, _) => {
                self.extension_bytes += 1;
                if self.extension_bytes > EXTENSION_BYTES_MAX {
                    return Err(Status::BadRequest);
                }
                Ok(BodyState::Extension { value })
            }
            (BodyState::SizeLf { value: 0 }, b'\n') => Ok(BodyState::TrailerStart),
            (BodyState::SizeLf { value }, b'\n') => {
                self.allowance = self.allowance.checked_sub(value).ok_or(Status::ContentTooLarge)?;
                Ok(BodyState::Data(value))
            }
            (BodyState::DataCr, b'\r') => Ok(BodyState::DataLf),
            (BodyState::DataLf, b'\n') => Ok(BodyState::Size { value: 0, digits: 0 }),
            (BodyState::TrailerStart, b'\r') => Ok(BodyState::LastLf),
            (BodyState::Trailer, b'\r') => Ok(BodyState::TrailerLf),
            (BodyState::TrailerStart | BodyState::Trailer, b'\n') => Err(Status::BadRequest),
            (BodyState::TrailerStart | BodyState::Trailer, _) => {
                self.trailer_bytes += 1;
                if self.trailer_bytes > TRAILER_BYTES_MAX {
                    return Err(Status::HeaderFieldsTooLarge);
                }
                Ok(BodyState::Trailer)
            }
            (BodyState::TrailerLf, b'\n') => Ok(BodyState::TrailerStart),
            (BodyState::LastLf, b'\n') => Ok(BodyState::Done),
            _ => Err(Status::BadRequest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAX: u64 = 1000;

    /// Returns how many bytes belong to the body and whether it is complete, or the status.
    fn read(framing: BodyFraming, bytes: &[u8], step: usize) -> Result<(usize, bool), u16> {
        let mut reader = BodyReader::new(framing, MAX).map_err(Status::code)?;
        let mut used = 0;
        for piece in bytes.chunks(step) {
            let n = reader.read(piece).map_err(Status::code)?;
            used += n;
            if n < piece.len() {
                break;
            }
        }
        Ok((used, reader.is_done()))
    }

    #[test]
    fn bodies_with_content_length_end() {
        assert_eq!(read(BodyFraming::None, b"x", 9), Ok((0, true)));
        assert_eq!(read(BodyFraming::Length(3), b"ab", 1), Ok((2, false)));
        assert_eq!(read(BodyFraming::Length(3), b"abcd", 9), Ok((3, true)));
        assert_eq!(read(BodyFraming::Length(MAX), b"abcd", 9), Ok((4, false)));
        assert_eq!(read(BodyFraming::Length(MAX + 1), b"", 9), Err(413));
    }

    #[test]
    fn chunked_bodies_end() {
        let table = [
            ("0\r\n\r\nX", Ok((5, true))),
            ("3\r\nabc\r\n0\r\n\r\n", Ok((13, true))),
            ("a;x=\"y\"\r\n0123456789\r\n0\r\n\r\nGET", Ok((26, true))),
            ("A\r\n0123456789\r\n00\r\nTrailer: x\r\nB: y\r\n\r\n", Ok((39, true))),
            ("3\r\nab", Ok((5, false))),
            ("\r\n", Err(400)),
            (";x\r\n", Err(400)),
            ("g\r\n", Err(400)),
            ("-1\r\n", Err(400)),
            ("0x1\r\n", Err(400)),
            (" 1\r\na\r\n", Err(400)),
            ("1 \r\na\r\n", Err(400)),
            ("1\na\r\n", Err(400)),
            ("1;x\na\r\n", Err(400)),
            ("1\r\nab\r\n", Err(400)),
            ("1\r\na\n", Err(400)),
            ("1\r\na\rx", Err(400)),
            ("0\r\n\n", Err(400)),
            ("0\r\nX: y\n\r\n", Err(400)),
            ("3e9\r\n", Err(413)),
            ("3e8\r\n", Ok((5, false))),
            ("ffffffffffffffff\r\n", Err(413)),
        ];
        for (bytes, expected) in table {
            for step in [1, 2, 3, 100] {
                assert_eq!(
                    read(BodyFraming::Chunked, bytes.as_bytes(), step),
                    expected,
                    "{bytes:?} by {step}"
                );
            }
        }
    }

    #[test]
    fn the_limit_applies_to_all_chunks_together() {
        let chunk = format!("64\r\n{}\r\n", "x".repeat(100));
        assert!(read(BodyFraming::Chunked, chunk.repeat(10).as_bytes(), 64).is_ok());
        assert_eq!(read(BodyFraming::Chunked, chunk.repeat(11).as_bytes(), 64), Err(413));
    }

    #[test]
    fn extensions_and_trailers_are_bounded() {
        let extension = format!("1;{}\r\na\r\n", "x".repeat(5000));
        assert_eq!(read(BodyFraming::Chunked, extension.as_bytes(), 64), Err(400));
        let trailer = format!("0\r\n{}", "A: b\r\n".repeat(2100));
        assert_eq!(read(BodyFraming::Chunked, trailer.as_bytes(), 64), Err(431));
    }

    proptest! {
        #[test]
        fn a_chunked_body_ends_exactly_at_its_end(
            chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..50), 0..8),
            rest in proptest::collection::vec(any::<u8>(), 0..20),
            step in 1usize..60,
        ) {
            let mut bytes = Vec::new();
            for chunk in &chunks {
                bytes.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
                bytes.extend_from_slice(chunk);
                bytes.extend_from_slice(b"\r\n");
            }
            bytes.extend_from_slice(b"0\r\n\r\n");
            let end = bytes.len();
            bytes.extend_from_slice(&rest);
            prop_assert_eq!(read(BodyFraming::Chunked, &bytes, step), Ok((end, true)));
        }

        #[test]
        fn fragmentation_does_not_matter(bytes in "[0-3a;\r\nX]{0,60}", step in 1usize..9) {
            let whole = read(BodyFraming::Chunked, bytes.as_bytes(), 1000);
            let pieces = read(BodyFraming::Chunked, bytes.as_bytes(), step);
            prop_assert_eq!(whole, pieces);
        }
    }
}
