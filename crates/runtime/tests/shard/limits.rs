//! `shard.commands_max`, `shard.timers_max`, and limits of the engine as a handler sees them.

use crate::fixture::{SERVER_ADDRESS, config};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::config::Loopback;
use ginnel::{
    Command, CommandError, Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Listener,
    Shard,
};
use ginnel_devices::memory::{MemoryConfig, pair};

/// Records its commands and timers.
#[derive(Default)]
struct CommandCollector {
    commands: Vec<u32>,
    timers: Vec<u64>,
}

impl Handler for CommandCollector {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn timer(&mut self, _: &mut Context<'_>, token: u64) {
        self.timers.push(token);
    }

    fn command(&mut self, _: &mut Context<'_>, command: Command) {
        self.commands.extend(command.downcast_ref::<u32>());
    }
}

const START: Instant = Instant::from_millis(1000);

fn shard(change: impl FnOnce(&mut ginnel::Config)) -> Shard<CommandCollector> {
    let (device, _) = pair(MemoryConfig::default());
    let mut config = config(&[SERVER_ADDRESS]);
    change(&mut config);
    let builder = Shard::builder(config).handler(CommandCollector::default()).device("cable", device);
    builder.seed([1; 32]).now(START).build().unwrap()
}

// limit: shard.commands_max
#[test]
fn full_mailbox_returns_commands_until_a_turn() {
    let mut shard = shard(|c| c.shard.commands_max = 100);
    let commander = shard.commander();
    for round in 0..5u32 {
        for i in 0..100 {
            commander.send(Box::new(round * 100 + i)).unwrap();
        }
        let Err(CommandError::Full(back)) = commander.send(Box::new(7u32)) else {
            panic!("the mailbox is not full")
        };
        assert_eq!(back.downcast_ref::<u32>(), Some(&7));
        // 64 per turn, so that commands do not delay frames.
        shard.poll_once(START).unwrap();
        assert_eq!(shard.handler().commands.len(), round as usize * 100 + 64);
        shard.poll_once(START).unwrap();
    }
    assert!(shard.handler().commands.iter().copied().eq(0..500), "in order");
    assert_eq!(shard.stats().commands, 500);
}

// limit: shard.timers_max
#[test]
fn timers_beyond_the_limit_are_refused_and_counted() {
    let mut shard = shard(|c| c.shard.timers_max = 3000);
    let set = |shard: &mut Shard<CommandCollector>, now, token: u64| {
        shard.with(now, |_, cx| cx.set_timer(Duration::from_millis(10), token)).is_some()
    };
    let taken = (0..3100).filter(|token| set(&mut shard, START, *token)).count();
    assert_eq!(taken, 3000);
    let late = START + Duration::from_millis(20);
    let mut turns = 0;
    while shard.handler().timers.len() < 3000 {
        let before = shard.handler().timers.len();
        let turn = shard.poll_once(late).unwrap();
        assert!(shard.handler().timers.len() - before <= 1024, "1024 timers per turn at most");
        assert!(shard.handler().timers.len() == 3000 || turn.next_deadline.is_some_and(|at| at <= late));
        turns += 1;
        assert!(turns < 20);
    }
    assert!(shard.handler().timers.iter().copied().eq(0..3000), "in order");
    assert!(set(&mut shard, late, 5000));
    shard.poll_once(late + Duration::from_secs(2)).unwrap();
    assert_eq!(shard.handler().timers.last(), Some(&5000));
    assert_eq!(shard.stats_reader().snapshot().timers_refused, 100);
}

// limit: tcp.listeners_max
#[test]
fn limits_of_the_engine_are_specific_errors() {
    let mut shard = shard(|c| {
        c.tcp.listeners_max = 1;
        c.tcp.connections_max = 1;
        c.network.udp_sockets_max = 1;
    });
    shard.with(START, |_, cx| {
        let at = |port: u16| format!("10.0.0.1:{port}").parse().unwrap();
        let listener = cx.listen(at(1), ListenOptions::default()).unwrap();
        let error = cx.listen(at(2), ListenOptions::default()).unwrap_err();
        assert_eq!(error.to_string(), "listen on 10.0.0.1:2: too many listeners");
        cx.unlisten(listener).unwrap();
        assert!(cx.listen(at(2), ListenOptions::default()).is_ok());
        let to = "10.0.0.9:80".parse().unwrap();
        cx.connect(to, Default::default()).unwrap();
        let error = cx.connect(to, Default::default()).unwrap_err();
        assert_eq!(error.to_string(), "connect to 10.0.0.9:80: too many connections");
        cx.udp_bind(at(1), Default::default()).unwrap();
        assert_eq!(cx.udp_bind(at(2), Default::default()).unwrap_err().to_string(), "too many sockets");
    });
}

/// Accepts up to a given number of connections.
#[derive(Default)]
struct SelfConnector {
    accepts: bool,
    connected: usize,
}

impl Handler for SelfConnector {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn may_accept(&mut self, _: Listener) -> bool {
        self.accepts
    }

    fn connected(&mut self, _: &mut Context<'_>, _: Conn) {
        self.connected += 1;
    }
}

// limit: backlog of a listener
#[test]
fn self_connections_respect_the_backlog() {
    for (host, backlog) in [("10.0.0.1", 1), ("127.0.0.1", 0), ("127.9.9.9", 5), ("[::1]", 2)] {
        let (device, _cable) = pair(MemoryConfig::default());
        let mut config = config(&[SERVER_ADDRESS]);
        config.loopback = Loopback::Stack;
        let builder = Shard::builder(config).handler(SelfConnector::default()).device("cable", device);
        let mut shard = builder.seed([1; 32]).now(START).build().unwrap();
        let at: SocketAddr = format!("{host}:80").parse().unwrap();
        let options = ListenOptions { backlog, ..ListenOptions::default() };
        let listener = shard.with(START, |_, cx| {
            let listener = cx.listen(at, options).unwrap();
            for _ in 0..40 {
                cx.connect(at, ConnectOptions::default()).unwrap();
            }
            listener
        });
        // All SYNs arrive in one burst.
        for _ in 0..20 {
            shard.poll_once(START).unwrap();
        }
        let few = backlog as usize + 1;
        assert_eq!(shard.handler().connected, few, "of 40 to {host}");
        let stats = shard.with(START, |_, cx| *cx.tcp_stats());
        assert_eq!((stats.cookies_sent, stats.accept_overflows), (0, 40 - few as u64), "{host}");
        // The others retransmit, and as many are accepted as there is room for.
        shard.with(START, |own, cx| {
            own.accepts = true;
            while cx.accept(listener).is_some() {}
        });
        let mut now = START;
        while shard.handler().connected == few && now < START + Duration::from_secs(3) {
            now += Duration::from_millis(20);
            for _ in 0..4 {
                shard.poll_once(now).unwrap();
            }
        }
        let stats = shard.with(now, |_, cx| *cx.tcp_stats());
        assert_eq!(shard.handler().connected, 2 * few, "of 40 to {host}, a second later: {stats:?}");
    }
}
