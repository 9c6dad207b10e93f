//! Finds local ports whose returning packets hash to this shard. The hash is linear: the contribution of the
//! port is added (by exclusive or) to that of the rest of the flow. So the ports of this shard need not be
//! searched one by one, which would take as many attempts as there are shards.

use super::toeplitz::Toeplitz;
use super::{INDIRECTION_ENTRIES, Steering};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Ports of one block, which differ in their low byte.
const BLOCK: usize = 256;
/// Values of the hash that a shard may have for its ports to be looked up. With more values, every few ports
/// one belongs to the shard, and ports are tried one by one.
const VALUES_MAX: usize = 16;

/// The ports of a shard.
pub(super) struct HomePorts {
    /// Values of the hash, modulo the indirection table, that belong to the shard, and a bit for each.
    values: Vec<u8>,
    is_home: u128,
    v4: PortTable,
    v6: PortTable,
}

/// The contribution of the local port to the hash, for one address family.
struct PortTable {
    /// Contributions of the high and of the low byte.
    high: [u8; BLOCK],
    low: [u8; BLOCK],
    /// Low bytes by their contribution, each group in ascending order, and where the groups begin.
    by_value: [u8; BLOCK],
    group_starts: [u16; INDIRECTION_ENTRIES as usize + 1],
}

impl PortTable {
    fn new(toeplitz: &Toeplitz, any: IpAddr) -> Self {
        let of = |port: u16| hash_value(toeplitz.hash(any, any, Some((0, port))));
        let (mut high, mut low) = ([0; BLOCK], [0; BLOCK]);
        for byte in 0..=255u8 {
            high[usize::from(byte)] = of(u16::from(byte) << 8);
            low[usize::from(byte)] = of(byte.into());
        }
        let (mut by_value, mut group_starts) = ([0; BLOCK], [0; INDIRECTION_ENTRIES as usize + 1]);
        let mut at = 0;
        for (value, start) in group_starts.iter_mut().enumerate() {
            // Cannot truncate: there are 256 ports.
            *start = at as u16;
            for byte in (0..=255u8).filter(|byte| usize::from(low[usize::from(*byte)]) == value) {
                by_value[at] = byte;
                at += 1;
            }
        }
        Self { high, low, by_value, group_starts }
    }

    /// Returns the low bytes with a contribution.
    fn group(&self, value: u8) -> &[u8] {
        let [from, to] = [0, 1].map(|next| usize::from(self.group_starts[usize::from(value) + next]));
        &self.by_value[from..to]
    }
}

/// Returns the part of a hash that selects an entry of the indirection table.
const fn hash_value(hash: u32) -> u8 {
    // Cannot truncate: the table has 128 entries.
    (hash % INDIRECTION_ENTRIES) as u8
}

impl HomePorts {
    pub(super) fn new(shard: u8, shards: u8, toeplitz: &Toeplitz) -> Self {
        // Cannot truncate, as above.
        let values: Vec<u8> =
            (0..INDIRECTION_ENTRIES as u8).filter(|value| value % shards == shard).collect();
        let is_home = values.iter().fold(0, |bits, value| bits | 1 << value);
        let v4 = PortTable::new(toeplitz, Ipv4Addr::UNSPECIFIED.into());
        let v6 = PortTable::new(toeplitz, Ipv6Addr::UNSPECIFIED.into());
        Self { values, is_home, v4, v6 }
    }
}

/// The ports of one address towards one destination.
pub(crate) struct HomePortSearch<'a> {
    ports: &'a HomePorts,
    table: &'a PortTable,
    /// Contribution of the rest of the flow.
    base: u8,
}

impl Steering {
    /// Prepares to search ports of `local` for a connection to `remote`.
    pub(crate) fn home_ports(&self, remote: SocketAddr, local: IpAddr) -> HomePortSearch<'_> {
        let base = hash_value(self.toeplitz.hash(remote.ip(), local, Some((remote.port(), 0))));
        let table = if local.is_ipv4() { &self.home_ports.v4 } else { &self.home_ports.v6 };
        HomePortSearch { ports: &self.home_ports, table, base }
    }
}

impl HomePortSearch<'_> {
    /// Returns the first port from `from` to `last` whose returning packets belong to this shard.
    pub(crate) fn next(&self, from: u16, last: u16) -> Option<u16> {
        if self.ports.values.len() > VALUES_MAX {
            return (from..=last).find(|port| {
                let [high, low] = port.to_be_bytes().map(usize::from);
                self.ports.is_home >> (self.base ^ self.table.high[high] ^ self.table.low[low]) & 1 != 0
            });
        }
        (from >> 8..=last >> 8).find_map(|block| {
            // Cannot truncate: a port has two bytes.
            let base = self.base ^ self.table.high[usize::from(block)];
            let ports = self.ports.values.iter().filter_map(|value| {
                let ports = self.table.group(base ^ value).iter().map(|low| block << 8 | u16::from(*low));
                ports.filter(|port| (from..=last).contains(port)).min()
            });
            ports.min()
        })
    }
}
