//! The atomics of the ring: the standard library's, or the model checker's (`RUSTFLAGS="--cfg loom"`).

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
