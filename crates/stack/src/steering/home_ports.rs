//! Finds local ports whose returning packets hash to this shard. The hash is linear: the contribution of the
//! port is added (by exclusive or) to that of the rest of the flow. So the ports of this shard need not be
//! searched one by one, which would take as many attempts as there are shards.

use super::toeplitz::Toeplitz;
use super::{INDIRECTION_ENTRIES, Steering};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Ports of one block, which differ in their low byte.
const BLOCK: usize = 256;
/// Values of the hash that distinguish entries of the indirection table.
const VALUES: usize = INDIRECTION_ENTRIES as usize;

/// The ports of a shard.
pub(super) struct HomePorts {
    v4: PortTable,
    v6: PortTable,
}

/// The contribution of the local port to the hash, for one address family.
struct PortTable {
    /// Contributions of the high byte.
    high: [u8; BLOCK],
    /// By the contribution of the rest of the flow: a bit for each low byte whose ports belong to the shard.
    low: Box<[[u64; BLOCK / 64]; VALUES]>,
}

impl PortTable {
    fn new(toeplitz: &Toeplitz, any: IpAddr, home_entries: &[bool; VALUES]) -> Self {
        let of = |port: u16| hash_value(toeplitz.hash(any, any, Some((0, port))));
        let mut high = [0; BLOCK];
        let mut low = Box::new([[0; BLOCK / 64]; VALUES]);
        for byte in 0..=255u8 {
            high[usize::from(byte)] = of(u16::from(byte) << 8);
            let contribution = usize::from(of(byte.into()));
            for (rest, bits) in low.iter_mut().enumerate() {
                bits[usize::from(byte) / 64] |= u64::from(home_entries[rest ^ contribution]) << (byte % 64);
            }
        }
        Self { high, low }
    }
}

/// Returns the part of a hash that selects an entry of the indirection table.
const fn hash_value(hash: u32) -> u8 {
    // Cannot truncate: the table has 128 entries.
    (hash % INDIRECTION_ENTRIES) as u8
}

impl HomePorts {
    /// Computes the ports of the shard that has the marked entries of the indirection table.
    pub(super) fn new(home_entries: &[bool; VALUES], toeplitz: &Toeplitz) -> Self {
        let v4 = PortTable::new(toeplitz, Ipv4Addr::UNSPECIFIED.into(), home_entries);
        let v6 = PortTable::new(toeplitz, Ipv6Addr::UNSPECIFIED.into(), home_entries);
        Self { v4, v6 }
    }
}

/// The ports of one address towards one destination.
pub(crate) struct HomePortSearch<'a> {
    table: &'a PortTable,
    /// Contribution of the rest of the flow.
    base: u8,
}

impl Steering {
    /// Prepares to search ports of `local` for a connection to `remote`.
    pub(crate) fn home_ports(&self, remote: SocketAddr, local: IpAddr) -> HomePortSearch<'_> {
        let base = hash_value(self.toeplitz.hash_without_local_port(remote, local));
        let table = if local.is_ipv4() { &self.home_ports.v4 } else { &self.home_ports.v6 };
        HomePortSearch { table, base }
    }
}

impl HomePortSearch<'_> {
    /// Returns the first port from `from` to `last` whose returning packets belong to this shard.
    #[inline]
    pub(crate) fn next(&self, from: u16, last: u16) -> Option<u16> {
        // A word of 64 ports at a time: most have a port of the shard.
        let mut at = from;
        while at <= last {
            let [high, low] = at.to_be_bytes().map(usize::from);
            let words = &self.table.low[usize::from(self.base ^ self.table.high[high]) % VALUES];
            let ports = words[low / 64] >> (low % 64);
            if ports != 0 {
                // Cannot overflow: the port is in the word of `at`.
                let port = at + ports.trailing_zeros() as u16;
                return (port <= last).then_some(port);
            }
            at = (at | 63).checked_add(1)?;
        }
        None
    }
}
