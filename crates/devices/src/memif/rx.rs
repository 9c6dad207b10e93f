//! The receiving half of a memif device.

use super::extension::{self, HEADER_BYTES};
use super::ring::{MemifDescriptor, MemifRing};
use super::ring_slot::{RegisteredInterrupt, RingSlot, SlotReader, ViolationFlag, Waker};
use super::{ControlThreadGuard, MemifStats, increment};
use crate::memif::FRAME_BYTES_MAX;
use crate::shared_region::Region;
use arrayvec::ArrayVec;
use ginnel_stack::device::{BURST_FRAMES_MAX, Gso, Label, RxBurst, RxChecksum, RxFrame, RxQueue};
use ginnel_stack::time::Instant;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Offset of a frame after a multiple of 64 bytes, which aligns its IP header.
const FRAME_AT: usize = 10;
/// Bytes of the largest frame in the arena.
const SLOT_BYTES_MAX: usize = FRAME_AT + FRAME_BYTES_MAX;
/// Bytes of the buffer for the received frames of one burst: eight of the largest frames. Frames lie close
/// together in it, so that a burst of small frames stays in the cache; frames that do not fit are left for
/// the next burst.
const ARENA_BYTES: usize = 8 * SLOT_BYTES_MAX.next_multiple_of(64);

/// Number of buffers that are prefetched ahead: about as many cache misses as a core can have outstanding.
const PREFETCH_AHEAD: u16 = 8;
const CACHE_LINE_BYTES: usize = 64;

/// The peer violated the ring protocol, so that its indices and descriptors are meaningless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Violation;

/// Owner of the buffers of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) enum RingBuffers {
    /// This side, as client: each descriptor has a fixed buffer, from offset `at` of region 0 on. Regions and
    /// offsets that the peer writes to descriptors are ignored.
    Local { at: u32, bytes: u32 },
    /// The peer, as client: the descriptors give the locations.
    Peer,
}

impl RingBuffers {
    /// Returns the offset of the buffer with an index in a ring.
    pub(super) fn local_offset(at: u32, bytes: u32, ring: &MemifRing, index: u16) -> u32 {
        at + u32::from(index & (ring.size() - 1)) * bytes
    }

    /// Writes the empty buffer with an index to its descriptor, whatever the peer has written there.
    fn write_descriptor(self, ring: &MemifRing, index: u16) {
        if let Self::Local { at, bytes } = self {
            let offset = Self::local_offset(at, bytes, ring, index);
            ring.set_descriptor(index, MemifDescriptor { next: false, region: 0, length: bytes, offset });
        }
    }

    /// Writes all empty buffers of a ring to its descriptors.
    pub(super) fn write_all_descriptors(self, ring: &MemifRing) {
        (0..ring.size()).for_each(|index| self.write_descriptor(ring, index));
    }
}

/// A ring to receive from, with all state of its connection.
#[derive(Debug)]
pub(super) struct RxRing {
    pub(super) ring: MemifRing,
    pub(super) regions: Arc<[Arc<Region>]>,
    pub(super) buffers: RingBuffers,
    pub(super) header_bytes: usize,
    /// True if both ends have the same flow hash function.
    pub(super) has_flow_hash: bool,
    /// Index of the next descriptor to consume. The private value is authoritative; the copy in shared memory
    /// is for the peer.
    pub(super) position: u16,
    pub(super) violation_flag: Arc<ViolationFlag>,
    /// Keeps the interrupt registered while the ring lives.
    pub(super) _interrupt: RegisteredInterrupt,
}

/// A frame in the arena.
struct MemifFrame {
    bytes: Range<usize>,
    checksum: RxChecksum,
    gso: Option<Gso>,
    label: Label,
}

/// Result of taking a frame from the ring.
enum TakenFrame {
    Frame(MemifFrame),
    Malformed,
}

impl RxRing {
    /// Prepares the ring: disables interrupts, and as client offers all buffers.
    pub(super) fn prepare(&self) {
        self.ring.set_interrupts_enabled(false);
        if let RingBuffers::Local { .. } = self.buffers {
            self.buffers.write_all_descriptors(&self.ring);
            self.ring.set_head(self.ring.size());
        }
    }

    /// Returns the index after the last descriptor that is ready.
    fn ready_index(&self) -> u16 {
        match self.buffers {
            RingBuffers::Local { .. } => self.ring.tail(),
            RingBuffers::Peer => self.ring.head(),
        }
    }

    /// Returns the number of descriptors that are ready.
    fn available(&self) -> Result<u16, Violation> {
        let available = self.ready_index().wrapping_sub(self.position);
        if available > self.ring.size() { Err(Violation) } else { Ok(available) }
    }

    /// Reads a descriptor once, and checks or corrects its fields.
    fn checked_descriptor(&self, index: u16) -> Result<MemifDescriptor, Violation> {
        let mut piece = self.ring.descriptor(index);
        if let RingBuffers::Local { at, bytes } = self.buffers {
            if piece.length > bytes {
                return Err(Violation);
            }
            piece.region = 0;
            piece.offset = RingBuffers::local_offset(at, bytes, &self.ring, index);
        }
        Ok(piece)
    }

    fn copy_out(&self, piece: MemifDescriptor, skip: usize, to: &mut [u8]) -> Result<(), Violation> {
        let region = self.regions.get(usize::from(piece.region)).ok_or(Violation)?;
        region.copy_out(piece.offset as usize + skip, to).then_some(()).ok_or(Violation)
    }

    /// Prefetches the beginning of a buffer, which is in the cache of the peer's core.
    fn prefetch(&self, index: u16) {
        let (region, offset) = match self.buffers {
            RingBuffers::Local { at, bytes } => (0, RingBuffers::local_offset(at, bytes, &self.ring, index)),
            RingBuffers::Peer => {
                let piece = self.ring.descriptor(index);
                (piece.region, piece.offset)
            }
        };
        if let Some(region) = self.regions.get(usize::from(region)) {
            region.prefetch(offset as usize);
            region.prefetch(offset as usize + CACHE_LINE_BYTES);
        }
    }

    /// Copies the next frame to offset `at` of the arena, which has room for the largest frame there.
    /// `available` descriptors are ready, at least one.
    fn take(&mut self, mut available: u16, arena: &mut [u8], at: usize) -> Result<TakenFrame, Violation> {
        let start = at + FRAME_AT;
        let mut end = start;
        let mut header = [0; HEADER_BYTES];
        let mut header_left = self.header_bytes;
        let mut is_whole = true;
        loop {
            let piece = self.checked_descriptor(self.position)?;
            self.position = self.position.wrapping_add(1);
            available -= 1;
            let len = piece.length as usize;
            let skip = header_left.min(len);
            if skip > 0 {
                // The header must be in one buffer.
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
                // A sender publishes a frame as a whole.
                return Ok(TakenFrame::Malformed);
            }
        }
        if !is_whole || end == start || header_left > 0 {
            return Ok(TakenFrame::Malformed);
        }
        let frame = &arena[start..end];
        let known = if self.header_bytes == 0 {
            RxFrame::new(frame)
        } else if let Some(known) = extension::decode(&header, frame, self.has_flow_hash) {
            known
        } else {
            return Ok(TakenFrame::Malformed);
        };
        let RxFrame { checksum, gso, label, .. } = known;
        Ok(TakenFrame::Frame(MemifFrame { bytes: start..end, checksum, gso, label }))
    }

    /// Copies frames while descriptors are ready and there is room, and returns their buffers.
    fn burst(
        &mut self,
        arena: &mut [u8],
        room: usize,
        stats: &MemifStats,
    ) -> Result<ArrayVec<MemifFrame, BURST_FRAMES_MAX>, Violation> {
        let mut filled = ArrayVec::new();
        let first = self.position;
        let mut at = 0;
        let available = self.available()?;
        let mut prefetched = 0;
        while filled.len() < room && at + SLOT_BYTES_MAX <= arena.len() {
            let left = available - self.position.wrapping_sub(first);
            if left == 0 {
                break;
            }
            let until = (available - left).saturating_add(PREFETCH_AHEAD).min(available);
            while prefetched < until {
                self.prefetch(first.wrapping_add(prefetched));
                prefetched += 1;
            }
            match self.take(left, arena, at)? {
                TakenFrame::Frame(frame) => {
                    at = frame.bytes.end.next_multiple_of(64);
                    filled.push(frame);
                }
                TakenFrame::Malformed => increment(&stats.rx_malformed),
            }
        }
        if self.position != first {
            self.return_buffers(first);
        }
        Ok(filled)
    }

    /// Returns the buffers from index `first` up to the current position to the peer.
    fn return_buffers(&self, first: u16) {
        match self.buffers {
            RingBuffers::Local { .. } => {
                let mut index = first;
                while index != self.position {
                    self.buffers.write_descriptor(&self.ring, index);
                    index = index.wrapping_add(1);
                }
                self.ring.set_head(self.position.wrapping_add(self.ring.size()));
            }
            RingBuffers::Peer => self.ring.set_tail(self.position),
        }
    }

    /// Requests a wake-up. Returns false, and requests none, if a descriptor is ready (or the indices are
    /// invalid, which the next burst detects).
    fn arm(&self) -> bool {
        self.ring.set_interrupts_enabled(true);
        // Pairs with the fence of the sender: either this side sees the new index, or the sender sees the
        // cleared flag.
        fence(Ordering::SeqCst);
        let empty = self.available() == Ok(0);
        if !empty {
            self.ring.set_interrupts_enabled(false);
        }
        empty
    }
}

/// The receiving half of a queue.
pub(super) struct MemifRx {
    slot: SlotReader<RxRing>,
    waker: Arc<Waker>,
    /// Frames of the last burst.
    arena: Box<[u8]>,
    /// True if a wake-up was requested and not withdrawn.
    armed: bool,
    stats: Arc<MemifStats>,
    /// True if this queue reports the counters of all queues.
    pub(super) reports_stats: bool,
    /// Keeps the control thread running while a half exists.
    _guard: Arc<ControlThreadGuard>,
}

impl MemifRx {
    pub(super) fn new(
        slot: Arc<RingSlot<RxRing>>,
        waker: Arc<Waker>,
        stats: Arc<MemifStats>,
        guard: Arc<ControlThreadGuard>,
    ) -> Self {
        let arena = vec![0; ARENA_BYTES].into_boxed_slice();
        Self {
            slot: SlotReader::new(slot),
            waker,
            arena,
            armed: false,
            stats,
            reports_stats: false,
            _guard: guard,
        }
    }

    /// Withdraws the request for a wake-up after a sleep, so that a late signal does not end the next sleep,
    /// too.
    #[cold]
    fn disarm(&mut self) {
        self.armed = false;
        if let Some(ring) = &self.slot.ring {
            ring.ring.set_interrupts_enabled(false);
        }
        self.waker.clear();
    }

    #[cold]
    fn report_violation(&mut self) {
        increment(&self.stats.violations);
        if let Some(ring) = self.slot.ring.take() {
            ring.violation_flag.raise();
        }
    }
}

impl RxQueue for MemifRx {
    fn rx_burst<'a>(&'a mut self, _now: Instant, burst: &mut RxBurst<'a>) {
        if self.armed {
            self.disarm();
        }
        self.slot.refresh();
        let Some(ring) = &mut self.slot.ring else { return };
        match ring.burst(&mut self.arena, burst.remaining_capacity(), &self.stats) {
            Ok(filled) => {
                for MemifFrame { bytes, checksum, gso, label } in filled {
                    burst.push(RxFrame { bytes: &self.arena[bytes], checksum, gso, label });
                }
            }
            Err(Violation) => self.report_violation(),
        }
    }

    fn arm(&mut self) -> bool {
        if self.slot.is_stale() {
            return false;
        }
        self.armed = true;
        let ready = self.slot.ring.as_ref().is_some_and(|ring| !ring.arm());
        if ready {
            self.disarm();
        }
        !ready
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.waker.raw_fd())
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        if self.reports_stats {
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
