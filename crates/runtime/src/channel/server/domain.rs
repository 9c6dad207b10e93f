//! One trust domain: its region, its clients and its sockets. What one domain does costs another nothing but its turn.

use super::super::bells::{RUNG, Way};
use super::super::control::Sharing;
use super::super::mark;
use super::super::region::{Direction, LISTENERS_MAX, Region, SocketWords};
use super::super::socket::{ended, request, state};
use super::super::sync::{Ordering, fence};
use super::super::wishes::{self, When};
use super::super::{ChannelConfig, ChannelStats};
use super::deferred::Deferred;
use super::large::Stock;
use super::lent::{self, Lent};
use super::numbers::Numbers;
use super::served::Served;
use crate::context::Context;
use crate::handler::UrgentData;
use crate::wait::EventFd;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::error::OptionError;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::options::TcpOption;
use ginnel_stack::udp::{Datagram, UdpError};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Bells of one client answered in a turn, so that one that rings without end does not keep frames waiting.
const BELLS_PER_TURN_MAX: usize = 256;
/// Bytes of one socket that are taken in a turn. What is copied into the engine leaves in the same turn, while it is in the cache; the peer takes it out while more is
/// copied here; and no socket keeps the others waiting. Datagrams are charged for what they cost ([`Header::cost`](crate::channel::datagram::Header::cost)).
// limit: bytes of a socket in one turn
pub(super) const PORTION_BYTES: usize = 128 << 10;
/// The same for all sockets of a domain: one with many keeps the other domains no longer waiting than one with few.
// limit: bytes of a domain in one turn
const TURN_BYTES: usize = 1024 << 10;
/// What it costs at least to look after a socket, in bytes of a stream.
const SOCKET_COST_BYTES: usize = 1024;
/// The engine's token of a connection: the domain above these bits, the socket in them.
const SOCKET_BITS: u32 = 24;

/// One listener.
pub(super) struct Listening {
    pub listener: Listener,
    pub at: SocketAddr,
    /// With whom others may share the address.
    pub sharing: Sharing,
    /// Clients that hold it, a bit each.
    pub holders: u64,
    /// Descriptors on their way between processes that hold it.
    pub placeholders: u32,
    /// Connections that nobody took yet.
    pub waiting: VecDeque<u32>,
    /// These, and those that are offered.
    pub kept: u32,
    /// How many may wait here; the others wait in the engine.
    pub backlog: usize,
    /// How many the application asked for.
    pub asked: u32,
    /// Receive buffers of its connections are smaller than the region's.
    pub is_narrow: bool,
}

impl Listening {
    /// More or fewer wait here: the engine must know, as all of them count.
    pub fn keep(&mut self, cx: &mut Context<'_>, kept: u32) {
        self.kept = kept;
        cx.set_backlog(self.listener, self.asked, kept);
    }
}

/// One socket.
#[derive(Clone, Debug, Default)]
pub(super) struct Socket {
    pub conn: Option<Conn>,
    pub in_use: bool,
    pub generation: u32,
    /// Clients that hold it, a bit each.
    pub holders: u64,
    /// Descriptors on their way between processes that hold it.
    pub placeholders: u32,
    /// The client and the place where it is offered.
    pub offered: Option<(u8, u8)>,
    /// The client that has it at hand, and the place where it lies.
    pub blank: Option<(u8, u8)>,
    /// It waits for somebody to take it.
    pub waits: bool,
    /// It waits at this listener and is offered to nobody yet: see [`super::deferred`].
    pub deferred: Option<u16>,
    pub bits: u32,
    /// Positions: bytes received, and bytes taken from clients.
    pub received: u64,
    pub taken: u64,
    /// The engine holds bytes back for which there was no room.
    pub held_back: bool,
    /// The engine's send buffer was full.
    pub blocked: bool,
    /// Nobody holds it any more: what was written is still sent.
    pub closing: bool,
    /// FIN was asked of the engine.
    pub shut: bool,
    /// Bytes came that nobody was to read any more.
    pub refused: bool,
    /// Its receive buffer is smaller than the region's: what lies there counts.
    pub is_narrow: bool,
    /// Clients want to know how much has left.
    pub tells_sent: bool,
    /// A client could not write all that it wanted to, though there is room.
    pub awaits_acked: bool,
    /// Clients want to find urgent bytes in the stream (`SO_OOBINLINE`).
    pub oob_inline: bool,
    /// It is a UDP socket.
    pub udp: Option<UdpHandle>,
    /// Its datagrams go through the region.
    pub post: Option<Box<Post>>,
    /// It stands among those that go on in the next turn.
    pub unfinished: bool,
    /// Large buffers that it has: for what comes, and for what goes.
    pub large: [Option<u32>; 2],
    /// What the engine sends from there.
    pub lent: Option<Lent>,
}

/// Datagrams of a socket that are not in the region.
#[derive(Clone, Debug, Default)]
pub(super) struct Post {
    /// There was no room.
    pub waiting: VecDeque<(Datagram, Vec<u8>)>,
    /// They are too long, and are asked for.
    pub apart: VecDeque<(Datagram, Vec<u8>)>,
    /// Errors leave reports in the engine.
    pub reports: bool,
}

/// What came on a UDP socket and was not taken yet.
pub(super) type Datagrams = VecDeque<Result<(Datagram, Vec<u8>), UdpError>>;

/// The stack's side of one region.
pub(super) struct Domain {
    pub index: u8,
    pub region: Arc<Region>,
    /// Wakes the shard.
    pub wake: Arc<EventFd>,
    /// It was made for processes that came through the door, and goes with them.
    pub comes_and_goes: bool,
    pub clients: Vec<Option<Served>>,
    /// Numbers of clients that there are, a bit each.
    pub members: u64,
    /// Listeners at which somebody may wait, a bit each.
    pub queued: u64,
    pub sockets: Vec<Socket>,
    pub numbers: Numbers,
    /// Large buffers that no socket has.
    pub stock: Stock,
    /// Sockets that go on in the next turn: those for which nothing was left of this one, and behind them those of which a portion was taken.
    pub unfinished: VecDeque<u32>,
    pub portions: Vec<u32>,
    /// What is left of this turn, in bytes.
    pub turn_left: usize,
    /// Sockets that had little room because of what they lent.
    pub cramped: Vec<u32>,
    /// Turns that those have waited.
    pub cramped_turns: u32,
    /// How many clients have at hand.
    pub blanks: usize,
    /// How many were free at first.
    sockets_max: usize,
    pub listeners: Vec<Option<Listening>>,
    pub offer_time: Duration,
    pub backlog_max: usize,
    /// UDP sockets by the engine's handles: their numbers here, and what waits on them.
    pub udp: HashMap<UdpHandle, (u32, Datagrams)>,
    /// Bytes of datagrams that wait, and how many may.
    pub datagram_bytes: usize,
    pub datagram_bytes_max: usize,
    /// Connections that have brought nothing yet, where listeners want them to.
    pub deferred: Option<Box<Deferred>>,
    /// A timer is set for offers that are out.
    pub timer_runs: bool,
    /// Some listener could not take all that came.
    pub starved: bool,
    /// Clients are workers of one program: who listens where another does shares its listener.
    pub workers: bool,
    /// The client that was offered a connection last.
    pub dealt_to: usize,
    /// A client that said that it is on the shard's CPU had all of its last turn. If there are other domains, the next sleep is theirs.
    pub owes: bool,
    /// Room for a datagram, once there are UDP sockets.
    pub long: Box<[u8]>,
    pub stats: ChannelStats,
}

/// How far what a client wrote was moved.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Forwarded {
    All,
    /// More than one turn may move.
    Portion,
    /// The engine took no more.
    Blocked,
    /// There is more than can be.
    Violated,
}

/// Numbers of the bits that are set, from the lowest on.
pub(super) fn ones(mut bits: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let number = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(number)
    })
}

/// Clients said that a record ends there. How many bytes behind those that were taken it still has; `None` if it is at its end.
#[cold]
fn come_to_record(
    cx: &mut Context<'_>,
    words: &SocketWords,
    conn: Conn,
    (end, taken): (u64, u64),
) -> Option<usize> {
    match end.checked_sub(taken) {
        Some(ahead @ 1..) => Some(usize::try_from(ahead).unwrap_or(usize::MAX)),
        at_once => {
            if at_once.is_some() {
                cx.end_record(conn);
            }
            // Unless there is another by now. One that was passed before it was written is none.
            let _ = words.record.compare_exchange(end, 0, Ordering::AcqRel, Ordering::Relaxed);
            None
        }
    }
}

/// The domain and the socket of a token.
pub(super) fn from_token(token: u32) -> (usize, u32) {
    ((token >> SOCKET_BITS) as usize, token & ((1 << SOCKET_BITS) - 1))
}

impl Domain {
    /// A domain without clients.
    pub fn new(index: u8, config: &ChannelConfig, comes_and_goes: bool) -> std::io::Result<Self> {
        let region = Region::create(config)?;
        let sockets = region.sockets();
        let for_bytes = config.buffer_bytes_max / (2 * u64::from(config.socket_buffer_bytes));
        let sockets_max = usize::try_from(for_bytes).map_or(sockets, |most| most.clamp(1, sockets));
        Ok(Self {
            index,
            wake: Arc::new(EventFd::new()?),
            comes_and_goes,
            clients: (0..region.clients()).map(|_| None).collect(),
            members: 0,
            queued: 0,
            sockets: vec![Socket::default(); sockets],
            numbers: Numbers::new(sockets_max),
            stock: (0..region.large().0).rev().collect(),
            unfinished: VecDeque::new(),
            portions: Vec::new(),
            turn_left: TURN_BYTES,
            cramped: Vec::new(),
            cramped_turns: 0,
            blanks: 0,
            sockets_max,
            listeners: (0..LISTENERS_MAX).map(|_| None).collect(),
            offer_time: Duration::from_millis(config.offer_ms.into()),
            backlog_max: config.backlog_max as usize,
            udp: HashMap::new(),
            datagram_bytes: 0,
            datagram_bytes_max: config.datagram_bytes_max as usize,
            deferred: None,
            timer_runs: false,
            starved: false,
            workers: false,
            dealt_to: 0,
            owes: false,
            long: Box::default(),
            stats: ChannelStats::default(),
            region,
        })
    }

    /// What the domain's timers carry.
    pub fn token(&self) -> u64 {
        self.index.into()
    }

    /// Sockets in use: connections, and those that clients still hold after their end.
    pub fn in_use(&self) -> usize {
        self.sockets_max - self.numbers.left() - self.blanks
    }

    /// Sockets that it may have.
    pub fn sockets_max(&self) -> usize {
        self.sockets_max
    }

    /// Nobody will ever use it again, and nothing of it is under way.
    pub fn is_deserted(&self) -> bool {
        self.comes_and_goes
            && self.in_use() == 0
            && self.clients.iter().all(Option::is_none)
            && self.listeners.iter().all(Option::is_none)
    }

    pub fn socket(&mut self, socket: u32) -> &mut Socket {
        &mut self.sockets[socket as usize]
    }

    /// The socket of a connection, if it is this number.
    pub fn of(&self, socket: u32, conn: Conn) -> Option<u32> {
        let known = self.sockets.get(socket as usize)?;
        (known.conn == Some(conn)).then_some(socket)
    }

    /// Sockets that have been used at any time.
    pub fn used(&mut self) -> &mut [Socket] {
        &mut self.sockets[..self.numbers.used()]
    }

    /// A socket cannot be had: there are as many as the domain may have.
    pub fn is_full(&mut self) -> bool {
        let full = self.numbers.left() == 0;
        self.stats.sockets_refused += u64::from(full);
        full
    }

    /// A socket for a new connection.
    pub(super) fn begin(&mut self, cx: &mut Context<'_>, conn: Conn, bits: u32) -> Option<u32> {
        let socket = self.numbers.take()?;
        let generation = self.socket(socket).generation;
        *self.socket(socket) =
            Socket { conn: Some(conn), in_use: true, generation, bits, ..Socket::default() };
        self.region.socket(socket).begin(generation);
        self.tie(cx, conn, socket);
        self.region.socket(socket).state.store(bits, Ordering::Release);
        Some(socket)
    }

    /// The socket is that of a connection.
    pub(super) fn tie(&mut self, cx: &mut Context<'_>, conn: Conn, socket: u32) {
        self.socket(socket).conn = Some(conn);
        if let Ok(ends) = cx.ends(conn) {
            self.region.socket(socket).set_ends(ends);
        }
        // Only a stale handle can be refused.
        let _ = cx.set_token(conn, u32::from(self.index) << SOCKET_BITS | socket);
    }

    /// Tells all who hold it.
    #[inline]
    pub(super) fn ring(&mut self, socket: u32) {
        let known = &self.sockets[socket as usize];
        let mut holders = known.holders;
        if let Some((client, _)) = known.offered {
            // It may have been taken, and the client learnt of nothing since.
            holders |= 1 << client;
        }
        while holders != 0 {
            let number = holders.trailing_zeros() as usize;
            holders &= holders - 1;
            if let Some(client) = &mut self.clients[number] {
                client.down.ring(self.region.down(number), socket, RUNG);
            }
        }
    }

    pub(super) fn add_bits(&mut self, socket: u32, bits: u32) {
        let known = self.socket(socket);
        known.bits |= bits;
        let bits = known.bits;
        self.region.socket(socket).state.store(bits, Ordering::Release);
        self.ring(socket);
    }

    /// A client wrote what cannot be.
    pub(super) fn violated(&mut self, cx: &mut Context<'_>, socket: u32) {
        self.stats.violations += 1;
        if let Some(conn) = self.socket(socket).conn {
            let _ = cx.abort(conn);
        }
    }

    /// Something was done that cost as much as so many bytes of a stream.
    #[inline]
    pub(super) fn charge(&mut self, bytes: usize) {
        self.turn_left = self.turn_left.saturating_sub(bytes);
    }

    /// Does what clients asked for, as far as it goes.
    pub(super) fn go_on(&mut self, cx: &mut Context<'_>, socket: u32) {
        if self.turn_left == 0 {
            self.begin_later(socket);
            return;
        }
        self.charge(SOCKET_COST_BYTES);
        let known = &self.sockets[socket as usize];
        let Some(conn) = known.conn else {
            if let Some(udp) = known.udp.filter(|_| known.post.is_some()) {
                self.post_go_on(cx, socket, udp, PORTION_BYTES);
                if self.socket(socket).closing {
                    self.unheld(cx, socket);
                }
            }
            return;
        };
        let words = self.region.socket(socket);
        let requests = words.requests.load(Ordering::Acquire);
        // Behind the requests, as clients wish before they ask. For what is wished later they ring once more.
        let wishes = words.wished.load(Ordering::Acquire) != 0;
        let close = requests & request::CLOSE != 0 || known.closing;
        // As on Linux: the peer must learn that not all was read.
        if requests & request::ABORT != 0 || close && self.is_unread(socket) {
            // What was written before leaves before.
            self.forward(cx, socket, conn, usize::MAX);
            let _ = cx.abort(conn);
            return;
        }
        // First, for it must not depend on the other direction: an application that writes back what it reads has both full.
        if core::mem::take(&mut self.socket(socket).held_back) {
            cx.resume_reading(conn);
        }
        if wishes {
            self.grant(cx, socket, conn, When::First);
        }
        if self.sockets[socket as usize].is_narrow {
            self.tell_held(cx, socket, conn);
        }
        let all = self.forward(cx, socket, conn, PORTION_BYTES);
        if self.socket(socket).unfinished {
            return;
        }
        if wishes {
            self.grant(cx, socket, conn, When::Last);
        }
        if !all {
            return;
        }
        if close {
            let _ = cx.close(conn);
        } else if requests & request::SHUTDOWN != 0 && !self.socket(socket).shut {
            self.socket(socket).shut = true;
            let _ = cx.shutdown_write(conn);
        }
    }

    /// Sets options that clients want.
    fn grant(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn, when: When) {
        // As many as there are kinds, whatever clients write meanwhile.
        for _ in 0..wishes::KINDS {
            let Some(option) = wishes::next(self.region.socket(socket), when) else { return };
            if let TcpOption::OobInline(on) = option {
                // Clients do that themselves.
                self.socket(socket).oob_inline = on;
                continue;
            }
            if let TcpOption::RecvBuffer(bytes) = option {
                self.socket(socket).is_narrow = self.is_narrow(Some(bytes));
            }
            if let TcpOption::NotSentLowWater(bytes) = option {
                self.socket(socket).tells_sent = bytes != 0;
                self.tell_sent(cx, socket, conn);
                // There may be room by the new bound, or only now is known how much there is (`sk_write_space`).
                self.ring(socket);
            }
            // What cannot be the client has refused, unless it keeps to no rules; a connection that is over needs no options. What may be but needs a right the client has refused, too: one that keeps
            // to no rules gets the priority 7 instead of 6, which everybody may have.
            if matches!(cx.set_option(conn, option), Err(OptionError::Invalid | OptionError::TooMany)) {
                self.stats.options_refused += 1;
            }
        }
    }

    /// Whether a receive buffer of so many bytes is smaller than the region's, so that what lies there is more than it should hold.
    pub(super) fn is_narrow(&self, recv_buffer_bytes: Option<u32>) -> bool {
        recv_buffer_bytes.is_some_and(|bytes| (bytes as usize) < self.region.buffer_bytes())
    }

    /// Notes how much of what clients wrote has left.
    fn tell_sent(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) {
        let sent = self.sockets[socket as usize].taken.saturating_sub(cx.not_sent(conn).into());
        self.region.socket(socket).sent.store(sent, Ordering::Release);
    }

    /// Bytes that clients wrote and the engine has not taken.
    pub(super) fn waiting(&self, socket: u32) -> u32 {
        let stream = self.region.stream(socket, Direction::Outgoing);
        let waiting = stream.readable(self.sockets[socket as usize].taken).unwrap_or(0);
        u32::try_from(waiting).unwrap_or(u32::MAX)
    }

    /// What clients have not read is not free for the peer.
    fn tell_held(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) {
        let words = self.region.socket(socket);
        words.wants_room.store(1, Ordering::Relaxed);
        // Pairs with the fence of a client that has read.
        fence(Ordering::SeqCst);
        let read = words.positions(Direction::Incoming).read();
        let held = self.sockets[socket as usize].received.saturating_sub(read);
        cx.set_held(conn, held.min(self.region.buffer_bytes() as u64) as u32);
    }

    /// Whether a client left bytes unread. A position that cannot be counts as unread.
    pub(super) fn is_unread(&self, socket: u32) -> bool {
        let known = &self.sockets[socket as usize];
        let stream = self.region.stream(socket, Direction::Incoming);
        known.held_back || stream.unread(known.received) != Ok(0)
    }

    /// Moves what clients wrote to the engine, `most` bytes or a little more. Whether that was all; the rest follows in the next turn.
    pub(super) fn forward(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn, most: usize) -> bool {
        let (mut moved, mut filled, mut done) = (false, false, 0);
        let Self { region, sockets, stats, .. } = self;
        let (known, (words, _, stream)) = (&mut sockets[socket as usize], region.whole(socket));
        let mut taken = known.taken;
        let end = loop {
            let Ok(waiting) = stream.readable(taken) else { break Forwarded::Violated };
            // To be looked at behind the position, as clients write it before they write on.
            let record = match words.record.load(Ordering::Acquire) {
                0 => None,
                end => come_to_record(cx, words, conn, (end, taken)),
            };
            if waiting == 0 {
                break Forwarded::All;
            }
            filled |= waiting >= region.buffer_bytes();
            if done >= most {
                // The writer hears of room when there is more of it.
                moved = false;
                break Forwarded::Portion;
            }
            let continues = waiting > most || words.wants_space.load(Ordering::Relaxed) != 0;
            let count = record.map_or(waiting, |ahead| waiting.min(ahead)).min(most);
            let (accepted, count) = match lent::lend(cx, region, known, &stream, stats, (conn, taken, count))
            {
                Some(lent) => lent,
                None => {
                    let copy = |at: usize, out: &mut [u8]| stream.copy_waiting(taken, at, out);
                    (cx.send_with(conn, count, continues, copy), count)
                }
            };
            // After an end of the stream nothing can be sent any more: it is dropped, as the client is about to learn.
            let accepted = accepted.unwrap_or(count);
            if known.lent.is_some() {
                stream.take(&mut taken, accepted);
            } else {
                stream.consume(&mut taken, accepted);
            }
            moved |= accepted > 0;
            done += accepted;
            if accepted < count {
                known.blocked = true;
                break Forwarded::Blocked;
            }
            if count == waiting && record.is_none() {
                // For what came meanwhile there is a bell behind this one.
                break Forwarded::All;
            }
        };
        known.taken = taken;
        let lends = known.lent.is_some();
        self.charge(done);
        match end {
            Forwarded::All | Forwarded::Blocked => {}
            Forwarded::Portion => self.go_on_later(socket),
            Forwarded::Violated => self.violated(cx, socket),
        }
        if filled {
            self.enlarge(cx, socket, conn, Direction::Outgoing);
        }
        if lends {
            moved = self.give_back(cx, socket, conn);
        }
        if moved {
            self.tell_of_space(socket);
        }
        end == Forwarded::All
    }

    /// Tells a client that waits for it that there is room to write.
    #[inline]
    pub(super) fn tell_of_space(&mut self, socket: u32) {
        // Pairs with the fence of a client that found no room.
        fence(Ordering::SeqCst);
        let wants = &self.region.socket(socket).wants_space;
        if wants.load(Ordering::Relaxed) != 0 && wants.swap(0, Ordering::Relaxed) != 0 {
            self.ring(socket);
        }
    }

    /// The last client let go of it.
    pub(super) fn unheld(&mut self, cx: &mut Context<'_>, socket: u32) {
        let known = self.socket(socket);
        if known.holders != 0
            || known.placeholders != 0
            || known.waits
            || known.offered.is_some()
            || !known.in_use
        {
            return;
        }
        if let Some(udp) = known.udp {
            if !self.post_ends(cx, socket, udp) {
                return;
            }
            self.socket(socket).udp = None;
            self.forget_post(socket);
            self.forget_datagrams(udp);
            // Only a stale handle can be refused.
            let _ = cx.udp_close(udp);
        }
        let known = self.socket(socket);
        if known.conn.is_some() {
            known.closing = true;
            self.go_on(cx, socket);
        } else {
            self.put_back(cx, socket);
        }
    }

    pub(super) fn put_back(&mut self, cx: &mut Context<'_>, socket: u32) {
        let known = self.socket(socket);
        known.in_use = false;
        known.generation = known.generation.wrapping_add(1);
        self.take_lent_back(cx, socket);
        self.take_large_back(socket);
        self.numbers.give_back(socket);
        self.take_more(cx);
    }

    /// Listeners that could not take all may have room again.
    pub(super) fn take_more(&mut self, cx: &mut Context<'_>) {
        if !core::mem::take(&mut self.starved) {
            return;
        }
        for number in 0..LISTENERS_MAX {
            let Some(listener) = self.listeners[number].as_ref().map(|l| l.listener) else { continue };
            while self.may_accept(number)
                && let Some(conn) = cx.accept(listener)
            {
                self.accepted(cx, conn, number);
            }
        }
    }

    /// Urgent data were announced, or came. All bytes go into the region, as clients may read in front of the mark much later.
    pub(super) fn urgent(&mut self, cx: &mut Context<'_>, conn: Conn, socket: u32, urgent: UrgentData) {
        // Only a stale handle can be refused.
        let _ = cx.set_option(conn, TcpOption::OobInline(true));
        let known = &self.sockets[socket as usize];
        let Some(position) = known.received.checked_add_signed(urgent.ahead.into()) else { return };
        let words = self.region.socket(socket);
        let read = words.positions(Direction::Incoming).read();
        mark::announce(words, position, urgent.byte, read, known.oob_inline);
        self.ring(socket);
    }

    /// Tells of something that is no byte of a stream.
    pub(super) fn notice(&mut self, socket: u32) {
        self.region.socket(socket).notices.fetch_add(1, Ordering::Relaxed);
        self.ring(socket);
    }

    /// Wakes the clients that sleep and were rung.
    fn wake_clients(&mut self) {
        for number in ones(self.members) {
            if let Some(client) = &mut self.clients[number]
                && client.down.must_wake(self.region.down(number))
            {
                client.wake.signal();
            }
        }
    }

    /// For no socket in particular: whoever waits looks again.
    pub fn ring_all(&mut self) {
        for (number, client) in self.clients.iter_mut().enumerate() {
            if let Some(client) = client {
                client.down.ring(self.region.down(number), 0, RUNG);
            }
        }
    }

    /// Answers what clients rang for. Returns how many bells.
    pub fn work(&mut self, cx: &mut Context<'_>) -> usize {
        self.turn_left = TURN_BYTES;
        let continued = self.continue_portions(cx);
        let members = ones(self.members);
        let answered: usize = members.map(|number| self.answer_bells(cx, number, BELLS_PER_TURN_MAX)).sum();
        // Who wants room can wait as long as there is something to do, for the peer acknowledges meanwhile.
        let roomier =
            if self.cramped.is_empty() { 0 } else { self.make_room_in_time(cx, continued + answered) };
        self.deal(cx);
        self.wake_clients();
        continued + answered + roomier
    }

    /// Whether the shard may sleep as far as this domain is concerned. From now on bells wake it.
    pub fn before_sleep(&mut self) -> bool {
        let region = &self.region;
        if !self.unfinished.is_empty() || !self.portions.is_empty() {
            return false;
        }
        // All of them, also behind one that has rung.
        ones(self.members).fold(true, |quiet, number| {
            let client = self.clients[number].as_mut();
            client.is_none_or(|c| c.up.before_sleep(region.up(number))) && quiet
        })
    }

    /// Whether a client is at work on `cpu`. `alone`: there is no other domain.
    pub fn works_on(&self, cpu: usize, alone: bool) -> bool {
        (alone || !self.owes)
            && ones(self.members).any(|number| {
                let works = self.clients[number].as_ref().is_some_and(|client| !client.is_absent);
                works
                    && self.region.client_cpu(number) == Some(cpu)
                    && !self.region.down(number).words.is_asleep()
            })
    }

    /// Leaves `cpu` to the clients that are at work on it. Says whether there are any, or `None` if the shard has work itself.
    ///
    /// Where a client is only it knows. One that says that it is here and is not, and rings in each turn to have the next, would keep everybody's frames waiting all the time. So with
    /// other domains beside it (`alone`: there are none) a domain that had all of a turn has no part in the next sleep.
    pub fn give_way(&mut self, cpu: usize, alone: bool) -> Option<bool> {
        if self.owes && !alone {
            return Some(false);
        }
        let region = &self.region;
        let mut given = false;
        for number in ones(self.members) {
            let Some(client) = &mut self.clients[number] else { continue };
            let (up, down) = (region.up(number), region.down(number));
            // Whatever a client writes there, it can have a turn only while it does something.
            client.is_absent &= !down.words.is_asleep();
            if client.is_absent || region.client_cpu(number) != Some(cpu) {
                continue;
            }
            match client.up.gives_way(up, down) {
                Way::Given => {
                    client.turn = Some(client.up.rung(up));
                    given = true;
                }
                Way::Kept => {}
                Way::Rung => return None,
            }
        }
        Some(given)
    }

    /// Whether a client has woken the shard. `ran_out`: clients that had a turn had all of it.
    pub fn after_sleep(&mut self, ran_out: bool) -> bool {
        let region = &self.region;
        region.set_cpu(rustix::thread::sched_getcpu());
        let mut woken = false;
        for number in ones(self.members) {
            let Some(client) = &mut self.clients[number] else { continue };
            let up = region.up(number);
            let woke = client.up.after_sleep(up);
            if let Some(rung) = client.turn.take() {
                self.owes |= ran_out && !woke;
                client.is_absent = ran_out && !woke && rung == client.up.rung(up);
            }
            woken |= woke;
        }
        woken
    }

    pub fn may_accept(&mut self, number: usize) -> bool {
        let deferring = self.deferring(number);
        let listening = self.listeners[number].as_ref();
        let may =
            self.numbers.left() > 0 && listening.is_some_and(|l| l.waiting.len() + deferring < l.backlog);
        self.starved |= !may;
        may
    }

    pub fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, number: usize) {
        let Some(socket) = self.begin(cx, conn, state::CONNECTED) else {
            let _ = cx.abort(conn);
            return;
        };
        let defers = self.defers(cx, number, socket);
        match &mut self.listeners[number] {
            Some(listening) => {
                if !defers {
                    listening.waiting.push_back(socket);
                    self.queued |= 1 << number;
                }
                listening.keep(cx, listening.kept + 1);
                let is_narrow = listening.is_narrow;
                let known = self.socket(socket);
                (known.waits, known.is_narrow) = (true, is_narrow);
            }
            None => {
                let _ = cx.abort(conn);
            }
        }
    }

    pub fn connected(&mut self, cx: &mut Context<'_>, conn: Conn, socket: u32) {
        if let Ok(ends) = cx.ends(conn) {
            self.region.socket(socket).set_ends(ends);
        }
        self.add_bits(socket, state::CONNECTED);
    }

    pub fn data(&mut self, cx: &mut Context<'_>, conn: Conn, socket: u32, data: &[u8]) -> usize {
        let (known, (words, stream, _)) = (&mut self.sockets[socket as usize], self.region.whole(socket));
        if known.closing {
            // Nobody will ever read it.
            let _ = cx.abort(conn);
            return data.len();
        }
        if known.shut && words.requests.load(Ordering::Relaxed) & request::SHUTDOWN_READ != 0 {
            // The peer must learn that they were lost.
            known.refused = true;
            let _ = cx.abort(conn);
            return data.len();
        }
        let mut count = stream.write(&mut known.received, data);
        let is_short = matches!(count, Ok(count) if count < data.len());
        if is_short {
            words.wants_room.store(1, Ordering::Relaxed);
            // Pairs with the fence of a client that has read.
            fence(Ordering::SeqCst);
            count = count.and_then(|done| Ok(done + stream.write(&mut known.received, &data[done..])?));
            known.held_back = count.is_ok_and(|count| count < data.len());
        }
        let (is_deferred, is_narrow) = (known.deferred.is_some(), known.is_narrow);
        if is_short {
            self.enlarge(cx, socket, conn, Direction::Incoming);
        }
        if is_deferred {
            self.promote(socket);
        }
        if is_narrow {
            self.tell_held(cx, socket, conn);
        }
        match count {
            Ok(count) => {
                self.ring(socket);
                count
            }
            Err(_) => {
                self.violated(cx, socket);
                data.len()
            }
        }
    }

    pub fn writable(&mut self, cx: &mut Context<'_>, socket: u32) {
        self.socket(socket).blocked = false;
        self.go_on(cx, socket);
        let known = &mut self.sockets[socket as usize];
        let awaits = core::mem::take(&mut known.awaits_acked);
        if let Some(conn) = known.conn.filter(|_| known.tells_sent | awaits) {
            if known.tells_sent {
                self.tell_sent(cx, socket, conn);
            }
            self.ring(socket);
        }
    }

    pub fn closed(&mut self, cx: &mut Context<'_>, socket: u32, reason: CloseReason) {
        // To a program that shut both directions it is as if the peer had done so.
        let reason = if self.socket(socket).refused { CloseReason::Reset } else { reason };
        self.add_bits(socket, ended(reason));
        self.forget_deferred(cx, socket);
        self.socket(socket).conn = None;
        self.unheld(cx, socket);
    }

    pub fn acked(&mut self, socket: u32, bytes: u32) {
        self.region.socket(socket).acked.fetch_add(bytes.into(), Ordering::Relaxed);
        self.ring(socket);
    }
}
