//! UDP sockets.

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

/// Pause of a sender before it tries again to send to a full device.
const DEVICE_FULL_RETRY: Duration = Duration::from_micros(100);

/// A UDP socket. Any number of tasks may send and receive on it at the same time. Dropping it closes it.
#[derive(Debug)]
pub struct UdpSocket {
    socket: u32,
    executor: u32,
    _not_send: PhantomData<*const ()>,
}

impl UdpSocket {
    /// Binds a socket. The unspecified address stands for all addresses of the shard, port 0 for any free
    /// port.
    ///
    /// # Errors
    /// `AddrInUse`, `AddrNotAvailable`, `ENFILE` at the limit of sockets, and an error outside of a shard's
    /// task.
    pub async fn bind(address: impl ToSocketAddr) -> io::Result<Self> {
        Self::bind_with(address, UdpOptions::default()).await
    }

    /// As [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
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

    /// Sets the peer: from now on, only its datagrams and errors are received.
    ///
    /// # Errors
    /// Returns an error such as `NetworkUnreachable`.
    pub async fn connect(&self, address: impl ToSocketAddr) -> io::Result<()> {
        let address = address.to_socket_addr()?;
        self.with(|a, socket| a.core.udp_connect(socket, address).map_err(errors::udp))?
    }

    /// Sends a datagram. Waits while the device is full.
    ///
    /// # Errors
    /// Returns an error such as `EMSGSIZE` or `NetworkUnreachable`. A pending error of an earlier datagram
    /// (`ConnectionRefused`) is returned first, as on Linux.
    pub async fn send_to(&self, bytes: &[u8], to: impl ToSocketAddr) -> io::Result<usize> {
        self.send_datagram(bytes, Some(to.to_socket_addr()?)).await
    }

    /// Sends a datagram to the connected peer. Waits while the device is full.
    ///
    /// # Errors
    /// `EDESTADDRREQ` if the socket is not connected; otherwise as for [`send_to`](Self::send_to).
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
                Err(UdpError::DeviceFull) => time::sleep(DEVICE_FULL_RETRY).await,
                Err(error) => return Err(errors::udp(error)),
            }
        }
    }

    /// Answers a datagram from the address that it was sent to, even if the socket is bound to the
    /// unspecified address.
    ///
    /// # Errors
    /// As for [`send_to`](Self::send_to), and `ENOBUFS` if the device is full.
    pub fn reply(&self, to: &Datagram, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.with(|a, socket| crate::Context::new(a.core).udp_reply(socket, to, bytes))?;
        sent.map(|()| bytes.len()).map_err(errors::udp)
    }

    /// Waits for a datagram, which is truncated to the buffer. Returns its length in the buffer and its
    /// sender.
    ///
    /// # Errors
    /// Returns an error such as `ConnectionRefused` about an earlier datagram of this socket.
    pub async fn recv_from(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let capacity = buffer.len();
        self.recv_datagram(buffer).await.map(|d| (d.len.min(capacity), d.from))
    }

    /// Waits for a datagram, from the connected peer or from any sender. Returns its length in the buffer.
    ///
    /// # Errors
    /// As for [`recv_from`](Self::recv_from).
    pub async fn recv(&self, buffer: &mut [u8]) -> io::Result<usize> {
        self.recv_from(buffer).await.map(|(len, _)| len)
    }

    /// Waits for a datagram and returns everything that is known of it. Its length is the full length, even
    /// if the buffer is shorter.
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

    /// Returns the local address.
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
