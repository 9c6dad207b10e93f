//! Queues events for a program's own loop: a handler that pulls received bytes, and keeps events in two
//! levels of priority until the program takes them.
//!
//! A connection, listener or socket is in each queue at most once, whatever happened to it meanwhile. The
//! number of its entries is therefore bounded by the tables of the stack, and [`EventQueue::is_full`] bounds
//! the number of other entries.

use crate::failure::of_close;
use crate::handles::{ConnHandle, ListenerHandle, UdpSocketHandle};
use core::any::Any;
use ginnel::{
    CloseReason, Conn, Context, Error, Handler, Listener, Readiness, UdpError, UdpHandle, UrgentData,
    priority,
};
use rustix::io::Errno;
use std::collections::{HashMap, VecDeque};
use std::io::Read;

/// Largest number of waiting events of timers, descriptors, commands and ended connections. The shard makes
/// no turn while as many wait.
// limit: events that a program in C has not taken
const SINGLE_EVENTS_MAX: usize = 16_384;

/// Largest number of connections that ended by a reset or a time-out before the program had received all of
/// their bytes. The unread bytes of further ones are discarded, and their end has the error `ENOBUFS`.
// limit: reset connections of a program in C with unread bytes
const LATE_CONNS_MAX: usize = 65_536;

macro_rules! event_bits {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: u32 = $value;)*
    };
}

event_bits! {
    /// A connection can be accepted.
    INCOMING = 1;
    /// The connection is established.
    CONNECTED = 1 << 1;
    /// Bytes can be received.
    READABLE = 1 << 2;
    /// Bytes can be received that arrived ahead of missing ones.
    UNORDERED = 1 << 3;
    /// There is room to send again.
    WRITABLE = 1 << 4;
    /// The peer acknowledged bytes.
    ACKED = 1 << 5;
    /// The peer sent FIN.
    PEER_CLOSED = 1 << 6;
    /// The connection ended.
    CLOSED = 1 << 7;
    /// Datagrams or an error can be received.
    DATAGRAMS = 1 << 8;
    /// A timer expired.
    TIMER = 1 << 9;
    /// A kernel descriptor is readable.
    FD_READABLE = 1 << 10;
    /// A kernel descriptor is writable.
    FD_WRITABLE = 1 << 11;
    /// Another thread sent a command.
    COMMAND = 1 << 12;
    /// An administrator closed the listener.
    DESTROYED = 1 << 13;
    /// The peer announced urgent data, or the urgent byte arrived.
    URGENT = 1 << 14;
}

/// `struct ginnel_event`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Event {
    pub source: u64,
    pub token: u64,
    pub events: u32,
    pub acked: u32,
    pub error: i32,
    pub class: u8,
    pub reserved: [u8; 3],
}

/// The two levels in which events wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Classes up to best effort.
    Low,
    /// Classes above best effort.
    High,
}

impl Level {
    fn of(class: u8) -> Self {
        if class > priority::BEST_EFFORT { Self::High } else { Self::Low }
    }
}

/// Kinds of objects that have slots.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Conn,
    Listener,
    Udp,
}

/// Events of one object that were not taken yet.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// The event; nothing waits if its bits are 0.
    event: Event,
    /// True for each level in whose queue the slot is.
    is_queued: [bool; 2],
}

/// Unread bytes of a connection that was reset or has timed out. (One that both sides have closed stays in
/// the engine until its bytes were received.)
#[derive(Debug)]
struct Late {
    unread: VecDeque<u8>,
    /// Reported when nothing is unread any more.
    closed: Event,
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Slot(Kind, u32),
    Single(Event),
}

/// The application of a shard whose events a program in C takes.
#[derive(Debug, Default)]
pub struct EventQueue {
    /// By kind and index.
    slots: [Vec<Slot>; 3],
    /// By level. An entry whose slot has nothing, or has another level, is skipped.
    queues: [VecDeque<Entry>; 2],
    /// Events that wait, by level.
    waiting: [usize; 2],
    /// Number of waiting events that are not of slots.
    singles: usize,
    /// Connections whose end waits until the program has received their bytes, by handle.
    late: HashMap<u64, Late>,
    is_started: bool,
}

impl EventQueue {
    /// Returns whether the shard has called `start`, from when on its addresses can be used.
    pub fn is_started(&self) -> bool {
        self.is_started
    }

    /// Returns whether an event waits.
    pub fn has_events(&self) -> bool {
        self.waiting != [0; 2]
    }

    /// Returns whether `SINGLE_EVENTS_MAX` or more events that belong to no slot wait. The shard must not
    /// make a turn while this is true.
    pub fn is_full(&self) -> bool {
        self.singles >= SINGLE_EVENTS_MAX
    }

    /// Takes the next event of a level.
    pub fn pop(&mut self, level: Level) -> Option<Event> {
        loop {
            let event = match self.queues[level as usize].pop_front()? {
                Entry::Single(event) => {
                    self.singles -= 1;
                    event
                }
                Entry::Slot(kind, index) => {
                    let slot = &mut self.slots[kind as usize][index as usize];
                    slot.is_queued[level as usize] = false;
                    if slot.event.events == 0 || Level::of(slot.event.class) != level {
                        continue;
                    }
                    core::mem::take(&mut slot.event)
                }
            };
            self.waiting[level as usize] -= 1;
            return Some(event);
        }
    }

    /// Adds what happened to an object. If an event of the object waits already, both are merged, with the
    /// higher of their classes. A waiting event of an earlier object with this index is dropped.
    fn add(&mut self, kind: Kind, index: u32, happened: Event) {
        let at = index as usize;
        let slots = &mut self.slots[kind as usize];
        if slots.len() <= at {
            slots.resize(at + 1, Slot::default());
        }
        let slot = &mut slots[at];
        let had = (slot.event.events != 0).then(|| Level::of(slot.event.class));
        if had.is_some() && slot.event.source == happened.source {
            let event = &mut slot.event;
            event.events |= happened.events;
            event.acked = event.acked.saturating_add(happened.acked);
            event.class = event.class.max(happened.class);
            event.token = happened.token;
        } else {
            slot.event = happened;
        }
        let level = Level::of(slot.event.class);
        if had != Some(level) {
            self.waiting[level as usize] += 1;
            if let Some(had) = had {
                self.waiting[had as usize] -= 1;
            }
        }
        if !core::mem::replace(&mut slot.is_queued[level as usize], true) {
            self.queues[level as usize].push_back(Entry::Slot(kind, index));
        }
    }

    /// Adds an event that belongs to no slot and is never merged with another.
    fn add_single(&mut self, event: Event) {
        let level = Level::of(event.class) as usize;
        self.waiting[level] += 1;
        self.singles += 1;
        self.queues[level].push_back(Entry::Single(event));
    }

    /// Takes the waiting event of an object. Its bits are 0 if none waits.
    fn take_slot(&mut self, kind: Kind, index: u32) -> Event {
        let Some(slot) = self.slots[kind as usize].get_mut(index as usize) else { return Event::default() };
        let event = core::mem::take(&mut slot.event);
        if event.events != 0 {
            self.waiting[Level::of(event.class) as usize] -= 1;
        }
        event
    }

    /// Receives bytes of a connection that has ended, and after the last byte the error number of its end.
    /// Returns `None` if the connection has not ended, or its end was reported already.
    pub fn recv_late(&mut self, conn: ConnHandle, buffer: &mut [u8]) -> Option<Result<usize, Errno>> {
        if self.late.is_empty() {
            return None;
        }
        let late = self.late.get_mut(&conn.id)?;
        if late.unread.is_empty() {
            let error = Errno::from_raw_os_error(late.closed.error);
            self.close_late(conn);
            return Some(Err(error));
        }
        // Never fails: the source is memory.
        Some(Ok(late.unread.read(buffer).unwrap_or(0)))
    }

    /// Returns unread bytes of a connection that has ended, from `offset` bytes after the first one on, and
    /// after the last one was consumed the error number of its end. Returns `None` if
    /// [`recv_late`](Self::recv_late) would.
    pub fn peek_late(&mut self, conn: ConnHandle, offset: usize) -> Option<Result<&[u8], Errno>> {
        let late = self.late.get(&conn.id)?;
        if late.unread.is_empty() {
            let error = Errno::from_raw_os_error(late.closed.error);
            self.close_late(conn);
            return Some(Err(error));
        }
        let (first, second) = self.late.get(&conn.id)?.unread.as_slices();
        let bytes = match first.get(offset..) {
            Some(bytes) if !bytes.is_empty() => bytes,
            _ => offset.checked_sub(first.len()).and_then(|offset| second.get(offset..)).unwrap_or_default(),
        };
        Some(if bytes.is_empty() { Err(Errno::AGAIN) } else { Ok(bytes) })
    }

    /// Consumes unread bytes of a connection that has ended. Returns false, and consumes nothing, if there
    /// are fewer than `count`; `None` if [`recv_late`](Self::recv_late) would return `None`.
    pub fn consume_late(&mut self, conn: ConnHandle, count: usize) -> Option<bool> {
        let late = self.late.get_mut(&conn.id)?;
        let is_possible = count <= late.unread.len();
        if is_possible {
            late.unread.drain(..count);
        }
        Some(is_possible)
    }

    /// Returns the number of unread bytes of a connection that has ended; `None` if
    /// [`recv_late`](Self::recv_late) would return `None`.
    pub fn unread_late(&self, conn: ConnHandle) -> Option<usize> {
        Some(self.late.get(&conn.id)?.unread.len())
    }

    /// Reports the end of a connection, whose unread bytes are discarded. Returns false if
    /// [`recv_late`](Self::recv_late) would return `None`.
    pub fn close_late(&mut self, conn: ConnHandle) -> bool {
        let Some(late) = self.late.remove(&conn.id) else { return false };
        self.add_single(late.closed);
        true
    }

    /// Reports the end of a connection. If bytes are unread, reports them first, and the end after they were
    /// received or discarded.
    fn end(&mut self, mut closed: Event, unread: VecDeque<u8>) {
        if unread.is_empty() {
            return self.add_single(closed);
        }
        if self.late.len() >= LATE_CONNS_MAX {
            closed.error = Errno::NOBUFS.raw_os_error();
            return self.add_single(closed);
        }
        self.add_single(Event { events: closed.events & !CLOSED | READABLE, error: 0, ..closed });
        closed.events = CLOSED;
        closed.acked = 0;
        self.late.insert(closed.source, Late { unread, closed });
    }

    fn add_conn(&mut self, cx: &Context<'_>, conn: Conn, events: u32, acked: u32) {
        let event = Event {
            source: ConnHandle::from(conn).id,
            token: cx.token(conn).map_or(0, u64::from),
            events,
            acked,
            class: cx.event_class(),
            ..Event::default()
        };
        self.add(Kind::Conn, conn.index(), event);
    }

    fn add_listener(&mut self, cx: &Context<'_>, listener: Listener, events: u32) {
        let source = ListenerHandle::from(listener).id;
        let event = Event { source, events, class: cx.event_class(), ..Event::default() };
        self.add(Kind::Listener, listener.index(), event);
    }
}

/// Takes the bytes that a connection has left at its end.
fn receive_all(cx: &mut Context<'_>, conn: Conn) -> VecDeque<u8> {
    let mut bytes = vec![0; cx.unread(conn)];
    let mut count = 0;
    while count < bytes.len()
        && let Ok(more) = cx.recv(conn, &mut bytes[count..])
        && more > 0
    {
        count += more;
    }
    bytes.truncate(count);
    bytes.into()
}

impl Handler for EventQueue {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        self.is_started = true;
        Ok(())
    }

    fn is_pulling(&self) -> bool {
        true
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, _: &[u8]) -> usize {
        // Never called, because this handler pulls.
        0
    }

    fn incoming(&mut self, cx: &mut Context<'_>, listener: Listener) {
        self.add_listener(cx, listener, INCOMING);
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.add_conn(cx, conn, CONNECTED, 0);
    }

    fn readable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.add_conn(cx, conn, READABLE, 0);
    }

    fn unordered_readable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.add_conn(cx, conn, UNORDERED, 0);
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.add_conn(cx, conn, WRITABLE, 0);
    }

    fn acked(&mut self, cx: &mut Context<'_>, conn: Conn, bytes: u32) {
        self.add_conn(cx, conn, ACKED, bytes);
    }

    fn urgent(&mut self, cx: &mut Context<'_>, conn: Conn, _: UrgentData) {
        self.add_conn(cx, conn, URGENT, 0);
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.add_conn(cx, conn, PEER_CLOSED, 0);
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let before = self.take_slot(Kind::Conn, conn.index());
        let closed = Event {
            source: ConnHandle::from(conn).id,
            token: cx.token(conn).map_or(0, u64::from),
            // What can no longer be received or sent is not reported.
            events: before.events & (CONNECTED | ACKED | PEER_CLOSED) | CLOSED,
            acked: before.acked,
            error: of_close(reason),
            class: cx.event_class().max(before.class),
            ..Event::default()
        };
        self.end(closed, receive_all(cx, conn));
    }

    fn datagrams(&mut self, cx: &mut Context<'_>, socket: UdpHandle) {
        let source = UdpSocketHandle::from(socket).id;
        let event = Event { source, events: DATAGRAMS, class: cx.event_class(), ..Event::default() };
        self.add(Kind::Udp, socket.index(), event);
    }

    fn datagram_error(&mut self, cx: &mut Context<'_>, socket: UdpHandle, _: UdpError) {
        // `ginnel_udp_recv` returns it.
        self.datagrams(cx, socket);
    }

    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        self.add_single(Event { token, events: TIMER, class: cx.event_class(), ..Event::default() });
    }

    fn kernel_ready(&mut self, cx: &mut Context<'_>, token: u64, readiness: Readiness) {
        let readable = if readiness.readable { FD_READABLE } else { 0 };
        let writable = if readiness.writable { FD_WRITABLE } else { 0 };
        let class = cx.event_class();
        self.add_single(Event { token, events: readable | writable, class, ..Event::default() });
    }

    fn listener_destroyed(&mut self, cx: &mut Context<'_>, listener: Listener) {
        self.add_listener(cx, listener, DESTROYED);
    }

    fn command(&mut self, cx: &mut Context<'_>, command: Box<dyn Any + Send>) {
        if let Ok(token) = command.downcast::<u64>() {
            let class = cx.event_class();
            self.add_single(Event { token: *token, events: COMMAND, class, ..Event::default() });
        }
    }

    fn stopping(&mut self, _: &mut Context<'_>) {
        // `ginnel_wait` tells the program; nothing ends by itself.
    }
}

#[cfg(test)]
mod tests {
    use super::{
        CLOSED, ConnHandle, Errno, Event, EventQueue, Kind, LATE_CONNS_MAX, Level, READABLE,
        SINGLE_EVENTS_MAX, TIMER, WRITABLE,
    };

    fn happened(source: u64, events: u32, class: u8) -> Event {
        Event { source, events, class, ..Event::default() }
    }

    #[test]
    fn events_of_a_connection_are_merged() {
        let mut queue = EventQueue::default();
        queue.add(Kind::Conn, 3, happened(4, READABLE, 1));
        queue.add(Kind::Conn, 3, happened(4, WRITABLE, 1));
        assert_eq!(queue.pop(Level::High), None);
        assert_eq!(queue.pop(Level::Low), Some(happened(4, READABLE | WRITABLE, 1)));
        assert!(!queue.has_events());
        assert_eq!(queue.pop(Level::Low), None);
    }

    #[test]
    fn an_urgent_event_moves_its_connection_up_once() {
        let mut queue = EventQueue::default();
        queue.add(Kind::Conn, 0, happened(1, READABLE, 1));
        queue.add(Kind::Conn, 1, happened(2, READABLE, 1));
        queue.add(Kind::Conn, 0, happened(1, WRITABLE, 6));
        assert_eq!(queue.waiting, [1, 1]);
        assert_eq!(queue.pop(Level::High), Some(happened(1, READABLE | WRITABLE, 6)));
        assert_eq!(queue.pop(Level::Low), Some(happened(2, READABLE, 1)));
        assert_eq!((queue.pop(Level::Low), queue.waiting), (None, [0, 0]));
        // The entry that was skipped does not hide later events.
        queue.add(Kind::Conn, 0, happened(1, READABLE, 1));
        assert_eq!(queue.pop(Level::Low), Some(happened(1, READABLE, 1)));
    }

    #[test]
    fn queues_do_not_grow_with_repeated_events() {
        let mut queue = EventQueue::default();
        for turn in 0..10_000_u32 {
            queue.add(Kind::Conn, 5, happened(6, READABLE, if turn % 2 == 0 { 1 } else { 5 }));
        }
        assert!(queue.queues.iter().all(|queue| queue.len() <= 1));
        assert_eq!(queue.waiting, [0, 1], "the event keeps its highest class");
    }

    // limit: events that a program in C has not taken
    #[test]
    fn too_many_single_events_are_reported() {
        let mut queue = EventQueue::default();
        for _ in 0..SINGLE_EVENTS_MAX {
            assert!(!queue.is_full());
            queue.add_single(happened(0, TIMER, 1));
        }
        assert!(queue.is_full());
        assert!(queue.pop(Level::Low).is_some());
        assert!(!queue.is_full());
    }

    // limit: reset connections of a program in C with unread bytes
    #[test]
    fn reset_connections_keep_their_bytes_up_to_a_limit() {
        let mut queue = EventQueue::default();
        let reset = |source| Event { source, events: CLOSED, error: 104, ..Event::default() };
        for source in 1..=LATE_CONNS_MAX as u64 {
            queue.end(reset(source), vec![7].into());
            assert_eq!(queue.pop(Level::Low).map(|event| event.events), Some(READABLE));
        }
        queue.end(reset(0), vec![7].into());
        let refused = Event { error: Errno::NOBUFS.raw_os_error(), ..reset(0) };
        assert_eq!(queue.pop(Level::Low), Some(refused));
        let mut buffer = [0; 9];
        let conn = ConnHandle { id: 1 };
        assert_eq!(queue.recv_late(conn, &mut buffer), Some(Ok(1)));
        assert_eq!(queue.recv_late(conn, &mut buffer), Some(Err(Errno::CONNRESET)));
        assert_eq!(queue.pop(Level::Low), Some(reset(1)));
        assert_eq!(queue.recv_late(conn, &mut buffer), None);
        queue.end(reset(0), vec![7].into());
        assert_eq!(queue.pop(Level::Low).map(|event| event.events), Some(READABLE));
    }
}
