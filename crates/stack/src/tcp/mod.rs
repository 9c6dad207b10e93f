//! TCP (RFC 9293).
//!
//! The way of a segment: `demux` finds the connection, `input` checks it in the order of RFC 9293 §3.10.7 and hands parts of it to
//! `ack` (what it acknowledges), `receive` (what it carries) and `close` (how connections end). What must leave is put on the
//! transmit list, and `output` is the only place that builds segments.

mod ack;
mod active;
mod burst;
mod chrono;
mod close;
pub mod config;
mod congestion;
mod conn;
mod connect;
mod cookies;
mod deferred_acks;
pub(crate) mod demux;
mod emit;
mod footprint;
pub(crate) mod input;
mod listen;
mod memory_waiters;
mod mtu_search;
mod output;
mod pending;
mod prediction;
pub(crate) mod profile;
mod rack;
mod receive;
mod record_marks;
mod recovery;
pub mod recv_buffer;
mod reply;
mod rtt;
mod rtx_queue;
mod saved_syn;
mod secrets;
pub mod send_buffer;
mod single_segment;
mod socket;
pub mod source;
pub mod state;
mod stats;
mod syn_sent;
mod time_wait;
mod timers;
mod tx_list;
mod urgent;

pub use stats::TcpStats;

use crate::chunk_pool::ChunkPool;
use crate::events::{CloseReason, Event};
use crate::flow_table::FlowTable;
use crate::handle::Conn;
use crate::prefetch::prefetch;
use crate::stack::Usage;
use crate::time::Instant;
use crate::timer_wheel::{TimerNode, TimerWheel};
use active::{ActiveConn, SlowPathFlags};
use config::{MtuProbing, TcpConfig};
use conn::{ActivePool, ConnTable, Flags, NONE, SlotState, Tcb};
use core::time::Duration;
use deferred_acks::DeferredAcks;
use demux::AddressPool;
pub(crate) use demux::FlowKey;
use listen::ListenTable;
use memory_waiters::MemoryWaiters;
use pending::PendingQueue;
use profile::{Profile, ProfileId, ProfileTable};
use saved_syn::SavedSyns;
use secrets::Secrets;
use source::SourceTable;
use state::State;
use std::collections::VecDeque;
use time_wait::TimeWaitTable;
use tx_list::TxList;

/// What the second-level cache of a core holds beside other things, in bytes.
const L2_CACHE_BYTES: usize = 512 << 10;

/// All TCP state of a shard.
pub(crate) struct Tcp {
    pub config: TcpConfig,
    pub conns: ConnTable,
    pub active: ActivePool,
    pub addresses: AddressPool,
    pub flows: FlowTable,
    pub wheel: TimerWheel,
    /// Timers that are not in the wheel yet, in order of time.
    pub deferred_timers: timers::DeferredTimers,
    pub time_wait: TimeWaitTable,
    pub listeners: ListenTable,
    pub profiles: ProfileTable,
    pub chunks: ChunkPool,
    pub sources: SourceTable,
    pub saved_syns: SavedSyns,
    pub secrets: Secrets,
    pub events: VecDeque<Event>,
    /// Data of the current burst whose events were not taken, or not dealt with, yet.
    pub pending: PendingQueue,
    /// Senders that found no memory: they are told when there is some.
    pub memory_waiters: MemoryWaiters,
    pub deferred_acks: DeferredAcks,
    /// Connections that have something to send.
    pub tx_list: TxList,
    /// A connection whose end was reported: its slot goes when the owner asks for the next event.
    pub reap: Option<u32>,
    pub half_open: u32,
    /// Most that there ever were at a time.
    pub half_open_high_water: u32,
    /// Whether a socket ever asked for a smallest hop limit: segments are not compared with it before.
    pub is_gtsm_used: bool,
    challenge_timestamp: u64,
    challenge_count: u32,
    /// Counts up with each chosen local port.
    next_port: u32,
    pub stats: TcpStats,
    /// Time of the current call: see [`Tcp::set_now`].
    pub now: Instant,
    /// The same in ms, for it is asked for with every segment.
    now_ms: u32,
    /// Header prediction and short messages are off: what they do is compared with what is done without them.
    #[cfg(test)]
    pub is_fast_path_disabled: bool,
}

impl Tcp {
    pub fn new(config: TcpConfig, seed: &[u8; 32], now: Instant) -> Self {
        let flows = config.connections_max as usize + config.time_wait_max as usize;
        Self {
            conns: ConnTable::new(config.connections_max),
            active: ActivePool::new(),
            addresses: AddressPool::default(),
            flows: FlowTable::with_capacity(flows),
            wheel: TimerWheel::new(now),
            deferred_timers: timers::DeferredTimers::default(),
            time_wait: TimeWaitTable::new(
                config.time_wait_max,
                Duration::from_secs(config.time_wait_seconds.into()),
            ),
            listeners: ListenTable::new(config.listeners_max),
            profiles: ProfileTable::new(Profile::from_config(&config)),
            chunks: ChunkPool::new(usize::try_from(config.buffer_pool_bytes).unwrap_or(usize::MAX)),
            sources: SourceTable::default(),
            saved_syns: SavedSyns::default(),
            secrets: Secrets::new(seed),
            events: VecDeque::new(),
            pending: PendingQueue::default(),
            memory_waiters: MemoryWaiters::default(),
            deferred_acks: DeferredAcks::default(),
            tx_list: TxList::default(),
            reap: None,
            half_open: 0,
            half_open_high_water: 0,
            is_gtsm_used: false,
            challenge_timestamp: 0,
            challenge_count: 0,
            next_port: 0,
            stats: TcpStats::default(),
            now,
            now_ms: now.as_millis() as u32,
            #[cfg(test)]
            is_fast_path_disabled: false,
            config,
        }
    }

    /// Begins a call: this is the time until the next one.
    #[inline]
    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
        self.now_ms = now.as_millis() as u32;
    }

    /// The clock in ms, as timestamps and per-connection deadlines use it.
    #[inline]
    pub fn now_ms(&self) -> u32 {
        self.now_ms
    }

    #[inline]
    pub fn key(&self, idx: u32) -> FlowKey {
        let c = &self.conns[idx];
        self.addresses.key(c.has(Flags::V6), c.remote_ip, c.local_ip, c.remote_port, c.local_port)
    }

    #[inline]
    pub fn profile(&self, idx: u32) -> &Profile {
        self.profiles.get(self.conns[idx].profile)
    }

    /// An acknowledgement must leave with this batch.
    #[inline]
    pub fn ack_now(&mut self, idx: u32) {
        self.conns[idx].flags.set(Flags::ACK_NOW);
        self.want_transmit(idx);
    }

    /// The busy part, taken from the pool if there is none.
    #[inline]
    pub fn ensure_active(&mut self, idx: u32) -> u32 {
        match self.conns[idx].active {
            NONE => self.alloc_active(idx),
            busy => busy,
        }
    }

    #[inline(never)]
    fn alloc_active(&mut self, idx: u32) -> u32 {
        let c = &mut self.conns[idx];
        let busy = self.active.alloc(idx);
        c.active = busy;
        let b = &mut self.active[busy];
        b.congestion.set_algorithm(self.profiles.get(c.profile).congestion);
        b.cwnd_usage_seq = c.snd_nxt;
        b.recovery.high_seq = c.snd_una;
        b.max_window = c.snd_wnd;
        // A busy part that was given back means idleness since about the last segment received.
        let idle = self.now_ms.wrapping_sub(c.last_rx);
        b.lrcvtime = c.last_rx;
        b.lsndtime = Instant::from_nanos(self.now.as_nanos().saturating_sub(u64::from(idle) * 1_000_000));
        if self.profiles.get(c.profile).notsent_lowat != 0 {
            b.slow_path.set(SlowPathFlags::NOTSENT_LOWAT);
        }
        if self.config.mtu_probing != MtuProbing::Off {
            self.resume_mtu_search(idx);
        }
        busy
    }

    /// Gives the busy part back, with all it holds, if there is one.
    #[inline(always)]
    pub fn release_active(&mut self, idx: u32) {
        if self.conns[idx].active != NONE {
            self.free_active(idx);
        }
    }

    #[inline(always)]
    fn free_active(&mut self, idx: u32) {
        let c = &mut self.conns[idx];
        let b = &mut self.active[c.active];
        b.send.clear(&mut self.chunks, &mut self.sources);
        b.recv.clear(&mut self.chunks);
        self.active.free(c.active);
        c.active = NONE;
    }

    /// Whether what is looked up for segments is more than a core's own cache can hold: only then asking for it ahead of time pays.
    #[inline]
    pub fn exceeds_cache(&self) -> bool {
        self.flows.bytes_used() + self.conns.live() * size_of::<Tcb>() > L2_CACHE_BYTES
    }

    /// The same of what belongs to connections that live: what is left of those that ended is not looked up again.
    #[inline]
    pub fn live_conns_exceed_cache(&self) -> bool {
        self.conns.live() * (size_of::<Tcb>() + FlowTable::BUCKET_BYTES) > L2_CACHE_BYTES
    }

    /// Asks for the cache lines of what the flow table has under a hash, and returns that: a hint for [`Tcp::find`].
    #[inline]
    pub fn prefetch_flow(&self, hash: u32) -> u32 {
        let Some(value) = self.flows.find(hash, |_| true) else { return demux::NO_HINT };
        if value & demux::TIME_WAIT_BIT == 0 {
            let c = &self.conns[value];
            prefetch(&c.remote_ip);
            prefetch(&c.cwnd);
        } else {
            prefetch(self.time_wait.get(value & !demux::TIME_WAIT_BIT));
        }
        value
    }

    /// What a segment belongs to.
    #[inline(always)]
    pub fn lookup(&self, seg: &input::Segment<'_>) -> Option<demux::FlowEntry> {
        // What has the same hash is nearly always it.
        let likely = match seg.hint {
            demux::NO_HINT => self.flows.find_likely(seg.hash)?,
            hint => hint,
        };
        // Only a connection that lives is certain to be what the table would say.
        if likely & demux::TIME_WAIT_BIT == 0 {
            let c = &self.conns[likely];
            if c.slot_state == SlotState::Open && demux::tcb_matches(c, &self.addresses, &seg.key) {
                return Some(demux::FlowEntry::Connection(likely));
            }
        }
        self.lookup_exact(seg)
    }

    /// The same of what is no connection, or not the first one under its hash.
    #[inline(never)]
    fn lookup_exact(&self, seg: &input::Segment<'_>) -> Option<demux::FlowEntry> {
        demux::lookup_flow(&self.flows, &self.conns, &self.time_wait, &self.addresses, seg.hash, &seg.key)
    }

    /// The next event whose connection still exists.
    #[inline(always)]
    pub fn next_event(&mut self) -> Option<Event> {
        if let Some(idx) = self.reap.take() {
            self.free_slot(idx);
        }
        while let Some(event) = self.events.pop_front() {
            let conn = match event {
                Event::Data { conn, data } => {
                    let Some(idx) = self.conns.lookup(conn) else { continue };
                    if !self.conns[idx].has(Flags::ACCEPTED) {
                        self.pending.withhold();
                        continue;
                    }
                    // It may have moved to the receive buffer meanwhile.
                    if !self.pending.deliver(conn, data) {
                        continue;
                    }
                    return Some(event);
                }
                Event::Closed { conn, reason, .. } => {
                    let Some(idx) = self.conns.lookup(conn) else { continue };
                    self.reap = Some(idx);
                    return Some(Event::Closed { conn, token: self.conns[idx].token, reason });
                }
                Event::Readable { conn } => {
                    if let Some(idx) = self.conns.lookup(conn) {
                        self.conns[idx].flags.clear(Flags::READABLE_QUEUED);
                    }
                    conn
                }
                Event::PeerClosed { conn } => {
                    let reads_first = |idx: u32| self.conns[idx].has(Flags::READABLE_QUEUED);
                    if self.conns.lookup(conn).is_some_and(reads_first) {
                        // What lay in the burst was moved behind it.
                        self.events.push_back(event);
                        continue;
                    }
                    conn
                }
                Event::Urgent { conn, .. } => {
                    self.on_urgent_event_taken(conn);
                    conn
                }
                Event::Connected { conn } | Event::Writable { conn } | Event::Acked { conn, .. } => conn,
                Event::Incoming { .. } | Event::UdpReadable { .. } => return Some(event),
            };
            let known = self.conns.lookup(conn).is_some_and(|idx| {
                let c = &self.conns[idx];
                c.has(Flags::ACCEPTED) && !c.has(Flags::ORPHAN)
            });
            if known {
                return Some(event);
            }
        }
        None
    }

    pub fn token(&self, conn: Conn) -> Option<u32> {
        self.conns.lookup(conn).map(|idx| self.conns[idx].token)
    }

    pub fn set_token(&mut self, conn: Conn, token: u32) -> bool {
        let found = self.conns.lookup(conn).filter(|idx| self.conns[*idx].has(Flags::ACCEPTED));
        if let Some(idx) = found {
            self.conns[idx].token = token;
        }
        found.is_some()
    }

    pub fn usage(&self) -> Usage {
        Usage {
            connections: self.conns.live(),
            half_open: self.half_open as usize,
            time_wait: self.time_wait.len(),
            active: self.active.in_use(),
            chunks: self.chunks.in_use(),
            chunks_high_water: self.chunks.high_water(),
            timers: self.wheel.len(),
            flow_table_bytes: self.flows.bytes_used(),
        }
    }

    /// Connection and busy part at once.
    #[inline]
    pub fn tcb_and_active(&mut self, idx: u32) -> Option<(&mut Tcb, &mut ActiveConn)> {
        let c = &mut self.conns[idx];
        if c.active == NONE {
            return None;
        }
        let b = &mut self.active[c.active];
        Some((c, b))
    }

    /// Ends a connection: it leaves flow table, wheel, queues and pools. Its end is reported; a connection whose owner
    /// might still read keeps its receive buffer until the report was taken.
    pub fn destroy(&mut self, idx: u32, reason: CloseReason) {
        self.remove_flow(idx);
        self.finish(idx, reason);
    }

    /// Removes a connection from the flow table.
    fn remove_flow(&mut self, idx: u32) {
        let key = self.key(idx);
        let removed = self.flows.remove(self.secrets.flow_hash(&key), idx);
        debug_assert!(removed, "a live connection is in the flow table");
    }

    /// What ends with the connection itself: timer, queue places, report.
    fn finish(&mut self, idx: u32, reason: CloseReason) {
        self.wheel.cancel(&mut self.conns, idx);
        let c = &mut self.conns[idx];
        // Also if it was only deferred.
        c.timer = TimerNode::default();
        let (state, token, flags) = (c.state, c.token, c.flags);
        if state == State::SynReceived && !flags.has(Flags::ACTIVE_OPEN) {
            self.half_open -= 1;
            self.listeners.on_half_open_end(token);
        }
        let waits = flags.has(Flags::IN_ACCEPT_QUEUE);
        let known = flags.has(Flags::ACCEPTED);
        let readable = waits || known && !flags.has(Flags::ORPHAN);
        if readable && let Some((_, b)) = self.tcb_and_active(idx) {
            b.stop_timer();
            b.cork_deadline = None;
        }
        if flags.has(Flags::INLINE) && !readable {
            let handle = self.conns.handle(idx);
            let chunks = &mut self.chunks;
            self.pending.remove_of(handle, |p| {
                chunks.unreserve(receive::chunks_for(p.data.len()));
                true
            });
        }
        self.stats.count_close(reason);
        let profile = self.conns[idx].profile;
        self.profiles.release(profile);
        let c = &mut self.conns[idx];
        c.profile = ProfileId::DEFAULT;
        c.state = State::Closed;
        // What it still had to say is said, or never will be.
        c.flags.clear(Flags::TX_LISTED);
        if waits {
            // As on Linux it stays where it is, also in the count: the application learns that there was a connection, and what became of it.
            c.slot_state = SlotState::Unaccepted(reason);
            return;
        }
        if !readable {
            self.release_active(idx);
        }
        if known {
            self.report_closed(idx, reason);
        } else {
            self.free_slot(idx);
        }
    }

    /// The last event of a connection. The slot has no new tenant before its owner has seen it.
    pub fn report_closed(&mut self, idx: u32, reason: CloseReason) {
        self.conns[idx].slot_state = SlotState::Reported;
        let conn = self.conns.handle(idx);
        // The token is filled in when the event is taken: the owner may set it until then.
        self.events.push_back(Event::Closed { conn, token: 0, reason });
    }

    /// The last step of a connection's life: its handle is stale from here on.
    #[inline]
    pub fn free_slot(&mut self, idx: u32) {
        self.release_active(idx);
        let c = &self.conns[idx];
        self.addresses.release(c.has(Flags::V6), c.remote_ip);
        self.saved_syns.remove(idx);
        self.conns.free(idx);
    }

    /// Whether another challenge acknowledgement may leave in this second (RFC 5961 §10).
    pub fn may_challenge(&mut self) -> bool {
        let second = self.now.as_millis() / 1000;
        if second != self.challenge_timestamp {
            self.challenge_timestamp = second;
            // RFC 5961's fixed budget was measurable from outside (CVE-2016-5696): spread it.
            let limit = self.config.challenge_acks_per_second;
            let half = limit.div_ceil(2);
            self.challenge_count = half.saturating_add((self.secrets.random() % u64::from(limit)) as u32);
        }
        if self.challenge_count == 0 {
            self.stats.challenge_acks_limited += 1;
            return false;
        }
        self.challenge_count -= 1;
        true
    }
}

impl Tcp {
    /// Checks invariants; for tests and fuzzing.
    pub fn check_invariants(&self) {
        let mut live = 0;
        let mut half_open = 0;
        let mut v6 = self.time_wait.iter().filter(|e| e.v6).count();
        for (idx, c) in self.conns.iter() {
            if c.slot_state == SlotState::Vacant {
                assert!(c.active == NONE, "a vacant slot has a busy part");
                continue;
            }
            live += 1;
            v6 += usize::from(c.has(Flags::V6));
            assert_eq!(
                c.slot_state == SlotState::Open,
                c.state != State::Closed,
                "state and life contradict each other"
            );
            half_open += u32::from(c.state == State::SynReceived && !c.has(Flags::ACTIVE_OPEN));
            assert!(c.snd_una.le(c.snd_nxt), "snd_una is beyond snd_nxt");
            assert!(c.rcv_wup.le(c.rcv_nxt), "more was acknowledged than received");
            if c.active == NONE {
                continue;
            }
            let b = &self.active[c.active];
            assert_eq!(b.owner, idx, "a busy part has another owner");
            b.rtx_queue.check();
            let in_flight = b.rtx_queue.back().map(|s| s.end_seq);
            if c.state.is_synchronized()
                && let Some(end) = in_flight
            {
                assert_eq!(end, c.snd_nxt, "the retransmission queue ends at snd_nxt");
                assert!(b.rtx_queue.front().is_some_and(|s| s.seq == c.snd_una), "it begins at snd_una");
                assert!(
                    b.timer_kind != active::RetransmitTimer::Off
                        || c.has(Flags::TX_LISTED)
                        || c.slot_state != SlotState::Open,
                    "data are in flight and no timer is set"
                );
            }
        }
        assert_eq!(live, self.conns.live());
        assert_eq!(v6, self.addresses.in_use(), "IPv6 addresses belong to connections and TIME_WAIT");
        assert_eq!(half_open, self.half_open);
        assert!(half_open <= self.config.half_open_max.max(1) + 1);
        assert!(self.time_wait.len() <= self.config.time_wait_max as usize);
        let reserved: usize = self.pending.iter().map(|p| receive::chunks_for(p.data.len())).sum();
        assert_eq!(self.chunks.reserved(), reserved, "memory is reserved for what lies in the burst");
    }
}
