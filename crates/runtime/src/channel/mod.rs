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

mod datagram;
mod description;
mod doorbells;
mod lock;
mod offer_slots;
mod socket_ref;
mod stream;
mod sync;
mod urgent_mark;

pub mod client;
pub mod control;
mod pending_options;
mod region;
pub(crate) mod remote;
pub mod server;
pub mod simulation;
mod socket;
mod stats;
#[cfg(all(test, not(loom)))]
pub(crate) mod tests;

pub use client::{
    ChannelMapping, Client, ClientEvent, ClientParts, DescriptionKey, ReceivedDatagram, SharedStreams,
    SocketState, SocketStatus,
};
pub use control::{AddressSharing, LinkInfo, Reservation, SocketId};
pub use server::ChannelServer;
pub use stats::ChannelStats;
pub use urgent_mark::UrgentMark;

use core::ops::RangeInclusive;
use ginnel_stack::error::ConfigError;
use serde::Deserialize;

/// Numbers of domains stand in six bits beside those of sockets, and bound what a shard looks at in each turn.
pub(crate) const DOMAINS_MAX: usize = 64;
const DOMAINS: RangeInclusive<u32> = 1..=DOMAINS_MAX as u32;
const BACKLOG: RangeInclusive<u32> = 1..=1 << 24;
/// Clients are bits of a word.
const CLIENTS_MAX: u32 = 64;
const CLIENTS: RangeInclusive<u32> = 1..=CLIENTS_MAX;
const SOCKETS: RangeInclusive<u32> = 1..=1 << 24;
const BUFFER_BYTES: RangeInclusive<u32> = 4096..=1 << 20;
const LARGE_BYTES: RangeInclusive<u32> = 4096..=1 << 24;
const LARGE: RangeInclusive<u32> = 0..=1 << 16;
const BUFFERS: RangeInclusive<u64> = 8192..=1 << 40;
const DATAGRAM_BYTES: RangeInclusive<u32> = 1 << 16..=1 << 30;
const OFFER_MS: RangeInclusive<u32> = 1..=60_000;
const TURN_US: RangeInclusive<u32> = 0..=10_000;

/// Keys of the `[channel]` table: applications outside of the shard's thread.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChannelConfig {
    /// Trust domains that may use a shard at a time, each with a budget of its own: 1 to 64. The threads of the stack's own process are one; so are the
    /// processes of one user that gave the same name. Default 8.
    pub domains_max: u32,
    /// Sockets that the applications of a domain may have at a time on each shard, 1 to 16,777,216: connections and UDP sockets. Memory is taken as they are used. Default
    /// 65,536.
    pub sockets_max: u32,
    /// Applications (threads or processes) of a domain, 1 to 64. Default 16.
    pub clients_max: u32,
    /// Bytes of each direction of a connection between application and stack, a power of two from 4,096 to 1,048,576. Default 65,536.
    pub socket_buffer_bytes: u32,
    /// Bytes of all these buffers of a domain on each shard, 8,192 to 1,099,511,627,776: sockets beyond them are refused, as beyond `sockets_max`. One socket
    /// there may always be. Default 8 GiB.
    pub buffer_bytes_max: u64,
    /// Bytes of the buffer that a direction gets instead which has filled its own, and whose socket may hold so many bytes in the stack, too (`tcp.recv_buffer_bytes` and
    /// `tcp.send_buffer_bytes`, `SO_RCVBUF` and `SO_SNDBUF`); a power of two from 4,096 to 16,777,216. It is kept until the connection ends. Default 2 MiB.
    pub large_buffer_bytes: u32,
    /// How many of these a domain has on each shard, 0 to 65,536. Memory is taken as they are used. If all are in use, others go on with what they have. Default 256.
    pub large_buffers_max: u32,
    /// Bytes of datagrams that may wait for the UDP sockets of a domain on each shard, 65,536 to 1,073,741,824; more are dropped and counted. Default 16 MiB.
    pub datagram_bytes_max: u32,
    /// Connections that may wait to be accepted from a listener, whatever it asks for (as `somaxconn`): 1 to 16,777,216. Default 4,096.
    pub backlog_max: u32,
    /// How long a worker may leave a connection that it was offered before another gets it, in milliseconds: 1 to 60,000. Default 50.
    pub offer_ms: u32,
    /// How long a shard leaves its CPU to an application that it gave work and that runs there, too, in microseconds: 0 to 10,000. Frames and timers wait until the application
    /// sleeps, but no longer than this (at the most one time in 65, in which it yields in vain, as long as a time slice of the kernel's); what came meanwhile is one batch. 0: it does not wait. Default 100.
    pub turn_us: u32,
    /// How long a stack waits for an application's answer to what it acknowledges at once otherwise, so that answer and acknowledgement are one segment, in microseconds: 0 to
    /// 10,000. It is about the first segments of a connection; every second segment is acknowledged at once nevertheless. 0: it does not wait. Default 100.
    pub ack_hold_us: u32,
}

impl Default for ChannelConfig {
    fn default() -> Self {
        Self {
            domains_max: 8,
            sockets_max: 1 << 16,
            clients_max: 16,
            socket_buffer_bytes: 1 << 16,
            buffer_bytes_max: 8 << 30,
            large_buffer_bytes: 2 << 20,
            large_buffers_max: 256,
            datagram_bytes_max: 16 << 20,
            backlog_max: 4096,
            offer_ms: 50,
            turn_us: 100,
            ack_hold_us: 100,
        }
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
        within("domains_max", self.domains_max, DOMAINS)?;
        within("backlog_max", self.backlog_max, BACKLOG)?;
        within("datagram_bytes_max", self.datagram_bytes_max, DATAGRAM_BYTES)?;
        if !BUFFERS.contains(&self.buffer_bytes_max) {
            let problem =
                format!("{} is not within {} to {}", self.buffer_bytes_max, BUFFERS.start(), BUFFERS.end());
            return Err(ConfigError::new("channel.buffer_bytes_max", problem));
        }
        within("sockets_max", self.sockets_max, SOCKETS)?;
        within("clients_max", self.clients_max, CLIENTS)?;
        within("socket_buffer_bytes", self.socket_buffer_bytes, BUFFER_BYTES)?;
        within("offer_ms", self.offer_ms, OFFER_MS)?;
        within("turn_us", self.turn_us, TURN_US)?;
        within("ack_hold_us", self.ack_hold_us, TURN_US)?;
        within("large_buffer_bytes", self.large_buffer_bytes, LARGE_BYTES)?;
        within("large_buffers_max", self.large_buffers_max, LARGE)?;
        for (key, bytes) in [
            ("socket_buffer_bytes", self.socket_buffer_bytes),
            ("large_buffer_bytes", self.large_buffer_bytes),
        ] {
            if !bytes.is_power_of_two() {
                let problem = format!("{bytes} is not a power of two");
                return Err(ConfigError::new(format!("channel.{key}"), problem));
            }
        }
        Ok(())
    }
}
