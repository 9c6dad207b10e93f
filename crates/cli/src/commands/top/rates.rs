//! Rates of each shard between two samples of the counters.

use super::answers::ShardAnswers;
use crate::commands::stat::sample::{StatSample, StatSource};
use crate::limit_watch;
use ginnel::stats::{CounterKind, ShardActivity};
use serde_json::{Value, json};

/// State of a shard, and its rates: fields of the type `f64` are per second, except the share `busy`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardRates {
    /// Label of the shard, or "all".
    pub shard: String,
    /// The shard has ended.
    pub ended: bool,
    /// Says whether the shard answers requests, if that is known. The figures of one that does not are those
    /// of its last sign of life.
    pub answers: Option<bool>,
    /// Share of the time in which the shard had work, if known.
    pub busy: Option<f64>,
    /// Connections that exist.
    pub connections: u64,
    /// Connections accepted and opened.
    pub new: f64,
    /// Frames received.
    pub rx_frames: f64,
    /// Frames sent.
    pub tx_frames: f64,
    /// Bits received.
    pub rx_bits: f64,
    /// Bits sent.
    pub tx_bits: f64,
    /// Segments sent again.
    pub retransmitted: f64,
    /// Received frames dropped.
    pub dropped: f64,
}

/// A counter of something that was dropped or refused.
#[derive(Clone, Debug, PartialEq)]
pub struct DropCount {
    pub counter: String,
    /// Growth per second.
    pub rate: f64,
    /// Count since the start.
    pub total: u64,
}

/// A pool with its use.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolUse {
    pub pool: String,
    pub used: u64,
    pub limit: u64,
}

/// The figures of one screen that are computed from the counters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// One for each shard.
    pub shards: Vec<ShardRates>,
    /// Counters of drops that grew between the samples, the fastest first.
    pub drops: Vec<DropCount>,
    /// The pool that is nearest to its limit.
    pub fullest: Option<PoolUse>,
    /// Time since the start of the shard that has run longest, in seconds.
    pub running_seconds: f64,
}

impl Rates {
    /// Computes the rates from two samples of a source, whose shards answer as `answers` says.
    pub fn new(source: &StatSource, before: &StatSample, now: &StatSample, answers: &ShardAnswers) -> Self {
        let shards = (0..source.pages.len())
            .map(|shard| ShardRates::new(source, before, now, shard).with_answers(answers))
            .collect();
        let running =
            (0..source.pages.len()).filter_map(|shard| source.value(now, shard, "shard.running_ns"));
        Self {
            shards,
            drops: drops(source, before, now),
            fullest: fullest(source, now),
            running_seconds: running.max().unwrap_or(0) as f64 / 1e9,
        }
    }

    /// Returns the sum of all shards; `busy` is the mean.
    pub fn sum(&self) -> ShardRates {
        let mut sum = ShardRates { shard: "all".into(), ended: true, ..ShardRates::default() };
        for shard in &self.shards {
            sum.ended &= shard.ended;
            sum.answers = match (sum.answers, shard.answers) {
                (Some(false), _) | (_, Some(false)) => Some(false),
                (sum, shard) => sum.or(shard),
            };
            sum.connections += shard.connections;
            sum.new += shard.new;
            sum.rx_frames += shard.rx_frames;
            sum.tx_frames += shard.tx_frames;
            sum.rx_bits += shard.rx_bits;
            sum.tx_bits += shard.tx_bits;
            sum.retransmitted += shard.retransmitted;
            sum.dropped += shard.dropped;
        }
        let busy: Vec<f64> = self.shards.iter().filter_map(|shard| shard.busy).collect();
        sum.busy = (!busy.is_empty()).then(|| busy.iter().sum::<f64>() / busy.len() as f64);
        sum
    }
}

impl ShardRates {
    fn new(source: &StatSource, before: &StatSample, now: &StatSample, shard: usize) -> Self {
        let seconds = StatSource::seconds_between(before, now, shard);
        let grown = |wanted: &dyn Fn(&str) -> bool| {
            let names = source.names.iter().enumerate().filter(|(_, (_, name))| wanted(name));
            let grown = names.filter_map(|(index, _)| {
                let value = |sample| source.values(sample, index).nth(shard).flatten();
                Some(value(now)?.saturating_sub(value(before).unwrap_or(0)))
            });
            if seconds > 0.0 { grown.sum::<u64>() as f64 / seconds } else { 0.0 }
        };
        let of_device = |item: &'static str| {
            grown(&move |name: &str| {
                name.strip_prefix("device.")
                    .and_then(|rest| rest.rsplit_once('.'))
                    .is_some_and(|(_, last)| last == item)
            })
        };
        Self {
            shard: source.pages[shard].label().into(),
            ended: now.shards[shard].activity == ShardActivity::Ended,
            answers: None,
            busy: source.busy(now, Some(before), shard),
            connections: source.value(now, shard, "pool.connections.used").unwrap_or(0),
            new: grown(&|name| matches!(name, "tcp.passive_opens" | "tcp.active_opens")),
            rx_frames: of_device("rx_frames"),
            tx_frames: of_device("tx_frames"),
            rx_bits: 8.0 * of_device("rx_bytes"),
            tx_bits: 8.0 * of_device("tx_bytes"),
            retransmitted: grown(&|name| name == "tcp.retransmitted"),
            dropped: grown(&is_frame_drop),
        }
    }

    /// Takes over whether the shard answers. A sleeping shard publishes nothing, so one that does not answer
    /// would seem to be idle.
    fn with_answers(mut self, answers: &ShardAnswers) -> Self {
        self.answers = answers.of(&self.shard).filter(|_| !self.ended);
        if self.answers == Some(false) || *answers == ShardAnswers::Pending {
            self.busy = None;
        }
        self
    }

    /// Returns the rates as JSON.
    pub fn json(&self) -> Value {
        json!({
            "shard": self.shard, "ended": self.ended, "answers": self.answers, "busy": self.busy,
            "connections": self.connections,
            "new_per_second": self.new, "rx_frames_per_second": self.rx_frames,
            "tx_frames_per_second": self.tx_frames, "rx_bits_per_second": self.rx_bits,
            "tx_bits_per_second": self.tx_bits, "retransmitted_per_second": self.retransmitted,
            "dropped_per_second": self.dropped,
        })
    }
}

/// Returns whether a counter counts something that was dropped or refused.
fn is_drop(name: &str) -> bool {
    name.starts_with("drop.")
        || limit_watch::is_limit(name)
        || name.starts_with("device.") && (name.ends_with("_dropped") || name.ends_with("_malformed"))
}

/// Returns whether a counter counts frames that were dropped, or refused because of their priority. A frame
/// that finds a full ring between shards counts in two of them.
fn is_frame_drop(name: &str) -> bool {
    let is_other = matches!(name, "shard.timers_refused" | "shard.relays_refused");
    name == "ip.rx_dropped" || name.starts_with("shard.") && limit_watch::is_limit(name) && !is_other
}

fn drops(source: &StatSource, before: &StatSample, now: &StatSample) -> Vec<DropCount> {
    let seconds = StatSource::seconds_between(before, now, 0);
    let counters = source.names.iter().enumerate();
    let mut drops: Vec<DropCount> = counters
        .filter(|(_, (kind, name))| *kind == CounterKind::Counter && is_drop(name))
        .filter_map(|(index, (_, name))| {
            let sum = |sample| source.values(sample, index).flatten().fold(0, u64::wrapping_add);
            let (total, grown) = (sum(now), sum(now).saturating_sub(sum(before)));
            let rate = if seconds > 0.0 { grown as f64 / seconds } else { 0.0 };
            (grown > 0).then(|| DropCount { counter: name.clone(), rate, total })
        })
        .collect();
    drops.sort_by(|a, b| b.rate.total_cmp(&a.rate));
    drops
}

fn fullest(source: &StatSource, now: &StatSample) -> Option<PoolUse> {
    let pools = source.names.iter().filter_map(|(_, name)| name.strip_prefix("pool.")?.strip_suffix(".used"));
    let uses = pools.flat_map(|pool| {
        (0..source.pages.len()).filter_map(move |shard| {
            let value = |item: &str| source.value(now, shard, &format!("pool.{pool}.{item}"));
            let (used, limit) = (value("used")?, value("limit")?);
            (limit > 0).then(|| PoolUse { pool: pool.to_owned(), used, limit })
        })
    });
    uses.max_by(|a, b| {
        let share = |pool: &PoolUse| pool.used as f64 / pool.limit as f64;
        share(a).total_cmp(&share(b))
    })
}

#[cfg(test)]
mod tests {
    use super::is_frame_drop;

    #[test]
    fn only_counters_of_frames_count_as_dropped() {
        let frames = ["ip.rx_dropped", "shard.priority3_shed", "shard.forwards_dropped"];
        assert!(frames.into_iter().all(is_frame_drop));
        let others = ["shard.timers_refused", "shard.relays_refused", "drop.no_route", "shard.events"];
        assert!(!others.into_iter().any(is_frame_drop));
    }
}
