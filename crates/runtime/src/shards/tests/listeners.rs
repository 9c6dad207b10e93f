//! A listener is on every shard or on none.

use super::{Fixture, RecordingFixture, RecordingHandler, recording_fixture, stack_config};
use crate::error::Error;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::memory::RssMode;
use ginnel_stack::error::ListenError;
use ginnel_stack::events::CloseReason;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::udp::UdpOptions;

fn address() -> SocketAddr {
    "10.0.0.1:80".parse().unwrap()
}

/// Opens connections from the client and returns how many were refused.
fn count_refused(fixture: &mut RecordingFixture, connections: usize) -> usize {
    let before = fixture.client.handler().closed.len();
    for _ in 0..connections {
        let open = |_: &mut RecordingHandler, cx: &mut crate::Context<'_>| {
            cx.connect(address(), ConnectOptions::default())
        };
        fixture.client.with(fixture.now, open).unwrap();
    }
    fixture.advance(Duration::from_millis(100));
    let closed = &fixture.client.handler().closed[before..];
    assert!(closed.iter().all(|reason| *reason == CloseReason::Refused), "{closed:?}");
    closed.len()
}

fn accepted(fixture: &RecordingFixture) -> Vec<usize> {
    fixture.shards.iter().map(|shard| shard.handler().accepted.len()).collect()
}

#[test]
fn listener_opens_and_closes_on_all_shards() {
    let mut fixture = recording_fixture(4, RssMode::RoundRobin);
    fixture.with_shard(2, |_, cx| cx.listen(address(), ListenOptions::default()).map(|_| ())).unwrap();
    assert_eq!(count_refused(&mut fixture, 80), 0);
    let by_shard = accepted(&fixture);
    assert_eq!(by_shard.iter().sum::<usize>(), 80);
    assert!(by_shard.iter().all(|&n| n >= 5), "each shard must serve what arrives there: {by_shard:?}");

    // Another shard listens, too, and gets a handle of its own.
    let joined = fixture.with_shard(0, |_, cx| cx.listen(address(), ListenOptions::default())).unwrap();
    let again = fixture.with_shard(0, |_, cx| cx.listen(address(), ListenOptions::default()));
    assert!(
        matches!(again, Err(Error::Listen(_, ListenError::AddressInUse))),
        "a second listener on one shard"
    );
    fixture.with_shard(0, |_, cx| cx.unlisten(joined)).unwrap();
    fixture.advance(Duration::from_millis(1));
    assert_eq!(count_refused(&mut fixture, 40), 40);
    assert_eq!(accepted(&fixture), by_shard, "accepted connections continue, and no new ones are accepted");
    assert!(fixture.with_shard(0, |_, cx| cx.unlisten(joined)).is_err());
}

#[test]
fn handle_is_stale_after_another_shard_closes() {
    let mut fixture = recording_fixture(2, RssMode::RoundRobin);
    let handles = [0, 1].map(|shard| {
        fixture.with_shard(shard, |_, cx| cx.listen(address(), ListenOptions::default())).unwrap()
    });
    // Before the second shard has a turn: `listen` applies the registry.
    fixture.with_shard(0, |_, cx| cx.unlisten(handles[0])).unwrap();
    assert!(fixture.with_shard(1, |_, cx| cx.unlisten(handles[1])).is_err());
    // A listener on the address again is another one.
    fixture.with_shard(1, |_, cx| cx.listen(address(), ListenOptions::default()).map(|_| ())).unwrap();
    assert_eq!(count_refused(&mut fixture, 20), 0);
}

#[test]
fn late_shard_serves_existing_listeners() {
    // Duplicate address detection takes a second; all shards start only then.
    let mut fixture = Fixture::new(
        stack_config(3),
        RssMode::RoundRobin,
        |_| RecordingHandler::default(),
        RecordingHandler::default(),
    );
    fixture
        .run_until(Duration::from_secs(10), |shards, _| shards.iter().any(|shard| shard.handler().started));
    let first = fixture.shards.iter().position(|shard| shard.handler().started).unwrap();
    fixture.with_shard(first, |_, cx| cx.listen(address(), ListenOptions::default()).map(|_| ())).unwrap();
    fixture.advance(Duration::from_secs(3));
    assert!(fixture.shards.iter().all(|shard| shard.handler().started));
    assert_eq!(count_refused(&mut fixture, 30), 0);
}

#[test]
fn foreign_address_is_refused_on_all_shards() {
    let mut fixture = recording_fixture(2, RssMode::RoundRobin);
    let foreign = "10.0.0.77:80".parse().unwrap();
    let refused = fixture.with_shard(0, |_, cx| cx.listen(foreign, ListenOptions::default()));
    assert!(matches!(refused, Err(Error::Listen(_, ListenError::AddressNotAvailable))));
    fixture.advance(Duration::from_secs(1));
    assert_eq!(fixture.sum(|s| s.listens_refused), 0, "the listener was published");
}

#[test]
fn a_refused_listener_counts_once() {
    let mut config = stack_config(2);
    config.tcp.listeners_max = 1;
    let handler = |_| RecordingHandler::default();
    let mut fixture = Fixture::new(config, RssMode::RoundRobin, handler, RecordingHandler::default());
    fixture.advance(Duration::from_secs(3));
    let sharing = ListenOptions { reuse_port: true, ..ListenOptions::default() };
    fixture.with_shard(1, |_, cx| cx.listen("10.0.0.1:81".parse().unwrap(), sharing)).unwrap();
    for refused in 1..3 {
        let listener = fixture.with_shard(0, |_, cx| cx.listen(address(), ListenOptions::default())).unwrap();
        for port in 90..93 {
            // Each change of the registry makes shard 1 try again.
            let local = SocketAddr::new(address().ip(), port);
            let socket = fixture.with_shard(0, |_, cx| cx.udp_bind(local, UdpOptions::default())).unwrap();
            fixture.advance(Duration::from_millis(10));
            assert_eq!(fixture.sum(|s| s.listens_refused), refused);
            fixture.with_shard(0, |_, cx| cx.udp_close(socket)).unwrap();
        }
        fixture.with_shard(0, |_, cx| cx.unlisten(listener)).unwrap();
    }
}

/// If another shard closes the listener, a sleeping shard has to reset the connections in its accept queue,
/// so it is woken. A connection or datagram that arrives would not require that.
#[test]
fn sleeping_shard_is_woken_by_registry_change() {
    let mut fixture = recording_fixture(3, RssMode::RoundRobin);
    let rings = |fixture: &RecordingFixture, shard: usize| {
        let mut count = [0; 8];
        let wake = fixture.shards[shard].mailbox.wake();
        rustix::io::read(wake.as_fd(), &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    };
    assert!(fixture.shards[1].mailbox.before_sleep());
    let listener = fixture.with_shard(0, |_, cx| cx.listen(address(), ListenOptions::default())).unwrap();
    assert_eq!((rings(&fixture, 1), rings(&fixture, 2)), (1, 0), "shard 1 sleeps, shard 2 does not");
    fixture.shards[1].mailbox.after_sleep(false);
    fixture.advance(Duration::from_millis(1));
    for shard in [1, 2] {
        assert!(fixture.shards[shard].mailbox.before_sleep());
    }
    fixture.with_shard(0, |_, cx| cx.unlisten(listener)).unwrap();
    assert_eq!((rings(&fixture, 1), rings(&fixture, 2)), (1, 1));
}

/// A listener on a port that was chosen must not be shared with a shard that chose the port before.
#[test]
fn ephemeral_listener_port_is_not_shared() {
    let mut fixture = recording_fixture(2, RssMode::RoundRobin);
    fixture.shards[0].core.listen_exclusive(address(), ListenOptions::default()).unwrap();
    let again = fixture.shards[1].core.listen_exclusive(address(), ListenOptions::default());
    assert_eq!(again, Err(ListenError::AddressInUse));
    assert!(
        fixture.shards[1].core.listen(address(), ListenOptions::default()).is_ok(),
        "a given port is shared"
    );
}

/// Listeners with `SO_REUSEPORT` belong to one shard each, and conflict with a listener without it.
#[test]
fn reuseport_listeners_belong_to_one_shard() {
    let mut fixture = recording_fixture(2, RssMode::RoundRobin);
    let sharing = ListenOptions { reuse_port: true, user: 7, ..ListenOptions::default() };
    let plain = ListenOptions::default();
    let in_use =
        |result: Result<_, Error>| matches!(result, Err(Error::Listen(_, ListenError::AddressInUse)));
    let first = fixture.with_shard(0, |_, cx| cx.listen(address(), sharing)).unwrap();
    assert!(
        in_use(fixture.with_shard(1, |_, cx| cx.listen(address(), plain))),
        "also on a shard without such a listener"
    );
    assert!(in_use(
        fixture.with_shard(1, |_, cx| cx.listen(address(), ListenOptions { user: 8, ..sharing }))
    ));
    assert!(count_refused(&mut fixture, 80) >= 5, "the listener of the other shard stays");
    let all = [0, 1].map(|shard| fixture.with_shard(shard, |_, cx| cx.listen(address(), sharing)).unwrap());
    assert_eq!(count_refused(&mut fixture, 80), 0);
    fixture.with_shard(0, |_, cx| cx.unlisten(first)).unwrap();
    assert_eq!(count_refused(&mut fixture, 80), 0);
    assert!(in_use(fixture.with_shard(0, |_, cx| cx.listen(address(), plain))));
    for (shard, listener) in all.into_iter().enumerate() {
        fixture.with_shard(shard, |_, cx| cx.unlisten(listener)).unwrap();
        assert!(fixture.with_shard(shard, |_, cx| cx.unlisten(listener)).is_err());
    }
    assert_eq!(count_refused(&mut fixture, 20), 20);
    fixture.with_shard(1, |_, cx| cx.listen(address(), plain).map(|_| ())).unwrap();
    assert_eq!(count_refused(&mut fixture, 20), 0);
}
