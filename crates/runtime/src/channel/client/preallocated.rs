//! Opening connections with preallocated sockets (docs/adr/0018-connecting-without-a-request.md).

use super::Client;
use crate::channel::client_memory::PREALLOCATED_MAX;
use crate::channel::doorbells::NOTIFIED;
use crate::channel::offer_slots;
use crate::channel::socket::{PreallocatedSocket, connect_error_from_word, request};
use crate::channel::sync::Ordering;
use crate::error::Error;
use core::net::{Ipv6Addr, SocketAddr};
use ginnel_stack::error::ConnectError;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::ConnectOptions;

impl Client {
    /// Opens a connection as [`Client::connect`] does, but without a request if there is a preallocated
    /// socket. Whether the connection could be opened is then reported by
    /// [`ClientEvent::Closed`](super::ClientEvent::Closed) and [`Client::connect_error`]. Until the stack has
    /// opened it, the local port of its [endpoints](Client::endpoints) is 0. Options can be set at once.
    ///
    /// # Errors
    /// As [`Client::connect`], if there was no preallocated socket.
    pub fn connect_without_request(&mut self, remote: SocketAddr) -> Result<Conn, Error> {
        match self.connect_preallocated(remote) {
            Some(conn) => Ok(conn),
            None => self.connect(remote, ConnectOptions::default()),
        }
    }

    fn connect_preallocated(&mut self, remote: SocketAddr) -> Option<Conn> {
        if matches!(remote, SocketAddr::V6(v6) if v6.scope_id() != 0) || self.is_stack_gone() {
            // The socket's area has no room for a scope ID.
            return None;
        }
        let slots = self.memory.preallocated();
        let (after, before) = (self.next_preallocated..PREALLOCATED_MAX, 0..self.next_preallocated);
        let slot = after.chain(before).find(|at| offer_slots::has_preallocated(&slots[*at]))?;
        self.next_preallocated = (slot + 1) % PREALLOCATED_MAX;
        let PreallocatedSocket { socket, generation } = offer_slots::take_preallocated(&slots[slot])?;
        // Another process of the domain may have written any number there.
        if socket as usize >= self.sockets_max() {
            return None;
        }
        let area = self.region.socket(socket);
        area.set_endpoints([SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0), remote]);
        area.requests.store(request::CONNECT, Ordering::Release);
        self.track(socket, generation);
        self.notify(socket, NOTIFIED);
        Some(Conn::new(socket, generation))
    }

    /// Returns why a connection could not be opened; `None` if it closed for another reason.
    pub fn connect_error(&self, conn: Conn) -> Option<ConnectError> {
        self.tracked(conn).ok()?;
        connect_error_from_word(self.region.socket(conn.index()).error.load(Ordering::Acquire))
    }
}
