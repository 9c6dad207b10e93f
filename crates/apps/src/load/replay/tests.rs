//! The session against a simulated server, in simulated time.

use super::options::ReplayTarget;
use super::recording::{RecordedConnection, RecordedEnd, RecordedRequest, RecordedSend};
use super::*;
use crate::load::run::LoadSession;
use crate::load::session::Network;
use crate::load::sources::Sources;
use crate::load::stats::Failure;
use core::net::IpAddr;
use std::collections::BTreeMap;

const MS: u64 = 1_000_000;

/// Returns a recording of connections, each with requests: time in milliseconds, bytes of the request, bytes
/// of the answer.
fn recording(connections: &[&[(u64, u32, u64)]]) -> Recording {
    let mut out = Recording::default();
    for requests in connections {
        let (first_send, first_request) = (out.sends.len() as u32, out.requests.len() as u32);
        let mut answers = 0;
        for (at, len, answer) in *requests {
            let send = out.sends.len() as u32;
            out.sends.push(RecordedSend { at_ns: at * MS, start: out.bytes.len(), len: *len });
            out.bytes.extend((0..*len).map(|byte| byte as u8));
            out.requests.push(RecordedRequest {
                first_send: send,
                last_send: send,
                answer_from: answers,
                answer_bytes: *answer,
            });
            answers += answer;
        }
        let last = requests.last().map_or(0, |(at, ..)| *at) + 10;
        out.connections.push(RecordedConnection {
            opened_ns: 0,
            server_port: 80,
            sends: first_send..out.sends.len() as u32,
            requests: first_request..out.requests.len() as u32,
            answer_bytes: answers,
            ended_ns: last * MS,
            end: RecordedEnd::Fin,
        });
        out.length_ns = out.length_ns.max(last * MS);
    }
    out
}

fn plan(recording: Recording) -> ReplayPlan {
    let (spread, timeout) = (Duration::ZERO, Duration::from_secs(1));
    ReplayPlan { recording, speed: 1.0, repeat: 1, copies: 1, spread, timeout }
}

/// A simulated server, which answers each connection in the same way.
struct Server {
    /// Answer to each complete request: bytes of the request, bytes of the answer.
    answers: Vec<(u64, usize)>,
    /// Time from a request to its answer.
    delay: u64,
    refuses: bool,
    /// Bytes that each call of `send` accepts.
    room: usize,
    /// Time from a call of `send` that did not accept all bytes until the next one is possible.
    blocked: u64,
}

#[derive(Default)]
struct Peer {
    received: u64,
    answered: usize,
}

enum Event {
    Connected,
    Refused,
    Data(usize),
    Writable,
}

struct SimulatedNetwork {
    server: Server,
    now: u64,
    events: BTreeMap<(u64, u64), (u32, Event)>,
    order: u64,
    peers: BTreeMap<u32, Peer>,
    targets: Vec<SocketAddr>,
    sent: Vec<(u64, u32, Vec<u8>)>,
    closed: u32,
    aborted: u32,
}

impl SimulatedNetwork {
    fn at(&mut self, at: u64, slot: u32, event: Event) {
        self.order += 1;
        self.events.insert((at, self.order), (slot, event));
    }
}

impl Network for SimulatedNetwork {
    fn connect(&mut self, slot: u32, to: SocketAddr, _: Option<IpAddr>) -> Result<(), Failure> {
        assert!(self.peers.insert(slot, Peer::default()).is_none(), "the slot is in use");
        self.targets.push(to);
        let event = if self.server.refuses { Event::Refused } else { Event::Connected };
        self.at(self.now + MS, slot, event);
        Ok(())
    }

    fn send(&mut self, slot: u32, bytes: &[u8]) -> usize {
        let accepted = bytes.len().min(self.server.room);
        self.sent.push((self.now, slot, bytes[..accepted].to_vec()));
        if accepted < bytes.len() && accepted > 0 {
            self.at(self.now + self.server.blocked, slot, Event::Writable);
        }
        let peer = self.peers.get_mut(&slot).expect("a connection");
        peer.received += accepted as u64;
        let mut answers = Vec::new();
        while let Some((needed, answer)) = self.server.answers.get(peer.answered).copied() {
            let before: u64 = self.server.answers[..peer.answered].iter().map(|(needed, _)| needed).sum();
            if peer.received < before + needed {
                break;
            }
            peer.answered += 1;
            answers.push(answer);
        }
        for answer in answers {
            self.at(self.now + self.server.delay, slot, Event::Data(answer));
        }
        accepted
    }

    fn close(&mut self, slot: u32) {
        self.closed += 1;
        self.peers.remove(&slot);
        self.events.retain(|_, (other, _)| *other != slot);
    }

    fn abort(&mut self, slot: u32) {
        self.aborted += 1;
        self.peers.remove(&slot);
        self.events.retain(|_, (other, _)| *other != slot);
    }
}

/// Runs a worker to its end.
fn run(plan: &ReplayPlan, share: WorkerShare, server: Server) -> (ReplayStats, SimulatedNetwork) {
    let servers = vec![ReplayTarget { ip: "10.0.0.1".parse().unwrap(), port: None }];
    let start = Instant::from_nanos(0);
    let mut session = ReplaySession::new(
        Arc::new(plan.clone()),
        share,
        servers,
        Sources::new(&[], 0, 1),
        Arc::default(),
        start,
    );
    let mut net = SimulatedNetwork {
        server,
        now: 0,
        events: BTreeMap::new(),
        order: 0,
        peers: BTreeMap::new(),
        targets: Vec::new(),
        sent: Vec::new(),
        closed: 0,
        aborted: 0,
    };
    loop {
        let now = Instant::from_nanos(net.now);
        let Some(next) = session.poll(now, &mut net) else { break };
        let event = net.events.first_key_value().map(|(key, _)| *key);
        match event.filter(|(at, _)| *at <= next.as_nanos()) {
            Some(key) => {
                net.now = net.now.max(key.0);
                let now = Instant::from_nanos(net.now);
                let (slot, event) = net.events.remove(&key).unwrap();
                match event {
                    Event::Connected => session.connected(slot, now, &mut net),
                    Event::Refused => {
                        net.peers.remove(&slot);
                        session.ended(slot, Failure::Refused, now, &mut net);
                    }
                    Event::Data(len) => session.data(slot, &vec![0; len], now, &mut net),
                    Event::Writable => session.writable(slot, now, &mut net),
                }
            }
            None => net.now = next.as_nanos(),
        }
        assert!(net.now < 100_000 * MS, "the run does not end");
    }
    let stats = session.stats().clone();
    let c = &stats.counters;
    assert_eq!(c.due, c.answered + c.answered_early + c.unanswered + c.not_sent, "{c:?}");
    assert!(net.peers.is_empty());
    (stats, net)
}

fn server(answers: &[(u64, usize)]) -> Server {
    Server { answers: answers.to_vec(), delay: 2 * MS, refuses: false, room: usize::MAX, blocked: MS }
}

#[test]
fn bytes_are_sent_at_recorded_times() {
    let plan = plan(recording(&[&[(5, 10, 100), (20, 30, 200)]]));
    let (stats, net) = run(&plan, WorkerShare::WHOLE, server(&[(10, 100), (30, 200)]));
    let sent: Vec<_> = net.sent.iter().map(|(at, _, bytes)| (*at / MS, bytes.len())).collect();
    assert_eq!(sent, [(5, 10), (20, 30)]);
    assert_eq!(net.sent[1].2, (0..30).collect::<Vec<u8>>());
    let c = stats.counters;
    assert_eq!((c.due, c.answered, c.missing_bytes, c.excess_bytes), (2, 2, 0, 0));
    assert_eq!((c.connections, c.connections_mismatched, net.closed, net.aborted), (1, 0, 1, 0));
    assert_eq!(net.targets, ["10.0.0.1:80".parse().unwrap()]);
    let histogram = stats.first_byte.histogram();
    assert!((1.99e6..2.01e6).contains(&histogram.mean()), "{}", histogram.mean());
}

#[test]
fn speed_scales_and_passes_follow_each_other() {
    let fast = ReplayPlan { speed: 2.0, repeat: 3, ..plan(recording(&[&[(10, 10, 100)]])) };
    let (stats, net) = run(&fast, WorkerShare::WHOLE, server(&[(10, 100)]));
    let sent: Vec<_> = net.sent.iter().map(|(at, ..)| *at / MS).collect();
    assert_eq!(sent, [5, 15, 25]);
    assert_eq!(stats.counters.answered, 3);
    assert_eq!(fast.length(), Duration::from_millis(30));
}

#[test]
fn latency_counts_from_the_intended_time() {
    // The connection takes longer than until the first recorded bytes, and each answer longer than until
    // the next request.
    let plan = plan(recording(&[&[(0, 10, 100), (5, 10, 100), (10, 10, 100)]]));
    let slow = Server { delay: 50 * MS, ..server(&[(10, 100); 3]) };
    let (stats, net) = run(&plan, WorkerShare::WHOLE, slow);
    let sent: Vec<_> = net.sent.iter().map(|(at, ..)| *at / MS).collect();
    assert_eq!(sent, [1, 5, 10]);
    let histogram = stats.first_byte.histogram();
    // Values have three digits.
    let [most, least] = [histogram.max(), histogram.min()].map(|nanos| (nanos + MS / 2) / MS);
    assert_eq!((stats.counters.answered, most, least), (3, 51, 50));
}

#[test]
fn copies_are_spread_and_shared_by_workers() {
    let recorded = recording(&[&[(10, 10, 100)], &[(10, 10, 100)], &[(10, 10, 100)]]);
    let plan = ReplayPlan { copies: 4, spread: Duration::from_millis(40), repeat: 2, ..plan(recorded) };
    let mut all = Vec::new();
    let mut total = ReplayStats::default();
    for worker in 0..3 {
        let (stats, net) = run(&plan, WorkerShare { worker, workers: 3 }, server(&[(10, 100)]));
        assert_eq!(stats.counters.connections, 8, "the work is divided evenly");
        all.extend(net.sent.iter().map(|(at, ..)| *at / MS));
        crate::load::run::WorkerStats::add(&mut total, &stats);
    }
    all.sort_unstable();
    let expected: Vec<u64> = [10, 20, 30, 30, 40, 40, 50, 60].iter().flat_map(|at| [*at; 3]).collect();
    assert_eq!(all, expected);
    assert_eq!((total.counters.connections, plan.connections()), (24, 24));
}

#[test]
fn other_amounts_of_answers_are_counted() {
    let recorded = recording(&[&[(10, 10, 100), (50, 10, 100)]]);
    let (more, _) = run(&plan(recorded.clone()), WorkerShare::WHOLE, server(&[(10, 130), (10, 100)]));
    let c = more.counters;
    assert_eq!((c.answered, c.excess_bytes, c.missing_bytes, c.connections_mismatched), (2, 30, 0, 1));
    let (less, net) = run(&plan(recorded.clone()), WorkerShare::WHOLE, server(&[(10, 100), (10, 60)]));
    let c = less.counters;
    assert_eq!((c.answered, c.excess_bytes, c.missing_bytes, c.connections_mismatched), (2, 0, 40, 1));
    assert_eq!((c.failures[Failure::Timeout as usize], net.aborted), (1, 1));
    let (none, _) = run(&plan(recorded), WorkerShare::WHOLE, server(&[]));
    let c = none.counters;
    assert_eq!((c.due, c.unanswered, c.missing_bytes), (2, 2, 200));
}

#[test]
fn an_answer_before_the_end_of_its_request_has_no_latency() {
    let mut recorded = recording(&[&[(10, 10, 100)]]);
    // The request goes on after 30 ms.
    recorded.sends.push(RecordedSend { at_ns: 40 * MS, start: 0, len: 5 });
    recorded.requests[0].last_send = 1;
    recorded.connections[0].sends.end = 2;
    recorded.connections[0].ended_ns = 50 * MS;
    let (stats, _) = run(&plan(recorded), WorkerShare::WHOLE, server(&[(10, 100)]));
    assert_eq!((stats.counters.answered, stats.counters.answered_early), (0, 1));
}

#[test]
fn a_server_may_speak_first() {
    let mut recorded = recording(&[&[(10, 10, 100)]]);
    recorded.requests[0].answer_from = 20;
    recorded.connections[0].answer_bytes = 120;
    let (stats, _) = run(&plan(recorded), WorkerShare::WHOLE, server(&[(0, 20), (10, 100)]));
    let c = stats.counters;
    // The simulated server sends its greeting with its first answer.
    assert_eq!((c.answered, c.excess_bytes, c.missing_bytes), (1, 0, 0));
}

#[test]
fn failed_connections_are_accounted_for() {
    let recorded = recording(&[&[(10, 10, 100)], &[(10, 10, 0)]]);
    let refusing = Server { refuses: true, ..server(&[]) };
    let (stats, _) = run(&plan(recorded.clone()), WorkerShare::WHOLE, refusing);
    let c = stats.counters;
    assert_eq!((c.connections_due, c.connections, c.connections_failed), (2, 0, 2));
    assert_eq!((c.due, c.not_sent, c.failures[Failure::Refused as usize]), (1, 1, 2));
    // A server that takes nothing.
    let full = Server { room: 0, ..server(&[]) };
    let (stats, net) = run(&plan(recorded), WorkerShare::WHOLE, full);
    assert_eq!((stats.counters.not_sent, stats.counters.failures[Failure::Timeout as usize]), (1, 2));
    assert_eq!(net.aborted, 2);
}

#[test]
fn bytes_that_do_not_fit_are_sent_later() {
    let narrow = Server { room: 4, ..server(&[(10, 100)]) };
    let (stats, net) = run(&plan(recording(&[&[(10, 10, 100)]])), WorkerShare::WHOLE, narrow);
    let sent: Vec<u8> = net.sent.iter().flat_map(|(.., bytes)| bytes.clone()).collect();
    assert_eq!(sent, (0..10).collect::<Vec<u8>>());
    assert_eq!((stats.counters.answered, stats.counters.bytes_sent), (1, 10));
}

#[test]
fn answers_have_the_timeout_after_the_last_byte() {
    // The last byte leaves 900 ms after the first one, and the answer comes 900 ms later. The timeout of the
    // blocked connection would have passed 100 ms after the last byte.
    let slow = Server { room: 5, blocked: 900 * MS, delay: 900 * MS, ..server(&[(10, 100)]) };
    let (stats, net) = run(&plan(recording(&[&[(10, 10, 100)]])), WorkerShare::WHOLE, slow);
    assert_eq!((stats.counters.answered, net.closed, net.aborted), (1, 1, 0));
    // An answer that takes longer than the timeout is not awaited.
    let silent = Server { room: 5, blocked: 900 * MS, delay: 1100 * MS, ..server(&[(10, 100)]) };
    let (stats, net) = run(&plan(recording(&[&[(10, 10, 100)]])), WorkerShare::WHOLE, silent);
    assert_eq!((stats.counters.unanswered, net.closed, net.aborted), (1, 0, 1));
}

#[test]
fn a_reset_of_the_client_is_replayed() {
    let mut recorded = recording(&[&[(10, 10, 100)]]);
    recorded.connections[0].end = RecordedEnd::Reset;
    let (stats, net) = run(&plan(recorded.clone()), WorkerShare::WHOLE, server(&[(10, 100)]));
    assert_eq!((stats.counters.answered, net.aborted, net.closed), (1, 1, 0));
    // The answers of a slower server are awaited, too.
    let slow = Server { delay: 500 * MS, ..server(&[(10, 100)]) };
    let (stats, net) = run(&plan(recorded), WorkerShare::WHOLE, slow);
    assert_eq!((stats.counters.answered, net.aborted, net.closed), (1, 1, 0));
}

#[test]
fn most_open_connections_are_known() {
    assert_eq!(recording(&[&[(10, 1, 1)], &[(20, 1, 1)]]).open_max(), 2);
    assert_eq!(Recording::default().open_max(), 0);
}
