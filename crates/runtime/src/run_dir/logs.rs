//! The logs of stacks: files in the folder `.logs` of the runtime directory. They outlive their stacks, and
//! their size and number are limited.

use super::{RunDirError, create_private_dir, running_in};
use core::fmt::Write as _;
use rustix::fs::{Mode, OFlags, open, openat};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tracing::Level;

/// Folder of the logs. No stack can have this name.
const FOLDER: &str = ".logs";
/// Suffix of the file that is written.
const CURRENT: &str = ".log";
/// Suffix of the file that was written before.
const PREVIOUS: &str = ".log.1";
/// Longest entry in bytes; the rest of a longer one is cut off.
// limit: bytes of an entry
const ENTRY_BYTES_MAX: usize = 32_768;
/// Size of a file that a death is appended to, in bytes: the default of `run.log_bytes`.
const DEATH_BYTES_MAX: u64 = 1 << 20;
/// Attempts to open the file that is written while other processes replace it.
const ATTEMPTS: usize = 4;

/// The log of a stack. Several processes may write to it.
#[derive(Clone, Debug)]
pub struct StackLog {
    folder: PathBuf,
    name: String,
    bytes_max: u64,
}

/// The files of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFiles {
    /// Name of the stack.
    pub name: String,
    /// The older file. It exists if the log was ever longer than one file may be.
    pub previous: PathBuf,
    /// The file that is written.
    pub current: PathBuf,
}

impl LogFiles {
    fn of(folder: &Path, name: &str) -> Self {
        let path = |suffix| folder.join(format!("{name}{suffix}"));
        Self { name: name.into(), previous: path(PREVIOUS), current: path(CURRENT) }
    }
}

impl StackLog {
    /// Opens the log of the stack with this directory, creating the folder of the logs if necessary. The log
    /// consists of two files of `bytes_max` bytes each; the older one is replaced when the other one is full.
    /// Deletes logs of stacks that do not run, so that no more than `kept_max` stacks have one, this stack
    /// included: the oldest first, and those of stacks without a name of their own before others.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn open(directory: &Path, bytes_max: u64, kept_max: usize) -> Result<Self, RunDirError> {
        let base = directory.parent().unwrap_or(directory);
        let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folder = base.join(FOLDER);
        match create_private_dir(&folder) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(RunDirError::Io(folder, e)),
            _ => {}
        }
        delete_oldest(base, &name, kept_max);
        Ok(Self { folder, name, bytes_max })
    }

    /// Returns the files.
    pub fn files(&self) -> LogFiles {
        LogFiles::of(&self.folder, &self.name)
    }

    /// Appends an entry: the time, the process, the level and `text`, whose further lines are indented.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&self, level: Level, text: &str) -> io::Result<()> {
        let entry = format_entry(level, std::process::id(), text);
        let file = self.open_with_room_for(entry.len() as u64)?;
        (&file).write_all(entry.as_bytes())
    }

    /// Opens the file that is written, so that a copy of its descriptor can be standard error.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open_current(&self) -> io::Result<File> {
        open_log(&self.folder, &self.name, OFlags::CREATE)
    }

    /// Opens the file that is written. If it has no room for `bytes`, it becomes the previous one.
    fn open_with_room_for(&self, bytes: u64) -> io::Result<File> {
        let mut file = self.open_current()?;
        let files = self.files();
        for _ in 0..ATTEMPTS {
            let opened = file.metadata()?;
            if opened.len() == 0 || opened.len() + bytes <= self.bytes_max {
                break;
            }
            // If another process replaces the file right now, the entry may exceed the limit.
            if file.try_lock().is_err() {
                break;
            }
            let is_current = |found: fs::Metadata| (found.dev(), found.ino()) == (opened.dev(), opened.ino());
            if fs::symlink_metadata(&files.current).is_ok_and(is_current) {
                fs::rename(&files.current, &files.previous)?;
            }
            file = self.open_current()?;
        }
        Ok(file)
    }
}

/// Opens the current file of a log for appending.
fn open_log(folder: &Path, name: &str, create: OFlags) -> io::Result<File> {
    // Root may write to the logs of another user, who must not direct it elsewhere.
    let folder_flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let folder = open(folder, folder_flags, Mode::empty())?;
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(folder, format!("{name}{CURRENT}"), flags | create, Mode::RUSR | Mode::WUSR)?;
    Ok(File::from(file))
}

/// Records that the process of a stack is gone and has left its directory behind. Does nothing if the process
/// is unknown (0), because it was killed while it created or removed the directory, or if the stack has no
/// log.
pub(super) fn record_death(base: &Path, name: &str, pid: u32) {
    if pid == 0 {
        return;
    }
    let text = format!(
        "the stack has ended without a word: its process {pid} was killed (kill -9, lack of memory) or crashed"
    );
    let log = StackLog { folder: base.join(FOLDER), name: name.into(), bytes_max: DEATH_BYTES_MAX };
    // A log that was rotated for the stack's last entry has no current file.
    if log.files().previous.exists() || open_log(&log.folder, name, OFlags::empty()).is_ok() {
        // The stack's directory is gone; without this entry, only its log is less complete.
        let _ = log.append(Level::ERROR, &text);
    }
}

/// Returns the logs in the user's runtime directory `base`, the oldest first.
///
/// # Errors
/// The folder cannot be read. A missing folder is empty.
pub fn list_in(base: &Path) -> io::Result<Vec<LogFiles>> {
    let folder = base.join(FOLDER);
    let entries = match fs::read_dir(&folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let file_name = entry.file_name();
        let Some(file_name) = file_name.to_str() else { continue };
        let name = match (file_name.strip_suffix(CURRENT), file_name.strip_suffix(PREVIOUS)) {
            (Some(name), _) => name,
            // The current file is created by the next entry, which may never come.
            (None, Some(name)) if !LogFiles::of(&folder, name).current.exists() => name,
            _ => continue,
        };
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        found.push((modified.unwrap_or(SystemTime::UNIX_EPOCH), LogFiles::of(&folder, name)));
    }
    found.sort_by(|(a, first), (b, second)| (a, &first.name).cmp(&(b, &second.name)));
    Ok(found.into_iter().map(|(_, files)| files).collect())
}

/// Deletes the oldest logs of stacks that do not run, so that no more than `kept_max` remain, with the one of
/// the stack `name`. Errors are ignored: the next start tries again.
fn delete_oldest(base: &Path, name: &str, kept_max: usize) {
    let Ok(all) = list_in(base) else { return };
    let mut others: Vec<_> = all.into_iter().filter(|files| files.name != name).collect();
    // Stacks without a name of their own come first: there is a new one for each `ginnel run`.
    others.sort_by_key(|files| !is_generated(&files.name));
    let Some(excess) = (others.len() + 1).checked_sub(kept_max).filter(|excess| *excess > 0) else { return };
    let Ok(running) = running_in(base) else { return };
    let has_ended = |files: &&LogFiles| running.iter().all(|stack| stack.name != files.name);
    for files in others.iter().filter(has_ended).take(excess) {
        let _ = fs::remove_file(&files.previous);
        let _ = fs::remove_file(&files.current);
    }
}

/// Returns whether a name consists of the name of a command and a process id.
fn is_generated(name: &str) -> bool {
    let pid = name.rsplit_once('-').map(|(_, pid)| pid);
    pid.is_some_and(|pid| !pid.is_empty() && pid.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Returns an entry as it stands in the file. Text of others, such as the name of a program, can neither
/// begin an entry nor control a terminal.
fn format_entry(level: Level, pid: u32, text: &str) -> String {
    let time = humantime::format_rfc3339_millis(SystemTime::now());
    let mut entry = format!("{time} [{pid}] {level:<5} ");
    for character in text.trim_end().chars() {
        if entry.len() >= ENTRY_BYTES_MAX {
            entry.push('…');
            break;
        }
        match character {
            '\n' => entry.push_str("\n    "),
            character if character.is_control() => {
                // Writing to a `String` never fails.
                let _ = write!(entry, "{}", character.escape_default());
            }
            character => entry.push(character),
        }
    }
    entry.push('\n');
    entry
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::RunDir;
    use super::*;

    fn stack(base: &Path, name: &str) -> (RunDir, StackLog) {
        let dir = RunDir::create_in(base, name).unwrap();
        let log = StackLog::open(dir.path(), 4096, 3).unwrap();
        (dir, log)
    }

    fn text(log: &StackLog) -> String {
        let LogFiles { previous, current, .. } = log.files();
        fs::read_to_string(previous).unwrap_or_default() + &fs::read_to_string(current).unwrap_or_default()
    }

    #[test]
    fn log_outlives_its_stack_and_the_next_one_continues_it() {
        let base = tempfile::tempdir().unwrap();
        for start in 0..2 {
            let (dir, log) = stack(base.path(), "web");
            log.append(Level::INFO, &format!("start {start}")).unwrap();
            drop(dir);
            assert_eq!(running_in(base.path()).unwrap(), []);
            assert_eq!(text(&log).lines().count(), start + 1, "{}", text(&log));
        }
    }

    /// Ends a stack as `kill -9` does: its directory stays, and nobody holds the lock.
    fn kill(base: &Path, dir: RunDir) {
        let path = dir.path().to_owned();
        let copy = base.join("copy");
        fs::create_dir(&copy).unwrap();
        fs::copy(path.join("lock"), copy.join("lock")).unwrap();
        drop(dir);
        fs::rename(copy, &path).unwrap();
    }

    #[test]
    fn sweep_records_the_death_of_a_stack() {
        for is_rotated in [false, true] {
            let base = tempfile::tempdir().unwrap();
            let (dir, log) = stack(base.path(), "web");
            log.append(Level::INFO, "start").unwrap();
            if is_rotated {
                fs::rename(log.files().current, log.files().previous).unwrap();
            }
            kill(base.path(), dir);
            assert_eq!(running_in(base.path()).unwrap(), []);
            assert_eq!(running_in(base.path()).unwrap(), []);
            let text = text(&log);
            let pid = std::process::id();
            assert!(text.contains(&format!("ended without a word: its process {pid} was killed")), "{text}");
            assert_eq!(text.lines().count(), 2, "{text}");
        }
    }

    // limit: run.log_bytes
    // limit: bytes of an entry
    #[test]
    fn size_is_limited_and_the_last_entries_are_kept() {
        let base = tempfile::tempdir().unwrap();
        let (_dir, log) = stack(base.path(), "web");
        for number in 0..1000 {
            log.append(Level::INFO, &format!("entry {number} {}", "x".repeat(number % 100))).unwrap();
            let LogFiles { previous, current, .. } = log.files();
            for file in [previous, current] {
                assert!(fs::metadata(&file).map_or(0, |metadata| metadata.len()) <= 4096, "{file:?}");
            }
        }
        let text = text(&log);
        assert!(text.contains("entry 999") && text.contains("entry 960"), "{text}");
        let numbers: Vec<u32> =
            text.lines().map(|line| line.split(' ').nth(5).unwrap().parse().unwrap()).collect();
        assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
        // An entry longer than a file is the only one in it.
        log.append(Level::ERROR, &"y".repeat(100_000)).unwrap();
        let current = fs::metadata(log.files().current).unwrap().len() as usize;
        assert!((ENTRY_BYTES_MAX..ENTRY_BYTES_MAX + 100).contains(&current), "{current}");
    }

    #[test]
    fn writers_at_the_same_time_lose_no_entry() {
        let base = tempfile::tempdir().unwrap();
        let (dir, _) = stack(base.path(), "web");
        let log = StackLog::open(dir.path(), 32_768, 3).unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let log = &log;
                scope.spawn(move || {
                    for number in 0..300 {
                        log.append(Level::INFO, &format!("{writer} {number}")).unwrap();
                    }
                });
            }
        });
        // 1,200 entries of 40 to 50 bytes fill one file and most of another, so none may be missing.
        assert!(log.files().previous.exists());
        let text = text(&log);
        let mut entries: Vec<&str> = text.lines().map(|line| line.split_once("INFO  ").unwrap().1).collect();
        entries.sort_unstable();
        entries.dedup();
        assert_eq!(entries.len(), 1200);
    }

    // limit: run.logs_max
    #[test]
    fn oldest_logs_of_ended_stacks_are_deleted() {
        let base = tempfile::tempdir().unwrap();
        let (_lives, first) = stack(base.path(), "first");
        first.append(Level::INFO, "runs").unwrap();
        for name in ["a", "b", "c", "d"] {
            let (_dir, log) = stack(base.path(), name);
            log.append(Level::INFO, "ran").unwrap();
            // The order is that of the last changes, whose time has the resolution of a clock tick.
            let time =
                SystemTime::now() - std::time::Duration::from_secs(1000 - u64::from(name.as_bytes()[0]));
            File::options().append(true).open(log.files().current).unwrap().set_modified(time).unwrap();
        }
        let names: Vec<String> = list_in(base.path()).unwrap().into_iter().map(|files| files.name).collect();
        assert_eq!(names, ["c", "d", "first"]);
        // The log of a stack without a name of its own goes before older ones.
        stack(base.path(), "run-4711").1.append(Level::INFO, "ran").unwrap();
        stack(base.path(), "d");
        stack(base.path(), "e").1.append(Level::INFO, "ran").unwrap();
        let names: Vec<String> = list_in(base.path()).unwrap().into_iter().map(|files| files.name).collect();
        assert!(!names.contains(&"run-4711".into()), "{names:?}");
    }

    // limit: run.logs_max
    #[test]
    fn log_without_a_current_file_is_listed_and_deleted() {
        let base = tempfile::tempdir().unwrap();
        let (dir, log) = stack(base.path(), "a");
        log.append(Level::INFO, "ran").unwrap();
        drop(dir);
        let files = log.files();
        fs::rename(&files.current, &files.previous).unwrap();
        assert_eq!(list_in(base.path()).unwrap(), core::slice::from_ref(&files));
        for name in ["b", "c", "d"] {
            stack(base.path(), name).1.append(Level::INFO, "ran").unwrap();
        }
        assert!(!files.previous.exists());
        assert!(list_in(base.path()).unwrap().iter().all(|files| files.name != "a"));
    }

    #[test]
    fn names_and_messages_cannot_forge_entries() {
        let entry =
            format_entry(Level::WARN, 7, "program \"x\u{1b}[2J\n2026-01-01T00:00:00.000Z [1] ERROR y\"");
        let (first, second) = entry.trim_end().split_once('\n').unwrap();
        assert!(first.contains("[7] WARN  program \"x\\u{1b}[2J"), "{first}");
        assert!(second.starts_with("    2026"), "{second}");
    }

    #[test]
    fn folder_of_another_place_is_not_followed() {
        let base = tempfile::tempdir().unwrap();
        let (_dir, log) = stack(base.path(), "web");
        let folder = base.path().join(FOLDER);
        fs::remove_dir(&folder).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), &folder).unwrap();
        assert!(log.append(Level::INFO, "x").is_err());
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    }
}
