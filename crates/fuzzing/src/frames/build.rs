//! Builds frames of remote hosts, valid and invalid.

use super::word::WORD_BYTES;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use ginnel_stack::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use ginnel_stack::wire::echo::Echo;
use ginnel_stack::wire::ethernet::{EtherType, Header, VlanTag};
use ginnel_stack::wire::tcp::{self, TcpHeader, TcpOptions};
use ginnel_stack::wire::{MacAddr, arp, icmpv4, icmpv6, igmp, ipv4, ipv6, ndp, protocol};

/// MAC address of the stack.
pub const LOCAL_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
/// IPv4 address of the stack.
pub const LOCAL_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// IPv6 address of the stack.
pub const LOCAL_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
/// Number of hosts on the link, and number of hosts beyond the gateway.
pub const HOSTS: u8 = 4;
/// Number of the host that is the gateway.
pub const GATEWAY: u8 = HOSTS;

/// Returns the MAC address of a host.
pub fn mac(host: u8) -> MacAddr {
    MacAddr([2, 0, 0, 0, 1, host])
}

/// Returns an IGMP message of the type that the lowest bits of `kind` select: a query of any version, or a
/// report of another host. `fields` has the response code, the robustness variable, the query interval and
/// the number of sources, a byte each.
pub fn group_message(host: u8, kind: u8, fields: u32) -> Vec<u8> {
    const GROUP: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 251);
    let [code, robustness, interval, count] = fields.to_le_bytes();
    let kinds = [igmp::QUERY, igmp::REPORT_V1, igmp::REPORT_V2, igmp::REPORT_V3];
    let mut message = vec![kinds[usize::from(kind & 3)], code, 0, 0];
    let group = if kind & 4 == 0 { GROUP } else { Ipv4Addr::UNSPECIFIED };
    message.extend(group.octets());
    if kind & 8 != 0 {
        message.extend([robustness, interval, 0, count & 7]);
        let sources = if kind & 16 == 0 { count & 7 } else { count >> 5 };
        (0..sources).for_each(|number| message.extend(on_link(number % HOSTS).0.octets()));
    }
    let checksum = if kind & 32 == 0 { Sum::of(&message).finish() } else { 0 };
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    let source = if kind & 64 == 0 { on_link(host).0 } else { Ipv4Addr::UNSPECIFIED };
    let target = if kind & 128 == 0 { Ipv4Addr::new(224, 0, 0, 1) } else { GROUP };
    ip(source.into(), target.into(), protocol::IGMP, 0, 1, &message)
}

/// Returns the addresses of a host on the link.
pub fn on_link(host: u8) -> (Ipv4Addr, Ipv6Addr) {
    (Ipv4Addr::new(10, 0, 0, 10 + host), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 0x10 + u16::from(host)))
}

/// Returns the address of a host on the link or beyond the gateway.
pub fn address(host: u8, v6: bool, remote: bool) -> IpAddr {
    let host = host % HOSTS;
    match (v6, remote) {
        (false, false) => on_link(host).0.into(),
        (true, false) => on_link(host).1.into(),
        (false, true) => Ipv4Addr::new(192, 0, 2, 10 + host).into(),
        (true, true) => Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x10 + u16::from(host)).into(),
    }
}

/// Returns the number of the host on the link through which an address is reached.
pub fn next_hop_host(address: IpAddr) -> u8 {
    (0..HOSTS).find(|h| on_link(*h).0 == address || on_link(*h).1 == address).unwrap_or(GATEWAY)
}

/// Wraps a packet of `host` in an Ethernet frame.
pub fn frame(host: u8, dst: MacAddr, vlan: Option<u16>, ethertype: EtherType, packet: &[u8]) -> Vec<u8> {
    let vlan = vlan.map(|vid| VlanTag { pcp: 0, dei: false, vid });
    let header = Header::new(dst, mac(host), vlan, ethertype);
    let mut out = vec![0; usize::from(header.len)];
    header.emit(&mut out);
    out.extend_from_slice(packet);
    out
}

/// Returns the EtherType of an IP packet.
pub fn ethertype(packet: &[u8]) -> EtherType {
    if packet.first().is_some_and(|b| b >> 4 == 6) { EtherType::IPV6 } else { EtherType::IPV4 }
}

/// Returns the sum of the pseudo-header.
pub fn pseudo(src: IpAddr, dst: IpAddr, protocol: u8, len: usize) -> Sum {
    match (src, dst) {
        (IpAddr::V4(s), IpAddr::V4(d)) => pseudo_v4(s, d, protocol, len),
        (IpAddr::V6(s), IpAddr::V6(d)) => pseudo_v6(s, d, protocol, len),
        _ => Sum::ZERO,
    }
}

/// Builds an IP packet. `ident` 0 sets the don't-fragment bit.
pub fn ip(src: IpAddr, dst: IpAddr, protocol: u8, ecn: u8, ident: u16, l4: &[u8]) -> Vec<u8> {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let header = ipv4::Header {
                dscp: 0,
                ecn,
                total_len: u16::try_from(20 + l4.len()).unwrap_or(u16::MAX),
                ident,
                dont_fragment: ident == 0,
                more_fragments: false,
                fragment_offset: 0,
                ttl: 64,
                protocol,
                src,
                dst,
                header_len: 20,
            };
            let mut out = vec![0; 20];
            header.emit(&mut out);
            out.extend_from_slice(l4);
            out
        }
        (src, dst) => {
            let v6 = |a| match a {
                IpAddr::V6(a) => a,
                IpAddr::V4(a) => a.to_ipv6_mapped(),
            };
            ip6(v6(src), v6(dst), protocol, ecn, if protocol == protocol::ICMPV6 { 255 } else { 64 }, l4)
        }
    }
}

fn ip6(src: Ipv6Addr, dst: Ipv6Addr, next_header: u8, ecn: u8, hop_limit: u8, l4: &[u8]) -> Vec<u8> {
    let payload_len = u16::try_from(l4.len()).unwrap_or(u16::MAX);
    let header = ipv6::Header { dscp: 0, ecn, flow_label: 0, payload_len, next_header, hop_limit, src, dst };
    let mut out = vec![0; 40];
    header.emit(&mut out);
    out.extend_from_slice(l4);
    out
}

/// Fields of a TCP segment.
pub struct SegmentSpec<'a> {
    /// The TCP header; the addresses determine the ports.
    pub header: TcpHeader,
    /// The TCP options.
    pub options: TcpOptions,
    /// Raw option bytes after `options`, truncated so that the header has at most 60 bytes.
    pub trailing_options: &'a [u8],
    /// The payload.
    pub payload: &'a [u8],
    /// ECN field of the IP header.
    pub ecn: u8,
    /// Identification of the IPv4 header; 0 sets the don't-fragment bit.
    pub ident: u16,
    /// Makes the checksum wrong.
    pub bad_checksum: bool,
}

/// Builds the IP packet of a segment.
pub fn tcp(src: SocketAddr, dst: SocketAddr, s: &SegmentSpec<'_>) -> Vec<u8> {
    let header = TcpHeader { src_port: src.port(), dst_port: dst.port(), ..s.header };
    let options = s.options.encoded_len();
    let garbage = &s.trailing_options[..s.trailing_options.len().min(40 - options) & !3];
    let header_len = 20 + options + garbage.len();
    let mut l4 = vec![0; header_len];
    tcp::emit(&header, &s.options, &mut l4);
    l4[12] = (header_len as u8 >> 2) << 4;
    l4[20 + options..].copy_from_slice(garbage);
    l4.extend_from_slice(s.payload);
    let sum = pseudo(src.ip(), dst.ip(), protocol::TCP, l4.len()).add(Sum::of(&l4)).finish();
    let sum = if s.bad_checksum { sum ^ 0x0101 } else { sum };
    l4[16..18].copy_from_slice(&sum.to_be_bytes());
    ip(src.ip(), dst.ip(), protocol::TCP, s.ecn, s.ident, &l4)
}

/// Builds an ICMP error of a router about a packet of the stack. `kind` selects among all kinds of errors.
/// Returns `None` if `quote` does not begin with an IP header.
pub fn icmp_error(kind: u8, mtu: u32, quote: &[u8]) -> Option<Vec<u8>> {
    match quote.first()? >> 4 {
        4 => icmpv4_error(kind, mtu, quote),
        6 => icmpv6_error(kind, mtu, quote),
        _ => None,
    }
}

fn icmpv4_error(kind: u8, mtu: u32, quote: &[u8]) -> Option<Vec<u8>> {
    use icmpv4::Message;
    let (_, _) = ipv4::Header::parse_quoted(quote).ok()?;
    let dst = Ipv4Addr::new(quote[12], quote[13], quote[14], quote[15]);
    let quote = &quote[..quote.len().min(if kind & 64 == 0 { 28 } else { 548 })];
    let message = match kind & 15 {
        code @ 0..=12 => Message::Unreachable { code, mtu: mtu as u16, quote },
        13 => Message::TimeExceeded { code: kind >> 4 & 1, quote },
        14 => Message::ParameterProblem { code: 0, pointer: mtu as u8, quote },
        _ => Message::Redirect { code: 1, gateway: on_link(1).0, quote },
    };
    let mut l4 = vec![0; message.encoded_len()];
    message.emit(&mut l4);
    Some(ip(on_link(GATEWAY).0.into(), dst.into(), protocol::ICMP, 0, 0, &l4))
}

fn icmpv6_error(kind: u8, mtu: u32, quote: &[u8]) -> Option<Vec<u8>> {
    use icmpv6::Message;
    let dst = Ipv6Addr::from_octets(quote.get(8..24)?.try_into().ok()?);
    let quote = &quote[..quote.len().min(1232)];
    let message = match kind & 15 {
        code @ 0..=6 => Message::Unreachable { code, quote },
        7..=12 => Message::PacketTooBig { mtu, quote },
        13 => Message::TimeExceeded { code: kind >> 4 & 1, quote },
        _ => Message::ParameterProblem { code: kind >> 4 & 3, pointer: mtu, quote },
    };
    let src = on_link(GATEWAY).1;
    let mut l4 = vec![0; message.encoded_len()];
    message.emit(src, dst, &mut l4);
    Some(ip6(src, dst, protocol::ICMPV6, 0, 64, &l4))
}

/// Builds an echo request.
pub fn echo_request(host: u8, v6: bool, data: &[u8]) -> Vec<u8> {
    let (v4, v6_address) = on_link(host);
    if v6 {
        let message = icmpv6::Message::EchoRequest(Echo { ident: 1, seq: 2, data });
        let mut l4 = vec![0; message.encoded_len()];
        message.emit(v6_address, LOCAL_V6, &mut l4);
        ip6(v6_address, LOCAL_V6, protocol::ICMPV6, 0, 64, &l4)
    } else {
        let message = icmpv4::Message::EchoRequest(Echo { ident: 1, seq: 2, data });
        let mut l4 = vec![0; message.encoded_len()];
        message.emit(&mut l4);
        ip(v4.into(), LOCAL_V4.into(), protocol::ICMP, 0, 9, &l4)
    }
}

/// Builds an ARP frame.
pub fn arp(host: u8, kind: u8, vlan: Option<u16>) -> Vec<u8> {
    let sender_ip = if kind % 3 == 2 { LOCAL_V4 } else { on_link(host).0 };
    let packet = arp::ArpPacket {
        operation: if kind.is_multiple_of(3) { arp::ArpOperation::Request } else { arp::ArpOperation::Reply },
        sender_mac: mac(host),
        sender_ip,
        target_mac: if kind.is_multiple_of(3) { MacAddr::ZERO } else { LOCAL_MAC },
        target_ip: LOCAL_V4,
    };
    let mut out = [0; arp::ArpPacket::LEN];
    packet.emit(&mut out);
    let dst = if kind % 3 == 1 { LOCAL_MAC } else { MacAddr::BROADCAST };
    frame(host, dst, vlan, EtherType::ARP, &out)
}

/// Builds a neighbour discovery frame.
pub fn ndp(host: u8, kind: u8, value: u32, vlan: Option<u16>) -> Vec<u8> {
    let (_, address) = on_link(host);
    let link_local = Ipv6Addr::from_octets({
        let mut octets = [0; 16];
        octets[..2].copy_from_slice(&[0xfe, 0x80]);
        octets[8..].copy_from_slice(&mac(host).interface_id());
        octets
    });
    let source = (value & 1 == 0).then(|| mac(host));
    let (src, dst, message) = match kind % 4 {
        0 => {
            let message =
                ndp::NdpMessage::NeighbourSolicitation { target: LOCAL_V6, source_mac: source, nonce: None };
            (address, ndp::solicited_node(LOCAL_V6), message)
        }
        kind @ (1 | 2) => {
            let message = ndp::NdpMessage::NeighbourAdvertisement {
                target: if kind == 1 { address } else { LOCAL_V6 },
                router: value & 2 != 0,
                solicited: value & 4 == 0,
                overrides: value & 8 == 0,
                target_mac: source,
            };
            (address, if value & 4 == 0 { LOCAL_V6 } else { ALL_NODES }, message)
        }
        _ => (link_local, ALL_NODES, ndp::NdpMessage::RouterAdvertisement(advertisement(value, source))),
    };
    let mut l4 = vec![0; 512];
    let len = message.emit(src, dst, &mut l4);
    let packet = ip6(src, dst, protocol::ICMPV6, 0, 255, &l4[..len]);
    let dst_mac = if dst.is_multicast() { MacAddr::from_ipv6_multicast(dst) } else { LOCAL_MAC };
    frame(host, dst_mac, vlan, EtherType::IPV6, &packet)
}

const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Builds a router advertisement from the bits of `value`.
fn advertisement(value: u32, source: Option<MacAddr>) -> ndp::RouterAdvertisement {
    let lifetime = [0, 30, 7200, u32::MAX][value as usize >> 4 & 3];
    let mut prefixes = arrayvec::ArrayVec::new();
    prefixes.push(ndp::PrefixInfo {
        prefix: Ipv6Addr::new(0xfd00, 0, 0, (value >> 16 & 3) as u16, 0, 0, 0, 0),
        prefix_len: if value & 2 == 0 { 64 } else { (value >> 8) as u8 % 129 },
        on_link: value & 4 == 0,
        autonomous: value & 8 == 0,
        valid_lifetime_s: lifetime,
        preferred_lifetime_s: lifetime >> (value >> 6 & 1),
    });
    ndp::RouterAdvertisement {
        hop_limit: (value >> 24) as u8,
        managed: false,
        other: false,
        router_lifetime_s: lifetime.min(9000) as u16,
        reachable_time_ms: value >> 20 & 0xfff,
        retrans_timer_ms: value >> 12 & 0xfff,
        source_mac: source,
        mtu: (value & 0x80 != 0).then_some(1280 + (value >> 8 & 0xff)),
        prefixes,
    }
}

/// Splits a packet into fragments of about `size` payload bytes. `order`: 0 in order, 1 reversed, 2 without
/// the last, 3 the first one twice, 4 overlapping, 5 only the last. `ident` must differ between packets:
/// fragments of two packets reassembled to one would form a third, which the checksum of a datagram need not
/// detect.
pub fn fragments(packet: &[u8], size: usize, order: u8, ident: u16) -> Vec<Vec<u8>> {
    let v6 = packet.first().is_some_and(|b| b >> 4 == 6);
    let header_len = if v6 { 40 } else { 20 };
    let Some(payload) = packet.get(header_len..) else { return vec![packet.to_vec()] };
    let size = (size & !7).clamp(8, 1 << 14);
    if payload.len() <= size {
        return vec![packet.to_vec()];
    }
    let mut pieces: Vec<(usize, usize)> =
        (0..payload.len()).step_by(size).map(|at| (at, payload.len().min(at + size))).collect();
    match order % 6 {
        1 => pieces.reverse(),
        2 => drop(pieces.pop()),
        3 => pieces.push(pieces[0]),
        4 => pieces.insert(1, (0, payload.len().min(size + 8) & !7)),
        5 => drop(pieces.drain(..pieces.len() - 1)),
        _ => {}
    }
    let total = payload.len();
    pieces
        .into_iter()
        .map(|(at, end)| fragment(packet, header_len, ident, at, &payload[at..end], end < total))
        .collect()
}

fn fragment(
    packet: &[u8],
    header_len: usize,
    ident: u16,
    offset: usize,
    payload: &[u8],
    more: bool,
) -> Vec<u8> {
    let mut out = packet[..header_len].to_vec();
    if header_len == 40 {
        let header = ipv6::FragmentHeader {
            next_header: out[6],
            offset: offset as u16,
            more_fragments: more,
            ident: 0x1234_0000 | u32::from(ident),
        };
        out[6] = protocol::FRAGMENT;
        out[4..6].copy_from_slice(&((payload.len() + 8) as u16).to_be_bytes());
        let mut extension = [0; 8];
        header.emit(&mut extension);
        out.extend_from_slice(&extension);
    } else {
        out[2..4].copy_from_slice(&((20 + payload.len()) as u16).to_be_bytes());
        out[4..6].copy_from_slice(&ident.to_be_bytes());
        let field = (offset / 8) as u16 | u16::from(more) << 13;
        out[6..8].copy_from_slice(&field.to_be_bytes());
        fix_ipv4_checksum(&mut out);
    }
    out.extend_from_slice(payload);
    out
}

fn fix_ipv4_checksum(packet: &mut [u8]) {
    let len = usize::from(packet[0] & 15) * 4;
    if len >= 20 && packet.len() >= len {
        packet[10..12].fill(0);
        let sum = Sum::of(&packet[..len]).finish();
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
    }
}

/// Changes bytes of a frame. With `fix`, repairs its checksums, so that the stack does not drop the frame
/// because of them.
pub fn mutate(frame: &mut [u8], changes: u8, fix: bool, mut seed: u32) {
    if frame.len() < 15 {
        return;
    }
    for _ in 0..(changes % 8) + 1 {
        seed = seed.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
        // Changes mostly headers, which control decisions.
        let span = if seed & 3 == 0 { frame.len() - 12 } else { (frame.len() - 12).min(WORD_BYTES * 6) };
        let at = 12 + (seed >> 8) as usize % span;
        frame[at] ^= (seed >> 3) as u8 | 1;
    }
    if fix {
        fix_checksums(frame);
    }
}

fn fix_checksums(frame: &mut [u8]) {
    let start = if frame[12..14] == [0x81, 0] { 18 } else { 14 };
    let Some(packet) = frame.get_mut(start..) else { return };
    let (header_len, protocol, len) = match packet.first().map(|b| b >> 4) {
        Some(4) if packet.len() >= 20 => {
            fix_ipv4_checksum(packet);
            let total = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
            (usize::from(packet[0] & 15) * 4, packet[9], total)
        }
        Some(6) if packet.len() >= 40 => {
            (40, packet[6], 40 + usize::from(u16::from_be_bytes([packet[4], packet[5]])))
        }
        _ => return,
    };
    let len = len.min(packet.len());
    if header_len > len {
        return;
    }
    let (src, dst): (IpAddr, IpAddr) = if header_len == 40 && packet[0] >> 4 == 6 {
        let octets = |at: usize| <[u8; 16]>::try_from(&packet[at..at + 16]).unwrap_or_default();
        (Ipv6Addr::from_octets(octets(8)).into(), Ipv6Addr::from_octets(octets(24)).into())
    } else {
        let octets = |at: usize| [packet[at], packet[at + 1], packet[at + 2], packet[at + 3]];
        (Ipv4Addr::from_octets(octets(12)).into(), Ipv4Addr::from_octets(octets(16)).into())
    };
    let at = match protocol {
        protocol::TCP => 16,
        protocol::ICMP | protocol::ICMPV6 => 2,
        protocol::UDP => 6,
        _ => return,
    };
    let l4 = &mut packet[header_len..len];
    if l4.len() < at + 2 {
        return;
    }
    l4[at..at + 2].fill(0);
    let base = if protocol == protocol::ICMP { Sum::ZERO } else { pseudo(src, dst, protocol, l4.len()) };
    let sum = base.add(Sum::of(l4)).finish();
    l4[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}
