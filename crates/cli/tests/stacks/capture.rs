//! `ginnel capture` of the loopback of a stack.

use crate::fixture::{Fixture, GINNEL, RunningProgram, skipped, wait_until};
use ginnel_testkit::skip;
use std::fs;
use std::process::Command;

/// Connects to itself, and sends five bytes.
const TALK: &str = "
l = server('127.0.0.1', 7001); c = socket.create_connection(('127.0.0.1', 7001)); a, _ = l.accept()
c.sendall(b'hello'); print(exactly(a, 5))";

#[test]
fn tshark_reads_loopback_frames_of_a_pipe() {
    let test = "tshark_reads_loopback_frames_of_a_pipe";
    if skipped(test) {
        return;
    }
    if Command::new("tshark").arg("--version").output().is_err() {
        return skip(test, "no tshark");
    }
    let fixture = Fixture::new("capture-lo");
    let _up = fixture.start_stack("lab", &["--loopback", "stack"]);
    let mut pipe = Command::new("sh");
    let fields = "-T fields -e frame.interface_name -e tcp.dstport -e tcp.flags.syn -e tcp.payload";
    let capture = format!("{GINNEL} capture lab --count 4 tcp port 7001 2>first | tshark -n -r - {fields}");
    pipe.args(["-c", &capture]).current_dir(fixture.path()).env("GINNEL_RUN_DIR", fixture.path().join("run"));
    let pipe = RunningProgram::new(pipe);
    let first = fixture.path().join("first");
    wait_until("it captures", || {
        fs::read_to_string(&first).is_ok_and(|text| text.contains("capturing from stack"))
    });
    assert_eq!(fixture.script_output(&["--stack", "lab"], TALK), "b'hello'\n");
    let output = pipe.wait_for_output();
    let printed = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = printed.lines().collect();
    assert!(lines.len() == 4 && lines.iter().all(|line| line.starts_with("lo\t")), "{printed}");
    assert!(lines[0].starts_with("lo\t7001\t1") && printed.contains("\t68656c6c6f"), "{printed}");
}
