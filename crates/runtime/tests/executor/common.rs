//! Runs main tasks on one or two shards in simulated time.

use crate::fixture::{SERVER_ADDRESS, START, next_turn};
use crate::placement_suite::pair::ShardPair;
use crate::placement_suite::{build, placement_under_test};
use core::pin::Pin;
use core::time::Duration;
use ginnel::executor::MainOutput;
use ginnel::{Config, Executor};
use ginnel_devices::memory::{MemoryConfig, pair};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Address and port of the server.
pub const SERVER: &str = "10.0.0.1:80";
/// A port of the server without listener.
pub const CLOSED_PORT: &str = "10.0.0.1:81";

/// Returns the configuration of a host with one address, in the placement under test.
pub fn config(address: &str) -> Config {
    let mut config = crate::fixture::config(&[address]);
    placement_under_test().set(&mut config);
    config
}

/// The shortest time between two polls of the kernel descriptors of a shard that does not sleep.
const KERNEL_POLL_INTERVAL: Duration = Duration::from_micros(20);

/// The main task of any test. With a type of its own for each test, shard and executor would be compiled for
/// each.
pub type MainFuture = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// Returns a function whose future has the type of all tests. It may move to another thread if `main` may.
pub fn boxed<M, F>(main: M) -> impl FnOnce() -> MainFuture
where
    M: FnOnce() -> F + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    move || -> MainFuture {
        let main = main();
        Box::pin(async move { main.await.into_result().map_err(|e| e.to_string()) })
    }
}

/// Returns an executor with this main task.
pub fn executor<M, F>(main: M) -> Executor<Box<dyn FnOnce() -> MainFuture>>
where
    M: FnOnce() -> F + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    Executor::new(Box::new(boxed(main)))
}

/// Runs both main tasks until the client's ends.
#[track_caller]
pub fn run<S, C, SF, CF>(server: S, client: C)
where
    S: FnOnce() -> SF + 'static,
    C: FnOnce() -> CF + 'static,
    SF: Future<Output: MainOutput> + 'static,
    CF: Future<Output: MainOutput> + 'static,
{
    ShardPair::new(executor(server), executor(client)).run(Duration::from_secs(3600));
}

/// Runs one main task on a shard without peer.
pub fn run_alone<M, F>(main: M) -> Duration
where
    M: FnOnce() -> F + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    run_alone_with(main, |_| {})
}

/// As [`run_alone`], with another configuration. Returns the simulated time that it took.
pub fn run_alone_with<M, F>(main: M, change: impl Fn(&mut Config)) -> Duration
where
    M: FnOnce() -> F + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    let (device, _other_end) = pair(MemoryConfig::default());
    let mut now = START;
    let mut config = config(SERVER_ADDRESS);
    change(&mut config);
    let mut shard = build(config, executor(main), device, 1, now);
    for _ in 0..1_000_000 {
        let turn = shard.poll_once(now).expect("the main task must not fail");
        if turn.stopped {
            return now.saturating_since(START);
        }
        // Without work or a deadline, the task may wait for a kernel descriptor, which the shard polls at
        // most once in this time.
        now = next_turn(now, [turn]).unwrap_or(now + KERNEL_POLL_INTERVAL);
    }
    panic!("stuck, or not done");
}

/// Returns bytes in which no two positions look alike.
pub fn pattern(range: core::ops::Range<usize>) -> Vec<u8> {
    range.map(|i| (i * 31 % 251) as u8 ^ (i >> 11) as u8).collect()
}

/// Creates a value that tasks and the test share.
pub fn shared<T: Default>() -> (Rc<RefCell<T>>, Rc<RefCell<T>>) {
    let value = Rc::new(RefCell::new(T::default()));
    (Rc::clone(&value), value)
}

/// A counter that tasks and the test share.
#[derive(Clone, Default)]
pub struct SharedCounter(Rc<Cell<u32>>);

impl SharedCounter {
    pub fn add(&self) {
        self.0.set(self.0.get() + 1);
    }

    pub fn get(&self) -> u32 {
        self.0.get()
    }
}
