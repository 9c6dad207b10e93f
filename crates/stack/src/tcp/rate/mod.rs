//! State of connections that are paced, or whose congestion control needs samples of the delivery rate. Few
//! connections have it, so it is kept apart from the active state, which only refers to it.

mod delivery;
mod output;
mod pacer;

pub(crate) use delivery::{AckBefore, DeliveryRate, RateSample};
pub(crate) use pacer::{Pacer, window_rate};

use super::Tcp;
use super::active::{ActiveConn, SlowPathFlags};
use super::config::CongestionControl;
use super::congestion::{Bbr, Congestion};
use super::conn::{NONE, Tcb};
use super::profile::Profile;
use super::recovery;
use crate::options::BbrInfo;
use crate::time::Instant;
use serde::{Deserialize, Serialize};

/// A rate without a limit (`~0` of `SO_MAX_PACING_RATE`).
pub(crate) const UNLIMITED: u64 = u64::MAX;

/// The state.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RateState {
    pub delivery: DeliveryRate,
    pub pacer: Pacer,
    /// The model of the path, if the congestion control is BBR.
    pub bbr: Bbr,
}

impl RateState {
    /// Returns the state to its initial value and keeps the capacity of its queue. `random` seeds the choice
    /// of BBR's first phase. The first intervals begin at `now`, because segments may be in flight.
    fn reset(&mut self, random: u64, now: Instant) {
        self.delivery.reset(now);
        self.pacer = Pacer::default();
        self.bbr = Bbr::new(random);
    }

    /// Returns the rate at which the connection may send, in bytes per second.
    pub fn pacing_rate(&self, kind: CongestionControl, c: &Tcb, packets_out: u32, max: u64) -> u64 {
        let rate = match kind {
            CongestionControl::Bbr => self.bbr.pacing_rate(),
            _ => window_rate(c, packets_out),
        };
        rate.min(max)
    }
}

/// Rates of a connection, as a listing and `TCP_INFO` report them.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateInfo {
    /// Bytes per second.
    pub pacing: u64,
    /// Bytes per second; 0 before the first sample.
    pub delivery: u64,
    pub is_app_limited: bool,
    pub bbr: Option<BbrInfo>,
}

impl Tcp {
    /// Sets the slow-path flags for the profile of a connection, and allocates the rate state if the
    /// connection is paced. Must be called when the active state is allocated or the profile changes.
    #[cold]
    #[inline(never)]
    pub(super) fn apply_slow_path_options(&mut self, idx: u32) {
        let c = &self.conns[idx];
        if c.active == NONE {
            return;
        }
        let Profile { notsent_lowat, congestion, max_pacing_rate, .. } = *self.profiles.get(c.profile);
        let is_paced = congestion == CongestionControl::Bbr || max_pacing_rate != UNLIMITED;
        let b = &mut self.active[c.active];
        b.slow_path.assign(SlowPathFlags::NOTSENT_LOWAT, notsent_lowat != 0);
        if is_paced && b.rate.is_none() {
            let random = self.secrets.random();
            let mut rate = self.active.alloc_rate();
            rate.reset(random, self.now);
            let b = &mut self.active[c.active];
            let unsent = (c.snd_una + b.send.len() as u32) - c.snd_nxt;
            rate.delivery.has_more = unsent >= c.mss().cast_signed();
            // Only a changed window tells of data that were sent before the active state was last released.
            let has_sent = !b.rtx_queue.is_empty()
                || b.max_packets_out > 0
                || c.cwnd > self.config.initial_window_segments
                || c.ssthresh != u32::MAX;
            rate.pacer.begin(c.snd_nxt, b.total_retrans, has_sent);
            b.slow_path.set(SlowPathFlags::PACED);
            b.rate = Some(rate);
        }
    }

    /// Changes the congestion control of a connection. BBR begins with a new model.
    pub(super) fn set_congestion_control(&mut self, idx: u32, kind: CongestionControl) {
        let c = &mut self.conns[idx];
        if c.active == NONE {
            if kind == CongestionControl::Bbr {
                c.ssthresh = u32::MAX;
            }
            return;
        }
        let b = &mut self.active[c.active];
        let prior_kind = b.congestion.kind();
        if prior_kind == kind {
            return;
        }
        if kind == CongestionControl::Bbr {
            // Its startup has no threshold (`bbr_init`).
            c.ssthresh = u32::MAX;
        }
        b.congestion = Congestion::default();
        b.congestion.set_algorithm(kind);
        let Some(rate) = &mut b.rate else { return };
        let prior = core::mem::replace(&mut rate.bbr, Bbr::new(self.secrets.random()));
        if prior_kind == CongestionControl::Bbr {
            recovery::reduce_after_bbr(c, b, prior.prior_cwnd().max(c.cwnd));
        }
    }

    /// Returns the model of a connection. A model that has not begun, or that is missing because the
    /// connection has no rate state, is begun as for the first segments.
    fn bbr_of(&self, c: &Tcb, rate: Option<&RateState>, max_rate: u64) -> Bbr {
        let mut bbr = rate.map_or_else(|| Bbr::new(0), |rate| rate.bbr);
        if c.state.is_synchronized() {
            bbr.begin(self.now, c, 0, max_rate);
        }
        bbr
    }

    /// Returns the rates of a connection.
    pub(super) fn rate_info(&self, c: &Tcb, b: Option<&ActiveConn>) -> RateInfo {
        let Profile { congestion, max_pacing_rate, .. } = *self.profiles.get(c.profile);
        let packets_out = b.map_or(0, |b| b.rtx_queue.packets_out);
        let rate = b.and_then(|b| b.rate.as_deref());
        let is_bbr = congestion == CongestionControl::Bbr;
        let unpaced = || {
            if is_bbr {
                return self.bbr_of(c, None, max_pacing_rate).pacing_rate().min(max_pacing_rate);
            }
            window_rate(c, packets_out).min(max_pacing_rate)
        };
        RateInfo {
            pacing: rate.map_or_else(unpaced, |r| r.pacing_rate(congestion, c, packets_out, max_pacing_rate)),
            delivery: rate.map_or(0, |rate| rate.delivery.bytes_per_second(c.mss())),
            is_app_limited: rate.is_none_or(|rate| rate.delivery.is_rate_app_limited()),
            bbr: is_bbr.then(|| self.bbr_of(c, rate, max_pacing_rate).info(c.mss())),
        }
    }
}
