//! `network.fragment_bytes` and the reassembly time-out.

use super::common::{CLIENT, SECOND, SERVER, datagram, header_v4, packet_v4, pattern, server, server_with};
use core::net::{Ipv4Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::udp::UdpOptions;
use ginnel_stack::wire::{ipv4, protocol};
use ginnel_testkit::sim::Sim;

fn sim() -> (Sim, UdpHandle) {
    let mut sim = server_with(|c| c.network.fragment_bytes = 65_536);
    let to = server(&sim, false, 9);
    let bound = sim.hosts[SERVER].stack.udp_bind(to, UdpOptions::default()).unwrap();
    (sim, bound)
}

/// Returns one of two fragments of a datagram of 1,600 bytes.
fn fragment(ident: u16, first: bool) -> Vec<u8> {
    let packet = datagram(1000, 9, &pattern(ident as u8, 1592));
    let part = if first { &packet[..800] } else { &packet[800..] };
    let header = ipv4::Header {
        ident,
        more_fragments: first,
        fragment_offset: if first { 0 } else { 800 },
        ..header_v4([10, 0, 0, 1], [10, 0, 0, 2], protocol::UDP)
    };
    packet_v4(1, 2, &header, part)
}

fn received(sim: &mut Sim, bound: UdpHandle) -> Vec<Vec<u8>> {
    let mut buffer = vec![0; 65_536];
    let stack = &mut sim.hosts[SERVER].stack;
    core::iter::from_fn(|| {
        stack.udp_recv_from(bound, &mut buffer).ok().map(|d| d.len).map(|n| buffer[..n].to_vec())
    })
    .collect()
}

// limit: network.fragment_bytes
#[test]
fn oldest_incomplete_datagram_is_evicted() {
    let (mut sim, bound) = sim();
    // A fragment is charged for 800 bytes, its header, and 64 bytes each for fragment and datagram.
    let fit = 65_536 / (800 + 20 + 64 + 64);
    for ident in 0..1000 {
        sim.inject(SERVER, fragment(ident, true));
    }
    sim.run(Duration::from_millis(1));
    let evicted = sim.hosts[SERVER].stack.network().stats().reassembly_evicted;
    assert_eq!(evicted, 1000 - fit);
    // The remaining datagrams can be completed, evicted ones cannot.
    for ident in [0, 500, 999, 998] {
        sim.inject(SERVER, fragment(ident, false));
    }
    sim.run(Duration::from_millis(1));
    assert_eq!(
        received(&mut sim, bound),
        [pattern((999 % 256) as u8, 1592), pattern((998 % 256) as u8, 1592)]
    );
    // Complete datagrams pass while the flood continues.
    let now = sim.now;
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
    let client = sim.hosts[CLIENT].stack.udp_bind(any, UdpOptions::default()).unwrap();
    let to = server(&sim, false, 9);
    for round in 0..20 {
        for ident in 0..50 {
            sim.inject(SERVER, fragment(1000 + 50 * round + ident, true));
        }
        let body = pattern(round as u8, 20_000);
        sim.hosts[CLIENT].stack.udp_send_to(now, client, Some(to), &body).unwrap();
        sim.hosts[CLIENT].stack.transmit(now);
        sim.collect(CLIENT);
        sim.run(Duration::from_millis(20));
        assert_eq!(received(&mut sim, bound), [body], "round {round}");
    }
}

// limit: network.fragment_bytes
#[test]
fn incomplete_datagrams_time_out_and_are_counted() {
    let (mut sim, bound) = sim();
    for ident in 0..30 {
        sim.inject(SERVER, fragment(ident, true));
    }
    sim.run(SECOND * 29);
    let stats = |sim: &Sim| sim.hosts[SERVER].stack.network().stats().clone();
    assert_eq!(stats(&sim).reassembly_timeouts, 0);
    sim.run(SECOND * 2);
    assert_eq!(stats(&sim).reassembly_timeouts, 30);
    // All memory of the fragments is free again.
    for ident in 100..160 {
        sim.inject(SERVER, fragment(ident, true));
    }
    for ident in 100..160 {
        sim.inject(SERVER, fragment(ident, false));
    }
    sim.run(Duration::from_millis(1));
    assert_eq!((received(&mut sim, bound).len(), stats(&sim).reassembly_evicted), (60, 0));
}

// limit: network.fragment_bytes
#[test]
fn tiny_fragments_are_charged_their_overhead() {
    let (mut sim, bound) = sim();
    let packet = datagram(1000, 9, &pattern(1, 4088));
    let piece = |ident: u16, at: usize| {
        let header = ipv4::Header {
            ident,
            more_fragments: at + 8 < packet.len(),
            fragment_offset: at as u16,
            ..header_v4([10, 0, 0, 1], [10, 0, 0, 2], protocol::UDP)
        };
        packet_v4(1, 2, &header, &packet[at..at + 8])
    };
    // 512 fragments with a charge of 64 bytes each take more than half of the budget, so two such datagrams
    // do not fit together.
    for ident in [1, 2] {
        for at in (8..packet.len()).step_by(8) {
            sim.inject(SERVER, piece(ident, at));
        }
    }
    sim.run(Duration::from_millis(1));
    assert_eq!(sim.hosts[SERVER].stack.network().stats().reassembly_evicted, 1);
    sim.inject(SERVER, piece(1, 0));
    sim.inject(SERVER, piece(2, 0));
    sim.run(Duration::from_millis(1));
    assert_eq!(received(&mut sim, bound), [pattern(1, 4088)]);
}
