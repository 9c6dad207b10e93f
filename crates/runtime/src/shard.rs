//! A shard: one thread, its devices, one engine and one handler, and the loop that drives them.

use crate::clock;
use crate::coalescing::Coalescing;
use crate::command::{Commander, Mailbox};
use crate::config::ShardConfig;
use crate::context::{Context, CoreSlot, ShardCore, WorkContext};
use crate::cpu_share::{CpuShare, ThreadScheduler};
use crate::cross_shard::CrossShardInbox;
use crate::cross_shard_rx;
use crate::dispatch::EventDispatcher;
use crate::engine::Engine;
use crate::error::Error;
use crate::handler::Handler;
use crate::inspect;
use crate::placement::{Affinity, CoShard};
use crate::prioritized_rx::Priorities;
use crate::publish::Publisher;
use crate::shutdown::{BarrierMember, DrainedHandler};
use crate::stats::{ShardActivity, ShardStats, StatsReader, StatsWriter};
use crate::stop::StopFlag;
use crate::wait::WaitSet;
use crate::yield_policy::YieldPolicy;
use crate::{kernel_fds, pin, wait};
use arrayvec::ArrayVec;
use core::any::Any;
use core::net::IpAddr;
use core::time::Duration;
use ginnel_stack::device::{Label, RxBurst, RxQueue};
use ginnel_stack::handle::{LinkId, PortId};
use ginnel_stack::link::AddressState;
use ginnel_stack::priority;
use ginnel_stack::stack::Stack;
use ginnel_stack::time::Instant;
use std::os::fd::RawFd;

/// Commands handled per turn, so that a flood of commands does not delay frames.
const COMMANDS_PER_TURN_MAX: usize = 64;

/// Timers of the application handled per turn.
const TIMERS_PER_TURN_MAX: usize = 1024;

/// Interval at which a busy shard publishes its counters to other threads.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(10);

/// Interval at which a shard polls a device that cannot wake it.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Usual upper bound of the kernel's wake-up latency. A shard with an exact timer wakes this much earlier and
/// polls until the deadline.
const WAKEUP_LATENCY: Duration = Duration::from_micros(150);

/// A receive queue of a device, and its port id in the engine.
pub(crate) struct RxPort {
    pub(crate) id: PortId,
    /// Name of the device in the configuration.
    pub(crate) name: String,
    /// True if the device is gone and is not polled any more.
    pub(crate) is_gone: bool,
    /// True for what the stack sends to itself.
    pub(crate) is_loopback: bool,
    /// True if copies of the frames go to a monitor.
    pub(crate) is_mirrored: bool,
    pub(crate) rx: Box<dyn RxQueue + Send>,
    /// Frames and bytes received.
    pub(crate) rx_frames: u64,
    pub(crate) rx_bytes: u64,
}

impl RxPort {
    /// Replaces the queue by what `replace` makes of it.
    pub(crate) fn replace_rx(
        &mut self,
        replace: impl FnOnce(Box<dyn RxQueue + Send>) -> Box<dyn RxQueue + Send>,
    ) {
        let rx = core::mem::replace(&mut self.rx, Box::new(NoRx));
        self.rx = replace(rx);
    }
}

/// Returns the queue below a layer.
pub(crate) fn without_layer(rx: Box<dyn RxQueue + Send>) -> Box<dyn RxQueue + Send> {
    rx.remove_layer().unwrap_or(Box::new(NoRx))
}

/// Describes what a shard that has lost a device goes on with: names of devices, and whether each is the
/// loopback.
fn describe_devices_left(left: &[(&str, bool)]) -> String {
    let names: Vec<&str> =
        left.iter().filter(|(_, is_loopback)| !is_loopback).map(|(name, _)| *name).collect();
    match (names.is_empty(), left.is_empty()) {
        (false, _) => format!("the shard goes on with {}", names.join(", ")),
        (true, false) => "no device but the loopback is left: no other host reaches the shard".into(),
        (true, true) => "no device is left".into(),
    }
}

/// A device that is gone.
struct NoRx;

impl RxQueue for NoRx {
    fn rx_burst<'a>(&'a mut self, _: Instant, _: &mut RxBurst<'a>) {}

    fn is_gone(&self) -> bool {
        true
    }
}

/// A shard with its application.
pub struct Shard<H> {
    pub(crate) core: CoreSlot,
    pub(crate) handler: H,
    pub(crate) dispatch: EventDispatcher,
    pub(crate) ports: Vec<RxPort>,
    pub(crate) links: Vec<LinkId>,
    /// Queues that other shards write to, if there are other shards.
    pub(crate) cross_shard_inbox: Option<Box<CrossShardInbox>>,
    pub(crate) mailbox: Mailbox,
    pub(crate) commander: Commander,
    pub(crate) config: ShardConfig,
    pub(crate) stats: StatsWriter,
    pub(crate) started: Option<Instant>,
    pub(crate) last_published: Instant,
    /// Start of the last turn, if that turn found nothing to do.
    pub(crate) idle_since: Option<Instant>,
    /// Counters of the former shard whose state this one continues, for those that their owners count anew.
    pub(crate) counts_before: ShardStats,
    /// The shard that has the devices, if the application has a shard of its own.
    pub(crate) co_shard: Option<CoShard>,
    /// Present if this is one of several shards on threads, which end together.
    pub(crate) barrier: Option<BarrierMember>,
    /// Publishes the counters to other processes.
    pub(crate) publisher: Option<Publisher>,
    /// CPU, scheduling and polling time of the thread.
    pub(crate) affinity: Affinity,
    /// True once a thread runs the shard part by part ([`run_until`](Self::run_until)), on its CPU.
    pub(crate) is_pinned: bool,
    /// The descriptors that the shard sleeps on.
    pub(crate) watch: WaitSet,
    /// Decides when the shard yields its CPU instead of sleeping.
    pub(crate) yields: YieldPolicy,
    /// Present if `[priority]` is in use.
    pub(crate) priorities: Option<Box<Priorities>>,
    /// How frames are distributed among several shards. Another shard continues with the state of this one
    /// only if its distribution is equal.
    pub(crate) distribution: Box<str>,
    /// Devices and links in their order. Another shard continues with the state of this one only if its
    /// devices and links are equal.
    pub(crate) interfaces: Box<str>,
}

/// Result of one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Frames, events, commands and timers handled. If 0, nothing is to be done before `next_deadline` or the
    /// next frame.
    pub work: usize,
    /// The earliest deadline of a timer of the engine, the application or a device. Kernel descriptors that
    /// the application has registered may become ready at any time.
    pub next_deadline: Option<Instant>,
    /// True if the handler asked the shard to stop.
    pub stopped: bool,
}

impl<H: Handler> Shard<H> {
    /// Runs on the calling thread until the handler stops the shard, or until `stop` is set and the handler
    /// has finished or its grace period (`shard.stop_grace_ms`) is over.
    ///
    /// A shard that finds nothing to do polls for `shard.spin_us`, then sleeps in the kernel until a frame, a
    /// timer, a command or the stop flag. A device that goes away is counted and not polled any more.
    ///
    /// # Errors
    /// The error that the handler returns; a failed system call; [`Error::DevicesLost`] if the last device
    /// went away.
    pub fn run(&mut self, stop: &StopFlag) -> Result<(), Error> {
        let (Some(co_shard), Engine::Channel(remote)) = (&mut self.co_shard, &mut self.core.stack) else {
            return self.run_on_this_thread(stop);
        };
        let Some(runner) = co_shard.runner() else { return self.run_on_this_thread(stop) };
        let stack_stop = StopFlag::new().map_err(|e| Error::io("stop flag of the shard", e))?;
        co_shard.set_running(true);
        let joins_barrier = co_shard.has_shutdown_barrier();
        let (direct, wake) = (runner.same_thread(), remote.wake());
        remote.set_control(Box::new(runner.commander()));
        let result = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("stack".into());
            let thread = thread.spawn_scoped(scope, || runner.run(&stack_stop, &wake));
            let thread = thread.map_err(|e| Error::io("thread of the shard", e))?;
            // Stops the stack's thread even if the application panics.
            let _end = StopOnDrop(&stack_stop);
            let own_result = self.run_on_this_thread(stop);
            if joins_barrier {
                // The stack's shard waits at the barrier for the applications of the other shards, so they
                // have to be asked to stop, too.
                stop.stop();
            }
            stack_stop.stop();
            let panicked = |_| Err(Error::application("the shard's thread panicked"));
            // If the stack failed, the application ended because of that.
            thread.join().unwrap_or_else(panicked).and(own_result)
        });
        if let (Some(co_shard), Engine::Channel(remote)) = (&mut self.co_shard, &mut self.core.stack) {
            co_shard.set_running(false);
            remote.set_control(Box::new(direct));
        }
        result
    }

    /// Makes this one of several shards that end together. The shard that has the devices gets the barrier.
    pub(crate) fn join_barrier(&mut self, barrier: Option<BarrierMember>) {
        match &mut self.co_shard {
            Some(co_shard) => co_shard.set_shutdown_barrier(barrier),
            None => self.barrier = barrier,
        }
    }

    /// Runs the part of the shard that belongs to this thread.
    fn run_on_this_thread(&mut self, stop: &StopFlag) -> Result<(), Error> {
        self.mailbox.set_running(true);
        let result = self.run_loop(stop);
        self.mailbox.set_running(false);
        result
    }

    fn run_loop(&mut self, stop: &StopFlag) -> Result<(), Error> {
        let Affinity { key, cpu, ref quantum, .. } = self.affinity;
        if let Some(cpu) = cpu {
            pin::pin(key, cpu)?;
        }
        let mut cpu_share =
            quantum.as_ref().map(|quantum| CpuShare::new(ThreadScheduler, quantum.length, quantum.realtime));
        let coalescing = Coalescing::new(self.config.coalesce_us);
        let mut last_work = clock::now();
        let mut stop_deadline: Option<Instant> = None;
        loop {
            let now = clock::now();
            let work = self.turn(now)?;
            if self.core.is_stopping || stop_deadline.is_some_and(|deadline| now >= deadline) {
                if self.save_if_requested() {
                    continue;
                }
                break;
            }
            if stop.is_set() && stop_deadline.is_none() {
                if self.started.is_none() {
                    // A handler that was not started is not asked to stop.
                    break;
                }
                stop_deadline = Some(now + Duration::from_millis(self.config.stop_grace_ms.into()));
                self.handler.stopping(&mut Context::new(&mut self.core));
                continue;
            }
            if self.co_shard.as_ref().is_some_and(CoShard::has_ended) {
                break;
            }
            if work > 0 {
                last_work = now;
                self.yields.record_work();
                if let Some(cpu_share) = &mut cpu_share {
                    cpu_share.record_work(clock::now());
                }
                if let Some(next_turn) = coalescing.next_turn(now, work)
                    && !self.has_unfinished()
                {
                    self.sleep_until(next_turn, &mut cpu_share);
                }
            } else if self.should_poll(now, last_work) {
                core::hint::spin_loop();
            } else if self.affinity.quantum.is_none()
                && self.yields.may_yield()
                && let Some(yield_time) = self.handler.yield_limit()
            {
                std::thread::yield_now();
                self.yields.record_yield(clock::now() - now, yield_time);
            } else {
                self.sleep(stop_deadline.is_none().then_some(stop), stop_deadline)?;
                if let Some(cpu_share) = &mut cpu_share {
                    cpu_share.record_sleep();
                }
            }
        }
        self.relay_until_shutdown(stop)?;
        self.publish_end();
        Ok(())
    }

    /// Publishes the last counters.
    fn publish_end(&mut self) {
        let now = clock::now();
        self.publish(now);
        self.publish_page(now, ShardActivity::Ended);
    }

    /// Returns whether a turn without work is followed by the next one at once: within `shard.spin_us` of the
    /// last work, unless others want this CPU, or because an exact timer is nearly due.
    fn should_poll(&self, now: Instant, last_work: Instant) -> bool {
        now - last_work < self.affinity.spin && !self.handler.is_cpu_contended()
            || self.exact_poll_start().is_some_and(|deadline| deadline <= now)
    }

    /// Relays frames for the other shards until their applications have ended, too.
    fn relay_until_shutdown(&mut self, stop: &StopFlag) -> Result<(), Error> {
        let Some(barrier) = &mut self.barrier else { return Ok(()) };
        stop.stop();
        barrier.arrive();
        while !self.is_shutdown_complete() && self.devices().next().is_some() {
            let now = clock::now();
            if self.relay_turn(now) == 0 {
                // The stop flag is set, so it must not end the sleep.
                self.sleep(None, Some(now + Duration::from_secs(1)))?;
            }
        }
        Ok(())
    }

    /// Returns whether the applications of all shards have ended.
    fn is_shutdown_complete(&self) -> bool {
        self.barrier.as_ref().is_some_and(BarrierMember::is_complete)
    }

    /// Performs a turn without the application. Returns the number of frames and events.
    fn relay_turn(&mut self, now: Instant) -> usize {
        let Self { core, dispatch, ports, cross_shard_inbox, priorities, .. } = self;
        core.now = now;
        let mut work = 0;
        for port in ports.iter_mut() {
            port.is_gone |= port.rx.is_gone();
        }
        if let Some(priorities) = priorities {
            work +=
                priorities.turn(ports, cross_shard_inbox.as_deref_mut(), core, &mut DrainedHandler, dispatch);
        } else {
            for port in ports.iter_mut().filter(|port| !port.is_gone) {
                work += receive_burst(port, core, &mut DrainedHandler, dispatch, now);
            }
            if let Some(inbox) = cross_shard_inbox {
                work +=
                    inbox.visit(|queue| cross_shard_rx::receive(core, &mut DrainedHandler, dispatch, queue));
            }
        }
        core.stack.advance(now);
        work += dispatch.deliver_events(core, &mut DrainedHandler, None);
        core.stack.transmit(now);
        work += dispatch.deliver_events(core, &mut DrainedHandler, None);
        core.with_router(|router, stack, stats| router.exchange(stack, stats));
        work
    }

    /// Performs turns on the calling thread and sleeps between them, as [`run`](Self::run) does, until
    /// `is_done` returns true after a turn, the time `until` has come, `stop` is set, or the handler has
    /// stopped the shard. Performs one turn at least. For programs whose own loop waits for the shard; the
    /// handler is not told of `stop`.
    ///
    /// An application with a thread of its own (`shard.placement`) is not possible here: its stack's shard
    /// runs within this thread's turns.
    ///
    /// # Errors
    /// As of [`run`](Self::run).
    pub fn run_until(
        &mut self,
        stop: Option<&StopFlag>,
        until: Option<Instant>,
        mut is_done: impl FnMut(&mut H) -> bool,
    ) -> Result<(), Error> {
        let Affinity { key, cpu, .. } = self.affinity;
        if !self.is_pinned {
            self.mailbox.set_running(true);
            if let Some(cpu) = cpu {
                pin::pin(key, cpu)?;
            }
            self.is_pinned = true;
        }
        let mut last_work = clock::now();
        loop {
            let now = clock::now();
            let work = self.turn(now)?;
            let is_over = until.is_some_and(|until| now >= until) || stop.is_some_and(StopFlag::is_set);
            if is_done(&mut self.handler) || is_over || self.core.is_stopping && !self.save_if_requested() {
                return Ok(());
            }
            if work > 0 {
                last_work = now;
            } else if self.should_poll(now, last_work) {
                core::hint::spin_loop();
            } else {
                self.sleep(stop, until)?;
            }
        }
    }

    /// Ends the loop of [`run_until`](Self::run_until): sends what is queued, and publishes the last
    /// counters.
    ///
    /// # Errors
    /// As of [`run`](Self::run).
    pub fn end(mut self) -> Result<H, Error> {
        let result = self.turn(clock::now());
        self.mailbox.set_running(false);
        self.publish_end();
        result.map(|_| self.handler)
    }

    /// Performs one turn at the time `now`, which must not decrease. For simulations, and for programs that
    /// have a loop of their own.
    pub fn poll_once(&mut self, now: Instant) -> Result<Turn, Error> {
        let work = self.turn(now)?;
        Ok(Turn { work, next_deadline: self.next_deadline(), stopped: self.core.is_stopping })
    }

    /// Performs a turn of this shard, and then one of each shard through which it reaches the engine, so that
    /// what this turn has queued is sent.
    pub(crate) fn turn_all(&mut self, now: Instant) -> Result<usize, Error> {
        let work = self.turn(now)?;
        match &mut self.co_shard {
            Some(co_shard) => Ok(work + co_shard.run_turns(now)?),
            None => Ok(work),
        }
    }

    /// Returns the application.
    pub fn handler(&self) -> &H {
        &self.handler
    }

    /// Returns the application for changes between turns.
    pub fn handler_mut(&mut self) -> &mut H {
        &mut self.handler
    }

    /// Calls `act` with the application between turns, for simulations.
    pub fn with<R>(&mut self, now: Instant, act: impl FnOnce(&mut H, &mut Context<'_>) -> R) -> R {
        self.core.now = now;
        act(&mut self.handler, &mut Context::new(&mut self.core))
    }

    /// Returns the time of the last turn.
    pub fn now(&self) -> Instant {
        self.core.now
    }

    /// Returns a sender of commands for other threads.
    pub fn commander(&self) -> Commander {
        self.commander.clone()
    }

    /// Returns a reader of the shard's counters for other threads.
    pub fn stats_reader(&self) -> StatsReader {
        self.stats.reader()
    }

    /// Returns the shard's counters.
    pub fn stats(&self) -> &ShardStats {
        &self.core.stats
    }

    /// Returns the counters of the shard that has the devices: this shard, or the stack's shard if the
    /// application has a shard of its own (`shard.placement`); the latter are a few milliseconds old while
    /// that shard runs. All workers of a shard (`shard.workers`) return the same counters.
    pub fn stack_stats(&self) -> ShardStats {
        self.co_shard.as_ref().map_or(self.core.stats, CoShard::stats)
    }

    /// Returns a reader of [`Shard::stack_stats`] for other threads.
    pub(crate) fn stack_stats_reader(&self) -> StatsReader {
        self.co_shard.as_ref().map_or_else(|| self.stats.reader(), CoShard::stats_reader)
    }

    /// Checks the invariants of the engine, if it can be reached from here.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn check_invariants(&self) {
        match (self.core.stack.local(), &self.co_shard) {
            (Some(stack), _) => stack.check_invariants(),
            (None, Some(co_shard)) => co_shard.check_invariants(),
            (None, None) => {}
        }
    }

    /// Performs a turn: receive, deliver events, advance timers, transmit. In this order, the response of a
    /// handler leaves together with the acknowledgement of the request. Each part is bounded.
    fn turn(&mut self, now: Instant) -> Result<usize, Error> {
        let Self { core, handler, dispatch, ports, mailbox, co_shard, cross_shard_inbox, priorities, .. } =
            self;
        core.now = now;
        if let Some(stack) = core.stack.local_mut() {
            stack.set_now(now);
        }
        if let Some(idle_start) = self.idle_since.take() {
            core.stats.idle_ns += (now - idle_start).as_nanos() as u64;
        }
        let mut work = match co_shard {
            Some(co_shard) => co_shard.run_turn(now)?,
            None => 0,
        };
        if self.started.is_none() && addresses_are_ready(core, &self.links) {
            self.started = Some(now);
            handler.start(&mut Context::new(core))?;
            work += 1;
        }
        if self.started.is_some() && core.router.as_ref().is_some_and(|router| router.is_stale()) {
            core.with_router(|router, stack, stats| router.sync_registry(stack, stats));
            work += 1;
        }
        let mut has_lost_devices = false;
        for port in ports.iter_mut().filter(|port| !port.is_gone) {
            if port.rx.is_gone() {
                port.is_gone = true;
                has_lost_devices = true;
                core.stats.devices_lost += 1;
                core.with_router(|router, _, _| router.report_gone(port.id));
                tracing::error!("device {}: its interface is gone", port.name);
                continue;
            }
            if !priority::COMPILED || priorities.is_none() {
                work += receive_burst(port, core, handler, dispatch, now);
            }
        }
        if has_lost_devices {
            let left = ports.iter().filter(|port| !port.is_gone);
            let left: Vec<_> = left.map(|port| (port.name.as_str(), port.is_loopback)).collect();
            tracing::error!("{}", describe_devices_left(&left));
        }
        if priority::COMPILED
            && let Some(priorities) = priorities
        {
            work += priorities.turn(ports, cross_shard_inbox.as_deref_mut(), core, handler, dispatch);
        } else if priority::COMPILED && core.device_check.is_some() {
            work += dispatch.begin_remote_turn(core, handler);
        } else if let Some(inbox) = cross_shard_inbox {
            work += inbox.visit(|queue| cross_shard_rx::receive(core, handler, dispatch, queue));
        }
        let (executed, replies) = execute_commands(mailbox, COMMANDS_PER_TURN_MAX, ports, core, handler);
        work += executed;
        for _ in 0..TIMERS_PER_TURN_MAX {
            let Some(token) = core.timers.pop(now) else { break };
            work += 1;
            core.stats.timers += 1;
            handler.timer(&mut Context::new(core), token);
            if core.must_look_at_devices() {
                break;
            }
        }
        if core.kernel_fds.is_some() {
            work += kernel_fds::deliver(core, handler, now)?;
        }
        work += dispatch.deliver_resumed(core, handler);
        if self.started.is_some() {
            work += handler.work(&mut WorkContext { core })?;
        }
        core.stack.advance(now);
        work += dispatch.deliver_caused(core, handler, work);
        core.stack.transmit(now);
        // Events that transmitting causes (such as an unreachable neighbour) must not wait for the next
        // frame.
        work += dispatch.deliver_caused(core, handler, work);
        replies.into_iter().for_each(inspect::DestroyReply::send);
        core.with_router(|router, stack, stats| router.exchange(stack, stats));
        // If addresses became usable during this turn, the handler starts in the next turn, which must not
        // wait for a frame. This comes last: the channel's notification of that may have been consumed with
        // the events above, and is not repeated.
        work += usize::from(self.started.is_none() && addresses_are_ready(core, &self.links));

        if let Some(co_shard) = co_shard
            && core.is_stopping
        {
            // Sends what the application wrote last.
            work += co_shard.run_turns(now)?;
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
        if now - self.last_published >= PUBLISH_INTERVAL {
            self.publish(now);
            if self.publisher.as_ref().is_some_and(|publisher| publisher.stats_page.is_due(now)) {
                self.publish_page(now, ShardActivity::Running);
            }
        }
        Ok(work)
    }

    /// Returns the devices that have not gone away.
    fn devices(&self) -> impl Iterator<Item = &RxPort> {
        self.ports.iter().filter(|port| !port.is_gone)
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let co_shard = self.co_shard.as_ref().and_then(CoShard::next_deadline);
        let has_pending = self.core.router.as_ref().is_some_and(|router| router.has_pending_updates());
        let retry_at = has_pending.then(|| self.core.now + POLL_INTERVAL);
        let (stack, timers) = (self.core.stack.next_deadline(), self.core.timers.next_deadline());
        let others = Instant::earliest([stack, timers, co_shard, retry_at]);
        self.devices().fold(others, |at, port| Instant::earliest([at, port.rx.next_deadline()]))
    }

    /// Returns when polling for the next exact timer begins.
    fn exact_poll_start(&self) -> Option<Instant> {
        if self.affinity.quantum.is_some() {
            // Polling would take CPU time from the other thread on this CPU.
            return None;
        }
        let deadline = self.core.timers.next_exact()?;
        Some(Instant::ZERO + (deadline - Instant::ZERO).saturating_sub(WAKEUP_LATENCY))
    }

    /// Returns whether this turn has left work to the next one.
    fn has_unfinished(&self) -> bool {
        self.handler.has_unfinished()
            || priority::COMPILED
                && self.priorities.as_ref().is_some_and(|priorities| priorities.has_work(&self.core))
            || self.cross_shard_inbox.as_ref().is_some_and(|inbox| inbox.has_pending())
    }

    /// Sleeps until `next_turn`, whatever arrives, but not beyond the time of an exact timer.
    fn sleep_until(&mut self, next_turn: Instant, cpu_share: &mut Option<CpuShare<ThreadScheduler>>) {
        let until = self.exact_poll_start().map_or(next_turn, |start| start.min(next_turn));
        let before = clock::now();
        let slept = Coalescing::sleep(before, until);
        if slept.is_zero() {
            return;
        }
        self.idle_since = self.started.map(|_| before);
        self.core.stats.sleeps += 1;
        self.core.stats.slept_ns += slept.as_nanos() as u64;
        if let Some(cpu_share) = cpu_share {
            cpu_share.record_sleep();
        }
    }

    /// Sleeps in the kernel until there is something to do. Returns at once if there is something already.
    /// The stop flag ends the sleep if it is given, and so does the time `until`.
    fn sleep(&mut self, stop: Option<&StopFlag>, until: Option<Instant>) -> Result<(), Error> {
        let mut can_sleep = self.mailbox.before_sleep()
            && (!priority::COMPILED
                || self.priorities.as_ref().is_none_or(|priorities| !priorities.has_work(&self.core)))
            && !self.barrier.as_ref().is_some_and(BarrierMember::is_complete)
            && self.core.stack.before_sleep()
            && self.handler.before_sleep();
        let yield_time = if can_sleep { self.handler.yield_cpu() } else { None };
        let mut devices = self.ports.iter_mut().filter(|port| !port.is_gone);
        can_sleep = can_sleep
            && (yield_time.is_some() || devices.all(|p| p.rx.arm()))
            && self.cross_shard_inbox.as_ref().is_none_or(|inbox| !inbox.has_pending())
            && !(self.started.is_some() && self.core.router.as_ref().is_some_and(|router| router.is_stale()));
        let now = clock::now();
        let mut deadline = Instant::earliest([self.next_deadline(), self.exact_poll_start(), until]);
        if yield_time.is_none() && self.devices().any(|p| p.rx.wake_fd().is_none()) {
            deadline = Some(deadline.unwrap_or(Instant::MAX).min(now + POLL_INTERVAL));
        }
        if let Some(yield_time) = yield_time {
            deadline = Some(now + yield_time);
        }
        let mut readable = wait::ReadyFds::default();
        // A stop flag that is set after the check in `run_loop` ends the sleep, because its descriptor stays
        // readable.
        if can_sleep && deadline.is_none_or(|deadline| deadline > now) {
            self.publish(now);
            deadline = self.publish_before_sleep(now, deadline);
            let devices = self.devices().filter(|_| yield_time.is_none()).filter_map(|p| p.rx.wake_fd());
            let kernel_set = self.core.kernel_fds.as_ref().and_then(|fds| fds.wake_fd());
            let handler_fds = [self.handler.wake_fd(), self.core.stack.wake_fd(), kernel_set];
            let handler_fds = handler_fds.into_iter().flatten();
            let devices: ArrayVec<RawFd, { wait::DEVICE_FDS_MAX }> =
                handler_fds.chain(devices).take(wait::DEVICE_FDS_MAX).collect();
            let shard_fds = [self.mailbox.wake().as_fd(), stop_fd(stop, &self.mailbox)];
            let timeout = deadline.map(|deadline| deadline - now);
            let slept = match yield_time {
                None => self.watch.sleep(shard_fds, &devices, timeout),
                // The devices are not part of this sleep.
                Some(_) => wait::sleep(shard_fds, &devices, timeout),
            };
            readable = slept.map_err(|e| Error::io("sleep", e))?;
            let woken_at = clock::now();
            if yield_time.is_some() && deadline.is_some_and(|deadline| woken_at >= deadline) {
                self.handler.yield_expired();
            }
            self.core.stats.sleeps += 1;
            self.core.stats.slept_ns += (woken_at - now).as_nanos() as u64;
        }
        // In the order in which the descriptors were passed.
        self.mailbox.after_sleep(readable.contains(0));
        let handler_fds_count = usize::from(self.handler.wake_fd().is_some());
        self.handler.after_sleep(handler_fds_count > 0 && readable.contains(2));
        self.core.stack.after_sleep(readable.contains(2 + handler_fds_count));
        let kernel_set = 2 + handler_fds_count + usize::from(self.core.stack.wake_fd().is_some());
        if let Some(fds) = &mut self.core.kernel_fds
            && readable.contains(kernel_set)
        {
            fds.set_ready();
        }
        Ok(())
    }

    fn publish(&mut self, now: Instant) {
        self.last_published = now;
        self.collect_counters();
        self.stats.publish(&self.core.stats);
    }

    /// Copies the counters that others count to those of the shard.
    pub(crate) fn collect_counters(&mut self) {
        let ShardCore { stack, stats, timers, priority_counters, router, .. } = &mut *self.core;
        let before = &self.counts_before;
        stats.timers_refused = before.timers_refused + timers.refused;
        stats.relays_refused =
            before.relays_refused + router.as_ref().map_or(0, |router| router.relays_refused());
        if let Some(counters) = priority_counters {
            counters.report(stats);
            stats.priorities_invalid += before.priorities_invalid;
            stats.priority_flows_replaced += before.priority_flows_replaced;
        }
        let udp_shed = stack.local_mut().and_then(Stack::take_udp_shed);
        let relays_shed = router.as_ref().and_then(|router| router.take_relays_shed());
        for shed in udp_shed.into_iter().chain(relays_shed) {
            for (class, count) in (0..).zip(shed) {
                stats.count_shed(priority::of_class(class), count);
            }
        }
        if let Some(steering) = stack.local().and_then(|stack| stack.network().steering()) {
            let (chosen, invalid) = steering.policy_counts();
            stats.steering_chosen = before.steering_chosen + chosen;
            stats.steering_invalid = before.steering_invalid + invalid;
        }
    }
}

/// Executes the commands that wait in the mailbox now, `commands_max` at most. Returns how many, and replies
/// to send once the turn has transmitted.
///
/// Commands that arrive meanwhile wait for the next turn: a sender that waits for each reply sees a turn pass
/// with each command, and does not prolong this one.
pub(crate) fn execute_commands<H: Handler>(
    mailbox: &mut Mailbox,
    commands_max: usize,
    ports: &mut [RxPort],
    core: &mut ShardCore,
    handler: &mut H,
) -> (usize, Vec<inspect::DestroyReply>) {
    let (mut executed, mut replies) = (0, Vec::new());
    mailbox.receive(commands_max);
    while let Some(command) = mailbox.take() {
        executed += 1;
        core.stats.commands += 1;
        if let Some(command) = answer_inspection(command, ports, core, handler, &mut replies) {
            handler.command(&mut Context::new(core), command);
        }
    }
    (executed, replies)
}

/// Answers a request to inspect or change the stack. Returns any other command, which is the application's.
fn answer_inspection<H: Handler>(
    command: Box<dyn Any + Send>,
    ports: &mut [RxPort],
    core: &mut ShardCore,
    handler: &mut H,
    replies: &mut Vec<inspect::DestroyReply>,
) -> Option<Box<dyn Any + Send>> {
    let command = match command.downcast::<inspect::ListRequest>() {
        Ok(request) => {
            request.answer(core);
            return None;
        }
        Err(command) => command,
    };
    let command = match command.downcast::<inspect::DestroyRequest>() {
        Ok(request) => {
            let closed = |core: &mut ShardCore, listener| {
                handler.listener_destroyed(&mut Context::new(core), listener);
            };
            replies.push(request.execute(core, closed));
            return None;
        }
        Err(command) => command,
    };
    let command = match command.downcast::<inspect::MirrorRequest>() {
        Ok(request) => {
            request.answer(ports, core);
            return None;
        }
        Err(command) => command,
    };
    let command = match command.downcast::<inspect::StageRequest>() {
        Ok(request) => {
            request.answer(ports, core, handler);
            return None;
        }
        Err(command) => command,
    };
    match command.downcast::<inspect::RouteRequest>() {
        Ok(request) => {
            request.answer(core);
            None
        }
        Err(command) => Some(command),
    }
}

/// Receives a burst from a device, forwards the frames of other shards and delivers events. Returns the
/// number of received frames, including the forwarded ones.
#[inline]
fn receive_burst<H: Handler>(
    port: &mut RxPort,
    core: &mut ShardCore,
    handler: &mut H,
    dispatch: &mut EventDispatcher,
    now: Instant,
) -> usize {
    let mut burst = RxBurst::new();
    port.rx.rx_burst(now, &mut burst);
    let frames = burst.len();
    if frames == 0 {
        return 0;
    }
    core.stats.count_burst(frames);
    port.rx_frames += burst.len() as u64;
    port.rx_bytes += prepare_burst(&mut burst);
    core.receive(port.id, &mut burst);
    dispatch.deliver_events(core, handler, Some(&burst));
    if let Some(stack) = core.stack.local_mut() {
        stack.finish_burst(&burst);
    }
    frames
}

/// Moves frames with a priority to the front of the burst, and returns the number of bytes in it.
#[inline(always)]
fn prepare_burst(burst: &mut RxBurst<'_>) -> u64 {
    let (mut bytes, mut label_bits) = (0, 0);
    for frame in burst.iter() {
        bytes += frame.bytes.len() as u64;
        label_bits |= frame.label.bits();
    }
    if Label::from_bits(label_bits).is_prioritized() {
        priority::sort(burst);
    }
    bytes
}

/// Sets a stop flag when it is dropped.
struct StopOnDrop<'a>(&'a StopFlag);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Returns whether duplicate address detection (RFC 4862 §5.4) has finished for all configured addresses.
/// Before that, IPv6 addresses cannot be listened on or connected from, so the handler is not started.
/// Detection takes a second with the default configuration; IPv4 addresses are usable at once.
fn addresses_are_ready(core: &ShardCore, links: &[LinkId]) -> bool {
    let stack = match &core.stack {
        Engine::Local(stack) => stack,
        Engine::Channel(remote) => return remote.is_ready(),
    };
    let addresses = links.iter().flat_map(|link| stack.network().addresses(*link));
    let mut configured = addresses.filter(|a| !a.autoconfigured && !is_link_local(a.address));
    !configured.any(|a| matches!(a.state, AddressState::Tentative { .. }))
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Returns the descriptor of the stop flag. A flag that is set would end every sleep at once, so it is not
/// given while the handler is stopping, and the mailbox takes its place.
fn stop_fd<'a>(stop: Option<&'a StopFlag>, mailbox: &'a Mailbox) -> rustix::fd::BorrowedFd<'a> {
    stop.map_or(mailbox.wake(), StopFlag::wake).as_fd()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::describe_devices_left;

    #[test]
    fn only_remaining_devices_go_on() {
        let two = [("lan0", false), ("lan1", false), ("loopback", true)];
        assert_eq!(describe_devices_left(&two), "the shard goes on with lan0, lan1");
        assert!(describe_devices_left(&two[2..]).starts_with("no device but the loopback is left"));
        assert_eq!(describe_devices_left(&[]), "no device is left");
    }
}
