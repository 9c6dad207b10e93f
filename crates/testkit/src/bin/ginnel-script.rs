//! Runs packet scripts; `ginnel-script --help` lists the options.

use ginnel_testkit::script::ast::{BackendKind, IpVersion, Script};
use ginnel_testkit::script::suite::{self, Case, CaseOutcome, RunOptions};
use std::path::PathBuf;
use std::process::ExitCode;

const USAGE: &str = "\
usage: ginnel-script [OPTIONS] [FILES or DIRECTORIES]   (default: tests/scripts)
  --backend kernel|ginnel   run against this stack only
  --ip v4|v6                run over this IP version only
  --repeat N                run every case N times
  --jobs N                  concurrent cases (default 32)
  --quiet                   omit the cases that pass at the first attempt
  --differences             print the differences that the scripts declare, as in docs/tcp-differences.md
  -h, --help                print this text";

struct Arguments {
    backend: Option<BackendKind>,
    ip: Option<IpVersion>,
    repeat: u32,
    options: RunOptions,
    quiet: bool,
    differences: bool,
    files: Vec<PathBuf>,
}

/// Parses the command line. Returns `None` if it asks for the usage.
fn arguments() -> Result<Option<Arguments>, String> {
    let mut parsed = Arguments {
        backend: None,
        ip: None,
        repeat: 1,
        options: RunOptions::default(),
        quiet: false,
        differences: false,
        files: Vec::new(),
    };
    let mut rest = std::env::args().skip(1);
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--backend" => {
                parsed.backend = Some(match value()?.as_str() {
                    "kernel" => BackendKind::Kernel,
                    "ginnel" => BackendKind::Ginnel,
                    other => return Err(format!("--backend {other}: expected kernel or ginnel")),
                });
            }
            "--ip" => {
                parsed.ip = Some(match value()?.as_str() {
                    "v4" => IpVersion::V4,
                    "v6" => IpVersion::V6,
                    other => return Err(format!("--ip {other}: expected v4 or v6")),
                });
            }
            "--repeat" => parsed.repeat = at_least_one("--repeat", &value()?)?,
            "--jobs" => parsed.options.jobs = at_least_one("--jobs", &value()?)? as usize,
            "--quiet" => parsed.quiet = true,
            "--differences" => parsed.differences = true,
            "--help" | "-h" => return Ok(None),
            option if option.starts_with('-') => return Err(format!("unknown option `{option}`")),
            file => parsed.files.push(file.into()),
        }
    }
    if parsed.files.is_empty() {
        parsed.files.push(suite::repository_scripts());
    }
    Ok(Some(parsed))
}

fn at_least_one(option: &str, value: &str) -> Result<u32, String> {
    match value.parse() {
        Ok(0) => Err(format!("{option} 0: expected 1 or more")),
        Ok(number) => Ok(number),
        Err(e) => Err(format!("{option} {value}: {e}")),
    }
}

fn load(files: &[PathBuf]) -> Result<Vec<Script>, String> {
    let mut scripts = Vec::new();
    for path in files {
        for file in suite::find(path).map_err(|e| format!("{}: {e}", path.display()))? {
            scripts.push(suite::load(&std::fs::canonicalize(&file).unwrap_or(file))?);
        }
    }
    Ok(scripts)
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(Some(arguments)) => arguments,
        Ok(None) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("{message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let scripts = match load(&arguments.files) {
        Ok(scripts) => scripts,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    if arguments.differences {
        print!("{}", suite::differences_listing(&scripts));
        return ExitCode::SUCCESS;
    }
    let mut cases = Vec::new();
    for script in &scripts {
        for target in script.targets() {
            let selected = arguments.backend.is_none_or(|b| b == target.backend)
                && arguments.ip.is_none_or(|ip| ip == target.ip);
            if selected {
                cases.extend((0..arguments.repeat).map(|_| Case { script, target }));
            }
        }
    }
    if cases.is_empty() {
        eprintln!("no script has a case for these options");
        return ExitCode::from(2);
    }
    let report = |case: Case<'_>, outcome: &CaseOutcome| match outcome {
        CaseOutcome::Passed(1) if arguments.quiet => {}
        CaseOutcome::Passed(1) => println!("ok    {} ({})", case.script.path.display(), case.target),
        CaseOutcome::Passed(n) => {
            println!("ok    {} ({}) at attempt {n}", case.script.path.display(), case.target)
        }
        CaseOutcome::Failed(failure) => println!("FAIL  {failure}"),
    };
    let outcomes = suite::run_all(&cases, arguments.options, &report);
    let failed = outcomes.iter().filter(|o| matches!(o, CaseOutcome::Failed(_))).count();
    println!("{} passed, {failed} failed", outcomes.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
