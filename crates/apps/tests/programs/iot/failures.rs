//! Redis that dies, hangs or answers with errors; queues that are full; stopping.

use super::fixture::*;
use core::time::Duration;
use ginnel::clock;
use ginnel_testkit::redis::{RedisServer, redis_unavailable};
use ginnel_testkit::skip;

/// Creates a fixture with `count` connected clients, which stay open and send what the test gives them.
fn open_clients(options: &str, count: usize) -> IotFixture {
    let clients = Clients::new(vec![ConnScript::default(); count], count);
    let mut fixture = IotFixture::new(&self::options(options), clients);
    fixture.run_until(|fixture| fixture.clients.handler().connected == count);
    fixture
}

#[test]
fn redis_is_killed_and_started_again_under_load() {
    if let Some(reason) = redis_unavailable() {
        return skip("redis_is_killed_and_started_again_under_load", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let mut redis = RedisServer::on_unix_socket(folder.path(), "redis");
    let mut fixture = open_clients(&format!("--redis {} --deadline-ms 60000", redis.address()), 20);
    let mut requests = 0;
    for round in 0..3 {
        for number in 0..200 {
            let (kind, label) = (u8::from(number % 2 == 0), if number % 4 == 0 { URGENT } else { ORDINARY });
            fixture.send(number % 20, &message(number as u32, kind, label));
            requests += usize::from(kind);
            fixture.turn();
            if number == 100 {
                redis.kill();
            }
        }
        fixture.run_for(Duration::from_millis(50));
        assert!(fixture.waiting() > 0, "round {round}: {:?}", fixture.counters());
        redis.start();
        fixture.run_until(|fixture| fixture.waiting() == 0);
        fixture.assert_reconciled();
    }
    fixture.run_until(|fixture| fixture.clients.handler().answers == requests);
    let counters = fixture.counters();
    assert_eq!((counters.messages, counters.done, counters.answers_error), (600, 600, 0), "{counters:?}");
    assert_eq!((counters.redis_connects, counters.redis_disconnects), (4, 3));
    assert!(counters.redis_refused >= 3);
    assert!(fixture.results().iter().all(|result| result.answers() == vec![true; result.answers().len()]));
}

#[test]
fn requests_are_answered_with_an_error_at_their_deadline() {
    if let Some(reason) = redis_unavailable() {
        return skip("requests_are_answered_with_an_error_at_their_deadline", &reason);
    }
    // Killed: nobody listens. Suspended: connections are accepted and not served.
    for is_killed in [true, false] {
        let mut redis = RedisServer::on_port(&[]);
        let mut fixture = open_clients(&format!("--redis {} --deadline-ms 400", redis.address()), 2);
        if is_killed {
            redis.kill();
        } else {
            redis.suspend();
        }
        let started = std::time::Instant::now();
        for number in 0..50 {
            fixture.send(0, &message(number, REQUEST, if number % 2 == 0 { URGENT } else { ORDINARY }));
            fixture.send(1, &message(number, HEARTBEAT, ORDINARY));
        }
        fixture.run_until(|fixture| fixture.clients.handler().answers == 50);
        assert!(started.elapsed() >= Duration::from_millis(400));
        assert_eq!(fixture.results()[0].answers(), [false; 50]);
        fixture.run_until(|fixture| fixture.waiting() == 0);
        let counters = fixture.counters();
        assert_eq!((counters.failed_deadline, counters.done), (100, 0), "{counters:?}");
        assert_eq!((counters.answers, counters.answers_error), (50, 50));
        // Once Redis answers again, requests succeed, and the answers of a connection are in order.
        if is_killed {
            redis.start();
        } else {
            fixture.run_until(|fixture| fixture.counters().redis_disconnects > 0);
            redis.resume();
        }
        fixture.send(0, &message(1, REQUEST, ORDINARY));
        fixture.run_until(|fixture| fixture.clients.handler().answers == 51);
        assert_eq!(fixture.results()[0].answers().last(), Some(&true));
        fixture.assert_reconciled();
    }
}

/// Messages for the healthy server are answered at once, however many wait for the hung one.
#[test]
fn hung_server_does_not_delay_the_other() {
    if let Some(reason) = redis_unavailable() {
        return skip("hung_server_does_not_delay_the_other", &reason);
    }
    const MESSAGES: usize = 200;
    let servers = [RedisServer::on_port(&[]), RedisServer::on_port(&[])];
    let [hung, healthy] = [&servers[0], &servers[1]];
    let options = format!("--redis {} --redis {} --deadline-ms 60000", hung.address(), healthy.address());
    let mut fixture = open_clients(&options, MESSAGES);
    // All messages of a client have one key and so one server: none for the healthy server waits behind an
    // unanswered one of its connection.
    let send = |fixture: &mut IotFixture| {
        for client in 0..MESSAGES {
            fixture.send(client, &message(client as u32, REQUEST, ORDINARY));
        }
    };
    send(&mut fixture);
    fixture.run_until(|fixture| fixture.clients.handler().answers == MESSAGES);
    let of_healthy = healthy.calls("set") as usize;
    assert!((MESSAGES / 4..MESSAGES * 3 / 4).contains(&of_healthy), "{of_healthy}");
    hung.suspend();
    for round in 1..=20 {
        send(&mut fixture);
        let (messages, expected) = ((round + 1) * MESSAGES, MESSAGES + round * of_healthy);
        fixture.run_until(|fixture| {
            let answers = fixture.clients.handler().answers;
            answers >= expected && fixture.counters().messages == messages as u64
        });
        assert_eq!(fixture.waiting() as usize, round * (MESSAGES - of_healthy), "round {round}");
    }
    assert_eq!(healthy.calls("set") as usize, 21 * of_healthy);
    assert_eq!(fixture.counters().redis_disconnects, 0);
    hung.resume();
    fixture.run_until(|fixture| fixture.clients.handler().answers == 21 * MESSAGES);
    assert!(fixture.results().iter().all(|result| result.answers() == [true; 21]));
    fixture.assert_reconciled();
}

#[test]
fn redis_may_start_after_the_server() {
    if let Some(reason) = redis_unavailable() {
        return skip("redis_may_start_after_the_server", &reason);
    }
    let folder = tempfile::tempdir().unwrap();
    let mut redis = RedisServer::on_unix_socket(folder.path(), "redis");
    redis.kill();
    let mut fixture = open_clients(&format!("--redis {} --deadline-ms 60000", redis.address()), 1);
    fixture.send(0, &message(1, REQUEST, ORDINARY));
    fixture.run_for(Duration::from_millis(100));
    assert_eq!((fixture.waiting(), fixture.counters().redis_connects), (1, 0));
    // Attempts become rarer: 10, 20, 40 ms and so on.
    assert!((3..=6).contains(&fixture.counters().redis_refused), "{:?}", fixture.counters());
    redis.start();
    fixture.run_until(|fixture| fixture.clients.handler().answers == 1);
    assert_eq!(fixture.results()[0].answers(), [true]);
}

#[test]
fn errors_of_redis_are_errors_of_requests() {
    if let Some(reason) = redis_unavailable() {
        return skip("errors_of_redis_are_errors_of_requests", &reason);
    }
    let redis = RedisServer::on_port(&[]);
    // The key has a value of another type.
    redis.command("LPUSH iot:0 x");
    let mut fixture = open_clients(&format!("--redis {} --keys 1", redis.address()), 1);
    fixture.send(0, &[message(1, REQUEST, URGENT), message(2, HEARTBEAT, URGENT)].concat());
    fixture.run_until(|fixture| fixture.clients.handler().answers == 1 && fixture.waiting() == 0);
    assert_eq!(fixture.results()[0].answers(), [false]);
    // SET replaces the value, so the heartbeat is executed.
    assert_eq!((fixture.counters().failed_redis, fixture.counters().done), (1, 1));
    assert_eq!(fixture.counters().redis_disconnects, 0);
}

// limit: iot --queue-max
#[test]
fn full_queue_sheds_ordinary_messages_first() {
    if let Some(reason) = redis_unavailable() {
        return skip("full_queue_sheds_ordinary_messages_first", &reason);
    }
    let redis = RedisServer::on_port(&[]);
    let limits = "--queue-max 100 --in-flight-max 3 --deadline-ms 60000";
    let mut fixture = open_clients(&format!("--redis {} {limits}", redis.address()), 2);
    redis.suspend();
    for number in 0..101 {
        fixture.send(0, &message(number, HEARTBEAT, ORDINARY));
    }
    fixture.run_until(|fixture| fixture.counters().messages == 101);
    assert_eq!((fixture.counters().failed_shed, fixture.waiting()), (0, 101));
    fixture.send(0, &message(1, REQUEST, ORDINARY));
    fixture.run_until(|fixture| fixture.clients.handler().answers == 1);
    assert_eq!(fixture.results()[0].answers(), [false], "an ordinary request is shed, and answered");
    (0..100).for_each(|number| fixture.send(1, &message(number, REQUEST, URGENT)));
    fixture.run_until(|fixture| fixture.counters().messages == 202);
    assert_eq!((fixture.counters().failed_shed, fixture.waiting()), (101, 101));
    assert!(fixture.results()[1].received.is_empty(), "no urgent request was shed");
    fixture.send(1, &message(1, REQUEST, URGENT));
    fixture.run_until(|fixture| fixture.clients.handler().answers == 2);
    assert_eq!(fixture.results()[1].answers(), [false], "only urgent ones are left");
    redis.resume();
    fixture.run_until(|fixture| fixture.clients.handler().answers == 102);
    assert_eq!(fixture.counters().done, 101);
    fixture.assert_reconciled();
}

/// Messages of one segment are sent to an idle server, although only one message may wait.
#[test]
fn messages_that_can_be_sent_do_not_wait() {
    if let Some(reason) = redis_unavailable() {
        return skip("messages_that_can_be_sent_do_not_wait", &reason);
    }
    let redis = RedisServer::on_port(&[]);
    let limits = "--queue-max 1 --in-flight-max 96 --deadline-ms 60000";
    let mut fixture = open_clients(&format!("--redis {} {limits}", redis.address()), 1);
    fixture.send(0, &message(1, REQUEST, ORDINARY));
    fixture.run_until(|fixture| fixture.clients.handler().answers == 1);
    let requests = [2, 3, 4, 5, 6].map(|number| message(number, REQUEST, ORDINARY));
    fixture.send(0, &requests.concat());
    fixture.run_until(|fixture| fixture.clients.handler().answers == 6);
    assert_eq!(fixture.results()[0].answers(), [true; 6]);
    assert_eq!(fixture.counters().failed_shed, 0);
}

#[test]
fn refused_clients_of_redis_try_again() {
    if let Some(reason) = redis_unavailable() {
        return skip("refused_clients_of_redis_try_again", &reason);
    }
    let redis = RedisServer::on_port(&["--maxclients", "1"]);
    let blocker = std::net::TcpStream::connect(redis.address()).unwrap();
    // Redis sends an error before it has received a command, and closes the connection.
    let mut fixture = open_clients(&format!("--redis {} --deadline-ms 60000", redis.address()), 1);
    fixture.send(0, &message(1, REQUEST, ORDINARY));
    fixture.run_until(|fixture| fixture.counters().redis_disconnects >= 2);
    drop(blocker);
    fixture.run_until(|fixture| fixture.clients.handler().answers == 1);
    assert_eq!(fixture.results()[0].answers(), [true]);
}

#[test]
fn stopping_waits_for_what_was_accepted() {
    if let Some(reason) = redis_unavailable() {
        return skip("stopping_waits_for_what_was_accepted", &reason);
    }
    use ginnel::Handler;
    let redis = RedisServer::on_port(&[]);
    let mut fixture = open_clients(&format!("--redis {}", redis.address()), 1);
    redis.suspend();
    fixture.send(0, &message(1, REQUEST, ORDINARY));
    fixture.run_until(|fixture| fixture.waiting() == 1);
    fixture.servers[0].with(clock::now(), |server, cx| server.stopping(cx));
    assert!(!fixture.servers[0].poll_once(clock::now()).unwrap().stopped);
    redis.resume();
    let end = std::time::Instant::now() + TIMEOUT;
    while !fixture.servers[0].poll_once(clock::now()).unwrap().stopped {
        assert!(std::time::Instant::now() < end, "it does not stop");
    }
    assert_eq!(fixture.counters().answers, 1);
}
