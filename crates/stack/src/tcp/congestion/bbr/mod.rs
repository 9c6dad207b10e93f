//! BBR, version 1 (draft-cardwell-iccrg-bbr-congestion-control-00; parameters and behaviour as Linux's
//! `bbr`): a model of the path instead of reactions to loss. The model is the largest delivery rate of ten
//! round trips, `bw`, and the smallest round-trip time of ten seconds, `min_rtt`. Their product is what has
//! to be in flight to use the path without a queue.
//!
//! ```text
//!   Startup ──bw has stopped growing──► Drain ──in flight ≤ bw × min_rtt──► ProbeBw
//!   (gain 2.89)                         (gain 0.35)                          (gains 1.25 0.75 1 1 1 1 1 1)
//!      ▲                                                                       │ ▲
//!      └─────────────── 200 ms with four segments: ProbeRtt ◄──min_rtt is 10 s old
//! ```
//!
//! The pacing rate is `bw` times a gain, and the window is a multiple of `bw × min_rtt`, so that pacing and
//! not the window decides about the rate. Gains are in 1/256.

mod max_filter;
mod policer;

use crate::options::{BbrInfo, CaState};
use crate::tcp::conn::Tcb;
use crate::tcp::rate::{DeliveryRate, RateSample};
use crate::time::Instant;
use core::time::Duration;
use max_filter::MaxFilter;
use policer::Policer;
pub(crate) use policer::Totals;
use serde::{Deserialize, Serialize};

/// Bandwidths are in segments per µs, shifted by this number of bits.
const BW_SCALE: u32 = 24;
/// A gain of 1.
const UNIT: u32 = 256;
/// 2 / ln 2: the smallest gain with which the rate doubles in each round trip.
const HIGH_GAIN: u32 = UNIT * 2885 / 1000 + 1;
/// Drains in one round trip the queue that [`HIGH_GAIN`] has made.
const DRAIN_GAIN: u32 = UNIT * 1000 / 2885;
/// Gain of the window in [`Mode::ProbeBw`]: acknowledgements may be delayed or compressed.
const CWND_GAIN: u32 = UNIT * 2;
/// Gains of the phases of [`Mode::ProbeBw`]: probe for more bandwidth, drain the queue, cruise.
const CYCLE: [u32; 8] = [UNIT * 5 / 4, UNIT * 3 / 4, UNIT, UNIT, UNIT, UNIT, UNIT, UNIT];
/// Window in segments while the round-trip time is probed, and the smallest one otherwise.
const CWND_MIN: u32 = 4;
/// Window in segments before there is a sample (`TCP_INIT_CWND`).
const CWND_FIRST: u32 = 10;
/// The pipe is full if `bw` has not grown by a quarter in three rounds.
const FULL_BW_ROUNDS: u8 = 3;
/// Time after which the smallest round-trip time is measured again.
const MIN_RTT_WINDOW: Duration = Duration::from_secs(10);
/// Time for which it is measured.
const PROBE_RTT_TIME: Duration = Duration::from_millis(200);
/// The pacing rate is one percent below the bandwidth, so that no queue grows.
const MARGIN_PERCENT: u32 = 99;
/// Below 1.2 Mbit/s a packet is one segment.
const ONE_SEGMENT_RATE: u64 = 1_200_000 / 8;
/// Bytes of the largest packet that is counted on.
const PACKET_BYTES_MAX: u64 = 65_536 - 1 - 320;
/// Rounds of each of the two windows of the largest aggregate of acknowledgements, and the longest time at
/// `bw` that it may add to the window.
const EXTRA_ACKED_ROUNDS: u8 = 5;
const EXTRA_ACKED_MAX_US: u64 = 100_000;
/// Segments after which the measurement of an aggregate begins again.
const ACK_EPOCH_SEGMENTS: u32 = 1 << 20;

/// Returns the smallest number of segments of a packet at a pacing rate in bytes per second.
pub(crate) fn bbr_min_segments(pacing_rate: u64) -> u32 {
    if pacing_rate < ONE_SEGMENT_RATE { 1 } else { 2 }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Mode {
    /// Finds the bandwidth by doubling the rate in each round trip.
    #[default]
    Startup,
    /// Drains the queue of the startup.
    Drain,
    /// Probes for more bandwidth in one of eight phases.
    ProbeBw,
    /// Sends as little as possible, to measure the round-trip time without a queue.
    ProbeRtt,
}

/// Facts about the connection at an acknowledgement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BbrInput {
    pub now: Instant,
    /// Largest pacing rate in bytes per second.
    pub max_rate: u64,
    /// Segments in flight.
    pub in_flight: u32,
    /// When the next packet may leave.
    pub next_departure: Instant,
    pub ca_state: CaState,
    /// Segments ever marked lost.
    pub lost: u32,
}

/// How much more than expected is acknowledged at once, in segments.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct AckAggregation {
    epoch_mstamp: Instant,
    epoch_acked: u32,
    /// Maxima of the current and the previous window of rounds.
    extra_acked: [u32; 2],
    current: usize,
    rounds: u8,
}

/// State of BBR.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Bbr {
    is_begun: bool,
    mode: Mode,
    bw: MaxFilter,
    /// In µs; `None` before the first sample.
    min_rtt_us: Option<u32>,
    min_rtt_stamp: Instant,
    /// When probing of the round-trip time may end; `None` while the flight is still too large.
    probe_rtt_done_stamp: Option<Instant>,
    probe_rtt_round_done: bool,
    /// Number of round trips.
    rtt_cnt: u32,
    /// Number of delivered segments at which the next round trip begins.
    next_rtt_delivered: u32,
    round_start: bool,
    prev_ca_state: CaState,
    /// In the first round of a recovery only as much is sent as is delivered.
    packet_conservation: bool,
    /// True if the connection was idle and its segments are the first ones since.
    idle_restart: bool,
    pacing_gain: u32,
    cwnd_gain: u32,
    full_bw: u64,
    full_bw_cnt: u8,
    full_bw_reached: bool,
    cycle_idx: u8,
    cycle_mstamp: Instant,
    has_seen_rtt: bool,
    /// The window before a recovery or a probe of the round-trip time.
    prior_cwnd: u32,
    aggregation: AckAggregation,
    policer: Policer,
    /// Bytes per second.
    pacing_rate: u64,
    random: u64,
}

impl Bbr {
    /// Returns the state of a new connection. `random` seeds the choice of the first phase.
    pub fn new(random: u64) -> Self {
        Self { random, pacing_rate: u64::MAX, ..Self::default() }
    }

    /// Returns whether the indices of a state that was read from an image are within their arrays.
    pub fn is_valid(&self) -> bool {
        self.aggregation.current < 2 && usize::from(self.cycle_idx) < CYCLE.len()
    }

    /// Returns the pacing rate in bytes per second.
    pub fn pacing_rate(&self) -> u64 {
        self.pacing_rate
    }

    /// Returns the model for `TCP_CC_INFO`.
    pub fn info(&self, mss: u32) -> BbrInfo {
        let bw = (u128::from(self.bw()) * u128::from(mss) * 1_000_000) >> BW_SCALE;
        BbrInfo {
            bandwidth: u64::try_from(bw).unwrap_or(u64::MAX),
            min_rtt_us: self.min_rtt_us.unwrap_or(if self.is_begun { u32::MAX } else { 0 }),
            pacing_gain: self.pacing_gain,
            cwnd_gain: self.cwnd_gain,
        }
    }

    /// Begins the model when the connection sends its first segments, after the handshake.
    pub fn begin(&mut self, now: Instant, c: &Tcb, delivered: u32, max_rate: u64) {
        if self.is_begun {
            return;
        }
        self.is_begun = true;
        self.min_rtt_us = (c.srtt != 0).then_some(c.min_rtt);
        self.min_rtt_stamp = now;
        self.next_rtt_delivered = delivered;
        self.cycle_mstamp = now;
        self.aggregation.epoch_mstamp = now;
        self.reset_mode_to_startup();
        self.init_pacing_rate(c, max_rate);
    }

    fn reset_mode_to_startup(&mut self) {
        self.mode = Mode::Startup;
        self.update_gains();
    }

    /// Returns the bandwidth in use.
    fn bw(&self) -> u64 {
        self.policer.bw().unwrap_or(self.bw.max())
    }

    fn rate_of(bw: u64, gain: u32, mss: u32, max_rate: u64) -> u64 {
        let bytes = u128::from(bw) * u128::from(mss) * u128::from(gain) / u128::from(UNIT);
        let rate = (bytes * u128::from(MARGIN_PERCENT) * 10_000) >> BW_SCALE;
        u64::try_from(rate).unwrap_or(u64::MAX).min(max_rate)
    }

    /// Sets the pacing rate by which the window is sent in a round-trip time, times the gain of the startup;
    /// one millisecond is assumed if there is no sample.
    fn init_pacing_rate(&mut self, c: &Tcb, max_rate: u64) {
        self.has_seen_rtt = c.srtt != 0;
        let rtt_us = if self.has_seen_rtt { (c.srtt >> 3).max(1) } else { 1000 };
        let bw = (u64::from(c.cwnd) << BW_SCALE) / u64::from(rtt_us);
        self.pacing_rate = Self::rate_of(bw, HIGH_GAIN, c.mss(), max_rate);
    }

    fn set_pacing_rate(&mut self, c: &Tcb, gain: u32, max_rate: u64) {
        let rate = Self::rate_of(self.bw(), gain, c.mss(), max_rate);
        if !self.has_seen_rtt && c.srtt != 0 {
            self.init_pacing_rate(c, max_rate);
        }
        if self.full_bw_reached || rate > self.pacing_rate {
            self.pacing_rate = rate;
        }
        self.pacing_rate = self.pacing_rate.min(max_rate);
    }

    /// Processes that data are sent after the connection was idle because of its application
    /// (`CA_EVENT_TX_START`): they leave at the bandwidth, and the old round-trip time need not be probed.
    pub fn on_restart_from_idle(&mut self, now: Instant, c: &mut Tcb, max_rate: u64) {
        self.idle_restart = true;
        self.aggregation.epoch_mstamp = now;
        self.aggregation.epoch_acked = 0;
        match self.mode {
            Mode::ProbeBw => self.set_pacing_rate(c, UNIT, max_rate),
            Mode::ProbeRtt => self.check_probe_rtt_done(now, c),
            _ => {}
        }
    }

    /// Returns the window before the last recovery or probe of the round-trip time, in segments.
    pub fn prior_cwnd(&self) -> u32 {
        self.prior_cwnd
    }

    /// Records the window before it is reduced.
    pub fn save_cwnd(&mut self, cwnd: u32) {
        let is_reduced = matches!(self.prev_ca_state, CaState::Recovery | CaState::Loss);
        self.prior_cwnd =
            if is_reduced || self.mode == Mode::ProbeRtt { cwnd.max(self.prior_cwnd) } else { cwnd };
    }

    /// Processes a retransmission time-out.
    pub fn on_timeout(&mut self, totals: &Totals) {
        self.prev_ca_state = CaState::Loss;
        self.full_bw = 0;
        self.round_start = true;
        let sample = RateSample { losses: 1, ..RateSample::default() };
        self.sample_policer(&sample, totals);
    }

    /// Processes that a loss proved spurious: the startup continues if it ended because of it.
    pub fn on_undo(&mut self, totals: &Totals) {
        self.full_bw = 0;
        self.full_bw_cnt = 0;
        self.policer.reset(totals);
    }

    /// Processes an acknowledgement: updates the model, then rate and window.
    pub fn on_ack(&mut self, c: &mut Tcb, rate: &mut DeliveryRate, sample: &RateSample, input: &BbrInput) {
        self.update_bw(c, rate, sample, input);
        self.update_ack_aggregation(c, rate, sample);
        self.update_cycle_phase(c, rate, sample, input);
        self.check_full_bw_reached(sample);
        self.check_drain(c, rate, input);
        self.update_min_rtt(c, rate, sample, input);
        self.update_gains();
        self.set_pacing_rate(c, self.pacing_gain, input.max_rate);
        self.set_cwnd(c, rate, sample, input);
    }

    fn update_bw(&mut self, c: &Tcb, rate: &DeliveryRate, sample: &RateSample, input: &BbrInput) {
        self.round_start = false;
        let (Some(delivered), Some(interval_us)) = (sample.delivered, sample.interval_us) else { return };
        if (sample.prior_delivered.wrapping_sub(self.next_rtt_delivered) as i32) >= 0 {
            self.next_rtt_delivered = rate.delivered;
            self.rtt_cnt = self.rtt_cnt.wrapping_add(1);
            self.round_start = true;
            self.packet_conservation = false;
        }
        let (delivered_mstamp, lost, mss) = (rate.delivered_mstamp, input.lost, c.mss());
        self.sample_policer(sample, &Totals { delivered_mstamp, delivered: rate.delivered, lost, mss });
        let bw = (u64::from(delivered) << BW_SCALE) / interval_us;
        // What an application sends that has nothing more to send is no measure of the path, unless it is
        // more than was known.
        if !sample.is_app_limited || bw >= self.bw.max() {
            self.bw.add(self.rtt_cnt, bw);
        }
    }

    fn sample_policer(&mut self, sample: &RateSample, totals: &Totals) {
        let is_probing = self.mode == Mode::ProbeBw;
        if self.policer.on_sample(sample, self.round_start, is_probing, totals) {
            self.reset_mode_to_probe_bw(totals.delivered_mstamp);
        }
    }

    /// Returns the segments in flight that `bw`, `gain` and the smallest round-trip time amount to.
    fn bdp(&self, bw: u64, gain: u32) -> u32 {
        let Some(min_rtt_us) = self.min_rtt_us else { return CWND_FIRST };
        let segments = u128::from(bw) * u128::from(min_rtt_us) * u128::from(gain) / u128::from(UNIT);
        u32::try_from(segments.div_ceil(1 << BW_SCALE)).unwrap_or(u32::MAX / 2)
    }

    /// Returns a window with room for packets that are being built, segmented and acknowledged.
    fn quantization_budget(&self, cwnd: u32, mss: u32) -> u32 {
        let cwnd = cwnd.saturating_add(3 * self.packet_goal(mss));
        // Acknowledgements that are delayed cover two segments.
        let cwnd = cwnd.saturating_add(1) & !1;
        let is_probing_up = self.mode == Mode::ProbeBw && self.cycle_idx == 0;
        cwnd.saturating_add(if is_probing_up { 2 } else { 0 })
    }

    /// Returns the segments of a packet.
    fn packet_goal(&self, mss: u32) -> u32 {
        let bytes = (self.pacing_rate >> 10).min(PACKET_BYTES_MAX);
        (bytes as u32 / mss).max(bbr_min_segments(self.pacing_rate)).min(0x7f)
    }

    fn inflight(&self, bw: u64, gain: u32, mss: u32) -> u32 {
        self.quantization_budget(self.bdp(bw, gain), mss)
    }

    /// Returns the segments that will be in the network when the next packet departs.
    fn packets_in_net_at_departure(&self, in_flight: u32, c: &Tcb, input: &BbrInput) -> u32 {
        let wait_us = input.next_departure.micros_since(input.now);
        let delivered = (u128::from(self.bw()) * u128::from(wait_us)) >> BW_SCALE;
        let goal = if self.pacing_gain > UNIT { self.packet_goal(c.mss()) } else { 0 };
        in_flight.saturating_add(goal).saturating_sub(u32::try_from(delivered).unwrap_or(u32::MAX))
    }

    fn update_ack_aggregation(&mut self, c: &Tcb, rate: &DeliveryRate, sample: &RateSample) {
        if sample.acked_sacked == 0 || sample.delivered.is_none() || sample.interval_us.is_none() {
            return;
        }
        let (bw, round_start) = (self.bw(), self.round_start);
        let a = &mut self.aggregation;
        if round_start {
            a.rounds += 1;
            if a.rounds >= EXTRA_ACKED_ROUNDS {
                a.rounds = 0;
                a.current ^= 1;
                a.extra_acked[a.current] = 0;
            }
        }
        let epoch_us = rate.delivered_mstamp.micros_since(a.epoch_mstamp);
        let mut expected = ((u128::from(bw) * u128::from(epoch_us)) >> BW_SCALE) as u64;
        let acked = a.epoch_acked.saturating_add(sample.acked_sacked);
        if u64::from(a.epoch_acked) <= expected || acked >= ACK_EPOCH_SEGMENTS {
            a.epoch_acked = 0;
            a.epoch_mstamp = rate.delivered_mstamp;
            expected = 0;
        }
        a.epoch_acked = a.epoch_acked.saturating_add(sample.acked_sacked);
        let extra = u64::from(a.epoch_acked).saturating_sub(expected).min(c.cwnd.into()) as u32;
        let max = &mut a.extra_acked[a.current];
        *max = extra.max(*max);
    }

    /// Returns the segments by which aggregation of acknowledgements enlarges the window.
    fn ack_aggregation_cwnd(&self, bw: u64) -> u32 {
        if !self.full_bw_reached {
            return 0;
        }
        let max = (u128::from(bw) * u128::from(EXTRA_ACKED_MAX_US)) >> BW_SCALE;
        let [a, b] = self.aggregation.extra_acked;
        a.max(b).min(u32::try_from(max).unwrap_or(u32::MAX))
    }

    fn update_cycle_phase(&mut self, c: &Tcb, rate: &DeliveryRate, sample: &RateSample, input: &BbrInput) {
        if self.mode == Mode::ProbeBw && self.is_next_cycle_phase(c, rate, sample, input) {
            self.advance_cycle_phase(rate.delivered_mstamp);
        }
    }

    /// Returns whether a phase ends: after the smallest round-trip time, the phase that probes not before its
    /// data are in flight or lost, and the phase that drains as soon as the queue is empty.
    fn is_next_cycle_phase(
        &self,
        c: &Tcb,
        rate: &DeliveryRate,
        sample: &RateSample,
        input: &BbrInput,
    ) -> bool {
        let min_rtt_us = self.min_rtt_us.unwrap_or(u32::MAX);
        let is_full_length = rate.delivered_mstamp.micros_since(self.cycle_mstamp) > min_rtt_us.into();
        if self.pacing_gain == UNIT {
            return is_full_length;
        }
        let in_flight = self.packets_in_net_at_departure(sample.prior_in_flight, c, input);
        let bw = self.bw.max();
        if self.pacing_gain > UNIT {
            let is_filled = in_flight >= self.inflight(bw, self.pacing_gain, c.mss());
            return is_full_length && (sample.losses > 0 || is_filled);
        }
        is_full_length || in_flight <= self.inflight(bw, UNIT, c.mss())
    }

    fn advance_cycle_phase(&mut self, now: Instant) {
        self.cycle_idx = (self.cycle_idx + 1) % CYCLE.len() as u8;
        self.cycle_mstamp = now;
    }

    /// Begins with a random phase, except the one that drains, so that flows do not probe at one time.
    fn reset_mode_to_probe_bw(&mut self, now: Instant) {
        self.mode = Mode::ProbeBw;
        // xorshift64
        let mut x = self.random | 1;
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.random = x;
        self.cycle_idx = (CYCLE.len() as u64 - 1 - (x >> 32) % 7) as u8;
        self.advance_cycle_phase(now);
        self.update_gains();
    }

    fn check_full_bw_reached(&mut self, sample: &RateSample) {
        if self.full_bw_reached || !self.round_start || sample.is_app_limited {
            return;
        }
        let threshold = self.full_bw + self.full_bw / 4;
        if self.bw.max() >= threshold {
            self.full_bw = self.bw.max();
            self.full_bw_cnt = 0;
            return;
        }
        self.full_bw_cnt += 1;
        self.full_bw_reached = self.full_bw_cnt >= FULL_BW_ROUNDS;
    }

    fn check_drain(&mut self, c: &mut Tcb, rate: &DeliveryRate, input: &BbrInput) {
        let mss = c.mss();
        let target = |bbr: &Self| bbr.inflight(bbr.bw.max(), UNIT, mss);
        if self.mode == Mode::Startup && self.full_bw_reached {
            self.mode = Mode::Drain;
            c.ssthresh = target(self);
        }
        if self.mode == Mode::Drain
            && self.packets_in_net_at_departure(input.in_flight, c, input) <= target(self)
        {
            self.reset_mode_to_probe_bw(rate.delivered_mstamp);
        }
    }

    fn update_min_rtt(
        &mut self,
        c: &mut Tcb,
        rate: &mut DeliveryRate,
        sample: &RateSample,
        input: &BbrInput,
    ) {
        let now = input.now;
        let is_expired = now > self.min_rtt_stamp + MIN_RTT_WINDOW;
        if let Some(rtt_us) = sample.rtt_us
            && (self.min_rtt_us.is_none_or(|min| rtt_us < min) || is_expired && !sample.is_ack_delayed)
        {
            self.min_rtt_us = Some(rtt_us);
            self.min_rtt_stamp = now;
        }
        if is_expired && !self.idle_restart && self.mode != Mode::ProbeRtt {
            self.mode = Mode::ProbeRtt;
            self.save_cwnd(c.cwnd);
            self.probe_rtt_done_stamp = None;
        }
        if self.mode == Mode::ProbeRtt {
            // Samples of so small a flight are none of the bandwidth.
            rate.set_app_limited(input.in_flight);
            if self.probe_rtt_done_stamp.is_none() {
                if input.in_flight <= CWND_MIN {
                    self.probe_rtt_done_stamp = Some(now + PROBE_RTT_TIME);
                    self.probe_rtt_round_done = false;
                    self.next_rtt_delivered = rate.delivered;
                }
            } else {
                self.probe_rtt_round_done |= self.round_start;
                if self.probe_rtt_round_done {
                    self.check_probe_rtt_done(now, c);
                }
            }
        }
        if sample.delivered.is_some_and(|delivered| delivered > 0) {
            self.idle_restart = false;
        }
    }

    fn check_probe_rtt_done(&mut self, now: Instant, c: &mut Tcb) {
        if self.probe_rtt_done_stamp.is_none_or(|done| now <= done) {
            return;
        }
        self.min_rtt_stamp = now;
        c.cwnd = c.cwnd.max(self.prior_cwnd);
        if self.full_bw_reached {
            self.reset_mode_to_probe_bw(now);
        } else {
            self.reset_mode_to_startup();
        }
    }

    fn update_gains(&mut self) {
        (self.pacing_gain, self.cwnd_gain) = match self.mode {
            Mode::Startup => (HIGH_GAIN, HIGH_GAIN),
            Mode::Drain => (DRAIN_GAIN, HIGH_GAIN),
            Mode::ProbeBw if self.policer.is_in_use => (UNIT, CWND_GAIN),
            Mode::ProbeBw => (CYCLE[usize::from(self.cycle_idx)], CWND_GAIN),
            Mode::ProbeRtt => (UNIT, UNIT),
        };
    }

    fn set_cwnd(&mut self, c: &mut Tcb, rate: &DeliveryRate, sample: &RateSample, input: &BbrInput) {
        let acked = sample.acked_sacked;
        if acked > 0 && !self.set_cwnd_to_recover_or_restore(c, rate, sample, input) {
            let bw = self.bw();
            let target = self.bdp(bw, self.cwnd_gain).saturating_add(self.ack_aggregation_cwnd(bw));
            let target = self.quantization_budget(target, c.mss());
            if self.full_bw_reached {
                c.cwnd = c.cwnd.saturating_add(acked).min(target);
            } else if c.cwnd < target || rate.delivered < CWND_FIRST {
                c.cwnd = c.cwnd.saturating_add(acked);
            }
            c.cwnd = c.cwnd.max(CWND_MIN);
        }
        if self.mode == Mode::ProbeRtt {
            c.cwnd = c.cwnd.min(CWND_MIN);
        }
    }

    /// Conserves packets in the first round of a recovery, and restores the window after it. Returns whether
    /// the window is final.
    fn set_cwnd_to_recover_or_restore(
        &mut self,
        c: &mut Tcb,
        rate: &DeliveryRate,
        sample: &RateSample,
        input: &BbrInput,
    ) -> bool {
        let is_lossy = |state| matches!(state, CaState::Recovery | CaState::Loss);
        if sample.losses > 0 {
            c.cwnd = c.cwnd.saturating_sub(sample.losses).max(1);
        }
        let conserved = input.in_flight.saturating_add(sample.acked_sacked);
        if input.ca_state == CaState::Recovery && self.prev_ca_state != CaState::Recovery {
            self.packet_conservation = true;
            self.next_rtt_delivered = rate.delivered;
            c.cwnd = conserved;
        } else if is_lossy(self.prev_ca_state) && !is_lossy(input.ca_state) {
            c.cwnd = c.cwnd.max(self.prior_cwnd);
            self.packet_conservation = false;
        }
        self.prev_ca_state = input.ca_state;
        if self.packet_conservation {
            c.cwnd = c.cwnd.max(conserved);
        }
        self.packet_conservation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT_US: u64 = 40_000;

    /// A path of `rate` segments per round trip, modelled without packets: each round delivers what is sent,
    /// at most `rate` segments.
    struct Path {
        bbr: Bbr,
        c: Tcb,
        rate: DeliveryRate,
        now: Instant,
    }

    impl Path {
        fn new() -> Self {
            let mut c = Tcb { cwnd: 10, srtt: (RTT_US as u32) << 3, min_rtt: RTT_US as u32, ..Tcb::vacant() };
            (c.peer_mss, c.pmtu) = (1000, 1500);
            let now = Instant::from_millis(1000);
            let mut bbr = Bbr::new(7);
            bbr.begin(now, &c, 0, u64::MAX);
            Self { bbr, c, rate: DeliveryRate::default(), now }
        }

        /// Delivers the segments of one round trip, which took `interval_us`.
        fn round(&mut self, segments: u32, interval_us: u64, sample: RateSample) {
            self.now = self.now.after_micros(RTT_US);
            let prior_delivered = self.rate.delivered;
            self.rate.delivered += segments;
            self.rate.delivered_mstamp = self.now;
            let sample = RateSample {
                prior_delivered,
                delivered: Some(segments),
                interval_us: Some(interval_us),
                rtt_us: Some(RTT_US as u32),
                acked_sacked: segments,
                prior_in_flight: segments,
                ..sample
            };
            let input = BbrInput {
                now: self.now,
                max_rate: u64::MAX,
                in_flight: segments.min(50),
                next_departure: self.now,
                ca_state: CaState::Open,
                lost: 0,
            };
            self.bbr.on_ack(&mut self.c, &mut self.rate, &sample, &input);
        }

        fn bw_segments_per_rtt(&self) -> u64 {
            (self.bbr.bw() * RTT_US + (1 << (BW_SCALE - 1))) >> BW_SCALE
        }
    }

    #[test]
    fn startup_ends_when_bandwidth_stops_growing() {
        let mut path = Path::new();
        for segments in [10, 20, 40] {
            path.round(segments, RTT_US, RateSample::default());
            assert_eq!(path.bbr.mode, Mode::Startup);
            assert_eq!(path.bw_segments_per_rtt(), segments.into());
        }
        for _ in 0..4 {
            path.round(50, RTT_US, RateSample::default());
        }
        assert_eq!(path.bbr.mode, Mode::ProbeBw);
        // 50 segments of 1,000 bytes in 40 ms, within the gains of a phase.
        assert!((900_000..1_600_000).contains(&path.bbr.pacing_rate()), "{}", path.bbr.pacing_rate());
        // Twice the path, and the acknowledgements that arrive at once.
        assert!((100..=180).contains(&path.c.cwnd), "{}", path.c.cwnd);
    }

    #[test]
    fn app_limited_samples_do_not_lower_the_model() {
        let mut path = Path::new();
        for _ in 0..8 {
            path.round(50, RTT_US, RateSample::default());
        }
        for _ in 0..40 {
            path.round(2, RTT_US, RateSample { is_app_limited: true, ..RateSample::default() });
        }
        assert_eq!(path.bw_segments_per_rtt(), 50);
        for _ in 0..12 {
            path.round(2, RTT_US, RateSample::default());
        }
        assert_eq!(path.bw_segments_per_rtt(), 2);
    }

    #[test]
    fn round_trip_time_is_probed_every_ten_seconds() {
        let mut path = Path::new();
        let mut probes = 0;
        let mut was_probing = false;
        for _ in 0..1000 {
            let segments = path.c.cwnd.min(50);
            path.round(segments, RTT_US, RateSample::default());
            // The path has a constant round-trip time, so that the stamp is not renewed.
            let is_probing = path.bbr.mode == Mode::ProbeRtt;
            if is_probing {
                assert!(path.c.cwnd <= CWND_MIN);
            }
            probes += u32::from(is_probing && !was_probing);
            was_probing = is_probing;
        }
        assert!((3..=4).contains(&probes), "{probes} in 40 s");
    }

    #[test]
    fn recovery_conserves_packets_for_a_round_and_restores() {
        let mut path = Path::new();
        for _ in 0..8 {
            path.round(50, RTT_US, RateSample::default());
        }
        let before = path.c.cwnd;
        path.bbr.save_cwnd(before);
        let mut input = BbrInput {
            now: path.now,
            max_rate: u64::MAX,
            in_flight: 30,
            next_departure: path.now,
            ca_state: CaState::Recovery,
            lost: 5,
        };
        let sample = RateSample { losses: 5, acked_sacked: 1, ..RateSample::default() };
        path.bbr.on_ack(&mut path.c, &mut path.rate, &sample, &input);
        assert_eq!(path.c.cwnd, 31);
        input.ca_state = CaState::Open;
        let sample = RateSample { acked_sacked: 1, ..RateSample::default() };
        path.bbr.on_ack(&mut path.c, &mut path.rate, &sample, &input);
        assert!(path.c.cwnd + 4 >= before, "{} {before}", path.c.cwnd);
    }

    #[test]
    fn extreme_rates_do_not_overflow() {
        let mut path = Path::new();
        (path.c.peer_mss, path.c.pmtu) = (65_483, 65_535);
        path.round(u32::MAX / 4, 1, RateSample::default());
        assert!(path.bbr.pacing_rate() > 1 << 40);
        assert!(path.c.cwnd >= CWND_MIN);
    }
}
