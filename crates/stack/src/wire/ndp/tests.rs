use super::*;

const HOST: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);
const PEER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0x1234, 0x5678);
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

fn prefix(n: u16) -> PrefixInfo {
    PrefixInfo {
        prefix: Ipv6Addr::new(0x2001, 0xdb8, n, 0, 0, 0, 0, 0),
        prefix_len: 64,
        on_link: true,
        autonomous: n.is_multiple_of(2),
        valid_lifetime_s: u32::MAX,
        preferred_lifetime_s: 14_400,
    }
}

fn router(prefixes: u16) -> NdpMessage {
    NdpMessage::RouterAdvertisement(RouterAdvertisement {
        hop_limit: 64,
        managed: true,
        other: false,
        router_lifetime_s: 1800,
        reachable_time_ms: 30_000,
        retrans_timer_ms: 1000,
        source_mac: Some(MAC),
        mtu: Some(1492),
        prefixes: (0..prefixes).map(prefix).collect(),
    })
}

fn solicitation(source_mac: Option<MacAddr>, nonce: Option<[u8; 6]>) -> NdpMessage {
    NdpMessage::NeighbourSolicitation { target: PEER, source_mac, nonce }
}

fn advertisement(solicited: bool) -> NdpMessage {
    NdpMessage::NeighbourAdvertisement {
        target: PEER,
        router: false,
        solicited,
        overrides: true,
        target_mac: Some(MAC),
    }
}

fn emitted(message: &NdpMessage) -> Vec<u8> {
    let mut out = [0xee; MESSAGE_LEN_MAX];
    let len = message.emit(HOST, PEER, &mut out);
    let whole = icmpv6::Message::parse(&out[..len], HOST, PEER);
    assert_eq!(whole, Ok(icmpv6::Message::Ndp(&out[..len])), "checksum and type");
    out[..len].to_vec()
}

#[test]
fn solicited_node_group_has_the_low_24_bits() {
    assert_eq!(solicited_node(PEER), "ff02::1:ff34:5678".parse::<Ipv6Addr>().unwrap());
}

#[test]
fn every_message_round_trips() {
    let full = router(PREFIXES_MAX as u16);
    assert_eq!(emitted(&full).len(), MESSAGE_LEN_MAX);
    for message in [
        NdpMessage::RouterSolicitation { source_mac: Some(MAC) },
        NdpMessage::RouterSolicitation { source_mac: None },
        router(0),
        full,
        solicitation(Some(MAC), None),
        solicitation(None, Some([1, 2, 3, 4, 5, 6])),
        advertisement(true),
        advertisement(false),
    ] {
        let bytes = emitted(&message);
        assert_eq!(NdpMessage::parse(&bytes, HOST, PEER, 255), Ok(message));
        for len in 0..bytes.len() {
            // A message truncated between two options is valid.
            if len < 8 || !(len - 8).is_multiple_of(8) {
                assert_eq!(
                    NdpMessage::parse(&bytes[..len], HOST, PEER, 255),
                    Err(WireError::Truncated),
                    "{len}"
                );
            }
        }
    }
}

#[test]
fn messages_from_beyond_the_link_are_rejected() {
    for message in [router(1), solicitation(Some(MAC), None), advertisement(true)] {
        let mut bytes = emitted(&message);
        assert_eq!(NdpMessage::parse(&bytes, HOST, PEER, 254), Err(WireError::BadValue));
        bytes[1] = 1;
        assert_eq!(NdpMessage::parse(&bytes, HOST, PEER, 255), Err(WireError::BadValue), "code");
    }
    let global = "2001:db8::1".parse().unwrap();
    assert_eq!(NdpMessage::parse(&emitted(&router(1)), global, PEER, 255), Err(WireError::BadValue));
}

#[test]
fn unspecified_source_only_detects_duplicates() {
    let none = Ipv6Addr::UNSPECIFIED;
    let group = solicited_node(PEER);
    let parse = |message: &NdpMessage, dst| NdpMessage::parse(&emitted(message), none, dst, 255);
    assert_eq!(parse(&solicitation(None, None), group), Ok(solicitation(None, None)));
    assert_eq!(parse(&solicitation(None, None), PEER), Err(WireError::BadValue));
    assert_eq!(parse(&solicitation(Some(MAC), None), group), Err(WireError::BadValue));
    let announced = NdpMessage::RouterSolicitation { source_mac: Some(MAC) };
    assert_eq!(parse(&announced, ALL_NODES), Err(WireError::BadValue));
}

#[test]
fn multicast_targets_are_rejected() {
    let mut bytes = emitted(&solicitation(Some(MAC), None));
    bytes[8] = 0xff;
    assert_eq!(NdpMessage::parse(&bytes, HOST, PEER, 255), Err(WireError::BadValue));
    let bytes = emitted(&advertisement(true));
    assert_eq!(NdpMessage::parse(&bytes, PEER, ALL_NODES, 255), Err(WireError::BadValue));
    let bytes = emitted(&advertisement(false));
    assert_eq!(NdpMessage::parse(&bytes, PEER, ALL_NODES, 255), Ok(advertisement(false)));
}

#[test]
fn zero_length_option_invalidates_the_message() {
    let mut bytes = emitted(&solicitation(Some(MAC), None));
    bytes[25] = 0;
    assert_eq!(NdpMessage::parse(&bytes, HOST, PEER, 255), Err(WireError::BadLength));
    bytes[25] = 2;
    assert_eq!(NdpMessage::parse(&bytes, HOST, PEER, 255), Err(WireError::Truncated));
    bytes[24..26].copy_from_slice(&[200, 1]);
    assert_eq!(NdpMessage::parse(&bytes, HOST, PEER, 255), Ok(solicitation(None, None)));
    bytes.extend([0; 8]);
    bytes[24..26].copy_from_slice(&[SOURCE_LINK_LAYER_ADDRESS, 2]);
    assert_eq!(
        NdpMessage::parse(&bytes, HOST, PEER, 255),
        Ok(solicitation(None, None)),
        "unexpected option length"
    );
}

#[test]
fn excess_and_invalid_prefixes_are_skipped() {
    let mut bytes = emitted(&router(PREFIXES_MAX as u16));
    let mut excess = bytes[bytes.len() - 32..].to_vec();
    excess[16 + 5] ^= 0x80;
    bytes.extend(&excess);
    let Ok(NdpMessage::RouterAdvertisement(read)) = NdpMessage::parse(&bytes, HOST, PEER, 255) else {
        panic!("refused")
    };
    assert_eq!(read.prefixes.len(), PREFIXES_MAX);
    assert_eq!(read.prefixes.last(), Some(&prefix(PREFIXES_MAX as u16 - 1)));
    bytes[32 + 2] = 129;
    let Ok(NdpMessage::RouterAdvertisement(read)) = NdpMessage::parse(&bytes, HOST, PEER, 255) else {
        panic!("refused")
    };
    assert_eq!(read.prefixes[0], prefix(1));
}

#[test]
fn redirects_are_rejected() {
    let mut bytes = [0; 40];
    bytes[0] = REDIRECT;
    assert_eq!(NdpMessage::parse(&bytes, HOST, PEER, 255), Err(WireError::Unsupported));
}
