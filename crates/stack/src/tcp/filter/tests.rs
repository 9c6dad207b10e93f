use super::super::filter_table::{FilterId, FilterTable};
use super::super::profile::{Profile, ProfileId, ProfileTable};
use super::*;
use crate::device::{Capabilities, RxChecksum, RxFrame};
use crate::handle::LinkId;
use crate::ip::testbench::{RecordingTxQueue, TxRecorder};
use crate::link::LinkConfig;
use crate::options::ListenOptions;
use crate::stack::{Stack, StackConfig};
use crate::tcp::config::TcpConfig;
use crate::time::Instant;
use core::net::IpAddr;
use std::sync::Mutex;

/// Keeps a fixed number of bytes.
#[derive(Debug)]
struct Keeps(u32);

impl SocketFilter for Keeps {
    fn run(&self, _: &FilteredPacket<'_>) -> u32 {
        self.0
    }

    fn code(&self) -> &[u8] {
        &[]
    }
}

fn packet() -> FilteredPacket<'static> {
    FilteredPacket {
        bytes: &[],
        header_len: 0,
        network: &[],
        frame: &[],
        destination: IpAddr::from([10, 0, 0, 1]),
        is_broadcast: false,
        link: LinkId(0),
        is_loopback: false,
    }
}

#[test]
fn filters_are_freed_with_their_last_profile() {
    let mut table = ProfileTable::new(Profile::from_config(&TcpConfig::default()));
    let default = *table.get(ProfileId::DEFAULT);
    let filter: Arc<dyn SocketFilter> = Arc::new(Keeps(5));
    let id = table.filters.add(Arc::clone(&filter)).unwrap();
    let plain = table.intern(default.with_filter(id)).unwrap();
    let mut variant = default.with_filter(id);
    variant.keep_count = 3;
    let other = table.intern(variant).unwrap();
    assert_eq!(Arc::strong_count(&filter), 2);
    assert_eq!(table.filters.run(id, &packet()), 5);
    let shared = table.share(plain);
    table.release(plain);
    table.release(other);
    assert_eq!(Arc::strong_count(&filter), 2, "a connection shares the profile");
    table.release(shared);
    assert_eq!((Arc::strong_count(&filter), table.filters.len()), (1, 0));
    // Another filter gets the number, and no profile of the former one is found.
    let next = table.filters.add(Arc::new(Keeps(6))).unwrap();
    assert_eq!(next, id);
    let again = table.intern(default.with_filter(next)).unwrap();
    assert_eq!(table.filters.run(table.get(again).filter, &packet()), 6);
}

#[test]
fn fixed_filters_keep_all_or_nothing() {
    let mut table = FilterTable::default();
    assert_eq!(table.run(FilterId::NONE, &packet()), u32::MAX);
    assert_eq!(table.run(FilterId::DROP_ALL, &packet()), 0);
    for id in [FilterId::NONE, FilterId::DROP_ALL] {
        table.share(id);
        table.release(id);
        assert!(table.get(id).is_none());
    }
    let count = (0..).take_while(|_| table.add(Arc::new(Keeps(1))).is_some()).count();
    assert_eq!(count, usize::from(u16::MAX) - 1);
}

/// A packet as a filter saw it: link, Ethernet type, offset of the IP header in the frame, bytes from TCP on.
type Seen = (u16, [u8; 2], usize, Vec<u8>);

/// Records the packets that it drops.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<Seen>>);

impl SocketFilter for Recorder {
    fn run(&self, packet: &FilteredPacket<'_>) -> u32 {
        let frame = packet.frame;
        let network_at = frame.len().saturating_sub(packet.network.len());
        let seen = (packet.link.0, [frame[12], frame[13]], network_at, packet.bytes.to_vec());
        assert_eq!(packet.header_len, 20);
        self.0.lock().unwrap().push(seen);
        0
    }

    fn code(&self) -> &[u8] {
        &[]
    }
}

/// Returns an IPv4 packet with a SYN from `source` to port 80 of `destination`.
fn syn(source: [u8; 4], destination: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let header = [3, 0xe8, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 1, 0, 0, 0, 0, 0];
    let fields = PacketFields {
        source: source.into(),
        destination: destination.into(),
        protocol: protocol::TCP,
        tos: 0,
        hop_limit: 64,
    };
    let mut packet = Vec::new();
    fields.build(&[&header, payload], &mut packet);
    packet
}

fn frame(vlan: Option<u16>, packet: &[u8]) -> Vec<u8> {
    let tag = vlan.map(|vlan| [[0x81, 0], vlan.to_be_bytes()].concat()).unwrap_or_default();
    [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 9][..], &tag, &[8, 0], packet].concat()
}

#[test]
fn filter_sees_the_link_and_the_frame_of_arrival() {
    let recorder = Arc::new(Mutex::new(TxRecorder { capacity: usize::MAX, ..TxRecorder::default() }));
    let now = Instant::from_millis(1_000);
    let mut stack = Stack::new(StackConfig::default(), [1; 32], now).unwrap();
    let capabilities = Capabilities {
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        tx_checksum: false,
        gso_bytes_max: 0,
        uso: false,
        labels: false,
    };
    let queue = RecordingTxQueue { recorder: recorder.clone(), capabilities, buffer: Vec::new() };
    let port = stack.add_port(Box::new(queue));
    for (vlan, address) in [(None, [10, 0, 0, 1]), (Some(7), [10, 0, 7, 1])] {
        let link = LinkConfig {
            name: format!("line{vlan:?}"),
            vlan,
            addresses: vec![(address.into(), 24)],
            ..LinkConfig::default()
        };
        stack.add_link(port, &link).unwrap();
    }
    let listener = stack.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default()).unwrap();
    let filter = Arc::new(Recorder::default());
    stack.set_listener_filter(listener, Some(filter.clone())).unwrap();
    recorder.lock().unwrap().sent.clear();
    let neighbours = stack.network().neighbours().count();
    let mut receive = |frame: &[u8]| {
        let frame = RxFrame { checksum: RxChecksum::Verified, ..RxFrame::new(frame) };
        let burst: RxBurst<'_> = [frame].into_iter().collect();
        stack.receive(now, port, &burst);
        stack.finish_burst(&burst);
        filter.0.lock().unwrap().pop()
    };
    let plain = syn([10, 0, 0, 9], [10, 0, 0, 1], b"payload");
    assert_eq!(receive(&frame(None, &plain)), Some((0, [8, 0], 14, plain[20..].to_vec())));
    // The frame is padded to 60 bytes.
    let short = syn([10, 0, 0, 9], [10, 0, 0, 1], b"");
    let padded = [frame(None, &short), vec![0xee; 6]].concat();
    assert_eq!(receive(&padded), Some((0, [8, 0], 14, short[20..].to_vec())));
    // The answers would leave on the other link.
    let tagged = syn([10, 0, 0, 9], [10, 0, 7, 1], b"payload");
    assert_eq!(receive(&frame(Some(7), &tagged)), Some((1, [0x81, 0], 18, tagged[20..].to_vec())));
    let no_route_back = syn([192, 0, 2, 1], [10, 0, 7, 1], b"");
    assert_eq!(receive(&frame(Some(7), &no_route_back)).unwrap().0, 1);
    assert_eq!(stack.network().neighbours().count(), neighbours, "nothing was looked up");
    assert!(recorder.lock().unwrap().sent.is_empty());
    assert_eq!(stack.tcp_stats().filter_drops, 4);
}
