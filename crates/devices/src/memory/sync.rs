//! The atomics of the ring: those of the standard library, or of the model checker (`RUSTFLAGS="--cfg
//! loom"`).

#[cfg(loom)]
pub(super) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
#[cfg(not(loom))]
pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
