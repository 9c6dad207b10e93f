//! Why the command ends early.

use core::fmt;
use std::process::ExitCode;

/// One line for standard error, and whose fault it is.
#[derive(Debug)]
pub struct Failure {
    text: String,
    usage: bool,
    closed_pipe: bool,
}

impl Failure {
    /// Arguments or configuration cannot be used.
    pub fn usage(text: impl Into<String>) -> Self {
        Self { text: text.into(), usage: true, closed_pipe: false }
    }

    /// It failed while running.
    pub fn running(text: impl Into<String>) -> Self {
        Self { text: text.into(), usage: false, closed_pipe: false }
    }

    /// Nobody reads the output any more.
    pub fn is_closed_pipe(&self) -> bool {
        self.closed_pipe
    }

    /// 2 for usage, 1 otherwise.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(if self.usage { 2 } else { 1 })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<ginnel::Error> for Failure {
    fn from(e: ginnel::Error) -> Self {
        match e {
            ginnel::Error::Config(_) => Self::usage(e.to_string()),
            _ => Self::running(e.to_string()),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Self {
        let closed_pipe = e.kind() == std::io::ErrorKind::BrokenPipe;
        Self { closed_pipe, ..Self::running(e.to_string()) }
    }
}
