//! The receiving half of a queue. Frames are lent in the buffers that the port wrote.
#![allow(unsafe_code)] // buffers of DPDK

use super::ffi::{self, BURST_MAX, RX_CHECKSUM_GOOD, RX_CHECKSUM_NONE, RX_HAS_HASH, RxEntry};
use super::link::LinkCheck;
use super::port::Port;
use super::thread;
use super::timer::PollTimer;
use crate::partial_checksums::PartialChecksumCheck;
use ginnel_stack::device::{BURST_FRAMES_MAX, Label, RxBurst, RxChecksum, RxFrame, RxQueue};
use ginnel_stack::time::Instant;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const _: () = assert!(BURST_FRAMES_MAX <= BURST_MAX, "a burst is received by one call");

const EMPTY: RxEntry =
    RxEntry { mbuf: core::ptr::null_mut(), data: core::ptr::null(), len: 0, hash: 0, flags: 0 };

/// The receiving half of a queue.
pub(super) struct DpdkRx {
    port: Arc<Port>,
    queue: u16,
    /// Received frames. Those from `lent` to `waiting` are lent; those from `waiting` to `end` did not fit
    /// into the last burst, because drivers receive whole bursts only.
    entries: Box<[RxEntry; BURST_MAX]>,
    lent: usize,
    waiting: usize,
    end: usize,
    /// True if the hashes of frames are those of the stack.
    knows_hashes: bool,
    partial_checksums: PartialChecksumCheck,
    timer: PollTimer,
    link_check: LinkCheck,
    /// Time of the last call.
    now: Instant,
}

// SAFETY: the buffers belong to this half alone, and DPDK lets any thread free them.
unsafe impl Send for DpdkRx {}

impl DpdkRx {
    /// Creates the half, whose sleeps last `poll_interval` at most.
    pub(super) fn new(
        port: Arc<Port>,
        queue: u16,
        poll_interval: Duration,
        partial_checksums: PartialChecksumCheck,
    ) -> io::Result<Self> {
        Ok(Self {
            knows_hashes: port.rss.is_some_and(|rss| rss.knows_hashes()),
            port,
            queue,
            entries: Box::new([EMPTY; BURST_MAX]),
            lent: 0,
            waiting: 0,
            end: 0,
            partial_checksums,
            timer: PollTimer::new(poll_interval)?,
            link_check: LinkCheck::default(),
            now: Instant::ZERO,
        })
    }

    /// Returns a copy of the descriptor to sleep on.
    pub(super) fn clone_wake_fd(&self) -> io::Result<OwnedFd> {
        self.timer.as_fd().try_clone_to_owned()
    }

    /// Frees the buffers of lent frames.
    fn release(&mut self) {
        let lent = &mut self.entries[self.lent..self.waiting];
        if !lent.is_empty() {
            // SAFETY: the port gave these buffers to this half, which frees each once: `lent` moves behind
            // them. No frame is lent any more, because the caller has a unique reference.
            unsafe { ffi::ginnel_dpdk_free_rx(lent.as_mut_ptr(), lent.len() as u32) };
            self.lent = self.waiting;
        }
    }

    /// Receives frames, if all earlier ones were released.
    fn receive(&mut self) {
        if self.lent < self.end {
            return;
        }
        let mut dropped = 0;
        // SAFETY: the queue was set up before the half was made, and only this half receives from it. There
        // are 64 entries.
        let count = unsafe {
            ffi::ginnel_dpdk_receive(self.port.number, self.queue, self.entries.as_mut_ptr(), &mut dropped)
        };
        (self.lent, self.waiting, self.end) = (0, 0, count as usize);
        if count > 0 {
            self.timer.shorten();
        }
        if dropped > 0 {
            self.port.stats.rx_dropped.fetch_add(dropped, Ordering::Relaxed);
        }
    }
}

impl RxQueue for DpdkRx {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        thread::register();
        self.now = now;
        self.release();
        self.receive();
        let count = burst.remaining_capacity().min(self.end - self.waiting);
        self.waiting += count;
        let (mut partial_checksums, knows_hashes) = (0, self.knows_hashes);
        for entry in &self.entries[self.waiting - count..self.waiting] {
            // SAFETY: the buffer holds `len` bytes of a frame, and is freed by the next call of this half at
            // the earliest, which needs the unique reference back. Nobody else has the buffer.
            let bytes: &'a [u8] = unsafe { core::slice::from_raw_parts(entry.data, entry.len as usize) };
            let checksum = if entry.flags & RX_CHECKSUM_GOOD != 0 {
                RxChecksum::Verified
            } else if entry.flags & RX_CHECKSUM_NONE != 0 {
                self.partial_checksums.checksum_of_marked(bytes)
            } else {
                self.partial_checksums.checksum_of(bytes)
            };
            partial_checksums += u64::from(matches!(checksum, RxChecksum::Partial { .. }));
            let hash = (knows_hashes && entry.flags & RX_HAS_HASH != 0).then_some(entry.hash);
            burst.push(RxFrame { checksum, label: Label::new(hash, 0), ..RxFrame::new(bytes) });
        }
        if partial_checksums > 0 {
            self.port.stats.rx_partial_checksums.fetch_add(partial_checksums, Ordering::Relaxed);
        }
    }

    fn arm(&mut self) -> bool {
        thread::register();
        self.release();
        self.receive();
        // Drivers do not expect control functions of one port on several threads.
        if self.queue == 0 {
            self.link_check.poll(self.now, &self.port.link);
        }
        self.lent == self.end && !self.port.link.is_removed() && self.timer.start()
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.timer.raw_fd())
    }

    fn computes_hashes(&self) -> bool {
        self.knows_hashes
    }

    fn is_gone(&self) -> bool {
        self.port.link.is_removed()
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        if self.queue == 0 {
            self.port.stats.report(&self.port.link.stats(), report);
        }
    }
}

impl Drop for DpdkRx {
    fn drop(&mut self) {
        self.waiting = self.end;
        self.release();
    }
}
