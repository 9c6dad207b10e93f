//! Labels: the flow hash and priority that devices carry with a frame, and the detection of frames whose
//! label has a wrong hash.

use super::{Network, NextHop};
use crate::device::RxBurst;
use crate::steering::toeplitz::{KEY, Toeplitz};
use crate::tcp::FlowKey;
use core::net::SocketAddr;

impl Network {
    /// Returns whether any device carries labels.
    #[inline(always)]
    pub(crate) fn has_flow_hasher(&self) -> bool {
        self.flow_hasher.is_some()
    }

    /// Returns whether the device that a hop's packets leave by carries labels.
    pub(crate) fn device_carries_labels(&self, hop: &NextHop) -> bool {
        let link = self.links.get(usize::from(hop.link));
        link.is_some_and(|link| self.port(link.port).capabilities.labels)
    }

    /// Sets whether all hashes of received frames are right ([`RxQueue::computes_hashes`]); by default they
    /// are checked when a flow is not found.
    ///
    /// [`RxQueue::computes_hashes`]: crate::device::RxQueue::computes_hashes
    pub fn set_trusts_hashes(&mut self, on: bool) {
        self.trusts_hashes = on;
    }

    /// Prepares the hashing of transmitted flows.
    pub(super) fn enable_labels(&mut self) {
        self.flow_hasher.get_or_insert_with(|| Toeplitz::new(&KEY));
    }

    /// Returns the hash by which the receiver of a TCP or UDP packet selects its shard. `None` if no device
    /// carries labels.
    pub(crate) fn tx_flow_hash(&self, src: SocketAddr, dst: SocketAddr) -> Option<u32> {
        Some(self.flow_hasher.as_ref()?.hash(src.ip(), dst.ip(), Some((src.port(), dst.port()))))
    }

    /// Returns whether a frame of the burst, with a TCP segment of a flow that this shard does not know,
    /// arrived at this shard only because its sender computed a wrong hash. The frame is then recorded as
    /// misrouted and passed to its owner shard. Frames from other shards carry no hash, so no frame is passed
    /// on twice.
    #[inline(always)]
    pub(crate) fn is_misrouted(&mut self, frame: Option<u16>, burst: &RxBurst<'_>, key: &FlowKey) -> bool {
        self.steering.is_some() && !self.trusts_hashes && self.has_wrong_label_hash(frame, burst, key)
    }

    #[cold]
    #[inline(never)]
    fn has_wrong_label_hash(&mut self, frame: Option<u16>, burst: &RxBurst<'_>, key: &FlowKey) -> bool {
        let (Some(steering), Some(index)) = (&self.steering, frame) else { return false };
        let labelled = burst.get(usize::from(index)).is_some_and(|frame| frame.label.hash().is_some());
        if !labelled || steering.owns_flow(key.remote_addr(), key.local_addr()) {
            return false;
        }
        self.misrouted |= 1 << index;
        true
    }

    /// Takes the set of misrouted frames of the last received burst: frames of other shards that arrived here
    /// because of a wrong hash. Bit 0 is the first frame. These frames have not been processed.
    #[inline]
    pub fn take_misrouted(&mut self) -> u64 {
        core::mem::take(&mut self.misrouted)
    }
}
