//! `ginnel stat --reset`: a stack's counters never decrease, because others read them, too; what is reset is
//! where this command begins to count. The values at that time are a file in the stack's directory, which
//! ends with the stack.

use super::sample::{StatSample, StatSource};
use crate::failure::Failure;
use core::time::Duration;
use ginnel::Instant;
use ginnel::stats::CounterKind;
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::PathBuf;

/// Name of the file.
const FILE: &str = "stat-reset";
/// First word of the file.
const MAGIC: &str = "ginnel-stat-reset-1";
/// Name under which the number of a shard's page is saved: a shard that is started again has another page.
const PAGE: &str = "(page)";

/// The counters at the time of a reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Baseline {
    at: Instant,
    /// Values by shard and name.
    values: HashMap<(String, String), u64>,
}

fn path(source: &StatSource) -> PathBuf {
    source.running.path.join(FILE)
}

impl Baseline {
    /// Reads the values of the last reset; `None` if there was none.
    ///
    /// # Errors
    /// The file cannot be read, or is not valid.
    pub fn load(source: &StatSource) -> Result<Option<Self>, Failure> {
        let path = path(source);
        match std::fs::read_to_string(&path) {
            Ok(text) => match Self::parse(&text) {
                Some(baseline) => Ok(Some(baseline)),
                None => Err(Failure::running(format!(
                    "{}: is not a file of \"ginnel stat --reset\": reset again, or remove the file",
                    path.display()
                ))),
            },
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Failure::running(format!("{}: {e}", path.display()))),
        }
    }

    /// Makes the values of a sample those of the last reset.
    ///
    /// # Errors
    /// The file cannot be written, for example because the stack belongs to another user.
    pub fn save(source: &StatSource, sample: &StatSample) -> Result<(), Failure> {
        let mut text = format!("{MAGIC} {}\n", sample.at.as_nanos());
        for (page, snapshot) in source.pages.iter().zip(&sample.shards) {
            if let Ok(number) = page.file_number() {
                text += &format!("{}\t{PAGE}\t{number}\n", page.label());
            }
            for ((kind, name), value) in page.names().iter().zip(&snapshot.values) {
                if *kind == CounterKind::Counter {
                    text += &format!("{}\t{name}\t{value}\n", page.label());
                }
            }
        }
        let path = path(source);
        // Readers see the old file or the new one.
        let new = path.with_extension(std::process::id().to_string());
        let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, &path));
        written.map_err(|e| {
            // It does not exist if it could not be written.
            let _ = std::fs::remove_file(&new);
            Failure::running(format!("--reset: {}: {e}", path.display()))
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let at = lines.next()?.strip_prefix(MAGIC)?.trim().parse().ok()?;
        let mut values = HashMap::new();
        for line in lines {
            let mut fields = line.split('\t');
            let (shard, name, value) = (fields.next()?, fields.next()?, fields.next()?.parse().ok()?);
            values.insert((shard.to_owned(), name.to_owned()), value);
        }
        Some(Self { at: Instant::from_nanos(at), values })
    }

    fn value(&self, shard: &str, name: &str) -> Option<u64> {
        self.values.get(&(shard.to_owned(), name.to_owned())).copied()
    }

    /// Returns the time since the reset.
    pub fn age(&self, sample: &StatSample) -> Duration {
        sample.at.saturating_since(self.at)
    }

    /// Subtracts the values from the counters of a sample. A shard that was started again since begins at
    /// zero by itself.
    pub fn subtract(&self, source: &StatSource, sample: &mut StatSample) {
        for (page, snapshot) in source.pages.iter().zip(&mut sample.shards) {
            let names = page.names();
            self.subtract_from(page.label(), page.file_number().ok(), names, &mut snapshot.values);
        }
    }

    fn subtract_from(
        &self,
        shard: &str,
        page: Option<u64>,
        names: &[(CounterKind, String)],
        values: &mut [u64],
    ) {
        if self.value(shard, PAGE) != page {
            return;
        }
        for ((kind, name), value) in names.iter().zip(values) {
            if *kind == CounterKind::Counter {
                *value = value.saturating_sub(self.value(shard, name).unwrap_or(0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<(CounterKind, String)> {
        let counter = |name: &str| (CounterKind::Counter, name.to_owned());
        vec![counter("tcp.segments_in"), (CounterKind::Gauge, "pool.used".into()), counter("new")]
    }

    #[test]
    fn counters_are_reset_and_gauges_are_not() {
        let text = format!("{MAGIC} 5000\n1\t{PAGE}\t100\n1\ttcp.segments_in\t7\n1\tpool.used\t9\n");
        let baseline = Baseline::parse(&text).unwrap();
        assert_eq!(baseline.at, Instant::from_nanos(5000));
        let mut values = [10, 12, 3];
        baseline.subtract_from("1", Some(100), &names(), &mut values);
        assert_eq!(values, [3, 12, 3]);
        // Another shard, and one that was started again since.
        for (shard, page) in [("0", 100), ("1", 99), ("1", 101)] {
            let mut values = [10, 12, 3];
            baseline.subtract_from(shard, Some(page), &names(), &mut values);
            assert_eq!(values, [10, 12, 3]);
        }
    }

    #[test]
    fn damaged_files_are_recognized() {
        for text in ["", "ginnel-stat-reset-1 x\n", "other 5\n", "ginnel-stat-reset-1 5\n1\tname\n"] {
            assert_eq!(Baseline::parse(text), None, "{text:?}");
        }
    }
}
