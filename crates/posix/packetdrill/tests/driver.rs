//! A C program (`driver.c`) loads the library like packetdrill, plays the network, and makes calls.
//!
//! The program runs in real time: a retransmission because the machine stalled is not a failure.

use ginnel_testkit::steal;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// Timeout in seconds of a case that hangs.
const SECONDS_MAX: &str = "60";

struct Built {
    program: PathBuf,
    as_packetdrill: PathBuf,
    library: PathBuf,
    _folder: tempfile::TempDir,
}

static BUILT: LazyLock<Built> = LazyLock::new(|| {
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
    assert!(library.exists(), "{} is not there", library.display());
    Built { program, as_packetdrill, library, _folder: folder }
});

fn run(case: &str, flags: Option<&str>) -> Output {
    let mut driver = Command::new("timeout");
    driver.arg(SECONDS_MAX).arg(&BUILT.program).arg(&BUILT.library).arg(case).args(flags);
    driver.output().expect("timeout of coreutils runs")
}

/// Runs a program that must succeed. Returns its standard error.
fn told(name: &str, mut run: impl FnMut() -> Output) -> String {
    let mut said = String::new();
    let ended = steal::repeat_if_stalled(|| {
        let output = run();
        said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(()) } else { Err(output.status) }
    });
    if let Err(status) = ended {
        panic!("{name}: {status}: {said}");
    }
    said
}

fn passes(case: &str, flags: Option<&str>) -> String {
    told(case, || run(case, flags))
}

macro_rules! cases {
    ($($name:ident)*) => { $(#[test] fn $name() { passes(stringify!($name), None); })* };
}

cases! {
    passive
    passive_v6
    active
    refused
    reset
    waiting_for_readiness
    without_waiting
    messages
    pipes
    times
    large_ones
    again_and_again
    bad_packets
    datagrams
}

/// Performs packetdrill's steps from its start to its end, for two scripts in a row.
fn as_packetdrill(version: &str, options: &[&str]) {
    told(version, || {
        let folder = tempfile::tempdir().unwrap();
        let mut driver = Command::new("timeout");
        driver.arg(SECONDS_MAX).arg(&BUILT.as_packetdrill).arg(&BUILT.library).arg(version);
        driver.arg(folder.path()).args(options).output().expect("timeout of coreutils runs")
    });
}

#[test]
fn as_packetdrill_does_over_ipv4() {
    as_packetdrill("ipv4", &[]);
}

#[test]
fn as_packetdrill_does_over_ipv6_with_its_mtu() {
    as_packetdrill("ipv6", &["--mtu=1520"]);
}

#[test]
fn as_packetdrill_does_over_ipv4_by_sockets_of_ipv6() {
    as_packetdrill("ipv4-mapped-ipv6", &[]);
}

#[test]
fn wrong_flags_are_told_and_nothing_works() {
    assert!(passes("wrong_flags", Some("mtu=17")).contains("mtu: \"17\" is not from 68 to 65521"));
    assert!(passes("wrong_flags", Some("speed=1")).contains("\"speed\" is not one of local, mtu, proc"));
}

#[test]
fn writes_end_where_the_send_buffer_is_full() {
    passes("send_buffer", Some("proc=off,net.ipv4.tcp_wmem=4096:50000:4194304"));
}

#[test]
fn settings_of_the_kernel_and_flags_are_settings_of_the_stack() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tcp_sack"), "0\n").unwrap();
    std::fs::write(folder.path().join("tcp_congestion_control"), "bbr\n").unwrap();
    let flags = format!("proc={},mtu=1000,net.ipv4.tcp_timestamps=0", folder.path().display());
    let said = passes("plain_options", Some(&flags));
    assert!(said.contains("tcp_congestion_control=bbr"), "{said}");
}
