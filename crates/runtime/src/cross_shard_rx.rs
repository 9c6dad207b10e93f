//! Receiving from other shards.

use crate::context::ShardCore;
use crate::cross_shard::{CrossShardReceiver, UPDATE_TAG};
use crate::dispatch::EventDispatcher;
use crate::handler::Handler;
use ginnel_devices::memory::spsc::{TaggedBurst, TaggedFrame};
use ginnel_stack::device::RxBurst;
use ginnel_stack::handle::PortId;
use ginnel_stack::priority;
use ginnel_stack::steering::ControlUpdate;

/// Receives up to a burst of broadcasts and up to a burst of frames from one queue, and sends the frames to
/// relay ([`send_relayed`]). Returns how many there were in total.
pub(crate) fn receive<H: Handler>(
    core: &mut ShardCore,
    handler: &mut H,
    dispatch: &mut EventDispatcher,
    receiver: &mut CrossShardReceiver,
) -> usize {
    // Broadcasts first: frames that were sent after them may depend on them.
    let broadcasts = receive_broadcasts(core, handler, dispatch, receiver);
    let burst = receiver.frames.burst();
    let frames = burst.len();
    core.stats.forwards_received += frames as u64;
    process(core, handler, dispatch, &burst);
    drop(burst);
    receiver.frames.release();
    broadcasts + frames + send_relayed(core, receiver)
}

/// Sends up to a burst of frames of each device for a shard that does not serve the device. Returns how many
/// there were.
pub(crate) fn send_relayed(core: &mut ShardCore, receiver: &mut CrossShardReceiver) -> usize {
    let mut count = 0;
    for ring in &mut receiver.relayed {
        let burst = ring.burst();
        count += burst.len();
        for relayed in &burst {
            // Cannot truncate: the sender wrote a `PortId` there.
            let port = PortId(relayed.tag as u16);
            let stack = core.stack.local_mut();
            let sent = stack.is_some_and(|stack| stack.network_mut().send_relayed(port, relayed.frame.bytes));
            let counter = if sent { &mut core.stats.frames_relayed } else { &mut core.stats.relays_dropped };
            *counter += 1;
        }
        drop(burst);
        ring.release();
    }
    count
}

/// Receives up to a burst of broadcasts from one queue. Returns how many there were.
pub(crate) fn receive_broadcasts<H: Handler>(
    core: &mut ShardCore,
    handler: &mut H,
    dispatch: &mut EventDispatcher,
    receiver: &mut CrossShardReceiver,
) -> usize {
    let burst = receiver.broadcasts.burst();
    let count = burst.len();
    process(core, handler, dispatch, &burst);
    drop(burst);
    receiver.broadcasts.release();
    count
}

/// Returns the device on which a forwarded frame arrived; `None` if the frame must not be processed.
pub(crate) fn accepted_port(core: &mut ShardCore, tagged: &TaggedFrame<'_>) -> Option<PortId> {
    // Cannot truncate: the sender wrote a `PortId` there.
    let port = PortId(tagged.tag as u16);
    let (router, stack) = (core.router.as_mut()?, core.stack.local()?);
    let steering = stack.network().steering();
    router.accepts(steering, port, &tagged.frame, &mut core.stats).then_some(port)
}

/// Processes the entries of a queue in order. Consecutive frames of one device are processed as a burst.
fn process<H: Handler>(
    core: &mut ShardCore,
    handler: &mut H,
    dispatch: &mut EventDispatcher,
    tagged_burst: &TaggedBurst<'_>,
) {
    for same_tag in tagged_burst.chunk_by(|a, b| a.tag == b.tag) {
        if same_tag[0].tag == UPDATE_TAG {
            for update in same_tag.iter().filter_map(|tagged| ControlUpdate::decode(tagged.frame.bytes)) {
                let now = core.now;
                if let Some(stack) = core.stack.local_mut() {
                    stack.apply_control_update(now, &update);
                }
                core.with_router(|router, stack, stats| router.retry_listens(stack, stats));
            }
            continue;
        }
        // Cannot truncate: the sender wrote a `PortId` there.
        let port = PortId(same_tag[0].tag as u16);
        let mut burst = RxBurst::new();
        for tagged in same_tag {
            if accepted_port(core, tagged).is_some() {
                burst.push(tagged.frame);
            }
        }
        let has_priority = burst.iter().any(|frame| frame.label.is_prioritized());
        if has_priority {
            priority::sort(&mut burst);
        }
        let now = core.now;
        if let Some(stack) = core.stack.local_mut() {
            stack.receive(now, port, &burst);
        }
        dispatch.deliver_events(core, handler, Some(&burst));
        if let Some(stack) = core.stack.local_mut() {
            stack.finish_burst(&burst);
        }
    }
}
