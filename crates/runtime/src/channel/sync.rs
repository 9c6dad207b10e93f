//! The atomics of the channel: the standard library's, or the model checker's (`RUSTFLAGS="--cfg loom"`).

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
