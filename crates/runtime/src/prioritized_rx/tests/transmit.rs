//! Tests of what waits in a device in front of urgent packets, each time beside a run without priorities.

use super::*;
use crate::config::Loopback;
use ginnel_stack::handle::Listener;
use ginnel_stack::options::TcpOption;
use ginnel_stack::udp::{UdpError, UdpOptions};

/// Connections with low data, and segments on each: what the initial window admits.
const LOW: usize = 1000;
const SEGMENTS: usize = 10;
const SEGMENT_BYTES: usize = 1448;

/// Keeps the connections that it accepts, with their remote ports.
#[derive(Default)]
struct Sender {
    conns: Vec<(u16, Conn)>,
}

impl Handler for Sender {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        let options = ListenOptions { socket, backlog: 4000, ..ListenOptions::default() };
        cx.listen("0.0.0.0:80".parse().unwrap(), options).map(|_| ())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, _: Listener) {
        self.conns.push((cx.endpoints(conn).unwrap()[1].port(), conn));
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// Sends 10,000 low segments, and a turn later an urgent one, while the device passes on none. Returns how
/// many frames are in the device before the urgent one.
fn frames_before_urgent(has_priorities: bool, frames_max: u32) -> usize {
    let configure = |config: &mut Config| {
        config.priority.transmit_backlog_frames = frames_max;
        config.tcp.send_buffer_first_bytes = 64 << 10;
    };
    let sender = |_| Sender::default();
    let mut hosts = hosts_with(configure, has_priorities, 16_384, (LOW + 1, LOW), sender);
    for _ in 0..1000 {
        hosts.both_turn(Duration::from_micros(50));
    }
    let now = hosts.clock.now();
    let urgent_port =
        hosts.clients.with(now, |clients, cx| cx.endpoints(clients.conns[LOW]).unwrap()[0].port());
    let conns = hosts.server.handler().conns.clone();
    let (urgent, low): (Vec<_>, Vec<_>) = conns.into_iter().partition(|(port, _)| *port == urgent_port);
    assert_eq!((urgent.len(), low.len()), (1, LOW));
    let urgent = urgent[0].1;
    hosts.server.with(now, |_, cx| {
        cx.set_option(urgent, TcpOption::Priority(HIGH)).unwrap();
        for (_, conn) in &low {
            assert_eq!(cx.send(*conn, &[0; SEGMENTS * SEGMENT_BYTES]), Ok(SEGMENTS * SEGMENT_BYTES));
        }
    });
    hosts.clock.advance(Duration::from_micros(10));
    hosts.server_turn();
    let now = hosts.clock.now();
    hosts.server.with(now, |_, cx| assert_eq!(cx.send(urgent, &[0x55; 100]), Ok(100)));
    hosts.server_turn();
    let is_urgent = |frame: &(Vec<u8>, Label)| frame.0.ends_with(&[0x55; 100]);
    let before = hosts.to_clients.lock().unwrap().iter().position(is_urgent).expect("it has left");
    // All follows as the device passes frames on.
    for _ in 0..20_000 {
        hosts.both_turn(Duration::from_micros(50));
    }
    let received = 4 * hosts.clients.handler().answered.len();
    assert_eq!(received, LOW * SEGMENTS * SEGMENT_BYTES + 100);
    before
}

#[test]
fn urgent_packet_leaves_within_one_burst() {
    let on = frames_before_urgent(true, 64);
    assert!(on <= BURST_FRAMES_MAX, "{on}");
    let more = frames_before_urgent(true, 256);
    assert!((200..=256).contains(&more), "{more}");
    let off = frames_before_urgent(false, 64);
    assert!(off >= LOW * SEGMENTS * 9 / 10, "{off}");
}

/// Four connections send all the time, on a device in which 8 of their frames may wait and which passes them
/// on every 200 µs. Another one sends an urgent message now and then. The stack has a second device,
/// loopback.
#[test]
fn connections_of_a_class_take_turns_beside_loopback() {
    const BULK: usize = 4;
    const BYTES: usize = 1 << 20;
    let configure = |config: &mut Config| {
        config.loopback = Loopback::Stack;
        config.priority.transmit_backlog_frames = 8;
        config.tcp.send_buffer_first_bytes = BYTES as u32;
    };
    let mut hosts = hosts_with(configure, true, 16_384, (BULK + 1, BULK), |_| Sender::default());
    let now = hosts.clock.now();
    let conns: Vec<Conn> = hosts.server.handler().conns.iter().map(|(_, conn)| *conn).collect();
    hosts.server.with(now, |_, cx| {
        cx.set_option(conns[BULK], TcpOption::Priority(HIGH)).unwrap();
        for (number, conn) in (0u8..).zip(&conns[..BULK]) {
            assert_eq!(cx.send(*conn, &[number; BYTES]), Ok(BYTES));
        }
    });
    let mut counts = [0; BULK + 1];
    for round in 1usize.. {
        assert!(round < 10_000, "{counts:?}");
        if round.is_multiple_of(10) {
            let now = hosts.clock.now();
            hosts.server.with(now, |_, cx| cx.send(conns[BULK], &[BULK as u8; 4])).unwrap();
        }
        for _ in 0..4 {
            hosts.clock.advance(Duration::from_micros(50));
            hosts.server_turn();
        }
        hosts.clients.poll_once(hosts.clock.now()).unwrap();
        hosts.clients.poll_once(hosts.clock.now()).unwrap();
        counts = [0; BULK + 1];
        hosts.clients.handler().answered.iter().for_each(|number| counts[(number & 0xff) as usize] += 1);
        // An urgent message waits for the frames in the device only.
        assert!(counts[BULK] + 1 >= round / 10, "{counts:?} in round {round}");
        if counts[..BULK].iter().sum::<usize>() >= BULK * BYTES / 4 / 2 {
            break;
        }
    }
    let (least, most) = (*counts[..BULK].iter().min().unwrap(), *counts[..BULK].iter().max().unwrap());
    assert!(2 * least >= most, "{counts:?}");
}

/// A shard with refused frames sleeps a moment before it tries again, and not if nothing waits.
#[test]
fn refused_frames_are_tried_again_after_a_moment() {
    let configure = |config: &mut Config| config.tcp.send_buffer_first_bytes = 1 << 20;
    let mut hosts = hosts_with(configure, true, 16_384, (20, 20), |_| Sender::default());
    let now = hosts.clock.now();
    let idle = hosts.server.poll_once(now).unwrap().next_deadline;
    assert!(idle.is_none_or(|at| at > now + Duration::from_millis(1)), "{idle:?}");
    hosts.server.with(now, |sender, cx| {
        for (_, conn) in &sender.conns {
            assert_eq!(cx.send(*conn, &[0; 10_000]), Ok(10_000));
        }
    });
    hosts.server_turn();
    let turn = hosts.server.poll_once(hosts.clock.now()).unwrap();
    assert_eq!(turn.work, 0);
    let at = turn.next_deadline.unwrap();
    assert!(at > hosts.clock.now() && at <= hosts.clock.now() + Duration::from_millis(1), "{at:?}");
}

/// Sends 10,000 low datagrams, and then an urgent one, while the device passes on none. Returns how many
/// frames are in the device before the urgent one, and how many low ones were refused.
fn frames_before_urgent_datagram(has_priorities: bool) -> (usize, usize) {
    let mut hosts = hosts_with(|_| (), has_priorities, 16_384, (1, 1), |_| Sender::default());
    let now = hosts.clock.now();
    let refused = hosts.server.with(now, |_, cx| {
        let [low, urgent] = [(9, 0), (10, HIGH)].map(|(port, priority)| {
            let options = UdpOptions { priority, ..UdpOptions::default() };
            cx.udp_bind(([10, 0, 0, 1], port).into(), options).unwrap()
        });
        let to = Some("10.0.0.2:9".parse().unwrap());
        let refused = (0..10_000).filter(|_| cx.udp_send(low, to, &[0; 100]) == Err(UdpError::DeviceFull));
        let refused = refused.count();
        assert_eq!(cx.udp_send(urgent, to, &[0x55; 100]), Ok(()));
        refused
    });
    hosts.server_turn();
    let wire = hosts.to_clients.lock().unwrap();
    (wire.iter().position(|(frame, _)| frame.ends_with(&[0x55; 100])).expect("it has left"), refused)
}

#[test]
fn urgent_datagram_leaves_within_one_burst() {
    let (before, refused) = frames_before_urgent_datagram(true);
    assert!(before <= BURST_FRAMES_MAX && refused >= 9_900, "{before} {refused}");
    assert_eq!(frames_before_urgent_datagram(false), (10_000, 0));
}

/// Datagrams fill the device first in each turn. Usual and urgent connections send beside them.
#[test]
fn datagrams_do_not_shut_out_connections() {
    let mut hosts = hosts_with(|_| (), true, 16_384, (2, 1), |_| Sender::default());
    let now = hosts.clock.now();
    let socket = hosts.server.with(now, |sender, cx| {
        cx.set_option(sender.conns[1].1, TcpOption::Priority(HIGH)).unwrap();
        cx.udp_bind("10.0.0.1:9".parse().unwrap(), UdpOptions::default()).unwrap()
    });
    let mut datagrams = 0;
    for turn in 1..=20usize {
        hosts.clock.advance(Duration::from_micros(50));
        let now = hosts.clock.now();
        hosts.server.with(now, |sender, cx| {
            let to = Some("10.0.0.2:9".parse().unwrap());
            datagrams += (0..100).filter(|_| cx.udp_send(socket, to, &[0; 100]).is_ok()).count();
            for (_, conn) in sender.conns.iter().filter(|_| turn <= 10) {
                assert_eq!(cx.send(*conn, &[0x55; 1000]), Ok(1000));
            }
        });
        hosts.server_turn();
    }
    let ports: Vec<u16> = hosts.server.handler().conns.iter().map(|(port, _)| *port).collect();
    let wire = hosts.to_clients.lock().unwrap();
    assert!((40..=64).contains(&datagrams) && wire.len() <= 128, "{datagrams} of {}", wire.len());
    let sent = ports.iter().map(|port| {
        let is_own = |frame: &&(Vec<u8>, Label)| frame.0[23] == 6 && frame.0[36..38] == port.to_be_bytes();
        let bytes = |frame: &(Vec<u8>, Label)| frame.0.iter().filter(|byte| **byte == 0x55).count();
        wire.iter().filter(is_own).map(bytes).sum::<usize>()
    });
    let sent: Vec<usize> = sent.collect();
    assert!(sent.iter().all(|bytes| *bytes >= 10_000), "{sent:?}");
}
