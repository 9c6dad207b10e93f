//! The sockets of an executor: their waiters, and how their connections ended.

use super::errors::SocketError;
use crate::context::{Context, ShardCore};
use crate::executor::slab::Slab;
use crate::executor::state::{ExecutorState, WaitTarget};
use crate::executor::waiters::Waiters;
use core::net::SocketAddr;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use rustc_hash::FxHashMap;

/// Phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::executor) enum ConnPhase {
    Connecting,
    Open,
    /// The connection is over, and the engine has no state of it any more.
    Closed,
}

/// A connection that a task owns. Its token in the engine is its index plus one.
#[derive(Debug)]
pub(in crate::executor) struct TaskSocket {
    pub(super) conn: Conn,
    pub(in crate::executor) readers: Waiters,
    pub(in crate::executor) writers: Waiters,
    pub(super) phase: ConnPhase,
    /// True if the peer has sent FIN.
    pub(super) peer_fin: bool,
    /// True if the stream was shut down for writing.
    pub(super) write_shutdown: bool,
    /// True if the last write did not fit into the send buffer.
    pub(super) send_buffer_full: bool,
    /// Pending error (`SO_ERROR`), reported once.
    pub(super) error: Option<SocketError>,
}

/// The rest of a connection that is over, as long as a task owns the stream.
#[derive(Debug)]
pub(super) struct ClosedStream {
    pub(super) local: SocketAddr,
    /// Data that was received and not read. Data that arrived before a reset can be read after it.
    pub(super) unread: Vec<u8>,
    pub(super) read: usize,
}

#[derive(Debug)]
pub(in crate::executor) struct ListenerState {
    pub(super) listener: Listener,
    pub(super) local: SocketAddr,
    pub(in crate::executor) waiters: Waiters,
    /// An administrator has closed it.
    pub(in crate::executor) is_destroyed: bool,
}

#[derive(Debug)]
pub(in crate::executor) struct UdpState {
    pub(super) socket: UdpHandle,
    pub(in crate::executor) waiters: Waiters,
}

/// Keeps the sockets of an executor. The engine assigns the keys of the maps, so their hash need not
/// withstand chosen keys.
pub(in crate::executor) struct NetState {
    pub(in crate::executor) sockets: Slab<TaskSocket>,
    pub(super) closed_streams: FxHashMap<u32, ClosedStream>,
    pub(in crate::executor) listeners: Slab<ListenerState>,
    pub(super) listener_numbers: FxHashMap<Listener, u32>,
    pub(in crate::executor) udp: Slab<UdpState>,
    pub(super) udp_numbers: FxHashMap<UdpHandle, u32>,
    /// Buffer for data that is passed to a buffer type that the engine cannot write to.
    #[cfg(feature = "hyper")]
    pub(super) bounce_buffer: Vec<u8>,
    /// Sockets that were dropped while no task was running; they are closed when the next task runs.
    pub(super) dropped: Vec<DroppedHandle>,
}

/// A socket that its task has dropped and the engine has not closed yet.
#[derive(Clone, Copy, Debug)]
pub(super) enum DroppedHandle {
    Conn(Conn),
    Listener(Listener),
    Udp(UdpHandle),
}

impl NetState {
    pub(in crate::executor) fn new() -> Self {
        Self {
            sockets: Slab::new(),
            closed_streams: FxHashMap::default(),
            listeners: Slab::new(),
            listener_numbers: FxHashMap::default(),
            udp: Slab::new(),
            udp_numbers: FxHashMap::default(),
            #[cfg(feature = "hyper")]
            bounce_buffer: Vec::new(),
            dropped: Vec::new(),
        }
    }

    /// Adds a connection and returns its index.
    pub(super) fn add(&mut self, core: &mut ShardCore, conn: Conn, phase: ConnPhase) -> u32 {
        let socket = self.sockets.insert(TaskSocket {
            conn,
            readers: Waiters::NONE,
            writers: Waiters::NONE,
            phase,
            peer_fin: false,
            write_shutdown: false,
            send_buffer_full: false,
            error: None,
        });
        // Fails only for a stale handle, and this one is new.
        let is_known = core.stack.set_token(conn, socket + 1);
        debug_assert!(is_known);
        socket
    }

    /// Closes the sockets that were dropped meanwhile.
    pub(in crate::executor) fn close_dropped(&mut self, core: &mut ShardCore) {
        for dropped in self.dropped.drain(..) {
            dropped.close(core);
        }
    }

    pub(in crate::executor) fn has_dropped(&self) -> bool {
        !self.dropped.is_empty()
    }

    /// Returns the index of a connection, if a task owns it.
    fn find_socket(&mut self, cx: &Context<'_>, conn: Conn) -> Option<u32> {
        let socket = cx.token(conn).ok()?.checked_sub(1)?;
        debug_assert_eq!(self.sockets.get_mut(socket).map(|s| s.conn), Some(conn));
        Some(socket)
    }
}

impl DroppedHandle {
    /// Fails only if the engine has closed the socket already.
    pub(super) fn close(self, core: &mut ShardCore) {
        match self {
            Self::Conn(conn) => {
                core.stack.set_token(conn, 0);
                let _ = core.stack.close(conn);
            }
            Self::Listener(listener) => {
                core.unlisten(listener);
            }
            Self::Udp(socket) => {
                let _ = core.udp_close(socket);
            }
        }
    }
}

/// Events of the shard.
impl ExecutorState {
    pub(in crate::executor) fn incoming(&mut self, listener: Listener) {
        if let Some(listener) = self.net.listener_numbers.get(&listener) {
            self.wake(WaitTarget::Accept(*listener));
        }
    }

    pub(in crate::executor) fn listener_destroyed(&mut self, listener: Listener) {
        if let Some(&listener) = self.net.listener_numbers.get(&listener) {
            self.net.listeners[listener].is_destroyed = true;
            let waiters = core::mem::replace(&mut self.net.listeners[listener].waiters, Waiters::NONE);
            self.wake_all(waiters);
        }
    }

    pub(in crate::executor) fn connected(&mut self, cx: &Context<'_>, conn: Conn) {
        if let Some(socket) = self.net.find_socket(cx, conn) {
            self.net.sockets[socket].phase = ConnPhase::Open;
            self.wake(WaitTarget::Write(socket));
        }
    }

    pub(in crate::executor) fn readable(&mut self, cx: &Context<'_>, conn: Conn) {
        if let Some(socket) = self.net.find_socket(cx, conn) {
            self.wake(WaitTarget::Read(socket));
        }
    }

    pub(in crate::executor) fn writable(&mut self, cx: &Context<'_>, conn: Conn) {
        if let Some(socket) = self.net.find_socket(cx, conn) {
            self.net.sockets[socket].send_buffer_full = false;
            self.wake(WaitTarget::Write(socket));
        }
    }

    pub(in crate::executor) fn peer_closed(&mut self, cx: &Context<'_>, conn: Conn) {
        if let Some(socket) = self.net.find_socket(cx, conn) {
            self.net.sockets[socket].peer_fin = true;
            self.wake(WaitTarget::Read(socket));
        }
    }

    pub(in crate::executor) fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let Some(socket) = self.net.find_socket(cx, conn) else { return };
        let mut unread = Vec::new();
        let unread_bytes = cx.unread(conn);
        if unread_bytes > 0 {
            unread.resize(unread_bytes, 0);
            let mut filled = 0;
            while let Ok(n @ 1..) = cx.recv(conn, &mut unread[filled..]) {
                filled += n;
            }
            unread.truncate(filled);
        }
        let s = &mut self.net.sockets[socket];
        s.phase = ConnPhase::Closed;
        s.error = SocketError::from_close_reason(reason, s.peer_fin && !s.write_shutdown);
        if let Ok([local, _]) = cx.endpoints(conn) {
            self.net.closed_streams.insert(socket, ClosedStream { local, unread, read: 0 });
        }
        self.wake(WaitTarget::Read(socket));
        self.wake(WaitTarget::Write(socket));
    }

    pub(in crate::executor) fn datagrams(&mut self, socket: UdpHandle) {
        if let Some(socket) = self.net.udp_numbers.get(&socket) {
            self.wake(WaitTarget::Datagrams(*socket));
        }
    }
}
