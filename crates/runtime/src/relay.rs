//! The device halves of a shard that does not serve a device: it receives nothing, and what it sends is
//! relayed to a shard that serves the device, which sends it.
//!
//! Frames to be sent by a shard that serves the device are rare: answers of a UDP socket to clients on
//! several devices, and connections whose packets arrive by one device and leave by another. They cross in a
//! ring of their own, whose memory is resident only where it was used.

use crate::doorbell::Doorbell;
use crate::pending_queues::PendingQueues;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use ginnel_devices::memory::spsc::SpscTx;
use ginnel_stack::device::{Capabilities, Device, RxBurst, RxFrame, RxQueue, TxClass, TxMeta, TxQueue};
use ginnel_stack::handle::PortId;
use ginnel_stack::priority::{CLASSES, ClassLimits};
use ginnel_stack::steering::SHARDS_MAX;
use ginnel_stack::time::Instant;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// Bytes of an Ethernet header with VLAN tag.
const ETHERNET_HEADER_BYTES_MAX: usize = 18;

/// The shards that send on each device, by number of the device: a bit for each shard. They are those that
/// serve the device, and others from their first frame on. They need to know its neighbours.
#[derive(Debug)]
pub(crate) struct DeviceUsers {
    /// The shards that serve each device: that of the first queue first.
    pub(crate) shards: Vec<Vec<u8>>,
    users: Vec<AtomicU64>,
    /// True for devices that went away.
    gone: Vec<AtomicBool>,
    /// By shard: the frames that its full relays have refused. Each shard writes only its own entry.
    refused: [AtomicU64; SHARDS_MAX as usize],
    /// By shard and class: the frames that its relays have refused since this was last taken.
    shed: [[AtomicU64; CLASSES]; SHARDS_MAX as usize],
}

impl DeviceUsers {
    /// Creates the table. At first the shards that serve a device are its only users.
    pub(crate) fn new(shards: Vec<Vec<u8>>) -> Self {
        let bits = |shards: &Vec<u8>| shards.iter().fold(0, |bits, &shard| bits | 1_u64 << shard);
        let users = shards.iter().map(|shards| AtomicU64::new(bits(shards))).collect();
        let gone = shards.iter().map(|_| AtomicBool::new(false)).collect();
        let refused = [const { AtomicU64::new(0) }; SHARDS_MAX as usize];
        let shed = [const { [const { AtomicU64::new(0) }; CLASSES] }; SHARDS_MAX as usize];
        Self { shards, users, gone, refused, shed }
    }

    /// Returns the shards that send on a device; all shards for other devices, such as the loopback.
    pub(crate) fn users(&self, port: PortId) -> u64 {
        self.users.get(usize::from(port.0)).map_or(u64::MAX, |users| users.load(Ordering::Acquire))
    }

    /// Records that a device went away, for the shards that do not serve it.
    pub(crate) fn set_gone(&self, port: PortId) {
        if let Some(gone) = self.gone.get(usize::from(port.0)) {
            gone.store(true, Ordering::Release);
        }
    }

    fn is_gone(&self, port: PortId) -> bool {
        self.gone.get(usize::from(port.0)).is_some_and(|gone| gone.load(Ordering::Acquire))
    }

    /// Returns how many frames the full relays of a shard have refused.
    pub(crate) fn refused(&self, shard: u8) -> u64 {
        self.refused.get(usize::from(shard)).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Returns whether a shard relays what it sends on a device.
    pub(crate) fn is_relayed(&self, device: usize, shard: u8) -> bool {
        self.shards.get(device).is_some_and(|shards| !shards.contains(&shard))
    }

    /// Returns how many frames of each class the relays of a shard have refused since the last call. Must be
    /// called by the thread of the shard.
    pub(crate) fn take_shed(&self, shard: u8) -> [u64; CLASSES] {
        let shed = self.shed.get(usize::from(shard));
        shed.map_or([0; CLASSES], |shed| {
            shed.each_ref().map(|count| {
                let before = count.load(Ordering::Relaxed);
                // Most are 0, and their cache line stays unwritten.
                if before > 0 {
                    count.store(0, Ordering::Relaxed);
                }
                before
            })
        })
    }

    /// Counts a frame that a relay of a shard has refused, and by its class if that is given.
    #[cold]
    fn count_refused(&self, shard: u8, class: Option<u8>) {
        let shard = usize::from(shard);
        let by_class = class.and_then(|class| self.shed.get(shard)?.get(usize::from(class)));
        for count in self.refused.get(shard).into_iter().chain(by_class) {
            // Only the thread of the shard writes.
            count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
    }

    fn add(&self, port: PortId, shard: u8) {
        if let Some(users) = self.users.get(usize::from(port.0)) {
            users.fetch_or(1 << shard, Ordering::Release);
        }
    }
}

/// The writer's end of a ring with frames that another shard sends on a device.
pub(crate) struct RelaySender {
    pub(crate) frames: SpscTx,
    pub(crate) doorbell: Arc<Doorbell>,
    /// The reader's word, and the bit of its queue from this shard.
    pub(crate) pending_queues: Arc<PendingQueues>,
    pub(crate) index: u8,
}

/// Creates the halves of device `port` for shard `shard`, which does not serve it. `device` are the
/// capabilities of the device. `class_limits` are the part of the ring that frames of each class may fill,
/// if `[priority]` is in use.
///
/// # Errors
/// The kernel's error if there are no more descriptors.
pub(crate) fn device(
    sender: RelaySender,
    device: &Capabilities,
    (port, shard): (PortId, u8),
    users: Arc<DeviceUsers>,
    class_limits: Option<ClassLimits>,
) -> io::Result<Device> {
    // Checksums and segments are made before the frame crosses.
    let capabilities = Capabilities {
        mac: device.mac,
        mtu: device.mtu,
        tx_checksum: false,
        gso_bytes_max: 0,
        uso: false,
        labels: false,
    };
    let buffer = vec![0; device.mtu + ETHERNET_HEADER_BYTES_MAX].into();
    let rx = NoRx { silent: Doorbell::new()?, port, users: Arc::clone(&users) };
    let (class, is_user) = (None, false);
    let tx = RelayTx { sender, capabilities, buffer, port, shard, users, is_user, class_limits, class };
    Ok(Device { rx: Box::new(rx), tx: Box::new(tx) })
}

/// A receiving half that receives nothing.
struct NoRx {
    /// Nobody rings it: the shard sleeps on it as on any device, and need not look at the device again and
    /// again.
    silent: Doorbell,
    port: PortId,
    users: Arc<DeviceUsers>,
}

impl RxQueue for NoRx {
    fn rx_burst<'a>(&'a mut self, _: Instant, _: &mut RxBurst<'a>) {}

    // No frame has a hash that would have to be checked.
    fn computes_hashes(&self) -> bool {
        true
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.silent.wake().as_fd().as_raw_fd())
    }

    fn is_gone(&self) -> bool {
        self.users.is_gone(self.port)
    }
}

/// A sending half that relays frames to a shard that serves the device.
struct RelayTx {
    sender: RelaySender,
    capabilities: Capabilities,
    /// The frame that is being built.
    buffer: Box<[u8]>,
    port: PortId,
    shard: u8,
    users: Arc<DeviceUsers>,
    /// True if this shard is among the users of the device.
    is_user: bool,
    /// The part of the ring that frames of each class may fill, if `[priority]` is in use.
    class_limits: Option<ClassLimits>,
    /// Class of the frames that are reserved from now on. Frames of which no class is known, such as SYN+ACKs
    /// and ARP, may fill the ring.
    class: Option<u8>,
}

impl RelayTx {
    fn has_room(&mut self, len: usize) -> bool {
        if let (Some(limits), Some(class)) = (&self.class_limits, self.class)
            && !self.sender.frames.has_room_within(len, |room| limits.of(room, class))
        {
            return false;
        }
        self.sender.frames.has_room(len)
    }
}

impl TxQueue for RelayTx {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        if !self.has_room(len) {
            self.users.count_refused(self.shard, self.class);
            return None;
        }
        self.buffer.get_mut(..len)
    }

    fn commit(&mut self, len: usize, _: TxMeta) {
        if !core::mem::replace(&mut self.is_user, true) {
            self.users.add(self.port, self.shard);
        }
        if let Some(frame) = self.buffer.get(..len) {
            let pushed = self.sender.frames.push(self.port.0.into(), &RxFrame::new(frame));
            debug_assert!(pushed, "the ring had room when the frame was reserved");
        }
    }

    fn select_class(&mut self, class: Option<TxClass>) {
        self.class = class.map(|(TxClass::Connections(class) | TxClass::Datagrams(class))| class);
    }

    fn flush(&mut self, _: Instant) {
        if self.sender.frames.publish() {
            self.sender.pending_queues.set(self.sender.index);
            self.sender.doorbell.ring();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cross_shard::CrossShardInbox;

    #[test]
    fn a_frame_reaches_the_shard_that_sends_it() {
        let mut inbox = CrossShardInbox::new(Arc::new(Doorbell::new().unwrap()));
        let _sender = inbox.add_queue(4096, 4096);
        let users = Arc::new(DeviceUsers::new(vec![vec![0], vec![2, 5]]));
        let real = Capabilities {
            mac: [2; 6],
            mtu: 1500,
            tx_checksum: true,
            gso_bytes_max: 65_536,
            uso: true,
            labels: true,
        };
        let place = (PortId(1), 3);
        let mut relay = device(inbox.add_relay(0, 4096), &real, place, Arc::clone(&users), None).unwrap();
        let made = relay.tx.capabilities();
        assert_eq!((made.mac, made.mtu), (real.mac, real.mtu));
        assert!(!made.tx_checksum && made.gso_bytes_max == 0 && !made.uso && !made.labels);
        assert!(relay.rx.wake_fd().is_some() && relay.rx.arm(), "the shard may sleep");
        assert_eq!((users.users(PortId(0)), users.users(PortId(1))), (1, 0b10_0100));
        relay.tx.reserve(60).unwrap().fill(7);
        relay.tx.commit(60, TxMeta::default());
        // From its first frame on, the shard learns about neighbours.
        assert_eq!((users.users(PortId(0)), users.users(PortId(1))), (1, 0b10_1100));
        assert!(!inbox.has_pending());
        relay.tx.flush(Instant::ZERO);
        inbox.visit(|queue| {
            let burst = queue.relayed[0].burst();
            assert_eq!((burst.len(), burst[0].tag, burst[0].frame.bytes), (1, 1, &[7; 60][..]));
            1
        });
        let mut sent = 0;
        while relay.tx.reserve(1000).is_some() {
            relay.tx.commit(1000, TxMeta::default());
            sent += 1;
        }
        assert!((2..=4).contains(&sent), "a full ring is like a full device: {sent}");
        assert_eq!([2, 3].map(|shard| users.refused(shard)), [0, 1]);
        assert!(relay.tx.reserve(1000).is_none());
        assert_eq!(users.refused(3), 2);
    }

    #[test]
    fn a_device_is_gone_for_all_shards() {
        let mut inbox = CrossShardInbox::new(Arc::new(Doorbell::new().unwrap()));
        let _sender = inbox.add_queue(4096, 4096);
        let users = Arc::new(DeviceUsers::new(vec![vec![0], vec![1]]));
        let capabilities = Capabilities {
            mac: [2; 6],
            mtu: 1500,
            tx_checksum: false,
            gso_bytes_max: 0,
            uso: false,
            labels: false,
        };
        let relays = [0, 1].map(|port| {
            let sender = inbox.add_relay(0, 4096);
            device(sender, &capabilities, (PortId(port), 2), Arc::clone(&users), None).unwrap()
        });
        users.set_gone(PortId(1));
        assert_eq!(relays.each_ref().map(|relay| relay.rx.is_gone()), [false, true]);
    }
}
