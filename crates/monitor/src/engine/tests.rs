use super::*;
use crate::frame::FIN;
use crate::rules::ProtocolName;
use crate::scripted::{Side, segment, segment_of};
use proptest::prelude::*;

const PSH_ACK: u8 = ACK | 8;

/// A conversation of one client with the server, at simulated times.
struct Conversation {
    engine: Engine,
    /// Sequence numbers of the next bytes of client and server.
    next: [u32; 2],
    now: Instant,
}

fn index(side: Side) -> usize {
    match side {
        Side::Client => 0,
        Side::Server => 1,
    }
}

impl Conversation {
    fn new(protocol: ProtocolName, first: [u32; 2]) -> Self {
        let config = EngineConfig::new(vec![PortRule::new(protocol, vec![80])]);
        let engine = Engine::new(&config).unwrap();
        Self { engine, next: first, now: Instant::from_millis(1000) }
    }

    /// Starts with a handshake.
    fn opened(protocol: ProtocolName, isn: [u32; 2]) -> Self {
        let mut c = Self::new(protocol, isn);
        c.open();
        c
    }

    fn open(&mut self) {
        self.frame(&segment(Side::Client, self.next[0], 0, SYN, &[]));
        self.next[0] = self.next[0].wrapping_add(1);
        self.frame(&segment(Side::Server, self.next[1], self.next[0], SYN | ACK, &[]));
        self.next[1] = self.next[1].wrapping_add(1);
        self.send(Side::Client, &[], ACK);
    }

    fn frame(&mut self, frame: &[u8]) {
        self.engine.process(self.now, LinkType::Ethernet, frame);
    }

    fn wait_us(&mut self, us: u64) {
        self.now += Duration::from_micros(us);
    }

    /// Builds the next segment of a side without showing it to the engine.
    fn build(&mut self, side: Side, payload: &[u8], flags: u8) -> Vec<u8> {
        let (own, other) = (index(side), 1 - index(side));
        let frame = segment(side, self.next[own], self.next[other], flags, payload);
        let len = payload.len() as u32 + u32::from(flags & FIN != 0);
        self.next[own] = self.next[own].wrapping_add(len);
        frame
    }

    fn send(&mut self, side: Side, payload: &[u8], flags: u8) {
        let frame = self.build(side, payload, flags);
        self.frame(&frame);
    }

    fn request(&mut self, payload: &[u8]) {
        self.send(Side::Client, payload, PSH_ACK);
    }

    fn respond(&mut self, payload: &[u8]) {
        self.send(Side::Server, payload, PSH_ACK);
    }

    fn counters(&self) -> MonitorCounters {
        *self.engine.counters()
    }

    /// Returns the latencies of low and high priority so far in microseconds: count, least and most.
    fn latencies(&mut self) -> [(u64, u64, u64); 2] {
        let mut latencies = [Distribution::default(), Distribution::default()];
        self.engine.swap_latencies(&mut latencies);
        latencies.map(|distribution| {
            let summary = distribution.summary();
            (summary.count, summary.min_ns / 1000, summary.quantiles_ns[13] / 1000)
        })
    }

    /// Checks that every request is accounted for.
    fn check_sums(&self) {
        let c = self.counters();
        let accounted = c.responses + c.unanswered + c.abandoned + self.engine.outstanding() as u64;
        assert_eq!(c.requests, accounted, "{c:?}");
    }
}

const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab";

fn iot_message(kind: u8, label: u8) -> Vec<u8> {
    let mut message = vec![0; 200];
    (message[5], message[6]) = (kind, label);
    message
}

const ANSWER: &[u8] = ginnel_apps::iot::message::ANSWER_OK;

#[test]
fn a_millisecond_reads_as_a_millisecond() {
    let mut c = Conversation::opened(ProtocolName::Iot, [5, 9]);
    for (label, us) in [(0, 1000), (2, 1000), (0, 3000)] {
        c.request(&iot_message(1, label));
        c.wait_us(us);
        c.respond(ANSWER);
    }
    c.request(&iot_message(0, 0));
    assert_eq!(c.latencies(), [(2, 1000, 3000), (1, 1000, 1000)]);
    let counters = c.counters();
    assert_eq!((counters.requests, counters.requests_high, counters.one_way), (3, 1, 1));
    assert_eq!((counters.responses, counters.responses_high, c.engine.outstanding()), (3, 1, 0));
    assert_eq!(c.engine.matching.streams.in_use(), 0);
}

#[test]
fn time_runs_from_last_to_last_byte() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    for (at, part) in GET.chunks(10).enumerate() {
        c.wait_us(if at > 0 { 100 } else { 0 });
        c.request(part);
    }
    c.wait_us(500);
    c.respond(&OK[..30]);
    c.wait_us(70);
    c.respond(&OK[30..]);
    assert_eq!(c.latencies()[0], (1, 570, 570));
    assert_eq!(c.engine.matching.streams.in_use(), 0);
}

#[test]
fn pipelined_requests_are_matched_in_order() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(&GET.repeat(2));
    c.wait_us(100);
    c.request(GET);
    c.wait_us(100);
    c.respond(OK);
    c.wait_us(100);
    c.respond(&OK.repeat(2));
    // 200, 300 and 200 µs.
    assert_eq!(c.latencies()[0], (3, 200, 300));
}

#[test]
fn sequence_numbers_wrap() {
    let isn = u32::MAX - 30;
    let mut c = Conversation::opened(ProtocolName::Http, [isn, isn]);
    for _ in 0..5 {
        c.request(GET);
        c.wait_us(1000);
        c.respond(OK);
    }
    assert!(c.next[0] < 1000 && c.next[1] < 1000);
    assert_eq!(c.latencies()[0], (5, 1000, 1000));
    assert_eq!((c.counters().framing_lost, c.counters().early_segments), (0, 0));
}

#[test]
fn retransmissions_are_counted_and_not_measured() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    let request = c.build(Side::Client, GET, PSH_ACK);
    c.frame(&request);
    c.wait_us(400);
    c.frame(&request);
    c.wait_us(600);
    let response = c.build(Side::Server, OK, PSH_ACK);
    c.frame(&response);
    c.wait_us(900);
    c.frame(&response);
    c.frame(&response);
    assert_eq!(c.latencies()[0], (1, 1000, 1000));
    let counters = c.counters();
    assert_eq!((counters.request_retransmissions, counters.response_retransmissions), (1, 2));
    assert_eq!((counters.requests, counters.responses, counters.responses_unmatched), (1, 1, 0));
}

#[test]
fn a_retransmission_may_have_new_bytes() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    let first = c.build(Side::Client, &GET[..10], PSH_ACK);
    c.frame(&first);
    c.next[0] = c.next[0].wrapping_sub(10);
    c.request(GET);
    c.wait_us(300);
    c.respond(OK);
    assert_eq!(c.latencies()[0], (1, 300, 300));
    assert_eq!(c.counters().request_retransmissions, 1);
}

#[test]
fn keepalive_probes_are_no_retransmissions() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(GET);
    c.respond(OK);
    for probe in [&b""[..], b"\0"] {
        c.frame(&segment(Side::Client, c.next[0].wrapping_sub(1), c.next[1], ACK, probe));
    }
    let counters = c.counters();
    assert_eq!((counters.request_retransmissions, counters.framing_lost), (0, 0));
}

#[test]
fn early_segments_wait_for_earlier_ones() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    let parts: Vec<_> = GET.chunks(7).map(|part| part.to_vec()).collect();
    let frames: Vec<_> = parts.iter().map(|part| c.build(Side::Client, part, PSH_ACK)).collect();
    for frame in frames.iter().rev() {
        c.wait_us(10);
        c.frame(frame);
    }
    assert_eq!((c.counters().requests, c.counters().early_segments), (1, frames.len() as u64 - 1));
    c.wait_us(250);
    c.respond(OK);
    assert_eq!(c.latencies()[0], (1, 250, 250));
    assert_eq!(c.engine.matching.streams.in_use(), 0);
}

#[test]
fn missed_bytes_in_a_body_do_no_harm() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(GET);
    c.wait_us(100);
    c.respond(b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n");
    c.respond(&[b'x'; 1000]);
    c.build(Side::Server, &[b'x'; 1000], PSH_ACK);
    c.respond(&[b'x'; 1000]);
    assert_eq!(c.counters().responses, 0);
    c.wait_us(100);
    c.send(Side::Client, &[], ACK);
    assert_eq!(c.latencies()[0], (1, 100, 100));
    assert_eq!((c.counters().missed_bytes, c.counters().framing_lost), (1000, 0));
}

/// The copy of a request is lost, and the next one is seen before the response that acknowledges both.
#[test]
fn request_after_a_lost_one_counts_from_its_arrival() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(GET);
    c.respond(OK);
    c.build(Side::Client, GET, PSH_ACK);
    c.respond(OK);
    c.wait_us(300);
    c.request(GET);
    c.wait_us(70);
    c.respond(OK);
    c.check_sums();
    assert_eq!(c.latencies()[0].2, 70, "{:?}", c.counters());
}

#[test]
fn lost_framing_is_found_again() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(GET);
    c.build(Side::Client, GET, PSH_ACK);
    c.request(GET);
    // The server has received the second request, which the monitor has not.
    c.send(Side::Server, &[], ACK);
    assert_eq!((c.counters().framing_lost, c.counters().abandoned), (1, 1));
    c.respond(&OK.repeat(2));
    c.wait_us(700);
    c.request(GET);
    c.wait_us(50);
    c.respond(OK);
    c.check_sums();
    assert!(c.counters().responses_unmatched >= 1 && c.counters().responses >= 1, "{:?}", c.counters());
    assert_eq!(c.counters().connections_given_up, 0);
}

#[test]
fn nonsense_is_given_up_and_new_connections_are_not() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    for _ in 0..100 {
        c.request(&[0xff; 50]);
        c.respond(&[0xfe; 50]);
    }
    assert_eq!((c.counters().connections_given_up, c.counters().requests), (1, 0));
    c.next = [7_000_000, 8_000_000];
    c.open();
    c.request(GET);
    c.wait_us(1000);
    c.respond(OK);
    assert_eq!(c.latencies()[0], (1, 1000, 1000));
}

#[test]
fn connections_may_be_seen_from_their_middle_on() {
    let mut c = Conversation::new(ProtocolName::Http, [u32::MAX - 3, 77]);
    // The end of a body, and the end of a response.
    c.request(b"end of a body");
    c.respond(b"rest of a page");
    c.request(GET);
    c.wait_us(1000);
    c.respond(OK);
    assert_eq!(c.latencies()[0], (1, 1000, 1000));
    assert_eq!((c.counters().connections_midstream, c.counters().segments_skipped), (1, 2));
}

#[test]
fn a_response_to_an_unseen_request_is_not_matched() {
    let mut c = Conversation::new(ProtocolName::Http, [5, 9]);
    // An earlier request is outstanding; its response is sent before the seen one arrives.
    let response = c.build(Side::Server, OK, PSH_ACK);
    c.request(GET);
    c.frame(&response);
    assert_eq!((c.counters().responses, c.counters().responses_unmatched), (0, 1));
    c.wait_us(1000);
    c.respond(OK);
    assert_eq!(c.latencies()[0], (1, 1000, 1000));
}

#[test]
fn requests_without_response_are_counted_at_the_end() {
    for (flags, sides) in [(RST, 1), (FIN | ACK, 1), (SYN, 0), (0, 0)] {
        let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
        c.request(&GET.repeat(3));
        c.respond(OK);
        assert_eq!((c.engine.outstanding(), c.counters().unanswered), (2, 0));
        match (flags, sides) {
            (SYN, _) => {
                c.next = [90_000, 80_000];
                c.open();
            }
            (0, _) => c.engine.finish(),
            (flags, _) => c.send(Side::Server, &[], flags),
        }
        assert_eq!((c.engine.outstanding(), c.counters().unanswered), (0, 2), "{flags:#x}");
        c.check_sums();
    }
}

#[test]
fn closed_connections_are_removed() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(GET);
    c.send(Side::Client, &[], FIN | ACK);
    c.wait_us(1000);
    c.respond(OK);
    let fin = c.build(Side::Server, &[], FIN | ACK);
    c.frame(&fin);
    assert_eq!(c.engine.connections(), 1, "the server's FIN may be lost");
    c.frame(&fin);
    c.send(Side::Client, &[], ACK);
    assert_eq!((c.engine.connections(), c.counters().connections_ended), (0, 1));
    c.frame(&fin);
    c.send(Side::Client, &[], ACK);
    assert_eq!((c.engine.connections(), c.counters().stray_packets), (0, 2));
    assert_eq!(c.latencies()[0], (1, 1000, 1000));
}

#[test]
fn a_body_may_end_with_the_connection() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(GET);
    c.respond(b"HTTP/1.0 200 OK\r\n\r\npage");
    c.wait_us(400);
    c.send(Side::Server, b"end", FIN | ACK);
    assert_eq!(c.latencies()[0], (1, 400, 400));
}

#[test]
fn responses_to_head_have_no_body() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(b"HEAD / HTTP/1.1\r\n\r\n");
    c.request(GET);
    c.respond(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n");
    c.respond(OK);
    assert_eq!((c.counters().responses, c.engine.outstanding()), (2, 0));
}

#[test]
fn tunnel_follows_a_successful_connect() {
    let connect = b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n";
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(connect);
    c.respond(b"HTTP/1.1 407 Authenticate\r\nContent-Length: 5\r\n\r\nwhose");
    c.request(connect);
    c.wait_us(300);
    c.respond(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n");
    // No message of HTTP, and one that is none of this connection.
    c.request(b"\x16\x03\x01\x02\x00");
    c.respond(b"\x16\x03\x03\x00\x7a");
    c.request(GET);
    c.respond(OK);
    let counters = c.counters();
    assert_eq!((counters.requests, counters.responses, counters.responses_unmatched), (2, 2, 0));
    assert_eq!((counters.framing_lost, counters.connections_given_up), (0, 1));
    assert_eq!(c.latencies()[0].2, 300);
    c.check_sums();
}

#[test]
fn an_early_response_belongs_to_its_request() {
    let mut c = Conversation::opened(ProtocolName::Http, [5, 9]);
    c.request(b"POST / HTTP/1.1\r\nContent-Length: 2000\r\n\r\n");
    c.request(&[b'x'; 1000]);
    c.wait_us(100);
    c.respond(b"HTTP/1.1 100 Continue\r\n\r\n");
    c.respond(b"HTTP/1.1 413 No\r\nContent-Length: 0\r\n\r\n");
    c.request(&[b'x'; 1000]);
    c.request(GET);
    c.wait_us(300);
    c.respond(OK);
    assert_eq!((c.counters().responses, c.counters().responses_unmatched), (2, 0));
    assert_eq!(c.latencies()[0].2, 300);
}

#[test]
fn cut_captures_are_enough_for_fixed_lengths() {
    let mut c = Conversation::opened(ProtocolName::Iot, [5, 9]);
    for _ in 0..3 {
        let request = c.build(Side::Client, &iot_message(1, 2), PSH_ACK);
        c.frame(&request[..64]);
        c.wait_us(1000);
        let answer = c.build(Side::Server, ANSWER, PSH_ACK);
        c.frame(&answer[..64]);
    }
    assert_eq!(c.latencies()[1], (3, 1000, 1000));
    assert_eq!((c.counters().framing_lost, c.counters().missed_bytes), (0, 0));
}

#[test]
fn answers_out_of_order_are_ambiguous() {
    let mut c = Conversation::opened(ProtocolName::Iot, [5, 9]);
    c.request(&iot_message(1, 0));
    c.request(&iot_message(1, 2));
    c.respond(&ANSWER.repeat(2));
    assert_eq!((c.counters().responses, c.counters().responses_ambiguous), (2, 1));
}

// limit: tracked connections of a monitor
#[test]
fn connections_beyond_the_limit_are_counted() {
    let config = EngineConfig {
        connections_max: 10,
        ..EngineConfig::new(vec![PortRule::new(ProtocolName::Http, vec![80])])
    };
    let mut engine = Engine::new(&config).unwrap();
    for port in 1000..1020 {
        let frame = segment_of(([10, 0, 0, 2], port), Side::Client, 1, 0, SYN, &[]);
        engine.process(Instant::from_millis(1), LinkType::Ethernet, &frame);
    }
    assert_eq!((engine.connections(), engine.counters().untracked_packets), (10, 10));
    // Idle connections make room.
    let later = Instant::ZERO + config.idle_timeout + Duration::from_secs(1);
    for _ in 0..200 {
        let frame = segment_of(([10, 0, 0, 2], 2000), Side::Client, 1, 0, SYN, &[]);
        engine.process(later, LinkType::Ethernet, &frame);
    }
    assert!(engine.counters().connections_idle > 0, "{:?}", engine.counters());
    assert!(engine.v4.all().iter().any(|index| engine.v4.get(*index).key.2[0] == 2000));
}

// limit: outstanding requests of a monitor
#[test]
fn connection_with_too_many_requests_is_given_up() {
    let config = EngineConfig {
        outstanding_max: 5,
        ..EngineConfig::new(vec![PortRule::new(ProtocolName::Http, vec![80])])
    };
    let mut c = Conversation::new(ProtocolName::Http, [5, 9]);
    c.engine = Engine::new(&config).unwrap();
    c.open();
    c.request(&GET.repeat(8));
    assert_eq!((c.counters().connections_given_up, c.engine.outstanding()), (1, 0));
    c.check_sums();
}

// limit: early segments of a monitored stream
// limit: early bytes of a monitor
#[test]
fn early_segments_are_bounded() {
    for early_bytes_max in [0, 3000, 1 << 20] {
        let mut c = Conversation::new(ProtocolName::Http, [5, 9]);
        let config = EngineConfig::new(vec![PortRule::new(ProtocolName::Http, vec![80])]);
        c.engine = Engine::new(&EngineConfig { early_bytes_max, ..config }).unwrap();
        c.open();
        c.request(b"POST / HTTP/1.1\r\nContent-Length: 101000\r\n\r\n");
        c.build(Side::Client, &[0; 1000], PSH_ACK);
        for _ in 0..100 {
            c.request(&[0; 1000]);
        }
        c.wait_us(1000);
        c.respond(OK);
        assert_eq!((c.counters().missed_bytes, c.counters().framing_lost), (1000, 0), "{early_bytes_max}");
        assert_eq!(c.counters().responses, 1);
    }
}

// limit: partial heads of a monitor
#[test]
fn partial_heads_are_bounded() {
    const MAX: usize = 64 << 10;
    let rule = PortRule::new(ProtocolName::Http, vec![80]);
    let config = EngineConfig { head_bytes_max: MAX, ..EngineConfig::new(vec![rule]) };
    let mut engine = Engine::new(&config).unwrap();
    let head = [&b"GET / HTTP/1.1\r\nA: "[..], &[b'x'; 1000]].concat();
    let now = Instant::from_millis(1);
    let send = |engine: &mut Engine, port: u16, seq: u32, flags: u8, payload: &[u8]| {
        let frame = segment_of(([10, 0, 0, 2], port), Side::Client, seq, 1, flags, payload);
        engine.process(now, LinkType::Ethernet, &frame);
        let (counted, allocated) = engine.matching.streams.head_bytes();
        assert!(counted == allocated && counted <= MAX, "{counted} {allocated}");
    };
    for port in 1000..1100 {
        send(&mut engine, port, 0, SYN, &[]);
        send(&mut engine, port, 1, PSH_ACK, &head);
    }
    let dropped = engine.counters().heads_dropped;
    assert!((30..=60).contains(&dropped), "{dropped}");
    assert_eq!(engine.counters().framing_lost, dropped);
    // The heads that were kept are completed, and others find room afterwards.
    for port in 1000..1100 {
        send(&mut engine, port, 1 + head.len() as u32, PSH_ACK, b"\r\n\r\n");
    }
    assert_eq!(engine.counters().requests, 100 - dropped);
    for port in 2000..2050 {
        send(&mut engine, port, 0, SYN, &[]);
        send(&mut engine, port, 1, PSH_ACK, &head);
        send(&mut engine, port, 1 + head.len() as u32, PSH_ACK, b"\r\n\r\n");
    }
    assert_eq!((engine.counters().requests, engine.counters().heads_dropped), (150 - dropped, dropped));
}

#[test]
fn both_ports_may_have_rules() {
    let config =
        EngineConfig::new(vec![PortRule::new(ProtocolName::Http, vec![80, crate::scripted::CLIENT_PORT])]);
    let mut c = Conversation::new(ProtocolName::Http, [5, 9]);
    c.engine = Engine::new(&config).unwrap();
    c.open();
    c.request(GET);
    c.wait_us(1000);
    c.respond(OK);
    assert_eq!((c.engine.connections(), c.latencies()[0]), (1, (1, 1000, 1000)));
}

#[test]
fn a_burst_equals_single_packets() {
    let mut frames = Vec::new();
    for port in 0..100 {
        let client = ([10, 0, 0, 2], 2000 + port % 50);
        frames.push(segment_of(client, Side::Client, 1, 1, PSH_ACK, GET));
        frames.push(segment_of(client, Side::Server, 1, 1 + GET.len() as u32, PSH_ACK, OK));
    }
    let config = EngineConfig::new(vec![PortRule::new(ProtocolName::Http, vec![80])]);
    let [mut single, mut burst] = [0; 2].map(|_| Engine::new(&config).unwrap());
    let timed = || (0u64..).map(Instant::from_millis).zip(frames.iter().map(Vec::as_slice));
    timed().for_each(|(now, frame)| single.process(now, LinkType::Ethernet, frame));
    burst.process_burst(LinkType::Ethernet, timed());
    assert_eq!(single.counters(), burst.counters());
    assert_eq!((burst.counters().responses, burst.counters().response_retransmissions), (50, 50));
}

proptest! {
    /// However segments are cut, delayed, repeated or dropped, each request is accounted for, and no response
    /// is matched twice.
    #[test]
    fn requests_are_accounted_for(
        operations in proptest::collection::vec((0u8..12, 1usize..40, any::<u16>()), 0..80),
        isn in any::<[u32; 2]>(),
        from_start in any::<bool>(),
    ) {
        let mut c = if from_start { Conversation::opened(ProtocolName::Http, isn) } else { Conversation::new(ProtocolName::Http, isn) };
        let mut delayed: Vec<Vec<u8>> = Vec::new();
        for (operation, len, at) in operations {
            c.wait_us(10);
            let side = if at % 2 == 0 { Side::Client } else { Side::Server };
            let text = if at % 2 == 0 { GET } else { OK };
            match operation {
                0..=3 => c.send(side, text, PSH_ACK),
                4..=5 => text.chunks(len).for_each(|part| c.send(side, part, PSH_ACK)),
                6 => { let frame = c.build(side, text, PSH_ACK); delayed.push(frame); }
                7 if !delayed.is_empty() => {
                    let frame = delayed[usize::from(at) % delayed.len()].clone();
                    c.frame(&frame);
                }
                8 => { c.build(side, text, PSH_ACK); }
                9 => c.send(side, &[], [ACK, FIN | ACK, RST, SYN][usize::from(at) % 4]),
                10 => c.send(side, &text[..len.min(text.len())], PSH_ACK),
                _ => c.open(),
            }
            c.check_sums();
        }
        c.engine.finish();
        c.check_sums();
        prop_assert_eq!((c.engine.connections(), c.engine.outstanding(), c.engine.matching.streams.in_use()), (0, 0, 0));
    }
}
