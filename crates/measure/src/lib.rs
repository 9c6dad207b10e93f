//! Servers under load, on Ginnel and on the kernel, fairly: the same generator, the same cores, and an account of who paid for what. `crates/bench` and `ginnel bench compare`
//! are built of it.
//!
//! ```text
//! namespace  a network namespace of one's own
//! veth       a cable in it, and the kernel's threads that receive
//! wire       what joins server and generator: that cable, or memory
//! program    a server: unmodified, on the kernel or on a stack (ginnel run)
//! generator  ginnel load on the light stack, pinned; waits until the server answers
//! account    CPU time of all who take part, and whose core was full
//! machine    the CPUs
//! ```

pub mod cpu_account;
pub mod generator;
pub mod machine;
pub mod namespace;
pub mod program;
pub mod testbed;
pub mod veth;

use std::fmt;

/// Which cores the parts of a measurement run on: server, client, and over veth for each of them the kernel's thread that receives (threaded NAPI).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum CoreLayout {
    /// The server and its receive work on one core, the client and its own on another: each pays for itself.
    #[default]
    Charged,
    /// The same without threads for receiving: it happens on the core of whoever sends. What is received costs the server nothing, so that it looks better than it is.
    Sender,
    /// All on one core.
    One,
}

/// Why nothing was measured.
#[derive(Debug)]
pub enum MeasureError {
    /// Something it needs is not here; not an error.
    Skipped(String),
    /// It went wrong.
    Failed(String),
}

impl MeasureError {
    /// What went wrong.
    pub fn failed(error: impl fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

impl fmt::Display for MeasureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skipped(why) => write!(f, "skipped: {why}"),
            Self::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

impl From<std::io::Error> for MeasureError {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// The median; `None` of nothing.
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
    fn the_median_of_even_counts_is_between_the_middle_two() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
