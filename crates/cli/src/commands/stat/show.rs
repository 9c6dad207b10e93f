//! Formats counters as tables, lines and JSON.

use super::sample::{StatSample, StatSource, is_wanted};
use crate::table::{Table, with_thousands_separators};
use ginnel::run_dir::restarts;
use ginnel::stats::{CounterKind, ShardActivity};
use std::fmt::Write as _;

/// Rates below this value are shown with a decimal.
const EXACT_BELOW: f64 = 100.0;

/// Returns a table with a row for each counter that `filter` wants, a column for each shard, and a column for
/// the sum; `head` is the head of the first column. With an earlier sample the table has the growth of the
/// counters per second. Rows whose sum is zero are left out unless `all`.
pub fn table(
    source: &StatSource,
    sample: &StatSample,
    before: Option<&StatSample>,
    filter: &[String],
    all: bool,
    head: &str,
) -> Table {
    let several = source.pages.len() > 1;
    let mut heads = vec![head];
    heads.extend(source.pages.iter().map(|page| page.label()));
    if several {
        heads.push("all");
    }
    let mut table = Table::new(&heads);
    if is_wanted("busy", filter) {
        let busy = (0..source.pages.len())
            .map(|shard| source.busy(sample, before, shard).map_or(String::new(), percent));
        table.add_row(core::iter::once("busy".into()).chain(busy));
    }
    let restarts = restarts::count(&source.running.path);
    if is_wanted("restarts", filter) && before.is_none() && (all || restarts > 0) {
        // They are those of all shards.
        let empty = if several { source.pages.len() } else { 0 };
        let cells = core::iter::repeat_n(String::new(), empty).chain([restarts.to_string()]);
        table.add_row(core::iter::once("restarts".into()).chain(cells));
    }
    for (index, (kind, name)) in source.names.iter().enumerate() {
        if !is_wanted(name, filter) {
            continue;
        }
        let mut cells = Vec::new();
        let mut sum = 0.0;
        let earlier: Vec<Option<u64>> = match before {
            Some(before) if *kind == CounterKind::Counter => source.values(before, index).collect(),
            _ => Vec::new(),
        };
        for (shard, value) in source.values(sample, index).enumerate() {
            let value = value.map(|value| match (before, earlier.get(shard).copied().flatten()) {
                (Some(before), Some(earlier)) => {
                    rate(value.saturating_sub(earlier), StatSource::seconds_between(before, sample, shard))
                }
                _ => value as f64,
            });
            sum += value.unwrap_or(0.0);
            cells.push(value);
        }
        if !all && sum == 0.0 {
            continue;
        }
        if several {
            cells.push(Some(sum));
        }
        let shown = cells.into_iter().map(|value| value.map_or(String::new(), number));
        table.add_row(core::iter::once(name.clone()).chain(shown));
    }
    table
}

/// Formats the counters that `filter` wants as lines for a pipe: seconds since the first sample, name, sum,
/// and growth per second. Counters that are zero are left out unless `all`.
pub fn lines(
    source: &StatSource,
    first: &StatSample,
    before: &StatSample,
    sample: &StatSample,
    filter: &[String],
    all: bool,
) -> String {
    let at = sample.at.saturating_since(first.at).as_secs_f64();
    let mut out = String::new();
    for (index, (kind, name)) in source.names.iter().enumerate().filter(|(_, (_, n))| is_wanted(n, filter)) {
        let sum: u64 = source.values(sample, index).flatten().fold(0, u64::wrapping_add);
        if sum == 0 && !all {
            continue;
        }
        let _ = write!(out, "{at:.3} {name} {sum}");
        if *kind == CounterKind::Counter {
            let earlier: u64 = source.values(before, index).flatten().fold(0, u64::wrapping_add);
            let rate = rate(sum.saturating_sub(earlier), StatSource::seconds_between(before, sample, 0));
            let _ = write!(out, " {rate:.1}");
        }
        out.push('\n');
    }
    out
}

/// Formats the counters that `filter` wants as one line of JSON.
pub fn json(source: &StatSource, sample: &StatSample, filter: &[String]) -> String {
    let mut out = String::new();
    let name = quoted(&source.running.name);
    let restarts = restarts::count(&source.running.path);
    let pid = source.running.pid;
    let _ = write!(out, "{{\"name\":{name},\"pid\":{pid},\"restarts\":{restarts},\"shards\":[");
    for (shard, (page, snapshot)) in source.pages.iter().zip(&sample.shards).enumerate() {
        let doing = match snapshot.activity {
            ShardActivity::NotStarted => "nothing",
            ShardActivity::Running => "turns",
            ShardActivity::Sleeping => "sleeps",
            ShardActivity::Ended => "ended",
        };
        let comma = if shard > 0 { "," } else { "" };
        let label = quoted(page.label());
        let at = snapshot.published.as_nanos();
        let _ =
            write!(out, "{comma}{{\"shard\":{label},\"doing\":\"{doing}\",\"at_ns\":{at},\"counters\":{{");
        let values = page.names().iter().zip(&snapshot.values).map(|((_, name), value)| (name, *value));
        write_members(&mut out, values.filter(|(name, _)| is_wanted(name, filter)));
        out.push_str("}}");
    }
    out.push_str("],\"all\":{");
    let sums =
        source.names.iter().enumerate().map(|(index, (_, name))| {
            (name, source.values(sample, index).flatten().fold(0, u64::wrapping_add))
        });
    write_members(&mut out, sums.filter(|(name, _)| is_wanted(name, filter)));
    out.push_str("}}\n");
    out
}

fn write_members<'a>(out: &mut String, values: impl Iterator<Item = (&'a String, u64)>) {
    for (index, (name, value)) in values.enumerate() {
        let _ = write!(out, "{}{}:{value}", if index > 0 { "," } else { "" }, quoted(name));
    }
}

/// Formats a string as JSON does.
pub fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn rate(grown: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { grown as f64 / seconds } else { 0.0 }
}

fn number(value: f64) -> String {
    if value > 0.0 && value < EXACT_BELOW && value.fract() != 0.0 {
        format!("{value:.1}")
    } else {
        with_thousands_separators(value.round() as u64)
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::{number, quoted};

    #[test]
    fn strings_are_quoted_as_json() {
        assert_eq!(quoted("plain"), "\"plain\"");
        assert_eq!(quoted("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
    }

    #[test]
    fn small_rates_have_a_decimal() {
        assert_eq!([0.0, 0.25, 7.0, 99.96, 1234.5].map(number), ["0", "0.2", "7", "100.0", "1,235"]);
    }
}
