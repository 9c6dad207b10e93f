//! Finds where messages begin and end in the two byte streams of a connection. Each protocol has a file,
//! which parses the head of a message and determines the form of the body.

mod http;
mod iot;
mod length_prefixed;
mod redis;

use crate::rules::LengthPrefixRule;
use ginnel_apps::httpd::body::BodyReader;

/// Index of the direction of requests.
pub(crate) const REQUEST: usize = 0;
/// Index of the direction of responses.
pub(crate) const RESPONSE: usize = 1;

/// Longest head of a message in bytes, and longest line of RESP. With a longer one the framing is lost.
// limit: bytes of a monitored message's head
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Largest capacity in bytes that a buffer keeps for the next message.
const RETAINED_BYTES_MAX: usize = 4 << 10;

/// A protocol, with its parameters.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Protocol {
    /// The wire format of `ginnel iot`, with messages of this many bytes.
    Iot { message_bytes: u32 },
    /// HTTP/1.0 and HTTP/1.1.
    Http,
    /// RESP, version 2 or 3.
    Redis,
    /// Messages that begin with their length.
    LengthPrefixed(Box<LengthPrefixRule>),
}

/// The bytes are no message of the protocol, or the beginning of the next message is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LostFraming;

/// Method of a request, as far as the form of its response depends on it (RFC 9112 §6.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RequestMethod {
    /// The head of the response alone says what follows it.
    #[default]
    Other,
    /// HEAD of HTTP: the response has no body, whatever its head says.
    Head,
    /// CONNECT of HTTP: a successful response has no body, whatever its head says, and a tunnel follows it.
    Connect,
}

/// Kind of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum MessageKind {
    /// A message that is answered once.
    Request { is_high: bool, method: RequestMethod },
    /// A message that is never answered.
    OneWay { is_high: bool },
    /// A response.
    #[default]
    Response,
    /// A message of the server that answers no request, such as an interim response.
    Unsolicited,
    /// A response after which the connection speaks another protocol.
    LastResponse,
}

/// Form of the bytes after the head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body {
    /// This many bytes.
    Length(u64),
    /// Chunks of HTTP.
    Chunked,
    /// `skip` bytes, then `items` values of RESP.
    Items { items: u64, skip: u64 },
    /// All bytes until the connection ends.
    UntilClose,
}

/// The head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MessageHead {
    /// Bytes of the head.
    pub(crate) len: usize,
    pub(crate) kind: MessageKind,
    pub(crate) body: Body,
}

/// Result of [`Framing::advance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Number of bytes that were used: all, unless a message ended before the last one.
    pub(crate) used: usize,
    /// True if the head of a message was completed by these bytes.
    pub(crate) has_begun: bool,
    /// True if a message was completed by these bytes.
    pub(crate) is_complete: bool,
}

impl Protocol {
    /// Parses the head of a message. Returns `None` if its end is not in `bytes`.
    #[inline]
    fn head(
        &self,
        direction: usize,
        bytes: &[u8],
        method: RequestMethod,
    ) -> Result<Option<MessageHead>, LostFraming> {
        match (self, direction) {
            (Self::Iot { message_bytes }, REQUEST) => iot::message(bytes, *message_bytes),
            (Self::Iot { .. }, _) => iot::answer(bytes),
            (Self::Http, REQUEST) => http::request(bytes),
            (Self::Http, _) => http::response(bytes, method),
            (Self::Redis, REQUEST) => redis::command(bytes),
            (Self::Redis, _) => redis::reply(bytes),
            (Self::LengthPrefixed(rule), direction) => length_prefixed::head(
                if direction == REQUEST { &rule.request } else { &rule.response },
                direction,
                bytes,
            ),
        }
    }

    /// Returns whether a message may begin with the payload of a segment. The payload has `len` bytes, of
    /// which `bytes` were captured. While the framing is lost, messages are expected only at the beginning of
    /// a payload.
    pub(crate) fn may_begin(&self, direction: usize, bytes: &[u8], len: u32) -> bool {
        let head = match self.head(direction, bytes, RequestMethod::Other) {
            Err(LostFraming) => return false,
            Ok(head) => head,
        };
        match self {
            Self::Iot { message_bytes } => {
                direction == RESPONSE || head.is_some() && len.is_multiple_of(*message_bytes)
            }
            Self::Http => true,
            // Anything may be an inline command.
            Self::Redis => direction == RESPONSE || bytes.first() == Some(&b'*'),
            Self::LengthPrefixed(_) => head.is_some_and(
                |head| matches!(head.body, Body::Length(left) if left + head.len as u64 == u64::from(len)),
            ),
        }
    }

    /// Returns whether the form of a response depends on the method of its request.
    pub(crate) fn has_methods(&self) -> bool {
        matches!(self, Self::Http)
    }

    /// Returns whether the responses of a connection may overtake each other by priority.
    pub(crate) fn may_overtake(&self) -> bool {
        matches!(self, Self::Iot { .. })
    }
}

/// The current message of one direction of a connection.
#[derive(Debug, Default)]
pub(crate) struct Framing {
    state: FramingState,
    kind: MessageKind,
    /// The beginning of a head or of a line.
    buffer: Vec<u8>,
}

#[derive(Debug, Default)]
enum FramingState {
    /// Before the first byte of a message.
    #[default]
    Start,
    /// The buffer has a part of a head.
    Head,
    /// This many bytes are to come.
    Length(u64),
    /// Chunks are to come.
    Chunked(BodyReader),
    /// Values of RESP are to come. The buffer may have a part of a line.
    Items {
        items: u64,
        skip: u64,
    },
    UntilClose,
}

impl Framing {
    /// Returns whether the next byte is the first one of a message.
    pub(crate) fn is_at_start(&self) -> bool {
        matches!(self.state, FramingState::Start)
    }

    /// Returns the kind of the message that began last.
    pub(crate) fn kind(&self) -> MessageKind {
        self.kind
    }

    /// Returns the bytes that the buffer takes.
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.buffer.capacity()
    }

    /// Returns the unused bytes of the buffer to the allocator.
    pub(crate) fn shrink_buffer(&mut self) {
        self.buffer.shrink_to_fit();
    }

    /// Forgets the current message.
    pub(crate) fn reset(&mut self) {
        self.state = FramingState::Start;
        self.buffer.clear();
        self.buffer.shrink_to(RETAINED_BYTES_MAX);
    }

    /// Examines bytes up to the end of a message. `method` is that of the request to which a response
    /// belongs.
    #[inline]
    pub(crate) fn advance(
        &mut self,
        protocol: &Protocol,
        direction: usize,
        bytes: &[u8],
        method: RequestMethod,
    ) -> Result<Step, LostFraming> {
        let (mut used, mut has_begun) = (0, false);
        while used < bytes.len() {
            let rest = &bytes[used..];
            let is_complete = match &mut self.state {
                FramingState::Start => match protocol.head(direction, rest, method)? {
                    Some(head) => {
                        used += head.len;
                        has_begun = true;
                        self.begin(head)
                    }
                    None => {
                        self.append(rest)?;
                        self.state = FramingState::Head;
                        used = bytes.len();
                        false
                    }
                },
                FramingState::Head => {
                    let before = self.buffer.len();
                    let part = &rest[..rest.len().min(HEAD_BYTES_MAX - before)];
                    self.append(part)?;
                    match protocol.head(direction, &self.buffer, method)? {
                        Some(head) => {
                            used += head.len.checked_sub(before).ok_or(LostFraming)?;
                            has_begun = true;
                            self.reset();
                            self.begin(head)
                        }
                        None if self.buffer.len() == HEAD_BYTES_MAX => return Err(LostFraming),
                        None => {
                            used += part.len();
                            false
                        }
                    }
                }
                FramingState::Length(left) => {
                    let here = (*left).min(rest.len() as u64);
                    *left -= here;
                    used += here as usize;
                    *left == 0
                }
                FramingState::Chunked(reader) => {
                    used += reader.read(rest).map_err(|_| LostFraming)?;
                    reader.is_done()
                }
                FramingState::Items { items, skip } if *skip > 0 => {
                    let here = (*skip).min(rest.len() as u64);
                    *skip -= here;
                    used += here as usize;
                    *items == 0 && *skip == 0
                }
                FramingState::Items { .. } => {
                    used += self.read_line(rest)?;
                    matches!(self.state, FramingState::Items { items: 0, skip: 0 })
                }
                FramingState::UntilClose => {
                    used = bytes.len();
                    false
                }
            };
            if is_complete {
                self.reset();
                return Ok(Step { used, has_begun, is_complete });
            }
        }
        Ok(Step { used, has_begun, is_complete: false })
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), LostFraming> {
        if self.buffer.len() + bytes.len() > HEAD_BYTES_MAX {
            return Err(LostFraming);
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// Starts the body of a message. Returns whether the message is complete.
    #[inline]
    fn begin(&mut self, head: MessageHead) -> bool {
        self.kind = head.kind;
        self.state = match head.body {
            Body::Length(0) | Body::Items { items: 0, skip: 0 } => return true,
            Body::Length(left) => FramingState::Length(left),
            Body::Chunked => FramingState::Chunked(BodyReader::chunked()),
            Body::Items { items, skip } => FramingState::Items { items, skip },
            Body::UntilClose => FramingState::UntilClose,
        };
        false
    }

    /// Reads the line of the next value of RESP, or a part of it. Returns the bytes that were used.
    fn read_line(&mut self, bytes: &[u8]) -> Result<usize, LostFraming> {
        let Some(end) = memchr::memchr(b'\n', bytes) else {
            self.append(bytes)?;
            return Ok(bytes.len());
        };
        let len = end + 1;
        let value = if self.buffer.is_empty() {
            redis::value(&bytes[..len])?
        } else {
            self.append(&bytes[..len])?;
            redis::value(&self.buffer)?
        };
        self.buffer.clear();
        if let FramingState::Items { items, skip } = &mut self.state {
            *items = (*items - 1).checked_add(value.items).ok_or(LostFraming)?;
            *skip = value.skip;
        }
        Ok(len)
    }

    /// Skips bytes that were not captured. Returns whether they complete a message.
    pub(crate) fn skip(&mut self, len: u64) -> Result<bool, LostFraming> {
        match &mut self.state {
            FramingState::Length(left) => {
                *left = left.checked_sub(len).ok_or(LostFraming)?;
                if *left > 0 {
                    return Ok(false);
                }
            }
            FramingState::Items { items, skip } if *skip > 0 => {
                *skip = skip.checked_sub(len).ok_or(LostFraming)?;
                if *skip > 0 || *items > 0 {
                    return Ok(false);
                }
            }
            FramingState::UntilClose => return Ok(false),
            _ => return Err(LostFraming),
        }
        self.reset();
        Ok(true)
    }

    /// Handles the end of the direction. Returns whether it completes a message.
    pub(crate) fn end(&mut self) -> bool {
        let is_complete = matches!(self.state, FramingState::UntilClose);
        self.reset();
        is_complete
    }
}

#[cfg(test)]
mod tests;
