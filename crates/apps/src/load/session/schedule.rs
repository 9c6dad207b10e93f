//! The stages of a run, and actions that are due at a certain time.

use super::{INITIAL_CONNECTS_MAX, NEVER, Network, Session, Slot, SlotState, Stage, TICK, tick_of};
use crate::load::arrivals::Arrivals;
use crate::load::response::Parser;
use crate::load::session::flight::PendingRequest;
use crate::load::stats::Failure;
use core::time::Duration;
use ginnel::Instant;
use ginnel::Random;

/// Time without an answer, at the end of a run, after which the server counts as gone if requests failed.
const SILENCE: Duration = Duration::from_secs(1);

impl Session {
    /// Performs the actions that are due, and returns the latest time of the next call. It is also called
    /// after a batch of events, so that it notices at once if they end a stage.
    pub fn poll(&mut self, now: Instant, net: &mut impl Network) -> Option<Instant> {
        self.change_stage(now, net);
        if self.stage == Stage::Done {
            self.publish();
            return None;
        }
        self.open_initial(now, net);
        while self.cooling.front().is_some_and(|(until, _)| *until <= now) {
            if let Some((_, slot)) = self.cooling.pop_front() {
                self.reuse_slot(slot, now, net);
            }
        }
        self.dispatch(now, net);
        self.expire(now, net);
        self.change_stage(now, net);
        self.publish();
        Some(self.next_poll(now))
    }

    /// In an open loop: returns when the next request is due that has a free connection.
    pub fn next_arrival(&self) -> Option<Instant> {
        self.arrivals.as_ref().filter(|_| self.has_room()).map(Arrivals::due)
    }

    /// Ends the run at once. What was measured so far counts.
    pub fn interrupt(&mut self, now: Instant) {
        if self.stage < Stage::Drain {
            self.measure_from = self.measure_from.min(now);
            self.measure_to = self.measure_to.min(now);
            self.arrivals = None;
            self.stage = Stage::Drain;
        }
        self.drain_until = now;
    }

    fn next_poll(&self, now: Instant) -> Instant {
        let mut at = now + TICK;
        if let Some((until, _)) = self.cooling.front() {
            at = at.min(*until);
        }
        match self.stage {
            Stage::WarmUp => at = at.min(self.measure_from),
            Stage::Measure => at = at.min(self.measure_to),
            Stage::Drain => at = at.min(self.drain_until),
            Stage::Setup | Stage::Done => {}
        }
        // A connection attempt that is overdue waits for other attempts to complete.
        let opening = self.next_opening();
        if opening > now {
            at = at.min(opening);
        }
        self.next_arrival().map_or(at, |due| at.min(due)).max(now)
    }

    /// Returns true if new requests may begin.
    pub(super) fn is_running(&self) -> bool {
        self.stage < Stage::Drain
    }

    pub(super) fn change_stage(&mut self, now: Instant, net: &mut impl Network) {
        if self.stage == Stage::Setup && self.is_set_up(now) {
            self.stage = Stage::WarmUp;
            self.measure_from = now + self.plan.warmup;
            self.measure_to = self.plan.duration.map_or(Instant::MAX, |d| self.measure_from + d);
            if let Some(rate) = self.plan.rate {
                let poisson = rate.poisson.then(|| Random::new(self.rng.next_u64()));
                self.arrivals = Some(Arrivals::new(now, rate.per_second, poisson));
            }
        }
        if self.stage == Stage::WarmUp && now >= self.measure_from {
            self.stage = Stage::Measure;
        }
        if self.stage == Stage::Measure && self.stats.gave_up {
            self.measure_to = self.measure_to.min(now);
        }
        if self.stage == Stage::Measure && (self.has_begun_all_requests() || now >= self.measure_to) {
            if !self.has_begun_all_requests() {
                self.count_not_started();
            }
            self.stage = Stage::Drain;
            self.arrivals = None;
            // Timeouts are rounded up to ticks, and must expire before the run ends.
            self.drain_until = now + self.plan.timeout + 3 * TICK;
        }
        if self.stage == Stage::Drain && (self.in_flight == 0 || now >= self.drain_until) {
            self.stats.measured = self.measured();
            self.stats.answered_until = self.answered_until();
            self.stage = Stage::Done;
            self.close_all(net);
        }
    }

    /// Returns true if requests may begin. A closed loop begins with its first connection, unless a set-up
    /// time is given. An open loop of short connections begins at once; one on persistent connections needs
    /// all of them first, unless they were not established in time.
    pub(super) fn is_set_up(&self, now: Instant) -> bool {
        let target = self.plan.connections;
        let is_there = match (self.plan.rate, self.plan.is_short()) {
            (Some(_), true) => true,
            (None, _) if self.plan.setup.is_zero() => true,
            (None, true) => self.slots.len() as u32 == target,
            (_, false) => self.open - self.connecting == target,
        };
        is_there || now >= self.start + self.plan.setup + self.plan.timeout
    }

    /// Returns true if the requested number of requests was begun.
    pub(super) fn has_begun_all_requests(&self) -> bool {
        self.plan.requests.is_some_and(|n| self.requests_begun >= n)
    }

    /// Returns the measured time.
    fn measured(&self) -> Duration {
        let to = if self.has_begun_all_requests() { self.last_completion } else { self.measure_to };
        to - self.measure_from
    }

    /// Returns when the last answer came, counted from the start of the measured time, if the server answered
    /// nothing at the end of the run: since that answer at least as many requests have failed as there are
    /// connections, or some have failed and the measurement went on for [`SILENCE`].
    fn answered_until(&self) -> Option<Duration> {
        let last = self.last_completion.max(self.measure_from);
        let was_silent = self.measure_to != Instant::MAX && self.measure_to >= last + SILENCE;
        let has_vanished = self.stats.counters.completed > 0
            && self.failures_in_row > 0
            && (was_silent || self.failures_in_row >= self.plan.connections.into());
        has_vanished.then(|| last - self.measure_from)
    }

    /// In an open loop: counts the requests that were due in the measured time and never begun.
    pub(super) fn count_not_started(&mut self) {
        if let Some(arrivals) = &mut self.arrivals {
            while arrivals.due() < self.measure_to {
                if arrivals.due() >= self.measure_from {
                    self.stats.counters.not_started += 1;
                }
                arrivals.advance();
            }
        }
    }

    pub(super) fn close_all(&mut self, net: &mut impl Network) {
        for slot in 0..self.slots.len() as u32 {
            let s = self.slots[slot as usize];
            match s.state {
                SlotState::Vacant | SlotState::Cooling => continue,
                SlotState::Open if s.in_flight == 0 => net.close(slot),
                SlotState::Closing => net.close(slot),
                SlotState::Connecting | SlotState::Open => {
                    self.stats.counters.unanswered += self.measured_in_flight(slot);
                    net.abort(slot);
                }
            }
            self.slots[slot as usize].parser.reset(&mut self.records);
            self.free_slot(slot);
        }
        self.open = 0;
    }

    pub(super) fn measured_in_flight(&self, slot: u32) -> u64 {
        let s = &self.slots[slot as usize];
        (0..s.in_flight)
            .filter(|i| {
                let PendingRequest { intended, request } = *self.pending(slot, *i);
                self.is_measured(intended) && !self.is_opening_request(request)
            })
            .count() as u64
    }

    pub(super) fn publish(&mut self) {
        self.live.open = self.open.into();
        self.live.stage = self.stage as u64;
        self.progress.publish(&self.live);
    }

    /// Returns when the next initial connection may be opened.
    fn next_opening(&self) -> Instant {
        let opened = self.slots.len() as u32;
        if opened >= self.plan.connections || (self.plan.rate.is_some() && self.plan.is_short()) {
            return Instant::MAX;
        }
        self.start + self.plan.setup.mul_f64(f64::from(opened) / f64::from(self.plan.connections))
    }

    /// Opens the initial connections, evenly over the set-up time.
    pub(super) fn open_initial(&mut self, now: Instant, net: &mut impl Network) {
        while self.is_running()
            && self.initial_connects < INITIAL_CONNECTS_MAX
            && self.next_opening() <= now
            && (!self.plan.is_short() || self.may_begin(now))
        {
            let slot = self.add_slot();
            self.slots[slot as usize].is_new = true;
            self.initial_connects += 1;
            self.open(slot, now, now, net);
        }
    }

    pub(super) fn add_slot(&mut self) -> u32 {
        self.slots.push(Slot {
            parser: Parser::default(),
            connect_started: Instant::ZERO,
            deadline: NEVER,
            requests_left: 0,
            offset: 0,
            head: 0,
            in_flight: 0,
            sent: 0,
            state: SlotState::Vacant,
            is_new: false,
            in_ready: false,
            in_sweep: false,
        });
        let depth = usize::from(self.plan.pipeline);
        self.pending.resize(self.slots.len() * depth, PendingRequest { intended: Instant::ZERO, request: 0 });
        self.slots.len() as u32 - 1
    }

    /// Returns true if there is a connection, or a slot for one, for a request that is due.
    pub(super) fn has_room(&self) -> bool {
        if self.plan.is_short() {
            !self.free.is_empty() || (self.slots.len() as u32) < self.plan.connections
        } else {
            !self.ready.is_empty()
        }
    }

    /// In an open loop: begins the requests that are due, as far as there are connections.
    pub(super) fn dispatch(&mut self, now: Instant, net: &mut impl Network) {
        while let Some(due) = self.arrivals.as_ref().map(Arrivals::due).filter(|due| *due <= now) {
            if !self.is_running() || !self.may_begin(due) {
                return;
            }
            if self.plan.is_short() {
                let slot = match self.free.pop() {
                    Some(slot) => slot,
                    None if (self.slots.len() as u32) < self.plan.connections => self.add_slot(),
                    None => return,
                };
                self.open(slot, due, now, net);
            } else {
                let Some(slot) = self.take_ready() else { return };
                self.begin_request(slot, due, now, net);
                self.mark_ready(slot);
            }
            if let Some(arrivals) = &mut self.arrivals {
                arrivals.advance();
            }
        }
    }

    /// Returns true if a request of time `intended` may begin: the measured time and the number of requests
    /// are not exhausted.
    pub(super) fn may_begin(&self, intended: Instant) -> bool {
        intended < self.measure_to && !self.has_begun_all_requests()
    }

    pub(super) fn take_ready(&mut self) -> Option<u32> {
        loop {
            let slot = self.ready.pop_front()?;
            self.slots[slot as usize].in_ready = false;
            if self.has_capacity(slot) {
                return Some(slot);
            }
        }
    }

    pub(super) fn has_capacity(&self, slot: u32) -> bool {
        let s = &self.slots[slot as usize];
        s.state == SlotState::Open && s.in_flight < self.plan.pipeline && s.requests_left > 0
    }

    /// Adds an open connection to the list of those on which a request can be begun.
    pub(super) fn mark_ready(&mut self, slot: u32) {
        if self.has_capacity(slot) && !core::mem::replace(&mut self.slots[slot as usize].in_ready, true) {
            self.ready.push_back(slot);
        }
    }

    pub(super) fn set_deadline(&mut self, slot: u32, now: Instant) {
        let deadline = tick_of(now) + self.timeout_ticks;
        let s = &mut self.slots[slot as usize];
        s.deadline = deadline;
        if !core::mem::replace(&mut s.in_sweep, true) {
            self.sweep.enter(slot, deadline);
        }
    }

    pub(super) fn expire(&mut self, now: Instant, net: &mut impl Network) {
        let tick = tick_of(now);
        while let Some(slot) = self.sweep.take_due(tick) {
            let s = &self.slots[slot as usize];
            if s.deadline <= tick {
                match s.state {
                    SlotState::Connecting => {
                        net.abort(slot);
                        self.fail(slot, Failure::ConnectTimeout, now);
                    }
                    SlotState::Open => {
                        net.abort(slot);
                        self.fail(slot, Failure::Timeout, now);
                    }
                    SlotState::Closing => {
                        net.abort(slot);
                        self.free_slot(slot);
                        self.start_cool_down(slot, now);
                    }
                    SlotState::Vacant | SlotState::Cooling => {}
                }
            }
            let s = &mut self.slots[slot as usize];
            s.in_sweep = s.deadline != NEVER;
            if s.in_sweep {
                self.sweep.enter(slot, s.deadline);
            }
        }
    }
}
