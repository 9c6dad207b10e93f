//! A shard: one thread, its devices, one engine and one handler, and the loop that drives them.

use crate::clock;
use crate::command::{Commander, Mailbox};
use crate::config::ShardConfig;
use crate::context::{Context, Core, Lent, WorkContext};
use crate::departure::{Leave, Left};
use crate::dispatch::Dispatch;
use crate::engine::Engine;
use crate::error::Error;
use crate::handler::Handler;
use crate::inspect;
use crate::mail;
use crate::mailbox::Inbox;
use crate::pace::{Kernel, Pace};
use crate::placement::{Beside, Seat};
use crate::show::Shown;
use crate::stats::{Doing, ShardStats, StatsReader, StatsWriter};
use crate::stop::StopFlag;
use crate::wait::Watch;
use crate::yields::Yields;
use crate::{pin, wait};
use arrayvec::ArrayVec;
use core::net::IpAddr;
use core::time::Duration;
use ginnel_stack::device::{Label, RxBurst, RxQueue};
use ginnel_stack::handle::{LinkId, PortId};
use ginnel_stack::link::AddressState;
use ginnel_stack::priority;
use ginnel_stack::time::Instant;
use std::os::fd::RawFd;

/// Commands handled in one turn, so that a flood of them does not keep frames waiting.
const COMMANDS_PER_TURN_MAX: usize = 64;

/// Timers of the application handled in one turn.
const TIMERS_PER_TURN_MAX: usize = 1024;

/// A busy shard publishes its counters this often.
const PUBLISH_EVERY: Duration = Duration::from_millis(10);

/// A shard whose device cannot wake it looks this often.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The kernel wakes a sleeper so much too late at the most, usually: what must be exact is awaited by polling from then on.
const WAKE_EARLY: Duration = Duration::from_micros(150);

/// A receiving device and its number in the engine.
pub(crate) struct Port {
    pub(crate) id: PortId,
    /// Name of the device in the configuration.
    pub(crate) name: String,
    /// It was found to have gone away, and is not looked at any more.
    pub(crate) is_gone: bool,
    pub(crate) rx: Box<dyn RxQueue + Send>,
    /// What was received.
    pub(crate) rx_frames: u64,
    pub(crate) rx_bytes: u64,
}

/// A shard with its application.
pub struct Shard<H> {
    pub(crate) core: Lent,
    pub(crate) handler: H,
    pub(crate) dispatch: Dispatch,
    pub(crate) ports: Vec<Port>,
    pub(crate) links: Vec<LinkId>,
    /// Mailboxes that other shards write to.
    pub(crate) inboxes: Vec<Inbox>,
    pub(crate) mailbox: Mailbox,
    pub(crate) commander: Commander,
    pub(crate) config: ShardConfig,
    pub(crate) stats: StatsWriter,
    pub(crate) started: Option<Instant>,
    pub(crate) published: Instant,
    /// When the last turn began, if it found nothing to do.
    pub(crate) idle_since: Option<Instant>,
    /// The stack's shard, if the application is not in it.
    pub(crate) beside: Option<Beside>,
    /// One of several shards that run on threads, and leave together.
    pub(crate) leave: Option<Leave>,
    /// Where other processes read the counters.
    pub(crate) page: Option<Shown>,
    /// Where its thread runs.
    pub(crate) seat: Seat,
    /// What it sleeps on.
    pub(crate) watch: Watch,
    /// How it leaves its CPU to others without sleeping.
    pub(crate) yields: Yields,
}

/// What one turn did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Frames, events, commands and timers handled. If 0, the next turn is in vain before `next_deadline` or the next frame.
    pub work: usize,
    /// When a timer is due, of the engine, the application or a device.
    pub next_deadline: Option<Instant>,
    /// The handler asked the shard to stop.
    pub stopped: bool,
}

impl<H: Handler> Shard<H> {
    /// Runs on the calling thread until the handler stops the shard or `stop` is set and the handler has taken its leave.
    ///
    /// A shard that finds nothing to do polls for `shard.spin_us`, then sleeps in the kernel until a frame, a timer, a command or the
    /// stop flag. A device that goes away is counted and no longer looked at.
    ///
    /// # Errors
    /// The handler's, when it starts; a failed system call; [`Error::DevicesLost`] if the last device went away.
    pub fn run(&mut self, stop: &StopFlag) -> Result<(), Error> {
        let (Some(beside), Engine::Channel(remote)) = (&mut self.beside, &mut self.core.stack) else {
            return self.run_here(stop);
        };
        let Some(runner) = beside.to_run() else { return self.run_here(stop) };
        let stack_stop = StopFlag::new().map_err(|e| Error::io("stop flag of the shard", e))?;
        beside.set_running(true);
        let leaves = beside.leaves();
        let (direct, wake) = (runner.direct(), remote.wake());
        remote.set_control(Box::new(runner.commander()));
        let ended = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("stack".into());
            let thread = thread.spawn_scoped(scope, || runner.run(&stack_stop, &wake));
            let thread = thread.map_err(|e| Error::io("thread of the shard", e))?;
            // Also if the application panics: the stack's thread is waited for.
            let _end = StopAtEnd(&stack_stop);
            let mine = self.run_here(stop);
            if leaves {
                // The stack's waits for them.
                stop.stop();
            }
            stack_stop.stop();
            let panicked = |_| Err(Error::application("the shard's thread panicked"));
            // If the stack failed, the application ended because of that.
            thread.join().unwrap_or_else(panicked).and(mine)
        });
        if let (Some(beside), Engine::Channel(remote)) = (&mut self.beside, &mut self.core.stack) {
            beside.set_running(false);
            remote.set_control(Box::new(direct));
        }
        ended
    }

    /// This is one of several shards that leave together: the one that has the devices does for the others what only it can.
    pub(crate) fn leave_with_others(&mut self, leave: Option<Leave>) {
        match &mut self.beside {
            Some(beside) => beside.leave_with_others(leave),
            None => self.leave = leave,
        }
    }

    /// Runs what is on this thread.
    fn run_here(&mut self, stop: &StopFlag) -> Result<(), Error> {
        self.mailbox.set_running(true);
        let result = self.turns(stop);
        self.mailbox.set_running(false);
        result
    }

    fn turns(&mut self, stop: &StopFlag) -> Result<(), Error> {
        let Seat { key, cpu, spin, ref pace } = self.seat;
        if let Some(cpu) = cpu {
            pin::pin(key, cpu)?;
        }
        let mut pace = pace.as_ref().map(|pace| Pace::new(Kernel, pace.work, pace.realtime));
        let mut worked = clock::now();
        let mut leave_by: Option<Instant> = None;
        loop {
            let now = clock::now();
            let work = self.turn(now)?;
            if self.core.stopping || leave_by.is_some_and(|at| now >= at) {
                break;
            }
            if stop.is_set() && leave_by.is_none() {
                if self.started.is_none() {
                    // An application that has not begun has nothing to take leave of.
                    break;
                }
                leave_by = Some(now + Duration::from_millis(self.config.stop_grace_ms.into()));
                self.handler.stopping(&mut Context::new(&mut self.core));
                continue;
            }
            if self.beside.as_ref().is_some_and(Beside::has_ended) {
                break;
            }
            if work > 0 {
                worked = now;
                self.yields.worked();
                if let Some(pace) = &mut pace {
                    pace.worked(clock::now());
                }
            } else if now - worked < spin && !self.handler.is_in_the_way()
                || self.wake_for_exact().is_some_and(|at| at <= now)
            {
                core::hint::spin_loop();
            } else if self.seat.pace.is_none()
                && self.yields.may()
                && let Some(turn) = self.handler.yields()
            {
                std::thread::yield_now();
                self.yields.took(clock::now() - now, turn);
            } else {
                self.sleep(stop, leave_by)?;
                if let Some(pace) = &mut pace {
                    pace.slept();
                }
            }
        }
        self.see_others_off(stop)?;
        let now = clock::now();
        self.publish(now);
        self.show_now(now, Doing::Ended);
        Ok(())
    }

    /// Of several shards: does for the others what only this one can, until their applications have ended, too.
    fn see_others_off(&mut self, stop: &StopFlag) -> Result<(), Error> {
        let Some(leave) = &mut self.leave else { return Ok(()) };
        stop.stop();
        leave.leave();
        while !self.is_over() && self.devices().next().is_some() {
            let now = clock::now();
            if self.relay(now) == 0 {
                // The stop flag, which is set, must not end the sleep.
                self.sleep(stop, Some(now + Duration::from_secs(1)))?;
            }
        }
        Ok(())
    }

    /// All of several shards have ended.
    fn is_over(&self) -> bool {
        self.leave.as_ref().is_some_and(Leave::is_over)
    }

    /// A turn without the application. Returns how many frames and events there were.
    fn relay(&mut self, now: Instant) -> usize {
        let Self { core, dispatch, ports, .. } = self;
        core.now = now;
        let mut work = 0;
        for port in ports.iter_mut() {
            port.is_gone |= port.rx.is_gone();
        }
        for port in ports.iter_mut().filter(|port| !port.is_gone) {
            let mut burst = RxBurst::new();
            port.rx.rx_burst(now, &mut burst);
            if burst.is_empty() {
                continue;
            }
            work += burst.len();
            core.stats.count_burst(burst.len());
            port.rx_frames += burst.len() as u64;
            port.rx_bytes += take_in(&mut burst);
            core.receive(port.id, &mut burst);
            dispatch.events(core, &mut Left, Some(&burst));
            if let Some(stack) = core.stack.here_mut() {
                stack.finish_burst(&burst);
            }
        }
        for inbox in &mut self.inboxes {
            work += mail::take(core, &mut Left, dispatch, inbox);
        }
        core.stack.advance(now);
        work += dispatch.events(core, &mut Left, None);
        core.stack.transmit(now);
        work += dispatch.events(core, &mut Left, None);
        core.with_peers(|peers, stack, stats| peers.exchange(stack, stats));
        work
    }

    /// One turn at the time `now`, which must not run backwards: for simulations, and for programs that have a loop of their own.
    pub fn poll_once(&mut self, now: Instant) -> Result<Turn, Error> {
        let work = self.turn(now)?;
        Ok(Turn { work, next_deadline: self.next_deadline(), stopped: self.core.stopping })
    }

    /// A turn of this shard, and then of those behind it: what reached this one in its turn goes all the way.
    pub(crate) fn turn_all(&mut self, now: Instant) -> Result<usize, Error> {
        let work = self.turn(now)?;
        match &mut self.beside {
            Some(beside) => Ok(work + beside.turn_all(now)?),
            None => Ok(work),
        }
    }

    /// The application.
    pub fn handler(&self) -> &H {
        &self.handler
    }

    /// The application, to be changed between turns.
    pub fn handler_mut(&mut self) -> &mut H {
        &mut self.handler
    }

    /// Lets the application act between turns: for simulations.
    pub fn with<R>(&mut self, now: Instant, act: impl FnOnce(&mut H, &mut Context<'_>) -> R) -> R {
        self.core.now = now;
        act(&mut self.handler, &mut Context::new(&mut self.core))
    }

    /// The time of the last turn.
    pub fn now(&self) -> Instant {
        self.core.now
    }

    /// The way in for other threads.
    pub fn commander(&self) -> Commander {
        self.commander.clone()
    }

    /// The way to see the shard's counters from other threads.
    pub fn stats_reader(&self) -> StatsReader {
        self.stats.reader()
    }

    /// The shard's counters.
    pub fn stats(&self) -> &ShardStats {
        &self.core.stats
    }

    /// The counters of the shard that has the devices: this one's, or those of the stack's shard that this one's application stands beside
    /// (`shard.placement`), while it runs as of a few milliseconds ago. The workers of a shard (`shard.workers`) all have the same.
    pub fn stack_stats(&self) -> ShardStats {
        self.beside.as_ref().map_or(self.core.stats, Beside::stats)
    }

    /// The way to see those from other threads.
    pub(crate) fn stack_stats_reader(&self) -> StatsReader {
        self.beside.as_ref().map_or_else(|| self.stats.reader(), Beside::stats_reader)
    }

    /// Checks the engine and everything in it, wherever it is, if somebody can reach it from here.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn check_invariants(&self) {
        match (self.core.stack.here(), &self.beside) {
            (Some(stack), _) => stack.check_invariants(),
            (None, Some(beside)) => beside.check_invariants(),
            (None, None) => {}
        }
    }

    /// Receive, deliver, let time pass, send: in this order, so that what a handler answers leaves with the acknowledgement of what it
    /// answers. Each part is bounded.
    fn turn(&mut self, now: Instant) -> Result<usize, Error> {
        let Self { core, handler, dispatch, ports, mailbox, beside, .. } = self;
        core.now = now;
        if let Some(stack) = core.stack.here_mut() {
            stack.set_now(now);
        }
        if let Some(since) = self.idle_since.take() {
            core.stats.idle_ns += (now - since).as_nanos() as u64;
        }
        let mut work = match beside {
            Some(beside) => beside.turn(now)?,
            None => 0,
        };
        if self.started.is_none() && addresses_are_ready(core, &self.links) {
            self.started = Some(now);
            handler.start(&mut Context::new(core))?;
            work += 1;
        }
        if self.started.is_some() && core.peers.as_ref().is_some_and(|peers| peers.is_stale()) {
            core.with_peers(|peers, stack, stats| peers.sync(stack, stats));
            work += 1;
        }
        for port in ports.iter_mut().filter(|port| !port.is_gone) {
            if port.rx.is_gone() {
                port.is_gone = true;
                core.stats.devices_lost += 1;
                continue;
            }
            let mut burst = RxBurst::new();
            port.rx.rx_burst(now, &mut burst);
            if burst.is_empty() {
                continue;
            }
            work += burst.len();
            core.stats.count_burst(burst.len());
            port.rx_frames += burst.len() as u64;
            port.rx_bytes += take_in(&mut burst);
            core.receive(port.id, &mut burst);
            dispatch.events(core, handler, Some(&burst));
            if let Some(stack) = core.stack.here_mut() {
                stack.finish_burst(&burst);
            }
        }
        for inbox in &mut self.inboxes {
            work += mail::take(core, handler, dispatch, inbox);
        }
        for command in core::iter::from_fn(|| mailbox.take()).take(COMMANDS_PER_TURN_MAX) {
            work += 1;
            core.stats.commands += 1;
            match command.downcast::<inspect::Request>() {
                Ok(request) => request.answer(core),
                Err(command) => handler.command(&mut Context::new(core), command),
            }
        }
        for _ in 0..TIMERS_PER_TURN_MAX {
            let Some(token) = core.timers.pop(now) else { break };
            work += 1;
            core.stats.timers += 1;
            handler.timer(&mut Context::new(core), token);
        }
        work += dispatch.resumed(core, handler);
        if self.started.is_some() {
            work += handler.work(&mut WorkContext { core })?;
        }
        core.stack.advance(now);
        work += dispatch.events(core, handler, None);
        core.stack.transmit(now);
        // What sending brought to light (an unreachable neighbour) must not wait for the next frame.
        work += dispatch.events(core, handler, None);
        core.with_peers(|peers, stack, stats| peers.exchange(stack, stats));
        // Addresses that have become ready just now start the handler in the next turn, which must not wait for a frame. Looked at last: a channel's
        // bell that says so may have been taken with any of the events above, and does not ring again.
        work += usize::from(self.started.is_none() && addresses_are_ready(core, &self.links));

        if let Some(beside) = beside
            && core.stopping
        {
            // What the application did at last still leaves.
            work += beside.turn_all(now)?;
        }
        if core.stats.devices_lost > 0 && ports.iter().all(|port| port.is_gone) {
            let names: Vec<&str> = ports.iter().map(|port| port.name.as_str()).collect();
            return Err(Error::DevicesLost(names.join(", ")));
        }

        core.stats.turns += 1;
        core.stats.running_ns = self.started.map_or(0, |start| (now - start).as_nanos() as u64);
        if work == 0 {
            core.stats.idle_turns += 1;
            self.idle_since = self.started.map(|_| now);
        }
        if now - self.published >= PUBLISH_EVERY {
            self.publish(now);
            if self.page.as_ref().is_some_and(|shown| shown.page.is_due(now)) {
                self.show_now(now, Doing::Turns);
            }
        }
        Ok(work)
    }

    /// Those that are still there.
    fn devices(&self) -> impl Iterator<Item = &Port> {
        self.ports.iter().filter(|port| !port.is_gone)
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let beside = self.beside.as_ref().and_then(Beside::next_deadline);
        let devices = self.devices().filter_map(|p| p.rx.next_deadline()).min();
        let behind = self.core.peers.as_ref().is_some_and(|peers| peers.is_behind());
        let again = behind.then(|| self.core.now + LOOK_EVERY);
        [self.core.stack.next_deadline(), self.core.timers.next_deadline(), devices, beside, again]
            .into_iter()
            .flatten()
            .min()
    }

    /// When polling for the next exact timer begins.
    fn wake_for_exact(&self) -> Option<Instant> {
        if self.seat.pace.is_some() {
            // It would take the other's time.
            return None;
        }
        let at = self.core.timers.next_exact()?;
        Some(Instant::ZERO + (at - Instant::ZERO).saturating_sub(WAKE_EARLY))
    }

    /// Sleeps in the kernel until there is something to do. Returns at once if there is already.
    fn sleep(&mut self, stop: &StopFlag, leave_by: Option<Instant>) -> Result<(), Error> {
        let mut armed = self.mailbox.before_sleep()
            && !self.leave.as_ref().is_some_and(Leave::is_over)
            && self.core.stack.before_sleep()
            && self.handler.before_sleep();
        let turn = if armed { self.handler.give_way() } else { None };
        let mut devices = self.ports.iter_mut().filter(|port| !port.is_gone);
        armed = armed
            && (turn.is_some() || devices.all(|p| p.rx.arm()))
            && !self.inboxes.iter_mut().any(Inbox::is_waiting)
            && !(self.started.is_some() && self.core.peers.as_ref().is_some_and(|peers| peers.is_stale()));
        let now = clock::now();
        let mut until = [self.next_deadline(), self.wake_for_exact(), leave_by].into_iter().flatten().min();
        if turn.is_none() && self.devices().any(|p| p.rx.wake_fd().is_none()) {
            until = Some(until.unwrap_or(Instant::MAX).min(now + LOOK_EVERY));
        }
        if let Some(turn) = turn {
            until = Some(now + turn);
        }
        let mut readable = wait::Readable::default();
        // Set after the last look at the flag in `run`, it is seen by the sleep itself: its descriptor stays readable.
        if armed && until.is_none_or(|at| at > now) {
            self.publish(now);
            until = self.show_before_sleep(now, until);
            let devices = self.devices().filter(|_| turn.is_none()).filter_map(|p| p.rx.wake_fd());
            let others = [self.handler.wake_fd(), self.core.stack.wake_fd()].into_iter().flatten();
            let devices: ArrayVec<RawFd, { wait::DEVICES_MAX }> =
                others.chain(devices).take(wait::DEVICES_MAX).collect();
            let own = [self.mailbox.wake().as_fd(), stop_fd(stop, leave_by, &self.mailbox)];
            let time = until.map(|at| at - now);
            let slept = match turn {
                None => self.watch.sleep(own, &devices, time),
                // Without the devices for this once.
                Some(_) => wait::sleep(own, &devices, time),
            };
            readable = slept.map_err(|e| Error::io("sleep", e))?;
            let woke = clock::now();
            if turn.is_some() && until.is_some_and(|at| woke >= at) {
                self.handler.turn_ran_out();
            }
            self.core.stats.sleeps += 1;
            self.core.stats.slept_ns += (woke - now).as_nanos() as u64;
        }
        // In the order in which they were given.
        self.mailbox.after_sleep(readable.has(0));
        let of_handler = usize::from(self.handler.wake_fd().is_some());
        self.handler.after_sleep(of_handler > 0 && readable.has(2));
        self.core.stack.after_sleep(readable.has(2 + of_handler));
        Ok(())
    }

    fn publish(&mut self, now: Instant) {
        self.published = now;
        let Core { stats, timers, .. } = &mut *self.core;
        stats.timers_refused = timers.refused;
        self.stats.publish(stats);
    }
}

/// Puts what is urgent in a burst first, and returns how many bytes it has.
fn take_in(burst: &mut RxBurst<'_>) -> u64 {
    let (mut bytes, mut labels) = (0, 0);
    for frame in burst.iter() {
        bytes += frame.bytes.len() as u64;
        labels |= frame.label.bits();
    }
    if Label::from_bits(labels).is_prioritized() {
        priority::sort(burst);
    }
    bytes
}

/// Sets a stop flag when it goes.
struct StopAtEnd<'a>(&'a StopFlag);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Whether duplicate address detection (RFC 4862 §5.4) has come to an end for all configured addresses: until then IPv6 addresses cannot be
/// listened on or connected from, so the handler is not started yet. That is a second with the default configuration, and no time for IPv4.
fn addresses_are_ready(core: &Core, links: &[LinkId]) -> bool {
    let stack = match &core.stack {
        Engine::Here(stack) => stack,
        Engine::Channel(remote) => return remote.is_ready(),
    };
    let addresses = links.iter().flat_map(|link| stack.network().addresses(*link));
    let mut configured = addresses.filter(|a| !a.autoconfigured && !is_link_local(a.address));
    !configured.any(|a| matches!(a.state, AddressState::Tentative { .. }))
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// The stop flag's descriptor; once the handler is taking its leave it would end every sleep at once, and the mailbox takes its place.
fn stop_fd<'a>(
    stop: &'a StopFlag,
    leave_by: Option<Instant>,
    mailbox: &'a Mailbox,
) -> rustix::fd::BorrowedFd<'a> {
    if leave_by.is_some() { mailbox.wake().as_fd() } else { stop.wake().as_fd() }
}
