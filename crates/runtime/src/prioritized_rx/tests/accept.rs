//! Tests of the order in which connections are accepted, each time beside a run without priorities.

use super::*;
use ginnel_stack::handle::Listener;

const LOW: usize = 60;
const URGENT: usize = 20;

/// Accepts connections when it is asked to, or at once and slowly.
struct Acceptor {
    clock: SimulatedClock,
    listener: Option<Listener>,
    /// How long each accepted connection takes; `None` if connections stay in the queue.
    cost: Option<Duration>,
    /// The class of the event and the connection, in the order in which connections were accepted.
    accepted: Vec<(u8, Conn)>,
}

impl Handler for Acceptor {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.listener = Some(cx.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default())?);
        Ok(())
    }

    fn may_accept(&mut self, _: Listener) -> bool {
        self.cost.is_some()
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, _: Listener) {
        self.clock.advance(self.cost.unwrap_or_default());
        self.accepted.push((cx.event_class(), conn));
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// Opens connections of the usual priority, and then urgent ones. Returns the hosts, and the remote ports of
/// the urgent connections.
fn overloaded(has_priorities: bool, cost: Option<Duration>) -> (Hosts<Acceptor>, Vec<u16>) {
    let acceptor = |clock| Acceptor { clock, listener: None, cost, accepted: Vec::new() };
    let mut hosts = hosts_with(|_| (), has_priorities, 16_384, (0, 0), acceptor);
    let mut ports = Vec::new();
    for (count, priority) in [(LOW, 0), (URGENT, HIGH)] {
        let now = hosts.clock.now();
        let conns = hosts.clients.with(now, |_, cx| {
            let socket = SocketOptions { priority, ..SocketOptions::default() };
            let options = ConnectOptions { socket, ..ConnectOptions::default() };
            let open = || cx.connect("10.0.0.1:80".parse().unwrap(), options).unwrap();
            core::iter::repeat_with(open).take(count).collect::<Vec<_>>()
        });
        hosts.clients.poll_once(now).unwrap();
        // The server answers the SYNs; the acknowledgements arrive together.
        hosts.server_turn();
        hosts.clients.with(now, |_, cx| {
            ports = conns.iter().map(|conn| cx.endpoints(*conn).unwrap()[0].port()).collect();
        });
    }
    hosts.clients.poll_once(hosts.clock.now()).unwrap();
    (hosts, ports)
}

/// Returns which of the accepted connections are urgent, in their order.
fn are_urgent(hosts: &mut Hosts<Acceptor>, ports: &[u16]) -> Vec<bool> {
    let now = hosts.clock.now();
    hosts.server.with(now, |acceptor, cx| {
        let port = |conn: Conn| cx.endpoints(conn).unwrap()[1].port();
        acceptor.accepted.iter().map(|(_, conn)| ports.contains(&port(*conn))).collect()
    })
}

/// The accept queue is in the order of the classes, in which lower ones have their share.
#[test]
fn urgent_connections_are_accepted_first() {
    for has_priorities in [true, false] {
        let (mut hosts, ports) = overloaded(has_priorities, None);
        for _ in 0..20 {
            hosts.both_turn(Duration::from_micros(50));
        }
        let now = hosts.clock.now();
        hosts.server.with(now, |acceptor, cx| {
            let listener = acceptor.listener.unwrap();
            while let Some(conn) = cx.accept(listener) {
                acceptor.accepted.push((0, conn));
            }
        });
        let order = are_urgent(&mut hosts, &ports);
        assert_eq!(order.len(), LOW + URGENT);
        let before_last = order.iter().rposition(|is_urgent| *is_urgent).unwrap() + 1 - URGENT;
        if has_priorities {
            assert!(before_last <= 1, "{before_last}: the share of 5 %");
        } else {
            // Priorities order the frames of a burst also without `[priority]`.
            assert!(before_last >= LOW / 2, "{before_last}");
        }
    }
}

/// A slow handler gets urgent connections first, each in an event of its class.
#[test]
fn slow_handler_accepts_urgent_connections_first() {
    for has_priorities in [true, false] {
        let (mut hosts, ports) = overloaded(has_priorities, Some(Duration::from_millis(5)));
        for _ in 0..400 {
            hosts.both_turn(Duration::from_micros(50));
        }
        let order = are_urgent(&mut hosts, &ports);
        assert_eq!(order.len(), LOW + URGENT);
        let before_last = order.iter().rposition(|is_urgent| *is_urgent).unwrap() + 1 - URGENT;
        if has_priorities {
            assert!(before_last <= 4, "{before_last}");
            let classes = hosts.server.handler().accepted.iter().map(|(class, _)| *class == 6);
            assert!(classes.eq(order), "the class of the event is that of the connection");
        } else {
            // Priorities order the frames of a burst also without `[priority]`.
            assert!(before_last >= LOW / 2, "{before_last}");
        }
    }
}

/// The backlog counts connections of all classes.
#[test]
fn urgent_connections_count_in_the_backlog() {
    let (mut hosts, _) = overloaded(true, None);
    for _ in 0..20 {
        hosts.both_turn(Duration::from_micros(50));
    }
    let listener = hosts.server.handler().listener.unwrap();
    let stack = hosts.server.core.stack.local_mut().unwrap();
    assert_eq!(stack.tcp_stats().accept_overflows, 0);
    stack.set_backlog(listener, (LOW + URGENT) as u32 - 1, 0);
    let connect = |hosts: &mut Hosts<Acceptor>| {
        let now = hosts.clock.now();
        hosts.clients.with(now, |_, cx| {
            cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).unwrap();
        });
        (0..20).for_each(|_| hosts.both_turn(Duration::from_micros(50)));
        hosts.server.core.stack.local().unwrap().tcp_stats().accept_overflows
    };
    assert_eq!(connect(&mut hosts), 1, "the queue is full");
    let now = hosts.clock.now();
    hosts.server.with(now, |acceptor, cx| {
        let accepted = (0..2).map(|_| cx.accept(acceptor.listener.unwrap()));
        assert!(accepted.collect::<Vec<_>>().iter().all(Option::is_some));
    });
    assert_eq!(connect(&mut hosts), 1, "there is room again");
}
