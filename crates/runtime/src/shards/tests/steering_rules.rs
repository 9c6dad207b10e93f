//! Rules choose the shards of connections, whatever the device's hash says.

use super::{Fixture, RecordingHandler, shards_and_device, stack_config};
use crate::config::{Config, SteeringMode};
use crate::fixture::START;
use crate::shards::Shards;
use crate::steering_rules::SteeredFlow;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use ginnel_stack::options::{ConnectOptions, ListenOptions};

const COUNT: usize = 3;
const CONNECTIONS: usize = 30;

/// Creates shards with rules, all of which listen on the ports 80 to 82.
fn fixture(rules: &str, spread: RssMode) -> Fixture<RecordingHandler, RecordingHandler> {
    let text = format!("[shards]\ncount = {COUNT}\n{rules}");
    let mut config = stack_config(COUNT as u32);
    config.steering = Config::from_toml("x.toml", &text).unwrap().steering;
    let (far, queues) = multi_queue(&MemoryConfig::default(), COUNT, spread);
    // Port 82 belongs to the program's rule; it names a shard that does not exist for some clients.
    let own_rule = |flow: &SteeredFlow| {
        (flow.destination.port() == 82).then_some(if flow.source.port().is_multiple_of(2) { 0 } else { 9 })
    };
    let shards = Shards::new(config).steering_rule(SteeringMode::Stop, own_rule);
    let shards = shards.device("cable", queues).seed([1; 32]).now(START).open().unwrap();
    let shards = shards.build(|_| Ok(RecordingHandler::default())).unwrap();
    let mut fixture = Fixture::with_devices((shards, far), RecordingHandler::default());
    fixture.advance(Duration::from_secs(3));
    for shard in 0..COUNT {
        fixture.with_shard(shard, |_, cx| {
            for port in 80..=82 {
                cx.listen(format!("[::]:{port}").parse().unwrap(), ListenOptions::default()).unwrap();
            }
        });
    }
    fixture
}

/// Opens connections to a port of the shards, and returns how many each shard has accepted.
fn accepted(fixture: &mut Fixture<RecordingHandler, RecordingHandler>, to: &str) -> Vec<usize> {
    let before: Vec<usize> = fixture.shards.iter().map(|shard| shard.handler().accepted.len()).collect();
    let to: SocketAddr = to.parse().unwrap();
    fixture.client.with(fixture.now, |_, cx| {
        for _ in 0..CONNECTIONS {
            cx.connect(to, ConnectOptions::default()).unwrap();
        }
    });
    fixture.advance(Duration::from_secs(1));
    let after = fixture.shards.iter().map(|shard| shard.handler().accepted.len());
    let accepted: Vec<usize> = after.zip(before).map(|(after, before)| after - before).collect();
    assert_eq!(accepted.iter().sum::<usize>(), CONNECTIONS, "{to}");
    accepted
}

fn counts(fixture: &Fixture<RecordingHandler, RecordingHandler>) -> (u64, u64) {
    let of = |shard: &crate::shard::Shard<RecordingHandler>| {
        shard.core.stack.local().unwrap().network().steering().unwrap().policy_counts()
    };
    fixture.shards.iter().map(of).fold((0, 0), |sum, counts| (sum.0 + counts.0, sum.1 + counts.1))
}

#[test]
fn rules_choose_the_shards_of_connections() {
    let rules = "[[steering.rules]]\nshards = [2]\ndestination_ports = 80\n";
    for spread in [RssMode::Hash, RssMode::Fixed(0), RssMode::RoundRobin] {
        let mut fixture = fixture(rules, spread);
        assert_eq!(accepted(&mut fixture, "10.0.0.1:80"), [0, 0, CONNECTIONS]);
        assert_eq!(accepted(&mut fixture, "[fd00::1]:80"), [0, 0, CONNECTIONS]);
        let (chosen, invalid) = counts(&fixture);
        assert!(chosen >= 2 * CONNECTIONS as u64 && invalid == 0, "{chosen} {invalid}");
        // No rule matches: the hash decides.
        assert!(accepted(&mut fixture, "10.0.0.1:81").iter().all(|&n| n > 0 && n < CONNECTIONS));
        assert_eq!(counts(&fixture), (chosen, 0));
        // The program's rule: a shard that does not exist leaves the connection to the hash.
        assert!(accepted(&mut fixture, "10.0.0.1:82")[0] >= CONNECTIONS / 2);
        let (later, invalid) = counts(&fixture);
        assert!(later > chosen && invalid > 0);
        assert_eq!(fixture.sum(|s| s.forwards_dropped), 0);
    }
}

#[test]
fn rules_do_not_move_connections_that_the_stack_opens() {
    let rules = "[[steering.rules]]\nshards = [2]\nsource_ports = 80\n";
    let mut fixture = fixture(rules, RssMode::Hash);
    fixture.client.with(fixture.now, |_, cx| {
        cx.listen("[::]:80".parse().unwrap(), ListenOptions::default()).unwrap();
    });
    let forwarded = fixture.sum(|s| s.frames_forwarded);
    for shard in 0..COUNT {
        fixture.with_shard(shard, |_, cx| {
            for _ in 0..CONNECTIONS {
                cx.connect("10.0.0.2:80".parse().unwrap(), ConnectOptions::default()).unwrap();
            }
        });
    }
    fixture.advance(Duration::from_secs(1));
    assert!(fixture.shards.iter().all(|shard| shard.handler().connected == CONNECTIONS));
    assert_eq!((fixture.sum(|s| s.frames_forwarded), counts(&fixture)), (forwarded, (0, 0)));
}

/// A device steers opened connections by port mask, and all others by a hash that the stack does not know.
#[test]
fn port_bits_bring_opened_connections_home() {
    for count in [2, 3, 4, 7] {
        let mut config = stack_config(count);
        config.steering = Config::from_toml("x.toml", "steering.opened = \"port-bits\"\n").unwrap().steering;
        let devices = shards_and_device(config, RssMode::PortBits, |_| RecordingHandler::default());
        let mut fixture = Fixture::with_devices(devices, RecordingHandler::default());
        fixture.advance(Duration::from_secs(3));
        fixture.client.with(fixture.now, |_, cx| {
            cx.listen("[::]:80".parse().unwrap(), ListenOptions::default()).unwrap();
        });
        let forwarded = fixture.sum(|s| s.frames_forwarded);
        for (shard, to) in
            (0..count as usize).flat_map(|shard| [(shard, "10.0.0.2:80"), (shard, "[fd00::2]:80")])
        {
            let to = to.parse().unwrap();
            fixture.with_shard(shard, |_, cx| {
                for _ in 0..CONNECTIONS {
                    let conn = cx.connect(to, ConnectOptions::default()).unwrap();
                    let port = cx.endpoints(conn).unwrap()[0].port();
                    assert_eq!(usize::from(port) & ((count as usize).next_power_of_two() - 1), shard);
                }
            });
        }
        fixture.advance(Duration::from_secs(1));
        assert!(
            fixture.shards.iter().all(|shard| shard.handler().connected == 2 * CONNECTIONS),
            "{count} shards"
        );
        assert_eq!(fixture.sum(|s| s.frames_forwarded), forwarded, "{count} shards");
        // A port that the application has chosen belongs to the shard of its bits.
        let local = Some("10.0.0.1:40001".parse().unwrap());
        let options = ConnectOptions { local, ..ConnectOptions::default() };
        let to = "10.0.0.2:80".parse().unwrap();
        let opened: Vec<bool> = (0..count as usize)
            .map(|shard| fixture.with_shard(shard, |_, cx| cx.connect(to, options).is_ok()))
            .collect();
        assert!(opened[1] && opened.iter().filter(|&&is_open| is_open).count() == 1, "{opened:?}");
        // Accepted connections are served wherever they arrive, by the flow hash.
        for shard in 0..count as usize {
            let address = "[::]:81".parse().unwrap();
            fixture.with_shard(shard, |_, cx| cx.listen(address, ListenOptions::default())).unwrap();
        }
        let accepted = accepted(&mut fixture, "10.0.0.1:81");
        assert!(accepted.iter().all(|&accepted| accepted > 0), "{accepted:?}");
    }
}

/// The number of a queue that has no shard of its own falls to the hash, and every port is used once.
#[test]
fn ports_of_a_shard_are_exhausted_by_bits() {
    let mut config = stack_config(2);
    config.steering = Config::from_toml("x.toml", "steering.opened = \"port-bits\"\n").unwrap().steering;
    (config.tcp.local_port_first, config.tcp.local_port_last) = (40_000, 40_009);
    let devices = shards_and_device(config, RssMode::PortBits, |_| RecordingHandler::default());
    let mut fixture = Fixture::with_devices(devices, RecordingHandler::default());
    fixture.advance(Duration::from_secs(3));
    let to = "10.0.0.2:80".parse().unwrap();
    for shard in 0..2 {
        let opened = fixture.with_shard(shard, |_, cx| {
            (0..6).map(|_| cx.connect(to, ConnectOptions::default()).is_ok()).collect::<Vec<_>>()
        });
        assert_eq!(opened, [true, true, true, true, true, false]);
    }
}
