//! The port through which frames enter and leave the engine. The engine defines it because it is the
//! consumer; crate `ginnel-devices` implements it.
//!
//! A device is two independent halves, so that frames of a received burst can still be read while answers to them
//! are built in place:
//!
//! * [`RxQueue`] lends a burst of received frames. They stay valid until the next call on the queue.
//! * [`TxQueue`] lends room for one frame at a time, which the engine fills in place.

use crate::time::Instant;
use arrayvec::ArrayVec;
use core::sync::atomic::{AtomicU8, Ordering};

/// Largest number of frames in one burst: enough to hide memory latency behind each other, small enough for
/// headers of all of them to stay in the first-level cache.
pub const BURST_FRAMES_MAX: usize = 64;

/// Bytes of an Ethernet header without VLAN tag.
pub const ETHERNET_HEADER_BYTES: usize = 14;

/// What is known about the transport checksum of a received frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RxChecksum {
    /// Nothing: the engine must verify it.
    #[default]
    Unverified,
    /// The device verified it.
    Verified,
    /// The frame never crossed a wire: the checksum field holds only the pseudo-header sum, and is to be trusted
    /// (virtio `VIRTIO_NET_HDR_F_NEEDS_CSUM`). A layer that puts it on a wire must complete it first:
    /// the sum runs from byte `start` of the frame to its end and is stored at `start + offset`.
    Partial {
        /// First byte the sum covers, counted from the start of the frame.
        start: u16,
        /// Where the checksum field is, counted from `start`.
        offset: u16,
    },
}

/// What kind of segmentation turns a super-frame into wire segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GsoKind {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP datagrams of equal size (USO), over IPv4 or IPv6.
    Udp,
}

/// A super-frame: one header, and a payload to be cut into segments of `size` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// How to cut.
    pub kind: GsoKind,
    /// Payload bytes of each segment but the last.
    pub size: u16,
    /// Bytes of all headers in front of the payload, Ethernet included.
    pub header_len: u16,
    /// The first segment carries CWR, the others must not (virtio `VIRTIO_NET_HDR_GSO_ECN`).
    pub ecn: bool,
}

/// What is known about the flow that a frame belongs to: a hash, and a priority. Four bytes, so that frames and what is asked for them stay as
/// small as they were.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Label(u32);

impl Label {
    /// No hash, and the usual priority.
    pub const NONE: Self = Self(0);
    /// Low bits of a hash that are kept: indirection tables choose by the lowest seven.
    pub const HASH_BITS: u32 = 28;
    /// The highest priority (IEEE 802.1Q has eight of them).
    pub const PRIORITY_MAX: u8 = 7;

    pub(crate) const HASH_MASK: u32 = (1 << Self::HASH_BITS) - 1;
    const HAS_HASH: u32 = 1 << Self::HASH_BITS;

    /// A label with the low bits of a hash, if there is one, and a priority, which is at most [`Label::PRIORITY_MAX`].
    #[must_use]
    pub const fn new(hash: Option<u32>, priority: u8) -> Self {
        let priority = if priority > Self::PRIORITY_MAX { Self::PRIORITY_MAX } else { priority };
        let hash = match hash {
            Some(hash) => Self::HAS_HASH | hash & Self::HASH_MASK,
            None => 0,
        };
        Self(hash | (priority as u32) << (Self::HASH_BITS + 1))
    }

    /// The low [`Label::HASH_BITS`] bits of the Toeplitz hash of addresses and ports under Microsoft's key ([`crate::steering`]), if somebody has
    /// computed it.
    #[must_use]
    pub const fn hash(self) -> Option<u32> {
        if self.0 & Self::HAS_HASH == 0 { None } else { Some(self.0 & Self::HASH_MASK) }
    }

    /// The same without the hash.
    #[must_use]
    pub const fn without_hash(self) -> Self {
        Self(self.0 & !(Self::HAS_HASH | Self::HASH_MASK))
    }

    /// Whether it has a priority other than the usual one.
    #[must_use]
    pub const fn is_prioritized(self) -> bool {
        self.0 >> (Self::HASH_BITS + 1) != 0
    }

    /// From 0, the usual one, to [`Label::PRIORITY_MAX`]. Which of them go first, [`crate::priority`] says.
    #[must_use]
    pub const fn priority(self) -> u8 {
        (self.0 >> (Self::HASH_BITS + 1)) as u8
    }

    /// As a number, for devices that carry it. Every number is a label.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The reverse of [`Label::bits`].
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
    /// From the destination MAC address on, without FCS.
    pub bytes: &'a [u8],
    /// State of the transport checksum.
    pub checksum: RxChecksum,
    /// Set if the frame is a super-frame.
    pub gso: Option<Gso>,
    /// What the sender or the device knows about its flow. A frame stays on the shard that received it if the hash says so, and is looked
    /// at again if that shard does not know its TCP flow; those of a higher priority are processed before others. So nothing but time depends on it, with one exception: among UDP sockets that share
    /// a port (`SO_REUSEPORT`) it chooses, and whoever says a wrong one chooses for his own datagrams.
    pub label: Label,
}

impl<'a> RxFrame<'a> {
    /// A frame of which nothing is known.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, checksum: RxChecksum::Unverified, gso: None, label: Label::NONE }
    }
}

/// The frames of one burst.
pub type RxBurst<'a> = ArrayVec<RxFrame<'a>, BURST_FRAMES_MAX>;

/// What the engine asks of the device for one frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxMeta {
    /// If set, the checksum field holds the pseudo-header sum only: the device sums from `start` to the end of each segment
    /// and stores the result at `start + offset`. Only used if [`Capabilities::tx_checksum`].
    pub partial_checksum: Option<(u16, u16)>,
    /// If set, the device cuts the frame. Only used if the frame is at most [`Capabilities::gso_bytes_max`] long.
    /// A super-frame always has a partial checksum.
    pub gso: Option<Gso>,
    /// What is known about the frame's flow. Devices that can carry it do, others leave it out.
    pub label: Label,
}

impl TxMeta {
    /// Nothing is asked for.
    pub const NONE: Self = Self { partial_checksum: None, gso: None, label: Label::NONE };
}

/// What a device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The device's own MAC address.
    pub mac: [u8; 6],
    /// Largest IP packet in bytes (without Ethernet header): 68 … 65,535 for IPv4, 1,280 … 65,535 for IPv6.
    pub mtu: usize,
    /// The device completes TCP and UDP checksums ([`TxMeta::partial_checksum`]).
    pub tx_checksum: bool,
    /// Largest super-frame in bytes that the device takes for TCP, Ethernet header included; 0 if it takes none.
    pub gso_bytes_max: usize,
    /// The device cuts UDP super-frames too (USO).
    pub uso: bool,
    /// The device can carry [`TxMeta::label`] to whoever receives the frame: it is worth making one.
    pub labels: bool,
}

/// The receiving half of a device.
pub trait RxQueue {
    /// Appends received frames to `burst` until it is full or nothing is waiting. Never blocks.
    ///
    /// The frames stay valid until the next call of any method of this queue; then they return to the device.
    /// `now` is for layers that delay frames; devices ignore it.
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>);

    /// When the next frame will come although nothing wakes the file descriptor (a layer holds it back). `None` if none is held.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    /// Prepares for sleep: from now on a frame that arrives makes [`RxQueue::wake_fd`] readable. Returns false if
    /// frames are waiting already, in which case the caller must not sleep.
    fn arm(&mut self) -> bool {
        true
    }

    /// The file descriptor to sleep on, if the device has one.
    fn wake_fd(&self) -> Option<std::os::fd::RawFd> {
        None
    }

    /// The device is gone for good (somebody deleted the interface): nothing will ever come again. Its descriptor must not be slept on,
    /// for such a one may be readable without end.
    fn is_gone(&self) -> bool {
        false
    }

    /// What the device counts beside frames and bytes, of both halves: what it dropped, and why. Always the same names in the same order. What all queues of
    /// a device share is reported by one of them.
    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        let _ = report;
    }
}

/// The sending half of a device.
pub trait TxQueue {
    /// What the device can do. Constant for its lifetime.
    fn capabilities(&self) -> Capabilities;

    /// Lends room for one frame of up to `len` bytes (at most `max(mtu + 18, gso_bytes_max)`: 18 is an Ethernet header with
    /// VLAN tag). Its contents are undefined. `None` if the queue is full: try again after [`TxQueue::flush`], or drop.
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]>;

    /// Sends the first `len` bytes of the room reserved last. May keep it until [`TxQueue::flush`].
    /// Room reserved but not committed is taken back by the next `reserve`.
    fn commit(&mut self, len: usize, meta: TxMeta);

    /// The way to send super-frames whose payload is not in the room that was reserved, if the device has one: one that copies frames anyway spares a copy. Either it
    /// always has or never.
    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        None
    }

    /// Hands all committed frames to the device. `now` is for layers that delay frames; devices ignore it.
    fn flush(&mut self, now: Instant);

    /// When `flush` must be called again although nothing was committed (a layer holds frames back). `None` if none is held.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }
}

/// Bytes of a payload where they lie.
#[derive(Clone, Copy, Debug)]
pub enum PayloadPiece<'a> {
    /// They do not change.
    Private(&'a [u8]),
    /// They lie in memory that others may write at any time: to be copied, once, and whoever looks at them looks at the copy.
    Shared(&'a [AtomicU8]),
}

impl<'a> PayloadPiece<'a> {
    /// How many bytes it has.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Self::Private(bytes) => bytes.len(),
            Self::Shared(bytes) => bytes.len(),
        }
    }

    /// Whether it has none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `count` bytes, and the rest.
    ///
    /// # Panics
    /// If it has fewer.
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

    /// Copies it to `out`, which is as long: byte by byte if others may write there meanwhile. Devices that have a faster way use that.
    ///
    /// # Panics
    /// If it is not.
    pub fn copy_to(&self, out: &mut [u8]) {
        match self {
            Self::Private(bytes) => out.copy_from_slice(bytes),
            Self::Shared(bytes) => {
                assert_eq!(bytes.len(), out.len(), "as long as the piece");
                for (to, from) in out.iter_mut().zip(*bytes) {
                    *to = from.load(Ordering::Relaxed);
                }
            }
        }
    }
}

/// Sends frames whose payload lies elsewhere, in pieces: see [`TxQueue::gather`].
pub trait GatherTx {
    /// Sends a frame that begins with the first `head` bytes of the room reserved last and goes on with all `pieces`. The room is as long as the whole frame. Otherwise as
    /// [`TxQueue::commit`].
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
    fn is_gone(&self) -> bool {
        (**self).is_gone()
    }
    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        (**self).counters(report);
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
    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        (**self).gather()
    }
    fn flush(&mut self, now: Instant) {
        (**self).flush(now);
    }
    fn next_deadline(&self) -> Option<Instant> {
        (**self).next_deadline()
    }
}

/// A whole device: both halves, boxed.
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
    fn a_label_keeps_what_it_was_made_of() {
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
    fn every_number_is_a_label_and_without_a_hash_there_is_one_way_to_say_so() {
        for bits in [0, 1, u32::MAX, 1 << 28, 7 << 29, (7 << 29) + 5] {
            let label = Label::from_bits(bits);
            assert_eq!(label, Label::new(label.hash(), label.priority()), "{bits:#x}");
        }
    }

    /// They are written and read for each frame.
    #[test]
    fn what_is_known_of_a_frame_is_small() {
        assert_eq!((size_of::<RxFrame<'_>>(), size_of::<TxMeta>()), (32, 16));
    }
}
