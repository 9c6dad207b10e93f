//! `ginnel run`: unmodified programs on a stack, with the kernel's clients at the other end of a TAP device.

use ginnel_testkit::interop::{ProgramFixture, build_preload_library, programs_unavailable};
use ginnel_testkit::skip;
use sha2::{Digest, Sha256};
use std::process::Command;

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");

fn fixture(name: &str) -> ProgramFixture {
    ProgramFixture::new(GINNEL, env!("CARGO_TARGET_TMPDIR"), &format!("run-{name}")).unwrap()
}

/// Returns true, and prints a note, if the test cannot run here.
fn skipped(test: &str, program: &str) -> bool {
    let reason = programs_unavailable(&[program]);
    if let Some(reason) = &reason {
        skip(test, reason);
    }
    reason.is_some()
}

#[test]
fn nginx_serves_clients_over_stack_and_kernel() {
    if skipped("nginx_serves_clients_over_stack_and_kernel", "nginx") {
        return;
    }
    let fixture = fixture("nginx");
    let page: Vec<u8> =
        (0..3_000_000u32).flat_map(|n| (n.wrapping_mul(2_654_435_761) >> 16).to_le_bytes()).collect();
    fixture.write("site/page", &page);
    let conf = fixture.nginx("master_process off;");
    let mut nginx = fixture.start_on_stack(&["nginx", "-c", &conf]);
    nginx.wait_until_listening("10.9.0.2:8000");
    for host in ["10.9.0.2", "127.0.0.1"] {
        let fetched = fixture.run_client("curl", &["-sS", "-m", "30", &format!("http://{host}:8000/page")]);
        assert!(fetched.status.success(), "{host}: {}", String::from_utf8_lossy(&fetched.stderr));
        assert!(Sha256::digest(&fetched.stdout) == Sha256::digest(&page), "{host}: the page differs");
    }
    for header in ["Connection: keep-alive", "Connection: close"] {
        let arguments = ["-c", "20", "-d", "1", "-t", "1", "-H", header, "http://10.9.0.2:8000/ok"];
        let output = fixture.run_client("wrk", &arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("Requests/sec"), "{header}: {text}");
        assert!(!text.contains("Socket errors") && !text.contains("Non-2xx"), "{header}: {text}");
    }
    let log = String::from_utf8(fixture.read("error.log")).unwrap();
    let bad = ["[emerg]", "[alert]", "[crit]", "[error]", "[warn]"];
    assert!(!bad.iter().any(|level| log.contains(level)), "{log}");
    assert_eq!(nginx.stop(), 0, "{}", nginx.read_stderr());
}

#[test]
fn nginx_survives_reload_and_killed_worker() {
    if skipped("nginx_survives_reload_and_killed_worker", "nginx") {
        return;
    }
    let fixture = fixture("workers");
    let conf = fixture.nginx("worker_processes 2;");
    let mut nginx = fixture.start_on_stack(&["nginx", "-c", &conf]);
    let url = "http://10.9.0.2:8000/ok";
    nginx.wait_until_listening("10.9.0.2:8000");
    let pid = String::from_utf8(fixture.wait_for_content("pid")).unwrap();
    let master = pid.trim();
    for act in ["nothing", "reload", "kill", "reload"] {
        match act {
            "reload" => assert!(Command::new("kill").args(["-HUP", master]).status().unwrap().success()),
            "kill" => {
                let workers = Command::new("pgrep").args(["-P", master]).output().unwrap();
                let workers = String::from_utf8(workers.stdout).unwrap();
                let worker = workers.lines().next().expect("a worker");
                assert!(Command::new("kill").args(["-9", worker]).status().unwrap().success());
            }
            _ => {}
        }
        fixture.client_output("curl", &["-sS", "-m", "30", url]);
        let arguments = ["-c", "10", "-d", "1", "-t", "1", "-H", "Connection: close", url];
        let text = String::from_utf8(fixture.run_client("wrk", &arguments).stdout).unwrap();
        assert!(text.contains("Requests/sec") && !text.contains("Non-2xx"), "{act}: {text}");
    }
    let log = String::from_utf8(fixture.read("error.log")).unwrap();
    assert!(!["[emerg]", "[crit]", "[error]", "[warn]"].iter().any(|level| log.contains(level)), "{log}");
    assert_eq!(nginx.stop(), 0, "{}", nginx.read_stderr());
}

#[test]
fn the_exit_status_of_the_program_is_returned() {
    if skipped("the_exit_status_of_the_program_is_returned", "curl") {
        return;
    }
    for (script, status) in [("exit 7", 7), ("exit 0", 0), ("kill -9 $$", 137)] {
        let fixture = fixture("status");
        let mut shell = fixture.start_on_stack(&["sh", "-c", script]);
        assert_eq!(shell.wait_for_exit(), status, "{script}: {}", shell.read_stderr());
    }
    // As sh, env and nice do.
    for (program, status, cause) in [
        ("/no/such/program", 127, "/no/such/program: command not found"),
        ("no-such-program", 127, "no-such-program: command not found"),
        ("/etc/passwd", 126, "/etc/passwd: Permission denied"),
        ("/tmp", 126, "/tmp: Permission denied"),
    ] {
        let fixture = fixture("missing");
        let mut missing = fixture.start_on_stack(&[program]);
        assert_eq!(missing.wait_for_exit(), status, "{program}");
        assert!(missing.read_stderr().contains(cause), "{program}");
        let on_kernel =
            Command::new(GINNEL).args(["run", "--stack", "kernel", "--", program]).output().unwrap();
        assert_eq!(on_kernel.status.code(), Some(status), "{program}: {on_kernel:?}");
    }
}

#[test]
fn a_missing_stack_is_reported_once() {
    let run = |policy: Option<&str>| {
        let mut command = Command::new("echo");
        command
            .arg("here")
            .env("LD_PRELOAD", build_preload_library(GINNEL))
            .env("GINNEL_STACK", "/nowhere/control");
        if let Some(policy) = policy {
            command.env("GINNEL_ON_MISSING", policy);
        }
        command.output().unwrap()
    };
    let failed = run(None);
    let error = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert_eq!(failed.status.code(), Some(125), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.contains("/nowhere/control"), "{error}");
    assert!(failed.stdout.is_empty());
    let kernel = run(Some("kernel"));
    assert!(kernel.status.success());
    assert_eq!(kernel.stdout, b"here\n");
    assert_eq!(String::from_utf8_lossy(&kernel.stderr).lines().count(), 1);
}
