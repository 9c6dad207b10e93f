//! One direction of a socket's bytes: a ring with one writer and one reader at a time.
//!
//! Positions count the bytes of the stream and only grow. Whenever all bytes were read, the writer may
//! continue at the start of the memory, so that requests and responses stay in a page that is in the cache
//! and a quiet connection uses one page of its ring. At that moment the writer may also move to a larger ring
//! that the stack has granted, so that connections that move much data wake the other side less often.
//!
//! The stack trusts only what it wrote itself: it passes its own copy of its position, and accepts the other
//! side's position only if that is possible.
#![allow(unsafe_code)] // reads and writes bytes that another process may write at the same time

use super::buffers::{Fault, RecvBuffer, SendBuffer};
use super::sleep_state::CachePadded;
use super::sync::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use core::marker::PhantomData;
use core::ptr::NonNull;

/// Positions that both sides share.
pub(super) struct StreamPositions {
    /// Written by the writer: how many bytes were ever written, and the position of the byte at the start of
    /// the memory.
    written: CachePadded<AtomicU64>,
    base: AtomicU64,
    /// Written by the writer: the number of the large ring that holds the bytes, plus one; 0 for the socket's
    /// own ring.
    ring: AtomicU32,
    /// Written by the stack: the ring in which the writer may continue.
    granted_ring: AtomicU32,
    /// Written by the stack where it reads: how many bytes it has taken while it still sends from the ring.
    /// The ring's space is freed when `read` follows; a value not above `read` means that the stack needs no
    /// bytes before `read`.
    taken: AtomicU64,
    /// Written by the reader: bytes before this position may be overwritten.
    read: CachePadded<AtomicU64>,
}

impl StreamPositions {
    #[cfg(test)]
    pub fn new() -> Self {
        let position = || CachePadded(AtomicU64::new(0));
        let (ring, granted_ring) = (AtomicU32::new(0), AtomicU32::new(0));
        let (base, taken) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { written: position(), base, ring, granted_ring, taken, read: position() }
    }

    /// Clears the positions for a new connection that no client knows yet.
    pub fn clear(&self) {
        for position in [&self.written.0, &self.base, &self.taken, &self.read.0] {
            position.store(0, Ordering::Relaxed);
        }
        self.ring.store(0, Ordering::Relaxed);
        self.granted_ring.store(0, Ordering::Relaxed);
    }

    /// Stores what a writer that breaks the rules may store.
    #[cfg(all(test, not(loom)))]
    pub fn forge_ring(&self, number: u32) {
        self.ring.store(number, Ordering::Relaxed);
    }

    /// Allows the writer to continue in the large ring of this number once all bytes were read.
    pub fn grant(&self, ring: u32) {
        self.granted_ring.store(ring + 1, Ordering::Release);
    }

    /// Returns how many bytes the writer claims to have ever written.
    pub fn written(&self) -> u64 {
        self.written.0.load(Ordering::Acquire)
    }

    /// Returns how many bytes written by clients the stack has taken.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed).max(self.read())
    }

    /// Returns how many bytes the reader claims to have ever read.
    pub fn read(&self) -> u64 {
        self.read.0.load(Ordering::Acquire)
    }
}

/// The other side claims a position that is not possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidPosition;

/// The large rings of a region, stored one after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct LargeRings {
    pub memory: NonNull<u8>,
    /// Bytes of each ring, a power of two.
    pub bytes: usize,
    pub count: u32,
}

/// The memory of a ring in use, and its size.
#[derive(Clone, Copy)]
struct RingMemory<'a> {
    bytes: NonNull<u8>,
    capacity: usize,
    #[cfg(loom)]
    model: &'a [loom::cell::UnsafeCell<()>],
    #[cfg(not(loom))]
    lifetime: PhantomData<&'a ()>,
}

/// One direction of a socket. Copies refer to the same memory.
#[derive(Clone, Copy)]
pub(super) struct Stream<'a> {
    positions: &'a StreamPositions,
    /// The socket's own ring.
    bytes: NonNull<u8>,
    capacity: usize,
    large_rings: &'a LargeRings,
    /// For the model checker: the socket's own bytes, and those of the large rings.
    #[cfg(loom)]
    models: [&'a [loom::cell::UnsafeCell<()>]; 2],
    #[cfg(not(loom))]
    lifetime: PhantomData<&'a ()>,
}

impl<'a> Stream<'a> {
    /// Creates the view of a direction whose own ring has `capacity` bytes, a power of two, of shared memory,
    /// and which may use `rings`.
    ///
    /// # Safety
    /// All these bytes stay mapped for `'a` and are accessed through values of this type only. Of the
    /// well-behaved processes that access them at the same time, one writes and one reads.
    pub unsafe fn new(
        positions: &'a StreamPositions,
        bytes: NonNull<u8>,
        capacity: usize,
        large_rings: &'a LargeRings,
    ) -> Self {
        debug_assert!(capacity.is_power_of_two() && large_rings.bytes.is_power_of_two());
        Self {
            positions,
            bytes,
            capacity,
            large_rings,
            // The model checker's atomics cannot be in shared memory: models create their own.
            #[cfg(loom)]
            models: [&[], &[]],
            #[cfg(not(loom))]
            lifetime: PhantomData,
        }
    }

    /// Returns the ring of a number that another process may have written: an invalid number means the
    /// socket's own ring.
    #[inline]
    fn ring(&self, number: u32) -> RingMemory<'a> {
        match number.checked_sub(1) {
            Some(place) if place < self.large_rings.count => RingMemory {
                // SAFETY: `place` is below the number of rings, all of which are inside the mapping, as the
                // caller of `new` guaranteed.
                bytes: unsafe { self.large_rings.memory.add(place as usize * self.large_rings.bytes) },
                capacity: self.large_rings.bytes,
                #[cfg(loom)]
                model: self.models[1],
                #[cfg(not(loom))]
                lifetime: PhantomData,
            },
            _ => RingMemory {
                bytes: self.bytes,
                capacity: self.capacity,
                #[cfg(loom)]
                model: self.models[0],
                #[cfg(not(loom))]
                lifetime: PhantomData,
            },
        }
    }

    /// Returns the ring that holds the bytes. Call this only after reading the position that says that there
    /// are bytes.
    #[inline]
    fn current_ring(&self) -> RingMemory<'a> {
        self.ring(self.positions.ring.load(Ordering::Relaxed))
    }

    /// Returns the number of the ring in which the writer continues when all bytes were read.
    #[inline]
    fn next_ring(&self) -> u32 {
        match self.positions.granted_ring.load(Ordering::Acquire) {
            0 => self.positions.ring.load(Ordering::Relaxed),
            granted => granted,
        }
    }

    /// Returns how many bytes are unread, according to both sides.
    ///
    /// # Errors
    /// Returns an error if that is more than fits.
    #[inline]
    fn unread_between(&self, written: u64, read: u64) -> Result<usize, InvalidPosition> {
        let Some(count) = written.checked_sub(read) else { return Err(InvalidPosition) };
        // The socket's own ring is usually large enough for the unread bytes.
        if count <= self.capacity as u64
            || count <= self.ring_capacity(self.positions.ring.load(Ordering::Relaxed)) as u64
        {
            return Ok(count as usize);
        }
        Err(InvalidPosition)
    }

    /// Returns the free space for a writer whose position is `written`.
    ///
    /// # Errors
    /// Returns an error if the reader claims to have read bytes that were not written, or to have freed space
    /// that it had not.
    #[inline]
    pub fn space(&self, written: u64) -> Result<usize, InvalidPosition> {
        self.unread(written).map(|waiting| self.space_beside(waiting))
    }

    /// Returns the free space if `waiting` bytes are unread.
    #[inline]
    pub fn space_beside(&self, waiting: usize) -> usize {
        match waiting {
            0 => self.ring_capacity(self.next_ring()),
            // Another process may have changed the ring's number so that the unread bytes do not fit.
            waiting => {
                self.ring_capacity(self.positions.ring.load(Ordering::Relaxed)).saturating_sub(waiting)
            }
        }
    }

    /// Returns the bytes of the ring of a number, as [`ring`](Self::ring) interprets it.
    #[inline]
    fn ring_capacity(&self, number: u32) -> usize {
        // 0 and invalid numbers mean the socket's own ring.
        if number.wrapping_sub(1) < self.large_rings.count { self.large_rings.bytes } else { self.capacity }
    }

    /// Returns how many bytes are unread, for a writer whose position is `written`.
    ///
    /// # Errors
    /// As [`Stream::space`].
    #[inline]
    pub fn unread(&self, written: u64) -> Result<usize, InvalidPosition> {
        self.unread_between(written, self.positions.read())
    }

    /// Writes as many bytes as there is space for, and returns how many. Advances `written`, the writer's
    /// position.
    ///
    /// # Errors
    /// As [`Stream::space`]; nothing was written then.
    pub fn write(&self, written: &mut u64, bytes: &[u8]) -> Result<usize, InvalidPosition> {
        let count = self.copy_in(written, bytes, 0, bytes.len())?.unwrap_or(0);
        if count > 0 {
            self.publish(*written);
        }
        Ok(count)
    }

    /// Copies as many of the `len` bytes at offset `at` of a buffer as there is space for, and returns how
    /// many. Advances `written`, the writer's position, which the caller then [publishes](Self::publish).
    /// After a fault in the buffer `written` is unchanged.
    ///
    /// # Errors
    /// As [`Stream::space`].
    #[inline]
    pub fn copy_in<B: SendBuffer + ?Sized>(
        &self,
        written: &mut u64,
        buffer: &B,
        at: usize,
        len: usize,
    ) -> Result<Result<usize, Fault>, InvalidPosition> {
        let waiting = self.unread(*written)?;
        let mut base = self.positions.base.load(Ordering::Relaxed);
        let mut number = self.positions.ring.load(Ordering::Relaxed);
        if waiting == 0 && len > 0 {
            // All bytes were read: the reader accesses neither the memory nor these words until the position
            // advances.
            base = *written;
            self.positions.base.store(base, Ordering::Relaxed);
            let next = self.next_ring();
            if next != number {
                number = next;
                self.positions.ring.store(number, Ordering::Relaxed);
            }
        }
        let ring = self.ring(number);
        let count = ring.capacity.saturating_sub(waiting).min(len);
        if count == 0 {
            return Ok(Ok(0));
        }
        let (place, until_end) = ring.locate(*written, base);
        let first = count.min(until_end);
        let copied = ring.copy_in(place, buffer, at, first).and_then(|()| {
            if first < count { ring.copy_in(0, buffer, at + first, count - first) } else { Ok(()) }
        });
        if copied.is_err() {
            return Ok(Err(Fault));
        }
        *written += count as u64;
        Ok(Ok(count))
    }

    /// Sets the writer's position: the reader may read the bytes before it.
    #[inline]
    pub fn publish(&self, written: u64) {
        self.positions.written.0.store(written, Ordering::Release);
    }

    /// Returns how many bytes can be read, for a reader whose position is `read`.
    ///
    /// # Errors
    /// Returns an error if the writer claims to have written more than fits, or less than was read.
    #[inline]
    pub fn readable(&self, read: u64) -> Result<usize, InvalidPosition> {
        self.unread_between(self.positions.written(), read)
    }

    /// Copies unread bytes to `out`, beginning `skip` bytes after the reader's position, and returns how
    /// many. They stay unread.
    ///
    /// # Errors
    /// As [`Stream::readable`].
    pub fn peek(&self, read: u64, skip: usize, out: &mut [u8]) -> Result<usize, InvalidPosition> {
        let count = self.readable(read)?.saturating_sub(skip).min(out.len());
        self.copy_unread(read, skip, &mut out[..count]);
        Ok(count)
    }

    /// Fills `out`, beginning `skip` bytes after the reader's position, as
    /// [`copy_unread_to`](Self::copy_unread_to) does.
    pub fn copy_unread(&self, read: u64, skip: usize, out: &mut [u8]) {
        // A slice can be written.
        let _ = self.copy_unread_to(read, skip, out, 0, out.len());
    }

    /// Copies `len` bytes to offset `at` of a buffer, beginning `skip` bytes after the reader's position.
    /// [`readable`](Self::readable) has said that these bytes are there; the writer's position is not read
    /// again.
    ///
    /// # Errors
    /// Returns an error if the buffer cannot be written.
    #[inline]
    pub fn copy_unread_to<B: RecvBuffer + ?Sized>(
        &self,
        read: u64,
        skip: usize,
        out: &mut B,
        mut at: usize,
        mut len: usize,
    ) -> Result<(), Fault> {
        let base = self.positions.base.load(Ordering::Relaxed);
        let ring = self.current_ring();
        let (mut place, mut until_end) = ring.locate(read.wrapping_add(skip as u64), base);
        // At most two rounds, unless another process meanwhile claims a smaller ring; the bytes are that
        // process's own then.
        while len > 0 {
            let count = len.min(until_end);
            ring.copy_out(place, out, at, count)?;
            (place, until_end) = (0, ring.capacity);
            (at, len) = (at + count, len - count);
        }
        Ok(())
    }

    /// Locates the byte at the reader's position if it is in a large ring: the ring's number, the offset in
    /// it, and how many bytes follow without a gap.
    pub fn locate_in_large(&self, read: u64) -> Option<(u32, usize, usize)> {
        let number = self.positions.ring.load(Ordering::Relaxed).checked_sub(1)?;
        if number >= self.large_rings.count {
            return None;
        }
        let (at, until_end) = self.ring(number + 1).locate(read, self.positions.base.load(Ordering::Relaxed));
        Some((number, at, until_end))
    }

    /// Advances the position up to which the stack has taken bytes by `count`. The stack still needs these
    /// bytes.
    pub fn advance_taken(&self, taken: &mut u64, count: usize) {
        *taken += count as u64;
        self.positions.taken.store(*taken, Ordering::Relaxed);
    }

    /// Sets the read position: the space before it is free.
    pub fn advance_read(&self, read: u64) {
        self.positions.read.0.store(read, Ordering::Release);
    }

    /// Advances `read`, the reader's position, by `count` bytes.
    pub fn consume(&self, read: &mut u64, count: usize) {
        *read += count as u64;
        self.positions.read.0.store(*read, Ordering::Release);
    }
}

impl RingMemory<'_> {
    /// Returns the offset of the byte at a position, and how many bytes follow without a gap.
    #[inline]
    fn locate(&self, position: u64, base: u64) -> (usize, usize) {
        let at = position.wrapping_sub(base) as usize & (self.capacity - 1);
        (at, self.capacity - at)
    }

    /// Copies `len` bytes at offset `from` of a buffer to offset `at`.
    #[inline]
    fn copy_in<B: SendBuffer + ?Sized>(
        &self,
        at: usize,
        buffer: &B,
        from: usize,
        len: usize,
    ) -> Result<(), Fault> {
        self.record_access(at, len, true);
        // SAFETY: `at + len` is at most the capacity, by `locate` and the caller's `min`; buffers are not in
        // the ring. The reader does not look here before the position advances; a reader that breaks the
        // rules only sees other bytes.
        unsafe { buffer.copy_to(from, self.bytes.add(at).as_ptr(), len) }
    }

    /// Copies `len` bytes at offset `at` to offset `to` of a buffer.
    #[inline]
    fn copy_out<B: RecvBuffer + ?Sized>(
        &self,
        at: usize,
        buffer: &mut B,
        to: usize,
        len: usize,
    ) -> Result<(), Fault> {
        self.record_access(at, len, false);
        // SAFETY: as for `copy_in`; a writer that breaks the rules changes the bytes of the copy, on which
        // nothing relies.
        unsafe { buffer.copy_from(to, self.bytes.add(at).as_ptr(), len) }
    }

    /// Records the access for the model checker.
    fn record_access(&self, _at: usize, _len: usize, _write: bool) {
        #[cfg(loom)]
        for cell in &self.model[_at.._at + _len] {
            if _write { cell.with_mut(|_| ()) } else { cell.with(|_| ()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::UnsafeCell;

    const CAPACITY: usize = 8;
    const LARGE: usize = 32;

    struct Memory {
        positions: StreamPositions,
        bytes: UnsafeCell<[u8; CAPACITY]>,
        /// Two large rings.
        large: Box<UnsafeCell<[u8; 2 * LARGE]>>,
        rings: LargeRings,
        #[cfg(loom)]
        models: [Vec<loom::cell::UnsafeCell<()>>; 2],
    }

    // SAFETY: the bytes are accessed through `Stream` only.
    unsafe impl Sync for Memory {}
    // SAFETY: not bound to a thread.
    unsafe impl Send for Memory {}

    impl Memory {
        fn new() -> Self {
            let large = Box::new(UnsafeCell::new([0; 2 * LARGE]));
            let first = NonNull::new(large.get().cast()).expect("a box has an address");
            Self {
                positions: StreamPositions::new(),
                bytes: UnsafeCell::new([0; CAPACITY]),
                large,
                rings: LargeRings { memory: first, bytes: LARGE, count: 2 },
                #[cfg(loom)]
                models: [CAPACITY, LARGE]
                    .map(|bytes| (0..bytes).map(|_| loom::cell::UnsafeCell::new(())).collect()),
            }
        }

        fn stream(&self) -> Stream<'_> {
            let bytes = NonNull::new(self.bytes.get().cast()).expect("a field has an address");
            assert_eq!(
                self.rings.memory.as_ptr(),
                self.large.get().cast(),
                "the ring belongs to this memory"
            );
            Stream {
                positions: &self.positions,
                bytes,
                capacity: CAPACITY,
                large_rings: &self.rings,
                #[cfg(loom)]
                models: [&self.models[0], &self.models[1]],
                #[cfg(not(loom))]
                lifetime: PhantomData,
            }
        }
    }

    #[cfg(not(loom))]
    mod sequential {
        use super::*;
        use proptest::prelude::*;
        use std::collections::VecDeque;

        #[test]
        fn drained_stream_restarts_at_memory_start() {
            let memory = Memory::new();
            let (stream, mut written, mut read) = (memory.stream(), 0, 0);
            for _ in 0..5 {
                assert_eq!(stream.write(&mut written, b"abc"), Ok(3));
                let mut out = [0; 8];
                assert_eq!(stream.peek(read, 1, &mut out), Ok(2));
                assert_eq!(&out[..2], b"bc");
                stream.consume(&mut read, 3);
                assert_eq!(&memory.bytes_now()[..4], b"abc\0", "earlier memory is unused");
            }
        }

        #[test]
        fn impossible_positions_are_refused() {
            let memory = Memory::new();
            let (stream, mut written) = (memory.stream(), 5);
            memory.positions.read.0.store(6, Ordering::Relaxed);
            assert_eq!(stream.write(&mut written, b"x"), Err(InvalidPosition), "more was read than written");
            memory.positions.written.0.store(20, Ordering::Relaxed);
            assert_eq!(stream.readable(11), Err(InvalidPosition), "more than fits");
            assert_eq!(stream.readable(21), Err(InvalidPosition), "less than was read");
            assert_eq!(stream.readable(12), Ok(8));
            assert_eq!(written, 5);
        }

        #[test]
        fn large_ring_is_used_once_all_is_read() {
            let memory = Memory::new();
            let (stream, mut written, mut read) = (memory.stream(), 0, 0);
            assert_eq!(stream.write(&mut written, &[1; 20]), Ok(CAPACITY));
            memory.positions.grant(1);
            assert_eq!((stream.space(written), stream.write(&mut written, &[2])), (Ok(0), Ok(0)), "not yet");
            stream.consume(&mut read, 7);
            assert_eq!(stream.write(&mut written, &[2, 3]), Ok(2), "a byte is unread");
            stream.consume(&mut read, 3);
            assert_eq!((stream.unread(written), stream.space(written)), (Ok(0), Ok(LARGE)));
            let long: Vec<u8> = (0..40).collect();
            assert_eq!(stream.write(&mut written, &long), Ok(LARGE));
            assert_eq!((stream.readable(read), stream.space(written)), (Ok(LARGE), Ok(0)));
            let mut out = [0; 40];
            assert_eq!(stream.peek(read, 2, &mut out), Ok(LARGE - 2));
            assert_eq!(out[..LARGE - 2], long[2..LARGE]);
            // SAFETY: nothing else uses the bytes in this test.
            let large = unsafe { *memory.large.get() };
            assert_eq!(
                (&large[..LARGE], &large[LARGE..]),
                (&[0; LARGE][..], &long[..LARGE]),
                "in the second ring"
            );
            memory.positions.clear();
            assert_eq!(memory.stream().space(0), Ok(CAPACITY), "the next connection uses the own ring");
        }

        #[test]
        fn invalid_ring_number_means_the_own_ring() {
            let memory = Memory::new();
            let (stream, mut written) = (memory.stream(), 0);
            for number in [3, 4, u32::MAX] {
                memory.positions.granted_ring.store(number, Ordering::Relaxed);
                assert_eq!(stream.space(0), Ok(CAPACITY), "{number}");
            }
            memory.positions.granted_ring.store(2, Ordering::Relaxed);
            assert_eq!(stream.write(&mut written, &[7; LARGE]), Ok(LARGE));
            // Another process claims the smaller ring while more bytes are unread.
            memory.positions.ring.store(0, Ordering::Relaxed);
            assert_eq!(
                (stream.readable(0), stream.space(written)),
                (Err(InvalidPosition), Err(InvalidPosition))
            );
            stream.copy_unread(0, 3, &mut [0; LARGE]);
        }

        proptest! {
            #[test]
            fn bytes_come_out_as_written(
                steps in prop::collection::vec((any::<bool>(), 0..12usize), 1..200),
                grants in prop::option::of((0..100usize, 0..2u32)),
            ) {
                let memory = Memory::new();
                let (stream, mut written, mut read) = (memory.stream(), 0, 0);
                let mut oracle = VecDeque::new();
                let mut next = 0u8;
                let mut capacity = CAPACITY;
                for (number, (write, count)) in steps.into_iter().enumerate() {
                    if let Some((_, ring)) = grants.filter(|(step, _)| *step == number) {
                        memory.positions.grant(ring);
                    }
                    if write {
                        let bytes: Vec<u8> = (0..count).map(|i| next.wrapping_add(i as u8)).collect();
                        if oracle.is_empty() && grants.is_some_and(|(step, _)| step <= number) && count > 0 {
                            capacity = LARGE;
                        }
                        let done = stream.write(&mut written, &bytes).unwrap();
                        prop_assert_eq!(done, count.min(capacity - oracle.len()));
                        oracle.extend(&bytes[..done]);
                        next = next.wrapping_add(done as u8);
                    } else {
                        let mut out = vec![0; count];
                        let got = stream.peek(read, 0, &mut out).unwrap();
                        stream.consume(&mut read, got);
                        let expected: Vec<u8> = oracle.drain(..got).collect();
                        prop_assert_eq!(&out[..got], &expected[..]);
                        prop_assert_eq!(got, count.min(got + oracle.len()));
                    }
                    prop_assert_eq!(stream.readable(read), Ok(oracle.len()));
                }
            }
        }

        impl Memory {
            fn bytes_now(&self) -> [u8; CAPACITY] {
                // SAFETY: nothing else uses the bytes in these tests.
                unsafe { *self.bytes.get() }
            }
        }
    }

    #[cfg(loom)]
    mod model {
        use super::*;
        use std::sync::Arc;

        /// Bytes are read as they were written, also when the writer restarts at the beginning of the memory
        /// in between.
        #[test]
        fn no_byte_is_read_while_it_is_written() {
            loom::model(|| {
                let memory = Arc::new(Memory::new());
                let writer = {
                    let memory = memory.clone();
                    loom::thread::spawn(move || {
                        let mut written = 0;
                        for part in [&b"abcde"[..], b"fgh"] {
                            memory.stream().write(&mut written, part).unwrap();
                            // Between the two parts the writer may move to a larger ring, if all bytes were
                            // read by then.
                            memory.positions.grant(0);
                        }
                    })
                };
                let (stream, mut read, mut got) = (memory.stream(), 0, Vec::new());
                let mut take = |got: &mut Vec<u8>| {
                    let mut out = [0; CAPACITY];
                    let count = stream.peek(read, 0, &mut out).unwrap();
                    stream.consume(&mut read, count);
                    got.extend(&out[..count]);
                };
                take(&mut got);
                writer.join().unwrap();
                take(&mut got);
                assert_eq!(got, b"abcdefgh");
            });
        }
    }
}
