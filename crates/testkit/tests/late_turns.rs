//! Turns that come late, because the machine was busy: timers and calls that would have been apart fall into one turn.

use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::events::CloseReason;
use ginnel_testkit::sim::Sim;

/// The part of a connection that only busy ones need is given back after an RTO of idleness. A FIN queued in the very turn in which that
/// timer fires must still leave.
#[test]
fn a_fin_queued_when_the_idle_timer_is_overdue_leaves() {
    let mut sim = Sim::pair(1);
    sim.hosts[1].listen(80);
    sim.hosts[1].close_on_peer_close = true;
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 80);
    let now = sim.now;
    let client = sim.hosts[0].connect(now, to);
    sim.collect(0);
    sim.run(Duration::from_millis(10));
    let now = sim.now;
    sim.hosts[0].send_all(now, client, vec![1; 1000], false);
    sim.collect(0);
    sim.run(Duration::from_millis(50));
    assert_eq!(sim.hosts[0].stack.usage().busy, 1, "not idle for long enough yet");

    sim.now += Duration::from_secs(5);
    let now = sim.now;
    let stack = &mut sim.hosts[0].stack;
    stack.shutdown_write(client).expect("open");
    stack.advance(now);
    stack.transmit(now);
    sim.collect(0);
    sim.run(Duration::from_secs(2));
    let served = sim.hosts[1].accepted[0];
    assert_eq!(sim.hosts[1].received[&served].closed, Some(CloseReason::Normal));
    assert_eq!(sim.hosts[0].received[&client].closed, Some(CloseReason::Normal));
}
