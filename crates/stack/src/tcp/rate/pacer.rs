//! The time at which a connection may send next. As with Linux's internal pacing, each packet delays the next
//! one by its bytes divided by the rate.
//!
//! **Granularity.** A departure waits for the timer wheel, whose tick is 65.5 µs, and for the turn of the
//! shard, so packets leave late, never early. A delay of up to [`CATCH_UP_NS`], or half of the time that the
//! packet takes, is made up for by the next departures, so that the rate is kept.

use crate::tcp::conn::Tcb;
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use serde::{Deserialize, Serialize};

/// Delay of a departure that the following ones make up for in any case, in ns. At high rates, where a packet
/// contains the data of about this time, Linux's rule, half of the packet, is less than timers can be late.
const CATCH_UP_NS: u64 = 1_000_000;

/// Segments at the beginning of a connection that are not paced, as on Linux.
const UNPACED_SEGMENTS: u32 = 10;

/// Bytes of the largest packet, which is sent to a peer with a round-trip time below half a millisecond;
/// halved for each further half millisecond (`tcp_tso_autosize`).
const GSO_MAX_SIZE: u64 = 65_536;

/// State of pacing.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Pacer {
    /// When the next packet may leave (Linux's `tcp_wstamp_ns`).
    next_departure: Instant,
    /// When the current packet began to leave, and the segments that it may still have.
    packet_at: Instant,
    packet_left: u32,
    /// New data up to this sequence number, and this number of retransmitted segments, are charged.
    charged_seq: SeqNumber,
    charged_retrans: u32,
    /// Segments sent, up to [`UNPACED_SEGMENTS`].
    segments_sent: u32,
    /// True if the connection has something to send that waits for `next_departure`.
    pub is_waiting: bool,
    /// True if the next segment leaves before `next_departure`: the retransmission after a time-out, as on
    /// Linux (`tcp_retransmit_timer`).
    pub is_exempt: bool,
}

impl Pacer {
    /// Begins to pace. A connection that `has_sent` data before has no unpaced segments left.
    pub fn begin(&mut self, snd_nxt: SeqNumber, total_retrans: u32, has_sent: bool) {
        *self = Self {
            charged_seq: snd_nxt,
            charged_retrans: total_retrans,
            segments_sent: if has_sent { UNPACED_SEGMENTS } else { 0 },
            ..Self::default()
        };
    }

    /// Returns when the next packet may leave.
    pub fn next_departure(&self) -> Instant {
        self.next_departure
    }

    /// Returns how many segments of `mss` bytes may leave now: 0 before the next departure. `packet_segments`
    /// is the size of a packet, and `rate` is in bytes per second.
    pub fn allowance(&mut self, now: Instant, packet_segments: u32, mss: u32, rate: u64) -> u32 {
        if self.packet_at == now && self.packet_left > 0 {
            return self.packet_left;
        }
        if self.next_departure > now {
            return self.is_exempt.into();
        }
        (self.packet_at, self.packet_left) = (now, packet_segments);
        let half = time_ns(u64::from(packet_segments) * u64::from(mss), rate) / 2;
        let credit = if self.segments_sent < UNPACED_SEGMENTS { 0 } else { half.max(CATCH_UP_NS) };
        self.depart_no_earlier(now.as_nanos().saturating_sub(credit));
        packet_segments
    }

    /// Delays the next departure by what was sent since the last call. `rate` is in bytes per second; at 0
    /// and without a limit nothing is paced, as on Linux.
    pub fn charge(&mut self, now: Instant, snd_nxt: SeqNumber, total_retrans: u32, mss: u32, rate: u64) {
        let new_bytes = (snd_nxt - self.charged_seq).max(0) as u32;
        let retransmitted = total_retrans.wrapping_sub(self.charged_retrans);
        let segments = new_bytes.div_ceil(mss).saturating_add(retransmitted);
        if segments == 0 {
            return;
        }
        (self.charged_seq, self.charged_retrans) = (snd_nxt, total_retrans);
        self.is_exempt = false;
        self.packet_left = self.packet_left.saturating_sub(segments);
        self.segments_sent = self.segments_sent.saturating_add(segments).min(UNPACED_SEGMENTS);
        if self.segments_sent < UNPACED_SEGMENTS {
            return;
        }
        if self.packet_at != now {
            // A probe left at a time of its own.
            self.depart_no_earlier(now.as_nanos().saturating_sub(CATCH_UP_NS));
        }
        let bytes = u64::from(new_bytes) + u64::from(retransmitted) * u64::from(mss);
        let at = self.next_departure.as_nanos().saturating_add(time_ns(bytes, rate));
        self.next_departure = Instant::from_nanos(at);
    }

    fn depart_no_earlier(&mut self, nanos: u64) {
        self.next_departure = self.next_departure.max(Instant::from_nanos(nanos));
    }
}

/// Returns the time that `bytes` take at a rate in bytes per second, in ns; 0 if the rate is 0 or unlimited.
fn time_ns(bytes: u64, rate: u64) -> u64 {
    if rate == 0 || rate == super::UNLIMITED {
        return 0;
    }
    u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(rate)).unwrap_or(u64::MAX)
}

/// Returns the rate in bytes per second at which a window is sent in half a round-trip time during slow start
/// and in 1/1.2 of one later (`tcp_update_pacing_rate`); unlimited before the first sample.
pub(crate) fn window_rate(c: &Tcb, packets_out: u32) -> u64 {
    let percent = if c.cwnd < c.ssthresh / 2 { 200 } else { 120 };
    let window = u128::from(c.mss()) * u128::from(c.cwnd.max(packets_out));
    // `srtt` is in eighths of a microsecond.
    let rate = (window * percent * 80_000).checked_div(c.srtt.into());
    rate.map_or(super::UNLIMITED, |rate| u64::try_from(rate).unwrap_or(super::UNLIMITED))
}

/// Returns the segments of one packet (`tcp_tso_autosize`): the data of about a millisecond, more if the peer
/// is near, and at least `min_segs`. `min_rtt` is in µs.
pub(crate) fn packet_segments(rate: u64, mss: u32, min_rtt: u32, min_segs: u32) -> u32 {
    let near = GSO_MAX_SIZE.checked_shr(min_rtt >> 9).unwrap_or(0);
    let bytes = (rate >> 10).saturating_add(near).min(GSO_MAX_SIZE);
    (bytes as u32 / mss).max(min_segs)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1000;

    fn paced() -> Pacer {
        let mut pacer = Pacer::default();
        pacer.begin(SeqNumber(0), 0, true);
        pacer
    }

    /// Sends a packet of two segments at 1 MB/s, which takes 2 ms, up to `end`.
    fn send_packet(pacer: &mut Pacer, now: Instant, end: u32) {
        assert_eq!(pacer.allowance(now, 2, MSS, 1_000_000), 2);
        pacer.charge(now, SeqNumber(end - MSS), 0, MSS, 1_000_000);
        assert_eq!(pacer.allowance(now, 2, MSS, 1_000_000), 1);
        pacer.charge(now, SeqNumber(end), 0, MSS, 1_000_000);
        assert_eq!(pacer.allowance(now, 2, MSS, 1_000_000), 0);
    }

    #[test]
    fn each_packet_delays_the_next_by_its_length() {
        let mut pacer = paced();
        let mut now = Instant::from_millis(50);
        for n in 1..=10u32 {
            send_packet(&mut pacer, now, 2 * MSS * n);
            let gap = pacer.next_departure() - now;
            // The first packet is late, so that half of its time counts.
            assert_eq!(gap.as_micros(), if n == 1 { 1000 } else { 2000 });
            now = pacer.next_departure();
        }
    }

    #[test]
    fn late_departures_are_made_up_for_within_bounds() {
        let mut pacer = paced();
        send_packet(&mut pacer, Instant::from_millis(50), 2 * MSS);
        for (late_us, gap_us) in [(65, 1935), (900, 1100), (1000, 1000), (500_000, 1000)] {
            let mut pacer = pacer;
            let now = pacer.next_departure().after_micros(late_us);
            send_packet(&mut pacer, now, 4 * MSS);
            assert_eq!((pacer.next_departure() - now).as_micros(), gap_us, "{late_us}");
        }
        // A packet of 20 µs may be late by much more than that.
        let rate = 100_000_000;
        let mut pacer = paced();
        let mut now = Instant::from_millis(50);
        let mut sent = 0;
        while now < Instant::from_millis(60) {
            while pacer.allowance(now, 2, MSS, rate) > 0 {
                sent += 1;
                pacer.charge(now, SeqNumber(sent * MSS), 0, MSS, rate);
            }
            now = now.after_micros(65);
        }
        // 10 ms, and the credit of one.
        assert!((1090..=1110).contains(&sent), "{sent}");
    }

    #[test]
    fn first_segments_zero_and_unlimited_rates_are_not_paced() {
        let now = Instant::from_millis(50);
        let mut pacer = Pacer::default();
        pacer.begin(SeqNumber(0), 0, false);
        assert_eq!(pacer.allowance(now, 20, MSS, 1000), 20);
        pacer.charge(now, SeqNumber(9 * MSS), 0, MSS, 1000);
        assert_eq!(pacer.next_departure(), now);
        pacer.charge(now, SeqNumber(10 * MSS), 0, MSS, 1000);
        assert_eq!((pacer.next_departure() - now).as_millis(), 1000);
        for rate in [0, super::super::UNLIMITED] {
            let mut pacer = paced();
            pacer.charge(now, SeqNumber(MSS), 0, MSS, rate);
            assert_eq!(pacer.allowance(now, 2, MSS, rate), 2);
        }
    }

    #[test]
    fn retransmissions_are_charged_and_no_delay_overflows() {
        let now = Instant::from_millis(50);
        let mut pacer = paced();
        pacer.charge(now, SeqNumber(0), 4, MSS, 1_000_000);
        assert_eq!((pacer.next_departure() - now).as_micros(), 3000);
        let mut pacer = paced();
        pacer.charge(now, SeqNumber(0x7fff_ffff), u32::MAX, 65_483, 1);
        assert!(pacer.next_departure() > now);
    }

    #[test]
    fn exempt_segment_leaves_early_and_delays_the_next() {
        let mut pacer = paced();
        let now = Instant::from_millis(50);
        send_packet(&mut pacer, now, 2 * MSS);
        let departure = pacer.next_departure();
        pacer.is_exempt = true;
        assert_eq!(pacer.allowance(now, 2, MSS, 1_000_000), 1);
        pacer.charge(now, SeqNumber(2 * MSS), 1, MSS, 1_000_000);
        assert_eq!(pacer.allowance(now, 2, MSS, 1_000_000), 0);
        assert_eq!((pacer.next_departure() - departure).as_micros(), 1000);
    }

    #[test]
    fn packets_have_a_millisecond_of_data_and_more_for_near_peers() {
        let segments = |rate, min_rtt| packet_segments(rate, 1448, min_rtt, 2);
        assert_eq!(segments(1_250_000, 20_000), 2);
        assert_eq!(segments(12_500_000, 20_000), 8);
        assert_eq!(segments(1_250_000_000, 20_000), 45);
        assert_eq!(segments(0, 100), 45);
        assert_eq!(segments(0, 1500), 11);
        assert_eq!(packet_segments(100_000, 1448, 20_000, 1), 1);
    }

    #[test]
    fn window_rate_is_twice_the_window_in_slow_start() {
        let mut c = Tcb { cwnd: 10, ssthresh: u32::MAX, srtt: 100_000 << 3, ..Tcb::vacant() };
        (c.peer_mss, c.pmtu) = (1000, 1500);
        assert_eq!(window_rate(&c, 0), 200_000);
        c.ssthresh = 10;
        assert_eq!(window_rate(&c, 0), 120_000);
        assert_eq!(window_rate(&c, 20), 240_000, "more in flight than the window");
        c.srtt = 0;
        assert_eq!(window_rate(&c, 0), super::super::UNLIMITED);
    }
}
