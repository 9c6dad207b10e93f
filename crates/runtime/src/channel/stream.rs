//! One direction of a socket's bytes: a ring with one writer and one reader at a time.
//!
//! Positions count the bytes of the stream and only grow. Whoever writes may begin anew at the start of the memory whenever all was read, so that
//! requests and responses stay in a page that is in the cache and a quiet connection uses one page of its ring.
//!
//! The stack trusts only what it wrote itself: it passes its own copy of its position, and takes the other side's only if it can be.
#![allow(unsafe_code)] // reads and writes bytes that another process may write at the same time

use super::bells::Padded;
use super::sync::{AtomicU64, Ordering};
use core::ptr::NonNull;

/// What both sides share, besides the bytes.
pub(super) struct Positions {
    /// Written by the writer: how many bytes were ever written, and which of them lies at the start of the memory.
    written: Padded<AtomicU64>,
    base: AtomicU64,
    /// Written by the reader.
    read: Padded<AtomicU64>,
}

impl Positions {
    #[cfg(test)]
    pub fn new() -> Self {
        Self { written: Padded(AtomicU64::new(0)), base: AtomicU64::new(0), read: Padded(AtomicU64::new(0)) }
    }

    /// Of a new connection, before anybody else knows it.
    pub fn clear(&self) {
        for position in [&self.written.0, &self.base, &self.read.0] {
            position.store(0, Ordering::Relaxed);
        }
    }

    /// How many bytes were ever written, as the writer says.
    pub fn written(&self) -> u64 {
        self.written.0.load(Ordering::Acquire)
    }

    /// How many were ever read, as the reader says.
    pub fn read(&self) -> u64 {
        self.read.0.load(Ordering::Acquire)
    }
}

/// A position of the other side that cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Impossible;

/// One direction. Copies are views of the same memory.
#[derive(Clone, Copy)]
pub(super) struct Stream<'a> {
    positions: &'a Positions,
    bytes: NonNull<u8>,
    capacity: usize,
    #[cfg(loom)]
    model: &'a [loom::cell::UnsafeCell<()>],
}

impl<'a> Stream<'a> {
    /// A direction in `capacity` bytes of shared memory, a power of two.
    ///
    /// # Safety
    /// The bytes stay mapped for `'a`, and are reached through values of this type only. Of those that run at the same time in
    /// well-behaved processes, one writes and one reads.
    pub unsafe fn new(positions: &'a Positions, bytes: NonNull<u8>, capacity: usize) -> Self {
        debug_assert!(capacity.is_power_of_two());
        Self {
            positions,
            bytes,
            capacity,
            // Shared memory is no place for the model checker's atomics: models make their own.
            #[cfg(loom)]
            model: &[],
        }
    }

    /// The byte at a position: its place, and how many follow without a gap.
    fn place(&self, position: u64, base: u64) -> (usize, usize) {
        let at = position.wrapping_sub(base) as usize & (self.capacity - 1);
        (at, self.capacity - at)
    }

    /// How many bytes wait, by what both sides say.
    ///
    /// # Errors
    /// More than fit.
    fn waiting(&self, written: u64, read: u64) -> Result<usize, Impossible> {
        match written.checked_sub(read) {
            Some(count) if count <= self.capacity as u64 => Ok(count as usize),
            _ => Err(Impossible),
        }
    }

    /// Room for the writer, whose position is `written`.
    ///
    /// # Errors
    /// The reader says that it read what was not written, or gave room that it had not.
    pub fn room(&self, written: u64) -> Result<usize, Impossible> {
        Ok(self.capacity - self.waiting(written, self.positions.read())?)
    }

    /// Writes as many bytes as there is room for, and returns how many. `written` is the writer's position, and moves.
    ///
    /// # Errors
    /// As [`Stream::room`]; nothing was written.
    pub fn write(&self, written: &mut u64, bytes: &[u8]) -> Result<usize, Impossible> {
        let room = self.room(*written)?;
        let count = room.min(bytes.len());
        if count == 0 {
            return Ok(0);
        }
        let mut base = self.positions.base.load(Ordering::Relaxed);
        if room == self.capacity {
            // All was read: nobody looks at the memory, nor at this word, until the position moves.
            base = *written;
            self.positions.base.store(base, Ordering::Relaxed);
        }
        let (at, until_end) = self.place(*written, base);
        let (first, second) = bytes[..count].split_at(count.min(until_end));
        self.copy_in(at, first);
        self.copy_in(0, second);
        *written += count as u64;
        self.positions.written.0.store(*written, Ordering::Release);
        Ok(count)
    }

    /// How many bytes wait for the reader, whose position is `read`.
    ///
    /// # Errors
    /// The writer says that it wrote more than fits, or less than was read.
    pub fn readable(&self, read: u64) -> Result<usize, Impossible> {
        self.waiting(self.positions.written(), read)
    }

    /// Copies bytes that wait to `out`, from `skip` behind the reader's position on; returns how many. They stay.
    ///
    /// # Errors
    /// As [`Stream::readable`].
    pub fn peek(&self, read: u64, skip: usize, out: &mut [u8]) -> Result<usize, Impossible> {
        let count = self.readable(read)?.saturating_sub(skip).min(out.len());
        let base = self.positions.base.load(Ordering::Relaxed);
        let (at, until_end) = self.place(read.wrapping_add(skip as u64), base);
        let (first, second) = out[..count].split_at_mut(count.min(until_end));
        self.copy_out(at, first);
        self.copy_out(0, second);
        Ok(count)
    }

    /// The reader has read `count` bytes more. `read` is its position, and moves.
    pub fn consume(&self, read: &mut u64, count: usize) {
        *read += count as u64;
        self.positions.read.0.store(*read, Ordering::Release);
    }

    fn copy_in(&self, at: usize, bytes: &[u8]) {
        self.note(at, bytes.len(), true);
        // SAFETY: `at + bytes.len()` is at most the capacity, by `place` and `split_at`. The reader does not look here before the
        // position moves; one that breaks the rules only sees other bytes.
        unsafe { self.bytes.add(at).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    fn copy_out(&self, at: usize, bytes: &mut [u8]) {
        self.note(at, bytes.len(), false);
        // SAFETY: as for `copy_in`; a writer that breaks the rules changes what the copy holds, which nobody relies on.
        unsafe { self.bytes.add(at).copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len()) };
    }

    /// Tells the model checker what is read and written.
    fn note(&self, _at: usize, _len: usize, _write: bool) {
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

    struct Memory {
        positions: Positions,
        bytes: UnsafeCell<[u8; CAPACITY]>,
        #[cfg(loom)]
        model: Vec<loom::cell::UnsafeCell<()>>,
    }

    // SAFETY: the bytes are reached through `Stream` only.
    unsafe impl Sync for Memory {}
    // SAFETY: not bound to a thread.
    unsafe impl Send for Memory {}

    impl Memory {
        fn new() -> Self {
            Self {
                positions: Positions::new(),
                bytes: UnsafeCell::new([0; CAPACITY]),
                #[cfg(loom)]
                model: (0..CAPACITY).map(|_| loom::cell::UnsafeCell::new(())).collect(),
            }
        }

        fn stream(&self) -> Stream<'_> {
            let bytes = NonNull::new(self.bytes.get().cast()).expect("a field has an address");
            Stream {
                positions: &self.positions,
                bytes,
                capacity: CAPACITY,
                #[cfg(loom)]
                model: &self.model,
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
            assert_eq!(stream.write(&mut written, b"x"), Err(Impossible), "read what was not written");
            memory.positions.written.0.store(20, Ordering::Relaxed);
            assert_eq!(stream.readable(11), Err(Impossible), "more than fits");
            assert_eq!(stream.readable(21), Err(Impossible), "less than was read");
            assert_eq!(stream.readable(12), Ok(8));
            assert_eq!(written, 5);
        }

        proptest! {
            #[test]
            fn whatever_goes_in_comes_out(steps in prop::collection::vec((any::<bool>(), 0..12usize), 1..200)) {
                let memory = Memory::new();
                let (stream, mut written, mut read) = (memory.stream(), 0, 0);
                let mut oracle = VecDeque::new();
                let mut next = 0u8;
                for (write, count) in steps {
                    if write {
                        let bytes: Vec<u8> = (0..count).map(|i| next.wrapping_add(i as u8)).collect();
                        let done = stream.write(&mut written, &bytes).unwrap();
                        prop_assert_eq!(done, count.min(CAPACITY - oracle.len()));
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
