//! Sending of datagrams that may exceed the path MTU: UDP datagrams and ICMP messages.

use super::output::{IpHeader, TxChecksum, TxError};
use super::{Network, Route};
use crate::time::Instant;
use crate::wire::checksum::Sum;
use crate::wire::{ipv4, ipv6, protocol};

impl Network {
    /// Sends a datagram of `len` bytes of transport header and payload, which `write` fills in. A datagram
    /// that exceeds the path MTU is fragmented. `checksum` is the offset of a transport checksum to fill in;
    /// with `None` the bytes are sent as `write` left them.
    ///
    /// # Errors
    /// As [`Network::begin`]; [`TxError::TooBig`] for more than an IP packet can carry. If the device becomes
    /// full after the first fragment, the remaining fragments are dropped and counted, and the result is
    /// `Ok`.
    pub fn send_datagram(
        &mut self,
        now: Instant,
        route: &Route,
        header: &IpHeader,
        len: usize,
        checksum: Option<u16>,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<(), TxError> {
        let ip_header = if header.src.is_ipv4() { ipv4::Header::LEN } else { ipv6::Header::LEN };
        // The payload length of IPv6 does not include the fixed header.
        let counted = if header.src.is_ipv4() { ip_header } else { 0 };
        if counted + len > usize::from(u16::MAX) {
            return Err(TxError::TooBig);
        }
        if ip_header + len <= usize::from(route.mtu) {
            let header = IpHeader { dont_fragment: header.dont_fragment && !route.mtu_locked, ..*header };
            let mut packet = self.begin(now, &route.hop, &header, len)?;
            write(packet.l4());
            let sealed = match checksum {
                Some(offset) => packet.seal(len, TxChecksum { offset, payload_sum: None }, None),
                None => packet.seal_complete(len),
            };
            self.commit(sealed);
            return Ok(());
        }
        let mut datagram = core::mem::take(&mut self.fragmentation_buffer);
        datagram.clear();
        datagram.resize(len, 0);
        write(&mut datagram);
        if let Some(offset) = checksum {
            complete_checksum(header, &mut datagram, usize::from(offset));
        }
        let result = self.send_fragments(now, route, header, &datagram);
        self.fragmentation_buffer = datagram;
        result
    }

    fn send_fragments(
        &mut self,
        now: Instant,
        route: &Route,
        header: &IpHeader,
        datagram: &[u8],
    ) -> Result<(), TxError> {
        let mtu = usize::from(route.mtu);
        let is_ipv4 = header.src.is_ipv4();
        let headers = if is_ipv4 { ipv4::Header::LEN } else { ipv6::Header::LEN + ipv6::FragmentHeader::LEN };
        // All fragments but the last carry a multiple of 8 bytes. The smallest MTU is 68, so this is never 0.
        let step = (mtu.saturating_sub(headers) & !7).max(8);
        let ident = if is_ipv4 { self.next_ident(header).into() } else { self.entropy.next_u64() as u32 };
        for (at, payload) in datagram.chunks(step).enumerate() {
            // Cannot truncate: `datagram` fits into an IP packet.
            let offset = (at * step) as u16;
            let more_fragments = usize::from(offset) + payload.len() < datagram.len();
            let fragment =
                ipv6::FragmentHeader { next_header: header.protocol, offset, more_fragments, ident };
            let sent = if is_ipv4 {
                self.send_fragment_v4(now, route, header, &fragment, payload)
            } else {
                self.send_fragment_v6(now, route, header, &fragment, payload)
            };
            match sent {
                Err(error) if at == 0 => return Err(error),
                Err(_) => {
                    self.stats.tx_fragments_lost += 1;
                    break;
                }
                Ok(()) => self.stats.tx_fragments += 1,
            }
        }
        self.stats.tx_fragmented += 1;
        Ok(())
    }

    fn send_fragment_v4(
        &mut self,
        now: Instant,
        route: &Route,
        header: &IpHeader,
        fragment: &ipv6::FragmentHeader,
        payload: &[u8],
    ) -> Result<(), TxError> {
        let header = IpHeader { dont_fragment: true, ..*header };
        let mut packet = self.begin(now, &route.hop, &header, payload.len())?;
        packet.l4().copy_from_slice(payload);
        packet.set_fragment(fragment.ident as u16, fragment.offset, fragment.more_fragments);
        let sealed = packet.seal_complete(payload.len());
        self.commit(sealed);
        Ok(())
    }

    fn send_fragment_v6(
        &mut self,
        now: Instant,
        route: &Route,
        header: &IpHeader,
        fragment: &ipv6::FragmentHeader,
        payload: &[u8],
    ) -> Result<(), TxError> {
        let label = header.label.without_hash();
        let header = IpHeader { protocol: protocol::FRAGMENT, label, ..*header };
        let len = ipv6::FragmentHeader::LEN + payload.len();
        let mut packet = self.begin(now, &route.hop, &header, len)?;
        let l4 = packet.l4();
        fragment.emit(l4);
        l4[ipv6::FragmentHeader::LEN..].copy_from_slice(payload);
        let sealed = packet.seal_complete(len);
        self.commit(sealed);
        Ok(())
    }
}

/// Fills in a transport checksum over the whole datagram; no device computes it over fragments.
fn complete_checksum(header: &IpHeader, datagram: &mut [u8], offset: usize) {
    let sum = super::output::pseudo_header(header, datagram.len()).add(Sum::of(datagram));
    let value = if header.protocol == protocol::UDP { sum.finish_udp() } else { sum.finish() };
    datagram[offset..offset + 2].copy_from_slice(&value.to_be_bytes());
}
