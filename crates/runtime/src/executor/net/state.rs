//! What an executor knows of its sockets: who waits for them, and how they ended.

use super::errors::Fault;
use crate::context::{Context, Core};
use crate::executor::slab::Slab;
use crate::executor::state::{State, Wait};
use crate::executor::waiters::Waiters;
use core::net::SocketAddr;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use std::collections::HashMap;

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::executor) enum Phase {
    Connecting,
    Open,
    /// The engine has forgotten it.
    Over,
}

/// A connection that a task has. The connection's token is its number plus one.
#[derive(Debug)]
pub(in crate::executor) struct Socket {
    pub(super) conn: Conn,
    pub(in crate::executor) readers: Waiters,
    pub(in crate::executor) writers: Waiters,
    pub(super) phase: Phase,
    /// The peer has sent FIN.
    pub(super) fin: bool,
    /// We have.
    pub(super) shut: bool,
    /// The last write found less room than it wanted.
    pub(super) full: bool,
    /// Told once.
    pub(super) fault: Option<Fault>,
}

/// What is left of a connection that is over while a task still has it.
#[derive(Debug)]
pub(super) struct Remains {
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

pub(in crate::executor) struct Net {
    pub(in crate::executor) sockets: Slab<Socket>,
    pub(super) remains: HashMap<u32, Remains>,
    pub(in crate::executor) listeners: Slab<ListenerState>,
    pub(super) listener_numbers: HashMap<Listener, u32>,
    pub(in crate::executor) udp: Slab<UdpState>,
    pub(super) udp_numbers: HashMap<UdpHandle, u32>,
    /// Room for bytes on their way to a buffer of a kind that the engine does not know.
    #[cfg(feature = "hyper")]
    pub(super) between: Vec<u8>,
    /// Dropped while no task was running: the engine is told when one runs next.
    pub(super) dropped: Vec<Dropped>,
}

/// Something that the engine has and no task any more.
#[derive(Clone, Copy, Debug)]
pub(super) enum Dropped {
    Conn(Conn),
    Listener(Listener),
    Udp(UdpHandle),
}

impl Net {
    pub(in crate::executor) fn new() -> Self {
        Self {
            sockets: Slab::new(),
            remains: HashMap::new(),
            listeners: Slab::new(),
            listener_numbers: HashMap::new(),
            udp: Slab::new(),
            udp_numbers: HashMap::new(),
            #[cfg(feature = "hyper")]
            between: Vec::new(),
            dropped: Vec::new(),
        }
    }

    /// Enters a connection and returns its number.
    pub(super) fn add(&mut self, core: &mut Core, conn: Conn, phase: Phase) -> u32 {
        let socket = self.sockets.insert(Socket {
            conn,
            readers: Waiters::NONE,
            writers: Waiters::NONE,
            phase,
            fin: false,
            shut: false,
            full: false,
            fault: None,
        });
        // False only for a handle that is stale, and this one is new.
        let known = core.stack.set_token(conn, socket + 1);
        debug_assert!(known);
        socket
    }

    /// Tells the engine what was dropped meanwhile.
    pub(in crate::executor) fn tell_dropped(&mut self, core: &mut Core) {
        for dropped in self.dropped.drain(..) {
            dropped.tell(core);
        }
    }

    pub(in crate::executor) fn has_dropped(&self) -> bool {
        !self.dropped.is_empty()
    }

    /// The socket of a connection, if a task has it.
    fn of(&mut self, cx: &Context<'_>, conn: Conn) -> Option<u32> {
        let socket = cx.token(conn).ok()?.checked_sub(1)?;
        debug_assert_eq!(self.sockets.get_mut(socket).map(|s| s.conn), Some(conn));
        Some(socket)
    }
}

impl Dropped {
    /// Errors would say that it is gone already.
    pub(super) fn tell(self, core: &mut Core) {
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
impl State {
    pub(in crate::executor) fn incoming(&mut self, listener: Listener) {
        if let Some(listener) = self.net.listener_numbers.get(&listener) {
            self.wake(Wait::Accept(*listener));
        }
    }

    pub(in crate::executor) fn connected(&mut self, cx: &Context<'_>, conn: Conn) {
        if let Some(socket) = self.net.of(cx, conn) {
            self.net.sockets[socket].phase = Phase::Open;
            self.wake(Wait::Write(socket));
        }
    }

    pub(in crate::executor) fn readable(&mut self, cx: &Context<'_>, conn: Conn) {
        if let Some(socket) = self.net.of(cx, conn) {
            self.wake(Wait::Read(socket));
        }
    }

    pub(in crate::executor) fn writable(&mut self, cx: &Context<'_>, conn: Conn) {
        if let Some(socket) = self.net.of(cx, conn) {
            self.net.sockets[socket].full = false;
            self.wake(Wait::Write(socket));
        }
    }

    pub(in crate::executor) fn peer_closed(&mut self, cx: &Context<'_>, conn: Conn) {
        if let Some(socket) = self.net.of(cx, conn) {
            self.net.sockets[socket].fin = true;
            self.wake(Wait::Read(socket));
        }
    }

    pub(in crate::executor) fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let Some(socket) = self.net.of(cx, conn) else { return };
        let mut unread = Vec::new();
        let waiting = cx.unread(conn);
        if waiting > 0 {
            unread.resize(waiting, 0);
            let mut filled = 0;
            while let Ok(n @ 1..) = cx.recv(conn, &mut unread[filled..]) {
                filled += n;
            }
            unread.truncate(filled);
        }
        let s = &mut self.net.sockets[socket];
        s.phase = Phase::Over;
        s.fault = Fault::of(reason, s.fin && !s.shut);
        if let Ok([local, _]) = cx.ends(conn) {
            self.net.remains.insert(socket, Remains { local, unread, read: 0 });
        }
        self.wake(Wait::Read(socket));
        self.wake(Wait::Write(socket));
    }

    pub(in crate::executor) fn datagrams(&mut self, socket: UdpHandle) {
        if let Some(socket) = self.net.udp_numbers.get(&socket) {
            self.wake(Wait::Datagrams(*socket));
        }
    }
}
