//! Results of cases, and the forms in which suites print them.

use std::collections::BTreeMap;

/// Result of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    Failed,
    Skipped,
}

pub(crate) type Verdicts = BTreeMap<String, Verdict>;

/// Returns the value of an attribute of an XML element.
fn attribute<'a>(element: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = element.split_once(&format!(" {name}=\""))?;
    Some(rest.split_once('"')?.0)
}

/// Returns the cases in a report of CPython's test runner, in JUnit's form.
pub(crate) fn python_verdicts(report: &str) -> Verdicts {
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

/// Returns the cases in the output of tests in TAP's form, as libuv's and those of the kernel have.
pub(crate) fn tap_verdicts(text: &str) -> Verdicts {
    let cases = text.lines().filter_map(|line| {
        let (passed, rest) = match line.strip_prefix("not ok ") {
            Some(rest) => (false, rest),
            None => (true, line.strip_prefix("ok ")?),
        };
        // Some have no " - ".
        let (_, name) = rest.split_once(' ')?;
        let name = name.strip_prefix("- ").unwrap_or(name);
        let verdict = match (passed, name.contains(" # SKIP")) {
            (_, true) => Verdict::Skipped,
            (true, _) => Verdict::Passed,
            (false, _) => Verdict::Failed,
        };
        Some((name.split(" #").next()?.trim().to_owned(), verdict))
    });
    cases.collect()
}

/// Returns the cases in the output of tinytest, which runs libevent's tests.
pub(crate) fn tinytest_verdicts(text: &str) -> Verdicts {
    let mut verdicts = Verdicts::new();
    let mut case = None;
    for line in text.lines() {
        let named = line.split_once(": ").filter(|(name, _)| name.contains('/') && !name.contains(' '));
        if let Some((name, _)) = named {
            // One that says no more than its name has ended the process.
            verdicts.insert(name.to_owned(), Verdict::Failed);
            case = Some(name);
        }
        let result = named.map_or(line, |(_, rest)| rest.strip_prefix("[forking] ").unwrap_or(rest));
        let verdict = match result.trim() {
            "OK" => Verdict::Passed,
            "SKIPPED" | "DISABLED" => Verdict::Skipped,
            _ => continue,
        };
        if let Some(case) = case.take() {
            verdicts.insert(case.to_owned(), verdict);
        }
    }
    verdicts
}

/// Returns the files in the output of perl's `prove`.
pub(crate) fn prove_verdicts(text: &str) -> Verdicts {
    let files = text.lines().filter_map(|line| {
        let (file, rest) = line.split_once(".t .")?;
        let verdict = match rest.trim_start_matches(['.', ' ']) {
            "ok" => Verdict::Passed,
            rest if rest.starts_with("skipped") => Verdict::Skipped,
            _ => Verdict::Failed,
        };
        Some((format!("{}.t", file.strip_prefix("t/").unwrap_or(file)), verdict))
    });
    files.collect()
}

/// Returns the cases in the output of redis' tests.
pub(crate) fn redis_verdicts(text: &str) -> Verdicts {
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
        tap_verdicts("ok 1 bind.v4\nok 2 bind.v6 # SKIP no IPv6\nnot ok 3 bind.any\n"),
        verdicts(&[("bind.v4", Passed), ("bind.v6", Skipped), ("bind.any", Failed)])
    );
    assert_eq!(
        tinytest_verdicts(
            "main/a: [forking] OK\nmain/b: [warn] late\nOK\nhttp/c: \n  FAIL regress.c:7: x\n  [c FAILED]\n\
             dns/d: SKIPPED\nssl/e: [forking] 3/4 TESTS FAILED.\n"
        ),
        verdicts(&[
            ("main/a", Passed),
            ("main/b", Passed),
            ("http/c", Failed),
            ("dns/d", Skipped),
            ("ssl/e", Failed)
        ])
    );
    assert_eq!(
        prove_verdicts(
            "t/a.t .... ok\nt/b.t ............. skipped: no TLS\ncpan/c.t .. Failed 1/3 subtests\nResult: FAIL\n"
        ),
        verdicts(&[("a.t", Passed), ("b.t", Skipped), ("cpan/c.t", Failed)])
    );
    assert_eq!(
        redis_verdicts(
            "[ok]: PING (0 ms)\n[err]: AUTH in tests/unit/auth.tcl\n[ok]: AUTH (1 ms)\n[ready]: 7\n"
        ),
        verdicts(&[("PING", Passed), ("AUTH", Failed)])
    );
}
