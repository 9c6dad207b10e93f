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
    /// Returns the lines for a terminal with so many columns.
    pub fn text(&self, columns: usize) -> String {
        let Self { stack, pid, every, rates, .. } = self;
        let shards = match rates.shards.len() {
            1 => "1 shard".to_owned(),
            count => format!("{count} shards"),
        };
        let mut text = format!(
            "{stack} (process {pid}), {shards}, running {}, every {every:?}; q ends\n\n",
            age(rates.running_seconds)
        );
        let _ = writeln!(text, "{}", self.table(columns));
        let silent = rates.shards.iter().filter(|shard| shard.answers == Some(false));
        let silent: Vec<&str> = silent.map(|shard| &*shard.shard).collect();
        if !silent.is_empty() {
            let shards = silent.join(", ");
            let _ = writeln!(
                text,
                "No answer      from shard {shards}: stopped or overloaded, see \"ginnel log {stack}\""
            );
        }
        for line in self.latency_lines() {
            let _ = writeln!(text, "{line}");
        }
        let _ = writeln!(text, "{}", drops(rates));
        if let Some(PoolUse { pool, used, limit }) = &rates.fullest {
            let percent = 100.0 * *used as f64 / *limit as f64;
            let (used, limit) = (with_thousands_separators(*used), with_thousands_separators(*limit));
            let _ = writeln!(text, "Nearest limit  pool {pool}: {percent:.1} % ({used} of {limit})");
        }
        text.lines().flat_map(|line| wrap(line, columns)).map(|line| line + "\n").collect()
    }

    /// Returns the table of the shards: with rules if the terminal is wide enough, otherwise with short heads
    /// and numbers.
    fn table(&self, columns: usize) -> String {
        let shards = &self.rates.shards;
        let sum = (shards.len() > 1).then(|| self.rates.sum());
        let table = |heads: &[&str], format: fn(f64) -> String| {
            let mut table = Table::new(heads);
            shards.iter().chain(&sum).for_each(|shard| table.add_row(row(shard, format)));
            table
        };
        let wide = table(&HEADS, count).to_string();
        match wide.lines().next().map_or(0, |line| line.chars().count()) {
            width if width <= columns => wide,
            _ => table(&SHORT_HEADS, short_count).plain(),
        }
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
                "{seconds:.3} shard={label} busy={} connections={connections} new/s={new:.1} rx_frames/s={rx_frames:.1} tx_frames/s={tx_frames:.1} rx_bit/s={:.0} tx_bit/s={:.0} retransmitted/s={:.1} dropped/s={:.1}{}",
                shard.busy.map_or_else(|| "-".to_owned(), |busy| format!("{:.1}%", 100.0 * busy)),
                shard.rx_bits,
                shard.tx_bits,
                shard.retransmitted,
                shard.dropped,
                if shard.answers == Some(false) { " answers=no" } else { "" }
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

/// Heads of the table, and those for a terminal with 80 columns.
const HEADS: [&str; 10] = [
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
];
const SHORT_HEADS: [&str; 10] =
    ["shard", "busy", "conns", "new/s", "retr/s", "drop/s", "rx fr/s", "tx fr/s", "rx Mb/s", "tx Mb/s"];

/// Formats a number with a digit after the point if it is small, and with thousands separators.
fn count(number: f64) -> String {
    match number {
        0.0 => "0".to_owned(),
        number if number < 10.0 => format!("{number:.1}"),
        number => with_thousands_separators(number.round() as u64),
    }
}

/// Formats a number in at most five characters: `9,999`, `12.3k`, `123k`, `1.23M`.
fn short_count(number: f64) -> String {
    if number < 9999.5 {
        return count(number);
    }
    let mut scaled = number / 1e3;
    let mut units = "kMGT".chars();
    let mut unit = units.next().unwrap_or_default();
    while scaled >= 999.5 {
        let Some(next) = units.next() else { break };
        (scaled, unit) = (scaled / 1e3, next);
    }
    match scaled {
        _ if scaled < 9.995 => format!("{scaled:.2}{unit}"),
        _ if scaled < 99.95 => format!("{scaled:.1}{unit}"),
        _ => format!("{scaled:.0}{unit}"),
    }
}

/// Breaks a line at blanks so that its parts fit. Parts after the first one are indented as the text after a
/// heading is. The spaces of a table, which fits already, stay.
fn wrap(line: &str, columns: usize) -> Vec<String> {
    if line.chars().count() <= columns {
        return vec![line.to_owned()];
    }
    let (head, rest) = line.split_at_checked(INDENT).unwrap_or((line, ""));
    let mut lines = vec![head.to_owned()];
    for (number, word) in rest.split(' ').enumerate() {
        let last = lines.last_mut().map_or(0, |last| last.chars().count());
        if number > 0 && last + 1 + word.chars().count() > columns {
            lines.push(" ".repeat(INDENT) + word);
        } else if let Some(last) = lines.last_mut() {
            if number > 0 {
                last.push(' ');
            }
            last.push_str(word);
        }
    }
    lines
}

/// Columns before the text after a heading.
const INDENT: usize = 15;

fn row(shard: &ShardRates, count: fn(f64) -> String) -> [String; 10] {
    let busy = match (shard.ended, shard.answers, shard.busy) {
        (true, ..) => "ended".to_owned(),
        (false, Some(false), None) => "silent".to_owned(),
        (false, _, Some(busy)) => format!("{:.0} %", 100.0 * busy),
        (false, _, None) => String::new(),
    };
    [
        shard.shard.clone(),
        busy,
        count(shard.connections as f64),
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
        let text = view(&rates, &round_trips, Some(&responses)).text(120);
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
    fn eighty_columns_have_every_figure() {
        let quantiles =
            Quantiles { count: 9999, median: 1_500_000, p90: 2_000_000, p99: 3_000_000, max: 4_000_000 };
        let (mut rates, round_trips) = (rates(2), RoundTrips::Known(quantiles));
        rates.shards[1] = ShardRates {
            busy: None,
            answers: Some(false),
            connections: 9_999_999,
            new: 99_950.0,
            retransmitted: 9999.4,
            dropped: 999_499.0,
            rx_frames: 148_800_000.0,
            tx_frames: 9999.5,
            rx_bits: 1e11,
            tx_bits: 9e12,
            ..rates.shards[1].clone()
        };
        let text = view(&rates, &round_trips, None).text(80);
        for part in [
            "shard    busy  conns  new/s  retr/s  drop/s  rx fr/s  tx fr/s  rx Mb/s  tx Mb/s\n",
            "0         0 %  1,234    2.5       0       0    1.00M        0    8,000        0\n",
            "1      silent  10.0M   100k   9,999    999k     149M    10.0k     100k    9.00M\n",
            "No answer      from shard 1: stopped or overloaded, see \"ginnel log web\"\n",
            "Round trips    median 1.50 ms, 90 % 2.00 ms, 99 % 3.00 ms, longest 4.00 ms\n               (9,999 connections)\n",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let lines = view(&rates, &round_trips, None).lines(1.0);
        assert!(
            lines.contains("shard=1 busy=- ") && lines.contains("dropped/s=999499.0 answers=no\n"),
            "{lines}"
        );
        assert_eq!(lines.matches("answers=no").count(), 2, "shard 1 and the sum: {lines}");
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
