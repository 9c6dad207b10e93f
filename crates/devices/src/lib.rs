//! Frame devices for Ginnel. Each is a [`ginnel_stack::device::Device`]: two independent halves for receiving and sending.

pub mod conformance;
pub mod memory;
pub mod offload;
pub mod random;
