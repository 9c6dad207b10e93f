//! The path MTU cache: destinations whose path MTU is below the MTU of the local link (RFC 1191, RFC 8201).

pub(crate) mod image;

use crate::time::Instant;
use core::net::IpAddr;
use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

/// Smallest MTU of an IPv6 link in bytes (RFC 8200 §5).
pub const IPV6_MTU_MIN: u16 = 1280;

/// The path MTU of one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct PathMtuEntry {
    /// Bytes of the largest IP packet.
    pub mtu: u16,
    /// True if the reported MTU was below the floor. Packets are then sent with the floor and routers may
    /// fragment them (Linux's `rtax_lock(RTAX_MTU)`).
    pub locked: bool,
    expires: Instant,
}

/// The period in which the path MTU of a cached route is valid. The default is never valid.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PathMtuValidity {
    /// The generation of the cache in which the path MTU was looked up.
    generation: u64,
    /// The time at which the entry of the destination expires; [`Instant::MAX`] without an entry.
    expires: Instant,
}

/// A bounded map. Entries expire; at the limit the oldest entry is evicted.
#[derive(Debug)]
pub(crate) struct PathMtuCache {
    entries: BTreeMap<IpAddr, PathMtuEntry>,
    by_age: BTreeSet<(Instant, IpAddr)>,
    entries_max: usize,
    lifetime: Duration,
    floor_v4: u16,
    generation: u64,
    evicted: u64,
}

impl PathMtuCache {
    pub(crate) fn new(entries_max: usize, lifetime: Duration, floor_v4: u16) -> Self {
        Self {
            entries: BTreeMap::new(),
            by_age: BTreeSet::new(),
            entries_max,
            lifetime,
            floor_v4,
            generation: 0,
            evicted: 0,
        }
    }

    /// Returns the path MTU of `destination`; `None` if the MTU of the local link applies.
    pub(crate) fn get(&self, now: Instant, destination: IpAddr) -> Option<PathMtuEntry> {
        // The cache is usually empty: the common case needs no lookup.
        if self.entries.is_empty() {
            return None;
        }
        self.entries.get(&destination).copied().filter(|entry| now < entry.expires)
    }

    /// Records the MTU that a router reported. Returns false if it does not lower `current`, the path MTU now
    /// in use: an ICMP message never raises it (RFC 1191 §3).
    pub(crate) fn learn(&mut self, now: Instant, destination: IpAddr, reported: u16, current: u16) -> bool {
        // An IPv4 router older than RFC 1191 reports 0, which results in the floor, too, as on Linux.
        let floor = if destination.is_ipv4() { self.floor_v4 } else { IPV6_MTU_MIN };
        let mtu = reported.max(floor).min(current);
        // RFC 8200 §5: IPv6 never uses less than 1,280 bytes, whatever is reported.
        let locked = destination.is_ipv4() && reported < floor;
        if reported >= current {
            return false;
        }
        if let Some(cached) = self.entries.get(&destination)
            && now < cached.expires
            && cached.mtu <= mtu
            && cached.locked >= locked
        {
            return false;
        }
        self.insert(destination, PathMtuEntry { mtu, locked, expires: now + self.lifetime });
        true
    }

    /// Returns a number that grows with each learnt path MTU.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns until when the path MTU of `destination` that is looked up now is valid.
    pub(crate) fn validity(&self, now: Instant, destination: IpAddr) -> PathMtuValidity {
        let expires = self.get(now, destination).map_or(Instant::MAX, |entry| entry.expires);
        PathMtuValidity { generation: self.generation, expires }
    }

    /// Returns whether a path MTU that was looked up earlier is still valid: no path MTU was learnt since,
    /// and the entry has not expired.
    #[inline]
    pub(crate) fn is_current(&self, now: Instant, validity: &PathMtuValidity) -> bool {
        validity.generation == self.generation && now < validity.expires
    }

    /// Returns how many destinations were evicted to make room for others.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted
    }

    fn insert(&mut self, destination: IpAddr, entry: PathMtuEntry) {
        self.generation += 1;
        if let Some(before) = self.entries.insert(destination, entry) {
            self.by_age.remove(&(before.expires, destination));
        }
        self.by_age.insert((entry.expires, destination));
        if self.entries.len() > self.entries_max
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.entries.remove(&oldest);
            self.evicted += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::{Ipv4Addr, Ipv6Addr};

    const SECOND: Duration = Duration::from_secs(1);

    fn cache(entries_max: usize) -> PathMtuCache {
        PathMtuCache::new(entries_max, 600 * SECOND, 552)
    }

    fn v4(last: u8) -> IpAddr {
        Ipv4Addr::new(192, 0, 2, last).into()
    }

    #[test]
    fn reported_mtu_applies_until_it_expires() {
        let mut cache = cache(4);
        assert!(cache.learn(Instant::ZERO, v4(1), 1400, 1500));
        assert_eq!(cache.get(Instant::ZERO + 599 * SECOND, v4(1)).map(|e| e.mtu), Some(1400));
        assert_eq!(cache.get(Instant::ZERO + 600 * SECOND, v4(1)), None);
        assert_eq!(cache.get(Instant::ZERO, v4(2)), None);
    }

    #[test]
    fn reported_mtu_never_raises_the_path_mtu() {
        let mut cache = cache(4);
        assert!(!cache.learn(Instant::ZERO, v4(1), 1500, 1500));
        assert!(!cache.learn(Instant::ZERO, v4(1), 9000, 1500));
        assert!(cache.learn(Instant::ZERO, v4(1), 1000, 1500));
        assert!(!cache.learn(Instant::ZERO, v4(1), 1200, 1500));
        assert_eq!(cache.get(Instant::ZERO, v4(1)).map(|e| e.mtu), Some(1000));
    }

    #[test]
    fn report_below_floor_locks_the_mtu() {
        let mut cache = cache(4);
        assert!(cache.learn(Instant::ZERO, v4(1), 0, 1500));
        let entry = cache.get(Instant::ZERO, v4(1)).unwrap();
        assert_eq!((entry.mtu, entry.locked), (552, true));
        let v6: IpAddr = Ipv6Addr::LOCALHOST.into();
        assert!(cache.learn(Instant::ZERO, v6, 1000, 1500));
        let entry = cache.get(Instant::ZERO, v6).unwrap();
        assert_eq!((entry.mtu, entry.locked), (1280, false));
    }

    #[test]
    fn link_mtu_below_floor_is_kept() {
        let mut cache = cache(4);
        assert!(cache.learn(Instant::ZERO, v4(1), 68, 128));
        let entry = cache.get(Instant::ZERO, v4(1)).unwrap();
        assert_eq!((entry.mtu, entry.locked), (128, true));
    }

    #[test]
    fn oldest_entry_is_evicted_at_the_limit() {
        let mut cache = cache(2);
        for last in 1..=3 {
            cache.learn(Instant::from_millis(u64::from(last)), v4(last), 1400, 1500);
        }
        assert_eq!(cache.get(Instant::ZERO, v4(1)), None);
        assert!(cache.get(Instant::ZERO, v4(2)).is_some() && cache.get(Instant::ZERO, v4(3)).is_some());
        assert_eq!(cache.by_age.len(), 2);
    }
}
