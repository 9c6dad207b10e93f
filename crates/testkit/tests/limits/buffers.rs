//! `tcp.buffer_pool_bytes`, `tcp.recv_buffer_bytes` and `tcp.send_buffer_bytes`.

use super::common::{
    CLIENT, SECOND, SERVER, assert_nothing_left, client_with, close, connect, pattern, read, send, served,
    server_with,
};
use core::time::Duration;
use ginnel_stack::handle::Conn;
use ginnel_testkit::sim::Sim;

const POOL: u64 = 1 << 17;
/// A quarter of this pool is more than six connections can get when memory is scarce.
const LARGER_POOL: u64 = 1 << 19;

/// Reads up to `bytes` bytes at the server and lets window updates leave.
fn read_some(sim: &mut Sim, conn: Conn, bytes: usize) -> usize {
    let now = sim.now;
    let n = sim.hosts[SERVER].read(conn, bytes);
    sim.hosts[SERVER].stack.transmit(now);
    sim.collect(SERVER);
    n
}

// limit: tcp.buffer_pool_bytes
#[test]
fn receivers_competing_for_memory_get_all_bytes() {
    let mut sim = server_with(|c| c.tcp.buffer_pool_bytes = POOL);
    sim.hosts[SERVER].listen(80);
    sim.hosts[SERVER].defer_reads = true;
    let conns: Vec<_> = (0..8).map(|_| connect(&mut sim)).collect();
    sim.run(SECOND / 10);
    let served_conns: Vec<_> = conns.iter().map(|c| served(&sim, *c)).collect();
    for (i, conn) in conns.iter().enumerate() {
        send(&mut sim, CLIENT, *conn, &pattern(i as u8, 100_000), true);
    }
    sim.run(SECOND * 5);
    let usage = sim.hosts[SERVER].stack.usage();
    assert!(usage.chunks * 2048 > POOL as usize / 2, "memory is not scarce: {usage:?}");
    for _ in 0..3000 {
        for conn in &served_conns {
            read_some(&mut sim, *conn, 4000);
        }
        sim.run(Duration::from_millis(100));
    }
    for (i, conn) in served_conns.iter().enumerate() {
        assert!(read(&sim, SERVER, *conn) == pattern(i as u8, 100_000), "connection {i}");
        close(&mut sim, SERVER, *conn);
    }
    for conn in conns {
        let _ = sim.hosts[CLIENT].stack.close(conn);
    }
    sim.run(SECOND * 120);
    assert_nothing_left(&sim.hosts[SERVER]);
    assert!(sim.hosts[SERVER].stack.usage().chunks_high_water * 2048 <= POOL as usize);
}

// limit: tcp.buffer_pool_bytes
#[test]
fn senders_competing_for_memory_send_all_bytes() {
    let mut sim = client_with(|c| c.tcp.buffer_pool_bytes = POOL);
    sim.hosts[SERVER].listen(80);
    let conns: Vec<_> = (0..8).map(|_| connect(&mut sim)).collect();
    sim.run(SECOND / 10);
    let served_conns: Vec<_> = conns.iter().map(|c| served(&sim, *c)).collect();
    for (i, conn) in conns.iter().enumerate() {
        send(&mut sim, CLIENT, *conn, &pattern(i as u8, 300_000), true);
    }
    assert!(sim.hosts[CLIENT].stack.usage().chunks * 2048 > POOL as usize / 2, "memory is not scarce");
    sim.run(SECOND * 60);
    for (i, conn) in served_conns.iter().enumerate() {
        assert!(read(&sim, SERVER, *conn) == pattern(i as u8, 300_000), "connection {i}");
        close(&mut sim, SERVER, *conn);
    }
    for conn in conns {
        let _ = sim.hosts[CLIENT].stack.close(conn);
    }
    sim.run(SECOND * 120);
    assert_nothing_left(&sim.hosts[CLIENT]);
}

/// A sixteenth of the receive buffer is more than the pool can hold.
// limit: tcp.buffer_pool_bytes
#[test]
fn closed_window_reopens_with_a_small_pool() {
    let mut sim = server_with(|c| {
        c.tcp.buffer_pool_bytes = POOL;
        (c.tcp.recv_buffer_bytes, c.tcp.recv_window_first_bytes) = (4 << 20, 4 << 20);
    });
    sim.hosts[SERVER].listen(80);
    sim.hosts[SERVER].defer_reads = true;
    let conn = connect(&mut sim);
    sim.run(SECOND / 10);
    let served_conn = served(&sim, conn);
    send(&mut sim, CLIENT, conn, &pattern(5, 300_000), false);
    sim.run(SECOND * 5);
    let window = sim.hosts[SERVER].stack.info(served_conn).unwrap().rcv_wnd;
    assert!(window < 1460, "the window admits {window} bytes");
    for _ in 0..100 {
        while read_some(&mut sim, served_conn, 1 << 16) > 0 {}
        sim.run(SECOND);
    }
    assert!(
        read(&sim, SERVER, served_conn) == pattern(5, 300_000),
        "{} bytes",
        read(&sim, SERVER, served_conn).len()
    );
}

/// Exchanges requests and responses of 500 bytes in sequence for a second. Returns the number of exchanges.
fn exchanges(sim: &mut Sim, conn: Conn, served_conn: Conn) -> usize {
    let until = sim.now + SECOND;
    let mut count = 0;
    while sim.now < until {
        let before = read(sim, CLIENT, conn).len();
        send(sim, CLIENT, conn, &[1; 500], false);
        if !sim.run_until(SECOND, |s| s.hosts[SERVER].stack.readable(served_conn) >= 500) {
            break;
        }
        read_some(sim, served_conn, 500);
        send(sim, SERVER, served_conn, &[2; 500], false);
        if !sim.run_until(SECOND, |s| read(s, CLIENT, conn).len() == before + 500) {
            break;
        }
        count += 1;
    }
    count
}

// limit: tcp.buffer_pool_bytes
#[test]
fn unread_connections_do_not_slow_others() {
    let mut sim = server_with(|c| c.tcp.buffer_pool_bytes = LARGER_POOL);
    sim.hosts[SERVER].listen(80);
    sim.hosts[SERVER].defer_reads = true;
    let active_conn = connect(&mut sim);
    let idle_conns: Vec<_> = (0..6).map(|_| connect(&mut sim)).collect();
    sim.run(SECOND / 10);
    let served_conn = served(&sim, active_conn);
    let count_alone = exchanges(&mut sim, active_conn, served_conn);
    for idle_conn in &idle_conns {
        send(&mut sim, CLIENT, *idle_conn, &[9; 1 << 20], false);
    }
    sim.run(SECOND * 5);
    let count_loaded = exchanges(&mut sim, active_conn, served_conn);
    assert!(
        count_loaded * 10 >= count_alone * 9,
        "{count_loaded} exchanges with idle connections, {count_alone} without"
    );
    assert!(sim.hosts[SERVER].stack.tcp_stats().pool_exhausted > 0, "the pool was not exhausted");
}

// limit: tcp.send_buffer_bytes
#[test]
fn non_reading_peers_do_not_slow_others() {
    let mut sim = server_with(|c| c.tcp.buffer_pool_bytes = LARGER_POOL);
    sim.hosts[SERVER].listen(80);
    sim.hosts[SERVER].defer_reads = true;
    sim.hosts[CLIENT].defer_reads = true;
    let active_conn = connect(&mut sim);
    let idle_conns: Vec<_> = (0..6).map(|_| connect(&mut sim)).collect();
    sim.run(SECOND / 10);
    for idle_conn in &idle_conns {
        let served_conn = served(&sim, *idle_conn);
        send(&mut sim, SERVER, served_conn, &[9; 10 << 20], false);
    }
    sim.run(SECOND * 5);
    let served_conn = served(&sim, active_conn);
    sim.hosts[CLIENT].defer_reads = false;
    let count = exchanges(&mut sim, active_conn, served_conn);
    assert!(count > 100, "{count} exchanges");
}

#[test]
fn out_of_order_data_leaves_room_for_holes() {
    let mut sim = server_with(|c| c.tcp.buffer_pool_bytes = POOL);
    sim.hosts[SERVER].listen(80);
    let conns: Vec<_> = (0..8).map(|_| connect(&mut sim)).collect();
    sim.run(SECOND / 10);
    let served_conns: Vec<_> = conns.iter().map(|c| served(&sim, *c)).collect();
    // A third of the frames is lost for a while, so data accumulate after the holes.
    sim.set_link_from(CLIENT, &ginnel_testkit::sim::LinkModel { loss: 0.3, ..Default::default() });
    for (i, conn) in conns.iter().enumerate() {
        send(&mut sim, CLIENT, *conn, &pattern(i as u8, 200_000), false);
    }
    sim.run(SECOND * 20);
    sim.set_link_from(CLIENT, &Default::default());
    sim.run(SECOND * 300);
    for (i, conn) in served_conns.iter().enumerate() {
        assert!(read(&sim, SERVER, *conn) == pattern(i as u8, 200_000), "connection {i}");
    }
    assert_eq!(sim.hosts[SERVER].stack.usage().chunks, 0);
}

// limit: tcp.send_buffer_bytes
#[test]
fn full_send_buffer_reports_writable_when_drained() {
    let mut sim = client_with(|c| c.tcp.send_buffer_bytes = 10_000);
    sim.hosts[SERVER].listen(80);
    let conn = connect(&mut sim);
    sim.run(SECOND / 10);
    let stack = &mut sim.hosts[CLIENT].stack;
    assert_eq!(stack.send(conn, &[1; 30_000]), Ok(10_000));
    assert_eq!(stack.send(conn, &[1; 1]), Ok(0));
    let now = sim.now;
    sim.hosts[CLIENT].stack.transmit(now);
    sim.collect(CLIENT);
    sim.run(SECOND);
    use ginnel_stack::events::Event;
    let writable = sim.hosts[CLIENT].events.iter().filter(|e| **e == Event::Writable { conn }).count();
    assert_eq!(writable, 1);
    assert_eq!(sim.hosts[CLIENT].stack.send(conn, &[1; 30_000]), Ok(10_000));
}

// limit: tcp.recv_buffer_bytes
#[test]
fn receive_buffer_limit_stops_the_sender() {
    let mut sim = server_with(|c| c.tcp.recv_buffer_bytes = 30_000);
    sim.hosts[SERVER].listen(80);
    sim.hosts[SERVER].defer_reads = true;
    let conn = connect(&mut sim);
    sim.run(SECOND / 10);
    let served_conn = served(&sim, conn);
    send(&mut sim, CLIENT, conn, &pattern(3, 100_000), false);
    sim.run(SECOND * 30);
    let waiting = sim.hosts[SERVER].stack.readable(served_conn);
    assert!((28_000..=30_000).contains(&waiting), "{waiting} bytes");
    while read(&sim, SERVER, served_conn).len() < 100_000 {
        read_some(&mut sim, served_conn, 50_000);
        assert!(sim.run_until(SECOND * 70, |s| s.hosts[SERVER].stack.readable(served_conn) > 0
            || read(s, SERVER, served_conn).len() == 100_000));
    }
    assert!(read(&sim, SERVER, served_conn) == pattern(3, 100_000));
}

/// Memory that others free reaches a connection that found none no later than its peer's next retransmission.
// limit: tcp.buffer_pool_bytes
#[test]
fn connection_resumes_when_pool_memory_is_freed() {
    let mut sim = server_with(|c| c.tcp.buffer_pool_bytes = POOL);
    sim.hosts[SERVER].listen(80);
    sim.hosts[SERVER].defer_reads = true;
    let active_conn = connect(&mut sim);
    let idle_conns: Vec<_> = (0..20).map(|_| connect(&mut sim)).collect();
    sim.run(SECOND / 10);
    let served_conn = served(&sim, active_conn);
    let idle_served: Vec<_> = idle_conns.iter().map(|c| served(&sim, *c)).collect();
    // Each connection has too little data to be denied the rest of the pool.
    for idle_conn in &idle_conns {
        send(&mut sim, CLIENT, *idle_conn, &[9; 8000], false);
    }
    sim.run(SECOND);
    let start = sim.now;
    send(&mut sim, CLIENT, active_conn, &pattern(1, 300_000), false);
    let read_for = |sim: &mut Sim, time: Duration| {
        let until = sim.now + time;
        while sim.now < until && read(sim, SERVER, served_conn).len() < 300_000 {
            read_some(sim, served_conn, 1 << 16);
            sim.run(Duration::from_millis(10));
        }
    };
    read_for(&mut sim, SECOND * 20);
    let before = read(&sim, SERVER, served_conn).len();
    assert!(before < 50_000, "{before} bytes were stored");
    let stalled = sim.now - start;
    for idle_conn in idle_served {
        sim.hosts[SERVER].stack.abort(idle_conn).unwrap();
    }
    read_for(&mut sim, stalled * 2);
    assert!(
        read(&sim, SERVER, served_conn) == pattern(1, 300_000),
        "{} bytes",
        read(&sim, SERVER, served_conn).len()
    );
}
