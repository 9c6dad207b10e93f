//! The sending half.

use super::extension::{self, HEADER_BYTES};
use super::port::{Attached, Bell, Complaint, Port};
use super::region::{Region, copy_shared};
use super::ring::{Descriptor, Ring};
use super::rx::{Buffers, Violation};
use super::signal::Signaller;
use super::{FRAME_BYTES_MAX, Guard, MemifStats, count};
use crate::offload::WireFrames;
use ginnel_stack::device::{Capabilities, GatherTx, Piece, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Where the frame starts in the staging buffer: its IP header is aligned then, and there is room for the extension's header.
const FRAME_AT: usize = 10 + HEADER_BYTES;
/// When a super-frame must be cut here, its segments are taken to have so much payload at least. If they have less, and the ring is nearly full, the
/// last ones are dropped and counted.
const SEGMENT_BYTES_MIN: usize = 512;

/// So many bytes are shown to the peer before `flush` asks for it: the other side takes them out while more is put in here.
const PUBLISHED_TOGETHER: usize = 128 << 10;

/// A ring to send on, with all that belongs to it.
#[derive(Debug)]
pub(super) struct TxRing {
    ring: Ring,
    regions: Arc<[Arc<Region>]>,
    buffers: Buffers,
    header_bytes: usize,
    /// Both ends mean the same hash of flows.
    hashes: bool,
    /// Index of the next descriptor to fill: ours, the copy in shared memory is for the peer.
    position: u16,
    /// Descriptors from `position` on that are free, as known last.
    free: u16,
    /// What the peer has seen of `position`.
    published: u16,
    /// Bytes that it has not seen.
    unpublished_bytes: usize,
    bell: Bell,
    signaller: Arc<Signaller>,
    complaint: Arc<Complaint>,
}

impl TxRing {
    /// A ring on which nothing was sent yet.
    pub(super) fn new(
        ring: Ring,
        regions: Arc<[Arc<Region>]>,
        buffers: Buffers,
        (header_bytes, hashes): (usize, bool),
        (bell, signaller): (Bell, Arc<Signaller>),
        complaint: Arc<Complaint>,
    ) -> Self {
        Self {
            ring,
            regions,
            buffers,
            header_bytes,
            hashes,
            position: 0,
            free: 0,
            published: 0,
            unpublished_bytes: 0,
            bell,
            signaller,
            complaint,
        }
    }

    /// Looks how many descriptors are free by now.
    fn refresh_free(&mut self) -> Result<(), Violation> {
        let size = self.ring.size();
        let free = match self.buffers {
            Buffers::Own { .. } => {
                let used = self.position.wrapping_sub(self.ring.tail());
                size.checked_sub(used).ok_or(Violation)?
            }
            Buffers::Peers => self.ring.head().wrapping_sub(self.position),
        };
        // What was free stays free.
        if free > size || free < self.free {
            return Err(Violation);
        }
        self.free = free;
        Ok(())
    }

    /// Whether the free descriptors that are known have room for `len` bytes.
    fn fits(&self, len: usize) -> bool {
        match self.buffers {
            Buffers::Own { bytes, .. } => len.div_ceil(bytes as usize) <= usize::from(self.free),
            Buffers::Peers => {
                let mut room = 0;
                (0..self.free).any(|n| {
                    room += self.ring.descriptor(self.position.wrapping_add(n)).length as usize;
                    room >= len
                })
            }
        }
    }

    /// Whether there are so many free descriptors, with room for so many bytes.
    fn has_room(&mut self, descriptors: usize, bytes: usize) -> Result<bool, Violation> {
        let enough = |ring: &Self| usize::from(ring.free) >= descriptors && ring.fits(bytes);
        if !enough(self) {
            self.refresh_free()?;
            return Ok(enough(self));
        }
        Ok(true)
    }

    /// The empty buffer of an index.
    fn buffer(&self, index: u16) -> Descriptor {
        match self.buffers {
            Buffers::Own { at, bytes } => {
                let offset = Buffers::own_offset(at, bytes, &self.ring, index);
                Descriptor { next: false, region: 0, length: bytes, offset }
            }
            Buffers::Peers => self.ring.descriptor(index),
        }
    }

    /// Copies a frame, with its header in front, into free buffers. `Ok(false)` if they are too few.
    fn put(&mut self, bytes: &[u8]) -> Result<bool, Violation> {
        self.put_gathered(bytes, &mut core::iter::empty::<Piece<'_>>())
    }

    /// The same of a frame that goes on with all `pieces`, none of which is empty.
    fn put_gathered<'a>(
        &mut self,
        head: &[u8],
        pieces: &mut (impl Iterator<Item = Piece<'a>> + ?Sized),
    ) -> Result<bool, Violation> {
        let (mut used, mut bytes) = (0, 0);
        let mut piece = Piece::Own(head);
        // Whether it is the frame's last is seen at the next.
        let mut last: Option<(u16, Descriptor)> = None;
        while !piece.is_empty() {
            if used == self.free {
                self.refresh_free()?;
                if used == self.free {
                    return Ok(false);
                }
            }
            if let Some((index, before)) = last {
                self.ring.set_descriptor(index, Descriptor { next: true, ..before });
            }
            let index = self.position.wrapping_add(used);
            let buffer = self.buffer(index);
            let mut filled = 0;
            let region = self.regions.get(usize::from(buffer.region)).ok_or(Violation)?;
            while filled < buffer.length as usize {
                let (now, later) = piece.split_at(piece.len().min(buffer.length as usize - filled));
                let at = buffer.offset as usize + filled;
                let inside = match now {
                    Piece::Own(bytes) => region.copy_in(at, bytes),
                    Piece::Shared(bytes) => region.copy_in_shared(at, bytes),
                };
                if !inside {
                    return Err(Violation);
                }
                filled += now.len();
                piece = later;
                if piece.is_empty() {
                    piece = pieces.next().unwrap_or(Piece::Own(&[]));
                    if piece.is_empty() {
                        break;
                    }
                }
            }
            // An empty buffer could never be filled, and the other side needs the header in one piece.
            if filled == 0 || filled < self.header_bytes && used == 0 {
                return Err(Violation);
            }
            bytes += filled;
            // Cannot truncate: at most the buffer's length.
            last = Some((index, Descriptor { next: false, length: filled as u32, ..buffer }));
            used += 1;
        }
        if let Some((index, descriptor)) = last {
            self.ring.set_descriptor(index, descriptor);
        }
        self.position = self.position.wrapping_add(used);
        self.free -= used;
        self.unpublished_bytes += bytes;
        if self.unpublished_bytes >= PUBLISHED_TOGETHER {
            self.publish();
        }
        Ok(true)
    }

    /// Shows the peer what was put, and wakes it if it asked for that.
    fn publish(&mut self) {
        if self.published == self.position {
            return;
        }
        self.published = self.position;
        self.unpublished_bytes = 0;
        match self.buffers {
            Buffers::Own { .. } => self.ring.set_head(self.position),
            Buffers::Peers => self.ring.set_tail(self.position),
        }
        // Pairs with the fence of whoever goes to sleep: either it sees the new index, or this side sees its wish.
        fence(Ordering::SeqCst);
        if self.ring.wants_interrupts() {
            self.signaller.signal(self.bell.fd());
        }
    }
}

/// The sending half of a queue.
pub(super) struct MemifTx {
    connection: Attached<TxRing>,
    capabilities: Capabilities,
    /// The frame that is being built. The engine never sees shared memory: the peer could change a frame under its hands.
    staging: Box<[u8]>,
    wire: WireFrames,
    stats: Arc<MemifStats>,
    /// The control thread runs as long as there is a half.
    _guard: Arc<Guard>,
}

impl MemifTx {
    pub(super) fn new(
        port: Arc<Port<TxRing>>,
        capabilities: Capabilities,
        stats: Arc<MemifStats>,
        guard: Arc<Guard>,
    ) -> Self {
        let staging = vec![0; FRAME_AT + FRAME_BYTES_MAX].into_boxed_slice();
        Self {
            connection: Attached::new(port),
            capabilities,
            staging,
            wire: WireFrames::new(),
            stats,
            _guard: guard,
        }
    }

    #[cold]
    fn complain(&mut self) {
        count(&self.stats.violations);
        if let Some(ring) = self.connection.ring.take() {
            ring.complaint.make();
        }
    }

    /// Sends the frame in the staging buffer.
    fn send(&mut self, len: usize, meta: TxMeta) -> Result<(), Violation> {
        let Some(ring) = &mut self.connection.ring else {
            count(&self.stats.tx_dropped);
            return Ok(());
        };
        if ring.header_bytes > 0 {
            let start = FRAME_AT - HEADER_BYTES;
            self.staging[start..FRAME_AT].copy_from_slice(&extension::encode(meta, ring.hashes));
            if !ring.put(&self.staging[start..FRAME_AT + len])? {
                count(&self.stats.tx_dropped);
            }
            return Ok(());
        }
        let frame = &self.staging[FRAME_AT..FRAME_AT + len];
        let mut result = Ok(());
        let (wire, stats) = (&mut self.wire, &self.stats);
        let valid = wire.of(frame, meta, |segment| match result.and_then(|()| ring.put(segment)) {
            Ok(true) => {}
            Ok(false) => count(&stats.tx_dropped),
            Err(violation) => result = Err(violation),
        });
        if valid.is_err() {
            count(&self.stats.tx_dropped);
        }
        result
    }
}

impl TxQueue for MemifTx {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// While nobody is connected there is room for everything: it is dropped and counted.
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.connection.refresh();
        if let Some(ring) = &mut self.connection.ring {
            let whole = ring.header_bytes > 0 || len <= self.capabilities.mtu + super::LINK_HEADER_BYTES_MAX;
            let room = if whole {
                ring.has_room(1, ring.header_bytes + len)
            } else {
                ring.has_room(len.div_ceil(SEGMENT_BYTES_MIN).min(ring.ring.size().into()), 0)
            };
            match room {
                Ok(true) => {}
                Ok(false) => return None,
                Err(Violation) => self.complain(),
            }
        }
        self.staging.get_mut(FRAME_AT..FRAME_AT + len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        if self.send(len, meta) == Err(Violation) {
            count(&self.stats.tx_dropped);
            self.complain();
        }
    }

    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        Some(self)
    }

    fn flush(&mut self, _now: Instant) {
        self.connection.refresh();
        if let Some(ring) = &mut self.connection.ring {
            ring.publish();
        }
    }
}

/// A payload goes from where it lies to the shared memory, without the staging buffer.
impl GatherTx for MemifTx {
    fn commit_gathered(&mut self, head: usize, pieces: &mut dyn Iterator<Item = Piece<'_>>, meta: TxMeta) {
        if let Some(ring) = &mut self.connection.ring
            && ring.header_bytes > 0
        {
            let start = FRAME_AT - HEADER_BYTES;
            self.staging[start..FRAME_AT].copy_from_slice(&extension::encode(meta, ring.hashes));
            let put = ring.put_gathered(&self.staging[start..FRAME_AT + head], pieces);
            if put != Ok(true) {
                count(&self.stats.tx_dropped);
            }
            if put == Err(Violation) {
                self.complain();
            }
            return;
        }
        // It is cut here, or dropped.
        let mut len = head;
        for piece in pieces {
            let room = &mut self.staging[FRAME_AT + len..][..piece.len()];
            match piece {
                Piece::Own(bytes) => room.copy_from_slice(bytes),
                Piece::Shared(bytes) => copy_shared(bytes, room),
            }
            len += piece.len();
        }
        self.commit(len, meta);
    }
}
