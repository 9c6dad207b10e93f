//! Composable checks of packets: `well_formed() & tcp() & (flags("SA") | payload(1..))`.
//!
//! etherparse parses the packets and this module sums their checksums, independently of the stack's own code.
//! A failed check reports what it expected and the packet. [`Sim::check_sent`](crate::sim::Sim::check_sent)
//! applies a check to every frame that a simulated host sends.
//!
//! ```
//! use ginnel_testkit::checks::{arp, flags, payload, tcp};
//! let mut check = tcp() & flags("S") & payload(0..=0) | arp();
//! assert!(check.verify(&[0; 60]).unwrap_err().starts_with("((TCP and flags S) and payload of 0..=0) or ARP"));
//! ```

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::ops::{BitAnd, BitOr, Bound, Not, RangeBounds};
use etherparse::{NetSlice, SlicedPacket, TcpOptionElement, TcpSlice, TransportSlice};
use std::collections::BTreeMap;

const ETHERNET_BYTES: usize = 14;
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP6: u8 = 58;

/// A dissected Ethernet frame.
pub struct DissectedPacket<'a> {
    bytes: &'a [u8],
    slices: Result<SlicedPacket<'a>, String>,
}

impl<'a> DissectedPacket<'a> {
    /// Dissects an Ethernet frame. A parse error is kept and reported by [`well_formed`].
    pub fn parse(bytes: &'a [u8]) -> Self {
        Self { bytes, slices: SlicedPacket::from_ethernet(bytes).map_err(|e| e.to_string()) }
    }

    fn net(&self) -> Option<&NetSlice<'a>> {
        self.slices.as_ref().ok()?.net.as_ref()
    }

    fn transport(&self) -> Option<&TransportSlice<'a>> {
        self.slices.as_ref().ok()?.transport.as_ref()
    }

    fn tcp(&self) -> Option<&TcpSlice<'a>> {
        match self.transport()? {
            TransportSlice::Tcp(tcp) => Some(tcp),
            _ => None,
        }
    }

    /// Returns source and destination address of an IP packet.
    fn addresses(&self) -> Option<(IpAddr, IpAddr)> {
        match self.net()? {
            NetSlice::Ipv4(ip) => Some((
                Ipv4Addr::from(ip.header().source()).into(),
                Ipv4Addr::from(ip.header().destination()).into(),
            )),
            NetSlice::Ipv6(ip) => Some((
                Ipv6Addr::from(ip.header().source()).into(),
                Ipv6Addr::from(ip.header().destination()).into(),
            )),
            NetSlice::Arp(_) => None,
        }
    }

    fn ports(&self) -> Option<(u16, u16)> {
        match self.transport()? {
            TransportSlice::Tcp(tcp) => Some((tcp.source_port(), tcp.destination_port())),
            TransportSlice::Udp(udp) => Some((udp.source_port(), udp.destination_port())),
            _ => None,
        }
    }

    fn payload_len(&self) -> Option<usize> {
        match self.transport()? {
            TransportSlice::Tcp(tcp) => Some(tcp.payload().len()),
            TransportSlice::Udp(udp) => Some(udp.payload().len()),
            TransportSlice::Icmpv4(icmp) => Some(icmp.payload().len()),
            TransportSlice::Icmpv6(icmp) => Some(icmp.payload().len()),
        }
    }

    /// Describes the first wrong length or checksum, or returns `None` for a well-formed packet. Fragments
    /// are checked up to the IP header.
    fn flaw(&self) -> Option<String> {
        let parts = match &self.slices {
            Ok(parts) => parts,
            Err(e) => return Some(e.clone()),
        };
        let (ip_bytes, pseudo, payload) = match parts.net.as_ref() {
            Some(NetSlice::Ipv4(ip)) => {
                let header = ip.header();
                if sum(&[header.slice()]) != 0xffff {
                    return Some("wrong checksum of the IP header".into());
                }
                let pseudo = [header.source(), header.destination()].concat();
                (usize::from(header.total_len()), pseudo, ip.payload())
            }
            Some(NetSlice::Ipv6(ip)) => {
                let header = ip.header();
                let pseudo = [header.source(), header.destination()].concat();
                (40 + usize::from(header.payload_length()), pseudo, ip.payload())
            }
            Some(NetSlice::Arp(_)) => return None,
            None => return Some("neither IP nor ARP".into()),
        };
        let tags = 4 * parts.link_exts.len();
        if self.bytes.len() != ETHERNET_BYTES + tags + ip_bytes {
            return Some(format!("a frame of {} bytes with a packet of {ip_bytes}", self.bytes.len()));
        }
        if payload.fragmented {
            return None;
        }
        let (protocol, bytes) = (payload.ip_number.0, payload.payload);
        let length = (bytes.len() as u32).to_be_bytes();
        let total = match protocol {
            ICMP => sum(&[bytes]),
            UDP if bytes[6..8] == [0, 0] && pseudo.len() == 8 => return None,
            TCP | UDP | ICMP6 => sum(&[&pseudo, &length, &[0, protocol], bytes]),
            _ => return None,
        };
        (total != 0xffff).then(|| format!("wrong checksum of protocol {protocol}"))
    }
}

/// One's complement sum (RFC 1071 §1), one 16-bit word at a time. All parts but the last must have even
/// length.
fn sum(parts: &[&[u8]]) -> u16 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
    let total: u32 = parts.iter().flat_map(|part| part.chunks(2)).map(word).sum();
    let folded = (total & 0xffff) + (total >> 16);
    ((folded & 0xffff) + (folded >> 16)) as u16
}

/// Returns the flags of a segment as letters, in the order that [`flags`] expects.
fn flag_letters(tcp: &TcpSlice<'_>) -> String {
    let all = [
        ('S', tcp.syn()),
        ('F', tcp.fin()),
        ('R', tcp.rst()),
        ('P', tcp.psh()),
        ('A', tcp.ack()),
        ('U', tcp.urg()),
        ('E', tcp.ece()),
        ('W', tcp.cwr()),
    ];
    all.into_iter().filter(|(_, set)| *set).map(|(letter, _)| letter).collect()
}

impl fmt::Display for DissectedPacket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((from, to)) = self.addresses() else {
            let arp = matches!(self.net(), Some(NetSlice::Arp(_)));
            return write!(f, "{} of {} bytes", if arp { "ARP" } else { "a frame" }, self.bytes.len());
        };
        write!(f, "{from} > {to}")?;
        if let Some((from, to)) = self.ports() {
            write!(f, ", ports {from} > {to}")?;
        }
        if let Some(tcp) = self.tcp() {
            let (seq, ack) = (tcp.sequence_number(), tcp.acknowledgment_number());
            write!(f, ", flags {}, seq {seq}, ack {ack}, window {}", flag_letters(tcp), tcp.window_size())?;
        }
        write!(f, ", {} bytes of payload", self.payload_len().unwrap_or(0))?;
        self.flaw().map_or(Ok(()), |flaw| write!(f, "; malformed: {flaw}"))
    }
}

/// A condition on a packet, or on all packets seen so far.
pub struct Check {
    description: String,
    predicate: Box<dyn FnMut(&DissectedPacket<'_>) -> bool>,
}

impl Check {
    /// Creates a check from a predicate. `text` describes the expected packet in failure messages.
    pub fn new(text: impl Into<String>, holds: impl FnMut(&DissectedPacket<'_>) -> bool + 'static) -> Self {
        Self { description: text.into(), predicate: Box::new(holds) }
    }

    /// Checks a frame.
    ///
    /// # Errors
    /// A text that names the expectation and the frame.
    pub fn verify(&mut self, frame: &[u8]) -> Result<(), String> {
        let packet = DissectedPacket::parse(frame);
        if (self.predicate)(&packet) {
            Ok(())
        } else {
            Err(format!("{} expected, not {packet}", self.description))
        }
    }
}

impl BitAnd for Check {
    type Output = Self;

    fn bitand(mut self, mut other: Self) -> Self {
        let text = format!("({} and {})", self.description, other.description);
        // Both predicates see each packet, because they may keep state.
        Self::new(text, move |packet| (self.predicate)(packet) & (other.predicate)(packet))
    }
}

impl BitOr for Check {
    type Output = Self;

    fn bitor(mut self, mut other: Self) -> Self {
        let text = format!("{} or {}", self.description, other.description);
        Self::new(text, move |packet| (self.predicate)(packet) | (other.predicate)(packet))
    }
}

impl Not for Check {
    type Output = Self;

    fn not(mut self) -> Self {
        Self::new(format!("not ({})", self.description), move |packet| !(self.predicate)(packet))
    }
}

/// Expects consistent lengths and correct checksums.
pub fn well_formed() -> Check {
    Check::new("correct lengths and checksums", |packet| packet.flaw().is_none())
}

/// Expects a frame with at most `mtu` bytes after the Ethernet header. A VLAN tag counts towards them.
pub fn within_mtu(mtu: usize) -> Check {
    Check::new(format!("at most {mtu} bytes"), move |packet| packet.bytes.len() <= mtu + ETHERNET_BYTES)
}

/// Expects ARP.
pub fn arp() -> Check {
    Check::new("ARP", |packet| matches!(packet.net(), Some(NetSlice::Arp(_))))
}

/// Expects IPv4.
pub fn ipv4() -> Check {
    Check::new("IPv4", |packet| matches!(packet.net(), Some(NetSlice::Ipv4(_))))
}

/// Expects IPv6.
pub fn ipv6() -> Check {
    Check::new("IPv6", |packet| matches!(packet.net(), Some(NetSlice::Ipv6(_))))
}

/// Expects TCP.
pub fn tcp() -> Check {
    Check::new("TCP", |packet| packet.tcp().is_some())
}

/// Expects UDP.
pub fn udp() -> Check {
    Check::new("UDP", |packet| matches!(packet.transport(), Some(TransportSlice::Udp(_))))
}

/// Expects ICMP or ICMPv6.
pub fn icmp() -> Check {
    let is = |t: &TransportSlice<'_>| matches!(t, TransportSlice::Icmpv4(_) | TransportSlice::Icmpv6(_));
    Check::new("ICMP", move |packet| packet.transport().is_some_and(is))
}

/// Expects this source address.
pub fn from(address: impl Into<IpAddr>) -> Check {
    let address = address.into();
    Check::new(format!("from {address}"), move |packet| packet.addresses().is_some_and(|a| a.0 == address))
}

/// Expects this destination address.
pub fn to(address: impl Into<IpAddr>) -> Check {
    let address = address.into();
    Check::new(format!("to {address}"), move |packet| packet.addresses().is_some_and(|a| a.1 == address))
}

/// Expects this source or destination port of TCP or UDP.
pub fn port(port: u16) -> Check {
    Check::new(format!("port {port}"), move |packet| {
        packet.ports().is_some_and(|(a, b)| a == port || b == port)
    })
}

/// Expects TCP with exactly these flags, given as letters of `SFRPAUEW` in this order.
pub fn flags(wanted: &'static str) -> Check {
    Check::new(format!("flags {wanted}"), move |packet| {
        packet.tcp().is_some_and(|tcp| flag_letters(tcp) == wanted)
    })
}

/// Expects a transport payload whose length is within `bytes`.
pub fn payload(bytes: impl RangeBounds<usize> + 'static) -> Check {
    Check::new(format!("payload of {}", range_text(&bytes)), move |packet| {
        packet.payload_len().is_some_and(|len| bytes.contains(&len))
    })
}

/// Expects TCP whose unscaled window field is within `wanted`.
pub fn window(wanted: impl RangeBounds<u16> + 'static) -> Check {
    Check::new(format!("window of {}", range_text(&wanted)), move |packet| {
        packet.tcp().is_some_and(|tcp| wanted.contains(&tcp.window_size()))
    })
}

/// Expects TCP with this option.
pub fn option(wanted: TcpOptionElement) -> Check {
    Check::new(format!("option {wanted:?}"), move |packet| {
        packet.tcp().is_some_and(|tcp| tcp.options_iterator().any(|found| found == Ok(wanted.clone())))
    })
}

/// Expects that acknowledgement numbers of each direction of a TCP connection never decrease. A SYN or RST
/// starts over.
pub fn acks_never_decrease() -> Check {
    let mut last = BTreeMap::new();
    Check::new("no decreasing acknowledgement number", move |packet| {
        let (Some(tcp), Some(addresses)) = (packet.tcp(), packet.addresses()) else { return true };
        let flow = (addresses, tcp.source_port(), tcp.destination_port());
        if tcp.syn() || tcp.rst() || !tcp.ack() {
            last.remove(&flow);
            return true;
        }
        let ack = tcp.acknowledgment_number();
        last.insert(flow, ack).is_none_or(|before| ack.wrapping_sub(before) as i32 >= 0)
    })
}

fn range_text<T: fmt::Debug>(range: &impl RangeBounds<T>) -> String {
    let low = match range.start_bound() {
        Bound::Included(low) | Bound::Excluded(low) => format!("{low:?}"),
        Bound::Unbounded => String::new(),
    };
    match range.end_bound() {
        Bound::Included(high) => format!("{low}..={high:?}"),
        Bound::Excluded(high) => format!("{low}..{high:?}"),
        Bound::Unbounded => format!("{low}.."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scripted_peer::{PEER, PEER_PORT, PORT, STACK, frame};
    use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpHeader, TcpOptions};

    fn syn(payload: &[u8]) -> Vec<u8> {
        let header = TcpHeader {
            src_port: PEER_PORT,
            dst_port: PORT,
            seq: SeqNumber(7),
            ack: SeqNumber(9),
            flags: TcpFlags::SYN | TcpFlags::ACK,
            window: 1000,
            urg_ptr: 0,
            header_len: 0,
        };
        frame(&header, &TcpOptions { mss: Some(1460), ..TcpOptions::default() }, payload)
    }

    fn holds(mut check: Check, frame: &[u8]) -> bool {
        check.verify(frame).is_ok()
    }

    #[test]
    fn each_check_matches_only_its_packets() {
        let frame = syn(b"abc");
        let right = [
            well_formed(),
            within_mtu(frame.len() - 14),
            ipv4(),
            tcp(),
            from(PEER),
            to(STACK),
            port(PORT),
            port(PEER_PORT),
            flags("SA"),
            payload(3..4),
            window(..=1000),
            option(TcpOptionElement::MaximumSegmentSize(1460)),
        ];
        for mut check in right {
            assert_eq!(check.verify(&frame), Ok(()));
        }
        let wrong = [
            within_mtu(frame.len() - 15),
            arp(),
            ipv6(),
            udp(),
            icmp(),
            from(STACK),
            to(PEER),
            port(1),
            flags("S"),
            payload(4..),
            window(1001..),
            option(TcpOptionElement::MaximumSegmentSize(1459)),
        ];
        for mut check in wrong {
            assert!(check.verify(&frame).is_err(), "{}", check.description);
        }
    }

    #[test]
    fn any_flipped_bit_is_detected() {
        let frame = syn(b"abcde");
        for bit in 14 * 8..frame.len() * 8 {
            let mut broken = frame.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(!holds(well_formed(), &broken), "bit {bit}");
        }
        for len in 14..frame.len() {
            assert!(!holds(well_formed(), &frame[..len]), "{len} bytes");
        }
        assert!(!holds(well_formed(), &[&frame[..], &[0]].concat()));
    }

    #[test]
    fn checks_combine_with_operators() {
        let frame = syn(b"");
        assert!(holds(tcp() & flags("SA") & !payload(1..), &frame));
        assert!(holds(udp() | tcp(), &frame));
        assert!(!holds(!(udp() | tcp()), &frame));
        let error = (udp() & flags("S") | arp()).verify(&frame).unwrap_err();
        assert!(error.starts_with("(UDP and flags S) or ARP expected, not "), "{error}");
        assert!(error.contains("flags SA, seq 7, ack 9, window 1000, 0 bytes of payload"), "{error}");
    }

    #[test]
    fn decreasing_ack_is_detected_per_direction() {
        let header = |ack| TcpHeader {
            src_port: PEER_PORT,
            dst_port: PORT,
            seq: SeqNumber(7),
            ack: SeqNumber(ack),
            flags: TcpFlags::ACK,
            window: 1000,
            urg_ptr: 0,
            header_len: 0,
        };
        let mut check = acks_never_decrease() & well_formed();
        for (ack, right) in [(u32::MAX, true), (5, true), (5, true), (4, false), (100, true)] {
            let bytes = frame(&header(ack), &TcpOptions::default(), b"");
            assert_eq!(check.verify(&bytes).is_ok(), right, "{ack}");
        }
    }
}
