//! Requests at a rate that does not depend on the server (`ginnel load http --rate`), each over a connection
//! of its own.

use ginnel_testkit::interop::ProgramFixture;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// How long the generator sends requests in one round. After a round it waits for every answer, so that a
/// request that is never answered counts as failed.
const ROUND: Duration = Duration::from_secs(2);
/// Longest wait for an answer. Long, because only a lost request may fail on a busy machine.
const ANSWER_TIMEOUT: &str = "30s";
/// Pause before each action.
const PAUSE: Duration = Duration::from_millis(100);

/// Options of a client that has a TCP of its own behind a TAP device, whose packets the kernel routes. It
/// sends its request with the ACK that completes the handshake.
const ROUTED_CLIENT: [&str; 10] = [
    "--stack",
    "light",
    "--device",
    "tap:load0",
    "--address",
    "10.2.0.2/24",
    "--kernel-address",
    "10.2.0.1/24",
    "--gateway",
    "10.2.0.1",
];

/// The sender of the requests.
#[derive(Clone, Copy, Debug)]
pub enum Client {
    /// The kernel of the namespace.
    Kernel,
    /// A client outside the kernel, for which servers on the kernel and on a stack are equally remote. The
    /// namespace must forward packets, and the stack needs the gateway 10.9.0.1.
    Routed,
}

/// Numbers of requests by their outcome.
#[derive(Default)]
pub struct Answers {
    /// Number of requests that were answered with a 2xx status.
    pub completed: u64,
    /// Number of requests that failed: reset, refused, closed early, timed out, or answered with another
    /// status.
    pub failed: u64,
    /// Number of failures without an answer, by kind.
    pub kinds: BTreeMap<String, u64>,
    /// The reports of rounds with failures.
    reports: Vec<String>,
}

impl fmt::Display for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} answered, {} failed {:?}", self.completed, self.failed, self.reports)
    }
}

impl Answers {
    fn add(&mut self, report: &Value) {
        let sum = |counts: &Value| -> u64 {
            counts.as_object().unwrap().values().map(|count| count.as_u64().unwrap()).sum()
        };
        let good = report["statuses"]["2xx"].as_u64().unwrap_or_default();
        let failed = sum(&report["failures"]) + sum(&report["statuses"]) - good;
        for (kind, count) in report["failures"].as_object().unwrap() {
            *self.kinds.entry(kind.clone()).or_default() += count.as_u64().unwrap();
        }
        if failed > 0 {
            self.reports.push(format!("{} {}", report["failures"], report["statuses"]));
        }
        self.completed += good;
        self.failed += failed;
    }
}

/// Runs `act` `count` times while `rate` requests per second arrive at the server.
#[track_caller]
pub fn requests_during(
    fixture: &ProgramFixture,
    client: Client,
    url: &str,
    rate: u32,
    count: u32,
    mut act: impl FnMut(u32),
) -> Answers {
    let client = match client {
        Client::Kernel => &["--stack", "kernel"][..],
        Client::Routed => &ROUTED_CLIENT,
    };
    let (rate, round) = (rate.to_string(), format!("{}s", ROUND.as_secs()));
    let mut answers = Answers::default();
    let mut done = 0;
    while done < count {
        let mut generator = fixture.start_client(
            env!("CARGO_BIN_EXE_ginnel"),
            &[
                &["load", "http", "--json", "--quiet", "--poisson", "-c", "500"],
                client,
                &["--rate", &rate, "--duration", &round, "--timeout", ANSWER_TIMEOUT, url],
            ]
            .concat(),
        );
        loop {
            std::thread::sleep(PAUSE);
            if done == count || generator.has_exited() {
                break;
            }
            act(done);
            done += 1;
        }
        let output = generator.wait_for_output();
        let report = serde_json::from_slice(&output.stdout);
        answers.add(&report.unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr))));
    }
    // A generator that lacks CPU time or connections sends fewer requests than `rate`, but some must arrive.
    assert!(answers.completed > 100, "there was load: {answers}");
    answers
}
