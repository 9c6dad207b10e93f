//! The replay of one worker: opens connections and sends their bytes at the recorded times, and finds the
//! answers in what arrives.
//!
//! Answers are found by their amount: the answer to a request begins after as many bytes as the recorded
//! server had sent before. Bytes beyond the answers to all requests that were begun are in excess; they are
//! counted and belong to no answer.

use super::ReplayPlan;
use super::options::ReplayTarget;
use super::recording::RecordedEnd;
use super::stats::ReplayStats;
use crate::load::plan::WorkerShare;
use crate::load::run::LoadSession;
use crate::load::session::{Network, Stage};
use crate::load::sources::Sources;
use crate::load::stats::{Failure, LiveProgress, ProgressSnapshot};
use core::cmp::Reverse;
use core::time::Duration;
use ginnel::Instant;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Due actions that are performed before received frames are looked at again.
const STEPS_PER_POLL: u32 = 256;
/// Interval at which progress is published.
const TICK: Duration = Duration::from_millis(100);

/// States of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplayState {
    /// The slot has no connection.
    Free,
    Connecting,
    Open,
    /// The recorded end has passed; answers are awaited until the timeout.
    Ending,
}

/// A connection of the run.
#[derive(Clone, Copy, Debug)]
struct ReplayConnection {
    state: ReplayState,
    /// Changes when the slot gets another connection, and when its connection is established or only awaits
    /// answers: actions with another generation are stale.
    generation: u32,
    /// Index of the recorded connection.
    recorded: u32,
    /// Start of the recording for this connection.
    base: Instant,
    /// Index of the next send among all sends of the recording, and number of its bytes that were accepted.
    next_send: u32,
    offset: u32,
    /// True if the network did not accept all bytes.
    is_blocked: bool,
    /// True if the connection has a deadline because it was blocked.
    has_deadline: bool,
    /// Indices, among all requests of the recording, of the first request that was not sent completely and of
    /// the first one without an answer.
    next_request: u32,
    next_answer: u32,
    /// Bytes received, without those in excess.
    received: u64,
    has_excess: bool,
}

/// A copy of the recording, and the connection of it that is opened next.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    pass: u32,
    connection: u32,
}

/// An action that becomes due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum DueAction {
    /// Open the next connection of a copy.
    Open { copy: u32 },
    /// Continue with a connection, unless the slot has another one.
    Continue { slot: u32, generation: u32 },
}

/// The run of one worker.
pub struct ReplaySession {
    plan: Arc<ReplayPlan>,
    share: WorkerShare,
    servers: Vec<ReplayTarget>,
    next_server: usize,
    sources: Sources,
    connections: Vec<ReplayConnection>,
    free: Vec<u32>,
    cursors: Vec<Cursor>,
    due: BinaryHeap<Reverse<(Instant, DueAction)>>,
    /// Number of cursors that have connections left.
    cursors_left: u32,
    used: u32,
    open: u32,
    start: Instant,
    stage: Stage,
    stats: ReplayStats,
    live: ProgressSnapshot,
    progress: Arc<LiveProgress>,
}

impl ReplaySession {
    /// Creates the session of a worker that begins at `now`. `servers` must not be empty.
    pub fn new(
        plan: Arc<ReplayPlan>,
        share: WorkerShare,
        servers: Vec<ReplayTarget>,
        sources: Sources,
        progress: Arc<LiveProgress>,
        now: Instant,
    ) -> Self {
        let copies = plan.copies;
        let mut session = Self {
            plan,
            share,
            servers,
            next_server: share.worker as usize,
            sources,
            connections: Vec::new(),
            free: Vec::new(),
            cursors: vec![Cursor { pass: 0, connection: 0 }; copies as usize],
            due: BinaryHeap::new(),
            cursors_left: copies,
            used: 0,
            open: 0,
            start: now,
            stage: Stage::Measure,
            stats: ReplayStats::default(),
            live: ProgressSnapshot::default(),
            progress,
        };
        (0..copies).for_each(|copy| session.schedule_opening(copy));
        session
    }

    /// Returns the start of the recording for a copy's present pass.
    fn base(&self, copy: u32) -> Instant {
        let pass = self.cursors[copy as usize].pass;
        self.start + self.plan.pass().saturating_mul(pass) + self.plan.copy_shift(copy)
    }

    /// Schedules the opening of this worker's next connection in a copy.
    fn schedule_opening(&mut self, copy: u32) {
        let count = self.plan.recording.connections.len() as u32;
        loop {
            let cursor = &mut self.cursors[copy as usize];
            if cursor.connection >= count {
                *cursor = Cursor { pass: cursor.pass + 1, connection: 0 };
            }
            if cursor.pass >= self.plan.repeat || count == 0 {
                self.cursors_left -= 1;
                return;
            }
            // Workers take turns, also if there is one connection with many copies.
            let number = u64::from(cursor.connection) + u64::from(copy) + u64::from(cursor.pass);
            if number % u64::from(self.share.workers) == u64::from(self.share.worker) {
                break;
            }
            cursor.connection += 1;
        }
        let recorded = self.cursors[copy as usize].connection;
        let opened = self.plan.recording.connections[recorded as usize].opened_ns;
        let at = self.base(copy) + self.plan.scaled(opened);
        self.due.push(Reverse((at, DueAction::Open { copy })));
    }

    /// Opens a copy's next connection.
    fn open_next(&mut self, copy: u32, now: Instant, net: &mut impl Network) {
        let base = self.base(copy);
        let recorded = self.cursors[copy as usize].connection;
        self.cursors[copy as usize].connection += 1;
        self.schedule_opening(copy);
        let plan = Arc::clone(&self.plan);
        let connection = &plan.recording.connections[recorded as usize];
        self.stats.counters.connections_due += 1;
        self.stats.counters.due += plan.recording.requests_with_answers(connection);
        let slot = self.free.pop().unwrap_or(self.connections.len() as u32);
        let generation = self.connections.get(slot as usize).map_or(0, |old| old.generation + 1);
        let new = ReplayConnection {
            state: ReplayState::Connecting,
            generation,
            recorded,
            base,
            next_send: connection.sends.start,
            offset: 0,
            is_blocked: false,
            has_deadline: false,
            next_request: connection.requests.start,
            next_answer: connection.requests.start,
            received: 0,
            has_excess: false,
        };
        match self.connections.get_mut(slot as usize) {
            Some(old) => *old = new,
            None => self.connections.push(new),
        }
        self.used += 1;
        let target = self.servers[self.next_server % self.servers.len()];
        self.next_server = self.next_server.wrapping_add(1);
        match net.connect(slot, target.address(connection.server_port), self.sources.next_address()) {
            Ok(()) => self.continue_at(slot, now + plan.timeout),
            Err(failure) => self.fail(slot, failure),
        }
    }

    fn continue_at(&mut self, slot: u32, at: Instant) {
        let generation = self.connections[slot as usize].generation;
        self.due.push(Reverse((at, DueAction::Continue { slot, generation })));
    }

    /// Ends a connection that the network has closed, or is told to close.
    fn fail(&mut self, slot: u32, failure: Failure) {
        self.stats.counters.failures[failure as usize] += 1;
        self.stats.counters.connections_failed += 1;
        self.live.failed += 1;
        self.finish(slot);
    }

    /// Frees the slot of a connection, and counts its requests without answers.
    fn finish(&mut self, slot: u32) {
        let plan = Arc::clone(&self.plan);
        let connection = self.connections[slot as usize];
        let recorded = &plan.recording.connections[connection.recorded as usize];
        let is_open = matches!(connection.state, ReplayState::Open | ReplayState::Ending);
        self.open -= u32::from(is_open);
        self.used -= 1;
        self.connections[slot as usize].state = ReplayState::Free;
        self.free.push(slot);
        let counters = &mut self.stats.counters;
        for number in connection.next_answer..recorded.requests.end {
            if plan.recording.requests[number as usize].answer_bytes > 0 {
                let is_sent = number < connection.next_request;
                *(if is_sent { &mut counters.unanswered } else { &mut counters.not_sent }) += 1;
            }
        }
        if is_open {
            let missing = recorded.answer_bytes.saturating_sub(connection.received);
            counters.missing_bytes += missing;
            counters.connections_mismatched += u64::from(missing > 0 || connection.has_excess);
        }
    }

    /// Sends what is due on a connection, and ends it if that is due.
    fn advance(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let plan = Arc::clone(&self.plan);
        let recording = &plan.recording;
        loop {
            let connection = &mut self.connections[slot as usize];
            let recorded = &recording.connections[connection.recorded as usize];
            if connection.state != ReplayState::Open || connection.is_blocked {
                return;
            }
            if connection.next_send >= recorded.sends.end {
                let due = connection.base + plan.scaled(recorded.ended_ns);
                return if due > now { self.continue_at(slot, due) } else { self.end(slot, now, net) };
            }
            let send = recording.sends[connection.next_send as usize];
            let due = connection.base + plan.scaled(send.at_ns);
            if due > now {
                return self.continue_at(slot, due);
            }
            let bytes = &recording.bytes[send.start..send.start + send.len as usize];
            let accepted = net.send(slot, &bytes[connection.offset as usize..]);
            self.stats.counters.bytes_sent += accepted as u64;
            // Cannot truncate: at most `len` bytes are accepted.
            connection.offset += accepted as u32;
            if connection.offset < send.len {
                connection.is_blocked = true;
                if !connection.has_deadline {
                    connection.has_deadline = true;
                    let deadline = connection.base + plan.scaled(recorded.ended_ns) + plan.timeout;
                    self.continue_at(slot, deadline.max(now + plan.timeout));
                }
                return;
            }
            (connection.next_send, connection.offset) = (connection.next_send + 1, 0);
            self.stats.send_error.record(due, now);
            self.stats.sending = self.stats.sending.max(now.saturating_since(self.start));
            let request = recording.requests.get(connection.next_request as usize);
            if request.is_some_and(|request| request.last_send < connection.next_send)
                && connection.next_request < recorded.requests.end
            {
                connection.next_request += 1;
                self.live.sent += 1;
            }
        }
    }

    /// Ends a connection whose bytes are all sent, or waits for its answers first.
    fn end(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let connection = &mut self.connections[slot as usize];
        let recorded = &self.plan.recording.connections[connection.recorded as usize];
        if connection.received >= recorded.answer_bytes {
            self.end_as_recorded(slot, net);
        } else {
            connection.state = ReplayState::Ending;
            // The deadline of a connection that was blocked is stale.
            connection.generation += 1;
            self.continue_at(slot, now + self.plan.timeout);
        }
    }

    /// Closes or resets a connection, as the recorded client did.
    fn end_as_recorded(&mut self, slot: u32, net: &mut impl Network) {
        let recorded = self.connections[slot as usize].recorded;
        match self.plan.recording.connections[recorded as usize].end {
            RecordedEnd::Reset => net.abort(slot),
            RecordedEnd::Fin => net.close(slot),
        }
        self.finish(slot);
    }

    /// Performs the action on a connection that has become due.
    fn continue_connection(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        match self.connections[slot as usize].state {
            ReplayState::Free => {}
            ReplayState::Connecting => {
                net.abort(slot);
                self.fail(slot, Failure::ConnectTimeout);
            }
            ReplayState::Open if !self.is_overdue(slot, now) => self.advance(slot, now, net),
            ReplayState::Open | ReplayState::Ending => {
                net.abort(slot);
                self.fail(slot, Failure::Timeout);
            }
        }
    }

    /// Returns whether a connection is blocked after its recorded end and the timeout.
    fn is_overdue(&self, slot: u32, now: Instant) -> bool {
        let connection = &self.connections[slot as usize];
        let recorded = &self.plan.recording.connections[connection.recorded as usize];
        let end = connection.base + self.plan.scaled(recorded.ended_ns);
        connection.is_blocked && now >= end + self.plan.timeout
    }

    /// Performs the actions that are due, up to a number that keeps the worker responsive.
    fn act(&mut self, now: Instant, net: &mut impl Network) {
        for _ in 0..STEPS_PER_POLL {
            let Some(Reverse((_, action))) = self.due.peek().copied().filter(|Reverse((at, _))| *at <= now)
            else {
                return;
            };
            self.due.pop();
            match action {
                DueAction::Open { copy } => self.open_next(copy, now, net),
                DueAction::Continue { slot, generation } => {
                    if self.connections[slot as usize].generation == generation {
                        self.continue_connection(slot, now, net);
                    }
                }
            }
        }
    }

    /// Records the answers whose first byte has arrived.
    fn find_answers(&mut self, slot: u32, now: Instant) {
        let recording = &self.plan.recording;
        let connection = &mut self.connections[slot as usize];
        let recorded = &recording.connections[connection.recorded as usize];
        while connection.next_answer < recorded.requests.end {
            let request = &recording.requests[connection.next_answer as usize];
            if request.answer_bytes == 0 || connection.received <= request.answer_from {
                return;
            }
            if connection.next_answer < connection.next_request {
                let sent_at = recording.sends[request.last_send as usize].at_ns;
                self.stats.first_byte.record(connection.base + self.plan.scaled(sent_at), now);
                self.stats.counters.answered += 1;
            } else {
                self.stats.counters.answered_early += 1;
            }
            self.live.completed += 1;
            connection.next_answer += 1;
        }
    }

    fn change_stage(&mut self, now: Instant) {
        let is_over = self.used == 0 || now >= self.start + self.plan.length();
        if self.stage == Stage::Measure && self.cursors_left == 0 && is_over {
            self.stage = Stage::Drain;
        }
        if self.stage == Stage::Drain && self.used == 0 {
            self.stage = Stage::Done;
        }
    }

    fn publish(&mut self) {
        self.live.open = self.open.into();
        self.live.stage = self.stage as u64;
        self.progress.publish(&self.live);
    }
}

impl LoadSession for ReplaySession {
    type Stats = ReplayStats;

    fn connected(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let connection = &mut self.connections[slot as usize];
        if connection.state != ReplayState::Connecting {
            return;
        }
        connection.state = ReplayState::Open;
        // The timer of the attempt is stale.
        connection.generation += 1;
        let opened = self.plan.recording.connections[connection.recorded as usize].opened_ns;
        self.stats.connect.record(connection.base + self.plan.scaled(opened), now);
        self.stats.counters.connections += 1;
        self.live.connected += 1;
        self.open += 1;
        self.advance(slot, now, net);
    }

    fn writable(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let connection = &mut self.connections[slot as usize];
        if connection.state == ReplayState::Open && connection.is_blocked {
            connection.is_blocked = false;
            self.advance(slot, now, net);
        }
    }

    fn data(&mut self, slot: u32, bytes: &[u8], now: Instant, net: &mut impl Network) {
        self.live.bytes += bytes.len() as u64;
        self.stats.counters.bytes += bytes.len() as u64;
        let connection = &mut self.connections[slot as usize];
        if !matches!(connection.state, ReplayState::Open | ReplayState::Ending) {
            return;
        }
        connection.received += bytes.len() as u64;
        let recording = &self.plan.recording;
        let recorded = &recording.connections[connection.recorded as usize];
        let position = (connection.next_request, connection.next_send, connection.offset);
        let expected = recording.expected_bytes(recorded, position);
        if let Some(excess) = connection.received.checked_sub(expected).filter(|excess| *excess > 0) {
            self.stats.counters.excess_bytes += excess;
            connection.received = expected;
            connection.has_excess = true;
        }
        let is_complete = connection.received >= recorded.answer_bytes;
        let is_ending = connection.state == ReplayState::Ending;
        self.find_answers(slot, now);
        if is_complete && is_ending {
            self.end_as_recorded(slot, net);
        }
    }

    fn peer_closed(&mut self, slot: u32, _: Instant, net: &mut impl Network) {
        let connection = &self.connections[slot as usize];
        if !matches!(connection.state, ReplayState::Open | ReplayState::Ending) {
            return;
        }
        let recorded = &self.plan.recording.connections[connection.recorded as usize];
        let is_complete =
            connection.next_send >= recorded.sends.end && connection.received >= recorded.answer_bytes;
        net.close(slot);
        if is_complete { self.finish(slot) } else { self.fail(slot, Failure::ClosedEarly) }
    }

    fn ended(&mut self, slot: u32, failure: Failure, _: Instant, _: &mut impl Network) {
        if self.connections[slot as usize].state != ReplayState::Free {
            self.fail(slot, failure);
        }
    }

    fn poll(&mut self, now: Instant, net: &mut impl Network) -> Option<Instant> {
        self.act(now, net);
        self.change_stage(now);
        self.publish();
        if self.stage == Stage::Done {
            return None;
        }
        let next = self.due.peek().map_or(Instant::MAX, |Reverse((at, _))| *at);
        Some(next.min(now + TICK).max(now))
    }

    fn next_arrival(&self) -> Option<Instant> {
        self.due.peek().map(|Reverse((at, _))| *at)
    }

    fn interrupt(&mut self, _: Instant) {
        if self.stage < Stage::Done {
            self.stats.is_interrupted = true;
            self.due.clear();
            self.cursors_left = 0;
            for slot in 0..self.connections.len() as u32 {
                if self.connections[slot as usize].state != ReplayState::Free {
                    // The network closes what is left at the end of the run.
                    self.finish(slot);
                }
            }
        }
    }

    fn is_measuring(&self) -> bool {
        self.stage == Stage::Measure
    }

    fn stats(&self) -> &ReplayStats {
        &self.stats
    }
}
