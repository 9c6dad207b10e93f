//! `ginnel load replay` of captures to a server on the kernel's stack.

use ginnel_monitor::frame::{ACK, FIN, SYN};
use ginnel_monitor::scripted::{Side, segment_of};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Output};
use std::thread::JoinHandle;

const PSH_ACK: u8 = ACK | 8;
const CONNECTIONS: u16 = 4;

/// Returns a pcap capture of connections that each send two requests and get answers of `answer` bytes. The
/// second request is sent twice. The last connection is seen from its middle on.
fn capture(answer: usize) -> Vec<u8> {
    let mut frames = Vec::new();
    for n in 0..=CONNECTIONS {
        let client = ([10, 0, 0, 2], 2000 + n);
        let mut at = u32::from(n) * 1_000;
        let mut add = |side, seq, ack, flags, payload: &[u8]| {
            at += 5_000;
            frames.push((at, segment_of(client, side, seq, ack, flags, payload)));
        };
        if n < CONNECTIONS {
            add(Side::Client, 0, 0, SYN, &[]);
            add(Side::Server, 0, 1, SYN | ACK, &[]);
        }
        let answer = vec![b'a'; answer];
        let len = answer.len() as u32;
        add(Side::Client, 1, 1, PSH_ACK, b"request 1\n");
        add(Side::Server, 1, 11, PSH_ACK, &answer);
        add(Side::Client, 11, 1 + len, PSH_ACK, b"request 2\n");
        add(Side::Client, 11, 1 + len, PSH_ACK, b"request 2\n");
        add(Side::Server, 1 + len, 21, PSH_ACK, &answer);
        add(Side::Client, 21, 1 + 2 * len, FIN | ACK, &[]);
    }
    frames.sort_by_key(|(at, _)| *at);
    let mut bytes = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0];
    for (micros, frame) in frames {
        let len = frame.len() as u32;
        [1_700_000_000, micros, len, len].iter().for_each(|word: &u32| bytes.extend(word.to_le_bytes()));
        bytes.extend(frame);
    }
    bytes
}

/// Answers each line with 100 bytes, on this many connections. Returns what each of them sent.
fn serve(count: usize) -> (SocketAddr, JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let connections: Vec<_> = (0..count)
            .map(|_| {
                let mut stream = listener.accept().unwrap().0;
                std::thread::spawn(move || {
                    let (mut text, mut buffer) = (String::new(), [0; 1000]);
                    loop {
                        let len = stream.read(&mut buffer).unwrap();
                        if len == 0 {
                            return text;
                        }
                        let part = std::str::from_utf8(&buffer[..len]).unwrap();
                        text.push_str(part);
                        let answer = vec![b'a'; 100 * part.matches('\n').count()];
                        stream.write_all(&answer).unwrap();
                    }
                })
            })
            .collect();
        connections.into_iter().map(|connection| connection.join().unwrap()).collect()
    });
    (address, server)
}

fn replay(folder: &Path, capture: &[u8], arguments: &[&str]) -> Output {
    let path = folder.join("traffic.pcap");
    std::fs::write(&path, capture).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ginnel"));
    command.args(["load", "replay", &path.display().to_string(), "--stack", "kernel"]).args(arguments);
    command.output().unwrap()
}

fn report(output: &Output) -> serde_json::Value {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(&text)
        .unwrap_or_else(|e| panic!("{e}: {text} {}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn a_server_gets_what_the_recorded_one_got() {
    let folder = tempfile::tempdir().unwrap();
    let copies = usize::from(CONNECTIONS) * 3 * 2;
    let (address, server) = serve(copies);
    let svg = folder.path().join("latency.svg");
    let svg_name = svg.display().to_string();
    let to = address.to_string();
    let arguments =
        ["--to", &to, "--copies", "3", "--spread", "20ms", "--repeat", "2", "--json", "--svg", &svg_name];
    let output = replay(folder.path(), &capture(100), &arguments);
    let report = report(&output);
    assert!(output.status.success(), "{report}");
    assert!(server.join().unwrap().iter().all(|text| text == "request 1\nrequest 2\n"));
    let capture = &report["capture"];
    assert_eq!(
        (&capture["connections"], &capture["left_out_midstream"]),
        (&4.into(), &1.into()),
        "{capture}"
    );
    assert_eq!(capture["retransmissions"], 4);
    let requests = &report["requests"];
    assert_eq!((&requests["due"], &requests["answered"]), (&48.into(), &48.into()), "{report}");
    assert_eq!((&report["bytes"]["missing"], &report["bytes"]["excess"]), (&0.into(), &0.into()));
    assert_eq!(report["latency_ns"]["first_byte"]["count"], 48);
    assert!(std::fs::read_to_string(svg).unwrap().contains("first byte of the answer"));
}

#[test]
fn answers_of_other_lengths_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let (address, server) = serve(CONNECTIONS.into());
    let to = address.to_string();
    let output = replay(folder.path(), &capture(70), &["--to", &to, "--speed", "2", "--quiet"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
    server.join().unwrap();
    for part in ["4 with answers of other lengths", "0 missing, 240 in excess", "left out: 1 connections"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_cut_capture_is_replayed_as_far_as_it_goes() {
    let folder = tempfile::tempdir().unwrap();
    let (address, server) = serve(CONNECTIONS.into());
    let whole = capture(100);
    let to = address.to_string();
    let output = replay(folder.path(), &whole[..whole.len() - 5], &["--to", &to, "--json", "--quiet"]);
    let report = report(&output);
    assert!(output.status.success(), "{report}");
    server.join().unwrap();
    assert!(report["capture"]["cut"].as_str().unwrap().contains("cut short"), "{report}");
}

#[test]
fn problems_are_named_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let refused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let cases: [(&[u8], &[&str], i32, &str); 8] = [
        (&capture(100), &[], 2, "--to"),
        (&capture(100), &["--to", "127.0.0.1", "--speed", "0"], 2, "must be a number from 0.001"),
        (
            &capture(100),
            &["--to", "127.0.0.1", "--port", "81"],
            1,
            "has no connection that could be replayed",
        ),
        (&capture(100), &["--to", "127.0.0.1", "--bytes-max", "10"], 1, "more than 10 bytes (--bytes-max)"),
        (&capture(100), &["--to", "127.0.0.1:x"], 1, "--to 127.0.0.1:x"),
        (&capture(100), &["--to", &refused, "-q"], 1, "0 of 4 connections were established"),
        (
            b"#!/bin/sh\necho hello, this is no capture\n",
            &["--to", "127.0.0.1"],
            1,
            "neither a pcap nor a pcapng",
        ),
        (&[], &["--to", "127.0.0.1"], 1, "the capture is empty"),
    ];
    for (capture, arguments, code, expected) in cases {
        let output = replay(folder.path(), capture, arguments);
        let problem = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {problem}");
        assert!(problem.contains(expected), "{arguments:?}: {problem}");
        assert_eq!(problem.lines().count(), 1, "{problem}");
    }
}
