//! State of an exchange (a request and its response) that is in progress: a head that arrived in part, a body
//! to be skipped, a response that did not fit into the send buffer. Most connections need none; the others
//! borrow a record from a pool.

use super::body::BodyReader;
use super::head::Scanner;
use super::site::FileId;
use rustix::io::{Errno, ReadWriteFlags};
use std::io;
use std::os::fd::OwnedFd;

/// Index that stands for no record.
pub const NONE: u32 = u32::MAX;
/// Largest capacity in bytes of a buffer that a released record keeps; a larger buffer is freed. Few heads
/// reach the 16 KiB that they may have.
const RETAINED_BYTES_MAX: usize = 4 << 10;
/// Non-blocking reads (one per millisecond) that may fail in a row before a blocking read follows. So files
/// are also served from a file system whose pages never stay in the page cache.
const NOWAIT_TRIES_MAX: u32 = 500;
/// Bytes that the kernel is asked to read ahead.
const READ_AHEAD_BYTES: u64 = 512 << 10;

/// The part of a response that follows its head.
#[derive(Debug, Default)]
pub enum Payload {
    /// No payload.
    #[default]
    None,
    /// A range of a loaded file.
    File {
        /// The file.
        file: FileId,
        /// Offset of the first byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// A range of a file on disk.
    Stream(FileStream),
}

/// A range of an open file that is being sent.
#[derive(Debug)]
pub struct FileStream {
    fd: OwnedFd,
    offset: u64,
    left: u64,
    /// Non-blocking reads in a row that found nothing in the page cache.
    nowait_tries: u32,
    /// True if the file system does not support non-blocking reads.
    always_blocks: bool,
}

/// Result of reading a block of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum FileRead {
    /// This many bytes were read.
    Bytes(usize),
    /// The bytes are not in the page cache; the kernel was asked to read them.
    WouldBlock,
    /// The file has become shorter, or cannot be read.
    Failed,
}

impl FileStream {
    /// Creates a stream of `len` bytes of `fd` from `offset` on.
    pub const fn new(fd: OwnedFd, offset: u64, len: u64) -> Self {
        Self { fd, offset, left: len, nowait_tries: 0, always_blocks: false }
    }

    /// Returns the number of bytes still to be sent.
    pub const fn left(&self) -> u64 {
        self.left
    }

    /// Marks `n` bytes of the last block as sent.
    pub const fn advance(&mut self, n: usize) {
        self.offset += n as u64;
        self.left -= n as u64;
    }

    /// Reads the next block into `buffer`, without waiting for the disk if possible.
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
                    // This is only advice. If the kernel ignores it, the read blocks after `NOWAIT_TRIES_MAX`
                    // tries.
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

/// The record of an exchange in progress.
#[derive(Debug)]
pub struct Exchange {
    /// Received part of an incomplete head.
    pub input: Vec<u8>,
    /// State of the search for the end of the head in `input`.
    pub scanner: Scanner,
    /// Finds the end of the body that is being skipped.
    pub body: Option<BodyReader>,
    /// Bytes of the response; those from `sent` on are still to be sent.
    pub output: Vec<u8>,
    /// Number of bytes of `output` that were sent.
    pub sent: usize,
    /// Number of bytes at the front of `output` that belong to an interim response, which must be completed
    /// in any case.
    pub interim: usize,
    /// The payload after `output`.
    pub payload: Payload,
    /// True if the connection is closed after the response.
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
        let input = retained(core::mem::take(&mut self.input));
        let output = retained(core::mem::take(&mut self.output));
        *self = Self { input, output, ..Self::new() };
    }
}

/// Returns a buffer that is no longer needed, cleared, or an empty one in the place of a large one.
pub fn retained(mut buffer: Vec<u8>) -> Vec<u8> {
    if buffer.capacity() > RETAINED_BYTES_MAX {
        return Vec::new();
    }
    buffer.clear();
    buffer
}

/// Pool of records, by index. The pool grows to the largest number of exchanges in progress at the same time;
/// the limits on requests bound the size of each.
#[derive(Debug, Default)]
pub struct ExchangePool {
    records: Vec<Exchange>,
    free: Vec<u32>,
}

impl ExchangePool {
    /// Takes a record from the pool and returns its index.
    pub fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.records.push(Exchange::new());
            self.records.len() as u32 - 1
        })
    }

    /// Returns a record to the pool and clears it.
    pub fn release(&mut self, index: u32) {
        self.records[index as usize].reset();
        self.free.push(index);
    }

    /// Returns the record at `index`.
    pub fn get(&mut self, index: u32) -> &mut Exchange {
        &mut self.records[index as usize]
    }

    /// Returns the number of records in use.
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

    /// Reads to the end in blocks of 4 bytes.
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
    fn a_stream_has_exactly_its_range() {
        assert_eq!(drain(&mut stream(b"0123456789", 0, 10)).unwrap(), b"0123456789");
        assert_eq!(drain(&mut stream(b"0123456789", 3, 5)).unwrap(), b"34567");
        assert_eq!(drain(&mut stream(b"0123456789", 3, 0)).unwrap(), b"");
    }

    #[test]
    fn a_file_that_shrank_is_noticed() {
        assert_eq!(drain(&mut stream(b"0123456789", 3, 9)), Err(FileRead::Failed));
    }

    #[test]
    fn records_are_reused_and_cleared() {
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
