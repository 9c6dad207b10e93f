//! Runs the repository's packet scripts through the library, in real time: calls and packets use the
//! interface of packetdrill.
//!
//! `make test` runs the shortest script of each directory of `tests/scripts`, `make suites` runs all scripts.

mod library;

use ginnel_testkit::script::ast::{BackendKind, Script, Target};
use ginnel_testkit::script::{runner, suite};
use ginnel_testkit::steal;
use library::LibraryBackend;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of concurrent runs. A run mostly waits, but each has several threads that must not wait for a
/// processor.
const CONCURRENT_RUNS: usize = 4;

fn run(script: &Script, target: Target) -> Result<(), String> {
    let mut backend = LibraryBackend::new(script, target)?;
    runner::run(script, target, &mut backend).map_err(|failure| failure.to_string())
}

fn scripts() -> Vec<Script> {
    let folder = std::env::var_os("GINNEL_SCRIPTS_FOLDER").map_or_else(suite::repository_scripts, Into::into);
    let files = suite::find(&folder).expect("the folder of the scripts is readable");
    files.iter().map(|file| suite::load(file).unwrap_or_else(|e| panic!("{e}"))).collect()
}

/// Returns the runs of the scripts: each over each version of IP. The environment variable `GINNEL_SCRIPTS`
/// selects the scripts whose path contains its value; `GINNEL_SCRIPTS_FOLDER` is a folder to use instead of
/// `tests/scripts`.
fn cases(scripts: &[Script]) -> Vec<(&Script, Target)> {
    let chosen = std::env::var("GINNEL_SCRIPTS").unwrap_or_default();
    scripts
        .iter()
        .filter(|script| script.path.to_string_lossy().contains(&chosen))
        .flat_map(|script| script.targets().into_iter().map(move |target| (script, target)))
        .filter(|(_, target)| target.backend == BackendKind::Ginnel)
        .collect()
}

/// Runs the cases, the longest first, and asserts that all pass and that there are any.
fn assert_pass(mut cases: Vec<(&Script, Target)>) {
    assert!(!cases.is_empty(), "no script matches GINNEL_SCRIPTS: give a part of a path below tests/scripts");
    cases.sort_by_key(|(script, target)| std::cmp::Reverse(script.nominal_duration(*target)));
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..CONCURRENT_RUNS {
            scope.spawn(|| {
                while let Some((script, target)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(problem) = steal::repeat_if_stalled(|| run(script, *target)) {
                        let ip = library::ip_name(target.ip);
                        let failure = format!("{} over {ip}: {problem}", script.path.display());
                        failures.lock().unwrap().push(failure);
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    println!("{} of {} runs pass", cases.len() - failures.len(), cases.len());
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn one_script_of_each_directory_passes() {
    let scripts = scripts();
    let mut shortest = BTreeMap::new();
    for (script, target) in cases(&scripts) {
        let length = script.nominal_duration(target);
        let case = shortest.entry(script.path.parent()).or_insert((length, script, target));
        if length < case.0 {
            *case = (length, script, target);
        }
    }
    assert_pass(shortest.into_values().map(|(_, script, target)| (script, target)).collect());
}

#[test]
#[ignore = "slow: runs in real time; run it with `make suites`"]
fn all_scripts_pass() {
    let scripts = scripts();
    assert_pass(cases(&scripts));
}
