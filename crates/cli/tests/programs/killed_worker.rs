//! Workers of nginx and HAProxy are killed (SIGKILL): what they serve at that moment fails, what waits does
//! not, as long as another process has the listener.

use crate::open_loop::{Answers, Client, requests_during};
use crate::processes::{children, pid, pid_in_time, signal, wait_until};
use crate::server::{ADDRESS, Nginx, Side, haproxy_configuration};
use ginnel_testkit::interop::{ProgramFixture, RunningProgram};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

const WORKERS: u32 = 2;
/// Requests per second.
const RATE: u32 = 2000;
/// Number of workers that are killed on each side.
const KILLS: u32 = 40;
/// Number of kills of HAProxy on each side.
const PROXY_KILLS: u32 = 20;
/// Rounds in which each side has its turn, and kills in each of them.
const OUTAGE_ROUNDS: u32 = 8;
const OUTAGE_KILLS: u32 = 6;
/// Longest time without HAProxy.
const OUTAGE_MAX: Duration = Duration::from_secs(10);
/// Number of connections that wait to be accepted.
const WAITING: usize = 40;
/// The test fails if its result has a smaller probability than this, provided that both sides are alike.
const SIGNIFICANCE: f64 = 1e-6;

/// Kills a worker and waits until nginx has replaced it.
#[track_caller]
fn kill_and_wait(master: &str, worker: &str) {
    signal(worker, "KILL");
    wait_until("there is a new worker", || {
        let now = children(master);
        now.len() == WORKERS as usize && !now.iter().any(|pid| pid == worker)
    });
}

/// Returns the probability that at least `least` of `count` failures are on the stack if each is equally
/// likely on both sides.
fn probability_of_at_least(least: u64, count: u64) -> f64 {
    // The terms of the binomial distribution, each computed from the previous one.
    let mut term = 0.5f64.powi(i32::try_from(count).unwrap());
    let mut sum = 0.0;
    for successes in 0..=count {
        if successes >= least {
            sum += term;
        }
        term *= (count - successes) as f64 / (successes + 1) as f64;
    }
    sum
}

#[test]
fn the_binomial_tail_is_exact() {
    assert_eq!(probability_of_at_least(0, 7), 1.0);
    assert_eq!(probability_of_at_least(3, 3), 0.125);
    assert_eq!(probability_of_at_least(2, 4), 11.0 / 16.0);
}

/// A request fails if the killed worker has accepted its connection and not answered. How many those are at
/// the moment of a kill is random, so the numbers of both sides differ even if the sides are alike. If they
/// are, each of the failures of both sides is on the stack with probability 1/2; the test fails if as many as
/// there were on the stack, or more, have a probability below [`SIGNIFICANCE`]. Failures of one kill are not
/// independent, hence the small value.
#[test]
fn a_killed_worker_fails_no_more_than_on_the_kernel() {
    let test = "a_killed_worker_fails_no_more_than_on_the_kernel";
    let mut sides = Vec::new();
    for side in Side::BOTH {
        let Some(fixture) = side.fixture(test, &["nginx", "pgrep"]) else { return };
        let nginx = Nginx::start(&fixture, side, WORKERS, "");
        let url = format!("http://{ADDRESS}/ok");
        let answers = requests_during(&fixture, Client::Routed, &url, RATE, KILLS, |number| {
            let workers = children(&nginx.master);
            kill_and_wait(&nginx.master, &workers[number as usize % workers.len()]);
        });
        println!("{side:?}, {KILLS} kills: {answers}");
        nginx.finish(true);
        sides.push(answers);
    }
    let [kernel, stack]: [Answers; 2] = sides.try_into().ok().unwrap();
    let probability = probability_of_at_least(stack.failed, stack.failed + kernel.failed);
    assert!(probability >= SIGNIFICANCE, "{KILLS} kills: kernel {kernel}, stack {stack}");
}

#[test]
fn connections_that_wait_survive_a_killed_worker() {
    let test = "connections_that_wait_survive_a_killed_worker";
    for side in [Side::Kernel, Side::Stack, Side::TwoShards] {
        let Some(fixture) = side.fixture(test, &["nginx", "pgrep"]) else { return };
        let nginx = Nginx::start(&fixture, side, WORKERS, "");
        wait_until("all workers are there", || children(&nginx.master).len() == WORKERS as usize);
        let workers = children(&nginx.master);
        workers.iter().for_each(|worker| signal(worker, "STOP"));
        let mut waiting: Vec<_> = (0..WAITING).map(|_| fixture.connect(ADDRESS).unwrap()).collect();
        for stream in &mut waiting {
            stream.write_all(b"GET /ok HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n").unwrap();
        }
        // The other worker stays stopped: the new one must get its connections, too.
        kill_and_wait(&nginx.master, &workers[0]);
        for stream in &mut waiting {
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap_or_else(|e| panic!("{side:?}: {e}"));
            assert!(answer.ends_with("\r\n\r\nok"), "{side:?}: {answer:?}");
        }
        signal(&workers[1], "CONT");
        nginx.finish(true);
    }
}

/// Starts HAProxy, and again each time that its master ends with its worker, as a service manager does.
fn start_proxy<'a>(fixture: &'a ProgramFixture, side: Side) -> Option<RunningProgram<'a>> {
    let conf = haproxy_configuration(fixture);
    let pid_file = fixture.folder().join("haproxy.pid").display().to_string();
    let script = format!(
        "trap 'kill $!; wait $!; exit' TERM
        while true; do haproxy -W -p {pid_file} -f {conf} & wait $!; done"
    );
    side.start(fixture, &["sh", "-c", &script])
}

/// Kills the worker of HAProxy, and waits until there is another one. Nobody listens meanwhile. Returns after
/// which time a connection could be opened again.
#[track_caller]
fn kill_proxy(fixture: &ProgramFixture) -> Duration {
    let master = pid_in_time(fixture, "haproxy.pid");
    // The master listens before it has a worker.
    wait_until("there is a worker", || !children(&master).is_empty());
    children(&master).iter().for_each(|worker| signal(worker, "KILL"));
    let killed = Instant::now();
    while killed.elapsed() < OUTAGE_MAX && fixture.connect(ADDRESS).is_ok() {
        // The worker is still there.
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(killed.elapsed() < OUTAGE_MAX, "no connection was refused");
    while fixture.connect(ADDRESS).is_err() {
        assert!(killed.elapsed() < OUTAGE_MAX, "HAProxy does not come back");
        std::thread::sleep(Duration::from_millis(1));
    }
    let outage = killed.elapsed();
    wait_until("there is a new worker", || {
        pid(fixture, "haproxy.pid").is_some_and(|now| now != master && !children(&now).is_empty())
    });
    wait_until("the new worker serves", || fixture.connect(ADDRESS).is_ok());
    outage
}

/// How many requests fail depends on how fast HAProxy starts, so the numbers are only printed. A worker that
/// has read a request when it is killed closes its connection without an answer, on the kernel too.
#[test]
fn a_killed_haproxy_leaves_no_connection_unanswered() {
    let test = "a_killed_haproxy_leaves_no_connection_unanswered";
    for side in [Side::Kernel, Side::Stack, Side::TwoShards] {
        let Some(fixture) = side.fixture(test, &["haproxy", "pgrep"]) else { return };
        let running = start_proxy(&fixture, side);
        let url = format!("http://{ADDRESS}/");
        let answers = requests_during(&fixture, Client::Routed, &url, RATE, PROXY_KILLS, |_| {
            kill_proxy(&fixture);
        });
        println!("{side:?}, {PROXY_KILLS} kills of HAProxy: {answers}");
        let kinds: Vec<&str> = answers.kinds.keys().map(String::as_str).collect();
        let expected = ["connect refused", "reset", "closed early"];
        assert!(kinds.iter().all(|kind| expected.contains(kind)), "{side:?}: {answers}");
        drop(running);
    }
}

/// HAProxy is back as fast, so no more of the connections that arrive at the same rate are refused. Both
/// sides take turns, as its start takes longer on a busy machine.
#[test]
#[ignore = "a minute on a quiet machine; part of `make suites`"]
fn a_killed_haproxy_is_back_as_fast_as_on_the_kernel() {
    let test = "a_killed_haproxy_is_back_as_fast_as_on_the_kernel";
    let sides = [Side::Kernel, Side::Stack, Side::TwoShards];
    let mut outages = sides.map(|_| Vec::new());
    for _ in 0..OUTAGE_ROUNDS {
        for (side, outages) in sides.into_iter().zip(&mut outages) {
            let Some(fixture) = side.fixture(test, &["haproxy", "pgrep"]) else { return };
            let running = start_proxy(&fixture, side);
            outages.extend((0..OUTAGE_KILLS).map(|_| kill_proxy(&fixture)));
            drop(running);
        }
    }
    let medians = outages.each_mut().map(|outages| {
        outages.sort_unstable();
        outages[outages.len() / 2]
    });
    for ((side, outages), median) in sides.iter().zip(&outages).zip(medians) {
        println!("{side:?}: median {median:.1?}, {:.1?} to {:.1?}", outages[0], outages.last().unwrap());
    }
    for (side, median) in sides.into_iter().zip(medians) {
        assert!(median <= medians[0] * 5 / 4, "{side:?}: {median:?} against {:?}", medians[0]);
    }
}
