//! The sending half of a memif device.

use super::extension::{self, HEADER_BYTES};
use super::ring::{MemifDescriptor, MemifRing};
use super::ring_slot::{InterruptFd, RingSlot, SlotReader, ViolationFlag};
use super::rx::{RingBuffers, Violation};
use super::signal::Signaller;
use super::{ControlThreadGuard, FRAME_BYTES_MAX, MemifStats, increment};
use crate::offload::WireFrames;
use crate::shared_region::{Region, copy_shared};
use ginnel_stack::device::{Capabilities, GatherTx, PayloadPiece, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Offset of the frame in the staging buffer, which aligns its IP header and leaves room for the header of
/// the extension.
const FRAME_AT: usize = 10 + HEADER_BYTES;
/// Assumed minimum payload of the segments of a super-frame that is segmented here, in bytes. If segments are
/// smaller and the ring is nearly full, the last segments are dropped and counted.
const SEGMENT_BYTES_MIN: usize = 512;

/// Bytes after which frames are published before `flush`, so that the receiver processes them while more are
/// written.
const PUBLISH_BYTES: usize = 128 << 10;

/// The state that all rings of a connection share.
#[derive(Clone, Debug)]
pub(super) struct LinkContext {
    pub(super) regions: Arc<[Arc<Region>]>,
    pub(super) header_bytes: usize,
    /// True if both ends have the same flow hash function.
    pub(super) has_flow_hash: bool,
    pub(super) violation_flag: Arc<ViolationFlag>,
}

/// A ring to send on, with all state of its connection.
#[derive(Debug)]
pub(super) struct TxRing {
    ring: MemifRing,
    regions: Arc<[Arc<Region>]>,
    buffers: RingBuffers,
    header_bytes: usize,
    /// True if both ends have the same flow hash function.
    has_flow_hash: bool,
    /// Index of the next descriptor to fill. The private value is authoritative; the copy in shared memory is
    /// for the peer.
    position: u16,
    /// Number of free descriptors from `position` on, as of the last check.
    free: u16,
    /// Largest value of `free` so far: descriptors that are free if nothing waits. A peer that provides the
    /// buffers need not provide as many as the ring has descriptors.
    free_max: u16,
    /// Value of `position` that was published.
    published: u16,
    /// Bytes written since the last publication.
    unpublished_bytes: usize,
    interrupt: InterruptFd,
    signaller: Arc<Signaller>,
    violation_flag: Arc<ViolationFlag>,
}

impl TxRing {
    /// Creates the state of a ring on which nothing was sent.
    pub(super) fn new(
        ring: MemifRing,
        buffers: RingBuffers,
        link: LinkContext,
        interrupt: InterruptFd,
        signaller: Arc<Signaller>,
    ) -> Self {
        let LinkContext { regions, header_bytes, has_flow_hash, violation_flag } = link;
        Self {
            ring,
            regions,
            buffers,
            header_bytes,
            has_flow_hash,
            position: 0,
            free: 0,
            free_max: 0,
            published: 0,
            unpublished_bytes: 0,
            interrupt,
            signaller,
            violation_flag,
        }
    }

    /// Updates the number of free descriptors.
    fn refresh_free(&mut self) -> Result<(), Violation> {
        let size = self.ring.size();
        let free = match self.buffers {
            RingBuffers::Local { .. } => {
                let used = self.position.wrapping_sub(self.ring.tail());
                size.checked_sub(used).ok_or(Violation)?
            }
            RingBuffers::Peer => self.ring.head().wrapping_sub(self.position),
        };
        // A free descriptor cannot become used by the peer.
        if free > size || free < self.free {
            return Err(Violation);
        }
        self.free = free;
        self.free_max = self.free_max.max(free);
        Ok(())
    }

    /// Returns whether the known free descriptors have room for `len` bytes.
    fn fits(&self, len: usize) -> bool {
        match self.buffers {
            RingBuffers::Local { bytes, .. } => len.div_ceil(bytes as usize) <= usize::from(self.free),
            RingBuffers::Peer => {
                let mut room = 0;
                (0..self.free).any(|n| {
                    room += self.ring.descriptor(self.position.wrapping_add(n)).length as usize;
                    room >= len
                })
            }
        }
    }

    /// Returns whether there are `descriptors` free descriptors, with room for `bytes` bytes.
    fn has_room(&mut self, descriptors: usize, bytes: usize) -> Result<bool, Violation> {
        let enough = |ring: &Self| usize::from(ring.free) >= descriptors && ring.fits(bytes);
        if !enough(self) {
            self.refresh_free()?;
            return Ok(enough(self));
        }
        Ok(true)
    }

    /// Returns whether at least `buffers` buffers of the ring wait for the peer.
    fn has_backlog(&mut self, buffers: usize) -> Result<bool, Violation> {
        let is_above = |ring: &Self| usize::from(ring.free_max - ring.free) >= buffers;
        if is_above(self) {
            self.refresh_free()?;
        }
        Ok(is_above(self))
    }

    /// Returns the empty buffer of an index.
    fn empty_descriptor(&self, index: u16) -> MemifDescriptor {
        match self.buffers {
            RingBuffers::Local { at, bytes } => {
                let offset = RingBuffers::local_offset(at, bytes, &self.ring, index);
                MemifDescriptor { next: false, region: 0, length: bytes, offset }
            }
            RingBuffers::Peer => self.ring.descriptor(index),
        }
    }

    /// Copies a frame, with its header, into free buffers. Returns `Ok(false)` if there are too few.
    fn enqueue(&mut self, bytes: &[u8]) -> Result<bool, Violation> {
        self.enqueue_gathered(bytes, &mut core::iter::empty::<PayloadPiece<'_>>())
    }

    /// Copies a frame that consists of `head` and all `pieces`, none of which is empty, into free buffers.
    /// Returns `Ok(false)` if there are too few.
    fn enqueue_gathered<'a>(
        &mut self,
        head: &[u8],
        pieces: &mut (impl Iterator<Item = PayloadPiece<'a>> + ?Sized),
    ) -> Result<bool, Violation> {
        let (mut used, mut bytes) = (0, 0);
        let mut piece = PayloadPiece::Private(head);
        // Whether a buffer is the last one of the frame is known only when the next one is needed.
        let mut last: Option<(u16, MemifDescriptor)> = None;
        while !piece.is_empty() {
            if used == self.free {
                self.refresh_free()?;
                if used == self.free {
                    return Ok(false);
                }
            }
            if let Some((index, before)) = last {
                self.ring.set_descriptor(index, MemifDescriptor { next: true, ..before });
            }
            let index = self.position.wrapping_add(used);
            let buffer = self.empty_descriptor(index);
            let mut filled = 0;
            let region = self.regions.get(usize::from(buffer.region)).ok_or(Violation)?;
            while filled < buffer.length as usize {
                let (now, later) = piece.split_at(piece.len().min(buffer.length as usize - filled));
                let at = buffer.offset as usize + filled;
                let inside = match now {
                    PayloadPiece::Private(bytes) => region.copy_in(at, bytes),
                    PayloadPiece::Shared(bytes) => region.copy_in_shared(at, bytes),
                };
                if !inside {
                    return Err(Violation);
                }
                filled += now.len();
                piece = later;
                if piece.is_empty() {
                    piece = pieces.next().unwrap_or(PayloadPiece::Private(&[]));
                    if piece.is_empty() {
                        break;
                    }
                }
            }
            // A buffer of length 0 can never be filled, and the receiver needs the header in one buffer.
            if filled == 0 || filled < self.header_bytes && used == 0 {
                return Err(Violation);
            }
            bytes += filled;
            // The cast does not truncate: the length is at most that of the buffer.
            last = Some((index, MemifDescriptor { next: false, length: filled as u32, ..buffer }));
            used += 1;
        }
        if let Some((index, descriptor)) = last {
            self.ring.set_descriptor(index, descriptor);
        }
        self.position = self.position.wrapping_add(used);
        self.free -= used;
        self.unpublished_bytes += bytes;
        if self.unpublished_bytes >= PUBLISH_BYTES {
            self.publish();
        }
        Ok(true)
    }

    /// Publishes written frames, and signals the interrupt if the peer wants it.
    fn publish(&mut self) {
        if self.published == self.position {
            return;
        }
        self.published = self.position;
        self.unpublished_bytes = 0;
        match self.buffers {
            RingBuffers::Local { .. } => self.ring.set_head(self.position),
            RingBuffers::Peer => self.ring.set_tail(self.position),
        }
        // Pairs with the fence of the receiver before its sleep: either the receiver sees the new index, or
        // this side sees the cleared flag.
        fence(Ordering::SeqCst);
        if self.ring.are_interrupts_enabled() {
            self.signaller.signal(self.interrupt.fd());
        }
    }
}

/// The sending half of a queue.
pub(super) struct MemifTx {
    slot: SlotReader<TxRing>,
    capabilities: Capabilities,
    /// The frame under construction. The engine never accesses shared memory, because the peer could change a
    /// frame while it is built.
    staging: Box<[u8]>,
    wire: WireFrames,
    stats: Arc<MemifStats>,
    /// Keeps the control thread running while a half exists.
    _guard: Arc<ControlThreadGuard>,
}

impl MemifTx {
    pub(super) fn new(
        slot: Arc<RingSlot<TxRing>>,
        capabilities: Capabilities,
        stats: Arc<MemifStats>,
        guard: Arc<ControlThreadGuard>,
    ) -> Self {
        let staging = vec![0; FRAME_AT + FRAME_BYTES_MAX].into_boxed_slice();
        Self {
            slot: SlotReader::new(slot),
            capabilities,
            staging,
            wire: WireFrames::new(),
            stats,
            _guard: guard,
        }
    }

    #[cold]
    fn report_violation(&mut self) {
        increment(&self.stats.violations);
        if let Some(ring) = self.slot.ring.take() {
            ring.violation_flag.raise();
        }
    }

    /// Sends the frame in the staging buffer.
    fn send(&mut self, len: usize, meta: TxMeta) -> Result<(), Violation> {
        let Some(ring) = &mut self.slot.ring else {
            increment(&self.stats.tx_dropped);
            return Ok(());
        };
        if ring.header_bytes > 0 {
            let start = FRAME_AT - HEADER_BYTES;
            self.staging[start..FRAME_AT].copy_from_slice(&extension::encode(meta, ring.has_flow_hash));
            if !ring.enqueue(&self.staging[start..FRAME_AT + len])? {
                increment(&self.stats.tx_dropped);
            }
            return Ok(());
        }
        let frame = &self.staging[FRAME_AT..FRAME_AT + len];
        let mut result = Ok(());
        let (wire, stats) = (&mut self.wire, &self.stats);
        let valid = wire.for_each(frame, meta, |segment| match result.and_then(|()| ring.enqueue(segment)) {
            Ok(true) => {}
            Ok(false) => increment(&stats.tx_dropped),
            Err(violation) => result = Err(violation),
        });
        if valid.is_err() {
            increment(&self.stats.tx_dropped);
        }
        result
    }
}

impl TxQueue for MemifTx {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// While no peer is connected, always returns a buffer: the frame is dropped and counted.
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.slot.refresh();
        if let Some(ring) = &mut self.slot.ring {
            let is_sent_unsegmented =
                ring.header_bytes > 0 || len <= self.capabilities.mtu + super::LINK_HEADER_BYTES_MAX;
            let has_room = if is_sent_unsegmented {
                ring.has_room(1, ring.header_bytes + len)
            } else {
                ring.has_room(len.div_ceil(SEGMENT_BYTES_MIN).min(ring.ring.size().into()), 0)
            };
            match has_room {
                Ok(true) => {}
                Ok(false) => return None,
                Err(Violation) => self.report_violation(),
            }
        }
        self.staging.get_mut(FRAME_AT..FRAME_AT + len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        if self.send(len, meta) == Err(Violation) {
            increment(&self.stats.tx_dropped);
            self.report_violation();
        }
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        self.slot.refresh();
        match self.slot.ring.as_mut().map_or(Ok(frames == 0), |ring| ring.has_backlog(frames)) {
            Ok(has_backlog) => has_backlog,
            Err(Violation) => {
                self.report_violation();
                false
            }
        }
    }

    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        Some(self)
    }

    fn flush(&mut self, _now: Instant) {
        self.slot.refresh();
        if let Some(ring) = &mut self.slot.ring {
            ring.publish();
        }
    }
}

/// Copies a payload directly to the shared memory, without the staging buffer.
impl GatherTx for MemifTx {
    fn commit_gathered(
        &mut self,
        head: usize,
        pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
        meta: TxMeta,
    ) {
        if let Some(ring) = &mut self.slot.ring
            && ring.header_bytes > 0
        {
            let start = FRAME_AT - HEADER_BYTES;
            self.staging[start..FRAME_AT].copy_from_slice(&extension::encode(meta, ring.has_flow_hash));
            let put = ring.enqueue_gathered(&self.staging[start..FRAME_AT + head], pieces);
            if put != Ok(true) {
                increment(&self.stats.tx_dropped);
            }
            if put == Err(Violation) {
                self.report_violation();
            }
            return;
        }
        // The frame is segmented here, or dropped.
        let mut len = head;
        for piece in pieces {
            let room = &mut self.staging[FRAME_AT + len..][..piece.len()];
            match piece {
                PayloadPiece::Private(bytes) => room.copy_from_slice(bytes),
                PayloadPiece::Shared(bytes) => copy_shared(bytes, room),
            }
            len += piece.len();
        }
        self.commit(len, meta);
    }
}
