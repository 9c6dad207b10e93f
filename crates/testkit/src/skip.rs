//! Records tests that cannot run in this environment.

use std::io::Write;

/// Records that a test did not run, with the reason: `skip("tap_round_trip", "no /dev/net/tun")`. The test
/// then returns.
///
/// `scripts/test` counts the records; in CI a single record fails the run.
///
/// # Panics
/// If `GINNEL_SKIPS` names a file that cannot be written.
pub fn skip(test: &str, reason: &str) {
    let line = format!("{test}: {reason}\n");
    eprint!("skipped: {line}");
    let Some(path) = std::env::var_os("GINNEL_SKIPS") else { return };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    // A single write keeps the lines of concurrent test processes apart.
    if let Err(e) = file.and_then(|mut f| f.write_all(line.as_bytes())) {
        panic!("the skipped test cannot be recorded: {e}");
    }
}
