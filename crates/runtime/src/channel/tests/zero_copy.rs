//! Bytes that are sent directly from the client's buffer.

use super::*;

const OWN_BYTES: usize = 4096;
const LARGE_BYTES: usize = 1 << 18;
/// Bytes that one turn takes of a socket.
const CHUNK_BYTES: usize = 128 << 10;

fn bytes(count: usize, step: usize) -> Vec<u8> {
    (0..count).map(|i| (i * step % 251) as u8).collect()
}

/// Returns a client with a connection whose large buffer is empty, and the bytes that were sent before.
fn setup() -> (Fixture, Client, Conn, Vec<u8>) {
    let config = ChannelConfig { large_buffer_bytes: LARGE_BYTES as u32, ..small_config() };
    let mut fixture = Fixture::new(&config, Peer { listens: true, ..Peer::default() });
    let mut client = fixture.client();
    let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    fixture.events(&mut client);
    let first = bytes(OWN_BYTES, 3);
    assert_eq!(client.send(conn, &first), Ok(OWN_BYTES));
    assert_eq!(client.send(conn, b"blocked"), Ok(0));
    fixture.events(&mut client);
    assert_eq!(client.status(conn).unwrap().send_space, LARGE_BYTES);
    assert_eq!(fixture.stats().zero_copy_bytes, 0, "the own buffer is copied");
    (fixture, client, conn, first)
}

/// Runs turns of the stack alone, without the peer.
fn run_stack_alone(fixture: &mut Fixture, turns: usize) {
    for _ in 0..turns {
        fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
    }
}

#[test]
fn lent_bytes_occupy_space_until_acknowledged() {
    let (mut fixture, mut client, conn, mut all) = setup();
    let sent = bytes(CHUNK_BYTES / 2, 7);
    assert_eq!(client.send(conn, &sent), Ok(sent.len()));
    all.extend(&sent);
    assert_eq!(client.status(conn).unwrap().unsent, sent.len());
    run_stack_alone(&mut fixture, 3);
    let status = client.status(conn).unwrap();
    assert_eq!(
        (status.send_space, status.occupied, status.unsent),
        (LARGE_BYTES - sent.len(), sent.len(), 0)
    );
    assert_eq!(client.info(conn).unwrap().send_queued as usize, sent.len());
    assert_eq!(
        (fixture.stats().zero_copy_bytes, fixture.stats().zero_copy_bytes_copied),
        (sent.len() as u64, 0)
    );
    fixture.events(&mut client);
    let status = client.status(conn).unwrap();
    assert_eq!((status.send_space, status.unsent), (LARGE_BYTES, 0));
    assert!(fixture.peer.handler().received[0] == all);
}

#[test]
fn small_writes_are_copied_in_order() {
    let (mut fixture, mut client, conn, mut all) = setup();
    for round in 0..20 {
        for count in [CHUNK_BYTES / 4 + round, 100, 1, CHUNK_BYTES / 3] {
            let sent = bytes(count, round + count);
            let taken = client.send(conn, &sent).unwrap();
            all.extend(&sent[..taken]);
            run_stack_alone(&mut fixture, 1);
        }
        fixture.events(&mut client);
    }
    assert_eq!(fixture.peer.handler().received[0].len(), all.len());
    assert!(fixture.peer.handler().received[0] == all);
    let lent = fixture.stats().zero_copy_bytes;
    assert!(lent > 0 && lent < all.len() as u64, "{lent} of {}", all.len());
    assert_eq!(client.status(conn).unwrap().send_space, LARGE_BYTES, "all space was freed");
}

#[test]
fn waiting_writer_gets_half_of_the_buffer() {
    let (mut fixture, mut client, conn, mut all) = setup();
    let first = bytes(LARGE_BYTES, 11);
    assert_eq!(client.send(conn, &first), Ok(LARGE_BYTES));
    all.extend(&first);
    run_stack_alone(&mut fixture, 10);
    assert_eq!(client.status(conn).unwrap().send_space, 0, "no client wants space");
    assert_eq!(client.send(conn, b"more"), Ok(0));
    run_stack_alone(&mut fixture, 1);
    assert_eq!(client.status(conn).unwrap().send_space, 0, "while there is other work");
    run_stack_alone(&mut fixture, 2);
    assert_eq!(client.status(conn).unwrap().send_space, LARGE_BYTES / 2);
    assert_eq!(fixture.stats().zero_copy_bytes_copied, LARGE_BYTES as u64 / 2);
    assert!(client.next_event() == Some(ClientEvent::Writable { conn }), "the writer is notified");
    // The client writes where unacknowledged bytes were.
    for _ in 0..8 {
        let more = bytes(LARGE_BYTES, 13);
        let count = client.send(conn, &more).unwrap();
        assert!(count > 0, "the writer makes progress");
        all.extend(&more[..count]);
        run_stack_alone(&mut fixture, 10);
    }
    let queued = client.info(conn).unwrap().send_queued as usize;
    assert_eq!(queued + client.status(conn).unwrap().unsent, all.len() - OWN_BYTES);
    fixture.run(20 * SECOND);
    assert_eq!(fixture.peer.handler().received[0].len(), all.len());
    assert!(fixture.peer.handler().received[0] == all);
    assert_eq!(client.status(conn).unwrap().send_space, LARGE_BYTES);
}

#[test]
fn lent_bytes_are_sent_after_the_client_detached() {
    let (mut fixture, mut client, conn, mut all) = setup();
    let sent = bytes(LARGE_BYTES, 17);
    assert_eq!(client.send(conn, &sent), Ok(LARGE_BYTES));
    all.extend(&sent);
    run_stack_alone(&mut fixture, 10);
    client.release(conn).unwrap();
    run_stack_alone(&mut fixture, 3);
    drop(client);
    run_stack_alone(&mut fixture, 3);
    assert_eq!(fixture.sockets_in_use(), 1);
    fixture.run(300 * SECOND);
    assert!(fixture.peer.handler().received[0] == all && fixture.peer.handler().has_fin[0]);
    assert_eq!((fixture.sockets_in_use(), fixture.stats().zero_copy_bytes_copied), (0, 0));
}

#[test]
fn changes_to_lent_bytes_harm_nobody_else() {
    let (mut fixture, mut client, conn, all) = setup();
    assert_eq!(client.send(conn, &vec![1; CHUNK_BYTES]), Ok(CHUNK_BYTES));
    run_stack_alone(&mut fixture, 2);
    // The client claims that its later bytes are in another buffer, which may not exist.
    for number in [2, 3, 200, 1000, u32::MAX] {
        client.forge_ring(conn, number);
        client.send(conn, &vec![2; CHUNK_BYTES / 4]).ok();
        run_stack_alone(&mut fixture, 2);
        fixture.run(Duration::from_millis(10));
    }
    let received = &fixture.peer.handler().received[0];
    assert!(received.len() >= all.len() + CHUNK_BYTES && received[..OWN_BYTES] == all);
    client.abort(conn).ok();
    client.release(conn).unwrap();
    fixture.run(SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
}

#[test]
fn waiting_writer_gets_space_despite_other_work() {
    let (mut fixture, mut client, conn, _) = setup();
    let other = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    fixture.events(&mut client);
    assert_eq!(client.send(conn, &bytes(LARGE_BYTES, 5)), Ok(LARGE_BYTES));
    assert_eq!(client.send(conn, b"more"), Ok(0));
    let turns = (1..100).find(|_| {
        assert_eq!(client.send(other, b"x"), Ok(1));
        run_stack_alone(&mut fixture, 1);
        client.status(conn).unwrap().send_space > 0
    });
    assert!(turns.is_some_and(|turns| (10..40).contains(&turns)), "{turns:?}");
}
