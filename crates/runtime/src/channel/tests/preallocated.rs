//! Connections that clients in other processes open without a question.

use super::*;
use crate::channel::region::PREALLOCATED_MAX;
use crate::channel::simulation::SimulatedDomain;
use crate::channel::sync::Ordering;
use ginnel_stack::error::ConnectError;
use ginnel_stack::options::TcpOption;

fn to() -> SocketAddr {
    "10.0.0.2:90".parse().unwrap()
}

fn rig(sockets_max: u32) -> (Fixture, SimulatedDomain, Client) {
    let config = ChannelConfig { sockets_max, ..small_config() };
    let rig = Fixture::new(&config, Peer { listens: true, echoes: true, ..Peer::default() });
    let (domain, parts) = SameThread(rig.server.clone()).open_domain().unwrap();
    let client = Client::open(parts, Box::new(domain.clone())).unwrap();
    (rig, domain, client)
}

/// Sends a line and gets it back.
fn is_served(rig: &mut Fixture, client: &mut Client, conn: Conn) {
    client.send(conn, b"hello").unwrap();
    rig.events(client);
    let mut out = [0; 64];
    assert_eq!(client.recv(conn, &mut out), Ok(5));
}

/// How many of these connections the stack has not looked at yet.
fn unnamed(client: &Client, conns: &[Conn]) -> usize {
    conns.iter().filter(|conn| client.endpoints(**conn).unwrap()[0].port() == 0).count()
}

#[test]
fn only_the_first_connect_needs_a_request() {
    let (mut rig, _domain, mut client) = rig(512);
    let first = client.connect_without_request(to()).unwrap();
    assert_ne!(client.endpoints(first).unwrap()[0].port(), 0, "it was answered");
    let conns: Vec<Conn> =
        (0..PREALLOCATED_MAX + 3).map(|_| client.connect_without_request(to()).unwrap()).collect();
    // Three were asked for, before which the stack answered bells, and laid out others.
    assert!(unnamed(&client, &conns) < PREALLOCATED_MAX, "questions are behind bells");
    rig.run(Duration::from_millis(5));
    assert_eq!(unnamed(&client, &conns), 0);
    for &conn in &conns {
        let [own, peer] = client.endpoints(conn).unwrap();
        assert_eq!((own.ip(), peer), ("10.0.0.1".parse().unwrap(), to()));
        is_served(&mut rig, &mut client, conn);
    }
    assert_eq!(rig.sockets_in_use(), conns.len() + 1, "what is at hand is not in use");
    let again = client.connect_without_request(to()).unwrap();
    assert_eq!(client.endpoints(again).unwrap()[0].port(), 0, "others were laid out");
    drop(client);
    rig.run(300 * SECOND);
    assert_eq!(rig.sockets_in_use(), 0);
    assert_eq!(rig.stats().violations, 0);
}

#[test]
fn options_and_release_apply_before_the_open() {
    let (mut rig, _domain, mut client) = rig(512);
    let first = client.connect_without_request(to()).unwrap();
    let conn = client.connect_without_request(to()).unwrap();
    client.set_option(conn, TcpOption::NoDelay(true)).unwrap();
    client.set_option(conn, TcpOption::KeepIdle(Duration::from_secs(77))).unwrap();
    let given_up = client.connect_without_request(to()).unwrap();
    client.release(given_up).unwrap();
    rig.run(Duration::from_millis(5));
    is_served(&mut rig, &mut client, conn);
    assert!(client.info(conn).is_ok());
    for conn in [first, conn] {
        client.abort(conn).unwrap();
        client.release(conn).unwrap();
    }
    rig.run(300 * SECOND);
    assert_eq!(rig.sockets_in_use(), 0);
}

#[test]
fn failed_connect_reports_its_error() {
    let (mut rig, _domain, mut client) = rig(512);
    client.connect_without_request(to()).unwrap();
    let conn = client.connect_without_request("192.0.2.1:80".parse().unwrap()).unwrap();
    assert_eq!(client.connect_error(conn), None, "nobody has looked");
    let events = rig.events(&mut client);
    assert!(events.contains(&ClientEvent::Closed { conn, reason: CloseReason::Aborted }), "{events:?}");
    assert_eq!(client.connect_error(conn), Some(ConnectError::NetUnreachable));
    client.release(conn).unwrap();
    rig.run(SECOND);
    let conn = client.connect_without_request(to()).unwrap();
    assert_eq!(client.connect_error(conn), None);
    is_served(&mut rig, &mut client, conn);
}

#[test]
fn few_sockets_prevent_preallocation() {
    let (mut rig, _domain, mut client) = rig(8);
    for _ in 0..8 {
        let conn = client.connect_without_request(to()).unwrap();
        assert_ne!(client.endpoints(conn).unwrap()[0].port(), 0);
    }
    let error = client.connect_without_request(to()).unwrap_err();
    assert_eq!(error.to_string(), "connect to 10.0.0.2:90: too many connections");
    rig.run(SECOND);
    assert_eq!(rig.sockets_in_use(), 8);
}

#[test]
fn other_clients_preallocated_sockets_cannot_be_opened() {
    let (mut rig, domain, mut client) = rig(512);
    let mut other = domain.admit(&client).unwrap();
    client.connect_without_request(to()).unwrap();
    // The other rings for all that lies at the first, and asks for connections with it.
    for socket in 0..512 {
        let words = other.region.socket(socket);
        words.requests.fetch_or(crate::channel::socket::request::CONNECT, Ordering::Relaxed);
        other.notify(socket, crate::channel::doorbells::NOTIFIED);
    }
    rig.run(SECOND);
    assert_eq!(rig.sockets_in_use(), 1);
}
