//! Delivery between two sockets of one process. What a call does to a socket of the same host has arrived on
//! Linux when the call returns, if it took the loopback; here the shard is another thread. So before a call
//! reports that nothing has arrived, the shards deliver what this process has sent to itself.
//!
//! Only connections whose both ends are in this process count, and datagrams to its own sockets: a server
//! does not wait for the shards when it finds nothing to read.

use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::process::ProcessState;
use core::net::SocketAddr;
use ginnel::Conn;
use std::collections::HashMap;

/// Knows which sockets of this process have a peer in this process.
#[derive(Default)]
pub(crate) struct LocalDelivery {
    /// The connections that this process has opened to its own listeners, from the opening end's point of
    /// view, and how many of their ends it has.
    connections: HashMap<[SocketAddr; 2], u8>,
    /// A datagram was sent to a socket of this process.
    has_datagrams: bool,
}

impl LocalDelivery {
    /// Returns whether something may be on its way from this process to itself.
    #[inline]
    fn is_in_use(&self) -> bool {
        self.has_datagrams || !self.connections.is_empty()
    }
}

impl ProcessState {
    /// Notes a connection that a socket opens to a listener of this process.
    pub(crate) fn note_own_connection(&mut self, file: FileId, to: SocketAddr) {
        let Some(stream) = self.files.stream(file) else { return };
        let conn = stream.conn;
        let is_local = to.ip().to_canonical().is_loopback()
            || self.client.endpoints(conn).is_ok_and(|[own, _]| own.ip() == to.ip());
        if !is_local || !self.listens_at(to) {
            return;
        }
        if let Some(ends) = self.endpoints(conn) {
            self.local_delivery.connections.insert(ends, 1);
        }
    }

    /// Notes a connection that was accepted, if this process has opened it.
    pub(crate) fn note_accepted(&mut self, ends: [SocketAddr; 2]) {
        let [own, peer] = ends;
        if let Some(count) = self.local_delivery.connections.get_mut(&[peer, own]) {
            *count = 2;
        }
    }

    /// Releases a stream.
    #[inline]
    pub(crate) fn release_stream(&mut self, conn: Conn) {
        if self.has_own_connections() {
            return self.release_own_stream(conn);
        }
        // If the stack is gone, so is the connection.
        let _ = self.client.release(conn);
        self.client.flush();
    }

    /// Releases a stream. If the other end is in this process, accepted or not, it learns of the end at once.
    #[cold]
    fn release_own_stream(&mut self, conn: Conn) {
        let ends = self.client.endpoints(conn);
        let _ = self.client.release(conn);
        self.client.flush();
        if let Ok([own, peer]) = ends
            && [[own, peer], [peer, own]].into_iter().any(|key| self.forget_end(key))
        {
            self.client.settle();
        }
    }

    /// Notes that one end of a connection is released. Returns whether this process opened the connection.
    fn forget_end(&mut self, key: [SocketAddr; 2]) -> bool {
        let connections = &mut self.local_delivery.connections;
        let Some(count) = connections.get_mut(&key) else { return false };
        *count -= 1;
        if *count == 0 {
            connections.remove(&key);
        }
        true
    }

    /// Has a socket of this process answer what was sent to it after it was closed: the next call finds the
    /// reset.
    #[cold]
    pub(crate) fn await_reset(&mut self, file: FileId) {
        if self.socket_state(file).is_some_and(|(_, state)| state.has_fin() && !state.is_closed()) {
            self.deliver_locally();
        }
    }

    /// Returns whether any connection has both ends in this process.
    #[inline]
    pub(crate) fn has_own_connections(&self) -> bool {
        !self.local_delivery.connections.is_empty()
    }

    /// Notes a datagram to an address, if a socket of this process has its port.
    pub(crate) fn note_own_datagram(&mut self, to: SocketAddr) {
        if self.local_delivery.has_datagrams {
            return;
        }
        self.local_delivery.has_datagrams = self.files.ids().into_iter().any(|file| {
            let Ok(socket) = self.files.socket(file) else { return false };
            let SocketRole::Udp(udp) = socket.role else { return false };
            self.client.endpoints(udp.conn).is_ok_and(|[own, _]| own.port() == to.port())
        });
    }

    /// Returns whether a listener of this process has an address.
    fn listens_at(&mut self, to: SocketAddr) -> bool {
        let listeners: Vec<_> = self.listener_files().collect();
        listeners.into_iter().any(|file| {
            let Ok(socket) = self.files.socket(file) else { return false };
            let SocketRole::Listening(listening) = socket.role else { return false };
            let at = listening.bound.address();
            at.port() == to.port()
                && (at.ip().is_unspecified() || at.ip().to_canonical() == to.ip().to_canonical())
        })
    }

    /// Has the shards deliver what this process has sent to itself. Returns whether there may have been
    /// something, so that another attempt is worthwhile.
    #[inline]
    pub(crate) fn deliver_locally(&mut self) -> bool {
        self.local_delivery.is_in_use() && self.settle_if_sent()
    }

    #[cold]
    fn settle_if_sent(&mut self) -> bool {
        let has_sent = self.client.has_sent();
        if has_sent {
            self.client.settle();
            self.process_events();
        }
        has_sent
    }
}
