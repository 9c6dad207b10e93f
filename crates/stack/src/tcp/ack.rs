//! Processing of acknowledgements: window, retransmission queue, round-trip time, loss, congestion window.

use super::active::{ActiveConn, MsgMore, RetransmitTimer, TailLossProbe};
use super::config::CongestionControl;
use super::congestion::AckEvent;
use super::conn::{Flags, NONE, Tcb};
use super::input::Segment;
use super::profile::Profile;
use super::rate::AckBefore;
use super::recovery::{self, AckSummary, FastRetransResult};
use super::rtx_queue::Delivery;
use super::state::State;
use super::{Tcp, rtt};
use crate::events::Event;
use crate::ip::Network;
use crate::options::CaState;
use crate::wire::tcp::{SeqNumber, TcpFlags, TcpOptions, Timestamps};
use arrayvec::ArrayVec;
use core::time::Duration;

/// Shortest time after which everything is retransmitted to a peer that has discarded data (Linux).
const RENEGING_DELAY_MIN: Duration = Duration::from_millis(10);

/// Result of processing the acknowledgement field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AckOutcome {
    /// The ACK acknowledges new data, or repeats what is known.
    Accepted,
    /// The ACK is older than what is known: only the rest of the segment is processed.
    Old,
    /// The connection ended with this acknowledgement.
    Gone,
}

/// SACK blocks of a segment, sorted by their meaning.
#[derive(Default)]
struct SackBlocks {
    /// Blocks within the data in flight.
    valid: ArrayVec<(SeqNumber, SeqNumber), 4>,
    /// A range that was received twice (RFC 2883).
    dsack: Option<(SeqNumber, SeqNumber)>,
}

impl Tcp {
    /// Processes the ACK field (RFC 9293 §3.10.7.4, fifth check); [`is_unacceptable_ack`] is false for it.
    pub fn on_ack(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
        timestamps: Option<Timestamps>,
    ) -> AckOutcome {
        let ack = seg.header.ack;
        let c = &mut self.conns[idx];
        let old = ack.lt(c.snd_una);
        let window_changed = !old && update_window(c, seg);
        if c.active == NONE {
            return if old { AckOutcome::Old } else { AckOutcome::Accepted };
        }
        let advanced = ack.gt(c.snd_una);
        self.process_ack(idx, seg, timestamps, advanced, window_changed);
        if old {
            AckOutcome::Old
        } else if self.fin_acknowledged(idx) {
            self.on_fin_acknowledged(net, idx)
        } else {
            AckOutcome::Accepted
        }
    }

    fn process_ack(
        &mut self,
        idx: u32,
        seg: &Segment<'_>,
        timestamps: Option<Timestamps>,
        advanced: bool,
        window_changed: bool,
    ) {
        let now = self.now;
        let c = &mut self.conns[idx];
        let b = &mut self.active[c.active];
        let mss = c.mss();
        let outstanding = b.rtx_queue.packets_out;
        let before = b.rate.is_some().then(|| AckBefore::of(c, b, seg.header.ack));
        let blocks = sack_blocks(c, seg);
        let mut delivery = Delivery::default();
        let fack = b.rack.fack.unwrap_or(c.snd_una);
        let prior_una = c.snd_una;
        if advanced {
            let bytes = snd_una_update(c, b, seg.header.ack);
            b.send.discard_front(&mut self.chunks, &mut self.sources, bytes.into());
            if c.has(Flags::ACK_EVENTS) {
                b.acked_bytes = b.acked_bytes.saturating_add(bytes);
            }
        }
        let in_flight_before = b.rtx_queue.packets_out;
        b.rtx_queue.clean_acked(c.snd_una, mss, c.has(Flags::SACK), fack, &mut delivery);
        if !blocks.valid.is_empty() {
            b.rtx_queue.mark_sacked(&blocks.valid, mss, fack, &mut delivery);
        }
        if !c.has(Flags::SACK) {
            let repeats = !advanced && !window_changed && seg.payload.is_empty() && in_flight_before > 0;
            count_dupacks(
                b,
                repeats && seg.header.ack == prior_una,
                in_flight_before,
                advanced,
                &mut delivery,
            );
        }
        if let Some(block) = blocks.dsack {
            b.rack.on_dsack(c.snd_una, c.snd_nxt);
            b.recovery.on_dsack(block.0);
        }
        // An acknowledgement that reports a duplicate echoes the timestamp of an earlier segment, so it is no
        // measurement.
        let fresh = timestamps.filter(|_| advanced && blocks.dsack.is_none());
        if ack_update_rtt(c, self.profiles.get(c.profile), now, &delivery, fresh) {
            // Karn: the backoff lasts until a new round-trip time was measured (RFC 6298 §5, note after
            // §5.7).
            b.backoff = 0;
        }
        if advanced {
            c.flags.clear(Flags::SOFT_ERROR);
            b.retransmits = 0;
            b.retransmit_since = None;
        }
        let closed = c.snd_wnd == 0 && !c.has(Flags::ORPHAN);
        if closed && self.profiles.get(c.profile).user_timeout_ms == 0 {
            // RFC 9293 §3.8.6.1: a peer that answers may keep its window closed, even while data are in
            // flight.
            b.retransmit_since = None;
        }
        // A peer that answers window probes is alive.
        b.probes_out = 0;
        if b.mtu.probe.is_some() {
            self.on_mtu_probe_acknowledged(idx);
        }
        if outstanding > 0 {
            self.update_recovery_and_cwnd(idx, seg, &delivery, &blocks, advanced, timestamps);
            if let Some(before) = before {
                self.cong_control(idx, &before, &delivery);
            }
        }
        self.after_ack(idx, advanced);
    }

    /// Updates loss detection, recovery and the congestion window.
    fn update_recovery_and_cwnd(
        &mut self,
        idx: u32,
        seg: &Segment<'_>,
        delivery: &Delivery,
        blocks: &SackBlocks,
        advanced: bool,
        timestamps: Option<Timestamps>,
    ) {
        let now = self.now;
        let threshold = self.config.reordering_segments;
        let c = &mut self.conns[idx];
        let b = &mut self.active[c.active];
        let echo = timestamps.map(|t| t.tsecr);
        let lost_before = b.rtx_queue.lost_out;
        let mut reorder_at = None;
        if c.has(Flags::SACK) {
            let fack = blocks.valid.iter().map(|r| r.1).fold(c.snd_una, SeqNumber::max);
            let stale_echo = match (echo, delivery.most_recent) {
                (Some(echo), Some(n)) if n.is_retransmitted => {
                    let sent = (n.xmit_ts.as_millis() as u32).wrapping_add(c.ts_offset);
                    (echo.wrapping_sub(sent) as i32) < 0
                }
                _ => false,
            };
            let input = recovery::rack_input(c, b, now, threshold, stale_echo);
            b.rack.on_delivery(delivery, Some(fack), &input);
            if advanced && b.rtx_queue.sacked_out > 0 && b.rtx_queue.is_front_sacked() {
                return self.on_sack_reneging(idx);
            }
            reorder_at = b.rack.detect_loss(&mut b.rtx_queue, &input).1;
        } else {
            detect_loss_by_dupacks(c, b, threshold, advanced);
        }
        let (c, b) = if b.rtx_queue.lost_out > 0 && b.mtu.probe.is_some() {
            self.check_mtu_probe_loss(idx);
            let c = &mut self.conns[idx];
            let b = &mut self.active[c.active];
            (c, b)
        } else {
            (c, b)
        };
        let prior_state = b.recovery.ca_state;
        process_tlp_ack(c, b, blocks.dsack, advanced);
        let newly_lost = b.rtx_queue.lost_out.saturating_sub(lost_before);
        let summary = AckSummary {
            delivered: delivery.delivered,
            snd_una_advanced: advanced,
            newly_lost,
            ece: c.has(Flags::ECN) && seg.header.flags.contains(TcpFlags::ECE),
            dsack: blocks.dsack.is_some(),
            echo,
            original_end: delivery.original_end,
            is_dupack: delivery.sacked > 0 || !advanced && seg.payload.is_empty(),
            more_to_send: prior_state == CaState::Loss
                && (c.snd_una + b.send.len() as u32).gt(c.snd_nxt)
                && (c.snd_una + c.snd_wnd).gt(c.snd_nxt),
            has_reordering: b.rack.reordering(threshold) > threshold,
        };
        let limited = is_cwnd_limited(c, b) && b.congestion.kind() != CongestionControl::Bbr;
        let FastRetransResult { mut may_grow, is_undone } = recovery::fastretrans_alert(c, b, &summary);
        if prior_state == CaState::Loss && b.recovery.ca_state == CaState::Disorder {
            // The time-out was spurious: its marks are gone, but segments before those that arrived may be
            // lost nevertheless (`tcp_fastretrans_alert` detects losses after it has undone a time-out).
            b.retransmits = 0;
            let input = recovery::rack_input(c, b, now, threshold, false);
            reorder_at = b.rack.detect_loss(&mut b.rtx_queue, &input).1;
            if b.rtx_queue.lost_out > 0 {
                may_grow = {
                    let newly_lost = b.rtx_queue.lost_out;
                    recovery::fastretrans_alert(c, b, &AckSummary { dsack: false, newly_lost, ..summary })
                        .may_grow
                };
            }
        }
        self.stats.undos += u64::from(is_undone);
        if prior_state != CaState::Recovery && b.recovery.ca_state == CaState::Recovery {
            self.stats.fast_recoveries += 1;
        }
        if b.recovery.is_in_cwnd_reduction()
            && !matches!(prior_state, CaState::Cwr | CaState::Recovery)
            && c.has(Flags::ECN)
        {
            // RFC 3168 §6.1.2: the peer is notified of each reduction, whatever caused it.
            c.flags.set(Flags::ECN_CWR);
        }
        if advanced || may_grow {
            cong_avoid(c, b, now, delivery.delivered, delivery.rtt_us(now), may_grow && limited);
        }
        self.set_retransmit_timer(idx, advanced, reorder_at);
    }

    /// Arms an early time-out: half a round-trip time, 10 ms at least. The peer has acknowledged up to data
    /// that it had reported as received, so it has discarded them, and everything is retransmitted unless the
    /// next acknowledgement shows otherwise (RFC 2018 §8; `tcp_check_sack_reneging`).
    #[cold]
    fn on_sack_reneging(&mut self, idx: u32) {
        let c = &self.conns[idx];
        let wait = Duration::from_micros((c.srtt >> 4).into()).max(RENEGING_DELAY_MIN);
        self.active[c.active].set_timer(RetransmitTimer::Rto, self.now + wait);
    }

    /// Schedules what follows an acknowledgement: sending, `Writable` and `Acked` events.
    #[inline(always)]
    pub fn after_ack(&mut self, idx: u32, advanced: bool) {
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        if advanced && b.send.is_empty() {
            b.chrono.stop(self.now, b.lsndtime);
        }
        let nothing = b.send.is_empty()
            && b.rtx_queue.lost_out | b.acked_bytes == 0
            && !c.has(Flags::FIN_QUEUED | Flags::WANT_WRITABLE);
        if !nothing {
            self.after_ack_slow(idx, advanced);
        }
    }

    #[inline(never)]
    fn after_ack_slow(&mut self, idx: u32, advanced: bool) {
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        if b.msg_more == MsgMore::Expected {
            // The peer has acknowledged before the application has sent more (`tcp_data_snd_check`).
            b.msg_more = MsgMore::Released;
        }
        if !b.send.is_empty() || c.has(Flags::FIN_QUEUED) && !b.fin_sent || b.rtx_queue.lost_out > 0 {
            self.want_transmit(idx);
        }
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        if advanced && c.has(Flags::WANT_WRITABLE) && !c.has(Flags::ORPHAN) {
            let limit = self.send_buffer_limit(idx);
            // Linux wakes a writer when a third of the buffer is free.
            if b.send.len() <= limit - limit / 3 {
                let conn = self.conns.handle(idx);
                self.conns[idx].flags.clear(Flags::WANT_WRITABLE);
                self.events.push_back(Event::Writable { conn });
                let b = &mut self.active[self.conns[idx].active];
                if b.chrono.is_sndbuf_limited() && !b.send.is_empty() {
                    b.chrono.start_busy(self.now);
                }
            }
        }
        let c = &self.conns[idx];
        let acked = core::mem::take(&mut self.active[c.active].acked_bytes);
        if acked > 0 && !c.has(Flags::ORPHAN) {
            let conn = self.conns.handle(idx);
            self.events.push_back(Event::Acked { conn, bytes: acked });
        }
    }

    pub fn fin_acknowledged(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        matches!(c.state, State::FinWait1 | State::Closing | State::LastAck)
            && c.snd_una == c.snd_nxt
            && c.active != NONE
            && self.active[c.active].fin_sent
            && self.active[c.active].send.is_empty()
    }

    /// Sets the retransmission timer: for a time-out, a tail loss probe or the reordering timer (RFC 6298 §5,
    /// RFC 8985 §7.2); stops it if nothing is in flight.
    #[inline(always)]
    pub fn set_retransmit_timer(
        &mut self,
        idx: u32,
        restart: bool,
        reorder_at: Option<crate::time::Instant>,
    ) {
        let b = &mut self.active[self.conns[idx].active];
        if !b.rtx_queue.is_empty() {
            return self.arm_retransmit_timer(idx, restart, reorder_at);
        }
        b.stop_retransmit_timer();
    }

    #[inline(never)]
    fn arm_retransmit_timer(&mut self, idx: u32, restart: bool, reorder_at: Option<crate::time::Instant>) {
        let now = self.now;
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        if let Some(at) = reorder_at {
            let slack = Duration::from_millis(self.config.reordering_slack_ms.into());
            b.set_timer(RetransmitTimer::ReoTimeout, at + slack);
            return;
        }
        let running = match b.timer_kind {
            // The handshake comes first (`tcp_rearm_rto`).
            RetransmitTimer::SynAck => return,
            RetransmitTimer::LossProbe if !restart => return,
            RetransmitTimer::LossProbe | RetransmitTimer::Rto => true,
            _ => false,
        };
        let rto_at = if restart || !running {
            now.after_micros(rtt::rto_us(c, self.profiles.get(c.profile), b.backoff))
        } else {
            b.timer_at
        };
        let (enabled, profile) = (self.config.tail_loss_probes, self.profiles.get(c.profile));
        let (kind, at) = loss_probe_or_rto(c, b, enabled, profile, now, rto_at);
        if kind == RetransmitTimer::LossProbe || restart || !running {
            b.set_timer(kind, at);
        }
    }
}

/// Returns what is due first while segments are in flight: a tail loss probe, if one is allowed now, or the
/// time-out.
#[inline]
pub(super) fn loss_probe_or_rto(
    c: &Tcb,
    b: &ActiveConn,
    enabled: bool,
    profile: &Profile,
    now: crate::time::Instant,
    rto_at: crate::time::Instant,
) -> (RetransmitTimer, crate::time::Instant) {
    let probe_allowed = enabled
        && c.has(Flags::SACK)
        && b.rtx_queue.sacked_out == 0
        && b.rtx_queue.lost_out == 0
        && b.tlp.is_none()
        && matches!(b.recovery.ca_state, CaState::Open | CaState::Cwr);
    if !probe_allowed {
        return (RetransmitTimer::Rto, rto_at);
    }
    // RFC 8985 §7.2: a probe replaces the time-out and is sent no later than the time-out would expire.
    (RetransmitTimer::LossProbe, rto_at.min(now.after_micros(loss_probe_timeout_us(c, b, profile))))
}

/// Returns whether the ACK acknowledges data that were never sent, or is far older than the window (RFC 5961
/// §5.2).
pub(super) fn is_unacceptable_ack(c: &Tcb, ack: SeqNumber) -> bool {
    // No older sequence numbers exist than those that were acknowledged (`tcp_ack`): that of the local SYN on
    // a connection that was opened here, and data. The largest window that was ever offered is not stored;
    // its scale bounds it.
    let oldest = if c.is_acked() { 65_535u32 << c.snd_wscale() } else { c.has(Flags::ACTIVE_OPEN).into() };
    ack.gt(c.snd_nxt) || ack.lt(c.snd_una - oldest)
}

/// Grows the congestion window after an acknowledgement that delivered `delivered` segments with the
/// round-trip time `rtt_us`. The window grows only if it was `limited`, that is, if it limited the sender
/// (RFC 7661).
#[inline(always)]
pub(super) fn cong_avoid(
    c: &mut Tcb,
    b: &mut ActiveConn,
    now: crate::time::Instant,
    delivered: u32,
    rtt_us: Option<u32>,
    limited: bool,
) {
    if limited && delivered > 0 {
        b.congestion.on_ack(c, &AckEvent { now, delivered, rtt_us });
    }
    let una = c.snd_una;
    b.congestion.on_una(una, c);
}

/// Returns the probe time-out in µs (RFC 8985 §7.2): two round-trip times, and either 2 ms or, if only one
/// segment is in flight, `rto_min` for the delay of its acknowledgement (`tcp_schedule_loss_probe`).
fn loss_probe_timeout_us(c: &Tcb, b: &ActiveConn, profile: &Profile) -> u64 {
    if c.srtt == 0 {
        return profile.rto_initial_us();
    }
    let allowance = if b.rtx_queue.packets_out == 1 { profile.rto_min_us().into() } else { 2000 };
    u64::from(c.srtt >> 2) + allowance
}

/// Updates the send window from the newest segment (RFC 9293 §3.10.7.4). Returns whether the window changed.
#[inline(always)]
pub(super) fn update_window(c: &mut Tcb, seg: &Segment<'_>) -> bool {
    let window = u32::from(seg.header.window) << c.snd_wscale();
    let newer = seg.header.ack.gt(c.snd_una)
        || seg.header.seq.gt(c.snd_wl1)
        || seg.header.seq == c.snd_wl1 && (window > c.snd_wnd || window == 0);
    if !newer {
        return false;
    }
    c.snd_wl1 = seg.header.seq;
    core::mem::replace(&mut c.snd_wnd, window) != window
}

/// Moves `snd_una` forward. Returns the acknowledged bytes of payload, without FIN.
pub(super) fn snd_una_update(c: &mut Tcb, b: &mut ActiveConn, ack: SeqNumber) -> u32 {
    let acked = (ack - c.snd_una) as u32;
    c.snd_una = ack;
    c.set_acked();
    if b.snd_sml.is_some_and(|end| end.le(ack)) {
        b.snd_sml = None;
    }
    if b.snd_up.is_some_and(|end| end.le(ack)) {
        b.snd_up = None;
    }
    acked.min(b.send.len() as u32)
}

/// Sorts SACK blocks; blocks outside of the data in flight are ignored (RFC 2018 §5, RFC 2883 §4).
fn sack_blocks(c: &Tcb, seg: &Segment<'_>) -> SackBlocks {
    let mut out = SackBlocks::default();
    // With timestamps, 12 bytes of options contain nothing else; without timestamps, 12 bytes contain one
    // SACK block.
    let shortest = if c.has(Flags::TIMESTAMPS) { 13 } else { 10 };
    if !c.has(Flags::SACK) || seg.options.len() < shortest {
        return out;
    }
    let all = TcpOptions::parse(seg.options).sack_blocks;
    let una = seg.header.ack.max(c.snd_una);
    for (i, &(start, end)) in all.iter().enumerate() {
        let sane = start.lt(end) && end.le(c.snd_nxt);
        if !sane {
            continue;
        }
        let inside_next = all.get(1).is_some_and(|second| start.ge(second.0) && end.le(second.1));
        if i == 0 && (end.le(seg.header.ack) || inside_next) {
            let window_max = 65_535u32 << c.snd_wscale();
            if end.gt(c.snd_una - window_max) {
                out.dsack = Some((start, end));
            }
            continue;
        }
        if start.ge(una) {
            out.valid.push((start, end));
        }
    }
    out
}

/// Counts duplicate acknowledgements of a peer without SACK: each reports one segment that has left the
/// network.
fn count_dupacks(b: &mut ActiveConn, duplicate: bool, before: u32, advanced: bool, delivery: &mut Delivery) {
    if advanced {
        // One of the acknowledged segments filled the gap; the others were counted as they arrived.
        let acked = before - b.rtx_queue.packets_out;
        let counted = acked.saturating_sub(1).min(b.rtx_queue.sacked_out);
        b.rtx_queue.sacked_out -= counted;
        delivery.delivered = acked.saturating_sub(counted);
    } else if duplicate && b.rtx_queue.sacked_out + 1 < b.rtx_queue.packets_out.max(2) {
        b.rtx_queue.sacked_out += 1;
        delivery.delivered += 1;
    }
    b.rtx_queue.sacked_out =
        b.rtx_queue.sacked_out.min(b.rtx_queue.packets_out.saturating_sub(b.rtx_queue.lost_out));
}

/// Marks the head of the queue lost after `threshold` duplicate acknowledgements, or after a partial
/// acknowledgement during recovery (RFC 6582 §3.2).
fn detect_loss_by_dupacks(c: &Tcb, b: &mut ActiveConn, threshold: u32, advanced: bool) {
    let mss = c.mss();
    match b.recovery.ca_state {
        CaState::Recovery => {
            if advanced && c.snd_una.lt(b.recovery.high_seq) {
                b.rtx_queue.mark_head_lost(mss);
            }
        }
        CaState::Loss => {}
        _ => {
            if b.rtx_queue.sacked_out >= threshold {
                b.rtx_queue.mark_head_lost(mss);
            }
        }
    }
}

/// Takes a round-trip time sample and returns whether there was one. `timestamps` is that of a segment that
/// moved `snd_una`: other segments echo an older timestamp (RFC 7323 §4.1).
pub(super) fn ack_update_rtt(
    c: &mut Tcb,
    profile: &Profile,
    now: crate::time::Instant,
    delivery: &Delivery,
    timestamps: Option<Timestamps>,
) -> bool {
    let cumulative = delivery.first_ackt.filter(|_| !delivery.has_retrans_acked);
    if let Some(at) = cumulative.or(delivery.last_sackt) {
        rtt::on_sample(c, profile, now.micros_since(at) as u32);
        return true;
    }
    if delivery.delivered > 0
        && let Some(ts) = timestamps.filter(|ts| ts.tsecr != 0)
    {
        // With timestamps there is no retransmission ambiguity (RFC 7323 §4.1).
        let now_ts = (now.as_millis() as u32).wrapping_add(c.ts_offset);
        let ms = now_ts.wrapping_sub(ts.tsecr);
        if ms < 1 << 20 {
            rtt::on_sample(c, profile, ms.max(1) * 1000);
            return true;
        }
    }
    false
}

/// Ends an episode of tail loss probing, and detects a loss that the probe itself repaired (RFC 8985 §7.4).
fn process_tlp_ack(c: &mut Tcb, b: &mut ActiveConn, dsack: Option<(SeqNumber, SeqNumber)>, advanced: bool) {
    let Some(TailLossProbe { end_seq, is_retrans }) = b.tlp else { return };
    if c.snd_una.lt(end_seq) {
        return;
    }
    if !is_retrans || dsack.is_some_and(|block| block.1 == end_seq) {
        b.tlp = None;
    } else if c.snd_una.gt(end_seq) {
        b.tlp = None;
        recovery::on_tlp_repaired_loss(c, b);
    } else if !advanced {
        // The probe arrived as a duplicate, and the DSACK for it was lost.
        b.tlp = None;
    }
}

/// Returns whether the congestion window limited the sender (RFC 7661): only then may it grow.
pub(super) fn is_cwnd_limited(c: &Tcb, b: &ActiveConn) -> bool {
    if b.is_cwnd_limited {
        return true;
    }
    c.cwnd < c.ssthresh && c.cwnd < 2 * b.max_packets_out
}
