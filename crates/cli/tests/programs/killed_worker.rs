//! Workers of nginx and HAProxy are killed (SIGKILL): what they serve at that moment fails, what waits does
//! not, as long as another process has the listener.

use crate::open_loop::{Answers, Client, requests_during};
use crate::processes::{children, pid, pid_in_time, signal, wait_until};
use crate::server::{ADDRESS, Nginx, Side, haproxy_configuration};
use ginnel_testkit::interop::{ProgramFixture, RunningProgram};
use std::io::{Read, Write};

const WORKERS: u32 = 2;
/// Requests per second.
const RATE: u32 = 2000;
/// Number of workers that are killed on each side.
const KILLS: u32 = 40;
/// Number of kills of HAProxy on each side.
const PROXY_KILLS: u32 = 20;
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

/// Kills the worker of HAProxy, and waits until there is another one. Nobody listens meanwhile.
#[track_caller]
fn kill_proxy(fixture: &ProgramFixture) {
    let master = pid_in_time(fixture, "haproxy.pid");
    // The master listens before it has a worker.
    wait_until("there is a worker", || !children(&master).is_empty());
    children(&master).iter().for_each(|worker| signal(worker, "KILL"));
    wait_until("there is a new worker", || {
        pid(fixture, "haproxy.pid").is_some_and(|now| now != master && !children(&now).is_empty())
    });
    wait_until("the new worker serves", || fixture.connect(ADDRESS).is_ok());
}

/// On the kernel connections are refused until HAProxy listens again. On a stack they wait for it, up to
/// `channel.killed_listener_wait_ms`, so no more requests fail than on the kernel. A worker that has read a
/// request when it is killed closes its connection without an answer, on the kernel too.
#[test]
fn a_killed_haproxy_fails_no_more_than_on_the_kernel() {
    let test = "a_killed_haproxy_fails_no_more_than_on_the_kernel";
    let mut failed_on_kernel = 0;
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
        if side == Side::Kernel {
            failed_on_kernel = answers.failed;
        }
        assert!(answers.failed <= failed_on_kernel, "{side:?}: {answers}; {failed_on_kernel} on the kernel");
        drop(running);
    }
}
