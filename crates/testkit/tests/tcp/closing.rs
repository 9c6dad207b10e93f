//! FIN, and the end of connections.

use super::common::{ACK, FIN, SYN, ack_of, closed_count, config, established};
use core::time::Duration;
use ginnel_stack::device::{RxBurst, RxFrame};
use ginnel_stack::events::Event;
use ginnel_stack::handle::PortId;
use ginnel_stack::options::TcpOption;
use ginnel_stack::tcp::state::State;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};

#[test]
fn close_while_reading_last_bytes_ends_once() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    p.deliver(ACK, 1, 1, b"last");
    p.deliver(FIN | ACK, 5, 1, &[]);
    p.stack.shutdown_write(conn).unwrap();
    p.flush();
    p.deliver(ACK, 6, 2, &[]);
    assert_eq!(closed_count(&p), 0, "data are still unread");
    let mut shown = [0; 8];
    assert_eq!(p.stack.peek(conn, &mut shown), Ok(4));
    p.stack.close(conn).unwrap();
    let _ = p.stack.skip(conn, 4);
    p.flush();
    assert_eq!(closed_count(&p), 1);
    assert_eq!(p.stack.usage().connections, 0);
}

/// Linux's `tw_tos`; the hop limit is the default one there.
#[test]
fn time_wait_keeps_the_type_of_service() {
    for tos in [0, 0x28] {
        let mut p = established(config());
        let conn = p.conn.unwrap();
        p.stack.set_option(conn, TcpOption::Tos(tos)).unwrap();
        p.stack.close(conn).unwrap();
        assert_eq!(p.flush().iter().map(|sent| sent.tos).collect::<Vec<_>>(), [tos], "FIN");
        p.deliver(FIN | ACK, 1, 2, &[]);
        assert_eq!((p.stack.usage().connections, p.stack.usage().time_wait), (0, 1));
        let answers = p.deliver(FIN | ACK, 1, 2, &[]);
        assert_eq!(answers.iter().map(|sent| sent.tos).collect::<Vec<_>>(), [tos], "repeated FIN");
    }
}

#[test]
fn fin_is_only_on_the_last_segment() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.send(conn, &[1; 4500]).unwrap();
    p.stack.close(conn).unwrap();
    let sent = p.flush();
    assert_eq!(sent.len(), 5);
    let fins: Vec<_> = sent.iter().map(|s| s.header.flags.contains(FIN)).collect();
    assert_eq!(fins, [false, false, false, false, true]);
}

#[test]
fn passive_close_leaves_no_state() {
    let mut p = established(config());
    for round in 0..50 {
        let conn = p.conn.unwrap();
        p.deliver(FIN | ACK, 1, 1, &[]);
        p.stack.close(conn).unwrap();
        p.flush();
        p.deliver(ACK, 2, 2, &[]);
        let usage = p.stack.usage();
        assert_eq!(
            (usage.connections, usage.active, usage.timers, usage.time_wait),
            (0, 0, 0, 0),
            "round {round}"
        );
        p.deliver(SYN, 0, 0, &[]);
        p.deliver(ACK, 1, 1, &[]);
    }
    let closed = p.events.iter().filter(|e| matches!(e, Event::Closed { .. })).count();
    assert_eq!(closed, 50);
}

#[test]
fn fin_beyond_a_hole_is_processed_later() {
    let mut p = established(config());
    p.deliver(FIN | ACK, 101, 1, &[2; 50]);
    assert_eq!(p.stack.state(p.conn.unwrap()), Some(State::Established));
    let sent = p.deliver(ACK, 1, 1, &[1; 100]);
    assert_eq!(ack_of(sent.last().unwrap()), 152);
    assert_eq!(p.stack.state(p.conn.unwrap()), Some(State::CloseWait));
    assert_eq!(p.read.len(), 150);
}

#[test]
fn fin_beyond_the_window_is_sent_later() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let narrow = p.custom_segment(ACK, 1, 1, 500, 0, &[]);
    p.deliver_frame(&narrow);
    p.stack.send(conn, &[1; 500]).unwrap();
    p.stack.close(conn).unwrap();
    let mut sent = p.flush();
    sent.extend(p.deliver(ACK, 1, 501, &[]));
    sent.extend(p.wait(Duration::from_secs(3)));
    assert!(sent.iter().any(|s| s.header.flags.contains(FIN)));
    p.deliver(ACK, 1, 502, &[]);
    assert_eq!(p.stack.state(conn), Some(State::FinWait2));
}

#[test]
fn closed_connection_rejects_options() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let bytes = p.segment(TcpFlags::RST, 1, 0, &[], &TcpOptions::default());
    let mut burst = RxBurst::new();
    burst.push(RxFrame::new(&bytes));
    p.stack.receive(p.now, PortId(0), &burst);
    assert!(p.stack.set_option(conn, TcpOption::UserTimeout(Duration::from_secs(9))).is_err());
}
