//! Frame devices for Ginnel. Each is a [`ginnel_stack::device::Device`]: two independent halves for receiving and sending.

pub mod capture;
pub mod conformance;
pub mod faults;
pub mod memif;
pub mod memory;
pub mod mirror;
#[cfg(all(test, not(loom)))]
mod namespace;
pub mod offload;
pub mod random;
mod staged;
pub mod switch;
pub mod tap;
