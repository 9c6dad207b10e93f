//! Builds the headers of a send call and sends its datagrams, to one destination or to a group.

use super::{CachedRoute, UdpError, UdpSendParams, UdpSocket, gso, tx_error};
use crate::device::{Label, TxClass};
use crate::ip::{IpHeader, Network, Route};
use crate::priority;
use crate::time::Instant;
use crate::wire::{protocol, udp};
use core::net::SocketAddr;

/// Returns the payload bytes of each datagram of a send call but the last, which may be shorter:
/// [`UdpSendParams::gso_size`], or the whole payload if `gso_size` is 0.
#[inline]
pub(super) fn datagram_bytes(gso_size: u16, payload_len: usize) -> usize {
    if gso_size == 0 { payload_len } else { gso_size.into() }
}

impl UdpSocket {
    /// Returns the headers of the datagrams that a send call sends to `remote` over a route. The hop limit is
    /// that of the call, otherwise `group_hop_limit`, otherwise that of the socket or of the link.
    ///
    /// # Errors
    /// [`UdpError::TooLong`] if the payload does not fit. The socket's error queue gets this error, too, if
    /// it is on (`IP_RECVERR`).
    #[inline]
    pub(super) fn headers(
        &mut self,
        network: &Network,
        params: &UdpSendParams,
        remote: SocketAddr,
        cached: &CachedRoute,
        group_hop_limit: Option<u8>,
        payload_len: usize,
    ) -> Result<(IpHeader, udp::Header), UdpError> {
        let CachedRoute { route, flow_hash, .. } = cached;
        let len = udp::Header::LEN + payload_len;
        let len_max = usize::from(u16::MAX) - if remote.is_ipv4() { 20 } else { 0 };
        let fits = len_max.min(self.options.pmtu_discovery.datagram_len_max(network, route));
        let is_single = datagram_bytes(params.gso_size, payload_len) == payload_len;
        if len > fits && (is_single || len > len_max) {
            self.queue_message_too_long(remote, route, network);
            return Err(UdpError::TooLong);
        }
        let priority = match params.tos {
            Some(tos) if remote.is_ipv4() => priority::of_tos(tos),
            _ => self.options.priority,
        };
        let hop_limit = params.hop_limit.or(group_hop_limit).or(self.options.hop_limit);
        let header = IpHeader {
            src: route.src,
            dst: remote.ip(),
            protocol: protocol::UDP,
            tos: params.tos.unwrap_or(self.options.tos),
            hop_limit: hop_limit.unwrap_or_else(|| network.hop_limit(route.hop.link())),
            dont_fragment: self.options.pmtu_discovery.dont_fragment(),
            flow_label: 0,
            label: Label::new(*flow_hash, priority),
        };
        let udp = udp::Header {
            src_port: self.local.port(),
            dst_port: remote.port(),
            // Cannot truncate: compared with `len_max` above.
            len: len as u16,
            checksum: 0,
        };
        let ports = (udp.src_port, udp.dst_port);
        let choice = params.flow_label.unwrap_or(self.options.flow_label);
        Ok((network.with_flow_label(header, choice, ports), udp))
    }
}

/// Sends one datagram, or several of `gso_size` bytes, in the class of their priority. Returns how many were
/// sent.
///
/// # Errors
/// As [`gso::send`].
#[inline]
pub(super) fn transmit(
    now: Instant,
    network: &mut Network,
    route: &Route,
    header: &IpHeader,
    udp: &udp::Header,
    payload: &[u8],
    gso_size: u16,
) -> Result<u64, UdpError> {
    if !priority::COMPILED || !network.refuses_by_class {
        return transmit_in_class(now, network, route, header, udp, payload, gso_size);
    }
    let class = priority::class(header.label.priority());
    network.select_tx_class(Some(TxClass::Datagrams(class)));
    let sent = transmit_in_class(now, network, route, header, udp, payload, gso_size);
    network.select_tx_class(None);
    sent
}

#[inline]
fn transmit_in_class(
    now: Instant,
    network: &mut Network,
    route: &Route,
    header: &IpHeader,
    udp: &udp::Header,
    payload: &[u8],
    gso_size: u16,
) -> Result<u64, UdpError> {
    let gso_size = datagram_bytes(gso_size, payload.len());
    if gso_size < payload.len() {
        return gso::send(now, network, route, header, udp, payload, gso_size);
    }
    let checksum = Some(udp::Header::CHECKSUM_OFFSET as u16);
    let len = udp::Header::LEN + payload.len();
    let sent = network.send_datagram(now, route, header, len, checksum, |out| {
        udp.emit(out);
        out[udp::Header::LEN..].copy_from_slice(payload);
    });
    sent.map(|()| 1).map_err(tx_error)
}
