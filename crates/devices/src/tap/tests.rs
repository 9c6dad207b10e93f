use super::*;
use crate::conformance::{self, Guarantees};
use ginnel_testkit::interop::in_namespace;

/// Creates two TAP devices whose kernel interfaces are ports of one bridge.
fn bridged_pair(number: u32, config: &TapConfig) -> (Device, Device) {
    let mut netlink = Netlink::open().expect("netlink");
    let bridge = netlink.add_bridge(&format!("br{number}")).expect("a bridge");
    let mut port = |side: char| {
        let name = format!("tap{number}{side}");
        let tap =
            open_queues(&TapConfig { name: Some(name.clone()), ..config.clone() }, 1).expect("a TAP device");
        let link = netlink.link(&name).expect("the interface");
        netlink.set_master(link.index, bridge).expect("a port of the bridge");
        tap.queues.into_iter().next().expect("one queue")
    };
    (port('a'), port('b'))
}

const GUARANTEES: Guarantees =
    Guarantees { back_pressure: false, uncut_super_frame_bytes: 65_000, labels: false };

#[test]
fn bridged_pair_conforms() {
    in_namespace("tap::tests::bridged_pair_conforms", || {
        let mut number = 0;
        conformance::run("TAP", GUARANTEES, &mut || {
            number += 1;
            bridged_pair(number, &TapConfig::default())
        });
    });
}

#[test]
fn bridged_pair_conforms_without_offloads() {
    in_namespace("tap::tests::bridged_pair_conforms_without_offloads", || {
        let mut number = 0;
        for (mtu, without_offloads) in [(68, true), (576, false), (9000, true), (MTU_MAX, false)] {
            let config = TapConfig { mtu: Some(mtu), without_offloads, ..TapConfig::default() };
            conformance::run(&format!("TAP with MTU {mtu}"), GUARANTEES, &mut || {
                number += 1;
                bridged_pair(number, &config)
            });
        }
    });
}

/// Sends an ARP request for 10.9.8.7 and returns the MAC address of the reply.
fn resolve(device: &mut Device) -> Option<[u8; 6]> {
    let mac = device.tx.capabilities().mac;
    let mut request = [[0xff; 6], mac].concat();
    request.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    request.extend(mac);
    request.extend([10, 9, 8, 1, 0, 0, 0, 0, 0, 0, 10, 9, 8, 7]);
    device.tx.reserve(42)?.copy_from_slice(&request);
    device.tx.commit(42, TxMeta::default());
    device.tx.flush(Instant::ZERO);
    for _ in 0..100 {
        let mut burst = RxBurst::new();
        device.rx.rx_burst(Instant::ZERO, &mut burst);
        let answer =
            burst.iter().find(|frame| frame.bytes.get(12..14) == Some(&[8, 6]) && frame.bytes[21] == 2);
        if let Some(answer) = answer {
            return answer.bytes[22..28].first_chunk().copied();
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    None
}

#[test]
fn kernel_interface_is_configured_and_replies() {
    in_namespace("tap::tests::kernel_interface_is_configured_and_replies", || {
        let config = TapConfig {
            mtu: Some(1300),
            mac: Some([2, 1, 1, 1, 1, 1]),
            kernel_mac: Some([2, 1, 1, 1, 1, 2]),
            kernel_addresses: vec![([10, 9, 8, 7].into(), 24), ("fd00::1".parse().expect("an address"), 64)],
            ..TapConfig::default()
        };
        let mut tap = open_queues(&config, 1).expect("a TAP device");
        assert_eq!(tap.name, "ginnel0");
        assert_eq!(tap.kernel_mac, [2, 1, 1, 1, 1, 2]);
        let capabilities = tap.queues[0].tx.capabilities();
        assert_eq!((capabilities.mtu, capabilities.mac), (1300, [2, 1, 1, 1, 1, 1]));
        assert_eq!(resolve(&mut tap.queues[0]), Some([2, 1, 1, 1, 1, 2]));
        assert!(std::net::UdpSocket::bind("[fd00::1]:0").is_ok(), "usable without duplicate detection");
        assert_eq!(tap.stats.tx_dropped.load(Ordering::Relaxed), 0);
        configure_interface(&tap.name, &config).expect("addresses that were added before are no error");
    });
}

#[test]
fn down_device_counts_dropped_frames() {
    in_namespace("tap::tests::down_device_counts_dropped_frames", || {
        let config = TapConfig { leave_down: true, ..TapConfig::default() };
        let mut tap = open_queues(&config, 1).expect("a TAP device");
        assert_eq!(resolve(&mut tap.queues[0]), None);
        assert_eq!(tap.stats.tx_dropped.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn persistent_device_keeps_its_settings() {
    in_namespace("tap::tests::persistent_device_keeps_its_settings", || {
        for multi_queue in [false, true] {
            let name = format!("mine{}", u8::from(multi_queue));
            let (fd, _) = ioctl::open_queue(&name, multi_queue).expect("created");
            ioctl::set_persistent(&fd).expect("made persistent");
            drop(fd);
            let config = TapConfig { name: Some(name.clone()), ..TapConfig::default() };
            let first = TapConfig { mtu: Some(1234), ..config.clone() };
            assert_eq!(open(&first).expect("attached").tx.capabilities().mtu, 1234);
            for _ in 0..2 {
                assert_eq!(open(&config).expect("attached again").tx.capabilities().mtu, 1234);
            }
            assert_eq!(
                open_queues(&config, 2).is_ok(),
                multi_queue,
                "only a multi-queue device takes another queue"
            );
        }
    });
}

#[test]
fn interface_outlives_its_device_with_kept_descriptors() {
    in_namespace("tap::tests::interface_outlives_its_device_with_kept_descriptors", || {
        for queues in [1, 2] {
            let config = TapConfig { mtu: Some(1234), ..TapConfig::default() };
            let kept = open_descriptors(&config, queues).expect("a TAP device");
            let copy = || TapDescriptors {
                name: kept.name.clone(),
                queues: kept.queues.iter().map(|fd| fd.try_clone().expect("a descriptor")).collect(),
            };
            drop(open_with(&config, copy()).expect("opened"));
            // The interface that was configured before is still there.
            let again = open_with(&TapConfig::default(), copy()).expect("opened again");
            assert_eq!(again.queues.len(), queues);
            assert_eq!(again.queues[0].tx.capabilities().mtu, 1234);
        }
    });
}

#[test]
fn every_queue_of_a_multi_queue_device_sends() {
    in_namespace("tap::tests::every_queue_of_a_multi_queue_device_sends", || {
        let config = TapConfig { kernel_addresses: vec![([10, 9, 8, 7].into(), 24)], ..TapConfig::default() };
        let tap = open_queues(&config, 3).expect("a TAP device");
        assert_eq!(tap.queues.len(), 3);
        let stats = tap.stats.clone();
        let mut answers = 0;
        for mut device in tap.queues {
            // The reply comes on the queue that sent the request last, or on any other.
            answers += u32::from(resolve(&mut device).is_some());
        }
        assert!(answers > 0);
        assert_eq!(
            stats.tx_dropped.load(Ordering::Relaxed),
            0,
            "the kernel accepts the frames of each queue"
        );
    });
}

#[test]
fn errors_name_values_out_of_range() {
    let message =
        |config: TapConfig, queues| open_queues(&config, queues).err().expect("refused").to_string();
    let named = |name: &str| TapConfig { name: Some(name.into()), ..TapConfig::default() };
    assert!(message(named(""), 1).contains("not an interface name"));
    assert!(message(named("a-name-too-long-for-it"), 1).contains("not an interface name"));
    assert!(message(named("a/b"), 1).contains("not an interface name"));
    assert!(message(TapConfig { mtu: Some(67), ..TapConfig::default() }, 1).contains("MTU 67"));
    assert!(message(TapConfig { mtu: Some(65_535), ..TapConfig::default() }, 1).contains("68..=65521"));
    assert!(message(TapConfig { mac: Some([1; 6]), ..TapConfig::default() }, 1).contains("group address"));
    assert!(message(TapConfig::default(), 0).contains("needs at least one queue"));
    let addresses = vec![([10, 0, 0, 1].into(), 33)];
    assert!(
        message(TapConfig { kernel_addresses: addresses, ..TapConfig::default() }, 1).contains("above 32")
    );
}

/// Frames of many flows arrive at the queues of the shards that own them, from the first packet on.
#[test]
fn frames_arrive_at_their_owner_shard() {
    use ginnel_stack::handle::PortId;
    use ginnel_stack::ip::config::NetworkConfig;
    use ginnel_stack::steering::{FrameOwner, Steering};
    in_namespace("tap::tests::frames_arrive_at_their_owner_shard", || {
        for queues in [2, 3, 7] {
            let mut netlink = Netlink::open().expect("netlink");
            let bridge = netlink.add_bridge(&format!("br{queues}")).expect("a bridge");
            let mut port = |name: String, queues| {
                let tap =
                    open_queues(&TapConfig { name: Some(name.clone()), ..TapConfig::default() }, queues)
                        .expect("a TAP device");
                let link = netlink.link(&name).expect("the interface");
                netlink.set_master(link.index, bridge).expect("a port of the bridge");
                tap
            };
            let mut near = port(format!("near{queues}"), 1);
            let mut far = port(format!("far{queues}"), queues);
            assert!(far.steering_error.is_none(), "{:?}", far.steering_error);
            let steering = Steering::new(0, queues as u8, &NetworkConfig::default());
            let mut seen = vec![0; queues];
            for number in 0..200u16 {
                let frame = steered_frame(number, far.queues[0].tx.capabilities().mac);
                let owner = match steering.owner_of_bytes(PortId(0), &frame) {
                    FrameOwner::Shard(owner) => usize::from(owner),
                    FrameOwner::All | FrameOwner::Primary { .. } => 0,
                };
                let tx = &mut near.queues[0].tx;
                tx.reserve(frame.len()).expect("room").copy_from_slice(&frame);
                tx.commit(frame.len(), TxMeta::default());
                let arrived = (0..1000).find_map(|attempt| {
                    // The interface may still come up.
                    if attempt > 0 {
                        std::thread::sleep(std::time::Duration::from_millis(5));
                    }
                    far.queues.iter_mut().position(|queue| {
                        let mut burst = RxBurst::new();
                        queue.rx.rx_burst(Instant::ZERO, &mut burst);
                        burst.iter().any(|received| received.bytes == frame)
                    })
                });
                assert_eq!(arrived, Some(owner), "frame {number} of {queues} queues");
                seen[owner] += 1;
            }
            assert!(seen.iter().all(|&count| count > 0), "{seen:?}");
        }
    });
}

/// Returns a frame of TCP or UDP over IPv4 or IPv6, with and without a VLAN tag, options and fragmentation,
/// or of another protocol.
fn steered_frame(number: u16, to: [u8; 6]) -> Vec<u8> {
    let mut frame = [to, [2, 9, 9, 9, 9, 9]].concat();
    if number.is_multiple_of(5) {
        frame.extend([0x81, 0, 0, 5]);
    }
    let protocol = [6, 17, 6, 6][usize::from(number % 4)];
    let ports = [(1000 + 7 * number).to_be_bytes(), (80 + number).to_be_bytes()].concat();
    let mut payload = ports;
    payload.extend([0x5a; 16]);
    payload.extend(number.to_be_bytes());
    if number.is_multiple_of(3) {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, payload.len() as u8, protocol, 64]);
        frame.extend([0xfd, 0, 0, 1, 0, 9, 0, 0, 0, 0, 0, 0, 0, 7, 0, number as u8]);
        frame.extend([0xfd, 0, 0, 2, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    } else {
        let (words, fragment) = match number % 7 {
            1 => (6, 0),
            2 => (5, 0x2000u16),
            3 => (5, 0x0010),
            _ => (5, 0),
        };
        let protocol = if number % 11 == 4 { 132 } else { protocol };
        let mut header = vec![0x40 | words, 0, 0, 4 * words + payload.len() as u8, 0, 0];
        header.extend(fragment.to_be_bytes());
        header.extend([64, protocol, 0, 0, 10, 1, number as u8, 3, 10, 9, 0, 1]);
        header.extend(vec![1; 4 * (usize::from(words) - 5)]);
        // The bridge drops packets with a wrong checksum.
        let sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        frame.extend([8, 0]);
        frame.extend(header);
    }
    frame.extend(payload);
    frame
}

#[test]
fn an_interface_of_another_kind_is_named() {
    in_namespace("tap::tests::an_interface_of_another_kind_is_named", || {
        let error =
            open_queues(&TapConfig { name: Some("lo".into()), ..TapConfig::default() }, 2).err().unwrap();
        assert_eq!(
            error.to_string(),
            "TAP lo: the interface exists and is no TAP interface: use another name"
        );
    });
}
