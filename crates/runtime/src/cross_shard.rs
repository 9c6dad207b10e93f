//! Mailboxes between shards. For each ordered pair there are two lanes, one for frames that belong to the other and one for what all must know;
//! both are bounded and have one writer and one reader.
//!
//! * **Frames** are copied once, into the lane's own memory, because the device wants its frames back at the end of the turn. The receiver
//!   processes them where they lie. A full lane drops them, and the sender counts that.
//! * **What all must know** is never lost. What comes from the wire (ARP, neighbour and router discovery) is taken only if there is room to tell
//!   everybody, as if the wire had lost it otherwise. What the stack itself finds out is kept as [`News`] until there is room, the latest
//!   about each thing; there are only so many things.

use crate::doorbell::Doorbell;
use ginnel_devices::memory::spsc::{SpscRx, SpscTx, spsc_ring};
use ginnel_stack::device::RxFrame;
use ginnel_stack::handle::PortId;
use ginnel_stack::steering::ControlUpdate;
use std::collections::VecDeque;
use std::sync::Arc;

/// Tag of what is no frame.
pub(crate) const UPDATE_TAG: u32 = u32::MAX;
/// News that wait for room at the most: as many path MTUs as a stack remembers by default, and addresses. Beyond it the oldest path MTU goes.
const PENDING_UPDATES_MAX: usize = 8192;

/// What one shard writes to another.
pub(crate) struct CrossShardSender {
    frames: SpscTx,
    broadcasts: SpscTx,
    pending_updates: VecDeque<ControlUpdate>,
    doorbell: Arc<Doorbell>,
}

/// What one shard reads from another.
pub(crate) struct CrossShardReceiver {
    pub(crate) frames: SpscRx,
    pub(crate) broadcasts: SpscRx,
}

/// The two ends of a mailbox. `bell` wakes the reader.
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
    /// Sends a frame that belongs to the other. False, and it is lost, if the mailbox is full.
    pub(crate) fn send(&mut self, port: PortId, frame: &RxFrame<'_>) -> bool {
        self.frames.push(port.0.into(), frame)
    }

    /// Whether a frame of `len` bytes can be told. Nothing overtakes news.
    pub(crate) fn has_broadcast_room(&mut self, len: usize) -> bool {
        self.pending_updates.is_empty() && self.broadcasts.has_room(len)
    }

    /// Tells a frame, for which there is room.
    pub(crate) fn broadcast(&mut self, port: PortId, frame: &RxFrame<'_>) {
        let broadcasts = self.broadcasts.push(port.0.into(), frame);
        debug_assert!(broadcasts, "told without asking for room");
    }

    /// Tells news, now or when there is room.
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

    /// Shows the other what is new, and wakes it if it sleeps.
    pub(crate) fn publish(&mut self) {
        while let Some(update) = self.pending_updates.front() {
            if !self.broadcasts.push(UPDATE_TAG, &RxFrame::new(&update.encode())) {
                break;
            }
            self.pending_updates.pop_front();
        }
        // Both, whatever the first says.
        if self.frames.publish() | self.broadcasts.publish() {
            self.doorbell.ring();
        }
    }

    /// True if news wait for room: come back soon.
    pub(crate) fn has_pending_updates(&self) -> bool {
        !self.pending_updates.is_empty()
    }

    /// Wakes the other, for something that is not in the mailbox.
    pub(crate) fn ring(&self) {
        self.doorbell.ring();
    }
}

impl CrossShardReceiver {
    /// Whether something waits.
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

    fn heard(receiver: &mut CrossShardReceiver) -> Vec<ControlUpdate> {
        let update =
            receiver.broadcasts.burst().iter().filter_map(|c| ControlUpdate::decode(c.frame.bytes)).collect();
        receiver.broadcasts.release();
        update
    }

    /// The receiver does not read for a while: nothing of what all must know is lost, and the latest about each thing arrives.
    #[test]
    fn news_that_find_the_mailbox_full_arrive_when_there_is_room() {
        let (mut sender, mut receiver) = cross_shard_queue(4096, 4096, Arc::new(Doorbell::new().unwrap()));
        for last in 0..200 {
            sender.broadcast_update(path_mtu(last, 1400));
            sender.publish();
        }
        assert!(
            sender.has_pending_updates() && !sender.has_broadcast_room(60),
            "nothing overtakes what waits"
        );
        sender.broadcast_update(path_mtu(199, 1300));
        let mut all = Vec::new();
        while sender.has_pending_updates() || receiver.has_pending() {
            all.extend(heard(&mut receiver));
            sender.publish();
        }
        let expected: Vec<ControlUpdate> =
            (0..199).map(|last| path_mtu(last, 1400)).chain([path_mtu(199, 1300)]).collect();
        assert_eq!(all, expected);
        assert!(sender.has_broadcast_room(60));
    }

    /// How often the bell was rung: what its counter in the kernel says.
    fn rings(doorbell: &Doorbell) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(doorbell.wake().as_fd(), &mut count).map_or(0, |_| u64::from_ne_bytes(count))
    }

    #[test]
    fn a_sleeper_is_woken_once_for_all_that_waits_and_nobody_who_is_awake() {
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
        assert_eq!(rings(&doorbell), 0, "it is awake");
        doorbell.before_sleep();
        assert!(from_one.has_pending(), "so it does not sleep");
        doorbell.after_sleep(false);
        from_one.frames.burst();
        from_one.frames.release();
        doorbell.before_sleep();
        assert!(!from_one.has_pending());
        one.publish();
        assert_eq!(rings(&doorbell), 0, "there is nothing new");
        (0..10).for_each(|_| send(&mut one));
        send(&mut other);
        one.broadcast_update(path_mtu(1, 1400));
        one.publish();
        assert_eq!(rings(&doorbell), 1);
        doorbell.after_sleep(false);
        send(&mut one);
        assert_eq!(rings(&doorbell), 0, "it is awake again");
    }

    #[test]
    fn news_that_wait_have_a_bound() {
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
