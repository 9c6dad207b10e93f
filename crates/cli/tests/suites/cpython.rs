//! CPython's tests.

use crate::side::{Side, command};
use crate::verdict::{Verdict, Verdicts, python_verdicts};
use std::path::Path;

/// Debian's interpreter: its tests are in another package, `libpython3.11-testsuite` in Debian 12.
pub(crate) const PYTHON: &str = "/usr/bin/python3";
/// Modules of CPython's tests that use sockets of IP.
pub(crate) const PYTHON_MODULES: &[&str] = &[
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
pub(crate) const PYTHON_IGNORED: &[&str] = &["*VSOCK*"];

pub(crate) fn run_python(side: Side, folder: &Path, module: &str) -> Verdicts {
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
