//! A TAP interface is deleted under a running shard. Its descriptor is then permanently readable and returns
//! an error.

use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, LinkConfig};
use ginnel::{Config, Conn, Context, Error, Handler, Shard, ShardStats, StopFlag};
use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::skip;
use rustix::time::{ClockId, clock_gettime};
use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

/// An idle application that reports its start.
struct Idle(Sender<()>);

impl Handler for Idle {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        self.0.send(()).map_err(|e| Error::application(e.to_string()))
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// Result of a shard: return value, counters, and CPU time of its thread.
type Ended = (Result<(), Error>, ShardStats, Duration);

/// Starts a shard with these TAP devices in the namespace.
fn start(
    namespace: &Namespace,
    devices: &[&str],
    stop: &StopFlag,
) -> (thread::JoinHandle<Ended>, Receiver<()>) {
    let mut config = Config::default();
    for (n, name) in devices.iter().enumerate() {
        config.devices.push(DeviceConfig::new(*name, DeviceKind::Tap));
        let address = format!("10.77.{n}.1/24").parse().expect("an address");
        config.links.push(LinkConfig::new(*name, *name, vec![address]));
    }
    let (to, started) = channel();
    let build = || Ok(Shard::builder(config).handler(Idle(to)).build());
    let mut shard = namespace.run(build).expect("a thread").expect("a shard");
    let stop = stop.clone();
    let run = move || {
        let result = shard.run(&stop);
        let used = clock_gettime(ClockId::ThreadCPUTime);
        let used = Duration::new(used.tv_sec.unsigned_abs(), used.tv_nsec.unsigned_abs() as u32);
        (result, *shard.stats(), used)
    };
    (thread::spawn(run), started)
}

#[test]
fn shard_without_devices_ends_with_error() {
    if let Some(reason) = unavailable() {
        return skip("shard_without_devices_ends_with_error", &reason);
    }
    let namespace = Namespace::new().expect("a namespace");
    let (thread, started) = start(&namespace, &["lost0"], &StopFlag::new().expect("a flag"));
    started.recv().expect("the shard has started");
    namespace.ip("link del lost0").expect("an existing interface");
    let (result, stats, _) = thread.join().expect("no panic");
    assert_eq!(result.expect_err("no device is left").to_string(), "no device is left (gone: lost0)");
    assert_eq!(stats.devices_lost, 1);
}

#[test]
fn shard_with_remaining_device_does_not_spin() {
    if let Some(reason) = unavailable() {
        return skip("shard_with_remaining_device_does_not_spin", &reason);
    }
    let namespace = Namespace::new().expect("a namespace");
    let stop = StopFlag::new().expect("a flag");
    let (thread, started) = start(&namespace, &["lost1", "kept1"], &stop);
    started.recv().expect("the shard has started");
    namespace.ip("link del lost1").expect("an existing interface");
    thread::sleep(Duration::from_secs(2));
    // The shard still answers.
    namespace.ip("address add 10.77.1.2/24 dev kept1").expect("an address");
    let port = "10.77.1.1:9".parse().expect("an address");
    let refused = namespace.run(|| TcpStream::connect_timeout(&port, Duration::from_secs(10)));
    assert_eq!(refused.map(drop).map_err(|e| e.kind()), Err(ErrorKind::ConnectionRefused));
    stop.stop();
    let (result, stats, used) = thread.join().expect("no panic");
    result.expect("a device is left");
    assert_eq!(stats.devices_lost, 1);
    // A spinning shard would use the two seconds.
    assert!(used < Duration::from_millis(500), "{used:?} of processor time: {stats:?}");
}
