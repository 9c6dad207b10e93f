//! One trust domain: its region, its clients and its sockets. A domain delays the others by no more than its
//! turn budget.

use super::super::control::AddressSharing;
use super::super::data_class;
use super::super::pending_options::{self, OptionOrder};
use super::super::region::{Direction, HOLD_BEGINS, Region, SocketArea};
use super::super::socket::{closed_bits, request, state};
use super::super::sync::{Ordering, fence};
use super::super::urgent_mark;
use super::super::{ChannelConfig, ChannelStats};
use super::arrival_times::ArrivalTimes;
use super::client_table::ClientTable;
use super::credit_queue::CreditQueue;
use super::departures::Departures;
use super::device_wait::DeviceWait;
use super::large_buffers::LargeBufferPool;
use super::owner_set::OwnerSet;
use super::receive_charges::ReceiveCharges;
use super::slot_allocator::SlotAllocator;
use super::tx_stamps::StreamStamps;
use super::unordered::UnorderedStream;
use super::zero_copy::{self, Untaken, ZeroCopyLoan};
use crate::context::Context;
use crate::handler::UrgentData;
use crate::socket_filter::FilterBudget;
use crate::wait::EventFd;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::error::OptionError;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::options::TcpOption;
use ginnel_stack::priority::{self, ClassedQueue};
use ginnel_stack::udp::{Datagram, UdpError};
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Notifications of one client that are processed in a turn, so that a client that notifies endlessly does
/// not delay frames.
const DOORBELLS_PER_TURN_MAX: usize = 256;
/// Bytes of one socket that are taken in a turn. What is copied into the engine is sent in the same turn,
/// while it is in the cache; the peer receives it while more is copied here; and no socket delays the others.
/// Datagrams are charged at their [`cost`](crate::channel::datagram::DatagramHeader::cost).
// limit: bytes of a socket in one turn
pub(super) const CHUNK_BYTES: usize = 128 << 10;
/// Bytes of all sockets of a domain that are taken in a turn: a domain with many sockets does not delay the
/// others longer than one with few.
// limit: bytes of a domain in one turn
const TURN_BUDGET_BYTES: usize = 1024 << 10;

/// Cost of a step of a filter in the budget of a turn, in bytes of a stream.
const STEP_COST_BYTES: usize = 4;
/// Least cost of processing a socket, in bytes of a stream.
const SOCKET_COST_BYTES_MIN: usize = 1024;
/// Bits of the socket's number in the engine's token of a connection. The domain's index is above them.
const SOCKET_BITS: u32 = 24;

/// State of a listener.
#[derive(Serialize, Deserialize)]
pub(super) struct DomainListener {
    pub listener: Listener,
    pub address: SocketAddr,
    /// Rules by which other sockets may share the address.
    pub sharing: AddressSharing,
    /// Clients that own it.
    pub owners: OwnerSet,
    /// Number of proxy descriptors that own it.
    pub proxies: u32,
    /// Clients that have credit.
    #[serde(skip)]
    pub credit_queue: CreditQueue,
    /// Connections that are not offered.
    pub pending: ClassedQueue<u32>,
    /// True if the listener is among those whose connections are distributed next.
    #[serde(skip)]
    pub is_distributable: bool,
    /// True if a full backlog left connections in the engine's accept queue.
    pub is_backlog_full: bool,
    /// True if the listener is among those that wait for a free socket of the domain.
    #[serde(skip)]
    pub is_stalled: bool,
    /// Number of connections that are pending or offered.
    pub unaccepted: u32,
    /// How many connections may be pending here; further ones wait in the engine.
    pub backlog: usize,
    /// The backlog that the application requested, within the domain's limit.
    pub requested_backlog: u32,
    /// [`DomainSocket::report_unread_after`] of its connections.
    pub report_unread_after: u64,
    /// An administrator has closed it: the engine has no such listener any more.
    pub is_destroyed: bool,
    /// Number of the open file description for which it was opened, or 0.
    pub description: u64,
    /// A client has removed its filter since it was opened.
    pub filter_removed: bool,
}

impl DomainListener {
    /// Sets the number of connections that no client has accepted, and tells the engine, which counts them in
    /// its backlog.
    pub fn set_unaccepted(&mut self, cx: &mut Context<'_>, unaccepted: u32) {
        self.unaccepted = unaccepted;
        cx.set_backlog(self.listener, self.requested_backlog, unaccepted);
    }
}

/// A slot in the memory of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ClientSlot {
    pub client: u16,
    pub slot: u8,
}

/// State of a socket.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct DomainSocket {
    pub conn: Option<Conn>,
    pub is_in_use: bool,
    pub generation: u32,
    /// Clients that own it.
    pub owners: OwnerSet,
    /// Number of proxy descriptors that own it.
    pub proxies: u32,
    /// The slot of the client to which it is offered.
    pub offer: Option<ClientSlot>,
    /// The slot of the client for which it is preallocated.
    pub preallocated: Option<ClientSlot>,
    /// True if it is pending at a listener.
    pub is_pending: bool,
    /// Number of the listener that has it while it is pending.
    pub listener: u16,
    pub state_bits: u32,
    /// Positions: bytes received, and bytes taken from clients.
    pub received: u64,
    pub taken: u64,
    /// True if the engine holds received bytes back for which the region had no space.
    pub is_recv_blocked: bool,
    /// True if the engine's send buffer was full.
    pub is_send_blocked: bool,
    /// It has no owner any more: what was written is still sent.
    pub is_closing: bool,
    /// True if FIN was requested of the engine.
    pub is_write_shut: bool,
    /// True if bytes arrived after both directions were shut down.
    pub has_late_data: bool,
    /// Position in the stream after which unread bytes in the region are reported to the engine, which then
    /// advertises a smaller window.
    pub report_unread_after: u64,
    /// True if the engine was told that bytes in the region are unread, or if the socket's latency stages are
    /// sampled.
    pub is_unread_reported: bool,
    /// Clients want to know how many bytes were sent.
    pub publishes_sent: bool,
    /// True if a client waits for acknowledgements although there is space.
    pub awaits_acked: bool,
    /// Clients want urgent bytes to stay in the stream (`SO_OOBINLINE`).
    pub oob_inline: bool,
    /// The last close resets the connection (`SO_LINGER` with time 0).
    pub resets_at_close: bool,
    /// The engine's socket, if this is a UDP socket.
    pub udp: Option<UdpHandle>,
    /// Queued datagrams, if they pass through the region.
    pub datagram_queue: Option<Box<DatagramQueue>>,
    /// It is among the sockets that continue in the next turn.
    #[serde(skip)]
    pub is_unfinished: bool,
    /// Large buffers of the incoming and the outgoing direction.
    pub large_buffers: [Option<u32>; 2],
    /// Bytes that the engine sends directly from the large buffer.
    #[serde(skip)]
    pub loan: Option<ZeroCopyLoan>,
    /// Offsets in the stream, once bytes could be taken before bytes which precede them.
    pub unordered: Option<Box<UnorderedStream>>,
    /// Times at which bytes arrived, if clients want them.
    pub arrival_times: Option<Box<ArrivalTimes>>,
}

/// Datagrams of a socket that are not in the region, and what those in it are charged.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct DatagramQueue {
    /// Datagrams for which there was no space.
    pub pending: VecDeque<(Datagram, Vec<u8>)>,
    /// Datagrams that are too long for the region and have to be requested.
    pub oversize: VecDeque<(Datagram, Vec<u8>)>,
    /// True if the engine keeps an error queue (`IP_RECVERR`).
    pub recverr: bool,
    /// Size of the receive buffer, which limits the unread datagrams (`SO_RCVBUF`).
    pub recv_buffer_bytes: u32,
    /// Charges for the datagrams in the region.
    pub charges: ReceiveCharges,
    /// How long datagrams wait for a device that refuses them.
    pub device_wait: DeviceWait,
    /// Bytes of the datagrams that wait for their time.
    pub held_bytes: usize,
}

/// Datagrams and errors of a UDP socket that were not received yet.
pub(super) type UdpBacklog = VecDeque<Result<(Datagram, Vec<u8>), UdpError>>;

/// The stack's side of one region.
pub(super) struct Domain {
    pub index: u8,
    pub region: Arc<Region>,
    /// Wakes the shard.
    pub wake: Arc<EventFd>,
    /// It was created for processes that attached through the broker, and is removed when they are gone.
    pub is_for_processes: bool,
    pub clients: ClientTable,
    /// Listeners that got pending connections, or clients with credit, since their connections were last
    /// distributed.
    pub distributable: VecDeque<u16>,
    /// Entries of the numbers that [`socket_slots`](Self::socket_slots) has listed. The vector never moves,
    /// and grows in steps: a program that opens the first socket of the domain does not wait for a table of
    /// all sockets that the domain may have.
    pub sockets: Vec<DomainSocket>,
    pub socket_slots: SlotAllocator,
    /// Large buffers that no socket has.
    pub large_buffer_pool: LargeBufferPool,
    /// Sockets that continue in the next turn: those for which the turn had no budget, and then those of
    /// which a chunk was taken.
    pub unfinished: VecDeque<u32>,
    pub chunked: Vec<u32>,
    /// Sockets of which a device has refused a datagram, in the order in which they are tried again.
    pub refused: Vec<u32>,
    /// Sockets of which a device has refused a datagram after it took others of them. They come last.
    pub refused_after_progress: Vec<u32>,
    /// Rest of this turn's budget, in bytes.
    pub turn_budget: usize,
    /// Sockets that have little send space because of zero-copy loans.
    pub short_of_send_space: Vec<u32>,
    /// Turns for which those sockets have waited.
    pub send_space_wait_turns: u32,
    /// Preallocated sockets of all clients.
    pub preallocated_count: usize,
    /// Number of sockets that the domain may have.
    pub(super) sockets_max: usize,
    /// Grows up to the domain's limit.
    pub listeners: Vec<Option<DomainListener>>,
    pub listener_slots: SlotAllocator,
    pub offer_timeout: Duration,
    /// How long SYNs wait after the last owner of a listener has ended; zero: not at all.
    pub killed_listener_wait: Duration,
    pub backlog_max: usize,
    /// UDP sockets by the engine's handles: their numbers here, and what was not received yet.
    pub udp: HashMap<UdpHandle, (u32, UdpBacklog)>,
    /// Bytes of queued datagrams, and their limit.
    pub datagram_bytes: usize,
    pub datagram_bytes_max: usize,
    /// The memory of the filters of sockets.
    pub filter_budget: Arc<FilterBudget>,
    /// Sockets of whose bytes clients want to know when they were sent, and those that are looked at after
    /// this turn.
    pub stamped: HashMap<u32, StreamStamps>,
    pub stamps_due: Vec<u32>,
    /// Datagrams that wait for their time.
    pub departures: Departures,
    /// True if a timer is set for outstanding offers.
    pub is_offer_timer_set: bool,
    /// Listeners that could not take all connections of the engine's accept queue for lack of sockets.
    pub stalled_listeners: VecDeque<u16>,
    /// Clients are workers of one program: a worker that listens on another one's address shares the
    /// listener.
    pub shares_listeners: bool,
    /// True if a client that claimed to run on the shard's CPU used its whole last time slice. If there are
    /// other domains, this domain is skipped at the next sleep.
    pub is_penalised: bool,
    /// Buffer for one datagram, once there are UDP sockets.
    pub datagram_buffer: Box<[u8]>,
    /// Class of priority of the event that is being handled, if `[priority]` is in use.
    pub event_class: Option<u8>,
    pub stats: ChannelStats,
}

/// How far bytes that a client wrote were moved to the engine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ForwardOutcome {
    /// All bytes were moved.
    All,
    /// There is more than one turn may move.
    Chunk,
    /// The engine accepted no more.
    Blocked,
    /// A client claims more bytes than are possible.
    Violation,
}

/// Handles the mark that clients set at position `end`: the end of a record, or the place where they began to
/// hold data back ([`HOLD_BEGINS`]). Returns how many bytes lie between position `taken` and the mark; `None`
/// if the mark is reached.
#[cold]
fn reach_record(cx: &mut Context<'_>, area: &SocketArea, conn: Conn, end: u64, taken: u64) -> Option<usize> {
    match (end & !HOLD_BEGINS).checked_sub(taken) {
        Some(ahead @ 1..) => Some(usize::try_from(ahead).unwrap_or(usize::MAX)),
        at_once => {
            match at_once {
                Some(_) if end & HOLD_BEGINS != 0 => cx.push_before_held(conn),
                Some(_) => cx.end_record(conn),
                None => {}
            }
            // Fails if clients have set another end by now. An end that was passed before it was set is
            // ignored.
            let _ = area.record_end.compare_exchange(end, 0, Ordering::AcqRel, Ordering::Relaxed);
            None
        }
    }
}

/// Returns the domain and the socket of a token.
pub(super) fn split_token(token: u32) -> (usize, u32) {
    ((token >> SOCKET_BITS) as usize, token & ((1 << SOCKET_BITS) - 1))
}

impl Domain {
    /// Creates a domain without clients.
    pub fn new(index: u8, config: &ChannelConfig, is_for_processes: bool) -> std::io::Result<Self> {
        Ok(Self::with_region(index, config, is_for_processes, (Region::create(config)?, EventFd::new()?)))
    }

    /// Creates a domain without clients, whose region has none and whose shard is woken by the eventfd.
    pub fn with_region(
        index: u8,
        config: &ChannelConfig,
        is_for_processes: bool,
        (region, wake): (Arc<Region>, EventFd),
    ) -> Self {
        let sockets = region.sockets();
        let for_bytes = config.buffer_bytes_max / (2 * u64::from(config.socket_buffer_bytes));
        let sockets_max = usize::try_from(for_bytes).map_or(sockets, |max| max.clamp(1, sockets));
        Self {
            index,
            wake: Arc::new(wake),
            is_for_processes,
            clients: ClientTable::new(region.clients()),
            distributable: VecDeque::new(),
            sockets: Vec::with_capacity(sockets),
            socket_slots: SlotAllocator::new(sockets_max),
            large_buffer_pool: (0..region.large().0).rev().collect(),
            unfinished: VecDeque::new(),
            chunked: Vec::new(),
            refused: Vec::new(),
            refused_after_progress: Vec::new(),
            turn_budget: TURN_BUDGET_BYTES,
            short_of_send_space: Vec::new(),
            send_space_wait_turns: 0,
            preallocated_count: 0,
            sockets_max,
            listeners: Vec::new(),
            listener_slots: SlotAllocator::new(region.listeners()),
            offer_timeout: Duration::from_millis(config.offer_ms.into()),
            killed_listener_wait: Duration::from_millis(config.killed_listener_wait_ms.into()),
            backlog_max: config.backlog_max as usize,
            udp: HashMap::new(),
            datagram_bytes: 0,
            datagram_bytes_max: config.datagram_bytes_max as usize,
            filter_budget: FilterBudget::new(index, config.filter_bytes_max as usize),
            stamped: HashMap::new(),
            stamps_due: Vec::new(),
            departures: Departures::default(),
            is_offer_timer_set: false,
            stalled_listeners: VecDeque::new(),
            shares_listeners: false,
            is_penalised: false,
            datagram_buffer: Box::default(),
            event_class: None,
            stats: ChannelStats::default(),
            region,
        }
    }

    /// Returns the token of the domain's timers.
    pub fn token(&self) -> u64 {
        self.index.into()
    }

    /// Returns the number of sockets in use: connections, and sockets that clients still own after their
    /// connection closed.
    pub fn sockets_in_use(&self) -> usize {
        self.socket_slots.in_use() - self.preallocated_count
    }

    /// Returns the counters of the domain.
    pub fn stats(&self) -> ChannelStats {
        ChannelStats { doorbell_rings_full: self.clients.rings_full(), ..self.stats }
    }

    /// Returns the number of sockets that the domain may have.
    pub fn sockets_max(&self) -> usize {
        self.sockets_max
    }

    /// Returns whether no process will ever use the domain again, and nothing of it is in flight.
    pub fn is_unused(&self) -> bool {
        self.is_for_processes
            && self.sockets_in_use() == 0
            && self.clients.count() == 0
            && self.listener_slots.in_use() == 0
    }

    /// Begins to handle an event of this class of priority, with which clients are notified. Called only if
    /// `[priority]` is in use.
    #[cold]
    pub fn begin_event(&mut self, class: u8) {
        self.event_class = Some(class);
        self.clients.set_class(class);
    }

    /// Returns the class of the event that is handled; `None` without `[priority]`.
    #[inline(always)]
    pub(super) fn event_class(&self) -> Option<u8> {
        if priority::COMPILED { self.event_class } else { None }
    }

    /// Records the class of bytes that were put into the region for clients, and of the `waiting` bytes after
    /// them for which the region has no space yet.
    #[cold]
    pub(super) fn record_data_class(&self, socket: u32, class: u8, waiting: usize) {
        let area = self.region.socket(socket);
        let read = area.positions(Direction::Incoming).read();
        let end = self.sockets[socket as usize].received.saturating_add(waiting as u64);
        data_class::record(&area.data_class, class, end, read);
    }

    /// Returns the class of a socket's unread bytes or, without any, that of the event that established its
    /// connection.
    #[cold]
    fn unread_class(&self, socket: u32) -> u8 {
        let area = self.region.socket(socket);
        let read = area.positions(Direction::Incoming).read();
        data_class::of_unread(&area.data_class, read)
    }

    /// Calls `notify` so that the notifications in it have the class of a socket's unread bytes.
    #[cold]
    pub(super) fn with_data_class(&mut self, socket: u32, notify: impl FnOnce(&mut Self)) {
        self.clients.set_class(self.unread_class(socket));
        notify(self);
        if let Some(class) = self.event_class() {
            self.clients.set_class(class);
        }
    }

    pub fn socket(&mut self, socket: u32) -> &mut DomainSocket {
        &mut self.sockets[socket as usize]
    }

    /// Returns `socket` if that socket has this connection, and `None` otherwise.
    pub fn socket_of(&self, socket: u32, conn: Conn) -> Option<u32> {
        let entry = self.sockets.get(socket as usize)?;
        (entry.conn == Some(conn)).then_some(socket)
    }

    /// Returns whether no socket is free, and counts the refusal.
    pub fn is_full(&mut self) -> bool {
        let full = !self.socket_slots.has_free();
        self.stats.sockets_refused += u64::from(full);
        full
    }

    /// Allocates the number of a socket.
    #[inline]
    pub(super) fn allocate_socket(&mut self) -> Option<u32> {
        let socket = self.socket_slots.allocate()?;
        if socket as usize >= self.sockets.len() {
            self.grow_sockets();
        }
        Some(socket)
    }

    /// Adds entries for the numbers that were listed last.
    #[cold]
    #[inline(never)]
    fn grow_sockets(&mut self) {
        self.sockets.resize_with(self.socket_slots.listed(), DomainSocket::default);
    }

    /// Allocates a socket for a new connection.
    pub(super) fn open_socket(&mut self, cx: &mut Context<'_>, conn: Conn, bits: u32) -> Option<u32> {
        let socket = self.allocate_socket()?;
        let generation = self.socket(socket).generation;
        *self.socket(socket) = DomainSocket {
            conn: Some(conn),
            is_in_use: true,
            generation,
            state_bits: bits,
            report_unread_after: self.report_unread_after(None),
            ..DomainSocket::default()
        };
        self.region.socket(socket).reset(generation);
        self.attach_conn(cx, conn, socket);
        self.region.socket(socket).state.store(bits, Ordering::Release);
        Some(socket)
    }

    /// Attaches a connection to a socket.
    pub(super) fn attach_conn(&mut self, cx: &mut Context<'_>, conn: Conn, socket: u32) {
        self.socket(socket).conn = Some(conn);
        if let Ok(ends) = cx.endpoints(conn) {
            self.region.socket(socket).set_endpoints(ends);
        }
        // Only a stale handle can be refused.
        let _ = cx.set_token(conn, self.token_of(socket));
    }

    /// Returns the engine's token of a socket's connection.
    #[inline(always)]
    pub(super) fn token_of(&self, socket: u32) -> u32 {
        u32::from(self.index) << SOCKET_BITS | socket
    }

    /// Notifies all owners of a socket.
    #[inline]
    pub(super) fn notify_owners(&mut self, socket: u32) {
        let Self { sockets, clients, .. } = self;
        let entry = &sockets[socket as usize];
        entry.owners.clients().for_each(|client| clients.notify(client, socket));
        if let Some(ClientSlot { client, .. }) = entry.offer {
            // The client may have accepted the offer without having been notified since.
            clients.notify(client.into(), socket);
        }
    }

    pub(super) fn add_state(&mut self, socket: u32, bits: u32) {
        let entry = self.socket(socket);
        entry.state_bits |= bits;
        let bits = entry.state_bits;
        self.region.socket(socket).state.store(bits, Ordering::Release);
        self.notify_owners(socket);
    }

    /// Aborts a connection because a client wrote an invalid value.
    pub(super) fn abort_for_violation(&mut self, cx: &mut Context<'_>, socket: u32) {
        self.stats.violations += 1;
        if let Some(conn) = self.socket(socket).conn {
            let _ = cx.abort(conn);
        }
    }

    /// Charges the turn's budget with what costs as much as `bytes` bytes of a stream.
    #[inline]
    pub(super) fn charge(&mut self, bytes: usize) {
        self.turn_budget = self.turn_budget.saturating_sub(bytes);
    }

    /// Does what clients requested for a socket, as far as the turn's budget allows.
    pub(super) fn process_socket(&mut self, cx: &mut Context<'_>, socket: u32) {
        if self.turn_budget == 0 {
            self.queue_unstarted(socket);
            return;
        }
        self.charge(SOCKET_COST_BYTES_MIN);
        let entry = &self.sockets[socket as usize];
        let Some(conn) = entry.conn else {
            if let Some(udp) = entry.udp.filter(|_| entry.datagram_queue.is_some()) {
                self.send_queued_datagrams(cx, socket, udp, CHUNK_BYTES);
                if self.socket(socket).is_closing {
                    self.close_if_unowned(cx, socket);
                }
            }
            return;
        };
        let area = self.region.socket(socket);
        let requests = area.requests.load(Ordering::Acquire);
        // Read after the requests, as clients set options before they make requests. Options that are set
        // later have a notification of their own.
        let has_options = area.pending_options.load(Ordering::Acquire) != 0;
        let close = requests & request::CLOSE != 0 || entry.is_closing;
        if close && has_options {
            self.apply_options(cx, socket, conn, OptionOrder::BeforeData);
        }
        // As on Linux: the peer has to learn that not all bytes were read.
        let resets = close && (self.sockets[socket as usize].resets_at_close || self.has_unread(socket));
        if requests & request::ABORT != 0 || resets {
            // What was written before is sent before.
            self.forward(cx, socket, conn, usize::MAX);
            let _ = cx.abort(conn);
            return;
        }
        // Done first, for it must not depend on the other direction: an application that echoes what it reads
        // has both directions full.
        if core::mem::take(&mut self.socket(socket).is_recv_blocked) {
            cx.resume_reading(conn);
        }
        if has_options {
            self.apply_options(cx, socket, conn, OptionOrder::BeforeData);
        }
        if self.sockets[socket as usize].is_unread_reported {
            self.on_reported_notification(cx, socket, conn);
        }
        let all = self.forward(cx, socket, conn, CHUNK_BYTES);
        if self.socket(socket).is_unfinished {
            return;
        }
        if has_options {
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

    /// Applies options that clients have set.
    fn apply_options(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn, when: OptionOrder) {
        // At most once for each kind, whatever clients write meanwhile.
        for _ in 0..pending_options::OPTION_KINDS {
            let Some(option) = pending_options::take_next(self.region.socket(socket), when) else { return };
            if let TcpOption::OobInline(on) = option {
                // Clients handle this option themselves.
                self.socket(socket).oob_inline = on;
                continue;
            }
            if let TcpOption::ArrivalTimes(on) = option {
                self.set_arrival_times(socket, on);
                continue;
            }
            if let TcpOption::LingerZero(on) = option {
                self.socket(socket).resets_at_close = on;
            }
            if let TcpOption::RecvBuffer(bytes) = option {
                let report_unread_after = self.report_unread_after(Some(bytes));
                let entry = self.socket(socket);
                entry.set_unread_threshold(report_unread_after);
                entry.is_unread_reported |= report_unread_after == 0;
            }
            if let TcpOption::NotSentLowat(bytes) = option {
                self.socket(socket).publishes_sent = bytes != 0;
                self.publish_sent(cx, socket, conn);
                // The new limit may leave space, or only now the amount of space is known (`sk_write_space`).
                self.notify_owners(socket);
            }
            // A well-behaved client has refused invalid options, and a closed connection needs none. It has
            // also refused options for which a privilege is needed; a client that breaks the rules can set
            // the priority 7 instead of 6, which everybody may set.
            if matches!(cx.set_option(conn, option), Err(OptionError::Invalid | OptionError::TooMany)) {
                self.stats.options_refused += 1;
            }
        }
    }

    /// Publishes how many of the bytes that clients wrote were sent.
    fn publish_sent(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) {
        let sent = self.sockets[socket as usize].taken.saturating_sub(cx.notsent(conn).into());
        self.region.socket(socket).sent.store(sent, Ordering::Release);
    }

    /// Returns how many of the bytes that clients wrote the engine has not taken.
    pub(super) fn untaken_bytes(&self, socket: u32) -> u32 {
        let stream = self.region.stream(socket, Direction::Outgoing);
        let waiting = stream.readable(self.sockets[socket as usize].taken).unwrap_or(0);
        u32::try_from(waiting).unwrap_or(u32::MAX)
    }

    /// Returns whether clients left bytes unread. An invalid position counts as unread bytes.
    pub(super) fn has_unread(&self, socket: u32) -> bool {
        let entry = &self.sockets[socket as usize];
        let stream = self.region.stream(socket, Direction::Incoming);
        entry.is_recv_blocked || stream.unread(entry.received) != Ok(0)
    }

    /// Moves what clients wrote to the engine, `max` bytes or a little more. Returns whether that was all;
    /// the rest follows in the next turn.
    pub(super) fn forward(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn, max: usize) -> bool {
        let (mut moved, mut filled, mut done) = (false, false, 0);
        let Self { region, sockets, stats, .. } = self;
        let (entry, (area, _, stream)) = (&mut sockets[socket as usize], region.socket_and_streams(socket));
        let mut taken = entry.taken;
        let end = loop {
            let Ok(waiting) = stream.readable(taken) else { break ForwardOutcome::Violation };
            // Read after the position, as clients set the end of a record before they write on.
            let record = match area.record_end.load(Ordering::Acquire) {
                0 => None,
                end => reach_record(cx, area, conn, end, taken),
            };
            if waiting == 0 {
                break ForwardOutcome::All;
            }
            filled |= waiting >= region.buffer_bytes();
            if done >= max {
                // The writer is notified of space when there is more of it.
                moved = false;
                break ForwardOutcome::Chunk;
            }
            let continues = waiting > max || area.wants_send_space.load(Ordering::Relaxed) != 0;
            let count = record.map_or(waiting, |ahead| waiting.min(ahead)).min(max);
            let (accepted, count) = match zero_copy::send_zero_copy(
                cx,
                region,
                entry,
                &stream,
                stats,
                Untaken { conn, position: taken, len: count },
            ) {
                Some(loan) => loan,
                None => {
                    let copy = |at: usize, out: &mut [u8]| stream.copy_unread(taken, at, out);
                    (cx.send_with(conn, count, continues, copy), count)
                }
            };
            // After the end of the stream nothing can be sent: the bytes are dropped, as the client is about
            // to learn.
            let accepted = accepted.unwrap_or(count);
            if entry.loan.is_some() {
                stream.advance_taken(&mut taken, accepted);
            } else {
                stream.consume(&mut taken, accepted);
            }
            moved |= accepted > 0;
            done += accepted;
            if accepted < count {
                entry.is_send_blocked = true;
                break ForwardOutcome::Blocked;
            }
            if count == waiting && record.is_none() {
                // Bytes written meanwhile have a notification of their own.
                break ForwardOutcome::All;
            }
        };
        entry.taken = taken;
        let has_loan = entry.loan.is_some();
        self.charge(done);
        match end {
            ForwardOutcome::All | ForwardOutcome::Blocked => {}
            ForwardOutcome::Chunk => self.queue_chunked(socket),
            ForwardOutcome::Violation => self.abort_for_violation(cx, socket),
        }
        if filled {
            self.ensure_large_buffer(cx, socket, conn, Direction::Outgoing);
        }
        if has_loan {
            moved = self.return_acked(cx, socket, conn);
        }
        if moved {
            self.notify_send_space(socket);
        }
        end == ForwardOutcome::All
    }

    /// Notifies a client that waits for send space.
    #[inline]
    pub(super) fn notify_send_space(&mut self, socket: u32) {
        // Pairs with the fence of a client that found no space.
        fence(Ordering::SeqCst);
        let wants = &self.region.socket(socket).wants_send_space;
        if wants.load(Ordering::Relaxed) != 0 && wants.swap(0, Ordering::Relaxed) != 0 {
            self.notify_owners(socket);
        }
    }

    /// Closes a socket if it has no owner any more.
    pub(super) fn close_if_unowned(&mut self, cx: &mut Context<'_>, socket: u32) {
        let entry = self.socket(socket);
        if !entry.owners.is_empty()
            || entry.proxies != 0
            || entry.is_pending
            || entry.offer.is_some()
            || !entry.is_in_use
        {
            return;
        }
        if let Some(udp) = entry.udp {
            if !self.finish_datagrams(cx, socket, udp) {
                return;
            }
            self.socket(socket).udp = None;
            self.drop_datagram_queue(socket);
            self.drop_datagrams(udp);
            // Only a stale handle can be refused.
            let _ = cx.udp_close(udp);
        }
        let entry = self.socket(socket);
        if entry.conn.is_some() {
            entry.is_closing = true;
            self.process_socket(cx, socket);
        } else {
            self.free_socket(cx, socket);
        }
    }

    pub(super) fn free_socket(&mut self, cx: &mut Context<'_>, socket: u32) {
        let entry = self.socket(socket);
        entry.is_in_use = false;
        entry.generation = entry.generation.wrapping_add(1);
        if !self.stamped.is_empty() {
            self.stamped.remove(&socket);
        }
        self.end_loan(cx, socket);
        self.free_large_buffers(socket);
        self.socket_slots.release(socket);
        self.accept_more(cx);
    }

    /// Accepts connections for listeners that could not take all for lack of sockets.
    #[inline]
    pub(super) fn accept_more(&mut self, cx: &mut Context<'_>) {
        while self.socket_slots.has_free()
            && let Some(number) = self.stalled_listeners.pop_front()
        {
            if let Some(listening) = &mut self.listeners[usize::from(number)] {
                listening.is_stalled = false;
                self.accept_from(cx, number.into());
            }
        }
    }

    /// Accepts connections from the engine's queue of a listener.
    pub(super) fn accept_from(&mut self, cx: &mut Context<'_>, number: usize) {
        let Some(listening) = self.listeners.get_mut(number).and_then(Option::as_mut) else { return };
        listening.is_backlog_full = false;
        let listener = listening.listener;
        let event_class = self.event_class();
        while self.may_accept(number)
            && let Some((conn, class)) = cx.accept_with_class(listener)
        {
            if event_class.is_some() {
                self.begin_event(class);
            }
            self.accepted(cx, conn, number);
        }
        if let Some(class) = event_class {
            self.begin_event(class);
        }
    }

    /// Records that urgent data was announced or arrived. All bytes go into the region, as clients may read
    /// up to the mark much later.
    pub(super) fn urgent(&mut self, cx: &mut Context<'_>, conn: Conn, socket: u32, urgent: UrgentData) {
        // Only a stale handle can be refused.
        let _ = cx.set_option(conn, TcpOption::OobInline(true));
        let entry = &self.sockets[socket as usize];
        let Some(position) = entry.received.checked_add_signed(urgent.unread_before.into()) else { return };
        let area = self.region.socket(socket);
        let read = area.positions(Direction::Incoming).read();
        urgent_mark::announce(area, position, urgent.byte, read, entry.oob_inline);
        // If the byte is next in the stream, the notification of its data follows in this turn: an
        // edge-triggered waiter must not be woken twice.
        let data_follow = urgent.byte.is_some() && !entry.is_recv_blocked && cx.unread(conn) > 0;
        if !data_follow {
            self.notify_owners(socket);
        }
    }

    /// Notifies owners of an event that is not a byte of a stream.
    pub(super) fn notify_oob_event(&mut self, socket: u32) {
        self.region.socket(socket).oob_events.fetch_add(1, Ordering::Relaxed);
        self.notify_owners(socket);
    }

    /// Processes the notifications of clients. Returns how much was done.
    pub fn work(&mut self, cx: &mut Context<'_>) -> usize {
        self.turn_budget = TURN_BUDGET_BYTES;
        self.region.count_turn();
        let steps = self.filter_budget.begin_turn();
        if steps > 0 {
            // Sockets without a filter do not stall.
            self.charge((steps * STEP_COST_BYTES).min(TURN_BUDGET_BYTES / 8 * 7));
        }
        let continued = self.resume_unfinished(cx);
        let notified = self.clients.begin_turn(&self.region);
        let mut handled = 0;
        for number in notified.iter().map(|number| usize::from(*number)) {
            self.clients.activate(number);
            handled += self.handle_doorbells(cx, number, DOORBELLS_PER_TURN_MAX);
        }
        self.clients.end_turn(notified);
        // Writers that want space can wait while there is other work, for the peer acknowledges meanwhile.
        let reclaimed = if self.short_of_send_space.is_empty() {
            0
        } else {
            self.reclaim_send_space_in_time(cx, continued + handled)
        };
        self.distribute(cx);
        self.clients.wake_notified();
        continued + handled + reclaimed
    }

    /// Returns whether work was left to the next turn.
    pub fn has_unfinished(&self) -> bool {
        !self.unfinished.is_empty() || !self.chunked.is_empty() || self.clients.has_unfinished()
    }

    /// Makes notifications wake the shard. Returns whether the shard may sleep as far as this domain is
    /// concerned.
    pub fn before_sleep(&mut self) -> bool {
        if self.has_unfinished() {
            return false;
        }
        self.region.stack_sleep().begin_sleep();
        self.clients.is_quiet_before_sleep(&self.region)
    }

    /// Returns whether a client runs on `cpu`. `is_single`: there is no other domain with clients.
    pub fn has_client_running_on(&self, cpu: usize, is_single: bool) -> bool {
        (is_single || !self.is_penalised) && self.clients.has_client_running_on(cpu)
    }

    /// Yields `cpu` to the clients that run on it. Returns whether there are any, or `None` if the shard has
    /// work itself.
    ///
    /// Only a client knows where it runs. A client that falsely claims to run on `cpu`, and notifies in each
    /// turn to get the next yield, would delay everybody's frames all the time. So if there are other domains
    /// (`is_single` is false), a domain that used its whole time slice is skipped at the next sleep.
    pub fn yield_cpu(&mut self, cpu: usize, is_single: bool) -> Option<bool> {
        if self.is_penalised && !is_single {
            return Some(false);
        }
        self.clients.yield_cpu(&self.region, cpu)
    }

    /// Ends a sleep. Returns whether a client has woken the shard. `has_expired`: the yield lasted for its
    /// full time.
    pub fn after_sleep(&mut self, has_expired: bool) -> bool {
        self.region.set_cpu(rustix::thread::sched_getcpu());
        let is_woken = self.region.stack_sleep().end_sleep();
        let has_yielded = self.clients.end_yield(has_expired && !is_woken);
        self.is_penalised |= has_yielded && has_expired && !is_woken;
        is_woken
    }

    /// Returns whether a connection of a listener can be accepted. If not, it is accepted later.
    pub fn may_accept(&mut self, number: usize) -> bool {
        let has_socket = self.socket_slots.has_free();
        let Some(listening) = self.listeners.get_mut(number).and_then(Option::as_mut) else { return false };
        if listening.pending.len() >= listening.backlog {
            listening.is_backlog_full = true;
            return false;
        }
        if !has_socket && !core::mem::replace(&mut listening.is_stalled, true) {
            // Cannot truncate: listener numbers have 16 bits.
            self.stalled_listeners.push_back(number as u16);
        }
        has_socket
    }

    /// Queues a listener whose pending connections are distributed before the end of the turn.
    #[inline]
    pub(super) fn set_distributable(&mut self, number: usize) {
        if let Some(Some(listening)) = self.listeners.get_mut(number)
            && !listening.pending.is_empty()
            && !core::mem::replace(&mut listening.is_distributable, true)
        {
            // Cannot truncate: listener numbers have 16 bits.
            self.distributable.push_back(number as u16);
        }
    }

    pub fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, number: usize) {
        let Some(socket) = self.open_socket(cx, conn, state::CONNECTED) else {
            let _ = cx.abort(conn);
            return;
        };
        if let Some(class) = self.event_class() {
            self.record_data_class(socket, class, 0);
        }
        // Cannot truncate: listener numbers have 16 bits.
        self.socket(socket).listener = number as u16;
        let class = self.pending_class(socket);
        match self.listeners.get_mut(number).and_then(Option::as_mut) {
            Some(listening) => {
                listening.pending.push_back(socket, class);
                listening.set_unaccepted(cx, listening.unaccepted + 1);
                let report_unread_after = listening.report_unread_after;
                let entry = self.socket(socket);
                (entry.is_pending, entry.report_unread_after) = (true, report_unread_after);
                self.set_distributable(number);
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
        let (entry, (area, stream, _)) =
            (&mut self.sockets[socket as usize], self.region.socket_and_streams(socket));
        if entry.is_closing {
            // Nobody will ever read the bytes.
            let _ = cx.abort(conn);
            return data.len();
        }
        if entry.is_write_shut && area.requests.load(Ordering::Relaxed) & request::SHUTDOWN_READ != 0 {
            // The peer has to learn that the bytes were lost.
            entry.has_late_data = true;
            let _ = cx.abort(conn);
            return data.len();
        }
        let mut count = stream.write(&mut entry.received, data);
        let is_short = matches!(count, Ok(count) if count < data.len());
        if is_short {
            area.wants_recv_space.store(1, Ordering::Relaxed);
            // Pairs with the fence of a client that has read.
            fence(Ordering::SeqCst);
            count = count.and_then(|done| Ok(done + stream.write(&mut entry.received, &data[done..])?));
            entry.is_recv_blocked = count.is_ok_and(|count| count < data.len());
        }
        let reports_unread = entry.received > entry.report_unread_after;
        if is_short {
            self.ensure_large_buffer(cx, socket, conn, Direction::Incoming);
        }
        if reports_unread {
            let is_whole = count.is_ok_and(|count| count == cx.unread(conn).max(data.len()));
            self.on_reported_arrival(cx, socket, conn, is_whole);
        }
        match count {
            Ok(count) => {
                if priority::COMPILED && self.sockets[socket as usize].unordered.is_some() {
                    self.count_ordered(cx, socket, count);
                }
                match self.event_class() {
                    Some(class) => {
                        let waiting = cx.unread(conn).max(data.len()) - count;
                        let before = self.unread_class(socket);
                        self.record_data_class(socket, class, waiting);
                        if self.sockets[socket as usize].is_pending && class > before {
                            self.raise_pending(socket, class);
                        }
                        // These bytes may have waited for space since a more urgent event.
                        self.with_data_class(socket, |domain| domain.notify_owners(socket));
                    }
                    None => self.notify_owners(socket),
                }
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
        let entry = &mut self.sockets[socket as usize];
        let awaits = core::mem::take(&mut entry.awaits_acked);
        if let Some(conn) = entry.conn.filter(|_| entry.publishes_sent | awaits) {
            if entry.publishes_sent {
                self.publish_sent(cx, socket, conn);
            }
            self.notify_owners(socket);
        }
    }

    pub fn closed(&mut self, cx: &mut Context<'_>, socket: u32, reason: CloseReason) {
        // For a program that shut down both directions, it is as if the peer had reset the connection.
        let reason = if self.socket(socket).has_late_data { CloseReason::Reset } else { reason };
        self.add_state(socket, closed_bits(reason));
        let entry = self.socket(socket);
        entry.conn = None;
        // The end of a sampling finds only connections.
        if entry.is_unread_reported {
            self.set_stages(socket, None);
        }
        self.close_if_unowned(cx, socket);
    }

    pub fn acked(&mut self, socket: u32, bytes: u32) {
        self.region.socket(socket).acked.fetch_add(bytes.into(), Ordering::Relaxed);
        self.notify_owners(socket);
    }
}
