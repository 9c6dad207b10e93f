//! A simulated network: hosts with a stack each, links with delay, rate and faults, and a clock that jumps
//! from event to event.
//!
//! A run is a function of its seed. A test that fails prints the command that repeats it ([`Sim::replay`]).

mod host;
mod link;

pub use host::{ConnRecord, Host, HostConfig, image_of, restore};
pub(crate) use host::{FrameQueue, FrameQueueTx};
pub use link::{LinkModel, LinkStats};

use crate::checks::Check;
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::time::Instant;
use link::Link;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Index of a host in [`Sim::hosts`].
pub type HostId = usize;

/// A frame in flight.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct InFlight {
    at: Instant,
    order: u64,
    to: HostId,
    bytes: Vec<u8>,
}

/// Two hosts with a link between them.
pub struct Sim {
    /// The simulated time.
    pub now: Instant,
    /// The hosts.
    pub hosts: Vec<Host>,
    links: Vec<Link>,
    in_flight: BinaryHeap<Reverse<InFlight>>,
    order: u64,
    /// Time of the last step.
    last_step: Instant,
    rng: Random,
    seed: u64,
    /// Called with time, sender and frame for every frame that enters a link.
    pub tap: Option<FrameTap>,
    checks: Vec<(HostId, Check)>,
}

/// Observer of all frames that enter a link.
pub type FrameTap = Box<dyn FnMut(Instant, HostId, &[u8])>;

impl Sim {
    /// Creates hosts 0 and 1 with a lossless link of 1 ms delay each way.
    pub fn pair(seed: u64) -> Self {
        Self::pair_with(seed, HostConfig::default(), HostConfig::default(), LinkModel::default())
    }

    /// Creates hosts 0 (10.0.0.1, fd00::1) and 1 (10.0.0.2, fd00::2) with a link between them.
    pub fn pair_with(seed: u64, a: HostConfig, b: HostConfig, model: LinkModel) -> Self {
        let now = Instant::from_millis(1_000_000);
        let hosts = vec![Host::new(1, &a, seed, now), Host::new(2, &b, seed ^ 0x5555, now)];
        let links = vec![Link::new(0, 1, model.clone()), Link::new(1, 0, model)];
        Self {
            now,
            hosts,
            links,
            in_flight: BinaryHeap::new(),
            order: 0,
            last_step: Instant::ZERO,
            rng: Random::new(seed),
            seed,
            tap: None,
            checks: Vec::new(),
        }
    }

    /// Returns the command that repeats the running test with this seed. A test that fails prints the
    /// command.
    pub fn replay(&self) -> String {
        replay(self.seed)
    }

    /// Applies `check` to every frame that the host sends from now on; a violation panics.
    pub fn check_sent(&mut self, host: HostId, check: Check) {
        self.checks.push((host, check));
    }

    /// Changes the link model of both directions.
    pub fn set_link(&mut self, model: &LinkModel) {
        for link in &mut self.links {
            link.model = model.clone();
        }
    }

    /// Changes the link model of the direction from `from`.
    pub fn set_link_from(&mut self, from: HostId, model: &LinkModel) {
        for link in self.links.iter_mut().filter(|l| l.from == from) {
            link.model = model.clone();
        }
    }

    /// Returns the counters of the direction from `from`.
    pub fn link_stats(&self, from: HostId) -> LinkStats {
        self.links.iter().find(|l| l.from == from).map(|l| l.stats).unwrap_or_default()
    }

    /// Delivers a frame to `to` at the current time, with the next step.
    pub fn inject(&mut self, to: HostId, bytes: Vec<u8>) {
        self.order += 1;
        self.in_flight.push(Reverse(InFlight { at: self.now, order: self.order, to, bytes }));
    }

    /// Advances the time to the next event (a frame arrives or a timer expires) and processes everything that
    /// is due. Returns false, with the time at `until`, if nothing is due before.
    pub fn step(&mut self, until: Instant) -> bool {
        let next_frame = self.in_flight.peek().map(|f| f.0.at);
        let next_timer = self.hosts.iter().filter_map(|h| h.stack.next_deadline()).min();
        let Some(next) = [next_frame, next_timer].into_iter().flatten().min().filter(|at| *at <= until)
        else {
            self.now = self.now.max(until);
            return false;
        };
        // An expired deadline leads to another turn; the clock advances by at least 1 µs, so that the
        // simulation ends.
        let soonest = if self.last_step == self.now { self.now + Duration::from_micros(1) } else { self.now };
        self.now = next.max(soonest);
        self.last_step = self.now;
        let mut due: Vec<Vec<Vec<u8>>> = self.hosts.iter().map(|_| Vec::new()).collect();
        while self.in_flight.peek().is_some_and(|f| f.0.at <= self.now) {
            if let Some(Reverse(frame)) = self.in_flight.pop() {
                due[frame.to].push(frame.bytes);
            }
        }
        for (id, frames) in due.into_iter().enumerate() {
            self.hosts[id].turn(self.now, &frames);
            self.collect(id);
        }
        true
    }

    /// Runs the simulation for `time`.
    pub fn run(&mut self, time: Duration) {
        let until = self.now + time;
        while self.step(until) {}
    }

    /// Runs until `done` returns true, for at most `time`. Returns the last result of `done`.
    pub fn run_until(&mut self, time: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let until = self.now + time;
        loop {
            if done(self) {
                return true;
            }
            if self.now >= until || !self.step(until) {
                return done(self);
            }
        }
    }

    /// Takes the frames that a host has sent and puts them on its links.
    pub fn collect(&mut self, id: HostId) {
        let now = self.now;
        for frame in self.hosts[id].take_sent() {
            for (_, check) in self.checks.iter_mut().filter(|(host, _)| *host == id) {
                check.verify(&frame).unwrap_or_else(|problem| panic!("host {id} at {now:?}: {problem}"));
            }
            if let Some(tap) = &mut self.tap {
                tap(now, id, &frame);
            }
            for link in self.links.iter_mut().filter(|l| l.from == id) {
                for (at, bytes) in link.send(now, &frame, &mut self.rng) {
                    self.order += 1;
                    let order = self.order;
                    self.in_flight.push(Reverse(InFlight { at, order, to: link.to, bytes }));
                }
            }
        }
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay: {}", self.replay());
        }
    }
}

/// Returns the command that repeats the running test with `seed`.
fn replay(seed: u64) -> String {
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_else(|_| env!("CARGO_PKG_NAME").into());
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    let binary = std::env::current_exe().ok();
    // The name of a test binary ends with a hash.
    let binary =
        binary.as_ref().and_then(|path| path.file_stem()?.to_str()?.rsplit_once('-')).map(|(name, _)| name);
    let target = match binary {
        Some(name) if name.replace('_', "-") != package => format!("--test {name}"),
        _ => "--lib".into(),
    };
    format!("GINNEL_SEED={seed} cargo test -p {package} {target} -- --exact {test}")
}

/// Returns the seeds of a randomized test: `GINNEL_SEED` alone if it is set, otherwise 1 to `count`.
pub fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("GINNEL_SEED").ok().and_then(|s| s.parse().ok()) {
        Some(seed) => vec![seed],
        None => (1..=count).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::{arp, tcp};

    #[test]
    fn replay_command_repeats_the_run() {
        assert_eq!(
            Sim::pair(7).replay(),
            "GINNEL_SEED=7 cargo test -p ginnel-testkit --lib -- --exact \
             sim::tests::replay_command_repeats_the_run"
        );
    }

    #[test]
    #[should_panic(expected = "TCP expected, not ARP")]
    fn check_sent_panics_on_unexpected_frame() {
        let mut sim = Sim::pair(1);
        // Host 1 may send anything.
        sim.check_sent(1, arp() | !arp());
        sim.check_sent(0, tcp());
        let (now, to) = (sim.now, core::net::SocketAddr::new(sim.hosts[1].v4.into(), 80));
        sim.hosts[0].connect(now, to);
        sim.collect(0);
    }
}
