//! Servers under test. All of them answer equal requests with equal bytes over the same device.

mod calls;
mod engine;
mod shard;
mod sink;
mod smoltcp;
mod tasks;

pub use calls::CallsServer;
pub use engine::{EngineOptions, EngineServer};
pub use shard::{Responder, ShardServer};
pub use sink::Sink;
pub use smoltcp::SmoltcpServer;
pub use tasks::TaskServer;

use crate::frames::{Endpoint, LinkSetup};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::Device;
use ginnel_stack::time::Instant;

/// MAC address of the server.
pub const SERVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// MAC address of the client. The server reaches all addresses of the client through a router with this one.
pub const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
/// Address and port of the server.
pub const SERVER: Endpoint = Endpoint { ip: 0xc0a8_0001, port: 80 };
/// Address of the router.
pub const ROUTER_IP: u32 = 0xc0a8_0002;

/// A server that is driven turn by turn.
pub trait Server {
    /// Handles the received frames, responds and runs timers. Returns the amount of work, which is
    /// at least the number of received frames; 0 if there was nothing to do.
    fn turn(&mut self, now: Instant) -> usize;

    /// Returns counters for the result.
    fn facts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// Place where TCP checksums are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// The device; on a memory device checksums are not computed.
    Device,
    /// Both ends compute the checksum of every segment.
    Software,
}

/// Creates the cable between server and client. Returns the server's end first.
pub fn cable(checksums: Checksums, ring_bytes: usize) -> (Device, Device) {
    let config = MemoryConfig { macs: [SERVER_MAC, CLIENT_MAC], ring_bytes, ..MemoryConfig::default() };
    pair(match checksums {
        Checksums::Device => config,
        Checksums::Software => config.without_offloads(),
    })
}

/// Returns the addresses of the cable for the client, and whether checksums are left to the device.
pub fn link_setup(checksums: Checksums) -> LinkSetup {
    LinkSetup {
        client_mac: CLIENT_MAC,
        server_mac: SERVER_MAC,
        server: SERVER,
        offload: checksums == Checksums::Device,
    }
}
