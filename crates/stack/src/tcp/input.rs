//! Segments that arrive: the checks of RFC 9293 §3.10.7, in their order.

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

/// Age in ms beyond which a timestamp is not compared with (RFC 7323 §5.5: 24 days, as on Linux).
pub(crate) const PAWS_24DAYS_MS: u32 = 24 * 24 * 3600 * 1000;

/// Fields of a segment's header except ports and lengths, which are in [`Segment`] itself.
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

/// Position of a segment's payload in a burst.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PayloadPosition {
    /// Index of the frame in the burst.
    pub frame: u16,
    /// Offset of the payload in the frame.
    pub start: u32,
}

/// A segment, with everything that was determined about it before its connection is touched.
pub(crate) struct Segment<'a> {
    pub key: FlowKey,
    pub hash: u32,
    /// Value that the flow table had under `hash` a moment ago, or [`super::demux::NO_HINT`]. It is tried
    /// first and may be outdated.
    pub hint: u32,
    pub header: SegmentHeader,
    pub options: &'a [u8],
    pub payload: &'a [u8],
    /// Position of the payload, if it is in the burst.
    pub position: Option<PayloadPosition>,
    /// True if the packet has the ECN codepoint CE (RFC 3168).
    pub ce: bool,
    /// Segments that were on the wire (more than one after receive coalescing).
    pub segments: u16,
    /// Hop limit, or time to live, with which the packet arrived.
    pub hop_limit: u8,
    /// Flow label of the packet over IPv6, otherwise 0.
    pub flow_label: u32,
}

impl Segment<'_> {
    /// Returns the sequence number after the segment.
    pub fn end(&self) -> SeqNumber {
        self.header.seq + self.seq_len()
    }

    /// Returns the length of the segment in sequence space.
    pub fn seq_len(&self) -> u32 {
        let flags = self.header.flags;
        self.payload.len() as u32
            + u32::from(flags.contains(TcpFlags::SYN))
            + u32::from(flags.contains(TcpFlags::FIN))
    }

    /// Returns the payload bytes of each segment that was on the wire.
    #[inline(always)]
    pub fn wire_payload(&self) -> usize {
        if self.segments > 1 { self.payload.len() / usize::from(self.segments) } else { self.payload.len() }
    }

    fn has(&self, flag: TcpFlags) -> bool {
        self.header.flags.contains(flag)
    }

    /// Returns the timestamps; tries the most frequent layout of the options first.
    pub fn timestamps(&self) -> Option<Timestamps> {
        TcpOptions::parse_timestamps_only(self.options).or_else(|| TcpOptions::parse(self.options).timestamps)
    }
}

impl Tcp {
    /// Processes one segment. `seg.position` refers to `burst`.
    #[inline(never)]
    pub fn input(&mut self, net: &mut Network, seg: &Segment<'_>, burst: &RxBurst<'_>) {
        self.input_inlined(net, seg, burst);
    }

    /// Like [`Tcp::input`], inlined into the loop over fast-path IPv4 frames.
    #[inline(always)]
    pub fn input_inlined(&mut self, net: &mut Network, seg: &Segment<'_>, burst: &RxBurst<'_>) {
        self.stats.segments_in += u64::from(seg.segments);
        let found = self.lookup(seg);
        match found {
            None if net.is_misrouted(seg.position.map(|p| p.frame), burst, &seg.key) => {}
            None => self.input_listen(net, seg, burst),
            Some(FlowEntry::TimeWait(index)) => self.input_time_wait(net, index, seg, burst),
            Some(FlowEntry::Connection(idx)) => {
                if self.has_guards
                    && (self.is_gtsm_used || self.conns[idx].state == State::SynReceived)
                    && !self.passes_guards(idx, seg)
                {
                    return;
                }
                if self.conns[idx].has(Flags::INLINE)
                    && !seg.payload.is_empty()
                    && !self.can_deliver_inline(idx, seg)
                {
                    // Data that cannot be delivered inline must not overtake data that wait in the burst.
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
                if c.has(Flags::URGENT_OR_FILTERED) {
                    return self.input_urgent_or_filtered(net, idx, seg, burst);
                }
                self.input_unpredicted(net, idx, seg, burst);
            }
        }
    }

    /// Processes a segment that was not predicted.
    #[inline(always)]
    pub(super) fn input_unpredicted(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
        burst: &RxBurst<'_>,
    ) {
        if self.conns[idx].state == State::SynSent {
            self.input_syn_sent(net, idx, seg);
        } else {
            self.input_established(net, idx, seg, Some(burst));
        }
        self.after_segment(idx, seg);
    }

    /// Updates the timers of a connection after a segment was processed. A connection on the transmit list
    /// gets its timer when that list is processed, once for any number of segments; and data nearly always
    /// make the application answer, which puts the connection on the list.
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

    /// Drops a segment whose hop limit is below the minimum of its socket (GTSM, RFC 5082). Returns whether
    /// it is dropped; no error is sent.
    #[inline(never)]
    pub fn fails_gtsm(&mut self, profile: ProfileId, seg: &Segment<'_>) -> bool {
        self.is_below_min_hop_limit(profile, seg.key.remote.is_v4(), seg.hop_limit)
    }

    /// Returns whether a packet with this hop limit is dropped by GTSM, and counts it.
    pub fn is_below_min_hop_limit(&mut self, profile: ProfileId, is_v4: bool, hops: u8) -> bool {
        let [v4, v6] = self.profiles.get(profile).min_hop_limits;
        let is_far = hops < if is_v4 { v4 } else { v6 };
        self.stats.min_ttl_drops += u64::from(is_far);
        is_far
    }

    /// Records whether a profile that a socket now uses has a minimum hop limit, or asks for unordered
    /// receive.
    pub fn note_profile(&mut self, profile: ProfileId) {
        let profile = self.profiles.get(profile);
        self.is_gtsm_used |= profile.min_hop_limits != [0; 2];
        self.has_guards |= self.is_gtsm_used;
        self.is_unordered_used |= profile.unordered;
    }

    /// Processes a segment in all states but CLOSED, LISTEN and SYN-SENT (RFC 9293 §3.10.7.4). `burst` as for
    /// [`Tcp::on_payload`].
    pub fn input_established(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
        burst: Option<&RxBurst<'_>>,
    ) {
        // Fifth check, before the first as on Linux: a segment without ACK is dropped, and not answered.
        if !seg.header.flags.intersects(TcpFlags::ACK | TcpFlags::RST | TcpFlags::SYN) {
            return;
        }
        let is_request = self.is_request(idx);
        if is_request && seg.has(TcpFlags::ACK) && seg.header.ack != self.conns[idx].snd_nxt {
            // RFC 9293 §3.10.7.4, fifth check, SYN-RECEIVED; before the first one as in `tcp_check_req`.
            self.send_reset(net, seg);
            return;
        }
        let timestamps = if self.conns[idx].has(Flags::TIMESTAMPS) { seg.timestamps() } else { None };
        if !self.validate_incoming(net, idx, seg, timestamps) {
            return;
        }
        // Second check: RST (RFC 5961 §3.2).
        if seg.has(TcpFlags::RST) {
            self.on_rst(idx, seg);
            return;
        }
        // Fourth check: SYN (RFC 5961 §4.2): a reason to reset only for a request to a listener, which cannot
        // be the one that the peer means (RFC 9293 §3.10.7.4, SYN-RECEIVED).
        if seg.has(TcpFlags::SYN) {
            if is_request && seg.header.seq + 1 != self.conns[idx].rcv_nxt {
                self.send_reset(net, seg);
                self.destroy(idx, CloseReason::Reset);
                return;
            }
            self.on_unexpected_syn(net, idx, seg);
            return;
        }
        if self.conns[idx].state == State::SynReceived && !self.complete_handshake(net, idx, seg) {
            return;
        }
        if self.fastopen_pending > 0 && !self.complete_fastopen(net, idx, seg) {
            return;
        }
        if is_unacceptable_ack(&self.conns[idx], seg.header.ack) {
            // The sender does not know the state of this connection: nothing of the segment is used, not even
            // its timestamp.
            self.send_challenge_ack(idx);
            return;
        }
        self.note_arrival(idx, seg, timestamps);
        let una = self.conns[idx].snd_una;
        let hop = self.conns[idx].hop;
        let outcome = self.on_ack(net, idx, seg, timestamps);
        if seg.header.ack.gt(una) {
            // Data that were sent have arrived, so the neighbour is reachable (RFC 4861 §7.3.1).
            net.confirm_neighbour(self.now, &hop);
        }
        match outcome {
            AckOutcome::Accepted => {}
            AckOutcome::Old if seg.payload.is_empty() && !seg.has(TcpFlags::FIN) => return,
            AckOutcome::Old => {}
            AckOutcome::Gone => return,
        }
        if seg.has(TcpFlags::URG) || self.conns[idx].has(Flags::URGENT_OR_FILTERED) {
            self.on_urgent(idx, seg);
        }
        self.on_payload(net, idx, seg, burst);
    }

    /// Returns whether a connection is a request to a listener that the peer has to acknowledge.
    #[inline(always)]
    fn is_request(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        c.state == State::SynReceived && !c.has(Flags::ACTIVE_OPEN)
    }

    /// First check: returns whether a part of the segment is in the window and the segment is not an old
    /// duplicate (RFC 9293 §3.10.7.4, RFC 7323 §5.3). Otherwise it is answered as far as the RFCs ask for it.
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
            if seg.has(TcpFlags::SYN) && self.conns[idx].state != State::SynReceived {
                self.send_challenge_ack(idx);
            } else {
                self.send_dup_ack(net, idx, seg);
            }
            return false;
        }
        // The left edge is what was acknowledged last: a segment between it and `rcv_nxt` may have crossed
        // the acknowledgement. A segment at the right edge is acceptable for its ACK, even if the window is
        // closed for its payload.
        let edge = c.rcv_edge.max(c.rcv_nxt);
        if seg.end().ge(c.rcv_wup) && seg.header.seq.le(edge) {
            return true;
        }
        if rst && is_reset_before_fin(c, seg) {
            return true;
        }
        self.stats.out_of_window += 1;
        if !rst {
            if seg.has(TcpFlags::SYN) {
                self.on_unexpected_syn(net, idx, seg);
            } else {
                self.send_dup_ack(net, idx, seg);
            }
        }
        false
    }

    /// Processes RST. Only an RST with exactly the expected sequence number resets the connection; another
    /// one in the window causes a challenge ACK (RFC 5961 §3.2).
    fn on_rst(&mut self, idx: u32, seg: &Segment<'_>) {
        let c = &self.conns[idx];
        if seg.header.seq != c.rcv_nxt && !is_reset_before_fin(c, seg) {
            self.send_challenge_ack(idx);
            return;
        }
        let reason = match c.state {
            State::TimeWait => CloseReason::Normal,
            // An application that has closed the socket learns nothing of its end.
            State::Closing | State::LastAck if c.has(Flags::ORPHAN) => CloseReason::Normal,
            State::SynReceived if c.has(Flags::ACTIVE_OPEN) => CloseReason::Refused,
            _ => CloseReason::Reset,
        };
        self.destroy(idx, reason);
    }

    fn on_unexpected_syn(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) {
        if self.fastopen_pending > 0 && self.answer_repeated_fastopen(net, idx, seg) {
            return;
        }
        let c = &mut self.conns[idx];
        let repeated = c.state == State::SynReceived && seg.header.seq + 1 == c.rcv_nxt;
        if repeated && !seg.has(TcpFlags::ACK) && !c.has(Flags::ACTIVE_OPEN) {
            // The SYN+ACK was lost: it is sent again without counting as a time-out. The next acknowledgement
            // may belong to either of them (Karn).
            c.rttvar |= listen::SYNACK_AMBIGUOUS;
            // A SYN+ACK that was not sent at all yet is not a retransmission.
            self.stats.retransmitted += u64::from(!c.has(Flags::SYN_PENDING));
            c.flags.set(Flags::SYN_PENDING);
            self.want_transmit(idx);
            return;
        }
        if repeated && c.has(Flags::ACTIVE_OPEN) && seg.has(TcpFlags::ACK) && seg.header.ack == c.snd_nxt {
            // Simultaneous open: the peer's SYN+ACK acknowledges the local SYN.
            return self.finish_simultaneous_open(idx, seg);
        }
        self.send_challenge_ack(idx);
    }

    /// Sends a challenge ACK (RFC 5961) in this turn, unless one of its rate limits is reached.
    pub fn send_challenge_ack(&mut self, idx: u32) {
        if self.is_oow_rate_limited(idx) || !self.may_challenge() {
            return;
        }
        self.stats.challenge_acks += 1;
        self.ack_now(idx);
    }

    /// Answers a segment outside of the window with an acknowledgement of the current state (Linux's
    /// `tcp_send_dupack`).
    fn send_dup_ack(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) {
        if self.is_request(idx) {
            let c = &self.conns[idx];
            // A SYN+ACK that waits for the device contains more than this acknowledgement would. An
            // acknowledgement before it would reveal the initial sequence number before the peer has seen the
            // options of the SYN+ACK.
            if !c.has(Flags::SYN_PENDING) {
                self.send_ack_at_once(net, idx);
            }
            return;
        }
        // Segments with data or FIN are rarely part of an ACK loop: they are always answered, as on Linux.
        if seg.seq_len() == 0 && self.is_oow_rate_limited(idx) {
            return;
        }
        if seg.seq_len() > 0 && seg.header.seq.lt(self.conns[idx].rcv_nxt) {
            self.note_duplicate(idx, seg);
            return self.enter_quickack_mode(idx);
        }
        self.ack_now(idx);
    }

    /// Returns whether an answer is suppressed: one answer is sent in `invalid_ack_interval_ms`, so that two
    /// peers that disagree do not answer each other endlessly.
    fn is_oow_rate_limited(&mut self, idx: u32) -> bool {
        let interval = self.config.invalid_ack_interval_ms;
        if interval == 0 {
            return false;
        }
        let now_ms = self.now_ms();
        let active = self.ensure_active(idx);
        let b = &mut self.active[active];
        let limited = b.last_oow_ack_time.is_some_and(|at| now_ms.wrapping_sub(at) < interval);
        if !limited {
            b.last_oow_ack_time = Some(now_ms);
        }
        limited
    }

    /// Processes the acknowledgement that completes a passive or simultaneous open. Returns false if the
    /// segment must not be processed further.
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
            if !self.listeners.accepts_at_once(listen::listener_of(c.token))
                && !self.may_establish_passive(net, idx, seg)
            {
                return false;
            }
            if !self.establish_passive(idx) {
                // The accept queue is full: the segment is treated as lost. The peer sends it again, or the
                // SYN+ACK is sent again.
                self.stats.accept_overflows += 1;
                return false;
            }
            self.half_open -= 1;
            self.listeners.on_half_open_end(self.conns[idx].token);
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

    /// Updates what every acceptable segment updates: the timestamp to echo, the idle time, ECN.
    fn note_arrival(&mut self, idx: u32, seg: &Segment<'_>, timestamps: Option<Timestamps>) {
        let now_ms = self.now_ms();
        let c = &mut self.conns[idx];
        if let Some(ts) = timestamps {
            // RFC 7323 §4.3: only a segment that covers the left edge of what was acknowledged updates the
            // timestamp. PAWS has found the timestamp newer, or the previous one too old to compare with.
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
                // RFC 3168 §6.1.3: ECE is echoed until the peer reports that it has reduced its window, and
                // the acknowledgement is sent at once.
                c.flags.set(Flags::ECN_ECHO);
                c.raise_quick_acks(2);
            }
        }
    }
}

/// Returns whether a segment with the timestamp `value` passes the protection against wrapped sequence
/// numbers (PAWS, RFC 7323 §5). If the previous timestamp is older than 24 days, every segment passes.
fn paws_accepts(c: &Tcb, value: u32, now_ms: u32) -> bool {
    (value.wrapping_sub(c.ts_recent) as i32) >= 0
        || now_ms.wrapping_sub(c.last_rx) > PAWS_24DAYS_MS
        || c.has(Flags::TS_RECENT_OLD)
}

/// Returns whether RST has the sequence number of the peer's FIN. macOS sends both if a program is killed
/// (`tcp_reset_check`).
#[cold]
fn is_reset_before_fin(c: &Tcb, seg: &Segment<'_>) -> bool {
    seg.header.seq + 1 == c.rcv_nxt && matches!(c.state, State::CloseWait | State::LastAck | State::Closing)
}
