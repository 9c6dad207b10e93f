//! Finds scripts, runs many of them, and lists the differences that they declare.

use super::ast::{BackendKind, Script, Target};
use super::ginnel::GinnelBackend;
use super::kernel;
use super::parser;
use super::report::Failure;
use super::runner;
use crate::steal;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Options of a run of many cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Number of concurrent cases. Cases against the kernel mostly sleep.
    pub jobs: usize,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { jobs: 32 }
    }
}

/// A script and one of its runs.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The script.
    pub script: &'a Script,
    /// The run.
    pub target: Target,
}

/// Result of a case.
#[derive(Clone, Debug)]
pub enum CaseOutcome {
    /// The case passed; this is the number of its runs: 1 unless a processor stalled.
    Passed(u32),
    /// The case failed; this is the failure of the last run.
    Failed(Box<Failure>),
}

/// Returns the directory of the repository's scripts.
pub fn repository_scripts() -> PathBuf {
    // From crates/testkit to the root of the repository.
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new(".")).join("tests/scripts")
}

/// Returns all `.pkt` files below a directory, or the file itself, sorted by name.
///
/// # Errors
/// If a directory cannot be read.
pub fn find(path: &Path) -> io::Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(find(&path)?);
        } else if path.extension().is_some_and(|e| e == "pkt") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Reads and parses a script. Its path is stored relative to the root of the repository if possible.
///
/// # Errors
/// If the file cannot be read or parsed.
pub fn load(path: &Path) -> Result<Script, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let root = repository_scripts();
    let root = root.ancestors().nth(2).unwrap_or(Path::new("."));
    let short = path.strip_prefix(root).unwrap_or(path);
    parser::parse(short, &text).map_err(|e| format!("{}:{}: {}", short.display(), e.line, e.message))
}

/// Runs one case. A run on the kernel that failed while a processor stalled is repeated.
pub fn run_case(case: Case<'_>) -> CaseOutcome {
    let ended = match case.target.backend {
        BackendKind::Kernel => steal::repeat_if_stalled(|| run_once(case)),
        BackendKind::Ginnel => run_once(case).map(|()| 1),
    };
    ended.map_or_else(|failure| CaseOutcome::Failed(Box::new(failure)), CaseOutcome::Passed)
}

/// Runs one case once.
///
/// # Errors
/// A description of the failure.
pub fn run_once(case: Case<'_>) -> Result<(), Failure> {
    let Case { script, target } = case;
    match target.backend {
        BackendKind::Kernel => {
            let work = |backend: &mut dyn super::backend::Backend| runner::run(script, target, backend);
            kernel::with_backend(target, &script.directives, work)
                .unwrap_or_else(|e| Err(cannot_start(case, &e)))
        }
        BackendKind::Ginnel => match GinnelBackend::new(target, &script.directives) {
            Ok(mut ginnel) => runner::run(script, target, &mut ginnel),
            Err(problem) => Err(cannot_start(case, &problem)),
        },
    }
}

fn cannot_start(case: Case<'_>, error: &dyn std::fmt::Display) -> Failure {
    Failure {
        path: case.script.path.clone(),
        line: 1,
        target: case.target,
        message: format!("the backend cannot start: {error}"),
        history: Vec::new(),
    }
}

/// Runs cases in parallel, the longest first, and calls `report` after each. Returns the outcomes in the
/// order of `cases`.
pub fn run_all(
    cases: &[Case<'_>],
    options: RunOptions,
    report: &(dyn Fn(Case<'_>, &CaseOutcome) + Sync),
) -> Vec<CaseOutcome> {
    let mut order: Vec<usize> = (0..cases.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(cases[i].script.nominal_duration(cases[i].target)));
    let next = AtomicUsize::new(0);
    let results = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..options.jobs.min(cases.len()) {
            scope.spawn(|| {
                while let Some(&index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let outcome = run_case(cases[index]);
                    report(cases[index], &outcome);
                    results.lock().unwrap_or_else(PoisonError::into_inner).insert(index, outcome);
                }
            });
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner).into_values().collect()
}

/// Returns the text of `docs/tcp-differences.md`.
pub fn differences_listing(scripts: &[Script]) -> String {
    let mut text = String::from(
        "# Where Ginnel and Linux differ\n\n\
         Generated from the `differs:` and `only:` directives of `tests/scripts` by `ginnel-script --differences`; a\n\
         test keeps it current. In everything else that those scripts check, the two stacks behave alike.\n",
    );
    for (title, only) in [("Differences", false), ("Features of one stack", true)] {
        let mut rows = Vec::new();
        for script in scripts {
            let chosen: Vec<_> = if only {
                script.directives.only.iter().collect()
            } else {
                script.directives.differs.iter().collect()
            };
            let name = script.path.strip_prefix("tests/scripts").unwrap_or(&script.path).display();
            rows.extend(chosen.iter().map(|d| format!("| {name} | {} | {} |", d.backend.name(), d.reason)));
        }
        if !rows.is_empty() {
            let _ = write!(
                text,
                "\n## {title}\n\n| Script | Stack | Behaviour, and the section that decides |\n|---|---|---|\n"
            );
            let _ = writeln!(text, "{}", rows.join("\n"));
        }
    }
    text
}
