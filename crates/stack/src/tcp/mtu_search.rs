//! Path MTU discovery by probing (RFC 4821, as implemented by Linux): for paths that drop large packets
//! without an ICMP error.
//!
//! The connection sends segments that fit `pmtu` (search_low), and now and then one larger segment, half-way
//! to what link and peer accept (search_high). If that arrives, `pmtu` is raised to its size; if it alone is
//! lost, search_high is lowered below it, without a reduction of the congestion window. If everything is lost
//! for several time-outs in a row, the path may accept less than `pmtu`.
//!
//! An idle connection stores four bits in its [`Tcb`]: whether it searches and, if the search is complete,
//! since when.

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
use serde::{Deserialize, Serialize};

/// Smallest congestion window with which probes are sent, in segments (as on Linux): a probe counts as two
/// segments.
const PROBE_CWND_MIN: u32 = 11;

/// State of the search, see [`Tcb::mtu_search`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MtuSearchState {
    /// `pmtu` is the MTU of the route.
    Off,
    /// `pmtu` is the largest size shown to arrive; probes are sent.
    Searching,
    /// `pmtu` is the largest size shown to arrive, and no size is left to probe, since the interval with this
    /// number.
    Complete(u8),
}

impl MtuSearchState {
    /// Number of intervals that four bits can distinguish.
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

    /// Returns the state after a time without active state: complete until a whole interval has certainly
    /// passed. Only 14 intervals are distinguished: after that many, the search may stay complete for up to
    /// two more.
    fn resumed(self, now: Instant, interval: Duration) -> Self {
        let (Self::Complete(then), Self::Complete(number)) = (self, Self::complete(now, interval)) else {
            return self;
        };
        let passed = (u64::from(number) + Self::INTERVALS - u64::from(then)) % Self::INTERVALS;
        if passed < 2 { self } else { Self::Searching }
    }
}

/// A probe in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MtuProbe {
    start: SeqNumber,
    end: SeqNumber,
    /// Bytes of the packet: the MTU that the probe tests.
    mtu: u16,
}

/// The search of an active connection.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct MtuSearch {
    /// Largest packet that may still arrive; `None` before it was determined.
    search_high: Option<u16>,
    pub probe: Option<MtuProbe>,
    /// True if a probe was lost, so `search_high` was learned.
    has_failed: bool,
    /// When the search began.
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

    /// Returns whether a probe was lost since the active state was allocated.
    pub fn has_failed(&self) -> bool {
        self.has_failed
    }
}

fn interval(config: &TcpConfig) -> Duration {
    Duration::from_secs(config.mtu_probe_interval_seconds.into())
}

impl Tcb {
    /// Returns the bytes of a packet with `payload` bytes of payload.
    fn mtu_for(&self, payload: u32) -> u16 {
        let headers = u32::from(self.header_bytes() + self.option_bytes());
        u16::try_from(payload + headers).unwrap_or(u16::MAX)
    }
}

impl Tcp {
    /// Continues the search where it was when the previous active state was released.
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
            // The search was complete before the last segment arrived and the active state was released.
            b.mtu.probe_timestamp = Instant::from_millis(now.as_millis().saturating_sub(silent_ms));
            b.mtu.search_high = Some(c.pmtu);
        }
    }

    /// Stores that the search is complete when the active state, which knows about lost probes, is about to
    /// be released: the size found is used for an interval. Otherwise each burst of a connection that is
    /// often idle would lose a probe of the same size again.
    #[cold]
    pub(super) fn suspend_mtu_search(&mut self, idx: u32) {
        let (now, interval) = (self.now, interval(&self.config));
        let c = &mut self.conns[idx];
        if c.mtu_search() == MtuSearchState::Searching {
            c.set_mtu_search(MtuSearchState::complete(now, interval));
        }
    }

    /// Sends a larger segment before new data if a probe is due (RFC 4821 §7.4). Returns false if new data
    /// have to wait, so that there is room for the probe.
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
        // Options of variable length, or a path that fragments, would make the size of a probe meaningless.
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
        // Enough data must follow the probe that its loss is detected.
        let needed = size + (b.rack.reordering(self.config.reordering_segments) + 1) * mss;
        if allowance.unsent < needed || c.snd_wnd < needed {
            return Ok(true);
        }
        if allowance.window < needed || b.rtx_queue.in_flight() + 2 > c.cwnd {
            // The data in flight will soon be acknowledged.
            return Ok(b.rtx_queue.is_empty());
        }
        self.send_mtu_probe(net, idx, mtu, size)?;
        Ok(true)
    }

    /// Sends one probe as a single segment, even if the device could segment larger ones (RFC 4821 §7.5).
    fn send_mtu_probe(&mut self, net: &mut Network, idx: u32, mtu: u16, size: u32) -> Result<(), TxError> {
        let start = self.conns[idx].snd_nxt;
        self.send_segment(net, idx, size, false, EndKind::Segment, size)?;
        self.stats.mtu_probes += 1;
        let Some((c, b)) = self.tcb_and_active(idx) else { return Ok(()) };
        // The probe counts as two segments.
        c.cwnd -= 1;
        b.mtu.probe = Some(MtuProbe { start, end: c.snd_nxt, mtu });
        b.rtx_queue.require_slow_path_until(c.snd_nxt);
        Ok(())
    }

    /// Returns the largest packet that link and peer accept, and that no lost probe has excluded.
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

    /// Completes the search, as no size is left to probe, and restarts it after an interval: the path may
    /// have changed.
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

    /// Lowers the segment size after the head of the queue has timed out for long: the path may accept
    /// smaller packets only (RFC 4821 §7.7).
    pub(super) fn detect_black_hole(&mut self, idx: u32) {
        let config = &self.config;
        if config.mtu_probing == MtuProbing::Off {
            return;
        }
        let timeout = rtt::give_up_after(self.profile(idx), config.mtu_black_hole_retries);
        let (base, floor) =
            (u32::from(config.mtu_base_segment_bytes), u32::from(config.mtu_floor_segment_bytes));
        let now = self.now;
        let c = &mut self.conns[idx];
        let b = &mut self.active[c.active];
        if b.retransmits == 0 {
            b.mtu.stalled_at = now;
            return;
        }
        // A peer with a closed window answers and drops the data in flight.
        if now - b.mtu.stalled_at < timeout || c.snd_wnd == 0 {
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

    /// Lowers `search_high` to the MTU of the route. A larger probe in flight is lost, which is no sign of
    /// congestion (RFC 4821 §7.6.2).
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

    /// Processes the acknowledgement of the probe (RFC 4821 §7.6.1): segments are that large from now on, and
    /// the window has proportionally fewer of them.
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

    /// Checks lost segments while a probe is in flight. If only the probe is lost, it was too large, and the
    /// window is kept (RFC 4821 §7.6.2). Otherwise nothing is known about its size (§7.6.4).
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

    /// Forgets the probe before a retransmission: its acknowledgement would say nothing about its size (RFC
    /// 4821 §7.6.4).
    #[cold]
    pub(super) fn forget_mtu_probe(&mut self, idx: u32) {
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        if let Some(probe) = b.mtu.probe.take() {
            b.rtx_queue.resegment_one(probe.start, c.mss());
        }
    }
}

/// Processes the loss of a probe that was too large: its data are sent again in segments of the known size.
fn on_mtu_probe_lost(c: &mut Tcb, b: &mut ActiveConn, probe: MtuProbe) {
    b.mtu.probe = None;
    b.mtu.has_failed = true;
    b.mtu.search_high = Some(b.mtu.search_high.map_or(probe.mtu - 1, |high| high.min(probe.mtu - 1)));
    // The probe had taken one segment of the window.
    c.cwnd += 1;
    b.rtx_queue.resegment_one(probe.start, c.mss());
    recovery::simple_retransmit(c, b);
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(600);

    #[test]
    fn every_search_state_fits_four_bits() {
        for bits in 0..16 {
            assert_eq!(MtuSearchState::from_bits(bits).to_bits(), bits);
        }
        assert_eq!(MtuSearchState::from_bits(0), MtuSearchState::Off);
        assert_eq!(MtuSearchState::from_bits(1), MtuSearchState::Searching);
    }

    #[test]
    fn complete_search_resumes_after_one_to_two_intervals() {
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
    fn unfinished_search_is_independent_of_time() {
        for state in [MtuSearchState::Off, MtuSearchState::Searching] {
            assert_eq!(state.resumed(Instant::from_millis(1 << 40), INTERVAL), state);
        }
    }
}
