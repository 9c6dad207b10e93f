//! The server in every placement: clients receive equal bytes.

use super::fixture::*;
use ginnel::config::Placement;
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
