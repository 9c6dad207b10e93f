//! A listener is on every shard or on none.

use super::{Idle, World, ours};
use crate::error::Error;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::memory::Spread;
use ginnel_stack::error::ListenError;
use ginnel_stack::events::CloseReason;
use ginnel_stack::options::{ConnectOptions, ListenOptions};

fn world(count: u32) -> World<Idle, Idle> {
    let mut world = World::new(ours(count), Spread::RoundRobin, |_| Idle::default(), Idle::default());
    world.pass(Duration::from_secs(3));
    world
}

fn address() -> SocketAddr {
    "10.0.0.1:80".parse().unwrap()
}

/// Opens connections from the client and returns how many were refused.
fn refused(world: &mut World<Idle, Idle>, connections: usize) -> usize {
    let before = world.client.handler().closed.len();
    for _ in 0..connections {
        let open =
            |_: &mut Idle, cx: &mut crate::Context<'_>| cx.connect(address(), ConnectOptions::default());
        world.client.with(world.now, open).unwrap();
    }
    world.pass(Duration::from_millis(100));
    let closed = &world.client.handler().closed[before..];
    assert!(closed.iter().all(|reason| *reason == CloseReason::Refused), "{closed:?}");
    closed.len()
}

fn accepted(world: &World<Idle, Idle>) -> Vec<usize> {
    world.shards.iter().map(|shard| shard.handler().accepted.len()).collect()
}

#[test]
fn what_one_shard_listens_on_all_serve_and_what_another_closes_all_close() {
    let mut world = world(4);
    world.on(2, |_, cx| cx.listen(address(), ListenOptions::default()).map(|_| ())).unwrap();
    assert_eq!(refused(&mut world, 80), 0);
    let by_shard = accepted(&world);
    assert_eq!(by_shard.iter().sum::<usize>(), 80);
    assert!(by_shard.iter().all(|&n| n >= 5), "served where they arrive: {by_shard:?}");

    // Another shard joins, and so has a handle of its own.
    let joined = world.on(0, |_, cx| cx.listen(address(), ListenOptions::default())).unwrap();
    let again = world.on(0, |_, cx| cx.listen(address(), ListenOptions::default()));
    assert!(matches!(again, Err(Error::Listen(_, ListenError::AddressInUse))), "twice on one shard");
    world.on(0, |_, cx| cx.unlisten(joined)).unwrap();
    world.pass(Duration::from_millis(1));
    assert_eq!(refused(&mut world, 40), 40);
    assert_eq!(accepted(&world), by_shard, "connections that were accepted go on, and there are no new ones");
    assert!(world.on(0, |_, cx| cx.unlisten(joined)).is_err());
}

#[test]
fn a_handle_is_stale_on_the_shard_that_has_not_closed_it_itself() {
    let mut world = world(2);
    let handles =
        [0, 1].map(|shard| world.on(shard, |_, cx| cx.listen(address(), ListenOptions::default())).unwrap());
    // Before the second shard has a turn: it learns at once, because it asks.
    world.on(0, |_, cx| cx.unlisten(handles[0])).unwrap();
    assert!(world.on(1, |_, cx| cx.unlisten(handles[1])).is_err());
    // The same address again is another listener.
    world.on(1, |_, cx| cx.listen(address(), ListenOptions::default()).map(|_| ())).unwrap();
    assert_eq!(refused(&mut world, 20), 0);
}

#[test]
fn a_shard_that_starts_late_serves_what_the_others_listen_on() {
    // IPv6 addresses are checked for a second before anybody may listen; all shards begin only then.
    let mut world = World::new(ours(3), Spread::RoundRobin, |_| Idle::default(), Idle::default());
    world.until(Duration::from_secs(10), |shards, _| shards.iter().any(|shard| shard.handler().started));
    let first = world.shards.iter().position(|shard| shard.handler().started).unwrap();
    world.on(first, |_, cx| cx.listen(address(), ListenOptions::default()).map(|_| ())).unwrap();
    world.pass(Duration::from_secs(3));
    assert!(world.shards.iter().all(|shard| shard.handler().started));
    assert_eq!(refused(&mut world, 30), 0);
}

#[test]
fn an_address_that_is_another_shards_but_no_address_of_ours_is_refused() {
    let mut world = world(2);
    let foreign = "10.0.0.77:80".parse().unwrap();
    let refused = world.on(0, |_, cx| cx.listen(foreign, ListenOptions::default()));
    assert!(matches!(refused, Err(Error::Listen(_, ListenError::AddressNotAvailable))));
    world.pass(Duration::from_secs(1));
    assert_eq!(world.sum(|s| s.listens_refused), 0, "nothing of it was told");
}

/// A shard that sleeps has to reset what waits in its accept queue when another closes the listener, so it is woken; for a connection or datagram
/// it would find out by itself.
#[test]
fn a_sleeper_is_woken_when_the_board_changes() {
    let mut world = world(3);
    let rings = |world: &World<Idle, Idle>, shard: usize| {
        let mut count = [0; 8];
        let wake = world.shards[shard].mailbox.wake();
        rustix::io::read(wake.as_fd(), &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    };
    assert!(world.shards[1].mailbox.before_sleep());
    let listener = world.on(0, |_, cx| cx.listen(address(), ListenOptions::default())).unwrap();
    assert_eq!((rings(&world, 1), rings(&world, 2)), (1, 0), "one sleeps and one does not");
    world.shards[1].mailbox.after_sleep(false);
    world.pass(Duration::from_millis(1));
    for shard in [1, 2] {
        assert!(world.shards[shard].mailbox.before_sleep());
    }
    world.on(0, |_, cx| cx.unlisten(listener)).unwrap();
    assert_eq!((rings(&world, 1), rings(&world, 2)), (1, 1));
}

/// A listener on a port that was chosen must not become another shard's that has chosen it before.
#[test]
fn a_chosen_port_is_not_shared() {
    let mut world = world(2);
    world.shards[0].core.listen_alone(address(), ListenOptions::default()).unwrap();
    let again = world.shards[1].core.listen_alone(address(), ListenOptions::default());
    assert_eq!(again, Err(ListenError::AddressInUse));
    assert!(world.shards[1].core.listen(address(), ListenOptions::default()).is_ok(), "but by name");
}

/// Those that share an address listen each for itself, on each shard, and stand in the way of one that does not share.
#[test]
fn listeners_that_share_an_address_are_each_shards_own() {
    let mut world = world(2);
    let sharing = ListenOptions { reuse_port: true, user: 7, ..ListenOptions::default() };
    let plain = ListenOptions::default();
    let in_use =
        |result: Result<_, Error>| matches!(result, Err(Error::Listen(_, ListenError::AddressInUse)));
    let first = world.on(0, |_, cx| cx.listen(address(), sharing)).unwrap();
    assert!(
        in_use(world.on(1, |_, cx| cx.listen(address(), plain))),
        "also on the shard that has none of them"
    );
    assert!(in_use(world.on(1, |_, cx| cx.listen(address(), ListenOptions { user: 8, ..sharing }))));
    assert!(refused(&mut world, 80) >= 5, "the other shard listens for itself");
    let all = [0, 1].map(|shard| world.on(shard, |_, cx| cx.listen(address(), sharing)).unwrap());
    assert_eq!(refused(&mut world, 80), 0);
    world.on(0, |_, cx| cx.unlisten(first)).unwrap();
    assert_eq!(refused(&mut world, 80), 0);
    assert!(in_use(world.on(0, |_, cx| cx.listen(address(), plain))));
    for (shard, listener) in all.into_iter().enumerate() {
        world.on(shard, |_, cx| cx.unlisten(listener)).unwrap();
        assert!(world.on(shard, |_, cx| cx.unlisten(listener)).is_err());
    }
    assert_eq!(refused(&mut world, 20), 20);
    world.on(1, |_, cx| cx.listen(address(), plain).map(|_| ())).unwrap();
    assert_eq!(refused(&mut world, 20), 0);
}
