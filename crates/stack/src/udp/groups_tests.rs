//! Groups of sockets: who gets a datagram, and how datagrams to groups are sent.

use super::super::tests::{Sockets, at, sockets, sockets_with};
use super::*;
use crate::ip::testbench::*;
use crate::link::LinkConfig;
use crate::multicast::FilterMode;
use crate::udp::{DEVICE_FULL_RETRY, UdpOptions};
use crate::wire::ethernet::EtherType;
use crate::wire::{MacAddr, ipv4, ipv6, protocol};
use core::net::Ipv4Addr;
use core::time::Duration;

const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);

impl Sockets {
    fn join(&mut self, socket: UdpHandle, filter: Option<SourceFilter>) -> Result<(), UdpError> {
        let link = self.fixture.link;
        self.udp.set_membership(&mut self.fixture.network, socket, link, GROUP.into(), filter)
    }

    /// Delivers a datagram of the peer to port 7 of the group, if the group is received.
    fn receive_from_group(&mut self) {
        let bytes = [&[0, 9, 0, 7, 0, 10, 0, 0], &b"hi"[..]].concat();
        let header = ipv4_header(PEER_V4, GROUP, protocol::UDP, bytes.len());
        let packet = ipv4_packet(header, &bytes);
        let frame = frame_to(MacAddr::from_ipv4_multicast(GROUP), None, EtherType::IPV4, &packet);
        if let crate::ip::ParsedFrame::Udp(l4) = self.fixture.parse(&frame) {
            self.udp.input(self.fixture.now, &mut self.fixture.network, &l4);
        }
    }

    fn has_received(&mut self, socket: UdpHandle) -> bool {
        let mut out = [0; 100];
        let received = self.udp.recv_from(socket, &mut out);
        if let Ok(datagram) = received {
            assert_eq!((datagram.to, &out[..datagram.len]), (IpAddr::V4(GROUP), &b"hi"[..]));
        }
        received.is_ok()
    }
}

fn shared() -> UdpOptions {
    UdpOptions { reuse_address: true, ..UdpOptions::default() }
}

fn filter(mode: FilterMode, last: u8) -> Option<SourceFilter> {
    Some(SourceFilter::new(mode, vec![IpAddr::from([10, 0, 0, last])]))
}

#[test]
fn every_member_receives_a_copy() {
    let mut s = sockets();
    let members_only = UdpOptions {
        multicast_v4: MulticastOptions { members_only: true, ..Default::default() },
        ..shared()
    };
    let member = s.bind_with("0.0.0.0", 7, shared()).unwrap();
    let bound = s.bind_with("239.1.2.3", 7, members_only).unwrap();
    let idle = s.bind_with("0.0.0.0", 7, shared()).unwrap();
    let strict = s.bind_with("0.0.0.0", 7, members_only).unwrap();
    let elsewhere = s.bind_with("10.0.0.1", 7, shared()).unwrap();
    let all = [member, bound, idle, strict, elsewhere];
    s.receive_from_group();
    assert_eq!(all.map(|socket| s.has_received(socket)), [false; 5], "the host is no member");
    s.join(member, Some(SourceFilter::ANY)).unwrap();
    s.join(bound, filter(FilterMode::Include, 2)).unwrap();
    s.receive_from_group();
    // A socket that is no member receives what the host receives, unless it asks for members only.
    assert_eq!(all.map(|socket| s.has_received(socket)), [true, true, true, false, false]);
    s.join(member, filter(FilterMode::Exclude, 2)).unwrap();
    s.join(bound, filter(FilterMode::Include, 3)).unwrap();
    s.receive_from_group();
    assert_eq!(all.map(|socket| s.has_received(socket)), [false; 5], "the source is filtered");
    s.join(bound, None).unwrap();
    let Sockets { udp, fixture } = &mut s;
    udp.leave_all(&mut fixture.network, member);
    s.receive_from_group();
    assert_eq!(all.map(|socket| s.has_received(socket)), [false; 5]);
    assert_eq!(s.fixture.sent().len(), 0, "no error about a group");
}

#[test]
fn datagrams_come_back_to_members_of_this_host() {
    let mut s = sockets();
    let member = s.bind_with("0.0.0.0", 7, shared()).unwrap();
    let sender = s.bind("0.0.0.0", 5000);
    let to = Some(at("239.1.2.3", 7));
    s.send(sender, to, b"hi").unwrap();
    assert!(!s.has_received(member), "the host is no member");
    s.join(member, Some(SourceFilter::ANY)).unwrap();
    s.fixture.advance(Duration::from_secs(5));
    s.fixture.sent();
    for (multicast_v4, ttl, comes_back) in [
        (MulticastOptions::default(), Some(1), true),
        (MulticastOptions { no_loop: true, ..Default::default() }, Some(1), false),
        (MulticastOptions { hop_limit: Some(9), ..Default::default() }, Some(9), true),
        (MulticastOptions { hop_limit: Some(0), ..Default::default() }, None, true),
        (MulticastOptions { link: Some(s.fixture.link), ..Default::default() }, Some(1), true),
    ] {
        s.udp.set_options(sender, UdpOptions { multicast_v4, ..UdpOptions::default() }).unwrap();
        s.send(sender, to, b"hi").unwrap();
        let sent = s.fixture.sent();
        assert_eq!(sent.first().map(|frame| frame[22]), ttl);
        for frame in &sent {
            let header = ipv4::Header::parse(&frame[14..]).unwrap();
            assert_eq!((header.src, header.dst), (OUR_V4, GROUP));
            assert_eq!(as_received(frame).0.dst, MacAddr::from_ipv4_multicast(GROUP));
        }
        assert_eq!(s.has_received(member), comes_back, "{multicast_v4:?}");
    }
    let nowhere = MulticastOptions { link: Some(LinkId(9)), ..Default::default() };
    s.udp.set_options(sender, UdpOptions { multicast_v4: nowhere, ..UdpOptions::default() }).unwrap();
    assert_eq!(s.send(sender, to, b"hi"), Err(UdpError::NetUnreachable));
}

#[test]
fn refused_datagrams_to_groups_are_tried_again() {
    let mut s = sockets();
    let sender = s.bind("0.0.0.0", 5000);
    let to = Some(at("239.1.2.3", 7));
    s.fixture.set_capacity(0);
    // Members on this host may have received this one already, so it is lost instead of tried again.
    assert_eq!(s.send(sender, to, b"hi"), Err(UdpError::NoBuffers));
    assert_eq!(s.udp.next_deadline(s.fixture.now), None);
    let no_loop = MulticastOptions { no_loop: true, ..Default::default() };
    s.udp.set_options(sender, UdpOptions { multicast_v4: no_loop, ..UdpOptions::default() }).unwrap();
    assert_eq!(s.send(sender, to, b"hi"), Err(UdpError::DeviceFull));
    let retry_at = s.fixture.now + DEVICE_FULL_RETRY;
    assert_eq!(s.udp.next_deadline(s.fixture.now), Some(retry_at));
    assert_eq!(s.udp.next_deadline(retry_at), None);
    s.fixture.set_capacity(1);
    assert_eq!((s.send(sender, to, b"hi"), s.fixture.sent().len()), (Ok(()), 1));
}

#[test]
fn filters_of_ipv6_groups_apply_on_all_links() {
    let mut s = sockets();
    let config = LinkConfig { name: "vlan".into(), vlan: Some(5), ..LinkConfig::default() };
    let second = s.fixture.network.add_link(s.fixture.port, &config).unwrap();
    let first = s.fixture.link;
    for (group, source, of_first) in [("239.0.0.1", "10.0.0.9", true), ("ff15::1", "fd00::9", false)] {
        let (group, source): (IpAddr, IpAddr) = (group.parse().unwrap(), source.parse().unwrap());
        let socket = s.bind(if group.is_ipv4() { "0.0.0.0" } else { "::" }, 7);
        let only = SourceFilter::new(FilterMode::Include, vec![source]);
        for (link, filter) in [(first, only), (second, SourceFilter::ANY)] {
            s.udp.set_membership(&mut s.fixture.network, socket, link, group, Some(filter)).unwrap();
        }
        let stranger = if group.is_ipv4() { PEER_V4.into() } else { PEER_V6.into() };
        let joined = s.udp.socket(socket).unwrap();
        assert_eq!(joined.receives_group(first, group, stranger), !of_first, "{group}");
        assert!(
            joined.receives_group(first, group, source) && joined.receives_group(second, group, stranger)
        );
        s.udp.leave_all(&mut s.fixture.network, socket);
        s.udp.close(socket).unwrap();
    }
}

#[test]
fn members_on_this_host_receive_what_the_device_refuses() {
    let mut s = sockets();
    let member = s.bind_with("0.0.0.0", 7, shared()).unwrap();
    let sender = s.bind("0.0.0.0", 5000);
    s.join(member, Some(SourceFilter::ANY)).unwrap();
    s.fixture.advance(Duration::from_secs(5));
    s.fixture.sent();
    s.fixture.set_capacity(0);
    assert_eq!(s.send(sender, Some(at("239.1.2.3", 7)), b"hi"), Err(UdpError::NoBuffers));
    assert!(s.has_received(member));
    assert_eq!(s.udp.stats().sent, 0);
}

// limit: network.igmp_max_memberships
// limit: network.igmp_max_msf
// limit: network.mld_max_memberships
// limit: network.mld_max_msf
#[test]
fn memberships_and_sources_are_limited() {
    let mut s = sockets_with(crate::ip::NetworkConfig {
        igmp_max_memberships: 2,
        igmp_max_msf: 1,
        mld_max_memberships: 1,
        mld_max_msf: 0,
        ..network_config()
    });
    let socket = s.bind("0.0.0.0", 7);
    let link = s.fixture.link;
    let mut join = |group: &str, filter| {
        s.udp.set_membership(&mut s.fixture.network, socket, link, group.parse().unwrap(), Some(filter))
    };
    assert_eq!(join("239.0.0.1", SourceFilter::ANY), Ok(()));
    assert_eq!(join("239.0.0.2", SourceFilter::ANY), Ok(()));
    assert_eq!(join("239.0.0.3", SourceFilter::ANY), Err(UdpError::NoBuffers));
    assert_eq!(join("ff15::1", SourceFilter::ANY), Ok(()));
    assert_eq!(join("ff15::2", SourceFilter::ANY), Err(UdpError::NoBuffers));
    let sources = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
    let filter = |count: usize| SourceFilter::new(FilterMode::Exclude, sources[..count].to_vec());
    assert_eq!(join("239.0.0.2", filter(1)), Ok(()), "a change of the filter is no further membership");
    assert_eq!(join("239.0.0.2", filter(2)), Err(UdpError::NoBuffers));
    let v6 = SourceFilter::new(FilterMode::Exclude, vec!["fd00::1".parse().unwrap()]);
    assert_eq!(join("ff15::1", v6), Err(UdpError::NoBuffers));
    assert_eq!(join("10.0.0.1", SourceFilter::ANY), Err(UdpError::InvalidAddress));
    assert_eq!(join("ff15::1", filter(1)), Err(UdpError::InvalidAddress), "another family");
    let network = &mut s.fixture.network;
    let group = "239.0.0.1".parse().unwrap();
    let joined = s.udp.set_membership(network, socket, LinkId(3), group, Some(SourceFilter::ANY));
    assert_eq!(joined, Err(UdpError::InvalidAddress), "no such link");
}

// limit: network.group_memberships_max
#[test]
fn memberships_of_all_sockets_are_limited() {
    let config = crate::ip::NetworkConfig { group_memberships_max: 3, ..network_config() };
    let mut s = sockets_with(config);
    let [first, second] = [7, 8].map(|port| s.bind("0.0.0.0", port));
    s.join(first, Some(SourceFilter::ANY)).unwrap();
    s.join(second, filter(FilterMode::Include, 1)).unwrap();
    assert_eq!(s.join(first, filter(FilterMode::Exclude, 1)), Err(UdpError::NoBuffers), "a source counts");
    s.join(second, filter(FilterMode::Exclude, 2)).unwrap();
    let link = s.fixture.link;
    let join_another = |s: &mut Sockets| {
        let group = "ff15::1".parse().unwrap();
        s.udp.set_membership(&mut s.fixture.network, first, link, group, Some(SourceFilter::ANY))
    };
    assert_eq!(join_another(&mut s), Err(UdpError::NoBuffers));
    assert_eq!(s.udp.stats().memberships_refused, 2);
    s.join(second, Some(SourceFilter::ANY)).unwrap();
    join_another(&mut s).unwrap();
    s.udp.leave_all(&mut s.fixture.network, first);
    s.join(second, filter(FilterMode::Include, 1)).unwrap();
    s.join(second, None).unwrap();
    assert_eq!(s.udp.memberships, 0);
    assert_eq!(s.udp.stats().memberships_refused, 2);
}

#[test]
fn broadcasts_come_back_to_sockets_of_this_host() {
    let mut s = sockets();
    let receiver = s.bind("0.0.0.0", 7);
    let sender =
        s.bind_with("0.0.0.0", 5000, UdpOptions { broadcast: true, ..UdpOptions::default() }).unwrap();
    for to in ["10.0.0.255", "255.255.255.255"] {
        s.send(sender, Some(at(to, 7)), b"x").unwrap();
        assert_eq!(s.fixture.sent().len(), 1);
        assert_eq!(s.read(receiver), Ok(b"x".to_vec()));
    }
}

#[test]
fn connect_keeps_a_bound_group() {
    for bound in ["239.1.2.3", "255.255.255.255", "10.0.0.255"] {
        let mut s = sockets();
        let socket = s.bind_with(bound, 7, shared()).unwrap();
        for to in ["10.0.0.2", "239.9.9.9", "10.0.0.2"] {
            s.connect(socket, at(to, 9)).unwrap();
            assert_eq!(s.udp.local(socket), Ok(at(bound, 7)));
            s.send(socket, None, b"x").unwrap();
            let packet = ipv4::Header::parse(&s.fixture.sent_one()[14..]).unwrap();
            assert_eq!((packet.src, IpAddr::V4(packet.dst)), (OUR_V4, at(to, 9).ip()));
        }
    }
    let mut s = sockets();
    let socket = s.bind_with("ff15::3", 7, shared()).unwrap();
    s.connect(socket, SocketAddr::new(PEER_V6.into(), 9)).unwrap();
    assert_eq!(s.udp.local(socket), Ok(at("ff15::3", 7)));
    s.send(socket, None, b"x").unwrap();
    let packet = ipv6::Header::parse(&s.fixture.sent_one()[14..]).unwrap();
    assert_eq!((packet.src, packet.dst), (OUR_V6, PEER_V6));
    // Only the peer's datagrams are received.
    let mut s = sockets();
    let socket = s.bind_with("239.1.2.3", 7, shared()).unwrap();
    s.join(socket, Some(SourceFilter::ANY)).unwrap();
    for (port, receives) in [(9, true), (8, false)] {
        s.connect(socket, SocketAddr::new(PEER_V4.into(), port)).unwrap();
        s.receive_from_group();
        assert_eq!(s.has_received(socket), receives);
    }
}
