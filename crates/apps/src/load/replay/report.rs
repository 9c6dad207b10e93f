//! The report of a replay, as text, as JSON and as a picture.

use super::ReplayJob;
use super::recording::CaptureAccount;
use super::stats::{ReplayCounters, ReplayStats};
use crate::load::messages::picture::{Curve, Picture};
use crate::load::report::Quantiles;
use crate::load::stats::Failure;
use crate::units::show_nanos;
use core::fmt;
use serde::Serialize;
use std::collections::BTreeMap;

/// A generator that was busy for more than this share of the time may have been the bottleneck.
const BUSY_MAX: f64 = 0.9;

/// The report of a replay. Times are in nanoseconds unless stated otherwise.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayReport {
    /// The generator's TCP.
    pub stack: &'static str,
    /// The servers.
    pub servers: Vec<String>,
    /// Name of the capture.
    pub file: String,
    /// Packets of the capture, and connections that are left out.
    pub capture: CaptureAccount,
    /// The plan of the replay.
    pub requested: RequestedReplay,
    /// Seconds until the last bytes were sent.
    pub sending_seconds: f64,
    /// Connections of the run.
    pub connections: ReplayConnections,
    /// Requests that have an answer in the capture.
    pub requests: ReplayRequests,
    /// Bytes.
    pub bytes: ReplayBytes,
    /// Failures of connections by kind; kinds that did not occur are left out.
    pub failures: BTreeMap<&'static str, u64>,
    /// Share of the time that the generator's busiest worker was busy, if measured.
    pub generator_busy: Option<f64>,
    /// Distributions of times.
    pub latency_ns: ReplayLatencies,
    /// Goals that were not reached. The command then ends with exit status 1.
    pub missed: Vec<String>,
    /// Reasons why the result may be wrong.
    pub warnings: Vec<String>,
    #[serde(skip)]
    stats: ReplayStats,
}

/// The plan of a replay.
#[derive(Clone, Debug, Serialize)]
pub struct RequestedReplay {
    /// Factor of the speed.
    pub speed: f64,
    /// Passes over the capture.
    pub repeat: u32,
    /// Connections for each recorded one.
    pub copies: u32,
    /// Connections of the run.
    pub connections: u64,
    /// Planned length of the run in seconds.
    pub seconds: f64,
    /// Threads of the generator.
    pub workers: u32,
}

/// Counts of connections.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ReplayConnections {
    /// Connections that became due.
    pub due: u64,
    /// Connections that were established.
    pub established: u64,
    /// Connections that ended by a failure.
    pub failed: u64,
    /// Connections whose answers have another number of bytes than the recorded ones.
    pub mismatched: u64,
}

/// Requests by their outcome. Each outcome is counted by itself, so that the sum can be compared with `due`.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ReplayRequests {
    /// Requests that became due with their connections.
    pub due: u64,
    /// Requests whose answer began after their last byte was sent.
    pub answered: u64,
    /// Requests whose answer began before their last byte was sent.
    pub answered_early: u64,
    /// Requests that were sent, and whose answer did not begin.
    pub unanswered: u64,
    /// Requests that were not sent completely.
    pub not_sent: u64,
    /// True if the requests that were due are the sum of the others.
    pub is_complete: bool,
}

/// Counts of bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ReplayBytes {
    /// Bytes sent.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
    /// Bytes that the recorded servers sent and these did not.
    pub missing: u64,
    /// Bytes that these servers sent beyond those of the recorded ones.
    pub excess: u64,
}

/// Distributions of times.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayLatencies {
    /// From the intended opening of a connection until it was established.
    pub connect: Quantiles,
    /// From the intended time of the last byte of a request until the first byte of its answer.
    pub first_byte: Quantiles,
    /// From the intended time of bytes until they were given to the network.
    pub send_error: Quantiles,
}

impl ReplayReport {
    /// Creates the report of a run.
    pub fn new(job: &ReplayJob, stats: &ReplayStats) -> Self {
        let (plan, c) = (&job.plan, &stats.counters);
        let accounted = c.answered + c.answered_early + c.unanswered + c.not_sent;
        let mut report = Self {
            stack: job.common.stack.name(),
            servers: job.targets.iter().map(ToString::to_string).collect(),
            file: job.capture.clone(),
            capture: plan.recording.account.clone(),
            requested: RequestedReplay {
                speed: plan.speed,
                repeat: plan.repeat,
                copies: plan.copies,
                connections: plan.connections(),
                seconds: plan.length().as_secs_f64(),
                workers: job.common.workers(),
            },
            sending_seconds: stats.sending.as_secs_f64(),
            connections: ReplayConnections {
                due: c.connections_due,
                established: c.connections,
                failed: c.connections_failed,
                mismatched: c.connections_mismatched,
            },
            requests: ReplayRequests {
                due: c.due,
                answered: c.answered,
                answered_early: c.answered_early,
                unanswered: c.unanswered,
                not_sent: c.not_sent,
                is_complete: c.due == accounted,
            },
            bytes: ReplayBytes {
                sent: c.bytes_sent,
                received: c.bytes,
                missing: c.missing_bytes,
                excess: c.excess_bytes,
            },
            failures: Failure::ALL
                .iter()
                .map(|failure| failure.name())
                .zip(c.failures)
                .filter(|(_, count)| *count > 0)
                .collect(),
            generator_busy: stats.busy,
            latency_ns: ReplayLatencies {
                connect: (&stats.connect).into(),
                first_byte: (&stats.first_byte).into(),
                send_error: (&stats.send_error).into(),
            },
            missed: Vec::new(),
            warnings: Vec::new(),
            stats: stats.clone(),
        };
        report.missed = report.find_missed(c, stats.is_interrupted);
        report.warnings = report.find_warnings(stats.is_interrupted);
        report
    }

    /// Returns a sentence for each goal that was not reached.
    fn find_missed(&self, c: &ReplayCounters, is_interrupted: bool) -> Vec<String> {
        let mut missed = Vec::new();
        let asked = self.requested.connections;
        if !is_interrupted && c.connections < asked {
            missed.push(format!("{} of {asked} connections were established", c.connections));
        }
        if c.due > 0 && c.answered + c.answered_early == 0 {
            missed.push("no request was answered".to_owned());
        }
        if !self.requests.is_complete {
            missed.push(format!(
                "the account is wrong, which is an error of the generator: {} due, {} answered, {} answered \
                 early, {} unanswered, {} not sent",
                c.due, c.answered, c.answered_early, c.unanswered, c.not_sent
            ));
        }
        missed
    }

    /// Returns a sentence for each reason to doubt the result.
    fn find_warnings(&self, is_interrupted: bool) -> Vec<String> {
        let (mut warnings, capture, bytes) = (Vec::new(), &self.capture, &self.bytes);
        if is_interrupted {
            warnings.push("the run was ended before its time".to_owned());
        }
        if let Some(problem) = &capture.cut {
            warnings.push(format!("{problem}; the {} packets before that are replayed", capture.packets));
        }
        if capture.left_out_midstream > 0 {
            warnings.push(format!(
                "{} connections are left out because their beginning is not in the capture",
                capture.left_out_midstream
            ));
        }
        if capture.left_out_incomplete > 0 {
            warnings.push(format!(
                "{} connections are left out because bytes of their clients are not in the capture",
                capture.left_out_incomplete
            ));
        }
        if self.connections.mismatched > 0 {
            warnings.push(format!(
                "answers of {} connections differ in length from the recorded ones: {} bytes are missing, {} in \
                 excess; after such an answer latencies may belong to another request of the connection",
                self.connections.mismatched, bytes.missing, bytes.excess
            ));
        }
        if self.requests.answered_early > 0 {
            warnings.push(format!(
                "{} requests were answered before they were sent completely, so they have no latency",
                self.requests.answered_early
            ));
        }
        if self.requests.unanswered + self.requests.not_sent > 0 {
            warnings.push(format!(
                "{} requests were not answered, and {} not sent completely",
                self.requests.unanswered, self.requests.not_sent
            ));
        }
        let (error, latency) = (&self.latency_ns.send_error, &self.latency_ns.first_byte);
        if latency.count > 0 && error.p50 > latency.p50 / 2 {
            warnings.push(format!(
                "half of the sends were {} late or more, which is a large part of the latency",
                show_nanos(error.p50)
            ));
        }
        if let Some(busy) = self.generator_busy.filter(|busy| *busy > BUSY_MAX) {
            warnings.push(format!(
                "the generator may have been the bottleneck: its busiest worker was busy for {:.0} % of the time",
                100.0 * busy
            ));
        }
        warnings
    }

    /// Formats the report as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Draws the distributions of latencies and of the send-time error.
    pub fn to_svg(&self) -> String {
        let ReplayStats { first_byte, connect, send_error, .. } = &self.stats;
        let curves = [
            Curve { name: "first byte of the answer", color: "#2471a3", values: first_byte },
            Curve { name: "connect", color: "#229954", values: connect },
            Curve { name: "send-time error", color: "#7f8c8d", values: send_error },
        ];
        let title = format!("ginnel load replay: {} over {}", self.servers.join(", "), self.stack);
        let subtitle = format!(
            "{}: {} connections, {} requests in {:.0} s, {} answered, {} unanswered",
            self.file,
            self.connections.established,
            self.requests.due,
            self.sending_seconds,
            self.requests.answered + self.requests.answered_early,
            self.requests.unanswered
        );
        Picture { title: &title, subtitle: &subtitle, curves: &curves }.to_string()
    }
}

impl fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (asked, capture, requests) = (&self.requested, &self.capture, &self.requests);
        let servers = self.servers.join(", ");
        write!(f, "{servers} over {}: {} connections of {}", self.stack, capture.connections, self.file)?;
        writeln!(
            f,
            " × {} copies × {} passes, speed {}, {:.2} s",
            asked.copies, asked.repeat, asked.speed, self.sending_seconds
        )?;
        writeln!(
            f,
            "  capture         {:>14} packets, {} retransmissions, {} early segments; left out: {} connections \
             without beginning, {} with missing bytes",
            capture.packets,
            capture.retransmissions,
            capture.early_segments,
            capture.left_out_midstream,
            capture.left_out_incomplete
        )?;
        let connections = &self.connections;
        writeln!(
            f,
            "  connections     {:>14}   of {}, {} failed, {} with answers of other lengths",
            connections.established, asked.connections, connections.failed, connections.mismatched
        )?;
        writeln!(
            f,
            "  requests        {:>14} = {} answered + {} answered early + {} unanswered + {} not sent",
            requests.due, requests.answered, requests.answered_early, requests.unanswered, requests.not_sent
        )?;
        let bytes = &self.bytes;
        writeln!(
            f,
            "  bytes           {:>14}   sent, {} received, {} missing, {} in excess",
            bytes.sent, bytes.received, bytes.missing, bytes.excess
        )?;
        let failures: Vec<String> =
            self.failures.iter().map(|(name, count)| format!("{name} {count}")).collect();
        let failures = if failures.is_empty() { "none".to_owned() } else { failures.join(", ") };
        writeln!(f, "  failures        {failures}")?;
        if let Some(busy) = self.generator_busy {
            writeln!(f, "  generator busy  {:>14.1} %", 100.0 * busy)?;
        }
        writeln!(
            f,
            "  {:<12}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}",
            "latency", "mean", "p50", "p90", "p99", "p99.9", "p99.99", "max"
        )?;
        let l = &self.latency_ns;
        let rows = [("connect", &l.connect), ("first byte", &l.first_byte), ("send error", &l.send_error)];
        for (name, q) in rows.into_iter().filter(|(_, q)| q.count > 0) {
            write!(f, "  {name:<12}")?;
            for nanos in [q.mean as u64, q.p50, q.p90, q.p99, q.p99_9, q.p99_99, q.max] {
                write!(f, "{:>11}", show_nanos(nanos))?;
            }
            writeln!(f)?;
        }
        self.missed.iter().try_for_each(|missed| writeln!(f, "  not reached: {missed}"))?;
        self.warnings.iter().try_for_each(|warning| writeln!(f, "  warning: {warning}"))
    }
}
