//! Rules and functions give frames their priorities, by which one burst is processed.

use super::labels::{Echo, RequestClient};
use super::{Fixture, START, stack_config};
use crate::classifier::FrameDirection;
use crate::config::{Config, PriorityConfig};
use crate::shards::Shards;
use core::time::Duration;
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use ginnel_matcher::Packet;

/// Bytes of a request: one segment, or a super-frame.
const SHORT: usize = 10;
const LONG: usize = 4000;

fn priority(rules: &str) -> PriorityConfig {
    Config::from_toml("x.toml", rules).unwrap().priority
}

/// Opens 30 connections that send in one turn: each sends its number, repeated `bytes` times.
fn one_burst(
    shards: Shards,
    device: &MemoryConfig,
    count: usize,
    bytes: usize,
) -> Fixture<Echo, RequestClient> {
    let (far, queues) = multi_queue(device, count, RssMode::Fixed(0));
    let shards = shards.device("cable", queues).seed([1; 32]).now(START).open().unwrap();
    let shards = shards.build(|_| Ok(Echo::default())).unwrap();
    let mut fixture = Fixture::with_devices((shards, far), RequestClient::default());
    fixture.advance(Duration::from_secs(5));
    fixture.client.with(fixture.now, |client, cx| client.open(cx, 30));
    assert!(fixture.run_until(Duration::from_secs(1), |_, client| client.connected == 30));
    fixture.advance(Duration::from_millis(100));
    let before = fixture.sum(|s| s.bursts.iter().sum());
    fixture.client.with(fixture.now, |client, cx| {
        for (number, conn) in client.conns.iter().enumerate() {
            assert_eq!(cx.send(*conn, &vec![number as u8; bytes]), Ok(bytes));
        }
    });
    let now = fixture.now;
    fixture.client.poll_once(now).unwrap();
    fixture.shards[0].poll_once(now).unwrap();
    assert_eq!(fixture.sum(|s| s.bursts.iter().sum()), before + 1, "the frames must arrive in one burst");
    fixture.advance(Duration::from_millis(100));
    fixture
}

/// As [`one_burst`], with rules. Returns the first bytes in the order in which the shard that owns connection
/// 29 received them, and in which the client received the answers.
fn with_rules(device: &MemoryConfig, count: u32, bytes: usize, rules: &str) -> (Vec<u8>, Vec<u8>) {
    let mut config = stack_config(count);
    config.priority = priority(rules);
    let fixture = one_burst(Shards::new(config), device, count as usize, bytes);
    let last = fixture.shards.iter().find(|shard| shard.handler().got.contains(&29)).unwrap();
    let mut got = last.handler().got.clone();
    got.dedup();
    (got, fixture.client.handler().got.clone())
}

/// The label of a frame travels with it to another shard.
#[test]
fn frames_that_match_a_payload_rule_are_processed_first() {
    // Frames of this device have no labels, as those of TAP and AF_XDP have none.
    let device = MemoryConfig::default();
    for (count, bytes) in [(1, SHORT), (3, SHORT), (1, LONG), (3, LONG)] {
        let rules = |priority: u8, value: &str| {
            format!(
                "[[priority.rules]]\npriority = {priority}\ndestination_ports = 80\npayload = {{ value = \"{value}\" }}\n"
            )
        };
        let (got, _) = with_rules(&device, count, bytes, &rules(6, "fe"));
        assert!(got.is_sorted() && got.last() == Some(&29), "in order of arrival: {got:?}");
        let (got, answered) = with_rules(&device, count, bytes, &rules(6, "1d"));
        assert!(got[0] == 29 && got[1..].is_sorted(), "{count} {bytes}: {got:?}");
        if (count, bytes) == (1, SHORT) {
            assert_eq!(answered[0], 29);
        }
        let (got, _) = with_rules(&device, count, bytes, &rules(1, "1d"));
        assert!(got.is_sorted() && got.last() == Some(&29), "background comes last: {got:?}");
    }
}

/// Connection 29 uses IPv6, as every third one does.
#[test]
fn header_rules_apply_in_their_order() {
    let rules = "[[priority.rules]]\npriority = 0\npayload = { value = \"1a\" }\n\
                 [[priority.rules]]\npriority = 5\nsource = [\"fd00::/64\"]\nprotocol = \"tcp\"\n";
    let (got, _) = with_rules(&MemoryConfig::default(), 1, SHORT, rules);
    let (first, rest) = got.split_at(9);
    assert!(first.iter().all(|number| number % 3 == 2 && *number != 26) && first.is_sorted(), "{got:?}");
    assert!(rest.contains(&26) && rest.is_sorted(), "{got:?}");
}

#[test]
fn sent_frames_that_match_a_rule_are_received_first() {
    let device = MemoryConfig { labels: true, ..MemoryConfig::default() };
    let rules = "[[priority.rules]]\npriority = 6\nsource_ports = 80\npayload = { value = \"1d\" }\n";
    let (got, answered) = with_rules(&device, 1, SHORT, rules);
    assert!(got.is_sorted(), "the requests are not sent from port 80: {got:?}");
    assert!(answered[0] == 29 && answered[1..].is_sorted(), "{answered:?}");
    let (_, answered) = with_rules(&device, 1, SHORT, &rules.replace("1d", "fe"));
    assert!(answered.is_sorted(), "{answered:?}");
}

#[test]
fn function_decides_after_the_rules() {
    for count in [1, 3] {
        let mut config = stack_config(count);
        config.priority = priority("[[priority.rules]]\npriority = 5\npayload = { value = \"1c\" }\n");
        let shards = Shards::new(config).priority_function(|direction| {
            move |packet: &Packet<'_>, usual: u8| match packet.payload() {
                Some([29, ..]) if direction == FrameDirection::Receive => 6,
                Some([27, ..]) if direction == FrameDirection::Receive => {
                    assert_eq!(usual, 0);
                    8
                }
                Some([28, ..]) if direction == FrameDirection::Receive => {
                    assert_eq!(usual, 5);
                    255
                }
                _ => usual,
            }
        });
        let fixture = one_burst(shards, &MemoryConfig::default(), count as usize, SHORT);
        let owned = |number: u8| fixture.shards.iter().find(|shard| shard.handler().got.contains(&number));
        let got = &owned(29).unwrap().handler().got;
        assert_eq!(got[0], 29, "{got:?}");
        let got = &owned(28).unwrap().handler().got;
        assert_eq!(got[usize::from(got[0] == 29)], 28, "the priority of the rule: {got:?}");
        let got = &owned(27).unwrap().handler().got;
        assert_eq!(got[got.len() - 1], 27, "the usual priority: {got:?}");
        assert_eq!(fixture.sum(|s| s.priorities_invalid), 2);
    }
}
