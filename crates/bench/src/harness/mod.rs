//! Parts that all benches share: the state of the machine, pairs of measurements, and results.

pub mod jitter;
pub mod lock;
pub mod memory_group;
pub mod pairs;
pub mod result;

pub use ginnel_measure::{CoreLayout, MeasureError, machine};

/// Options of all benches.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Number of pairs of measurements (ours, theirs, ours, theirs …).
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub pairs: usize,

    /// Length of each measurement in seconds. Default: chosen by the bench.
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<f64>,

    /// Smoke test: one short pair, also on a busy machine. The figures mean nothing.
    #[arg(long)]
    pub smoke: bool,

    /// Measure also on a busy machine, and repeat nothing. The result says so.
    #[arg(long)]
    pub force: bool,

    /// Run only the parts of a bench whose names contain this text: "--only 1%/20ms".
    #[arg(long, value_name = "PART")]
    pub only: Option<String>,

    /// Which core runs the kernel's receive processing, in benches with the kernel.
    #[arg(long, value_enum, default_value_t)]
    pub layout: CoreLayout,

    /// Compute TCP checksums on both ends instead of leaving them to the memory device.
    #[arg(long)]
    pub software_checksums: bool,
}

impl Options {
    /// Returns true if the part of a bench with this name is to run.
    pub fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|part| name.contains(part))
    }

    /// Returns the number of pairs.
    pub fn pairs(&self) -> usize {
        if self.smoke { 1 } else { self.pairs.max(1) }
    }

    /// Returns the length of each measurement in seconds: the option's value, or else `default`, of which a
    /// smoke test takes half a second at most.
    pub fn seconds(&self, default: f64) -> f64 {
        self.seconds.unwrap_or(if self.smoke { default.min(0.5) } else { default })
    }
}
