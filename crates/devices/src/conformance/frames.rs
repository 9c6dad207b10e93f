//! Frames of the suite: plain frames of any size, and TCP and UDP packets with and without offloads.

use ginnel_stack::device::{Capabilities, Gso, GsoKind, Label, RxChecksum, RxFrame, TxMeta};
use ginnel_stack::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use std::net::{Ipv4Addr, Ipv6Addr};

/// Experimental EtherType of plain frames (IEEE 802, "local experimental 1").
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
const MAGIC: [u8; 4] = *b"GNNL";
const SOURCE_4: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const TARGET_4: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const SOURCE_6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 1);
const TARGET_6: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2);
const ETHERNET_BYTES: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;
const CWR: u8 = 0x80;
const FIN_PSH: u8 = 0x09;

/// A frame to send.
#[derive(Clone)]
pub(super) struct TestFrame {
    pub(super) bytes: Vec<u8>,
    pub(super) meta: TxMeta,
}

/// A frame of the suite that was received.
pub(super) struct ReceivedFrame {
    pub(super) bytes: Vec<u8>,
    pub(super) label: Label,
    checksum: RxChecksum,
    gso: Option<Gso>,
}

impl TestFrame {
    /// Returns a frame of `len` ≥ 22 bytes, or less if the MTU is smaller, that contains its number and a
    /// pattern that depends on it.
    pub(super) fn plain(sender: Capabilities, number: u32, len: usize) -> Self {
        let len = len.min(sender.mtu + ETHERNET_BYTES);
        let mut bytes = vec![0x02, 0x77, 0, 0, 0, 0x77];
        bytes.extend(sender.mac);
        bytes.extend(ETHERTYPE);
        bytes.extend(MAGIC);
        bytes.extend(number.to_be_bytes());
        bytes.extend((bytes.len()..len).map(|at| pattern(number, at)));
        Self { bytes, meta: TxMeta::default() }
    }

    pub(super) fn payload_len(&self) -> usize {
        payload_len(&self.bytes)
    }
}

impl ReceivedFrame {
    /// Parses a received frame. Returns `None` for frames that the suite did not send.
    pub(super) fn of(frame: &RxFrame<'_>) -> Option<Self> {
        let plain = frame.bytes.get(12..14) == Some(&ETHERTYPE) && frame.bytes.get(14..18) == Some(&MAGIC);
        let ours = plain || TestPacket::parse(frame.bytes).is_some();
        ours.then(|| Self {
            bytes: frame.bytes.to_vec(),
            label: frame.label,
            checksum: frame.checksum,
            gso: frame.gso,
        })
    }

    pub(super) fn payload_len(&self) -> usize {
        payload_len(&self.bytes)
    }
}

fn payload_len(bytes: &[u8]) -> usize {
    TestPacket::parse(bytes).map_or(bytes.len(), |packet| bytes.len() - packet.payload_at)
}

fn pattern(number: u32, at: usize) -> u8 {
    (number as usize * 31 + at * 7 + (at >> 8) * 13) as u8
}

/// A TCP or UDP packet of the suite.
struct TestPacket {
    is_v6: bool,
    protocol: u8,
    transport_at: usize,
    payload_at: usize,
    number: u16,
}

impl TestPacket {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (six, protocol, transport_at) = match bytes.get(12..14)? {
            [0x08, 0x00] => {
                (bytes.get(26..34)? == [SOURCE_4.octets(), TARGET_4.octets()].concat()).then_some(())?;
                (false, bytes[23], ETHERNET_BYTES + 20)
            }
            [0x86, 0xdd] => {
                (bytes.get(22..54)? == [SOURCE_6.octets(), TARGET_6.octets()].concat()).then_some(())?;
                (true, bytes[20], ETHERNET_BYTES + 40)
            }
            _ => return None,
        };
        let transport = bytes.get(transport_at..)?;
        let number = u16::from_be_bytes([*transport.first()?, *transport.get(1)?]);
        let header_len = if protocol == TCP { usize::from(*transport.get(12)? >> 4) * 4 } else { 8 };
        Some(Self { is_v6: six, protocol, transport_at, payload_at: transport_at + header_len, number })
    }

    fn pseudo(&self, transport_len: usize) -> Sum {
        if self.is_v6 {
            pseudo_v6(SOURCE_6, TARGET_6, self.protocol, transport_len)
        } else {
            pseudo_v4(SOURCE_4, TARGET_4, self.protocol, transport_len)
        }
    }

    fn checksum_offset(&self) -> usize {
        if self.protocol == TCP { 16 } else { 6 }
    }
}

/// Parameters of a packet.
#[derive(Clone, Copy)]
struct PacketSpec {
    is_v6: bool,
    protocol: u8,
    payload: usize,
    partial_checksum: bool,
    /// Payload bytes of each segment, for a super-frame.
    segment: Option<usize>,
}

/// Returns packets of every kind that the sender supports, addressed to the MAC address of the other side.
pub(super) fn transport_frames(sender: Capabilities, target: [u8; 6]) -> Vec<TestFrame> {
    let mut recipes = Vec::new();
    for (six, protocol) in [(false, TCP), (false, UDP), (true, TCP), (true, UDP)] {
        let headers = if six { 40 } else { 20 } + if protocol == TCP { 32 } else { 8 };
        if sender.mtu < headers + 9 || (six && sender.mtu < 1280) {
            continue;
        }
        let segment = sender.mtu - headers;
        for payload in [1, 8, 9, segment / 2, segment - 1, segment] {
            recipes.push(PacketSpec {
                is_v6: six,
                protocol,
                payload,
                partial_checksum: false,
                segment: None,
            });
            if sender.tx_checksum {
                recipes.push(PacketSpec {
                    is_v6: six,
                    protocol,
                    payload,
                    partial_checksum: true,
                    segment: None,
                });
            }
        }
        if sender.gso_bytes_max < ETHERNET_BYTES + headers + 2 * segment || (protocol == UDP && !sender.uso) {
            continue;
        }
        // An IPv4 packet has at most 65,535 bytes including its header, an IPv6 packet as many after its
        // header; the limit of the device may be lower.
        let largest = (sender.gso_bytes_max - ETHERNET_BYTES - headers).min(65_535 - headers);
        for size in [segment, segment - 1, segment / 2] {
            for payload in [size + 1, 2 * size, 7 * size + size / 3, 40 * size + 1, largest] {
                // Linux segments a super-frame into at most 64 datagrams (UDP_MAX_SEGMENTS was 64 up to 6.8).
                let payload = payload.min(largest).min(if protocol == UDP { 64 * size } else { usize::MAX });
                recipes.push(PacketSpec {
                    is_v6: six,
                    protocol,
                    payload,
                    partial_checksum: true,
                    segment: Some(size),
                });
            }
        }
    }
    recipes
        .into_iter()
        .zip(1000..)
        .map(|(recipe, number)| build(recipe, number, sender.mac, target))
        .collect()
}

fn build(recipe: PacketSpec, number: u16, source: [u8; 6], target: [u8; 6]) -> TestFrame {
    let transport_len = recipe.payload + if recipe.protocol == TCP { 32 } else { 8 };
    let mut bytes = [target, source].concat();
    if recipe.is_v6 {
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        bytes.extend((transport_len as u16).to_be_bytes());
        bytes.extend([recipe.protocol, 64]);
        bytes.extend([SOURCE_6.octets(), TARGET_6.octets()].concat());
    } else {
        bytes.extend([0x08, 0x00, 0x45, 0]);
        bytes.extend((20 + transport_len as u16).to_be_bytes());
        bytes.extend([0, 0, 0x40, 0, 64, recipe.protocol, 0, 0]);
        bytes.extend([SOURCE_4.octets(), TARGET_4.octets()].concat());
        let checksum = Sum::of(&bytes[14..34]).finish();
        bytes[24..26].copy_from_slice(&checksum.to_be_bytes());
    }
    bytes.extend(number.to_be_bytes());
    bytes.extend(9u16.to_be_bytes());
    if recipe.protocol == TCP {
        bytes.extend(7u32.to_be_bytes());
        bytes.extend(1u32.to_be_bytes());
        bytes.extend([
            0x80,
            0x10 | FIN_PSH | if number.is_multiple_of(2) { CWR } else { 0 },
            0x10,
            0,
            0,
            0,
            0,
            0,
        ]);
        bytes.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
    } else {
        bytes.extend((transport_len as u16).to_be_bytes());
        bytes.extend([0, 0]);
    }
    let header_len = bytes.len() as u16;
    bytes.extend((0..recipe.payload).map(|at| pattern(number.into(), at)));
    let packet = TestPacket::parse(&bytes).expect("built above");
    let (start, offset) = (packet.transport_at, packet.checksum_offset());
    let pseudo = packet.pseudo(transport_len);
    let field = match (recipe.partial_checksum, recipe.protocol) {
        (true, _) => pseudo.fold(),
        (false, TCP) => pseudo.add(Sum::of(&bytes[start..])).finish(),
        (false, _) => pseudo.add(Sum::of(&bytes[start..])).finish_udp(),
    };
    bytes[start + offset..start + offset + 2].copy_from_slice(&field.to_be_bytes());
    let kind = match (recipe.protocol, recipe.is_v6) {
        (UDP, _) => GsoKind::Udp,
        (_, false) => GsoKind::Tcp4,
        (_, true) => GsoKind::Tcp6,
    };
    let ecn = kind != GsoKind::Udp && number.is_multiple_of(2);
    let gso = recipe.segment.map(|size| Gso { kind, size: size as u16, header_len, ecn });
    let partial_checksum = recipe.partial_checksum.then_some((start as u16, offset as u16));
    TestFrame { bytes, meta: TxMeta { partial_checksum, gso, ..TxMeta::NONE } }
}

/// Checks that the received frames contain the payloads that were sent: as whole packets or as segments, each
/// with a correct or verified checksum. Super-frames of up to `whole` bytes must not be segmented.
pub(super) fn assert_payloads_arrive(sent: &[TestFrame], received: &[ReceivedFrame], whole: usize) {
    let mut pieces = received.iter().peekable();
    for frame in sent {
        let packet = TestPacket::parse(&frame.bytes).expect("only IP packets are compared");
        let mut payload: Vec<u8> = Vec::new();
        let wanted = &frame.bytes[packet.payload_at..];
        while payload.len() < wanted.len() {
            let piece = pieces.next().expect("a segment is missing");
            let parsed = TestPacket::parse(&piece.bytes).expect("only IP packets were sent");
            assert_eq!(parsed.number, packet.number, "segments are out of order");
            assert_eq!((parsed.is_v6, parsed.protocol), (packet.is_v6, packet.protocol));
            let cut = piece.bytes.len() != frame.bytes.len() && frame.bytes.len() <= whole;
            assert!(
                !cut,
                "packet {} of {} bytes was cut: {:?}",
                packet.number,
                frame.bytes.len(),
                frame.meta
            );
            assert_piece(frame, piece, &parsed, payload.len(), wanted.len());
            payload.extend(&piece.bytes[parsed.payload_at..]);
        }
        assert!(payload == wanted, "packet {} changed its payload", packet.number);
    }
    assert!(pieces.next().is_none(), "more segments arrived than were sent");
}

fn assert_piece(sent: &TestFrame, piece: &ReceivedFrame, packet: &TestPacket, at: usize, total: usize) {
    let len = piece.bytes.len() - packet.payload_at;
    let transport = &piece.bytes[packet.transport_at..];
    match (piece.gso, sent.meta.gso) {
        (Some(gso), Some(sent)) => {
            assert_eq!((gso.kind, gso.size, gso.ecn), (sent.kind, sent.size, sent.ecn));
            assert_eq!(usize::from(gso.header_len), packet.payload_at, "header length");
        }
        (None, Some(sent)) => assert!(len <= usize::from(sent.size), "segment of {len} bytes"),
        (gso, None) => assert_eq!((gso, len), (None, total), "a packet was cut or merged"),
    }
    if packet.is_v6 {
        assert_eq!(usize::from(u16::from_be_bytes([piece.bytes[18], piece.bytes[19]])), transport.len());
    } else {
        assert_eq!(usize::from(u16::from_be_bytes([piece.bytes[16], piece.bytes[17]])), 20 + transport.len());
        assert!(Sum::of(&piece.bytes[14..34]).is_valid(), "IPv4 header checksum");
    }
    if packet.protocol == TCP {
        let seq = u32::from_be_bytes([transport[4], transport[5], transport[6], transport[7]]);
        assert_eq!(seq, 7 + at as u32, "sequence number");
        let last = at + len == total;
        assert_eq!(transport[13] & FIN_PSH, if last { FIN_PSH } else { 0 }, "flags of the last segment");
        let cwr = at == 0 && packet.number.is_multiple_of(2);
        assert_eq!(transport[13] & CWR != 0, cwr, "CWR belongs to the first segment");
    } else {
        assert_eq!(usize::from(u16::from_be_bytes([transport[4], transport[5]])), transport.len());
    }
    let sum = packet.pseudo(transport.len());
    let offset = packet.checksum_offset();
    match piece.checksum {
        RxChecksum::Verified => {}
        RxChecksum::Unverified => assert!(sum.add(Sum::of(transport)).is_valid(), "transport checksum"),
        RxChecksum::Partial { start, offset: field } => {
            assert_eq!((usize::from(start), usize::from(field)), (packet.transport_at, offset));
            let field = u16::from_be_bytes([transport[offset], transport[offset + 1]]);
            assert_eq!(field, sum.fold(), "pseudo-header sum");
        }
    }
}
