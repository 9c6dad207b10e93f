//! Reads from a frame what the receive queues must know: its flow, and whether it may be dropped.

use core::hash::{Hash, Hasher};
use ginnel_matcher::Packet;
use ginnel_stack::wire::protocol;
use std::hash::DefaultHasher;

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

/// Flags FIN, SYN and RST of TCP.
const FIN_SYN_RST: u8 = 0b111;

/// Returns whether a frame is one that is not dropped to make room for others.
#[cold]
pub(crate) fn is_control(frame: &[u8]) -> bool {
    inspect(frame).is_control
}

/// Returns what a queue must know of a frame. Malformed frames are control frames: the engine counts them.
pub(super) fn inspect(frame: &[u8]) -> FrameKind {
    let packet = Packet::parse(frame);
    let (Some(source), Some(destination)) = (packet.source(), packet.destination()) else {
        return FrameKind { flow: 0, is_control: true, is_ordered: false };
    };
    // Fragments other than the first one have no ports, so no fragment counts them.
    let ports = packet.ports().filter(|_| !packet.is_fragment());
    // Its key need not be secret: flows with equal hashes only keep their order.
    let mut hasher = DefaultHasher::new();
    (source, destination, packet.protocol(), ports).hash(&mut hasher);
    let is_control = match packet.protocol() {
        Some(protocol::TCP | protocol::UDP) if packet.is_fragment() => false,
        Some(protocol::TCP) => {
            packet.tcp_flags().is_none_or(|flags| flags & FIN_SYN_RST != 0)
                || packet.payload().is_none_or(<[u8]>::is_empty)
        }
        Some(protocol::UDP) => ports.is_none(),
        Some(_) => true,
        // Behind extension headers that were not followed to their end there may be payload.
        None => false,
    };
    let is_ordered = packet.protocol() == Some(protocol::TCP) && ports.is_some();
    // The lower half of the hash is as good as the whole.
    FrameKind { flow: hasher.finish() as u32, is_control, is_ordered }
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
