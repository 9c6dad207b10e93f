//! The engine at the other end of a channel, as a handler's shard sees it. It has the methods and events of
//! an engine in the shard's own thread.
//!
//! Ranges of sources, which an engine in the same thread sends without copying, are copied here piece by
//! piece as send space appears.

use super::client::{Client, ClientEvent};
use super::client_memory::OFFERS_MAX;
use super::control::{ChannelReply, ChannelRequest, ControlPath, StackCounters, UdpRequest, UnorderedReply};
use crate::error::Error;
use crate::wait::EventFd;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel_stack::error::{ConnectError, ListenError, OptionError, RecvError, SendError, Stale};
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::handle::{Conn, LinkId, Listener, UdpHandle};
use ginnel_stack::multicast::SourceFilter;
use ginnel_stack::options::{ConnectOptions, ListenOptions, TcpInfo, TcpOption};
use ginnel_stack::priority::{self, BEST_EFFORT, ClassedQueue, QueueClass};
use ginnel_stack::stream_position::StreamPosition;
use ginnel_stack::tcp::TcpStats;
use ginnel_stack::tcp::UnorderedBytes;
use ginnel_stack::tcp::source::{Source, SourceId, SourceTable};
use ginnel_stack::tcp::state::State;
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{Datagram, UdpError, UdpExtendedError, UdpOptions, UdpSendParams};
use ginnel_stack::wire::tcp::SeqNumber;
use rustix::fd::BorrowedFd;
use std::cell::{OnceCell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;

/// Ranges of sources that may be queued on a connection.
const RANGES_MAX: usize = 64;
/// Bytes of a source copied at a time.
const COPY_BYTES: usize = 16 << 10;
/// Length of a listener's queue at which its credits are withdrawn. They are restored when the handler has
/// accepted half of the connections.
const ACCEPT_QUEUE_MAX: usize = 16;
/// Maximum age of the stack's counters while the shard runs.
const COUNTERS_AGE_MAX: Duration = Duration::from_millis(100);

/// Bytes of a source that wait for send space.
#[derive(Clone, Copy, Debug)]
struct SourceRange {
    source: SourceId,
    offset: u64,
    len: u64,
}

/// The request that is executed after the queued ranges were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum DeferredClose {
    #[default]
    Nothing,
    Shutdown,
    Close,
}

/// State of a connection that only this side knows.
#[derive(Debug, Default)]
struct RemoteConn {
    conn: Option<Conn>,
    token: u32,
    /// True if the handler has accepted it; before that no events are reported.
    is_accepted: bool,
    /// Urgent bytes stay in the stream (`SO_OOBINLINE`).
    oob_inline: bool,
    ranges: VecDeque<SourceRange>,
    deferred_close: DeferredClose,
    /// True if a send was short.
    is_send_blocked: bool,
    /// True if the handler has closed it, so unread bytes do not delay the report of its end.
    is_closed_locally: bool,
    has_fin: bool,
    close_reason: Option<CloseReason>,
    /// An event that reports its end was queued.
    is_close_reported: bool,
    /// The place in the stream, once bytes were taken before bytes which precede them.
    position: Option<Box<StreamPosition>>,
}

impl RemoteConn {
    /// Returns how many bytes that follow `skipped` unread ones can be read before the first bytes that were
    /// taken early.
    fn len_to_early(&self, skipped: usize) -> usize {
        let until_early = self.position.as_ref().and_then(|position| position.until_early());
        until_early
            .map_or(usize::MAX, |len| usize::try_from(len).unwrap_or(usize::MAX).saturating_sub(skipped))
    }
}

/// State of a listener.
struct RemoteListener {
    listener: Listener,
    queue: ClassedQueue<Conn>,
    /// It has no credits, because its queue is full.
    is_full: bool,
    /// Its handler was told that an administrator has closed it.
    is_destroyed: bool,
}

/// A handler's view of the engine at the other end of a channel.
pub(crate) struct RemoteEngine {
    /// In a cell because methods that take `&self` send requests through it, too.
    client: RefCell<Client>,
    wake: Arc<EventFd>,
    events: VecDeque<Event>,
    conns: Vec<RemoteConn>,
    /// Indexed by the channel's listener number.
    listeners: Vec<Option<RemoteListener>>,
    /// Generation of the listener that was opened last.
    generation: u32,
    sources: SourceTable,
    /// A connection whose end was delivered: the next event makes its handle stale.
    releasing: Option<Conn>,
    /// Requested on first use, and then kept for [`COUNTERS_AGE_MAX`].
    counters: OnceCell<StackCounters>,
    /// The counters that were requested before `counters`.
    last_counters: StackCounters,
    counters_at: Instant,
    now: Instant,
    scratch: Box<[u8; COPY_BYTES]>,
    /// Class of priority of the event that was returned last.
    event_class: u8,
    /// True if a connection may receive unordered.
    is_unordered_used: bool,
}

impl RemoteEngine {
    pub fn new(client: Client, now: Instant) -> Self {
        let (sockets, wake) = (client.sockets_max(), client.wake_event());
        Self {
            wake,
            client: RefCell::new(client),
            events: VecDeque::new(),
            conns: (0..sockets).map(|_| RemoteConn::default()).collect(),
            listeners: Vec::new(),
            generation: 0,
            sources: SourceTable::new(),
            releasing: None,
            counters: OnceCell::new(),
            last_counters: StackCounters::default(),
            counters_at: now,
            now,
            scratch: Box::new([0; COPY_BYTES]),
            event_class: BEST_EFFORT,
            is_unordered_used: false,
        }
    }

    fn call(&self, request: ChannelRequest) -> Result<ChannelReply, Error> {
        self.client.borrow_mut().call(request)
    }

    fn conn(&self, conn: Conn) -> Option<&RemoteConn> {
        self.conns.get(conn.index() as usize).filter(|entry| entry.conn == Some(conn))
    }

    fn conn_mut(&mut self, conn: Conn) -> Option<&mut RemoteConn> {
        self.conns.get_mut(conn.index() as usize).filter(|entry| entry.conn == Some(conn))
    }

    fn open_conn(&mut self, conn: Conn, accepted: bool) {
        self.conns[conn.index() as usize] =
            RemoteConn { conn: Some(conn), is_accepted: accepted, ..RemoteConn::default() };
    }

    /// Replaces the path that requests take.
    pub fn set_control(&mut self, control: Box<dyn ControlPath>) {
        self.client.get_mut().set_control(control);
        self.forget_counters();
    }

    /// Returns the descriptor that wakes the application.
    pub fn wake(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    pub fn is_ready(&self) -> bool {
        self.client.borrow().is_ready()
    }

    /// Returns the stack's counters, at most `COUNTERS_AGE_MAX` old.
    pub fn counters(&self) -> &StackCounters {
        self.counters.get_or_init(|| match self.call(ChannelRequest::Counters) {
            Ok(ChannelReply::Counters(counters)) => *counters,
            // The shard is gone.
            _ => self.last_counters.clone(),
        })
    }

    fn forget_counters(&mut self) {
        self.counters_at = self.now;
        if let Some(counters) = self.counters.take() {
            self.last_counters = counters;
        }
    }

    pub fn tcp_stats(&self) -> &TcpStats {
        &self.counters().tcp
    }

    pub fn listen(&mut self, local: SocketAddr, options: ListenOptions) -> Result<Listener, ListenError> {
        self.listen_as(ChannelRequest::Listen(local, options))
    }

    /// Listens, but on no port that another shard or worker listens on.
    pub fn listen_exclusive(
        &mut self,
        local: SocketAddr,
        options: ListenOptions,
    ) -> Result<Listener, ListenError> {
        self.listen_as(ChannelRequest::ListenExclusive(local, options))
    }

    fn listen_as(&mut self, request: ChannelRequest) -> Result<Listener, ListenError> {
        if let ChannelRequest::Listen(_, options) | ChannelRequest::ListenExclusive(_, options) = &request {
            self.is_unordered_used |= options.socket.unordered;
        }
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
        let (queue, is_full, is_destroyed) = (ClassedQueue::default(), false, false);
        self.listeners[number] = Some(RemoteListener { listener, queue, is_full, is_destroyed });
        Ok(listener)
    }

    fn listener_mut(&mut self, listener: Listener) -> Option<&mut RemoteListener> {
        let listening = self.listeners.get_mut(listener.index() as usize)?.as_mut()?;
        (listening.listener == listener).then_some(listening)
    }

    pub fn unlisten(&mut self, listener: Listener) -> bool {
        let Some(listening) = self.listener_mut(listener) else { return false };
        let unaccepted = core::mem::take(&mut listening.queue).take_all();
        self.listeners[listener.index() as usize] = None;
        let client = self.client.get_mut();
        for conn in unaccepted {
            // Connections in the queue of a closed listener are reset.
            let _ = client.abort(conn);
            let _ = client.release(conn);
            self.conns[conn.index() as usize].conn = None;
        }
        client.unlisten(listener.index()).is_ok()
    }

    pub fn accept(&mut self, listener: Listener) -> Option<Conn> {
        self.accept_with_class(listener).map(|(conn, _)| conn)
    }

    /// As [`RemoteEngine::accept`]: the stack has applied the shares of the classes when it offered
    /// connections.
    pub fn accept_incoming(&mut self, listener: Listener) -> Option<Conn> {
        self.accept(listener)
    }

    /// As [`RemoteEngine::accept`]. Returns the class of the connection, too.
    pub fn accept_with_class(&mut self, listener: Listener) -> Option<(Conn, u8)> {
        let listening = self.listener_mut(listener)?;
        let (conn, class) = listening.queue.pop_by_class()?;
        if listening.is_full && listening.queue.len() <= ACCEPT_QUEUE_MAX / 2 {
            listening.is_full = false;
            self.client.get_mut().set_credits(listener.index(), OFFERS_MAX as u32);
        }
        let readable = self.buffered(conn) > 0;
        let has_unordered = self.has_unordered(conn);
        let entry = self.conn_mut(conn)?;
        entry.is_accepted = true;
        let (fin, close_reason) = (entry.has_fin, entry.close_reason);
        let urgent = self.client.get_mut().oob_events(conn) != 0;
        // Events before the accept were not reported.
        if urgent {
            self.push_urgent(conn);
        }
        if has_unordered {
            self.events.push_back(Event::Unordered { conn });
        }
        if readable {
            self.events.push_back(Event::Readable { conn });
        }
        if fin {
            self.events.push_back(Event::PeerClosed { conn });
        }
        if let Some(reason) = close_reason {
            self.push_closed(conn, reason);
        }
        Some((conn, class))
    }

    pub fn connect(
        &mut self,
        _now: Instant,
        remote: SocketAddr,
        options: &ConnectOptions,
    ) -> Result<Conn, ConnectError> {
        self.is_unordered_used |= options.socket.unordered;
        let conn = match self.client.get_mut().connect(remote, *options) {
            Ok(conn) => conn,
            Err(Error::Connect(_, error)) => return Err(error),
            Err(_) => return Err(ConnectError::NetUnreachable),
        };
        self.open_conn(conn, true);
        Ok(conn)
    }

    pub fn send_deferred_syn(&mut self, _now: Instant, conn: Conn) {
        let client = self.client.get_mut();
        if matches!(client.syn_data_max(conn), Ok(Some(_))) {
            // If the shard is gone, its end is reported otherwise.
            let _ = client.send_deferred_syn(conn);
        }
    }

    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let entry = self.conn_mut(conn).ok_or(SendError::Stale)?;
        if entry.deferred_close != DeferredClose::Nothing {
            return Err(SendError::Closed);
        }
        if !entry.ranges.is_empty() {
            entry.is_send_blocked |= !bytes.is_empty();
            return Ok(0);
        }
        let count = self.client.get_mut().send(conn, bytes)?;
        if count < bytes.len() {
            self.conns[conn.index() as usize].is_send_blocked = true;
        }
        Ok(count)
    }

    /// Sends a message, which takes its place in the engine's queue at once.
    pub fn send_message(&mut self, conn: Conn, bytes: &[u8], priority: u8) -> Result<(), SendError> {
        let entry = self.conn_mut(conn).ok_or(SendError::Stale)?;
        if entry.deferred_close != DeferredClose::Nothing {
            return Err(SendError::Closed);
        }
        let sent = match entry.ranges.is_empty() {
            true => self.client.get_mut().send_message(conn, bytes.to_vec(), priority),
            false => Err(SendError::Full),
        };
        if sent == Err(SendError::Full) {
            self.conns[conn.index() as usize].is_send_blocked = true;
        }
        sent
    }

    pub fn send_source(
        &mut self,
        conn: Conn,
        source: SourceId,
        offset: u64,
        len: u64,
    ) -> Result<(), SendError> {
        let entry = self.conn(conn).ok_or(SendError::Stale)?;
        let source_len = self.sources.get(source).ok_or(SendError::InvalidSource)?.len();
        if offset.checked_add(len).is_none_or(|end| end > source_len) {
            return Err(SendError::InvalidSource);
        }
        if entry.deferred_close != DeferredClose::Nothing {
            return Err(SendError::Closed);
        }
        // Fails if the connection cannot send any more.
        self.client.get_mut().send(conn, &[])?;
        let entry = &mut self.conns[conn.index() as usize];
        if entry.ranges.len() == RANGES_MAX {
            entry.is_send_blocked = true;
            return Err(SendError::Full);
        }
        if len > 0 {
            self.sources.add_ref(source);
            entry.ranges.push_back(SourceRange { source, offset, len });
            self.send_ranges(conn);
        }
        Ok(())
    }

    /// Copies ranges of sources as far as there is send space, then does what was requested after them.
    /// Returns whether nothing is queued any more.
    fn send_ranges(&mut self, conn: Conn) -> bool {
        let Some(entry) = self.conns.get_mut(conn.index() as usize).filter(|s| s.conn == Some(conn)) else {
            return false;
        };
        let client = self.client.get_mut();
        while let Some(range) = entry.ranges.front_mut() {
            let count = usize::try_from(range.len).unwrap_or(usize::MAX).min(COPY_BYTES);
            let bytes = &mut self.scratch[..count];
            self.sources.get_referenced(range.source).fill(range.offset, bytes);
            // If nothing can be sent any more, the event that ends the connection follows.
            let sent = client.send(conn, bytes).unwrap_or(count);
            range.offset += sent as u64;
            range.len -= sent as u64;
            if range.len > 0 && sent < count {
                return false;
            }
            if range.len == 0 {
                let done = range.source;
                entry.ranges.pop_front();
                self.sources.release_ref(done);
            }
        }
        // Only a stale handle could be refused.
        let _ = match entry.deferred_close {
            DeferredClose::Nothing => Ok(()),
            DeferredClose::Shutdown => client.shutdown_write(conn),
            DeferredClose::Close => client.close(conn),
        };
        entry.deferred_close = DeferredClose::Nothing;
        true
    }

    /// Discards ranges that will never be sent.
    fn drop_ranges(&mut self, conn: Conn) {
        let Some(entry) = self.conn_mut(conn) else { return };
        for range in core::mem::take(&mut entry.ranges) {
            self.sources.release_ref(range.source);
        }
    }

    pub fn send_urgent(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        let entry = self.conn_mut(conn).ok_or(SendError::Stale)?;
        if entry.deferred_close != DeferredClose::Nothing {
            return Err(SendError::Closed);
        }
        if !entry.ranges.is_empty() {
            entry.is_send_blocked |= !bytes.is_empty();
            return Ok(0);
        }
        let count = match self.client.get_mut().send_urgent(conn, bytes) {
            // The engine has not taken all that was written before.
            Err(SendError::Full) => 0,
            result => result?,
        };
        if count < bytes.len() {
            self.conns[conn.index() as usize].is_send_blocked = true;
        }
        Ok(count)
    }

    fn has_unordered(&self, conn: Conn) -> bool {
        priority::COMPILED && self.is_unordered_used && self.client.borrow().has_unordered(conn) == Ok(true)
    }

    /// Takes bytes that arrived before bytes which precede them, by a request.
    pub fn recv_unordered(&mut self, conn: Conn, out: &mut [u8]) -> Result<Option<UnorderedBytes>, Stale> {
        let Self { client, conns, .. } = self;
        let entry = conns.get_mut(conn.index() as usize).filter(|entry| entry.conn == Some(conn));
        let (client, entry) = (client.get_mut(), entry.ok_or(Stale::Handle)?);
        if !client.has_unordered(conn)? || out.is_empty() {
            return Ok(None);
        }
        let read = client.read_position(conn)?;
        let max = u32::try_from(out.len()).unwrap_or(u32::MAX);
        // If the shard is gone, so are the bytes.
        let Ok(UnorderedReply::Early { offset, bytes }) = client.recv_unordered(conn, max) else {
            return Ok(None);
        };
        // Before the first such bytes, positions in the region are offsets in the stream.
        let position = entry.position.get_or_insert_with(|| Box::new(StreamPosition::starting_at(read)));
        let ahead = usize::try_from(offset.saturating_sub(position.next())).unwrap_or(usize::MAX);
        let taken = UnorderedBytes { ahead, len: bytes.len().min(out.len()) };
        out[..taken.len].copy_from_slice(&bytes[..taken.len]);
        position.on_unordered(taken);
        Ok(Some(taken))
    }

    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        let entry = self.conn(conn).ok_or(RecvError::Stale)?;
        if entry.oob_inline {
            return Err(RecvError::WouldBlock);
        }
        self.client.borrow_mut().recv_urgent(conn)
    }

    /// Returns the limits of the next read after urgent data: how many bytes to drop first, and how many may
    /// be read after those. A read stops before the urgent byte, and the next one skips the urgent byte.
    fn read_limits(&self, conn: Conn) -> (usize, usize) {
        let Some(entry) = self.conn(conn) else { return (0, usize::MAX) };
        let mut client = self.client.borrow_mut();
        match client.urgent_mark(conn).ok().flatten() {
            None => (0, usize::MAX),
            Some(mark) if mark.unread_before > 0 => (0, mark.unread_before),
            Some(_) => {
                let has_bytes = client.readable(conn).is_ok_and(|count| count > 0);
                (usize::from(has_bytes && !entry.oob_inline), usize::MAX)
            }
        }
    }

    /// Queues the event that tells the handler where the urgent byte is.
    fn push_urgent(&mut self, conn: Conn) {
        let client = self.client.get_mut();
        if let Ok(Some(mark)) = client.urgent_mark(conn)
            && let Ok(read) = client.read_position(conn)
        {
            let at = SeqNumber(read.wrapping_add(mark.unread_before as u64) as u32);
            self.push_event(conn, Event::Urgent { conn, at, byte: mark.byte });
        }
    }

    pub fn urgent_ahead(&self, conn: Conn, at: SeqNumber) -> i32 {
        self.client.borrow().read_position(conn).map_or(-1, |read| at - SeqNumber(read as u32))
    }

    pub fn peek(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let entry = self.conn(conn).ok_or(RecvError::Stale)?;
        let (mut events_seen, mut limits) = (0, (0, usize::MAX));
        let count = loop {
            let (skip_len, max) = limits;
            let mut max_len = out.len().min(max);
            if priority::COMPILED && self.is_unordered_used {
                max_len = max_len.min(entry.len_to_early(skip_len));
            }
            let count = self.client.borrow().peek(conn, skip_len, &mut out[..max_len])?;
            // Checked after the bytes were copied: urgent bytes are announced before they arrive.
            let now = self.client.borrow().oob_events(conn);
            if now == events_seen {
                break count;
            }
            (events_seen, limits) = (now, self.read_limits(conn));
        };
        if count == 0 && !entry.has_fin && !out.is_empty() { Err(RecvError::WouldBlock) } else { Ok(count) }
    }

    pub fn has_readable(&self, conn: Conn) -> bool {
        !matches!(self.peek(conn, &mut [0]), Ok(0) | Err(RecvError::WouldBlock))
    }

    pub fn buffered(&self, conn: Conn) -> usize {
        self.client.borrow().readable(conn).unwrap_or(0)
    }

    pub fn skip(&mut self, conn: Conn, count: usize) -> Result<(), Stale> {
        self.conn(conn).ok_or(Stale::Handle)?;
        let (skip_len, max) = match self.client.get_mut().oob_events(conn) {
            0 => (0, usize::MAX),
            _ => self.read_limits(conn),
        };
        let consumed = skip_len + count.min(max);
        self.client.get_mut().consume(conn, consumed).map_err(|_| Stale::Handle)?;
        if priority::COMPILED
            && self.is_unordered_used
            && let Some(position) = self.conn_mut(conn).and_then(|entry| entry.position.as_mut())
        {
            position.on_data(consumed);
        }
        if let Some(reason) = self.conn(conn).and_then(|entry| entry.close_reason) {
            self.push_closed(conn, reason);
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
        let entry = self.conn_mut(conn).ok_or(Stale::Handle)?;
        if entry.ranges.is_empty() {
            return self.client.get_mut().shutdown_write(conn);
        }
        if entry.deferred_close == DeferredClose::Nothing {
            entry.deferred_close = DeferredClose::Shutdown;
        }
        Ok(())
    }

    pub fn close(&mut self, conn: Conn) -> Result<(), Stale> {
        let entry = self.conn_mut(conn).ok_or(Stale::Handle)?;
        entry.is_closed_locally = true;
        if entry.ranges.is_empty() {
            return self.client.get_mut().close(conn);
        }
        entry.deferred_close = DeferredClose::Close;
        Ok(())
    }

    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        self.conn(conn).ok_or(Stale::Handle)?;
        self.drop_ranges(conn);
        self.client.get_mut().abort(conn)
    }

    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        self.is_unordered_used |= option == TcpOption::Unordered(true);
        if let (TcpOption::OobInline(on), Some(entry)) = (option, self.conn_mut(conn)) {
            entry.oob_inline = on;
        }
        self.client.get_mut().set_option(conn, option)
    }

    /// Returns the local and the peer's address, also of a closed connection until its handle is stale.
    pub fn endpoints(&self, conn: Conn) -> Option<[SocketAddr; 2]> {
        self.conn(conn)?;
        self.client.borrow().endpoints(conn).ok()
    }

    pub fn info(&self, conn: Conn) -> Option<TcpInfo> {
        self.conn(conn)?;
        self.client.borrow_mut().info(conn).ok().map(|info| *info)
    }

    pub fn state(&self, conn: Conn) -> Option<State> {
        self.info(conn).map(|info| info.state)
    }

    pub fn token(&self, conn: Conn) -> Option<u32> {
        self.conn(conn).map(|entry| entry.token)
    }

    pub fn set_token(&mut self, conn: Conn, token: u32) -> bool {
        let Some(entry) = self.conn_mut(conn) else { return false };
        entry.token = token;
        true
    }

    fn udp_call(&self, request: UdpRequest) -> Result<ChannelReply, UdpError> {
        self.call(ChannelRequest::Udp(request)).map_err(|_| UdpError::Stale)
    }

    fn udp_call_done(&self, request: UdpRequest) -> Result<(), UdpError> {
        match self.udp_call(request)? {
            ChannelReply::Udp(result) => result,
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_bind(&mut self, local: SocketAddr, options: UdpOptions) -> Result<UdpHandle, UdpError> {
        match self.udp_call(UdpRequest::Bind(local, options))? {
            ChannelReply::UdpBind(result) => {
                let (socket, generation) = result?;
                self.client.get_mut().track(socket, generation);
                self.open_conn(Conn::new(socket, generation), false);
                Ok(UdpHandle::new(socket, generation))
            }
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_connect(&mut self, _now: Instant, socket: UdpHandle, to: SocketAddr) -> Result<(), UdpError> {
        self.udp_call_done(UdpRequest::Connect(socket, to))
    }

    pub fn udp_send_to(
        &mut self,
        _now: Instant,
        socket: UdpHandle,
        to: Option<SocketAddr>,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.udp_call_done(UdpRequest::Send(socket, to, data.to_vec()))
    }

    pub fn udp_reply(&mut self, socket: UdpHandle, to: &Datagram, data: &[u8]) -> Result<(), UdpError> {
        self.udp_call_done(UdpRequest::Reply(socket, *to, data.to_vec()))
    }

    pub fn udp_recv_from(&mut self, socket: UdpHandle, out: &mut [u8]) -> Result<Datagram, UdpError> {
        match self.udp_call(UdpRequest::Recv(socket))? {
            ChannelReply::UdpRecv(result) => {
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
        sending: &UdpSendParams,
        data: &[u8],
    ) -> Result<(), UdpError> {
        self.udp_call_done(UdpRequest::SendWith(socket, *sending, data.to_vec()))
    }

    pub fn udp_take_report(
        &mut self,
        socket: UdpHandle,
        out: &mut [u8],
    ) -> Result<UdpExtendedError, UdpError> {
        match self.udp_call(UdpRequest::TakeExtendedError(socket))? {
            ChannelReply::UdpExtendedError(result) => {
                let (report, quoted) = *result?;
                out.iter_mut().zip(&quoted).for_each(|(target, byte)| *target = *byte);
                Ok(report)
            }
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_path_mtu(&mut self, _now: Instant, socket: UdpHandle) -> Result<u16, UdpError> {
        match self.udp_call(UdpRequest::PathMtu(socket))? {
            ChannelReply::UdpPathMtu(result) => result,
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_set_options(&mut self, socket: UdpHandle, options: UdpOptions) -> Result<(), UdpError> {
        self.udp_call_done(UdpRequest::SetOptions(socket, options))
    }

    pub fn udp_set_membership(
        &mut self,
        socket: UdpHandle,
        link: LinkId,
        group: IpAddr,
        filter: Option<SourceFilter>,
    ) -> Result<(), UdpError> {
        self.udp_call_done(UdpRequest::SetMembership(socket, link.0, group, filter))
    }

    pub fn udp_local(&mut self, socket: UdpHandle) -> Result<SocketAddr, UdpError> {
        match self.udp_call(UdpRequest::Local(socket))? {
            ChannelReply::UdpLocal(result) => result,
            _ => Err(UdpError::Stale),
        }
    }

    pub fn udp_close(&mut self, socket: UdpHandle) -> Result<(), UdpError> {
        let conn = Conn::new(socket.index(), socket.generation());
        self.udp_call_done(UdpRequest::Close(socket))?;
        self.conns[conn.index() as usize].conn = None;
        // The stack's end has replied, so the socket is owned.
        let _ = self.client.get_mut().release(conn);
        Ok(())
    }

    /// Returns the next event. If the call before returned the end of a connection, its slot is freed first,
    /// as by the stack's method.
    pub fn next_event(&mut self) -> Option<Event> {
        if let Some(conn) = self.releasing.take() {
            self.drop_ranges(conn);
            self.conns[conn.index() as usize].conn = None;
            // The client owned it until now.
            let _ = self.client.get_mut().release(conn);
        }
        while self.events.is_empty() {
            let client = self.client.get_mut();
            let event = client.next_event();
            self.event_class = client.event_class();
            self.handle_event(event?);
        }
        let mut event = self.events.pop_front();
        if let Some(Event::Closed { conn, token, .. }) = &mut event {
            self.releasing = Some(*conn);
            // The handler may have changed the token since the event was queued.
            *token = self.token(*conn).unwrap_or(0);
        }
        event
    }

    /// Returns the class of priority of the event that was returned last; best effort after
    /// [`end_events`](Self::end_events).
    pub fn event_class(&self) -> u8 {
        self.event_class
    }

    /// Reports a listener again that may have more connections in its queue.
    pub fn report_incoming_again(&mut self, listener: Listener) {
        self.events.push_back(Event::Incoming { listener });
    }

    /// Ends the delivery of events: what follows is of best effort.
    pub fn end_events(&mut self) {
        self.event_class = BEST_EFFORT;
    }

    pub fn events_waiting(&self) -> usize {
        // Entries in the doorbell ring are counted only once they are processed.
        self.events.len()
    }

    /// Returns the class of a connection of which the client has reported that it was accepted; `None` if the
    /// stack has no priorities.
    fn class_of_accepted(&mut self) -> Option<QueueClass> {
        let client = self.client.get_mut();
        let lower_share_percent = client.lower_share_percent()?;
        Some(QueueClass { class: client.event_class(), lower_share_percent })
    }

    fn handle_event(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Accepted { conn, listener } => {
                self.open_conn(conn, false);
                let class = self.class_of_accepted();
                match self.listeners.get_mut(listener as usize).and_then(Option::as_mut) {
                    Some(listening) => {
                        listening.queue.push_back(conn, class);
                        if listening.queue.len() == ACCEPT_QUEUE_MAX {
                            listening.is_full = true;
                            self.client.get_mut().set_credits(listener, 0);
                        }
                        self.events.push_back(Event::Incoming { listener: listening.listener });
                    }
                    None => {
                        // The connection was accepted at the moment at which the listener was closed.
                        let client = self.client.get_mut();
                        let _ = client.abort(conn);
                        let _ = client.release(conn);
                        self.conns[conn.index() as usize].conn = None;
                    }
                }
            }
            ClientEvent::ListenersDestroyed => {
                let client = self.client.get_mut();
                for (number, listening) in (0..).zip(&mut self.listeners) {
                    if let Some(listening) = listening
                        && client.is_listener_destroyed(number)
                        && !core::mem::replace(&mut listening.is_destroyed, true)
                    {
                        let listener = listening.listener;
                        self.events.push_back(Event::ListenerDestroyed { listener });
                    }
                }
            }
            // Only reported to clients that accept explicitly.
            ClientEvent::Offered { .. } => {}
            ClientEvent::Connected { conn } => self.events.push_back(Event::Connected { conn }),
            ClientEvent::Readable { conn } => {
                if self.has_unordered(conn) {
                    self.push_event(conn, Event::Unordered { conn });
                }
                self.push_event(conn, Event::Readable { conn });
            }
            ClientEvent::Acked { conn, bytes } => self.push_event(conn, Event::Acked { conn, bytes }),
            ClientEvent::Urgent { conn } => {
                self.push_urgent(conn);
            }
            ClientEvent::Datagrams { conn } => {
                let socket = UdpHandle::new(conn.index(), conn.generation());
                self.events.push_back(Event::UdpReadable { socket });
            }
            ClientEvent::Writable { conn } => {
                if self.send_ranges(conn)
                    && let Some(entry) = self.conn_mut(conn)
                    && core::mem::take(&mut entry.is_send_blocked)
                {
                    self.push_event(conn, Event::Writable { conn });
                }
            }
            ClientEvent::PeerClosed { conn } => {
                let Some(entry) = self.conn_mut(conn) else { return };
                entry.has_fin = true;
                self.push_event(conn, Event::PeerClosed { conn });
            }
            ClientEvent::Closed { conn, reason } => {
                let Some(entry) = self.conn_mut(conn) else { return };
                entry.close_reason = Some(reason);
                self.push_closed(conn, reason);
            }
        }
    }

    /// Queues an event, unless the connection is not accepted yet (`accept` queues its events) or its end is
    /// queued.
    fn push_event(&mut self, conn: Conn, event: Event) {
        if self.conn(conn).is_some_and(|entry| entry.is_accepted && !entry.is_close_reported) {
            self.events.push_back(event);
        }
    }

    /// Queues the end of a connection, unless bytes received before an orderly end still have to be read.
    fn push_closed(&mut self, conn: Conn, reason: CloseReason) {
        let unread = reason == CloseReason::Normal && self.buffered(conn) > 0;
        let Some(entry) = self.conn_mut(conn) else { return };
        if !entry.is_accepted || entry.is_close_reported || unread && !entry.is_closed_locally {
            return;
        }
        entry.is_close_reported = true;
        self.events.push_back(Event::Closed { conn, token: 0, reason });
    }

    pub fn advance(&mut self, now: Instant) {
        self.now = now;
        if now - self.counters_at >= COUNTERS_AGE_MAX {
            self.forget_counters();
        }
    }

    pub fn transmit(&mut self, _now: Instant) {
        self.client.get_mut().flush();
    }

    pub fn before_sleep(&mut self) -> bool {
        self.events.is_empty() && self.releasing.is_none() && self.client.get_mut().before_sleep()
    }

    pub fn after_sleep(&mut self, readable: bool) {
        self.client.get_mut().after_sleep(readable);
    }

    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
