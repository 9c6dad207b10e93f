//! Data that are still in the frames of the current burst, in the order in which they arrived.
//!
//! The owner consumes them in that order, so the requested entry is nearly always the first one: nothing is
//! searched and nothing is moved. The queue is empty when the burst is released.

use crate::events::InlineData;
use crate::handle::Conn;

/// Data in the burst that the owner has not consumed yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingData {
    pub conn: Conn,
    pub data: InlineData,
    /// True if the event was taken: the owner is reading the data.
    pub delivered: bool,
    /// True if a later entry belongs to the same connection.
    followed: bool,
}

/// The queue of data in the burst.
#[derive(Debug, Default)]
pub(crate) struct PendingQueue {
    entries: Vec<PendingData>,
    /// Entries before this index are done.
    first: usize,
    /// True if the event of an entry was withheld, because its connection was not accepted yet.
    withheld: bool,
}

impl PendingQueue {
    /// Appends data. `again`: earlier entries may belong to the same connection.
    #[inline]
    pub fn push(&mut self, conn: Conn, data: InlineData, again: bool) {
        if again && let Some(before) = self.entries[self.first..].iter_mut().rev().find(|p| p.conn == conn) {
            before.followed = true;
        }
        self.entries.push(PendingData { conn, data, delivered: false, followed: false });
    }

    /// Returns the index of an entry.
    #[inline]
    fn position(&self, conn: Conn, data: InlineData) -> Option<usize> {
        let matches = |p: &PendingData| p.conn == conn && p.data == data;
        let first = self.entries.get(self.first)?;
        if matches(first) {
            return Some(self.first);
        }
        let found = self.entries[self.first + 1..].iter().position(matches)?;
        Some(self.first + 1 + found)
    }

    /// Records that the owner reads the data now. Returns false if they were moved to the receive buffer in
    /// the meantime.
    #[inline]
    pub fn deliver(&mut self, conn: Conn, data: InlineData) -> bool {
        let Some(at) = self.position(conn, data) else { return false };
        self.entries[at].delivered = true;
        true
    }

    /// Records that the event of an entry was not given to the owner.
    pub fn withhold(&mut self) {
        self.withheld = !self.entries.is_empty();
    }

    /// Returns whether there may be data whose events were withheld. Otherwise all events are still queued or
    /// were delivered.
    pub fn has_withheld(&self) -> bool {
        self.withheld
    }

    /// Removes an entry. Returns whether other entries belong to the connection; `None` if there is no such
    /// entry.
    #[inline]
    pub fn remove(&mut self, conn: Conn, data: InlineData) -> Option<bool> {
        let at = self.position(conn, data)?;
        if at != self.first {
            self.entries.remove(at);
            return Some(self.clear_followed(conn));
        }
        let followed = self.entries[at].followed;
        self.skip_first();
        Some(followed)
    }

    /// Takes the first entry.
    #[inline]
    pub fn pop(&mut self) -> Option<PendingData> {
        let first = *self.entries.get(self.first)?;
        self.skip_first();
        Some(first)
    }

    fn skip_first(&mut self) {
        self.first += 1;
        if self.first == self.entries.len() {
            self.entries.clear();
            (self.first, self.withheld) = (0, false);
        }
    }

    /// Returns all entries.
    pub fn iter(&self) -> impl Iterator<Item = &PendingData> {
        self.entries[self.first..].iter()
    }

    /// Returns the entries of a connection.
    pub fn of_conn(&self, conn: Conn) -> impl Iterator<Item = &PendingData> {
        self.iter().filter(move |p| p.conn == conn)
    }

    /// Removes those entries of a connection for which `unwanted` returns true. Each entry of the connection
    /// is passed to it once, in order.
    pub fn remove_of(&mut self, conn: Conn, mut unwanted: impl FnMut(&PendingData) -> bool) {
        self.entries.drain(..core::mem::take(&mut self.first));
        self.entries.retain(|p| p.conn != conn || !unwanted(p));
        self.clear_followed(conn);
    }

    /// Records that no entry follows the last one of a connection. Returns whether the connection has an
    /// entry.
    fn clear_followed(&mut self, conn: Conn) -> bool {
        let last = self.entries[self.first..].iter_mut().rev().find(|p| p.conn == conn);
        last.map(|p| p.followed = false).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Conn = Conn::new(1, 0);
    const B: Conn = Conn::new(2, 0);

    fn data(frame: u16) -> InlineData {
        InlineData { frame, start: 0, len: 10 }
    }

    fn queue() -> PendingQueue {
        let mut queue = PendingQueue::default();
        queue.push(A, data(0), false);
        queue.push(B, data(1), false);
        queue.push(A, data(2), true);
        queue
    }

    #[test]
    fn last_entry_of_connection_is_known() {
        let mut q = queue();
        assert_eq!(q.remove(A, data(0)), Some(true));
        assert_eq!(q.remove(A, data(0)), None);
        assert_eq!(q.remove(A, data(2)), Some(false));
        assert_eq!(q.remove(B, data(1)), Some(false));
        let mut q = queue();
        assert_eq!(q.remove(A, data(2)), Some(true));
        assert_eq!(q.pop().map(|p| (p.conn, p.data)), Some((A, data(0))));
        assert_eq!(q.pop().map(|p| p.conn), Some(B));
        assert!(q.pop().is_none());
    }

    #[test]
    fn removed_entries_leave_no_trace() {
        let mut q = queue();
        assert!(q.deliver(A, data(0)));
        q.remove_of(A, |p| !p.delivered);
        assert_eq!(q.of_conn(A).count(), 1);
        assert!(!q.deliver(A, data(2)));
        assert_eq!(q.remove(A, data(0)), Some(false));
        assert_eq!(q.iter().count(), 1);
    }
}
