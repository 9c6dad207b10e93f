//! Pacing and BBR on a bottleneck, in simulated time.

mod bbr;
mod common;
mod pacing;
