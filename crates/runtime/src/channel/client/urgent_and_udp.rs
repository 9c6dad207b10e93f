//! Urgent data and UDP sockets of a client. Urgent data, and datagrams of a socket that was bound with [`Client::udp_bind`], are questions and answers; those of one
//! that was opened with [`Client::udp_open`] go through the region.

use super::super::control::{ChannelReply, ChannelRequest, UdpRequest};
use super::super::datagram::{DATAGRAM_BYTES_MAX, DatagramHeader, HAS_HOP_LIMIT, HAS_TOS};
use super::super::doorbells::NOTIFIED;
use super::super::socket::request;
use super::super::urgent_mark::UrgentMark;
use super::{Client, unexpected_reply};
use crate::error::Error;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::num::NonZeroU32;
use ginnel_stack::error::{RecvError, SendError, Stale};
use ginnel_stack::handle::{Conn, UdpHandle};
use ginnel_stack::udp::{Datagram, UdpError, UdpExtendedError, UdpOptions, UdpSendParams};
use std::io::{IoSlice, IoSliceMut};

fn udp_handle(socket: Conn) -> UdpHandle {
    UdpHandle::new(socket.index(), socket.generation())
}

impl Client {
    /// Sends bytes of which the last is urgent, behind what was written before. Returns how many were taken.
    ///
    /// # Errors
    /// As [`Client::send`]; [`SendError::Full`] also if what was written before has not left for the engine yet.
    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.tracked(conn).map_err(|_| SendError::Stale)?;
        match self.call(ChannelRequest::SendUrgent(conn.index(), bytes.to_vec())) {
            Ok(ChannelReply::SendUrgent(result)) => result,
            _ => Err(SendError::Stale),
        }
    }

    /// Takes the urgent byte out of line. It stays in the stream, where [`Client::mark`] says.
    ///
    /// # Errors
    /// There is none, or the handle is stale.
    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        self.socket_ref(conn).map_err(|_| RecvError::Stale)?.take_urgent().ok_or(RecvError::WouldBlock)
    }

    /// The urgent byte that was announced last, if reading has not passed it. Reads do not heed it by themselves.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn urgent_mark(&mut self, conn: Conn) -> Result<Option<UrgentMark>, Stale> {
        let (mark, ring) = self.socket_ref(conn)?.urgent_mark();
        if ring {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(mark)
    }

    /// Opens a UDP socket, held as a connection is; [`ClientEvent::Datagrams`](super::ClientEvent::Datagrams) tells that there is something.
    ///
    /// # Errors
    /// The stack's, or the shard is gone.
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

    /// Fixes the other end.
    ///
    /// # Errors
    /// The stack's; [`UdpError::Stale`] also if the shard is gone.
    pub fn udp_connect(&mut self, socket: Conn, remote: SocketAddr) -> Result<(), UdpError> {
        self.udp_call(UdpRequest::Connect(udp_handle(socket), remote))
    }

    /// Sends a datagram, to the other end that was fixed if there is no other.
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
    /// [`UdpError::WouldBlock`], or what ICMP said about one that was sent; as [`Client::udp_connect`].
    pub fn udp_recv(&mut self, socket: Conn) -> Result<(Datagram, Vec<u8>), UdpError> {
        match self.call(ChannelRequest::Udp(UdpRequest::Recv(udp_handle(socket)))) {
            Ok(ChannelReply::UdpRecv(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Our end.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_local(&mut self, socket: Conn) -> Result<SocketAddr, UdpError> {
        match self.call(ChannelRequest::Udp(UdpRequest::Local(udp_handle(socket)))) {
            Ok(ChannelReply::UdpLocal(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Opens a UDP socket whose datagrams go through the region; [`ClientEvent::Readable`](super::ClientEvent::Readable) tells of those that come,
    /// [`ClientEvent::Datagrams`](super::ClientEvent::Datagrams) of errors. Both ends are known as those of connections are ([`Client::ends`]).
    ///
    /// # Errors
    /// The stack's, or the shard is gone.
    pub fn udp_open(&mut self, local: SocketAddr, options: UdpOptions) -> Result<Conn, Error> {
        match self.call(ChannelRequest::Udp(UdpRequest::Open(local, options)))? {
            ChannelReply::UdpBind(Ok((socket, generation))) => {
                self.track(socket, generation);
                Ok(Conn::new(socket, generation))
            }
            ChannelReply::UdpBind(Err(error)) => Err(Error::Udp(local, error)),
            _ => Err(unexpected_reply()),
        }
    }

    /// Sends a datagram, or several of `piece` bytes if that is not 0, as a question, so that it is known what came of it, from `own` if that is one of the
    /// stack's addresses.
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

    /// Changes how a UDP socket behaves.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_set_options(&mut self, socket: Conn, options: UdpOptions) -> Result<(), UdpError> {
        self.udp_call(UdpRequest::SetOptions(udp_handle(socket), options))
    }

    /// Takes the next datagram from the region, or only looks at it, as far as there is room for it.
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`]; [`UdpError::Stale`].
    pub fn udp_recv_into(
        &mut self,
        socket: Conn,
        buffers: &mut [IoSliceMut<'_>],
        take: bool,
    ) -> Result<ReceivedDatagram, UdpError> {
        let found = self.socket_ref(socket).map_err(|_| UdpError::Stale)?.recv_datagram(buffers, take);
        let (header, ring) = found.map_err(|_| UdpError::WouldBlock)?.ok_or(UdpError::WouldBlock)?;
        if ring {
            self.notify(socket.index(), NOTIFIED);
        }
        if header.is_oversize {
            self.recv_oversize(socket, buffers, take)?;
        }
        let DatagramHeader {
            len,
            peer: from,
            local: to,
            tos,
            hop_limit,
            gso_size: piece,
            received_us: came_us,
            ..
        } = header;
        let came_us = came_us.map(NonZeroU32::get);
        Ok(ReceivedDatagram {
            len: len as usize,
            from,
            to,
            tos,
            hop_limit,
            gso_size: piece,
            received_us: came_us,
        })
    }

    /// The next is too long for the region.
    fn recv_oversize(
        &mut self,
        socket: Conn,
        buffers: &mut [IoSliceMut<'_>],
        take: bool,
    ) -> Result<(), UdpError> {
        let Ok(ChannelReply::UdpRecv(result)) =
            self.call(ChannelRequest::Udp(UdpRequest::RecvOversize(udp_handle(socket), take)))
        else {
            return Err(UdpError::Stale);
        };
        let (_, data) = result?;
        let mut rest = &data[..];
        for buffer in buffers {
            let (now, later) = rest.split_at(rest.len().min(buffer.len()));
            buffer[..now.len()].copy_from_slice(now);
            rest = later;
        }
        if take && self.socket_ref(socket).map_err(|_| UdpError::Stale)?.consume_header() {
            self.notify(socket.index(), NOTIFIED);
        }
        Ok(())
    }

    /// Sends a datagram, or several of `piece` bytes if that is not 0, through the region: to the socket's other end if none is given, from `own` if that is one of the stack's addresses. What is wrong
    /// with it is a pending error later, if at all. [`UdpError::WouldBlock`]: there is no room, and [`ClientEvent::Writable`](super::ClientEvent::Writable) follows.
    ///
    /// # Errors
    /// [`UdpError::TooLong`]; [`UdpError::Stale`].
    pub fn udp_send_queued(
        &mut self,
        socket: Conn,
        sending: &UdpSendParams,
        buffers: &[IoSlice<'_>],
    ) -> Result<(), UdpError> {
        let &UdpSendParams { to, source, gso_size: piece, hop_limit, tos } = sending;
        let len: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        if len > DATAGRAM_BYTES_MAX {
            return Err(UdpError::TooLong);
        }
        let nobody = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
        let any = Ipv6Addr::UNSPECIFIED.into();
        let header = DatagramHeader {
            // Cannot truncate: compared above.
            len: len as u32,
            is_oversize: false,
            peer: to.unwrap_or(nobody),
            local: source.unwrap_or(any),
            tos: tos.unwrap_or_default(),
            hop_limit: hop_limit.unwrap_or_default(),
            present: tos.map_or(0, |_| HAS_TOS) | hop_limit.map_or(0, |_| HAS_HOP_LIMIT),
            gso_size: piece,
            received_us: None,
        };
        if header.stream_bytes() > self.region.buffer_bytes() {
            let data: Vec<u8> = buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect();
            return self.udp_send_with(socket, sending, &data);
        }
        let hand = self.socket_ref(socket).map_err(|_| UdpError::Stale)?;
        match hand.send_datagram(&header, buffers, self.blocked.flag(socket.index())) {
            Ok(true) => {
                self.notify(socket.index(), NOTIFIED);
                Ok(())
            }
            _ => Err(UdpError::WouldBlock),
        }
    }

    /// What is pending on a socket, and whether it is taken.
    pub fn udp_error(&self, socket: Conn, take: bool) -> Option<UdpError> {
        self.socket_ref(socket).ok()?.udp_error(take)
    }

    /// From now on datagrams say when they came.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn udp_enable_timestamps(&mut self, socket: Conn) -> Result<(), Stale> {
        self.socket_ref(socket)?.request(request::TIMESTAMPS);
        Ok(())
    }

    /// Whether there are reports of errors, for [`Client::udp_take_report`].
    pub fn udp_has_extended_errors(&self, socket: Conn) -> bool {
        self.socket_ref(socket).is_ok_and(|hand| hand.has_extended_errors())
    }

    /// Takes the oldest report of an error, and what is known of the datagram. What the one behind it means is pending from then on.
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`] if there is none; as [`Client::udp_connect`].
    pub fn udp_take_extended_error(
        &mut self,
        socket: Conn,
    ) -> Result<Box<(UdpExtendedError, Vec<u8>)>, UdpError> {
        match self.call(ChannelRequest::Udp(UdpRequest::TakeExtendedError(udp_handle(socket)))) {
            Ok(ChannelReply::UdpExtendedError(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Bytes of the largest IP packet that gets to the other end in one piece, as far as is known.
    ///
    /// # Errors
    /// [`UdpError::NoDestination`] if the other end is not fixed; as [`Client::udp_connect`].
    pub fn udp_path_mtu(&mut self, socket: Conn) -> Result<u16, UdpError> {
        match self.call(ChannelRequest::Udp(UdpRequest::PathMtu(udp_handle(socket)))) {
            Ok(ChannelReply::UdpPathMtu(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Bytes of the datagram that is next, if there is one.
    pub fn udp_next_len(&self, socket: Conn) -> Option<usize> {
        self.socket_ref(socket).ok()?.next_datagram_bytes()
    }
}

/// A datagram that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedDatagram {
    /// Its bytes, also if there was room for fewer.
    pub len: usize,
    /// Who sent it.
    pub from: SocketAddr,
    /// The address it was sent to.
    pub to: IpAddr,
    /// Type of service, or traffic class; the lowest two bits are those of ECN (RFC 3168).
    pub tos: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
    /// They are several datagrams of so many bytes, of which the last may have fewer; 0 if it is one.
    pub gso_size: u16,
    /// When it came, if that was asked for before ([`Client::udp_stamp`]): the lowest 32 bits of the microseconds since 1970.
    pub received_us: Option<u32>,
}
