//! Full queues between shards.

use super::control::{arp, neighbour, turn};
use super::{Fixture, RecordingHandler, START, receive, send, shards_and_device, stack_config};
use crate::config::Config;
use core::net::Ipv4Addr;
use core::time::Duration;
use ginnel_devices::memory::RssMode;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::udp::UdpOptions;
use ginnel_stack::wire::MacAddr;
use ginnel_stack::wire::arp::ArpOperation;
use std::collections::BTreeSet;

/// While one shard is stalled, frames for it are dropped and counted when its queue is full. The other shards
/// are served meanwhile, and its connections continue afterwards.
// limit: shards.mailbox_bytes
#[test]
fn full_queue_drops_frames_of_its_shard_only() {
    let mut config = stack_config(2);
    config.shards.mailbox_bytes = 256 << 10;
    let mut fixture =
        Fixture::new(config, RssMode::Fixed(0), |_| RecordingHandler::default(), RecordingHandler::default());
    fixture.advance(Duration::from_secs(3));
    let address = "10.0.0.1:80".parse().unwrap();
    fixture.with_shard(0, |_, cx| cx.listen(address, ListenOptions::default()).map(|_| ())).unwrap();
    fixture.advance(Duration::from_millis(1));
    let mut conns = Vec::new();
    for _ in 0..40 {
        let connect = |_: &mut RecordingHandler, cx: &mut crate::Context<'_>| {
            cx.connect(address, ConnectOptions::default())
        };
        conns.push(fixture.client.with(fixture.now, connect).unwrap());
    }
    fixture.advance(Duration::from_millis(100));
    let accepted: Vec<usize> = fixture.shards.iter().map(|s| s.handler().accepted.len()).collect();
    assert!(accepted[0] >= 10 && accepted[1] >= 10, "{accepted:?}");

    // Many bytes on every connection; the second shard has no turn.
    for &conn in &conns {
        fixture.client.with(fixture.now, |_, cx| cx.send(conn, &[7; 60_000])).unwrap();
    }
    for _ in 0..2000 {
        fixture.client.poll_once(fixture.now).unwrap();
        fixture.shards[0].poll_once(fixture.now).unwrap();
        fixture.now += Duration::from_micros(50);
    }
    let dropped = fixture.shards[0].stats().forwards_dropped;
    assert!(dropped > 0, "{:?}", fixture.shards[0].stats());

    fixture.advance(Duration::from_secs(60));
    for &conn in &conns {
        let all_arrived = fixture.client.with(fixture.now, |_, cx| cx.send(conn, &[7; 60_000]));
        assert_eq!(all_arrived, Ok(60_000), "all data before was acknowledged");
    }
    fixture.advance(Duration::from_secs(60));
    assert!(fixture.client.handler().closed.is_empty());
    let sent = fixture.sum(|s| s.frames_forwarded);
    assert_eq!(fixture.sum(|s| s.forwards_received), sent, "frames that were not dropped must arrive");
}

/// While one shard is stalled, low frames for it leave room in its queue for high ones.
// limit: shards.mailbox_bytes
#[test]
fn queue_full_of_low_frames_has_room_for_high() {
    for has_priorities in [true, false] {
        let mut config = stack_config(2);
        config.shards.mailbox_bytes = 256 << 10;
        let rules = "[[priority.rules]]\npriority = 6\nprotocol = \"udp\"\ndestination_ports = 54\n";
        config.priority = Config::from_toml("x.toml", rules).unwrap().priority;
        config.priority.enabled = Some(has_priorities);
        let mut fixture = Fixture::new(
            config,
            RssMode::Fixed(0),
            |_| RecordingHandler::default(),
            RecordingHandler::default(),
        );
        fixture.advance(Duration::from_secs(3));
        let bind = |fixture: &mut Fixture<RecordingHandler, RecordingHandler>, port: u16| {
            let local = ([0, 0, 0, 0], port).into();
            fixture.with_shard(1, |_, cx| cx.udp_bind(local, UdpOptions::default())).unwrap();
            fixture.advance(Duration::from_millis(1));
        };
        bind(&mut fixture, 53);
        bind(&mut fixture, 54);
        let from = fixture
            .client
            .with(fixture.now, |_, cx| cx.udp_bind("0.0.0.0:1000".parse().unwrap(), UdpOptions::default()))
            .unwrap();
        // The second shard has no turn meanwhile.
        let send = |fixture: &mut Fixture<RecordingHandler, RecordingHandler>, port: u16, len| {
            let to = ([10, 0, 0, 1], port).into();
            fixture.client.with(fixture.now, |_, cx| cx.udp_send(from, Some(to), &vec![7; len])).unwrap();
            fixture.client.poll_once(fixture.now).unwrap();
            fixture.shards[0].poll_once(fixture.now).unwrap();
            fixture.now += Duration::from_micros(50);
        };
        send(&mut fixture, 53, 1000);
        fixture.advance(Duration::from_millis(100));
        for _ in 0..10 {
            (0..100).for_each(|_| send(&mut fixture, 53, 1000));
            (0..3).for_each(|_| send(&mut fixture, 54, 900));
        }
        let stats = *fixture.shards[0].stats();
        fixture.advance(Duration::from_secs(1));
        let arrived = &fixture.shards[1].handler().datagrams;
        let high = arrived.iter().filter(|(_, len)| *len == 900).count();
        let low = arrived.len() - high;
        assert!(low > 100 && stats.forwards_dropped > 500, "{stats:?}");
        assert_eq!(low as u64 + high as u64 + stats.forwards_dropped, 1031);
        let expected = if has_priorities { (true, stats.forwards_dropped, 0) } else { (false, 0, 0) };
        assert_eq!((high == 30, stats.priority0_shed, stats.priority6_shed), expected, "{high} of 30");
    }
}

/// SYNs of the usual priority for a stalled shard are not dropped while low frames leave room in its queue.
#[test]
fn queue_full_of_low_frames_has_room_for_syns() {
    let mut config = stack_config(2);
    config.shards.mailbox_bytes = 256 << 10;
    config.priority.enabled = Some(true);
    let mut fixture =
        Fixture::new(config, RssMode::Fixed(0), |_| RecordingHandler::default(), RecordingHandler::default());
    fixture.advance(Duration::from_secs(3));
    let address = "10.0.0.1:80".parse().unwrap();
    fixture.with_shard(0, |_, cx| cx.listen(address, ListenOptions::default()).map(|_| ())).unwrap();
    let bind = |_: &mut RecordingHandler, cx: &mut crate::Context<'_>| {
        cx.udp_bind("0.0.0.0:53".parse().unwrap(), UdpOptions::default())
    };
    fixture.with_shard(1, bind).unwrap();
    let from = fixture.client.with(fixture.now, bind).unwrap();
    let send = |fixture: &mut Fixture<RecordingHandler, RecordingHandler>, len| {
        let to = "10.0.0.1:53".parse().unwrap();
        fixture.client.with(fixture.now, |_, cx| cx.udp_send(from, Some(to), &vec![7; len])).unwrap();
    };
    send(&mut fixture, 1000);
    fixture.advance(Duration::from_millis(100));
    // The second shard has no turn from now on.
    let turn = |fixture: &mut Fixture<RecordingHandler, RecordingHandler>| {
        fixture.client.poll_once(fixture.now).unwrap();
        fixture.shards[0].poll_once(fixture.now).unwrap();
        fixture.now += Duration::from_micros(50);
    };
    for len in [1000; 400].into_iter().chain([10; 100]) {
        send(&mut fixture, len);
        turn(&mut fixture);
    }
    let full = *fixture.shards[0].stats();
    assert!(full.forwards_dropped >= 100, "{full:?}");
    for _ in 0..20 {
        let options = ConnectOptions::default();
        fixture.client.with(fixture.now, |_, cx| cx.connect(address, options).map(|_| ())).unwrap();
    }
    (0..10).for_each(|_| turn(&mut fixture));
    let syns = *fixture.shards[0].stats();
    assert!(syns.frames_forwarded >= full.frames_forwarded + 5, "{syns:?}");
    assert_eq!(syns.forwards_dropped, full.forwards_dropped);
}

/// If a broadcast does not fit into the queue to one shard, no shard processes it, so that all know the same
/// neighbours.
// limit: shards.control_bytes
#[test]
fn broadcast_without_room_is_processed_by_none() {
    let mut config = stack_config(3);
    config.shards.control_bytes = 4096;
    let (mut shards, mut wire) =
        shards_and_device(config, RssMode::Fixed(0), |_| RecordingHandler::default());
    let now = START + Duration::from_secs(5);
    turn(&mut shards, now);
    receive(&mut wire);
    for last in 10..=200 {
        let mac = MacAddr([2, 0, 0, 0, 9, last]);
        let question = arp(ArpOperation::Request, Ipv4Addr::new(10, 0, 0, last), mac, MacAddr::BROADCAST);
        send(&mut wire, &question);
        // The third shard has no turn.
        shards[0].poll_once(now).unwrap();
        shards[1].poll_once(now).unwrap();
    }
    let refused = shards[0].stats().broadcasts_refused;
    assert!(refused > 100, "{refused}");
    let answers = receive(&mut wire).iter().filter(|frame| frame[12..14] == [8, 6]).count() as u64;
    assert_eq!(answers, 191 - refused, "a request that was not broadcast must not be answered");
    turn(&mut shards, now);
    let known = |shard: usize| -> BTreeSet<u8> {
        (10..=200).filter(|last| neighbour(&shards[shard], &format!("10.0.0.{last}")).is_some()).collect()
    };
    assert_eq!(known(0).len() as u64, 191 - refused);
    assert!(known(0) == known(1) && known(0) == known(2));

    // Now that all have turns again, all process the next broadcast.
    send(
        &mut wire,
        &arp(ArpOperation::Request, Ipv4Addr::new(10, 0, 0, 201), MacAddr([2; 6]), MacAddr::BROADCAST),
    );
    turn(&mut shards, now);
    assert!(shards.iter().all(|shard| neighbour(shard, "10.0.0.201").is_some()));
    assert_eq!(shards[0].stats().broadcasts_refused, refused);
}
