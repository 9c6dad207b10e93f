//! Two stacks exchange frames over a lossy line, once with header prediction and once without: all frames of
//! both runs must be equal.

use super::*;
use crate::chunk_pool::CHUNK_BYTES;
use crate::device::{Capabilities, Label, RxChecksum};
use crate::ip::FlowLabel;
use crate::ip::testbench::{RecordingTxQueue, TxRecorder};
use crate::options::SocketOptions;
use crate::steering::toeplitz::{self, Toeplitz};
use crate::tcp::config::{CongestionControl, MtuProbing};
use crate::wire::MacAddr;
use core::net::{Ipv4Addr, Ipv6Addr};
use core::time::Duration;
use std::sync::{Arc, Mutex};

/// Frames in the order in which they were sent, and all events that the applications received.
type Transcript = Vec<String>;

struct Random(u64);

impl Random {
    /// Returns a number below `bound`.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

struct TestHost {
    name: char,
    stack: Stack,
    port: PortId,
    recorder: Arc<Mutex<TxRecorder>>,
    conns: Vec<Conn>,
    /// False for an application that sends and reads nothing by itself.
    acts: bool,
}

/// Last bytes of the addresses of two routers on the line.
const GATEWAYS: [u8; 2] = [98, 99];

fn mac(last: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, last]
}

fn address(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, last)
}

impl TestHost {
    fn new(name: char, own: u8, peer: u8, config: &TcpConfig, predicts: bool, gso: bool) -> Self {
        Self::with_device(name, own, peer, config, predicts, gso, false)
    }

    /// Creates a host whose device segments super-frames (`gso`) and carries labels (`labels`).
    fn with_device(
        name: char,
        own: u8,
        peer: u8,
        config: &TcpConfig,
        predicts: bool,
        gso: bool,
        labels: bool,
    ) -> Self {
        let config = StackConfig { tcp: config.clone(), ..StackConfig::default() };
        let mut stack = Stack::new(config, [own; 32], Instant::from_millis(1_000)).unwrap();
        stack.tcp.is_fast_path_disabled = !predicts;
        let recorder = Arc::new(Mutex::new(TxRecorder { capacity: usize::MAX, ..TxRecorder::default() }));
        let capabilities = Capabilities {
            mac: mac(own),
            mtu: 1500,
            tx_checksum: gso,
            gso_bytes_max: if gso { 9_000 } else { 0 },
            uso: false,
            labels,
        };
        let queue = RecordingTxQueue { recorder: recorder.clone(), capabilities, buffer: Vec::new() };
        let port = stack.add_port(Box::new(queue));
        let link = LinkConfig {
            name: "line".into(),
            addresses: vec![(address(own).into(), 24)],
            static_neighbours: [peer, GATEWAYS[0], GATEWAYS[1]]
                .map(|last| (address(last).into(), MacAddr(mac(last))))
                .to_vec(),
            ..LinkConfig::default()
        };
        stack.add_link(port, &link).unwrap();
        Self { name, stack, port, recorder, conns: Vec::new(), acts: true }
    }

    /// Runs one turn: `frames` arrive, and the application acts at random.
    fn turn(
        &mut self,
        now: Instant,
        frames: &[(Vec<u8>, crate::device::TxMeta)],
        random: &mut Random,
        transcript: &mut Transcript,
    ) -> Vec<(Vec<u8>, crate::device::TxMeta)> {
        for frames in frames.chunks(BURST_FRAMES_MAX) {
            let burst: RxBurst<'_> = frames
                .iter()
                .map(|(bytes, meta)| {
                    let checksum = match meta.partial_checksum {
                        Some((start, offset)) => RxChecksum::Partial { start, offset },
                        None => RxChecksum::Unverified,
                    };
                    RxFrame { checksum, gso: meta.gso, ..RxFrame::new(bytes) }
                })
                .collect();
            self.stack.receive(now, self.port, &burst);
            self.events(&burst, random, transcript);
            self.stack.finish_burst(&burst);
        }
        self.stack.advance(now);
        self.events(&RxBurst::new(), random, transcript);
        if self.acts {
            self.act(random);
        }
        self.stack.transmit(now);
        self.stack.check_invariants();
        if self.stack.usage().connections < 1_000 {
            self.check_listing(now);
        }
        let sent = core::mem::take(&mut self.recorder.lock().unwrap().sent);
        transcript.extend(sent.iter().map(|(bytes, meta)| format!("{} {bytes:02x?} {meta:?}", self.name)));
        sent
    }

    /// Checks that a listing in steps equals a listing at once, and agrees with the counts of the pools.
    fn check_listing(&self, now: Instant) {
        let mut complete = Vec::new();
        assert_eq!(self.stack.list(now, ListCursor::default(), usize::MAX, &mut complete), None);
        let (mut parts, mut cursor) = (Vec::new(), Some(ListCursor::default()));
        while let Some(at) = cursor {
            let before = parts.len();
            cursor = self.stack.list(now, at, 2, &mut parts);
            assert!(parts.len() - before <= 2, "more slots than requested");
        }
        assert_eq!(parts, complete);
        let pools = self.stack.pools();
        let used = |name: &str| pools.iter().find(|pool| pool.name == name).unwrap().used as usize;
        let count =
            |selects: fn(State) -> bool| complete.iter().filter(|listed| selects(listed.state)).count();
        assert_eq!(count(|state| state == State::Listen), used("listeners"));
        assert_eq!(count(|state| state == State::TimeWait), used("time_wait"));
        // Connections that have ended and whose `Closed` event was not taken are counted but not listed.
        assert!(count(|state| !matches!(state, State::Listen | State::TimeWait)) <= used("connections"));
        assert!(pools.iter().all(|pool| pool.used <= pool.high_water && pool.high_water <= pool.limit));
        let (mut chunk_bytes, mut connections) = (0, 0);
        for listed in complete.iter().filter(|listed| listed.info.is_some()) {
            let SocketMemory { rmem_alloc, wmem_queued, fwd_alloc, total, .. } = listed.memory;
            assert!(listed.recv_queue <= rmem_alloc && listed.send_queue == wmem_queued, "{listed:?}");
            let allocated = rmem_alloc + wmem_queued + fwd_alloc;
            assert!(allocated.is_multiple_of(CHUNK_BYTES as u64) && total >= 128 + allocated, "{listed:?}");
            chunk_bytes += allocated;
            connections += 1;
        }
        let buffers = used("buffer_bytes") as u64;
        assert!(
            chunk_bytes == buffers || chunk_bytes < buffers && connections < used("connections"),
            "{complete:?}"
        );
        for listed in &complete {
            let has_timer = listed.timer.is_some();
            assert!(has_timer || !matches!(listed.state, State::TimeWait | State::SynSent), "{listed:?}");
        }
    }

    /// Returns the local and the remote port of each connection in TIME-WAIT.
    fn time_wait_ports(&self, now: Instant) -> Vec<[u16; 2]> {
        let mut listed = Vec::new();
        assert_eq!(self.stack.list(now, ListCursor::default(), usize::MAX, &mut listed), None);
        listed.retain(|listed| listed.state == State::TimeWait);
        listed.iter().map(|listed| [listed.local.port(), listed.remote.port()]).collect()
    }

    fn events(&mut self, burst: &RxBurst<'_>, random: &mut Random, transcript: &mut Transcript) {
        while let Some(event) = self.stack.next_event() {
            transcript.push(format!("{} {event:?}", self.name));
            match event {
                Event::Incoming { listener } => self.conns.extend(self.stack.accept(listener)),
                Event::Data { conn, data } => {
                    let count = if random.below(4) == 0 {
                        random.below(data.len() as u64) as usize
                    } else {
                        data.len()
                    };
                    self.stack.consume(conn, data, count, burst);
                }
                Event::PeerClosed { conn } => {
                    _ = self.stack.recv(conn, &mut [0; 1 << 16]);
                    _ = self.stack.close(conn);
                }
                Event::Closed { conn, .. } => self.conns.retain(|known| *known != conn),
                _ => {}
            }
        }
    }

    fn act(&mut self, random: &mut Random) {
        for conn in self.conns.clone() {
            match random.below(40) {
                0 => _ = self.stack.recv(conn, &mut [0; 3_000]),
                1 | 2 => _ = self.stack.send(conn, &[7; 5_000][..random.below(5_000) as usize]),
                3 => _ = self.stack.send(conn, &[9; 60]),
                4 if random.below(8) == 0 => _ = self.stack.close(conn),
                5 if random.below(20) == 0 => _ = self.stack.shutdown_write(conn),
                6 => _ = self.stack.recv(conn, &mut [0; 1 << 16]),
                _ => {}
            }
        }
    }
}

/// Returns the frames that arrive if `lost` of a thousand are lost and `twice` of a thousand are duplicated.
fn lossy<T: Clone>(frames: Vec<T>, (lost, twice): (u64, u64), random: &mut Random) -> Vec<T> {
    let copies = |frame| {
        let count = match random.below(1000) {
            n if n < lost => 0,
            n if n < lost + twice => 2,
            _ => 1,
        };
        core::iter::repeat_n(frame, count)
    };
    frames.into_iter().flat_map(copies).collect()
}

/// Runs the scenario of a seed.
fn run(seed: u64, predicts: bool) -> (Transcript, TcpStats) {
    let mut random = Random(seed);
    let config = TcpConfig {
        timestamps: random.below(3) > 0,
        sack: random.below(3) > 0,
        ecn: if random.below(3) == 0 {
            crate::tcp::config::EcnMode::Active
        } else {
            TcpConfig::default().ecn
        },
        congestion_control: match random.below(4) {
            0 => CongestionControl::NewReno,
            1 => CongestionControl::Bbr,
            _ => CongestionControl::Cubic,
        },
        time_wait_seconds: 1,
        mtu_probing: if random.below(2) == 0 { MtuProbing::Always } else { MtuProbing::BlackHole },
        // Small enough for probes within the data that the applications send.
        mtu_base_segment_bytes: 200,
        ..TcpConfig::default()
    };
    let faults = (random.below(4) * 20, random.below(2) * 50);
    let gso = random.below(2) == 0;
    let mut server = TestHost::new('S', 1, 2, &config, predicts, gso);
    let mut client = TestHost::new('C', 2, 1, &config, predicts, gso);
    server.stack.defer_quick_acks(Duration::from_millis(random.below(2)));
    let to = SocketAddr::new(address(1).into(), 80);
    server.stack.listen(to, ListenOptions::default()).unwrap();
    let mut transcript = Transcript::new();
    let mut now = Instant::from_millis(1_000);
    let mut to_server = Vec::new();
    for _ in 0..1_500 {
        now += Duration::from_micros(100 + random.below(3_000));
        if random.below(100) == 0 {
            now += Duration::from_millis(random.below(700));
        }
        if client.conns.len() < 3 && random.below(5) == 0 {
            client.conns.extend(client.stack.connect(now, to, &ConnectOptions::default()));
        }
        let arriving = lossy(core::mem::take(&mut to_server), faults, &mut random);
        let to_client = server.turn(now, &arriving, &mut random, &mut transcript);
        let arriving = lossy(to_client, faults, &mut random);
        to_server = client.turn(now, &arriving, &mut random, &mut transcript);
    }
    (transcript, *server.stack.tcp_stats())
}

#[test]
fn header_prediction_changes_no_frame_and_no_event() {
    let (mut opened, mut probes) = (0, 0);
    for seed in 0..30 {
        let (with, stats) = run(seed, true);
        let (without, _) = run(seed, false);
        opened += stats.passive_opens;
        probes += stats.mtu_probes;
        let differs = with.iter().zip(&without).position(|(a, b)| a != b);
        if let Some(at) = differs {
            let context = with[at.saturating_sub(12)..at].join("\n");
            panic!("seed {seed}: after\n{context}\nwith:    {}\nwithout: {}", with[at], without[at]);
        }
        assert_eq!(with.len(), without.len(), "seed {seed}");
    }
    assert!(opened > 500, "only {opened} connections");
    assert!(probes > 20, "only {probes} probes");
}

/// Changes of routes reach connections that remember their route and neighbour.
#[test]
fn a_connection_follows_changed_routes() {
    let config = TcpConfig::default();
    let mut server = TestHost::new('S', 1, 2, &config, true, false);
    let mut client = TestHost::new('C', 2, 1, &config, true, false);
    (server.acts, client.acts) = (false, false);
    let to = SocketAddr::new(address(1).into(), 80);
    server.stack.listen(to, ListenOptions::default()).unwrap();
    let through = |gateway: u8, metric| crate::ip::RouteConfig {
        destination: address(1).into(),
        prefix: 32,
        gateway: Some(address(gateway).into()),
        link: crate::handle::LinkId(0),
        metric,
    };
    client.stack.add_route(through(GATEWAYS[0], 5)).unwrap();
    let mut now = Instant::from_millis(1_000);
    let conn = client.stack.connect(now, to, &ConnectOptions::default()).unwrap();
    let (mut random, mut transcript, mut frames) = (Random(1), Transcript::new(), Vec::new());
    // Sends on the connection, and returns the hosts to which the client's frames went.
    let mut exchange = |client: &mut TestHost, data: &[u8]| {
        let mut hosts = std::collections::BTreeSet::new();
        for turn in 0..8 {
            now += Duration::from_millis(50);
            if turn == 2 {
                assert_eq!(client.stack.send(conn, data).unwrap(), data.len());
            }
            frames = client.turn(now, &frames, &mut random, &mut transcript);
            hosts.extend(frames.iter().map(|(frame, _)| frame[5]));
            // The routers forward.
            frames.iter_mut().for_each(|(frame, _)| frame[..6].copy_from_slice(&mac(1)));
            frames = server.turn(now, &frames, &mut random, &mut transcript);
        }
        hosts.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(exchange(&mut client, b"first"), [GATEWAYS[0]]);
    client.stack.add_route(through(GATEWAYS[1], 1)).unwrap();
    assert_eq!(exchange(&mut client, b"second"), [GATEWAYS[1]], "the lower metric wins");
    let filter = |metric| crate::ip::RouteFilter {
        destination: address(1).into(),
        prefix: 32,
        gateway: None,
        link: None,
        metric,
    };
    assert!(client.stack.network_mut().remove_route(&filter(Some(1))));
    assert_eq!(exchange(&mut client, b"third"), [GATEWAYS[0]]);
    assert!(client.stack.network_mut().remove_route(&filter(None)));
    assert_eq!(exchange(&mut client, b"fourth"), [1], "on the link itself");
    assert!(!client.stack.network_mut().remove_route(&filter(None)));
    let connected = crate::ip::RouteFilter { prefix: 24, ..filter(None) };
    assert!(!client.stack.network_mut().remove_route(&connected), "it belongs to the address");
    assert_eq!(client.stack.network().find_route_entry(&connected).unwrap().link, crate::handle::LinkId(0));
    assert_eq!(client.stack.tcp_stats().retransmitted, 0);
}

/// RFC 4821 §7.5: a device that segments large frames must not segment the probe.
#[test]
fn mtu_probe_is_one_segment_despite_gso() {
    let config = TcpConfig { mtu_probing: MtuProbing::Always, ..TcpConfig::default() };
    // The server does not read, and has room for everything.
    let config = TcpConfig { send_buffer_first_bytes: 1 << 20, recv_window_first_bytes: 1 << 20, ..config };
    let mut server = TestHost::new('S', 1, 2, &config, true, true);
    let mut client = TestHost::new('C', 2, 1, &config, true, true);
    let to = SocketAddr::new(address(1).into(), 80);
    server.stack.listen(to, ListenOptions::default()).unwrap();
    let (mut random, mut transcript) = (Random(1), Transcript::new());
    let mut now = Instant::from_millis(1_000);
    let conn = client.stack.connect(now, to, &ConnectOptions::default()).unwrap();
    let (mut to_server, mut sent) = (Vec::new(), Vec::new());
    for turn in 0..40 {
        now += Duration::from_millis(1);
        let to_client = server.turn(now, &to_server, &mut random, &mut transcript);
        server.conns.clear();
        if turn == 3 {
            assert_eq!(client.stack.send(conn, &vec![7; 200_000]).unwrap(), 200_000);
        }
        to_server = client.turn(now, &to_client, &mut random, &mut transcript);
        sent.extend(to_server.iter().map(|(bytes, meta)| (bytes.len(), meta.gso.map(|gso| gso.size))));
    }
    // With an Ethernet header and headers with timestamps, 1,024 bytes are a packet of 1,076, and half-way to
    // 1,500 is 1,288.
    let probe = sent.iter().position(|&frame| frame == (14 + 1288, None)).expect("no probe was sent");
    let sizes = |frames: &[(usize, Option<u16>)]| {
        frames.iter().filter_map(|frame| frame.1).collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(sizes(&sent[..probe]), [1024].into());
    assert!(sizes(&sent[probe..]).contains(&(1288 - 52)), "{sent:?}");
    let stats = client.stack.tcp_stats();
    assert_eq!((stats.mtu_probes, stats.mtu_probes_lost), (stats.mtu_probes_acknowledged, 0));
    assert!(stats.mtu_probes >= 4, "{stats:?}");
}

/// A slot has many short connections within the time of a timer deferral: the deferred timer of an ended
/// connection must not arm that of a later one.
#[test]
fn timers_of_short_connections_never_reach_the_wheel() {
    let config = TcpConfig::default();
    let mut server = TestHost::new('S', 1, 2, &config, true, false);
    let mut client = TestHost::new('C', 2, 1, &config, true, false);
    let to = SocketAddr::new(address(1).into(), 80);
    server.stack.listen(to, ListenOptions::default()).unwrap();
    // The first number of this generator lets an application do nothing.
    let (idle, mut transcript) = (|| Random(1), Transcript::new());
    let mut now = Instant::from_millis(1_000);
    let mut frames = Vec::new();
    for _ in 0..100 {
        let conn = client.stack.connect(now, to, &ConnectOptions::default()).unwrap();
        for turn in 0..8 {
            if turn == 3 {
                client.stack.close(conn).unwrap();
            }
            frames = client.turn(now, &frames, &mut idle(), &mut transcript);
            frames = server.turn(now, &frames, &mut idle(), &mut transcript);
            server.conns.clear();
            assert!(server.stack.tcp.wheel.is_empty() && server.stack.tcp.releases.len() == 0, "{now:?}");
            now += Duration::from_micros(50);
        }
    }
    assert_eq!(server.stack.tcp_stats().passive_opens, 100);
    assert_eq!(server.stack.usage().connections, 0);
    // After its data were acknowledged, a longer connection waits for the release of its active state.
    client.stack.connect(now, to, &ConnectOptions::default()).unwrap();
    for turn in 0..20 {
        frames = client.turn(now, &frames, &mut idle(), &mut transcript);
        frames = server.turn(now, &frames, &mut idle(), &mut transcript);
        if turn == 3 {
            server.stack.send(server.conns[0], b"data").unwrap();
        }
        now += Duration::from_millis(1);
    }
    assert_eq!((server.stack.tcp.wheel.len(), server.stack.tcp.releases.len()), (0, 1));
    assert_eq!(server.stack.usage().active, 1);
    for _ in 0..250 {
        frames = client.turn(now, &frames, &mut idle(), &mut transcript);
        frames = server.turn(now, &frames, &mut idle(), &mut transcript);
        now += Duration::from_millis(1);
    }
    assert_eq!((server.stack.tcp.wheel.len(), server.stack.tcp.releases.len()), (0, 0));
    assert_eq!(server.stack.usage().active, 0);
}

/// Returns how many active states a server with `connections` has in use after it has sent `len` bytes on
/// each of ten connections and everything was acknowledged.
fn active_after_acknowledgement(connections: usize, len: usize) -> usize {
    let config = TcpConfig::default();
    let mut server = TestHost::new('S', 1, 2, &config, true, false);
    let mut client = TestHost::new('C', 2, 1, &config, true, false);
    let to = SocketAddr::new(address(1).into(), 80);
    server.acts = false;
    server.stack.listen(to, ListenOptions::default()).unwrap();
    let (idle, mut transcript) = (|| Random(1), Transcript::new());
    let mut now = Instant::from_millis(1_000);
    let mut frames = Vec::new();
    let mut turn = |client: &mut TestHost, server: &mut TestHost| {
        frames = client.turn(now, &frames, &mut idle(), &mut transcript);
        frames = server.turn(now, &frames, &mut idle(), &mut transcript);
        now += Duration::from_micros(100);
    };
    for _ in 0..connections / 100 {
        for _ in 0..100 {
            client.stack.connect(Instant::from_millis(1_000), to, &ConnectOptions::default()).unwrap();
        }
        for _ in 0..4 {
            turn(&mut client, &mut server);
        }
    }
    assert_eq!(server.conns.len(), connections);
    let ten = server.conns[..10].to_vec();
    for conn in &ten {
        server.stack.send(*conn, &vec![1; len]).unwrap();
    }
    for _ in 0..20 {
        turn(&mut client, &mut server);
    }
    assert!(ten.iter().all(|conn| server.stack.queued(*conn) == 0));
    server.stack.usage().active
}

/// On a stack with many connections the active state of one that has sent little is free at once, and is
/// used by the next one. A window that has grown is kept.
#[test]
fn many_connections_release_their_active_states_early() {
    assert_eq!(active_after_acknowledgement(3_000, 100), 0);
    assert_eq!(active_after_acknowledgement(3_000, 40_000), 10);
    assert_eq!(active_after_acknowledgement(100, 100), 10);
}

/// Returns the payload lengths and the times in µs of what a server sends that defers quick acknowledgements
/// for 100 µs, after two requests of 10 bytes that arrive `apart`. It answers one of them with 20 bytes
/// `after` the first one has arrived, if at all.
fn sent_after_requests(apart: Duration, after: Option<Duration>) -> Vec<(usize, u64)> {
    let config = TcpConfig { timestamps: false, ..TcpConfig::default() };
    let mut server = TestHost::new('S', 1, 2, &config, true, false);
    let mut client = TestHost::new('C', 2, 1, &config, true, false);
    server.stack.defer_quick_acks(Duration::from_micros(100));
    let to = SocketAddr::new(address(1).into(), 80);
    server.stack.listen(to, ListenOptions::default()).unwrap();
    // The applications do nothing by themselves.
    let (mut random, mut transcript) = (Random(1), Transcript::new());
    let mut now = Instant::from_millis(1_000);
    let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
    let conn =
        client.stack.connect(now, to, &ConnectOptions { socket, ..ConnectOptions::default() }).unwrap();
    let mut frames = Vec::new();
    for _ in 0..2 {
        frames = client.turn(now, &frames, &mut random, &mut transcript);
        frames = server.turn(now, &frames, &mut random, &mut transcript);
    }
    let accepted = core::mem::take(&mut server.conns)[0];
    let start = now;
    let mut sent = Vec::new();
    for micros in 0..300 {
        now = start + Duration::from_micros(micros);
        if Duration::from_micros(micros) == Duration::ZERO || now - start == apart {
            client.stack.send(conn, &[5; 10]).unwrap();
        }
        if after == Some(now - start) {
            server.stack.send(accepted, &[6; 20]).unwrap();
        }
        let frames = client.turn(now, &[], &mut random, &mut transcript);
        if frames.is_empty()
            && server.stack.next_deadline().is_none_or(|at| at > now)
            && after != Some(now - start)
        {
            continue;
        }
        let answers = server.turn(now, &frames, &mut random, &mut transcript);
        sent.extend(answers.iter().map(|(bytes, _)| (bytes.len() - 54, micros)));
    }
    sent
}

#[test]
fn quick_acks_are_deferred_up_to_the_delay() {
    let (never, micros) = (Duration::from_secs(1), Duration::from_micros);
    assert_eq!(sent_after_requests(never, Some(micros(30))), [(20, 30)], "the answer carries it");
    assert_eq!(sent_after_requests(never, None), [(0, 100)], "no answer");
    assert_eq!(sent_after_requests(never, Some(micros(130))), [(0, 100), (20, 130)], "too late");
    assert_eq!(sent_after_requests(micros(40), None), [(0, 40)], "a second segment");
}

#[test]
fn tos_and_hop_limit_apply_to_all_segments() {
    let config = TcpConfig::default();
    let mut random = Random(1);
    let (mut transcript, now) = (Vec::new(), Instant::from_millis(1_000));
    let mut a = TestHost::new('a', 1, 2, &config, true, false);
    let mut b = TestHost::new('b', 2, 1, &config, true, false);
    let options = |tos, hops| SocketOptions { tos, hop_limit: Some(hops), ..SocketOptions::default() };
    let listen = ListenOptions { socket: options(0x48, 33), ..ListenOptions::default() };
    let at = SocketAddr::from((address(2), 80));
    b.stack.listen(at, listen).unwrap();
    let connect = ConnectOptions { socket: options(0x20, 77), ..ConnectOptions::default() };
    let conn = a.stack.connect(now, at, &connect).unwrap();
    let tos_and_ttl = |frames: &[(Vec<u8>, crate::device::TxMeta)]| (frames[0].0[15], frames[0].0[22]);
    let syn = a.turn(now, &[], &mut random, &mut transcript);
    assert_eq!(tos_and_ttl(&syn), (0x20, 77));
    let answer = b.turn(now, &syn, &mut random, &mut transcript);
    assert_eq!(tos_and_ttl(&answer), (0x48, 33));
    (a.acts, b.acts) = (false, false);
    let ack = a.turn(now, &answer, &mut random, &mut transcript);
    assert!(b.turn(now, &ack, &mut random, &mut transcript).is_empty());
    // Segments that are not sent with the transmit list have them, too: a keepalive probe and RST.
    let idle = Duration::from_secs(2);
    b.stack.set_option(b.conns[0], TcpOption::KeepIdle(idle)).unwrap();
    b.stack.set_option(b.conns[0], TcpOption::KeepAlive(true)).unwrap();
    assert!(b.turn(now + idle / 2, &[], &mut random, &mut transcript).is_empty());
    let later = now + idle + Duration::from_millis(1);
    let probe = b.turn(later, &[], &mut random, &mut transcript);
    assert_eq!(tos_and_ttl(&probe), (0x48, 33));
    a.stack.abort(conn).unwrap();
    let reset = a.turn(later, &[], &mut random, &mut transcript);
    assert_eq!((tos_and_ttl(&reset), reset[0].0[47] & 4), ((0x20, 77), 4));
    for wrong in [options(1, 33), options(0, 0)] {
        let connect = ConnectOptions { socket: wrong, ..ConnectOptions::default() };
        assert_eq!(a.stack.connect(now, at, &connect), Err(ConnectError::InvalidOption));
    }
}

/// Returns the hash with which a frame with a TCP segment must be labelled: that of its addresses and ports,
/// in the order in which the frame has them, with Microsoft's key.
fn hash_of(frame: &[u8]) -> u32 {
    let address =
        |at: usize| IpAddr::V4(Ipv4Addr::new(frame[at], frame[at + 1], frame[at + 2], frame[at + 3]));
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    Toeplitz::new(&toeplitz::KEY).hash(address(26), address(30), Some((port(34), port(36))))
}

/// Checks the labels of what one host sends, whose connections have one priority.
struct LabelCheck {
    /// True if the device carries labels.
    labels: bool,
    priority: u8,
    /// Number of segments that had the label of their connection.
    labelled: usize,
    /// Flags of those segments.
    flags: u8,
}

impl LabelCheck {
    fn new(priority: u8) -> Self {
        Self { labels: false, priority, labelled: 0, flags: 0 }
    }

    /// Runs [`TestHost::turn`], and checks what the host sends.
    fn turn(
        &mut self,
        host: &mut TestHost,
        now: Instant,
        frames: &[(Vec<u8>, crate::device::TxMeta)],
        random: &mut Random,
        transcript: &mut Transcript,
    ) -> Vec<(Vec<u8>, crate::device::TxMeta)> {
        let mut in_time_wait = host.time_wait_ports(now);
        let sent = host.turn(now, frames, random, transcript);
        in_time_wait.extend(host.time_wait_ports(now));
        for (frame, meta) in &sent {
            let expected =
                if self.labels { Label::new(Some(hash_of(frame)), self.priority) } else { Label::NONE };
            if meta.label == expected {
                self.labelled += usize::from(self.labels);
                self.flags |= if self.labels { frame[47] } else { 0 };
                continue;
            }
            // A reset outside of connections has no label. Unlike that of a connection it has no timestamps.
            let is_foreign_reset = frame[47] & 4 != 0 && frame[46] >> 4 == 5 && meta.label == Label::NONE;
            // TIME-WAIT does not store the hash. It sends acknowledgements only.
            let ports = [34, 36].map(|at| u16::from_be_bytes([frame[at], frame[at + 1]]));
            let is_from_time_wait = frame[47] == 0x10
                && meta.label == Label::new(None, self.priority)
                && in_time_wait.contains(&ports);
            assert!(is_foreign_reset || is_from_time_wait, "{frame:02x?} {meta:?}");
        }
        sent
    }
}

#[test]
fn every_segment_is_labelled_for_capable_device() {
    let config = TcpConfig { time_wait_seconds: 1, ..TcpConfig::default() };
    let (mut from_server, mut from_client) = (LabelCheck::new(3), LabelCheck::new(5));
    for seed in 0..12 {
        let (mut random, mut transcript) = (Random(seed), Transcript::new());
        let (labels, gso, predicts) = (seed % 4 != 3, seed % 2 == 0, seed % 3 != 0);
        (from_server.labels, from_client.labels) = (labels, labels);
        let mut server = TestHost::with_device('S', 1, 2, &config, predicts, gso, labels);
        let mut client = TestHost::with_device('C', 2, 1, &config, predicts, gso, labels);
        let to = SocketAddr::new(address(1).into(), 80);
        let socket = |priority| SocketOptions { priority, ..SocketOptions::default() };
        let options = ListenOptions { socket: socket(3), ..ListenOptions::default() };
        server.stack.listen(to, options).unwrap();
        let mut now = Instant::from_millis(1_000);
        let mut to_server: Vec<(Vec<u8>, crate::device::TxMeta)> = Vec::new();
        for _ in 0..600 {
            now += Duration::from_micros(100 + random.below(3_000));
            if random.below(100) == 0 {
                now += Duration::from_millis(random.below(1_500));
            }
            if client.conns.len() < 3 && random.below(5) == 0 {
                let options = ConnectOptions { socket: socket(5), ..ConnectOptions::default() };
                client.conns.extend(client.stack.connect(now, to, &options));
            }
            if random.below(60) == 0
                && let Some(conn) = client.conns.pop()
            {
                client.stack.abort(conn).unwrap();
            }
            to_server.retain(|_| random.below(20) > 0);
            let mut to_client = from_server.turn(&mut server, now, &to_server, &mut random, &mut transcript);
            to_client.retain(|_| random.below(20) > 0);
            to_server = from_client.turn(&mut client, now, &to_client, &mut random, &mut transcript);
        }
    }
    // SYN, FIN, PSH and ACK; the client's application also aborts connections.
    for (check, flags) in [(from_server, 0x1b), (from_client, 0x1f)] {
        assert!(check.labelled > 1_000, "{}", check.labelled);
        assert_eq!(check.flags & flags, flags, "labelled flags");
    }
}

/// Returns the order in which connections of these priorities send in turns with `room` frames each, as
/// indices of connections that queued data one after the other.
fn sending_order(priorities: &[u8], room: usize) -> Vec<usize> {
    let config = TcpConfig::default();
    let (mut random, mut transcript) = (Random(1), Transcript::new());
    let mut a = TestHost::new('a', 1, 2, &config, true, false);
    let mut b = TestHost::new('b', 2, 1, &config, true, false);
    let at = SocketAddr::from((address(2), 80));
    b.stack.listen(at, ListenOptions::default()).unwrap();
    let mut now = Instant::from_millis(1_000);
    let conns: Vec<Conn> =
        priorities.iter().map(|_| a.stack.connect(now, at, &ConnectOptions::default()).unwrap()).collect();
    let mut frames = Vec::new();
    for _ in 0..3 {
        now += Duration::from_millis(1);
        frames = a.turn(now, &frames, &mut random, &mut transcript);
        frames = b.turn(now, &frames, &mut random, &mut transcript);
        b.conns.clear();
    }
    let ports: Vec<u16> = conns.iter().map(|conn| a.stack.endpoints(*conn).unwrap()[0].port()).collect();
    for (conn, &priority) in conns.iter().zip(priorities) {
        a.stack.set_option(*conn, TcpOption::Priority(priority)).unwrap();
    }
    conns.iter().for_each(|conn| assert_eq!(a.stack.send(*conn, b"now"), Ok(3)));
    let mut order = Vec::new();
    while order.len() < priorities.len() {
        a.recorder.lock().unwrap().capacity = room;
        let sent = a.turn(now, &[], &mut random, &mut transcript);
        assert!(!sent.is_empty() && sent.len() <= room);
        order.extend(sent.iter().map(|(frame, _)| {
            let port = u16::from_be_bytes([frame[34], frame[35]]);
            ports.iter().position(|own| *own == port).unwrap()
        }));
    }
    order
}

#[test]
fn higher_priority_sends_first_equal_priority_in_turn() {
    let mixed = [0, 1, 7, 0, 2, 7, 1, 5];
    assert_eq!(sending_order(&[0; 5], usize::MAX), [0, 1, 2, 3, 4]);
    assert_eq!(sending_order(&mixed, usize::MAX), [2, 5, 7, 4, 0, 3, 1, 6]);
    // A connection that finds the device full is queued after the others of its class, but before those of
    // lower classes.
    for room in [1, 2, 3, 5] {
        let order: Vec<u8> = sending_order(&mixed, room).into_iter().map(|conn| mixed[conn]).collect();
        assert_eq!(order, [7, 7, 5, 2, 0, 0, 1, 1], "{room}");
    }
}

#[test]
fn a_priority_is_one_of_eight() {
    let config = TcpConfig::default();
    let mut a = TestHost::new('a', 1, 2, &config, true, false);
    let (now, at) = (Instant::from_millis(1_000), SocketAddr::from((address(2), 80)));
    let conn = a.stack.connect(now, at, &ConnectOptions::default()).unwrap();
    assert_eq!(a.stack.set_option(conn, TcpOption::Priority(7)), Ok(()));
    assert_eq!(a.stack.set_option(conn, TcpOption::Priority(8)), Err(OptionError::Invalid));
    let socket = SocketOptions { priority: 8, ..SocketOptions::default() };
    let connect = ConnectOptions { socket, ..ConnectOptions::default() };
    assert_eq!(a.stack.connect(now, at, &connect), Err(ConnectError::InvalidOption));
    let listen = ListenOptions { socket, ..ListenOptions::default() };
    assert!(a.stack.listen(SocketAddr::from((address(1), 80)), listen).is_err());
}

/// A connection that moves to another listener keeps its class, and so does the event that reports it.
#[test]
fn closed_listener_hands_on_connections_with_their_classes() {
    for closing_class in [BEST_EFFORT, 6] {
        let config = TcpConfig::default();
        let (mut random, mut transcript) = (Random(1), Transcript::new());
        let mut a = TestHost::new('a', 1, 2, &config, true, false);
        let mut b = TestHost::new('b', 2, 1, &config, true, false);
        a.acts = false;
        let at = SocketAddr::from((address(2), 80));
        let shared = || ListenOptions { reuse_port: true, ..ListenOptions::default() };
        let listeners = [(); 2].map(|()| b.stack.listen(at, shared()).unwrap());
        let now = Instant::from_millis(1_001);
        let conns: Vec<Conn> =
            (0..40).map(|_| a.stack.connect(now, at, &ConnectOptions::default()).unwrap()).collect();
        let ports: Vec<u16> = conns.iter().map(|conn| a.stack.endpoints(*conn).unwrap()[0].port()).collect();
        let class_of = |port: u16| match ports.iter().position(|own| *own == port).unwrap() % 2 {
            0 => BEST_EFFORT,
            _ => 6,
        };
        let syns = a.turn(now, &[], &mut random, &mut transcript);
        let answers = b.turn(now, &syns, &mut random, &mut transcript);
        let acks = a.turn(now, &answers, &mut random, &mut transcript);
        for (frame, _) in &acks {
            b.stack.select_class(class_of(u16::from_be_bytes([frame[34], frame[35]])));
            let burst: RxBurst<'_> = [RxFrame::new(frame)].into_iter().collect();
            b.stack.receive(now, b.port, &burst);
            b.stack.finish_burst(&burst);
        }
        b.stack.select_class(closing_class);
        assert!(b.stack.unlisten(listeners[0]));
        let mut accepted = [0; 2];
        for (class, accepted) in [6, BEST_EFFORT].into_iter().zip(&mut accepted) {
            b.stack.select_class(class);
            while let Some(event) = b.stack.next_event() {
                let Event::Incoming { listener } = event else { panic!("{event:?}") };
                let Some(conn) = b.stack.accept_incoming(listener) else { continue };
                assert_eq!(class_of(b.stack.endpoints(conn).unwrap()[1].port()), class);
                *accepted += 1;
            }
        }
        assert_eq!(accepted, [20, 20]);
        b.stack.check_invariants();
    }
}

/// Returns a host with a link for IPv6, whose frames have a VLAN tag.
fn ipv6_host(name: char, own: u8, peer: u8) -> TestHost {
    let mut host = TestHost::new(name, own, peer, &TcpConfig::default(), true, false);
    let link = LinkConfig {
        name: "line6".into(),
        vlan: Some(6),
        addresses: vec![(address_v6(own).into(), 64)],
        static_neighbours: vec![(address_v6(peer).into(), MacAddr(mac(peer)))],
        ..LinkConfig::default()
    };
    host.stack.add_link(host.port, &link).unwrap();
    host.acts = false;
    // Nobody else has its addresses.
    for ms in (0..5_000).step_by(100) {
        host.turn(Instant::from_millis(ms), &[], &mut Random(1), &mut Vec::new());
    }
    host
}

fn address_v6(last: u8) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last.into())
}

/// Returns the flow labels of the packets of a protocol over IPv6 in these frames with a VLAN tag.
fn flow_labels(frames: &[(Vec<u8>, crate::device::TxMeta)], protocol: u8) -> Vec<u32> {
    let packets = frames.iter().filter(|(frame, _)| frame[16..18] == [0x86, 0xdd] && frame[24] == protocol);
    packets.map(|(frame, _)| u32::from_be_bytes(*frame[18..].first_chunk().unwrap()) & 0xf_ffff).collect()
}

#[test]
fn flow_labels_are_in_all_segments() {
    let (auto, reflect) = (FlowLabel::Auto, FlowLabel::Reflect);
    let (mut random, mut transcript, now) = (Random(1), Vec::new(), Instant::from_millis(6_000));
    let mut automatic = Vec::new();
    for (of_listener, of_client) in [
        (FlowLabel::Fixed(0), FlowLabel::Fixed(0x1_2345)),
        (reflect, FlowLabel::Fixed(0xf_ffff)),
        (reflect, FlowLabel::Fixed(0)),
        (reflect, auto),
        (auto, reflect),
    ] {
        let (mut a, mut b) = (ipv6_host('a', 1, 2), ipv6_host('b', 2, 1));
        let options = |flow_label| SocketOptions { flow_label, ..SocketOptions::default() };
        let at = SocketAddr::from((address_v6(2), 80));
        let listen = ListenOptions { socket: options(of_listener), ..ListenOptions::default() };
        b.stack.listen(at, listen).unwrap();
        let connect = ConnectOptions { socket: options(of_client), ..ConnectOptions::default() };
        let conn = a.stack.connect(now, at, &connect).unwrap();
        let syn = a.turn(now, &[], &mut random, &mut transcript);
        let [of_syn] = flow_labels(&syn, 6)[..] else { panic!("one SYN") };
        let syn_ack = b.turn(now, &syn, &mut random, &mut transcript);
        let [of_syn_ack] = flow_labels(&syn_ack, 6)[..] else { panic!("one SYN+ACK") };
        let ack = a.turn(now, &syn_ack, &mut random, &mut transcript);
        assert_eq!(flow_labels(&ack, 6), [of_syn]);
        match of_client {
            FlowLabel::Fixed(label) => assert_eq!(of_syn, label),
            FlowLabel::Auto | FlowLabel::Reflect => automatic.push(of_syn),
        }
        match of_listener {
            FlowLabel::Fixed(label) => assert_eq!(of_syn_ack, label),
            FlowLabel::Reflect if of_syn != 0 => assert_eq!(of_syn_ack, of_syn),
            FlowLabel::Auto | FlowLabel::Reflect => automatic.push(of_syn_ack),
        }
        b.turn(now, &ack, &mut random, &mut transcript);
        b.stack.send(b.conns[0], b"data").unwrap();
        let data = b.turn(now, &[], &mut random, &mut transcript);
        assert_eq!(flow_labels(&data, 6), [of_syn_ack], "{of_listener:?}");
        a.stack.set_option(conn, TcpOption::FlowLabel(FlowLabel::Fixed(7))).unwrap();
        a.stack.abort(conn).unwrap();
        assert_eq!(flow_labels(&a.turn(now, &[], &mut random, &mut transcript), 6), [7]);
        let wrong =
            ConnectOptions { socket: options(FlowLabel::Fixed(1 << 20)), ..ConnectOptions::default() };
        assert_eq!(a.stack.connect(now, at, &wrong), Err(ConnectError::InvalidOption));
    }
    assert!(automatic.len() == 4 && !automatic.contains(&0), "{automatic:x?}");
}

#[test]
fn flow_labels_are_in_datagrams() {
    let (mut random, mut transcript, now) = (Random(1), Vec::new(), Instant::from_millis(6_000));
    let mut a = ipv6_host('a', 1, 2);
    let mut label_of = |socket: FlowLabel, flow_label: Option<FlowLabel>, len: usize| {
        let options = UdpOptions { flow_label: socket, ..UdpOptions::default() };
        let udp = a.stack.udp_bind(SocketAddr::from((address_v6(1), 7)), options).unwrap();
        let to = Some(SocketAddr::from((address_v6(2), 9)));
        let params = UdpSendParams { to, flow_label, ..UdpSendParams::default() };
        a.stack.udp_send_with(now, udp, &params, &vec![0; len]).unwrap();
        a.stack.udp_close(udp).unwrap();
        let sent = a.turn(now, &[], &mut random, &mut transcript);
        [flow_labels(&sent, 17), flow_labels(&sent, 44)].concat()
    };
    let automatic = label_of(FlowLabel::Auto, None, 1);
    assert!(automatic.len() == 1 && automatic[0] != 0);
    assert_eq!(label_of(FlowLabel::Fixed(5), Some(FlowLabel::Auto), 1), automatic, "one flow, one label");
    assert_eq!(label_of(FlowLabel::Fixed(5), None, 1), [5]);
    assert_eq!(label_of(FlowLabel::Auto, Some(FlowLabel::Fixed(6)), 1), [6]);
    assert_eq!(label_of(FlowLabel::Fixed(0), None, 1), [0]);
    assert_eq!(label_of(FlowLabel::Fixed(5), None, 2000), [5, 5], "fragments");
}
