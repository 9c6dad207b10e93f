//! The sending half of an AF_XDP device.

use super::filter::AttachedProgram;
use super::rings::{CONTINUED, ConsumerRing, ProducerRing, XdpDescriptor};
use super::socket::{TxRings, XdpSocket};
use super::umem::TxChunks;
use super::{AfXdpStats, add};
use crate::interface_state::InterfaceState;
use core::time::Duration;
use ginnel_stack::device::{Capabilities, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use rustix::io::Errno;
use std::sync::Arc;

/// Retry interval after the kernel could not accept all frames.
const BUSY_RETRY: Duration = Duration::from_micros(50);
/// Retry interval while the interface is down.
const DOWN_RETRY: Duration = Duration::from_millis(10);
/// Maximum number of calls per flush: before Linux 6.17 each call sends 32 frames.
const KICKS_MAX: u32 = 64;

pub(super) struct AfXdpTx {
    socket: Arc<XdpSocket>,
    ring: ProducerRing<XdpDescriptor>,
    completion: ConsumerRing<u64>,
    chunks: TxChunks,
    chunk_bytes: usize,
    /// Chunks that this side owns. The chunk used last, which is still in the cache, is reused first.
    free_chunks: Vec<u64>,
    /// Number of chunks in total, free or in use.
    chunk_count: usize,
    /// Buffer for a frame that spans several chunks; empty if no frame can.
    staged: Box<[u8]>,
    /// True if the frame under construction is in `staged`.
    is_staged: bool,
    /// Time at which `flush` must be called again.
    retry_at: Option<Instant>,
    capabilities: Capabilities,
    stats: Arc<AfXdpStats>,
    interface: Arc<InterfaceState>,
    /// Keeps the XDP program attached while either half of the device exists.
    _program: Arc<AttachedProgram>,
}

impl AfXdpTx {
    pub(super) fn new(
        socket: Arc<XdpSocket>,
        TxRings { ring, completion, chunks }: TxRings,
        chunk_bytes: usize,
        capabilities: Capabilities,
        stats: Arc<AfXdpStats>,
        interface: Arc<InterfaceState>,
        program: Arc<AttachedProgram>,
    ) -> Self {
        let longest = capabilities.mtu + 18;
        let free_chunks: Vec<u64> = chunks.addresses().collect();
        Self {
            socket,
            ring,
            completion,
            chunk_count: free_chunks.len(),
            free_chunks,
            chunks,
            chunk_bytes,
            staged: vec![0; if longest > chunk_bytes { longest } else { 0 }].into_boxed_slice(),
            is_staged: false,
            retry_at: None,
            capabilities,
            stats,
            interface,
            _program: program,
        }
    }

    /// Takes the chunks of transmitted frames from the completion ring.
    fn reap_completions(&mut self) {
        let available = self.completion.available();
        for ahead in 0..available {
            let address = self.completion.peek(ahead);
            // The kernel cannot return more chunks than exist.
            if self.chunks.is_chunk(address) && self.free_chunks.len() < self.chunk_count {
                self.free_chunks.push(address);
            } else {
                add(&self.stats.tx_invalid, 1);
            }
        }
        self.completion.release(available);
    }

    fn send(&mut self, address: u64, len: usize, options: u32) {
        // The ring has an entry for each chunk. The cast does not truncate the length of a chunk.
        let pushed = self.ring.push(XdpDescriptor { address, len: len as u32, options });
        debug_assert!(pushed);
    }

    /// Splits the staged frame into several chunks.
    fn send_staged(&mut self, len: usize) {
        let mut at = 0;
        while at < len {
            let part = (len - at).min(self.chunk_bytes);
            // `reserve` checked that there are enough chunks.
            let Some(address) = self.free_chunks.pop() else { return };
            self.chunks.chunk_mut(address, part).copy_from_slice(&self.staged[at..at + part]);
            at += part;
            self.send(address, part, if at < len { CONTINUED } else { 0 });
        }
    }

    /// Calls the kernel, which sends as many frames as it can. Returns the time of the next call if frames
    /// are left.
    fn kick(&mut self, now: Instant) -> Option<Instant> {
        for _ in 0..KICKS_MAX {
            let before = self.ring.pending();
            let result = self.socket.kick_tx();
            add(&self.stats.tx_calls, 1);
            let waiting = self.ring.pending();
            if result.is_ok() {
                self.interface.record_sent();
            }
            match result {
                // A driver in zero-copy mode reads the ring itself, asynchronously.
                _ if waiting == 0 || (result.is_ok() && !self.socket.is_copy_mode) => return None,
                // One call sends a limited number of frames.
                Err(Errno::AGAIN | Errno::INTR) | Ok(()) if waiting < before => {}
                Err(Errno::AGAIN | Errno::BUSY | Errno::NOBUFS | Errno::INTR) | Ok(()) => break,
                Err(error) => {
                    add(&self.stats.tx_errors, 1);
                    self.interface.record_failure(error);
                    return Some(now + DOWN_RETRY);
                }
            }
        }
        Some(now + BUSY_RETRY)
    }
}

impl TxQueue for AfXdpTx {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let needed = len.div_ceil(self.chunk_bytes).max(1);
        if self.free_chunks.len() < needed {
            self.reap_completions();
            if self.free_chunks.len() < needed {
                return None;
            }
        }
        self.is_staged = needed > 1;
        if self.is_staged {
            return self.staged.get_mut(..len);
        }
        let &address = self.free_chunks.last()?;
        Some(self.chunks.chunk_mut(address, len))
    }

    fn commit(&mut self, len: usize, _meta: TxMeta) {
        if self.is_staged {
            return self.send_staged(len);
        }
        if let Some(address) = self.free_chunks.pop() {
            self.send(address, len, 0);
        }
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        if self.chunk_count - self.free_chunks.len() >= frames {
            self.reap_completions();
        }
        self.chunk_count - self.free_chunks.len() >= frames
    }

    fn flush(&mut self, now: Instant) {
        let new = self.ring.publish();
        let due = self.retry_at.is_some_and(|again| again <= now);
        if !new && !due {
            return;
        }
        if self.ring.pending() == 0 {
            self.retry_at = None;
            return self.reap_completions();
        }
        self.retry_at =
            if self.socket.need_wakeup && !self.ring.needs_wakeup() { None } else { self.kick(now) };
        self.reap_completions();
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.retry_at
    }
}
