//! The sending half.

use super::AfXdpStats;
use super::filter::AttachedProgram;
use super::rings::{CONTINUED, ConsumerRing, ProducerRing, XdpDescriptor};
use super::socket::XdpSocket;
use super::umem::TxChunks;
use core::time::Duration;
use ginnel_stack::device::{Capabilities, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// When a kernel that could not take all frames is asked again.
const BUSY_RETRY: Duration = Duration::from_micros(50);
/// The same for an interface that is down.
const DOWN_RETRY: Duration = Duration::from_millis(10);
/// Calls of one flush at the most: before Linux 6.17 each sends 32 frames.
const KICKS_MAX: u32 = 64;

pub(super) struct AfXdpTx {
    socket: Arc<XdpSocket>,
    ring: ProducerRing<XdpDescriptor>,
    completion: ConsumerRing<u64>,
    chunks: TxChunks,
    chunk_bytes: usize,
    /// Chunks that this side holds; the one used last, which is in the cache, is used first.
    free_chunks: Vec<u64>,
    /// Number of all chunks.
    chunk_count: usize,
    /// Where a frame that takes several chunks is built; empty if none does.
    staged: Box<[u8]>,
    /// The frame that is being built is there.
    is_staged: bool,
    /// When `flush` is to be called again.
    retry_at: Option<Instant>,
    capabilities: Capabilities,
    stats: Arc<AfXdpStats>,
    /// The program stays as long as a half is there.
    _program: Arc<AttachedProgram>,
}

impl AfXdpTx {
    pub(super) fn new(
        socket: Arc<XdpSocket>,
        (ring, completion, chunks): (ProducerRing<XdpDescriptor>, ConsumerRing<u64>, TxChunks),
        chunk_bytes: usize,
        capabilities: Capabilities,
        stats: Arc<AfXdpStats>,
        attached: Arc<AttachedProgram>,
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
            _program: attached,
        }
    }

    /// Takes back the chunks of frames that were sent.
    fn reap_completions(&mut self) {
        let available = self.completion.available();
        for ahead in 0..available {
            let address = self.completion.peek(ahead);
            // More chunks than there are cannot come back.
            if self.chunks.is_chunk(address) && self.free_chunks.len() < self.chunk_count {
                self.free_chunks.push(address);
            } else {
                self.stats.tx_invalid.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.completion.release(available);
    }

    fn send(&mut self, address: u64, len: usize, options: u32) {
        // There is an entry for each chunk. Cannot truncate: a chunk's length.
        let pushed = self.ring.push(XdpDescriptor { address, len: len as u32, options });
        debug_assert!(pushed);
    }

    /// Cuts the staged frame over several chunks.
    fn send_staged(&mut self, len: usize) {
        let mut at = 0;
        while at < len {
            let part = (len - at).min(self.chunk_bytes);
            // `reserve` saw as many.
            let Some(address) = self.free_chunks.pop() else { return };
            self.chunks.chunk_mut(address, part).copy_from_slice(&self.staged[at..at + part]);
            at += part;
            self.send(address, part, if at < len { CONTINUED } else { 0 });
        }
    }

    /// Calls the kernel, which sends what it can. When to call it again, if that was not all.
    fn kick(&mut self, now: Instant) -> Option<Instant> {
        for _ in 0..KICKS_MAX {
            let before = self.ring.pending();
            let result = self.socket.kick_tx();
            self.stats.tx_calls.fetch_add(1, Ordering::Relaxed);
            let waiting = self.ring.pending();
            match result {
                // A driver that reads the ring itself does so when it gets to it.
                _ if waiting == 0 || (result.is_ok() && !self.socket.is_copy_mode) => return None,
                // One call sends only so many.
                Err(Errno::AGAIN | Errno::INTR) | Ok(()) if waiting < before => {}
                Err(Errno::AGAIN | Errno::BUSY | Errno::NOBUFS | Errno::INTR) | Ok(()) => break,
                Err(error) => {
                    if self.stats.tx_errors.fetch_add(1, Ordering::Relaxed) == 0 {
                        tracing::warn!(%error, "sending over AF_XDP; further errors are only counted");
                    }
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
