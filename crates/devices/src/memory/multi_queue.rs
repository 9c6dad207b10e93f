//! A cable with a single-queue device at one end and several queues at the other, like a network adapter with
//! receive-side scaling (RSS).

use super::{Doorbell, MemoryConfig, MemoryRx, MemoryTx, direction};
use ginnel_stack::device::{Capabilities, Device, Label, RxBurst, RxQueue, TxMeta, TxQueue};
use ginnel_stack::handle::PortId;
use ginnel_stack::ip::NetworkConfig;
use ginnel_stack::steering::{FrameOwner, Steering};
use ginnel_stack::tcp::FlowKey;
use ginnel_stack::time::Instant;
use std::os::fd::RawFd;

/// How a frame's queue is selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RssMode {
    /// Selects one fixed queue, like a device without a hash.
    Fixed(usize),
    /// Selects the queues in turn, so that nearly every frame is on the wrong queue.
    RoundRobin,
    /// Selects the queue by the Toeplitz hash of addresses and ports, like an adapter with RSS. Frames
    /// without a flow go to the first queue.
    Hash,
    /// Selects the queue like [`RssMode::Hash`], and delivers the hashes of TCP segments with the frames, as
    /// the descriptors of most adapters do.
    DeliveredHash,
    /// Selects the queue of TCP segments to a port from 32,768 to 60,999 by the low bits of the port, like an
    /// adapter with a filter for each queue; that of other segments by a hash that the receiver does not
    /// know.
    PortBits,
    /// Selects the queue by the Toeplitz hash with [`ADAPTER_KEY`] and [`adapter_table`], like an adapter
    /// whose settings are not those of the stack.
    AdapterTable,
}

/// The key of an adapter that differs from the stack's.
pub const ADAPTER_KEY: [u8; 40] = {
    let mut key = [0; 40];
    let mut at = 0;
    while at < key.len() {
        key[at] = (at as u8).wrapping_mul(167).wrapping_add(29);
        at += 1;
    }
    key
};

/// Returns the indirection table of an adapter with `queues` queues: the queue of each entry. The first queue
/// has twice as many entries as each other one.
#[must_use]
pub fn adapter_table(queues: u8) -> Vec<u8> {
    // Cannot truncate: the remainder is below the number of queues.
    (0..512_u16).map(|entry| (entry % (u16::from(queues) + 1) % u16::from(queues)) as u8).collect()
}

/// Creates a single-queue device, and `queues` devices at the other end of its cable that share the second
/// MAC address. The first device receives the frames of all queues; `rss_mode` selects the queue that
/// receives each of its frames. One eventfd wakes the receiving half of the first device.
///
/// # Panics
/// Panics if `queues` is 0 or above 64, or if `rss_mode` names a queue that does not exist.
#[must_use]
pub fn multi_queue(config: &MemoryConfig, queues: usize, rss_mode: RssMode) -> (Device, Vec<Device>) {
    assert!((1..=64).contains(&queues), "{queues} queues");
    assert!(!matches!(rss_mode, RssMode::Fixed(queue) if queue >= queues), "no such queue");
    let [single_mac, queues_mac] = config.macs;
    let doorbell = Doorbell::default();
    let (mut tx, mut rx, mut devices) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..queues {
        let (to_queue, mut queue_rx) = direction(config, single_mac);
        let (mut queue_tx, from_queue) = direction(config, queues_mac);
        queue_tx.doorbell = doorbell.clone();
        queue_rx.computes_hashes = rss_mode == RssMode::DeliveredHash;
        // An adapter does not put labels on a wire.
        queue_tx.capabilities.labels &= !queue_rx.computes_hashes;
        rx.push(MemoryRx { doorbell: doorbell.clone(), ..from_queue });
        tx.push(to_queue);
        devices.push(Device { rx: Box::new(queue_rx), tx: Box::new(queue_tx) });
    }
    // The cast does not truncate: `queues` is at most 64. The ports of UDP sockets do not matter here,
    // because the receiver routes UDP frames itself.
    let mut steering = Steering::new(0, queues as u8, &NetworkConfig::default());
    if rss_mode == RssMode::AdapterTable {
        steering.set_hash_key(&ADAPTER_KEY);
        steering.set_device_shards([(0..queues as u8).collect()]);
        steering.set_device_table(PortId(0), &adapter_table(queues as u8));
    }
    let capabilities = tx[0].capabilities;
    let tx_half =
        MultiQueueTx { queues: tx, buffer: Vec::new(), rss_mode, next_queue: 0, steering, capabilities };
    (Device { rx: Box::new(MultiQueueRx { queues: rx, next_queue: 0 }), tx: Box::new(tx_half) }, devices)
}

struct MultiQueueTx {
    queues: Vec<MemoryTx>,
    /// Frames are built here, because the queue depends on the content of the frame.
    buffer: Vec<u8>,
    rss_mode: RssMode,
    next_queue: usize,
    steering: Steering,
    capabilities: Capabilities,
}

impl MultiQueueTx {
    fn choose_queue(&mut self, len: usize) -> usize {
        match self.rss_mode {
            RssMode::Fixed(queue) => queue,
            RssMode::RoundRobin => {
                self.next_queue = (self.next_queue + 1) % self.queues.len();
                self.next_queue
            }
            RssMode::PortBits => {
                let Some(flow) = FlowKey::of_frame(&self.buffer[..len]) else { return 0 };
                let (queues, port) = (self.queues.len(), flow.local_addr().port());
                let queue = usize::from(port) & (queues.next_power_of_two() - 1);
                if (32_768..61_000).contains(&port) && queue < queues {
                    return queue;
                }
                self.steering.flow_hash(flow.local_addr(), flow.remote_addr()) as usize % queues
            }
            RssMode::Hash | RssMode::DeliveredHash | RssMode::AdapterTable => {
                match self.steering.owner_of_bytes(PortId(0), &self.buffer[..len]) {
                    FrameOwner::Shard(queue) => queue.into(),
                    FrameOwner::All | FrameOwner::Primary { .. } => 0,
                }
            }
        }
    }

    /// Returns the label of a frame with the hash that the adapter has computed.
    fn label(&self, len: usize, label: Label) -> Label {
        match FlowKey::of_frame(&self.buffer[..len]) {
            Some(flow) => {
                let hash = self.steering.flow_hash(flow.remote_addr(), flow.local_addr());
                Label::new(Some(hash), label.priority())
            }
            None => label.without_hash(),
        }
    }
}

impl TxQueue for MultiQueueTx {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        if !self.queues.iter_mut().all(|queue| queue.reserve(len).is_some()) {
            return None;
        }
        self.buffer.resize(len, 0);
        Some(&mut self.buffer)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        let chosen = self.choose_queue(len);
        let meta = match self.rss_mode {
            RssMode::DeliveredHash => TxMeta { label: self.label(len, meta.label), ..meta },
            // The hash is not the stack's, which does not get it from an AF_XDP socket.
            RssMode::AdapterTable => TxMeta { label: meta.label.without_hash(), ..meta },
            _ => meta,
        };
        let queue = &mut self.queues[chosen];
        if let Some(room) = queue.reserve(len) {
            room.copy_from_slice(&self.buffer[..len]);
            queue.commit(len, meta);
        }
    }

    fn flush(&mut self, now: Instant) {
        self.queues.iter_mut().for_each(|queue| queue.flush(now));
    }
}

struct MultiQueueRx {
    queues: Vec<MemoryRx>,
    /// Queue that the next burst starts with; rotating it keeps a busy queue from starving the others.
    next_queue: usize,
}

impl RxQueue for MultiQueueRx {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        self.next_queue = (self.next_queue + 1) % self.queues.len();
        let (before, from) = self.queues.split_at_mut(self.next_queue);
        for queue in from.iter_mut().chain(before) {
            queue.rx_burst(now, burst);
        }
    }

    fn arm(&mut self) -> bool {
        self.queues.iter_mut().all(RxQueue::arm)
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.queues[0].wake_fd()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::conformance::{self, Guarantees};

    const GUARANTEES: Guarantees =
        Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };

    #[test]
    fn one_queue_conforms() {
        conformance::run("multi-queue", GUARANTEES, &mut || {
            let (one, mut queues) = multi_queue(&MemoryConfig::default(), 1, RssMode::Hash);
            (one, queues.remove(0))
        });
    }

    #[test]
    fn second_queue_conforms_without_hash() {
        conformance::run("multi-queue of two", GUARANTEES, &mut || {
            let (one, mut queues) = multi_queue(&MemoryConfig::default(), 2, RssMode::Fixed(1));
            (one, queues.remove(1))
        });
    }

    #[test]
    fn frames_are_distributed_as_configured() {
        for (spread, expected) in [(RssMode::Fixed(2), [0, 0, 8, 0]), (RssMode::RoundRobin, [2, 2, 2, 2])] {
            let (mut one, mut queues) = multi_queue(&MemoryConfig::default(), 4, spread);
            for _ in 0..8 {
                one.tx.reserve(60).unwrap().fill(0);
                one.tx.commit(60, TxMeta::default());
            }
            one.tx.flush(Instant::ZERO);
            let received = queues.iter_mut().map(|queue| {
                let mut burst = RxBurst::new();
                queue.rx.rx_burst(Instant::ZERO, &mut burst);
                burst.len()
            });
            assert_eq!(received.collect::<Vec<_>>(), expected, "{spread:?}");
        }
    }
}
