//! Runs a suite for each placement of the application. The suite runs in its shard's thread, and runs itself
//! again for each other placement: its tests have to pass there, too, and to exchange the same packets.

pub mod pair;

use ginnel::config::Placement;
use ginnel::{Config, Handler, Instant, Shard, Shards};
use ginnel_stack::device::Device;
use ginnel_testkit::transcript::WireRecorder;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::panic::Location;
use std::process::Command;
use std::sync::LazyLock;

/// A placement of the application, by configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestPlacement {
    pub placement: Placement,
    pub workers: u32,
}

const fn placement(placement: Placement, workers: u32) -> TestPlacement {
    TestPlacement { placement, workers }
}

/// All placements, which suites refer to by index. A worker is served by the shard's thread, or by a thread
/// of the application.
pub const PLACEMENTS: [TestPlacement; 6] = [
    placement(Placement::Inline, 0),
    placement(Placement::Paired, 0),
    placement(Placement::Split, 0),
    placement(Placement::Inline, 1),
    placement(Placement::Paired, 1),
    placement(Placement::Split, 1),
];

impl TestPlacement {
    /// Sets the placement in a configuration.
    pub fn set(self, config: &mut Config) {
        (config.shard.placement, config.shard.workers) = (self.placement, self.workers);
    }
}

/// Builds a shard in simulated time, with its application where the configuration places it. All bytes of its
/// seed are `seed`.
pub fn build<H: Handler>(config: Config, handler: H, device: Device, seed: u8, now: Instant) -> Shard<H> {
    let shards = Shards::new(config).device("cable", vec![device]).seed([seed; 32]).now(now);
    let mut handler = Some(handler);
    let mut built = shards.open().unwrap().build(|_| Ok(handler.take().expect("one application"))).unwrap();
    built.pop().expect("one shard")
}

/// The packets of one simulation.
pub struct WireTranscript {
    witness: WireRecorder,
    /// The line of the suite that began the simulation.
    at: &'static Location<'static>,
}

impl WireTranscript {
    #[track_caller]
    pub fn new(device: Device) -> (Device, Self) {
        let (device, witness) = WireRecorder::wrap(device);
        (device, Self { witness, at: Location::caller() })
    }

    /// Writes the transcript for the parent process, at the end of the simulation.
    pub fn record(&self) {
        let Some(path) = std::env::var_os(TRANSCRIPTS_ENV) else { return };
        let transcript = format!("{:?}", self.witness.transcript()).replace('\n', "; ");
        let mut transcript_file = OpenOptions::new().create(true).append(true).open(path).unwrap();
        // A single write, so that lines of several threads do not mix.
        transcript_file.write_all(format!("{}{transcript}\n", self.at).as_bytes()).unwrap();
    }
}

/// Environment variable with the index in [`PLACEMENTS`] that this process tests.
const PLACEMENT_ENV: &str = "GINNEL_TEST_PLACEMENT";
/// Environment variable with the file to which transcripts are written.
const TRANSCRIPTS_ENV: &str = "GINNEL_TEST_TRANSCRIPTS";

/// Returns the placement that this process tests.
pub fn placement_under_test() -> TestPlacement {
    std::env::var(PLACEMENT_ENV).map_or(PLACEMENTS[0], |number| PLACEMENTS[number.parse::<usize>().unwrap()])
}

/// Runs the suite with a placement, in a process of its own, and returns the transcript of each of its
/// simulations.
fn transcripts(number: usize) -> Vec<String> {
    let transcript_file = tempfile::NamedTempFile::new().unwrap();
    let mut suite = Command::new(std::env::current_exe().unwrap());
    suite.args(super::tests_of_placement(PLACEMENTS[number]));
    let ended = suite
        .env(PLACEMENT_ENV, number.to_string())
        .env(TRANSCRIPTS_ENV, transcript_file.path())
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&ended.stdout);
    assert!(
        ended.status.success(),
        "{:?}: {output}{}",
        PLACEMENTS[number],
        String::from_utf8_lossy(&ended.stderr)
    );
    let mut lines: Vec<_> =
        fs::read_to_string(transcript_file.path()).unwrap().lines().map(String::from).collect();
    // Tests run concurrently.
    lines.sort();
    lines
}

/// Transcripts of the inline placement.
static INLINE_TRANSCRIPTS: LazyLock<Vec<String>> = LazyLock::new(|| transcripts(0));

fn assert_same_as_inline(number: usize) {
    let found = transcripts(number);
    assert!(INLINE_TRANSCRIPTS.len() > 10, "most simulations exchange packets");
    for (inline, transcript) in INLINE_TRANSCRIPTS.iter().zip(&found) {
        assert_eq!(transcript, inline, "{:?}", PLACEMENTS[number]);
    }
    assert_eq!(found.len(), INLINE_TRANSCRIPTS.len());
}

#[test]
fn paired_application_has_the_same_transcripts() {
    assert_same_as_inline(1);
}

#[test]
fn split_application_has_the_same_transcripts() {
    assert_same_as_inline(2);
}

#[test]
fn worker_has_the_same_transcripts() {
    assert_same_as_inline(3);
}

#[test]
fn worker_of_paired_application_has_the_same_transcripts() {
    assert_same_as_inline(4);
}

#[test]
fn worker_of_split_application_has_the_same_transcripts() {
    assert_same_as_inline(5);
}
