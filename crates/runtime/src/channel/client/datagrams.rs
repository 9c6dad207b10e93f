//! Urgent data and UDP sockets of a client: each costs a question and an answer.

use super::super::control::{Reply, Request, UdpRequest};
use super::{Client, mismatch};
use crate::error::Error;
use core::net::SocketAddr;
use ginnel_stack::error::{RecvError, SendError};
use ginnel_stack::handle::{Conn, UdpHandle};
use ginnel_stack::udp::{Datagram, UdpError, UdpOptions};

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
}
