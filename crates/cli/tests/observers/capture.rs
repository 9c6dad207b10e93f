//! `ginnel capture` with a running stack.

use crate::web_stack::{interrupt, with_web_stack};
use ginnel_testkit::skip;
use pcap_file::pcapng::blocks::interface_statistics::InterfaceStatisticsOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use std::io::Read;
use std::net::UdpSocket;
use std::process::{Command, Stdio};

/// The line that a capture prints first.
const FIRST_LINE: &str = "capturing from stack \"web\"; Ctrl-C ends\n";

/// Contents of a capture.
#[derive(Debug, Default)]
struct Captured {
    interfaces: Vec<String>,
    /// Interface, original length and bytes of each frame.
    frames: Vec<(u32, u32, Vec<u8>)>,
    /// Frames that passed each interface, and those that were lost.
    statistics: Vec<(u64, u64)>,
}

fn read(bytes: &[u8]) -> Captured {
    let mut reader = PcapNgReader::new(bytes).unwrap();
    let mut captured = Captured::default();
    while let Some(block) = reader.next_block() {
        match block.unwrap() {
            Block::InterfaceDescription(interface) => {
                captured.interfaces.push(format!("{:?}", interface.options))
            }
            Block::EnhancedPacket(packet) => {
                captured.frames.push((packet.interface_id, packet.original_len, packet.data.to_vec()));
            }
            Block::InterfaceStatistics(statistics) => match statistics.options[..] {
                [
                    InterfaceStatisticsOption::IsbIfRecv(passed),
                    InterfaceStatisticsOption::IsbIfDrop(lost),
                ] => {
                    captured.statistics.push((passed, lost));
                }
                _ => panic!("{statistics:?}"),
            },
            other => panic!("{other:?}"),
        }
    }
    captured
}

#[test]
fn a_filter_selects_frames_of_whole_connections() {
    with_web_stack("a_filter_selects_frames_of_whole_connections", |stack| {
        let path = stack.folder.join("trace.pcapng");
        let file = path.display().to_string();
        let arguments = ["capture", "web", "tcp", "port", "80", "--write", &file, "--snaplen", "64"];
        let (mut capture, mut lines, first) = stack.start(&arguments);
        assert_eq!(first, FIRST_LINE);
        stack.get_page();
        UdpSocket::bind("10.1.0.1:0").unwrap().send_to(b"x", "10.1.0.2:9").unwrap();
        stack.get_page();
        interrupt(&capture);
        assert!(capture.wait().unwrap().success());
        let mut summary = String::new();
        lines.read_to_string(&mut summary).unwrap();
        let captured = read(&std::fs::read(&path).unwrap());
        assert_eq!(captured.interfaces.len(), 1);
        let about = &captured.interfaces[0];
        assert!(about.contains("\"m0\"") && about.contains("IfFilter"), "{about}");
        // Ethernet, IPv4 and the flags of TCP.
        let is_syn = |bytes: &[u8]| bytes[47] & 0x12 == 2;
        let syns = captured.frames.iter().filter(|(_, _, bytes)| is_syn(bytes)).count();
        assert_eq!(syns, 2, "{captured:?}");
        assert!(captured.frames.iter().all(|(_, _, bytes)| bytes[23] == 6 && bytes.len() <= 64));
        assert!(captured.frames.iter().any(|(_, len, _)| *len > 100));
        let [(passed, lost)] = captured.statistics[..] else { panic!("{captured:?}") };
        assert!(lost == 0 && passed > captured.frames.len() as u64, "{captured:?}");
        let rejected = passed - captured.frames.len() as u64;
        let expected =
            format!("{} frames written, {rejected} not accepted by the filter\n", captured.frames.len());
        assert_eq!(summary, expected);
    });
}

#[test]
fn a_pipe_gets_frames_at_once() {
    with_web_stack("a_pipe_gets_frames_at_once", |stack| {
        let (mut capture, _lines, first) = stack.start(&["capture", "web", "--count", "4"]);
        assert_eq!(first, FIRST_LINE);
        stack.get_page();
        let mut bytes = Vec::new();
        capture.stdout.take().unwrap().read_to_end(&mut bytes).unwrap();
        assert!(capture.wait().unwrap().success());
        let captured = read(&bytes);
        assert_eq!(captured.frames.len(), 4);
        // The end of the stack's observer is known to the stack soon: another capture may begin.
        let (mut capture, _lines) = loop {
            let (mut next, lines, first) = stack.start(&["capture", "web", "--duration", "100ms"]);
            if first == FIRST_LINE {
                break (next, lines);
            }
            next.wait().unwrap();
        };
        assert!(capture.wait().unwrap().success());
    });
}

#[test]
fn tshark_reads_the_pipe() {
    let test = "tshark_reads_the_pipe";
    if Command::new("tshark").arg("--version").output().is_err() {
        return skip(test, "no tshark");
    }
    with_web_stack(test, |stack| {
        let arguments = ["capture", "web", "--count", "4", "tcp", "port", "80"];
        let (mut capture, _lines, first) = stack.start(&arguments);
        assert_eq!(first, FIRST_LINE);
        let mut tshark = Command::new("tshark");
        tshark.args(["-n", "-r", "-", "-T", "fields", "-e", "frame.interface_name", "-e", "tcp.flags.syn"]);
        tshark.stdin(capture.stdout.take().unwrap()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let tshark = tshark.spawn().unwrap();
        stack.get_page();
        let output = tshark.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<&str> = lines.lines().collect();
        assert_eq!(lines, ["m0\t1", "m0\t1", "m0\t0", "m0\t0"]);
        assert!(capture.wait().unwrap().success());
    });
}

#[test]
fn unusable_arguments_are_named() {
    for (arguments, code, expected) in [
        (&["web", "tcp", "prt", "80"][..], 2, "filter \"tcp prt 80\": "),
        (&["no-such-stack"], 1, "no stack named \"no-such-stack\" runs"),
        (&["web", "--snaplen", "10"], 2, "--snaplen"),
        (&["web", "--count", "0"], 2, "--count"),
        (&["web", "--ring-bytes", "1"], 2, "not 64KiB to 1GiB"),
    ] {
        let output =
            Command::new(env!("CARGO_BIN_EXE_ginnel")).arg("capture").args(arguments).output().unwrap();
        let problem = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {problem}");
        assert!(problem.contains(expected), "{arguments:?}: {problem}");
        assert_eq!(problem.lines().count(), 1, "{problem}");
    }
}
