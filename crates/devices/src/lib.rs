//! See the crate's README section in ARCHITECTURE.md.
