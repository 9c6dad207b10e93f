//! IP reassembly compared with a model.
//!
//! Every byte of a datagram is a function of its key and offset, so a reassembled datagram has one correct
//! content. The model knows only intervals: a fragment inside another one is a duplicate, any other overlap
//! or contradiction discards the datagram, and a datagram is complete when its fragments cover it.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;
use ginnel_stack::device::{Capabilities, RxFrame, TxMeta, TxQueue};
use ginnel_stack::handle::PortId;
use ginnel_stack::ip::{InputResult, Network, NetworkConfig, ParsedFrame};
use ginnel_stack::link::LinkConfig;
use ginnel_stack::time::Instant;
use ginnel_stack::wire::ethernet::{EtherType, Header};
use ginnel_stack::wire::ipv6::FragmentHeader;
use ginnel_stack::wire::{MacAddr, ipv4, ipv6, protocol};

const LOCAL_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
/// Protocol of all datagrams: UDP, which the network layer passes to the transport if the checksum is
/// correct. The checksum is wrong, so a reassembled datagram is recognized and dropped, and its content is
/// inspected in between.
const PROTOCOL: u8 = protocol::UDP;
/// Bytes that describe one fragment.
const STEP_BYTES: usize = 6;
/// Maximum number of fragments in an input.
const STEPS_MAX: usize = 512;

/// Transmit queue of a device that discards all frames.
struct Sink(Vec<u8>);

impl TxQueue for Sink {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            mac: LOCAL_MAC.0,
            mtu: 9000,
            tx_checksum: false,
            gso_bytes_max: 0,
            uso: false,
            labels: false,
        }
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.0.resize(len, 0);
        Some(&mut self.0)
    }

    fn commit(&mut self, _len: usize, _meta: TxMeta) {}

    fn flush(&mut self, _now: Instant) {}
}

/// Key of a datagram: whether it is IPv6, and its identification.
type Key = (bool, u8);

/// An incomplete datagram in the model.
#[derive(Clone, Debug)]
struct Model {
    /// Fragments as intervals of start and end offset.
    pieces: Vec<(usize, usize)>,
    /// Length of the datagram, once its last fragment has arrived.
    total: Option<usize>,
    /// Time at which the datagram times out.
    until: Instant,
    /// ECN fields seen, one bit each.
    ecn: u8,
}

/// Result of the model for a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Incomplete,
    Discarded,
    Complete(usize),
}

impl Model {
    fn add(&mut self, start: usize, end: usize, more: bool) -> Verdict {
        let end_max = self.pieces.iter().map(|p| p.1).max().unwrap_or(0);
        let contradiction = match (self.total, more) {
            (Some(total), true) => end > total,
            (Some(total), false) => end != total,
            (None, false) => end < end_max,
            (None, true) => false,
        };
        if contradiction {
            return Verdict::Discarded;
        }
        if self.pieces.iter().any(|p| p.0 <= start && end <= p.1) {
            return Verdict::Incomplete;
        }
        if self.pieces.iter().any(|p| start < p.1 && p.0 < end) {
            return Verdict::Discarded;
        }
        self.pieces.push((start, end));
        if !more {
            self.total = Some(end);
        }
        let covered: usize = self.pieces.iter().map(|p| p.1 - p.0).sum();
        if self.total == Some(covered) { Verdict::Complete(covered) } else { Verdict::Incomplete }
    }
}

/// Returns the byte at an offset of a datagram.
fn byte(key: Key, at: usize) -> u8 {
    let n = (at as u32).wrapping_mul(0x9e37_79b1) ^ (u32::from(key.1) << 24) ^ (u32::from(key.0) << 23);
    (n.wrapping_mul(0x85eb_ca6b) >> 24) as u8
}

fn packet(key: Key, start: usize, end: usize, more: bool, ecn: u8) -> Vec<u8> {
    let payload: Vec<u8> = (start..end).map(|at| byte(key, at)).collect();
    if key.0 {
        let header = ipv6::Header {
            dscp: 0,
            ecn,
            flow_label: 0,
            payload_len: (8 + payload.len()) as u16,
            next_header: protocol::FRAGMENT,
            hop_limit: 64,
            src: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2),
            dst: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1),
        };
        let fragment = FragmentHeader {
            next_header: PROTOCOL,
            offset: start as u16,
            more_fragments: more,
            ident: key.1.into(),
        };
        let mut out = vec![0; 48];
        header.emit(&mut out);
        fragment.emit(&mut out[40..]);
        return [out, payload].concat();
    }
    let header = ipv4::Header {
        dscp: 0,
        ecn,
        total_len: (20 + payload.len()) as u16,
        ident: key.1.into(),
        dont_fragment: false,
        more_fragments: more,
        fragment_offset: start as u16,
        ttl: 64,
        protocol: PROTOCOL,
        src: Ipv4Addr::new(10, 0, 0, 2),
        dst: Ipv4Addr::new(10, 0, 0, 1),
        header_len: 20,
    };
    let mut out = vec![0; 20];
    header.emit(&mut out);
    [out, payload].concat()
}

struct ReassemblyFixture {
    network: Network,
    port: PortId,
    now: Instant,
    /// Incomplete datagrams, oldest first.
    models: Vec<(Key, Model)>,
}

impl ReassemblyFixture {
    fn new() -> Self {
        let config = NetworkConfig { dad_transmits: 0, router_solicitations: 0, ..NetworkConfig::default() };
        let mut network = Network::new(config, &[1; 32]).expect("the configuration is valid");
        let port = network.add_port(Box::new(Sink(Vec::new())));
        let addresses: Vec<(IpAddr, u8)> = vec![
            (Ipv4Addr::new(10, 0, 0, 1).into(), 24),
            (Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into(), 64),
        ];
        let link = LinkConfig { name: "fuzz".into(), addresses, ..LinkConfig::default() };
        network.add_link(port, &link).expect("the link is valid");
        let mut fixture = Self { network, port, now: Instant::from_millis(1000), models: Vec::new() };
        fixture.network.run_timers(fixture.now);
        fixture
    }

    fn step(&mut self, s: &[u8; STEP_BYTES]) {
        if s[0] & 0x80 != 0 {
            self.now += Duration::from_millis(u64::from(u16::from_le_bytes([s[1], s[2]])));
            self.expire();
        }
        let key = (s[0] & 1 != 0, s[0] >> 1 & 3);
        // Offsets are mostly small multiples of 8, so that fragments meet; sometimes they reach the maximum.
        let scale = if s[0] & 0x40 != 0 { 256 } else { 8 };
        let start = usize::from(s[3]) * scale;
        let more = s[0] & 8 == 0;
        let units = usize::from(s[4] % 24) * if s[0] & 0x20 != 0 { 8 } else { 1 };
        let len = units * 8 + if more && s[5] & 0x80 == 0 { 0 } else { usize::from(s[5] & 7) };
        let ecn = if s[5] & 0x40 != 0 { s[5] >> 4 & 3 } else { 0 };
        self.fragment(key, start, start + len, more, ecn);
    }

    fn expire(&mut self) {
        let before = self.network.stats().reassembly_timeouts;
        let count = self.models.len();
        self.network.run_timers(self.now);
        self.models.retain(|(_, m)| m.until > self.now);
        let expired = self.network.stats().reassembly_timeouts - before;
        assert_eq!(expired, (count - self.models.len()) as u64, "datagrams that timed out");
    }

    fn fragment(&mut self, key: Key, start: usize, end: usize, more: bool, ecn: u8) {
        let packet = packet(key, start, end, more, ecn);
        let ethertype = if key.0 { EtherType::IPV6 } else { EtherType::IPV4 };
        let mut frame = vec![0; 14];
        Header::new(LOCAL_MAC, MacAddr([2; 6]), None, ethertype).emit(&mut frame);
        frame.extend_from_slice(&packet);
        let rejected_before = self.rejected();
        let content = self.deliver(&frame);
        let rejected = self.rejected() - rejected_before;
        let expected = self.model_verdict(key, start, end, more, ecn, rejected);
        match (content, expected) {
            (Some(content), Verdict::Complete(total)) => {
                assert_eq!(content.len(), total, "length of {key:?}");
                let wrong = content.iter().enumerate().position(|(at, b)| *b != byte(key, at));
                assert_eq!(wrong, None, "offset of the first wrong byte of {key:?}");
            }
            (None, Verdict::Incomplete | Verdict::Discarded) => {}
            (content, expected) => {
                panic!(
                    "{start}..{end} of {key:?}: {expected:?} expected, {:?} bytes delivered",
                    content.map(|c| c.len())
                )
            }
        }
    }

    /// Returns the number of fragments and datagrams that the network layer has rejected.
    fn rejected(&self) -> u64 {
        let (stats, drops) = (self.network.stats(), self.network.drops());
        stats.reassembly_malformed + stats.reassembly_overlaps + drops.entries().map(|(_, n)| n).sum::<u64>()
    }

    /// Delivers a frame. Returns the payload of the datagram that it completed.
    fn deliver(&mut self, frame: &[u8]) -> Option<Vec<u8>> {
        let rx = RxFrame::new(frame);
        let parsed = self.network.parse(self.port, &rx);
        self.network.count_received(&parsed);
        let ParsedFrame::Other(other) = parsed else { return None };
        let InputResult::Reassembled(reassembled) = self.network.input(self.now, &other) else { return None };
        let packet = reassembled.bytes();
        let content = if packet[0] >> 4 == 6 {
            let header = ipv6::Header::parse(packet).expect("header of a reassembled packet");
            assert_eq!(usize::from(header.payload_len) + 40, packet.len());
            packet[40..].to_vec()
        } else {
            let header = ipv4::Header::parse(packet).expect("header of a reassembled packet");
            assert!(header.checksum_ok(packet) && !header.is_fragment());
            assert_eq!(usize::from(header.total_len), packet.len());
            packet[20..].to_vec()
        };
        let _ = self.network.parse_reassembled(&reassembled);
        self.network.recycle(reassembled);
        Some(content)
    }

    /// Returns the model's result. `rejected` is the number of rejections by the network layer for this
    /// fragment; the model follows it in what it does not know (lengths, ECN, datagrams that are too long).
    fn model_verdict(
        &mut self,
        key: Key,
        start: usize,
        end: usize,
        more: bool,
        ecn: u8,
        rejected: u64,
    ) -> Verdict {
        let len = end - start;
        let header = if key.0 { 0 } else { 20 };
        let invalid = len == 0 || more && !len.is_multiple_of(8) || end + header > 65_535;
        if invalid {
            assert!(rejected > 0, "invalid fragment {start}..{end} of {key:?} was accepted");
            return Verdict::Discarded;
        }
        if start == 0 && !more {
            // An unfragmented packet, or an atomic fragment (RFC 6946), never meets other fragments.
            return Verdict::Incomplete;
        }
        if key.0 && start == 0 && len < 8 {
            // RFC 7112: the first fragment must contain all headers.
            return Verdict::Discarded;
        }
        let at = self.models.iter().position(|(k, _)| *k == key).unwrap_or_else(|| {
            let until = self.now + Duration::from_secs(if key.0 { 60 } else { 30 });
            self.models.push((key, Model { pieces: Vec::new(), total: None, until, ecn: 0 }));
            self.models.len() - 1
        });
        let model = &mut self.models[at].1;
        let pieces = model.pieces.len();
        let verdict = model.add(start, end, more);
        if model.pieces.len() > pieces {
            model.ecn |= 1 << ecn;
        }
        let mixed = model.ecn & 1 != 0 && model.ecn != 1;
        match verdict {
            Verdict::Incomplete => {}
            Verdict::Discarded => {
                assert!(rejected > 0, "{start}..{end} of {key:?} was accepted");
                self.models.remove(at);
            }
            Verdict::Complete(_) => {
                self.models.remove(at);
                if mixed {
                    // RFC 3168 §5.3: ECN-capable and not-ECN-capable fragments must not be mixed in one
                    // datagram.
                    assert!(rejected > 0, "ECN of fragments of {key:?} is mixed");
                    return Verdict::Discarded;
                }
            }
        }
        verdict
    }
}

/// Runs one input: six bytes for each fragment.
///
/// # Panics
/// If network layer and model differ.
pub fn run(data: &[u8]) {
    let mut fixture = ReassemblyFixture::new();
    for step in data.as_chunks::<STEP_BYTES>().0.iter().take(STEPS_MAX) {
        fixture.step(step);
    }
    // The remaining datagrams time out.
    fixture.now += Duration::from_secs(61);
    fixture.expire();
    assert_eq!(fixture.models.len(), 0, "datagrams that did not time out");
}

/// Returns the handwritten seed inputs.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let f = |flags: u8, offset: u8, units: u8, rest: u8| [flags, 0, 0, offset, units, rest];
    let in_order = [f(0, 0, 4, 0), f(0, 4, 4, 0), f(8, 8, 1, 3)].concat();
    let backwards = [f(9, 8, 1, 3), f(1, 4, 4, 0), f(1, 0, 4, 0)].concat();
    let overlap = [f(0, 0, 4, 0), f(0, 3, 4, 0), f(8, 8, 1, 0)].concat();
    let duplicate = [f(0, 0, 4, 0), f(0, 1, 2, 0), f(8, 4, 1, 0)].concat();
    let contradiction = [f(8, 8, 1, 0), f(0, 12, 1, 0), f(8, 4, 1, 0)].concat();
    let late = [f(0, 0, 4, 0), [0x88, 0xff, 0xff, 4, 1, 0], f(0, 0, 4, 0)].concat();
    let several =
        [f(0, 0, 4, 0), f(2, 0, 4, 0), f(5, 0, 4, 0), f(8, 4, 1, 0), f(10, 4, 1, 1), f(13, 4, 0, 5)].concat();
    let long = [f(0x60, 0, 23, 0), f(0x68, 174, 10, 0), f(0x20, 23, 23, 0)].concat();
    let ecn = [f(0, 0, 4, 0x70), f(8, 4, 1, 0x60), f(0, 0, 4, 0), f(8, 4, 1, 0x50)].concat();
    let odd = [f(0, 0, 4, 0x83), f(1, 0, 0, 0), f(9, 0, 0, 5)].concat();
    vec![
        ("in-order", in_order),
        ("backwards-v6", backwards),
        ("overlap", overlap),
        ("duplicate", duplicate),
        ("contradiction", contradiction),
        ("late", late),
        ("several", several),
        ("long", long),
        ("ecn", ecn),
        ("odd-lengths", odd),
    ]
}
