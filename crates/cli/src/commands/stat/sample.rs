//! Samples of a stack's counters.

use crate::failure::Failure;
use ginnel::run_dir::RunningStack;
use ginnel::stats::{CounterKind, PageReader, ShardActivity, Snapshot, pages};
use ginnel::{Instant, clock};

/// The published pages of a stack's shards.
pub struct StatSource {
    pub running: RunningStack,
    pub pages: Vec<PageReader>,
    /// Names of all counters, in the order of the first shard that has them.
    pub names: Vec<(CounterKind, String)>,
    /// For each name and each shard: the index of the counter in the shard's page.
    counter_indices: Vec<Vec<Option<usize>>>,
}

/// The counters of all shards at one time.
pub struct StatSample {
    pub at: Instant,
    pub shards: Vec<Snapshot>,
}

impl StatSource {
    /// Opens the pages of all shards of a stack.
    pub fn open(running: RunningStack) -> Result<Self, Failure> {
        let pages = pages(&running.path).map_err(|e| Failure::running(e.to_string()))?;
        if pages.is_empty() {
            let text = format!("the stack \"{}\" has not published any counters (yet)", running.name);
            return Err(Failure::running(text));
        }
        let mut names: Vec<(CounterKind, String)> = Vec::new();
        for page in &pages {
            let mut at = 0;
            for (kind, name) in page.names() {
                match names.iter().position(|(_, known)| known == name) {
                    Some(known) => at = known + 1,
                    None => {
                        // Keeps counters of one group together.
                        names.insert(at, (*kind, name.clone()));
                        at += 1;
                    }
                }
            }
        }
        let index_of =
            |page: &PageReader, name: &str| page.names().iter().position(|(_, known)| known == name);
        let indices =
            names.iter().map(|(_, name)| pages.iter().map(|page| index_of(page, name)).collect()).collect();
        Ok(Self { running, pages, names, counter_indices: indices })
    }

    /// Reads all counters. The time counters of a sleeping shard are extrapolated to now.
    pub fn take(&self) -> Result<StatSample, Failure> {
        let read = |page: &PageReader| page.read().map_err(|e| Failure::running(e.to_string()));
        let mut shards = self.pages.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let at = clock::now();
        for (page, snapshot) in self.pages.iter().zip(&mut shards) {
            if snapshot.activity == ShardActivity::Sleeping {
                let asleep = at.saturating_since(snapshot.published).as_nanos() as u64;
                for ((_, name), value) in page.names().iter().zip(&mut snapshot.values) {
                    if ["shard.running_ns", "shard.idle_ns", "shard.slept_ns"].contains(&name.as_str()) {
                        *value = value.saturating_add(asleep);
                    }
                }
                snapshot.published = at;
            }
        }
        Ok(StatSample { at, shards })
    }

    /// Returns the values of counter `index`, by shard.
    pub fn values<'a>(
        &'a self,
        sample: &'a StatSample,
        index: usize,
    ) -> impl Iterator<Item = Option<u64>> + use<'a> {
        let indices = self.counter_indices[index].iter().zip(&sample.shards);
        indices.map(|(index, snapshot)| snapshot.values.get((*index)?).copied())
    }

    /// Returns the value of a counter of one shard.
    pub fn value(&self, sample: &StatSample, shard: usize, name: &str) -> Option<u64> {
        let at = self.pages[shard].names().iter().position(|(_, known)| known == name)?;
        sample.shards[shard].values.get(at).copied()
    }

    /// Returns the sum of a counter over all shards that have it.
    pub fn sum(&self, sample: &StatSample, name: &str) -> u64 {
        let values = (0..self.pages.len()).filter_map(|shard| self.value(sample, shard, name));
        values.fold(0, u64::wrapping_add)
    }

    /// Returns the share of time that a shard was busy, since `before` or since the shard's start.
    pub fn busy(&self, now: &StatSample, before: Option<&StatSample>, shard: usize) -> Option<f64> {
        let since = |name| {
            let earlier = before.map_or(Some(0), |before| self.value(before, shard, name))?;
            Some(self.value(now, shard, name)?.saturating_sub(earlier))
        };
        let (running, idle) = (since("shard.running_ns")?, since("shard.idle_ns")?);
        (running > 0).then(|| 1.0 - (idle.min(running) as f64 / running as f64))
    }

    /// Returns the seconds between the two times at which a shard wrote its page, or between the two samples
    /// if it wrote nothing in between.
    pub fn seconds_between(before: &StatSample, now: &StatSample, shard: usize) -> f64 {
        let written = |sample: &StatSample| sample.shards.get(shard).map_or(sample.at, |s| s.published);
        let between = written(now).saturating_since(written(before));
        if between.is_zero() { now.at.saturating_since(before.at) } else { between }.as_secs_f64()
    }

    /// Returns true if the counters will not change any more.
    pub fn has_ended(&self, sample: &StatSample) -> bool {
        sample.shards.iter().all(|snapshot| snapshot.activity == ShardActivity::Ended)
            || !self.running.path.exists()
    }
}

/// Returns true if a name contains one of the patterns, or matches one that contains `*`, or if there are no
/// patterns.
pub fn is_wanted(name: &str, patterns: &[String]) -> bool {
    patterns.is_empty()
        || patterns.iter().any(|pattern| {
            if pattern.contains('*') {
                matches_pattern(name, pattern)
            } else {
                name.contains(pattern.as_str())
            }
        })
}

fn matches_pattern(name: &str, pattern: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use super::is_wanted;

    #[test]
    fn patterns_match_substrings_or_wildcards() {
        for (name, pattern, wanted) in [
            ("tcp.segments_in", "tcp", true),
            ("tcp.segments_in", "segments", true),
            ("tcp.segments_in", "udp", false),
            ("pool.connections.used", "pool.*.used", true),
            ("pool.connections.limit", "pool.*.used", false),
            ("pool.used.limit", "pool.*.used", false),
            ("a.b.c", "a*c", true),
            ("a.b.c", "*", true),
            ("a.b.c", "b*", false),
            ("a.b.c", "*b", false),
            ("aXbXc", "a*b*c", true),
            ("ab", "ab*b", false),
        ] {
            assert_eq!(is_wanted(name, &[pattern.into()]), wanted, "{name} {pattern}");
        }
        assert!(is_wanted("x", &[]));
        assert!(is_wanted("x", &["y".into(), "x".into()]));
    }
}
