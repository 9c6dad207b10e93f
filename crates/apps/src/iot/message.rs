//! The wire format of the IoT server: messages of a fixed length from the client, answers of a fixed text to
//! it.
//!
//! Bytes 0 to 3 of a message are a counter of the client. Byte 5 is 1 in a request and 0 in a heartbeat. Byte
//! 6, the label, is 2 in an urgent message; any other value makes the message an ordinary one. The other
//! bytes have no meaning. Byte 6 of an answer, its label, is 3.

/// Bytes at the beginning of a message that have a meaning.
pub const HEAD_BYTES: usize = 7;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 146;

/// Position of the byte that tells requests from heartbeats.
const KIND_AT: usize = 5;
/// Position of the label.
const LABEL_AT: usize = 6;
/// Label of an urgent message.
pub const URGENT: u8 = 2;
/// Label of an answer.
pub const ANSWER: u8 = 3;

/// The answer to a request whose commands were executed.
pub const ANSWER_OK: &[u8; ANSWER_BYTES] = b"HTTP/1\x031 200 OK\r\n\
Server: ginnel\r\n\
Content-Type: text/plain\r\n\
Connection: keep-alive\r\n\
Content-Length: 41\r\n\
\r\n\
Redis has executed GET, SET and GET: OK.\n";

/// The answer to a request whose commands failed, or were not executed before the deadline.
pub const ANSWER_ERROR: &[u8; ANSWER_BYTES] = b"HTTP/1\x031 503 Service Unavailable\r\n\
Server: ginnel\r\n\
Content-Type: text/plain\r\n\
Connection: keep-alive\r\n\
Content-Length: 24\r\n\
\r\n\
Redis does not answer.\r\n";

/// The meaning of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageHead {
    /// The client's counter, which becomes the value of its key.
    pub counter: [u8; 4],
    /// True for a request, false for a heartbeat.
    pub is_request: bool,
    /// True if the message overtakes ordinary ones.
    pub is_urgent: bool,
}

impl MessageHead {
    /// Parses the beginning of a message. Returns `None` if it is neither a request nor a heartbeat.
    pub fn parse(bytes: &[u8; HEAD_BYTES]) -> Option<Self> {
        let is_request = match bytes[KIND_AT] {
            0 => false,
            1 => true,
            _ => return None,
        };
        let [a, b, c, d, ..] = *bytes;
        Some(Self { counter: [a, b, c, d], is_request, is_urgent: bytes[LABEL_AT] == URGENT })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_http_with_a_label() {
        for (answer, status) in [(ANSWER_OK, 200), (ANSWER_ERROR, 503)] {
            assert_eq!((answer.len(), answer[LABEL_AT]), (146, ANSWER));
            let mut text = *answer;
            text[LABEL_AT] = b'.';
            let (mut headers, mut response) = ([httparse::EMPTY_HEADER; 8], None);
            let mut parsed = httparse::Response::new(&mut headers);
            if let httparse::Status::Complete(body) = parsed.parse(&text).unwrap() {
                response = Some((parsed.code, text.len() - body));
            }
            let length = parsed.headers.iter().find(|h| h.name == "Content-Length").unwrap().value;
            let length: usize = std::str::from_utf8(length).unwrap().parse().unwrap();
            assert_eq!(response, Some((Some(status), length)));
        }
    }

    #[test]
    fn kind_and_label_are_independent() {
        let head = |kind, label| MessageHead::parse(&[1, 2, 3, 4, 9, kind, label]);
        for label in 0..=u8::MAX {
            for (kind, is_request) in [(0, false), (1, true)] {
                let is_urgent = label == 2;
                assert_eq!(
                    head(kind, label),
                    Some(MessageHead { counter: [1, 2, 3, 4], is_request, is_urgent })
                );
            }
            assert!((2..=u8::MAX).all(|kind| head(kind, label).is_none()));
        }
    }
}
