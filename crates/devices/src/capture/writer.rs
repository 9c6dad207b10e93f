//! Writes frames to a pcapng file or a ring of pcapng files.

use super::CaptureStats;
use super::pcapng::{CapturedInterface, CapturedPacket, PcapngStream};
use ginnel_stack::time::Instant;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes that are buffered: one system call for several hundred full-sized frames.
const BUFFER_BYTES: usize = 512 << 10;
/// Maximum delay until a frame is written to the file, while frames arrive or the queues are flushed.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// Maximum bytes of a packet block beside its data: header (32), flags (8), comment (60), end of the options
/// (4) and padding (3).
const BLOCK_BYTES: u64 = 107;

/// A limited number of files of limited size; a new file replaces the oldest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRing {
    /// Maximum size of a file in bytes, at least 64 KiB.
    pub file_bytes: u64,
    /// Number of files that are kept, at least 2.
    pub files: u32,
}

/// A file that counts the bytes written to it.
struct CountingFile {
    file: BufWriter<File>,
    bytes: u64,
}

impl Write for CountingFile {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.file.write(buffer)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writes to one file at a time. Stops after the first error.
pub(super) struct CaptureWriter {
    path: PathBuf,
    interface: CapturedInterface,
    ring: Option<FileRing>,
    /// UNIX time of the shard's time 0; determined at the first frame if it was not configured.
    epoch: Option<Duration>,
    out: PcapngStream<CountingFile>,
    /// Number of the current file, from 1.
    file_number: u64,
    flushed_at: Instant,
    dirty: bool,
    failed: bool,
    stats: Arc<CaptureStats>,
}

impl CaptureWriter {
    pub(super) fn create(config: &super::CaptureConfig, stats: Arc<CaptureStats>) -> io::Result<Self> {
        let interface = CapturedInterface {
            name: config.interface.clone(),
            snaplen: config.snaplen,
            filter: config.filter.clone(),
        };
        let out = open(&file_path(&config.path, config.ring, 1), &interface)?;
        Ok(Self {
            path: config.path.clone(),
            interface,
            ring: config.ring,
            epoch: config.epoch,
            out,
            file_number: 1,
            flushed_at: Instant::ZERO,
            dirty: false,
            failed: false,
            stats,
        })
    }

    /// Writes a frame. Counts errors, and logs the first one.
    pub(super) fn write(&mut self, now: Instant, packet: &CapturedPacket<'_>) {
        if self.failed {
            self.stats.lost.fetch_add(1, Relaxed);
            return;
        }
        match self.try_write(now, packet) {
            Ok(()) => {
                self.dirty = true;
                self.stats.captured.fetch_add(1, Relaxed);
            }
            Err(error) => {
                self.stats.lost.fetch_add(1, Relaxed);
                self.fail(&error);
            }
        }
    }

    /// Flushes the buffer if the last flush was [`FLUSH_EVERY`] ago.
    pub(super) fn tick(&mut self, now: Instant) {
        if self.dirty && now.saturating_since(self.flushed_at) >= FLUSH_EVERY {
            self.flushed_at = now;
            self.flush();
        }
    }

    pub(super) fn flush_if_dirty(&mut self) {
        if self.dirty {
            self.flush();
        }
    }

    pub(super) fn flush(&mut self) {
        self.dirty = false;
        if !self.failed
            && let Err(error) = self.out.flush()
        {
            self.fail(&error);
        }
    }

    fn fail(&mut self, error: &io::Error) {
        self.failed = true;
        self.stats.failed.store(true, Relaxed);
        tracing::error!(path = %self.path.display(), %error, "capture stopped; the traffic continues");
    }

    fn try_write(&mut self, now: Instant, packet: &CapturedPacket<'_>) -> io::Result<()> {
        let since_start = Duration::from_nanos(now.as_nanos());
        let epoch = *self.epoch.get_or_insert_with(|| {
            let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            wall.saturating_sub(since_start)
        });
        let full = |ring: FileRing| {
            self.out.inner().bytes + packet.bytes.len() as u64 + BLOCK_BYTES > ring.file_bytes
        };
        if self.ring.is_some_and(full) {
            self.rotate()?;
        }
        self.out.write(0, epoch + since_start, packet)
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.out.flush()?;
        self.file_number += 1;
        self.out = open(&file_path(&self.path, self.ring, self.file_number), &self.interface)?;
        let files = self.ring.map_or(u64::MAX, |ring| ring.files.into());
        if self.file_number > files {
            let oldest = file_path(&self.path, self.ring, self.file_number - files);
            // Somebody else may have deleted it.
            std::fs::remove_file(oldest).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
        Ok(())
    }
}

impl Drop for CaptureWriter {
    fn drop(&mut self) {
        self.flush();
    }
}

fn open(path: &Path, interface: &CapturedInterface) -> io::Result<PcapngStream<CountingFile>> {
    let file =
        File::create(path).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
    let counting = CountingFile { file: BufWriter::with_capacity(BUFFER_BYTES, file), bytes: 0 };
    PcapngStream::create(counting, core::slice::from_ref(interface))
}

/// Returns the path of a file: `trace.pcapng`, or `trace-00001.pcapng` in a ring.
fn file_path(path: &Path, ring: Option<FileRing>, number: u64) -> PathBuf {
    if ring.is_none() {
        return path.to_path_buf();
    }
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
    path.with_file_name(format!("{stem}-{number:05}{extension}"))
}
