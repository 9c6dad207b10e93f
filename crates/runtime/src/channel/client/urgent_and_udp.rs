//! Urgent data and UDP sockets of a client. Urgent data, and datagrams of a socket opened with
//! [`Client::udp_bind`], are transferred by requests; datagrams of a socket opened with [`Client::udp_open`]
//! pass through the region.

use super::super::buffers::{Fault, RecvBuffer, SendBuffer, gather, scatter, total_len};
use super::super::control::{ChannelReply, ChannelRequest, UdpRequest};
use super::super::datagram::{
    DATAGRAM_BYTES_MAX, DatagramHeader, HAS_AUTO_FLOW_LABEL, HAS_FLOW_LABEL, HAS_HOP_LIMIT, HAS_TOS,
};
use super::super::doorbells::NOTIFIED;
use super::super::socket::request;
use super::super::socket_ref::TakenDatagram;
use super::super::urgent_mark::UrgentMark;
use super::{Client, ClientEvent, unexpected_reply};
use crate::error::Error;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::num::NonZeroU32;
use ginnel_stack::error::{RecvError, SendError, Stale};
use ginnel_stack::handle::{Conn, UdpHandle};
use ginnel_stack::ip::FlowLabel;
use ginnel_stack::multicast::SourceFilter;
use ginnel_stack::udp::{Datagram, MembershipLimits, UdpError, UdpExtendedError, UdpOptions, UdpSendParams};
use std::io::IoSlice;

pub(super) fn udp_handle(socket: Conn) -> UdpHandle {
    UdpHandle::new(socket.index(), socket.generation())
}

/// Returns the description of the datagram with this header.
#[inline(always)]
pub(super) fn received(header: &DatagramHeader) -> ReceivedDatagram {
    let &DatagramHeader {
        len, peer: from, local: to, tos, hop_limit, flow_label, gso_size, received_us, ..
    } = header;
    let received_us = received_us.map(NonZeroU32::get);
    ReceivedDatagram { len: len as usize, from, to, tos, hop_limit, flow_label, gso_size, received_us }
}

impl Client {
    /// Sends bytes of which the last is urgent, after what was written before. Returns how many were taken;
    /// if not all, [`ClientEvent::Writable`] follows.
    ///
    /// # Errors
    /// As [`Client::send`]; also [`SendError::Full`] if the engine has not yet taken all that was written
    /// before.
    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.tracked(conn).map_err(|_| SendError::Stale)?;
        match self.call(ChannelRequest::SendUrgent(conn.index(), bytes.to_vec())) {
            Ok(ChannelReply::SendUrgent(result)) => {
                if result == Err(SendError::Full) || result.is_ok_and(|sent| sent < bytes.len()) {
                    // `Writable` is reported when the stack notifies.
                    let _ = self.await_send_space(conn, usize::MAX);
                }
                result
            }
            _ => Err(SendError::Stale),
        }
    }

    /// Takes the urgent byte out of band. It stays in the stream, at the position that
    /// [`Client::urgent_mark`] reports.
    ///
    /// # Errors
    /// Returns an error if there is none, or if the handle is stale.
    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        self.socket_ref(conn).map_err(|_| RecvError::Stale)?.take_urgent().ok_or(RecvError::WouldBlock)
    }

    /// Returns the urgent byte that was announced last, unless the read position has passed it. Reads do not
    /// heed it by themselves.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn urgent_mark(&mut self, conn: Conn) -> Result<Option<UrgentMark>, Stale> {
        let (mark, must_notify) = self.socket_ref(conn)?.urgent_mark();
        if must_notify {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(mark)
    }

    /// Opens a UDP socket, which the client owns like a connection.
    /// [`ClientEvent::Datagrams`] reports datagrams and errors.
    ///
    /// # Errors
    /// Returns the stack's error, or an error if the shard is gone.
    pub fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<Conn, Error> {
        match self.call(ChannelRequest::Udp(UdpRequest::Bind(local, options)))? {
            ChannelReply::UdpBind(Ok((socket, generation))) => {
                self.track(socket, generation);
                Ok(Conn::new(socket, generation))
            }
            ChannelReply::UdpBind(Err(error)) => Err(Error::Udp(local, error)),
            _ => Err(unexpected_reply()),
        }
    }

    fn udp_call(&mut self, request: UdpRequest) -> Result<(), UdpError> {
        match self.call(ChannelRequest::Udp(request)) {
            Ok(ChannelReply::Udp(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Connects the socket to a peer.
    ///
    /// # Errors
    /// Returns the stack's error, and [`UdpError::Stale`] also if the shard is gone.
    pub fn udp_connect(&mut self, socket: Conn, remote: SocketAddr) -> Result<(), UdpError> {
        self.udp_call(UdpRequest::Connect(udp_handle(socket), remote))
    }

    /// Sends a datagram, to the connected peer if `remote` is `None`.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_send(
        &mut self,
        socket: Conn,
        remote: Option<SocketAddr>,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.udp_call(UdpRequest::Send(udp_handle(socket), remote, data.to_vec()))
    }

    /// Takes the next datagram.
    ///
    /// # Errors
    /// Returns [`UdpError::WouldBlock`] if there is none, or the error that ICMP reported for a datagram that
    /// was sent; as [`Client::udp_connect`].
    pub fn udp_recv(&mut self, socket: Conn) -> Result<(Datagram, Vec<u8>), UdpError> {
        match self.call(ChannelRequest::Udp(UdpRequest::Recv(udp_handle(socket)))) {
            Ok(ChannelReply::UdpRecv(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_local(&mut self, socket: Conn) -> Result<SocketAddr, UdpError> {
        match self.call(ChannelRequest::Udp(UdpRequest::Local(udp_handle(socket)))) {
            Ok(ChannelReply::UdpLocal(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Opens a UDP socket whose datagrams pass through the region.
    /// [`ClientEvent::Readable`] reports datagrams,
    /// [`ClientEvent::Datagrams`] errors. [`Client::endpoints`] returns its
    /// addresses.
    ///
    /// # Errors
    /// Returns the stack's error, or an error if the shard is gone.
    pub fn udp_open(&mut self, local: SocketAddr, options: UdpOptions) -> Result<Conn, Error> {
        self.udp_open_by(local, ChannelRequest::Udp(UdpRequest::Open(local, options)))
    }

    /// As [`Client::udp_open`], but only if the shard serves the device of the local address and, if that is
    /// unspecified, the one by which packets to `to` leave.
    ///
    /// # Errors
    /// As [`Client::udp_open`]; [`UdpError::AddressNotAvailable`] from another shard.
    pub fn udp_open_served(
        &mut self,
        local: SocketAddr,
        options: UdpOptions,
        to: Option<IpAddr>,
    ) -> Result<Conn, Error> {
        self.udp_open_by(local, ChannelRequest::Udp(UdpRequest::OpenServed(local, options, to)))
    }

    /// Opens a UDP socket with a given request.
    pub(super) fn udp_open_by(&mut self, local: SocketAddr, request: ChannelRequest) -> Result<Conn, Error> {
        match self.call(request)? {
            ChannelReply::UdpBind(Ok((socket, generation))) => {
                self.track(socket, generation);
                Ok(Conn::new(socket, generation))
            }
            ChannelReply::SetFilter(Err(error)) => Err(Error::Filter(error)),
            ChannelReply::UdpBind(Err(error)) => Err(Error::Udp(local, error)),
            _ => Err(unexpected_reply()),
        }
    }

    /// Sends a datagram, or several if the parameters have a `gso_size`, by a request, so that the caller
    /// learns the result. The source address is used if it is one of the stack's.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_send_with(
        &mut self,
        socket: Conn,
        sending: &UdpSendParams,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.udp_call(UdpRequest::SendWith(udp_handle(socket), *sending, data.to_vec()))
    }

    /// As [`Client::udp_send_with`]. Returns when the engine began to send the datagram, and when the device
    /// had it: the lowest 32 bits of the microseconds since 1970.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_send_timed(
        &mut self,
        socket: Conn,
        sending: &UdpSendParams,
        data: &[u8],
    ) -> Result<(u32, u32), UdpError> {
        let request = UdpRequest::SendTimed(udp_handle(socket), *sending, data.to_vec());
        match self.call(ChannelRequest::Udp(request)) {
            Ok(ChannelReply::UdpSentAt(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Sets options of a UDP socket.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_set_options(&mut self, socket: Conn, options: UdpOptions) -> Result<(), UdpError> {
        self.udp_call(UdpRequest::SetOptions(udp_handle(socket), options))
    }

    /// Sets the filter with which a socket receives a group on the link of this number; `None` leaves the
    /// group.
    ///
    /// # Errors
    /// As [`Context::udp_set_membership`](crate::Context::udp_set_membership); [`UdpError::Stale`] also if
    /// the shard is gone.
    pub fn udp_set_membership(
        &mut self,
        socket: Conn,
        link: u16,
        group: IpAddr,
        filter: Option<SourceFilter>,
    ) -> Result<(), UdpError> {
        self.udp_call(UdpRequest::SetMembership(udp_handle(socket), link, group, filter))
    }

    /// Returns the number of the link by which a group is reached if the program names none, and the limits
    /// of memberships.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn link_of_group(&mut self, group: IpAddr) -> Result<(Option<u16>, MembershipLimits), Error> {
        match self.call(ChannelRequest::Udp(UdpRequest::GroupLink(group)))? {
            ChannelReply::UdpGroupLink(link, limits) => Ok((link, limits)),
            _ => Err(unexpected_reply()),
        }
    }

    /// Returns the first and the last port that the stack chooses for TCP, and those for UDP.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn local_ports(&mut self) -> Result<[(u16, u16); 2], Error> {
        match self.call(ChannelRequest::LocalPorts)? {
            ChannelReply::LocalPorts(ports) => Ok(ports),
            _ => Err(unexpected_reply()),
        }
    }

    /// Copies the next datagram from the region, as far as the buffers hold it, and removes it, even after a
    /// fault in a buffer, which is the inner error.
    ///
    /// # Errors
    /// Returns [`UdpError::WouldBlock`] if there is none, and [`UdpError::Stale`] if the handle is stale or
    /// the shard is gone.
    pub fn udp_recv_into<B: RecvBuffer>(
        &mut self,
        socket: Conn,
        buffers: &mut [B],
    ) -> Result<Result<ReceivedDatagram, Fault>, UdpError> {
        let Ok(found) = self.socket_ref(socket).map_err(|_| UdpError::Stale)?.recv_datagram(buffers) else {
            self.report_busy(ClientEvent::Datagrams { conn: socket });
            return Err(UdpError::WouldBlock);
        };
        let TakenDatagram { header, wants_notice, mut copied } = found.ok_or(UdpError::WouldBlock)?;
        if wants_notice {
            self.notify(socket.index(), NOTIFIED);
        }
        if header.is_oversize {
            copied = self.recv_oversize(socket, buffers)?;
        }
        Ok(copied.map(|()| received(&header)))
    }

    /// Requests the next datagram, which is too long for the region.
    fn recv_oversize<B: RecvBuffer>(
        &mut self,
        socket: Conn,
        buffers: &mut [B],
    ) -> Result<Result<(), Fault>, UdpError> {
        let Ok(ChannelReply::UdpRecv(result)) =
            self.call(ChannelRequest::Udp(UdpRequest::RecvOversize(udp_handle(socket))))
        else {
            return Err(UdpError::Stale);
        };
        let (_, data) = result?;
        let copied = scatter(&data, buffers);
        if self.socket_ref(socket).map_err(|_| UdpError::Stale)?.consume_header() {
            self.notify(socket.index(), NOTIFIED);
        }
        Ok(copied.map(|_| ()))
    }

    /// Sends a datagram, or several if the parameters have a `gso_size`, through the region: to the connected
    /// peer if no destination is given, and from the given source address if it is one of the stack's. A
    /// failure becomes a pending error later, if it is reported at all.
    ///
    /// # Errors
    /// Returns [`UdpError::WouldBlock`] if there is no space
    /// ([`ClientEvent::Writable`] follows then), [`UdpError::TooLong`] for more
    /// than 65,535 bytes, and [`UdpError::Stale`] if the handle is stale.
    pub fn udp_send_queued(
        &mut self,
        socket: Conn,
        sending: &UdpSendParams,
        buffers: &[IoSlice<'_>],
    ) -> Result<(), UdpError> {
        // Slices can be read.
        self.udp_send_queued_from(socket, sending, None, buffers).map(|_| ())
    }

    /// As [`udp_send_queued`](Self::udp_send_queued). After a fault in a buffer nothing is sent. With
    /// `departs_us`, the datagram is not sent before this time: the lowest 32 bits of the microseconds of the
    /// monotonic clock. A datagram that is longer than the send buffer of the channel is sent at once.
    ///
    /// # Errors
    /// As [`Client::udp_send_queued`].
    pub fn udp_send_queued_from<B: SendBuffer>(
        &mut self,
        socket: Conn,
        sending: &UdpSendParams,
        departs_us: Option<NonZeroU32>,
        buffers: &[B],
    ) -> Result<Result<(), Fault>, UdpError> {
        let &UdpSendParams { to, source, gso_size, hop_limit, tos, flow_label } = sending;
        let len = total_len(buffers);
        if len > DATAGRAM_BYTES_MAX {
            return Err(UdpError::TooLong);
        }
        let unspecified = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
        let any = Ipv6Addr::UNSPECIFIED.into();
        let header = DatagramHeader {
            // Cannot truncate: checked above.
            len: len as u32,
            is_oversize: false,
            peer: to.unwrap_or(unspecified),
            local: source.unwrap_or(any),
            tos: tos.unwrap_or_default(),
            hop_limit: hop_limit.unwrap_or_default(),
            flow_label: if let Some(FlowLabel::Fixed(label)) = flow_label { label } else { 0 },
            present: tos.map_or(0, |_| HAS_TOS)
                | hop_limit.map_or(0, |_| HAS_HOP_LIMIT)
                | match flow_label {
                    None => 0,
                    Some(FlowLabel::Fixed(_)) => HAS_FLOW_LABEL,
                    Some(FlowLabel::Auto | FlowLabel::Reflect) => HAS_AUTO_FLOW_LABEL,
                },
            gso_size,
            received_us: departs_us,
        };
        if header.stream_bytes() > self.region.buffer_bytes() {
            let mut data = Vec::new();
            if gather(buffers, len, &mut data).is_err() {
                return Ok(Err(Fault));
            }
            return self.udp_send_with(socket, sending, &data).map(Ok);
        }
        let socket_ref = self.socket_ref(socket).map_err(|_| UdpError::Stale)?;
        match socket_ref.send_datagram(&header, buffers, self.blocked.flag(socket.index())) {
            Ok(Ok(true)) => {
                self.notify(socket.index(), NOTIFIED);
                Ok(Ok(()))
            }
            Ok(Err(Fault)) => Ok(Err(Fault)),
            Ok(Ok(false)) => Err(UdpError::WouldBlock),
            Err(_) => {
                self.report_busy(ClientEvent::Writable { conn: socket });
                Err(UdpError::WouldBlock)
            }
        }
    }

    /// Returns the pending error of a socket, and clears it if `take` is set.
    pub fn udp_error(&self, socket: Conn, take: bool) -> Option<UdpError> {
        self.socket_ref(socket).ok()?.udp_error(take)
    }

    /// Makes later datagrams carry their time of arrival.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn udp_enable_timestamps(&mut self, socket: Conn) -> Result<(), Stale> {
        self.socket_ref(socket)?.request(request::TIMESTAMPS);
        Ok(())
    }

    /// Returns whether the socket's error queue has entries for [`Client::udp_take_extended_error`].
    pub fn udp_has_extended_errors(&self, socket: Conn) -> bool {
        self.socket_ref(socket).is_ok_and(|socket_ref| socket_ref.has_extended_errors())
    }

    /// Takes the oldest entry of a socket's error queue, with the quoted part of the datagram. The error of
    /// the next entry becomes the pending error.
    ///
    /// # Errors
    /// Returns [`UdpError::WouldBlock`] if there is none; as [`Client::udp_connect`].
    pub fn udp_take_extended_error(
        &mut self,
        socket: Conn,
    ) -> Result<Box<(UdpExtendedError, Vec<u8>)>, UdpError> {
        match self.call(ChannelRequest::Udp(UdpRequest::TakeExtendedError(udp_handle(socket)))) {
            Ok(ChannelReply::UdpExtendedError(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Returns the bytes of the largest IP packet that reaches the connected peer without fragmentation, as
    /// far as known.
    ///
    /// # Errors
    /// Returns [`UdpError::NoDestination`] if the socket is not connected; as [`Client::udp_connect`].
    pub fn udp_path_mtu(&mut self, socket: Conn) -> Result<u16, UdpError> {
        match self.call(ChannelRequest::Udp(UdpRequest::PathMtu(udp_handle(socket)))) {
            Ok(ChannelReply::UdpPathMtu(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Returns the length of the next datagram, if there is one.
    pub fn udp_next_len(&self, socket: Conn) -> Option<usize> {
        self.socket_ref(socket).ok()?.next_datagram_bytes()
    }
}

/// Description of a datagram that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedDatagram {
    /// Bytes of the datagram, also if the buffers held fewer.
    pub len: usize,
    /// The sender.
    pub from: SocketAddr,
    /// The address to which it was sent.
    pub to: IpAddr,
    /// Type of service, or traffic class. The lowest two bits are the ECN field (RFC 3168).
    pub tos: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
    /// Flow label of a datagram over IPv6, otherwise 0.
    pub flow_label: u32,
    /// The bytes are several datagrams of this size, of which the last may be shorter; 0 for a single
    /// datagram.
    pub gso_size: u16,
    /// Time of arrival, if [`Client::udp_enable_timestamps`] was called before: the lowest 32 bits of the
    /// microseconds since 1970.
    pub received_us: Option<u32>,
}
