//! Effects of a running port on its process.

use super::*;
use ginnel_stack::device::{Device, RxBurst, RxChecksum, TxMeta};
use ginnel_stack::time::Instant;
use ginnel_testkit::alloc_counter::count_allocations;
use std::net::UdpSocket;
use std::time::Duration;

/// Returns the value of a line of a status file.
fn status(path: &str, key: &str) -> String {
    let text = std::fs::read_to_string(path).expect("a status file");
    let line = text.lines().find_map(|line| line.strip_prefix(key)).expect("a line");
    line.trim_start_matches(':').trim().to_owned()
}

#[test]
fn eal_leaves_threads_and_signals_alone() {
    in_namespace("dpdk::tests::running::eal_leaves_threads_and_signals_alone", || {
        let facts = || {
            ["Cpus_allowed", "SigBlk", "SigCgt", "SigIgn"].map(|key| status("/proc/thread-self/status", key))
        };
        let before = facts();
        let null = open("net_null0", "queues=2");
        assert_eq!(facts(), before, "of the thread that opened the port");
        let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
        let mut eal_threads = 0;
        for task in tasks {
            let folder = task.expect("a task").path();
            let path = folder.join("status").display().to_string();
            let name = status(&path, "Name");
            if name.starts_with("eal-") || name.starts_with("rte_") {
                eal_threads += 1;
                let blocked = u64::from_str_radix(&status(&path, "SigBlk"), 16).expect("a set");
                // SIGINT, SIGTERM and SIGCHLD.
                for signal in [2, 15, 17] {
                    assert!(blocked & 1 << (signal - 1) != 0, "{name} takes signal {signal}");
                }
            }
        }
        assert!(eal_threads > 0, "EAL has a thread for interrupts");
        drop(null);
    });
}

#[test]
fn closed_port_leaves_nothing() {
    in_namespace("dpdk::tests::running::closed_port_leaves_nothing", || {
        let exists = || std::path::Path::new("/sys/class/net/gone0").exists();
        // Arguments of the driver may have the names of properties of ports, as mac has.
        for arguments in ["", "", "+mac=fixed", ""] {
            let tap = open("net_tap0", &format!("args=iface=gone0{arguments}"));
            assert_eq!(tap.driver, "net_tap");
            let mut queues = tap.queues.into_iter();
            let Device { rx, tx } = queues.next().expect("one queue");
            drop(tx);
            let name = crate::interface::read("gone0");
            assert!(name.is_ok(), "a half keeps the port");
            drop(rx);
            assert!(crate::interface::read("gone0").is_err() && !exists());
        }
    });
}

#[test]
fn second_device_of_a_port_is_refused() {
    in_namespace("dpdk::tests::running::second_device_of_a_port_is_refused", || {
        let mut first = open("net_ring0", "").into_single_device().expect("one queue");
        let error = open_port(&config("net_ring0", "")).err().expect("refused");
        assert_eq!(error.kind(), std::io::ErrorKind::ResourceBusy);
        assert!(error.to_string().contains("another device of this process uses it"), "{error}");
        assert_eq!(turn(&mut first, 3, 60), 3, "the first device still works");
        drop(first);
        drop(open("net_ring0", ""));
    });
}

/// The interface has another MTU than drivers assume, and the port another MAC address than the interface.
#[test]
fn interface_of_the_host_is_left_alone() {
    in_namespace("dpdk::tests::running::interface_of_the_host_is_left_alone", || {
        veth("host0", "peer0");
        ip("link set host0 mtu 1400");
        let before = crate::interface::read("host0").expect("an interface");
        let promiscuity = |count: u32| {
            let output = std::process::Command::new("ip").args(["-d", "link", "show", "host0"]).output();
            let text = String::from_utf8(output.expect("ip").stdout).expect("text");
            assert!(text.contains(&format!("promiscuity {count} ")), "{text}");
        };
        promiscuity(0);
        let config = |mac, mtu| DpdkConfig { mac, mtu, ..config("net_af_packet0", "args=iface=host0") };
        let mac = [2, 0, 0, 0, 0, 9];
        for (config, mac, mtu, is_promiscuous) in
            [(config(None, None), before.mac, 1400, 0), (config(Some(mac), Some(1300)), mac, 1300, 1)]
        {
            let port = open_port(&config).and_then(Dpdk::into_single_device).expect("a port");
            let capabilities = port.tx.capabilities();
            assert_eq!((capabilities.mac, capabilities.mtu), (mac, mtu));
            assert_eq!(crate::interface::read("host0").expect("an interface"), before);
            promiscuity(is_promiscuous);
            drop(port);
            assert_eq!(crate::interface::read("host0").expect("an interface"), before);
            promiscuity(0);
        }
        let error = open_port(&config(None, Some(1401))).err().expect("refused");
        assert!(error.to_string().contains("the MTU 1401 is above 1400, which the interface"), "{error}");
    });
}

#[test]
fn deleted_interface_ends_the_device() {
    in_namespace("dpdk::tests::running::deleted_interface_ends_the_device", || {
        veth("lost0", "other0");
        let mut port = open("net_af_packet0", "args=iface=lost0").into_single_device().expect("one queue");
        let mut sleeps_at = |seconds: u64| {
            let mut burst = RxBurst::new();
            port.rx.rx_burst(Instant::from_nanos(seconds * 1_000_000_000), &mut burst);
            drop(burst);
            (port.rx.arm(), port.rx.is_gone())
        };
        assert_eq!(sleeps_at(1), (true, false));
        ip("link set lost0 down");
        assert_eq!(sleeps_at(3), (true, false));
        ip("link del lost0");
        assert_eq!(sleeps_at(5), (false, true));
    });
}

/// Sends `frames` frames, and receives a burst. Returns the number of received frames.
fn turn(device: &mut Device, frames: usize, bytes: usize) -> usize {
    for _ in 0..frames {
        let Some(room) = device.tx.reserve(bytes) else { break };
        room[0] = 1;
        device.tx.commit(bytes, TxMeta::default());
    }
    device.tx.flush(Instant::ZERO);
    let mut burst = RxBurst::new();
    device.rx.rx_burst(Instant::ZERO, &mut burst);
    let count = burst.len();
    drop(burst);
    device.rx.arm();
    count
}

#[test]
fn steady_state_allocates_nothing() {
    in_namespace("dpdk::tests::running::steady_state_allocates_nothing", || {
        let mut ring = open("net_ring0", "").into_single_device().expect("one queue");
        turn(&mut ring, 10, 100);
        let (received, made) = count_allocations(|| {
            (0..5000).map(|round| turn(&mut ring, 1 + round % 70, 60 + round % 1400)).sum::<usize>()
        });
        assert!(received > 5000, "{received} frames");
        assert_eq!((made.count, made.freed), (0, 0));
    });
}

/// The kernel leaves checksums to the veth interface, which leaves them as they are.
#[test]
fn partial_checksums_of_the_kernel_are_recognised() {
    in_namespace("dpdk::tests::running::partial_checksums_of_the_kernel_are_recognised", || {
        for (number, keys, expected) in [(0, "", true), (1, ",partial_checksums=off", false)] {
            let (near, far) = (format!("near{number}"), format!("far{number}"));
            veth(&near, &far);
            ip(&format!("addr add 10.9.{number}.1/24 dev {far}"));
            ip(&format!("neigh add 10.9.{number}.2 lladdr 02:00:00:00:00:02 dev {far}"));
            let keys = format!("args=iface={near}{keys}");
            let mut port =
                open(&format!("net_af_packet{number}"), &keys).into_single_device().expect("one queue");
            let socket = UdpSocket::bind((format!("10.9.{number}.1"), 0)).expect("a socket");
            let found = (0..1000).find_map(|_| {
                socket.send_to(b"hello", (format!("10.9.{number}.2"), 9)).expect("sent");
                std::thread::sleep(Duration::from_millis(5));
                let mut burst = RxBurst::new();
                port.rx.rx_burst(Instant::ZERO, &mut burst);
                burst.iter().find(|frame| frame.bytes.ends_with(b"hello")).map(|frame| frame.checksum)
            });
            let partial = RxChecksum::Partial { start: 34, offset: 6 };
            assert_eq!(found, Some(if expected { partial } else { RxChecksum::Unverified }));
        }
    });
}
