//! Runs an example against a counterpart in its test: two shards on one thread, connected in memory, in
//! simulated time.

use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::executor::MainOutput;
use ginnel::{Config, Executor, Handler, Instant, Shard};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::Device;
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
    let (a, b) = pair(MemoryConfig::default());
    let mut now = Instant::from_millis(1000);
    let mut example = shard("10.0.0.1/24", a, now, Executor::new(example));
    let mut counterpart = shard("10.0.0.2/24", b, now, Executor::new(counterpart));
    for _ in 0..1_000_000 {
        let a = example.poll_once(now).unwrap();
        let b = counterpart.poll_once(now).unwrap();
        if b.stopped {
            return;
        }
        let soon = now + Duration::from_micros(1);
        let next = [a.next_deadline, b.next_deadline].into_iter().flatten().min();
        now = if a.work + b.work > 0 { soon } else { next.expect("somebody waits for a time").max(soon) };
    }
    panic!("not done");
}

fn shard<M, F>(address: &str, device: Device, now: Instant, executor: Executor<M>) -> Shard<Executor<M>>
where
    M: FnOnce() -> F + 'static,
    F: Future<Output: MainOutput> + 'static,
    Executor<M>: Handler,
{
    let config =
        Config::single(DeviceConfig::new("cable", DeviceKind::Memory), &[address.parse().unwrap()], &[]);
    let shard = Shard::builder(config).handler(executor).device("cable", device);
    shard.seed([1; 32]).now(now).build().unwrap()
}
