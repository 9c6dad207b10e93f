//! The prototype's own verdict.

use std::process::Command;

#[test]
fn sockets_survive_whatever_their_processes_do() {
    let output = Command::new(env!("CARGO_BIN_EXE_ginnel-channel-prototype")).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let survived = text.lines().filter(|line| line.starts_with("survived")).count();
    assert!(output.status.success() && survived == 16, "{text}{}", String::from_utf8_lossy(&output.stderr));
}
