//! Large buffers: which sockets get one, when, and how sockets without one continue.

use super::*;
use ginnel_stack::options::TcpOption;

const OWN_BYTES: usize = 4096;
const LARGE_BYTES: usize = 1 << 16;

fn setup(large_buffers_max: u32) -> (Fixture, Client) {
    let config =
        ChannelConfig { large_buffer_bytes: LARGE_BYTES as u32, large_buffers_max, ..small_config() };
    let fixture = Fixture::new(&config, Peer { listens: true, ..Peer::default() });
    let client = fixture.client();
    (fixture, client)
}

fn connect(fixture: &mut Fixture, client: &mut Client) -> Conn {
    let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    fixture.events(client);
    conn
}

/// Writes as much as there is space for, twice. Returns how much that was each time.
fn fill(fixture: &mut Fixture, client: &mut Client, conn: Conn) -> [usize; 2] {
    [(); 2].map(|()| {
        let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        let count = client.send(conn, &bytes).unwrap();
        fixture.events(client);
        count
    })
}

fn gauge(fixture: &Fixture, name: &str) -> u64 {
    let mut found = None;
    let mut report = |_, reported: &'static str, value| {
        if reported == name {
            found = Some(value);
        }
    };
    fixture.server.lock().unwrap().handler().report_counters(&mut report);
    found.unwrap()
}

// limit: channel.large_buffer_bytes
#[test]
fn writer_gets_large_buffer_after_filling_its_own() {
    let (mut fixture, mut client) = setup(4);
    let conn = connect(&mut fixture, &mut client);
    assert_eq!(client.send(conn, &[1; OWN_BYTES - 1]), Ok(OWN_BYTES - 1));
    fixture.events(&mut client);
    assert_eq!(gauge(&fixture, "channel.large_buffers"), 0, "the own buffer was never full");
    assert_eq!(fill(&mut fixture, &mut client, conn), [OWN_BYTES, LARGE_BYTES]);
    assert_eq!(
        (gauge(&fixture, "channel.large_buffers"), gauge(&fixture, "channel.large_buffers_limit")),
        (1, 4)
    );
    let received = &fixture.peer.handler().received[0];
    assert_eq!(received.len(), OWN_BYTES - 1 + OWN_BYTES + LARGE_BYTES);
    assert!(
        (0..LARGE_BYTES).all(|i| received[2 * OWN_BYTES - 1 + i] == (i % 251) as u8),
        "bytes arrive in order"
    );
    client.release(conn).unwrap();
    fixture.run(300 * SECOND);
    assert_eq!((fixture.sockets_in_use(), gauge(&fixture, "channel.large_buffers")), (0, 0));
}

#[test]
fn reader_gets_large_buffer_after_draining_its_own() {
    let (mut fixture, mut client) = setup(4);
    listen(&mut client, 1);
    let text: Vec<u8> = (0..1_000_000u32).map(|i| (i % 253) as u8).collect();
    fixture.connect_peer(&text);
    let conn = accepted(&fixture.events(&mut client))[0];
    assert_eq!(client.readable(conn), Ok(OWN_BYTES));
    let (mut got, mut steps) = (Vec::<u8>::new(), Vec::new());
    while got.len() < text.len() {
        let mut out = vec![0; 100_000];
        let count = client.recv(conn, &mut out).unwrap();
        assert!(count > 0, "after {} bytes", got.len());
        got.extend(&out[..count]);
        steps.push(count);
        fixture.events(&mut client);
    }
    assert!(got == text);
    assert_eq!(steps[..3], [OWN_BYTES, LARGE_BYTES, LARGE_BYTES]);
    assert_eq!(fixture.stats().violations, 0);
}

// limit: channel.large_buffers_max
#[test]
fn large_buffers_are_limited_and_others_continue() {
    let (mut fixture, mut client) = setup(1);
    let [first, second] = [(); 2].map(|()| connect(&mut fixture, &mut client));
    assert_eq!(fill(&mut fixture, &mut client, first), [OWN_BYTES, LARGE_BYTES]);
    assert_eq!(fill(&mut fixture, &mut client, second), [OWN_BYTES, OWN_BYTES]);
    assert!(fixture.stats().large_buffers_refused >= 2, "{:?}", fixture.stats());
    assert_eq!(fixture.peer.handler().received[1].len(), 2 * OWN_BYTES, "its bytes are delivered");
    client.abort(first).unwrap();
    client.release(first).unwrap();
    fixture.run(SECOND);
    // The buffer is full again, and this time a large one is free.
    assert_eq!(fill(&mut fixture, &mut client, second), [OWN_BYTES, LARGE_BYTES]);
    let third = connect(&mut fixture, &mut client);
    assert_eq!(
        fill(&mut fixture, &mut client, third),
        [OWN_BYTES, OWN_BYTES],
        "a new socket has its own buffer"
    );
}

#[test]
fn small_buffer_option_prevents_large_buffer() {
    let (mut fixture, mut client) = setup(4);
    let conn = connect(&mut fixture, &mut client);
    client.set_option(conn, TcpOption::SendBuffer(LARGE_BYTES as u32 - 1)).unwrap();
    assert_eq!(fill(&mut fixture, &mut client, conn), [OWN_BYTES, OWN_BYTES]);
    client.set_option(conn, TcpOption::SendBuffer(LARGE_BYTES as u32)).unwrap();
    assert_eq!(fill(&mut fixture, &mut client, conn), [OWN_BYTES, LARGE_BYTES]);
    assert_eq!(fixture.stats().large_buffers_refused, 0);
}

/// Requests made after the bytes wait, too: FIN, and the end of the connection.
// limit: bytes of a socket in one turn
#[test]
fn large_write_is_taken_in_chunks_before_fin() {
    const BYTES: usize = 600_000;
    let config = ChannelConfig { large_buffer_bytes: 1 << 20, ..small_config() };
    let mut fixture = Fixture::new(&config, Peer { listens: true, ..Peer::default() });
    let mut client = fixture.client();
    let conn = connect(&mut fixture, &mut client);
    assert_eq!(client.send(conn, &[0; 2 * OWN_BYTES]), Ok(OWN_BYTES));
    fixture.events(&mut client);
    let bytes: Vec<u8> = (0..BYTES as u32).map(|i| (i % 249) as u8).collect();
    assert_eq!(client.send(conn, &bytes), Ok(BYTES));
    client.release(conn).unwrap();
    let taken = |fixture: &mut Fixture| {
        let before = fixture.server.lock().unwrap().handler().stats().doorbells;
        let turn = fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
        (turn.work > 0, fixture.server.lock().unwrap().handler().stats().doorbells - before)
    };
    assert_eq!(taken(&mut fixture), (true, 1));
    // There is no notification any more, and the transfer continues nevertheless.
    assert_eq!(taken(&mut fixture), (true, 0));
    assert!(!fixture.server.lock().unwrap().handler_mut().before_sleep(), "more work is queued");
    fixture.run(SECOND);
    let peer = fixture.peer.handler();
    assert_eq!((peer.received[0].len(), peer.has_fin[0]), (OWN_BYTES + BYTES, true));
    assert!(peer.received[0][OWN_BYTES..] == bytes);
    assert_eq!((fixture.sockets_in_use(), gauge(&fixture, "channel.large_buffers")), (0, 0));
}
