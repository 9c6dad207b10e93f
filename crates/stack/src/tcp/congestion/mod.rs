//! Congestion control: how the window grows while nothing is lost, and to what it is reduced after a loss.
//! Windows are in segments.

mod bbr;
mod cubic;
mod hystart;
mod newreno;

use super::config::CongestionControl;
use super::conn::Tcb;
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;

pub(crate) use bbr::{Bbr, BbrInput, Totals, bbr_min_segments};
use cubic::Cubic;
use hystart::HyStart;
use serde::{Deserialize, Serialize};

/// Report of an acknowledgement to the algorithm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AckEvent {
    pub now: Instant,
    /// Segments newly delivered.
    pub delivered: u32,
    /// Round-trip time of the most recently sent of them, in µs, if it is a valid sample.
    pub rtt_us: Option<u32>,
}

/// State of the congestion control algorithm in use.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Congestion {
    kind: CongestionControl,
    /// Acknowledged segments that have not grown the window yet.
    snd_cwnd_cnt: u32,
    cubic: Cubic,
    hystart: HyStart,
}

impl Congestion {
    /// Returns the algorithm.
    #[inline]
    pub fn kind(&self) -> CongestionControl {
        self.kind
    }

    /// Sets the algorithm of a state that was not used yet.
    pub fn set_algorithm(&mut self, kind: CongestionControl) {
        self.kind = kind;
    }

    /// Grows the window. Called only while the window limits the sender, and not in recovery; not for BBR,
    /// which sets the window itself.
    pub fn on_ack(&mut self, c: &mut Tcb, ack: &AckEvent) {
        let mut acked = ack.delivered;
        if c.cwnd < c.ssthresh {
            if self.kind == CongestionControl::Cubic
                && let Some(rtt) = ack.rtt_us
            {
                self.hystart.on_sample(c, rtt);
            }
            acked = self.slow_start(c, acked);
            if acked == 0 {
                return;
            }
        }
        if self.kind == CongestionControl::Cubic {
            self.cubic.on_ack(c, &mut self.snd_cwnd_cnt, ack.now, acked);
        } else {
            newreno::additive_increase(c, &mut self.snd_cwnd_cnt, acked);
        }
    }

    /// Grows the window in slow start (RFC 5681 §3.1). Returns the acknowledged segments that are left when
    /// the threshold is reached.
    fn slow_start(&mut self, c: &mut Tcb, acked: u32) -> u32 {
        let growth = self.hystart.growth(acked, &mut self.snd_cwnd_cnt);
        let room = c.ssthresh - c.cwnd;
        let used = growth.min(room);
        c.cwnd += used;
        if growth > used { acked.min(growth - used) } else { 0 }
    }

    /// Returns the slow start threshold after a congestion signal.
    pub fn on_congestion(&mut self, c: &Tcb) -> u32 {
        self.hystart.end();
        self.snd_cwnd_cnt = 0;
        match self.kind {
            CongestionControl::Cubic => self.cubic.on_congestion(c),
            CongestionControl::NewReno => newreno::threshold(c),
            CongestionControl::Bbr => c.ssthresh,
        }
    }

    /// Resets the count of acknowledged segments, because the segment size has changed.
    pub fn on_resized(&mut self) {
        self.snd_cwnd_cnt = 0;
    }

    /// Undoes a spurious congestion signal.
    pub fn on_undo(&mut self) {
        self.cubic.on_undo();
    }

    /// Processes the collapse of the window after a time-out.
    pub fn on_timeout(&mut self) {
        self.snd_cwnd_cnt = 0;
        self.cubic.on_timeout();
        self.hystart.restart();
    }

    /// Restarts growth after an idle time, which must not count.
    pub fn on_idle(&mut self) {
        self.cubic.on_idle();
        self.hystart.restart();
    }

    /// Processes a cumulative acknowledgement.
    #[inline(always)]
    pub fn on_una(&mut self, una: SeqNumber, c: &mut Tcb) {
        if c.cwnd < c.ssthresh && self.kind == CongestionControl::Cubic {
            self.hystart.on_una(una, c);
        }
    }
}
