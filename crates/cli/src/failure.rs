//! Why the command ends early.

use core::fmt;
use std::process::ExitCode;

/// One line for standard error, and whose fault it is.
#[derive(Debug)]
pub struct Failure {
    text: String,
    code: u8,
    closed_pipe: bool,
}

impl Failure {
    /// Arguments or configuration cannot be used.
    pub fn usage(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 2, closed_pipe: false }
    }

    /// It failed while running.
    pub fn running(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 1, closed_pipe: false }
    }

    /// A program was to run on a stack and has none: the status of the library in this case, too.
    pub fn no_stack(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 125, closed_pipe: false }
    }

    /// Arguments or configuration cannot be used.
    pub fn is_usage(&self) -> bool {
        self.code == 2
    }

    /// Nobody reads the output any more.
    pub fn is_closed_pipe(&self) -> bool {
        self.closed_pipe
    }

    /// A program that ran on a stack ended with this status; it has said itself why.
    pub fn program(code: u8) -> Self {
        Self { text: String::new(), code, closed_pipe: false }
    }

    /// 2 for usage, 125 without a stack, a program's own, 1 otherwise.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }

    /// Whether there is nothing to be said.
    pub fn is_silent(&self) -> bool {
        self.text.is_empty()
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
