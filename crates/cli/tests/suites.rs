//! Test suites of other projects, as Debian packages them, beside each other on the kernel and on a stack
//! (`make suites`). A case that passes on the kernel must pass on the stack, or have a reason in [`REASONS`].
//!
//! `GINNEL_BLESS=1` writes `docs/suites.md`.

use ginnel_testkit::interop::build_preload_library;
use ginnel_testkit::skip;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");
/// Debian's interpreter: its tests are in another package, `libpython3.11-testsuite` in Debian 12.
const PYTHON: &str = "/usr/bin/python3";
/// Modules of CPython's tests that use sockets of IP.
const PYTHON_MODULES: &[&str] = &[
    "test_asynchat",
    "test_asyncio",
    "test_asyncore",
    "test_docxmlrpc",
    "test_epoll",
    "test_ftplib",
    "test_httplib",
    "test_httpservers",
    "test_imaplib",
    "test_logging",
    "test_nntplib",
    "test_poll",
    "test_poplib",
    "test_robotparser",
    "test_select",
    "test_selectors",
    "test_smtpd",
    "test_smtplib",
    "test_socket",
    "test_socketserver",
    "test_ssl",
    "test_telnetlib",
    "test_timeout",
    "test_urllib2_localnet",
    "test_wsgiref",
    "test_xmlrpc",
    // These take some minutes each.
    "test_multiprocessing_fork",
    "test_multiprocessing_forkserver",
    "test_multiprocessing_spawn",
];
/// Patterns of cases that are not run: they wait for a virtual machine's host.
const PYTHON_IGNORED: &[&str] = &["*VSOCK*"];
/// Stressors of stress-ng that use sockets of IP, each with `--verify`.
const STRESSORS: &[&str] = &["epoll", "sock", "sockabuse", "sockmany", "udp"];
const STRESS_SECONDS: u32 = 5;
/// Time in seconds for a module or a stressor.
const SECONDS: u32 = 600;
/// Cases that pass on the kernel alone, and why.
const REASONS: &[(&str, &str)] = &[];

/// Result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

type Verdicts = BTreeMap<String, Verdict>;

/// Where a suite runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Kernel,
    Stack,
}

/// Returns a command that runs a program on a side.
fn command(side: Side, folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5"]).arg(SECONDS.to_string());
    if side == Side::Stack {
        command.args([GINNEL, "run", "--loopback", "stack", "--"]);
        command.env("GINNEL_LIBRARY", build_preload_library(GINNEL));
    }
    command.args(words).current_dir(folder).env("GINNEL_RUN_DIR", folder.join("run"));
    command.env_remove("LD_PRELOAD").env_remove("GINNEL_STACK").stdin(Stdio::null());
    command
}

/// Returns the value of an attribute of an XML element.
fn attribute<'a>(element: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = element.split_once(&format!(" {name}=\""))?;
    Some(rest.split_once('"')?.0)
}

/// Returns the cases in a report of CPython's test runner, in JUnit's form.
fn python_verdicts(report: &str) -> Verdicts {
    let cases = report.split("<testcase").skip(1).filter_map(|case| {
        let (element, inner) = case.split_once('>')?;
        let inner = if element.ends_with('/') { "" } else { inner.split("</testcase>").next()? };
        let verdict = match inner {
            inner if inner.contains("<failure") || inner.contains("<error") => Verdict::Failed,
            inner if inner.contains("<skipped") => Verdict::Skipped,
            _ => Verdict::Passed,
        };
        Some((attribute(element, "name")?.to_owned(), verdict))
    });
    cases.collect()
}

fn run_python(side: Side, folder: &Path, module: &str) -> Verdicts {
    let report = folder.join(format!("{module}.xml"));
    let report = report.to_str().unwrap();
    // That of the other side.
    let _ = std::fs::remove_file(report);
    let mut words = vec![PYTHON, "-m", "test", "-u", "network", "--junit-xml", report];
    PYTHON_IGNORED.iter().for_each(|pattern| words.extend(["-i", pattern]));
    words.push(module);
    // Its status is that of the cases, which the report has.
    let output = command(side, folder, &words).output().unwrap();
    let text = std::fs::read_to_string(report).unwrap_or_default();
    let mut verdicts = python_verdicts(&text);
    assert!(!verdicts.is_empty() || side == Side::Stack, "{module} has no report on the kernel");
    if verdicts.is_empty() {
        println!("{}", String::from_utf8_lossy(&output.stdout));
        verdicts.insert(format!("{module} (all of it)"), Verdict::Failed);
    }
    verdicts
}

fn run_stressor(side: Side, folder: &Path, stressor: &str) -> Verdicts {
    let option = format!("--{stressor}");
    let seconds = STRESS_SECONDS.to_string();
    let words = ["stress-ng", &option, "2", "--verify", "--timeout", &seconds, "--metrics-brief"];
    let output = command(side, folder, &words).output().unwrap();
    let verdict = if output.status.success() { Verdict::Passed } else { Verdict::Failed };
    if verdict == Verdict::Failed {
        println!("{side:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    BTreeMap::from([(format!("stress-ng --{stressor}"), verdict)])
}

/// A suite on both sides.
struct Row {
    suite: String,
    kernel: Verdicts,
    stack: Verdicts,
}

impl Row {
    fn run(suite: &str, run: impl Fn(Side, &Path) -> Verdicts) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let [kernel, stack] = [Side::Kernel, Side::Stack].map(|side| run(side, folder.path()));
        let row = Self { suite: suite.to_owned(), kernel, stack };
        println!("{}", row.line());
        row
    }

    fn count(verdicts: &Verdicts) -> usize {
        verdicts.values().filter(|verdict| **verdict == Verdict::Passed).count()
    }

    /// Returns the cases that pass on the kernel alone.
    fn lost(&self) -> impl Iterator<Item = &str> {
        let passed = self.kernel.iter().filter(|(_, verdict)| **verdict == Verdict::Passed);
        passed.map(|(case, _)| case.as_str()).filter(|case| self.stack.get(*case) != Some(&Verdict::Passed))
    }

    /// Returns the row of the table.
    fn line(&self) -> String {
        let lost: Vec<_> =
            self.lost().map(|case| format!("`{case}`: {}", reason(case).unwrap_or("?"))).collect();
        let lost = if lost.is_empty() { "none".into() } else { lost.join("; ") };
        let cases = self.kernel.len();
        format!(
            "| {} | {cases} | {} | {} | {lost} |",
            self.suite,
            Self::count(&self.kernel),
            Self::count(&self.stack)
        )
    }
}

fn reason(case: &str) -> Option<&'static str> {
    REASONS.iter().find(|(name, _)| *name == case).map(|(_, reason)| *reason)
}

fn page(rows: &[Row]) -> String {
    let mut page = String::from(
        "# Suites of other projects\n\n\
         Generated by `GINNEL_BLESS=1 cargo test -p ginnel-cli --test suites -- --ignored`; `make suites` runs the same\n\
         suites. Each runs on the kernel's loopback and on that of a stack (`ginnel run --loopback stack`), from the\n\
         packages of Debian 12. \"Cases\" includes those that the suite skips on both sides. A test fails if a case\n\
         passes on the kernel alone and no reason is given here.\n\n\
         | Suite | Cases | Pass on the kernel | Pass on Ginnel | Pass on the kernel alone |\n\
         |---|---:|---:|---:|---|\n",
    );
    rows.iter().for_each(|row| writeln!(page, "{}", row.line()).unwrap());
    page
}

#[test]
#[ignore = "slow: takes half an hour; run it with `make suites`"]
fn cases_that_pass_on_the_kernel_pass_on_the_stack() {
    let test = "cases_that_pass_on_the_kernel_pass_on_the_stack";
    let runs = |words: &[&str]| {
        let output = Command::new(words[0]).args(&words[1..]).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !runs(&[PYTHON, "-c", "import test.test_socket"]) {
        return skip(test, "no tests of CPython (libpython3.11-testsuite)");
    }
    if !runs(&["stress-ng", "--version"]) {
        return skip(test, "no stress-ng");
    }
    let python = PYTHON_MODULES.iter().map(|module| {
        Row::run(&format!("CPython `{module}`"), |side, folder| run_python(side, folder, module))
    });
    let stress = STRESSORS.iter().map(|stressor| {
        Row::run(&format!("stress-ng `--{stressor}`"), |side, folder| run_stressor(side, folder, stressor))
    });
    let rows: Vec<Row> = python.chain(stress).collect();
    if std::env::var_os("GINNEL_BLESS").is_some() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/suites.md");
        std::fs::write(path, page(&rows)).unwrap();
    }
    let unexplained: Vec<&str> =
        rows.iter().flat_map(Row::lost).filter(|case| reason(case).is_none()).collect();
    assert!(unexplained.is_empty(), "pass on the kernel alone: {unexplained:#?}");
}

#[test]
fn reports_of_python_are_read() {
    let report = r#"<testsuites><testsuite>
        <testcase name="a.b.test_c" status="run" time="0.1"/>
        <testcase name="a.b.test_d" status="run"><failure message="x">text</failure></testcase>
        <testcase name="a.b.test_e"><skipped>no network</skipped></testcase></testsuite></testsuites>"#;
    let expected =
        [("a.b.test_c", Verdict::Passed), ("a.b.test_d", Verdict::Failed), ("a.b.test_e", Verdict::Skipped)];
    let expected: Verdicts = expected.map(|(case, verdict)| (case.to_owned(), verdict)).into();
    assert_eq!(python_verdicts(report), expected);
}

#[test]
fn a_case_that_passes_on_the_kernel_alone_is_found() {
    let verdicts = |last| BTreeMap::from([("a".to_owned(), Verdict::Passed), ("b".to_owned(), last)]);
    let row = |kernel, stack| Row { suite: "s".into(), kernel: verdicts(kernel), stack: verdicts(stack) };
    assert_eq!(row(Verdict::Passed, Verdict::Failed).lost().collect::<Vec<_>>(), ["b"]);
    assert_eq!(row(Verdict::Failed, Verdict::Failed).lost().count(), 0);
    let mut missing = row(Verdict::Passed, Verdict::Passed);
    missing.stack.remove("b");
    assert_eq!(missing.lost().collect::<Vec<_>>(), ["b"]);
    assert_eq!(missing.line(), "| s | 2 | 2 | 1 | `b`: ? |");
}
