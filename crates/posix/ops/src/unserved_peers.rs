//! Peers to which some shards open no connections, because other shards serve the link towards them (the key
//! `shards` of a device). A process finds out by the first connection, and asks these shards no more.

use core::net::{IpAddr, SocketAddr};
use ginnel::{ConnectError, Error};

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

    /// Opens a connection by the shard `next`, or by a later one if the peer is known, and by the others if
    /// that one refuses; `next` becomes the shard after the one that was asked last. `is_by_route` tells that
    /// the connection has no local address, so that it belongs to the shards that serve the link towards
    /// the peer; otherwise those of the local address serve it, whatever is known about the peer.
    ///
    /// # Errors
    /// Returns the error of the first shard that failed for another reason, or of the last one.
    #[inline]
    pub fn open<T>(
        &mut self,
        (remote, is_by_route): (SocketAddr, bool),
        next: &mut usize,
        count: usize,
        mut open_on: impl FnMut(usize) -> Result<T, Error>,
    ) -> Result<(usize, T), Error> {
        let is_known = !self.0.is_empty() && is_by_route;
        let first = if is_known { self.find_shard(remote.ip(), *next, count) } else { *next };
        *next = (first + 1) % count;
        match open_on(first) {
            Ok(opened) => Ok((first, opened)),
            Err(error) if is_refusal(&error) => {
                self.open_elsewhere(((remote, is_by_route), (first, error)), next, count, open_on)
            }
            Err(error) => Err(error),
        }
    }

    /// Opens a connection that shard `first` has refused by one of the other shards, each of which is asked
    /// once: see [`UnservedPeers::open`].
    #[cold]
    pub fn open_elsewhere<T>(
        &mut self,
        ((remote, is_by_route), (first, mut error)): ((SocketAddr, bool), (usize, Error)),
        next: &mut usize,
        count: usize,
        mut open_on: impl FnMut(usize) -> Result<T, Error>,
    ) -> Result<(usize, T), Error> {
        let mut shard = first;
        loop {
            if is_by_route && matches!(error, Error::Connect(_, ConnectError::AddressNotAvailable)) {
                self.add(remote.ip(), shard);
            }
            shard = (shard + 1) % count;
            if shard == first {
                return Err(error);
            }
            *next = (shard + 1) % count;
            match open_on(shard) {
                Ok(opened) => {
                    if is_by_route {
                        self.remove(remote.ip(), shard);
                    }
                    return Ok((shard, opened));
                }
                Err(refused) if is_refusal(&refused) => error = refused,
                Err(error) => return Err(error),
            }
        }
    }

    /// Records that a shard serves the link towards `peer` after all, as after a change of routes.
    fn remove(&mut self, peer: IpAddr, shard: usize) {
        if let Some((_, shards)) = self.0.iter_mut().find(|(known, _)| *known == peer) {
            *shards &= !1_u64.unbounded_shl(shard as u32);
        }
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

/// Returns whether another shard may open the connection: this one does not serve its link, or has no port.
#[inline]
pub(crate) fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Connect(_, ConnectError::AddressNotAvailable | ConnectError::PortsExhausted))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens a connection on one of four shards of which those in `serving` do not refuse. Returns the shards
    /// that were asked, and whether one of them has opened it.
    fn open(
        peers: &mut UnservedPeers,
        is_by_route: bool,
        next: &mut usize,
        serving: &[usize],
    ) -> (Vec<usize>, bool) {
        let (remote, mut asked) = (SocketAddr::new(peer(1), 80), Vec::new());
        let opened = peers.open((remote, is_by_route), next, 4, |shard| {
            asked.push(shard);
            let refused = Error::Connect(remote, ConnectError::AddressNotAvailable);
            if serving.contains(&shard) { Ok(()) } else { Err(refused) }
        });
        assert!(opened.as_ref().ok().is_none_or(|(shard, ())| asked.last() == Some(shard)));
        (asked, opened.is_ok())
    }

    /// A bound address has shards of its own, whatever the link towards the peer is.
    #[test]
    fn a_bound_address_does_not_follow_the_route() {
        let (mut peers, mut next) = (UnservedPeers::default(), 0);
        assert_eq!(open(&mut peers, true, &mut next, &[2, 3]), (vec![0, 1, 2], true));
        assert_eq!(open(&mut peers, true, &mut 0, &[2, 3]), (vec![2], true));
        for start in 0..4 {
            let (asked, is_open) = open(&mut peers, false, &mut { start }, &[0, 1]);
            assert!(is_open && asked[0] == start && asked.len() <= 3, "{start} {asked:?}");
        }
        // Nor does it tell anything about the peer.
        assert_eq!(open(&mut peers, false, &mut 0, &[]), (vec![0, 1, 2, 3], false));
        assert_eq!(open(&mut peers, true, &mut 0, &[2, 3]), (vec![2], true));
    }

    /// After a change of routes, the shards that have refused before are asked, too: each one once.
    #[test]
    fn every_shard_is_asked_once() {
        for (start, first) in [(0, 0), (1, 1), (2, 2), (3, 0)] {
            let mut peers = UnservedPeers::default();
            peers.add(peer(1), 3);
            assert_eq!(
                open(&mut peers, true, &mut { start }, &[3]),
                ((first..=3).collect(), true),
                "{start}"
            );
            // From now on, the shard that serves the link is the only one that is asked.
            assert_eq!(open(&mut peers, true, &mut { start }, &[3]), (vec![3], true), "{start}");
            let (mut all, is_open) = open(&mut peers, true, &mut { start }, &[]);
            all.sort_unstable();
            assert_eq!((all, is_open), (vec![0, 1, 2, 3], false), "{start}");
        }
    }

    /// A connection that was opened asynchronously, and that its shard has refused, is opened by another one.
    #[test]
    fn the_shard_that_has_refused_is_not_asked_again() {
        let (mut peers, mut next) = (UnservedPeers::default(), 3);
        let remote = SocketAddr::new(peer(1), 80);
        let refusal = || Error::Connect(remote, ConnectError::AddressNotAvailable);
        let mut asked = Vec::new();
        let opened = peers.open_elsewhere(((remote, true), (2, refusal())), &mut next, 4, |shard| {
            asked.push(shard);
            if shard == 1 { Ok(()) } else { Err(refusal()) }
        });
        assert_eq!((opened.unwrap().0, asked, next), (1, vec![3, 0, 1], 2));
        // Another error ends the search.
        let is_full = |_| Err::<(), _>(Error::Connect(remote, ConnectError::TooMany));
        let result = peers.open((remote, true), &mut next, 4, is_full);
        assert!(matches!(result, Err(Error::Connect(_, ConnectError::TooMany))), "{result:?}");
    }

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
