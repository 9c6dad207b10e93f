//! UDP between two stacks.

use core::net::{Ipv4Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::events::Event;
use ginnel_stack::udp::{UdpError, UdpOptions};
use ginnel_testkit::sim::Sim;

#[test]
fn datagrams_of_all_sizes_are_delivered() {
    let mut sim = Sim::pair(1);
    let any = Ipv4Addr::UNSPECIFIED;
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 5353);
    let server =
        sim.hosts[1].stack.udp_bind(SocketAddr::new(any.into(), 5353), UdpOptions::default()).unwrap();
    let client = sim.hosts[0].stack.udp_bind(SocketAddr::new(any.into(), 0), UdpOptions::default()).unwrap();
    let now = sim.now;
    for len in [0usize, 1, 1472, 1473, 9000, 60_000] {
        let payload: Vec<u8> = (0..len).map(|i| i as u8).collect();
        sim.hosts[0].stack.udp_send_to(now, client, Some(to), &payload).unwrap();
        sim.hosts[0].stack.transmit(now);
        sim.collect(0);
        sim.run(Duration::from_millis(20));
        assert!(sim.hosts[1].events.contains(&Event::UdpReadable { socket: server }), "{len} bytes");
        let mut buffer = vec![0; 65_536];
        let datagram = sim.hosts[1].stack.udp_recv_from(server, &mut buffer).unwrap();
        assert_eq!(&buffer[..datagram.len], &payload[..]);
        sim.hosts[1].events.clear();
    }
}

#[test]
fn closed_port_is_reported_to_connected_socket() {
    let mut sim = Sim::pair(2);
    let now = sim.now;
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 9);
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
    let client = sim.hosts[0].stack.udp_bind(any, UdpOptions::default()).unwrap();
    sim.hosts[0].stack.udp_connect(now, client, to).unwrap();
    sim.hosts[0].stack.udp_send_to(now, client, None, b"anybody?").unwrap();
    sim.hosts[0].stack.transmit(now);
    sim.collect(0);
    sim.run(Duration::from_millis(50));
    let mut buffer = [0; 16];
    assert_eq!(sim.hosts[0].stack.udp_recv_from(client, &mut buffer), Err(UdpError::ConnectionRefused));
}
