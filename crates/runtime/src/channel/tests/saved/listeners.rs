//! Listeners whose connections are pending or offered.

use super::*;
use crate::channel::control::{AddressSharing, SocketId};

#[test]
fn pending_and_offered_connections_are_accepted_later() {
    let mut fixture = SavedFixture::new(&small_config(), Peer { close_when_sent: false, ..Peer::default() });
    let (domain, mut client) = fixture.open_domain();
    let mut other = domain.admit(&client).unwrap();
    client.accept_explicitly();
    other.accept_explicitly();
    let listener = listen(&mut client, 2);
    for number in 0..5 {
        fixture.connect_peer(format!("request {number}").as_bytes());
    }
    fixture.events(&mut client);
    assert!(client.has_offer(listener), "two are offered, three are pending");
    fixture.replace_shard();
    let mut requests = Vec::new();
    for client in [&mut client, &mut other] {
        if requests.len() == 3 {
            // The first client has offers, which it does not answer any more.
            client.join(listener, 2).unwrap();
            fixture.run(Duration::from_millis(120));
        }
        fixture.events(client);
        while requests.len() < 5
            && let Some(conn) = client.accept(listener)
        {
            fixture.run(Duration::from_millis(5));
            requests.push(String::from_utf8(read_all(client, conn)).unwrap());
            client.send(conn, b"response").unwrap();
            client.close(conn).unwrap();
            client.release(conn).unwrap();
            fixture.events(client);
            if requests.len() == 3 {
                fixture.replace_shard();
                break;
            }
        }
    }
    assert_eq!(requests, [0, 1, 2, 3, 4].map(|number| format!("request {number}")));
    assert!(fixture.peer.handler().received.iter().all(|received| received == b"response"));
    // The listener still listens.
    fixture.connect_peer(b"one more");
    fixture.events(&mut client);
    fixture.events(&mut other);
    // The first client would claim the connection.
    assert!(other.accept(listener).is_some());
    drop((client, other));
    fixture.assert_all_freed();
}

#[test]
fn offer_without_an_answer_goes_to_another_client() {
    let mut fixture = SavedFixture::new(&small_config(), Peer::default());
    let (domain, mut client) = fixture.open_domain();
    let mut other = domain.admit(&client).unwrap();
    client.accept_explicitly();
    other.accept_explicitly();
    let listener = listen(&mut client, 1);
    fixture.connect_peer(b"");
    fixture.events(&mut client);
    assert!(client.has_offer(listener));
    fixture.replace_shard();
    other.join(listener, 1).unwrap();
    fixture.events(&mut other);
    assert!(!other.has_offer(listener));
    fixture.run(Duration::from_millis(120));
    fixture.events(&mut other);
    assert!(other.has_offer(listener) && !client.has_offer(listener), "the timer was set again");
    drop((client, other));
    fixture.assert_all_freed();
}

#[test]
fn more_connections_than_sockets_wait_for_a_free_one() {
    let channel = ChannelConfig { sockets_max: 2, ..small_config() };
    let mut fixture = SavedFixture::new(&channel, Peer::default());
    let (_domain, mut client) = fixture.open_domain();
    client.accept_explicitly();
    let listener = listen(&mut client, 8);
    (0..4).for_each(|_| _ = fixture.connect_peer(b"x"));
    fixture.run(Duration::from_millis(5));
    fixture.replace_shard();
    for round in 0..4 {
        fixture.events(&mut client);
        let conn = client.accept(listener).unwrap_or_else(|| panic!("round {round}"));
        fixture.run(Duration::from_millis(5));
        assert_eq!(read_all(&mut client, conn), b"x");
        client.abort(conn).unwrap();
        client.release(conn).unwrap();
        client.flush();
    }
    drop(client);
    fixture.assert_all_freed();
}

#[test]
fn reservations_filters_and_descriptions_stay() {
    // `ret #-1`, `ret #0`.
    let ret = |value: u32| [&6u16.to_ne_bytes()[..], &[0, 0], &value.to_ne_bytes()].concat();
    let (keep, drop_all) = (ret(u32::MAX), ret(0));
    let mut fixture = SavedFixture::new(&small_config(), Peer::default());
    let (_domain, mut client) = fixture.open_domain();
    let (_other_domain, mut other) = fixture.open_domain();
    let address: SocketAddr = "10.0.0.1:81".parse().unwrap();
    let reserved = client.reserve(address, AddressSharing::default()).unwrap();
    let options = ListenOptions::default();
    let listener = client.listen_shared("0.0.0.0:80".parse().unwrap(), options, 4, 77, None).unwrap();
    client.set_filter(SocketId::Listener(listener), Some(&keep)).unwrap();
    fixture.connect_peer(b"through");
    let conn = accepted(&fixture.events(&mut client))[0];
    fixture.replace_shard();
    assert!(other.reserve(address, AddressSharing::default()).is_err());
    assert_eq!(client.filter(SocketId::Listener(listener)), Ok(keep.clone()));
    let id = SocketId::Socket { socket: conn.index(), generation: conn.generation() };
    assert_eq!(client.filter(id), Ok(keep));
    let again = client.listen_shared("0.0.0.0:80".parse().unwrap(), options, 4, 77, None).unwrap();
    assert_eq!(again, listener, "found by its description");
    assert_eq!(read_all(&mut client, conn), b"through");
    client.set_filter(SocketId::Listener(listener), Some(&drop_all)).unwrap();
    fixture.replace_shard();
    fixture.connect_peer(b"refused");
    assert_eq!(accepted(&fixture.events(&mut client)), []);
    client.set_filter(SocketId::Listener(listener), None).unwrap();
    client.unreserve(reserved).unwrap();
    assert!(other.reserve(address, AddressSharing::default()).is_ok());
    drop((client, other));
    fixture.assert_all_freed();
}
