//! Many addresses, VLANs and routes on one device: they have no limit except what a configuration can name.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use ginnel_stack::device::{RxBurst, RxFrame};
use ginnel_stack::handle::{LinkId, PortId};
use ginnel_stack::ip::RouteConfig;
use ginnel_stack::link::LinkConfig;
use ginnel_stack::options::ListenOptions;
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::time::Instant;

fn addresses(count: u32) -> Vec<(IpAddr, u8)> {
    (0..count).map(|i| (IpAddr::V4(Ipv4Addr::from_bits(0x0a01_0001 + i)), 16)).collect()
}

/// Creates a stack with one device, whose other end is dropped.
fn stack() -> (Stack, PortId) {
    let mut stack = Stack::new(StackConfig::default(), [1; 32], Instant::ZERO).unwrap();
    let (_, device) = ginnel_devices::memory::pair(Default::default());
    let port = stack.add_port(device.tx);
    (stack, port)
}

#[test]
fn link_has_thousands_of_addresses_with_listeners() {
    let (mut stack, port) = stack();
    let addresses = addresses(4000);
    let config = LinkConfig { name: "lan".into(), addresses: addresses.clone(), ..LinkConfig::default() };
    let link = stack.add_link(port, &config).unwrap();
    assert_eq!(stack.network().addresses(link).len(), 4000);
    for (address, _) in addresses.iter().step_by(4) {
        stack.listen(SocketAddr::new(*address, 80), ListenOptions::default()).unwrap();
    }
    assert!(stack.network().is_local(addresses[3999].0));
    let more = stack.add_link(port, &LinkConfig { name: "more".into(), vlan: Some(2), ..config });
    assert_eq!(more.unwrap_err().key, "link.more.addresses", "an address is one link's only");
}

#[test]
fn device_has_at_most_4094_vlans() {
    let (mut stack, port) = stack();
    let vlan = |vid: u16| LinkConfig {
        name: format!("vlan{vid}"),
        vlan: Some(vid),
        addresses: vec![(IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0001 + (u32::from(vid) << 8))), 24)],
        ..LinkConfig::default()
    };
    for vid in 1..=4094 {
        stack.add_link(port, &vlan(vid)).unwrap();
    }
    assert_eq!(stack.add_link(port, &vlan(4095)).unwrap_err().key, "link.vlan4095.vlan");
    assert_eq!(
        stack.add_link(port, &LinkConfig { name: "again".into(), ..vlan(7) }).unwrap_err().key,
        "link.again.vlan"
    );
    // A frame of each VLAN reaches its link: an ARP request for its address is answered.
    for vid in [1u16, 2, 2047, 4093, 4094] {
        let mut frame = vec![0xff; 6];
        frame.extend([2, 0, 0, 0, 0, 9, 0x81, 0, (vid >> 8) as u8, vid as u8, 8, 6]);
        frame.extend([0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 9]);
        let net = 0x0a00_0000 + (u32::from(vid) << 8);
        frame.extend((net + 9).to_be_bytes());
        frame.extend([0; 6]);
        frame.extend((net + 1).to_be_bytes());
        let mut burst = RxBurst::new();
        burst.push(RxFrame::new(&frame));
        stack.receive(Instant::ZERO, port, &burst);
        stack.finish_burst(&burst);
    }
    assert_eq!(stack.network().stats().arp_replies_out, 5);
    let mut untagged = vec![0xff; 6];
    untagged.extend([2, 0, 0, 0, 0, 9, 8, 6]);
    untagged.extend([0; 28]);
    let mut burst = RxBurst::new();
    burst.push(RxFrame::new(&untagged));
    stack.receive(Instant::ZERO, port, &burst);
    assert_eq!(stack.network().drops().unknown_vlan, 1, "an untagged frame was accepted");
}

#[test]
fn longest_of_ten_thousand_routes_wins() {
    let (mut stack, port) = stack();
    let config = LinkConfig { name: "lan".into(), addresses: addresses(1), ..LinkConfig::default() };
    let link = stack.add_link(port, &config).unwrap();
    let gateway = |i: u32| IpAddr::V4(Ipv4Addr::from_bits(0x0a01_0002 + i % 1000));
    let route = |i: u32, prefix: u8| RouteConfig {
        destination: IpAddr::V4(Ipv4Addr::from_bits(0xc000_0000 + (i << 8))),
        prefix,
        gateway: Some(gateway(i)),
        link,
        metric: 0,
    };
    for i in 0..10_000 {
        stack.add_route(route(i, 24)).unwrap();
        stack.add_route(route(i, 24)).unwrap();
    }
    stack.add_route(RouteConfig { gateway: Some(gateway(999)), prefix: 8, ..route(0, 8) }).unwrap();
    for i in [0u32, 1, 4999, 9999, 10_000] {
        let to = IpAddr::V4(Ipv4Addr::from_bits(0xc000_0007 + (i << 8)));
        stack.network_mut().route(Instant::ZERO, to, None).unwrap();
        let through = if i < 10_000 { gateway(i) } else { gateway(999) };
        assert!(stack.network().neighbours().any(|n| n.address == through), "{to} through {through}");
    }
    assert_eq!(stack.network().neighbours().count(), 3, "gateways 0, 1, and 999 for three of the five");
    assert!(stack.add_route(RouteConfig { link: LinkId(1), ..route(0, 24) }).is_err());
}
