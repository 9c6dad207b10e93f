//! Turns that run late, as on a busy machine: timers and calls that would be separate coincide in one turn.

use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::events::CloseReason;
use ginnel_testkit::sim::{Host, HostConfig, LinkModel, Sim, seeds};

/// The active state of a connection is freed after an RTO of idleness. A FIN that is queued in the turn in
/// which that timer fires must still be sent.
#[test]
fn fin_queued_at_overdue_idle_timer_is_sent() {
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
    assert_eq!(sim.hosts[0].stack.usage().active, 1, "not idle for long enough yet");

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

/// Small exchanges over a bad link, while time jumps at random. Both ends must receive everything and end.
#[test]
fn exchanges_complete_with_late_turns() {
    for seed in seeds(300) {
        let mut rng = Random::new(seed);
        let link = LinkModel { loss: 0.05, duplicate: 0.03, reorder: 0.05, ..LinkModel::default() };
        let mut sim =
            Sim::pair_with(seed, HostConfig::default(), HostConfig::default(), LinkModel::default());
        let to = SocketAddr::new(sim.hosts[1].v4.into(), 80);
        sim.hosts[1].listen(80);
        let now = sim.now;
        let first = sim.hosts[0].connect(now, to);
        sim.collect(0);
        // The neighbours resolve each other before the link becomes lossy: an unanswered ARP request would
        // end a connection, too.
        sim.run(Duration::from_millis(10));
        assert!(sim.hosts[0].received[&first].connected);
        sim.set_link(&link);

        let mut conns = vec![first];
        for _ in 0..5 {
            let now = sim.now;
            conns.push(sim.hosts[0].connect(now, to));
        }
        let (request, response) = (100 + rng.below(3000) as usize, 100 + rng.below(30_000) as usize);
        for &conn in &conns {
            let now = sim.now;
            sim.hosts[0].send_all(now, conn, vec![1; request], false);
        }
        let mut open = conns.clone();
        sim.hosts[0].close_on_peer_close = true;
        sim.collect(0);
        let mut answered = 0;
        let end = sim.now + Duration::from_secs(1200);
        while sim.now < end {
            let now = sim.now;
            for i in answered..sim.hosts[1].accepted.len() {
                let conn = sim.hosts[1].accepted[i];
                sim.hosts[1].send_all(now, conn, vec![2; response], true);
            }
            answered = sim.hosts[1].accepted.len();
            sim.collect(1);
            // These calls run before the timers of the next turn and after those of the last one.
            close_what_the_peer_closed(&mut sim.hosts[1]);
            if rng.below(10) == 0
                && let Some(conn) = open.pop()
            {
                // The call fails if the server's FIN arrived first and the connection has ended since.
                let _ = sim.hosts[0].stack.shutdown_write(conn);
            }
            if !sim.step(end) && open.is_empty() {
                break;
            }
            if rng.below(10) == 0 {
                // The machine was busy with other work.
                sim.now += Duration::from_micros(rng.below(400_000));
            }
        }
        assert_eq!(sim.hosts[1].accepted.len(), conns.len(), "{}", sim.replay());
        for (host, bytes) in [(0, response), (1, request)] {
            for (conn, received) in &sim.hosts[host].received {
                let (got, closed) = (received.bytes.len(), received.closed);
                let actual = (got, closed, host, *conn);
                assert_eq!(actual, (bytes, Some(CloseReason::Normal), host, *conn), "{}", sim.replay());
            }
        }
    }
}

fn close_what_the_peer_closed(host: &mut Host) {
    for (conn, received) in host.received.iter().filter(|(_, r)| r.peer_closed && r.closed.is_none()) {
        host.stack.close(*conn).unwrap_or_else(|e| panic!("{conn:?}: {e}, {received:?}"));
    }
}
