//! Full mailboxes.

use super::control::{arp, neighbour, turn};
use super::{Idle, START, World, ours, receive, send, shards_and_wire};
use core::net::Ipv4Addr;
use core::time::Duration;
use ginnel_devices::memory::Spread;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::wire::MacAddr;
use ginnel_stack::wire::arp::Operation;
use std::collections::BTreeSet;

/// One shard does nothing for a while: frames for it are dropped and counted when its mailbox is full, others are served meanwhile, and its
/// connections go on when it does.
// limit: shards.mailbox_bytes
#[test]
fn a_full_mailbox_drops_frames_and_hurts_nobody_else() {
    let mut config = ours(2);
    config.shards.mailbox_bytes = 256 << 10;
    let mut world = World::new(config, Spread::Fixed(0), |_| Idle::default(), Idle::default());
    world.pass(Duration::from_secs(3));
    let address = "10.0.0.1:80".parse().unwrap();
    world.on(0, |_, cx| cx.listen(address, ListenOptions::default()).map(|_| ())).unwrap();
    world.pass(Duration::from_millis(1));
    let mut conns = Vec::new();
    for _ in 0..40 {
        let connect =
            |_: &mut Idle, cx: &mut crate::Context<'_>| cx.connect(address, ConnectOptions::default());
        conns.push(world.client.with(world.now, connect).unwrap());
    }
    world.pass(Duration::from_millis(100));
    let accepted: Vec<usize> = world.shards.iter().map(|s| s.handler().accepted.len()).collect();
    assert!(accepted[0] >= 10 && accepted[1] >= 10, "{accepted:?}");

    // Many bytes on every connection; the second shard sleeps.
    for &conn in &conns {
        world.client.with(world.now, |_, cx| cx.send(conn, &[7; 60_000])).unwrap();
    }
    for _ in 0..2000 {
        world.client.poll_once(world.now).unwrap();
        world.shards[0].poll_once(world.now).unwrap();
        world.now += Duration::from_micros(50);
    }
    let dropped = world.shards[0].stats().forwards_dropped;
    assert!(dropped > 0, "{:?}", world.shards[0].stats());

    world.pass(Duration::from_secs(60));
    for &conn in &conns {
        let all_arrived = world.client.with(world.now, |_, cx| cx.send(conn, &[7; 60_000]));
        assert_eq!(all_arrived, Ok(60_000), "everything before was acknowledged");
    }
    world.pass(Duration::from_secs(60));
    assert!(world.client.handler().closed.is_empty());
    let sent = world.sum(|s| s.frames_forwarded);
    assert_eq!(world.sum(|s| s.frames_taken), sent, "what was not dropped arrived");
}

/// Neighbours speak faster than one shard listens: what it could not be told, the others do not know either, so that all know the same.
// limit: shards.control_bytes
#[test]
fn what_cannot_be_told_to_all_is_learnt_by_none() {
    let mut config = ours(3);
    config.shards.control_bytes = 4096;
    let (mut shards, mut wire) = shards_and_wire(config, Spread::Fixed(0), |_| Idle::default());
    let now = START + Duration::from_secs(5);
    turn(&mut shards, now);
    receive(&mut wire);
    for last in 10..=200 {
        let mac = MacAddr([2, 0, 0, 0, 9, last]);
        let question = arp(Operation::Request, Ipv4Addr::new(10, 0, 0, last), mac, MacAddr::BROADCAST);
        send(&mut wire, &question);
        // The third shard has no turn.
        shards[0].poll_once(now).unwrap();
        shards[1].poll_once(now).unwrap();
    }
    let refused = shards[0].stats().tells_refused;
    assert!(refused > 100, "{refused}");
    let answers = receive(&mut wire).iter().filter(|frame| frame[12..14] == [8, 6]).count() as u64;
    assert_eq!(answers, 191 - refused, "who could not be remembered got no answer, and asks again");
    turn(&mut shards, now);
    let known = |shard: usize| -> BTreeSet<u8> {
        (10..=200).filter(|last| neighbour(&shards[shard], &format!("10.0.0.{last}")).is_some()).collect()
    };
    assert_eq!(known(0).len() as u64, 191 - refused);
    assert!(known(0) == known(1) && known(0) == known(2));

    // Now that all have turns again, the next one is heard by all.
    send(
        &mut wire,
        &arp(Operation::Request, Ipv4Addr::new(10, 0, 0, 201), MacAddr([2; 6]), MacAddr::BROADCAST),
    );
    turn(&mut shards, now);
    assert!(shards.iter().all(|shard| neighbour(shard, "10.0.0.201").is_some()));
    assert_eq!(shards[0].stats().tells_refused, refused);
}
