//! `ginnel monitor` with captures and an interface.

use ginnel_monitor::frame::{ACK, SYN};
use ginnel_monitor::scripted::{Side, segment};
use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::processes::wait_until;
use ginnel_testkit::skip;
use rustix::process::{Pid, Signal};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab";

fn monitor(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_ginnel")).arg("monitor").args(arguments).output();
    output.expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns a capture of ten requests, of which the last one has no response. Each of the others is answered
/// after a millisecond.
fn capture() -> Vec<u8> {
    let (client, server) = (GET.len() as u32, OK.len() as u32);
    let mut frames = vec![(0u32, segment(Side::Client, 0, 0, SYN, &[]))];
    for n in 0..10 {
        let (at, seq, ack) = (n * 100_000 + 5, 1 + n * client, 1 + n * server);
        frames.push((at, segment(Side::Client, seq, ack, ACK, GET)));
        if n < 9 {
            frames.push((at + 1000, segment(Side::Server, ack, seq + client, ACK, OK)));
        }
    }
    let mut bytes = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0];
    for (micros, frame) in frames {
        let len = frame.len() as u32;
        [1_700_000_000, micros, len, len].iter().for_each(|word: &u32| bytes.extend(word.to_le_bytes()));
        bytes.extend(frame);
    }
    bytes
}

fn write_capture(folder: &Path, bytes: &[u8]) -> String {
    let path = folder.join("traffic.pcap");
    std::fs::write(&path, bytes).unwrap();
    path.display().to_string()
}

fn total(output: &Output) -> serde_json::Value {
    let lines = text(&output.stdout);
    let last = lines.lines().last().unwrap_or_else(|| panic!("{}", text(&output.stderr)));
    let total: serde_json::Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(total["kind"], "total");
    total
}

#[test]
fn a_capture_is_reported_as_text_json_and_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = write_capture(folder.path(), &capture());
    let report = folder.path().join("report");
    let report_name = report.display().to_string();
    let arguments = ["--read", &path, "--protocol", "http", "--interval", "500ms", "--output", &report_name];
    let plain = monitor(&arguments);
    let plain_text = text(&plain.stdout);
    assert!(plain.status.success(), "{}", text(&plain.stderr));
    for part in ["interval 1\n", "interval 2\n", "total\n", "p99.99 ", "1.00 ms"] {
        assert!(plain_text.contains(part), "{part}: {plain_text}");
    }
    let json = monitor(&[&arguments[..], &["--json"]].concat());
    assert_eq!(text(&json.stdout).lines().count(), 3);
    let total = total(&json);
    let counters = &total["counters"];
    assert_eq!((&counters["requests"], &counters["responses"]), (&10.into(), &9.into()));
    assert_eq!((&counters["unanswered"], &total["outstanding"]), (&1.into(), &1.into()));
    for name in ["mean_ns", "min_ns", "max_ns"] {
        assert_eq!(total["latency"]["total"][name], 1_000_000, "{name}");
    }
    let read = |name: &str| std::fs::read_to_string(report.join(name)).unwrap();
    let cdf = read("cdf.txt");
    assert_eq!(cdf.lines().filter(|line| line.starts_with("connections\t1\t")).count(), 2, "{cdf}");
    assert_eq!(cdf.lines().filter(|line| *line == "1.0000\t1.0000\t-\t1.0000").count(), 2, "{cdf}");
    assert_eq!(read("sketch.txt").lines().last(), Some("1.1\t4\t0\t4"));
    assert!(read("cdf.svg").contains("all requests (9)"));
}

#[test]
fn standard_input_is_a_source() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
    command.args(["monitor", "--read", "-", "--protocol", "http", "--json"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&capture()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(total(&output)["counters"]["responses"], 9);
}

#[test]
fn a_cut_capture_is_reported_and_fails() {
    let folder = tempfile::tempdir().unwrap();
    let whole = capture();
    let path = write_capture(folder.path(), &whole[..whole.len() - 5]);
    let output = monitor(&["--read", &path, "--protocol", "http", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(total(&output)["counters"]["responses"], 9);
    let problem = text(&output.stderr);
    assert!(problem.contains(&path) && problem.contains("is cut short"), "{problem}");
    assert!(problem.contains("covers the 19 packets before"), "{problem}");
}

#[test]
fn problems_are_named_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let script = write_capture(folder.path(), b"#!/bin/sh\necho hello, this is no capture\n");
    let rules = folder.path().join("rules.toml");
    std::fs::write(&rules, "[[rules]]\nports = [80]\nprotocol = \"smtp\"\n").unwrap();
    let rules = rules.display().to_string();
    let cases: [(&[&str], i32, &str); 9] = [
        (&["no-such-stack", "--protocol", "http"], 1, "no stack named \"no-such-stack\" runs"),
        (&["--read", "x"], 2, "--protocol"),
        (&["--read", "no/such.pcap", "--protocol", "http"], 1, "no/such.pcap: No such file"),
        (&["--read", &script, "--protocol", "http"], 1, "neither a pcap nor a pcapng capture"),
        (&["--read", "x", "--protocol", "http", "--interval", "0"], 2, "not 10ms to 24h"),
        (&["--read", "x", "--protocol", "http", "--interface", "lo"], 2, "cannot be used with"),
        (&["web", "--protocol", "http", "--interface", "lo"], 2, "cannot be used with"),
        (&["--interface", "no-such-if", "--protocol", "http"], 1, "interface no-such-if: No such device"),
        (&["--read", "x", "--rules", &rules], 2, "unknown variant `smtp`"),
    ];
    for (arguments, code, expected) in cases {
        let output = monitor(arguments);
        let problem = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {problem}");
        assert!(problem.contains(expected), "{arguments:?}: {problem}");
        assert_eq!(problem.lines().count(), 1, "{problem}");
    }
}

/// Reads one request at a time, and answers a millisecond later. Returns the time from each request to its
/// answer.
fn serve_slowly(mut stream: TcpStream, count: usize) -> Duration {
    let mut own_time = Duration::ZERO;
    let mut request = [0; GET.len()];
    for _ in 0..count {
        stream.read_exact(&mut request).unwrap();
        let received = Instant::now();
        std::thread::sleep(Duration::from_millis(1));
        own_time += received.elapsed();
        stream.write_all(OK).unwrap();
    }
    own_time
}

/// Makes requests one after the other. Returns the time from each request to its answer.
fn ask(mut stream: TcpStream, count: usize) -> Duration {
    let mut own_time = Duration::ZERO;
    let mut response = [0; OK.len()];
    for _ in 0..count {
        let sent = Instant::now();
        stream.write_all(GET).unwrap();
        stream.read_exact(&mut response).unwrap();
        own_time += sent.elapsed();
    }
    own_time
}

/// Waits until a process in the namespace of the calling thread gets packets by a packet socket.
fn wait_for_packet_socket() {
    let is_bound = |line: &str| {
        let cells: Vec<&str> = line.split_whitespace().collect();
        // Interface, and whether the socket is in use.
        matches!(cells[..], [_, _, _, _, interface, "1", ..] if interface != "0")
    };
    let begun = Instant::now();
    while !std::fs::read_to_string("/proc/thread-self/net/packet").unwrap().lines().any(is_bound) {
        assert!(begun.elapsed() < Duration::from_secs(30), "the monitor opens no packet socket");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Each time of the server lies within that of the monitor, and that within the client's.
#[test]
fn an_interface_shows_times_between_server_and_client() {
    const COUNT: usize = 50;
    if let Some(reason) = unavailable() {
        return skip("an_interface_shows_times_between_server_and_client", &reason);
    }
    let namespace = Namespace::new().unwrap();
    let run = namespace.run(|| {
        let status = Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
        assert!(status.success());
        let listener = TcpListener::bind("127.0.0.1:80").unwrap();
        let mut monitor = Command::new(env!("CARGO_BIN_EXE_ginnel"));
        monitor.args(["monitor", "--interface", "lo", "--protocol", "http", "--json", "--interval", "1h"]);
        let monitor = monitor.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for_packet_socket();
        let server = std::thread::spawn(move || serve_slowly(listener.accept().unwrap().0, COUNT));
        let client_time = ask(TcpStream::connect("127.0.0.1:80").unwrap(), COUNT);
        let server_time = server.join().unwrap();
        // The kernel passes on a block that is not full after some milliseconds.
        std::thread::sleep(Duration::from_millis(200));
        let id = rustix::process::Pid::from_child(&monitor);
        rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
        Ok((monitor.wait_with_output()?, server_time, client_time))
    });
    let (output, server_time, client_time) = run.unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let total = total(&output);
    let counters = &total["counters"];
    assert_eq!((&counters["requests"], &counters["responses"]), (&COUNT.into(), &COUNT.into()), "{counters}");
    assert_eq!((&counters["request_retransmissions"], &counters["missed_bytes"]), (&0.into(), &0.into()));
    let mean = |time: Duration| time.as_nanos() as u64 / COUNT as u64;
    let monitored = total["latency"]["total"]["mean_ns"].as_u64().unwrap();
    // The kernel's clock and that of the processes may differ by its correction, 500 ppm at most.
    let (least, most) = (mean(server_time), mean(client_time));
    assert!(
        monitored + least / 1000 >= least && monitored <= most + most / 1000,
        "{least} {monitored} {most}"
    );
    assert!(total["latency"]["total"]["min_ns"].as_u64() >= Some(1_000_000));
}

#[test]
fn an_interface_needs_a_capability() {
    if let Some(reason) = unavailable() {
        return skip("an_interface_needs_a_capability", &reason);
    }
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-net_raw", "--inh-caps=-net_raw", env!("CARGO_BIN_EXE_ginnel")]);
    let output = command.args(["monitor", "--interface", "lo", "--protocol", "http"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let problem = text(&output.stderr);
    assert!(problem.contains("interface lo") && problem.contains("CAP_NET_RAW"), "{problem}");
}

#[test]
fn a_running_stack_is_observed_by_name() {
    const COUNT: usize = 30;
    if let Some(reason) = unavailable() {
        return skip("a_running_stack_is_observed_by_name", &reason);
    }
    let namespace = Namespace::new().unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("page"), "hello").unwrap();
    let run_dir = folder.path().join("run");
    let ginnel = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
        command.args(arguments).env("GINNEL_RUN_DIR", &run_dir).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let root = folder.path().display().to_string();
    let run = namespace.run(|| {
        let addresses = ["--address", "10.1.0.2/24", "--kernel-address", "10.1.0.1/24"];
        let options = ["httpd", &root, "--device", "tap:m0", "--name", "web"];
        let mut server = ginnel(&[&options[..], &addresses].concat()).spawn()?;
        wait_until("the server does not listen", || TcpStream::connect("10.1.0.2:80").is_ok());
        let mut monitor =
            ginnel(&["monitor", "web", "--protocol", "http", "--json", "--interval", "1h"]).spawn()?;
        let mut first_line = String::new();
        BufReader::new(monitor.stderr.take().expect("a pipe")).read_line(&mut first_line)?;
        assert_eq!(first_line, "observing stack \"web\"; Ctrl-C ends\n");
        let second = ginnel(&["monitor", "web", "--protocol", "http"]).output()?;
        assert!(text(&second.stderr).contains("another capture, monitor, "));
        let mut client = TcpStream::connect("10.1.0.2:80")?;
        let mut response = vec![0; 4096];
        for _ in 0..COUNT {
            client.write_all(b"GET /page HTTP/1.1\r\nHost: x\r\n\r\n")?;
            let mut received = 0;
            while !response[..received].ends_with(b"hello") {
                received += client.read(&mut response[received..])?;
            }
        }
        let stop = |child: &std::process::Child| {
            let id = rustix::process::Pid::from_child(child);
            rustix::process::kill_process(id, rustix::process::Signal::INT)
        };
        // The end of the stack ends the monitor, too.
        stop(&server)?;
        let output = monitor.wait_with_output()?;
        assert!(server.wait()?.success());
        Ok(output)
    });
    let output = run.unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let total = total(&output);
    let counters = &total["counters"];
    assert_eq!((&counters["requests"], &counters["responses"]), (&COUNT.into(), &COUNT.into()), "{counters}");
    assert_eq!((&total["source_lost"], &counters["connections_midstream"]), (&0.into(), &0.into()));
}

/// While no packets come, Ctrl-C and the end of `--duration` end a run on standard input, and the report
/// has what came before.
#[test]
fn a_quiet_pipe_does_not_block_the_end() {
    for (options, interrupts) in [(&["--json"][..], true), (&["--json", "--duration", "1s"], false)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
        command.args(["monitor", "--read", "-", "--protocol", "http"]).args(options);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut monitor = command.spawn().unwrap();
        let mut pipe = monitor.stdin.take().unwrap();
        let capture = capture();
        // The last packet is incomplete.
        pipe.write_all(&capture[..capture.len() - 3]).unwrap();
        // Everything was read once the pipe is empty.
        wait_until("the capture is read", || rustix::io::ioctl_fionread(&pipe).unwrap() == 0);
        if interrupts {
            rustix::process::kill_process(Pid::from_child(&monitor), Signal::INT).unwrap();
        }
        let output = monitor.wait_with_output().unwrap();
        drop(pipe);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(total(&output)["counters"]["packets"], 19, "{output:?}");
    }
}
