//! Output: puts IP and link headers in front of a transport segment, in place in the device's buffer.
//!
//! ```text
//! begin ──► TxPacket: write the segment into l4() ──► seal: checksum and lengths ──► Network::commit
//! ```
//!
//! A packet for an unresolved neighbour is built in a scratch buffer instead and queued until the neighbour
//! answers. The caller sees no difference.

use super::{Network, NextHop, Route};
use crate::device::{Gso, GsoKind, Label, TxMeta};
use crate::link::neighbour::PendingFrame;
use crate::time::Instant;
use crate::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use crate::wire::tcp::TcpHeader;
use crate::wire::{ipv4, ipv6, protocol, udp};
use core::fmt;
use core::net::IpAddr;

/// The fields of the IP header of a packet to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpHeader {
    /// Source address.
    pub src: IpAddr,
    /// Destination address, of the same family.
    pub dst: IpAddr,
    /// Protocol, or next header.
    pub protocol: u8,
    /// Type of service, or traffic class: DSCP in the upper six bits, ECN in the lower two.
    pub tos: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
    /// True if routers must not fragment the packet (IPv4; in IPv6 they never do).
    pub dont_fragment: bool,
    /// Flow label of a packet over IPv6: 20 bits; 0 stands for none.
    pub flow_label: u32,
    /// The label of its flow, for a device that carries labels.
    pub label: Label,
}

/// The position of the transport checksum and what is known about the bytes it covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxChecksum {
    /// Byte offset of the checksum field in the segment. The field must be 0 when the packet is sealed.
    pub offset: u16,
    /// If set, the sum `.1` of the bytes from offset `.0` to the end of the segment is already known, and
    /// these bytes are not read again.
    pub payload_sum: Option<(usize, Sum)>,
}

/// Says whether the sum of a payload is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadSum {
    /// The sum becomes part of the checksum.
    Required,
    /// The device computes the checksum: the value is ignored.
    Ignored,
}

/// Why a packet could not be begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TxError {
    /// The device has no room: the caller tries again after [`Network::flush`], or drops the packet
    /// (`ENOBUFS`).
    Full,
    /// The hop is stale: the caller gets a new one from [`Network::route`].
    Stale,
    /// The packet is larger than the link allows (`EMSGSIZE`).
    TooBig,
    /// The addresses are not of the hop's family (`EHOSTUNREACH`).
    Unreachable,
}

impl fmt::Display for TxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "transmit queue full",
            Self::Stale => "route has changed",
            Self::TooBig => "message too long",
            Self::Unreachable => "no route to host",
        })
    }
}

impl std::error::Error for TxError {}

/// Bytes of the longest headers in front of a transport segment: Ethernet with a VLAN tag, and IPv6.
const HEADERS_LEN_MAX: usize = 18 + ipv6::Header::LEN;

/// Number of counters from which identifications are taken.
pub(super) const IDENT_COUNTERS: usize = 256;

/// Where a sealed packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TxTarget {
    /// Into the buffer that the device reserved.
    Device,
    /// To the pending queue of the neighbour in this slot.
    Pending(u32),
}

/// Arguments of [`TxPacket::seal`] besides the bytes.
#[derive(Clone, Copy, Debug)]
struct TxPlan {
    header: IpHeader,
    port: u16,
    target: TxTarget,
    /// Bytes of the link header.
    link_header: usize,
    /// Bytes in front of the segment.
    l4_start: usize,
    mtu: usize,
    tx_checksum: bool,
    gso_bytes_max: usize,
    ident: u16,
    /// If the packet is an IPv4 fragment: its offset in bytes.
    fragment_offset: u16,
    /// If the packet is an IPv4 fragment: whether more fragments follow.
    more_fragments: bool,
}

/// A packet under construction. Dropping it sends nothing.
#[must_use = "a packet leaves only when it is sealed and committed"]
pub struct TxPacket<'a> {
    buffer: &'a mut [u8],
    plan: TxPlan,
}

/// A finished packet, to be passed to [`Network::commit`] at once.
#[derive(Clone, Copy, Debug)]
#[must_use = "a packet leaves only when it is committed"]
pub struct SealedPacket {
    port: u16,
    target: TxTarget,
    len: usize,
    meta: TxMeta,
    too_big: bool,
}

impl TxPacket<'_> {
    /// Returns the buffer for the segment, as long as requested. Its contents are undefined.
    pub fn l4(&mut self) -> &mut [u8] {
        &mut self.buffer[self.plan.l4_start..]
    }

    /// Finishes the packet with the first `l4_len` bytes of the segment. With `gso_size` the packet becomes a
    /// super-frame whose segments, or datagrams, carry that many payload bytes each;
    /// [`Network::capabilities`] must say that the device supports it.
    pub fn seal(self, l4_len: usize, checksum: TxChecksum, gso_size: Option<u16>) -> SealedPacket {
        let plan = self.plan;
        let at = usize::from(checksum.offset);
        let l4 = &mut self.buffer[plan.l4_start..plan.l4_start + l4_len];
        let pseudo = pseudo_header(&plan.header, l4_len);
        let mut meta = TxMeta { label: plan.header.label, ..TxMeta::NONE };
        if plan.tx_checksum {
            l4[at..at + 2].copy_from_slice(&pseudo.fold().to_be_bytes());
            // Cannot truncate: the longest headers in front of a segment take 18 + 40 bytes.
            meta.partial_checksum = Some((plan.l4_start as u16, checksum.offset));
        } else {
            debug_assert_eq!(l4[at..at + 2], [0, 0], "checksum field must be 0");
            let sum = pseudo.add(segment_sum(l4, checksum.payload_sum));
            let value = match plan.header.protocol {
                protocol::UDP => sum.finish_udp(),
                _ => sum.finish(),
            };
            l4[at..at + 2].copy_from_slice(&value.to_be_bytes());
        }
        if let Some(size) = gso_size {
            meta.gso = Some(match plan.header.protocol {
                protocol::UDP => udp_gso(plan.l4_start, size),
                _ => tcp_gso(plan.l4_start, plan.header.src.is_ipv4(), l4, size),
            });
        }
        self.finish(l4_len, meta)
    }

    /// Makes the packet a fragment. It should be begun with `dont_fragment`, so that no identification is
    /// consumed.
    pub(crate) fn set_fragment(&mut self, ident: u16, offset: u16, more_fragments: bool) {
        self.plan.header.dont_fragment = false;
        // The owner shard of fragments follows from their addresses alone; the hash of the label is that of
        // the reassembled datagram.
        self.plan.header.label = self.plan.header.label.without_hash();
        self.plan.ident = ident;
        (self.plan.fragment_offset, self.plan.more_fragments) = (offset, more_fragments);
    }

    /// Finishes a packet whose segment already has its checksum: ICMP messages and fragments.
    pub(crate) fn seal_complete(self, l4_len: usize) -> SealedPacket {
        let label = self.plan.header.label;
        self.finish(l4_len, TxMeta { label, ..TxMeta::NONE })
    }

    fn finish(self, l4_len: usize, meta: TxMeta) -> SealedPacket {
        let plan = self.plan;
        let len = plan.l4_start + l4_len;
        let ip_len = len - plan.link_header;
        let fits = match meta.gso {
            None => ip_len <= plan.mtu,
            Some(_) => {
                debug_assert!(
                    plan.gso_bytes_max > 0 && plan.tx_checksum,
                    "super-frame for a device without GSO"
                );
                len <= plan.gso_bytes_max && ip_len <= usize::from(u16::MAX)
            }
        };
        if fits {
            write_ip_header(&plan, ip_len, l4_len, &mut self.buffer[plan.link_header..]);
        }
        SealedPacket { port: plan.port, target: plan.target, len, meta, too_big: !fits }
    }
}

/// Returns the sum of the transport's pseudo-header.
pub(super) fn pseudo_header(header: &IpHeader, l4_len: usize) -> Sum {
    match (header.src, header.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => pseudo_v4(src, dst, header.protocol, l4_len),
        (IpAddr::V6(src), IpAddr::V6(dst)) => pseudo_v6(src, dst, header.protocol, l4_len),
        // `begin` rejects mixed families.
        _ => Sum::ZERO,
    }
}

/// Returns the sum of a segment. The sum of its tail may be known already.
fn segment_sum(l4: &[u8], tail_sum: Option<(usize, Sum)>) -> Sum {
    match tail_sum {
        Some((start, payload)) => Sum::of(&l4[..start]).add_at(start, payload),
        None => Sum::of(l4),
    }
}

/// Returns the GSO metadata of a TCP super-frame whose segment `l4` begins at offset `l4_start`.
fn tcp_gso(l4_start: usize, is_ipv4: bool, l4: &[u8], size: u16) -> Gso {
    const CWR: u8 = 0x80;
    let tcp_header = usize::from(l4[12] >> 4) * 4;
    let kind = if is_ipv4 { GsoKind::Tcp4 } else { GsoKind::Tcp6 };
    // Cannot truncate: 58 bytes in front of at most 60.
    Gso { kind, size, header_len: (l4_start + tcp_header) as u16, ecn: l4[13] & CWR != 0 }
}

/// Returns the GSO metadata of a UDP super-frame whose first UDP header begins at offset `l4_start`.
fn udp_gso(l4_start: usize, size: u16) -> Gso {
    // Cannot truncate: 58 bytes in front of 8.
    Gso { kind: GsoKind::Udp, size, header_len: (l4_start + udp::Header::LEN) as u16, ecn: false }
}

fn write_ip_header(plan: &TxPlan, ip_len: usize, l4_len: usize, out: &mut [u8]) {
    let header = &plan.header;
    match (header.src, header.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let header = ipv4::Header {
                dscp: header.tos >> 2,
                ecn: header.tos & 3,
                // Cannot truncate: `finish` has compared it with 65,535 or the MTU.
                total_len: ip_len as u16,
                ident: plan.ident,
                dont_fragment: header.dont_fragment,
                more_fragments: plan.more_fragments,
                fragment_offset: plan.fragment_offset,
                ttl: header.hop_limit,
                protocol: header.protocol,
                src,
                dst,
                header_len: ipv4::Header::LEN as u8,
            };
            header.emit(out);
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            let header = ipv6::Header {
                dscp: header.tos >> 2,
                ecn: header.tos & 3,
                flow_label: header.flow_label,
                payload_len: l4_len as u16,
                next_header: header.protocol,
                hop_limit: header.hop_limit,
                src,
                dst,
            };
            header.emit(out);
        }
        _ => {}
    }
}

impl Network {
    /// Sends one TCP segment. `write` fills its `l4_len` bytes, with 0 in the checksum field, and returns the
    /// length of its header and the sum of the bytes after that. With `gso_size` the segment is sent as a
    /// super-frame; [`Network::capabilities`] must say that the device supports it.
    ///
    /// # Errors
    /// As [`Network::begin`]. A segment that exceeds the MTU is dropped and counted.
    pub(crate) fn send_tcp(
        &mut self,
        now: Instant,
        hop: &NextHop,
        header: &IpHeader,
        l4_len: usize,
        gso_size: Option<u16>,
        write: impl FnOnce(&mut [u8], PayloadSum) -> (usize, Sum),
    ) -> Result<(), TxError> {
        let mut packet = self.begin(now, hop, header, l4_len)?;
        let payload = Some(write(packet.l4(), PayloadSum::Required));
        let checksum = TxChecksum { offset: TcpHeader::CHECKSUM_OFFSET as u16, payload_sum: payload };
        let sealed = packet.seal(l4_len, checksum, gso_size);
        self.commit(sealed);
        Ok(())
    }

    /// Returns whether the device of a route segments a UDP super-frame with `l4_len` bytes of transport
    /// segment.
    pub(crate) fn can_segment_udp(&self, route: &Route, l4_len: usize) -> bool {
        let device = self.capabilities(route.hop.link());
        // Reserves space for the longest headers, so that the neighbour's header length need not be known.
        device.is_some_and(|device| device.uso && l4_len + HEADERS_LEN_MAX <= device.gso_bytes_max)
    }

    /// Sends a UDP super-frame whose datagrams carry `size` payload bytes each. [`Network::can_segment_udp`]
    /// must have returned true. `write` fills in one UDP header for all datagrams, and the payload.
    ///
    /// # Errors
    /// As [`Network::begin`].
    pub(crate) fn send_udp_gso(
        &mut self,
        now: Instant,
        route: &Route,
        header: &IpHeader,
        l4_len: usize,
        size: u16,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<(), TxError> {
        let header = IpHeader { dont_fragment: header.dont_fragment && !route.mtu_locked, ..*header };
        let mut packet = self.begin(now, &route.hop, &header, l4_len)?;
        write(packet.l4());
        let checksum = TxChecksum { offset: udp::Header::CHECKSUM_OFFSET as u16, payload_sum: None };
        let sealed = packet.seal(l4_len, checksum, Some(size));
        self.commit(sealed);
        Ok(())
    }

    /// Begins a packet with room for up to `l4_len_max` bytes of transport segment.
    ///
    /// # Errors
    /// [`TxError::Stale`] if the hop is stale, [`TxError::Full`] if the device has no room,
    /// [`TxError::TooBig`] if the device never accepts a frame of this length, [`TxError::Unreachable`] if
    /// the address families differ.
    #[inline]
    pub fn begin(
        &mut self,
        now: Instant,
        hop: &NextHop,
        header: &IpHeader,
        l4_len_max: usize,
    ) -> Result<TxPacket<'_>, TxError> {
        if hop.epoch != self.epoch {
            return Err(TxError::Stale);
        }
        let neighbour = self.neighbours.resolve(hop.neighbour).ok_or(TxError::Stale)?;
        let ready = neighbour.is_ready(now);
        neighbour.referenced = true;
        let (link_header_bytes, link_header) = (neighbour.header, usize::from(neighbour.header_len));
        let slot = hop.neighbour.slot();
        let target = if ready || self.send_to_unready_neighbour(now, slot, header.src) {
            TxTarget::Device
        } else {
            TxTarget::Pending(slot)
        };
        let ident = if header.dont_fragment { 0 } else { self.next_ident(header) };

        let link = &self.links[usize::from(hop.link)];
        let port = &mut self.ports[usize::from(link.port.0)];
        let ip_header = match (header.src, header.dst) {
            (IpAddr::V4(_), IpAddr::V4(_)) => ipv4::Header::LEN,
            (IpAddr::V6(_), IpAddr::V6(_)) => ipv6::Header::LEN,
            _ => return Err(TxError::Unreachable),
        };
        let l4_start = link_header + ip_header;
        let len = l4_start + l4_len_max;
        if len > port.frame_bytes_max() {
            return Err(TxError::TooBig);
        }
        let plan = TxPlan {
            header: *header,
            port: link.port.0,
            target,
            link_header,
            l4_start,
            mtu: usize::from(link.mtu_for(header.src)),
            tx_checksum: port.capabilities.tx_checksum,
            gso_bytes_max: port.capabilities.gso_bytes_max,
            ident,
            fragment_offset: 0,
            more_fragments: false,
        };
        let buffer = match target {
            TxTarget::Device => {
                port.tx.reserve(len).and_then(|buffer| buffer.get_mut(..len)).ok_or(TxError::Full)?
            }
            TxTarget::Pending(_) => {
                if self.scratch.len() < len {
                    self.scratch.resize(len, 0);
                }
                &mut self.scratch[..len]
            }
        };
        // Copying all 18 bytes is one fixed-size move; the IP header overwrites the excess.
        buffer[..link_header_bytes.len()].copy_from_slice(&link_header_bytes);
        Ok(TxPacket { buffer, plan })
    }

    /// Sends a sealed packet, or queues it for its unresolved neighbour. Nothing else may happen between
    /// [`Network::begin`] and this call.
    #[inline]
    pub fn commit(&mut self, sealed: SealedPacket) {
        if sealed.too_big {
            self.stats.tx_too_big += 1;
            return;
        }
        match sealed.target {
            TxTarget::Device => {
                let port = &mut self.ports[usize::from(sealed.port)];
                port.commit(sealed.len, sealed.meta);
            }
            TxTarget::Pending(slot) => {
                let bytes = self.scratch[..sealed.len].into();
                self.push_pending(slot, PendingFrame { bytes, meta: sealed.meta });
            }
        }
    }

    /// Returns the identification of a packet that may be fragmented (RFC 6864 §4.3). It comes from a counter
    /// selected by a keyed hash of addresses and protocol, so that other hosts cannot infer how much this
    /// host sends.
    pub(super) fn next_ident(&mut self, header: &IpHeader) -> u16 {
        let at = self.hash.of((header.src, header.dst, header.protocol)) as usize % IDENT_COUNTERS;
        let ident = &mut self.ident_counters[at];
        *ident = ident.wrapping_add(1);
        *ident
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
