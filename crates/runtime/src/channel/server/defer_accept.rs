//! Connections that are not offered before they have received bytes, or their time is over
//! (`TCP_DEFER_ACCEPT`). Each listener has a list of them in order of arrival, which is the order of their
//! deadlines.

use super::domain::Domain;
use crate::context::Context;
use crate::timers::Timer;
use core::time::Duration;
use ginnel_stack::time::Instant;

/// Marks the end of a list.
const NO_SOCKET: u32 = u32::MAX;
/// Bit of a timer's token: the timer belongs to this module.
pub(super) const DEFER_TIMER: u64 = 1 << 32;

/// List links of a deferred connection.
#[derive(Clone, Copy)]
struct DeferredLink {
    next: u32,
    previous: u32,
    deadline: Instant,
}

/// Deferred connections of one listener.
#[derive(Clone, Copy)]
struct DeferredList {
    /// How long new connections are deferred at most; 0 does not defer them.
    timeout: Duration,
    first: u32,
    last: u32,
    count: usize,
}

/// Deferred connections of a domain. The tables are allocated when the first listener defers.
pub(super) struct DeferredAccepts {
    links: Box<[DeferredLink]>,
    lists: Box<[DeferredList]>,
    /// The timer that is set, and when it expires.
    timer: Option<(Instant, Timer)>,
}

impl DeferredAccepts {
    fn new(sockets: usize, listeners: usize) -> Self {
        let link = DeferredLink { next: NO_SOCKET, previous: NO_SOCKET, deadline: Instant::ZERO };
        let list = DeferredList { timeout: Duration::ZERO, first: NO_SOCKET, last: NO_SOCKET, count: 0 };
        Self { links: vec![link; sockets].into(), lists: vec![list; listeners].into(), timer: None }
    }

    fn push(&mut self, listener: usize, socket: u32, now: Instant) {
        let list = &mut self.lists[listener];
        let until = now + list.timeout;
        self.links[socket as usize] = DeferredLink { next: NO_SOCKET, previous: list.last, deadline: until };
        match list.last {
            NO_SOCKET => list.first = socket,
            last => self.links[last as usize].next = socket,
        }
        list.last = socket;
        list.count += 1;
    }

    fn remove(&mut self, listener: usize, socket: u32) {
        let DeferredLink { next, previous, .. } = self.links[socket as usize];
        let list = &mut self.lists[listener];
        match previous {
            NO_SOCKET => list.first = next,
            previous => self.links[previous as usize].next = next,
        }
        match next {
            NO_SOCKET => list.last = previous,
            next => self.links[next as usize].previous = previous,
        }
        list.count -= 1;
    }

    /// Makes sure that a timer expires at `at` or earlier.
    fn arm_timer(&mut self, cx: &mut Context<'_>, at: Instant, token: u64) {
        match self.timer {
            Some((set, _)) if set <= at => return,
            Some((_, timer)) => {
                cx.cancel_timer(timer);
            }
            None => {}
        }
        let timer = cx.set_timer(at.saturating_since(cx.now()), token);
        self.timer = timer.map(|timer| (at, timer));
    }

    /// Returns the oldest deferred connection of a listener, and its deadline.
    fn first(&self, listener: usize) -> Option<(u32, Instant)> {
        let first = self.lists[listener].first;
        (first != NO_SOCKET).then(|| (first, self.links[first as usize].deadline))
    }
}

impl Domain {
    /// Sets how long later connections of a listener are deferred. Connections that are deferred already keep
    /// their deadline.
    pub(super) fn set_defer_accept(&mut self, number: u32, time: Duration) {
        if time.is_zero() && self.deferred.is_none() {
            return;
        }
        let (sockets, listeners) = (self.sockets.len(), self.region.listeners());
        let deferred =
            self.deferred.get_or_insert_with(|| Box::new(DeferredAccepts::new(sockets, listeners)));
        if let Some(list) = deferred.lists.get_mut(number as usize) {
            list.timeout = time;
        }
    }

    /// Returns the number of deferred connections of a listener.
    pub(super) fn deferred_count(&self, number: usize) -> usize {
        self.deferred.as_ref().map_or(0, |deferred| deferred.lists[number].count)
    }

    /// Defers a new connection if its listener defers. Returns whether it did.
    pub(super) fn defer_connection(&mut self, cx: &mut Context<'_>, number: usize, socket: u32) -> bool {
        let Some(deferred) = &mut self.deferred else { return false };
        let time = deferred.lists[number].timeout;
        if time.is_zero() {
            return false;
        }
        deferred.push(number, socket, cx.now());
        deferred.arm_timer(cx, cx.now() + time, DEFER_TIMER | u64::from(self.index));
        // Cannot truncate: there are fewer listeners.
        self.sockets[socket as usize].deferred_at = Some(number as u16);
        true
    }

    /// Makes a connection that has received bytes available to be accepted.
    pub(super) fn promote(&mut self, socket: u32) {
        let Some(number) = self.undefer(socket) else { return };
        self.push_pending(number, socket);
        self.set_distributable(number);
    }

    /// Removes a connection from its listener's list. Returns the listener.
    pub(super) fn undefer(&mut self, socket: u32) -> Option<usize> {
        let number = usize::from(self.sockets[socket as usize].deferred_at.take()?);
        if let Some(deferred) = &mut self.deferred {
            deferred.remove(number, socket);
        }
        Some(number)
    }

    /// Drops a deferred connection that closed before it received anything; no client learns of it.
    pub(super) fn drop_deferred(&mut self, cx: &mut Context<'_>, socket: u32) {
        let Some(number) = self.undefer(socket) else { return };
        self.sockets[socket as usize].is_pending = false;
        if let Some(listening) = &mut self.listeners[number] {
            listening.set_unaccepted(cx, listening.unaccepted.saturating_sub(1));
            if listening.is_backlog_full {
                self.accept_from(cx, number);
            }
        }
    }

    /// Moves the deferred connections of a listener that is closed to `orphans`.
    pub(super) fn drain_deferred(&mut self, number: usize, orphans: &mut Vec<u32>) {
        while let Some((socket, _)) = self.deferred.as_ref().and_then(|deferred| deferred.first(number)) {
            self.undefer(socket);
            orphans.push(socket);
        }
        self.set_defer_accept(number as u32, Duration::ZERO);
    }

    /// Makes connections whose deadline has passed available to be accepted.
    pub(super) fn promote_expired(&mut self, cx: &mut Context<'_>) {
        let (now, mut next) = (cx.now(), None::<Instant>);
        for number in 0..self.listeners.len() {
            while let Some((socket, until)) =
                self.deferred.as_ref().and_then(|deferred| deferred.first(number))
            {
                if until > now {
                    next = Some(next.map_or(until, |next| next.min(until)));
                    break;
                }
                self.promote(socket);
            }
        }
        if let Some(deferred) = &mut self.deferred {
            // This timer has expired.
            deferred.timer = None;
            if let Some(next) = next {
                deferred.arm_timer(cx, next, DEFER_TIMER | u64::from(self.index));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_stay_ordered_after_removals() {
        let mut deferred = DeferredAccepts::new(5, 4);
        deferred.lists[3].timeout = Duration::from_secs(1);
        (0..5).for_each(|socket| deferred.push(3, socket, Instant::from_millis(socket.into())));
        deferred.remove(3, 2);
        deferred.remove(3, 0);
        assert_eq!(deferred.first(3), Some((1, Instant::from_millis(1001))));
        deferred.remove(3, 4);
        deferred.push(3, 0, Instant::from_millis(9));
        let mut order = Vec::new();
        while let Some((socket, _)) = deferred.first(3) {
            deferred.remove(3, socket);
            order.push(socket);
        }
        assert_eq!((order, deferred.lists[3].count, deferred.lists[3].last), (vec![1, 3, 0], 0, NO_SOCKET));
        assert_eq!(deferred.first(2), None);
    }
}
