//! Queues between shards. For each ordered pair of shards there are two SPSC rings, one for frames that
//! belong to the other shard and one for broadcasts. Both are bounded.
//!
//! * **Frames** are copied once, into the memory of the ring, because the device gets its frames back at the
//!   end of the turn. The receiver processes them in place. If the ring is full, the frame is dropped, and
//!   the sender counts it.
//! * **Broadcasts** are never lost. A frame that all shards must see (ARP, neighbour and router discovery) is
//!   accepted from the wire only if every ring has space for it; otherwise it is dropped as if the wire had
//!   lost it. A [`ControlUpdate`] of the stack itself waits until there is space. Only the latest update
//!   about each object is kept, so their number is bounded.

use crate::doorbell::Doorbell;
use ginnel_devices::memory::spsc::{SpscRx, SpscTx, spsc_ring};
use ginnel_stack::device::RxFrame;
use ginnel_stack::handle::PortId;
use ginnel_stack::steering::ControlUpdate;
use std::collections::VecDeque;
use std::sync::Arc;

/// Tag of an entry that is a [`ControlUpdate`] and not a frame.
pub(crate) const UPDATE_TAG: u32 = u32::MAX;
/// Updates that may wait for space: as many as a stack remembers path MTUs by default, and addresses. At the
/// limit the oldest path MTU is discarded.
const PENDING_UPDATES_MAX: usize = 8192;

/// The writer's end of a queue to another shard.
pub(crate) struct CrossShardSender {
    frames: SpscTx,
    broadcasts: SpscTx,
    pending_updates: VecDeque<ControlUpdate>,
    doorbell: Arc<Doorbell>,
}

/// The reader's end of a queue from another shard.
pub(crate) struct CrossShardReceiver {
    pub(crate) frames: SpscRx,
    pub(crate) broadcasts: SpscRx,
}

/// Creates a queue. `doorbell` wakes the reader.
pub(crate) fn cross_shard_queue(
    frame_bytes: usize,
    broadcast_bytes: usize,
    doorbell: Arc<Doorbell>,
) -> (CrossShardSender, CrossShardReceiver) {
    let ((frames, frames_rx), (broadcasts, broadcasts_rx)) =
        (spsc_ring(frame_bytes), spsc_ring(broadcast_bytes));
    (
        CrossShardSender { frames, broadcasts, pending_updates: VecDeque::new(), doorbell },
        CrossShardReceiver { frames: frames_rx, broadcasts: broadcasts_rx },
    )
}

impl CrossShardSender {
    /// Sends a frame that belongs to the other shard. Returns false if the ring is full; the frame is lost
    /// then.
    pub(crate) fn send(&mut self, port: PortId, frame: &RxFrame<'_>) -> bool {
        self.frames.push(port.0.into(), frame)
    }

    /// Returns whether a frame of `len` bytes can be broadcast. Frames do not overtake updates that wait.
    pub(crate) fn has_broadcast_room(&mut self, len: usize) -> bool {
        self.pending_updates.is_empty() && self.broadcasts.has_room(len)
    }

    /// Broadcasts a frame after [`has_broadcast_room`](Self::has_broadcast_room) returned true.
    pub(crate) fn broadcast(&mut self, port: PortId, frame: &RxFrame<'_>) {
        let broadcasts = self.broadcasts.push(port.0.into(), frame);
        debug_assert!(broadcasts, "broadcast without checking for space");
    }

    /// Broadcasts an update, now or as soon as there is space.
    pub(crate) fn broadcast_update(&mut self, update: ControlUpdate) {
        self.pending_updates.retain(|earlier| !earlier.is_superseded_by(&update));
        if self.pending_updates.len() >= PENDING_UPDATES_MAX
            && let Some(oldest_path_mtu) =
                self.pending_updates.iter().position(|update| matches!(update, ControlUpdate::PathMtu { .. }))
        {
            self.pending_updates.remove(oldest_path_mtu);
        }
        self.pending_updates.push_back(update);
    }

    /// Makes new entries visible to the reader, and wakes it if it sleeps.
    pub(crate) fn publish(&mut self) {
        while let Some(update) = self.pending_updates.front() {
            if !self.broadcasts.push(UPDATE_TAG, &RxFrame::new(&update.encode())) {
                break;
            }
            self.pending_updates.pop_front();
        }
        // Not `||`: both rings must be published.
        if self.frames.publish() | self.broadcasts.publish() {
            self.doorbell.ring();
        }
    }

    /// Returns whether updates wait for space: call [`publish`](Self::publish) again soon.
    pub(crate) fn has_pending_updates(&self) -> bool {
        !self.pending_updates.is_empty()
    }

    /// Wakes the reader, for something that is not in the queue.
    pub(crate) fn ring(&self) {
        self.doorbell.ring();
    }
}

impl CrossShardReceiver {
    /// Returns whether an entry is pending.
    pub(crate) fn has_pending(&mut self) -> bool {
        self.frames.is_waiting() || self.broadcasts.is_waiting()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::net::IpAddr;

    fn path_mtu(last: u8, mtu: u16) -> ControlUpdate {
        ControlUpdate::PathMtu { destination: IpAddr::from([10, 0, 0, last]), mtu }
    }

    fn received(receiver: &mut CrossShardReceiver) -> Vec<ControlUpdate> {
        let update =
            receiver.broadcasts.burst().iter().filter_map(|c| ControlUpdate::decode(c.frame.bytes)).collect();
        receiver.broadcasts.release();
        update
    }

    /// While the receiver does not read, no update is lost, and the latest about each object arrives.
    #[test]
    fn updates_wait_for_space_in_a_full_queue() {
        let (mut sender, mut receiver) = cross_shard_queue(4096, 4096, Arc::new(Doorbell::new().unwrap()));
        for last in 0..200 {
            sender.broadcast_update(path_mtu(last, 1400));
            sender.publish();
        }
        assert!(
            sender.has_pending_updates() && !sender.has_broadcast_room(60),
            "frames must not overtake updates"
        );
        sender.broadcast_update(path_mtu(199, 1300));
        let mut all = Vec::new();
        while sender.has_pending_updates() || receiver.has_pending() {
            all.extend(received(&mut receiver));
            sender.publish();
        }
        let expected: Vec<ControlUpdate> =
            (0..199).map(|last| path_mtu(last, 1400)).chain([path_mtu(199, 1300)]).collect();
        assert_eq!(all, expected);
        assert!(sender.has_broadcast_room(60));
    }

    /// Returns how often the doorbell was rung: the counter of its eventfd.
    fn rings(doorbell: &Doorbell) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(doorbell.wake().as_fd(), &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    #[test]
    fn sleeping_reader_is_woken_once_and_awake_never() {
        let doorbell = Arc::new(Doorbell::new().unwrap());
        let ((mut one, mut from_one), (mut other, _from_other)) = (
            cross_shard_queue(4096, 4096, doorbell.clone()),
            cross_shard_queue(4096, 4096, doorbell.clone()),
        );
        let frame = RxFrame::new(&[7; 60]);
        let send = |sender: &mut CrossShardSender| {
            assert!(sender.send(PortId(0), &frame));
            sender.publish();
        };
        send(&mut one);
        assert_eq!(rings(&doorbell), 0, "the reader is awake");
        doorbell.before_sleep();
        assert!(from_one.has_pending(), "the reader must not sleep");
        doorbell.after_sleep(false);
        from_one.frames.burst();
        from_one.frames.release();
        doorbell.before_sleep();
        assert!(!from_one.has_pending());
        one.publish();
        assert_eq!(rings(&doorbell), 0, "nothing was published");
        (0..10).for_each(|_| send(&mut one));
        send(&mut other);
        one.broadcast_update(path_mtu(1, 1400));
        one.publish();
        assert_eq!(rings(&doorbell), 1);
        doorbell.after_sleep(false);
        send(&mut one);
        assert_eq!(rings(&doorbell), 0, "the reader is awake again");
    }

    #[test]
    fn waiting_updates_are_bounded() {
        let (mut sender, _inbox) = cross_shard_queue(4096, 4096, Arc::new(Doorbell::new().unwrap()));
        for n in 0..20_000u32 {
            sender.broadcast_update(ControlUpdate::PathMtu {
                destination: IpAddr::from(n.to_be_bytes()),
                mtu: 1400,
            });
        }
        assert_eq!(sender.pending_updates.len(), PENDING_UPDATES_MAX);
    }
}
