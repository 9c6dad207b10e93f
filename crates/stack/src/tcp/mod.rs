//! TCP (RFC 9293).
//!
//! The path of a segment: `demux` finds the connection, `input` checks the segment in the order of RFC 9293
//! §3.10.7 and passes its parts to `ack` (what it acknowledges), `receive` (what it carries) and `close` (how
//! connections end). Connections that have something to send are queued on the transmit list. `output` and
//! `single_segment` decide which segments leave, `emit` builds the segments of connections, and `reply`
//! builds resets, probes and other segments that leave outside of the transmit list.

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
mod defer_accept;
mod deferred_acks;
pub(crate) mod demux;
mod emit;
pub mod fastopen;
mod fastopen_client;
mod fastopen_cookies;
mod filter;
mod filter_table;
mod footprint;
mod held_syns;
pub(crate) mod image;
pub(crate) mod input;
mod listen;
mod memory_waiters;
mod mtu_search;
mod output;
mod pending;
pub(crate) mod port_use;
mod prediction;
pub(crate) mod profile;
mod rack;
pub(crate) mod rate;
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
mod send_limit;
mod single_segment;
mod socket;
mod soft_errors;
pub mod source;
pub mod state;
mod stats;
mod syn_sent;
mod time_wait;
mod timer_queue;
mod timers;
mod timestamp_age;
mod tx_list;
mod unordered;
mod urgent;
mod window_limit;

pub use stats::TcpStats;
pub use unordered::UnorderedBytes;

use crate::chunk_pool::ChunkPool;
use crate::events::{CloseReason, Event};
use crate::flow_table::FlowTable;
use crate::handle::{Conn, LinkId, PortId};
use crate::prefetch::prefetch;
use crate::priority::ClassQueues;
use crate::stack::Usage;
use crate::time::Instant;
use crate::timer_wheel::{TimerNode, TimerWheel};
use active::ActiveConn;
use config::{MtuProbing, TcpConfig};
use conn::{ActivePool, ConnTable, Flags, NONE, SlotState, Tcb};
use core::time::Duration;
use deferred_acks::DeferredAcks;
use demux::AddressPool;
pub use demux::FlowKey;
use fastopen_client::FastOpenClient;
use held_syns::HeldSyns;
use listen::ListenTable;
use memory_waiters::MemoryWaiters;
use pending::PendingQueue;
use port_use::PortUse;
pub use profile::USUAL_RECV_WINDOW_MIN;
use profile::{Profile, ProfileId, ProfileTable};
use saved_syn::SavedSyns;
use secrets::Secrets;
use soft_errors::SoftErrors;
use source::SourceTable;
use state::State;
use std::collections::VecDeque;
use time_wait::TimeWaitTable;
use timer_queue::TimerQueue;
use timestamp_age::TimestampAge;
use tx_list::TxList;
use window_limit::WindowLimits;

/// Initial value of [`Tcp::lower_share_percent`].
const LOWER_SHARE_PERCENT: u32 = 5;

/// Bytes that the second-level cache of a core is expected to hold for this state; other data share the
/// cache.
const L2_CACHE_BYTES: usize = 512 << 10;

/// All TCP state of a shard.
pub(crate) struct Tcp {
    pub config: TcpConfig,
    pub conns: ConnTable,
    pub active: ActivePool,
    pub addresses: AddressPool,
    /// Connections of each local port.
    pub port_use: PortUse,
    /// Soft errors of connections.
    pub soft_errors: SoftErrors,
    pub flows: FlowTable,
    pub wheel: TimerWheel,
    /// Timers that are not in the wheel yet, ordered by the time at which they enter it.
    pub deferred_timers: TimerQueue,
    /// Connections that will release their active state.
    pub releases: TimerQueue,
    pub timestamp_age: TimestampAge,
    pub time_wait: TimeWaitTable,
    pub listeners: ListenTable,
    pub profiles: ProfileTable,
    pub chunks: ChunkPool,
    pub sources: SourceTable,
    pub saved_syns: SavedSyns,
    /// SYNs that wait for a listener.
    pub held_syns: HeldSyns,
    pub secrets: Secrets,
    /// Events of the current class of priority.
    pub events: VecDeque<Event>,
    /// Events of the other classes.
    pub event_classes: ClassQueues<Event>,
    /// Data of the current burst that the owner has not consumed yet, or whose events it has not taken.
    pub pending: PendingQueue,
    /// Senders that found no memory; they are notified when memory is available.
    pub memory_waiters: MemoryWaiters,
    pub deferred_acks: DeferredAcks,
    /// Connections that have something to send.
    pub tx_list: TxList,
    pub window_limits: WindowLimits,
    /// See [`Stack::set_lower_share_percent`](crate::stack::Stack::set_lower_share_percent).
    pub lower_share_percent: u32,
    /// A connection whose end was reported; its slot is freed when the owner asks for the next event.
    pub reap: Option<u32>,
    /// Half-open connections of all listeners.
    pub half_open: u32,
    /// Largest value that `half_open` has ever had.
    pub half_open_high_water: u32,
    /// True if a socket has ever set a minimum hop limit (GTSM, RFC 5082); before that no segment is checked.
    pub is_gtsm_used: bool,
    /// True if a segment has to pass [`Tcp::passes_guards`]: minimum hop limits are used, or half-open
    /// connections may not have the filter that their listener has.
    has_guards: bool,
    /// The device from which the present burst was received.
    pub rx_port: PortId,
    /// The link on which the last segment arrived that was reassembled from fragments.
    pub reassembled_link: LinkId,
    /// Buffer for packets that filters look at and that are in no frame.
    filter_scratch: Vec<u8>,
    /// True if a socket has ever asked for unordered receive.
    pub is_unordered_used: bool,
    /// Connections that were opened by TCP Fast Open and whose handshake is not complete.
    pub fastopen_pending: u32,
    /// Keys of cookies for listeners without keys of their own.
    pub fastopen_keys: fastopen::FastOpenKeys,
    /// Cookies of peers, and whether black holes have paused their use.
    pub fastopen_client: FastOpenClient,
    /// True if the segments that arrive have overtaken earlier ones: see [`Tcp::set_overtaking`].
    pub is_overtaking: bool,
    /// Second of the clock to which `challenge_count` applies.
    challenge_timestamp: u64,
    /// Challenge ACKs that may still be sent in that second.
    challenge_count: u32,
    /// Incremented for each local port that is chosen.
    next_port: u32,
    pub stats: TcpStats,
    /// Time of the current call: see [`Tcp::set_now`].
    pub now: Instant,
    /// `now` in ms; stored because each segment needs it.
    now_ms: u32,
    /// Switches header prediction and single-segment sends off, so that tests can compare both paths.
    #[cfg(test)]
    pub is_fast_path_disabled: bool,
}

impl Tcp {
    pub fn new(config: TcpConfig, seed: &[u8; 32], now: Instant) -> Self {
        let flows = Self::flows_max(&config);
        Self {
            conns: ConnTable::new(config.connections_max),
            active: ActivePool::new(),
            addresses: AddressPool::default(),
            port_use: PortUse::new(),
            soft_errors: SoftErrors::default(),
            flows: FlowTable::with_capacity(flows),
            wheel: TimerWheel::new(now),
            deferred_timers: TimerQueue::default(),
            releases: TimerQueue::default(),
            timestamp_age: TimestampAge::new(now),
            time_wait: TimeWaitTable::new(
                config.time_wait_max,
                Duration::from_secs(config.time_wait_seconds.into()),
            ),
            listeners: ListenTable::new(config.listeners_max),
            profiles: ProfileTable::new(Profile::from_config(&config)),
            chunks: ChunkPool::new(usize::try_from(config.buffer_pool_bytes).unwrap_or(usize::MAX)),
            sources: SourceTable::default(),
            saved_syns: SavedSyns::default(),
            held_syns: HeldSyns::default(),
            secrets: Secrets::new(seed),
            events: VecDeque::new(),
            event_classes: ClassQueues::default(),
            pending: PendingQueue::default(),
            memory_waiters: MemoryWaiters::default(),
            deferred_acks: DeferredAcks::default(),
            tx_list: TxList::default(),
            window_limits: WindowLimits::default(),
            lower_share_percent: LOWER_SHARE_PERCENT,
            reap: None,
            half_open: 0,
            half_open_high_water: 0,
            is_gtsm_used: false,
            has_guards: false,
            rx_port: PortId(0),
            reassembled_link: LinkId(0),
            filter_scratch: Vec::new(),
            is_unordered_used: false,
            fastopen_pending: 0,
            fastopen_keys: fastopen::parse_keys(&config.fastopen_key)
                .unwrap_or((Some(Secrets::fastopen_key(seed)), None)),
            fastopen_client: FastOpenClient::new(config.fastopen_cookies_max),
            is_overtaking: false,
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

    /// Returns the maximum number of entries of the flow table.
    fn flows_max(config: &TcpConfig) -> usize {
        config.connections_max as usize + config.time_wait_max as usize
    }

    /// Returns how many bytes the tables of a stack reserve.
    pub fn table_bytes(config: &TcpConfig) -> usize {
        FlowTable::reserved_bytes(Self::flows_max(config))
            .saturating_add(ConnTable::reserved_bytes(config.connections_max))
            .saturating_add(TimeWaitTable::reserved_bytes(config.time_wait_max))
    }

    /// Sets the clock, at the beginning of each call from the owner.
    #[inline]
    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
        self.now_ms = now.as_millis() as u32;
    }

    /// Returns the clock in ms, as timestamps and per-connection deadlines use it.
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

    /// Marks that an acknowledgement must leave in this turn.
    #[inline]
    pub fn ack_now(&mut self, idx: u32) {
        self.conns[idx].flags.set(Flags::ACK_NOW);
        self.want_transmit(idx);
    }

    /// Returns the index of the active state, which is taken from the pool if the connection has none.
    #[inline]
    pub fn ensure_active(&mut self, idx: u32) -> u32 {
        match self.conns[idx].active {
            NONE => self.alloc_active(idx),
            active => active,
        }
    }

    #[inline(never)]
    fn alloc_active(&mut self, idx: u32) -> u32 {
        let c = &mut self.conns[idx];
        let active = self.active.alloc(idx);
        c.active = active;
        let b = &mut self.active[active];
        b.congestion.set_algorithm(self.profiles.get(c.profile).congestion);
        b.cwnd_usage_seq = c.snd_nxt;
        b.recovery.high_seq = c.snd_una;
        b.max_window = c.snd_wnd;
        // Active state that was released means that the connection has been idle since about the last segment
        // received.
        let idle = self.now_ms.wrapping_sub(c.last_rx);
        b.lrcvtime = c.last_rx;
        b.lsndtime = Instant::from_nanos(self.now.as_nanos().saturating_sub(u64::from(idle) * 1_000_000));
        if self.profiles.get(c.profile).has_slow_path {
            self.apply_slow_path_options(idx);
        }
        if self.config.mtu_probing != MtuProbing::Off {
            self.resume_mtu_search(idx);
        }
        active
    }

    /// Returns the active state with everything that it holds to the pool, if the connection has one.
    #[inline(always)]
    pub fn release_active(&mut self, idx: u32) {
        if self.conns[idx].active != NONE {
            self.free_active(idx);
        }
    }

    /// Returns the active state of an idle connection to the pool at once if a new one would not differ, on a
    /// stack with many connections: their active states would displace each other from the cache.
    #[inline(always)]
    pub(super) fn release_active_early(&mut self, idx: u32) {
        if self.live_conns_exceed_cache() {
            let c = &self.conns[idx];
            if c.active != NONE && self.active[c.active].is_as_new(c, self.config.initial_window_segments) {
                self.free_active(idx);
            }
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

    /// Returns whether the data that segments look up exceed a core's own cache. Prefetching pays only then.
    #[inline]
    pub fn exceeds_cache(&self) -> bool {
        self.flows.bytes_used() + self.conns.live() * size_of::<Tcb>() > L2_CACHE_BYTES
    }

    /// Like [`Tcp::exceeds_cache`], but counts live connections only: entries of ended connections are not
    /// looked up again.
    #[inline]
    pub fn live_conns_exceed_cache(&self) -> bool {
        self.conns.live() * (size_of::<Tcb>() + FlowTable::BUCKET_BYTES) > L2_CACHE_BYTES
    }

    /// Prefetches the entry that the flow table has under `hash` and returns its value: a hint for
    /// [`Tcp::lookup`].
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

    /// Finds the connection or TIME-WAIT entry that a segment belongs to.
    #[inline(always)]
    pub fn lookup(&self, seg: &input::Segment<'_>) -> Option<demux::FlowEntry> {
        // An entry with an equal hash is nearly always the right one.
        let likely = match seg.hint {
            demux::NO_HINT => self.flows.find_likely(seg.hash)?,
            hint => hint,
        };
        // An open connection under the hash is certainly the entry that the exact lookup would return; a
        // TIME-WAIT entry is not.
        if likely & demux::TIME_WAIT_BIT == 0 {
            let c = &self.conns[likely];
            if c.slot_state == SlotState::Open && demux::tcb_matches(c, &self.addresses, &seg.key) {
                return Some(demux::FlowEntry::Connection(likely));
            }
        }
        self.lookup_exact(seg)
    }

    /// Finds TIME-WAIT entries, and connections that are not the first entry under their hash.
    #[inline(never)]
    fn lookup_exact(&self, seg: &input::Segment<'_>) -> Option<demux::FlowEntry> {
        demux::lookup_flow(&self.flows, &self.conns, &self.time_wait, &self.addresses, seg.hash, &seg.key)
    }

    /// Returns the next event of the current class whose connection still exists. `HAS_CLASSES`: a connection
    /// may have events of several classes, and those of higher classes are reported first.
    #[inline(always)]
    pub fn next_event<const HAS_CLASSES: bool>(&mut self) -> Option<Event> {
        if let Some(idx) = self.reap.take() {
            self.free_slot(idx);
        }
        while let Some(event) = self.events.pop_front() {
            if HAS_CLASSES && let Some(conn) = self.unreported_connect_of(&event) {
                self.events.push_front(event);
                self.events.push_front(Event::Connected { conn });
                continue;
            }
            let conn = match event {
                Event::Data { conn, data } => {
                    let Some(idx) = self.conns.lookup(conn) else { continue };
                    if !self.conns[idx].has(Flags::ACCEPTED) {
                        self.pending.withhold();
                        continue;
                    }
                    // The data may have been moved to the receive buffer in the meantime.
                    if !self.pending.deliver(conn, data) {
                        continue;
                    }
                    return Some(event);
                }
                Event::Closed { conn, reason, .. } => {
                    let Some(idx) = self.conns.lookup(conn) else { continue };
                    if self.conns[idx].has(Flags::READABLE_QUEUED) && self.event_classes.others_wait() {
                        // The data before the end are reported first, as below.
                        self.events.push_front(event);
                        self.events.push_front(Event::Readable { conn });
                        continue;
                    }
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
                    let is_readable_queued = |idx: u32| self.conns[idx].has(Flags::READABLE_QUEUED);
                    if self.conns.lookup(conn).is_some_and(is_readable_queued) {
                        if self.event_classes.others_wait() {
                            // `Readable` may be an event of another class: it is reported here, and its own
                            // event finds nothing new.
                            self.events.push_front(event);
                            self.events.push_front(Event::Readable { conn });
                            continue;
                        }
                        // The data of the burst were moved to the receive buffer, so that `Readable` is
                        // queued after this event.
                        self.events.push_back(event);
                        continue;
                    }
                    conn
                }
                Event::Urgent { conn, .. } => {
                    self.on_urgent_event_taken(conn);
                    conn
                }
                Event::Connected { conn } => {
                    let Some(idx) = self.conns.lookup(conn) else { continue };
                    if !self.conns[idx].has(Flags::CONNECTED_QUEUED) {
                        // It was reported before an event of a higher class.
                        continue;
                    }
                    self.conns[idx].flags.clear(Flags::CONNECTED_QUEUED);
                    conn
                }
                Event::Writable { conn } | Event::Unordered { conn } | Event::Acked { conn, .. } => conn,
                Event::Incoming { .. } | Event::UdpReadable { .. } | Event::ListenerDestroyed { .. } => {
                    return Some(event);
                }
            };
            let has_owner = self.conns.lookup(conn).is_some_and(|idx| {
                let c = &self.conns[idx];
                c.has(Flags::ACCEPTED) && !c.has(Flags::ORPHAN)
            });
            if has_owner {
                return Some(event);
            }
        }
        None
    }

    /// Returns the connection of an event before which `Connected` has to be reported.
    fn unreported_connect_of(&self, event: &Event) -> Option<Conn> {
        let (Event::Data { conn, .. }
        | Event::Readable { conn }
        | Event::Unordered { conn }
        | Event::Writable { conn }
        | Event::Acked { conn, .. }
        | Event::Urgent { conn, .. }
        | Event::PeerClosed { conn }) = *event
        else {
            return None;
        };
        let c = &self.conns[self.conns.lookup(conn)?];
        (c.has(Flags::CONNECTED_QUEUED) && c.has(Flags::ACTIVE_OPEN)).then_some(conn)
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

    /// Returns the TCB and the active state of a connection; `None` if it has no active state.
    #[inline]
    pub fn tcb_and_active(&mut self, idx: u32) -> Option<(&mut Tcb, &mut ActiveConn)> {
        let c = &mut self.conns[idx];
        if c.active == NONE {
            return None;
        }
        let b = &mut self.active[c.active];
        Some((c, b))
    }

    /// Ends a connection: removes it from the flow table, the timer wheel, the queues and the pools, and
    /// reports its end. If the owner may still read, the receive buffer is kept until the report was taken.
    pub fn destroy(&mut self, idx: u32, reason: CloseReason) {
        if self.fastopen_pending > 0 {
            self.end_fastopen(idx, reason == CloseReason::Reset);
        }
        self.remove_flow(idx);
        self.finish(idx, reason);
    }

    /// Removes a connection from the flow table.
    fn remove_flow(&mut self, idx: u32) {
        let key = self.key(idx);
        let is_active = self.conns[idx].has(Flags::ACTIVE_OPEN);
        let sharing = self.profiles.port_sharing(self.conns[idx].profile, is_active);
        self.port_use.remove(key.local_port, sharing.bits());
        let removed = self.flows.remove(self.secrets.flow_hash(&key), idx);
        debug_assert!(removed, "a live connection is not in the flow table");
    }

    /// Ends a connection that the flow table no longer contains: cancels its timer, leaves the queues,
    /// reports the end.
    fn finish(&mut self, idx: u32, reason: CloseReason) {
        self.wheel.cancel(&mut self.conns, idx);
        let c = &mut self.conns[idx];
        // Also clears a deferred or listed timer.
        c.timer = TimerNode::default();
        let (state, token, flags) = (c.state, c.token, c.flags);
        if state == State::SynReceived && !flags.has(Flags::ACTIVE_OPEN) {
            self.half_open -= 1;
            self.listeners.on_half_open_end(token);
        }
        let is_unaccepted = flags.has(Flags::IN_ACCEPT_QUEUE) && !flags.has(Flags::ACTIVE_OPEN);
        let is_accepted = flags.has(Flags::ACCEPTED);
        let may_be_read = is_unaccepted || is_accepted && !flags.has(Flags::ORPHAN);
        if may_be_read && let Some((_, b)) = self.tcb_and_active(idx) {
            b.stop_timer();
            b.cork_deadline = None;
        }
        if flags.has(Flags::INLINE) && !may_be_read {
            let handle = self.conns.handle(idx);
            let chunks = &mut self.chunks;
            self.pending.remove_of(handle, |p| {
                chunks.unreserve(receive::chunks_for(p.data.len()));
                true
            });
        }
        self.stats.count_close(reason);
        let profile = self.conns[idx].profile;
        if !profile.is_usual() {
            self.on_fastopen_end(idx);
        }
        self.profiles.release(profile);
        let c = &mut self.conns[idx];
        c.profile = ProfileId::DEFAULT;
        c.state = State::Closed;
        // Nothing more is sent.
        c.flags.clear(Flags::TX_LISTED);
        if is_unaccepted {
            // As on Linux the connection stays in the accept queue and counts as queued: the application
            // learns that there was a connection and why it ended.
            c.slot_state = SlotState::Unaccepted(reason);
            return;
        }
        if !may_be_read {
            self.release_active(idx);
        }
        if is_accepted {
            self.report_closed(idx, reason);
        } else {
            self.free_slot(idx);
        }
    }

    /// Reports the last event of a connection. The slot is not reused before its owner has taken the event.
    pub fn report_closed(&mut self, idx: u32, reason: CloseReason) {
        self.conns[idx].slot_state = SlotState::Reported;
        let conn = self.conns.handle(idx);
        // The token is filled in when the event is taken: the owner may set it until then.
        self.events.push_back(Event::Closed { conn, token: 0, reason });
    }

    /// Frees the slot of a connection: its handle is stale from here on.
    #[inline]
    pub fn free_slot(&mut self, idx: u32) {
        self.release_active(idx);
        let c = &self.conns[idx];
        self.addresses.release(c.has(Flags::V6), c.remote_ip);
        self.saved_syns.remove(idx);
        self.conns.free(idx);
    }

    /// Returns whether another challenge ACK may be sent in this second (RFC 5961 §7), and counts it.
    pub fn may_challenge(&mut self) -> bool {
        let second = self.now.as_millis() / 1000;
        if second != self.challenge_timestamp {
            self.challenge_timestamp = second;
            // RFC 5961's fixed budget could be measured from outside (CVE-2016-5696), so it is randomized.
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
    /// Checks invariants, for tests and fuzzing. Panics if one does not hold.
    pub fn check_invariants(&self) {
        let mut live = 0;
        let mut half_open = 0;
        let mut v6 = self.time_wait.iter().filter(|e| e.v6()).count();
        for (idx, c) in self.conns.iter() {
            if c.slot_state == SlotState::Vacant {
                assert!(c.active == NONE, "a vacant slot has active state");
                continue;
            }
            live += 1;
            v6 += usize::from(c.has(Flags::V6));
            assert_eq!(
                c.slot_state == SlotState::Open,
                c.state != State::Closed,
                "state and slot state contradict each other"
            );
            half_open += u32::from(c.state == State::SynReceived && !c.has(Flags::ACTIVE_OPEN));
            assert!(c.snd_una.le(c.snd_nxt), "snd_una is beyond snd_nxt");
            assert!(c.rcv_wup.le(c.rcv_nxt), "more was acknowledged than received");
            if c.active == NONE {
                continue;
            }
            let b = &self.active[c.active];
            assert_eq!(b.owner, idx, "the active state has another owner");
            b.rtx_queue.check();
            let in_flight = b.rtx_queue.back().map(|s| s.end_seq);
            if c.state.is_synchronized()
                && let Some(end) = in_flight
            {
                assert_eq!(end, c.snd_nxt, "the retransmission queue does not end at snd_nxt");
                assert!(
                    b.rtx_queue.front().is_some_and(|s| s.seq == c.snd_una),
                    "the retransmission queue does not begin at snd_una"
                );
                assert!(
                    b.timer_kind != active::RetransmitTimer::Off
                        || c.has(Flags::TX_LISTED)
                        || c.slot_state != SlotState::Open,
                    "data are in flight without a timer"
                );
            }
        }
        assert_eq!(live, self.conns.live());
        assert_eq!(
            v6,
            self.addresses.in_use(),
            "IPv6 address pairs differ from IPv6 connections and TIME-WAIT entries"
        );
        assert_eq!(half_open, self.half_open);
        assert!(half_open <= self.config.half_open_max.max(1) + 1);
        assert!(self.time_wait.len() <= self.config.time_wait_max as usize);
        let reserved: usize = self.pending.iter().map(|p| receive::chunks_for(p.data.len())).sum();
        assert_eq!(self.chunks.reserved(), reserved, "reserved chunks differ from the data in the burst");
    }
}
