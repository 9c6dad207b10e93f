//! Unordered receive and unordered send (docs/unordered.md), which pass through requests.

use super::Client;
use crate::channel::control::{ChannelReply, ChannelRequest, UnorderedReply};
use crate::channel::sync::Ordering;
use ginnel_stack::error::{RecvError, SendError, Stale};
use ginnel_stack::handle::Conn;

/// Longest message of [`Client::send_message`], which has to fit into a message of the broker.
// limit: bytes of a message with GINNEL_UNORDERED_SEND
const MESSAGE_BYTES_MAX: usize = 64 << 10;

impl Client {
    /// Returns whether bytes of a connection can be taken before bytes which precede them.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn has_unordered(&self, conn: Conn) -> Result<bool, Stale> {
        self.tracked(conn)?;
        Ok(self.region.socket(conn.index()).unordered.load(Ordering::Acquire) != 0)
    }

    /// Takes up to `max` bytes of a connection that arrived before bytes which precede them, of one segment
    /// at most. Without any, returns the offset of the next byte in order, and how many bytes from there on
    /// can be read that have consecutive offsets. Only valid while no other process reads from the
    /// connection.
    ///
    /// # Errors
    /// Returns [`RecvError::Stale`] if the handle is stale or the shard is gone.
    pub fn recv_unordered(&mut self, conn: Conn, max: u32) -> Result<UnorderedReply, RecvError> {
        let socket_ref = self.socket_ref(conn).map_err(|_| RecvError::Stale)?;
        let read = socket_ref.read_position();
        match self.call(ChannelRequest::RecvUnordered(conn.index(), read, max)) {
            Ok(ChannelReply::RecvUnordered(Ok(reply))) => Ok(reply),
            _ => Err(RecvError::Stale),
        }
    }

    /// Gives back bytes that [`Client::recv_unordered`] took last and that could not be delivered: they are
    /// taken again by the next call.
    ///
    /// # Errors
    /// Returns an error if the handle is stale or the shard is gone.
    pub fn return_unordered(&mut self, conn: Conn, offset: u64, bytes: Vec<u8>) -> Result<(), Stale> {
        let _ = self.socket_ref(conn)?;
        let returned = self.call(ChannelRequest::ReturnUnordered(conn.index(), offset, bytes));
        returned.map(|_| ()).map_err(|_| Stale::Handle)
    }

    /// Queues a message with a priority (0 to 7, in the order of [`priority`](ginnel_stack::priority)) before
    /// queued messages of lower priority of which no byte was sent, and after bytes that were written before.
    ///
    /// # Errors
    /// As [`Client::send`]; [`SendError::Full`] if there is no room for the message now, and
    /// [`SendError::TooLong`] if there will never be any.
    pub fn send_message(&mut self, conn: Conn, bytes: Vec<u8>, priority: u8) -> Result<(), SendError> {
        let _ = self.socket_ref(conn).map_err(|_| SendError::Stale)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(SendError::TooLong);
        }
        match self.call(ChannelRequest::SendMessage(conn.index(), bytes, priority)) {
            Ok(ChannelReply::SendMessage(result)) => {
                if result == Err(SendError::Full) {
                    // `Writable` is reported when the stack notifies.
                    let _ = self.await_send_space(conn, usize::MAX);
                }
                result
            }
            _ => Err(SendError::Stale),
        }
    }
}
