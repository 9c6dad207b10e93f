//! The generator on a TCP of its own: a client's TCP with only the parts that load generation needs. One core
//! of it can overload a server that runs a complete TCP on one core.
//!
//! ```text
//! device ─► frames ─► input ─► session ─► network ─► frames ─► device
//!                       │                    │
//!                       └─ conn  locals  destination  neighbour  buffer ─┘
//! ```
//!
//! The light TCP is a correct and simple peer:
//!
//! * IPv4 and IPv6 without VLAN tags. ARP and NDP resolve the next hop and answer requests for the
//!   generator's own addresses. There is no duplicate address detection and no echo reply. Packet-too-big
//!   messages are believed.
//! * SYN offers MSS and window scale, and timestamps (with PAWS, RFC 7323) unless the device is memory
//!   without faults, which loses no frames. No SACK, no ECN.
//! * Segments are received in order: a segment out of order is dropped and acknowledged at once, and the peer
//!   retransmits it. Acknowledgements are sent with requests, or at the end of a burst, one for each
//!   connection.
//! * At most ten segments are in flight. After a retransmission timeout (RFC 6298, measured per server, at
//!   least 200 ms) transmission restarts at the first unacknowledged byte (go-back-N). There is no fast
//!   retransmit. Timeouts may be up to 100 ms late.
//! * There is no TIME-WAIT state. A port is used again after all other ports of its address, 32,768 of them
//!   (fewer with more than 2,048 addresses). Initial sequence numbers grow from one connection to the next,
//!   so that servers accept a port that they hold in TIME-WAIT. A retransmitted FIN is acknowledged again. A
//!   port carries one connection at a time, so an address has at most as many connections as ports, to all
//!   servers together.
//!
//! A connection takes 68 bytes and is found by an index computed from address and port.

mod buffer;
mod conn;
mod destination;
mod frames;
mod input;
mod locals;
mod neighbour;
mod network;

pub use self::locals::ports_of_address;

use self::input::InputEvent;
use self::locals::{LOCALS_MAX, Locals};
use self::network::{FrameSender, LightNetwork};
use super::busy_time::BusyTime;
use super::options::Job;
use super::plan::WorkerShare;
use super::run::{self, LoadJob, LoadSession, WorkerStats};
use super::stats::LiveProgress;
use core::time::Duration;
use ginnel::coalescing::Coalescing;
use ginnel::config::{DeviceKind, ShardConfig};
use ginnel::{Config, Error, Instant, StopFlag, clock, raw};
use ginnel_stack::device::{Device, RxBurst, RxQueue};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// Time after the run in which the last FINs are acknowledged.
const LINGER: Duration = Duration::from_millis(100);
/// The kernel usually wakes a thread at most this much too late. A due request is awaited by polling for this
/// long.
const WAKE_EARLY: Duration = Duration::from_micros(150);

/// Configuration of a worker, with one device and one link; and the device, if the caller supplies it.
pub struct WorkerStack {
    /// The configuration. Only the CPU and the spin time of `shard`, the device, the link and the routes are
    /// used.
    pub config: Config,
    /// The device. A memory device must be supplied; other devices are opened if they are not supplied.
    pub device: Option<Device>,
}

/// Result of [`LightWorker::turn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnResult {
    /// Number of frames and events handled. After 0, the next turn has nothing to do before `next_deadline`
    /// or the next frame.
    pub work: usize,
    /// Earliest deadline.
    pub next_deadline: Instant,
    /// True if the run is over.
    pub done: bool,
}

enum WorkerPhase {
    /// The next hops are being resolved.
    Resolving,
    Running,
    /// The run has ended; the last segments are in flight until this time.
    Lingering(Instant),
}

/// A worker of the generator on the light TCP.
pub struct LightWorker<J: LoadJob = Job> {
    rx: Box<dyn RxQueue + Send>,
    net: LightNetwork,
    job: J,
    share: WorkerShare,
    progress: Arc<LiveProgress>,
    session: Option<J::Session>,
    /// Time of the next call of the session.
    due: Instant,
    phase: WorkerPhase,
    busy: BusyTime,
}

impl<J: LoadJob> LightWorker<J> {
    /// Creates the worker of `share` at time `now`.
    ///
    /// # Errors
    /// The configuration is invalid or needs a feature that only Ginnel's TCP has, there are too many local
    /// addresses, no route leads to a target, or the device cannot be opened.
    pub fn new(
        job: &J,
        share: WorkerShare,
        progress: Arc<LiveProgress>,
        stack: WorkerStack,
        now: Instant,
    ) -> Result<Self, Error> {
        let worker = share.worker;
        let WorkerStack { config, device } = stack;
        config.validate()?;
        let ([device_config], [link]) = (config.devices.as_slice(), config.links.as_slice()) else {
            return Err(Error::application(
                "--stack light needs exactly one [[device]] and one [[link]] table",
            ));
        };
        if link.vlan.is_some() {
            return Err(Error::application(
                "link.vlan cannot be combined with --stack light, which sends no VLAN tags: use --stack ginnel",
            ));
        }
        let sources = job.sources(share);
        let locals = link.addresses.iter().map(|p| p.address).chain(sources.all());
        let locals: Vec<_> = locals.take(LOCALS_MAX + 1).collect();
        if locals.len() > LOCALS_MAX {
            let problem = format!(
                "--stack light supports at most {LOCALS_MAX} addresses of its own: give fewer --source addresses"
            );
            return Err(Error::application(problem));
        }
        let mut locals = Locals::new(locals);
        locals.start_ports_at(RandomState::new().hash_one(worker) as u32);
        let Device { rx, tx } = raw::open(device_config, &config, device)?;
        let mtu = link.mtu.map_or(tx.capabilities().mtu, |mtu| (mtu as usize).min(tx.capabilities().mtu));
        let (destinations, neighbours) =
            destination::resolve_destinations(job.targets(), link, &config.routes, &locals, mtu as u32)?;
        // With timestamps a server can measure the round-trip time from retransmitted segments. Without loss
        // they have no use.
        let is_lossy = device_config.kind != DeviceKind::Memory || device_config.faults.is_some();
        let seed = job.seed().wrapping_add(worker.into());
        Ok(Self {
            rx,
            net: LightNetwork::new(
                FrameSender::new(tx),
                locals,
                destinations,
                neighbours,
                seed,
                is_lossy,
                now,
            ),
            job: job.clone(),
            share,
            progress,
            session: None,
            due: now,
            phase: WorkerPhase::Resolving,
            busy: BusyTime::default(),
        })
    }

    /// Runs one turn at time `now`, which must not go backwards.
    #[inline]
    pub fn turn(&mut self, now: Instant) -> TurnResult {
        let Self { rx, net, session, .. } = self;
        net.set_time(now);
        let mut burst = RxBurst::new();
        rx.rx_burst(now, &mut burst);
        let mut work = burst.len();
        for frame in &burst {
            let outcome = net.receive(frame);
            if let Some(session) = session {
                deliver(session, net, outcome, now);
            }
        }
        drop(burst);
        while let Some((slot, failure)) = net.expire() {
            work += 1;
            if let Some(session) = session {
                session.ended(slot, failure, now, net);
            }
        }
        net.solicit_neighbours();
        let due = match session.as_ref().and_then(LoadSession::next_arrival) {
            Some(arrival) => arrival.min(self.due),
            None => self.due,
        };
        if due <= now {
            work += 1;
            self.poll(now);
        } else if !matches!(self.phase, WorkerPhase::Running) {
            self.poll(now);
        }
        self.net.acknowledge();
        self.net.flush();
        TurnResult { work, next_deadline: self.next_deadline(), done: self.is_done(now) }
    }

    fn poll(&mut self, now: Instant) {
        match &self.phase {
            WorkerPhase::Resolving => {
                self.due = Instant::MAX;
                if self.net.is_ready() {
                    self.begin(now);
                }
            }
            WorkerPhase::Running => {
                let Some(session) = &mut self.session else { return };
                match session.poll(now, &mut self.net) {
                    Some(at) => self.due = at,
                    None => {
                        self.phase = WorkerPhase::Lingering(now + LINGER);
                        self.due = now + LINGER;
                    }
                }
            }
            WorkerPhase::Lingering(_) => {}
        }
    }

    fn begin(&mut self, now: Instant) {
        self.session = Some(self.job.session(self.share, Arc::clone(&self.progress), now));
        (self.phase, self.due) = (WorkerPhase::Running, now);
        self.poll(now);
    }

    fn is_done(&self, now: Instant) -> bool {
        matches!(self.phase, WorkerPhase::Lingering(until) if now >= until || self.net.open_connections() == 0)
    }

    fn next_deadline(&self) -> Instant {
        let arrival = self.session.as_ref().and_then(LoadSession::next_arrival);
        let others = [arrival, self.net.next_deadline(), self.rx.next_deadline()];
        others.into_iter().flatten().min().map_or(self.due, |at| at.min(self.due))
    }

    /// Ends the run soon. What was measured so far counts.
    pub fn interrupt(&mut self, now: Instant) {
        if self.session.is_none() {
            self.begin(now);
        }
        if let Some(session) = &mut self.session {
            session.interrupt(now);
        }
        self.due = now;
    }

    /// Returns the results.
    pub fn stats(&self) -> J::Stats {
        let stats = self.session.as_ref().map(|session| session.stats().clone());
        let mut stats = stats.unwrap_or_default();
        stats.set_busy(self.busy.share());
        stats
    }

    /// Returns the number of connections that are not closed, including those that the session has closed.
    pub fn connections(&self) -> usize {
        self.net.open_connections()
    }

    fn is_measuring(&self) -> bool {
        self.session.as_ref().is_some_and(LoadSession::is_measuring)
    }

    /// Runs turns until the run is over.
    fn run(&mut self, config: &ShardConfig, stop: &StopFlag) -> Result<(), Error> {
        let spin = Duration::from_micros(config.spin_us.into());
        let coalescing = Coalescing::new(config.coalesce_us);
        let mut now = clock::now();
        let (mut last_work, mut is_interrupted) = (now, false);
        loop {
            if stop.is_set() && !is_interrupted {
                is_interrupted = true;
                self.interrupt(now);
            }
            let turn = self.turn(now);
            if turn.done {
                return Ok(());
            }
            if self.rx.is_gone() {
                return Err(Error::DevicesLost("the generator's device".into()));
            }
            let is_idle = turn.work == 0;
            if !is_idle {
                last_work = now;
            } else if now - last_work < spin || self.wake_at(turn.next_deadline) <= now {
                core::hint::spin_loop();
            } else {
                let until = self.wake_at(turn.next_deadline);
                raw::sleep(&mut *self.rx, stop, until)?;
            }
            if let Some(session) = &mut self.session {
                run::think(session.take_think_time());
            }
            let after = clock::now();
            if self.is_measuring() {
                self.busy.count(after - now, is_idle);
            }
            let turn_start = core::mem::replace(&mut now, after);
            if !is_idle && let Some(next_turn) = coalescing.next_turn(turn_start, turn.work) {
                let slept = Coalescing::sleep(after, next_turn);
                now = after + slept;
                if self.is_measuring() {
                    self.busy.count(slept, true);
                }
            }
        }
    }

    /// Returns when a sleep must end for a deadline at `at`: early for a due request, whose delay is
    /// measured.
    fn wake_at(&self, at: Instant) -> Instant {
        match self.session.as_ref().and_then(LoadSession::next_arrival) {
            Some(arrival) if arrival <= at => {
                Instant::ZERO + (arrival - Instant::ZERO).saturating_sub(WAKE_EARLY)
            }
            _ => at,
        }
    }
}

/// Reports the effect of a frame to the session.
#[inline]
fn deliver(session: &mut impl LoadSession, net: &mut LightNetwork, outcome: InputEvent<'_>, now: Instant) {
    match outcome {
        InputEvent::Nothing => {}
        InputEvent::Connected(slot) => session.connected(slot, now, net),
        InputEvent::Ended(slot, failure) => session.ended(slot, failure, now, net),
        InputEvent::Progress(p) => {
            if p.writable {
                session.writable(p.slot, now, net);
            }
            if !p.data.is_empty() {
                session.data(p.slot, p.data, now, net);
            }
            // The data may have completed the response, and the slot may already have another connection.
            if p.fin && net.is_current(p.slot, p.conn, p.port, p.source) {
                session.peer_closed(p.slot, now, net);
            }
        }
    }
}

/// Runs a worker's share on this thread and returns its results.
pub(super) fn run<J: LoadJob>(
    job: &J,
    share: WorkerShare,
    progress: Arc<LiveProgress>,
    stack: WorkerStack,
    stop: &StopFlag,
) -> Result<J::Stats, Error> {
    let shard = stack.config.shard.clone();
    if let Some(cpu) = shard.cpu {
        raw::pin(cpu)?;
    }
    let mut light = LightWorker::new(job, share, progress, stack, clock::now())?;
    light.run(&shard, stop)?;
    Ok(light.stats())
}

#[cfg(test)]
mod tests;
