//! Modes of the kernel lane.

/// Environment variable with the name of the mode. Without it nothing is changed.
pub const MODE_VARIABLE: &str = "GINNEL_KERNEL_LANE";

/// The rule that gives a worker its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The CPU that the worker is pinned to. Workers that are not pinned share the connections of all other
    /// CPUs.
    Bound,
    /// As `Bound`, and a worker that is not pinned is pinned to the CPU with the fewest workers.
    Auto,
}

impl Mode {
    /// Returns the name, as in the environment variable.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bound => "bound",
            Self::Auto => "auto",
        }
    }

    /// Returns the mode that the environment names.
    pub(crate) fn of_environment() -> Option<Self> {
        let name = std::env::var_os(MODE_VARIABLE)?;
        [Self::Bound, Self::Auto].into_iter().find(|mode| name == mode.name())
    }
}
