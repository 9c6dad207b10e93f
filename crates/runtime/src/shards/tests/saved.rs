//! Several shards are saved together, and others continue with their states.

use super::threads::{only_v4, open};
use super::{CLIENT_ADDRESSES, SavedShard, stack_config};
use crate::channel::control::{BrokerReply, BrokerRequest, SameThread, call_for_broker};
use crate::channel::simulation::SimulatedDomain;
use crate::channel::tests::{Peer, accepted, small_config};
use crate::channel::{ChannelServer, Client, ClientEvent};
use crate::config::Config;
use crate::fixture::{START, config, next_turn, pass_frames};
use crate::shard::Shard;
use crate::shard_saver::ShardSaver;
use crate::shards::Shards;
use crate::stop::StopFlag;
use core::time::Duration;
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue, pair};
use ginnel_stack::device::Device;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::{ConnectOptions, ListenOptions, SocketOptions};
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{UdpOptions, UdpSendParams};
use std::io::{IoSlice, IoSliceMut};
use std::sync::{Arc, Mutex};
use std::thread;

type Server = Arc<Mutex<Shard<ChannelServer>>>;

const MS: Duration = Duration::from_millis(1);

/// Two shards, of which the second one has a client in a domain of its own as the first one has, and a peer.
/// All frames arrive at the first shard.
struct TwoShards {
    servers: Vec<Server>,
    clients: Vec<(SimulatedDomain, Client)>,
    peer: Shard<Peer>,
    wire: [Device; 2],
    now: Instant,
}

fn two_shards() -> Config {
    let mut config = only_v4(stack_config(2));
    config.tcp.fastopen = 3;
    config.channel = small_config();
    config.channel.sockets_max = 64;
    config
}

/// Builds shards that continue with states, if there are some. Returns the far end of their device, too.
fn build(
    config: Config,
    now: Instant,
    saved: Option<Vec<SavedShard>>,
) -> (Vec<Shard<ChannelServer>>, Device) {
    let channel = config.channel.clone();
    let count = config.shards.count as usize;
    let (far, queues) = multi_queue(&MemoryConfig::default().without_offloads(), count, RssMode::Fixed(0));
    // The next process has another seed.
    let seed = [if saved.is_some() { 3 } else { 1 }; 32];
    let mut opened = Shards::new(config).device("cable", queues).seed(seed).now(now).open().unwrap();
    if let Some(saved) = saved {
        opened = opened.restore(saved).unwrap();
    }
    (opened.build(|_| ChannelServer::for_processes(&channel)).unwrap(), far)
}

/// Saves shards that are driven by the caller.
fn save_all(servers: &[Server], now: Instant) -> Vec<SavedShard> {
    let mut servers: Vec<_> = servers.iter().map(|server| server.lock().unwrap()).collect();
    let mut quiet = 0;
    while quiet < 2 {
        let work: usize = servers.iter_mut().map(|server| server.settle(now)).sum();
        quiet = if work == 0 { quiet + 1 } else { 0 };
    }
    servers.iter_mut().map(|server| server.save().expect("the shard can be saved")).collect()
}

impl TwoShards {
    fn new() -> Self {
        let (servers, far) = build(two_shards(), START, None);
        let servers: Vec<Server> = servers.into_iter().map(|server| Arc::new(Mutex::new(server))).collect();
        let (device, peer_far) = pair(MemoryConfig::default().without_offloads());
        let peer = Peer { listens: true, echoes: true, ..Peer::default() };
        let peer = Shard::builder(only_v4(config(&CLIENT_ADDRESSES))).handler(peer).device("cable", device);
        let peer = peer.seed([2; 32]).now(START).build().unwrap();
        let mut shards = Self { servers, clients: Vec::new(), peer, wire: [far, peer_far], now: START };
        shards.run(MS);
        for server in &shards.servers {
            let (domain, parts) = SameThread(server.clone()).open_domain().unwrap();
            let client = Client::open(parts, Box::new(domain.clone())).unwrap();
            shards.clients.push((domain, client));
        }
        shards
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let now = self.now;
            let turns = self.servers.iter().map(|server| server.lock().unwrap().poll_once(now).unwrap());
            let mut turns: Vec<_> = turns.collect();
            let [near, far] = &mut self.wire;
            let passed = pass_frames(near, far, now);
            let mut peer = self.peer.poll_once(now).unwrap();
            peer.work += passed + pass_frames(far, near, now);
            turns.push(peer);
            self.now = next_turn(now, turns).unwrap_or(end).min(end);
        }
    }

    fn replace(&mut self) {
        let saved = save_all(&self.servers, self.now);
        let (servers, far) = build(two_shards(), self.now, Some(saved));
        self.wire[0] = far;
        for (old, new) in self.servers.iter().zip(servers) {
            *old.lock().unwrap() = new;
        }
    }

    fn events(&mut self, client: usize) -> Vec<ClientEvent> {
        self.run(5 * MS);
        core::iter::from_fn(|| self.clients[client].1.next_event()).collect()
    }
}

fn read_all(client: &mut Client, conn: Conn) -> Vec<u8> {
    let (mut all, mut out) = (Vec::new(), [0; 8192]);
    while let Ok(count @ 1..) = client.recv(conn, &mut out) {
        all.extend_from_slice(&out[..count]);
    }
    all
}

#[test]
fn connections_of_both_shards_go_on() {
    let mut shards = TwoShards::new();
    let total = 100_000;
    let sent: Vec<u8> = (0..total).map(|at| (at * 7 % 251) as u8).collect();
    let conns: Vec<Conn> = (0..2)
        .map(|at| {
            shards.clients[at].1.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap()
        })
        .collect();
    let (mut written, mut received) = ([0; 2], [Vec::new(), Vec::new()]);
    let mut rounds = 0;
    while received.iter().any(|received| received.len() < total) {
        for at in 0..2 {
            let client = &mut shards.clients[at].1;
            written[at] += client.send(conns[at], &sent[written[at]..]).unwrap();
            received[at].extend(read_all(client, conns[at]));
            client.flush();
        }
        if rounds % 9 == 2 {
            // Frames for the second shard are in the queue between both.
            shards.servers[0].lock().unwrap().poll_once(shards.now).unwrap();
            shards.replace();
        }
        shards.run(MS / 4);
        rounds += 1;
        assert!(rounds < 10_000, "{} received", received[0].len());
    }
    assert!(received.iter().all(|received| *received == sent));
    for (at, conn) in conns.into_iter().enumerate() {
        shards.clients[at].1.close(conn).unwrap();
        let events = shards.events(at);
        let closed = ClientEvent::Closed { conn, reason: CloseReason::Normal };
        assert_eq!(events.last(), Some(&closed));
    }
    shards.clients.clear();
    shards.run(Duration::from_secs(300));
    for server in &shards.servers {
        let server = server.lock().unwrap();
        assert_eq!((server.handler().domains(), server.handler().sockets_in_use()), (0, 0));
        server.check_invariants();
    }
}

#[test]
fn shared_listeners_and_ports_go_on() {
    let mut shards = TwoShards::new();
    let address = "0.0.0.0:80".parse().unwrap();
    let listeners: Vec<u32> = (0..2)
        .map(|at| shards.clients[at].1.listen(address, ListenOptions::default(), 16).unwrap())
        .collect();
    let any = "0.0.0.0:0".parse().unwrap();
    let udp = |shards: &mut TwoShards, at: usize, port: &str| {
        shards.clients[at].1.udp_open(port.parse().unwrap(), UdpOptions::default()).unwrap()
    };
    let (bound, ephemeral) = (udp(&mut shards, 1, "0.0.0.0:53"), udp(&mut shards, 1, "0.0.0.0:0"));
    let port = shards.clients[1].1.udp_local(ephemeral).unwrap().port();
    let own = shards.peer.with(shards.now, |_, cx| cx.udp_bind(any, UdpOptions::default()).unwrap());
    let mut accepted_by = [0; 2];
    for round in 0..3 {
        shards.replace();
        for _ in 0..8 {
            shards.peer.with(shards.now, |peer, cx| {
                let conn = cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).unwrap();
                peer.add(conn, b"hello");
            });
        }
        if round == 1 {
            // Connections that are being established.
            shards.run(Duration::from_micros(3));
            shards.replace();
        }
        shards.peer.with(shards.now, |_, cx| {
            for port in [53, port] {
                cx.udp_send(own, Some(([10, 0, 0, 1], port).into()), b"datagram").unwrap();
            }
        });
        shards.run(Duration::from_secs(3));
        let mut count = 0;
        for (at, accepted_count) in accepted_by.iter_mut().enumerate() {
            let conns = accepted(&shards.events(at));
            *accepted_count += conns.len();
            count += conns.len();
            let client = &mut shards.clients[at].1;
            for conn in conns {
                assert_eq!(read_all(client, conn), b"hello");
                client.abort(conn).unwrap();
                client.release(conn).unwrap();
            }
            client.flush();
        }
        assert_eq!(count, 8, "round {round}");
        for socket in [bound, ephemeral] {
            let mut out = [0; 64];
            let client = &mut shards.clients[1].1;
            let len =
                client.udp_recv_into(socket, &mut [IoSliceMut::new(&mut out)]).map(|got| got.unwrap().len);
            assert_eq!(len, Ok(8), "round {round}");
        }
    }
    assert!(accepted_by.iter().all(|count| *count > 0), "{accepted_by:?}");
    // The registry still knows who listens and which ports are in use.
    let client = &mut shards.clients[0].1;
    assert!(client.listen(address, ListenOptions::default(), 1).is_err());
    assert!(client.udp_open("0.0.0.0:53".parse().unwrap(), UdpOptions::default()).is_err());
    let params = UdpSendParams { to: Some("10.0.0.2:9".parse().unwrap()), ..UdpSendParams::default() };
    shards.clients[1].1.udp_send_queued(bound, &params, &[IoSlice::new(b"x")]).unwrap();
    for (at, listener) in listeners.into_iter().enumerate() {
        shards.clients[at].1.unlisten(listener).ok();
    }
    shards.clients[1].1.release(bound).unwrap();
    shards.run(5 * MS);
    shards.replace();
    let client = &mut shards.clients[0].1;
    assert!(client.udp_open("0.0.0.0:53".parse().unwrap(), UdpOptions::default()).is_ok());
    assert!(client.listen(address, ListenOptions::default(), 1).is_ok());
}

/// The first shard closes the listeners of all, and its request to the second one has not arrived yet.
#[test]
fn listener_that_another_shard_has_closed_goes_on() {
    let mut shards = TwoShards::new();
    let address = "0.0.0.0:80".parse().unwrap();
    let listeners =
        [0, 1].map(|at| shards.clients[at].1.listen(address, ListenOptions::default(), 16).unwrap());
    shards.clients[0].1.unlisten(listeners[0]).unwrap();
    // Takes the place of the engine's listener that is closed.
    let other = "0.0.0.0:81".parse().unwrap();
    shards.run(MS);
    shards.clients[1].1.listen(other, ListenOptions::default(), 16).unwrap();
    shards.run(MS);
    shards.replace();
    shards.clients[1].1.unlisten(listeners[1]).unwrap();
    shards.run(MS);
    for (client, address) in [(1, address), (0, address), (0, other)] {
        shards.clients[client].1.listen(address, ListenOptions::default(), 16).unwrap();
    }
    for _ in 0..8 {
        shards.peer.with(shards.now, |peer, cx| {
            for port in [80, 81] {
                let conn = cx.connect(([10, 0, 0, 1], port).into(), ConnectOptions::default()).unwrap();
                peer.add(conn, b"hello");
            }
        });
    }
    let accepted_by = [1, 0].map(|at| accepted(&shards.events(at)).len());
    assert!(accepted_by[0] > 0 && accepted_by.iter().sum::<usize>() == 16, "{accepted_by:?}");
}

#[test]
fn cookies_of_fast_open_stay_valid() {
    let mut shards = TwoShards::new();
    let options = ListenOptions {
        socket: SocketOptions { fastopen_queue: 8, ..SocketOptions::default() },
        ..ListenOptions::default()
    };
    for at in 0..2 {
        shards.clients[at].1.listen("0.0.0.0:80".parse().unwrap(), options, 16).unwrap();
    }
    // The first connection requests a cookie.
    for round in 0..3 {
        shards.peer.with(shards.now, |peer, cx| {
            let socket = SocketOptions { fastopen_connect: true, ..SocketOptions::default() };
            let options = ConnectOptions { socket, ..ConnectOptions::default() };
            let conn = cx.connect("10.0.0.1:80".parse().unwrap(), options).unwrap();
            peer.add(conn, b"");
            cx.send(conn, b"early").unwrap();
        });
        shards.run(MS);
        let counts = shards.servers.iter().map(|server| {
            let server = server.lock().unwrap();
            let stats = server.core.stack.local().unwrap().tcp_stats();
            (stats.fastopen_accepts, stats.fastopen_failures)
        });
        let counts = counts.reduce(|one, other| (one.0 + other.0, one.1 + other.1));
        assert_eq!(counts, Some((round, 0)));
        shards.replace();
    }
}

#[test]
fn states_of_another_arrangement_are_refused() {
    let shards = TwoShards::new();
    let mut saved = save_all(&shards.servers, shards.now);
    let restore = |config: Config, saved| {
        let (_far, queues) =
            multi_queue(&MemoryConfig::default(), config.shards.count as usize, RssMode::Fixed(0));
        let channel = config.channel.clone();
        let opened =
            Shards::new(config).device("cable", queues).seed([1; 32]).now(shards.now).open().unwrap();
        let opened = opened.restore(saved)?;
        let built = opened.build(|_| ChannelServer::for_processes(&channel));
        built.map(|_| ()).map_err(|error| error.to_string())
    };
    let one = vec![saved.remove(0)];
    let error = restore(two_shards(), one).unwrap_err();
    assert_eq!(error, "1 shard(s) were saved, and shards.count is 2 now");
    let mut swapped = save_all(&shards.servers, shards.now);
    swapped.swap(0, 1);
    let error = restore(two_shards(), swapped).unwrap_err();
    assert!(error.contains("distributes frames"), "{error}");
    assert_eq!(restore(two_shards(), save_all(&shards.servers, shards.now)), Ok(()));
}

fn open_domain(shard: &crate::command::Commander) -> BrokerReply {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (wake, _client) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    call_for_broker(shard, BrokerRequest::OpenDomain { wake }).unwrap()
}

/// A sender that waits for each reply sees what the stack does in the turns between, such as the delivery of
/// frames on its loopback. Its commands neither fill a turn nor the queues of devices.
#[test]
fn commands_that_follow_replies_take_turns() {
    const COMMANDS: u64 = 2000;
    let config = two_shards();
    let channel = config.channel.clone();
    let (opened, _far) = open(config, RssMode::Fixed(0));
    let (commanders, stop) = (opened.commanders(), StopFlag::new().unwrap());
    let flag = stop.clone();
    let running = thread::spawn(move || {
        let server = |_| ChannelServer::for_processes(&channel);
        opened.run(&flag, server, |_, shard| [shard.stats().turns, shard.stats().commands])
    });
    for _ in 0..COMMANDS {
        let unknown = BrokerRequest::Reap { domain: 7, client: 0 };
        assert!(matches!(call_for_broker(&commanders[0], unknown), Ok(BrokerReply::Unknown)));
    }
    stop.stop();
    let [turns, commands] = running.join().unwrap().unwrap()[0];
    assert!(commands >= COMMANDS && turns >= commands, "{turns} turns for {commands} commands");
}

#[test]
fn running_shards_are_stopped_saved_and_let_go() {
    const LONG: Duration = Duration::from_secs(60);
    let config = two_shards();
    let channel = config.channel.clone();
    let mut saved: Option<Vec<SavedShard>> = None;
    for expected in 1..=2 {
        let (opened, _far) = open(config.clone(), RssMode::Fixed(0));
        let opened = match saved.take() {
            Some(states) => opened.restore(states).unwrap(),
            None => opened,
        };
        let (commanders, stop) = (opened.commanders(), StopFlag::new().unwrap());
        let (flag, channel) = (stop.clone(), channel.clone());
        let running = thread::spawn(move || {
            opened.run(
                &flag,
                |_| ChannelServer::for_processes(&channel),
                |_, shard| shard.handler().domains(),
            )
        });
        assert!(
            matches!(open_domain(&commanders[1]), BrokerReply::Opened { domain, .. } if domain + 1 == expected)
        );
        let saver = ShardSaver::new(commanders.clone());
        for _ in 0..3 {
            let mut stopped = saver.save(LONG).unwrap();
            let states = core::mem::take(&mut stopped.saved);
            assert!(states[0].descriptors.is_empty());
            // Region and eventfd of a domain, memory and socket of its client.
            assert_eq!(states[1].descriptors.len(), 4 * usize::from(expected));
            saved = Some(states);
            drop(stopped);
            // The shards answer again.
            let unknown = BrokerRequest::Reap { domain: 7, client: 0 };
            assert!(matches!(call_for_broker(&commanders[0], unknown), Ok(BrokerReply::Unknown)));
        }
        stop.stop();
        assert_eq!(running.join().unwrap().unwrap(), [0, usize::from(expected)]);
        let gone = saver.save(LONG).map(|_| ()).unwrap_err();
        assert!(gone.contains("gone"), "{gone}");
    }
}

#[test]
fn unsavable_shard_lets_all_go() {
    let mut config = two_shards();
    config.shards.count = 2;
    let (opened, _far) = open(config, RssMode::Fixed(0));
    let (commanders, stop) = (opened.commanders(), StopFlag::new().unwrap());
    let flag = stop.clone();
    let running = thread::spawn(move || {
        opened.run(&flag, |_| Ok(super::RecordingHandler::default()), |_, shard| shard.handler().started)
    });
    let saver = ShardSaver::new(commanders);
    for _ in 0..3 {
        let reason = saver.save(Duration::from_secs(60)).map(|_| ()).unwrap_err();
        assert!(reason.ends_with("its application cannot be saved"), "{reason}");
    }
    stop.stop();
    assert_eq!(running.join().unwrap().unwrap(), [true, true]);
}
