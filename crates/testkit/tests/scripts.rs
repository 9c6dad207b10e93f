//! Runs every script of `tests/scripts` against both stacks.

use ginnel_testkit::script::ast::{BackendKind, Script};
use ginnel_testkit::script::suite::{self, Case, CaseOutcome, RunOptions};
use std::path::Path;

fn scripts() -> Vec<Script> {
    let files = suite::find(&suite::repository_scripts()).expect("tests/scripts is readable");
    files.iter().map(|file| suite::load(file).unwrap_or_else(|e| panic!("{e}"))).collect()
}

fn run(backend: BackendKind) {
    let scripts = scripts();
    let targets =
        |script: &Script| script.targets().into_iter().filter(|t| t.backend == backend).collect::<Vec<_>>();
    let cases: Vec<_> = scripts
        .iter()
        .flat_map(|script| targets(script).into_iter().map(move |target| Case { script, target }))
        .collect();
    assert!(!cases.is_empty(), "tests/scripts has no case for this stack");
    let report = |case: Case<'_>, outcome: &CaseOutcome| match outcome {
        CaseOutcome::Passed(1) => {}
        CaseOutcome::Passed(n) => {
            println!("{} ({}) passed at attempt {n}", case.script.path.display(), case.target)
        }
        CaseOutcome::Failed(failure) => println!("{failure}\n"),
    };
    let outcomes = suite::run_all(&cases, RunOptions::default(), &report);
    let failed = outcomes.iter().filter(|o| matches!(o, CaseOutcome::Failed(_))).count();
    assert_eq!(failed, 0, "of {} cases", outcomes.len());
    println!("{} cases", outcomes.len());
}

#[test]
fn every_script_passes_on_the_linux_kernel() {
    if let Some(reason) = ginnel_testkit::script::kernel::unavailable() {
        ginnel_testkit::skip("every_script_passes_on_the_linux_kernel", &reason);
        return;
    }
    run(BackendKind::Kernel);
}

#[test]
fn every_script_passes_on_the_engine() {
    run(BackendKind::Ginnel);
}

#[test]
fn the_list_of_differences_is_current() {
    let path = suite::repository_scripts().join("../../docs/tcp-differences.md");
    let listed = std::fs::read_to_string(&path).unwrap_or_default();
    let command =
        "cargo run -p ginnel-testkit --bin ginnel-script -- --differences > docs/tcp-differences.md";
    assert!(listed == suite::differences_listing(&scripts()), "out of date: {command}");
}

#[test]
fn every_script_says_what_it_shows() {
    let scripts = scripts();
    assert!(!scripts.is_empty(), "tests/scripts has no scripts");
    for script in scripts {
        let Script { path, summary, .. } = &script;
        let cites = summary.contains("RFC") || summary.contains("Linux");
        assert!(cites, "{}: the first comment names no RFC section", path.display());
        let area = path.parent().and_then(Path::parent);
        assert_eq!(area, Some(Path::new("tests/scripts")), "{}: not in an area's directory", path.display());
    }
}
