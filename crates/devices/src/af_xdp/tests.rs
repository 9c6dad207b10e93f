use super::*;
use crate::conformance::{self, Guarantees};
use ginnel_stack::device::{RxBurst, RxChecksum, TxMeta};
use ginnel_stack::time::Instant;
use ginnel_testkit::interop::in_namespace;
use ginnel_testkit::skip;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

mod hostile;
mod model;
mod sharing;

/// Runs `body` in a new network namespace, if BPF programs can be loaded there, which root of a user
/// namespace may not be allowed to do.
fn in_bpf_namespace(name: &str, body: impl FnOnce()) {
    in_namespace(name, || match RedirectFilter::new(RedirectScope::All, 1, 0) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            assert!(error.to_string().contains("CAP_BPF"), "{error}");
            skip(name, &error.to_string());
        }
        _ => body(),
    });
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("ip");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Creates a veth pair with four queues in each direction, and sets both ends up.
fn veth(left: &str, right: &str, mtu: usize) {
    let queues = "numrxqueues 4 numtxqueues 4";
    ip(&format!("link add {left} mtu {mtu} {queues} type veth peer name {right} mtu {mtu} {queues}"));
    // Disables IPv6, so that the kernel sends no frames of its own and tests see only their own frames.
    for interface in [left, right] {
        std::fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"), "1").expect("a sysctl");
        ip(&format!("link set {interface} up"));
    }
}

fn all_of(interface: &str, keys: &str) -> AfXdpConfig {
    let keys = if keys.is_empty() { "take=all".into() } else { format!("take=all,{keys}") };
    AfXdpConfig {
        interface: interface.into(),
        options: keys.parse().expect("valid keys"),
        ..AfXdpConfig::default()
    }
}

fn only(device: AfXdp) -> Device {
    device.into_single_device().expect("one queue")
}

const GUARANTEES: Guarantees = Guarantees { back_pressure: false, uncut_super_frame_bytes: 0, labels: false };

/// Runs the conformance suite over pairs of veth interfaces with these options.
fn conforms(keys: &str, mtu: usize) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    conformance::run(&format!("AF_XDP with {keys:?}, MTU {mtu}"), GUARANTEES, &mut || {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let (left, right) = (format!("left{number}"), format!("right{number}"));
        veth(&left, &right, mtu);
        let end = |interface: &str| only(open(&all_of(interface, keys)).expect("a device"));
        (end(&left), end(&right))
    });
}

#[test]
fn queue_0_conforms() {
    in_bpf_namespace("af_xdp::tests::queue_0_conforms", || conforms("queues=0", 1500));
}

#[test]
fn queue_2_conforms() {
    in_bpf_namespace("af_xdp::tests::queue_2_conforms", || conforms("queues=2", 1500));
}

#[test]
fn device_of_all_queues_conforms() {
    in_bpf_namespace("af_xdp::tests::device_of_all_queues_conforms", || conforms("", 1500));
}

#[test]
fn all_attach_and_wakeup_modes_conform() {
    in_bpf_namespace("af_xdp::tests::all_attach_and_wakeup_modes_conform", || {
        for keys in
            ["attach=driver,mode=copy", "attach=generic", "need_wakeup=off", "ring=64", "busy_poll=20"]
        {
            conforms(keys, 1500);
        }
    });
}

#[test]
fn frames_in_several_buffers_conform() {
    in_bpf_namespace("af_xdp::tests::frames_in_several_buffers_conform", || {
        // Frames at the limits of one buffer of both sizes, and frames that span several buffers.
        for mtu in [1774, 3822, 9000] {
            conforms("", mtu);
        }
        conforms("attach=generic", 9000);
    });
}

/// Limits the instructions that the kernel executes for every frame of the interface.
#[test]
fn program_length_is_bounded() {
    let maps = redirect::Maps { sockets: 3, addresses: 4, ports: 5, drops_without_socket: 6 };
    assert_eq!(redirect::redirect_all(maps).map(|code| code.len()), Ok(6));
    let len = redirect::redirect_selected(maps).expect("a program").len();
    assert!((150..250).contains(&len), "{len} instructions");
}

#[test]
fn umem_layout_follows_from_the_mtu() {
    let layout = |mtu| (ChunkLayout::of(mtu).chunk, ChunkLayout::of(mtu).multi_buffer);
    assert_eq!(layout(68), (2048, false));
    assert_eq!(layout(1774), (2048, false));
    assert_eq!(layout(1775), (4096, false));
    assert_eq!(layout(3822), (4096, false));
    assert_eq!(layout(3823), (4096, true));
    assert_eq!(layout(65_521), (4096, true));
}

/// Sends frames without waiting.
fn send(device: &mut Device, frames: &[Vec<u8>]) {
    for frame in frames {
        device.tx.reserve(frame.len()).expect("space").copy_from_slice(frame);
        device.tx.commit(frame.len(), TxMeta::default());
    }
    device.tx.flush(Instant::ZERO);
}

/// Receives until `count` frames arrived, or no frame arrived for a second.
fn receive(device: &mut Device, count: usize) -> Vec<Vec<u8>> {
    let mut frames: Vec<Vec<u8>> = Vec::new();
    for _ in 0..50 {
        let mut burst = RxBurst::new();
        device.rx.rx_burst(Instant::ZERO, &mut burst);
        frames.extend(burst.iter().map(|frame| frame.bytes.to_vec()));
        drop(burst);
        if frames.len() >= count {
            break;
        }
        if device.rx.arm() {
            conformance::sleep(device.rx.wake_fd(), Duration::from_millis(20));
        }
    }
    frames
}

fn numbered(count: u8) -> Vec<Vec<u8>> {
    (0..count).map(|number| vec![number; 60 + usize::from(number)]).collect()
}

#[test]
fn multi_queue_device_receives_from_all_queues() {
    in_bpf_namespace("af_xdp::tests::multi_queue_device_receives_from_all_queues", || {
        veth("many0", "many1", 1500);
        let mut all = only(open(&all_of("many0", "queues=0-3")).expect("a device"));
        let each = open(&all_of("many1", "queues=0-3")).expect("a device");
        assert_eq!(each.queues.len(), 4);
        for (mut queue, number) in each.queues.into_iter().zip(1..) {
            let frames = numbered(number);
            send(&mut queue, &frames);
            assert_eq!(receive(&mut all, frames.len()), frames, "queue {}", number - 1);
        }
    });
}

/// The kernel leaves the checksums of its own datagrams to the interface, and a veth does not complete them.
#[test]
fn partial_checksums_of_the_kernel_are_recognised() {
    in_bpf_namespace("af_xdp::tests::partial_checksums_of_the_kernel_are_recognised", || {
        veth("local0", "local1", 1500);
        assert_eq!(ethtool::driver("local1").as_deref(), Some("veth"));
        assert_eq!(ethtool::driver("nonesuch"), None);
        ip("address add 10.9.0.1/24 dev local0");
        ip("neighbour add 10.9.0.2 lladdr 02:00:00:00:00:02 dev local0");
        for (keys, expected) in [("", true), ("partial_checksums=on", true), ("partial_checksums=off", false)]
        {
            let device = open(&all_of("local1", keys)).expect("a device");
            let stats = device.stats.clone();
            let mut device = only(device);
            let sender = std::net::UdpSocket::bind("10.9.0.1:0").expect("a socket");
            sender.send_to(b"datagram", "10.9.0.2:53").expect("sent");
            let (mut found, mut tries) = (None, 0);
            while found.is_none() && tries < 50 {
                let mut burst = RxBurst::new();
                device.rx.rx_burst(Instant::ZERO, &mut burst);
                found =
                    burst.iter().find(|frame| frame.bytes.ends_with(b"datagram")).map(|frame| frame.checksum);
                drop(burst);
                tries += 1;
                if found.is_none() && device.rx.arm() {
                    conformance::sleep(device.rx.wake_fd(), Duration::from_millis(20));
                }
            }
            let partial = RxChecksum::Partial { start: 34, offset: 6 };
            let checksum = if expected { partial } else { RxChecksum::Unverified };
            assert_eq!(found, Some(checksum), "{keys}");
            let accepted = stats.iter().map(|queue| queue.rx_partial_checksums.load(Ordering::Relaxed));
            assert_eq!(accepted.sum::<u64>(), u64::from(expected));
        }
    });
}

#[test]
fn burst_costs_one_system_call() {
    in_bpf_namespace("af_xdp::tests::burst_costs_one_system_call", || {
        veth("calls0", "calls1", 1500);
        let left = open(&all_of("calls0", "ring=256")).expect("a device");
        assert!(left.in_driver && !left.zero_copy, "veth attaches in the driver, without zero copy");
        // A device that joins queues sends on the first one.
        let stats = left.stats[0].clone();
        let (mut left, mut right) = (only(left), only(open(&all_of("calls1", "")).expect("a device")));
        let frames = numbered(64);
        // Sends more frames than the ring holds, so that each chunk is reused repeatedly.
        for _ in 0..100 {
            let before = stats.tx_calls.load(Ordering::Relaxed);
            send(&mut left, &frames);
            // With XDP_MAX_TX_SKB_BUDGET (since Linux 6.17) one call sends all 64, without it 32.
            assert!(
                stats.tx_calls.load(Ordering::Relaxed) - before <= 2,
                "more than one system call for 32 frames"
            );
            left.tx.flush(Instant::ZERO);
            assert_eq!(receive(&mut right, frames.len()), frames);
        }
        let calls = stats.tx_calls.load(Ordering::Relaxed);
        left.tx.flush(Instant::ZERO);
        assert_eq!(
            stats.tx_calls.load(Ordering::Relaxed),
            calls,
            "a flush without frames makes no system call"
        );
        for counter in [&stats.rx_invalid, &stats.rx_dropped, &stats.tx_invalid, &stats.tx_errors] {
            assert_eq!(counter.load(Ordering::Relaxed), 0);
        }
    });
}

// limit: descriptors of an AF_XDP ring
#[test]
fn full_ring_drops_are_counted_by_the_kernel() {
    in_bpf_namespace("af_xdp::tests::full_ring_drops_are_counted_by_the_kernel", || {
        veth("full0", "full1", 1500);
        let mut left = only(open(&all_of("full0", "")).expect("a device"));
        let mut right = open(&all_of("full1", "queues=0,ring=64")).expect("a device");
        let mut queue = right.queues.pop().expect("a queue");
        let frames = numbered(64);
        for _ in 0..4 {
            send(&mut left, &frames);
        }
        let begun = std::time::Instant::now();
        while right.dropped().expect("the kernel's counters") == 0 {
            assert!(begun.elapsed() < Duration::from_secs(10), "no frame was dropped");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Waits until the last frames were delivered or dropped, before the ring is emptied.
        let mut seen = 0;
        while right.dropped().expect("the kernel's counters") != seen {
            seen = right.dropped().expect("the kernel's counters");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(receive(&mut queue, 256 - seen as usize).len(), 256 - seen as usize);
        // The chunks of the last burst return with the next one.
        assert_eq!(receive(&mut queue, 0).len(), 0);
        let few = numbered(16);
        send(&mut left, &few);
        assert_eq!(receive(&mut queue, few.len()), few);
        assert_eq!(right.dropped().expect("the kernel's counters"), seen);
    });
}

#[test]
fn deleted_interface_is_reported() {
    in_bpf_namespace("af_xdp::tests::deleted_interface_is_reported", || {
        for keys in ["queues=3", "queues=0-3"] {
            veth("gone0", "gone1", 1500);
            let mut device = only(open(&all_of("gone0", keys)).expect("a device"));
            assert!(device.rx.arm() && !device.rx.is_gone());
            ip("link del gone0");
            // Errors are checked after a few sleeps that ended without a frame, as all sleeps here do.
            let mut sleeps = 0;
            while device.rx.arm() {
                sleeps += 1;
                assert!(sleeps <= super::rx::EMPTY_SLEEPS_PER_ERROR_CHECK);
                let woken = conformance::sleep(device.rx.wake_fd(), Duration::from_secs(10));
                assert!(woken, "the deletion wakes a sleeping receiver");
                let mut burst = RxBurst::new();
                device.rx.rx_burst(Instant::ZERO, &mut burst);
                assert!(burst.is_empty());
            }
            assert!(device.rx.is_gone());
            send(&mut device, &numbered(3));
            assert!(
                device.tx.next_deadline().is_some_and(|again| again > Instant::ZERO),
                "no system call per poll"
            );
        }
    });
}

/// Returns the error message of opening a device.
fn error(config: &AfXdpConfig) -> String {
    open(config).err().expect("refused").to_string()
}

#[test]
fn open_errors_name_cause_and_remedy() {
    in_bpf_namespace("af_xdp::tests::open_errors_name_cause_and_remedy", || {
        veth("no0", "no1", 1500);
        veth("down0", "down1", 1500);
        ip("link set down0 down");
        ip("tuntap add dev tun0 mode tun");
        ip("link set tun0 up");
        ip("addr add 10.3.0.1/24 dev no0");
        let good = all_of("no0", "");
        let with = |keys: &str, address: [u8; 4]| AfXdpConfig {
            interface: "no0".into(),
            options: keys.parse().expect("valid keys"),
            addresses: vec![(address.into(), 0)],
            ephemeral: [(61_000, 65_000); 2],
            ..AfXdpConfig::default()
        };
        for (config, words) in [
            (all_of("nowhere", ""), "AF_XDP on nowhere: the interface does not exist"),
            (all_of("down0", ""), "AF_XDP on down0: the interface is down"),
            (all_of("tun0", ""), "AF_XDP on tun0: the interface has no MAC address"),
            (AfXdpConfig { mtu: Some(1501), ..good.clone() }, "the MTU 1501 is outside 68 to 1500"),
            (all_of("no0", "queues=7"), "the interface has no queue 7: its"),
            (
                all_of("no0", "mode=zerocopy"),
                "the driver does not support zero copy for AF_XDP: set mode=copy",
            ),
            (with("", [10, 3, 0, 1]), "10.3.0.1 belongs to the host"),
            (with("take=ports", [10, 3, 0, 2]), "10.3.0.2 does not belong to the host"),
            (
                AfXdpConfig { ephemeral: [(40_000, 41_000); 2], ..with("take=ports", [10, 3, 0, 1]) },
                "ip_local_reserved_ports",
            ),
            (with("take=ports,ports=33000", [10, 3, 0, 1]), "the ports 33000 to 33000 overlap"),
            (
                AfXdpConfig {
                    opened_ports: Some(32_768..=60_999),
                    ..all_of("no0", "queues=0-1,port_filters=on")
                },
                "(\"ethtool -K … ntuple on\")",
            ),
            (
                AfXdpConfig {
                    opened_ports: Some(1024..=60_999),
                    ..all_of("no0", "queues=0-1,port_filters=on")
                },
                "tcp.local_port_first = 1024 is no multiple of 65536",
            ),
        ] {
            let error = error(&config);
            assert!(error.contains(words), "{error}");
        }
        // Without filters the packets cross between the shards.
        for keys in ["queues=0-1", "queues=0-1,port_filters=off", "queues=1,port_filters=on"] {
            open(&AfXdpConfig { opened_ports: Some(32_768..=60_999), ..all_of("no0", keys) }).expect(keys);
        }
        // The failed attempts left nothing behind.
        let first = open(&good).expect("a device");
        assert!(error(&good).contains("another XDP program"), "{}", error(&good));
        drop(first);
        // A queue has a socket whose program was detached.
        let first = open(&all_of("no0", "queues=1")).expect("the program was detached with its device");
        let AfXdp { queues, sockets, .. } = first;
        drop(queues);
        assert!(error(&all_of("no0", "queues=0-1")).contains("queue 1 has another AF_XDP socket"));
        drop(sockets);
        open(&all_of("no0", "queues=0-1")).expect("both queues are free");
    });
}
