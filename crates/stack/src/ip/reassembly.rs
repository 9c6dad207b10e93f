//! Reassembly of fragmented datagrams (RFC 791 §3.2, RFC 815, RFC 8200 §4.5) within a budget of bytes.
//!
//! Overlapping fragments are an attack or come from a broken sender: the whole datagram is discarded
//! (RFC 5722; for IPv4, too, as on Linux). An exact duplicate is ignored. At the limit the oldest datagram is
//! discarded, so that an attacker's fragments do not block other senders until they time out.
//!
//! Memory is allocated only when more datagrams or bytes await reassembly than ever before; freed slots are
//! reused.

use super::entropy::KeyedHash;
use super::fragment_store::{BlockList, FragmentStore, FragmentTree, NO_SLOT};
use crate::handle::LinkId;
use crate::time::Instant;
use crate::wire::checksum::Sum;
use core::net::IpAddr;
use std::collections::HashMap;

/// Bytes charged for a fragment besides its payload: approximately the size of its bookkeeping.
const OVERHEAD: usize = 64;

/// Identifies the fragments of one datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ReassemblyKey {
    pub src: IpAddr,
    pub dst: IpAddr,
    /// The protocol of IPv4; 0 for IPv6, where it does not identify a datagram.
    pub protocol: u8,
    pub ident: u32,
    /// Set only for addresses that are valid on one link only.
    pub link: Option<LinkId>,
}

/// How the headers of the first fragment are turned into those of the datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderRebuild {
    V4,
    /// Removes the fragment header at `header_offset`; `next_header` replaces the byte at
    /// `next_header_offset`.
    V6 {
        header_offset: usize,
        next_header_offset: usize,
        next_header: u8,
    },
}

/// A received fragment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceivedFragment<'b> {
    pub key: ReassemblyKey,
    pub offset: u16,
    pub more_fragments: bool,
    /// All bytes in front of the payload.
    pub headers: &'b [u8],
    pub payload: &'b [u8],
    pub ecn: u8,
    /// True if the datagram was sent to a broadcast or multicast address.
    pub broadcast: bool,
    pub rebuild: HeaderRebuild,
}

/// The fragments received so far of one incomplete datagram (Linux's `frag_queue`).
#[derive(Debug)]
struct FragmentQueue {
    key: ReassemblyKey,
    /// A number that grows from datagram to datagram.
    serial: u64,
    /// When the datagram is discarded.
    expires: Instant,
    /// The adjacent datagrams in the age list of the address family.
    older: u32,
    younger: u32,
    fragments: FragmentTree,
    /// Payload bytes received so far.
    bytes: usize,
    /// The largest end offset of any fragment.
    end_max: usize,
    /// Bytes charged to the budget.
    cost: usize,
    /// Payload bytes of the datagram, known once the last fragment has arrived.
    total_len: Option<usize>,
    /// The headers of the first fragment, once it has arrived, and how to rebuild them.
    headers: Option<(BlockList, HeaderRebuild)>,
    /// One bit for each ECN field value seen.
    ecn_seen: u8,
    broadcast: bool,
}

/// The result of inserting a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReassemblyOutcome {
    /// More fragments are needed.
    Incomplete,
    /// The fragment had been received before.
    Duplicate,
    /// The datagram is complete: the packet from its IP header on.
    Complete(Vec<u8>),
    /// The fragment overlaps another one: the datagram is discarded.
    Overlap,
    /// The fragment is impossible, or contradicts others: the datagram is discarded.
    Malformed,
}

/// A datagram that expired before it was complete.
#[derive(Debug)]
pub(crate) struct ExpiredDatagram {
    pub broadcast: bool,
    /// The first fragment as received, if it has arrived. The caller returns the buffer with
    /// [`Reassembly::recycle`].
    pub first_fragment: Option<Vec<u8>>,
}

/// The datagrams of an address family, linked by age. All have one timeout, so this is also the order of
/// expiry.
#[derive(Clone, Copy, Debug)]
struct AgeList {
    oldest: u32,
    youngest: u32,
}

/// All incomplete datagrams.
#[derive(Debug)]
pub(crate) struct Reassembly {
    slots: Vec<FragmentQueue>,
    free: Vec<u32>,
    /// Only used for lookups, never iterated.
    index: HashMap<ReassemblyKey, u32, KeyedHash>,
    /// For IPv4 and for IPv6.
    age_lists: [AgeList; 2],
    store: FragmentStore,
    hash: KeyedHash,
    next_serial: u64,
    cost: usize,
    cost_limit: usize,
    /// Peak of `cost`.
    cost_peak: usize,
    /// Buffer for the next complete datagram.
    spare: Vec<u8>,
}

fn family(key: &ReassemblyKey) -> usize {
    usize::from(key.src.is_ipv6())
}

impl Reassembly {
    pub(crate) fn new(cost_limit: usize, hash: KeyedHash) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            index: HashMap::with_hasher(hash),
            age_lists: [AgeList { oldest: NO_SLOT, youngest: NO_SLOT }; 2],
            store: FragmentStore::new(),
            hash,
            next_serial: 0,
            cost: 0,
            cost_limit,
            cost_peak: 0,
            spare: Vec::new(),
        }
    }

    /// Inserts a fragment. If it is the first received fragment of its datagram, the datagram is discarded at
    /// `expires`, which must not be before the expiry of another datagram of the family.
    pub(crate) fn insert(&mut self, fragment: &ReceivedFragment<'_>, expires: Instant) -> ReassemblyOutcome {
        let len = fragment.payload.len();
        if len == 0 || (fragment.more_fragments && !len.is_multiple_of(8)) {
            return ReassemblyOutcome::Malformed;
        }
        let slot = match self.index.get(&fragment.key) {
            Some(&slot) => slot,
            None => self.create_queue(fragment, expires),
        };
        let queue = &mut self.slots[slot as usize];
        let cost_before = queue.cost;
        let result = queue.insert(fragment, &mut self.store, &self.hash);
        self.cost += queue.cost - cost_before;
        self.cost_peak = self.cost_peak.max(self.cost);
        match result {
            Ok(()) if queue.is_complete() => match self.finish(slot) {
                Some(packet) => ReassemblyOutcome::Complete(packet),
                None => ReassemblyOutcome::Malformed,
            },
            Ok(()) => ReassemblyOutcome::Incomplete,
            Err(FragmentRejection::Duplicate) => ReassemblyOutcome::Duplicate,
            Err(FragmentRejection::Overlap) => {
                self.remove(slot);
                ReassemblyOutcome::Overlap
            }
            Err(FragmentRejection::Contradiction) => {
                self.remove(slot);
                ReassemblyOutcome::Malformed
            }
        }
    }

    fn create_queue(&mut self, fragment: &ReceivedFragment<'_>, expires: Instant) -> u32 {
        let list = &mut self.age_lists[family(&fragment.key)];
        let queue = FragmentQueue {
            key: fragment.key,
            serial: self.next_serial,
            expires,
            older: list.youngest,
            younger: NO_SLOT,
            fragments: FragmentTree::EMPTY,
            bytes: 0,
            end_max: 0,
            cost: OVERHEAD,
            total_len: None,
            headers: None,
            ecn_seen: 0,
            broadcast: fragment.broadcast,
        };
        self.next_serial += 1;
        self.cost += queue.cost;
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = queue;
                slot
            }
            None => {
                self.slots.push(queue);
                // Cannot truncate: each datagram costs at least 64 bytes of a budget below 2^32.
                (self.slots.len() - 1) as u32
            }
        };
        match core::mem::replace(&mut list.youngest, slot) {
            NO_SLOT => list.oldest = slot,
            previous => self.slots[previous as usize].younger = slot,
        }
        self.index.insert(fragment.key, slot);
        slot
    }

    /// Removes a datagram and frees its memory.
    fn remove(&mut self, slot: u32) {
        let queue = &self.slots[slot as usize];
        self.index.remove(&queue.key);
        self.cost -= queue.cost;
        self.store.free_all(queue.fragments);
        if let Some((headers, _)) = queue.headers {
            self.store.free(headers);
        }
        let (family, older, younger) = (family(&queue.key), queue.older, queue.younger);
        match older {
            NO_SLOT => self.age_lists[family].oldest = younger,
            _ => self.slots[older as usize].younger = younger,
        }
        match younger {
            NO_SLOT => self.age_lists[family].youngest = older,
            _ => self.slots[younger as usize].older = older,
        }
        self.free.push(slot);
    }

    /// Returns the oldest datagram of each family.
    fn oldest(&self) -> impl Iterator<Item = (u32, &FragmentQueue)> {
        let slots = self.age_lists.iter().map(|list| list.oldest).filter(|&slot| slot != NO_SLOT);
        slots.map(|slot| (slot, &self.slots[slot as usize]))
    }

    /// Returns the bytes charged now, and their peak. The peak may exceed the budget by one fragment.
    pub(crate) fn memory_charged(&self) -> (usize, usize) {
        (self.cost, self.cost_peak)
    }

    /// Returns when [`Reassembly::expire`] must be called next.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.oldest().map(|(_, queue)| queue.expires).min()
    }

    /// Discards one expired datagram. The caller repeats the call until it returns `None`.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<ExpiredDatagram> {
        let (slot, queue) = self.oldest().find(|(_, queue)| queue.expires <= now)?;
        let broadcast = queue.broadcast;
        let mut packet = core::mem::take(&mut self.spare);
        packet.clear();
        let queue = &self.slots[slot as usize];
        let first = match queue.headers {
            Some((headers, _)) => {
                self.store.read(headers, &mut packet);
                self.store.read_first(queue.fragments, &mut packet);
                Some(packet)
            }
            None => {
                self.spare = packet;
                None
            }
        };
        self.remove(slot);
        Some(ExpiredDatagram { broadcast, first_fragment: first })
    }

    /// Discards the oldest datagram if the budget is exceeded, and returns whether one was discarded. The
    /// caller repeats the call until it returns false.
    pub(crate) fn evict(&mut self) -> bool {
        if self.cost <= self.cost_limit {
            return false;
        }
        let Some((slot, _)) = self.oldest().min_by_key(|(_, queue)| queue.serial) else { return false };
        self.remove(slot);
        true
    }

    /// Reassembles a complete datagram and removes it. Returns `None` if it is too long or its ECN fields
    /// contradict each other.
    fn finish(&mut self, slot: u32) -> Option<Vec<u8>> {
        let mut packet = core::mem::take(&mut self.spare);
        packet.clear();
        let built = self.slots[slot as usize].reassemble(&self.store, &mut packet);
        self.remove(slot);
        if built.is_none() {
            self.spare = packet;
            return None;
        }
        Some(packet)
    }

    /// Takes a buffer back for reuse.
    pub(crate) fn recycle(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() > self.spare.capacity() {
            self.spare = buffer;
        }
    }
}

/// Why a fragment is not inserted.
enum FragmentRejection {
    Duplicate,
    Overlap,
    Contradiction,
}

impl FragmentQueue {
    fn insert(
        &mut self,
        fragment: &ReceivedFragment<'_>,
        store: &mut FragmentStore,
        hash: &KeyedHash,
    ) -> Result<(), FragmentRejection> {
        let start = usize::from(fragment.offset);
        let end = start + fragment.payload.len();
        // The fragment contradicts a known total length, or is a last fragment that ends before another
        // fragment.
        let contradiction = match (self.total_len, fragment.more_fragments) {
            (Some(total), true) => end > total,
            (Some(total), false) => end != total,
            (None, true) => false,
            (None, false) => end < self.end_max,
        };
        if contradiction {
            return Err(FragmentRejection::Contradiction);
        }
        let (previous, next) = store.find_adjacent(self.fragments, start);
        if let Some(previous) = previous {
            if end <= previous.end {
                return Err(FragmentRejection::Duplicate);
            }
            if start < previous.end {
                return Err(FragmentRejection::Overlap);
            }
        }
        if next.is_some_and(|next| next < end) {
            return Err(FragmentRejection::Overlap);
        }
        if !fragment.more_fragments {
            self.total_len = Some(end);
        }
        if fragment.offset == 0 {
            self.headers = Some((store.store(fragment.headers), fragment.rebuild));
            self.cost += fragment.headers.len();
        }
        self.ecn_seen |= 1 << (fragment.ecn & 3);
        self.bytes += fragment.payload.len();
        self.end_max = self.end_max.max(end);
        self.cost += fragment.payload.len() + OVERHEAD;
        let priority = hash.of((self.serial, fragment.offset)) as u32;
        self.fragments = store.insert(self.fragments, fragment.offset, fragment.payload, priority);
        Ok(())
    }

    /// Fragments do not overlap, so the datagram is complete when the received bytes equal its length.
    fn is_complete(&self) -> bool {
        self.total_len == Some(self.bytes)
    }

    /// Returns the ECN field of the datagram (RFC 3168 §5.3): CE in one fragment is CE in the datagram;
    /// not-ECT combined with any other value is invalid.
    fn ecn(&self) -> Option<u8> {
        const NOT_ECT: u8 = 1;
        const CE: u8 = 1 << 3;
        match self.ecn_seen {
            NOT_ECT => Some(0),
            seen if seen & NOT_ECT != 0 => None,
            seen if seen & CE != 0 => Some(3),
            // ECT(0) and ECT(1) are equivalent to a receiver.
            seen => Some(if seen & 2 != 0 { 1 } else { 2 }),
        }
    }

    fn reassemble(&self, store: &FragmentStore, packet: &mut Vec<u8>) -> Option<()> {
        let (headers, rebuild) = self.headers?;
        let ecn = self.ecn()?;
        store.read(headers, packet);
        match rebuild {
            HeaderRebuild::V4 => {
                let total = u16::try_from(packet.len() + self.bytes).ok()?;
                write_v4_header(packet, total, ecn)?;
            }
            HeaderRebuild::V6 { header_offset, next_header_offset, next_header } => {
                packet.get(..header_offset)?;
                packet.truncate(header_offset);
                let payload_len = u16::try_from(packet.len().checked_sub(40)? + self.bytes).ok()?;
                *packet.get_mut(next_header_offset)? = next_header;
                packet.get_mut(4..6)?.copy_from_slice(&payload_len.to_be_bytes());
                let second = packet.get_mut(1)?;
                *second = *second & 0xcf | ecn << 4;
            }
        }
        store.read_all(self.fragments, packet);
        Some(())
    }
}

/// Turns the header of a first fragment into the header of the datagram.
fn write_v4_header(header: &mut [u8], total: u16, ecn: u8) -> Option<()> {
    header.get_mut(2..4)?.copy_from_slice(&total.to_be_bytes());
    header.get_mut(6..8)?.fill(0);
    header.get_mut(10..12)?.fill(0);
    header[1] = header[1] & 0xfc | ecn;
    let checksum = Sum::of(header).finish();
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    Some(())
}

#[cfg(test)]
#[path = "reassembly_tests.rs"]
mod tests;
