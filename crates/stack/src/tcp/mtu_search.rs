//! The path MTU found by probing (RFC 4821, as Linux has it): for paths that drop what is too large and tell nobody.
//!
//! The connection sends segments that `pmtu` has room for (search_low), and now and then a single larger one, half-way to what link and peer
//! would take (search_high). If that arrives, `pmtu` is as large from then on; if it alone is lost, search_high is below it, and nobody
//! slows down. Everything lost, several time-outs in a row, is the sign of a path that takes less than `pmtu`.
//!
//! What an idle connection has to remember is in four bits of [`Tcb`]: whether it searches, and if the search is over, since when.

use super::Tcp;
use super::active::{ActiveConn, SlowPathFlags};
use super::config::{MtuProbing, TcpConfig};
use super::conn::{Flags, NONE, Tcb};
use super::rtx_queue::EndKind;
use super::{recovery, rtt};
use crate::ip::{Network, TxError};
use crate::options::CaState;
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;

/// Congestion window from which on probes are sent, in segments (Linux): a probe is more than its share.
const PROBE_CWND_MIN: u32 = 11;

/// What [`Tcb::mtu_search`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MtuSearchState {
    /// `pmtu` is what the route says.
    Off,
    /// `pmtu` is what was shown to arrive; probes are sent.
    Searching,
    /// The same, but there is nothing left to try; since when, as the number of an interval.
    Complete(u8),
}

impl MtuSearchState {
    /// Numbers of intervals that can be told apart in four bits.
    const INTERVALS: u64 = 14;

    pub const fn from_bits(bits: u8) -> Self {
        match bits & 15 {
            0 => Self::Off,
            1 => Self::Searching,
            n => Self::Complete(n - 2),
        }
    }

    pub const fn to_bits(self) -> u8 {
        match self {
            Self::Off => 0,
            Self::Searching => 1,
            Self::Complete(n) => n + 2,
        }
    }

    fn complete(at: Instant, interval: Duration) -> Self {
        let number = at.as_millis() / interval.as_millis().max(1) as u64;
        Self::Complete((number % Self::INTERVALS) as u8)
    }

    /// What it is after a time without a busy part: settled until a whole interval has passed for certain. Only 14 intervals are told apart:
    /// after as many it may rest for two more.
    fn resumed(self, now: Instant, interval: Duration) -> Self {
        let (Self::Complete(then), Self::Complete(number)) = (self, Self::complete(now, interval)) else {
            return self;
        };
        let passed = (u64::from(number) + Self::INTERVALS - u64::from(then)) % Self::INTERVALS;
        if passed < 2 { self } else { Self::Searching }
    }
}

/// A probe in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MtuProbe {
    start: SeqNumber,
    end: SeqNumber,
    /// Bytes of the packet: the MTU it is to show.
    mtu: u16,
}

/// The search of a busy connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MtuSearch {
    /// Largest packet that may still get through; none as long as nobody asked for it.
    search_high: Option<u16>,
    pub probe: Option<MtuProbe>,
    /// A probe failed: `high` is something that was learned.
    has_failed: bool,
    /// When it began.
    probe_timestamp: Instant,
    /// When the head of the queue timed out for the first time.
    stalled_at: Instant,
}

impl MtuSearch {
    pub const NONE: Self = Self {
        search_high: None,
        probe: None,
        has_failed: false,
        probe_timestamp: Instant::ZERO,
        stalled_at: Instant::ZERO,
    };

    /// Whether a probe was lost since the busy part was taken.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }
}

fn interval(config: &TcpConfig) -> Duration {
    Duration::from_secs(config.mtu_probe_interval_seconds.into())
}

impl Tcb {
    /// Bytes of a packet with so many of payload.
    fn mtu_for(&self, payload: u32) -> u16 {
        let headers = u32::from(self.header_bytes() + self.option_bytes());
        u16::try_from(payload + headers).unwrap_or(u16::MAX)
    }
}

impl Tcp {
    /// A busy part was taken: goes on with the search where the last one left it.
    #[cold]
    pub(super) fn resume_mtu_search(&mut self, idx: u32) {
        let (now, config) = (self.now, &self.config);
        let silent_ms = u64::from(self.now_ms().wrapping_sub(self.conns[idx].last_rx));
        let c = &mut self.conns[idx];
        let state = c.mtu_search();
        if state == MtuSearchState::Off && config.mtu_probing != MtuProbing::Always {
            return;
        }
        let b = &mut self.active[c.active];
        b.slow_path.set(SlowPathFlags::MTU_SEARCH);
        b.mtu.probe_timestamp = now;
        c.set_mtu_search(state.resumed(now, interval(config)));
        if matches!(c.mtu_search(), MtuSearchState::Complete(_)) {
            // Which was before all had come, and the busy part went.
            b.mtu.probe_timestamp = Instant::from_millis(now.as_millis().saturating_sub(silent_ms));
            b.mtu.search_high = Some(c.pmtu);
        }
    }

    /// The busy part is about to go, and with it what failed: what was found is good enough for an interval. Otherwise each burst of a
    /// connection that is often idle would lose the same probe again.
    #[cold]
    pub(super) fn suspend_mtu_search(&mut self, idx: u32) {
        let (now, interval) = (self.now, interval(&self.config));
        let c = &mut self.conns[idx];
        if c.mtu_search() == MtuSearchState::Searching {
            c.set_mtu_search(MtuSearchState::complete(now, interval));
        }
    }

    /// Before new data leave: sends a larger segment first if it is time to (RFC 4821 §7.4). False if new data have to wait, so that
    /// there is room for it.
    #[cold]
    pub(super) fn search_mtu(&mut self, net: &mut Network, idx: u32) -> Result<bool, TxError> {
        if self.conns[idx].mtu_search() == MtuSearchState::Off {
            let config = &self.config;
            let c = &mut self.conns[idx];
            // RFC 4821 §7.2.
            c.pmtu = c.pmtu.min(c.mtu_for(config.mtu_base_segment_bytes.into()));
            c.set_mtu_search(MtuSearchState::Searching);
        }
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        // Options of variable length, and a path that fragments, would make the size of a probe mean nothing.
        let unfit = b.mtu.probe.is_some()
            || b.recovery.ca_state != CaState::Open
            || c.cwnd < PROBE_CWND_MIN
            || b.dsack.is_some()
            || b.recv.range_count() > 0
            || b.snd_up.is_some()
            || c.has(Flags::MTU_LOCKED);
        if unfit {
            return Ok(true);
        }
        let Some(high) = self.search_high(net, idx) else { return Ok(true) };
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let mtu = u32::midpoint(c.pmtu.into(), high.into()) as u16;
        let (size, mss) = (c.mss_on(mtu), c.mss());
        if high < c.pmtu.saturating_add(self.config.mtu_probe_threshold_bytes) || size <= mss {
            self.complete_mtu_search(idx);
            return Ok(true);
        }
        let allowance = self.send_quota(idx);
        // Enough behind it that its loss is noticed.
        let needed = size + (b.rack.reordering(self.config.reordering_segments) + 1) * mss;
        if allowance.unsent < needed || c.snd_wnd < needed {
            return Ok(true);
        }
        if allowance.window < needed || b.rtx_queue.in_flight() + 2 > c.cwnd {
            // What is in flight leaves soon.
            return Ok(b.rtx_queue.is_empty());
        }
        self.send_mtu_probe(net, idx, mtu, size)?;
        Ok(true)
    }

    /// RFC 4821 §7.5: one segment by itself, also where the device would cut larger ones.
    fn send_mtu_probe(&mut self, net: &mut Network, idx: u32, mtu: u16, size: u32) -> Result<(), TxError> {
        let start = self.conns[idx].snd_nxt;
        self.send_segment(net, idx, size, false, EndKind::Segment, size)?;
        self.stats.mtu_probes += 1;
        let Some((c, b)) = self.tcb_and_active(idx) else { return Ok(()) };
        // It stands for two segments.
        c.cwnd -= 1;
        b.mtu.probe = Some(MtuProbe { start, end: c.snd_nxt, mtu });
        b.rtx_queue.require_slow_path_until(c.snd_nxt);
        Ok(())
    }

    /// The largest packet that link and peer take, and no probe has shown to be lost.
    fn search_high(&mut self, net: &mut Network, idx: u32) -> Option<u16> {
        let c = &self.conns[idx];
        if let Some(high) = self.active[c.active].mtu.search_high {
            return Some(high);
        }
        let key = self.key(idx);
        let route = net.route(self.now, key.remote.ip(), Some(key.local.ip())).ok()?;
        let c = &self.conns[idx];
        let high = route.mtu.min(c.peer_mss.saturating_add(c.header_bytes()));
        self.active[c.active].mtu.search_high = Some(high);
        Some(high)
    }

    /// There is nothing left to try, until an interval has passed: the path may be another one then.
    fn complete_mtu_search(&mut self, idx: u32) {
        let (now, interval) = (self.now, interval(&self.config));
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        if now.saturating_since(b.mtu.probe_timestamp) >= interval {
            b.mtu.probe_timestamp = now;
            b.mtu.search_high = None;
            c.set_mtu_search(MtuSearchState::Searching);
        } else if c.mtu_search() == MtuSearchState::Searching {
            c.set_mtu_search(MtuSearchState::complete(now, interval));
        }
    }

    /// The head of the queue timed out: if that has been going on for long, the path may take less than it takes to
    /// arrive (RFC 4821 §7.7).
    pub(super) fn detect_black_hole(&mut self, idx: u32) {
        let config = &self.config;
        if config.mtu_probing == MtuProbing::Off {
            return;
        }
        let base = Duration::from_millis(config.rto_min_ms.into());
        let patience = rtt::give_up_after(self.profile(idx), config.mtu_black_hole_retries, base);
        let (base, floor) =
            (u32::from(config.mtu_base_segment_bytes), u32::from(config.mtu_floor_segment_bytes));
        let now = self.now;
        let c = &mut self.conns[idx];
        let b = &mut self.active[c.active];
        if b.retransmits == 0 {
            b.mtu.stalled_at = now;
            return;
        }
        // A peer whose window is closed answers, and drops what was under way.
        if now - b.mtu.stalled_at < patience || c.snd_wnd == 0 {
            return;
        }
        let segment = if c.mtu_search() == MtuSearchState::Off {
            b.slow_path.set(SlowPathFlags::MTU_SEARCH);
            b.mtu.probe_timestamp = now;
            base
        } else {
            base.min(c.mss() / 2).max(floor)
        };
        c.pmtu = c.pmtu.min(c.mtu_for(segment));
        c.set_mtu_search(MtuSearchState::Searching);
        b.mtu.probe = None;
        b.rtx_queue.resegment(c.mss());
        self.stats.mtu_black_holes += 1;
    }

    /// The route takes `mtu`: nothing above it needs to be tried. A probe above it is lost, and that is no sign of congestion
    /// (RFC 4821 §7.6.2).
    pub(super) fn bound_mtu_search(&mut self, idx: u32, mtu: u16) {
        let c = &mut self.conns[idx];
        if c.active == NONE || c.mtu_search() == MtuSearchState::Off {
            return;
        }
        let b = &mut self.active[c.active];
        b.mtu.search_high = b.mtu.search_high.map(|high| high.min(mtu));
        if let Some(probe) = b.mtu.probe.filter(|probe| probe.mtu > mtu) {
            b.rtx_queue.mark_lost(probe.start);
            on_mtu_probe_lost(c, b, probe);
            self.stats.mtu_probes_lost += 1;
            self.want_transmit(idx);
        }
    }

    /// The probe arrived (RFC 4821 §7.6.1): segments are as large from now on, and as many fewer.
    #[cold]
    pub(super) fn on_mtu_probe_acknowledged(&mut self, idx: u32) {
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let Some(probe) = b.mtu.probe.filter(|probe| probe.end.le(c.snd_una)) else { return };
        b.mtu.probe = None;
        let window = u64::from(c.cwnd) * u64::from(c.mtu_for(c.mss())) / u64::from(probe.mtu);
        c.cwnd = (window as u32).max(1);
        if !b.recovery.is_in_cwnd_reduction() {
            c.ssthresh = c.ssthresh.max((c.cwnd >> 1) + (c.cwnd >> 2));
        }
        b.congestion.on_resized();
        c.pmtu = c.pmtu.max(probe.mtu);
        self.stats.mtu_probes_acknowledged += 1;
    }

    /// Segments were found lost while a probe was in flight. If it is the probe, and nothing else, no router was overloaded: it was too large
    /// (RFC 4821 §7.6.2). The window stays as it is then. Otherwise nothing is known of the size (§7.6.4).
    #[cold]
    pub(super) fn check_mtu_probe_loss(&mut self, idx: u32) {
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let Some(probe) = b.mtu.probe else { return };
        let alone = b.rtx_queue.lost_out == 1 && b.rtx_queue.retrans_out == 0 && c.snd_una == probe.start;
        if alone && matches!(b.recovery.ca_state, CaState::Open | CaState::Disorder) {
            on_mtu_probe_lost(c, b, probe);
            self.stats.mtu_probes_lost += 1;
        }
    }

    /// Something is about to be sent again: whatever arrives now says nothing of the probe's size (RFC 4821 §7.6.4).
    #[cold]
    pub(super) fn forget_mtu_probe(&mut self, idx: u32) {
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        if let Some(probe) = b.mtu.probe.take() {
            b.rtx_queue.resegment_one(probe.start, c.mss());
        }
    }
}

/// The probe, which counts as lost, was too large: what it carried goes again in segments that are known to arrive.
fn on_mtu_probe_lost(c: &mut Tcb, b: &mut ActiveConn, probe: MtuProbe) {
    b.mtu.probe = None;
    b.mtu.has_failed = true;
    b.mtu.search_high = Some(b.mtu.search_high.map_or(probe.mtu - 1, |high| high.min(probe.mtu - 1)));
    // What it took when it was sent.
    c.cwnd += 1;
    b.rtx_queue.resegment_one(probe.start, c.mss());
    recovery::simple_retransmit(c, b);
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(600);

    #[test]
    fn every_state_of_a_search_fits_into_four_bits() {
        for bits in 0..16 {
            assert_eq!(MtuSearchState::from_bits(bits).to_bits(), bits);
        }
        assert_eq!(MtuSearchState::from_bits(0), MtuSearchState::Off);
        assert_eq!(MtuSearchState::from_bits(1), MtuSearchState::Searching);
    }

    #[test]
    fn a_settled_search_rests_for_a_whole_interval_and_goes_on_after_two() {
        for start in [0u64, 1, 599, 600, 13 * 600, 14 * 600 - 1] {
            let begun = Instant::from_millis(start * 1000);
            let state = MtuSearchState::complete(begun, INTERVAL);
            for after in 0..1300 {
                let resumed = state.resumed(begun + Duration::from_secs(after), INTERVAL);
                if after < 600 {
                    assert_eq!(resumed, state, "{start} s + {after} s");
                } else if after >= 1200 {
                    assert_eq!(resumed, MtuSearchState::Searching, "{start} s + {after} s");
                }
            }
        }
    }

    #[test]
    fn a_search_that_goes_on_or_was_never_begun_does_not_depend_on_time() {
        for state in [MtuSearchState::Off, MtuSearchState::Searching] {
            assert_eq!(state.resumed(Instant::from_millis(1 << 40), INTERVAL), state);
        }
    }
}
