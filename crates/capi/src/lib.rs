//! `libginnel_c`: the native API for programs in C (`include/ginnel.h`, docs/c-api.md).
//!
//! ```text
//!   callbacks (run.rs)     a Handler whose methods call C; a shard's thread runs it
//!   events (shard_loop.rs) a Handler that queues events (event_queue.rs); C's own loop waits for them
//!   calls (tcp.rs …)       act on the shard of the calling thread (current.rs)
//! ```
//!
//! Each function catches panics and returns an error number instead (`failure.rs`).

mod address;
mod commands;
mod config;
mod current;
mod event_queue;
mod failure;
mod handles;
#[cfg(test)]
mod layout_tests;
mod memory;
mod multicast;
mod options;
mod resources;
mod run;
mod shard_loop;
mod sources;
mod tcp;
mod udp;
mod udp_errors;
mod udp_options;
