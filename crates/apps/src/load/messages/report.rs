//! The report of a run that sends messages, as text, as JSON and as a chart in SVG.

use super::MessageJob;
use super::picture::{Curve, Picture};
use super::plan::{Gaps, Kind, PriorityGrain, SendMode, Service};
use super::stats::{KindCounts, MessageStats};
use crate::load::report::Quantiles;
use crate::load::stats::Failure;
use crate::units::show_nanos;
use core::fmt;
use serde::Serialize;
use std::collections::BTreeMap;

/// Least share of the requested rate that counts as reached: the last messages may be sent a little late.
const REACHED_SHARE_MIN: f64 = 0.99;
/// A generator that was busy for more than this share of the time may have been the bottleneck.
const BUSY_MAX: f64 = 0.9;

/// The report of a run. Times are in nanoseconds unless stated otherwise.
#[derive(Clone, Debug, Serialize)]
pub struct MessageReport {
    /// `iot` or `echo`.
    pub service: &'static str,
    /// The generator's TCP.
    pub stack: &'static str,
    /// The server as it was given.
    pub server: String,
    /// The requested load.
    pub requested: RequestedLoad,
    /// The achieved load.
    pub achieved: AchievedLoad,
    /// Account of the messages.
    pub messages: MessageAccount,
    /// Connections.
    pub connections: ConnectionCounts,
    /// Failures of connections by kind; kinds that did not occur are left out.
    pub failures: BTreeMap<&'static str, u64>,
    /// Share of the time that the generator's busiest worker was busy, if measured.
    pub generator_busy: Option<f64>,
    /// Distributions of times.
    pub latency_ns: MessageLatencies,
    /// Goals that were not reached. The command then ends with exit status 1.
    pub missed: Vec<String>,
    /// Reasons why the result may be wrong.
    pub warnings: Vec<String>,
    #[serde(skip)]
    stats: MessageStats,
}

/// The requested load.
#[derive(Clone, Debug, Serialize)]
pub struct RequestedLoad {
    /// Number of connections.
    pub connections: u32,
    /// Number of messages that are due at the same time.
    pub burst: u32,
    /// Seconds in which every connection sends one message.
    pub epoch_seconds: f64,
    /// Seconds in which messages are due.
    pub seconds: f64,
    /// Messages of the run.
    pub messages: u64,
    /// Messages per second.
    pub messages_per_second: f64,
    /// Share of urgent requests among all messages.
    pub high_share: f64,
    /// Share of ordinary requests among all messages. All others are heartbeats.
    pub low_share: f64,
    /// Shortest and longest message in bytes.
    pub length_bytes: (u16, u16),
    /// `normal`, `burst` or `precision`.
    pub mode: &'static str,
    /// `fixed`, `uniform` or `poisson`.
    pub gaps: &'static str,
    /// `message` or `flow`.
    pub priority_grain: &'static str,
    /// Threads of the generator.
    pub workers: u32,
}

/// The achieved load.
#[derive(Clone, Debug, Serialize)]
pub struct AchievedLoad {
    /// Connections that were open when the first message was due.
    pub connections: u64,
    /// Seconds until they were open.
    pub setup_seconds: f64,
    /// Messages sent per second of `sending_seconds`.
    pub messages_per_second: f64,
    /// Seconds from the planned start until the last message was sent; at least the planned length of a run
    /// that was not interrupted.
    pub sending_seconds: f64,
    /// Answers per second of `sending_seconds`.
    pub answers_per_second: f64,
    /// Bytes received.
    pub bytes_received: u64,
}

/// Counts of one kind of request.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RequestAccount {
    /// Requests sent.
    pub sent: u64,
    /// Answers.
    pub answered: u64,
    /// Requests without an answer.
    pub unanswered: u64,
}

/// Account of the messages. Every number is counted on its own, so that comparing sums finds mistakes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MessageAccount {
    /// Messages that became due.
    pub due: u64,
    /// Messages that were sent.
    pub sent: u64,
    /// Messages that were not sent because their connection was not open.
    pub not_sent_closed: u64,
    /// Messages that were not sent because the network accepted nothing more on their connection.
    pub not_sent_full: u64,
    /// Heartbeats sent.
    pub heartbeats: u64,
    /// Answers to requests.
    pub answered: u64,
    /// Answers among `answered` that report an error of the server.
    pub answered_error: u64,
    /// Requests without an answer, at the end or when their connection was lost.
    pub unanswered: u64,
    /// Requests among `unanswered` whose connection was lost.
    pub unanswered_connection_lost: u64,
    /// Answers that may have been counted for the wrong priority.
    pub answers_ambiguous: u64,
    /// Urgent requests.
    pub high: RequestAccount,
    /// Ordinary requests.
    pub low: RequestAccount,
    /// True if due = sent + not sent, and sent = answered + heartbeats + unanswered, also for each priority.
    pub is_complete: bool,
}

/// Counts of connections.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ConnectionCounts {
    /// Connections that were open when the last message had been sent.
    pub open_at_end: u64,
    /// Connections that ended before the end of the run. Each is opened again.
    pub lost: u64,
}

/// Distributions of times.
#[derive(Clone, Debug, Serialize)]
pub struct MessageLatencies {
    /// From the planned start of a connection until it was established.
    pub connect: Quantiles,
    /// Of urgent requests, from their due time until the answer was complete.
    pub high: Quantiles,
    /// Of ordinary requests, from their due time until the answer was complete.
    pub low: Quantiles,
    /// Of all requests, from their due time until the answer was complete.
    pub total: Quantiles,
    /// From the due time of a message until it was given to the network.
    pub send_error: Quantiles,
}

impl MessageReport {
    /// Creates the report of a run.
    pub fn new(job: &MessageJob, stats: &MessageStats) -> Self {
        let (plan, c) = (&job.plan, &stats.counters);
        let sum = |counts: &KindCounts| counts.iter().sum::<u64>();
        let heartbeats = match plan.service {
            Service::Iot => c.sent[Kind::Heartbeat as usize],
            Service::Echo => 0,
        };
        let account = |kind: Kind| RequestAccount {
            sent: c.sent[kind as usize],
            answered: c.answered[kind as usize],
            unanswered: c.lost[kind as usize] + c.unanswered[kind as usize],
        };
        let (high, low) = (account(Kind::High), account(Kind::Low));
        let is_balanced = |a: RequestAccount| a.sent == a.answered + a.unanswered;
        let (due, sent, answered) = (sum(&c.due), sum(&c.sent), sum(&c.answered));
        let unanswered = sum(&c.lost) + sum(&c.unanswered);
        let sending = stats.sending.max(if stats.is_interrupted { stats.sending } else { job.duration });
        let seconds = sending.as_secs_f64();
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let mut total = stats.high.clone();
        total.add(&stats.low);
        let mut report = Self {
            service: if plan.service == Service::Iot { "iot" } else { "echo" },
            stack: job.common.stack.name(),
            server: job.server.clone(),
            requested: RequestedLoad {
                connections: plan.connections,
                burst: plan.burst,
                epoch_seconds: plan.epoch.as_secs_f64(),
                seconds: job.duration.as_secs_f64(),
                messages: plan.messages,
                messages_per_second: f64::from(plan.connections) / plan.epoch.as_secs_f64(),
                high_share: plan.high_share,
                low_share: plan.low_share,
                length_bytes: plan.length_bytes,
                mode: match job.mode {
                    SendMode::Normal => "normal",
                    SendMode::Burst => "burst",
                    SendMode::Precision => "precision",
                },
                gaps: match plan.gaps {
                    Gaps::Fixed => "fixed",
                    Gaps::Uniform => "uniform",
                    Gaps::Poisson => "poisson",
                },
                priority_grain: match plan.grain {
                    PriorityGrain::Message => "message",
                    PriorityGrain::Flow => "flow",
                },
                workers: job.common.workers(),
            },
            achieved: AchievedLoad {
                connections: c.open_at_start,
                setup_seconds: stats.setup.as_secs_f64(),
                messages_per_second: per_second(sent),
                sending_seconds: seconds,
                answers_per_second: per_second(answered),
                bytes_received: c.bytes,
            },
            messages: MessageAccount {
                due,
                sent,
                not_sent_closed: c.not_sent_closed,
                not_sent_full: c.not_sent_full,
                heartbeats,
                answered,
                answered_error: c.answered_error,
                unanswered,
                unanswered_connection_lost: sum(&c.lost),
                answers_ambiguous: c.answers_ambiguous,
                high,
                low,
                is_complete: due == sent + c.not_sent_closed + c.not_sent_full
                    && sent == answered + heartbeats + unanswered
                    && is_balanced(high)
                    && is_balanced(low),
            },
            connections: ConnectionCounts { open_at_end: c.open_at_end, lost: c.connections_lost },
            failures: Failure::ALL
                .iter()
                .map(|failure| failure.name())
                .zip(c.failures)
                .filter(|(_, count)| *count > 0)
                .collect(),
            generator_busy: stats.busy,
            latency_ns: MessageLatencies {
                connect: (&stats.connect).into(),
                high: (&stats.high).into(),
                low: (&stats.low).into(),
                total: (&total).into(),
                send_error: (&stats.send_error).into(),
            },
            missed: Vec::new(),
            warnings: Vec::new(),
            stats: stats.clone(),
        };
        report.missed = report.find_missed(stats.is_interrupted);
        report.warnings = report.find_warnings(stats.is_interrupted);
        report
    }

    /// Returns a sentence for each goal that was not reached.
    fn find_missed(&self, is_interrupted: bool) -> Vec<String> {
        let mut missed = Vec::new();
        let (asked, reached, messages) = (&self.requested, &self.achieved, &self.messages);
        if reached.connections < u64::from(asked.connections) {
            missed.push(format!(
                "{} of {} connections were open when the first message was due",
                reached.connections, asked.connections
            ));
        }
        if !is_interrupted && messages.due < asked.messages {
            missed.push(format!("{} of {} messages became due", messages.due, asked.messages));
        }
        // Random gaps may take longer than planned.
        let goal = asked.messages as f64 / asked.seconds.max(self.stats.due_for.as_secs_f64());
        if !is_interrupted && reached.messages_per_second < goal * REACHED_SHARE_MIN {
            missed.push(format!("{:.1} of {goal:.1} messages/s were achieved", reached.messages_per_second));
        }
        if messages.high.sent + messages.low.sent > 0 && messages.answered == 0 {
            missed.push("no request was answered".to_owned());
        }
        if messages.sent == 0 {
            missed.push("no message was sent".to_owned());
        }
        if !messages.is_complete {
            missed.push(format!(
                "the account is wrong, which is an error of the generator: {} due, {} sent, {} answered, {} \
                 heartbeats, {} unanswered",
                messages.due, messages.sent, messages.answered, messages.heartbeats, messages.unanswered
            ));
        }
        missed
    }

    /// Returns a sentence for each reason to doubt the result.
    fn find_warnings(&self, is_interrupted: bool) -> Vec<String> {
        let (mut warnings, messages) = (Vec::new(), &self.messages);
        if is_interrupted {
            warnings.push("the run was ended before its time".to_owned());
        }
        if messages.unanswered > 0 {
            warnings.push(format!(
                "{} requests were not answered, {} of them because their connection was lost",
                messages.unanswered, messages.unanswered_connection_lost
            ));
        }
        if messages.answered_error > 0 {
            warnings.push(format!("{} answers are errors of the server", messages.answered_error));
        }
        if messages.answers_ambiguous > 0 {
            warnings.push(format!(
                "{} answers may have been counted for the wrong priority: their connections waited for answers \
                 to urgent and to ordinary requests",
                messages.answers_ambiguous
            ));
        }
        let (error, latency) = (&self.latency_ns.send_error, &self.latency_ns.total);
        if latency.count > 0 && error.p50 > latency.p50 / 2 {
            warnings.push(format!(
                "half of the messages were sent {} late or more, which is a large part of the latency",
                show_nanos(error.p50)
            ));
        }
        if let Some(busy) = self.generator_busy.filter(|busy| *busy > BUSY_MAX && !self.is_polling()) {
            warnings.push(format!(
                "the generator may have been the bottleneck: its busiest worker was busy for {:.0} % of the time",
                100.0 * busy
            ));
        }
        warnings
    }

    /// Returns the results on which the report is based.
    pub const fn stats(&self) -> &MessageStats {
        &self.stats
    }

    /// Returns true if the generator polled all the time by request.
    fn is_polling(&self) -> bool {
        self.requested.mode == "precision"
    }

    /// Formats the report as one line of JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns an SVG document with the distributions of latencies and of the send-time error.
    pub fn to_svg(&self) -> String {
        let MessageStats { high, low, send_error: error, .. } = &self.stats;
        let curves = [
            Curve { name: "urgent requests", color: "#c0392b", values: high },
            Curve { name: "ordinary requests", color: "#2471a3", values: low },
            Curve { name: "send-time error", color: "#7f8c8d", values: error },
        ];
        let (asked, reached) = (&self.requested, &self.achieved);
        let title = format!("ginnel load {}: {} over {}", self.service, self.server, self.stack);
        let subtitle = format!(
            "{} connections, {:.0} messages/s of {} bytes for {:.0} s, {} sent, {} answered, {} unanswered",
            reached.connections,
            reached.messages_per_second,
            show_range(asked.length_bytes),
            reached.sending_seconds,
            self.messages.sent,
            self.messages.answered,
            self.messages.unanswered
        );
        Picture { title: &title, subtitle: &subtitle, curves: &curves }.to_string()
    }
}

fn show_range((min, max): (u16, u16)) -> String {
    if min == max { min.to_string() } else { format!("{min}-{max}") }
}

impl fmt::Display for MessageReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (asked, reached, m) = (&self.requested, &self.achieved, &self.messages);
        write!(f, "{} over {}: {} connections", self.server, self.stack, asked.connections)?;
        write!(
            f,
            ", {:.1} messages/s of {} bytes",
            asked.messages_per_second,
            show_range(asked.length_bytes)
        )?;
        write!(f, " in bursts of {} ({}, {} gaps)", asked.burst, asked.mode, asked.gaps)?;
        if asked.workers > 1 {
            write!(f, ", {} workers", asked.workers)?;
        }
        writeln!(f, ", {:.2} s", reached.sending_seconds)?;
        writeln!(
            f,
            "  connections     {:>14}   open after {:.2} s, {} at the end, {} lost",
            reached.connections, reached.setup_seconds, self.connections.open_at_end, self.connections.lost
        )?;
        writeln!(
            f,
            "  messages/s      {:>14.1}   of {:.1}",
            reached.messages_per_second,
            asked.messages as f64 / asked.seconds
        )?;
        writeln!(f, "  answers/s       {:>14.1}", reached.answers_per_second)?;
        writeln!(
            f,
            "  due             {:>14} = {} sent + {} on closed connections + {} on full ones",
            m.due, m.sent, m.not_sent_closed, m.not_sent_full
        )?;
        writeln!(
            f,
            "  sent            {:>14} = {} answered + {} heartbeats + {} unanswered",
            m.sent, m.answered, m.heartbeats, m.unanswered
        )?;
        for (name, account) in [("high", m.high), ("low", m.low)] {
            writeln!(
                f,
                "  {name:<4} requests   {:>14} = {} answered + {} unanswered",
                account.sent, account.answered, account.unanswered
            )?;
        }
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
        let rows = [
            ("connect", &l.connect),
            ("high", &l.high),
            ("low", &l.low),
            ("total", &l.total),
            ("send error", &l.send_error),
        ];
        for (name, q) in rows.into_iter().filter(|(_, q)| q.count > 0) {
            write!(f, "  {name:<12}")?;
            for nanos in [q.mean as u64, q.p50, q.p90, q.p99, q.p99_9, q.p99_99, q.max] {
                write!(f, "{:>11}", show_nanos(nanos))?;
            }
            writeln!(f)?;
        }
        for missed in &self.missed {
            writeln!(f, "  not reached: {missed}")?;
        }
        for warning in &self.warnings {
            writeln!(f, "  warning: {warning}")?;
        }
        Ok(())
    }
}
