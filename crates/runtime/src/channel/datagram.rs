//! Datagrams in the two streams of a UDP socket: each is a header followed by its bytes, without gaps. A
//! writer writes a whole datagram or nothing, and a reader consumes whole datagrams. A datagram that is
//! longer than the stream is transferred by a request; its header without bytes marks its place in the order.

use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::num::NonZeroU32;
use ginnel_stack::udp::UdpError;
use serde::{Deserialize, Serialize};

/// Bytes of a header.
pub(super) const HEADER_BYTES: usize = 48;
/// Most bytes of a datagram.
pub(super) const DATAGRAM_BYTES_MAX: usize = 65_535;

/// Least cost of sending a datagram, as the number of stream bytes that cost as much to send.
const COST_BYTES_MIN: usize = 1024;

/// Bits of [`DatagramHeader::present`].
pub(super) const HAS_TOS: u8 = 1;
pub(super) const HAS_HOP_LIMIT: u8 = 2;
pub(super) const HAS_FLOW_LABEL: u8 = 4;
pub(super) const HAS_AUTO_FLOW_LABEL: u8 = 8;

/// The header in front of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DatagramHeader {
    /// Bytes of the datagram.
    pub len: u32,
    /// True if the bytes do not follow and have to be requested.
    pub is_oversize: bool,
    /// The sender, or the destination of an outgoing datagram. The unspecified address with port 0 means the
    /// connected peer.
    pub peer: SocketAddr,
    /// The local address to which the datagram was sent, or from which it is to be sent. The unspecified
    /// address leaves the choice to the stack.
    pub local: IpAddr,
    /// Type of service, or traffic class; valid for an outgoing datagram if [`HAS_TOS`] is set in `present`.
    pub tos: u8,
    /// Time to live, or hop limit; valid for an outgoing datagram if [`HAS_HOP_LIMIT`] is set in `present`.
    pub hop_limit: u8,
    /// Flow label; valid for an outgoing datagram if [`HAS_FLOW_LABEL`] is set in `present`. At most 20 bits.
    pub flow_label: u32,
    /// Flags of the fields that override the socket's options for an outgoing datagram: [`HAS_TOS`],
    /// [`HAS_HOP_LIMIT`], [`HAS_FLOW_LABEL`]; [`HAS_AUTO_FLOW_LABEL`] asks for a label of the stack's.
    pub present: u8,
    /// The bytes are several datagrams of this size, of which the last may be shorter; 0 for a single
    /// datagram.
    pub gso_size: u16,
    /// Time of arrival, if requested: the lowest 32 bits of the microseconds since 1970. For an outgoing
    /// datagram, the time before which it must not be sent: those of the microseconds of the monotonic clock.
    #[serde(skip)]
    pub received_us: Option<NonZeroU32>,
}

fn ipv6_octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

impl DatagramHeader {
    /// Returns how many bytes of the stream the header and the bytes after it take.
    pub fn stream_bytes(&self) -> usize {
        HEADER_BYTES + if self.is_oversize { 0 } else { self.len as usize }
    }

    /// Returns the cost of sending the datagram, as the number of stream bytes that cost as much to send.
    pub fn cost(&self) -> usize {
        let len = self.len as usize;
        let packets = if self.gso_size == 0 { 1 } else { len.div_ceil(self.gso_size.into()).max(1) };
        len.max(packets * COST_BYTES_MIN)
    }

    /// Encodes the header in the byte order of the machine.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        // Cannot truncate: no datagram is longer than `DATAGRAM_BYTES_MAX`.
        out[..2].copy_from_slice(&(self.len as u16).to_ne_bytes());
        out[2..4].copy_from_slice(&(self.flow_label as u16).to_ne_bytes());
        out[4] = (self.flow_label >> 16 << 4) as u8 | u8::from(self.is_oversize);
        (out[5], out[6]) = (self.tos, self.hop_limit);
        out[7] = self.present;
        out[8..10].copy_from_slice(&self.peer.port().to_ne_bytes());
        out[10..12].copy_from_slice(&self.gso_size.to_ne_bytes());
        out[12..16].copy_from_slice(&self.received_us.map_or(0, NonZeroU32::get).to_ne_bytes());
        out[16..32].copy_from_slice(&ipv6_octets(self.peer.ip()));
        out[32..48].copy_from_slice(&ipv6_octets(self.local));
        out
    }

    /// Decodes a header; `None` if it is malformed.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let short = |at: usize| u32::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]]));
        let address = |from: usize| {
            let octets: [u8; 16] = bytes[from..from + 16].try_into().expect("the range has sixteen bytes");
            Ipv6Addr::from(octets).to_canonical()
        };
        (bytes[4] & 0xe == 0).then(|| Self {
            len: short(0),
            flow_label: u32::from(bytes[4] >> 4) << 16 | short(2),
            is_oversize: bytes[4] & 1 != 0,
            peer: SocketAddr::new(address(16), u16::from_ne_bytes([bytes[8], bytes[9]])),
            local: address(32),
            tos: bytes[5],
            hop_limit: bytes[6],
            present: bytes[7],
            gso_size: u16::from_ne_bytes([bytes[10], bytes[11]]),
            received_us: NonZeroU32::new(u32::from_ne_bytes([bytes[12], bytes[13], bytes[14], bytes[15]])),
        })
    }
}

/// Errors that may be pending on a socket. An error's code in the socket's error word is its index plus one.
const PENDING_ERRORS: [UdpError; 11] = [
    UdpError::ConnectionRefused,
    UdpError::Unreachable,
    UdpError::HostUnreachable,
    UdpError::NetUnreachable,
    UdpError::TooLong,
    UdpError::NoBuffers,
    UdpError::BroadcastForbidden,
    UdpError::ProtocolUnreachable,
    UdpError::Prohibited,
    UdpError::ProtocolError,
    UdpError::Destroyed,
];

/// Bit of a socket's error word: the error queue has entries.
pub(super) const HAS_EXTENDED_ERRORS: u32 = 1 << 16;

/// Returns the code of an error; 0 for errors that are never pending.
pub(super) fn error_to_word(error: UdpError) -> u32 {
    PENDING_ERRORS.iter().position(|e| *e == error).map_or(0, |index| index as u32 + 1)
}

/// Returns the pending error in an error word; `None` if there is none.
pub(super) fn error_from_word(word: u32) -> Option<UdpError> {
    PENDING_ERRORS.get(((word & !HAS_EXTENDED_ERRORS) as usize).checked_sub(1)?).copied()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_datagram_has_a_minimum_cost() {
        let mut head = DatagramHeader::decode(&[0; HEADER_BYTES]).unwrap();
        assert_eq!(head.cost(), COST_BYTES_MIN, "also for an empty datagram");
        (head.len, head.gso_size) = (65_000, 0);
        assert_eq!(head.cost(), 65_000);
        head.gso_size = 1;
        assert_eq!(head.cost(), 65_000 * COST_BYTES_MIN);
        head.gso_size = 1400;
        assert_eq!(head.cost(), 65_000);
    }

    #[test]
    fn headers_and_errors_round_trip() {
        for (peer, local) in
            [("192.0.2.1:53", "192.0.2.2"), ("[2001:db8::1]:53", "2001:db8::2"), ("0.0.0.0:0", "::")]
        {
            let (peer, local) = (peer.parse().unwrap(), local.parse().unwrap());
            let header = DatagramHeader {
                len: 65_535,
                is_oversize: true,
                peer,
                local,
                tos: 3,
                hop_limit: 64,
                flow_label: 0xa_bcde,
                present: HAS_TOS,
                gso_size: 1400,
                received_us: NonZeroU32::new(77),
            };
            assert_eq!(DatagramHeader::decode(&header.encode()), Some(header));
        }
        let mut unknown = [0; HEADER_BYTES];
        unknown[4] = 2;
        assert_eq!(DatagramHeader::decode(&unknown), None);
        for error in PENDING_ERRORS {
            assert_eq!(error_from_word(error_to_word(error)), Some(error));
        }
        assert_eq!(
            (error_from_word(0), error_from_word(99), error_to_word(UdpError::WouldBlock)),
            (None, None, 0)
        );
        assert_eq!(
            (error_from_word(HAS_EXTENDED_ERRORS), error_from_word(HAS_EXTENDED_ERRORS | 1)),
            (None, Some(PENDING_ERRORS[0]))
        );
    }
}
