//! Urgent data.

use super::common::{ACK, FIN, closed_count, config, established};
use ginnel_stack::device::{RxBurst, RxFrame};
use ginnel_stack::error::RecvError;
use ginnel_stack::events::Event;
use ginnel_stack::handle::PortId;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};

#[test]
fn urgent_last_byte_does_not_delay_the_end() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1, 1, 60_000, 4, b"last");
    p.deliver_frame(&urgent);
    p.deliver(FIN | ACK, 5, 1, &[]);
    p.stack.shutdown_write(conn).unwrap();
    p.flush();
    p.deliver(ACK, 6, 2, &[]);
    let mut shown = [0; 8];
    assert_eq!(p.stack.recv(conn, &mut shown), Ok(3));
    assert_eq!(p.stack.recv(conn, &mut shown), Ok(0));
    p.flush();
    assert_eq!(closed_count(&p), 1);
}

#[test]
fn urgent_byte_before_fin_is_excluded() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1, 1, 60_000, 3, b"abcd");
    p.deliver_frame(&urgent);
    p.deliver(FIN | ACK, 5, 1, &[]);
    let mut stream = Vec::new();
    let mut shown = [0; 8];
    while let Ok(n @ 1..) = p.stack.recv(conn, &mut shown) {
        stream.extend_from_slice(&shown[..n]);
    }
    assert_eq!(stream, b"abd");
}

/// The runtime peeks at the data that it shows to handlers, and skips what they have consumed.
#[test]
fn peek_and_skip_exclude_the_urgent_byte() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1, 1, 60_000, 3, b"abcdef");
    p.deliver_frame(&urgent);
    let mut shown = [0; 8];
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(2));
    assert_eq!(&shown[..2], b"ab");
    p.stack.skip(conn, 6).unwrap();
    assert_eq!(p.stack.readable(conn), 4, "skip stops before the urgent byte");
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(3));
    assert_eq!(&shown[..3], b"def");
    assert_eq!(p.stack.recv_urgent(conn), Ok(b'c'));
    p.stack.skip(conn, 3).unwrap();
    assert_eq!(p.stack.peek(conn, &mut shown), Err(RecvError::WouldBlock));
    assert_eq!(p.stack.urgent_mark(conn), None);
}

#[test]
fn peek_skips_urgent_byte_at_chunk_end() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    p.deliver(ACK, 1, 1, &[1; 1447]);
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1448, 1, 60_000, 601, &[2; 1000]);
    p.deliver_frame(&urgent);
    let mut shown = [0; 4096];
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(2047));
    p.stack.skip(conn, 2047).unwrap();
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(399));
    p.stack.skip(conn, 399).unwrap();
    assert_eq!(p.stack.readable(conn), 0);
}

#[test]
fn data_after_urgent_byte_is_delivered_in_place() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let urgent = p.custom_segment(ACK | TcpFlags::URG, 1, 1, 60_000, 3, b"abcdef");
    p.deliver_frame(&urgent);
    assert_eq!(p.read, b"abdef");
    p.events.clear();
    p.deliver(ACK, 7, 1, b"ghi");
    assert!(matches!(p.events[..], [Event::Data { conn: c, .. }] if c == conn), "{:?}", p.events);
    assert_eq!(p.read, b"abdefghi");
}

#[test]
fn urgent_mark_counts_bytes_in_the_burst() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let bytes = p.segment(ACK, 1, 1, b"abc", &TcpOptions::default());
    let announced = p.custom_segment(ACK | TcpFlags::URG, 4, 1, 60_000, 1, &[]);
    let mut burst = RxBurst::new();
    for bytes in [&bytes, &announced] {
        burst.push(RxFrame::new(bytes));
    }
    p.stack.receive(p.now, PortId(0), &burst);
    assert_eq!(p.stack.urgent_mark(conn).map(|mark| mark.ahead), Some(3));
    p.stack.finish_burst(&burst);
    assert_eq!(p.stack.urgent_mark(conn).map(|mark| mark.ahead), Some(3));
}
