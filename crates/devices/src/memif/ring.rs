//! The layout of a ring in shared memory.
//!
//! ```text
//!   byte   0  cookie        u32   0x3E31F20
//!          4  flags         u16   bit 0: the consumer of the ring wants no interrupts
//!          6  head          u16   written by the client
//!         64  tail          u16   written by the server
//!        128  descriptors, 16 bytes each:
//!               0  flags    u16   bit 0: the frame continues in the next descriptor
//!               2  region   u16
//!               4  length   u32
//!               8  offset   u32
//!              12  metadata u32
//! ```
//!
//! Indices count up and wrap at 65,536; a descriptor is at `index % size`. On a ring to the server, the
//! client sends frames by advancing the head, and the server returns buffers by advancing the tail. On a ring
//! to the client, the client offers empty buffers by advancing the head, and the server sends frames by
//! filling them and advancing the tail.

use crate::shared_region::Region;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const COOKIE: u32 = 0x03e3_1f20;
const FLAGS_AT: usize = 4;
const HEAD_AT: usize = 6;
const TAIL_AT: usize = 64;
const DESCRIPTORS_AT: usize = 128;
const DESCRIPTOR_BYTES: usize = 16;
/// Alignment of rings, which allows to read a descriptor as two words.
const ALIGN: usize = 8;
const FLAG_MASK_INT: u16 = 1;
const FLAG_NEXT: u16 = 1;

/// Range of ring sizes as powers of two. At the largest size, head and tail still distinguish a full ring
/// from an empty one.
pub(super) const LOG2_MIN: u8 = 1;
pub(super) const LOG2_MAX: u8 = 14;

/// Returns the bytes of a ring with its descriptors.
pub(super) const fn ring_bytes(log2: u8) -> usize {
    DESCRIPTORS_AT + (DESCRIPTOR_BYTES << log2)
}

/// Location of a part of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemifDescriptor {
    /// True if the frame continues in the next descriptor.
    pub(super) next: bool,
    pub(super) region: u16,
    pub(super) length: u32,
    pub(super) offset: u32,
}

/// A ring in shared memory. All of it is inside its region, whatever the peer writes.
#[derive(Clone, Debug)]
pub(super) struct MemifRing {
    region: Arc<Region>,
    at: usize,
    log2: u8,
}

impl MemifRing {
    /// Creates a view of a ring. Returns `None` if the ring is not inside the region, not aligned, or of a
    /// size that the protocol does not allow.
    pub(super) fn new(region: &Arc<Region>, at: usize, log2: u8) -> Option<Self> {
        let valid = (LOG2_MIN..=LOG2_MAX).contains(&log2)
            && at.is_multiple_of(ALIGN)
            && region.contains(at, ring_bytes(log2));
        valid.then(|| Self { region: region.clone(), at, log2 })
    }

    /// Returns the number of descriptors.
    pub(super) fn size(&self) -> u16 {
        1 << self.log2
    }

    /// Initialises an empty ring.
    pub(super) fn initialise(&self) {
        self.region.u32(self.at).store(COOKIE, Ordering::Relaxed);
        self.region.u16(self.at + FLAGS_AT).store(FLAG_MASK_INT, Ordering::Relaxed);
        self.set_head(0);
        self.set_tail(0);
    }

    pub(super) fn has_cookie(&self) -> bool {
        self.region.u32(self.at).load(Ordering::Relaxed) == COOKIE
    }

    pub(super) fn head(&self) -> u16 {
        self.region.u16(self.at + HEAD_AT).load(Ordering::Acquire)
    }

    pub(super) fn set_head(&self, head: u16) {
        self.region.u16(self.at + HEAD_AT).store(head, Ordering::Release);
    }

    pub(super) fn tail(&self) -> u16 {
        self.region.u16(self.at + TAIL_AT).load(Ordering::Acquire)
    }

    pub(super) fn set_tail(&self, tail: u16) {
        self.region.u16(self.at + TAIL_AT).store(tail, Ordering::Release);
    }

    /// Tells the other side whether this side, which consumes from the ring, wants interrupts.
    pub(super) fn set_interrupts_enabled(&self, wanted: bool) {
        let flags = if wanted { 0 } else { FLAG_MASK_INT };
        self.region.u16(self.at + FLAGS_AT).store(flags, Ordering::Relaxed);
    }

    /// Returns whether the other side, which consumes from the ring, wants interrupts.
    pub(super) fn are_interrupts_enabled(&self) -> bool {
        self.region.u16(self.at + FLAGS_AT).load(Ordering::Relaxed) & FLAG_MASK_INT == 0
    }

    fn descriptor_at(&self, index: u16) -> usize {
        let slot = usize::from(index & (self.size() - 1));
        self.at + DESCRIPTORS_AT + slot * DESCRIPTOR_BYTES
    }

    /// Returns a copy of a descriptor, which later writes of the peer do not affect.
    pub(super) fn descriptor(&self, index: u16) -> MemifDescriptor {
        let at = self.descriptor_at(index);
        let low = self.region.u64(at).load(Ordering::Relaxed).to_ne_bytes();
        let high = self.region.u64(at + 8).load(Ordering::Relaxed).to_ne_bytes();
        MemifDescriptor {
            next: u16::from_ne_bytes([low[0], low[1]]) & FLAG_NEXT != 0,
            region: u16::from_ne_bytes([low[2], low[3]]),
            length: u32::from_ne_bytes([low[4], low[5], low[6], low[7]]),
            offset: u32::from_ne_bytes([high[0], high[1], high[2], high[3]]),
        }
    }

    /// Writes a descriptor. The peer reads it once head or tail has passed it.
    pub(super) fn set_descriptor(&self, index: u16, descriptor: MemifDescriptor) {
        let at = self.descriptor_at(index);
        let [f0, f1] = u16::from(descriptor.next).to_ne_bytes();
        let [r0, r1] = descriptor.region.to_ne_bytes();
        let [l0, l1, l2, l3] = descriptor.length.to_ne_bytes();
        let [o0, o1, o2, o3] = descriptor.offset.to_ne_bytes();
        let (low, high) = ([f0, f1, r0, r1, l0, l1, l2, l3], [o0, o1, o2, o3, 0, 0, 0, 0]);
        self.region.u64(at).store(u64::from_ne_bytes(low), Ordering::Relaxed);
        self.region.u64(at + 8).store(u64::from_ne_bytes(high), Ordering::Relaxed);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn bytes(region: &Region, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert!(region.copy_out(at, &mut bytes));
        bytes
    }

    #[test]
    fn fields_have_the_offsets_of_the_protocol() {
        let region = Arc::new(Region::create("ginnel-memif", 4096).expect("memory").0);
        let ring = MemifRing::new(&region, 64, 2).expect("it fits");
        ring.initialise();
        ring.set_interrupts_enabled(true);
        ring.set_head(0x0102);
        ring.set_tail(0x0304);
        let descriptor =
            MemifDescriptor { next: true, region: 0x0506, length: 0x0708_090a, offset: 0x0b0c_0d0e };
        ring.set_descriptor(5, descriptor);
        assert_eq!(ring.descriptor(1), descriptor);
        assert_eq!(bytes(&region, 64, 8), [0x20, 0x1f, 0xe3, 0x03, 0, 0, 0x02, 0x01]);
        assert_eq!(bytes(&region, 128, 2), [0x04, 0x03]);
        let expected = [1, 0, 6, 5, 10, 9, 8, 7, 14, 13, 12, 11, 0, 0, 0, 0];
        assert_eq!(bytes(&region, 64 + 128 + 16, 16), expected);
        ring.set_interrupts_enabled(false);
        assert_eq!(bytes(&region, 68, 2), [1, 0]);
        assert!(ring.has_cookie() && !ring.are_interrupts_enabled());
    }

    #[test]
    fn ring_outside_its_region_is_refused() {
        let region = Arc::new(Region::create("ginnel-memif", 128 + 64).expect("memory").0);
        assert!(MemifRing::new(&region, 0, 2).is_some());
        for (at, log2) in [(8, 2), (0, 3), (0, 0), (0, 15), (0, 255), (4, 1), (usize::MAX - 7, 1)] {
            assert!(MemifRing::new(&region, at, log2).is_none(), "{at} {log2}");
        }
    }
}
