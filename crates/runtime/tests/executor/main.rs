//! Tasks on shards, joined by a cable of memory and driven in simulated time.

mod cancel;
mod common;
mod costs;
mod ecosystem;
mod ends;
mod streams;
mod tasks;
mod threads;
mod times;
mod udp;

use ginnel_testkit::alloc_counter::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
