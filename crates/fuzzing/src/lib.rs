//! Implementation of the fuzz targets in `fuzz/`. It is part of the workspace so that `cargo test` runs it,
//! too: over the committed corpus and over seeded random inputs.

pub mod channel;
pub mod config;
pub mod frames;
pub mod http;
pub mod inputs;
pub mod link_spec;
pub mod matcher;
pub mod memif;
pub mod monitor;
pub mod reassembly;
pub mod tcp_options;

/// A fuzz target.
pub struct Target {
    /// Name of the target and of its directory in the corpus.
    pub name: &'static str,
    /// Runs one input, and panics if it finds a defect.
    pub run: fn(&[u8]),
    /// Returns the handwritten inputs, which are the committed corpus.
    pub seeds: fn() -> Vec<(&'static str, Vec<u8>)>,
}

/// All fuzz targets.
pub const TARGETS: [Target; 10] = [
    Target { name: "frames", run: |data| drop(frames::run(data)), seeds: frames::scenarios },
    Target { name: "tcp_options", run: tcp_options::run, seeds: tcp_options::seeds },
    Target { name: "ip_reassembly", run: reassembly::run, seeds: reassembly::seeds },
    Target { name: "http", run: http::run, seeds: http::seeds },
    Target { name: "config", run: config::run, seeds: config::seeds },
    Target { name: "channel", run: channel::run, seeds: channel::seeds },
    Target { name: "link_spec", run: link_spec::run, seeds: link_spec::seeds },
    Target { name: "matcher", run: matcher::run, seeds: matcher::seeds },
    Target { name: "memif", run: |data| _ = memif::run(data), seeds: memif::seeds },
    Target { name: "monitor", run: monitor::run, seeds: monitor::seeds },
];
