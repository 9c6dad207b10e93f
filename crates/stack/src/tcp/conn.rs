//! The connection slab.
//!
//! A connection is two cache lines ([`Tcb`]), which hold everything that an idle connection needs. Buffers,
//! the retransmission queue and the scoreboard are in an [`ActiveConn`] from a pool, which is taken when
//! something is queued and released after the connection was idle for a retransmission time-out. All
//! references are indices.

use super::active::ActiveConn;
use super::mtu_search::MtuSearchState;
use super::profile::ProfileId;
use super::rate::RateState;
use super::state::State;
use crate::events::CloseReason;
use crate::handle::Conn;
use crate::ip::NextHop;
use crate::options::SocketOptions;
use crate::prefetch::prefetch;
use crate::tables::memory_of;
use crate::timer_wheel::{TimerNode, TimerStore};
use crate::wire::tcp::SeqNumber;
use core::ops::{BitOr, BitOrAssign, Index, IndexMut};
use serde::{Deserialize, Serialize};

/// Bytes of the timestamps option with its padding (RFC 7323 appendix A).
pub(crate) const TIMESTAMPS_BYTES: u16 = 12;

/// Marks that there is no entry.
pub(crate) const NONE: u32 = u32::MAX;

/// Boolean properties of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Flags(u32);

impl Flags {
    /// The addresses are an index into the IPv6 address pool.
    pub const V6: Self = Self(1);
    /// Timestamps are in use (RFC 7323).
    pub const TIMESTAMPS: Self = Self(1 << 1);
    /// Selective acknowledgements are in use (RFC 2018).
    pub const SACK: Self = Self(1 << 2);
    /// Window scaling is in use.
    pub const WSCALE: Self = Self(1 << 3);
    /// ECN was negotiated (RFC 3168).
    pub const ECN: Self = Self(1 << 4);
    /// ECE is set in every segment that is sent, until CWR arrives.
    pub const ECN_ECHO: Self = Self(1 << 5);
    /// CWR is set in the next new data.
    pub const ECN_CWR: Self = Self(1 << 6);
    /// An acknowledgement must be sent in this turn.
    pub const ACK_NOW: Self = Self(1 << 7);
    /// An acknowledgement is due at `ack_deadline`.
    pub const ACK_DELAYED: Self = Self(1 << 8);
    /// Data flow in both directions in turn: acknowledgements are delayed, because they are piggybacked on
    /// the answers.
    pub const PINGPONG: Self = Self(1 << 9);
    /// The connection is on the transmit list.
    pub const TX_LISTED: Self = Self(1 << 10);
    /// FIN is queued at the end of the send queue.
    pub const FIN_QUEUED: Self = Self(1 << 11);
    /// The application has closed the socket: nothing is read or written any more.
    pub const ORPHAN: Self = Self(1 << 12);
    /// The application has accepted the connection, or has opened it itself.
    pub const ACCEPTED: Self = Self(1 << 13);
    /// The connection was opened actively, by a SYN that was sent from here.
    pub const ACTIVE_OPEN: Self = Self(1 << 14);
    /// Nagle's algorithm is off (`TCP_NODELAY`).
    pub const NODELAY: Self = Self(1 << 15);
    /// Partial segments are held back (`TCP_CORK`).
    pub const CORK: Self = Self(1 << 16);
    /// The peer is probed when the connection is idle (`SO_KEEPALIVE`).
    pub const KEEPALIVE: Self = Self(1 << 17);
    /// `close` sends RST (`SO_LINGER` with time 0).
    pub const LINGER_ZERO: Self = Self(1 << 18);
    /// Urgent data stay in the stream (`SO_OOBINLINE`).
    pub const OOB_INLINE: Self = Self(1 << 19);
    /// Acknowledged bytes are reported as events.
    pub const ACK_EVENTS: Self = Self(1 << 20);
    /// A send was cut short: `Writable` is reported when there is room.
    pub const WANT_WRITABLE: Self = Self(1 << 21);
    /// A `Readable` event is queued and was not taken yet.
    pub const READABLE_QUEUED: Self = Self(1 << 22);
    /// The peer's FIN was received in order.
    pub const PEER_FIN: Self = Self(1 << 23);
    /// The first data have arrived (quick acknowledgements were granted).
    pub const ATO_SET: Self = Self(1 << 24);
    /// SYN or SYN+ACK has to be sent.
    pub const SYN_PENDING: Self = Self(1 << 25);
    /// Data in the current burst wait for the owner.
    pub const INLINE: Self = Self(1 << 26);
    /// The connection is in an accept queue.
    pub const IN_ACCEPT_QUEUE: Self = Self(1 << 27);
    /// `Connected` is queued and was not reported. The bit is that of `IN_ACCEPT_QUEUE`, which a connection
    /// with `ACTIVE_OPEN` never has.
    pub const CONNECTED_QUEUED: Self = Self::IN_ACCEPT_QUEUE;
    /// Packets may be fragmented on the way (no DF over IPv4): the path reported an MTU below the smallest
    /// one that is accepted, or the application permits fragmentation.
    pub const MTU_LOCKED: Self = Self(1 << 28);
    /// An ICMP error or another soft error was recorded since the last progress.
    pub const SOFT_ERROR: Self = Self(1 << 29);
    /// No segment is predicted: an urgent byte is expected or was not read yet, or the socket has a filter,
    /// which is in its profile.
    pub const URGENT_OR_FILTERED: Self = Self(1 << 30);

    /// `ts_recent` is older than 24 days, whatever `last_rx` says, and PAWS does not compare with it (RFC
    /// 7323 §5.5). Also set until the handshake of a fast open is complete, because it turns header
    /// prediction off.
    pub const TS_RECENT_OLD: Self = Self(1 << 31);

    pub const NONE: Self = Self(0);

    /// Returns the flags that the options of a socket request.
    pub fn from_options(options: &SocketOptions) -> Self {
        let mut flags = Self::NONE;
        flags.assign(Self::NODELAY, options.nodelay);
        flags.assign(Self::KEEPALIVE, options.keepalive);
        flags.assign(Self::ACK_EVENTS, options.ack_events);
        flags.assign(Self::MTU_LOCKED, options.may_fragment);
        flags
    }

    /// Returns the union of two sets of flags.
    pub const fn with(self, others: Self) -> Self {
        Self(self.0 | others.0)
    }

    #[inline]
    pub const fn has(self, flag: Self) -> bool {
        self.0 & flag.0 != 0
    }

    /// Returns whether `first` is set and `second` is not.
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

/// State of a slot of the connection table. Segments reach a connection only while its slot is `Open`;
/// [`State`] is the state of TCP during that time. The later states of the slot concern the engine and the
/// owner only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum SlotState {
    /// The slot has no connection.
    #[default]
    Vacant,
    /// The slot has a connection that segments and timers reach.
    Open,
    /// Both directions are closed; only bytes that the owner has not read keep the slot in use.
    Unread,
    /// The connection ended in the accept queue; the reason is reported after it was accepted.
    Unaccepted(CloseReason),
    /// The end was reported: the slot is freed when the owner asks for the next event.
    Reported,
}

/// The bits that `quick_acks_and_marks` has besides the count.
const PUSHED: u8 = 1 << 7;
const ACKED: u8 = 1 << 6;
const MARKS: u8 = PUSHED | ACKED;

/// Transmission control block: everything that an idle connection needs, in two cache lines.
#[derive(Debug, Serialize, Deserialize)]
#[repr(C, align(64))]
pub(crate) struct Tcb {
    // First line: identity and sequence numbers, which each segment needs.
    /// IPv4 address of the peer, or the index of both addresses in the IPv6 pool.
    #[serde(skip)]
    pub remote_ip: u32,
    /// Local IPv4 address.
    #[serde(skip)]
    pub local_ip: u32,
    pub remote_port: u16,
    pub local_port: u16,
    pub generation: u32,
    pub state: State,
    /// Low four bits: shift of the peer's window (`snd_wscale`); high four bits: shift of the local window
    /// (`rcv_wscale`).
    pub wscale: u8,
    /// Low six bits: immediate acknowledgements that are still to be sent (Linux's quickack mode); then a
    /// bit: the peer has acknowledged data; high bit: the delayed acknowledgement covers the end of a write
    /// of the peer (`ICSK_ACK_PUSHED`).
    pub quick_acks_and_marks: u8,
    /// Retransmissions of SYN or SYN+ACK; later, unanswered keepalive probes.
    pub retries: u8,
    pub flags: Flags,
    pub rcv_nxt: SeqNumber,
    /// Right edge of the window that was advertised; never moves back (RFC 9293 §3.8.6).
    pub rcv_edge: SeqNumber,
    /// `rcv_nxt` when the last acknowledgement was sent.
    pub rcv_wup: SeqNumber,
    /// `rcv_nxt` when the receive window last doubled, plus the growth that was taken back since then, or the
    /// bytes by which the first window was rounded down. In FIN-WAIT-2, after the application has closed: the
    /// deadline of that state, in ms.
    pub rcv_grow_seq: SeqNumber,
    pub snd_una: SeqNumber,
    pub snd_nxt: SeqNumber,
    pub snd_wnd: u32,
    pub snd_wl1: SeqNumber,
    /// Timestamp to echo (TS.Recent, RFC 7323 §4.3).
    pub ts_recent: u32,
    /// Added to the clock in the timestamps that are sent, so that they reveal nothing about the host.
    pub ts_offset: u32,

    // Second line: congestion control, timer, path.
    /// Congestion window in segments.
    pub cwnd: u32,
    /// Slow start threshold in segments.
    pub ssthresh: u32,
    /// Smoothed round-trip time in 1/8 µs; 0 before the first sample.
    pub srtt: u32,
    /// Four times the mean deviation of the round-trip time, in µs; at least `rto_min`. Before the first
    /// sample: the bits [`SYNACK_AMBIGUOUS`](super::listen::SYNACK_AMBIGUOUS) and
    /// [`SYNACK_DEFERRED`](super::listen::SYNACK_DEFERRED).
    pub rttvar: u32,
    /// Smallest round-trip time in µs; `u32::MAX` before the first sample. During the handshake: when SYN or
    /// SYN+ACK was sent (low bits of the clock in µs).
    pub min_rtt: u32,
    pub timer: TimerNode,
    #[serde(skip)]
    pub hop: NextHop,
    /// Index of the [`ActiveConn`], or [`NONE`].
    #[serde(skip)]
    pub active: u32,
    /// The application's token; before `accept`, the index of the listener (see
    /// [`super::listen::listener_of`]); in a vacant slot, the next vacant one.
    pub token: u32,
    #[serde(skip)]
    pub profile: ProfileId,
    /// Low four bits: how many times the receive window has doubled; high four bits: an [`MtuSearchState`].
    pub rcv_grow_and_mtu_search: u8,
    pub slot_state: SlotState,
    /// Largest payload that the peer accepts in a segment, from its MSS option.
    pub peer_mss: u16,
    /// Path MTU in bytes: the route's, or the largest size that probes have shown to arrive.
    pub pmtu: u16,
    /// Estimate of the peer's segment size, which decides when every second full-sized segment is
    /// acknowledged.
    pub rcv_mss: u16,
    /// When the delayed acknowledgement is due: low bits of the clock in ms.
    pub ack_deadline: u16,
    /// When the last segment was received: low bits of the clock in ms. During the handshake: when SYN or
    /// SYN+ACK was sent.
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
            quick_acks_and_marks: 0,
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

    /// Returns the number of immediate acknowledgements that are still to be sent.
    #[inline]
    pub const fn quick_acks(&self) -> u8 {
        self.quick_acks_and_marks & !MARKS
    }

    /// Raises the number of immediate acknowledgements to at least `count`.
    #[inline]
    pub fn raise_quick_acks(&mut self, count: u8) {
        debug_assert!(count & MARKS == 0, "at most 63");
        self.quick_acks_and_marks = self.quick_acks_and_marks & MARKS | self.quick_acks().max(count);
    }

    /// Records that the delayed acknowledgement covers the end of a write of the peer, as far as that can be
    /// seen.
    #[inline]
    pub fn set_pushed(&mut self) {
        self.quick_acks_and_marks |= PUSHED;
    }

    #[inline]
    pub const fn is_pushed(&self) -> bool {
        self.quick_acks_and_marks & PUSHED != 0
    }

    /// Records that the peer has acknowledged data.
    #[inline]
    pub fn set_acked(&mut self) {
        self.quick_acks_and_marks |= ACKED;
    }

    /// Returns whether the peer has acknowledged data.
    #[inline]
    pub const fn is_acked(&self) -> bool {
        self.quick_acks_and_marks & ACKED != 0
    }

    /// Counts an acknowledgement that is sent.
    #[inline]
    pub fn dec_quick_acks(&mut self) {
        self.quick_acks_and_marks = self.quick_acks_and_marks & ACKED | self.quick_acks().saturating_sub(1);
    }

    /// Returns how many times the receive window has doubled.
    #[inline]
    pub const fn rcv_grow(&self) -> u8 {
        self.rcv_grow_and_mtu_search & 15
    }

    /// Returns the state of the search for the path MTU (RFC 4821).
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

    /// Returns the bytes of the window that the peer may still use.
    #[inline]
    pub fn rcv_wnd(&self) -> u32 {
        u32::try_from(self.rcv_edge - self.rcv_nxt).unwrap_or(0)
    }

    /// Returns the sequence number after the last byte received in order: `rcv_nxt`, less the peer's FIN.
    #[inline]
    pub fn data_end(&self) -> SeqNumber {
        self.rcv_nxt - u32::from(self.has(Flags::PEER_FIN))
    }

    /// Returns whether the local FIN is queued or sent, and not acknowledged.
    #[inline]
    pub fn has_unacked_fin(&self) -> bool {
        matches!(self.state, State::FinWait1 | State::Closing | State::LastAck)
    }

    /// Returns the bytes of the IP and TCP headers without options.
    #[inline]
    pub fn header_bytes(&self) -> u16 {
        if self.has(Flags::V6) { 60 } else { 40 }
    }

    /// Returns the bytes of the options that every data segment carries.
    #[inline]
    pub fn option_bytes(&self) -> u16 {
        if self.has(Flags::TIMESTAMPS) { TIMESTAMPS_BYTES } else { 0 }
    }

    /// Returns the payload bytes of a full-sized segment: the minimum of what peer and path accept, less the
    /// options that each segment carries (RFC 6691).
    #[inline]
    pub fn mss(&self) -> u32 {
        self.mss_on(self.pmtu)
    }

    /// Returns the payload bytes of a full-sized segment on a path with this MTU.
    #[inline]
    pub fn mss_on(&self, mtu: u16) -> u32 {
        let path = mtu.saturating_sub(self.header_bytes());
        u32::from(self.peer_mss.min(path).saturating_sub(self.option_bytes()).max(8))
    }
}

pub(super) mod image;

/// The connections of a shard. Memory for `connections_max` slots is reserved at the start and touched as
/// connections are added.
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

    /// Returns how many bytes a table for at most `max` connections reserves.
    pub const fn reserved_bytes(max: u32) -> usize {
        (max as usize).saturating_mul(size_of::<Tcb>())
    }

    /// Returns the memory that is reserved.
    pub fn memory(&self) -> *const [u8] {
        memory_of(&self.slots)
    }

    /// Takes a slot; its `generation` is already that of the new connection. Returns `None` at
    /// `connections_max`.
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

    /// Frees a slot. From here on handles to it are stale.
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

    /// Returns the slot of a handle; `None` if the handle is stale.
    #[inline]
    pub fn lookup(&self, conn: Conn) -> Option<u32> {
        let slot = self.slots.get(conn.index() as usize)?;
        // A vacant slot has a generation that was never returned in a handle, so no second check is needed.
        (slot.generation == conn.generation()).then_some(conn.index())
    }

    #[inline]
    pub fn handle(&self, index: u32) -> Conn {
        Conn::new(index, self[index].generation)
    }

    /// Returns the number of connections.
    pub fn live(&self) -> usize {
        self.live
    }

    /// Returns the largest number of connections that ever existed at a time: vacant slots are reused before
    /// slots are added.
    pub fn high_water(&self) -> usize {
        self.slots.len()
    }

    /// Returns every slot that was ever used, for listings and invariant checks; not for the path of a
    /// packet.
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

/// Pool of active states. Entries keep the capacity of their queues, so that reuse allocates nothing.
pub(crate) struct ActivePool {
    entries: Vec<ActiveConn>,
    free: Vec<u32>,
    /// States of pacing that are not in use.
    #[allow(clippy::vec_box)] // connections that are paced keep the boxes
    spare_rates: Vec<Box<RateState>>,
}

impl ActivePool {
    pub fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), spare_rates: Vec::new() }
    }

    /// Takes an entry for connection `owner`, in its initial state.
    pub fn alloc(&mut self, owner: u32) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(ActiveConn::new());
            (self.entries.len() - 1) as u32
        });
        self.entries[index as usize].owner = owner;
        index
    }

    /// Returns an entry to the pool. The caller has cleared its buffers.
    #[inline(always)]
    pub fn free(&mut self, index: u32) {
        if let Some(rate) = self.entries[index as usize].reset() {
            self.keep_rate(rate);
        }
        self.free.push(index);
    }

    #[cold]
    #[inline(never)]
    fn keep_rate(&mut self, rate: Box<RateState>) {
        self.spare_rates.push(rate);
    }

    /// Takes over the state of connection `owner` from an image.
    pub fn restore(&mut self, state: ActiveConn, owner: u32) -> u32 {
        self.entries.push(ActiveConn { owner, ..state });
        (self.entries.len() - 1) as u32
    }

    /// Takes a state of pacing, whose content is that of its last user.
    pub fn alloc_rate(&mut self) -> Box<RateState> {
        self.spare_rates.pop().unwrap_or_default()
    }

    /// Prefetches the fields of an entry that its timers read.
    #[inline(always)]
    pub fn prefetch(&self, index: u32) {
        let b = &self[index];
        prefetch(&b.idle_since);
        prefetch(&b.timer_at);
        prefetch(&b.cork_deadline);
        prefetch(&b.send);
        prefetch(&b.recv);
        prefetch(&b.rtx_queue);
    }

    /// Returns the number of entries in use.
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
