//! Unmodified programs of Debian on a stack (`ginnel run`), with the kernel's programs at the other end of a
//! TAP device. docs/programs.md lists these programs, and those that were tested by hand.

mod clients;
mod dns;
mod errors;
mod ftp;
mod haproxy;
mod iperf;
mod kernel_lane;
mod killed_worker;
mod lighttpd;
mod links;
mod many_workers;
mod memcached;
mod mosquitto;
mod multicast;
mod open_loop;
mod processes;
mod python;
mod redis;
mod reload;
mod reload_rate;
mod restart;
mod server;
mod soft_stop;
mod ssh;
mod upgrade;

use ginnel_testkit::interop::{ProgramFixture, programs_unavailable};
use ginnel_testkit::skip;
use sha2::{Digest, Sha256};

/// Returns a fixture, or prints a note and returns `None` if the test cannot run here.
fn fixture(test: &str, programs: &[&str]) -> Option<ProgramFixture> {
    if let Some(reason) = programs_unavailable(programs) {
        skip(test, &reason);
        return None;
    }
    Some(ProgramFixture::new(env!("CARGO_BIN_EXE_ginnel"), env!("CARGO_TARGET_TMPDIR"), test).unwrap())
}

/// Returns bytes without repetitions.
fn distinct_bytes(len: usize) -> Vec<u8> {
    let words =
        (0..len.div_ceil(4) as u32).flat_map(|n| (n.wrapping_mul(2_654_435_761) ^ n >> 7).to_le_bytes());
    words.take(len).collect()
}

/// Compares by checksum, so that the failure message is short.
#[track_caller]
fn assert_same(what: &str, got: &[u8], expected: &[u8]) {
    let same = Sha256::digest(got) == Sha256::digest(expected);
    assert!(same, "{what}: {} bytes instead of {}, or others", got.len(), expected.len());
}

/// Runs wrk for a second, which must report no errors.
#[track_caller]
fn assert_load(fixture: &ProgramFixture, url: &str, header: &str) {
    let text = fixture.client_text("wrk", &["-c", "20", "-d", "1", "-t", "1", "-H", header, url]);
    let bad = ["Socket errors", "Non-2xx", " 0 requests in"];
    assert!(!bad.iter().any(|bad| text.contains(bad)), "{url}, {header}: {text}");
    assert!(text.contains("requests in"), "{url}, {header}: {text}");
}

const KEEP_ALIVE: &str = "Connection: keep-alive";
const CLOSE: &str = "Connection: close";
