//! Congestion control: how the window grows while nothing is lost, and what it falls to when something is.
//! Windows are in segments.

mod cubic;
mod hystart;
mod newreno;

use super::config::CongestionControl;
use super::conn::Tcb;
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;

use cubic::Cubic;
use hystart::HyStart;

/// What an acknowledgement tells the algorithm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AckEvent {
    pub now: Instant,
    /// Segments newly delivered.
    pub delivered: u32,
    /// Round trip time of the youngest of them, in µs, if it may be measured.
    pub rtt_us: Option<u32>,
}

/// State of the algorithm in use.
#[derive(Clone, Debug, Default)]
pub(crate) struct Congestion {
    kind: CongestionControl,
    /// Segments acknowledged that have not yet grown the window by one.
    snd_cwnd_cnt: u32,
    cubic: Cubic,
    hystart: HyStart,
}

impl Congestion {
    /// Sets the algorithm of a state in which nothing happened yet.
    pub fn set_algorithm(&mut self, kind: CongestionControl) {
        self.kind = kind;
    }

    /// Grows the window. Called only while the window was what limited the sender, and not in recovery.
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
        match self.kind {
            CongestionControl::Cubic => self.cubic.on_ack(c, &mut self.snd_cwnd_cnt, ack.now, acked),
            CongestionControl::NewReno => newreno::additive_increase(c, &mut self.snd_cwnd_cnt, acked),
        }
    }

    /// RFC 5681 §3.1. Returns what is left over when the threshold is reached.
    fn slow_start(&mut self, c: &mut Tcb, acked: u32) -> u32 {
        let growth = self.hystart.growth(acked, &mut self.snd_cwnd_cnt);
        let room = c.ssthresh - c.cwnd;
        let used = growth.min(room);
        c.cwnd += used;
        if growth > used { acked.min(growth - used) } else { 0 }
    }

    /// The slow start threshold after a congestion signal.
    pub fn on_congestion(&mut self, c: &Tcb) -> u32 {
        self.hystart.end();
        self.snd_cwnd_cnt = 0;
        match self.kind {
            CongestionControl::Cubic => self.cubic.on_congestion(c),
            CongestionControl::NewReno => newreno::threshold(c),
        }
    }

    /// The window is counted in segments of another size now.
    pub fn on_resized(&mut self) {
        self.snd_cwnd_cnt = 0;
    }

    /// The congestion signal was a mistake.
    pub fn on_undo(&mut self) {
        self.cubic.on_undo();
    }

    /// The window collapsed after a time-out.
    pub fn on_timeout(&mut self) {
        self.snd_cwnd_cnt = 0;
        self.cubic.on_timeout();
        self.hystart.restart();
    }

    /// The sender was idle: time that passed is no reason to grow.
    pub fn on_idle(&mut self) {
        self.cubic.on_idle();
        self.hystart.restart();
    }

    /// A cumulative acknowledgement.
    #[inline(always)]
    pub fn on_una(&mut self, una: SeqNumber, c: &mut Tcb) {
        if c.cwnd < c.ssthresh && self.kind == CongestionControl::Cubic {
            self.hystart.on_una(una, c);
        }
    }
}
