//! Shards from outside: what handlers are told in simulated time, and a shard on a thread of its own.

mod common;
mod events;
mod limits;
mod running;
