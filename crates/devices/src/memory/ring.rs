//! A ring of variable-length records between one producer and one consumer, which may run on different
//! threads.
//!
//! Both sides work in place: the producer lends memory of the ring to the code that writes the frame, and the
//! consumer lends slices of the ring to the code that reads it. Positions are byte counts that only grow; a
//! record lies at `position % capacity` and never wraps: where it would, a marker sends the consumer to the
//! start of the next lap.
//!
//! A record is `[header: u64][2 bytes][frame][extension: u64, of super-frames and labelled frames only]`,
//! aligned to 64 bytes so that the two sides never write one cache line at the same time. The frame starts at
//! byte 10: this aligns the IP header (byte 24) and lets a bare 54-byte ACK share the cache line of its
//! header.
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
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::alloc::{Layout, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of a lap after which the producer starts the next lap early if the consumer keeps up, so that light
/// traffic stays in a part of the ring that fits the cache. 64 KiB is a burst of full-sized frames.
pub(super) const LAP_BYTES_MIN: usize = 64 << 10;
/// Number of laps after which a shorter lap is tried again.
const LAPS_PER_TRIAL: u32 = 16;

/// Alignment of records: one cache line.
const ALIGN: usize = 64;
/// Number of cache lines of waiting records to prefetch at once: about as many misses as a core can have
/// outstanding.
const READ_PREFETCH_LINES_MAX: usize = 16;
/// Distance in cache lines at which the producer prefetches lines ahead of its position, to take their
/// ownership from the consumer's core.
const WRITE_PREFETCH_LINES_AHEAD: usize = 16;
/// Limit of lines prefetched for writing at once. For large frames, the hardware prefetcher detects the
/// pattern.
const WRITE_PREFETCH_LINES_MAX: usize = 8;
/// Offset of the frame in its record.
const FRAME_AT: usize = 10;
/// Bytes of the extension after a super-frame or a labelled frame, with the padding that aligns it.
const EXTENSION_BYTES_MAX: usize = 8 + 7;

/// Bits 0..24 of the header are the length of the frame, bits 27..31 the bits of the label other than its
/// hash, bits 32..48 and 48..64 start and offset of the checksum.
const LEN_MASK: u64 = (1 << 24) - 1;
const FLAG_SKIP: u64 = 1 << 24;
const FLAG_PARTIAL: u64 = 1 << 25;
const FLAG_EXTENSION: u64 = 1 << 26;
const LABEL_AT: u32 = 27;
const LABEL_MASK: u64 = 0xf;
/// Flag of the extension: the record is a super-frame.
const EXTENSION_GSO: u64 = 1 << 35;
/// Position of the label's hash in the extension.
const EXTENSION_HASH_AT: u32 = 64 - Label::HASH_BITS;

/// Keeps data that one side writes away from data that the other side writes. Two cache lines, because the
/// prefetcher fetches pairs of lines.
#[repr(align(128))]
struct CachePadded<T>(T);

struct SharedRing {
    /// End of the records that the consumer may read. The producer stores it once per flush.
    tail: CachePadded<AtomicUsize>,
    /// Start of the records that the producer must not overwrite. The consumer stores it once per burst.
    head: CachePadded<AtomicUsize>,
    /// Set while the consumer sleeps or is about to, and wants a wake-up. On a cache line of its own, because
    /// the producer reads it at every flush and it seldom changes.
    sleeping: CachePadded<AtomicBool>,
    /// Set when the consumer was dropped: no record will be read any more.
    abandoned: AtomicBool,
    bytes: NonNull<u8>,
    capacity: usize,
    #[cfg(loom)]
    lines: Vec<loom::cell::UnsafeCell<()>>,
}

// SAFETY: `bytes` is only accessed through `RecordProducer` and `RecordConsumer`, of which there is one each;
// they access disjoint ranges as the module comment says, handed over by release/acquire pairs on `tail` and
// `head`.
unsafe impl Sync for SharedRing {}
// SAFETY: the mapping is not bound to a thread.
unsafe impl Send for SharedRing {}

impl SharedRing {
    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, 4096).expect("the capacity of a ring fits the address space")
    }

    /// Returns the address of the byte at `position`. The bytes that the caller accesses from there must not
    /// cross the end of the lap.
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
        // SAFETY: mapped in `ring` with this length; both sides are dropped.
        let unmapped = unsafe { munmap(self.bytes.as_ptr().cast(), self.capacity) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Returns the bytes of a record with a frame of `len` bytes and `extra` bytes after it.
const fn record_bytes(len: usize, extra: usize) -> usize {
    (FRAME_AT + len + extra + ALIGN - 1) & !(ALIGN - 1)
}

/// Returns the offset of the extension in its record.
const fn extension_at(len: usize) -> usize {
    (FRAME_AT + len + 7) & !7
}

/// Returns the smallest capacity in bytes of a ring for frames of up to `frame_bytes_max` bytes.
///
/// The capacity is twice the largest record, because a record that does not fit before the end of the lap
/// leaves up to its own size unused there; it is a power of two, because positions are masked.
pub(super) const fn capacity_min(frame_bytes_max: usize) -> usize {
    (2 * record_bytes(frame_bytes_max, EXTENSION_BYTES_MAX)).next_power_of_two()
}

/// Creates a ring of `capacity` bytes, rounded up to a power of two. A lap may end early once `lap_bytes_min`
/// bytes of it are used ([`LAP_BYTES_MIN`]).
pub(super) fn ring(capacity: usize, lap_bytes_min: usize) -> (RecordProducer, RecordConsumer) {
    let capacity = capacity.next_power_of_two().max(2 * ALIGN);
    // Mapped, not allocated: there are rings between all pairs of shards, few of which are used, and an
    // allocator would write zeros to all of their pages. The memory must be zeroed, because it is lent as
    // `&mut [u8]`.
    // SAFETY: a new mapping at an address that the kernel chooses does not affect existing memory.
    let mapped = unsafe {
        mmap_anonymous(std::ptr::null_mut(), capacity, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
    };
    let bytes = mapped.ok().and_then(|bytes| NonNull::new(bytes.cast()));
    let bytes = bytes.unwrap_or_else(|| handle_alloc_error(SharedRing::layout(capacity)));
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
    let lap =
        Lap { bytes_min: lap_bytes_min, bytes: lap_bytes_min, check_at: lap_bytes_min, laps: 0, left_at: 0 };
    let producer =
        RecordProducer { shared: shared.clone(), position: 0, published: 0, head: 0, reservation: None, lap };
    (producer, RecordConsumer { shared, position: 0, released: 0, tail: 0 })
}

/// Memory that was reserved and not committed.
#[derive(Clone, Copy)]
struct Reservation {
    /// Position of the record: the producer's position, or the start of the next lap.
    start: usize,
    len: usize,
}

/// The sending side of a ring.
pub(super) struct RecordProducer {
    shared: Arc<SharedRing>,
    /// Position of the next record.
    position: usize,
    /// Value of `tail` stored last.
    published: usize,
    /// Value of `head` loaded last. It is loaded again only when the ring seems full.
    head: usize,
    reservation: Option<Reservation>,
    lap: Lap,
}

/// How much of the ring a lap uses.
struct Lap {
    bytes_min: usize,
    /// Doubles when the ring was full, and halves again after some laps.
    bytes: usize,
    /// Offset in the lap at which the producer checks next whether the lap can end.
    check_at: usize,
    /// Laps since `bytes` changed.
    laps: u32,
    /// Position at which the producer left the last lap that ended early.
    left_at: usize,
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
    /// Lends memory for a frame of `len` bytes. Returns `None` if the ring is full.
    pub(super) fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let bytes = record_bytes(len, EXTENSION_BYTES_MAX);
        let capacity = self.shared.capacity;
        let offset = self.position & (capacity - 1);
        let is_fast_path = offset < self.lap.check_at
            && bytes <= capacity - offset
            && self.position.wrapping_add(bytes).wrapping_sub(self.head) <= capacity;
        let start = if is_fast_path { self.position } else { self.find_record_slot(bytes)? };
        self.reservation = Some(Reservation { start, len });
        self.shared.note_write(start, bytes);
        // SAFETY: [start, start + bytes) is inside one lap and free (the used part still fits the capacity
        // with it), so that nothing else refers to it until it is published; the slice borrows `self`, so no
        // second slice can exist.
        Some(unsafe { std::slice::from_raw_parts_mut(self.shared.at(start + FRAME_AT).as_ptr(), len) })
    }

    /// Returns the position where a record of `bytes` bytes can begin, after it checked whether the lap can
    /// end and how far the consumer has read. Returns `None` if the ring is full.
    #[inline(never)]
    fn find_record_slot(&mut self, bytes: usize) -> Option<usize> {
        self.reservation = None;
        let capacity = self.shared.capacity;
        let offset = self.position & (capacity - 1);
        let lap_left = capacity - offset;
        let wraps = bytes > lap_left || (offset >= self.lap.check_at && self.can_wrap_early(offset, bytes));
        let start = if wraps { self.position.wrapping_add(lap_left) } else { self.position };
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

    /// Returns whether the bytes in use, together with a frame of `len` bytes, are at most the result of
    /// `limit`, which gets the bytes that the ring can hold until the consumer has reached the current lap. A
    /// ring whose records were all read has room for every frame.
    pub(super) fn has_room_within(&mut self, len: usize, limit: impl Fn(usize) -> usize) -> bool {
        let bytes = record_bytes(len, EXTENSION_BYTES_MAX);
        let capacity = self.shared.capacity;
        let has_room = |producer: &Self| {
            let unused = producer.unused_before_lap();
            let used = producer.position.wrapping_sub(producer.head) - unused;
            used == 0 || used + bytes <= limit(capacity - unused)
        };
        if has_room(self) {
            return true;
        }
        self.refresh_head();
        let has_room = has_room(self);
        if !has_room {
            self.lap.on_full(capacity);
        }
        has_room
    }

    /// Returns the bytes at the end of the previous lap that were left out, if the consumer has not passed
    /// them.
    fn unused_before_lap(&self) -> usize {
        let offset = self.position & (self.shared.capacity - 1);
        if self.position.wrapping_sub(self.head) <= offset {
            return 0;
        }
        let unused = (self.position - offset).wrapping_sub(self.lap.left_at);
        // A longer distance is that to an earlier lap: nothing was left out in the previous one.
        if unused < self.shared.capacity { unused } else { 0 }
    }

    /// Makes a record of the first `len` bytes of the memory reserved last. The consumer sees it after
    /// `publish`.
    ///
    /// Panics if `len` is above the reserved length, which is a bug of the caller.
    pub(super) fn commit(&mut self, len: usize, meta: TxMeta) {
        if meta.gso.is_some() || meta.label != Label::NONE {
            self.commit_extended(len, &meta);
        } else {
            self.commit_record(len, meta.partial_checksum.as_ref(), None);
        }
    }

    /// Commits a super-frame or a labelled frame. A separate function, so that other frames, which are the
    /// majority, do not execute its instructions.
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
            self.lap.left_at = self.position;
            self.shared.note_write(self.position, ALIGN);
            // SAFETY: the position is aligned to a cache line and not at the lap's end, because the record
            // would start there otherwise; the bytes up to `room.start` are free.
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
            // SAFETY: the extension is reserved together with the frame and aligned to 8 bytes.
            unsafe { record.add(extension_at(len)).cast::<u64>().write(encode(gso, label)) };
        }
        // SAFETY: the record is reserved and starts at a cache line.
        unsafe { record.cast::<u64>().write(header) };
        self.position = room.start.wrapping_add(bytes);
        self.prefetch_next_lines(bytes);
    }

    /// Prefetches the cache lines of records to come for writing, as many as a record of `bytes` bytes has
    /// used up: the consumer's core owns them since it read the records of the last lap. Without the
    /// prefetch, each store would wait for its line, because the processor commits stores in order.
    fn prefetch_next_lines(&self, bytes: usize) {
        for line in 0..(bytes / ALIGN).min(WRITE_PREFETCH_LINES_MAX) {
            let byte =
                self.shared.at(self.position.wrapping_add((WRITE_PREFETCH_LINES_AHEAD + line) * ALIGN));
            // SAFETY: inside the allocation. A prefetch neither reads nor writes the byte.
            prefetch_to_write(unsafe { byte.as_ref() });
        }
    }

    /// Makes all committed records visible to the consumer. Returns true if the consumer sleeps and the
    /// caller must wake it.
    #[must_use]
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.position {
            return false;
        }
        self.published = self.position;
        self.shared.tail.0.store(self.position, Ordering::Release);
        // Pairs with the fence in `RecordConsumer::arm`: either the consumer sees the new tail, or the
        // producer sees its flag.
        fence(Ordering::SeqCst);
        self.shared.sleeping.0.load(Ordering::Relaxed) && self.shared.sleeping.0.swap(false, Ordering::AcqRel)
    }

    /// Returns the position of the first record that the consumer has not returned, as loaded last.
    pub(super) fn head(&self) -> usize {
        self.head
    }

    /// Loads the position of the first record that the consumer has not returned.
    pub(super) fn load_head(&mut self) -> usize {
        self.refresh_head();
        self.head
    }

    /// Returns the wire segments of the record at `position`, and the position after it; `None` at the end of
    /// the committed records. The position must be that of a committed record, not before `head`, or the end.
    pub(super) fn record_at(&self, mut position: usize) -> Option<(usize, usize)> {
        let shared = &self.shared;
        let committed = self.position.wrapping_sub(self.head);
        // Compared with the head, because positions wrap around.
        while position.wrapping_sub(self.head) < committed {
            shared.note_read(position, ALIGN);
            let record = shared.at(position);
            // SAFETY: records start with a header, which this side wrote. It does not overwrite records from
            // `head` on.
            let header = unsafe { record.cast::<u64>().read() };
            if header & FLAG_SKIP != 0 {
                position = position.wrapping_add(shared.capacity - (position & (shared.capacity - 1)));
                continue;
            }
            let len = (header & LEN_MASK) as usize;
            if header & FLAG_EXTENSION == 0 {
                return Some((1, position.wrapping_add(record_bytes(len, 0))));
            }
            // SAFETY: the flag says that an extension was written there.
            let extension = unsafe { record.add(extension_at(len)).cast::<u64>().read() };
            let segments = match decode(header, extension).0 {
                Some(gso) => {
                    len.saturating_sub(gso.header_len.into()).div_ceil(usize::from(gso.size).max(1)).max(1)
                }
                None => 1,
            };
            return Some((segments, position.wrapping_add(record_bytes(len, EXTENSION_BYTES_MAX))));
        }
        None
    }

    /// Returns whether the lap can end at `offset` before a record of `bytes` bytes: the consumer keeps up,
    /// so that nearly all of the lap so far is free again.
    #[cold]
    fn can_wrap_early(&mut self, offset: usize, bytes: usize) -> bool {
        self.refresh_head();
        let waiting = self.position.wrapping_sub(self.head);
        let wraps = waiting <= offset / 8 && bytes <= offset - waiting;
        if !wraps {
            self.lap.check_at = offset + self.lap.bytes;
        }
        wraps
    }

    /// Loads `head` again. If the consumer was dropped, the whole ring is free: frames vanish as on an
    /// unplugged cable.
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
    /// Position of the next record to read.
    position: usize,
    /// Value of `head` stored last.
    released: usize,
    /// Value of `tail` loaded last. It is loaded again only when all records up to it were read.
    tail: usize,
}

impl RecordConsumer {
    /// Prefetches the cache lines of published records from `position` on.
    fn prefetch_records(&self, position: usize) {
        let lines = (self.tail.wrapping_sub(position) / ALIGN).min(READ_PREFETCH_LINES_MAX);
        for line in 0..lines {
            let byte = self.shared.at(position.wrapping_add(line * ALIGN));
            // SAFETY: inside the allocation, published, and not overwritten before it is released.
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
                // Each record gives the position of the next one, so without the prefetch their cache lines
                // would come from the other core one after another.
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
            // SAFETY: the producer wrote the header for a frame inside this record, and does not write there
            // again until it is released, which takes another call on `self`, hence the end of 'a.
            let bytes = unsafe { std::slice::from_raw_parts(record.add(FRAME_AT).as_ptr(), len) };
            // SAFETY: the burst is not full, so there is a slot after its last frame. (`push` is not inlined:
            // it copies the frame twice through the stack, with narrow stores before wide loads.)
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

    /// Returns whether a record is waiting.
    pub(super) fn is_waiting(&mut self) -> bool {
        self.tail = self.shared.tail.0.load(Ordering::Acquire);
        self.position != self.tail
    }

    /// Requests a wake-up. Returns false if a record is waiting already. The caller must call
    /// [`disarm`](Self::disarm) afterwards in both cases.
    pub(super) fn arm(&mut self) -> bool {
        self.shared.sleeping.0.store(true, Ordering::Relaxed);
        // Pairs with the fence in `RecordProducer::publish`.
        fence(Ordering::SeqCst);
        self.tail = self.shared.tail.0.load(Ordering::Acquire);
        self.position == self.tail
    }

    /// Withdraws the request for a wake-up. Returns true if the producer took it already: the wake-up was
    /// sent, or is about to be.
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
    panic!("commit of {len} bytes exceeds the reservation");
}

/// Reads a field that the caller has just written. If the compiler merged two such reads into a wider one, it
/// would wait until both stores have left the store buffer, which takes 4 ns of the 10 ns that a frame may
/// cost.
fn read_unmerged(field: &u16) -> u16 {
    // SAFETY: a reference is valid for reads.
    unsafe { std::ptr::from_ref(field).read_volatile() }
}

/// Encodes the extension: the segmentation of a super-frame (bits 0..36, zero for other frames), and the
/// label's hash above.
fn encode(gso: Option<Gso>, label: Label) -> u64 {
    let hash = u64::from(label.hash().unwrap_or(0)) << EXTENSION_HASH_AT;
    let Some(gso) = gso else { return hash };
    let kind = match gso.kind {
        GsoKind::Tcp4 => 0,
        GsoKind::Tcp6 => 1,
        GsoKind::Udp => 2,
    };
    let segmentation =
        u64::from(gso.size) | u64::from(gso.header_len) << 16 | kind << 32 | u64::from(gso.ecn) << 34;
    segmentation | EXTENSION_GSO | hash
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
