//! The owner shards of bound UDP ports.
//!
//! A socket belongs to the shard that bound it, and all its datagrams are passed to that shard: as on Linux,
//! a socket receives all datagrams of its port. Sockets of several shards that share a port with `reuse_port`
//! divide its datagrams by sender.

use crate::udp::{UdpOptions, compute_score, has_bind_conflict};
use core::net::SocketAddr;
use std::collections::BTreeMap;

/// A bound socket as all shards know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpOwner {
    /// The shard with this number.
    Shard(u8),
    /// All shards.
    All,
}

/// All bound sockets by port, in the order they were bound.
#[derive(Clone, Debug, Default)]
pub struct UdpPortTable {
    ports: BTreeMap<u16, Vec<UdpBinding>>,
}

impl UdpPortTable {
    /// Returns whether any socket has the port.
    pub fn has_port(&self, port: u16) -> bool {
        self.ports.contains_key(&port)
    }

    /// Returns whether a socket of another shard conflicts with `binding`. Conflicts within a shard are
    /// detected by that shard.
    pub fn conflicts(&self, claim: &UdpBinding) -> bool {
        let others = self.ports.get(&claim.local.port()).map_or(&[][..], Vec::as_slice);
        others.iter().any(|other| {
            other.shard != claim.shard
                && has_bind_conflict((claim.local, &claim.options), (other.local, &other.options))
        })
    }

    /// Adds a bound socket.
    pub fn add(&mut self, claim: UdpBinding) {
        self.ports.entry(claim.local.port()).or_default().push(claim);
    }

    /// Connects a socket to `remote`. Returns false if the socket is not in the table.
    pub fn connect(&mut self, id: u64, local: SocketAddr, remote: SocketAddr) -> bool {
        let claims = self.ports.get_mut(&local.port()).map_or(&mut [][..], Vec::as_mut_slice);
        let Some(claim) = claims.iter_mut().find(|claim| claim.id == id) else { return false };
        (claim.local, claim.remote) = (local, Some(remote));
        true
    }

    /// Removes a socket that is bound to `port`. Returns false if the socket is not in the table.
    pub fn remove(&mut self, port: u16, id: u64) -> bool {
        let Some(claims) = self.ports.get_mut(&port) else { return false };
        let before = claims.len();
        claims.retain(|claim| claim.id != id);
        let removed = claims.len() < before;
        if claims.is_empty() {
            self.ports.remove(&port);
        }
        removed
    }

    /// Returns the owner of a datagram from `remote` to `local`, by the rules of the socket lookup within a
    /// shard: the socket with the highest score; among equal scores, those with `reuse_port` are selected by
    /// `hash`, otherwise the one bound last is selected. A datagram to a `group` is for all shards, unless
    /// one shard has all sockets. Returns `None` if no socket has the port.
    pub fn owner(
        &self,
        local: SocketAddr,
        remote: SocketAddr,
        group: bool,
        hash: impl FnOnce() -> u32,
    ) -> Option<UdpOwner> {
        let claims = self.ports.get(&local.port())?;
        let (first, rest) = claims.split_first()?;
        if rest.iter().all(|claim| claim.shard == first.shard) {
            return Some(UdpOwner::Shard(first.shard));
        }
        if group {
            return Some(UdpOwner::All);
        }
        let rank =
            |claim: &UdpBinding| compute_score(claim.local, claim.remote, &claim.options, local, remote);
        let best = claims.iter().filter_map(rank).max()?;
        let mut equals = claims.iter().filter(|claim| rank(claim) == Some(best));
        let last = equals.clone().next_back()?;
        if !last.options.reuse_port {
            return Some(UdpOwner::Shard(last.shard));
        }
        let chosen = hash() as usize % equals.clone().count();
        equals.nth(chosen).map(|claim| UdpOwner::Shard(claim.shard))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(id: u64, shard: u8, local: &str, reuse_port: bool) -> UdpBinding {
        let options = UdpOptions { reuse_port, ..UdpOptions::default() };
        UdpBinding { id, shard, local: local.parse().unwrap(), remote: None, options }
    }

    fn homes(claims: &[UdpBinding]) -> UdpPortTable {
        let mut homes = UdpPortTable::default();
        claims.iter().for_each(|&claim| homes.add(claim));
        homes
    }

    fn home(homes: &UdpPortTable, local: &str, hash: u32) -> Option<UdpOwner> {
        homes.owner(local.parse().unwrap(), "10.0.0.9:5000".parse().unwrap(), false, || hash)
    }

    #[test]
    fn one_socket_gets_everything_and_one_of_an_exact_address_goes_before_the_wildcard() {
        let homes = homes(&[claim(1, 2, "0.0.0.0:53", false), claim(2, 1, "10.0.0.2:53", false)]);
        for hash in 0..4 {
            assert_eq!(home(&homes, "10.0.0.1:53", hash), Some(UdpOwner::Shard(2)));
            assert_eq!(home(&homes, "10.0.0.2:53", hash), Some(UdpOwner::Shard(1)));
            assert_eq!(home(&homes, "10.0.0.2:54", hash), None);
        }
    }

    #[test]
    fn those_who_share_a_port_share_its_datagrams_among_them_and_nobody_else() {
        let homes = homes(&[claim(1, 3, "0.0.0.0:53", true), claim(2, 1, "0.0.0.0:53", true)]);
        assert_eq!(home(&homes, "10.0.0.1:53", 0), Some(UdpOwner::Shard(3)));
        assert_eq!(home(&homes, "10.0.0.1:53", 1), Some(UdpOwner::Shard(1)));
        let group = homes.owner("224.0.0.1:53".parse().unwrap(), "10.0.0.9:1".parse().unwrap(), true, || 0);
        assert_eq!(group, Some(UdpOwner::All));
    }

    #[test]
    fn a_fixed_other_end_beats_the_rest() {
        let mut homes = homes(&[claim(1, 0, "0.0.0.0:53", true), claim(2, 1, "0.0.0.0:53", true)]);
        assert!(homes.connect(1, "10.0.0.1:53".parse().unwrap(), "10.0.0.9:5000".parse().unwrap()));
        for hash in 0..4 {
            assert_eq!(home(&homes, "10.0.0.1:53", hash), Some(UdpOwner::Shard(0)));
        }
    }

    #[test]
    fn a_port_that_is_not_shared_is_refused_to_other_shards_until_it_is_free() {
        let mut homes = homes(&[claim(1, 0, "10.0.0.1:53", false)]);
        assert!(homes.conflicts(&claim(2, 1, "0.0.0.0:53", false)));
        assert!(homes.conflicts(&claim(2, 1, "10.0.0.1:53", true)));
        assert!(!homes.conflicts(&claim(2, 1, "10.0.0.2:53", false)));
        assert!(!homes.conflicts(&claim(2, 0, "10.0.0.1:53", false)), "the shard itself knows");
        assert!(homes.remove(53, 1) && !homes.remove(53, 1));
        assert!(!homes.conflicts(&claim(2, 1, "0.0.0.0:53", false)) && !homes.has_port(53));
    }
}
