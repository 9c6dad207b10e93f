//! An AF_XDP device allocates nothing in steady state.

use ginnel_devices::af_xdp::{self, AfXdpConfig};
use ginnel_stack::device::{Device, RxBurst, TxMeta};
use ginnel_stack::time::Instant;
use ginnel_testkit::alloc_counter::{CountingAllocator, count_allocations};
use ginnel_testkit::interop::{Namespace, unavailable};
use ginnel_testkit::skip;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn open(namespace: &Namespace, interface: &str) -> Device {
    let config = AfXdpConfig {
        interface: interface.into(),
        options: "take=all".parse().expect("valid keys"),
        ..AfXdpConfig::default()
    };
    namespace.run(|| af_xdp::open(&config)?.into_single_device()).expect("a device")
}

/// Sends `frames` frames and receives a burst at the other end. Returns the number of received frames.
fn turn(from: &mut Device, to: &mut Device, frames: usize, bytes: usize) -> usize {
    for _ in 0..frames {
        let Some(room) = from.tx.reserve(bytes) else { break };
        room[0] = 1;
        from.tx.commit(bytes, TxMeta::default());
    }
    from.tx.flush(Instant::ZERO);
    let mut burst = RxBurst::new();
    to.rx.rx_burst(Instant::ZERO, &mut burst);
    let count = burst.len();
    drop(burst);
    to.rx.arm();
    count
}

#[test]
fn af_xdp_allocates_nothing_in_steady_state() {
    const TEST: &str = "af_xdp_allocates_nothing_in_steady_state";
    let root = rustix::process::geteuid().is_root();
    if let Some(reason) = unavailable().or_else(|| (!root).then(|| "BPF programs need root".into())) {
        return skip(TEST, &reason);
    }
    // A frame takes one buffer, or several.
    for mtu in [1500, 9000] {
        let (one, other) = (Namespace::new().unwrap(), Namespace::new().unwrap());
        one.connect("left", &other, "right", mtu).unwrap();
        let (mut left, mut right) = (open(&one, "left"), open(&other, "right"));
        let (received, made) = count_allocations(|| {
            let mut received = 0;
            for round in 0..5000 {
                received += turn(&mut left, &mut right, 1 + round % 70, 60 + round % mtu as usize);
                received += turn(&mut right, &mut left, 1 + round % 3, 1400);
            }
            received
        });
        assert!(received > 5000, "{received} frames");
        assert_eq!((made.count, made.freed), (0, 0), "MTU {mtu}");
    }
}
