//! Limits of unsent bytes (`TCP_NOTSENT_LOWAT`), and ends of records (`MSG_EOR`).

use super::*;
use crate::TcpOption;

const LOW_WATER_MARK: u32 = 2000;

fn setup(option: TcpOption) -> (Fixture, Client, Conn) {
    let mut fixture = Fixture::new(&small_config(), Peer { listens: true, ..Peer::default() });
    let mut client = fixture.client();
    let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    fixture.events(&mut client);
    client.set_option(conn, option).unwrap();
    fixture.events(&mut client);
    (fixture, client, conn)
}

/// Runs turns of the stack alone, without the peer.
fn run_stack_alone(fixture: &mut Fixture, turns: usize) {
    for _ in 0..turns {
        fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
    }
}

#[test]
fn writer_is_notified_below_the_low_water_mark() {
    let (mut fixture, mut client, conn) = setup(TcpOption::NotSentLowat(LOW_WATER_MARK));
    let mut all = Vec::new();
    // More than the initial congestion window.
    while client.not_sent(conn).unwrap() < LOW_WATER_MARK as usize {
        assert_eq!(client.send(conn, &[7; 1000]), Ok(1000));
        all.extend([7; 1000]);
        run_stack_alone(&mut fixture, 2);
    }
    let info = client.info(conn).unwrap();
    assert_eq!(client.not_sent(conn), Ok(info.notsent_bytes as usize));
    assert!(info.unacked >= 10);
    let sendable = client.sendable_within(conn, 1 << 20, LOW_WATER_MARK, u32::MAX).unwrap();
    assert!(sendable < 1 << 16, "at most what the last buffer takes: {sendable}");
    assert_eq!(client.sendable_within(conn, 1 << 20, u32::MAX, u32::MAX), Ok(1 << 20));
    assert_eq!(client.await_send_space(conn, 1), Ok(true), "there is space in the buffer");
    run_stack_alone(&mut fixture, 3);
    assert_eq!(client.next_event(), None, "but too many bytes are unsent");
    assert!(fixture.events(&mut client).contains(&ClientEvent::Writable { conn }));
    assert_eq!(client.not_sent(conn), Ok(0));
    assert!(fixture.peer.handler().received[0] == all);
}

/// No other event follows: all bytes were acknowledged.
#[test]
fn low_water_mark_applies_to_earlier_writes() {
    let (mut fixture, mut client, conn) = setup(TcpOption::NoDelay(true));
    assert_eq!(client.send(conn, &[7; 1000]), Ok(1000));
    fixture.events(&mut client);
    client.set_option(conn, TcpOption::NotSentLowat(1)).unwrap();
    assert_eq!(
        (client.not_sent(conn), client.await_send_space(conn, 1)),
        (Ok(1000), Ok(true)),
        "not published yet"
    );
    assert!(fixture.events(&mut client).contains(&ClientEvent::Writable { conn }));
    assert_eq!(client.not_sent(conn), Ok(0));
    // Likewise when the limit is removed.
    client.set_option(conn, TcpOption::NotSentLowat(0)).unwrap();
    assert_eq!(client.await_send_space(conn, 1), Ok(true));
    assert!(fixture.events(&mut client).contains(&ClientEvent::Writable { conn }));
}

#[test]
fn sent_position_is_published_only_on_request() {
    let (mut fixture, mut client, conn) = setup(TcpOption::NotSentLowat(0));
    assert_eq!(client.send(conn, &[7; 1000]), Ok(1000));
    fixture.events(&mut client);
    assert_eq!(client.not_sent(conn), Ok(1000));
    assert_eq!(client.info(conn).unwrap().notsent_bytes, 0);
}

#[test]
fn records_written_at_once_share_no_segment() {
    let (mut fixture, mut client, conn) = setup(TcpOption::NoDelay(true));
    for text in [b"first", b"again", b"third"] {
        assert_eq!(client.send(conn, text), Ok(5));
        client.end_record(conn).unwrap();
    }
    assert_eq!(client.send(conn, b"and the rest"), Ok(12));
    run_stack_alone(&mut fixture, 2);
    assert_eq!(client.info(conn).unwrap().unacked, 4);
    fixture.events(&mut client);
    assert_eq!(fixture.peer.handler().received[0], b"firstagainthirdand the rest");
}

#[test]
fn invalid_record_end_is_harmless() {
    let (mut fixture, mut client, conn) = setup(TcpOption::NoDelay(true));
    for end in [u64::MAX, 1 << 40, 3] {
        client.region.socket(conn.index()).record_end.store(end, core::sync::atomic::Ordering::Relaxed);
        assert_eq!(client.send(conn, b"text"), Ok(4));
        fixture.events(&mut client);
    }
    assert_eq!(fixture.peer.handler().received[0], b"texttexttext");
}
