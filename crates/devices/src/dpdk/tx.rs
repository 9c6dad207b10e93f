//! The sending half of a queue. Frames are built in the buffers that the port reads, except super-frames,
//! which take several buffers and are copied.
#![allow(unsafe_code)] // buffers of DPDK

use super::ffi::{self, TX_CONTINUES, TxEntry};
use super::offload::Headers;
use super::port::Port;
use super::thread;
use crate::offload::WireFrames;
use crate::shared_region::copy_shared;
use ginnel_stack::device::{Capabilities, GatherTx, Gso, PayloadPiece, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use ginnel_stack::wire::gso::complete_checksum;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Buffers that are allocated at a time.
const ALLOCATED: usize = 32;
/// Frames that are passed to the port before `flush`.
const SENT_AT: usize = 64;
/// Most buffers of frames that the port has not taken.
const PENDING_MAX: usize = 512;
/// Assumed smallest payload of the segments of a super-frame that is cut here, in bytes. If segments are
/// smaller and the queue is nearly full, the last segments are dropped and counted.
const SEGMENT_BYTES_MIN: usize = 512;
/// Time until `flush` must be called again after the port did not take all frames.
const RETRY: Duration = Duration::from_micros(50);
/// Time after which a frame is dropped that the port does not take: its link is down, or its driver never
/// will.
const STUCK: Duration = Duration::from_secs(1);

/// Where the frame under construction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// Nothing was reserved.
    None,
    /// In the last free buffer.
    Buffer,
    /// In the staging buffer; the complete frame has this many bytes.
    Staged(usize),
}

/// The sending half of a queue.
pub(super) struct DpdkTx {
    port: Arc<Port>,
    queue: u16,
    /// Empty buffers. The one that was freed last is used first.
    free: Vec<TxEntry>,
    /// Buffers of frames that the port has not taken.
    pending: Vec<TxEntry>,
    room: Room,
    /// Buffer for super-frames; empty if the port cuts none.
    staging: Box<[u8]>,
    wire: WireFrames,
    retry_at: Option<Instant>,
    /// The first buffer that waits, and the time since which it does.
    stuck: Option<(Instant, *mut core::ffi::c_void)>,
}

// SAFETY: the buffers belong to this half alone, and DPDK lets any thread free them.
unsafe impl Send for DpdkTx {}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Returns the memory of a buffer that this half owns.
fn bytes_of(entry: &mut TxEntry) -> &mut [u8] {
    // SAFETY: the buffer has room for that many bytes, and belongs to the caller until it passes the entry
    // on. DPDK's memory was initialized by the kernel.
    unsafe { core::slice::from_raw_parts_mut(entry.data, entry.room as usize) }
}

impl DpdkTx {
    pub(super) fn new(port: Arc<Port>, queue: u16) -> Self {
        let staging = vec![0; port.capabilities.gso_bytes_max].into_boxed_slice();
        Self {
            port,
            queue,
            free: Vec::with_capacity(PENDING_MAX),
            pending: Vec::with_capacity(PENDING_MAX),
            room: Room::None,
            staging,
            wire: WireFrames::new(),
            retry_at: None,
            stuck: None,
        }
    }

    /// Makes `count` buffers available, if the pool has them.
    fn provide(&mut self, count: usize) -> bool {
        if self.free.len() >= count {
            return true;
        }
        let wanted = (count - self.free.len()).next_multiple_of(ALLOCATED).min(PENDING_MAX - self.free.len());
        let room = &mut self.free.spare_capacity_mut()[..wanted];
        // SAFETY: there is room for the entries, and the port keeps the pool alive.
        let made = unsafe {
            let pool = self.port.pools[usize::from(self.queue)];
            ffi::ginnel_dpdk_allocate(pool, room.as_mut_ptr().cast(), wanted as u32)
        };
        // SAFETY: that many entries were filled.
        unsafe { self.free.set_len(self.free.len() + made as usize) };
        self.free.len() >= count
    }

    /// Takes an empty buffer. Returns `None` if no buffer is free or the queue is full.
    fn take_buffer(&mut self) -> Option<TxEntry> {
        if self.pending.len() >= PENDING_MAX {
            self.send();
        }
        if self.pending.len() >= PENDING_MAX || !self.provide(1) {
            return None;
        }
        self.free.pop()
    }

    /// Passes frames to the port.
    fn send(&mut self) {
        let mut refused = 0;
        // SAFETY: the entries are complete frames in buffers of this half. Those that the port took belong to
        // the port, and leave the list.
        let taken = unsafe {
            ffi::ginnel_dpdk_send(
                self.port.number,
                self.queue,
                self.pending.as_mut_ptr(),
                self.pending.len() as u32,
                &mut refused,
            )
        };
        self.pending.drain(..taken as usize);
        if refused > 0 {
            self.port.stats.tx_refused.fetch_add(refused, Ordering::Relaxed);
        }
    }

    /// Drops the first frame if the port has not taken it for a second.
    fn drop_stuck(&mut self, now: Instant) {
        let Some(first) = self.pending.first().map(|entry| entry.mbuf) else {
            self.stuck = None;
            return;
        };
        match self.stuck {
            Some((since, waiting)) if waiting == first => {
                if now < since + STUCK {
                    return;
                }
                let continues = |entry: &TxEntry| entry.flags & TX_CONTINUES != 0;
                let entries = self.pending.iter().take_while(|entry| continues(entry)).count() + 1;
                self.free.extend(self.pending.drain(..entries));
                count(&self.port.stats.tx_refused);
                self.stuck = None;
            }
            _ => self.stuck = Some((now, first)),
        }
    }

    /// Appends the buffers of a complete frame to those that the port gets next.
    fn queue(&mut self, entry: TxEntry) {
        self.pending.push(entry);
        if self.pending.len() >= SENT_AT && entry.flags & TX_CONTINUES == 0 {
            self.send();
        }
    }

    /// Queues the first `len` bytes of a buffer. The checksum is completed by the port, or here.
    fn queue_frame(&mut self, mut entry: TxEntry, len: usize, partial_checksum: Option<(u16, u16)>) {
        (entry.len, entry.flags) = (len as u32, 0);
        if let Some((start, offset)) = partial_checksum {
            let has_checksum = self.port.offloads.has_checksum();
            let frame = &mut bytes_of(&mut entry)[..len];
            match Headers::of(frame, (start, offset)).filter(|_| has_checksum) {
                Some(headers) => headers.describe(None, &mut entry),
                None if complete_checksum(frame, start.into(), offset.into()).is_ok() => {}
                None => {
                    count(&self.port.stats.tx_dropped);
                    return self.free.push(entry);
                }
            }
        }
        self.queue(entry);
    }

    /// Cuts a super-frame, and queues its segments.
    fn cut(&mut self, frame: &[u8], meta: TxMeta) {
        let mut wire = core::mem::take(&mut self.wire);
        let result = wire.for_each(frame, meta, |segment| match self.take_buffer() {
            Some(mut entry) if segment.len() <= entry.room as usize => {
                bytes_of(&mut entry)[..segment.len()].copy_from_slice(segment);
                self.queue_frame(entry, segment.len(), None);
            }
            Some(entry) => {
                self.free.push(entry);
                count(&self.port.stats.tx_dropped);
            }
            None => count(&self.port.stats.tx_dropped),
        });
        self.wire = wire;
        if result.is_err() {
            count(&self.port.stats.tx_dropped);
        }
    }

    /// Returns the headers of a super-frame that the port cuts. Its first `head` bytes are in the staging
    /// buffer, and it has `len` bytes.
    fn headers_if_cut(&self, head: usize, len: usize, meta: TxMeta) -> Option<(Headers, Gso)> {
        let gso = meta.gso.filter(|&gso| self.port.offloads.cuts(gso, len))?;
        // The port changes the headers, which must be in the first buffer.
        let headers = usize::from(gso.header_len) <= self.port.buffer_bytes.min(head);
        let found = Headers::of(&self.staging[..head], meta.partial_checksum.filter(|_| headers)?)?;
        Some((found, gso))
    }

    /// Queues a super-frame that the port cuts: its first `head` bytes are in the staging buffer, and
    /// `pieces` follow.
    fn queue_super_frame(
        &mut self,
        head: usize,
        pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
        headers: Headers,
        gso: Gso,
    ) {
        let first = self.pending.len();
        let staging = core::mem::take(&mut self.staging);
        let copied = self.copy_to_buffers(&staging[..head], pieces);
        self.staging = staging;
        if copied.is_none() {
            count(&self.port.stats.tx_dropped);
            self.free.extend(self.pending.drain(first..));
            return;
        }
        if let Some(entry) = self.pending.get_mut(first) {
            headers.describe(Some(gso), entry);
        }
        if let Some(last) = self.pending.last_mut() {
            last.flags &= !TX_CONTINUES;
        }
        if self.pending.len() >= SENT_AT {
            self.send();
        }
    }

    /// Copies a frame to new buffers at the end of the queue, each of which continues. Returns `None` if the
    /// buffers do not suffice.
    fn copy_to_buffers(
        &mut self,
        head: &[u8],
        pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
    ) -> Option<()> {
        let mut piece = PayloadPiece::Private(head);
        let mut filled = self.port.buffer_bytes;
        while !piece.is_empty() {
            if filled == self.port.buffer_bytes {
                if self.pending.len() >= PENDING_MAX || !self.provide(1) {
                    return None;
                }
                let entry = self.free.pop()?;
                self.pending.push(TxEntry { len: 0, flags: TX_CONTINUES, ..entry });
                filled = 0;
            }
            let (now, later) = piece.split_at(piece.len().min(self.port.buffer_bytes - filled));
            let entry = self.pending.last_mut()?;
            copy_piece(now, &mut bytes_of(entry)[filled..filled + now.len()]);
            filled += now.len();
            // The cast does not truncate: a buffer has less than 2^16 bytes.
            entry.len = filled as u32;
            piece = later;
            if piece.is_empty() {
                piece = pieces.next().unwrap_or(PayloadPiece::Private(&[]));
            }
        }
        Some(())
    }

    /// Sends a frame in the staging buffer.
    fn commit_staged(&mut self, len: usize, meta: TxMeta) {
        if let Some((headers, gso)) = self.headers_if_cut(len, len, meta) {
            return self.queue_super_frame(len, &mut core::iter::empty(), headers, gso);
        }
        let staging = core::mem::take(&mut self.staging);
        self.cut(&staging[..len], meta);
        self.staging = staging;
    }
}

fn copy_piece(piece: PayloadPiece<'_>, out: &mut [u8]) {
    match piece {
        PayloadPiece::Private(bytes) => out.copy_from_slice(bytes),
        PayloadPiece::Shared(bytes) => copy_shared(bytes, out),
    }
}

impl TxQueue for DpdkTx {
    fn capabilities(&self) -> Capabilities {
        self.port.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        thread::register();
        self.room = Room::None;
        let is_staged = len > self.port.buffer_bytes;
        let buffers = if is_staged { len.div_ceil(SEGMENT_BYTES_MIN) } else { 1 };
        if self.pending.len() + buffers > PENDING_MAX {
            self.send();
        }
        if self.pending.len() + buffers > PENDING_MAX || !self.provide(buffers) {
            return None;
        }
        if is_staged {
            let room = self.staging.get_mut(..len)?;
            self.room = Room::Staged(len);
            return Some(room);
        }
        self.room = Room::Buffer;
        self.free.last_mut().map(|entry| &mut bytes_of(entry)[..len])
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        match core::mem::replace(&mut self.room, Room::None) {
            Room::None => {}
            Room::Staged(_) => self.commit_staged(len, meta),
            Room::Buffer => {
                let Some(mut entry) = self.free.pop() else { return };
                if meta.gso.is_none() {
                    return self.queue_frame(entry, len, meta.partial_checksum);
                }
                // A super-frame that fits into one buffer is rare.
                let is_copied = match self.staging.get_mut(..len) {
                    Some(room) => {
                        room.copy_from_slice(&bytes_of(&mut entry)[..len]);
                        true
                    }
                    None => false,
                };
                self.free.push(entry);
                if is_copied {
                    self.commit_staged(len, meta);
                } else {
                    count(&self.port.stats.tx_dropped);
                }
            }
        }
    }

    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        Some(self)
    }

    fn flush(&mut self, now: Instant) {
        if self.pending.is_empty() {
            self.retry_at = None;
            return;
        }
        thread::register();
        self.send();
        self.retry_at = (!self.pending.is_empty()).then(|| now + RETRY);
        self.drop_stuck(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.retry_at
    }
}

/// Copies a payload directly to the buffers of the port, without the staging buffer.
impl GatherTx for DpdkTx {
    fn commit_gathered(
        &mut self,
        head: usize,
        pieces: &mut dyn Iterator<Item = PayloadPiece<'_>>,
        meta: TxMeta,
    ) {
        if let Room::Staged(len) = self.room
            && let Some((headers, gso)) = self.headers_if_cut(head, len, meta)
        {
            self.room = Room::None;
            return self.queue_super_frame(head, pieces, headers, gso);
        }
        let mut len = head;
        for piece in pieces {
            let room = match self.room {
                Room::None => return,
                Room::Buffer => self.free.last_mut().map_or(&mut [][..], bytes_of),
                Room::Staged(_) => &mut self.staging,
            };
            copy_piece(piece, &mut room[len..len + piece.len()]);
            len += piece.len();
        }
        self.commit(len, meta);
    }
}

impl Drop for DpdkTx {
    fn drop(&mut self) {
        for entries in [&mut self.pending, &mut self.free] {
            // SAFETY: the buffers belong to this half, which frees each once.
            unsafe { ffi::ginnel_dpdk_free_tx(entries.as_mut_ptr(), entries.len() as u32) };
        }
    }
}
