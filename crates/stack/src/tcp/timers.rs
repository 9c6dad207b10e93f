//! Timers of connections. One node in the wheel represents all timers of a connection; it is set for the
//! earliest.

use super::active::{RetransmitTimer, SlowPathFlags};
use super::conn::{Flags, NONE, SlotState};
use super::listen::SYNACK_DEFERRED;
use super::recovery;
use super::state::State;
use super::timer_queue::TimerQueue;
use super::{Tcp, rtt};
use crate::events::CloseReason;
use crate::ip::Network;
use crate::options::CaState;
use crate::prefetch::prefetch;
use crate::stack::{ListedSocket, ListedTimer, SocketHandle, SocketProtocol, TimerKind};
use crate::time::Instant;
use crate::timer_wheel::TimerNode;
use core::time::Duration;

/// TIME-WAIT entries that one turn removes at most.
const TIME_WAIT_BATCH: usize = 512;

/// TIME-WAIT entries are removed in batches: a tenth of a second does not matter, and a sleeping shard should
/// not wake up for each entry.
const TIME_WAIT_SLACK: Duration = Duration::from_millis(100);

/// Distance in a queue from the entry that is processed to the one whose active state is prefetched. The
/// connection itself is prefetched at twice this distance.
const PREFETCH_DISTANCE: usize = 8;

/// Keepalive probes within a user timeout, at most.
const KEEPALIVE_PROBES_MAX: u32 = 240;

/// A timer that is farther away than this is put into the wheel only after this time: by then the connection
/// may have ended, and the timer of an active connection has been moved many times.
const TIMER_DEFERRAL: Duration = Duration::from_millis(8);

/// Largest distance of a timer of a connection: the wheel compares times correctly only if they are at most
/// 39 hours apart.
const TIMER_MAX: Duration = Duration::from_secs(36 * 3600);

/// Largest number of connections whose timers are deferred. The timers of further connections are put into
/// the wheel at once.
const DEFERRED_MAX: usize = 1 << 15;

/// Largest number of connections that are listed until they release their active state. The timers of further
/// connections are put into the wheel.
const RELEASES_MAX: usize = 1 << 18;

/// Time after which an idle connection with a state of pacing is visited again.
const PACED_RELEASE_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Largest distance of a release that is listed. The list is in order of time, so that one release delays
/// those behind it by at most this time.
const RELEASE_LISTED_MAX: Duration = Duration::from_millis(300);

impl Tcp {
    /// Runs all timers that are due.
    pub fn advance(&mut self, net: &mut Network) {
        while let Some((idx, number)) = self.deferred_timers.pop_due(self.now) {
            self.prefetch_timers(&self.deferred_timers);
            // Otherwise the timer was armed in the meantime, or the connection has ended.
            if self.conns[idx].timer == TimerNode::deferred(number) {
                self.conns[idx].timer = TimerNode::default();
                self.arm_at_last(idx);
            }
        }
        while let Some((idx, number)) = self.releases.pop_due(self.now) {
            self.prefetch_timers(&self.releases);
            if self.conns[idx].timer == TimerNode::listed(number) {
                self.conns[idx].timer = TimerNode::default();
                self.on_timer(net, idx);
            }
        }
        while let Some(idx) = self.wheel.pop_expired(&mut self.conns, self.now) {
            self.on_timer(net, idx);
        }
        if self.timestamp_age.is_due(self.now) {
            self.record_old_timestamps();
        }
        for _ in 0..TIME_WAIT_BATCH {
            let Some(index) = self.time_wait.expired(self.now_ms) else { break };
            self.end_time_wait(index);
        }
        self.release_held_syns(net);
        self.wake_memory_waiters();
    }

    /// Returns when `advance` or `transmit` has to be called next; `None` if nothing waits.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.memory_waiters.can_wake(&self.chunks) {
            return Some(self.now);
        }
        let time_wait = self.time_wait.next_deadline(self.now).map(|at| at + TIME_WAIT_SLACK);
        let mut earliest =
            if self.conns.live() > 0 { self.timestamp_age.next_deadline() } else { Instant::MAX };
        let mut include = |at: Option<Instant>| earliest = earliest.min(at.unwrap_or(Instant::MAX));
        include(self.wheel.next_deadline());
        include(time_wait);
        include(self.deferred_timers.next_deadline());
        include(self.releases.next_deadline());
        include(self.deferred_acks.next_deadline());
        include(self.held_syns.next_deadline());
        include((!self.tx_list.is_empty()).then(|| self.tx_list.next_round(self.now)));
        (earliest != Instant::MAX).then_some(earliest)
    }

    /// Prefetches what the processing of the next entries of a queue reads: with millions of connections
    /// nothing of it is in the cache any more.
    #[inline(always)]
    fn prefetch_timers(&self, queue: &TimerQueue) {
        if !self.live_conns_exceed_cache() {
            return;
        }
        if let Some(idx) = queue.ahead(2 * PREFETCH_DISTANCE) {
            prefetch(&self.conns[idx].timer);
            prefetch(&self.conns[idx].active);
        }
        if let Some(idx) = queue.ahead(PREFETCH_DISTANCE) {
            let active = self.conns[idx].active;
            if active != NONE {
                self.active.prefetch(active);
            }
        }
    }

    /// Returns the absolute time of a deadline that is stored as low bits of the clock in ms.
    fn instant(&self, deadline_ms: u32) -> Instant {
        let left = deadline_ms.wrapping_sub(self.now_ms()) as i32;
        self.now + Duration::from_millis(left.max(0) as u64)
    }

    /// Returns when the earliest timer of a connection is due; `None` if it has none.
    fn earliest_timer(&self, idx: u32) -> Option<Instant> {
        let c = &self.conns[idx];
        if c.slot_state != SlotState::Open {
            return None;
        }
        match c.state {
            State::SynSent | State::SynReceived => return self.syn_deadline(idx),
            State::Closed | State::Listen | State::TimeWait => return None,
            _ => {}
        }
        let mut at = Instant::MAX;
        if c.has(Flags::ACK_DELAYED) {
            let left = c.ack_deadline.wrapping_sub(self.now_ms() as u16) as i16;
            at = at.min(self.now + Duration::from_millis(left.max(0) as u64));
        }
        if c.has(Flags::KEEPALIVE) && !c.has(Flags::ORPHAN) {
            let left = self.keepalive_after(idx).saturating_sub(self.keepalive_time_elapsed(idx));
            at = at.min(self.now + Duration::from_millis(left.into()));
        }
        if c.state == State::FinWait2 && c.has(Flags::ORPHAN) {
            at = at.min(self.instant(c.rcv_grow_seq.0));
        }
        if c.active != NONE {
            let b = &self.active[c.active];
            at = at.min(b.timer_at);
            if let Some(cork) = b.cork_deadline {
                at = at.min(cork);
            }
            if let Some(release) = self.active_release_at(idx) {
                at = at.min(release);
            }
        }
        (at != Instant::MAX).then_some(at)
    }

    /// Arms the wheel for the earliest timer. If the wheel is set for an earlier time, it is left as it is:
    /// connections move their time-outs with each acknowledgement, and a timer that fires too early is set
    /// again.
    pub fn rearm(&mut self, idx: u32) {
        self.note_idle(idx);
        if let Some(at) = self.earliest_timer(idx) {
            self.arm(idx, at);
        }
    }

    /// Ensures that a connection is visited no later than `at`.
    #[inline(always)]
    pub(super) fn arm(&mut self, idx: u32, at: Instant) {
        let until = self.now.after_micros(TIMER_DEFERRAL.as_micros() as u64);
        if !self.conns[idx].timer.is_deferred() || at <= until {
            self.arm_or_defer(idx, at, until);
        }
    }

    #[inline(never)]
    fn arm_or_defer(&mut self, idx: u32, at: Instant, until: Instant) {
        debug_assert!(at.saturating_since(self.now) <= TIMER_MAX, "the timer is beyond TIMER_MAX");
        let node = &mut self.conns[idx].timer;
        if node.is_armed() || at <= until {
            self.wheel.schedule_no_later(&mut self.conns, idx, at);
        } else if self.deferred_timers.len() == DEFERRED_MAX {
            self.wheel.schedule(&mut self.conns, idx, at);
        } else {
            *node = TimerNode::deferred(self.deferred_timers.push_in_order(idx, until));
        }
    }

    /// Arms the earliest timer of a connection after its deferral. If that is the release of the active
    /// state, which nearly every connection comes to, it is listed in order of time: the wheel would touch
    /// this connection and its neighbours several times.
    fn arm_at_last(&mut self, idx: u32) {
        self.release_active_early(idx);
        let Some(at) = self.earliest_timer(idx) else { return };
        let is_release = self.conns[idx].active != NONE && self.active_release_at(idx) == Some(at);
        if is_release && at <= self.now + RELEASE_LISTED_MAX && self.releases.len() < RELEASES_MAX {
            self.conns[idx].timer = TimerNode::listed(self.releases.push(idx, at));
        } else {
            self.wheel.schedule(&mut self.conns, idx, at);
        }
    }

    /// Starts or stops the time after which an idle connection releases its active state.
    fn note_idle(&mut self, idx: u32) {
        let now = self.now;
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        if b.is_idle(c.state) && b.dsack.is_none() && c.state.is_synchronized() {
            b.idle_since.get_or_insert(now);
        } else {
            b.idle_since = None;
        }
    }

    /// Returns when an idle connection releases its active state: after a time-out, and not while it has to
    /// remember that it answered an invalid segment.
    fn active_release_at(&self, idx: u32) -> Option<Instant> {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let at = b.idle_since?.after_micros(rtt::rto_us(c, self.profiles.get(c.profile), 0));
        let interval = self.config.invalid_ack_interval_ms;
        Some(b.last_oow_ack_time.map_or(at, |answered| at.max(self.instant(answered.wrapping_add(interval)))))
    }

    /// Returns when SYN or SYN+ACK is sent again: after 1, 2, 4 … s. Returns `None` while it waits on the
    /// transmit list.
    #[inline]
    pub(super) fn syn_deadline(&self, idx: u32) -> Option<Instant> {
        let c = &self.conns[idx];
        if c.has(Flags::SYN_PENDING) && c.has(Flags::TX_LISTED) {
            return None;
        }
        let mut rto_ms = rtt::rto_us(c, self.profiles.get(c.profile), c.retries) / 1000;
        if c.state == State::SynSent && c.retries > 0 {
            rto_ms = rto_ms.min(self.connect_time_left(idx));
        }
        Some(self.instant(c.last_rx.wrapping_add(rto_ms as u32)))
    }

    /// Returns how much of the user timeout (RFC 5482) is left after the last SYN, which was not the first
    /// one, in ms; `u64::MAX` without a user timeout.
    #[inline(never)]
    fn connect_time_left(&self, idx: u32) -> u64 {
        let c = &self.conns[idx];
        let profile = self.profiles.get(c.profile);
        if profile.user_timeout_ms == 0 {
            return u64::MAX;
        }
        let waited_us: u64 = (0..c.retries).map(|n| rtt::rto_us(c, profile, n)).sum();
        u64::from(profile.user_timeout_ms).saturating_sub(waited_us / 1000)
    }

    /// Returns the most informative timer of a connection, at the time `now`.
    pub fn listed_timer(&self, now: Instant, idx: u32) -> Option<ListedTimer> {
        let c = &self.conns[idx];
        if c.slot_state != SlotState::Open {
            return None;
        }
        let until = |at: Instant| at.saturating_since(now);
        let timer = |kind, left, count| Some(ListedTimer { kind, left, count });
        if !c.state.is_synchronized() {
            return timer(TimerKind::On, until(self.syn_deadline(idx)?), c.retries);
        }
        if c.active != NONE {
            let b = &self.active[c.active];
            match b.timer_kind {
                RetransmitTimer::Off => {}
                RetransmitTimer::Persist => {
                    return timer(TimerKind::Persist, until(b.timer_at), b.probes_out);
                }
                _ => return timer(TimerKind::On, until(b.timer_at), b.retransmits),
            }
        }
        if c.state == State::FinWait2 && c.has(Flags::ORPHAN) {
            return timer(TimerKind::TimeWait, until(self.instant(c.rcv_grow_seq.0)), 0);
        }
        if c.has(Flags::KEEPALIVE) && !c.has(Flags::ORPHAN) {
            let left = self.keepalive_after(idx).saturating_sub(self.keepalive_time_elapsed(idx));
            return timer(TimerKind::Keepalive, Duration::from_millis(left.into()), c.retries);
        }
        None
    }

    /// Returns an entry in TIME-WAIT for a listing.
    pub fn listed_time_wait(&self, now: Instant, index: u32) -> Option<ListedSocket> {
        let entry = self.time_wait.get_live(index)?;
        let key = entry.key(&self.addresses);
        let left = self.time_wait.remaining_ms(entry, now.as_millis() as u32);
        let left = Duration::from_millis(left.into());
        Some(ListedSocket {
            protocol: SocketProtocol::Tcp,
            state: State::TimeWait,
            local: key.local_addr(),
            remote: key.remote_addr(),
            recv_queue: 0,
            send_queue: 0,
            timer: Some(ListedTimer { kind: TimerKind::TimeWait, left, count: 0 }),
            info: None,
            memory: Self::time_wait_memory(entry.v6()),
            handle: Some(SocketHandle::TimeWait(index)),
        })
    }

    /// Returns the bytes that are queued and not acknowledged.
    pub fn send_queued(&self, idx: u32) -> u64 {
        let active = self.conns[idx].active;
        if active == NONE { 0 } else { self.active[active].send.len() }
    }

    /// Returns the time since the last segment was received, in ms. Correct for 49 days.
    fn keepalive_time_elapsed(&self, idx: u32) -> u32 {
        self.now_ms().wrapping_sub(self.conns[idx].last_rx)
    }

    /// Returns the idle time after which the next keepalive probe is due, in ms.
    fn keepalive_after(&self, idx: u32) -> u32 {
        let c = &self.conns[idx];
        let p = self.profile(idx);
        let idle = u32::from(p.keep_idle_seconds) * 1000;
        // A user timeout replaces the number of probes: the probes are spread so that they last until then
        // and can be counted.
        let interval =
            (u32::from(p.keep_interval_seconds) * 1000).max(p.user_timeout_ms / KEEPALIVE_PROBES_MAX);
        idle.saturating_add(u32::from(c.retries).saturating_mul(interval))
    }

    /// Processes the timers of a connection, one of which may be due.
    fn on_timer(&mut self, net: &mut Network, idx: u32) {
        let c = &self.conns[idx];
        if c.slot_state != SlotState::Open {
            return;
        }
        if !c.state.is_synchronized() {
            if self.syn_deadline(idx).is_some_and(|at| at <= self.now) && !self.on_syn_timeout(idx) {
                return;
            }
            self.rearm(idx);
            return;
        }
        if self.on_conn_timers(net, idx) && self.on_active_timers(net, idx) {
            self.rearm(idx);
        }
    }

    /// Processes an expired SYN or SYN+ACK timer. Returns false if the connection has ended.
    fn on_syn_timeout(&mut self, idx: u32) -> bool {
        let limit = if self.conns[idx].state == State::SynSent || self.conns[idx].has(Flags::ACTIVE_OPEN) {
            self.profile(idx).syn_retries
        } else {
            self.config.synack_retries
        };
        if self.skips_deferred_syn(idx) {
            return true;
        }
        self.stats.timeouts += 1;
        let c = &self.conns[idx];
        let is_deferred = c.state == State::SynReceived && c.rttvar & SYNACK_DEFERRED != 0;
        if is_deferred && self.skips_syn_ack(idx) {
            return true;
        }
        let c = &self.conns[idx];
        let gave_up = c.retries >= limit && !(is_deferred && self.is_within_deferral(idx))
            || c.state == State::SynSent && c.retries > 0 && {
                let rto_ms = rtt::rto_us(c, self.profiles.get(c.profile), c.retries) / 1000;
                self.connect_time_left(idx) <= rto_ms
            };
        self.detect_fastopen_black_hole(idx, c.retries, gave_up);
        if gave_up {
            self.destroy(idx, self.time_out_reason(idx));
            return false;
        }
        let c = &mut self.conns[idx];
        c.retries += 1;
        c.flags.set(Flags::SYN_PENDING);
        self.stats.retransmitted += 1;
        self.want_transmit(idx);
        true
    }

    /// Processes the timers of delayed acknowledgements, keepalive and FIN-WAIT-2. Returns false if the
    /// connection has ended.
    fn on_conn_timers(&mut self, net: &mut Network, idx: u32) -> bool {
        let now_ms = self.now_ms();
        let c = &mut self.conns[idx];
        if c.has(Flags::ACK_DELAYED) && (now_ms as u16).wrapping_sub(c.ack_deadline) as i16 >= 0 {
            // No data were sent that could carry the acknowledgement: the exchange is not interactive.
            c.flags.clear(Flags::PINGPONG | Flags::ACK_DELAYED);
            self.ack_now(idx);
        }
        let c = &self.conns[idx];
        if c.state == State::FinWait2
            && c.has(Flags::ORPHAN)
            && now_ms.wrapping_sub(c.rcv_grow_seq.0) as i32 >= 0
        {
            self.destroy(idx, CloseReason::TimedOut);
            return false;
        }
        let probes = c.has(Flags::KEEPALIVE) && !c.has(Flags::ORPHAN);
        if probes && self.keepalive_time_elapsed(idx) >= self.keepalive_after(idx) {
            return self.on_keepalive(net, idx);
        }
        true
    }

    /// Processes the keepalive timer (RFC 1122 §4.2.3.6). Returns false if the connection has ended.
    fn on_keepalive(&mut self, net: &mut Network, idx: u32) -> bool {
        let c = &self.conns[idx];
        let has_data = c.active != NONE
            && (!self.active[c.active].rtx_queue.is_empty() || !self.active[c.active].send.is_empty());
        if has_data {
            // Data in flight serve as a probe.
            let now_ms = self.now_ms();
            self.conns[idx].last_rx = now_ms;
            return true;
        }
        let p = *self.profile(idx);
        let idle = self.keepalive_time_elapsed(idx);
        let gives_up = if p.user_timeout_ms != 0 {
            c.retries > 0 && idle >= p.user_timeout_ms
        } else {
            c.retries >= p.keep_count
        };
        if gives_up {
            self.send_active_reset(net, idx);
            self.destroy(idx, CloseReason::TimedOut);
            return false;
        }
        self.stats.keepalive_probes += 1;
        // If keepalive was switched on after a long idle time, the probe is late; the next one follows after
        // an interval nevertheless.
        let late = idle - self.keepalive_after(idx);
        let c = &mut self.conns[idx];
        c.last_rx = c.last_rx.wrapping_add(late);
        c.retries = c.retries.saturating_add(1);
        self.xmit_probe(net, idx);
        true
    }

    /// Processes the timers of retransmissions, probes, corks and the release of the active state. Returns
    /// false if the connection has ended.
    fn on_active_timers(&mut self, net: &mut Network, idx: u32) -> bool {
        let now = self.now;
        let c = &self.conns[idx];
        if c.active == NONE {
            return true;
        }
        let rto = rtt::rto(c, self.profiles.get(c.profile), 0);
        let release = self.active_release_at(idx);
        let b = &mut self.active[c.active];
        if b.cork_deadline.is_some_and(|at| at <= now) {
            b.cork_deadline = None;
            if !b.end_pacing_wait() {
                b.nagle_push = true;
            }
            self.want_transmit(idx);
        }
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        if release.is_some_and(|at| at <= now) {
            if b.is_idle(c.state) && c.state.is_synchronized() && b.timer_kind != RetransmitTimer::SynAck {
                if let Some(rate) = &mut b.rate {
                    // The model of the path, the measured rate and the next departure are kept while the
                    // connection is idle, without the lists of what was in flight.
                    rate.delivery.release_memory();
                    b.rtx_queue.release_memory();
                    b.send.release_memory();
                    b.idle_since = Some(now + PACED_RELEASE_AFTER);
                    return true;
                }
                if self.active[self.conns[idx].active].mtu.has_failed() {
                    self.suspend_mtu_search(idx);
                }
                self.release_active(idx);
                return true;
            }
            b.idle_since = None;
        }
        if b.timer_at > now {
            return true;
        }
        match core::mem::take(&mut b.timer_kind) {
            RetransmitTimer::Off => b.timer_at = Instant::MAX,
            RetransmitTimer::Rto => return self.on_retransmission_timeout(idx),
            RetransmitTimer::LossProbe => {
                b.slow_path.set(SlowPathFlags::LOSS_PROBE);
                // The time-out remains if the probe cannot be sent.
                b.set_timer(RetransmitTimer::Rto, now + rto);
                self.want_transmit(idx);
            }
            RetransmitTimer::ReoTimeout => self.on_reorder_timeout(idx),
            RetransmitTimer::Persist => return self.on_persist(net, idx),
            RetransmitTimer::SynAck => return self.on_fastopen_timeout(net, idx),
        }
        true
    }

    /// Processes a retransmission time-out (RFC 6298 §5.4 to §5.7). Returns false if the connection has
    /// ended.
    fn on_retransmission_timeout(&mut self, idx: u32) -> bool {
        let now = self.now;
        let b = match self.tcb_and_active(idx) {
            Some((_, b)) if !b.rtx_queue.is_empty() => b,
            _ => {
                if let Some((_, b)) = self.tcb_and_active(idx) {
                    b.stop_timer();
                }
                return true;
            }
        };
        let (since, retransmits) = (b.retransmit_since, b.retransmits);
        let is_given_up = self.retransmits_timed_out(idx, since);
        self.detect_fastopen_black_hole(idx, retransmits, is_given_up);
        if is_given_up {
            self.destroy_timed_out(idx);
            return false;
        }
        self.stats.timeouts += 1;
        self.detect_black_hole(idx);
        let frto = self.config.frto;
        let Some((c, b)) = self.tcb_and_active(idx) else { return true };
        recovery::enter_loss(c, b, frto);
        // Set also if the retransmission has no route.
        b.retransmit_since.get_or_insert(now);
        b.tlp = None;
        if let Some(rate) = &mut b.rate {
            rate.pacer.is_exempt = true;
        }
        b.retransmits = b.retransmits.saturating_add(1);
        b.backoff = b.backoff.saturating_add(1);
        let (c, backoff) = (&self.conns[idx], self.active[self.conns[idx].active].backoff);
        let rto = rtt::rto(c, self.profiles.get(c.profile), backoff);
        let active = c.active;
        self.active[active].set_timer(RetransmitTimer::Rto, now + rto);
        self.want_transmit(idx);
        true
    }

    /// Returns whether retransmissions or probes have lasted long enough to give up (RFC 1122 §4.2.3.5, RFC
    /// 5482).
    fn retransmits_timed_out(&self, idx: u32, since: Option<Instant>) -> bool {
        let Some(since) = since else { return false };
        let elapsed = self.now - since;
        let user = self.profile(idx).user_timeout_ms;
        if user != 0 {
            return elapsed >= Duration::from_millis(user.into());
        }
        elapsed >= rtt::give_up_after(self.profile(idx), self.retry_limit(idx))
    }

    /// Returns the number of unanswered retransmissions or probes after which a connection is given up.
    fn retry_limit(&self, idx: u32) -> u8 {
        let c = &self.conns[idx];
        let orphan = c.has(Flags::ORPHAN) || matches!(c.state, State::Closing | State::LastAck);
        if orphan { self.config.orphan_retries } else { self.config.retries }
    }

    /// Returns whether an orphan's peer kept the window closed until the time-out grew no more (as on Linux):
    /// such a peer could otherwise keep any number of connections forever.
    fn has_orphan_timed_out(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        let backoff = self.active[c.active].backoff;
        c.has(Flags::ORPHAN)
            && backoff >= self.config.orphan_retries
            && rtt::rto(c, self.profiles.get(c.profile), backoff) >= rtt::rto_max(self.profile(idx))
    }

    /// Returns the time `after` from now, or earlier so that it does not exceed the user timeout.
    pub fn clamp_rto_to_user_timeout(&self, idx: u32, after: Duration) -> Instant {
        let at = self.now + after;
        let c = &self.conns[idx];
        let user = self.profile(idx).user_timeout_ms;
        match self.active[c.active].retransmit_since {
            Some(since) if user != 0 => at.min((since + Duration::from_millis(user.into())).max(self.now)),
            _ => at,
        }
    }

    /// Ends a connection after a time-out. No RST is sent: the peer has not answered for long, and RFC 9293
    /// §3.10.8 only deletes the connection.
    fn destroy_timed_out(&mut self, idx: u32) {
        self.destroy(idx, self.time_out_reason(idx));
    }

    /// Processes the reordering timer: segments that could have been reordered had enough time to arrive (RFC
    /// 8985 §6.3).
    fn on_reorder_timeout(&mut self, idx: u32) {
        let now = self.now;
        let threshold = self.config.reordering_segments;
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        b.timer_at = Instant::MAX;
        let input = recovery::rack_input(c, b, now, threshold, false);
        let (marked, again) = b.rack.detect_loss(&mut b.rtx_queue, &input);
        if marked > 0 {
            self.check_mtu_probe_loss(idx);
            let Some((c, b)) = self.tcb_and_active(idx) else { return };
            let prior_state = b.recovery.ca_state;
            recovery::on_loss_without_ack(c, b);
            let began = prior_state != CaState::Recovery && b.recovery.ca_state == CaState::Recovery;
            self.stats.fast_recoveries += u64::from(began);
        }
        self.set_retransmit_timer(idx, true, again);
        self.want_transmit(idx);
    }

    /// Probes a window that may have opened unnoticed (RFC 9293 §3.8.6.1). Returns false if the connection
    /// has ended.
    fn on_persist(&mut self, net: &mut Network, idx: u32) -> bool {
        let now = self.now;
        let Some((c, b)) = self.tcb_and_active(idx) else { return true };
        b.timer_at = Instant::MAX;
        let fin_waits = c.has(Flags::FIN_QUEUED) && !b.fin_sent;
        if b.send.is_empty() && !fin_waits || !b.rtx_queue.is_empty() {
            return true;
        }
        let since = *b.retransmit_since.get_or_insert(now);
        let probes = b.probes_out;
        // A peer that answers may keep its window closed indefinitely (RFC 9293 §3.8.6.1), except for the
        // user timeout (RFC 5482 §3).
        let user = self.profile(idx).user_timeout_ms;
        let gives_up = if user != 0 {
            self.retransmits_timed_out(idx, Some(since))
        } else {
            probes >= self.retry_limit(idx)
        };
        if gives_up || self.has_orphan_timed_out(idx) {
            self.destroy_timed_out(idx);
            return false;
        }
        self.stats.window_probes += 1;
        let Some((c, b)) = self.tcb_and_active(idx) else { return true };
        b.probes_out = b.probes_out.saturating_add(1);
        b.backoff = b.backoff.saturating_add(1);
        let open = (c.snd_una + c.snd_wnd).gt(c.snd_nxt);
        if open {
            b.nagle_push = true;
        }
        let (c, probes) = (&self.conns[idx], self.active[self.conns[idx].active].backoff);
        let after = rtt::probe_timeout(c, self.profiles.get(c.profile), probes);
        let active = c.active;
        let at = self.clamp_rto_to_user_timeout(idx, after);
        self.active[active].set_timer(RetransmitTimer::Persist, at);
        if open {
            self.want_transmit(idx);
        } else {
            self.xmit_probe(net, idx);
        }
        true
    }
}
