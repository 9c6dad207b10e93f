//! The table of tracked connections, built for millions of them: 40 bytes for a connection over IPv4, and an
//! index of 8 bytes per place.
//!
//! The index consists of many small hash tables with linear probing, which grow one by one, so that no single
//! packet waits for the growth of the whole index. A place has 32 bits of the hash, so that growing and most
//! failed comparisons do not touch the connections.

use ginnel_stack::prefetch::prefetch;

/// Number of the index's tables.
const TABLES: usize = 256;
/// Places of a table when its first connection is added.
const PLACES_MIN: usize = 8;
/// Connections in one allocation.
const CHUNK_FLOWS: usize = 1024;
/// Stands for no connection, no record and no request.
pub(crate) const NONE: u32 = u32::MAX;

/// Addresses and ports of a connection.
pub(crate) trait FlowKey: Copy + Eq + Default {
    /// Returns a hash, keyed by `seed`.
    fn hash(&self, seed: u64) -> u64;
}

/// Addresses and ports of a connection over IPv4: client, server, client's port and server's port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyV4(pub(crate) u32, pub(crate) u32, pub(crate) [u16; 2]);

/// Addresses and ports of a connection over IPv6. The addresses are words, which align the key to 4 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyV6(pub(crate) [u32; 4], pub(crate) [u32; 4], pub(crate) [u16; 2]);

/// Multiplies to 128 bits and folds the halves, which mixes all bits of both factors.
#[inline(always)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}

const MIX: [u64; 2] = [0x9e37_79b9_7f4a_7c15, 0xd1b5_4a32_d192_ed03];

fn ports_word(ports: [u16; 2]) -> u64 {
    u64::from(ports[0]) << 16 | u64::from(ports[1])
}

impl FlowKey for KeyV4 {
    #[inline(always)]
    fn hash(&self, seed: u64) -> u64 {
        let addresses = u64::from(self.0) << 32 | u64::from(self.1);
        fold(fold(addresses ^ seed, MIX[0]) ^ ports_word(self.2) ^ seed.rotate_left(32), MIX[1])
    }
}

impl FlowKey for KeyV6 {
    fn hash(&self, seed: u64) -> u64 {
        let words = self.0.chunks_exact(2).chain(self.1.chunks_exact(2));
        let addresses = words.fold(seed, |hash, w| {
            let word = u64::from(w[0]) << 32 | u64::from(w[1]);
            fold(hash ^ word, MIX[0])
        });
        fold(addresses ^ ports_word(self.2) ^ seed.rotate_left(32), MIX[1])
    }
}

/// The state of a connection: 28 bytes. Indexes of arrays select the direction: 0 for requests, 1 for
/// responses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tracking {
    /// Sequence number of the next byte.
    pub(crate) next: [u32; 2],
    /// Last outstanding request in its pool, or [`NONE`].
    pub(crate) outstanding: u32,
    /// Record with partial messages and segments that arrived early, or [`NONE`]. Of a free entry: the next
    /// free one.
    pub(crate) streams: u32,
    /// Time of the last packet in seconds.
    pub(crate) seen: u32,
    /// Flags of [`crate::connection::flag`]. A free entry has none.
    pub(crate) flags: u16,
    /// Index of the protocol's rule.
    pub(crate) rule: u8,
    /// Failed attempts to find the beginning of a message.
    pub(crate) failures: u8,
    /// False if the entry is free.
    pub(crate) is_used: bool,
}

/// A connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Flow<K> {
    pub(crate) key: K,
    pub(crate) tracking: Tracking,
}

/// One table of the index. A place has the low half of the hash above the index of the connection plus 1; 0
/// is a free place.
#[derive(Debug, Default)]
struct Places {
    places: Vec<u64>,
    used: usize,
}

impl Places {
    #[inline(always)]
    fn home(&self, tag: u32) -> usize {
        ((u64::from(tag) * self.places.len() as u64) >> 32) as usize
    }

    #[inline(always)]
    fn following(&self, at: usize) -> usize {
        if at + 1 == self.places.len() { 0 } else { at + 1 }
    }

    /// Returns the position of the place that satisfies `is_wanted`, or `None`.
    #[inline(always)]
    fn find(&self, tag: u32, mut is_wanted: impl FnMut(u32) -> bool) -> Option<usize> {
        if self.places.is_empty() {
            return None;
        }
        let mut at = self.home(tag);
        loop {
            let place = self.places[at];
            if place == 0 {
                return None;
            }
            if (place >> 32) as u32 == tag && is_wanted(place as u32 - 1) {
                return Some(at);
            }
            at = self.following(at);
        }
    }

    fn add(&mut self, tag: u32, index: u32) {
        // At most three quarters are used; growing by half leaves at least half of them used.
        if (self.used + 1) * 4 > self.places.len() * 3 {
            let len = (self.places.len() + self.places.len() / 2).max(PLACES_MIN);
            let old = core::mem::replace(&mut self.places, vec![0; len]);
            old.into_iter().filter(|place| *place != 0).for_each(|place| self.put(place));
        }
        self.used += 1;
        self.put(u64::from(tag) << 32 | u64::from(index + 1));
    }

    fn put(&mut self, place: u64) {
        let mut at = self.home((place >> 32) as u32);
        while self.places[at] != 0 {
            at = self.following(at);
        }
        self.places[at] = place;
    }

    /// Frees a place, and moves later ones that it has displaced.
    fn remove(&mut self, mut hole: usize) {
        let len = self.places.len();
        let distance = |from: usize, to: usize| if to >= from { to - from } else { to + len - from };
        self.used -= 1;
        let mut at = hole;
        loop {
            at = self.following(at);
            let place = self.places[at];
            if place == 0 {
                break;
            }
            if distance(self.home((place >> 32) as u32), at) >= distance(hole, at) {
                self.places[hole] = place;
                hole = at;
            }
        }
        self.places[hole] = 0;
    }
}

/// The connections of one IP version.
#[derive(Debug)]
pub(crate) struct FlowTable<K> {
    seed: u64,
    index: Box<[Places]>,
    chunks: Vec<Box<[Flow<K>]>>,
    /// First free entry, or [`NONE`].
    free: u32,
    used: usize,
    /// The entry that [`FlowTable::next_to_examine`] returns next.
    cursor: u32,
}

impl<K: FlowKey> FlowTable<K> {
    pub(crate) fn new(seed: u64) -> Self {
        let index = (0..TABLES).map(|_| Places::default()).collect();
        Self { seed, index, chunks: Vec::new(), free: NONE, used: 0, cursor: 0 }
    }

    /// Returns the number of connections.
    pub(crate) fn len(&self) -> usize {
        self.used
    }

    #[inline(always)]
    pub(crate) fn hash(&self, key: &K) -> u64 {
        key.hash(self.seed)
    }

    #[inline(always)]
    fn table_of(hash: u64) -> usize {
        // The upper half selects the table, the lower half the place in it.
        (hash >> 32) as usize % TABLES
    }

    /// Prefetches the place of a connection.
    #[inline(always)]
    pub(crate) fn prefetch_place(&self, hash: u64) {
        let table = &self.index[Self::table_of(hash)];
        if let Some(place) = table.places.get(table.home(hash as u32)) {
            prefetch(place);
        }
    }

    /// Prefetches the connection whose hash this probably is.
    #[inline(always)]
    pub(crate) fn prefetch_flow(&self, hash: u64) {
        let mut candidate = None;
        self.index[Self::table_of(hash)].find(hash as u32, |index| {
            candidate = Some(index);
            true
        });
        if let Some(index) = candidate {
            prefetch(self.get(index));
        }
    }

    #[inline(always)]
    pub(crate) fn find(&self, hash: u64, key: &K) -> Option<u32> {
        let mut found = NONE;
        self.index[Self::table_of(hash)].find(hash as u32, |index| {
            found = index;
            self.get(index).key == *key
        })?;
        Some(found)
    }

    #[inline(always)]
    pub(crate) fn get(&self, index: u32) -> &Flow<K> {
        &self.chunks[index as usize / CHUNK_FLOWS][index as usize % CHUNK_FLOWS]
    }

    #[inline(always)]
    pub(crate) fn get_mut(&mut self, index: u32) -> &mut Flow<K> {
        &mut self.chunks[index as usize / CHUNK_FLOWS][index as usize % CHUNK_FLOWS]
    }

    /// Adds a connection that the table does not have.
    pub(crate) fn add(&mut self, hash: u64, key: K, tracking: Tracking) -> u32 {
        if self.free == NONE {
            let first = (self.chunks.len() * CHUNK_FLOWS) as u32;
            let mut chunk = vec![Flow::default(); CHUNK_FLOWS].into_boxed_slice();
            for (flow, next) in chunk.iter_mut().zip(first + 1..) {
                flow.tracking.streams = next;
            }
            chunk[CHUNK_FLOWS - 1].tracking.streams = NONE;
            self.chunks.push(chunk);
            self.free = first;
        }
        let index = self.free;
        self.free = self.get(index).tracking.streams;
        *self.get_mut(index) = Flow { key, tracking: Tracking { is_used: true, ..tracking } };
        self.index[Self::table_of(hash)].add(hash as u32, index);
        self.used += 1;
        index
    }

    /// Removes a connection.
    pub(crate) fn remove(&mut self, index: u32) {
        let hash = self.hash(&self.get(index).key);
        let table = &mut self.index[Self::table_of(hash)];
        if let Some(at) = table.find(hash as u32, |other| other == index) {
            table.remove(at);
            let free = self.free;
            *self.get_mut(index) =
                Flow { key: K::default(), tracking: Tracking { streams: free, ..Tracking::default() } };
            self.free = index;
            self.used -= 1;
        }
    }

    /// Returns each entry in turn, or `None` if the entry is free or the table has none.
    pub(crate) fn next_to_examine(&mut self) -> Option<u32> {
        let entries = (self.chunks.len() * CHUNK_FLOWS) as u32;
        if entries == 0 {
            return None;
        }
        let index = self.cursor % entries;
        self.cursor = index + 1;
        Some(index).filter(|index| self.get(*index).tracking.is_used)
    }

    /// Returns the indexes of all connections.
    pub(crate) fn all(&self) -> Vec<u32> {
        let entries = (self.chunks.len() * CHUNK_FLOWS) as u32;
        (0..entries).filter(|index| self.get(*index).tracking.is_used).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn entries_are_small() {
        assert_eq!((size_of::<Flow<KeyV4>>(), size_of::<Flow<KeyV6>>()), (40, 64));
    }

    /// Right after the index has grown, it is largest.
    #[test]
    fn tracked_ipv4_flow_takes_at_most_64_bytes() {
        let mut table = FlowTable::new(5);
        for n in 0..300_000 {
            let key = KeyV4(n, 1, [40_000, 80]);
            table.add(table.hash(&key), key, Tracking::default());
            if n >= 50_000 && n % 1000 == 0 {
                let places: usize = table.index.iter().map(|table| table.places.capacity() * 8).sum();
                let flows = table.chunks.len() * CHUNK_FLOWS * size_of::<Flow<KeyV4>>();
                let fixed = size_of_val(&*table.index) + table.chunks.capacity() * 16;
                let bytes = places + flows + fixed;
                assert!(bytes <= 64 * table.len(), "{bytes} bytes for {}", table.len());
            }
        }
    }

    proptest! {
        #[test]
        fn table_equals_a_map(operations in proptest::collection::vec((any::<bool>(), 0u32..60), 0..400), seed in any::<u64>()) {
            let (mut table, mut map) = (FlowTable::new(seed), HashMap::new());
            for (adds, n) in operations {
                let key = KeyV4(n, n / 7, [n as u16, 80]);
                let hash = table.hash(&key);
                prop_assert_eq!(table.find(hash, &key), map.get(&n).copied());
                match (adds, map.get(&n).copied()) {
                    (true, None) => { map.insert(n, table.add(hash, key, Tracking::default())); }
                    (false, Some(index)) => { table.remove(index); map.remove(&n); }
                    _ => {}
                }
                prop_assert_eq!(table.len(), map.len());
                prop_assert_eq!(table.all().len(), map.len());
            }
        }
    }
}
