//! Putting fragments together (RFC 791 §3.2, RFC 815, RFC 8200 §4.5), within a budget of bytes.
//!
//! Fragments that overlap are an attack or a broken sender: the whole datagram goes (RFC 5722; IPv4 the same, as on Linux). An exact
//! duplicate is ignored. At the limit the oldest datagram goes, so that an attacker's leftovers do not keep others out for
//! half a minute.

use crate::handle::LinkId;
use crate::wire::checksum::Sum;
use core::net::IpAddr;
use std::collections::BTreeMap;

/// What a fragment is charged besides its bytes: about what the bookkeeping takes.
const OVERHEAD: usize = 64;

/// What fragments of one datagram have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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
    pieces: BTreeMap<u16, Box<[u8]>>,
    /// Payload bytes in `pieces`.
    bytes: usize,
    /// What it is charged.
    cost: usize,
    /// Payload bytes of the whole, once the last fragment is here.
    total: Option<usize>,
    /// Headers of the first fragment and how to rebuild them.
    headers: Option<(Box<[u8]>, Rebuild)>,
    /// One bit for each ECN field seen.
    ecn_seen: u8,
    broadcast: bool,
}

/// What came of a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The first one seen of its datagram: a deadline is needed for this id.
    Begun(u64),
    /// More are needed.
    Waiting,
    /// It was here already.
    Duplicate,
    /// That was the last one: the packet from its IP header on. The id's deadline is void.
    Complete(u64, Vec<u8>),
    /// It overlaps another: the datagram is given up.
    Overlap(u64),
    /// It is impossible, or contradicts the others. If it gave a datagram up, its id.
    Malformed(Option<u64>),
}

/// What is left of a datagram that was given up.
#[derive(Debug)]
pub(crate) struct Abandoned {
    pub broadcast: bool,
    /// The first fragment as it came, if it did.
    pub first: Option<Vec<u8>>,
}

/// All datagrams in the making.
#[derive(Debug)]
pub(crate) struct Reassembly {
    /// By age.
    partials: BTreeMap<u64, Partial>,
    index: BTreeMap<Key, u64>,
    next_id: u64,
    cost: usize,
    cost_max: usize,
    /// Buffer for the next complete datagram.
    spare: Vec<u8>,
}

impl Reassembly {
    pub(crate) fn new(cost_max: usize) -> Self {
        Self {
            partials: BTreeMap::new(),
            index: BTreeMap::new(),
            next_id: 0,
            cost: 0,
            cost_max,
            spare: Vec::new(),
        }
    }

    /// Takes one fragment.
    pub(crate) fn insert(&mut self, piece: &Piece<'_>) -> Outcome {
        let len = piece.payload.len();
        if len == 0 || (piece.more && !len.is_multiple_of(8)) {
            return Outcome::Malformed(None);
        }
        let (id, begun) = match self.index.get(&piece.key) {
            Some(&id) => (id, false),
            None => (self.begin(piece), true),
        };
        let Some(partial) = self.partials.get_mut(&id) else { return Outcome::Malformed(None) };
        let cost_before = partial.cost;
        let result = partial.add(piece);
        self.cost += partial.cost - cost_before;
        match result {
            Ok(()) if partial.is_complete() => match self.finish(id) {
                Some(packet) => Outcome::Complete(id, packet),
                None => Outcome::Malformed(Some(id)),
            },
            Ok(()) if begun => Outcome::Begun(id),
            Ok(()) => Outcome::Waiting,
            Err(Refused::Duplicate) => Outcome::Duplicate,
            Err(Refused::Overlap) => {
                self.abandon(id);
                Outcome::Overlap(id)
            }
            Err(Refused::Contradiction) => {
                self.abandon(id);
                Outcome::Malformed(Some(id))
            }
        }
    }

    fn begin(&mut self, piece: &Piece<'_>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let partial = Partial {
            key: piece.key,
            pieces: BTreeMap::new(),
            bytes: 0,
            cost: OVERHEAD,
            total: None,
            headers: None,
            ecn_seen: 0,
            broadcast: piece.broadcast,
        };
        self.cost += partial.cost;
        self.partials.insert(id, partial);
        self.index.insert(piece.key, id);
        id
    }

    /// Gives a datagram up.
    pub(crate) fn abandon(&mut self, id: u64) -> Option<Abandoned> {
        let partial = self.partials.remove(&id)?;
        self.index.remove(&partial.key);
        self.cost -= partial.cost;
        let first = partial.headers.as_ref().zip(partial.pieces.get(&0));
        let first = first.map(|((headers, _), payload)| [&headers[..], &payload[..]].concat());
        Some(Abandoned { broadcast: partial.broadcast, first })
    }

    /// Gives the oldest datagram up if the budget is exceeded; to be repeated.
    pub(crate) fn evict(&mut self) -> Option<u64> {
        if self.cost <= self.cost_max {
            return None;
        }
        let id = *self.partials.first_key_value()?.0;
        self.abandon(id);
        Some(id)
    }

    /// Puts a complete datagram together. `None` if it would be too long or its ECN fields contradict each other.
    fn finish(&mut self, id: u64) -> Option<Vec<u8>> {
        let partial = self.partials.remove(&id)?;
        self.index.remove(&partial.key);
        self.cost -= partial.cost;
        let mut packet = core::mem::take(&mut self.spare);
        packet.clear();
        let built = partial.build(&mut packet);
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
    fn add(&mut self, piece: &Piece<'_>) -> Result<(), Refused> {
        let start = usize::from(piece.offset);
        let end = start + piece.payload.len();
        let reach = self.pieces.last_key_value().map_or(0, |(&at, bytes)| usize::from(at) + bytes.len());
        // Two different ends, or something beyond the end.
        let contradiction = match (self.total, piece.more) {
            (Some(total), true) => end > total,
            (Some(total), false) => end != total,
            (None, true) => false,
            (None, false) => end < reach,
        };
        if contradiction {
            return Err(Refused::Contradiction);
        }
        if let Some((&at, before)) = self.pieces.range(..=piece.offset).next_back() {
            let before_end = usize::from(at) + before.len();
            if end <= before_end {
                return Err(Refused::Duplicate);
            }
            if start < before_end {
                return Err(Refused::Overlap);
            }
        }
        if let Some((&at, _)) = self.pieces.range(piece.offset..).next()
            && usize::from(at) < end
        {
            return Err(Refused::Overlap);
        }
        if !piece.more {
            self.total = Some(end);
        }
        if piece.offset == 0 {
            self.headers = Some((piece.headers.into(), piece.rebuild));
            self.cost += piece.headers.len();
        }
        self.ecn_seen |= 1 << (piece.ecn & 3);
        self.bytes += piece.payload.len();
        self.cost += piece.payload.len() + OVERHEAD;
        self.pieces.insert(piece.offset, piece.payload.into());
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

    fn build(&self, packet: &mut Vec<u8>) -> Option<()> {
        let (headers, rebuild) = self.headers.as_ref()?;
        let ecn = self.ecn()?;
        match *rebuild {
            Rebuild::V4 => {
                let total = u16::try_from(headers.len() + self.bytes).ok()?;
                packet.extend_from_slice(headers);
                write_v4_header(packet, total, ecn)?;
            }
            Rebuild::V6 { at, announced_at, next_header } => {
                let front = headers.get(..at)?;
                let payload_len = u16::try_from(front.len().checked_sub(40)? + self.bytes).ok()?;
                packet.extend_from_slice(front);
                *packet.get_mut(announced_at)? = next_header;
                packet.get_mut(4..6)?.copy_from_slice(&payload_len.to_be_bytes());
                let second = packet.get_mut(1)?;
                *second = *second & 0xcf | ecn << 4;
            }
        }
        for piece in self.pieces.values() {
            packet.extend_from_slice(piece);
        }
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
