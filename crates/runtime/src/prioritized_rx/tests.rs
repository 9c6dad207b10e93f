//! Receiving by priority, each time beside a run without it. Two hosts in simulated time; a server whose
//! handlers take time.

mod accept;
mod channel;
mod transmit;
mod udp;

use crate::UnorderedBytes;
use crate::clock::SimulatedClock;
use crate::config::Config;
use crate::context::Context;
use crate::error::Error;
use crate::executor::{Executor, net, task};
use crate::fixture::{CLIENT_ADDRESS, SERVER_ADDRESS, START, config};
use crate::handler::Handler;
use crate::shard::Shard;
use core::cell::RefCell;
use core::time::Duration;
use ginnel_stack::device::{
    BURST_FRAMES_MAX, Capabilities, Device, Label, RxBurst, RxFrame, RxQueue, TxMeta, TxQueue,
};
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::{ConnectOptions, ListenOptions, SocketOptions};
use ginnel_stack::time::Instant;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

/// Bytes of a message.
const MESSAGE_BYTES: usize = 16;
const HIGH: u8 = 6;

/// Answers each message with its first bytes, and takes time for it.
struct Server {
    clock: SimulatedClock,
    cost: Duration,
    /// Priority, or rather class, and number of the messages in the order in which they were handled.
    handled: Vec<(u8, u32)>,
    is_unordered: bool,
    handled_when_closed: Vec<usize>,
}

impl Handler for Server {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket =
            SocketOptions { nodelay: true, unordered: self.is_unordered, ..SocketOptions::default() };
        cx.listen("0.0.0.0:80".parse().unwrap(), ListenOptions { socket, ..ListenOptions::default() })
            .map(|_| ())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let whole = data.len() / MESSAGE_BYTES;
        for message in data.chunks_exact(MESSAGE_BYTES) {
            self.clock.advance(self.cost);
            self.handled.push((cx.event_class(), number_of(message)));
            assert_eq!(cx.send(conn, &message[..4]), Ok(4));
        }
        whole * MESSAGE_BYTES
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, _: CloseReason) {
        self.handled_when_closed.push(self.handled.len());
    }

    fn unordered(&mut self, cx: &mut Context<'_>, conn: Conn, _: UnorderedBytes, data: &[u8]) {
        assert_eq!(self.data(cx, conn, data), data.len());
    }
}

fn number_of(message: &[u8]) -> u32 {
    u32::from_be_bytes([message[0], message[1], message[2], message[3]])
}

fn message(number: u32) -> [u8; MESSAGE_BYTES] {
    let mut message = [7; MESSAGE_BYTES];
    message[..4].copy_from_slice(&number.to_be_bytes());
    message
}

/// Opens connections, and records the answers.
#[derive(Default)]
struct Clients {
    conns: Vec<Conn>,
    connected: usize,
    answered: Vec<u32>,
    closed: Vec<CloseReason>,
}

impl Handler for Clients {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn connected(&mut self, _: &mut Context<'_>, _: Conn) {
        self.connected += 1;
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        let whole = data.len() / 4 * 4;
        self.answered.extend(data[..whole].chunks_exact(4).map(number_of));
        whole
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, reason: CloseReason) {
        self.closed.push(reason);
    }
}

/// Frames on their way, without a limit: what the devices in front of an overloaded server hold.
type Wire = Arc<Mutex<VecDeque<(Vec<u8>, Label)>>>;

/// Receives from a wire, and records the longest time between two looks at it.
struct WireRx {
    wire: Wire,
    lent: Vec<(Vec<u8>, Label)>,
    clock: SimulatedClock,
    last: Instant,
    longest_gap: Arc<Mutex<Duration>>,
}

impl RxQueue for WireRx {
    fn rx_burst<'a>(&'a mut self, _: Instant, burst: &mut RxBurst<'a>) {
        let now = self.clock.now();
        let mut longest = self.longest_gap.lock().unwrap();
        *longest = (*longest).max(now - self.last);
        self.last = now;
        let mut wire = self.wire.lock().unwrap();
        let count = wire.len().min(BURST_FRAMES_MAX);
        self.lent = wire.drain(..count).collect();
        burst.extend(self.lent.iter().map(|(bytes, label)| RxFrame { label: *label, ..RxFrame::new(bytes) }));
    }
}

/// Sends to a wire.
struct WireTx {
    wire: Wire,
    mac: u8,
    frame: Vec<u8>,
}

impl TxQueue for WireTx {
    fn capabilities(&self) -> Capabilities {
        let mac = [2, 0, 0, 0, 0, self.mac];
        Capabilities { mac, mtu: 1500, tx_checksum: false, gso_bytes_max: 0, uso: false, labels: true }
    }
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.frame.resize(len, 0);
        Some(&mut self.frame)
    }
    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.wire.lock().unwrap().push_back((self.frame[..len].to_vec(), meta.label));
    }
    fn has_backlog(&mut self, frames: usize) -> bool {
        self.wire.lock().unwrap().len() >= frames
    }
    fn flush(&mut self, _: Instant) {}
}

/// A server and its clients.
struct Hosts<S> {
    server: Shard<S>,
    clients: Shard<Clients>,
    clock: SimulatedClock,
    longest_gap: Arc<Mutex<Duration>>,
    to_clients: Wire,
}

/// Creates a server with or without priorities, and `count` connections to it; those from `first_high` on
/// have priority [`HIGH`].
fn hosts<S: Handler>(
    has_priorities: bool,
    queue_frames: u32,
    connections: (usize, usize),
    server: impl FnOnce(SimulatedClock) -> S,
) -> Hosts<S> {
    hosts_with(|_| (), has_priorities, queue_frames, connections, server)
}

/// As [`hosts`], with other changes of the server's configuration.
fn hosts_with<S: Handler>(
    configure: impl FnOnce(&mut Config),
    has_priorities: bool,
    queue_frames: u32,
    connections: (usize, usize),
    server: impl FnOnce(SimulatedClock) -> S,
) -> Hosts<S> {
    let mut server_config = config(&[SERVER_ADDRESS]);
    server_config.priority.enabled = Some(has_priorities);
    server_config.priority.queue_frames = queue_frames;
    configure(&mut server_config);
    hosts_from([server_config, config(&[CLIENT_ADDRESS])], connections, server)
}

/// As [`hosts`], with the configurations of the server and of its clients.
fn hosts_from<S: Handler>(
    [server_config, client_config]: [Config; 2],
    (count, first_high): (usize, usize),
    server: impl FnOnce(SimulatedClock) -> S,
) -> Hosts<S> {
    let clock = SimulatedClock::new(START);
    let (to_server, to_clients, longest_gap) = (Wire::default(), Wire::default(), Arc::default());
    let device = |from: &Wire, to: &Wire, mac, longest_gap: &Arc<Mutex<Duration>>| {
        let (clock, longest_gap) = (clock.clone(), Arc::clone(longest_gap));
        let rx = WireRx { wire: from.clone(), lent: Vec::new(), clock, last: START, longest_gap };
        Device { rx: Box::new(rx), tx: Box::new(WireTx { wire: to.clone(), mac, frame: Vec::new() }) }
    };
    let near = device(&to_server, &to_clients, 1, &longest_gap);
    let far = device(&to_clients, &to_server, 2, &Arc::default());
    let server =
        Shard::builder(server_config).handler(server(clock.clone())).device("cable", near).seed([1; 32]);
    let server = server.now(START).simulated_clock(clock.clone()).build().unwrap();
    let clients = Shard::builder(client_config).handler(Clients::default()).device("cable", far);
    let clients = clients.seed([2; 32]).now(START).build().unwrap();
    let mut hosts = Hosts { server, clients, clock, longest_gap, to_clients };
    hosts.both_turn(Duration::from_millis(1));
    let now = hosts.clock.now();
    hosts.clients.with(now, |clients, cx| {
        for number in 0..count {
            let priority = if number >= first_high { HIGH } else { 0 };
            let socket = SocketOptions { nodelay: true, priority, ..SocketOptions::default() };
            let options = ConnectOptions { socket, ..ConnectOptions::default() };
            clients.conns.push(cx.connect("10.0.0.1:80".parse().unwrap(), options).unwrap());
        }
    });
    for _ in 0..200 {
        hosts.both_turn(Duration::from_micros(50));
    }
    assert_eq!(hosts.clients.handler().connected, count);
    *hosts.longest_gap.lock().unwrap() = Duration::ZERO;
    hosts
}

impl<S: Handler> Hosts<S> {
    fn server_turn(&mut self) -> usize {
        self.server.poll_once(self.clock.now()).unwrap().work
    }

    fn both_turn(&mut self, time: Duration) {
        self.clock.advance(time);
        self.clients.poll_once(self.clock.now()).unwrap();
        self.server_turn();
        self.clients.poll_once(self.clock.now()).unwrap();
    }

    /// Sends one message, in a segment of its own.
    fn send(&mut self, connection: usize, number: u32) {
        let now = self.clock.now();
        self.clients.with(now, |clients, cx| {
            let sent = cx.send(clients.conns[connection], &message(number));
            assert_eq!(sent, Ok(MESSAGE_BYTES));
        });
        self.clients.poll_once(now).unwrap();
    }

    fn set_priority(&mut self, connection: usize, priority: u8) {
        let now = self.clock.now();
        self.clients.with(now, |clients, cx| cx.set_priority(clients.conns[connection], priority).unwrap());
    }

    fn retransmissions(&self) -> u64 {
        self.clients.core.stack.local().unwrap().tcp_stats().retransmitted
    }
}

impl Hosts<Server> {
    /// Runs until `count` messages were handled.
    fn run_until_handled(&mut self, count: usize) {
        for _ in 0..200_000 {
            if self.server.handler().handled.len() >= count {
                return;
            }
            let before = self.server.handler().handled.len();
            self.both_turn(Duration::from_micros(1));
            if self.server.handler().handled.len() == before {
                // What was dropped is sent again when a timer expires.
                self.clock.advance(Duration::from_micros(500));
            }
        }
        panic!("{} of {count} messages handled", self.server.handler().handled.len());
    }
}

fn server(cost_us: u64) -> impl FnOnce(SimulatedClock) -> Server {
    move |clock| Server {
        is_unordered: false,
        handled_when_closed: Vec::new(),
        clock,
        cost: Duration::from_micros(cost_us),
        handled: Vec::new(),
    }
}

/// Sends 10,000 heartbeats on 1,000 connections and then one request. Returns how many messages were handled,
/// and answered, before the request.
fn request_after_heartbeats(configure: impl FnOnce(&mut Config), has_priorities: bool) -> (usize, usize) {
    let mut hosts = hosts_with(configure, has_priorities, 16_384, (1001, 1000), server(20));
    for round in 0..10 {
        for connection in 0..1000 {
            hosts.send(connection, round * 1000 + connection as u32);
        }
    }
    hosts.send(1000, 1_000_000);
    hosts.run_until_handled(10_001);
    (0..1000).for_each(|_| hosts.both_turn(Duration::from_micros(10)));
    let handled = &hosts.server.handler().handled;
    let answered = &hosts.clients.handler().answered;
    assert_eq!((handled.len(), answered.len()), (10_001, 10_001));
    assert_eq!(hosts.server.stats().priority0_shed, 0);
    (
        handled.iter().position(|(_, number)| *number == 1_000_000).unwrap(),
        answered.iter().position(|number| *number == 1_000_000).unwrap(),
    )
}

#[test]
fn request_is_answered_before_queued_heartbeats() {
    let (handled_before, answered_before) = request_after_heartbeats(|_| (), true);
    assert!(handled_before < 100 && answered_before < 100, "{handled_before} {answered_before}");
    let (handled_before, answered_before) = request_after_heartbeats(|_| (), false);
    assert!(handled_before > 9900 && answered_before > 5000, "{handled_before} {answered_before}");
}

/// Under overload low messages are shed and repaired by their senders, and high ones are not. Without
/// priorities nothing is shed, because nothing is taken from the device that is not processed at once, and
/// high messages wait for all earlier low ones.
#[test]
fn low_is_shed_first_and_repaired() {
    for has_priorities in [true, false] {
        let mut hosts = hosts(has_priorities, 256, (1100, 1000), server(20));
        let is_high = |number: u32| number % 1100 >= 1000;
        for round in 0..10 {
            for connection in 0..1100 {
                hosts.send(connection, round * 1100 + connection as u32);
                if connection % 100 == 99 {
                    hosts.server_turn();
                }
            }
        }
        let stats = *hosts.server.stats();
        let handled = &hosts.server.handler().handled;
        let high_at_once = handled.iter().filter(|(_, number)| is_high(*number)).count();
        assert_eq!(stats.priority6_shed, 0);
        if has_priorities {
            assert!(stats.priority0_shed > 1000 && stats.priority6_frames > 1000, "{stats:?}");
            assert!(high_at_once > 900, "{high_at_once} of 1000");
        } else {
            assert_eq!((stats.priority0_shed, stats.priority6_frames), (0, 0));
            assert!(high_at_once < 800, "{high_at_once} of 1000 without priorities");
        }
        hosts.run_until_handled(11_000);
        for _ in 0..1000 {
            hosts.both_turn(Duration::from_millis(10));
        }
        let handled = &hosts.server.handler().handled;
        let mut numbers: Vec<u32> = handled.iter().map(|(_, number)| *number).collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..11_000), "every message exactly once");
        assert!(hosts.clients.handler().closed.is_empty());
        if has_priorities {
            assert!(hosts.retransmissions() > 0);
            assert!(handled.iter().all(|(class, number)| (*class == 6) == is_high(*number)));
        }
    }
}

/// Returns how many of the first 2,000 messages are low while low and high ones wait all the time.
fn low_of_2000(has_priorities: bool) -> usize {
    let mut hosts = hosts(has_priorities, 16_384, (1000, 500), server(20));
    for round in 0..10 {
        for connection in 0..1000 {
            hosts.send(connection, round * 1000 + connection as u32);
        }
    }
    while hosts.server.handler().handled.len() < 2000 {
        let work = hosts.server_turn();
        assert!(work > 0, "{:?}", hosts.server.stats());
    }
    hosts.server.handler().handled[..2000].iter().filter(|(_, number)| number % 1000 < 500).count()
}

/// While high messages wait all the time, low ones get 5 % of the work, and not much more.
#[test]
fn low_keeps_its_share() {
    let on = low_of_2000(true);
    assert!((95..=140).contains(&on), "{on} of 2000");
    let off = low_of_2000(false);
    assert!((900..=1100).contains(&off), "{off} of 2000 without priorities");
}

/// A connection that changes its priority sends frames of several classes: none overtakes another, so that
/// nothing is acknowledged twice or sent again.
#[test]
fn flow_with_changing_priority_keeps_its_order() {
    let mut hosts = hosts(true, 16_384, (200, 200), server(0));
    for round in 0..10u32 {
        for connection in 0..200 {
            hosts.set_priority(connection, ((round * 5 + connection as u32) % 8) as u8);
            hosts.send(connection, round * 200 + connection as u32);
        }
    }
    hosts.run_until_handled(2000);
    for _ in 0..100 {
        hosts.both_turn(Duration::from_millis(1));
    }
    let handled = &hosts.server.handler().handled;
    for connection in 0..200 {
        let own = handled.iter().map(|(_, number)| *number).filter(|number| number % 200 == connection);
        assert!(own.eq((0..10).map(|round| round * 200 + connection)), "connection {connection}");
    }
    assert_eq!(hosts.retransmissions(), 0);
    let tcp = *hosts.server.core.stack.local().unwrap().tcp_stats();
    assert_eq!((tcp.out_of_order, tcp.retransmitted), (0, 0));
}

/// Handlers of 50 µs: the devices are looked at 200 µs after the last look, plus one handler.
#[test]
fn devices_are_looked_at_between_handlers() {
    for (has_priorities, max_us) in [(true, 250), (false, u64::MAX)] {
        let mut hosts = hosts(has_priorities, 16_384, (100, 100), server(50));
        for round in 0..10 {
            for connection in 0..100 {
                hosts.send(connection, round * 100 + connection as u32);
            }
        }
        while hosts.server.handler().handled.len() < 1000 {
            assert!(hosts.server_turn() > 0, "a turn with waiting messages does some work");
        }
        let longest = *hosts.longest_gap.lock().unwrap();
        assert!(longest <= Duration::from_micros(max_us), "{longest:?}");
        assert!(has_priorities || longest >= Duration::from_millis(3), "without priorities: {longest:?}");
    }
}

/// A server of tasks: each message takes `slices` of 100 µs with a yield after each.
fn task_server(clock: SimulatedClock, slices: usize, handled: Rc<RefCell<Vec<(u8, u32)>>>) -> impl Handler {
    Executor::new(move || async move {
        let listener = net::TcpListener::bind("0.0.0.0:80").await?;
        loop {
            let (mut stream, _) = listener.accept().await?;
            let (clock, handled) = (clock.clone(), handled.clone());
            drop(task::spawn(async move {
                let mut message = [0; MESSAGE_BYTES];
                while stream.read_exact(&mut message).await.is_ok() {
                    let class = task::class();
                    for _ in 0..slices {
                        clock.advance(Duration::from_micros(100));
                        task::yield_now().await;
                    }
                    handled.borrow_mut().push((class, number_of(&message)));
                    if stream.write_all(&message[..4]).await.is_err() {
                        return;
                    }
                }
            }));
        }
        #[expect(unreachable_code, reason = "gives the task its type")]
        std::io::Result::Ok(())
    })
}

/// Tasks of 5 ms that yield each 100 µs: devices are looked at after 200 µs and one slice, and tasks that a
/// high message woke come first.
#[test]
fn tasks_with_high_messages_run_first() {
    for has_priorities in [true, false] {
        let handled = Rc::new(RefCell::new(Vec::new()));
        let for_server = handled.clone();
        let mut hosts =
            hosts(has_priorities, 16_384, (110, 100), move |clock| task_server(clock, 50, for_server));
        for connection in 0..110 {
            hosts.send(connection, connection as u32);
        }
        for _ in 0..100_000 {
            if handled.borrow().len() == 110 {
                break;
            }
            assert!(hosts.server_turn() > 0);
        }
        let order: Vec<u32> = handled.borrow().iter().map(|(_, number)| *number).collect();
        assert_eq!(order.len(), 110);
        let last_high = order.iter().rposition(|number| *number >= 100).unwrap();
        let longest = *hosts.longest_gap.lock().unwrap();
        if has_priorities {
            assert!(last_high < 16, "{order:?}");
            assert!(longest <= Duration::from_micros(300), "{longest:?}");
            assert!(handled.borrow().iter().all(|(class, number)| (*class == 6) == (*number >= 100)));
        } else {
            assert!(order[0] < 100 && last_high > 64, "only sorted within a burst: {order:?}");
            assert!(longest >= Duration::from_millis(5), "{longest:?}");
        }
    }
}

/// Returns whether a TCP segment has an option of this kind.
fn has_option(frame: &[u8], kind: u8) -> bool {
    let mut options = &frame[54..34 + usize::from(frame[46] >> 4) * 4];
    while let [first, rest @ ..] = options {
        match (*first, rest) {
            (first, _) if first == kind => return true,
            (1, _) => options = rest,
            (_, [len, ..]) => options = &options[usize::from(*len)..],
            _ => return false,
        }
    }
    false
}

/// A high message of a socket with unordered receive comes before earlier messages of its connection that
/// wait in the server's own queue, and the peer is not told of a gap.
#[test]
fn unordered_socket_gets_high_message_first_without_duplicate_acks() {
    const SACK: u8 = 5;
    for is_unordered in [true, false] {
        let mut configs = [config(&[SERVER_ADDRESS]), config(&[CLIENT_ADDRESS])];
        configs[0].priority.enabled = Some(true);
        // A probe would be sent because the server takes long.
        configs[1].tcp.tail_loss_probes = false;
        let mut hosts = hosts_from(configs, (100, 100), |clock| Server { is_unordered, ..server(50)(clock) });
        for round in 0..9 {
            for connection in 0..100 {
                hosts.send(connection, round * 100 + connection as u32);
            }
        }
        for connection in 0..100 {
            hosts.set_priority(connection, HIGH);
            hosts.send(connection, 900 + connection as u32);
        }
        let mut acked = HashMap::new();
        while hosts.server.handler().handled.len() < 1000 {
            hosts.server_turn();
            for (frame, _) in hosts.to_clients.lock().unwrap().iter() {
                assert!(!has_option(frame, SACK), "a gap was reported");
                let (port, ack) = (frame[36..38].to_vec(), frame[42..46].to_vec());
                let has_payload = frame.len() > 34 + usize::from(frame[46] >> 4) * 4;
                let last = acked.insert(port, ack.clone());
                assert!(has_payload || last != Some(ack), "a duplicate ACK");
            }
            // The clients take all of these frames.
            let mut turns = 0;
            while !hosts.to_clients.lock().unwrap().is_empty() {
                hosts.clients.poll_once(hosts.clock.now()).unwrap();
                turns += 1;
                assert!(turns < 1000, "the clients take no frames");
            }
        }
        for _ in 0..100 {
            hosts.both_turn(Duration::from_millis(1));
        }
        assert_eq!(hosts.clients.handler().answered.len(), 1000);
        assert_eq!(hosts.retransmissions(), 0, "the clients send nothing again, {is_unordered}");
        let order: Vec<u32> = hosts.server.handler().handled.iter().map(|(_, number)| *number).collect();
        let last_high = order.iter().rposition(|number| *number >= 900).unwrap();
        assert_eq!(last_high < 120, is_unordered, "{order:?}");
        let mut numbers = order.clone();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..1000), "every message once");
        let tcp = *hosts.server.core.stack.local().unwrap().tcp_stats();
        assert_eq!(tcp.out_of_order > 0, is_unordered);
    }
}

/// A reset, which belongs to the default class, does not overtake urgent data of its connection that wait in
/// the receive buffer.
#[test]
fn reset_does_not_overtake_delivered_data() {
    let mut hosts = hosts(true, 16_384, (100, 0), server(150));
    for connection in 0..100 {
        hosts.send(connection, connection as u32);
    }
    let now = hosts.clock.now();
    hosts.clients.with(now, |clients, cx| {
        for conn in &clients.conns {
            // Without its priority the segment is one of the default class.
            cx.set_priority(*conn, 0).unwrap();
            cx.abort(*conn).unwrap();
        }
    });
    hosts.clients.poll_once(now).unwrap();
    for _ in 0..10_000 {
        hosts.server_turn();
    }
    let server = hosts.server.handler();
    assert_eq!(server.handled_when_closed.len(), 100);
    let mut numbers: Vec<u32> = server.handled.iter().map(|(_, number)| *number).collect();
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(0..100), "{:?}", server.handled);
}

/// An urgent message comes first although an event about earlier bytes of its connection waits in a lower
/// class.
#[test]
fn urgent_message_overtakes_the_event_of_a_usual_one() {
    let mut hosts = hosts(true, 16_384, (64, 64), server(150));
    for connection in 0..64 {
        hosts.send(connection, connection as u32);
    }
    // All frames are processed in the first turn; the check interval leaves most events waiting.
    hosts.server_turn();
    let handled = hosts.server.handler().handled.len();
    assert!(handled < 8, "{handled}");
    hosts.set_priority(60, HIGH);
    hosts.send(60, 1000);
    while hosts.server.handler().handled.len() < 65 {
        hosts.server_turn();
    }
    let order: Vec<u32> = hosts.server.handler().handled.iter().map(|(_, number)| *number).collect();
    let position = order.iter().position(|number| *number == 1000).unwrap();
    assert!(position <= handled + 4, "{order:?}");
}

/// Peers that send 1.5 times what the server can handle are slowed down by their windows. After the first
/// second nothing has to be dropped, although each peer sends without a break, and the server is never idle.
/// High messages do not wait, which they do without priorities.
#[test]
fn sustained_overload_is_limited_by_windows() {
    const CONNECTIONS: usize = 400;
    const FIRST_HIGH: usize = 380;
    /// Messages of a segment, which takes the server 12 µs.
    const TOGETHER: usize = 12;
    for has_priorities in [true, false] {
        let mut hosts = hosts(has_priorities, 16_384, (CONNECTIONS, FIRST_HIGH), server(1));
        let begin = hosts.clock.now();
        let (mut sent, mut idle, mut shed_at_first) = (0, Duration::ZERO, None);
        while hosts.clock.now() - begin < Duration::from_secs(3) {
            let now = hosts.clock.now();
            if now - begin >= Duration::from_millis(1500) && shed_at_first.is_none() {
                shed_at_first = Some(hosts.server.stats().priority0_shed);
            }
            let due = (now - begin).as_micros() as usize / 8;
            hosts.clients.with(now, |clients, cx| {
                for number in sent..due {
                    let bytes = [message(number as u32); TOGETHER].concat();
                    assert_eq!(cx.send(clients.conns[number % CONNECTIONS], &bytes), Ok(bytes.len()));
                }
            });
            sent = due;
            hosts.clients.poll_once(now).unwrap();
            let handled = hosts.server.handler().handled.len();
            hosts.server_turn();
            if hosts.server.handler().handled.len() == handled {
                hosts.clock.advance(Duration::from_micros(10));
                idle += Duration::from_micros(10);
            }
        }
        let stats = *hosts.server.stats();
        assert_eq!(Some(stats.priority0_shed), shed_at_first, "{stats:?}");
        assert!(idle < Duration::from_millis(10), "{idle:?}");
        let handled = &hosts.server.handler().handled;
        let is_high = |number: u32| number as usize % CONNECTIONS >= FIRST_HIGH;
        let high = handled.iter().filter(|(_, number)| is_high(*number)).count() / TOGETHER;
        let high_sent = sent * (CONNECTIONS - FIRST_HIGH) / CONNECTIONS;
        let waiting = high_sent - high;
        if has_priorities {
            assert!(waiting < CONNECTIONS - FIRST_HIGH, "{high} of {high_sent} urgent segments");
            assert!(handled.iter().all(|(class, number)| (*class == 6) == is_high(*number)));
        } else {
            assert!(waiting > high_sent / 5, "{high} of {high_sent} urgent segments without priorities");
        }
    }
}
