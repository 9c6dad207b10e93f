//! The log: events of the devices, the runtime and this command are entries in the log of the stack that this
//! process runs. Those of level WARN and ERROR are printed on standard error, too. A panic leaves its message
//! and a backtrace there.

use crate::entry_limit::{EntryLimit, OmittedEntry, REFILL};
use crate::failure::Failure;
use core::fmt::{self, Write as _};
use core::sync::atomic::{AtomicBool, Ordering};
use ginnel::config::RunConfig;
use ginnel::run_dir::logs::StackLog;
use rustix::fs::fstat;
use rustix::stdio::{dup2_stderr, dup2_stdout, stderr};
use std::backtrace::Backtrace;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::path::Path;
use std::sync::{LazyLock, OnceLock};
use std::time::Instant;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// The log of the stack of this process.
static STACK_LOG: OnceLock<StackLog> = OnceLock::new();
/// Limits the entries of each kind.
static ENTRY_LIMIT: LazyLock<EntryLimit> = LazyLock::new(EntryLimit::default);
/// True while a thread waits to write entries that were left out.
static IS_WRITER_RUNNING: AtomicBool = AtomicBool::new(false);
/// True if standard error is the file of the log.
static IS_STDERR_LOGGED: AtomicBool = AtomicBool::new(false);

/// Installs the subscriber and the panic hook. Without [`open`] they only print on standard error.
pub fn install() {
    // Fails only if another subscriber was installed before; that one keeps the events.
    let _ = tracing::subscriber::set_global_default(LogSubscriber);
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let is_logged = STACK_LOG.get().is_some_and(|log| log_panic(log, panic));
        if !is_logged || !IS_STDERR_LOGGED.load(Ordering::Relaxed) {
            default_hook(panic);
        }
    }));
}

/// Opens the log of the stack with this directory, which this process runs. Without a log the stack runs all
/// the same, with a warning.
pub fn open(directory: &Path, config: &RunConfig) {
    match StackLog::open(directory, config.log_bytes, config.logs_max as usize) {
        // A process has one stack.
        Ok(log) => drop(STACK_LOG.set(log)),
        Err(error) => tracing::warn!("the stack has no log: {error}"),
    }
}

/// Redirects standard output and standard error to the log; without a log the output is discarded.
///
/// # Errors
/// The file cannot be opened.
pub fn redirect_output() -> Result<(), Failure> {
    let Some(log) = STACK_LOG.get() else {
        let null = File::options().write(true).open("/dev/null").map_err(Failure::from)?;
        return dup2_stdout(&null)
            .and_then(|()| dup2_stderr(&null))
            .map_err(|e| Failure::from(io::Error::from(e)));
    };
    let failed = |e: std::io::Error| Failure::running(format!("{}: {e}", log.files().current.display()));
    let file = log.open_current().map_err(failed)?;
    dup2_stdout(&file).and_then(|()| dup2_stderr(&file)).map_err(|e| failed(e.into()))?;
    IS_STDERR_LOGGED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Appends an entry about an error with which this command exits, and which it prints on standard error then,
/// if it has a message. Returns the error; it has no message any more if standard error is the log, which
/// would have the error twice.
pub fn record_last_failure(event: &str, failure: Failure) -> Failure {
    if let Some(log) = STACK_LOG.get().filter(|_| !failure.is_silent()) {
        append(log, Level::ERROR, &format!("{event}: {failure}"));
    }
    let is_stderr = |log: &StackLog| log.open_current().is_ok_and(|file| is_same_file(&file, stderr()));
    if STACK_LOG.get().is_some_and(is_stderr) { failure.silenced() } else { failure }
}

/// Appends an entry, and lets standard error follow the log to its next file. Returns false if that fails.
fn append(log: &StackLog, level: Level, text: &str) -> bool {
    let is_appended = log.append(level, text).is_ok();
    if IS_STDERR_LOGGED.load(Ordering::Relaxed)
        && let Ok(file) = log.open_current()
        && !is_same_file(&file, stderr())
    {
        // Otherwise the output goes to the previous file, which is read, too.
        let _ = dup2_stdout(&file).and_then(|()| dup2_stderr(&file));
    }
    is_appended
}

fn is_same_file(first: impl AsFd, second: impl AsFd) -> bool {
    let id = |fd: &dyn AsFd| fstat(fd.as_fd()).ok().map(|stat| (stat.st_dev, stat.st_ino));
    id(&first) == id(&second)
}

/// Records a panic and where it happened.
fn log_panic(log: &StackLog, panic: &PanicHookInfo<'_>) -> bool {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    append(log, Level::ERROR, &format!("thread {name} {panic}\n{}", Backtrace::force_capture()))
}

/// Writes the last of the entries that were left out, at the end of this process.
pub fn write_omitted() {
    write_overdue(Instant::now() + REFILL);
}

/// Writes the last left-out entry of each callsite that may write again at `now`.
fn write_overdue(now: Instant) {
    for OmittedEntry { level, text, before } in ENTRY_LIMIT.take_overdue(now) {
        write(level, &text, before);
    }
}

/// Starts a thread that writes the last of the entries that were left out, unless it runs. It ends when there
/// are none.
fn start_overdue_writer() {
    if IS_WRITER_RUNNING.swap(true, Ordering::Relaxed) {
        return;
    }
    let thread = std::thread::Builder::new().name("log".into()).spawn(|| {
        loop {
            std::thread::sleep(REFILL);
            write_overdue(Instant::now());
            if ENTRY_LIMIT.has_omitted() {
                continue;
            }
            IS_WRITER_RUNNING.store(false, Ordering::Relaxed);
            // An entry may have been left out in between.
            if !ENTRY_LIMIT.has_omitted() || IS_WRITER_RUNNING.swap(true, Ordering::Relaxed) {
                break;
            }
        }
    });
    if thread.is_err() {
        // The next entry of the kind tells how many were left out.
        IS_WRITER_RUNNING.store(false, Ordering::Relaxed);
    }
}

/// Writes an entry to the log, and to standard error if it is important.
fn write(level: Level, text: &str, omitted: u64) {
    let omitted = match omitted {
        0 => String::new(),
        count => format!(" ({count} entries of this kind were left out before this one)"),
    };
    let text = format!("{text}{omitted}");
    let is_logged = STACK_LOG.get().is_some_and(|log| append(log, level, &text));
    if level <= Level::WARN && !(is_logged && IS_STDERR_LOGGED.load(Ordering::Relaxed)) {
        // A failed write to standard error cannot be reported anywhere.
        let _ = writeln!(std::io::stderr(), "ginnel: {text}");
    }
}

struct LogSubscriber;

impl Subscriber for LogSubscriber {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn event(&self, event: &Event<'_>) {
        let mut line = LineBuilder::default();
        event.record(&mut line);
        let (level, text) = (*event.metadata().level(), line.message + &line.fields);
        let callsite = event.metadata().callsite();
        if let Some(omitted) = ENTRY_LIMIT.admit(callsite, Instant::now(), level, &text) {
            write(level, &text, omitted);
        } else {
            start_overdue_writer();
        }
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct LineBuilder {
    message: String,
    fields: String,
}

impl Visit for LineBuilder {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a `String` never fails.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, ", {name}: {value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Name of the variable with the directory of the stack of the process that panics.
    const DIRECTORY: &str = "GINNEL_TEST_PANIC_DIRECTORY";

    #[inline(never)]
    fn innermost_function_of_the_test() {
        panic!("a shard met {}", "a bug");
    }

    /// The hook and the log are those of a process, so this test runs again in one of its own.
    #[test]
    fn panic_leaves_message_and_backtrace() {
        if let Some(directory) = std::env::var_os(DIRECTORY) {
            install();
            open(Path::new(&directory), &RunConfig::default());
            redirect_output().unwrap();
            let shard = std::thread::Builder::new().name("shard-1".into());
            shard.spawn(innermost_function_of_the_test).unwrap().join().unwrap_err();
            return;
        }
        let base = tempfile::tempdir().unwrap();
        let directory = base.path().join("web");
        std::fs::create_dir(&directory).unwrap();
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "log::tests::panic_leaves_message_and_backtrace"])
            .env(DIRECTORY, &directory)
            .output()
            .unwrap();
        assert!(status.status.success(), "{status:?}");
        let log = StackLog::open(&directory, 65_536, 2).unwrap();
        let text = std::fs::read_to_string(log.files().current).unwrap();
        let entry = text.lines().position(|line| line.contains("ERROR thread shard-1 panicked at")).unwrap();
        let lines: Vec<&str> = text.lines().skip(entry).collect();
        assert_eq!(lines[1], "    a shard met a bug", "{text}");
        assert!(lines.iter().any(|line| line.contains("innermost_function_of_the_test")), "{text}");
        // The hook of the standard library would have printed the message a second time.
        assert_eq!(text.matches("a shard met a bug").count(), 1, "{text}");
    }
}
