//! Sockets that several clients own: children and threads.

use super::*;

/// A parent and its child alternately read the same stream and write to it: each byte passes once and in
/// order.
#[test]
fn child_continues_where_its_parent_stopped() {
    let mut fixture = Fixture::new(&small_config(), Peer { echoes: true, ..Peer::default() });
    let (domain, parts) = SameThread(fixture.server.clone()).open_domain().unwrap();
    let mut parent = Client::open(parts, Box::new(domain.clone())).unwrap();
    let listener = listen(&mut parent, 4);
    fixture.connect_peer(b"first half, second half");
    let conn = accepted(&fixture.events(&mut parent))[0];
    let mut out = [0; 12];
    assert_eq!(parent.recv(conn, &mut out), Ok(12));
    assert_eq!(&out, b"first half, ");
    let mut child = domain.fork(&parent).unwrap();
    assert_eq!(child.recv(conn, &mut out), Ok(11));
    assert_eq!(&out[..11], b"second half");
    assert_eq!(parent.recv(conn, &mut out), Ok(0), "the child has read it");
    for part in 0..6 {
        let who = if part % 2 == 0 { &mut parent } else { &mut child };
        who.send(conn, &[b'0' + part]).unwrap();
    }
    fixture.run(SECOND);
    assert_eq!(fixture.peer.handler().received[0], b"012345");
    // The parent gives up everything; the child keeps the connection open.
    parent.release(conn).unwrap();
    drop(parent);
    fixture.run(SECOND);
    assert_eq!((fixture.peer.handler().close_reasons[0], fixture.peer.handler().has_fin[0]), (None, false));
    child.set_credits(listener, 4);
    fixture.connect_peer(b"to the child");
    assert_eq!(accepted(&fixture.events(&mut child)).len(), 1, "the child owns the listener, too");
    child.send(conn, b"6").unwrap();
    child.shutdown_write(conn).unwrap();
    fixture.run(SECOND);
    assert_eq!(fixture.peer.handler().received[0], b"0123456");
    assert!(fixture.peer.handler().has_fin[0]);
    drop(child);
    fixture.run(300 * SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
    assert_eq!(fixture.server.lock().unwrap().handler().domains(), 1, "only this process's domain");
}

/// A child dies while it has the lock of a stream: its parent continues as soon as the child is reaped.
#[test]
fn dead_lock_owner_does_not_block_others() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let (domain, parts) = SameThread(fixture.server.clone()).open_domain().unwrap();
    let mut parent = Client::open(parts, Box::new(domain.clone())).unwrap();
    listen(&mut parent, 4);
    fixture.connect_peer(b"something");
    let conn = accepted(&fixture.events(&mut parent))[0];
    let child = domain.fork(&parent).unwrap();
    std::mem::forget(child.lock(conn).unwrap());
    let mut out = [0; 64];
    assert_eq!(
        parent.recv(conn, &mut out),
        Err(crate::RecvError::WouldBlock),
        "the owner may only be stopped"
    );
    assert_eq!(parent.send(conn, b"x"), Err(SendError::Full));
    // Both calls failed without an event of the stack to come: the caller tries again.
    let due: Vec<_> = std::iter::from_fn(|| parent.next_event()).collect();
    assert_eq!(due, [ClientEvent::Readable { conn }, ClientEvent::Writable { conn }]);
    drop(child);
    assert_eq!(parent.recv(conn, &mut out), Ok(9));
    assert_eq!(parent.send(conn, b"x"), Ok(1));
}

/// Four threads write numbered lines through one connection, which echoes them, and read them: no line is
/// torn, lost or duplicated.
#[test]
fn threads_share_a_stream() {
    const LINES: u32 = 2000;
    let now = clock::now();
    let (server, mut peer) = shards(&small_config(), Peer { echoes: true, ..Peer::default() }, now);
    let server = Arc::new(Mutex::new(server));
    let (domain, parts) = SameThread(server.clone()).open_domain().unwrap();
    let mut client = Client::open(parts, Box::new(domain)).unwrap();
    listen(&mut client, 1);
    let turn = |peer: &mut Shard<Peer>| {
        server.lock().unwrap().poll_once(clock::now()).unwrap();
        peer.poll_once(clock::now()).unwrap();
    };
    turn(&mut peer);
    peer.with(clock::now(), |peer, cx| {
        let conn = cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).unwrap();
        peer.add(conn, b"");
    });
    let conn = loop {
        turn(&mut peer);
        if let Some(ClientEvent::Accepted { conn, .. }) = client.next_event() {
            break conn;
        }
    };
    let streams = client.streams().unwrap();
    let counts = Mutex::new(vec![0u32; 4 * LINES as usize]);
    let remaining = std::sync::atomic::AtomicU32::new(4 * LINES);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (streams, counts, remaining) = (streams.clone(), &counts, &remaining);
            scope.spawn(move || {
                let mut next = 0;
                while remaining.load(std::sync::atomic::Ordering::Relaxed) > 0 {
                    // A line is written as a whole or not at all: the buffer's size is a multiple of four
                    // bytes.
                    let line = (thread * LINES + next).to_le_bytes();
                    if next < LINES && streams.send(conn, &line) == Ok(4) {
                        next += 1;
                    }
                    let mut out = [0; 4];
                    if streams.recv(conn, &mut out) == Ok(4) {
                        counts.lock().unwrap()[u32::from_le_bytes(out) as usize] += 1;
                        remaining.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
                    }
                    streams.flush();
                }
            });
        }
        while remaining.load(std::sync::atomic::Ordering::Relaxed) > 0 {
            turn(&mut peer);
        }
    });
    assert!(counts.into_inner().unwrap().iter().all(|times| *times == 1));
}

/// A worker closes its listener while connections wait: half-open ones, those in the engine's accept queue,
/// and those that the channel has. A sibling takes them; without one they are reset.
#[test]
fn waiting_connections_move_to_a_listener_that_shares_the_address() {
    let at: SocketAddr = "0.0.0.0:80".parse().unwrap();
    // The time until the close, and the backlog, which limits what the channel takes from the engine.
    for (micros, backlog) in [(2, 128), (5000, 128), (5000, 2)] {
        for has_sibling in [true, false] {
            let shared = ListenOptions { reuse_port: true, backlog, ..ListenOptions::default() };
            let channel = ChannelConfig { sockets_max: 64, ..small_config() };
            let mut fixture = Fixture::new(&channel, Peer::default());
            let (mut old, mut new) = (fixture.client(), fixture.client());
            let listener = old.listen(at, shared, 0).unwrap();
            for _ in 0..3 {
                fixture.connect_peer(b"request");
            }
            for _ in 0..micros {
                fixture.run(Duration::from_micros(1));
            }
            if has_sibling {
                new.listen(at, shared, 16).unwrap();
            }
            old.unlisten(listener).unwrap();
            let conns = accepted(&fixture.events(&mut new));
            fixture.run(SECOND);
            let resets = fixture.peer.handler().close_reasons.iter().flatten().count();
            let expected = if has_sibling { (3, 0) } else { (0, 3) };
            assert_eq!((conns.len(), resets), expected, "after {micros} µs, backlog {backlog}");
            assert!(conns.iter().all(|conn| new.readable(*conn) == Ok(7)));
        }
    }
}
