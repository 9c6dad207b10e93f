//! TCP Fast Open: the next connection of a peer may belong to another shard than the one that sent the
//! cookie; clients send data in their SYN.

use super::control::{OUR_MAC, WIRE_MAC, arp, ethernet, turn};
use super::{RecordingHandler, START, receive, send, shards_and_device, stack_config};
use crate::shard::Shard;
use core::net::Ipv4Addr;
use core::time::Duration;
use ginnel_devices::memory::RssMode;
use ginnel_stack::device::Device;
use ginnel_stack::handle::PortId;
use ginnel_stack::options::{ConnectOptions, ListenOptions, SocketOptions};
use ginnel_stack::steering::{FrameOwner, Steering};
use ginnel_stack::time::Instant;
use ginnel_stack::wire::checksum::{Sum, pseudo_v4};
use ginnel_stack::wire::ethernet::EtherType;
use ginnel_stack::wire::tcp::{self, FastOpenCookie, SeqNumber, TcpFlags, TcpHeader, TcpOptions, TcpSegment};
use ginnel_stack::wire::{MacAddr, arp::ArpOperation, ipv4, protocol};

const STACK: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

/// Returns a SYN of the peer with this cookie, empty to request one, and with data.
fn syn(src_port: u16, cookie: &[u8], data: &[u8]) -> Vec<u8> {
    segment_of_peer([src_port, 80], SeqNumber(0), TcpFlags::SYN, cookie, data)
}

/// Returns a segment of the peer from and to these ports, with this cookie.
fn segment_of_peer(
    [src_port, dst_port]: [u16; 2],
    ack: SeqNumber,
    flags: TcpFlags,
    cookie: &[u8],
    data: &[u8],
) -> Vec<u8> {
    let header = TcpHeader {
        src_port,
        dst_port,
        seq: SeqNumber(1),
        ack,
        flags,
        window: 60_000,
        urg_ptr: 0,
        header_len: 0,
    };
    let options = TcpOptions { fastopen: Some(FastOpenCookie::new(cookie, false)), ..TcpOptions::default() };
    let len = TcpHeader::LEN + options.encoded_len() + data.len();
    let mut packet = vec![0; 20 + len];
    let ip = ipv4::Header {
        dscp: 0,
        ecn: 0,
        total_len: (20 + len) as u16,
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
    ip.emit(&mut packet);
    let segment = &mut packet[20..];
    let header_len = tcp::emit(&header, &options, segment);
    segment[header_len..].copy_from_slice(data);
    let sum = pseudo_v4(PEER, STACK, protocol::TCP, len).add(Sum::of(segment)).finish();
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    ethernet(OUR_MAC, EtherType::IPV4, &packet)
}

/// Returns the cookie in a SYN+ACK.
fn cookie_of(frame: &[u8]) -> Option<Vec<u8>> {
    let packet = frame.get(14..).filter(|_| frame[12..14] == [8, 0])?;
    let ip = ipv4::Header::parse(packet).ok().filter(|ip| ip.protocol == protocol::TCP)?;
    let segment = TcpSegment::parse(ip.payload(packet)).ok()?;
    assert_eq!(segment.header.flags, TcpFlags::SYN | TcpFlags::ACK);
    Some(TcpOptions::parse(segment.options).fastopen?.bytes.to_vec())
}

#[test]
fn cookie_of_one_shard_is_valid_on_others() {
    let mut config = stack_config(2);
    config.tcp.fastopen = 2;
    let steering = Steering::new(0, 2, &config.network);
    let (mut shards, mut wire) = shards_and_device(config, RssMode::Hash, |_| RecordingHandler::default());
    let mut now = START + Duration::from_secs(5);
    turn(&mut shards, now);
    for shard in &mut shards {
        let socket = SocketOptions { fastopen_queue: 8, ..SocketOptions::default() };
        let options = ListenOptions { socket, ..ListenOptions::default() };
        shard.with(now, |_, cx| cx.listen("10.0.0.1:80".parse().unwrap(), options).unwrap());
    }
    send(&mut wire, &arp(ArpOperation::Request, PEER, WIRE_MAC, MacAddr::BROADCAST));
    turn(&mut shards, now);
    receive(&mut wire);

    // Each shard is the one that sends the cookie, once.
    for (first, second) in [(0, 1), (1, 0)] {
        let port_of = |shard: u8| {
            let belongs = |port: &u16| {
                steering.owner_of_bytes(PortId(0), &syn(*port, &[], &[])) == FrameOwner::Shard(shard)
            };
            (1000 + 1000 * u16::from(first)..).find(belongs).unwrap()
        };
        let accepts = |shard: &Shard<RecordingHandler>| {
            let stats = shard.core.stack.local().unwrap().tcp_stats();
            (stats.fastopen_accepts, stats.fastopen_failures)
        };
        let before = accepts(&shards[usize::from(second)]);
        send(&mut wire, &syn(port_of(first), &[], &[]));
        now += Duration::from_millis(1);
        turn(&mut shards, now);
        let cookies: Vec<_> = receive(&mut wire).iter().filter_map(|frame| cookie_of(frame)).collect();
        let [cookie] = &cookies[..] else { panic!("{cookies:?}") };
        assert_eq!(cookie.len(), 8);
        send(&mut wire, &syn(port_of(second), cookie, b"early"));
        now += Duration::from_millis(1);
        turn(&mut shards, now);
        assert_eq!(accepts(&shards[usize::from(second)]), (before.0 + 1, 0));
        assert_eq!(shards[usize::from(second)].handler().accepted.len(), 1);
        receive(&mut wire);
    }
}

/// A SYN of the stack.
#[derive(Debug)]
struct SentSyn {
    /// Source and destination.
    ports: [u16; 2],
    seq: SeqNumber,
    cookie: Vec<u8>,
    data: Vec<u8>,
}

/// Parses a frame with a SYN that has the fast open option.
fn sent_syn(frame: &[u8]) -> Option<SentSyn> {
    let packet = frame.get(14..).filter(|_| frame[12..14] == [8, 0])?;
    let ip = ipv4::Header::parse(packet).ok().filter(|ip| ip.protocol == protocol::TCP)?;
    let TcpSegment { header, options, payload, .. } = TcpSegment::parse(ip.payload(packet)).ok()?;
    let cookie = TcpOptions::parse(options).fastopen.filter(|_| header.flags == TcpFlags::SYN)?;
    Some(SentSyn {
        ports: [header.src_port, header.dst_port],
        seq: header.seq,
        cookie: cookie.bytes.to_vec(),
        data: payload.to_vec(),
    })
}

/// Cookie that the peer sends.
const COOKIE: [u8; 8] = [7; 8];

/// Returns two shards that know the peer's address, the other end of their wire, and the time.
fn fast_clients() -> (Vec<Shard<RecordingHandler>>, Device, Instant) {
    let mut config = stack_config(2);
    config.tcp.fastopen = 1;
    let (mut shards, mut wire) = shards_and_device(config, RssMode::Hash, |_| RecordingHandler::default());
    let now = START + Duration::from_secs(5);
    send(&mut wire, &arp(ArpOperation::Request, PEER, WIRE_MAC, MacAddr::BROADCAST));
    turn(&mut shards, now);
    receive(&mut wire);
    (shards, wire, now)
}

/// Opens a connection with data on a shard, and answers with a cookie. Returns the cookie and the data of the
/// SYN.
fn connect_fast(
    shards: &mut [Shard<RecordingHandler>],
    wire: &mut Device,
    shard: usize,
    now: Instant,
) -> (Vec<u8>, Vec<u8>) {
    let to = (PEER, 90).into();
    let options = ConnectOptions::default();
    let queued = shards[shard].with(now, |_, cx| cx.connect_with_data(to, options, b"early").unwrap().1);
    assert_eq!(queued, 5);
    turn(shards, now);
    let syns: Vec<_> = receive(wire).iter().filter_map(|frame| sent_syn(frame)).collect();
    let [SentSyn { ports: [to, from], seq, cookie, data }] = &syns[..] else { panic!("{syns:?}") };
    let ack = *seq + (1 + data.len() as u32);
    send(wire, &segment_of_peer([*from, *to], ack, TcpFlags::SYN | TcpFlags::ACK, &COOKIE, &[]));
    turn(shards, now);
    receive(wire);
    (cookie.clone(), data.clone())
}

#[test]
fn cookie_that_one_shard_learns_is_sent_by_others() {
    let (mut shards, mut wire, now) = fast_clients();
    assert_eq!(connect_fast(&mut shards, &mut wire, 0, now), (vec![], vec![]));
    let now = now + Duration::from_millis(1);
    assert_eq!(connect_fast(&mut shards, &mut wire, 1, now), (COOKIE.to_vec(), b"early".to_vec()));
    let stats = shards[1].core.stack.local().unwrap().tcp_stats();
    assert_eq!((stats.fastopen_active, stats.fastopen_active_failures), (1, 0));
}

#[test]
fn known_cookie_is_not_broadcast_again() {
    let (mut shards, mut wire, mut now) = fast_clients();
    let broadcasts = |shards: &[Shard<RecordingHandler>]| {
        shards.iter().map(|shard| shard.stats().broadcasts_sent).sum::<u64>()
    };
    let before = broadcasts(&shards);
    connect_fast(&mut shards, &mut wire, 0, now);
    assert_eq!(broadcasts(&shards), before + 1);
    for shard in [0, 1, 0] {
        now += Duration::from_millis(1);
        connect_fast(&mut shards, &mut wire, shard, now);
    }
    assert_eq!(broadcasts(&shards), before + 1);
}

/// As on Linux, which sends the SYN when its data are written.
#[test]
fn end_of_the_connection_does_not_hold_written_data_back() {
    let (mut shards, mut wire, mut now) = fast_clients();
    connect_fast(&mut shards, &mut wire, 0, now);
    for (data, is_aborted, expected) in
        [(&b"early"[..], false, 1), (b"early", true, 1), (b"", false, 0), (b"", true, 0)]
    {
        now += Duration::from_millis(1);
        shards[0].with(now, |_, cx| {
            let socket = SocketOptions { fastopen_connect: true, ..SocketOptions::default() };
            let options = ConnectOptions { socket, ..ConnectOptions::default() };
            let conn = cx.connect((PEER, 90).into(), options).unwrap();
            if !data.is_empty() {
                assert_eq!(cx.send(conn, data), Ok(data.len()));
            }
            let ended = if is_aborted { cx.abort(conn) } else { cx.close(conn) };
            ended.unwrap();
        });
        turn(&mut shards, now);
        let syns: Vec<_> = receive(&mut wire).iter().filter_map(|frame| sent_syn(frame)).collect();
        assert_eq!(syns.len(), expected, "{syns:?}");
        assert!(syns.iter().all(|syn| syn.data == data && syn.cookie == COOKIE), "{syns:?}");
    }
}
