//! What all benches share: the machine and its conditions, paired runs, and results.

pub mod lock;
pub mod pairs;
pub mod result;

pub use ginnel_measure::{CoreLayout, MeasureError, machine};

/// How a bench is to be run.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Pairs of measurements (ours, theirs, ours, theirs …).
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub pairs: usize,

    /// Length of each measurement. Default: what the bench needs.
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<f64>,

    /// Only shows that it works: one short pair, on a machine that may be busy. The figures mean nothing.
    #[arg(long)]
    pub smoke: bool,

    /// Measures on a busy machine, too, and repeats nothing. The result says so.
    #[arg(long)]
    pub force: bool,

    /// Only those parts of a bench whose names contain this: `--only 1%/20ms`.
    #[arg(long, value_name = "PART")]
    pub only: Option<String>,

    /// Who pays for what the kernel does to receive, where a kernel takes part.
    #[arg(long, value_enum, default_value_t)]
    pub layout: CoreLayout,

    /// Both ends compute TCP checksums, instead of leaving them to the memory device.
    #[arg(long)]
    pub software_checksums: bool,
}

impl Options {
    /// True if the part of a bench with this name was asked for.
    pub fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|part| name.contains(part))
    }

    /// Number of pairs.
    pub fn pairs(&self) -> usize {
        if self.smoke { 1 } else { self.pairs.max(1) }
    }

    /// Seconds of each measurement, where the bench wants `usual`.
    pub fn seconds(&self, usual: f64) -> f64 {
        self.seconds.unwrap_or(if self.smoke { usual.min(0.5) } else { usual })
    }
}
