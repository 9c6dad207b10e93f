//! Datagrams.

use super::addr::ToSocketAddr;
use super::errors;
use super::state::{DroppedHandle, UdpState};
use crate::executor::local::{self, Access, Attempt, WaitRegistration};
use crate::executor::state::WaitTarget;
use crate::executor::waiters::Waiters;
use crate::time;
use core::marker::PhantomData;
use core::net::SocketAddr;
use core::task::{Context, Poll};
use core::time::Duration;
use ginnel_stack::udp::{Datagram, UdpError, UdpOptions};
use std::io;

/// How long a sender waits for a device that is full before it tries again.
const DEVICE_FULL_RETRY: Duration = Duration::from_micros(100);

/// A UDP socket. Any number of tasks may send and receive on it at the same time; dropping it closes it.
#[derive(Debug)]
pub struct UdpSocket {
    socket: u32,
    executor: u32,
    _not_send: PhantomData<*const ()>,
}

impl UdpSocket {
    /// Opens a socket at an address; an unspecified one stands for all of the shard's, port 0 for any free one.
    ///
    /// # Errors
    /// `AddrInUse`, `AddrNotAvailable`, `ENFILE` if there are as many sockets as there may be, and an error outside of a shard's task.
    pub async fn bind(address: impl ToSocketAddr) -> io::Result<Self> {
        Self::bind_with(address, UdpOptions::default()).await
    }

    /// The same with options.
    ///
    /// # Errors
    /// The same.
    pub async fn bind_with(address: impl ToSocketAddr, options: UdpOptions) -> io::Result<Self> {
        let address = address.to_socket_addr()?;
        let executor = local::current_or_error()?;
        let socket = local::access(executor, |a| {
            let socket = a.core.udp_bind(address, options).map_err(errors::udp)?;
            let socket_id = a.state.net.udp.insert(UdpState { socket, waiters: Waiters::NONE });
            a.state.net.udp_numbers.insert(socket, socket_id);
            Ok::<_, io::Error>(socket_id)
        })??;
        Ok(Self { socket, executor, _not_send: PhantomData })
    }

    fn with<R>(
        &self,
        operation: impl FnOnce(&mut Access<'_>, ginnel_stack::handle::UdpHandle) -> R,
    ) -> io::Result<R> {
        local::access(self.executor, |a| {
            let socket = a.state.net.udp[self.socket].socket;
            operation(a, socket)
        })
    }

    /// Fixes the other end: only its datagrams and errors are received from now on.
    ///
    /// # Errors
    /// `NetworkUnreachable` and the like.
    pub async fn connect(&self, address: impl ToSocketAddr) -> io::Result<()> {
        let address = address.to_socket_addr()?;
        self.with(|a, socket| a.core.udp_connect(socket, address).map_err(errors::udp))?
    }

    /// Sends a datagram. Waits if the device is full.
    ///
    /// # Errors
    /// `EMSGSIZE`, `NetworkUnreachable` and the like; the error of an earlier datagram (`ConnectionRefused`) first, as on Linux.
    pub async fn send_to(&self, bytes: &[u8], to: impl ToSocketAddr) -> io::Result<usize> {
        self.send_datagram(bytes, Some(to.to_socket_addr()?)).await
    }

    /// Sends a datagram to the connected end. Waits if the device is full.
    ///
    /// # Errors
    /// `EDESTADDRREQ` if there is none; otherwise as for [`send_to`](Self::send_to).
    pub async fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.send_datagram(bytes, None).await
    }

    async fn send_datagram(&self, bytes: &[u8], to: Option<SocketAddr>) -> io::Result<usize> {
        loop {
            let sent = self.with(|a, socket| {
                let now = a.core.now;
                a.core.stack.udp_send_to(now, socket, to, bytes)
            })?;
            match sent {
                Ok(()) => return Ok(bytes.len()),
                Err(UdpError::NoBuffers) => time::sleep(DEVICE_FULL_RETRY).await,
                Err(error) => return Err(errors::udp(error)),
            }
        }
    }

    /// Answers a datagram from the address it was sent to, be the socket bound to all of the shard's.
    ///
    /// # Errors
    /// As for [`send_to`](Self::send_to), and `ENOBUFS` if the device is full.
    pub fn reply(&self, to: &Datagram, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.with(|a, socket| crate::Context::new(a.core).udp_reply(socket, to, bytes))?;
        sent.map(|()| bytes.len()).map_err(errors::udp)
    }

    /// Waits for a datagram, which is cut off where the buffer ends. Returns its length in the buffer, and who sent it.
    ///
    /// # Errors
    /// `ConnectionRefused` and the like, about something that was sent from here.
    pub async fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let capacity = buffer.len();
        self.recv_datagram(buffer).await.map(|d| (d.len.min(capacity), d.from))
    }

    /// Waits for a datagram of the connected end, or of anybody.
    ///
    /// # Errors
    /// As for [`recv_from`](Self::recv_from).
    pub async fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.recv_from(buffer).await.map(|(len, _)| len)
    }

    /// Waits for a datagram and tells everything about it; its length is the whole one, be the buffer too small.
    ///
    /// # Errors
    /// As for [`recv_from`](Self::recv_from).
    pub fn recv_datagram(&self, buffer: &mut [u8]) -> impl Future<Output = io::Result<Datagram>> {
        Attempt::new(self.executor, WaitTarget::Datagrams(self.socket), move |a| recv(a, self.socket, buffer))
    }

    /// As [`recv_from`](Self::recv_from), as a `poll` function: the last task that called it is woken.
    ///
    /// # Errors
    /// As for [`recv_from`](Self::recv_from).
    pub fn poll_recv_from(
        &self,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<(usize, SocketAddr)>> {
        let capacity = buffer.len();
        let mut waiting = WaitRegistration::poll_function(self.executor, WaitTarget::Datagrams(self.socket));
        waiting.poll(cx, |a| recv(a, self.socket, buffer)).map_ok(|d| (d.len.min(capacity), d.from))
    }

    /// Our address.
    ///
    /// # Errors
    /// Only if the socket belongs to another shard.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.with(|a, socket| a.core.stack.udp_local(socket).map_err(errors::udp))?
    }
}

fn recv(a: &mut Access<'_>, socket: u32, buffer: &mut [u8]) -> Option<io::Result<Datagram>> {
    let socket = a.state.net.udp[socket].socket;
    match a.core.stack.udp_recv_from(socket, buffer) {
        Ok(datagram) => Some(Ok(datagram)),
        Err(UdpError::WouldBlock) => None,
        Err(error) => Some(Err(errors::udp(error))),
    }
}

impl Drop for UdpSocket {
    fn drop(&mut self) {
        local::release(self.executor, |state, core| {
            let Some(socket) = state.net.udp.remove(self.socket) else { return };
            state.net.udp_numbers.remove(&socket.socket);
            state.wait_lists.forget(socket.waiters);
            let dropped = DroppedHandle::Udp(socket.socket);
            match core {
                Some(core) => dropped.close(core),
                None => state.net.dropped.push(dropped),
            }
        });
    }
}
