//! The state machine as a table: eleven states, each with the same stimuli, each in a new stack. The results
//! are compared with a table that was reviewed against RFC 9293 §3.10 and RFC 5961
//! (`tests/snapshots/state_table.txt`). `GINNEL_BLESS=1 cargo test` rewrites the table; its changes must be
//! reviewed as carefully.

use core::time::Duration;
use ginnel_stack::events::Event;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::tcp::state::State;
use ginnel_stack::wire::tcp::TcpFlags;
use ginnel_testkit::scripted_peer::{ScriptedPeer, SentSegment};
use std::fmt::Write;

const ACK: TcpFlags = TcpFlags::ACK;
const SYN: TcpFlags = TcpFlags::SYN;
const FIN: TcpFlags = TcpFlags::FIN;
const RST: TcpFlags = TcpFlags::RST;

/// Next sequence numbers of both sides, relative to the initial ones: the peer's, the stack's SND.UNA and
/// SND.NXT.
#[derive(Clone, Copy)]
struct SeqNumbers {
    peer: i64,
    una: i64,
    nxt: i64,
}

fn passive() -> ScriptedPeer {
    let mut p = ScriptedPeer::new(StackConfig::default());
    p.listen();
    p.deliver(SYN, 0, 0, &[]);
    p
}

fn established() -> ScriptedPeer {
    let mut p = passive();
    p.deliver(ACK, 1, 1, &[]);
    p
}

fn shut(mut p: ScriptedPeer) -> ScriptedPeer {
    let conn = p.conn.expect("established");
    p.stack.shutdown_write(conn).expect("live");
    p.flush();
    p
}

fn peer_fin(mut p: ScriptedPeer, ack: i64) -> ScriptedPeer {
    p.deliver(FIN | ACK, 1, ack, &[]);
    p
}

/// Creates a stack with its connection in `state`.
fn in_state(state: State) -> (ScriptedPeer, SeqNumbers) {
    let at = |peer, una, nxt| SeqNumbers { peer, una, nxt };
    match state {
        State::Closed => (ScriptedPeer::new(StackConfig::default()), at(0, 0, 0)),
        State::Listen => {
            let mut p = ScriptedPeer::new(StackConfig::default());
            p.listen();
            (p, at(0, 0, 0))
        }
        State::SynSent => {
            let mut p = ScriptedPeer::new(StackConfig::default());
            p.connect();
            (p, at(0, 0, 1))
        }
        State::SynReceived => (passive(), at(1, 0, 1)),
        State::Established => (established(), at(1, 1, 1)),
        State::FinWait1 => (shut(established()), at(1, 1, 2)),
        State::FinWait2 => {
            let mut p = shut(established());
            p.deliver(ACK, 1, 2, &[]);
            (p, at(1, 2, 2))
        }
        State::CloseWait => (peer_fin(established(), 1), at(2, 1, 1)),
        State::Closing => (peer_fin(shut(established()), 1), at(2, 1, 2)),
        State::LastAck => (shut(peer_fin(established(), 1)), at(2, 1, 2)),
        State::TimeWait => (peer_fin(shut(established()), 2), at(2, 2, 2)),
    }
}

type Stimulus = fn(&mut ScriptedPeer, SeqNumbers) -> Vec<SentSegment>;

fn stimuli() -> Vec<(&'static str, Stimulus)> {
    vec![
        ("RST at rcv_nxt", |p, a| p.deliver(RST, a.peer, 0, &[])),
        ("RST+ACK at rcv_nxt", |p, a| p.deliver(RST | ACK, a.peer, a.nxt, &[])),
        ("RST in window", |p, a| p.deliver(RST, a.peer + 100, 0, &[])),
        ("RST below window", |p, a| p.deliver(RST, a.peer - 100_000, 0, &[])),
        ("SYN new", |p, a| p.deliver(SYN, a.peer, 0, &[])),
        ("SYN repeated", |p, _| p.deliver(SYN, 0, 0, &[])),
        ("SYN above window", |p, a| p.deliver(SYN, a.peer + 1_000_000, 0, &[])),
        ("SYN+ACK", |p, a| p.deliver(SYN | ACK, 0, a.nxt, &[])),
        ("FIN in order", |p, a| p.deliver(FIN | ACK, a.peer, a.una.max(1), &[])),
        ("FIN in order, ACK of all", |p, a| p.deliver(FIN | ACK, a.peer, a.nxt, &[])),
        ("FIN beyond a hole", |p, a| p.deliver(FIN | ACK, a.peer + 10, a.una.max(1), &[])),
        ("FIN repeated", |p, a| p.deliver(FIN | ACK, a.peer - 1, a.nxt, &[])),
        ("FIN without ACK", |p, a| p.deliver(FIN, a.peer, 0, &[])),
        ("ACK of all", |p, a| p.deliver(ACK, a.peer, a.nxt, &[])),
        ("ACK repeated", |p, a| p.deliver(ACK, a.peer, a.una, &[])),
        ("ACK of unsent", |p, a| p.deliver(ACK, a.peer, a.nxt + 1, &[])),
        ("ACK absurdly old", |p, a| p.deliver(ACK, a.peer, a.una - 200_000, &[])),
        ("ACK below window", |p, a| p.deliver(ACK, a.peer - 100, a.nxt, &[])),
        ("ACK above window", |p, a| p.deliver(ACK, a.peer + 1_000_000, a.nxt, &[])),
        ("data in order", |p, a| p.deliver(ACK, a.peer, a.nxt, b"abcd")),
        ("data beyond a hole", |p, a| p.deliver(ACK, a.peer + 10, a.nxt, b"abcd")),
        ("data repeated", |p, a| p.deliver(ACK, a.peer - 4, a.nxt, b"abcd")),
        ("data above window", |p, a| p.deliver(ACK, a.peer + 1_000_000, a.nxt, b"abcd")),
        ("data without ACK", |p, a| p.deliver(TcpFlags::NONE, a.peer, 0, b"abcd")),
        ("no flags", |p, a| p.deliver(TcpFlags::NONE, a.peer, 0, &[])),
        ("all flags", |p, a| p.deliver(TcpFlags(0x3f), a.peer, a.nxt, &[])),
        ("10 s pass", |p, _| p.wait(Duration::from_secs(10))),
        ("30 min pass", |p, _| p.wait(Duration::from_secs(1800))),
        ("application sends", |p, _| {
            if let Some(conn) = p.conn {
                let _ = p.stack.send(conn, b"xyz");
            }
            p.flush()
        }),
        ("application shuts down writing", |p, _| {
            if let Some(conn) = p.conn {
                let _ = p.stack.shutdown_write(conn);
            }
            p.flush()
        }),
        ("application closes", |p, _| {
            if let Some(conn) = p.conn {
                let _ = p.stack.close(conn);
            }
            p.flush()
        }),
        ("application aborts", |p, _| {
            if let Some(conn) = p.conn {
                let _ = p.stack.abort(conn);
            }
            p.flush()
        }),
    ]
}

/// Formats segments: flags, relative sequence and acknowledgement number, payload length.
fn describe(p: &ScriptedPeer, sent: &[SentSegment]) -> String {
    if sent.is_empty() {
        return "-".into();
    }
    let mut out = String::new();
    let shown = 3;
    for s in sent.iter().take(shown) {
        let h = &s.header;
        let seq = h.seq.0.wrapping_sub(p.iss) as i32;
        let ack = h.ack.0.wrapping_sub(ginnel_testkit::scripted_peer::PEER_ISS) as i32;
        let _ = write!(out, "{:?} {seq}", h.flags);
        if h.flags.contains(ACK) {
            let _ = write!(out, "/{ack}");
        }
        if !s.payload.is_empty() {
            let _ = write!(out, "({})", s.payload.len());
        }
        out.push(' ');
    }
    if sent.len() > shown {
        let _ = write!(out, "… {} in all", sent.len());
    }
    out.trim_end().into()
}

/// Returns the state of the connection. A TIME_WAIT entry and a half-open connection have no handle.
fn state_of(p: &ScriptedPeer) -> &'static str {
    let usage = p.stack.usage();
    if usage.time_wait > 0 {
        return "TIME-WAIT";
    }
    match p.conn.and_then(|c| p.stack.state(c)) {
        Some(state) => state.name(),
        None if usage.half_open > 0 => "SYN-RECEIVED",
        None => "none",
    }
}

fn event_text(event: &Event) -> String {
    match event {
        Event::Incoming { .. } => "incoming".into(),
        Event::Connected { .. } => "connected".into(),
        Event::Data { data, .. } => format!("data {}", data.len()),
        Event::Readable { .. } => "readable".into(),
        Event::Unordered { .. } => "unordered".into(),
        Event::Writable { .. } => "writable".into(),
        Event::Acked { bytes, .. } => format!("acked {bytes}"),
        Event::Urgent { .. } => "urgent".into(),
        Event::PeerClosed { .. } => "peer closed".into(),
        Event::Closed { reason, .. } => format!("closed: {reason:?}"),
        Event::UdpReadable { .. } => "udp".into(),
        Event::ListenerDestroyed { .. } => "listener destroyed".into(),
    }
}

#[test]
fn every_state_reacts_as_in_the_table() {
    let mut table = String::new();
    let states = [
        State::Closed,
        State::Listen,
        State::SynSent,
        State::SynReceived,
        State::Established,
        State::FinWait1,
        State::FinWait2,
        State::CloseWait,
        State::Closing,
        State::LastAck,
        State::TimeWait,
    ];
    for state in states {
        let _ = writeln!(table, "{}", state.name());
        for (name, apply) in stimuli() {
            let (mut p, at) = in_state(state);
            p.events.clear();
            let sent = apply(&mut p, at);
            // Events that the stack reported during the stimulus.
            let events: Vec<_> = p.events.iter().map(event_text).collect();
            let line = format!(
                "  {name:<32} → {:<13} sends {:<40} tells {}",
                state_of(&p),
                describe(&p, &sent),
                if events.is_empty() { "-".into() } else { events.join(", ") }
            );
            let _ = writeln!(table, "{}", line.trim_end());
        }
        table.push('\n');
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/snapshots/state_table.txt");
    if std::env::var_os("GINNEL_BLESS").is_some() {
        std::fs::write(path, &table).expect("the snapshot can be written");
        return;
    }
    let reviewed = std::fs::read_to_string(path).expect("the snapshot is in the repository");
    for (new, old) in table.lines().zip(reviewed.lines()) {
        assert_eq!(new, old, "differs from the reviewed table");
    }
    assert_eq!(table.lines().count(), reviewed.lines().count());
}
