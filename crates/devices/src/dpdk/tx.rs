//! The sending half of a queue. Frames are built in the buffers that the port reads, except super-frames,
//! which take several buffers and are copied.
#![allow(unsafe_code)] // buffers of DPDK

use super::ffi::{self, TX_CONTINUES, TX_SUPER_FRAME, TxEntry};
use super::offload::{Headers, meta_of_super_frame};
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
pub(super) const PENDING_MAX: usize = 512;
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
    /// True if the port was offered what waits since the last flush, because the backlog was asked for.
    was_offered: bool,
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
            was_offered: false,
            stuck: None,
        }
    }

    /// Makes `count` buffers available, if the pool has them.
    pub(super) fn provide(&mut self, count: usize) -> bool {
        self.free.len() >= count || self.allocate(count) || self.reclaim(count)
    }

    /// Allocates buffers until `count` are available.
    fn allocate(&mut self, count: usize) -> bool {
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

    /// Allocates after the driver has freed the buffers of frames that the adapter has sent. Drivers free
    /// them late, and not at all as long as nothing is sent, which needs buffers.
    #[cold]
    fn reclaim(&mut self, count: usize) -> bool {
        // SAFETY: the queue was set up before the half was made, and only this half sends on it.
        unsafe { ffi::ginnel_dpdk_reclaim(self.port.number, self.queue) };
        self.allocate(count)
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
        loop {
            let mut is_refused = 0;
            // SAFETY: the entries are complete frames in buffers of this half. Those that the port took
            // belong to the port, and leave the list.
            let taken = unsafe {
                ffi::ginnel_dpdk_send(
                    self.port.number,
                    self.queue,
                    self.pending.as_mut_ptr(),
                    self.pending.len() as u32,
                    &mut is_refused,
                )
            };
            self.pending.drain(..taken as usize);
            if is_refused == 0 {
                return;
            }
            self.replace_refused();
        }
    }

    /// Returns the number of buffers of the first frame.
    fn first_frame_entries(&self) -> usize {
        self.pending.iter().take_while(|entry| entry.flags & TX_CONTINUES != 0).count() + 1
    }

    /// Removes the first frame, which the driver refuses. A super-frame is cut here instead, and so are all
    /// later ones of the port.
    #[cold]
    fn replace_refused(&mut self) {
        let later = self.pending.split_off(self.first_frame_entries());
        let mut entries = core::mem::replace(&mut self.pending, Vec::with_capacity(PENDING_MAX));
        if entries[0].flags & TX_SUPER_FRAME == 0 {
            count(&self.port.stats.tx_refused);
            self.free.append(&mut entries);
        } else {
            if !self.port.refuses_super_frames.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    driver = self.port.driver,
                    segment_bytes = entries[0].segment_bytes,
                    "the driver of the DPDK port refuses a super-frame: from now on they are cut here"
                );
            }
            let mut frame = Vec::new();
            for entry in &mut entries {
                let len = entry.len as usize;
                frame.extend_from_slice(&bytes_of(entry)[..len]);
            }
            let meta = meta_of_super_frame(&entries[0], &frame);
            self.free.append(&mut entries);
            self.cut(&frame, meta);
        }
        self.pending.extend(later);
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
                let entries = self.first_frame_entries();
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
                Some(headers) => headers.describe(&self.port.offloads, None, &mut entry),
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
        let is_refused = self.port.refuses_super_frames.load(Ordering::Relaxed);
        let gso = meta.gso.filter(|&gso| !is_refused && self.port.offloads.cuts(gso, len))?;
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
            headers.describe(&self.port.offloads, Some(gso), entry);
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

    // What the port has taken and not sent is not counted: DPDK 22.11 has no call that counts it.
    fn has_backlog(&mut self, frames: usize) -> bool {
        if frames == 0 {
            return true;
        }
        // The port may have got room since it was last offered frames. One attempt in a turn suffices.
        if self.pending.len() >= frames && !core::mem::replace(&mut self.was_offered, true) {
            thread::register();
            self.send();
        }
        self.pending.len() >= frames
    }

    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        Some(self)
    }

    fn flush(&mut self, now: Instant) {
        self.was_offered = false;
        if self.pending.is_empty() {
            (self.retry_at, self.stuck) = (None, None);
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::rx::DpdkRx;
    use super::super::tests::config;
    use super::*;
    use crate::partial_checksums::{PartialChecksumCheck, PartialChecksums};
    use ginnel_stack::device::{GsoKind, RxBurst, RxQueue};
    use ginnel_testkit::interop::in_namespace;

    fn port(name: &str, keys: &str) -> Arc<Port> {
        Arc::new(Port::open(&config(name, keys), 1).expect("a port"))
    }

    fn send_copy(tx: &mut DpdkTx, frame: &[u8], meta: TxMeta) {
        tx.reserve(frame.len()).expect("room").copy_from_slice(frame);
        tx.commit(frame.len(), meta);
    }

    /// Returns the frames that wait for the port.
    fn waiting(tx: &mut DpdkTx) -> Vec<Vec<u8>> {
        let bytes = |entry: &mut TxEntry| {
            let len = entry.len as usize;
            bytes_of(entry)[..len].to_vec()
        };
        tx.pending.iter_mut().map(bytes).collect()
    }

    /// Returns a super-frame of 20 segments over IPv4. Its TCP checksum is partial.
    fn super_frame() -> (Vec<u8>, TxMeta) {
        let mut frame = vec![2; 12];
        frame.extend([0x08, 0x00, 0x45, 0]);
        frame.extend((20_040_u16).to_be_bytes());
        frame.extend([0, 7, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0, 80, 0x30, 0x39, 0, 0, 1, 0, 0, 0, 2, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
        frame.extend((0..20_000).map(|at| (at / 7) as u8));
        let gso = Gso { kind: GsoKind::Tcp4, size: 1000, header_len: 54, ecn: false };
        (frame, TxMeta { partial_checksum: Some((34, 16)), gso: Some(gso), ..TxMeta::default() })
    }

    /// No driver without an adapter refuses super-frames before it sends them, so the test says that it does.
    #[test]
    fn refused_super_frame_is_cut() {
        in_namespace("dpdk::tx::tests::refused_super_frame_is_cut", || {
            let mut tx = DpdkTx::new(port("net_tap0", "args=iface=cut0"), 0);
            let (frame, meta) = super_frame();
            send_copy(&mut tx, &frame, meta);
            assert!(tx.pending.len() > 1 && tx.pending[0].flags & TX_SUPER_FRAME != 0, "several buffers");
            // The shim and the driver have changed both checksums.
            let head = bytes_of(&mut tx.pending[0]);
            head[24..26].fill(0);
            head[50..52].fill(0x55);
            send_copy(&mut tx, &[9; 60], TxMeta::default());
            tx.replace_refused();
            let mut expected = Vec::new();
            let cut = WireFrames::new().for_each(&frame, meta, |segment| expected.push(segment.to_vec()));
            assert!(cut.is_ok() && expected.len() == 20);
            let mut all = expected.clone();
            all.push(vec![9; 60]);
            assert_eq!(waiting(&mut tx), all, "the frame behind it stays behind its segments");
            assert!(tx.pending.iter().all(|entry| entry.flags == 0));

            tx.free.append(&mut tx.pending);
            send_copy(&mut tx, &frame, meta);
            assert_eq!(waiting(&mut tx), expected, "the next one is cut at once");
            let stats = &tx.port.stats;
            let dropped = [&stats.tx_dropped, &stats.tx_refused].map(|count| count.load(Ordering::Relaxed));
            assert_eq!(dropped, [0, 0]);
        });
    }

    #[test]
    fn other_refused_frame_is_counted() {
        in_namespace("dpdk::tx::tests::other_refused_frame_is_counted", || {
            let mut tx = DpdkTx::new(port("net_ring0", ""), 0);
            send_copy(&mut tx, &[1; 60], TxMeta::default());
            send_copy(&mut tx, &[2; 60], TxMeta::default());
            tx.replace_refused();
            assert_eq!(waiting(&mut tx), [[2_u8; 60]]);
            assert_eq!(tx.port.stats.tx_refused.load(Ordering::Relaxed), 1);
            assert!(!tx.port.refuses_super_frames.load(Ordering::Relaxed));
        });
    }

    #[test]
    fn exhausted_pool_recovers() {
        in_namespace("dpdk::tx::tests::exhausted_pool_recovers", || {
            let port = port("net_ring0", "ring=64,buffers=1152");
            let mut tx = DpdkTx::new(port.clone(), 0);
            let mut others = Vec::new();
            while others.last().is_none_or(|other: &DpdkTx| other.free.len() == PENDING_MAX) {
                let mut other = DpdkTx::new(port.clone(), 0);
                while other.provide(other.free.len() + 1) {}
                others.push(other);
            }
            assert!(others.len() > 1 && tx.reserve(60).is_none());
            drop(others);
            assert!(tx.reserve(60).is_some());
        });
    }

    #[test]
    fn empty_queue_forgets_its_first_frame() {
        in_namespace("dpdk::tx::tests::empty_queue_forgets_its_first_frame", || {
            let port = port("net_ring0", "");
            let mut tx = DpdkTx::new(port.clone(), 0);
            let check = PartialChecksumCheck::without_interface(PartialChecksums::Auto);
            let mut rx = DpdkRx::new(port.clone(), 0, Duration::from_millis(1), check).expect("a timer");
            let start = Instant::from_nanos(1);
            while tx.pending.is_empty() {
                (0..100).for_each(|_| send_copy(&mut tx, &[1; 60], TxMeta::default()));
                tx.flush(start);
            }
            assert!(tx.stuck.is_some(), "the ring is full");
            loop {
                let mut burst = RxBurst::new();
                rx.rx_burst(start, &mut burst);
                if burst.is_empty() {
                    break;
                }
            }
            // As `reserve` does if the queue is full.
            tx.send();
            tx.flush(start + Duration::from_millis(1));
            assert!(tx.pending.is_empty() && tx.stuck.is_none());
            assert_eq!(port.stats.tx_refused.load(Ordering::Relaxed), 0);
        });
    }
}
