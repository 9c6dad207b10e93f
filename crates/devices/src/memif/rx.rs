//! The receiving half.

use super::extension::{self, HEADER_BYTES};
use super::port::{Attached, AttachedBell, Complaint, Port, Waker};
use super::region::Region;
use super::ring::{Descriptor, Ring};
use super::{Guard, MemifStats, count};
use crate::memif::FRAME_BYTES_MAX;
use arrayvec::ArrayVec;
use ginnel_stack::device::{BURST_FRAMES_MAX, Gso, Label, RxBurst, RxChecksum, RxFrame, RxQueue};
use ginnel_stack::time::Instant;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Where a frame starts after a multiple of 64: its IP header is aligned then.
const FRAME_AT: usize = 10;
/// Bytes that the largest frame takes in the arena.
const SLOT_BYTES_MAX: usize = FRAME_AT + FRAME_BYTES_MAX;
/// Bytes of the received frames of one burst: eight of the largest. Frames lie close together there, so that a burst of small ones stays
/// in the cache; a burst that ends for lack of room goes on with the next call.
const ARENA_BYTES: usize = 8 * SLOT_BYTES_MAX.next_multiple_of(64);

/// Pieces whose beginnings are asked for before they are needed: so many cache lines can be under way at once.
const AHEAD: u16 = 8;
const CACHE_LINE_BYTES: usize = 64;

/// The peer broke the rules of the ring: nothing it says can be relied on any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Violation;

/// Whose buffers a ring has.
#[derive(Clone, Copy, Debug)]
pub(super) enum Buffers {
    /// Ours, the client's: each descriptor has one for ever, from `at` on in region 0. What the peer writes about places is not even looked at.
    Own { at: u32, bytes: u32 },
    /// The peer's: wherever its descriptors say.
    Peers,
}

impl Buffers {
    /// Region and offset of the buffer of an index in a ring.
    pub(super) fn own_offset(at: u32, bytes: u32, ring: &Ring, index: u16) -> u32 {
        at + u32::from(index & (ring.size() - 1)) * bytes
    }

    /// Describes the empty buffer of an index, whatever the peer has written there.
    fn describe_one(self, ring: &Ring, index: u16) {
        if let Self::Own { at, bytes } = self {
            let offset = Self::own_offset(at, bytes, ring, index);
            ring.set_descriptor(index, Descriptor { next: false, region: 0, length: bytes, offset });
        }
    }

    /// Describes all buffers of a ring.
    pub(super) fn describe(self, ring: &Ring) {
        (0..ring.size()).for_each(|index| self.describe_one(ring, index));
    }
}

/// A ring to take from, with all that belongs to it.
#[derive(Debug)]
pub(super) struct RxRing {
    pub(super) ring: Ring,
    pub(super) regions: Arc<[Arc<Region>]>,
    pub(super) buffers: Buffers,
    pub(super) header_bytes: usize,
    /// Both ends mean the same hash of flows.
    pub(super) hashes: bool,
    /// Index of the next descriptor to take: ours, the copy in shared memory is for the peer.
    pub(super) position: u16,
    pub(super) complaint: Arc<Complaint>,
    /// Hangs on the waker as long as the ring lives.
    pub(super) _bell: AttachedBell,
}

/// A frame in the arena.
struct Filled {
    bytes: Range<usize>,
    checksum: RxChecksum,
    gso: Option<Gso>,
    label: Label,
}

/// What became of a frame.
enum Taken {
    Frame(Filled),
    Malformed,
}

impl RxRing {
    /// Makes the ring ready: no interrupts are wanted, and as client all buffers are offered.
    pub(super) fn start(&self) {
        self.ring.want_interrupts(false);
        if let Buffers::Own { .. } = self.buffers {
            self.buffers.describe(&self.ring);
            self.ring.set_head(self.ring.size());
        }
    }

    /// Index behind the last descriptor that is ready.
    fn ready(&self) -> u16 {
        match self.buffers {
            Buffers::Own { .. } => self.ring.tail(),
            Buffers::Peers => self.ring.head(),
        }
    }

    /// Number of descriptors that are ready.
    fn available(&self) -> Result<u16, Violation> {
        let available = self.ready().wrapping_sub(self.position);
        if available > self.ring.size() { Err(Violation) } else { Ok(available) }
    }

    /// The piece that an index stands for: read once, and put right or found wrong.
    fn piece(&self, index: u16) -> Result<Descriptor, Violation> {
        let mut piece = self.ring.descriptor(index);
        if let Buffers::Own { at, bytes } = self.buffers {
            if piece.length > bytes {
                return Err(Violation);
            }
            piece.region = 0;
            piece.offset = Buffers::own_offset(at, bytes, &self.ring, index);
        }
        Ok(piece)
    }

    fn copy_out(&self, piece: Descriptor, skip: usize, to: &mut [u8]) -> Result<(), Violation> {
        let region = self.regions.get(usize::from(piece.region)).ok_or(Violation)?;
        region.copy_out(piece.offset as usize + skip, to).then_some(()).ok_or(Violation)
    }

    /// Asks for the beginning of a piece, which lies in the cache of the peer's core.
    fn prefetch(&self, index: u16) {
        let (region, offset) = match self.buffers {
            Buffers::Own { at, bytes } => (0, Buffers::own_offset(at, bytes, &self.ring, index)),
            Buffers::Peers => {
                let piece = self.ring.descriptor(index);
                (piece.region, piece.offset)
            }
        };
        if let Some(region) = self.regions.get(usize::from(region)) {
            region.prefetch(offset as usize);
            region.prefetch(offset as usize + CACHE_LINE_BYTES);
        }
    }

    /// Copies the next frame to `at` in the arena, where there is room for the largest. `available` descriptors are ready, one at least.
    fn take(&mut self, mut available: u16, arena: &mut [u8], at: usize) -> Result<Taken, Violation> {
        let start = at + FRAME_AT;
        let mut end = start;
        let mut header = [0; HEADER_BYTES];
        let mut header_left = self.header_bytes;
        let mut is_whole = true;
        loop {
            let piece = self.piece(self.position)?;
            self.position = self.position.wrapping_add(1);
            available -= 1;
            let len = piece.length as usize;
            let skip = header_left.min(len);
            if skip > 0 {
                // The header is in one piece.
                is_whole &= skip == HEADER_BYTES;
                self.copy_out(piece, 0, &mut header[..skip])?;
                header_left = 0;
            }
            match arena.get_mut(end..end + len - skip) {
                Some(room) if is_whole && end - start + len - skip <= FRAME_BYTES_MAX => {
                    self.copy_out(piece, skip, room)?;
                    end += len - skip;
                }
                _ => is_whole = false,
            }
            if !piece.next {
                break;
            }
            if available == 0 {
                // Frames are handed over whole.
                return Ok(Taken::Malformed);
            }
        }
        if !is_whole || end == start || header_left > 0 {
            return Ok(Taken::Malformed);
        }
        let frame = &arena[start..end];
        let known = if self.header_bytes == 0 {
            RxFrame::new(frame)
        } else if let Some(known) = extension::decode(&header, frame, self.hashes) {
            known
        } else {
            return Ok(Taken::Malformed);
        };
        let RxFrame { checksum, gso, label, .. } = known;
        Ok(Taken::Frame(Filled { bytes: start..end, checksum, gso, label }))
    }

    /// Copies as many frames as are ready and there is room for, and gives their buffers back.
    fn burst(
        &mut self,
        arena: &mut [u8],
        room: usize,
        stats: &MemifStats,
    ) -> Result<ArrayVec<Filled, BURST_FRAMES_MAX>, Violation> {
        let mut filled = ArrayVec::new();
        let first = self.position;
        let mut at = 0;
        let available = self.available()?;
        let mut asked = 0;
        while filled.len() < room && at + SLOT_BYTES_MAX <= arena.len() {
            let left = available - self.position.wrapping_sub(first);
            if left == 0 {
                break;
            }
            let until = (available - left).saturating_add(AHEAD).min(available);
            while asked < until {
                self.prefetch(first.wrapping_add(asked));
                asked += 1;
            }
            match self.take(left, arena, at)? {
                Taken::Frame(frame) => {
                    at = frame.bytes.end.next_multiple_of(64);
                    filled.push(frame);
                }
                Taken::Malformed => count(&stats.rx_malformed),
            }
        }
        if self.position != first {
            self.give_back(first);
        }
        Ok(filled)
    }

    /// Returns the buffers from index `first` to the position.
    fn give_back(&self, first: u16) {
        match self.buffers {
            Buffers::Own { .. } => {
                let mut index = first;
                while index != self.position {
                    self.buffers.describe_one(&self.ring, index);
                    index = index.wrapping_add(1);
                }
                self.ring.set_head(self.position.wrapping_add(self.ring.size()));
            }
            Buffers::Peers => self.ring.set_tail(self.position),
        }
    }

    /// Asks for a wake-up. False, and asks for none, if something is ready (or wrong, which is found out by taking it).
    fn arm(&self) -> bool {
        self.ring.want_interrupts(true);
        // Pairs with the fence of the sender: either this side sees what it has sent, or it sees the wish.
        fence(Ordering::SeqCst);
        let empty = self.available() == Ok(0);
        if !empty {
            self.ring.want_interrupts(false);
        }
        empty
    }
}

/// The receiving half of a queue.
pub(super) struct MemifRx {
    connection: Attached<RxRing>,
    waker: Arc<Waker>,
    /// Frames of the last burst.
    arena: Box<[u8]>,
    /// A wake-up was asked for and not taken back.
    armed: bool,
    stats: Arc<MemifStats>,
    /// It is the queue that reports what all have counted.
    pub(super) reports: bool,
    /// The control thread runs as long as there is a half.
    _guard: Arc<Guard>,
}

impl MemifRx {
    pub(super) fn new(
        port: Arc<Port<RxRing>>,
        waker: Arc<Waker>,
        stats: Arc<MemifStats>,
        guard: Arc<Guard>,
    ) -> Self {
        let arena = vec![0; ARENA_BYTES].into_boxed_slice();
        Self {
            connection: Attached::new(port),
            waker,
            arena,
            armed: false,
            stats,
            reports: false,
            _guard: guard,
        }
    }

    /// After a sleep: the next wake-up must not come from this one.
    #[cold]
    fn disarm(&mut self) {
        self.armed = false;
        if let Some(ring) = &self.connection.ring {
            ring.ring.want_interrupts(false);
        }
        self.waker.clear();
    }

    #[cold]
    fn complain(&mut self) {
        count(&self.stats.violations);
        if let Some(ring) = self.connection.ring.take() {
            ring.complaint.make();
        }
    }
}

impl RxQueue for MemifRx {
    fn rx_burst<'a>(&'a mut self, _now: Instant, burst: &mut RxBurst<'a>) {
        if self.armed {
            self.disarm();
        }
        self.connection.refresh();
        let Some(ring) = &mut self.connection.ring else { return };
        match ring.burst(&mut self.arena, burst.remaining_capacity(), &self.stats) {
            Ok(filled) => {
                for Filled { bytes, checksum, gso, label } in filled {
                    burst.push(RxFrame { bytes: &self.arena[bytes], checksum, gso, label });
                }
            }
            Err(Violation) => self.complain(),
        }
    }

    fn arm(&mut self) -> bool {
        if self.connection.is_stale() {
            return false;
        }
        self.armed = true;
        let ready = self.connection.ring.as_ref().is_some_and(|ring| !ring.arm());
        if ready {
            self.disarm();
        }
        !ready
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.waker.raw_fd())
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        if self.reports {
            let MemifStats { connections, refused, violations, rx_malformed, tx_dropped } = &*self.stats;
            for (name, count) in [
                ("memif_connections", connections),
                ("memif_refused", refused),
                ("memif_violations", violations),
                ("memif_rx_malformed", rx_malformed),
                ("memif_tx_dropped", tx_dropped),
            ] {
                report(name, count.load(Ordering::Relaxed));
            }
        }
    }
}
