//! Stacks that are exchanged while they are used: another stack takes over the image, and no peer notices.
//!
//! Each scenario runs without an exchange first, and then again with an exchange after each of many steps.
//! All runs must send equal frames at equal times.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, LinkId, Listener, UdpHandle};
use ginnel_stack::multicast::{MulticastOptions, SourceFilter};
use ginnel_stack::options::{ConnectOptions, ListenOptions, SocketOptions, TcpOption};
use ginnel_stack::socket_filter::{FilteredPacket, SocketFilter};
use ginnel_stack::stack::{Nothing, Restorer, Stack, StackConfig, StackImage};
use ginnel_stack::tcp::config::CongestionControl;
use ginnel_stack::tcp::source::{PreloadedSource, Source, SourceId};
use ginnel_stack::time::Instant;
use ginnel_stack::udp::UdpOptions;
use ginnel_stack::wire::MacAddr;
use ginnel_testkit::layout::{layout_hash, layout_of};
use ginnel_testkit::sim::{ConnRecord, HostConfig, LinkModel, Sim, image_of, restore, seeds};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// Time between two calls of a script.
const SLICE: Duration = Duration::from_millis(10);

/// The actions of two hosts.
struct Scenario {
    seed: u64,
    hosts: [HostConfig; 2],
    link: LinkModel,
    slices: u32,
    /// Called before each slice with its number.
    script: fn(&mut Sim, u32),
}

impl Default for Scenario {
    fn default() -> Self {
        let neighbours =
            |number: u8| vec![(IpAddr::from([10, 0, 0, number]), MacAddr([2, 0, 0, 0, 0, number]))];
        let host =
            |other| HostConfig { static_neighbours: neighbours(other), mtu: 1000, ..Default::default() };
        Self {
            seed: 1,
            hosts: [host(2), host(1)],
            link: LinkModel::default(),
            slices: 300,
            script: |_, _| {},
        }
    }
}

/// The results of a run that others see.
struct Outcome {
    frames: Vec<(Instant, usize, Vec<u8>)>,
    records: Vec<BTreeMap<Conn, ConnRecord>>,
    steps: usize,
}

impl Scenario {
    /// Runs the scenario, with an exchange of one or both stacks after `step` steps.
    fn run(&self, exchange: Option<(usize, &[usize])>) -> Outcome {
        let [a, b] = self.hosts.clone();
        let mut sim = Sim::pair_with(self.seed, a, b, self.link.clone());
        let frames = Rc::new(RefCell::new(Vec::new()));
        let tapped = Rc::clone(&frames);
        sim.tap = Some(Box::new(move |at, from, frame| {
            if is_transport(frame) {
                tapped.borrow_mut().push((at, from, frame.to_vec()));
            }
        }));
        let mut steps = 0;
        for slice in 0..self.slices {
            (self.script)(&mut sim, slice);
            let until = sim.now + SLICE;
            while sim.step(until) {
                steps += 1;
                if let Some((at, hosts)) = exchange
                    && at == steps
                {
                    let now = sim.now;
                    hosts.iter().for_each(|host| {
                        sim.hosts[*host].exchange(now);
                    });
                }
            }
        }
        let records = sim.hosts.iter().map(|host| host.received.clone()).collect();
        drop(sim);
        let frames = Rc::into_inner(frames).expect("the simulation is gone").into_inner();
        Outcome { frames, records, steps }
    }

    /// Compares a run with an exchange after every `every`th step with one without.
    fn check(&self, every: usize) {
        let expected = self.run(None);
        let mut moments: Vec<usize> = (1..=expected.steps).step_by(every).collect();
        moments.push(expected.steps);
        for step in moments {
            for hosts in [&[0][..], &[1], &[0, 1]] {
                let got = self.run(Some((step, hosts)));
                let different = expected.frames.iter().zip(&got.frames).position(|(a, b)| a != b);
                if let Some(at) = different {
                    let (a, b) = (&expected.frames[at], &got.frames[at]);
                    panic!(
                        "{hosts:?} after step {step} of {}: frame {at} differs:\n{a:02x?}\n{b:02x?}",
                        expected.steps
                    );
                }
                assert_eq!(got.frames.len(), expected.frames.len(), "{hosts:?} after step {step}");
                let is_equal = got.records == expected.records;
                assert!(is_equal, "exchange of {hosts:?} after step {step}: the applications differ");
            }
        }
    }
}

/// Returns whether a frame carries TCP or UDP. Links are configured anew, so that they send other frames.
fn is_transport(frame: &[u8]) -> bool {
    match frame[12..14] {
        [0x08, 0x00] => matches!(frame[23], 6 | 17),
        [0x86, 0xdd] => matches!(frame[20], 6 | 17),
        _ => false,
    }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Random::new(seed);
    (0..len.div_ceil(8)).flat_map(|_| rng.next_u64().to_le_bytes()).take(len).collect()
}

fn server(sim: &Sim) -> SocketAddr {
    SocketAddr::new(sim.hosts[1].v4.into(), 80)
}

/// Opens a connection from host 0 to port 80 of host 1, sends in both directions and closes.
fn transfer_both_ways(sim: &mut Sim, slice: u32) {
    let now = sim.now;
    match slice {
        0 => {
            sim.hosts[1].listen(80);
            sim.hosts[1].close_on_peer_close = true;
            let to = server(sim);
            let client = sim.hosts[0].connect(now, to);
            sim.hosts[0].send_all(now, client, bytes(7, 60_000), true);
            sim.collect(0);
        }
        1 => {
            if let Some(&served) = sim.hosts[1].accepted.first() {
                sim.hosts[1].send_all(now, served, bytes(8, 40_000), false);
                sim.collect(1);
            }
        }
        _ => {}
    }
}

#[test]
fn transfer_goes_on_exactly() {
    let link = LinkModel { rate_bps: 10_000_000, queue_bytes: 200_000, ..LinkModel::default() };
    let scenario = Scenario { script: transfer_both_ways, link, slices: 100, ..Scenario::default() };
    let outcome = scenario.run(None);
    assert!(outcome.records[1].values().any(|record| record.bytes == bytes(7, 60_000)));
    assert!(outcome.records[0].values().any(|record| record.bytes == bytes(8, 40_000)));
    scenario.check(1);
}

#[test]
fn transfer_under_faults_goes_on_exactly() {
    for seed in seeds(4) {
        let link = LinkModel {
            loss: 0.05,
            duplicate: 0.02,
            reorder: 0.05,
            jitter: Duration::from_millis(1),
            ..LinkModel::default()
        };
        let scenario = Scenario { seed, link, script: transfer_both_ways, ..Scenario::default() };
        scenario.check(5);
    }
}

#[test]
fn transfer_over_ipv6_goes_on_exactly() {
    let script = |sim: &mut Sim, slice: u32| {
        let now = sim.now;
        if slice == 0 {
            let any = SocketAddr::new(core::net::Ipv6Addr::UNSPECIFIED.into(), 80);
            sim.hosts[1].stack.listen(any, ListenOptions::default()).unwrap();
            sim.hosts[1].close_on_peer_close = true;
        } else if slice == 300 {
            let to = SocketAddr::new(sim.hosts[1].v6.into(), 80);
            let client = sim.hosts[0].connect(now, to);
            sim.hosts[0].send_all(now, client, bytes(7, 60_000), true);
            sim.collect(0);
        }
    };
    let neighbours = |number: u16| {
        vec![(IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, number]), MacAddr([2, 0, 0, 0, 0, number as u8]))]
    };
    let host = |other| HostConfig { static_neighbours: neighbours(other), ..Default::default() };
    let scenario = Scenario { hosts: [host(2), host(1)], slices: 400, script, ..Scenario::default() };
    let outcome = scenario.run(None);
    assert!(outcome.records[1].values().any(|record| record.bytes == bytes(7, 60_000)));
    scenario.check(7);
}

/// The reader is slow: the window closes and is probed.
#[test]
fn closed_window_is_probed_and_opened() {
    let script = |sim: &mut Sim, slice: u32| {
        let now = sim.now;
        if slice == 0 {
            sim.hosts[1].listen(80);
            sim.hosts[1].defer_reads = true;
            let to = server(sim);
            let client = sim.hosts[0].connect(now, to);
            sim.hosts[0].send_all(now, client, bytes(7, 100_000), true);
            sim.collect(0);
        } else if slice > 150 && slice.is_multiple_of(10) {
            let served = sim.hosts[1].accepted[0];
            sim.hosts[1].read(served, 9_000);
            sim.hosts[1].stack.transmit(now);
            sim.collect(1);
        }
    };
    let mut scenario = Scenario { script, ..Scenario::default() };
    scenario.hosts[1].stack.tcp.recv_buffer_bytes = 16 << 10;
    let outcome = scenario.run(None);
    assert!(outcome.records[1].values().any(|record| record.bytes == bytes(7, 100_000)));
    scenario.check(2);
}

/// The accept queue is full, one connection ends in it, and half-open ones wait.
#[test]
fn accept_queue_is_kept() {
    let script = |sim: &mut Sim, slice: u32| {
        let now = sim.now;
        let listener = Listener::new(0, 0);
        match slice {
            0 => {
                let options = ListenOptions { backlog: 2, ..ListenOptions::default() };
                sim.hosts[1].stack.listen("0.0.0.0:80".parse().unwrap(), options).unwrap();
                sim.hosts[1].defer_accepts = true;
            }
            1..=6 => {
                let to = server(sim);
                let client = sim.hosts[0].connect(now, to);
                sim.hosts[0].send_all(now, client, bytes(slice.into(), 3_000), slice == 2);
                if slice == 3 {
                    sim.run(Duration::from_millis(5));
                    sim.hosts[0].stack.abort(client).unwrap();
                }
                sim.collect(0);
            }
            50 | 100 | 150 | 200 => {
                sim.hosts[1].defer_accepts = slice < 200;
                while let Some(conn) = sim.hosts[1].stack.accept(listener) {
                    sim.hosts[1].accepted.push(conn);
                    sim.hosts[1].received.entry(conn).or_default().connected = true;
                }
            }
            _ => {}
        }
    };
    let scenario = Scenario { script, slices: 400, ..Scenario::default() };
    let outcome = scenario.run(None);
    let complete = outcome.records[1].values().filter(|record| record.bytes.len() == 3_000).count();
    assert!(complete >= 3, "{complete}");
    scenario.check(3);
}

/// SYN+ACKs are lost at first, and so is everything at the end: timers of handshakes and of keepalive.
#[test]
fn timers_expire_when_they_would_have() {
    let script = |sim: &mut Sim, slice: u32| {
        let now = sim.now;
        match slice {
            0 => {
                sim.set_link_from(1, &LinkModel { loss: 1.0, ..LinkModel::default() });
                sim.hosts[1].listen(80);
                let to = server(sim);
                for _ in 0..2 {
                    let client = sim.hosts[0].connect(now, to);
                    let stack = &mut sim.hosts[0].stack;
                    stack.set_option(client, TcpOption::KeepAlive(true)).unwrap();
                    stack.set_option(client, TcpOption::KeepIdle(Duration::from_secs(1))).unwrap();
                    stack.set_option(client, TcpOption::KeepInterval(Duration::from_secs(1))).unwrap();
                    stack.set_option(client, TcpOption::KeepCount(2)).unwrap();
                }
                sim.collect(0);
            }
            120 => sim.set_link(&LinkModel::default()),
            // A response without a request waits for its delayed acknowledgement.
            330 | 335 => {
                let served = sim.hosts[1].accepted[0];
                sim.hosts[1].send_all(now, served, bytes(1, 100), false);
                sim.collect(1);
            }
            500 => sim.set_link(&LinkModel { loss: 1.0, ..LinkModel::default() }),
            _ => {}
        }
    };
    let scenario = Scenario { script, slices: 1200, ..Scenario::default() };
    let outcome = scenario.run(None);
    assert!(outcome.records[0].values().all(|record| record.closed == Some(CloseReason::TimedOut)));
    scenario.check(1);
}

#[test]
fn urgent_data_and_cork_are_kept() {
    let script = |sim: &mut Sim, slice: u32| {
        let now = sim.now;
        let client = Conn::new(0, 0);
        match slice {
            0 => {
                sim.hosts[1].listen(80);
                let to = server(sim);
                sim.hosts[0].connect(now, to);
            }
            1 => sim.hosts[0].send_all(now, client, bytes(7, 5_000), false),
            2 => {
                let stack = &mut sim.hosts[0].stack;
                stack.set_option(client, TcpOption::Cork(true)).unwrap();
                stack.send(client, b"held back").unwrap();
            }
            40 => {
                sim.hosts[0].stack.send_urgent(client, b"ab!").unwrap();
            }
            41 => {
                sim.hosts[0].stack.set_option(client, TcpOption::Cork(false)).unwrap();
            }
            60 => sim.hosts[0].send_all(now, client, bytes(9, 30_000), true),
            _ => {}
        }
        sim.hosts[0].stack.transmit(now);
        sim.collect(0);
    };
    let link = LinkModel { loss: 0.1, ..LinkModel::default() };
    let scenario = Scenario { script, link, slices: 200, seed: 5, ..Scenario::default() };
    scenario.check(2);
}

#[test]
fn bbr_paces_on() {
    let link = LinkModel {
        rate_bps: 10_000_000,
        queue_bytes: 50_000,
        delay: Duration::from_millis(5),
        loss: 0.01,
        ..LinkModel::default()
    };
    let mut scenario = Scenario { script: transfer_both_ways, link, ..Scenario::default() };
    for host in &mut scenario.hosts {
        host.stack.tcp.congestion_control = CongestionControl::Bbr;
    }
    scenario.check(11);
}

#[test]
fn fast_open_goes_on() {
    let script = |sim: &mut Sim, slice: u32| {
        let now = sim.now;
        match slice {
            0 => {
                let socket = SocketOptions { fastopen_queue: 4, ..SocketOptions::default() };
                let options = ListenOptions { socket, ..ListenOptions::default() };
                sim.hosts[1].stack.listen("0.0.0.0:80".parse().unwrap(), options).unwrap();
                sim.hosts[1].close_on_peer_close = true;
            }
            1 | 20 | 40 => {
                if slice == 40 {
                    sim.set_link_from(1, &LinkModel { loss: 1.0, ..LinkModel::default() });
                }
                let socket = SocketOptions { fastopen_connect: true, ..SocketOptions::default() };
                let options = ConnectOptions { socket, ..ConnectOptions::default() };
                let to = server(sim);
                let client = sim.hosts[0].stack.connect(now, to, &options).unwrap();
                sim.hosts[0].received.insert(client, ConnRecord::default());
                sim.hosts[0].send_all(now, client, bytes(slice.into(), 2_000), true);
                sim.collect(0);
            }
            200 => sim.set_link(&LinkModel::default()),
            _ => {}
        }
    };
    let mut scenario = Scenario { script, slices: 600, ..Scenario::default() };
    for host in &mut scenario.hosts {
        host.stack.tcp.fastopen = 3;
    }
    let outcome = scenario.run(None);
    assert_eq!(outcome.records[1].values().filter(|record| record.bytes.len() == 2_000).count(), 3);
    scenario.check(1);
}

#[test]
fn priorities_and_messages_are_kept() {
    let script = |sim: &mut Sim, slice: u32| {
        let now = sim.now;
        match slice {
            0 => {
                sim.hosts[1].listen(80);
                let to = server(sim);
                for priority in [0, 3, 6] {
                    let client = sim.hosts[0].connect(now, to);
                    sim.hosts[0].stack.set_option(client, TcpOption::Priority(priority)).unwrap();
                }
            }
            1..40 => {
                for index in 0..3 {
                    let client = Conn::new(index, 0);
                    let message = bytes(slice.into(), 700 + 100 * index as usize);
                    let _ = sim.hosts[0].stack.send_message(client, &message, (slice % 8) as u8);
                }
            }
            _ => {}
        }
        sim.hosts[0].stack.transmit(now);
        sim.collect(0);
    };
    let link = LinkModel { rate_bps: 1_000_000, queue_bytes: 20_000, ..LinkModel::default() };
    Scenario { script, link, slices: 150, ..Scenario::default() }.check(7);
}

/// Returns host 1 of a simulation whose connections are in many states.
fn busy_host(exchange: bool) -> Sim {
    let mut config = Scenario::default().hosts;
    config[1].stack.tcp.recv_buffer_bytes = 64 << 10;
    let [a, b] = config;
    let mut sim = Sim::pair_with(3, a, b, LinkModel::default());
    let now = sim.now;
    sim.hosts[1].listen(80);
    sim.hosts[1].listen(81);
    sim.hosts[1].defer_reads = true;
    let udp = UdpOptions { reuse_port: true, ..UdpOptions::default() };
    for _ in 0..2 {
        sim.hosts[1].stack.udp_bind("0.0.0.0:9".parse().unwrap(), udp).unwrap();
    }
    let client = sim.hosts[0].stack.udp_bind("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 9);
    sim.hosts[0].stack.udp_send_to(now, client, Some(to), b"datagram").unwrap();
    sim.collect(0);
    sim.run(Duration::from_millis(5));
    sim.set_link(&LinkModel { loss: 0.1, ..LinkModel::default() });
    for count in 0..6 {
        let (now, to) = (sim.now, server(&sim));
        let client = sim.hosts[0].connect(now, to);
        sim.hosts[0].send_all(now, client, bytes(count, 40_000), count % 2 == 0);
        sim.collect(0);
        sim.run(Duration::from_millis(if count == 5 { 2 } else { 20 }));
        if let Some(&served) = sim.hosts[1].accepted.last() {
            let now = sim.now;
            sim.hosts[1].send_all(now, served, bytes(count, 30_000), count == 1);
            sim.collect(1);
        }
    }
    sim.run(Duration::from_millis(7));
    if exchange {
        let now = sim.now;
        sim.hosts[1].exchange(now);
    }
    sim
}

#[test]
fn damaged_image_is_an_error_or_harmless() {
    let mut sim = busy_host(false);
    let now = sim.now;
    let image = image_of(&sim.hosts[1].stack);
    let restores = |image: &[u8]| {
        let mut stack = sim.hosts[1].fresh_stack(now);
        restore(&mut stack, image, &mut Nothing).is_ok()
    };
    assert!(restores(&image));
    for len in (0..image.len()).step_by(97) {
        assert!(!restores(&image[..len]), "an image of {len} bytes is complete");
    }
    let mut random = Random::new(1);
    let mut refused = 0;
    for _ in 0..4000 {
        let mut damaged = image.clone();
        // Most bytes are those of chunks.
        let at = random.next_u64() as usize % damaged.len();
        damaged[at] ^= 1 << (random.next_u64() % 8);
        refused += u32::from(!restores(&damaged));
    }
    assert!(refused > 20, "{refused}");
    // The bytes behind the chunks: tables and connections.
    let others: Vec<usize> = (0..image.len()).rev().take(8_000).collect();
    for at in others {
        let mut damaged = image.clone();
        damaged[at] = if at % 2 == 0 { 0xff } else { damaged[at].wrapping_add(1) };
        restores(&damaged);
    }
    // The stack itself was not changed.
    sim.run(Duration::from_secs(1));
}

#[test]
fn limit_that_is_too_small_is_named() {
    let sim = busy_host(true);
    let image = image_of(&sim.hosts[1].stack);
    let refusal = |change: fn(&mut StackConfig)| {
        let mut config = Scenario::default().hosts[1].stack.clone();
        change(&mut config);
        let mut stack = Stack::new(config, [1; 32], sim.now).unwrap();
        restore(&mut stack, &image, &mut Nothing).err().unwrap_or_default()
    };
    for (change, key) in [
        ((|config| config.tcp.connections_max = 1) as fn(&mut StackConfig), "tcp.connections_max is 1"),
        (|config| config.tcp.listeners_max = 1, "tcp.listeners_max is 1"),
        (|config| config.tcp.buffer_pool_bytes = 1 << 16, "tcp.buffer_pool_bytes has room for"),
        (|config| config.network.udp_sockets_max = 1, "network.udp_sockets_max is 1"),
    ] {
        let error = refusal(change);
        assert!(error.contains(key), "{error:?} does not name {key}");
    }
}

#[test]
fn image_of_few_connections_is_small() {
    let mut config = Scenario::default().hosts;
    config[1].stack.tcp.connections_max = 10_000_000;
    config[1].stack.tcp.time_wait_max = 1_000_000;
    let [a, b] = config;
    let mut sim = Sim::pair_with(1, a, b, LinkModel::default());
    sim.hosts[1].listen(80);
    for _ in 0..100 {
        let (now, to) = (sim.now, server(&sim));
        sim.hosts[0].connect(now, to);
    }
    sim.collect(0);
    sim.run(Duration::from_secs(2));
    assert_eq!(sim.hosts[1].stack.usage().connections, 100);
    let now = sim.now;
    let image = sim.hosts[1].exchange(now);
    assert!(image.len() < 40_000, "{} bytes", image.len());
}

#[test]
fn udp_sockets_go_on() {
    let mut sim = busy_host(true);
    let now = sim.now;
    let mut out = [0; 64];
    let stack = &mut sim.hosts[1].stack;
    let sockets = [0, 1].map(|index| UdpHandle::new(index, 0));
    let received: Vec<_> =
        sockets.iter().filter_map(|socket| stack.udp_recv_from(*socket, &mut out).ok()).collect();
    assert_eq!(received.len(), 1, "one member of the group got the datagram");
    let from = received[0].from;
    assert_eq!(&out[..received[0].len], b"datagram");
    stack.udp_send_to(now, sockets[0], Some(from), b"answer").unwrap();
    assert!(stack.udp_bind("0.0.0.0:9".parse().unwrap(), UdpOptions::default()).is_err(), "it is in use");
}

#[test]
fn layout_of_the_image_is_complete() {
    let layout = layout_of::<StackImage>();
    for name in
        ["Tcb", "ActiveConn", "UdpSocket", "Bbr", "SocketOptions", "CloseReason::0:Normal", "Neighbour"]
    {
        assert!(layout.contains_key(name), "{name} is missing in {:?}", layout.keys());
    }
    assert_ne!(layout_hash::<StackImage>(), layout_hash::<Conn>());
}

/// Keeps packets whose payload does not begin with the byte of its code.
#[derive(Debug)]
struct Refuses([u8; 1]);

impl SocketFilter for Refuses {
    fn run(&self, packet: &FilteredPacket<'_>) -> u32 {
        let is_refused = packet.bytes.get(packet.header_len) == Some(&self.0[0]);
        if is_refused { 0 } else { u32::MAX }
    }

    fn code(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes that another process can make again.
struct Again(Vec<u8>);

impl Source for Again {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn fill(&self, offset: u64, out: &mut [u8]) {
        out.copy_from_slice(&self.0[offset as usize..][..out.len()]);
    }

    fn can_be_restored(&self) -> bool {
        true
    }
}

/// Makes filters and the source again.
struct Owner;

impl Restorer for Owner {
    fn filter(&mut self, saved: &[u8]) -> Option<Arc<dyn SocketFilter>> {
        Some(Arc::new(Refuses(saved.try_into().ok()?)))
    }

    fn source(&mut self, id: SourceId) -> Option<Box<dyn Source>> {
        (id.index == 0).then(|| Box::new(Again(bytes(4, 80_000))) as Box<dyn Source>)
    }
}

#[test]
fn filters_are_made_again() {
    let [a, b] = Scenario::default().hosts;
    let mut sim = Sim::pair_with(1, a, b, LinkModel::default());
    let listener = sim.hosts[1].listen(80);
    let filter = |byte| Some(Arc::new(Refuses([byte])) as Arc<dyn SocketFilter>);
    let stack = &mut sim.hosts[1].stack;
    stack.set_listener_filter(listener, filter(b'a')).unwrap();
    let shared = ListenOptions { reuse_port: true, ..ListenOptions::default() };
    let members = [(); 3].map(|()| stack.listen("0.0.0.0:81".parse().unwrap(), shared).unwrap());
    stack.set_group_program(members[1], filter(b'c'), false).unwrap();
    stack.unlisten(members[0]);
    let socket = stack.udp_bind("0.0.0.0:9".parse().unwrap(), UdpOptions::default()).unwrap();
    stack.udp_set_filter(socket, filter(b'b')).unwrap();
    let (now, to) = (sim.now, server(&sim));
    let client = sim.hosts[0].connect(now, to);
    sim.collect(0);
    sim.run(Duration::from_millis(10));
    let image = image_of(&sim.hosts[1].stack);
    let refusal = restore(&mut sim.hosts[1].fresh_stack(sim.now), &image, &mut Nothing);
    assert_eq!(refusal, Err("the filter of a socket was not made again".into()));
    let now = sim.now;
    sim.hosts[1].exchange_with(now, &mut Owner);
    let served = sim.hosts[1].accepted[0];
    sim.hosts[0].send_all(now, client, b"abc".to_vec(), false);
    sim.collect(0);
    let udp = sim.hosts[0].stack.udp_bind("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 9);
    for datagram in [b"bcd", b"cde"] {
        sim.hosts[0].stack.udp_send_to(now, udp, Some(to), datagram).unwrap();
    }
    sim.collect(0);
    sim.run(Duration::from_secs(1));
    assert!(sim.hosts[1].received[&served].bytes.is_empty(), "the filter drops it");
    let stack = &mut sim.hosts[1].stack;
    let mut out = [0; 8];
    assert_eq!(stack.udp_recv_from(socket, &mut out).map(|datagram| datagram.len), Ok(3));
    assert_eq!(&out[..3], b"cde");
    assert_eq!(stack.udp_filter(socket).map(SocketFilter::code), Some(&b"b"[..]));
    assert!(stack.set_group_program(members[2], None, false).is_ok(), "the group has its program");
    assert!(stack.set_group_program(members[2], None, false).is_err());
    assert_eq!(members.map(|member| stack.unlisten(member)), [false, true, true]);
}

#[test]
fn slices_of_a_source_go_on() {
    let [a, b] = Scenario::default().hosts;
    let link = LinkModel { rate_bps: 10_000_000, loss: 0.02, queue_bytes: 50_000, ..LinkModel::default() };
    let mut sim = Sim::pair_with(1, a, b, link);
    sim.hosts[1].listen(80);
    let (now, to) = (sim.now, server(&sim));
    let client = sim.hosts[0].connect(now, to);
    sim.collect(0);
    sim.run(Duration::from_millis(10));
    let stack = &mut sim.hosts[0].stack;
    let source = stack.add_source(Box::new(Again(bytes(4, 80_000))));
    stack.send(client, b"first").unwrap();
    stack.send_source(client, source, 0, 30_000).unwrap();
    stack.send(client, b"second").unwrap();
    stack.send_source(client, source, 30_000, 50_000).unwrap();
    stack.release_source(source);
    let expected = [b"first", &bytes(4, 80_000)[..30_000], b"second", &bytes(4, 80_000)[30_000..]].concat();
    for _ in 0..20 {
        let now = sim.now;
        sim.hosts[0].stack.transmit(now);
        sim.collect(0);
        sim.run(Duration::from_millis(5));
        let now = sim.now;
        sim.hosts[0].exchange_with(now, &mut Owner);
    }
    sim.run(Duration::from_secs(10));
    let served = sim.hosts[1].accepted[0];
    assert!(sim.hosts[1].received[&served].bytes == expected);
    let stack = &mut sim.hosts[0].stack;
    stack.add_source(Box::new(PreloadedSource::new(vec![0; 9])));
    assert!(stack.cannot_be_saved().is_some());
}

#[test]
fn groups_are_joined_again() {
    let [a, b] = Scenario::default().hosts;
    let mut sim = Sim::pair_with(1, a, b, LinkModel::default());
    let (link, group) = (LinkId(0), IpAddr::from([239, 1, 2, 3]));
    let any = "0.0.0.0:9".parse().unwrap();
    let socket = sim.hosts[1].stack.udp_bind(any, UdpOptions::default()).unwrap();
    sim.hosts[1].stack.udp_set_membership(socket, link, group, Some(SourceFilter::ANY)).unwrap();
    let multicast_v4 = MulticastOptions { link: Some(link), ..MulticastOptions::default() };
    let options = UdpOptions { multicast_v4, ..UdpOptions::default() };
    let sender = sim.hosts[0].stack.udp_bind(any, options).unwrap();
    for host in [1, 0, 1] {
        let now = sim.now;
        sim.hosts[host].exchange(now);
        let to = SocketAddr::new(group, 9);
        sim.hosts[0].stack.udp_send_to(now, sender, Some(to), b"all").unwrap();
        sim.collect(0);
        sim.run(Duration::from_millis(10));
        let received = sim.hosts[1].stack.udp_recv_from(socket, &mut [0; 8]);
        assert_eq!(received.map(|datagram| (datagram.len, datagram.to)), Ok((3, group)));
    }
}

#[test]
fn time_wait_ends_when_it_would_have() {
    let [a, b] = Scenario::default().hosts;
    let ends = [false, true].map(|is_exchanged| {
        let mut sim = Sim::pair_with(1, a.clone(), b.clone(), LinkModel::default());
        transfer_both_ways(&mut sim, 0);
        sim.run(Duration::from_secs(3));
        assert_eq!(sim.hosts[0].stack.usage().time_wait, 1);
        if is_exchanged {
            let now = sim.now;
            sim.hosts[0].exchange(now);
        }
        assert_eq!(sim.hosts[0].stack.usage().connections, 0);
        sim.run_until(Duration::from_secs(100), |sim| sim.hosts[0].stack.usage().time_wait == 0);
        sim.now
    });
    assert_eq!(ends[0], ends[1]);
}
