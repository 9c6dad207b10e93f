//! What a connection needs only while it is in the middle of something: a request that came in pieces, a body to skip, a
//! response that did not fit into the send buffer. Most connections have none of it; those that do borrow a record from a pool.

use super::body::BodyReader;
use super::head::Scanner;
use super::site::FileId;
use rustix::io::{Errno, ReadWriteFlags};
use std::io;
use std::os::fd::OwnedFd;

/// No record.
pub const NONE: u32 = u32::MAX;
/// A buffer that grew beyond this is given back instead of kept for the next user: a head may have 16 KiB, but few do.
const RETAINED_BYTES_MAX: usize = 4 << 10;
/// How many times a read waits for the disk without blocking (a millisecond each) before it is done in blocking manner after all, so that
/// a file system whose pages never stay in the cache still gets served.
const NOWAIT_TRIES_MAX: u32 = 500;
/// Bytes that the kernel is asked to read ahead of a stream.
const READ_AHEAD_BYTES: u64 = 512 << 10;

/// What is still to be sent behind the head.
#[derive(Debug, Default)]
pub enum Payload {
    /// Nothing.
    #[default]
    None,
    /// A range of a loaded file.
    File {
        /// Which.
        file: FileId,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// A range of a file on disk.
    Stream(FileStream),
}

/// A range of an open file on its way out.
#[derive(Debug)]
pub struct FileStream {
    fd: OwnedFd,
    offset: u64,
    left: u64,
    /// Tries in a row that found nothing in the page cache.
    nowait_tries: u32,
    /// The file system cannot tell what is in its cache.
    always_blocks: bool,
}

/// What came of reading a piece.
#[derive(Debug, PartialEq, Eq)]
pub enum FileRead {
    /// So many bytes were read.
    Bytes(usize),
    /// They are not in the page cache yet; the kernel was asked to fetch them.
    WouldBlock,
    /// The file is shorter than it was, or cannot be read.
    Failed,
}

impl FileStream {
    /// `len` bytes of `fd` from `offset` on.
    pub const fn new(fd: OwnedFd, offset: u64, len: u64) -> Self {
        Self { fd, offset, left: len, nowait_tries: 0, always_blocks: false }
    }

    /// Bytes still to be sent.
    pub const fn left(&self) -> u64 {
        self.left
    }

    /// `n` bytes of the last piece were sent.
    pub const fn advance(&mut self, n: usize) {
        self.offset += n as u64;
        self.left -= n as u64;
    }

    /// Reads the next piece without waiting for a disk, unless that is the only way.
    pub fn read(&mut self, buffer: &mut [u8]) -> FileRead {
        let len = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let buffer = &mut buffer[..len];
        let blocking = self.always_blocks || self.nowait_tries >= NOWAIT_TRIES_MAX;
        let result = if blocking {
            rustix::io::pread(&self.fd, &mut *buffer, self.offset)
        } else {
            let mut slices = [io::IoSliceMut::new(buffer)];
            rustix::io::preadv2(&self.fd, &mut slices, self.offset, ReadWriteFlags::NOWAIT)
        };
        match result {
            Ok(0) => FileRead::Failed,
            Ok(n) => {
                self.nowait_tries = 0;
                FileRead::Bytes(n)
            }
            Err(Errno::AGAIN) if !blocking => {
                self.nowait_tries += 1;
                if self.nowait_tries == 1 {
                    // Only advice: if it is refused, patience runs out and the read blocks.
                    let ahead = core::num::NonZeroU64::new(READ_AHEAD_BYTES);
                    let _ = rustix::fs::fadvise(&self.fd, self.offset, ahead, rustix::fs::Advice::WillNeed);
                }
                FileRead::WouldBlock
            }
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) if !blocking => {
                self.always_blocks = true;
                self.read(buffer)
            }
            Err(Errno::INTR) => FileRead::WouldBlock,
            Err(_) => FileRead::Failed,
        }
    }
}

/// The record of a connection that is in the middle of something.
#[derive(Debug)]
pub struct Exchange {
    /// Beginning of a request whose head is not complete.
    pub input: Vec<u8>,
    /// How far `input` has been looked at.
    pub scanner: Scanner,
    /// Finds the end of the body that is being skipped.
    pub body: Option<BodyReader>,
    /// Bytes of the response still to be sent, from `sent` on.
    pub output: Vec<u8>,
    /// Bytes of `output` that were sent.
    pub sent: usize,
    /// Bytes at the front of `output` that belong to an interim response, which must be completed whatever follows.
    pub interim: usize,
    /// What follows `output`.
    pub payload: Payload,
    /// The connection is closed after the response.
    pub close: bool,
}

impl Exchange {
    const fn new() -> Self {
        Self {
            input: Vec::new(),
            scanner: Scanner::NEW,
            body: None,
            output: Vec::new(),
            sent: 0,
            interim: 0,
            payload: Payload::None,
            close: false,
        }
    }

    fn reset(&mut self) {
        let mut fresh = Self::new();
        for (old, new) in [(&mut self.input, &mut fresh.input), (&mut self.output, &mut fresh.output)] {
            if old.capacity() <= RETAINED_BYTES_MAX {
                core::mem::swap(old, new);
                new.clear();
            }
        }
        *self = fresh;
    }
}

/// The records, by index. It grows to the largest number of connections that were busy at once; each of them is bounded by the limits
/// on requests.
#[derive(Debug, Default)]
pub struct ExchangePool {
    records: Vec<Exchange>,
    free: Vec<u32>,
}

impl ExchangePool {
    /// Takes a record.
    pub fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.records.push(Exchange::new());
            self.records.len() as u32 - 1
        })
    }

    /// Gives a record back; what it holds is dropped.
    pub fn release(&mut self, index: u32) {
        self.records[index as usize].reset();
        self.free.push(index);
    }

    /// The record at `index`.
    pub fn get(&mut self, index: u32) -> &mut Exchange {
        &mut self.records[index as usize]
    }

    /// Records in use.
    pub fn in_use(&self) -> usize {
        self.records.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn stream(contents: &[u8], offset: u64, len: u64) -> FileStream {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(contents).unwrap();
        FileStream::new(file.into(), offset, len)
    }

    /// Reads to the end in pieces of 4 bytes.
    fn drain(stream: &mut FileStream) -> Result<Vec<u8>, FileRead> {
        let mut all = Vec::new();
        while stream.left() > 0 {
            let mut buffer = [0; 4];
            match stream.read(&mut buffer) {
                FileRead::Bytes(n) => {
                    all.extend_from_slice(&buffer[..n]);
                    stream.advance(n);
                }
                FileRead::WouldBlock => {}
                FileRead::Failed => return Err(FileRead::Failed),
            }
        }
        Ok(all)
    }

    #[test]
    fn a_stream_gives_exactly_its_range() {
        assert_eq!(drain(&mut stream(b"0123456789", 0, 10)).unwrap(), b"0123456789");
        assert_eq!(drain(&mut stream(b"0123456789", 3, 5)).unwrap(), b"34567");
        assert_eq!(drain(&mut stream(b"0123456789", 3, 0)).unwrap(), b"");
    }

    #[test]
    fn a_file_that_shrank_is_noticed() {
        assert_eq!(drain(&mut stream(b"0123456789", 3, 9)), Err(FileRead::Failed));
    }

    #[test]
    fn records_are_reused_and_come_back_empty() {
        let mut pool = ExchangePool::default();
        let (a, b) = (pool.take(), pool.take());
        assert_eq!((a, b, pool.in_use()), (0, 1, 2));
        pool.get(a).input.extend_from_slice(b"GET");
        pool.get(a).payload = Payload::File { file: FileId(1), offset: 0, len: 1 };
        pool.release(a);
        assert_eq!(pool.take(), a);
        assert!(pool.get(a).input.is_empty());
        assert!(matches!(pool.get(a).payload, Payload::None));
    }
}
