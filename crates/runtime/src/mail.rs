//! Taking what other shards have sent.

use crate::context::Core;
use crate::dispatch::Dispatch;
use crate::handler::Handler;
use crate::mailbox::{Inbox, NEWS};
use ginnel_devices::memory::lane::CrossedBurst;
use ginnel_stack::device::RxBurst;
use ginnel_stack::handle::PortId;
use ginnel_stack::priority;
use ginnel_stack::steering::News;

/// Takes up to a burst of frames, and of what all must know, out of one mailbox, and returns how many things it was.
pub(crate) fn take<H: Handler>(
    core: &mut Core,
    handler: &mut H,
    dispatch: &mut Dispatch,
    inbox: &mut Inbox,
) -> usize {
    let Inbox { frames, told } = inbox;
    // First what was learnt: frames that were sent after it may need it.
    let burst = told.burst();
    let mut work = burst.len();
    receive(core, handler, dispatch, &burst);
    drop(burst);
    told.release();
    let burst = frames.burst();
    work += burst.len();
    core.stats.frames_taken += burst.len() as u64;
    receive(core, handler, dispatch, &burst);
    drop(burst);
    frames.release();
    work
}

/// Processes what lies in a mailbox, in order, frames of one device as a burst.
fn receive<H: Handler>(
    core: &mut Core,
    handler: &mut H,
    dispatch: &mut Dispatch,
    crossed: &CrossedBurst<'_>,
) {
    for run in crossed.chunk_by(|a, b| a.tag == b.tag) {
        if run[0].tag == NEWS {
            for news in run.iter().filter_map(|crossed| News::decode(crossed.frame.bytes)) {
                let now = core.now;
                if let Some(stack) = core.stack.here_mut() {
                    stack.hear(now, &news);
                }
                core.with_peers(|peers, stack, stats| peers.retry(stack, stats));
            }
            continue;
        }
        // Cannot truncate: the sender wrote the number of a device there.
        let port = PortId(run[0].tag as u16);
        let mut burst = RxBurst::new();
        for crossed in run {
            let (Some(peers), Some(stack)) = (&mut core.peers, core.stack.here()) else { continue };
            let steering = stack.network().steering();
            if peers.admits(steering, port, &crossed.frame, &mut core.stats) {
                burst.push(crossed.frame);
            }
        }
        let urgent = burst.iter().any(|frame| frame.label.is_prioritized());
        if urgent {
            priority::sort(&mut burst);
        }
        let now = core.now;
        if let Some(stack) = core.stack.here_mut() {
            stack.receive(now, port, &burst);
        }
        dispatch.events(core, handler, Some(&burst));
        if let Some(stack) = core.stack.here_mut() {
            stack.finish_burst(&burst);
        }
    }
}
