//! Serializes the packets that a script injects and parses those that the stack sends.
//!
//! This module is independent of the engine's own `wire` module, so that an error there is not mirrored here.

use super::ast::{Ecn, Flags, IcmpKind, IpVersion, TcpOpt, TsValue};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const TCP: u8 = 6;
const ICMPV4: u8 = 1;
const ICMPV6: u8 = 58;

/// Returns the stack's address and the remote address, which the script plays.
pub fn addresses(ip: IpVersion) -> (IpAddr, IpAddr) {
    match ip {
        IpVersion::V4 => (Ipv4Addr::new(192, 0, 2, 1).into(), Ipv4Addr::new(192, 0, 2, 2).into()),
        IpVersion::V6 => {
            let host = |n| Ipv6Addr::new(0xfd00, 0x6769, 0x6e6e, 0, 0, 0, 0, n).into();
            (host(1), host(2))
        }
    }
}

/// A TCP segment with the numbers on the wire.
#[derive(Clone, Debug, PartialEq)]
pub struct WireSegment {
    /// ECN field.
    pub ecn: Ecn,
    /// TTL or hop limit.
    pub ttl: u8,
    /// DF of a packet that was parsed; `None` over IPv6 and in packets that are sent.
    pub dont_fragment: Option<bool>,
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number, even without flag ACK.
    pub ack: u32,
    /// Flags.
    pub flags: Flags,
    /// Window field of the header.
    pub window: u16,
    /// Urgent pointer.
    pub urgent: u16,
    /// Options; numbers as on the wire.
    pub options: Vec<TcpOpt>,
    /// Payload.
    pub payload: Vec<u8>,
}

/// Deliberate corruption of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Corruption {
    /// Makes the checksum wrong.
    pub checksum: bool,
    /// Overrides the data offset.
    pub data_offset: Option<u8>,
}

/// An ICMP error with the numbers on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireIcmp {
    /// Type and code.
    pub kind: IcmpKind,
    /// Next-hop MTU.
    pub mtu: u32,
    /// Port of the stack.
    pub local_port: u16,
    /// Port of the remote side.
    pub remote_port: u16,
    /// Sequence number of the quoted segment.
    pub seq: u32,
    /// Flags of the quoted segment.
    pub flags: Flags,
    /// Payload length of the quoted segment in bytes.
    pub len: u16,
    /// TTL or hop limit of the ICMP packet.
    pub ttl: u8,
    /// TTL or hop limit of the quoted segment.
    pub quoted_ttl: u8,
}

/// Returns the length of the IP and TCP headers of a TCP packet with more than `size` bytes of payload;
/// `None` for other packets.
pub fn headers_of_merged(packet: &[u8], size: u16) -> Option<u16> {
    let (ip, protocol) = match packet.first()? >> 4 {
        4 => (usize::from(packet[0] & 15) * 4, *packet.get(9)?),
        _ => (40, *packet.get(6)?),
    };
    let headers = ip + usize::from(*packet.get(ip + 12)? >> 4) * 4;
    (protocol == TCP && packet.len() > headers + usize::from(size)).then_some(headers as u16)
}

fn ones_complement_sum(bytes: &[u8], start: u32) -> u32 {
    let sum = bytes.chunks(2).fold(u64::from(start), |sum, pair| {
        sum + u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]))
    });
    let folded = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
    ((folded & 0xffff) + (folded >> 16)) as u32
}

fn address_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// Returns the sum of the transport bytes and the pseudo-header; 0xffff if the checksum in the bytes is
/// correct.
fn transport_sum(src: IpAddr, dst: IpAddr, protocol: u8, bytes: &[u8]) -> u16 {
    let mut pseudo = address_bytes(src);
    pseudo.extend(address_bytes(dst));
    pseudo.extend((bytes.len() as u32).to_be_bytes());
    pseudo.extend([0, protocol]);
    let sum = ones_complement_sum(bytes, ones_complement_sum(&pseudo, 0));
    ((sum & 0xffff) + (sum >> 16)) as u16
}

fn ecn_bits(ecn: Ecn) -> u8 {
    match ecn {
        Ecn::NotEct => 0,
        Ecn::Ect1 => 1,
        Ecn::Ect0 | Ecn::AnyEct => 2,
        Ecn::Ce => 3,
    }
}

fn ip_packet(src: IpAddr, dst: IpAddr, protocol: u8, ecn: Ecn, ttl: u8, body: &[u8]) -> Vec<u8> {
    let mut packet;
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            let total = (20 + body.len()) as u16;
            packet = vec![0x45, ecn_bits(ecn)];
            packet.extend(total.to_be_bytes());
            packet.extend([0, 0, 0x40, 0, ttl, protocol, 0, 0]);
            packet.extend(src.octets());
            packet.extend(dst.octets());
            let sum = !(ones_complement_sum(&packet, 0) as u16);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        _ => {
            packet = vec![0x60, ecn_bits(ecn) << 4, 0, 0];
            packet.extend((body.len() as u16).to_be_bytes());
            packet.extend([protocol, ttl]);
            packet.extend(address_bytes(src));
            packet.extend(address_bytes(dst));
        }
    }
    packet.extend(body);
    packet
}

fn option_bytes(option: &TcpOpt, out: &mut Vec<u8>) {
    match option {
        TcpOpt::Eol => out.push(0),
        TcpOpt::Nop => out.push(1),
        TcpOpt::Mss(value) => {
            out.extend([2, 4]);
            let value = match value {
                Some(super::ast::MssValue::Number(n)) => *n,
                _ => 0,
            };
            out.extend(value.to_be_bytes());
        }
        TcpOpt::Wscale(shift) => out.extend([3, 3, shift.unwrap_or(0)]),
        TcpOpt::SackOk => out.extend([4, 2]),
        TcpOpt::Sack(blocks) => {
            out.extend([5, 2 + 8 * blocks.len() as u8]);
            for (left, right) in blocks {
                out.extend(left.to_be_bytes());
                out.extend(right.to_be_bytes());
            }
        }
        TcpOpt::Ts { val, ecr } => {
            out.extend([8, 10]);
            for value in [val, ecr] {
                let number = if let TsValue::Number(n) = value { *n } else { 0 };
                out.extend(number.to_be_bytes());
            }
        }
        TcpOpt::Raw(bytes) => out.extend(bytes),
    }
}

impl WireSegment {
    /// Returns the IP packet from `src` to `dst`. Options are padded with zeros to a multiple of four bytes.
    pub fn to_bytes(&self, src: IpAddr, dst: IpAddr, spoil: Corruption) -> Vec<u8> {
        let mut options = Vec::new();
        self.options.iter().for_each(|o| option_bytes(o, &mut options));
        options.resize(options.len().next_multiple_of(4), 0);
        let data_offset = spoil.data_offset.unwrap_or(5 + (options.len() / 4) as u8);
        let mut tcp = Vec::new();
        tcp.extend(self.src_port.to_be_bytes());
        tcp.extend(self.dst_port.to_be_bytes());
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        tcp.extend((u16::from(data_offset) << 12 | self.flags.0).to_be_bytes());
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0, 0]);
        tcp.extend(self.urgent.to_be_bytes());
        tcp.extend(&options);
        tcp.extend(&self.payload);
        let mut sum = !transport_sum(src, dst, TCP, &tcp);
        if spoil.checksum {
            sum = sum.wrapping_add(1);
        }
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        ip_packet(src, dst, TCP, self.ecn, self.ttl, &tcp)
    }

    /// Parses a packet from `src` to `dst`. Returns `Ok(None)` if it is not a TCP packet between the two
    /// addresses.
    ///
    /// # Errors
    /// A description of the malformed field.
    pub fn from_bytes(packet: &[u8], src: IpAddr, dst: IpAddr) -> Result<Option<Self>, String> {
        let Some((protocol, ecn, ttl, header_len)) = ip_header(packet, src, dst)? else { return Ok(None) };
        if protocol != TCP {
            return Ok(None);
        }
        let tcp = &packet[header_len..];
        let be16 = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
        let be32 = |at: usize| u32::from(be16(at)) << 16 | u32::from(be16(at + 2));
        if tcp.len() < 20 {
            return Err("TCP header is cut short".into());
        }
        let data_offset = usize::from(tcp[12] >> 4) * 4;
        if data_offset < 20 || data_offset > tcp.len() {
            return Err(format!("data offset is {data_offset} bytes of {}", tcp.len()));
        }
        if transport_sum(src, dst, TCP, tcp) != 0xffff {
            return Err("TCP checksum is wrong".into());
        }
        let ecn = match ecn {
            0 => Ecn::NotEct,
            1 => Ecn::Ect1,
            2 => Ecn::Ect0,
            _ => Ecn::Ce,
        };
        Ok(Some(Self {
            ecn,
            ttl,
            dont_fragment: src.is_ipv4().then(|| packet[6] & 0x40 != 0),
            src_port: be16(0),
            dst_port: be16(2),
            seq: be32(4),
            ack: be32(8),
            flags: Flags(be16(12) & 0x1ff),
            window: be16(14),
            urgent: be16(18),
            options: parse_options(&tcp[20..data_offset]),
            payload: tcp[data_offset..].to_vec(),
        }))
    }
}

/// Returns protocol, ECN bits, TTL and header length, if the packet goes from `src` to `dst`.
fn ip_header(packet: &[u8], src: IpAddr, dst: IpAddr) -> Result<Option<(u8, u8, u8, usize)>, String> {
    let between = |from: usize, len: usize| {
        packet.len() >= from + 2 * len
            && packet[from..from + len] == address_bytes(src)[..]
            && packet[from + len..from + 2 * len] == address_bytes(dst)[..]
    };
    match (packet.first().map(|b| b >> 4), src) {
        (Some(4), IpAddr::V4(_)) if between(12, 4) => {
            let header_len = usize::from(packet[0] & 15) * 4;
            let total = usize::from(u16::from_be_bytes([packet[2], packet[3]]));
            if header_len < 20 || total != packet.len() || header_len > total {
                return Err(format!(
                    "IPv4 header of {header_len} bytes, total length {total} of {}",
                    packet.len()
                ));
            }
            if ones_complement_sum(&packet[..header_len], 0) != 0xffff {
                return Err("IPv4 header checksum is wrong".into());
            }
            if packet[6] & 0x3f != 0 || packet[7] != 0 {
                return Err("a TCP segment was fragmented".into());
            }
            Ok(Some((packet[9], packet[1] & 3, packet[8], header_len)))
        }
        (Some(6), IpAddr::V6(_)) if between(8, 16) => {
            let length = usize::from(u16::from_be_bytes([packet[4], packet[5]]));
            if length + 40 != packet.len() {
                return Err(format!("IPv6 payload length {length} of {}", packet.len() - 40));
            }
            Ok(Some((packet[6], packet[1] >> 4 & 3, packet[7], 40)))
        }
        _ => Ok(None),
    }
}

fn parse_options(mut bytes: &[u8]) -> Vec<TcpOpt> {
    use super::ast::MssValue;
    let mut options = Vec::new();
    while let Some(&kind) = bytes.first() {
        if kind <= 1 {
            options.push(if kind == 0 { TcpOpt::Eol } else { TcpOpt::Nop });
            bytes = &bytes[1..];
            continue;
        }
        let len = bytes.get(1).map_or(0, |len| usize::from(*len));
        if len < 2 || len > bytes.len() {
            options.push(TcpOpt::Raw(bytes.to_vec()));
            break;
        }
        let (option, rest) = bytes.split_at(len);
        let be32 =
            |at: usize| u32::from_be_bytes([option[at], option[at + 1], option[at + 2], option[at + 3]]);
        options.push(match (kind, len) {
            (2, 4) => TcpOpt::Mss(Some(MssValue::Number(u16::from_be_bytes([option[2], option[3]])))),
            (3, 3) => TcpOpt::Wscale(Some(option[2])),
            (4, 2) => TcpOpt::SackOk,
            (5, _) if len % 8 == 2 => {
                TcpOpt::Sack((0..len / 8).map(|i| (be32(2 + 8 * i), be32(6 + 8 * i))).collect())
            }
            (8, 10) => TcpOpt::Ts { val: TsValue::Number(be32(2)), ecr: TsValue::Number(be32(6)) },
            _ => TcpOpt::Raw(option.to_vec()),
        });
        bytes = rest;
    }
    options
}

impl WireIcmp {
    /// Returns the ICMP packet that `remote` sends about a segment from `local` to `remote`.
    pub fn to_bytes(self, local: IpAddr, remote: IpAddr) -> Vec<u8> {
        let quoted = WireSegment {
            ecn: Ecn::NotEct,
            ttl: self.quoted_ttl,
            dont_fragment: None,
            src_port: self.local_port,
            dst_port: self.remote_port,
            seq: self.seq,
            ack: 0,
            flags: self.flags,
            window: 0,
            urgent: 0,
            options: Vec::new(),
            payload: vec![0; self.len.into()],
        };
        let mut quote = quoted.to_bytes(local, remote, Corruption::default());
        let v4 = local.is_ipv4();
        // RFC 792 requires the header and 8 bytes, RFC 1812 and 4443 more; routers quote the whole TCP header
        // today.
        quote.truncate(if v4 { 40 } else { 60 });
        let (kind, code) = if v4 { icmpv4_type(self.kind) } else { icmpv6_type(self.kind) };
        let mut body = vec![kind, code, 0, 0];
        match (self.kind, v4) {
            (IcmpKind::FragNeeded, true) => body.extend([0, 0, (self.mtu >> 8) as u8, self.mtu as u8]),
            (IcmpKind::FragNeeded, false) => body.extend(self.mtu.to_be_bytes()),
            // Pointer to the next header field of the IPv6 header.
            (IcmpKind::ProtocolUnreachable, false) => body.extend([0, 0, 0, 6]),
            _ => body.extend([0; 4]),
        }
        body.extend(quote);
        let protocol = if v4 { ICMPV4 } else { ICMPV6 };
        let sum = if v4 {
            ones_complement_sum(&body, 0) as u16
        } else {
            transport_sum(remote, local, ICMPV6, &body)
        };
        body[2..4].copy_from_slice(&(!sum).to_be_bytes());
        ip_packet(remote, local, protocol, Ecn::NotEct, self.ttl, &body)
    }
}

fn icmpv4_type(kind: IcmpKind) -> (u8, u8) {
    match kind {
        IcmpKind::NetUnreachable => (3, 0),
        IcmpKind::HostUnreachable => (3, 1),
        IcmpKind::ProtocolUnreachable => (3, 2),
        IcmpKind::PortUnreachable => (3, 3),
        IcmpKind::FragNeeded => (3, 4),
        IcmpKind::SourceRouteFailed => (3, 5),
        IcmpKind::NetUnknown => (3, 6),
        IcmpKind::HostUnknown => (3, 7),
        IcmpKind::SourceHostIsolated => (3, 8),
        IcmpKind::AdminProhibited => (3, 13),
        IcmpKind::TtlExceeded => (11, 0),
        IcmpKind::ReassemblyTimeExceeded => (11, 1),
        IcmpKind::SourceQuench => (4, 0),
        IcmpKind::ParameterProblem => (12, 0),
    }
}

fn icmpv6_type(kind: IcmpKind) -> (u8, u8) {
    match kind {
        IcmpKind::NetUnreachable | IcmpKind::NetUnknown => (1, 0),
        IcmpKind::AdminProhibited => (1, 1),
        IcmpKind::HostUnreachable | IcmpKind::HostUnknown | IcmpKind::SourceHostIsolated => (1, 3),
        IcmpKind::PortUnreachable => (1, 4),
        IcmpKind::SourceRouteFailed => (1, 6),
        IcmpKind::FragNeeded => (2, 0),
        IcmpKind::TtlExceeded => (3, 0),
        IcmpKind::ReassemblyTimeExceeded => (3, 1),
        IcmpKind::ProtocolUnreachable => (4, 1),
        // IPv6 has no source quench; an erroneous header field is the nearest soft error.
        IcmpKind::SourceQuench | IcmpKind::ParameterProblem => (4, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::script::ast::MssValue;

    fn sample() -> WireSegment {
        WireSegment {
            ecn: Ecn::Ect0,
            ttl: 64,
            dont_fragment: None,
            src_port: 8080,
            dst_port: 40001,
            seq: 0xffff_fff0,
            ack: 77,
            flags: Flags::PSH.with(Flags::ACK),
            window: 1234,
            urgent: 0,
            options: vec![
                TcpOpt::Mss(Some(MssValue::Number(1460))),
                TcpOpt::SackOk,
                TcpOpt::Ts { val: TsValue::Number(5), ecr: TsValue::Number(6) },
                TcpOpt::Sack(vec![(1, 2), (3, 4)]),
                TcpOpt::Nop,
                TcpOpt::Nop,
            ],
            payload: b"hello".to_vec(),
        }
    }

    #[test]
    fn segment_is_parsed_as_serialized() {
        for ip in [IpVersion::V4, IpVersion::V6] {
            let (local, remote) = addresses(ip);
            let bytes = sample().to_bytes(local, remote, Corruption::default());
            let parsed = WireSegment::from_bytes(&bytes, local, remote).unwrap().unwrap();
            assert_eq!(parsed.dont_fragment.is_some(), ip == IpVersion::V4);
            assert_eq!(WireSegment { dont_fragment: None, ..parsed }, sample());
        }
    }

    #[test]
    fn corrupted_segment_is_rejected() {
        let (local, remote) = addresses(IpVersion::V4);
        let bytes = sample().to_bytes(local, remote, Corruption { checksum: true, data_offset: None });
        assert!(WireSegment::from_bytes(&bytes, local, remote).unwrap_err().contains("checksum"));
        let bytes = sample().to_bytes(local, remote, Corruption { checksum: false, data_offset: Some(4) });
        assert!(WireSegment::from_bytes(&bytes, local, remote).unwrap_err().contains("data offset"));
    }

    #[test]
    fn other_packets_are_ignored() {
        let (local, remote) = addresses(IpVersion::V6);
        assert_eq!(WireSegment::from_bytes(&[0x45, 0, 0, 20], local, remote), Ok(None));
        assert_eq!(WireSegment::from_bytes(&[], local, remote), Ok(None));
        let (local4, remote4) = addresses(IpVersion::V4);
        let bytes = sample().to_bytes(local4, remote4, Corruption::default());
        assert_eq!(WireSegment::from_bytes(&bytes, remote4, local4), Ok(None));
    }
}
