//! Traits of the ecosystem, each behind the feature of its name: `futures`, `tokio`, `hyper`.
//!
//! Where such a trait waits it has no future that could be dropped, so of several tasks that use the same direction of a stream only the
//! last is woken. That is what these traits ask for.

#[cfg(feature = "futures")]
mod futures;
#[cfg(feature = "hyper")]
mod hyper;
#[cfg(feature = "tokio")]
mod tokio;

#[cfg(feature = "hyper")]
pub use hyper::{HyperExecutor, HyperTimer};
