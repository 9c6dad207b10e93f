//! Tasks on shards that are connected in memory and driven in simulated time: in the shard's thread, in a
//! thread of their own (`shard.placement`), and in a worker (`shard.workers`).

mod cancel;
mod common;
mod costs;
mod ecosystem;
mod ends;
#[path = "../places/mod.rs"]
mod places;
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
fn tests_of_placement(placement: places::TestPlacement) -> &'static [&'static str] {
    if placement.workers == 0 {
        &["--skip=places::", "--skip=costs::"]
    } else {
        &["--skip=places::", "--skip=costs::", "--skip=threads::"]
    }
}
