//! Upgrades of the shards under load: programs and their clients keep their connections, and no new
//! connection fails.

use crate::links::{af_xdp_fixture, create_veth};
use crate::{CLOSE, KEEP_ALIVE, fixture};
use ginnel_testkit::interop::{ProgramFixture, STACK};
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

/// Returns the command line of wrk, which requests `url` over 20 connections until it is interrupted. The
/// header says whether a connection serves one request or many.
fn wrk<'a>(url: &'a str, header: &'a str) -> [&'a str; 8] {
    // A SYN that is lost is sent again after a second or more: that is no error.
    ["wrk", "-c20", "-d100", "-t1", "--timeout=20", "-H", header, url]
}

/// Checks what wrk says about its requests.
#[track_caller]
fn assert_served(text: &str) {
    let bad = ["Socket errors", "Non-2xx", " 0 requests in"];
    assert!(!bad.iter().any(|bad| text.contains(bad)) && text.contains("requests in"), "{text}");
}

/// Upgrades the stack `name` of nginx, which serves 10.9.0.2, under long and short connections of the kernel.
#[track_caller]
fn nginx_keeps_clients(fixture: &ProgramFixture, name: &str, device: &[&str]) {
    let conf = fixture.nginx("worker_processes 2;");
    let options = [&["run", "--name", name], device, &["--", "nginx", "-c", &conf]].concat();
    let mut nginx = fixture.start_ginnel(&options);
    nginx.wait_until_listening("10.9.0.2:8000");
    let loads = [KEEP_ALIVE, CLOSE].map(|header| {
        let [program, arguments @ ..] = wrk("http://10.9.0.2:8000/ok", header);
        fixture.start_client(program, &arguments)
    });
    upgrade_under_load(fixture, name);
    for load in loads {
        load.signal("INT");
        assert_served(&String::from_utf8_lossy(&load.wait_for_output().stdout));
    }
    assert_eq!(nginx.stop(), 0, "{}", nginx.read_stderr());
}

#[test]
fn nginx_over_tap_keeps_clients_at_upgrades() {
    let programs = ["nginx", "wrk"];
    if let Some(fixture) = fixture("nginx_over_tap_keeps_clients_at_upgrades", &programs) {
        nginx_keeps_clients(&fixture, "nginx-over-tap", &STACK);
    }
}

#[test]
fn nginx_over_af_xdp_keeps_clients_at_upgrades() {
    let programs = ["nginx", "wrk"];
    if let Some(fixture) = af_xdp_fixture("nginx_over_af_xdp_keeps_clients_at_upgrades", &programs) {
        create_veth(&fixture, "xdp0", "xdp0k", "10.9.0.1/24", 1);
        let device = ["--device", "af_xdp:xdp0", "--address", "10.9.0.2/24"];
        nginx_keeps_clients(&fixture, "nginx-over-af-xdp", &device);
    }
}

/// Both ends of each connection are in the stack.
#[test]
fn nginx_on_loopback_keeps_clients_at_upgrades() {
    let programs = ["nginx", "wrk", "curl"];
    let Some(fixture) = fixture("nginx_on_loopback_keeps_clients_at_upgrades", &programs) else { return };
    let conf = fixture.nginx("worker_processes 2;");
    let mut stack = fixture.start_ginnel(&["up", "nginx-on-loopback", "--loopback", "stack"]);
    stack.wait_until_stack_runs("nginx-on-loopback");
    let run = |program: &[&str]| {
        fixture.start_ginnel(&[&["run", "--stack", "nginx-on-loopback", "--"], program].concat())
    };
    let mut nginx = run(&["nginx", "-c", &conf]);
    let until = Instant::now() + Duration::from_secs(30);
    let url = "http://127.0.0.1:8000/ok";
    while run(&["curl", "-sS", "-m", "5", url]).wait_for_exit() != 0 {
        assert!(Instant::now() < until, "nginx does not answer");
    }
    let loads = [KEEP_ALIVE, CLOSE].map(|header| run(&wrk(url, header)));
    upgrade_under_load(&fixture, "nginx-on-loopback");
    for mut load in loads {
        assert!(load.signal("INT"));
        assert_eq!(load.wait_for_exit(), 0, "{}", load.read_stderr());
        assert_served(&load.read_stdout());
    }
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
