//! The session against a simulated server, in simulated time.

use super::plan::{Gaps, Kind, OnOff, PriorityGrain, Service};
use super::session::MessageSession;
use super::*;
use crate::iot::message::{ANSWER_ERROR, ANSWER_OK};
use crate::load::plan::WorkerShare;
use crate::load::run::{LoadSession, WorkerStats};
use crate::load::session::{Network, Stage};
use crate::load::sources::Sources;
use crate::load::stats::Failure;
use core::net::IpAddr;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const MS: u64 = 1_000_000;

/// A plan of 100 connections that send a request each second for 10 s.
pub(super) fn plan() -> MessagePlan {
    MessagePlan {
        service: Service::Iot,
        connections: 100,
        burst: 1,
        epoch: Duration::from_secs(1),
        messages: 1_000,
        high_share: 1.0,
        low_share: 0.0,
        grain: PriorityGrain::Message,
        gaps: Gaps::Fixed,
        on_off: None,
        length_bytes: (200, 200),
        setup: Duration::from_secs(1),
        wait: Duration::from_secs(1),
        timeout: Duration::from_secs(10),
        think_time: Duration::ZERO,
        seed: 1,
    }
}

/// A simulated server and the network to it.
#[derive(Clone)]
struct Server {
    /// One-way delay in nanoseconds.
    delay: u64,
    /// Start and end, in nanoseconds, of a stall during which the server answers nothing.
    stall: (u64, u64),
    /// Time in nanoseconds that the server needs for each message. It serves one at a time.
    service: u64,
    /// Bytes that are delivered at a time.
    piece: usize,
    /// Bytes that all sends together accept in a millisecond.
    room: usize,
    /// Connection attempts that are refused, counted from 0.
    refused: core::ops::Range<u32>,
    /// Closes or resets a connection instead of receiving this message (of all).
    closes_at: Option<u64>,
    resets_at: Option<u64>,
    /// Answers that are errors: every n-th.
    errors_each: u64,
    /// Flips a bit of this answer (of all).
    corrupts: Option<u64>,
    is_mute: bool,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            delay: MS,
            stall: (0, 0),
            service: 0,
            piece: usize::MAX,
            room: usize::MAX,
            refused: 0..0,
            closes_at: None,
            resets_at: None,
            errors_each: u64::MAX,
            corrupts: None,
            is_mute: false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Connected,
    Refused,
    Data(Vec<u8>),
    Closed,
    Reset,
    Writable,
}

/// Time, order of scheduling, slot, connection and event; the earliest first.
type ScheduledEvent = Reverse<(u64, u64, u32, u32, Event)>;

struct SimulatedNetwork {
    plan: MessagePlan,
    server: Server,
    now: u64,
    events: BinaryHeap<ScheduledEvent>,
    order: u64,
    /// Number of each slot's connection.
    connections: Vec<Option<u32>>,
    attempts: u32,
    /// Times of attempts.
    attempted_at: Vec<u64>,
    received: Vec<Vec<u8>>,
    /// Time and slot of each message.
    messages: Vec<(u64, u32)>,
    heads: Vec<[u8; 7]>,
    answers: u64,
    busy_until: u64,
    room: (u64, usize),
    closed: u32,
    aborted: u32,
}

impl SimulatedNetwork {
    fn new(plan: &MessagePlan, server: Server) -> Self {
        Self {
            plan: plan.clone(),
            server,
            now: 0,
            events: BinaryHeap::new(),
            order: 0,
            connections: Vec::new(),
            attempts: 0,
            attempted_at: Vec::new(),
            received: Vec::new(),
            messages: Vec::new(),
            heads: Vec::new(),
            answers: 0,
            busy_until: 0,
            room: (0, 0),
            closed: 0,
            aborted: 0,
        }
    }

    fn schedule(&mut self, at: u64, slot: u32, event: Event) {
        let connection = self.connections[slot as usize].unwrap();
        self.order += 1;
        self.events.push(Reverse((at, self.order, slot, connection, event)));
    }

    /// Returns when a message that is sent now has been served.
    fn served_at(&mut self) -> u64 {
        let arrival = self.now + self.server.delay;
        let start = arrival.max(self.busy_until);
        let (from, to) = self.server.stall;
        let start = if start >= from && start < to { to } else { start };
        self.busy_until = start + self.server.service;
        self.busy_until
    }

    /// Serves a complete message.
    fn serve(&mut self, slot: u32, message: &[u8]) {
        let number = self.messages.len() as u64;
        self.messages.push((self.now, slot));
        self.heads.push(*message.first_chunk().unwrap());
        let at = self.served_at() + self.server.delay;
        if self.server.closes_at == Some(number) {
            return self.schedule(at, slot, Event::Closed);
        }
        if self.server.resets_at == Some(number) {
            return self.schedule(at, slot, Event::Reset);
        }
        if self.server.is_mute || (self.plan.service == Service::Iot && message[5] == 0) {
            return;
        }
        self.answers += 1;
        let mut answer = match self.plan.service {
            Service::Echo => message.to_vec(),
            Service::Iot if self.answers.is_multiple_of(self.server.errors_each) => ANSWER_ERROR.to_vec(),
            Service::Iot => ANSWER_OK.to_vec(),
        };
        if self.server.corrupts == Some(self.answers) {
            answer[20] ^= 1;
        }
        for piece in answer.chunks(self.server.piece.min(answer.len())) {
            self.schedule(at, slot, Event::Data(piece.to_vec()));
        }
    }
}

impl Network for SimulatedNetwork {
    fn connect(&mut self, slot: u32, _: SocketAddr, _: Option<IpAddr>) -> Result<(), Failure> {
        let len = self.connections.len().max(slot as usize + 1);
        self.connections.resize(len, None);
        self.received.resize(len, Vec::new());
        assert_eq!(self.connections[slot as usize], None, "the slot is in use");
        self.connections[slot as usize] = Some(self.attempts);
        self.received[slot as usize].clear();
        let event =
            if self.server.refused.contains(&self.attempts) { Event::Refused } else { Event::Connected };
        self.attempts += 1;
        self.attempted_at.push(self.now);
        self.schedule(self.now + 2 * self.server.delay, slot, event);
        Ok(())
    }

    fn send(&mut self, slot: u32, bytes: &[u8]) -> usize {
        assert!(!bytes.is_empty());
        if self.room.0 != self.now / MS {
            self.room = (self.now / MS, self.server.room);
        }
        let accepted = bytes.len().min(self.room.1);
        self.room.1 -= accepted;
        if accepted < bytes.len() {
            self.schedule((self.now / MS + 1) * MS, slot, Event::Writable);
        }
        let mut received = core::mem::take(&mut self.received[slot as usize]);
        received.extend_from_slice(&bytes[..accepted]);
        // An echo needs no boundaries of messages.
        let len = match self.plan.service {
            Service::Iot => usize::from(self.plan.length_bytes.0),
            Service::Echo => received.len().max(8),
        };
        while received.len() >= len && len > 0 {
            let message: Vec<u8> = received.drain(..len).collect();
            self.serve(slot, &message);
        }
        self.received[slot as usize] = received;
        accepted
    }

    fn close(&mut self, slot: u32) {
        assert!(self.connections[slot as usize].take().is_some());
        self.closed += 1;
    }

    fn abort(&mut self, slot: u32) {
        assert!(self.connections[slot as usize].take().is_some());
        self.aborted += 1;
    }
}

/// The end of a run.
struct Ended {
    session: MessageSession,
    net: SimulatedNetwork,
}

impl Ended {
    fn stats(&self) -> &MessageStats {
        self.session.stats()
    }

    fn report(&self) -> MessageReport {
        let plan = Arc::new(self.net.plan.clone());
        let seconds = plan.messages as f64 / f64::from(plan.connections) * plan.epoch.as_secs_f64();
        let line = crate::load::options::tests::job("http://10.0.0.1/");
        let job = MessageJob {
            plan,
            duration: Duration::from_secs_f64(seconds),
            mode: SendMode::Normal,
            targets: line.targets,
            server: "10.0.0.1".into(),
            report_interval: Duration::from_secs(1),
            common: line.common,
            agents: 1,
            agent: 0,
            start: None,
        };
        job.report(self.stats())
    }
}

fn run_until(plan: &MessagePlan, share: WorkerShare, server: Server, interrupt_at: Option<u64>) -> Ended {
    let (target, sources) = ("10.0.0.1:80".parse().unwrap(), Sources::new(&[], 0, 1));
    let progress = Arc::new(LiveProgress::default());
    let shared = Arc::new(plan.clone());
    let mut session =
        MessageSession::new(shared, share, vec![target], sources, Arc::clone(&progress), Instant::ZERO);
    let mut net = SimulatedNetwork::new(plan, server);
    let mut interrupt_at = interrupt_at;
    let mut turns = 0u64;
    while let Some(next) = session.poll(Instant::from_nanos(net.now), &mut net) {
        turns += 1;
        assert!(turns < 5_000_000, "the run does not end");
        let event = net.events.peek().map_or(u64::MAX, |Reverse((at, ..))| *at);
        let arrival = session.next_arrival().map_or(u64::MAX, Instant::as_nanos);
        let stop = interrupt_at.unwrap_or(u64::MAX);
        net.now = event.min(next.as_nanos()).min(arrival).min(stop).max(net.now);
        if net.now >= stop {
            interrupt_at = None;
            session.interrupt(Instant::from_nanos(net.now));
        }
        while net.events.peek().is_some_and(|Reverse((at, ..))| *at <= net.now) {
            let Some(Reverse((_, _, slot, connection, event))) = net.events.pop() else { break };
            if net.connections[slot as usize] == Some(connection) {
                deliver(&mut session, &mut net, slot, event);
            }
        }
    }
    assert_eq!(session.stage(), Stage::Done);
    assert!(net.connections.iter().all(Option::is_none), "a connection was left open");
    Ended { session, net }
}

fn deliver(session: &mut MessageSession, net: &mut SimulatedNetwork, slot: u32, event: Event) {
    let now = Instant::from_nanos(net.now);
    match event {
        Event::Connected => session.connected(slot, now, net),
        Event::Data(bytes) => session.data(slot, &bytes, now, net),
        Event::Closed => session.peer_closed(slot, now, net),
        Event::Writable => session.writable(slot, now, net),
        Event::Refused | Event::Reset => {
            net.connections[slot as usize] = None;
            let failure = if event == Event::Reset { Failure::Reset } else { Failure::Refused };
            session.ended(slot, failure, now, net);
        }
    }
}

fn run(plan: &MessagePlan, server: Server) -> Ended {
    let ended = run_until(plan, WorkerShare::WHOLE, server, None);
    let report = ended.report();
    assert!(report.messages.is_complete, "{report}");
    ended
}

fn at(latency: &crate::load::latency::Latency, quantile: f64) -> u64 {
    latency.histogram().value_at_quantile(quantile)
}

fn is_near(value: u64, expected: u64) -> bool {
    value.abs_diff(expected) <= expected / 100
}

#[test]
fn messages_are_sent_exactly_when_due() {
    for (burst, together) in [(1, 1), (10, 10)] {
        let ended = run(&MessagePlan { burst, ..plan() }, Server::default());
        assert_eq!(ended.net.messages.len(), 1_000);
        for (n, (at, slot)) in (0u64..).zip(&ended.net.messages) {
            // After one second of set-up and one of wait.
            assert_eq!(*at, 2_000 * MS + n / together * together * 10 * MS, "{n}");
            assert_eq!(u64::from(*slot), n % 100);
        }
        assert_eq!(at(&ended.stats().send_error, 1.0), 0);
        assert!(is_near(at(&ended.stats().high, 1.0), 2 * MS));
        assert_eq!(ended.report().missed, [""; 0]);
        assert!(ended.report().warnings.is_empty(), "{}", ended.report());
    }
}

#[test]
fn connections_open_evenly_over_the_setup_time() {
    let ended = run(&plan(), Server::default());
    let expected: Vec<u64> = (0..100).map(|n| n * 10 * MS).collect();
    assert_eq!(ended.net.attempted_at, expected);
    assert_eq!((ended.net.closed, ended.net.aborted), (100, 0));
    let c = ended.stats().counters;
    assert_eq!((c.connections, c.open_at_start, c.open_at_end, c.connections_lost), (100, 100, 100, 0));
}

#[test]
fn shares_of_all_messages_are_exact() {
    for (connections, messages, high, low) in
        [(100, 12_345, 0.05, 0.0), (7, 999, 0.333, 0.5), (1_000, 20_001, 0.0, 0.0), (3, 7, 0.5, 0.5)]
    {
        let plan = MessagePlan { connections, messages, high_share: high, low_share: low, ..plan() };
        let ended = run(&plan, Server::default());
        let sent = ended.stats().counters.sent;
        assert_eq!(sent.iter().sum::<u64>(), messages);
        assert_eq!(sent[Kind::High as usize], (messages as f64 * high).round() as u64);
        let urgent = ended.net.heads.iter().filter(|head| head[5] == 1 && head[6] == 2).count() as u64;
        let requests = ended.net.heads.iter().filter(|head| head[5] == 1).count() as u64;
        assert_eq!((urgent, requests - urgent), (sent[2], sent[1]));
        assert_eq!(ended.stats().counters.answered, [0, sent[1], sent[2]]);
    }
}

#[test]
fn a_flow_keeps_its_priority() {
    let plan = MessagePlan { high_share: 0.2, grain: PriorityGrain::Flow, ..plan() };
    let ended = run(&plan, Server::default());
    let mut labels = [None; 100];
    for ((_, slot), head) in ended.net.messages.iter().zip(&ended.net.heads) {
        assert_eq!(*labels[*slot as usize].get_or_insert(head[6]), head[6]);
    }
    assert_eq!(labels.iter().filter(|label| **label == Some(2)).count(), 20);
    assert_eq!(ended.stats().counters.sent[Kind::High as usize], 200);
}

#[test]
fn workers_send_one_plan_together() {
    let plan = MessagePlan { connections: 101, burst: 7, messages: 777, high_share: 0.37, ..plan() };
    let mut total = MessageStats::default();
    let mut times = Vec::new();
    for worker in 0..3 {
        let ended = run_until(&plan, WorkerShare { worker, workers: 3 }, Server::default(), None);
        total.add(ended.stats());
        times.extend(ended.net.messages.iter().map(|(at, _)| *at));
    }
    let sent = total.counters.sent;
    assert_eq!((sent.iter().sum::<u64>(), sent[2]), (777, (777.0f64 * 0.37).round() as u64));
    let whole = run(&plan, Server::default());
    times.sort_unstable();
    assert_eq!(times, whole.net.messages.iter().map(|(at, _)| *at).collect::<Vec<_>>());
}

#[test]
fn a_stall_of_the_server_shows_in_p99() {
    // 1 s of 10 s: 10 % of the requests were due during the stall and waited for up to 1 s.
    let server = Server { stall: (5_000 * MS, 6_000 * MS), ..Server::default() };
    let plan = MessagePlan { connections: 1_000, messages: 10_000, ..plan() };
    let ended = run(&plan, server);
    let high = &ended.stats().high;
    assert!(is_near(at(high, 1.0), 1_002 * MS), "{}", at(high, 1.0));
    assert!(at(high, 0.99) > 850 * MS && at(high, 0.95) > 450 * MS && at(high, 0.89) < 3 * MS);
    assert_eq!(ended.stats().counters.answered[2], 10_000);
    assert_eq!(at(&ended.stats().send_error, 1.0), 0, "the generator sent in time");
}

#[test]
fn pipelined_answers_in_pieces_are_matched() {
    // Ten messages a second on each connection, and the server is 1.5 s behind.
    let base = MessagePlan {
        connections: 10,
        epoch: Duration::from_millis(100),
        messages: 500,
        high_share: 0.5,
        low_share: 0.5,
        ..plan()
    };
    for (service, piece) in [(Service::Iot, 1), (Service::Iot, 100), (Service::Echo, 3), (Service::Echo, 999)]
    {
        let plan = MessagePlan { service, ..base.clone() };
        let server = Server { piece, stall: (2_000 * MS, 3_500 * MS), errors_each: 5, ..Server::default() };
        let ended = run(&plan, server);
        let c = ended.stats().counters;
        assert_eq!(c.answered.iter().sum::<u64>(), 500, "{service:?}");
        assert_eq!(c.answered_error, if service == Service::Iot { 100 } else { 0 });
        assert_eq!(c.answers_ambiguous > 0, service == Service::Iot);
        assert!(is_near(at(&ended.stats().low, 1.0).max(at(&ended.stats().high, 1.0)), 1_501 * MS));
    }
}

#[test]
fn echoes_of_random_lengths_are_compared() {
    let plan = MessagePlan { service: Service::Echo, length_bytes: (8, 3_000), low_share: 0.0, ..plan() };
    let ended = run(&plan, Server { piece: 700, ..Server::default() });
    assert_eq!(ended.stats().counters.answered.iter().sum::<u64>(), 1_000);
    assert!(ended.stats().counters.bytes > 1_000_000);
    let ended = run(
        &MessagePlan { length_bytes: (100, 100), ..plan },
        Server { corrupts: Some(500), ..Server::default() },
    );
    let c = ended.stats().counters;
    assert_eq!((c.failures[Failure::BadResponse as usize], c.lost[2]), (1, 1));
    assert_eq!(c.answered[2] + c.not_sent_closed, 999);
}

#[test]
fn lost_connections_are_counted_and_opened_again() {
    for (closes_at, resets_at, failure) in
        [(Some(250), None, Failure::ClosedEarly), (None, Some(250), Failure::Reset)]
    {
        let ended = run(&plan(), Server { closes_at, resets_at, ..Server::default() });
        let c = ended.stats().counters;
        assert_eq!((c.failures[failure as usize], c.connections_lost, c.lost[2]), (1, 1, 1));
        // The connection was closed for a little more than a second, in which one message was due.
        assert_eq!((c.not_sent_closed, c.open_at_end, ended.net.attempts), (1, 100, 101));
        assert_eq!(c.answered[2], 998);
    }
}

#[test]
fn refused_connections_are_tried_again_within_the_setup() {
    let ended = run(&plan(), Server { refused: 0..20, ..Server::default() });
    let c = ended.stats().counters;
    assert_eq!((c.failures[Failure::Refused as usize], c.open_at_start), (20, 100));
    assert_eq!(c.answered[2], 1_000);
    let ended = run(&plan(), Server { refused: 0..u32::MAX, ..Server::default() });
    let report = ended.report();
    assert_eq!((report.achieved.connections, report.messages.not_sent_closed), (0, 1_000));
    assert_eq!(report.missed[0], "0 of 100 connections were open when the first message was due");
    assert!(report.missed.iter().any(|m| m == "0.0 of 100.0 messages/s were achieved"), "{report}");
}

#[test]
fn a_mute_server_leaves_requests_unanswered() {
    let ended =
        run(&MessagePlan { high_share: 0.3, ..plan() }, Server { is_mute: true, ..Server::default() });
    let report = ended.report();
    assert_eq!((report.messages.unanswered, report.messages.heartbeats), (300, 700));
    assert_eq!(report.missed, ["no request was answered"]);
    assert!(report.warnings[0].starts_with("300 requests were not answered"), "{report}");
    assert_eq!(ended.net.aborted as usize + ended.net.closed as usize, 100);
}

// limit: messages that wait on a connection of the generator
#[test]
fn a_full_connection_delays_its_messages() {
    // 60 bytes per millisecond carry 300 of 1,000 messages a second.
    let plan = MessagePlan { epoch: Duration::from_millis(100), connections: 100, messages: 1_000, ..plan() };
    let ended = run(&plan, Server { room: 60, ..Server::default() });
    let c = ended.stats().counters;
    assert_eq!((c.sent[2], c.answered[2], c.not_sent_full), (1_000, 1_000, 0));
    assert!(at(&ended.stats().send_error, 1.0) > 2_000 * MS);
    assert!(ended.report().missed[0].contains("messages/s were achieved"), "{}", ended.report());

    let plan = MessagePlan { connections: 1, epoch: Duration::from_millis(1), messages: 3_000, ..plan };
    let ended = run(&plan, Server { room: 20, ..Server::default() });
    let report = ended.report();
    // One message in ten was sent while messages were due, and 1,024 waited then.
    assert!(report.messages.not_sent_full.abs_diff(3_000 - 300 - 1_024) < 5, "{report}");
    assert_eq!(report.messages.sent + report.messages.not_sent_full, 3_000 - report.messages.not_sent_closed);
}

#[test]
fn an_overloaded_server_shows_its_queue() {
    // The server needs 12 ms for each message, and one is due every 10 ms.
    let ended = run(&plan(), Server { service: 12 * MS, ..Server::default() });
    assert!(is_near(at(&ended.stats().high, 1.0), 2_012 * MS), "{}", at(&ended.stats().high, 1.0));
    assert_eq!(ended.stats().counters.answered[2], 1_000);
}

#[test]
fn random_gaps_and_periods_keep_the_count() {
    let on_off = OnOff { on: Duration::from_millis(100), off: Duration::from_millis(400) };
    for (gaps, on_off) in [(Gaps::Poisson, None), (Gaps::Uniform, None), (Gaps::Fixed, Some(on_off))] {
        let ended = run(&MessagePlan { gaps, on_off, ..plan() }, Server::default());
        assert_eq!(ended.stats().counters.answered[2], 1_000, "{gaps:?}");
        assert_eq!(at(&ended.stats().send_error, 1.0), 0);
        assert_eq!(ended.report().missed, [""; 0], "{gaps:?}");
    }
}

#[test]
fn an_interrupted_run_is_accounted_for() {
    for stop in [0, 500 * MS, 1_500 * MS, 4_000 * MS, 12_500 * MS] {
        let ended = run_until(&plan(), WorkerShare::WHOLE, Server::default(), Some(stop));
        let report = ended.report();
        assert!(report.messages.is_complete, "{report}");
        assert_eq!(report.messages.due, (stop.saturating_sub(2_000 * MS) / (10 * MS)).min(1_000));
    }
}

#[test]
fn answers_cost_think_time() {
    let mut plan = plan();
    plan.think_time = Duration::from_micros(3);
    let mut ended = run(&plan, Server::default());
    assert_eq!(ended.session.take_think_time(), Duration::from_millis(3));
    assert_eq!(ended.session.take_think_time(), Duration::ZERO);
}

#[test]
fn the_report_names_everything_once() {
    let plan = MessagePlan { high_share: 0.05, low_share: 0.1, ..plan() };
    let report = run(&plan, Server::default()).report();
    let text = report.to_string();
    for part in [
        "100 connections, 100.0 messages/s of 200 bytes in bursts of 1 (normal, fixed gaps)",
        "sent                      1000 = 150 answered + 850 heartbeats + 0 unanswered",
        "high requests               50 = 50 answered + 0 unanswered",
        "low  requests              100 = 100 answered + 0 unanswered",
        "send error",
    ] {
        assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
    assert_eq!(json["messages"]["high"]["answered"], 50);
    assert_eq!(json["latency_ns"]["high"]["count"], 50);
    assert_eq!(json["requested"]["messages_per_second"], 100.0);
    assert_eq!(json["missed"].as_array().unwrap().len(), 0);
    assert_eq!(report.to_svg().matches("<polyline").count(), 3);
}
