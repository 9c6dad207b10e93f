//! Connections that do not end with a plain exchange of FINs.

use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::device::{RxBurst, RxFrame};
use ginnel_stack::error::ConnectError;
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::handle::{LinkId, Listener, PortId};
use ginnel_stack::options::ConnectOptions;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions, Timestamps};
use ginnel_testkit::scripted_peer::{PEER, PEER_PORT, PORT, STACK, ScriptedPeer};
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim};

const ACK: TcpFlags = TcpFlags::ACK;
const FIN: TcpFlags = TcpFlags::FIN;
const RST: TcpFlags = TcpFlags::RST;
const SYN: TcpFlags = TcpFlags::SYN;

/// Creates a stack that has answered a SYN. Returns its listener and the frames that the peer sends next.
fn half_open(next: &[(TcpFlags, i64, &[u8])]) -> (ScriptedPeer, Listener, Vec<Vec<u8>>) {
    let mut p = ScriptedPeer::new(StackConfig::default());
    let listener = p.listen();
    p.deliver(SYN, 0, 0, &[]);
    let frames = next.iter().map(|(flags, seq, payload)| {
        let ack = i64::from(!flags.contains(RST));
        p.segment(*flags, *seq, ack, payload, &TcpOptions::default())
    });
    let frames = frames.collect();
    (p, listener, frames)
}

fn link_local(sim: &Sim, host: usize) -> IpAddr {
    let mut addresses = sim.hosts[host].stack.network().addresses(LinkId(0)).iter().map(|a| a.address);
    addresses
        .find(|a| matches!(a, IpAddr::V6(v6) if v6.is_unicast_link_local()))
        .expect("every link has a link-local address")
}

/// Both directions are closed and the application has not read everything, while other connections arrive.
#[test]
fn finished_unread_ipv6_connection_keeps_its_addresses() {
    let deferred = HostConfig { defer_reads: true, ..HostConfig::default() };
    let mut sim = Sim::pair_with(1, HostConfig::default(), deferred, LinkModel::default());
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 80);
    sim.hosts[1].stack.listen(any, Default::default()).unwrap();
    sim.run(Duration::from_secs(3));
    let (now, to) = (sim.now, SocketAddr::new(sim.hosts[1].v6.into(), 80));
    let client = sim.hosts[0].connect(now, to);
    sim.hosts[0].send_all(now, client, b"unread".to_vec(), true);
    sim.collect(0);
    sim.run(Duration::from_secs(1));
    let served = sim.hosts[1].accepted[0];
    sim.hosts[1].stack.shutdown_write(served).unwrap();
    sim.hosts[1].stack.transmit(now);
    sim.collect(1);
    sim.run(Duration::from_secs(1));
    let before = sim.hosts[1].stack.info(served).expect("a connection with unread data");
    assert_eq!(before.remote.ip(), IpAddr::V6(sim.hosts[0].v6));

    let (now, to) = (sim.now, SocketAddr::new(link_local(&sim, 1), 80));
    sim.hosts[0].connect(now, to);
    sim.collect(0);
    sim.run(Duration::from_secs(1));
    assert_eq!(sim.hosts[1].accepted.len(), 2);
    let after = sim.hosts[1].stack.info(served).expect("a connection with unread data");
    assert_eq!((after.remote, after.local), (before.remote, before.local));
}

/// As on Linux, where the first call on such a connection returns ECONNRESET.
#[test]
fn connection_reset_before_accept_is_still_accepted() {
    let (mut p, _, frames) = half_open(&[(ACK, 1, b""), (ACK, 1, b"bytes"), (RST, 6, b"")]);
    p.deliver_frames(&frames);
    let conn = p.conn.expect("a connection in the accept queue");
    assert_eq!(p.read, b"bytes");
    let closed = Event::Closed { conn, token: 0, reason: CloseReason::Reset };
    assert_eq!(p.events.iter().filter(|e| matches!(e, Event::Closed { .. })).count(), 1);
    assert_eq!(p.events.last(), Some(&closed), "events after the end: {:?}", p.events);
    p.wait(Duration::from_secs(1));
    let usage = p.stack.usage();
    assert_eq!((usage.connections, usage.active, usage.chunks, usage.timers), (0, 0, 0, 0));
}

#[test]
fn unaccepted_reset_connection_ends_with_its_listener() {
    let (mut p, listener, frames) = half_open(&[(ACK, 1, b""), (ACK, 1, b"bytes"), (RST, 6, b"")]);
    p.receive_without_events(&frames);
    assert_eq!(p.stack.usage().connections, 1);
    assert!(p.stack.unlisten(listener));
    assert!(p.flush().is_empty(), "a second reset was sent");
    let usage = p.stack.usage();
    assert_eq!((usage.connections, usage.active, usage.chunks, usage.timers), (0, 0, 0, 0));
}

/// Applications identify connections by their token. The end must report the token although it was known
/// before the token was set.
#[test]
fn reset_before_accept_reports_later_token() {
    let (mut p, _, frames) = half_open(&[(ACK, 1, b""), (RST, 1, b"")]);
    p.receive_without_events(&frames);
    let mut accepted = None;
    while let Some(event) = p.stack.next_event() {
        match event {
            Event::Incoming { listener } => {
                let conn = p.stack.accept(listener).expect("a connection in the accept queue");
                assert!(p.stack.set_token(conn, 7));
                accepted = Some(conn);
            }
            Event::Closed { conn, token, reason } => {
                assert_eq!((Some(conn), token, reason), (accepted, 7, CloseReason::Reset));
                return;
            }
            _ => {}
        }
    }
    panic!("the end was not reported");
}

#[test]
fn connect_aborted_at_once_sends_nothing() {
    let mut p = ScriptedPeer::new(StackConfig::default());
    let to = SocketAddr::new(PEER.into(), 9);
    let conn = p.stack.connect(p.now, to, &Default::default()).unwrap();
    p.stack.abort(conn).unwrap();
    p.stack.transmit(p.now);
    assert!(p.flush().is_empty());
}

fn burst_of(frames: &[Vec<u8>]) -> RxBurst<'_> {
    let mut burst = RxBurst::new();
    for bytes in frames {
        burst.push(RxFrame::new(bytes));
    }
    burst
}

/// The connection is accepted only after all events have been processed, while the burst still exists.
#[test]
fn late_accept_reports_data_before_end() {
    let (mut p, listener, frames) = half_open(&[(ACK, 1, b""), (ACK, 1, b"bytes"), (FIN | ACK, 6, b"")]);
    let burst = burst_of(&frames);
    p.stack.receive(p.now, PortId(0), &burst);
    while p.stack.next_event().is_some() {}
    let conn = p.stack.accept(listener).expect("a connection in the accept queue");
    let Some(Event::Data { conn: data_conn, data }) = p.stack.next_event() else {
        panic!("data must be reported first")
    };
    assert_eq!((data_conn, p.stack.inline_data(&burst, &data)), (conn, &b"bytes"[..]));
    p.stack.consume(conn, data, 5, &burst);
    assert_eq!(p.stack.next_event(), Some(Event::PeerClosed { conn }));
    assert_eq!(p.stack.next_event(), None);
    p.stack.finish_burst(&burst);
    assert_eq!(p.stack.next_event(), None);
}

#[test]
fn buffered_data_is_reported_before_end() {
    let (mut p, _, _) = half_open(&[]);
    p.deliver(ACK, 1, 1, &[]);
    let conn = p.conn.expect("an accepted connection");
    let frames = [(ACK, 1, &b"bytes"[..]), (FIN | ACK, 6, b""), (ACK, 100, b"beyond the end")]
        .map(|(flags, seq, payload)| p.segment(flags, seq, 1, payload, &TcpOptions::default()));
    let burst = burst_of(&frames);
    p.stack.receive(p.now, PortId(0), &burst);
    assert_eq!(p.stack.next_event(), Some(Event::Readable { conn }));
    assert_eq!(p.stack.next_event(), Some(Event::PeerClosed { conn }));
    assert_eq!(p.stack.next_event(), None);
    p.stack.finish_burst(&burst);
}

/// Creates a stack with the TIME_WAIT entry of a connection that the stack closed first.
fn time_wait(max: u32) -> ScriptedPeer {
    let mut config = StackConfig::default();
    config.tcp.connections_max = max;
    let options = TcpOptions {
        mss: Some(1000),
        timestamps: Some(Timestamps { tsval: 1, tsecr: 0 }),
        ..TcpOptions::default()
    };
    let mut p = ScriptedPeer::established(config, &options);
    p.stack.close(p.conn.unwrap()).unwrap();
    p.flush();
    let stamped = TcpOptions { timestamps: options.timestamps, ..TcpOptions::default() };
    let last = p.segment(FIN | ACK, 1, 2, &[], &stamped);
    p.deliver_frame(&last);
    assert_eq!(p.stack.usage().time_wait, 1);
    p
}

#[test]
fn time_wait_survives_failed_reuse() {
    let mut p = time_wait(1);
    p.wait(Duration::from_secs(2));
    p.ports.1 = 40_001;
    let mss = TcpOptions { mss: Some(1000), ..TcpOptions::default() };
    p.open(&mss);
    let options =
        ConnectOptions { local: Some(SocketAddr::new(STACK.into(), PORT)), ..ConnectOptions::default() };
    let to = SocketAddr::new(PEER.into(), PEER_PORT);
    assert_eq!(p.stack.connect(p.now, to, &options), Err(ConnectError::TooMany));
    assert_eq!(p.stack.usage().time_wait, 1, "for a connection of ours");
    p.ports.1 = PEER_PORT;
    let newer = TcpOptions { timestamps: Some(Timestamps { tsval: 9000, tsecr: 0 }), ..mss };
    let syn = p.segment(SYN, 5000, 0, &[], &newer);
    p.deliver_frame(&syn);
    assert_eq!(p.stack.usage().time_wait, 1, "for one of the peer's");
}
