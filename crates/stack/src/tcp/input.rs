//! A segment arrives: the checks of RFC 9293 §3.10.7, in their order.

use super::Tcp;
use super::ack::{AckOutcome, is_unacceptable_ack};
use super::conn::{Flags, SlotState, Tcb};
use super::demux::{FlowEntry, FlowKey};
use super::profile::ProfileId;
use super::state::State;
use super::{listen, prediction};
use crate::device::RxBurst;
use crate::events::CloseReason;
use crate::ip::Network;
use crate::wire::tcp::{SeqNumber, TcpFlags, TcpHeader, TcpOptions, Timestamps};

/// Linux's bound on the age of a timestamp to compare with (RFC 7323 §5.5: 24 days).
pub(crate) const PAWS_24DAYS_MS: u32 = 24 * 24 * 3600 * 1000;

/// What a segment's header says beside ports and lengths, which are in [`Arrived`] itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SegmentHeader {
    pub seq: SeqNumber,
    pub ack: SeqNumber,
    pub flags: TcpFlags,
    pub window: u16,
    pub urgent: u16,
}

impl From<&TcpHeader> for SegmentHeader {
    #[inline(always)]
    fn from(header: &TcpHeader) -> Self {
        let TcpHeader { seq, ack, flags, window, urg_ptr: urgent, .. } = *header;
        Self { seq, ack, flags, window, urgent }
    }
}

/// A segment with all that was found out about it before its connection was touched.
pub(crate) struct Segment<'a> {
    pub key: FlowKey,
    pub hash: u32,
    /// What the flow table had under `hash` a moment ago, or [`super::demux::NO_HINT`]: to be looked at first, and not to be relied on.
    pub hint: u32,
    pub header: SegmentHeader,
    pub options: &'a [u8],
    pub payload: &'a [u8],
    /// Where the payload lies in the burst, if it does.
    pub frame: Option<(u16, u32)>,
    /// Congestion was experienced (RFC 3168).
    pub ce: bool,
    /// Wire segments in it (more than one after receive coalescing).
    pub segments: u16,
    /// Hop limit, or time to live, that was left.
    pub hop_limit: u8,
}

impl Segment<'_> {
    /// Sequence number after the segment.
    pub fn end(&self) -> SeqNumber {
        self.header.seq + self.seq_len()
    }

    /// Sequence space it takes.
    pub fn seq_len(&self) -> u32 {
        let flags = self.header.flags;
        self.payload.len() as u32
            + u32::from(flags.contains(TcpFlags::SYN))
            + u32::from(flags.contains(TcpFlags::FIN))
    }

    /// Payload of each of its segments on the wire.
    #[inline(always)]
    pub fn wire_payload(&self) -> usize {
        if self.segments > 1 { self.payload.len() / usize::from(self.segments) } else { self.payload.len() }
    }

    fn has(&self, flag: TcpFlags) -> bool {
        self.header.flags.contains(flag)
    }

    /// Timestamps, looking at the usual layout first.
    pub fn timestamps(&self) -> Option<Timestamps> {
        TcpOptions::parse_timestamps_only(self.options).or_else(|| TcpOptions::parse(self.options).timestamps)
    }
}

impl Tcp {
    /// Takes one segment. `burst` is what `seg.frame` refers to.
    #[inline(never)]
    pub fn input(&mut self, net: &mut Network, seg: &Segment<'_>, burst: &RxBurst<'_>) {
        self.input_inlined(net, seg, burst);
    }

    /// The same for the usual frames of IPv4, in whose loop all of it lies.
    #[inline(always)]
    pub fn input_inlined(&mut self, net: &mut Network, seg: &Segment<'_>, burst: &RxBurst<'_>) {
        self.stats.segments_in += u64::from(seg.segments);
        let found = self.lookup(seg);
        match found {
            None if net.is_misrouted(seg.frame, burst, &seg.key) => {}
            None => self.input_listen(net, seg, burst),
            Some(FlowEntry::TimeWait(index)) => self.input_time_wait(net, index, seg, burst),
            Some(FlowEntry::Connection(idx)) => {
                if self.is_gtsm_used && self.fails_gtsm(self.conns[idx].profile, seg) {
                    return;
                }
                if self.conns[idx].has(Flags::INLINE)
                    && !seg.payload.is_empty()
                    && !self.can_deliver_inline(idx, seg)
                {
                    // What cannot follow in place must not overtake.
                    self.buffer_pending(idx, burst);
                }
                let c = &self.conns[idx];
                let predicted = prediction::predict(c, seg);
                #[cfg(test)]
                let predicted = predicted.filter(|_| !self.is_fast_path_disabled);
                if let Some(timestamps) = predicted {
                    if c.state == State::SynReceived && !self.complete_handshake(net, idx, seg) {
                        return self.after_segment(idx, seg);
                    }
                    return self.input_predicted(net, idx, seg, timestamps);
                }
                if c.state == State::SynSent {
                    self.input_syn_sent(net, idx, seg);
                } else {
                    self.input_established(net, idx, seg);
                }
                self.after_segment(idx, seg);
            }
        }
    }

    /// Sees to the timers of a connection that a segment came for. What is on the transmit list gets its timer there, once however many segments came; and the answer of the
    /// application, which is about to put it there, is nearly certain.
    pub(super) fn after_segment(&mut self, idx: u32, seg: &Segment<'_>) {
        if self.conns[idx].slot_state != SlotState::Open {
            return;
        }
        if seg.payload.is_empty() {
            self.rearm(idx);
        } else {
            self.want_transmit(idx);
        }
    }

    /// Whether a segment took more hops than its socket allows (RFC 5082): it is dropped, and nobody is told.
    #[inline(never)]
    pub fn fails_gtsm(&mut self, profile: ProfileId, seg: &Segment<'_>) -> bool {
        self.is_below_min_hop_limit(profile, seg.key.remote.is_v4(), seg.hop_limit)
    }

    /// The same for whatever arrived with this hop limit.
    pub fn is_below_min_hop_limit(&mut self, profile: ProfileId, is_v4: bool, hops: u8) -> bool {
        let [v4, v6] = self.profiles.get(profile).min_hop_limits;
        let is_far = hops < if is_v4 { v4 } else { v6 };
        self.stats.min_hops_drops += u64::from(is_far);
        is_far
    }

    /// A socket has this profile now.
    pub fn note_min_hop_limit(&mut self, profile: ProfileId) {
        self.is_gtsm_used |= self.profiles.get(profile).min_hop_limits != [0; 2];
    }

    /// RFC 9293 §3.10.7.4: all states but CLOSED, LISTEN and SYN_SENT.
    pub fn input_established(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) {
        let timestamps = if self.conns[idx].has(Flags::TIMESTAMPS) { seg.timestamps() } else { None };
        if !self.validate_incoming(net, idx, seg, timestamps) {
            return;
        }
        // Second check: RST (RFC 5961 §3.2).
        if seg.has(TcpFlags::RST) {
            self.on_rst(idx, seg);
            return;
        }
        // Fourth check: SYN (RFC 5961 §4.2): never a reason to reset.
        if seg.has(TcpFlags::SYN) {
            self.on_unexpected_syn(idx, seg);
            return;
        }
        // Fifth check: a segment without ACK is dropped.
        if !seg.has(TcpFlags::ACK) {
            return;
        }
        if self.conns[idx].state == State::SynReceived && !self.complete_handshake(net, idx, seg) {
            return;
        }
        if is_unacceptable_ack(&self.conns[idx], seg.header.ack) {
            // Whoever sent it does not know where we are: nothing in it counts, its timestamp neither.
            self.send_challenge_ack(idx);
            return;
        }
        self.note_arrival(idx, seg, timestamps);
        let una = self.conns[idx].snd_una;
        let hop = self.conns[idx].hop;
        let outcome = self.on_ack(net, idx, seg, timestamps);
        if seg.header.ack.gt(una) {
            // What we sent arrived, so the neighbour is there (RFC 4861 §7.3.1).
            net.confirm_neighbour(self.now, &hop);
        }
        match outcome {
            AckOutcome::Accepted => {}
            AckOutcome::Old if seg.payload.is_empty() && !seg.has(TcpFlags::FIN) => return,
            AckOutcome::Old => {}
            AckOutcome::Gone => return,
        }
        if seg.has(TcpFlags::URG) || self.conns[idx].has(Flags::URGENT) {
            self.on_urgent(idx, seg);
        }
        self.on_payload(net, idx, seg);
    }

    /// First check: does any of it lie in the window, and is it not an old duplicate (RFC 9293 §3.10.7.4, RFC 7323 §5.3)?
    fn validate_incoming(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
        timestamps: Option<Timestamps>,
    ) -> bool {
        let now_ms = self.now_ms();
        let c = &self.conns[idx];
        let rst = seg.has(TcpFlags::RST);
        if let Some(ts) = timestamps
            && !rst
            && !paws_accepts(c, ts.tsval, now_ms)
        {
            self.stats.paws_rejected += 1;
            self.send_dup_ack(net, idx, seg);
            return false;
        }
        // The left edge is what we acknowledged last: a segment between it and rcv_nxt may cross our acknowledgement. A segment at the
        // right edge is acceptable for what it acknowledges, even if the window is closed to what it carries.
        let edge = c.rcv_edge.max(c.rcv_nxt);
        if seg.end().ge(c.rcv_wup) && seg.header.seq.le(edge) {
            return true;
        }
        self.stats.out_of_window += 1;
        if !rst {
            if seg.has(TcpFlags::SYN) {
                self.on_unexpected_syn(idx, seg);
            } else {
                self.send_dup_ack(net, idx, seg);
            }
        }
        false
    }

    /// RFC 5961 §3.2: only an RST at exactly the expected sequence number resets; another one in the window is challenged.
    fn on_rst(&mut self, idx: u32, seg: &Segment<'_>) {
        let c = &self.conns[idx];
        if seg.header.seq != c.rcv_nxt {
            self.send_challenge_ack(idx);
            return;
        }
        let reason = match c.state {
            // The peer has all our data and its FIN was received: nothing was lost.
            State::Closing | State::LastAck | State::TimeWait => CloseReason::Normal,
            State::SynReceived if c.has(Flags::ACTIVE_OPEN) => CloseReason::Refused,
            _ => CloseReason::Reset,
        };
        self.destroy(idx, reason);
    }

    fn on_unexpected_syn(&mut self, idx: u32, seg: &Segment<'_>) {
        let c = &mut self.conns[idx];
        let repeated = c.state == State::SynReceived && seg.header.seq + 1 == c.rcv_nxt;
        if repeated && !seg.has(TcpFlags::ACK) && !c.has(Flags::ACTIVE_OPEN) {
            // Our SYN+ACK was lost: it leaves again, without counting as a time-out. What comes may be the answer to either (Karn).
            c.rttvar = listen::SYNACK_AMBIGUOUS;
            // One that has not left at all yet is not sent again.
            self.stats.retransmitted += u64::from(!c.has(Flags::SYN_PENDING));
            c.flags.set(Flags::SYN_PENDING);
            self.want_transmit(idx);
            return;
        }
        if repeated && c.has(Flags::ACTIVE_OPEN) && seg.has(TcpFlags::ACK) && seg.header.ack == c.snd_nxt {
            // Simultaneous open: the peer's SYN+ACK acknowledges our SYN.
            return self.finish_simultaneous_open(idx, seg);
        }
        self.send_challenge_ack(idx);
    }

    /// A challenge acknowledgement (RFC 5961), within its budgets.
    pub fn send_challenge_ack(&mut self, idx: u32) {
        if self.is_oow_rate_limited(idx) || !self.may_challenge() {
            return;
        }
        self.stats.challenge_acks += 1;
        self.ack_now(idx);
    }

    /// An acknowledgement that tells the peer where we are, in answer to a segment outside of the window.
    fn send_dup_ack(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) {
        let c = &self.conns[idx];
        if c.state == State::SynReceived && !c.has(Flags::ACTIVE_OPEN) {
            // A SYN+ACK that waits for the device says all that, and more: an acknowledgement in front of it would give away the number
            // that opens the connection before the peer has seen our offer.
            if !c.has(Flags::SYN_PENDING) {
                self.send_ack_at_once(net, idx);
            }
            return;
        }
        // Segments with data are rarely part of an acknowledgement loop: always answered, as on Linux.
        if seg.payload.is_empty() && self.is_oow_rate_limited(idx) {
            return;
        }
        self.note_duplicate(idx, seg);
        let c = &mut self.conns[idx];
        c.raise_quick_acks(2);
        self.ack_now(idx);
    }

    /// One answer in `invalid_ack_interval_ms`, so that two confused ends do not answer each other for ever.
    fn is_oow_rate_limited(&mut self, idx: u32) -> bool {
        let interval = self.config.invalid_ack_interval_ms;
        if interval == 0 {
            return false;
        }
        let now_ms = self.now_ms();
        let busy = self.ensure_active(idx);
        let b = &mut self.active[busy];
        let limited = b.last_oow_ack_time.is_some_and(|at| now_ms.wrapping_sub(at) < interval);
        if !limited {
            b.last_oow_ack_time = Some(now_ms);
        }
        limited
    }

    /// The acknowledgement that completes a passive or simultaneous open. False if the segment goes no further.
    #[inline(always)]
    pub fn complete_handshake(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) -> bool {
        let now_us = self.now.as_micros() as u32;
        let c = &self.conns[idx];
        if seg.header.ack.le(c.snd_una) || seg.header.ack.gt(c.snd_nxt) {
            // RFC 9293 §3.10.7.4, fifth check, SYN-RECEIVED.
            self.send_reset(net, seg);
            return false;
        }
        if c.has(Flags::ACTIVE_OPEN) {
            let c = &mut self.conns[idx];
            listen::take_handshake_rtt(c, self.profiles.get(c.profile), now_us);
            c.snd_una += 1;
            self.establish_active(idx);
        } else {
            let token = c.token;
            if !self.listeners.is_open(listen::listener_of(token)) {
                self.send_reset(net, seg);
                self.destroy(idx, CloseReason::Aborted);
                return false;
            }
            if !self.establish_passive(idx) {
                // No room to be accepted: as if the segment was lost. The peer sends it again, or we send SYN+ACK again.
                self.stats.accept_overflows += 1;
                return false;
            }
            self.half_open -= 1;
            self.listeners.on_half_open_end(token);
            let c = &mut self.conns[idx];
            listen::take_handshake_rtt(c, self.profiles.get(c.profile), now_us);
            c.snd_una += 1;
        }
        let c = &mut self.conns[idx];
        c.flags.clear(Flags::SYN_PENDING);
        c.snd_wnd = u32::from(seg.header.window) << c.snd_wscale();
        c.snd_wl1 = seg.header.seq;
        true
    }

    /// What every acceptable segment updates: timestamp to echo, idle time, ECN.
    fn note_arrival(&mut self, idx: u32, seg: &Segment<'_>, timestamps: Option<Timestamps>) {
        let now_ms = self.now_ms();
        let c = &mut self.conns[idx];
        if let Some(ts) = timestamps {
            // RFC 7323 §4.3: only from the segment that covers the left edge of what we acknowledged. PAWS has found it to be newer, or
            // the one before it too old to tell.
            if seg.header.seq.le(c.rcv_wup) {
                c.ts_recent = ts.tsval;
                c.flags.clear(Flags::TS_RECENT_OLD);
            }
        }
        c.last_rx = now_ms;
        c.retries = 0;
        if c.has(Flags::ECN) {
            if seg.has(TcpFlags::CWR) {
                c.flags.clear(Flags::ECN_ECHO);
            }
            if seg.ce && !seg.payload.is_empty() {
                // RFC 3168 §6.1.3: echo until the peer says that it reduced its window, and tell it at once.
                c.flags.set(Flags::ECN_ECHO);
                c.raise_quick_acks(2);
            }
        }
    }
}

/// Protection against wrapped sequence numbers (RFC 7323 §5). A timestamp older than 24 days is no measure.
fn paws_accepts(c: &Tcb, value: u32, now_ms: u32) -> bool {
    (value.wrapping_sub(c.ts_recent) as i32) >= 0
        || now_ms.wrapping_sub(c.last_rx) > PAWS_24DAYS_MS
        || c.has(Flags::TS_RECENT_OLD)
}
