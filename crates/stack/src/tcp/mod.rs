//! TCP (RFC 9293).

pub mod config;
pub mod state;
