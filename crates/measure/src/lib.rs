//! Measures servers under load on Ginnel and on the kernel, with one generator, the same cores, and an
//! account of the CPU time of every participant. `crates/bench` and `ginnel bench compare` are built on it.
//!
//! ```text
//! namespace      a private network namespace
//! veth           a veth pair in it, and the NAPI threads that receive on the pair
//! testbed        the medium between server and generator: veth, memif or loopback
//! servers        unmodified servers and their configuration
//! program        a server: an unmodified program on the kernel or on a stack (ginnel run)
//! watched_group  a process group that does not outlive the process that started it
//! generator      ginnel load, pinned; waits until the server answers
//! cpu_account    CPU time of all participants, and whose core was saturated
//! machine        the CPUs
//! ```

pub mod cpu_account;
pub mod generator;
pub mod machine;
pub mod namespace;
pub mod program;
pub mod servers;
pub mod testbed;
pub mod veth;
pub mod watched_group;

use std::fmt;

/// The cores that the participants of a measurement run on: server, client, and over veth for each of them
/// the kernel thread that receives (threaded NAPI).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum CoreLayout {
    /// The server and its NAPI thread run on one core, the client and its NAPI thread on another: each core
    /// bears its own receive work.
    #[default]
    Charged,
    /// As `Charged`, but without NAPI threads: the kernel receives on the core of the sender. The server does
    /// not bear the cost of receiving, so it appears faster than it is.
    Sender,
    /// Everything runs on one core.
    One,
}

/// Why a measurement was not made.
#[derive(Debug)]
pub enum MeasureError {
    /// A prerequisite is missing on this machine; this is not an error.
    Skipped(String),
    /// The measurement failed.
    Failed(String),
}

impl MeasureError {
    /// Creates a [`MeasureError::Failed`] from any error.
    pub fn failed(error: impl fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

impl fmt::Display for MeasureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skipped(reason) => write!(f, "skipped: {reason}"),
            Self::Failed(reason) => write!(f, "failed: {reason}"),
        }
    }
}

impl From<std::io::Error> for MeasureError {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// Returns the median, or `None` if there are no values.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        n if n % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn median_of_even_count_averages_middle_two() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
