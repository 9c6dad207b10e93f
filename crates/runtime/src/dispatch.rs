//! Delivers the engine's events to the handler's methods.

use crate::context::{Context, ShardCore};
use crate::handler::{Handler, UrgentData};
use crate::prioritized_rx::DeviceCheck;
use ginnel_stack::device::RxBurst;
use ginnel_stack::error::RecvError;
use ginnel_stack::events::Event;
use ginnel_stack::handle::{Conn, UdpHandle};
use ginnel_stack::priority;
use ginnel_stack::udp::UdpError;
use rustc_hash::FxHashSet;

/// Bytes of a receive buffer that are delivered at a time to handlers that take any bytes; the least that
/// others can ask for.
const SMALL_READ_BYTES: usize = 2048;

/// Bytes of a receive buffer that are delivered at a time, at most; also the length of the longest datagram.
pub(crate) const READ_BUFFER_BYTES: usize = 1 << 16;

/// Events delivered at a time that were caused only by what the handler did meanwhile. Without a limit, a
/// handler that opens and aborts a connection in each `closed` would never let its shard continue.
const FOLLOW_UP_EVENTS_MAX: usize = 4096;

/// State for delivering events, besides the engine.
pub(crate) struct EventDispatcher {
    /// Copy of the buffered bytes that are being delivered.
    read_buffer: Box<[u8; READ_BUFFER_BYTES]>,
    /// Connections whose peer sent FIN after bytes that the handler has not consumed yet.
    pending_fins: FxHashSet<Conn>,
}

impl EventDispatcher {
    pub(crate) fn new() -> Self {
        Self { read_buffer: Box::new([0; READ_BUFFER_BYTES]), pending_fins: FxHashSet::default() }
    }

    /// Returns the connections whose FIN follows bytes that the handler has not consumed.
    pub(crate) fn pending_fins(&self) -> impl Iterator<Item = Conn> {
        self.pending_fins.iter().copied()
    }

    /// Takes over such connections.
    pub(crate) fn restore_pending_fins(&mut self, conns: impl IntoIterator<Item = Conn>) {
        self.pending_fins.extend(conns);
    }

    /// Delivers all pending events, and up to [`FOLLOW_UP_EVENTS_MAX`] that are caused meanwhile, and returns
    /// how many. `burst` is the burst that caused them, if any.
    pub(crate) fn deliver_events<H: Handler>(
        &mut self,
        core: &mut ShardCore,
        handler: &mut H,
        burst: Option<&RxBurst<'_>>,
    ) -> usize {
        let mut count = 0;
        let max = core.stack.events_waiting() + FOLLOW_UP_EVENTS_MAX;
        while count < max
            && let Some(event) = core.stack.next_event()
        {
            count += 1;
            self.deliver_event(core, handler, event, burst);
        }
        core.stats.events += count as u64;
        count
    }

    /// Delivers the events that no frame has caused. With `[priority]` in use, those that are left when the
    /// shard must look at its devices wait for the next turn. If the turn has done no other `work`, at least
    /// one event is delivered, because the shard may sleep after a turn without work.
    #[inline]
    pub(crate) fn deliver_caused<H: Handler>(
        &mut self,
        core: &mut ShardCore,
        handler: &mut H,
        work: usize,
    ) -> usize {
        if priority::COMPILED && core.device_check.is_some() {
            let max = match core.stack.local() {
                Some(stack) => stack.events_waiting(),
                None => FOLLOW_UP_EVENTS_MAX,
            };
            let count = self.deliver_some(core, handler, None, (usize::from(work == 0), max));
            core.stack.end_events();
            return count;
        }
        self.deliver_events(core, handler, None)
    }

    /// Begins the turn of a shard that reaches its engine through a channel, with `[priority]` in use: looks
    /// at the channel as another shard does at its devices. Delivers events by priority, at least one, until
    /// half of `priority.check_interval_us` is over; tasks have the other half. Returns how many.
    #[cold]
    #[inline(never)]
    pub(crate) fn begin_remote_turn<H: Handler>(&mut self, core: &mut ShardCore, handler: &mut H) -> usize {
        let now = core.now;
        if let Some(device_check) = &mut core.device_check {
            device_check.begin_turn(now);
        }
        let is_half_over =
            |core: &ShardCore| core.device_check.as_ref().is_some_and(DeviceCheck::is_half_over);
        let mut count = 0;
        while count < FOLLOW_UP_EVENTS_MAX
            && !(count > 0 && is_half_over(core))
            && let Some(event) = core.stack.next_event()
        {
            count += 1;
            self.deliver_event(core, handler, event, None);
        }
        core.stack.end_events();
        core.stats.events += count as u64;
        count
    }

    /// Delivers events of the engine's current class, from `min` to `max` of them, until the shard must look
    /// at its devices. Returns how many.
    #[cold]
    #[inline(never)]
    pub(crate) fn deliver_some<H: Handler>(
        &mut self,
        core: &mut ShardCore,
        handler: &mut H,
        burst: Option<&RxBurst<'_>>,
        (min, max): (usize, usize),
    ) -> usize {
        let mut count = 0;
        while count < max
            && (count < min || !core.must_look_at_devices())
            && let Some(event) = core.stack.next_event_by_class()
        {
            count += 1;
            self.deliver_event(core, handler, event, burst);
        }
        core.stats.events += count as u64;
        count
    }

    /// Delivers one event. Inlined into both loops, of which the one without priorities must not pay for the
    /// other.
    #[inline(always)]
    fn deliver_event<H: Handler>(
        &mut self,
        core: &mut ShardCore,
        handler: &mut H,
        event: Event,
        burst: Option<&RxBurst<'_>>,
    ) {
        match event {
            Event::Incoming { listener } if handler.is_pulling() => {
                handler.incoming(&mut Context::new(core), listener);
            }
            Event::Incoming { listener } => {
                while handler.may_accept(listener)
                    && let Some(conn) = core.stack.accept_incoming(listener)
                {
                    handler.accepted(&mut Context::new(core), conn, listener);
                    if core.must_look_at_devices() {
                        // The other connections in the queue follow later.
                        core.stack.report_incoming_again(listener);
                        break;
                    }
                }
            }
            Event::ListenerDestroyed { listener } => {
                handler.listener_destroyed(&mut Context::new(core), listener);
            }
            Event::Connected { conn } => handler.connected(&mut Context::new(core), conn),
            Event::Data { conn, data } => {
                // Only an engine in this thread has bursts.
                let (Some(burst), Some(stack)) = (burst, core.stack.local_mut()) else { return };
                let is_pulling = handler.is_pulling();
                if is_pulling || stack.buffered(conn) > 0 {
                    // The bytes move to the receive buffer, which queues an event of its own if the buffer
                    // was empty.
                    stack.consume(conn, data, 0, burst);
                    if !is_pulling {
                        // Bytes left unconsumed before are delivered first.
                        self.deliver_buffered(core, handler, conn);
                    }
                    return;
                }
                let bytes = stack.inline_data(burst, &data);
                let consumed = handler.data(&mut Context::new(core), conn, bytes).min(bytes.len());
                if let Some(stack) = core.stack.local_mut() {
                    stack.consume(conn, data, consumed, burst);
                }
            }
            Event::Readable { conn } if handler.is_pulling() => {
                handler.readable(&mut Context::new(core), conn)
            }
            Event::Readable { conn } => self.deliver_buffered(core, handler, conn),
            Event::Unordered { conn } if handler.pulls_unordered() => {
                handler.unordered_readable(&mut Context::new(core), conn);
            }
            Event::Unordered { conn } => self.deliver_unordered(core, handler, conn),
            Event::Writable { conn } => handler.writable(&mut Context::new(core), conn),
            Event::Acked { conn, bytes } => handler.acked(&mut Context::new(core), conn, bytes),
            Event::Urgent { conn, at, byte } => {
                let urgent = UrgentData { unread_before: core.stack.urgent_ahead(conn, at), byte };
                handler.urgent(&mut Context::new(core), conn, urgent);
            }
            Event::PeerClosed { conn } => {
                if core.stack.buffered(conn) > 0 && !handler.is_pulling() {
                    self.pending_fins.insert(conn);
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
            Event::UdpReadable { socket } if handler.is_pulling() => {
                handler.datagrams(&mut Context::new(core), socket);
            }
            Event::UdpReadable { socket } => self.deliver_datagrams(core, handler, socket),
        }
    }

    /// Delivers bytes to handlers that asked for it. Requests made meanwhile wait for the next turn, so that
    /// this ends.
    pub(crate) fn deliver_resumed<H: Handler>(&mut self, core: &mut ShardCore, handler: &mut H) -> usize {
        let count = core.resume_reading.len();
        let mut done = 0;
        while done < count {
            let conn = core.resume_reading[done];
            self.deliver_buffered(core, handler, conn);
            done += 1;
            if core.must_look_at_devices() {
                break;
            }
        }
        core.resume_reading.drain(..done);
        done
    }

    /// Delivers buffered bytes until the handler consumes less than there are, and then the FIN, if one
    /// follows them.
    fn deliver_buffered<H: Handler>(&mut self, core: &mut ShardCore, handler: &mut H, conn: Conn) {
        let takes_any = handler.takes_any_bytes();
        let most = if takes_any { SMALL_READ_BYTES } else { handler.read_bytes_max() };
        let most = most.clamp(SMALL_READ_BYTES, READ_BUFFER_BYTES);
        loop {
            // The handler may change the engine while it reads, so it gets a copy.
            let len = match core.stack.peek(conn, &mut self.read_buffer[..most]) {
                Ok(0) | Err(RecvError::WouldBlock) => {
                    if core.stack.buffered(conn) > 0 {
                        // The next byte is urgent, which is not delivered as data.
                        let _ = core.stack.skip(conn, 0);
                    }
                    break;
                }
                Ok(len) => len,
                Err(RecvError::Stale) => return,
            };
            core.delivering = Some((conn, len));
            let consumed = handler.data(&mut Context::new(core), conn, &self.read_buffer[..len]).min(len);
            if core.delivering.take().is_none() {
                // The handler closed the connection: the bytes count as read, and nothing more is delivered.
                return;
            }
            if core.stack.skip(conn, consumed).is_err() {
                return;
            }
            if consumed < len {
                // The bytes after the copy may complete the message that was left unconsumed.
                let is_cut = len == most && core.stack.buffered(conn) > len - consumed;
                if consumed > 0 && is_cut && !takes_any {
                    core.resume_reading.push(conn);
                }
                return;
            }
            if core.must_look_at_devices() {
                // The rest, or the FIN, follows in the next turn.
                core.resume_reading.push(conn);
                return;
            }
        }
        if self.take_fin(conn) {
            handler.peer_closed(&mut Context::new(core), conn);
        }
    }

    /// Delivers bytes that arrived before bytes which precede them.
    #[cold]
    fn deliver_unordered<H: Handler>(&mut self, core: &mut ShardCore, handler: &mut H, conn: Conn) {
        while let Ok(Some(bytes)) = core.stack.recv_unordered(conn, &mut self.read_buffer[..]) {
            handler.unordered(&mut Context::new(core), conn, bytes, &self.read_buffer[..bytes.len]);
        }
    }

    /// Takes the pending FIN of a connection. Returns false if there is none. Usually no connection has one,
    /// and nothing is looked up.
    fn take_fin(&mut self, conn: Conn) -> bool {
        !self.pending_fins.is_empty() && self.pending_fins.remove(&conn)
    }

    /// Delivers all datagrams and errors of a socket. The socket's queue limits their number.
    fn deliver_datagrams<H: Handler>(&mut self, core: &mut ShardCore, handler: &mut H, socket: UdpHandle) {
        loop {
            match core.stack.udp_recv_from(socket, &mut self.read_buffer[..]) {
                Ok(datagram) => {
                    let data = &self.read_buffer[..datagram.len.min(READ_BUFFER_BYTES)];
                    handler.datagram(&mut Context::new(core), socket, &datagram, data);
                    if core.must_look_at_devices()
                        && let Some(stack) = core.stack.local_mut()
                    {
                        stack.udp_report_again(socket);
                        return;
                    }
                }
                Err(UdpError::WouldBlock | UdpError::Stale) => return,
                Err(error) => handler.datagram_error(&mut Context::new(core), socket, error),
            }
        }
    }
}
