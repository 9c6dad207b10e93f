//! `ginnel stat --fastsocket`: the counters of Fastsocket's files in /proc/net, computed from those of the
//! stack. docs/many-cores.md says what each counter means.

use super::sample::{StatSample, StatSource};
use crate::table::{Table, with_thousands_separators};
use std::fmt::Write as _;

/// A row of the table, computed from counters of the stack.
struct Row {
    name: &'static str,
    /// Counters that are added.
    added: &'static [&'static str],
    /// Counters that are added if none of `added` exists.
    otherwise: &'static [&'static str],
    /// Counters that are subtracted.
    subtracted: &'static [&'static str],
}

const fn row(name: &'static str, added: &'static [&'static str], subtracted: &'static [&'static str]) -> Row {
    Row { name, added, otherwise: &[], subtracted }
}

const ROWS: &[Row] = &[
    // hash_stat
    row("listen_lookup.local", &["tcp.listener_lookups"], &[]),
    row("listen_lookup.none", &["tcp.no_listener"], &[]),
    row("established_lookup.local", &["tcp.segments_in"], &["tcp.listener_lookups", "tcp.no_listener"]),
    Row {
        name: "accept.local",
        added: &["channel.accepted"],
        otherwise: &["tcp.passive_opens"],
        subtracted: &["channel.accepted_remote"],
    },
    row("accept.remote", &["channel.accepted_remote"], &[]),
    // steer_stat
    row("steer.total", &["shard.frames_received"], &[]),
    row("steer.local", &["shard.frames_received"], &["shard.frames_forwarded", "shard.forwards_dropped"]),
    row("steer.remote", &["shard.frames_forwarded"], &[]),
    row("steer.error", &["shard.forwards_dropped"], &[]),
    row("steer.from_others", &["shard.forwards_received"], &[]),
    row("steer.by_rule", &["shard.steering_chosen"], &[]),
    // fsocket_stats, skb_pool
    row("socket_pool.hit", &["tcp.passive_opens", "tcp.active_opens"], &[]),
    row("socket_pool.miss", &["tcp.connection_overflows"], &[]),
    row("buffer_pool.miss", &["tcp.pool_exhausted"], &[]),
    // direct_tcp
    row("direct_tcp.hit", &["tcp.segments_out"], &["tcp.reroutes"]),
    row("direct_tcp.miss", &["tcp.reroutes"], &[]),
];

impl Row {
    /// Returns the value for one shard, given the values of the shard's counters by name.
    fn value(&self, counter: impl Fn(&str) -> Option<u64>) -> u64 {
        let sum = |names: &[&str]| names.iter().filter_map(|name| counter(name)).sum::<u64>();
        let exists = self.added.iter().any(|name| counter(name).is_some());
        let added = if exists { self.added } else { self.otherwise };
        sum(added).saturating_sub(sum(self.subtracted))
    }
}

/// Returns the name of each row with its values by shard.
fn rows<'a>(
    source: &'a StatSource,
    sample: &'a StatSample,
) -> impl Iterator<Item = (&'static str, Vec<u64>)> + use<'a> {
    ROWS.iter().map(|row| {
        let of = |shard: usize| row.value(|name| source.value(sample, shard, name));
        (row.name, (0..source.pages.len()).map(of).collect())
    })
}

/// Returns a table with a column for each shard and, for several shards, a column for the sum. `head` is the
/// head of the first column.
pub fn table(source: &StatSource, sample: &StatSample, head: &str) -> Table {
    let mut heads = vec![head];
    heads.extend(source.pages.iter().map(|page| page.label()));
    let several = source.pages.len() > 1;
    if several {
        heads.push("all");
    }
    let mut table = Table::new(&heads);
    for (name, values) in rows(source, sample) {
        let sum = several.then(|| values.iter().sum());
        let cells = values.iter().copied().chain(sum).map(with_thousands_separators);
        table.add_row(core::iter::once(name.to_owned()).chain(cells));
    }
    table
}

/// Returns the sums of all shards as one line of JSON.
pub fn json(source: &StatSource, sample: &StatSample) -> String {
    let mut out = String::from("{");
    for (index, (name, values)) in rows(source, sample).enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(out, "{comma}\"{name}\":{}", values.iter().sum::<u64>());
    }
    out.push_str("}\n");
    out
}

/// Names of all counters that the rows are computed from, for the test that they exist.
#[cfg(test)]
fn sources() -> impl Iterator<Item = &'static str> {
    ROWS.iter().flat_map(|row| row.added.iter().chain(row.otherwise).chain(row.subtracted).copied())
}

#[cfg(test)]
mod tests {
    use super::{ROWS, sources};

    #[test]
    fn rows_are_computed_from_documented_counters() {
        let page = include_str!("../../../../../docs/statistics.md");
        for name in sources() {
            assert!(page.contains(&format!("| `{name}` |")), "{name} is not in docs/statistics.md");
        }
        let many_cores = include_str!("../../../../../docs/many-cores.md");
        for row in ROWS {
            assert!(many_cores.contains(&format!("`{}`", row.name)), "{} is not documented", row.name);
        }
    }

    #[test]
    fn counters_are_added_and_subtracted() {
        let row = |name: &str| ROWS.iter().find(|row| row.name == name).unwrap();
        let native = |name: &str| match name {
            "tcp.passive_opens" => Some(9),
            "shard.frames_received" => Some(100),
            "shard.frames_forwarded" => Some(30),
            "shard.forwards_dropped" => Some(4),
            _ => None,
        };
        assert_eq!(row("steer.local").value(native), 66);
        assert_eq!(row("accept.local").value(native), 9);
        let programs = |name: &str| match name {
            "channel.accepted" => Some(7),
            "channel.accepted_remote" => Some(2),
            name => native(name),
        };
        assert_eq!(row("accept.local").value(programs), 5);
        assert_eq!(row("accept.remote").value(programs), 2);
    }
}
