//! The result of a comparison.

use crate::table::{Table, with_thousands_separators};
use core::fmt;
use ginnel_apps::load::Report;
use ginnel_apps::units::show_nanos;
use ginnel_measure::cpu_account::{Bottleneck, CpuAccount};
use ginnel_measure::testbed::Medium;
use ginnel_measure::{CoreLayout, median};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;

/// Largest share of the two cores that others may use before a result gets a warning.
pub const OTHER_PROGRAMS_SHARE_MAX: f64 = 0.1;

/// Result of one run on one stack.
#[derive(Clone, Debug)]
pub struct MeasuredRun {
    /// Requests per second.
    rate: f64,
    /// Requests per second of CPU time of the server's side.
    per_core: f64,
    /// Median and 99th percentile of the latency in nanoseconds.
    median_ns: u64,
    p99_ns: u64,
    /// Requests without a successful response.
    errors: u64,
    bottleneck: Bottleneck,
    shares: BTreeMap<&'static str, f64>,
    /// Share of the two cores that other programs used.
    other_programs: f64,
    /// Share of the two cores' time that the hypervisor gave to others.
    stolen: f64,
    /// CPU time by component, as text.
    account: String,
}

impl MeasuredRun {
    /// Creates the result from a generator's report and the CPU accounting.
    pub fn new(report: &Report, account: &CpuAccount) -> Self {
        Self {
            rate: report.achieved.requests_per_second,
            per_core: report.achieved.requests_per_second / account.server_share(),
            median_ns: report.latency_ns.total.p50,
            p99_ns: report.latency_ns.total.p99,
            errors: report.failures.values().sum::<u64>() + report.unsuccessful(),
            bottleneck: account.bottleneck,
            shares: account.shares.clone(),
            other_programs: account.other_programs_share,
            stolen: account.stolen_share,
            account: account.line.clone(),
        }
    }

    /// Formats the run as one line for the progress output.
    pub fn line(&self) -> String {
        format!(
            "{} requests/s, median {}, {} errors; {}",
            with_thousands_separators(self.rate as u64),
            show_nanos(self.median_ns),
            self.errors,
            self.account
        )
    }

    /// Returns the share of the two cores that others had, on this machine or on its host.
    fn others(&self) -> f64 {
        self.other_programs + self.stolen
    }

    fn to_json(&self) -> Value {
        json!({
            "requests_per_second": self.rate,
            "requests_per_cpu_second": self.per_core,
            "median_ns": self.median_ns,
            "p99_ns": self.p99_ns,
            "errors": self.errors,
            "bottleneck": self.bottleneck.name(),
            "cpu": self.shares,
            "other_programs_cpu": self.other_programs,
            "stolen_cpu": self.stolen,
        })
    }
}

/// All runs of a comparison.
#[derive(Clone, Debug)]
pub struct ComparisonSummary {
    program: Vec<String>,
    url: String,
    layout: CoreLayout,
    /// The media of the kernel and of Ginnel.
    media: [Medium; 2],
    kernel: Vec<MeasuredRun>,
    ginnel: Vec<MeasuredRun>,
}

/// The faster stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ComparisonVerdict {
    Ginnel,
    Kernel,
    /// Some pairs favour one stack and some the other, or no pair has a ratio.
    Neither,
}

impl ComparisonSummary {
    /// Creates a summary without runs.
    pub fn new(program: &[OsString], url: &str, layout: CoreLayout, media: [Medium; 2]) -> Self {
        let program = program.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        Self { program, url: url.into(), layout, media, kernel: Vec::new(), ginnel: Vec::new() }
    }

    /// Adds a pair of runs.
    pub fn add(&mut self, kernel: MeasuredRun, ginnel: MeasuredRun) {
        self.kernel.push(kernel);
        self.ginnel.push(ginnel);
    }

    /// Returns Ginnel's requests per second of CPU time divided by the kernel's: median, smallest and largest
    /// of all pairs. A pair in which the kernel has answered no request has no ratio.
    fn ratio(&self) -> Option<[f64; 3]> {
        let pairs = self.ginnel.iter().zip(&self.kernel).filter(|(_, kernel)| kernel.rate > 0.0);
        let ratios: Vec<f64> = pairs.map(|(ginnel, kernel)| ginnel.per_core / kernel.per_core).collect();
        let (low, high) = spread(&ratios);
        Some([median(&ratios)?, low, high])
    }

    fn verdict(&self) -> ComparisonVerdict {
        match self.ratio() {
            Some([_, low, _]) if low > 1.0 => ComparisonVerdict::Ginnel,
            Some([_, _, high]) if high < 1.0 => ComparisonVerdict::Kernel,
            _ => ComparisonVerdict::Neither,
        }
    }

    /// Formats the verdict as a sentence.
    fn sentence(&self) -> String {
        let Some([ratio, low, high]) = self.ratio() else { return "Nothing was measured.".into() };
        match self.verdict() {
            ComparisonVerdict::Ginnel => format!("Ginnel is faster: {ratio:.2} times as fast as the kernel."),
            ComparisonVerdict::Kernel => {
                format!("The kernel is faster: {:.2} times as fast as Ginnel.", 1.0 / ratio)
            }
            ComparisonVerdict::Neither => format!(
                "Neither is faster for certain: Ginnel was between {low:.2} and {high:.2} times as fast as the kernel."
            ),
        }
    }

    /// Returns the reasons why the result may be wrong.
    fn find_warnings(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        for (name, runs) in [("the kernel", &self.kernel), ("Ginnel", &self.ginnel)] {
            let idle = runs.iter().filter(|run| !run.bottleneck.is_server()).count();
            if idle > 0 {
                doubts.push(format!(
                    "on {name} the program's core was not full in {idle} of {} runs: its requests/s may be more than shown (raise --connections, or the generator is the limit)",
                    runs.len()
                ));
            }
            let errors: u64 = runs.iter().map(|run| run.errors).sum();
            if errors > 0 {
                doubts.push(format!("on {name} {errors} requests had no answer of success"));
            }
        }
        for (who, of) in [
            ("other programs had", (|run| run.other_programs) as fn(&MeasuredRun) -> f64),
            ("the hypervisor gave others", |run| run.stolen),
        ] {
            let most = self.kernel.iter().chain(&self.ginnel).map(of).fold(0.0, f64::max);
            if most > OTHER_PROGRAMS_SHARE_MAX {
                doubts.push(format!(
                    "{who} up to {:.0} % of the cores: repeat it on a quiet machine",
                    100.0 * most
                ));
            }
        }
        doubts
    }

    /// Formats the summary as one line of JSON.
    pub fn to_json(&self) -> String {
        let runs = |runs: &[MeasuredRun]| runs.iter().map(MeasuredRun::to_json).collect::<Vec<_>>();
        let ratio =
            self.ratio().map(|[median, low, high]| json!({"median": median, "min": low, "max": high}));
        let arm = |runs: &[MeasuredRun]| median(&rates(runs));
        json!({
            "program": self.program,
            "url": self.url,
            "layout": format!("{:?}", self.layout).to_lowercase(),
            "device": self.media[1].name(),
            "kernel_device": kernel_name(self.media[0]),
            "requests_per_second": {"kernel": arm(&self.kernel), "ginnel": arm(&self.ginnel)},
            "ratio": ratio,
            "faster": match self.verdict() {
                ComparisonVerdict::Ginnel => "ginnel",
                ComparisonVerdict::Kernel => "kernel",
                ComparisonVerdict::Neither => "neither",
            },
            "verdict": self.sentence(),
            "doubts": self.find_warnings(),
            "runs": {"kernel": runs(&self.kernel), "ginnel": runs(&self.ginnel)},
        })
        .to_string()
    }
}

/// Returns the name of the medium of the kernel, whose end of a veth pair is not AF_XDP.
const fn kernel_name(medium: Medium) -> &'static str {
    match medium {
        Medium::Veth => "veth",
        other => other.name(),
    }
}

fn rates(runs: &[MeasuredRun]) -> Vec<f64> {
    runs.iter().map(|run| run.rate).collect()
}

fn spread(values: &[f64]) -> (f64, f64) {
    (values.iter().copied().fold(f64::MAX, f64::min), values.iter().copied().fold(f64::MIN, f64::max))
}

impl fmt::Display for ComparisonSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [kernel, ginnel] = self.media;
        let (kernel, ginnel) =
            (format!("kernel, {}", kernel_name(kernel)), format!("Ginnel, {}", ginnel.name()));
        let mut table = Table::new(&[&self.program.join(" "), &kernel, &ginnel]);
        let mut row = |name: &str, of: &dyn Fn(&[MeasuredRun]) -> String| {
            table.add_row([name.into(), of(&self.kernel), of(&self.ginnel)]);
        };
        let middle = |of: fn(&MeasuredRun) -> u64| {
            move |runs: &[MeasuredRun]| {
                let values: Vec<f64> = runs.iter().map(|run| of(run) as f64).collect();
                median(&values).unwrap_or_default()
            }
        };
        row("requests/s, median", &|runs| {
            with_thousands_separators(median(&rates(runs)).unwrap_or_default() as u64)
        });
        row("spread", &|runs| {
            let (low, high) = spread(&rates(runs));
            format!("{} to {}", with_thousands_separators(low as u64), with_thousands_separators(high as u64))
        });
        row("requests per CPU second", &|runs| {
            let rates: Vec<f64> = runs.iter().map(|run| run.per_core).collect();
            with_thousands_separators(median(&rates).unwrap_or_default() as u64)
        });
        row("answer, median", &|runs| show_nanos(middle(|run| run.median_ns)(runs) as u64));
        row("answer, p99", &|runs| show_nanos(middle(|run| run.p99_ns)(runs) as u64));
        row("errors", &|runs| with_thousands_separators(runs.iter().map(|run| run.errors).sum()));
        row("CPU time of others", &|runs| {
            let shares: Vec<f64> = runs.iter().map(|run| 100.0 * run.others()).collect();
            let (_, high) = spread(&shares);
            format!("{:.0} %, at most {high:.0} %", median(&shares).unwrap_or_default())
        });
        row("bottleneck", &|runs| {
            let mut names: Vec<&str> = runs.iter().map(|run| run.bottleneck.name()).collect();
            names.sort_unstable();
            names.dedup();
            names.join(", ")
        });
        write!(f, "{table}")?;
        if let Some([ratio, low, high]) = self.ratio() {
            let pairs = self.kernel.len();
            writeln!(
                f,
                "\nGinnel / kernel, per CPU second: {ratio:.2} ({low:.2} to {high:.2}, {pairs} pairs)"
            )?;
        }
        writeln!(f, "{}", self.sentence())?;
        for doubt in self.find_warnings() {
            writeln!(f, "warning: {doubt}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(rate: f64) -> MeasuredRun {
        MeasuredRun {
            rate,
            per_core: rate,
            median_ns: 1000,
            p99_ns: 2000,
            errors: 0,
            bottleneck: Bottleneck::Server,
            shares: BTreeMap::from([("server_cpu", 1.0)]),
            other_programs: 0.01,
            stolen: 0.02,
            account: "bottleneck: server".into(),
        }
    }

    fn summary(pairs: &[(f64, f64)]) -> ComparisonSummary {
        let mut summary = ComparisonSummary::new(
            &["nginx".into()],
            "http://10.77.0.1/",
            CoreLayout::Charged,
            [Medium::Veth; 2],
        );
        for (kernel, ginnel) in pairs {
            summary.add(run(*kernel), run(*ginnel));
        }
        summary
    }

    #[test]
    fn the_verdict_is_a_sentence() {
        let ginnel = summary(&[(100.0, 300.0), (50.0, 100.0), (100.0, 250.0)]);
        let text = ginnel.to_string();
        assert!(text.contains("Ginnel is faster: 2.50 times as fast as the kernel."), "{text}");
        assert!(text.contains("2.50 (2.00 to 3.00, 3 pairs)") && !text.contains("warning"), "{text}");
        let kernel = summary(&[(200.0, 100.0), (200.0, 100.0)]).to_string();
        assert!(kernel.contains("The kernel is faster: 2.00 times as fast as Ginnel."), "{kernel}");
        let neither = summary(&[(100.0, 90.0), (100.0, 120.0)]).to_string();
        assert!(
            neither.contains("Neither is faster for certain") && neither.contains("0.90 and 1.20"),
            "{neither}"
        );
    }

    #[test]
    fn each_doubtful_run_gives_a_warning() {
        let mut doubtful = summary(&[(100.0, 200.0), (100.0, 200.0)]);
        doubtful.kernel[1].bottleneck = Bottleneck::Generator;
        (doubtful.ginnel[0].errors, doubtful.ginnel[1].other_programs) = (7, 0.25);
        doubtful.ginnel[1].stolen = 0.125;
        let text = doubtful.to_string();
        assert!(text.contains("on the kernel the program's core was not full in 1 of 2 runs"), "{text}");
        assert!(text.contains("on Ginnel 7 requests had no answer of success"), "{text}");
        assert!(text.contains("generator, server"), "{text}");
        assert!(text.contains("other programs had up to 25 % of the cores"), "{text}");
        assert!(text.contains("the hypervisor gave others up to 12 % of the cores"), "{text}");
        let others = text.lines().find(|line| line.starts_with("| CPU time of others")).unwrap();
        assert!(
            others.contains(" 3 %, at most 3 % |") && others.ends_with(" 20 %, at most 38 % |"),
            "{text}"
        );
        let json: Value = serde_json::from_str(&doubtful.to_json()).unwrap();
        assert_eq!((&json["faster"], &json["ratio"]["median"]), (&json!("ginnel"), &json!(2.0)));
        assert_eq!(json["runs"]["kernel"][1]["bottleneck"], "generator");
        assert_eq!(json["doubts"].as_array().unwrap().len(), 4);
        assert_eq!(json["runs"]["ginnel"][1]["stolen_cpu"], 0.125);
    }

    #[test]
    fn without_kernel_responses_there_is_no_ratio() {
        let text = summary(&[(0.0, 100.0)]).to_string();
        assert!(text.contains("Nothing was measured.") && !text.contains("inf"), "{text}");
    }
}
