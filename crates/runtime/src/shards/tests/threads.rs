//! Shards on threads of their own start, end and fail together.

use super::control::arp;
use super::{CLIENT_ADDRESSES, RecordingHandler, receive, send, stack_config};
use crate::config::{Config, DeviceConfig, DeviceKind, Placement};
use crate::context::Context;
use crate::error::Error;
use crate::handler::Handler;
use crate::shard::Shard;
use crate::shards::Shards;
use crate::stop::StopFlag;
use core::net::Ipv4Addr;
use core::time::Duration;
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use ginnel_stack::device::Device;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::wire::MacAddr;
use ginnel_stack::wire::arp::ArpOperation;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

/// Echoes data.
struct Echo;

impl Handler for Echo {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("10.0.0.1:7".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        cx.send(conn, data).unwrap()
    }
}

/// Opens connections one after the other with pauses, and ends its shard when all were echoed.
pub(super) struct Pinger {
    pub(super) left: u32,
}

impl Pinger {
    fn next(&mut self, cx: &mut Context<'_>) {
        if self.left == 0 {
            return cx.stop();
        }
        self.left -= 1;
        cx.connect("10.0.0.1:7".parse().unwrap(), ConnectOptions::default()).unwrap();
    }
}

impl Handler for Pinger {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.next(cx);
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.send(conn, b"ping").unwrap();
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        assert_eq!(data, b"ping");
        cx.close(conn).unwrap();
        4
    }

    fn closed(&mut self, cx: &mut Context<'_>, _: Conn, reason: CloseReason) {
        if reason == CloseReason::Refused {
            // The server does not listen yet.
            self.left += 1;
        } else {
            assert_eq!(reason, CloseReason::Normal);
        }
        // Long enough for the others to fall asleep.
        cx.set_timer(Duration::from_millis(2), 0).unwrap();
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        self.next(cx);
    }
}

pub(super) fn only_v4(mut config: Config) -> Config {
    config.links[0].addresses.truncate(1);
    config
}

pub(super) fn open(config: Config, spread: RssMode) -> (super::super::OpenedShards, Device) {
    let (far, queues) = multi_queue(&MemoryConfig::default(), config.shards.count as usize, spread);
    (Shards::new(config).device("cable", queues).open().unwrap(), far)
}

#[test]
fn threaded_shards_serve_every_queue_and_sleep() {
    for placement in [Placement::Inline, Placement::Paired, Placement::Split] {
        serve_on_two(placement);
    }
}

fn serve_on_two(placement: Placement) {
    let mut config = only_v4(stack_config(2));
    config.shard.placement = placement;
    let (opened, far) = open(config, RssMode::Fixed(0));
    let (stop, readers) = (StopFlag::new().unwrap(), opened.stats_readers());
    let flag = stop.clone();
    let server = thread::spawn(move || {
        let finish = |index, shard: Shard<Echo>| {
            let name = thread::current().name().unwrap().to_string();
            (index, name, shard.stack_stats(), shard.core.stack.tcp_stats().passive_opens)
        };
        opened.run(&flag, |_| Ok(Echo), finish)
    });
    let client = only_v4(super::config(&CLIENT_ADDRESSES));
    let mut client =
        Shard::builder(client).handler(Pinger { left: 60 }).device("cable", far).build().unwrap();
    client.run(&StopFlag::new().unwrap()).unwrap();
    assert_eq!(readers.len(), 2);
    stop.stop();
    let ends = server.join().unwrap().unwrap();
    let served: Vec<u64> = ends.iter().map(|end| end.3).collect();
    assert_eq!(served.iter().sum::<u64>(), 60);
    assert!(served.iter().all(|&n| n >= 10), "{served:?}");
    for (index, (number, name, stats, _)) in ends.iter().enumerate() {
        assert_eq!((index, name.as_str()), (*number, format!("shard-{index}").as_str()));
        assert!(stats.sleeps > 20, "shard {index} must sleep and wake: {stats:?}");
    }
    // All frames arrive at the first shard, which forwards those of the second.
    assert_eq!((ends[1].2.frames_received, ends[1].2.forwards_received), (0, ends[0].2.frames_forwarded));
}

/// Ends when it is permitted to.
struct DrainingHandler {
    may: Arc<AtomicBool>,
}

impl DrainingHandler {
    fn try_to(&self, cx: &mut Context<'_>) {
        if self.may.load(Ordering::Acquire) || cx.set_timer(Duration::from_millis(5), 0).is_none() {
            cx.stop();
        }
    }
}

impl Handler for DrainingHandler {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn stopping(&mut self, cx: &mut Context<'_>) {
        self.try_to(cx);
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        self.try_to(cx);
    }
}

/// Returns whether an ARP request for the shards' address is answered; `number` makes up a new neighbour.
fn is_answered(wire: &mut Device, number: u8) -> bool {
    let (ip, mac) = (Ipv4Addr::new(10, 0, 0, 100 + number), MacAddr([2, 0, 0, 0, 9, number]));
    send(wire, &arp(ArpOperation::Request, ip, mac, MacAddr::BROADCAST));
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    while std::time::Instant::now() < deadline {
        if receive(wire).iter().any(|frame| frame[..6] == mac.0) {
            return true;
        }
        thread::sleep(Duration::from_millis(1));
    }
    false
}

/// The primary shard answers ARP for all, and all frames arrive there, so it must not end before the last
/// shard.
#[test]
fn no_shard_ends_before_the_last_is_done() {
    let mut config = only_v4(stack_config(3));
    // They end with the last shard, not after the grace period.
    config.shard.stop_grace_ms = 3_600_000;
    let (opened, mut far) = open(config, RssMode::Fixed(0));
    let stop = StopFlag::new().unwrap();
    let (flag, readers) = (stop.clone(), opened.stats_readers());
    let (end_sender, ends) = mpsc::channel();
    let last = Arc::new(AtomicBool::new(false));
    let may = last.clone();
    let shards = thread::spawn(move || {
        let handler = |index| {
            // The others end at once.
            Ok(DrainingHandler {
                may: if index == 2 { may.clone() } else { Arc::new(AtomicBool::new(true)) },
            })
        };
        opened.run(&flag, handler, |index, shard| {
            end_sender.send(index).unwrap();
            *shard.stats()
        })
    });
    assert!(is_answered(&mut far, 0));
    stop.stop();
    let answered = 40;
    for question in 1..=answered {
        assert!(is_answered(&mut far, question), "question {question} has no answer");
        assert!(ends.try_recv().is_err(), "no shard may have ended yet");
        thread::sleep(Duration::from_millis(20));
    }
    last.store(true, Ordering::Release);
    let stats = shards.join().unwrap().unwrap();
    assert_eq!(ends.try_iter().count(), 3);
    // The first shard broadcast to the end: each request teaches all shards a neighbour.
    assert!(stats[0].broadcasts_sent >= 2 * u64::from(answered), "{:?}", stats[0]);
    assert_eq!(readers[0].snapshot(), stats[0], "the final counters must be published");
}

/// Fails in a given way after some time.
struct FailingHandler {
    fails: bool,
}

impl Handler for FailingHandler {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        if self.fails {
            cx.set_timer(Duration::from_millis(20), 0);
        }
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn timer(&mut self, _: &mut Context<'_>, _: u64) {
        panic!("test failure");
    }
}

#[test]
fn panic_of_one_shard_ends_all() {
    let (opened, _far) = open(only_v4(stack_config(3)), RssMode::Hash);
    let stop = StopFlag::new().unwrap();
    let ended = opened.run(&stop, |index| Ok(FailingHandler { fails: index == 1 }), |_, _| ());
    assert_eq!(ended.unwrap_err().to_string(), "shard 1: panicked: test failure");
    assert!(stop.is_set());
}

#[test]
fn failed_build_keeps_all_shards_from_starting() {
    let (started, starts) = mpsc::channel();
    struct ReportingHandler(mpsc::Sender<()>);
    impl Handler for ReportingHandler {
        fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
            self.0.send(()).map_err(|e| Error::application(e.to_string()))
        }
        fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
            data.len()
        }
    }
    for panics in [false, true] {
        let (opened, _far) = open(only_v4(stack_config(3)), RssMode::Hash);
        let started = started.clone();
        let handler = move |index| match index {
            2 if panics => panic!("handler not built"),
            2 => Err(Error::application("handler not built")),
            _ => Ok(ReportingHandler(started.clone())),
        };
        let ended = opened.run(&StopFlag::new().unwrap(), handler, |_, _| ()).unwrap_err().to_string();
        assert_eq!(ended, format!("shard 2: {}handler not built", if panics { "panicked: " } else { "" }));
        assert!(starts.try_recv().is_err(), "no handler may have started");
    }
}

#[test]
fn no_shard_has_a_turn_before_the_gate() {
    struct Checking(Arc<AtomicBool>);
    impl Handler for Checking {
        fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
            assert!(self.0.load(Ordering::Acquire), "the gate has not returned");
            cx.stop();
            Ok(())
        }
        fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
            data.len()
        }
    }
    for count in [1, 3] {
        let (opened, _far) = open(only_v4(stack_config(count)), RssMode::Hash);
        let (built, is_open) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (handler_built, handler_open) = (built.clone(), is_open.clone());
        let gate = is_open.clone();
        let opened = opened.before_first_turn(move || {
            assert!(built.load(Ordering::Acquire), "no shard is built");
            thread::sleep(Duration::from_millis(20));
            gate.store(true, Ordering::Release);
        });
        let handler = |_| {
            handler_built.store(true, Ordering::Release);
            Ok(Checking(handler_open.clone()))
        };
        opened.run(&StopFlag::new().unwrap(), handler, |_, _| ()).unwrap();
        assert!(is_open.load(Ordering::Acquire));
    }
}

#[test]
fn impossible_configuration_is_refused_before_start() {
    let refused = |config: Config, queues: usize| {
        let (_, queues) = multi_queue(&MemoryConfig::default(), queues, RssMode::Hash);
        Shards::new(config).device("cable", queues).open().err().map(|e| e.to_string())
    };
    assert_eq!(refused(stack_config(2), 2), None);
    assert_eq!(
        refused(stack_config(4), 2).as_deref(),
        Some("shards.count: device \"cable\" has 2 queue(s), and 4 shard(s) need one each")
    );
    let mut config = stack_config(2);
    config.shards.cpus = vec![0];
    assert_eq!(
        refused(config, 2).as_deref(),
        Some("shards.cpus: 1 CPU(s) for 2 shard(s): each shard needs a CPU of its own")
    );
    let mut config = stack_config(2);
    config.shards.cpus = vec![0, 0];
    assert_eq!(refused(config, 2).as_deref(), Some("shards.cpus[1]: CPU 0 is listed twice"));
    let mut config = stack_config(2);
    config.shards.cpus = vec![0, 1023];
    assert!(refused(config, 2).unwrap().starts_with("shards.cpus[1]: CPU 1023 is not in this process"));
    let mut config = stack_config(2);
    config.shard.cpu = Some(0);
    assert_eq!(
        refused(config, 2).as_deref(),
        Some("shard.cpu: applies only to a single shard; shards.cpus pins several")
    );
    let alone = Shard::builder(stack_config(2))
        .handler(RecordingHandler::default())
        .build()
        .err()
        .unwrap()
        .to_string();
    assert_eq!(alone, "shards.count: requires a program that runs several shards (Shards)");
    let mut config = stack_config(1);
    config.shard.workers = 2;
    let alone =
        Shard::builder(config).handler(RecordingHandler::default()).build().err().unwrap().to_string();
    let problem = "requires a program that creates an application for each thread (Shards)";
    assert_eq!(alone, format!("shard.workers: {problem}"));
    let unopened = Shards::new(stack_config(2)).open().err().unwrap().to_string();
    assert!(unopened.contains("memory device \"cable\" has no other end"), "{unopened}");
}

/// Returns the CPUs in the affinity mask of this thread.
pub(super) fn cpus() -> Vec<u32> {
    let mask = rustix::thread::sched_getaffinity(None).unwrap();
    (0..1024).filter(|&cpu| mask.is_set(cpu as usize)).collect()
}

#[test]
fn each_shard_is_pinned_to_its_cpu() {
    let mut config = only_v4(stack_config(2));
    let cpus: Vec<u32> = cpus().into_iter().take(2).collect();
    config.shards.cpus = cpus.clone();
    if cpus.len() < 2 {
        // A machine with one CPU cannot pin two shards.
        let (_, queues) = multi_queue(&MemoryConfig::default(), 2, RssMode::Hash);
        assert!(Shards::new(config).device("cable", queues).open().is_err());
        return;
    }
    let (opened, _far) = open(config, RssMode::Hash);
    let stop = StopFlag::new().unwrap();
    stop.stop();
    let pinned = opened.run(&stop, |_| Ok(RecordingHandler::default()), |_, _| self::cpus());
    assert_eq!(pinned.unwrap(), [vec![cpus[0]], vec![cpus[1]]]);
}

#[test]
fn queues_have_their_own_capture_and_fault_seed() {
    let mut config = stack_config(3);
    let cable = DeviceConfig {
        capture: Some("frames.pcapng".into()),
        ..DeviceConfig::new("cable", DeviceKind::Memory)
    };
    config.devices = vec![cable];
    let of = |index| super::super::shard_config(&config, index).devices.remove(0);
    let paths: Vec<_> = (0..3).map(|index| of(index).capture.unwrap()).collect();
    assert_eq!(paths, ["frames.pcapng", "frames.pcapng.1", "frames.pcapng.2"].map(std::path::PathBuf::from));
    assert_eq!([0, 1, 2].map(|index| of(index).faults_seed), [1, 2, 3]);
}
