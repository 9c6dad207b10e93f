//! Events between a check and a sleep.

use super::*;
use crate::OpsConfig;
use core::net::SocketAddr;
use ginnel::channel::{ChannelConfig, ChannelServer};
use ginnel::config::{Config, DeviceConfig, DeviceKind, Loopback};
use ginnel::{Shard, StopFlag};
use ginnel_devices::memory::{MemoryConfig, pair};

const ADDRESS: &str = "10.0.0.1:7";
/// Time-out of the waiting call; the test must not reach it.
const LONG: Duration = Duration::from_secs(20);

/// Opens a bound UDP socket.
fn socket(ops: &Ops, address: &str) -> RawFd {
    let fd = ops.socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
    let address: SocketAddr = address.parse().unwrap();
    ops.bind(fd, crate::sockaddr::encode(address, crate::Family::V4).bytes()).unwrap();
    fd
}

/// A handler blocks in a call above its own thread's sleeping leader. An event after the first attempt must
/// wake it, although that sleep processes the event.
#[test]
fn event_during_handler_takeover_wakes_waiter() {
    let mut config = Config::single(
        DeviceConfig::new("cable", DeviceKind::Memory),
        &["10.0.0.1/24".parse().unwrap()],
        &[],
    );
    config.loopback = Loopback::Stack;
    config.tcp.connections_max = 100;
    let server = ChannelServer::new(&ChannelConfig { sockets_max: 64, ..ChannelConfig::default() }).unwrap();
    let (device, _) = pair(MemoryConfig::default());
    let mut shard = Shard::builder(config).handler(server).device("cable", device).build().unwrap();
    let [own, other] = [(); 2].map(|()| {
        let commander = shard.commander();
        shard.handler_mut().attach(Box::new(commander)).unwrap()
    });
    let stop = StopFlag::new().unwrap();
    let until = stop.clone();
    let thread = std::thread::spawn(move || shard.run(&until).unwrap());
    let [own, other] = [own, other].map(|client| Ops::new(client, OpsConfig::default()).unwrap());
    let waits = socket(&own, ADDRESS);
    let sends = socket(&other, "10.0.0.1:8");
    let to: SocketAddr = ADDRESS.parse().unwrap();

    let mut state = own.lock().unwrap();
    let file = own.file_of(&mut state, waits).unwrap();
    // The call that the handler interrupts sleeps as the leader.
    let outer = state.waiters.add().unwrap();
    state.waiters.waiters[outer as usize].asleep = true;
    state.waiters.leader = Some(outer);
    while !state.client.before_sleep() {
        state.client.after_sleep();
        state.process_events();
    }
    SLEEPING.set(Some(outer));

    let mut attempts = 0;
    let begin = Instant::now();
    let wait = Wait::of(Timeout::after(Some(LONG)));
    let (state, result) = own.block_until(state, &[file], &mut [], &wait, |_, _| {
        attempts += 1;
        if attempts > 1 {
            return Ok(());
        }
        let send = || {
            let to = crate::sockaddr::encode(to, crate::Family::V4);
            let args = crate::SendArgs { flags: 0, to: Some(to.bytes()), control: &[] };
            assert_eq!(other.send_to(sends, &[crate::UserSlice::new(b"x")], &args), Ok(1));
            // Looped packets are delivered in the turn in which they were sent or in the next one; answers
            // follow.
            for _ in 0..3 {
                other.close(socket(&other, "10.0.0.1:0")).unwrap();
            }
        };
        // This thread holds the lock of its sockets.
        std::thread::scope(|threads| threads.spawn(send).join().unwrap());
        Err(Errno::AGAIN)
    });
    drop(state);
    SLEEPING.set(None);
    assert_eq!((result, attempts), (Ok(()), 2));
    assert!(begin.elapsed() < LONG / 2, "{:?}", begin.elapsed());
    drop((own, other));
    stop.stop();
    thread.join().unwrap();
}
