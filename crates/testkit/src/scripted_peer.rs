//! A stack whose only peer is the test: the test builds every segment that the stack receives and inspects
//! every segment that the stack sends.

use crate::sim::{FrameQueue, FrameQueueTx};
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::device::{Label, RxBurst, RxFrame};
use ginnel_stack::events::Event;
use ginnel_stack::handle::{Conn, Listener, PortId};
use ginnel_stack::link::LinkConfig;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::stream_position::StreamPosition;
use ginnel_stack::time::Instant;
use ginnel_stack::wire::checksum::{Sum, pseudo_v4};
use ginnel_stack::wire::ethernet::{self, EtherType};
use ginnel_stack::wire::tcp::{self, SeqNumber, TcpFlags, TcpHeader, TcpOptions, TcpSegment};
use ginnel_stack::wire::{MacAddr, arp, ipv4, protocol};

const STACK_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const PEER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
/// IPv4 address of the stack.
pub const STACK: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// IPv4 address of the peer, whose segments the test builds.
pub const PEER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// TCP port of the stack.
pub const PORT: u16 = 80;
/// TCP port of the peer.
pub const PEER_PORT: u16 = 40_000;
/// Initial sequence number of the peer.
pub const PEER_ISS: u32 = 1_000;

/// A TCP segment that the stack sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentSegment {
    /// The type of service.
    pub tos: u8,
    /// The TCP header.
    pub header: TcpHeader,
    /// The parsed TCP options.
    pub options: TcpOptions,
    /// The payload bytes.
    pub payload: Vec<u8>,
}

/// Bytes that the application has received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedBytes {
    /// Offset in the stream.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// True if bytes before them were missing.
    pub is_early: bool,
}

/// A stack together with the state of its scripted peer.
pub struct ScriptedPeer {
    /// The stack under test.
    pub stack: Stack,
    /// The simulated time.
    pub now: Instant,
    /// All events of the stack, in the order in which it reported them.
    pub events: Vec<Event>,
    /// True if the application leaves received data unread, in the burst and in the receive buffer.
    pub defer_reads: bool,
    /// Bytes that the application has read, of all connections together.
    pub read: Vec<u8>,
    /// Every read of the application with its offset, if the test has set this list; valid for tests with a
    /// single connection.
    pub received: Option<Vec<ReceivedBytes>>,
    /// Position of the application in the stream.
    position: StreamPosition,
    /// The connection under test: the last one that was accepted or opened.
    pub conn: Option<Conn>,
    /// The stack's initial sequence number, taken from the last SYN that it sent; 0 before.
    pub iss: u32,
    /// Ports of the connection: the stack's port, then the peer's port.
    pub ports: (u16, u16),
    port: PortId,
    sent_frames: FrameQueue,
    sent: Vec<SentSegment>,
}

impl ScriptedPeer {
    /// Creates a stack that has a static neighbour entry for the peer.
    ///
    /// # Panics
    /// If `config` is invalid.
    pub fn new(config: StackConfig) -> Self {
        Self::with_neighbours(config, vec![(IpAddr::V4(PEER), PEER_MAC)])
    }

    /// Creates a stack that knows the peer only from an ARP request of the peer: the neighbour entry is
    /// STALE.
    ///
    /// # Panics
    /// If `config` is invalid.
    pub fn with_stale_neighbour(config: StackConfig) -> Self {
        let mut peer = Self::with_neighbours(config, Vec::new());
        let request = arp::ArpPacket {
            operation: arp::ArpOperation::Request,
            sender_mac: PEER_MAC,
            sender_ip: PEER,
            target_mac: MacAddr::ZERO,
            target_ip: STACK,
        };
        let mut frame = vec![0; ethernet::Header::LEN + arp::ArpPacket::LEN];
        let at = ethernet::Header::new(MacAddr::BROADCAST, PEER_MAC, None, EtherType::ARP).emit(&mut frame);
        request.emit(&mut frame[at..]);
        peer.deliver_frame(&frame);
        peer
    }

    fn with_neighbours(config: StackConfig, static_neighbours: Vec<(IpAddr, MacAddr)>) -> Self {
        let now = Instant::from_millis(1_000_000);
        let mut stack = Stack::new(config, [7; 32], now).expect("the test's configuration is valid");
        let outbox = FrameQueue::default();
        let port = stack.add_port(Box::new(FrameQueueTx::new(outbox.clone(), STACK_MAC.0, 1500)));
        let link = LinkConfig {
            name: "peer".into(),
            addresses: vec![(IpAddr::V4(STACK), 24)],
            static_neighbours,
            ..LinkConfig::default()
        };
        stack.add_link(port, &link).expect("the link is valid");
        let mut peer = Self {
            stack,
            now,
            events: Vec::new(),
            defer_reads: false,
            read: Vec::new(),
            received: None,
            position: StreamPosition::new(),
            conn: None,
            iss: 0,
            ports: (PORT, PEER_PORT),
            port,
            sent_frames: outbox,
            sent: Vec::new(),
        };
        peer.turn(&[]);
        peer
    }

    /// Creates a stack that has accepted a connection of the peer, whose SYN carried `options`.
    ///
    /// # Panics
    /// If `config` is invalid, or the stack does not accept the connection.
    pub fn established(config: StackConfig, options: &TcpOptions) -> Self {
        let mut peer = Self::new(config);
        peer.listen();
        peer.open(options);
        peer
    }

    /// Opens a connection from the peer with a SYN that carries `options`. Returns the handle of the accepted
    /// connection.
    ///
    /// # Panics
    /// If the stack does not accept the connection.
    pub fn open(&mut self, options: &TcpOptions) -> Conn {
        let syn = self.segment(TcpFlags::SYN, 0, 0, &[], options);
        self.deliver_frame(&syn);
        self.deliver(TcpFlags::ACK, 1, 1, &[]);
        self.conn.expect("the stack accepted the connection")
    }

    /// Listens on [`PORT`] at the stack's address.
    ///
    /// # Panics
    /// If the port is in use.
    pub fn listen(&mut self) -> Listener {
        let addr = SocketAddr::new(STACK.into(), PORT);
        self.stack.listen(addr, ListenOptions::default()).expect("the port is free")
    }

    /// Opens a connection from the stack to the peer and lets the SYN leave.
    ///
    /// # Panics
    /// If the stack refuses the connection or sends no SYN.
    pub fn connect(&mut self) -> Conn {
        let to = SocketAddr::new(PEER.into(), PEER_PORT);
        let conn =
            self.stack.connect(self.now, to, &ConnectOptions::default()).expect("the peer is on the link");
        self.conn = Some(conn);
        self.turn(&[]);
        let syn = self.sent.last().expect("the stack sent a SYN").header;
        self.ports = (syn.src_port, PEER_PORT);
        self.iss = syn.seq.0;
        conn
    }

    /// Returns a frame with a segment of the peer. `seq` is relative to the peer's initial sequence number,
    /// `ack` to the stack's.
    pub fn segment(
        &self,
        flags: TcpFlags,
        seq: i64,
        ack: i64,
        payload: &[u8],
        options: &TcpOptions,
    ) -> Vec<u8> {
        let header = self.header(flags, seq, ack);
        frame(&header, options, payload)
    }

    /// Returns a frame with a segment of the peer that has this window field and this urgent pointer.
    pub fn custom_segment(
        &self,
        flags: TcpFlags,
        seq: i64,
        ack: i64,
        window: u16,
        urgent: u16,
        payload: &[u8],
    ) -> Vec<u8> {
        let header = TcpHeader { window, urg_ptr: urgent, ..self.header(flags, seq, ack) };
        frame(&header, &TcpOptions::default(), payload)
    }

    fn header(&self, flags: TcpFlags, seq: i64, ack: i64) -> TcpHeader {
        TcpHeader {
            src_port: self.ports.1,
            dst_port: self.ports.0,
            seq: SeqNumber(PEER_ISS.wrapping_add(seq as u32)),
            ack: if flags.contains(TcpFlags::ACK) {
                SeqNumber(self.iss.wrapping_add(ack as u32))
            } else {
                SeqNumber(0)
            },
            flags,
            window: 60_000,
            urg_ptr: 0,
            header_len: 0,
        }
    }

    /// Delivers a segment without options and runs one turn. Returns the segments that the stack sent.
    pub fn deliver(&mut self, flags: TcpFlags, seq: i64, ack: i64, payload: &[u8]) -> Vec<SentSegment> {
        let frame = self.segment(flags, seq, ack, payload, &TcpOptions::default());
        self.deliver_frame(&frame)
    }

    /// Delivers a frame and runs one turn. Returns the segments that the stack sent.
    pub fn deliver_frame(&mut self, frame: &[u8]) -> Vec<SentSegment> {
        self.sent.clear();
        self.turn(&[frame]);
        self.sent.clone()
    }

    /// Delivers frames with priorities in one burst and runs one turn. Returns the segments that the stack
    /// sent.
    pub fn deliver_prioritized(&mut self, frames: &[(Vec<u8>, u8)]) -> Vec<SentSegment> {
        self.sent.clear();
        let frames: RxBurst<'_> = frames
            .iter()
            .map(|(bytes, priority)| RxFrame { label: Label::new(None, *priority), ..RxFrame::new(bytes) })
            .collect();
        self.turn_with(&frames);
        self.sent.clone()
    }

    /// Delivers frames in one burst and runs one turn. Returns the segments that the stack sent.
    pub fn deliver_frames(&mut self, frames: &[Vec<u8>]) -> Vec<SentSegment> {
        self.sent.clear();
        let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
        self.turn(&frames);
        self.sent.clone()
    }

    /// Delivers frames in one burst and leaves the resulting events in the stack.
    pub fn receive_without_events(&mut self, frames: &[Vec<u8>]) {
        let mut burst = RxBurst::new();
        for bytes in frames {
            burst.push(RxFrame::new(bytes));
        }
        self.stack.receive(self.now, self.port, &burst);
        self.stack.finish_burst(&burst);
        self.stack.check_invariants();
    }

    /// Runs one turn without frames. Returns the segments that the stack sent.
    pub fn flush(&mut self) -> Vec<SentSegment> {
        self.sent.clear();
        self.turn(&[]);
        self.sent.clone()
    }

    /// Advances the time by `time` and runs a turn at each deadline. Returns the segments that the stack
    /// sent.
    pub fn wait(&mut self, time: Duration) -> Vec<SentSegment> {
        self.sent.clear();
        let until = self.now + time;
        while let Some(at) = self.stack.next_deadline().filter(|at| *at <= until) {
            self.now = at.max(self.now + Duration::from_micros(1));
            self.turn(&[]);
        }
        self.now = self.now.max(until);
        self.turn(&[]);
        self.sent.clone()
    }

    fn turn(&mut self, frames: &[&[u8]]) {
        let mut burst = RxBurst::new();
        for bytes in frames {
            burst.push(RxFrame::new(bytes));
        }
        self.turn_with(&burst);
    }

    fn turn_with(&mut self, burst: &RxBurst<'_>) {
        self.stack.receive(self.now, self.port, burst);
        self.take_events(burst);
        self.stack.finish_burst(burst);
        self.stack.advance(self.now);
        self.take_events(&RxBurst::new());
        self.stack.transmit(self.now);
        self.stack.check_invariants();
        for frame in self.sent_frames.take() {
            if let Some(sent) = parse(&frame) {
                if sent.header.flags.contains(TcpFlags::SYN) {
                    self.iss = sent.header.seq.0;
                }
                self.sent.push(sent);
            }
        }
    }

    fn take_events(&mut self, burst: &RxBurst<'_>) {
        while let Some(event) = self.stack.next_event() {
            self.events.push(event);
            match event {
                Event::Incoming { listener } => self.conn = self.stack.accept(listener),
                Event::Data { conn, data } if !self.defer_reads => {
                    let bytes = self.stack.inline_data(burst, &data);
                    self.read.extend_from_slice(bytes);
                    self.note_received(bytes);
                    self.stack.consume(conn, data, bytes.len(), burst);
                }
                Event::Readable { conn } if !self.defer_reads => {
                    let mut buffer = [0; 4096];
                    while let Ok(n @ 1..) = self.stack.recv(conn, &mut buffer) {
                        self.read.extend_from_slice(&buffer[..n]);
                        self.note_received(&buffer[..n]);
                    }
                }
                Event::Unordered { conn } if !self.defer_reads => while self.take_unordered(conn) {},
                _ => {}
            }
        }
    }
}

impl ScriptedPeer {
    /// Takes the next bytes that are available before bytes which precede them. Returns false if there are
    /// none.
    ///
    /// # Panics
    /// If the handle is stale.
    pub fn take_unordered(&mut self, conn: Conn) -> bool {
        let mut buffer = [0; 4096];
        let Some(taken) = self.stack.recv_unordered(conn, &mut buffer).expect("the connection is open")
        else {
            return false;
        };
        let offset = self.position.on_unordered(taken);
        let bytes = buffer[..taken.len].to_vec();
        self.received.get_or_insert_default().push(ReceivedBytes { offset, bytes, is_early: true });
        true
    }

    /// Reads what is in the receive buffer in order, `out.len()` bytes at a time.
    pub fn read_buffered(&mut self, conn: Conn, out: &mut [u8]) {
        while let Ok(n @ 1..) = self.stack.recv(conn, out) {
            self.read.extend_from_slice(&out[..n]);
            self.note_received(&out[..n]);
        }
    }

    fn note_received(&mut self, bytes: &[u8]) {
        if let Some(received) = &mut self.received {
            let offset = self.position.on_data(bytes.len());
            received.push(ReceivedBytes { offset, bytes: bytes.to_vec(), is_early: false });
        }
    }
}

/// Returns an Ethernet frame from the peer to the stack. The header's ports are sent as they are.
pub fn frame(header: &TcpHeader, options: &TcpOptions, payload: &[u8]) -> Vec<u8> {
    let l4 = TcpHeader::LEN + options.encoded_len() + payload.len();
    let mut out = vec![0; 14 + 20 + l4];
    let ethernet = ethernet::Header::new(STACK_MAC, PEER_MAC, None, EtherType::IPV4);
    let at = ethernet.emit(&mut out);
    let ip = ipv4::Header {
        dscp: 0,
        ecn: 0,
        total_len: (20 + l4) as u16,
        ident: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol: protocol::TCP,
        src: PEER,
        dst: STACK,
        header_len: 20,
    };
    ip.emit(&mut out[at..]);
    let segment = &mut out[at + 20..];
    let len = tcp::emit(header, options, segment);
    segment[len..].copy_from_slice(payload);
    let sum = pseudo_v4(PEER, STACK, protocol::TCP, l4).add(Sum::of(segment)).finish();
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    out
}

fn parse(frame: &[u8]) -> Option<SentSegment> {
    let ip = frame.get(14..).filter(|_| frame[12..14] == [8, 0])?;
    let header = ipv4::Header::parse(ip).ok().filter(|h| h.protocol == protocol::TCP)?;
    let payload = header.payload(ip);
    let sum = pseudo_v4(header.src, header.dst, protocol::TCP, payload.len()).add(Sum::of(payload));
    assert!(sum.is_valid(), "the stack sent a segment with a wrong checksum");
    let segment = TcpSegment::parse(payload).expect("the stack sends valid headers");
    Some(SentSegment {
        tos: header.dscp << 2 | header.ecn,
        header: segment.header,
        options: TcpOptions::parse(segment.options),
        payload: segment.payload.to_vec(),
    })
}
