//! From the engine's events to the handler's methods.

use crate::context::{Context, Core};
use crate::handler::{Handler, UrgentData};
use ginnel_stack::device::RxBurst;
use ginnel_stack::error::RecvError;
use ginnel_stack::events::Event;
use ginnel_stack::handle::{Conn, UdpHandle};
use ginnel_stack::udp::UdpError;
use std::collections::HashSet;

/// Bytes of a receive buffer shown to a handler at a time; also the longest datagram.
const SHOWN_BYTES_MAX: usize = 1 << 16;

/// Events delivered at a time that came only from what the handler did meanwhile: one that opens and aborts a connection in each `closed`
/// would otherwise never let its shard go on.
const FOLLOWING_MAX: usize = 4096;

/// What delivering events needs besides the engine.
pub(crate) struct Dispatch {
    /// Where buffered bytes are shown.
    shown: Box<[u8; SHOWN_BYTES_MAX]>,
    /// Connections whose peer sent FIN behind bytes that the handler has not consumed yet.
    fin_waits: HashSet<Conn>,
}

impl Dispatch {
    pub(crate) fn new() -> Self {
        Self { shown: Box::new([0; SHOWN_BYTES_MAX]), fin_waits: HashSet::new() }
    }

    /// Delivers all events that wait, and up to `FOLLOWING_MAX` that come while it does, and returns how many. `burst` is the one they
    /// stem from, if any.
    pub(crate) fn events<H: Handler>(
        &mut self,
        core: &mut Core,
        handler: &mut H,
        burst: Option<&RxBurst<'_>>,
    ) -> usize {
        let mut count = 0;
        let most = core.stack.events_waiting() + FOLLOWING_MAX;
        while count < most
            && let Some(event) = core.stack.next_event()
        {
            count += 1;
            self.event(core, handler, event, burst);
        }
        core.stats.events += count as u64;
        count
    }

    fn event<H: Handler>(
        &mut self,
        core: &mut Core,
        handler: &mut H,
        event: Event,
        burst: Option<&RxBurst<'_>>,
    ) {
        match event {
            Event::Incoming { listener } if handler.pulls() => {
                handler.incoming(&mut Context::new(core), listener);
            }
            Event::Incoming { listener } => {
                while handler.may_accept(listener)
                    && let Some(conn) = core.stack.accept(listener)
                {
                    handler.accepted(&mut Context::new(core), conn, listener);
                }
            }
            Event::Connected { conn } => handler.connected(&mut Context::new(core), conn),
            Event::Data { conn, data } => {
                // Only an engine in this thread has bursts.
                let (Some(burst), Some(stack)) = (burst, core.stack.here_mut()) else { return };
                let pulls = handler.pulls();
                if pulls || stack.buffered(conn) > 0 {
                    // They move to the receive buffer, which is an event of its own if nothing lies there.
                    stack.consume(conn, data, 0, burst);
                    if !pulls {
                        // What was left over comes first.
                        self.show(core, handler, conn);
                    }
                    return;
                }
                let bytes = stack.inline_data(burst, &data);
                let consumed = handler.data(&mut Context::new(core), conn, bytes).min(bytes.len());
                if let Some(stack) = core.stack.here_mut() {
                    stack.consume(conn, data, consumed, burst);
                }
            }
            Event::Readable { conn } if handler.pulls() => handler.readable(&mut Context::new(core), conn),
            Event::Readable { conn } => self.show(core, handler, conn),
            Event::Writable { conn } => handler.writable(&mut Context::new(core), conn),
            Event::Acked { conn, bytes } => handler.acked(&mut Context::new(core), conn, bytes),
            Event::Urgent { conn, at, byte } => {
                let urgent = UrgentData { ahead: core.stack.urgent_ahead(conn, at), byte };
                handler.urgent(&mut Context::new(core), conn, urgent);
            }
            Event::PeerClosed { conn } => {
                if core.stack.buffered(conn) > 0 && !handler.pulls() {
                    self.fin_waits.insert(conn);
                } else {
                    handler.peer_closed(&mut Context::new(core), conn);
                }
            }
            Event::Closed { conn, token, reason } => {
                self.take_fin(conn);
                core.closing = Some((conn, token));
                handler.closed(&mut Context::new(core), conn, reason);
                core.closing = None;
            }
            Event::UdpReadable { socket } if handler.pulls() => {
                handler.datagrams(&mut Context::new(core), socket);
            }
            Event::UdpReadable { socket } => self.datagrams(core, handler, socket),
        }
    }

    /// Shows the handler what asked to be shown again. What asks during that waits for the next turn, so that this ends.
    pub(crate) fn resumed<H: Handler>(&mut self, core: &mut Core, handler: &mut H) -> usize {
        let count = core.resume.len();
        for i in 0..count {
            let conn = core.resume[i];
            self.show(core, handler, conn);
        }
        core.resume.drain(..count);
        count
    }

    /// Shows the handler what is buffered until it consumes less than it was shown, and then the FIN if one waits behind.
    fn show<H: Handler>(&mut self, core: &mut Core, handler: &mut H, conn: Conn) {
        loop {
            // The handler may change the engine while it reads, so it reads a copy.
            let len = match core.stack.peek(conn, &mut self.shown[..]) {
                Ok(0) | Err(RecvError::WouldBlock) => {
                    if core.stack.buffered(conn) > 0 {
                        // An urgent byte, which is no part of what handlers are shown.
                        let _ = core.stack.skip(conn, 0);
                    }
                    break;
                }
                Ok(len) => len,
                Err(RecvError::Stale) => return,
            };
            core.shown = Some((conn, len));
            let consumed = handler.data(&mut Context::new(core), conn, &self.shown[..len]).min(len);
            if core.shown.take().is_none() {
                // It was closed: they count as read, and nothing more is shown.
                return;
            }
            if core.stack.skip(conn, consumed).is_err() || consumed < len {
                return;
            }
        }
        if self.take_fin(conn) {
            handler.peer_closed(&mut Context::new(core), conn);
        }
    }

    /// Whether a FIN waited behind unread bytes. Nearly always none does on any connection, and then nothing is looked up.
    fn take_fin(&mut self, conn: Conn) -> bool {
        !self.fin_waits.is_empty() && self.fin_waits.remove(&conn)
    }

    /// Shows the handler all datagrams and errors of a socket. The socket's queue bounds how many there are.
    fn datagrams<H: Handler>(&mut self, core: &mut Core, handler: &mut H, socket: UdpHandle) {
        loop {
            match core.stack.udp_recv_from(socket, &mut self.shown[..]) {
                Ok(datagram) => {
                    let data = &self.shown[..datagram.len.min(SHOWN_BYTES_MAX)];
                    handler.datagram(&mut Context::new(core), socket, &datagram, data);
                }
                Err(UdpError::WouldBlock | UdpError::Stale) => return,
                Err(error) => handler.datagram_error(&mut Context::new(core), socket, error),
            }
        }
    }
}
