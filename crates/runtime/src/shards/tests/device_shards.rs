//! Two links, each served by shards of its own: packets of a link cost these shards alone, and sockets of all
//! shards reach both links.

use super::{RecordingHandler, STACK_ADDRESSES};
use crate::config::{Config, DeviceConfig, DeviceKind, LinkConfig, RouteConfig};
use crate::context::Context;
use crate::error::Error;
use crate::fixture::{START, config, next_turn};
use crate::shard::Shard;
use crate::shards::Shards;
use crate::stats::ShardStats;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use ginnel_stack::error::ConnectError;
use ginnel_stack::handle::{PortId, UdpHandle};
use ginnel_stack::ip::NetworkStats;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{UdpError, UdpOptions};

const CONNECTIONS: usize = 40;
/// Addresses of the shards on the second link.
const SECOND_ADDRESSES: [&str; 2] = ["10.1.0.1/24", "fd01::1/64"];
/// Addresses of the client on each link.
const CLIENT_ADDRESSES: [[&str; 2]; 2] = [["10.0.0.2/24", "fd00::2/64"], ["10.1.0.2/24", "fd01::2/64"]];
const MODES: [RssMode; 4] = [RssMode::Hash, RssMode::DeliveredHash, RssMode::RoundRobin, RssMode::Fixed(1)];

/// Four shards, and a client on each of their two links. The first link is served by the shards 3 and 0, the
/// second one by 1 and 2.
struct TwoLinks {
    shards: Vec<Shard<RecordingHandler>>,
    clients: [Shard<RecordingHandler>; 2],
    now: Instant,
}

/// The shards that serve each link.
const SERVING: [[usize; 2]; 2] = [[3, 0], [1, 2]];

fn stack_config(more: &str) -> Config {
    let mut config = config(&STACK_ADDRESSES);
    config.shards.count = 4;
    config.devices.push(DeviceConfig::new("second", DeviceKind::Memory));
    let addresses = SECOND_ADDRESSES.map(|address| address.parse().unwrap());
    config.links.push(LinkConfig::new("link1", "second", addresses.to_vec()));
    for (device, serving) in config.devices.iter_mut().zip(SERVING) {
        device.shards = Some(serving.map(|shard| shard as u8).to_vec());
    }
    let more = Config::from_toml("x.toml", &format!("[shards]\ncount = 4\n{more}")).unwrap();
    (config.steering, config.priority) = (more.steering, more.priority);
    config.shards.mailbox_bytes = more.shards.mailbox_bytes;
    config
}

impl TwoLinks {
    fn new(more: &str, mode: RssMode) -> Self {
        Self::with_memory(more, mode, &MemoryConfig::default())
    }

    fn with_memory(more: &str, mode: RssMode, memory: &MemoryConfig) -> Self {
        let mut shards = Shards::new(stack_config(more)).seed([1; 32]).now(START);
        let clients = [("cable", 0), ("second", 1)].map(|(device, link)| {
            let (far, queues) = multi_queue(memory, 2, mode);
            shards = core::mem::replace(&mut shards, Shards::new(Config::default())).device(device, queues);
            let mut config = config(&CLIENT_ADDRESSES[link]);
            // The stack is the way to its other link.
            for gateway in [["10.0.0.1", "fd00::1"], ["10.1.0.1", "fd01::1"]][link] {
                let gateway: core::net::IpAddr = gateway.parse().unwrap();
                let destination = if gateway.is_ipv4() { "0.0.0.0/0" } else { "::/0" }.parse().unwrap();
                let link = "link0".into();
                config.routes.push(RouteConfig { destination, gateway: Some(gateway), link, metric: 0 });
            }
            let client = Shard::builder(config).handler(RecordingHandler::default()).device("cable", far);
            client.seed([2 + link as u8; 32]).now(START).build().unwrap()
        });
        let shards = shards.open().unwrap().build(|_| Ok(RecordingHandler::default())).unwrap();
        let mut fixture = Self { shards, clients, now: START };
        fixture.advance(Duration::from_secs(3));
        fixture
    }

    fn advance(&mut self, time: Duration) {
        let end = self.now + time;
        let mut turns_without_work = 0;
        while self.now <= end {
            let hosts = self.shards.iter_mut().chain(&mut self.clients);
            let turns: Vec<_> = hosts.map(|host| host.poll_once(self.now).unwrap()).collect();
            let is_idle = turns.iter().all(|turn| turn.work == 0);
            let next = next_turn(self.now, turns).unwrap_or(end + time);
            // What a host has sent in a turn without work arrives in the next one.
            turns_without_work = if is_idle { turns_without_work + 1 } else { 0 };
            self.now = if turns_without_work == 1 { self.now } else { next };
        }
        self.now = end;
    }

    fn with_shard<R>(&mut self, shard: usize, act: impl FnOnce(&mut Context<'_>) -> R) -> R {
        self.shards[shard].with(self.now, |_, cx| act(cx))
    }

    fn listen(&mut self, ports: core::ops::RangeInclusive<u16>) {
        for shard in 0..4 {
            for port in ports.clone() {
                let address = SocketAddr::new("::".parse().unwrap(), port);
                self.with_shard(shard, |cx| cx.listen(address, ListenOptions::default())).unwrap();
            }
        }
    }

    fn accepted(&self) -> Vec<usize> {
        self.shards.iter().map(|shard| shard.handler().accepted.len()).collect()
    }

    /// Opens connections from the client on a link, and returns how many each shard has accepted.
    fn connect_from(&mut self, link: usize, to: &str) -> Vec<usize> {
        let (before, to) = (self.accepted(), to.parse().unwrap());
        let connected = self.clients[link].handler().connected;
        self.clients[link].with(self.now, |_, cx| {
            for _ in 0..CONNECTIONS {
                cx.connect(to, ConnectOptions::default()).unwrap();
            }
        });
        self.advance(Duration::from_secs(1));
        assert_eq!(self.clients[link].handler().connected - connected, CONNECTIONS, "{to}");
        self.accepted().iter().zip(before).map(|(after, before)| after - before).collect()
    }

    fn stats(&self, counter: impl Fn(&ShardStats) -> u64) -> Vec<u64> {
        self.shards.iter().map(|shard| counter(&shard.stack_stats())).collect()
    }

    fn network(&self, counter: impl Fn(&NetworkStats) -> u64) -> Vec<u64> {
        self.shards
            .iter()
            .map(|shard| counter(&shard.core.stack.local().unwrap().network().stats()))
            .collect()
    }

    /// Asserts that the frames of a device are counted once, by the shards that have sent them.
    #[track_caller]
    fn assert_sent_frames_count_once(&self) {
        for (link, client) in self.clients.iter().enumerate() {
            let network = |shard: &Shard<RecordingHandler>| {
                shard.core.stack.local().unwrap().network().tx_counters(PortId(link as u16)).0
            };
            let sent: Vec<u64> = self.shards.iter().map(network).collect();
            assert_eq!(by_link(&sent, link), (client.stack_stats().frames_received, 0), "{sent:?}");
        }
        let received: u64 = self.clients.iter().map(|client| client.stack_stats().frames_received).sum();
        assert_eq!(self.network(|n| n.tx_frames).iter().sum::<u64>(), received);
    }

    fn knows(&self, shard: usize, neighbour: &str) -> bool {
        let neighbour: core::net::IpAddr = neighbour.parse().unwrap();
        let network = self.shards[shard].core.stack.local().unwrap().network();
        network.neighbours().any(|known| known.address == neighbour)
    }
}

/// Returns the sum over the shards that serve a link, and that over the others.
fn by_link<T: Copy + core::iter::Sum>(values: &[T], link: usize) -> (T, T) {
    (
        SERVING[link].map(|shard| values[shard]).into_iter().sum(),
        SERVING[1 - link].map(|shard| values[shard]).into_iter().sum(),
    )
}

#[test]
fn a_link_costs_only_its_shards() {
    for mode in MODES {
        let mut fixture = TwoLinks::new("", mode);
        let is_steered = matches!(mode, RssMode::Hash | RssMode::DeliveredHash);
        // The clients solicit routers no more.
        fixture.advance(Duration::from_secs(20));
        fixture.listen(80..=80);
        for (link, targets) in [(0, ["10.0.0.1:80", "[fd00::1]:80"]), (1, ["10.1.0.1:80", "[fd01::1]:80"])] {
            let received = |f: &TwoLinks| f.stats(|s| s.frames_received);
            // Apart from frames of its own link, a shard would get them so, and so it does if the device of
            // its link does not know their shards.
            let crossed = |f: &TwoLinks| f.stats(|s| s.forwards_received + s.frames_relayed);
            let before = (received(&fixture), crossed(&fixture));
            for to in targets {
                let accepted = fixture.connect_from(link, to);
                assert_eq!(by_link(&accepted, link), (CONNECTIONS, 0), "{mode:?} {to} {accepted:?}");
                assert!(SERVING[link].iter().all(|&shard| accepted[shard] > 5), "{mode:?} {accepted:?}");
            }
            let after = (received(&fixture), crossed(&fixture));
            assert!(by_link(&after.0, link).0 - by_link(&before.0, link).0 > 4 * CONNECTIONS as u64);
            if is_steered {
                assert_eq!(by_link(&after.1, link).1, by_link(&before.1, link).1, "{mode:?}");
            }
            // Neither did they learn who has sent these packets.
            let [v4, v6] = CLIENT_ADDRESSES[link].map(|address| address.split_once('/').unwrap().0);
            let knowing = |address| (0..4).filter(|&shard| fixture.knows(shard, address)).collect::<Vec<_>>();
            let mut serving = SERVING[link];
            serving.sort_unstable();
            assert_eq!((knowing(v4), knowing(v6)), (serving.to_vec(), serving.to_vec()), "{mode:?}");
        }
        let forwarded: u64 = fixture.stats(|s| s.frames_forwarded).iter().sum();
        // An adapter delivers link control to its first queue, which is that of the primary shard.
        assert_eq!(forwarded == 0, is_steered, "{mode:?} {forwarded}");
        assert_eq!(fixture.stats(|s| s.frames_relayed), [0; 4], "{mode:?}");
    }
}

#[test]
fn first_shard_of_a_device_speaks_for_it() {
    let mut fixture = TwoLinks::new("", RssMode::Hash);
    fixture.advance(Duration::from_secs(20));
    assert_eq!(fixture.network(|n| n.ndp_solicitations_out), [0, 2, 0, 2]);
    fixture.connect_refused();
    // Two addresses were probed and routers solicited three times on each link.
    assert_eq!(fixture.network(|n| n.ndp_router_solicitations_out), [0, 3, 0, 3]);
    assert_eq!(fixture.network(|n| n.arp_replies_out), [0, 1, 0, 1]);
    assert_eq!(fixture.network(|n| n.ndp_advertisements_out), [0, 1, 0, 1]);
    let reports = fixture.network(|n| n.mld_reports_out);
    assert!(reports[0] == 0 && reports[2] == 0 && reports[1] > 0 && reports[3] > 0, "{reports:?}");
}

impl TwoLinks {
    /// Connects from both clients to ports on which nobody listens.
    fn connect_refused(&mut self) {
        for (link, targets) in [(0, ["10.0.0.1:9", "[fd00::1]:9"]), (1, ["10.1.0.1:9", "[fd01::1]:9"])] {
            let now = self.now;
            for to in targets {
                let to = to.parse().unwrap();
                self.clients[link].with(now, |_, cx| cx.connect(to, ConnectOptions::default())).unwrap();
            }
        }
        self.advance(Duration::from_millis(100));
        assert!(self.clients.iter().all(|client| client.handler().closed.len() == 2));
    }
}

#[test]
fn opened_connections_come_home_on_their_link() {
    for mode in MODES {
        let mut fixture = TwoLinks::new("", mode);
        for client in &mut fixture.clients {
            client.with(fixture.now, |_, cx| {
                cx.listen("[::]:80".parse().unwrap(), ListenOptions::default()).unwrap();
            });
        }
        // The neighbours are resolved first, which costs forwarded answers.
        for (link, targets) in [(0, ["10.0.0.2:80", "[fd00::2]:80"]), (1, ["10.1.0.2:80", "[fd01::2]:80"])] {
            for to in targets.map(|to| to.parse::<SocketAddr>().unwrap()) {
                for shard in 0..4 {
                    let opened = fixture.with_shard(shard, |cx| {
                        (0..CONNECTIONS)
                            .map(|_| cx.connect(to, ConnectOptions::default()).map(drop))
                            .collect()
                    });
                    let opened: Result<Vec<()>, Error> = opened;
                    match SERVING[link].contains(&shard) {
                        true => drop(opened.unwrap()),
                        false => assert!(
                            matches!(opened, Err(Error::Connect(at, ConnectError::AddressNotAvailable)) if at == to),
                            "{opened:?}"
                        ),
                    }
                    fixture.advance(Duration::from_millis(100));
                }
            }
        }
        let connected: Vec<_> = fixture.shards.iter().map(|shard| shard.handler().connected).collect();
        assert_eq!(connected, [2 * CONNECTIONS; 4], "{mode:?}");
        // A shard that was refused has no entry for the neighbour, and learns nothing about it.
        for (link, neighbours) in [(0, ["10.0.0.2", "fd00::2"]), (1, ["10.1.0.2", "fd01::2"])] {
            for neighbour in neighbours {
                let knowing = [0, 1, 2, 3].map(|shard| u8::from(fixture.knows(shard, neighbour)));
                assert_eq!(by_link(&knowing, link), (2, 0), "{mode:?} {neighbour}");
            }
        }
        if matches!(mode, RssMode::Hash | RssMode::DeliveredHash) {
            assert_eq!(fixture.stats(|s| s.frames_forwarded).iter().sum::<u64>(), 0, "{mode:?}");
        }
        assert_eq!(fixture.stats(|s| s.frames_relayed), [0; 4]);
        // A port that the application has chosen belongs to one shard of the link.
        for (link, to) in [(0, "10.0.0.2:80"), (1, "10.1.0.2:80")] {
            for port in 5000..5020 {
                let local = SocketAddr::new(["10.0.0.1", "10.1.0.1"][link].parse().unwrap(), port);
                let options = ConnectOptions { local: Some(local), ..ConnectOptions::default() };
                let to = to.parse().unwrap();
                let opened = |shard: &usize| fixture.with_shard(*shard, |cx| cx.connect(to, options)).is_ok();
                let opened: Vec<usize> = [0, 1, 2, 3].into_iter().filter(opened).collect();
                assert!(opened.len() == 1 && SERVING[link].contains(&opened[0]), "{local} {opened:?}");
            }
        }
    }
}

#[test]
fn a_udp_socket_serves_both_links() {
    for mode in MODES {
        let mut fixture = TwoLinks::new("", mode);
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let server = fixture.with_shard(0, |cx| cx.udp_bind(at("[::]:53"), UdpOptions::default())).unwrap();
        fixture.advance(Duration::from_millis(1));
        let clients: [UdpHandle; 2] = core::array::from_fn(|link| {
            let now = fixture.now;
            fixture.clients[link].with(now, |_, cx| cx.udp_bind(at("[::]:7"), UdpOptions::default())).unwrap()
        });
        for (link, to) in [(0, "10.0.0.1:53"), (1, "10.1.0.1:53"), (1, "[fd01::1]:53")] {
            let now = fixture.now;
            fixture.clients[link]
                .with(now, |_, cx| cx.udp_send(clients[link], Some(at(to)), b"ask"))
                .unwrap();
            fixture.advance(Duration::from_millis(100));
        }
        let got = fixture.shards[0].handler().datagrams.clone();
        let expected = ["10.0.0.2:7", "10.1.0.2:7", "[fd01::2]:7"].map(|from| (at(from), 3));
        assert_eq!(got, expected, "{mode:?}");
        for (to, len) in [(0, 10), (1, 1400), (2, 5000)] {
            fixture.with_shard(0, |cx| cx.udp_send(server, Some(got[to].0), &vec![7; len])).unwrap();
            fixture.advance(Duration::from_millis(100));
        }
        let lengths = |link: usize| -> Vec<usize> {
            fixture.clients[link].handler().datagrams.iter().map(|(_, len)| *len).collect()
        };
        assert_eq!((lengths(0), lengths(1)), (vec![10], vec![1400, 5000]), "{mode:?}");
        let relayed = fixture.stats(|s| s.frames_relayed);
        // At least an ARP request, a neighbour solicitation, a datagram, and one in four fragments.
        assert!(relayed[1] >= 7 && relayed[0] + relayed[2] + relayed[3] == 0, "{mode:?} {relayed:?}");
        assert_eq!(fixture.stats(|s| s.relays_dropped), [0; 4]);
        // It knows the neighbours of the second link now, and goes on learning of changes.
        assert!(fixture.knows(0, "10.1.0.2") && !fixture.knows(3, "10.1.0.2"));
        // An error about a port comes back as well.
        for (port, to) in [(5353, "10.0.0.2:9"), (5354, "10.1.0.2:9"), (5355, "[fd01::2]:9")] {
            fixture.with_shard(0, |cx| {
                let local = SocketAddr::new("::".parse().unwrap(), port);
                let socket = cx.udp_bind(local, UdpOptions::default()).unwrap();
                cx.udp_connect(socket, at(to)).unwrap();
                cx.udp_send(socket, None, b"nobody").unwrap();
            });
            fixture.advance(Duration::from_millis(100));
            let errors: Vec<_> = fixture
                .shards
                .iter_mut()
                .map(|shard| core::mem::take(&mut shard.handler_mut().errors))
                .collect();
            assert_eq!(errors, [vec![UdpError::ConnectionRefused], vec![], vec![], vec![]], "{mode:?} {to}");
        }
        fixture.assert_sent_frames_count_once();
        for (link, local) in [(0, "10.0.0.1"), (0, "fd00::1"), (1, "10.1.0.1"), (1, "fd01::1")] {
            for shard in 0..4 {
                let serves = fixture.with_shard(shard, |cx| cx.serves(local.parse().unwrap()));
                assert_eq!(serves, SERVING[link].contains(&shard), "{local} {shard}");
            }
        }
    }
}

/// A datagram to an ephemeral port crosses to the shard of the port only if the port has a socket.
#[test]
fn closed_ephemeral_ports_cost_the_links_shards() {
    for mode in MODES {
        let mut fixture = TwoLinks::new("", mode);
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let now = fixture.now;
        let client =
            fixture.clients[1].with(now, |_, cx| cx.udp_bind(at("[::]:7"), UdpOptions::default())).unwrap();
        // The client solicits routers no more.
        fixture.advance(Duration::from_secs(20));
        let send = |fixture: &mut TwoLinks, to: SocketAddr| {
            let now = fixture.now;
            fixture.clients[1].with(now, |_, cx| cx.udp_send(client, Some(to), b"ask")).unwrap();
            fixture.advance(Duration::from_millis(20));
        };
        let crossed = |fixture: &TwoLinks| {
            by_link(&fixture.stats(|s| s.forwards_received + s.frames_relayed + s.broadcasts_sent), 1).1
                + by_link(&fixture.stats(|s| s.frames_relayed), 1).0
        };
        for address in ["10.1.0.1:9", "[fd01::1]:9"] {
            send(&mut fixture, at(address));
        }
        let before = (crossed(&fixture), fixture.network(|n| n.icmp_errors_out));
        for port in 40_000..40_020 {
            send(&mut fixture, at(&format!("10.1.0.1:{port}")));
            send(&mut fixture, at(&format!("[fd01::1]:{port}")));
        }
        assert_eq!(crossed(&fixture), before.0, "{mode:?}");
        let errors = fixture.network(|n| n.icmp_errors_out);
        let errors: Vec<u64> = errors.iter().zip(before.1).map(|(after, before)| after - before).collect();
        assert!(by_link(&errors, 1).0 > 0 && by_link(&errors, 1).1 == 0, "{mode:?} {errors:?}");
        // Each shard of the other link has sockets with ephemeral ports, to which anybody may send.
        for shard in SERVING[0] {
            let open = |cx: &mut Context<'_>| {
                let sockets = [(); 2].map(|()| cx.udp_bind(at("[::]:0"), UdpOptions::default()).unwrap());
                sockets.map(|socket| (socket, cx.udp_local(socket).unwrap().port()))
            };
            let [(kept, port), (closed, closed_port)] = fixture.with_shard(shard, open);
            fixture.with_shard(shard, |cx| cx.udp_close(closed)).unwrap();
            let crossed_before = crossed(&fixture);
            send(&mut fixture, at(&format!("10.1.0.1:{closed_port}")));
            assert_eq!(crossed(&fixture), crossed_before, "{mode:?} {closed_port}");
            send(&mut fixture, at(&format!("10.1.0.1:{port}")));
            send(&mut fixture, at(&format!("[fd01::1]:{port}")));
            let got = core::mem::take(&mut fixture.shards[shard].handler_mut().datagrams);
            assert_eq!(got, [(at("10.1.0.2:7"), 3), (at("[fd01::2]:7"), 3)], "{mode:?}");
            fixture.with_shard(shard, |cx| cx.udp_close(kept)).unwrap();
        }
    }
}

/// Sockets of all shards share a port: those of the link's shards get its datagrams.
#[test]
fn sockets_that_share_a_port_serve_their_own_link() {
    let mut fixture = TwoLinks::new("", RssMode::Hash);
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let options = UdpOptions { reuse_port: true, ..UdpOptions::default() };
    for shard in 0..4 {
        fixture.with_shard(shard, |cx| cx.udp_bind(at("[::]:53"), options)).unwrap();
    }
    for (link, to) in [(0, "10.0.0.1:53"), (1, "[fd01::1]:53")] {
        let now = fixture.now;
        fixture.clients[link].with(now, |_, cx| {
            for port in 5000..5000 + CONNECTIONS as u16 {
                let socket = cx.udp_bind(SocketAddr::new("::".parse().unwrap(), port), UdpOptions::default());
                cx.udp_send(socket.unwrap(), Some(at(to)), b"ask").unwrap();
            }
        });
        fixture.advance(Duration::from_millis(100));
        let received: Vec<_> = fixture
            .shards
            .iter_mut()
            .map(|shard| core::mem::take(&mut shard.handler_mut().datagrams).len())
            .collect();
        assert_eq!(by_link(&received, link), (CONNECTIONS, 0), "{received:?}");
        assert!(SERVING[link].iter().all(|&shard| received[shard] > 5), "{received:?}");
    }
}

/// A packet to an address of one link may arrive by the other link, as on Linux: the address decides.
#[test]
fn packets_by_the_other_link_reach_their_connection() {
    for mode in MODES {
        let mut fixture = TwoLinks::new("", mode);
        fixture.listen(80..=80);
        for (link, to) in [(1, "10.0.0.1:80"), (0, "10.1.0.1:80"), (1, "[fd00::1]:80")] {
            let accepted = fixture.connect_from(link, to);
            // The shards of the address have accepted; their answers left by the link of the client.
            assert_eq!(by_link(&accepted, 1 - link), (CONNECTIONS, 0), "{mode:?} {to} {accepted:?}");
        }
        let relayed = fixture.stats(|s| s.frames_relayed);
        assert!(by_link(&relayed, 0).0 > 0 && by_link(&relayed, 1).0 > 0, "{mode:?} {relayed:?}");
        assert_eq!(fixture.stats(|s| s.relays_dropped + s.forwards_dropped), [0; 4], "{mode:?}");
        // All bytes of a large response cross.
        for (link, shard) in [(1, SERVING[0][0]), (0, SERVING[1][1])] {
            let before = by_link(&fixture.stats(|s| s.frames_relayed), link).0;
            let conn = *fixture.shards[shard].handler().accepted.last().unwrap();
            let sent = fixture.with_shard(shard, |cx| cx.send(conn, &vec![7; 10_000])).unwrap();
            fixture.advance(Duration::from_secs(2));
            let got = fixture.clients.each_ref().map(|client| client.handler().bytes);
            assert_eq!((sent, got[link]), (10_000, 10_000), "{mode:?} {got:?}");
            let after = by_link(&fixture.stats(|s| s.frames_relayed), link).0;
            assert!(after - before >= 7, "{mode:?} {before} {after}");
        }
        fixture.assert_sent_frames_count_once();
    }
}

#[test]
fn rules_choose_among_the_shards_of_a_link() {
    let rules = "[[steering.rules]]\nshards = [0, 2]\ndestination_ports = 80\n\
                 [[steering.rules]]\nshards = [3]\ndestination_ports = 81\n";
    for mode in MODES {
        let mut fixture = TwoLinks::new(rules, mode);
        fixture.listen(80..=81);
        assert_eq!(fixture.connect_from(0, "10.0.0.1:80"), [CONNECTIONS, 0, 0, 0], "{mode:?}");
        assert_eq!(fixture.connect_from(1, "10.1.0.1:80"), [0, 0, CONNECTIONS, 0], "{mode:?}");
        assert_eq!(fixture.connect_from(0, "10.0.0.1:81"), [0, 0, 0, CONNECTIONS], "{mode:?}");
        // The rule has no shard of the second link: the hash decides.
        let accepted = fixture.connect_from(1, "10.1.0.1:81");
        assert!(accepted[0] + accepted[3] == 0 && accepted[1] > 5 && accepted[2] > 5, "{accepted:?}");
    }
}

#[test]
fn a_device_needs_a_queue_for_each_of_its_shards() {
    let (_far, queues) = multi_queue(&MemoryConfig::default(), 3, RssMode::Hash);
    let (_other, more) = multi_queue(&MemoryConfig::default(), 2, RssMode::Hash);
    let opened = Shards::new(stack_config("")).device("cable", more).device("second", queues).open();
    let error = opened.err().unwrap().to_string();
    assert!(
        error.contains("device[1].shards: device \"second\" has 3 queue(s), and 2 shard(s) need one each"),
        "{error}"
    );
}

#[test]
fn a_full_relay_drops_and_recovers() {
    let mut fixture = TwoLinks::new("", RssMode::Hash);
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let server = fixture.with_shard(0, |cx| cx.udp_bind(at("[::]:53"), UdpOptions::default())).unwrap();
    let now = fixture.now;
    fixture.clients[1].with(now, |_, cx| cx.udp_bind(at("[::]:7"), UdpOptions::default())).unwrap();
    let send = |fixture: &mut TwoLinks, count: usize| {
        let sent = fixture.with_shard(0, |cx| {
            (0..count).filter(|_| cx.udp_send(server, Some(at("10.1.0.2:7")), &[7; 1400]).is_ok()).count()
        });
        fixture.advance(Duration::from_millis(100));
        (sent, fixture.clients[1].handler().datagrams.len())
    };
    assert_eq!(send(&mut fixture, 1), (1, 1));
    // The ring has 512 KiB.
    let (sent, received) = send(&mut fixture, 2000);
    assert!((100..400).contains(&received), "{sent} {received}");
    assert!(sent + 1 >= received);
    // Each datagram that was refused counts on the shard that could not send it.
    let refused: Vec<u64> = fixture
        .shards
        .iter()
        .map(|shard| shard.core.router.as_ref().map_or(0, |router| router.relays_refused()))
        .collect();
    assert_eq!(refused, [(2000 - sent) as u64, 0, 0, 0]);
    assert_eq!(send(&mut fixture, 1).1, received + 1);
    let relayed = fixture.stats(|s| s.frames_relayed + s.relays_dropped);
    assert!(relayed[1] as usize > received && relayed[0] + relayed[2] + relayed[3] == 0, "{relayed:?}");
}

/// Usual datagrams fill what they may of a relay; without priorities they fill the relay.
// limit: priority.reserve_percent
#[test]
fn relay_full_of_low_datagrams_has_room_for_high() {
    for has_priorities in [true, false] {
        let more = format!("[priority]\nenabled = {has_priorities}\n");
        let mut fixture = TwoLinks::new(&more, RssMode::Hash);
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let [low, high] = [(53, 0), (54, 6)].map(|(port, priority)| {
            let options = UdpOptions { priority, ..UdpOptions::default() };
            let local = SocketAddr::new("::".parse().unwrap(), port);
            fixture.with_shard(0, |cx| cx.udp_bind(local, options)).unwrap()
        });
        let now = fixture.now;
        fixture.clients[1].with(now, |_, cx| cx.udp_bind(at("[::]:7"), UdpOptions::default())).unwrap();
        let send = |fixture: &mut TwoLinks, socket: UdpHandle, count: usize| {
            let send = |cx: &mut Context<'_>| cx.udp_send(socket, Some(at("10.1.0.2:7")), &[7; 1400]);
            fixture.with_shard(0, |cx| (0..count).filter(|_| send(cx).is_ok()).count())
        };
        // The client's hardware address becomes known.
        assert_eq!(send(&mut fixture, low, 1), 1);
        fixture.advance(Duration::from_millis(100));
        let mut refused = 0;
        for round in 0..3 {
            let lows = send(&mut fixture, low, 2000);
            let highs = send(&mut fixture, high, 30);
            assert!((100..400).contains(&lows), "{round}: {lows}");
            assert_eq!(highs, if has_priorities { 30 } else { 0 }, "{round}: after {lows} usual ones");
            fixture.clients[1].handler_mut().datagrams.clear();
            fixture.advance(Duration::from_millis(100));
            let from =
                |port| fixture.clients[1].handler().datagrams.iter().filter(move |d| d.0.port() == port);
            assert_eq!((from(53).count(), from(54).count()), (lows, highs), "{round}");
            refused += (2000 - lows + 30 - highs) as u64;
            let stats = fixture.shards[0].stack_stats();
            let shed = [stats.priority0_shed, stats.priority6_shed];
            assert_eq!(stats.relays_refused, refused, "{round}");
            assert_eq!(shed, if has_priorities { [refused, 0] } else { [0, 0] }, "{round}");
        }
    }
}

/// Connections of the usual class wait for a relay that refuses them, and send everything in the end.
#[test]
fn connections_wait_for_a_full_relay() {
    for has_priorities in [true, false] {
        let more = format!("mailbox_bytes = 262_144\n[priority]\nenabled = {has_priorities}\n");
        let mut fixture = TwoLinks::new(&more, RssMode::Hash);
        fixture.listen(80..=80);
        // The shards of the first link answer by the second one.
        (0..3).for_each(|_| drop(fixture.connect_from(1, "10.0.0.1:80")));
        let bytes = 40_000;
        for shard in SERVING[0] {
            let conns = fixture.shards[shard].handler().accepted.clone();
            let sent = fixture.with_shard(shard, |cx| {
                conns.iter().map(|conn| cx.send(*conn, &vec![7; bytes]).unwrap()).sum::<usize>()
            });
            assert_eq!(sent, conns.len() * bytes);
        }
        fixture.advance(Duration::from_secs(20));
        assert_eq!(fixture.clients[1].handler().bytes, 3 * CONNECTIONS * bytes, "{has_priorities}");
        let refused: u64 = fixture.stats(|s| s.relays_refused).iter().sum();
        let shed: u64 = fixture.stats(|s| s.priority0_shed).iter().sum();
        assert_eq!((refused > 0, shed > 0), (true, has_priorities), "{refused} {shed}");
    }
}

/// The ring of the interface has room for fewer frames than the relay: the rest is dropped, and counted.
#[test]
fn a_full_interface_drops_relayed_frames() {
    let memory = MemoryConfig { ring_bytes: 16 << 10, ..MemoryConfig::default().without_offloads() };
    let mut fixture = TwoLinks::with_memory("", RssMode::Hash, &memory);
    let at = |text: &str| text.parse::<SocketAddr>().unwrap();
    let server = fixture.with_shard(0, |cx| cx.udp_bind(at("[::]:53"), UdpOptions::default())).unwrap();
    let now = fixture.now;
    fixture.clients[1].with(now, |_, cx| cx.udp_bind(at("[::]:7"), UdpOptions::default())).unwrap();
    let send = |fixture: &mut TwoLinks, count: usize| {
        for _ in 0..count {
            fixture.with_shard(0, |cx| cx.udp_send(server, Some(at("10.1.0.2:7")), &[7; 1400])).unwrap();
        }
        fixture.advance(Duration::from_millis(100));
        core::mem::take(&mut fixture.clients[1].handler_mut().datagrams).len() as u64
    };
    assert_eq!(send(&mut fixture, 1), 1);
    let before = fixture.stats(|s| s.frames_relayed);
    let received = send(&mut fixture, 100);
    let (relayed, dropped) = (fixture.stats(|s| s.frames_relayed), fixture.stats(|s| s.relays_dropped));
    assert!((1..100).contains(&received), "{received}");
    assert_eq!((relayed[1] - before[1], dropped), (received, vec![0, 100 - received, 0, 0]));
    assert_eq!(send(&mut fixture, 1), 1);
}

/// One shard serves the first link, and all 63 others the second one.
#[test]
fn as_many_shards_as_possible_serve_two_links() {
    let mut config = stack_config("");
    config.shards.count = 64;
    config.tcp.connections_max = 100;
    config.devices[0].shards = Some(vec![63]);
    config.devices[1].shards = Some((0..63).collect());
    let (_far, queues) = multi_queue(&MemoryConfig::default(), 1, RssMode::Hash);
    let (_other, more) = multi_queue(&MemoryConfig::default(), 63, RssMode::Hash);
    let shards = Shards::new(config).seed([1; 32]).now(START).device("cable", queues).device("second", more);
    let mut shards = shards.open().unwrap().build(|_| Ok(RecordingHandler::default())).unwrap();
    for now in (0..5000).step_by(100).map(|ms| START + Duration::from_millis(ms)) {
        for shard in &mut shards {
            shard.poll_once(now).unwrap();
        }
    }
    let now = START + Duration::from_secs(6);
    let opened = |shard: &mut Shard<RecordingHandler>, to: &str| {
        shard.with(now, |_, cx| cx.connect(to.parse().unwrap(), ConnectOptions::default())).is_ok()
    };
    for (index, shard) in shards.iter_mut().enumerate() {
        assert_eq!((opened(shard, "10.0.0.2:80"), opened(shard, "10.1.0.2:80")), (index == 63, index != 63));
    }
}
