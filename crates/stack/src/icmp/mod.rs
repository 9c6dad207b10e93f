//! ICMP (RFC 792, RFC 1122 §3.2.2) and ICMPv6 (RFC 4443).

pub mod error;
pub mod extensions;
mod input;
pub(crate) mod rate_limit;
mod send;

pub use send::UnreachableReason;
