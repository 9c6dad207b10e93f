//! iperf3 at either end, in both directions.

use crate::fixture;
use ginnel_testkit::interop::ProgramFixture;
use std::time::{Duration, Instant};

/// Ways to send: one stream, back, several, both at once, in small pieces, by sendfile, with options of the socket, at a rate, in datagrams.
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

/// What must stand in a report, in which `error` is whatever went wrong.
fn assert_report(way: &[&str], report: &str) {
    assert!(!report.contains("\"error\""), "{way:?}: {report}");
    let received = report.lines().filter_map(|line| line.trim().strip_prefix("\"bytes\":"));
    let most = received.filter_map(|number| number.trim().trim_end_matches(',').parse::<u64>().ok()).max();
    assert!(most.is_some_and(|bytes| bytes > 500_000), "{way:?}: {report}");
}

/// Arguments of `timeout`: what goes wrong with iperf3 it often waits for.
fn arguments<'a>(host: &'a str, way: &[&'a str]) -> Vec<&'a str> {
    [&["10", "iperf3", "-c", host, "-J"][..], way].concat()
}

/// A server that has started may not listen yet, and one that has been tried with a bare connection fails the next test.
fn wait_for_server(place: &ProgramFixture, host: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let tried = place.run_client("timeout", &arguments(host, &["-n", "1M"]));
        // With `-J` it ends with success whatever happened.
        if tried.status.success() && !String::from_utf8_lossy(&tried.stdout).contains("\"error\"") {
            return;
        }
        assert!(Instant::now() < end, "no server");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn iperf3_serves_on_a_stack() {
    let Some(place) = fixture("iperf3_serves_on_a_stack", &["iperf3"]) else { return };
    let _server = place.start_on_stack(&["iperf3", "-s"]);
    wait_for_server(&place, "10.9.0.2");
    for way in OPTION_SETS {
        let measure = || place.run_client("timeout", &arguments("10.9.0.2", way)).stdout;
        let mut report = String::from_utf8(measure()).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        // It may not have done with the last one yet, or not listen again.
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
    let Some(place) = fixture("iperf3_measures_over_ipv6_inside_a_stack", &["iperf3"]) else { return };
    // Its server and its client are on the same stack.
    let ways = [&["-n", "20M"][..], &["-n", "20M", "-R"], &["-n", "1M", "-u", "-b", "40M", "-l", "1200"]];
    let call = |(n, way): (usize, &&[&str])| {
        let way = way.join(" ");
        format!(
            "while timeout 10 iperf3 -6 -c ::1 -J {way} >report{n}; grep -Eq 'busy|Connection refused' report{n}; do sleep 0.1; done\n"
        )
    };
    let calls: String = ways.iter().enumerate().map(call).collect();
    let script = format!("iperf3 -s -B ::1 >/dev/null & server=$!\n{calls}kill $server");
    place.client_output(
        env!("CARGO_BIN_EXE_ginnel"),
        &["run", "--loopback", "stack", "--", "sh", "-c", &script],
    );
    for (number, way) in ways.iter().enumerate() {
        assert_report(way, &String::from_utf8_lossy(&place.read(&format!("report{number}"))));
    }
}

#[test]
fn iperf3_client_runs_on_a_stack() {
    let Some(place) = fixture("iperf3_client_runs_on_a_stack", &["iperf3"]) else { return };
    place.start_on_kernel("iperf3", &["-s"]);
    wait_for_server(&place, "127.0.0.1");
    let ways: Vec<&[&str]> = OPTION_SETS.into_iter().chain([&["-n", "50M", "-B", "10.9.0.2"][..]]).collect();
    let call = |(n, way): (usize, &&[&str])| {
        format!(
            "while timeout {0} >report{n}; grep -Eq 'busy|Connection refused' report{n}; do sleep 0.05; done\n",
            arguments("10.9.0.1", way).join(" ")
        )
    };
    let calls: String = ways.iter().enumerate().map(call).collect();
    let mut client = place.start_on_stack(&["sh", "-c", &calls]);
    client.wait_for_exit();
    for (number, way) in ways.iter().enumerate() {
        assert_report(way, &String::from_utf8_lossy(&place.read(&format!("report{number}"))));
    }
}
