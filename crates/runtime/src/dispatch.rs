//! From the engine's events to the handler's methods.

use crate::context::{Context, Core};
use crate::handler::Handler;
use ginnel_stack::device::RxBurst;
use ginnel_stack::error::RecvError;
use ginnel_stack::events::Event;
use ginnel_stack::handle::Conn;
use std::collections::HashSet;

/// Bytes of a receive buffer shown to a handler at a time.
const SHOWN_BYTES_MAX: usize = 16 * 1024;

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

    /// Delivers all events that wait, and returns how many. `burst` is the one they stem from, if any.
    pub(crate) fn events<H: Handler>(
        &mut self,
        core: &mut Core,
        handler: &mut H,
        burst: Option<&RxBurst<'_>>,
    ) -> usize {
        let mut count = 0;
        while let Some(event) = core.engine.next_event() {
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
            Event::Incoming { listener } => {
                while let Some(conn) = core.engine.accept(listener) {
                    handler.accepted(&mut Context::new(core), conn, listener);
                }
            }
            Event::Connected { conn } => handler.connected(&mut Context::new(core), conn),
            Event::Data { conn, data } => {
                let Some(burst) = burst else { return };
                if core.engine.peek(conn, &mut self.shown[..1]).is_ok_and(|n| n > 0) {
                    // Bytes that were left over come first.
                    core.engine.consume(conn, data, 0, burst);
                    self.show(core, handler, conn);
                    return;
                }
                let bytes = core.engine.inline_data(burst, &data);
                let consumed = handler.data(&mut Context::new(core), conn, bytes).min(bytes.len());
                core.engine.consume(conn, data, consumed, burst);
            }
            Event::Readable { conn } => self.show(core, handler, conn),
            Event::Writable { conn } => handler.writable(&mut Context::new(core), conn),
            Event::Acked { conn, bytes } => handler.acked(&mut Context::new(core), conn, bytes),
            Event::PeerClosed { conn } => {
                let unread = core.engine.peek(conn, &mut self.shown[..1]);
                if unread.is_ok_and(|n| n > 0) {
                    self.fin_waits.insert(conn);
                } else {
                    handler.peer_closed(&mut Context::new(core), conn);
                }
            }
            Event::Closed { conn, token, reason } => {
                self.fin_waits.remove(&conn);
                core.closing = Some((conn, token));
                handler.closed(&mut Context::new(core), conn, reason);
                core.closing = None;
            }
            Event::UdpReadable { .. } | Event::Urgent { .. } => {}
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
            let shown = match core.engine.peek(conn, &mut self.shown[..]) {
                Ok(0) => {
                    if self.fin_waits.remove(&conn) {
                        handler.peer_closed(&mut Context::new(core), conn);
                    }
                    return;
                }
                Ok(n) => &self.shown[..n],
                Err(RecvError::WouldBlock | RecvError::Stale) => return,
            };
            let consumed = handler.data(&mut Context::new(core), conn, shown).min(shown.len());
            if core.engine.skip(conn, consumed).is_err() || consumed < shown.len() {
                return;
            }
        }
    }
}
