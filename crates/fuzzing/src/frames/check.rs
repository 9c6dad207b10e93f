//! Invariants of every frame that the stack sends.

use super::build;
use super::peer::{Peer, outbound_byte};
use super::udp::datagram_byte;
use core::net::{IpAddr, SocketAddr};
use ginnel_stack::device::{Capabilities, TxMeta};
use ginnel_stack::wire::checksum::Sum;
use ginnel_stack::wire::ethernet::{EtherType, Header};
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions, TcpSegment};
use ginnel_stack::wire::{arp, ipv4, ipv6, protocol, udp};

/// A TCP segment of the stack with its addresses.
pub struct SentSegment<'a> {
    /// Address of the stack.
    pub local: SocketAddr,
    /// Address of the remote end.
    pub remote: SocketAddr,
    /// The segment.
    pub segment: TcpSegment<'a>,
}

/// Checks lengths, headers and checksums of a wire frame. Returns the TCP segment if the frame contains one.
///
/// # Panics
/// If the frame is malformed.
pub fn frame<'a>(bytes: &'a [u8], mtu: usize) -> Option<SentSegment<'a>> {
    let header = Header::parse(bytes).expect("Ethernet header");
    assert_eq!(header.src, build::LOCAL_MAC, "source MAC");
    let packet = &bytes[usize::from(header.len)..];
    assert!(packet.len() <= mtu, "a packet of {} bytes on a link of {mtu}", packet.len());
    match header.ethertype {
        EtherType::ARP => {
            arp::ArpPacket::parse(packet).expect("ARP");
            None
        }
        EtherType::IPV4 => {
            let ip = ipv4::Header::parse(packet).expect("IPv4 header");
            assert!(ip.checksum_ok(packet), "IPv4 checksum");
            assert_eq!(usize::from(ip.total_len), packet.len(), "IPv4 length");
            let l4 = ip.payload(packet);
            if ip.is_fragment() {
                return None;
            }
            transport(ip.src.into(), ip.dst.into(), ip.protocol, l4)
        }
        EtherType::IPV6 => {
            let ip = ipv6::Header::parse(packet).expect("IPv6 header");
            assert_eq!(40 + usize::from(ip.payload_len), packet.len(), "IPv6 length");
            let chain = ipv6::walk_header_chain(packet, &ip).expect("extension headers");
            if chain.fragment.is_some() {
                return None;
            }
            transport(ip.src.into(), ip.dst.into(), chain.protocol, &packet[chain.offset..])
        }
        other => panic!("EtherType {other:?}"),
    }
}

fn transport(src: IpAddr, dst: IpAddr, protocol: u8, l4: &[u8]) -> Option<SentSegment<'_>> {
    let sum = match protocol {
        protocol::ICMP | protocol::IGMP => Sum::of(l4),
        _ => build::pseudo(src, dst, protocol, l4.len()).add(Sum::of(l4)),
    };
    assert!(sum.is_valid(), "checksum of protocol {protocol} from {src} to {dst}");
    if protocol == protocol::UDP {
        datagram(l4);
    }
    if protocol != protocol::TCP {
        return None;
    }
    let segment = TcpSegment::parse(l4).expect("TCP header");
    let (local, remote) = (segment.header.src_port, segment.header.dst_port);
    assert!(local != 0 && remote != 0 || segment.header.flags.contains(TcpFlags::RST), "port 0");
    options(&segment);
    Some(SentSegment { local: SocketAddr::new(src, local), remote: SocketAddr::new(dst, remote), segment })
}

fn datagram(l4: &[u8]) {
    let header = udp::Header::parse(l4).expect("UDP header");
    assert_eq!(usize::from(header.len), l4.len(), "UDP length");
    // A socket that is connected to port 0 sends there, as on Linux.
    assert!(header.src_port != 0 && header.checksum != 0, "{header:?}");
    let expected =
        header.payload(l4).iter().enumerate().all(|(at, byte)| *byte == datagram_byte(header.src_port, at));
    assert!(expected, "wrong bytes in a datagram of {}", l4.len());
}

fn options(segment: &TcpSegment<'_>) {
    let parsed = TcpOptions::parse(segment.options);
    let flags = segment.header.flags;
    if !flags.contains(TcpFlags::SYN) {
        assert!(parsed.mss.is_none() && parsed.window_scale.is_none(), "SYN options outside of SYN");
    }
    assert!(
        !flags.contains(TcpFlags::SYN) || !flags.intersects(TcpFlags::FIN | TcpFlags::URG | TcpFlags::RST),
        "SYN with {flags:?}"
    );
    assert!(
        flags.intersects(TcpFlags::SYN | TcpFlags::RST | TcpFlags::ACK),
        "a segment without SYN, RST and ACK"
    );
    for (start, end) in &parsed.sack_blocks {
        assert!(start.lt(*end), "an empty SACK block");
    }
    if flags.contains(TcpFlags::URG) {
        assert_ne!(segment.header.urg_ptr, 0, "URG with urgent pointer 0");
    }
}

/// Converts a frame to wire frames as the device would: splits a super-frame, completes a partial checksum.
///
/// # Panics
/// If the stack requested an offload that the device does not have.
pub fn to_wire_frames(frame: &[u8], meta: &TxMeta, caps: &Capabilities, mut on_frame: impl FnMut(&[u8])) {
    assert!(meta.partial_checksum.is_none() || caps.tx_checksum, "the device has no checksum offload");
    if let Some(gso) = meta.gso {
        assert!(
            caps.gso_bytes_max > 0 && frame.len() <= caps.gso_bytes_max,
            "super-frame of {}",
            frame.len()
        );
        let mut scratch = vec![0; frame.len()];
        ginnel_stack::wire::gso::segment(frame, gso, &mut scratch, on_frame).expect("super-frame");
    } else if let Some((start, offset)) = meta.partial_checksum {
        let mut frame = frame.to_vec();
        ginnel_stack::wire::gso::complete_checksum(&mut frame, start.into(), offset.into())
            .expect("partial checksum");
        on_frame(&frame);
    } else {
        on_frame(frame);
    }
}

/// Checks a segment against the state of its receiver, `peer`. `sent_max` is the maximum number of bytes that
/// applications have sent between these addresses. `cookies` is true if more than one SYN cookie of the stack
/// has become a connection.
///
/// # Panics
/// If the segment violates an invariant.
pub fn segment(peer: &Peer, segment: &TcpSegment<'_>, sent_max: u64, cookies: bool) {
    let h = &segment.header;
    if h.flags.contains(TcpFlags::RST) {
        assert!(segment.payload.is_empty(), "RST with data");
        return;
    }
    if h.flags.contains(TcpFlags::SYN) {
        // With TCP Fast Open, the SYN of a client has the first bytes of the stream (RFC 7413).
        assert!(segment.payload.is_empty() || !h.flags.contains(TcpFlags::ACK), "SYN+ACK with data");
        assert!(segment.payload.len() as u64 <= sent_max, "SYN with more data than were sent");
        let is_first = segment.payload.iter().zip(0..).all(|(byte, at)| *byte == outbound_byte(at));
        assert!(is_first, "SYN with wrong bytes");
        return;
    }
    // A SYN cookie that is acknowledged again may revive a connection that was reset.
    let certain = peer.stack_isns.len() <= 1 && peer.own_isns.len() <= 1 && !peer.tainted && !cookies;
    if !segment.payload.is_empty() {
        let matches = |start: &ginnel_stack::wire::tcp::SeqNumber| {
            let offset = u64::from((h.seq - *start) as u32).wrapping_sub(1);
            offset + segment.payload.len() as u64 <= sent_max
                && segment.payload.iter().zip(offset..).all(|(byte, at)| *byte == outbound_byte(at))
        };
        assert!(
            peer.stack_isns.iter().any(matches),
            "wrong bytes at {:?} of {}",
            h.seq,
            segment.payload.len()
        );
        if certain {
            let end = h.seq + segment.payload.len() as u32;
            // Before the peer's first acknowledgement only a connection with Fast Open sends data.
            assert!(
                peer.rcv_wnd_edge.is_none_or(|edge| end.le(edge)),
                "data to {end:?} beyond the window's edge {:?}",
                peer.rcv_wnd_edge
            );
        }
    }
    if certain && peer.snd_una_known && h.flags.contains(TcpFlags::ACK) {
        assert!(peer.snd_una.le(h.ack), "acknowledgement moves back from {:?} to {:?}", peer.snd_una, h.ack);
    }
}

/// Tracks the right edge of the stack's window, which must never move back (RFC 9293 §3.8.6). `cookies` is
/// true if a SYN cookie of the stack has become a connection: then nothing is checked.
///
/// # Panics
/// If the edge moves back.
pub fn check_window_edge(peer: &mut Peer, segment: &TcpSegment<'_>, cookies: bool) {
    let h = &segment.header;
    let certain = peer.stack_isns.len() == 1 && peer.own_isns.len() == 1 && !peer.tainted && !cookies;
    if h.flags.intersects(TcpFlags::RST) || !h.flags.contains(TcpFlags::ACK) || !certain {
        return;
    }
    let Some(scale) = peer.snd_wscale else { return };
    let syn = h.flags.contains(TcpFlags::SYN);
    let edge = h.ack + (u32::from(h.window) << if syn { 0 } else { scale });
    if let Some(previous) = peer.snd_wnd_edge {
        assert!(edge.ge(previous), "right edge of the window moves back from {previous:?} to {edge:?}");
    }
    peer.snd_wnd_edge = Some(edge);
}
