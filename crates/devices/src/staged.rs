//! Staging of frames for layers that change what they send, or that examine it above a device that cannot
//! read reserved room ([`TxQueue::can_read_reserved`]): frames are built in a buffer of the layer and copied.

use ginnel_stack::device::{Capabilities, TxClass, TxMeta, TxQueue};
use ginnel_stack::time::Instant;

/// A sending half and the frame that is being built for it.
pub(crate) struct StagedTx {
    pub(crate) inner: Box<dyn TxQueue + Send>,
    /// Buffer that `reserve` lends.
    buffer: Vec<u8>,
}

impl StagedTx {
    pub(crate) fn new(inner: Box<dyn TxQueue + Send>) -> Self {
        Self { inner, buffer: Vec::new() }
    }

    /// Lends a buffer for a frame of `len` bytes, if the device below has room for the frame.
    pub(crate) fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.inner.reserve(len)?;
        // Grows to the longest frame, so that no byte is cleared per frame.
        if self.buffer.len() < len {
            self.buffer.resize(len, 0);
        }
        Some(&mut self.buffer[..len])
    }

    /// Returns the first `len` bytes of the buffer, or nothing if it was never that long.
    pub(crate) fn frame(&self, len: usize) -> &[u8] {
        self.buffer.get(..len).unwrap_or_default()
    }

    /// Sends the first `len` bytes of the buffer and returns them. Returns `None` if the device below has no
    /// room any more.
    pub(crate) fn commit(&mut self, len: usize, meta: TxMeta) -> Option<&[u8]> {
        let frame = &self.buffer[..len];
        // The device had room for at least `len` bytes when the buffer was reserved.
        self.inner.reserve(len)?.copy_from_slice(frame);
        self.inner.commit(len, meta);
        Some(frame)
    }
}

/// The buffer as a layer of its own, which makes the room of any device readable.
impl TxQueue for StagedTx {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.reserve(len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.commit(len, meta);
    }

    fn can_read_reserved(&self) -> bool {
        true
    }

    fn reserved(&mut self, len: usize) -> &[u8] {
        self.frame(len)
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        self.inner.has_backlog(frames)
    }

    fn select_class(&mut self, class: Option<TxClass>) {
        self.inner.select_class(class);
    }

    fn flush(&mut self, now: Instant) {
        self.inner.flush(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }

    fn remove_layer(self: Box<Self>) -> Option<Box<dyn TxQueue + Send>> {
        Some(self.inner)
    }
}
