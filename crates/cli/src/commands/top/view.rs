//! The picture: as lines for a terminal, for a pipe, and as JSON.

use super::latencies::{Quantiles, Responses, RoundTrips};
use super::rates::{PoolUse, Rates, ShardRates};
use crate::table::{Table, with_thousands_separators};
use core::fmt::Write as _;
use core::time::Duration;
use ginnel_apps::units::show_nanos;
use serde_json::json;

/// Drops that are listed.
const DROPS_MAX: usize = 5;

/// Everything that one picture shows.
pub struct View<'a> {
    pub stack: &'a str,
    pub pid: u32,
    pub every: Duration,
    pub rates: &'a Rates,
    pub round_trips: &'a RoundTrips,
    /// Times of responses, if they are observed.
    pub responses: Option<&'a Responses>,
}

impl View<'_> {
    /// Returns the lines for a terminal.
    pub fn text(&self) -> String {
        let Self { stack, pid, every, rates, .. } = self;
        let shards = match rates.shards.len() {
            1 => "1 shard".to_owned(),
            count => format!("{count} shards"),
        };
        let mut text = format!(
            "{stack} (process {pid}), {shards}, running {}, every {every:?}; q ends\n\n",
            age(rates.running_seconds)
        );
        let mut table = Table::new(&[
            "shard",
            "busy",
            "conns",
            "new/s",
            "retrans/s",
            "dropped/s",
            "rx frames/s",
            "tx frames/s",
            "rx Mbit/s",
            "tx Mbit/s",
        ]);
        rates.shards.iter().for_each(|shard| table.add_row(row(shard)));
        if rates.shards.len() > 1 {
            table.add_row(row(&rates.sum()));
        }
        let _ = writeln!(text, "{table}");
        for line in self.latency_lines() {
            let _ = writeln!(text, "{line}");
        }
        let _ = writeln!(text, "{}", drops(rates));
        if let Some(PoolUse { pool, used, limit }) = &rates.fullest {
            let percent = 100.0 * *used as f64 / *limit as f64;
            let (used, limit) = (with_thousands_separators(*used), with_thousands_separators(*limit));
            let _ = writeln!(text, "Nearest limit  pool {pool}: {percent:.1} % ({used} of {limit})");
        }
        text
    }

    fn latency_lines(&self) -> Vec<String> {
        let mut lines = vec![match self.round_trips {
            RoundTrips::Unknown => "Round trips    not known yet".to_owned(),
            RoundTrips::TooMany(count) => format!(
                "Round trips    not read: {} connections are too many to list each time",
                with_thousands_separators(*count)
            ),
            RoundTrips::Failed(reason) => format!("Round trips    not known: {reason}"),
            RoundTrips::Known(quantiles) => format!("Round trips    {}", of(quantiles, "connections")),
        }];
        lines.push(match self.responses {
            None => "Responses      not observed: see --protocol".to_owned(),
            Some(Responses { quantiles, lost: 0, .. }) => {
                format!("Responses      {}", of(quantiles, "requests"))
            }
            Some(Responses { quantiles, lost, .. }) => {
                format!("Responses      {}; {lost} frames were not seen", of(quantiles, "requests"))
            }
        });
        lines
    }

    /// Returns a line for each shard, and one for all if there are several; for programs that read a pipe.
    pub fn lines(&self, seconds: f64) -> String {
        let mut text = String::new();
        let several = (self.rates.shards.len() > 1).then(|| self.rates.sum());
        for shard in self.rates.shards.iter().chain(&several) {
            let ShardRates { shard: label, connections, new, rx_frames, tx_frames, .. } = shard;
            let _ = writeln!(
                text,
                "{seconds:.3} shard={label} busy={} connections={connections} new/s={new:.1} rx_frames/s={rx_frames:.1} tx_frames/s={tx_frames:.1} rx_bit/s={:.0} tx_bit/s={:.0} retransmitted/s={:.1} dropped/s={:.1}",
                shard.busy.map_or_else(|| "-".to_owned(), |busy| format!("{:.1}%", 100.0 * busy)),
                shard.rx_bits,
                shard.tx_bits,
                shard.retransmitted,
                shard.dropped
            );
        }
        let named = [
            ("round_trip", self.round_trips.quantiles()),
            ("response", self.responses.map(|r| &r.quantiles)),
        ];
        for (name, quantiles) in named {
            if let Some(Quantiles { count, median, p90, p99, max }) =
                quantiles.filter(|quantiles| quantiles.count > 0)
            {
                let _ = writeln!(
                    text,
                    "{seconds:.3} {name} count={count} p50_ns={median} p90_ns={p90} p99_ns={p99} max_ns={max}"
                );
            }
        }
        for drop in &self.rates.drops {
            let _ =
                writeln!(text, "{seconds:.3} drop {}/s={:.1} total={}", drop.counter, drop.rate, drop.total);
        }
        text
    }

    /// Returns a line of JSON.
    pub fn json(&self) -> String {
        let quantiles = |quantiles: Option<&Quantiles>| {
            quantiles.map(|q| json!({ "count": q.count, "p50_ns": q.median, "p90_ns": q.p90, "p99_ns": q.p99, "max_ns": q.max }))
        };
        let drops = self.rates.drops.iter();
        let drops = drops
            .map(|drop| json!({ "counter": drop.counter, "per_second": drop.rate, "total": drop.total }));
        let object = json!({
            "name": self.stack,
            "pid": self.pid,
            "running_seconds": self.rates.running_seconds,
            "shards": self.rates.shards.iter().map(ShardRates::json).collect::<Vec<_>>(),
            "all": self.rates.sum().json(),
            "round_trip": quantiles(self.round_trips.quantiles()),
            "response": quantiles(self.responses.map(|responses| &responses.quantiles)),
            "drops": drops.collect::<Vec<_>>(),
        });
        format!("{object}\n")
    }
}

fn row(shard: &ShardRates) -> [String; 10] {
    let busy = match (shard.ended, shard.busy) {
        (true, _) => "ended".to_owned(),
        (false, Some(busy)) => format!("{:.0} %", 100.0 * busy),
        (false, None) => String::new(),
    };
    let count = |rate: f64| match rate {
        0.0 => "0".to_owned(),
        rate if rate < 10.0 => format!("{rate:.1}"),
        rate => with_thousands_separators(rate.round() as u64),
    };
    [
        shard.shard.clone(),
        busy,
        with_thousands_separators(shard.connections),
        count(shard.new),
        count(shard.retransmitted),
        count(shard.dropped),
        count(shard.rx_frames),
        count(shard.tx_frames),
        count(shard.rx_bits / 1e6),
        count(shard.tx_bits / 1e6),
    ]
}

fn of(quantiles: &Quantiles, noun: &str) -> String {
    let Quantiles { count, median, p90, p99, max } = *quantiles;
    if count == 0 {
        return format!("no {noun}");
    }
    format!(
        "median {}, 90 % {}, 99 % {}, longest {} ({} {noun})",
        show_nanos(median),
        show_nanos(p90),
        show_nanos(p99),
        show_nanos(max),
        with_thousands_separators(count)
    )
}

fn drops(rates: &Rates) -> String {
    let total = rates.drops.len();
    if total == 0 {
        return "Dropped        nothing".into();
    }
    let shown = rates.drops.iter().take(DROPS_MAX);
    let mut lines: Vec<String> = shown
        .map(|drop| {
            let total = with_thousands_separators(drop.total);
            format!("{} {:.1}/s ({total} so far)", drop.counter, drop.rate)
        })
        .collect();
    if total > DROPS_MAX {
        lines.push(format!("and {} more: ginnel stat", total - DROPS_MAX));
    }
    format!("Dropped        {}", lines.join("\n               "))
}

/// Formats a time as days, hours, minutes and seconds.
fn age(seconds: f64) -> String {
    let seconds = seconds as u64;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let clock = format!("{hours}:{minutes:02}:{:02}", seconds % 60);
    if days > 0 { format!("{days}d {clock}") } else { clock }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::rates::DropCount;

    fn rates(shards: u32) -> Rates {
        let shard = |number: u32| ShardRates {
            shard: number.to_string(),
            busy: Some(0.25 * f64::from(number)),
            connections: 1234,
            new: 2.5,
            rx_frames: 1e6,
            rx_bits: 8e9,
            ..ShardRates::default()
        };
        let drops =
            (1..=7).rev().map(|n| DropCount { counter: format!("drop.d{n}"), rate: f64::from(n), total: 9 });
        Rates {
            shards: (0..shards).map(shard).collect(),
            drops: drops.collect(),
            fullest: Some(PoolUse { pool: "timers".into(), used: 1, limit: 8 }),
            running_seconds: 90_061.0,
        }
    }

    fn view<'a>(rates: &'a Rates, round_trips: &'a RoundTrips, responses: Option<&'a Responses>) -> View<'a> {
        View { stack: "web", pid: 7, every: Duration::from_secs(1), rates, round_trips, responses }
    }

    #[test]
    fn the_picture_has_each_shard_and_their_sum() {
        let quantiles =
            Quantiles { count: 3, median: 1_500_000, p90: 2_000_000, p99: 3_000_000, max: 4_000_000 };
        let responses = Responses { quantiles, lost: 2 };
        let (rates, round_trips) = (rates(3), RoundTrips::Known(quantiles));
        let text = view(&rates, &round_trips, Some(&responses)).text();
        for part in [
            "web (process 7), 3 shards, running 1d 1:01:01",
            "| 1     | 25 % | 1,234 |   2.5 |         0 |         0 |   1,000,000 |",
            "| all   | 25 % | 3,702 |   7.5 |         0 |         0 |   3,000,000 |",
            "Round trips    median 1.50 ms, 90 % 2.00 ms, 99 % 3.00 ms, longest 4.00 ms (3 connections)",
            "(3 requests); 2 frames were not seen",
            "Dropped        drop.d7 7.0/s (9 so far)\n               drop.d6 ",
            "               and 2 more: ginnel stat\n",
            "Nearest limit  pool timers: 12.5 % (1 of 8)",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }

    #[test]
    fn pipes_get_lines_and_json() {
        let (rates, none) = (rates(1), RoundTrips::Unknown);
        let lines = view(&rates, &none, None).lines(1.5);
        assert!(
            lines.starts_with("1.500 shard=0 busy=0.0% connections=1234 new/s=2.5 rx_frames/s=1000000.0 "),
            "{lines}"
        );
        assert_eq!(lines.matches("shard=").count(), 1, "one shard needs no sum");
        let json: serde_json::Value = serde_json::from_str(&view(&rates, &none, None).json()).unwrap();
        assert_eq!((&json["all"]["connections"], &json["response"]), (&json!(1234), &json!(null)));
        assert_eq!(json["drops"].as_array().unwrap().len(), 7);
    }
}
