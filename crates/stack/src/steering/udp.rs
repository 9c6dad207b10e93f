//! The owner shards of bound UDP ports.
//!
//! A socket belongs to the shard that bound it, and all its datagrams are passed to that shard: as on Linux,
//! a socket receives all datagrams of its port. Sockets of several shards that share a port with `reuse_port`
//! divide its datagrams by sender.

use crate::udp::{UdpOptions, compute_score, has_bind_conflict};
use core::net::SocketAddr;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A bound socket as all shards know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UdpBinding {
    /// A number that identifies the socket.
    pub id: u64,
    /// Its shard.
    pub shard: u8,
    /// Its local address and port.
    pub local: SocketAddr,
    /// Its remote address and port, if it is connected.
    pub remote: Option<SocketAddr>,
    /// Its options, which govern how the port may be shared.
    pub options: UdpOptions,
}

/// The owner of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UdpOwner {
    /// The shard with this number.
    Shard(u8),
    /// All shards.
    All,
}

/// All bound sockets by port, in the order they were bound.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct UdpPortTable {
    ports: BTreeMap<u16, Vec<UdpBinding>>,
}

impl UdpPortTable {
    /// Returns whether any socket has the port.
    pub fn has_port(&self, port: u16) -> bool {
        self.ports.contains_key(&port)
    }

    /// Returns the ports that have a socket.
    pub fn ports(&self) -> impl Iterator<Item = u16> {
        self.ports.keys().copied()
    }

    /// Returns whether a socket of another shard conflicts with `binding`. Conflicts within a shard are
    /// detected by that shard.
    pub fn conflicts(&self, binding: &UdpBinding) -> bool {
        let others = self.ports.get(&binding.local.port()).map_or(&[][..], Vec::as_slice);
        others.iter().any(|other| {
            other.shard != binding.shard
                && has_bind_conflict(binding.local, &binding.options, other.local, &other.options)
        })
    }

    /// Adds a bound socket.
    pub fn add(&mut self, binding: UdpBinding) {
        self.ports.entry(binding.local.port()).or_default().push(binding);
    }

    /// Connects a socket to `remote`. Returns false if the socket is not in the table.
    pub fn connect(&mut self, id: u64, local: SocketAddr, remote: SocketAddr) -> bool {
        let bindings = self.ports.get_mut(&local.port()).map_or(&mut [][..], Vec::as_mut_slice);
        let Some(binding) = bindings.iter_mut().find(|binding| binding.id == id) else { return false };
        (binding.local, binding.remote) = (local, Some(remote));
        true
    }

    /// Removes a socket that is bound to `port`. Returns false if the socket is not in the table.
    pub fn remove(&mut self, port: u16, id: u64) -> bool {
        let Some(bindings) = self.ports.get_mut(&port) else { return false };
        let before = bindings.len();
        bindings.retain(|binding| binding.id != id);
        let removed = bindings.len() < before;
        if bindings.is_empty() {
            self.ports.remove(&port);
        }
        removed
    }

    /// Returns the owner of a datagram from `remote` to `local`, by the rules of the socket lookup within a
    /// shard: the socket with the highest score; among equal scores, those with `reuse_port` are selected by
    /// `hash`, at first those of the shards that serve the device (`serving` has a bit for each); otherwise
    /// the one bound last is selected. A datagram to a `group` is for all shards, unless one shard has all
    /// sockets. Returns `None` if no socket has the port.
    pub fn owner(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        group: bool,
        serving: u64,
        hash: impl FnOnce() -> u32,
    ) -> Option<UdpOwner> {
        let bindings = self.ports.get(&local.port())?;
        let (first, rest) = bindings.split_first()?;
        if rest.iter().all(|binding| binding.shard == first.shard) {
            return Some(UdpOwner::Shard(first.shard));
        }
        if group {
            return Some(UdpOwner::All);
        }
        let rank = |binding: &UdpBinding| {
            compute_score(binding.local, binding.remote, &binding.options, local, remote)
        };
        let best = bindings.iter().filter_map(rank).max()?;
        let equals = bindings.iter().filter(|binding| rank(binding) == Some(best));
        let last = equals.clone().next_back()?;
        if !last.options.reuse_port {
            return Some(UdpOwner::Shard(last.shard));
        }
        let is_serving = |binding: &&UdpBinding| serving >> binding.shard & 1 != 0;
        let has_serving = equals.clone().any(|binding| is_serving(&binding));
        let mut equals = equals.filter(|binding| !has_serving || is_serving(binding));
        let chosen = hash() as usize % equals.clone().count();
        equals.nth(chosen).map(|binding| UdpOwner::Shard(binding.shard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binding(id: u64, shard: u8, local: &str, reuse_port: bool) -> UdpBinding {
        let options = UdpOptions { reuse_port, ..UdpOptions::default() };
        UdpBinding { id, shard, local: local.parse().unwrap(), remote: None, options }
    }

    fn table(bindings: &[UdpBinding]) -> UdpPortTable {
        let mut table = UdpPortTable::default();
        bindings.iter().for_each(|&binding| table.add(binding));
        table
    }

    fn owner_of(table: &UdpPortTable, local: &str, hash: u32) -> Option<UdpOwner> {
        table.owner(local.parse().unwrap(), "10.0.0.9:5000".parse().unwrap(), false, u64::MAX, || hash)
    }

    #[test]
    fn exact_address_takes_precedence_over_wildcard() {
        let table = table(&[binding(1, 2, "0.0.0.0:53", false), binding(2, 1, "10.0.0.2:53", false)]);
        for hash in 0..4 {
            assert_eq!(owner_of(&table, "10.0.0.1:53", hash), Some(UdpOwner::Shard(2)));
            assert_eq!(owner_of(&table, "10.0.0.2:53", hash), Some(UdpOwner::Shard(1)));
            assert_eq!(owner_of(&table, "10.0.0.2:54", hash), None);
        }
    }

    #[test]
    fn reuseport_sockets_share_datagrams_by_hash() {
        let table = table(&[binding(1, 3, "0.0.0.0:53", true), binding(2, 1, "0.0.0.0:53", true)]);
        assert_eq!(owner_of(&table, "10.0.0.1:53", 0), Some(UdpOwner::Shard(3)));
        assert_eq!(owner_of(&table, "10.0.0.1:53", 1), Some(UdpOwner::Shard(1)));
        let group =
            table.owner("224.0.0.1:53".parse().unwrap(), "10.0.0.9:1".parse().unwrap(), true, u64::MAX, || 0);
        assert_eq!(group, Some(UdpOwner::All));
    }

    #[test]
    fn sockets_of_serving_shards_share_datagrams_first() {
        let bindings: Vec<_> = (0..4).map(|shard| binding(shard.into(), shard, "0.0.0.0:53", true)).collect();
        let table = table(&bindings);
        let owner = |serving, hash| {
            let (local, remote) = ("10.0.0.1:53".parse().unwrap(), "10.0.0.9:5000".parse().unwrap());
            table.owner(local, remote, false, serving, || hash)
        };
        let owners: Vec<_> = (0..4).map(|hash| owner(0b1010, hash).unwrap()).collect();
        assert_eq!(owners, [1, 3, 1, 3].map(UdpOwner::Shard));
        // Others share them if there are no such sockets.
        assert_eq!(owner(0b1_0000, 2), Some(UdpOwner::Shard(2)));
    }

    #[test]
    fn connected_socket_takes_precedence() {
        let mut table = table(&[binding(1, 0, "0.0.0.0:53", true), binding(2, 1, "0.0.0.0:53", true)]);
        assert!(table.connect(1, "10.0.0.1:53".parse().unwrap(), "10.0.0.9:5000".parse().unwrap()));
        for hash in 0..4 {
            assert_eq!(owner_of(&table, "10.0.0.1:53", hash), Some(UdpOwner::Shard(0)));
        }
    }

    #[test]
    fn unshared_port_conflicts_across_shards() {
        let mut table = table(&[binding(1, 0, "10.0.0.1:53", false)]);
        assert!(table.conflicts(&binding(2, 1, "0.0.0.0:53", false)));
        assert!(table.conflicts(&binding(2, 1, "10.0.0.1:53", true)));
        assert!(!table.conflicts(&binding(2, 1, "10.0.0.2:53", false)));
        assert!(!table.conflicts(&binding(2, 0, "10.0.0.1:53", false)), "the shard itself detects this");
        assert!(table.remove(53, 1) && !table.remove(53, 1));
        assert!(!table.conflicts(&binding(2, 1, "0.0.0.0:53", false)) && !table.has_port(53));
    }
}
