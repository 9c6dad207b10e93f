//! The transmit fast path: a TCP segment over IPv4 with "don't fragment", to a resolved neighbour. All
//! headers are written at once from integers, word by word, and the checksums are computed from these
//! integers, so no written byte is read again. All other packets take the slow path, [`Network::begin`];
//! tests compare the output of both.

use super::output::{PayloadSum, TxError};
use super::{Network, NextHop};
use crate::device::{Gso, GsoKind, Label, PayloadPiece, TxMeta};
use crate::link::neighbour::LINK_HEADER_MAX;
use crate::time::Instant;
use crate::wire::checksum::Sum;
use crate::wire::tcp::{TcpFlags, TcpHeader};
use crate::wire::{ipv4, protocol};

/// Version 4, no options.
const VERSION: u32 = 0x4500_0000;
/// No identification, and "don't fragment".
const DONT_FRAGMENT: u32 = 0x4000;
/// Bytes of both headers without options.
const HEADERS: usize = ipv4::Header::LEN + TcpHeader::LEN;

/// The length of a packet and what it consists of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcpV4Lengths<'a> {
    /// TCP options with their padding: at most ten words.
    pub options: &'a [u32],
    /// Bytes of payload.
    pub payload: usize,
    /// Payload bytes per segment of a super-frame; [`Network::capabilities`] must say that the device
    /// supports it.
    pub gso_size: Option<u16>,
}

/// The other fields of both headers, addresses as integers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcpV4Headers {
    pub src: u32,
    pub dst: u32,
    /// Type of service.
    pub tos: u8,
    /// Time to live.
    pub ttl: u8,
    /// Source port in the upper half, destination port in the lower half.
    pub ports: u32,
    pub seq: u32,
    pub ack: u32,
    pub flags: TcpFlags,
    pub window: u16,
    pub urg_ptr: u16,
}

/// A packet under construction. Dropping it sends nothing.
#[must_use = "a packet leaves only when it is sealed and committed"]
pub(crate) struct TcpV4Packet<'a> {
    /// Buffer for the payload. Its contents are undefined.
    pub payload: &'a mut [u8],
    /// Says whether the sum of the payload is needed.
    pub payload_sum: PayloadSum,
    /// True if the payload may be left out here and passed to [`Network::commit_gathered_v4`] instead.
    pub can_gather: bool,
    head: &'a mut [u8; HEADERS],
    options: &'a mut [u8],
    sealed: SealedTcpV4,
}

/// A finished packet, to be passed to [`Network::commit_tcp_v4`] at once.
#[derive(Clone, Copy)]
#[must_use = "a packet leaves only when it is committed"]
pub(crate) struct SealedTcpV4 {
    port: u16,
    link_header: u8,
    offloaded: bool,
    len: usize,
    gso: Option<Gso>,
}

impl Network {
    /// Begins a packet. Returns `None`, without side effects, if the packet must take the slow path.
    ///
    /// # Errors
    /// [`TxError::Full`] if the device has no room.
    #[inline(always)]
    pub(crate) fn begin_tcp_v4(
        &mut self,
        now: Instant,
        hop: &NextHop,
        lengths: TcpV4Lengths<'_>,
    ) -> Result<Option<TcpV4Packet<'_>>, TxError> {
        let TcpV4Lengths { options, payload, gso_size } = lengths;
        if hop.epoch != self.epoch {
            return Ok(None);
        }
        let Some(neighbour) = self.neighbours.resolve(hop.neighbour) else { return Ok(None) };
        let link = &self.links[usize::from(hop.link)];
        let port = &mut self.ports[usize::from(link.port.0)];
        let link_header = usize::from(neighbour.header_len);
        let header_len = TcpHeader::LEN + 4 * options.len();
        let ip_len = ipv4::Header::LEN + header_len + payload;
        let len = link_header + ip_len;
        let fits = match gso_size {
            None => ip_len <= usize::from(link.mtu),
            Some(_) => len <= port.capabilities.gso_bytes_max && ip_len <= usize::from(u16::MAX),
        };
        if !fits || !neighbour.is_ready(now) {
            return Ok(None);
        }
        neighbour.referenced = true;
        let offloaded = port.capabilities.tx_checksum;
        let buffer = port.tx.reserve(len).and_then(|buffer| buffer.get_mut(..len)).ok_or(TxError::Full)?;
        // Copying all 18 bytes is one fixed-size move; the IP header overwrites the excess.
        if let Some(start) = buffer.first_chunk_mut::<LINK_HEADER_MAX>() {
            *start = neighbour.header;
        }
        let packet = buffer.get_mut(link_header..).and_then(|packet| packet.split_first_chunk_mut());
        let Some((head, rest)) = packet else { return Err(TxError::Full) };
        let (options, payload) = rest.split_at_mut_checked(4 * options.len()).ok_or(TxError::Full)?;
        let payload_sum = if offloaded { PayloadSum::Ignored } else { PayloadSum::Required };
        // Cannot truncate: 58 bytes in front of at most 60.
        let headers = (link_header + ipv4::Header::LEN + header_len) as u16;
        let gso = gso_size.map(|size| Gso { kind: GsoKind::Tcp4, size, header_len: headers, ecn: false });
        let sealed = SealedTcpV4 { port: link.port.0, link_header: link_header as u8, offloaded, len, gso };
        let can_gather = gso_size.is_some() && port.can_gather && offloaded;
        Ok(Some(TcpV4Packet { payload, payload_sum, can_gather, head, options, sealed }))
    }

    /// Sends a sealed packet with the label of its flow. Nothing else may happen between
    /// [`Network::begin_tcp_v4`] and this call.
    #[inline(always)]
    pub(crate) fn commit_tcp_v4(&mut self, sealed: SealedTcpV4, label: Label) {
        self.ports[usize::from(sealed.port)].commit(sealed.len, sealed.meta(label));
    }

    /// Sends a sealed super-frame whose payload was left out and consists of `pieces`.
    /// [`TcpV4Packet::can_gather`] must be true.
    pub(crate) fn commit_gathered_v4(
        &mut self,
        sealed: SealedTcpV4,
        label: Label,
        pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
    ) {
        let head = sealed.gso.map_or(sealed.len, |gso| usize::from(gso.header_len));
        let port = &mut self.ports[usize::from(sealed.port)];
        port.commit_gathered(head, sealed.len, pieces, sealed.meta(label));
    }
}

impl SealedTcpV4 {
    #[inline(always)]
    fn meta(&self, label: Label) -> TxMeta {
        let l4_start = u16::from(self.link_header) + ipv4::Header::LEN as u16;
        let checksum = (l4_start, TcpHeader::CHECKSUM_OFFSET as u16);
        TxMeta { partial_checksum: self.offloaded.then_some(checksum), gso: self.gso, label }
    }
}

impl TcpV4Packet<'_> {
    /// Writes the headers and options in front of a payload with this sum. `options` must have the length
    /// that was passed to [`Network::begin_tcp_v4`].
    #[inline(always)]
    pub(crate) fn seal(self, segment: &TcpV4Headers, options: &[u32], payload: Sum) -> SealedTcpV4 {
        let Self { head, options: buffer, mut sealed, .. } = self;
        for (slot, word) in buffer.as_chunks_mut::<4>().0.iter_mut().zip(options) {
            *slot = word.to_be_bytes();
        }
        if let Some(gso) = &mut sealed.gso {
            gso.ecn = segment.flags.contains(TcpFlags::CWR);
        }
        // Cannot truncate: the length has been compared with the MTU or 65,535.
        let ip_len = (sealed.len - usize::from(sealed.link_header)) as u32;
        segment.write(head, ip_len, options, (!sealed.offloaded).then_some(payload));
        sealed
    }
}

impl TcpV4Headers {
    /// Writes both headers without the options. If the sum of the payload is not given, the TCP checksum
    /// field gets the sum of the pseudo-header alone.
    #[inline(always)]
    fn write(&self, head: &mut [u8; HEADERS], ip_len: u32, options: &[u32], payload: Option<Sum>) {
        let version_tos_len = VERSION | u32::from(self.tos) << 16 | ip_len;
        let ttl_protocol = u32::from(self.ttl) << 24 | u32::from(protocol::TCP) << 16;
        let words = (TcpHeader::LEN / 4 + options.len()) as u32;
        let offset_flags_window = words << 28 | u32::from(self.flags.0) << 16 | u32::from(self.window);
        let addresses = u64::from(self.src) + u64::from(self.dst);
        let ip = addresses + u64::from(version_tos_len) + u64::from(DONT_FRAGMENT) + u64::from(ttl_protocol);
        let mut tcp = addresses + u64::from(protocol::TCP) + u64::from(ip_len - ipv4::Header::LEN as u32);
        let checksum = match payload {
            None => Sum::of_words(tcp).fold(),
            Some(payload) => {
                tcp += u64::from(self.ports) + u64::from(self.seq) + u64::from(self.ack);
                tcp += u64::from(offset_flags_window) + u64::from(self.urg_ptr);
                tcp += options.iter().map(|word| u64::from(*word)).sum::<u64>();
                Sum::of_words(tcp).add(payload).finish()
            }
        };
        let mut put = |at: usize, word: u32| head[at..at + 4].copy_from_slice(&word.to_be_bytes());
        put(0, version_tos_len);
        put(4, DONT_FRAGMENT);
        put(8, ttl_protocol | u32::from(Sum::of_words(ip).finish()));
        put(12, self.src);
        put(16, self.dst);
        put(20, self.ports);
        put(24, self.seq);
        put(28, self.ack);
        put(32, offset_flags_window);
        put(36, u32::from(checksum) << 16 | u32::from(self.urg_ptr));
    }
}

#[cfg(test)]
#[path = "tx_fast_path_tests.rs"]
mod tests;
