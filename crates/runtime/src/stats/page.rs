//! A shard's counters in a file, for other processes (`ginnel stat`).
//!
//! ```text
//!   0   "GINNELST", version, bytes of this header
//!   16  where the names begin, and their bytes; where the words begin, and how many there are; nanoseconds between publications
//!   …   names: a line each, "c tcp.segments_in" of a counter, "g pool.connections.used" of what also falls
//!   …   words, from a page's start on: sequence, time, state, then a value for each name
//! ```
//!
//! Numbers are of 64 bits (version and header bytes of 32), little-endian. The names stand in the file, so that any version of the reader can show
//! what any version of a shard counts. A file is written by one shard only, and appears with its header complete.

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
/// Words in front of the values.
pub(super) const LEADING_WORDS: u64 = 3;
/// Words begin at a multiple of this: a page, and so a cache line, of their own.
pub(super) const ALIGNMENT: u64 = 4096;

/// A page's file is called so, and then as its shard.
pub(super) const PREFIX: &str = "stats.";

/// What becomes of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// It only grows.
    Counter,
    /// It may fall.
    Gauge,
}

/// What a shard does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum ShardActivity {
    /// It has not begun.
    NotStarted = 0,
    /// It takes its turns.
    Running = 1,
    /// It sleeps in the kernel.
    Sleeping = 2,
    /// It has ended.
    Ended = 3,
}

/// The writer's end.
#[derive(Debug)]
pub(crate) struct StatsPage {
    mapping: Mapping,
    interval: Duration,
    /// When it was written last.
    published: Option<Instant>,
}

impl StatsPage {
    /// A page for the shard called `label`, in the directory of its stack.
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
        // Only the owner may read: counters tell how a peer's guesses at sequence numbers and ports fare, which attacks on other users'
        // connections were built on (Qian, Mao and Xie, CCS 2012).
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&temporary)?;
        let created = Self::fill(&file, &header, words_offset, words)
            .and_then(|mapping| fs::rename(&temporary, &path).map(|()| mapping));
        if created.is_err() {
            // It is of no use to anybody, and its directory goes with the stack.
            let _ = fs::remove_file(&temporary);
        }
        Ok(Self { mapping: created?, interval, published: None })
    }

    fn fill(mut file: &File, header: &[u8], words_offset: u64, words: u64) -> io::Result<Mapping> {
        file.write_all(header)?;
        // A store to a page that the file system has no room for kills the process: ask for the room now.
        fallocate(file, FallocateFlags::empty(), 0, words_offset + words * 8)?;
        Mapping::new(file, words_offset, words as usize)
    }

    /// Whether it is time to write again.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.published.is_none_or(|at| now - at >= self.interval)
    }

    /// When it was written last.
    pub(crate) fn published(&self) -> Option<Instant> {
        self.published
    }

    /// Writes what `put` is given, as many values as there are names.
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
    // A device may be called anything.
    let name: String = name.chars().map(|c| if c.is_ascii_graphic() { c } else { '_' }).collect();
    format!("{kind} {name}\n")
}
