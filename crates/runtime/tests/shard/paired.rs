//! Two threads on one CPU: neither starves the other.

use crate::fixture::{CLIENT_ADDRESS, SERVER_ADDRESS, config};
use core::time::Duration;
use ginnel::config::Placement;
use ginnel::{
    CloseReason, Conn, ConnectOptions, Context, Error, Handler, ListenOptions, Shard, StopFlag, WorkContext,
};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{Device, RxBurst, TxMeta};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A server whose application shares the first CPU with its stack.
fn paired<H: Handler>(handler: H, device: Device, realtime: bool) -> Shard<H> {
    let mut config = config(&[SERVER_ADDRESS]);
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    config.shard.cpu = (0..1024).find(|&cpu| allowed.is_set(cpu as usize));
    config.shard.placement = Placement::Paired;
    (config.shard.paired_realtime, config.shard.paired_work_us) = (realtime, 200);
    Shard::builder(config).handler(handler).device("cable", device).build().unwrap()
}

/// Computes in every turn, endlessly.
struct BusyHandler {
    turns: u64,
}

impl Handler for BusyHandler {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("0.0.0.0:7".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn work(&mut self, _: &mut WorkContext<'_>) -> Result<usize, Error> {
        self.turns += 1;
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(2) {
            core::hint::spin_loop();
        }
        Ok(1)
    }
}

/// Opens connections one after the other; the stack alone answers them.
struct Dialer {
    left: u32,
}

impl Dialer {
    fn dial(cx: &mut Context<'_>) {
        cx.connect("10.0.0.1:7".parse().unwrap(), ConnectOptions::default()).unwrap();
    }
}

impl Handler for Dialer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.set_timer(TEST_TIMEOUT, 1).unwrap();
        Self::dial(cx);
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.left -= 1;
        cx.abort(conn).unwrap();
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, _: Conn, reason: CloseReason) {
        if self.left == 0 {
            return cx.stop();
        }
        // A pause in which only the application uses the CPU; the stack has to preempt it afterwards. (Or the
        // server does not listen yet.)
        assert!(matches!(reason, CloseReason::Refused | CloseReason::Aborted), "{reason:?}");
        cx.set_timer(Duration::from_millis(1), 0).unwrap();
    }

    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        if token == 1 { cx.stop() } else { Self::dial(cx) }
    }
}

#[test]
fn computing_application_does_not_starve_its_stack() {
    for realtime in [true, false] {
        let (near, far) = pair(MemoryConfig::default());
        let mut server = paired(BusyHandler { turns: 0 }, near, realtime);
        let client =
            Shard::builder(config(&[CLIENT_ADDRESS])).handler(Dialer { left: 100 }).device("cable", far);
        let stop = StopFlag::new().unwrap();
        thread::scope(|scope| {
            let server = scope.spawn(|| {
                server.run(&stop).unwrap();
                (server.handler().turns, server.stack_stats())
            });
            let mut client = client.build().unwrap();
            client.run(&StopFlag::new().unwrap()).unwrap();
            stop.stop();
            let (turns, stack) = server.join().unwrap();
            assert_eq!(client.handler().left, 0, "realtime {realtime}: {stack:?}");
            assert!(turns > 10, "the application must continue: {turns}");
            // It never polls: it sleeps whenever it finds nothing, so there are about as many sleeps as idle
            // turns.
            assert!(stack.sleeps + 200 > stack.idle_turns, "{stack:?}");
        });
    }
}

/// Counts the ticks of a timer.
struct Ticker {
    ticks: u32,
}

impl Handler for Ticker {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.set_timer(Duration::from_millis(1), 0).unwrap();
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        self.ticks += 1;
        if self.ticks == 50 {
            return cx.stop();
        }
        cx.set_timer(Duration::from_millis(1), 0).unwrap();
    }
}

/// Sends ARP requests for the server's address, as fast as there is room.
fn flood(mut wire: Device, over: &AtomicBool) {
    let mut frame = [0; 60];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    // An ARP request (RFC 826) of 10.0.0.9 for 10.0.0.1.
    frame[12..22].copy_from_slice(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    frame[22..28].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    frame[28..32].copy_from_slice(&[10, 0, 0, 9]);
    frame[38..42].copy_from_slice(&[10, 0, 0, 1]);
    let started = Instant::now();
    while !over.load(Ordering::Acquire) && started.elapsed() < TEST_TIMEOUT {
        for _ in 0..64 {
            let Some(room) = wire.tx.reserve(frame.len()) else { break };
            room.copy_from_slice(&frame);
            wire.tx.commit(frame.len(), TxMeta::default());
        }
        let now = ginnel::clock::now();
        wire.tx.flush(now);
        wire.rx.rx_burst(now, &mut RxBurst::new());
    }
}

#[test]
fn flood_does_not_starve_the_application() {
    for realtime in [true, false] {
        let (near, far) = pair(MemoryConfig::default());
        let mut server = paired(Ticker { ticks: 0 }, near, realtime);
        let (stop, over) = (StopFlag::new().unwrap(), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                flood(far, &over);
                // If the application has not ended by now, it does not end by itself.
                stop.stop();
            });
            let ended = server.run(&stop);
            over.store(true, Ordering::Release);
            ended.unwrap();
        });
        let stack = server.stack_stats();
        assert_eq!(server.handler().ticks, 50, "realtime {realtime}: {stack:?}");
        assert!(stack.frames_received > 1000, "{stack:?}");
    }
}
