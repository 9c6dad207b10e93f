//! Frames of local senders whose TCP or UDP checksum is partial.
//!
//! A kernel that sends over a veth or virtio interface leaves checksums to the device. The frame never
//! crosses a wire, so nobody completes them: the field holds the sum of the pseudo-header alone. For its own
//! sockets the kernel keeps the state of the checksum beside the frame; a frame that a redirect program takes
//! has lost it. So a frame whose field is exactly that sum is taken as one whose checksum is partial. One of
//! 65,536 frames with a complete checksum has that value, too; it is accepted without verification.

use ginnel_stack::device::{ETHERNET_HEADER_BYTES, RxChecksum};
use ginnel_stack::wire::checksum::{pseudo_v4, pseudo_v6};
use ginnel_stack::wire::protocol;
use std::net::{Ipv4Addr, Ipv6Addr};

/// Drivers of interfaces whose frames come from a local sender.
const LOCAL_DRIVERS: [&str; 2] = ["veth", "virtio_net"];

const ETHERTYPE_VLAN: [u8; 2] = [0x81, 0x00];
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
/// Bytes of an IPv6 header.
const IPV6_HEADER_BYTES: usize = 40;

/// Treatment of frames with partial checksums, the text key `partial_checksums`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PartialChecksums {
    /// Accepts them on veth and virtio interfaces.
    #[default]
    Auto,
    /// Accepts them.
    Accept,
    /// Leaves them to the stack, which drops and counts them (`drop.partial_transport_checksum`).
    Reject,
}

impl PartialChecksums {
    /// The values of the text key.
    pub(crate) const WORDS: [(&'static str, Self); 3] =
        [("auto", Self::Auto), ("on", Self::Accept), ("off", Self::Reject)];
}

/// The check of a queue's received frames.
pub(crate) enum PartialChecksumCheck {
    /// Accepts such frames.
    Accept,
    /// Accepts only frames of which the device says that their sender left the checksum to it.
    OnlyMarked,
    /// Looks at no frame.
    Off,
}

impl PartialChecksumCheck {
    /// Creates the check for an interface with this driver.
    pub fn new(choice: PartialChecksums, driver: Option<&str>) -> Self {
        let is_local = driver.is_some_and(|driver| LOCAL_DRIVERS.contains(&driver));
        match choice {
            PartialChecksums::Accept => Self::Accept,
            PartialChecksums::Auto if is_local => Self::Accept,
            PartialChecksums::Auto => Self::OnlyMarked,
            PartialChecksums::Reject => Self::Off,
        }
    }

    /// Creates the check for a device that is no interface of the kernel.
    #[cfg(any(feature = "dpdk", all(test, not(loom))))]
    pub fn without_interface(choice: PartialChecksums) -> Self {
        match choice {
            PartialChecksums::Accept => Self::Accept,
            PartialChecksums::Auto => Self::OnlyMarked,
            PartialChecksums::Reject => Self::Off,
        }
    }

    /// Returns the state of the checksum of a received frame of which the device says that its sender left
    /// the checksum to it.
    #[cfg(any(feature = "dpdk", all(test, not(loom))))]
    #[cold]
    pub fn checksum_of_marked(&self, frame: &[u8]) -> RxChecksum {
        match self {
            Self::Off => RxChecksum::Unverified,
            Self::Accept | Self::OnlyMarked => accept(frame),
        }
    }

    /// Returns the state of the checksum of a received frame.
    #[inline]
    pub fn checksum_of(&self, frame: &[u8]) -> RxChecksum {
        match self {
            Self::OnlyMarked | Self::Off => RxChecksum::Unverified,
            Self::Accept => accept(frame),
        }
    }
}

/// Returns the state of the checksum of a frame that may be partial.
#[inline]
fn accept(frame: &[u8]) -> RxChecksum {
    partial_checksum(frame).unwrap_or(RxChecksum::Unverified)
}

/// Returns where the checksum of a frame has to be completed, if it holds the sum of the pseudo-header alone.
fn partial_checksum(frame: &[u8]) -> Option<RxChecksum> {
    let mut ip_at = ETHERNET_HEADER_BYTES;
    if frame.get(12..14)? == ETHERTYPE_VLAN {
        ip_at += 4;
    }
    let (ethertype, ip) = (frame.get(ip_at - 2..ip_at)?, frame.get(ip_at..)?);
    let (header_bytes, next, l4_bytes) = if ethertype == ETHERTYPE_IPV4 {
        let head = ip.get(..20)?;
        let header_bytes = usize::from(head[0] & 0x0f) * 4;
        // A fragment has no checksum of its own.
        let is_fragment = u16::from_be_bytes([head[6], head[7]]) & 0x3fff != 0;
        let total = usize::from(u16::from_be_bytes([head[2], head[3]]));
        let l4_bytes = total.checked_sub(header_bytes).filter(|_| !is_fragment && header_bytes >= 20)?;
        (header_bytes, head[9], l4_bytes)
    } else if ethertype == ETHERTYPE_IPV6 {
        let head = ip.get(..IPV6_HEADER_BYTES)?;
        (IPV6_HEADER_BYTES, head[6], usize::from(u16::from_be_bytes([head[4], head[5]])))
    } else {
        return None;
    };
    let offset = match next {
        protocol::TCP => 16,
        protocol::UDP => 6,
        _ => return None,
    };
    let l4 = ip.get(header_bytes..header_bytes + l4_bytes)?;
    let field = l4.get(offset..offset + 2)?;
    let pseudo = if ethertype == ETHERTYPE_IPV4 {
        let [source, destination] = [12, 16].map(|at| {
            let octets: [u8; 4] = ip[at..at + 4].try_into().expect("four bytes");
            Ipv4Addr::from(octets)
        });
        pseudo_v4(source, destination, next, l4_bytes)
    } else {
        let [source, destination] = [8, 24].map(|at| {
            let octets: [u8; 16] = ip[at..at + 16].try_into().expect("sixteen bytes");
            Ipv6Addr::from(octets)
        });
        pseudo_v6(source, destination, next, l4_bytes)
    };
    // Cannot truncate: a header is shorter than 2^16 bytes.
    (u16::from_be_bytes([field[0], field[1]]) == pseudo.fold())
        .then_some(RxChecksum::Partial { start: (ip_at + header_bytes) as u16, offset: offset as u16 })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_stack::wire::gso::complete_checksum;

    /// Returns an Ethernet frame with a TCP or UDP header of 20 bytes, and where that begins. The checksum is
    /// partial.
    fn frame(v6: bool, vlan: bool, next: u8, offset: usize) -> (Vec<u8>, usize) {
        let mut frame = vec![2; 12];
        if vlan {
            frame.extend([0x81, 0x00, 0, 7]);
        }
        let (pseudo, l4_bytes) = if v6 {
            frame.extend(ETHERTYPE_IPV6);
            frame.extend([0x60, 0, 0, 0, 0, 24, next, 64]);
            let ends: [Ipv6Addr; 2] = ["2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap()];
            ends.iter().for_each(|end| frame.extend(end.octets()));
            (pseudo_v6(ends[0], ends[1], next, 24), 24)
        } else {
            frame.extend(ETHERTYPE_IPV4);
            frame.extend([0x45, 0, 0, 44, 0, 0, 0x40, 0, 64, next, 0, 0]);
            let ends = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];
            ends.iter().for_each(|end| frame.extend(end.octets()));
            (pseudo_v4(ends[0], ends[1], next, 24), 24)
        };
        let start = frame.len();
        frame.extend((0..l4_bytes).map(|at| at as u8));
        frame[start + offset..start + offset + 2].copy_from_slice(&pseudo.fold().to_be_bytes());
        (frame, start)
    }

    #[test]
    fn partial_checksums_are_recognised_and_complete_ones_are_not() {
        for (v6, vlan, next, offset) in [
            (false, false, protocol::TCP, 16),
            (false, true, protocol::UDP, 6),
            (true, false, protocol::UDP, 6),
            (true, true, protocol::TCP, 16),
        ] {
            let (mut frame, start) = frame(v6, vlan, next, offset);
            let found = RxChecksum::Partial { start: start as u16, offset: offset as u16 };
            assert_eq!(partial_checksum(&frame), Some(found));
            let mut padded = frame.clone();
            padded.extend([0; 10]);
            assert_eq!(partial_checksum(&padded), Some(found), "with padding of the device");
            for bytes in 0..frame.len() {
                assert_eq!(partial_checksum(&frame[..bytes]), None, "{bytes} bytes");
            }
            complete_checksum(&mut frame, start, offset).unwrap();
            assert_eq!(partial_checksum(&frame), None);
        }
        let (mut fragment, start) = frame(false, false, protocol::TCP, 16);
        fragment[start - 14] |= 0x20;
        assert_eq!(partial_checksum(&fragment), None, "more fragments follow");
        let (other, _) = frame(false, false, 1, 16);
        assert_eq!(partial_checksum(&other), None, "neither TCP nor UDP");
    }

    #[test]
    fn driver_decides_unless_the_key_does() {
        let (partial, _) = frame(false, false, protocol::TCP, 16);
        let accepted = |choice, driver| {
            let check = PartialChecksumCheck::new(choice, driver);
            check.checksum_of(&partial) != RxChecksum::Unverified
        };
        assert!(accepted(PartialChecksums::Auto, Some("veth")));
        assert!(accepted(PartialChecksums::Auto, Some("virtio_net")));
        assert!(!accepted(PartialChecksums::Auto, Some("ixgbe")) && !accepted(PartialChecksums::Auto, None));
        assert!(accepted(PartialChecksums::Accept, Some("ixgbe")));
        assert!(!accepted(PartialChecksums::Reject, Some("veth")));
    }

    #[test]
    fn marked_frames_are_accepted_unless_rejected() {
        let (mut frame, start) = frame(false, false, protocol::TCP, 16);
        let partial = RxChecksum::Partial { start: start as u16, offset: 16 };
        for (choice, unmarked, marked) in [
            (PartialChecksums::Auto, RxChecksum::Unverified, partial),
            (PartialChecksums::Accept, partial, partial),
            (PartialChecksums::Reject, RxChecksum::Unverified, RxChecksum::Unverified),
        ] {
            let check = PartialChecksumCheck::without_interface(choice);
            assert_eq!(check.checksum_of(&frame), unmarked, "{choice:?}");
            assert_eq!(check.checksum_of_marked(&frame), marked, "{choice:?}");
        }
        complete_checksum(&mut frame, start, 16).unwrap();
        let check = PartialChecksumCheck::without_interface(PartialChecksums::Auto);
        assert_eq!(check.checksum_of_marked(&frame), RxChecksum::Unverified);
    }
}
