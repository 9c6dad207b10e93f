//! A ring in shared memory with copies of frames: a shard writes, another process reads. The shard never
//! waits: a frame that finds no room is counted and lost.
//!
//! ```text
//!   0      magic, version, bytes of the ring, bytes that are kept of a frame
//!   128    position of the reader
//!   256    position of the writer; frames that were lost
//!   4096   records, each aligned to 32 bytes and in one piece: a header of 32 bytes, and the bytes of a frame
//! ```
//!
//! Positions count bytes and only grow. A record that would not fit before the end of the ring is preceded by
//! a header that sends the reader to the start.

use super::FrameSink;
use crate::shared_region::Region;
use ginnel_stack::device::{Gso, GsoKind, TxMeta};
use ginnel_stack::time::Instant;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const MAGIC: u64 = u64::from_le_bytes(*b"GINNELMR");
const VERSION: u64 = 1;
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const BYTES_AT: usize = 16;
const SNAPLEN_AT: usize = 24;
/// On cache lines of their own, since two processes write them.
const HEAD_AT: usize = 128;
const TAIL_AT: usize = 256;
const LOST_AT: usize = 264;
const RECORDS_AT: usize = 4096;

const HEADER_BYTES: usize = 32;
const FLAG_PARTIAL: u32 = 1;
const FLAG_SKIP: u32 = 2;
/// Position of the kind of segmentation in the flags; 0 is none.
const GSO_AT: u32 = 4;

/// Smallest and largest ring in bytes.
pub const RING_BYTES_MIN: usize = 1 << 16;
/// Largest ring in bytes.
pub const RING_BYTES_MAX: usize = 1 << 30;

/// Returns the current time; gets the time at which the turn began.
pub type BurstClock = fn(Instant) -> Instant;

/// The writing end.
pub struct MirrorWriter {
    region: Region,
    bytes: usize,
    snaplen: usize,
    clock: BurstClock,
    /// Position after the last record.
    tail: u64,
    /// The reader's position when the ring was last found full.
    head: u64,
    lost: u64,
    /// Positions of the records of this burst, whose time is not written yet.
    unstamped: Vec<u64>,
}

/// The reading end.
#[derive(Debug)]
pub struct MirrorReader {
    region: Region,
    bytes: usize,
    head: u64,
}

/// A copy of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirroredFrame {
    /// When the shard had received the burst, or has sent it.
    pub at: Instant,
    /// Length of the frame in bytes.
    pub frame_len: usize,
    /// Length of the copy: the beginning of the frame.
    pub copied_len: usize,
    /// Checksum and segmentation that are left to the device.
    pub meta: TxMeta,
}

/// Creates a ring of `bytes` bytes, rounded up to a power of two, for the first `snaplen` bytes of each
/// frame. Returns the writing end, and the file to pass to the reader.
///
/// # Errors
/// There is no memory.
pub fn create(bytes: usize, snaplen: usize, clock: BurstClock) -> io::Result<(MirrorWriter, OwnedFd)> {
    let bytes = bytes.clamp(RING_BYTES_MIN, RING_BYTES_MAX).next_power_of_two();
    let (region, file) = Region::create("ginnel-mirror", RECORDS_AT + bytes)?;
    for (at, value) in
        [(VERSION_AT, VERSION), (BYTES_AT, bytes as u64), (SNAPLEN_AT, snaplen as u64), (MAGIC_AT, MAGIC)]
    {
        region.u64(at).store(value, Release);
    }
    // Touches all pages now, so that the shard causes no page faults.
    for page in (0..bytes).step_by(RECORDS_AT) {
        region.u64(RECORDS_AT + page).store(0, Relaxed);
    }
    let unstamped = Vec::with_capacity(256);
    Ok((MirrorWriter { region, bytes, snaplen, clock, tail: 0, head: 0, lost: 0, unstamped }, file))
}

impl MirrorWriter {
    /// Reserves `len` bytes, and returns their position, or `None` if there is no room.
    fn reserve(&mut self, len: usize) -> Option<u64> {
        // Cannot truncate: the remainder is below the size of the ring.
        let offset = (self.tail % self.bytes as u64) as usize;
        let skipped = if offset + len > self.bytes { self.bytes - offset } else { 0 };
        let end = self.tail + (skipped + len) as u64;
        if end - self.head > self.bytes as u64 {
            let head = self.region.u64(HEAD_AT).load(Acquire);
            // A reader that writes nonsense loses its frames.
            if head < self.head || head > self.tail || end - head > self.bytes as u64 {
                return None;
            }
            self.head = head;
        }
        if skipped > 0 {
            let mut header = [0; HEADER_BYTES];
            header[24..28].copy_from_slice(&FLAG_SKIP.to_ne_bytes());
            if !self.region.copy_in(RECORDS_AT + offset, &header) {
                return None;
            }
        }
        let at = self.tail + skipped as u64;
        self.tail = end;
        Some(at)
    }

    fn offset(&self, position: u64) -> usize {
        // Cannot truncate: the remainder is below the size of the ring.
        RECORDS_AT + (position % self.bytes as u64) as usize
    }
}

impl FrameSink for MirrorWriter {
    fn put(&mut self, frame: &[u8], meta: TxMeta) {
        let copy = &frame[..frame.len().min(self.snaplen)];
        let Some(at) = self.reserve((HEADER_BYTES + copy.len()).next_multiple_of(HEADER_BYTES)) else {
            self.lost += 1;
            return;
        };
        let mut header = [0; HEADER_BYTES];
        // Lengths of frames are below 2^24.
        header[0..4].copy_from_slice(&(copy.len() as u32).to_ne_bytes());
        header[4..8].copy_from_slice(&(frame.len() as u32).to_ne_bytes());
        let mut flags = 0;
        if let Some((start, offset)) = meta.partial_checksum {
            flags |= FLAG_PARTIAL;
            header[16..18].copy_from_slice(&start.to_ne_bytes());
            header[18..20].copy_from_slice(&offset.to_ne_bytes());
        }
        if let Some(gso) = meta.gso {
            let kind = match gso.kind {
                GsoKind::Tcp4 => 1,
                GsoKind::Tcp6 => 2,
                GsoKind::Udp => 3,
            };
            flags |= (kind | u32::from(gso.ecn) << 2) << GSO_AT;
            header[20..22].copy_from_slice(&gso.size.to_ne_bytes());
            header[22..24].copy_from_slice(&gso.header_len.to_ne_bytes());
        }
        header[24..28].copy_from_slice(&flags.to_ne_bytes());
        let offset = self.offset(at);
        let is_copied =
            self.region.copy_in(offset, &header) && self.region.copy_in(offset + HEADER_BYTES, copy);
        debug_assert!(is_copied, "the record is inside of the ring");
        self.unstamped.push(at);
    }

    fn end_burst(&mut self, now: Instant) {
        if self.unstamped.is_empty() {
            self.region.u64(LOST_AT).store(self.lost, Relaxed);
            return;
        }
        let time = (self.clock)(now).as_nanos().to_ne_bytes();
        let (region, bytes) = (&self.region, self.bytes as u64);
        for at in self.unstamped.drain(..) {
            // Cannot truncate: the remainder is below the size of the ring.
            let is_copied = region.copy_in(RECORDS_AT + (at % bytes) as usize + 8, &time);
            debug_assert!(is_copied, "the record is inside of the ring");
        }
        self.region.u64(LOST_AT).store(self.lost, Relaxed);
        self.region.u64(TAIL_AT).store(self.tail, Release);
    }
}

impl MirrorReader {
    /// Maps the file of a ring.
    ///
    /// # Errors
    /// The file is no ring of this version.
    pub fn open(file: &OwnedFd) -> io::Result<Self> {
        let invalid = |problem: String| io::Error::new(io::ErrorKind::InvalidData, problem);
        let map = |len| Region::from_peer(file, len).map_err(|e| invalid(e.to_string()));
        let head = map(RECORDS_AT)?;
        if head.u64(MAGIC_AT).load(Acquire) != MAGIC || head.u64(VERSION_AT).load(Relaxed) != VERSION {
            return Err(invalid("not a mirror of this version of ginnel".into()));
        }
        let bytes = usize::try_from(head.u64(BYTES_AT).load(Relaxed)).unwrap_or(0);
        if !bytes.is_power_of_two() || !(RING_BYTES_MIN..=RING_BYTES_MAX).contains(&bytes) {
            return Err(invalid(format!("a mirror of {bytes} bytes")));
        }
        Ok(Self { region: map(RECORDS_AT + bytes)?, bytes, head: 0 })
    }

    /// Returns the position of the writer, for [`MirrorReader::read`].
    ///
    /// # Errors
    /// The position is impossible.
    pub fn written(&self) -> io::Result<u64> {
        let tail = self.region.u64(TAIL_AT).load(Acquire);
        match tail.checked_sub(self.head) {
            Some(waiting) if waiting <= self.bytes as u64 => Ok(tail),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the mirror is corrupt")),
        }
    }

    /// Appends the next frame before the position `end` to `out`. Returns `None` if there is none.
    ///
    /// # Errors
    /// The record is impossible.
    pub fn read(&mut self, end: u64, out: &mut Vec<u8>) -> io::Result<Option<MirroredFrame>> {
        let corrupt = || io::Error::new(io::ErrorKind::InvalidData, "the mirror is corrupt");
        while self.head < end {
            // Cannot truncate: the remainder is below the size of the ring.
            let offset = (self.head % self.bytes as u64) as usize;
            let mut header = [0; HEADER_BYTES];
            if offset + HEADER_BYTES > self.bytes || !self.region.copy_out(RECORDS_AT + offset, &mut header) {
                return Err(corrupt());
            }
            let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
            let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
            let (copied_len, frame_len, flags) = (word(0) as usize, word(4) as usize, word(24));
            if flags & FLAG_SKIP != 0 {
                self.head += (self.bytes - offset) as u64;
                continue;
            }
            let len = (HEADER_BYTES + copied_len).next_multiple_of(HEADER_BYTES);
            if copied_len > frame_len || offset + len > self.bytes || self.head + len as u64 > end {
                return Err(corrupt());
            }
            let start = out.len();
            out.resize(start + copied_len, 0);
            if !self.region.copy_out(RECORDS_AT + offset + HEADER_BYTES, &mut out[start..]) {
                return Err(corrupt());
            }
            self.head += len as u64;
            let kind = match flags >> GSO_AT & 3 {
                1 => Some(GsoKind::Tcp4),
                2 => Some(GsoKind::Tcp6),
                3 => Some(GsoKind::Udp),
                _ => None,
            };
            let ecn = flags >> (GSO_AT + 2) & 1 != 0;
            let gso = kind.map(|kind| Gso { kind, size: half(20), header_len: half(22), ecn });
            let partial_checksum = (flags & FLAG_PARTIAL != 0).then(|| (half(16), half(18)));
            let at = Instant::from_nanos(u64::from(word(8)) | u64::from(word(12)) << 32);
            let meta = TxMeta { partial_checksum, gso, ..TxMeta::NONE };
            return Ok(Some(MirroredFrame { at, frame_len, copied_len, meta }));
        }
        Ok(None)
    }

    /// Returns the memory of the frames that were read to the writer.
    pub fn release(&mut self) {
        self.region.u64(HEAD_AT).store(self.head, Release);
    }

    /// Returns how many frames found no room so far.
    pub fn lost(&self) -> u64 {
        self.region.u64(LOST_AT).load(Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
