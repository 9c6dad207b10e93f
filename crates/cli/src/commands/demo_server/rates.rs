//! The lines that are printed every second, and where they go.

use crate::failure::Failure;
use crate::output;
use core::fmt;
use core::time::Duration;
use ginnel::clock;
use ginnel_apps::demo_server::counters::{WorkerCounters, WorkerCounts};
use ginnel_apps::demo_server::server::Trace;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Interval between lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// Where lines go: a file, or standard output.
#[derive(Clone)]
pub struct LineSink(Option<Arc<Mutex<File>>>);

impl LineSink {
    /// Creates the file, if one is given.
    pub fn open(path: Option<&Path>) -> Result<Self, Failure> {
        let create = |path: &Path| {
            File::create(path).map_err(|e| Failure::usage(format!("--log {}: {e}", path.display())))
        };
        Ok(Self(path.map(create).transpose()?.map(|file| Arc::new(Mutex::new(file)))))
    }

    /// Writes a line. The server does not depend on it: a failure has no effect.
    fn write(&self, line: fmt::Arguments<'_>) {
        match &self.0 {
            Some(file) => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = file.write_all(format!("{line}\n").as_bytes());
            }
            None => {
                let _ = output::print(format_args!("{line}\n"));
            }
        }
    }

    /// Returns a function that writes lines, if `on`.
    pub fn trace(&self, on: bool) -> Option<Trace> {
        let sink = self.clone();
        on.then(|| -> Trace { Arc::new(move |line| sink.write(line)) })
    }
}

/// A thread that prints the rates until the value is dropped.
pub struct RatePrinter {
    /// The thread ends when this is dropped.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl RatePrinter {
    /// Starts the thread.
    pub fn start(counters: Vec<Arc<WorkerCounters>>, sink: LineSink, verbose: bool) -> Result<Self, Failure> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("rates".into());
        let thread = thread.spawn(move || print_until(&stopped, &counters, &sink, verbose));
        let thread = thread.map_err(|e| Failure::running(format!("thread of the rates: {e}")))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for RatePrinter {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported already.
            let _ = thread.join();
        }
    }
}

/// Prints lines until the other end of the channel is dropped.
fn print_until(stop: &mpsc::Receiver<()>, counters: &[Arc<WorkerCounters>], sink: &LineSink, verbose: bool) {
    let counts = || counters.iter().map(|worker| worker.counts()).collect::<Vec<_>>();
    let (mut before, mut since) = (counts(), clock::now());
    while stop.recv_timeout((since + INTERVAL).saturating_since(clock::now()))
        == Err(RecvTimeoutError::Timeout)
    {
        let (now, at) = (counts(), clock::now());
        sink.write(format_args!("{}", line(&before, &now, at.saturating_since(since), verbose)));
        (before, since) = (now, at);
    }
}

/// Returns the line for the time between two readings.
fn line(before: &[WorkerCounts], now: &[WorkerCounts], time: Duration, verbose: bool) -> String {
    let seconds = time.as_secs_f64().max(1e-3);
    let rate = |count: fn(&WorkerCounts) -> u64| -> Vec<u64> {
        let since = before.iter().zip(now).map(|(before, now)| count(now).saturating_sub(count(before)));
        since.map(|count| (count as f64 / seconds).round() as u64).collect()
    };
    let sum = |rates: Vec<u64>| rates.iter().sum::<u64>();
    let requests = rate(|c| c.requests);
    let workers: Vec<String> = requests.iter().map(u64::to_string).collect();
    let total = format!("Request/s {}", sum(requests));
    if !verbose {
        return total;
    }
    format!(
        "{total}; by worker {}; connections/s {}, to backends {}; open {}; errors/s {}, of backends {}",
        workers.join(" "),
        sum(rate(|c| c.connections)),
        sum(rate(|c| c.backend_connects)),
        now.iter().map(|c| c.open).sum::<u64>(),
        sum(rate(|c| c.errors)),
        sum(rate(|c| c.backend_failures)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_has_rates_of_all_workers() {
        let counts = |requests, connections, open| WorkerCounts {
            requests,
            connections,
            open,
            ..WorkerCounts::default()
        };
        let (before, now) = ([counts(10, 1, 5), counts(0, 0, 0)], [counts(30, 3, 1), counts(10, 1, 1)]);
        let two = Duration::from_secs(2);
        assert_eq!(line(&before, &now, two, false), "Request/s 15");
        assert_eq!(
            line(&before, &now, two, true),
            "Request/s 15; by worker 10 5; connections/s 2, to backends 0; open 2; errors/s 0, of backends 0"
        );
    }

    #[test]
    fn a_log_file_gets_the_lines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let sink = LineSink::open(Some(&path)).unwrap();
        sink.write(format_args!("one"));
        sink.trace(true).unwrap()(format_args!("two"));
        assert!(sink.trace(false).is_none());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        let missing = directory.path().join("no/log");
        let error = LineSink::open(Some(&missing)).err().unwrap().to_string();
        assert!(error.starts_with(&format!("--log {}: ", missing.display())), "{error}");
    }
}
