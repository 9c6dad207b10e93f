//! Putting fragments together (RFC 791 §3.2, RFC 815, RFC 8200 §4.5), within a budget of bytes.
//!
//! Fragments that overlap are an attack or a broken sender: the whole datagram goes (RFC 5722; IPv4 the same, as on Linux). An exact
//! duplicate is ignored. At the limit the oldest datagram goes, so that an attacker's leftovers do not keep others out for
//! half a minute.
//!
//! Nothing is allocated but to have more datagrams or bytes wait than ever before: everything is in slots that are used again.

use super::entropy::KeyedHash;
use super::fragment_store::{Chain, FragmentStore, NONE, Pieces};
use crate::handle::LinkId;
use crate::time::Instant;
use crate::wire::checksum::Sum;
use core::net::IpAddr;
use std::collections::HashMap;

/// What a fragment is charged besides its bytes: about what the bookkeeping takes.
const OVERHEAD: usize = 64;

/// What fragments of one datagram have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub src: IpAddr,
    pub dst: IpAddr,
    /// IPv4's protocol; 0 for IPv6, which identifies without it.
    pub protocol: u8,
    pub ident: u32,
    /// Only for addresses that mean different hosts on different links.
    pub link: Option<LinkId>,
}

/// How to turn the headers of the first fragment into those of the datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rebuild {
    V4,
    /// Take the fragment header at `at` out; the next-header byte at `announced_at` becomes its.
    V6 {
        at: usize,
        announced_at: usize,
        next_header: u8,
    },
}

/// One fragment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<'b> {
    pub key: Key,
    pub offset: u16,
    pub more: bool,
    /// Everything in front of the payload.
    pub headers: &'b [u8],
    pub payload: &'b [u8],
    pub ecn: u8,
    /// The datagram went to a broadcast or multicast address.
    pub broadcast: bool,
    pub rebuild: Rebuild,
}

/// A datagram of which not everything is here.
#[derive(Debug)]
struct Partial {
    key: Key,
    /// Grows from datagram to datagram.
    number: u64,
    /// When it is given up.
    until: Instant,
    /// Neighbours by age among those of its family.
    older: u32,
    younger: u32,
    pieces: Pieces,
    /// Payload bytes in `pieces`.
    bytes: usize,
    /// Where the last of them ends.
    reach: usize,
    /// What it is charged.
    cost: usize,
    /// Payload bytes of the whole, once the last fragment is here.
    total: Option<usize>,
    /// Headers of the first fragment, once it is here, and how to rebuild them.
    headers: Option<(Chain, Rebuild)>,
    /// One bit for each ECN field seen.
    ecn_seen: u8,
    broadcast: bool,
}

/// What came of a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// More are needed.
    Waiting,
    /// It was here already.
    Duplicate,
    /// That was the last one: the packet from its IP header on.
    Complete(Vec<u8>),
    /// It overlaps another: the datagram is given up.
    Overlap,
    /// It is impossible, or contradicts the others: what there was of the datagram is given up.
    Malformed,
}

/// What is left of a datagram whose time is over.
#[derive(Debug)]
pub(crate) struct Expired {
    pub broadcast: bool,
    /// The first fragment as it came, if it did; to be given back with [`Reassembly::recycle`].
    pub first: Option<Vec<u8>>,
}

/// The datagrams of a family by age. Each waits for the same time, so this is also the order in which they expire.
#[derive(Clone, Copy, Debug)]
struct Ages {
    oldest: u32,
    youngest: u32,
}

/// All datagrams in the making.
#[derive(Debug)]
pub(crate) struct Reassembly {
    slots: Vec<Partial>,
    free: Vec<u32>,
    /// Only looked up, never iterated.
    index: HashMap<Key, u32, KeyedHash>,
    /// IPv4, IPv6.
    ages: [Ages; 2],
    store: FragmentStore,
    hash: KeyedHash,
    next_number: u64,
    cost: usize,
    cost_max: usize,
    /// Most that was ever charged.
    cost_most: usize,
    /// Buffer for the next complete datagram.
    spare: Vec<u8>,
}

fn family(key: &Key) -> usize {
    usize::from(key.src.is_ipv6())
}

impl Reassembly {
    pub(crate) fn new(cost_max: usize, hash: KeyedHash) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            index: HashMap::with_hasher(hash),
            ages: [Ages { oldest: NONE, youngest: NONE }; 2],
            store: FragmentStore::new(),
            hash,
            next_number: 0,
            cost: 0,
            cost_max,
            cost_most: 0,
            spare: Vec::new(),
        }
    }

    /// Takes one fragment. If it is the first one seen of its datagram, that has time `until` then, which is never before what was said of another
    /// of the family.
    pub(crate) fn insert(&mut self, piece: &Piece<'_>, until: Instant) -> Outcome {
        let len = piece.payload.len();
        if len == 0 || (piece.more && !len.is_multiple_of(8)) {
            return Outcome::Malformed;
        }
        let slot = match self.index.get(&piece.key) {
            Some(&slot) => slot,
            None => self.begin(piece, until),
        };
        let partial = &mut self.slots[slot as usize];
        let cost_before = partial.cost;
        let result = partial.add(piece, &mut self.store, &self.hash);
        self.cost += partial.cost - cost_before;
        self.cost_most = self.cost_most.max(self.cost);
        match result {
            Ok(()) if partial.is_complete() => match self.finish(slot) {
                Some(packet) => Outcome::Complete(packet),
                None => Outcome::Malformed,
            },
            Ok(()) => Outcome::Waiting,
            Err(Refused::Duplicate) => Outcome::Duplicate,
            Err(Refused::Overlap) => {
                self.remove(slot);
                Outcome::Overlap
            }
            Err(Refused::Contradiction) => {
                self.remove(slot);
                Outcome::Malformed
            }
        }
    }

    fn begin(&mut self, piece: &Piece<'_>, until: Instant) -> u32 {
        let ages = &mut self.ages[family(&piece.key)];
        let partial = Partial {
            key: piece.key,
            number: self.next_number,
            until,
            older: ages.youngest,
            younger: NONE,
            pieces: Pieces::EMPTY,
            bytes: 0,
            reach: 0,
            cost: OVERHEAD,
            total: None,
            headers: None,
            ecn_seen: 0,
            broadcast: piece.broadcast,
        };
        self.next_number += 1;
        self.cost += partial.cost;
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = partial;
                slot
            }
            None => {
                self.slots.push(partial);
                // Cannot truncate: each costs 64 bytes of a budget below 2^32.
                (self.slots.len() - 1) as u32
            }
        };
        match core::mem::replace(&mut ages.youngest, slot) {
            NONE => ages.oldest = slot,
            before => self.slots[before as usize].younger = slot,
        }
        self.index.insert(piece.key, slot);
        slot
    }

    /// Takes a datagram out, and all its memory back.
    fn remove(&mut self, slot: u32) {
        let partial = &self.slots[slot as usize];
        self.index.remove(&partial.key);
        self.cost -= partial.cost;
        self.store.forget_all(partial.pieces);
        if let Some((headers, _)) = partial.headers {
            self.store.forget(headers);
        }
        let (family, older, younger) = (family(&partial.key), partial.older, partial.younger);
        match older {
            NONE => self.ages[family].oldest = younger,
            _ => self.slots[older as usize].younger = younger,
        }
        match younger {
            NONE => self.ages[family].youngest = older,
            _ => self.slots[younger as usize].older = older,
        }
        self.free.push(slot);
    }

    /// The oldest of each family.
    fn oldest(&self) -> impl Iterator<Item = (u32, &Partial)> {
        let slots = self.ages.iter().map(|ages| ages.oldest).filter(|&slot| slot != NONE);
        slots.map(|slot| (slot, &self.slots[slot as usize]))
    }

    /// What is charged now, and the most that ever was: for a moment more than the budget, by one fragment.
    pub(crate) fn charged(&self) -> (usize, usize) {
        (self.cost, self.cost_most)
    }

    /// When [`Reassembly::expire`] will have something to do.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.oldest().map(|(_, partial)| partial.until).min()
    }

    /// Gives up a datagram whose time is over; to be repeated.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Expired> {
        let (slot, partial) = self.oldest().find(|(_, partial)| partial.until <= now)?;
        let broadcast = partial.broadcast;
        let mut packet = core::mem::take(&mut self.spare);
        packet.clear();
        let partial = &self.slots[slot as usize];
        let first = match partial.headers {
            Some((headers, _)) => {
                self.store.read(headers, &mut packet);
                self.store.read_first(partial.pieces, &mut packet);
                Some(packet)
            }
            None => {
                self.spare = packet;
                None
            }
        };
        self.remove(slot);
        Some(Expired { broadcast, first })
    }

    /// Gives the oldest datagram up if the budget is exceeded, and returns whether it was; to be repeated.
    pub(crate) fn evict(&mut self) -> bool {
        if self.cost <= self.cost_max {
            return false;
        }
        let Some((slot, _)) = self.oldest().min_by_key(|(_, partial)| partial.number) else { return false };
        self.remove(slot);
        true
    }

    /// Puts a complete datagram together. `None` if it would be too long or its ECN fields contradict each other.
    fn finish(&mut self, slot: u32) -> Option<Vec<u8>> {
        let mut packet = core::mem::take(&mut self.spare);
        packet.clear();
        let built = self.slots[slot as usize].build(&self.store, &mut packet);
        self.remove(slot);
        if built.is_none() {
            self.spare = packet;
            return None;
        }
        Some(packet)
    }

    /// Takes a buffer back.
    pub(crate) fn recycle(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() > self.spare.capacity() {
            self.spare = buffer;
        }
    }
}

/// Why a piece does not fit.
enum Refused {
    Duplicate,
    Overlap,
    Contradiction,
}

impl Partial {
    fn add(&mut self, piece: &Piece<'_>, store: &mut FragmentStore, hash: &KeyedHash) -> Result<(), Refused> {
        let start = usize::from(piece.offset);
        let end = start + piece.payload.len();
        // Two different ends, or something beyond the end.
        let contradiction = match (self.total, piece.more) {
            (Some(total), true) => end > total,
            (Some(total), false) => end != total,
            (None, true) => false,
            (None, false) => end < self.reach,
        };
        if contradiction {
            return Err(Refused::Contradiction);
        }
        let (before, behind) = store.around(self.pieces, start);
        if let Some(before) = before {
            if end <= before.end {
                return Err(Refused::Duplicate);
            }
            if start < before.end {
                return Err(Refused::Overlap);
            }
        }
        if behind.is_some_and(|behind| behind < end) {
            return Err(Refused::Overlap);
        }
        if !piece.more {
            self.total = Some(end);
        }
        if piece.offset == 0 {
            self.headers = Some((store.keep(piece.headers), piece.rebuild));
            self.cost += piece.headers.len();
        }
        self.ecn_seen |= 1 << (piece.ecn & 3);
        self.bytes += piece.payload.len();
        self.reach = self.reach.max(end);
        self.cost += piece.payload.len() + OVERHEAD;
        let priority = hash.of((self.number, piece.offset)) as u32;
        self.pieces = store.insert(self.pieces, piece.offset, piece.payload, priority);
        Ok(())
    }

    /// Without overlaps, as many bytes as the whole has are the whole.
    fn is_complete(&self) -> bool {
        self.total == Some(self.bytes)
    }

    /// RFC 3168 §5.3: congestion experienced by one fragment is experienced by all; not-ECT beside anything else is impossible.
    fn ecn(&self) -> Option<u8> {
        const NOT_ECT: u8 = 1;
        const CE: u8 = 1 << 3;
        match self.ecn_seen {
            NOT_ECT => Some(0),
            seen if seen & NOT_ECT != 0 => None,
            seen if seen & CE != 0 => Some(3),
            // ECT(0) and ECT(1) mean the same to a receiver.
            seen => Some(if seen & 2 != 0 { 1 } else { 2 }),
        }
    }

    fn build(&self, store: &FragmentStore, packet: &mut Vec<u8>) -> Option<()> {
        let (headers, rebuild) = self.headers?;
        let ecn = self.ecn()?;
        store.read(headers, packet);
        match rebuild {
            Rebuild::V4 => {
                let total = u16::try_from(packet.len() + self.bytes).ok()?;
                write_v4_header(packet, total, ecn)?;
            }
            Rebuild::V6 { at, announced_at, next_header } => {
                packet.get(..at)?;
                packet.truncate(at);
                let payload_len = u16::try_from(packet.len().checked_sub(40)? + self.bytes).ok()?;
                *packet.get_mut(announced_at)? = next_header;
                packet.get_mut(4..6)?.copy_from_slice(&payload_len.to_be_bytes());
                let second = packet.get_mut(1)?;
                *second = *second & 0xcf | ecn << 4;
            }
        }
        store.read_all(self.pieces, packet);
        Some(())
    }
}

/// Makes the header of a first fragment that of the whole.
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
