//! Receive-side scaling: the port spreads flows over its queues by the hash by which the stack knows their
//! owner shards.

use super::ffi::{self, PortInfo};
use ginnel_stack::steering::toeplitz::KEY;

/// Types of packets that are hashed, by the numbers of their bits (`RTE_ETH_RSS_…`).
const IPV4: u64 = 1 << 2;
const FRAG_IPV4: u64 = 1 << 3;
const IPV4_TCP: u64 = 1 << 4;
const IPV4_UDP: u64 = 1 << 5;
const IPV4_OTHER: u64 = 1 << 7;
const IPV6: u64 = 1 << 8;
const FRAG_IPV6: u64 = 1 << 9;
const IPV6_TCP: u64 = 1 << 10;
const IPV6_UDP: u64 = 1 << 11;
const IPV6_OTHER: u64 = 1 << 13;
/// Packets whose hash includes ports.
const WITH_PORTS: u64 = IPV4_TCP | IPV4_UDP | IPV6_TCP | IPV6_UDP;
const WANTED: u64 = WITH_PORTS | IPV4 | FRAG_IPV4 | IPV4_OTHER | IPV6 | FRAG_IPV6 | IPV6_OTHER;
/// Entries of the stack's own table; larger tables repeat it.
const STACK_ENTRIES: u16 = 128;
/// Entries of the largest table that the shim can set.
const ENTRIES_MAX: u16 = 512;

/// How a port spreads flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RssReport {
    /// The port has the stack's key, as read back from it.
    pub has_key: bool,
    /// Entries of the indirection table, which names the stack's owner shards, as read back; 0 if it does
    /// not.
    pub table_entries: u16,
    /// The port hashes TCP and UDP over IPv4 and IPv6 with their ports.
    pub hashes_ports: bool,
}

impl RssReport {
    /// Returns whether all TCP segments arrive at the queues of their owner shards.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.has_key && self.hashes_ports && self.table_entries >= STACK_ENTRIES
    }

    /// Returns whether the hashes of received frames are those that the stack computes.
    #[must_use]
    pub fn knows_hashes(&self) -> bool {
        self.has_key && self.hashes_ports
    }
}

/// Returns the types of packets that the port is asked to hash; 0 if it has one queue, or no hash.
pub(super) fn hash_types(info: &PortInfo, queues: u16) -> u64 {
    if queues > 1 { info.hash_types & WANTED } else { 0 }
}

/// Sets key and table of a started port, and reads both back. Returns `None` if frames are not spread by a
/// hash.
pub(super) fn set(port: u16, info: &PortInfo, queues: u16) -> Option<RssReport> {
    let wanted = hash_types(info, queues);
    if wanted == 0 {
        return None;
    }
    let has = |key: Result<([u8; 40], u64), _>| key.ok().filter(|(key, _)| *key == KEY);
    // Some drivers ignore the key of the configuration.
    let key = has(ffi::key(port)).or_else(|| {
        ffi::set_key(port, &KEY, info.key_bytes, wanted).ok()?;
        has(ffi::key(port))
    });
    let hashed = key.map_or(0, |(_, types)| types);
    let entries = info.table_entries.min(ENTRIES_MAX);
    let mut table_entries = 0;
    if entries > 0 && ffi::set_table(port, entries, queues).is_ok() {
        let names_owner = |(entry, queue): (u16, &u16)| *queue == entry % STACK_ENTRIES % queues;
        let read = ffi::table(port, entries).unwrap_or_default();
        if read.len() == usize::from(entries) && (0..).zip(&read).all(names_owner) {
            table_entries = entries;
        }
    }
    let hashes_ports = hashed & WITH_PORTS == WITH_PORTS;
    Some(RssReport { has_key: key.is_some(), table_entries, hashes_ports })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_queue_needs_no_hash() {
        let info = PortInfo { hash_types: u64::MAX, ..PortInfo::default() };
        assert_eq!((hash_types(&info, 1), hash_types(&info, 2)), (0, WANTED));
    }

    #[test]
    fn exactness_needs_key_table_and_ports() {
        let exact = RssReport { has_key: true, table_entries: 128, hashes_ports: true };
        assert!(exact.is_exact() && exact.knows_hashes());
        assert!(!RssReport { table_entries: 64, ..exact }.is_exact());
        assert!(!RssReport { has_key: false, ..exact }.is_exact());
        assert!(!RssReport { hashes_ports: false, ..exact }.knows_hashes());
    }
}
