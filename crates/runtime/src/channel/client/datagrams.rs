//! Urgent data and UDP sockets of a client. Urgent data, and datagrams of a socket that was bound with [`Client::udp_bind`], are questions and answers; those of one
//! that was opened with [`Client::udp_open`] go through the region.

use super::super::bells::RUNG;
use super::super::control::{Reply, Request, UdpRequest};
use super::super::datagram::{DATAGRAM_BYTES_MAX, Header};
use super::{Client, mismatch};
use crate::error::Error;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use ginnel_stack::error::{RecvError, SendError};
use ginnel_stack::handle::{Conn, UdpHandle};
use ginnel_stack::udp::{Datagram, UdpError, UdpOptions};
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

    /// Takes the urgent byte.
    ///
    /// # Errors
    /// There is none, or the handle is stale.
    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        self.held(conn).map_err(|_| RecvError::Stale)?;
        match self.ask(Request::RecvUrgent(conn.index())) {
            Ok(Reply::RecvUrgent(result)) => result,
            _ => Err(RecvError::Stale),
        }
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

    /// Sends a datagram as a question, so that it is known what came of it, from `own` if that is one of the stack's addresses.
    ///
    /// # Errors
    /// As [`Client::udp_connect`].
    pub fn udp_send_from(
        &mut self,
        socket: Conn,
        to: Option<SocketAddr>,
        own: Option<IpAddr>,
        data: &[u8],
    ) -> Result<(), UdpError> {
        match (to, own) {
            (Some(from), Some(to)) => {
                let answered = Datagram { len: 0, from, to, ecn: 0, hop_limit: 0 };
                self.udp(UdpRequest::Reply(handle(socket), answered, data.to_vec()))
            }
            _ => self.udp_send(socket, to, data),
        }
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
        let Header { len, peer: from, own: to, ecn, hop_limit, .. } = header;
        Ok(Arrived { len: len as usize, from, to, ecn, hop_limit })
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

    /// Sends a datagram through the region: to the socket's other end if none is given, from `own` if that is one of the stack's addresses. What is wrong
    /// with it is a pending error later, if at all. [`UdpError::WouldBlock`]: there is no room, and [`ClientEvent::Writable`](super::ClientEvent::Writable) follows.
    ///
    /// # Errors
    /// [`UdpError::TooLong`]; [`UdpError::Stale`].
    pub fn udp_post(
        &mut self,
        socket: Conn,
        to: Option<SocketAddr>,
        own: Option<IpAddr>,
        buffers: &[IoSlice<'_>],
    ) -> Result<(), UdpError> {
        let len: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        if len > DATAGRAM_BYTES_MAX {
            return Err(UdpError::TooLong);
        }
        let nobody = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
        let own = own.unwrap_or(Ipv6Addr::UNSPECIFIED.into());
        // Cannot truncate: compared above.
        let header =
            Header { len: len as u32, apart: false, peer: to.unwrap_or(nobody), own, ecn: 0, hop_limit: 0 };
        if header.bytes() > self.region.buffer_bytes() {
            let data: Vec<u8> = buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect();
            return self.udp_send(socket, to, &data);
        }
        let hand = self.hand(socket).map_err(|_| UdpError::Stale)?;
        match hand.send_datagram(&header, buffers, &self.blocked[socket.index() as usize]) {
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
    /// Explicit congestion notification field (RFC 3168).
    pub ecn: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
}
