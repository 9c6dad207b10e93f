//! Environments of a sequence: two hosts, and a way to wait until all packets between them have arrived.

use crate::kernel::Kernel;
use crate::stack::{self, OnStack};
use crate::sys::{Fd, Sys};
use core::net::{IpAddr, Ipv4Addr};
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use ginnel::Shard;
use ginnel::channel::ChannelServer;
use ginnel::channel::control::SameThread;
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_posix_ops::{Ops, OpsConfig};
use ginnel_stack::time::Instant;
use std::sync::{Arc, Mutex};

/// Two hosts.
pub trait HostPair {
    fn host(&self, host: usize) -> &dyn Sys;
    fn addresses(&self) -> [IpAddr; 2];
    /// Waits until no packet is in flight. `open` are descriptors that may be sockets.
    fn settle(&mut self, open: &[Fd]);
}

/// Time within which held-back data leaves (held by a cork, or by Nagle's algorithm until a delayed
/// acknowledgement).
const HELD_BACK_MAX: Duration = Duration::from_millis(300);

/// Returns whether data that a connection has sent is still held back.
fn is_data_held_back(fd: Fd) -> bool {
    let info = Kernel.getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO).unwrap_or_default();
    match info.first() {
        // Data that was not sent before the close remains counted.
        None | Some(&TCP_CLOSE) => false,
        // The acknowledgement of the FIN is an edge to epoll.
        Some(&TCP_FIN_WAIT1) => true,
        Some(_) => info.get(NOTSENT_BYTES).is_some_and(|bytes| *bytes != [0; 4]),
    }
}

/// TCP states in `TCP_INFO`.
const TCP_FIN_WAIT1: u8 = 4;
const TCP_CLOSE: u8 = 7;
/// Offset of `tcpi_notsent_bytes`.
const NOTSENT_BYTES: core::ops::Range<usize> = 144..148;

/// The kernel, with two loopback addresses that no other run uses.
pub struct KernelHosts {
    addresses: [IpAddr; 2],
}

impl KernelHosts {
    pub fn new() -> Self {
        static RUNS: AtomicU32 = AtomicU32::new(0);
        // Closed connections remain in TIME_WAIT for a minute, so neither runs of this process nor of others
        // may reuse their addresses.
        let number = RUNS.fetch_add(1, Ordering::Relaxed).wrapping_add(std::process::id() << 8);
        let [_, _, b, c] = number.to_be_bytes();
        let at = |last| IpAddr::V4(Ipv4Addr::new(127, b, c, last));
        Self { addresses: [at(101), at(102)] }
    }
}

impl HostPair for KernelHosts {
    fn host(&self, _: usize) -> &dyn Sys {
        &Kernel
    }

    fn addresses(&self) -> [IpAddr; 2] {
        self.addresses
    }

    fn settle(&mut self, open: &[Fd]) {
        // A packet over loopback has arrived when the call that sent it returns. Only held-back data is
        // outstanding.
        let start = std::time::Instant::now();
        while open.iter().any(|fd| is_data_held_back(*fd)) {
            if start.elapsed() > HELD_BACK_MAX {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Two stacks joined by a cable, in simulated time, which advances only in `settle`.
pub struct SimulatedHosts {
    hosts: [OnStack; 2],
    shards: [Arc<Mutex<Shard<ChannelServer>>>; 2],
    now: Instant,
}

impl SimulatedHosts {
    pub fn new() -> Self {
        let (a, b) = pair(MemoryConfig::default());
        let shards = [("10.0.0.1/24", a), ("10.0.0.2/24", b)]
            .map(|(address, device)| Arc::new(Mutex::new(stack::shard(address, device))));
        let hosts = shards.each_ref().map(|shard| {
            let control = Box::new(SameThread(Arc::clone(shard)));
            let client = shard.lock().unwrap().handler_mut().attach(control).unwrap();
            OnStack(Ops::new(client, OpsConfig { spin: Duration::ZERO, ..OpsConfig::default() }).unwrap())
        });
        let now = shards.each_ref().map(|shard| shard.lock().unwrap().now());
        let mut pair = Self { hosts, shards, now: now[0].max(now[1]) };
        pair.settle(&[]);
        pair
    }

    /// Runs both stacks until neither has work. Returns the next deadline.
    fn run(&mut self) -> Option<Instant> {
        // A packet sent by a timer does not count as work of the sender, but causes work at the other stack.
        let mut idle = 0;
        loop {
            let turns =
                self.shards.each_ref().map(|shard| shard.lock().unwrap().poll_once(self.now).unwrap());
            idle = if turns.iter().all(|turn| turn.work == 0) { idle + 1 } else { 0 };
            if idle == 2 {
                return turns.iter().filter_map(|turn| turn.next_deadline).min();
            }
        }
    }
}

impl HostPair for SimulatedHosts {
    fn host(&self, host: usize) -> &dyn Sys {
        &self.hosts[host]
    }

    fn addresses(&self) -> [IpAddr; 2] {
        stack::ADDRESSES
    }

    fn settle(&mut self, _: &[Fd]) {
        let end = self.now + HELD_BACK_MAX;
        while let Some(next) = self.run().filter(|next| *next <= end) {
            self.now = self.now.max(next);
        }
    }
}
