//! Urgent data and UDP sockets of a client. Urgent data, and datagrams of a socket that was bound with [`Client::udp_bind`], are questions and answers; those of one
//! that was opened with [`Client::udp_open`] go through the region.

use super::super::bells::RUNG;
use super::super::control::{Reply, Request, UdpRequest};
use super::super::datagram::{DATAGRAM_BYTES_MAX, HOP_LIMIT, Header, TOS};
use super::super::mark::Mark;
use super::super::socket::request;
use super::{Client, mismatch};
use crate::error::Error;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::num::NonZeroU32;
use ginnel_stack::error::{RecvError, SendError, Stale};
use ginnel_stack::handle::{Conn, UdpHandle};
use ginnel_stack::udp::{Datagram, UdpError, UdpOptions, UdpReport, UdpSending};
use std::io::{IoSlice, IoSliceMut};

fn handle(socket: Conn) -> UdpHandle {
    UdpHandle::new(socket.index(), socket.generation())
}

impl Client {
    /// Sends bytes of which the last is urgent, behind what was written before. Returns how many were taken.
    ///
    /// # Errors
    /// As [`Client::send`]; [`SendError::Full`] also if what was written before has not left for the engine yet.
    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        self.held(conn).map_err(|_| SendError::Stale)?;
        match self.ask(Request::SendUrgent(conn.index(), bytes.to_vec())) {
            Ok(Reply::SendUrgent(result)) => result,
            _ => Err(SendError::Stale),
        }
    }

    /// Takes the urgent byte out of line. It stays in the stream, where [`Client::mark`] says.
    ///
    /// # Errors
    /// There is none, or the handle is stale.
    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        self.hand(conn).map_err(|_| RecvError::Stale)?.take_urgent().ok_or(RecvError::WouldBlock)
    }

    /// The urgent byte that was announced last, if reading has not passed it. Reads do not heed it by themselves.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn mark(&mut self, conn: Conn) -> Result<Option<Mark>, Stale> {
        let (mark, ring) = self.hand(conn)?.mark();
        if ring {
            self.ring(conn.index(), RUNG);
        }
        Ok(mark)
    }

    /// Opens a UDP socket, held as a connection is; [`ClientEvent::Datagrams`](super::ClientEvent::Datagrams) tells that there is something.
    ///
    /// # Errors
    /// The stack's, or the shard is gone.
    pub fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<Conn, Error> {
        match self.ask(Request::Udp(UdpRequest::Bind(local, options)))? {
            Reply::UdpBind(Ok((socket, generation))) => {
                self.hold(socket, generation);
                Ok(Conn::new(socket, generation))
            }
            Reply::UdpBind(Err(error)) => Err(Error::Udp(local, error)),
            _ => Err(mismatch()),
        }
    }

    fn udp(&mut self, request: UdpRequest) -> Result<(), UdpError> {
        match self.ask(Request::Udp(request)) {
            Ok(Reply::Udp(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Fixes the other end.
    ///
    /// # Errors
    /// The stack's; [`UdpError::Stale`] also if the shard is gone.
    pub fn udp_connect(&mut self, socket: Conn, remote: SocketAddr) -> Result<(), UdpError> {
        self.udp(UdpRequest::Connect(handle(socket), remote))
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
        self.udp(UdpRequest::Send(handle(socket), remote, data.to_vec()))
    }

    /// Takes the next datagram.
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`], or what ICMP said about one that was sent; as [`Client::udp_connect`].
    pub fn udp_recv(&mut self, socket: Conn) -> Result<(Datagram, Vec<u8>), UdpError> {
        match self.ask(Request::Udp(UdpRequest::Recv(handle(socket)))) {
            Ok(Reply::UdpRecv(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Our end.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_local(&mut self, socket: Conn) -> Result<SocketAddr, UdpError> {
        match self.ask(Request::Udp(UdpRequest::Local(handle(socket)))) {
            Ok(Reply::UdpLocal(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Opens a UDP socket whose datagrams go through the region; [`ClientEvent::Readable`](super::ClientEvent::Readable) tells of those that come,
    /// [`ClientEvent::Datagrams`](super::ClientEvent::Datagrams) of errors. Both ends are known as those of connections are ([`Client::ends`]).
    ///
    /// # Errors
    /// The stack's, or the shard is gone.
    pub fn udp_open(&mut self, local: SocketAddr, options: UdpOptions) -> Result<Conn, Error> {
        match self.ask(Request::Udp(UdpRequest::Open(local, options)))? {
            Reply::UdpBind(Ok((socket, generation))) => {
                self.hold(socket, generation);
                Ok(Conn::new(socket, generation))
            }
            Reply::UdpBind(Err(error)) => Err(Error::Udp(local, error)),
            _ => Err(mismatch()),
        }
    }

    /// Sends a datagram, or several of `piece` bytes if that is not 0, as a question, so that it is known what came of it, from `own` if that is one of the
    /// stack's addresses.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_send_from(&mut self, socket: Conn, sending: &UdpSending, data: &[u8]) -> Result<(), UdpError> {
        self.udp(UdpRequest::SendWith(handle(socket), *sending, data.to_vec()))
    }

    /// Changes how a UDP socket behaves.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_set_options(&mut self, socket: Conn, options: UdpOptions) -> Result<(), UdpError> {
        self.udp(UdpRequest::SetOptions(handle(socket), options))
    }

    /// Takes the next datagram from the region, or only looks at it, as far as there is room for it.
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`]; [`UdpError::Stale`].
    pub fn udp_take(
        &mut self,
        socket: Conn,
        buffers: &mut [IoSliceMut<'_>],
        take: bool,
    ) -> Result<Arrived, UdpError> {
        let found = self.hand(socket).map_err(|_| UdpError::Stale)?.recv_datagram(buffers, take);
        let (header, ring) = found.map_err(|_| UdpError::WouldBlock)?.ok_or(UdpError::WouldBlock)?;
        if ring {
            self.ring(socket.index(), RUNG);
        }
        if header.apart {
            self.take_apart(socket, buffers, take)?;
        }
        let Header { len, peer: from, own: to, tos, hop_limit, piece, came_us, .. } = header;
        let came_us = came_us.map(NonZeroU32::get);
        Ok(Arrived { len: len as usize, from, to, tos, hop_limit, piece, came_us })
    }

    /// The next is too long for the region.
    fn take_apart(
        &mut self,
        socket: Conn,
        buffers: &mut [IoSliceMut<'_>],
        take: bool,
    ) -> Result<(), UdpError> {
        let Ok(Reply::UdpRecv(result)) = self.ask(Request::Udp(UdpRequest::Apart(handle(socket), take)))
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
        if take && self.hand(socket).map_err(|_| UdpError::Stale)?.take_header() {
            self.ring(socket.index(), RUNG);
        }
        Ok(())
    }

    /// Sends a datagram, or several of `piece` bytes if that is not 0, through the region: to the socket's other end if none is given, from `own` if that is one of the stack's addresses. What is wrong
    /// with it is a pending error later, if at all. [`UdpError::WouldBlock`]: there is no room, and [`ClientEvent::Writable`](super::ClientEvent::Writable) follows.
    ///
    /// # Errors
    /// [`UdpError::TooLong`]; [`UdpError::Stale`].
    pub fn udp_post(
        &mut self,
        socket: Conn,
        sending: &UdpSending,
        buffers: &[IoSlice<'_>],
    ) -> Result<(), UdpError> {
        let &UdpSending { to, source, piece, hop_limit, tos } = sending;
        let len: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        if len > DATAGRAM_BYTES_MAX {
            return Err(UdpError::TooLong);
        }
        let nobody = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
        let any = Ipv6Addr::UNSPECIFIED.into();
        let header = Header {
            // Cannot truncate: compared above.
            len: len as u32,
            apart: false,
            peer: to.unwrap_or(nobody),
            own: source.unwrap_or(any),
            tos: tos.unwrap_or_default(),
            hop_limit: hop_limit.unwrap_or_default(),
            wanted: tos.map_or(0, |_| TOS) | hop_limit.map_or(0, |_| HOP_LIMIT),
            piece,
            came_us: None,
        };
        if header.bytes() > self.region.buffer_bytes() {
            let data: Vec<u8> = buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect();
            return self.udp_send_from(socket, sending, &data);
        }
        let hand = self.hand(socket).map_err(|_| UdpError::Stale)?;
        match hand.send_datagram(&header, buffers, self.blocked.of(socket.index())) {
            Ok(true) => {
                self.ring(socket.index(), RUNG);
                Ok(())
            }
            _ => Err(UdpError::WouldBlock),
        }
    }

    /// What is pending on a socket, and whether it is taken.
    pub fn udp_error(&self, socket: Conn, take: bool) -> Option<UdpError> {
        self.hand(socket).ok()?.udp_error(take)
    }

    /// From now on datagrams say when they came.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn udp_stamp(&mut self, socket: Conn) -> Result<(), Stale> {
        self.hand(socket)?.request(request::STAMPS);
        Ok(())
    }

    /// Whether there are reports of errors, for [`Client::udp_take_report`].
    pub fn udp_has_reports(&self, socket: Conn) -> bool {
        self.hand(socket).is_ok_and(|hand| hand.has_reports())
    }

    /// Takes the oldest report of an error, and what is known of the datagram. What the one behind it means is pending from then on.
    ///
    /// # Errors
    /// [`UdpError::WouldBlock`] if there is none; as [`Client::udp_connect`].
    pub fn udp_take_report(&mut self, socket: Conn) -> Result<Box<(UdpReport, Vec<u8>)>, UdpError> {
        match self.ask(Request::Udp(UdpRequest::Report(handle(socket)))) {
            Ok(Reply::UdpReport(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Bytes of the largest IP packet that gets to the other end in one piece, as far as is known.
    ///
    /// # Errors
    /// [`UdpError::NoDestination`] if the other end is not fixed; as [`Client::udp_connect`].
    pub fn udp_path_mtu(&mut self, socket: Conn) -> Result<u16, UdpError> {
        match self.ask(Request::Udp(UdpRequest::PathMtu(handle(socket)))) {
            Ok(Reply::UdpPathMtu(result)) => result,
            _ => Err(UdpError::Stale),
        }
    }

    /// Bytes of the datagram that is next, if there is one.
    pub fn udp_next_bytes(&self, socket: Conn) -> Option<usize> {
        self.hand(socket).ok()?.next_datagram_bytes()
    }
}

/// A datagram that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
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
    pub piece: u16,
    /// When it came, if that was asked for before ([`Client::udp_stamp`]): the lowest 32 bits of the microseconds since 1970.
    pub came_us: Option<u32>,
}
