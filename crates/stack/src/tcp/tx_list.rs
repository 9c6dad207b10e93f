//! Connections that have something to send: in the order in which they were added, with higher classes of
//! priority first ([`crate::priority`]). Within a class the order is first in, first out. While a device is
//! full, higher classes delay the lower ones, as with any strict priority scheduling.

pub(super) mod image;

use super::Tcp;
use super::conn::{Flags, NONE, Tcb};
use super::profile::ProfileTable;
use crate::device::TxClass;
use crate::ip::Network;
use crate::priority::{self, CLASSES};
use crate::time::Instant;
use core::time::Duration;
use std::collections::VecDeque;

/// Time after which refused connections are tried again: the receiver, or the device, needs time to take
/// frames.
const REFUSED_RETRY: Duration = Duration::from_micros(50);

/// The transmit list.
#[derive(Debug, Default)]
pub(crate) struct TxList {
    /// Connections of the default priority, whose class is not looked up. While events of another class are
    /// processed ([`TxList::select`]), these connections answer them and have that class.
    best_effort: VecDeque<u32>,
    /// Connections of other priorities, by class.
    classes: [VecDeque<u32>; CLASSES],
    /// Number of connections in `classes` and `refused`, plus `classes_len_min`. A round is by class unless
    /// this is 0.
    classes_len: usize,
    /// 1 if devices refuse frames by their class, so that each round is one by class; otherwise 0.
    classes_len_min: usize,
    /// The class that the devices know, while a round lasts.
    device_class: Option<u8>,
    /// True if a device had no room for a connection in this round, and `classes_len_min` is 1.
    has_refused: bool,
    /// The connections for which a device had no room, by class and port, if `classes_len_min` is 1.
    refused: [Vec<RefusedConns>; CLASSES],
    /// Number of rounds by class.
    round: u64,
    /// Where the connection that was taken last had waited, if a device had refused it before.
    attempt: Option<Attempt>,
    /// The class that connections of the default priority have now, if it is not [`priority::BEST_EFFORT`].
    /// The queue of this class then is in `best_effort`, and that of best effort in its place.
    raised_to: Option<u8>,
    /// For each class, the number of connections that are left in the current round.
    class_quota: [usize; CLASSES],
}

/// Connections of a class that wait for room in a device. They take turns: one that has sent something before
/// it was refused goes to the end.
#[derive(Clone, Debug, Default)]
struct RefusedConns {
    queue: VecDeque<u32>,
    /// The last round in which the device had no room for the class.
    full_in_round: u64,
}

/// The port for which a connection had waited, and the number of frames sent on it before the connection was
/// taken.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    port: usize,
    frames_before: u64,
}

/// A pass over the list as it is at the beginning: connections that are added in the meantime wait for the
/// next round.
#[derive(Debug)]
pub(crate) struct TxRound {
    best_effort_left: usize,
    /// The class of the connection that was taken last, if connections of several classes wait.
    class: Option<u8>,
}

impl TxRound {
    /// Returns the class of the connection that was taken last; `None` if all connections of the round are of
    /// the default class.
    #[inline(always)]
    pub const fn class(&self) -> Option<u8> {
        if priority::COMPILED { self.class } else { None }
    }
}

impl TxList {
    /// Sets the class of the events that are processed from now on. Before a round begins it must be
    /// [`priority::BEST_EFFORT`].
    pub fn select(&mut self, class: u8) {
        if let Some(raised_to) = self.raised_to.take() {
            let raised = &mut self.classes[usize::from(raised_to)];
            core::mem::swap(&mut self.best_effort, raised);
            self.classes_len = self.classes_len + raised.len() - self.best_effort.len();
        }
        if class != priority::BEST_EFFORT {
            let raised = &mut self.classes[usize::from(class)];
            self.classes_len = self.classes_len + self.best_effort.len() - raised.len();
            core::mem::swap(&mut self.best_effort, raised);
            self.raised_to = Some(class);
        }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.best_effort.is_empty() && (!priority::COMPILED || self.classes_len == self.classes_len_min)
    }

    #[inline(always)]
    pub fn begin(&mut self) -> TxRound {
        let has_classes = priority::COMPILED && self.classes_len != 0;
        if has_classes {
            self.begin_classes();
        }
        TxRound {
            best_effort_left: self.best_effort.len(),
            class: has_classes.then_some(priority::BEST_EFFORT),
        }
    }

    #[cold]
    fn begin_classes(&mut self) {
        self.class_quota = self.classes.each_ref().map(VecDeque::len);
        self.has_refused = false;
        self.round += 1;
    }

    /// Makes each round one by class, because devices refuse frames by their class.
    pub fn set_refused_by_class(&mut self) {
        self.classes_len += 1 - self.classes_len_min;
        self.classes_len_min = 1;
    }

    /// Adds a connection of this class to those that wait for room in a device, unless it is on the list. It
    /// was taken last, in a round by class, and the device has sent `port_frames` frames since the beginning.
    fn push_refused(&mut self, c: &mut Tcb, idx: u32, class: u8, port: usize, port_frames: u64) {
        self.has_refused = true;
        let round = self.round;
        if let Some(round_class) = self.device_class {
            self.refused_of(round_class, port).full_in_round = round;
        }
        if c.has(Flags::TX_LISTED) {
            return;
        }
        c.flags.set(Flags::TX_LISTED);
        self.classes_len += 1;
        let attempt = self.attempt.take().filter(|attempt| attempt.port == port);
        let queue = &mut self.refused_of(class, port).queue;
        match attempt {
            // It has sent nothing, so the turn remains its own.
            Some(attempt) if attempt.frames_before == port_frames => queue.push_front(idx),
            _ => queue.push_back(idx),
        }
    }

    fn refused_of(&mut self, class: u8, port: usize) -> &mut RefusedConns {
        let ports = &mut self.refused[usize::from(class)];
        if ports.len() <= port {
            ports.resize_with(port + 1, RefusedConns::default);
        }
        &mut ports[port]
    }

    /// Takes the next connection of a class that waits for a device which may have room.
    fn next_refused(&mut self, class: usize) -> Option<u32> {
        let round = self.round;
        let mut ports = self.refused[class].iter_mut().enumerate();
        let (port, idx) = ports.find_map(|(port, refused)| {
            let idx = if refused.full_in_round == round { None } else { refused.queue.pop_front() };
            Some((port, idx?))
        })?;
        self.classes_len -= 1;
        self.attempt = Some(Attempt { port, frames_before: 0 });
        Some(idx)
    }

    /// Returns when the connections on the list are tried again, if there are any, after a round at `now`.
    pub fn next_round(&self, now: Instant) -> Instant {
        if self.has_refused { now + REFUSED_RETRY } else { now }
    }

    /// Takes the next connection.
    #[inline(always)]
    pub fn next(&mut self, round: &mut TxRound) -> Option<u32> {
        if round.class().is_some() {
            return self.next_of_classes(round);
        }
        if round.best_effort_left == 0 {
            return None;
        }
        round.best_effort_left -= 1;
        self.best_effort.pop_front()
    }

    #[cold]
    #[inline(never)]
    fn next_of_classes(&mut self, round: &mut TxRound) -> Option<u32> {
        self.attempt = None;
        for class in (0..CLASSES).rev() {
            round.class = Some(class as u8);
            if let Some(idx) = self.next_refused(class) {
                return Some(idx);
            }
            if class == usize::from(priority::class(0)) && round.best_effort_left > 0 {
                round.best_effort_left -= 1;
                return self.best_effort.pop_front();
            }
            if self.class_quota[class] > 0 {
                self.class_quota[class] -= 1;
                self.classes_len -= 1;
                return self.classes[class].pop_front();
            }
        }
        None
    }

    /// Adds a connection unless it is on the list already.
    #[inline(always)]
    pub fn push(&mut self, c: &mut Tcb, idx: u32, profiles: &ProfileTable) {
        if !c.has(Flags::TX_LISTED) {
            c.flags.set(Flags::TX_LISTED);
            if c.profile.is_usual() {
                self.best_effort.push_back(idx);
            } else {
                self.push_to_class(idx, profiles.get(c.profile).priority);
            }
        }
    }

    #[inline(never)]
    fn push_to_class(&mut self, idx: u32, priority: u8) {
        if !priority::COMPILED || priority == 0 || self.raised_to == Some(priority::class(priority)) {
            self.best_effort.push_back(idx);
        } else {
            self.push_with_priority(idx, priority);
        }
    }
}

impl TxList {
    /// Adds a connection that has something of this class to send first, also if it is on the list already: a
    /// later entry is obsolete when an earlier one was processed.
    #[cold]
    fn push_raised(&mut self, c: &mut Tcb, idx: u32, class: u8) {
        c.flags.set(Flags::TX_LISTED);
        self.push_to_class(idx, priority::of_class(class));
    }

    fn push_with_priority(&mut self, idx: u32, priority: u8) {
        self.classes[usize::from(priority::class(priority))].push_back(idx);
        self.classes_len += 1;
    }
}

impl Tcp {
    /// Begins to transmit a connection of a class.
    #[cold]
    #[inline(never)]
    pub(super) fn begin_class(&mut self, net: &mut Network, class: u8) {
        self.window_limits.select(class);
        let list = &mut self.tx_list;
        if list.classes_len_min > 0 && list.device_class.replace(class) != Some(class) {
            net.select_tx_class(Some(TxClass::Connections(class)));
        }
        if let Some(attempt) = &mut list.attempt {
            attempt.frames_before = net.frames_sent(attempt.port);
        }
    }

    /// Puts a connection, for which a device had no room, on the transmit list. If devices refuse frames by
    /// their class, the connection waits among those of its class that this device has refused. So they take
    /// turns, and connections whose devices have room do not wait for them.
    #[cold]
    pub(super) fn want_transmit_refused(&mut self, net: &Network, idx: u32) {
        if self.tx_list.device_class.is_none() {
            self.want_transmit_of_message(idx);
            return;
        }
        let class = self.message_class_above_own(idx);
        let class = class.unwrap_or_else(|| priority::class(self.priority(&self.conns[idx])));
        let c = &mut self.conns[idx];
        let port = net.port_of(&c.hop);
        self.tx_list.push_refused(c, idx, class, port, net.frames_sent(port));
    }

    /// Ends a round by class.
    #[cold]
    #[inline(never)]
    pub(super) fn end_classes(&mut self, net: &mut Network) {
        self.window_limits.select(priority::BEST_EFFORT);
        if self.tx_list.device_class.take().is_some() {
            net.select_tx_class(None);
        }
    }

    /// Puts a connection on the transmit list.
    #[inline(always)]
    pub fn want_transmit(&mut self, idx: u32) {
        self.tx_list.push(&mut self.conns[idx], idx, &self.profiles);
    }

    /// Puts a connection on the transmit list in the class of the message that it sends next, if that is
    /// higher than the connection's.
    #[cold]
    pub(super) fn want_transmit_of_message(&mut self, idx: u32) {
        match self.message_class_above_own(idx) {
            Some(class) => self.tx_list.push_raised(&mut self.conns[idx], idx, class),
            None => self.want_transmit(idx),
        }
    }

    /// Lets a connection on the transmit list wait in its present class, not in the one that it had before.
    #[cold]
    pub(super) fn move_to_class(&mut self, idx: u32) {
        if self.conns[idx].has(Flags::TX_LISTED) {
            let class = priority::class(self.priority(&self.conns[idx]));
            self.tx_list.push_raised(&mut self.conns[idx], idx, class);
        }
    }

    /// Returns the class of the message that is sent next, if that is higher than the connection's.
    fn message_class_above_own(&self, idx: u32) -> Option<u8> {
        self.next_message_class(idx).filter(|class| *class > priority::class(self.priority(&self.conns[idx])))
    }

    /// Returns the class of the message that is sent next.
    fn next_message_class(&self, idx: u32) -> Option<u8> {
        let c = &self.conns[idx];
        if c.active == NONE || !c.state.is_synchronized() {
            return None;
        }
        let next = u64::try_from(c.snd_nxt - c.snd_una).ok()?;
        self.active[c.active].send.message_class(next, 1)
    }
}
