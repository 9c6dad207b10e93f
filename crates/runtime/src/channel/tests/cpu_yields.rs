//! A shard yields its CPU to a client that runs on it.

use super::*;
use crate::wait::{self, EventFd};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Pins the rest of a test to one CPU.
fn pin_to_one_cpu() {
    let allowed = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| allowed.is_set(*cpu)).unwrap();
    let mut set = CpuSet::new();
    set.set(first);
    sched_setaffinity(None, &set).unwrap();
}

/// Calls the methods that a shard calls before it sleeps. Returns `None` if it must not sleep, and otherwise
/// how long it yields its CPU.
fn prepare_sleep(fixture: &Fixture) -> Option<Option<Duration>> {
    let mut server = fixture.server.lock().unwrap();
    server.handler_mut().before_sleep().then(|| server.handler_mut().yield_cpu())
}

/// Lets the yield last for its full time.
fn expire_yield(fixture: &Fixture) {
    fixture.server.lock().unwrap().handler_mut().yield_expired();
}

fn end_sleep(fixture: &Fixture, is_readable: bool) {
    fixture.server.lock().unwrap().handler_mut().after_sleep(is_readable);
}

const YIELD: Option<Option<Duration>> = Some(Some(Duration::from_micros(70)));

fn setup(turn_us: u32) -> (Fixture, Client) {
    pin_to_one_cpu();
    let fixture = Fixture::new(&ChannelConfig { turn_us, ..small_config() }, Peer::default());
    let client = fixture.client();
    (fixture, client)
}

/// Makes the client sleep and wake up.
fn sleep_and_wake(client: &mut Client) {
    assert!(client.before_sleep());
    client.after_sleep(true);
}

/// Makes the client notify the stack, which processes that: the client is active then.
fn be_active(fixture: &Fixture, client: &mut Client) {
    notify_stack(client);
    let mut server = fixture.server.lock().unwrap();
    let now = server.now();
    server.poll_once(now).unwrap();
}

#[test]
fn shard_yields_until_its_cpus_client_sleeps() {
    let (mut fixture, mut client) = setup(70);
    assert_eq!(prepare_sleep(&fixture), Some(None), "the client's CPU is unknown");
    end_sleep(&fixture, false);
    sleep_and_wake(&mut client);
    assert_eq!(prepare_sleep(&fixture), Some(None), "the client woke up for something else");
    end_sleep(&fixture, false);
    be_active(&fixture, &mut client);
    assert!(fixture.server.lock().unwrap().handler().is_cpu_contended());
    assert_eq!(prepare_sleep(&fixture), YIELD);
    let fd = fixture.server.lock().unwrap().handler().wake_fd().unwrap();
    let is_woken = || {
        let idle_event = EventFd::new().unwrap();
        wait::sleep([idle_event.as_fd(); 2], &[fd], Some(Duration::ZERO)).unwrap().contains(2)
    };
    // A notification wakes nobody now, but the client's sleep does.
    notify_stack(&mut client);
    assert!(!is_woken());
    assert!(client.before_sleep());
    assert!(is_woken());
    end_sleep(&fixture, true);
    assert!(!is_woken());
    fixture.run(Duration::from_millis(1));
    assert!(!fixture.server.lock().unwrap().handler().is_cpu_contended());
    assert_eq!(prepare_sleep(&fixture), Some(None), "the client sleeps");
    notify_stack(&mut client);
    assert!(is_woken(), "notifications wake the shard again");
    end_sleep(&fixture, true);
}

/// Notifies the stack.
fn notify_stack(client: &mut Client) {
    client.set_credits(1, 5);
    client.flush();
}

#[test]
fn idle_client_gets_no_yield_until_it_sleeps() {
    let (mut fixture, mut client) = setup(70);
    sleep_and_wake(&mut client);
    be_active(&fixture, &mut client);
    for _ in 0..3 {
        assert_eq!(prepare_sleep(&fixture), YIELD);
        client.set_credits(1, 5);
        expire_yield(&fixture);
        end_sleep(&fixture, false);
        fixture.run(Duration::from_micros(50));
    }
    assert_eq!(prepare_sleep(&fixture), YIELD);
    end_sleep(&fixture, false);
    assert_eq!(prepare_sleep(&fixture), YIELD, "that yield was ended early");
    expire_yield(&fixture);
    end_sleep(&fixture, false);
    assert!(!fixture.server.lock().unwrap().handler().is_cpu_contended());
    assert_eq!(prepare_sleep(&fixture), Some(None), "the client is idle, so the shard sleeps on its devices");
    end_sleep(&fixture, false);
    assert!(client.before_sleep());
    assert_eq!(prepare_sleep(&fixture), Some(None));
    end_sleep(&fixture, false);
    client.after_sleep(true);
    be_active(&fixture, &mut client);
    assert_eq!(prepare_sleep(&fixture), YIELD);
    end_sleep(&fixture, false);
}

#[test]
fn penalised_domain_is_skipped_every_other_sleep() {
    let (fixture, mut client) = setup(70);
    let other = {
        let (domain, parts) = SameThread(fixture.server.clone()).open_domain().unwrap();
        Client::open(parts, Box::new(domain)).unwrap()
    };
    // From now on the client claims to run on this CPU, wherever it runs.
    sleep_and_wake(&mut client);
    be_active(&fixture, &mut client);
    let mut use_whole_yield = |fixture: &Fixture| {
        let turn = prepare_sleep(fixture);
        client.set_credits(1, 5);
        if turn == YIELD {
            expire_yield(fixture);
        }
        end_sleep(fixture, false);
        turn
    };
    let is_contended = |fixture: &Fixture| fixture.server.lock().unwrap().handler().is_cpu_contended();
    for _ in 0..5 {
        assert_eq!(use_whole_yield(&fixture), YIELD);
        assert!(!is_contended(&fixture), "the shard may poll");
        let mut server = fixture.server.lock().unwrap();
        let now = server.now();
        server.poll_once(now).unwrap();
        drop(server);
        assert_eq!(use_whole_yield(&fixture), Some(None), "the shard sleeps on its devices");
        let mut server = fixture.server.lock().unwrap();
        server.poll_once(now).unwrap();
        drop(server);
        assert!(is_contended(&fixture));
    }
    drop(other);
    for _ in 0..3 {
        assert_eq!(use_whole_yield(&fixture), YIELD, "no other domain is delayed");
        let mut server = fixture.server.lock().unwrap();
        let now = server.now();
        server.poll_once(now).unwrap();
    }
}

#[test]
fn zero_turn_us_disables_yielding() {
    let (fixture, mut client) = setup(0);
    sleep_and_wake(&mut client);
    assert!(!fixture.server.lock().unwrap().handler().is_cpu_contended());
    assert_eq!(prepare_sleep(&fixture), Some(None));
    end_sleep(&fixture, false);
}
