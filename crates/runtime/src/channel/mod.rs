//! The channel: the shared-memory interface through which applications outside a shard's thread use its
//! sockets (docs/adr/0011-channel.md).
//!
//! ```text
//!   another thread, or another process             the shard's thread
//!   ┌────────────────────────────┐   doorbells   ┌──────────────────────────┐
//!   │ Client                     │──────────────►│ ChannelServer, a Handler │
//!   │   events, read, write,     │◄──────────────│   copies between region  │
//!   │   close, accept            │               │   and engine             │
//!   └────────────────────────────┘               └──────────────────────────┘
//!            └────────── one region: positions and bytes of each socket ──────────┘
//! ```
//!
//! Rare operations (listen, connect, query a socket) are [`ChannelRequest`](control::ChannelRequest)s that
//! pass through the shard's mailbox and get a reply.

mod buffers;
mod client_memory;
mod data_class;
mod datagram;
mod description;
mod doorbells;
mod lock;
mod mapping;
mod notified_clients;
mod offer_slots;
mod sleep_state;
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

pub use buffers::{Fault, RecvBuffer, SendBuffer, gather, scatter};
pub use client::{
    ChannelMapping, Client, ClientEvent, ClientParts, DescriptionKey, PeekedDatagram, ReceivedDatagram,
    SharedStreams, SocketState, SocketStatus,
};
pub use control::{AddressSharing, LinkInfo, Reservation, SocketId};
pub use description::DESCRIPTION_BYTES_MAX;
pub use mapping::SharedMapping;
pub(crate) use region::announce_end;
pub use server::ChannelServer;
pub use stats::ChannelStats;
pub use urgent_mark::UrgentMark;

use core::ops::RangeInclusive;
use ginnel_stack::error::ConfigError;
use serde::Deserialize;

/// Largest number of domains. A domain's index occupies the bits above a socket's number in a connection
/// token, and each turn visits every domain.
pub(crate) const DOMAINS_MAX: usize = 64;
const DOMAINS: RangeInclusive<u32> = 1..=DOMAINS_MAX as u32;
const BACKLOG: RangeInclusive<u32> = 1..=1 << 24;
/// Numbers of clients and listeners have 16 bits.
const CLIENTS_MAX: u32 = u16::MAX as u32;
const CLIENTS: RangeInclusive<u32> = 1..=CLIENTS_MAX;
const LISTENERS: RangeInclusive<u32> = 1..=u16::MAX as u32;
const SOCKETS: RangeInclusive<u32> = 1..=1 << 24;
const BUFFER_BYTES: RangeInclusive<u32> = 4096..=1 << 20;
const LARGE_BYTES: RangeInclusive<u32> = 4096..=1 << 24;
const LARGE: RangeInclusive<u32> = 0..=1 << 16;
const BUFFERS: RangeInclusive<u64> = 8192..=1 << 40;
const DATAGRAM_BYTES: RangeInclusive<u32> = 1 << 16..=1 << 30;
const FILTER_BYTES: RangeInclusive<u32> = 1 << 16..=1 << 30;
const OFFER_MS: RangeInclusive<u32> = 1..=60_000;
/// Shorter than the second after which a SYN is retransmitted.
const KILLED_LISTENER_WAIT_MS: RangeInclusive<u32> = 0..=900;
const TURN_US: RangeInclusive<u32> = 0..=10_000;

/// Keys of the `[channel]` table, which serves applications outside the shard's thread.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChannelConfig {
    /// Trust domains that may use a shard at a time, each with its own budget: 1 to 64. The threads of the
    /// stack's own process form one domain, and so do all processes of one user that gave the same domain
    /// name. Default 8.
    pub domains_max: u32,
    /// Sockets (connections and UDP sockets) that the applications of a domain may have at a time on each
    /// shard: 1 to 16,777,216. Memory is allocated as sockets are used. Default 65,536.
    pub sockets_max: u32,
    /// Applications (threads or processes) of a domain: 1 to 65,535. Default 4,096.
    pub clients_max: u32,
    /// Listeners of a domain on each shard (`tcp.listeners_max` limits those of all domains): 1 to 65,535.
    /// Default 4,096.
    pub listeners_max: u32,
    /// Bytes of each direction's buffer between an application and the stack, for each socket: a power of two
    /// from 4,096 to 1,048,576. Default 65,536.
    pub socket_buffer_bytes: u32,
    /// Bytes of all socket buffers of a domain on each shard: 8,192 to 1,099,511,627,776. Sockets beyond this
    /// limit are refused like sockets beyond `sockets_max`. One socket is always allowed. Default 8 GiB.
    pub buffer_bytes_max: u64,
    /// Bytes of the large buffer that replaces a direction's own buffer once that was full: a power of two
    /// from 4,096 to 16,777,216. Only sockets whose buffer in the stack is at least as large
    /// (`tcp.recv_buffer_bytes` and `tcp.send_buffer_bytes`, `SO_RCVBUF` and `SO_SNDBUF`) get one, and keep
    /// it until the connection ends. Default 2 MiB.
    pub large_buffer_bytes: u32,
    /// Large buffers of a domain on each shard: 0 to 65,536. Memory is allocated as buffers are used. When
    /// all are in use, sockets keep their own buffers. Default 256.
    pub large_buffers_max: u32,
    /// Bytes of datagrams that may be queued for the UDP sockets of a domain on each shard: 65,536 to
    /// 1,073,741,824. Datagrams beyond this limit are dropped and counted. Default 16 MiB.
    pub datagram_bytes_max: u32,
    /// Bytes of memory for the filters of a domain's sockets (`SO_ATTACH_FILTER`) on each shard: 65,536 to
    /// 1,073,741,824. Each program takes 1,024 bytes and about 20 bytes per instruction. Filters beyond this
    /// limit are refused (`ENOMEM`) and counted. Default 4 MiB.
    pub filter_bytes_max: u32,
    /// Upper limit of a listener's accept backlog (like `somaxconn`): 1 to 16,777,216. Default 4,096.
    pub backlog_max: u32,
    /// Time for which a connection stays offered to a worker that does not accept it, before another worker
    /// gets it, in milliseconds: 1 to 60,000. Default 50.
    pub offer_ms: u32,
    /// Time for which connections to a listener whose last process has ended without closing it (a crash,
    /// `kill -9`) wait for another process to listen there, in milliseconds: 0 to 900. Then they are
    /// refused. 0: they are refused at once, as on Linux. Default 200.
    pub killed_listener_wait_ms: u32,
    /// Longest time for which a shard yields its CPU to an application that it gave work and that runs on
    /// that CPU, in microseconds: 0 to 10,000. Frames and timers wait until the application sleeps or this
    /// time is over, and are then processed as one batch. (At most one yield in 65 may be futile and last as
    /// long as a time slice of the kernel.) 0: the shard does not yield. Default 100.
    pub turn_us: u32,
    /// Time for which the stack delays a quick acknowledgement so that the application's answer can carry it,
    /// in microseconds: 0 to 10,000. This concerns the first segments of a connection; every second segment
    /// is still acknowledged at once. 0: no delay. Default 100.
    pub ack_hold_us: u32,
}

impl Default for ChannelConfig {
    fn default() -> Self {
        Self {
            domains_max: 8,
            sockets_max: 1 << 16,
            clients_max: 4096,
            listeners_max: 4096,
            socket_buffer_bytes: 1 << 16,
            buffer_bytes_max: 8 << 30,
            large_buffer_bytes: 2 << 20,
            large_buffers_max: 256,
            datagram_bytes_max: 16 << 20,
            filter_bytes_max: 4 << 20,
            backlog_max: 4096,
            offer_ms: 50,
            killed_listener_wait_ms: 200,
            turn_us: 100,
            ack_hold_us: 100,
        }
    }
}

impl ChannelConfig {
    /// Checks that every key is within its range.
    ///
    /// # Errors
    /// Returns the first key that is out of range.
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
        within("filter_bytes_max", self.filter_bytes_max, FILTER_BYTES)?;
        if !BUFFERS.contains(&self.buffer_bytes_max) {
            let problem =
                format!("{} is not within {} to {}", self.buffer_bytes_max, BUFFERS.start(), BUFFERS.end());
            return Err(ConfigError::new("channel.buffer_bytes_max", problem));
        }
        within("sockets_max", self.sockets_max, SOCKETS)?;
        within("clients_max", self.clients_max, CLIENTS)?;
        within("listeners_max", self.listeners_max, LISTENERS)?;
        within("socket_buffer_bytes", self.socket_buffer_bytes, BUFFER_BYTES)?;
        within("offer_ms", self.offer_ms, OFFER_MS)?;
        within("killed_listener_wait_ms", self.killed_listener_wait_ms, KILLED_LISTENER_WAIT_MS)?;
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
