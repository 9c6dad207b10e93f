//! Header prediction: most segments are the one that is expected next, on a connection where nothing is amiss. They need none of the
//! checks for what might be wrong, and their acknowledgement nothing of loss recovery.
//!
//! What is done here is what `input` and `ack` would do with such a segment, and nothing else: tests compare the two (docs/adr/0007).

use super::ack::AckOutcome;
use super::conn::{Flags, NONE, Tcb};
use super::input::Arrived;
use super::recovery;
use super::sent_queue::Delivery;
use super::state::State;
use super::{Tcp, ack, rtt};
use crate::events::InlineData;
use crate::ip::Network;
use crate::options::CaState;
use crate::wire::tcp::{TcpFlags, TcpOptions, Timestamps};

/// Flags that a predicted segment may have besides ACK, which it must have.
const HARMLESS: TcpFlags = TcpFlags::PSH.with(TcpFlags::FIN);

/// The timestamps of a segment that is expected next; `None` if it is not.
#[inline(always)]
pub(super) fn predict(c: &Tcb, seg: &Arrived<'_>) -> Option<Option<Timestamps>> {
    let header = &seg.header;
    // In SYN-RECEIVED only what completes the handshake.
    let acknowledges = if c.state == State::SynReceived {
        header.ack == c.snd_nxt && !c.has(Flags::ACTIVE)
    } else {
        c.state.is_synchronized() && header.ack.ge(c.snd_una) && header.ack.le(c.snd_nxt)
    };
    let usual = acknowledges
        && header.flags.without(HARMLESS) == TcpFlags::ACK
        && header.seq == c.rcv_nxt
        && !c.has(Flags::ECN | Flags::URGENT | Flags::TS_OLD);
    if !usual {
        return None;
    }
    if !c.has(Flags::TIMESTAMPS) {
        return seg.options.is_empty().then_some(None);
    }
    let ts = TcpOptions::parse_timestamps_only(seg.options)?;
    (ts.value.wrapping_sub(c.ts_recent).cast_signed() >= 0).then_some(Some(ts))
}

impl Tcp {
    /// Takes a segment that [`predict`] let pass.
    pub(super) fn input_predicted(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Arrived<'_>,
        timestamps: Option<Timestamps>,
    ) {
        if self.conns[idx].state == State::SynReceived && !self.complete_handshake(net, idx, seg) {
            return;
        }
        let now_ms = self.now_ms();
        let c = &mut self.conns[idx];
        if let Some(ts) = timestamps
            && c.rcv_acked == c.rcv_nxt
        {
            // RFC 7323 §4.3.
            c.ts_recent = ts.value;
        }
        c.last_rx = now_ms;
        c.retries = 0;
        let advanced = seg.header.ack != c.snd_una;
        if advanced {
            let hop = c.hop;
            net.confirm(self.now, &hop);
        }
        if self.ends_with(idx, seg) {
            return self.end_at_once(net, idx, seg.hash);
        }
        match self.on_predicted_ack(net, idx, seg, timestamps, advanced) {
            AckOutcome::Gone => {}
            _ if self.lend_predicted(idx, seg) => {}
            _ => self.on_payload(net, idx, seg),
        }
    }

    /// Lends the payload to the application where it lies, if that is all there is to do: it is next, fits and brings no FIN.
    #[inline]
    fn lend_predicted(&mut self, idx: u32, seg: &Arrived<'_>) -> bool {
        let c = &self.conns[idx];
        let simple = !seg.payload.is_empty()
            && !seg.header.flags.contains(TcpFlags::FIN)
            && c.state.may_receive()
            && !c.has(Flags::ORPHAN)
            && seg.payload.len() <= c.rcv_wnd() as usize
            && (c.busy == NONE || self.busy[c.busy].fin_at.is_none());
        let Some((frame, start)) = seg.frame.filter(|_| simple && self.may_lend(idx, seg)) else {
            return false;
        };
        self.lend(idx, InlineData { frame, start, len: seg.payload.len() as u32 });
        self.on_new_bytes(idx, seg, seg.payload.len(), false);
        true
    }

    /// Whether a segment is the last that a connection waits for which the application has closed: it acknowledges all, our FIN
    /// included, and carries the peer's.
    #[inline]
    fn ends_with(&self, idx: u32, seg: &Arrived<'_>) -> bool {
        let c = &self.conns[idx];
        c.state == State::FinWait1
            && c.has(Flags::ORPHAN)
            && seg.header.flags.contains(TcpFlags::FIN)
            && seg.payload.is_empty()
            && seg.header.ack == c.snd_nxt
            && c.busy != NONE
            && self.busy[c.busy].fin_sent
    }

    /// From FIN-WAIT-1 to TIME-WAIT. What the acknowledgement says of the path is of no use to anybody any more.
    fn end_at_once(&mut self, net: &mut Network, idx: u32, hash: u32) {
        let c = &mut self.conns[idx];
        c.snd_una = c.snd_nxt;
        c.rcv_nxt += 1;
        c.flags.set(Flags::PEER_FIN);
        if self.send_ack(net, idx).is_err() {
            self.reply_ack(net, idx);
        }
        self.enter_time_wait_with(idx, hash);
    }

    #[inline]
    fn on_predicted_ack(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Arrived<'_>,
        timestamps: Option<Timestamps>,
        advanced: bool,
    ) -> AckOutcome {
        let c = &mut self.conns[idx];
        let busy = c.busy;
        if busy != NONE {
            let b = &mut self.busy[busy];
            let quiet = advanced
                && b.recovery.state == CaState::Open
                && b.sent.is_untroubled(c.snd_una)
                && b.probe_end.is_none();
            if !quiet {
                return self.on_ack(net, idx, seg, timestamps);
            }
        }
        ack::update_window(c, seg);
        if busy == NONE {
            return AckOutcome::Accepted;
        }
        self.acknowledge_in_order(idx, seg, timestamps);
        if self.fin_acknowledged(idx) { self.on_fin_acknowledged(net, idx) } else { AckOutcome::Accepted }
    }

    /// An acknowledgement of something new while nothing is lost, reordered or sent again.
    fn acknowledge_in_order(&mut self, idx: u32, seg: &Arrived<'_>, timestamps: Option<Timestamps>) {
        let now = self.now;
        let c = &mut self.conns[idx];
        let b = &mut self.busy[c.busy];
        let highest = b.rack.highest.unwrap_or(c.snd_una);
        let bytes = ack::advance(c, b, seg.header.ack);
        b.send.discard_front(&mut self.chunks, &mut self.sources, bytes.into());
        if c.has(Flags::ACK_EVENTS) {
            b.acked_bytes = b.acked_bytes.saturating_add(bytes);
        }
        c.flags.clear(Flags::SOFT_ERROR);
        b.retransmits = 0;
        b.trouble_since = None;
        b.probes = 0;
        b.recovery.high_seq = c.snd_una;
        let sack = c.has(Flags::SACK);
        if highest.le(c.snd_una)
            && let Some(first) = b.sent.acknowledge_first(c.snd_una)
        {
            // Request and response: one transmission, and it is through.
            let rtt_us = now.micros_since(first.at);
            rtt::on_sample(c, self.profiles.get(c.profile), rtt_us as u32);
            b.backoff = 0;
            if sack {
                b.rack.on_in_order(first.at, first.end, rtt_us);
            }
            let limited = ack::is_cwnd_limited(c, b);
            ack::grow(c, b, now, (first.segments.into(), Some(rtt_us as u32)), limited);
            self.set_retransmit_timer(idx, true, None);
        } else {
            let mut delivery = Delivery::default();
            let outstanding = b.sent.packets_out;
            b.sent.acknowledge(c.snd_una, c.mss(), sack, highest, &mut delivery);
            if ack::take_rtt(c, self.profiles.get(c.profile), now, &delivery, timestamps) {
                b.backoff = 0;
            }
            if outstanding > 0 {
                if sack {
                    let input = recovery::rack_input(c, b, now, self.config.reordering_segments, false);
                    b.rack.on_delivery(&delivery, Some(c.snd_una), &input);
                }
                let limited = ack::is_cwnd_limited(c, b);
                ack::grow(c, b, now, (delivery.delivered, delivery.rtt_us(now)), limited);
                self.set_retransmit_timer(idx, true, None);
            }
        }
        self.after_ack(idx, true);
    }
}
