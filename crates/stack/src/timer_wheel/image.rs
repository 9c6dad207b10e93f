//! A timer wheel in an image of a stack: the timers of each slot, in order.

use super::{LEVELS, RING_SLOTS, SLOT_MARK, TICK_SHIFT, TimerNode, TimerStore, TimerWheel};
use crate::time::Instant;
use serde::{Deserialize, Serialize};

/// A node that is not armed. Armed ones are in [`WheelImage`].
#[derive(Serialize, Deserialize)]
#[serde(rename = "TimerNode")]
pub(crate) enum NodeImage {
    Idle,
    /// See [`TimerNode::deferred`].
    Deferred(u32),
    /// See [`TimerNode::listed`].
    Listed(u32),
}

impl From<TimerNode> for NodeImage {
    fn from(node: TimerNode) -> Self {
        match node {
            TimerNode { next: 0, prev: u32::MAX, deadline } => Self::Deferred(deadline),
            node if !node.is_armed() && node != TimerNode::default() => Self::Listed(node.deadline),
            _ => Self::Idle,
        }
    }
}

impl From<NodeImage> for TimerNode {
    fn from(image: NodeImage) -> Self {
        match image {
            NodeImage::Idle => Self::default(),
            NodeImage::Deferred(number) => Self::deferred(number),
            NodeImage::Listed(number) => Self::listed(number),
        }
    }
}

/// The wheel.
#[derive(Serialize, Deserialize)]
#[serde(rename = "TimerWheel")]
pub(crate) struct WheelImage {
    current: u64,
    cascaded_ahead: u8,
    needs_cascade: bool,
    last_cascade_ahead: u64,
    /// Slots with timers, and of each timer its id and the low bits of its deadline.
    slots: Vec<(u16, Vec<(u32, u32)>)>,
}

impl TimerWheel {
    /// Returns the image. `node` returns the node of a timer.
    pub(crate) fn image(&self, node: impl Fn(u32) -> TimerNode) -> WheelImage {
        let timers = |first: u32| {
            let mut timers = Vec::new();
            let mut link = first;
            while link & SLOT_MARK == 0 && link != 0 {
                let TimerNode { next, deadline, .. } = node(link - 1);
                timers.push((link - 1, deadline));
                link = next;
            }
            timers
        };
        let slots = (0..).zip(&self.slots).filter(|(_, slot)| slot.first != 0);
        WheelImage {
            current: self.current,
            cascaded_ahead: self.cascaded_ahead,
            needs_cascade: self.needs_cascade,
            last_cascade_ahead: self.last_cascade_ahead,
            slots: slots.map(|(number, slot)| (number, timers(slot.first))).collect(),
        }
    }

    /// Arms the timers of an image on this wheel, which is empty. `is_timer` tells whether an id is that of a
    /// timer, whose node is in its initial state.
    ///
    /// # Errors
    /// The image is malformed.
    pub(crate) fn restore<S: TimerStore>(
        &mut self,
        image: WheelImage,
        store: &mut S,
        is_timer: impl Fn(&S, u32) -> bool,
    ) -> Result<(), &'static str> {
        let WheelImage { current, cascaded_ahead, needs_cascade, last_cascade_ahead, slots } = image;
        if current.max(last_cascade_ahead) > Instant::MAX.as_nanos() >> TICK_SHIFT {
            return Err("the time of the timer wheel is out of range");
        }
        (self.current, self.last_cascade_ahead) = (current, last_cascade_ahead);
        (self.cascaded_ahead, self.needs_cascade) = (cascaded_ahead, needs_cascade);
        for (slot, timers) in slots {
            let slot = usize::from(slot);
            if slot >= LEVELS * RING_SLOTS as usize || self.slots[slot].first != 0 {
                return Err("the timer wheel has a slot twice, or one that does not exist");
            }
            for (id, deadline) in timers {
                if !is_timer(store, id) || *store.timer_node(id) != TimerNode::default() {
                    return Err("a timer belongs to no connection, or is armed twice");
                }
                self.append(store, slot, id, deadline.into());
                self.len += 1;
            }
        }
        Ok(())
    }
}
