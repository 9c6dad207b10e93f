//! Upgrades of the shards under load: programs and their clients keep their connections.

use crate::fixture;
use ginnel_testkit::interop::ProgramFixture;
use std::time::{Duration, Instant};

/// Upgrades of each stack.
const UPGRADES: usize = 3;
/// Pause before each upgrade, so that there is load before, between and after the upgrades.
const PAUSE: Duration = Duration::from_millis(700);

/// Upgrades the shards of the stack `name` while there is load. Connections must be kept. Tests that run as
/// root have stacks of different names.
#[track_caller]
fn upgrade_under_load(fixture: &ProgramFixture, name: &str) {
    for _ in 0..UPGRADES {
        std::thread::sleep(PAUSE);
        let upgraded = fixture.ginnel(&["upgrade", name, "--keep-connections"]);
        let text = String::from_utf8_lossy(&upgraded.stderr);
        assert!(upgraded.status.success() && text.contains("connections kept: "), "{text}");
        let kept: u32 =
            text.split("connections kept: ").nth(1).unwrap().trim_matches(['.', '\n']).parse().unwrap();
        assert!(kept >= 10, "{text}");
    }
    std::thread::sleep(PAUSE);
}

/// Checks what wrk says about its requests.
#[track_caller]
fn assert_served(text: &str) {
    let bad = ["Socket errors", "Non-2xx", " 0 requests in"];
    assert!(!bad.iter().any(|bad| text.contains(bad)) && text.contains("requests in"), "{text}");
}

#[test]
fn nginx_over_tap_keeps_clients_at_upgrades() {
    let programs = ["nginx", "wrk"];
    let Some(fixture) = fixture("nginx_over_tap_keeps_clients_at_upgrades", &programs) else { return };
    let conf = fixture.nginx("worker_processes 2;");
    let mut nginx = fixture.start_on_stack_with(&["--name", "nginx-over-tap"], &["nginx", "-c", &conf]);
    nginx.wait_until_listening("10.9.0.2:8000");
    let wrk = fixture.start_client("wrk", &["-c", "20", "-d", "12", "-t", "1", "http://10.9.0.2:8000/ok"]);
    upgrade_under_load(&fixture, "nginx-over-tap");
    assert_served(&String::from_utf8_lossy(&wrk.wait_for_output().stdout));
    assert_eq!(nginx.stop(), 0, "{}", nginx.read_stderr());
}

/// Both ends of each connection are in the stack.
#[test]
fn nginx_on_loopback_keeps_clients_at_upgrades() {
    let programs = ["nginx", "wrk", "curl"];
    let Some(fixture) = fixture("nginx_on_loopback_keeps_clients_at_upgrades", &programs) else { return };
    let conf = fixture.nginx("worker_processes 2;");
    let mut stack = fixture.start_ginnel(&["up", "nginx-on-loopback", "--loopback", "stack"]);
    stack.wait_until_stack_runs("nginx-on-loopback");
    let mut nginx =
        fixture.start_ginnel(&["run", "--stack", "nginx-on-loopback", "--", "nginx", "-c", &conf]);
    let until = Instant::now() + Duration::from_secs(30);
    let url = "http://127.0.0.1:8000/ok";
    let serves = || {
        let request = ["run", "--stack", "nginx-on-loopback", "--", "curl", "-sS", "-m", "5", url];
        let mut curl = fixture.start_ginnel(&request);
        curl.wait_for_exit() == 0
    };
    while !serves() {
        assert!(Instant::now() < until, "nginx does not answer");
    }
    let load = ["run", "--stack", "nginx-on-loopback", "--", "wrk", "-c", "20", "-d", "12", "-t", "1", url];
    let mut wrk = fixture.start_ginnel(&load);
    upgrade_under_load(&fixture, "nginx-on-loopback");
    assert_eq!(wrk.wait_for_exit(), 0, "{}", wrk.read_stderr());
    assert_served(&wrk.read_stdout());
    assert_eq!(nginx.stop(), 0, "{}", nginx.read_stderr());
    assert_eq!(stack.stop(), 0, "{}", stack.read_stderr());
}

#[test]
fn redis_keeps_clients_at_upgrades() {
    let programs = ["redis-server", "redis-cli", "redis-benchmark"];
    let Some(fixture) = fixture("redis_keeps_clients_at_upgrades", &programs) else { return };
    let mut redis = fixture.start_on_stack_with(
        &["--name", "redis-under-load"],
        &["redis-server", "--bind", "10.9.0.2", "--protected-mode", "no", "--save", ""],
    );
    redis.wait_until_listening("10.9.0.2:6379");
    // It exits with an error once a connection is reset.
    let load = ["-h", "10.9.0.2", "-c", "20", "-n", "100000000", "-t", "incr", "-q"];
    let mut benchmark = fixture.start_client("redis-benchmark", &load);
    upgrade_under_load(&fixture, "redis-under-load");
    assert!(!benchmark.has_exited(), "redis-benchmark has lost a connection");
    let count = || -> u64 {
        let value = fixture.client_text("redis-cli", &["-h", "10.9.0.2", "get", "counter:__rand_int__"]);
        value.trim().parse().unwrap()
    };
    let before = count();
    std::thread::sleep(PAUSE);
    assert!(count() > before, "the benchmark goes on");
    drop(benchmark);
    assert_eq!(redis.stop(), 0, "{}", redis.read_stderr());
}
