//! Two hosts of which one has a small limit, and builders of packets.

use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::TcpOption;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::wire::checksum::Sum;
use ginnel_stack::wire::ethernet::{self, EtherType};
use ginnel_stack::wire::{MacAddr, ipv4, udp};
use ginnel_testkit::sim::{Host, HostConfig, LinkModel, Sim};

/// Index of the client in [`Sim::hosts`].
pub const CLIENT: usize = 0;
/// Index of the server in [`Sim::hosts`].
pub const SERVER: usize = 1;

pub const SECOND: Duration = Duration::from_secs(1);

/// Creates a client with the default configuration and a server with `change` applied to it.
pub fn server_with(change: impl FnOnce(&mut StackConfig)) -> Sim {
    let mut short = HostConfig::default();
    change(&mut short.stack);
    Sim::pair_with(1, HostConfig::default(), short, LinkModel::default())
}

/// Creates a client with `change` applied to its configuration and a server with the default.
pub fn client_with(change: impl FnOnce(&mut StackConfig)) -> Sim {
    let mut short = HostConfig::default();
    change(&mut short.stack);
    Sim::pair_with(1, short, HostConfig::default(), LinkModel::default())
}

/// Returns the server's address with `port`.
pub fn server(sim: &Sim, v6: bool, port: u16) -> SocketAddr {
    let host = &sim.hosts[SERVER];
    SocketAddr::new(if v6 { host.v6.into() } else { host.v4.into() }, port)
}

/// Opens a connection to the server's port 80.
pub fn connect(sim: &mut Sim) -> Conn {
    let (now, to) = (sim.now, server(sim, false, 80));
    let conn = sim.hosts[CLIENT].connect(now, to);
    sim.collect(CLIENT);
    conn
}

pub fn is_connected(host: &Host, conn: Conn) -> bool {
    host.received.get(&conn).is_some_and(|r| r.connected && r.closed.is_none())
}

/// Queues bytes and lets them leave.
pub fn send(sim: &mut Sim, host: usize, conn: Conn, bytes: &[u8], then_fin: bool) {
    let now = sim.now;
    sim.hosts[host].send_all(now, conn, bytes.to_vec(), then_fin);
    sim.collect(host);
}

/// Closes a connection of `host`.
pub fn close(sim: &mut Sim, host: usize, conn: Conn) {
    let now = sim.now;
    sim.hosts[host].stack.close(conn).expect("an existing connection");
    sim.hosts[host].stack.transmit(now);
    sim.collect(host);
}

/// Resets a connection of the client, so that it ends on both sides without TIME_WAIT.
pub fn reset(sim: &mut Sim, conn: Conn) {
    sim.hosts[CLIENT].stack.set_option(conn, TcpOption::LingerZero(true)).expect("an existing connection");
    close(sim, CLIENT, conn);
    sim.run(Duration::from_millis(10));
}

/// Returns the server's handle of the client's connection `conn`.
pub fn served(sim: &Sim, conn: Conn) -> Conn {
    let local = sim.hosts[CLIENT].stack.info(conn).expect("an existing connection").local;
    let host = &sim.hosts[SERVER];
    let other_end = |c: &&Conn| host.stack.info(**c).is_some_and(|info| info.remote == local);
    *host.accepted.iter().find(other_end).expect("an accepted connection")
}

/// Returns the bytes that a host has read from a connection.
pub fn read(sim: &Sim, host: usize, conn: Conn) -> &[u8] {
    sim.hosts[host].received.get(&conn).map_or(&[], |r| &r.bytes)
}

/// Returns a byte pattern that depends on position and seed.
pub fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7).wrapping_add((i >> 8) as u8) ^ seed).collect()
}

/// Checks that no resource is in use.
pub fn assert_nothing_left(host: &Host) {
    let usage = host.stack.usage();
    assert_eq!(
        (usage.connections, usage.half_open, usage.time_wait, usage.active, usage.chunks, usage.timers),
        (0, 0, 0, 0, 0, 0)
    );
}

/// Returns an Ethernet frame with an IPv4 packet or a fragment.
pub fn packet_v4(from_mac: u8, to_mac: u8, header: &ipv4::Header, payload: &[u8]) -> Vec<u8> {
    let mac = |last| MacAddr([2, 0, 0, 0, 0, last]);
    let mut out = vec![0; 14 + 20 + payload.len()];
    let at = ethernet::Header::new(mac(to_mac), mac(from_mac), None, EtherType::IPV4).emit(&mut out);
    ipv4::Header { total_len: (20 + payload.len()) as u16, header_len: 20, ..*header }.emit(&mut out[at..]);
    out[at + 20..].copy_from_slice(payload);
    out
}

/// Returns an IPv4 header for [`packet_v4`].
pub fn header_v4(src: [u8; 4], dst: [u8; 4], protocol: u8) -> ipv4::Header {
    ipv4::Header {
        dscp: 0,
        ecn: 0,
        total_len: 0,
        ident: 0,
        dont_fragment: false,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol,
        src: src.into(),
        dst: dst.into(),
        header_len: 20,
    }
}

/// Returns a UDP datagram without a checksum, as IPv4 allows.
pub fn datagram(src_port: u16, dst_port: u16, payload: &[u8]) -> Vec<u8> {
    let len = (8 + payload.len()) as u16;
    let mut out = vec![0; 8];
    udp::Header { src_port, dst_port, len, checksum: 0 }.emit(&mut out);
    out.extend_from_slice(payload);
    out
}

/// Returns an ICMP message with its checksum.
pub fn icmp(kind: u8, code: u8, rest: [u8; 4], quote: &[u8]) -> Vec<u8> {
    let mut out = [&[kind, code, 0, 0][..], &rest, quote].concat();
    let sum = Sum::of(&out).finish();
    out[2..4].copy_from_slice(&sum.to_be_bytes());
    out
}
