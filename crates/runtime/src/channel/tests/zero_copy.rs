//! Bytes that are sent from where a client has written them.

use super::*;

const OWN: usize = 4096;
const LARGE: usize = 1 << 18;
/// What is taken of a socket in a turn.
const PORTION: usize = 128 << 10;

fn bytes(count: usize, step: usize) -> Vec<u8> {
    (0..count).map(|i| (i * step % 251) as u8).collect()
}

/// A client with a connection that has a large buffer, in which nothing lies, and what was sent already.
fn rig() -> (Fixture, Client, Conn, Vec<u8>) {
    let config = ChannelConfig { large_buffer_bytes: LARGE as u32, ..small_config() };
    let mut rig = Fixture::new(&config, Peer { listens: true, ..Peer::default() });
    let mut client = rig.client();
    let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    rig.events(&mut client);
    let first = bytes(OWN, 3);
    assert_eq!(client.send(conn, &first), Ok(OWN));
    assert_eq!(client.send(conn, b"blocked"), Ok(0));
    rig.events(&mut client);
    assert_eq!(client.status(conn).unwrap().send_space, LARGE);
    assert_eq!(rig.stats().zero_copy_bytes, 0, "its own buffer is copied");
    (rig, client, conn, first)
}

/// Turns of the stack, while the peer hears nothing and says nothing.
fn alone(rig: &mut Fixture, turns: usize) {
    for _ in 0..turns {
        rig.server.lock().unwrap().poll_once(rig.now).unwrap();
    }
}

#[test]
fn lent_bytes_occupy_space_until_acknowledged() {
    let (mut rig, mut client, conn, mut all) = rig();
    let sent = bytes(PORTION / 2, 7);
    assert_eq!(client.send(conn, &sent), Ok(sent.len()));
    all.extend(&sent);
    assert_eq!(client.status(conn).unwrap().unsent, sent.len());
    alone(&mut rig, 3);
    let status = client.status(conn).unwrap();
    assert_eq!((status.send_space, status.occupied, status.unsent), (LARGE - sent.len(), sent.len(), 0));
    assert_eq!(client.info(conn).unwrap().send_queued as usize, sent.len());
    assert_eq!((rig.stats().zero_copy_bytes, rig.stats().zero_copy_bytes_copied), (sent.len() as u64, 0));
    rig.events(&mut client);
    let status = client.status(conn).unwrap();
    assert_eq!((status.send_space, status.unsent), (LARGE, 0));
    assert!(rig.peer.handler().received[0] == all);
}

#[test]
fn small_writes_are_copied_in_order() {
    let (mut rig, mut client, conn, mut all) = rig();
    for round in 0..20 {
        for count in [PORTION / 4 + round, 100, 1, PORTION / 3] {
            let sent = bytes(count, round + count);
            let taken = client.send(conn, &sent).unwrap();
            all.extend(&sent[..taken]);
            alone(&mut rig, 1);
        }
        rig.events(&mut client);
    }
    assert_eq!(rig.peer.handler().received[0].len(), all.len());
    assert!(rig.peer.handler().received[0] == all);
    let lent = rig.stats().zero_copy_bytes;
    assert!(lent > 0 && lent < all.len() as u64, "{lent} of {}", all.len());
    assert_eq!(client.status(conn).unwrap().send_space, LARGE, "all was given back");
}

#[test]
fn waiting_writer_gets_half_of_the_buffer() {
    let (mut rig, mut client, conn, mut all) = rig();
    let first = bytes(LARGE, 11);
    assert_eq!(client.send(conn, &first), Ok(LARGE));
    all.extend(&first);
    alone(&mut rig, 10);
    assert_eq!(client.status(conn).unwrap().send_space, 0, "nobody wants any");
    assert_eq!(client.send(conn, b"more"), Ok(0));
    alone(&mut rig, 1);
    assert_eq!(client.status(conn).unwrap().send_space, 0, "as long as there is something to do");
    alone(&mut rig, 2);
    assert_eq!(client.status(conn).unwrap().send_space, LARGE / 2);
    assert_eq!(rig.stats().zero_copy_bytes_copied, LARGE as u64 / 2);
    assert!(client.next_event() == Some(ClientEvent::Writable { conn }), "it is told");
    // It writes where bytes lay that are not acknowledged.
    for _ in 0..8 {
        let more = bytes(LARGE, 13);
        let count = client.send(conn, &more).unwrap();
        assert!(count > 0, "it goes on and on");
        all.extend(&more[..count]);
        alone(&mut rig, 10);
    }
    let queued = client.info(conn).unwrap().send_queued as usize;
    assert_eq!(queued + client.status(conn).unwrap().unsent, all.len() - OWN);
    rig.run(20 * SECOND);
    assert_eq!(rig.peer.handler().received[0].len(), all.len());
    assert!(rig.peer.handler().received[0] == all);
    assert_eq!(client.status(conn).unwrap().send_space, LARGE);
}

#[test]
fn lent_bytes_are_sent_after_the_client_detached() {
    let (mut rig, mut client, conn, mut all) = rig();
    let sent = bytes(LARGE, 17);
    assert_eq!(client.send(conn, &sent), Ok(LARGE));
    all.extend(&sent);
    alone(&mut rig, 10);
    client.release(conn).unwrap();
    alone(&mut rig, 3);
    drop(client);
    alone(&mut rig, 3);
    assert_eq!(rig.sockets_in_use(), 1);
    rig.run(300 * SECOND);
    assert!(rig.peer.handler().received[0] == all && rig.peer.handler().has_fin[0]);
    assert_eq!((rig.sockets_in_use(), rig.stats().zero_copy_bytes_copied), (0, 0));
}

#[test]
fn changes_to_lent_bytes_harm_nobody_else() {
    let (mut rig, mut client, conn, all) = rig();
    assert_eq!(client.send(conn, &vec![1; PORTION]), Ok(PORTION));
    alone(&mut rig, 2);
    // It says that another buffer, or none that there is, holds what it writes from now on.
    for number in [2, 3, 200, 1000, u32::MAX] {
        client.forge_ring(conn, number);
        client.send(conn, &vec![2; PORTION / 4]).ok();
        alone(&mut rig, 2);
        rig.run(Duration::from_millis(10));
    }
    let received = &rig.peer.handler().received[0];
    assert!(received.len() >= all.len() + PORTION && received[..OWN] == all);
    client.abort(conn).ok();
    client.release(conn).unwrap();
    rig.run(SECOND);
    assert_eq!(rig.sockets_in_use(), 0);
}

#[test]
fn waiting_writer_gets_space_despite_other_work() {
    let (mut rig, mut client, conn, _) = rig();
    let other = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    rig.events(&mut client);
    assert_eq!(client.send(conn, &bytes(LARGE, 5)), Ok(LARGE));
    assert_eq!(client.send(conn, b"more"), Ok(0));
    let turns = (1..100).find(|_| {
        assert_eq!(client.send(other, b"x"), Ok(1));
        alone(&mut rig, 1);
        client.status(conn).unwrap().send_space > 0
    });
    assert!(turns.is_some_and(|turns| (10..40).contains(&turns)), "{turns:?}");
}
