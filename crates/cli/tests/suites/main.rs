//! Test suites of other projects, as Debian packages them, beside each other on the kernel and on a stack
//! (`make suites`). A case that passes on the kernel must pass on the stack, or have a reason in [`REASONS`].
//!
//! `GINNEL_SUITES=libuv` runs only the suites whose name contains this text. `GINNEL_BLESS=1` writes the rows
//! of what ran into `docs/suites.md`.

mod cpython;
mod from_source;
mod selftests;
mod side;
mod stress_ng;
mod verdict;

use crate::cpython::{PYTHON, PYTHON_MODULES, run_python};
use crate::from_source::{FROM_SOURCE, built_source};
use crate::side::Side;
use crate::stress_ng::{STRESSORS, run_stressor};
use crate::verdict::{Verdict, Verdicts};
use ginnel_testkit::skip;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

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
    ("epoll_busy_poll", "`EPIOCSPARAMS` and `EPIOCGPARAMS` are not implemented"),
    ("ip_local_port_range", RANGE),
    ("port_range_out_of_netns_range", RANGE),
    ("single_port_range", RANGE),
    ("ipv6_flowlabel", FLOW_LABELS),
    ("ipv6_flowlabel -s", FLOW_LABELS),
    ("ipv6_flowlabel_mgr", FLOW_LABELS),
    ("reuseport_bpf", "`SO_ATTACH_REUSEPORT_EBPF`: the stack selects no socket by a program"),
    ("reuseport_bpf_cpu", "`SO_ATTACH_REUSEPORT_CBPF`: the stack selects no socket by a program"),
    ("sk_so_peek_off", "`SO_PEEK_OFF` has no effect on UDP sockets"),
    ("so_incoming_cpu", "`SO_INCOMING_CPU` is stored without effect: a shard runs on one core"),
    ("so_netns_cookie", "`SO_NETNS_COOKIE`: the stack is in no network namespace"),
    ("so_txtime -4", "`SO_TXTIME`: departure times are not taken from programs"),
    ("so_txtime -6", "`SO_TXTIME`: departure times are not taken from programs"),
    ("udpgro, off, cmsg -4", "`UDP_GRO` also merges datagrams of the loopback, as Linux does on devices"),
    ("udpgso_bench gso -T", "`SO_TIMESTAMPING` as a control message of a datagram is not implemented"),
];
const RANGE: &str = "expects the sysctl `net.ipv4.ip_local_port_range`, which the stack does not read";
const FLOW_LABELS: &str = "`IPV6_FLOWLABEL_MGR`: the stack chooses flow labels";

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
        // Cases with one reason are named by the reason.
        let mut lost: Vec<_> = self
            .lost()
            .map(|case| reason(case).unwrap_or((case, "?")))
            .map(|(case, reason)| format!("`{case}`: {reason}"))
            .collect();
        lost.sort_unstable();
        lost.dedup();
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

/// Returns the entry of [`REASONS`] for a case: that of its name, or of a part of it (`tls: tls.NAME.PART`).
fn reason(case: &str) -> Option<(&'static str, &'static str)> {
    let parts = || case.split(": ").flat_map(|part| part.split('.'));
    let last = parts().last().unwrap_or(case);
    let found = |name: &str| REASONS.iter().find(|(reason, _)| *reason == name).copied();
    found(case).or_else(|| found(last)).or_else(|| parts().find_map(found))
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
    let from_source = FROM_SOURCE.iter().filter_map(|(suite, package, run)| {
        let folder = is_wanted(suite).then(|| built_source(package))??;
        Some(Row::run(suite, |side, _| {
            let verdicts = run(side, &folder);
            assert!(!verdicts.is_empty(), "{suite} has no cases: {side:?}");
            assert!(
                side == Side::Stack || verdicts.values().any(|verdict| *verdict == Verdict::Passed),
                "{suite}: no case passes on the kernel"
            );
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
