//! Queues between shards. For each ordered pair of shards there are two SPSC rings, one for frames that
//! belong to the other shard and one for broadcasts. Both are bounded. A shard visits a queue only if it has
//! entries ([`PendingQueues`]), and the memory of a queue is resident only where it was used, so that a shard
//! does not pay for the number of the others.
//!
//! * **Frames** are copied once, into the memory of the ring, because the device gets its frames back at the
//!   end of the turn. The receiver processes them in place. If the ring is full, or lower classes of priority
//!   have filled their part of it, the frame is dropped, and the sender counts it.
//! * **Broadcasts** are never lost. A frame that all shards must see (ARP, neighbour and router discovery) is
//!   accepted from the wire only if every ring has space for it; otherwise it is dropped as if the wire had
//!   lost it. A [`ControlUpdate`] of the stack itself waits until there is space. Only the latest update
//!   about each object is kept, so their number is bounded.

use crate::doorbell::Doorbell;
use crate::pending_queues::PendingQueues;
use crate::relay::RelaySender;
use ginnel_devices::memory::spsc::{SpscRx, SpscTx, spsc_ring};
use ginnel_stack::device::RxFrame;
use ginnel_stack::handle::PortId;
use ginnel_stack::priority::ClassLimits;
use ginnel_stack::steering::ControlUpdate;
use std::collections::VecDeque;
use std::sync::Arc;

/// Tag of an entry that is a [`ControlUpdate`] and not a frame.
pub(crate) const UPDATE_TAG: u32 = u32::MAX;
/// Updates that may wait for space: as many as a stack remembers path MTUs by default, and addresses. At the
/// limit the oldest path MTU or fast open cookie is discarded.
const PENDING_UPDATES_MAX: usize = 8192;

/// The writer's end of a queue to another shard.
pub(crate) struct CrossShardSender {
    frames: SpscTx,
    broadcasts: SpscTx,
    pending_updates: VecDeque<ControlUpdate>,
    doorbell: Arc<Doorbell>,
    /// The reader's word, and the bit of this queue.
    pending_queues: Arc<PendingQueues>,
    index: u8,
}

/// The reader's end of a queue from another shard.
pub(crate) struct CrossShardReceiver {
    pub(crate) frames: SpscRx,
    pub(crate) broadcasts: SpscRx,
    /// Frames that this shard sends for the other one, which does not serve their devices: a ring for each
    /// device.
    pub(crate) relayed: Vec<SpscRx>,
}

/// The queues that other shards write to.
pub(crate) struct CrossShardInbox {
    receivers: Vec<CrossShardReceiver>,
    pending_queues: Arc<PendingQueues>,
    /// Queues in which entries were left in the last turn.
    left: u64,
    doorbell: Arc<Doorbell>,
}

impl CrossShardInbox {
    /// Creates an inbox without queues. `doorbell` wakes its shard.
    pub(crate) fn new(doorbell: Arc<Doorbell>) -> Self {
        Self { receivers: Vec::new(), pending_queues: Arc::new(PendingQueues::new()), left: 0, doorbell }
    }

    /// Creates a queue to this inbox, of which there may be 64, and returns the writer's end.
    pub(crate) fn add_queue(&mut self, frame_bytes: usize, broadcast_bytes: usize) -> CrossShardSender {
        let ((frames, frames_rx), (broadcasts, broadcasts_rx)) =
            (spsc_ring(frame_bytes), spsc_ring(broadcast_bytes));
        // Cannot truncate: there are at most 64 shards.
        let index = self.receivers.len() as u8;
        let relayed = Vec::new();
        self.receivers.push(CrossShardReceiver { frames: frames_rx, broadcasts: broadcasts_rx, relayed });
        CrossShardSender {
            frames,
            broadcasts,
            pending_updates: VecDeque::new(),
            doorbell: Arc::clone(&self.doorbell),
            pending_queues: Arc::clone(&self.pending_queues),
            index,
        }
    }

    /// Creates a ring for frames that this shard sends for another one, whose queue has this index. Returns
    /// the writer's end.
    ///
    /// # Panics
    /// If there is no queue with this index.
    pub(crate) fn add_relay(&mut self, index: u8, frame_bytes: usize) -> RelaySender {
        let (frames, relayed) = spsc_ring(frame_bytes);
        self.receivers[usize::from(index)].relayed.push(relayed);
        let (doorbell, pending_queues) = (Arc::clone(&self.doorbell), Arc::clone(&self.pending_queues));
        RelaySender { frames, doorbell, pending_queues, index }
    }

    /// Returns whether an entry is pending.
    pub(crate) fn has_pending(&self) -> bool {
        self.left != 0 || self.pending_queues.is_any()
    }

    /// Calls `receive` with each queue that has entries, in the order of the shards, and returns the sum of
    /// the results. A queue in which `receive` leaves entries is visited again in the next turn.
    #[inline]
    pub(crate) fn visit(&mut self, receive: impl FnMut(&mut CrossShardReceiver) -> usize) -> usize {
        if self.has_pending() { self.visit_pending(receive) } else { 0 }
    }

    #[inline(never)]
    fn visit_pending(&mut self, mut receive: impl FnMut(&mut CrossShardReceiver) -> usize) -> usize {
        let mut queues = core::mem::take(&mut self.left) | self.pending_queues.take();
        let mut work = 0;
        while queues != 0 {
            let index = queues.trailing_zeros();
            queues &= queues - 1;
            let Some(receiver) = self.receivers.get_mut(index as usize) else { continue };
            work += receive(receiver);
            self.left |= u64::from(receiver.has_pending()) << index;
        }
        work
    }
}

impl CrossShardSender {
    /// Sends a frame that belongs to the other shard. Returns false if the ring is full; the frame is lost
    /// then.
    pub(crate) fn send(&mut self, port: PortId, frame: &RxFrame<'_>) -> bool {
        self.frames.push(port.0.into(), frame)
    }

    /// Returns whether a frame of `len` bytes leaves free what is reserved in the ring for higher classes.
    pub(crate) fn has_room_for(&mut self, len: usize, limits: &ClassLimits, class: u8) -> bool {
        self.frames.has_room_within(len, |room| limits.of(room, class))
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
            && let Some(oldest) = self.pending_updates.iter().position(|update| {
                matches!(update, ControlUpdate::PathMtu { .. } | ControlUpdate::FastOpenPeer(_))
            })
        {
            self.pending_updates.remove(oldest);
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
            self.pending_queues.set(self.index);
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
    fn has_pending(&mut self) -> bool {
        self.frames.is_waiting()
            || self.broadcasts.is_waiting()
            || self.relayed.iter_mut().any(SpscRx::is_waiting)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use core::net::IpAddr;

    fn path_mtu(last: u8, mtu: u16) -> ControlUpdate {
        ControlUpdate::PathMtu { destination: IpAddr::from([10, 0, 0, last]), mtu }
    }

    fn inbox() -> CrossShardInbox {
        CrossShardInbox::new(Arc::new(Doorbell::new().unwrap()))
    }

    /// Takes a burst of updates from each queue that has entries.
    fn received(inbox: &mut CrossShardInbox) -> Vec<ControlUpdate> {
        let mut updates = Vec::new();
        inbox.visit(|receiver| {
            let burst = receiver.broadcasts.burst();
            updates.extend(burst.iter().filter_map(|c| ControlUpdate::decode(c.frame.bytes)));
            drop(burst);
            receiver.broadcasts.release();
            0
        });
        updates
    }

    /// While the receiver does not read, no update is lost, and the latest about each object arrives.
    #[test]
    fn updates_wait_for_space_in_a_full_queue() {
        let mut inbox = inbox();
        let mut sender = inbox.add_queue(4096, 4096);
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
        while sender.has_pending_updates() || inbox.has_pending() {
            all.extend(received(&mut inbox));
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

    /// Takes a burst of frames, and returns their number.
    fn take_frames(receiver: &mut CrossShardReceiver) -> usize {
        let frames = receiver.frames.burst().len();
        receiver.frames.release();
        frames
    }

    /// A queue is visited as long as it has entries, and empty queues are not visited at all.
    #[test]
    fn only_queues_with_entries_are_visited() {
        let mut inbox = inbox();
        let mut senders: Vec<_> = (0..63).map(|_| inbox.add_queue(16_384, 4096)).collect();
        let frame = RxFrame::new(&[7; 60]);
        (0..70).for_each(|_| assert!(senders[62].send(PortId(0), &frame)));
        assert!(senders[5].send(PortId(0), &frame));
        assert!(!inbox.has_pending(), "nothing is published");
        senders.iter_mut().for_each(CrossShardSender::publish);
        let mut bursts = Vec::new();
        while inbox.has_pending() {
            inbox.visit(|receiver| {
                bursts.push(take_frames(receiver));
                0
            });
        }
        assert_eq!(bursts, [1, 64, 6]);
        assert_eq!(inbox.visit(|_| panic!("all queues are empty")), 0);
    }

    #[test]
    fn sleeping_reader_is_woken_once_and_awake_never() {
        let mut inbox = inbox();
        let doorbell = Arc::clone(&inbox.doorbell);
        let (mut one, mut other) = (inbox.add_queue(4096, 4096), inbox.add_queue(4096, 4096));
        let frame = RxFrame::new(&[7; 60]);
        let send = |sender: &mut CrossShardSender| {
            assert!(sender.send(PortId(0), &frame));
            sender.publish();
        };
        send(&mut one);
        assert_eq!(rings(&doorbell), 0, "the reader is awake");
        doorbell.before_sleep();
        assert!(inbox.has_pending(), "the reader must not sleep");
        doorbell.after_sleep(false);
        assert_eq!(inbox.visit(take_frames), 1);
        doorbell.before_sleep();
        assert!(!inbox.has_pending());
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
        let mut inbox = inbox();
        let mut sender = inbox.add_queue(4096, 4096);
        for n in 0..20_000u32 {
            sender.broadcast_update(ControlUpdate::PathMtu {
                destination: IpAddr::from(n.to_be_bytes()),
                mtu: 1400,
            });
        }
        assert_eq!(sender.pending_updates.len(), PENDING_UPDATES_MAX);
    }
}
