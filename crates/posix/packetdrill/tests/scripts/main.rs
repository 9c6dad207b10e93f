//! The repository's packet scripts through the library, in real time: calls and packets go by the interface that packetdrill uses.

mod library;

use ginnel_testkit::script::ast::{BackendKind, Script, Target};
use ginnel_testkit::script::{runner, suite};
use ginnel_testkit::steal;
use library::Library;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A script that takes longer runs in `make suites` alone.
const QUICK: Duration = Duration::from_millis(1500);

/// Runs at once: they mostly wait.
const JOBS: usize = 24;
/// As many of what stumbled among so many.
const FEW_JOBS: usize = 4;
/// How often each of those is tried before it counts as failed.
const TRIES: u32 = 3;

fn run(script: &Script, target: Target) -> Result<(), String> {
    let mut library = Library::new(script, target)?;
    runner::run(script, target, &mut library).map_err(|failure| failure.to_string())
}

fn scripts() -> Vec<Script> {
    let files = suite::find(&suite::repository_scripts()).expect("tests/scripts is readable");
    files.iter().map(|file| suite::load(file).unwrap_or_else(|e| panic!("{e}"))).collect()
}

/// Does something with each, so many at once, and gives what came of it.
fn in_parallel<'a, T: Send>(
    jobs: usize,
    cases: &[(&'a Script, Target)],
    work: impl Fn(&'a Script, Target) -> Option<T> + Sync,
) -> Vec<T> {
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some((script, target)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = work(script, *target);
                    results.lock().unwrap().extend(result);
                }
            });
        }
    });
    results.into_inner().unwrap()
}

/// Runs all of them, and says which failed and how.
fn failures(mut cases: Vec<(&Script, Target)>) -> Vec<String> {
    cases.sort_by_key(|(script, target)| std::cmp::Reverse(script.nominal_duration(*target)));
    let stumbled =
        in_parallel(JOBS, &cases, |script, target| run(script, target).err().map(|_| (script, target)));
    let mut failed = in_parallel(FEW_JOBS, &stumbled, |script, target| {
        let problem = steal::retry_in_real_time(TRIES, || run(script, target)).err()?;
        Some(format!("{} over {}: {problem}", script.path.display(), library::ip_name(target.ip)))
    });
    failed.sort();
    failed
}

/// Runs the scripts that take so long, of those whose path contains `GINNEL_SCRIPTS`.
fn pass(lasting: impl Fn(Duration) -> bool) {
    let scripts = scripts();
    let chosen = std::env::var("GINNEL_SCRIPTS").unwrap_or_default();
    let is_chosen = |script: &&Script| script.path.to_string_lossy().contains(&chosen);
    let cases: Vec<_> = scripts
        .iter()
        .filter(is_chosen)
        .flat_map(|script| script.targets().into_iter().map(move |target| (script, target)))
        .filter(|(_, target)| target.backend == BackendKind::Ginnel)
        .filter(|(script, target)| lasting(script.nominal_duration(*target)))
        .collect();
    let all = cases.len();
    let failed = failures(cases);
    println!("{} of {all} runs pass", all - failed.len());
    assert!(failed.is_empty(), "{}", failed.join("\n\n"));
}

#[test]
fn quick_scripts_pass() {
    pass(|time| time <= QUICK);
}

#[test]
#[ignore = "long: scripts wait for time-outs; part of `make suites`"]
fn long_scripts_pass() {
    pass(|time| time > QUICK);
}
