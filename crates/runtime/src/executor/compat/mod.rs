//! Traits of other crates, each behind the feature of its name: `futures`, `tokio`, `hyper`.
//!
//! The `poll` functions of these traits have no future that removes its waiter when it is dropped. Of several
//! tasks that use one direction of a stream, only the last one is woken; the traits permit that.

#[cfg(feature = "futures")]
mod futures;
#[cfg(feature = "hyper")]
mod hyper;
#[cfg(feature = "tokio")]
mod tokio;

#[cfg(feature = "hyper")]
pub use hyper::{HyperExecutor, HyperTimer};
