//! Shards from outside: events of handlers in simulated time, in every placement, and a shard on a thread of
//! its own.

mod common;
mod events;
mod limits;
mod paired;
mod placements;
#[path = "../places/mod.rs"]
mod places;
mod running;

/// The other tests choose their placement themselves.
fn tests_of_placement(_: places::TestPlacement) -> &'static [&'static str] {
    &["events::"]
}
