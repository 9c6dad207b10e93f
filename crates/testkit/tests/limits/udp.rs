//! `network.udp_sockets_max`, `network.udp_receive_bytes`, `network.udp_receive_total_bytes` and the range of
//! ports.

use super::common::{CLIENT, SECOND, SERVER, pattern, server, server_with};
use core::net::{Ipv4Addr, SocketAddr};
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::udp::{UdpError, UdpOptions};
use ginnel_testkit::sim::Sim;

const ANY: SocketAddr = SocketAddr::new(core::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

fn bind(sim: &mut Sim, host: usize, addr: SocketAddr) -> Result<UdpHandle, UdpError> {
    sim.hosts[host].stack.udp_bind(addr, UdpOptions::default())
}

fn send(sim: &mut Sim, socket: UdpHandle, port: u16, payload: &[u8]) {
    let (now, to) = (sim.now, server(sim, false, port));
    sim.hosts[CLIENT].stack.udp_send_to(now, socket, Some(to), payload).unwrap();
    sim.hosts[CLIENT].stack.transmit(now);
    sim.collect(CLIENT);
}

fn drain(sim: &mut Sim, socket: UdpHandle) -> usize {
    let mut buffer = [0; 2000];
    core::iter::from_fn(|| sim.hosts[SERVER].stack.udp_recv_from(socket, &mut buffer).ok()).count()
}

// limit: network.udp_sockets_max
#[test]
fn udp_sockets_beyond_limit_are_refused() {
    let mut sim = server_with(|c| c.network.udp_sockets_max = 3);
    let mut sockets: Vec<_> =
        (1..=3).map(|port| bind(&mut sim, SERVER, server_with_port(port)).unwrap()).collect();
    for port in 4..300 {
        assert_eq!(bind(&mut sim, SERVER, server_with_port(port)), Err(UdpError::TooManySockets));
        let oldest = sockets.remove(0);
        sim.hosts[SERVER].stack.udp_close(oldest).unwrap();
        sockets.push(bind(&mut sim, SERVER, server_with_port(port)).unwrap());
        assert_eq!(sim.hosts[SERVER].stack.udp_close(oldest), Err(UdpError::Stale));
    }
}

fn server_with_port(port: u16) -> SocketAddr {
    SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port)
}

// limit: network.udp_port_last
#[test]
fn exhausted_udp_ports_are_reusable() {
    let mut sim = server_with(|c| (c.network.udp_port_first, c.network.udp_port_last) = (50_000, 50_009));
    let sockets: Vec<_> = (0..10).map(|_| bind(&mut sim, SERVER, ANY).unwrap()).collect();
    assert_eq!(bind(&mut sim, SERVER, ANY), Err(UdpError::AddressNotAvailable));
    assert_eq!(sim.hosts[SERVER].stack.udp_stats().ports_exhausted, 1);
    let freed = sim.hosts[SERVER].stack.udp_local(sockets[4]).unwrap();
    sim.hosts[SERVER].stack.udp_close(sockets[4]).unwrap();
    let new_socket = bind(&mut sim, SERVER, ANY).unwrap();
    assert_eq!(sim.hosts[SERVER].stack.udp_local(new_socket), Ok(freed));
}

// limit: network.udp_receive_bytes
#[test]
fn full_receive_queue_affects_only_its_socket() {
    let mut sim = server_with(|c| c.network.udp_receive_bytes = 20_000);
    let client = bind(&mut sim, CLIENT, ANY).unwrap();
    let idle = bind(&mut sim, SERVER, server_with_port(7)).unwrap();
    let read = bind(&mut sim, SERVER, server_with_port(8)).unwrap();
    for round in 0..50 {
        for _ in 0..10 {
            send(&mut sim, client, 7, &[1; 936]);
        }
        send(&mut sim, client, 8, &pattern(round, 936));
        sim.run(SECOND / 100);
        let mut buffer = [0; 1000];
        let got = sim.hosts[SERVER].stack.udp_recv_from(read, &mut buffer).unwrap();
        assert_eq!(&buffer[..got.len], pattern(round, 936));
    }
    assert_eq!(sim.hosts[SERVER].stack.udp_stats().receive_overflow, 480);
    assert_eq!(drain(&mut sim, idle), 20);
    send(&mut sim, client, 7, b"again");
    sim.run(SECOND / 100);
    assert_eq!(drain(&mut sim, idle), 1);
}

// limit: network.udp_receive_total_bytes
#[test]
fn total_receive_limit_is_kept_and_recovers() {
    let mut sim = server_with(|c| c.network.udp_receive_total_bytes = 65_536);
    let client = bind(&mut sim, CLIENT, ANY).unwrap();
    let sockets: Vec<_> =
        (1..=10).map(|port| bind(&mut sim, SERVER, server_with_port(port)).unwrap()).collect();
    for round in 1..=20 {
        for port in 1..=10 {
            for _ in 0..10 {
                send(&mut sim, client, port, &[1; 936]);
            }
        }
        sim.run(SECOND / 100);
        assert_eq!(sim.hosts[SERVER].stack.udp_stats().receive_overflow, 35 * round);
        let got: usize = sockets.iter().map(|socket| drain(&mut sim, *socket)).sum();
        assert_eq!(got, 65);
    }
}
