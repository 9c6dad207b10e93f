//! Shards from outside: what handlers are told in simulated time, wherever they stand, and a shard on a thread of its own.

mod beside;
mod common;
mod events;
mod limits;
mod paired;
#[path = "../places/mod.rs"]
mod places;
mod running;

/// Other tests say where their applications are.
fn tests_of_place(_: places::Place) -> &'static [&'static str] {
    &["events::"]
}
