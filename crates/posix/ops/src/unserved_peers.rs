//! Peers to which some shards open no connections, because other shards serve the link towards them (the key
//! `shards` of a device). A process finds out by the first connection, and asks these shards no more.

use std::net::IpAddr;

/// Peers that are remembered. At the limit the oldest one is forgotten, and found out about again.
// limit: peers whose shards a process remembers
const PEERS_MAX: usize = 256;

/// Peers, oldest first, each with bits of the shards that have refused it.
#[derive(Debug, Default)]
pub(crate) struct UnservedPeers(Vec<(IpAddr, u64)>);

impl UnservedPeers {
    /// Records that a shard does not serve the link towards `peer`.
    pub fn add(&mut self, peer: IpAddr, shard: usize) {
        let bit = 1_u64.unbounded_shl(shard as u32);
        if let Some((_, shards)) = self.0.iter_mut().find(|(known, _)| *known == peer) {
            *shards |= bit;
            return;
        }
        if self.0.len() == PEERS_MAX {
            self.0.remove(0);
        }
        self.0.push((peer, bit));
    }

    /// Returns the first of `count` shards, from `next` on, that has not refused `peer`. If all of them have,
    /// as after a change of routes, they are asked again.
    #[inline]
    pub fn first_shard(&mut self, peer: IpAddr, next: usize, count: usize) -> usize {
        if self.0.is_empty() { next } else { self.find_shard(peer, next, count) }
    }

    #[inline(never)]
    fn find_shard(&mut self, peer: IpAddr, next: usize, count: usize) -> usize {
        let Some(at) = self.0.iter().position(|(known, _)| *known == peer) else { return next };
        let shards = self.0[at].1;
        let serving = (next..count).chain(0..next).find(|shard| shards.unbounded_shr(*shard as u32) & 1 == 0);
        serving.unwrap_or_else(|| {
            self.0.remove(at);
            next
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u32) -> IpAddr {
        IpAddr::from(n.to_be_bytes())
    }

    #[test]
    fn shards_that_refused_a_peer_are_skipped() {
        let mut peers = UnservedPeers::default();
        assert_eq!(peers.first_shard(peer(1), 2, 4), 2);
        peers.add(peer(1), 2);
        peers.add(peer(1), 3);
        let chosen: Vec<usize> = (0..4).map(|next| peers.first_shard(peer(1), next, 4)).collect();
        assert_eq!(chosen, [0, 1, 0, 0]);
        assert_eq!(peers.first_shard(peer(2), 2, 4), 2);
        // All have refused: they are asked again, in turn.
        peers.add(peer(1), 0);
        peers.add(peer(1), 1);
        assert_eq!((peers.first_shard(peer(1), 3, 4), peers.first_shard(peer(1), 2, 4)), (3, 2));
    }

    // limit: peers whose shards a process remembers
    #[test]
    fn oldest_peer_is_forgotten() {
        let mut peers = UnservedPeers::default();
        (0..=PEERS_MAX as u32).for_each(|n| peers.add(peer(n), 0));
        assert_eq!(peers.0.len(), PEERS_MAX);
        let first = |peers: &mut UnservedPeers, n| peers.first_shard(peer(n), 0, 2);
        assert_eq!((first(&mut peers, 0), first(&mut peers, 1), first(&mut peers, 256)), (0, 1, 1));
    }
}
