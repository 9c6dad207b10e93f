//! Reports of failed runs.

use super::ast::Target;
use core::fmt;
use core::time::Duration;
use std::collections::VecDeque;
use std::path::PathBuf;

/// Number of history lines in a failure report.
const HISTORY_LINES: usize = 12;

/// Description of a failed run.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Path of the script.
    pub path: PathBuf,
    /// Line of the event that failed.
    pub line: u32,
    /// The run.
    pub target: Target,
    /// Description of the failure.
    pub message: String,
    /// Preceding events.
    pub history: Vec<String>,
}

impl Failure {
    /// Returns the command that runs this case alone.
    pub fn replay_command(&self) -> String {
        format!(
            "cargo run -p ginnel-testkit --bin ginnel-script -- --backend {} --ip {} {}",
            self.target.backend.name(),
            self.target.ip.name(),
            self.path.display()
        )
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}:{}: ({}) {}", self.path.display(), self.line, self.target, self.message)?;
        writeln!(f, "  history:")?;
        for line in &self.history {
            writeln!(f, "    {line}")?;
        }
        write!(f, "  replay: {}", self.replay_command())
    }
}

impl std::error::Error for Failure {}

/// The latest events of a run.
#[derive(Debug, Default)]
pub struct History {
    lines: VecDeque<String>,
}

impl History {
    /// Appends an event and drops the oldest one beyond the limit.
    pub fn add(&mut self, at: Duration, text: &str) {
        if self.lines.len() == HISTORY_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(format!("{:.6} {text}", at.as_secs_f64()));
    }

    /// Returns all stored lines, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}
