//! A stack over TAP whose shards are killed: the interface stays, and the program serves again.

use crate::fixture;
use std::io::{ErrorKind, Read, Write};
use std::process::Command;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Kills the process of the shards below `ginnel run`.
fn kill_shards(supervisor: u32) {
    let children = Command::new("pgrep").args(["-P", &supervisor.to_string(), "-f", "shards-of"]).output();
    let children = String::from_utf8(children.unwrap().stdout).unwrap();
    assert!(Command::new("kill").args(["-KILL", children.trim()]).status().unwrap().success(), "{children}");
}

#[test]
fn redis_over_tap_survives_killed_shards() {
    let programs = ["redis-server", "ip", "pgrep"];
    let Some(fixture) = fixture("redis_over_tap_survives_killed_shards", &programs) else { return };
    let mut redis = fixture.start_on_stack_with(
        &["--on-stack-death", "restart"],
        &["redis-server", "--bind", "10.9.0.2", "--protected-mode", "no", "--save", ""],
    );
    redis.wait_until_listening("10.9.0.2:6379");
    let interfaces = || fixture.client_text("ip", &["-o", "link"]);
    let index = |text: &str| -> Vec<String> {
        text.lines().filter_map(|line| Some(line.split_once(": <")?.0.to_string())).collect()
    };
    let before = index(&interfaces());
    let ping = || -> std::io::Result<bool> {
        let mut stream = fixture.connect("10.9.0.2:6379")?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = [0; 7];
        stream.read_exact(&mut answer)?;
        Ok(&answer == b"+PONG\r\n")
    };
    for _ in 0..3 {
        let mut kept = fixture.connect("10.9.0.2:6379").unwrap();
        kill_shards(redis.child.id());
        let end = Instant::now() + TIMEOUT;
        while !ping().is_ok_and(|answered| answered) {
            assert!(Instant::now() < end, "redis does not answer in time");
            std::thread::sleep(Duration::from_millis(10));
        }
        // The new shards know nothing of the old connection and reset it.
        kept.write_all(b"PING\r\n").unwrap();
        assert_eq!(kept.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    }
    assert_eq!(index(&interfaces()), before);
    assert_eq!(redis.stop(), 0, "{}", redis.read_stderr());
}
