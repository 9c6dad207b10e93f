//! `tcp.listeners_max`.

use core::net::{Ipv4Addr, SocketAddr};
use ginnel_stack::error::ListenError;
use ginnel_stack::options::ListenOptions;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::wire::tcp::TcpFlags;
use ginnel_testkit::scripted_peer::{STACK, ScriptedPeer};

fn scripted_peer(max: u32) -> ScriptedPeer {
    let mut config = StackConfig::default();
    config.tcp.listeners_max = max;
    ScriptedPeer::new(config)
}

fn at(port: u16) -> SocketAddr {
    SocketAddr::new(STACK.into(), port)
}

/// Returns whether a SYN to `port` is answered with SYN+ACK and not with RST.
fn is_open(p: &mut ScriptedPeer, port: u16) -> bool {
    p.ports = (port, p.ports.1 + 1);
    let answers = p.deliver(TcpFlags::SYN, 0, 0, &[]);
    answers.len() == 1 && answers[0].header.flags.contains(TcpFlags::SYN)
}

// limit: tcp.listeners_max
#[test]
fn listener_beyond_limit_is_refused() {
    let mut p = scripted_peer(3);
    let options = ListenOptions::default();
    let mut listeners: Vec<_> = (1..=3).map(|port| p.stack.listen(at(port), options).unwrap()).collect();
    assert_eq!(p.stack.listen(at(4), options), Err(ListenError::TooMany));
    assert_eq!(p.stack.listen(at(3), options), Err(ListenError::AddressInUse), "the better reason");
    assert_eq!(p.stack.tcp_stats().listeners_refused, 1);
    assert!(is_open(&mut p, 1) && is_open(&mut p, 2) && is_open(&mut p, 3) && !is_open(&mut p, 4));
    for port in 4..200 {
        let oldest = listeners.remove(0);
        assert!(p.stack.unlisten(oldest));
        assert!(!p.stack.unlisten(oldest), "its handle is stale");
        assert!(!is_open(&mut p, port - 3));
        listeners.push(p.stack.listen(at(port), options).unwrap());
        assert_eq!(p.stack.listen(at(1000), options), Err(ListenError::TooMany));
        assert!(is_open(&mut p, port));
    }
}

#[test]
fn half_open_connections_end_with_their_listener() {
    let mut p = scripted_peer(1);
    for round in 0..20 {
        let first = p.stack.listen(at(80), ListenOptions::default()).unwrap();
        assert!(is_open(&mut p, 80));
        assert!(p.stack.unlisten(first));
        let second = p.stack.listen(at(80), ListenOptions::default()).unwrap();
        let answers = p.deliver(TcpFlags::ACK, 1, 1, &[]);
        assert!(answers[0].header.flags.contains(TcpFlags::RST), "round {round}");
        assert_eq!((p.conn, p.stack.usage().half_open), (None, 0));
        assert!(p.stack.unlisten(second));
    }
}

#[test]
fn foreign_address_takes_no_listener_slot() {
    let mut p = scripted_peer(1);
    let foreign = SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), 80);
    assert_eq!(p.stack.listen(foreign, ListenOptions::default()), Err(ListenError::AddressNotAvailable));
    assert!(p.stack.listen(at(80), ListenOptions::default()).is_ok());
}
