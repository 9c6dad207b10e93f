//! Finds local ports whose returning packets hash to this shard. The hash is linear: the contribution of the
//! port is added (by exclusive or) to that of the rest of the flow. So the ports of this shard need not be
//! searched one by one, which would take as many attempts as there are shards.

use super::Steering;
use super::port_bits::PortBits;
use super::toeplitz::Toeplitz;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Ports of one block, which differ in their low byte.
const BLOCK: usize = 256;

/// The ports of a shard.
pub(super) struct HomePorts {
    v4: PortTable,
    v6: PortTable,
}

/// The contribution of the local port to the hash, for one address family.
pub(crate) struct PortTable {
    /// Contributions of the high byte.
    high: [u16; BLOCK],
    /// By the contribution of the rest of the flow: a bit for each low byte whose ports belong to the shard.
    /// There are as many elements as the indirection table has entries, a power of two.
    low: Box<[[u64; BLOCK / 64]]>,
}

impl PortTable {
    fn new(toeplitz: &Toeplitz, any: IpAddr, home_entries: &[bool]) -> Self {
        let of = |port: u16| entry_of(toeplitz.hash(any, any, Some((0, port))), home_entries.len());
        let mut high = [0; BLOCK];
        let mut low = vec![[0; BLOCK / 64]; home_entries.len()].into_boxed_slice();
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

/// Returns the entry that a hash selects in an indirection table of `entries` entries, a power of two.
const fn entry_of(hash: u32, entries: usize) -> u16 {
    // Cannot truncate: a table has at most `INDIRECTION_ENTRIES_MAX` entries.
    (hash as usize & entries.wrapping_sub(1)) as u16
}

impl HomePorts {
    /// Computes the ports of the shard that has the marked entries of the indirection table.
    pub(super) fn new(home_entries: &[bool], toeplitz: &Toeplitz) -> Self {
        let v4 = PortTable::new(toeplitz, Ipv4Addr::UNSPECIFIED.into(), home_entries);
        let v6 = PortTable::new(toeplitz, Ipv6Addr::UNSPECIFIED.into(), home_entries);
        Self { v4, v6 }
    }
}

/// The ports of one address towards one destination.
pub(crate) enum HomePortSearch<'a> {
    /// The hash chooses the shard.
    Hash {
        table: &'a PortTable,
        /// Contribution of the rest of the flow.
        base: u16,
    },
    /// The low bits of the port choose the queue.
    PortBits { bits: &'a PortBits, queue: usize, queues: usize },
}

impl Steering {
    /// Prepares to search ports of `local` for a connection to `remote`; `None` if this shard does not serve
    /// the device of `local`, so that no port would do.
    pub(crate) fn home_ports(&self, remote: SocketAddr, local: IpAddr) -> Option<HomePortSearch<'_>> {
        if let Some(bits) = &self.port_bits {
            return self.home_ports_by_bits(bits, local);
        }
        let ports = match &self.device_shards {
            None => &self.home_ports,
            Some(served) => served.home_ports(local).unwrap_or(Some(&self.home_ports))?,
        };
        let table = if local.is_ipv4() { &ports.v4 } else { &ports.v6 };
        let base = entry_of(self.toeplitz.hash_without_local_port(remote, local), table.low.len());
        Some(HomePortSearch::Hash { table, base })
    }

    fn home_ports_by_bits<'a>(&self, bits: &'a PortBits, local: IpAddr) -> Option<HomePortSearch<'a>> {
        let queues = self.device_shards.as_ref().and_then(|served| served.queues(local, None));
        let (queue, queues) = match queues {
            None => (self.shard.into(), self.shards.into()),
            Some(shards) => (shards.iter().position(|&shard| shard == self.shard)?, shards.len()),
        };
        Some(HomePortSearch::PortBits { bits, queue, queues })
    }
}

impl HomePortSearch<'_> {
    /// Returns the first port from `from` to `last` whose returning packets belong to this shard.
    #[inline]
    pub(crate) fn next(&self, from: u16, last: u16) -> Option<u16> {
        let (table, base) = match *self {
            Self::Hash { table, base } => (table, base),
            Self::PortBits { bits, queue, queues } => return bits.next(from, last, queue, queues),
        };
        // A word of 64 ports at a time: most have a port of the shard.
        let mut at = from;
        while at <= last {
            let [high, low] = at.to_be_bytes().map(usize::from);
            let words = table.low.get(usize::from(base ^ table.high[high]))?;
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
