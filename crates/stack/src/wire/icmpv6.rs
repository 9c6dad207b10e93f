//! ICMP for IPv6 (RFC 4443). Its neighbour discovery messages are in [`ndp`](super::ndp), its group
//! membership messages in [`mld`](super::mld).

use super::checksum::{Sum, pseudo_v6};
use super::echo::Echo;
use super::{WireError, be32, header_bytes, protocol};
use core::net::Ipv6Addr;

/// Codes of "destination unreachable" (RFC 4443 §3.1).
pub mod unreachable {
    /// There is no route to the destination.
    pub const NO_ROUTE: u8 = 0;
    /// Communication is administratively prohibited.
    pub const ADMINISTRATIVELY_PROHIBITED: u8 = 1;
    /// The scope of the source address is exceeded.
    pub const BEYOND_SCOPE: u8 = 2;
    /// The address cannot be reached.
    pub const ADDRESS: u8 = 3;
    /// No socket has the port.
    pub const PORT: u8 = 4;
    /// The source address failed a policy.
    pub const SOURCE_POLICY: u8 = 5;
    /// The route rejects packets.
    pub const REJECT_ROUTE: u8 = 6;
}

/// Codes of "time exceeded" (RFC 4443 §3.3).
pub mod time_exceeded {
    /// The hop limit was exceeded in transit.
    pub const HOP_LIMIT: u8 = 0;
    /// Not all fragments arrived in time.
    pub const REASSEMBLY: u8 = 1;
}

/// Codes of "parameter problem" (RFC 4443 §3.4).
pub mod parameter_problem {
    /// A header field has an invalid value.
    pub const ERRONEOUS_FIELD: u8 = 0;
    /// The next-header value is unknown.
    pub const UNKNOWN_NEXT_HEADER: u8 = 1;
    /// An option is unknown.
    pub const UNKNOWN_OPTION: u8 = 2;
    /// The first fragment does not contain the complete header chain (RFC 7112 §5).
    pub const INCOMPLETE_HEADER_CHAIN: u8 = 3;
}

/// Bytes in front of the quoted packet or the echo data.
pub const HEADER_LEN: usize = 8;

/// Largest number of bytes quoted of the offending packet: the error must fit into the minimum MTU (RFC 4443
/// §2.4 (c)).
pub const QUOTE_LEN_MAX: usize = 1280 - 40 - HEADER_LEN;

pub(crate) const UNREACHABLE: u8 = 1;
pub(crate) const PACKET_TOO_BIG: u8 = 2;
pub(crate) const TIME_EXCEEDED: u8 = 3;
pub(crate) const PARAMETER_PROBLEM: u8 = 4;
const ECHO_REQUEST: u8 = 128;
const ECHO_REPLY: u8 = 129;

/// Returns whether a message may be answered by an ICMP error: not if it is an error itself, or a redirect
/// (RFC 4443 §2.4 (e)).
pub const fn is_query(kind: u8) -> bool {
    kind >= 128 && kind != super::ndp::REDIRECT
}

/// An ICMPv6 message.
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
        /// The beginning of the offending packet: see
        /// [`ipv6::Header::parse_quoted`](super::ipv6::Header::parse_quoted).
        quote: &'a [u8],
    },
    /// A packet exceeds the MTU of a link on its path.
    PacketTooBig {
        /// MTU of that link in bytes.
        mtu: u32,
        /// The beginning of the offending packet.
        quote: &'a [u8],
    },
    /// A packet exceeded its hop limit, or its fragments did not arrive in time.
    TimeExceeded {
        /// Where: see [`time_exceeded`].
        code: u8,
        /// The beginning of the offending packet.
        quote: &'a [u8],
    },
    /// A packet was not understood.
    ParameterProblem {
        /// The kind of problem: see [`parameter_problem`].
        code: u8,
        /// Offset of the problematic byte within the packet.
        pointer: u32,
        /// The beginning of the offending packet.
        quote: &'a [u8],
    },
    /// A neighbour discovery message (types 133 to 137), complete, for
    /// [`NdpMessage::parse`](super::ndp::NdpMessage::parse).
    Ndp(&'a [u8]),
    /// A query for group members (type 130), complete, for
    /// [`mld::parse_query`](super::mld::parse_query).
    MldQuery(&'a [u8]),
    /// Any other message.
    Other {
        /// Type.
        kind: u8,
        /// Code.
        code: u8,
        /// The bytes after the checksum.
        body: &'a [u8],
    },
}

impl<'a> Message<'a> {
    /// Parses a message and verifies its checksum, which covers the addresses of the packet. The quoted
    /// packet of an error is not validated: this host may not have sent it.
    ///
    /// # Errors
    /// `Truncated`, `BadChecksum`.
    pub fn parse(message: &'a [u8], src: Ipv6Addr, dst: Ipv6Addr) -> Result<Self, WireError> {
        let bytes = header_bytes::<4>(message)?;
        if !pseudo_v6(src, dst, protocol::ICMPV6, message.len()).add(Sum::of(message)).is_valid() {
            return Err(WireError::BadChecksum);
        }
        let (kind, code) = (bytes[0], bytes[1]);
        match kind {
            super::ndp::ROUTER_SOLICITATION..=super::ndp::REDIRECT => return Ok(Self::Ndp(message)),
            super::mld::QUERY => return Ok(Self::MldQuery(message)),
            UNREACHABLE..=PARAMETER_PROBLEM | ECHO_REQUEST | ECHO_REPLY => {}
            _ => return Ok(Self::Other { kind, code, body: &message[4..] }),
        }
        let bytes = header_bytes::<HEADER_LEN>(message)?;
        let rest = &message[HEADER_LEN..];
        Ok(match kind {
            UNREACHABLE => Self::Unreachable { code, quote: rest },
            PACKET_TOO_BIG => Self::PacketTooBig { mtu: be32(bytes, 4), quote: rest },
            TIME_EXCEEDED => Self::TimeExceeded { code, quote: rest },
            PARAMETER_PROBLEM => Self::ParameterProblem { code, pointer: be32(bytes, 4), quote: rest },
            ECHO_REQUEST => Self::EchoRequest(Echo::new(bytes, rest)),
            _ => Self::EchoReply(Echo::new(bytes, rest)),
        })
    }

    /// Returns type, code, the four bytes after the checksum if they are part of the header, and the
    /// remaining bytes.
    fn parts(&self) -> (u8, u8, Option<u32>, &'a [u8]) {
        match *self {
            Self::EchoRequest(echo) => (ECHO_REQUEST, 0, Some(echo.word()), echo.data),
            Self::EchoReply(echo) => (ECHO_REPLY, 0, Some(echo.word()), echo.data),
            Self::Unreachable { code, quote } => (UNREACHABLE, code, Some(0), quote),
            Self::PacketTooBig { mtu, quote } => (PACKET_TOO_BIG, 0, Some(mtu), quote),
            Self::TimeExceeded { code, quote } => (TIME_EXCEEDED, code, Some(0), quote),
            Self::ParameterProblem { code, pointer, quote } => {
                (PARAMETER_PROBLEM, code, Some(pointer), quote)
            }
            Self::Ndp(message) | Self::MldQuery(message) => match message {
                [kind, code, _, _, body @ ..] => (*kind, *code, None, body),
                _ => (0, 0, None, &[]),
            },
            Self::Other { kind, code, body } => (kind, code, None, body),
        }
    }

    /// Returns the number of bytes that [`Message::emit`] writes.
    pub fn encoded_len(&self) -> usize {
        let (_, _, word, body) = self.parts();
        if word.is_some() { HEADER_LEN + body.len() } else { 4 + body.len() }
    }

    /// Writes the message with its checksum, for a packet with these addresses, and returns its length.
    ///
    /// # Panics
    /// If `out` is shorter than [`Message::encoded_len`].
    pub fn emit(&self, src: Ipv6Addr, dst: Ipv6Addr, out: &mut [u8]) -> usize {
        let (kind, code, word, body) = self.parts();
        let out = &mut out[..self.encoded_len()];
        out[..4].copy_from_slice(&[kind, code, 0, 0]);
        if let Some(word) = word {
            out[4..8].copy_from_slice(&word.to_be_bytes());
        }
        let body_at = out.len() - body.len();
        out[body_at..].copy_from_slice(body);
        complete_checksum(src, dst, out);
        out.len()
    }
}

/// Fills in the checksum of a message between these addresses.
pub(super) fn complete_checksum(src: Ipv6Addr, dst: Ipv6Addr, message: &mut [u8]) {
    message[2..4].fill(0);
    let sum = pseudo_v6(src, dst, protocol::ICMPV6, message.len()).add(Sum::of(message));
    message[2..4].copy_from_slice(&sum.finish().to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
    const B: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2);

    #[test]
    fn every_message_round_trips() {
        let quote = &[0x60, 1, 2, 3, 4][..];
        for message in [
            Message::EchoRequest(Echo { ident: 1, seq: 0xfffe, data: b"odd" }),
            Message::EchoReply(Echo { ident: 0xabcd, seq: 2, data: b"" }),
            Message::Unreachable { code: unreachable::PORT, quote },
            Message::PacketTooBig { mtu: 0x1_0500, quote },
            Message::TimeExceeded { code: time_exceeded::REASSEMBLY, quote },
            Message::ParameterProblem { code: parameter_problem::UNKNOWN_OPTION, pointer: 42, quote },
            Message::Other { kind: 200, code: 3, body: b"abc" },
            Message::Other { kind: 143, code: 0, body: b"" },
        ] {
            let mut out = [0xee; 64];
            let len = message.emit(A, B, &mut out);
            assert_eq!(len, message.encoded_len());
            assert_eq!(Message::parse(&out[..len], A, B), Ok(message));
        }
    }

    #[test]
    fn checksum_covers_the_addresses() {
        let mut out = [0; 16];
        Message::EchoRequest(Echo { ident: 1, seq: 2, data: b"12345678" }).emit(A, B, &mut out);
        assert_eq!(Message::parse(&out, A, A), Err(WireError::BadChecksum));
        for len in 0..16 {
            assert!(Message::parse(&out[..len], A, B).is_err());
        }
    }

    #[test]
    fn errors_and_redirects_never_trigger_errors() {
        assert!(!is_query(1) && !is_query(100) && !is_query(127) && !is_query(137));
        assert!(is_query(128) && is_query(135) && is_query(255));
    }
}
