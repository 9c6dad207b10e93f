//! A ring of variable-length records between one producer and one consumer, which may live on different threads.
//!
//! Both sides work in place: the producer lends room inside the ring to whoever writes the frame, the consumer lends
//! slices of the ring to whoever reads it. Positions are byte counts that only grow; a record lies at `position % capacity`
//! and never wraps: where it would, a marker sends the consumer to the start of the next lap.
//!
//! A record is `[header: u64][2 bytes][frame][extension: u64, of super-frames and labelled frames only]`, aligned to 64 bytes so that the two sides
//! never write one cache line at the same time. The frame starts at byte 10: that puts the IP header at 24 and lets a bare
//! 54-byte ACK share the line of its header.
//!
//! ```text
//!   head ≤ consumer position ≤ tail ≤ producer position ≤ head + capacity
//!     [head, consumer position)         lent to the reader of the last burst
//!     [consumer position, tail)         waiting
//!     [tail, producer position)         committed, not yet flushed
//!     [producer position, head + cap.)  free
//! ```
#![allow(unsafe_code)] // lends slices of one buffer to two threads; the positions above keep them apart

use super::sync::{AtomicBool, AtomicUsize, Ordering, fence};
use ginnel_stack::device::{Gso, GsoKind, Label, RxBurst, RxChecksum, RxFrame, TxMeta};
use ginnel_stack::prefetch::{prefetch, prefetch_to_write};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

/// Once this many bytes of a lap are used and the consumer keeps up, the producer starts the next lap early, so that light
/// traffic goes round in a part of the ring that stays in the cache. 64 KiB is a burst of full-sized frames.
pub(super) const LAP_BYTES_MIN: usize = 64 << 10;
/// After so many laps the length of a lap is tried smaller again.
const LAPS_PER_TRIAL: u32 = 16;

/// Records start at multiples of this: one cache line.
const ALIGN: usize = 64;
/// Cache lines of waiting records that are asked for at once: about as many as a core can wait for.
const READ_PREFETCH_LINES_MAX: usize = 16;
/// How far in front of its position the producer takes cache lines back from the consumer's core.
const WRITE_PREFETCH_LINES_AHEAD: usize = 16;
/// No more than these at once: of large frames the processor itself sees what comes.
const WRITE_PREFETCH_LINES_MAX: usize = 8;
/// Where the frame starts inside its record.
const FRAME_AT: usize = 10;
/// Bytes of the extension behind a super-frame or a labelled frame, with the padding that aligns it.
const EXTENSION_BYTES_MAX: usize = 8 + 7;

/// Header bits 0..24 are the length of the frame, bits 27..31 what a label says beside its hash, bits 32..48 and 48..64 the checksum's start and
/// offset.
const LEN_MASK: u64 = (1 << 24) - 1;
const FLAG_SKIP: u64 = 1 << 24;
const FLAG_PARTIAL: u64 = 1 << 25;
const FLAG_EXTENSION: u64 = 1 << 26;
const LABEL_AT: u32 = 27;
const LABEL_MASK: u64 = 0xf;
/// In the extension: it belongs to a super-frame.
const EXTENSION_GSO: u64 = 1 << 35;
/// In the extension: the label's hash.
const EXTENSION_HASH_AT: u32 = 64 - Label::HASH_BITS;

/// Keeps what one side writes away from what the other writes: two lines, because the prefetcher fetches pairs.
#[repr(align(128))]
struct CachePadded<T>(T);

struct SharedRing {
    /// End of what the consumer may read. Written by the producer once per flush.
    tail: CachePadded<AtomicUsize>,
    /// End of what the producer may overwrite (plus capacity). Written by the consumer once per burst.
    head: CachePadded<AtomicUsize>,
    /// The consumer is about to sleep, or sleeps, and wants a wake-up. On its own line, because the producer reads it at every
    /// flush and it seldom changes.
    sleeping: CachePadded<AtomicBool>,
    /// The consumer was dropped: nothing will be read any more.
    abandoned: AtomicBool,
    bytes: NonNull<u8>,
    capacity: usize,
    #[cfg(loom)]
    lines: Vec<loom::cell::UnsafeCell<()>>,
}

// SAFETY: `bytes` is only reached through `Producer` and `Consumer`, of which there is one each; they touch disjoint
// ranges as the module comment says, handed over by release/acquire pairs on `tail` and `head`.
unsafe impl Sync for SharedRing {}
// SAFETY: the allocation is not bound to a thread.
unsafe impl Send for SharedRing {}

impl SharedRing {
    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, 4096).expect("the capacity of a ring fits the address space")
    }

    /// The byte at `position`, which must be at most at a lap's end minus the bytes that the caller touches.
    fn at(&self, position: usize) -> NonNull<u8> {
        // SAFETY: the offset is below the capacity, hence inside the allocation.
        unsafe { self.bytes.add(position & (self.capacity - 1)) }
    }

    /// Tells the model checker that the producer writes these bytes.
    fn note_write(&self, _start: usize, _len: usize) {
        #[cfg(loom)]
        for line in (_start..=_start + _len.max(1) - 1).step_by(ALIGN) {
            self.lines[(line & (self.capacity - 1)) / ALIGN].with_mut(|_| ());
        }
    }

    /// Tells the model checker that the consumer reads these bytes.
    fn note_read(&self, _start: usize, _len: usize) {
        #[cfg(loom)]
        for line in (_start..=_start + _len.max(1) - 1).step_by(ALIGN) {
            self.lines[(line & (self.capacity - 1)) / ALIGN].with(|_| ());
        }
    }
}

impl Drop for SharedRing {
    fn drop(&mut self) {
        // SAFETY: allocated in `ring` with the same layout; both sides are gone.
        unsafe { dealloc(self.bytes.as_ptr(), Self::layout(self.capacity)) }
    }
}

/// Bytes that a record takes whose frame is `len` bytes long, with `extra` bytes behind it.
const fn record_bytes(len: usize, extra: usize) -> usize {
    (FRAME_AT + len + extra + ALIGN - 1) & !(ALIGN - 1)
}

/// Where the extension lies inside its record.
const fn extension_at(len: usize) -> usize {
    (FRAME_AT + len + 7) & !7
}

/// Smallest capacity in bytes of a ring for frames of up to `frame_bytes_max` bytes.
///
/// Twice the largest record, because a record that does not fit before the end of the lap leaves up to its own size
/// unused there; a power of two, because positions are masked.
pub(super) const fn capacity_min(frame_bytes_max: usize) -> usize {
    (2 * record_bytes(frame_bytes_max, EXTENSION_BYTES_MAX)).next_power_of_two()
}

/// A ring of `capacity` bytes, rounded up to a power of two. Laps may end from `lap_bytes_min` on ([`LAP_BYTES_MIN`]).
pub(super) fn ring(capacity: usize, lap_bytes_min: usize) -> (RecordProducer, RecordConsumer) {
    let capacity = capacity.next_power_of_two().max(2 * ALIGN);
    let layout = SharedRing::layout(capacity);
    // SAFETY: the layout has a size above 0. Zeroed, because room is lent as `&mut [u8]`, which must be initialised.
    let bytes = unsafe { alloc_zeroed(layout) };
    let bytes = NonNull::new(bytes).unwrap_or_else(|| handle_alloc_error(layout));
    let shared = Arc::new(SharedRing {
        tail: CachePadded(AtomicUsize::new(0)),
        head: CachePadded(AtomicUsize::new(0)),
        sleeping: CachePadded(AtomicBool::new(false)),
        abandoned: AtomicBool::new(false),
        bytes,
        capacity,
        #[cfg(loom)]
        lines: (0..capacity / ALIGN).map(|_| loom::cell::UnsafeCell::new(())).collect(),
    });
    let lap = Lap { bytes_min: lap_bytes_min, bytes: lap_bytes_min, check_at: lap_bytes_min, laps: 0 };
    let producer =
        RecordProducer { shared: shared.clone(), position: 0, published: 0, head: 0, reservation: None, lap };
    (producer, RecordConsumer { shared, position: 0, released: 0, tail: 0 })
}

/// Room that was reserved and not committed.
#[derive(Clone, Copy)]
struct Reservation {
    /// Position of the record: that of the producer, or the start of the next lap.
    start: usize,
    len: usize,
}

/// The sending side of a ring.
pub(super) struct RecordProducer {
    shared: Arc<SharedRing>,
    /// Where the next record goes.
    position: usize,
    /// `tail` as stored last.
    published: usize,
    /// `head` as loaded last: re-read only when the ring seems full.
    head: usize,
    reservation: Option<Reservation>,
    lap: Lap,
}

/// How much of the ring a lap uses.
struct Lap {
    bytes_min: usize,
    /// Doubles when the ring was full, halves again after some laps.
    bytes: usize,
    /// Offset in the lap at which to look next whether it can end.
    check_at: usize,
    /// Laps since `bytes` changed.
    laps: u32,
}

impl Lap {
    fn on_full(&mut self, capacity: usize) {
        self.bytes = (self.bytes * 2).min(capacity);
        self.laps = 0;
    }

    fn on_wrap(&mut self) {
        self.laps += 1;
        if self.laps == LAPS_PER_TRIAL {
            self.laps = 0;
            self.bytes = (self.bytes / 2).max(self.bytes_min);
        }
        self.check_at = self.bytes;
    }
}

impl RecordProducer {
    /// Lends room for a frame of `len` bytes, or `None` if the ring is full.
    pub(super) fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let bytes = record_bytes(len, EXTENSION_BYTES_MAX);
        let capacity = self.shared.capacity;
        let offset = self.position & (capacity - 1);
        let usual = offset < self.lap.check_at
            && bytes <= capacity - offset
            && self.position.wrapping_add(bytes).wrapping_sub(self.head) <= capacity;
        let start = if usual { self.position } else { self.find_record_slot(bytes)? };
        self.reservation = Some(Reservation { start, len });
        self.shared.note_write(start, bytes);
        // SAFETY: [start, start + bytes) is inside one lap and free (what is used after it fits the capacity), so that nothing else refers to it
        // until it is published; the slice borrows `self`, so no second one can exist.
        Some(unsafe { std::slice::from_raw_parts_mut(self.shared.at(start + FRAME_AT).as_ptr(), len) })
    }

    /// Where a record of `bytes` bytes can begin, after a closer look: perhaps the lap ends, or the consumer has read on. `None` if the ring is full.
    #[inline(never)]
    fn find_record_slot(&mut self, bytes: usize) -> Option<usize> {
        self.reservation = None;
        let capacity = self.shared.capacity;
        let offset = self.position & (capacity - 1);
        let lap_left = capacity - offset;
        let turn = bytes > lap_left || (offset >= self.lap.check_at && self.can_wrap_early(offset, bytes));
        let start = if turn { self.position.wrapping_add(lap_left) } else { self.position };
        let used_after = |head: usize| start.wrapping_add(bytes).wrapping_sub(head);
        if used_after(self.head) > capacity {
            self.refresh_head();
            if used_after(self.head) > capacity {
                self.lap.on_full(capacity);
                return None;
            }
        }
        Some(start)
    }

    /// Makes a record of the first `len` bytes of the room reserved last. It is visible to the consumer after `publish`.
    ///
    /// Panics if `len` is above what was reserved: that is a bug of the caller.
    pub(super) fn commit(&mut self, len: usize, meta: TxMeta) {
        if meta.gso.is_some() || meta.label != Label::NONE {
            self.commit_extended(len, &meta);
        } else {
            self.commit_record(len, meta.partial_checksum.as_ref(), None);
        }
    }

    /// Apart, so that most frames, which need no extension, have no share in its instructions.
    #[inline(never)]
    fn commit_extended(&mut self, len: usize, meta: &TxMeta) {
        self.commit_record(len, meta.partial_checksum.as_ref(), Some((meta.gso, meta.label)));
    }

    #[inline(always)]
    fn commit_record(
        &mut self,
        len: usize,
        partial_checksum: Option<&(u16, u16)>,
        extension: Option<(Option<Gso>, Label)>,
    ) {
        let Some(room) = self.reservation.take().filter(|room| len <= room.len) else {
            panic_without_reservation(len)
        };
        if room.start != self.position {
            self.lap.on_wrap();
            self.shared.note_write(self.position, ALIGN);
            // SAFETY: the position is aligned to a line and not at the lap's end, or the record would start there; the
            // bytes up to `room.start` are free.
            unsafe { self.shared.at(self.position).cast::<u64>().write(FLAG_SKIP) };
        }
        let record = self.shared.at(room.start);
        let mut header = len as u64;
        if let Some((start, offset)) = partial_checksum {
            header |=
                FLAG_PARTIAL | u64::from(read_unmerged(start)) << 32 | u64::from(read_unmerged(offset)) << 48;
        }
        let mut bytes = record_bytes(len, 0);
        if let Some((gso, label)) = extension {
            header |= FLAG_EXTENSION | u64::from(label.bits() >> Label::HASH_BITS) << LABEL_AT;
            bytes = record_bytes(len, EXTENSION_BYTES_MAX);
            // SAFETY: reserved together with the frame, aligned to 8 bytes.
            unsafe { record.add(extension_at(len)).cast::<u64>().write(encode(gso, label)) };
        }
        // SAFETY: the record is reserved and starts at a line.
        unsafe { record.cast::<u64>().write(header) };
        self.position = room.start.wrapping_add(bytes);
        self.prefetch_next_lines(bytes);
    }

    /// Takes cache lines for records to come from the consumer's core, which read what was there a lap ago: as many as a record of
    /// `bytes` bytes has used up. Otherwise each would be waited for when it is written, for the processor keeps stores in order.
    fn prefetch_next_lines(&self, bytes: usize) {
        for line in 0..(bytes / ALIGN).min(WRITE_PREFETCH_LINES_MAX) {
            let byte =
                self.shared.at(self.position.wrapping_add((WRITE_PREFETCH_LINES_AHEAD + line) * ALIGN));
            // SAFETY: inside the allocation. What is asked for is neither read nor written here.
            prefetch_to_write(unsafe { byte.as_ref() });
        }
    }

    /// Shows all committed records to the consumer. Returns true if it sleeps and the caller has to wake it.
    #[must_use]
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.position {
            return false;
        }
        self.published = self.position;
        self.shared.tail.0.store(self.position, Ordering::Release);
        // Pairs with the fence in `Consumer::arm`: either that side sees the new tail, or this one sees its flag.
        fence(Ordering::SeqCst);
        self.shared.sleeping.0.load(Ordering::Relaxed) && self.shared.sleeping.0.swap(false, Ordering::AcqRel)
    }

    /// Whether the lap can end at `offset` for a record of `bytes` bytes: the consumer keeps up, so that nearly all
    /// of the lap so far is free again.
    #[cold]
    fn can_wrap_early(&mut self, offset: usize, bytes: usize) -> bool {
        self.refresh_head();
        let waiting = self.position.wrapping_sub(self.head);
        let turn = waiting <= offset / 8 && bytes <= offset - waiting;
        if !turn {
            self.lap.check_at = offset + self.lap.bytes;
        }
        turn
    }

    /// If nobody reads any more, all is free: frames vanish as on an unplugged cable.
    fn refresh_head(&mut self) {
        self.head = if self.shared.abandoned.load(Ordering::Acquire) {
            self.position
        } else {
            self.shared.head.0.load(Ordering::Acquire)
        };
    }
}

/// The receiving side of a ring.
pub(super) struct RecordConsumer {
    shared: Arc<SharedRing>,
    /// Next record to read.
    position: usize,
    /// `head` as stored last.
    released: usize,
    /// `tail` as loaded last: re-read only when all up to it was read.
    tail: usize,
}

impl RecordConsumer {
    /// Asks for the cache lines of records from `position` on, as far as they are published.
    fn prefetch_records(&self, position: usize) {
        let lines = (self.tail.wrapping_sub(position) / ALIGN).min(READ_PREFETCH_LINES_MAX);
        for line in 0..lines {
            let byte = self.shared.at(position.wrapping_add(line * ALIGN));
            // SAFETY: inside the allocation, published, and not written before it is released.
            prefetch(unsafe { byte.as_ref() });
        }
    }

    /// Returns the frames of the last burst to the producer and lends the next ones.
    pub(super) fn burst<'a>(&'a mut self, burst: &mut RxBurst<'a>) {
        self.release();
        let shared: &'a SharedRing = &self.shared;
        let mut position = self.position;
        while !burst.is_full() {
            if position == self.tail {
                self.tail = shared.tail.0.load(Ordering::Acquire);
                if position == self.tail {
                    break;
                }
                // Each record says where the next one is, so without this their cache lines would come from the other core one after another.
                self.prefetch_records(position);
            }
            shared.note_read(position, ALIGN);
            let record = shared.at(position);
            // SAFETY: a record was published at this position, and records start with a header.
            let header = unsafe { record.cast::<u64>().read() };
            if header & FLAG_SKIP != 0 {
                position = position.wrapping_add(shared.capacity - (position & (shared.capacity - 1)));
                continue;
            }
            let len = (header & LEN_MASK) as usize;
            shared.note_read(position, FRAME_AT + len);
            // SAFETY: the producer wrote the header for a frame inside this record, and writes there no more until it is
            // released, which needs another call on `self`, hence the end of 'a.
            let bytes = unsafe { std::slice::from_raw_parts(record.add(FRAME_AT).as_ptr(), len) };
            // SAFETY: the burst is not full, so there is a slot behind its last frame. (`push` is not inlined: it copies the
            // frame twice through the stack, narrow stores before wide loads.)
            let slot = unsafe { burst.as_mut_ptr().add(burst.len()) };
            let mut extra = 0;
            // SAFETY: as above.
            unsafe { slot.write(RxFrame::new(bytes)) };
            if header & FLAG_PARTIAL != 0 {
                let (start, offset) = ((header >> 32) as u16, (header >> 48) as u16);
                // SAFETY: as above.
                unsafe { (*slot).checksum = RxChecksum::Partial { start, offset } };
            }
            if header & FLAG_EXTENSION != 0 {
                // SAFETY: the flag says that an extension was written there.
                let extension = unsafe { record.add(extension_at(len)).cast::<u64>().read() };
                let (gso, label) = decode(header, extension);
                // SAFETY: as above.
                unsafe { ((*slot).gso, (*slot).label) = (gso, label) };
                extra = EXTENSION_BYTES_MAX;
            }
            // SAFETY: the slot was written.
            unsafe { burst.set_len(burst.len() + 1) };
            position = position.wrapping_add(record_bytes(len, extra));
        }
        self.position = position;
    }

    /// Returns the frames of the last burst to the producer.
    pub(super) fn release(&mut self) {
        if self.released != self.position {
            self.released = self.position;
            self.shared.head.0.store(self.position, Ordering::Release);
        }
    }

    /// Whether a record is waiting.
    pub(super) fn is_waiting(&mut self) -> bool {
        self.tail = self.shared.tail.0.load(Ordering::Acquire);
        self.position != self.tail
    }

    /// Asks for a wake-up. Returns false if a record is waiting already. Whatever it says, [`disarm`](Self::disarm) follows.
    pub(super) fn arm(&mut self) -> bool {
        self.shared.sleeping.0.store(true, Ordering::Relaxed);
        // Pairs with the fence in `Producer::publish`.
        fence(Ordering::SeqCst);
        self.tail = self.shared.tail.0.load(Ordering::Acquire);
        self.position == self.tail
    }

    /// Takes back the wish for a wake-up. True if it was fulfilled already: the wake-up came, or is on its way.
    pub(super) fn disarm(&mut self) -> bool {
        !self.shared.sleeping.0.swap(false, Ordering::Relaxed)
    }
}

impl Drop for RecordConsumer {
    fn drop(&mut self) {
        self.shared.abandoned.store(true, Ordering::Release);
    }
}

#[cold]
fn panic_without_reservation(len: usize) -> ! {
    panic!("commit of {len} bytes without a reservation of as many");
}

/// Reads a field that the caller has just written. Two such reads merged into a wider one would wait until both writes
/// have left the store buffer: 4 ns of the 10 that a frame may cost.
fn read_unmerged(field: &u16) -> u16 {
    // SAFETY: a reference is valid for reads.
    unsafe { std::ptr::from_ref(field).read_volatile() }
}

/// What the extension says: how a super-frame is to be cut (bits 0..36, zero if it is none), and the label's hash above.
fn encode(gso: Option<Gso>, label: Label) -> u64 {
    let hash = u64::from(label.hash().unwrap_or(0)) << EXTENSION_HASH_AT;
    let Some(gso) = gso else { return hash };
    let kind = match gso.kind {
        GsoKind::Tcp4 => 0,
        GsoKind::Tcp6 => 1,
        GsoKind::Udp => 2,
    };
    let cut = u64::from(gso.size) | u64::from(gso.header_len) << 16 | kind << 32 | u64::from(gso.ecn) << 34;
    cut | EXTENSION_GSO | hash
}

fn decode(header: u64, extension: u64) -> (Option<Gso>, Label) {
    let rest = (header >> LABEL_AT & LABEL_MASK) as u32;
    let label = Label::from_bits(rest << Label::HASH_BITS | (extension >> EXTENSION_HASH_AT) as u32);
    let kind = match (extension >> 32) & 3 {
        0 => GsoKind::Tcp4,
        1 => GsoKind::Tcp6,
        _ => GsoKind::Udp,
    };
    let (size, header_len) = (extension as u16, (extension >> 16) as u16);
    let gso = Gso { kind, size, header_len, ecn: (extension >> 34) & 1 != 0 };
    ((extension & EXTENSION_GSO != 0).then_some(gso), label)
}

#[cfg(test)]
mod tests;
