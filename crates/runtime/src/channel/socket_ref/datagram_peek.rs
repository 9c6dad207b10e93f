//! Peeks at queued datagrams from a byte offset on (`SO_PEEK_OFF`, `__skb_try_recv_from_queue`).

use super::SocketRef;
use crate::channel::buffers::{Fault, RecvBuffer};
use crate::channel::datagram::{DatagramHeader, HEADER_BYTES};
use ginnel_stack::error::RecvError;

/// The datagram at which a peek has ended.
pub(in crate::channel) struct PeekedAt {
    pub header: DatagramHeader,
    /// Bytes of the datagram before the offset.
    pub offset: usize,
    /// Position of the header in the stream.
    pub position: u64,
    /// How many datagrams that have to be requested precede this one.
    pub oversize_before: u32,
    /// The result of copying. A datagram that has to be requested is not copied.
    pub copied: Result<(), Fault>,
}

impl SocketRef<'_> {
    /// Copies from the datagram that has the byte `offset` of the queue on, as far as the buffers hold it,
    /// and consumes nothing. An empty datagram is passed over after the first byte of the queue, and if the
    /// position of its header is in `peeked_empty`.
    pub(in crate::channel) fn peek_datagram<B: RecvBuffer>(
        &self,
        buffers: &mut [B],
        mut offset: usize,
        peeked_empty: &[u64],
    ) -> Result<Option<PeekedAt>, RecvError> {
        let _guard = self.lock().map_err(|()| RecvError::WouldBlock)?;
        let read = self.read_position();
        let (mut ahead, mut oversize_before) = (0, 0);
        loop {
            let Some(header) = self.header_ahead(ahead) else { return Ok(None) };
            let (len, position) = (header.len as usize, read + ahead as u64);
            if offset < len || offset == 0 && !peeked_empty.contains(&position) {
                let copied = if header.is_oversize {
                    Ok(())
                } else {
                    self.copy_ahead(buffers, ahead + HEADER_BYTES + offset, len - offset)
                };
                return Ok(Some(PeekedAt { header, offset, position, oversize_before, copied }));
            }
            offset -= len;
            ahead += header.stream_bytes();
            oversize_before += u32::from(header.is_oversize);
        }
    }
}
