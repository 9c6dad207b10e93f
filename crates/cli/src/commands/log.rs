//! `ginnel log`: shows the log of a stack, which may run or have ended.

use crate::failure::Failure;
use crate::served_stack::POLL_INTERVAL;
use clap::Args;
use ginnel::run_dir::{self, logs};
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Options of `ginnel log`.
#[derive(Clone, Debug, Args)]
pub struct LogOptions {
    /// Name of the stack. It may have ended. May be left out if only one stack runs, or if there is only one
    /// log (see --list).
    #[arg(value_name = "NAME")]
    stack_name: Option<String>,

    /// Go on showing entries as they are written, until this command is interrupted. A stack that is started
    /// again under this name continues its log.
    #[arg(long, short)]
    follow: bool,

    /// Show only the last N lines.
    #[arg(long, short = 'n', value_name = "N")]
    lines: Option<usize>,

    /// List the logs, the oldest first, with the paths of their files.
    #[arg(long, conflicts_with_all = ["stack_name", "follow", "lines"])]
    list: bool,
}

/// Prints the log.
pub fn run(options: &LogOptions) -> Result<(), Failure> {
    let shown = if options.list { list() } else { show(options) };
    // The reader closed the pipe: that is no error.
    shown.or_else(|failure| if failure.is_closed_pipe() { Ok(()) } else { Err(failure) })
}

fn all_logs() -> Result<Vec<logs::LogFiles>, Failure> {
    let base = run_dir::base();
    logs::list_in(&base).map_err(|e| Failure::running(format!("logs in {}: {e}", base.display())))
}

fn list() -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    for files in all_logs()? {
        writeln!(out, "{:<24} {}", files.name, files.current.display())?;
    }
    Ok(())
}

fn show(options: &LogOptions) -> Result<(), Failure> {
    // Records the death of stacks that were killed. If that fails, there may still be a log.
    let running = run_dir::running().unwrap_or_default();
    let files = find(options.stack_name.as_deref(), &running)?;
    let mut text = Vec::new();
    let last = read(&files, &mut text)?;
    let start = options.lines.map_or(0, |lines| start_of_last_lines(&text, lines));
    let mut out = io::stdout().lock();
    out.write_all(&text[start..])?;
    if options.follow { follow(&files, last, &mut out) } else { Ok(()) }
}

/// Reads both files of a log, of which one may be missing: from a rotation until the next entry there is no
/// current one. Returns the file with the last entry.
fn read(files: &logs::LogFiles, text: &mut Vec<u8>) -> Result<File, Failure> {
    let current = open(&files.current);
    // The file that is open as the current one may have become the previous one meanwhile.
    let is_other = |file: &File| current.as_ref().is_ok_and(|current| inode(current) != inode(file));
    let previous = open(&files.previous).ok().filter(|file| current.is_err() || is_other(file));
    let mut read_one = |mut file: File, path| {
        file.read_to_end(text).map_err(|e| failed(path, &e))?;
        Ok(file)
    };
    let previous = previous.map(|file| read_one(file, &files.previous)).transpose()?;
    match (current, previous) {
        (Ok(file), _) => read_one(file, &files.current),
        (Err(error), Some(previous)) if error.kind() == ErrorKind::NotFound => Ok(previous),
        (Err(error), _) => Err(failed(&files.current, &error)),
    }
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    Failure::running(format!("{}: {error}", path.display()))
}

/// Returns the log of the stack of this name, or that of the only running stack, or the only log.
fn find(name: Option<&str>, running: &[run_dir::RunningStack]) -> Result<logs::LogFiles, Failure> {
    let mut all = all_logs()?;
    let name = match (name, running) {
        (Some(name), _) => name.to_owned(),
        (None, [only]) => only.name.clone(),
        (None, _) if all.len() == 1 => all[0].name.clone(),
        (None, _) if all.is_empty() => {
            let base = run_dir::base();
            return Err(Failure::running(format!("no stack of this user has a log ({})", base.display())));
        }
        (None, _) => {
            return Err(Failure::running(format!("there are several logs, name one: {}", names(&all))));
        }
    };
    match all.iter().position(|files| files.name == name) {
        Some(at) => Ok(all.swap_remove(at)),
        None if all.is_empty() => {
            Err(Failure::running(format!("no stack named \"{name}\" has a log, nor any other of this user")))
        }
        None => Err(Failure::running(format!(
            "no stack named \"{name}\" has a log; there are logs of: {}",
            names(&all)
        ))),
    }
}

fn names(all: &[logs::LogFiles]) -> String {
    all.iter().map(|files| files.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Returns where the last `lines` lines of `text` begin.
fn start_of_last_lines(text: &[u8], lines: usize) -> usize {
    if lines == 0 {
        return text.len();
    }
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let ends = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    ends.map(|(at, _)| at + 1).nth(lines - 1).unwrap_or(0)
}

/// Copies what is appended to a log, whose file with the last entry is open as `last` and has been read.
fn follow(files: &logs::LogFiles, mut last: File, out: &mut impl Write) -> Result<(), Failure> {
    loop {
        // Opened before the rest of the old file is read: whoever replaced the file writes to the new one.
        let next = open(&files.current).ok().filter(|next| inode(next) != inode(&last));
        let mut copied = io::copy(&mut last, out)?;
        match next {
            Some(next) => {
                // The log may have been rotated twice: one file is neither the old nor the new one.
                let between = open(&files.previous).ok();
                let is_new = |file: &File| inode(file) != inode(&last) && inode(file) != inode(&next);
                if let Some(mut between) = between.filter(is_new) {
                    copied += io::copy(&mut between, out)?;
                }
                last = next;
            }
            None => std::thread::sleep(POLL_INTERVAL),
        }
        if copied > 0 {
            out.flush()?;
        }
    }
}

/// Opens a file of a log. Root may read the logs of another user, who must not direct it elsewhere.
fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

fn inode(file: &File) -> Option<(u64, u64)> {
    file.metadata().ok().map(|metadata| (metadata.dev(), metadata.ino()))
}

#[cfg(test)]
mod tests {
    use super::start_of_last_lines;

    #[test]
    fn last_lines_are_found() {
        for (text, lines, expected) in [
            ("a\nb\nc\n", 1, "c\n"),
            ("a\nb\nc\n", 2, "b\nc\n"),
            ("a\nb\nc\n", 3, "a\nb\nc\n"),
            ("a\nb\nc\n", 9, "a\nb\nc\n"),
            ("a\nb\nc\n", 0, ""),
            ("a\nb", 1, "b"),
            ("", 1, ""),
            ("\n\n", 1, "\n"),
        ] {
            assert_eq!(&text[start_of_last_lines(text.as_bytes(), lines)..], expected, "{text:?} {lines}");
        }
    }
}
