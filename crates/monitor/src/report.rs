//! The report of an interval or of a run, as text and as JSON.

use crate::counters::MonitorCounters;
use crate::distribution::{Distribution, LatencySummary, QUANTILES};
use core::fmt;
use core::time::Duration;
use ginnel_apps::units::show_nanos;
use ginnel_stack::time::Instant;
use serde::Serialize;
use serde::ser::SerializeMap;

/// The report of an interval or of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Start in nanoseconds on the source's clock: since 1970 for captures and interfaces, since the start of
    /// the machine for stacks.
    pub start_ns: u64,
    /// Length in seconds.
    pub seconds: f64,
    /// Connections that were tracked at the end.
    pub connections: u64,
    /// Requests that waited for their responses at the end.
    pub outstanding: u64,
    /// Packets that the source lost because the monitor was too slow.
    pub source_lost: u64,
    /// Counters of the interval or of the run.
    pub counters: MonitorCounters,
    /// Latencies by priority.
    pub latency: Latencies,
}

/// Latencies by priority.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latencies {
    /// All requests.
    pub total: LatencyReport,
    /// Requests of high priority.
    pub high: LatencyReport,
    /// All others.
    pub low: LatencyReport,
}

/// A [`LatencySummary`] whose quantiles have names in JSON.
#[derive(Clone, Copy, Debug)]
pub struct LatencyReport(LatencySummary);

impl core::ops::Deref for LatencyReport {
    type Target = LatencySummary;

    fn deref(&self) -> &LatencySummary {
        &self.0
    }
}

impl Serialize for LatencyReport {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("count", &self.count)?;
        map.serialize_entry("mean_ns", &self.mean_ns)?;
        map.serialize_entry("min_ns", &self.min_ns)?;
        for (quantile, nanos) in QUANTILES.iter().zip(self.quantiles_ns) {
            map.serialize_entry(&quantile_name(*quantile), &nanos)?;
        }
        map.end()
    }
}

/// Returns the name of a quantile: `p50_ns`, `p99_9_ns`, and `max_ns` for the last one.
fn quantile_name(quantile: f64) -> String {
    match quantile {
        1.0 => "max_ns".to_owned(),
        _ => format!("p{}_ns", percent(quantile).replace('.', "_")),
    }
}

/// Formats a quantile as percent with as many digits as it needs.
fn percent(quantile: f64) -> String {
    let text = format!("{:.2}", quantile * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

impl Report {
    /// Creates a report. `latencies` are those of low and of high priority.
    #[must_use]
    pub fn new(
        start: Instant,
        length: Duration,
        connections: u64,
        outstanding: u64,
        source_lost: u64,
        counters: MonitorCounters,
        latencies: &[Distribution; 2],
    ) -> Self {
        let [low, high] = latencies;
        let total = match high.count() {
            0 => low.summary(),
            _ => {
                let mut total = low.clone();
                total.add(high);
                total.summary()
            }
        };
        let latency = Latencies {
            total: LatencyReport(total),
            high: LatencyReport(high.summary()),
            low: LatencyReport(low.summary()),
        };
        let start_ns = start.as_nanos();
        Self {
            start_ns,
            seconds: length.as_secs_f64(),
            connections,
            outstanding,
            source_lost,
            counters,
            latency,
        }
    }

    /// Formats the report as one line of JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns counts that tell why the measurement may be incomplete, with their meaning.
    #[must_use]
    pub fn doubts(&self) -> Vec<(u64, &'static str)> {
        let c = &self.counters;
        let all = [
            (self.source_lost, "packets were lost before the monitor could read them"),
            (c.missed_bytes, "bytes were not captured"),
            (c.framing_lost, "times the place of the next message was lost"),
            (c.connections_given_up, "connections were given up: their bytes are not those of the protocol"),
            (c.untracked_packets, "packets belong to connections beyond the limit"),
            (c.malformed_packets, "packets are malformed"),
            (c.abandoned, "requests could not be followed to their responses"),
            (c.responses_unmatched, "responses have no request that was seen"),
            (c.responses_ambiguous, "responses may belong to another request, of the other priority"),
        ];
        all.into_iter().filter(|(count, _)| *count > 0).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let c = &self.counters;
        let per_second = |count: u64| if self.seconds > 0.0 { count as f64 / self.seconds } else { 0.0 };
        writeln!(
            f,
            "  packets          {:>12}   {:.0}/s in {:.2} s",
            c.packets,
            per_second(c.packets),
            self.seconds
        )?;
        writeln!(
            f,
            "  connections      {:>12}   new {}, ended {}, idle {}",
            self.connections, c.connections_seen, c.connections_ended, c.connections_idle
        )?;
        writeln!(
            f,
            "  requests         {:>12}   high {}, one-way {}",
            c.requests, c.requests_high, c.one_way
        )?;
        writeln!(
            f,
            "  responses        {:>12}   high {}, {:.0}/s",
            c.responses,
            c.responses_high,
            per_second(c.responses)
        )?;
        writeln!(f, "  unanswered       {:>12}   outstanding {}", c.unanswered, self.outstanding)?;
        writeln!(
            f,
            "  retransmissions  {:>12}   of requests {}, of responses {}",
            c.request_retransmissions + c.response_retransmissions,
            c.request_retransmissions,
            c.response_retransmissions
        )?;
        writeln!(f, "  {:<10}{:>11}{:>11}{:>11}", "latency", "total", "high", "low")?;
        let l = &self.latency;
        let mut row = |name: &str, value: &dyn Fn(&LatencyReport) -> u64| {
            write!(f, "  {name:<10}")?;
            for summary in [&l.total, &l.high, &l.low] {
                match summary.count {
                    0 => write!(f, "{:>11}", "-")?,
                    _ => write!(f, "{:>11}", show_nanos(value(summary)))?,
                }
            }
            writeln!(f)
        };
        row("mean", &|summary| summary.mean_ns)?;
        row("min", &|summary| summary.min_ns)?;
        for (index, quantile) in QUANTILES.iter().enumerate() {
            let name = if *quantile == 1.0 { "max".to_owned() } else { format!("p{}", percent(*quantile)) };
            row(&name, &|summary| summary.quantiles_ns[index])?;
        }
        for (count, meaning) in self.doubts() {
            writeln!(f, "  warning: {count} {meaning}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut latencies = [Distribution::default(), Distribution::default()];
        for ms in 1..=100 {
            latencies[0].record(Instant::ZERO, Instant::from_millis(ms));
        }
        let counters = MonitorCounters { responses: 100, malformed_packets: 3, ..MonitorCounters::default() };
        Report::new(Instant::from_millis(7), Duration::from_secs(2), 5, 1, 0, counters, &latencies)
    }

    #[test]
    fn json_names_quantiles() {
        let json: serde_json::Value = serde_json::from_str(&report().to_json()).unwrap();
        assert_eq!(json["latency"]["total"]["max_ns"], 100_000_000);
        assert_eq!(json["latency"]["low"]["mean_ns"], 50_500_000);
        assert_eq!(json["latency"]["high"]["count"], 0);
        for name in ["p10_ns", "p50_ns", "p95_ns", "p99_ns", "p99_9_ns", "p99_99_ns"] {
            assert!(json["latency"]["total"][name].as_u64() > Some(0), "{name}");
        }
        assert_eq!((&json["start_ns"], &json["counters"]["responses"]), (&7_000_000.into(), &100.into()));
    }

    #[test]
    fn text_has_rows_and_warnings() {
        let text = report().to_string();
        for part in ["p99.99 ", "50/s", "outstanding 1", "warning: 3 packets are malformed"] {
            assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
        }
        assert_eq!(text.matches("warning").count(), 1);
    }
}
