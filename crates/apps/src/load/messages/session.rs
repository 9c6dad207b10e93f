//! The session of one worker: opens the connections evenly over the set-up time, sends messages by the
//! calendar, and matches answers to requests.
//!
//! ```text
//! set-up ──► wait ──► sending ──► draining ──► closing ──► done
//! ```
//!
//! A connection has 8 bytes here. Requests that wait for answers take 24 bytes each from a common pool, and
//! only connections on which the network accepts nothing have queues.

use super::calendar::{Calendar, DueMessage};
use super::kinds::Kinds;
use super::outstanding::{DeviceMessage, NONE, Outstanding};
use super::plan::{Kind, MessagePlan, PriorityGrain, Service};
use super::stats::MessageStats;
use super::wire::{AnswerPart, MessageWriter, read_echo, read_iot};
use crate::load::plan::WorkerShare;
use crate::load::run::LoadSession;
use crate::load::session::{Network, Stage};
use crate::load::sources::Sources;
use crate::load::stats::{Failure, LiveProgress, ProgressSnapshot};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::Instant;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Most connection attempts at the same time; more would overflow the server's backlog.
const CONNECTS_MAX: u32 = 1_024;
/// Time before a connection is opened again after it failed.
const RETRY: Duration = Duration::from_secs(1);
/// Messages that are sent, and connections that are closed, before received frames are looked at again.
const STEPS_PER_POLL: u32 = 256;
/// Most messages that wait on a connection on which the network accepts nothing.
// limit: messages that wait on a connection of the generator
const WAITING_MAX: usize = 1_024;
/// Interval at which progress is published.
const TICK: Duration = Duration::from_millis(100);

/// States of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceState {
    Closed,
    Connecting,
    Open,
}

/// A connection, which stands for a device.
#[derive(Clone, Copy, Debug)]
struct Device {
    /// The last request that waits for an answer.
    last: u32,
    /// Bytes that have arrived of the next answer.
    received: u16,
    state: DeviceState,
    /// True if the next answer is an error.
    is_error: bool,
}

const _: () = assert!(size_of::<Device>() <= 8);

/// Messages that the network has not accepted yet.
#[derive(Debug, Default)]
struct Waiting {
    messages: VecDeque<DeviceMessage>,
    /// Bytes of the first message that were accepted.
    offset: usize,
}

/// The run of one worker.
pub struct MessageSession {
    plan: Arc<MessagePlan>,
    share: WorkerShare,
    targets: Vec<SocketAddr>,
    next_target: usize,
    sources: Sources,
    devices: Vec<Device>,
    /// Number of connections of this worker.
    own: u32,
    outstanding: Outstanding,
    waiting: HashMap<u32, Waiting>,
    calendar: Option<Calendar>,
    kinds: Kinds,
    /// The kind of each connection's messages, if it has one for all of them.
    flow_kinds: Vec<Kind>,
    writer: MessageWriter,
    /// Connection attempts in their order, with their deadlines. Attempts that have ended stay until they are
    /// the first.
    attempts: VecDeque<(Instant, u32)>,
    /// Connections to open again, and when.
    retries: VecDeque<(Instant, u32)>,
    connecting: u32,
    open: u32,
    stage: Stage,
    start: Instant,
    send_from: Instant,
    drain_until: Instant,
    /// First connection that is not closed, in the last stage.
    closed: u32,
    think_time: Duration,
    stats: MessageStats,
    live: ProgressSnapshot,
    progress: Arc<LiveProgress>,
}

impl MessageSession {
    /// Creates the session of a worker that begins at `now`. `targets` must not be empty.
    pub fn new(
        plan: Arc<MessagePlan>,
        share: WorkerShare,
        targets: Vec<SocketAddr>,
        sources: Sources,
        progress: Arc<LiveProgress>,
        now: Instant,
    ) -> Self {
        let own = plan.connections_of(share);
        let (high, low) = (plan.high_share, plan.low_share);
        let kinds = Kinds::new(plan.seed, plan.messages_before(share), plan.messages_of(share), high, low);
        let flow_kinds = match plan.grain {
            PriorityGrain::Message => Vec::new(),
            PriorityGrain::Flow => {
                let mut kinds = Kinds::new(plan.seed, plan.connections_before(share), own.into(), high, low);
                (0..own).map(|_| kinds.draw()).collect()
            }
        };
        let mut stats = MessageStats::default();
        stats.counters.connections = own.into();
        Self {
            writer: MessageWriter::new(&plan),
            share,
            targets,
            next_target: 0,
            sources,
            devices: Vec::with_capacity(own as usize),
            own,
            outstanding: Outstanding::default(),
            waiting: HashMap::new(),
            calendar: None,
            kinds,
            flow_kinds,
            attempts: VecDeque::new(),
            retries: VecDeque::new(),
            connecting: 0,
            open: 0,
            stage: Stage::Setup,
            start: now,
            send_from: Instant::MAX,
            drain_until: Instant::MAX,
            closed: 0,
            think_time: Duration::ZERO,
            stats,
            live: ProgressSnapshot::default(),
            progress,
            plan,
        }
    }

    /// Returns the current stage. The wait is [`Stage::WarmUp`].
    pub const fn stage(&self) -> Stage {
        self.stage
    }

    /// Returns when the next new connection is due.
    fn next_opening(&self) -> Instant {
        let opened = self.devices.len() as u32;
        if opened >= self.own || self.stage != Stage::Setup {
            return Instant::MAX;
        }
        self.start + self.plan.setup.mul_f64(f64::from(opened) / f64::from(self.own))
    }

    /// Opens the connections that are due.
    fn open_connections(&mut self, now: Instant, net: &mut impl Network) {
        // Attempts that fail at once do not count as connecting.
        for _ in 0..STEPS_PER_POLL {
            if self.connecting >= CONNECTS_MAX || self.next_opening() > now {
                break;
            }
            self.devices.push(Device {
                last: NONE,
                received: 0,
                state: DeviceState::Closed,
                is_error: false,
            });
            self.connect(self.devices.len() as u32 - 1, now, net);
        }
        for _ in 0..STEPS_PER_POLL {
            if self.connecting >= CONNECTS_MAX {
                break;
            }
            let Some((_, slot)) = self.retries.front().copied().filter(|(at, _)| *at <= now) else { break };
            self.retries.pop_front();
            if self.stage < Stage::Drain {
                self.connect(slot, now, net);
            }
        }
    }

    fn connect(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let target = self.targets[self.next_target];
        self.next_target = (self.next_target + 1) % self.targets.len();
        match net.connect(slot, target, self.sources.next_address()) {
            Ok(()) => {
                self.devices[slot as usize].state = DeviceState::Connecting;
                self.connecting += 1;
                self.attempts.push_back((now + self.plan.timeout, slot));
            }
            Err(failure) => self.count_failure(slot, failure, now),
        }
    }

    /// Ends connection attempts that take too long, and forgets those that have ended.
    fn expire_attempts(&mut self, now: Instant, net: &mut impl Network) {
        while let Some((deadline, slot)) = self.attempts.front().copied() {
            let is_connecting = self.devices[slot as usize].state == DeviceState::Connecting;
            if is_connecting && deadline > now {
                break;
            }
            self.attempts.pop_front();
            // An attempt that began later has a deadline of its own.
            if is_connecting && !self.attempts.iter().any(|(_, other)| *other == slot) {
                net.abort(slot);
                self.close_device(slot);
                self.count_failure(slot, Failure::ConnectTimeout, now);
            }
        }
    }

    fn count_failure(&mut self, slot: u32, failure: Failure, now: Instant) {
        self.stats.counters.failures[failure as usize] += 1;
        self.live.failed += 1;
        self.retries.push_back((now + RETRY, slot));
    }

    /// Makes a connection closed, and counts what waited on it.
    fn close_device(&mut self, slot: u32) {
        let counters = &mut self.stats.counters;
        let device = &mut self.devices[slot as usize];
        match device.state {
            DeviceState::Closed => return,
            DeviceState::Connecting => self.connecting -= 1,
            DeviceState::Open => self.open -= 1,
        }
        (device.state, device.received, device.is_error) = (DeviceState::Closed, 0, false);
        let counts = if self.stage < Stage::Done { &mut counters.lost } else { &mut counters.unanswered };
        while let Some(message) = self.outstanding.pop(&mut device.last) {
            counts[message.kind as usize] += 1;
        }
        if let Some(waiting) = self.waiting.remove(&slot) {
            counters.not_sent_closed += waiting.messages.len() as u64;
        }
    }

    /// Handles the end of an open connection that the network has closed, or is told to close.
    fn lose(&mut self, slot: u32, failure: Failure, now: Instant) {
        let was_open = self.devices[slot as usize].state == DeviceState::Open;
        self.close_device(slot);
        if self.stage < Stage::Done {
            self.stats.counters.connections_lost += u64::from(was_open);
            self.count_failure(slot, failure, now);
        }
    }

    /// Sends the messages that are due, up to a number that keeps the worker responsive.
    fn send_due(&mut self, now: Instant, net: &mut impl Network) {
        for _ in 0..STEPS_PER_POLL {
            let Some(calendar) = &mut self.calendar else { return };
            let Some(due) = calendar.next().filter(|next| next.at <= now) else { return };
            calendar.advance();
            self.begin_message(due, now, net);
        }
    }

    fn begin_message(&mut self, due: DueMessage, now: Instant, net: &mut impl Network) {
        let DueMessage { at, connection: slot, counter } = due;
        // Drawn in any case, so that a message's kind does not depend on the network.
        let kind = match self.plan.grain {
            PriorityGrain::Message => self.kinds.draw(),
            PriorityGrain::Flow => self.flow_kinds[slot as usize],
        };
        self.stats.counters.due[kind as usize] += 1;
        self.stats.due_for = at - self.send_from;
        let is_open = self.devices.get(slot as usize).is_some_and(|d| d.state == DeviceState::Open);
        if !is_open {
            self.stats.counters.not_sent_closed += 1;
            return;
        }
        let message = DeviceMessage { intended: at, counter, kind };
        if !self.waiting.is_empty()
            && let Some(waiting) = self.waiting.get_mut(&slot)
        {
            if waiting.messages.len() < WAITING_MAX {
                waiting.messages.push_back(message);
            } else {
                self.stats.counters.not_sent_full += 1;
            }
            return;
        }
        let offset = self.send(slot, message, 0, now, net);
        if let Some(offset) = offset {
            self.waiting.insert(slot, Waiting { messages: [message].into(), offset });
        }
    }

    /// Sends a message from byte `offset` on. Returns the next offset if the network did not accept all.
    fn send(
        &mut self,
        slot: u32,
        message: DeviceMessage,
        offset: usize,
        now: Instant,
        net: &mut impl Network,
    ) -> Option<usize> {
        let global = self.global(slot);
        let bytes = &self.writer.write(global, message.counter, message.kind)[offset..];
        let accepted = net.send(slot, bytes);
        if accepted < bytes.len() {
            return Some(offset + accepted);
        }
        self.stats.send_error.record(message.intended, now);
        self.stats.counters.sent[message.kind as usize] += 1;
        self.stats.sending = self.stats.sending.max(now.saturating_since(self.send_from));
        self.live.sent += 1;
        if message.kind != Kind::Heartbeat || self.plan.service == Service::Echo {
            self.outstanding.push(&mut self.devices[slot as usize].last, message);
        }
        None
    }

    /// Returns the number of a connection among those of all workers.
    const fn global(&self, slot: u32) -> u32 {
        slot * self.share.workers + self.share.worker
    }

    /// Reads the next answer of a connection from `bytes`.
    fn read(&mut self, slot: u32, bytes: &[u8]) -> AnswerPart {
        let global = self.global(slot);
        let device = &mut self.devices[slot as usize];
        let Some(message) = self.outstanding.first(device.last) else { return AnswerPart::Wrong };
        match self.plan.service {
            Service::Iot => read_iot(&mut device.received, &mut device.is_error, bytes),
            Service::Echo => {
                let expected = self.writer.write(global, message.counter, message.kind);
                read_echo(&mut device.received, bytes, expected)
            }
        }
    }

    fn count_answer(&mut self, slot: u32, is_error: bool, now: Instant) {
        let device = &mut self.devices[slot as usize];
        device.is_error = false;
        let counters = &mut self.stats.counters;
        if self.plan.service == Service::Iot && self.outstanding.is_mixed(device.last) {
            counters.answers_ambiguous += 1;
        }
        let Some(message) = self.outstanding.pop(&mut device.last) else { return };
        counters.answered[message.kind as usize] += 1;
        counters.answered_error += u64::from(is_error);
        let latency = if message.kind == Kind::High { &mut self.stats.high } else { &mut self.stats.low };
        latency.record(message.intended, now);
        self.live.completed += 1;
        self.think_time += self.plan.think_time;
    }

    fn change_stage(&mut self, now: Instant) {
        if self.stage == Stage::Setup {
            let is_complete = self.open == self.own && now >= self.start + self.plan.setup;
            if is_complete || now >= self.start + self.plan.setup + self.plan.timeout {
                self.end_setup(now);
            }
        }
        if self.stage == Stage::WarmUp && now >= self.send_from {
            self.stage = Stage::Measure;
            self.calendar = Some(Calendar::new(&self.plan, self.share, self.send_from));
        }
        let is_sent = self.calendar.as_ref().is_some_and(|calendar| calendar.left() == 0);
        if self.stage == Stage::Measure && is_sent {
            self.begin_drain(now, now + self.plan.timeout);
        }
        if self.stage == Stage::Drain {
            let is_drained = self.outstanding.is_empty() && self.waiting.is_empty();
            if is_drained || now >= self.drain_until {
                self.stage = Stage::Done;
            }
        }
    }

    fn end_setup(&mut self, now: Instant) {
        self.stage = Stage::WarmUp;
        self.stats.setup = now.saturating_since(self.start);
        self.stats.counters.open_at_start = self.open.into();
        let planned = self.start + self.plan.setup;
        // With all connections established in time, sending begins at the planned time on all workers.
        let is_late = now.saturating_since(planned) >= TICK;
        self.send_from = (if is_late { now } else { planned } + self.plan.wait).max(now);
    }

    fn begin_drain(&mut self, now: Instant, until: Instant) {
        self.stage = Stage::Drain;
        self.drain_until = until;
        self.stats.counters.open_at_end = self.open.into();
        self.calendar = None;
        self.stats.sending = self.stats.sending.max(now.saturating_since(self.send_from));
    }

    /// Closes connections after the run. Returns true when all are closed.
    fn close_connections(&mut self, net: &mut impl Network) -> bool {
        for _ in 0..STEPS_PER_POLL {
            let Some(device) = self.devices.get(self.closed as usize) else { return true };
            match device.state {
                DeviceState::Closed => {}
                DeviceState::Open if device.last == NONE && !self.waiting.contains_key(&self.closed) => {
                    net.close(self.closed);
                }
                DeviceState::Open | DeviceState::Connecting => net.abort(self.closed),
            }
            self.close_device(self.closed);
            self.closed += 1;
        }
        false
    }

    fn publish(&mut self) {
        self.live.open = self.open.into();
        self.live.stage = self.stage as u64;
        self.progress.publish(&self.live);
    }

    fn next_poll(&self, now: Instant) -> Instant {
        let mut at = now + TICK;
        // An attempt that is overdue waits for other attempts to end.
        if self.connecting < CONNECTS_MAX && self.stage < Stage::Drain {
            at = at.min(self.next_opening());
            if let Some((retry, _)) = self.retries.front() {
                at = at.min(*retry);
            }
        }
        if let Some((deadline, _)) = self.attempts.front() {
            at = at.min(*deadline);
        }
        at = match self.stage {
            Stage::Setup if now < self.start + self.plan.setup => at.min(self.start + self.plan.setup),
            Stage::Drain => at.min(self.drain_until),
            _ => at,
        };
        self.next_arrival().map_or(at, |due| at.min(due)).max(now)
    }
}

impl LoadSession for MessageSession {
    type Stats = MessageStats;

    fn connected(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let device = &mut self.devices[slot as usize];
        if device.state != DeviceState::Connecting {
            return;
        }
        device.state = DeviceState::Open;
        self.connecting -= 1;
        self.open += 1;
        self.live.connected += 1;
        if self.stage == Stage::Setup {
            let due = self.plan.setup.mul_f64(f64::from(slot) / f64::from(self.own));
            self.stats.connect.record(self.start + due, now);
            self.open_connections(now, net);
        }
    }

    fn writable(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let Some(mut waiting) = self.waiting.remove(&slot) else { return };
        while let Some(message) = waiting.messages.front().copied() {
            match self.send(slot, message, waiting.offset, now, net) {
                None => {
                    waiting.messages.pop_front();
                    waiting.offset = 0;
                }
                Some(offset) => {
                    waiting.offset = offset;
                    self.waiting.insert(slot, waiting);
                    return;
                }
            }
        }
    }

    fn data(&mut self, slot: u32, mut bytes: &[u8], now: Instant, net: &mut impl Network) {
        self.live.bytes += bytes.len() as u64;
        self.stats.counters.bytes += bytes.len() as u64;
        while !bytes.is_empty() && self.devices[slot as usize].state == DeviceState::Open {
            match self.read(slot, bytes) {
                AnswerPart::More => return,
                AnswerPart::Complete { used, is_error } => {
                    bytes = &bytes[used..];
                    self.count_answer(slot, is_error, now);
                }
                AnswerPart::Wrong => {
                    net.abort(slot);
                    return self.lose(slot, Failure::BadResponse, now);
                }
            }
        }
    }

    fn peer_closed(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        if self.devices[slot as usize].state == DeviceState::Open {
            net.close(slot);
            self.lose(slot, Failure::ClosedEarly, now);
        }
    }

    fn ended(&mut self, slot: u32, failure: Failure, now: Instant, _: &mut impl Network) {
        if self.devices[slot as usize].state != DeviceState::Closed {
            self.lose(slot, failure, now);
        }
    }

    fn poll(&mut self, now: Instant, net: &mut impl Network) -> Option<Instant> {
        self.change_stage(now);
        if self.stage < Stage::Drain {
            self.open_connections(now, net);
        }
        self.expire_attempts(now, net);
        self.send_due(now, net);
        self.change_stage(now);
        self.publish();
        if self.stage < Stage::Done {
            return Some(self.next_poll(now));
        }
        (!self.close_connections(net)).then_some(now)
    }

    fn next_arrival(&self) -> Option<Instant> {
        match self.stage {
            Stage::WarmUp => Some(self.send_from),
            // The last connection that is established ends the set-up.
            Stage::Setup if self.open == self.own => Some(self.start + self.plan.setup),
            _ => self.calendar.as_ref().and_then(Calendar::next).map(|next| next.at),
        }
    }

    fn interrupt(&mut self, now: Instant) {
        if self.stage < Stage::Drain {
            if self.stage == Stage::Setup {
                self.end_setup(now);
            }
            self.stats.is_interrupted = true;
            self.begin_drain(now, now);
        }
        self.drain_until = now;
    }

    fn is_measuring(&self) -> bool {
        self.stage == Stage::Measure
    }

    fn stats(&self) -> &MessageStats {
        &self.stats
    }

    fn take_think_time(&mut self) -> Duration {
        core::mem::take(&mut self.think_time)
    }
}
