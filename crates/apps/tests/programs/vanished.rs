//! The load generator whose server vanishes, before or after the connection is established.

use super::common::{SERVER, UNIX, parse};
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, Mac, NeighbourConfig};
use ginnel::{Config, Instant, Shard};
use ginnel_apps::httpd::{Httpd, HttpdOptions};
use ginnel_apps::load::{HttpOptions, LoadHandler, LoadOptions, Report, SharedStats};
use ginnel_devices::memory::{self, MemoryConfig};
use std::sync::Arc;

/// Returns the failures of a client whose server vanishes once the client has sent `segments`.
fn failures(segments: u64) -> Vec<(&'static str, u64)> {
    let job =
        parse::<HttpOptions>(&["http://10.0.0.1/", "-n", "1", "-c", "1", "--timeout", "2h"]).job().unwrap();
    let outcome = SharedStats::default();
    let client = LoadHandler::new(job.clone(), 0, 1, Arc::default(), Arc::clone(&outcome));
    let root = tempfile::tempdir().unwrap();
    let options: HttpdOptions = parse(&[root.path().to_str().unwrap(), "--listen", "0.0.0.0:80"]);
    let server = Httpd::with_clock(&options, || UNIX).unwrap();

    let (a, b) = memory::pair(MemoryConfig::default());
    let mut now = Instant::from_millis(1000);
    let config = |address: &str| {
        let device = DeviceConfig::new("cable", DeviceKind::Memory);
        Config::single(device, &[address.parse().unwrap()], &[])
    };
    let mut client_config = config("10.0.0.2/16");
    // Without a static entry the server would become unreachable, because it does not answer ARP either.
    let mac = Mac(a.tx.capabilities().mac);
    client_config.links[0].neighbours.push(NeighbourConfig { address: SERVER.parse().unwrap(), mac });
    let server = Shard::builder(config(&format!("{SERVER}/16"))).handler(server).device("cable", a);
    let mut server = server.seed([1; 32]).now(now).build().unwrap();
    let client = Shard::builder(client_config).handler(client).device("cable", b);
    let mut client = client.seed([2; 32]).now(now).build().unwrap();

    let meeting_end = now + Duration::from_millis(100);
    loop {
        client.poll_once(now).unwrap();
        if client.with(now, |_, cx| cx.tcp_stats().segments_out) >= segments {
            break;
        }
        server.poll_once(now).unwrap();
        now += Duration::from_micros(1);
        assert!(now < meeting_end, "the client sends too little");
    }
    let end = now + Duration::from_secs(7200);
    loop {
        let turn = client.poll_once(now).unwrap();
        if turn.stopped {
            break;
        }
        let soon = now + Duration::from_micros(1);
        now = if turn.work > 0 { soon } else { turn.next_deadline.unwrap().max(soon) };
        assert!(now < end, "the connection does not time out");
    }
    let stats = outcome.lock().unwrap().take().unwrap();
    Report::new(&job, &stats).failures.into_iter().collect()
}

#[test]
fn connect_timeouts_differ_from_later_timeouts() {
    assert_eq!(failures(0), [("connect timeout", 1)]);
    // SYN, and the ACK or the request.
    assert_eq!(failures(2), [("timeout", 1)]);
}
