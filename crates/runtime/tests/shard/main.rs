//! Shards from outside: what handlers are told in simulated time, wherever they stand, and a shard on a thread of its own.

mod common;
mod events;
mod limits;
mod paired;
mod placements;
#[path = "../places/mod.rs"]
mod places;
mod running;

/// Other tests say where their applications are.
fn tests_of_placement(_: places::TestPlacement) -> &'static [&'static str] {
    &["events::"]
}
