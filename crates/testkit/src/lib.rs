//! What tests stand on: simulated clock, hosts and links, packet checkers, and a runner for packet scripts.

pub mod alloc_counter;
pub mod checks;
pub mod interop;
pub mod puppet;
pub mod script;
pub mod sim;
mod skip;
pub mod stalls;
pub mod transcript;

pub use skip::skip;
