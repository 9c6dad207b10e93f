//! Assignment of connections to listeners.

use super::common::{ACK, SYN, config};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::events::Event;
use ginnel_stack::options::ListenOptions;
use ginnel_testkit::scripted_peer::{PORT, STACK, ScriptedPeer};
use ginnel_testkit::sim::Sim;

#[test]
fn both_families_are_served_by_one_listener() {
    let mut sim = Sim::pair(4);
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 80);
    sim.hosts[1].stack.listen(any, ListenOptions::default()).unwrap();
    // IPv6 addresses pass duplicate address detection first.
    sim.run(Duration::from_secs(3));
    for to in [IpAddr::V4(sim.hosts[1].v4), IpAddr::V6(sim.hosts[1].v6)] {
        let now = sim.now;
        let conn = sim.hosts[0].connect(now, SocketAddr::new(to, 80));
        sim.hosts[0].send_all(now, conn, vec![6; 1 << 20], true);
        sim.collect(0);
        sim.run(Duration::from_secs(5));
        let served = *sim.hosts[1].accepted.last().expect("accepted");
        assert_eq!(sim.hosts[1].received[&served].bytes.len(), 1 << 20, "{to}");
    }
    assert_eq!(sim.hosts[1].accepted.len(), 2);
}

#[test]
fn listeners_get_their_own_connections() {
    let mut p = ScriptedPeer::new(config());
    let ports = [80, 81, 8080, 65_535];
    let listeners: Vec<_> = ports
        .iter()
        .map(|port| p.stack.listen(SocketAddr::new(STACK.into(), *port), ListenOptions::default()).unwrap())
        .collect();
    for (port, listener) in ports.iter().zip(&listeners) {
        p.ports = (*port, 40_000);
        p.events.clear();
        p.deliver(SYN, 0, 0, &[]);
        p.deliver(ACK, 1, 1, &[]);
        assert!(p.events.contains(&Event::Incoming { listener: *listener }));
    }
}

#[test]
fn exact_address_precedes_wildcard() {
    let mut p = ScriptedPeer::new(config());
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    p.stack.listen(SocketAddr::new(any, PORT), ListenOptions::default()).unwrap();
    let exact = p.stack.listen(SocketAddr::new(STACK.into(), PORT), ListenOptions::default()).unwrap();
    p.deliver(SYN, 0, 0, &[]);
    p.deliver(ACK, 1, 1, &[]);
    assert!(p.events.contains(&Event::Incoming { listener: exact }));
}
