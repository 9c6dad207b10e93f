//! Redis Cluster: redirections, migration of a slot, and a server that dies.

use super::fixture::*;
use ginnel_testkit::redis::{RedisServer, redis_unavailable};
use ginnel_testkit::skip;
use std::io::{Read, Write};
use std::net::TcpListener;

fn calls(servers: &[RedisServer], command: &str) -> u64 {
    servers.iter().map(|server| server.calls(command)).sum()
}

#[test]
fn messages_find_the_owner_of_their_slot() {
    if let Some(reason) = redis_unavailable() {
        return skip("messages_find_the_owner_of_their_slot", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let mut servers = RedisServer::cluster(folder.path(), 3);
    // The server knows one of them.
    let options = options(&format!("--redis {} --redis-cluster --deadline-ms 60000", servers[1].address()));
    let clients = Clients::new(vec![ConnScript::default(); 60], 60);
    let mut fixture = IotFixture::new(&options, clients);
    fixture.run_until(|fixture| fixture.clients.handler().connected == 60);
    let send_all = |fixture: &mut IotFixture| {
        let before = fixture.clients.handler().answers;
        for index in 0..60 {
            fixture.send(index, &[message(1, REQUEST, URGENT), message(2, HEARTBEAT, ORDINARY)].concat());
        }
        fixture
            .run_until(|fixture| fixture.clients.handler().answers == before + 60 && fixture.waiting() == 0);
    };
    send_all(&mut fixture);
    let redirected = fixture.counters().redis_redirected;
    assert!((20..=120).contains(&redirected), "{redirected}");
    assert!(servers.iter().all(|server| server.calls("set") > 0));
    assert_eq!((calls(&servers, "set"), calls(&servers, "get")), (120, 240));
    // The map is known now.
    send_all(&mut fixture);
    assert_eq!(fixture.counters().redis_redirected, redirected);

    // The slot of a key migrates: for missing keys, its old owner redirects to the new one (`ASK`).
    let ids: Vec<String> = servers.iter().map(|server| server.command("CLUSTER MYID")).collect();
    let key = (0..1000)
        .map(|key| format!("iot:{key}"))
        .find(|key| servers[0].command(&format!("GET {key}")).len() == 4);
    let key = key.expect("it has a key");
    let slot = servers[0].command(&format!("CLUSTER KEYSLOT {key}")).replace(':', "");
    assert_eq!(servers[2].command(&format!("CLUSTER SETSLOT {slot} IMPORTING {}", ids[0])), "+OK");
    assert_eq!(servers[0].command(&format!("CLUSTER SETSLOT {slot} MIGRATING {}", ids[2])), "+OK");
    servers[0].command(&format!("DEL {key}"));
    send_all(&mut fixture);
    assert!(servers[2].calls("asking") > 0);
    let asked = fixture.counters().redis_redirected;
    assert!(asked > redirected);
    for server in [2, 0, 1] {
        assert_eq!(servers[server].command(&format!("CLUSTER SETSLOT {slot} NODE {}", ids[2])), "+OK");
    }
    send_all(&mut fixture);
    assert!(fixture.counters().redis_redirected > asked, "it has moved");

    // A server without a replica: its messages wait until it is there again.
    servers[1].kill();
    for index in 0..60 {
        fixture.send(index, &message(1, REQUEST, URGENT));
    }
    fixture.run_for(core::time::Duration::from_millis(200));
    assert!(fixture.waiting() > 0);
    let before = fixture.clients.handler().answers;
    servers[1].start();
    fixture.run_until(|fixture| fixture.waiting() == 0);
    fixture.run_until(|fixture| fixture.clients.handler().answers == 5 * 60);
    assert!(before < 5 * 60);
    let counters = fixture.counters();
    assert_eq!((counters.messages, counters.done), (9 * 60, 9 * 60), "{counters:?}");
    assert_eq!(counters.answers_error, 0);
}

#[test]
fn replica_takes_over_from_killed_server() {
    if let Some(reason) = redis_unavailable() {
        return skip("replica_takes_over_from_killed_server", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let mut servers = RedisServer::cluster(folder.path(), 3);
    let replica = RedisServer::replica_of(folder.path(), &servers, 1);
    let options = options(&format!("--redis {} --redis-cluster --deadline-ms 60000", servers[0].address()));
    let mut fixture = IotFixture::new(&options, Clients::new(vec![ConnScript::default(); 60], 60));
    fixture.run_until(|fixture| fixture.clients.handler().connected == 60);
    for round in 1..=3 {
        for index in 0..60 {
            let label = if index % 2 == 0 { URGENT } else { ORDINARY };
            fixture.send(index, &[message(1, REQUEST, label), message(2, HEARTBEAT, ORDINARY)].concat());
        }
        if round == 2 {
            // Some commands are in flight to it.
            fixture.turn();
            servers[1].kill();
        }
        fixture
            .run_until(|fixture| fixture.clients.handler().answers == 60 * round && fixture.waiting() == 0);
    }
    assert!(replica.command("INFO replication").contains("role:master"));
    assert!(replica.calls("set") > 0);
    let counters = fixture.counters();
    assert_eq!((counters.messages, counters.done, counters.answers_error), (360, 360, 0), "{counters:?}");
    assert!(fixture.results().iter().all(|result| result.answers() == [true; 3]));
}

// limit: servers of a Redis Cluster
#[test]
fn endless_redirections_end_with_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // Redirects each message to an address that no server has.
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (mut bytes, mut messages) = ([0; 4096], 0u32);
        let mut commands = 0;
        while let Ok(len @ 1..) = stream.read(&mut bytes) {
            commands += bytes[..len].iter().filter(|byte| **byte == b'*').count();
            while commands >= 3 {
                commands -= 3;
                messages += 1;
                let host = format!("127.1.{}.{}", messages >> 8, messages & 255);
                stream.write_all(format!("-MOVED 0 {host}:1\r\n").repeat(3).as_bytes()).unwrap();
            }
        }
    });
    let options = options(&format!("--redis {address} --redis-cluster --deadline-ms 60000"));
    let script =
        ConnScript { bytes: message(1, REQUEST, URGENT), closes_after: Some(1), ..ConnScript::default() };
    let mut fixture = IotFixture::new(&options, Clients::new(vec![script], 1));
    fixture.run_to_end();
    assert_eq!(fixture.results()[0].answers(), [false]);
    assert_eq!((fixture.counters().failed_redis, fixture.counters().redis_redirected), (1, 999));
}
