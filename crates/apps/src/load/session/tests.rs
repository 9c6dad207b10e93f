use super::*;
use crate::load::plan::Rate;
use crate::load::response::Protocol;
use crate::load::urls::RequestStyle;
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

const MS: u64 = 1_000_000;

/// A simulated server.
#[derive(Clone)]
struct SimulatedServer {
    /// One-way delay in nanoseconds.
    delay: u64,
    /// Start and end of a stall, during which the server receives nothing.
    stall: (u64, u64),
    response: Vec<u8>,
    closes: bool,
    refuses: bool,
    /// Answers nothing.
    is_mute: bool,
    /// Resets the connection instead of answering every n-th request.
    resets_each: u64,
    /// Bytes that a send accepts.
    room: usize,
    /// Bytes that are delivered at a time.
    piece: usize,
}

impl Default for SimulatedServer {
    fn default() -> Self {
        Self {
            delay: MS,
            stall: (0, 0),
            response: b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello".to_vec(),
            closes: false,
            refuses: false,
            is_mute: false,
            resets_each: u64::MAX,
            room: usize::MAX,
            piece: usize::MAX,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Connected,
    Refused,
    Data(usize, usize),
    Closed,
    Reset,
    Writable,
}

/// Time, order of scheduling, slot, connection and event; the earliest first.
type ScheduledEvent = Reverse<(u64, u64, u32, u32, Event)>;

/// A server and the network to it, in simulated time.
struct SimulatedNetwork {
    server: SimulatedServer,
    now: u64,
    events: BinaryHeap<ScheduledEvent>,
    sequence: u64,
    /// Number of each slot's connection; `None` without a connection.
    connections: Vec<Option<u32>>,
    opened: u32,
    /// Received bytes of the requests on each slot's connection.
    received: Vec<Vec<u8>>,
    requests: u64,
    closed: u64,
    aborted: u64,
    sources: Vec<Option<IpAddr>>,
}

impl SimulatedNetwork {
    fn new(server: SimulatedServer) -> Self {
        Self {
            server,
            now: 0,
            events: BinaryHeap::new(),
            sequence: 0,
            connections: Vec::new(),
            opened: 0,
            received: Vec::new(),
            requests: 0,
            closed: 0,
            aborted: 0,
            sources: Vec::new(),
        }
    }

    fn schedule(&mut self, at: u64, slot: u32, event: Event) {
        let connection = self.connections[slot as usize].unwrap();
        self.sequence += 1;
        self.events.push(Reverse((at, self.sequence, slot, connection, event)));
    }

    /// Returns when data that arrive at `at` are answered.
    fn answer_at(&self, at: u64) -> u64 {
        let (from, to) = self.server.stall;
        let at = at + self.server.delay;
        self.server.delay + if at >= from && at < to { to } else { at }
    }
}

impl Network for SimulatedNetwork {
    fn connect(&mut self, slot: u32, _: SocketAddr, from: Option<IpAddr>) -> Result<(), Failure> {
        let len = self.connections.len().max(slot as usize + 1);
        self.connections.resize(len, None);
        self.received.resize(len, Vec::new());
        assert_eq!(self.connections[slot as usize], None, "the slot is in use");
        self.opened += 1;
        self.connections[slot as usize] = Some(self.opened);
        self.received[slot as usize].clear();
        self.sources.push(from);
        let event = if self.server.refuses { Event::Refused } else { Event::Connected };
        self.schedule(self.answer_at(self.now), slot, event);
        Ok(())
    }

    fn send(&mut self, slot: u32, bytes: &[u8]) -> usize {
        assert!(!bytes.is_empty());
        let n = bytes.len().min(self.server.room);
        self.received[slot as usize].extend_from_slice(&bytes[..n]);
        let at = self.answer_at(self.now);
        while let Some(end) = memchr::memmem::find(&self.received[slot as usize], b"\r\n\r\n") {
            assert!(self.received[slot as usize].starts_with(b"GET /"));
            self.received[slot as usize].drain(..end + 4);
            self.requests += 1;
            if self.requests.is_multiple_of(self.server.resets_each) {
                self.schedule(at, slot, Event::Reset);
                break;
            }
            if !self.server.is_mute {
                let len = self.server.response.len();
                for start in (0..len).step_by(self.server.piece.min(len).max(1)) {
                    self.schedule(
                        at,
                        slot,
                        Event::Data(start, len.min(start.saturating_add(self.server.piece))),
                    );
                }
                if self.server.closes {
                    self.schedule(at, slot, Event::Closed);
                    break;
                }
            }
        }
        if n < bytes.len() {
            self.schedule(self.now + 1000, slot, Event::Writable);
        }
        n
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

fn plan() -> Plan {
    Plan {
        connections: 10,
        requests_per_connection: u32::MAX,
        pipeline: 1,
        rate: None,
        setup: Duration::ZERO,
        warmup: Duration::ZERO,
        duration: Some(Duration::from_secs(10)),
        requests: None,
        timeout: Duration::from_secs(5),
        give_up: None,
        closer: Closer::Server,
        seed: 1,
    }
}

fn short() -> Plan {
    Plan { requests_per_connection: 1, ..plan() }
}

const fn at_rate(plan: Plan, per_second: f64) -> Plan {
    Plan { rate: Some(Rate { per_second, poisson: false }), ..plan }
}

/// Runs a plan to its end.
fn run(plan: Plan, server: SimulatedServer) -> (Session, SimulatedNetwork) {
    let style = RequestStyle { close: plan.is_short(), ..RequestStyle::default() };
    let paths = [("/a".to_owned(), 1), ("/longer/path".to_owned(), 2)];
    run_with(plan, Requests::new("h", &paths, &style).unwrap(), server)
}

fn run_with(plan: Plan, requests: Requests, server: SimulatedServer) -> (Session, SimulatedNetwork) {
    let target = "10.0.0.1:80".parse().unwrap();
    let ranges = ["10.0.0.2-4".parse().unwrap()];
    let sources = Sources::new(&ranges, 0, 1);
    let (requests, progress) = (Arc::new(requests), Arc::new(LiveProgress::default()));
    let mut session = Session::new(plan, requests, vec![target], sources, progress, Instant::ZERO);
    let mut net = SimulatedNetwork::new(server);
    let mut turns = 0u64;
    while let Some(next) = session.poll(Instant::from_nanos(net.now), &mut net) {
        turns += 1;
        assert!(turns < 50_000_000, "the run does not end");
        let event = net.events.peek().map_or(u64::MAX, |Reverse((at, ..))| *at);
        net.now = event.min(next.as_nanos()).max(net.now);
        while net.events.peek().is_some_and(|Reverse((at, ..))| *at <= net.now) {
            let Some(Reverse((_, _, slot, connection, event))) = net.events.pop() else { break };
            if net.connections[slot as usize] == Some(connection) {
                deliver(&mut session, &mut net, slot, event);
            }
        }
        check(&session);
    }
    (session, net)
}

fn deliver(session: &mut Session, net: &mut SimulatedNetwork, slot: u32, event: Event) {
    let now = Instant::from_nanos(net.now);
    match event {
        Event::Connected => session.connected(slot, now, net),
        Event::Data(start, end) => {
            let bytes = net.server.response[start..end].to_vec();
            session.data(slot, &bytes, now, net);
        }
        Event::Closed => session.peer_closed(slot, now, net),
        Event::Writable => session.writable(slot, net),
        Event::Refused | Event::Reset => {
            net.connections[slot as usize] = None;
            let failure = if event == Event::Reset { Failure::Reset } else { Failure::Refused };
            session.ended(slot, failure, now, net);
        }
    }
}

/// Checks the invariants of a session.
fn check(session: &Session) {
    let count = |state| session.slots.iter().filter(|s| s.state == state).count() as u32;
    let open = count(SlotState::Open) + count(SlotState::Connecting) + count(SlotState::Closing);
    assert_eq!(session.open, open);
    assert_eq!(session.connecting, count(SlotState::Connecting));
    assert_eq!(session.initial_connects, session.slots.iter().filter(|s| s.is_new).count() as u32);
    assert_eq!(session.in_flight, session.slots.iter().map(|s| u64::from(s.in_flight)).sum::<u64>());
    assert!(session.open <= session.plan.connections);
}

fn failures(session: &Session) -> u64 {
    session.stats().counters.failures.iter().sum()
}

fn at(latency: &crate::load::latency::Latency, quantile: f64) -> u64 {
    latency.histogram().value_at_quantile(quantile)
}

fn is_near(value: u64, expected: u64) -> bool {
    value.abs_diff(expected) <= expected / 100
}

#[test]
fn a_closed_loop_sends_the_requested_number() {
    let plan = Plan { requests: Some(100), duration: None, ..short() };
    let (session, net) = run(plan, SimulatedServer { closes: true, ..SimulatedServer::default() });
    let c = session.stats().counters;
    assert_eq!((net.requests, net.opened, net.closed, net.aborted), (100, 100, 100, 0));
    assert_eq!(
        (c.started, c.completed, c.connected, c.by_class[2], failures(&session)),
        (100, 100, 100, 100, 0)
    );
    // Two round trips for the response, one of them for the connection; ten at a time.
    assert!(is_near(at(&session.stats().connect, 0.5), 2 * MS));
    assert!(is_near(at(&session.stats().total, 1.0), 4 * MS));
    assert!(is_near(session.stats().measured.as_nanos() as u64, 40 * MS));
    assert_eq!(&net.sources[..4], ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.2"].map(|a| a.parse().ok()));
}

#[test]
fn any_side_can_close() {
    let plan = Plan { requests: Some(20), duration: None, ..short() };
    let (_, net) = run(Plan { closer: Closer::Client, ..plan }, SimulatedServer::default());
    assert_eq!((net.closed, net.aborted), (20, 0));
    let (_, net) = run(Plan { closer: Closer::Reset, ..plan }, SimulatedServer::default());
    assert_eq!((net.closed, net.aborted), (0, 20));
    let (session, net) = run(Plan { timeout: Duration::from_secs(1), ..plan }, SimulatedServer::default());
    assert_eq!(
        (net.closed + net.aborted, session.stats().counters.completed),
        (20, 20),
        "a server that does not close"
    );
}

#[test]
fn a_closed_loop_reuses_its_connections() {
    let (session, net) = run(plan(), SimulatedServer::default());
    let c = session.stats().counters;
    assert_eq!((net.opened, net.closed, c.open_max), (10, 10, 10));
    assert!(is_near(c.completed, 10 * 10_000 / 2), "{c:?}");
    assert!(is_near(at(&session.stats().total, 1.0), 2 * MS));
    assert_eq!((failures(&session), c.lost_idle, c.unanswered), (0, 0, 0));
    assert_eq!(session.stats().measured, Duration::from_secs(10));
}

#[test]
fn connections_close_after_their_last_request() {
    let plan =
        Plan { requests_per_connection: 7, requests: Some(700), duration: None, connections: 5, ..plan() };
    for server in [SimulatedServer::default(), SimulatedServer { piece: 3, ..SimulatedServer::default() }] {
        let (session, net) = run(plan, server);
        assert_eq!((net.requests, session.stats().counters.completed), (700, 700));
        assert!((100..=105).contains(&net.opened), "{}", net.opened);
    }
}

#[test]
fn pipelined_requests_are_matched_in_order() {
    let plan = Plan { pipeline: 8, connections: 2, ..plan() };
    for server in
        [SimulatedServer::default(), SimulatedServer { piece: 10, room: 25, ..SimulatedServer::default() }]
    {
        let (session, _) = run(plan, server);
        let c = session.stats().counters;
        assert!(c.completed > 1000 && failures(&session) == 0, "{c:?}");
        assert!(c.started - c.completed <= 16);
    }
}

#[test]
fn an_open_loop_keeps_its_rate() {
    for (plan, opened) in [(plan(), 10..=10), (short(), 5_000..=5_000)] {
        let (session, net) = run(
            at_rate(plan, 500.0),
            SimulatedServer { closes: plan.is_short(), ..SimulatedServer::default() },
        );
        let c = session.stats().counters;
        assert_eq!((c.started, c.not_started, failures(&session)), (5_000, 0, 0));
        assert!(opened.contains(&net.opened), "{}", net.opened);
        assert!(is_near(at(&session.stats().total, 0.99), if plan.is_short() { 4 * MS } else { 2 * MS }));
        assert!(at(&session.stats().lag, 1.0) < MS);
    }
}

#[test]
fn an_open_loop_shows_a_server_stall() {
    // 1 s of 10 s: 10 % of the requests were due during the stall and waited for up to 1 s.
    let server = SimulatedServer { stall: (4_000 * MS, 5_000 * MS), ..SimulatedServer::default() };
    let open = Plan { connections: 1_000, ..at_rate(plan(), 1_000.0) };
    let (session, _) = run(open, server.clone());
    let total = &session.stats().total;
    assert!(is_near(at(total, 1.0), 1_002 * MS), "{}", at(total, 1.0));
    assert!(at(total, 0.99) > 850 * MS && at(total, 0.95) > 450 * MS, "{}", at(total, 0.99));
    assert!(at(total, 0.89) < 3 * MS);
    assert_eq!(session.stats().counters.completed, 10_000);
    assert_eq!(session.stats().counters.completed_in_time, 10_000 - 2);

    // With few connections the requests wait in the session instead of the server, and the latency shows it,
    // too.
    let (session, _) = run(at_rate(plan(), 1_000.0), server.clone());
    assert!(at(&session.stats().total, 0.99) > 850 * MS);
    assert!(at(&session.stats().lag, 0.99) > 850 * MS);

    // A closed loop sends nothing during the stall: only one request per connection is slow.
    let (session, _) = run(plan(), server);
    assert!(at(&session.stats().total, 0.99) < 3 * MS);
}

// limit: load --connections
#[test]
fn requests_that_never_began_are_reported() {
    // One connection serves 500/s, and twice as many are due.
    let (session, _) = run(Plan { connections: 1, ..at_rate(plan(), 1_000.0) }, SimulatedServer::default());
    let c = session.stats().counters;
    assert!(is_near(c.started, 5_000) && is_near(c.not_started, 5_000), "{c:?}");
    assert_eq!(c.started + c.not_started, 10_000);
}

#[test]
fn poisson_arrivals_have_the_requested_rate() {
    let rate = Some(Rate { per_second: 1_000.0, poisson: true });
    let (session, _) = run(Plan { rate, connections: 100, ..plan() }, SimulatedServer::default());
    assert!(session.stats().counters.started.abs_diff(10_000) < 400);
    assert!(is_near(at(&session.stats().total, 0.99), 2 * MS));
}

#[test]
fn warm_up_and_set_up_are_not_measured() {
    let plan = Plan { warmup: Duration::from_secs(2), setup: Duration::from_secs(1), ..plan() };
    let stall = (1_000 * MS, 2_000 * MS); // all within the warm-up
    let (session, net) = run(plan, SimulatedServer { stall, ..SimulatedServer::default() });
    assert!(is_near(at(&session.stats().total, 1.0), 2 * MS));
    assert!(is_near(session.stats().counters.completed, 50_000));
    assert!(net.requests > 55_000);
    assert_eq!(session.stats().counters.connected, 0);
}

#[test]
fn refused_connections_are_retried_after_a_pause() {
    let (session, net) = run(short(), SimulatedServer { refuses: true, ..SimulatedServer::default() });
    let c = session.stats().counters;
    assert_eq!(c.failures[Failure::Refused as usize], failures(&session));
    // 10 slots, each of which retries after 10 ms and a round trip.
    assert!((8_000..=8_400).contains(&net.opened), "{}", net.opened);
}

// limit: load --timeout
#[test]
fn a_silent_server_times_out() {
    let plan = Plan { requests: Some(30), duration: None, timeout: Duration::from_secs(2), ..plan() };
    let (session, net) = run(plan, SimulatedServer { is_mute: true, ..SimulatedServer::default() });
    let c = session.stats().counters;
    assert_eq!((c.failures[Failure::Timeout as usize], c.completed, net.aborted), (30, 0, 30));
    assert!(net.now < 8_000 * MS);
}

// limit: load --give-up
#[test]
fn a_run_without_answers_is_given_up() {
    let second = Duration::from_secs(1);
    let endless = Plan { requests: Some(1_000_000), duration: None, give_up: Some(3 * second), ..plan() };
    let plans = [endless, at_rate(endless, 100.0), Plan { requests_per_connection: 1, ..endless }];
    for plan in plans.into_iter().chain([at_rate(plans[2], 1000.0)]) {
        // Nothing listens; every request is answered with a reset; the responses are malformed.
        let nonsense = b"nonsense".to_vec();
        for server in [
            SimulatedServer { refuses: true, ..SimulatedServer::default() },
            SimulatedServer { resets_each: 1, ..SimulatedServer::default() },
            SimulatedServer { response: nonsense, ..SimulatedServer::default() },
        ] {
            let (session, net) = run(plan, server);
            let (stats, waited) = (session.stats(), net.now / MS);
            assert!(stats.gave_up && stats.counters.completed == 0 && failures(&session) > 0, "{plan:?}");
            // An open loop on persistent connections waits for them first.
            assert!((3_000..9_000).contains(&waited), "{plan:?}: {waited} ms");
        }
        // A server that stalls for longer than that, without a failure.
        let plan = Plan { requests: Some(2000), timeout: 20 * second, ..plan };
        let stall = (500 * MS, 8_000 * MS);
        let (session, _) = run(plan, SimulatedServer { stall, ..SimulatedServer::default() });
        assert_eq!((session.stats().gave_up, session.stats().counters.completed), (false, 2000), "{plan:?}");
        // A server of which half of the responses fail.
        let (session, _) = run(
            Plan { requests: Some(5000), ..plan },
            SimulatedServer { resets_each: 2, ..SimulatedServer::default() },
        );
        assert!(!session.stats().gave_up, "{plan:?}");
    }
}

#[test]
fn results_survive_a_server_that_stops_answering() {
    let give_up = Some(Duration::from_secs(3));
    let plan = Plan {
        requests: Some(1_000_000),
        duration: None,
        give_up,
        timeout: Duration::from_secs(1),
        ..plan()
    };
    // The server answers nothing after five seconds.
    let (session, net) =
        run(plan, SimulatedServer { stall: (5_000 * MS, u64::MAX / 4), ..SimulatedServer::default() });
    let stats = session.stats();
    assert!(stats.gave_up && stats.counters.completed > 1_000, "{:?}", stats.counters);
    assert!((9_000..12_000).contains(&(net.now / MS)), "{}", net.now / MS);
    assert!(net.connections.iter().all(Option::is_none), "nothing is left open");
}

#[test]
fn a_server_that_vanishes_is_noticed() {
    let second = Duration::from_secs(1);
    let plan = Plan { duration: Some(10 * second), timeout: 2 * second, ..plan() };
    let plans = [plan, Plan { requests_per_connection: 1, ..plan }, at_rate(plan, 100.0)];
    for plan in plans.into_iter().chain([at_rate(plans[1], 100.0)]) {
        // It answers nothing after five seconds, and requests time out.
        let vanishing = SimulatedServer { stall: (5_000 * MS, u64::MAX / 4), ..SimulatedServer::default() };
        let (session, _) = run(plan, vanishing);
        let until = session.stats().answered_until.expect("the server vanished").as_secs_f64();
        assert!((3.0..5.1).contains(&until), "{until}: {plan:?}");
        // It was away for a while, is slow at the end, or answers half of the requests.
        for (server, timeout) in [
            (SimulatedServer { stall: (2_000 * MS, 5_000 * MS), ..SimulatedServer::default() }, 1),
            (SimulatedServer { stall: (8_000 * MS, 12_000 * MS), ..SimulatedServer::default() }, 20),
            (SimulatedServer { resets_each: 2, ..SimulatedServer::default() }, 1),
        ] {
            let (session, _) = run(Plan { timeout: timeout * second, ..plan }, server);
            assert_eq!(session.stats().answered_until, None, "{plan:?}");
            assert!(session.stats().counters.completed >= 10, "{plan:?}");
        }
    }
}

#[test]
fn resets_and_bad_responses_are_distinguished() {
    let plan = Plan { requests: Some(100), duration: None, ..short() };
    let (session, _) =
        run(plan, SimulatedServer { resets_each: 10, closes: true, ..SimulatedServer::default() });
    let c = session.stats().counters;
    assert_eq!((c.completed, c.failures[Failure::Reset as usize], failures(&session)), (90, 10, 10));

    let (session, net) = run(
        plan,
        SimulatedServer { response: b"SSH-2.0-OpenSSH\r\n".to_vec(), ..SimulatedServer::default() },
    );
    let c = session.stats().counters;
    assert_eq!((c.completed, c.failures[Failure::BadResponse as usize], net.aborted), (0, 100, 100));

    let response = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello".to_vec();
    let (session, _) = run(plan, SimulatedServer { response, closes: true, ..SimulatedServer::default() });
    let c = session.stats().counters;
    assert_eq!((c.completed, c.failures[Failure::ClosedEarly as usize]), (0, 100));

    let response = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n".to_vec();
    let (session, _) = run(plan, SimulatedServer { response, closes: true, ..SimulatedServer::default() });
    assert_eq!(session.stats().counters.by_class[5], 100);
}

#[test]
fn a_response_can_end_with_fin() {
    let response = b"HTTP/1.0 200 OK\r\n\r\nuntil the end".to_vec();
    for plan in [short(), plan()] {
        let plan = Plan { requests: Some(50), duration: None, ..plan };
        let (session, net) = run(
            plan,
            SimulatedServer { response: response.clone(), closes: true, ..SimulatedServer::default() },
        );
        assert_eq!((session.stats().counters.completed, failures(&session)), (50, 0));
        assert_eq!(net.aborted, 0);
    }
}

#[test]
fn a_server_may_close_after_every_response() {
    let response = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".to_vec();
    let plan = Plan { requests: Some(50), duration: None, ..plan() };
    let (session, net) = run(plan, SimulatedServer { response, closes: true, ..SimulatedServer::default() });
    assert_eq!((session.stats().counters.completed, net.requests, failures(&session)), (50, 50, 0));
}

#[test]
fn a_closed_loop_reaches_its_number_of_connections() {
    let plan = Plan { connections: 5000, duration: Some(Duration::from_millis(100)), ..short() };
    let (session, net) = run(plan, SimulatedServer { closes: true, ..SimulatedServer::default() });
    assert_eq!(session.stats().counters.open_max, 5000);
    assert!(failures(&session) == 0 && net.requests > 50_000, "{}", net.requests);
}

#[test]
fn set_up_opens_connections_evenly() {
    let plan = Plan { connections: 1_000, setup: Duration::from_secs(10), ..at_rate(plan(), 10.0) };
    let (session, net) = run(plan, SimulatedServer::default());
    assert_eq!((net.opened, session.stats().counters.open_max), (1_000, 1_000));
    assert!(net.now > 19_900 * MS, "measuring began when all were open");
    assert_eq!(session.stats().counters.started, 100);
}

#[test]
fn an_interrupted_run_reports_its_results() {
    let requests = Requests::new("h", &[("/".to_owned(), 1)], &RequestStyle::default()).unwrap();
    let target = "10.0.0.1:80".parse().unwrap();
    let (requests, progress) = (Arc::new(requests), Arc::new(LiveProgress::default()));
    let mut session =
        Session::new(plan(), requests, vec![target], Sources::new(&[], 0, 1), progress, Instant::ZERO);
    let mut net = SimulatedNetwork::new(SimulatedServer { is_mute: true, ..SimulatedServer::default() });
    session.poll(Instant::ZERO, &mut net);
    session.connected(0, Instant::from_millis(1), &mut net);
    let now = Instant::from_millis(2_500);
    session.interrupt(now);
    session.poll(now, &mut net);
    assert_eq!(session.stage(), Stage::Done);
    assert_eq!(session.stats().measured, Duration::from_millis(2_500));
    assert_eq!(session.stats().counters.unanswered, 1);
    assert!(net.connections.iter().all(Option::is_none));
}

#[test]
fn the_opening_request_is_not_counted() {
    let protocol = Protocol::Http { head: false };
    let get = b"GET /value HTTP/1.1\r\n\r\n";
    let store = [&b"GET /store HTTP/1.1\r\nX: "[..], &[b'x'; 500], b"\r\n\r\n"].concat();
    let closed = Plan { requests: Some(100), duration: None, ..plan() };
    for plan in [
        closed,
        Plan { requests_per_connection: 7, closer: Closer::Client, ..closed },
        Plan { pipeline: 4, ..closed },
        at_rate(closed, 1_000.0),
    ] {
        for (room, piece) in [(usize::MAX, usize::MAX), (33, 5)] {
            let requests = Requests::of_values(protocol, get, Some(&store));
            let (session, net) =
                run_with(plan, requests, SimulatedServer { room, piece, ..SimulatedServer::default() });
            let c = session.stats().counters;
            assert_eq!(
                (c.started, c.completed, failures(&session), c.unanswered),
                (100, 100, 0, 0),
                "{plan:?}"
            );
            assert_eq!(session.stats().total.histogram().len(), 100);
            assert_eq!(session.stats().first_byte.histogram().len(), 100);
            // One for each connection whose opening request was sent before the run was over.
            let openings = net.requests - 100;
            assert!(openings > 0 && openings <= u64::from(net.opened), "{openings} of {}", net.opened);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_exactly_once(
        connections in 1u32..20,
        per_connection in prop_oneof![Just(1), 2u32..9, Just(u32::MAX)],
        pipeline in 1u16..5,
        rate in proptest::option::of(10.0f64..2_000.0),
        closes: bool,
        is_mute in proptest::bool::weighted(0.1),
        resets_each in prop_oneof![Just(u64::MAX), 1u64..10],
        room in 1usize..300,
        piece in 1usize..60,
        bad in proptest::bool::weighted(0.1),
        requests in 1u64..200,
        closer in prop_oneof![Just(Closer::Server), Just(Closer::Client), Just(Closer::Reset)],
    ) {
        let plan = Plan {
            connections,
            requests_per_connection: per_connection,
            pipeline,
            rate: rate.map(|per_second| Rate { per_second, poisson: false }),
            requests: Some(requests),
            duration: Some(Duration::from_secs(60)),
            timeout: Duration::from_millis(500),
            closer,
            ..plan()
        };
        let mut server = SimulatedServer { closes, is_mute, resets_each, room, piece, ..SimulatedServer::default() };
        if bad {
            server.response = b"nonsense".to_vec();
        }
        let (session, net) = run(plan, server);
        let c = session.stats().counters;
        prop_assert!(c.started <= requests);
        prop_assert!(c.completed <= c.started);
        prop_assert!(c.completed_in_time <= c.started || plan.rate.is_none());
        if plan.is_short() {
            prop_assert_eq!(c.started, c.completed + failures(&session) + c.unanswered);
        } else {
            prop_assert!(c.started <= c.completed + failures(&session) + c.unanswered);
        }
        prop_assert!(net.connections.iter().all(Option::is_none), "nothing is left open");
        prop_assert_eq!(session.records.in_use(), 0);
        prop_assert_eq!((session.open, session.in_flight, session.connecting), (0, 0, 0));
    }
}
