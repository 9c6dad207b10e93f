//! The Ginnel TCP/IP engine.
//!
//! Each shard has one `Stack`. Frames and the time go in, events and the next deadline come out. The engine
//! makes no system call, reads no clock, starts no thread and generates no randomness of its own, so that the
//! same code runs on a pinned core, in a seeded simulation and under a fuzzer.

pub mod chunk_pool;
pub mod device;
pub mod error;
pub mod events;
pub mod flow_table;
pub mod handle;
pub mod icmp;
pub mod ip;
pub mod link;
pub mod multicast;
pub mod options;
pub mod prefetch;
pub mod priority;
mod reuseport;
mod simd;
pub mod socket_filter;
pub mod stack;
pub mod steering;
pub mod stream_position;
mod tables;
pub mod tcp;
pub mod time;
pub mod timer_wheel;
pub mod udp;
pub mod wire;
