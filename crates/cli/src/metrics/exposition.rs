//! Prometheus' text format, version 0.0.4.

use core::fmt;
use core::fmt::Write;
use std::collections::HashMap;

/// Prefix of all names.
const PREFIX: &str = "ginnel_";

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// The value never decreases, except when its stack starts anew.
    Counter,
    /// The value may decrease.
    Gauge,
    /// Cumulative counts of observations.
    Histogram,
}

impl MetricKind {
    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Metrics with their samples. All samples of a metric stay together, as the format demands.
#[derive(Debug, Default)]
pub struct Exposition {
    metrics: Vec<Metric>,
    by_name: HashMap<String, usize>,
    comments: Vec<String>,
}

#[derive(Debug)]
struct Metric {
    name: String,
    kind: MetricKind,
    help: String,
    /// Lines of samples.
    samples: String,
}

/// Observations of a histogram.
#[derive(Clone, Debug, Default)]
pub struct Observations {
    /// Upper bounds in ascending order, and the observations up to each of them.
    pub buckets: Vec<(f64, u64)>,
    /// Number of observations.
    pub count: u64,
    /// Sum of their values.
    pub sum: f64,
}

impl Exposition {
    /// Adds a sample of the metric `name`, whose words are separated by dots as in `ginnel stat`. Of a metric
    /// that has samples already, `help` is ignored.
    pub fn add(&mut self, name: &str, kind: MetricKind, help: &str, labels: &[(&str, &str)], value: u64) {
        let metric = self.metric(name, kind, help);
        let full = metric.name.clone();
        let _ = writeln!(metric.samples, "{full}{} {value}", Labels(labels, None));
    }

    /// Adds a sample of a histogram.
    pub fn add_histogram(&mut self, name: &str, help: &str, labels: &[(&str, &str)], values: &Observations) {
        let metric = self.metric(name, MetricKind::Histogram, help);
        let (full, out) = (metric.name.clone(), &mut metric.samples);
        for (bound, count) in &values.buckets {
            let _ = writeln!(out, "{full}_bucket{} {count}", Labels(labels, Some(&bound.to_string())));
        }
        let _ = writeln!(out, "{full}_bucket{} {}", Labels(labels, Some("+Inf")), values.count);
        let _ = writeln!(out, "{full}_sum{} {}", Labels(labels, None), values.sum);
        let _ = writeln!(out, "{full}_count{} {}", Labels(labels, None), values.count);
    }

    /// Adds a comment for people.
    pub fn comment(&mut self, text: &str) {
        self.comments.push(text.replace('\n', " "));
    }

    fn metric(&mut self, name: &str, kind: MetricKind, help: &str) -> &mut Metric {
        let full = full_name(name, kind);
        let index = *self.by_name.entry(full).or_insert_with_key(|full| {
            let help = help.replace('\\', "\\\\").replace('\n', "\\n");
            self.metrics.push(Metric { name: full.clone(), kind, help, samples: String::new() });
            self.metrics.len() - 1
        });
        &mut self.metrics[index]
    }
}

/// Returns the name of a metric: `tcp.segments_in` becomes `ginnel_tcp_segments_in_total`.
fn full_name(name: &str, kind: MetricKind) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words: String = name.chars().map(|c| if is_allowed(c) { c } else { '_' }).collect();
    let suffix = if kind == MetricKind::Counter { "_total" } else { "" };
    format!("{PREFIX}{words}{suffix}")
}

/// Labels of a sample, and the bound of a bucket.
struct Labels<'a>(&'a [(&'a str, &'a str)], Option<&'a str>);

impl fmt::Display for Labels<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = self.1.map(|bound| ("le", bound));
        let mut separator = '{';
        for (name, value) in self.0.iter().copied().chain(bound) {
            write!(f, "{separator}{name}=\"")?;
            for c in value.chars() {
                match c {
                    '"' | '\\' => write!(f, "\\{c}")?,
                    '\n' => f.write_str("\\n")?,
                    c => f.write_char(c)?,
                }
            }
            f.write_char('"')?;
            separator = ',';
        }
        if separator == ',' { f.write_char('}') } else { Ok(()) }
    }
}

impl fmt::Display for Exposition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Metric { name, kind, help, samples } in &self.metrics {
            write!(f, "# HELP {name} {help}\n# TYPE {name} {}\n{samples}", kind.name())?;
        }
        self.comments.iter().try_for_each(|text| writeln!(f, "# {text}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_a_metric_stay_together() {
        let mut out = Exposition::default();
        for stack in ["a", "b\"\\\n"] {
            out.add("tcp.in", MetricKind::Counter, "Bytes\nand \\.", &[("stack", stack), ("shard", "0")], 7);
            out.add("up", MetricKind::Gauge, "Whether.", &[("stack", stack)], 1);
        }
        let observations = Observations { buckets: vec![(0.001, 1), (2.5, 3)], count: 4, sum: 9.25 };
        out.add_histogram("latency_seconds", "Latency.", &[("priority", "low")], &observations);
        out.comment("stack \"c\": gone");
        let expected = "\
# HELP ginnel_tcp_in_total Bytes\\nand \\\\.
# TYPE ginnel_tcp_in_total counter
ginnel_tcp_in_total{stack=\"a\",shard=\"0\"} 7
ginnel_tcp_in_total{stack=\"b\\\"\\\\\\n\",shard=\"0\"} 7
# HELP ginnel_up Whether.
# TYPE ginnel_up gauge
ginnel_up{stack=\"a\"} 1
ginnel_up{stack=\"b\\\"\\\\\\n\"} 1
# HELP ginnel_latency_seconds Latency.
# TYPE ginnel_latency_seconds histogram
ginnel_latency_seconds_bucket{priority=\"low\",le=\"0.001\"} 1
ginnel_latency_seconds_bucket{priority=\"low\",le=\"2.5\"} 3
ginnel_latency_seconds_bucket{priority=\"low\",le=\"+Inf\"} 4
ginnel_latency_seconds_sum{priority=\"low\"} 9.25
ginnel_latency_seconds_count{priority=\"low\"} 4
# stack \"c\": gone
";
        assert_eq!(out.to_string(), expected);
    }
}
