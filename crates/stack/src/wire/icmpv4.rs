//! ICMP for IPv4 (RFC 792).

use super::checksum::Sum;
use super::echo::Echo;
use super::{WireError, be16, header_bytes};
use core::net::Ipv4Addr;

/// Codes of "destination unreachable" (RFC 792, RFC 1122 §3.2.2.1).
pub mod unreachable {
    /// Network unreachable.
    pub const NET: u8 = 0;
    /// Host unreachable.
    pub const HOST: u8 = 1;
    /// The host does not support the protocol.
    pub const PROTOCOL: u8 = 2;
    /// No socket has the port.
    pub const PORT: u8 = 3;
    /// The packet exceeds the MTU and must not be fragmented (RFC 1191).
    pub const FRAGMENTATION_NEEDED: u8 = 4;
    /// Source route failed.
    pub const SOURCE_ROUTE_FAILED: u8 = 5;
    /// Communication administratively prohibited (RFC 1812 §5.2.7.1).
    pub const ADMINISTRATIVELY_PROHIBITED: u8 = 13;
}

/// Codes of "time exceeded".
pub mod time_exceeded {
    /// The time to live was exceeded in transit.
    pub const TTL: u8 = 0;
    /// Not all fragments arrived in time.
    pub const REASSEMBLY: u8 = 1;
}

/// Bytes in front of the quoted packet or the echo data.
pub const HEADER_LEN: usize = 8;

/// Largest number of bytes quoted of the offending packet: the error with its IP header must fit into 576
/// bytes (RFC 1812 §4.3.2.3).
pub const QUOTE_LEN_MAX: usize = 576 - 20 - HEADER_LEN;

const ECHO_REPLY: u8 = 0;
pub(crate) const UNREACHABLE: u8 = 3;
const REDIRECT: u8 = 5;
const ECHO_REQUEST: u8 = 8;
pub(crate) const TIME_EXCEEDED: u8 = 11;
pub(crate) const PARAMETER_PROBLEM: u8 = 12;

/// Returns whether a message that was not understood may be answered by an ICMP error: only if its type is
/// known to be a query or a reply, since an error must not cause an error (RFC 1122 §3.2.2).
pub const fn is_query(kind: u8) -> bool {
    matches!(kind, ECHO_REPLY | ECHO_REQUEST | 13..=18)
}

/// An ICMP message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// An echo request ("ping").
    EchoRequest(Echo<'a>),
    /// An echo reply.
    EchoReply(Echo<'a>),
    /// A packet could not be delivered.
    Unreachable {
        /// The reason: see [`unreachable`](mod@unreachable).
        code: u8,
        /// MTU of the next hop in bytes; 0 if a router older than RFC 1191 does not report it (RFC 1191 §4).
        /// Valid only for `FRAGMENTATION_NEEDED`.
        mtu: u16,
        /// The beginning of the offending packet: see
        /// [`ipv4::Header::parse_quoted`](super::ipv4::Header::parse_quoted).
        quote: &'a [u8],
    },
    /// There is a better gateway. Redirects are not authenticated, and this stack ignores them.
    Redirect {
        /// Scope of the redirect: 0 network, 1 host.
        code: u8,
        /// The better gateway.
        gateway: Ipv4Addr,
        /// The beginning of the redirected packet.
        quote: &'a [u8],
    },
    /// A packet exceeded its time to live, or its fragments did not arrive in time.
    TimeExceeded {
        /// Where: see [`time_exceeded`].
        code: u8,
        /// The beginning of the offending packet.
        quote: &'a [u8],
    },
    /// A packet was not understood.
    ParameterProblem {
        /// The kind of problem.
        code: u8,
        /// Offset of the problematic byte within the packet.
        pointer: u8,
        /// The beginning of the offending packet.
        quote: &'a [u8],
    },
    /// Any other message.
    Other {
        /// Type.
        kind: u8,
        /// Code.
        code: u8,
        /// The four bytes after the checksum, uninterpreted.
        word: [u8; 4],
        /// The remaining bytes.
        body: &'a [u8],
    },
}

impl<'a> Message<'a> {
    /// Parses a message and verifies its checksum. The quoted packet of an error is not validated: this host
    /// may not have sent it.
    ///
    /// # Errors
    /// `Truncated`, `BadChecksum`.
    pub fn parse(message: &'a [u8]) -> Result<Self, WireError> {
        let bytes = header_bytes::<HEADER_LEN>(message)?;
        if !Sum::of(message).is_valid() {
            return Err(WireError::BadChecksum);
        }
        let (kind, code, rest) = (bytes[0], bytes[1], &message[HEADER_LEN..]);
        Ok(match kind {
            ECHO_REQUEST => Self::EchoRequest(Echo::new(bytes, rest)),
            ECHO_REPLY => Self::EchoReply(Echo::new(bytes, rest)),
            UNREACHABLE => Self::Unreachable { code, mtu: be16(bytes, 6), quote: rest },
            REDIRECT => {
                let gateway = Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7]);
                Self::Redirect { code, gateway, quote: rest }
            }
            TIME_EXCEEDED => Self::TimeExceeded { code, quote: rest },
            PARAMETER_PROBLEM => Self::ParameterProblem { code, pointer: bytes[4], quote: rest },
            _ => Self::Other { kind, code, word: [bytes[4], bytes[5], bytes[6], bytes[7]], body: rest },
        })
    }

    /// Returns type, code, the four bytes after the checksum, and the remaining bytes.
    fn parts(&self) -> (u8, u8, [u8; 4], &'a [u8]) {
        match *self {
            Self::EchoRequest(echo) => (ECHO_REQUEST, 0, echo.word().to_be_bytes(), echo.data),
            Self::EchoReply(echo) => (ECHO_REPLY, 0, echo.word().to_be_bytes(), echo.data),
            Self::Unreachable { code, mtu, quote } => {
                (UNREACHABLE, code, u32::from(mtu).to_be_bytes(), quote)
            }
            Self::Redirect { code, gateway, quote } => (REDIRECT, code, gateway.octets(), quote),
            Self::TimeExceeded { code, quote } => (TIME_EXCEEDED, code, [0; 4], quote),
            Self::ParameterProblem { code, pointer, quote } => {
                (PARAMETER_PROBLEM, code, [pointer, 0, 0, 0], quote)
            }
            Self::Other { kind, code, word, body } => (kind, code, word, body),
        }
    }

    /// Returns the number of bytes that [`Message::emit`] writes.
    pub fn encoded_len(&self) -> usize {
        HEADER_LEN + self.parts().3.len()
    }

    /// Writes the message with its checksum and returns its length.
    ///
    /// # Panics
    /// If `out` is shorter than [`Message::encoded_len`].
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let (kind, code, word, body) = self.parts();
        let out = &mut out[..HEADER_LEN + body.len()];
        out[..4].copy_from_slice(&[kind, code, 0, 0]);
        out[4..8].copy_from_slice(&word);
        out[HEADER_LEN..].copy_from_slice(body);
        let checksum = Sum::of(out).finish();
        out[2..4].copy_from_slice(&checksum.to_be_bytes());
        out.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_round_trips() {
        let quote = &[0x45, 1, 2, 3, 4][..];
        let gateway = Ipv4Addr::new(10, 0, 0, 1);
        for message in [
            Message::EchoRequest(Echo { ident: 1, seq: 0xfffe, data: b"odd" }),
            Message::EchoReply(Echo { ident: 0xabcd, seq: 2, data: b"" }),
            Message::Unreachable { code: unreachable::FRAGMENTATION_NEEDED, mtu: 1400, quote },
            Message::Redirect { code: 1, gateway, quote },
            Message::TimeExceeded { code: time_exceeded::REASSEMBLY, quote },
            Message::ParameterProblem { code: 0, pointer: 20, quote },
            Message::Other { kind: 13, code: 0, word: [1, 2, 3, 4], body: &[0; 12] },
        ] {
            let mut out = [0xee; 64];
            let len = message.emit(&mut out);
            assert_eq!(len, message.encoded_len());
            assert_eq!(Message::parse(&out[..len]), Ok(message));
        }
    }

    #[test]
    fn corrupted_or_truncated_messages_are_rejected() {
        let mut out = [0; 16];
        let len = Message::EchoRequest(Echo { ident: 1, seq: 2, data: b"12345678" }).emit(&mut out);
        assert_eq!(len, 16);
        for bit in 0..128 {
            let mut bad = out;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Message::parse(&bad), Err(WireError::BadChecksum), "{bit}");
        }
        assert_eq!(Message::parse(&out[..7]), Err(WireError::Truncated));
    }

    #[test]
    fn only_known_queries_may_trigger_errors() {
        assert!(is_query(0) && is_query(8) && is_query(13) && is_query(18));
        assert!([3, 4, 5, 11, 12, 1, 19, 255].iter().all(|&kind| !is_query(kind)));
    }
}
