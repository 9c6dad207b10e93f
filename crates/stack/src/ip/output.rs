//! The way out: headers in front of a transport segment, built in place in the device's room for one frame.
//!
//! ```text
//! begin ──► PacketOut: write the segment into l4() ──► seal: checksum and lengths ──► Network::commit
//! ```
//!
//! A packet whose neighbour is not known yet is built in a scratch buffer instead and waits there for the answer, so the
//! caller sees no difference.

use super::{Network, NextHop, Route};
use crate::device::{Gso, GsoKind, Label, TxMeta};
use crate::link::neighbour::PendingFrame;
use crate::time::Instant;
use crate::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use crate::wire::tcp::TcpHeader;
use crate::wire::{ipv4, ipv6, protocol, udp};
use core::fmt;
use core::net::IpAddr;

/// What the IP header of a packet is to say.
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
    /// Routers must not fragment it (IPv4; in IPv6 they never do).
    pub dont_fragment: bool,
    /// What a device that carries labels is told of its flow.
    pub label: Label,
}

/// Where the transport checksum stands and what is known about the bytes it covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxChecksum {
    /// Byte offset of the checksum field in the segment. The field must be 0 when the packet is sealed.
    pub offset: u16,
    /// If the sum of the bytes from `.0` to the end of the segment is known, it is `.1` and they are not read again.
    pub payload_sum: Option<(usize, Sum)>,
}

/// Whether somebody needs the sum of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadSum {
    /// It goes into the checksum.
    Required,
    /// The device does checksums: any value will do.
    Ignored,
}

/// Why a packet could not be begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TxError {
    /// The device has no room now: try again after [`Network::flush`], or drop the packet (`ENOBUFS`).
    Full,
    /// The hop is out of date: ask [`Network::route`] for another.
    Stale,
    /// Larger than the link can take (`EMSGSIZE`).
    TooBig,
    /// The addresses do not fit the hop's family (`EHOSTUNREACH`).
    Unreachable,
}

impl fmt::Display for TxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "no room in the device's queue",
            Self::Stale => "route has changed",
            Self::TooBig => "message too long",
            Self::Unreachable => "no route to host",
        })
    }
}

impl std::error::Error for TxError {}

/// Bytes of the longest headers in front of a transport segment: Ethernet with a VLAN tag, and IPv6.
const HEADERS_LEN_MAX: usize = 18 + ipv6::Header::LEN;

/// Counters that identifications come from.
pub(super) const IDENT_COUNTERS: usize = 256;

/// Where a sealed packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TxTarget {
    /// Into the room that the device lent.
    Device,
    /// To what waits for the neighbour in this slot.
    Pending(u32),
}

/// What [`PacketOut::seal`] needs to know besides the bytes.
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
    /// Offset in bytes and whether more follow, if the packet is an IPv4 fragment.
    fragment: (u16, bool),
}

/// A packet under construction. Dropping it sends nothing.
#[must_use = "a packet leaves only when it is sealed and committed"]
pub struct TxPacket<'a> {
    room: &'a mut [u8],
    plan: TxPlan,
}

/// A finished packet, to be given to [`Network::commit`] at once.
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
    /// Room for the segment: as many bytes as were asked for. Their contents are undefined.
    pub fn l4(&mut self) -> &mut [u8] {
        &mut self.room[self.plan.l4_start..]
    }

    /// Finishes the packet with the first `l4_len` bytes of the segment. `gso_size` makes it a super-frame with that many payload
    /// bytes per segment, or datagram; only if [`Network::capabilities`] says that the device takes it.
    pub fn seal(self, l4_len: usize, checksum: TxChecksum, gso_size: Option<u16>) -> SealedPacket {
        let plan = self.plan;
        let at = usize::from(checksum.offset);
        let l4 = &mut self.room[plan.l4_start..plan.l4_start + l4_len];
        let pseudo = pseudo_header(&plan.header, l4_len);
        let mut meta = TxMeta { label: plan.header.label, ..TxMeta::NONE };
        if plan.tx_checksum {
            l4[at..at + 2].copy_from_slice(&pseudo.fold().to_be_bytes());
            // Cannot truncate: the longest headers in front of a segment are 18 + 40 bytes.
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

    /// Makes the packet a fragment. It should be begun with `dont_fragment`, so that no identification is spent on it.
    pub(crate) fn set_fragment(&mut self, ident: u16, offset: u16, more: bool) {
        self.plan.header.dont_fragment = false;
        // The home of fragments follows from their addresses alone: this hash is that of what will come of them.
        self.plan.header.label = self.plan.header.label.without_hash();
        self.plan.ident = ident;
        self.plan.fragment = (offset, more);
    }

    /// Finishes a packet whose segment is complete: ICMP, and fragments of anything.
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
            write_ip_header(&plan, ip_len, l4_len, &mut self.room[plan.link_header..]);
        }
        SealedPacket { port: plan.port, target: plan.target, len, meta, too_big: !fits }
    }
}

/// The transport's pseudo-header.
pub(super) fn pseudo_header(header: &IpHeader, l4_len: usize) -> Sum {
    match (header.src, header.dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => pseudo_v4(src, dst, header.protocol, l4_len),
        (IpAddr::V6(src), IpAddr::V6(dst)) => pseudo_v6(src, dst, header.protocol, l4_len),
        // `begin` refuses mixed families.
        _ => Sum::ZERO,
    }
}

/// Sum of a segment, of whose end the sum may be known.
fn segment_sum(l4: &[u8], known: Option<(usize, Sum)>) -> Sum {
    match known {
        Some((start, payload)) => Sum::of(&l4[..start]).add_at(start, payload),
        None => Sum::of(l4),
    }
}

/// How the device is to cut a super-frame whose segment `l4` begins at `l4_start`.
fn tcp_gso(l4_start: usize, is_ipv4: bool, l4: &[u8], size: u16) -> Gso {
    const CWR: u8 = 0x80;
    let tcp_header = usize::from(l4[12] >> 4) * 4;
    let kind = if is_ipv4 { GsoKind::Tcp4 } else { GsoKind::Tcp6 };
    // Cannot truncate: 58 bytes in front of at most 60.
    Gso { kind, size, header_len: (l4_start + tcp_header) as u16, ecn: l4[13] & CWR != 0 }
}

/// The same of one that holds datagrams.
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
                more_fragments: plan.fragment.1,
                fragment_offset: plan.fragment.0,
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
                flow_label: 0,
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
    /// Sends one TCP segment: `write` fills its `l4_len` bytes, with 0 in the checksum field, and returns the length of its header and
    /// the sum of what follows that. `gso_size` makes it a super-frame; only if [`Network::capabilities`] says that the device takes it.
    ///
    /// # Errors
    /// As [`Network::begin`]. A segment that is larger than the MTU is dropped and counted.
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

    /// Whether the device of a route cuts a super-frame of datagrams with so many bytes of transport segment.
    pub(crate) fn can_segment_udp(&self, route: &Route, l4_len: usize) -> bool {
        let device = self.capabilities(route.hop.link());
        // Room for the longest headers in front of it, so that nothing has to be known of the neighbour.
        device.is_some_and(|device| device.uso && l4_len + HEADERS_LEN_MAX <= device.gso_bytes_max)
    }

    /// Sends a super-frame of datagrams with `size` bytes of payload each; only if [`Network::cuts_udp`] says so. `write` fills it with one header for all.
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
    /// [`TxError::Stale`] if the hop is out of date, [`TxError::Full`] if the device has no room, [`TxError::TooBig`] if it
    /// could never have that much.
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
            fragment: (0, false),
        };
        let room = match target {
            TxTarget::Device => {
                port.tx.reserve(len).and_then(|room| room.get_mut(..len)).ok_or(TxError::Full)?
            }
            TxTarget::Pending(_) => {
                if self.scratch.len() < len {
                    self.scratch.resize(len, 0);
                }
                &mut self.scratch[..len]
            }
        };
        // Copying all 18 bytes is one fixed-size move; the IP header overwrites what was too much.
        room[..link_header_bytes.len()].copy_from_slice(&link_header_bytes);
        Ok(TxPacket { room, plan })
    }

    /// Sends a sealed packet, or lets it wait for its neighbour. Nothing else may happen between [`Network::begin`] and this.
    #[inline]
    pub fn commit(&mut self, sealed: SealedPacket) {
        if sealed.too_big {
            self.stats.tx_too_big += 1;
            return;
        }
        match sealed.target {
            TxTarget::Device => {
                let port = &mut self.ports[usize::from(sealed.port)];
                port.commit(sealed.len, sealed.meta, &mut self.stats);
            }
            TxTarget::Pending(slot) => {
                let bytes = self.scratch[..sealed.len].into();
                self.push_pending(slot, PendingFrame { bytes, meta: sealed.meta });
            }
        }
    }

    /// Identification for a packet that may be fragmented (RFC 6864 §4.3): a counter that only packets with the same
    /// addresses and protocol share, as far as its table is large enough, so that others cannot tell how much we send.
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
