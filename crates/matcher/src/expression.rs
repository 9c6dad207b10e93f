//! Expressions in tcpdump's language.

use crate::bpf::{BadProgram, Program};
use crate::flow::FlowShape;
use crate::{from_text, libpcap};
use core::fmt;
use core::str::FromStr;
use std::sync::Arc;

/// Longest text of an expression, in bytes.
const TEXT_BYTES_MAX: usize = 4096;

/// An expression in tcpdump's language (pcap-filter(7)), compiled by libpcap. libpcap is loaded when the
/// first expression is compiled; accepting frames does not need it.
///
/// As with tcpdump, `tcp port 80` does not accept a frame with a VLAN tag, but `vlan and tcp port 80` does.
#[derive(Clone)]
pub struct Expression {
    text: Arc<str>,
    program: Arc<Program>,
}

/// Why an expression cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExpressionError {
    /// The text is empty, which tcpdump takes for all frames.
    Empty,
    /// The text has more bytes than the limit.
    TooLong(usize),
    /// libpcap cannot be loaded, for this reason.
    LibraryMissing(String),
    /// The error that libpcap reports, or why the text cannot be passed to libpcap.
    Syntax(String),
    /// libpcap's program cannot be executed.
    Program(BadProgram),
}

impl fmt::Display for ExpressionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("is empty"),
            Self::TooLong(len) => write!(f, "has {len} bytes, at most {TEXT_BYTES_MAX} are possible"),
            Self::LibraryMissing(reason) => {
                write!(f, "expressions need libpcap (on Debian: apt-get install libpcap0.8): {reason}")
            }
            Self::Syntax(problem) => f.write_str(problem),
            Self::Program(problem) => {
                write!(f, "is compiled to a program that cannot be executed: {problem}")
            }
        }
    }
}

impl std::error::Error for ExpressionError {}

impl Expression {
    /// Wraps a program that was not compiled by libpcap. `text` only names it: expressions with equal texts
    /// are equal.
    #[must_use]
    pub fn from_program(text: &str, program: Program) -> Self {
        Self { text: text.into(), program: Arc::new(program) }
    }

    /// Returns the text.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns whether the expression accepts a frame, which may consist of any bytes.
    #[must_use]
    pub fn accepts(&self, frame: &[u8]) -> bool {
        self.program.run(frame) != 0
    }

    /// Returns true if the expression accepts all packets of this frame's flow, false if it accepts none of
    /// them, and `None` if that depends on the packet. The headers of the frame have the shape `shape`.
    pub(crate) fn accepts_flow(&self, frame: &[u8], shape: FlowShape) -> Option<bool> {
        self.program.run_for_flow(frame, shape).map(|value| value != 0)
    }
}

impl FromStr for Expression {
    type Err = ExpressionError;

    fn from_str(text: &str) -> Result<Self, ExpressionError> {
        if text.trim().is_empty() {
            return Err(ExpressionError::Empty);
        }
        if text.len() > TEXT_BYTES_MAX {
            return Err(ExpressionError::TooLong(text.len()));
        }
        let instructions = libpcap::compile(text)?;
        let program = Program::verify(&instructions).map_err(ExpressionError::Program)?;
        Ok(Self::from_program(text, program))
    }
}

impl PartialEq for Expression {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl fmt::Debug for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

impl fmt::Display for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

from_text!(Expression);

#[cfg(test)]
pub(crate) mod tests;
