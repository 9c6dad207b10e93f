//! The application's end of a channel.

mod blanks;
mod blocked;
mod common;
mod datagrams;
mod heirs;
mod offers;
mod readiness;
mod streams;

pub use super::hand::{Standing, Status};
pub use common::CommonOf;
pub use datagrams::Arrived;
pub use heirs::Memory;
pub use streams::Streams;

use super::bells::{Answerer, RELEASED, RUNG, Ringer};
use super::control::{Control, LinkInfo, Reply, Request};
use super::hand::Hand;
use super::region::{Direction, Region, SECOND_CHOICE};
use super::socket::{reason, request, state};
use super::sync::Ordering;
use crate::error::Error;
use crate::wait::{self, EventFd};
use blocked::Blocked;
use core::net::SocketAddr;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use ginnel_stack::error::{OptionError, RecvError, SendError, Stale};
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::{ConnectOptions, ListenOptions, TcpInfo, TcpOption};
use offers::Offers;
use rustix::fd::{BorrowedFd, OwnedFd};
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
    pub stack: OwnedFd,
    /// Wakes the client.
    pub wake: OwnedFd,
    /// The client's number.
    pub number: u32,
}

/// What the client knows of a socket.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// Of the connection; `None` if the client does not hold it.
    generation: Option<u32>,
    /// Bits of the state that were reported.
    reported: u32,
    /// How many bytes had come when readable was last reported.
    shown: u64,
    /// Bytes that were acknowledged, and notices, when they were last reported.
    acked: u64,
    notices: u32,
}

/// Who rings the stack.
enum Up {
    /// This thread alone.
    Own(Ringer),
    /// All threads of the process, which may share its sockets with others.
    Shared(Arc<Streams>),
}

/// An application's end of a channel. Used by one thread at a time; if it came through the [door](crate::door), other threads may use its
/// [streams](Client::streams) meanwhile.
pub struct Client {
    pub(super) region: Arc<Region>,
    number: usize,
    up: Up,
    /// This client has rung since it asked last whether the stack has to be woken, if other threads ring as well.
    rang: bool,
    down: Answerer,
    /// The stack's, to wake it.
    stack: Arc<EventFd>,
    /// Ours, to be woken.
    wake: Arc<EventFd>,
    control: Box<dyn Control>,
    sockets: Vec<Held>,
    /// Sockets on which a write was cut short.
    blocked: Arc<Blocked>,
    events: VecDeque<ClientEvent>,
    /// Where the next socket at hand is looked for.
    blank: usize,
    /// What is offered, if offers are not taken at once.
    by_hand: Option<Box<Offers>>,
    detached: bool,
    /// A child that has not looked yet at what it inherited.
    is_heir: bool,
}

impl Client {
    pub(super) fn new(
        region: Arc<Region>,
        number: usize,
        stack: Arc<EventFd>,
        wake: Arc<EventFd>,
        control: Box<dyn Control>,
    ) -> Self {
        let up = Up::Own(region.up(number).ringer());
        let blocked = Arc::new(Blocked::new(region.sockets()));
        Self::with(region, number, up, stack, wake, control, blocked)
    }

    fn with(
        region: Arc<Region>,
        number: usize,
        up: Up,
        stack: Arc<EventFd>,
        wake: Arc<EventFd>,
        control: Box<dyn Control>,
        blocked: Arc<Blocked>,
    ) -> Self {
        // The stack may have rung since it knows of this client. Bells that nobody answers would be the last for their sockets.
        let down = region.down(number).answerer_from_first();
        Self {
            region,
            number,
            up,
            rang: false,
            down,
            stack,
            wake,
            control,
            sockets: Vec::new(),
            blocked,
            events: VecDeque::new(),
            blank: 0,
            by_hand: None,
            detached: false,
            is_heir: false,
        }
    }

    /// A client of a stack in another process.
    ///
    /// # Errors
    /// The region cannot be mapped, or is not what it should be.
    pub fn open(parts: ClientParts, control: Box<dyn Control>) -> Result<Self, Error> {
        let region = Region::open(parts.region).map_err(|e| Error::io("region of the channel", e))?;
        let number = parts.number as usize;
        if number >= region.clients() {
            return Err(Error::application("channel: the region has no client of this number"));
        }
        let event = |fd| Arc::new(EventFd::from_fd(fd));
        let (stack, wake) = (event(parts.stack), event(parts.wake));
        Ok(Self::shared(region, number, stack, wake, control))
    }

    fn shared(
        region: Arc<Region>,
        number: usize,
        stack: Arc<EventFd>,
        wake: Arc<EventFd>,
        control: Box<dyn Control>,
    ) -> Self {
        let blocked = Arc::new(Blocked::new(region.sockets()));
        let streams = Arc::new(Streams::new(region.clone(), number, stack.clone(), blocked.clone()));
        Self::with(region, number, Up::Shared(streams), stack, wake, control, blocked)
    }

    /// The streams of its connections, for other threads. `None` in the stack's own process, where a client is one thread's.
    pub fn streams(&self) -> Option<Arc<Streams>> {
        match &self.up {
            Up::Shared(streams) => Some(streams.clone()),
            Up::Own(_) => None,
        }
    }

    pub(super) fn ask(&mut self, request: Request) -> Result<Reply, Error> {
        self.control.ask(self.number, request)
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
        self.listen_as(Request::Listen(local, options), credits)
    }

    /// The same as `request` asks for it.
    pub(super) fn listen_as(&mut self, request: Request, credits: u32) -> Result<u32, Error> {
        match self.ask(request)? {
            Reply::Listen(Ok(listener)) => {
                self.set_credits(listener, credits);
                Ok(listener)
            }
            Reply::Listen(Err(error)) => Err(error),
            _ => Err(mismatch()),
        }
    }

    /// Takes connections of a listener that another client opened, too, up to `credits` at a time.
    ///
    /// # Errors
    /// There is none of this number, or the shard is gone.
    pub fn join(&mut self, listener: u32, credits: u32) -> Result<(), Error> {
        match self.ask(Request::Join(listener))? {
            Reply::Join(Ok(())) => {
                self.set_credits(listener, credits);
                Ok(())
            }
            Reply::Join(Err(_)) => Err(Error::application("channel: no listener of this number")),
            _ => Err(mismatch()),
        }
    }

    /// How many connections of a listener this client would take now. What it was offered and did not take goes to others only after
    /// `channel.offer_ms`.
    pub fn set_credits(&mut self, listener: u32, credits: u32) {
        let Some(word) = self.region.credits(self.number).get(listener as usize) else { return };
        word.store(credits, Ordering::Release);
        self.knock();
    }

    /// The same for connections that no other client would take now: this one serves another shard rather than this.
    pub fn set_credits_as_second_choice(&mut self, listener: u32, credits: u32) {
        self.set_credits(listener, credits.min(SECOND_CHOICE - 1) | SECOND_CHOICE);
    }

    /// Who did not take in time what it was offered, because it was busy, is offered nothing until it rings. It may have nothing else to ring for.
    #[inline]
    pub(super) fn wake_up(&mut self) {
        let dozes = self.region.dozes(self.number);
        if dozes.load(Ordering::Relaxed) != 0 {
            dozes.store(0, Ordering::Relaxed);
            self.knock();
        }
    }

    /// Rings for no socket in particular: credits are looked at with any bell.
    fn knock(&mut self) {
        self.ring(0, RUNG);
    }

    /// Takes no more connections of a listener. The last client to do so closes it: connections that nobody took are reset.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn unlisten(&mut self, listener: u32) -> Result<(), Error> {
        self.ask(Request::Unlisten(listener)).map(|_| ())
    }

    /// The same where somebody asks something afterwards, of this shard or of another one of the stack: when that is answered this is done.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn unlisten_before_asking(&mut self, listener: u32) -> Result<(), Error> {
        self.control.tell(self.number, Request::Unlisten(listener))
    }

    /// Opens a connection; [`ClientEvent::Connected`] or [`ClientEvent::Closed`] follows.
    ///
    /// # Errors
    /// The stack's, or the shard is gone.
    pub fn connect(&mut self, remote: SocketAddr, options: ConnectOptions) -> Result<Conn, Error> {
        match self.ask(Request::Connect(remote, options))? {
            Reply::Connect(Ok((socket, generation))) => {
                self.hold(socket, generation);
                Ok(Conn::new(socket, generation))
            }
            Reply::Connect(Err(error)) => Err(error),
            _ => Err(mismatch()),
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
        self.hand(conn).map_err(|_| OptionError::Stale)?.wish(option)?;
        self.ring(conn.index(), RUNG);
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
            match self.ask(Request::Links(links.len() as u32))? {
                Reply::Links(more) if more.is_empty() => return Ok(links),
                Reply::Links(more) if links.len() + more.len() <= LINKS_MAX => links.extend(more),
                _ => return Err(mismatch()),
            }
        }
    }

    /// What the stack knows of a connection.
    ///
    /// # Errors
    /// The handle is stale, the connection over, or the shard gone.
    pub fn info(&mut self, conn: Conn) -> Result<Box<TcpInfo>, Stale> {
        self.held(conn)?;
        match self.ask(Request::Info(conn.index())) {
            Ok(Reply::Info(result)) => result,
            _ => Err(Stale::Handle),
        }
    }

    /// Asks in another way from now on.
    pub(super) fn set_control(&mut self, control: Box<dyn Control>) {
        self.control = control;
    }

    /// Sockets of the channel.
    pub(super) fn sockets_max(&self) -> usize {
        self.region.sockets()
    }

    /// What is known of a socket. `None`: there is none of this number.
    fn known(&mut self, socket: u32) -> Option<&mut Held> {
        let place = socket as usize;
        if place >= self.sockets.len() && place < self.sockets_max() {
            self.sockets.resize(place + 1, Held::default());
        }
        self.sockets.get_mut(place)
    }

    /// What wakes the client.
    pub(crate) fn wake(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    /// The client holds this socket from now on, as the stack has answered.
    pub(super) fn hold(&mut self, socket: u32, generation: u32) {
        if let Some(held) = self.known(socket) {
            *held = Held { generation: Some(generation), ..Held::default() };
            self.blocked.clear(socket);
            // What happened meanwhile was rung before it was held.
            self.look(Conn::new(socket, generation));
        }
    }

    /// How often urgent data of a connection were announced or came.
    #[inline]
    pub(super) fn notices(&self, conn: Conn) -> u32 {
        self.held(conn).map_or(0, |_| self.region.socket(conn.index()).notices.load(Ordering::Relaxed))
    }

    /// How many bytes of a connection were read.
    ///
    /// # Errors
    /// The handle is stale.
    pub(super) fn read_position(&self, conn: Conn) -> Result<u64, Stale> {
        Ok(self.hand(conn)?.read_position())
    }

    #[inline]
    fn held(&self, conn: Conn) -> Result<&Held, Stale> {
        let held = self.sockets.get(conn.index() as usize).ok_or(Stale::Handle)?;
        if held.generation == Some(conn.generation()) { Ok(held) } else { Err(Stale::Handle) }
    }

    /// The peer's end.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn peer(&self, conn: Conn) -> Result<SocketAddr, Stale> {
        self.held(conn)?;
        Ok(self.region.socket(conn.index()).end(1))
    }

    /// Our end and the peer's.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn ends(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        self.held(conn)?;
        Ok(self.region.socket(conn.index()).ends())
    }

    /// What is done with the bytes of a connection.
    #[inline]
    fn hand(&self, conn: Conn) -> Result<Hand<'_>, Stale> {
        self.held(conn)?;
        let shared_by = matches!(self.up, Up::Shared(_)).then_some(self.number);
        Ok(Hand::new(&self.region, conn.index(), shared_by))
    }

    /// Bytes that wait to be read.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn readable(&self, conn: Conn) -> Result<usize, Stale> {
        Ok(self.hand(conn)?.readable())
    }

    /// Copies what waits, from `skip` bytes behind its beginning on; it stays. Returns how many bytes.
    ///
    /// # Errors
    /// The handle is stale, or a process that shares it was stopped in the middle of using it.
    pub fn peek(&self, conn: Conn, skip: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        self.hand(conn).map_err(|_| RecvError::Stale)?.peek(skip, out)
    }

    /// Takes `count` bytes off the front of what waits, at most what there is.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn consume(&mut self, conn: Conn, count: usize) -> Result<(), Stale> {
        if self.hand(conn)?.consume(count) {
            self.ring(conn.index(), RUNG);
        }
        Ok(())
    }

    /// Reads and takes what waits. `Ok(0)` if nothing does.
    ///
    /// # Errors
    /// As [`Client::peek`].
    pub fn recv(&mut self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let (count, ring) = self.hand(conn).map_err(|_| RecvError::Stale)?.recv(out)?;
        if ring {
            self.ring(conn.index(), RUNG);
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
    ) -> Result<(Standing, Option<usize>), Stale> {
        let hand = self.hand(conn)?;
        let standing = self.as_is(hand.standing());
        let Ok(taken) = hand.recv_into(buffers, skip) else {
            return Ok((standing.with_bytes_left(), Some(0)));
        };
        if let Some((_, true)) = taken {
            self.ring(conn.index(), RUNG);
        }
        Ok((standing, taken.map(|(count, _)| count)))
    }

    /// Whether [`flush`](Self::flush) has anything to tell.
    #[inline]
    pub fn has_rung(&self) -> bool {
        self.rang || matches!(self.up, Up::Own(_))
    }

    /// Writes as many bytes as there is room for, and returns how many. If that is less than all, [`ClientEvent::Writable`] follows.
    ///
    /// # Errors
    /// The handle is stale; the connection is over, or its write side closed. [`SendError::Full`]: a process that shares it was stopped in the middle of
    /// using it.
    #[inline]
    pub fn send(&mut self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        if self.is_gone() {
            return Err(SendError::Closed);
        }
        let hand = self.hand(conn).map_err(|_| SendError::Stale)?;
        let count = hand.send(bytes, self.blocked.of(conn.index()))?;
        // Of what it sends from the buffer the stack may take something out, and does so only for those who wait.
        if count > 0 || !bytes.is_empty() && hand.is_lent() {
            self.ring(conn.index(), RUNG);
        }
        Ok(count)
    }

    /// What was written on a connection is the end of a record (`MSG_EOR`): what is written later shares no segment with it. If the stack has not even come to the end of the
    /// record before, it is asked first; one that it still does not come to is no record any more.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn end_record(&mut self, conn: Conn) -> Result<(), Stale> {
        if self.hand(conn)?.is_record_ahead() {
            let _ = self.room_below(conn, 0, (u32::MAX, u32::MAX));
        }
        self.hand(conn)?.end_record();
        self.ring(conn.index(), RUNG);
        Ok(())
    }

    /// How many of `len` bytes, 2^30 at the most, may be written before so many or more have not left, with what the stack would send meanwhile, or are not acknowledged: it is asked. If not all
    /// may, [`ClientEvent::Writable`] follows when some were acknowledged, or have left, if [`await_room`](Self::await_room) asks for it.
    ///
    /// # Errors
    /// The handle is stale, the connection over, or the shard gone.
    pub fn room_below(&mut self, conn: Conn, len: u32, most: (u32, u32)) -> Result<u32, Stale> {
        self.held(conn)?;
        self.flush();
        match self.ask(Request::RoomBelow(conn.index(), len, most)) {
            Ok(Reply::RoomBelow(result)) => result,
            _ => Err(Stale::Handle),
        }
    }

    /// Says that what it writes lies in another ring.
    #[cfg(all(test, not(loom)))]
    pub(super) fn pretend_ring(&self, conn: Conn, number: u32) {
        let words = self.region.socket(conn.index());
        words.positions(Direction::Outgoing).pretend_ring(number);
    }

    fn request(&mut self, conn: Conn, what: u32) -> Result<(), Stale> {
        self.hand(conn)?.request(what);
        self.ring(conn.index(), RUNG);
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
        self.held(conn)?;
        self.sockets[conn.index() as usize].generation = None;
        self.ring(conn.index(), RUNG | RELEASED);
        Ok(())
    }

    #[inline]
    pub(super) fn ring(&mut self, socket: u32, why: u8) {
        match &mut self.up {
            Up::Own(up) => up.ring(self.region.up(self.number), socket, why),
            Up::Shared(streams) => {
                self.rang = true;
                streams.ring(socket, why);
            }
        }
    }

    /// Tells the stack at once of what was done by this client. To be called after each batch: until then the stack may sleep through it. What other threads have done by its
    /// [streams](Client::streams) is theirs to [tell](Streams::flush): this asks for nobody who has not rung himself. Only [`Client::before_sleep`] tells of theirs, too.
    #[inline]
    pub fn flush(&mut self) {
        match &mut self.up {
            Up::Own(up) => {
                if up.must_wake(self.region.up(self.number)) {
                    self.stack.signal();
                }
            }
            Up::Shared(streams) => {
                if core::mem::take(&mut self.rang) {
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
            let Some((socket, _)) = self.down.take(self.region.down(self.number)).ok().flatten() else {
                if !self.is_heir {
                    return None;
                }
                self.look_at_all();
                continue;
            };
            match self.sockets.get(socket as usize).and_then(|held| held.generation) {
                Some(generation) => {
                    let conn = Conn::new(socket, generation);
                    if self.only_bytes_came(conn) {
                        return Some(ClientEvent::Readable { conn });
                    }
                    self.look(conn);
                }
                // Another process of the domain may have written any number there.
                None if (socket as usize) < self.sockets_max() => self.look_for_offer(socket),
                None => {}
            }
        }
    }

    /// What mostly a bell is for: there are bytes to be read, and no other news. That is reported with this, and goes through no queue.
    #[inline]
    fn only_bytes_came(&mut self, conn: Conn) -> bool {
        let place = conn.index() as usize;
        let (held, words) = (&mut self.sockets[place], self.region.socket(conn.index()));
        let is_all = words.state.load(Ordering::Acquire) & !held.reported == 0
            && !self.blocked.is_set(conn.index())
            && words.acked.load(Ordering::Relaxed) == held.acked
            && words.notices.load(Ordering::Relaxed) == held.notices;
        let came = words.positions(Direction::Incoming).written();
        is_all && core::mem::replace(&mut held.shown, came) != came
    }

    /// Compares what the stack says of a socket with what was reported.
    fn look(&mut self, conn: Conn) {
        let socket = conn.index();
        let held = &mut self.sockets[socket as usize];
        let words = self.region.socket(socket);
        let now = words.state.load(Ordering::Acquire);
        let new = now & !held.reported;
        if new != 0 {
            held.reported |= now;
        }
        if new & state::CONNECTED != 0 {
            self.events.push_back(ClientEvent::Connected { conn });
        }
        let came = words.positions(Direction::Incoming).written();
        if came != held.shown {
            held.shown = came;
            self.events.push_back(ClientEvent::Readable { conn });
        }
        if self.blocked.is_set(socket)
            && let hand = Hand::new(&self.region, socket, None)
            && hand.room() > 0
            && hand.is_below_low_water()
        {
            self.blocked.clear(socket);
            self.events.push_back(ClientEvent::Writable { conn });
        }
        let acked = words.acked.load(Ordering::Relaxed);
        if acked != held.acked {
            let bytes = u32::try_from(acked.wrapping_sub(held.acked)).unwrap_or(u32::MAX);
            held.acked = acked;
            self.events.push_back(ClientEvent::Acked { conn, bytes });
        }
        let notices = words.notices.load(Ordering::Relaxed);
        if notices != held.notices {
            held.notices = notices;
            let datagrams = now & state::UDP != 0;
            self.events.push_back(match datagrams {
                true => ClientEvent::Datagrams { conn },
                false => ClientEvent::Urgent { conn },
            });
        }
        if new & state::FIN != 0 {
            self.events.push_back(ClientEvent::PeerClosed { conn });
        }
        if new & state::ENDED != 0
            && let Some(reason) = reason(now)
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
        self.wake_up();
        // Also for threads that have rung and not asked yet.
        self.rang = true;
        self.flush();
        let sleeps =
            self.events.is_empty() && !self.is_heir && self.down.before_sleep(self.region.down(self.number));
        if sleeps {
            self.end_turn();
        }
        sleeps
    }

    /// A stack that left the CPU to this client goes on.
    fn end_turn(&mut self) {
        match &mut self.up {
            Up::Own(_) => {
                if self.region.up(self.number).ends_turn() {
                    self.stack.signal();
                }
            }
            Up::Shared(streams) => streams.end_turn(),
        }
    }

    /// To be called after sleeping, and after [`Client::before_sleep`] said no. `readable`: [`Client::wake_fd`] is, or may be.
    pub fn after_sleep(&mut self, readable: bool) {
        self.region.set_client_cpu(self.number, rustix::thread::sched_getcpu());
        if self.down.after_sleep(self.region.down(self.number)) {
            self.wake.clear();
        } else if readable {
            match self.up {
                // The signal of a bell that was heard before.
                Up::Own(_) => self.wake.clear(),
                Up::Shared(_) => self.look_for_end(),
            }
        }
    }

    /// Looks whether the stack, in another process, is gone. Who never sleeps finds out only so.
    pub fn look_for_end(&mut self) {
        if let Up::Shared(streams) = &self.up
            && self.wake.hung_up()
            && !streams.gone.swap(true, Relaxed)
        {
            self.lose_all();
        }
    }

    /// The same after a sleep on the edges of [`Client::wake_fd`], which need not be read after each. Whether the stack has woken it.
    pub fn after_nap(&mut self) -> bool {
        self.region.set_client_cpu(self.number, rustix::thread::sched_getcpu());
        self.down.after_sleep(self.region.down(self.number))
    }

    /// Reads what was not read after such sleeps.
    pub fn clear_wake(&self) {
        self.wake.clear();
    }

    /// Whether the stack, in another process, was found to be gone. Whatever is asked of it then is an error.
    #[inline]
    pub fn is_gone(&self) -> bool {
        matches!(&self.up, Up::Shared(streams) if streams.gone.load(Relaxed))
    }

    /// The stack is gone, and with it the connections.
    fn lose_all(&mut self) {
        for (socket, held) in self.sockets.iter_mut().enumerate() {
            let Some(generation) = held.generation.filter(|_| held.reported & state::ENDED == 0) else {
                continue;
            };
            held.reported |= state::ENDED;
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
        self.detached = true;
        self.ask(Request::Detach).map(|_| ())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.detached {
            // If the shard is gone there is nothing to give back.
            let _ = self.ask(Request::Detach);
        }
    }
}

fn mismatch() -> Error {
    Error::application("channel: an answer to another question")
}
