use super::*;
use crate::device::{Capabilities, Gso, GsoKind, Label, RxChecksum, RxFrame};
use crate::ip::testbench::*;
use crate::ip::{InputResult, ParsedFrame};
use crate::link::LinkConfig;
use crate::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use crate::wire::ethernet::EtherType;
use crate::wire::{MacAddr, icmpv4, icmpv6, ipv4, protocol};
use core::net::Ipv4Addr;

const ANY_V4: &str = "0.0.0.0";
const ANY_V6: &str = "::";

pub(super) struct Sockets {
    pub(super) fixture: NetworkFixture,
    pub(super) udp: Udp,
}

pub(super) fn sockets() -> Sockets {
    sockets_with(network_config())
}

pub(super) fn sockets_with(config: NetworkConfig) -> Sockets {
    let static_neighbours = vec![(PEER_V4.into(), PEER_MAC), (PEER_V6.into(), PEER_MAC)];
    let udp = Udp::new(&config);
    Sockets {
        fixture: NetworkFixture::with(
            config,
            &LinkConfig { static_neighbours, ..link_config() },
            CAPABILITIES,
        ),
        udp,
    }
}

pub(super) fn at(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

fn options() -> UdpOptions {
    UdpOptions::default()
}

impl Sockets {
    pub(super) fn bind_with(
        &mut self,
        ip: &str,
        port: u16,
        options: UdpOptions,
    ) -> Result<UdpHandle, UdpError> {
        self.udp.bind(&mut self.fixture.network, at(ip, port), options)
    }

    #[track_caller]
    pub(super) fn bind(&mut self, ip: &str, port: u16) -> UdpHandle {
        self.bind_with(ip, port, options()).unwrap()
    }

    pub(super) fn send(
        &mut self,
        socket: UdpHandle,
        to: Option<SocketAddr>,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        self.udp.send_to(self.fixture.now, &mut self.fixture.network, socket, to, payload)
    }

    pub(super) fn connect(&mut self, socket: UdpHandle, to: SocketAddr) -> Result<(), UdpError> {
        self.udp.connect(self.fixture.now, &mut self.fixture.network, socket, to)
    }

    #[track_caller]
    fn receive_frame(&mut self, frame: &[u8]) {
        match self.fixture.parse(frame) {
            ParsedFrame::Udp(l4) => self.udp.input(self.fixture.now, &mut self.fixture.network, &l4),
            ParsedFrame::Other(other) => match self.fixture.network.input(self.fixture.now, &other) {
                InputResult::Error(error) => {
                    self.udp.on_error(self.fixture.now, &mut self.fixture.network, &error)
                }
                input => panic!("{input:?}"),
            },
            parsed => panic!("{parsed:?}"),
        }
    }

    /// Delivers a datagram from a port of the peer to a local port.
    #[track_caller]
    pub(super) fn receive(&mut self, from: u16, to: u16, payload: &[u8]) {
        self.receive_frame(&v4_frame(protocol::UDP, &datagram(from, to, payload)));
    }

    #[track_caller]
    pub(super) fn read(&mut self, socket: UdpHandle) -> Result<Vec<u8>, UdpError> {
        let mut out = vec![0; 70_000];
        let datagram = self.udp.recv_from(socket, &mut out)?;
        out.truncate(datagram.len);
        Ok(out)
    }

    /// Delivers the peer's ICMP error about the last datagram sent.
    fn peer_sends_error(&mut self, code: u8, mtu: u16) {
        let frame = self.fixture.sent().pop().unwrap();
        let message = icmpv4::Message::Unreachable { code, mtu, quote: &frame[14..42] };
        let mut out = vec![0; message.encoded_len()];
        message.emit(&mut out);
        self.receive_frame(&v4_frame(protocol::ICMP, &out));
    }

    /// Delivers the peer's "packet too big" message about the last datagram sent, which went to `to`.
    fn peer_sends_too_big(&mut self, to: SocketAddr, mtu: u16) {
        if to.is_ipv4() {
            return self.peer_sends_error(4, mtu);
        }
        let sent = self.fixture.sent().pop().unwrap();
        // A message of ICMPv6 has at most 1,280 bytes (RFC 4443 §2.4).
        let quote = &sent[14..sent.len().min(14 + 1200)];
        let message = icmpv6::Message::PacketTooBig { mtu: mtu.into(), quote };
        let mut out = vec![0; message.encoded_len()];
        message.emit(PEER_V6, OUR_V6, &mut out);
        let packet = ipv6_packet(PEER_V6, OUR_V6, protocol::ICMPV6, 64, &out);
        self.receive_frame(&frame(EtherType::IPV6, &packet));
    }
}

/// Returns what follows from a "packet too big" message about a connected socket with `options`: the socket's
/// error, and the path MTU of a socket that is connected afterwards.
fn report_of_small_mtu(options: UdpOptions, to: SocketAddr) -> (Option<UdpError>, u16) {
    let mut s = sockets();
    let any = if to.is_ipv4() { ANY_V4 } else { ANY_V6 };
    let socket = s.bind_with(any, 7, options).unwrap();
    s.connect(socket, to).unwrap();
    s.send(socket, None, &[0; 1000]).unwrap();
    s.peer_sends_too_big(to, 1300);
    let other = s.bind(any, 8);
    s.connect(other, to).unwrap();
    let path_mtu = s.udp.path_mtu(s.fixture.now, &mut s.fixture.network, other).unwrap();
    let error = s.udp.take_error(socket).unwrap();
    let is_queued = s.udp.take_extended_error(socket, &mut [0; 1500]).is_ok();
    assert_eq!(is_queued, error.is_some() && (options.recverr_v4 || options.recverr_v6), "{options:?}");
    (error, path_mtu)
}

fn datagram(from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 8];
    udp::Header { src_port: from, dst_port: to, len: 8 + payload.len() as u16, checksum: 0 }.emit(&mut out);
    out.extend_from_slice(payload);
    let sum = pseudo_v4(PEER_V4, OUR_V4, protocol::UDP, out.len()).add(Sum::of(&out));
    out[6..8].copy_from_slice(&sum.finish_udp().to_be_bytes());
    out
}

#[test]
fn send_from_uses_the_given_local_address() {
    let mut s = sockets();
    let socket = s.bind(ANY_V4, 5000);
    let (now, to) = (s.fixture.now, at("10.0.0.2", 53));
    s.udp.send_from(now, &mut s.fixture.network, socket, OUR_V4.into(), to, b"answer").unwrap();
    assert_eq!(ipv4::Header::parse(&s.fixture.sent_one()[14..]).unwrap().src, OUR_V4);
    for foreign in ["10.0.0.77", "10.0.0.255", "224.0.0.1", "fd00::1"] {
        let source = foreign.parse().unwrap();
        let sent = s.udp.send_from(now, &mut s.fixture.network, socket, source, to, b"answer");
        assert_eq!(sent, Err(UdpError::AddressNotAvailable), "{foreign}");
    }
}

#[test]
fn datagrams_are_sent_and_received() {
    let mut s = sockets();
    let socket = s.bind(ANY_V4, 5000);
    s.send(socket, Some(at("10.0.0.2", 53)), b"question").unwrap();
    let frame = s.fixture.sent_one();
    let header = ipv4::Header::parse(&frame[14..]).unwrap();
    assert!(header.dont_fragment && (header.src, header.dst) == (OUR_V4, PEER_V4));
    let bytes = header.payload(&frame[14..]);
    assert!(pseudo_v4(OUR_V4, PEER_V4, protocol::UDP, bytes.len()).add(Sum::of(bytes)).is_valid());
    let udp = udp::Header::parse(bytes).unwrap();
    assert_eq!((udp.src_port, udp.dst_port, udp.payload(bytes)), (5000, 53, &b"question"[..]));

    assert_eq!(s.udp.next_readable(), None);
    s.receive(53, 5000, b"answer");
    s.receive(53, 5000, b"");
    assert_eq!(s.udp.next_readable(), Some(socket));
    assert_eq!(s.udp.next_readable(), None, "returned once");
    assert_eq!(s.udp.next_len(socket), Ok(Some(6)));
    let mut out = [0; 4];
    let description = s.udp.peek_from(socket, &mut out).unwrap();
    assert_eq!((description.len, description.from), (6, at("10.0.0.2", 53)));
    assert_eq!(description.to, IpAddr::V4(OUR_V4));
    assert_eq!(s.read(socket).unwrap(), b"answer");
    assert_eq!(s.read(socket).unwrap(), b"");
    assert_eq!(s.read(socket), Err(UdpError::WouldBlock));
    assert_eq!((s.udp.stats().received, s.udp.stats().sent), (2, 1));
}

#[test]
fn ipv6_wildcard_socket_receives_both_families() {
    let mut s = sockets();
    let socket = s.bind(ANY_V6, 5000);
    let mut bytes = datagram(53, 5000, b"six");
    bytes[6..8].fill(0);
    let sum = pseudo_v6(PEER_V6, OUR_V6, protocol::UDP, bytes.len()).add(Sum::of(&bytes));
    bytes[6..8].copy_from_slice(&sum.finish_udp().to_be_bytes());
    s.receive_frame(&frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::UDP, 64, &bytes)));
    s.receive(53, 5000, b"four");
    assert_eq!(s.read(socket).unwrap(), b"six");
    assert_eq!(s.read(socket).unwrap(), b"four");
    s.send(socket, Some(at("2001:db8::2", 1)), b"x").unwrap();
    s.send(socket, Some(at("10.0.0.2", 1)), b"x").unwrap();
    assert_eq!(s.fixture.sent().len(), 2);
    let v6only = s.bind_with(ANY_V6, 5001, UdpOptions { v6only: true, ..options() }).unwrap();
    assert_eq!(s.send(v6only, Some(at("10.0.0.2", 1)), b"x"), Err(UdpError::WrongFamily));
    let v4 = s.bind(ANY_V4, 5001);
    assert_eq!(s.send(v4, Some(at("2001:db8::2", 1)), b"x"), Err(UdpError::WrongFamily));
    // Options that are set later do not change that.
    s.udp.set_options(v6only, options()).unwrap();
    assert_eq!(s.send(v6only, Some(at("10.0.0.2", 1)), b"x"), Err(UdpError::WrongFamily));
    s.receive(53, 5001, b"four");
    assert_eq!(s.read(v6only), Err(UdpError::WouldBlock));
    assert_eq!(s.read(v4).unwrap(), b"four");
}

#[test]
fn bind_conflicts_match_linux() {
    let reuse_address = UdpOptions { reuse_address: true, ..options() };
    let reuse_port = UdpOptions { reuse_port: true, ..options() };
    let v6only = UdpOptions { v6only: true, ..options() };
    // First socket, second socket, whether both can be bound.
    let cases = [
        (ANY_V4, options(), ANY_V4, options(), false),
        (ANY_V4, options(), "10.0.0.1", options(), false),
        ("10.0.0.1", options(), ANY_V4, options(), false),
        (ANY_V6, options(), ANY_V4, options(), false),
        (ANY_V6, options(), "10.0.0.1", options(), false),
        (ANY_V4, options(), ANY_V6, options(), false),
        (ANY_V6, v6only, ANY_V4, options(), true),
        (ANY_V4, options(), ANY_V6, v6only, true),
        ("10.0.0.1", options(), "2001:db8::1", options(), true),
        (ANY_V4, options(), "2001:db8::1", options(), true),
        (ANY_V4, reuse_address, ANY_V4, reuse_address, true),
        (ANY_V4, reuse_address, ANY_V4, options(), false),
        (ANY_V4, reuse_port, ANY_V4, reuse_port, true),
        (ANY_V4, reuse_port, ANY_V4, reuse_address, false),
    ];
    for (first, first_options, second, second_options, both) in cases {
        let mut s = sockets();
        s.bind_with(first, 7, first_options).unwrap();
        let result = s.bind_with(second, 7, second_options);
        assert_eq!(result.is_ok(), both, "{first} {first_options:?} {second} {second_options:?}");
        assert!(s.bind_with(second, 8, second_options).is_ok());
    }
    let mut s = sockets();
    assert_eq!(s.bind_with("10.0.0.9", 7, options()), Err(UdpError::AddressNotAvailable));
    assert!(s.bind_with("10.0.0.255", 7, options()).is_ok());
}

#[test]
fn closing_frees_the_address_and_invalidates_the_handle() {
    let mut s = sockets();
    let first = s.bind(ANY_V4, 7);
    s.receive(1, 7, b"lost");
    s.udp.close(first).unwrap();
    assert_eq!(s.udp.close(first), Err(UdpError::Stale));
    assert_eq!(s.udp.next_readable(), None);
    let second = s.bind(ANY_V4, 7);
    assert_eq!(s.read(first), Err(UdpError::Stale));
    assert_eq!(s.read(second), Err(UdpError::WouldBlock));
    assert_eq!((s.udp.queued, s.udp.capacity), (0, 0));
}

#[test]
fn ephemeral_ports_are_free_and_run_out() {
    let mut s = sockets_with(NetworkConfig { udp_port_first: 100, udp_port_last: 104, ..network_config() });
    s.bind(ANY_V4, 102);
    let mut ports: Vec<_> = (0..4)
        .map(|_| {
            let socket = s.bind("10.0.0.1", 0);
            s.udp.local(socket).unwrap().port()
        })
        .collect();
    assert_eq!(s.bind_with("10.0.0.1", 0, options()), Err(UdpError::AddressNotAvailable));
    ports.sort_unstable();
    assert_eq!(ports, [100, 101, 103, 104]);
    let mut first_ports: Vec<_> = (0..20)
        .map(|_| {
            let mut s = sockets();
            s.fixture.network.entropy.next_u64();
            let socket = s.bind(ANY_V4, 0);
            s.udp.local(socket).unwrap().port()
        })
        .collect();
    first_ports.dedup();
    assert_eq!(first_ports.len(), 1, "equal seeds give equal ports");
    assert!((32_768..=60_999).contains(&first_ports[0]));
}

#[test]
fn most_specific_socket_receives_the_datagram() {
    let reuse = UdpOptions { reuse_address: true, ..options() };
    let mut s = sockets();
    let wildcard = s.bind_with(ANY_V4, 7, reuse).unwrap();
    let bound = s.bind_with("10.0.0.1", 7, reuse).unwrap();
    let connected = s.bind_with("10.0.0.1", 7, reuse).unwrap();
    s.connect(connected, at("10.0.0.2", 1)).unwrap();
    let elsewhere = s.bind_with("10.0.0.1", 7, reuse).unwrap();
    s.connect(elsewhere, at("10.0.0.2", 99)).unwrap();
    s.receive(1, 7, b"to connected");
    s.receive(2, 7, b"to bound");
    assert_eq!(s.read(connected).unwrap(), b"to connected");
    assert_eq!(s.read(bound).unwrap(), b"to bound");
    s.udp.close(bound).unwrap();
    s.receive(2, 7, b"to wildcard");
    assert_eq!(s.read(wildcard).unwrap(), b"to wildcard");
    assert_eq!(s.read(elsewhere), Err(UdpError::WouldBlock));
}

#[test]
fn reuseport_distributes_datagrams_by_sender() {
    let mut s = sockets();
    let reuse = UdpOptions { reuse_address: true, ..options() };
    let first = s.bind_with(ANY_V4, 7, reuse).unwrap();
    let second = s.bind_with(ANY_V4, 7, reuse).unwrap();
    s.receive(1, 7, b"x");
    assert_eq!(s.read(first), Err(UdpError::WouldBlock));
    assert!(s.read(second).is_ok());
    let share = UdpOptions { reuse_port: true, ..options() };
    let group: Vec<_> = (0..4).map(|_| s.bind_with(ANY_V4, 8, share).unwrap()).collect();
    let mut owners = Vec::new();
    for round in 0..2 {
        for port in 0..100 {
            s.receive(1000 + port, 8, b"x");
            let owner = group.iter().position(|&socket| s.read(socket).is_ok()).unwrap();
            match round {
                0 => owners.push(owner),
                _ => assert_eq!(owners[usize::from(port)], owner, "a sender stays with its socket"),
            }
        }
    }
    for member in 0..4 {
        assert!(owners.iter().filter(|&&owner| owner == member).count() > 10);
    }
}

#[test]
fn every_socket_receives_a_copy_of_broadcasts() {
    let mut s = sockets();
    let reuse = UdpOptions { reuse_address: true, ..options() };
    let first = s.bind_with(ANY_V4, 7, reuse).unwrap();
    let second = s.bind_with(ANY_V4, 7, reuse).unwrap();
    let bound = s.bind_with("10.0.0.1", 7, reuse).unwrap();
    let mut bytes = datagram(1, 7, b"all");
    bytes[6..8].fill(0);
    let header = ipv4_header(PEER_V4, Ipv4Addr::new(10, 0, 0, 255), protocol::UDP, bytes.len());
    let bytes = frame_to(MacAddr::BROADCAST, None, EtherType::IPV4, &ipv4_packet(header, &bytes));
    s.receive_frame(&bytes);
    assert!(s.read(first).is_ok() && s.read(second).is_ok());
    assert_eq!(s.read(bound), Err(UdpError::WouldBlock), "bound to another address");
    s.udp.close(first).unwrap();
    s.udp.close(second).unwrap();
    s.udp.close(bound).unwrap();
    s.receive_frame(&bytes);
    assert_eq!(s.fixture.sent().len(), 0, "no error about a broadcast");
}

#[test]
fn broadcast_requires_so_broadcast() {
    let mut s = sockets();
    let socket = s.bind(ANY_V4, 7);
    for to in ["255.255.255.255", "10.0.0.255"] {
        assert_eq!(s.send(socket, Some(at(to, 1)), b"x"), Err(UdpError::BroadcastForbidden));
    }
    s.udp.set_options(socket, UdpOptions { broadcast: true, ..options() }).unwrap();
    for to in ["255.255.255.255", "10.0.0.255"] {
        s.send(socket, Some(at(to, 1)), b"x").unwrap();
        assert_eq!(as_received(&s.fixture.sent_one()).0.dst, MacAddr::BROADCAST);
    }
    s.send(socket, Some(at("224.0.0.251", 1)), b"x").unwrap();
    assert_eq!(s.fixture.sent_one()[22], 1, "multicast stays on the link");
}

#[test]
fn unbound_port_gets_port_unreachable() {
    let mut s = sockets();
    s.receive(1, 7, b"x");
    let frame = s.fixture.sent_one();
    let packet = &frame[14..];
    let header = ipv4::Header::parse(packet).unwrap();
    let message = icmpv4::Message::parse(header.payload(packet)).unwrap();
    assert!(matches!(message, icmpv4::Message::Unreachable { code: 3, .. }));
    assert_eq!(s.udp.stats().no_port, 1);
}

#[test]
fn port_unreachable_is_pending_on_connected_sockets_only() {
    let mut s = sockets();
    let connected = s.bind(ANY_V4, 7);
    s.connect(connected, at("10.0.0.2", 1)).unwrap();
    assert_eq!(s.udp.local(connected), Ok(at("10.0.0.1", 7)));
    assert_eq!(s.udp.remote(connected), Ok(Some(at("10.0.0.2", 1))));
    s.send(connected, None, b"x").unwrap();
    s.peer_sends_error(3, 0);
    assert_eq!(s.udp.next_readable(), Some(connected));
    assert_eq!(s.send(connected, None, b"x"), Err(UdpError::ConnectionRefused));
    s.send(connected, None, b"x").unwrap();
    // "Host unreachable" is a soft error.
    s.peer_sends_error(1, 0);
    assert_eq!(s.udp.take_error(connected), Ok(None));
    s.send(connected, None, b"x").unwrap();
    s.peer_sends_error(2, 0);
    assert_eq!(s.read(connected), Err(UdpError::ProtocolUnreachable));
    let open = s.bind(ANY_V4, 8);
    s.send(open, Some(at("10.0.0.2", 1)), b"x").unwrap();
    s.peer_sends_error(3, 0);
    assert_eq!(s.udp.take_error(open), Ok(None));
    s.udp.close(open).unwrap();
    s.receive(1, 7, b"still works");
    assert!(s.read(connected).is_ok());
}

#[test]
fn packet_too_big_requires_a_matching_socket() {
    let mut s = sockets();
    let socket = s.bind(ANY_V4, 7);
    s.connect(socket, at("10.0.0.2", 1)).unwrap();
    s.send(socket, None, &[1; 1400]).unwrap();
    s.peer_sends_error(4, 1000);
    assert_eq!(s.udp.take_error(socket), Ok(Some(UdpError::TooLong)));
    s.send(socket, None, &[1; 1400]).unwrap();
    let lens: Vec<_> = s.fixture.sent().iter().map(|frame| frame.len() - 34).collect();
    assert_eq!(lens, [976, 432]);
    // No socket has port 9, so the message could be from anybody.
    let foreign = s.bind(ANY_V4, 9);
    s.send(foreign, Some(at("10.0.0.2", 1)), b"x").unwrap();
    s.udp.close(foreign).unwrap();
    s.peer_sends_error(4, 700);
    assert_eq!(s.fixture.route(PEER_V4).mtu, 1000);
    assert_eq!(s.udp.stats().foreign_errors, 1);
}

#[test]
fn invalid_destinations_are_rejected() {
    let mut s = sockets();
    let socket = s.bind(ANY_V4, 7);
    assert_eq!(s.send(socket, None, b"x"), Err(UdpError::NoDestination));
    assert_eq!(s.send(socket, Some(at("10.0.0.2", 0)), b"x"), Err(UdpError::InvalidAddress));
    assert_eq!(s.send(socket, Some(at("127.0.0.1", 1)), b"x"), Err(UdpError::InvalidAddress));
    assert_eq!(s.send(socket, Some(at("192.0.2.1", 1)), b"x"), Err(UdpError::NetUnreachable));
    assert_eq!(s.connect(socket, at("192.0.2.1", 1)), Err(UdpError::NetUnreachable));
    assert_eq!(s.send(socket, Some(at("10.0.0.2", 1)), &[0; 65_508]), Err(UdpError::TooLong));
    assert_eq!(s.send(socket, Some(at("10.0.0.2", 1)), &[0; 65_507]), Ok(()));
    s.fixture.set_capacity(0);
    assert_eq!(s.send(socket, Some(at("10.0.0.2", 1)), b"x"), Err(UdpError::DeviceFull));
}

#[test]
fn receive_queues_are_limited_per_socket_and_total() {
    let mut s = sockets_with(NetworkConfig { udp_receive_total_bytes: 65_536, ..network_config() });
    let small = s.bind_with(ANY_V4, 7, UdpOptions { rcvbuf: Some(3000), ..options() }).unwrap();
    for _ in 0..10 {
        s.receive(1, 7, &[1; 936]);
    }
    assert_eq!(s.udp.stats().received, 3);
    let large = s.bind(ANY_V4, 8);
    for _ in 0..100 {
        s.receive(1, 8, &[1; 936]);
    }
    assert_eq!(s.udp.stats().received, 65);
    assert_eq!(s.udp.stats().receive_overflow, 7 + 38);
    assert_eq!(s.udp.queued, 65_000);
    // A listing shows the charge, limit and drops of each socket.
    let memory = |s: &Sockets, socket: UdpHandle| s.udp.listing(socket.index).unwrap().memory;
    let full = memory(&s, small);
    assert_eq!((full.rmem_alloc, full.rcvbuf, full.drops), (3 * 1000, 3000, Some(7)));
    assert!(full.total > 3 * 936, "{full:?}");
    assert_eq!((memory(&s, large).rmem_alloc, memory(&s, large).drops), (62_000, Some(38)));
    while s.read(small).is_ok() {}
    while s.read(large).is_ok() {}
    assert_eq!((memory(&s, small).rmem_alloc, memory(&s, small).drops), (0, Some(7)));
    assert_eq!(s.udp.queued, 0);
    assert!(s.udp.capacity <= 65_536 / 2 + 4096, "{}", s.udp.capacity);
    // An empty queue accepts a datagram that exceeds its limit.
    let tiny = s.bind_with(ANY_V4, 9, UdpOptions { rcvbuf: Some(10), ..options() }).unwrap();
    s.receive(1, 9, &[1; 1000]);
    assert_eq!(s.read(tiny).unwrap().len(), 1000);
}

#[test]
fn super_frame_is_split_into_datagrams() {
    let mut s = sockets();
    let socket = s.bind(ANY_V4, 7);
    let payload: Vec<u8> = (0..250).collect();
    let frame = v4_frame(protocol::UDP, &datagram(1, 7, &payload));
    let gso = Some(Gso { kind: GsoKind::Udp, size: 100, header_len: 42, ecn: false });
    let frame = RxFrame { checksum: RxChecksum::Verified, gso, ..RxFrame::new(&frame) };
    let ParsedFrame::Udp(l4) = s.fixture.network.parse(s.fixture.port, &frame) else { panic!() };
    s.udp.input(s.fixture.now, &mut s.fixture.network, &l4);
    for gso_size in payload.chunks(100) {
        assert_eq!(s.read(socket).unwrap(), gso_size);
    }
    assert_eq!(s.read(socket), Err(UdpError::WouldBlock));
}

#[test]
fn sockets_are_limited_and_slots_reused() {
    let mut s = sockets_with(NetworkConfig { udp_sockets_max: 2, ..network_config() });
    let first = s.bind(ANY_V4, 1);
    s.bind(ANY_V4, 2);
    assert_eq!(s.bind_with(ANY_V4, 3, options()), Err(UdpError::TooManySockets));
    assert_eq!(s.udp.stats().sockets_refused, 1);
    s.udp.close(first).unwrap();
    assert_eq!(s.bind(ANY_V4, 3).index, first.index);
}

#[test]
fn recverr_queues_all_errors_with_their_payload() {
    let mut s = sockets();
    let with_recverr = s.bind_with(ANY_V4, 7, UdpOptions { recverr_v4: true, ..options() }).unwrap();
    let without_recverr = s.bind_with(ANY_V4, 8, UdpOptions { recverr_v6: true, ..options() }).unwrap();
    let to = at("10.0.0.2", 1);
    let mut out = [0; 10];
    // "Host unreachable" is a soft error, and the sockets are not connected.
    for (socket, error) in [(with_recverr, Some(UdpError::HostUnreachable)), (without_recverr, None)] {
        s.send(socket, Some(to), b"question").unwrap();
        s.peer_sends_error(1, 0);
        assert_eq!(s.udp.take_error(socket), Ok(error));
    }
    assert_eq!(s.udp.take_extended_error(without_recverr, &mut out), Err(UdpError::WouldBlock));
    let error = s.udp.take_extended_error(with_recverr, &mut out).unwrap();
    assert_eq!(
        (error.error, error.destination, error.offender),
        (UdpError::HostUnreachable, to, Some(PEER_V4.into()))
    );
    // The peer quotes only the headers.
    assert_eq!((error.icmp_type, error.icmp_code, error.payload_len, error.has_more), (3, 1, 0, false));
    assert_eq!(s.send(with_recverr, Some(to), &[0; 65_508]), Err(UdpError::TooLong));
    let error = s.udp.take_extended_error(with_recverr, &mut out).unwrap();
    assert_eq!((error.error, error.offender, error.info), (UdpError::TooLong, None, 1500));
    assert_eq!((error.destination, s.udp.take_error(with_recverr)), (at("10.0.0.2", 0), Ok(None)));
    s.send(with_recverr, Some(to), b"x").unwrap();
    s.peer_sends_error(3, 0);
    s.udp.set_options(with_recverr, options()).unwrap();
    assert_eq!(s.udp.take_extended_error(with_recverr, &mut out), Err(UdpError::WouldBlock));
}

#[test]
fn pmtu_discovery_mode_governs_reports_of_routers() {
    use PmtuDiscovery::{Do, Dont, Interface, Omit, Probe, Want};
    let too_long = Some(UdpError::TooLong);
    // Each row: the error over IPv4, the errors over IPv6 without and with `IPV6_RECVERR`, the path MTU.
    for (pmtu_discovery, v4, v6, v6_recverr, path_mtu) in [
        (Want, too_long, too_long, too_long, 1300),
        (Do, too_long, too_long, too_long, 1300),
        (Probe, too_long, too_long, too_long, 1300),
        (Dont, None, None, too_long, 1300),
        (Interface, too_long, None, None, 1500),
        (Omit, too_long, None, None, 1500),
    ] {
        let mode = UdpOptions { pmtu_discovery, ..options() };
        let (to_v4, to_v6) = (at("10.0.0.2", 1), at("2001:db8::2", 1));
        for (options, to, expected) in [
            (mode, to_v4, v4),
            (UdpOptions { recverr_v4: true, ..mode }, to_v4, v4),
            (mode, to_v6, v6),
            (UdpOptions { recverr_v6: true, ..mode }, to_v6, v6_recverr),
        ] {
            assert_eq!(report_of_small_mtu(options, to), (expected, path_mtu), "{options:?} {to}");
        }
    }
}

#[test]
fn connected_sockets_share_a_learnt_path_mtu() {
    for to in [at("10.0.0.2", 1), at("2001:db8::2", 1)] {
        let mut s = sockets();
        let any = if to.is_ipv4() { ANY_V4 } else { ANY_V6 };
        let mode = UdpOptions { pmtu_discovery: PmtuDiscovery::Do, ..options() };
        let [learner, other] = [7, 8].map(|port| s.bind_with(any, port, mode).unwrap());
        for socket in [learner, other] {
            s.connect(socket, to).unwrap();
            s.send(socket, None, &[0; 1400]).unwrap();
            assert_eq!(s.udp.path_mtu(s.fixture.now, &mut s.fixture.network, socket), Ok(1500));
        }
        s.send(learner, None, &[0; 1400]).unwrap();
        s.peer_sends_too_big(to, 1300);
        for socket in [learner, other] {
            let path_mtu = s.udp.path_mtu(s.fixture.now, &mut s.fixture.network, socket);
            assert_eq!(path_mtu, Ok(1300), "{to}");
        }
        assert_eq!(s.udp.take_error(other), Ok(None), "only the sender gets the error");
        assert_eq!(s.send(other, None, &[0; 1400]), Err(UdpError::TooLong), "{to}");
        s.fixture.now += Duration::from_secs(600);
        let path_mtu = s.udp.path_mtu(s.fixture.now, &mut s.fixture.network, other);
        assert_eq!(path_mtu, Ok(1500), "the path MTU expires: {to}");
        s.send(other, None, &[0; 1400]).unwrap();
    }
}

#[test]
fn pmtu_discovery_mode_governs_long_datagrams() {
    let mut s = sockets();
    let socket = s.bind(ANY_V4, 7);
    s.connect(socket, at("10.0.0.2", 1)).unwrap();
    let dont_fragment = |frame: &[u8]| ipv4::Header::parse(&frame[14..]).unwrap().dont_fragment;
    s.send(socket, None, &[0; 1000]).unwrap();
    s.peer_sends_error(4, 900);
    assert_eq!(s.udp.take_error(socket), Ok(Some(UdpError::TooLong)));
    for (mode, most, cut, alone) in [
        (PmtuDiscovery::Want, 900, true, true),
        (PmtuDiscovery::Do, 900, false, true),
        (PmtuDiscovery::Probe, 1500, false, true),
        (PmtuDiscovery::Interface, 1500, false, false),
        (PmtuDiscovery::Omit, 1500, true, false),
        (PmtuDiscovery::Dont, 900, true, false),
    ] {
        s.udp.set_options(socket, UdpOptions { pmtu_discovery: mode, ..options() }).unwrap();
        assert_eq!(s.udp.path_mtu(s.fixture.now, &mut s.fixture.network, socket), Ok(most), "{mode:?}");
        s.send(socket, None, &[0; 872]).unwrap();
        assert_eq!(dont_fragment(&s.fixture.sent_one()), alone, "{mode:?}");
        let long = s.send(socket, None, &vec![0; usize::from(most) - 27]);
        assert_eq!(long, if cut { Ok(()) } else { Err(UdpError::TooLong) }, "{mode:?}");
        s.fixture.sent();
    }
    s.send(socket, None, &[0; 100]).unwrap();
    s.peer_sends_error(4, 800);
    assert_eq!(s.udp.take_error(socket), Ok(None), "not an error if routers may fragment");
    let open = s.bind(ANY_V4, 8);
    let asked = s.udp.path_mtu(s.fixture.now, &mut s.fixture.network, open);
    assert_eq!(asked, Err(UdpError::NoDestination));
}

#[test]
fn udp_segment_is_split_by_stack_or_device() {
    let payload: Vec<u8> = (0..250).collect();
    let uso = Capabilities { tx_checksum: true, gso_bytes_max: 65_549, uso: true, ..CAPABILITIES };
    for (capabilities, frames) in [(CAPABILITIES, 3), (uso, 1)] {
        let mut s = sockets();
        let static_neighbours = vec![(PEER_V4.into(), PEER_MAC)];
        let link = LinkConfig { static_neighbours, ..link_config() };
        s.fixture = NetworkFixture::with(network_config(), &link, capabilities);
        let socket = s.bind(ANY_V4, 7);
        let mut send = |to: Option<SocketAddr>, bytes: &[u8], gso_size| {
            let params = UdpSendParams { to, gso_size, ..UdpSendParams::default() };
            s.udp.send(s.fixture.now, &mut s.fixture.network, socket, &params, bytes)
        };
        let to = Some(at("10.0.0.2", 1));
        send(to, &payload, 100).unwrap();
        send(to, &payload, 250).unwrap();
        send(to, &payload, 0).unwrap();
        assert_eq!(send(to, &[0; 3000], 1473), Err(UdpError::TooLong));
        assert_eq!(send(to, &[0; 65_508], 100), Err(UdpError::TooLong));
        assert_eq!(send(None, &payload, 100), Err(UdpError::NoDestination));
        let sent = s.fixture.sent();
        assert_eq!(sent.len(), frames + 2);
        let payload_sent: Vec<u8> = sent[..frames].iter().flat_map(|frame| &frame[42..]).copied().collect();
        assert_eq!(payload_sent, payload);
        assert_eq!(s.udp.stats().sent, 5, "datagrams are counted, not frames");
    }
}

// limit: segments of one UDP send
#[test]
fn udp_segment_is_limited_to_128_datagrams() {
    let mut s = sockets();
    let socket = s.bind(ANY_V4, 7);
    let to = Some(at("10.0.0.2", 1));
    for (bytes, expected) in [(128, Ok(())), (129, Err(UdpError::TooLong)), (65_507, Err(UdpError::TooLong))]
    {
        let (now, payload) = (s.fixture.now, vec![0; bytes]);
        let params = UdpSendParams { to, gso_size: 1, ..UdpSendParams::default() };
        let sent = s.udp.send(now, &mut s.fixture.network, socket, &params, &payload);
        assert_eq!(sent, expected, "{bytes} datagrams of one byte");
    }
    s.send(socket, to, b"and the next").unwrap();
}

#[test]
fn gro_socket_receives_a_burst_as_one() {
    let mut s = sockets();
    let coalescing = s.bind_with(ANY_V4, 7, UdpOptions { gro: true, ..options() }).unwrap();
    for payload in [&b"abc"[..], b"def", b"g", b"hij"] {
        s.receive(1, 7, payload);
    }
    s.receive(2, 7, b"klm");
    let mut out = [0; 100];
    let mut read = || {
        s.udp
            .recv_from(coalescing, &mut out)
            .map(|datagram| (datagram.len, datagram.gso_size, datagram.from.port()))
    };
    assert_eq!(read(), Ok((7, 3, 1)));
    assert_eq!(read(), Ok((3, 0, 1)));
    assert_eq!(read(), Ok((3, 0, 2)));
    assert_eq!(read(), Err(UdpError::WouldBlock));
    assert_eq!((s.udp.queued, s.udp.stats().received), (0, 5));
}

#[test]
fn datagrams_are_labelled_on_capable_devices() {
    let mut s = sockets();
    let labelled = Capabilities { labels: true, ..CAPABILITIES };
    let static_neighbours = vec![(PEER_V4.into(), PEER_MAC), (PEER_V6.into(), PEER_MAC)];
    let link = LinkConfig { static_neighbours, ..link_config() };
    let other = at("10.0.0.2", 53);
    for capabilities in [labelled, CAPABILITIES] {
        s.fixture = NetworkFixture::with(network_config(), &link, capabilities);
        s.udp = Udp::new(&network_config());
        let socket = s.bind_with(ANY_V4, 7, UdpOptions { priority: 3, ..options() }).unwrap();
        let labels = |s: &mut Sockets, params: &UdpSendParams, bytes: usize| -> Vec<Label> {
            s.udp.send(s.fixture.now, &mut s.fixture.network, socket, params, &vec![0; bytes]).unwrap();
            s.fixture.sent_with_meta().into_iter().map(|(_, meta)| meta.label).collect()
        };
        let named = UdpSendParams { to: Some(other), ..UdpSendParams::default() };
        assert_eq!(
            labels(&mut s, &named, 10),
            [Label::new(None, 3)],
            "an unconnected socket computes no hash"
        );
        s.connect(socket, other).unwrap();
        let hash = capabilities.labels.then(|| {
            let toeplitz = crate::steering::toeplitz::Toeplitz::new(&crate::steering::toeplitz::KEY);
            toeplitz.hash(OUR_V4.into(), PEER_V4.into(), Some((7, 53)))
        });
        let connected = UdpSendParams::default();
        assert_eq!(labels(&mut s, &connected, 10), [Label::new(hash, 3)]);
        // As on Linux, a type of service given with a datagram determines its priority.
        let urgent = UdpSendParams { tos: Some(0x10), ..connected };
        assert_eq!(labels(&mut s, &urgent, 10), [Label::new(hash, 6)]);
        assert_eq!(labels(&mut s, &connected, 2_000), [Label::new(None, 3); 2], "fragments");
        s.udp.set_options(socket, UdpOptions { priority: 200, ..options() }).unwrap();
        assert_eq!(labels(&mut s, &connected, 10), [Label::new(hash, 7)]);
    }
}
