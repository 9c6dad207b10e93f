//! A network layer on a recording device, and frames as a peer sends them.

use super::{InputResult, IpHeader, L4, Network, NetworkConfig, ParsedFrame, Route, TxChecksum, TxError};
use crate::device::{Capabilities, Label, RxFrame, TxMeta, TxQueue};
use crate::handle::{LinkId, PortId};
use crate::ip::rx_fast_path::{self, FastPathSegment};
use crate::link::LinkConfig;
use crate::time::Instant;
use crate::wire::ethernet::{self, EtherType, VlanTag};
use crate::wire::tcp::{TcpHeader, TcpSegment};
use crate::wire::{MacAddr, arp, ipv4, ipv6, protocol};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;
use std::sync::{Arc, Mutex};

pub(crate) const OUR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
pub(crate) const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
pub(crate) const OUR_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub(crate) const PEER_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
pub(crate) const ROUTER_V4: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 254);
pub(crate) const OUR_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);
pub(crate) const PEER_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 2);

/// The frames that the device has sent, and how many more it accepts.
#[derive(Default)]
pub(crate) struct TxRecorder {
    pub sent: Vec<(Vec<u8>, TxMeta)>,
    pub capacity: usize,
}

/// The transmit half of a device that records frames.
pub(crate) struct RecordingTxQueue {
    pub recorder: Arc<Mutex<TxRecorder>>,
    pub capabilities: Capabilities,
    pub buffer: Vec<u8>,
}

impl TxQueue for RecordingTxQueue {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        assert!(
            len <= (self.capabilities.mtu + 18).max(self.capabilities.gso_bytes_max),
            "reservation of {len} bytes is too long"
        );
        if self.recorder.lock().unwrap().capacity == 0 {
            return None;
        }
        // The contents are undefined, so each call fills in other bytes.
        self.buffer.resize(len, 0);
        self.buffer.fill(0xa5);
        Some(&mut self.buffer)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        let mut recorder = self.recorder.lock().unwrap();
        recorder.capacity -= 1;
        recorder.sent.push((self.buffer[..len].to_vec(), meta));
    }

    fn flush(&mut self, _now: Instant) {}
}

pub(crate) const CAPABILITIES: Capabilities = Capabilities {
    mac: OUR_MAC.0,
    mtu: 1500,
    tx_checksum: false,
    gso_bytes_max: 0,
    uso: false,
    labels: false,
};

pub(crate) struct NetworkFixture {
    pub network: Network,
    pub recorder: Arc<Mutex<TxRecorder>>,
    pub port: PortId,
    pub link: LinkId,
    pub now: Instant,
}

/// Returns a link with addresses of both families.
pub(crate) fn link_config() -> LinkConfig {
    LinkConfig {
        name: "lan".into(),
        addresses: vec![(OUR_V4.into(), 24), (OUR_V6.into(), 64)],
        ..LinkConfig::default()
    }
}

pub(crate) fn network_config() -> NetworkConfig {
    NetworkConfig { dad_transmits: 0, ..NetworkConfig::default() }
}

impl NetworkFixture {
    pub(crate) fn new() -> Self {
        Self::with(network_config(), &link_config(), CAPABILITIES)
    }

    pub(crate) fn with(config: NetworkConfig, link: &LinkConfig, capabilities: Capabilities) -> Self {
        let mut network = Network::new(config, &[3; 32]).unwrap();
        let recorder = Arc::new(Mutex::new(TxRecorder { sent: Vec::new(), capacity: usize::MAX }));
        let queue = RecordingTxQueue { recorder: recorder.clone(), capabilities, buffer: Vec::new() };
        let port = network.add_port(Box::new(queue));
        let link = network.add_link(port, link).unwrap();
        let mut fixture = Self { network, recorder, port, link, now: Instant::from_millis(1_000) };
        // Discards what is sent at start (listener reports), which the tests do not examine.
        fixture.advance(Duration::from_secs(2));
        fixture.sent();
        fixture
    }

    /// Sets how many more frames the device accepts.
    pub(crate) fn set_capacity(&self, room: usize) {
        self.recorder.lock().unwrap().capacity = room;
    }

    /// Takes the frames sent so far, with their offload metadata.
    pub(crate) fn sent_with_meta(&self) -> Vec<(Vec<u8>, TxMeta)> {
        core::mem::take(&mut self.recorder.lock().unwrap().sent)
    }

    /// Takes the frames sent so far.
    pub(crate) fn sent(&self) -> Vec<Vec<u8>> {
        self.sent_with_meta().into_iter().map(|(frame, _)| frame).collect()
    }

    /// Takes the only frame sent so far.
    #[track_caller]
    pub(crate) fn sent_one(&self) -> Vec<u8> {
        let mut frames = self.sent();
        assert_eq!(frames.len(), 1, "frames sent");
        frames.remove(0)
    }

    /// Advances time from one deadline to the next.
    pub(crate) fn advance(&mut self, by: Duration) {
        let end = self.now + by;
        while let Some(at) = self.network.next_deadline().filter(|&at| at <= end) {
            self.now = self.now.max(at);
            self.network.run_timers(self.now);
        }
        self.now = end;
        self.network.run_timers(self.now);
    }

    pub(crate) fn parse<'b>(&mut self, frame: &'b [u8]) -> ParsedFrame<'b> {
        let frame = RxFrame::new(frame);
        let parsed = self.network.parse(self.port, &frame);
        self.network.count_received(&parsed);
        self.check_fast_path(&frame, &parsed);
        parsed
    }

    /// Checks that a frame accepted by the fast path is a TCP segment with the contents that the slow path
    /// finds.
    #[track_caller]
    fn check_fast_path(&self, frame: &RxFrame<'_>, parsed: &ParsedFrame<'_>) {
        let flow_key = rx_fast_path::peek_flow_key(frame.bytes);
        let Some(segment_seen) = self.network.parse_fast(self.port, frame) else { return };
        let ParsedFrame::Tcp(l4) = parsed else { panic!("the slow path finds no segment: {parsed:?}") };
        let FastPathSegment { key, ecn, hop_limit, flow_label, header, options, payload, payload_at } =
            segment_seen;
        let segment = TcpSegment { header: TcpHeader::parse(header), options, payload };
        assert_eq!((key.remote.ip(), key.local.ip(), ecn), (l4.src, l4.dst, l4.ecn));
        assert_eq!((hop_limit, flow_label), (l4.hop_limit, l4.flow_label()));
        assert_eq!((key.remote_port, key.local_port), (segment.header.src_port, segment.header.dst_port));
        assert_eq!(Ok(segment), TcpSegment::parse(l4.bytes));
        assert_eq!(&frame.bytes[payload_at as usize..][..segment.payload.len()], segment.payload);
        assert_eq!(flow_key, Some(key));
    }

    /// Delivers a frame that [`Network::input`] is to handle.
    #[track_caller]
    pub(crate) fn input(&mut self, frame: &[u8]) -> InputResult {
        match self.parse(frame) {
            ParsedFrame::Other(other) => self.network.input(self.now, &other),
            parsed => panic!("not a frame for input: {parsed:?}"),
        }
    }

    #[track_caller]
    pub(crate) fn route(&mut self, dst: impl Into<IpAddr>) -> Route {
        self.network.route(self.now, dst.into(), None).unwrap()
    }

    /// Sends a segment as TCP does, with its checksum at offset 16.
    pub(crate) fn send_tcp(
        &mut self,
        route: &Route,
        dst: impl Into<IpAddr>,
        segment: &[u8],
    ) -> Result<(), TxError> {
        let header = IpHeader {
            src: route.src,
            dst: dst.into(),
            protocol: protocol::TCP,
            tos: 0,
            hop_limit: 64,
            dont_fragment: true,
            flow_label: 0,
            label: Label::NONE,
        };
        let mut packet = self.network.begin(self.now, &route.hop, &header, segment.len())?;
        packet.l4().copy_from_slice(segment);
        let sealed = packet.seal(segment.len(), TxChecksum { offset: 16, payload_sum: None }, None);
        self.network.commit(sealed);
        Ok(())
    }

    /// Makes a peer known by an ARP exchange.
    pub(crate) fn learn_v4(&mut self, peer: Ipv4Addr, mac: MacAddr) {
        let route = self.route(peer);
        self.send_tcp(&route, peer, &segment(0)).unwrap();
        self.input(&arp_reply(peer, mac));
        self.sent();
    }
}

/// Returns a TCP segment with a header of 20 bytes and `payload` bytes after it, without checksum.
pub(crate) fn segment(payload: usize) -> Vec<u8> {
    let mut bytes = vec![0; 20 + payload];
    bytes[..4].copy_from_slice(&[0x30, 0x39, 0, 80]);
    bytes[4..8].copy_from_slice(&[1, 2, 3, 4]);
    bytes[12] = 0x50;
    for (at, byte) in bytes[20..].iter_mut().enumerate() {
        *byte = at as u8;
    }
    bytes
}

/// Returns a frame from the peer to this host.
pub(crate) fn frame(ethertype: EtherType, packet: &[u8]) -> Vec<u8> {
    frame_to(OUR_MAC, None, ethertype, packet)
}

pub(crate) fn frame_to(dst: MacAddr, vlan: Option<u16>, ethertype: EtherType, packet: &[u8]) -> Vec<u8> {
    let vlan = vlan.map(|vid| VlanTag { pcp: 0, dei: false, vid });
    let header = ethernet::Header::new(dst, PEER_MAC, vlan, ethertype);
    let mut out = vec![0; usize::from(header.len)];
    header.emit(&mut out);
    out.extend_from_slice(packet);
    out
}

pub(crate) fn arp_frame(dst: MacAddr, packet: arp::ArpPacket) -> Vec<u8> {
    let mut out = [0; arp::ArpPacket::LEN];
    packet.emit(&mut out);
    frame_to(dst, None, EtherType::ARP, &out)
}

pub(crate) fn arp_request(from: Ipv4Addr, mac: MacAddr, target: Ipv4Addr) -> Vec<u8> {
    let packet = arp::ArpPacket {
        operation: arp::ArpOperation::Request,
        sender_mac: mac,
        sender_ip: from,
        target_mac: MacAddr::ZERO,
        target_ip: target,
    };
    arp_frame(MacAddr::BROADCAST, packet)
}

pub(crate) fn arp_reply(from: Ipv4Addr, mac: MacAddr) -> Vec<u8> {
    let packet = arp::ArpPacket {
        operation: arp::ArpOperation::Reply,
        sender_mac: mac,
        sender_ip: from,
        target_mac: OUR_MAC,
        target_ip: OUR_V4,
    };
    arp_frame(OUR_MAC, packet)
}

pub(crate) fn ipv4_header(src: Ipv4Addr, dst: Ipv4Addr, protocol: u8, payload: usize) -> ipv4::Header {
    ipv4::Header {
        dscp: 0,
        ecn: 0,
        total_len: (20 + payload) as u16,
        ident: 7,
        dont_fragment: false,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol,
        src,
        dst,
        header_len: 20,
    }
}

pub(crate) fn ipv4_packet(header: ipv4::Header, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 20];
    header.emit(&mut out);
    out.extend_from_slice(payload);
    out
}

/// Returns a frame with an IPv4 packet from the peer to this host.
pub(crate) fn v4_frame(protocol: u8, payload: &[u8]) -> Vec<u8> {
    let header = ipv4_header(PEER_V4, OUR_V4, protocol, payload.len());
    frame(EtherType::IPV4, &ipv4_packet(header, payload))
}

pub(crate) fn ipv6_packet(src: Ipv6Addr, dst: Ipv6Addr, next: u8, hop_limit: u8, payload: &[u8]) -> Vec<u8> {
    let header = ipv6::Header {
        dscp: 0,
        ecn: 0,
        flow_label: 0,
        payload_len: payload.len() as u16,
        next_header: next,
        hop_limit,
        src,
        dst,
    };
    let mut out = vec![0; 40];
    header.emit(&mut out);
    out.extend_from_slice(payload);
    out
}

/// Parses the Ethernet header of a transmitted frame and returns it with the packet.
#[track_caller]
pub(crate) fn as_received(frame: &[u8]) -> (ethernet::Header, &[u8]) {
    let header = ethernet::Header::parse(frame).unwrap();
    assert_eq!(header.src, OUR_MAC);
    (header, &frame[usize::from(header.len)..])
}

#[track_caller]
pub(crate) fn tcp_of<'b>(parsed: ParsedFrame<'b>) -> L4<'b> {
    match parsed {
        ParsedFrame::Tcp(l4) => l4,
        parsed => panic!("not TCP: {parsed:?}"),
    }
}
