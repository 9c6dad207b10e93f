//! Test infrastructure: a simulated clock with hosts and links, packet checkers, a runner for packet scripts,
//! a scripted TCP peer, network namespaces for tests against the Linux kernel, and counters of heap
//! allocations.

pub mod alloc_counter;
pub mod checks;
pub mod interop;
pub mod layout;
mod namespace;
pub mod processes;
pub mod redis;
pub mod script;
pub mod scripted_peer;
pub mod sim;
mod skip;
pub mod steal;
pub mod transcript;

pub use skip::skip;
