//! Agents that meet in a real Redis.

use super::*;
use ginnel_testkit::redis::{RedisServer, redis_unavailable};
use ginnel_testkit::skip;

fn with_redis(test: &str, body: impl FnOnce(&RedisAddress)) {
    if let Some(reason) = redis_unavailable() {
        return skip(test, &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let _server = RedisServer::on_unix_socket(folder.path(), "redis.sock");
    let path = folder.path().join("redis.sock");
    body(&format!("unix:{}", path.display()).parse().unwrap());
}

fn meeting(redis: &RedisAddress, agents: u32) -> Meeting {
    Meeting { redis: redis.clone(), run: "test".into(), agents }
}

#[test]
fn agents_share_numbers_start_and_results() {
    with_redis("agents_share_numbers_start_and_results", |redis| {
        // Several groups of one name, one after the other.
        for _ in 0..3 {
            let stop = StopFlag::new().unwrap();
            let results: Vec<_> = std::thread::scope(|scope| {
                let work = || {
                    let agent = meeting(redis, 3).join("plan", &stop, |_| ()).unwrap();
                    let (index, start) = (agent.index(), agent.start());
                    (index, start, agent.finish(&vec![u64::from(index) + 10], &stop).unwrap())
                };
                let threads: Vec<_> = (0..3).map(|_| scope.spawn(work)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let mut indices: Vec<u32> = results.iter().map(|(index, ..)| *index).collect();
            indices.sort_unstable();
            assert_eq!(indices, [0, 1, 2]);
            let first = results.iter().map(|(_, start, _)| *start).min().unwrap();
            // One clock, and a round trip to a local server.
            assert!(results.iter().all(|(_, start, _)| *start - first < Duration::from_millis(200)));
            for (index, _, result) in results {
                match result {
                    AgentResult::Collected { others, dead } => {
                        assert_eq!((index, others, dead.len()), (0, vec![vec![11], vec![12]], 0));
                    }
                    AgentResult::Delivered => assert!(index > 0),
                }
            }
        }
    });
}

#[test]
fn an_agent_that_dies_is_named() {
    with_redis("an_agent_that_dies_is_named", |redis| {
        let stop = StopFlag::new().unwrap();
        let (first, second) = std::thread::scope(|scope| {
            let join = || meeting(redis, 2).join("plan", &stop, |_| ()).unwrap();
            let threads = [scope.spawn(join), scope.spawn(join)];
            let [a, b] = threads.map(|thread| thread.join().unwrap());
            if a.index() == 0 { (a, b) } else { (b, a) }
        });
        // Its key is no longer renewed, and expires.
        drop(second);
        match first.finish(&1u64, &stop).unwrap() {
            AgentResult::Collected { others, dead } => {
                assert!(others.is_empty());
                let name = format!("agent 2 ({}) has died and left no results", own_name());
                assert_eq!(dead, [name]);
            }
            AgentResult::Delivered => panic!("the first agent collects"),
        }
    });
}

#[test]
fn agents_with_other_plans_are_refused() {
    with_redis("agents_with_other_plans_are_refused", |redis| {
        let stop = StopFlag::new().unwrap();
        let (joined, has_joined) = mpsc::channel();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                meeting(redis, 3).join("plan", &stop, |number| joined.send(number).unwrap()).err().unwrap()
            });
            assert_eq!(has_joined.recv(), Ok(1));
            let error = meeting(redis, 3).join("another", &stop, |_| ()).err().unwrap().to_string();
            assert!(error.contains("the options of this agent differ"), "{error}");
            stop.stop();
            // The refused agent has no number.
            let error = first.join().unwrap().to_string();
            assert!(error.contains("--agents 3: only 1 have joined"), "{error}");
        });
        // The group that did not come about is forgotten.
        let error = meeting(redis, 3).join("another", &stop, |_| ()).err().unwrap().to_string();
        assert!(error.contains("--agents 3: only 1 have joined"), "{error}");
    });
    let nowhere = meeting(&"unix:/nowhere/redis.sock".parse().unwrap(), 2);
    let error = nowhere.join("plan", &StopFlag::new().unwrap(), |_| ()).err().unwrap().to_string();
    assert!(error.contains("--redis unix:/nowhere/redis.sock"), "{error}");
}
