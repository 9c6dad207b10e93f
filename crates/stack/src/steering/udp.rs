//! Which shard has which UDP socket.
//!
//! A socket lives on the shard that bound it, and everything that is for it goes there, wherever it arrives: as on Linux, one socket gets all
//! datagrams of its port. Sockets of several shards that share a port by `reuse_port` share its datagrams by sender.

use crate::udp::{UdpOptions, compute_score, has_bind_conflict};
use core::net::SocketAddr;
use std::collections::BTreeMap;

/// A bound socket, as all shards know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpBinding {
    /// A number of its own.
    pub id: u64,
    /// Where it lives.
    pub shard: u8,
    /// What it is bound to.
    pub local: SocketAddr,
    /// Its fixed other end.
    pub remote: Option<SocketAddr>,
    /// How it may be shared.
    pub options: UdpOptions,
}

/// Where a datagram belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpOwner {
    /// To this shard.
    Shard(u8),
    /// To every shard.
    All,
}

/// All sockets that are bound to a port, in the order they were bound.
#[derive(Clone, Debug, Default)]
pub struct UdpPortTable {
    ports: BTreeMap<u16, Vec<UdpBinding>>,
}

impl UdpPortTable {
    /// True if somebody has the port.
    pub fn has_port(&self, port: u16) -> bool {
        self.ports.contains_key(&port)
    }

    /// True if a socket of another shard stands in the way of this one. Those of its own shard are the shard's business.
    pub fn conflicts(&self, claim: &UdpBinding) -> bool {
        let others = self.ports.get(&claim.local.port()).map_or(&[][..], Vec::as_slice);
        others.iter().any(|other| {
            other.shard != claim.shard
                && has_bind_conflict((claim.local, &claim.options), (other.local, &other.options))
        })
    }

    /// Adds a socket.
    pub fn add(&mut self, claim: UdpBinding) {
        self.ports.entry(claim.local.port()).or_default().push(claim);
    }

    /// Fixes a socket's other end. False if it is not here.
    pub fn connect(&mut self, id: u64, local: SocketAddr, remote: SocketAddr) -> bool {
        let claims = self.ports.get_mut(&local.port()).map_or(&mut [][..], Vec::as_mut_slice);
        let Some(claim) = claims.iter_mut().find(|claim| claim.id == id) else { return false };
        (claim.local, claim.remote) = (local, Some(remote));
        true
    }

    /// Removes a socket that is bound to `port`. False if it is not here.
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

    /// Where a datagram from `remote` to `local` belongs, by the rules by which a shard chooses among its own sockets: the closest fit; among
    /// equals that share the port by `reuse_port` the sender decides, otherwise the last one bound. A `group`'s goes to every shard, unless
    /// one has all the sockets. `None` if nobody has the port.
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
