//! Receiving by priority: the part of a shard's turn that replaces "receive a burst, deliver its events" if
//! `[priority]` is in use.
//!
//! ```text
//!   devices ─► class of each frame ─┬─ little to do: processed where the frame is ──────────┐
//!                                   └─ more than one burst, or several classes:             ▼
//!                                      ReceiveQueues (queues.rs) ─► ClassScheduler ─► engine ─► events
//! ```
//!
//! Frames of one class are given to the engine together, and their events are delivered before another class
//! is chosen. A handler that takes long is followed by a look at the devices (`priority.check_interval_us`);
//! the events that are left wait in a list of their class. A class gets no further frames while it has events
//! to deliver, so that under overload its frames wait in its queue, where the limit is.

mod device_check;
mod flow;
mod queues;
#[cfg(all(test, not(loom)))]
mod tests;

pub(crate) use device_check::DeviceCheck;
pub(crate) use flow::is_control;

use crate::config::PriorityConfig;
use crate::context::ShardCore;
use crate::cross_shard::{CrossShardInbox, CrossShardReceiver};
use crate::cross_shard_rx;
use crate::dispatch::EventDispatcher;
use crate::handler::Handler;
use crate::shard::RxPort;
use ginnel_stack::device::{BURST_FRAMES_MAX, RxBurst, RxFrame};
use ginnel_stack::handle::PortId;
use ginnel_stack::priority::{self, BEST_EFFORT, CLASSES, ClassScheduler, ClassSet};
use ginnel_stack::stack::Stack;
use ginnel_stack::tcp::FlowKey;
use queues::{Queued, QueuedBurst, ReceiveQueues};

/// Bursts that are taken from a device at a time. A device rarely holds more.
const BURSTS_PER_LOOK_MAX: usize = 64;

/// Frames and events handled in a turn, so that timers and other threads wait only for a moment.
const UNITS_PER_TURN_MAX: usize = 256;

/// The receive queues of a shard, and the order in which they are served.
pub(crate) struct Priorities {
    queues: ReceiveQueues,
    scheduler: ClassScheduler,
    /// Classes whose windows are limited.
    limited: ClassSet,
}

impl Priorities {
    pub(crate) fn new(config: &PriorityConfig) -> Self {
        Self {
            queues: ReceiveQueues::new(config),
            scheduler: ClassScheduler::new(config.lower_share_percent),
            limited: 0,
        }
    }

    /// Looks at the devices and the queues of other shards, and processes what waits, by priority. Returns
    /// how much there was.
    pub(crate) fn turn<H: Handler>(
        &mut self,
        ports: &mut [RxPort],
        inbox: Option<&mut CrossShardInbox>,
        core: &mut ShardCore,
        handler: &mut H,
        dispatch: &mut EventDispatcher,
    ) -> usize {
        let now = core.now;
        if let Some(device_check) = &mut core.device_check {
            device_check.begin_turn(now);
        }
        let mut work = 0;
        let mut done = 0;
        for port in ports.iter_mut().filter(|port| !port.is_gone) {
            work += self.receive(port, core, handler, dispatch, &mut done);
        }
        if let Some(inbox) = inbox {
            work += inbox.visit(|queue| self.receive_forwarded(queue, core, handler, dispatch));
        }
        self.serve(core, handler, dispatch, &mut done);
        self.limit_windows(core);
        work + done
    }

    /// Limits the receive windows of classes whose frames wait, before the answers of this turn are sent.
    fn limit_windows(&mut self, core: &mut ShardCore) {
        let with_frames = self.queues.with_frames();
        let Some(stack) = core.stack.local_mut().filter(|_| with_frames | self.limited != 0) else { return };
        for class in (0..CLASSES as u8).filter(|class| (with_frames | self.limited) >> class & 1 != 0) {
            stack.set_window_limit(class, self.queues.window_limit(class));
        }
        self.limited = with_frames;
    }

    /// Takes the frames that a device has received. They are processed at once if nothing else waits and all
    /// are of one class; otherwise they wait for [`Priorities::serve`]. Returns their number, and adds to
    /// `done` what was processed.
    fn receive<H: Handler>(
        &mut self,
        port: &mut RxPort,
        core: &mut ShardCore,
        handler: &mut H,
        dispatch: &mut EventDispatcher,
        done: &mut usize,
    ) -> usize {
        let mut received = 0;
        for _ in 0..BURSTS_PER_LOOK_MAX {
            let mut burst = RxBurst::new();
            port.rx.rx_burst(core.now, &mut burst);
            let frames = burst.len();
            if frames == 0 {
                break;
            }
            received += frames;
            core.stats.count_burst(frames);
            port.rx_frames += frames as u64;
            port.rx_bytes += burst.iter().map(|frame| frame.bytes.len() as u64).sum::<u64>();
            core.route(port.id, &mut burst);
            count_priorities(core, &burst);
            let is_last = frames < BURST_FRAMES_MAX;
            match single_class(&burst) {
                Some(class) if is_last && self.with_work(core) == 0 => {
                    let lent = LentFrames { class, port: port.id, frames: &burst, is_overtaking: false };
                    *done += process(&lent, core, handler, dispatch, (0, usize::MAX));
                }
                _ => {
                    for frame in &burst {
                        self.enqueue(port.id, frame, core, handler, dispatch);
                    }
                }
            }
            if is_last {
                break;
            }
        }
        received
    }

    /// Takes what another shard has sent. Returns how much it was.
    fn receive_forwarded<H: Handler>(
        &mut self,
        receiver: &mut CrossShardReceiver,
        core: &mut ShardCore,
        handler: &mut H,
        dispatch: &mut EventDispatcher,
    ) -> usize {
        let mut received = cross_shard_rx::receive_broadcasts(core, handler, dispatch, receiver);
        received += cross_shard_rx::send_relayed(core, receiver);
        for _ in 0..BURSTS_PER_LOOK_MAX {
            let burst = receiver.frames.burst();
            let frames = burst.len();
            core.stats.forwards_received += frames as u64;
            for tagged in &burst {
                if let Some(port) = cross_shard_rx::accepted_port(core, tagged) {
                    core.stats.count_priority(tagged.frame.label.priority());
                    self.enqueue(port, &tagged.frame, core, handler, dispatch);
                }
            }
            drop(burst);
            receiver.frames.release();
            received += frames;
            if frames < BURST_FRAMES_MAX {
                break;
            }
        }
        received
    }

    /// Copies a frame to the queue of its class, or drops it there. Frames that must not be dropped are given
    /// to the engine at once if the queue is full, after the frames of their flow that wait; what they cause
    /// is delivered later.
    fn enqueue<H: Handler>(
        &mut self,
        port: PortId,
        frame: &RxFrame<'_>,
        core: &mut ShardCore,
        handler: &mut H,
        dispatch: &mut EventDispatcher,
    ) {
        let wants_overtaking = |bytes: &[u8]| {
            let flow = FlowKey::of_frame(bytes);
            flow.zip(core.stack.local()).is_some_and(|(flow, stack)| stack.is_unordered(&flow))
        };
        match self.queues.push(port, frame, wants_overtaking) {
            Queued::Waiting => core.stats.frames_queued += 1,
            Queued::Shed => core.stats.count_shed(frame.label.priority(), 1),
            Queued::Refused { flow } => {
                let mut process_one = |port, frame: RxFrame<'_>, is_overtaking| {
                    let class = priority::class(frame.label.priority());
                    let frames = RxBurst::from_iter([frame]);
                    let lent = LentFrames { class, port, frames: &frames, is_overtaking };
                    process(&lent, core, handler, dispatch, (0, 0));
                };
                self.queues.take_flow(flow, &mut process_one);
                process_one(port, *frame, false);
            }
        }
    }

    /// Returns whether frames or events wait.
    pub(crate) fn has_work(&self, core: &ShardCore) -> bool {
        self.with_work(core) != 0
    }

    /// Returns the classes with frames in the queues or with events.
    fn with_work(&self, core: &ShardCore) -> ClassSet {
        self.queues.with_frames() | classes_with_events(core)
    }

    /// Processes waiting frames and delivers waiting events, by priority, until it is time to look at the
    /// devices or enough was done for a turn. Adds to `done`, of which at least one is done in each turn.
    fn serve<H: Handler>(
        &mut self,
        core: &mut ShardCore,
        handler: &mut H,
        dispatch: &mut EventDispatcher,
        done: &mut usize,
    ) {
        while *done < UNITS_PER_TURN_MAX
            && !(*done > 0 && core.device_check.as_ref().is_some_and(DeviceCheck::is_half_over))
        {
            let with_work = self.with_work(core);
            let Some(class) = self.scheduler.pick(with_work) else { break };
            let max = self.scheduler.units(class, with_work);
            let (class, units) = if classes_with_events(core) & 1 << class != 0 {
                let none = RxBurst::new();
                let lent = LentFrames { class, port: PortId::default(), frames: &none, is_overtaking: false };
                (class, process(&lent, core, handler, dispatch, (1, max)))
            } else {
                let Some(burst) = self.queues.next_burst(class, max) else { break };
                let QueuedBurst { class, port, is_overtaking, ref frames, .. } = burst;
                let lent = LentFrames { class, port, frames, is_overtaking };
                let units = process(&lent, core, handler, dispatch, (1, max.max(frames.len())));
                let processed = burst.processed();
                drop(burst);
                self.queues.remove(processed);
                (class, units)
            };
            self.scheduler.charge(class, with_work, units);
            // Events may turn out to be obsolete; the loop must end nevertheless.
            *done += units.max(1);
        }
    }
}

/// Frames of one class and one device, which are processed together.
struct LentFrames<'a> {
    class: u8,
    port: PortId,
    frames: &'a RxBurst<'a>,
    /// True if earlier frames of their flows wait in the queues.
    is_overtaking: bool,
}

/// Gives frames to the engine and delivers events of their class, within `limits` and until it is time to
/// look at the devices. Returns the number of frames, or of events if they are more; of frames whose events
/// are left, only the events count, when they are delivered.
fn process<H: Handler>(
    lent: &LentFrames<'_>,
    core: &mut ShardCore,
    handler: &mut H,
    dispatch: &mut EventDispatcher,
    limits: (usize, usize),
) -> usize {
    if let Some(stack) = core.stack.local_mut() {
        stack.select_class(lent.class);
        stack.set_overtaking(lent.is_overtaking);
    }
    core.receive_routed(lent.port, lent.frames);
    let delivered = dispatch.deliver_some(core, handler, Some(lent.frames), limits);
    let Some(stack) = core.stack.local_mut() else { return 0 };
    stack.set_overtaking(false);
    let is_complete = stack.events_waiting() == 0;
    if is_complete {
        stack.finish_burst(lent.frames);
    } else {
        stack.finish_burst_early(lent.frames);
    }
    stack.select_class(BEST_EFFORT);
    if is_complete { delivered.max(lent.frames.len()) } else { delivered }
}

/// Returns the classes with events.
fn classes_with_events(core: &ShardCore) -> ClassSet {
    core.stack.local().map_or(0, Stack::classes_with_events)
}

/// Returns the class of all frames of a burst; `None` if they have several classes.
fn single_class(burst: &RxBurst<'_>) -> Option<u8> {
    let mut classes = burst.iter().map(|frame| priority::class(frame.label.priority()));
    let first = classes.next().unwrap_or(BEST_EFFORT);
    classes.all(|class| class == first).then_some(first)
}

/// Counts the received frames of each priority.
fn count_priorities(core: &mut ShardCore, burst: &RxBurst<'_>) {
    burst.iter().for_each(|frame| core.stats.count_priority(frame.label.priority()));
}
