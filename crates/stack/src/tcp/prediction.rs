//! Header prediction: most segments are the next expected one, on a connection without loss or reordering.
//! Such a segment needs none of the checks for exceptional cases, and its acknowledgement needs no loss
//! recovery.
//!
//! This module does what `input` and `ack` would do with such a segment, and nothing else: tests compare both
//! paths (docs/adr/0007).

use super::ack::AckOutcome;
use super::active::ActiveConn;
use super::conn::{Flags, NONE, Tcb};
use super::input::{PayloadPosition, Segment};
use super::profile::Profile;
use super::receive::{AckDue, chunks_for};
use super::rtx_queue::Delivery;
use super::state::State;
use super::{Tcp, ack, receive, recovery, rtt};
use crate::events::InlineData;
use crate::ip::Network;
use crate::options::CaState;
use crate::time::Instant;
use crate::wire::tcp::{TcpFlags, TcpOptions, Timestamps};

/// Flags that a predicted segment may have besides ACK, which is required.
const PREDICTED_FLAGS: TcpFlags = TcpFlags::PSH.with(TcpFlags::FIN);

/// Checks whether a segment is the next expected one. Returns its timestamps, or `Some(None)` if timestamps
/// are not in use; `None` if the segment is not expected.
#[inline(always)]
pub(super) fn predict(c: &Tcb, seg: &Segment<'_>) -> Option<Option<Timestamps>> {
    let header = &seg.header;
    // In SYN-RECEIVED only the segment that completes the handshake is predicted.
    let acknowledges = if c.state == State::SynReceived {
        header.ack == c.snd_nxt && !c.has(Flags::ACTIVE_OPEN)
    } else {
        c.state.is_synchronized() && header.ack.ge(c.snd_una) && header.ack.le(c.snd_nxt)
    };
    let is_fast = acknowledges
        && header.flags.without(PREDICTED_FLAGS) == TcpFlags::ACK
        && header.seq == c.rcv_nxt
        && !c.has(Flags::ECN | Flags::URGENT_OR_FILTERED | Flags::TS_RECENT_OLD);
    if !is_fast {
        return None;
    }
    if !c.has(Flags::TIMESTAMPS) {
        return seg.options.is_empty().then_some(None);
    }
    let ts = TcpOptions::parse_timestamps_only(seg.options)?;
    (ts.tsval.wrapping_sub(c.ts_recent).cast_signed() >= 0).then_some(Some(ts))
}

/// Returns whether a segment is the last one that a connection waits for after the application has closed it:
/// it acknowledges everything, including the local FIN, and carries the peer's FIN.
#[inline(always)]
fn completes_close(c: &Tcb, b: &ActiveConn, seg: &Segment<'_>) -> bool {
    c.state == State::FinWait1
        && c.has(Flags::ORPHAN)
        && seg.header.flags.contains(TcpFlags::FIN)
        && seg.payload.is_empty()
        && seg.header.ack == c.snd_nxt
        && b.fin_sent
}

/// Returns whether nothing is lost, reordered, retransmitted or probed for.
#[inline(always)]
fn is_open_state(c: &Tcb, b: &mut ActiveConn) -> bool {
    b.recovery.ca_state == CaState::Open && b.rtx_queue.has_no_loss_pending(c.snd_una) && b.tlp.is_none()
}

/// Flags of connections for which an acknowledgement does more than free the acknowledged data.
const ACK_SLOW_PATH: Flags = Flags::FIN_QUEUED.with(Flags::WANT_WRITABLE).with(Flags::ACK_EVENTS);

impl Tcp {
    /// Processes a segment that [`predict`] has accepted, on a connection whose handshake is complete.
    ///
    /// TCB and active state are looked up once for the fast path; each exceptional case continues in a
    /// function of its own.
    pub(super) fn input_predicted(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
        timestamps: Option<Timestamps>,
    ) {
        let (now, now_ms) = (self.now, self.now_ms);
        let c = &mut self.conns[idx];
        if let Some(ts) = timestamps
            && c.rcv_wup == c.rcv_nxt
        {
            // RFC 7323 §4.3.
            c.ts_recent = ts.tsval;
        }
        c.last_rx = now_ms;
        c.retries = 0;
        let advanced = seg.header.ack != c.snd_una;
        if advanced {
            net.confirm_neighbour(now, &c.hop);
        }
        let profile = self.profiles.get(c.profile);
        if c.active != NONE {
            let b = &mut self.active[c.active];
            if completes_close(c, b, seg) {
                return self.enter_time_wait_at_once(net, idx, seg.hash);
            }
            if !(advanced && is_open_state(c, b)) {
                let outcome = self.on_ack(net, idx, seg, timestamps);
                return self.finish_on_slow_path(net, idx, seg, outcome);
            }
            let acked = (seg.header.ack - c.snd_una) as u32;
            let acks_everything = seg.header.ack == c.snd_nxt
                && !c.has(ACK_SLOW_PATH)
                && b.send.len() == acked.into()
                && b.rack.fack.is_none_or(|fack| fack.le(seg.header.ack));
            ack::update_window(c, seg);
            let sole = b
                .rtx_queue
                .sole_entry_ending_at(seg.header.ack)
                .filter(|_| acks_everything)
                .map(|entry| (entry.xmit_ts, entry.segments));
            let Some((xmit_ts, segments)) = sole else {
                let outcome = self.process_in_order_ack(net, idx, seg, timestamps);
                return self.finish_on_slow_path(net, idx, seg, outcome);
            };
            ack::snd_una_update(c, b, seg.header.ack);
            b.send.clear(&mut self.chunks, &mut self.sources);
            b.rtx_queue.remove_sole_entry();
            reset_retransmit_state(c, b);
            on_single_delivery(c, b, profile, now, xmit_ts, segments);
            b.stop_retransmit_timer();
            b.chrono.stop(now, b.lsndtime);
        } else {
            ack::update_window(c, seg);
        }
        let len = seg.payload.len();
        let is_fast = len > 0
            && !seg.header.flags.contains(TcpFlags::FIN)
            && c.state.may_receive()
            && !c.has(Flags::ORPHAN)
            && len <= c.rcv_wnd() as usize
            && (c.active == NONE || self.active[c.active].is_receive_queue_empty())
            && self.chunks.spare() >= chunks_for(len);
        let Some(PayloadPosition { frame, start }) = seg.position.filter(|_| is_fast) else {
            if len == 0 {
                self.release_active_early(idx);
            }
            return self.finish_on_slow_path(net, idx, seg, AckOutcome::Accepted);
        };
        // The data are in order, fit the window and have no FIN: the application reads them in place.
        let data = InlineData { frame, start, len: len as u32 };
        receive::queue_inline(c, idx, data, &mut self.chunks, &mut self.events, &mut self.pending);
        self.stats.bytes_in += u64::from(data.len);
        if c.active != NONE {
            self.active[c.active].lrcvtime = now_ms;
        }
        let due = receive::event_data_recv(c, profile, now_ms, seg, false);
        let is_deferred = due == AckDue::Quick && self.deferred_acks.defers(c);
        if due != AckDue::Later && !is_deferred {
            c.flags.set(Flags::ACK_NOW);
        }
        // The application is nearly certain to answer, which would put the connection on the transmit list.
        self.tx_list.push(c, idx, &self.profiles);
        if is_deferred {
            self.defer_ack(idx);
        }
    }

    /// Processes the payload of a segment whose acknowledgement was processed.
    #[inline(never)]
    fn finish_on_slow_path(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>, outcome: AckOutcome) {
        if outcome != AckOutcome::Gone {
            self.on_payload(net, idx, seg, None);
        }
        self.after_segment(idx, seg);
    }

    /// Goes from FIN-WAIT-1 to TIME-WAIT. Round-trip time and congestion window are not updated, since the
    /// connection ends.
    fn enter_time_wait_at_once(&mut self, net: &mut Network, idx: u32, hash: u32) {
        let c = &mut self.conns[idx];
        c.snd_una = c.snd_nxt;
        c.rcv_nxt += 1;
        c.flags.set(Flags::PEER_FIN);
        // As in Linux's `tcp_fin`: duplicates are not reported any more.
        self.active[c.active].dsack = None;
        if self.send_ack(net, idx).is_err() {
            self.send_ack_at_once(net, idx);
        }
        self.enter_time_wait_hashed(idx, hash);
    }

    /// Processes an acknowledgement of new data while nothing is lost, reordered or retransmitted.
    fn process_in_order_ack(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
        timestamps: Option<Timestamps>,
    ) -> AckOutcome {
        let now = self.now;
        let c = &mut self.conns[idx];
        let b = &mut self.active[c.active];
        let profile = self.profiles.get(c.profile);
        let fack = b.rack.fack.unwrap_or(c.snd_una);
        let bytes = ack::snd_una_update(c, b, seg.header.ack);
        b.send.discard_front(&mut self.chunks, &mut self.sources, bytes.into());
        if c.has(Flags::ACK_EVENTS) {
            b.acked_bytes = b.acked_bytes.saturating_add(bytes);
        }
        reset_retransmit_state(c, b);
        if fack.le(c.snd_una)
            && let Some(first) = b.rtx_queue.remove_first_entry(c.snd_una)
        {
            on_single_delivery(c, b, profile, now, first.xmit_ts, first.segments);
            self.set_retransmit_timer(idx, true, None);
        } else {
            let sack = c.has(Flags::SACK);
            let mut delivery = Delivery::default();
            let outstanding = b.rtx_queue.packets_out;
            b.rtx_queue.clean_acked(c.snd_una, c.mss(), sack, fack, &mut delivery);
            if ack::ack_update_rtt(c, profile, now, &delivery, timestamps) {
                b.backoff = 0;
            }
            if outstanding > 0 {
                if sack {
                    let input = recovery::rack_input(c, b, now, self.config.reordering_segments, false);
                    b.rack.on_delivery(&delivery, Some(c.snd_una), &input);
                }
                let limited = ack::is_cwnd_limited(c, b);
                ack::cong_avoid(c, b, now, delivery.delivered, delivery.rtt_us(now), limited);
                self.set_retransmit_timer(idx, true, None);
            }
        }
        self.after_ack(idx, true);
        if self.fin_acknowledged(idx) { self.on_fin_acknowledged(net, idx) } else { AckOutcome::Accepted }
    }
}

/// Resets the state of retransmissions and probes: the peer answers, and data arrive.
#[inline(always)]
fn reset_retransmit_state(c: &mut Tcb, b: &mut ActiveConn) {
    c.flags.clear(Flags::SOFT_ERROR);
    b.retransmits = 0;
    b.retransmit_since = None;
    b.probes_out = 0;
    b.recovery.high_seq = c.snd_una;
}

/// Updates round-trip time and congestion window after an acknowledgement that covers exactly one
/// transmission of `segments` segments, which was sent at `xmit_ts`.
#[inline(always)]
fn on_single_delivery(
    c: &mut Tcb,
    b: &mut ActiveConn,
    profile: &Profile,
    now: Instant,
    xmit_ts: Instant,
    segments: u16,
) {
    let rtt_us = now.micros_since(xmit_ts);
    rtt::on_sample(c, profile, rtt_us as u32);
    b.backoff = 0;
    if c.has(Flags::SACK) {
        b.rack.on_in_order(xmit_ts, c.snd_una, rtt_us);
    }
    let limited = ack::is_cwnd_limited(c, b);
    ack::cong_avoid(c, b, now, segments.into(), Some(rtt_us as u32), limited);
}
