use super::super::tests::{at, sockets};
use super::*;
use crate::udp::UdpOptions;
use core::net::IpAddr;
use std::sync::Mutex;

/// Records the packets that it sees, and keeps a fixed number of bytes.
#[derive(Debug)]
struct Recorder {
    keeps: u32,
    seen: Mutex<Vec<(Vec<u8>, Vec<u8>)>>,
}

impl SocketFilter for Recorder {
    fn run(&self, packet: &FilteredPacket<'_>) -> u32 {
        assert_eq!((packet.header_len, packet.frame.len()), (8, 14));
        self.seen.lock().unwrap().push((packet.network.to_vec(), packet.bytes.to_vec()));
        self.keeps
    }

    fn code(&self) -> &[u8] {
        b"code"
    }
}

fn recorder(keeps: u32) -> Arc<Recorder> {
    Arc::new(Recorder { keeps, seen: Mutex::default() })
}

#[test]
fn filter_sees_the_packet_as_received() {
    let mut sockets = sockets();
    let socket = sockets.bind("0.0.0.0", 53);
    let filter = recorder(u32::MAX);
    sockets.udp.set_filter(socket, Some(filter.clone())).unwrap();
    assert_eq!(sockets.udp.filter(socket).map(SocketFilter::code), Some(&b"code"[..]));
    sockets.receive(1000, 53, b"hello");
    assert_eq!(sockets.read(socket), Ok(b"hello".to_vec()));
    let (network, bytes) = filter.seen.lock().unwrap().pop().unwrap();
    assert_eq!((network[0], network.len(), bytes.len()), (0x45, 33, 13));
    assert_eq!(network[20..], bytes);
    assert_eq!(bytes[..4], [3, 0xe8, 0, 53]);
    assert_eq!(&bytes[8..], b"hello");
}

#[test]
fn dropped_and_truncated_datagrams_are_accounted() {
    let mut sockets = sockets();
    let socket = sockets.bind("0.0.0.0", 53);
    sockets.udp.set_filter(socket, Some(recorder(0))).unwrap();
    sockets.receive(1000, 53, b"dropped");
    assert!(sockets.read(socket).is_err());
    assert_eq!((sockets.udp.stats().filter_drops, sockets.udp.stats().received), (1, 0));
    for (keeps, expected) in [(1, ""), (8, ""), (9, "a"), (12, "abcd"), (13, "abcde"), (99, "abcde")] {
        sockets.udp.set_filter(socket, Some(recorder(keeps))).unwrap();
        sockets.receive(1000, 53, b"abcde");
        assert_eq!(sockets.read(socket), Ok(expected.as_bytes().to_vec()), "{keeps}");
    }
    sockets.udp.set_filter(socket, None).unwrap();
    sockets.receive(1000, 53, b"abcde");
    assert_eq!(sockets.read(socket), Ok(b"abcde".to_vec()));
    assert_eq!(sockets.udp.queued_bytes().0, 0);
    // Options do not remove a filter.
    sockets.udp.set_filter(socket, Some(recorder(0))).unwrap();
    sockets.udp.set_options(socket, UdpOptions::default()).unwrap();
    sockets.receive(1000, 53, b"abcde");
    assert!(sockets.read(socket).is_err());
    assert_eq!(sockets.udp.stats().filter_drops, 2);
    sockets.udp.close(socket).unwrap();
    assert!(sockets.udp.filter(socket).is_none());
    assert_eq!(sockets.udp.set_filter(socket, None), Err(UdpError::Stale));
}

#[test]
fn filter_sees_each_datagram_of_a_super_frame() {
    let mut sockets = sockets();
    let socket = sockets.bind("0.0.0.0", 53);
    let filter = recorder(11);
    sockets.udp.set_filter(socket, Some(filter.clone())).unwrap();
    let network = &sockets.fixture.network;
    let arrival = Arrival { network, link: LinkId(0), l4: None };
    let description = Datagram {
        len: 10,
        from: at("10.0.0.2", 1000),
        to: IpAddr::from([10, 0, 0, 1]),
        tos: 3,
        hop_limit: 9,
        flow_label: 0,
        gso_size: 0,
    };
    sockets.udp.deliver(0, &description, b"abcdefghij", 4, &arrival);
    for expected in ["abc", "efg", "ij"] {
        assert_eq!(sockets.read(socket), Ok(expected.as_bytes().to_vec()));
    }
    let seen = filter.seen.lock().unwrap();
    let lengths: Vec<_> = seen.iter().map(|(network, bytes)| (network.len(), bytes.len())).collect();
    assert_eq!(lengths, [(32, 12), (32, 12), (30, 10)]);
    // Type of service, length, hop limit, protocol and addresses of the rebuilt header.
    let (network, bytes) = &seen[0];
    assert_eq!([network[1], network[3], network[8], network[9]], [3, 32, 9, 17]);
    assert_eq!(network[12..20], [10, 0, 0, 2, 10, 0, 0, 1]);
    assert_eq!(bytes[..6], [3, 0xe8, 0, 53, 0, 12]);
}

#[test]
fn filter_is_applied_before_the_limit_of_the_queue() {
    let mut sockets = sockets();
    let socket = sockets.bind("0.0.0.0", 53);
    sockets.udp.set_filter(socket, Some(recorder(8 + 1))).unwrap();
    let limit: u32 = 4096;
    let options = UdpOptions { rcvbuf: Some(limit), ..UdpOptions::default() };
    sockets.udp.set_options(socket, options).unwrap();
    let fitting = limit as usize / (1 + queue::OVERHEAD);
    for _ in 0..fitting {
        sockets.receive(1000, 53, &[7; 1000]);
    }
    let stats = sockets.udp.stats();
    assert_eq!((stats.received, stats.receive_overflow), (fitting as u64, 0), "one byte of each is queued");
    sockets.receive(1000, 53, &[7; 1000]);
    assert_eq!(sockets.udp.stats().receive_overflow, 1);
    // What the filter drops is no overflow.
    sockets.udp.set_filter(socket, Some(recorder(0))).unwrap();
    sockets.receive(1000, 53, &[7; 1000]);
    assert_eq!((sockets.udp.stats().receive_overflow, sockets.udp.stats().filter_drops), (1, 1));
}
