//! Servers under test. All answer the same requests with the same bytes over the same device.

mod calls;
mod engine;
mod shard;
mod smoltcp;
mod tasks;

pub use calls::CallsServer;
pub use engine::{EngineOptions, EngineServer};
pub use shard::{Responder, ShardServer};
pub use smoltcp::SmoltcpServer;
pub use tasks::TaskServer;

use crate::frames::{Endpoint, LinkSetup};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::Device;
use ginnel_stack::time::Instant;

/// MAC address of the server.
pub const SERVER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// MAC address of the client, which is also the router to all of its addresses.
pub const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
/// The server's address and port.
pub const SERVER: Endpoint = Endpoint { ip: 0xc0a8_0001, port: 80 };
/// The router's address.
pub const ROUTER_IP: u32 = 0xc0a8_0002;

/// A server that is driven turn by turn.
pub trait Server {
    /// Takes what has come, answers, lets time pass. Returns how many frames it was.
    fn turn(&mut self, now: Instant) -> usize;

    /// What it counted that should be known beside a result.
    fn facts(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// Who does TCP checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// The device: in memory that means nobody.
    Device,
    /// Both ends sum every segment.
    Software,
}

/// The cable between server and client: the server's end first.
pub fn cable(checksums: Checksums, ring_bytes: usize) -> (Device, Device) {
    let config = MemoryConfig { macs: [SERVER_MAC, CLIENT_MAC], ring_bytes, ..MemoryConfig::default() };
    pair(match checksums {
        Checksums::Device => config,
        Checksums::Software => config.without_offloads(),
    })
}

/// The client's view of the same cable.
pub fn link_setup(checksums: Checksums) -> LinkSetup {
    LinkSetup {
        client_mac: CLIENT_MAC,
        server_mac: SERVER_MAC,
        server: SERVER,
        offload: checksums == Checksums::Device,
    }
}
