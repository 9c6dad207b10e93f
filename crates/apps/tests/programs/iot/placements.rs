//! The server in every placement: clients receive equal bytes.

use super::fixture::*;
use core::time::Duration;
use ginnel::config::Placement;
use ginnel::{Config, clock};
use ginnel_apps::iot::IotOptions;
use ginnel_testkit::redis::{RedisServer, redis_unavailable};
use ginnel_testkit::skip;

const CONNECTIONS: usize = 40;
const MESSAGES: usize = 12;

fn script(number: usize) -> ConnScript {
    let one = |at: usize| {
        let label = if (at + number).is_multiple_of(4) { URGENT } else { ORDINARY };
        message(at as u32, u8::from(at % 3 == number % 3), label)
    };
    ConnScript {
        bytes: (0..MESSAGES).flat_map(one).collect(),
        chunk: [0, 150, 201, 1999][number % 4],
        half_closes: true,
        ..ConnScript::default()
    }
}

#[test]
fn iot_behaves_equally_in_all_placements() {
    if let Some(reason) = redis_unavailable() {
        return skip("iot_behaves_equally_in_all_placements", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let servers = ["a", "b"].map(|name| RedisServer::on_unix_socket(folder.path(), name));
    let options = options(&format!("--redis {} --redis {}", servers[0].address(), servers[1].address()));
    let mut first: Option<Vec<ConnResult>> = None;
    for placement in [Placement::Inline, Placement::Paired, Placement::Split] {
        for (shards, workers) in [(1, 0), (1, 2), (2, 0), (2, 2)] {
            servers.iter().for_each(|server| drop(server.command("CONFIG RESETSTAT")));
            let here = (placement, shards, workers);
            let clients = Clients::new((0..CONNECTIONS).map(script).collect(), 8);
            let mut fixture = IotFixture::placed(&options, clients, here, &[]);
            fixture.run_to_end();
            let counters = fixture.counters();
            assert_eq!(counters.done, (CONNECTIONS * MESSAGES) as u64, "{here:?}");
            let sets: u64 = servers.iter().map(|server| server.calls("set")).sum();
            let gets: u64 = servers.iter().map(|server| server.calls("get")).sum();
            assert_eq!((sets, gets), (counters.done, 2 * counters.done), "{here:?}");
            let results = fixture.results().to_vec();
            assert!(results.iter().all(|result| result.answers() == [true; MESSAGES / 3]), "{here:?}");
            assert!(first.get_or_insert_with(|| results.clone()) == &results, "{here:?}");
        }
    }
}

const ALL: [Placement; 3] = [Placement::Inline, Placement::Paired, Placement::Split];

#[test]
fn killed_redis_loses_nothing_in_any_placement() {
    if let Some(reason) = redis_unavailable() {
        return skip("killed_redis_loses_nothing_in_any_placement", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let mut redis = RedisServer::on_unix_socket(folder.path(), "redis");
    let options = options(&format!("--redis {} --deadline-ms 60000", redis.address()));
    for placement in ALL {
        for (shards, workers) in [(1, 0), (1, 2), (2, 1)] {
            let here = (placement, shards, workers);
            let clients = Clients::new(vec![ConnScript::default(); 20], 20);
            let mut fixture = IotFixture::placed(&options, clients, here, &[]);
            fixture.run_until(|fixture| fixture.clients.handler().connected == 20);
            let mut requests = 0;
            for number in 0..200usize {
                let label = if number.is_multiple_of(4) { URGENT } else { ORDINARY };
                let kind = u8::from(number.is_multiple_of(2));
                fixture.send(number % 20, &message(number as u32, kind, label));
                requests += usize::from(kind);
                fixture.turn();
                if number == 100 {
                    redis.kill();
                }
            }
            fixture.run_until(|fixture| fixture.counters().messages == 200);
            assert!(fixture.waiting() > 0, "{here:?}: {:?}", fixture.counters());
            redis.start();
            fixture.run_until(|fixture| fixture.waiting() == 0);
            fixture.run_until(|fixture| fixture.clients.handler().answers == requests);
            let counters = fixture.counters();
            assert_eq!((counters.done, counters.answers_error), (200, 0), "{here:?}: {counters:?}");
            assert!(counters.redis_disconnects > 0, "{here:?}: {counters:?}");
            let answers = fixture.results().iter().map(|result| result.answers());
            assert!(answers.flatten().all(|is_ok| is_ok), "{here:?}");
        }
    }
}

/// Returns how many messages a server has accepted before an urgent one whose frame has arrived after those
/// of 2,000 ordinary messages, each of which was the first on its connection.
fn messages_before_urgent(options: &IotOptions, here: (Placement, u32, u32), priorities: &str) -> u64 {
    const ORDINARY_MESSAGES: usize = 2000;
    let clients = Clients::new(vec![ConnScript::default(); ORDINARY_MESSAGES + 1], ORDINARY_MESSAGES + 1);
    let mut fixture = IotFixture::configured(options, clients, here, &[], |config| {
        config.priority.rules = Config::from_toml("rules", priorities).unwrap().priority.rules;
    });
    fixture.run_until(|fixture| fixture.open() == ORDINARY_MESSAGES as u64 + 1);
    fixture.run_for(Duration::from_millis(20));
    for index in 0..ORDINARY_MESSAGES {
        fixture.send(index, &message(1, HEARTBEAT, ORDINARY));
    }
    fixture.send(ORDINARY_MESSAGES, &message(1, REQUEST, URGENT));
    // The server does nothing meanwhile.
    while fixture.clients.poll_once(clock::now()).unwrap().work > 0 {}
    fixture.run_until(|fixture| fixture.counters().urgent > 0);
    let before = fixture.counters().messages - 1;
    fixture.run_until(|fixture| fixture.counters().done == ORDINARY_MESSAGES as u64 + 1);
    fixture.run_until(|fixture| fixture.clients.handler().answers == 1);
    fixture.assert_reconciled();
    before
}

/// The rules of `--priorities` take urgent messages through an overloaded stack in every placement.
#[test]
fn urgent_messages_pass_an_overloaded_stack() {
    if let Some(reason) = redis_unavailable() {
        return skip("urgent_messages_pass_an_overloaded_stack", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let redis = RedisServer::on_unix_socket(folder.path(), "redis");
    let limits = "--queue-max 10000 --deadline-ms 60000";
    let options = options(&format!("--redis {} {limits}", redis.address()));
    let rules = "[[priority.rules]]\npriority = 6\nprotocol = \"tcp\"\ndestination_ports = 80\n\
                 payload = { offset_bytes = 6, value = \"02\" }\n";
    for placement in ALL {
        for workers in [0, 1] {
            let here = (placement, 1, workers);
            let [with, without] = [rules, ""].map(|rules| messages_before_urgent(&options, here, rules));
            // The counters are read after whole turns, of up to 256 events.
            assert!(5 * with <= without, "{here:?}: {with} messages with priorities, {without} without");
        }
    }
}
