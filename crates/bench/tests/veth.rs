//! Smoke tests of the comparisons with the kernel, in each layout. The figures mean nothing here.

use ginnel_testkit::interop::{programs_are_built, unavailable};
use ginnel_testkit::skip;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};

const BENCH: &str = env!("CARGO_BIN_EXE_ginnel-bench");

/// Builds `ginnel` and its library, which cargo does not build for the tests of another package.
fn build_programs() {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        if programs_are_built() {
            return;
        }
        let target = Path::new(BENCH).ancestors().nth(2).unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--locked", "--package", "ginnel-cli", "--package", "ginnel-posix"]);
        build.args(["--package", "ginnel-kernel-preload"]);
        build.arg("--target-dir").arg(target);
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        let built = build.output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    });
}

/// Runs a short bench and returns its output.
fn smoke(bench: &str, layout: &str) -> String {
    let folder = env!("CARGO_TARGET_TMPDIR");
    let output = Command::new(BENCH)
        .args([bench, "--smoke", "--seconds", "0.5", "--layout", layout])
        // With a lock and a record of its own, the bench neither disturbs nor waits for a measurement.
        .env("TMPDIR", folder)
        .env("CARGO_TARGET_DIR", folder)
        .output()
        .unwrap();
    let (text, problem) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}{problem}");
    text.into_owned()
}

/// Returns the reason why the benches cannot run here, if there is one.
fn reason(programs: &[&str]) -> Option<String> {
    let missing = |program: &&&str| Command::new(program).arg("-v").output().is_err();
    let programs =
        ["ethtool", "ip"].iter().chain(programs).find(missing).map(|program| format!("no {program}"));
    unavailable()
        .or_else(|| (!rustix::process::geteuid().is_root()).then(|| "BPF programs need root".into()))
        .or(programs)
}

/// Returns the lines of an output that begin with `start`, of which there must be at least one.
fn lines<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| line.starts_with(start)).collect();
    assert!(!lines.is_empty(), "no {start:?}: {text}");
    lines
}

/// Checks that no request failed, and that the arms could be compared.
fn check_comparison(text: &str) {
    for line in lines(text, "failures ") {
        assert_eq!(line.split_whitespace().collect::<Vec<_>>(), ["failures", "0", "0"], "{text}");
    }
    for line in lines(text, "ratio ") {
        let ratio: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(ratio > 0.0 && ratio.is_finite(), "{line}");
    }
}

/// Checks the output of a bench: both arms have figures, a bottleneck is named, and there are no failures.
fn check(bench: &str, layout: &str, kernel_receives: bool) {
    let text = smoke(bench, layout);
    for arm in ["ours: ", "theirs: "] {
        for line in lines(&text, arm) {
            assert!(line.contains("bottleneck: ") && line.contains(&format!("layout {layout}")), "{line}");
            assert!(!line.starts_with(&format!("{arm}0/s")) && !line.contains("NaN"), "{line}");
            if arm == "theirs: " {
                assert_eq!(line.contains("server_receives"), kernel_receives, "{line}");
            }
        }
    }
    check_comparison(&text);
}

#[test]
fn httpd_against_nginx_runs_in_each_layout() {
    if let Some(reason) = reason(&["nginx"]) {
        return skip("httpd_against_nginx_runs_in_each_layout", &reason);
    }
    build_programs();
    check("short-vs-kernel", "charged", true);
    check("keepalive-vs-kernel", "charged", true);
    check("short-vs-kernel", "sender", false);
    check("short-vs-kernel", "one", true);
}

/// Returns the command lines of the processes that have this directory as `TMPDIR`.
fn processes_of(folder: &Path) -> Vec<String> {
    let mark = format!("TMPDIR={}\0", folder.display());
    let processes = std::fs::read_dir("/proc").unwrap().map(|process| process.unwrap().path());
    // Processes that have ended cannot be read.
    let has_mark = |process: &PathBuf| {
        let environment = std::fs::read(process.join("environ")).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(&mark)
    };
    let command_line =
        |process: PathBuf| std::fs::read_to_string(process.join("cmdline")).unwrap_or_default();
    processes.filter(has_mark).map(command_line).filter(|words| !words.is_empty()).collect()
}

#[test]
fn killed_bench_leaves_no_servers() {
    if let Some(reason) = reason(&["nginx"]) {
        return skip("killed_bench_leaves_no_servers", &reason);
    }
    build_programs();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("killed-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut bench = Command::new(BENCH);
    bench.args(["nginx-short-vs-kernel", "--smoke", "--seconds", "600"]);
    bench.env("TMPDIR", &folder).env("CARGO_TARGET_DIR", &folder);
    let mut bench = bench.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let wait_until = |what: &str, is_reached: &dyn Fn(&[String]) -> bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_reached(&processes_of(&folder)) {
            assert!(Instant::now() < deadline, "{what}: {:?}", processes_of(&folder));
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait_until("the server runs", &|processes| processes.iter().any(|words| words.contains("nginx.conf")));
    bench.kill().unwrap();
    bench.wait().unwrap();
    wait_until("all processes have ended", &|processes| processes.is_empty());
    let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(files.collect::<Vec<_>>(), ["ginnel-bench.lock"]);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn kernel_lane_runs_beside_a_shared_listener() {
    if let Some(reason) = reason(&["nginx", "wrk"]) {
        return skip("kernel_lane_runs_beside_a_shared_listener", &reason);
    }
    build_programs();
    check_comparison(&smoke("kernel-lane", "charged"));
}

#[test]
fn unmodified_servers_run_on_both() {
    if let Some(reason) = reason(&["nginx", "haproxy", "redis-server", "memcached"]) {
        return skip("unmodified_servers_run_on_both", &reason);
    }
    build_programs();
    for bench in [
        "nginx-short-vs-kernel",
        "nginx-keepalive-vs-kernel",
        "nginx-short-memory",
        "rtt-vs-kernel",
        "redis-vs-kernel",
        "memcached-vs-kernel",
        "haproxy-vs-kernel",
    ] {
        check(bench, "charged", true);
    }
}

#[test]
fn unmodified_clients_run_on_both() {
    if let Some(reason) = reason(&["ab", "wrk", "iperf3"]) {
        return skip("unmodified_clients_run_on_both", &reason);
    }
    build_programs();
    check("client-vs-kernel", "charged", true);
    check("iperf-vs-kernel", "charged", true);
}
