//! The files of HCMonitor: `cdf.txt`, which grows by a block per interval, and `sketch.txt` with the
//! latencies of the last interval (docs/monitor.md). Cells are separated by tabs, times are in milliseconds.

use crate::distribution::{Distribution, LatencySummary, QUANTILES, SKETCH_BIN_NANOS};
use crate::report::Report;
use std::fmt::Write as _;

/// Returns the block of an interval for `cdf.txt`.
#[must_use]
pub fn cdf_block(report: &Report) -> String {
    let (c, l) = (&report.counters, &report.latency);
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        text,
        "connections\t{}\treq_retrans\t{}\trsp_retrans\t{}\tavg_delay\t{}",
        report.connections,
        c.request_retransmissions,
        c.response_retransmissions,
        millis(l.total.mean_ns)
    );
    let _ = writeln!(
        text,
        "recv_pri_high\t{}\trecv_pri_low\t{}\tpri_high_num\t{}\tlow_pri_num\t{}\tunanswered\t{}",
        c.requests_high,
        c.requests - c.requests_high,
        c.responses_high,
        c.responses - c.responses_high,
        c.unanswered
    );
    text.push_str("CDF\ttotal\thigh_pri\tlow_pri\n");
    let mut row = |name: &str, value: &dyn Fn(&LatencySummary) -> u64| {
        text.push_str(name);
        for summary in [&l.total, &l.high, &l.low] {
            let cell = if summary.count == 0 { "-".to_owned() } else { millis(value(summary)) };
            let _ = write!(text, "\t{cell}");
        }
        text.push('\n');
    };
    row("0", &|summary| summary.min_ns);
    for (index, quantile) in QUANTILES.iter().enumerate() {
        let name = if *quantile > 0.99 { format!("{quantile:.4}") } else { format!("{quantile:.2}") };
        row(&name, &|summary| summary.quantiles_ns[index]);
    }
    text.push('\n');
    text
}

fn millis(nanos: u64) -> String {
    format!("{:.4}", nanos as f64 / 1e6)
}

/// Returns `sketch.txt`: for each bin of 0.1 ms its end, and the responses in it: all, high and low priority.
#[must_use]
pub fn sketch(latencies: &[Distribution; 2]) -> String {
    let [low, high] = latencies.each_ref().map(Distribution::sketch);
    let mut text = String::new();
    for bin in 0..low.len().max(high.len()) {
        let [low, high] = [low, high].map(|bins| bins.get(bin).copied().unwrap_or(0));
        let end_ms = (bin as u64 + 1) as f64 * (SKETCH_BIN_NANOS as f64 / 1e6);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{end_ms:.1}\t{}\t{high}\t{low}", low + high);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::MonitorCounters;
    use core::time::Duration;
    use ginnel_stack::time::Instant;

    #[test]
    fn files_have_the_documented_cells() {
        let mut latencies = [Distribution::default(), Distribution::default()];
        for (class, us) in [(0, 250), (0, 1250), (1, 90)] {
            latencies[class].record(Instant::ZERO, Instant::from_micros(us));
        }
        let counters = MonitorCounters {
            requests: 4,
            requests_high: 1,
            responses: 3,
            responses_high: 1,
            ..Default::default()
        };
        let report = Report::new(Instant::ZERO, Duration::from_secs(1), 7, 1, 0, counters, &latencies);
        let block = cdf_block(&report);
        let lines: Vec<&str> = block.lines().collect();
        assert_eq!(lines[0], "connections\t7\treq_retrans\t0\trsp_retrans\t0\tavg_delay\t0.5300");
        assert_eq!(
            lines[1],
            "recv_pri_high\t1\trecv_pri_low\t3\tpri_high_num\t1\tlow_pri_num\t2\tunanswered\t0"
        );
        assert_eq!(lines[3], "0\t0.0900\t0.0900\t0.2500");
        assert_eq!(lines[17], "1.0000\t1.2500\t0.0900\t1.2500");
        assert_eq!((lines.len(), lines[18]), (19, ""));
        let names: Vec<&str> = lines[4..18].iter().filter_map(|line| line.split('\t').next()).collect();
        assert_eq!(names[8..], ["0.90", "0.95", "0.99", "0.9990", "0.9999", "1.0000"]);
        let sketch = sketch(&latencies);
        let bins: Vec<&str> = sketch.lines().collect();
        assert_eq!(
            (bins.len(), bins[0], bins[2], bins[12]),
            (13, "0.1\t1\t1\t0", "0.3\t1\t0\t1", "1.3\t1\t0\t1")
        );
    }
}
