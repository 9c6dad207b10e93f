//! Applications that reach the stack through a channel: in shards of their own, and as workers.

use super::*;
use crate::config::Placement;

const PLACEMENTS: [Placement; 2] = [Placement::Paired, Placement::Split];

fn place(placement: Placement) -> impl FnOnce(&mut Config) {
    move |config| config.shard.placement = placement
}

#[test]
fn request_reaches_the_application_before_heartbeats() {
    for placement in PLACEMENTS {
        let (handled_before, answered_before) = request_after_heartbeats(place(placement), true);
        assert!(handled_before < 100 && answered_before < 100, "{handled_before} {answered_before}");
        let (handled_before, answered_before) = request_after_heartbeats(place(placement), false);
        assert!(handled_before > 9900 && answered_before > 5000, "{handled_before} {answered_before}");
    }
}

/// Returns how many of 100 messages are low until the last high one was handled: half of 10,000 are.
fn low_percent_of_the_application(has_priorities: bool) -> usize {
    let mut hosts = hosts_with(place(Placement::Split), has_priorities, 16_384, (1000, 500), server(20));
    for round in 0..10 {
        for connection in 0..1000 {
            hosts.send(connection, round * 1000 + connection as u32);
        }
        // Each connection has an event at most: the application handles some before the next messages.
        if round == 0 {
            (0..40).for_each(|_| {
                hosts.server_turn();
            });
        }
    }
    hosts.run_until_handled(10_000);
    let handled = &hosts.server.handler().handled;
    let is_high = |(_, number): &(u8, u32)| number % 1000 >= 500;
    let last_high = handled.iter().rposition(is_high).unwrap();
    let low = handled[..last_high].iter().filter(|message| !is_high(message)).count();
    low * 100 / last_high
}

/// Low messages get their share while high ones wait.
#[test]
fn low_keeps_its_share_of_the_application() {
    let on = low_percent_of_the_application(true);
    assert!((4..12).contains(&on), "{on} %");
    let off = low_percent_of_the_application(false);
    assert!((40..=55).contains(&off), "without priorities: {off} %");
}

/// Tasks of 5 ms that yield each 100 µs: the channel is looked at between them, and the task of an urgent
/// message runs first.
#[test]
fn tasks_behind_a_channel_run_by_priority() {
    for has_priorities in [true, false] {
        let handled = Rc::new(RefCell::new(Vec::new()));
        let for_server = handled.clone();
        let place = place(Placement::Split);
        let mut hosts = hosts_with(place, has_priorities, 16_384, (110, 100), move |clock| {
            task_server(clock, 50, for_server)
        });
        for connection in 0..100 {
            hosts.send(connection, connection as u32);
        }
        for _ in 0..20 {
            hosts.server_turn();
        }
        let before = handled.borrow().len();
        for connection in 100..110 {
            hosts.send(connection, connection as u32);
        }
        while handled.borrow().len() < 110 {
            assert!(hosts.server_turn() > 0, "a turn with waiting messages does some work");
        }
        let order: Vec<u32> = handled.borrow().iter().map(|(_, number)| *number).collect();
        let last_high = order.iter().rposition(|number| *number >= 100).unwrap();
        assert_eq!(last_high < before + 20, has_priorities, "{before} {order:?}");
        let is_high = |number: u32| number >= 100;
        assert!(!has_priorities || handled.borrow().iter().all(|(class, n)| (*class == 6) == is_high(*n)));
    }
}
