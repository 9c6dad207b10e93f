//! Several datagrams of one length in one send call (`UDP_SEGMENT`).

use super::{UdpError, tx_error};
use crate::ip::{IpHeader, Network, Route};
use crate::time::Instant;
use crate::wire::{ipv6, udp};

/// Largest number of datagrams in one send call (`UDP_MAX_SEGMENTS`), which bounds the work of a call.
// limit: segments of one UDP send
const SEGMENTS_MAX: usize = 128;

/// Returns the number of datagrams of a send call.
///
/// # Errors
/// [`UdpError::TooLong`] if a datagram exceeds the path MTU, or there are more than [`SEGMENTS_MAX`].
pub(super) fn count(route: &Route, payload: &[u8], gso_size: usize) -> Result<u64, UdpError> {
    let ip_header = if route.src.is_ipv4() { 20 } else { ipv6::Header::LEN };
    let count = payload.len().div_ceil(gso_size);
    if ip_header + udp::Header::LEN + gso_size > usize::from(route.mtu) || count > SEGMENTS_MAX {
        return Err(UdpError::TooLong);
    }
    Ok(count as u64)
}

/// Sends datagrams of `gso_size` bytes, the last of which may be shorter. Returns how many were sent. If the
/// device becomes full after the first one, the remaining datagrams are dropped silently.
///
/// # Errors
/// As [`count`]; otherwise the error of the network layer for the first datagram.
pub(super) fn send(
    now: Instant,
    network: &mut Network,
    route: &Route,
    header: &IpHeader,
    udp: &udp::Header,
    payload: &[u8],
    gso_size: usize,
) -> Result<u64, UdpError> {
    let count = count(route, payload, gso_size)?;
    let write = |udp: udp::Header, bytes: &[u8], out: &mut [u8]| {
        udp.emit(out);
        out[udp::Header::LEN..].copy_from_slice(bytes);
    };
    let len = udp::Header::LEN + payload.len();
    if network.can_segment_udp(route, len) {
        // Cannot truncate: compared with the MTU.
        let sent =
            network.send_udp_gso(now, route, header, len, gso_size as u16, |out| write(*udp, payload, out));
        return sent.map(|()| count).map_err(tx_error);
    }
    let checksum = Some(udp::Header::CHECKSUM_OFFSET as u16);
    for (sent, bytes) in (0..).zip(payload.chunks(gso_size)) {
        let len = udp::Header::LEN + bytes.len();
        let udp = udp::Header { len: len as u16, ..*udp };
        match network.send_datagram(now, route, header, len, checksum, |out| write(udp, bytes, out)) {
            Ok(()) => {}
            Err(error) if sent == 0 => return Err(tx_error(error)),
            Err(_) => return Ok(sent),
        }
    }
    Ok(count)
}
