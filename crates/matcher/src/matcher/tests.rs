use super::{Matcher, RULES_MAX, TooManyRules};
use crate::expression::tests::{compile, frame};
use crate::packet::Packet;
use crate::payload::PayloadTest;
use crate::rule::{Condition, Protocol, Rule, Side};
use proptest::prelude::*;

fn rule<A>(action: A, conditions: Vec<Condition>) -> Rule<A> {
    Rule { conditions, action }
}

fn port(side: Side, ports: &str) -> Condition {
    Condition::Port(side, ports.parse().unwrap())
}

fn payload(offset: u16, value: u8, mask: u8) -> Condition {
    Condition::Payload(PayloadTest::new(offset, &[value], Some(&[mask])).unwrap())
}

fn datagram(from: u16, to: u16, payload: &[u8]) -> Vec<u8> {
    let builder = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
    let mut bytes = Vec::new();
    builder.udp(from, to).write(&mut bytes, payload).unwrap();
    bytes
}

#[test]
fn first_rule_that_matches_wins() {
    let rules = vec![
        rule("request", vec![port(Side::Destination, "80"), payload(0, 1, 0xff)]),
        rule("web", vec![port(Side::Either, "80,8000-8010")]),
        rule("flagged", vec![payload(1, 0x40, 0xf0)]),
        rule("udp", vec![Condition::Protocol(Protocol::Udp), Condition::PayloadBytes(3..=5)]),
    ];
    let mut matcher = Matcher::new(rules, 16).unwrap();
    // Twice: by evaluation, and by the cache.
    for _ in 0..2 {
        let mut find =
            |from, to, payload: &[u8]| matcher.find(&Packet::parse(&datagram(from, to, payload))).copied();
        assert_eq!(find(1000, 80, &[1, 0x41]), Some("request"));
        assert_eq!(find(1000, 80, &[2, 0x41]), Some("web"));
        assert_eq!(find(1000, 80, &[]), Some("web"));
        assert_eq!(find(8005, 1000, &[1, 0x41]), Some("web"));
        assert_eq!(find(1000, 81, &[1, 0x41]), Some("flagged"));
        assert_eq!(find(1000, 81, &[1, 0x51, 1]), Some("udp"));
        assert_eq!(find(1000, 81, &[1, 0x51]), None);
        assert_eq!(find(1000, 81, &[0; 6]), None);
    }
}

#[test]
fn rule_without_conditions_matches_everything() {
    let mut matcher = Matcher::new(vec![rule((), vec![])], 16).unwrap();
    assert!(matcher.find(&Packet::parse(&[])).is_some());
    assert!(matcher.find(&Packet::parse(&datagram(1, 2, &[]))).is_some());
    let mut empty = Matcher::<()>::new(Vec::new(), 16).unwrap();
    assert!(empty.find(&Packet::parse(&datagram(1, 2, &[]))).is_none());
}

#[test]
fn fragments_match_by_the_fields_that_they_have() {
    let conditions = [
        vec![Condition::Address(Side::Source, vec!["10.0.0.0/30".parse().unwrap()])],
        vec![Condition::Protocol(Protocol::Udp)],
        vec![Condition::Dscp(vec![0, 46])],
        vec![port(Side::Destination, "80")],
        vec![payload(0, 7, 0xff)],
        vec![Condition::PayloadBytes(0..=65_535)],
    ];
    let matches = |bytes: &[u8]| {
        conditions.clone().map(|conditions| rule((), conditions).matches(&Packet::parse(bytes)))
    };
    let mut bytes = datagram(1000, 80, &[7, 8]);
    assert_eq!(matches(&bytes), [true; 6]);
    bytes[20] = 0x20;
    assert_eq!(matches(&bytes), [true, true, true, true, true, false], "the first fragment");
    bytes[21] = 1;
    assert_eq!(matches(&bytes), [true, true, true, false, false, false], "the last fragment");
    bytes[15] = 46 << 2;
    assert!(matches(&bytes)[2]);
    bytes[15] = 45 << 2;
    assert!(!matches(&bytes)[2]);
}

// limit: rules of a matcher
#[test]
fn rules_are_limited() {
    let rules = |count: usize| -> Vec<Rule<usize>> {
        (0..count).map(|index| rule(index, vec![port(Side::Source, &index.to_string())])).collect()
    };
    let mut matcher = Matcher::new(rules(RULES_MAX), 16).unwrap();
    for (from, expected) in [(0, Some(0)), (63, Some(63)), (64, None)] {
        assert_eq!(matcher.find(&Packet::parse(&datagram(from, 1, &[]))).copied(), expected);
    }
    assert_eq!(Matcher::new(rules(RULES_MAX + 1), 16).unwrap_err(), TooManyRules(65));
    assert_eq!(TooManyRules(65).to_string(), "65 rules, at most 64 are possible");
}

/// All bits of the set of rules that depend on the packet.
#[test]
fn last_of_the_most_rules_may_look_at_the_payload() {
    let rules = (0..64).map(|value| rule(value, vec![payload(0, value, 0xff)])).collect();
    let mut matcher = Matcher::new(rules, 16).unwrap();
    for value in [63, 0, 31, 64, 63] {
        let expected = (value < 64).then_some(value);
        assert_eq!(matcher.find(&Packet::parse(&datagram(1, 2, &[value]))).copied(), expected);
    }
}

// limit: priority.flow_cache_entries
#[test]
fn full_flow_cache_replaces_flows_and_counts_them() {
    let mut matcher = Matcher::new(vec![rule(7, vec![port(Side::Destination, "80")])], 16).unwrap();
    for round in 0..2 {
        for from in 0..1000 {
            let port = 80 + from % 2;
            let found = matcher.find(&Packet::parse(&datagram(from, port, &[]))).copied();
            assert_eq!(found, (port == 80).then_some(7));
        }
        assert!((1000 * (round + 1) - 16..1000 * (round + 1)).contains(&matcher.flows_replaced()));
    }
    // One flow is not replaced by itself.
    let before = matcher.flows_replaced();
    for _ in 0..10 {
        matcher.find(&Packet::parse(&datagram(999, 81, &[])));
    }
    assert_eq!(matcher.flows_replaced(), before);
}

const EXPRESSIONS: [&str; 8] = [
    "tcp[((tcp[12]&0xf0)>>2)+2] = 2",
    "udp port 5 and udp[8] = 1",
    "src port 3",
    "ip6 and tcp",
    "vlan and udp dst port 4",
    "ip[6] & 0x40 != 0",
    "len > 60",
    "ether[0] = 4",
];

fn condition() -> impl Strategy<Value = Condition> {
    let side = prop::sample::select(vec![Side::Source, Side::Destination, Side::Either]);
    let networks = ["10.0.0.0/30", "10.0.0.4/30", "fd00::/126", "10.0.0.7", "fd00::1"];
    let network = prop::sample::select(networks.to_vec()).prop_map(|text| text.parse().unwrap());
    prop_oneof![
        (side.clone(), prop::collection::vec(network, 1..3))
            .prop_map(|(side, networks)| Condition::Address(side, networks)),
        (side, 0u16..8, 0u16..3)
            .prop_map(|(side, from, more)| port(side, &format!("{from}-{}", from + more))),
        prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)].prop_map(Condition::Protocol),
        prop_oneof![Just(vec![0]), Just(vec![1, 2, 60])].prop_map(Condition::Dscp),
        (0u32..8, 0u32..20).prop_map(|(from, more)| Condition::PayloadBytes(from..=from + more)),
        (0u16..5, 0u8..8, prop::sample::select(vec![0xffu8, 3, 4, 0])).prop_map(|(at, value, mask)| payload(
            at,
            value & mask,
            mask
        )),
        prop::sample::select(EXPRESSIONS.to_vec()).prop_map(|text| {
            match compile("rules_match_as_without_a_cache", text) {
                Some(expression) => Condition::Expression(expression),
                None => Condition::Protocol(Protocol::Tcp),
            }
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    /// The cache, which is too small for all flows, never changes what is found. All kinds of conditions are
    /// in one list.
    #[test]
    fn rules_match_as_without_a_cache(
        conditions in prop::collection::vec(prop::collection::vec(condition(), 1..3), 0..8),
        frames in prop::collection::vec(frame(), 1..200),
    ) {
        let rules: Vec<Rule<usize>> = conditions.into_iter().enumerate().map(|(index, conditions)| rule(index, conditions)).collect();
        let mut matcher = Matcher::new(rules.clone(), 16).unwrap();
        for frame in frames {
            let packet = Packet::parse(&frame);
            let expected = rules.iter().find(|rule| rule.matches(&packet)).map(|rule| rule.action);
            prop_assert_eq!(matcher.find(&packet).copied(), expected);
        }
    }
}

#[test]
fn rules_match_addresses_and_ports_without_a_packet() {
    let network = |text: &str| vec![text.parse().unwrap()];
    let matches = |conditions: &[Condition], source: &str, destination: &str| {
        let rule = rule((), conditions.to_vec());
        rule.matches_between(source.parse().unwrap(), destination.parse().unwrap())
    };
    let client = [Condition::Address(Side::Source, network("10.1.0.0/16")), port(Side::Destination, "80-90")];
    assert!(matches(&client, "10.1.2.3:5", "10.9.0.1:85"));
    assert!(!matches(&client, "10.2.2.3:5", "10.9.0.1:85"));
    assert!(!matches(&client, "10.1.2.3:85", "10.9.0.1:5"));
    let either = [Condition::Address(Side::Either, network("fd00::/8")), Condition::Protocol(Protocol::Tcp)];
    assert!(matches(&either, "[fe80::1]:5", "[fd00::1]:6") && matches(&either, "[fd00::1]:5", "[fe80::1]:6"));
    assert!(!matches(&either, "[fe80::1]:5", "10.9.0.1:6"));
    for more in [Condition::Protocol(Protocol::Udp), Condition::Dscp(vec![0]), payload(0, 0, 0)] {
        assert!(!matches(&[more], "10.1.2.3:5", "10.9.0.1:85"));
    }
    assert!(matches(&[], "10.1.2.3:5", "10.9.0.1:85"));
}
