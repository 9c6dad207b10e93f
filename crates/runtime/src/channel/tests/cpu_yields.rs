//! A shard leaves its CPU to a client that is at work on it.

use super::*;
use crate::wait::{self, EventFd};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The rest of a test runs on one CPU.
fn stay_on_one_cpu() {
    let may = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| may.is_set(*cpu)).unwrap();
    let mut one = CpuSet::new();
    one.set(first);
    sched_setaffinity(None, &one).unwrap();
}

/// What a shard that goes to sleep asks, in its order: how long it leaves the CPU, if it sleeps at all.
fn goes_to_sleep(rig: &Fixture) -> Option<Option<Duration>> {
    let mut server = rig.server.lock().unwrap();
    server.handler_mut().before_sleep().then(|| server.handler_mut().yield_cpu())
}

/// All of the time that it left to clients is over.
fn runs_out(rig: &Fixture) {
    rig.server.lock().unwrap().handler_mut().yield_expired();
}

fn wakes(rig: &Fixture, rang: bool) {
    rig.server.lock().unwrap().handler_mut().after_sleep(rang);
}

const TURN: Option<Option<Duration>> = Some(Some(Duration::from_micros(70)));

fn rig(turn_us: u32) -> (Fixture, Client) {
    stay_on_one_cpu();
    let rig = Fixture::new(&ChannelConfig { turn_us, ..small_config() }, Peer::default());
    let client = rig.client();
    (rig, client)
}

/// The client has slept, and was woken.
fn wake_up(client: &mut Client) {
    assert!(client.before_sleep());
    client.after_sleep(true);
}

#[test]
fn shard_yields_until_its_cpus_client_sleeps() {
    let (mut rig, mut client) = rig(70);
    assert_eq!(goes_to_sleep(&rig), Some(None), "where it is nobody knows yet");
    wakes(&rig, false);
    wake_up(&mut client);
    assert!(rig.server.lock().unwrap().handler().is_cpu_contended());
    assert_eq!(goes_to_sleep(&rig), TURN);
    let fd = rig.server.lock().unwrap().handler().wake_fd().unwrap();
    let is_woken = || {
        let quiet = EventFd::new().unwrap();
        wait::sleep([quiet.as_fd(); 2], &[fd], Some(Duration::ZERO)).unwrap().contains(2)
    };
    // A bell wakes nobody now, and the end of the turn does.
    listen_soon(&mut client);
    assert!(!is_woken());
    assert!(client.before_sleep());
    assert!(is_woken());
    wakes(&rig, true);
    assert!(!is_woken());
    rig.run(Duration::from_millis(1));
    assert!(!rig.server.lock().unwrap().handler().is_cpu_contended());
    assert_eq!(goes_to_sleep(&rig), Some(None), "it sleeps");
    listen_soon(&mut client);
    assert!(is_woken(), "bells wake as ever");
    wakes(&rig, true);
}

/// Rings.
fn listen_soon(client: &mut Client) {
    client.set_credits(1, 5);
    client.flush();
}

#[test]
fn idle_client_gets_no_yield_until_it_sleeps() {
    let (mut rig, mut client) = rig(70);
    wake_up(&mut client);
    for _ in 0..3 {
        assert_eq!(goes_to_sleep(&rig), TURN);
        client.set_credits(1, 5);
        runs_out(&rig);
        wakes(&rig, false);
        rig.run(Duration::from_micros(50));
    }
    assert_eq!(goes_to_sleep(&rig), TURN);
    wakes(&rig, false);
    assert_eq!(goes_to_sleep(&rig), TURN, "something else had ended that one");
    runs_out(&rig);
    wakes(&rig, false);
    assert!(!rig.server.lock().unwrap().handler().is_cpu_contended());
    assert_eq!(goes_to_sleep(&rig), Some(None), "it does something else, and the shard looks at its devices");
    wakes(&rig, false);
    assert!(client.before_sleep());
    assert_eq!(goes_to_sleep(&rig), Some(None));
    wakes(&rig, false);
    client.after_sleep(true);
    assert_eq!(goes_to_sleep(&rig), TURN);
    wakes(&rig, false);
}

#[test]
fn penalised_domain_is_skipped_every_other_sleep() {
    let (rig, mut client) = rig(70);
    let other = {
        let (domain, parts) = SameThread(rig.server.clone()).open_domain().unwrap();
        Client::open(parts, Box::new(domain)).unwrap()
    };
    // This is where the client says that it is from now on, wherever it goes.
    wake_up(&mut client);
    let mut takes_all = |rig: &Fixture| {
        let turn = goes_to_sleep(rig);
        client.set_credits(1, 5);
        if turn == TURN {
            runs_out(rig);
        }
        wakes(rig, false);
        turn
    };
    let is_in_the_way = |rig: &Fixture| rig.server.lock().unwrap().handler().is_cpu_contended();
    for _ in 0..5 {
        assert_eq!(takes_all(&rig), TURN);
        assert!(!is_in_the_way(&rig), "the shard may poll");
        let mut turned = rig.server.lock().unwrap();
        let now = turned.now();
        turned.poll_once(now).unwrap();
        drop(turned);
        assert_eq!(takes_all(&rig), Some(None), "it sleeps on its devices");
        let mut turned = rig.server.lock().unwrap();
        turned.poll_once(now).unwrap();
        drop(turned);
        assert!(is_in_the_way(&rig));
    }
    drop(other);
    for _ in 0..3 {
        assert_eq!(takes_all(&rig), TURN, "it hurts nobody but itself");
        let mut turned = rig.server.lock().unwrap();
        let now = turned.now();
        turned.poll_once(now).unwrap();
    }
}

#[test]
fn zero_turn_us_disables_yielding() {
    let (rig, mut client) = rig(0);
    wake_up(&mut client);
    assert!(!rig.server.lock().unwrap().handler().is_cpu_contended());
    assert_eq!(goes_to_sleep(&rig), Some(None));
    wakes(&rig, false);
}
