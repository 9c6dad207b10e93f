//! Configuration and connections that the tests share.

use ginnel_stack::events::Event;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};
use ginnel_testkit::scripted_peer::{PEER_ISS, ScriptedPeer, SentSegment};

pub const ACK: TcpFlags = TcpFlags::ACK;
pub const FIN: TcpFlags = TcpFlags::FIN;
pub const SYN: TcpFlags = TcpFlags::SYN;

pub fn config() -> StackConfig {
    StackConfig::default()
}

/// Creates a stack that has accepted a connection of the peer, whose MSS is 1,000.
pub fn established(config: StackConfig) -> ScriptedPeer {
    ScriptedPeer::established(config, &TcpOptions { mss: Some(1000), ..TcpOptions::default() })
}

/// Returns the number of ends that the stack has reported.
pub fn closed_count(p: &ScriptedPeer) -> usize {
    p.events.iter().filter(|e| matches!(e, Event::Closed { .. })).count()
}

/// Returns the acknowledgement number of a segment, relative to the peer's initial sequence number.
pub fn ack_of(sent: &SentSegment) -> i64 {
    i64::from(sent.header.ack.0.wrapping_sub(PEER_ISS) as i32)
}
