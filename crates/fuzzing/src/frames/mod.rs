//! A whole stack under the hands of an adversary: remote hosts that behave, misbehave and lie, an application that does what it likes in
//! any order, a device that is full, and time.
//!
//! After each operation the engine's own invariants are checked, and from outside:
//! * no limit of the configuration is exceeded;
//! * every frame sent has correct lengths and checksums, fits the MTU, and the device can do what it is asked to;
//! * bytes that reach an application are those of the stream, in order, however they came;
//! * bytes sent are those the application gave, within the window the peer offered;
//! * acknowledgements and the right edge of the window never move back;
//! * datagrams arrive as they were sent, at sockets that are open, and closed ones stay closed;
//! * every connection ends with exactly one report, after which its handle is stale;
//! * the next deadline does not stay in the past.
//!
//! At the end everything is aborted, and nothing may be left in use.

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

/// Longest input in bytes that is looked at.
pub const INPUT_BYTES_MAX: usize = 4096;

/// Runs one input.
///
/// # Panics
/// If something does not hold.
pub fn run(data: &[u8]) -> App {
    run_traced(data, None)
}

/// Runs one input and tells what happens.
///
/// # Panics
/// If something does not hold.
pub fn run_traced(data: &[u8], trace: Option<fn(&str)>) -> App {
    let data = &data[..data.len().min(INPUT_BYTES_MAX)];
    let mut words = data.chunks(WORD_BYTES);
    let mut world = StackFixture::new(&words.next().map(Word::decode).unwrap_or_default(), trace);
    let mut at = WORD_BYTES;
    while at < data.len() {
        let word = Word::decode(&data[at..]);
        at += WORD_BYTES;
        let used = world.step(&word, data.get(at..).unwrap_or(&[]));
        at += used * WORD_BYTES;
    }
    world.finish()
}
