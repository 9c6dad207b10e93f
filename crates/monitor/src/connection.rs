//! Follows one connection: orders its segments, finds its messages, and matches responses to requests.

use crate::counters::MonitorCounters;
use crate::distribution::Distribution;
use crate::flow_table::{NONE, Tracking};
use crate::frame::{ACK, FIN, SYN};
use crate::framing::{Framing, LostFraming, MessageKind, REQUEST, RESPONSE, RequestMethod};
use crate::ordering::{Arrival, OrderedStreams, is_at_or_after};
use crate::outstanding::{OutstandingRequest, OutstandingRequests};
use crate::rules::Rules;
use crate::streams::StreamPool;
use ginnel_stack::time::Instant;

/// Flags of a connection. Those in arrays belong to one direction.
pub(crate) mod flag {
    /// The sequence number of the next byte is known.
    pub(crate) const KNOWN: [u16; 2] = [1 << 0, 1 << 1];
    /// The framing is lost: the start of the next message is unknown.
    pub(crate) const LOST: [u16; 2] = [1 << 2, 1 << 3];
    /// FIN and all bytes before it were seen.
    pub(crate) const FIN: [u16; 2] = [1 << 4, 1 << 5];
    /// The receiver has acknowledged that FIN.
    pub(crate) const FIN_ACKED: [u16; 2] = [1 << 6, 1 << 7];
    /// Earlier requests may be outstanding that were not seen.
    pub(crate) const MIDSTREAM: u16 = 1 << 8;
    /// The connection is not examined any more.
    pub(crate) const GIVEN_UP: u16 = 1 << 9;
    /// The newest outstanding request is not complete.
    pub(crate) const OPEN_REQUEST: u16 = 1 << 10;
}

/// Failures to find a message after which a connection is given up. A complete message resets their number.
const FAILURES_MAX: u8 = 32;

/// State that all connections share.
#[derive(Debug)]
pub(crate) struct Matching {
    pub(crate) rules: Rules,
    pub(crate) outstanding: OutstandingRequests,
    pub(crate) streams: StreamPool,
    pub(crate) counters: MonitorCounters,
    /// Latencies of the current interval, of low and of high priority.
    pub(crate) latencies: [Distribution; 2],
}

/// A connection, and what it shares with the others.
pub(crate) struct Connection<'a> {
    pub(crate) tracking: &'a mut Tracking,
    pub(crate) matching: &'a mut Matching,
}

impl Connection<'_> {
    fn has(&self, flag: u16) -> bool {
        self.tracking.flags & flag != 0
    }

    fn set(&mut self, flag: u16) {
        self.tracking.flags |= flag;
    }

    fn clear(&mut self, flag: u16) {
        self.tracking.flags &= !flag;
    }

    /// Handles a segment without RST. Returns true if the connection has ended.
    #[inline]
    pub(crate) fn receive(&mut self, arrival: &Arrival<'_>) -> bool {
        let Arrival { direction, ack, flags, .. } = *arrival;
        let other = 1 - direction;
        let mut arrival = *arrival;
        if flags & SYN != 0 {
            self.receive_syn(&arrival);
            arrival.seq = arrival.seq.wrapping_add(1);
        }
        if self.has(flag::GIVEN_UP) {
            if flags & FIN != 0 {
                self.set(flag::FIN[direction]);
            }
            return self.has(flag::FIN[REQUEST]) && self.has(flag::FIN[RESPONSE]);
        }
        if flags & ACK != 0 {
            self.receive_ack(other, &arrival);
        }
        if arrival.len > 0 || flags & FIN != 0 {
            self.receive_data(&arrival);
        }
        if self.tracking.streams != NONE {
            self.matching.streams.release_if_idle(&mut self.tracking.streams);
        }
        if flags & ACK != 0 && self.has(flag::FIN[other]) && ack == self.tracking.next[other] {
            self.set(flag::FIN_ACKED[other]);
        }
        self.has(flag::FIN_ACKED[REQUEST]) && self.has(flag::FIN_ACKED[RESPONSE])
    }

    /// Takes the sequence numbers of a new connection from its SYN or SYN-ACK.
    #[cold]
    fn receive_syn(&mut self, arrival: &Arrival<'_>) {
        let (direction, first) = (arrival.direction, arrival.seq.wrapping_add(1));
        let is_known = self.has(flag::KNOWN[direction]);
        if is_known && self.tracking.next[direction] == first {
            return;
        }
        if is_known {
            // The ports are used again.
            self.end();
            self.matching.counters.connections_ended += 1;
            self.matching.counters.connections_seen += 1;
            self.tracking.flags = 0;
            self.tracking.failures = 0;
        }
        self.tracking.next[direction] = first;
        self.set(flag::KNOWN[direction]);
        self.clear(flag::LOST[direction] | flag::MIDSTREAM);
        if direction == RESPONSE && arrival.flags & ACK != 0 && !self.has(flag::KNOWN[REQUEST]) {
            self.tracking.next[REQUEST] = arrival.ack;
            self.set(flag::KNOWN[REQUEST]);
            self.clear(flag::LOST[REQUEST]);
        }
    }

    /// Skips bytes of the current message.
    fn skip_in_message(&mut self, direction: usize, len: u32, now: Instant, ack: u32) {
        let mut framing = self.take_framing(direction);
        let (kind, skipped) = (framing.kind(), framing.skip(len.into()));
        if !self.put_framing(direction, framing) {
            return;
        }
        match skipped {
            Ok(false) => {}
            Ok(true) => {
                let end = self.tracking.next[direction].wrapping_add(len);
                self.complete(kind, now, end, ack);
            }
            Err(LostFraming) => self.lose_framing(direction),
        }
    }

    fn take_framing(&mut self, direction: usize) -> Framing {
        self.matching.streams.take_framing(self.tracking.streams, direction)
    }

    /// Keeps the current message of a direction. Returns false if there is no room for its head; the framing
    /// is lost then.
    fn put_framing(&mut self, direction: usize, framing: Framing) -> bool {
        let is_kept = self.matching.streams.put_framing(&mut self.tracking.streams, direction, framing);
        if !is_kept {
            self.matching.counters.heads_dropped += 1;
            self.lose_framing(direction);
        }
        is_kept
    }

    fn oldest_method(&self) -> RequestMethod {
        let oldest = self.matching.outstanding.oldest(self.tracking.outstanding);
        oldest.map_or(RequestMethod::Other, |oldest| oldest.method)
    }

    /// Handles the head of a message, which ends before the sequence number `end`. A response may come before
    /// the rest of its request.
    #[inline]
    fn begin(&mut self, kind: MessageKind, now: Instant, end: u32, is_complete: bool) {
        match kind {
            MessageKind::Request { is_high, method } => {
                let counters = &mut self.matching.counters;
                counters.requests += 1;
                counters.requests_high += u64::from(is_high);
                let request = OutstandingRequest { at: now, end, is_high, method };
                if !self.matching.outstanding.push(&mut self.tracking.outstanding, &request) {
                    self.matching.counters.abandoned += 1;
                    return self.give_up();
                }
                if !is_complete {
                    self.set(flag::OPEN_REQUEST);
                }
            }
            MessageKind::OneWay { .. } => self.matching.counters.one_way += 1,
            MessageKind::Response | MessageKind::Unsolicited | MessageKind::LastResponse => {}
        }
    }

    /// Handles the end of a message, which ends before the sequence number `end`.
    #[inline]
    fn complete(&mut self, kind: MessageKind, now: Instant, end: u32, ack: u32) {
        match kind {
            MessageKind::Request { .. } => {
                if self.has(flag::OPEN_REQUEST) {
                    self.clear(flag::OPEN_REQUEST);
                    let queue = self.tracking.outstanding;
                    if let Some(request) = self.matching.outstanding.newest(queue) {
                        let request = OutstandingRequest { at: now, end, ..request };
                        self.matching.outstanding.update_newest(queue, &request);
                    }
                }
            }
            MessageKind::Response => self.match_response(now, ack),
            MessageKind::LastResponse => {
                self.match_response(now, ack);
                self.give_up();
            }
            MessageKind::OneWay { .. } | MessageKind::Unsolicited => {}
        }
    }

    /// Matches a response to the oldest request.
    #[inline]
    fn match_response(&mut self, now: Instant, ack: u32) {
        let queue = self.tracking.outstanding;
        let Matching { outstanding, counters, latencies, rules, .. } = &mut *self.matching;
        // A server answers what it has received. So a response that does not acknowledge a request answers an
        // earlier one, which was not seen.
        let is_midstream = self.tracking.flags & flag::MIDSTREAM != 0;
        let oldest = outstanding.oldest(queue);
        let Some(request) = oldest.filter(|oldest| !is_midstream || is_at_or_after(ack, oldest.end)) else {
            counters.responses_unmatched += 1;
            return;
        };
        if rules.protocols[usize::from(self.tracking.rule)].may_overtake() {
            let newest = outstanding.newest(queue);
            counters.responses_ambiguous +=
                u64::from(newest.is_some_and(|newest| newest.is_high != request.is_high));
        }
        outstanding.pop(&mut self.tracking.outstanding);
        if self.tracking.outstanding == NONE {
            self.tracking.flags &= !flag::OPEN_REQUEST;
        }
        counters.responses += 1;
        counters.responses_high += u64::from(request.is_high);
        latencies[usize::from(request.is_high)].record(request.at, now);
    }

    /// Gives up the place in a stream. A message is looked for at the beginning of the next segments.
    #[cold]
    fn lose_framing(&mut self, direction: usize) {
        self.matching.counters.framing_lost += 1;
        if self.tracking.streams != NONE {
            self.take_framing(direction);
        }
        self.set(flag::LOST[direction] | flag::MIDSTREAM);
        self.clear(flag::OPEN_REQUEST);
        let abandoned = self.matching.outstanding.clear(&mut self.tracking.outstanding);
        self.matching.counters.abandoned += abandoned;
        self.count_failure();
    }

    fn count_failure(&mut self) {
        self.tracking.failures += 1;
        if self.tracking.failures >= FAILURES_MAX {
            self.give_up();
        }
    }

    /// Stops examining the connection.
    #[cold]
    fn give_up(&mut self) {
        self.set(flag::GIVEN_UP);
        self.tracking.failures = 0;
        self.matching.counters.connections_given_up += 1;
        let abandoned = self.matching.outstanding.clear(&mut self.tracking.outstanding);
        self.matching.counters.abandoned += abandoned;
        self.matching.streams.release(&mut self.tracking.streams);
    }

    /// Releases what the connection has taken from the pools. Its outstanding requests count as unanswered.
    pub(crate) fn end(&mut self) {
        let unanswered = self.matching.outstanding.clear(&mut self.tracking.outstanding);
        self.matching.counters.unanswered += unanswered;
        self.matching.streams.release(&mut self.tracking.streams);
    }
}

impl OrderedStreams for Connection<'_> {
    #[inline(always)]
    fn parts(&mut self) -> (&mut Tracking, &mut StreamPool, &mut MonitorCounters) {
        let Matching { streams, counters, .. } = &mut *self.matching;
        (self.tracking, streams, counters)
    }

    /// Finds the messages in the next `len` bytes, of which only `bytes`, their beginning, were captured.
    #[inline]
    fn examine(&mut self, direction: usize, now: Instant, ack: u32, bytes: &[u8], len: u32) {
        let rule = usize::from(self.tracking.rule);
        if self.has(flag::LOST[direction]) {
            if !self.matching.rules.protocols[rule].may_begin(direction, bytes, len) {
                self.matching.counters.segments_skipped += 1;
                return self.count_failure();
            }
            self.clear(flag::LOST[direction]);
        }
        let mut framing = match self.tracking.streams {
            NONE => Framing::default(),
            _ => self.take_framing(direction),
        };
        let first = self.tracking.next[direction];
        let mut used = 0;
        while used < bytes.len() {
            let has_methods = direction == RESPONSE && self.matching.rules.protocols[rule].has_methods();
            let method = if has_methods { self.oldest_method() } else { RequestMethod::Other };
            let protocol = &self.matching.rules.protocols[rule];
            let Ok(step) = framing.advance(protocol, direction, &bytes[used..], method) else {
                self.lose_framing(direction);
                return;
            };
            used += step.used;
            let end = first.wrapping_add(used as u32);
            if step.has_begun {
                self.begin(framing.kind(), now, end, step.is_complete);
            }
            if step.is_complete {
                self.tracking.failures = 0;
                self.complete(framing.kind(), now, end, ack);
            }
            if self.has(flag::GIVEN_UP) {
                return;
            }
        }
        let is_kept = self.tracking.streams != NONE || !framing.is_at_start();
        if is_kept && !self.put_framing(direction, framing) {
            return;
        }
        if bytes.len() < len as usize {
            // The rest of the segment was not captured.
            let missing = len - bytes.len() as u32;
            self.tracking.next[direction] = first.wrapping_add(bytes.len() as u32);
            self.skip_in_message(direction, missing, now, ack);
            self.tracking.next[direction] = first;
        }
    }

    fn skip(&mut self, direction: usize, len: u32, now: Instant, ack: u32) {
        if !self.has(flag::LOST[direction]) {
            self.skip_in_message(direction, len, now, ack);
        }
    }

    /// Handles FIN after all bytes of a direction.
    fn end_direction(&mut self, direction: usize, now: Instant, ack: u32) {
        if self.tracking.streams != NONE {
            // The message ends here, so that nothing is kept.
            let mut framing = self.take_framing(direction);
            let kind = framing.kind();
            if framing.end() && !self.has(flag::LOST[direction]) {
                self.complete(kind, now, self.tracking.next[direction], ack);
            }
        }
        if direction == RESPONSE {
            // No response can follow.
            self.clear(flag::OPEN_REQUEST);
            let unanswered = self.matching.outstanding.clear(&mut self.tracking.outstanding);
            self.matching.counters.unanswered += unanswered;
        }
    }

    fn lose_place(&mut self, direction: usize) {
        self.lose_framing(direction);
    }
}
