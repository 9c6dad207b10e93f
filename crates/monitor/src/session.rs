//! Divides the packets of a source into intervals of time, and sums up the intervals.

use crate::counters::MonitorCounters;
use crate::distribution::Distribution;
use crate::engine::Engine;
use crate::frame::LinkType;
use crate::report::Report;
use crate::sources::TimedPacket;
use core::time::Duration;
use ginnel_stack::time::Instant;

/// The measurements of an interval, or of all intervals.
#[derive(Debug)]
pub struct Measurements<'a> {
    /// Counters, connections and quantiles.
    pub report: &'a Report,
    /// Latencies of low and of high priority.
    pub latencies: &'a [Distribution; 2],
}

/// A run of the monitor. An exporter of metrics reads the [`Session::engine`] and the [`Session::total`] at
/// any time.
#[derive(Debug)]
pub struct Session {
    engine: Engine,
    /// Length of an interval; `None` if only the total is wanted.
    interval: Option<Duration>,
    /// Time of the first packet, and latest time of a packet.
    span: Option<(Instant, Instant)>,
    interval_start: Instant,
    /// Counters at the start of the interval.
    before: MonitorCounters,
    /// Packets that the source had lost by the start of the interval.
    lost_before: u64,
    /// Empty distributions, for the next interval.
    spare: [Distribution; 2],
    total: [Distribution; 2],
}

impl Session {
    /// Creates a session that closes an interval after each `interval`. With `None` or zero, there is only
    /// the total.
    #[must_use]
    pub fn new(engine: Engine, interval: Option<Duration>) -> Self {
        Self {
            engine,
            interval: interval.filter(|interval| !interval.is_zero()),
            span: None,
            interval_start: Instant::ZERO,
            before: MonitorCounters::default(),
            lost_before: 0,
            spare: Default::default(),
            total: Default::default(),
        }
    }

    /// Returns the engine.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Returns the latencies of all closed intervals, of low and of high priority.
    #[must_use]
    pub fn total(&self) -> &[Distribution; 2] {
        &self.total
    }

    /// Examines packets, and calls `on_interval` for each interval that ends before one of them, unless no
    /// packets were seen or lost in the interval. `lost` is the number of packets that the source has lost so
    /// far.
    pub fn process(
        &mut self,
        link: LinkType,
        packets: &[TimedPacket<'_>],
        lost: u64,
        on_interval: &mut dyn FnMut(&Measurements<'_>),
    ) {
        let mut rest = packets;
        while let Some((first, _)) = rest.first() {
            self.start_at(*first);
            if self.is_over(*first) {
                self.close(*first, lost, on_interval);
            }
            let here = rest.iter().take_while(|(at, _)| !self.is_over(*at)).count().max(1);
            let (now, later) = rest.split_at(here);
            for (at, _) in now {
                self.span = self.span.map(|(start, end)| (start, end.max(*at)));
            }
            self.engine.process_burst(link, now.iter().copied());
            rest = later;
        }
    }

    /// Closes the interval if it has ended by `now`. Called while the source has no packets.
    pub fn advance(&mut self, now: Instant, lost: u64, on_interval: &mut dyn FnMut(&Measurements<'_>)) {
        self.start_at(now);
        self.span = self.span.map(|(start, end)| (start, end.max(now)));
        if self.is_over(now) {
            self.close(now, lost, on_interval);
        }
    }

    /// Ends the session: closes the last interval, and returns the report of all of them.
    pub fn finish(&mut self, lost: u64, on_interval: &mut dyn FnMut(&Measurements<'_>)) -> Report {
        let (start, end) = self.span.unwrap_or((Instant::ZERO, Instant::ZERO));
        let outstanding = self.engine.outstanding() as u64;
        let connections = self.engine.connections() as u64;
        if self.interval.is_some() && self.span.is_some() {
            self.report_interval(end, lost, on_interval);
        } else {
            self.take_latencies();
        }
        self.engine.finish();
        let counters = *self.engine.counters();
        Report::new(start, end.saturating_since(start), connections, outstanding, lost, counters, &self.total)
    }

    fn start_at(&mut self, now: Instant) {
        if self.span.is_none() {
            (self.span, self.interval_start) = (Some((now, now)), now);
        }
    }

    fn is_over(&self, now: Instant) -> bool {
        self.interval.is_some_and(|interval| now.saturating_since(self.interval_start) >= interval)
    }

    /// Reports the interval, and starts the one that `now` belongs to.
    fn close(&mut self, now: Instant, lost: u64, on_interval: &mut dyn FnMut(&Measurements<'_>)) {
        let Some(interval) = self.interval else { return };
        self.report_interval(self.interval_start + interval, lost, on_interval);
        let nanos = (interval.as_nanos() as u64).max(1);
        let whole = now.as_nanos().saturating_sub(self.interval_start.as_nanos()) / nanos;
        self.interval_start = Instant::from_nanos(self.interval_start.as_nanos() + whole * nanos);
    }

    fn report_interval(&mut self, end: Instant, lost: u64, on_interval: &mut dyn FnMut(&Measurements<'_>)) {
        let counters = self.engine.counters().since(&self.before);
        let has_packets = counters.packets > 0 || lost > self.lost_before;
        let latencies = self.take_latencies();
        let report = Report::new(
            self.interval_start,
            end.saturating_since(self.interval_start),
            self.engine.connections() as u64,
            self.engine.outstanding() as u64,
            lost - self.lost_before,
            counters,
            &latencies,
        );
        (self.before, self.lost_before) = (*self.engine.counters(), lost);
        if has_packets {
            on_interval(&Measurements { report: &report, latencies: &latencies });
        }
        self.spare = latencies;
        self.spare.iter_mut().for_each(Distribution::clear);
    }

    /// Takes the latencies of the interval and adds them to the total.
    fn take_latencies(&mut self) -> [Distribution; 2] {
        let mut latencies = core::mem::take(&mut self.spare);
        self.engine.swap_latencies(&mut latencies);
        self.total.iter_mut().zip(&latencies).for_each(|(total, interval)| total.add(interval));
        latencies
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::EngineConfig;
    use crate::frame::{ACK, SYN};
    use crate::rules::{PortRule, ProtocolName};
    use crate::scripted::{Side, segment};

    const GET: &[u8] = b"GET / HTTP/1.1\r\n\r\n";
    const OK: &[u8] = b"HTTP/1.1 204 No\r\n\r\n";

    fn session(interval_ms: u64) -> Session {
        let engine =
            Engine::new(&EngineConfig::new(vec![PortRule::new(ProtocolName::Http, vec![80])])).unwrap();
        Session::new(engine, Some(Duration::from_millis(interval_ms)))
    }

    #[test]
    fn intervals_have_their_own_counts() {
        let mut session = session(100);
        let (client, server) = (GET.len() as u32, OK.len() as u32);
        let frames = [
            (1000, segment(Side::Client, 0, 0, SYN, &[])),
            (1001, segment(Side::Client, 1, 1, ACK, GET)),
            (1002, segment(Side::Server, 1, 1 + client, ACK, OK)),
            (1098, segment(Side::Client, 1 + client, 1 + server, ACK, GET)),
            // The answer is in the next interval.
            (1103, segment(Side::Server, 1 + server, 1 + 2 * client, ACK, OK)),
            // Two intervals have no packets.
            (1450, segment(Side::Client, 1 + 2 * client, 1 + 2 * server, ACK, GET)),
        ];
        let packets: Vec<_> =
            frames.iter().map(|(ms, frame)| (Instant::from_millis(*ms), frame.as_slice())).collect();
        let mut seen = Vec::new();
        let mut on_interval = |m: &Measurements<'_>| {
            let (r, c) = (m.report, m.report.counters);
            seen.push((
                r.start_ns / 1_000_000,
                c.requests,
                c.responses,
                r.outstanding,
                r.latency.total.mean_ns,
            ));
        };
        session.process(LinkType::Ethernet, &packets, 0, &mut on_interval);
        let total = session.finish(0, &mut on_interval);
        assert_eq!(seen, [(1000, 2, 1, 1, 1_000_000), (1100, 0, 1, 0, 5_000_000), (1400, 1, 0, 1, 0)]);
        let c = total.counters;
        assert_eq!((c.requests, c.responses, c.unanswered, total.outstanding), (3, 2, 1, 1));
        assert_eq!((total.latency.total.count, total.latency.total.mean_ns), (2, 3_000_000));
        assert_eq!((total.start_ns, total.seconds), (1_000_000_000, 0.45));
    }

    #[test]
    fn idle_sources_close_intervals_too() {
        let mut session = session(100);
        let frame = segment(Side::Client, 1, 1, ACK, GET);
        let mut count = 0;
        let mut on_interval = |_: &Measurements<'_>| count += 1;
        session.process(LinkType::Ethernet, &[(Instant::from_millis(50), &frame)], 0, &mut on_interval);
        session.advance(Instant::from_millis(149), 0, &mut on_interval);
        session.advance(Instant::from_millis(150), 0, &mut on_interval);
        session.advance(Instant::from_millis(900), 3, &mut on_interval);
        assert_eq!(count, 2, "the second one has lost packets");
    }

    #[test]
    fn a_session_without_packets_ends() {
        let report = session(100).finish(0, &mut |_| panic!("no interval"));
        assert_eq!((report.counters, report.seconds), (MonitorCounters::default(), 0.0));
    }
}
