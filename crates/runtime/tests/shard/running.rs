//! A shard on a thread of its own: sleeping, waking, stopping.

use crate::common::{A, config};
use core::time::Duration;
use ginnel::{Conn, Context, Error, Handler, Shard, StopFlag};
use ginnel_devices::memory::{MemoryConfig, pair};
use std::sync::mpsc;
use std::thread;

/// Reports what it is told to another thread.
struct Reporter {
    to: mpsc::Sender<&'static str>,
    leave_at_once: bool,
}

impl Handler for Reporter {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.set_timer(Duration::from_millis(50), 1);
        self.to.send("start").map_err(|e| Error::application(e.to_string()))
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn timer(&mut self, _: &mut Context<'_>, _: u64) {
        let _ = self.to.send("timer");
    }

    fn command(&mut self, cx: &mut Context<'_>, command: ginnel::Command) {
        let _ = self.to.send("command");
        if command.is::<&str>() {
            cx.stop();
        }
    }

    fn stopping(&mut self, cx: &mut Context<'_>) {
        let _ = self.to.send("stopping");
        if self.leave_at_once {
            cx.stop();
        }
    }
}

fn shard(leave_at_once: bool) -> (Shard<Reporter>, mpsc::Receiver<&'static str>) {
    let (to, from) = mpsc::channel();
    let (device, _) = pair(MemoryConfig::default());
    let mut config = config(A);
    config.shard.stop_grace_ms = 20;
    let handler = Reporter { to, leave_at_once };
    (Shard::builder(config).handler(handler).device("cable", device).build().unwrap(), from)
}

#[test]
fn a_sleeping_shard_wakes_for_timers_commands_and_the_stop_flag() {
    let (mut shard, from) = shard(true);
    let (stop, commander) = (StopFlag::new().unwrap(), shard.commander());
    let flag = stop.clone();
    let thread = thread::spawn(move || {
        shard.run(&flag).unwrap();
        *shard.stats()
    });
    assert_eq!(from.recv(), Ok("start"));
    assert_eq!(from.recv(), Ok("timer"));
    thread::sleep(Duration::from_millis(20));
    commander.send(Box::new(1u8)).unwrap();
    assert_eq!(from.recv(), Ok("command"));
    thread::sleep(Duration::from_millis(20));
    stop.stop();
    assert_eq!(from.recv(), Ok("stopping"));
    let stats = thread.join().unwrap();
    assert!(stats.sleeps >= 3, "{stats:?}");
    assert!(matches!(commander.send(Box::new(1u8)), Err(ginnel::CommandError::Gone(_))));
}

#[test]
fn a_handler_that_does_not_leave_is_left_when_its_time_is_over() {
    let (mut shard, from) = shard(false);
    let stop = StopFlag::new().unwrap();
    stop.stop();
    shard.run(&stop).unwrap();
    assert_eq!(from.try_iter().collect::<Vec<_>>(), ["start", "stopping"]);
}

#[test]
fn a_handler_can_end_its_shard() {
    let (mut shard, from) = shard(true);
    shard.commander().send(Box::new("end")).unwrap();
    shard.run(&StopFlag::new().unwrap()).unwrap();
    assert_eq!(from.try_iter().collect::<Vec<_>>(), ["start", "command"]);
}

#[test]
fn an_idle_shard_sleeps_instead_of_polling() {
    let (mut shard, from) = shard(true);
    let (stop, reader) = (StopFlag::new().unwrap(), shard.stats_reader());
    let flag = stop.clone();
    let thread = thread::spawn(move || shard.run(&flag).unwrap());
    assert_eq!((from.recv(), from.recv()), (Ok("start"), Ok("timer")));
    thread::sleep(Duration::from_millis(100));
    let before = reader.snapshot();
    thread::sleep(Duration::from_millis(1000));
    let after = reader.snapshot();
    assert!(after.sleeps - before.sleeps <= 5, "{before:?} {after:?}");
    assert!(after.turns - before.turns <= 5000, "{before:?} {after:?}");
    stop.stop();
    thread.join().unwrap();
}

#[test]
fn a_shard_without_its_memory_device_is_not_built() {
    let (to, _from) = mpsc::channel();
    let built = Shard::builder(config(A)).handler(Reporter { to, leave_at_once: true }).build();
    let error = built.err().expect("refused").to_string();
    assert!(error.contains("memory device \"cable\" has no other end"), "{error}");
}
