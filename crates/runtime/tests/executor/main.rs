//! Tasks on shards, joined by a cable of memory and driven in simulated time: in their shard's thread, and beside it (`shard.placement`).
#![expect(clippy::duplicate_mod, reason = "the same tests in two placements")]

use ginnel_testkit::alloc_counter::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Tasks in the thread of their shard.
#[path = "."]
mod inline {
    const PLACEMENT: ginnel::config::Placement = ginnel::config::Placement::Inline;

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
}

/// Tasks in a thread of their own. What tasks cost (`costs`) is counted without the buffers and the table of a channel.
#[path = "."]
mod beside {
    const PLACEMENT: ginnel::config::Placement = ginnel::config::Placement::Split;

    mod cancel;
    mod common;
    mod ecosystem;
    mod ends;
    mod streams;
    mod tasks;
    mod threads;
    mod times;
    mod udp;
}
