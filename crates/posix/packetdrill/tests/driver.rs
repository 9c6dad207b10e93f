//! A C program (`driver.c`) loads the library like packetdrill, plays the network, and makes calls.
//!
//! The program runs in real time: a retransmission because the machine stalled is not a failure.

use ginnel_testkit::steal;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// Timeout in seconds of a case that hangs.
const SECONDS_MAX: &str = "60";

struct TestBinaries {
    program: PathBuf,
    as_packetdrill: PathBuf,
    library: PathBuf,
    _folder: tempfile::TempDir,
}

static TEST_BINARIES: LazyLock<TestBinaries> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let [program, as_packetdrill] = ["driver", "as_packetdrill"].map(|name| {
        let program = folder.path().join(name);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name).with_extension("c");
        let flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"];
        let cc = Command::new("cc").args(flags).arg(&program).arg(source).arg("-ldl").status();
        assert!(cc.expect("cc, a C compiler, runs").success());
        program
    });
    // Cargo puts the library next to this test.
    let library = std::env::current_exe().unwrap().with_file_name("libpacketdrill_ginnel.so");
    assert!(
        library.exists(),
        "{} does not exist: build it with `cargo test -p ginnel-packetdrill`",
        library.display()
    );
    TestBinaries { program, as_packetdrill, library, _folder: folder }
});

fn run(case: &str, flags: Option<&str>) -> Output {
    let mut driver = Command::new("timeout");
    driver.arg(SECONDS_MAX).arg(&TEST_BINARIES.program).arg(&TEST_BINARIES.library).arg(case).args(flags);
    driver.output().expect("timeout of coreutils runs")
}

/// Runs a program that must succeed. Returns its standard error.
fn run_to_success(name: &str, mut run: impl FnMut() -> Output) -> String {
    let mut stderr = String::new();
    let result = steal::repeat_if_stalled(|| {
        let output = run();
        stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(()) } else { Err(output.status) }
    });
    if let Err(status) = result {
        panic!("{name}: {status}: {stderr}");
    }
    stderr
}

fn run_case(case: &str, flags: Option<&str>) -> String {
    run_to_success(case, || run(case, flags))
}

macro_rules! cases {
    ($($name:ident)*) => { $(#[test] fn $name() { run_case(stringify!($name), None); })* };
}

cases! {
    passive_open
    passive_open_v6
    active_open
    refused_connect
    reset
    poll_and_epoll
    nonblocking_calls
    message_calls
    splice_calls
    timestamps
    large_buffers
    repeated_init
    malformed_packets
    datagrams
}

/// Performs packetdrill's steps from its start to its end, for two scripts in a row.
fn run_as_packetdrill(version: &str, options: &[&str]) {
    run_to_success(version, || {
        let folder = tempfile::tempdir().unwrap();
        let mut driver = Command::new("timeout");
        driver.arg(SECONDS_MAX).arg(&TEST_BINARIES.as_packetdrill).arg(&TEST_BINARIES.library).arg(version);
        driver.arg(folder.path()).args(options).output().expect("timeout of coreutils runs")
    });
}

#[test]
fn steps_of_packetdrill_work_over_ipv4() {
    run_as_packetdrill("ipv4", &[]);
}

#[test]
fn steps_of_packetdrill_work_over_ipv6() {
    run_as_packetdrill("ipv6", &["--mtu=1520"]);
}

#[test]
fn steps_of_packetdrill_work_over_mapped_ipv4() {
    run_as_packetdrill("ipv4-mapped-ipv6", &[]);
}

#[test]
fn invalid_flags_are_reported_and_calls_fail() {
    assert!(run_case("invalid_flags", Some("mtu=17")).contains("mtu: \"17\" is not from 68 to 65521"));
    assert!(run_case("invalid_flags", Some("speed=1")).contains("\"speed\" is not one of local, mtu, proc"));
}

#[test]
fn blocked_write_waits_for_a_third_of_the_buffer() {
    run_case("blocked_writer", Some("proc=off"));
}

#[test]
fn writes_end_when_the_send_buffer_is_full() {
    run_case("send_buffer", Some("proc=off,net.ipv4.tcp_wmem=4096:50000:4194304"));
}

#[test]
fn sysctls_and_flags_configure_the_stack() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tcp_sack"), "0\n").unwrap();
    std::fs::write(folder.path().join("tcp_congestion_control"), "dctcp\n").unwrap();
    let flags = format!("proc={},mtu=1000,net.ipv4.tcp_timestamps=0", folder.path().display());
    let stderr = run_case("sysctl_and_mtu_flags", Some(&flags));
    assert!(stderr.contains("tcp_congestion_control=dctcp"), "{stderr}");
}
