use super::*;
use crate::device::Capabilities;
use crate::ip::testbench::*;
use crate::ip::{IpHeader, Route};
use crate::wire::tcp::{self, SeqNumber, TcpOptions, Timestamps};

const OFFLOADS: Capabilities = Capabilities { tx_checksum: true, gso_bytes_max: 40_000, ..CAPABILITIES };

fn headers() -> TcpV4Headers {
    TcpV4Headers {
        src: OUR_V4.to_bits(),
        dst: PEER_V4.to_bits(),
        tos: 2,
        ttl: 61,
        ports: 80 << 16 | 0xfedc,
        seq: 0xffff_fff0,
        ack: 0x8000_0001,
        flags: TcpFlags::ACK.with(TcpFlags::PSH),
        window: 0xfffe,
        urg_ptr: 0,
    }
}

fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + 3) as u8).collect()
}

fn send_fast(
    fixture: &mut NetworkFixture,
    route: &Route,
    headers: &TcpV4Headers,
    options: &[u32],
    lengths: (usize, Option<u16>),
) -> bool {
    let (len, gso_size) = lengths;
    let lengths = TcpV4Lengths { options, payload: len, gso_size };
    let Some(packet) = fixture.network.begin_tcp_v4(fixture.now, &route.hop, lengths).unwrap() else {
        return false;
    };
    packet.payload.copy_from_slice(&payload(len));
    let sum = if packet.payload_sum == PayloadSum::Required { Sum::of(packet.payload) } else { Sum::ZERO };
    let sealed = packet.seal(headers, options, sum);
    fixture.network.commit_tcp_v4(sealed, Label::NONE);
    true
}

fn send_slow(
    fixture: &mut NetworkFixture,
    route: &Route,
    headers: &TcpV4Headers,
    options: &TcpOptions,
    lengths: (usize, Option<u16>),
) {
    let (len, gso_size) = lengths;
    let ip = IpHeader {
        src: OUR_V4.into(),
        dst: PEER_V4.into(),
        protocol: protocol::TCP,
        tos: headers.tos,
        hop_limit: headers.ttl,
        dont_fragment: true,
        flow_label: 0,
        label: Label::NONE,
    };
    let header = TcpHeader {
        src_port: (headers.ports >> 16) as u16,
        dst_port: headers.ports as u16,
        seq: SeqNumber(headers.seq),
        ack: SeqNumber(headers.ack),
        flags: headers.flags,
        window: headers.window,
        urg_ptr: headers.urg_ptr,
        header_len: 0,
    };
    let header_len = TcpHeader::LEN + options.encoded_len();
    let write = |l4: &mut [u8], _| {
        tcp::emit(&header, options, l4);
        l4[header_len..].copy_from_slice(&payload(len));
        (header_len, Sum::of(&l4[header_len..]))
    };
    fixture.network.send_tcp(fixture.now, &route.hop, &ip, header_len + len, gso_size, write).unwrap();
}

#[test]
fn fast_path_builds_the_slow_path_packet() {
    let timestamps = Some(Timestamps { tsval: 0xdead_beef, tsecr: 1 });
    let syn = TcpOptions {
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps,
        ..TcpOptions::default()
    };
    let sack_blocks =
        [(SeqNumber(1), SeqNumber(2)), (SeqNumber(0xffff_ffff), SeqNumber(5))].into_iter().collect();
    let sack = TcpOptions { timestamps, sack_blocks, ..TcpOptions::default() };
    let options = [TcpOptions::default(), TcpOptions { timestamps, ..TcpOptions::default() }, syn, sack];
    let urg_ptr = TcpV4Headers { urg_ptr: 17, flags: TcpFlags::URG.with(TcpFlags::CWR), tos: 0, ..headers() };
    for capabilities in [CAPABILITIES, OFFLOADS] {
        let mut fixture = NetworkFixture::with(network_config(), &link_config(), capabilities);
        fixture.learn_v4(PEER_V4, PEER_MAC);
        let route = fixture.route(PEER_V4);
        let large = (capabilities.gso_bytes_max > 0).then_some((30_000, Some(1400)));
        for lengths in [(0, None), (1, None), (2, None), (101, None), (1400, None)].into_iter().chain(large) {
            for options in &options {
                for headers in [headers(), urg_ptr] {
                    assert!(send_fast(&mut fixture, &route, &headers, &options.words(), lengths));
                    let sent = fixture.sent_with_meta();
                    send_slow(&mut fixture, &route, &headers, options, lengths);
                    assert_eq!(sent, fixture.sent_with_meta(), "{lengths:?} {options:?}");
                }
            }
        }
    }
}

#[test]
fn all_ones_sum_matches_the_slow_path() {
    let mut fixture = NetworkFixture::new();
    fixture.learn_v4(PEER_V4, PEER_MAC);
    let route = fixture.route(PEER_V4);
    send_slow(&mut fixture, &route, &headers(), &TcpOptions::default(), (0, None));
    // The urgent pointer becomes the previous checksum, so that the new checksum is 0.
    let urg_ptr = u16::from_be_bytes(crate::wire::array(fixture.sent_one().first_chunk::<54>().unwrap(), 50));
    let headers = TcpV4Headers { urg_ptr, ..headers() };
    assert!(send_fast(&mut fixture, &route, &headers, &[], (0, None)));
    let sent = fixture.sent_one();
    assert_eq!(sent[50..52], [0, 0]);
    send_slow(&mut fixture, &route, &headers, &TcpOptions::default(), (0, None));
    assert_eq!(sent, fixture.sent_one());
}

#[test]
fn fast_path_declines_unusual_packets() {
    let mut fixture = NetworkFixture::new();
    let unknown = fixture.route(PEER_V4);
    assert!(!send_fast(&mut fixture, &unknown, &headers(), &[], (10, None)), "unresolved neighbour");
    fixture.learn_v4(PEER_V4, PEER_MAC);
    let route = fixture.route(PEER_V4);
    assert!(!send_fast(&mut fixture, &route, &headers(), &[], (1461, None)), "exceeds the MTU");
    assert!(!send_fast(&mut fixture, &route, &headers(), &[], (10_000, Some(1400))), "device without GSO");
    fixture.network.bump_epoch();
    assert!(!send_fast(&mut fixture, &route, &headers(), &[], (10, None)), "stale hop");
    assert!(fixture.sent().is_empty());
}

#[test]
fn full_device_is_reported() {
    let mut fixture = NetworkFixture::new();
    fixture.learn_v4(PEER_V4, PEER_MAC);
    let route = fixture.route(PEER_V4);
    fixture.set_capacity(0);
    let lengths = TcpV4Lengths { options: &[], payload: 10, gso_size: None };
    let result = fixture.network.begin_tcp_v4(fixture.now, &route.hop, lengths);
    assert!(matches!(result, Err(TxError::Full)));
}
