//! Parses received frames with the engine's views, and builds segments from a header template. All
//! connections to a destination share the template; only addresses, ports and sequence numbers differ.

use super::locals::{Local, Locals, sum_of};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use ginnel_stack::device::{RxChecksum, RxFrame, TxMeta};
use ginnel_stack::wire::checksum::{Sum, copy_and_sum, pseudo_v4, pseudo_v6};
use ginnel_stack::wire::ethernet::{self, EtherType};
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpHeader, TcpOptions, TcpSegment};
use ginnel_stack::wire::{MacAddr, arp, icmpv4, icmpv6, ipv4, ipv6, ndp, protocol, tcp};

/// Offset of the IP header.
pub(super) const IP_AT: usize = ethernet::Header::LEN;
/// Offset of the TCP header.
const TCP_AT_V4: usize = IP_AT + ipv4::Header::LEN;
const TCP_AT_V6: usize = IP_AT + ipv6::Header::LEN;
const HEAD_V4: usize = TCP_AT_V4 + TcpHeader::LEN;
const HEAD_V6: usize = TCP_AT_V6 + TcpHeader::LEN;
/// Hop limit (TTL) of all packets.
const HOP_LIMIT: u8 = 64;

/// A received packet that the generator handles.
#[derive(Debug)]
pub(super) enum ReceivedPacket<'a> {
    /// A TCP segment to one of the local addresses, with a correct checksum.
    Tcp(ReceivedSegment<'a>),
    Arp(arp::ArpPacket),
    Ndp {
        message: ndp::NdpMessage,
        src: Ipv6Addr,
        src_mac: MacAddr,
    },
    /// A router reports the path MTU to this address.
    TooBig {
        to: IpAddr,
        mtu: u32,
    },
}

/// A received TCP segment and its addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReceivedSegment<'a> {
    /// Index of the local address.
    pub local: u16,
    pub from: IpAddr,
    /// Source address of the frame.
    pub mac: MacAddr,
    pub segment: TcpSegment<'a>,
}

/// Parses a frame. Returns `None` if the frame is for another host, of no interest, or malformed.
#[inline]
pub(super) fn parse<'a>(frame: &RxFrame<'a>, mac: MacAddr, locals: &Locals) -> Option<ReceivedPacket<'a>> {
    let ethernet = ethernet::Header::parse(frame.bytes).ok()?;
    if ethernet.vlan.is_some() || !(ethernet.dst == mac || ethernet.dst.is_multicast()) {
        return None;
    }
    let packet = &frame.bytes[IP_AT..];
    match ethernet.ethertype {
        EtherType::IPV4 => {
            let header = ipv4::Header::parse(packet).ok()?;
            if !header.checksum_ok(packet) || header.is_fragment() {
                return None;
            }
            let bytes = header.payload(packet);
            let local = locals.number_v4(header.dst)?;
            if header.protocol != protocol::TCP {
                return too_big_v4(locals, header.protocol, bytes);
            }
            let at = IP_AT + usize::from(header.header_len);
            if !is_checksum_verified(frame, at) && !tcp_sum_v4(header.src, header.dst, bytes) {
                return None;
            }
            let segment = TcpSegment::parse(bytes).ok()?;
            Some(ReceivedPacket::Tcp(ReceivedSegment {
                local,
                from: header.src.into(),
                mac: ethernet.src,
                segment,
            }))
        }
        EtherType::IPV6 => parse_v6(frame, packet, ethernet.src, locals),
        EtherType::ARP => arp::ArpPacket::parse(packet).ok().map(ReceivedPacket::Arp),
        _ => None,
    }
}

fn tcp_sum_v4(src: Ipv4Addr, dst: Ipv4Addr, bytes: &[u8]) -> bool {
    pseudo_v4(src, dst, protocol::TCP, bytes.len()).add(Sum::of(bytes)).is_valid()
}

fn parse_v6<'a>(
    frame: &RxFrame<'a>,
    packet: &'a [u8],
    mac: MacAddr,
    locals: &Locals,
) -> Option<ReceivedPacket<'a>> {
    let header = ipv6::Header::parse(packet).ok()?;
    let bytes = header.payload(packet);
    match header.next_header {
        protocol::TCP => {
            let local = locals.number_v6(header.dst)?;
            let sum = || pseudo_v6(header.src, header.dst, protocol::TCP, bytes.len()).add(Sum::of(bytes));
            if !is_checksum_verified(frame, TCP_AT_V6) && !sum().is_valid() {
                return None;
            }
            let segment = TcpSegment::parse(bytes).ok()?;
            Some(ReceivedPacket::Tcp(ReceivedSegment { local, from: header.src.into(), mac, segment }))
        }
        protocol::ICMPV6 => match icmpv6::Message::parse(bytes, header.src, header.dst).ok()? {
            icmpv6::Message::Ndp(message) => {
                let message =
                    ndp::NdpMessage::parse(message, header.src, header.dst, header.hop_limit).ok()?;
                Some(ReceivedPacket::Ndp { message, src: header.src, src_mac: mac })
            }
            icmpv6::Message::PacketTooBig { mtu, quote } => {
                let quoted = ipv6::Header::parse_quoted(quote).ok()?;
                // Accepted only if the quoted packet is a TCP segment from a local address, as for IPv4.
                locals.number_v6(quoted.src).filter(|_| quoted.next_header == protocol::TCP)?;
                Some(ReceivedPacket::TooBig { to: quoted.dst.into(), mtu })
            }
            _ => None,
        },
        _ => None,
    }
}

fn too_big_v4(locals: &Locals, proto: u8, bytes: &[u8]) -> Option<ReceivedPacket<'static>> {
    if proto != protocol::ICMP {
        return None;
    }
    match icmpv4::Message::parse(bytes).ok()? {
        icmpv4::Message::Unreachable { code: icmpv4::unreachable::FRAGMENTATION_NEEDED, mtu, quote } => {
            let (quoted, _) = ipv4::Header::parse_quoted(quote).ok()?;
            // Accepted only if the quoted packet is a TCP segment from a local address (compare RFC 5927 §4).
            locals.number_v4(quoted.src).filter(|_| quoted.protocol == protocol::TCP)?;
            Some(ReceivedPacket::TooBig { to: quoted.dst.into(), mtu: mtu.into() })
        }
        _ => None,
    }
}

/// Returns true if the device has verified the checksum of the segment at offset `at`.
#[inline]
fn is_checksum_verified(frame: &RxFrame<'_>, at: usize) -> bool {
    match frame.checksum {
        RxChecksum::Unverified => false,
        RxChecksum::Verified => true,
        RxChecksum::Partial { start, .. } => usize::from(start) == at,
    }
}

/// Header fields that differ between segments.
#[derive(Clone, Copy, Debug)]
pub(super) struct SegmentFields {
    pub port: u16,
    pub seq: SeqNumber,
    pub ack: SeqNumber,
    pub flags: TcpFlags,
}

/// Bytes of the timestamps option with the two NOPs before it.
pub(super) const TIMESTAMPS_BYTES: usize = 12;

/// Builds the timestamps option (RFC 7323 §3, appendix A).
#[inline]
pub(super) fn timestamps(value: u32, echo: u32) -> [u8; TIMESTAMPS_BYTES] {
    let mut option = [1, 1, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0];
    option[4..8].copy_from_slice(&value.to_be_bytes());
    option[8..].copy_from_slice(&echo.to_be_bytes());
    option
}

/// Builds the options of SYN: MSS, window scale, and timestamps if `value` is given. Returns them in a
/// buffer, and their length in bytes.
pub(super) fn syn_options(mss: u16, shift: u8, value: Option<u32>) -> ([u8; 8 + TIMESTAMPS_BYTES], usize) {
    let mut options = [0; 8 + TIMESTAMPS_BYTES];
    let [high, low] = mss.to_be_bytes();
    options[..8].copy_from_slice(&[2, 4, high, low, 1, 3, 3, shift]);
    match value {
        Some(value) => {
            options[8..].copy_from_slice(&timestamps(value, 0));
            (options, 8 + TIMESTAMPS_BYTES)
        }
        None => (options, 8),
    }
}

/// The headers of all segments to one destination.
#[derive(Clone, Debug)]
pub(super) struct Template {
    /// Ethernet, IP and TCP header; the fields of a connection are 0.
    head: [u8; HEAD_V6],
    is_v4: bool,
    /// Checksum of the IPv4 header without source address and length.
    ip_sum: Sum,
    /// Checksum of the pseudo-header's destination address and protocol.
    pseudo: Sum,
    /// Checksum of destination port and window.
    tcp_sum: Sum,
    /// True if the device computes checksums.
    offload: bool,
}

impl Template {
    /// Creates the headers for frames from `mac` to `next_hop` with the destination `target`. All segments
    /// advertise `window`.
    pub fn new(target: SocketAddr, mac: MacAddr, next_hop: MacAddr, window: u16, offload: bool) -> Self {
        let mut head = [0; HEAD_V6];
        let ethertype = if target.is_ipv4() { EtherType::IPV4 } else { EtherType::IPV6 };
        ethernet::Header::new(next_hop, mac, None, ethertype).emit(&mut head);
        let ip = &mut head[IP_AT..];
        let (tcp_at, ip_sum) = match target.ip() {
            IpAddr::V4(dst) => {
                header_v4(Ipv4Addr::UNSPECIFIED, dst, 0).emit(ip);
                ip[10..12].fill(0);
                (TCP_AT_V4, Sum::of(&ip[..ipv4::Header::LEN]))
            }
            IpAddr::V6(dst) => {
                header_v6(Ipv6Addr::UNSPECIFIED, dst, 0).emit(ip);
                (TCP_AT_V6, Sum::ZERO)
            }
        };
        let header = TcpHeader { dst_port: target.port(), window, ..TcpHeader::default() };
        tcp::emit(&header, &TcpOptions::default(), &mut head[tcp_at..]);
        Self {
            head,
            is_v4: target.is_ipv4(),
            ip_sum,
            pseudo: sum_of(target.ip()).add_u16(protocol::TCP.into()),
            tcp_sum: Sum::ZERO.add_u16(target.port()).add_u16(window),
            offload,
        }
    }

    /// Returns the length of the headers before options and payload, in bytes.
    #[inline]
    pub const fn head_len(&self) -> usize {
        if self.is_v4 { HEAD_V4 } else { HEAD_V6 }
    }

    /// Returns the offload request for the device.
    #[inline]
    pub fn meta(&self) -> TxMeta {
        let at = if self.is_v4 { TCP_AT_V4 } else { TCP_AT_V6 };
        let partial_checksum = self.offload.then_some((at as u16, TcpHeader::CHECKSUM_OFFSET as u16));
        TxMeta { partial_checksum, ..TxMeta::NONE }
    }

    /// Writes a segment. `out` has exactly the length of headers, options (a multiple of four bytes) and
    /// payload.
    #[inline]
    pub fn write(&self, out: &mut [u8], from: &Local, fields: SegmentFields, options: &[u8], payload: &[u8]) {
        let (head, rest) = out.split_at_mut(self.head_len());
        let (option_room, payload_room) = rest.split_at_mut(options.len());
        // Most segments have no options and many no payload, and copying zero bytes would still be a call.
        if !options.is_empty() {
            option_room.copy_from_slice(options);
        }
        let tcp_len = TcpHeader::LEN + options.len() + payload.len();
        let payload_sum = if payload.is_empty() {
            Sum::ZERO
        } else if self.offload {
            payload_room.copy_from_slice(payload);
            Sum::ZERO
        } else {
            copy_and_sum(payload, payload_room)
        };
        if let (Some(head), IpAddr::V4(address)) = (head.first_chunk_mut::<HEAD_V4>(), from.address)
            && self.is_v4
        {
            head.copy_from_slice(&self.head[..HEAD_V4]);
            let total_len = (ipv4::Header::LEN + tcp_len) as u16;
            head[16..18].copy_from_slice(&total_len.to_be_bytes());
            let sum = self.ip_sum.add_u16(total_len).add(from.sum).finish();
            head[24..26].copy_from_slice(&sum.to_be_bytes());
            head[26..30].copy_from_slice(&address.octets());
        } else if let (Some(head), IpAddr::V6(address)) = (head.first_chunk_mut::<HEAD_V6>(), from.address) {
            head.copy_from_slice(&self.head);
            head[18..20].copy_from_slice(&(tcp_len as u16).to_be_bytes());
            head[22..38].copy_from_slice(&address.octets());
        }
        let pseudo = self.pseudo.add(from.sum).add_u16(tcp_len as u16);
        if let Some(tcp) = head.last_chunk_mut::<{ TcpHeader::LEN }>() {
            let SegmentFields { port, seq: SeqNumber(seq), ack: SeqNumber(ack), flags } = fields;
            let control = ((TcpHeader::LEN + options.len()) as u16) << 10 | u16::from(flags.0);
            tcp[0..2].copy_from_slice(&port.to_be_bytes());
            tcp[4..8].copy_from_slice(&seq.to_be_bytes());
            tcp[8..12].copy_from_slice(&ack.to_be_bytes());
            tcp[12..14].copy_from_slice(&control.to_be_bytes());
            let checksum = if self.offload {
                pseudo.fold()
            } else {
                let sum = pseudo.add(self.tcp_sum).add(Sum::of(options)).add(payload_sum);
                let halves = |sum: Sum, word: u32| sum.add_u16((word >> 16) as u16).add_u16(word as u16);
                halves(halves(sum, seq), ack).add_u16(port).add_u16(control).finish()
            };
            tcp[16..18].copy_from_slice(&checksum.to_be_bytes());
        }
    }
}

fn header_v4(src: Ipv4Addr, dst: Ipv4Addr, len: usize) -> ipv4::Header {
    ipv4::Header {
        dscp: 0,
        ecn: 0,
        total_len: len as u16,
        ident: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        ttl: HOP_LIMIT,
        protocol: protocol::TCP,
        src,
        dst,
        header_len: ipv4::Header::LEN as u8,
    }
}

fn header_v6(src: Ipv6Addr, dst: Ipv6Addr, len: usize) -> ipv6::Header {
    ipv6::Header {
        dscp: 0,
        ecn: 0,
        flow_label: 0,
        payload_len: len as u16,
        next_header: protocol::TCP,
        hop_limit: HOP_LIMIT,
        src,
        dst,
    }
}

/// Longest ARP or NDP frame that is built here.
pub(super) const NEIGHBOUR_BYTES: usize = IP_AT + ipv6::Header::LEN + 32;

/// Writes an ARP packet as a frame and returns its length.
pub(super) fn arp(packet: &arp::ArpPacket, to: MacAddr, out: &mut [u8]) -> usize {
    ethernet::Header::new(to, packet.sender_mac, None, EtherType::ARP).emit(out);
    IP_AT + packet.emit(&mut out[IP_AT..])
}

/// Addresses of a neighbour discovery message.
pub(super) struct NdpAddresses {
    pub src: Ipv6Addr,
    pub dst: Ipv6Addr,
    pub src_mac: MacAddr,
    pub dst_mac: MacAddr,
}

/// Writes a neighbour discovery message as a frame and returns its length.
pub(super) fn ndp(message: &ndp::NdpMessage, addresses: NdpAddresses, out: &mut [u8]) -> usize {
    let NdpAddresses { src, dst, src_mac, dst_mac } = addresses;
    ethernet::Header::new(dst_mac, src_mac, None, EtherType::IPV6).emit(out);
    let at = IP_AT + ipv6::Header::LEN;
    let len = message.emit(src, dst, &mut out[at..]);
    let header =
        ipv6::Header { next_header: protocol::ICMPV6, hop_limit: ndp::HOP_LIMIT, ..header_v6(src, dst, len) };
    header.emit(&mut out[IP_AT..]);
    at + len
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_stack::wire::gso::complete_checksum;

    const OURS: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
    const THEIRS: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

    fn view(bytes: &[u8]) -> RxFrame<'_> {
        RxFrame::new(bytes)
    }

    /// Builds a segment and parses it again. The target is a local address, too, so that the segment returns
    /// unchanged.
    fn round_trip(own: &str, target: &str, offload: bool, options: &[u8], payload: &[u8]) {
        let target: SocketAddr = target.parse().unwrap();
        let locals = Locals::new([own.parse().unwrap(), target.ip()]);
        let template = Template::new(target, THEIRS, OURS, 4321, offload);
        let from = locals.get(locals.number(own.parse().unwrap()).unwrap());
        let fields = SegmentFields {
            port: 40_001,
            seq: SeqNumber(u32::MAX),
            ack: SeqNumber(0x8000_ffff),
            flags: TcpFlags::PSH | TcpFlags::ACK,
        };
        let mut frame = vec![0xa5; template.head_len() + options.len() + payload.len()];
        template.write(&mut frame, from, fields, options, payload);
        if let Some((start, offset)) = template.meta().partial_checksum {
            complete_checksum(&mut frame, start.into(), offset.into()).unwrap();
        }
        let Some(ReceivedPacket::Tcp(received)) = parse(&view(&frame), OURS, &locals) else {
            panic!("{own} {target} {offload}: not understood")
        };
        let header = received.segment.header;
        assert_eq!((header.src_port, header.dst_port, header.window), (40_001, target.port(), 4321));
        assert_eq!((header.seq, header.ack, header.flags), (fields.seq, fields.ack, fields.flags));
        assert_eq!((received.segment.options, received.segment.payload), (options, payload));
        assert_eq!((received.from, received.mac), (own.parse().unwrap(), THEIRS));
        // With a bit of any byte flipped, the frame is not parsed. The traffic class, flow label and hop
        // limit of IPv6 are exempt: no checksum covers them.
        for at in 14..frame.len() {
            let mut wrong = frame.clone();
            wrong[at] ^= 1 << (at % 8);
            let exempt = target.is_ipv6() && matches!(at, 14..18 | 21);
            let parsed = parse(&view(&wrong), OURS, &locals);
            assert!(exempt || parsed.is_none(), "byte {at}: {parsed:?}");
        }
        for len in 0..frame.len() {
            assert!(parse(&view(&frame[..len]), OURS, &locals).is_none(), "{len} bytes");
        }
        let mut other = frame.clone();
        other[5] ^= 4;
        assert!(parse(&view(&other), OURS, &locals).is_none(), "a frame for somebody else");
    }

    #[test]
    fn segments_survive_writing_and_parsing() {
        for offload in [false, true] {
            for payload in [&b""[..], b"odd", b"GET / HTTP/1.1\r\n\r\n"] {
                for options in [&[][..], &[2, 4, 5, 0xb4, 1, 3, 3, 7]] {
                    round_trip("10.0.0.2", "10.255.0.1:80", offload, options, payload);
                    round_trip("fd00::2", "[fd00::1]:8080", offload, options, payload);
                }
            }
        }
    }

    #[test]
    fn packet_too_big_must_quote_a_tcp_segment_of_ours() {
        let [own, peer, stranger] =
            ["fd00::2", "fd00::1", "fd00::3"].map(|ip| ip.parse::<Ipv6Addr>().unwrap());
        let locals = Locals::new([own.into()]);
        let packet = |src: Ipv6Addr, dst: Ipv6Addr, next_header: u8, payload: &[u8]| {
            let mut bytes = vec![0x60, 0, 0, 0, 0, payload.len() as u8, next_header, 64];
            bytes.extend([src.octets(), dst.octets()].concat());
            bytes.extend(payload);
            bytes
        };
        for (source, next_header, is_accepted) in
            [(own, protocol::TCP, true), (own, protocol::UDP, false), (stranger, protocol::TCP, false)]
        {
            let quote = packet(source, peer, next_header, &[0; 20]);
            let message = icmpv6::Message::PacketTooBig { mtu: 1300, quote: &quote };
            let mut bytes = vec![0; message.encoded_len()];
            message.emit(peer, own, &mut bytes);
            let packet = packet(peer, own, protocol::ICMPV6, &bytes);
            let frame = [&OURS.0[..], &THEIRS.0, &[0x86, 0xdd], &packet].concat();
            let parsed = parse(&view(&frame), OURS, &locals);
            match parsed {
                Some(ReceivedPacket::TooBig { to, mtu: 1300 }) => assert!(is_accepted && to == peer),
                other => assert!(!is_accepted && other.is_none(), "{other:?}"),
            }
        }
    }

    #[test]
    fn neighbour_messages_survive_writing_and_parsing() {
        let own: Ipv6Addr = "fd00::2".parse().unwrap();
        let locals = Locals::new([own.into()]);
        let message =
            ndp::NdpMessage::NeighbourSolicitation { target: own, source_mac: Some(THEIRS), nonce: None };
        let mut frame = [0; NEIGHBOUR_BYTES];
        let group = ndp::solicited_node(own);
        let to = MacAddr::from_ipv6_multicast(group);
        let src = "fd00::1".parse().unwrap();
        let addresses = NdpAddresses { src, dst: group, src_mac: THEIRS, dst_mac: to };
        let len = ndp(&message, addresses, &mut frame);
        match parse(&view(&frame[..len]), OURS, &locals) {
            Some(ReceivedPacket::Ndp { message: seen, src_mac, .. }) => {
                assert_eq!((seen, src_mac), (message, THEIRS))
            }
            other => panic!("{other:?}"),
        }
    }
}
