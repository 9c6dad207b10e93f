//! Tests that cannot run everywhere.

use std::io::Write;

/// Notes that a test did not run and why: `skip("tap_round_trip", "no /dev/net/tun")`. The test then returns.
///
/// The test runner (`scripts/test`) counts the notes, and in CI one is enough for the run to fail.
pub fn skip(test: &str, reason: &str) {
    let line = format!("{test}: {reason}\n");
    eprint!("skipped: {line}");
    let Some(path) = std::env::var_os("GINNEL_SKIPS") else { return };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    // One write, so that lines of tests in other processes do not mix.
    if let Err(e) = file.and_then(|mut f| f.write_all(line.as_bytes())) {
        panic!("cannot note a skipped test: {e}");
    }
}
