//! Use of the limited resources of a stack.

use super::Stack;
use crate::chunk_pool::CHUNK_BYTES;

/// Use of a limited resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolUsage {
    /// Name of the resource. If the name ends in `bytes`, the values are bytes.
    pub name: &'static str,
    /// Amount in use now.
    pub used: u64,
    /// Limit of the amount.
    pub limit: u64,
    /// Largest amount ever in use.
    pub high_water: u64,
}

/// Number of limited resources of a stack.
pub const POOL_COUNT: usize = 8;

impl Stack {
    /// Returns the use of all limited resources, always in one order.
    pub fn pools(&self) -> [PoolUsage; POOL_COUNT] {
        let Self { net, tcp, udp, .. } = self;
        let pool = |name, used: usize, limit: usize, high_water: usize| PoolUsage {
            name,
            used: used as u64,
            limit: limit as u64,
            high_water: high_water as u64,
        };
        let chunks = &tcp.chunks;
        let (fragments, datagrams) = (net.reassembly_bytes(), udp.queued_bytes());
        let (listeners, sockets) = (tcp.listeners.usage(), udp.sockets());
        [
            pool(
                "connections",
                tcp.conns.live(),
                tcp.config.connections_max as usize,
                tcp.conns.high_water(),
            ),
            pool(
                "half_open",
                tcp.half_open as usize,
                tcp.config.half_open_max as usize,
                tcp.half_open_high_water as usize,
            ),
            pool(
                "time_wait",
                tcp.time_wait.len(),
                tcp.config.time_wait_max as usize,
                tcp.time_wait.high_water(),
            ),
            pool("listeners", listeners.0, tcp.config.listeners_max as usize, listeners.1),
            pool(
                "buffer_bytes",
                chunks.in_use() * CHUNK_BYTES,
                chunks.limit() * CHUNK_BYTES,
                chunks.high_water() * CHUNK_BYTES,
            ),
            pool("reassembly_bytes", fragments.0, net.config.fragment_bytes as usize, fragments.1),
            pool("udp_sockets", sockets.0, net.config.udp_sockets_max as usize, sockets.1),
            pool("udp_receive_bytes", datagrams.0, udp.receive_total_bytes(), datagrams.1),
        ]
    }
}
