//! Timers of the network layer. There are few of them and ordinary packets do not touch them, so an ordered
//! set suffices.

use crate::handle::LinkId;
use crate::time::Instant;
use core::net::Ipv6Addr;
use std::collections::{BTreeMap, BTreeSet};

/// A timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NetworkTimer {
    /// Sends the next solicitation to the neighbour in this slot, or gives up.
    Neighbour(u32),
    /// Discards incomplete datagrams that have expired.
    Reassembly,
    /// Draws the delay before the first solicitation for a new address.
    DadStart(LinkId, Ipv6Addr),
    /// Performs the next step of duplicate address detection.
    Dad(LinkId, Ipv6Addr),
    /// Removes expired addresses, prefixes and routers of a link.
    Lifetimes(LinkId),
    /// Sends the next router solicitation.
    RouterSolicitation(LinkId),
    /// Reports changes of the membership in groups; true for IPv4.
    StateChange(LinkId, bool),
    /// Answers queries about groups; true for IPv4.
    QueryResponse(LinkId, bool),
    /// Sends packets again that a full device refused.
    Backlog,
}

/// The armed timers, with one deadline each.
#[derive(Debug, Default)]
pub(crate) struct NetworkTimers {
    queue: BTreeSet<(Instant, NetworkTimer)>,
    armed: BTreeMap<NetworkTimer, Instant>,
}

impl NetworkTimers {
    /// Arms the timer and replaces its earlier deadline.
    pub(crate) fn arm(&mut self, timer: NetworkTimer, at: Instant) {
        if let Some(before) = self.armed.insert(timer, at) {
            self.queue.remove(&(before, timer));
        }
        self.queue.insert((at, timer));
    }

    /// Arms the timer unless its deadline is already earlier.
    pub(crate) fn arm_no_later(&mut self, timer: NetworkTimer, at: Instant) {
        if self.deadline(timer).is_none_or(|before| at < before) {
            self.arm(timer, at);
        }
    }

    /// Cancels the timer.
    pub(crate) fn cancel(&mut self, timer: NetworkTimer) {
        if let Some(before) = self.armed.remove(&timer) {
            self.queue.remove(&(before, timer));
        }
    }

    /// Returns the deadline of the timer, if it is armed.
    pub(crate) fn deadline(&self, timer: NetworkTimer) -> Option<Instant> {
        self.armed.get(&timer).copied()
    }

    /// Returns the earliest deadline.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.queue.first().map(|&(at, _)| at)
    }

    /// Takes the due timer with the earliest deadline.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<NetworkTimer> {
        let &(at, timer) = self.queue.first()?;
        if at > now {
            return None;
        }
        self.queue.pop_first();
        self.armed.remove(&timer);
        Some(timer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rearming_replaces_the_deadline_of_a_timer() {
        let mut timers = NetworkTimers::default();
        timers.arm(NetworkTimer::Neighbour(1), Instant::from_millis(30));
        timers.arm(NetworkTimer::Neighbour(2), Instant::from_millis(20));
        timers.arm(NetworkTimer::Neighbour(1), Instant::from_millis(10));
        timers.arm_no_later(NetworkTimer::Neighbour(2), Instant::from_millis(25));
        timers.arm(NetworkTimer::Reassembly, Instant::from_millis(5));
        timers.cancel(NetworkTimer::Reassembly);
        assert_eq!(timers.next_deadline(), Some(Instant::from_millis(10)));
        assert_eq!(timers.pop_due(Instant::from_millis(9)), None);
        assert_eq!(timers.pop_due(Instant::from_millis(20)), Some(NetworkTimer::Neighbour(1)));
        assert_eq!(timers.pop_due(Instant::from_millis(20)), Some(NetworkTimer::Neighbour(2)));
        assert_eq!(timers.pop_due(Instant::MAX), None);
        assert_eq!(timers.next_deadline(), None);
    }
}
