//! Tasks on shards that are connected in memory and driven in simulated time: in the shard's thread, in a
//! thread of their own (`shard.placement`), and in a worker (`shard.workers`).

mod cancel;
mod common;
mod costs;
mod ecosystem;
mod ends;
#[path = "../../src/fixture.rs"]
#[allow(dead_code)] // shared: this suite uses a part
mod fixture;
mod kernel_fds;
#[path = "../placement_suite/mod.rs"]
#[allow(dead_code)] // shared: this suite uses a part
mod placement_suite;
mod streams;
mod tasks;
mod threads;
mod times;
mod udp;

use ginnel_testkit::alloc_counter::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Costs are measured in the shard's thread only: elsewhere the buffers and tables of a channel, which grow
/// with use, would be included. Tests of threads build a single shard; `Shards::run` starts workers with
/// their shard (`src/shards/tests`).
fn tests_of_placement(placement: placement_suite::TestPlacement) -> &'static [&'static str] {
    if placement.workers == 0 {
        &["--skip=placement_suite::", "--skip=costs::"]
    } else {
        &["--skip=placement_suite::", "--skip=costs::", "--skip=threads::"]
    }
}
