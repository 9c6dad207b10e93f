//! Datagrams of sockets while a device has no room.

use super::*;
use crate::config::{DeviceConfig, DeviceKind, LinkConfig};
use crate::fixture::{config, host};
use crate::shard::Turn;
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::udp::{UdpError, UdpOptions, UdpSendParams};

fn peer() -> Peer {
    Peer { listens: true, echoes: true, ..Peer::default() }
}

/// Asserts that a turn did no work, and that the shard sleeps until datagrams are tried again 50 µs later,
/// which is now.
fn assert_sleeps_until_retry(fixture: &Fixture, turn: Turn) {
    assert_eq!((turn.work, turn.next_deadline), (0, Some(fixture.now)));
    let mut server = fixture.server.lock().unwrap();
    assert!(server.handler_mut().before_sleep());
    server.handler_mut().after_sleep(false);
}

/// The peer takes nothing for a while: datagrams wait, the writer finds no space, and then all arrive.
#[test]
fn datagrams_wait_while_the_device_is_full() {
    let mut fixture = Fixture::new(&ChannelConfig { socket_buffer_bytes: 1 << 18, ..small_config() }, peer());
    let mut client = fixture.client();
    let socket = client.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
    fixture
        .peer
        .with(fixture.now, |_, cx| cx.udp_bind("0.0.0.0:9".parse().unwrap(), UdpOptions::default()).unwrap());
    client.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
    fixture.run(Duration::from_millis(1));
    let params =
        UdpSendParams { to: None, source: None, gso_size: 0, hop_limit: None, tos: None, flow_label: None };
    // The address of the peer is resolved by a first datagram.
    client.udp_send_queued(socket, &params, &[]).unwrap();
    fixture.run(Duration::from_millis(1));
    assert_eq!(core::mem::take(&mut fixture.peer.handler_mut().datagrams), [vec![]]);
    let (mut written, mut turns_without_space) = (0u32, 0);
    while turns_without_space < 100 {
        let before = written;
        while client
            .udp_send_queued(socket, &params, &[std::io::IoSlice::new(&written.to_be_bytes())])
            .is_ok()
        {
            written += 1;
        }
        turns_without_space = if written == before { turns_without_space + 1 } else { 0 };
        assert!(written < 1_000_000, "the device takes all");
        let turn = fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
        fixture.now += Duration::from_micros(50);
        if turns_without_space > 1 {
            assert_sleeps_until_retry(&fixture, turn);
        }
    }
    while client.next_event().is_some() {}
    client.udp_send_queued(socket, &params, &[]).expect_err("there is no space");
    fixture.run(SECOND);
    let expected: Vec<Vec<u8>> = (0..written).map(|number| number.to_be_bytes().to_vec()).collect();
    assert!(fixture.peer.handler().datagrams == expected, "in order, each once");
    let events: Vec<_> = core::iter::from_fn(|| client.next_event()).collect();
    assert_eq!(events, [ClientEvent::Writable { conn: socket }]);
}

/// More sockets than a turn's budget is for have a datagram that the device refuses.
#[test]
fn shard_sleeps_while_thousands_of_sockets_are_refused() {
    const SOCKETS: usize = 1100;
    let config = ChannelConfig { sockets_max: 2 * SOCKETS as u32, ..small_config() };
    let mut fixture = Fixture::new(&config, peer());
    let mut client = fixture.client();
    fixture
        .peer
        .with(fixture.now, |_, cx| cx.udp_bind("0.0.0.0:9".parse().unwrap(), UdpOptions::default()).unwrap());
    let params =
        UdpSendParams { to: None, source: None, gso_size: 0, hop_limit: None, tos: None, flow_label: None };
    let mut open = |fixture: &mut Fixture| {
        let socket = client.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
        client.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
        client.udp_send_queued(socket, &params, &[]).unwrap();
        fixture.run(Duration::from_millis(1));
        socket
    };
    let sockets: Vec<Conn> = (0..SOCKETS).map(|_| open(&mut fixture)).collect();
    assert_eq!(core::mem::take(&mut fixture.peer.handler_mut().datagrams).len(), SOCKETS);
    // The first socket fills the device.
    let mut written = 0;
    let mut idle_turns = 0;
    while idle_turns < 3 {
        let before = written;
        while client.udp_send_queued(sockets[0], &params, &[]).is_ok() {
            written += 1;
        }
        idle_turns = if written == before { idle_turns + 1 } else { 0 };
        fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
        fixture.now += Duration::from_micros(50);
    }
    for &socket in &sockets[1..] {
        client.udp_send_queued(socket, &params, &[]).unwrap();
    }
    for turn in 0..100 {
        let done = fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
        fixture.now += Duration::from_micros(50);
        if turn > 20 {
            assert_sleeps_until_retry(&fixture, done);
        }
    }
    fixture.run(SECOND);
    assert_eq!(fixture.peer.handler().datagrams.len(), written + SOCKETS - 1);
}

/// A socket with many datagrams does not take all the room of a slow device: one with few loses none.
#[test]
fn refused_sockets_take_turns() {
    let mut fixture = Fixture::new(&ChannelConfig { socket_buffer_bytes: 1 << 18, ..small_config() }, peer());
    let mut client = fixture.client();
    fixture
        .peer
        .with(fixture.now, |_, cx| cx.udp_bind("0.0.0.0:9".parse().unwrap(), UdpOptions::default()).unwrap());
    let params =
        UdpSendParams { to: None, source: None, gso_size: 0, hop_limit: None, tos: None, flow_label: None };
    let [many, few] = [(); 2].map(|()| {
        let socket = client.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
        client.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
        client.udp_send_queued(socket, &params, &[]).unwrap();
        fixture.run(Duration::from_millis(1));
        socket
    });
    let (mut written, mut was_full) = (0, false);
    for turn in 0..4000 {
        while client.udp_send_queued(many, &params, &[std::io::IoSlice::new(b"many")]).is_ok() {}
        if turn % 8 == 0 {
            let sent = client.udp_send_queued(few, &params, &[std::io::IoSlice::new(b"few")]);
            written += usize::from(sent.is_ok());
        }
        let done = fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
        was_full |= turn > 100 && done.work == 0;
        if turn % 4 == 0 {
            fixture.peer.poll_once(fixture.now).unwrap();
        }
        fixture.now += Duration::from_micros(50);
    }
    fixture.run(SECOND);
    let received = fixture.peer.handler().datagrams.iter().filter(|data| *data == b"few").count();
    assert_eq!((received, written, fixture.stats().datagrams_refused), (500, 500, 0));
    assert!(was_full, "the device was never full");
}

/// A host with a socket and two links. The peer of the second one takes nothing after the first datagram.
struct TwoLinks {
    fixture: Fixture,
    client: Client,
    socket: Conn,
    stopped: Shard<Peer>,
}

const GOOD: &str = "10.0.0.2:9";
const STOPPED: &str = "10.0.1.2:9";

impl TwoLinks {
    fn new() -> Self {
        let [(a, good), (b, stopped)] = [(); 2].map(|()| pair(MemoryConfig::default()));
        let mut two = config(&["10.0.0.1/24"]);
        two.devices.push(DeviceConfig::new("second", DeviceKind::Memory));
        two.links.push(LinkConfig::new("link1", "second", vec!["10.0.1.1/24".parse().unwrap()]));
        let server = ChannelServer::new(&small_config()).unwrap();
        let server = Shard::builder(two).handler(server).device("cable", a).device("second", b);
        let server = Arc::new(Mutex::new(server.seed([1; 32]).now(START).build().unwrap()));
        let peer = |address: &str, device| {
            let mut shard = host(address, peer(), device).seed([2; 32]).now(START).build().unwrap();
            let bind = |cx: &mut Context<'_>| cx.udp_bind(([0, 0, 0, 0], 9).into(), UdpOptions::default());
            shard.with(START, |_, cx| bind(cx).unwrap());
            shard
        };
        let fixture = Fixture { server, peer: peer("10.0.0.2/24", good), now: START };
        let mut client = fixture.client();
        let socket = client.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
        let mut links = Self { fixture, client, socket, stopped: peer("10.0.1.2/24", stopped) };
        // The addresses of the peers are resolved.
        links.write(&[GOOD, STOPPED]);
        for _ in 0..10 {
            links.stopped.poll_once(links.fixture.now).unwrap();
            links.run(Duration::from_micros(50));
        }
        assert_eq!([links.received(), links.stopped.handler().datagrams.len()], [1, 1]);
        let mut server = links.fixture.server.lock().unwrap();
        server.with(links.fixture.now, |_, cx| {
            let filler = cx.udp_bind(([0, 0, 0, 0], 8).into(), UdpOptions::default()).unwrap();
            let to = Some(STOPPED.parse().unwrap());
            for len in [1000, 1] {
                while cx.udp_send(filler, to, &[0; 1000][..len]) != Err(UdpError::DeviceFull) {}
            }
        });
        drop(server);
        links
    }

    /// Writes a datagram to each of the destinations.
    fn write(&mut self, to: &[&str]) {
        for to in to {
            let to = Some(to.parse().unwrap());
            let params =
                UdpSendParams { to, source: None, gso_size: 0, hop_limit: None, tos: None, flow_label: None };
            self.client.udp_send_queued(self.socket, &params, &[std::io::IoSlice::new(b"?")]).unwrap();
        }
    }

    /// Lets time pass for the host and the first peer.
    fn run(&mut self, time: Duration) {
        let end = self.fixture.now + time;
        while self.fixture.now < end {
            self.fixture.server.lock().unwrap().poll_once(self.fixture.now).unwrap();
            self.fixture.peer.poll_once(self.fixture.now).unwrap();
            self.fixture.now += Duration::from_micros(50);
        }
    }

    /// Returns the number of datagrams that the first peer has received.
    fn received(&self) -> usize {
        self.fixture.peer.handler().datagrams.len()
    }
}

// limit: time that a datagram waits for a device
#[test]
fn full_device_delays_other_links_by_bounded_time() {
    const MS: Duration = Duration::from_millis(1);
    let mut links = TwoLinks::new();
    links.write(&[&[STOPPED; 20][..], &[GOOD]].concat());
    links.run(9 * MS);
    assert_eq!((links.received(), links.fixture.stats().datagrams_refused), (1, 0));
    links.run(2 * MS);
    assert_eq!((links.received(), links.fixture.stats().datagrams_refused), (2, 20));
    // For the next 100 ms, nothing waits.
    for round in 1..=90 {
        links.write(&[STOPPED, GOOD]);
        links.run(MS);
        assert_eq!(
            (links.received(), links.fixture.stats().datagrams_refused),
            (2 + round, 20 + round as u64)
        );
    }
    links.run(20 * MS);
    // Then a datagram waits again, and is sent if the device has room in time.
    links.write(&[STOPPED, GOOD]);
    links.run(8 * MS);
    assert_eq!((links.received(), links.fixture.stats().datagrams_refused), (92, 110));
    while links.stopped.poll_once(links.fixture.now).unwrap().work > 0 {}
    links.run(MS);
    assert_eq!((links.received(), links.fixture.stats().datagrams_refused), (93, 110));
    while links.stopped.poll_once(links.fixture.now).unwrap().work > 0 {}
    assert_eq!(links.stopped.handler().datagrams.iter().filter(|data| *data == b"?").count(), 2);
}
