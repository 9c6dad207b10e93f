//! Requests in flight: a ring for each connection.

use super::{Network, Session};
use crate::load::urls::Requests;
use ginnel::Instant;
use std::sync::Arc;

/// Most bytes of pipelined requests that are sent in one call.
const GATHER_BYTES_MAX: usize = 16 << 10;

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingRequest {
    pub intended: Instant,
    pub request: u32,
}

impl Session {
    pub(super) fn pending(&self, slot: u32, i: u16) -> &PendingRequest {
        &self.pending[self.pending_index(slot, i)]
    }

    pub(super) fn pending_index(&self, slot: u32, i: u16) -> usize {
        let depth = usize::from(self.plan.pipeline);
        let head = usize::from(self.slots[slot as usize].head);
        slot as usize * depth + (head + usize::from(i)) % depth
    }

    /// Chooses a request and puts it in flight without sending it.
    pub(super) fn enqueue(&mut self, slot: u32, intended: Instant, now: Instant) {
        let request = self.requests.choose(&mut self.rng);
        self.put_in_flight(slot, PendingRequest { intended, request });
        let s = &mut self.slots[slot as usize];
        s.requests_left = s.requests_left.saturating_sub(u32::from(s.requests_left != u32::MAX));
        if self.is_measured(intended) {
            self.requests_begun += 1;
            self.stats.counters.started += 1;
            if self.plan.rate.is_some() {
                self.stats.lag.record(intended, now);
            }
        }
    }

    /// Puts a request in flight without counting it.
    pub(super) fn put_in_flight(&mut self, slot: u32, pending: PendingRequest) {
        let index = self.pending_index(slot, self.slots[slot as usize].in_flight);
        self.pending[index] = pending;
        self.slots[slot as usize].in_flight += 1;
        self.in_flight += 1;
    }

    /// Returns true for the request that a connection begins with.
    pub(super) fn is_opening_request(&self, request: u32) -> bool {
        self.requests.opening() == Some(request)
    }

    pub(super) fn begin_request(
        &mut self,
        slot: u32,
        intended: Instant,
        now: Instant,
        net: &mut impl Network,
    ) {
        if self.slots[slot as usize].in_flight == 0 {
            self.set_deadline(slot, now);
        }
        self.enqueue(slot, intended, now);
        self.send_pending(slot, net);
    }

    /// Fills the connection's pipeline, in a closed loop. All its requests are sent in one call.
    pub(super) fn fill_pipeline(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        let was_idle = self.slots[slot as usize].in_flight == 0;
        while self.is_running() && self.has_capacity(slot) && self.may_begin(now) {
            self.enqueue(slot, now, now);
        }
        if was_idle {
            self.set_deadline(slot, now);
        }
        self.send_pending(slot, net);
    }

    /// Sends the requests in flight that have not been sent.
    pub(super) fn send_pending(&mut self, slot: u32, net: &mut impl Network) {
        let s = &self.slots[slot as usize];
        if s.in_flight - s.sent > 1 {
            return self.send_pipelined(slot, net);
        }
        if s.in_flight == s.sent {
            return;
        }
        let request = self.pending(slot, s.sent).request;
        let bytes = &self.requests.get(request)[s.offset as usize..];
        let accepted = net.send(slot, bytes);
        let is_whole = accepted == bytes.len();
        let s = &mut self.slots[slot as usize];
        s.sent += u16::from(is_whole);
        s.offset = if is_whole { 0 } else { s.offset + accepted as u32 };
    }

    /// Sends several requests: as many as fit into a buffer in each call.
    fn send_pipelined(&mut self, slot: u32, net: &mut impl Network) {
        let requests = Arc::clone(&self.requests);
        let mut buffer = core::mem::take(&mut self.send_buffer);
        loop {
            let s = &self.slots[slot as usize];
            if s.in_flight == s.sent {
                break;
            }
            buffer.clear();
            for i in s.sent..s.in_flight {
                let request = requests.get(self.pending(slot, i).request);
                if !buffer.is_empty() && buffer.len() + request.len() > GATHER_BYTES_MAX {
                    break;
                }
                buffer.extend_from_slice(request);
            }
            let bytes = &buffer[s.offset as usize..];
            let accepted = net.send(slot, bytes);
            self.count_sent(slot, accepted, &requests);
            if accepted < bytes.len() {
                break;
            }
        }
        self.send_buffer = buffer;
    }

    /// Counts `accepted` bytes of the unsent requests as sent.
    fn count_sent(&mut self, slot: u32, accepted: usize, requests: &Requests) {
        let mut left = accepted + self.slots[slot as usize].offset as usize;
        loop {
            let s = &self.slots[slot as usize];
            if s.sent == s.in_flight {
                break;
            }
            let len = requests.get(self.pending(slot, s.sent).request).len();
            if left < len {
                break;
            }
            left -= len;
            self.slots[slot as usize].sent += 1;
        }
        self.slots[slot as usize].offset = left as u32;
    }
}
