//! Two stacks on a memory device allocate while they grow, and nothing in steady state: connections that
//! open, exchange data, close and wait in TIME_WAIT, many at once, with losses, unread data, datagrams and
//! ICMP.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{RxBurst, RxFrame, RxQueue};
use ginnel_stack::events::Event;
use ginnel_stack::handle::{Conn, Listener, PortId, UdpHandle};
use ginnel_stack::link::LinkConfig;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{UdpError, UdpOptions};
use ginnel_stack::wire::checksum::{Sum, pseudo_v6};
use ginnel_stack::wire::ethernet::{self, EtherType};
use ginnel_stack::wire::{MacAddr, ipv4, ipv6, protocol};
use ginnel_testkit::alloc_counter::{CountingAllocator, count_allocations};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const SERVER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
const CLIENT_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
const SECOND: Duration = Duration::from_secs(1);

/// One end of the pair.
struct Endpoint {
    stack: Stack,
    rx: Box<dyn RxQueue + Send>,
    port: PortId,
    /// Leaves received data unread until they are buffered, then reads them.
    defer_reads: bool,
    /// Bytes that each connection still has to send, by slot index.
    unsent: Vec<usize>,
}

/// The data exchange of each connection.
#[derive(Clone, Copy)]
struct Exchange {
    /// Bytes that the client sends.
    request: usize,
    /// Bytes that the server sends after the whole request.
    response: usize,
    /// The server closes first, so that it keeps TIME_WAIT.
    server_closes: bool,
}

struct StackPair {
    server: Endpoint,
    client: Endpoint,
    now: Instant,
    exchange: Exchange,
    listener: Listener,
    /// Period of lost frames; 0 loses none.
    lose_every: u64,
    frames: u64,
    ended: u64,
    failed: u64,
    datagrams: u64,
}

static BYTES: [u8; 1 << 18] = [7; 1 << 18];

fn endpoint(
    device: ginnel_stack::device::Device,
    addresses: &[(IpAddr, u8)],
    seed: u8,
    change: &dyn Fn(&mut StackConfig),
) -> Endpoint {
    let mut config = StackConfig::default();
    config.tcp.connections_max = 1000;
    config.tcp.time_wait_max = 1000;
    config.tcp.buffer_pool_bytes = 16 << 20;
    config.tcp.recv_buffer_bytes = 256 << 10;
    config.tcp.send_buffer_bytes = 256 << 10;
    config.network.icmp_error_interval_ms = 0;
    change(&mut config);
    let mut stack = Stack::new(config, [seed; 32], Instant::from_millis(1000)).unwrap();
    let port = stack.add_port(device.tx);
    let addresses = addresses.to_vec();
    stack.add_link(port, &LinkConfig { name: "lan".into(), addresses, ..LinkConfig::default() }).unwrap();
    Endpoint { stack, rx: device.rx, port, defer_reads: false, unsent: vec![0; 1000] }
}

fn stack_pair(talk: Exchange, change: &dyn Fn(&mut StackConfig)) -> StackPair {
    stack_pair_at(talk, &[(SERVER.into(), 24)], &[(CLIENT.into(), 24)], change)
}

fn stack_pair_at(
    talk: Exchange,
    servers: &[(IpAddr, u8)],
    clients: &[(IpAddr, u8)],
    change: &dyn Fn(&mut StackConfig),
) -> StackPair {
    let (a, b) = pair(MemoryConfig::default().without_offloads());
    let (mut server, client) = (endpoint(a, servers, 1, change), endpoint(b, clients, 2, change));
    let at = SocketAddr::new(SERVER.into(), 80);
    let listener = server.stack.listen(at, ListenOptions::default()).unwrap();
    StackPair {
        server,
        client,
        now: Instant::from_millis(1000),
        exchange: talk,
        listener,
        lose_every: 0,
        frames: 0,
        ended: 0,
        failed: 0,
        datagrams: 0,
    }
}

/// The application of one end. The token of a connection counts the bytes read.
struct App<'a> {
    exchange: Exchange,
    at_server: bool,
    unsent: &'a mut [usize],
}

impl App<'_> {
    fn begin(&mut self, stack: &mut Stack, conn: Conn, bytes: usize) {
        self.unsent[conn.index() as usize] = bytes;
        self.send_unsent(stack, conn);
    }

    fn send_unsent(&mut self, stack: &mut Stack, conn: Conn) {
        let left = &mut self.unsent[conn.index() as usize];
        *left -= stack.send(conn, &BYTES[..*left]).unwrap();
        if *left == 0 && self.at_server && self.exchange.server_closes {
            let _ = stack.close(conn);
        }
    }

    fn read(&mut self, stack: &mut Stack, conn: Conn) {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = stack.recv(conn, &mut buffer) {
            self.on_bytes(stack, conn, n);
        }
    }

    fn on_bytes(&mut self, stack: &mut Stack, conn: Conn, count: usize) {
        if count == 0 {
            return;
        }
        let read = stack.token(conn).unwrap_or(0) as usize + count;
        stack.set_token(conn, read as u32);
        if self.at_server && read == self.exchange.request {
            self.begin(stack, conn, self.exchange.response);
        } else if !self.at_server && read == self.exchange.response && !self.exchange.server_closes {
            let _ = stack.close(conn);
        }
    }
}

impl StackPair {
    fn connect(&mut self) {
        let to = SocketAddr::new(SERVER.into(), 80);
        let conn = self.client.stack.connect(self.now, to, &ConnectOptions::default()).unwrap();
        self.client.stack.set_token(conn, 0);
    }

    /// Runs turns until `done` returns true, for at most `limit`.
    fn run(&mut self, limit: Duration, done: impl Fn(&Self) -> bool) {
        let until = self.now + limit;
        while !done(self) && self.now < until {
            let moved = self.turn(true) + self.turn(false);
            let next = [&self.server, &self.client].into_iter().filter_map(|e| e.stack.next_deadline()).min();
            let soon = self.now + Duration::from_micros(100);
            self.now = if moved > 0 { soon } else { next.map_or(until, |at| at.max(soon).min(until)) };
        }
    }

    /// Runs one turn of an end. Returns the number of received frames.
    fn turn(&mut self, at_server: bool) -> usize {
        let Self {
            server,
            client,
            now,
            exchange: talk,
            listener,
            lose_every,
            frames,
            ended,
            failed: broken,
            ..
        } = self;
        let end = if at_server { server } else { client };
        let mut arrived = RxBurst::new();
        end.rx.rx_burst(*now, &mut arrived);
        let mut burst = RxBurst::new();
        for frame in &arrived {
            *frames += 1;
            if *lose_every == 0 || !frames.is_multiple_of(*lose_every) {
                burst.push(*frame);
            }
        }
        let mut app = App { exchange: *talk, at_server, unsent: &mut end.unsent };
        let mut deal = |stack: &mut Stack, burst: &RxBurst<'_>, lazy: bool| {
            while let Some(event) = stack.next_event() {
                match event {
                    Event::Incoming { .. } => {
                        stack.accept(*listener);
                    }
                    Event::Connected { conn } => app.begin(stack, conn, talk.request),
                    Event::Writable { conn } => app.send_unsent(stack, conn),
                    Event::Data { conn, data } => {
                        let take = if lazy { 0 } else { data.len() };
                        stack.consume(conn, data, take, burst);
                        app.on_bytes(stack, conn, take);
                    }
                    Event::Readable { conn } => app.read(stack, conn),
                    Event::PeerClosed { conn } => {
                        app.read(stack, conn);
                        let _ = stack.close(conn);
                    }
                    Event::Closed { reason, .. } => {
                        *ended += 1;
                        *broken += u64::from(reason != ginnel_stack::events::CloseReason::Normal);
                    }
                    _ => {}
                }
            }
        };
        end.stack.receive(*now, end.port, &burst);
        deal(&mut end.stack, &burst, end.defer_reads);
        end.stack.finish_burst(&burst);
        end.stack.advance(*now);
        deal(&mut end.stack, &RxBurst::new(), end.defer_reads);
        end.stack.transmit(*now);
        arrived.len()
    }

    /// Runs `count` concurrent connections from SYN to their end.
    fn cycle(&mut self, count: u64) {
        let before = self.ended;
        for _ in 0..count {
            self.connect();
        }
        self.run(SECOND * 600, |two| two.ended == before + 2 * count);
        assert_eq!((self.ended, self.failed), (before + 2 * count, 0));
    }

    fn idle(&mut self, time: Duration) {
        self.run(time, |_| false);
    }
}

/// Runs `round` `warm_up` times, then checks that `measured` further rounds allocate nothing.
fn assert_steady(warm_up: usize, measured: usize, mut round: impl FnMut()) {
    (0..warm_up).for_each(|_| round());
    let ((), made) = count_allocations(|| (0..measured).for_each(|_| round()));
    assert_eq!((made.count, made.freed), (0, 0), "{made:?}");
}

const SMALL: Exchange = Exchange { request: 300, response: 2000, server_closes: true };

#[test]
fn whole_connection_life_allocates_nothing() {
    for server_closes in [true, false] {
        let mut two = stack_pair(Exchange { server_closes, request: 20_000, response: 100_000 }, &|_| {});
        assert_steady(5, 30, || {
            two.cycle(1);
            two.idle(SECOND * 62);
            let (a, b) = (two.server.stack.usage(), two.client.stack.usage());
            assert_eq!(a.time_wait + b.time_wait + a.connections + b.connections + a.timers + b.timers, 0);
        });
    }
}

#[test]
fn connection_churn_allocates_nothing() {
    // TIME_WAIT is always full: each new entry evicts the oldest one.
    let mut two = stack_pair(SMALL, &|config| config.tcp.time_wait_max = 300);
    assert_steady(20, 50, || {
        two.cycle(100);
        two.idle(SECOND / 10);
    });
    assert!(two.server.stack.tcp_stats().time_wait_overflows > 5000);
}

#[test]
fn loss_recovery_allocates_nothing() {
    let mut two = stack_pair(Exchange { server_closes: true, request: 100_000, response: 200_000 }, &|_| {});
    // The neighbours resolve each other, so that no loss affects ARP.
    two.cycle(1);
    two.lose_every = 37;
    assert_steady(200, 100, || two.cycle(5));
    let stats = two.server.stack.tcp_stats();
    assert!(stats.retransmitted > 1000 && stats.fast_recoveries > 100, "{stats:?}");
}

#[test]
fn buffered_receive_allocates_nothing() {
    let mut two = stack_pair(Exchange { server_closes: false, request: 50_000, response: 50_000 }, &|_| {});
    (two.server.defer_reads, two.client.defer_reads) = (true, true);
    two.lose_every = 101;
    assert_steady(200, 100, || two.cycle(8));
    assert!(two.server.stack.tcp_stats().bytes_copied_in > 1 << 20);
}

#[test]
fn pool_exhaustion_allocates_nothing() {
    let mut two =
        stack_pair(Exchange { server_closes: true, request: 10_000, response: 10_000 }, &|config| {
            config.tcp.buffer_pool_bytes = 1 << 19;
        });
    assert_steady(20, 20, || two.cycle(40));
}

#[test]
fn cookies_and_resets_allocate_nothing() {
    let mut two = stack_pair(SMALL, &|config| config.tcp.half_open_max = 3);
    assert_steady(20, 30, || {
        two.cycle(40);
        // A connection to a closed port.
        let to = SocketAddr::new(SERVER.into(), 81);
        let ended = two.ended;
        two.client.stack.connect(two.now, to, &ConnectOptions::default()).unwrap();
        two.run(SECOND, |two| two.ended > ended);
        two.failed = 0;
    });
    assert!(two.server.stack.tcp_stats().cookies_accepted > 1000);
}

impl StackPair {
    fn send(&mut self, from_server: bool, socket: UdpHandle, to: Option<SocketAddr>, len: usize) {
        let end = if from_server { &mut self.server } else { &mut self.client };
        // An error of an earlier datagram is returned first.
        while let Err(error) = end.stack.udp_send_to(self.now, socket, to, &BYTES[..len]) {
            assert_eq!(error, UdpError::ConnectionRefused);
        }
    }

    fn drain(&mut self, at_server: bool, socket: UdpHandle) {
        let end = if at_server { &mut self.server } else { &mut self.client };
        let mut buffer = [0; 1 << 15];
        while end.stack.udp_recv_from(socket, &mut buffer).is_ok() {
            self.datagrams += 1;
        }
    }
}

#[test]
fn datagrams_and_arp_allocate_nothing() {
    let mut two = stack_pair(SMALL, &|_| {});
    let at = |ip: Ipv4Addr, port| SocketAddr::new(ip.into(), port);
    let server_socket = two.server.stack.udp_bind(at(SERVER, 53), UdpOptions::default()).unwrap();
    let client_socket =
        two.client.stack.udp_bind(at(Ipv4Addr::UNSPECIFIED, 1000), UdpOptions::default()).unwrap();
    let refused = two.client.stack.udp_bind(at(Ipv4Addr::UNSPECIFIED, 0), UdpOptions::default()).unwrap();
    two.client.stack.udp_connect(two.now, refused, at(SERVER, 9)).unwrap();
    assert_steady(20, 100, || {
        for len in [0, 1, 512, 1472] {
            for _ in 0..20 {
                two.send(false, client_socket, Some(at(SERVER, 53)), len);
                two.send(true, server_socket, Some(at(CLIENT, 1000)), len);
            }
            two.idle(SECOND / 100);
            two.drain(true, server_socket);
            two.drain(false, client_socket);
        }
        two.send(false, refused, None, 100);
        two.idle(SECOND / 100);
        // Long enough for a neighbour entry to become stale and to be probed.
        two.idle(SECOND * 50);
    });
    assert_eq!(two.datagrams, 120 * 160);
    assert!(two.server.stack.network().stats().icmp_errors_out >= 100);
    assert!(two.client.stack.network().stats().arp_requests_out > 5);
}

#[test]
fn echo_requests_allocate_nothing() {
    let mut two = stack_pair(SMALL, &|_| {});
    two.cycle(1);
    // 98 bytes, as ping sends them.
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0];
    frame.extend([0x45, 0, 0, 84, 0, 0, 0, 0, 64, 1, 0x66, 0xa7, 10, 0, 0, 2, 10, 0, 0, 1]);
    frame.extend([8, 0, 0xf7, 0xfd, 0, 1, 0, 1]);
    frame.resize(98, 0);
    assert_steady(10, 1000, || {
        let mut burst = RxBurst::new();
        burst.push(RxFrame::new(&frame));
        two.server.stack.receive(two.now, two.server.port, &burst);
        two.server.stack.finish_burst(&burst);
        two.idle(SECOND / 1000);
    });
    assert_eq!(two.server.stack.network().stats().icmp_echo_replies, 1010);
}

/// Returns a frame with an echo request of the client, or with a fragment of it.
fn echo_frame(v6: bool, ident: u16, part: core::ops::Range<usize>) -> Vec<u8> {
    let mut message = vec![5; 3000];
    message[..8].copy_from_slice(&[if v6 { 128 } else { 8 }, 0, 0, 0, 0, 1, 0, 1]);
    let pseudo =
        if v6 { pseudo_v6(CLIENT_V6, SERVER_V6, protocol::ICMPV6, message.len()) } else { Sum::ZERO };
    let checksum = pseudo.add(Sum::of(&message)).finish();
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    let (offset, more) = (part.start as u16, part.end < message.len());
    let payload = &message[part];
    let mut headers = [0; 14 + 40 + 8];
    let ethertype = if v6 { EtherType::IPV6 } else { EtherType::IPV4 };
    let (to, from) = (MacAddr([2, 0, 0, 0, 0, 1]), MacAddr([2, 0, 0, 0, 0, 2]));
    let at = ethernet::Header::new(to, from, None, ethertype).emit(&mut headers);
    let at = if v6 {
        let header = ipv6::Header {
            dscp: 0,
            ecn: 0,
            flow_label: 0,
            payload_len: (ipv6::FragmentHeader::LEN + payload.len()) as u16,
            next_header: protocol::FRAGMENT,
            hop_limit: 64,
            src: CLIENT_V6,
            dst: SERVER_V6,
        };
        header.emit(&mut headers[at..]);
        let fragment = ipv6::FragmentHeader {
            next_header: protocol::ICMPV6,
            offset,
            more_fragments: more,
            ident: ident.into(),
        };
        fragment.emit(&mut headers[at + 40..]);
        at + 48
    } else {
        let header = ipv4::Header {
            dscp: 0,
            ecn: 0,
            total_len: (20 + payload.len()) as u16,
            ident,
            dont_fragment: false,
            more_fragments: more,
            fragment_offset: offset,
            ttl: 64,
            protocol: protocol::ICMP,
            src: CLIENT,
            dst: SERVER,
            header_len: 20,
        };
        header.emit(&mut headers[at..]);
        at + 20
    };
    [&headers[..at], payload].concat()
}

#[test]
fn fragments_of_both_families_allocate_nothing() {
    let mut two = stack_pair_at(
        SMALL,
        &[(SERVER.into(), 24), (SERVER_V6.into(), 64)],
        &[(CLIENT.into(), 24), (CLIENT_V6.into(), 64)],
        &|config| config.network.dad_transmits = 0,
    );
    two.idle(SECOND * 5);
    let families: [(IpAddr, IpAddr); 2] =
        [(SERVER.into(), CLIENT.into()), (SERVER_V6.into(), CLIENT_V6.into())];
    let sockets = families.map(|(server, client)| {
        let server_socket =
            two.server.stack.udp_bind(SocketAddr::new(server, 53), UdpOptions::default()).unwrap();
        let client_socket =
            two.client.stack.udp_bind(SocketAddr::new(client, 1000), UdpOptions::default()).unwrap();
        (server_socket, client_socket, SocketAddr::new(server, 53), SocketAddr::new(client, 1000))
    });
    // Twenty echo requests of each family, with their fragments interleaved, out of order and partly
    // duplicated. Two more remain incomplete.
    let mut frames = Vec::new();
    for part in [1496..3000, 0..496, 0..496, 496..1496] {
        for ident in 0..20 {
            frames.extend([false, true].map(|v6| echo_frame(v6, ident, part.clone())));
        }
    }
    frames.extend([false, true].map(|v6| echo_frame(v6, 20, 0..496)));
    assert_steady(10, 30, || {
        for (server_socket, client_socket, server, client) in sockets {
            for len in [2000, 8000, 20_000] {
                for _ in 0..3 {
                    two.send(false, client_socket, Some(server), len);
                    two.send(true, server_socket, Some(client), len);
                }
                two.idle(SECOND / 100);
            }
            two.drain(true, server_socket);
            two.drain(false, client_socket);
        }
        for frames in frames.chunks(32) {
            let mut burst = RxBurst::new();
            for bytes in frames {
                burst.push(RxFrame::new(bytes));
            }
            two.server.stack.receive(two.now, two.server.port, &burst);
            two.server.stack.finish_burst(&burst);
            two.idle(SECOND / 100);
        }
        // Long enough for the incomplete requests to time out and for the ICMP errors to be sent.
        two.idle(SECOND * 70);
    });
    assert_eq!(two.datagrams, 40 * 2 * 2 * 9);
    let (server, client) = (two.server.stack.network().stats(), two.client.stack.network().stats());
    assert_eq!((server.icmp_echo_replies, server.reassembly_timeouts), (40 * 40, 40 * 2));
    assert_eq!((server.reassembled, client.reassembled), (40 * (18 + 40), 40 * (18 + 40)));
}
