//! Requests that wait for their responses: a queue for each connection, in one pool.

use crate::flow_table::NONE;
use ginnel_stack::time::Instant;

const IS_HIGH: u64 = 1 << 63;
const NO_BODY: u64 = 1 << 62;
/// Largest time, in nanoseconds: 146 years. Later times are stored as this one.
const TIME_MASK: u64 = NO_BODY - 1;

/// A request without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutstandingRequest {
    /// When its last byte was seen; until then, when its head was complete.
    pub(crate) at: Instant,
    /// Sequence number after its last byte that was seen.
    pub(crate) end: u32,
    /// True if it has high priority.
    pub(crate) is_high: bool,
    /// True if its response has no body whatever its head says (HEAD).
    pub(crate) without_body: bool,
}

/// An entry of a queue, 16 bytes. The entries of a queue form a circle.
#[derive(Clone, Copy, Debug)]
struct Entry {
    time_and_flags: u64,
    end: u32,
    next: u32,
}

impl Entry {
    fn of(request: &OutstandingRequest, next: u32) -> Self {
        let flags =
            if request.is_high { IS_HIGH } else { 0 } | if request.without_body { NO_BODY } else { 0 };
        let time = request.at.as_nanos().min(TIME_MASK);
        Self { time_and_flags: time | flags, end: request.end, next }
    }

    fn request(self) -> OutstandingRequest {
        OutstandingRequest {
            at: Instant::from_nanos(self.time_and_flags & TIME_MASK),
            end: self.end,
            is_high: self.time_and_flags & IS_HIGH != 0,
            without_body: self.time_and_flags & NO_BODY != 0,
        }
    }
}

/// The queues of all connections. A connection keeps the index of its newest request, or [`NONE`].
#[derive(Debug)]
pub(crate) struct OutstandingRequests {
    entries: Vec<Entry>,
    free: u32,
    used: usize,
    max: usize,
}

impl OutstandingRequests {
    /// Creates an empty pool for `max` requests.
    pub(crate) fn new(max: usize) -> Self {
        Self { entries: Vec::new(), free: NONE, used: 0, max: max.min(NONE as usize) }
    }

    /// Returns the number of requests in all queues.
    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// Appends a request to the queue `newest`. Returns false if the pool is full.
    pub(crate) fn push(&mut self, newest: &mut u32, request: &OutstandingRequest) -> bool {
        if self.used >= self.max {
            return false;
        }
        let entry = Entry::of(request, NONE);
        let index = if self.free == NONE {
            self.entries.push(entry);
            self.entries.len() as u32 - 1
        } else {
            let index = self.free;
            self.free = self.entries[index as usize].next;
            self.entries[index as usize] = entry;
            index
        };
        let oldest = match *newest {
            NONE => index,
            newest => core::mem::replace(&mut self.entries[newest as usize].next, index),
        };
        self.entries[index as usize].next = oldest;
        *newest = index;
        self.used += 1;
        true
    }

    /// Returns the oldest request of a queue.
    pub(crate) fn oldest(&self, newest: u32) -> Option<OutstandingRequest> {
        let newest = self.entries.get(newest as usize)?;
        Some(self.entries[newest.next as usize].request())
    }

    /// Returns the newest request of a queue.
    pub(crate) fn newest(&self, newest: u32) -> Option<OutstandingRequest> {
        self.entries.get(newest as usize).map(|entry| entry.request())
    }

    /// Replaces the newest request of a queue.
    pub(crate) fn update_newest(&mut self, newest: u32, request: &OutstandingRequest) {
        if let Some(entry) = self.entries.get_mut(newest as usize) {
            *entry = Entry::of(request, entry.next);
        }
    }

    /// Removes the oldest request of a queue.
    pub(crate) fn pop(&mut self, newest: &mut u32) -> Option<OutstandingRequest> {
        let index = self.entries.get(*newest as usize)?.next;
        let oldest = self.entries[index as usize];
        if index == *newest {
            *newest = NONE;
        } else {
            self.entries[*newest as usize].next = oldest.next;
        }
        self.entries[index as usize].next = self.free;
        self.free = index;
        self.used -= 1;
        Some(oldest.request())
    }

    /// Removes all requests of a queue, and returns their number.
    pub(crate) fn clear(&mut self, newest: &mut u32) -> u64 {
        core::iter::from_fn(|| self.pop(newest)).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(at: u64) -> OutstandingRequest {
        OutstandingRequest {
            at: Instant::from_nanos(at),
            end: at as u32,
            is_high: at % 2 == 1,
            without_body: at % 3 == 1,
        }
    }

    #[test]
    fn times_beyond_the_largest_are_the_largest() {
        let (mut pool, mut queue) = (OutstandingRequests::new(1), NONE);
        let at = |nanos| OutstandingRequest { at: Instant::from_nanos(nanos), ..request(2) };
        for nanos in [TIME_MASK, NO_BODY, IS_HIGH, u64::MAX] {
            assert!(pool.push(&mut queue, &at(nanos)));
            assert_eq!(pool.pop(&mut queue), Some(at(TIME_MASK)), "{nanos:#x}");
        }
    }

    #[test]
    fn queues_are_independent_and_ordered() {
        let (mut pool, mut queues) = (OutstandingRequests::new(10), [NONE; 2]);
        for at in 0..10 {
            assert!(pool.push(&mut queues[at as usize % 2], &request(at)));
        }
        assert!(!pool.push(&mut queues[0], &request(10)), "the pool is full");
        assert_eq!((pool.oldest(queues[1]), pool.newest(queues[1])), (Some(request(1)), Some(request(9))));
        let odd: Vec<_> = core::iter::from_fn(|| pool.pop(&mut queues[1])).collect();
        assert_eq!(odd, [1, 3, 5, 7, 9].map(request));
        assert_eq!((pool.len(), queues[1], pool.oldest(NONE)), (5, NONE, None));
        assert_eq!((pool.clear(&mut queues[0]), pool.len()), (5, 0));
        assert!(pool.push(&mut queues[0], &request(11)));
        assert_eq!(pool.entries.len(), 10, "entries are used again");
    }
}
