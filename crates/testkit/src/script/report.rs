//! What a failed run tells.

use super::ast::Target;
use core::fmt;
use core::time::Duration;
use std::collections::VecDeque;
use std::path::PathBuf;

/// Lines of history that a failure shows.
const HISTORY_LINES: usize = 12;

/// Why a run failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The script.
    pub path: PathBuf,
    /// Line of the event that failed.
    pub line: u32,
    /// Which run.
    pub target: Target,
    /// What is wrong.
    pub message: String,
    /// What happened before.
    pub history: Vec<String>,
}

impl Failure {
    /// The command that runs this case alone.
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
        writeln!(f, "  before:")?;
        for line in &self.history {
            writeln!(f, "    {line}")?;
        }
        write!(f, "  again: {}", self.replay_command())
    }
}

impl std::error::Error for Failure {}

/// The last things that happened.
#[derive(Debug, Default)]
pub struct History {
    lines: VecDeque<String>,
}

impl History {
    /// Remembers one thing.
    pub fn add(&mut self, at: Duration, text: &str) {
        if self.lines.len() == HISTORY_LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(format!("{:.6} {text}", at.as_secs_f64()));
    }

    /// All that is remembered, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.lines.iter().cloned().collect()
    }
}
