//! The progress of the demonstration, on standard error: one line that is rewritten if it is a terminal, else
//! one line for each step.

use crate::table::with_thousands_separators;
use std::io::{IsTerminal, Write, stderr};

/// Shows how many steps are done.
pub struct Progress {
    steps: usize,
    done: usize,
    is_terminal: bool,
}

impl Progress {
    /// Creates the progress of this many steps.
    pub fn new(steps: usize) -> Self {
        Self { steps, done: 0, is_terminal: stderr().is_terminal() }
    }

    /// Shows which step has begun, on a terminal.
    pub fn begin(&self, step: &str) {
        if self.is_terminal {
            self.show(self.done + 1, step, "\r\x1b[K", "");
        }
    }

    /// Shows the result of a step.
    pub fn end(&mut self, step: &str, kernel: f64, ginnel: f64) {
        self.done += 1;
        let number = |rate: f64| with_thousands_separators(rate as u64);
        let text = format!("{step}: kernel {}, Ginnel {}", number(kernel), number(ginnel));
        match self.is_terminal {
            true => self.show(self.done, &text, "\r\x1b[K", if self.done == self.steps { "\n" } else { "" }),
            false => self.show(self.done, &text, "", "\n"),
        }
    }

    fn show(&self, step: usize, text: &str, before: &str, after: &str) {
        // Without standard error there is nobody to inform.
        let _ = write!(stderr(), "{before}[{step}/{}] {text}{after}", self.steps);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // An error message must not continue the line.
        if self.is_terminal && self.done < self.steps {
            let _ = writeln!(stderr());
        }
    }
}
