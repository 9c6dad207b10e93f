//! Deadlines of the network layer. There are few of them and none is touched by an ordinary packet, so an ordered set does.

use crate::handle::LinkId;
use crate::time::Instant;
use core::net::Ipv6Addr;
use std::collections::{BTreeMap, BTreeSet};

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum NetworkTimer {
    /// The neighbour in this slot: solicit again, or give up.
    Neighbour(u32),
    /// Fragments of the oldest datagrams did not come in time, unless they have been completed meanwhile.
    Reassembly,
    /// A new address: draw the delay before the first solicitation.
    DadStart(LinkId, Ipv6Addr),
    /// Next step of duplicate address detection.
    Dad(LinkId, Ipv6Addr),
    /// An address, prefix or router learnt on the link has had its time.
    Lifetimes(LinkId),
    /// Ask for routers again.
    RouterSolicitation(LinkId),
    /// Report multicast groups.
    ListenerReport(LinkId),
    /// Send again what a full device refused.
    Backlog,
}

/// At most one deadline per timer.
#[derive(Debug, Default)]
pub(crate) struct NetworkTimers {
    queue: BTreeSet<(Instant, NetworkTimer)>,
    armed: BTreeMap<NetworkTimer, Instant>,
}

impl NetworkTimers {
    /// Sets the timer, replacing its earlier deadline.
    pub(crate) fn arm(&mut self, timer: NetworkTimer, at: Instant) {
        if let Some(before) = self.armed.insert(timer, at) {
            self.queue.remove(&(before, timer));
        }
        self.queue.insert((at, timer));
    }

    /// Sets the timer unless it is due earlier already.
    pub(crate) fn arm_no_later(&mut self, timer: NetworkTimer, at: Instant) {
        if self.deadline(timer).is_none_or(|before| at < before) {
            self.arm(timer, at);
        }
    }

    /// Takes the timer back.
    pub(crate) fn cancel(&mut self, timer: NetworkTimer) {
        if let Some(before) = self.armed.remove(&timer) {
            self.queue.remove(&(before, timer));
        }
    }

    /// When the timer is due, if it is set.
    pub(crate) fn deadline(&self, timer: NetworkTimer) -> Option<Instant> {
        self.armed.get(&timer).copied()
    }

    /// The earliest deadline.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.queue.first().map(|&(at, _)| at)
    }

    /// Takes one timer that is due, the earliest first.
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
    fn timers_come_in_order_and_a_second_arm_replaces_the_first() {
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
