//! `iot-short`: many connections, and every message is accounted for.

use super::fixture::*;
use ginnel::config::Placement;
use ginnel_testkit::redis::{RedisServer, redis_unavailable};
use ginnel_testkit::skip;

const CONNECTIONS: usize = 20_000;

#[test]
fn twenty_thousand_connections_lose_no_message() {
    if let Some(reason) = redis_unavailable() {
        return skip("twenty_thousand_connections_lose_no_message", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let servers = ["a", "b"].map(|name| RedisServer::on_unix_socket(folder.path(), name));
    let redis = format!("--redis {} --redis {}", servers[0].address(), servers[1].address());
    let options = options(&format!("{redis} --deadline-ms 60000"));
    // One message of each twenty is an urgent request.
    let script = |number: usize| {
        let is_request = number.is_multiple_of(20);
        let label = if is_request { URGENT } else { ORDINARY };
        ConnScript { bytes: message(number as u32, u8::from(is_request), label), ..ConnScript::default() }
    };
    let clients = Clients::new((0..CONNECTIONS).map(script).collect(), CONNECTIONS);
    let mut fixture = IotFixture::placed(&options, clients, (Placement::Inline, 1, 0), &[]);
    fixture.run_until(|fixture| fixture.open() == CONNECTIONS as u64);
    let requests = CONNECTIONS / 20;
    fixture.run_until(|fixture| {
        let counters = fixture.counters();
        counters.done == CONNECTIONS as u64 && fixture.clients.handler().answers == requests
    });
    // A second message on each connection while all are open.
    for index in 0..CONNECTIONS {
        fixture.send(index, &message(1, HEARTBEAT, ORDINARY));
        if index % 64 == 0 {
            fixture.turn();
        }
    }
    fixture.run_until(|fixture| fixture.counters().done == 2 * CONNECTIONS as u64);
    fixture.assert_reconciled();
    let counters = fixture.counters();
    assert_eq!((counters.failed(), counters.answers, counters.answers_error), (0, requests as u64, 0));
    for (number, result) in fixture.results().iter().enumerate() {
        assert_eq!(result.answers(), vec![true; usize::from(number % 20 == 0)], "{number}");
    }
    let sets: u64 = servers.iter().map(|server| server.calls("set")).sum();
    assert_eq!(sets, 2 * CONNECTIONS as u64);
}
