//! Connections that clients in other processes open without a request.

use super::*;
use crate::channel::client_memory::PREALLOCATED_MAX;
use crate::channel::simulation::SimulatedDomain;
use crate::channel::sync::Ordering;
use ginnel_stack::error::ConnectError;
use ginnel_stack::options::TcpOption;

fn peer_address() -> SocketAddr {
    "10.0.0.2:90".parse().unwrap()
}

fn setup(sockets_max: u32) -> (Fixture, SimulatedDomain, Client) {
    let config = ChannelConfig { sockets_max, ..small_config() };
    let fixture = Fixture::new(&config, Peer { listens: true, echoes: true, ..Peer::default() });
    let (domain, parts) = SameThread(fixture.server.clone()).open_domain().unwrap();
    let client = Client::open(parts, Box::new(domain.clone())).unwrap();
    (fixture, domain, client)
}

/// Sends a line and receives its echo.
fn assert_echo(fixture: &mut Fixture, client: &mut Client, conn: Conn) {
    client.send(conn, b"hello").unwrap();
    fixture.events(client);
    let mut out = [0; 64];
    assert_eq!(client.recv(conn, &mut out), Ok(5));
}

/// Returns how many of these connections the stack has not opened yet.
fn count_unopened(client: &Client, conns: &[Conn]) -> usize {
    conns.iter().filter(|conn| client.endpoints(**conn).unwrap()[0].port() == 0).count()
}

#[test]
fn only_the_first_connect_needs_a_request() {
    let (mut fixture, _domain, mut client) = setup(512);
    let first = client.connect_without_request(peer_address()).unwrap();
    assert_ne!(client.endpoints(first).unwrap()[0].port(), 0, "the stack has replied");
    let conns: Vec<Conn> =
        (0..PREALLOCATED_MAX + 3).map(|_| client.connect_without_request(peer_address()).unwrap()).collect();
    // Three connections needed a request, before which the stack processed notifications and preallocated
    // further sockets.
    assert!(count_unopened(&client, &conns) < PREALLOCATED_MAX, "requests come after notifications");
    fixture.run(Duration::from_millis(5));
    assert_eq!(count_unopened(&client, &conns), 0);
    for &conn in &conns {
        let [local, peer] = client.endpoints(conn).unwrap();
        assert_eq!((local.ip(), peer), ("10.0.0.1".parse().unwrap(), peer_address()));
        assert_echo(&mut fixture, &mut client, conn);
    }
    assert_eq!(fixture.sockets_in_use(), conns.len() + 1, "preallocated sockets are not in use");
    let again = client.connect_without_request(peer_address()).unwrap();
    assert_eq!(client.endpoints(again).unwrap()[0].port(), 0, "further sockets were preallocated");
    drop(client);
    fixture.run(300 * SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
    assert_eq!(fixture.stats().violations, 0);
}

#[test]
fn options_and_release_apply_before_the_open() {
    let (mut fixture, _domain, mut client) = setup(512);
    let first = client.connect_without_request(peer_address()).unwrap();
    let conn = client.connect_without_request(peer_address()).unwrap();
    client.set_option(conn, TcpOption::NoDelay(true)).unwrap();
    client.set_option(conn, TcpOption::MaxSegment(333)).unwrap();
    let given_up = client.connect_without_request(peer_address()).unwrap();
    client.release(given_up).unwrap();
    fixture.run(Duration::from_millis(5));
    assert_eq!(fixture.sockets_in_use(), 2, "the released one is not in use");
    assert_echo(&mut fixture, &mut client, conn);
    let local = client.endpoints(conn).unwrap()[0];
    let at_peer = fixture.peer.with(fixture.now, |peer, cx| {
        let mut infos = peer.conns.iter().filter_map(|conn| cx.info(*conn).ok());
        infos.find(|info| info.remote == local)
    });
    assert_eq!(at_peer.unwrap().snd_mss, 333 - 12, "SYN announced the segment size");
    assert_eq!(fixture.stats().options_refused, 0);
    for conn in [first, conn] {
        client.abort(conn).unwrap();
        client.release(conn).unwrap();
    }
    fixture.run(300 * SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
}

#[test]
fn failed_connect_reports_its_error() {
    let (mut fixture, _domain, mut client) = setup(512);
    client.connect_without_request(peer_address()).unwrap();
    let conn = client.connect_without_request("192.0.2.1:80".parse().unwrap()).unwrap();
    assert_eq!(client.connect_error(conn), None, "the stack has not opened it yet");
    let events = fixture.events(&mut client);
    assert!(events.contains(&ClientEvent::Closed { conn, reason: CloseReason::Aborted }), "{events:?}");
    assert_eq!(client.connect_error(conn), Some(ConnectError::NetUnreachable));
    client.release(conn).unwrap();
    fixture.run(SECOND);
    let conn = client.connect_without_request(peer_address()).unwrap();
    assert_eq!(client.connect_error(conn), None);
    assert_echo(&mut fixture, &mut client, conn);
}

#[test]
fn few_sockets_prevent_preallocation() {
    let (mut fixture, _domain, mut client) = setup(8);
    for _ in 0..8 {
        let conn = client.connect_without_request(peer_address()).unwrap();
        assert_ne!(client.endpoints(conn).unwrap()[0].port(), 0);
    }
    let error = client.connect_without_request(peer_address()).unwrap_err();
    assert_eq!(error.to_string(), "connect to 10.0.0.2:90: too many connections");
    fixture.run(SECOND);
    assert_eq!(fixture.sockets_in_use(), 8);
}

#[test]
fn other_clients_preallocated_sockets_cannot_be_opened() {
    let (mut fixture, domain, mut client) = setup(512);
    let mut other = domain.admit(&client).unwrap();
    client.connect_without_request(peer_address()).unwrap();
    // The other client notifies of all sockets that are preallocated for the first one, and requests
    // connections with them.
    for socket in 0..512 {
        let area = other.region.socket(socket);
        area.requests.fetch_or(crate::channel::socket::request::CONNECT, Ordering::Relaxed);
        other.notify(socket, crate::channel::doorbells::NOTIFIED);
    }
    fixture.run(SECOND);
    assert_eq!(fixture.sockets_in_use(), 1);
}
