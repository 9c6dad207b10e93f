//! The generator without its network: which connections to open and close, which requests to send, and the
//! results. There is one session per worker.
//!
//! ```text
//!            open                connected               response complete
//! (vacant) ───────► connecting ───────────► open ─┬─► next request on it (keep-alive) ──┐
//!    ▲                  │ failed             ▲    └─► closing ──► vacant                 │
//!    └──── cooling ◄────┴────────────────────┴──────────────────────────────────────────┘
//! ```
//!
//! In a closed loop each connection sends its next request as soon as it has a response. In an open loop
//! requests have due times ([`Arrivals`]). A request that finds no free connection waits, and its latency
//! counts from its due time.

mod flight;
mod schedule;

use self::flight::PendingRequest;
use super::arrivals::Arrivals;
use super::plan::{Closer, Plan};
use super::response::{ParseProgress as Parsed, Parser, PartialResponses, Response};
use super::sources::Sources;
use super::stats::{Failure, LiveProgress, ProgressSnapshot, Stats};
use super::urls::Requests;
use crate::sweep::Sweep;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel::Instant;
use ginnel::Random;
use std::collections::VecDeque;
use std::sync::Arc;

/// Stands for no deadline.
const NEVER: u32 = u32::MAX;
/// Most initial connection attempts at the same time, while the connections of the run are opened; more would
/// overflow the server's backlog. Attempts that replace a closed connection do not count. Otherwise a closed
/// loop of short connections, of which half are always being opened, could never have more than twice this
/// number.
const INITIAL_CONNECTS_MAX: u32 = 1024;
/// Time before a slot is used again after its connection failed. Without it a server that refuses would be
/// flooded with SYNs.
const COOL_DOWN: Duration = Duration::from_millis(10);
/// Resolution of timeouts, and interval at which progress is published.
const TICK: Duration = Duration::from_millis(100);

/// The network of a session, which identifies connections by slots. After [`Network::close`],
/// [`Network::abort`] or a call of [`Session::ended`] the slot is free; the network must not report events of
/// its former connection any more.
pub trait Network {
    /// Starts to open a connection. Unless it fails at once, [`Session::connected`] or [`Session::ended`]
    /// follows.
    fn connect(&mut self, slot: u32, to: SocketAddr, from: Option<IpAddr>) -> Result<(), Failure>;
    /// Sends as many bytes as fit into the send buffer and returns how many. If that is less than all,
    /// [`Session::writable`] must follow.
    fn send(&mut self, slot: u32, bytes: &[u8]) -> usize;
    /// Closes the connection with FIN.
    fn close(&mut self, slot: u32);
    /// Resets the connection.
    fn abort(&mut self, slot: u32);
}

/// Stages of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u64)]
pub enum Stage {
    /// Connections are being opened.
    Setup,
    /// Requests are sent but not measured.
    WarmUp,
    /// Requests are measured.
    Measure,
    /// No more requests are begun; responses are awaited.
    Drain,
    /// The run is over.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Vacant,
    Cooling,
    Connecting,
    Open,
    /// The last response has arrived; the server is expected to close.
    Closing,
}

/// State of one connection: 48 bytes, plus 16 bytes for each request that may be in flight.
#[derive(Clone, Copy, Debug)]
struct Slot {
    parser: Parser,
    /// Intended start of the connection.
    connect_started: Instant,
    /// Tick at which the connection times out.
    deadline: u32,
    /// Requests that may still be begun on the connection.
    requests_left: u32,
    /// Bytes sent of the first request that was not sent completely.
    offset: u32,
    /// Index of the oldest request in flight within the slot's ring.
    head: u16,
    /// Number of requests in flight.
    in_flight: u16,
    /// Number of requests in flight that were sent completely.
    sent: u16,
    state: SlotState,
    /// True if the slot's first connection is being opened.
    is_new: bool,
    in_ready: bool,
    in_sweep: bool,
}

const _: () = assert!(size_of::<Slot>() <= 48);

/// The run of one worker.
pub struct Session {
    plan: Plan,
    requests: Arc<Requests>,
    targets: Vec<SocketAddr>,
    next_target: usize,
    sources: Sources,
    rng: Random,
    slots: Vec<Slot>,
    /// Rings of requests in flight, `plan.pipeline` entries per slot.
    pending: Vec<PendingRequest>,
    records: PartialResponses,
    free: Vec<u32>,
    /// Slots on which a request can be begun (open loop with persistent connections).
    ready: VecDeque<u32>,
    cooling: VecDeque<(Instant, u32)>,
    sweep: Sweep,
    arrivals: Option<Arrivals>,
    stage: Stage,
    start: Instant,
    /// The measured time; [`Instant::MAX`] until it is known.
    measure_from: Instant,
    measure_to: Instant,
    drain_until: Instant,
    /// Connections being opened.
    connecting: u32,
    /// Connections being opened that are the first of their slots.
    initial_connects: u32,
    /// Connections that are open or being opened.
    open: u32,
    in_flight: u64,
    /// Requests begun in the measured time.
    requests_begun: u64,
    last_completion: Instant,
    /// Since when requests have failed without a single response.
    failing_since: Option<Instant>,
    /// Failures since the last response.
    failures_in_row: u64,
    /// The timeout in ticks.
    timeout_ticks: u32,
    stats: Stats,
    live: ProgressSnapshot,
    progress: Arc<LiveProgress>,
    send_buffer: Vec<u8>,
}

impl Session {
    /// Creates a session that begins at `now`. `targets` must not be empty.
    pub fn new(
        plan: Plan,
        requests: Arc<Requests>,
        targets: Vec<SocketAddr>,
        sources: Sources,
        progress: Arc<LiveProgress>,
        now: Instant,
    ) -> Self {
        Self {
            rng: Random::new(plan.seed),
            requests,
            targets,
            next_target: 0,
            sources,
            slots: Vec::new(),
            pending: Vec::new(),
            records: PartialResponses::default(),
            free: Vec::new(),
            ready: VecDeque::new(),
            cooling: VecDeque::new(),
            sweep: Sweep::new(ticks(plan.timeout), tick_of(now)),
            arrivals: None,
            stage: Stage::Setup,
            start: now,
            measure_from: Instant::MAX,
            measure_to: Instant::MAX,
            drain_until: Instant::MAX,
            connecting: 0,
            initial_connects: 0,
            open: 0,
            in_flight: 0,
            requests_begun: 0,
            last_completion: Instant::ZERO,
            failing_since: None,
            failures_in_row: 0,
            timeout_ticks: ticks(plan.timeout),
            stats: Stats::default(),
            live: ProgressSnapshot::default(),
            progress,
            send_buffer: Vec::new(),
            plan,
        }
    }

    /// Returns the current stage.
    pub const fn stage(&self) -> Stage {
        self.stage
    }

    /// Returns the results. They are complete in [`Stage::Done`].
    pub const fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Returns true if requests that begin now are measured.
    pub fn is_measuring(&self) -> bool {
        self.stage == Stage::Measure && !self.has_begun_all_requests()
    }

    /// Returns the number of connections that are open or being opened.
    pub const fn connections(&self) -> u32 {
        self.open
    }

    fn is_measured(&self, intended: Instant) -> bool {
        intended >= self.measure_from && intended < self.measure_to
    }

    /// Opens a connection in a vacant slot. `intended` is the time at which it was due.
    fn open(&mut self, slot: u32, intended: Instant, now: Instant, net: &mut impl Network) {
        let target = self.targets[self.next_target];
        self.next_target = (self.next_target + 1) % self.targets.len();
        let s = &mut self.slots[slot as usize];
        s.state = SlotState::Connecting;
        s.connect_started = intended;
        (s.head, s.in_flight, s.sent, s.offset) = (0, 0, 0, 0);
        s.requests_left = self.plan.requests_per_connection;
        self.connecting += 1;
        self.open += 1;
        self.stats.counters.open_max = self.stats.counters.open_max.max(self.open.into());
        if self.plan.is_short() {
            self.enqueue(slot, intended, now);
        }
        match net.connect(slot, target, self.sources.next_address()) {
            Ok(()) => self.set_deadline(slot, now),
            Err(failure) => self.fail(slot, failure, now),
        }
    }

    /// Handles an established connection.
    pub fn connected(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let s = &mut self.slots[slot as usize];
        if s.state != SlotState::Connecting {
            return;
        }
        s.state = SlotState::Open;
        s.deadline = NEVER;
        let begun = s.connect_started;
        let was_new = core::mem::take(&mut s.is_new);
        self.connecting -= 1;
        self.initial_connects -= u32::from(was_new);
        self.live.connected += 1;
        if self.is_measured(begun) {
            self.stats.connect.record(begun, now);
        }
        if self.is_measured(now) {
            self.stats.counters.connected += 1;
        }
        if let Some(opening) = self.requests.opening() {
            self.set_deadline(slot, now);
            self.put_in_flight(slot, PendingRequest { intended: now, request: opening });
            // The measured requests follow when the opening request has been answered.
            self.send_pending(slot, net);
        } else if self.plan.is_short() {
            self.set_deadline(slot, now);
            self.send_pending(slot, net);
        } else if self.plan.rate.is_none() {
            self.fill_pipeline(slot, now, net);
        } else {
            self.mark_ready(slot);
            self.dispatch(now, net);
        }
        if was_new {
            self.open_initial(now, net);
        }
    }

    /// Continues sending when send buffer has become free.
    pub fn writable(&mut self, slot: u32, net: &mut impl Network) {
        if self.slots[slot as usize].state == SlotState::Open {
            self.send_pending(slot, net);
        }
    }

    /// Handles received bytes. All of them are consumed.
    pub fn data(&mut self, slot: u32, mut bytes: &[u8], now: Instant, net: &mut impl Network) {
        self.live.bytes += bytes.len() as u64;
        if self.is_measured(now) {
            self.stats.counters.bytes += bytes.len() as u64;
        }
        while !bytes.is_empty() {
            let s = &mut self.slots[slot as usize];
            match s.state {
                SlotState::Open if s.in_flight > 0 => {}
                // No request is in flight.
                SlotState::Open => {
                    net.abort(slot);
                    return self.fail(slot, Failure::BadResponse, now);
                }
                _ => return,
            }
            let at_start = s.parser.is_at_start();
            let read = s.parser.read(bytes, self.requests.protocol(), &mut self.records);
            let PendingRequest { intended, request } = *self.pending(slot, 0);
            if at_start && self.is_measured(intended) && !self.is_opening_request(request) {
                self.stats.first_byte.record(intended, now);
            }
            match read {
                Ok(Parsed::More) => return,
                Ok(Parsed::Complete(used, response)) => {
                    bytes = &bytes[used..];
                    self.complete(slot, response, now, net);
                }
                Err(_) => {
                    net.abort(slot);
                    return self.fail(slot, Failure::BadResponse, now);
                }
            }
        }
    }

    fn complete(&mut self, slot: u32, response: Response, now: Instant, net: &mut impl Network) {
        let was_sent = self.count(slot, response, now);
        let s = &self.slots[slot as usize];
        if response.close || !was_sent || (s.requests_left == 0 && s.in_flight == 0) {
            return self.finish_connection(slot, response.close, now, net);
        }
        if s.in_flight > 0 {
            self.set_deadline(slot, now);
        } else {
            self.slots[slot as usize].deadline = NEVER;
        }
        if self.plan.rate.is_none() {
            self.fill_pipeline(slot, now, net);
        } else {
            self.mark_ready(slot);
            self.dispatch(now, net);
        }
    }

    /// Counts the response to the oldest request in flight. Returns false if that request was not sent
    /// completely; then the connection cannot be used any more.
    fn count(&mut self, slot: u32, response: Response, now: Instant) -> bool {
        let PendingRequest { intended, request } = *self.pending(slot, 0);
        if !self.is_opening_request(request) {
            self.live.completed += 1;
            self.last_completion = now;
            self.failing_since = None;
            self.failures_in_row = 0;
            if self.is_measured(intended) {
                self.stats.total.record(intended, now);
                self.stats.counters.completed += 1;
                self.stats.counters.by_class[usize::from(response.status / 100).min(5)] += 1;
            }
            self.stats.counters.completed_in_time += u64::from(self.is_measured(now));
        }
        let s = &mut self.slots[slot as usize];
        let was_sent = s.sent > 0;
        s.head = (s.head + 1) % self.plan.pipeline;
        s.in_flight -= 1;
        s.sent -= u16::from(was_sent);
        self.in_flight -= 1;
        was_sent
    }

    /// Ends a connection after its last request.
    fn finish_connection(&mut self, slot: u32, server_closes: bool, now: Instant, net: &mut impl Network) {
        let s = &mut self.slots[slot as usize];
        if s.in_flight > 0 {
            // Requests after a response that closes the connection are lost (RFC 9112 §9.6).
            net.abort(slot);
            return self.fail(slot, Failure::ClosedEarly, now);
        }
        match self.plan.closer {
            Closer::Reset => net.abort(slot),
            Closer::Client => net.close(slot),
            Closer::Server if server_closes || self.plan.is_short() => {
                s.state = SlotState::Closing;
                return self.set_deadline(slot, now);
            }
            Closer::Server => net.close(slot),
        }
        self.free_slot(slot);
        self.reuse_slot(slot, now, net);
    }

    /// Handles the server's FIN, after all data before it were delivered.
    pub fn peer_closed(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let s = &mut self.slots[slot as usize];
        match s.state {
            SlotState::Closing => {
                net.close(slot);
                self.free_slot(slot);
                self.reuse_slot(slot, now, net);
            }
            SlotState::Open => {
                if let Some(response) = s.parser.end() {
                    s.state = SlotState::Closing;
                    self.count(slot, response, now);
                }
                if self.slots[slot as usize].in_flight > 0 {
                    net.abort(slot);
                    self.fail(slot, Failure::ClosedEarly, now);
                } else {
                    self.count_lost_idle(slot, now);
                    net.close(slot);
                    self.free_slot(slot);
                    self.reuse_slot(slot, now, net);
                }
            }
            SlotState::Connecting | SlotState::Vacant | SlotState::Cooling => {}
        }
    }

    fn count_lost_idle(&mut self, slot: u32, now: Instant) {
        let s = &self.slots[slot as usize];
        if s.state == SlotState::Open && !self.plan.is_short() && self.is_measured(now) {
            self.stats.counters.lost_idle += 1;
        }
    }

    /// Handles the end of a connection. `failure` is the reason; it does not count if the connection was
    /// established and had no request in flight.
    pub fn ended(&mut self, slot: u32, failure: Failure, now: Instant, net: &mut impl Network) {
        let s = &self.slots[slot as usize];
        match s.state {
            SlotState::Vacant | SlotState::Cooling => {}
            SlotState::Closing => {
                self.free_slot(slot);
                self.reuse_slot(slot, now, net);
            }
            SlotState::Open if s.in_flight == 0 => {
                self.count_lost_idle(slot, now);
                self.free_slot(slot);
                self.start_cool_down(slot, now);
            }
            SlotState::Open | SlotState::Connecting => self.fail(slot, failure, now),
        }
    }

    /// Counts a failed connection with its requests in flight. The network has closed it already.
    fn fail(&mut self, slot: u32, failure: Failure, now: Instant) {
        let s = &self.slots[slot as usize];
        let lost = u64::from(s.in_flight).max(1);
        self.live.failed += lost;
        self.failures_in_row += lost;
        if self.is_measured(now) || self.measured_in_flight(slot) > 0 {
            self.stats.counters.failures[failure as usize] += lost;
        }
        let failing_since = *self.failing_since.get_or_insert(now);
        let given_up = self.plan.give_up.is_some_and(|time| now >= failing_since + time);
        // Set-up and warm-up end by themselves, and failures during them do not count.
        self.stats.gave_up |= given_up && self.stage == Stage::Measure && !self.has_begun_all_requests();
        self.free_slot(slot);
        self.start_cool_down(slot, now);
    }

    /// Makes a slot vacant.
    fn free_slot(&mut self, slot: u32) {
        let s = &mut self.slots[slot as usize];
        self.connecting -= u32::from(s.state == SlotState::Connecting);
        self.initial_connects -= u32::from(core::mem::take(&mut s.is_new));
        self.open = self.open.saturating_sub(1);
        self.in_flight -= u64::from(s.in_flight);
        s.parser.reset(&mut self.records);
        (s.in_flight, s.state, s.deadline) = (0, SlotState::Vacant, NEVER);
    }

    fn start_cool_down(&mut self, slot: u32, now: Instant) {
        self.slots[slot as usize].state = SlotState::Cooling;
        self.cooling.push_back((now + COOL_DOWN, slot));
    }

    /// Opens the next connection in a slot, if one is due.
    fn reuse_slot(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        self.slots[slot as usize].state = SlotState::Vacant;
        if !self.is_running() {
            return;
        }
        if self.plan.rate.is_some() && self.plan.is_short() {
            self.free.push(slot);
            self.dispatch(now, net);
        } else if !self.plan.is_short() || self.may_begin(now) {
            self.open(slot, now, now, net);
        }
    }
}

/// Returns the ticks from time zero to `now`.
const fn tick_of(now: Instant) -> u32 {
    (now.as_nanos() / TICK.as_nanos() as u64) as u32
}

/// Returns the ticks in a duration, rounded up, and one more because the current tick has begun already. A
/// longer duration than 2^30 ticks is shortened.
const fn ticks(duration: Duration) -> u32 {
    let ticks = duration.as_nanos().div_ceil(TICK.as_nanos());
    if ticks > 1 << 30 { 1 << 30 } else { ticks as u32 + 1 }
}

#[cfg(test)]
mod tests;
