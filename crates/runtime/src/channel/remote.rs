//! An engine at the other end of a channel, as a handler's shard sees it: the same calls, the same events.
//!
//! What the engine does without copying, ranges of sources, is copied here piece by piece as room appears.

use super::client::{Client, ClientEvent};
use super::control::{Control, Counters, Reply, Request, UdpRequest};
use super::region::OFFERS_MAX;
use crate::error::Error;
use crate::wait::EventFd;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::error::{ConnectError, ListenError, OptionError, RecvError, SendError, Stale};
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::options::{ConnectOptions, ListenOptions, TcpInfo, TcpOption};
use ginnel_stack::tcp::TcpStats;
use ginnel_stack::tcp::source::{Source, SourceId, SourceTable};
use ginnel_stack::tcp::state::State;
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{Datagram, UdpError, UdpOptions, UdpReport, UdpSending};
use ginnel_stack::wire::tcp::SeqNumber;
use rustix::fd::BorrowedFd;
use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;

/// Ranges of sources that may wait on a connection.
const RANGES_MAX: usize = 64;
/// Bytes of a source copied at a time.
const COPY_BYTES: usize = 16 << 10;
/// A handler that left so many connections in the queue of a listener is offered no more until half of them are gone.
const QUEUE_MAX: usize = 16;
/// Counters of the stack are at most so old while something happens.
const COUNTERS_AGE_MAX: Duration = Duration::from_millis(100);

/// Bytes of a source that wait for room.
#[derive(Clone, Copy, Debug)]
struct Range {
    source: SourceId,
    offset: u64,
    len: u64,
}

/// What the application asked for behind ranges that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum After {
    #[default]
    Nothing,
    Shutdown,
    Close,
}

/// What only this side knows of a connection.
#[derive(Debug, Default)]
struct Side {
    conn: Option<Conn>,
    token: u32,
    /// The handler has it; before that it is told nothing.
    accepted: bool,
    /// Urgent bytes stay in the stream (`SO_OOBINLINE`).
    oob_inline: bool,
    ranges: VecDeque<Range>,
    after: After,
    /// A send was cut short.
    blocked: bool,
    /// The handler closed it: what comes now is not for it.
    closed: bool,
    fin: bool,
    ended: Option<CloseReason>,
    /// Its end was put among the events.
    reported: bool,
}

/// One listener.
struct Listening {
    listener: Listener,
    queue: VecDeque<Conn>,
    /// It has no credits, because its queue is full.
    full: bool,
}

pub(crate) struct Remote {
    /// In a cell because questions that change nothing here are asked through it, too.
    client: RefCell<Client>,
    wake: Arc<EventFd>,
    events: VecDeque<Event>,
    sides: Vec<Side>,
    /// By the numbers of the channel.
    listeners: Vec<Option<Listening>>,
    /// Of listeners that had their numbers before.
    generation: u32,
    sources: SourceTable,
    /// Its end was taken: the next event makes it stale.
    leaving: Option<Conn>,
    /// Asked for when somebody looks, and then kept for a while.
    counters: OnceCell<Counters>,
    /// Those of the last look.
    earlier: Counters,
    counted: Instant,
    now: Instant,
    scratch: Box<[u8; COPY_BYTES]>,
}

impl Remote {
    pub fn new(client: Client, now: Instant) -> Self {
        let (sockets, wake) = (client.sockets_max(), client.wake());
        Self {
            wake,
            client: RefCell::new(client),
            events: VecDeque::new(),
            sides: (0..sockets).map(|_| Side::default()).collect(),
            listeners: Vec::new(),
            generation: 0,
            sources: SourceTable::new(),
            leaving: None,
            counters: OnceCell::new(),
            earlier: Counters::default(),
            counted: now,
            now,
            scratch: Box::new([0; COPY_BYTES]),
        }
    }

    fn ask(&self, request: Request) -> Result<Reply, Error> {
        self.client.borrow_mut().ask(request)
    }

    fn side(&self, conn: Conn) -> Option<&Side> {
        self.sides.get(conn.index() as usize).filter(|side| side.conn == Some(conn))
    }

    fn side_mut(&mut self, conn: Conn) -> Option<&mut Side> {
        self.sides.get_mut(conn.index() as usize).filter(|side| side.conn == Some(conn))
    }

    fn begin(&mut self, conn: Conn, accepted: bool) {
        self.sides[conn.index() as usize] = Side { conn: Some(conn), accepted, ..Side::default() };
    }

    /// Asks in another way from now on.
    pub fn set_control(&mut self, control: Box<dyn Control>) {
        self.client.get_mut().set_control(control);
        self.forget_counters();
    }

    /// What wakes the application.
    pub fn wake(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    pub fn is_ready(&self) -> bool {
        self.client.borrow().is_ready()
    }

    /// What the stack has counted, at most `COUNTERS_AGE_MAX` ago.
    pub fn counters(&self) -> &Counters {
        self.counters.get_or_init(|| match self.ask(Request::Counters) {
            Ok(Reply::Counters(counters)) => *counters,
            // The shard is gone.
            _ => self.earlier.clone(),
        })
    }

    fn forget_counters(&mut self) {
        self.counted = self.now;
        if let Some(counters) = self.counters.take() {
            self.earlier = counters;
        }
    }

    pub fn tcp_stats(&self) -> &TcpStats {
        &self.counters().tcp
    }

    pub fn listen(&mut self, local: SocketAddr, options: ListenOptions) -> Result<Listener, ListenError> {
        self.listen_as(Request::Listen(local, options))
    }

    /// The same, but on no port that others listen on.
    pub fn listen_alone(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
    ) -> Result<Listener, ListenError> {
        self.listen_as(Request::ListenAlone(local, options))
    }

    fn listen_as(&mut self, request: Request) -> Result<Listener, ListenError> {
        let number = match self.client.get_mut().listen_as(request, OFFERS_MAX as u32) {
            Ok(number) => number as usize,
            Err(Error::Listen(_, error)) => return Err(error),
            Err(_) => return Err(ListenError::AddressNotAvailable),
        };
        self.generation = self.generation.wrapping_add(1);
        let listener = Listener::new(number as u32, self.generation);
        if self.listeners.len() <= number {
            self.listeners.resize_with(number + 1, || None);
        }
        self.listeners[number] = Some(Listening { listener, queue: VecDeque::new(), full: false });
        Ok(listener)
    }

    fn listening(&mut self, listener: Listener) -> Option<&mut Listening> {
        let listening = self.listeners.get_mut(listener.index() as usize)?.as_mut()?;
        (listening.listener == listener).then_some(listening)
    }

    pub fn unlisten(&mut self, listener: Listener) -> bool {
        let Some(listening) = self.listening(listener) else { return false };
        let nobodys = core::mem::take(&mut listening.queue);
        self.listeners[listener.index() as usize] = None;
        let client = self.client.get_mut();
        for conn in nobodys {
            // Connections in the queue of a listener that goes are reset.
            let _ = client.abort(conn);
            let _ = client.release(conn);
            self.sides[conn.index() as usize].conn = None;
        }
        client.unlisten(listener.index()).is_ok()
    }

    pub fn accept(&mut self, listener: Listener) -> Option<Conn> {
        let listening = self.listening(listener)?;
        let conn = listening.queue.pop_front()?;
        if listening.full && listening.queue.len() <= QUEUE_MAX / 2 {
            listening.full = false;
            self.client.get_mut().set_credits(listener.index(), OFFERS_MAX as u32);
        }
        let readable = self.buffered(conn) > 0;
        let side = self.side_mut(conn)?;
        side.accepted = true;
        let (fin, ended) = (side.fin, side.ended);
        let urgent = self.client.get_mut().notices(conn) != 0;
        // What came before it was accepted was reported to nobody.
        if urgent {
            self.tell_urgent(conn);
        }
        if readable {
            self.events.push_back(Event::Readable { conn });
        }
        if fin {
            self.events.push_back(Event::PeerClosed { conn });
        }
        if let Some(reason) = ended {
            self.end(conn, reason);
        }
        Some(conn)
    }

    pub fn connect(
        &mut self,
        _now: Instant,
        remote: SocketAddr,
        options: &ConnectOptions,
    ) -> Result<Conn, ConnectError> {
        let conn = match self.client.get_mut().connect(remote, *options) {
            Ok(conn) => conn,
            Err(Error::Connect(_, error)) => return Err(error),
            Err(_) => return Err(ConnectError::NetUnreachable),
        };
        self.begin(conn, true);
        Ok(conn)
    }

    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let side = self.side_mut(conn).ok_or(SendError::Stale)?;
        if side.after != After::Nothing {
            return Err(SendError::Closed);
        }
        if !side.ranges.is_empty() {
            side.blocked |= !bytes.is_empty();
            return Ok(0);
        }
        let count = self.client.get_mut().send(conn, bytes)?;
        if count < bytes.len() {
            self.sides[conn.index() as usize].blocked = true;
        }
        Ok(count)
    }

    pub fn send_source(
        &mut self,
        conn: Conn,
        source: SourceId,
        offset: u64,
        len: u64,
    ) -> Result<(), SendError> {
        let side = self.side(conn).ok_or(SendError::Stale)?;
        let there = self.sources.get(source).ok_or(SendError::InvalidSource)?.len();
        if offset.checked_add(len).is_none_or(|end| end > there) {
            return Err(SendError::InvalidSource);
        }
        if side.after != After::Nothing {
            return Err(SendError::Closed);
        }
        // Says whether sending is possible at all.
        self.client.get_mut().send(conn, &[])?;
        let side = &mut self.sides[conn.index() as usize];
        if side.ranges.len() == RANGES_MAX {
            side.blocked = true;
            return Err(SendError::Full);
        }
        if len > 0 {
            self.sources.begin_use(source);
            side.ranges.push_back(Range { source, offset, len });
            self.pump(conn);
        }
        Ok(())
    }

    /// Copies ranges of sources as far as there is room, then does what was asked for behind them. Whether nothing waits any more.
    fn pump(&mut self, conn: Conn) -> bool {
        let Some(side) = self.sides.get_mut(conn.index() as usize).filter(|s| s.conn == Some(conn)) else {
            return false;
        };
        let client = self.client.get_mut();
        while let Some(range) = side.ranges.front_mut() {
            let count = usize::try_from(range.len).unwrap_or(usize::MAX).min(COPY_BYTES);
            let bytes = &mut self.scratch[..count];
            self.sources.in_use(range.source).fill(range.offset, bytes);
            // If nothing can be sent any more, the end is about to be told.
            let sent = client.send(conn, bytes).unwrap_or(count);
            range.offset += sent as u64;
            range.len -= sent as u64;
            if range.len > 0 && sent < count {
                return false;
            }
            if range.len == 0 {
                let done = range.source;
                side.ranges.pop_front();
                self.sources.end_use(done);
            }
        }
        // Only a stale handle could be refused.
        let _ = match side.after {
            After::Nothing => Ok(()),
            After::Shutdown => client.shutdown_write(conn),
            After::Close => client.close(conn),
        };
        side.after = After::Nothing;
        true
    }

    /// Forgets ranges that will never be sent.
    fn forget(&mut self, conn: Conn) {
        let Some(side) = self.side_mut(conn) else { return };
        for range in core::mem::take(&mut side.ranges) {
            self.sources.end_use(range.source);
        }
    }

    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let side = self.side_mut(conn).ok_or(SendError::Stale)?;
        if !side.ranges.is_empty() {
            side.blocked = true;
            return Ok(0);
        }
        match self.ask(Request::SendUrgent(conn.index(), bytes.to_vec())) {
            Ok(Reply::SendUrgent(result)) => result,
            _ => Err(SendError::Stale),
        }
    }

    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        let side = self.side(conn).ok_or(RecvError::Stale)?;
        if side.oob_inline {
            return Err(RecvError::WouldBlock);
        }
        self.client.borrow_mut().recv_urgent(conn)
    }

    /// What a read finds in front of it after urgent data: bytes to be dropped first, and how many may be read behind those. It stops before the urgent byte, and the next
    /// one passes it.
    fn front(&self, conn: Conn) -> (usize, usize) {
        let Some(side) = self.side(conn) else { return (0, usize::MAX) };
        let mut client = self.client.borrow_mut();
        match client.mark(conn).ok().flatten() {
            None => (0, usize::MAX),
            Some(mark) if mark.ahead > 0 => (0, mark.ahead),
            Some(_) => {
                let come = client.readable(conn).is_ok_and(|count| count > 0);
                (usize::from(come && !side.oob_inline), usize::MAX)
            }
        }
    }

    /// Tells the handler where the urgent byte is.
    fn tell_urgent(&mut self, conn: Conn) {
        let client = self.client.get_mut();
        if let Ok(Some(mark)) = client.mark(conn)
            && let Ok(read) = client.read_position(conn)
        {
            let at = SeqNumber(read.wrapping_add(mark.ahead as u64) as u32);
            self.tell(conn, Event::Urgent { conn, at, byte: mark.byte });
        }
    }

    pub fn urgent_ahead(&self, conn: Conn, at: SeqNumber) -> i32 {
        self.client.borrow().read_position(conn).map_or(-1, |read| at - SeqNumber(read as u32))
    }

    pub fn peek(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let side = self.side(conn).ok_or(RecvError::Stale)?;
        let (mut seen, mut front) = (0, (0, usize::MAX));
        let count = loop {
            let (lead, most) = front;
            let room = out.len().min(most);
            let count = self.client.borrow().peek(conn, lead, &mut out[..room])?;
            // Behind the bytes: what is said of urgent ones comes before they do.
            let now = self.client.borrow().notices(conn);
            if now == seen {
                break count;
            }
            (seen, front) = (now, self.front(conn));
        };
        if count == 0 && !side.fin && !out.is_empty() { Err(RecvError::WouldBlock) } else { Ok(count) }
    }

    pub fn buffered(&self, conn: Conn) -> usize {
        self.client.borrow().readable(conn).unwrap_or(0)
    }

    pub fn skip(&mut self, conn: Conn, count: usize) -> Result<(), Stale> {
        self.side(conn).ok_or(Stale::Handle)?;
        let (lead, most) = match self.client.get_mut().notices(conn) {
            0 => (0, usize::MAX),
            _ => self.front(conn),
        };
        self.client.get_mut().consume(conn, lead + count.min(most))?;
        if let Some(reason) = self.side(conn).and_then(|side| side.ended) {
            self.end(conn, reason);
        }
        Ok(())
    }

    pub fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let count = self.peek(conn, out)?;
        self.skip(conn, count).map_err(|_| RecvError::Stale)?;
        Ok(count)
    }

    pub fn add_source(&mut self, source: Box<dyn Source>) -> SourceId {
        self.sources.add(source)
    }

    pub fn release_source(&mut self, id: SourceId) -> bool {
        self.sources.release(id)
    }

    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        let side = self.side_mut(conn).ok_or(Stale::Handle)?;
        if side.ranges.is_empty() {
            return self.client.get_mut().shutdown_write(conn);
        }
        if side.after == After::Nothing {
            side.after = After::Shutdown;
        }
        Ok(())
    }

    pub fn close(&mut self, conn: Conn) -> Result<(), Stale> {
        let side = self.side_mut(conn).ok_or(Stale::Handle)?;
        side.closed = true;
        if side.ranges.is_empty() {
            return self.client.get_mut().close(conn);
        }
        side.after = After::Close;
        Ok(())
    }

    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        self.side(conn).ok_or(Stale::Handle)?;
        self.forget(conn);
        self.client.get_mut().abort(conn)
    }

    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        if let (TcpOption::OobInline(on), Some(side)) = (option, self.side_mut(conn)) {
            side.oob_inline = on;
        }
        self.client.get_mut().set_option(conn, option)
    }

    /// Also of a connection that is over, until its handle is stale.
    pub fn ends(&self, conn: Conn) -> Option<[SocketAddr; 2]> {
        self.side(conn)?;
        self.client.borrow().ends(conn).ok()
    }

    pub fn info(&self, conn: Conn) -> Option<TcpInfo> {
        self.side(conn)?;
        self.client.borrow_mut().info(conn).ok().map(|info| *info)
    }

    pub fn state(&self, conn: Conn) -> Option<State> {
        self.info(conn).map(|info| info.state)
    }

    pub fn token(&self, conn: Conn) -> Option<u32> {
        self.side(conn).map(|side| side.token)
    }

    pub fn set_token(&mut self, conn: Conn, token: u32) -> bool {
        let Some(side) = self.side_mut(conn) else { return false };
        side.token = token;
        true
    }

    fn udp(&self, request: UdpRequest) -> Result<Reply, UdpError> {
        self.ask(Request::Udp(request)).map_err(|_| UdpError::Stale)
    }

    fn udp_done(&self, request: UdpRequest) -> Result<(), UdpError> {
        match self.udp(request)? {
            Reply::Udp(result) => result,
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<UdpHandle, UdpError> {
        match self.udp(UdpRequest::Bind(local, options))? {
            Reply::UdpBind(result) => {
                let (socket, generation) = result?;
                self.client.get_mut().hold(socket, generation);
                self.begin(Conn::new(socket, generation), false);
                Ok(UdpHandle::new(socket, generation))
            }
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_connect(&mut self, _now: Instant, socket: UdpHandle, to: SocketAddr) -> Result<(), UdpError> {
        self.udp_done(UdpRequest::Connect(socket, to))
    }

    pub fn udp_send_to(
        &mut self,
        _now: Instant,
        socket: UdpHandle,
        to: Option<SocketAddr>,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.udp_done(UdpRequest::Send(socket, to, data.to_vec()))
    }

    pub fn udp_reply(&mut self, socket: UdpHandle, to: &Datagram, data: &[u8]) -> Result<(), UdpError> {
        self.udp_done(UdpRequest::Reply(socket, *to, data.to_vec()))
    }

    pub fn udp_recv_from(&mut self, socket: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        match self.udp(UdpRequest::Recv(socket))? {
            Reply::UdpRecv(result) => {
                let (datagram, data) = result?;
                let count = data.len().min(out.len());
                out[..count].copy_from_slice(&data[..count]);
                Ok(datagram)
            }
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_send_with(
        &mut self,
        _now: Instant,
        socket: UdpHandle,
        sending: &UdpSending,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.udp_done(UdpRequest::SendWith(socket, *sending, data.to_vec()))
    }

    pub fn udp_take_report(&mut self, socket: UdpHandle, out: &mut [u8]) -> Result<UdpReport, UdpError> {
        match self.udp(UdpRequest::Report(socket))? {
            Reply::UdpReport(result) => {
                let (report, known) = *result?;
                out.iter_mut().zip(&known).for_each(|(place, byte)| *place = *byte);
                Ok(report)
            }
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_path_mtu(&mut self, _now: Instant, socket: UdpHandle) -> Result<u16, UdpError> {
        match self.udp(UdpRequest::PathMtu(socket))? {
            Reply::UdpPathMtu(result) => result,
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_set_options(&mut self, socket: UdpHandle, options: UdpOptions) -> Result<(), UdpError> {
        self.udp_done(UdpRequest::SetOptions(socket, options))
    }

    pub fn udp_local(&mut self, socket: UdpHandle) -> Result<SocketAddr, UdpError> {
        match self.udp(UdpRequest::Local(socket))? {
            Reply::UdpLocal(result) => result,
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_close(&mut self, socket: UdpHandle) -> Result<(), UdpError> {
        let conn = Conn::new(socket.index(), socket.generation());
        self.udp_done(UdpRequest::Close(socket))?;
        self.sides[conn.index() as usize].conn = None;
        // The stack's side has answered, so it is there.
        let _ = self.client.get_mut().release(conn);
        Ok(())
    }

    /// As that of the stack: slots of connections whose end was reported before are reused from here on.
    pub fn next_event(&mut self) -> Option<Event> {
        if let Some(conn) = self.leaving.take() {
            self.forget(conn);
            self.sides[conn.index() as usize].conn = None;
            // Held until now.
            let _ = self.client.get_mut().release(conn);
        }
        while self.events.is_empty() {
            let event = self.client.get_mut().next_event()?;
            self.take(event);
        }
        let mut event = self.events.pop_front();
        if let Some(Event::Closed { conn, token, .. }) = &mut event {
            self.leaving = Some(*conn);
            // What it is by now.
            *token = self.token(*conn).unwrap_or(0);
        }
        event
    }

    pub fn events_waiting(&self) -> usize {
        // Those in the ring are not counted before they are looked at.
        self.events.len()
    }

    fn take(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Accepted { conn, listener } => {
                self.begin(conn, false);
                match self.listeners.get_mut(listener as usize).and_then(Option::as_mut) {
                    Some(listening) => {
                        listening.queue.push_back(conn);
                        if listening.queue.len() == QUEUE_MAX {
                            listening.full = true;
                            self.client.get_mut().set_credits(listener, 0);
                        }
                        self.events.push_back(Event::Incoming { listener: listening.listener });
                    }
                    None => {
                        // Taken in the moment in which the listener went.
                        let client = self.client.get_mut();
                        let _ = client.abort(conn);
                        let _ = client.release(conn);
                        self.sides[conn.index() as usize].conn = None;
                    }
                }
            }
            // Only those who accept by hand are told.
            ClientEvent::Offered { .. } => {}
            ClientEvent::Connected { conn } => self.events.push_back(Event::Connected { conn }),
            ClientEvent::Readable { conn } => self.tell(conn, Event::Readable { conn }),
            ClientEvent::Acked { conn, bytes } => self.tell(conn, Event::Acked { conn, bytes }),
            ClientEvent::Urgent { conn } => {
                self.tell_urgent(conn);
            }
            ClientEvent::Datagrams { conn } => {
                let socket = UdpHandle::new(conn.index(), conn.generation());
                self.events.push_back(Event::UdpReadable { socket });
            }
            ClientEvent::Writable { conn } => {
                if self.pump(conn)
                    && let Some(side) = self.side_mut(conn)
                    && core::mem::take(&mut side.blocked)
                {
                    self.tell(conn, Event::Writable { conn });
                }
            }
            ClientEvent::PeerClosed { conn } => {
                let Some(side) = self.side_mut(conn) else { return };
                side.fin = true;
                self.tell(conn, Event::PeerClosed { conn });
            }
            ClientEvent::Closed { conn, reason } => {
                let Some(side) = self.side_mut(conn) else { return };
                side.ended = Some(reason);
                self.end(conn, reason);
            }
        }
    }

    /// Events of connections that nobody accepted yet come with `accept`.
    fn tell(&mut self, conn: Conn, event: Event) {
        if self.side(conn).is_some_and(|side| side.accepted && !side.reported) {
            self.events.push_back(event);
        }
    }

    /// Reports the end, unless bytes that came before an orderly one are still to be read.
    fn end(&mut self, conn: Conn, reason: CloseReason) {
        let unread = reason == CloseReason::Normal && self.buffered(conn) > 0;
        let Some(side) = self.side_mut(conn) else { return };
        if !side.accepted || side.reported || unread && !side.closed {
            return;
        }
        side.reported = true;
        self.events.push_back(Event::Closed { conn, token: 0, reason });
    }

    pub fn advance(&mut self, now: Instant) {
        self.now = now;
        if now - self.counted >= COUNTERS_AGE_MAX {
            self.forget_counters();
        }
    }

    pub fn transmit(&mut self, _now: Instant) {
        self.client.get_mut().flush();
    }

    pub fn before_sleep(&mut self) -> bool {
        self.events.is_empty() && self.leaving.is_none() && self.client.get_mut().before_sleep()
    }

    pub fn after_sleep(&mut self, readable: bool) {
        self.client.get_mut().after_sleep(readable);
    }

    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
