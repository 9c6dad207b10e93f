//! The application's end of a channel.

mod description;
mod inherit;
mod offers;
mod preallocated;
mod readiness;
mod send_blocked;
mod shared_streams;
mod urgent_and_udp;

pub use super::socket_ref::{SocketState, SocketStatus};
pub use description::DescriptionKey;
pub use inherit::ChannelMapping;
pub use shared_streams::SharedStreams;
pub use urgent_and_udp::ReceivedDatagram;

use super::control::{ChannelReply, ChannelRequest, ControlPath, LinkInfo};
use super::doorbells::{NOTIFIED, Notifier, NotifyQueue, RELEASED};
use super::region::{Direction, FALLBACK_CREDIT, Region};
use super::socket::{close_reason, request, state};
use super::socket_ref::SocketRef;
use super::sync::Ordering;
use crate::error::Error;
use crate::wait::{self, EventFd};
use core::net::SocketAddr;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use ginnel_stack::error::{OptionError, RecvError, SendError, Stale};
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::{ConnectOptions, ListenOptions, TcpInfo, TcpOption};
use offers::ReceivedOffers;
use rustix::fd::{BorrowedFd, OwnedFd};
use send_blocked::SendBlockedFlags;
use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::sync::Arc;

/// Links are numbered with so many bits: who tells of more is no stack.
const LINKS_MAX: usize = 1 << 16;

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// A connection to the listener of this number was taken.
    Accepted {
        /// Which connection.
        conn: Conn,
        /// Number of its listener.
        listener: u32,
    },
    /// There is a connection to accept. Only after [`Client::accept_by_hand`].
    Offered {
        /// Number of its listener.
        listener: u32,
    },
    /// A connection that this client opened is established.
    Connected {
        /// Which connection.
        conn: Conn,
    },
    /// There are bytes to read.
    Readable {
        /// Which connection.
        conn: Conn,
    },
    /// There is room again after a write was cut short.
    Writable {
        /// Which connection.
        conn: Conn,
    },
    /// The peer acknowledged bytes. Only with ack events switched on.
    Acked {
        /// Which connection.
        conn: Conn,
        /// How many, since the last such event.
        bytes: u32,
    },
    /// The peer announced urgent data.
    Urgent {
        /// Which connection.
        conn: Conn,
    },
    /// There are datagrams, or an error, on a UDP socket.
    Datagrams {
        /// Which socket.
        conn: Conn,
    },
    /// The peer's FIN follows what there is to read.
    PeerClosed {
        /// Which connection.
        conn: Conn,
    },
    /// The connection is over. What was received can still be read; [`Client::release`] gives it back.
    Closed {
        /// Which connection.
        conn: Conn,
        /// Why.
        reason: CloseReason,
    },
}

/// What a client is made of: to be sent to another process.
#[derive(Debug)]
pub struct ClientParts {
    /// The memory of the channel.
    pub region: OwnedFd,
    /// Wakes the stack.
    pub stack_wake: OwnedFd,
    /// Wakes the client.
    pub client_wake: OwnedFd,
    /// The client's number.
    pub client: u32,
}

/// What the client knows of a socket.
#[derive(Clone, Copy, Debug, Default)]
struct ClientSocket {
    /// Of the connection; `None` if the client does not hold it.
    generation: Option<u32>,
    /// Bits of the state that were reported.
    reported_state: u32,
    /// How many bytes had come when readable was last reported.
    reported_written: u64,
    /// Bytes that were acknowledged, and notices, when they were last reported.
    reported_acked: u64,
    reported_oob_events: u32,
}

/// Who rings the stack.
enum StackNotifier {
    /// This thread alone.
    Exclusive(Notifier),
    /// All threads of the process, which may share its sockets with others.
    Shared(Arc<SharedStreams>),
}

/// An application's end of a channel. Used by one thread at a time; if it came through the [door](crate::door), other threads may use its
/// [streams](Client::streams) meanwhile.
pub struct Client {
    pub(super) region: Arc<Region>,
    number: usize,
    to_stack: StackNotifier,
    /// This client has rung since it asked last whether the stack has to be woken, if other threads ring as well.
    has_notified: bool,
    from_stack: NotifyQueue,
    /// The stack's, to wake it.
    stack_wake: Arc<EventFd>,
    /// Ours, to be woken.
    wake: Arc<EventFd>,
    control: Box<dyn ControlPath>,
    sockets: Vec<ClientSocket>,
    /// Sockets on which a write was cut short.
    blocked: Arc<SendBlockedFlags>,
    events: VecDeque<ClientEvent>,
    /// Where the next socket at hand is looked for.
    next_preallocated: usize,
    /// What is offered, if offers are not taken at once.
    explicit_offers: Option<Box<ReceivedOffers>>,
    is_detached: bool,
    /// A child that has not looked yet at what it inherited.
    must_rescan: bool,
}

impl Client {
    pub(super) fn new(
        region: Arc<Region>,
        number: usize,
        stack: Arc<EventFd>,
        wake: Arc<EventFd>,
        control: Box<dyn ControlPath>,
    ) -> Self {
        let up = StackNotifier::Exclusive(region.to_stack(number).notifier());
        let blocked = Arc::new(SendBlockedFlags::new(region.sockets()));
        Self::assemble(region, number, up, stack, wake, control, blocked)
    }

    fn assemble(
        region: Arc<Region>,
        number: usize,
        to_stack: StackNotifier,
        stack_wake: Arc<EventFd>,
        wake: Arc<EventFd>,
        control: Box<dyn ControlPath>,
        blocked: Arc<SendBlockedFlags>,
    ) -> Self {
        // The stack may have rung since it knows of this client. Bells that nobody answers would be the last for their sockets.
        let from_stack = region.to_client(number).notify_queue_from_start();
        Self {
            region,
            number,
            to_stack,
            has_notified: false,
            from_stack,
            stack_wake,
            wake,
            control,
            sockets: Vec::new(),
            blocked,
            events: VecDeque::new(),
            next_preallocated: 0,
            explicit_offers: None,
            is_detached: false,
            must_rescan: false,
        }
    }

    /// A client of a stack in another process.
    ///
    /// # Errors
    /// The region cannot be mapped, or is not what it should be.
    pub fn open(parts: ClientParts, control: Box<dyn ControlPath>) -> Result<Self, Error> {
        let region = Region::open(parts.region).map_err(|e| Error::io("region of the channel", e))?;
        let number = parts.client as usize;
        if number >= region.clients() {
            return Err(Error::application("channel: the region has no client of this number"));
        }
        let event = |fd| Arc::new(EventFd::from_fd(fd));
        let (stack, wake) = (event(parts.stack_wake), event(parts.client_wake));
        Ok(Self::with_shared_streams(region, number, stack, wake, control))
    }

    fn with_shared_streams(
        region: Arc<Region>,
        number: usize,
        stack: Arc<EventFd>,
        wake: Arc<EventFd>,
        control: Box<dyn ControlPath>,
    ) -> Self {
        let blocked = Arc::new(SendBlockedFlags::new(region.sockets()));
        let streams = Arc::new(SharedStreams::new(region.clone(), number, stack.clone(), blocked.clone()));
        Self::assemble(region, number, StackNotifier::Shared(streams), stack, wake, control, blocked)
    }

    /// The streams of its connections, for other threads. `None` in the stack's own process, where a client is one thread's.
    pub fn streams(&self) -> Option<Arc<SharedStreams>> {
        match &self.to_stack {
            StackNotifier::Shared(streams) => Some(streams.clone()),
            StackNotifier::Exclusive(_) => None,
        }
    }

    pub(super) fn call(&mut self, request: ChannelRequest) -> Result<ChannelReply, Error> {
        self.control.call(self.number, request)
    }

    /// Whether the stack can be used: before that its IPv6 addresses may not have been checked (RFC 4862 §5.4), and cannot be listened on.
    pub fn is_ready(&self) -> bool {
        self.region.is_ready()
    }

    /// Listens, and takes up to `credits` connections at a time from now on. Returns the listener's number.
    ///
    /// # Errors
    /// The stack's, or the shard is gone.
    pub fn listen(&mut self, local: SocketAddr, options: ListenOptions, credits: u32) -> Result<u32, Error> {
        self.listen_as(ChannelRequest::Listen(local, options), credits)
    }

    /// The same as `request` asks for it.
    pub(super) fn listen_as(&mut self, request: ChannelRequest, credits: u32) -> Result<u32, Error> {
        match self.call(request)? {
            ChannelReply::Listen(Ok(listener)) => {
                self.set_credits(listener, credits);
                Ok(listener)
            }
            ChannelReply::Listen(Err(error)) => Err(error),
            _ => Err(unexpected_reply()),
        }
    }

    /// Takes connections of a listener that another client opened, too, up to `credits` at a time.
    ///
    /// # Errors
    /// There is none of this number, or the shard is gone.
    pub fn join(&mut self, listener: u32, credits: u32) -> Result<(), Error> {
        match self.call(ChannelRequest::Join(listener))? {
            ChannelReply::Join(Ok(())) => {
                self.set_credits(listener, credits);
                Ok(())
            }
            ChannelReply::Join(Err(_)) => Err(Error::application("channel: no listener of this number")),
            _ => Err(unexpected_reply()),
        }
    }

    /// How many connections of a listener this client would take now. What it was offered and did not take goes to others only after
    /// `channel.offer_ms`.
    pub fn set_credits(&mut self, listener: u32, credits: u32) {
        let Some(word) = self.region.credits(self.number).get(listener as usize) else { return };
        word.store(credits, Ordering::Release);
        self.notify_any();
    }

    /// The same for connections that no other client would take now: this one serves another shard rather than this.
    pub fn set_fallback_credits(&mut self, listener: u32, credits: u32) {
        self.set_credits(listener, credits.min(FALLBACK_CREDIT - 1) | FALLBACK_CREDIT);
    }

    /// Who did not take in time what it was offered, because it was busy, is offered nothing until it rings. It may have nothing else to ring for.
    #[inline]
    pub(super) fn resume_offers(&mut self) {
        let dozes = self.region.offers_suspended(self.number);
        if dozes.load(Ordering::Relaxed) != 0 {
            dozes.store(0, Ordering::Relaxed);
            self.notify_any();
        }
    }

    /// Rings for no socket in particular: credits are looked at with any bell.
    fn notify_any(&mut self) {
        self.notify(0, NOTIFIED);
    }

    /// Takes no more connections of a listener. The last client to do so closes it: connections that nobody took are reset.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn unlisten(&mut self, listener: u32) -> Result<(), Error> {
        self.call(ChannelRequest::Unlisten(listener)).map(|_| ())
    }

    /// The same where somebody asks something afterwards, of this shard or of another one of the stack: when that is answered this is done.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn post_unlisten(&mut self, listener: u32) -> Result<(), Error> {
        self.control.post(self.number, ChannelRequest::Unlisten(listener))
    }

    /// Opens a connection; [`ClientEvent::Connected`] or [`ClientEvent::Closed`] follows.
    ///
    /// # Errors
    /// The stack's, or the shard is gone.
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

    /// Sets an option, as soon as the stack sees it: no question is asked.
    ///
    /// # Errors
    /// [`OptionError::Stale`] also if the connection is over.
    pub fn set_option(&mut self, conn: Conn, option: TcpOption) -> Result<(), OptionError> {
        if !option.is_valid() {
            return Err(OptionError::Invalid);
        }
        self.socket_ref(conn).map_err(|_| OptionError::Stale)?.set_option(option)?;
        self.notify(conn.index(), NOTIFIED);
        Ok(())
    }

    /// The links of the stack, in its order.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn links(&mut self) -> Result<Vec<LinkInfo>, Error> {
        let mut links = Vec::new();
        loop {
            // Cannot truncate: links are numbered with 16 bits.
            match self.call(ChannelRequest::Links(links.len() as u32))? {
                ChannelReply::Links(more) if more.is_empty() => return Ok(links),
                ChannelReply::Links(more) if links.len() + more.len() <= LINKS_MAX => links.extend(more),
                _ => return Err(unexpected_reply()),
            }
        }
    }

    /// What the stack knows of a connection.
    ///
    /// # Errors
    /// The handle is stale, the connection over, or the shard gone.
    pub fn info(&mut self, conn: Conn) -> Result<Box<TcpInfo>, Stale> {
        self.tracked(conn)?;
        match self.call(ChannelRequest::Info(conn.index())) {
            Ok(ChannelReply::Info(result)) => result,
            _ => Err(Stale::Handle),
        }
    }

    /// Asks in another way from now on.
    pub(super) fn set_control(&mut self, control: Box<dyn ControlPath>) {
        self.control = control;
    }

    /// Sockets of the channel.
    pub(super) fn sockets_max(&self) -> usize {
        self.region.sockets()
    }

    /// What is known of a socket. `None`: there is none of this number.
    fn socket_entry(&mut self, socket: u32) -> Option<&mut ClientSocket> {
        let place = socket as usize;
        if place >= self.sockets.len() && place < self.sockets_max() {
            self.sockets.resize(place + 1, ClientSocket::default());
        }
        self.sockets.get_mut(place)
    }

    /// What wakes the client.
    pub(crate) fn wake_event(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    /// The client holds this socket from now on, as the stack has answered.
    pub(super) fn track(&mut self, socket: u32, generation: u32) {
        if let Some(held) = self.socket_entry(socket) {
            *held = ClientSocket { generation: Some(generation), ..ClientSocket::default() };
            self.blocked.clear(socket);
            // What happened meanwhile was rung before it was held.
            self.report_changes(Conn::new(socket, generation));
        }
    }

    /// How often urgent data of a connection were announced or came.
    #[inline]
    pub(super) fn oob_events(&self, conn: Conn) -> u32 {
        self.tracked(conn).map_or(0, |_| self.region.socket(conn.index()).oob_events.load(Ordering::Relaxed))
    }

    /// How many bytes of a connection were read.
    ///
    /// # Errors
    /// The handle is stale.
    pub(super) fn read_position(&self, conn: Conn) -> Result<u64, Stale> {
        Ok(self.socket_ref(conn)?.read_position())
    }

    #[inline]
    fn tracked(&self, conn: Conn) -> Result<&ClientSocket, Stale> {
        let held = self.sockets.get(conn.index() as usize).ok_or(Stale::Handle)?;
        if held.generation == Some(conn.generation()) { Ok(held) } else { Err(Stale::Handle) }
    }

    /// The peer's end.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn peer(&self, conn: Conn) -> Result<SocketAddr, Stale> {
        self.tracked(conn)?;
        Ok(self.region.socket(conn.index()).endpoint(1))
    }

    /// Our end and the peer's.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn endpoints(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        self.tracked(conn)?;
        Ok(self.region.socket(conn.index()).endpoints())
    }

    /// What is done with the bytes of a connection.
    #[inline]
    fn socket_ref(&self, conn: Conn) -> Result<SocketRef<'_>, Stale> {
        self.tracked(conn)?;
        let shared_by = matches!(self.to_stack, StackNotifier::Shared(_)).then_some(self.number);
        Ok(SocketRef::new(&self.region, conn.index(), shared_by))
    }

    /// Bytes that wait to be read.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn readable(&self, conn: Conn) -> Result<usize, Stale> {
        Ok(self.socket_ref(conn)?.readable())
    }

    /// Copies what waits, from `skip` bytes behind its beginning on; it stays. Returns how many bytes.
    ///
    /// # Errors
    /// The handle is stale, or a process that shares it was stopped in the middle of using it.
    pub fn peek(&self, conn: Conn, skip: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        self.socket_ref(conn).map_err(|_| RecvError::Stale)?.peek(skip, out)
    }

    /// Takes `count` bytes off the front of what waits, at most what there is.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn consume(&mut self, conn: Conn, count: usize) -> Result<(), Stale> {
        if self.socket_ref(conn)?.consume(count) {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(())
    }

    /// Reads and takes what waits. `Ok(0)` if nothing does.
    ///
    /// # Errors
    /// As [`Client::peek`].
    pub fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let (count, ring) = self.socket_ref(conn).map_err(|_| RecvError::Stale)?.recv(out)?;
        if ring {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    /// How a connection stands, and what waited then, into buffers from byte `skip` of them on. `None` on a connection on which urgent data were ever announced: there reads have
    /// to heed [`mark`](Self::mark), and nothing is taken. Nor is anything where a process that shares it was stopped in the middle of using it; then the end of it does not show, either.
    ///
    /// # Errors
    /// The handle is stale.
    #[inline]
    pub fn recv_into(
        &mut self,
        conn: Conn,
        buffers: &mut [IoSliceMut<'_>],
        skip: usize,
    ) -> Result<(SocketState, Option<usize>), Stale> {
        let hand = self.socket_ref(conn)?;
        let standing = self.with_stack_liveness(hand.state());
        let Ok(taken) = hand.recv_into(buffers, skip) else {
            return Ok((standing.without_end(), Some(0)));
        };
        if let Some((_, true)) = taken {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok((standing, taken.map(|(count, _)| count)))
    }

    /// Whether [`flush`](Self::flush) has anything to tell.
    #[inline]
    pub fn needs_flush(&self) -> bool {
        self.has_notified || matches!(self.to_stack, StackNotifier::Exclusive(_))
    }

    /// Writes as many bytes as there is room for, and returns how many. If that is less than all, [`ClientEvent::Writable`] follows.
    ///
    /// # Errors
    /// The handle is stale; the connection is over, or its write side closed. [`SendError::Full`]: a process that shares it was stopped in the middle of
    /// using it.
    #[inline]
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        if self.is_stack_gone() {
            return Err(SendError::Closed);
        }
        let hand = self.socket_ref(conn).map_err(|_| SendError::Stale)?;
        let count = hand.send(bytes, self.blocked.flag(conn.index()))?;
        // Of what it sends from the buffer the stack may take something out, and does so only for those who wait.
        if count > 0 || !bytes.is_empty() && hand.has_loan() {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    /// What was written on a connection is the end of a record (`MSG_EOR`): what is written later shares no segment with it. If the stack has not even come to the end of the
    /// record before, it is asked first; one that it still does not come to is no record any more.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn end_record(&mut self, conn: Conn) -> Result<(), Stale> {
        if self.socket_ref(conn)?.has_pending_record() {
            let _ = self.sendable_within(conn, 0, (u32::MAX, u32::MAX));
        }
        self.socket_ref(conn)?.end_record();
        self.notify(conn.index(), NOTIFIED);
        Ok(())
    }

    /// How many of `len` bytes, 2^30 at the most, may be written before so many or more have not left, with what the stack would send meanwhile, or are not acknowledged: it is asked. If not all
    /// may, [`ClientEvent::Writable`] follows when some were acknowledged, or have left, if [`await_room`](Self::await_room) asks for it.
    ///
    /// # Errors
    /// The handle is stale, the connection over, or the shard gone.
    pub fn sendable_within(&mut self, conn: Conn, len: u32, most: (u32, u32)) -> Result<u32, Stale> {
        self.tracked(conn)?;
        self.flush();
        match self.call(ChannelRequest::SendableWithin(conn.index(), len, most)) {
            Ok(ChannelReply::SendableWithin(result)) => result,
            _ => Err(Stale::Handle),
        }
    }

    /// Says that what it writes lies in another ring.
    #[cfg(all(test, not(loom)))]
    pub(super) fn forge_ring(&self, conn: Conn, number: u32) {
        let words = self.region.socket(conn.index());
        words.positions(Direction::Outgoing).forge_ring(number);
    }

    fn request(&mut self, conn: Conn, what: u32) -> Result<(), Stale> {
        self.socket_ref(conn)?.request(what);
        self.notify(conn.index(), NOTIFIED);
        Ok(())
    }

    /// FIN behind what was written; receiving goes on.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn shutdown_write(&mut self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::SHUTDOWN)
    }

    /// Nobody will read what is still to come. While this end goes on sending that changes nothing; bytes that come after its FIN reset the connection, as on
    /// Linux (`tcp_rcv_state_process`).
    ///
    /// # Errors
    /// The handle is stale.
    pub fn shutdown_read(&mut self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::SHUTDOWN_READ)
    }

    /// Closes both directions, whoever else holds it: what was written is still sent. What was received and not read makes it a reset, as on
    /// Linux. [`ClientEvent::Closed`] follows.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn close(&mut self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::CLOSE)
    }

    /// Resets it. [`ClientEvent::Closed`] follows.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn abort(&mut self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::ABORT)
    }

    /// The client holds the connection no longer, and the handle is stale. The last to do so closes it.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn release(&mut self, conn: Conn) -> Result<(), Stale> {
        self.tracked(conn)?;
        self.sockets[conn.index() as usize].generation = None;
        self.notify(conn.index(), NOTIFIED | RELEASED);
        Ok(())
    }

    #[inline]
    pub(super) fn notify(&mut self, socket: u32, why: u8) {
        match &mut self.to_stack {
            StackNotifier::Exclusive(up) => up.notify(self.region.to_stack(self.number), socket, why),
            StackNotifier::Shared(streams) => {
                self.has_notified = true;
                streams.notify(socket, why);
            }
        }
    }

    /// Tells the stack at once of what was done by this client. To be called after each batch: until then the stack may sleep through it. What other threads have done by its
    /// [streams](Client::streams) is theirs to [tell](Streams::flush): this asks for nobody who has not rung himself. Only [`Client::before_sleep`] tells of theirs, too.
    #[inline]
    pub fn flush(&mut self) {
        match &mut self.to_stack {
            StackNotifier::Exclusive(up) => {
                if up.needs_wakeup(self.region.to_stack(self.number)) {
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

    /// The next thing that happened.
    pub fn next_event(&mut self) -> Option<ClientEvent> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            // The stack does not break its rings.
            let Some((socket, _)) = self.from_stack.pop(self.region.to_client(self.number)).ok().flatten()
            else {
                if !self.must_rescan {
                    return None;
                }
                self.rescan();
                continue;
            };
            match self.sockets.get(socket as usize).and_then(|held| held.generation) {
                Some(generation) => {
                    let conn = Conn::new(socket, generation);
                    if self.has_only_new_bytes(conn) {
                        return Some(ClientEvent::Readable { conn });
                    }
                    self.report_changes(conn);
                }
                // Another process of the domain may have written any number there.
                None if (socket as usize) < self.sockets_max() => self.check_offer(socket),
                None => {}
            }
        }
    }

    /// What mostly a bell is for: there are bytes to be read, and no other news. That is reported with this, and goes through no queue.
    #[inline]
    fn has_only_new_bytes(&mut self, conn: Conn) -> bool {
        let place = conn.index() as usize;
        let (held, words) = (&mut self.sockets[place], self.region.socket(conn.index()));
        let is_all = words.state.load(Ordering::Acquire) & !held.reported_state == 0
            && !self.blocked.is_set(conn.index())
            && words.acked.load(Ordering::Relaxed) == held.reported_acked
            && words.oob_events.load(Ordering::Relaxed) == held.reported_oob_events;
        let came = words.positions(Direction::Incoming).written();
        is_all && core::mem::replace(&mut held.reported_written, came) != came
    }

    /// Compares what the stack says of a socket with what was reported.
    fn report_changes(&mut self, conn: Conn) {
        let socket = conn.index();
        let held = &mut self.sockets[socket as usize];
        let words = self.region.socket(socket);
        let now = words.state.load(Ordering::Acquire);
        let new = now & !held.reported_state;
        if new != 0 {
            held.reported_state |= now;
        }
        if new & state::CONNECTED != 0 {
            self.events.push_back(ClientEvent::Connected { conn });
        }
        let came = words.positions(Direction::Incoming).written();
        if came != held.reported_written {
            held.reported_written = came;
            self.events.push_back(ClientEvent::Readable { conn });
        }
        if self.blocked.is_set(socket)
            && let hand = SocketRef::new(&self.region, socket, None)
            && hand.send_space() > 0
            && hand.is_below_low_water()
        {
            self.blocked.clear(socket);
            self.events.push_back(ClientEvent::Writable { conn });
        }
        let acked = words.acked.load(Ordering::Relaxed);
        if acked != held.reported_acked {
            let bytes = u32::try_from(acked.wrapping_sub(held.reported_acked)).unwrap_or(u32::MAX);
            held.reported_acked = acked;
            self.events.push_back(ClientEvent::Acked { conn, bytes });
        }
        let notices = words.oob_events.load(Ordering::Relaxed);
        if notices != held.reported_oob_events {
            held.reported_oob_events = notices;
            let datagrams = now & state::UDP != 0;
            self.events.push_back(match datagrams {
                true => ClientEvent::Datagrams { conn },
                false => ClientEvent::Urgent { conn },
            });
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

    /// Readable when the client slept and something happened.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// To be called before sleeping on [`Client::wake_fd`]. False if something happened: do not sleep.
    pub fn before_sleep(&mut self) -> bool {
        self.resume_offers();
        // Also for threads that have rung and not asked yet.
        self.has_notified = true;
        self.flush();
        let sleeps = self.events.is_empty()
            && !self.must_rescan
            && self.from_stack.before_sleep(self.region.to_client(self.number));
        if sleeps {
            self.end_yield();
        }
        sleeps
    }

    /// A stack that left the CPU to this client goes on.
    fn end_yield(&mut self) {
        match &mut self.to_stack {
            StackNotifier::Exclusive(_) => {
                if self.region.to_stack(self.number).ends_yield() {
                    self.stack_wake.signal();
                }
            }
            StackNotifier::Shared(streams) => streams.end_yield(),
        }
    }

    /// To be called after sleeping, and after [`Client::before_sleep`] said no. `readable`: [`Client::wake_fd`] is, or may be.
    pub fn after_sleep(&mut self, readable: bool) {
        self.region.set_client_cpu(self.number, rustix::thread::sched_getcpu());
        if self.from_stack.after_sleep(self.region.to_client(self.number)) {
            self.wake.clear();
        } else if readable {
            match self.to_stack {
                // The signal of a bell that was heard before.
                StackNotifier::Exclusive(_) => self.wake.clear(),
                StackNotifier::Shared(_) => self.check_stack_alive(),
            }
        }
    }

    /// Looks whether the stack, in another process, is gone. Who never sleeps finds out only so.
    pub fn check_stack_alive(&mut self) {
        if let StackNotifier::Shared(streams) = &self.to_stack
            && self.wake.drain_and_check_hangup()
            && !streams.is_stack_gone.swap(true, Relaxed)
        {
            self.close_all();
        }
    }

    /// The same after a sleep on the edges of [`Client::wake_fd`], which need not be read after each. Whether the stack has woken it.
    pub fn after_epoll_wait(&mut self) -> bool {
        self.region.set_client_cpu(self.number, rustix::thread::sched_getcpu());
        self.from_stack.after_sleep(self.region.to_client(self.number))
    }

    /// Reads what was not read after such sleeps.
    pub fn clear_wake(&self) {
        self.wake.clear();
    }

    /// Whether the stack, in another process, was found to be gone. Whatever is asked of it then is an error.
    #[inline]
    pub fn is_stack_gone(&self) -> bool {
        matches!(&self.to_stack, StackNotifier::Shared(streams) if streams.is_stack_gone.load(Relaxed))
    }

    /// The stack is gone, and with it the connections.
    fn close_all(&mut self) {
        for (socket, held) in self.sockets.iter_mut().enumerate() {
            let Some(generation) = held.generation.filter(|_| held.reported_state & state::CLOSED == 0)
            else {
                continue;
            };
            held.reported_state |= state::CLOSED;
            let conn = Conn::new(socket as u32, generation);
            self.events.push_back(ClientEvent::Closed { conn, reason: CloseReason::Reset });
        }
    }

    /// Sleeps in the kernel until something happens or the time is over.
    ///
    /// # Errors
    /// A failed system call.
    pub fn sleep(&mut self, timeout: Option<Duration>) -> Result<(), Error> {
        if self.before_sleep() {
            let wake = self.wake.as_fd();
            wait::sleep([wake, wake], &[], timeout).map_err(|e| Error::io("sleep", e))?;
        }
        self.after_sleep(true);
        Ok(())
    }

    /// Gives up everything: what nobody else holds is closed.
    ///
    /// # Errors
    /// The shard is gone, and everything with it.
    pub fn detach(mut self) -> Result<(), Error> {
        self.is_detached = true;
        self.call(ChannelRequest::Detach).map(|_| ())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.is_detached {
            // If the shard is gone there is nothing to give back.
            let _ = self.call(ChannelRequest::Detach);
        }
    }
}

fn unexpected_reply() -> Error {
    Error::application("channel: an answer to another question")
}
