//! CPython's own tests, which talk to themselves over 127.0.0.1: here inside a stack.

use std::path::Path;
use std::process::{Command, Output};

/// Whole modules that pass, as they do on the kernel.
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
/// Those of them that hold waits of tenths of a second against the clock, for which a busy machine may be too slow.
const MEASURE_TIME: [&str; 3] = ["test_select", "test_poll", "test_epoll"];
/// Of `test_socket` what is about streams and datagrams, and quick.
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

/// Debian has these tests in a package of their own.
fn has_module(module: &str) -> bool {
    let import = format!("import test.{module}, test.libregrtest");
    let asked = Command::new("python3").args(["-c", &import]).output();
    asked.is_ok_and(|asked| asked.status.success())
}

fn assert_passes(args: &[&str]) {
    // What measures time may be tried again; what was said until then is shown.
    let attempts = if args.iter().any(|module| MEASURE_TIME.contains(module)) { 3 } else { 1 };
    let passed = (0..attempts).any(|_| {
        let output = python(args);
        let said = String::from_utf8_lossy(&output.stdout);
        let passed = output.status.success() && said.contains("Result: SUCCESS");
        if !passed {
            println!("{args:?}: {}: {said}", output.status);
        }
        passed
    });
    assert!(passed, "{args:?}");
}

#[test]
fn tests_of_cpython_pass() {
    // Some modules have left the language since.
    for module in MODULES.iter().filter(|module| has_module(module)) {
        assert_passes(&[module]);
    }
}

#[test]
fn tests_of_cpythons_sockets_pass() {
    if has_module("test_socket") {
        let chosen = SOCKET_TESTS.iter().flat_map(|name| ["-m", *name]);
        assert_passes(&[&["test_socket"][..], &chosen.collect::<Vec<_>>()].concat());
    }
}
