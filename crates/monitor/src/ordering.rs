//! Orders the segments of a connection: what the monitor and the reader of recordings have in common.

use crate::connection::flag;
use crate::counters::MonitorCounters;
use crate::flow_table::{NONE, Tracking};
use crate::frame::FIN;
use crate::framing::REQUEST;
use crate::streams::{EarlyResult, EarlySegment, StreamPool};
use ginnel_stack::time::Instant;

/// Largest distance of a sequence number from that of the next byte. One that is further away belongs to
/// another connection with the same ports. RFC 7323 §2.3 allows windows of 1 GiB; Linux uses at most 32 MiB
/// unless configured.
const DISTANCE_MAX: u32 = 1 << 27;

/// A segment on its way through [`OrderedStreams`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival<'a> {
    pub(crate) now: Instant,
    pub(crate) direction: usize,
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: u8,
    /// The captured beginning of the payload.
    pub(crate) bytes: &'a [u8],
    /// Length of the payload.
    pub(crate) len: u32,
}

/// A connection that gets its segments as they were captured, and its bytes in their order.
pub(crate) trait OrderedStreams {
    /// Returns the connection's state, the pool of early segments, and the counters.
    fn parts(&mut self) -> (&mut Tracking, &mut StreamPool, &mut MonitorCounters);

    /// Gets the next bytes of a direction, `len` of which `bytes` were captured.
    fn examine(&mut self, direction: usize, now: Instant, ack: u32, bytes: &[u8], len: u32);

    /// Learns that the next bytes of a direction were not captured.
    fn skip(&mut self, direction: usize, len: u32, now: Instant, ack: u32);

    /// Learns that a direction has ended, after all its bytes.
    fn end_direction(&mut self, direction: usize, now: Instant, ack: u32);

    /// Learns that a direction goes on at a sequence number that cannot follow.
    fn lose_place(&mut self, direction: usize);

    /// Skips gaps whose bytes the receiver has acknowledged: they were not captured.
    #[inline]
    fn receive_ack(&mut self, acknowledged: usize, arrival: &Arrival<'_>) {
        let (tracking, ..) = self.parts();
        if tracking.streams == NONE {
            return;
        }
        while let Some(first) = self.first_early(acknowledged)
            && is_at_or_after(arrival.ack, first)
        {
            self.skip_gap(acknowledged, arrival.now, arrival.seq);
        }
    }

    /// Orders the bytes of a segment.
    #[inline]
    fn receive_data(&mut self, arrival: &Arrival<'_>) {
        let direction = arrival.direction;
        let (tracking, ..) = self.parts();
        if tracking.flags & flag::KNOWN[direction] == 0 {
            tracking.next[direction] = arrival.seq;
            tracking.flags |= flag::KNOWN[direction];
        }
        if arrival.seq != tracking.next[direction] && !self.receive_unexpected(arrival) {
            return;
        }
        self.examine_new(arrival);
        if self.parts().0.streams != NONE {
            self.examine_early(direction, arrival.now);
        }
    }

    /// Handles a segment that does not begin with the next byte. Returns true if it has the next byte.
    #[cold]
    fn receive_unexpected(&mut self, arrival: &Arrival<'_>) -> bool {
        let &Arrival { direction, seq, len, .. } = arrival;
        let (tracking, _, counters) = self.parts();
        let next = tracking.next[direction];
        // The distance as a signed number, modulo 2^32.
        let distance = seq.wrapping_sub(next) as i32;
        if distance.unsigned_abs() > DISTANCE_MAX {
            self.lose_place(direction);
            let (tracking, streams, _) = self.parts();
            streams.release(&mut tracking.streams);
            tracking.next[direction] = seq;
            return tracking.flags & flag::GIVEN_UP == 0;
        }
        if distance < 0 {
            // One byte before the next one is a keep-alive probe (RFC 9293 §3.8.4).
            if len > 1 || len == 1 && distance != -1 {
                match direction {
                    REQUEST => counters.request_retransmissions += 1,
                    _ => counters.response_retransmissions += 1,
                }
            }
            let end = seq.wrapping_add(len + u32::from(arrival.flags & FIN != 0));
            return end != next && is_at_or_after(end, next);
        }
        counters.early_segments += 1;
        let is_fin = arrival.flags & FIN != 0;
        loop {
            let (tracking, streams, counters) = self.parts();
            let (at, ack) = (arrival.now, arrival.ack);
            let segment = EarlySegment { at, seq, ack, len, is_fin, bytes: arrival.bytes.to_vec() };
            let next = tracking.next[direction];
            match streams.keep_early(&mut tracking.streams, direction, next, segment) {
                EarlyResult::Kept => return false,
                EarlyResult::Known => {
                    match direction {
                        REQUEST => counters.request_retransmissions += 1,
                        _ => counters.response_retransmissions += 1,
                    }
                    return false;
                }
                EarlyResult::Full => {
                    let first = streams.first_early(tracking.streams, direction);
                    match first.filter(|first| !is_at_or_after(*first, seq)) {
                        Some(_) => self.skip_gap(direction, arrival.now, arrival.ack),
                        // The bytes up to this segment are missing.
                        None => {
                            self.skip_bytes(direction, seq.wrapping_sub(next), arrival.now, arrival.ack);
                            return self.parts().0.flags & flag::GIVEN_UP == 0;
                        }
                    }
                    let (tracking, ..) = self.parts();
                    if tracking.flags & flag::GIVEN_UP != 0 {
                        return false;
                    }
                    if is_at_or_after(tracking.next[direction], seq) {
                        return true;
                    }
                }
            }
        }
    }

    /// Examines the bytes of a segment from the next one on. The segment begins with it or before it.
    #[inline]
    fn examine_new(&mut self, arrival: &Arrival<'_>) {
        let &Arrival { now, direction, seq, ack, flags, bytes, len } = arrival;
        // Number of bytes that were seen before.
        let old = self.parts().0.next[direction].wrapping_sub(seq).min(len);
        let (bytes, len) = (bytes.get(old as usize..).unwrap_or(&[]), len - old);
        if len > 0 {
            self.examine(direction, now, ack, bytes, len);
            let (tracking, ..) = self.parts();
            tracking.next[direction] = tracking.next[direction].wrapping_add(len);
        }
        if flags & FIN != 0 {
            let (tracking, ..) = self.parts();
            if tracking.flags & flag::FIN[direction] == 0 {
                tracking.next[direction] = tracking.next[direction].wrapping_add(1);
                tracking.flags |= flag::FIN[direction];
                self.end_direction(direction, now, ack);
            }
        }
    }

    /// Examines early segments that have become the next ones. Their bytes count as received at `now`, when
    /// the gap before them was filled, or when they arrived, if that was later.
    fn examine_early(&mut self, direction: usize, mut now: Instant) {
        loop {
            let (tracking, streams, _) = self.parts();
            let next = tracking.next[direction];
            let first = streams.first_early(tracking.streams, direction);
            if first.is_none_or(|first| !is_at_or_after(next, first)) {
                return;
            }
            let Some(segment) = streams.take_early(tracking.streams, direction) else { return };
            let EarlySegment { at, seq, ack, len, is_fin, bytes } = segment;
            now = now.max(at);
            let end = seq.wrapping_add(len + u32::from(is_fin));
            if end != next && is_at_or_after(end, next) {
                let flags = if is_fin { FIN } else { 0 };
                self.examine_new(&Arrival { now, direction, seq, ack, flags, bytes: &bytes, len });
            }
        }
    }

    /// Skips the gap before the first early segment.
    fn skip_gap(&mut self, direction: usize, now: Instant, ack: u32) {
        let Some(first) = self.first_early(direction) else { return };
        let gap = first.wrapping_sub(self.parts().0.next[direction]);
        if gap <= DISTANCE_MAX {
            self.skip_bytes(direction, gap, now, ack);
        }
        // The gap was filled before the capture saw it: the segments after it count from their own arrival.
        self.examine_early(direction, Instant::ZERO);
    }

    /// Skips bytes that were not captured.
    fn skip_bytes(&mut self, direction: usize, len: u32, now: Instant, ack: u32) {
        self.parts().2.missed_bytes += u64::from(len);
        self.skip(direction, len, now, ack);
        let (tracking, ..) = self.parts();
        tracking.next[direction] = tracking.next[direction].wrapping_add(len);
    }

    /// Returns the sequence number of the first early segment of a direction.
    fn first_early(&mut self, direction: usize) -> Option<u32> {
        let (tracking, streams, _) = self.parts();
        streams.first_early(tracking.streams, direction)
    }
}

/// Returns whether a sequence number is `other` or after it, modulo 2^32.
#[inline(always)]
pub(crate) fn is_at_or_after(seq: u32, other: u32) -> bool {
    // The distance as a signed number.
    seq.wrapping_sub(other) as i32 >= 0
}
