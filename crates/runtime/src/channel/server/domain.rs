//! One trust domain: its region, its clients and its sockets. What one domain does costs another nothing but its turn.

use super::super::control::AddressSharing;
use super::super::doorbells::{NOTIFIED, YieldOutcome};
use super::super::pending_options::{self, OptionOrder};
use super::super::region::{Direction, LISTENERS_MAX, Region, SocketArea};
use super::super::socket::{closed_bits, request, state};
use super::super::sync::{Ordering, fence};
use super::super::urgent_mark;
use super::super::{ChannelConfig, ChannelStats};
use super::client_state::ClientState;
use super::defer_accept::DeferredAccepts;
use super::large_buffers::LargeBufferPool;
use super::slot_allocator::SlotAllocator;
use super::zero_copy::{self, ZeroCopyLoan};
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
const DOORBELLS_PER_TURN_MAX: usize = 256;
/// Bytes of one socket that are taken in a turn. What is copied into the engine leaves in the same turn, while it is in the cache; the peer takes it out while more is
/// copied here; and no socket keeps the others waiting. Datagrams are charged for what they cost ([`Header::cost`](crate::channel::datagram::Header::cost)).
// limit: bytes of a socket in one turn
pub(super) const CHUNK_BYTES: usize = 128 << 10;
/// The same for all sockets of a domain: one with many keeps the other domains no longer waiting than one with few.
// limit: bytes of a domain in one turn
const TURN_BUDGET_BYTES: usize = 1024 << 10;
/// What it costs at least to look after a socket, in bytes of a stream.
const SOCKET_COST_BYTES_MIN: usize = 1024;
/// The engine's token of a connection: the domain above these bits, the socket in them.
const SOCKET_BITS: u32 = 24;

/// One listener.
pub(super) struct DomainListener {
    pub listener: Listener,
    pub address: SocketAddr,
    /// With whom others may share the address.
    pub sharing: AddressSharing,
    /// Clients that hold it, a bit each.
    pub owners: u64,
    /// Descriptors on their way between processes that hold it.
    pub proxies: u32,
    /// Connections that nobody took yet.
    pub pending: VecDeque<u32>,
    /// These, and those that are offered.
    pub unaccepted: u32,
    /// How many may wait here; the others wait in the engine.
    pub backlog: usize,
    /// How many the application asked for.
    pub requested_backlog: u32,
    /// Receive buffers of its connections are smaller than the region's.
    pub has_small_recv_buffer: bool,
}

impl DomainListener {
    /// More or fewer wait here: the engine must know, as all of them count.
    pub fn set_unaccepted(&mut self, cx: &mut Context<'_>, kept: u32) {
        self.unaccepted = kept;
        cx.set_backlog(self.listener, self.requested_backlog, kept);
    }
}

/// One socket.
#[derive(Clone, Debug, Default)]
pub(super) struct DomainSocket {
    pub conn: Option<Conn>,
    pub is_in_use: bool,
    pub generation: u32,
    /// Clients that hold it, a bit each.
    pub owners: u64,
    /// Descriptors on their way between processes that hold it.
    pub proxies: u32,
    /// The client and the place where it is offered.
    pub offer: Option<(u8, u8)>,
    /// The client that has it at hand, and the place where it lies.
    pub preallocated: Option<(u8, u8)>,
    /// It waits for somebody to take it.
    pub is_pending: bool,
    /// It waits at this listener and is offered to nobody yet: see [`super::deferred`].
    pub deferred_at: Option<u16>,
    pub state_bits: u32,
    /// Positions: bytes received, and bytes taken from clients.
    pub received: u64,
    pub taken: u64,
    /// The engine holds bytes back for which there was no room.
    pub is_recv_blocked: bool,
    /// The engine's send buffer was full.
    pub is_send_blocked: bool,
    /// Nobody holds it any more: what was written is still sent.
    pub is_closing: bool,
    /// FIN was asked of the engine.
    pub is_write_shut: bool,
    /// Bytes came that nobody was to read any more.
    pub has_late_data: bool,
    /// Its receive buffer is smaller than the region's: what lies there counts.
    pub has_small_recv_buffer: bool,
    /// Clients want to know how much has left.
    pub publishes_sent: bool,
    /// A client could not write all that it wanted to, though there is room.
    pub awaits_acked: bool,
    /// Clients want to find urgent bytes in the stream (`SO_OOBINLINE`).
    pub oob_inline: bool,
    /// It is a UDP socket.
    pub udp: Option<UdpHandle>,
    /// Its datagrams go through the region.
    pub datagram_queue: Option<Box<DatagramQueue>>,
    /// It stands among those that go on in the next turn.
    pub is_unfinished: bool,
    /// Large buffers that it has: for what comes, and for what goes.
    pub large_buffers: [Option<u32>; 2],
    /// What the engine sends from there.
    pub loan: Option<ZeroCopyLoan>,
}

/// Datagrams of a socket that are not in the region.
#[derive(Clone, Debug, Default)]
pub(super) struct DatagramQueue {
    /// There was no room.
    pub pending: VecDeque<(Datagram, Vec<u8>)>,
    /// They are too long, and are asked for.
    pub oversize: VecDeque<(Datagram, Vec<u8>)>,
    /// Errors leave reports in the engine.
    pub recverr: bool,
}

/// What came on a UDP socket and was not taken yet.
pub(super) type UdpBacklog = VecDeque<Result<(Datagram, Vec<u8>), UdpError>>;

/// The stack's side of one region.
pub(super) struct Domain {
    pub index: u8,
    pub region: Arc<Region>,
    /// Wakes the shard.
    pub wake: Arc<EventFd>,
    /// It was made for processes that came through the door, and goes with them.
    pub is_for_processes: bool,
    pub clients: Vec<Option<ClientState>>,
    /// Numbers of clients that there are, a bit each.
    pub client_mask: u64,
    /// Listeners at which somebody may wait, a bit each.
    pub pending_listeners: u64,
    pub sockets: Vec<DomainSocket>,
    pub socket_slots: SlotAllocator,
    /// Large buffers that no socket has.
    pub large_buffer_pool: LargeBufferPool,
    /// Sockets that go on in the next turn: those for which nothing was left of this one, and behind them those of which a portion was taken.
    pub unfinished: VecDeque<u32>,
    pub chunked: Vec<u32>,
    /// What is left of this turn, in bytes.
    pub turn_budget: usize,
    /// Sockets that had little room because of what they lent.
    pub short_of_send_space: Vec<u32>,
    /// Turns that those have waited.
    pub send_space_wait_turns: u32,
    /// How many clients have at hand.
    pub preallocated_count: usize,
    /// How many were free at first.
    sockets_max: usize,
    pub listeners: Vec<Option<DomainListener>>,
    pub offer_timeout: Duration,
    pub backlog_max: usize,
    /// UDP sockets by the engine's handles: their numbers here, and what waits on them.
    pub udp: HashMap<UdpHandle, (u32, UdpBacklog)>,
    /// Bytes of datagrams that wait, and how many may.
    pub datagram_bytes: usize,
    pub datagram_bytes_max: usize,
    /// Connections that have brought nothing yet, where listeners want them to.
    pub deferred: Option<Box<DeferredAccepts>>,
    /// A timer is set for offers that are out.
    pub is_offer_timer_set: bool,
    /// Some listener could not take all that came.
    pub is_accept_stalled: bool,
    /// Clients are workers of one program: who listens where another does shares its listener.
    pub shares_listeners: bool,
    /// The client that was offered a connection last.
    pub distributed_to: usize,
    /// A client that said that it is on the shard's CPU had all of its last turn. If there are other domains, the next sleep is theirs.
    pub is_penalised: bool,
    /// Room for a datagram, once there are UDP sockets.
    pub datagram_buffer: Box<[u8]>,
    pub stats: ChannelStats,
}

/// How far what a client wrote was moved.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ForwardOutcome {
    All,
    /// More than one turn may move.
    Chunk,
    /// The engine took no more.
    Blocked,
    /// There is more than can be.
    Violation,
}

/// Numbers of the bits that are set, from the lowest on.
pub(super) fn set_bits(mut bits: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let number = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(number)
    })
}

/// Clients said that a record ends there. How many bytes behind those that were taken it still has; `None` if it is at its end.
#[cold]
fn reach_record(
    cx: &mut Context<'_>,
    words: &SocketArea,
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
            let _ = words.record_end.compare_exchange(end, 0, Ordering::AcqRel, Ordering::Relaxed);
            None
        }
    }
}

/// The domain and the socket of a token.
pub(super) fn split_token(token: u32) -> (usize, u32) {
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
            is_for_processes: comes_and_goes,
            clients: (0..region.clients()).map(|_| None).collect(),
            client_mask: 0,
            pending_listeners: 0,
            sockets: vec![DomainSocket::default(); sockets],
            socket_slots: SlotAllocator::new(sockets_max),
            large_buffer_pool: (0..region.large().0).rev().collect(),
            unfinished: VecDeque::new(),
            chunked: Vec::new(),
            turn_budget: TURN_BUDGET_BYTES,
            short_of_send_space: Vec::new(),
            send_space_wait_turns: 0,
            preallocated_count: 0,
            sockets_max,
            listeners: (0..LISTENERS_MAX).map(|_| None).collect(),
            offer_timeout: Duration::from_millis(config.offer_ms.into()),
            backlog_max: config.backlog_max as usize,
            udp: HashMap::new(),
            datagram_bytes: 0,
            datagram_bytes_max: config.datagram_bytes_max as usize,
            deferred: None,
            is_offer_timer_set: false,
            is_accept_stalled: false,
            shares_listeners: false,
            distributed_to: 0,
            is_penalised: false,
            datagram_buffer: Box::default(),
            stats: ChannelStats::default(),
            region,
        })
    }

    /// What the domain's timers carry.
    pub fn token(&self) -> u64 {
        self.index.into()
    }

    /// Sockets in use: connections, and those that clients still hold after their end.
    pub fn sockets_in_use(&self) -> usize {
        self.sockets_max - self.socket_slots.free_count() - self.preallocated_count
    }

    /// Sockets that it may have.
    pub fn sockets_max(&self) -> usize {
        self.sockets_max
    }

    /// Nobody will ever use it again, and nothing of it is under way.
    pub fn is_unused(&self) -> bool {
        self.is_for_processes
            && self.sockets_in_use() == 0
            && self.clients.iter().all(Option::is_none)
            && self.listeners.iter().all(Option::is_none)
    }

    pub fn socket(&mut self, socket: u32) -> &mut DomainSocket {
        &mut self.sockets[socket as usize]
    }

    /// The socket of a connection, if it is this number.
    pub fn socket_of(&self, socket: u32, conn: Conn) -> Option<u32> {
        let known = self.sockets.get(socket as usize)?;
        (known.conn == Some(conn)).then_some(socket)
    }

    /// Sockets that have been used at any time.
    pub fn used_sockets(&mut self) -> &mut [DomainSocket] {
        &mut self.sockets[..self.socket_slots.high_water()]
    }

    /// A socket cannot be had: there are as many as the domain may have.
    pub fn is_full(&mut self) -> bool {
        let full = self.socket_slots.free_count() == 0;
        self.stats.sockets_refused += u64::from(full);
        full
    }

    /// A socket for a new connection.
    pub(super) fn open_socket(&mut self, cx: &mut Context<'_>, conn: Conn, bits: u32) -> Option<u32> {
        let socket = self.socket_slots.allocate()?;
        let generation = self.socket(socket).generation;
        *self.socket(socket) = DomainSocket {
            conn: Some(conn),
            is_in_use: true,
            generation,
            state_bits: bits,
            ..DomainSocket::default()
        };
        self.region.socket(socket).reset(generation);
        self.attach_conn(cx, conn, socket);
        self.region.socket(socket).state.store(bits, Ordering::Release);
        Some(socket)
    }

    /// The socket is that of a connection.
    pub(super) fn attach_conn(&mut self, cx: &mut Context<'_>, conn: Conn, socket: u32) {
        self.socket(socket).conn = Some(conn);
        if let Ok(ends) = cx.endpoints(conn) {
            self.region.socket(socket).set_endpoints(ends);
        }
        // Only a stale handle can be refused.
        let _ = cx.set_token(conn, u32::from(self.index) << SOCKET_BITS | socket);
    }

    /// Tells all who hold it.
    #[inline]
    pub(super) fn notify_owners(&mut self, socket: u32) {
        let known = &self.sockets[socket as usize];
        let mut holders = known.owners;
        if let Some((client, _)) = known.offer {
            // It may have been taken, and the client learnt of nothing since.
            holders |= 1 << client;
        }
        while holders != 0 {
            let number = holders.trailing_zeros() as usize;
            holders &= holders - 1;
            if let Some(client) = &mut self.clients[number] {
                client.to_client.notify(self.region.to_client(number), socket, NOTIFIED);
            }
        }
    }

    pub(super) fn add_state(&mut self, socket: u32, bits: u32) {
        let known = self.socket(socket);
        known.state_bits |= bits;
        let bits = known.state_bits;
        self.region.socket(socket).state.store(bits, Ordering::Release);
        self.notify_owners(socket);
    }

    /// A client wrote what cannot be.
    pub(super) fn abort_for_violation(&mut self, cx: &mut Context<'_>, socket: u32) {
        self.stats.violations += 1;
        if let Some(conn) = self.socket(socket).conn {
            let _ = cx.abort(conn);
        }
    }

    /// Something was done that cost as much as so many bytes of a stream.
    #[inline]
    pub(super) fn charge(&mut self, bytes: usize) {
        self.turn_budget = self.turn_budget.saturating_sub(bytes);
    }

    /// Does what clients asked for, as far as it goes.
    pub(super) fn process_socket(&mut self, cx: &mut Context<'_>, socket: u32) {
        if self.turn_budget == 0 {
            self.queue_unstarted(socket);
            return;
        }
        self.charge(SOCKET_COST_BYTES_MIN);
        let known = &self.sockets[socket as usize];
        let Some(conn) = known.conn else {
            if let Some(udp) = known.udp.filter(|_| known.datagram_queue.is_some()) {
                self.send_queued_datagrams(cx, socket, udp, CHUNK_BYTES);
                if self.socket(socket).is_closing {
                    self.close_if_unowned(cx, socket);
                }
            }
            return;
        };
        let words = self.region.socket(socket);
        let requests = words.requests.load(Ordering::Acquire);
        // Behind the requests, as clients wish before they ask. For what is wished later they ring once more.
        let wishes = words.pending_options.load(Ordering::Acquire) != 0;
        let close = requests & request::CLOSE != 0 || known.is_closing;
        // As on Linux: the peer must learn that not all was read.
        if requests & request::ABORT != 0 || close && self.has_unread(socket) {
            // What was written before leaves before.
            self.forward(cx, socket, conn, usize::MAX);
            let _ = cx.abort(conn);
            return;
        }
        // First, for it must not depend on the other direction: an application that writes back what it reads has both full.
        if core::mem::take(&mut self.socket(socket).is_recv_blocked) {
            cx.resume_reading(conn);
        }
        if wishes {
            self.apply_options(cx, socket, conn, OptionOrder::BeforeData);
        }
        if self.sockets[socket as usize].has_small_recv_buffer {
            self.update_unread(cx, socket, conn);
        }
        let all = self.forward(cx, socket, conn, CHUNK_BYTES);
        if self.socket(socket).is_unfinished {
            return;
        }
        if wishes {
            self.apply_options(cx, socket, conn, OptionOrder::AfterData);
        }
        if !all {
            return;
        }
        if close {
            let _ = cx.close(conn);
        } else if requests & request::SHUTDOWN != 0 && !self.socket(socket).is_write_shut {
            self.socket(socket).is_write_shut = true;
            let _ = cx.shutdown_write(conn);
        }
    }

    /// Sets options that clients want.
    fn apply_options(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn, when: OptionOrder) {
        // As many as there are kinds, whatever clients write meanwhile.
        for _ in 0..pending_options::OPTION_KINDS {
            let Some(option) = pending_options::take_next(self.region.socket(socket), when) else { return };
            if let TcpOption::OobInline(on) = option {
                // Clients do that themselves.
                self.socket(socket).oob_inline = on;
                continue;
            }
            if let TcpOption::RecvBuffer(bytes) = option {
                self.socket(socket).has_small_recv_buffer = self.is_small_recv_buffer(Some(bytes));
            }
            if let TcpOption::NotSentLowat(bytes) = option {
                self.socket(socket).publishes_sent = bytes != 0;
                self.publish_sent(cx, socket, conn);
                // There may be room by the new bound, or only now is known how much there is (`sk_write_space`).
                self.notify_owners(socket);
            }
            // What cannot be the client has refused, unless it keeps to no rules; a connection that is over needs no options. What may be but needs a right the client has refused, too: one that keeps
            // to no rules gets the priority 7 instead of 6, which everybody may have.
            if matches!(cx.set_option(conn, option), Err(OptionError::Invalid | OptionError::TooMany)) {
                self.stats.options_refused += 1;
            }
        }
    }

    /// Whether a receive buffer of so many bytes is smaller than the region's, so that what lies there is more than it should hold.
    pub(super) fn is_small_recv_buffer(&self, recv_buffer_bytes: Option<u32>) -> bool {
        recv_buffer_bytes.is_some_and(|bytes| (bytes as usize) < self.region.buffer_bytes())
    }

    /// Notes how much of what clients wrote has left.
    fn publish_sent(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) {
        let sent = self.sockets[socket as usize].taken.saturating_sub(cx.not_sent(conn).into());
        self.region.socket(socket).sent.store(sent, Ordering::Release);
    }

    /// Bytes that clients wrote and the engine has not taken.
    pub(super) fn untaken_bytes(&self, socket: u32) -> u32 {
        let stream = self.region.stream(socket, Direction::Outgoing);
        let waiting = stream.readable(self.sockets[socket as usize].taken).unwrap_or(0);
        u32::try_from(waiting).unwrap_or(u32::MAX)
    }

    /// What clients have not read is not free for the peer.
    fn update_unread(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) {
        let words = self.region.socket(socket);
        words.wants_recv_space.store(1, Ordering::Relaxed);
        // Pairs with the fence of a client that has read.
        fence(Ordering::SeqCst);
        let read = words.positions(Direction::Incoming).read();
        let held = self.sockets[socket as usize].received.saturating_sub(read);
        cx.set_unread(conn, held.min(self.region.buffer_bytes() as u64) as u32);
    }

    /// Whether a client left bytes unread. A position that cannot be counts as unread.
    pub(super) fn has_unread(&self, socket: u32) -> bool {
        let known = &self.sockets[socket as usize];
        let stream = self.region.stream(socket, Direction::Incoming);
        known.is_recv_blocked || stream.unread(known.received) != Ok(0)
    }

    /// Moves what clients wrote to the engine, `most` bytes or a little more. Whether that was all; the rest follows in the next turn.
    pub(super) fn forward(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn, most: usize) -> bool {
        let (mut moved, mut filled, mut done) = (false, false, 0);
        let Self { region, sockets, stats, .. } = self;
        let (known, (words, _, stream)) = (&mut sockets[socket as usize], region.socket_and_streams(socket));
        let mut taken = known.taken;
        let end = loop {
            let Ok(waiting) = stream.readable(taken) else { break ForwardOutcome::Violation };
            // To be looked at behind the position, as clients write it before they write on.
            let record = match words.record_end.load(Ordering::Acquire) {
                0 => None,
                end => reach_record(cx, words, conn, (end, taken)),
            };
            if waiting == 0 {
                break ForwardOutcome::All;
            }
            filled |= waiting >= region.buffer_bytes();
            if done >= most {
                // The writer hears of room when there is more of it.
                moved = false;
                break ForwardOutcome::Chunk;
            }
            let continues = waiting > most || words.wants_send_space.load(Ordering::Relaxed) != 0;
            let count = record.map_or(waiting, |ahead| waiting.min(ahead)).min(most);
            let (accepted, count) =
                match zero_copy::send_zero_copy(cx, region, known, &stream, stats, (conn, taken, count)) {
                    Some(lent) => lent,
                    None => {
                        let copy = |at: usize, out: &mut [u8]| stream.copy_unread(taken, at, out);
                        (cx.send_with(conn, count, continues, copy), count)
                    }
                };
            // After an end of the stream nothing can be sent any more: it is dropped, as the client is about to learn.
            let accepted = accepted.unwrap_or(count);
            if known.loan.is_some() {
                stream.advance_taken(&mut taken, accepted);
            } else {
                stream.consume(&mut taken, accepted);
            }
            moved |= accepted > 0;
            done += accepted;
            if accepted < count {
                known.is_send_blocked = true;
                break ForwardOutcome::Blocked;
            }
            if count == waiting && record.is_none() {
                // For what came meanwhile there is a bell behind this one.
                break ForwardOutcome::All;
            }
        };
        known.taken = taken;
        let lends = known.loan.is_some();
        self.charge(done);
        match end {
            ForwardOutcome::All | ForwardOutcome::Blocked => {}
            ForwardOutcome::Chunk => self.queue_chunked(socket),
            ForwardOutcome::Violation => self.abort_for_violation(cx, socket),
        }
        if filled {
            self.ensure_large_buffer(cx, socket, conn, Direction::Outgoing);
        }
        if lends {
            moved = self.return_acked(cx, socket, conn);
        }
        if moved {
            self.notify_send_space(socket);
        }
        end == ForwardOutcome::All
    }

    /// Tells a client that waits for it that there is room to write.
    #[inline]
    pub(super) fn notify_send_space(&mut self, socket: u32) {
        // Pairs with the fence of a client that found no room.
        fence(Ordering::SeqCst);
        let wants = &self.region.socket(socket).wants_send_space;
        if wants.load(Ordering::Relaxed) != 0 && wants.swap(0, Ordering::Relaxed) != 0 {
            self.notify_owners(socket);
        }
    }

    /// The last client let go of it.
    pub(super) fn close_if_unowned(&mut self, cx: &mut Context<'_>, socket: u32) {
        let known = self.socket(socket);
        if known.owners != 0
            || known.proxies != 0
            || known.is_pending
            || known.offer.is_some()
            || !known.is_in_use
        {
            return;
        }
        if let Some(udp) = known.udp {
            if !self.finish_datagrams(cx, socket, udp) {
                return;
            }
            self.socket(socket).udp = None;
            self.drop_datagram_queue(socket);
            self.drop_datagrams(udp);
            // Only a stale handle can be refused.
            let _ = cx.udp_close(udp);
        }
        let known = self.socket(socket);
        if known.conn.is_some() {
            known.is_closing = true;
            self.process_socket(cx, socket);
        } else {
            self.free_socket(cx, socket);
        }
    }

    pub(super) fn free_socket(&mut self, cx: &mut Context<'_>, socket: u32) {
        let known = self.socket(socket);
        known.is_in_use = false;
        known.generation = known.generation.wrapping_add(1);
        self.end_loan(cx, socket);
        self.free_large_buffers(socket);
        self.socket_slots.release(socket);
        self.accept_more(cx);
    }

    /// Listeners that could not take all may have room again.
    pub(super) fn accept_more(&mut self, cx: &mut Context<'_>) {
        if !core::mem::take(&mut self.is_accept_stalled) {
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
        let Some(position) = known.received.checked_add_signed(urgent.unread_before.into()) else { return };
        let words = self.region.socket(socket);
        let read = words.positions(Direction::Incoming).read();
        urgent_mark::announce(words, position, urgent.byte, read, known.oob_inline);
        self.notify_owners(socket);
    }

    /// Tells of something that is no byte of a stream.
    pub(super) fn notify_oob_event(&mut self, socket: u32) {
        self.region.socket(socket).oob_events.fetch_add(1, Ordering::Relaxed);
        self.notify_owners(socket);
    }

    /// Wakes the clients that sleep and were rung.
    fn wake_clients(&mut self) {
        for number in set_bits(self.client_mask) {
            if let Some(client) = &mut self.clients[number]
                && client.to_client.needs_wakeup(self.region.to_client(number))
            {
                client.wake.signal();
            }
        }
    }

    /// For no socket in particular: whoever waits looks again.
    pub fn notify_all(&mut self) {
        for (number, client) in self.clients.iter_mut().enumerate() {
            if let Some(client) = client {
                client.to_client.notify(self.region.to_client(number), 0, NOTIFIED);
            }
        }
    }

    /// Answers what clients rang for. Returns how many bells.
    pub fn work(&mut self, cx: &mut Context<'_>) -> usize {
        self.turn_budget = TURN_BUDGET_BYTES;
        let continued = self.resume_unfinished(cx);
        let members = set_bits(self.client_mask);
        let answered: usize =
            members.map(|number| self.handle_doorbells(cx, number, DOORBELLS_PER_TURN_MAX)).sum();
        // Who wants room can wait as long as there is something to do, for the peer acknowledges meanwhile.
        let roomier = if self.short_of_send_space.is_empty() {
            0
        } else {
            self.reclaim_send_space_in_time(cx, continued + answered)
        };
        self.distribute(cx);
        self.wake_clients();
        continued + answered + roomier
    }

    /// Whether the shard may sleep as far as this domain is concerned. From now on bells wake it.
    pub fn before_sleep(&mut self) -> bool {
        let region = &self.region;
        if !self.unfinished.is_empty() || !self.chunked.is_empty() {
            return false;
        }
        // All of them, also behind one that has rung.
        set_bits(self.client_mask).fold(true, |quiet, number| {
            let client = self.clients[number].as_mut();
            client.is_none_or(|c| c.from_client.before_sleep(region.to_stack(number))) && quiet
        })
    }

    /// Whether a client is at work on `cpu`. `alone`: there is no other domain.
    pub fn has_client_running_on(&self, cpu: usize, alone: bool) -> bool {
        (alone || !self.is_penalised)
            && set_bits(self.client_mask).any(|number| {
                let works = self.clients[number].as_ref().is_some_and(|client| !client.is_idle);
                works
                    && self.region.client_cpu(number) == Some(cpu)
                    && !self.region.to_client(number).words.is_asleep()
            })
    }

    /// Leaves `cpu` to the clients that are at work on it. Says whether there are any, or `None` if the shard has work itself.
    ///
    /// Where a client is only it knows. One that says that it is here and is not, and rings in each turn to have the next, would keep everybody's frames waiting all the time. So with
    /// other domains beside it (`alone`: there are none) a domain that had all of a turn has no part in the next sleep.
    pub fn yield_cpu(&mut self, cpu: usize, alone: bool) -> Option<bool> {
        if self.is_penalised && !alone {
            return Some(false);
        }
        let region = &self.region;
        let mut given = false;
        for number in set_bits(self.client_mask) {
            let Some(client) = &mut self.clients[number] else { continue };
            let (up, down) = (region.to_stack(number), region.to_client(number));
            // Whatever a client writes there, it can have a turn only while it does something.
            client.is_idle &= !down.words.is_asleep();
            if client.is_idle || region.client_cpu(number) != Some(cpu) {
                continue;
            }
            match client.from_client.try_yield(up, down) {
                YieldOutcome::Yielded => {
                    client.notified_at_yield = Some(client.from_client.notified_count(up));
                    given = true;
                }
                YieldOutcome::Declined => {}
                YieldOutcome::Notified => return None,
            }
        }
        Some(given)
    }

    /// Whether a client has woken the shard. `ran_out`: clients that had a turn had all of it.
    pub fn after_sleep(&mut self, ran_out: bool) -> bool {
        let region = &self.region;
        region.set_cpu(rustix::thread::sched_getcpu());
        let mut woken = false;
        for number in set_bits(self.client_mask) {
            let Some(client) = &mut self.clients[number] else { continue };
            let up = region.to_stack(number);
            let woke = client.from_client.after_sleep(up);
            if let Some(rung) = client.notified_at_yield.take() {
                self.is_penalised |= ran_out && !woke;
                client.is_idle = ran_out && !woke && rung == client.from_client.notified_count(up);
            }
            woken |= woke;
        }
        woken
    }

    pub fn may_accept(&mut self, number: usize) -> bool {
        let deferring = self.deferred_count(number);
        let listening = self.listeners[number].as_ref();
        let may = self.socket_slots.free_count() > 0
            && listening.is_some_and(|l| l.pending.len() + deferring < l.backlog);
        self.is_accept_stalled |= !may;
        may
    }

    pub fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, number: usize) {
        let Some(socket) = self.open_socket(cx, conn, state::CONNECTED) else {
            let _ = cx.abort(conn);
            return;
        };
        let defers = self.defer_connection(cx, number, socket);
        match &mut self.listeners[number] {
            Some(listening) => {
                if !defers {
                    listening.pending.push_back(socket);
                    self.pending_listeners |= 1 << number;
                }
                listening.set_unaccepted(cx, listening.unaccepted + 1);
                let is_narrow = listening.has_small_recv_buffer;
                let known = self.socket(socket);
                (known.is_pending, known.has_small_recv_buffer) = (true, is_narrow);
            }
            None => {
                let _ = cx.abort(conn);
            }
        }
    }

    pub fn connected(&mut self, cx: &mut Context<'_>, conn: Conn, socket: u32) {
        if let Ok(ends) = cx.endpoints(conn) {
            self.region.socket(socket).set_endpoints(ends);
        }
        self.add_state(socket, state::CONNECTED);
    }

    pub fn data(&mut self, cx: &mut Context<'_>, conn: Conn, socket: u32, data: &[u8]) -> usize {
        let (known, (words, stream, _)) =
            (&mut self.sockets[socket as usize], self.region.socket_and_streams(socket));
        if known.is_closing {
            // Nobody will ever read it.
            let _ = cx.abort(conn);
            return data.len();
        }
        if known.is_write_shut && words.requests.load(Ordering::Relaxed) & request::SHUTDOWN_READ != 0 {
            // The peer must learn that they were lost.
            known.has_late_data = true;
            let _ = cx.abort(conn);
            return data.len();
        }
        let mut count = stream.write(&mut known.received, data);
        let is_short = matches!(count, Ok(count) if count < data.len());
        if is_short {
            words.wants_recv_space.store(1, Ordering::Relaxed);
            // Pairs with the fence of a client that has read.
            fence(Ordering::SeqCst);
            count = count.and_then(|done| Ok(done + stream.write(&mut known.received, &data[done..])?));
            known.is_recv_blocked = count.is_ok_and(|count| count < data.len());
        }
        let (is_deferred, is_narrow) = (known.deferred_at.is_some(), known.has_small_recv_buffer);
        if is_short {
            self.ensure_large_buffer(cx, socket, conn, Direction::Incoming);
        }
        if is_deferred {
            self.promote(socket);
        }
        if is_narrow {
            self.update_unread(cx, socket, conn);
        }
        match count {
            Ok(count) => {
                self.notify_owners(socket);
                count
            }
            Err(_) => {
                self.abort_for_violation(cx, socket);
                data.len()
            }
        }
    }

    pub fn writable(&mut self, cx: &mut Context<'_>, socket: u32) {
        self.socket(socket).is_send_blocked = false;
        self.process_socket(cx, socket);
        let known = &mut self.sockets[socket as usize];
        let awaits = core::mem::take(&mut known.awaits_acked);
        if let Some(conn) = known.conn.filter(|_| known.publishes_sent | awaits) {
            if known.publishes_sent {
                self.publish_sent(cx, socket, conn);
            }
            self.notify_owners(socket);
        }
    }

    pub fn closed(&mut self, cx: &mut Context<'_>, socket: u32, reason: CloseReason) {
        // To a program that shut both directions it is as if the peer had done so.
        let reason = if self.socket(socket).has_late_data { CloseReason::Reset } else { reason };
        self.add_state(socket, closed_bits(reason));
        self.drop_deferred(cx, socket);
        self.socket(socket).conn = None;
        self.close_if_unowned(cx, socket);
    }

    pub fn acked(&mut self, socket: u32, bytes: u32) {
        self.region.socket(socket).acked.fetch_add(bytes.into(), Ordering::Relaxed);
        self.notify_owners(socket);
    }
}
