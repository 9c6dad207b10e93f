//! The application's end of a channel.

mod datagram_peek;
mod description;
pub(crate) mod filters;
mod inherit;
mod offers;
mod preallocated;
mod prioritized;
mod readiness;
mod send_blocked;
mod shared_streams;
mod unordered;
mod urgent_and_udp;

pub use super::socket_ref::{SocketState, SocketStatus};
pub use datagram_peek::PeekedDatagram;
pub use description::DescriptionKey;
pub use inherit::ChannelMapping;
pub use shared_streams::SharedStreams;
pub use urgent_and_udp::ReceivedDatagram;

use super::buffers::{Fault, RecvBuffer, SendBuffer};
use super::client_memory::{ClientMemory, FALLBACK_CREDIT};
use super::control::{ChannelReply, ChannelRequest, ControlPath, LinkInfo};
use super::doorbells::{NOTIFIED, Notifier, NotifyQueue, RELEASED};
use super::region::{Direction, Region};
use super::sleep_state;
use super::socket::{close_reason, request, state};
use super::socket_ref::SocketRef;
use super::sync::Ordering;
use crate::error::Error;
use crate::wait::{self, EventFd};
use core::net::SocketAddr;
use core::ops::Range;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use ginnel_stack::error::{OptionError, RecvError, SendError, Stale};
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::{ConnectOptions, ListenOptions, TcpInfo, TcpOption};
use ginnel_stack::priority;
use offers::ReceivedOffers;
use prioritized::PrioritizedEvents;
use rustix::fd::{BorrowedFd, OwnedFd};
use send_blocked::SendBlockedFlags;
use std::collections::VecDeque;
use std::sync::Arc;

/// Upper limit of the links that a stack may report: link numbers have 16 bits. A stack that reports more is
/// not valid.
const LINKS_MAX: usize = 1 << 16;

/// An event on a listener, a connection or a UDP socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// The client accepted a connection.
    Accepted {
        /// The connection.
        conn: Conn,
        /// Number of the connection's listener.
        listener: u32,
    },
    /// A connection can be accepted. Only reported after [`Client::accept_explicitly`].
    Offered {
        /// Number of the listener.
        listener: u32,
    },
    /// An administrator has closed listeners of the domain: see [`Client::is_listener_destroyed`]. They get
    /// no connections any more; the client still has to release its own.
    ListenersDestroyed,
    /// A connection that this client opened is established.
    Connected {
        /// The connection.
        conn: Conn,
    },
    /// Bytes can be read, or taken before bytes which precede them: see [`Client::has_unordered`].
    Readable {
        /// The connection.
        conn: Conn,
    },
    /// There is send space again after a short write.
    Writable {
        /// The connection.
        conn: Conn,
    },
    /// The peer acknowledged bytes. Only reported for connections with ack events switched on.
    Acked {
        /// The connection.
        conn: Conn,
        /// Bytes acknowledged since the last event of this kind.
        bytes: u32,
    },
    /// The peer announced urgent data.
    Urgent {
        /// The connection.
        conn: Conn,
    },
    /// A UDP socket has datagrams or an error.
    Datagrams {
        /// The socket.
        conn: Conn,
    },
    /// The peer sent FIN. Bytes received before it may still have to be read.
    PeerClosed {
        /// The connection.
        conn: Conn,
    },
    /// The connection is closed. Received bytes can still be read; [`Client::release`] frees the socket.
    Closed {
        /// The connection.
        conn: Conn,
        /// Why it closed.
        reason: CloseReason,
    },
}

/// Descriptors and number of a client, to be sent to the process that becomes this client.
#[derive(Debug)]
pub struct ClientParts {
    /// The memory file of the region.
    pub region: OwnedFd,
    /// The memory file of this client.
    pub memory: OwnedFd,
    /// Wakes the stack.
    pub stack_wake: OwnedFd,
    /// Wakes the client.
    pub client_wake: OwnedFd,
    /// The client's number.
    pub client: u32,
}

/// State that a client keeps of a socket.
#[derive(Clone, Copy, Debug, Default)]
struct ClientSocket {
    /// Generation of the socket; `None` if the client does not own it.
    generation: Option<u32>,
    /// State bits that were reported as events.
    reported_state: u32,
    /// Position after the last byte received when the socket was last reported readable.
    reported_written: u64,
    /// Bytes acknowledged, and the number of out-of-band events, when they were last reported.
    reported_acked: u64,
    reported_oob_events: u32,
}

/// The notifying side of the ring to the stack.
enum StackNotifier {
    /// Used by the client's thread alone.
    Exclusive(Notifier),
    /// Used by all threads of the process, which may share its sockets with other processes.
    Shared(Arc<SharedStreams>),
}

/// An application's end of a channel. One thread uses it at a time. If it was attached through the
/// [broker](crate::broker), other threads may use its [streams](Client::streams) meanwhile.
pub struct Client {
    pub(super) region: Arc<Region>,
    memory: Arc<ClientMemory>,
    number: usize,
    to_stack: StackNotifier,
    /// With [`StackNotifier::Shared`]: this client has notified since it last checked whether the stack has
    /// to be woken.
    has_notified: bool,
    from_stack: NotifyQueue,
    /// Wakes the stack.
    stack_wake: Arc<EventFd>,
    /// Wakes this client.
    wake: Arc<EventFd>,
    control: Box<dyn ControlPath>,
    sockets: Vec<ClientSocket>,
    /// Sockets on which a write was short.
    blocked: Arc<SendBlockedFlags>,
    events: VecDeque<ClientEvent>,
    /// The slot at which the search for the next preallocated socket begins.
    next_preallocated: usize,
    /// Connections offered to a client that accepts explicitly.
    explicit_offers: Option<Box<ReceivedOffers>>,
    is_detached: bool,
    /// True if the client has inherited sockets by fork(2) or execve(2), and has not yet compared them with
    /// the region.
    must_rescan: bool,
    /// Number of destroyed listeners of the domain that were reported.
    reported_destroyed: u32,
    /// Notifications by class, once a stack with priorities has sent one.
    prioritized: Option<Box<PrioritizedEvents>>,
}

impl Client {
    pub(super) fn new(
        region: Arc<Region>,
        memory: Arc<ClientMemory>,
        number: usize,
        stack: Arc<EventFd>,
        wake: Arc<EventFd>,
        control: Box<dyn ControlPath>,
    ) -> Self {
        let notifier = StackNotifier::Exclusive(memory.to_stack().notifier());
        let blocked = Arc::new(SendBlockedFlags::new(region.sockets()));
        Self {
            region,
            memory,
            number,
            to_stack: notifier,
            has_notified: false,
            // The stack may have notified this client since it was admitted.
            from_stack: NotifyQueue::default(),
            stack_wake: stack,
            wake,
            control,
            sockets: Vec::new(),
            blocked,
            events: VecDeque::new(),
            next_preallocated: 0,
            explicit_offers: None,
            is_detached: false,
            must_rescan: false,
            reported_destroyed: 0,
            prioritized: None,
        }
    }

    /// Opens a client of a stack in another process.
    ///
    /// # Errors
    /// Returns an error if the region or the client's memory cannot be mapped or is not valid.
    pub fn open(parts: ClientParts, control: Box<dyn ControlPath>) -> Result<Self, Error> {
        let ClientParts { region, memory, stack_wake, client_wake, client } = parts;
        let region = Region::open(region).map_err(|e| Error::io("region of the channel", e))?;
        let number = client as usize;
        if number >= region.clients() {
            return Err(Error::application("channel: the region has no client with this number"));
        }
        let event =
            |fd| EventFd::from_fd(fd).map(Arc::new).map_err(|e| Error::io("wake-ups of the channel", e));
        let (stack, wake) = (event(stack_wake)?, event(client_wake)?);
        Self::with_shared_streams(region, &memory, number, stack, wake, control)
    }

    fn with_shared_streams(
        region: Arc<Region>,
        memory: &OwnedFd,
        number: usize,
        stack: Arc<EventFd>,
        wake: Arc<EventFd>,
        control: Box<dyn ControlPath>,
    ) -> Result<Self, Error> {
        let memory = Self::open_memory(&region, memory)?;
        let mut client = Self::new(region, memory, number, stack, wake, control);
        client.share_streams();
        Ok(client)
    }

    fn open_memory(region: &Region, memory: &OwnedFd) -> Result<Arc<ClientMemory>, Error> {
        ClientMemory::open(memory, region.sockets(), region.listeners())
            .map_err(|e| Error::io("memory of a client", e))
    }

    /// Lets other threads use the streams of this client's connections.
    fn share_streams(&mut self) {
        self.to_stack = StackNotifier::Shared(Arc::new(SharedStreams::new(
            self.region.clone(),
            self.memory.clone(),
            self.number,
            self.stack_wake.clone(),
            self.blocked.clone(),
        )));
    }

    /// Returns the streams of this client's connections, for use by other threads. `None` in the stack's own
    /// process, where a client belongs to one thread.
    pub fn streams(&self) -> Option<Arc<SharedStreams>> {
        match &self.to_stack {
            StackNotifier::Shared(streams) => Some(streams.clone()),
            StackNotifier::Exclusive(_) => None,
        }
    }

    pub(super) fn call(&mut self, request: ChannelRequest) -> Result<ChannelReply, Error> {
        self.control.call(self.number, request)
    }

    /// Returns whether the stack can be used. Before that, its IPv6 addresses may still be tentative (RFC
    /// 4862 §5.4) and cannot be listened on.
    pub fn is_ready(&self) -> bool {
        self.region.is_ready()
    }

    /// Opens a listener and accepts up to `credits` connections at a time. Returns the listener's number.
    ///
    /// # Errors
    /// Returns the stack's error, or an error if the shard is gone.
    pub fn listen(&mut self, local: SocketAddr, options: ListenOptions, credits: u32) -> Result<u32, Error> {
        self.listen_as(ChannelRequest::Listen(local, options), credits)
    }

    /// Opens a listener with a given request.
    pub(super) fn listen_as(&mut self, request: ChannelRequest, credits: u32) -> Result<u32, Error> {
        match self.call(request)? {
            ChannelReply::Listen(Ok(listener)) => {
                self.set_credits(listener, credits);
                Ok(listener)
            }
            ChannelReply::Listen(Err(error)) => Err(error),
            ChannelReply::SetFilter(Err(error)) => Err(Error::Filter(error)),
            _ => Err(unexpected_reply()),
        }
    }

    /// Joins a listener that another client opened, and accepts up to `credits` of its connections at a time.
    ///
    /// # Errors
    /// Returns an error if there is no listener of this number, or if the shard is gone.
    pub fn join(&mut self, listener: u32, credits: u32) -> Result<(), Error> {
        match self.call(ChannelRequest::Join(listener))? {
            ChannelReply::Join(Ok(())) => {
                self.set_credits(listener, credits);
                Ok(())
            }
            ChannelReply::Join(Err(_)) => {
                Err(Error::application("channel: there is no listener with this number"))
            }
            _ => Err(unexpected_reply()),
        }
    }

    /// Sets how many connections of a listener this client is willing to accept now. A connection that was
    /// offered and not accepted goes to other clients only after `channel.offer_ms`.
    pub fn set_credits(&mut self, listener: u32, credits: u32) {
        let Some(word) = self.memory.credits(listener) else { return };
        word.store(credits, Ordering::Release);
        self.notify(self.memory.doorbell_of_listener(listener), NOTIFIED);
    }

    /// Sets credits of lower priority: connections are offered to this client only if no other client has
    /// credit. For a worker that prefers another shard.
    pub fn set_fallback_credits(&mut self, listener: u32, credits: u32) {
        self.set_credits(listener, credits.min(FALLBACK_CREDIT - 1) | FALLBACK_CREDIT);
    }

    /// Makes the stack offer connections to this client again. The stack suspends offers to a client that did
    /// not accept in time until that client notifies it, and a busy client may have nothing else to notify
    /// the stack of.
    #[inline]
    pub(super) fn resume_offers(&mut self) {
        let suspended = self.memory.offers_suspended();
        if suspended.load(Ordering::Relaxed) != 0 {
            suspended.store(0, Ordering::Relaxed);
            // Any notification will do.
            self.notify(0, NOTIFIED);
        }
    }

    /// Stops accepting connections of a listener. The last client to do so closes the listener: connections
    /// that no client accepted are reset.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn unlisten(&mut self, listener: u32) -> Result<(), Error> {
        self.call(ChannelRequest::Unlisten(listener)).map(|_| ())
    }

    /// Stops accepting connections of a listener, like [`unlisten`](Self::unlisten), but need not wait for
    /// the reply. The request is done when a later request to any shard of the stack is answered.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn post_unlisten(&mut self, listener: u32) -> Result<(), Error> {
        self.control.post(self.number, ChannelRequest::Unlisten(listener))
    }

    /// Opens a connection; [`ClientEvent::Connected`] or [`ClientEvent::Closed`] follows.
    ///
    /// # Errors
    /// Returns the stack's error, or an error if the shard is gone.
    pub fn connect(&mut self, remote: SocketAddr, options: ConnectOptions) -> Result<Conn, Error> {
        match self.call(ChannelRequest::Connect(remote, options))? {
            ChannelReply::Connect(Ok((socket, generation))) => {
                self.track(socket, generation);
                Ok(Conn::new(socket, generation))
            }
            ChannelReply::Connect(Err(error)) => Err(error),
            _ => Err(unexpected_reply()),
        }
    }

    /// Sets an option of a connection. The stack applies it when it processes the notification; there is no
    /// request.
    ///
    /// # Errors
    /// Returns [`OptionError::Invalid`] for an invalid value, [`OptionError::Stale`] if the handle is stale
    /// or the connection is closed.
    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        if !option.is_valid() {
            return Err(OptionError::Invalid);
        }
        self.socket_ref(conn).map_err(|_| OptionError::Stale)?.set_option(option)?;
        self.notify(conn.index(), NOTIFIED);
        Ok(())
    }

    /// Returns the links of the stack, in the stack's order.
    ///
    /// # Errors
    /// Returns an error if the shard is gone.
    pub fn links(&mut self) -> Result<Vec<LinkInfo>, Error> {
        let mut links = Vec::new();
        loop {
            // Cannot truncate: `LINKS_MAX` bounds the count.
            match self.call(ChannelRequest::Links(links.len() as u32))? {
                ChannelReply::Links(more) if more.is_empty() => return Ok(links),
                ChannelReply::Links(more) if links.len() + more.len() <= LINKS_MAX => links.extend(more),
                _ => return Err(unexpected_reply()),
            }
        }
    }

    /// Returns what the stack knows about a connection.
    ///
    /// # Errors
    /// Returns an error if the handle is stale, the connection is closed, or the shard is gone.
    pub fn info(&mut self, conn: Conn) -> Result<Box<TcpInfo>, Stale> {
        self.tracked(conn)?;
        match self.call(ChannelRequest::Info(conn.index())) {
            Ok(ChannelReply::Info(result)) => result,
            _ => Err(Stale::Handle),
        }
    }

    /// Replaces the path that requests take.
    pub(super) fn set_control(&mut self, control: Box<dyn ControlPath>) {
        self.control = control;
    }

    /// Returns the number of sockets in the region.
    pub(super) fn sockets_max(&self) -> usize {
        self.region.sockets()
    }

    /// Returns the entry of a socket; `None` if there is no socket of this number.
    fn socket_entry(&mut self, socket: u32) -> Option<&mut ClientSocket> {
        let index = socket as usize;
        if index >= self.sockets.len() && index < self.sockets_max() {
            self.sockets.resize(index + 1, ClientSocket::default());
        }
        self.sockets.get_mut(index)
    }

    /// Returns the descriptor that wakes this client.
    pub(crate) fn wake_event(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    /// Records that the client owns this socket, as the stack has confirmed.
    pub(super) fn track(&mut self, socket: u32, generation: u32) {
        if let Some(entry) = self.socket_entry(socket) {
            *entry = ClientSocket { generation: Some(generation), ..ClientSocket::default() };
            self.blocked.clear(socket);
            // The stack may have notified of changes before the socket was tracked.
            self.report_changes(Conn::new(socket, generation));
        }
    }

    /// Returns how many out-of-band events the stack has counted on a connection; 0 if the handle is stale.
    #[inline]
    pub(super) fn oob_events(&self, conn: Conn) -> u32 {
        self.tracked(conn).map_or(0, |_| self.region.socket(conn.index()).oob_events.load(Ordering::Relaxed))
    }

    /// Returns the position up to which a socket's bytes were read, including the headers of datagrams.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn read_position(&self, conn: Conn) -> Result<u64, Stale> {
        Ok(self.socket_ref(conn)?.read_position())
    }

    #[inline]
    fn tracked(&self, conn: Conn) -> Result<&ClientSocket, Stale> {
        let entry = self.sockets.get(conn.index() as usize).ok_or(Stale::Handle)?;
        if entry.generation == Some(conn.generation()) { Ok(entry) } else { Err(Stale::Handle) }
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn peer(&self, conn: Conn) -> Result<SocketAddr, Stale> {
        self.tracked(conn)?;
        Ok(self.region.socket(conn.index()).endpoint(1))
    }

    /// Returns the local and the peer's address.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn endpoints(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        self.tracked(conn)?;
        Ok(self.region.socket(conn.index()).endpoints())
    }

    /// Returns a reference through which the bytes of a connection are accessed.
    #[inline]
    fn socket_ref(&self, conn: Conn) -> Result<SocketRef<'_>, Stale> {
        self.tracked(conn)?;
        let shared_by = matches!(self.to_stack, StackNotifier::Shared(_)).then_some(self.number);
        Ok(SocketRef::new(&self.region, conn.index(), shared_by))
    }

    /// Returns how many bytes can be read.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn readable(&self, conn: Conn) -> Result<usize, Stale> {
        Ok(self.socket_ref(conn)?.readable())
    }

    /// Notes that a call failed because another owner has had the socket's lock for long: it was stopped, or
    /// waits for a CPU. The caller may wait for an event before it tries again, so this one is due at once.
    #[cold]
    pub(super) fn report_busy(&mut self, event: ClientEvent) {
        if !self.events.contains(&event) {
            self.events.push_back(event);
        }
    }

    fn reported_if_busy<T>(&mut self, conn: Conn, read: Result<T, RecvError>) -> Result<T, RecvError> {
        if matches!(read, Err(RecvError::WouldBlock)) {
            self.report_busy(ClientEvent::Readable { conn });
        }
        read
    }

    #[cold]
    fn report_if_full(&mut self, conn: Conn, error: SendError) -> SendError {
        if matches!(error, SendError::Full) {
            self.report_busy(ClientEvent::Writable { conn });
        }
        error
    }

    /// Copies received bytes, beginning `skip` bytes after the read position, without consuming them. Returns
    /// how many.
    ///
    /// # Errors
    /// Returns [`RecvError::Stale`] if the handle is stale, and [`RecvError::WouldBlock`] if a process that
    /// shares the socket has had its lock for long.
    pub fn peek(&self, conn: Conn, skip: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        self.socket_ref(conn).map_err(|_| RecvError::Stale)?.peek(skip, out)
    }

    /// Consumes `count` received bytes, or fewer if fewer were received. Returns how many.
    ///
    /// # Errors
    /// As [`Client::recv`].
    pub fn consume(&mut self, conn: Conn, count: usize) -> Result<usize, RecvError> {
        let consumed = self.socket_ref(conn).map_err(|_| RecvError::Stale)?.consume(count);
        let (count, must_notify) = self.reported_if_busy(conn, consumed)?;
        if must_notify {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    /// Reads and consumes received bytes. Returns `Ok(0)` if there are none.
    ///
    /// # Errors
    /// As [`Client::peek`]; after [`RecvError::WouldBlock`], [`ClientEvent::Readable`] follows.
    pub fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let received = self.socket_ref(conn).map_err(|_| RecvError::Stale)?.recv(out);
        let (count, must_notify) = self.reported_if_busy(conn, received)?;
        if must_notify {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    /// Reads at most `max` bytes into buffers, beginning at byte `skip` of their concatenation, and consumes
    /// them. None of the next `max` bytes may be urgent. The inner result is an error if a buffer cannot be
    /// written; then nothing is consumed.
    ///
    /// # Errors
    /// As [`Client::recv`].
    pub fn recv_at_most<B: RecvBuffer>(
        &mut self,
        conn: Conn,
        buffers: &mut [B],
        skip: usize,
        max: usize,
    ) -> Result<Result<usize, Fault>, RecvError> {
        let socket_ref = self.socket_ref(conn).map_err(|_| RecvError::Stale)?;
        let received = socket_ref.recv_at_most(buffers, skip, max);
        let received = self.reported_if_busy(conn, received)?;
        if let Ok((_, true)) = received {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(received.map(|(count, _)| count))
    }

    /// As [`peek`](Self::peek), to offset `at` of a buffer and `len` bytes at most. The inner result is an
    /// error if the buffer cannot be written.
    ///
    /// # Errors
    /// As [`Client::recv`].
    pub fn peek_into<B: RecvBuffer>(
        &mut self,
        conn: Conn,
        skip: usize,
        buffer: &mut B,
        at: usize,
        len: usize,
    ) -> Result<Result<usize, Fault>, RecvError> {
        let peeked = self.socket_ref(conn).map_err(|_| RecvError::Stale)?.peek_into(skip, buffer, at, len);
        self.reported_if_busy(conn, peeked)
    }

    /// Reads into buffers, beginning at byte `skip` of their concatenation. Returns the connection's state
    /// and the number of bytes read. The number is `None`, and nothing is consumed, if urgent data was ever
    /// announced on the connection: reads then have to heed the [`urgent_mark`](Self::urgent_mark). After a
    /// fault in a buffer nothing is consumed, either.
    ///
    /// # Errors
    /// As [`Client::recv`].
    #[inline]
    pub fn recv_into<B: RecvBuffer>(
        &mut self,
        conn: Conn,
        buffers: &mut [B],
        skip: usize,
    ) -> Result<(SocketState, Result<Option<usize>, Fault>), RecvError> {
        let socket_ref = self.socket_ref(conn).map_err(|_| RecvError::Stale)?;
        let state = self.with_stack_liveness(socket_ref.state());
        let taken = match socket_ref.recv_into(buffers, skip) {
            Ok(taken) => taken,
            Err(error) => return self.reported_if_busy(conn, Err(error)),
        };
        if let Ok(Some((_, true))) = taken {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok((state, taken.map(|taken| taken.map(|(count, _)| count))))
    }

    /// Returns whether [`flush`](Self::flush) may have to wake the stack.
    #[inline]
    pub fn needs_flush(&self) -> bool {
        self.has_notified || matches!(self.to_stack, StackNotifier::Exclusive(_))
    }

    /// Writes as many bytes as there is space for, and returns how many. After a short write, and after
    /// [`SendError::Full`], [`ClientEvent::Writable`] follows.
    ///
    /// # Errors
    /// Returns an error if the handle is stale, the connection is closed, its write side is shut down, or the
    /// stack is gone, and [`SendError::Full`] if a process that shares the socket has had its lock for long.
    #[inline]
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        if self.is_stack_gone() {
            return Err(SendError::Closed);
        }
        let socket_ref = self.socket_ref(conn).map_err(|_| SendError::Stale)?;
        let sent = socket_ref.send(bytes, self.blocked.flag(conn.index()));
        let count = match sent {
            Ok(count) => count,
            Err(error) => return Err(self.report_if_full(conn, error)),
        };
        // The stack copies bytes out of a lent buffer only for writers that wait for space, so it has to
        // learn of this one.
        if count > 0 || !bytes.is_empty() && socket_ref.has_loan() {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    /// Writes as many as there is space for of the bytes in a range of the buffers' concatenation, as
    /// [`send`](Self::send) does. The inner result is an error if a buffer cannot be read: then nothing is
    /// written. After a short write the call tries to write the rest; a fault in that attempt ends the call,
    /// which returns the number of bytes written before.
    ///
    /// # Errors
    /// As [`Client::send`].
    #[inline]
    pub fn send_from<B: SendBuffer>(
        &mut self,
        conn: Conn,
        buffers: &[B],
        range: Range<usize>,
    ) -> Result<Result<usize, Fault>, SendError> {
        if self.is_stack_gone() {
            return Err(SendError::Closed);
        }
        let socket_ref = self.socket_ref(conn).map_err(|_| SendError::Stale)?;
        let is_empty = range.is_empty();
        let sent = socket_ref.send_from(buffers, range, self.blocked.flag(conn.index()));
        let count = match sent {
            Ok(Ok(count)) => count,
            Ok(Err(Fault)) => return Ok(Err(Fault)),
            Err(error) => return Err(self.report_if_full(conn, error)),
        };
        // As in `send`.
        if count > 0 || !is_empty && socket_ref.has_loan() {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(Ok(count))
    }

    /// Marks the end of what was written on a connection as the end of a record (`MSG_EOR`): later bytes
    /// share no segment with it. If the stack has not yet reached the end of the previous record, this asks
    /// the stack first; a record end that the stack still has not reached is forgotten.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn end_record(&mut self, conn: Conn) -> Result<(), Stale> {
        if self.socket_ref(conn)?.has_pending_record() {
            let _ = self.sendable_within(conn, 0, u32::MAX, u32::MAX);
        }
        self.socket_ref(conn)?.end_record();
        self.notify(conn.index(), NOTIFIED);
        Ok(())
    }

    /// Separates bytes that were written from those that are written later and held back (`MSG_MORE`,
    /// `TCP_CORK`): the former are sent as they would have been without the hold. Called before the option
    /// is set.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn begin_hold(&mut self, conn: Conn) -> Result<(), Stale> {
        self.socket_ref(conn)?.begin_hold();
        Ok(())
    }

    /// Asks the stack how many of `len` bytes (at most 2^30) may be written until `unsent_max` bytes are
    /// unsent, counting what the stack would send meanwhile, or `unacked_max` bytes are unacknowledged. If
    /// the result is less than `len`, [`ClientEvent::Writable`] follows when bytes were acknowledged, or were
    /// sent if [`await_send_space`](Self::await_send_space) requested it.
    ///
    /// # Errors
    /// Returns an error if the handle is stale, the connection is closed, or the shard is gone.
    pub fn sendable_within(
        &mut self,
        conn: Conn,
        len: u32,
        unsent_max: u32,
        unacked_max: u32,
    ) -> Result<u32, Stale> {
        self.tracked(conn)?;
        self.flush();
        match self.call(ChannelRequest::SendableWithin(conn.index(), len, (unsent_max, unacked_max))) {
            Ok(ChannelReply::SendableWithin(result)) => result,
            _ => Err(Stale::Handle),
        }
    }

    /// Claims that the outgoing bytes are in another ring.
    #[cfg(all(test, not(loom)))]
    pub(super) fn forge_ring(&self, conn: Conn, number: u32) {
        let area = self.region.socket(conn.index());
        area.positions(Direction::Outgoing).forge_ring(number);
    }

    fn request(&mut self, conn: Conn, bits: u32) -> Result<(), Stale> {
        self.socket_ref(conn)?.request(bits);
        self.notify(conn.index(), NOTIFIED);
        Ok(())
    }

    /// Sends FIN after what was written; receiving continues.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::SHUTDOWN)
    }

    /// Declares that later bytes will not be read. While this end still sends, nothing changes; bytes that
    /// arrive after its FIN reset the connection, as on Linux (`tcp_rcv_state_process`).
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn shutdown_read(&mut self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::SHUTDOWN_READ)
    }

    /// Closes both directions, for all owners: what was written is still sent. Received bytes that were not
    /// read make it a reset, as on Linux. [`ClientEvent::Closed`] follows.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn close(&mut self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::CLOSE)
    }

    /// Resets the connection. [`ClientEvent::Closed`] follows.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::ABORT)
    }

    /// Gives up ownership of the connection and makes the handle stale. The last owner to do so closes the
    /// connection.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn release(&mut self, conn: Conn) -> Result<(), Stale> {
        self.tracked(conn)?;
        self.sockets[conn.index() as usize].generation = None;
        self.notify(conn.index(), NOTIFIED | RELEASED);
        Ok(())
    }

    #[inline]
    pub(super) fn notify(&mut self, number: u32, why: u8) {
        match &mut self.to_stack {
            StackNotifier::Exclusive(notifier) => {
                notifier.notify(self.memory.to_stack(), number, why);
                self.region.notified().insert(self.number);
            }
            StackNotifier::Shared(streams) => {
                self.has_notified = true;
                streams.notify(number, why);
            }
        }
    }

    /// Wakes the stack if this client has notified it and it sleeps. Call this after each batch: until then
    /// the stack may sleep despite the notifications. Other threads that use the [streams](Client::streams)
    /// [flush](SharedStreams::flush) their own notifications; only [`Client::before_sleep`] covers theirs,
    /// too.
    #[inline]
    pub fn flush(&mut self) {
        match &mut self.to_stack {
            StackNotifier::Exclusive(notifier) => {
                if notifier.take_notified() && needs_wakeup(&self.region, &self.memory) {
                    self.stack_wake.signal();
                }
            }
            StackNotifier::Shared(streams) => {
                if core::mem::take(&mut self.has_notified) {
                    streams.flush();
                }
            }
        }
    }

    /// Returns the number of turns that the shard has begun. Wraps around.
    pub fn turns(&self) -> u32 {
        self.region.turns()
    }

    /// Wakes the shard, which then performs a turn.
    pub fn wake_shard(&self) {
        self.stack_wake.signal();
    }

    /// Returns whether the shard sleeps and has taken all notifications of this client. Wakes the shard if it
    /// has left its CPU to this client, which waits for it.
    pub fn is_shard_quiet(&self) -> bool {
        if !self.region.notified().contains(self.number) {
            return self.region.stack_sleep().is_asleep();
        }
        if sleep_state::end_yield(self.memory.has_cpu(), self.region.stack_sleep()) {
            self.stack_wake.signal();
        }
        false
    }

    /// Returns the next event; `None` if there is none.
    #[inline]
    pub fn next_event(&mut self) -> Option<ClientEvent> {
        // Callers repeat the call until there is no event, so this case has to be cheap.
        let may_have_one = !self.events.is_empty()
            || priority::COMPILED && self.prioritized.is_some()
            || self.must_rescan
            || !self.from_stack.is_empty(self.memory.to_client());
        if may_have_one { self.find_event() } else { None }
    }

    fn find_event(&mut self) -> Option<ClientEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            if priority::COMPILED && self.prioritized.is_some() {
                return self.next_event_by_class();
            }
            // The stack does not corrupt its rings.
            let Some((socket, reasons)) = self.from_stack.pop(self.memory.to_client()).ok().flatten() else {
                if self.from_stack.is_scanning() {
                    self.report_destroyed_listeners();
                    continue;
                }
                if !self.must_rescan {
                    return None;
                }
                self.rescan();
                continue;
            };
            if priority::COMPILED && reasons > NOTIFIED {
                self.start_priorities(socket, reasons);
                continue;
            }
            match self.sockets.get(socket as usize).and_then(|entry| entry.generation) {
                Some(generation) => {
                    let conn = Conn::new(socket, generation);
                    if self.has_only_new_bytes(conn) {
                        return Some(ClientEvent::Readable { conn });
                    }
                    self.report_changes(conn);
                }
                // Another process of the domain may have written any number there.
                None if (socket as usize) < self.sockets_max() => {
                    if let Some(event) = self.check_offer(socket) {
                        return Some(event);
                    }
                }
                None => {}
            }
        }
    }

    /// Reports if listeners were destroyed. The stack notifies of that by an overflow of the ring, so that
    /// other notifications cost nothing more.
    #[cold]
    pub(super) fn report_destroyed_listeners(&mut self) {
        let destroyed = self.region.destroyed_listeners().load(Ordering::Acquire);
        if core::mem::replace(&mut self.reported_destroyed, destroyed) != destroyed {
            self.events.push_back(ClientEvent::ListenersDestroyed);
        }
    }

    /// Handles the most frequent notification: bytes can be read and nothing else has changed. Returns true
    /// in this case, and records that it was reported, so that no event passes through the queue.
    #[inline]
    fn has_only_new_bytes(&mut self, conn: Conn) -> bool {
        let index = conn.index() as usize;
        let (entry, area) = (&mut self.sockets[index], self.region.socket(conn.index()));
        let is_all = area.state.load(Ordering::Acquire) & !entry.reported_state == 0
            && !self.blocked.is_set(conn.index())
            && area.acked.load(Ordering::Relaxed) == entry.reported_acked
            && area.oob_events.load(Ordering::Relaxed) == entry.reported_oob_events;
        let written = area.positions(Direction::Incoming).written();
        is_all && core::mem::replace(&mut entry.reported_written, written) != written
    }

    /// Queues an event for each difference between the socket's state in the region and what was reported.
    fn report_changes(&mut self, conn: Conn) {
        let socket = conn.index();
        let entry = &mut self.sockets[socket as usize];
        let area = self.region.socket(socket);
        let now = area.state.load(Ordering::Acquire);
        let new = now & !entry.reported_state;
        if new != 0 {
            entry.reported_state |= now;
        }
        if new & state::CONNECTED != 0 {
            self.events.push_back(ClientEvent::Connected { conn });
        }
        let written = area.positions(Direction::Incoming).written();
        if written != entry.reported_written {
            entry.reported_written = written;
            self.events.push_back(ClientEvent::Readable { conn });
        }
        if self.blocked.is_set(socket)
            && let socket_ref = SocketRef::new(&self.region, socket, None)
            && socket_ref.send_space() > 0
            && socket_ref.is_below_low_water()
        {
            self.blocked.clear(socket);
            self.events.push_back(ClientEvent::Writable { conn });
        }
        let acked = area.acked.load(Ordering::Relaxed);
        if acked != entry.reported_acked {
            let bytes = u32::try_from(acked.wrapping_sub(entry.reported_acked)).unwrap_or(u32::MAX);
            entry.reported_acked = acked;
            self.events.push_back(ClientEvent::Acked { conn, bytes });
        }
        let oob_events = area.oob_events.load(Ordering::Relaxed);
        if oob_events != entry.reported_oob_events {
            entry.reported_oob_events = oob_events;
            let datagrams = now & state::UDP != 0;
            self.events.push_back(match datagrams {
                true => ClientEvent::Datagrams { conn },
                false => ClientEvent::Urgent { conn },
            });
        }
        if priority::COMPILED && area.unordered.load(Ordering::Relaxed) != 0 {
            self.events.push_back(ClientEvent::Readable { conn });
        }
        if new & state::FIN != 0 {
            self.events.push_back(ClientEvent::PeerClosed { conn });
        }
        if new & state::CLOSED != 0
            && let Some(reason) = close_reason(now)
        {
            self.events.push_back(ClientEvent::Closed { conn, reason });
        }
    }

    /// Returns the descriptor that becomes readable when an event occurs while the client sleeps.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Prepares to sleep on [`Client::wake_fd`]. Returns false if an event is pending: the client must not
    /// sleep then.
    pub fn before_sleep(&mut self) -> bool {
        self.resume_offers();
        // Covers other threads that have notified and not yet flushed.
        self.has_notified = true;
        self.flush();
        let are_queues_empty = self.prioritized.as_ref().is_none_or(|prioritized| prioritized.is_empty());
        let sleeps = self.events.is_empty() && are_queues_empty && !self.must_rescan && {
            self.memory.sleep().begin_sleep();
            self.from_stack.is_empty(self.memory.to_client())
        };
        if sleeps && sleep_state::end_yield(self.memory.has_cpu(), self.region.stack_sleep()) {
            self.stack_wake.signal();
        }
        sleeps
    }

    /// Ends a sleep, or an attempt for which [`Client::before_sleep`] returned false. `readable`:
    /// [`Client::wake_fd`] is or may be readable.
    pub fn after_sleep(&mut self, readable: bool) {
        self.memory.set_cpu(rustix::thread::sched_getcpu());
        if self.memory.sleep().end_sleep() {
            self.wake.clear();
        } else if readable {
            match self.to_stack {
                // The signal of a notification that was already received.
                StackNotifier::Exclusive(_) => self.wake.clear(),
                StackNotifier::Shared(_) => {
                    if self.wake.drain_and_check_hangup() {
                        self.note_end();
                    }
                }
            }
        }
    }

    /// Checks whether a stack in another process is gone. A client that never sleeps learns of it only
    /// through this call.
    pub fn check_stack_alive(&mut self) {
        if matches!(self.to_stack, StackNotifier::Shared(_)) && self.wake.is_hung_up() {
            self.note_end();
        }
    }

    fn note_end(&mut self) {
        if let StackNotifier::Shared(streams) = &self.to_stack
            && !streams.is_stack_gone.swap(true, Relaxed)
        {
            self.region.announce_end();
            self.close_all();
        }
    }

    /// Ends a sleep on the edge-triggered readiness of [`Client::wake_fd`], after which the descriptor need
    /// not be drained. Returns whether the stack has woken the client.
    pub fn after_epoll_wait(&mut self) -> bool {
        self.memory.set_cpu(rustix::thread::sched_getcpu());
        self.memory.sleep().end_sleep()
    }

    /// Drains the wake descriptor after edge-triggered sleeps.
    pub fn clear_wake(&self) {
        self.wake.clear();
    }

    /// Returns whether a stack in another process was found to be gone. All requests to it fail.
    #[inline]
    pub fn is_stack_gone(&self) -> bool {
        matches!(&self.to_stack, StackNotifier::Shared(streams) if streams.is_stack_gone.load(Relaxed))
    }

    /// Returns whether a stack in another process is said to be gone: [`Client::check_stack_alive`] finds out
    /// whether it is. This costs no system call. The process that supervises the stack says so, or another
    /// client that has found out.
    #[inline]
    pub fn is_stack_said_to_be_gone(&self) -> bool {
        self.region.is_said_to_have_ended()
    }

    /// Reports all connections as closed because the stack is gone.
    fn close_all(&mut self) {
        for (socket, entry) in self.sockets.iter_mut().enumerate() {
            let Some(generation) = entry.generation.filter(|_| entry.reported_state & state::CLOSED == 0)
            else {
                continue;
            };
            entry.reported_state |= state::CLOSED;
            let conn = Conn::new(socket as u32, generation);
            self.events.push_back(ClientEvent::Closed { conn, reason: CloseReason::Reset });
        }
    }

    /// Sleeps in the kernel until an event occurs or the timeout expires.
    ///
    /// # Errors
    /// Returns the error of a failed system call.
    pub fn sleep(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        if self.before_sleep() {
            let wake = self.wake.as_fd();
            wait::sleep([wake, wake], &[], timeout).map_err(|e| Error::io("sleep", e))?;
        }
        self.after_sleep(true);
        Ok(())
    }

    /// Gives up everything that the client owns. What no other client owns is closed.
    ///
    /// # Errors
    /// Returns an error if the shard, and with it everything, is gone.
    pub fn detach(mut self) -> Result<(), Error> {
        self.is_detached = true;
        self.call(ChannelRequest::Detach).map(|_| ())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.is_detached {
            // If the shard is gone, there is nothing to release.
            let _ = self.call(ChannelRequest::Detach);
        }
    }
}

/// Returns whether a client that has notified the stack has to wake it. If the stack yielded its CPU to the
/// client, the client wakes it when it goes to sleep itself, not before.
#[inline]
fn needs_wakeup(region: &Region, memory: &ClientMemory) -> bool {
    // Each notification ended with a read-modify-write of a word that the stack modifies before its sleep.
    memory.has_cpu().load(Ordering::Relaxed) == 0 && region.stack_sleep().claim_wakeup()
}

fn unexpected_reply() -> Error {
    Error::application("channel: the reply does not match the request")
}
