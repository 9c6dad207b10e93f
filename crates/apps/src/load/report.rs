//! The report of a run, as text and as JSON.

use super::latency::Latency;
use super::options::Job;
use super::stats::{Failure, Stats};
use crate::units::show_nanos;
use core::fmt::{self, Write as _};
use serde::Serialize;
use std::collections::BTreeMap;

/// A warning is given if less than this share of the requested number was achieved.
const REACHED_SHARE_MIN: f64 = 0.99;

/// A generator that was busy for more than this share of the time may have been the bottleneck.
const BUSY_MAX: f64 = 0.9;

/// The report of a run. Times are in nanoseconds unless stated otherwise.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The generator's TCP.
    pub stack: &'static str,
    /// Host and port of the server.
    pub server: String,
    /// The requested load.
    pub requested: Requested,
    /// The measured time in seconds.
    pub measured_seconds: f64,
    /// The achieved load.
    pub achieved: Achieved,
    /// Requests in the measured time.
    pub requests: RequestCounts,
    /// Responses by status class; for values: hits, misses and errors.
    pub statuses: BTreeMap<&'static str, u64>,
    /// Failures by kind; kinds that did not occur are left out.
    pub failures: BTreeMap<&'static str, u64>,
    /// Set if the run was given up: the seconds for which requests failed without a single response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gave_up_after_seconds: Option<f64>,
    /// Set if the server answered nothing at the end of the run: the second of the measured time in which the
    /// last answer came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answered_until_seconds: Option<f64>,
    /// Idle connections that the server closed or reset.
    pub idle_connections_lost: u64,
    /// Share of the time that the generator's busiest worker was busy, if measured.
    pub generator_busy: Option<f64>,
    /// Latencies.
    pub latency_ns: Latencies,
    /// Reasons why the result may be wrong.
    pub warnings: Vec<String>,
}

/// The requested load.
#[derive(Clone, Debug, Serialize)]
pub struct Requested {
    /// `open` or `closed`.
    pub r#loop: &'static str,
    /// Requests per second, in an open loop.
    pub rate: Option<f64>,
    /// True if the distances between requests are random.
    pub poisson: bool,
    /// Number of connections.
    pub connections: u32,
    /// True if a connection carries many requests.
    pub keep_alive: bool,
    /// Requests in flight on each connection.
    pub pipeline: u16,
    /// Threads of the generator.
    pub workers: u32,
    /// True if the workers are shards of one stack.
    #[serde(skip_serializing_if = "core::ops::Not::not")]
    pub shards: bool,
}

/// The achieved load.
#[derive(Clone, Debug, Serialize)]
pub struct Achieved {
    /// Responses completed within the measured time, per second.
    pub requests_per_second: f64,
    /// Connections established per second.
    pub connections_per_second: f64,
    /// Most connections open at the same time.
    pub connections_max: u64,
    /// Bytes received per second.
    pub bytes_per_second: f64,
}

/// Counts of requests.
#[derive(Clone, Debug, Serialize)]
pub struct RequestCounts {
    /// Requests begun.
    pub started: u64,
    /// Requests answered.
    pub completed: u64,
    /// Requests without a response at the end.
    pub unanswered: u64,
    /// Requests that were due but never begun, for lack of a connection.
    pub not_started: u64,
}

/// Distributions of all latencies.
#[derive(Clone, Debug, Serialize)]
pub struct Latencies {
    /// Until the connection was established.
    pub connect: Quantiles,
    /// Until the first byte of the response.
    pub first_byte: Quantiles,
    /// Until the response was complete.
    pub total: Quantiles,
    /// Delay between the due time and the start of requests; only in an open loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lag: Option<Quantiles>,
}

/// Quantiles of one distribution.
#[derive(Clone, Debug, Serialize)]
pub struct Quantiles {
    /// Number of values.
    pub count: u64,
    /// Mean.
    pub mean: f64,
    /// Standard deviation.
    pub stdev: f64,
    /// Smallest value.
    pub min: u64,
    /// Median.
    pub p50: u64,
    /// 75 % are below.
    pub p75: u64,
    /// 90 % are below.
    pub p90: u64,
    /// 95 % are below.
    pub p95: u64,
    /// 99 % are below.
    pub p99: u64,
    /// 99.9 % are below.
    pub p99_9: u64,
    /// 99.99 % are below.
    pub p99_99: u64,
    /// Largest value.
    pub max: u64,
}

impl From<&Latency> for Quantiles {
    fn from(latency: &Latency) -> Self {
        let h = latency.histogram();
        let q = |quantile| h.value_at_quantile(quantile).min(h.max());
        Self {
            count: h.len(),
            mean: h.mean(),
            stdev: h.stdev(),
            min: if h.is_empty() { 0 } else { h.min() },
            p50: q(0.5),
            p75: q(0.75),
            p90: q(0.9),
            p95: q(0.95),
            p99: q(0.99),
            p99_9: q(0.999),
            p99_99: q(0.9999),
            max: h.max(),
        }
    }
}

impl Report {
    /// Creates the report of a run.
    pub fn new(job: &Job, stats: &Stats) -> Self {
        let (options, c) = (&job.common, &stats.counters);
        let seconds = stats.measured.as_secs_f64();
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let classes = job.requests.protocol().classes();
        let is_seen = |(_, count): &(&'static str, u64)| *count > 0;
        let mut report = Self {
            stack: options.stack.name(),
            server: job.server.clone(),
            requested: Requested {
                r#loop: if options.rate.is_some() { "open" } else { "closed" },
                rate: options.rate,
                poisson: options.poisson,
                connections: options.connections,
                keep_alive: !job.plan.is_short(),
                pipeline: job.plan.pipeline,
                workers: options.workers(),
                shards: options.shards.is_some_and(|shards| shards > 1),
            },
            measured_seconds: seconds,
            achieved: Achieved {
                requests_per_second: per_second(c.completed_in_time),
                connections_per_second: per_second(c.connected),
                connections_max: c.open_max,
                bytes_per_second: per_second(c.bytes),
            },
            requests: RequestCounts {
                started: c.started,
                completed: c.completed,
                unanswered: c.unanswered,
                not_started: c.not_started,
            },
            statuses: classes.into_iter().zip(c.by_class).filter(is_seen).collect(),
            failures: Failure::ALL.iter().map(|f| f.name()).zip(c.failures).filter(is_seen).collect(),
            gave_up_after_seconds: job.plan.give_up.filter(|_| stats.gave_up).map(|time| time.as_secs_f64()),
            answered_until_seconds: stats.answered_until.map(|time| time.as_secs_f64()),
            idle_connections_lost: c.lost_idle,
            generator_busy: stats.busy,
            latency_ns: Latencies {
                connect: (&stats.connect).into(),
                first_byte: (&stats.first_byte).into(),
                total: (&stats.total).into(),
                lag: options.rate.is_some().then(|| (&stats.lag).into()),
            },
            warnings: Vec::new(),
        };
        report.warnings = report.find_warnings();
        report
    }

    /// Returns a warning for each reason why the result may be wrong.
    fn find_warnings(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        if let Some(rate) = self.requested.rate.filter(|_| !self.requested.poisson) {
            // Requests in flight at the end count as missing only if there are more than the median latency
            // explains.
            let in_flight = self.latency_ns.total.p50 as f64 / 1e9 / self.measured_seconds.max(1e-9);
            let (reached, possible) = (self.achieved.requests_per_second, rate * (1.0 - in_flight.min(1.0)));
            if reached < possible * REACHED_SHARE_MIN {
                doubts.push(format!("{reached:.0} of {rate:.0} requests/s were achieved"));
            }
        }
        if self.requests.not_started > 0 {
            let count = self.requests.not_started;
            doubts
                .push(format!("{count} requests were due but found no free connection: raise --connections"));
        }
        let (open, wanted) = (self.achieved.connections_max, u64::from(self.requested.connections));
        if (self.requested.rate.is_none() || self.requested.keep_alive) && open < wanted {
            doubts.push(format!("{open} of {wanted} connections were open at the same time"));
        }
        if let Some(busy) = self.generator_busy.filter(|busy| *busy > BUSY_MAX) {
            let workers = match (self.requested.workers, self.requested.shards) {
                (1, _) => "it",
                (_, true) => "its busiest shard",
                (_, false) => "its busiest worker",
            };
            let percent = 100.0 * busy;
            doubts.push(format!(
                "the generator may have been the bottleneck: {workers} was busy for {percent:.0} % of the time"
            ));
        }
        if let Some(seconds) = self.gave_up_after_seconds {
            doubts.push(format!(
                "the run was given up: requests failed for {seconds} s, and none was answered"
            ));
        }
        if let Some(seconds) = self.answered_until_seconds.filter(|_| self.gave_up_after_seconds.is_none()) {
            doubts.push(format!("the server answered nothing after {seconds:.1} s"));
        }
        if self.requests.completed == 0 {
            doubts.push("no request was answered".to_owned());
        }
        doubts
    }

    /// Returns the number of unsuccessful responses: HTTP statuses except 2xx and 3xx; values that were not
    /// found, and errors.
    pub fn unsuccessful(&self) -> u64 {
        let is_success = |class: &str| matches!(class, "2xx" | "3xx" | "hit");
        self.statuses.iter().filter(|(class, _)| !is_success(class)).map(|(_, count)| count).sum()
    }

    /// Formats the report as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let r = &self.requested;
        let kind = if r.keep_alive { "keep-alive" } else { "short" };
        write!(
            f,
            "{} over {}: {} {kind} connections, {} loop",
            self.server, self.stack, r.connections, r.r#loop
        )?;
        if let Some(rate) = r.rate {
            write!(f, " at {rate}/s{}", if r.poisson { " (Poisson)" } else { "" })?;
        }
        if r.pipeline > 1 {
            write!(f, ", {} requests in flight on each", r.pipeline)?;
        }
        if r.workers > 1 {
            write!(f, ", {} {}", r.workers, if r.shards { "shards" } else { "workers" })?;
        }
        writeln!(f, ", {:.2} s", self.measured_seconds)?;
        let a = &self.achieved;
        writeln!(f, "  requests/s      {:>14.1}", a.requests_per_second)?;
        writeln!(
            f,
            "  connections/s   {:>14.1}   most open at the same time {}",
            a.connections_per_second, a.connections_max
        )?;
        writeln!(f, "  received        {:>14.3} MB/s", a.bytes_per_second / 1e6)?;
        let n = &self.requests;
        writeln!(
            f,
            "  requests        {:>14}   answered {}, unanswered {}, not begun {}",
            n.started, n.completed, n.unanswered, n.not_started
        )?;
        writeln!(f, "  status          {}", counts(&self.statuses))?;
        writeln!(f, "  failures        {}", counts(&self.failures))?;
        if let Some(busy) = self.generator_busy {
            writeln!(f, "  generator busy  {:>14.1} %", 100.0 * busy)?;
        }
        if self.idle_connections_lost > 0 {
            writeln!(f, "  idle lost       {:>14}", self.idle_connections_lost)?;
        }
        writeln!(
            f,
            "  {:<12}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}",
            "latency", "mean", "p50", "p90", "p99", "p99.9", "p99.99", "max"
        )?;
        let l = &self.latency_ns;
        let rows = [
            ("connect", Some(&l.connect)),
            ("first byte", Some(&l.first_byte)),
            ("total", Some(&l.total)),
            ("lag", l.lag.as_ref()),
        ];
        for (name, q) in rows {
            let Some(q) = q.filter(|q| q.count > 0) else { continue };
            write!(f, "  {name:<12}")?;
            for nanos in [q.mean as u64, q.p50, q.p90, q.p99, q.p99_9, q.p99_99, q.max] {
                write!(f, "{:>11}", show_nanos(nanos))?;
            }
            writeln!(f)?;
        }
        for warning in &self.warnings {
            writeln!(f, "  warning: {warning}")?;
        }
        Ok(())
    }
}

fn counts(counts: &BTreeMap<&'static str, u64>) -> String {
    let mut text = String::new();
    for (name, count) in counts {
        // Writing to a `String` never fails.
        let _ = write!(text, "{}{name} {count}", if text.is_empty() { "" } else { ", " });
    }
    if text.is_empty() { "none".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::super::options::tests::job;
    use super::*;
    use core::time::Duration;
    use ginnel::Instant;

    fn stats() -> Stats {
        let mut stats = Stats { measured: Duration::from_secs(10), ..Stats::default() };
        let c = &mut stats.counters;
        (c.started, c.completed, c.connected, c.bytes, c.open_max) = (1_000, 990, 990, 5_000_000, 7);
        c.completed_in_time = 990;
        c.by_class[2] = 980;
        c.by_class[5] = 10;
        c.failures[Failure::Reset as usize] = 10;
        for ms in 1..=100 {
            stats.total.record(Instant::ZERO, Instant::from_millis(ms));
        }
        stats
    }

    #[test]
    fn json_has_the_requested_and_achieved_load() {
        let options = job("http://10.0.0.1:1/ --rate 100 -c 50");
        let json: serde_json::Value =
            serde_json::from_str(&Report::new(&options, &stats()).to_json()).unwrap();
        assert_eq!(json["requested"]["rate"], 100.0);
        assert_eq!(json["achieved"]["requests_per_second"], 99.0);
        assert_eq!(json["achieved"]["bytes_per_second"], 500_000.0);
        assert_eq!(json["statuses"]["5xx"], 10);
        assert_eq!(Report::new(&options, &stats()).unsuccessful(), 10);
        assert_eq!(json["failures"]["reset"], 10);
        assert!(json["failures"].get("refused").is_none());
        let p50 = json["latency_ns"]["total"]["p50"].as_u64().unwrap();
        assert!(p50.abs_diff(50_000_000) < 100_000, "{p50}");
        assert_eq!(json["latency_ns"]["connect"]["count"], 0);
        assert_eq!(json["latency_ns"]["lag"]["count"], 0);
        assert_eq!(json["warnings"].as_array().unwrap().len(), 0);
    }

    #[test]
    fn missed_goals_give_warnings() {
        let options = job("http://10.0.0.1:1/ --rate 200 -c 50 -k");
        let mut stats = stats();
        stats.counters.not_started = 1_000;
        let text = Report::new(&options, &stats).to_string();
        assert!(text.contains("warning: 99 of 200 requests/s"), "{text}");
        assert!(text.contains("warning: 1000 requests were due"), "{text}");
        assert!(text.contains("warning: 7 of 50 connections"), "{text}");
    }

    #[test]
    fn a_busy_generator_gives_a_warning() {
        let report = |busy, line| Report::new(&job(line), &Stats { busy, ..stats() });
        let text = report(Some(0.97), "http://10.0.0.1:1/ -c 7 --stack light").to_string();
        assert!(text.contains("10.0.0.1:1 over light") && text.contains(" 97.0 %"), "{text}");
        assert!(text.contains("bottleneck: it was busy for 97 %"), "{text}");
        let text = report(Some(0.97), "http://10.0.0.1:1/ -c 7 --workers 3").to_string();
        assert!(text.contains("bottleneck: its busiest worker was busy for 97 %"), "{text}");
        let text = report(Some(0.9), "http://10.0.0.1:1/ -c 7").to_string();
        assert!(!text.contains("bottleneck") && text.contains("90.0 %"), "{text}");
        assert!(!report(None, "http://10.0.0.1:1/ -c 7").to_string().contains("busy"));
    }

    #[test]
    fn the_table_names_everything_once() {
        let options = job("http://10.0.0.1:1/ -c 7");
        let text = Report::new(&options, &stats()).to_string();
        for part in ["requests/s  ", "2xx 980, 5xx 10", "reset 10", "p99.9 ", "total", "closed loop"] {
            assert_eq!(text.matches(part).count(), 1, "{part}: {text}");
        }
        assert!(!text.contains("warning") && !text.contains("connect  "), "{text}");
    }

    #[test]
    fn an_empty_run_has_a_valid_report() {
        let options = job("http://10.0.0.1:1/");
        let json = Report::new(&options, &Stats::default()).to_json();
        assert!(!json.contains("null,\"poisson\":null") && !json.contains("NaN"), "{json}");
        assert!(json.contains("no request was answered"));
    }
}
