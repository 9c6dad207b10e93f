//! CPython's own tests, which connect to themselves over 127.0.0.1, inside a stack.

use ginnel_testkit::steal;
use std::path::Path;
use std::process::{Command, Output};

/// Modules that pass completely, as on the kernel.
const MODULES: [&str; 8] = [
    "test_select",
    "test_poll",
    "test_epoll",
    "test_httplib",
    "test_httpservers",
    "test_telnetlib",
    "test_smtplib",
    "test_asyncio.test_sendfile",
];
/// Classes of `test_socket` that concern streams and datagrams and are quick.
const SOCKET_TESTS: [&str; 6] = [
    "test.test_socket.BasicTCPTest.*",
    "test.test_socket.BasicUDPTest.*",
    "test.test_socket.NonBlockingTCPTests.*",
    "test.test_socket.NetworkConnectionAttributesTest.*",
    "test.test_socket.GeneralModuleTests.test_socket_close",
    "test.test_socket.TestExceptions.*",
];

fn python(args: &[&str]) -> Output {
    let program = Path::new(env!("CARGO_BIN_EXE_ginnel"));
    let mut run = Command::new("timeout");
    run.arg("120")
        .arg(program)
        .args(["run", "--loopback", "stack", "--", "python3", "-m", "test", "-W"])
        .args(args);
    run.output().expect("timeout of coreutils runs")
}

/// Returns whether a module of the tests is installed: Debian packages the tests separately.
fn has_module(module: &str) -> bool {
    let import = format!("import test.{module}, test.libregrtest");
    let asked = Command::new("python3").args(["-c", &import]).output();
    asked.is_ok_and(|asked| asked.status.success())
}

/// Asserts that modules of CPython's tests pass. Several of them compare waits of tenths of a second with the
/// clock, so a run during which CPU time was taken away is repeated.
fn assert_passes(args: &[&str]) {
    let passed = steal::repeat_if_stalled(|| {
        let output = python(args);
        let stdout = String::from_utf8_lossy(&output.stdout);
        match output.status.success() && stdout.contains("Result: SUCCESS") {
            true => Ok(()),
            false => Err(format!("{args:?}: {}: {stdout}", output.status)),
        }
    });
    passed.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn cpython_tests_pass() {
    // Some modules have been removed from Python.
    for module in MODULES.iter().filter(|module| has_module(module)) {
        assert_passes(&[module]);
    }
}

#[test]
fn cpython_socket_tests_pass() {
    if has_module("test_socket") {
        let chosen = SOCKET_TESTS.iter().flat_map(|name| ["-m", *name]);
        assert_passes(&[&["test_socket"][..], &chosen.collect::<Vec<_>>()].concat());
    }
}
