use super::{Expression, ExpressionError};
use crate::libpcap;
use ginnel_testkit::skip;
use proptest::prelude::*;

/// Compiles an expression; `None` if this machine has no libpcap.
pub(crate) fn compile(test: &str, text: &str) -> Option<Expression> {
    match text.parse() {
        Ok(expression) => Some(expression),
        Err(ExpressionError::LibraryMissing(reason)) => {
            skip(test, &format!("no libpcap: {reason}"));
            None
        }
        Err(error) => panic!("{text}: {error}"),
    }
}

/// A frame with a TCP segment, whose TCP header has an option.
fn segment(payload: &[u8]) -> Vec<u8> {
    let builder = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
    let mut bytes = Vec::new();
    let builder = builder.tcp(1000, 80, 1, 2).options_raw(&[1, 1, 1, 1]).unwrap();
    builder.write(&mut bytes, payload).unwrap();
    bytes
}

#[test]
fn computed_offset_finds_the_payload() {
    let text = "tcp[((tcp[12]&0xf0)>>2)+6]=2";
    let Some(expression) = compile("computed_offset_finds_the_payload", text) else { return };
    assert!(expression.accepts(&segment(&[0, 0, 0, 0, 0, 0, 2])));
    assert!(!expression.accepts(&segment(&[0, 0, 0, 0, 0, 0, 3])));
    assert!(!expression.accepts(&segment(&[0, 0, 0, 0, 0, 0])));
    assert_eq!((expression.text(), expression.to_string().as_str()), (text, text));
}

#[test]
fn wrong_expressions_are_errors() {
    if compile("wrong_expressions_are_errors", "tcp").is_none() {
        return;
    }
    let error = |text: &str| text.parse::<Expression>().unwrap_err().to_string();
    assert_eq!(error(" "), "is empty");
    assert_eq!(error(&" or tcp".repeat(600)), "has 4200 bytes, at most 4096 are possible");
    assert!(error("tcp port").contains("syntax error"), "{}", error("tcp port"));
    assert!(error("tcp[0] = 256 and ip[0] & 0x100 = ").contains("syntax error"));
    assert!(error("net 10.0.0.1/8").contains("non-network bits set"), "{}", error("net 10.0.0.1/8"));
    assert_eq!(error("tcp\0"), "contains a NUL character");
    assert!(error("tcp and udp").contains("rejects all packets"), "{}", error("tcp and udp"));
    // At the limit.
    let longest = format!("{:4096}", "tcp");
    assert!(longest.parse::<Expression>().is_ok());
    assert_eq!(format!("{longest} ").parse::<Expression>(), Err(ExpressionError::TooLong(4097)));
}

/// Expressions with values from `n`.
fn expression() -> impl Strategy<Value = String> {
    let templates = vec![
        "tcp port {}",
        "udp dst port {}",
        "src portrange {}-9",
        "host 10.0.0.{}",
        "src net 10.0.0.0/24",
        "ip6 host fd00::{}",
        "ip[1] & 0xfc = {}",
        "ip[6:2] & 0x4000 != 0",
        "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0",
        "tcp[((tcp[12]&0xf0)>>2)+6] = {}",
        "udp[8:2] > {}",
        "len > {}",
        "vlan and tcp",
        "vlan {} and udp port 5",
        "ip6 proto 6",
        "ether[{}] = 0",
        "ether src 02:02:02:02:02:02",
        "greater {}",
        "ip proto 17",
        "(ip[0] - {}) * 3 / 2 ^ 5 < 100",
        "ip[2:2] % 7 = 1",
        "icmp",
        "arp",
        "ip multicast",
    ];
    let primitive = (prop::sample::select(templates), 0u8..8)
        .prop_map(|(template, n)| template.replace("{}", &n.to_string()));
    let binary = |joined: &'static str| move |(a, b): (String, String)| format!("({a}) {joined} ({b})");
    primitive.prop_recursive(2, 6, 2, move |inner| {
        prop_oneof![
            (inner.clone(), inner.clone()).prop_map(binary("or")),
            (inner.clone(), inner.clone()).prop_map(binary("and")),
            inner.prop_map(|a| format!("not ({a})")),
        ]
    })
}

/// Frames that the expressions are about, of which some bytes are random.
pub(crate) fn frame() -> impl Strategy<Value = Vec<u8>> {
    let fields =
        (any::<bool>(), any::<bool>(), 0u8..8, 0u16..8, 0u16..8, prop::option::of(0u16..8), any::<bool>());
    let random = (
        prop::collection::vec(0u8..8, 0..30),
        prop::collection::vec((0usize..80, any::<u8>()), 0..2),
        0usize..120,
    );
    (fields, random).prop_map(|((ipv4, tcp, host, from, to, tag, fragmentable), (payload, changes, cut))| {
        let ethernet = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]);
        let (mut source, mut destination) = ([0; 16], [0; 16]);
        (source[0], source[15], destination[0], destination[15]) = (0xfd, host, 0xfd, 7 - host);
        let tag = tag.and_then(|id| etherparse::VlanId::try_new(id).ok());
        let ip = match (tag, ipv4) {
            (Some(id), true) => ethernet.single_vlan(id).ipv4([10, 0, 0, host], [10, 0, 0, 7 - host], 64),
            (Some(id), false) => ethernet.single_vlan(id).ipv6(source, destination, 64),
            (None, true) => ethernet.ipv4([10, 0, 0, host], [10, 0, 0, 7 - host], 64),
            (None, false) => ethernet.ipv6(source, destination, 64),
        };
        let mut bytes = Vec::new();
        if tcp {
            ip.tcp(from, to, 1, 2).write(&mut bytes, &payload).unwrap();
        } else {
            ip.udp(from, to).write(&mut bytes, &payload).unwrap();
        }
        if ipv4 && fragmentable {
            let at = if tag.is_some() { 24 } else { 20 };
            bytes[at] &= !0x40;
        }
        for (at, value) in changes {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        if cut > 60 {
            bytes.truncate(cut);
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn expressions_accept_what_libpcap_accepts(text in expression(), frames in prop::collection::vec(frame(), 1..30)) {
        match libpcap::offline_filter(&text, &frames) {
            Ok(expected) => {
                let expression: Expression = text.parse().unwrap();
                let accepted: Vec<bool> = frames.iter().map(|frame| expression.accepts(frame)).collect();
                prop_assert_eq!(accepted, expected);
            }
            Err(ExpressionError::LibraryMissing(reason)) => skip("expressions_accept_what_libpcap_accepts", &reason),
            // libpcap refuses the expression, for example because no frame satisfies it: so does the parser.
            Err(error) => prop_assert_eq!(text.parse::<Expression>(), Err(error)),
        }
    }
}
