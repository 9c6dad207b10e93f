use super::udp::UdpBinding;
use super::*;
use crate::udp::UdpOptions;

fn steering(me: u8, count: u8) -> Steering {
    Steering::new(me, count, &NetworkConfig::default())
}

/// Returns an Ethernet frame that carries `packet`.
fn frame(ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    frame.extend(ethertype.to_be_bytes());
    frame.extend(packet);
    frame
}

fn ipv4(src: [u8; 4], dst: [u8; 4], protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 20 + payload.len() as u8, 0, 0];
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, protocol, 0, 0]);
    packet.extend(src);
    packet.extend(dst);
    packet.extend(payload);
    packet
}

fn ipv6(src: &str, dst: &str, next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0, 0, payload.len() as u8, next_header, 255];
    packet.extend(src.parse::<Ipv6Addr>().unwrap().octets());
    packet.extend(dst.parse::<Ipv6Addr>().unwrap().octets());
    packet.extend(payload);
    packet
}

fn ports(src: u16, dst: u16) -> Vec<u8> {
    let mut bytes = [src.to_be_bytes(), dst.to_be_bytes()].concat();
    bytes.extend([0; 16]);
    bytes
}

const PEER: [u8; 4] = [10, 0, 0, 9];
const OURS: [u8; 4] = [10, 0, 0, 1];

#[test]
fn all_shards_agree_and_flows_spread_evenly() {
    for count in [1, 2, 3, 4, 64] {
        let mut flows = vec![0; usize::from(count)];
        for port in 1000..9000 {
            let frame = frame(0x0800, &ipv4(PEER, OURS, protocol::TCP, 0, &ports(port, 80)));
            let owner = steering(0, count).owner_of_bytes(PortId(0), &frame);
            assert_eq!(owner, steering(count - 1, count).owner_of_bytes(PortId(0), &frame));
            let FrameOwner::Shard(owner) = owner else { panic!("{owner:?}") };
            flows[usize::from(owner)] += 1;
        }
        let fair = 8000 / usize::from(count);
        // The 128 entries of the indirection table are distributed over at most 64 shards.
        assert!(flows.iter().all(|&n| n > fair / 2 && n < fair * 2), "{flows:?}");
    }
}

#[test]
fn owner_of_frame_matches_owner_of_flow() {
    let steering = steering(0, 7);
    let packet = ipv4(PEER, OURS, protocol::TCP, 0, &ports(5000, 80));
    let flow = steering.flow_owner((PEER, 5000).into(), (OURS, 80).into());
    assert_eq!(steering.owner_of_bytes(PortId(0), &frame(0x0800, &packet)), FrameOwner::Shard(flow));
    let tagged = [&[0, 7, 0x08, 0x00], &packet[..]].concat();
    assert_eq!(steering.owner_of_bytes(PortId(0), &frame(0x8100, &tagged)), FrameOwner::Shard(flow));
    let packet = ipv6("fd00::9", "fd00::1", protocol::TCP, &ports(5000, 80));
    let [src, dst] = ["[fd00::9]:5000", "[fd00::1]:80"].map(|end| end.parse().unwrap());
    assert_eq!(
        steering.owner_of_bytes(PortId(0), &frame(0x86dd, &packet)),
        FrameOwner::Shard(steering.flow_owner(src, dst))
    );
}

#[test]
fn hash_from_the_device_is_trusted() {
    use crate::device::{Label, RxFrame};
    let steering = steering(0, 7);
    let owner = |bytes: &[u8], hash| {
        steering.owner_of_frame(PortId(0), &RxFrame { label: Label::new(hash, 3), ..RxFrame::new(bytes) })
    };
    let (src, dst) = ((PEER, 5000).into(), (OURS, 80).into());
    let true_hash = steering.toeplitz.hash(PEER.into(), OURS.into(), Some((5000, 80)));
    let tcp = frame(0x0800, &ipv4(PEER, OURS, protocol::TCP, 0, &ports(5000, 80)));
    assert_eq!(owner(&tcp, Some(true_hash)), FrameOwner::Shard(steering.flow_owner(src, dst)));
    // The hash is trusted; only its low bits matter.
    assert_eq!(
        (0..7).map(|hash| owner(&tcp, Some(hash))).collect::<Vec<_>>(),
        (0..7).map(FrameOwner::Shard).collect::<Vec<_>>()
    );
    assert_eq!(owner(&tcp, None), steering.owner_of_bytes(PortId(0), &tcp));
    let six = frame(0x86dd, &ipv6("fd00::9", "fd00::1", protocol::TCP, &ports(5000, 80)));
    assert_eq!(owner(&six, Some(5)), FrameOwner::Shard(5));
    // Frames that are not steered by a flow hash ignore it: fragments, ARP, and ports of UDP sockets.
    let fragment = frame(0x0800, &ipv4(PEER, OURS, protocol::TCP, 0x2000, &ports(5000, 80)));
    let arp = frame(0x0806, &[0; 28]);
    let chosen = frame(0x0800, &ipv4(PEER, OURS, protocol::UDP, 0, &ports(5000, 40_000)));
    for bytes in [fragment, arp, chosen] {
        assert!((0..7).all(|hash| owner(&bytes, Some(hash)) == steering.owner_of_bytes(PortId(0), &bytes)));
    }
    let free = frame(0x0800, &ipv4(PEER, OURS, protocol::UDP, 0, &ports(5000, 53)));
    assert_eq!(owner(&free, Some(6)), FrameOwner::Shard(6), "no socket has the port");
}

/// The quick check agrees with the full one, and judges plain segments that belong here.
#[test]
fn home_segments_are_recognized_by_their_hash() {
    let mut steering = steering(2, 7);
    let plain = [
        frame(0x0800, &ipv4(PEER, OURS, protocol::TCP, 0, &ports(5000, 80))),
        frame(0x0800, &ipv4(PEER, OURS, protocol::TCP, 0x4000, &ports(5000, 80))),
        frame(0x86dd, &ipv6("fd00::9", "fd00::1", protocol::TCP, &ports(5000, 80))),
    ];
    let mut options = ipv4(PEER, OURS, protocol::TCP, 0, &ports(5000, 80));
    options[0] = 0x46;
    let others = [
        frame(0x0800, &ipv4(PEER, OURS, protocol::TCP, 0x2000, &ports(5000, 80))),
        frame(0x0800, &ipv4(PEER, OURS, protocol::TCP, 9, &ports(5000, 80))),
        frame(0x0800, &ipv4(PEER, OURS, protocol::UDP, 0, &ports(5000, 53))),
        frame(0x86dd, &ipv6("fd00::9", "fd00::1", 44, &ports(1536, 0))),
        frame(0x0800, &options),
        frame(0x0806, &[0; 28]),
        frame(0x0800, &[0x45]),
        Vec::new(),
    ];
    let is_home = |steering: &Steering, bytes: &[u8], hash| {
        steering.is_home_segment(&RxFrame { label: Label::new(hash, 5), ..RxFrame::new(bytes) })
    };
    for hash in 0..300 {
        for bytes in &plain {
            let label = Label::new(Some(hash), 5);
            let owner = steering.owner_of_frame(PortId(0), &RxFrame { label, ..RxFrame::new(bytes) });
            assert_eq!(is_home(&steering, bytes, Some(hash)), owner == FrameOwner::Shard(2), "{hash}");
        }
        assert!(!others.iter().any(|bytes| is_home(&steering, bytes, Some(hash))));
    }
    assert!(!plain.iter().any(|bytes| is_home(&steering, bytes, None)));
    steering.set_policy(Arc::new(LastShard), 32_768..=60_999);
    assert!(!is_home(&steering, &plain[0], Some(2)), "rules come before the hash");
}

#[test]
fn fragments_of_a_packet_share_one_owner() {
    let steering = steering(0, 16);
    let first = frame(0x0800, &ipv4(PEER, OURS, protocol::UDP, 0x2000, &ports(5000, 53)));
    let last = frame(0x0800, &ipv4(PEER, OURS, protocol::UDP, 0x0003, &[7; 20]));
    let addresses = steering.toeplitz.hash(PEER.into(), OURS.into(), None);
    assert_eq!(
        steering.owner_of_bytes(PortId(0), &first),
        FrameOwner::Shard(steering.shard_of_hash(addresses, OURS.into(), None))
    );
    assert_eq!(steering.owner_of_bytes(PortId(0), &last), steering.owner_of_bytes(PortId(0), &first));
    let fragment = |offset_more: u16, rest: &[u8]| {
        let header = [&[protocol::UDP, 0][..], &offset_more.to_be_bytes(), &[0, 0, 0, 9], rest].concat();
        frame(0x86dd, &ipv6("fd00::9", "fd00::1", protocol::FRAGMENT, &header))
    };
    assert_eq!(
        steering.owner_of_bytes(PortId(0), &fragment(1, &ports(5000, 53))),
        steering.owner_of_bytes(PortId(0), &fragment(24, &[7; 16]))
    );
}

#[test]
fn icmp_error_follows_the_quoted_flow() {
    let steering = steering(0, 16);
    for (kind, port) in [(3, 5000), (11, 5001), (12, 5002)] {
        let quote = ipv4(OURS, PEER, protocol::TCP, 0x4000, &ports(80, port));
        let error = [&[kind, 4, 0, 0, 0, 0, 5, 0], &quote[..]].concat();
        let from_a_router = frame(0x0800, &ipv4([192, 0, 2, 1], OURS, protocol::ICMP, 0, &error));
        let flow = steering.flow_owner((PEER, port).into(), (OURS, 80).into());
        assert_eq!(steering.owner_of_bytes(PortId(0), &from_a_router), FrameOwner::Shard(flow));
    }
    let quote = ipv6("fd00::1", "fd00::9", protocol::TCP, &ports(80, 5000));
    let error = [&[2, 0, 0, 0, 0, 0, 5, 0], &quote[..]].concat();
    let [src, dst] = ["[fd00::9]:5000", "[fd00::1]:80"].map(|end| end.parse().unwrap());
    let owner = steering
        .owner_of_bytes(PortId(0), &frame(0x86dd, &ipv6("2001:db8::1", "fd00::1", protocol::ICMPV6, &error)));
    assert_eq!(owner, FrameOwner::Shard(steering.flow_owner(src, dst)));
}

#[test]
fn udp_and_its_errors_follow_the_socket() {
    let mut steering = steering(1, 4);
    let mut table = UdpPortTable::default();
    let options = UdpOptions::default();
    table.add(UdpBinding { id: 1, shard: 2, local: "0.0.0.0:53".parse().unwrap(), remote: None, options });
    steering.set_udp_ports(Arc::new(table));
    for port in 5000..5050 {
        let datagram = frame(0x0800, &ipv4(PEER, OURS, protocol::UDP, 0, &ports(port, 53)));
        assert_eq!(steering.owner_of_bytes(PortId(0), &datagram), FrameOwner::Shard(2));
        let quote = ipv4(OURS, PEER, protocol::UDP, 0, &ports(53, port));
        let error = [&[3, 3, 0, 0, 0, 0, 0, 0], &quote[..]].concat();
        assert_eq!(
            steering.owner_of_bytes(PortId(0), &frame(0x0800, &ipv4(PEER, OURS, protocol::ICMP, 0, &error))),
            FrameOwner::Shard(2)
        );
    }
    assert!(!steering.may_choose_udp_port(53));
    let mine = (32_768..=60_999).filter(|&port| steering.may_choose_udp_port(port)).count();
    assert_eq!(mine, (60_999 - 32_768 + 1) / 4, "each shard has its share of the ephemeral ports");
    let chosen = (32_768..).find(|&port| steering.may_choose_udp_port(port)).unwrap();
    let datagram = frame(0x0800, &ipv4(PEER, OURS, protocol::UDP, 0, &ports(9, chosen)));
    assert_eq!(steering.owner_of_bytes(PortId(0), &datagram), FrameOwner::Shard(1));
}

/// The group is not a power of two, so each bit of the hash matters.
#[test]
fn label_does_not_change_the_reuseport_choice() {
    use crate::device::{Label, RxFrame};
    let mut steering = steering(0, 3);
    let mut table = UdpPortTable::default();
    let options = UdpOptions { reuse_port: true, ..UdpOptions::default() };
    for shard in 0..3 {
        let local = "0.0.0.0:53".parse().unwrap();
        table.add(UdpBinding { id: shard.into(), shard, local, remote: None, options });
    }
    steering.set_udp_ports(Arc::new(table));
    let mut chosen = [0; 3];
    for port in 5000..5300 {
        let datagram = frame(0x0800, &ipv4(PEER, OURS, protocol::UDP, 0, &ports(port, 53)));
        let hash = steering.toeplitz.hash(PEER.into(), OURS.into(), Some((port, 53)));
        let label = Label::new(Some(hash), 0);
        let owner = steering.owner_of_frame(PortId(0), &RxFrame { label, ..RxFrame::new(&datagram) });
        assert_eq!(owner, steering.owner_of_bytes(PortId(0), &datagram), "{port}: {hash:#x}");
        let FrameOwner::Shard(shard) = owner else { panic!("{owner:?}") };
        chosen[usize::from(shard)] += 1;
    }
    assert!(chosen.iter().all(|count| (60..140).contains(count)), "{chosen:?}");
}

#[test]
fn link_control_goes_to_the_primary_shard() {
    let steering = steering(3, 4);
    assert_eq!(
        steering.owner_of_bytes(PortId(0), &frame(0x0806, &[0; 28])),
        FrameOwner::Primary { broadcast: Broadcast::Users }
    );
    for (kind, owner) in [
        (134, FrameOwner::Primary { broadcast: Broadcast::All }),
        (135, FrameOwner::Primary { broadcast: Broadcast::Users }),
        (136, FrameOwner::Primary { broadcast: Broadcast::Users }),
        (130, FrameOwner::Primary { broadcast: Broadcast::None }),
        (128, FrameOwner::Shard(3)),
    ] {
        let message = [kind, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(
            steering.owner_of_bytes(PortId(0), &frame(0x86dd, &ipv6("fe80::9", "fe80::1", 58, &message))),
            owner,
            "{kind}"
        );
    }
    let echo = frame(0x0800, &ipv4(PEER, OURS, protocol::ICMP, 0, &[8, 0, 0, 0, 0, 0, 0, 0]));
    let whole = frame(0x0800, &ipv4(PEER, OURS, protocol::TCP, 0, &ports(5000, 80)));
    assert_eq!(steering.owner_of_bytes(PortId(0), &echo), FrameOwner::Shard(3));
    for len in 0..14 + 20 + 4 {
        assert_eq!(
            steering.owner_of_bytes(PortId(0), &whole[..len]),
            FrameOwner::Shard(3),
            "truncated to {len} bytes"
        );
    }
}

#[test]
fn control_updates_round_trip() {
    let address = "fe80::1".parse().unwrap();
    for update in [
        ControlUpdate::DadResult { link: 3, address, valid: true },
        ControlUpdate::DadResult { link: 3, address, valid: false },
        ControlUpdate::PathMtu { destination: "10.0.0.9".parse().unwrap(), mtu: 1400 },
        ControlUpdate::PathMtu { destination: "fd00::9".parse().unwrap(), mtu: 1400 },
        ControlUpdate::FastOpenPeer(FastOpenPeer {
            local: "fd00::1".parse().unwrap(),
            remote: "fd00::9".parse().unwrap(),
            mss: 1440,
            cookie: ([7; 16], 12),
            is_experimental: true,
            unanswered: 0,
        }),
        ControlUpdate::FastOpenPeer(FastOpenPeer {
            local: "10.0.0.1".parse().unwrap(),
            remote: "10.0.0.9".parse().unwrap(),
            mss: 0,
            cookie: ([0; 16], 0),
            is_experimental: false,
            unanswered: 2,
        }),
    ] {
        assert_eq!(ControlUpdate::decode(&update.encode()), Some(update));
    }
    assert_eq!(ControlUpdate::decode(&[9; ControlUpdate::LEN]), None);
    assert_eq!(ControlUpdate::decode(&[0; 3]), None);
}

#[test]
fn update_replaces_what_it_repeats() {
    let peer = FastOpenPeer {
        local: "10.0.0.1".parse().unwrap(),
        remote: "10.0.0.9".parse().unwrap(),
        mss: 1440,
        cookie: ([0; 16], 0),
        is_experimental: false,
        unanswered: 1,
    };
    let with_cookie = FastOpenPeer { cookie: ([7; 16], 8), unanswered: 0, ..peer };
    for (earlier, later, is_superseded) in [
        (peer, peer, true),
        (peer, FastOpenPeer { unanswered: 2, mss: 1000, ..peer }, true),
        (peer, FastOpenPeer { unanswered: 0, ..peer }, false),
        (peer, FastOpenPeer { mss: 0, ..peer }, false),
        (peer, with_cookie, true),
        (peer, FastOpenPeer { mss: 0, ..with_cookie }, false),
        (with_cookie, with_cookie, true),
        (with_cookie, peer, false),
        (peer, FastOpenPeer { remote: "10.0.0.8".parse().unwrap(), ..peer }, false),
    ] {
        let [earlier, later] = [earlier, later].map(ControlUpdate::FastOpenPeer);
        assert_eq!(earlier.is_superseded_by(&later), is_superseded, "{earlier:?}, {later:?}");
    }
}

/// Gives flows from port 9 to the last shard, and others from a port below 1000 to a shard that does not
/// exist.
struct LastShard;

impl policy::SteeringPolicy for LastShard {
    fn owner(&self, flow: &policy::SteeredFlow) -> Option<u8> {
        match flow.source.port() {
            9 => Some(flow.shards - 1),
            0..1000 => Some(flow.shards),
            _ => None,
        }
    }
}

#[test]
fn a_policy_comes_before_the_hash() {
    let plain = steering(0, 3);
    let mut ruled = steering(0, 3);
    ruled.set_policy(Arc::new(LastShard), 32_768..=60_999);
    let owner = |steering: &Steering, from: u16, to: u16, hash| {
        let bytes = frame(0x0800, &ipv4(PEER, OURS, protocol::TCP, 0, &ports(from, to)));
        let label = Label::new(hash, 0);
        steering.owner_of_frame(PortId(0), &RxFrame { label, ..RxFrame::new(&bytes) })
    };
    for hash in [None, Some(0), Some(1)] {
        assert_eq!(owner(&ruled, 9, 80, hash), FrameOwner::Shard(2));
        // Connections that the stack has opened keep their shard; wrong and missing answers have no effect.
        for (from, to) in [(9, 40_000), (700, 80), (5000, 80)] {
            assert_eq!(owner(&ruled, from, to, hash), owner(&plain, from, to, hash));
        }
    }
    assert_eq!(ruled.policy_counts(), (3, 3));
    let peer = |port| SocketAddr::new(Ipv4Addr::from(PEER).into(), port);
    let ours = |port| SocketAddr::new(Ipv4Addr::from(OURS).into(), port);
    assert_eq!(ruled.flow_owner(peer(9), ours(80)), 2);
    assert_eq!(ruled.flow_owner(peer(9), ours(40_000)), plain.flow_owner(peer(9), ours(40_000)));
    // An ICMP error follows the flow that it quotes.
    let quoted = ipv4(OURS, PEER, protocol::TCP, 0, &ports(80, 9));
    let error = [&[icmpv4::UNREACHABLE, 3, 0, 0, 0, 0, 0, 0], &quoted[..]].concat();
    let error = frame(0x0800, &ipv4(PEER, OURS, protocol::ICMP, 0, &error));
    assert_eq!(ruled.owner_of_bytes(PortId(0), &error), FrameOwner::Shard(2));
}

#[test]
fn home_ports_are_those_of_the_flows() {
    let flows =
        [("10.0.0.9:80", "10.0.0.1"), ("192.0.2.77:6379", "172.16.5.4"), ("[fd00::9]:443", "fd00:1::1")];
    for count in [2, 3, 7, 8, 9, 24, 64] {
        for (remote, local) in flows {
            let (remote, local): (SocketAddr, IpAddr) = (remote.parse().unwrap(), local.parse().unwrap());
            for shard in [0, count - 1] {
                let steering = steering(shard, count);
                let search = steering.home_ports(remote, local).unwrap();
                let mut from = Some(1000);
                let found = core::iter::from_fn(|| {
                    let port = search.next(from?, 3000)?;
                    from = port.checked_add(1);
                    Some(port)
                });
                let expected =
                    (1000..=3000).filter(|port| steering.owns_flow(remote, SocketAddr::new(local, *port)));
                assert!(found.eq(expected), "{remote} on shard {shard} of {count}");
                assert!(search.next(3000, 2999).is_none());
                assert!(search.next(60_000, u16::MAX).is_some());
            }
        }
    }
}

/// All shards agree on the owner of a flow, and the owner serves the device of the local address. The ports
/// that a shard finds for its connections are its own.
#[test]
fn a_device_has_its_own_shards() {
    use crate::handle::LinkId;
    use crate::ip::local::LocalAddresses;
    let devices = [vec![0, 1], vec![3, 1, 2], vec![2], vec![0, 1, 2, 3]];
    let shards: Vec<Steering> = (0..4)
        .map(|shard| {
            let mut steering = steering(shard, 4);
            steering.set_device_shards(devices.iter().cloned());
            let mut addresses = LocalAddresses::new();
            for link in 0..4 {
                addresses.insert_v4(Ipv4Addr::new(10, link, 0, 1), LinkId(link.into()));
            }
            addresses.insert_v4(Ipv4Addr::new(127, 0, 0, 1), LinkId(4));
            steering.set_local_addresses(addresses, (0..5).map(PortId).collect());
            steering
        })
        .collect();
    for (link, serving) in devices.iter().enumerate() {
        let local: IpAddr = [10, link as u8, 0, 1].into();
        let mut owners = [0; 4];
        for port in 1000..1500 {
            let (src, dst) = ((PEER, port).into(), SocketAddr::new(local, 80));
            let bytes =
                frame(0x0800, &ipv4(PEER, [10, link as u8, 0, 1], protocol::TCP, 0, &ports(port, 80)));
            let owner = shards[0].flow_owner(src, dst);
            for (steering, received) in
                shards.iter().flat_map(|one| (0..5).map(move |port| (one, PortId(port))))
            {
                assert_eq!(steering.owner_of_bytes(received, &bytes), FrameOwner::Shard(owner));
                let label = Label::new(Some(steering.flow_hash(src, dst)), 0);
                let labelled = RxFrame { label, ..RxFrame::new(&bytes) };
                assert_eq!(steering.owner_of_frame(received, &labelled), FrameOwner::Shard(owner));
                assert!(!steering.is_home_segment(&labelled), "the hash alone does not decide");
            }
            owners[usize::from(owner)] += 1;
        }
        for (shard, steering) in (0u8..).zip(&shards) {
            let is_serving = serving.contains(&shard);
            assert_eq!((steering.serves(local), owners[usize::from(shard)] > 50), (is_serving, is_serving));
            let remote = (PEER, 443).into();
            let found = steering.home_ports(remote, local).map(|search| search.next(40_000, 50_000).unwrap());
            assert_eq!(found.is_some(), is_serving);
            assert!(found.is_none_or(|port| steering.owns_flow(remote, SocketAddr::new(local, port))));
            let primary = steering.primary(PortId(link as u16));
            assert_eq!(
                (primary, steering.is_secondary(PortId(link as u16))),
                (serving[0], shard != serving[0])
            );
        }
    }
    // All shards serve other devices, such as the loopback.
    for steering in &shards {
        let loopback = "127.0.0.1".parse().unwrap();
        assert!(steering.serves(loopback) && steering.home_ports((PEER, 80).into(), loopback).is_some());
        assert_eq!(steering.primary(PortId(4)), 0);
        // Fragments to a group belong to the device that has received them.
        let group = frame(0x0800, &ipv4(PEER, [239, 1, 1, 1], protocol::UDP, 0x2000, &ports(5000, 53)));
        assert_eq!(steering.owner_of_bytes(PortId(2), &group), FrameOwner::Shard(2));
        // So do errors about packets that this host has never sent.
        for source in 1000..1200 {
            for protocol in [protocol::TCP, protocol::UDP] {
                let quote = ipv4([192, 0, 2, 7], PEER, protocol, 0, &ports(source, 443));
                let error = [&[3, 3, 0, 0, 0, 0, 0, 0], &quote[..]].concat();
                let error = frame(0x0800, &ipv4(PEER, [10, 0, 0, 1], protocol::ICMP, 0, &error));
                for (port, serving) in devices.iter().enumerate() {
                    let owner = steering.owner_of_bytes(PortId(port as u16), &error);
                    assert!(serving.iter().any(|&shard| owner == FrameOwner::Shard(shard)), "{owner:?}");
                }
            }
        }
    }
}

#[test]
fn a_shard_knows_whether_it_serves_all_devices() {
    for (devices, expected) in [
        (vec![vec![3, 1, 2], vec![0, 1, 2, 3]], [false, true, true, true]),
        (vec![vec![0, 1, 2, 3]], [true; 4]),
        (vec![vec![0], vec![1]], [false; 4]),
    ] {
        for shard in 0..4_u8 {
            let mut steering = steering(shard, 4);
            assert!(steering.serves_all_devices());
            steering.set_device_shards(devices.iter().cloned());
            assert_eq!(steering.serves_all_devices(), expected[usize::from(shard)], "{devices:?} {shard}");
        }
    }
}

/// A datagram of this host to a group reaches the shard of an ephemeral port only if the port has a socket.
#[test]
fn groups_reach_only_open_ephemeral_ports() {
    let mut steering = steering(0, 4);
    let (src, group) = (SocketAddr::from((OURS, 5000)), IpAddr::from([239, 1, 1, 1]));
    let owner = |steering: &Steering, port| steering.group_owner(src, SocketAddr::new(group, port));
    // Without knowledge of the sockets, each port may have one.
    let shard_of_port = owner(&steering, 50_000);
    assert!(matches!(shard_of_port, Some(FrameOwner::Shard(_))), "{shard_of_port:?}");
    let ports = Arc::new(EphemeralUdpPorts::default());
    steering.set_ephemeral_udp_ports(Arc::clone(&ports));
    assert_eq!(owner(&steering, 50_000), None);
    ports.set(50_000, true);
    assert_eq!((owner(&steering, 50_000), owner(&steering, 50_001)), (shard_of_port, None));
}

/// Computes the Toeplitz hash bit by bit (Microsoft, "RSS hashing types").
fn hash_bit_by_bit(key: &[u8; 40], input: &[u8]) -> u32 {
    let bit_of_key = |at: usize| u32::from(key[at / 8] >> (7 - at % 8) & 1);
    let window = |from: usize| (0..32).fold(0, |word, at| word << 1 | bit_of_key(from + at));
    let set = (0..8 * input.len()).filter(|at| input[at / 8] >> (7 - at % 8) & 1 != 0);
    set.fold(0, |hash, at| hash ^ window(at))
}

/// With the key and the indirection table of a device, a flow belongs to the shard of its entry, and the
/// ports that are found for connections do, too.
#[test]
fn a_device_has_its_own_key_and_table() {
    use crate::handle::LinkId;
    use crate::ip::local::LocalAddresses;
    let key: [u8; 40] = core::array::from_fn(|at| (at * 59 + 7) as u8);
    for entries in [1, 64, 128, 512, INDIRECTION_ENTRIES_MAX] {
        let table: Vec<u8> = (0..entries).map(|entry| [1, 3, NO_SHARD, 2, 1][entry % 5]).collect();
        for shard in 0..4 {
            let mut steering = steering(shard, 4);
            steering.set_hash_key(&key);
            assert!(!steering.set_device_table(PortId(0), &table), "the device has no shards yet");
            steering.set_device_shards([vec![3, 1, 2], vec![0, 1, 2, 3]]);
            assert!(steering.set_device_table(PortId(0), &table));
            for bad in [&[0][..], &[], &[1, 2, 3], &[1; 2 * INDIRECTION_ENTRIES_MAX]] {
                assert!(!steering.set_device_table(PortId(0), bad), "{} entries", bad.len());
            }
            assert!(!steering.set_device_table(PortId(2), &table), "there is no such device");
            let mut addresses = LocalAddresses::new();
            addresses.insert_v4(OURS.into(), LinkId(0));
            steering.set_local_addresses(addresses, vec![PortId(0)]);
            let (remote, local) = (SocketAddr::from((PEER, 443)), IpAddr::from(OURS));
            let owner = |port: u16| {
                let octets = [PEER, OURS].concat();
                let input = [&octets[..], &443_u16.to_be_bytes(), &port.to_be_bytes()].concat();
                table[hash_bit_by_bit(&key, &input) as usize % entries]
            };
            let search = steering.home_ports(remote, local);
            assert_eq!(search.is_some(), shard != 0);
            for port in 40_000..40_400 {
                let found = steering.flow_owner(remote, SocketAddr::new(local, port));
                let is_lost = owner(port) == NO_SHARD;
                assert!(found == owner(port) || is_lost && [1, 2, 3].contains(&found), "{found}");
                let Some(search) = &search else { continue };
                let expected = (port..40_400).find(|&port| owner(port) == shard);
                assert_eq!(search.next(port, 40_399), expected, "{entries} entries, shard {shard}");
            }
        }
    }
}
