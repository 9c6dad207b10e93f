//! Tasks on shards, joined by a cable of memory and driven in simulated time: in their shard's thread, beside it (`shard.placement`), and in a worker
//! (`shard.workers`).

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

/// What tasks cost is counted in the shard's thread alone: elsewhere the buffers and tables of a channel, which grow as they are used, would be counted, too. On threads, workers are begun
/// with their shard by `Shards::run` (`src/shards/tests`); these tests run one shard that was built.
fn tests_of_placement(placement: places::TestPlacement) -> &'static [&'static str] {
    if placement.workers == 0 {
        &["--skip=places::", "--skip=costs::"]
    } else {
        &["--skip=places::", "--skip=costs::", "--skip=threads::"]
    }
}
