//! Reads from a frame what the receive queues must know: its flow, and whether it may be dropped.

use ginnel_stack::device::ETHERNET_HEADER_BYTES;
use ginnel_stack::wire::protocol;

/// The properties of a frame that its queue knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameKind {
    /// Hash of the addresses, and of the protocol and ports if the frame has them. Frames of a flow have
    /// equal values; frames of different flows with equal values are kept in order, too, which does no harm.
    pub(super) flow: u32,
    /// True for segments that carry nothing that their sender would send again for long: SYN, FIN, RST,
    /// segments without payload, and everything that is neither TCP nor UDP. They are not dropped to make
    /// room for others.
    pub(super) is_control: bool,
    /// True if the frames of the flow must stay in order: TCP segments.
    pub(super) is_ordered: bool,
}

/// EtherType of IPv4.
const IPV4: u16 = 0x0800;
/// EtherType of IPv6.
const IPV6: u16 = 0x86dd;
/// EtherTypes of VLAN tags.
const VLAN: [u16; 2] = [0x8100, 0x88a8];
/// Flags FIN, SYN and RST of TCP.
const FIN_SYN_RST: u8 = 0b111;
/// More-fragments flag and offset of IPv4.
const FRAGMENT: u16 = 0x3fff;

/// Next headers of IPv6 that another header follows: hop-by-hop options, routing, fragment, authentication
/// and destination options.
const EXTENSIONS: [u8; 5] = [0, 43, 44, 51, 60];

/// Returns what a queue must know of a frame. Malformed frames are control frames: the engine counts them.
pub(super) fn inspect(frame: &[u8]) -> FrameKind {
    const OTHER: FrameKind = FrameKind { flow: 0, is_control: true, is_ordered: false };
    parse(frame).unwrap_or(OTHER)
}

fn parse(frame: &[u8]) -> Option<FrameKind> {
    let mut offset = ETHERNET_HEADER_BYTES;
    while VLAN.contains(&be16(frame, offset - 2)?) {
        offset += 4;
    }
    let ethertype = be16(frame, offset - 2)?;
    let packet = frame.get(offset..)?;
    let (addresses, next, transport, is_fragment) = match ethertype {
        IPV4 => {
            let header = usize::from(packet.first()? & 15) * 4;
            let end = usize::from(be16(packet, 2)?).min(packet.len());
            let fragment = be16(packet, 6)? & FRAGMENT != 0;
            (packet.get(12..20)?, *packet.get(9)?, packet.get(header..end)?, fragment)
        }
        // Behind an extension header the ports are not looked for: flows are pairs of addresses then.
        IPV6 => {
            let end = (40 + usize::from(be16(packet, 4)?)).min(packet.len());
            (packet.get(8..40)?, *packet.get(6)?, packet.get(40..end)?, false)
        }
        _ => return None,
    };
    let flow = hash(addresses.chunks_exact(4), u32::from(next));
    if is_fragment || !matches!(next, protocol::TCP | protocol::UDP) {
        let may_have_payload =
            matches!(next, protocol::TCP | protocol::UDP) || ethertype == IPV6 && EXTENSIONS.contains(&next);
        return Some(FrameKind { flow, is_control: !may_have_payload, is_ordered: false });
    }
    let flow = hash(transport.get(..4)?.chunks_exact(4), flow);
    let is_control = next == protocol::TCP && {
        let header = usize::from(transport.get(12)? >> 4) * 4;
        transport.get(13)? & FIN_SYN_RST != 0 || transport.len() <= header
    };
    Some(FrameKind { flow, is_control, is_ordered: next == protocol::TCP })
}

fn be16(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(offset)?, *bytes.get(offset + 1)?]))
}

/// Mixes words into a hash. Its buckets need not resist an attacker: colliding flows only keep their order.
fn hash<'a>(words: impl Iterator<Item = &'a [u8]>, seed: u32) -> u32 {
    words.fold(seed, |hash, word| {
        let word = word.iter().fold(0, |word, byte| word << 8 | u32::from(*byte));
        let mixed = (u64::from(hash ^ word) + 0x9e37_79b9).wrapping_mul(0xff51_afd7_ed55_8ccd);
        (mixed >> 32) as u32 ^ mixed as u32
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a TCP segment over IPv4 with these ports, flags and payload, behind `tags` VLAN tags.
    fn tcp4(tags: usize, ports: [u16; 2], flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        (0..tags).for_each(|_| frame.extend([0x81, 0, 0, 5]));
        frame.extend([8, 0, 0x45, 0]);
        frame.extend((40 + payload.len() as u16).to_be_bytes());
        frame.extend([0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 2, 10, 0, 0, 1]);
        ports.iter().for_each(|port| frame.extend(port.to_be_bytes()));
        frame.extend([0, 0, 0, 1, 0, 0, 0, 0, 0x50, flags, 0, 0, 0, 0, 0, 0]);
        frame.extend(payload);
        frame
    }

    #[test]
    fn segments_without_payload_and_ends_are_control() {
        for (flags, payload, expected) in [
            (0x10, &b""[..], true),
            (0x10, b"x", false),
            (0x18, b"x", false),
            (0x11, b"x", true),
            (0x02, b"x", true),
            (0x14, b"x", true),
        ] {
            let mut frame = tcp4(0, [1000, 80], flags, payload);
            // Padding of a short frame is no payload.
            frame.resize(frame.len().max(60), 0);
            assert_eq!(inspect(&frame).is_control, expected, "{flags:#x} {payload:?}");
        }
    }

    #[test]
    fn frames_of_a_flow_have_equal_hashes() {
        let one = inspect(&tcp4(0, [1000, 80], 0x10, b"a"));
        assert_eq!(one, inspect(&tcp4(0, [1000, 80], 0x18, b"other")));
        assert_eq!(one, inspect(&tcp4(2, [1000, 80], 0x10, b"a")));
        assert_ne!(one.flow, inspect(&tcp4(0, [1001, 80], 0x10, b"a")).flow);
        assert_ne!(one.flow, inspect(&tcp4(0, [1000, 81], 0x10, b"a")).flow);
    }

    #[test]
    fn cut_frames_are_control() {
        let frame = tcp4(1, [1000, 80], 0x18, b"payload");
        for len in 0..frame.len() - 7 {
            assert!(inspect(&frame[..len]).is_control, "{len}");
        }
        let expected = FrameKind { flow: 0, is_control: true, is_ordered: false };
        assert_eq!(inspect(&[0xff; 60]), expected);
    }
}
