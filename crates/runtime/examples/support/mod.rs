//! Runs an example against a counterpart in its test: two shards on one thread, connected in memory, in
//! simulated time.

#[path = "../../src/fixture.rs"]
#[allow(dead_code)] // shared: this suite uses a part
mod fixture;

use fixture::{START, linked_hosts, next_turn};
use ginnel::config::DeviceKind;
use ginnel::{Config, Executor};
use std::io;

/// The example has the address 10.0.0.1, its counterpart 10.0.0.2. Returns when the counterpart is done.
pub fn run<E, F, C>(example: impl FnOnce() -> F + 'static, counterpart: impl FnOnce() -> C + 'static)
where
    E: core::fmt::Display,
    F: Future<Output = Result<(), E>> + 'static,
    C: Future<Output = io::Result<()>> + 'static,
{
    let from_file = Config::from_file(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/tap.toml").as_ref());
    assert_eq!(from_file.unwrap().devices[0].kind, DeviceKind::Tap, "the examples' configuration is good");
    let mut now = START;
    let (mut example, mut counterpart) =
        linked_hosts(Executor::new(example), Executor::new(counterpart), now);
    for _ in 0..1_000_000 {
        let a = example.poll_once(now).unwrap();
        let b = counterpart.poll_once(now).unwrap();
        if b.stopped {
            return;
        }
        now = next_turn(now, [a, b]).expect("somebody waits for a time");
    }
    panic!("not done");
}
