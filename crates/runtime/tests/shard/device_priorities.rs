//! Priorities over real devices: rules order what is received, and urgent datagrams are sent before usual
//! ones that wait in the device.

use crate::fixture::{SERVER_ADDRESS, START, config};
use core::net::SocketAddr;
use core::time::Duration;
use etherparse::PacketBuilder;
use ginnel::{Config, Conn, Context, Datagram, Error, Handler, Instant, Shard, UdpHandle, UdpOptions};
use ginnel_devices::af_xdp::{self, AfXdpConfig};
use ginnel_devices::memif::{self, MemifConfig, Role, SocketName};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{BURST_FRAMES_MAX, Device, RxBurst, TxMeta};
use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::skip;
use std::time::Instant as WallClock;

const OWN_IP: [u8; 4] = [10, 0, 0, 1];
const PEER_IP: [u8; 4] = [10, 0, 0, 2];
/// Frames that are sent before the urgent one.
const USUAL: usize = 300;
const USUAL_BYTE: u8 = 1;
const URGENT_BYTE: u8 = 2;
const PATIENCE: Duration = Duration::from_secs(10);

/// Records the first bytes of the datagrams that arrive, and has two sockets to send.
#[derive(Default)]
struct Sockets {
    received: Vec<u8>,
    usual: Option<UdpHandle>,
    urgent: Option<UdpHandle>,
}

impl Handler for Sockets {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let mut bind = |port, priority| {
            let local = SocketAddr::from((OWN_IP, port));
            let socket = cx.udp_bind(local, UdpOptions { priority, ..UdpOptions::default() });
            socket.map_err(|e| Error::application(e.to_string()))
        };
        self.usual = Some(bind(9, 0)?);
        self.urgent = Some(bind(10, 6)?);
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn datagram(&mut self, _: &mut Context<'_>, _: UdpHandle, _: &Datagram, data: &[u8]) {
        self.received.push(data[0]);
    }
}

/// Two ends of a link: that of a stack, and that of its peer.
struct Link {
    near: Device,
    far: Device,
    _namespaces: Option<[Namespace; 2]>,
}

fn memory_link() -> Link {
    let (near, far) = pair(MemoryConfig::default());
    Link { near, far, _namespaces: None }
}

fn memif_link(name: &str) -> Link {
    let name = format!("ginnel-{name}-{}", std::process::id());
    let [server, client] = [Role::Server, Role::Client]
        .map(|role| memif::open(&MemifConfig::new(SocketName::Abstract(name.clone()), role)).unwrap());
    assert!(server.link.wait_for(true, PATIENCE) && client.link.wait_for(true, PATIENCE));
    let [near, far] = [server, client].map(|device| device.into_single_device().unwrap());
    Link { near, far, _namespaces: None }
}

/// Returns a pair of virtual interfaces, or `None` if they are not possible here, which is recorded.
fn af_xdp_link(test: &str) -> Option<Link> {
    let is_root = rustix::process::geteuid().is_root();
    if let Some(reason) = unavailable().or_else(|| (!is_root).then(|| "BPF programs need root".into())) {
        skip(test, &reason);
        return None;
    }
    let namespaces = [Namespace::new().unwrap(), Namespace::new().unwrap()];
    namespaces[0].connect("left", &namespaces[1], "right", 1500).unwrap();
    let open = |namespace: &Namespace, interface: &str| {
        let options = "take=all".parse().unwrap();
        let config = AfXdpConfig { interface: interface.into(), options, ..AfXdpConfig::default() };
        namespace.run(|| af_xdp::open(&config)?.into_single_device()).unwrap()
    };
    let (near, far) = (open(&namespaces[0], "left"), open(&namespaces[1], "right"));
    Some(Link { near, far, _namespaces: Some(namespaces) })
}

/// A stack in simulated time, and the device of its peer.
struct Host {
    shard: Shard<Sockets>,
    now: Instant,
    far: Device,
    near_mac: [u8; 6],
    begin: WallClock,
}

impl Host {
    fn new(link: Link, priority: &str) -> (Self, Option<[Namespace; 2]>) {
        let Link { near, far, _namespaces } = link;
        let near_mac = near.tx.capabilities().mac;
        let mut config = config(&[SERVER_ADDRESS]);
        config.priority = Config::from_toml("x.toml", priority).unwrap().priority;
        let builder = Shard::builder(config).handler(Sockets::default()).device("cable", near);
        let shard = builder.seed([1; 32]).now(START).build().unwrap();
        let mut host = Self { shard, now: START, far, near_mac, begin: WallClock::now() };
        (0..10).for_each(|_| host.turn());
        (host, _namespaces)
    }

    fn turn(&mut self) {
        assert!(self.begin.elapsed() < PATIENCE, "the link is too slow");
        self.now += Duration::from_micros(100);
        self.shard.poll_once(self.now).unwrap();
    }

    /// Returns the frames that the peer has received.
    fn receive(&mut self) -> Vec<Vec<u8>> {
        let mut burst = RxBurst::new();
        self.far.rx.rx_burst(self.now, &mut burst);
        burst.iter().map(|frame| frame.bytes.to_vec()).collect()
    }

    fn send_from_peer(&mut self, frames: &[Vec<u8>]) {
        for frame in frames {
            self.far.tx.reserve(frame.len()).unwrap().copy_from_slice(frame);
            self.far.tx.commit(frame.len(), TxMeta::NONE);
        }
        self.far.tx.flush(self.now);
    }

    /// Sends datagrams of the usual priority. Returns how many the device has taken.
    fn send_usual(&mut self, count: usize) -> usize {
        let to = Some(SocketAddr::from((PEER_IP, 9)));
        let send = |sockets: &mut Sockets, cx: &mut Context<'_>| {
            (0..count).filter(|_| cx.udp_send(sockets.usual.unwrap(), to, &[USUAL_BYTE; 100]).is_ok()).count()
        };
        self.shard.with(self.now, send)
    }

    fn send_urgent(&mut self) {
        let to = Some(SocketAddr::from((PEER_IP, 9)));
        self.shard.with(self.now, |sockets, cx| {
            cx.udp_send(sockets.urgent.unwrap(), to, &[URGENT_BYTE; 100]).unwrap();
        });
    }

    /// Answers the request for the peer's hardware address.
    fn resolve_peer(&mut self) {
        self.send_usual(1);
        let peer_mac = self.far.tx.capabilities().mac;
        let reply = [
            &self.near_mac[..],
            &peer_mac,
            &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2],
            &peer_mac,
            &PEER_IP,
            &self.near_mac,
            &OWN_IP,
        ]
        .concat();
        loop {
            self.turn();
            let frames = self.receive();
            let is_request = |frame: &Vec<u8>| {
                frame[12..14] == [8, 6] && frame[20..22] == [0, 1] && frame[38..42] == PEER_IP
            };
            if frames.iter().any(is_request) {
                self.send_from_peer(std::slice::from_ref(&reply));
            }
            if frames.iter().any(|frame| payload_byte(frame) == Some(USUAL_BYTE)) {
                return;
            }
        }
    }
}

/// Returns the first byte of the payload of a UDP datagram over IPv4.
fn payload_byte(frame: &[u8]) -> Option<u8> {
    (frame[12..14] == [8, 0] && frame[23] == 17).then(|| frame[42])
}

/// Sends 20 datagrams and then one that a rule makes urgent. Returns their first bytes in the order in which
/// they were delivered.
fn order_of_delivery(link: Link, urgent_byte: u8) -> Vec<u8> {
    let payload = format!("payload = {{ value = \"{urgent_byte:02x}\" }}");
    let rule = format!("[[priority.rules]]\npriority = 6\nprotocol = \"udp\"\n{payload}\n");
    let (mut host, _namespaces) = Host::new(link, &rule);
    host.receive();
    let datagram = |byte: u8| {
        let builder = PacketBuilder::ethernet2(host.far.tx.capabilities().mac, host.near_mac);
        let mut frame = Vec::new();
        builder.ipv4(PEER_IP, OWN_IP, 64).udp(9, 9).write(&mut frame, &[byte; 20]).unwrap();
        frame
    };
    let frames: Vec<_> = (0..20).map(|_| datagram(USUAL_BYTE)).chain([datagram(URGENT_BYTE)]).collect();
    host.send_from_peer(&frames);
    // All frames arrive before the stack looks: those of a veth by a thread of the kernel, if it is busy.
    std::thread::sleep(Duration::from_millis(500));
    while host.shard.handler().received.len() < frames.len() {
        host.turn();
    }
    host.shard.handler().received.clone()
}

fn assert_rule_orders_frames(mut link: impl FnMut() -> Option<Link>) {
    let usual = [USUAL_BYTE; 20];
    let Some(with_rule) = link() else { return };
    let expected = [&[URGENT_BYTE][..], &usual].concat();
    assert_eq!(order_of_delivery(with_rule, URGENT_BYTE), expected);
    let expected = [&usual[..], &[URGENT_BYTE]].concat();
    let without_match = link().expect("the first link was possible");
    assert_eq!(order_of_delivery(without_match, 3), expected, "the rule matches no frame");
}

#[test]
fn rules_order_frames_of_a_memif() {
    let mut number = 0;
    assert_rule_orders_frames(|| {
        number += 1;
        Some(memif_link(&format!("rules-{number}")))
    });
}

#[test]
fn rules_order_frames_of_af_xdp() {
    assert_rule_orders_frames(|| af_xdp_link("device_priorities::rules_order_frames_of_af_xdp"));
}

/// Sends usual datagrams in `turns` turns, and then an urgent one, while the peer does not receive. Returns
/// how many frames the peer receives before the urgent one.
fn frames_before_urgent(link: Link, has_priorities: bool, turns: usize) -> usize {
    let (mut host, _namespaces) = Host::new(link, &format!("priority.enabled = {has_priorities}\n"));
    host.resolve_peer();
    while !host.receive().is_empty() {}
    let mut sent = 0;
    for turn in 0..turns {
        sent += host.send_usual(USUAL / turns);
        if turn + 1 < turns {
            host.turn();
        }
    }
    host.send_urgent();
    let mut received = Vec::new();
    while received.len() <= sent {
        host.turn();
        received.extend(host.receive().iter().filter_map(|frame| payload_byte(frame)));
    }
    let before = received.iter().position(|byte| *byte == URGENT_BYTE).expect("it has left");
    assert_eq!((before, received.len()), (sent, sent + 1), "in the order in which the device took them");
    before
}

fn assert_urgent_leaves_first(turns: usize, mut link: impl FnMut() -> Option<Link>) {
    let Some(with_priorities) = link() else { return };
    let on = frames_before_urgent(with_priorities, true, turns);
    assert!((1..=BURST_FRAMES_MAX).contains(&on), "{on}");
    let off = frames_before_urgent(link().expect("the first link was possible"), false, turns);
    assert_eq!(off, USUAL, "without priorities");
}

#[test]
fn urgent_frame_leaves_first_on_memory() {
    assert_urgent_leaves_first(30, || Some(memory_link()));
}

#[test]
fn urgent_frame_leaves_first_on_memif() {
    let mut number = 0;
    assert_urgent_leaves_first(30, || {
        number += 1;
        Some(memif_link(&format!("urgent-{number}")))
    });
}

/// The kernel takes frames from an AF_XDP socket when it is told, so they wait only within a turn.
#[test]
fn urgent_frame_leaves_first_on_af_xdp() {
    assert_urgent_leaves_first(1, || af_xdp_link("device_priorities::urgent_frame_leaves_first_on_af_xdp"));
}
