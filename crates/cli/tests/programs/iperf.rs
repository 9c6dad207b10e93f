//! iperf3 at either end, in both directions.

use crate::fixture;
use ginnel_testkit::interop::ProgramFixture;
use std::time::{Duration, Instant};

/// Options: one stream, reverse, several streams, bidirectional, small writes, sendfile, socket options, a
/// rate, datagrams.
const OPTION_SETS: [&[&str]; 13] = [
    &["-n", "50M"],
    &["-n", "50M", "-R"],
    &["-n", "50M", "-P", "3"],
    &["-n", "50M", "--bidir"],
    &["-n", "2M", "-l", "200"],
    &["-n", "50M", "-Z"],
    &["-n", "50M", "-M", "1000", "-N"],
    &["-n", "50M", "-w", "64K", "-R"],
    &["-n", "5M", "-b", "100M", "-R", "-P", "2"],
    &["-n", "5M", "-C", "reno", "-S", "16"],
    &["-n", "2M", "-u", "-b", "40M"],
    &["-n", "2M", "-u", "-b", "40M", "-R"],
    &["-n", "2M", "-u", "-b", "40M", "-l", "4000"],
];

/// Checks a report, whose `error` field describes any failure.
fn assert_report(way: &[&str], report: &str) {
    assert!(!report.contains("\"error\""), "{way:?}: {report}");
    let received = report.lines().filter_map(|line| line.trim().strip_prefix("\"bytes\":"));
    let most = received.filter_map(|number| number.trim().trim_end_matches(',').parse::<u64>().ok()).max();
    assert!(most.is_some_and(|bytes| bytes > 500_000), "{way:?}: {report}");
}

/// Arguments of `timeout`, because iperf3 often hangs after a failure.
fn arguments<'a>(host: &'a str, way: &[&'a str]) -> Vec<&'a str> {
    [&["10", "iperf3", "-c", host, "-J"][..], way].concat()
}

/// A server that has started may not listen yet. A bare connection would make the next test fail, so this
/// runs iperf3 itself.
fn wait_for_server(fixture: &ProgramFixture, host: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let tried = fixture.run_client("timeout", &arguments(host, &["-n", "1M"]));
        // With `-J` iperf3 exits with success in any case.
        if tried.status.success() && !String::from_utf8_lossy(&tried.stdout).contains("\"error\"") {
            return;
        }
        assert!(Instant::now() < end, "no server");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn iperf3_serves_on_a_stack() {
    let Some(fixture) = fixture("iperf3_serves_on_a_stack", &["iperf3"]) else { return };
    let _server = fixture.start_on_stack(&["iperf3", "-s"]);
    wait_for_server(&fixture, "10.9.0.2");
    for way in OPTION_SETS {
        let measure = || fixture.run_client("timeout", &arguments("10.9.0.2", way)).stdout;
        let mut report = String::from_utf8(measure()).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        // The server may not have finished the last test, or may not listen again yet.
        let not_yet = |report: &str| report.contains("busy") || report.contains("Connection refused");
        while not_yet(&report) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
            report = String::from_utf8(measure()).unwrap();
        }
        assert_report(way, &report);
    }
}

#[test]
fn iperf3_measures_over_ipv6_inside_a_stack() {
    let Some(fixture) = fixture("iperf3_measures_over_ipv6_inside_a_stack", &["iperf3"]) else { return };
    // Server and client are on the same stack.
    let ways = [&["-n", "20M"][..], &["-n", "20M", "-R"], &["-n", "1M", "-u", "-b", "40M", "-l", "1200"]];
    let call = |(n, way): (usize, &&[&str])| {
        let way = way.join(" ");
        format!(
            "while timeout 10 iperf3 -6 -c ::1 -J {way} >report{n}; grep -Eq 'busy|Connection refused' report{n}; do sleep 0.1; done\n"
        )
    };
    let calls: String = ways.iter().enumerate().map(call).collect();
    let script = format!("iperf3 -s -B ::1 >/dev/null & server=$!\n{calls}kill $server");
    fixture.client_output(
        env!("CARGO_BIN_EXE_ginnel"),
        &["run", "--loopback", "stack", "--", "sh", "-c", &script],
    );
    for (number, way) in ways.iter().enumerate() {
        assert_report(way, &String::from_utf8_lossy(&fixture.read(&format!("report{number}"))));
    }
}

#[test]
fn iperf3_client_runs_on_a_stack() {
    let Some(fixture) = fixture("iperf3_client_runs_on_a_stack", &["iperf3"]) else { return };
    fixture.start_on_kernel("iperf3", &["-s"]);
    wait_for_server(&fixture, "127.0.0.1");
    let ways: Vec<&[&str]> = OPTION_SETS.into_iter().chain([&["-n", "50M", "-B", "10.9.0.2"][..]]).collect();
    let call = |(n, way): (usize, &&[&str])| {
        format!(
            "while timeout {0} >report{n}; grep -Eq 'busy|Connection refused' report{n}; do sleep 0.05; done\n",
            arguments("10.9.0.1", way).join(" ")
        )
    };
    let calls: String = ways.iter().enumerate().map(call).collect();
    let mut client = fixture.start_on_stack(&["sh", "-c", &calls]);
    client.wait_for_exit();
    for (number, way) in ways.iter().enumerate() {
        assert_report(way, &String::from_utf8_lossy(&fixture.read(&format!("report{number}"))));
    }
}
