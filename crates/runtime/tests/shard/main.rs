//! Shards from outside: events of handlers in simulated time, in every placement, and a shard on a thread of
//! its own.

mod device_priorities;
mod events;
#[path = "../../src/fixture.rs"]
#[allow(dead_code)] // shared: this suite uses a part
mod fixture;
#[cfg(target_arch = "x86_64")]
mod futex;
mod in_place;
mod kernel_fds;
mod limits;
mod paired;
#[path = "../placement_suite/mod.rs"]
#[allow(dead_code)] // shared: this suite uses a part
mod placement_suite;
mod placements;
mod priorities;
mod running;
mod unordered;

/// The other tests choose their placement themselves.
fn tests_of_placement(_: placement_suite::TestPlacement) -> &'static [&'static str] {
    &["events::"]
}
