//! Runs cases concurrently, because most of them mostly wait.
#![allow(unsafe_code)] // a handler at the exit of the process

use crate::case::{Case, CaseReport};
use ginnel_testkit::interop::unavailable;
use ginnel_testkit::skip;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, Once};

/// Exit code of a test program with a failed test.
const FAILED: i32 = 101;

/// True if the filter has selected a case of a test that has run.
static HAS_SELECTED: AtomicBool = AtomicBool::new(false);

/// Runs all cases of a test, `lanes` at a time, and panics with the reports of those that failed.
///
/// `GINNEL_INTEROP=text` runs only the cases whose names contain the text. If there is none in all tests that
/// run, the test program fails.
pub fn run(test: &str, lanes: usize, cases: Vec<Case>) {
    run_cases(test, lanes, cases, |case| case.run().map(|passed| summary(case, &passed)));
}

/// Runs `check` on each case, `lanes` at a time; the cases only describe networks.
pub fn check(test: &str, lanes: usize, cases: Vec<Case>, check: fn(&Case) -> Result<(), String>) {
    run_cases(test, lanes, cases, |case| {
        let folder = case.capture_folder();
        match check(case) {
            Ok(()) => {
                // The directory is missing if the case writes no capture.
                let _ = std::fs::remove_dir_all(folder);
                Ok(format!("{:<60} passed", case.name))
            }
            Err(e) => Err(format!("{}: {e}\n{case:?}\ncapture: {}", case.name, folder.display())),
        }
    });
}

static AT_EXIT: Once = Once::new();

/// Fails if no test had a case that the filter selects. Only the end of the process knows of all tests.
extern "C" fn check_selection() {
    if !HAS_SELECTED.load(Ordering::Relaxed) {
        eprintln!("GINNEL_INTEROP selects no case of the tests that have run");
        // SAFETY: ends the process, whose tests have ended.
        unsafe { libc::_exit(FAILED) };
    }
}

fn run_cases(
    test: &str,
    lanes: usize,
    cases: Vec<Case>,
    run: impl Fn(&Case) -> Result<String, String> + Sync,
) {
    if let Some(reason) = unavailable() {
        return skip(test, &reason);
    }
    let wanted = std::env::var("GINNEL_INTEROP").unwrap_or_default();
    let cases: Vec<_> = cases.into_iter().filter(|case| case.name.contains(&wanted)).collect();
    HAS_SELECTED.fetch_or(!cases.is_empty(), Ordering::Relaxed);
    // SAFETY: the function is valid until the process ends.
    AT_EXIT.call_once(|| assert_eq!(unsafe { libc::atexit(check_selection) }, 0));
    let next = AtomicUsize::new(0);
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..lanes.min(cases.len()) {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match run(case) {
                        Ok(line) => println!("{line}"),
                        Err(report) => {
                            println!("{:<60} FAILED", case.name);
                            failures.lock().expect("no panic while held").push(report);
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no panic while held");
    let (failed, all) = (failures.len(), cases.len());
    assert!(failures.is_empty(), "{failed} of {all} cases failed:\n\n{}", failures.join("\n"));
}

/// Returns one line about a case that passed.
fn summary(case: &Case, passed: &CaseReport) -> String {
    let bytes: u64 = passed.ginnel.iter().chain(&passed.kernel).map(|outcome| outcome.received).sum();
    let seconds = passed.took.as_secs_f64();
    let retransmits = |outcomes: &[crate::plan::Outcome]| -> u32 {
        outcomes.iter().map(|outcome| outcome.info.retransmits).sum()
    };
    format!(
        "{:<60} {seconds:7.2} s {:8.1} MB/s, {} lost, retransmits {} and {}",
        case.name,
        bytes as f64 / seconds / 1e6,
        passed.frames_lost,
        retransmits(&passed.ginnel),
        retransmits(&passed.kernel),
    )
}
