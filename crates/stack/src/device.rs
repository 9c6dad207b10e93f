//! The interface through which frames enter and leave the engine. The engine defines it because it is the
//! consumer; crate `ginnel-devices` implements it.
//!
//! A device has two independent halves, so that frames of a received burst can still be read while answers to
//! them are built in place:
//!
//! * [`RxQueue`] lends a burst of received frames. They stay valid until the next call on the queue.
//! * [`TxQueue`] lends room for one frame at a time, which the engine fills in place.

use crate::time::Instant;
use arrayvec::ArrayVec;
use core::sync::atomic::{AtomicU8, Ordering};
use serde::{Deserialize, Serialize};

/// Largest number of frames in one burst: enough to overlap memory latencies, few enough for the headers of
/// all frames to stay in the first-level cache.
pub const BURST_FRAMES_MAX: usize = 64;

/// Bytes of an Ethernet header without VLAN tag.
pub const ETHERNET_HEADER_BYTES: usize = 14;

/// State of the transport checksum of a received frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RxChecksum {
    /// Unknown: the engine must verify it.
    #[default]
    Unverified,
    /// The device verified it.
    Verified,
    /// The frame never crossed a wire: the checksum field contains only the pseudo-header sum, and the frame
    /// is trusted (virtio `VIRTIO_NET_HDR_F_NEEDS_CSUM`). A layer that puts it on a wire must complete the
    /// checksum first: the sum runs from byte `start` of the frame to its end and is stored at `start +
    /// offset`.
    Partial {
        /// First byte that the sum covers, counted from the start of the frame.
        start: u16,
        /// Position of the checksum field, counted from `start`.
        offset: u16,
    },
}

/// Kind of segmentation that cuts a super-frame into wire segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GsoKind {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP datagrams of equal size (USO), over IPv4 or IPv6.
    Udp,
}

/// A super-frame: one header, and a payload that is cut into segments of `size` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// Kind of segmentation.
    pub kind: GsoKind,
    /// Payload bytes of each segment except the last one.
    pub size: u16,
    /// Bytes of all headers before the payload, including Ethernet.
    pub header_len: u16,
    /// True if the first segment has CWR, which the other segments must not have (virtio
    /// `VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
}

/// Hash and priority of the flow that a frame belongs to. Four bytes, to keep the descriptions of frames
/// small.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Label(u32);

impl Label {
    /// No hash, and the default priority.
    pub const NONE: Self = Self(0);
    /// Number of low bits of a hash that are stored. The stack's own indirection table uses the lowest seven,
    /// the tables of adapters at most the lowest twelve.
    pub const HASH_BITS: u32 = 28;
    /// The highest priority (IEEE 802.1Q has eight of them).
    pub const PRIORITY_MAX: u8 = 7;

    pub(crate) const HASH_MASK: u32 = (1 << Self::HASH_BITS) - 1;
    const HAS_HASH: u32 = 1 << Self::HASH_BITS;

    /// Returns a label with the low bits of a hash, if there is one, and a priority, which is limited to
    /// [`Label::PRIORITY_MAX`].
    #[must_use]
    pub const fn new(hash: Option<u32>, priority: u8) -> Self {
        let priority = if priority > Self::PRIORITY_MAX { Self::PRIORITY_MAX } else { priority };
        let hash = match hash {
            Some(hash) => Self::HAS_HASH | hash & Self::HASH_MASK,
            None => 0,
        };
        Self(hash | (priority as u32) << (Self::HASH_BITS + 1))
    }

    /// Returns the low [`Label::HASH_BITS`] bits of the Toeplitz hash of addresses and ports with Microsoft's
    /// key ([`crate::steering`]), if it was computed.
    #[must_use]
    pub const fn hash(self) -> Option<u32> {
        if self.0 & Self::HAS_HASH == 0 { None } else { Some(self.0 & Self::HASH_MASK) }
    }

    /// Returns the label without its hash.
    #[must_use]
    pub const fn without_hash(self) -> Self {
        Self(self.0 & !(Self::HAS_HASH | Self::HASH_MASK))
    }

    /// Returns whether the priority is not the default one.
    #[must_use]
    pub const fn is_prioritized(self) -> bool {
        self.0 >> (Self::HASH_BITS + 1) != 0
    }

    /// Returns the priority, from 0, the default, to [`Label::PRIORITY_MAX`]. [`crate::priority`] defines
    /// their order.
    #[must_use]
    pub const fn priority(self) -> u8 {
        (self.0 >> (Self::HASH_BITS + 1)) as u8
    }

    /// Returns the label as a number, for devices that carry it. Every number is a label.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns the label with this number, the inverse of [`Label::bits`].
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self(if bits & Self::HAS_HASH == 0 { bits & !Self::HASH_MASK } else { bits })
    }
}

impl core::fmt::Debug for Label {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Label").field("hash", &self.hash()).field("priority", &self.priority()).finish()
    }
}

/// A received frame, lent by its queue.
#[derive(Clone, Copy, Debug)]
pub struct RxFrame<'a> {
    /// Bytes from the destination MAC address on, without FCS.
    pub bytes: &'a [u8],
    /// State of the transport checksum.
    pub checksum: RxChecksum,
    /// Present if the frame is a super-frame.
    pub gso: Option<Gso>,
    /// Knowledge of the sender or the device about the flow. A frame stays on the shard that received it if
    /// the hash says so, and its owner is looked up again if that shard does not know its TCP flow; frames of
    /// a higher priority are processed first, and dropped last under overload. So a wrong label affects only
    /// the time of processing and what is dropped, with one exception: among UDP sockets that share a port
    /// (`SO_REUSEPORT`) the hash selects the socket, so a sender with a wrong hash selects the socket of its
    /// own datagrams.
    pub label: Label,
}

impl<'a> RxFrame<'a> {
    /// Returns a frame without a checksum state, segmentation or label.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, checksum: RxChecksum::Unverified, gso: None, label: Label::NONE }
    }
}

/// The frames of one burst.
pub type RxBurst<'a> = ArrayVec<RxFrame<'a>, BURST_FRAMES_MAX>;

/// Requests of the engine to the device for one frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxMeta {
    /// If set, the checksum field contains only the pseudo-header sum: the device sums from `start` to the
    /// end of each segment and stores the result at `start + offset`. Used only if
    /// [`Capabilities::tx_checksum`] is set.
    pub partial_checksum: Option<(u16, u16)>,
    /// If set, the device segments the frame. Used only if the frame has at most
    /// [`Capabilities::gso_bytes_max`] bytes. A super-frame always has a partial checksum.
    pub gso: Option<Gso>,
    /// Label of the frame. Devices that cannot carry it ignore it.
    pub label: Label,
}

impl TxMeta {
    /// Requests nothing.
    pub const NONE: Self = Self { partial_checksum: None, gso: None, label: Label::NONE };
}

/// Capabilities of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// MAC address of the device.
    pub mac: [u8; 6],
    /// Largest IP packet in bytes (without Ethernet header): 68 … 65,535 for IPv4, 1,280 … 65,535 for IPv6.
    pub mtu: usize,
    /// True if the device completes TCP and UDP checksums ([`TxMeta::partial_checksum`]).
    pub tx_checksum: bool,
    /// Largest TCP super-frame in bytes that the device accepts, including the Ethernet header; 0 if it
    /// accepts none.
    pub gso_bytes_max: usize,
    /// True if the device segments UDP super-frames, too (USO).
    pub uso: bool,
    /// True if the device can carry [`TxMeta::label`] to the receiver of the frame, so labels have to be
    /// made.
    pub labels: bool,
}

/// The receiving half of a device.
pub trait RxQueue {
    /// Appends received frames to `burst` until it is full or none are left. Never blocks.
    ///
    /// The frames are valid until the next call of any method of this queue; then they are returned to the
    /// device. `now` is for layers that delay frames; devices ignore it.
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>);

    /// Returns when the next frame is available although nothing wakes the file descriptor (a layer delays
    /// it); `None` if no frame is delayed.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    /// Prepares for sleep: from now on a frame that arrives makes [`RxQueue::wake_fd`] readable. Returns
    /// false if frames are available already, in which case the caller must not sleep.
    fn arm(&mut self) -> bool {
        true
    }

    /// Returns the file descriptor to sleep on, if the device has one.
    fn wake_fd(&self) -> Option<std::os::fd::RawFd> {
        None
    }

    /// Returns whether the device itself computes the hashes in the labels of received frames, as an adapter
    /// does, so that no sender can have made a wrong one.
    fn computes_hashes(&self) -> bool {
        false
    }

    /// Returns whether the device was removed permanently (for example, the interface was deleted): no frame
    /// will ever arrive. The caller must not sleep on its descriptor, which may stay readable forever.
    fn is_gone(&self) -> bool {
        false
    }

    /// Reports the counters of both halves besides frames and bytes: what was dropped, and why. Names and
    /// order never change. Counters that all queues of a device share are reported by one of them.
    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        let _ = report;
    }

    /// Returns the queue below this layer, if the layer was made to be put around a queue and to be removed
    /// while the queue is in use.
    fn remove_layer(self: Box<Self>) -> Option<Box<dyn RxQueue + Send>> {
        None
    }
}

/// Senders of frames that wait when a device refuses a frame, with their class of priority
/// ([`crate::priority`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TxClass {
    /// Connections. They try again after all others have tried.
    Connections(u8),
    /// Sockets whose datagrams are sent when they are written.
    Datagrams(u8),
}

/// The sending half of a device.
pub trait TxQueue {
    /// Returns the capabilities, which are constant.
    fn capabilities(&self) -> Capabilities;

    /// Returns room for one frame of up to `len` bytes (at most `max(mtu + 18, gso_bytes_max)`: 18 is an
    /// Ethernet header with VLAN tag). Its contents are undefined. `None` if the queue is full: try again
    /// after [`TxQueue::flush`], or drop the frame. Until the next call on the queue the room can be read,
    /// also after the borrow has ended, so that a layer can copy a frame before it is committed.
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]>;

    /// Sends the first `len` bytes of the room that was reserved last. The queue may keep the frame until
    /// [`TxQueue::flush`]. Room that was reserved and not committed is taken back by the next `reserve`.
    fn commit(&mut self, len: usize, meta: TxMeta);

    /// Returns whether at least `frames` frames wait in the device for its receiver or for the wire; a frame
    /// in several buffers counts as that many. False for a device that cannot tell, also if `frames` is 0.
    fn has_backlog(&mut self, frames: usize) -> bool {
        let _ = frames;
        false
    }

    /// Sets the class of the frames that are reserved from now on, for a layer that refuses frames of low
    /// classes while others wait in the device. `None`: they are not refused for that.
    fn select_class(&mut self, class: Option<TxClass>) {
        let _ = class;
    }

    /// Returns the interface for super-frames whose payload is outside of the reserved room, if the device
    /// has one: a device that copies frames anyway saves a copy. Either every call returns it or none.
    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        None
    }

    /// Passes all committed frames to the device. `now` is for layers that delay frames; devices ignore it.
    fn flush(&mut self, now: Instant);

    /// Returns when `flush` must be called again although nothing was committed (a layer delays frames);
    /// `None` if no frame is delayed.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    /// Returns the queue below this layer, if the layer was made to be put around a queue and to be removed
    /// while the queue is in use.
    fn remove_layer(self: Box<Self>) -> Option<Box<dyn TxQueue + Send>> {
        None
    }
}

/// Bytes of a payload in place.
#[derive(Clone, Copy, Debug)]
pub enum PayloadPiece<'a> {
    /// Bytes that do not change.
    Private(&'a [u8]),
    /// Bytes in memory that others may write at any time: they must be copied once, and only the copy may be
    /// examined.
    Shared(&'a [AtomicU8]),
}

impl<'a> PayloadPiece<'a> {
    /// Returns the number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Self::Private(bytes) => bytes.len(),
            Self::Shared(bytes) => bytes.len(),
        }
    }

    /// Returns whether the piece has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the first `count` bytes, and the rest.
    ///
    /// # Panics
    /// If the piece has fewer bytes.
    #[inline]
    pub fn split_at(self, count: usize) -> (Self, Self) {
        match self {
            Self::Private(bytes) => {
                let (first, rest) = bytes.split_at(count);
                (Self::Private(first), Self::Private(rest))
            }
            Self::Shared(bytes) => {
                let (first, rest) = bytes.split_at(count);
                (Self::Shared(first), Self::Shared(rest))
            }
        }
    }

    /// Copies the piece to `out`, which must have its length: byte by byte if others may write concurrently.
    /// Devices with a faster method use that.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_to(&self, out: &mut [u8]) {
        match self {
            Self::Private(bytes) => out.copy_from_slice(bytes),
            Self::Shared(bytes) => {
                assert_eq!(bytes.len(), out.len(), "the lengths differ");
                for (to, from) in out.iter_mut().zip(*bytes) {
                    *to = from.load(Ordering::Relaxed);
                }
            }
        }
    }
}

/// Sends frames whose payload is elsewhere, in pieces: see [`TxQueue::gather`].
pub trait GatherTx {
    /// Sends a frame that consists of the first `head` bytes of the room that was reserved last, followed by
    /// all `pieces`. The room is as long as the complete frame. Otherwise like [`TxQueue::commit`].
    fn commit_gathered(
        &mut self,
        head: usize,
        pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
        meta: TxMeta,
    );
}

impl<T: RxQueue + ?Sized> RxQueue for Box<T> {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        (**self).rx_burst(now, burst);
    }
    fn next_deadline(&self) -> Option<Instant> {
        (**self).next_deadline()
    }
    fn arm(&mut self) -> bool {
        (**self).arm()
    }
    fn wake_fd(&self) -> Option<std::os::fd::RawFd> {
        (**self).wake_fd()
    }
    fn computes_hashes(&self) -> bool {
        (**self).computes_hashes()
    }
    fn is_gone(&self) -> bool {
        (**self).is_gone()
    }
    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        (**self).counters(report);
    }
    fn remove_layer(self: Box<Self>) -> Option<Box<dyn RxQueue + Send>> {
        (*self).remove_layer()
    }
}

impl<T: TxQueue + ?Sized> TxQueue for Box<T> {
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        (**self).reserve(len)
    }
    fn commit(&mut self, len: usize, meta: TxMeta) {
        (**self).commit(len, meta);
    }
    fn has_backlog(&mut self, frames: usize) -> bool {
        (**self).has_backlog(frames)
    }
    fn select_class(&mut self, class: Option<TxClass>) {
        (**self).select_class(class);
    }
    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        (**self).gather()
    }
    fn flush(&mut self, now: Instant) {
        (**self).flush(now);
    }
    fn next_deadline(&self) -> Option<Instant> {
        (**self).next_deadline()
    }
    fn remove_layer(self: Box<Self>) -> Option<Box<dyn TxQueue + Send>> {
        (*self).remove_layer()
    }
}

/// A device: both halves, boxed.
pub struct Device {
    /// Receiving half.
    pub rx: Box<dyn RxQueue + Send>,
    /// Sending half.
    pub tx: Box<dyn TxQueue + Send>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_keeps_hash_and_priority() {
        let low = (1 << Label::HASH_BITS) - 1;
        for hash in [None, Some(0), Some(1), Some(low), Some(u32::MAX)] {
            for priority in [0, 1, 7, 8, 255] {
                let label = Label::new(hash, priority);
                assert_eq!((label.hash(), label.priority()), (hash.map(|hash| hash & low), priority.min(7)));
                assert_eq!(Label::from_bits(label.bits()), label);
                assert_eq!(label == Label::NONE, hash.is_none() && priority == 0);
            }
        }
    }

    #[test]
    fn every_number_is_a_canonical_label() {
        for bits in [0, 1, u32::MAX, 1 << 28, 7 << 29, (7 << 29) + 5] {
            let label = Label::from_bits(bits);
            assert_eq!(label, Label::new(label.hash(), label.priority()), "{bits:#x}");
        }
    }

    /// They are written and read for each frame.
    #[test]
    fn frame_descriptions_are_small() {
        assert_eq!((size_of::<RxFrame<'_>>(), size_of::<TxMeta>()), (32, 16));
    }
}
