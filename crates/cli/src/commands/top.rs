//! `ginnel top`: shows what a running stack does, refreshed at an interval. The counters are those of `ginnel
//! stat`, the round-trip times those of `ginnel ss -i`, and the response times those of `ginnel monitor`.

mod answers;
mod latencies;
mod rates;
mod view;

use super::monitor::protocol::ProtocolOptions;
use super::stat::{StatSource, sample::StatSample, seconds};
use crate::failure::Failure;
use crate::output::note;
use crate::signals;
use crate::terminal::{self, Terminal};
use answers::AnswerReader;
use clap::Args;
use core::time::Duration;
use ginnel::StopFlag;
use ginnel::run_dir::{self, RunDirError, RunningStack, restarts};
use latencies::{ResponseObserver, RoundTripReader};
use rates::Rates;
use std::io::{self, Write};
use std::time::Instant;
use view::View;

/// Longest time between two checks for keys and signals.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Longest time for which the shards of a running stack may have no counters, because they are being
/// restarted.
const RESTART_TIMEOUT: Duration = Duration::from_secs(30);
/// ETX, which a terminal without signals sends for Ctrl-C.
const CTRL_C: u8 = 3;

/// Options of `ginnel top`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "On a terminal the picture is redrawn in place; q or Ctrl-C ends. Otherwise each interval is a few lines,\nor one line of JSON. What the columns mean, and what to do: docs/operations.md"
)]
pub struct TopOptions {
    /// Name of the stack, if several run (see ginnel stat --list).
    name: Option<String>,

    /// Time between two pictures, in seconds.
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,

    /// End after N pictures.
    #[arg(long, short = 'n', value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Print JSON: one line for each interval.
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    protocol: ProtocolOptions,
}

/// The form in which pictures are written to standard output.
enum Screen {
    Terminal(Terminal),
    Lines,
    Json,
}

/// Shows pictures until the stack or the reader ends.
pub fn run(options: &TopOptions) -> Result<(), Failure> {
    let find = |name: Option<&str>| run_dir::find(name).map_err(|e| Failure::running(e.to_string()));
    let running = find(options.name.as_deref())?;
    let observer = options
        .protocol
        .is_given()
        .then(|| ResponseObserver::attach(&running, &options.protocol, options.interval));
    let observer = observer.transpose()?;
    let source = StatSource::open(running)?;
    let before = source.take()?;
    let stop = signals::stop_and_clean_up_on_signal()?;
    let screen = match options.json {
        true => Screen::Json,
        false => Terminal::open()?.map_or(Screen::Lines, Screen::Terminal),
    };
    let mut round_trips = RoundTripReader::new();
    round_trips.update(&source.running, source.sum(&before, "pool.connections.used"));
    let mut answers = AnswerReader::default();
    answers.update(&source.running);
    let mut top = Top { options, stop, screen, observer, answers, round_trips, source, before };
    let shown = top.show_all();
    // Restores the terminal before anything is printed.
    drop(top);
    match shown {
        Ok(None) => Ok(()),
        Ok(Some(end)) => {
            note(end);
            Ok(())
        }
        // The reader closed the pipe: that is no error.
        Err(failure) if failure.is_closed_pipe() => Ok(()),
        Err(failure) => Err(failure),
    }
}

struct Top<'a> {
    options: &'a TopOptions,
    stop: StopFlag,
    screen: Screen,
    observer: Option<ResponseObserver>,
    answers: AnswerReader,
    round_trips: RoundTripReader,
    source: StatSource,
    before: StatSample,
}

/// A look at the stack.
enum StackState {
    Runs(StatSource, StatSample),
    /// Its shards are being started again.
    Restarts,
    /// The stack has ended, as it was asked to.
    Ended,
}

impl Top<'_> {
    /// Shows pictures. Returns a text about the end of the stack, or `None` if the operator has ended the
    /// command or all requested pictures were shown.
    fn show_all(&mut self) -> Result<Option<String>, Failure> {
        let started = Instant::now();
        let mut pictures = 0;
        let mut last_answer = Instant::now();
        let mut next = started + self.options.interval;
        loop {
            if self.wait_until(next) {
                return Ok(None);
            }
            next = (next + self.options.interval).max(Instant::now());
            let name = self.source.running.name.clone();
            match self.read_state()? {
                StackState::Ended => return Ok(Some(format!("the stack \"{name}\" has ended"))),
                StackState::Restarts if last_answer.elapsed() < RESTART_TIMEOUT => {
                    self.draw_text(&format!(
                        "{name}: the shards start again (ginnel log {name} says why)\n"
                    ))?;
                    continue;
                }
                StackState::Restarts => {
                    return Err(Failure::running(format!(
                        "the shards of the stack \"{name}\" have died and did not start again within {} s: see \"ginnel log {name}\"",
                        RESTART_TIMEOUT.as_secs()
                    )));
                }
                StackState::Runs(source, now) => {
                    last_answer = Instant::now();
                    // After a restart the counters begin at zero.
                    let restarted = source.pages.len() != self.source.pages.len()
                        || source.value(&now, 0, "shard.running_ns")
                            < self.source.value(&self.before, 0, "shard.running_ns");
                    if restarted {
                        self.draw_text(&format!(
                            "{name}: the shards were started again (ginnel log {name} says why)\n"
                        ))?;
                    } else {
                        self.draw(&source, &now, started.elapsed())?;
                        pictures += 1;
                    }
                    (self.source, self.before) = (source, now);
                }
            }
            if self.options.count.is_some_and(|count| pictures >= count) {
                return Ok(None);
            }
        }
    }

    /// Waits until `next`, and examines frames meanwhile. Returns true if the operator ends the command.
    fn wait_until(&mut self, next: Instant) -> bool {
        loop {
            if self.stop.is_set() {
                return true;
            }
            if let Some(observer) = &mut self.observer
                && !observer.poll()
            {
                self.observer = None;
            }
            let rest = next.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return false;
            }
            match &mut self.screen {
                Screen::Terminal(terminal) => {
                    if matches!(terminal.key(rest.min(POLL_INTERVAL)), Some(b'q' | b'Q' | CTRL_C)) {
                        return true;
                    }
                }
                Screen::Lines | Screen::Json => std::thread::sleep(rest.min(POLL_INTERVAL)),
            }
        }
    }

    /// Finds the stack, and reads its counters. Opens the files again, because restarted shards have new
    /// ones.
    fn read_state(&mut self) -> Result<StackState, Failure> {
        let (name, pid) = (&self.source.running.name, self.source.running.pid);
        let running = match run_dir::find(Some(name)) {
            Ok(running) if running.pid == pid => running,
            Ok(RunningStack { pid: other, .. }) => {
                return Err(Failure::running(format!(
                    "the stack \"{name}\" (process {pid}) has ended; another one runs now, as process {other}"
                )));
            }
            Err(RunDirError::NotRunning(..) | RunDirError::NoneRunning(_)) => return Ok(StackState::Ended),
            Err(e) => return Err(Failure::running(e.to_string())),
        };
        // The pages of shards that died stay as they were.
        if restarts::has_failed(&running.path) {
            return Ok(StackState::Restarts);
        }
        let Ok(source) = StatSource::open(running) else { return Ok(StackState::Restarts) };
        let Ok(now) = source.take() else { return Ok(StackState::Restarts) };
        Ok(StackState::Runs(source, now))
    }

    fn draw(&mut self, source: &StatSource, now: &StatSample, elapsed: Duration) -> Result<(), Failure> {
        let rates = Rates::new(source, &self.before, now, self.answers.update(&source.running));
        let round_trips = self.round_trips.update(&source.running, rates.sum().connections);
        let view = View {
            stack: &source.running.name,
            pid: source.running.pid,
            every: self.options.interval,
            rates: &rates,
            round_trips,
            responses: self.observer.as_ref().map(ResponseObserver::last),
        };
        let text = match self.screen {
            Screen::Terminal(_) => view.text(terminal::size().map_or(usize::MAX, |(_, columns)| columns)),
            Screen::Lines => view.lines(elapsed.as_secs_f64()),
            Screen::Json => view.json(),
        };
        self.draw_text(&text)
    }

    /// Writes a picture, or a text about the stack. With `--json`, texts are left out.
    fn draw_text(&self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        match self.screen {
            Screen::Terminal(_) => {
                let lines: Vec<&str> = text.lines().collect();
                let hint = "make the window larger";
                out.write_all(terminal::screen(&lines, hint, terminal::size()).as_bytes())?;
            }
            Screen::Json if !text.starts_with('{') => {}
            Screen::Lines | Screen::Json => out.write_all(text.as_bytes())?,
        }
        Ok(out.flush()?)
    }
}
