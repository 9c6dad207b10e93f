//! The chain of IPv6 extension headers (RFC 8200 §4), up to the transport header.

use crate::wire::icmpv6::parameter_problem::{ERRONEOUS_FIELD, UNKNOWN_NEXT_HEADER, UNKNOWN_OPTION};
use crate::wire::ipv6;
use crate::wire::{WireError, be16, be32, header_buffer, header_bytes, protocol};

/// Largest number of extension headers in a packet. RFC 8504 §5.3 permits such a limit; actual packets have
/// one or two.
pub const EXTENSION_HEADERS_MAX: usize = 8;

/// Largest number of options other than padding in a header (RFC 8504 §5.3 (4): the recommended default, also
/// Linux's).
pub const OPTIONS_MAX: usize = 8;

/// Largest number of consecutive padding bytes (RFC 8504 §5.3 (2)); alignment never needs more.
const PADDING_MAX: usize = 7;

const PAD1: u8 = 0;
const ROUTER_ALERT: u8 = 5;

/// A fragment header (RFC 8200 §4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentHeader {
    /// Type of the next header, valid in the first fragment.
    pub next_header: u8,
    /// Offset of the fragment within the fragmentable part of the original packet, in bytes (a multiple of
    /// 8).
    pub offset: u16,
    /// True if more fragments follow this one.
    pub more_fragments: bool,
    /// Identification, which all fragments of a packet share.
    pub ident: u32,
}

impl FragmentHeader {
    /// Length of the header in bytes.
    pub const LEN: usize = 8;

    /// Parses the header. Reserved bits are ignored.
    ///
    /// # Errors
    /// `Truncated`.
    pub fn parse(header: &[u8]) -> Result<Self, WireError> {
        let bytes = header_bytes::<{ Self::LEN }>(header)?;
        let field = be16(bytes, 2);
        Ok(Self {
            next_header: bytes[0],
            offset: field & 0xfff8,
            more_fragments: field & 1 != 0,
            ident: be32(bytes, 4),
        })
    }

    /// Writes the header and returns its length (8).
    ///
    /// # Panics
    /// If `out` is shorter than the header.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let out = header_buffer::<{ Self::LEN }>(out);
        let field = self.offset & 0xfff8 | u16::from(self.more_fragments);
        out[..2].copy_from_slice(&[self.next_header, 0]);
        out[2..4].copy_from_slice(&field.to_be_bytes());
        out[4..].copy_from_slice(&self.ident.to_be_bytes());
        Self::LEN
    }
}

/// A fragment header and its location, from which reassembly removes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentLocation {
    /// The header.
    pub header: FragmentHeader,
    /// Offset of the header within the packet. The bytes before it are the unfragmentable part.
    pub header_offset: usize,
    /// Offset, within the packet, of the next-header byte that refers to it.
    pub next_header_offset: usize,
}

/// The result of parsing a header chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderChain {
    /// The transport protocol, or the first header type that is not a supported extension header. In a
    /// fragment, the next header of the fragment header.
    pub protocol: u8,
    /// Offset of the first byte after the chain within the packet.
    pub offset: usize,
    /// Offset, within the packet, of the next-header byte with the value `protocol`, to which an ICMP error
    /// about an unknown header points (RFC 4443 §3.4).
    pub next_header_offset: usize,
    /// Set if the packet is a fragment. An atomic fragment, which is a whole packet, does not count (RFC
    /// 6946).
    pub fragment: Option<FragmentLocation>,
    /// Value of the router alert option, if present (RFC 2711): 0 for MLD.
    pub router_alert: Option<u16>,
}

/// Why a header chain cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderChainError {
    /// The packet is dropped silently.
    Drop(WireError),
    /// The packet is dropped and reported to its sender with an ICMPv6 parameter problem.
    ParameterProblem {
        /// Code of the message: see [`parameter_problem`](crate::wire::icmpv6::parameter_problem).
        code: u8,
        /// Offset of the problematic byte within the packet.
        pointer: u32,
        /// True if a packet to a multicast address is reported, too (RFC 8200 §4.2).
        even_if_multicast: bool,
    },
}

impl From<WireError> for HeaderChainError {
    fn from(error: WireError) -> Self {
        Self::Drop(error)
    }
}

/// Returns a parameter problem that is not reported for packets to multicast addresses.
fn problem(code: u8, at: usize) -> HeaderChainError {
    HeaderChainError::ParameterProblem { code, pointer: at as u32, even_if_multicast: false }
}

/// Parses the header chain of a packet, or of the part of it that an ICMP error quotes, up to the transport
/// header.
///
/// # Errors
/// [`HeaderChainError`]: the packet must be dropped.
#[inline]
pub fn walk_header_chain(packet: &[u8], header: &ipv6::Header) -> Result<HeaderChain, HeaderChainError> {
    match header.next_header {
        protocol::HOP_BY_HOP | protocol::ROUTING | protocol::FRAGMENT | protocol::DESTINATION_OPTIONS => {
            walk_extensions(packet, header)
        }
        transport => Ok(HeaderChain {
            protocol: transport,
            offset: ipv6::Header::LEN,
            next_header_offset: 6,
            fragment: None,
            router_alert: None,
        }),
    }
}

#[cold]
fn walk_extensions(packet: &[u8], header: &ipv6::Header) -> Result<HeaderChain, HeaderChainError> {
    let declared_end = ipv6::Header::LEN + usize::from(header.payload_len);
    let packet = &packet[..packet.len().min(declared_end)];
    let mut chain = HeaderChain {
        protocol: header.next_header,
        offset: ipv6::Header::LEN,
        next_header_offset: 6,
        fragment: None,
        router_alert: None,
    };
    for _ in 0..=EXTENSION_HEADERS_MAX {
        let at = chain.offset;
        let rest = packet.get(at..).ok_or(WireError::Truncated)?;
        match chain.protocol {
            protocol::HOP_BY_HOP if at != ipv6::Header::LEN => {
                // RFC 8200 §4.1: the hop-by-hop header may only come first; elsewhere it counts as an unknown
                // header.
                return Err(problem(UNKNOWN_NEXT_HEADER, chain.next_header_offset));
            }
            protocol::HOP_BY_HOP | protocol::DESTINATION_OPTIONS => {
                let extension = extension_header(rest)?;
                let alert = check_options(extension, at)?;
                if chain.protocol == protocol::HOP_BY_HOP {
                    chain.router_alert = alert;
                }
                chain.offset += extension.len();
            }
            protocol::ROUTING => {
                let extension = extension_header(rest)?;
                // RFC 8200 §4.4, RFC 5095: no routing type is supported, so the segments-left field must be
                // 0.
                if extension[3] != 0 {
                    return Err(problem(ERRONEOUS_FIELD, at + 2));
                }
                chain.offset += extension.len();
            }
            protocol::FRAGMENT => {
                let fragment = FragmentHeader::parse(rest)?;
                chain.offset += FragmentHeader::LEN;
                // RFC 6946: offset 0 without further fragments is a whole packet, regardless of other
                // fragments.
                if fragment.offset != 0 || fragment.more_fragments {
                    check_fragment(&fragment, at, declared_end.saturating_sub(chain.offset))?;
                    chain.fragment = Some(FragmentLocation {
                        header: fragment,
                        header_offset: at,
                        next_header_offset: chain.next_header_offset,
                    });
                    chain.protocol = fragment.next_header;
                    chain.next_header_offset = at;
                    return Ok(chain);
                }
            }
            _ => return Ok(chain),
        }
        chain.protocol = rest[0];
        chain.next_header_offset = at;
    }
    Err(HeaderChainError::Drop(WireError::Unsupported))
}

/// Returns the extension header at the start of `rest`, which contains its own length.
fn extension_header(rest: &[u8]) -> Result<&[u8], WireError> {
    let bytes = header_bytes::<8>(rest)?;
    rest.get(..8 + usize::from(bytes[1]) * 8).ok_or(WireError::Truncated)
}

/// Checks whether a fragment can be part of a packet (RFC 8200 §4.5). The error points to the field that is
/// wrong.
fn check_fragment(fragment: &FragmentHeader, at: usize, payload_len: usize) -> Result<(), HeaderChainError> {
    if fragment.more_fragments && !payload_len.is_multiple_of(8) {
        return Err(problem(ERRONEOUS_FIELD, 4));
    }
    // The payload length of the reassembled packet includes the extension headers of the unfragmentable part.
    if at - ipv6::Header::LEN + usize::from(fragment.offset) + payload_len > usize::from(u16::MAX) {
        return Err(problem(ERRONEOUS_FIELD, at + 2));
    }
    Ok(())
}

/// Checks the options of a hop-by-hop or destination options header and returns the router alert, if there is
/// one.
fn check_options(extension: &[u8], extension_at: usize) -> Result<Option<u16>, HeaderChainError> {
    let mut alert = None;
    let (mut count, mut padding) = (0, 0);
    let mut at = 2;
    while let Some(&kind) = extension.get(at) {
        if kind == PAD1 {
            at += 1;
            padding += 1;
        } else {
            let len = usize::from(*extension.get(at + 1).ok_or(WireError::BadLength)?);
            let body = extension.get(at + 2..at + 2 + len).ok_or(WireError::BadLength)?;
            match (kind, body) {
                (1, _) => padding += 2 + len,
                (ROUTER_ALERT, &[a, b]) => {
                    (alert, padding, count) = (Some(u16::from_be_bytes([a, b])), 0, count + 1)
                }
                _ => {
                    unknown_option(kind, extension_at + at)?;
                    (padding, count) = (0, count + 1);
                }
            }
            at += 2 + len;
        }
        if padding > PADDING_MAX || count > OPTIONS_MAX {
            return Err(HeaderChainError::Drop(WireError::Unsupported));
        }
    }
    Ok(alert)
}

/// RFC 8200 §4.2: the two highest bits of an unknown option's type determine what happens to the packet.
fn unknown_option(kind: u8, at: usize) -> Result<(), HeaderChainError> {
    match kind >> 6 {
        0 => Ok(()),
        1 => Err(HeaderChainError::Drop(WireError::Unsupported)),
        action => Err(HeaderChainError::ParameterProblem {
            code: UNKNOWN_OPTION,
            pointer: at as u32,
            even_if_multicast: action == 2,
        }),
    }
}

/// Writes a hop-by-hop header with a router alert for MLD (RFC 2711, RFC 3810 §5) and returns its length (8).
///
/// # Panics
/// If `out` is shorter than the header.
pub fn emit_router_alert(next_header: u8, out: &mut [u8]) -> usize {
    *header_buffer::<8>(out) = [next_header, 0, ROUTER_ALERT, 2, 0, 0, 1, 0];
    8
}

#[cfg(test)]
mod tests;
