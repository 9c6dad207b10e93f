//! Receiving from other shards.

use crate::context::ShardCore;
use crate::cross_shard::{CrossShardReceiver, UPDATE_TAG};
use crate::dispatch::EventDispatcher;
use crate::handler::Handler;
use ginnel_devices::memory::spsc::TaggedBurst;
use ginnel_stack::device::RxBurst;
use ginnel_stack::handle::PortId;
use ginnel_stack::priority;
use ginnel_stack::steering::ControlUpdate;

/// Receives up to a burst of broadcasts and up to a burst of frames from one queue. Returns how many there
/// were.
pub(crate) fn receive<H: Handler>(
    core: &mut ShardCore,
    handler: &mut H,
    dispatch: &mut EventDispatcher,
    receiver: &mut CrossShardReceiver,
) -> usize {
    let CrossShardReceiver { frames, broadcasts } = receiver;
    // Broadcasts first: frames that were sent after them may depend on them.
    let burst = broadcasts.burst();
    let mut work = burst.len();
    process(core, handler, dispatch, &burst);
    drop(burst);
    broadcasts.release();
    let burst = frames.burst();
    work += burst.len();
    core.stats.forwards_received += burst.len() as u64;
    process(core, handler, dispatch, &burst);
    drop(burst);
    frames.release();
    work
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
            let (Some(router), Some(stack)) = (&mut core.router, core.stack.local()) else { continue };
            let steering = stack.network().steering();
            if router.accepts(steering, port, &tagged.frame, &mut core.stats) {
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
