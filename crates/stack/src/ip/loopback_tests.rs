//! The loopback link: which addresses are routed over it, and which packets may arrive from it and from other
//! links.

use super::testbench::*;
use super::{ParsedFrame, RouteError};
use crate::device::{Capabilities, RxFrame};
use crate::handle::{LinkId, PortId};
use crate::ip::stats::DropReason;
use crate::link::LinkConfig;
use crate::wire::ethernet::EtherType;
use crate::wire::{MacAddr, protocol};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex};

const LOOPBACK_V4: Ipv4Addr = Ipv4Addr::LOCALHOST;
const LOOPBACK_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 9]);

fn loopback_config(with_addresses: bool) -> LinkConfig {
    let addresses = vec![(LOOPBACK_V4.into(), 8), (Ipv6Addr::LOCALHOST.into(), 128)];
    let addresses = if with_addresses { addresses } else { Vec::new() };
    LinkConfig { name: "lo".into(), addresses, loopback: true, ..LinkConfig::default() }
}

/// Returns a network layer with a loopback link besides its device.
fn fixture(with_addresses: bool) -> (NetworkFixture, PortId, LinkId) {
    let mut fixture = NetworkFixture::new();
    let capabilities = Capabilities {
        mac: LOOPBACK_MAC.0,
        mtu: 65_535,
        tx_checksum: true,
        gso_bytes_max: 0,
        uso: false,
        labels: false,
    };
    let recorder = Arc::new(Mutex::new(TxRecorder { capacity: 1000, ..TxRecorder::default() }));
    let queue = RecordingTxQueue { recorder, capabilities, buffer: Vec::new() };
    let port = fixture.network.add_port(Box::new(queue));
    let link = fixture.network.add_link(port, &loopback_config(with_addresses)).unwrap();
    (fixture, port, link)
}

#[test]
fn local_addresses_are_routed_over_loopback() {
    let (mut fixture, _, link) = fixture(true);
    let (now, link_of) = (fixture.now, |route: super::Route| route.hop.link());
    for (to, from, expected) in [
        ("10.0.0.1", None, Some("10.0.0.1")),
        ("127.0.0.1", None, Some("127.0.0.1")),
        ("127.200.3.4", None, Some("127.0.0.1")),
        ("127.0.0.1", Some("10.0.0.1"), Some("10.0.0.1")),
        ("127.0.0.2", Some("127.7.7.7"), Some("127.7.7.7")),
        ("::1", None, Some("::1")),
        ("2001:db8::1", None, Some("2001:db8::1")),
    ] {
        let route = fixture.network.route(now, to.parse().unwrap(), from.map(|from| from.parse().unwrap()));
        let route = route.unwrap_or_else(|error| panic!("{to} from {from:?}: {error}"));
        let expected: Option<IpAddr> = expected.map(|from| from.parse().unwrap());
        assert_eq!(
            (link_of(route), Some(route.src), route.mtu),
            (link, expected, 65_535),
            "{to} from {from:?}"
        );
    }
    let other = fixture.route(PEER_V4);
    assert!(other.hop.link() != link && other.src == IpAddr::V4(OUR_V4));
    let refused = fixture.network.route(now, PEER_V4.into(), Some(LOOPBACK_V4.into()));
    assert_eq!(refused.unwrap_err(), RouteError::InvalidDestination);
}

#[test]
fn without_loopback_own_addresses_are_unreachable() {
    let mut without_loopback = NetworkFixture::new();
    let (now, ours) = (without_loopback.now, OUR_V4.into());
    assert_eq!(without_loopback.network.route(now, ours, None).unwrap_err(), RouteError::OwnAddress);
    let (mut fixture, _, link) = fixture(false);
    assert_eq!(fixture.network.route(now, ours, None).unwrap().hop.link(), link);
    let refused = fixture.network.route(now, LOOPBACK_V4.into(), None);
    assert_eq!(refused.unwrap_err(), RouteError::InvalidDestination);
}

#[test]
fn loopback_addresses_are_accepted_only_on_loopback() {
    let (fixture, port, _) = fixture(true);
    let addresses = [LOOPBACK_V4, Ipv4Addr::new(127, 9, 9, 9), OUR_V4, PEER_V4];
    let packet = |mac, src, dst| {
        let bytes = segment(5);
        let header = ipv4_header(src, dst, protocol::UDP, bytes.len());
        frame_to(mac, None, EtherType::IPV4, &ipv4_packet(header, &bytes))
    };
    let dropped = |port, frame: &[u8]| match fixture.network.parse(port, &RxFrame::new(frame)) {
        ParsedFrame::Drop(reason) if reason != DropReason::BadTransportLength => Some(reason),
        _ => None,
    };
    for src in addresses {
        for dst in addresses {
            let over_loopback = dropped(port, &packet(LOOPBACK_MAC, src, dst));
            let admitted = src != PEER_V4 && dst != PEER_V4;
            assert_eq!(over_loopback.is_none(), admitted, "{src} to {dst} over loopback: {over_loopback:?}");
            let over_wire = dropped(fixture.port, &packet(OUR_MAC, src, dst));
            let admitted = src == PEER_V4 && dst == OUR_V4;
            assert_eq!(over_wire.is_none(), admitted, "{src} to {dst} over the wire: {over_wire:?}");
        }
    }
    let v6 = |mac, src, dst| {
        frame_to(mac, None, EtherType::IPV6, &ipv6_packet(src, dst, protocol::UDP, 64, &segment(5)))
    };
    let loopback_v6 = Ipv6Addr::LOCALHOST;
    assert_eq!(dropped(port, &v6(LOOPBACK_MAC, loopback_v6, loopback_v6)), None);
    assert_eq!(dropped(fixture.port, &v6(OUR_MAC, loopback_v6, loopback_v6)), Some(DropReason::NotLocal));
    assert_eq!(dropped(fixture.port, &v6(OUR_MAC, PEER_V6, loopback_v6)), Some(DropReason::NotLocal));
    assert_eq!(dropped(port, &v6(LOOPBACK_MAC, PEER_V6, loopback_v6)), Some(DropReason::MartianSource));
}

#[test]
fn only_one_link_may_be_loopback() {
    let (mut fixture, port, _) = fixture(true);
    let second = LinkConfig { name: "lo2".into(), vlan: Some(7), ..loopback_config(false) };
    assert_eq!(fixture.network.add_link(port, &second).unwrap_err().key, "link.lo2.loopback");
    let wire = LinkConfig { name: "x".into(), vlan: Some(7), loopback: false, ..loopback_config(true) };
    assert_eq!(fixture.network.add_link(fixture.port, &wire).unwrap_err().key, "link.x.addresses");
}

#[test]
fn local_network_addresses_can_send_and_receive() {
    let local_networks =
        vec![("192.168.7.0".parse().unwrap(), 16), ("fd3d:fa7b:d17d::".parse().unwrap(), 48)];
    let link = LinkConfig { local_networks, ..link_config() };
    let mut fixture = NetworkFixture::with(network_config(), &link, CAPABILITIES);
    for (ours, own) in [
        ("192.168.0.0", true),
        ("192.168.255.255", true),
        ("192.169.0.0", false),
        ("fd3d:fa7b:d17d::", true),
        ("fd3d:fa7b:d17d:ffff::9", true),
        ("fd3d:fa7b:d17e::", false),
    ] {
        let ours: IpAddr = ours.parse().unwrap();
        assert_eq!(fixture.network.is_local(ours), own, "{ours}");
        let peer: IpAddr = if ours.is_ipv4() { PEER_V4.into() } else { PEER_V6.into() };
        let route = fixture.network.route(fixture.now, peer, Some(ours));
        assert_eq!(route.map(|route| route.src).ok(), own.then_some(ours), "{ours}");
        // An address of a local network is used only if it is requested.
        let route = fixture.network.route(fixture.now, peer, None).unwrap();
        assert!(route.src != ours && fixture.network.is_local(route.src));
    }
}
