//! What tests stand on: simulated clock, hosts and links, packet checkers, and a runner for packet scripts.

pub mod alloc_counter;
pub mod checks;
pub mod interop;
pub mod script;
pub mod scripted_peer;
pub mod sim;
mod skip;
pub mod steal;
pub mod transcript;

pub use skip::skip;
