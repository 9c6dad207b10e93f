//! One direction of a socket's bytes: a ring with one writer and one reader at a time.
//!
//! Positions count the bytes of the stream and only grow. Whoever writes may begin anew at the start of the memory whenever all was read, so that
//! requests and responses stay in a page that is in the cache and a quiet connection uses one page of its ring. Then it may also go over to a larger ring that the stack has
//! granted, so that those that move much wake each other less often.
//!
//! The stack trusts only what it wrote itself: it passes its own copy of its position, and takes the other side's only if it can be.
#![allow(unsafe_code)] // reads and writes bytes that another process may write at the same time

use super::doorbells::CachePadded;
use super::sync::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use core::marker::PhantomData;
use core::ptr::NonNull;

/// What both sides share, besides the bytes.
pub(super) struct StreamPositions {
    /// Written by the writer: how many bytes were ever written, and which of them lies at the start of the memory.
    written: CachePadded<AtomicU64>,
    base: AtomicU64,
    /// Written by the writer: which of the large rings the bytes lie in, and one; 0 for the socket's own.
    ring: AtomicU32,
    /// Written by the stack: the ring in which the writer may go on.
    granted_ring: AtomicU32,
    /// Written by the stack where it reads: how many bytes it has taken. It comes back to them until it has `read` them; 0, or less than that, if it does not.
    taken: AtomicU64,
    /// Written by the reader: what is before may be written over.
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

    /// Of a new connection, before anybody else knows it.
    pub fn clear(&self) {
        for position in [&self.written.0, &self.base, &self.taken, &self.read.0] {
            position.store(0, Ordering::Relaxed);
        }
        self.ring.store(0, Ordering::Relaxed);
        self.granted_ring.store(0, Ordering::Relaxed);
    }

    /// What a writer that keeps to no rules says.
    #[cfg(all(test, not(loom)))]
    pub fn forge_ring(&self, number: u32) {
        self.ring.store(number, Ordering::Relaxed);
    }

    /// The writer may go on in a large ring, by its number, as soon as all was read.
    pub fn grant(&self, ring: u32) {
        self.granted_ring.store(ring + 1, Ordering::Release);
    }

    /// How many bytes were ever written, as the writer says.
    pub fn written(&self) -> u64 {
        self.written.0.load(Ordering::Acquire)
    }

    /// How many the stack has taken, of what clients wrote.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed).max(self.read())
    }

    /// How many were ever read, as the reader says.
    pub fn read(&self) -> u64 {
        self.read.0.load(Ordering::Acquire)
    }
}

/// A position of the other side that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidPosition;

/// The large rings of a region, one behind the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct LargeRings {
    pub memory: NonNull<u8>,
    /// Bytes of each, a power of two.
    pub bytes: usize,
    pub count: u32,
}

/// A ring that is used: its memory and how much that is.
#[derive(Clone, Copy)]
struct RingMemory<'a> {
    bytes: NonNull<u8>,
    capacity: usize,
    #[cfg(loom)]
    model: &'a [loom::cell::UnsafeCell<()>],
    #[cfg(not(loom))]
    lifetime: PhantomData<&'a ()>,
}

/// One direction. Copies are views of the same memory.
#[derive(Clone, Copy)]
pub(super) struct Stream<'a> {
    positions: &'a StreamPositions,
    /// The socket's own.
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
    /// A direction in `capacity` bytes of shared memory, a power of two, or in one of `rings`.
    ///
    /// # Safety
    /// All these bytes stay mapped for `'a`, and are reached through values of this type only. Of those that run at the same time in
    /// well-behaved processes, one writes and one reads.
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
            // Shared memory is no place for the model checker's atomics: models make their own.
            #[cfg(loom)]
            models: [&[], &[]],
            #[cfg(not(loom))]
            lifetime: PhantomData,
        }
    }

    /// The ring of a number, which others may have written: one that there is not stands for the socket's own.
    #[inline]
    fn ring(&self, number: u32) -> RingMemory<'a> {
        match number.checked_sub(1) {
            Some(place) if place < self.large_rings.count => RingMemory {
                // SAFETY: there are so many, all inside of the mapping, as `new` was promised.
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

    /// The ring in which the bytes lie. To be looked at behind the position that says that there are any.
    #[inline]
    fn current_ring(&self) -> RingMemory<'a> {
        self.ring(self.positions.ring.load(Ordering::Relaxed))
    }

    /// The number of the ring in which the writer goes on when all was read.
    #[inline]
    fn next_ring(&self) -> u32 {
        match self.positions.granted_ring.load(Ordering::Acquire) {
            0 => self.positions.ring.load(Ordering::Relaxed),
            granted => granted,
        }
    }

    /// How many bytes wait, by what both sides say.
    ///
    /// # Errors
    /// More than fit.
    #[inline]
    fn unread_between(&self, written: u64, read: u64) -> Result<usize, InvalidPosition> {
        let Some(count) = written.checked_sub(read) else { return Err(InvalidPosition) };
        // Mostly the socket's own ring is large enough for what waits.
        if count <= self.capacity as u64
            || count <= self.ring_capacity(self.positions.ring.load(Ordering::Relaxed)) as u64
        {
            return Ok(count as usize);
        }
        Err(InvalidPosition)
    }

    /// Room for the writer, whose position is `written`.
    ///
    /// # Errors
    /// The reader says that it read what was not written, or gave room that it had not.
    #[inline]
    pub fn space(&self, written: u64) -> Result<usize, InvalidPosition> {
        self.unread(written).map(|waiting| self.space_beside(waiting))
    }

    /// The same where the reader has not read `waiting` bytes.
    #[inline]
    pub fn space_beside(&self, waiting: usize) -> usize {
        match waiting {
            0 => self.ring_capacity(self.next_ring()),
            // What does not fit any more another process has made of the number of the ring.
            waiting => {
                self.ring_capacity(self.positions.ring.load(Ordering::Relaxed)).saturating_sub(waiting)
            }
        }
    }

    /// Bytes of the ring of a number, as [`ring`](Self::ring) finds it.
    #[inline]
    fn ring_capacity(&self, number: u32) -> usize {
        // 0, and what there is not, is the socket's own.
        if number.wrapping_sub(1) < self.large_rings.count { self.large_rings.bytes } else { self.capacity }
    }

    /// How many bytes the reader has not read, whose writer's position is `written`.
    ///
    /// # Errors
    /// As [`Stream::room`].
    #[inline]
    pub fn unread(&self, written: u64) -> Result<usize, InvalidPosition> {
        self.unread_between(written, self.positions.read())
    }

    /// Writes as many bytes as there is room for, and returns how many. `written` is the writer's position, and moves.
    ///
    /// # Errors
    /// As [`Stream::room`]; nothing was written.
    pub fn write(&self, written: &mut u64, bytes: &[u8]) -> Result<usize, InvalidPosition> {
        let waiting = self.unread(*written)?;
        let mut base = self.positions.base.load(Ordering::Relaxed);
        let mut number = self.positions.ring.load(Ordering::Relaxed);
        if waiting == 0 && !bytes.is_empty() {
            // All was read: nobody looks at the memory, nor at these words, until the position moves.
            base = *written;
            self.positions.base.store(base, Ordering::Relaxed);
            let next = self.next_ring();
            if next != number {
                number = next;
                self.positions.ring.store(number, Ordering::Relaxed);
            }
        }
        let ring = self.ring(number);
        let count = ring.capacity.saturating_sub(waiting).min(bytes.len());
        if count == 0 {
            return Ok(0);
        }
        let (at, until_end) = ring.locate(*written, base);
        let (first, second) = bytes[..count].split_at(count.min(until_end));
        ring.copy_in(at, first);
        ring.copy_in(0, second);
        *written += count as u64;
        self.positions.written.0.store(*written, Ordering::Release);
        Ok(count)
    }

    /// How many bytes wait for the reader, whose position is `read`.
    ///
    /// # Errors
    /// The writer says that it wrote more than fits, or less than was read.
    #[inline]
    pub fn readable(&self, read: u64) -> Result<usize, InvalidPosition> {
        self.unread_between(self.positions.written(), read)
    }

    /// Copies bytes that wait to `out`, from `skip` behind the reader's position on; returns how many. They stay.
    ///
    /// # Errors
    /// As [`Stream::readable`].
    pub fn peek(&self, read: u64, skip: usize, out: &mut [u8]) -> Result<usize, InvalidPosition> {
        let count = self.readable(read)?.saturating_sub(skip).min(out.len());
        self.copy_unread(read, skip, &mut out[..count]);
        Ok(count)
    }

    /// Fills `out` from `skip` bytes behind the reader's position on. So many wait, as [`readable`](Self::readable) has said: what the writer says by now is not asked.
    pub fn copy_unread(&self, read: u64, skip: usize, out: &mut [u8]) {
        let base = self.positions.base.load(Ordering::Relaxed);
        let ring = self.current_ring();
        let (mut at, mut until_end) = ring.locate(read.wrapping_add(skip as u64), base);
        let mut out = out;
        // Twice at the most; more often only if another process has made the ring smaller meanwhile, whose bytes they are.
        while !out.is_empty() {
            let (first, second) = out.split_at_mut(out.len().min(until_end));
            ring.copy_out(at, first);
            (at, until_end, out) = (0, ring.capacity, second);
        }
    }

    /// Where the byte at the reader's position lies: the number of its large ring, if it is in one, its place there, and how many bytes follow without a gap.
    pub fn locate_in_large(&self, read: u64) -> Option<(u32, usize, usize)> {
        let number = self.positions.ring.load(Ordering::Relaxed).checked_sub(1)?;
        if number >= self.large_rings.count {
            return None;
        }
        let (at, until_end) = self.ring(number + 1).locate(read, self.positions.base.load(Ordering::Relaxed));
        Some((number, at, until_end))
    }

    /// The stack has taken `count` bytes more, and comes back to them.
    pub fn advance_taken(&self, taken: &mut u64, count: usize) {
        *taken += count as u64;
        self.positions.taken.store(*taken, Ordering::Relaxed);
    }

    /// What is before `read` is read.
    pub fn advance_read(&self, read: u64) {
        self.positions.read.0.store(read, Ordering::Release);
    }

    /// The reader has read `count` bytes more. `read` is its position, and moves.
    pub fn consume(&self, read: &mut u64, count: usize) {
        *read += count as u64;
        self.positions.read.0.store(*read, Ordering::Release);
    }
}

impl RingMemory<'_> {
    /// The byte at a position: its place, and how many follow without a gap.
    #[inline]
    fn locate(&self, position: u64, base: u64) -> (usize, usize) {
        let at = position.wrapping_sub(base) as usize & (self.capacity - 1);
        (at, self.capacity - at)
    }

    fn copy_in(&self, at: usize, bytes: &[u8]) {
        self.record_access(at, bytes.len(), true);
        // SAFETY: `at + bytes.len()` is at most the capacity, by `place` and `split_at`. The reader does not look here before the
        // position moves; one that breaks the rules only sees other bytes.
        unsafe { self.bytes.add(at).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    fn copy_out(&self, at: usize, bytes: &mut [u8]) {
        self.record_access(at, bytes.len(), false);
        // SAFETY: as for `copy_in`; a writer that breaks the rules changes what the copy holds, which nobody relies on.
        unsafe { self.bytes.add(at).copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len()) };
    }

    /// Tells the model checker what is read and written.
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

    // SAFETY: the bytes are reached through `Stream` only.
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
            assert_eq!(self.rings.memory.as_ptr(), self.large.get().cast(), "the large rings are this one's");
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
        fn a_stream_that_was_read_begins_at_the_start_of_the_memory() {
            let memory = Memory::new();
            let (stream, mut written, mut read) = (memory.stream(), 0, 0);
            for _ in 0..5 {
                assert_eq!(stream.write(&mut written, b"abc"), Ok(3));
                let mut out = [0; 8];
                assert_eq!(stream.peek(read, 1, &mut out), Ok(2));
                assert_eq!(&out[..2], b"bc");
                stream.consume(&mut read, 3);
                assert_eq!(&memory.bytes_now()[..4], b"abc\0", "nothing lies further back");
            }
        }

        #[test]
        fn positions_that_cannot_be_are_refused() {
            let memory = Memory::new();
            let (stream, mut written) = (memory.stream(), 5);
            memory.positions.read.0.store(6, Ordering::Relaxed);
            assert_eq!(stream.write(&mut written, b"x"), Err(InvalidPosition), "read what was not written");
            memory.positions.written.0.store(20, Ordering::Relaxed);
            assert_eq!(stream.readable(11), Err(InvalidPosition), "more than fits");
            assert_eq!(stream.readable(21), Err(InvalidPosition), "less than was read");
            assert_eq!(stream.readable(12), Ok(8));
            assert_eq!(written, 5);
        }

        #[test]
        fn a_large_ring_is_used_from_when_all_was_read_on() {
            let memory = Memory::new();
            let (stream, mut written, mut read) = (memory.stream(), 0, 0);
            assert_eq!(stream.write(&mut written, &[1; 20]), Ok(CAPACITY));
            memory.positions.grant(1);
            assert_eq!((stream.space(written), stream.write(&mut written, &[2])), (Ok(0), Ok(0)), "not yet");
            stream.consume(&mut read, 7);
            assert_eq!(stream.write(&mut written, &[2, 3]), Ok(2), "there is a byte left");
            stream.consume(&mut read, 3);
            assert_eq!((stream.unread(written), stream.space(written)), (Ok(0), Ok(LARGE)));
            let long: Vec<u8> = (0..40).collect();
            assert_eq!(stream.write(&mut written, &long), Ok(LARGE));
            assert_eq!((stream.readable(read), stream.space(written)), (Ok(LARGE), Ok(0)));
            let mut out = [0; 40];
            assert_eq!(stream.peek(read, 2, &mut out), Ok(LARGE - 2));
            assert_eq!(out[..LARGE - 2], long[2..LARGE]);
            // SAFETY: nobody else uses it in this test.
            let large = unsafe { *memory.large.get() };
            assert_eq!(
                (&large[..LARGE], &large[LARGE..]),
                (&[0; LARGE][..], &long[..LARGE]),
                "in the second one"
            );
            memory.positions.clear();
            assert_eq!(memory.stream().space(0), Ok(CAPACITY), "the next connection has its own again");
        }

        #[test]
        fn numbers_of_rings_that_there_are_not_stand_for_the_socket_s_own() {
            let memory = Memory::new();
            let (stream, mut written) = (memory.stream(), 0);
            for number in [3, 4, u32::MAX] {
                memory.positions.granted_ring.store(number, Ordering::Relaxed);
                assert_eq!(stream.space(0), Ok(CAPACITY), "{number}");
            }
            memory.positions.granted_ring.store(2, Ordering::Relaxed);
            assert_eq!(stream.write(&mut written, &[7; LARGE]), Ok(LARGE));
            // Another process makes the ring smaller while there is more in it.
            memory.positions.ring.store(0, Ordering::Relaxed);
            assert_eq!(
                (stream.readable(0), stream.space(written)),
                (Err(InvalidPosition), Err(InvalidPosition))
            );
            stream.copy_unread(0, 3, &mut [0; LARGE]);
        }

        proptest! {
            #[test]
            fn whatever_goes_in_comes_out(
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
                // SAFETY: nobody else uses it in these tests.
                unsafe { *self.bytes.get() }
            }
        }
    }

    #[cfg(loom)]
    mod model {
        use super::*;
        use std::sync::Arc;

        /// Bytes are seen as they were written, also when the writer begins anew in between.
        #[test]
        fn the_reader_sees_what_was_written_and_no_byte_is_read_while_it_is_written() {
            loom::model(|| {
                let memory = Arc::new(Memory::new());
                let writer = {
                    let memory = memory.clone();
                    loom::thread::spawn(move || {
                        let mut written = 0;
                        for part in [&b"abcde"[..], b"fgh"] {
                            memory.stream().write(&mut written, part).unwrap();
                            // Between the two it may go over to a larger ring, if all was read by then.
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
