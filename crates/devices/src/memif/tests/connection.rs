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
    device.tx.reserve(100).expect("space").fill(byte);
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
fn link_follows_the_life_of_the_peer() {
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
            assert!(sleep(device.rx.wake_fd(), PATIENCE), "a sleeping receiver is woken");
            assert!(memif.link.wait_for(false, PATIENCE));
            assert_eq!(received(device), []);
            send(device, 2);
            assert_eq!(get(&memif.stats.tx_dropped), dropped + 1);
            assert!(
                device.rx.arm() && !sleep(device.rx.wake_fd(), Duration::from_millis(5)),
                "the receiver can sleep"
            );
            assert_eq!(get(&memif.stats.connections), round);
        }
    }
}

#[test]
fn unread_frames_are_lost_with_the_connection() {
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
    samples.min().expect("twenty samples")
}

#[test]
fn closed_connections_leave_no_resources() {
    if !is_alone("memif::tests::connection::closed_connections_leave_no_resources") {
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
            assert!(descriptors > before.0 && mappings > before.1, "the connection is visible");
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
fn interface_closes_with_its_last_half() {
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
fn id_and_secret_are_required() {
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
            assert!(Instant::now() < deadline, "client {number} is not refused");
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
    assert!(second.link.wait_for(true, PATIENCE), "the client is accepted");
}

/// At most eight clients may be in the handshake. Silent ones delay the next client until their timeout, and
/// not longer.
// limit: memif peers in their handshake
#[test]
fn silent_clients_time_out() {
    use crate::memif::socket::connect_to;
    let folder = Folder::new();
    let mut server = device(&folder, Role::Server, |_| {});
    let silent: Vec<_> =
        (0..12).map(|_| connect_to(&folder.socket()).expect("the backlog accepts the client")).collect();
    let mut client = device(&folder, Role::Client, |_| {});
    assert!(!client.link.wait_for(true, Duration::from_millis(500)), "eight clients precede this one");
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
fn queues_missing_at_the_peer_stay_down() {
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
fn peer_is_interrupted_only_on_request() {
    for role in ROLES {
        let folder = Folder::new();
        let mut memif = device(&folder, role, |_| {});
        let mut meet = Peer::stranger(&memif, &folder);
        let peer = meet.connect(true);
        assert!(memif.link.wait_for(true, PATIENCE));
        let link = peer.link.as_ref().expect("connected");
        let takes = if role == Role::Server { &link.to_client[0] } else { &link.to_server[0] };
        let signals = |wanted: bool, device: &mut Device| {
            takes.ring.set_interrupts_enabled(wanted);
            send(device, 1);
            send(device, 2);
            device.tx.flush(Time::ZERO);
            let mut counter = [0; 8];
            rustix::io::read(takes.interrupt.fd(), &mut counter).map_or(0, |_| u64::from_ne_bytes(counter))
        };
        let device = &mut memif.queues[0];
        assert_eq!(signals(false, device), 0);
        assert_eq!(signals(true, device), 2, "one signal for each flush with new frames");
        assert_eq!(signals(false, device), 0);
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
        assert!(!sleep(device.rx.wake_fd(), Duration::from_millis(1)), "the interrupt was consumed");
    }
}

#[test]
fn device_receives_from_every_queue() {
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
        assert!(sleep(one.rx.wake_fd(), PATIENCE), "queue {number} wakes the device");
        assert_eq!(received(&mut one), [number]);
    }
    send(&mut one, 9);
    let all: Vec<_> = server.queues.iter_mut().map(received).collect();
    assert_eq!(all, [vec![9], vec![], vec![]]);
}

#[test]
fn backlog_is_what_the_peer_has_not_taken() {
    let folder = Folder::new();
    let [mut server, mut client] = ROLES.map(|role| device(&folder, role, |_| {}));
    assert!(client.link.wait_for(true, PATIENCE) && server.link.wait_for(true, PATIENCE));
    let (server, client) = (&mut server.queues[0], &mut client.queues[0]);
    for is_server in [true, false] {
        let (near, far) = if is_server { (&mut *server, &mut *client) } else { (&mut *client, &mut *server) };
        assert_eq!(received(far), []);
        assert!(near.tx.has_backlog(0) && !near.tx.has_backlog(1));
        (0..10).for_each(|byte| send(near, byte));
        assert!(near.tx.has_backlog(10) && !near.tx.has_backlog(11));
        let mut count = 0;
        while count < 10 {
            count += received(far).len();
        }
        // The frames are lent until the next call.
        assert_eq!(received(far), []);
        assert!(!near.tx.has_backlog(1));
    }
}
