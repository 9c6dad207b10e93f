//! What reading the engine line by line brought to light: each test is named for the behaviour that was missing.

use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::device::{RxBurst, RxFrame};
use ginnel_stack::error::{RecvError, SendError};
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::handle::PortId;
use ginnel_stack::link::neighbour::NeighbourState;
use ginnel_stack::options::{ListenOptions, SocketOptions, TcpOption};
use ginnel_stack::stack::StackConfig;
use ginnel_stack::tcp::config::SynCookies;
use ginnel_stack::tcp::source::Source;
use ginnel_stack::tcp::state::State;
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpOptions, Timestamps};
use ginnel_testkit::scripted_peer::{PORT, STACK, ScriptedPeer, SentSegment};

const ACK: TcpFlags = TcpFlags::ACK;
const SYN: TcpFlags = TcpFlags::SYN;
const FIN: TcpFlags = TcpFlags::FIN;

fn config() -> StackConfig {
    StackConfig::default()
}

fn established(config: StackConfig) -> ScriptedPeer {
    ScriptedPeer::established(config, &TcpOptions { mss: Some(1000), ..TcpOptions::default() })
}

fn closed(p: &ScriptedPeer) -> usize {
    p.events.iter().filter(|e| matches!(e, Event::Closed { .. })).count()
}

#[test]
fn close_while_reading_last_bytes_ends_once() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    p.deliver(ACK, 1, 1, b"last");
    p.deliver(FIN | ACK, 5, 1, &[]);
    p.stack.shutdown_write(conn).unwrap();
    p.flush();
    p.deliver(ACK, 6, 2, &[]);
    assert_eq!(closed(&p), 0, "there is something to read");
    let mut shown = [0; 8];
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(4));
    p.stack.close(conn).unwrap();
    let _ = p.stack.skip(conn, 4);
    p.flush();
    assert_eq!(closed(&p), 1);
    assert_eq!(p.stack.usage().connections, 0);
}

#[test]
fn urgent_last_byte_does_not_delay_the_end() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1, 1, 60_000, 4, b"last");
    p.deliver_frame(&urgent);
    p.deliver(FIN | ACK, 5, 1, &[]);
    p.stack.shutdown_write(conn).unwrap();
    p.flush();
    p.deliver(ACK, 6, 2, &[]);
    let mut shown = [0; 8];
    assert_eq!(p.stack.recv(conn, &mut shown), Ok(3));
    assert_eq!(p.stack.recv(conn, &mut shown), Ok(0));
    p.flush();
    assert_eq!(closed(&p), 1);
}

#[test]
fn urgent_byte_before_fin_is_excluded() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1, 1, 60_000, 3, b"abcd");
    p.deliver_frame(&urgent);
    p.deliver(FIN | ACK, 5, 1, &[]);
    let mut stream = Vec::new();
    let mut shown = [0; 8];
    while let Ok(n @ 1..) = p.stack.recv(conn, &mut shown) {
        stream.extend_from_slice(&shown[..n]);
    }
    assert_eq!(stream, b"abd");
}

#[test]
fn acknowledged_burst_data_has_reserved_memory() {
    let mut tight = config();
    tight.tcp.buffer_pool_bytes = 1 << 16;
    let mut p = established(tight);
    let conn = p.conn.unwrap();
    let bytes = p.segment(ACK, 1, 1, b"must not be lost", &TcpOptions::default());
    let mut burst = RxBurst::new();
    burst.push(RxFrame::new(&bytes));
    p.stack.receive(p.now, PortId(0), &burst);
    while let Some(event) = p.stack.next_event() {
        if let Event::Data { conn, data } = event {
            p.stack.send(conn, &[1; 1 << 17]).unwrap();
            p.stack.consume(conn, data, 0, &burst);
        }
    }
    p.stack.finish_burst(&burst);
    let mut read = [0; 64];
    assert_eq!(p.stack.recv(conn, &mut read), Ok(16));
}

#[test]
fn sender_without_memory_gets_writable_event() {
    let mut tight = config();
    tight.tcp.buffer_pool_bytes = 1 << 16;
    let mut p = established(tight);
    let (first, first_iss) = (p.conn.unwrap(), p.iss);
    p.ports.1 = 40_001;
    let second = p.open(&TcpOptions { mss: Some(1000), ..TcpOptions::default() });
    let taken = p.stack.send(first, &[1; 1 << 17]).unwrap();
    assert_eq!(
        p.stack.send(second, &[2; 1 << 17]),
        Ok(8192),
        "the last quarter of the memory, a little for each"
    );
    assert_eq!(p.stack.send(second, &[2; 100]), Ok(0));
    p.ports.1 = 40_000;
    p.iss = first_iss;
    let of_first = |sent: &[SentSegment]| -> i64 {
        sent.iter().filter(|s| s.header.dst_port == 40_000).map(|s| s.payload.len() as i64).sum()
    };
    let mut at = 1 + of_first(&p.flush());
    for _ in 0..200 {
        at += of_first(&p.deliver(ACK, 1, at, &[]));
    }
    assert_eq!(at, 1 + taken as i64);
    p.wait(Duration::from_secs(1));
    assert!(p.events.contains(&Event::Writable { conn: second }), "{:?}", p.events);
}

struct ConstantSource(u64);

impl Source for ConstantSource {
    fn len(&self) -> u64 {
        self.0
    }

    fn fill(&self, _offset: u64, out: &mut [u8]) {
        out.fill(9);
    }
}

// limit: bytes queued on a connection
#[test]
fn oversized_source_slice_is_invalid() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let source = p.stack.add_source(Box::new(ConstantSource(u64::MAX)));
    assert_eq!(p.stack.send_source(conn, source, 0, (1 << 30) + 1), Err(SendError::InvalidSource));
    p.stack.send(conn, b"x").unwrap();
    assert_eq!(p.stack.send_source(conn, source, 0, u64::MAX), Err(SendError::InvalidSource));
    assert_eq!(p.stack.send_source(conn, source, 0, 1 << 20), Ok(()));
}

fn with_cookies() -> StackConfig {
    let mut config = config();
    config.tcp.syn_cookies = SynCookies::Always;
    config
}

fn listen_with(p: &mut ScriptedPeer, socket: SocketOptions) {
    let addr = SocketAddr::new(STACK.into(), PORT);
    p.stack.listen(addr, ListenOptions { socket, ..ListenOptions::default() }).unwrap();
}

#[test]
fn cookie_offers_window_scale_of_its_listener() {
    let mut p = ScriptedPeer::new(with_cookies());
    listen_with(&mut p, SocketOptions { recv_buffer_bytes: Some(1 << 18), ..SocketOptions::default() });
    let options = TcpOptions {
        mss: Some(1000),
        window_scale: Some(2),
        timestamps: Some(Timestamps { tsval: 5, tsecr: 0 }),
        ..TcpOptions::default()
    };
    let syn = p.segment(SYN, 0, 0, &[], &options);
    let answer = p.deliver_frame(&syn).remove(0);
    let said = answer.options.window_scale.unwrap();
    let echo = answer.options.timestamps.unwrap().tsval;
    let options =
        TcpOptions { timestamps: Some(Timestamps { tsval: 6, tsecr: echo }), ..TcpOptions::default() };
    let ack = p.segment(ACK, 1, 1, &[], &options);
    p.deliver_frame(&ack);
    let info = p.stack.info(p.conn.expect("accepted")).unwrap();
    assert_eq!(info.rcv_wscale, said);
    assert!(info.rcv_wnd >= u32::from(answer.header.window), "the window never shrinks");
}

#[test]
fn cookie_connection_sends_keepalive_probes() {
    let mut cookies = with_cookies();
    cookies.tcp.keepalive_time_seconds = 10;
    let mut p = ScriptedPeer::new(cookies);
    listen_with(&mut p, SocketOptions { keepalive: true, ..SocketOptions::default() });
    p.open(&TcpOptions { mss: Some(1000), ..TcpOptions::default() });
    assert_eq!(p.wait(Duration::from_secs(15)).len(), 1, "a probe");
}

#[test]
fn window_scale_stays_as_in_syn() {
    let mut p = ScriptedPeer::new(config());
    let conn = p.connect();
    let syn_scale = 7;
    assert_eq!(p.stack.info(conn).unwrap().rcv_wscale, syn_scale);
    p.stack.set_option(conn, TcpOption::RecvBuffer(32_768)).unwrap();
    let options = TcpOptions { mss: Some(1000), window_scale: Some(2), ..TcpOptions::default() };
    let answer = p.segment(SYN | ACK, 0, 1, &[], &options);
    p.deliver_frame(&answer);
    assert_eq!(p.stack.state(conn), Some(State::Established));
    assert_eq!(p.stack.info(conn).unwrap().rcv_wscale, syn_scale);
}

#[test]
fn keepalive_probes_are_spread_over_the_user_timeout() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.set_option(conn, TcpOption::KeepAlive(true)).unwrap();
    p.stack.set_option(conn, TcpOption::KeepIdle(Duration::from_secs(1))).unwrap();
    p.stack.set_option(conn, TcpOption::KeepInterval(Duration::from_secs(1))).unwrap();
    p.stack.set_option(conn, TcpOption::UserTimeout(Duration::from_secs(600))).unwrap();
    let probes = p.wait(Duration::from_secs(550)).len();
    assert!((200..=255).contains(&probes), "{probes} probes");
    p.wait(Duration::from_secs(100));
    assert!(matches!(p.events.last(), Some(Event::Closed { reason: CloseReason::TimedOut, .. })));
}

#[test]
fn enabling_keepalive_does_not_prolong_connect() {
    let mut p = ScriptedPeer::new(config());
    let conn = p.connect();
    for _ in 0..300 {
        let _ = p.stack.set_option(conn, TcpOption::KeepAlive(true));
        p.wait(Duration::from_secs(1));
    }
    assert_eq!(closed(&p), 1);
}

#[test]
fn challenge_ack_limit_may_be_unlimited() {
    let mut unlimited = config();
    unlimited.tcp.challenge_acks_per_second = u32::MAX;
    let mut p = established(unlimited);
    for _ in 0..16 {
        assert_eq!(p.deliver(TcpFlags::RST, 100, 0, &[]).len(), 1);
        p.wait(Duration::from_secs(2));
    }
}

#[test]
fn answering_peer_with_zero_window_is_kept() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.send(conn, &[1; 500]).unwrap();
    p.flush();
    for _ in 0..1800 {
        if !p.wait(Duration::from_secs(1)).is_empty() {
            let answer = p.custom_segment(ACK, 1, 1, 0, 0, &[]);
            p.deliver_frame(&answer);
        }
    }
    assert_eq!(p.stack.state(conn), Some(State::Established), "{:?}", p.events);
}

#[test]
fn smaller_mss_applies_to_retransmissions() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.send(conn, &[1; 900]).unwrap();
    p.flush();
    p.stack.set_option(conn, TcpOption::MaxSegment(200)).unwrap();
    let again = p.wait(Duration::from_secs(4));
    assert!(!again.is_empty());
    assert!(again.iter().all(|s| s.payload.len() <= 200), "{:?}", again[0].payload.len());
}

#[test]
fn closed_connection_rejects_options() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let bytes = p.segment(TcpFlags::RST, 1, 0, &[], &TcpOptions::default());
    let mut burst = RxBurst::new();
    burst.push(RxFrame::new(&bytes));
    p.stack.receive(p.now, PortId(0), &burst);
    assert!(p.stack.set_option(conn, TcpOption::UserTimeout(Duration::from_secs(9))).is_err());
}

#[test]
fn retransmitted_syn_ack_gives_no_rtt_sample() {
    let mut p = ScriptedPeer::new(config());
    p.listen();
    p.deliver(SYN, 0, 0, &[]);
    p.wait(Duration::from_millis(900));
    p.deliver(SYN, 0, 0, &[]);
    p.wait(Duration::from_millis(1));
    p.deliver(ACK, 1, 1, &[]);
    let info = p.stack.info(p.conn.unwrap()).unwrap();
    assert_eq!(info.rtt, Duration::ZERO, "it may have been the answer to either (Karn)");
}

#[test]
fn segment_sacked_in_two_steps_counts_as_sacked() {
    let mut p = ScriptedPeer::new(config());
    p.listen();
    let conn = p.open(&TcpOptions { mss: Some(1000), sack_permitted: true, ..TcpOptions::default() });
    p.stack.send(conn, &[1; 4000]).unwrap();
    assert_eq!(p.flush().len(), 4);
    for end in [2500, 3001] {
        let mut options = TcpOptions::default();
        let seq = |n: u32| SeqNumber(p.iss.wrapping_add(n));
        options.sack_blocks.push((seq(1001), seq(end)));
        let sack = p.segment(ACK, 1, 1, &[], &options);
        p.deliver_frame(&sack);
    }
    assert_eq!(p.stack.info(conn).unwrap().sacked, 2);
}

#[test]
fn orphan_at_zero_window_times_out() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let shut = p.custom_segment(ACK, 1, 1, 0, 0, &[]);
    p.deliver_frame(&shut);
    p.stack.send(conn, &[1; 500]).unwrap();
    p.stack.close(conn).unwrap();
    p.flush();
    for _ in 0..7200 {
        if !p.wait(Duration::from_secs(1)).is_empty() {
            let answer = p.custom_segment(ACK, 1, 1, 0, 0, &[]);
            p.deliver_frame(&answer);
        }
    }
    assert_eq!(p.stack.usage().connections, 0);
}

#[test]
fn fin_beyond_the_window_is_sent_later() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let narrow = p.custom_segment(ACK, 1, 1, 500, 0, &[]);
    p.deliver_frame(&narrow);
    p.stack.send(conn, &[1; 500]).unwrap();
    p.stack.close(conn).unwrap();
    let mut sent = p.flush();
    sent.extend(p.deliver(ACK, 1, 501, &[]));
    sent.extend(p.wait(Duration::from_secs(3)));
    assert!(sent.iter().any(|s| s.header.flags.contains(FIN)));
    p.deliver(ACK, 1, 502, &[]);
    assert_eq!(p.stack.state(conn), Some(State::FinWait2));
}

/// What is shown to handlers of the runtime is peeked at and skipped.
#[test]
fn peek_and_skip_exclude_the_urgent_byte() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1, 1, 60_000, 3, b"abcdef");
    p.deliver_frame(&urgent);
    let mut shown = [0; 8];
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(2));
    assert_eq!(&shown[..2], b"ab");
    p.stack.skip(conn, 6).unwrap();
    assert_eq!(p.stack.readable(conn), 4, "nothing is skipped that was not shown");
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(3));
    assert_eq!(&shown[..3], b"def");
    assert_eq!(p.stack.recv_urgent(conn), Ok(b'c'));
    p.stack.skip(conn, 3).unwrap();
    assert_eq!(p.stack.peek(conn, &mut shown), Err(RecvError::WouldBlock));
    assert_eq!(p.stack.urgent_mark(conn), None);
}

#[test]
fn peek_skips_urgent_byte_at_chunk_end() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    p.deliver(ACK, 1, 1, &[1; 1447]);
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1448, 1, 60_000, 601, &[2; 1000]);
    p.deliver_frame(&urgent);
    let mut shown = [0; 4096];
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(2047));
    p.stack.skip(conn, 2047).unwrap();
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(399));
    p.stack.skip(conn, 399).unwrap();
    assert_eq!(p.stack.readable(conn), 0);
}

#[test]
fn data_after_urgent_byte_is_delivered_in_place() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1, 1, 60_000, 3, b"abcdef");
    p.deliver_frame(&urgent);
    assert_eq!(p.read, b"abdef");
    p.events.clear();
    p.deliver(ACK, 7, 1, b"ghi");
    assert!(matches!(p.events[..], [Event::Data { conn: c, .. }] if c == conn), "{:?}", p.events);
    assert_eq!(p.read, b"abdefghi");
}

/// An answer to an invalid segment may be given once in `invalid_ack_interval_ms`, however short the round trip is.
#[test]
fn idle_connection_remembers_challenge_ack_time() {
    let mut p = established(config());
    assert!(p.stack.info(p.conn.unwrap()).unwrap().rto < Duration::from_millis(300));
    p.wait(Duration::from_secs(3));
    assert_eq!(p.stack.usage().active, 0);
    let mut answers = 0;
    for _ in 0..5 {
        answers += p.deliver(TcpFlags::RST, 100, 0, &[]).len();
        answers += p.wait(Duration::from_millis(400)).len();
    }
    assert_eq!(answers, 3, "in two seconds");
    p.wait(Duration::from_secs(2));
    assert_eq!(p.stack.usage().active, 0, "nothing is left of it");
}

/// The clock of connections has 32 bits of milliseconds, which compare by sign for 24.8 days.
#[test]
fn keepalive_enabled_after_idle_month_probes_immediately() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.wait(30 * DAY);
    p.stack.set_option(conn, TcpOption::KeepAlive(true)).unwrap();
    assert_eq!(p.wait(Duration::from_secs(10)).len(), 1);
}

#[test]
fn wrapped_timestamp_after_idle_month_is_accepted() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let mut p = ScriptedPeer::new(config());
    p.listen();
    let now = |value: u32| TcpOptions {
        timestamps: Some(Timestamps { tsval: value, tsecr: 0 }),
        ..TcpOptions::default()
    };
    let syn = p.segment(SYN, 0, 0, &[], &now(1000));
    p.deliver_frame(&syn);
    let ack = p.segment(ACK, 1, 1, &[], &now(1000));
    p.deliver_frame(&ack);
    p.wait(30 * DAY);
    let later = 1000 + 30 * 24 * 3600 * 1000;
    for (seq, value) in [(1, later), (5, later + 1)] {
        let bytes = p.segment(ACK, seq, 1, b"late", &now(value));
        p.deliver_frame(&bytes);
    }
    assert_eq!(p.read, b"latelate");
    // Probes may end the silence, too.
    p.wait(30 * DAY);
    let conn = p.conn.unwrap();
    p.stack.set_option(conn, TcpOption::KeepAlive(true)).unwrap();
    p.wait(Duration::from_secs(1));
    let answer = p.segment(ACK, 9, 1, &[], &now(later.wrapping_add(30 * 24 * 3600 * 1000)));
    p.deliver_frame(&answer);
    let rejected = p.stack.tcp_stats().paws_rejected;
    p.wait(Duration::from_secs(3600));
    assert_eq!((rejected, closed(&p)), (0, 0));
}

/// Peers count as fast as they like (RFC 7323 §4.1), so that a timestamp after a long silence may seem older.
#[test]
fn paws_is_disabled_after_24_idle_days() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let stamped = |value: u32| TcpOptions {
        timestamps: Some(Timestamps { tsval: value, tsecr: 0 }),
        ..TcpOptions::default()
    };
    for days in [1, 23, 25, 40, 49, 50, 55, 60, 74, 75, 99, 100, 120, 300] {
        let mut p = ScriptedPeer::new(config());
        p.listen();
        let syn = p.segment(SYN, 0, 0, &[], &stamped(1000));
        p.deliver_frame(&syn);
        let ack = p.segment(ACK, 1, 1, &[], &stamped(1000));
        p.deliver_frame(&ack);
        assert!(p.wait(days * DAY).is_empty(), "nothing leaves meanwhile");
        let late = p.segment(ACK, 1, 1, b"late", &stamped(500));
        p.deliver_frame(&late);
        let expected: &[u8] = if days < 24 { b"" } else { b"late" };
        assert_eq!(p.read, expected, "after {days} days");
        // From then on it is a measure again.
        let older = p.segment(ACK, 5, 1, b"older", &stamped(499));
        p.deliver_frame(&older);
        assert_eq!(p.read, expected, "after {days} days");
        // Until the next silence. (What was refused did not end the first.)
        p.wait(days.max(24) * DAY + DAY);
        let late = p.segment(ACK, 1 + p.read.len() as i64, 1, b"late", &stamped(400));
        p.deliver_frame(&late);
        assert_eq!(p.read, [expected, b"late"].concat(), "after {days} days twice");
    }
}

/// The timer that watches the age of a timestamp is further away than any other, and must not keep others from being set.
#[test]
fn loss_after_long_silence_is_retransmitted() {
    for hours in [1, 20, 30, 36, 37, 50, 66, 80, 110, 1000] {
        let mut p = ScriptedPeer::new(config());
        p.listen();
        let stamped =
            TcpOptions { timestamps: Some(Timestamps { tsval: 1000, tsecr: 0 }), ..TcpOptions::default() };
        let syn = p.segment(SYN, 0, 0, &[], &stamped);
        p.deliver_frame(&syn);
        let ack = p.segment(ACK, 1, 1, &[], &stamped);
        p.deliver_frame(&ack);
        let conn = p.conn.expect("it was accepted");
        p.stack.send(conn, b"once").unwrap();
        assert_eq!(p.flush().len(), 1);
        let ack = p.segment(ACK, 1, 5, &[], &stamped);
        p.deliver_frame(&ack);
        assert!(p.wait(hours * Duration::from_secs(3600)).is_empty(), "nothing leaves meanwhile");
        p.stack.send(conn, b"lost").unwrap();
        assert_eq!(p.flush().len(), 1, "after {hours} hours");
        assert!(!p.wait(Duration::from_secs(10)).is_empty(), "sent again after {hours} hours");
    }
}

#[test]
fn urgent_mark_counts_bytes_in_the_burst() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let bytes = p.segment(ACK, 1, 1, b"abc", &TcpOptions::default());
    let announced = p.custom_segment(ACK | TcpFlags::URG, 4, 1, 60_000, 1, &[]);
    let mut burst = RxBurst::new();
    for bytes in [&bytes, &announced] {
        burst.push(RxFrame::new(bytes));
    }
    p.stack.receive(p.now, PortId(0), &burst);
    assert_eq!(p.stack.urgent_mark(conn).map(|mark| mark.ahead), Some(3));
    p.stack.finish_burst(&burst);
    assert_eq!(p.stack.urgent_mark(conn).map(|mark| mark.ahead), Some(3));
}

#[test]
fn ack_of_unsent_data_confirms_no_neighbour() {
    let mut p = ScriptedPeer::with_stale_neighbour(config());
    p.listen();
    p.open(&TcpOptions { mss: Some(1000), ..TcpOptions::default() });
    let conn = p.conn.unwrap();
    p.stack.send(conn, &[1; 500]).unwrap();
    p.flush();
    let state = |p: &ScriptedPeer| p.stack.network().neighbours().map(|n| n.state).collect::<Vec<_>>();
    // In use, and to be probed unless somebody vouches for it.
    assert_eq!(state(&p), [NeighbourState::Delay]);
    let answer = p.deliver(ACK, 1, 502, &[]);
    assert_eq!((answer.len(), p.stack.tcp_stats().challenge_acks), (1, 1));
    assert_eq!(state(&p), [NeighbourState::Delay]);
    p.deliver(ACK, 1, 501, &[]);
    assert_eq!(state(&p), [NeighbourState::Reachable]);
}

#[test]
fn readable_includes_burst_data_buffered_does_not() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let (first, second) = (
        p.segment(ACK, 1, 1, b"abc", &TcpOptions::default()),
        p.segment(ACK, 4, 1, b"defgh", &TcpOptions::default()),
    );
    let mut burst = RxBurst::new();
    for bytes in [&first, &second] {
        burst.push(RxFrame::new(bytes));
    }
    let mut read = [0; 16];
    p.stack.receive(p.now, PortId(0), &burst);
    assert_eq!((p.stack.readable(conn), p.stack.buffered(conn)), (8, 0));
    assert_eq!(p.stack.recv(conn, &mut read), Err(RecvError::WouldBlock));
    // The event hands its bytes over: they are the application's to count now.
    let Some(Event::Data { data, .. }) = p.stack.next_event() else { panic!("no data") };
    assert_eq!((p.stack.readable(conn), p.stack.buffered(conn)), (5, 0));
    p.stack.consume(conn, data, 1, &burst);
    let buffered = p.stack.buffered(conn);
    assert!(buffered >= 2, "what was left of the first");
    assert_eq!(p.stack.readable(conn), 7);
    p.stack.finish_burst(&burst);
    assert_eq!((p.stack.readable(conn), p.stack.buffered(conn)), (7, 7));
    assert_eq!(p.stack.recv(conn, &mut read), Ok(7));
    assert_eq!(&read[..7], b"bcdefgh");
}
