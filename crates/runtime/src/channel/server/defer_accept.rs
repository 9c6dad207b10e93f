//! Connections that are offered to nobody before they have brought something, or their time is over (`TCP_DEFER_ACCEPT`). Those of a listener stand in a list in
//! the order in which they came, which is that of their times.

use super::super::region::LISTENERS_MAX;
use super::domain::Domain;
use crate::context::Context;
use crate::timers::Timer;
use core::time::Duration;
use ginnel_stack::time::Instant;

/// No socket.
const NO_SOCKET: u32 = u32::MAX;
/// The bit of a timer's token that says that it is about these.
pub(super) const DEFER_TIMER: u64 = 1 << 32;

/// One that waits.
#[derive(Clone, Copy)]
struct DeferredLink {
    next: u32,
    previous: u32,
    deadline: Instant,
}

/// Those of one listener.
#[derive(Clone, Copy)]
struct DeferredList {
    /// How long new ones wait at the most; 0 is not at all.
    timeout: Duration,
    first: u32,
    last: u32,
    count: usize,
}

/// All of a domain's. The tables are made when the first listener defers.
pub(super) struct DeferredAccepts {
    links: Box<[DeferredLink]>,
    lists: Box<[DeferredList]>,
    /// When the timer runs out that is set.
    timer: Option<(Instant, Timer)>,
}

impl DeferredAccepts {
    fn new(sockets: usize) -> Self {
        let link = DeferredLink { next: NO_SOCKET, previous: NO_SOCKET, deadline: Instant::ZERO };
        let list = DeferredList { timeout: Duration::ZERO, first: NO_SOCKET, last: NO_SOCKET, count: 0 };
        Self { links: vec![link; sockets].into(), lists: vec![list; LISTENERS_MAX].into(), timer: None }
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

    /// Sees to it that a timer runs out at this time or earlier.
    fn arm_timer(&mut self, cx: &mut Context<'_>, at: Instant, token: u64) {
        match self.timer {
            Some((set, _)) if set <= at => return,
            Some((_, later)) => {
                cx.cancel_timer(later);
            }
            None => {}
        }
        let timer = cx.set_timer(at.saturating_since(cx.now()), token);
        self.timer = timer.map(|timer| (at, timer));
    }

    /// The oldest of a listener, and how long it waits.
    fn first(&self, listener: usize) -> Option<(u32, Instant)> {
        let first = self.lists[listener].first;
        (first != NO_SOCKET).then(|| (first, self.links[first as usize].deadline))
    }
}

impl Domain {
    /// How long connections that bring nothing wait at a listener from now on. Those that wait already stay as long as they were to.
    pub(super) fn set_defer_accept(&mut self, number: u32, time: Duration) {
        if time.is_zero() && self.deferred.is_none() {
            return;
        }
        let sockets = self.sockets.len();
        let deferred = self.deferred.get_or_insert_with(|| Box::new(DeferredAccepts::new(sockets)));
        if let Some(list) = deferred.lists.get_mut(number as usize) {
            list.timeout = time;
        }
    }

    /// Connections that wait at a listener and have brought nothing.
    pub(super) fn deferred_count(&self, number: usize) -> usize {
        self.deferred.as_ref().map_or(0, |deferred| deferred.lists[number].count)
    }

    /// A new connection at a listener: whether it waits until it has brought something.
    pub(super) fn defer_connection(&mut self, cx: &mut Context<'_>, number: usize, socket: u32) -> bool {
        let Some(deferred) = &mut self.deferred else { return false };
        let time = deferred.lists[number].timeout;
        if time.is_zero() {
            return false;
        }
        deferred.push(number, socket, cx.now());
        deferred.arm_timer(cx, cx.now() + time, DEFER_TIMER | u64::from(self.index));
        // Cannot truncate: there are not as many listeners.
        self.sockets[socket as usize].deferred_at = Some(number as u16);
        true
    }

    /// A connection has brought something: it can be accepted.
    pub(super) fn promote(&mut self, socket: u32) {
        let Some(number) = self.undefer(socket) else { return };
        if let Some(listening) = &mut self.listeners[number] {
            listening.pending.push_back(socket);
            self.pending_listeners |= 1 << number;
        }
    }

    /// It does not wait for that any more. Returns the listener.
    pub(super) fn undefer(&mut self, socket: u32) -> Option<usize> {
        let number = usize::from(self.sockets[socket as usize].deferred_at.take()?);
        if let Some(deferred) = &mut self.deferred {
            deferred.remove(number, socket);
        }
        Some(number)
    }

    /// A connection has ended before it brought anything: nobody hears of it.
    pub(super) fn drop_deferred(&mut self, cx: &mut Context<'_>, socket: u32) {
        let Some(number) = self.undefer(socket) else { return };
        self.sockets[socket as usize].is_pending = false;
        if let Some(listening) = &mut self.listeners[number] {
            listening.set_unaccepted(cx, listening.unaccepted.saturating_sub(1));
        }
    }

    /// A listener goes, with those that wait at it.
    pub(super) fn drain_deferred(&mut self, number: usize, nobodys: &mut Vec<u32>) {
        while let Some((socket, _)) = self.deferred.as_ref().and_then(|deferred| deferred.first(number)) {
            self.undefer(socket);
            nobodys.push(socket);
        }
        self.set_defer_accept(number as u32, Duration::ZERO);
    }

    /// Those whose time is over can be accepted as they are.
    pub(super) fn promote_expired(&mut self, cx: &mut Context<'_>) {
        let (now, mut next) = (cx.now(), None::<Instant>);
        for number in 0..LISTENERS_MAX {
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
            // The one that ran out.
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
    fn lists_are_in_order_whoever_leaves() {
        let mut deferred = DeferredAccepts::new(5);
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
