//! Tests of connections that come up and go down.

use super::peer::Peer;
use super::*;
use crate::conformance::sleep;
use ginnel_stack::device::{RxBurst, TxMeta};
use ginnel_stack::time::Instant as Time;
use std::process::Command;

const ROLES: [Role; 2] = [Role::Server, Role::Client];

fn device(folder: &Folder, role: Role, adjust: impl Fn(&mut MemifConfig)) -> Memif {
    let mut config = MemifConfig { ring: 64, ..MemifConfig::new(folder.socket(), role) };
    adjust(&mut config);
    open(&config).expect("a device")
}

fn send(device: &mut Device, byte: u8) {
    device.tx.reserve(100).expect("room").fill(byte);
    device.tx.commit(100, TxMeta::default());
    device.tx.flush(Time::ZERO);
}

fn received(device: &mut Device) -> Vec<u8> {
    let mut burst = RxBurst::new();
    device.rx.rx_burst(Time::ZERO, &mut burst);
    burst.iter().map(|frame| frame.bytes[0]).collect()
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[test]
fn a_peer_that_dies_takes_the_link_down_and_the_next_one_brings_it_up() {
    for role in ROLES {
        let folder = Folder::new();
        let mut memif = device(&folder, role, |_| {});
        assert!(!memif.link.is_up());
        let mut meet = Peer::stranger(&memif, &folder);
        for round in 1..=3 {
            let peer = meet.connect(true);
            assert!(memif.link.wait_for(true, PATIENCE));
            let device = &mut memif.queues[0];
            let dropped = get(&memif.stats.tx_dropped);
            assert_eq!(received(device), []);
            send(device, 1);
            assert_eq!(get(&memif.stats.tx_dropped), dropped);
            // The connection itself may end the first sleep.
            while device.rx.arm() && sleep(device.rx.wake_fd(), Duration::from_millis(1)) {
                assert_eq!(received(device), []);
            }
            // Closes the connection without DISCONNECT, as after kill -9.
            drop(peer);
            assert!(sleep(device.rx.wake_fd(), PATIENCE), "a receiver that sleeps is woken");
            assert!(memif.link.wait_for(false, PATIENCE));
            assert_eq!(received(device), []);
            send(device, 2);
            assert_eq!(get(&memif.stats.tx_dropped), dropped + 1);
            assert!(device.rx.arm() && !sleep(device.rx.wake_fd(), Duration::from_millis(5)), "it can sleep");
            assert_eq!(get(&memif.stats.connections), round);
        }
    }
}

#[test]
fn frames_that_nobody_took_are_gone_with_their_connection() {
    let folder = Folder::new();
    let mut server = device(&folder, Role::Server, |_| {});
    for byte in 1..5 {
        let mut client = device(&folder, Role::Client, |_| {});
        assert!(client.link.wait_for(true, PATIENCE) && server.link.wait_for(true, PATIENCE));
        send(&mut client.queues[0], byte);
        assert_eq!(received(&mut server.queues[0]), [byte]);
        send(&mut server.queues[0], byte);
        send(&mut client.queues[0], byte);
        drop(client);
        assert!(server.link.wait_for(false, PATIENCE));
    }
}

/// Runs the test `name` again in a process of its own, in which no other test opens descriptors or maps
/// memory. Returns true in that process.
fn is_alone(name: &str) -> bool {
    const ALONE: &str = "GINNEL_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let program = std::env::current_exe().expect("the test program");
    let mut command = Command::new(program);
    let status = command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(ALONE, "1").status();
    assert!(status.expect("the test program").success(), "{name} failed");
    false
}

/// Returns the number of open descriptors, and of mappings of shared memory, of this process.
fn holdings() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    (descriptors, maps.lines().filter(|line| line.contains("ginnel-memif")).count())
}

/// Returns the minimum of several samples, which excludes the socket that a client opens now and then to
/// connect to its server.
fn at_rest() -> (usize, usize) {
    let samples = (0..20).map(|_| {
        thread::sleep(Duration::from_millis(1));
        holdings()
    });
    samples.min().expect("twenty of them")
}

#[test]
fn nothing_is_left_of_connections_that_are_gone() {
    if !is_alone("memif::tests::connection::nothing_is_left_of_connections_that_are_gone") {
        return;
    }
    for role in ROLES {
        let folder = Folder::new();
        let mut memif = device(&folder, role, |config| config.queues = 3);
        let before = at_rest();
        let mut meet = Peer::stranger(&memif, &folder);
        for round in 0..40 {
            let peer = meet.connect(round % 2 == 0);
            assert!(memif.link.wait_for(true, PATIENCE));
            let (descriptors, mappings) = holdings();
            assert!(descriptors > before.0 && mappings > before.1, "the connection is seen here");
            // Some connections come up and go down without any access by the halves.
            if round % 3 != 0 {
                memif.queues.iter_mut().for_each(|device| send(device, 0));
                memif.queues.iter_mut().for_each(|device| drop(received(device)));
            }
            drop(peer);
            assert!(memif.link.wait_for(false, PATIENCE));
        }
        for device in &mut memif.queues {
            assert_eq!(received(device), []);
            device.tx.flush(Time::ZERO);
        }
        if role == Role::Server {
            // The link is down, so all resources of the last connection have been released.
            assert_eq!(holdings(), before);
        }
        // A client may just be connecting to the listener again.
        drop(meet);
        let (deadline, mut after) = (Instant::now() + PATIENCE, at_rest());
        while after != before && Instant::now() < deadline {
            after = at_rest();
        }
        assert_eq!(after, before, "{role:?}");
    }
    let threads = std::fs::read_dir("/proc/self/task").expect("procfs").count();
    assert!(threads <= 3, "{threads} threads are left");
}

#[test]
fn the_interface_closes_with_its_last_half() {
    let folder = Folder::new();
    let mut server = device(&folder, Role::Server, |config| config.queues = 2);
    let client = device(&folder, Role::Client, |config| config.queues = 2);
    assert!(client.link.wait_for(true, PATIENCE));
    let Device { rx, tx } = server.queues.remove(0);
    drop(server);
    drop(rx);
    assert!(client.link.is_up() && folder.path("socket").exists());
    drop(tx);
    assert!(!folder.path("socket").exists());
    assert!(client.link.wait_for(false, PATIENCE));
}

#[test]
fn only_who_knows_id_and_secret_is_let_in_and_only_one() {
    let folder = Folder::new();
    let secret = |secret: &str| Some(secret.to_string());
    let server = device(&folder, Role::Server, |config| (config.id, config.secret) = (5, secret("word")));
    let strangers: [(u32, Option<String>); 4] =
        [(4, secret("word")), (5, None), (5, secret("wor")), (5, secret("words"))];
    for (number, (id, secret)) in (1..).zip(strangers) {
        let stranger = device(&folder, Role::Client, |config| {
            (config.id, config.secret) = (id, secret.clone());
        });
        let deadline = Instant::now() + PATIENCE;
        while get(&server.stats.refused) < number {
            assert!(Instant::now() < deadline, "stranger {number} is not refused");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(!stranger.link.is_up() && !server.link.is_up());
        drop(stranger);
    }
    let known = |config: &mut MemifConfig| (config.id, config.secret) = (5, secret("word"));
    let first = device(&folder, Role::Client, known);
    assert!(first.link.wait_for(true, PATIENCE));
    let refused = get(&server.stats.refused);
    let second = device(&folder, Role::Client, known);
    let deadline = Instant::now() + PATIENCE;
    while get(&server.stats.refused) == refused {
        assert!(Instant::now() < deadline, "the second client is not refused");
        thread::sleep(Duration::from_millis(1));
    }
    assert!(first.link.is_up() && !second.link.is_up());
    drop(first);
    assert!(second.link.wait_for(true, PATIENCE), "now it is its turn");
}

/// At most eight clients may be in the handshake. Silent ones delay the next client until their timeout, and
/// not longer.
// limit: memif peers in their handshake
#[test]
fn clients_that_say_nothing_are_sent_away_and_the_next_is_served() {
    use crate::memif::socket::connect_to;
    let folder = Folder::new();
    let mut server = device(&folder, Role::Server, |_| {});
    let silent: Vec<_> =
        (0..12).map(|_| connect_to(&folder.socket()).expect("the backlog has room")).collect();
    let mut client = device(&folder, Role::Client, |_| {});
    assert!(!client.link.wait_for(true, Duration::from_millis(500)), "eight others are before it");
    assert!(client.link.wait_for(true, 2 * PATIENCE) && server.link.wait_for(true, PATIENCE));
    // The remaining four clients were accepted together with it, and have not been disconnected yet.
    assert!(get(&server.stats.refused) < 12, "{:?}", server.stats);
    let deadline = Instant::now() + PATIENCE;
    while get(&server.stats.refused) < 8 {
        assert!(Instant::now() < deadline, "{:?}", server.stats);
        thread::sleep(Duration::from_millis(1));
    }
    send(&mut client.queues[0], 7);
    assert_eq!(received(&mut server.queues[0]), [7]);
    drop(silent);
}

#[test]
fn queues_that_the_peer_does_not_have_stay_down() {
    for (role, other) in [(Role::Server, Role::Client), (Role::Client, Role::Server)] {
        let folder = Folder::new();
        let mut many = device(&folder, role, |config| config.queues = 3);
        let mut few = device(&folder, other, |config| config.queues = 2);
        assert!(many.link.wait_for(true, PATIENCE) && few.link.wait_for(true, PATIENCE));
        for (number, device) in (0u8..).zip(&mut many.queues) {
            send(device, number);
        }
        assert_eq!(get(&many.stats.tx_dropped), 1);
        assert_eq!(received(&mut few.queues[0]), [0]);
        assert_eq!(received(&mut few.queues[1]), [1]);
        send(&mut few.queues[1], 7);
        let all: Vec<_> = many.queues.iter_mut().map(received).collect();
        assert_eq!(all, [vec![], vec![7], vec![]]);
    }
}

#[test]
fn the_peer_is_woken_only_if_it_asked_for_it() {
    for role in ROLES {
        let folder = Folder::new();
        let mut memif = device(&folder, role, |_| {});
        let mut meet = Peer::stranger(&memif, &folder);
        let peer = meet.connect(true);
        assert!(memif.link.wait_for(true, PATIENCE));
        let link = peer.link.as_ref().expect("connected");
        let takes = if role == Role::Server { &link.to_client[0] } else { &link.to_server[0] };
        let rings = |wanted: bool, device: &mut Device| {
            takes.ring.set_interrupts_enabled(wanted);
            send(device, 1);
            send(device, 2);
            device.tx.flush(Time::ZERO);
            let mut counter = [0; 8];
            rustix::io::read(takes.interrupt.fd(), &mut counter).map_or(0, |_| u64::from_ne_bytes(counter))
        };
        let device = &mut memif.queues[0];
        assert_eq!(rings(false, device), 0);
        assert_eq!(rings(true, device), 2, "once for each flush that shows something new");
        assert_eq!(rings(false, device), 0);
        // In the other direction, the ring's flag tells whether the device sleeps.
        let sends = if role == Role::Server { &link.to_server[0] } else { &link.to_client[0] };
        assert_eq!(received(device), []);
        assert!(!sends.ring.are_interrupts_enabled());
        assert!(device.rx.arm());
        assert!(sends.ring.are_interrupts_enabled());
        Signaller::new().expect("a descriptor").signal(sends.interrupt.fd());
        assert!(sleep(device.rx.wake_fd(), PATIENCE));
        assert_eq!(received(device), []);
        assert!(!sends.ring.are_interrupts_enabled());
        assert!(!sleep(device.rx.wake_fd(), Duration::from_millis(1)), "the bell was heard");
    }
}

#[test]
fn one_device_hears_every_queue_of_its_peer() {
    let folder = Folder::new();
    let mut server = device(&folder, Role::Server, |config| config.queues = 3);
    let client = device(&folder, Role::Client, |config| config.queues = 3);
    assert!(client.link.wait_for(true, PATIENCE) && server.link.wait_for(true, PATIENCE));
    let mut one = client.into_single_device().expect("a descriptor");
    for (number, queue) in (0u8..).zip(&mut server.queues) {
        // The connection itself may end the first sleep.
        while one.rx.arm() && sleep(one.rx.wake_fd(), Duration::from_millis(1)) {
            assert_eq!(received(&mut one), []);
        }
        send(queue, number);
        assert!(sleep(one.rx.wake_fd(), PATIENCE), "queue {number} wakes it");
        assert_eq!(received(&mut one), [number]);
    }
    send(&mut one, 9);
    let all: Vec<_> = server.queues.iter_mut().map(received).collect();
    assert_eq!(all, [vec![9], vec![], vec![]]);
}
