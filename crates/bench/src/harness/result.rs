//! Results: a line of JSON for the record, and a table for the terminal.

use super::pairs::Conditions;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

/// Version of smoltcp, with which Ginnel is compared.
const SMOLTCP_VERSION: &str = "0.13.1";

/// Result of a bench.
#[derive(Clone, Debug)]
pub struct BenchResult {
    /// Name of the bench, and of the case if the bench has several.
    pub name: String,
    /// Unit of the figures.
    pub unit: String,
    /// Median of Ginnel's arm.
    pub ours: f64,
    /// Median of the baseline's arm; `None` if the bench has no baseline.
    pub theirs: Option<f64>,
    /// Median of the ratios of the pairs, `ours` to `theirs`, or the inverse if lower figures are better.
    pub ratio: Option<f64>,
    /// Smallest and largest ratio; smallest and largest figure if there is only one arm.
    pub spread: [f64; 2],
    /// Number of pairs.
    pub pairs: usize,
    /// State of the machine during each measurement.
    pub conditions: Vec<Conditions>,
    /// Medians of the additional facts of Ginnel's arm.
    pub our_facts: BTreeMap<String, f64>,
    /// Medians of the additional facts of the baseline's arm.
    pub their_facts: BTreeMap<String, f64>,
    /// Reasons why the result is not valid; empty if it is.
    pub problems: Vec<String>,
}

pub use ginnel_measure::median;

/// Rounds to five significant digits.
fn round(value: f64) -> f64 {
    format!("{value:.4e}").parse().unwrap_or(value)
}

fn rounded(facts: &BTreeMap<String, f64>) -> Value {
    facts.iter().map(|(k, v)| (k.clone(), json!(round(*v)))).collect::<serde_json::Map<_, _>>().into()
}

fn output_of(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output();
    let text = output.ok().filter(|o| o.status.success()).map(|o| o.stdout).unwrap_or_default();
    String::from_utf8_lossy(&text).trim().to_string()
}

fn versions() -> Value {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    json!({
        "ginnel": output_of("git", &["describe", "--always", "--dirty"]),
        "smoltcp": SMOLTCP_VERSION,
        "rustc": output_of("rustc", &["--version"]),
        "kernel": kernel.trim(),
    })
}

fn command() -> String {
    let mut words = std::env::args();
    let program = words.next().unwrap_or_default();
    let program = Path::new(&program).file_name().map(|n| n.to_string_lossy().into_owned());
    let program = program.into_iter().map(|name| format!("target/release/{name}"));
    program.chain(words).collect::<Vec<_>>().join(" ")
}

impl BenchResult {
    /// Creates a result that depends neither on time nor on other load, so that one run suffices.
    pub fn from_counts(name: &str, unit: &str, ours: f64, theirs: Option<f64>) -> Self {
        let ratio = theirs.map(|t| ours / t);
        Self {
            name: name.into(),
            unit: unit.into(),
            ours,
            theirs,
            ratio,
            spread: [ratio.unwrap_or(ours); 2],
            pairs: 1,
            conditions: Vec::new(),
            our_facts: BTreeMap::new(),
            their_facts: BTreeMap::new(),
            problems: Vec::new(),
        }
    }

    /// Returns true if there are no problems.
    pub fn is_valid(&self) -> bool {
        self.problems.is_empty()
    }

    fn cache_line(&self) -> [f64; 2] {
        [0, 1].map(|end| {
            let values: Vec<f64> = self.conditions.iter().map(|c| c.cache_line_ns[end]).collect();
            median(&values).unwrap_or(0.0)
        })
    }

    fn worst(&self, of: impl Fn(&Conditions) -> f64) -> f64 {
        self.conditions.iter().map(of).fold(0.0, f64::max)
    }

    fn cpu(&self) -> Vec<f64> {
        let count = self.conditions.iter().map(|c| c.cpu.len()).max().unwrap_or(0);
        let of = |i: usize| self.conditions.iter().filter_map(|c| c.cpu.get(i).copied()).collect::<Vec<_>>();
        (0..count).map(|i| median(&of(i)).unwrap_or(0.0)).collect()
    }

    /// Formats the result as JSON for the record.
    pub fn to_json(&self) -> Value {
        let [before, after] = self.cache_line();
        json!({
            "name": self.name,
            "unit": self.unit,
            "ours": round(self.ours),
            "theirs": self.theirs.map(round),
            "ratio": self.ratio.map(round),
            "spread": self.spread.map(round),
            "pairs": self.pairs,
            "valid": self.is_valid(),
            "conditions": {
                "cache_line_ns": { "before": round(before), "after": round(after) },
                "steal": round(self.worst(|c| c.steal)),
                "other_programs_cpu": round(self.worst(|c| c.other_programs)),
                "cpu": self.cpu().into_iter().map(round).collect::<Vec<_>>(),
                "ours": rounded(&self.our_facts),
                "theirs": rounded(&self.their_facts),
                "problems": self.problems,
                "versions": versions(),
                "command": command(),
            },
        })
    }

    /// Appends the result to `bench/results.jsonl` in the target directory.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn record(&self) -> io::Result<()> {
        let folder = Path::new(&std::env::var("CARGO_TARGET_DIR").unwrap_or("target".into())).join("bench");
        fs::create_dir_all(&folder)?;
        let mut file = fs::File::options().create(true).append(true).open(folder.join("results.jsonl"))?;
        writeln!(file, "{}", self.to_json())
    }

    /// Prints the result as a table.
    pub fn print(&self) {
        let Self { name, unit, .. } = self;
        println!("{name}");
        println!("  {:<24} {:>14} {unit}", "ours", number(self.ours));
        if let (Some(theirs), Some(ratio)) = (self.theirs, self.ratio) {
            let [low, high] = self.spread;
            println!("  {:<24} {:>14} {unit}", "theirs", number(theirs));
            println!("  {:<24} {ratio:>14.3} ({low:.3} to {high:.3}, {} pairs)", "ratio", self.pairs);
        } else {
            let [low, high] = self.spread;
            println!("  {:<24} {:>14} to {} in {} runs", "spread", number(low), number(high), self.pairs);
        }
        if !self.conditions.is_empty() {
            self.print_conditions();
        }
        for key in
            self.our_facts.keys().chain(self.their_facts.keys().filter(|k| !self.our_facts.contains_key(*k)))
        {
            let of = |facts: &BTreeMap<String, f64>| facts.get(key).map_or("-".into(), |v| number(*v));
            let theirs = self.theirs.map_or(String::new(), |_| of(&self.their_facts));
            println!("  {key:<24} {:>14} {theirs:>14}", of(&self.our_facts));
        }
        println!("  {:<24} {}", "command", command());
        for problem in &self.problems {
            println!("  NOT VALID: {problem}");
        }
    }
}

impl BenchResult {
    fn print_conditions(&self) {
        let [before, after] = self.cache_line();
        let cpu: Vec<String> = self.cpu().iter().map(|c| format!("{:.0} %", 100.0 * c)).collect();
        println!("  {:<24} {before:>14.0} ns before, {after:.0} ns after", "cache line round trip");
        println!("  {:<24} {:>14}", "busy CPUs", cpu.join(" "));
        let (steal, other_programs) =
            (100.0 * self.worst(|c| c.steal), 100.0 * self.worst(|c| c.other_programs));
        println!("  {:<24} {steal:>12.1} % stolen, {other_programs:.1} % others, at worst", "lost CPU");
    }
}

/// Formats a number: the larger it is, the fewer decimals it gets.
pub fn number(value: f64) -> String {
    match value.abs() {
        a if a >= 100.0 || value.fract() == 0.0 => format!("{value:.0}"),
        a if a >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_complete() {
        let result = BenchResult {
            name: "x".into(),
            unit: "1/s".into(),
            ours: 1.5,
            theirs: Some(1.0),
            ratio: Some(1.5),
            spread: [1.4, 1.6],
            pairs: 5,
            conditions: vec![Conditions {
                cache_line_ns: [70.0, 80.0],
                steal: 0.01,
                other_programs: 0.02,
                cpu: vec![1.0],
            }],
            our_facts: BTreeMap::from([("server_idle_polls".into(), 0.001)]),
            their_facts: BTreeMap::new(),
            problems: vec!["the moon was full".into()],
        };
        let json = result.to_json();
        assert_eq!(json["ratio"], 1.5);
        assert_eq!(json["valid"], false);
        assert_eq!(json["conditions"]["cache_line_ns"]["after"], 80.0);
        assert_eq!(json["conditions"]["ours"]["server_idle_polls"], 0.001);
        assert!(json["conditions"]["versions"]["smoltcp"].is_string());
        assert!(json["conditions"]["command"].is_string());
    }

    #[test]
    fn the_recorded_smoltcp_version_is_correct() {
        let lock = include_str!("../../../../Cargo.lock");
        let entry = lock.split("[[package]]").find(|p| p.contains("name = \"smoltcp\"")).unwrap();
        assert!(entry.contains(&format!("version = \"{SMOLTCP_VERSION}\"")), "{entry}");
    }
}
