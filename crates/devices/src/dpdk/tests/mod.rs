//! The DPDK device over the drivers that need no adapter: net_null, net_ring, net_memif, net_tap,
//! net_af_packet and net_af_xdp, without huge pages.
//!
//! EAL starts once in a process, so each test is a process, in a network namespace of its own.

mod backlog;
mod errors;
mod pairs;
mod queues;
mod running;
mod umem;

use super::{Dpdk, DpdkConfig, open as open_port};
use ginnel_testkit::alloc_counter::CountingAllocator;
use ginnel_testkit::interop::in_namespace;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Options of all ports: ordinary pages, as machines without huge pages have them.
const SMALL: &str = "huge=off,memory_mib=192";

/// Returns the configuration of a port with further keys.
pub(super) fn config(port: &str, keys: &str) -> DpdkConfig {
    let text = if keys.is_empty() { SMALL.to_owned() } else { format!("{SMALL},{keys}") };
    DpdkConfig {
        port: port.into(),
        options: text.parse().expect("valid keys"),
        offload: true,
        ..DpdkConfig::default()
    }
}

fn open(port: &str, keys: &str) -> Dpdk {
    open_port(&config(port, keys)).expect("a port")
}

/// Returns a number that no other call in this process returns.
fn unique() -> u32 {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("ip");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Disables IPv6 at an interface, so that the kernel sends no frames of its own, and sets it up.
fn set_up(interface: &str) {
    std::fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"), "1").expect("a sysctl");
    ip(&format!("link set {interface} up"));
}

/// Creates a veth pair that is up.
fn veth(left: &str, right: &str) {
    let queues = "numrxqueues 1 numtxqueues 1";
    ip(&format!("link add {left} {queues} type veth peer name {right} {queues}"));
    [left, right].into_iter().for_each(set_up);
}
