//! Devices whose hash has another key than the stack's, and another indirection table.

use super::{Fixture, RecordingFixture, RecordingHandler, stack_config};
use crate::config::{Config, DeviceKind};
use crate::device_rss::DeviceTables;
use crate::fixture::START;
use crate::shards::Shards;
use core::time::Duration;
use ginnel_devices::memory::{ADAPTER_KEY, MemoryConfig, RssMode, adapter_table, multi_queue};
use ginnel_stack::options::{ConnectOptions, ListenOptions};

const CONNECTIONS: usize = 40;

/// Creates shards behind an adapter. They know how it distributes frames if `is_known`.
fn fixture(count: u8, is_known: bool) -> RecordingFixture {
    let (far, queues) = multi_queue(&MemoryConfig::default(), count.into(), RssMode::AdapterTable);
    let mut shards = Shards::new(stack_config(count.into())).device("cable", queues).seed([1; 32]).now(START);
    if is_known {
        shards = shards.device_tables(DeviceTables::new(ADAPTER_KEY, vec![Some(adapter_table(count))]));
    }
    let shards = shards.open().unwrap().build(|_| Ok(RecordingHandler::default())).unwrap();
    let mut fixture = Fixture::with_devices((shards, far), RecordingHandler::default());
    fixture.advance(Duration::from_secs(3));
    fixture
}

/// Opens connections from each shard to the client and back, and returns how many frames crossed.
fn crossed(fixture: &mut RecordingFixture) -> u64 {
    let shards = fixture.shards.len();
    fixture.client.with(fixture.now, |_, cx| {
        cx.listen("[::]:80".parse().unwrap(), ListenOptions::default()).unwrap();
    });
    for shard in 0..shards {
        let address = "[::]:81".parse().unwrap();
        fixture.with_shard(shard, |_, cx| cx.listen(address, ListenOptions::default())).unwrap();
    }
    let forwarded = fixture.sum(|s| s.frames_forwarded);
    for (shard, to) in (0..shards).flat_map(|shard| [(shard, "10.0.0.2:80"), (shard, "[fd00::2]:80")]) {
        fixture.with_shard(shard, |_, cx| {
            for _ in 0..CONNECTIONS {
                cx.connect(to.parse().unwrap(), ConnectOptions::default()).unwrap();
            }
        });
    }
    fixture.client.with(fixture.now, |_, cx| {
        for to in ["10.0.0.1:81", "[fd00::1]:81"] {
            for _ in 0..shards * CONNECTIONS {
                cx.connect(to.parse().unwrap(), ConnectOptions::default()).unwrap();
            }
        }
    });
    fixture.advance(Duration::from_secs(1));
    assert!(fixture.shards.iter().all(|shard| shard.handler().connected == 2 * CONNECTIONS));
    assert_eq!(fixture.client.handler().connected, 2 * shards * CONNECTIONS);
    fixture.sum(|s| s.frames_forwarded) - forwarded
}

#[test]
fn known_tables_bring_all_connections_home() {
    for count in [2, 3, 4, 7] {
        let mut known = fixture(count, true);
        assert_eq!(crossed(&mut known), 0, "{count} shards");
        let accepted: Vec<usize> = known.shards.iter().map(|shard| shard.handler().accepted.len()).collect();
        assert!(accepted.iter().all(|&accepted| accepted > 5), "{accepted:?}");
        // A port that the application has chosen belongs to the shard to which the adapter delivers.
        let local = Some("10.0.0.1:5000".parse().unwrap());
        let options = ConnectOptions { local, ..ConnectOptions::default() };
        let to = "10.0.0.2:80".parse().unwrap();
        let opened = (0..usize::from(count))
            .filter(|&shard| known.with_shard(shard, |_, cx| cx.connect(to, options).is_ok()))
            .count();
        assert_eq!(opened, 1);
        assert!(crossed(&mut fixture(count, false)) > 100, "{count} shards");
    }
}

/// The driver may fill its table again when the queues are opened, so it is asked afterwards.
#[test]
fn drivers_are_asked_after_devices_are_open() {
    let config = Config::from_toml(
        "x.toml",
        "shards.count = 2\n[[device]]\nname = \"nonesuch\"\nkind = \"af_xdp\"\n\
         [[link]]\nname = \"a\"\ndevice = \"nonesuch\"\naddresses = [\"10.1.0.1/24\"]\n",
    );
    let shards = Shards::new(config.unwrap()).seed([1; 32]).now(START);
    let opened = shards.hash_reader(|name| unreachable!("{name} is not open")).open();
    assert!(opened.is_err_and(|error| error.to_string().contains("nonesuch")));
}

/// Frames of a device that the program supplies do not come by the interface of the configuration.
#[test]
fn drivers_of_supplied_devices_are_not_asked() {
    let (_far, queues) = multi_queue(&MemoryConfig::default(), 2, RssMode::Hash);
    let mut config = stack_config(2);
    config.devices[0].kind = DeviceKind::AfXdp;
    let shards = Shards::new(config).device("cable", queues).seed([1; 32]).now(START);
    let opened = shards.hash_reader(|name| unreachable!("{name} is supplied")).open();
    assert_eq!(opened.unwrap().count(), 2);
}
