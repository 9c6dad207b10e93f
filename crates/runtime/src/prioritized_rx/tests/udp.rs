//! Datagrams for tasks that read them slowly.

use super::*;
use crate::time;
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::udp::UdpOptions;
use std::ops::AddAssign;

/// A task that takes a datagram each millisecond, and counts low and high ones.
fn slow_reader(arrived: Rc<RefCell<[u64; 2]>>) -> impl Handler {
    Executor::new(move || async move {
        let socket = net::UdpSocket::bind("0.0.0.0:53").await?;
        let mut buffer = [0; 300];
        loop {
            let (_, from) = socket.recv_from(&mut buffer).await?;
            arrived.borrow_mut()[usize::from(from.port() == 2000)].add_assign(1);
            time::sleep(Duration::from_millis(1)).await;
        }
        #[expect(unreachable_code, reason = "gives the task its type")]
        std::io::Result::Ok(())
    })
}

/// Five low datagrams come for each that the task reads, and high ones from time to time: with priorities all
/// high ones arrive.
// limit: network.udp_receive_bytes
#[test]
fn slow_task_loses_low_datagrams_only() {
    for has_priorities in [true, false] {
        let arrived = Rc::new(RefCell::new([0; 2]));
        let for_server = arrived.clone();
        let configure = |config: &mut Config| config.network.udp_receive_bytes = 20_000;
        let mut hosts =
            hosts_with(configure, has_priorities, 16_384, (0, 0), move |_| slow_reader(for_server));
        let now = hosts.clock.now();
        let [low, high] = [(1000, 0), (2000, HIGH)].map(|(port, priority)| {
            let options = UdpOptions { priority, ..UdpOptions::default() };
            let local = ([0, 0, 0, 0], port).into();
            hosts.clients.with(now, |_, cx| cx.udp_bind(local, options)).unwrap()
        });
        let send = |hosts: &mut Hosts<_>, socket: UdpHandle| {
            let (now, to) = (hosts.clock.now(), "10.0.0.1:53".parse().unwrap());
            hosts.clients.with(now, |_, cx| cx.udp_send(socket, Some(to), &[7; 300])).unwrap();
            hosts.both_turn(Duration::from_micros(100));
        };
        for round in 0..400 {
            (0..5).for_each(|_| send(&mut hosts, low));
            (0..usize::from(round % 8 == 7)).for_each(|_| send(&mut hosts, high));
            hosts.both_turn(Duration::from_micros(500));
        }
        (0..4000).for_each(|_| hosts.both_turn(Duration::from_micros(500)));
        let dropped = hosts.server.core.stack.local().unwrap().udp_stats().receive_overflow;
        let stats = hosts.server.stats();
        let [low, high] = *arrived.borrow();
        assert_eq!(low + high + dropped, 2050);
        assert!(dropped > 1000, "no overload: {dropped}");
        let expected = if has_priorities { (true, dropped, 0) } else { (false, 0, 0) };
        assert_eq!((high == 50, stats.priority0_shed, stats.priority6_shed), expected, "{high} of 50");
    }
}
