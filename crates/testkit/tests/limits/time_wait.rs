//! `tcp.time_wait_max`: the oldest entry is evicted and counted.

use super::common::{
    CLIENT, SECOND, SERVER, assert_nothing_left, close, is_connected, served, server, server_with,
};
use ginnel_stack::stack::StackConfig;
use ginnel_stack::wire::tcp::TcpFlags;
use ginnel_testkit::scripted_peer::ScriptedPeer;

const SYN: TcpFlags = TcpFlags::SYN;
const ACK: TcpFlags = TcpFlags::ACK;
const FIN: TcpFlags = TcpFlags::FIN;

/// Opens a connection from `port` and lets the stack close first. Returns the stack's initial sequence
/// number.
fn through_time_wait(p: &mut ScriptedPeer, port: u16) -> u32 {
    p.ports.1 = port;
    p.deliver(SYN, 0, 0, &[]);
    p.deliver(ACK, 1, 1, &[]);
    let conn = p.conn.take().expect("accepted");
    p.stack.close(conn).unwrap();
    p.flush();
    let iss = p.iss;
    p.deliver(FIN | ACK, 1, 2, &[]);
    iss
}

/// Returns whether the peer's retransmitted FIN finds the entry of its connection. This restarts the entry's
/// timer.
fn has_time_wait_entry(p: &mut ScriptedPeer, port: u16, iss: u32) -> bool {
    (p.ports.1, p.iss) = (port, iss);
    let answers = p.deliver(FIN | ACK, 1, 2, &[]);
    assert_eq!(answers.len(), 1);
    !answers[0].header.flags.contains(TcpFlags::RST)
}

fn scripted_peer(max: u32) -> ScriptedPeer {
    let mut config = StackConfig::default();
    config.tcp.time_wait_max = max;
    let mut p = ScriptedPeer::new(config);
    p.listen();
    p
}

// limit: tcp.time_wait_max
#[test]
fn oldest_time_wait_entry_is_evicted() {
    let mut p = scripted_peer(4);
    let iss: Vec<u32> = (0..6).map(|i| through_time_wait(&mut p, 1000 + i)).collect();
    assert_eq!((p.stack.usage().time_wait, p.stack.tcp_stats().time_wait_overflows), (4, 2));
    let exists: Vec<bool> =
        (0..6).map(|i| has_time_wait_entry(&mut p, 1000 + i, iss[usize::from(i)])).collect();
    assert_eq!(exists, [false, false, true, true, true, true]);
    p.wait(SECOND * 61);
    assert_eq!(p.stack.usage().time_wait, 0);
    through_time_wait(&mut p, 2000);
    assert_eq!((p.stack.usage().time_wait, p.stack.tcp_stats().time_wait_overflows), (1, 2));
}

#[test]
fn restarted_entry_is_not_the_oldest() {
    let mut p = scripted_peer(3);
    let iss: Vec<u32> = (0..3)
        .map(|i| {
            p.wait(SECOND);
            through_time_wait(&mut p, 1000 + i)
        })
        .collect();
    assert!(has_time_wait_entry(&mut p, 1000, iss[0]));
    through_time_wait(&mut p, 1003);
    assert!(has_time_wait_entry(&mut p, 1000, iss[0]));
    assert!(!has_time_wait_entry(&mut p, 1001, iss[1]), "the oldest entry was kept");
    assert!(has_time_wait_entry(&mut p, 1002, iss[2]));
    p.wait(SECOND * 61);
    assert_eq!(p.stack.usage().time_wait, 0);
}

#[test]
fn time_wait_limit_of_one_works() {
    let mut p = scripted_peer(1);
    for i in 0..100 {
        through_time_wait(&mut p, 1000 + i);
    }
    assert_eq!((p.stack.usage().time_wait, p.stack.tcp_stats().time_wait_overflows), (1, 99));
    // The same addresses are reused while their entry exists.
    p.ports.1 = 1099;
    let syn = p.segment(SYN, 100_000, 0, &[], &Default::default());
    assert!(p.deliver_frame(&syn)[0].header.flags.contains(SYN | ACK));
    assert_eq!((p.stack.usage().time_wait, p.stack.tcp_stats().time_wait_reused), (0, 1));
}

// limit: tcp.time_wait_max
#[test]
fn ipv6_time_wait_entries_are_evicted_too() {
    let mut sim = server_with(|c| c.tcp.time_wait_max = 3);
    sim.hosts[CLIENT].close_on_peer_close = true;
    // Addresses pass duplicate address detection first.
    sim.run(SECOND * 5);
    let to = server(&sim, true, 80);
    sim.hosts[SERVER].stack.listen(to, Default::default()).unwrap();
    for round in 0..50 {
        let now = sim.now;
        let conn = sim.hosts[CLIENT].connect(now, to);
        sim.collect(CLIENT);
        sim.run(SECOND / 20);
        assert!(is_connected(&sim.hosts[CLIENT], conn), "round {round}");
        let served_conn = served(&sim, conn);
        close(&mut sim, SERVER, served_conn);
        sim.run(SECOND / 20);
        assert_eq!(sim.hosts[SERVER].stack.usage().time_wait, 3.min(round + 1));
    }
    assert_eq!(sim.hosts[SERVER].stack.tcp_stats().time_wait_overflows, 47);
    sim.run(SECOND * 61);
    assert_nothing_left(&sim.hosts[SERVER]);
}
