//! Times at which the bytes of a stream arrived, for sockets whose clients ask for them (`SO_TIMESTAMP`,
//! `SO_TIMESTAMPING`).

use super::datagram_queue::now_us;
use super::domain::{Domain, DomainSocket};
use super::stage_marks::StageMark;
use crate::channel::region::Direction;
use crate::context::Context;
use core::num::NonZeroU32;
use ginnel_stack::error::Stale;
use ginnel_stack::handle::Conn;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::VecDeque;

/// Times that are kept for the unread bytes of a stream. At the limit, the newest bytes share one time, as
/// coalesced segments do on Linux.
// limit: arrival times of a program's stream
const TIMES_MAX: usize = 1024;

/// The arrival times of a stream.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct ArrivalTimes {
    /// Positions after the last byte that arrived at a time, and the times, in order.
    #[serde(deserialize_with = "read_times")]
    times: VecDeque<(u64, NonZeroU32)>,
    /// [`DomainSocket::report_unread_after`] as it would be without arrival times.
    pub report_unread_after: u64,
    /// Clients want the times.
    is_requested: bool,
    /// Present while the socket's latency stages are sampled. The sampling ends with the shard.
    #[serde(skip)]
    pub stages: Option<StageMark>,
}

/// Reads times of which none is 0.
fn read_times<'de, D: Deserializer<'de>>(from: D) -> Result<VecDeque<(u64, NonZeroU32)>, D::Error> {
    let times = Vec::<(u64, u32)>::deserialize(from)?.into_iter();
    Ok(times.map(|(end, at)| (end, NonZeroU32::new(at).unwrap_or(NonZeroU32::MIN))).collect())
}

impl ArrivalTimes {
    /// Records that bytes up to position `end` arrived at this time, while bytes up to `read` were read.
    fn push(&mut self, end: u64, at: NonZeroU32, read: u64) {
        // The bytes that were read last may be asked about.
        while self.times.front().is_some_and(|(end, _)| *end < read) {
            self.times.pop_front();
        }
        if self.times.len() >= TIMES_MAX {
            self.times.pop_back();
        }
        self.times.push_back((end, at));
    }

    /// Returns when the byte before position `end` arrived.
    fn time_before(&self, end: u64) -> Option<NonZeroU32> {
        self.times.iter().find(|(last, _)| *last >= end).map(|(_, at)| *at)
    }
}

impl DomainSocket {
    /// Returns after which position unread bytes are reported to the engine.
    pub fn unread_threshold(&self) -> u64 {
        self.arrival_times.as_ref().map_or(self.report_unread_after, |times| times.report_unread_after)
    }

    /// Has each arrival reported ([`Domain::on_reported_arrival`]).
    pub fn report_arrivals(&mut self) -> &mut ArrivalTimes {
        self.arrival_times.get_or_insert_with(|| {
            let report_unread_after = core::mem::take(&mut self.report_unread_after);
            Box::new(ArrivalTimes { report_unread_after, ..ArrivalTimes::default() })
        })
    }

    /// Ends the reports of arrivals if neither clients nor a sampler of latency stages need them.
    pub fn end_unneeded_reports(&mut self) {
        let is_unneeded = |times: &mut Box<ArrivalTimes>| !times.is_requested && times.stages.is_none();
        if let Some(times) = self.arrival_times.take_if(is_unneeded) {
            self.report_unread_after = times.report_unread_after;
        }
    }

    /// Sets after which position unread bytes are reported to the engine.
    pub fn set_unread_threshold(&mut self, position: u64) {
        match &mut self.arrival_times {
            Some(times) => times.report_unread_after = position,
            None => self.report_unread_after = position,
        }
    }
}

impl Domain {
    /// Begins or stops to record arrival times. Bytes that have arrived before get the current time, unless
    /// theirs were recorded already.
    pub(super) fn set_arrival_times(&mut self, socket: u32, on: bool) {
        let entry = self.socket(socket);
        let received = entry.received;
        if on {
            let times = entry.report_arrivals();
            if !core::mem::replace(&mut times.is_requested, true) {
                times.times.extend(now_us().map(|at| (received, at)));
            }
        } else if let Some(times) = &mut entry.arrival_times {
            times.is_requested = false;
            times.times.clear();
            entry.end_unneeded_reports();
        }
    }

    /// Handles bytes that arrived after [`DomainSocket::report_unread_after`]: records their time, and
    /// reports that they are unread. `is_whole`: the region had space for all bytes that were received.
    #[cold]
    pub(super) fn on_reported_arrival(
        &mut self,
        cx: &mut Context<'_>,
        socket: u32,
        conn: Conn,
        is_whole: bool,
    ) {
        let read = self.region.socket(socket).positions(Direction::Incoming).read();
        let entry = self.socket(socket);
        let received = entry.received;
        if let Some(times) = &mut entry.arrival_times
            && times.is_requested
            && let Some(at) = now_us()
        {
            times.push(received, at, read);
        }
        let is_above = received > entry.unread_threshold();
        if entry.arrival_times.as_ref().is_some_and(|times| times.stages.is_some()) {
            if is_whole {
                self.note_delivered(socket);
            }
            self.on_sampled_arrival(cx, socket, conn, is_above);
        } else if is_above {
            self.report_unread(cx, socket, conn);
        }
    }

    /// Returns when the byte before position `end` of a stream arrived: the lowest 32 bits of the time in
    /// microseconds, or 0 if times are not recorded.
    pub(super) fn arrival_time(&self, socket: u32, end: u64) -> Result<u32, Stale> {
        let entry = self.sockets.get(socket as usize).ok_or(Stale::Handle)?;
        let requested = entry.arrival_times.as_ref().filter(|times| times.is_requested);
        let at = requested.and_then(|times| times.time_before(end));
        Ok(at.map_or(0, NonZeroU32::get))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn at(us: u32) -> NonZeroU32 {
        NonZeroU32::new(us).unwrap()
    }

    #[test]
    fn bytes_have_the_time_of_their_segment() {
        let mut times = ArrivalTimes::default();
        times.push(10, at(1), 0);
        times.push(20, at(2), 0);
        assert_eq!(
            [1, 10, 11, 20, 21].map(|end| times.time_before(end).map(NonZeroU32::get)),
            [Some(1), Some(1), Some(2), Some(2), None]
        );
        times.push(30, at(3), 20);
        assert_eq!(times.times.len(), 2, "bytes before those that were read last are forgotten");
        assert_eq!(times.time_before(20), Some(at(2)));
    }

    // limit: arrival times of a program's stream
    #[test]
    fn newest_bytes_share_a_time_at_the_limit() {
        let mut times = ArrivalTimes::default();
        (1..=2 * TIMES_MAX as u32).for_each(|n| times.push(n.into(), at(n), 0));
        assert_eq!(times.times.len(), TIMES_MAX);
        assert_eq!(times.time_before(TIMES_MAX as u64), Some(at(2 * TIMES_MAX as u32)));
        assert_eq!(times.time_before(5), Some(at(5)));
    }
}
