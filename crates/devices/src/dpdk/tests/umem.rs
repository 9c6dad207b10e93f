//! The UMEM of net_af_xdp: the kernel takes every buffer of the pool.

use super::*;
use crate::dpdk::port::Port;
use crate::dpdk::rx::DpdkRx;
use crate::dpdk::tx::{DpdkTx, PENDING_MAX};
use crate::partial_checksums::{PartialChecksumCheck, PartialChecksums};
use ginnel_stack::device::{RxBurst, RxQueue, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use ginnel_testkit::skip;
use rustix::net::sockopt::xdp_statistics;
use rustix::net::xdp::XdpStatistics;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use std::sync::Arc;
use std::time::Duration;

/// Frames of a round: more than the cache of a thread has buffers, so that all buffers of the pool take
/// turns, and less than the 256 frames that veth queues.
const FRAMES: usize = 200;
/// Largest MTU of veth with an XDP program, for pages of 4 KiB.
const MTU_MAX: usize = 3502;
/// Rounds in which each of the 8,192 buffers is used.
const ROUNDS: usize = 200;

/// Returns the kernel's counters of all AF_XDP sockets of this process.
fn socket_statistics() -> Vec<XdpStatistics> {
    let process = pidfd_open(getpid(), PidfdFlags::empty()).expect("this process");
    let numbers = std::fs::read_dir("/proc/self/fd").expect("descriptors").filter_map(|entry| {
        let name = entry.expect("a descriptor").file_name();
        name.to_str().and_then(|number| number.parse().ok())
    });
    let copy = |number| pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok();
    numbers.filter_map(copy).filter_map(|socket| xdp_statistics(&socket).ok()).collect()
}

/// A port of net_af_xdp over an interface.
struct End {
    rx: DpdkRx,
    tx: DpdkTx,
}

impl End {
    fn open(interface: &str, mtu: usize) -> Self {
        let (port, keys) = (format!("net_af_xdp{}", unique()), format!("args=iface={interface}"));
        let config = DpdkConfig { mtu: Some(mtu), ..config(&port, &keys) };
        let port = Arc::new(Port::open(&config, 1).expect("a port"));
        let check = PartialChecksumCheck::without_interface(PartialChecksums::Accept);
        let rx = DpdkRx::new(port.clone(), 0, Duration::from_millis(1), check).expect("a half");
        Self { rx, tx: DpdkTx::new(port, 0) }
    }

    /// Sends frames of `len` bytes. Returns how many arrive at the other end within 5 seconds.
    fn send_to(&mut self, other: &mut Self, len: usize) -> usize {
        // The pool gives the buffers of all frames at once, before the first one returns to the cache.
        assert!(self.tx.provide(PENDING_MAX), "the pool has lost buffers");
        for number in 0..FRAMES {
            self.tx.reserve(len).expect("a buffer").fill(number as u8);
            self.tx.commit(len, TxMeta::default());
        }
        let end = std::time::Instant::now() + Duration::from_secs(5);
        let mut arrived = 0;
        while arrived < FRAMES && std::time::Instant::now() < end {
            self.tx.flush(Instant::ZERO);
            let mut burst = RxBurst::new();
            other.rx.rx_burst(Instant::ZERO, &mut burst);
            for frame in burst.iter() {
                assert!(frame.bytes.len() == len && frame.bytes.iter().all(|&byte| byte == arrived as u8));
                arrived += 1;
            }
        }
        arrived
    }
}

/// Exchanges frames of `len` bytes in both directions, so that the buffers of the whole pool also receive.
fn exchange(mtu: usize, len: usize, rounds: usize) {
    let number = unique();
    let interfaces = ["left", "right"].map(|side| format!("{side}{number}"));
    veth(&interfaces[0], &interfaces[1]);
    for interface in &interfaces {
        ip(&format!("link set {interface} mtu {mtu}"));
    }
    let [mut left, mut right] = interfaces.map(|interface| End::open(&interface, mtu));
    for round in 0..rounds {
        let arrived = [left.send_to(&mut right, len), right.send_to(&mut left, len)];
        let sockets = socket_statistics();
        assert_eq!(sockets.len(), 2, "a socket for each port");
        for socket in sockets {
            let invalid = [socket.rx_invalid_descs, socket.tx_invalid_descs];
            assert_eq!(invalid, [0; 2], "buffers outside the UMEM in round {round}");
        }
        assert_eq!(arrived, [FRAMES; 2], "frames that arrived in round {round}");
    }
}

fn in_namespace_with_xdp(test: &str, body: impl FnOnce()) {
    in_namespace(test, || match crate::af_xdp::check_program() {
        Err(error) => skip(test, &error.to_string()),
        Ok(()) => body(),
    });
}

#[test]
fn kernel_takes_every_buffer() {
    in_namespace_with_xdp("dpdk::tests::umem::kernel_takes_every_buffer", || exchange(1500, 60, ROUNDS));
}

/// A frame of the largest MTU fills a buffer.
#[test]
fn largest_mtu_of_a_umem_is_usable() {
    in_namespace_with_xdp("dpdk::tests::umem::largest_mtu_of_a_umem_is_usable", || {
        exchange(MTU_MAX, MTU_MAX + 14, 1);
    });
}
