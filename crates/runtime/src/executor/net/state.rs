//! What an executor knows of its sockets: who waits for them, and how they ended.

use super::errors::SocketError;
use crate::context::{Context, ShardCore};
use crate::executor::slab::Slab;
use crate::executor::state::{ExecutorState, WaitTarget};
use crate::executor::waiters::Waiters;
use core::net::SocketAddr;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use std::collections::HashMap;

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::executor) enum ConnPhase {
    Connecting,
    Open,
    /// The engine has forgotten it.
    Closed,
}

/// A connection that a task has. The connection's token is its number plus one.
#[derive(Debug)]
pub(in crate::executor) struct TaskSocket {
    pub(super) conn: Conn,
    pub(in crate::executor) readers: Waiters,
    pub(in crate::executor) writers: Waiters,
    pub(super) phase: ConnPhase,
    /// The peer has sent FIN.
    pub(super) peer_fin: bool,
    /// We have.
    pub(super) write_shutdown: bool,
    /// The last write found less room than it wanted.
    pub(super) send_buffer_full: bool,
    /// Told once.
    pub(super) error: Option<SocketError>,
}

/// What is left of a connection that is over while a task still has it.
#[derive(Debug)]
pub(super) struct ClosedStream {
    pub(super) local: SocketAddr,
    /// What was received and not read. A reset takes nothing away that arrived before it.
    pub(super) unread: Vec<u8>,
    pub(super) read: usize,
}

#[derive(Debug)]
pub(in crate::executor) struct ListenerState {
    pub(super) listener: Listener,
    pub(super) local: SocketAddr,
    pub(in crate::executor) waiters: Waiters,
}

#[derive(Debug)]
pub(in crate::executor) struct UdpState {
    pub(super) socket: UdpHandle,
    pub(in crate::executor) waiters: Waiters,
}

pub(in crate::executor) struct NetState {
    pub(in crate::executor) sockets: Slab<TaskSocket>,
    pub(super) closed_streams: HashMap<u32, ClosedStream>,
    pub(in crate::executor) listeners: Slab<ListenerState>,
    pub(super) listener_numbers: HashMap<Listener, u32>,
    pub(in crate::executor) udp: Slab<UdpState>,
    pub(super) udp_numbers: HashMap<UdpHandle, u32>,
    /// Room for bytes on their way to a buffer of a kind that the engine does not know.
    #[cfg(feature = "hyper")]
    pub(super) bounce_buffer: Vec<u8>,
    /// Dropped while no task was running: the engine is told when one runs next.
    pub(super) dropped: Vec<DroppedHandle>,
}

/// Something that the engine has and no task any more.
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
            closed_streams: HashMap::new(),
            listeners: Slab::new(),
            listener_numbers: HashMap::new(),
            udp: Slab::new(),
            udp_numbers: HashMap::new(),
            #[cfg(feature = "hyper")]
            bounce_buffer: Vec::new(),
            dropped: Vec::new(),
        }
    }

    /// Enters a connection and returns its number.
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
        // False only for a handle that is stale, and this one is new.
        let is_known = core.stack.set_token(conn, socket + 1);
        debug_assert!(is_known);
        socket
    }

    /// Tells the engine what was dropped meanwhile.
    pub(in crate::executor) fn close_dropped(&mut self, core: &mut ShardCore) {
        for dropped in self.dropped.drain(..) {
            dropped.close(core);
        }
    }

    pub(in crate::executor) fn has_dropped(&self) -> bool {
        !self.dropped.is_empty()
    }

    /// The socket of a connection, if a task has it.
    fn find_socket(&mut self, cx: &Context<'_>, conn: Conn) -> Option<u32> {
        let socket = cx.token(conn).ok()?.checked_sub(1)?;
        debug_assert_eq!(self.sockets.get_mut(socket).map(|s| s.conn), Some(conn));
        Some(socket)
    }
}

impl DroppedHandle {
    /// Errors would say that it is gone already.
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

/// What the shard tells.
impl ExecutorState {
    pub(in crate::executor) fn incoming(&mut self, listener: Listener) {
        if let Some(listener) = self.net.listener_numbers.get(&listener) {
            self.wake(WaitTarget::Accept(*listener));
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
