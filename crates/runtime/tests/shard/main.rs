//! Shards from outside: what handlers are told in simulated time, and a shard on a thread of its own.

mod beside;
mod common;
mod limits;
mod paired;
mod running;

/// The tests of `events.rs`, with each application in its shard's thread, and with each beside its shard.
macro_rules! placements {
    ($($name:ident: $split:literal)*) => {
        $(mod $name {
            type Two<S, C> = crate::common::Two<S, C, $split>;
            include!("events.rs");
        })*
    };
}

placements! { inline: false split: true }
