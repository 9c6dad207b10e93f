//! Test suites of other projects, as Debian packages them, beside each other on the kernel and on a stack
//! (`make suites`). A case that passes on the kernel must pass on the stack, or have a reason in [`REASONS`].
//!
//! `GINNEL_SUITES=libuv` runs only the suites whose name contains this text. `GINNEL_BLESS=1` writes the rows
//! of what ran into `docs/suites.md`.

use ginnel_testkit::interop::build_preload_library;
use ginnel_testkit::skip;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

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
/// Time in seconds for a module, a stressor or a suite.
const SECONDS: u32 = 1200;
/// Units of redis' tests that are about connections: clients, blocking commands, replication, tools.
const REDIS_UNITS: &[&str] = &[
    "unit/protocol",
    "unit/auth",
    "unit/querybuf",
    "unit/limits",
    "unit/networking",
    "unit/introspection",
    "unit/introspection-2",
    "unit/pubsub",
    "unit/pubsubshard",
    "unit/tracking",
    "unit/client-eviction",
    "unit/wait",
    "unit/pause",
    "unit/shutdown",
    "unit/type/list",
    "unit/obuf-limits",
    "unit/other",
    "unit/replybufsize",
    "integration/block-repl",
    "integration/replication",
    "integration/replication-2",
    "integration/replication-3",
    "integration/replication-4",
    "integration/replication-buffer",
    "integration/replication-psync",
    "integration/psync2",
    "integration/psync2-reg",
    "integration/psync2-pingoff",
    "integration/redis-cli",
    "integration/redis-benchmark",
    "integration/shutdown",
    "integration/failover",
    "integration/logging",
];
/// Cases that pass on the kernel alone, and why.
const REASONS: &[(&str, &str)] = &[
    (
        "udp_mmsg",
        "counts the calls of `recvmmsg` and expects that all datagrams of the loopback have arrived when `sendto` \
         returns; the shard delivers them a moment later",
    ),
    (
        "tcp_try_write_error",
        "writes without a pause until the RST of its peer arrives; on a busy machine the send buffer is full \
         before the shard has run, as with a peer on another host",
    ),
    (
        "ipc_listen_after_write",
        "passes a bound socket that does not listen yet ([posix.md](posix.md), `SCM_RIGHTS`)",
    ),
];

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

/// Asserts that timeout(1) has not ended the program, whose list of verdicts would be incomplete. timeout(1)
/// exits with 124, or with 137 if it had to send SIGKILL.
#[track_caller]
fn assert_ended(output: &Output, side: Side, words: &[&str]) {
    let is_timeout = matches!(output.status.code(), None | Some(124 | 137));
    assert!(!is_timeout, "{words:?} takes more than {SECONDS} s: {side:?}");
}

fn run_stressor(side: Side, folder: &Path, stressor: &str) -> Verdicts {
    let option = format!("--{stressor}");
    let seconds = STRESS_SECONDS.to_string();
    let words = ["stress-ng", &option, "2", "--verify", "--timeout", &seconds, "--metrics-brief"];
    let output = command(side, folder, &words).output().unwrap();
    assert_ended(&output, side, &words);
    let verdict = if output.status.success() { Verdict::Passed } else { Verdict::Failed };
    if verdict == Verdict::Failed {
        println!("{side:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    BTreeMap::from([(format!("stress-ng --{stressor}"), verdict)])
}

/// Returns the folder of a source package whose tests were built, or `None` if there is no network.
fn built_source(package: &str) -> Option<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/suite-source");
    let output = Command::new(script).arg(package).stderr(Stdio::inherit()).output().unwrap();
    output.status.success().then(|| PathBuf::from(String::from_utf8(output.stdout).unwrap().trim()))
}

/// Runs a suite in the folder of its sources. Returns what it prints, without colours.
fn run_source(side: Side, folder: &Path, environment: &[(&str, &str)], words: &[&str]) -> String {
    let mut command = command(side, folder, words);
    command.envs(environment.iter().copied());
    let output = command.output().unwrap();
    assert_ended(&output, side, words);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut parts = text.split('\u{1b}');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once('m').map_or("", |(_, rest)| rest))
}

/// Returns the cases in the output of libuv's tests, in TAP's form.
fn tap_verdicts(text: &str) -> Verdicts {
    let cases = text.lines().filter_map(|line| {
        let (passed, rest) = match line.strip_prefix("not ok ") {
            Some(rest) => (false, rest),
            None => (true, line.strip_prefix("ok ")?),
        };
        let (_, name) = rest.split_once(" - ")?;
        let verdict = match (passed, name.contains(" # SKIP")) {
            (_, true) => Verdict::Skipped,
            (true, _) => Verdict::Passed,
            (false, _) => Verdict::Failed,
        };
        Some((name.split(" #").next()?.trim().to_owned(), verdict))
    });
    cases.collect()
}

/// Returns the files in the output of perl's `prove`.
fn prove_verdicts(text: &str) -> Verdicts {
    let files = text.lines().filter_map(|line| {
        let (file, rest) = line.strip_prefix("t/")?.split_once(" .")?;
        let verdict = match rest.trim_start_matches(['.', ' ']) {
            "ok" => Verdict::Passed,
            rest if rest.starts_with("skipped") => Verdict::Skipped,
            _ => Verdict::Failed,
        };
        Some((file.to_owned(), verdict))
    });
    files.collect()
}

/// Returns the cases in the output of redis' tests.
fn redis_verdicts(text: &str) -> Verdicts {
    let mut verdicts = Verdicts::new();
    for line in text.lines() {
        let (name, verdict) = match (line.strip_prefix("[ok]: "), line.strip_prefix("[err]: ")) {
            (Some(rest), _) => (rest.rsplit_once(" (").map_or(rest, |(name, _)| name), Verdict::Passed),
            (_, Some(rest)) => (rest.split(" in tests/").next().unwrap_or(rest), Verdict::Failed),
            _ => continue,
        };
        // Several cases have one name.
        let entry = verdicts.entry(name.to_owned()).or_insert(verdict);
        if verdict == Verdict::Failed {
            *entry = verdict;
        }
    }
    verdicts
}

fn run_libuv(side: Side, folder: &Path) -> Verdicts {
    tap_verdicts(&run_source(side, folder, &[("UV_RUN_AS_ROOT", "1")], &["build/uv_run_tests"]))
}

fn run_memcached(side: Side, folder: &Path) -> Verdicts {
    prove_verdicts(&run_source(side, folder, &[], &["prove", "-j2", "t/"]))
}

fn run_redis(side: Side, folder: &Path) -> Verdicts {
    let mut words = vec!["./runtest", "--clients", "3", "--timeout", "300", "--tags", "-slow"];
    REDIS_UNITS.iter().for_each(|unit| words.extend(["--single", unit]));
    redis_verdicts(&run_source(side, folder, &[], &words))
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

/// Returns the page with these rows and, for suites that did not run, those of the page before.
fn page(rows: &[Row], before: &str) -> String {
    let mut page = String::from(
        "# Suites of other projects\n\n\
         Generated by `GINNEL_BLESS=1 cargo test -p ginnel-cli --test suites -- --ignored`; `make suites` runs the same\n\
         suites. Each runs on the kernel's loopback and on that of a stack (`ginnel run --loopback stack`), from the\n\
         packages of Debian 12. \"Cases\" includes those that the suite skips on both sides. A test fails if a case\n\
         passes on the kernel alone and no reason is given here.\n\n\
         | Suite | Cases | Pass on the kernel | Pass on Ginnel | Pass on the kernel alone |\n\
         |---|---:|---:|---:|---|\n",
    );
    let mut lines: BTreeMap<&str, String> = before
        .lines()
        .filter_map(|line| Some((line.strip_prefix("| ")?.split(" |").next()?, line.to_owned())))
        .filter(|(suite, _)| *suite != "Suite")
        .collect();
    lines.extend(rows.iter().map(|row| (row.suite.as_str(), row.line())));
    lines.values().for_each(|line| writeln!(page, "{line}").unwrap());
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
    let wanted = std::env::var("GINNEL_SUITES").unwrap_or_default();
    let is_wanted = |suite: &str| suite.contains(&wanted);
    let python_suite = |module: &&str| format!("CPython `{module}`");
    let stress_suite = |stressor: &&str| format!("stress-ng `--{stressor}`");
    let needs_python = PYTHON_MODULES.iter().any(|module| is_wanted(&python_suite(module)));
    if needs_python && !runs(&[PYTHON, "-c", "import test.test_socket"]) {
        return skip(test, "no tests of CPython (libpython3.11-testsuite)");
    }
    let needs_stress = STRESSORS.iter().any(|stressor| is_wanted(&stress_suite(stressor)));
    if needs_stress && !runs(&["stress-ng", "--version"]) {
        return skip(test, "no stress-ng");
    }
    let python = PYTHON_MODULES.iter().filter_map(|module| {
        let suite = python_suite(module);
        is_wanted(&suite).then(|| Row::run(&suite, |side, folder| run_python(side, folder, module)))
    });
    let stress = STRESSORS.iter().filter_map(|stressor| {
        let suite = stress_suite(stressor);
        is_wanted(&suite).then(|| Row::run(&suite, |side, folder| run_stressor(side, folder, stressor)))
    });
    type Run = fn(Side, &Path) -> Verdicts;
    let from_source: [(&str, &str, Run); 3] = [
        ("libuv", "libuv1", run_libuv),
        ("memcached, files of tests", "memcached", run_memcached),
        ("redis, units about connections", "redis", run_redis),
    ];
    let from_source = from_source.iter().filter_map(|(suite, package, run)| {
        let folder = is_wanted(suite).then(|| built_source(package))??;
        Some(Row::run(suite, |side, _| {
            let verdicts = run(side, &folder);
            assert!(!verdicts.is_empty(), "{suite} has no cases: {side:?}");
            verdicts
        }))
    });
    let rows: Vec<Row> = python.chain(stress).chain(from_source).collect();
    if std::env::var_os("GINNEL_BLESS").is_some() {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/suites.md");
        let before = std::fs::read_to_string(&path).unwrap_or_default();
        std::fs::write(path, page(&rows, &before)).unwrap();
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
fn reports_of_other_suites_are_read() {
    use Verdict::{Failed, Passed, Skipped};
    let verdicts = |cases: &[(&str, Verdict)]| -> Verdicts {
        cases.iter().map(|(case, verdict)| ((*case).to_owned(), *verdict)).collect()
    };
    assert_eq!(
        tap_verdicts(
            "1..3\nok 1 - tcp_open\nnot ok 2 - udp_mmsg\n# exit code 6\nok 3 - ipv6 # SKIP no IPv6\n"
        ),
        verdicts(&[("tcp_open", Passed), ("udp_mmsg", Failed), ("ipv6", Skipped)])
    );
    assert_eq!(
        prove_verdicts(
            "t/a.t .... ok\nt/b.t ............. skipped: no TLS\nt/c.t .. Failed 1/3 subtests\nResult: FAIL\n"
        ),
        verdicts(&[("a.t", Passed), ("b.t", Skipped), ("c.t", Failed)])
    );
    assert_eq!(
        redis_verdicts(
            "[ok]: PING (0 ms)\n[err]: AUTH in tests/unit/auth.tcl\n[ok]: AUTH (1 ms)\n[ready]: 7\n"
        ),
        verdicts(&[("PING", Passed), ("AUTH", Failed)])
    );
}

#[test]
fn rows_of_suites_that_did_not_run_stay() {
    let row = |suite: &str| Row { suite: suite.into(), kernel: Verdicts::new(), stack: Verdicts::new() };
    let before = page(&[row("a"), row("b")], "");
    let old = before.replace("| b | 0 |", "| b | 9 |");
    assert!(
        page(&[row("a"), row("c")], &old)
            .ends_with("| a | 0 | 0 | 0 | none |\n| b | 9 | 0 | 0 | none |\n| c | 0 | 0 | 0 | none |\n")
    );
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
