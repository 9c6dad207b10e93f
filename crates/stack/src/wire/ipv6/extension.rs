//! The chain of IPv6 extension headers (RFC 8200 §4), up to the transport.

use super::Header;
use crate::wire::icmpv6::parameter_problem::{ERRONEOUS_FIELD, UNKNOWN_NEXT_HEADER, UNKNOWN_OPTION};
use crate::wire::{WireError, be16, be32, head, protocol, room};

/// Extension headers in one packet. RFC 8504 §5.3 lets a host limit them; real chains have one or two.
pub const EXTENSION_HEADERS_MAX: usize = 8;

/// Options other than padding in one header (RFC 8504 §5.3 (4): the recommended default, also Linux's).
pub const OPTIONS_MAX: usize = 8;

/// Bytes of padding in a row (RFC 8504 §5.3 (2)): more is never needed to align anything.
const PADDING_MAX: usize = 7;

const PAD1: u8 = 0;
const ROUTER_ALERT: u8 = 5;

/// A fragment header (RFC 8200 §4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentHeader {
    /// What follows it, in the first fragment.
    pub next_header: u8,
    /// Where the fragment belongs in the original packet's fragmentable part, in bytes (a multiple of 8).
    pub offset: u16,
    /// This is not the last fragment.
    pub more_fragments: bool,
    /// Identification of a packet's fragments.
    pub ident: u32,
}

impl FragmentHeader {
    /// Bytes of the header.
    pub const LEN: usize = 8;

    /// Reads the header. Reserved bits are ignored.
    ///
    /// # Errors
    /// `Truncated`.
    pub fn parse(header: &[u8]) -> Result<Self, WireError> {
        let bytes = head::<{ Self::LEN }>(header)?;
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
        let out = room::<{ Self::LEN }>(out);
        let field = self.offset & 0xfff8 | u16::from(self.more_fragments);
        out[..2].copy_from_slice(&[self.next_header, 0]);
        out[2..4].copy_from_slice(&field.to_be_bytes());
        out[4..].copy_from_slice(&self.ident.to_be_bytes());
        Self::LEN
    }
}

/// A fragment header and where it is: what reassembly needs to take it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentLocation {
    /// The header.
    pub header: FragmentHeader,
    /// Its first byte, counted from the start of the packet. All before it is the unfragmentable part.
    pub header_offset: usize,
    /// The next-header byte that announced it, counted from the start of the packet.
    pub next_header_offset: usize,
}

/// What a chain of headers leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderChain {
    /// The transport, or what else is no extension header that we look into. Of a fragment: what its header announces.
    pub protocol: u8,
    /// First byte after the chain, counted from the start of the packet.
    pub offset: usize,
    /// The next-header byte that named `protocol`, counted from the start of the packet: where an ICMP error about an unknown
    /// one points (RFC 4443 §3.4).
    pub next_header_offset: usize,
    /// Set if the packet is a fragment. An atomic one, which is the whole packet, is none (RFC 6946).
    pub fragment: Option<FragmentLocation>,
    /// Value of the router alert option, if it is there (RFC 2711): 0 for MLD.
    pub router_alert: Option<u16>,
}

/// Why a chain cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderChainError {
    /// Drop the packet silently.
    Drop(WireError),
    /// Drop the packet and tell the sender with an ICMPv6 parameter problem.
    ParameterProblem {
        /// Code of the message: see [`parameter_problem`](crate::wire::icmpv6::parameter_problem).
        code: u8,
        /// Which byte, counted from the start of the packet.
        pointer: u32,
        /// Tell the sender even if the packet went to a group (RFC 8200 §4.2).
        even_if_multicast: bool,
    },
}

impl From<WireError> for HeaderChainError {
    fn from(error: WireError) -> Self {
        Self::Drop(error)
    }
}

/// A parameter problem that is not reported about packets to groups.
fn problem(code: u8, at: usize) -> HeaderChainError {
    HeaderChainError::ParameterProblem { code, pointer: at as u32, even_if_multicast: false }
}

/// Follows the headers of a packet, or of as much of one as an ICMP error quotes, up to the transport.
///
/// # Errors
/// [`ChainError`]: the packet must be dropped.
#[inline]
pub fn walk_header_chain(packet: &[u8], header: &Header) -> Result<HeaderChain, HeaderChainError> {
    match header.next_header {
        protocol::HOP_BY_HOP | protocol::ROUTING | protocol::FRAGMENT | protocol::DESTINATION_OPTIONS => {
            walk_extensions(packet, header)
        }
        transport => Ok(HeaderChain {
            protocol: transport,
            offset: Header::LEN,
            next_header_offset: 6,
            fragment: None,
            router_alert: None,
        }),
    }
}

#[cold]
fn walk_extensions(packet: &[u8], header: &Header) -> Result<HeaderChain, HeaderChainError> {
    let declared_end = Header::LEN + usize::from(header.payload_len);
    let packet = &packet[..packet.len().min(declared_end)];
    let mut chain = HeaderChain {
        protocol: header.next_header,
        offset: Header::LEN,
        next_header_offset: 6,
        fragment: None,
        router_alert: None,
    };
    for _ in 0..=EXTENSION_HEADERS_MAX {
        let at = chain.offset;
        let rest = packet.get(at..).ok_or(WireError::Truncated)?;
        match chain.protocol {
            protocol::HOP_BY_HOP if at != Header::LEN => {
                // RFC 8200 §4.1: it may only come first; anywhere else it is an unknown header.
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
                // RFC 8200 §4.4, RFC 5095: no routing type is known here, so there must be nothing left to visit.
                if extension[3] != 0 {
                    return Err(problem(ERRONEOUS_FIELD, at + 2));
                }
                chain.offset += extension.len();
            }
            protocol::FRAGMENT => {
                let fragment = FragmentHeader::parse(rest)?;
                chain.offset += FragmentHeader::LEN;
                // RFC 6946: offset 0 and no more to come is a whole packet, whatever other fragments there are.
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

/// The extension header at the start of `rest`, which says its own length.
fn extension_header(rest: &[u8]) -> Result<&[u8], WireError> {
    let bytes = head::<8>(rest)?;
    rest.get(..8 + usize::from(bytes[1]) * 8).ok_or(WireError::Truncated)
}

/// RFC 8200 §4.5: what makes a fragment impossible to put back, each with where to point.
fn check_fragment(fragment: &FragmentHeader, at: usize, payload_len: usize) -> Result<(), HeaderChainError> {
    if fragment.more_fragments && !payload_len.is_multiple_of(8) {
        return Err(problem(ERRONEOUS_FIELD, 4));
    }
    // The rebuilt packet's payload length counts the unfragmentable part's extension headers as well.
    if at - Header::LEN + usize::from(fragment.offset) + payload_len > usize::from(u16::MAX) {
        return Err(problem(ERRONEOUS_FIELD, at + 2));
    }
    Ok(())
}

/// Checks the options of a hop-by-hop or destination options header and returns the router alert, if there is one.
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

/// RFC 8200 §4.2: the two highest bits of an option's type say what to do with a packet if it is unknown.
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
    *room::<8>(out) = [next_header, 0, ROUTER_ALERT, 2, 0, 0, 1, 0];
    8
}

#[cfg(test)]
mod tests;
