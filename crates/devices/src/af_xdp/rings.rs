//! Descriptor rings in memory that the kernel maps, too. One side writes the producer index, the other side
//! the consumer index.
#![allow(unsafe_code)] // reads and writes shared memory by address

use super::umem::Mapping;
use rustix::net::xdp::XdpRingOffset;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// `XDP_RING_NEED_WAKEUP`.
const NEED_WAKEUP: u32 = 1;

/// Element of a ring. It consists of integers, so that all bytes are valid.
pub(super) trait RingEntry: Copy {}

impl RingEntry for u64 {}

/// `struct xdp_desc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(super) struct XdpDescriptor {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) options: u32,
}

/// Option flag: the frame continues in the next descriptor (`XDP_PKT_CONTD`).
pub(super) const CONTINUED: u32 = 1;

impl RingEntry for XdpDescriptor {}

/// A ring in shared memory.
struct RingView<T> {
    mapping: Arc<Mapping>,
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: Option<NonNull<AtomicU32>>,
    entries: NonNull<T>,
    /// Number of entries, a power of two.
    size: u32,
}

// SAFETY: the addresses belong to the mapping, which is not bound to a thread.
unsafe impl<T: RingEntry> Send for RingView<T> {}

impl<T: RingEntry> RingView<T> {
    /// Creates a view of a ring. `offsets` come from the kernel and give the offsets of the indices, the
    /// flags and the entries in the mapping.
    fn new(mapping: Arc<Mapping>, offsets: &XdpRingOffset, size: u32) -> Self {
        assert!(size.is_power_of_two());
        let word = |offset: u64| {
            let at = mapping.at(offset as usize, 4).cast::<AtomicU32>();
            assert!(at.is_aligned());
            at
        };
        let entries = mapping.at(offsets.desc as usize, size as usize * size_of::<T>()).cast::<T>();
        assert!(entries.is_aligned());
        Self {
            producer: word(offsets.producer),
            consumer: word(offsets.consumer),
            flags: offsets.flags.map(word),
            entries,
            size,
            mapping,
        }
    }

    fn word(&self, at: NonNull<AtomicU32>) -> &AtomicU32 {
        debug_assert!(self.mapping.len() > 0);
        // SAFETY: `new` checked that the word is aligned and inside the mapping, which `self` keeps; the
        // kernel changes it as one word.
        unsafe { at.as_ref() }
    }

    fn entry(&self, index: u32) -> NonNull<T> {
        // SAFETY: the masked index is below the number of entries, all of which `new` found inside the
        // mapping.
        unsafe { self.entries.add((index & (self.size - 1)) as usize) }
    }

    fn needs_wakeup(&self) -> bool {
        self.flags.is_some_and(|flags| self.word(flags).load(Ordering::Relaxed) & NEED_WAKEUP != 0)
    }
}

/// Returns the bytes of a mapping that holds a ring of `size` entries.
pub(super) fn mapping_bytes<T>(offsets: &XdpRingOffset, size: u32) -> usize {
    offsets.desc as usize + size as usize * size_of::<T>()
}

/// A ring that this side writes and the kernel reads: the fill ring or the TX ring.
pub(super) struct ProducerRing<T> {
    ring: RingView<T>,
    /// Number of entries written. The kernel sees them when they are published.
    written: u32,
    published: u32,
    /// Entries that can be written before the kernel's index must be read again.
    free: u32,
}

impl<T: RingEntry> ProducerRing<T> {
    pub(super) fn new(mapping: Arc<Mapping>, offsets: &XdpRingOffset, size: u32) -> Self {
        Self { ring: RingView::new(mapping, offsets, size), written: 0, published: 0, free: size }
    }

    /// Writes an entry. Returns false, and writes nothing, if the ring is full.
    #[must_use]
    pub(super) fn push(&mut self, entry: T) -> bool {
        if self.free == 0 {
            let taken = self.ring.word(self.ring.consumer).load(Ordering::Acquire);
            self.free = self.ring.size.saturating_sub(self.written.wrapping_sub(taken));
            if self.free == 0 {
                return false;
            }
        }
        // SAFETY: inside the ring, and the entry is free: the kernel reads it only after it was published.
        unsafe { self.ring.entry(self.written).write(entry) };
        self.written = self.written.wrapping_add(1);
        self.free -= 1;
        true
    }

    /// Makes the written entries visible to the kernel. Returns whether there were new ones.
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.written {
            return false;
        }
        self.published = self.written;
        self.ring.word(self.ring.producer).store(self.written, Ordering::Release);
        true
    }

    /// Returns the number of published entries that the kernel has not consumed.
    pub(super) fn pending(&self) -> u32 {
        self.published.wrapping_sub(self.ring.word(self.ring.consumer).load(Ordering::Acquire))
    }

    /// Returns whether the kernel needs a system call to process published entries.
    pub(super) fn needs_wakeup(&self) -> bool {
        self.ring.needs_wakeup()
    }
}

/// A ring that the kernel writes and this side reads: the RX ring or the completion ring.
pub(super) struct ConsumerRing<T> {
    ring: RingView<T>,
    /// Number of entries read. The kernel reuses them when they are released.
    read: u32,
}

impl<T: RingEntry> ConsumerRing<T> {
    pub(super) fn new(mapping: Arc<Mapping>, offsets: &XdpRingOffset, size: u32) -> Self {
        Self { ring: RingView::new(mapping, offsets, size), read: 0 }
    }

    /// Returns the number of entries that can be read. An index of the kernel beyond the size of the ring
    /// counts as a full ring.
    pub(super) fn available(&self) -> u32 {
        let produced = self.ring.word(self.ring.producer).load(Ordering::Acquire);
        produced.wrapping_sub(self.read).min(self.ring.size)
    }

    /// Returns the size of the ring in entries.
    pub(super) fn size(&self) -> u32 {
        self.ring.size
    }

    /// Returns entry number `ahead`, from 0, of the entries that [`ConsumerRing::available`] counted.
    pub(super) fn peek(&self, ahead: u32) -> T {
        // SAFETY: inside the ring; the kernel wrote the entry before it published it, and does not write to
        // it until it is released. All bytes are valid.
        unsafe { self.ring.entry(self.read.wrapping_add(ahead)).read() }
    }

    /// Returns the next `count` entries to the kernel.
    pub(super) fn release(&mut self, count: u32) {
        if count > 0 {
            self.read = self.read.wrapping_add(count);
            self.ring.word(self.ring.consumer).store(self.read, Ordering::Release);
        }
    }
}

/// The kernel's side of a ring, for tests.
#[cfg(all(test, not(loom)))]
pub(super) mod kernel_side {
    use super::*;

    /// Offsets of a ring that no kernel created.
    pub(in super::super) const OFFSETS: XdpRingOffset =
        XdpRingOffset { producer: 0, consumer: 64, desc: 192, flags: Some(128) };

    pub(in super::super) fn memory<T>(size: u32) -> Arc<Mapping> {
        Arc::new(Mapping::anonymous(mapping_bytes::<T>(&OFFSETS, size)).expect("memory"))
    }

    /// Sets the producer index to a value that only a broken kernel would write.
    pub(in super::super) fn set_producer(memory: &Arc<Mapping>, value: u32) {
        let ring = RingView::<u64>::new(memory.clone(), &OFFSETS, 1);
        ring.word(ring.producer).store(value, Ordering::Release);
    }

    pub(in super::super) fn set_needs_wakeup(memory: &Arc<Mapping>, needs: bool) {
        let ring = RingView::<u64>::new(memory.clone(), &OFFSETS, 1);
        ring.word(ring.flags.expect("flags")).store(u32::from(needs), Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::kernel_side::{OFFSETS, memory, set_needs_wakeup, set_producer};
    use super::*;

    #[test]
    fn entries_stay_ordered_when_indices_wrap() {
        let memory = memory::<u64>(4);
        let mut producer = ProducerRing::<u64>::new(memory.clone(), &OFFSETS, 4);
        let mut consumer = ConsumerRing::<u64>::new(memory.clone(), &OFFSETS, 4);
        let (mut next, mut expected) = (0, 0);
        for round in 0..100u32 {
            let count = round % 5;
            let pushed = (0..count)
                .filter(|_| {
                    producer.push({
                        next += 1;
                        next
                    })
                })
                .count() as u32;
            assert_eq!(pushed, count, "the ring is empty");
            assert_eq!(consumer.available(), 0, "unpublished entries are invisible");
            assert_eq!(producer.publish(), count > 0);
            assert_eq!((consumer.available(), producer.pending()), (count, count));
            for ahead in 0..count {
                expected += 1;
                assert_eq!(consumer.peek(ahead), expected);
            }
            consumer.release(count);
        }
    }

    // limit: descriptors of an AF_XDP ring
    #[test]
    fn full_ring_refuses_entries() {
        let memory = memory::<XdpDescriptor>(2);
        let mut producer = ProducerRing::new(memory.clone(), &OFFSETS, 2);
        let mut consumer = ConsumerRing::<XdpDescriptor>::new(memory, &OFFSETS, 2);
        let entry = XdpDescriptor { address: 5, len: 6, options: CONTINUED };
        assert!(producer.push(entry) && producer.push(entry) && !producer.push(entry));
        producer.publish();
        assert_eq!(consumer.peek(1), entry);
        consumer.release(1);
        assert!(producer.push(entry) && !producer.push(entry));
    }

    #[test]
    fn invalid_index_counts_as_a_full_ring() {
        let memory = memory::<u64>(4);
        let mut consumer = ConsumerRing::<u64>::new(memory.clone(), &OFFSETS, 4);
        for produced in [5, u32::MAX, 1 << 31] {
            set_producer(&memory, produced);
            assert_eq!(consumer.available(), 4);
        }
        consumer.release(4);
        set_producer(&memory, 3);
        assert_eq!(consumer.available(), 4, "an index that moves backwards is invalid, too");
    }

    #[test]
    fn need_wakeup_flag_is_read() {
        let memory = memory::<u64>(4);
        let producer = ProducerRing::<u64>::new(memory.clone(), &OFFSETS, 4);
        assert!(!producer.needs_wakeup());
        set_needs_wakeup(&memory, true);
        assert!(producer.needs_wakeup());
    }
}
