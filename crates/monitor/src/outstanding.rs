//! Requests that wait for their responses: a queue for each connection, in one pool.

use crate::flow_table::NONE;
use crate::framing::RequestMethod;
use ginnel_stack::time::Instant;

// The two highest bits are the kind of a request. Requests of HTTP, which alone have methods, are never of
// high priority.
const IS_HIGH: u64 = 1 << 62;
const IS_HEAD: u64 = 2 << 62;
const IS_CONNECT: u64 = 3 << 62;
/// Largest time, in nanoseconds: 146 years. Later times are stored as this one.
const TIME_MASK: u64 = IS_HIGH - 1;

/// A request without a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutstandingRequest {
    /// When its last byte was seen; until then, when its head was complete.
    pub(crate) at: Instant,
    /// Sequence number after its last byte that was seen.
    pub(crate) end: u32,
    /// True if it has high priority. False if it has a method.
    pub(crate) is_high: bool,
    /// Its method.
    pub(crate) method: RequestMethod,
}

/// An entry of a queue, 16 bytes. The entries of a queue form a circle.
#[derive(Clone, Copy, Debug)]
struct Entry {
    time_and_kind: u64,
    end: u32,
    next: u32,
}

impl Entry {
    fn of(request: &OutstandingRequest, next: u32) -> Self {
        let kind = match request.method {
            RequestMethod::Other if request.is_high => IS_HIGH,
            RequestMethod::Other => 0,
            RequestMethod::Head => IS_HEAD,
            RequestMethod::Connect => IS_CONNECT,
        };
        let time = request.at.as_nanos().min(TIME_MASK);
        Self { time_and_kind: time | kind, end: request.end, next }
    }

    fn request(self) -> OutstandingRequest {
        let (is_high, method) = match self.time_and_kind & !TIME_MASK {
            IS_HIGH => (true, RequestMethod::Other),
            IS_HEAD => (false, RequestMethod::Head),
            IS_CONNECT => (false, RequestMethod::Connect),
            _ => (false, RequestMethod::Other),
        };
        let at = Instant::from_nanos(self.time_and_kind & TIME_MASK);
        OutstandingRequest { at, end: self.end, is_high, method }
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
        let (is_high, method) = [
            (false, RequestMethod::Other),
            (true, RequestMethod::Other),
            (false, RequestMethod::Head),
            (false, RequestMethod::Connect),
        ][at as usize % 4];
        OutstandingRequest { at: Instant::from_nanos(at), end: at as u32, is_high, method }
    }

    #[test]
    fn times_beyond_the_largest_are_the_largest() {
        let (mut pool, mut queue) = (OutstandingRequests::new(1), NONE);
        let at = |nanos| OutstandingRequest { at: Instant::from_nanos(nanos), ..request(2) };
        for nanos in [TIME_MASK, IS_HIGH, IS_HEAD, u64::MAX] {
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
