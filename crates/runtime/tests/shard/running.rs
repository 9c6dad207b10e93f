//! A shard on a thread of its own: sleeping, waking, stopping.

use crate::fixture::{SERVER_ADDRESS, config};
use crate::placement_suite::pair::ShardPair;
use core::time::Duration;
use ginnel::{Conn, ConnectOptions, Context, Error, Handler, ListenOptions, Listener, Shard, StopFlag};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_testkit::steal;
use std::sync::mpsc;
use std::thread;

/// Reports its events to another thread.
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
    let mut config = config(&[SERVER_ADDRESS]);
    config.shard.stop_grace_ms = 20;
    let handler = Reporter { to, leave_at_once };
    (Shard::builder(config).handler(handler).device("cable", device).build().unwrap(), from)
}

#[test]
fn sleeping_shard_wakes_for_timers_commands_and_stop() {
    let (mut shard, from) = shard(true);
    let (stop, commander, reader) = (StopFlag::new().unwrap(), shard.commander(), shard.stats_reader());
    let flag = stop.clone();
    let thread = thread::spawn(move || shard.run(&flag).unwrap());
    assert_eq!(from.recv(), Ok("start"));
    assert_eq!(from.recv(), Ok("timer"));
    // On a busy machine it may not have fallen asleep before each of them.
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while reader.snapshot().sleeps < 3 {
        assert!(std::time::Instant::now() < end, "{:?}", reader.snapshot());
        thread::sleep(Duration::from_millis(20));
        commander.send(Box::new(1u8)).unwrap();
        assert_eq!(from.recv(), Ok("command"));
    }
    thread::sleep(Duration::from_millis(20));
    stop.stop();
    assert_eq!(from.recv(), Ok("stopping"));
    thread.join().unwrap();
    assert!(matches!(commander.send(Box::new(1u8)), Err(ginnel::CommandError::Gone(_))));
}

#[test]
fn handler_is_stopped_after_its_grace_period() {
    // Its timer expires a moment later, and is reported only if the machine is stalled meanwhile.
    let ended = steal::repeat_if_stalled(|| {
        let (mut shard, from) = shard(false);
        let stop = StopFlag::new().unwrap();
        stop.stop();
        shard.run(&stop).unwrap();
        let reports: Vec<_> = from.try_iter().collect();
        if reports == ["start", "stopping"] { Ok(()) } else { Err(reports) }
    });
    assert!(ended.is_ok(), "{ended:?}");
}

#[test]
fn handler_can_stop_its_shard() {
    let (mut shard, from) = shard(true);
    shard.commander().send(Box::new("end")).unwrap();
    shard.run(&StopFlag::new().unwrap()).unwrap();
    assert_eq!(from.try_iter().collect::<Vec<_>>(), ["start", "command"]);
}

#[test]
fn idle_shard_sleeps_instead_of_polling() {
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

/// Ticks every ten milliseconds, thirty times.
struct Metronome(u32);

impl Handler for Metronome {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.timer(cx, 0);
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        self.0 += 1;
        if self.0 > 30 {
            cx.stop();
        } else {
            cx.set_timer(Duration::from_millis(10), 0);
        }
    }
}

#[test]
fn shard_polls_for_spin_us_then_sleeps() {
    let run = |spin_us| {
        let (device, _other_end) = pair(MemoryConfig::default());
        let mut config = config(&[SERVER_ADDRESS]);
        config.shard.spin_us = spin_us;
        let mut shard = Shard::builder(config).handler(Metronome(0)).device("cable", device).build().unwrap();
        shard.run(&StopFlag::new().unwrap()).unwrap();
        *shard.stats()
    };
    // If the machine is stalled until the next tick, there is one sleep less, or no polling after the tick.
    let passes = |spin_us, so: fn(&ginnel::ShardStats) -> bool| {
        let ended = steal::repeat_if_stalled(|| {
            let stats = run(spin_us);
            if so(&stats) { Ok(()) } else { Err(format!("{stats:?}")) }
        });
        assert!(ended.is_ok(), "{spin_us}: {ended:?}");
    };
    // The next tick comes long before.
    passes(1_000_000, |polls| polls.sleeps == 0);
    // It polls once more before and after a sleep.
    passes(0, |sleeps| sleeps.sleeps >= 30 && sleeps.idle_turns <= 3 * sleeps.sleeps);
    passes(2_000, |both| both.sleeps >= 30 && both.idle_turns > 3 * both.sleeps);
}

/// Has a timer that is due after each turn.
struct Busy {
    left: u32,
}

impl Handler for Busy {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.set_timer(Duration::ZERO, 0);
        Ok(())
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        self.left -= 1;
        if self.left == 0 {
            cx.stop();
        } else {
            cx.set_timer(Duration::ZERO, 0);
        }
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

#[test]
fn shard_with_coalesced_turns_sleeps_between_them() {
    let (device, _other_end) = pair(MemoryConfig::default());
    let mut config = config(&[SERVER_ADDRESS]);
    config.shard.coalesce_us = 1000;
    let busy = Busy { left: 50 };
    let mut shard = Shard::builder(config).handler(busy).device("cable", device).build().unwrap();
    let start = std::time::Instant::now();
    shard.run(&StopFlag::new().unwrap()).unwrap();
    // A turn for each of the timers, with waits between them.
    assert!(start.elapsed() >= Duration::from_millis(49), "{:?}", start.elapsed());
    assert!(shard.stats().sleeps >= 49, "{:?}", shard.stats());
}

/// Opens connections, a few at a time, and keeps them open.
struct Opener {
    wanted: u32,
    started: u32,
    open: u32,
}

impl Opener {
    fn begin(&mut self, cx: &mut Context<'_>) {
        while self.started < self.wanted && self.started - self.open < 64 {
            cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).unwrap();
            self.started += 1;
        }
    }
}

impl Handler for Opener {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.begin(cx);
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, _: Conn) {
        self.open += 1;
        self.begin(cx);
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// Accepts every connection.
struct Acceptor(u32);

impl Handler for Acceptor {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("10.0.0.1:80".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn accepted(&mut self, _: &mut Context<'_>, _: Conn, _: Listener) {
        self.0 += 1;
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

#[test]
fn idle_connections_use_no_cpu_time() {
    const CONNECTIONS: u32 = 10_000;
    let opener = Opener { wanted: CONNECTIONS, started: 0, open: 0 };
    let mut pair = ShardPair::with(Acceptor(0), opener, |config| config.tcp.connections_max = CONNECTIONS);
    let all = |s: &Acceptor, c: &Opener| (s.0, c.open) == (CONNECTIONS, CONNECTIONS);
    assert!(pair.run_until(Duration::from_secs(60), all));
    // From simulated time to the time of the machine, which is later.
    pair.discard_transcript();
    let stop = StopFlag::new().unwrap();
    let flag = stop.clone();
    let thread = thread::spawn(move || {
        pair.server.run(&flag).unwrap();
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        (*pair.server.stats(), Duration::new(used.tv_sec.unsigned_abs(), used.tv_nsec.unsigned_abs() as u32))
    });
    thread::sleep(Duration::from_secs(2));
    stop.stop();
    let (stats, used) = thread.join().unwrap();
    // Two seconds, with the start and the end of the shard: 5 % is far below the cost of polling, and far
    // above the cost of this shard.
    assert!(used < Duration::from_millis(100), "{used:?}: {stats:?}");
    assert!(stats.sleeps >= 1, "{stats:?}");
}

#[test]
fn missing_memory_device_fails_the_build() {
    let (to, _from) = mpsc::channel();
    let built =
        Shard::builder(config(&[SERVER_ADDRESS])).handler(Reporter { to, leave_at_once: true }).build();
    let error = built.err().expect("refused").to_string();
    assert!(error.contains("memory device \"cable\" has no other end"), "{error}");
}

#[test]
fn loop_of_a_program_waits_for_events_time_and_stop() {
    let (mut shard, from) = shard(true);
    let (stop, commander) = (StopFlag::new().unwrap(), shard.commander());
    let mut seen = Vec::new();
    // An event of the handler.
    shard.run_until(Some(&stop), None, |_| from.try_recv().is_ok_and(|event| event == "timer")).unwrap();
    // A time.
    let now = ginnel::clock::now();
    shard.run_until(Some(&stop), Some(now + Duration::from_millis(20)), |_| false).unwrap();
    assert!(ginnel::clock::now() - now >= Duration::from_millis(20));
    // A command of another thread, which finds the shard asleep.
    let sleeps = shard.stats().sleeps;
    let sender = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        commander.send(Box::new(1u8)).unwrap();
        commander
    });
    shard
        .run_until(Some(&stop), None, |_| {
            seen.extend(from.try_recv());
            !seen.is_empty()
        })
        .unwrap();
    assert_eq!(seen, ["command"]);
    assert!(shard.stats().sleeps > sleeps);
    // The stop flag, of which the handler is not told.
    let flag = stop.clone();
    let stopper = thread::spawn(move || flag.stop());
    shard.run_until(Some(&stop), None, |_| false).unwrap();
    stopper.join().unwrap();
    assert!(from.try_recv().is_err());
    // The flag stays set, and the program may finish its work.
    shard.run_until(None, Some(ginnel::clock::now()), |_| false).unwrap();
    shard.end().unwrap();
    assert!(matches!(sender.join().unwrap().send(Box::new(1u8)), Err(ginnel::CommandError::Gone(_))));
}
