//! Servers with thousands of processes or listeners.

use crate::fixture::{Fixture, skipped};

const LOOPBACK: [&str; 2] = ["--loopback", "stack"];

#[test]
fn a_thousand_forked_children_each_serve_a_connection() {
    if skipped("a_thousand_forked_children_each_serve_a_connection") {
        return;
    }
    let fixture = Fixture::new("forking");
    let program = &*fixture.compile_c("many_processes");
    for (stack, count) in [(["--stack", "kernel"], "100"), (LOOPBACK, "1000")] {
        let output = fixture.run_ok(&[&["run"], &stack[..], &["--", program, "forking", count]].concat());
        assert_eq!(output, format!("{count} answers\n0 failed\n"), "{stack:?}");
    }
}

#[test]
fn hundreds_of_workers_share_a_listener() {
    if skipped("hundreds_of_workers_share_a_listener") {
        return;
    }
    let fixture = Fixture::new("workers");
    let program = &*fixture.compile_c("many_processes");
    for stack in [["--stack", "kernel"], LOOPBACK] {
        let output = fixture.run_ok(&[&["run"], &stack[..], &["--", program, "workers", "300"]].concat());
        assert_eq!(output, "300 answers\n0 failed\n", "{stack:?}");
    }
}

/// A process that is stopped while it reads or writes a connection makes the others wait, and neither breaks
/// their connection nor makes them read bytes twice.
#[test]
fn stopped_processes_do_not_end_a_shared_stream() {
    if skipped("stopped_processes_do_not_end_a_shared_stream") {
        return;
    }
    let fixture = Fixture::new("shared-stream");
    let program = &*fixture.compile_c("many_processes");
    for stack in [["--stack", "kernel"], LOOPBACK] {
        let output = fixture.run_ok(&[&["run"], &stack[..], &["--", program, "stream", "10"]].concat());
        assert_eq!(output, "0 failed\nall bytes once\n", "{stack:?}");
    }
}

// limit: channel.listeners_max
#[test]
fn thousands_of_listeners_and_their_limit() {
    if skipped("thousands_of_listeners_and_their_limit") {
        return;
    }
    let fixture = Fixture::new("listeners");
    let program = &*fixture.compile_c("many_processes");
    for stack in [["--stack", "kernel"], LOOPBACK] {
        let output = fixture.run_ok(&[&["run"], &stack[..], &["--", program, "listeners", "2000"]].concat());
        assert_eq!(output, "2000 listeners\n", "{stack:?}");
    }
    std::fs::write(fixture.path().join("few.toml"), "[channel]\nlisteners_max = 70\n").unwrap();
    let limited = ["--config", "few.toml", "--loopback", "stack"];
    let output = fixture.run_ok(&[&["run"], &limited[..], &["--", program, "listeners", "71"]].concat());
    assert_eq!(output, "listener of port 10070: Too many open files in system\n");
}
