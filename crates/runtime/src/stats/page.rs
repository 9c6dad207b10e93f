//! The counters of a shard in a file, for other processes (`ginnel stat`).
//!
//! ```text
//!   0   "GINNELST", version, length of this header
//!   16  offset and length of the names; offset and number of the words; interval of publications in nanoseconds
//!   …   names, one per line: "c tcp.segments_in" for a counter, "g pool.connections.used" for a gauge
//!   …   words, aligned to a page: sequence, time, activity, then a value for each name
//! ```
//!
//! Numbers have 64 bits (version and header length 32), little-endian. The file has the names, so that every
//! version of the reader can show the counters of every version of a shard. Only one shard writes a file. The
//! file is renamed into place when its header is complete.

use super::mapping::Mapping;
use super::seqlock::{self, AtomicU64, Publication};
use core::time::Duration;
use ginnel_stack::time::Instant;
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

pub(super) const MAGIC: &[u8; 8] = b"GINNELST";
pub(super) const VERSION: u32 = 1;
pub(super) const HEADER_BYTES: u64 = 64;
/// Words before the values.
pub(super) const LEADING_WORDS: u64 = 3;
/// Alignment of the words: a page, so that they share no cache line.
pub(super) const ALIGNMENT: u64 = 4096;

/// Prefix of the file's name; the label of the shard follows.
pub(super) const PREFIX: &str = "stats.";

/// Kind of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// The value never decreases.
    Counter,
    /// The value may decrease.
    Gauge,
}

/// Activity of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum ShardActivity {
    /// Its application has not started.
    NotStarted = 0,
    /// It performs turns.
    Running = 1,
    /// It sleeps in the kernel.
    Sleeping = 2,
    /// It has ended.
    Ended = 3,
}

/// The writer's end of a file of counters.
#[derive(Debug)]
pub(crate) struct StatsPage {
    mapping: Mapping,
    interval: Duration,
    /// Time of the last publication.
    published: Option<Instant>,
}

impl StatsPage {
    /// Creates the file of the shard with this label in the directory of its stack.
    pub(crate) fn create(
        dir: &Path,
        label: &str,
        interval: Duration,
        names: &[(CounterKind, String)],
    ) -> io::Result<Self> {
        let names_text: String = names.iter().map(|(kind, name)| name_line(*kind, name)).collect();
        let words = LEADING_WORDS + names.len() as u64;
        let words_offset = (HEADER_BYTES + names_text.len() as u64).next_multiple_of(ALIGNMENT);
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((HEADER_BYTES as u32).to_le_bytes());
        let nanos = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX);
        for number in [HEADER_BYTES, names_text.len() as u64, words_offset, words, nanos, 0] {
            header.extend(number.to_le_bytes());
        }
        header.extend(names_text.as_bytes());
        let (temporary, path) = (dir.join(format!(".{PREFIX}{label}")), dir.join(format!("{PREFIX}{label}")));
        // Only the owner may read the file: the counters reveal whether guesses of sequence numbers and ports
        // succeed, which attacks on connections of other users have exploited (Qian, Mao and Xie, CCS 2012).
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&temporary)?;
        let created = Self::fill(&file, &header, words_offset, words)
            .and_then(|mapping| fs::rename(&temporary, &path).map(|()| mapping));
        if created.is_err() {
            // If that fails, the file is removed together with the directory of the stack.
            let _ = fs::remove_file(&temporary);
        }
        Ok(Self { mapping: created?, interval, published: None })
    }

    fn fill(mut file: &File, header: &[u8], words_offset: u64, words: u64) -> io::Result<Mapping> {
        file.write_all(header)?;
        // Allocates the blocks now: a store to a page for which the file system has no space would kill the
        // process.
        fallocate(file, FallocateFlags::empty(), 0, words_offset + words * 8)?;
        Mapping::new(file, words_offset, words as usize)
    }

    /// Returns whether the interval since the last publication has passed.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.published.is_none_or(|at| now - at >= self.interval)
    }

    /// Returns the time of the last publication.
    pub(crate) fn published(&self) -> Option<Instant> {
        self.published
    }

    /// Publishes the values that `write_values` puts, one for each name.
    pub(crate) fn publish(
        &mut self,
        now: Instant,
        activity: ShardActivity,
        write_values: impl FnOnce(&mut Publication<'_>),
    ) {
        self.published = Some(now);
        let words: &[AtomicU64] = self.mapping.words();
        let Some(mut publication) = seqlock::begin(words) else { return };
        publication.put(now.as_nanos());
        publication.put(activity as u64);
        write_values(&mut publication);
        publication.finish();
    }
}

fn name_line(kind: CounterKind, name: &str) -> String {
    let kind = match kind {
        CounterKind::Counter => 'c',
        CounterKind::Gauge => 'g',
    };
    // The name of a device may have any characters.
    let name: String = name.chars().map(|c| if c.is_ascii_graphic() { c } else { '_' }).collect();
    format!("{kind} {name}\n")
}
