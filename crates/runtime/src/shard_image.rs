//! Saves a shard between two turns, and lets a shard that was just built continue.
//!
//! The runtime's own state is saved, is settled before, or is made anew:
//!
//! * Saved are the counters and the time since which the shard runs, connections whose bytes are to be
//!   delivered again or whose FIN is to be delivered, and what the shard knows of the others: the registry of
//!   listeners and UDP ports, and the shard's part of it.
//! * Frames that other shards have sent, and those in the queues of `[priority]`, are processed before
//!   ([`Shard::settle`]); so are commands.
//! * Timers are set again by the application ([`Handler::restored`]).
//! * Made anew are devices, links, routes, classifiers, random numbers, the page of counters and all that
//!   follows from the configuration.

use crate::context::{Context, ShardCore};
use crate::cross_shard_rx;
use crate::engine::Engine;
use crate::handler::Handler;
use crate::inspect::DestroyReply;
use crate::kernel_fds::KernelFds;
use crate::saved_shard::state_config::{OTHER_DISTRIBUTION, OTHER_INTERFACES};
use crate::saved_shard::{DescriptorTable, SavedShard, SectionReader, SectionWriter, decode, encode_to};
use crate::saved_shard::{STATE_FORMAT, descriptor_table};
use crate::shard::{Shard, execute_commands};
use crate::shard_router::SavedRouter;
use crate::stats::ShardStats;
use ginnel_stack::handle::Conn;
use ginnel_stack::socket_filter::SocketFilter;
use ginnel_stack::stack::{Stack, Usage};
use ginnel_stack::time::Instant;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Rounds in which shards process what they have sent to each other, before they are saved.
const ROUNDS_MAX: usize = 10_000;

/// The runtime's own state.
#[derive(Serialize, Deserialize)]
struct SavedRuntime {
    version: u32,
    distribution: String,
    interfaces: String,
    now: Instant,
    started: Instant,
    stats: ShardStats,
    resume_reading: Vec<Conn>,
    pending_fins: Vec<Conn>,
    router: Option<SavedRouter>,
}

impl<H: Handler> Shard<H> {
    /// Returns the state of the shard: its connections, listeners and UDP sockets, what is queued for them,
    /// its application, and the neighbours and path MTUs that it has learnt. Not saved are the configuration
    /// and what follows from it, and frames that devices hold. The shard must not have another turn if its
    /// state is used.
    ///
    /// With several shards, [`settle`](Self::settle) must have been called before.
    ///
    /// # Errors
    /// Says in a sentence why the shard cannot be saved. It goes on then as if nothing had been.
    pub fn save(&mut self) -> Result<SavedShard, String> {
        if self.core.router.is_none() {
            self.settle_alone()?;
        }
        let Some(started) = self.started.filter(|_| !self.core.is_stopping) else {
            return Err("it is starting or stopping".into());
        };
        let has_frames = self.cross_shard_inbox.as_ref().is_some_and(|inbox| inbox.has_pending())
            || self.priorities.as_ref().is_some_and(|priorities| priorities.has_work(&self.core));
        if has_frames {
            return Err("frames wait in its queues".into());
        }
        self.collect_counters();
        let Self { core, handler, dispatch, co_shard, distribution, interfaces, .. } = self;
        if core.stack.local().is_none() || co_shard.is_some() {
            return Err("its application has a thread of its own (shard.placement, shard.workers)".into());
        }
        if core.kernel_fds.as_deref().is_some_and(|fds: &KernelFds| !fds.is_empty()) {
            return Err("its application waits for descriptors of the kernel".into());
        }
        let mut descriptors = DescriptorTable::default();
        let application = handler.save(&mut Context::new(core), &mut descriptors)?;
        // Each field is listed, so that none is forgotten.
        let ShardCore {
            now,
            stack: Engine::Local(stack),
            timers: _,
            rng: _,
            commander: _,
            stats,
            resume_reading,
            closing: _,
            delivering: _,
            is_stopping: _,
            save_request: _,
            router,
            kernel_fds: _,
            priority_counters: _,
            shard_and_worker: _,
            device_check: _,
            lower_share_percent: _,
            class_limits: _,
        } = &mut **core
        else {
            return Err("its engine is in another thread".into());
        };
        let runtime = SavedRuntime {
            version: STATE_FORMAT.version,
            distribution: distribution.to_string(),
            interfaces: interfaces.to_string(),
            now: *now,
            started,
            stats: *stats,
            resume_reading: resume_reading.clone(),
            pending_fins: dispatch.pending_fins().collect(),
            router: router.as_ref().map(|router| router.save()),
        };
        let mut sections = SectionWriter::default();
        sections.add(|out| encode_to(out, &runtime))?;
        sections.add(|mut out| {
            out.extend_from_slice(&application);
            Ok(out)
        })?;
        drop(application);
        sections.add(|out| save_engine(stack, out))?;
        let Usage { connections, half_open, .. } = stack.usage();
        // Cannot truncate: connections are numbered by 32 bits.
        let connections = connections.saturating_sub(half_open) as u32;
        Ok(SavedShard { connections, ..sections.finish(descriptors) })
    }

    /// Continues with the state of another shard with the same index. Only for a shard that has just been
    /// built and had no turn, from a configuration with the same number of shards.
    ///
    /// # Errors
    /// Says in a sentence why the shard cannot continue. It must be dropped then.
    pub fn restore(&mut self, saved: SavedShard) -> Result<(), String> {
        let SavedShard { bytes, descriptors, .. } = saved;
        let mut descriptors = descriptor_table(descriptors);
        let mut sections = SectionReader::new(&bytes)?;
        let runtime: SavedRuntime = decode(sections.next()?)?;
        if runtime.version != STATE_FORMAT.version {
            let (version, own) = (runtime.version, STATE_FORMAT.version);
            return Err(format!("saved state: version {version}, and this program has {own}"));
        }
        if *runtime.distribution != *self.distribution {
            return Err(OTHER_DISTRIBUTION.into());
        }
        if *runtime.interfaces != *self.interfaces {
            return Err(OTHER_INTERFACES.into());
        }
        if self.started.is_some() || self.core.stack.local().is_none() {
            return Err("the shard has started, or its application has a thread of its own".into());
        }
        self.handler.restore(sections.next()?, &mut descriptors)?;
        self.restore_runtime(runtime, sections.next()?)
    }

    /// Restores everything but the application, which has been restored.
    fn restore_runtime(&mut self, runtime: SavedRuntime, engine: &[u8]) -> Result<(), String> {
        let Self { core, handler, dispatch, started, counts_before, .. } = self;
        core.now = core.now.max(runtime.now);
        let ShardCore { stack: Engine::Local(stack), now, stats, resume_reading, router, .. } = &mut **core
        else {
            return Err("its engine is in another thread".into());
        };
        stack.set_now(*now);
        restore_engine(stack, engine, &mut |saved: &[u8]| handler.restore_filter(saved))?;
        *stats = runtime.stats;
        *counts_before = runtime.stats;
        *resume_reading = runtime.resume_reading;
        dispatch.restore_pending_fins(runtime.pending_fins);
        if let (Some(router), Some(saved)) = (router, runtime.router) {
            router.restore(saved, stack, stats)?;
        }
        *started = Some(runtime.started);
        handler.restored(&mut Context::new(core))
    }

    /// Processes what other shards have sent to this one, and what waits in its queues, but looks at no
    /// device and no doorbell. Returns how much there was. All shards of a stack call this, after their last
    /// turn, until none of them had anything twice in a row.
    pub fn settle(&mut self, now: Instant) -> usize {
        let Self { core, handler, dispatch, ports, mailbox, cross_shard_inbox, priorities, .. } = self;
        core.now = now;
        if let Some(stack) = core.stack.local_mut() {
            stack.set_now(now);
        }
        let (mut work, replies) = execute_commands(mailbox, usize::MAX, ports, core, handler);
        if core.router.as_ref().is_some_and(|router| router.is_stale()) {
            core.with_router(|router, stack, stats| router.sync_registry(stack, stats));
            work += 1;
        }
        if let Some(priorities) = priorities {
            work += priorities.turn(&mut [], cross_shard_inbox.as_deref_mut(), core, handler, dispatch);
        } else if let Some(inbox) = cross_shard_inbox {
            work += inbox.visit(|queue| cross_shard_rx::receive(core, handler, dispatch, queue));
        }
        work += dispatch.deliver_caused(core, handler, work);
        core.stack.transmit(now);
        work += dispatch.deliver_caused(core, handler, work);
        replies.into_iter().for_each(DestroyReply::send);
        core.with_router(|router, stack, stats| router.exchange(stack, stats));
        work + usize::from(core.router.as_ref().is_some_and(|router| router.has_pending_updates()))
    }

    /// Settles a shard that has no others.
    fn settle_alone(&mut self) -> Result<(), String> {
        let now = self.core.now;
        if (0..ROUNDS_MAX).any(|_| self.settle(now) == 0) { Ok(()) } else { Err(NOT_SETTLED.into()) }
    }

    /// Saves the shard with the others if that was requested. Returns false if it was not.
    #[cold]
    pub(crate) fn save_if_requested(&mut self) -> bool {
        let Some(request) = self.core.save_request.take() else { return false };
        self.core.is_stopping = false;
        let mut quiet = 0;
        for _ in 0..ROUNDS_MAX {
            // The first meeting waits for the last turn of all shards.
            let Some(work) = request.meet(self.settle(self.core.now)) else { return true };
            quiet = if work == 0 { quiet + 1 } else { 0 };
            if quiet == 2 {
                let state = self.save();
                request.deliver(state);
                return true;
            }
        }
        request.deliver(Err(NOT_SETTLED.into()));
        true
    }
}

const NOT_SETTLED: &str = "its queues do not become empty";

/// Restores a filter of a socket.
type RestoreFilter<'a> = &'a mut dyn FnMut(&[u8]) -> Option<Arc<dyn SocketFilter>>;

/// Appends the state of the engine.
fn save_engine(stack: &Stack, out: Vec<u8>) -> Result<Vec<u8>, String> {
    if let Some(reason) = stack.cannot_be_saved() {
        return Err(reason.into());
    }
    let mut serializer = postcard::Serializer { output: postcard::ser_flavors::ExtendFlavor::new(out) };
    stack.save(&mut serializer).map_err(|error| format!("encode the engine: {error}"))?;
    postcard::ser_flavors::Flavor::finalize(serializer.output)
        .map_err(|error| format!("encode the engine: {error}"))
}

/// Restores the state of the engine.
fn restore_engine(stack: &mut Stack, state: &[u8], filters: RestoreFilter<'_>) -> Result<(), String> {
    struct Filters<'a>(RestoreFilter<'a>);
    impl ginnel_stack::stack::Restorer for Filters<'_> {
        fn filter(&mut self, saved: &[u8]) -> Option<Arc<dyn SocketFilter>> {
            (self.0)(saved)
        }
    }
    let image = decode(state)?;
    stack
        .restore_image(image, &mut Filters(filters))
        .map_err(|error| format!("saved state of the engine: {error}"))
}

/// Returns a hash of the layout of the runtime's own state.
#[cfg(all(test, not(loom)))]
pub(crate) fn layout_hash() -> u64 {
    ginnel_testkit::layout::layout_hash::<SavedRuntime>()
}
