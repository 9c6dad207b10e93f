//! See the crate's README section in ARCHITECTURE.md.

mod skip;

pub use skip::skip;
