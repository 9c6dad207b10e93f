//! A server that is saved and continues in another shard, while its clients stay what they are.

mod damaged;
mod datagrams;
mod listeners;

use super::*;
use crate::channel::simulation::SimulatedDomain;
use crate::fixture::{CLIENT_ADDRESS, SERVER_ADDRESS, config, host, pass_frames};
use crate::saved_shard::SavedShard;
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::Device;
use std::sync::MutexGuard;

/// Limit of the timers of each shard.
const TIMERS_MAX: u32 = 1000;

/// A shard at 10.0.0.1 and a peer at 10.0.0.2. Frames pass between two links, so that the shard can get
/// another device.
struct SavedFixture {
    server: Server,
    peer: Shard<Peer>,
    /// The far ends of both links.
    wire: [Device; 2],
    channel: ChannelConfig,
    now: Instant,
}

/// Builds a shard without clients. Returns the far end of its link.
fn build_server(channel: &ChannelConfig, now: Instant) -> (Shard<ChannelServer>, Device) {
    let (device, far) = pair(MemoryConfig::default().without_offloads());
    let mut config = config(&[SERVER_ADDRESS]);
    config.tcp.send_buffer_first_bytes = config.tcp.send_buffer_bytes;
    config.shard.timers_max = TIMERS_MAX;
    let server = Shard::builder(config).handler(ChannelServer::for_processes(channel).unwrap());
    (server.device("cable", device).seed([1; 32]).now(now).build().unwrap(), far)
}

impl SavedFixture {
    fn new(channel: &ChannelConfig, peer: Peer) -> Self {
        let (server, server_far) = build_server(channel, START);
        let (device, peer_far) = pair(MemoryConfig::default().without_offloads());
        let peer = host(CLIENT_ADDRESS, peer, device).seed([2; 32]).now(START).build().unwrap();
        let (server, wire) = (Arc::new(Mutex::new(server)), [server_far, peer_far]);
        let mut fixture = Self { server, peer, wire, channel: channel.clone(), now: START };
        fixture.run(Duration::from_millis(1));
        fixture
    }

    fn server(&self) -> MutexGuard<'_, Shard<ChannelServer>> {
        self.server.lock().unwrap()
    }

    fn open_domain(&self) -> (SimulatedDomain, Client) {
        let (domain, parts) = SameThread(self.server.clone()).open_domain().unwrap();
        let client = Client::open(parts, Box::new(domain.clone())).unwrap();
        (domain, client)
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let server = self.server().poll_once(self.now).unwrap();
            let [near, far] = &mut self.wire;
            let passed = pass_frames(near, far, self.now);
            let mut peer = self.peer.poll_once(self.now).unwrap();
            peer.work += passed + pass_frames(far, near, self.now);
            self.now = next_turn(self.now, [server, peer]).unwrap_or(end).min(end);
        }
    }

    fn events(&mut self, client: &mut Client) -> Vec<ClientEvent> {
        self.run(Duration::from_millis(5));
        core::iter::from_fn(|| client.next_event()).collect()
    }

    fn save(&self) -> SavedShard {
        self.server().save().expect("the shard can be saved")
    }

    /// Replaces the shard by a new one with this state. What devices hold is lost.
    fn restore(&mut self, saved: SavedShard) {
        let (mut server, far) = build_server(&self.channel, self.now);
        self.wire[0] = far;
        server.restore(saved).expect("the state is valid");
        *self.server() = server;
    }

    /// Saves the shard, and continues with another one.
    fn replace_shard(&mut self) {
        let saved = self.save();
        self.restore(saved);
    }

    fn connect_peer(&mut self, text: &[u8]) -> usize {
        self.peer.with(self.now, |peer, cx| {
            let conn = cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).unwrap();
            peer.add(conn, text);
            peer.conns.len() - 1
        })
    }

    /// Begins to sample the latency stages of a connection.
    fn sample_stages(&self, ends: [SocketAddr; 2]) {
        let sampler = crate::stages::StageSampler::new(clock::now, &[ends]);
        let mut sockets = Vec::new();
        let mut server = self.server();
        let stack = server.core.stack.local().unwrap();
        stack.list(self.now, ginnel_stack::stack::ListCursor::default(), 64, &mut sockets);
        let conn = sockets.iter().find_map(|socket| match socket.handle {
            Some(ginnel_stack::stack::SocketHandle::Conn(conn)) => Some(conn),
            _ => None,
        });
        let sampled =
            server.with(self.now, |server, cx| server.set_stages(cx, conn.unwrap(), Some((sampler, 0))));
        assert!(sampled);
    }

    /// Checks that nothing is left after all clients are gone.
    fn assert_all_freed(&mut self) {
        self.run(300 * SECOND);
        let server = self.server();
        assert_eq!((server.handler().sockets_in_use(), server.handler().domains()), (0, 0));
        assert_eq!(server.handler().stats().violations, 0);
        server.check_invariants();
    }
}

fn bytes(count: usize, step: usize) -> Vec<u8> {
    (0..count).map(|at| (at * step % 251) as u8).collect()
}

fn peer_port() -> SocketAddr {
    "10.0.0.2:90".parse().unwrap()
}

/// Reads all that there is.
fn read_all(client: &mut Client, conn: Conn) -> Vec<u8> {
    let (mut all, mut out) = (Vec::new(), [0; 8192]);
    while let Ok(count @ 1..) = client.recv(conn, &mut out) {
        all.extend_from_slice(&out[..count]);
    }
    all
}

/// Sends and receives on a connection to a peer that echoes, and replaces the shard now and then.
fn transfer(channel: &ChannelConfig, total: usize, write: usize) -> SavedFixture {
    let mut fixture = SavedFixture::new(channel, Peer { listens: true, echoes: true, ..Peer::default() });
    let (_domain, mut client) = fixture.open_domain();
    let conn = client.connect(peer_port(), ConnectOptions::default()).unwrap();
    let sent = bytes(total, 7);
    let (mut written, mut received, mut rounds) = (0, Vec::new(), 0);
    while received.len() < total {
        let until = total.min(written + write);
        written += client.send(conn, &sent[written..until]).unwrap();
        client.flush();
        if rounds % 7 == 3 {
            fixture.replace_shard();
        }
        fixture.run(Duration::from_micros(300));
        received.extend(read_all(&mut client, conn));
        client.flush();
        rounds += 1;
        assert!(rounds < 20_000, "{written} written, {} received", received.len());
    }
    assert!(received == sent);
    assert!(fixture.peer.handler().received[0] == sent);
    client.check_stack_alive();
    assert!(!client.is_stack_gone());
    client.close(conn).unwrap();
    let events = fixture.events(&mut client);
    assert_eq!(events.last(), Some(&ClientEvent::Closed { conn, reason: CloseReason::Normal }));
    client.release(conn).unwrap();
    drop(client);
    fixture
}

#[test]
fn transfer_goes_on_in_another_shard() {
    let mut fixture = transfer(&small_config(), 300_000, 3000);
    fixture.assert_all_freed();
}

#[test]
fn lent_bytes_go_on_in_another_shard() {
    let channel = ChannelConfig { large_buffer_bytes: 1 << 18, ..small_config() };
    let mut fixture = transfer(&channel, 4_000_000, 1 << 17);
    let lent = fixture.server().handler().stats().zero_copy_bytes;
    assert!(lent > 0, "counters go on");
    fixture.assert_all_freed();
}

#[test]
fn doorbells_without_a_shard_are_heard() {
    let mut fixture = SavedFixture::new(&small_config(), Peer { listens: true, ..Peer::default() });
    let (domain, mut client) = fixture.open_domain();
    let mut other = domain.admit(&client).unwrap();
    let conn = client.connect(peer_port(), ConnectOptions::default()).unwrap();
    let other_conn = other.connect(peer_port(), ConnectOptions::default()).unwrap();
    fixture.events(&mut client);
    let saved = fixture.save();
    assert_eq!(client.send(conn, b"nobody runs"), Ok(11));
    client.flush();
    assert_eq!(other.send(other_conn, b"as before"), Ok(9));
    other.close(other_conn).unwrap();
    other.release(other_conn).unwrap();
    other.flush();
    fixture.restore(saved);
    fixture.run(Duration::from_millis(5));
    let received = &fixture.peer.handler().received;
    assert_eq!([&received[0][..], &received[1]], [&b"nobody runs"[..], b"as before"]);
    assert_eq!(fixture.peer.handler().close_reasons[1], Some(CloseReason::Normal));
    assert_eq!(fixture.server().handler().sockets_in_use(), 1);
    drop((client, other));
    fixture.assert_all_freed();
}

#[test]
fn blocked_writer_and_sleeper_are_woken() {
    let mut fixture = SavedFixture::new(&small_config(), Peer { listens: true, ..Peer::default() });
    let (_domain, mut client) = fixture.open_domain();
    let conn = client.connect(peer_port(), ConnectOptions::default()).unwrap();
    fixture.events(&mut client);
    // Without turns of the stack, the buffer fills.
    let mut sent = 0;
    while let Ok(count @ 1..) = client.send(conn, &[7; 1000]) {
        sent += count;
    }
    assert!(client.before_sleep());
    fixture.replace_shard();
    fixture.run(Duration::from_millis(5));
    client.after_sleep(true);
    let events: Vec<_> = core::iter::from_fn(|| client.next_event()).collect();
    assert_eq!(events, [ClientEvent::Writable { conn }]);
    assert_eq!(fixture.peer.handler().received[0].len(), sent);
    // A sleeper is woken by the new shard through the socket that the old one had.
    assert!(client.before_sleep());
    fixture.peer.with(fixture.now, |peer, cx| cx.send(peer.conns[0], b"wake up").unwrap());
    fixture.run(Duration::from_millis(5));
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(client.wake_fd(), rustix::event::PollFlags::IN)];
    let immediately = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&immediately)), Ok(1));
    client.after_sleep(true);
    assert_eq!(read_all(&mut client, conn), b"wake up");
    drop(client);
    fixture.assert_all_freed();
}

#[test]
fn halves_stay_closed() {
    let mut fixture = SavedFixture::new(&small_config(), Peer { listens: true, ..Peer::default() });
    let (_domain, mut client) = fixture.open_domain();
    let conns = [(); 2].map(|()| client.connect(peer_port(), ConnectOptions::default()).unwrap());
    fixture.events(&mut client);
    // The first connection has a FIN of the peer after unread bytes, the second one has sent a FIN itself.
    fixture.peer.with(fixture.now, |peer, cx| {
        cx.send(peer.conns[0], b"last words").unwrap();
        cx.shutdown_write(peer.conns[0]).unwrap();
        peer.close_when_sent = false;
    });
    fixture.run(Duration::from_millis(5));
    fixture.replace_shard();
    let events = fixture.events(&mut client);
    assert!(events.contains(&ClientEvent::PeerClosed { conn: conns[0] }), "{events:?}");
    assert_eq!(read_all(&mut client, conns[0]), b"last words");
    assert_eq!(client.send(conns[0], b"answer"), Ok(6));
    client.shutdown_write(conns[1]).unwrap();
    client.flush();
    fixture.run(Duration::from_millis(5));
    fixture.replace_shard();
    let events = fixture.events(&mut client);
    assert_eq!(fixture.peer.handler().received[0], b"answer");
    assert!(fixture.peer.handler().has_fin[1]);
    assert!(
        !events.iter().any(|event| matches!(event, ClientEvent::Closed { conn, reason }
        if *conn == conns[0] || *reason != CloseReason::Normal)),
        "{events:?}"
    );
    client.close(conns[0]).unwrap();
    let events = fixture.events(&mut client);
    assert!(events.contains(&ClientEvent::Closed { conn: conns[0], reason: CloseReason::Normal }));
    drop(client);
    fixture.assert_all_freed();
}

#[test]
fn owners_and_numbers_stay() {
    let mut fixture = SavedFixture::new(
        &ChannelConfig { sockets_max: 512, ..small_config() },
        Peer { listens: true, echoes: true, ..Peer::default() },
    );
    let (domain, mut parent) = fixture.open_domain();
    let (other_domain, other) = fixture.open_domain();
    let conn = parent.connect(peer_port(), ConnectOptions::default()).unwrap();
    // Needs no request, as sockets are preallocated.
    let second = parent.connect_without_request(peer_port()).unwrap();
    fixture.events(&mut parent);
    let mut child = domain.fork(&parent).unwrap();
    fixture.replace_shard();
    assert_eq!(parent.is_shared(conn), Ok(true));
    let preallocated = parent.connect_without_request(peer_port()).unwrap();
    assert_eq!(parent.endpoints(preallocated).unwrap()[0].port(), 0, "the stack was not asked");
    for conn in [second, preallocated] {
        parent.send(conn, b"echo").unwrap();
        fixture.events(&mut parent);
        assert_eq!(read_all(&mut parent, conn), b"echo");
    }
    parent.release(conn).unwrap();
    fixture.events(&mut parent);
    assert_eq!(child.is_shared(conn), Ok(false));
    assert_eq!(child.send(conn, b"child"), Ok(5));
    fixture.events(&mut child);
    assert_eq!(read_all(&mut child, conn), b"child");
    // Numbers in use are not used again.
    let grandchild = domain.fork(&child).unwrap();
    assert!(grandchild.number() != parent.number() && grandchild.number() != child.number());
    assert_eq!(fixture.server().handler().domains(), 2);
    let (third_domain, third) = fixture.open_domain();
    drop((other, third, parent, child, grandchild));
    drop((other_domain, third_domain));
    fixture.assert_all_freed();
}

#[test]
fn stamps_stages_and_options_stay() {
    use ginnel_stack::options::TcpOption;
    let mut fixture = SavedFixture::new(&small_config(), Peer { listens: true, ..Peer::default() });
    let (_domain, mut client) = fixture.open_domain();
    let conn = client.connect(peer_port(), ConnectOptions::default()).unwrap();
    fixture.events(&mut client);
    client.set_option(conn, TcpOption::ArrivalTimes(true)).unwrap();
    client.set_option(conn, TcpOption::NotSentLowat(1000)).unwrap();
    client.flush();
    fixture.run(Duration::from_millis(1));
    fixture.peer.with(fixture.now, |peer, cx| cx.send(peer.conns[0], b"when").unwrap());
    fixture.run(Duration::from_millis(5));
    let before = client.arrival_time(conn, 4).unwrap();
    assert!(before.is_some());
    client.send(conn, &[1; 500]).unwrap();
    assert_eq!(client.await_stamps(conn, 500, true, true), Ok(true));
    fixture.sample_stages(client.endpoints(conn).unwrap());
    fixture.replace_shard();
    assert_eq!(client.arrival_time(conn, 4), Ok(before));
    fixture.run(SECOND);
    let stamps = client.take_stamps(conn).unwrap();
    assert_eq!(
        stamps.iter().map(|stamp| (stamp.end, stamp.is_acked)).collect::<Vec<_>>(),
        [(500, false), (500, true)]
    );
    client.set_option(conn, TcpOption::ArrivalTimes(false)).unwrap();
    client.flush();
    fixture.run(Duration::from_millis(1));
    assert_eq!(client.arrival_time(conn, 4), Ok(None));
    drop(client);
    fixture.assert_all_freed();
}

// limit: transmit timestamps of a program's stream
#[test]
fn refused_stamps_are_told_counted_and_granted_later() {
    const STAMPS_MAX: u64 = 256;
    let mut fixture = SavedFixture::new(&small_config(), Peer { listens: true, ..Peer::default() });
    let (_domain, mut client) = fixture.open_domain();
    let conn = client.connect(peer_port(), ConnectOptions::default()).unwrap();
    fixture.events(&mut client);
    client.send(conn, &[1; 100]).unwrap();
    let is_granted = |client: &mut Client, end: u64| client.await_stamps(conn, end, true, true).unwrap();
    let granted = (1..=100).filter(|end| is_granted(&mut client, *end)).count();
    assert_eq!(granted, 100);
    fixture.run(SECOND);
    // Each byte has two times now, which nobody has fetched.
    let granted = (101..=200).filter(|end| is_granted(&mut client, *end)).count() as u64;
    assert_eq!(
        (granted, fixture.server().handler().stats().stamps_refused),
        (STAMPS_MAX - 200, 100 - granted)
    );
    assert_eq!(client.take_stamps(conn).unwrap().len(), 200);
    assert!(is_granted(&mut client, 300));
    assert_eq!(fixture.server().handler().stats().stamps_refused, 100 - granted);
}

#[test]
fn socket_that_is_unfinished_twice_goes_on() {
    let mut fixture =
        SavedFixture::new(&small_config(), Peer { listens: true, echoes: true, ..Peer::default() });
    let (_domain, mut client) = fixture.open_domain();
    let conn = client.connect(peer_port(), ConnectOptions::default()).unwrap();
    fixture.events(&mut client);
    fixture.server().with(fixture.now, |server, _| server.list_unfinished_twice(0, conn.index()));
    client.send(conn, b"echo").unwrap();
    client.flush();
    fixture.replace_shard();
    fixture.events(&mut client);
    assert_eq!(read_all(&mut client, conn), b"echo");
    drop(client);
    fixture.assert_all_freed();
}

/// A shard ran on after its state was saved, and then another one continues with the state.
#[test]
fn doorbells_ring_if_the_state_is_older_than_the_rings() {
    let mut fixture =
        SavedFixture::new(&small_config(), Peer { listens: true, echoes: true, ..Peer::default() });
    let (_domain, mut client) = fixture.open_domain();
    let conns = [(); 3].map(|()| client.connect(peer_port(), ConnectOptions::default()).unwrap());
    fixture.events(&mut client);
    let saved = fixture.save();
    for at in 0..conns.len() {
        fixture.peer.with(fixture.now, |peer, cx| cx.abort(peer.conns[at]).unwrap());
        let events = fixture.events(&mut client);
        assert!(matches!(events[..], [ClientEvent::Closed { .. }]), "{events:?}");
    }
    fixture.restore(saved);
    for _ in 0..4 {
        let conn = client.connect(peer_port(), ConnectOptions::default()).unwrap();
        let events = fixture.events(&mut client);
        assert!(events.contains(&ClientEvent::Connected { conn }), "{events:?}");
        client.send(conn, b"echo").unwrap();
        client.flush();
        fixture.events(&mut client);
        assert_eq!(read_all(&mut client, conn), b"echo");
    }
    drop(client);
    fixture.assert_all_freed();
}

#[test]
fn counts_of_refused_timers_continue() {
    let mut fixture = SavedFixture::new(&small_config(), Peer::default());
    for replaced in 1..=3 {
        fixture.server().with(fixture.now, |_, cx| {
            let hour = Duration::from_secs(3600);
            let timers: Vec<_> = core::iter::from_fn(|| cx.set_timer(hour, 0)).collect();
            assert!(timers.len() <= TIMERS_MAX as usize);
            timers.into_iter().for_each(|timer| assert!(cx.cancel_timer(timer)));
        });
        fixture.replace_shard();
        fixture.run(SECOND);
        assert_eq!(fixture.server().stats().timers_refused, replaced);
    }
}

#[test]
fn state_with_other_devices_is_refused() {
    let fixture = SavedFixture::new(&small_config(), Peer::default());
    let restore = |change: fn(&mut crate::Config)| {
        let mut config = config(&[SERVER_ADDRESS]);
        change(&mut config);
        let name = config.devices[0].name.clone();
        let (device, _far) = pair(MemoryConfig::default().without_offloads());
        let server = Shard::builder(config).handler(ChannelServer::for_processes(&small_config()).unwrap());
        server.device(name, device).seed([3; 32]).now(fixture.now).build().unwrap().restore(fixture.save())
    };
    let refused = Err("the configuration has other devices or links, or in another order".to_string());
    let rename = |config: &mut crate::Config| {
        config.devices[0].name = "other".into();
        config.links[0].device = "other".into();
    };
    assert_eq!(restore(rename), refused);
    assert_eq!(restore(|config| config.links[0].vlan = Some(7)), refused);
    assert_eq!(restore(|_| ()), Ok(()));
}

#[test]
fn what_cannot_be_saved_says_so() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let client = fixture.client();
    let refused = fixture.server.lock().unwrap().save().map(|_| ());
    assert_eq!(refused, Err("threads of its own process are clients".into()));
    assert_eq!(fixture.peer.save().map(|_| ()), Err("its application cannot be saved".into()));
    fixture.run(SECOND);
    drop(client);
    let (mut early, _far) = build_server(&small_config(), START);
    assert_eq!(early.save().map(|_| ()), Err("it is starting or stopping".into()));
}
