//! The channel between a shard and clients, in simulated time and on threads. The peer is an ordinary handler
//! at the other end of a memory device.

use super::control::SameThread;
use super::{ChannelConfig, ChannelServer, Client, ClientEvent};
use crate::clock;
use crate::fixture::{START, linked_hosts, next_turn};
use crate::{
    CloseReason, Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Listener, SendError,
    Shard, StopFlag,
};
use core::any::Any;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::udp::Datagram;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

mod cpu_yields;
mod device_full;
mod filters;
mod large_buffers;
mod limits;
mod many;
mod notsent;
mod options;
mod preallocated;
mod prioritized;
mod saved;
mod shared;
mod shed;
mod stages;
mod zero_copy;

const SECOND: Duration = Duration::from_secs(1);

/// The peer: opens connections or listens, sends the bytes it is given and keeps the bytes it receives.
#[derive(Default)]
pub(crate) struct Peer {
    /// Bytes received on each connection, in the order in which the connections were opened.
    pub(crate) received: Vec<Vec<u8>>,
    pub(crate) close_reasons: Vec<Option<CloseReason>>,
    pub(crate) has_fin: Vec<bool>,
    pub(crate) to_send: Vec<(Vec<u8>, usize)>,
    pub(crate) numbers: HashMap<Conn, usize>,
    pub(crate) conns: Vec<Conn>,
    /// It closes its write side when all is sent.
    pub(crate) close_when_sent: bool,
    pub(crate) listens: bool,
    /// It echoes.
    pub(crate) echoes: bool,
    pub(crate) datagrams: Vec<Vec<u8>>,
}

/// Makes the peer open a connection to this port and send these bytes.
pub(crate) struct ConnectCommand(pub u16, pub Vec<u8>);

impl Peer {
    pub(crate) fn add(&mut self, conn: Conn, text: &[u8]) {
        self.numbers.insert(conn, self.conns.len());
        self.conns.push(conn);
        self.received.push(Vec::new());
        self.close_reasons.push(None);
        self.has_fin.push(false);
        self.to_send.push((text.to_vec(), 0));
    }

    fn push(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let (text, sent) = &mut self.to_send[self.numbers[&conn]];
        if *sent < text.len()
            && let Ok(count) = cx.send(conn, &text[*sent..])
        {
            *sent += count;
        }
        if *sent == text.len() && self.close_when_sent {
            cx.shutdown_write(conn).ok();
        }
    }
}

impl Handler for Peer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        if self.listens {
            cx.listen("0.0.0.0:90".parse().unwrap(), ListenOptions::default())?;
        }
        Ok(())
    }

    fn command(&mut self, cx: &mut Context<'_>, command: Box<dyn Any + Send>) {
        let ConnectCommand(port, text) = *command.downcast().unwrap();
        let conn = cx.connect(([10, 0, 0, 1], port).into(), ConnectOptions::default()).unwrap();
        self.add(conn, &text);
    }

    fn accepted(&mut self, _cx: &mut Context<'_>, conn: Conn, _listener: Listener) {
        self.add(conn, b"");
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.push(cx, conn);
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        self.received[self.numbers[&conn]].extend(data);
        if self.echoes {
            self.to_send[self.numbers[&conn]].0.extend(data);
            self.push(cx, conn);
        }
        data.len()
    }

    fn datagram(&mut self, _: &mut Context<'_>, _: UdpHandle, _: &Datagram, data: &[u8]) {
        self.datagrams.push(data.to_vec());
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.push(cx, conn);
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.has_fin[self.numbers[&conn]] = true;
        cx.close(conn).ok();
    }

    fn closed(&mut self, _cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        self.close_reasons[self.numbers[&conn]] = Some(reason);
    }
}

type Server = Arc<Mutex<Shard<ChannelServer>>>;

/// A shard with a channel at 10.0.0.1 and a peer at 10.0.0.2, in simulated time.
struct Fixture {
    server: Server,
    peer: Shard<Peer>,
    now: Instant,
}

fn shards(channel: &ChannelConfig, peer: Peer, now: Instant) -> (Shard<ChannelServer>, Shard<Peer>) {
    linked_hosts(ChannelServer::new(channel).unwrap(), peer, now)
}

pub(crate) fn small_config() -> ChannelConfig {
    ChannelConfig { sockets_max: 8, clients_max: 3, socket_buffer_bytes: 4096, ..ChannelConfig::default() }
}

impl Fixture {
    fn new(channel: &ChannelConfig, peer: Peer) -> Self {
        let (server, peer) = shards(channel, peer, START);
        let mut fixture = Self { server: Arc::new(Mutex::new(server)), peer, now: START };
        fixture.run(Duration::from_millis(1));
        fixture
    }

    fn client(&self) -> Client {
        let control = Box::new(SameThread(self.server.clone()));
        self.server.lock().unwrap().handler_mut().attach(control).unwrap()
    }

    /// Advances the time.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let a = self.server.lock().unwrap().poll_once(self.now).unwrap();
            let b = self.peer.poll_once(self.now).unwrap();
            self.now = next_turn(self.now, [a, b]).unwrap_or(end).min(end);
        }
    }

    /// Makes the peer open a connection and send `text`. Returns the connection's number at the peer.
    fn connect_peer(&mut self, text: &[u8]) -> usize {
        let to: SocketAddr = "10.0.0.1:80".parse().unwrap();
        self.peer.with(self.now, |peer, cx| {
            let conn = cx.connect(to, ConnectOptions::default()).unwrap();
            peer.add(conn, text);
            peer.conns.len() - 1
        })
    }

    /// Lets five milliseconds pass. Returns the client's events until then.
    fn events(&mut self, client: &mut Client) -> Vec<ClientEvent> {
        self.run(Duration::from_millis(5));
        core::iter::from_fn(|| client.next_event()).collect()
    }

    fn sockets_in_use(&self) -> usize {
        self.server.lock().unwrap().handler().sockets_in_use()
    }

    fn stats(&self) -> super::ChannelStats {
        self.server.lock().unwrap().handler().stats()
    }
}

fn listen(client: &mut Client, credits: u32) -> u32 {
    client.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default(), credits).unwrap()
}

/// Returns the connections that were accepted among some events.
pub(crate) fn accepted(events: &[ClientEvent]) -> Vec<Conn> {
    let conns = events.iter().map(|event| match event {
        ClientEvent::Accepted { conn, .. } => Some(*conn),
        _ => None,
    });
    conns.flatten().collect()
}

#[test]
fn accepts_reads_answers_and_closes_a_connection() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let mut client = fixture.client();
    let listener = listen(&mut client, 4);
    fixture.connect_peer(b"request");
    let events = fixture.events(&mut client);
    let conn = accepted(&events)[0];
    assert_eq!(events, [ClientEvent::Accepted { conn, listener }, ClientEvent::Readable { conn }]);
    let [local, remote] = client.endpoints(conn).unwrap();
    assert_eq!((local, remote.ip()), ("10.0.0.1:80".parse().unwrap(), "10.0.0.2".parse().unwrap()));
    assert_eq!(client.info(conn).unwrap().remote, remote);
    let mut out = [0; 64];
    assert_eq!(client.peek(conn, 3, &mut out), Ok(4));
    assert_eq!(&out[..4], b"uest");
    assert_eq!(client.recv(conn, &mut out), Ok(7));
    assert_eq!(&out[..7], b"request");
    assert_eq!(client.recv(conn, &mut out), Ok(0));
    assert_eq!(client.send(conn, b"response"), Ok(8));
    client.close(conn).unwrap();
    assert_eq!(client.send(conn, b"more"), Err(SendError::Closed));
    let events = fixture.events(&mut client);
    assert_eq!(events.last(), Some(&ClientEvent::Closed { conn, reason: CloseReason::Normal }));
    assert_eq!(fixture.peer.handler().received[0], b"response");
    assert_eq!(fixture.peer.handler().close_reasons[0], Some(CloseReason::Normal));
    assert_eq!(fixture.sockets_in_use(), 1, "the client still owns it");
    client.release(conn).unwrap();
    assert!(client.release(conn).is_err() && client.endpoints(conn).is_err(), "stale");
    fixture.run(SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
}

#[test]
fn connect_succeeds_or_reports_refusal() {
    let mut fixture = Fixture::new(&small_config(), Peer { listens: true, echoes: true, ..Peer::default() });
    let mut client = fixture.client();
    let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    // Bytes written before the connection is established are sent when it is.
    assert_eq!(client.send(conn, b"early"), Ok(5));
    let events = fixture.events(&mut client);
    assert_eq!(events, [ClientEvent::Connected { conn }, ClientEvent::Readable { conn }]);
    assert_eq!(client.endpoints(conn).unwrap()[1], "10.0.0.2:90".parse().unwrap());
    client.shutdown_write(conn).unwrap();
    let events = fixture.events(&mut client);
    assert_eq!(events[0], ClientEvent::PeerClosed { conn });
    assert!(fixture.peer.handler().has_fin[0], "FIN follows the written bytes");
    let mut out = [0; 8];
    assert_eq!(client.recv(conn, &mut out), Ok(5), "bytes are readable after FIN");
    let refused = client.connect("10.0.0.2:91".parse().unwrap(), ConnectOptions::default()).unwrap();
    let events = fixture.events(&mut client);
    assert!(
        events.contains(&ClientEvent::Closed { conn: refused, reason: CloseReason::Refused }),
        "{events:?}"
    );
    let error = client.connect("192.0.2.1:1".parse().unwrap(), ConnectOptions::default());
    assert!(matches!(error, Err(Error::Connect(..))), "{error:?}");
}

/// Uses random sizes and buffers of one page, in both directions at once, with an application that pauses
/// reading.
#[test]
fn bytes_pass_in_order_both_ways_despite_pauses() {
    for seed in 0..6 {
        let mut random = Random::new(seed);
        let text: Vec<u8> = (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut fixture = Fixture::new(&small_config(), Peer { close_when_sent: true, ..Peer::default() });
        let mut client = fixture.client();
        listen(&mut client, 1);
        fixture.connect_peer(&text);
        let conn = accepted(&fixture.events(&mut client))[0];
        let (mut got, mut sent, mut out) = (Vec::<u8>::new(), 0, vec![0; 5000]);
        let mut pause = 0;
        for _ in 0..200_000 {
            let step = random.next_u64() % 200;
            fixture.run(Duration::from_micros(1 + step));
            if pause == 0 && random.next_u64().is_multiple_of(500) {
                pause = 300;
            }
            while client.next_event().is_some() {}
            if pause > 0 {
                pause -= 1;
            } else {
                let max = 1 + random.next_u64() as usize % out.len();
                let count = client.recv(conn, &mut out[..max]).unwrap();
                got.extend(&out[..count]);
            }
            let max = random.next_u64() as usize % 9000;
            let end = (sent + max).min(text.len());
            sent += client.send(conn, &text[sent..end]).unwrap();
            if got.len() == text.len() && sent == text.len() {
                break;
            }
        }
        assert!(got == text, "seed {seed}: {} of {} bytes came, {sent} were sent", got.len(), text.len());
        client.close(conn).unwrap();
        fixture.run(SECOND);
        assert!(fixture.peer.handler().received[0] == text, "seed {seed}: bytes received by the peer");
        assert_eq!(fixture.peer.handler().close_reasons[0], Some(CloseReason::Normal), "seed {seed}");
    }
}

// limit: channel.socket_buffer_bytes
#[test]
fn unread_bytes_close_the_window_until_read() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let mut client = fixture.client();
    listen(&mut client, 1);
    fixture.connect_peer(&vec![7; 10_000_000]);
    let conn = accepted(&fixture.events(&mut client))[0];
    fixture.run(10 * SECOND);
    assert_eq!(client.readable(conn), Ok(4096));
    let sent = fixture.peer.handler().to_send[0].1;
    fixture.run(10 * SECOND);
    assert_eq!(
        (fixture.peer.handler().to_send[0].1, sent < 10_000_000),
        (sent, true),
        "the advertised window is closed"
    );
    assert_eq!(client.send(conn, &vec![1; 10_000_000]), Ok(4096));
    assert_eq!(fixture.events(&mut client).last(), Some(&ClientEvent::Writable { conn }));
}

#[test]
fn close_resets_if_unread_and_sends_if_unsent() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let mut client = fixture.client();
    listen(&mut client, 2);
    fixture.connect_peer(b"never read");
    fixture.connect_peer(b"");
    let conns = accepted(&fixture.events(&mut client));
    client.close(conns[0]).unwrap();
    assert_eq!(client.send(conns[1], &[3; 4096]), Ok(4096));
    // The last owner to release a connection closes it.
    client.release(conns[1]).unwrap();
    client.release(conns[0]).unwrap();
    fixture.run(SECOND);
    assert_eq!(
        fixture.peer.handler().close_reasons[..2],
        [Some(CloseReason::Reset), Some(CloseReason::Normal)]
    );
    assert_eq!(fixture.peer.handler().received[1], [3; 4096]);
    assert_eq!(fixture.sockets_in_use(), 0);
}

// limit: channel.sockets_max
#[test]
fn accepts_need_credit_and_stop_at_sockets_max() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let mut client = fixture.client();
    let listener = listen(&mut client, 0);
    for _ in 0..12 {
        fixture.connect_peer(b"hello");
    }
    assert_eq!(fixture.events(&mut client), []);
    client.set_credits(listener, 64);
    client.flush();
    let first = accepted(&fixture.events(&mut client));
    assert_eq!(first.len(), 8, "sockets_max");
    assert_eq!(fixture.sockets_in_use(), 8);
    // Further connections are established and wait in the engine.
    assert_eq!(fixture.peer.handler().close_reasons.iter().flatten().count(), 0);
    for conn in &first {
        client.release(*conn).unwrap();
    }
    let second = accepted(&fixture.events(&mut client));
    assert_eq!(second.len(), 4);
    assert!(second.iter().all(|conn| client.readable(*conn) == Ok(5)));
    client.unlisten(listener).unwrap();
    fixture.connect_peer(b"too late");
    fixture.run(SECOND);
    assert_eq!(fixture.peer.handler().close_reasons[12], Some(CloseReason::Refused));
}

#[test]
fn expired_offers_go_to_another_worker() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let (mut lazy, mut eager) = (fixture.client(), fixture.client());
    let listener = listen(&mut lazy, 8);
    for _ in 0..3 {
        fixture.connect_peer(b"x");
    }
    // `lazy` never processes its events.
    fixture.run(Duration::from_millis(30));
    eager.join(listener, 8).unwrap();
    fixture.run(Duration::from_millis(10));
    assert_eq!(accepted(&fixture.events(&mut eager)), [], "the offers have not expired");
    fixture.run(Duration::from_millis(60));
    assert_eq!(accepted(&fixture.events(&mut eager)).len(), 3);
    assert_eq!(fixture.stats().offers_revoked, 3);
    fixture.connect_peer(b"x");
    assert_eq!(
        accepted(&fixture.events(&mut eager)).len(),
        1,
        "at once: offers to the other one are suspended"
    );
    // When it notifies again, it gets its share.
    lazy.set_credits(listener, 8);
    eager.set_credits(listener, 0);
    fixture.run(Duration::from_millis(1));
    fixture.connect_peer(b"x");
    let events = fixture.events(&mut lazy);
    assert_eq!(accepted(&events).len(), 1, "{events:?}");
}

#[test]
fn detaching_closes_sockets_and_returns_offers() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let (mut first, mut second) = (fixture.client(), fixture.client());
    let listener = listen(&mut first, 1);
    fixture.connect_peer(b"");
    let conn = accepted(&fixture.events(&mut first))[0];
    fixture.connect_peer(b"offered");
    fixture.run(Duration::from_millis(5));
    second.join(listener, 4).unwrap();
    assert!(second.join(listener + 1, 4).is_err());
    // Written without a notification: the bytes are sent nevertheless.
    first.send(conn, b"last words").unwrap();
    drop(first);
    fixture.run(Duration::from_millis(5));
    assert_eq!(fixture.peer.handler().received[0], b"last words");
    assert!(fixture.peer.handler().has_fin[0]);
    let conns = accepted(&fixture.events(&mut second));
    assert_eq!(conns.len(), 1);
    assert_eq!(second.readable(conns[0]), Ok(7));
    drop(second);
    fixture.run(SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
}

/// A process was killed, and another one listens at the same address a little later.
#[test]
fn connections_wait_for_the_next_listener_after_a_client_has_ended() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let (mut first, mut second) = (fixture.client(), fixture.client());
    listen(&mut first, 1);
    drop(first);
    fixture.run(Duration::from_millis(5));
    fixture.connect_peer(b"early");
    fixture.run(Duration::from_millis(100));
    listen(&mut second, 1);
    fixture.run(Duration::from_millis(5));
    let conns = accepted(&fixture.events(&mut second));
    assert_eq!(conns.len(), 1);
    assert_eq!(second.readable(conns[0]), Ok(5));
}

// limit: channel.clients_max
#[test]
fn clients_max_is_enforced_and_numbers_are_reused() {
    let fixture = Fixture::new(&small_config(), Peer::default());
    let mut clients: Vec<Client> = (0..3).map(|_| fixture.client()).collect();
    let attach = || {
        let control = Box::new(SameThread(fixture.server.clone()));
        fixture.server.lock().unwrap().handler_mut().attach(control)
    };
    assert!(attach().err().unwrap().to_string().contains("channel.clients_max"));
    clients.pop();
    assert!(attach().is_ok());
}

/// A client writes random values into the region: the stack continues, and serves the next client of the
/// domain.
#[test]
fn corrupt_region_leaves_the_stack_working() {
    let mut violations_seen = 0;
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let mut fixture =
            Fixture::new(&small_config(), Peer { listens: true, echoes: true, ..Peer::default() });
        let parts = fixture.server.lock().unwrap().handler_mut().attach_process().unwrap();
        let files = [parts.region.try_clone().unwrap(), parts.memory.try_clone().unwrap()];
        let mut hostile = Client::open(parts, Box::new(SameThread(fixture.server.clone()))).unwrap();
        listen(&mut hostile, 3);
        let sizes = files.each_ref().map(|file| rustix::fs::fstat(file).unwrap().st_size as u64);
        for _ in 0..60 {
            fixture.connect_peer(b"something");
            let _ = fixture.events(&mut hostile);
            let _ = hostile.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default());
            // Half of the writes go near to words that are in use.
            for _ in 0..200 {
                let index = random.below(2) as usize;
                let size = sizes[index];
                let spread = if random.next_u64().is_multiple_of(2) { size } else { size.min(32 << 10) };
                let (at, word) = (random.next_u64() % (spread - 8), random.next_u64());
                let value = word >> (random.next_u64() % 64);
                rustix::io::pwrite(&files[index], &value.to_ne_bytes(), at).unwrap();
            }
            fixture.run(Duration::from_millis(20));
            fixture.server.lock().unwrap().core.stack.local().unwrap().check_invariants();
        }
        let violations = fixture.stats().violations;
        violations_seen += violations;
        // Nothing of the client is left.
        drop(hostile);
        fixture.run(300 * SECOND);
        assert_eq!(fixture.sockets_in_use(), 0, "seed {seed}: {violations} violations");
        let mut good = fixture.client();
        listen(&mut good, 1);
        fixture.connect_peer(b"as ever");
        let conns = accepted(&fixture.events(&mut good));
        assert_eq!(good.readable(conns[0]), Ok(7), "seed {seed}");
    }
    assert!(violations_seen > 20, "only {violations_seen} violations were detected");
}

/// Both sides sleep in the kernel between requests, and no wake-up is lost.
#[test]
fn threads_wake_each_other_without_lost_wakeups() {
    const ROUNDS: usize = 3000;
    let now = clock::now();
    let (mut server, mut peer) = shards(&small_config(), Peer { echoes: true, ..Peer::default() }, now);
    let commander = server.commander();
    let mut client = server.handler_mut().attach(Box::new(commander)).unwrap();
    let stop = StopFlag::new().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run(&stop).unwrap());
        listen(&mut client, 1);
        peer.poll_once(clock::now()).unwrap();
        peer.with(clock::now(), |peer, cx| {
            let conn = cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).unwrap();
            peer.add(conn, b"?");
        });
        scope.spawn(|| peer.run(&stop).unwrap());
        let (mut rounds, mut out) = (0, [0; 64]);
        while rounds < ROUNDS {
            let Some(event) = client.next_event() else {
                client.sleep(None).unwrap();
                continue;
            };
            if let ClientEvent::Readable { conn } = event {
                let count = client.recv(conn, &mut out).unwrap();
                client.send(conn, &out[..count]).unwrap();
                rounds += count;
            }
        }
        client.detach().unwrap();
        stop.stop();
    });
}

#[test]
fn explicit_accept_follows_order_of_arrival() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let mut client = fixture.client();
    client.accept_explicitly();
    let listener = listen(&mut client, 8);
    let mut accepted_order = Vec::new();
    let mut take = |fixture: &mut Fixture, client: &mut Client, count: usize| {
        // The SYN of the peer leaves at the end of the first millisecond.
        fixture.run(Duration::from_millis(1));
        fixture.run(Duration::from_millis(5));
        while client.next_event().is_some() {}
        for _ in 0..count {
            assert!(client.has_offer(listener), "{accepted_order:?}");
            let conn = client.accept(listener).unwrap();
            let mut bytes = [0; 8];
            let count = client.recv(conn, &mut bytes).unwrap();
            accepted_order.push(String::from_utf8(bytes[..count].to_vec()).unwrap());
            client.release(conn).unwrap();
        }
        client.flush();
        fixture.run(Duration::from_millis(5));
    };
    for name in ["a", "b", "c"] {
        fixture.connect_peer(name.as_bytes());
        fixture.run(Duration::from_millis(1));
    }
    take(&mut fixture, &mut client, 1);
    // The free slot is used by a later connection, which is accepted later.
    fixture.connect_peer(b"d");
    take(&mut fixture, &mut client, 3);
    assert!(!client.has_offer(listener) && client.accept(listener).is_none());
    assert_eq!(accepted_order, ["a", "b", "c", "d"]);
}

/// Offers a connection to the first of two clients of a listener until the offer is revoked. Returns the
/// clients and the listener.
fn let_offer_expire(fixture: &mut Fixture) -> (Client, Client, u32) {
    let (mut lazy, mut eager) = (fixture.client(), fixture.client());
    for client in [&mut lazy, &mut eager] {
        client.accept_explicitly();
    }
    let listener = listen(&mut lazy, 8);
    eager.join(listener, 0).unwrap();
    fixture.connect_peer(b"x");
    fixture.run(Duration::from_millis(5));
    while lazy.next_event().is_some() {}
    assert!(lazy.has_offer(listener));
    eager.set_credits(listener, 8);
    fixture.run(Duration::from_millis(100));
    (lazy, eager, listener)
}

#[test]
fn client_that_was_too_slow_claims_a_connection() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let (mut first, mut second, listener) = let_offer_expire(&mut fixture);
    while second.next_event().is_some() {}
    assert!(!first.has_offer(listener) && second.has_offer(listener));
    // The first client asks before the second one accepts.
    assert_eq!(first.accept(listener), None);
    while first.next_event().is_some() {}
    assert!(first.has_offer(listener) && !second.has_offer(listener));
    assert!(first.accept(listener).is_some() && second.accept(listener).is_none());
    // Nothing is offered to another client, and then nothing waits.
    assert_eq!((first.accept(listener), fixture.stats().offers_revoked), (None, 2));
}

#[test]
fn revoked_offer_is_offered_again() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let (mut lazy, mut eager, listener) = let_offer_expire(&mut fixture);
    assert!(!lazy.has_offer(listener), "it is offered to the other client");
    // The other client does not accept it either, and the first one asks again.
    eager.set_credits(listener, 0);
    lazy.set_credits(listener, 8);
    fixture.run(Duration::from_millis(200));
    while eager.next_event().is_some() {}
    while lazy.next_event().is_some() {}
    let offered = [lazy.has_offer(listener), eager.has_offer(listener)];
    assert_eq!(offered.iter().filter(|o| **o).count(), 1, "{offered:?}");
    let conn = lazy.accept(listener).or_else(|| eager.accept(listener));
    assert!(conn.is_some());
}
