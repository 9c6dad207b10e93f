//! Messages, answers and what Redis executes.

use super::fixture::*;
use core::time::Duration;
use ginnel::CloseReason;
use ginnel_testkit::redis::{RedisServer, redis_unavailable};
use ginnel_testkit::skip;

/// Returns the messages of a connection, with `requests` requests among them.
fn messages(count: usize, requests: usize) -> Vec<u8> {
    let label = |number: usize| if number.is_multiple_of(3) { URGENT } else { ORDINARY };
    let kind = |number: usize| if number < requests { REQUEST } else { HEARTBEAT };
    (0..count).flat_map(|number| message(number as u32, kind(number), label(number))).collect()
}

#[test]
fn requests_are_answered_and_heartbeats_are_not() {
    if let Some(reason) = redis_unavailable() {
        return skip("requests_are_answered_and_heartbeats_are_not", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    for redis in [RedisServer::on_unix_socket(folder.path(), "a"), RedisServer::on_port(&[])] {
        // Pipelined, split and merged in every way.
        let chunks = [0, 1, 7, 100, 199, 200, 201, 333, 1000];
        let script = |number: usize| ConnScript {
            bytes: messages(20, number),
            chunk: chunks[number % chunks.len()],
            half_closes: true,
            ..ConnScript::default()
        };
        let scripts: Vec<_> = (0..=20).map(script).collect();
        let options = options(&format!("--redis {} --keys 7", redis.address()));
        let mut fixture = IotFixture::new(&options, Clients::new(scripts, 10));
        fixture.run_to_end();
        for (number, result) in fixture.results().iter().enumerate() {
            assert_eq!(result.closed, Some(CloseReason::Normal), "{number}");
            assert_eq!(result.answers(), vec![true; number], "{number}");
        }
        let counters = fixture.counters();
        assert_eq!((counters.messages, counters.done), (21 * 20, 21 * 20));
        assert_eq!((counters.requests, counters.answers, counters.answers_error), (210, 210, 0));
        assert_eq!(counters.urgent, 21 * 7);
        assert_eq!((redis.calls("get"), redis.calls("set")), (2 * 420, 420));
        assert_eq!((counters.redis_connects, counters.redis_disconnects), (1, 0));
        let keys: usize = redis.command("DBSIZE").trim_start_matches(':').parse().unwrap();
        assert!((2..=7).contains(&keys), "{keys} keys");
    }
}

#[test]
fn value_of_a_key_is_the_last_counter() {
    if let Some(reason) = redis_unavailable() {
        return skip("value_of_a_key_is_the_last_counter", &reason);
    }
    let redis = RedisServer::on_port(&[]);
    let counter = |number: u32| u32::from_be_bytes(*b"aaaa") + number;
    let bytes = (0..5).flat_map(|number| message(counter(number), REQUEST, ORDINARY)).collect();
    let script = ConnScript { bytes, closes_after: Some(5), ..ConnScript::default() };
    let options = options(&format!("--redis {} --keys 1", redis.address()));
    let mut fixture = IotFixture::new(&options, Clients::new(vec![script], 1));
    fixture.run_to_end();
    assert_eq!(redis.command("GET iot:0"), "aaae");
}

#[test]
fn message_length_is_an_option() {
    if let Some(reason) = redis_unavailable() {
        return skip("message_length_is_an_option", &reason);
    }
    let redis = RedisServer::on_port(&[]);
    for len in [8, 65_536] {
        let mut one = message(1, REQUEST, URGENT);
        one.resize(len, 0x77);
        let script =
            ConnScript { bytes: one.repeat(10), chunk: 5_000, half_closes: true, ..ConnScript::default() };
        let options = options(&format!("--redis {} --message-bytes {len}", redis.address()));
        let mut fixture = IotFixture::new(&options, Clients::new(vec![script.clone(), script], 2));
        fixture.run_to_end();
        assert!(fixture.results().iter().all(|result| result.answers() == [true; 10]), "{len}");
    }
}

#[test]
fn malformed_messages_end_their_connection_only() {
    if let Some(reason) = redis_unavailable() {
        return skip("malformed_messages_end_their_connection_only", &reason);
    }
    let redis = RedisServer::on_port(&[]);
    let bad = |kind| ConnScript {
        bytes: [message(1, REQUEST, URGENT), message(2, kind, ORDINARY), message(3, REQUEST, URGENT)]
            .concat(),
        ..ConnScript::default()
    };
    let truncated = ConnScript {
        bytes: [message(1, REQUEST, ORDINARY), message(2, REQUEST, ORDINARY)[..199].to_vec()].concat(),
        half_closes: true,
        ..ConnScript::default()
    };
    let good = ConnScript { bytes: messages(9, 9), closes_after: Some(9), ..ConnScript::default() };
    let scripts = vec![bad(2), truncated, bad(255), good];
    let options = options(&format!("--redis {}", redis.address()));
    let mut fixture = IotFixture::new(&options, Clients::new(scripts, 4));
    fixture.run_to_end();
    let closed: Vec<_> = fixture.results().iter().map(|result| result.closed.unwrap()).collect();
    assert_eq!(closed, [CloseReason::Reset, CloseReason::Normal, CloseReason::Reset, CloseReason::Normal]);
    assert_eq!(fixture.results()[1].answers(), [true]);
    assert_eq!(fixture.results()[3].answers(), [true; 9]);
    let counters = fixture.counters();
    assert_eq!((counters.malformed, counters.truncated, counters.messages), (2, 1, 2 + 1 + 9));
    assert_eq!(counters.answers + counters.answers_undeliverable, counters.requests);
}

#[test]
fn keys_are_distributed_to_all_servers() {
    if let Some(reason) = redis_unavailable() {
        return skip("keys_are_distributed_to_all_servers", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let servers: Vec<_> =
        (0..4).map(|number| RedisServer::on_unix_socket(folder.path(), &number.to_string())).collect();
    let script = ConnScript { bytes: messages(5, 2), half_closes: true, ..ConnScript::default() };
    let redis: String = servers.iter().map(|server| format!("--redis {} ", server.address())).collect();
    let mut fixture = IotFixture::new(&options(&redis), Clients::new(vec![script; 200], 50));
    fixture.run_to_end();
    let sets: Vec<u64> = servers.iter().map(|server| server.calls("set")).collect();
    assert_eq!(sets.iter().sum::<u64>(), 1000);
    assert!(sets.iter().all(|count| (150..350).contains(count)), "{sets:?}");
    assert_eq!(servers.iter().map(|server| server.calls("get")).sum::<u64>(), 2000);
    assert!(fixture.results().iter().all(|result| result.answers() == [true; 2]));
}

#[test]
fn urgent_request_overtakes_queued_heartbeats() {
    if let Some(reason) = redis_unavailable() {
        return skip("urgent_request_overtakes_queued_heartbeats", &reason);
    }
    let redis = RedisServer::on_port(&[]);
    let options = options(&format!("--redis {} --deadline-ms 60000", redis.address()));
    let scripts = vec![ConnScript::default(); 2];
    let mut fixture = IotFixture::new(&options, Clients::new(scripts, 2));
    fixture.run_until(|fixture| fixture.clients.handler().connected == 2);
    // While Redis is suspended, all messages wait.
    redis.suspend();
    for _ in 0..10_000 {
        fixture.send(0, &message(1, HEARTBEAT, ORDINARY));
    }
    fixture.run_until(|fixture| fixture.counters().messages == 10_000);
    fixture.send(1, &message(2, REQUEST, URGENT));
    fixture.run_until(|fixture| fixture.counters().messages == 10_001);
    assert_eq!(fixture.waiting(), 10_001);
    redis.resume();
    fixture.run_until(|fixture| fixture.clients.handler().answers == 1);
    let done = fixture.counters().done;
    assert!(done < 1000, "answered after {done} heartbeats");
    fixture.run_until(|fixture| fixture.waiting() == 0);
    assert_eq!(fixture.counters().done, 10_001);
}

/// The peer's receive window closes, and the server reads no further requests of this connection.
// limit: requests of a connection without an answer
#[test]
fn client_that_does_not_read_waits_alone() {
    if let Some(reason) = redis_unavailable() {
        return skip("client_that_does_not_read_waits_alone", &reason);
    }
    let redis = RedisServer::on_port(&[]);
    const REQUESTS: usize = 100_000;
    let request = message(1, REQUEST, ORDINARY);
    let deaf = ConnScript { bytes: request.repeat(REQUESTS), is_deaf: true, ..ConnScript::default() };
    let good = ConnScript { bytes: messages(50, 50), closes_after: Some(50), ..ConnScript::default() };
    let options = options(&format!("--redis {}", redis.address()));
    let mut fixture = IotFixture::new(&options, Clients::new(vec![deaf, good], 2));
    fixture.run_until(|fixture| fixture.clients.handler().closed == 1);
    assert_eq!(fixture.results()[1].answers(), [true; 50]);
    let mut before = u64::MAX;
    while fixture.counters().requests != before {
        before = fixture.counters().requests;
        fixture.run_for(Duration::from_millis(200));
    }
    assert!(before < REQUESTS as u64, "{:?}", fixture.counters());
    // It reads at last, and nothing was lost.
    fixture.clients.with(ginnel::clock::now(), |clients, cx| clients.listen_to(cx, 0));
    fixture.run_until(|fixture| fixture.clients.handler().answers == REQUESTS + 50);
    fixture.assert_reconciled();
}
