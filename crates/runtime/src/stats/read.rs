//! Reads the counters of shards of other processes. The content of a file is not trusted.
//!
//! The file is read and not mapped, because truncating a mapped file kills the process that reads the
//! mapping. Each read returns what the shard has stored so far, as a mapping would; the sequence lock works
//! with any way of copying the words.

use super::page::{
    ALIGNMENT, CounterKind, HEADER_BYTES, LEADING_WORDS, MAGIC, PREFIX, ShardActivity, VERSION,
};
use super::seqlock;
use core::fmt;
use core::time::Duration;
use ginnel_stack::time::Instant;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Limits of a valid file: number of words, and length of the names.
const WORDS_MAX: u64 = 1 << 16;
const NAMES_BYTES_MAX: u64 = 1 << 22;

/// Attempts to read a consistent snapshot. A publication takes a microsecond, so one that lasts longer was
/// interrupted by the death of its shard.
const READ_TRIES: u32 = 200;
const RETRY_PAUSE: Duration = Duration::from_micros(500);

/// Why counters cannot be read.
#[derive(Debug)]
pub enum PageError {
    /// A system call failed.
    Io(PathBuf, io::Error),
    /// The file is not a file of counters.
    NotStatsFile(PathBuf),
    /// The file has a version that this program does not support.
    Version(PathBuf, u32),
    /// The content of the file is inconsistent.
    Damaged(PathBuf, &'static str),
    /// The shard died during a publication.
    Unfinished(PathBuf),
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(path, e) => write!(f, "{}: {e}", path.display()),
            Self::NotStatsFile(path) => write!(f, "{}: is not a file of counters", path.display()),
            Self::Version(path, version) => {
                write!(
                    f,
                    "{}: has version {version}, this program supports version {VERSION}",
                    path.display()
                )
            }
            Self::Damaged(path, what) => write!(f, "{}: is damaged: {what}", path.display()),
            Self::Unfinished(path) => write!(f, "{}: its shard died during a publication", path.display()),
        }
    }
}

impl std::error::Error for PageError {}

/// Reads the counters of one shard.
#[derive(Debug)]
pub struct PageReader {
    path: PathBuf,
    label: String,
    file: File,
    names: Vec<(CounterKind, String)>,
    words_offset: u64,
    interval: Duration,
}

/// The counters of a shard at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Time of the publication.
    pub published: Instant,
    /// Activity of the shard at the last publication.
    pub activity: ShardActivity,
    /// A value for each of [`PageReader::names`].
    pub values: Vec<u64>,
}

/// Opens the counters of all shards of the stack with this directory, ordered by label.
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
    // Numerically: 2 before 10.
    labels.sort_by_key(|label| {
        let number = label.split('.').next().unwrap_or_default().parse().unwrap_or(u32::MAX);
        (number, label.clone())
    });
    labels.iter().map(|label| PageReader::open(dir, label)).collect()
}

impl PageReader {
    /// Opens the counters of the shard with this label.
    ///
    /// # Errors
    /// The file cannot be read, or is not valid.
    pub fn open(dir: &Path, label: &str) -> Result<Self, PageError> {
        let path = dir.join(format!("{PREFIX}{label}"));
        let io_error = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => PageError::Damaged(path.clone(), "the file is truncated"),
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
            return Err(damaged("the number of counters is out of range"));
        }
        if names_offset.checked_add(names_bytes).is_none_or(|end| end > words_offset)
            || words_offset % ALIGNMENT != 0
            || words_offset > 2 * NAMES_BYTES_MAX
        {
            return Err(damaged("its sections overlap"));
        }
        let mut text = vec![0; names_bytes as usize];
        file.read_exact_at(&mut text, names_offset).map_err(io_error)?;
        let text = String::from_utf8(text).map_err(|_| damaged("a name is not UTF-8"))?;
        let names: Option<Vec<_>> = text.lines().map(parse_name).collect();
        let names = names.ok_or_else(|| damaged("a name is malformed"))?;
        if names.len() as u64 != words - LEADING_WORDS {
            return Err(damaged("the numbers of names and values differ"));
        }
        let interval = Duration::from_nanos(field(48));
        Ok(Self { label: label.into(), file, names, words_offset, interval, path })
    }

    /// Returns the label of the shard: its index, and a suffix for a worker.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Returns the inode number of the page's file. A shard that is started again has another file.
    ///
    /// # Errors
    /// The file cannot be examined.
    pub fn file_number(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.ino())
    }

    /// Returns the names of the counters.
    pub fn names(&self) -> &[(CounterKind, String)] {
        &self.names
    }

    /// Returns the interval at which a busy shard publishes.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// Returns the last published values.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self) -> Result<Snapshot, PageError> {
        let io_error = |e: io::Error| match e.kind() {
            io::ErrorKind::UnexpectedEof => PageError::Damaged(self.path.clone(), "the file is truncated"),
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

/// Parses a line of the names.
fn parse_name(line: &str) -> Option<(CounterKind, String)> {
    let (kind, name) = line.split_once(' ')?;
    let kind = match kind {
        "c" => CounterKind::Counter,
        "g" => CounterKind::Gauge,
        _ => return None,
    };
    // The name is printed on a terminal.
    let printable = !name.is_empty() && name.bytes().all(|b| b.is_ascii_graphic());
    printable.then(|| (kind, name.into()))
}
