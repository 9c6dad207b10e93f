//! The benches. Each is a function that prints and records its results.

pub mod idle;
pub mod instructions;
mod many;
mod versus;

use crate::harness::result::BenchResult;
use crate::harness::{Failure, Options};

/// A bench.
pub struct Bench {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it measures.
    pub about: &'static str,
    /// It measures time, so it needs the machine for itself.
    pub timed: bool,
    /// Runs it.
    pub run: fn(&Options) -> Result<Vec<BenchResult>, Failure>,
}

/// All of them, in the order in which they run.
pub const ALL: &[Bench] = &[
    Bench {
        name: "short-vs-smoltcp",
        about: "HTTP connections/s, 64 bytes each, 16 at a time, against smoltcp over the same rings",
        timed: true,
        run: versus::short,
    },
    Bench {
        name: "keepalive-vs-smoltcp",
        about: "HTTP requests/s, 64 bytes each, on 16 connections, against smoltcp over the same rings",
        timed: true,
        run: versus::keep_alive,
    },
    Bench {
        name: "short-100k",
        about: "HTTP connections/s with 100,000 open, the server closes and all stay in TIME_WAIT for 60 s",
        timed: true,
        run: many::short_100k,
    },
    Bench {
        name: "idle-bytes",
        about: "resident memory per idle connection, with a million open of ten million possible",
        timed: false,
        run: idle::bytes,
    },
    Bench {
        name: "instructions",
        about: "instructions of the server per connection, request and megabyte; more than accepted fails",
        timed: false,
        run: instructions::run,
    },
];
