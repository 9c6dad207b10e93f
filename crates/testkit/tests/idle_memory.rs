//! Memory of an idle connection, measured as resident memory of this process, which does nothing else. The
//! stack allows ten million connections: reserved memory must not be touched.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use ginnel_stack::device::{Capabilities, RxBurst, RxFrame, TxMeta, TxQueue};
use ginnel_stack::events::Event;
use ginnel_stack::handle::PortId;
use ginnel_stack::link::LinkConfig;
use ginnel_stack::options::ListenOptions;
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::time::Instant;
use ginnel_stack::wire::MacAddr;
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpHeader, TcpOptions, TcpSegment};
use ginnel_testkit::scripted_peer::{PEER, STACK, frame};
use std::sync::{Arc, Mutex};

const CONNECTIONS: u32 = 100_000;
const BYTES_MAX: u64 = 192;
/// Connections from one address to one listener.
const PER_LISTENER: u32 = 50_000;
const REQUEST: [u8; 100] = [1; 100];
const RESPONSE: [u8; 300] = [2; 300];

/// Stores the sequence number of the last segment sent.
struct LastSeqTx {
    last: Arc<Mutex<u32>>,
    buffer: Vec<u8>,
}

impl TxQueue for LastSeqTx {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            tx_checksum: false,
            gso_bytes_max: 0,
            uso: false,
            labels: false,
        }
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.buffer.resize(len, 0);
        Some(&mut self.buffer)
    }

    fn commit(&mut self, len: usize, _: TxMeta) {
        if let Some(Ok(segment)) = self.buffer.get(34..len).map(TcpSegment::parse) {
            *self.last.lock().unwrap() = segment.header.seq.0;
        }
    }

    fn flush(&mut self, _: Instant) {}
}

struct Server {
    stack: Stack,
    port: PortId,
    now: Instant,
    last: Arc<Mutex<u32>>,
}

impl Server {
    fn new() -> Self {
        let mut config = StackConfig::default();
        config.tcp.connections_max = 10_000_000;
        let now = Instant::from_millis(1000);
        let mut stack = Stack::new(config, [3; 32], now).unwrap();
        let last = Arc::default();
        let port = stack.add_port(Box::new(LastSeqTx { last: Arc::clone(&last), buffer: Vec::new() }));
        let link = LinkConfig {
            name: "lan".into(),
            addresses: vec![(IpAddr::V4(STACK), 24)],
            static_neighbours: vec![(IpAddr::V4(PEER), MacAddr([2, 0, 0, 0, 0, 2]))],
            ..LinkConfig::default()
        };
        stack.add_link(port, &link).unwrap();
        for port in 0..CONNECTIONS.div_ceil(PER_LISTENER) {
            stack.listen(SocketAddr::new(STACK.into(), 80 + port as u16), ListenOptions::default()).unwrap();
        }
        Self { stack, port, now, last }
    }

    /// Delivers a segment of connection number `number`; the application answers data with a response.
    fn deliver(&mut self, number: u32, flags: TcpFlags, seq: u32, ack: u32, payload: &[u8]) {
        let header = TcpHeader {
            src_port: 1024 + (number % PER_LISTENER) as u16,
            dst_port: 80 + (number / PER_LISTENER) as u16,
            seq: SeqNumber(seq),
            ack: SeqNumber(ack),
            flags,
            window: 60_000,
            urg_ptr: 0,
            header_len: 0,
        };
        let syn = flags.contains(TcpFlags::SYN);
        let options =
            TcpOptions { mss: syn.then_some(1460), window_scale: syn.then_some(7), ..TcpOptions::default() };
        let bytes = frame(&header, &options, payload);
        let mut burst = RxBurst::new();
        burst.push(RxFrame::new(&bytes));
        self.stack.receive(self.now, self.port, &burst);
        while let Some(event) = self.stack.next_event() {
            match event {
                Event::Incoming { listener } => {
                    self.stack.accept(listener).unwrap();
                }
                Event::Data { conn, data } => {
                    self.stack.consume(conn, data, data.len(), &burst);
                    assert_eq!(self.stack.send(conn, &RESPONSE), Ok(RESPONSE.len()));
                }
                _ => {}
            }
        }
        self.stack.finish_burst(&burst);
        self.stack.transmit(self.now);
    }

    /// Advances time.
    fn advance(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(at) = self.stack.next_deadline().filter(|at| *at <= until) {
            self.now = at.max(self.now + Duration::from_micros(1));
            self.stack.advance(self.now);
            while self.stack.next_event().is_some() {}
            self.stack.transmit(self.now);
        }
        self.now = self.now.max(until);
    }

    /// Opens a connection that makes one request and stays open.
    fn serve_one_request(&mut self, number: u32) {
        self.deliver(number, TcpFlags::SYN, 0, 0, &[]);
        let next = self.last.lock().unwrap().wrapping_add(1);
        self.deliver(number, TcpFlags::ACK, 1, next, &[]);
        self.deliver(number, TcpFlags::ACK, 1, next, &REQUEST);
        self.deliver(number, TcpFlags::ACK, 101, next.wrapping_add(300), &[]);
        self.advance(Duration::from_micros(100));
    }
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = text.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

#[test]
fn idle_connection_takes_at_most_192_bytes() {
    let mut server = Server::new();
    let before = resident_bytes();
    for number in 0..CONNECTIONS {
        server.serve_one_request(number);
    }
    server.advance(Duration::from_secs(10));
    let each = (resident_bytes() - before) / u64::from(CONNECTIONS);
    let usage = server.stack.usage();
    assert_eq!(
        (usage.connections, usage.active, usage.chunks, usage.timers),
        (CONNECTIONS as usize, 0, 0, 0)
    );
    assert_eq!(server.stack.tcp_stats().bytes_out, 300 * u64::from(CONNECTIONS));
    assert!(each >= 128, "{each} bytes: less than a connection has");
    assert!(each <= BYTES_MAX, "{each} bytes for each connection");
    // The connections are alive: each answers a keepalive probe with its sequence number, and another
    // request.
    for number in (0..CONNECTIONS).step_by(9973) {
        server.deliver(number, TcpFlags::ACK, 100, 0, &[]);
        let next = *server.last.lock().unwrap();
        server.deliver(number, TcpFlags::ACK, 101, next, &REQUEST);
        assert_eq!(*server.last.lock().unwrap(), next, "the answer");
    }
    let visited = CONNECTIONS.div_ceil(9973);
    assert_eq!(server.stack.tcp_stats().bytes_in, 100 * u64::from(CONNECTIONS + visited));
}
