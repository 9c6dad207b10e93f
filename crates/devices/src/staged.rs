//! Sending through a layer that wants to see what it sends: the room of the device below cannot be looked at once the engine has filled it, so
//! frames are built here and copied there.

use ginnel_stack::device::{TxMeta, TxQueue};

/// A device to send to, and the frame that is being built for it.
pub(crate) struct StagedTx {
    pub(crate) inner: Box<dyn TxQueue + Send>,
    /// Lent by `reserve`.
    buffer: Vec<u8>,
}

impl StagedTx {
    pub(crate) fn new(inner: Box<dyn TxQueue + Send>) -> Self {
        Self { inner, buffer: Vec::new() }
    }

    /// Room for a frame, if the device below has it too.
    pub(crate) fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.inner.reserve(len)?;
        self.buffer.resize(len, 0);
        Some(&mut self.buffer)
    }

    /// Sends what was built, and shows it.
    pub(crate) fn commit(&mut self, len: usize, meta: TxMeta) -> Option<&[u8]> {
        let frame = &self.buffer[..len];
        // There was room for at least as much when it was reserved.
        self.inner.reserve(len)?.copy_from_slice(frame);
        self.inner.commit(len, meta);
        Some(frame)
    }
}
