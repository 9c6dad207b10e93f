//! Peeks at datagrams from a byte offset on.

use super::urgent_and_udp::{received, udp_handle};
use super::{Client, ClientEvent, ReceivedDatagram};
use crate::channel::buffers::{Fault, RecvBuffer, scatter};
use crate::channel::control::{ChannelReply, ChannelRequest, UdpRequest};
use crate::channel::socket_ref::PeekedAt;
use ginnel_stack::handle::Conn;
use ginnel_stack::udp::UdpError;

/// A datagram at which a client has peeked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeekedDatagram {
    /// The datagram.
    pub datagram: ReceivedDatagram,
    /// Bytes of the datagram that precede the copied ones.
    pub offset: usize,
    /// Position of the datagram among the bytes that the client has received or will receive.
    pub position: u64,
}

impl Client {
    /// Copies from the queued datagram that has the byte `offset` of the queue on, as far as the buffers hold
    /// it. Only datagrams in the region are looked at. An empty datagram is passed over after the first byte
    /// of the queue, and if its position is in `peeked_empty`. The inner error is a fault in a buffer.
    ///
    /// # Errors
    /// As [`Client::udp_recv_into`].
    pub fn udp_peek_into<B: RecvBuffer>(
        &mut self,
        socket: Conn,
        buffers: &mut [B],
        offset: usize,
        peeked_empty: &[u64],
    ) -> Result<Result<PeekedDatagram, Fault>, UdpError> {
        let socket_ref = self.socket_ref(socket).map_err(|_| UdpError::Stale)?;
        let Ok(found) = socket_ref.peek_datagram(buffers, offset, peeked_empty) else {
            self.report_busy(ClientEvent::Datagrams { conn: socket });
            return Err(UdpError::WouldBlock);
        };
        let PeekedAt { header, offset, position, oversize_before, mut copied } =
            found.ok_or(UdpError::WouldBlock)?;
        if header.is_oversize {
            let request = UdpRequest::PeekOversize(udp_handle(socket), oversize_before);
            let Ok(ChannelReply::UdpRecv(result)) = self.call(ChannelRequest::Udp(request)) else {
                return Err(UdpError::Stale);
            };
            let (_, data) = result?;
            copied = scatter(data.get(offset..).unwrap_or_default(), buffers).map(|_| ());
        }
        Ok(copied.map(|()| PeekedDatagram { datagram: received(&header), offset, position }))
    }
}
