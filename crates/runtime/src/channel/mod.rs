//! The channel: how applications outside of a shard's thread use its connections (docs/adr/0011-channel.md).
//!
//! ```text
//!   another thread, or another process             the shard's thread
//!   ┌────────────────────────────┐   doorbells   ┌──────────────────────────┐
//!   │ Client                     │──────────────►│ ChannelServer, a Handler │
//!   │   what happened, read,     │◄──────────────│   copies between region  │
//!   │   write, close, accept     │               │   and engine             │
//!   └────────────────────────────┘               └──────────────────────────┘
//!            └────────── one region: positions and bytes of each socket ──────────┘
//! ```
//!
//! What is rare goes as a [`Request`](control::Request) through the shard's mailbox: to listen, to connect, to set options.

mod bells;
mod stream;
mod sync;

pub mod client;
pub mod control;
mod region;
pub(crate) mod remote;
pub mod server;
mod socket;
#[cfg(all(test, not(loom)))]
mod tests;

pub use client::{Client, ClientEvent, ClientParts};
pub use server::{ChannelServer, ChannelStats};

use core::ops::RangeInclusive;
use ginnel_stack::error::ConfigError;
use serde::Deserialize;

/// Clients are bits of a word.
const CLIENTS: RangeInclusive<u32> = 1..=64;
const SOCKETS: RangeInclusive<u32> = 1..=1 << 24;
const BUFFER_BYTES: RangeInclusive<u32> = 4096..=1 << 20;
const OFFER_MS: RangeInclusive<u32> = 1..=60_000;

/// Keys of the `[channel]` table: applications outside of the shard's thread.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChannelConfig {
    /// Connections that applications may have at a time, 1 to 16,777,216. Memory is taken as they are used. Default 65,536.
    pub sockets_max: u32,
    /// Applications (threads or processes), 1 to 64. Default 16.
    pub clients_max: u32,
    /// Bytes of each direction of a connection between application and stack, a power of two from 4,096 to 1,048,576. Default 65,536.
    pub socket_buffer_bytes: u32,
    /// How long a worker may leave a connection that it was offered before another gets it, in milliseconds: 1 to 60,000. Default 50.
    pub offer_ms: u32,
}

impl Default for ChannelConfig {
    fn default() -> Self {
        Self { sockets_max: 1 << 16, clients_max: 16, socket_buffer_bytes: 1 << 16, offer_ms: 50 }
    }
}

impl ChannelConfig {
    /// Checks every range.
    ///
    /// # Errors
    /// The first key that is out of range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let within = |key: &str, value: u32, range: RangeInclusive<u32>| {
            if range.contains(&value) {
                return Ok(());
            }
            let problem = format!("{value} is not within {} to {}", range.start(), range.end());
            Err(ConfigError::new(format!("channel.{key}"), problem))
        };
        within("sockets_max", self.sockets_max, SOCKETS)?;
        within("clients_max", self.clients_max, CLIENTS)?;
        within("socket_buffer_bytes", self.socket_buffer_bytes, BUFFER_BYTES)?;
        within("offer_ms", self.offer_ms, OFFER_MS)?;
        if !self.socket_buffer_bytes.is_power_of_two() {
            let problem = format!("{} is not a power of two", self.socket_buffer_bytes);
            return Err(ConfigError::new("channel.socket_buffer_bytes", problem));
        }
        Ok(())
    }
}
