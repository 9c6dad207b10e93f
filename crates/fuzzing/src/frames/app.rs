//! The application: its sockets, and the invariants of what the stack reports to it.

use super::peer::{Peer, inbound_byte, outbound_byte};
use super::udp::UdpSockets;
use core::net::SocketAddr;
use core::ops::Range;
use ginnel_stack::device::RxBurst;
use ginnel_stack::events::Event;
use ginnel_stack::handle::{Conn, Listener};
use ginnel_stack::stack::Stack;
use ginnel_stack::stream_position::StreamPosition;
use ginnel_stack::tcp::source::Source;
use ginnel_stack::tcp::state::State;
use ginnel_stack::wire::tcp::SeqNumber;
use std::collections::BTreeSet;

/// A connection of the application.
#[derive(Clone, Debug)]
pub struct AppConn {
    /// The handle.
    pub conn: Conn,
    /// The addresses: the remote end, then the local end.
    pub ends: (SocketAddr, SocketAddr),
    /// Bytes that the stack accepted for sending.
    pub sent: u64,
    /// Position in the received stream.
    pub position: StreamPosition,
    /// Ranges that were received unordered.
    pub early: Vec<Range<u64>>,
    /// Initial receive sequence number (IRS), once only one ISN of the peer fits the received bytes.
    pub irs: Option<SeqNumber>,
    /// True if FIN was reported.
    pub peer_closed: bool,
    /// True if the end was reported.
    pub ended: bool,
}

/// Digest of a sequence of frames, to compare two runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameDigest {
    /// Number of frames.
    pub count: u64,
    hash: u64,
}

impl FrameDigest {
    /// Adds a frame.
    pub fn add(&mut self, frame: &[u8]) {
        self.count += 1;
        self.hash = frame.iter().fold(self.hash, |hash, byte| hash.rotate_left(5) ^ u64::from(*byte));
    }
}

/// The application.
pub struct App {
    /// All connections that were accepted or opened.
    pub conns: Vec<AppConn>,
    /// Open listeners with their addresses.
    pub listeners: Vec<(Listener, SocketAddr)>,
    /// True if connections are accepted when they are reported.
    pub auto_accept: bool,
    /// Share of in-burst data that the application takes: 0 none, 1 half, 2 all.
    pub take_share: u8,
    /// True if data are read when they are reported as readable.
    pub reads_when_readable: bool,
    /// The UDP sockets.
    pub udp: UdpSockets,
    /// TCP states seen so far.
    pub states: BTreeSet<State>,
    /// Number of events.
    pub events: u64,
    /// Digest of the frames that the stack sent.
    pub frames: FrameDigest,
}

impl Default for App {
    fn default() -> Self {
        Self {
            conns: Vec::new(),
            listeners: Vec::new(),
            auto_accept: true,
            take_share: 2,
            reads_when_readable: true,
            udp: UdpSockets::default(),
            states: BTreeSet::from([State::Closed]),
            events: 0,
            frames: FrameDigest::default(),
        }
    }
}

/// A source that has at each offset the byte which every outbound stream has there.
pub struct EndlessSource;

impl Source for EndlessSource {
    fn len(&self) -> u64 {
        1 << 40
    }

    fn fill(&self, offset: u64, out: &mut [u8]) {
        for (byte, at) in out.iter_mut().zip(offset..) {
            *byte = outbound_byte(at);
        }
    }
}

impl AppConn {
    /// Checks bytes at offset `at` against the stream.
    fn check_bytes(&mut self, at: u64, bytes: &[u8], peers: &[Peer]) {
        let Some(peer) = peers.iter().find(|p| (p.remote, p.local) == self.ends) else { return };
        if peer.tainted || bytes.is_empty() {
            return;
        }
        let matches = |irs: SeqNumber| {
            let first = irs + 1 + at as u32;
            bytes.iter().enumerate().all(|(i, byte)| *byte == inbound_byte(first + i as u32))
        };
        if let Some(irs) = self.irs {
            assert!(matches(irs), "wrong bytes at offset {at}, {} of them", bytes.len());
            return;
        }
        let mut candidates = peer.own_isns.iter().copied().filter(|s| matches(*s));
        let first = candidates.next();
        assert!(
            first.is_some() || peer.own_isns.is_full(),
            "wrong bytes at offset {at}, {} of them",
            bytes.len()
        );
        // A short read may match several streams.
        if candidates.next().is_none() {
            self.irs = first;
        }
    }
}

impl App {
    /// Returns the connection that an operand selects.
    pub fn pick_conn(&mut self, number: u8) -> Option<&mut AppConn> {
        // Live connections are preferred: operations on ended ones are rarely of interest.
        let live_count = self.conns.iter().filter(|c| !c.ended).count();
        if live_count > 0 && number < 0xf0 {
            return self.conns.iter_mut().filter(|c| !c.ended).nth(usize::from(number) % live_count);
        }
        let count = self.conns.len();
        self.conns.get_mut(usize::from(number) % count.max(1))
    }

    /// Registers a new connection.
    pub fn register_conn(&mut self, stack: &Stack, conn: Conn) {
        let info = stack.info(conn).expect("a new connection");
        let registered = self.conns.iter().any(|c| c.conn == conn);
        assert!(!registered, "{conn:?} was returned twice");
        self.conns.push(AppConn {
            conn,
            ends: (info.remote, info.local),
            sent: 0,
            position: StreamPosition::new(),
            early: Vec::new(),
            irs: None,
            peer_closed: false,
            ended: false,
        });
    }

    /// Returns the maximum number of bytes that a connection between these addresses has sent.
    pub fn sent_max(&self, ends: (SocketAddr, SocketAddr)) -> u64 {
        self.conns.iter().filter(|c| c.ends == ends).map(|c| c.sent).max().unwrap_or(0)
    }

    /// Processes all events. `burst` contains the in-burst data.
    pub fn take_events(&mut self, stack: &mut Stack, burst: &RxBurst<'_>, peers: &[Peer]) {
        while let Some(event) = stack.next_event() {
            self.events += 1;
            match event {
                Event::ListenerDestroyed { .. } => panic!("no administrator closed a listener"),
                Event::Incoming { listener } => {
                    if self.auto_accept {
                        self.accept(stack, listener);
                    }
                }
                Event::Data { conn, data } => {
                    let bytes = stack.inline_data(burst, &data);
                    assert!(!bytes.is_empty() && bytes.len() == data.len(), "data without bytes");
                    // Buffered bytes must be read first.
                    let buffered = stack.buffered(conn) > 0;
                    let take =
                        if buffered { 0 } else { bytes.len() * usize::from(self.take_share.min(2)) / 2 };
                    self.check_received(conn, &bytes[..take], peers);
                    stack.consume(conn, data, take, burst);
                }
                Event::Readable { conn } => {
                    if self.reads_when_readable {
                        self.read(stack, conn, usize::MAX, peers);
                    }
                }
                Event::Unordered { conn } => {
                    self.live_conn(conn, &event);
                    if self.reads_when_readable {
                        self.read_unordered(stack, conn, peers);
                    }
                }
                Event::PeerClosed { conn } => {
                    let c = self.live_conn(conn, &event);
                    assert!(!c.peer_closed, "FIN was reported twice");
                    c.peer_closed = true;
                }
                Event::Closed { conn, .. } => {
                    // The receive buffer can be read for the last time.
                    self.read(stack, conn, usize::MAX, peers);
                    self.live_conn(conn, &event).ended = true;
                }
                Event::Connected { conn }
                | Event::Writable { conn }
                | Event::Acked { conn, .. }
                | Event::Urgent { conn, .. } => {
                    self.live_conn(conn, &event);
                }
                Event::UdpReadable { socket } => {
                    self.udp.on_readable(stack, socket, self.reads_when_readable)
                }
            }
        }
        for c in self.conns.iter().filter(|c| c.ended) {
            assert!(stack.state(c.conn).is_none(), "{:?} still exists after its end was reported", c.conn);
        }
    }

    fn live_conn(&mut self, conn: Conn, event: &Event) -> &mut AppConn {
        let app_conn = self.conns.iter_mut().find(|c| c.conn == conn);
        let app_conn = app_conn.unwrap_or_else(|| panic!("{event:?} of an unknown connection"));
        assert!(!app_conn.ended, "{event:?} after the end");
        app_conn
    }

    /// Accepts one connection.
    pub fn accept(&mut self, stack: &mut Stack, listener: Listener) {
        if let Some(conn) = stack.accept(listener) {
            self.register_conn(stack, conn);
        }
    }

    /// Reads until `bytes_max` bytes were read or no data are left.
    pub fn read(&mut self, stack: &mut Stack, conn: Conn, bytes_max: usize, peers: &[Peer]) {
        let mut left = bytes_max;
        let mut buffer = [0; 4096];
        while left > 0 {
            let limit = left.min(buffer.len());
            let readable = stack.readable(conn);
            match stack.recv(conn, &mut buffer[..limit]) {
                Ok(0) | Err(_) => break,
                Ok(n) => {
                    assert!(n <= limit && n <= readable, "{n} bytes of {readable}");
                    self.check_received(conn, &buffer[..n], peers);
                    left -= n;
                }
            }
        }
    }

    /// Checks bytes that reached the application against the stream.
    fn check_received(&mut self, conn: Conn, bytes: &[u8], peers: &[Peer]) {
        let Some(c) = self.conns.iter_mut().find(|c| c.conn == conn) else {
            panic!("data of an unknown connection")
        };
        let at = c.position.on_data(bytes.len());
        let end = at + bytes.len() as u64;
        assert!(c.early.iter().all(|early| early.end <= at || end <= early.start), "bytes were read twice");
        c.check_bytes(at, bytes, peers);
    }

    /// Takes the bytes that arrived ahead of missing ones (unordered receive).
    fn read_unordered(&mut self, stack: &mut Stack, conn: Conn, peers: &[Peer]) {
        let mut buffer = [0; 700];
        while let Ok(Some(taken)) = stack.recv_unordered(conn, &mut buffer) {
            let Some(c) = self.conns.iter_mut().find(|c| c.conn == conn) else {
                panic!("data of an unknown connection")
            };
            assert!(taken.len > 0 && taken.ahead > 0, "{taken:?}");
            let at = c.position.on_unordered(taken);
            let end = at + taken.len as u64;
            assert!(
                c.early.iter().all(|early| early.end <= at || end <= early.start),
                "bytes were taken twice"
            );
            let next = c.position.next();
            c.early.retain(|early| early.end > next);
            c.early.push(at..end);
            c.check_bytes(at, &buffer[..taken.len], peers);
        }
    }

    /// Sends up to `len` bytes of the stream, limited by send space.
    pub fn send(&mut self, stack: &mut Stack, number: u8, len: usize, urgent: bool) {
        let Some(c) = self.pick_conn(number) else { return };
        let bytes: Vec<u8> = (c.sent..).take(len).map(outbound_byte).collect();
        let accepted = if urgent { stack.send_urgent(c.conn, &bytes) } else { stack.send(c.conn, &bytes) };
        if let Ok(accepted) = accepted {
            assert!(accepted <= len, "more bytes accepted than passed");
            c.sent += accepted as u64;
        }
    }

    /// Records the current states of all connections.
    pub fn record_states(&mut self, stack: &Stack) {
        let usage = stack.usage();
        if !self.listeners.is_empty() {
            self.states.insert(State::Listen);
        }
        if usage.half_open > 0 {
            self.states.insert(State::SynReceived);
        }
        if usage.time_wait > 0 {
            self.states.insert(State::TimeWait);
        }
        for c in self.conns.iter().filter(|c| !c.ended) {
            if let Some(state) = stack.state(c.conn) {
                self.states.insert(state);
            }
        }
    }
}
