//! A whole stack with an adversary: correct and incorrect remote hosts, an application that makes arbitrary
//! calls, a device that may be full, and time.
//!
//! After each operation the engine's own invariants are checked, and from outside:
//! * no limit of the configuration is exceeded;
//! * every frame sent has correct lengths and checksums, fits the MTU, and uses only offloads of the device;
//! * bytes that reach an application are those of the stream, in order;
//! * bytes sent are those that the application gave, within the window that the peer offered;
//! * acknowledgements and the right edge of the window never move back;
//! * datagrams arrive unchanged, at open sockets, and closed sockets stay closed;
//! * every connection ends with exactly one report, after which its handle is stale;
//! * the next deadline does not stay in the past.
//!
//! At the end everything is aborted, and no resource may remain in use.

mod app;
mod build;
mod check;
mod fixture;
mod mutate;
mod peer;
mod scenarios;
mod setup;
mod udp;
pub mod word;

pub use app::App;
pub use mutate::mutate;
pub use scenarios::scenarios;
pub use setup::variant;

use fixture::StackFixture;
use word::{WORD_BYTES, Word};

/// Longer inputs are truncated to this many bytes.
pub const INPUT_BYTES_MAX: usize = 4096;

/// Runs one input.
///
/// # Panics
/// If an invariant is violated.
pub fn run(data: &[u8]) -> App {
    run_traced(data, None)
}

/// Runs one input and passes a description of each step to `trace`.
///
/// # Panics
/// If an invariant is violated.
pub fn run_traced(data: &[u8], trace: Option<fn(&str)>) -> App {
    let data = &data[..data.len().min(INPUT_BYTES_MAX)];
    let mut words = data.chunks(WORD_BYTES);
    let mut fixture = StackFixture::new(&words.next().map(Word::decode).unwrap_or_default(), trace);
    let mut at = WORD_BYTES;
    while at < data.len() {
        let word = Word::decode(&data[at..]);
        at += WORD_BYTES;
        let used = fixture.step(&word, data.get(at..).unwrap_or(&[]));
        at += used * WORD_BYTES;
    }
    fixture.finish()
}
