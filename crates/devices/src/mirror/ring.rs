//! A ring in shared memory with copies of frames: a shard writes, another process reads. The shard never
//! waits: a frame that finds no room is counted and lost.
//!
//! ```text
//!   0      magic, version, bytes of the ring, bytes that are kept of a frame
//!   128    position of the reader
//!   256    position of the writer; frames that were lost
//!   4096   records, each aligned to 16 bytes and in one piece: a header of 16 bytes, the bytes of a frame
//! ```
//!
//! Positions count bytes and only grow. Each burst begins with a record that has its time, which is written
//! when the burst has ended; the burst is published as a whole. A record that would not fit before the end of
//! the ring is preceded by a header that sends the reader to the start.

use super::FrameSink;
use crate::offload::meta_of;
use crate::shared_region::{
    RECORD_HEADER_BYTES as HEADER_BYTES, RecordWriter, Region, SHORT_BYTES_MAX, record_bytes,
};
use ginnel_stack::device::{Gso, GsoKind, RxChecksum, RxFrame, TxMeta};
use ginnel_stack::time::Instant;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

const MAGIC: u64 = u64::from_le_bytes(*b"GINNELMR");
const VERSION: u64 = 4;
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const BYTES_AT: usize = 16;
const SNAPLEN_AT: usize = 24;
/// On cache lines of their own, since two processes write them.
const HEAD_AT: usize = 128;
const TAIL_AT: usize = 256;
const LOST_AT: usize = 264;
const RECORDS_AT: usize = 4096;

/// Bits 0..24 of the first word of a header are the bytes of the frame, bits 32..56 those of them that were
/// not copied, and the others flags. The second word has start and offset of the checksum or [`NO_PARTIAL`],
/// and size and header length of the segmentation, or the time of the burst.
const LEN_MASK: u64 = (1 << 24) - 1;
const MISSING_AT: u32 = 32;
/// Start and offset of the checksum of a frame whose checksum is complete: no frame is that long.
const NO_PARTIAL: u64 = 0xffff_ffff;
/// The record sends the reader to the start of the ring.
const FLAG_SKIP: u64 = 1 << 25;
/// The record begins a burst.
const FLAG_BURST: u64 = 1 << 26;
/// Position of the kind of segmentation in the flags; 0 is none.
const GSO_AT: u32 = 27;
const ECN_AT: u32 = 29;

/// Smallest ring in bytes.
pub const RING_BYTES_MIN: usize = 1 << 16;
/// Largest ring in bytes.
pub const RING_BYTES_MAX: usize = 1 << 30;

/// Returns the current time; gets the time at which the turn began.
pub type BurstClock = fn(Instant) -> Instant;

/// The writing end.
pub struct MirrorWriter {
    /// The ring. Its window is what may be written without looking at the reader, up to the end of the lap.
    records: RecordWriter,
    bytes: usize,
    snaplen: usize,
    clock: BurstClock,
    /// Position of the first byte of this lap through the ring.
    lap: u64,
    /// Position of the record that begins the burst: all records before are published. The record is written
    /// when the burst has ended. Room for it is left out beforehand, unless the window is too small.
    burst: u64,
    /// The reader's position when it was last looked at.
    head: u64,
    lost: u64,
}

/// The reading end.
#[derive(Debug)]
pub struct MirrorReader {
    region: Region,
    bytes: usize,
    head: u64,
    /// Time of the burst that is being read.
    time: Option<Instant>,
}

/// A copy of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirroredFrame {
    /// Time at which the shard had received or sent the burst.
    pub at: Instant,
    /// Length of the frame in bytes.
    pub frame_len: usize,
    /// Length of the copy: the beginning of the frame.
    pub copied_len: usize,
    /// Checksum and segmentation that are left to the device.
    pub meta: TxMeta,
}

/// Creates a ring of `bytes` bytes, at least [`RING_BYTES_MIN`] and at most [`RING_BYTES_MAX`], rounded up to
/// a power of two, for the first `snaplen` bytes of each frame. Returns the writing end, and the file to pass
/// to the reader.
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
    let mut records = RecordWriter::new(region, snaplen >= SHORT_BYTES_MAX);
    records.set_window(RECORDS_AT, RECORDS_AT);
    Ok((MirrorWriter { records, bytes, snaplen, clock, lap: 0, burst: 0, head: 0, lost: 0 }, file))
}

/// Returns the header of a frame of `len` bytes that is copied completely, but for its segmentation.
#[inline(always)]
fn encode(len: usize, partial_checksum: Option<(u16, u16)>) -> [u64; 2] {
    let second = match partial_checksum {
        Some((start, offset)) => u64::from(start) | u64::from(offset) << 16,
        None => {
            // Two branches take fewer instructions than a choice between two values.
            std::hint::cold_path();
            NO_PARTIAL
        }
    };
    // Lengths of frames are below 2^24.
    [len as u64, second]
}

/// Adds the segmentation of a super-frame to its header.
fn with_segmentation([first, second]: [u64; 2], gso: Gso) -> [u64; 2] {
    let kind = match gso.kind {
        GsoKind::Tcp4 => 1,
        GsoKind::Tcp6 => 2,
        GsoKind::Udp => 3,
    };
    let flags = kind << GSO_AT | u64::from(gso.ecn) << ECN_AT;
    [first | flags, second | u64::from(gso.size) << 32 | u64::from(gso.header_len) << 48]
}

/// Returns the metadata of a frame whose header has these words: the inverse of [`encode`] and
/// [`with_segmentation`].
fn decode(flags: u64, word: u64) -> TxMeta {
    // Each field has 16 bits.
    let half = |number: u32| (word >> (16 * number)) as u16;
    let kind = match flags >> GSO_AT & 3 {
        1 => Some(GsoKind::Tcp4),
        2 => Some(GsoKind::Tcp6),
        3 => Some(GsoKind::Udp),
        _ => None,
    };
    let ecn = flags >> ECN_AT & 1 != 0;
    let gso = kind.map(|kind| Gso { kind, size: half(2), header_len: half(3), ecn });
    let partial_checksum = (word & NO_PARTIAL != NO_PARTIAL).then(|| (half(0), half(1)));
    TxMeta { partial_checksum, gso, ..TxMeta::NONE }
}

impl MirrorWriter {
    /// Returns the position of the next record.
    #[inline(always)]
    fn next(&self) -> u64 {
        self.lap + (self.records.next() - RECORDS_AT) as u64
    }

    /// Returns whether frames were put since the burst began.
    #[inline(always)]
    fn has_frames(&self) -> bool {
        self.next() - self.burst > HEADER_BYTES as u64
    }

    /// Makes room for a record of `len` bytes, and for that of the burst if it is the first frame: begins the
    /// next lap, and looks at the reader. Returns false, and changes nothing, if there is no room.
    fn make_room(&mut self, len: usize) -> bool {
        let has_frames = self.has_frames();
        // The record of the burst precedes its first frame in the lap of that frame.
        let (start, needed) = if has_frames { (self.next(), len) } else { (self.burst, len + HEADER_BYTES) };
        // Cannot truncate: a position in this lap.
        let mut at = (start - self.lap) as usize;
        let lap_left = self.bytes - at;
        let wraps = needed > lap_left;
        let skipped = if wraps { lap_left } else { 0 };
        let head = self.records.control::<HEAD_AT>().load(Acquire);
        // A reader that writes nonsense loses its frames.
        if head < self.head
            || head > self.burst
            || start + (skipped + needed) as u64 - head > self.bytes as u64
        {
            return false;
        }
        self.head = head;
        if wraps {
            if lap_left > 0 {
                self.records.write_header(RECORDS_AT + at, [FLAG_SKIP, 0]);
            }
            (self.lap, at) = (self.lap + self.bytes as u64, 0);
        }
        if !has_frames {
            self.burst = self.lap + at as u64;
            at += HEADER_BYTES;
        }
        // Cannot truncate: the ring has room for as many bytes.
        let free = self.bytes - (self.lap + at as u64 - head) as usize;
        self.records.set_window(RECORDS_AT + at, RECORDS_AT + self.bytes.min(at + free));
        true
    }

    /// Puts any frame: also a long one, a super-frame, and one for which there may be no room. A separate
    /// function, so that the others, which are the majority, do not execute its instructions.
    #[cold]
    #[inline(never)]
    fn put_any(&mut self, frame: &[u8], meta: TxMeta) {
        let bytes = &frame[..frame.len().min(self.snaplen)];
        let [first, second] = encode(frame.len(), meta.partial_checksum);
        let words = [first | ((frame.len() - bytes.len()) as u64) << MISSING_AT, second];
        let words = meta.gso.map_or(words, |gso| with_segmentation(words, gso));
        let is_put = self.records.append(words, bytes)
            || self.make_room(record_bytes(bytes.len())) && self.records.append(words, bytes);
        if !is_put {
            self.lost += 1;
            self.records.control::<LOST_AT>().store(self.lost, Relaxed);
        }
    }
}

impl FrameSink for MirrorWriter {
    fn put(&mut self, frame: &[u8], meta: TxMeta) {
        if !self.put_short(frame, meta) {
            self.put_any(frame, meta);
        }
    }

    #[inline(always)]
    fn put_short(&mut self, frame: &[u8], meta: TxMeta) -> bool {
        meta.gso.is_none() && self.records.append_short(encode(frame.len(), meta.partial_checksum), frame)
    }

    #[inline(always)]
    fn put_received(&mut self, frames: &[RxFrame<'_>]) {
        let mut frames = frames;
        loop {
            frames = self.records.append_all_short(frames, |frame| {
                let partial_checksum = match frame.checksum {
                    RxChecksum::Partial { start, offset } => Some((start, offset)),
                    RxChecksum::Unverified | RxChecksum::Verified => None,
                };
                frame.gso.is_none().then(|| (encode(frame.bytes.len(), partial_checksum), frame.bytes))
            });
            let Some((frame, others)) = frames.split_first() else { return };
            self.put_any(frame.bytes, meta_of(frame));
            frames = others;
        }
    }

    fn end_burst(&mut self, now: Instant) {
        if !self.has_frames() {
            return;
        }
        let time = (self.clock)(now).as_nanos();
        // Cannot truncate: the remainder is below the size of the ring, which is a power of two.
        let at = (self.burst & (self.bytes as u64 - 1)) as usize;
        self.records.write_header(RECORDS_AT + at, [FLAG_BURST, time]);
        let next = self.next();
        self.records.control::<TAIL_AT>().store(next, Release);
        self.burst = next;
        // If there is no room for the record of the next burst, its first frame makes room for both.
        self.records.skip_header();
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
        Ok(Self { region: map(RECORDS_AT + bytes)?, bytes, head: 0, time: None })
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
            let word = |at: usize| u64::from_ne_bytes(*header[at..].first_chunk().unwrap_or(&[0; 8]));
            let (first, second) = (word(0), word(8));
            if first & FLAG_SKIP != 0 {
                let start = self.head + (self.bytes - offset) as u64;
                // A record follows.
                if start >= end {
                    return Err(corrupt());
                }
                self.head = start;
                continue;
            }
            if first & FLAG_BURST != 0 {
                self.time = Some(Instant::from_nanos(second));
                self.head += HEADER_BYTES as u64;
                continue;
            }
            // Cannot truncate: both have 24 bits.
            let frame_len = (first & LEN_MASK) as usize;
            let missing = (first >> MISSING_AT & LEN_MASK) as usize;
            let copied_len = frame_len.checked_sub(missing).ok_or_else(corrupt)?;
            let len = record_bytes(copied_len);
            let at = self.time.ok_or_else(corrupt)?;
            if offset + len > self.bytes || self.head + len as u64 > end {
                return Err(corrupt());
            }
            let start = out.len();
            out.resize(start + copied_len, 0);
            if !self.region.copy_out(RECORDS_AT + offset + HEADER_BYTES, &mut out[start..]) {
                return Err(corrupt());
            }
            self.head += len as u64;
            let meta = decode(first, second);
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
