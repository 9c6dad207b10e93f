//! Captures frames that a device receives or sends, in pcapng files that tshark and Wireshark read.
//!
//! Frames are captured as they pass this layer: super-frames are not segmented, as tcpdump on Linux shows
//! them, and have a comment with their segment size. Partial checksums are completed in the copy, so each
//! checksum in the file is correct unless it was wrong on the wire. Received frames have the time of their
//! burst, sent frames the time of their flush.

mod filter;
pub mod pcapng;
mod writer;

pub use filter::{Filter, FilterError, FilterErrorKind};
pub use writer::FileRing;

use crate::offload::meta_of;
use crate::staged::StagedTx;
use ginnel_stack::device::{Capabilities, Device, RxBurst, RxQueue, TxClass, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use ginnel_stack::wire::gso::complete_checksum;
use pcapng::{CapturedPacket, Direction};
use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use writer::CaptureWriter;

/// Default number of bytes of a frame that are kept: all.
pub const SNAPLEN_MAX: u32 = 262_144;

/// Configuration of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureConfig {
    /// Path of the file, which is overwritten. In a ring of files, the name gets a number:
    /// `trace-00001.pcapng`.
    pub path: PathBuf,
    /// Name of the interface in the file.
    pub interface: String,
    /// Maximum number of bytes kept of each frame, 14 or more.
    pub snaplen: u32,
    /// Selects frames: see [`Filter`]. `None` selects all frames.
    pub filter: Option<String>,
    /// Writes a ring of files instead of one growing file.
    pub ring: Option<FileRing>,
    /// UNIX time of the shard's time 0. `None` takes the system clock at the first frame; a simulation passes
    /// a constant, so that its files are reproducible.
    pub epoch: Option<Duration>,
}

impl CaptureConfig {
    /// Returns a configuration that captures all frames, in full length, to one file.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            interface: "ginnel".into(),
            snaplen: SNAPLEN_MAX,
            filter: None,
            ring: None,
            epoch: None,
        }
    }
}

/// Counters of frames. They never decrease.
#[derive(Debug, Default)]
pub struct CaptureStats {
    /// Frames written to the file.
    pub captured: AtomicU64,
    /// Frames that the filter rejected.
    pub filtered: AtomicU64,
    /// Frames that were not written because of an error.
    pub lost: AtomicU64,
    /// An error has ended the capture. It was logged.
    pub failed: AtomicBool,
}

/// A capture that can wrap several devices: the shards of a stack share one file.
#[derive(Clone)]
pub struct Capture {
    writer: Arc<Mutex<CaptureWriter>>,
    filter: Arc<Option<Filter>>,
    snaplen: usize,
    stats: Arc<CaptureStats>,
}

/// Captures the frames that pass a device.
///
/// # Errors
/// See [`Capture::create`].
pub fn wrap(device: Device, config: &CaptureConfig) -> io::Result<Device> {
    Ok(Capture::create(config)?.wrap(device))
}

impl Capture {
    /// Creates the file.
    ///
    /// # Errors
    /// `InvalidInput` for an invalid filter and for values out of range; otherwise the error of creating the
    /// file.
    pub fn create(config: &CaptureConfig) -> io::Result<Self> {
        let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidInput, message);
        let filter = config.filter.as_deref().map(Filter::parse).transpose();
        let filter = filter.map_err(|error| invalid(format!("capture filter: {error}")))?;
        if config.snaplen < 14 {
            return Err(invalid(format!("snaplen {} is below 14", config.snaplen)));
        }
        if let Some(FileRing { file_bytes, files }) = config.ring
            && (file_bytes < 64 << 10 || files < 2)
        {
            return Err(invalid(format!(
                "a ring of {files} files of {file_bytes} bytes is too small: it needs at least 2 files of 64 KiB"
            )));
        }
        let stats = Arc::new(CaptureStats::default());
        let writer = CaptureWriter::create(config, stats.clone())?;
        Ok(Self {
            writer: Arc::new(Mutex::new(writer)),
            filter: Arc::new(filter),
            snaplen: config.snaplen as usize,
            stats,
        })
    }

    /// Captures the frames that pass this device, too.
    #[must_use]
    pub fn wrap(&self, device: Device) -> Device {
        let rx = CaptureRx { inner: device.rx, capture: self.clone(), scratch: Vec::new() };
        let staged = StagedTx::new(device.tx);
        let tx = CaptureTx { staged, capture: self.clone(), pending: PendingFrames::default() };
        Device { rx: Box::new(rx), tx: Box::new(tx) }
    }

    /// Returns the counters.
    #[must_use]
    pub fn stats(&self) -> Arc<CaptureStats> {
        self.stats.clone()
    }

    /// Writes buffered frames to the file. This also happens before a shard sleeps, about once a second while
    /// frames arrive, and when the last device is dropped.
    pub fn flush(&self) {
        self.writer().flush();
    }

    /// Locks the writer. The lock is contended only if devices of several threads share the capture.
    fn writer(&self) -> MutexGuard<'_, CaptureWriter> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn matches_filter(&self, frame: &[u8]) -> bool {
        let is_accepted = self.filter.as_ref().as_ref().is_none_or(|filter| filter.matches(frame));
        if !is_accepted {
            self.stats.filtered.fetch_add(1, Relaxed);
        }
        is_accepted
    }

    /// Appends the captured part of a frame to `out`.
    fn append_copy(&self, frame: &[u8], meta: TxMeta, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(frame);
        if let Some((sum_start, offset)) = meta.partial_checksum {
            // A partial checksum that contradicts the frame stays as it is.
            let _ = complete_checksum(&mut out[start..], sum_start.into(), offset.into());
        }
        out.truncate(start + frame.len().min(self.snaplen));
    }
}

struct CaptureRx {
    inner: Box<dyn RxQueue + Send>,
    capture: Capture,
    scratch: Vec<u8>,
}

impl RxQueue for CaptureRx {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        let before = burst.len();
        self.inner.rx_burst(now, burst);
        if burst.len() == before {
            return self.capture.writer().tick(now);
        }
        let mut writer = self.capture.writer();
        for frame in &burst[before..] {
            if !self.capture.matches_filter(frame.bytes) {
                continue;
            }
            self.scratch.clear();
            self.capture.append_copy(frame.bytes, meta_of(frame), &mut self.scratch);
            let packet = CapturedPacket {
                direction: Direction::Received,
                bytes: &self.scratch,
                original_len: frame.bytes.len(),
                segment_bytes: frame.gso.map(|gso| gso.size),
            };
            writer.write(now, &packet);
        }
        writer.tick(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }

    fn arm(&mut self) -> bool {
        // No frame may arrive for a long time, so buffered frames are written to the file now.
        self.capture.writer().flush_if_dirty();
        self.inner.arm()
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.inner.wake_fd()
    }

    fn computes_hashes(&self) -> bool {
        self.inner.computes_hashes()
    }

    fn is_gone(&self) -> bool {
        self.inner.is_gone()
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        self.inner.counters(report);
        report("capture_frames", self.capture.stats.captured.load(Relaxed));
        report("capture_filtered", self.capture.stats.filtered.load(Relaxed));
        report("capture_lost", self.capture.stats.lost.load(Relaxed));
    }
}

/// Frames committed and not flushed. Their time is not known yet.
#[derive(Default)]
struct PendingFrames {
    bytes: Vec<u8>,
    frames: Vec<PendingFrame>,
}

struct PendingFrame {
    end: usize,
    original_len: usize,
    segment_bytes: Option<u16>,
}

struct CaptureTx {
    staged: StagedTx,
    capture: Capture,
    pending: PendingFrames,
}

impl TxQueue for CaptureTx {
    fn capabilities(&self) -> Capabilities {
        self.staged.inner.capabilities()
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.staged.reserve(len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        let Some(frame) = self.staged.commit(len, meta) else { return };
        if self.capture.matches_filter(frame) {
            self.capture.append_copy(frame, meta, &mut self.pending.bytes);
            self.pending.frames.push(PendingFrame {
                end: self.pending.bytes.len(),
                original_len: len,
                segment_bytes: meta.gso.map(|gso| gso.size),
            });
        }
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        self.staged.inner.has_backlog(frames)
    }

    fn select_class(&mut self, class: Option<TxClass>) {
        self.staged.inner.select_class(class);
    }

    fn flush(&mut self, now: Instant) {
        if !self.pending.frames.is_empty() {
            let mut writer = self.capture.writer();
            let mut start = 0;
            for frame in self.pending.frames.drain(..) {
                let packet = CapturedPacket {
                    direction: Direction::Sent,
                    bytes: &self.pending.bytes[start..frame.end],
                    original_len: frame.original_len,
                    segment_bytes: frame.segment_bytes,
                };
                writer.write(now, &packet);
                start = frame.end;
            }
            self.pending.bytes.clear();
            writer.tick(now);
        }
        self.staged.inner.flush(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.staged.inner.next_deadline()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
