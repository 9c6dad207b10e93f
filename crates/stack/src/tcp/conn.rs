//! The connection slab.
//!
//! A connection is two cache lines ([`Tcb`]) that hold all an idle connection needs. Whatever only a busy one needs
//! (buffers, retransmission queue, scoreboard) is a [`Busy`] from a pool, taken when there is something to queue and given back after
//! a retransmission time-out of idleness. All references are indices.

use super::active::ActiveConn;
use super::mtu_search::MtuSearchState;
use super::profile::ProfileId;
use super::state::State;
use crate::events::CloseReason;
use crate::handle::Conn;
use crate::ip::NextHop;
use crate::options::SocketOptions;
use crate::tables::memory_of;
use crate::timer_wheel::{TimerNode, TimerStore};
use crate::wire::tcp::SeqNumber;
use core::ops::{BitOr, BitOrAssign, Index, IndexMut};

/// No entry.
pub(crate) const NONE: u32 = u32::MAX;

/// Boolean properties of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flags(u32);

impl Flags {
    /// Addresses are an index into the IPv6 address pool.
    pub const V6: Self = Self(1);
    /// Timestamps are in use (RFC 7323).
    pub const TIMESTAMPS: Self = Self(1 << 1);
    /// Selective acknowledgements are in use (RFC 2018).
    pub const SACK: Self = Self(1 << 2);
    /// Window scaling is in use.
    pub const WSCALE: Self = Self(1 << 3);
    /// ECN was negotiated (RFC 3168).
    pub const ECN: Self = Self(1 << 4);
    /// Set ECE in everything we send until CWR comes.
    pub const ECN_ECHO: Self = Self(1 << 5);
    /// Set CWR in the next new data.
    pub const ECN_CWR: Self = Self(1 << 6);
    /// An acknowledgement must leave with this batch.
    pub const ACK_NOW: Self = Self(1 << 7);
    /// An acknowledgement is owed at `ack_deadline`.
    pub const ACK_DELAYED: Self = Self(1 << 8);
    /// Data flow both ways in turn: delay acknowledgements, they ride on answers.
    pub const PINGPONG: Self = Self(1 << 9);
    /// On the transmit list.
    pub const TX_LISTED: Self = Self(1 << 10);
    /// Our FIN stands at the end of the send queue.
    pub const FIN_QUEUED: Self = Self(1 << 11);
    /// The application closed the socket: nobody reads or writes any more.
    pub const ORPHAN: Self = Self(1 << 12);
    /// The application took it from the accept queue, or opened it itself.
    pub const ACCEPTED: Self = Self(1 << 13);
    /// It began with our SYN.
    pub const ACTIVE_OPEN: Self = Self(1 << 14);
    /// No Nagle.
    pub const NODELAY: Self = Self(1 << 15);
    /// Hold back partial segments.
    pub const CORK: Self = Self(1 << 16);
    /// Probe when idle.
    pub const KEEPALIVE: Self = Self(1 << 17);
    /// `close` means RST.
    pub const LINGER_ZERO: Self = Self(1 << 18);
    /// Urgent data stay in line.
    pub const OOB_INLINE: Self = Self(1 << 19);
    /// Report acknowledged bytes.
    pub const ACK_EVENTS: Self = Self(1 << 20);
    /// A send was cut short: tell when there is room.
    pub const WANT_WRITABLE: Self = Self(1 << 21);
    /// A `Readable` event waits to be taken.
    pub const READABLE_QUEUED: Self = Self(1 << 22);
    /// The peer's FIN was received in order.
    pub const PEER_FIN: Self = Self(1 << 23);
    /// The first data have been seen (quick acknowledgements were granted).
    pub const ATO_SET: Self = Self(1 << 24);
    /// SYN or SYN+ACK must be sent.
    pub const SYN_PENDING: Self = Self(1 << 25);
    /// In-burst data wait for the owner.
    pub const INLINE: Self = Self(1 << 26);
    /// Waits in an accept queue.
    pub const IN_ACCEPT_QUEUE: Self = Self(1 << 27);
    /// The path asked for less than the smallest MTU we accept: packets may be fragmented on the way.
    pub const MTU_LOCKED: Self = Self(1 << 28);
    /// ICMP or a soft error was noted while it tried.
    pub const SOFT_ERROR: Self = Self(1 << 29);
    /// An urgent byte is expected or held.
    pub const URGENT: Self = Self(1 << 30);

    /// `ts_recent` is older than `last_rx` says, and no measure any more (RFC 7323 §5.5).
    pub const TS_RECENT_OLD: Self = Self(1 << 31);

    pub const NONE: Self = Self(0);

    /// Those that a socket's options ask for.
    pub fn from_options(options: &SocketOptions) -> Self {
        let mut flags = Self::NONE;
        flags.assign(Self::NODELAY, options.nodelay);
        flags.assign(Self::KEEPALIVE, options.keepalive);
        flags.assign(Self::ACK_EVENTS, options.ack_events);
        flags
    }

    /// These and those.
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    #[inline]
    pub const fn has(self, flag: Self) -> bool {
        self.0 & flag.0 != 0
    }

    /// The first of two is set, and the second is not.
    #[inline]
    pub const fn has_first_only(self, first: Self, second: Self) -> bool {
        self.0 & (first.0 | second.0) == first.0
    }

    #[inline]
    pub fn set(&mut self, flag: Self) {
        self.0 |= flag.0;
    }

    #[inline]
    pub fn clear(&mut self, flag: Self) {
        self.0 &= !flag.0;
    }

    #[inline]
    pub fn assign(&mut self, flag: Self, on: bool) {
        if on {
            self.set(flag);
        } else {
            self.clear(flag);
        }
    }
}

impl BitOr for Flags {
    type Output = Self;
    fn bitor(self, rhs: Self) -> Self {
        Self(self.0 | rhs.0)
    }
}

impl BitOrAssign for Flags {
    fn bitor_assign(&mut self, rhs: Self) {
        self.0 |= rhs.0;
    }
}

/// What a slot of the table holds. The wire knows a connection only while it is `Open`, and [`State`] speaks of that time; what comes
/// afterwards is between the engine and the owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// No connection.
    #[default]
    Vacant,
    /// A connection: segments and timers reach it.
    Open,
    /// Both directions are closed; only bytes that the owner has not read keep it.
    Unread,
    /// It ended in the accept queue: whoever accepts it learns why.
    Unaccepted(CloseReason),
    /// Its end is reported: the slot goes when the owner asks for the event after that.
    Reported,
}

/// The bit beside [`Tcb::quick_acks`].
const PUSHED: u8 = 1 << 7;

/// Transmission control block: the whole of an idle connection, in two cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Tcb {
    // First line: identity and sequence numbers, read for each segment.
    /// IPv4 address of the peer, or index of both addresses in the IPv6 pool.
    pub remote_ip: u32,
    /// Our IPv4 address.
    pub local_ip: u32,
    pub remote_port: u16,
    pub local_port: u16,
    pub generation: u32,
    pub state: State,
    /// Low four bits: shift of the peer's window; high four: of ours.
    pub wscale: u8,
    /// Low seven bits: immediate acknowledgements still to be given (Linux's quick ack mode); high bit: what a delayed one is for was the end of a write of
    /// the peer's (`ICSK_ACK_PUSHED`).
    pub quick_acks_and_pushed: u8,
    /// SYN or SYN+ACK retransmissions, later unanswered probes.
    pub retries: u8,
    pub flags: Flags,
    pub rcv_nxt: SeqNumber,
    /// Right edge of the window we advertised: never moves back (RFC 9293 §3.8.6).
    pub rcv_edge: SeqNumber,
    /// `rcv_nxt` when we sent the last acknowledgement.
    pub rcv_wup: SeqNumber,
    /// `rcv_nxt` when the receive window last grew.
    pub rcv_grow_seq: SeqNumber,
    pub snd_una: SeqNumber,
    pub snd_nxt: SeqNumber,
    pub snd_wnd: u32,
    pub snd_wl1: SeqNumber,
    /// Timestamp to echo (RFC 7323 §4.3).
    pub ts_recent: u32,
    /// Added to the clock in our timestamps, so that they tell nothing about the host.
    pub ts_offset: u32,

    // Second line: congestion, timer, path.
    /// Congestion window in segments.
    pub cwnd: u32,
    /// Slow start threshold in segments.
    pub ssthresh: u32,
    /// Smoothed round trip time in 1/8 µs; 0 if there is no sample yet.
    pub srtt: u32,
    /// Four times the mean deviation, in µs, at least `rto_min`.
    pub rttvar: u32,
    /// Smallest round trip time in µs. During the handshake: when SYN or SYN+ACK left (low bits of the clock in µs).
    pub min_rtt: u32,
    pub timer: TimerNode,
    pub hop: NextHop,
    /// Index of the [`Busy`] part, or [`NONE`].
    pub active: u32,
    /// The application's; before `accept` the listener's index (see [`super::listen::listener_of`]); in a free slot the next free one.
    pub token: u32,
    pub profile: ProfileId,
    /// Low four bits: the receive window may grow to 64 KiB << this; high four: a [`SearchState`].
    pub rcv_grow_and_mtu_search: u8,
    pub slot_state: SlotState,
    /// Largest payload the peer takes in a segment, from its MSS option.
    pub peer_mss: u16,
    /// Path MTU in bytes: the route's, or less if probes have shown no more to arrive.
    pub pmtu: u16,
    /// Estimate of the peer's segment size, for "an acknowledgement for every second full segment".
    pub rcv_mss: u16,
    /// When the delayed acknowledgement is due: low bits of the clock in ms.
    pub ack_deadline: u16,
    /// When we last received something: low bits of the clock in ms.
    pub last_rx: u32,
}

const _: () = assert!(size_of::<Tcb>() == 128);

impl Tcb {
    pub fn vacant() -> Self {
        Self {
            remote_ip: 0,
            local_ip: 0,
            remote_port: 0,
            local_port: 0,
            generation: 0,
            state: State::Closed,
            wscale: 0,
            quick_acks_and_pushed: 0,
            retries: 0,
            flags: Flags::NONE,
            rcv_nxt: SeqNumber(0),
            rcv_edge: SeqNumber(0),
            rcv_wup: SeqNumber(0),
            rcv_grow_seq: SeqNumber(0),
            snd_una: SeqNumber(0),
            snd_nxt: SeqNumber(0),
            snd_wnd: 0,
            snd_wl1: SeqNumber(0),
            ts_recent: 0,
            ts_offset: 0,
            cwnd: 0,
            ssthresh: u32::MAX,
            srtt: 0,
            rttvar: 0,
            min_rtt: 0,
            timer: TimerNode::default(),
            hop: NextHop::default(),
            active: NONE,
            token: NONE,
            profile: ProfileId::DEFAULT,
            rcv_grow_and_mtu_search: 0,
            slot_state: SlotState::Vacant,
            peer_mss: 536,
            pmtu: 576,
            rcv_mss: 536,
            ack_deadline: 0,
            last_rx: 0,
        }
    }

    #[inline]
    pub const fn snd_wscale(&self) -> u8 {
        self.wscale & 15
    }

    #[inline]
    pub const fn rcv_wscale(&self) -> u8 {
        self.wscale >> 4
    }

    /// Immediate acknowledgements still to be given.
    #[inline]
    pub const fn quick_acks(&self) -> u8 {
        self.quick_acks_and_pushed & !PUSHED
    }

    /// At least so many of them.
    #[inline]
    pub fn raise_quick_acks(&mut self, count: u8) {
        self.quick_acks_and_pushed = self.quick_acks_and_pushed & PUSHED | self.quick_acks().max(count);
    }

    /// What is to be acknowledged later was the end of a write, as far as that can be seen.
    #[inline]
    pub fn set_pushed(&mut self) {
        self.quick_acks_and_pushed |= PUSHED;
    }

    #[inline]
    pub const fn is_pushed(&self) -> bool {
        self.quick_acks_and_pushed & PUSHED != 0
    }

    /// An acknowledgement leaves.
    #[inline]
    pub fn dec_quick_acks(&mut self) {
        self.quick_acks_and_pushed = self.quick_acks().saturating_sub(1);
    }

    /// The receive window may grow to 64 KiB << this.
    #[inline]
    pub const fn rcv_grow(&self) -> u8 {
        self.rcv_grow_and_mtu_search & 15
    }

    /// Whether the path MTU is found by probing (RFC 4821).
    #[inline]
    pub const fn mtu_search(&self) -> MtuSearchState {
        MtuSearchState::from_bits(self.rcv_grow_and_mtu_search >> 4)
    }

    pub fn set_mtu_search(&mut self, state: MtuSearchState) {
        self.rcv_grow_and_mtu_search = self.rcv_grow() | state.to_bits() << 4;
    }

    #[inline]
    pub fn has(&self, flag: Flags) -> bool {
        self.flags.has(flag)
    }

    /// Window the peer may still use.
    #[inline]
    pub fn rcv_wnd(&self) -> u32 {
        u32::try_from(self.rcv_edge - self.rcv_nxt).unwrap_or(0)
    }

    /// Sequence number behind the last byte received in order: `rcv_nxt`, less the peer's FIN.
    #[inline]
    pub fn data_end(&self) -> SeqNumber {
        self.rcv_nxt - u32::from(self.has(Flags::PEER_FIN))
    }

    /// Our FIN is queued or sent, and not acknowledged.
    #[inline]
    pub fn has_unacked_fin(&self) -> bool {
        matches!(self.state, State::FinWait1 | State::Closing | State::LastAck)
    }

    /// Bytes of IP and TCP headers without options.
    #[inline]
    pub fn header_bytes(&self) -> u16 {
        if self.has(Flags::V6) { 60 } else { 40 }
    }

    /// Bytes of options in every segment of ours.
    #[inline]
    pub fn option_bytes(&self) -> u16 {
        if self.has(Flags::TIMESTAMPS) { 12 } else { 0 }
    }

    /// Payload bytes of a full segment: what peer and path allow, without the options each segment carries (RFC 6691).
    #[inline]
    pub fn mss(&self) -> u32 {
        self.mss_on(self.pmtu)
    }

    /// The same on a path with this MTU.
    #[inline]
    pub fn mss_on(&self, mtu: u16) -> u32 {
        let path = mtu.saturating_sub(self.header_bytes());
        u32::from(self.peer_mss.min(path).saturating_sub(self.option_bytes()).max(8))
    }
}

/// All connections of a shard. Memory for `connections_max` is reserved at the start and touched as connections come.
pub(crate) struct ConnTable {
    slots: Vec<Tcb>,
    free: u32,
    max: usize,
    live: usize,
}

impl ConnTable {
    pub fn new(max: u32) -> Self {
        Self { slots: Vec::with_capacity(max as usize), free: NONE, max: max as usize, live: 0 }
    }

    /// The memory that is reserved.
    pub fn memory(&self) -> *const [u8] {
        memory_of(&self.slots)
    }

    /// Takes a slot; its `generation` is already the new tenant's. `None` at `connections_max`.
    pub fn alloc(&mut self) -> Option<u32> {
        let index = if self.free != NONE {
            let index = self.free;
            self.free = self.slots[index as usize].token;
            index
        } else if self.slots.len() < self.max {
            self.grow()
        } else {
            return None;
        };
        self.live += 1;
        Some(index)
    }

    /// Adds a slot that was never used.
    #[inline(never)]
    fn grow(&mut self) -> u32 {
        self.slots.push(Tcb::vacant());
        (self.slots.len() - 1) as u32
    }

    /// Gives a slot back. From here on handles to it are stale.
    pub fn free(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.active == NONE && slot.state == State::Closed);
        slot.generation = slot.generation.wrapping_add(1);
        slot.flags = Flags::NONE;
        slot.slot_state = SlotState::Vacant;
        slot.token = self.free;
        self.free = index;
        self.live -= 1;
    }

    /// Index of a live handle.
    #[inline]
    pub fn lookup(&self, conn: Conn) -> Option<u32> {
        let slot = self.slots.get(conn.index() as usize)?;
        // A vacant slot has a generation that was never handed out, so no second check is needed.
        (slot.generation == conn.generation()).then_some(conn.index())
    }

    #[inline]
    pub fn handle(&self, index: u32) -> Conn {
        Conn::new(index, self[index].generation)
    }

    /// Number of connections.
    pub fn live(&self) -> usize {
        self.live
    }

    /// Most connections that there ever were at a time: slots are used again before there are more.
    pub fn high_water(&self) -> usize {
        self.slots.len()
    }

    /// Every slot that was ever used, for listings and invariant checks; not for the path of a packet.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Tcb)> {
        self.slots.iter().enumerate().map(|(i, t)| (i as u32, t))
    }
}

impl Index<u32> for ConnTable {
    type Output = Tcb;
    #[inline]
    fn index(&self, index: u32) -> &Tcb {
        &self.slots[index as usize]
    }
}

impl IndexMut<u32> for ConnTable {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut Tcb {
        &mut self.slots[index as usize]
    }
}

impl TimerStore for ConnTable {
    #[inline]
    fn timer_node(&mut self, id: u32) -> &mut TimerNode {
        &mut self.slots[id as usize].timer
    }
}

/// Pool of busy parts. Entries keep the capacity of their queues, so that reuse allocates nothing.
pub(crate) struct ActivePool {
    entries: Vec<ActiveConn>,
    free: Vec<u32>,
}

impl ActivePool {
    pub fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }

    /// Takes an entry for connection `owner`; it is in its initial state.
    pub fn alloc(&mut self, owner: u32) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(ActiveConn::new());
            (self.entries.len() - 1) as u32
        });
        self.entries[index as usize].owner = owner;
        index
    }

    /// Takes an entry back. The caller has cleared its buffers.
    #[inline(always)]
    pub fn free(&mut self, index: u32) {
        self.entries[index as usize].reset();
        self.free.push(index);
    }

    /// Entries in use.
    pub fn in_use(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}

impl Index<u32> for ActivePool {
    type Output = ActiveConn;
    #[inline]
    fn index(&self, index: u32) -> &ActiveConn {
        &self.entries[index as usize]
    }
}

impl IndexMut<u32> for ActivePool {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut ActiveConn {
        &mut self.entries[index as usize]
    }
}
