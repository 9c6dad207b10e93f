//! Staging of frames for layers that change or examine what they send: frames are built in a buffer of the
//! layer and copied.

use ginnel_stack::device::{TxMeta, TxQueue};

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
