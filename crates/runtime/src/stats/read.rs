//! Reading the counters of other processes' shards. Nothing in a file is trusted.
//!
//! The file is read and not mapped, because a file that is cut off under a mapping kills its reader. Each read sees what the shard has stored so far,
//! as a mapping would; the sequence lock does not care how words are copied.

use super::page::{
    ALIGNMENT, CounterKind, HEADER_BYTES, LEADING_WORDS, MAGIC, PREFIX, ShardActivity, VERSION,
};
use super::seqlock;
use core::fmt;
use core::time::Duration;
use ginnel_stack::time::Instant;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// No shard has so many counters, nor names so long.
const WORDS_MAX: u64 = 1 << 16;
const NAMES_BYTES_MAX: u64 = 1 << 22;

/// A publication takes a microsecond: one that is still under way after so many looks was left behind by a shard that died in it.
const READ_TRIES: u32 = 200;
const RETRY_PAUSE: Duration = Duration::from_micros(500);

/// Why counters cannot be read.
#[derive(Debug)]
pub enum PageError {
    /// A system call failed.
    Io(PathBuf, io::Error),
    /// It is no file of counters.
    NotStatsFile(PathBuf),
    /// It is of a version that this program does not know.
    Version(PathBuf, u32),
    /// It contradicts itself.
    Damaged(PathBuf, &'static str),
    /// Its shard died while it wrote.
    Unfinished(PathBuf),
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(path, e) => write!(f, "{}: {e}", path.display()),
            Self::NotStatsFile(path) => write!(f, "{}: is no file of counters", path.display()),
            Self::Version(path, version) => {
                write!(f, "{}: is of version {version}, this program knows version {VERSION}", path.display())
            }
            Self::Damaged(path, what) => write!(f, "{}: is damaged: {what}", path.display()),
            Self::Unfinished(path) => write!(f, "{}: its shard died while it wrote", path.display()),
        }
    }
}

impl std::error::Error for PageError {}

/// The counters of one shard.
#[derive(Debug)]
pub struct PageReader {
    path: PathBuf,
    label: String,
    file: File,
    names: Vec<(CounterKind, String)>,
    words_offset: u64,
    interval: Duration,
}

/// What they were at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// When the shard wrote it.
    pub published: Instant,
    /// What the shard did then.
    pub activity: ShardActivity,
    /// A value for each of [`PageReader::names`].
    pub values: Vec<u64>,
}

/// The counters of all shards of the stack whose directory this is, by label.
///
/// # Errors
/// One of them cannot be read.
pub fn pages(dir: &Path) -> Result<Vec<PageReader>, PageError> {
    let io_error = |e| PageError::Io(dir.into(), e);
    let mut labels = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io_error)? {
        let name = entry.map_err(io_error)?.file_name();
        labels.extend(name.to_str().and_then(|name| name.strip_prefix(PREFIX)).map(String::from));
    }
    // 2 before 10.
    labels.sort_by_key(|label| {
        let number = label.split('.').next().unwrap_or_default().parse().unwrap_or(u32::MAX);
        (number, label.clone())
    });
    labels.iter().map(|label| PageReader::open(dir, label)).collect()
}

impl PageReader {
    /// Opens the counters of the shard called `label`.
    ///
    /// # Errors
    /// They cannot be read, or are not what they should be.
    pub fn open(dir: &Path, label: &str) -> Result<Self, PageError> {
        let path = dir.join(format!("{PREFIX}{label}"));
        let io_error = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => PageError::Damaged(path.clone(), "it ends too early"),
            _ => PageError::Io(path.clone(), e),
        };
        let damaged = |what| PageError::Damaged(path.clone(), what);
        let file = File::open(&path).map_err(io_error)?;
        if !file.metadata().map_err(io_error)?.is_file() {
            return Err(PageError::NotStatsFile(path));
        }
        let mut header = [0; HEADER_BYTES as usize];
        file.read_exact_at(&mut header, 0).map_err(io_error)?;
        if !header.starts_with(MAGIC) {
            return Err(PageError::NotStatsFile(path));
        }
        let version = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        if version != VERSION {
            return Err(PageError::Version(path, version));
        }
        let field = |at: usize| header[at..at + 8].iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte));
        let (names_offset, names_bytes, words_offset, words) = (field(16), field(24), field(32), field(40));
        if names_bytes > NAMES_BYTES_MAX || !(LEADING_WORDS..=WORDS_MAX).contains(&words) {
            return Err(damaged("there are too many counters, or too few"));
        }
        if names_offset.checked_add(names_bytes).is_none_or(|end| end > words_offset)
            || words_offset % ALIGNMENT != 0
            || words_offset > 2 * NAMES_BYTES_MAX
        {
            return Err(damaged("its parts overlap"));
        }
        let mut text = vec![0; names_bytes as usize];
        file.read_exact_at(&mut text, names_offset).map_err(io_error)?;
        let text = String::from_utf8(text).map_err(|_| damaged("a name is no text"))?;
        let names: Option<Vec<_>> = text.lines().map(parse_name).collect();
        let names = names.ok_or_else(|| damaged("a name is none"))?;
        if names.len() as u64 != words - LEADING_WORDS {
            return Err(damaged("there are not as many names as values"));
        }
        let interval = Duration::from_nanos(field(48));
        Ok(Self { label: label.into(), file, names, words_offset, interval, path })
    }

    /// What the shard is called: its number, and what else there is to say of it.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// What is counted.
    pub fn names(&self) -> &[(CounterKind, String)] {
        &self.names
    }

    /// How old a snapshot of a busy shard can be.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// The values now.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn read(&self) -> Result<Snapshot, PageError> {
        let io_error = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => PageError::Damaged(self.path.clone(), "it ends too early"),
            _ => PageError::Io(self.path.clone(), e),
        };
        let mut bytes = vec![0; (self.names.len() + LEADING_WORDS as usize - 1) * 8];
        for _ in 0..READ_TRIES {
            let sequence = || {
                let mut word = [0; 8];
                self.file.read_exact_at(&mut word, self.words_offset).map_err(io_error)?;
                Ok(u64::from_le_bytes(word))
            };
            let copy = || self.file.read_exact_at(&mut bytes, self.words_offset + 8).map_err(io_error);
            if seqlock::read_once(sequence, copy)? {
                return Ok(snapshot(&bytes));
            }
            std::thread::sleep(RETRY_PAUSE);
        }
        Err(PageError::Unfinished(self.path.clone()))
    }
}

fn snapshot(bytes: &[u8]) -> Snapshot {
    let mut words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    let published = Instant::from_nanos(words.next().unwrap_or(0));
    let activity = match words.next() {
        Some(1) => ShardActivity::Running,
        Some(2) => ShardActivity::Sleeping,
        Some(3) => ShardActivity::Ended,
        _ => ShardActivity::NotStarted,
    };
    Snapshot { published, activity, values: words.collect() }
}

/// A line of the names.
fn parse_name(line: &str) -> Option<(CounterKind, String)> {
    let (kind, name) = line.split_once(' ')?;
    let kind = match kind {
        "c" => CounterKind::Counter,
        "g" => CounterKind::Gauge,
        _ => return None,
    };
    // It is going to be printed on a terminal.
    let printable = !name.is_empty() && name.bytes().all(|b| b.is_ascii_graphic());
    printable.then(|| (kind, name.into()))
}
