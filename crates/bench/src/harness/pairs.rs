//! Pairs of measurements (A B A B …): ours and theirs alternate, so that both see equal conditions. A pair is
//! repeated, a limited number of times, if the conditions changed during it.

use super::machine::{CpuTimes, Cpus, cache_line_round_trip, children_cpu_time, process_cpu_time};
use super::result::{BenchResult, median};
use super::{MeasureError, Options};
use core::time::Duration;
use std::collections::BTreeMap;

/// A pair is repeated if the round trip of a cache line changed by more than this factor.
const CACHE_LINE_CHANGE_MAX: f64 = 1.5;
/// A pair is repeated if other programs used more than this share of the machine.
const OTHER_PROGRAMS_SHARE_MAX: f64 = 0.03;
/// A pair is repeated if the host took more than this share of the machine (steal time).
const STEAL_SHARE_MAX: f64 = 0.02;

/// One measurement of one arm.
#[derive(Clone, Debug, Default)]
pub struct Measurement {
    /// The figure.
    pub value: f64,
    /// Additional facts.
    pub facts: BTreeMap<String, f64>,
    /// Reasons why the measurement is not valid.
    pub problems: Vec<String>,
    /// CPU time of the kernel threads that took part. They are neither children of this process nor other
    /// programs.
    pub kernel_time: Duration,
}

impl Measurement {
    /// Creates a measurement with this figure.
    pub fn new(value: f64) -> Self {
        Self { value, ..Self::default() }
    }

    /// Adds a fact.
    #[must_use]
    pub fn with(mut self, name: &str, value: f64) -> Self {
        self.facts.insert(name.into(), value);
        self
    }
}

/// State of the machine during a measurement.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    /// Round trip of a cache line before and after the measurement, in ns.
    pub cache_line_ns: [f64; 2],
    /// Share of the machine that the host took (steal time).
    pub steal: f64,
    /// Share of the machine that other programs used.
    pub other_programs: f64,
    /// Busy share of each CPU.
    pub cpu: Vec<f64>,
}

impl Conditions {
    /// Runs `run` and measures the conditions during it.
    pub fn measure(
        cpus: Cpus,
        run: impl FnOnce() -> Result<Measurement, MeasureError>,
    ) -> Result<(Measurement, Conditions), MeasureError> {
        Self::during(cpus, run, |measured| measured.kernel_time)
    }

    fn during<T>(
        cpus: Cpus,
        run: impl FnOnce() -> Result<T, MeasureError>,
        kernel_time: impl FnOnce(&T) -> Duration,
    ) -> Result<(T, Conditions), MeasureError> {
        let before_ns = cache_line_round_trip(cpus)?;
        let (times, own) = (CpuTimes::read()?, process_cpu_time() + children_cpu_time()?);
        let result = run()?;
        let times = CpuTimes::read()?.since(&times);
        let own = process_cpu_time() + children_cpu_time()? - own + kernel_time(&result);
        let conditions = Conditions {
            cache_line_ns: [before_ns, cache_line_round_trip(cpus)?],
            steal: times.steal_share(),
            other_programs: times.other_programs_share(own),
            cpu: times.busy_shares(),
        };
        Ok((result, conditions))
    }

    fn problems(&self, bound: Bound) -> Vec<String> {
        let mut problems = Vec::new();
        if self.other_programs > OTHER_PROGRAMS_SHARE_MAX {
            problems.push(format!("other programs used {:.0} % of the machine", 100.0 * self.other_programs));
        }
        if bound != Bound::Turns && self.steal > STEAL_SHARE_MAX {
            problems.push(format!("the hypervisor took {:.0} % of the CPU time (steal)", 100.0 * self.steal));
        }
        let [a, b] = self.cache_line_ns;
        if bound == Bound::Machine && a.max(b) > CACHE_LINE_CHANGE_MAX * a.min(b) {
            problems.push(format!(
                "the round trip of a cache line between the CPUs changed from {a:.0} to {b:.0} ns"
            ));
        }
        problems
    }
}

/// Says whether higher or lower figures are better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Better {
    /// The ratio is ours divided by theirs.
    #[default]
    Higher,
    /// The ratio is theirs divided by ours.
    Lower,
}

impl Better {
    fn ratio(self, ours: f64, theirs: f64) -> f64 {
        match self {
            Self::Higher => ours / theirs,
            Self::Lower => theirs / ours,
        }
    }
}

/// Resource that limits a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The machine, including the speed at which cores exchange cache lines.
    Machine,
    /// A link that is much slower than the machine.
    Link,
    /// The machine, with alternating slices of milliseconds for both arms, so that disturbances affect both
    /// and stalled slices do not count.
    Turns,
}

/// A measurement of one arm.
pub type Arm<'a> = Box<dyn FnMut() -> Result<Measurement, MeasureError> + 'a>;

/// One measurement of each arm.
struct MeasuredPair {
    ours: Measurement,
    theirs: Option<Measurement>,
    conditions: Vec<Conditions>,
}

impl MeasuredPair {
    fn problems(&self, bound: Bound) -> Vec<String> {
        let arms = [Some(&self.ours), self.theirs.as_ref()].into_iter().flatten();
        let mut all: Vec<String> = self.conditions.iter().flat_map(|c| c.problems(bound)).collect();
        all.extend(arms.flat_map(|m| m.problems.iter().cloned()));
        let round_trips: Vec<f64> = self.conditions.iter().flat_map(|c| c.cache_line_ns).collect();
        let (low, high) = (
            round_trips.iter().copied().fold(f64::MAX, f64::min),
            round_trips.iter().copied().fold(0.0, f64::max),
        );
        if bound == Bound::Machine && all.is_empty() && high > CACHE_LINE_CHANGE_MAX * low {
            all.push(format!(
                "the round trip of a cache line between the CPUs varied from {low:.0} to {high:.0} ns"
            ));
        }
        all
    }
}

/// Runs the pairs and summarizes them.
pub fn run(
    name: &str,
    unit: &str,
    options: &Options,
    bound: Bound,
    ours: Arm<'_>,
    theirs: Option<Arm<'_>>,
) -> Result<BenchResult, MeasureError> {
    run_for(Better::Higher, name, unit, options, bound, ours, theirs)
}

/// Runs the pairs for figures of which higher or lower ones are better.
pub fn run_for(
    better: Better,
    name: &str,
    unit: &str,
    options: &Options,
    bound: Bound,
    mut ours: Arm<'_>,
    mut theirs: Option<Arm<'_>>,
) -> Result<BenchResult, MeasureError> {
    let cpus = Cpus::choose()?;
    collect_pairs(better, name, unit, options, bound, || {
        let (a, conditions) = Conditions::measure(cpus, &mut ours)?;
        let mut pair = MeasuredPair { ours: a, theirs: None, conditions: vec![conditions] };
        if let Some(theirs) = &mut theirs {
            let (b, conditions) = Conditions::measure(cpus, theirs)?;
            pair.theirs = Some(b);
            pair.conditions.push(conditions);
        }
        Ok(pair)
    })
}

/// Runs the pairs if one measurement covers both arms.
pub fn run_interleaved(
    name: &str,
    unit: &str,
    options: &Options,
    mut both: impl FnMut() -> Result<[Measurement; 2], MeasureError>,
) -> Result<BenchResult, MeasureError> {
    let cpus = Cpus::choose()?;
    collect_pairs(Better::Higher, name, unit, options, Bound::Turns, || {
        let ([ours, theirs], conditions) = Conditions::during(cpus, &mut both, |_| Duration::ZERO)?;
        Ok(MeasuredPair { ours, theirs: Some(theirs), conditions: vec![conditions] })
    })
}

fn collect_pairs(
    better: Better,
    name: &str,
    unit: &str,
    options: &Options,
    bound: Bound,
    mut measure: impl FnMut() -> Result<MeasuredPair, MeasureError>,
) -> Result<BenchResult, MeasureError> {
    let wanted = options.pairs();
    let mut repeats_left = if options.smoke || options.force { 0 } else { wanted };
    let mut pairs: Vec<MeasuredPair> = Vec::new();
    let mut all_problems = Vec::new();
    while pairs.len() < wanted {
        let pair = measure()?;
        let problems = pair.problems(bound);
        let number = pairs.len() + 1;
        let b = pair.theirs.as_ref().map_or(String::new(), |b| format!(" against {:.4e}", b.value));
        println!("  {name} {number}/{wanted}: {:.4e}{b} {unit}", pair.ours.value);
        for problem in &problems {
            println!("    {problem}");
        }
        if !problems.is_empty() && repeats_left > 0 {
            repeats_left -= 1;
            println!("    repeated");
            continue;
        }
        all_problems.extend(problems);
        pairs.push(pair);
    }
    Ok(summarize(better, name, unit, &pairs, all_problems))
}

fn summarize(
    better: Better,
    name: &str,
    unit: &str,
    pairs: &[MeasuredPair],
    mut problems: Vec<String>,
) -> BenchResult {
    let ours: Vec<f64> = pairs.iter().map(|p| p.ours.value).collect();
    let theirs: Vec<f64> = pairs.iter().filter_map(|p| p.theirs.as_ref().map(|m| m.value)).collect();
    let ratio = |p: &MeasuredPair| p.theirs.as_ref().map(|theirs| better.ratio(p.ours.value, theirs.value));
    let ratios: Vec<f64> = pairs.iter().filter_map(ratio).collect();
    let spread_of = if ratios.is_empty() { &ours } else { &ratios };
    let spread = [
        spread_of.iter().copied().fold(f64::MAX, f64::min),
        spread_of.iter().copied().fold(f64::MIN, f64::max),
    ];
    problems.sort();
    problems.dedup();
    let conditions = pairs.iter().flat_map(|p| &p.conditions);
    BenchResult {
        name: name.into(),
        unit: unit.into(),
        ours: median(&ours).unwrap_or(f64::NAN),
        theirs: median(&theirs),
        ratio: median(&ratios),
        spread,
        pairs: pairs.len(),
        conditions: conditions.cloned().collect(),
        our_facts: medians(pairs.iter().map(|p| &p.ours)),
        their_facts: medians(pairs.iter().filter_map(|p| p.theirs.as_ref())),
        problems,
    }
}

/// Returns the median of each fact over all pairs.
fn medians<'a>(all: impl Iterator<Item = &'a Measurement>) -> BTreeMap<String, f64> {
    let mut values: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for measured in all {
        for (name, value) in &measured.facts {
            values.entry(name.clone()).or_default().push(*value);
        }
    }
    values.into_iter().filter_map(|(name, v)| Some((name, median(&v)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(ours: f64, theirs: f64) -> MeasuredPair {
        let theirs = Some(Measurement::new(theirs).with("idle", theirs / 100.0));
        MeasuredPair { ours: Measurement::new(ours), theirs, conditions: vec![Conditions::default()] }
    }

    #[test]
    fn the_ratio_is_the_median_ratio() {
        // The machine was twice as fast during the last pair; the ratio does not show it.
        let result = summarize(
            Better::Higher,
            "x",
            "1/s",
            &[pair(13.0, 10.0), pair(14.0, 10.0), pair(30.0, 20.0)],
            Vec::new(),
        );
        assert_eq!((result.ratio, result.spread), (Some(1.4), [1.3, 1.5]));
        assert_eq!((result.ours, result.theirs), (14.0, Some(10.0)));
        assert_eq!(result.their_facts["idle"], 0.1);
    }

    #[test]
    fn the_ratio_is_inverted_for_low_figures() {
        let result = summarize(Better::Lower, "x", "µs", &[pair(10.0, 25.0)], Vec::new());
        assert_eq!((result.ours, result.theirs, result.ratio), (10.0, Some(25.0), Some(2.5)));
    }

    #[test]
    fn with_one_arm_the_spread_is_the_figures() {
        let alone = |v| MeasuredPair { ours: Measurement::new(v), theirs: None, conditions: Vec::new() };
        let result =
            summarize(Better::Higher, "x", "bytes", &[alone(3.0), alone(1.0), alone(2.0)], Vec::new());
        assert_eq!((result.ours, result.theirs, result.ratio, result.spread), (2.0, None, None, [1.0, 3.0]));
    }

    #[test]
    fn changed_conditions_are_reported() {
        let calm = Conditions { cache_line_ns: [100.0, 120.0], ..Conditions::default() };
        assert!(calm.problems(Bound::Machine).is_empty());
        let moved = Conditions { cache_line_ns: [100.0, 420.0], ..Conditions::default() };
        assert_eq!(moved.problems(Bound::Machine).len(), 1);
        let both = Conditions { other_programs: 0.2, steal: 0.1, ..calm.clone() };
        assert_eq!(both.problems(Bound::Machine).len(), 2);
        let by_turns = Conditions { other_programs: 0.2, steal: 0.1, ..moved.clone() };
        assert_eq!(by_turns.problems(Bound::Turns).len(), 1, "both arms ran under equal conditions");
        let slow = Conditions { cache_line_ns: [400.0, 420.0], ..Conditions::default() };
        let pair = MeasuredPair { ours: Measurement::default(), theirs: None, conditions: vec![calm, slow] };
        assert_eq!(
            pair.problems(Bound::Machine).len(),
            1,
            "conditions were steady in each arm, but differed between the arms"
        );
    }
}
