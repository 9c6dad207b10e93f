//! What devices are told of the flow of a packet, and what becomes of a received frame that was told wrong.

use super::{Network, NextHop};
use crate::device::RxBurst;
use crate::steering::toeplitz::{KEY, Toeplitz};
use crate::tcp::FlowKey;
use core::net::SocketAddr;

impl Network {
    /// Whether any device carries labels.
    #[inline(always)]
    pub(crate) fn has_flow_hasher(&self) -> bool {
        self.flow_hasher.is_some()
    }

    /// Whether the device that packets for a hop leave by can carry labels.
    pub(crate) fn device_carries_labels(&self, hop: &NextHop) -> bool {
        let link = self.links.get(usize::from(hop.link));
        link.is_some_and(|link| self.port(link.port).capabilities.labels)
    }

    /// From now on flows of what is sent can be hashed.
    pub(super) fn enable_labels(&mut self) {
        self.flow_hasher.get_or_insert_with(|| Toeplitz::new(&KEY));
    }

    /// The hash that the receiver of a TCP or UDP packet chooses its shard by. `None` if no device carries labels.
    pub(crate) fn tx_flow_hash(&self, src: SocketAddr, dst: SocketAddr) -> Option<u32> {
        Some(self.flow_hasher.as_ref()?.hash(src.ip(), dst.ip(), Some((src.port(), dst.port()))))
    }

    /// Whether a frame of a burst, with a TCP segment of a flow that is not known here, is on this of several shards only because its sender's hash is wrong. Then it goes to its
    /// home. What comes from another shard has no hash, so nothing goes to and fro.
    #[inline(always)]
    pub(crate) fn is_misrouted(
        &mut self,
        frame: Option<(u16, u32)>,
        burst: &RxBurst<'_>,
        key: &FlowKey,
    ) -> bool {
        self.steering.is_some() && self.has_wrong_label_hash(frame, burst, key)
    }

    #[cold]
    #[inline(never)]
    fn has_wrong_label_hash(
        &mut self,
        frame: Option<(u16, u32)>,
        burst: &RxBurst<'_>,
        key: &FlowKey,
    ) -> bool {
        let (Some(steering), Some((index, _))) = (&self.steering, frame) else { return false };
        let labelled = burst.get(usize::from(index)).is_some_and(|frame| frame.label.hash().is_some());
        if !labelled || steering.owns_flow(key.remote_addr(), key.local_addr()) {
            return false;
        }
        self.misrouted |= 1 << index;
        true
    }

    /// Frames of the burst that was received last which belong to other shards whatever their labels say: a bit for each, the lowest for the first frame. Nothing was done with
    /// them.
    #[inline]
    pub fn take_misrouted(&mut self) -> u64 {
        core::mem::take(&mut self.misrouted)
    }
}
