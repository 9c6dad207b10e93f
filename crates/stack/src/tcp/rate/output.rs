//! Sends what a paced connection has to send, and processes acknowledgements of such a connection. No other
//! connection comes here: [`SlowPathFlags::PACED`] is one of the conditions for the slow path.
//!
//! [`SlowPathFlags::PACED`]: crate::tcp::active::SlowPathFlags::PACED

use super::delivery::{AckBefore, DeliveryRate};
use super::pacer::packet_segments;
use crate::ip::{Network, TxError};
use crate::tcp::active::RetransmitTimer;
use crate::tcp::config::CongestionControl;
use crate::tcp::congestion::{BbrInput, bbr_min_segments};
use crate::tcp::conn::Tcb;
use crate::tcp::rtx_queue::{Delivery, RtxQueue};
use crate::tcp::{Tcp, rtt};
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;

/// Longest time for which the timer of a departure is set: if the departure is later, the timer is set again.
const DEPARTURE_TIMER_MAX: Duration = Duration::from_secs(3600);

/// State before a paced connection sends.
struct OutputBefore {
    snd_nxt: SeqNumber,
    total_retrans: u32,
    timer_at: Instant,
    /// The departure for which the connection waited.
    awaited: Option<Instant>,
    has_new_record: bool,
}

/// Records that the application is the limit if less than a full-sized segment remained after the last
/// output, and the congestion window has room (`tcp_rate_check_app_limited`).
fn check_app_limited(c: &Tcb, queue: &RtxQueue, delivery: &mut DeliveryRate) {
    let in_flight = queue.in_flight();
    if !delivery.has_more && in_flight < c.cwnd && queue.lost_out <= queue.retrans_out {
        delivery.set_app_limited(in_flight);
    }
}

impl Tcp {
    /// Sends what a paced connection has to send now; arms a timer for the rest.
    #[cold]
    #[inline(never)]
    pub(in crate::tcp) fn output_paced(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        let Some(before) = self.begin_paced_output(idx) else { return Ok(()) };
        let result = self.send_paced(net, idx);
        self.end_paced_output(idx, &before);
        result
    }

    fn send_paced(&mut self, net: &mut Network, idx: u32) -> Result<(), TxError> {
        if self.send_frto_new_data::<true>(net, idx)? || self.xmit_retransmit_queue::<true>(net, idx)? {
            self.send_new::<true>(net, idx)?;
        }
        Ok(())
    }

    fn begin_paced_output(&mut self, idx: u32) -> Option<OutputBefore> {
        let now = self.now;
        let max_rate = self.profile(idx).max_pacing_rate;
        let (c, b) = self.tcb_and_active(idx)?;
        let rate = b.rate.as_deref_mut()?;
        let awaited = core::mem::take(&mut rate.pacer.is_waiting).then(|| rate.pacer.next_departure());
        if awaited.is_some() {
            b.cork_deadline = None;
        }
        let packets_out = b.rtx_queue.packets_out;
        // What is queued now was not there when acknowledgements made room for it.
        check_app_limited(c, &b.rtx_queue, &mut rate.delivery);
        if b.congestion.kind() == CongestionControl::Bbr {
            rate.bbr.begin(now, c, rate.delivery.delivered, max_rate);
            if b.rtx_queue.in_flight() == 0 && !b.send.is_empty() && rate.delivery.app_limited != 0 {
                rate.bbr.on_restart_from_idle(now, c, max_rate);
            }
        }
        let has_new_record = rate.delivery.on_send(now, packets_out);
        Some(OutputBefore {
            snd_nxt: c.snd_nxt,
            total_retrans: b.total_retrans,
            timer_at: b.timer_at,
            awaited,
            has_new_record,
        })
    }

    fn end_paced_output(&mut self, idx: u32, before: &OutputBefore) {
        let now = self.now;
        self.charge_pacing(idx);
        self.delay_retransmit_timer(idx, before.timer_at);
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let Some(rate) = b.rate.as_deref_mut() else { return };
        if c.snd_nxt != before.snd_nxt || b.total_retrans != before.total_retrans {
            // Acknowledgements of these segments give samples, which header prediction does not take.
            b.rtx_queue.require_slow_path_until(c.snd_nxt);
        } else if before.has_new_record {
            rate.delivery.drop_unused_record();
        }
        let departure = rate.pacer.next_departure();
        let is_new_wait = rate.pacer.is_waiting && before.awaited != Some(departure);
        if rate.pacer.is_waiting {
            b.cork_deadline = Some(departure.min(now + DEPARTURE_TIMER_MAX));
        }
        let unsent = (c.snd_una + b.send.len() as u32) - c.snd_nxt;
        rate.delivery.has_more = unsent >= c.mss().cast_signed();
        check_app_limited(c, &b.rtx_queue, &mut rate.delivery);
        self.stats.pacing_waits += u64::from(is_new_wait);
    }

    /// Returns how many segments a paced connection may send now. If it is none, the connection waits for its
    /// next departure.
    pub(in crate::tcp) fn pacing_allowance(&mut self, idx: u32) -> u32 {
        self.charge_pacing(idx);
        let now = self.now;
        let max_rate = self.profile(idx).max_pacing_rate;
        let min_segs = self.config.push_segments_min.into();
        let Some((c, b)) = self.tcb_and_active(idx) else { return u32::MAX };
        let Some(rate) = b.rate.as_deref_mut() else { return u32::MAX };
        let kind = b.congestion.kind();
        let pacing_rate = rate.pacing_rate(kind, c, b.rtx_queue.packets_out, max_rate);
        let min_segs = if kind == CongestionControl::Bbr { bbr_min_segments(pacing_rate) } else { min_segs };
        let segments = packet_segments(pacing_rate, c.mss(), c.min_rtt, min_segs);
        let allowance = rate.pacer.allowance(now, segments, c.mss(), pacing_rate);
        if allowance == 0 {
            rate.pacer.is_waiting = true;
            b.chrono.start_busy(now);
        }
        allowance
    }

    /// Returns whether a connection is paced and may not send new data yet.
    pub(in crate::tcp) fn waits_for_departure(&mut self, idx: u32) -> bool {
        let active = self.conns[idx].active;
        self.active[active].rate.is_some() && self.pacing_allowance(idx) == 0
    }

    /// Delays the next departure by what was sent.
    fn charge_pacing(&mut self, idx: u32) {
        let now = self.now;
        let max_rate = self.profile(idx).max_pacing_rate;
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let Some(rate) = b.rate.as_deref_mut() else { return };
        let pacing_rate = rate.pacing_rate(b.congestion.kind(), c, b.rtx_queue.packets_out, max_rate);
        rate.pacer.charge(now, c.snd_nxt, b.total_retrans, c.mss(), pacing_rate);
    }

    /// Delays a time-out or tail loss probe by the time until the next departure, because nothing can be sent
    /// before (`tcp_pacing_delay`). Leaves a timer that was due at `prior_at` already. Without the delay a
    /// probe is due no later than a time-out after the head of the queue was sent, however many packets
    /// follow it (`tcp_rto_delta_us`). The delay ends with the largest time-out.
    fn delay_retransmit_timer(&mut self, idx: u32, prior_at: Instant) {
        let now = self.now;
        let profile = *self.profile(idx);
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let (Some(rate), Some(head)) = (b.rate.as_deref(), b.rtx_queue.front()) else { return };
        if b.timer_at == prior_at || b.retransmits > 0 {
            return;
        }
        let at = match b.timer_kind {
            RetransmitTimer::Rto => b.timer_at,
            RetransmitTimer::LossProbe => {
                b.timer_at.min(head.xmit_ts + rtt::rto(c, &profile, b.backoff)).max(now)
            }
            _ => return,
        };
        let delayed = at + rate.pacer.next_departure().saturating_since(now);
        b.timer_at = delayed.min(now + rtt::rto_max(&profile));
    }

    /// Takes a sample of the delivery rate after an acknowledgement, and lets BBR control rate and window
    /// (`tcp_cong_control`).
    #[cold]
    #[inline(never)]
    pub(in crate::tcp) fn cong_control(&mut self, idx: u32, before: &AckBefore, delivery: &Delivery) {
        self.delay_retransmit_timer(idx, before.timer_at);
        let now = self.now;
        let max_rate = self.profile(idx).max_pacing_rate;
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let Some(rate) = b.rate.as_deref_mut() else { return };
        let lost = b.rtx_queue.lost;
        let sample = rate.delivery.sample(now, before, delivery, c, lost);
        if b.congestion.kind() == CongestionControl::Bbr {
            rate.bbr.begin(now, c, rate.delivery.delivered, max_rate);
            let input = BbrInput {
                now,
                max_rate,
                in_flight: b.rtx_queue.in_flight(),
                next_departure: rate.pacer.next_departure(),
                ca_state: b.recovery.ca_state,
                lost,
            };
            rate.bbr.on_ack(c, &mut rate.delivery, &sample, &input);
        }
        rate.delivery.prune(&b.rtx_queue);
    }
}
