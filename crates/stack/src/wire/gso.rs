//! Software segmentation: splits super-frames into the segments that Linux's GSO produces, and completes
//! checksums that were left to the device. For devices and layers without that offload.

use super::checksum::{Sum, copy_and_sum, pseudo_v4, pseudo_v6};
use super::tcp::{SeqNumber, TcpFlags, TcpHeader, TcpSegment};
use super::{WireError, ethernet, ipv4, ipv6, protocol, udp};
use crate::device::{Gso, GsoKind};
use core::net::{Ipv4Addr, Ipv6Addr};

/// The position of the parts of a super-frame, as offsets from its start.
struct SuperFrameLayout {
    network: NetworkHeader,
    network_at: usize,
    transport: TransportHeader,
    transport_at: usize,
    payload_at: usize,
    /// Offset of the first byte after the payload; padding follows it.
    end: usize,
}

enum NetworkHeader {
    V4 { src: Ipv4Addr, dst: Ipv4Addr, ident: u16 },
    V6 { src: Ipv6Addr, dst: Ipv6Addr },
}

enum TransportHeader {
    Tcp { seq: SeqNumber, flags: TcpFlags },
    Udp,
}

impl SuperFrameLayout {
    fn of(frame: &[u8], kind: GsoKind) -> Result<Self, WireError> {
        let ethernet = ethernet::Header::parse(frame)?;
        let network_at = usize::from(ethernet.len);
        let packet = &frame[network_at..];
        let (network, proto, transport_at, end) = match (ethernet.ethertype, kind) {
            (ethernet::EtherType::IPV4, GsoKind::Tcp4 | GsoKind::Udp) => {
                let ip = ipv4::Header::parse(packet)?;
                if ip.is_fragment() {
                    return Err(WireError::BadValue);
                }
                let network = NetworkHeader::V4 { src: ip.src, dst: ip.dst, ident: ip.ident };
                (network, ip.protocol, usize::from(ip.header_len), usize::from(ip.total_len))
            }
            (ethernet::EtherType::IPV6, GsoKind::Tcp6 | GsoKind::Udp) => {
                let ip = ipv6::Header::parse(packet)?;
                let chain = match ipv6::walk_header_chain(packet, &ip) {
                    Ok(chain) if chain.fragment.is_none() => chain,
                    _ => return Err(WireError::BadValue),
                };
                let network = NetworkHeader::V6 { src: ip.src, dst: ip.dst };
                (network, chain.protocol, chain.offset, ipv6::Header::LEN + usize::from(ip.payload_len))
            }
            _ => return Err(WireError::BadValue),
        };
        let body = packet.get(transport_at..end).ok_or(WireError::Truncated)?;
        let (transport, header_len) = match (proto, kind) {
            (protocol::TCP, GsoKind::Tcp4 | GsoKind::Tcp6) => {
                let TcpHeader { seq, flags, header_len, .. } = TcpSegment::parse(body)?.header;
                (TransportHeader::Tcp { seq, flags }, usize::from(header_len))
            }
            // The length field is overwritten, so its value does not matter.
            (protocol::UDP, GsoKind::Udp) if body.len() >= udp::Header::LEN => {
                (TransportHeader::Udp, udp::Header::LEN)
            }
            _ => return Err(WireError::BadValue),
        };
        let transport_at = network_at + transport_at;
        Ok(Self {
            network,
            network_at,
            transport,
            transport_at,
            payload_at: transport_at + header_len,
            end: network_at + end,
        })
    }

    /// Updates the IP header of segment number `index` for a packet that ends with `segment`.
    fn fix_network(&self, index: usize, segment: &mut [u8]) {
        let packet = &mut segment[self.network_at..];
        match self.network {
            NetworkHeader::V4 { ident, .. } => {
                let total_len = packet.len() as u16;
                // Linux increments the identification for each segment, even where DF makes it meaningless
                // (RFC 6864).
                let ident = ident.wrapping_add(index as u16);
                packet[2..4].copy_from_slice(&total_len.to_be_bytes());
                packet[4..6].copy_from_slice(&ident.to_be_bytes());
                packet[10..12].fill(0);
                let checksum = Sum::of(&packet[..self.transport_at - self.network_at]).finish();
                packet[10..12].copy_from_slice(&checksum.to_be_bytes());
            }
            NetworkHeader::V6 { .. } => {
                let payload_len = (packet.len() - ipv6::Header::LEN) as u16;
                packet[4..6].copy_from_slice(&payload_len.to_be_bytes());
            }
        }
    }

    /// Updates the transport header of the segment whose payload begins `offset` bytes after that of the
    /// super-frame, and completes its checksum.
    fn fix_transport(&self, offset: usize, last: bool, payload: Sum, segment: &mut [u8]) {
        let transport = &mut segment[self.transport_at..];
        let len = transport.len();
        let (proto, checksum_at) = match self.transport {
            TransportHeader::Tcp { seq, flags } => {
                let seq = seq + offset as u32;
                // FIN and PSH belong to the last segment; CWR answers a congestion signal once and belongs to
                // the first (RFC 3168 §6.1.2).
                let mut segment_flags = flags;
                if !last {
                    segment_flags = segment_flags.without(TcpFlags::FIN | TcpFlags::PSH);
                }
                if offset != 0 {
                    segment_flags = segment_flags.without(TcpFlags::CWR);
                }
                transport[4..8].copy_from_slice(&seq.0.to_be_bytes());
                transport[13] = segment_flags.0;
                (protocol::TCP, TcpHeader::CHECKSUM_OFFSET)
            }
            TransportHeader::Udp => {
                transport[4..6].copy_from_slice(&(len as u16).to_be_bytes());
                (protocol::UDP, udp::Header::CHECKSUM_OFFSET)
            }
        };
        let pseudo = match self.network {
            NetworkHeader::V4 { src, dst, .. } => pseudo_v4(src, dst, proto, len),
            NetworkHeader::V6 { src, dst } => pseudo_v6(src, dst, proto, len),
        };
        let header = &mut transport[..self.payload_at - self.transport_at];
        header[checksum_at..checksum_at + 2].fill(0);
        // Headers have an even length, so the sum of the payload needs no byte swap.
        let sum = pseudo.add(Sum::of(header)).add(payload);
        let checksum = match self.transport {
            TransportHeader::Tcp { .. } => sum.finish(),
            TransportHeader::Udp => sum.finish_udp(),
        };
        header[checksum_at..checksum_at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
}

/// Returns the length in bytes of all headers in front of the payload of a super-frame: the correct value of
/// [`Gso::header_len`] for a device that only has a hint (`hdr_len` of the virtio-net header may be
/// arbitrary).
///
/// # Errors
/// As [`segment`].
pub fn headers_len(frame: &[u8], kind: GsoKind) -> Result<u16, WireError> {
    SuperFrameLayout::of(frame, kind).map(|layout| layout.payload_at as u16)
}

/// Splits a super-frame. Every segment is built in `scratch` and passed to `each`, in order, complete with
/// all checksums. Returns the number of segments. A frame that needs no segmentation yields one segment.
///
/// The header length is parsed from the frame; `gso.header_len` is ignored. The values of the checksum fields
/// do not matter. Padding after the packet is removed.
///
/// # Errors
/// Detected before any call of `each`: `BadValue` if the frame is not of kind `gso.kind` or is a fragment, or
/// `gso.size` is 0; `BadLength` if a segment does not fit into `scratch` (the length of the frame is always
/// sufficient); the errors of the header parsers.
pub fn segment(
    frame: &[u8],
    gso: Gso,
    scratch: &mut [u8],
    mut each: impl FnMut(&[u8]),
) -> Result<usize, WireError> {
    let layout = SuperFrameLayout::of(frame, gso.kind)?;
    let (headers, payload) = frame[..layout.end].split_at(layout.payload_at);
    let size = usize::from(gso.size);
    if size == 0 {
        return Err(WireError::BadValue);
    }
    if scratch.len() < headers.len() + size.min(payload.len()) {
        return Err(WireError::BadLength);
    }
    let count = payload.len().div_ceil(size).max(1);
    for index in 0..count {
        let offset = index * size;
        let part = &payload[offset..payload.len().min(offset + size)];
        let segment = &mut scratch[..headers.len() + part.len()];
        segment[..headers.len()].copy_from_slice(headers);
        let sum = copy_and_sum(part, &mut segment[headers.len()..]);
        layout.fix_network(index, segment);
        layout.fix_transport(offset, index + 1 == count, sum, segment);
        each(segment);
    }
    Ok(count)
}

/// Completes a checksum that was left to the device: the field at `start + offset` contains the sum of the
/// pseudo-header, and the checksum covers the frame from `start` to its end.
///
/// # Errors
/// `BadLength` if the field is outside of the frame or at an odd offset; the frame is then unchanged.
pub fn complete_checksum(frame: &mut [u8], start: usize, offset: usize) -> Result<(), WireError> {
    // The field must be one of the summed words and not straddle two of them.
    if !offset.is_multiple_of(2) {
        return Err(WireError::BadLength);
    }
    let covered = frame.get_mut(start..).ok_or(WireError::BadLength)?;
    let sum = Sum::of(covered);
    let field = covered.get_mut(offset..).and_then(|rest| rest.first_chunk_mut::<2>());
    // As in Linux, for all protocols: 0 would mean "no checksum" for UDP, and for the others it is equivalent
    // to 0xffff.
    *field.ok_or(WireError::BadLength)? = sum.finish_udp().to_be_bytes();
    Ok(())
}

#[cfg(test)]
mod tests;
