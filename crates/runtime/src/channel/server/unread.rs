//! Bytes in the region that clients have not read. The engine counts bytes as consumed when they are in the
//! region, so it is told how many are unread where that decides which window it advertises: on connections
//! with a small receive buffer, and on others until their application has kept up with what arrives.

use super::super::region::Direction;
use super::super::sync::{Ordering, fence};
use super::domain::Domain;
use crate::context::Context;
use ginnel_stack::handle::Conn;
use ginnel_stack::tcp::USUAL_RECV_WINDOW_MIN;

impl Domain {
    /// Returns the position in the stream after which unread bytes are reported for the first time.
    /// `recv_buffer_bytes`: the size of the receive buffer that clients have set.
    pub(super) fn report_unread_after(&self, recv_buffer_bytes: Option<u32>) -> u64 {
        match recv_buffer_bytes {
            // Unread bytes in the region alone exceed the buffer.
            Some(bytes) if (bytes as usize) < self.region.buffer_bytes() => 0,
            Some(_) => u64::MAX,
            // Larger buffers alone may exceed the usual window, so what is in them is not reported.
            None if 2 * self.region.buffer_bytes() > USUAL_RECV_WINDOW_MIN as usize => u64::MAX,
            None => self.unreported_bytes_max(),
        }
    }

    /// Returns how many unread bytes need not be reported, because the window may be twice as large as the
    /// region's buffer whether or not clients read.
    fn unreported_bytes_max(&self) -> u64 {
        self.region.buffer_bytes() as u64 / 2
    }

    /// Tells the engine how many bytes clients have not read, which reduces the advertised window, if that is
    /// necessary.
    #[cold]
    pub(super) fn report_unread(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) {
        let unreported_max = self.unreported_bytes_max();
        let area = self.region.socket(socket);
        let entry = &mut self.sockets[socket as usize];
        let read = area.positions(Direction::Incoming).read();
        if entry.unread_threshold() != 0 {
            let has_grown = cx.has_grown_window(conn);
            if has_grown || entry.received.saturating_sub(read) <= unreported_max {
                // A client writes the position, so it may be any number.
                let read = read.min(entry.received);
                entry.set_unread_threshold(if has_grown { u64::MAX } else { read + unreported_max });
                if core::mem::take(&mut entry.is_unread_reported) {
                    cx.set_unread(conn, 0);
                }
                return;
            }
        }
        entry.is_unread_reported = true;
        area.wants_recv_space.store(1, Ordering::Relaxed);
        // Pairs with the fence of a client that has read.
        fence(Ordering::SeqCst);
        let unread = entry.received.saturating_sub(area.positions(Direction::Incoming).read());
        cx.set_unread(conn, unread.min(self.region.largest_buffer_bytes() as u64) as u32);
    }
}
