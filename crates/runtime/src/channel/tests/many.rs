//! More sockets than a ring of doorbells has slots, and thousands of clients.

use super::*;
use crate::channel::client_memory::OFFERS_MAX;

/// Returns a fixture whose peer can open `count` connections, and a client that has accepted them.
fn with_connections(count: usize, peer: Peer) -> (Fixture, Client, Vec<Conn>) {
    let channel = ChannelConfig {
        sockets_max: 4096,
        large_buffers_max: 0,
        socket_buffer_bytes: 4096,
        ..small_config()
    };
    let mut fixture = Fixture::new(&channel, peer);
    let mut client = fixture.client();
    let mut conns = Vec::new();
    listen(&mut client, OFFERS_MAX as u32);
    while conns.len() < count {
        for _ in 0..OFFERS_MAX.min(count - conns.len()) {
            fixture.connect_peer(b"");
        }
        conns.extend(accepted(&fixture.events(&mut client)));
        client.flush();
    }
    (fixture, client, conns)
}

/// A ring for 4,096 sockets has 1,024 slots. What does not fit is found, in both directions.
#[test]
fn overflowing_rings_lose_no_event() {
    const COUNT: usize = 3000;
    let (mut fixture, mut client, conns) = with_connections(COUNT, Peer { echoes: true, ..Peer::default() });
    let full_before = fixture.stats().doorbell_rings_full;
    assert_eq!(full_before, 0, "the sockets were opened a few at a time");
    for round in 0..3_u8 {
        // The stack learns of all of them at once, and the client of all answers at once.
        for (at, conn) in conns.iter().enumerate() {
            assert_eq!(client.send(*conn, &[round, at as u8]), Ok(2));
        }
        fixture.run(Duration::from_millis(50));
        // At least once in each direction and round.
        assert!(fixture.stats().doorbell_rings_full >= 2 * (u64::from(round) + 1), "{:?}", fixture.stats());
        let mut readable = vec![0; COUNT];
        let index_of: HashMap<Conn, usize> = conns.iter().copied().zip(0..).collect();
        while let Some(event) = client.next_event() {
            if let ClientEvent::Readable { conn } = event {
                readable[index_of[&conn]] += 1;
            }
        }
        assert!(readable.iter().all(|count| *count == 1), "round {round}: each is reported once");
        for (at, conn) in conns.iter().enumerate() {
            let mut out = [0; 4];
            assert_eq!(client.recv(*conn, &mut out), Ok(2));
            assert_eq!(out[..2], [round, at as u8]);
        }
    }
    // Nothing is left that keeps either side awake.
    fixture.run(Duration::from_millis(5));
    assert!(client.before_sleep());
    client.after_sleep(false);
    conns.iter().for_each(|conn| client.release(*conn).unwrap());
    fixture.run(300 * SECOND);
    assert_eq!(fixture.sockets_in_use(), 0, "all releases arrived");
    let full = fixture.stats().doorbell_rings_full;
    drop(client);
    fixture.run(SECOND);
    assert_eq!(fixture.stats().doorbell_rings_full, full, "the counter stays");
}

/// A client that overflows its ring and dies leaves nothing behind.
#[test]
fn client_that_dies_with_a_full_ring_releases_everything() {
    let (mut fixture, mut client, conns) = with_connections(2000, Peer::default());
    for conn in &conns {
        client.send(*conn, b"last words").unwrap();
        client.release(*conn).unwrap();
    }
    drop(client);
    fixture.run(300 * SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
    let received = &fixture.peer.handler().received;
    assert!(received.iter().all(|bytes| bytes == b"last words"), "all was sent before the close");
}

fn attach_many(fixture: &Fixture, count: usize) -> Vec<Client> {
    (0..count).map(|_| fixture.client()).collect()
}

/// Clients with numbers beyond 64 and beyond 4,096 get connections in turn, and those without credit none.
#[test]
fn thousands_of_workers_share_a_listener() {
    const CLIENTS: usize = 5000;
    let channel = ChannelConfig { clients_max: CLIENTS as u32, sockets_max: 64, ..small_config() };
    let mut fixture = Fixture::new(&channel, Peer::default());
    let mut clients = attach_many(&fixture, CLIENTS);
    let listener = listen(&mut clients[0], 0);
    for client in &mut clients[1..] {
        client.join(listener, 0).unwrap();
    }
    let willing = [3, 70, 4095, 4096, 4999];
    for number in willing {
        clients[number].set_credits(listener, 2);
        clients[number].flush();
    }
    for round in 0..2 {
        for _ in willing {
            fixture.connect_peer(b"hello");
        }
        // The peer sends.
        fixture.run(Duration::from_micros(1));
        fixture.run(Duration::from_millis(5));
        let mut by_client = vec![0; CLIENTS];
        for (count, client) in by_client.iter_mut().zip(&mut clients) {
            let events: Vec<ClientEvent> = core::iter::from_fn(|| client.next_event()).collect();
            *count = accepted(&events).len();
            client.flush();
        }
        let got: Vec<(usize, usize)> = (0..).zip(by_client).filter(|(_, count)| *count > 0).collect();
        assert_eq!(got, willing.map(|number| (number, 1)), "round {round}");
        fixture.run(Duration::from_millis(5));
    }
    assert_eq!(fixture.sockets_in_use(), 2 * willing.len());
    drop(clients);
    fixture.run(300 * SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
}

/// A turn looks at the clients that have notified, not at all that are attached.
#[test]
fn idle_clients_are_not_visited() {
    let channel = ChannelConfig { clients_max: 2000, ..small_config() };
    let mut fixture = Fixture::new(&channel, Peer::default());
    let mut clients = attach_many(&fixture, 2000);
    fixture.run(Duration::from_millis(5));
    for number in [1999, 64] {
        clients[number].set_credits(0, 1);
    }
    let visited = || fixture.server.lock().unwrap().handler_mut().clients_of_next_turn();
    assert_eq!(visited(), [64, 1999]);
    assert!(visited().is_empty());
}

/// The memory of a client that owns a few sockets does not depend on how many there may be.
#[test]
fn client_takes_few_pages() {
    for sockets_max in [1 << 10, 1 << 20] {
        let channel = ChannelConfig { sockets_max, ..small_config() };
        let mut fixture = Fixture::new(&channel, Peer::default());
        let parts = fixture.server.lock().unwrap().handler_mut().attach_process().unwrap();
        let memory = parts.memory.try_clone().unwrap();
        let mut client = Client::open(parts, Box::new(SameThread(fixture.server.clone()))).unwrap();
        listen(&mut client, 4);
        fixture.connect_peer(b"request");
        let conn = accepted(&fixture.events(&mut client))[0];
        client.send(conn, b"response").unwrap();
        fixture.run(Duration::from_millis(5));
        let pages = rustix::fs::fstat(&memory).unwrap().st_blocks / 8;
        assert!((1..=6).contains(&pages), "{pages} pages for up to {sockets_max} sockets");
    }
}

/// A client with many sockets forks: the child owns what the parent owned, and each closes its own.
#[test]
fn many_sockets_are_inherited_and_released() {
    let mut fixture = Fixture::new(
        &ChannelConfig { sockets_max: 512, clients_max: 300, ..small_config() },
        Peer::default(),
    );
    let (domain, parts) = SameThread(fixture.server.clone()).open_domain().unwrap();
    let mut parent = Client::open(parts, Box::new(domain.clone())).unwrap();
    listen(&mut parent, 32);
    let mut conns = Vec::new();
    while conns.len() < 256 {
        for _ in 0..32 {
            fixture.connect_peer(b"");
        }
        conns.extend(accepted(&fixture.events(&mut parent)));
        parent.flush();
    }
    fixture.run(Duration::from_millis(5));
    // As a server that forks for each connection.
    let mut children: Vec<Client> = conns
        .iter()
        .map(|conn| {
            let mut child = domain.fork(&parent).unwrap();
            let others: Vec<Conn> = child.conns().filter(|other| other != conn).collect();
            others.into_iter().for_each(|other| child.release(other).unwrap());
            parent.release(*conn).unwrap();
            child
        })
        .collect();
    fixture.run(SECOND);
    assert_eq!(fixture.sockets_in_use(), conns.len(), "each child has its own connection");
    let closed = |fixture: &Fixture| fixture.peer.handler().has_fin.iter().filter(|fin| **fin).count();
    assert_eq!(closed(&fixture), 0);
    children.drain(..100);
    fixture.run(SECOND);
    assert_eq!(closed(&fixture), 100);
    drop((children, parent));
    fixture.run(300 * SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
}
