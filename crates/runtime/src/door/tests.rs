//! The door with a shard that runs on a thread, over memory to a peer that runs on another.

use super::*;
use crate::channel::tests::{Dial, Peer, config, small};
use crate::channel::{ChannelConfig, ChannelServer, Client, ClientEvent};
use crate::own_fd::OwnFd;
use crate::{Conn, ConnectOptions, ListenOptions, Shard, StopFlag};
use ginnel_devices::memory::{MemoryConfig, pair};
use rustix::fd::AsFd;
use std::time::{Duration, Instant};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// A stack at 10.0.0.1 and a peer at 10.0.0.2 that echoes, each on a thread, until it is dropped. With several shards each has a cable of its own, to a peer
/// of its own.
struct Rig {
    door: Door,
    peers: Vec<Commander>,
    stop: StopFlag,
    threads: Vec<JoinHandle<()>>,
}

impl Rig {
    fn new(channel: &ChannelConfig, path: Option<&Path>) -> Self {
        Self::with_shards(1, channel, path)
    }

    fn with_shards(count: usize, channel: &ChannelConfig, path: Option<&Path>) -> Self {
        Self::on_terms(count, channel, path, Terms::default())
    }

    fn on_terms(count: usize, channel: &ChannelConfig, path: Option<&Path>, terms: Terms) -> Self {
        let stop = StopFlag::new().unwrap();
        let (mut servers, mut peers, mut threads) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..count {
            let (a, b) = pair(MemoryConfig::default());
            let served = ChannelServer::for_processes(channel).unwrap();
            let server = Shard::builder(config("10.0.0.1/24")).handler(served).device("cable", a);
            let peer = Peer { echoes: true, listens: true, ..Peer::default() };
            let peer = Shard::builder(config("10.0.0.2/24")).handler(peer).device("cable", b);
            let (mut server, mut peer) = (server.build().unwrap(), peer.build().unwrap());
            servers.push(server.commander());
            peers.push(peer.commander());
            let (first, second) = (stop.clone(), stop.clone());
            threads.push(std::thread::spawn(move || server.run(&first).unwrap()));
            threads.push(std::thread::spawn(move || peer.run(&second).unwrap()));
        }
        let door = Door::open_with(path, servers, terms).unwrap();
        Self { door, peers, stop, threads }
    }

    fn dial(&self, port: u16, text: &[u8]) {
        self.dial_from(0, port, text);
    }

    fn dial_from(&self, peer: usize, port: u16, text: &[u8]) {
        self.peers[peer].send(Box::new(Dial(port, text.to_vec()))).unwrap();
    }

    /// Attaches a process of this domain: here, another thread would do as well.
    fn attach(&self, domain: &str) -> Process {
        Process::over(self.door.hand_in(domain).unwrap()).unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.stop();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

/// The next event for which `wanted` has an answer. The others are passed over.
fn wait_for<T>(client: &mut Client, mut wanted: impl FnMut(&mut Client, ClientEvent) -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        while let Some(event) = client.next_event() {
            if let Some(found) = wanted(client, event) {
                return found;
            }
        }
        assert!(Instant::now() < until, "nothing came");
        client.sleep(Some(Duration::from_millis(100))).unwrap();
    }
}

fn wait_for_text(client: &mut Client, conn: Conn, text: &[u8]) {
    let mut got = Vec::<u8>::new();
    let mut take = |client: &mut Client| {
        let mut out = [0; 4096];
        let count = client.recv(conn, &mut out).unwrap();
        got.extend(&out[..count]);
        (got.len() >= text.len()).then(|| assert_eq!(got, text))
    };
    if take(client).is_none() {
        wait_for(client, |client, _| take(client));
    }
}

fn listen(client: &mut Client, port: u16) -> u32 {
    client.listen(([0, 0, 0, 0], port).into(), ListenOptions::default(), 4).unwrap()
}

fn accept(client: &mut Client) -> Conn {
    wait_for(client, |_, event| match event {
        ClientEvent::Accepted { conn, .. } => Some(conn),
        _ => None,
    })
}

#[test]
fn processes_of_two_domains_are_attached_listen_connect_and_go() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let rig = Rig::new(&small(), Some(&path));
    let mut first = Process::connect(&path, "first").unwrap();
    let mut second = rig.attach("second");
    let (one, two) = (&mut first.clients()[0], &mut second.clients()[0]);
    listen(one, 80);
    let error = two.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default(), 1).unwrap_err();
    assert_eq!(error.to_string(), "listen on 0.0.0.0:80: address already in use", "of the other domain");
    listen(two, 81);
    rig.dial(80, b"to the first");
    rig.dial(81, b"to the second");
    let (to_one, to_two) = (accept(one), accept(two));
    wait_for_text(one, to_one, b"to the first");
    wait_for_text(two, to_two, b"to the second");
    assert_eq!(one.info(to_one).unwrap().local, "10.0.0.1:80".parse().unwrap());
    let out = two.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    two.send(out, b"there and back").unwrap();
    two.flush();
    wait_for_text(two, out, b"there and back");
    let stats = rig.door.stats();
    assert_eq!((stats.admitted, stats.buried, stats.refused), (2, 0, 0));
    drop(first);
    // Its port is free as soon as it was buried.
    let until = Instant::now() + PATIENCE;
    while second.clients()[0].listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default(), 1).is_err() {
        assert!(Instant::now() < until);
    }
    assert_eq!(rig.door.stats().buried, 1);
    assert!(!second.is_gone());
    drop(rig);
    assert!(second.is_gone());
    let error = second.clients()[0].connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default());
    assert!(matches!(error, Err(Error::StackGone)));
}

#[test]
fn whoever_finds_no_room_or_speaks_another_version_is_told_so() {
    let rig = Rig::new(&ChannelConfig { domains_max: 2, ..small() }, None);
    let refused = |domain: &str| Process::over(rig.door.hand_in(domain).unwrap()).err().unwrap();
    let first: Vec<Process> = (0..3).map(|_| rig.attach("first")).collect();
    assert!(matches!(refused("first"), Error::Refused(Refusal::Clients)));
    let _second = rig.attach("second");
    assert!(matches!(refused("third"), Error::Refused(Refusal::Domains)));
    assert_eq!(rig.door.stats().no_room, 2);
    drop(first);
    // The domain went with its last process, and another has its place.
    let until = Instant::now() + PATIENCE;
    while Process::over(rig.door.hand_in("third").unwrap()).is_err() {
        assert!(Instant::now() < until);
    }
    let line = rig.door.hand_in("").unwrap();
    let hello = message::Hello { magic: message::MAGIC, version: VERSION + 1, domain: String::new() };
    line::send(&line, &message::encode(5, &hello), &[]).unwrap();
    let mut buffer = line::buffer();
    let bytes = loop {
        if let line::Received::Packet(bytes, _) = line::receive(&line, &mut buffer) {
            break bytes;
        }
    };
    let (5, Some(message::Answer::Refused(why))) = message::decode(&buffer[..bytes]) else {
        panic!("{bytes}")
    };
    assert_eq!(why, Refusal::Version(VERSION));
}

#[test]
fn a_message_that_was_cut_or_grown_or_changed_is_no_message_or_another() {
    use super::codec::Code;
    use super::message::{Ask, decode, encode};
    let ask = encode(7, &Ask::Resolve(77));
    assert!(matches!(decode::<Ask>(&ask), (7, Some(Ask::Resolve(77)))));
    for end in 0..ask.len() {
        assert!(decode::<Ask>(&ask[..end]).1.is_none(), "{end}");
    }
    let mut longer = ask.clone();
    0u8.put(&mut longer);
    assert!(decode::<Ask>(&longer).1.is_none());
    // A list that says it is longer than memory is.
    let mut list = encode(1, &Ask::Start(Vec::new()));
    let end = list.len();
    list[end - 4..].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(decode::<Ask>(&list).1.is_none());
}

/// A process has a client on each shard, and one descriptor wakes it for all of them.
#[test]
fn a_process_uses_all_shards_and_sleeps_once() {
    let rig = Rig::with_shards(3, &small(), None);
    let mut process = rig.attach("");
    for client in process.clients() {
        listen(client, 80);
    }
    for shard in [2, 0, 1, 1] {
        rig.dial_from(shard, 80, &[b'a' + shard as u8; 10]);
        // It sleeps on the descriptor of another one.
        let until = Instant::now() + PATIENCE;
        let mut came = Vec::new();
        while came.is_empty() {
            assert!(Instant::now() < until, "nothing came");
            let quiet = process.clients().iter_mut().all(Client::before_sleep);
            if quiet {
                let first = &process.clients()[0];
                let fd = first.wake_fd().try_clone_to_owned().unwrap();
                crate::wait::sleep([fd.as_fd(), fd.as_fd()], &[], Some(Duration::from_secs(1))).unwrap();
            }
            for (number, client) in process.clients().iter_mut().enumerate() {
                client.after_sleep(true);
                while let Some(event) = client.next_event() {
                    if let ClientEvent::Accepted { conn, .. } = event {
                        came.push((number, conn));
                    }
                }
            }
        }
        let [(number, conn)] = came[..] else { panic!("{came:?}") };
        assert_eq!(number, shard);
        wait_for_text(&mut process.clients()[number], conn, &[b'a' + shard as u8; 10]);
    }
    // Things of several shards travel together.
    let mut other = rig.attach("");
    let mut things: Vec<Held> = (0..3).map(|shard| Held::listener(shard, 0)).collect();
    things.extend(process.held());
    assert_eq!(things.len(), 3 + 4);
    let placeholder = process.share(&things).unwrap();
    assert_eq!(other.resolve(&placeholder).unwrap(), things);
    assert_eq!(other.held().len(), 4);
    let error = process.share(&[Held::listener(3, 0)]).unwrap_err();
    assert!(matches!(error, Error::Refused(Refusal::Unknown)));
    let error = process.share(&[Held::listener(0, 0), Held::listener(1, 7)]).unwrap_err();
    assert!(matches!(error, Error::Refused(Refusal::Unknown)), "the second it does not hold");
    // What was held for it before the second was found out is not held any more: nobody but the first process and the placeholder has the listeners.
    drop((process, placeholder));
    for client in other.clients() {
        client.set_credits(0, 4);
        client.flush();
    }
    rig.dial_from(1, 80, b"still served");
    accept(&mut other.clients()[1]);
    drop(other);
    let mut late = rig.attach("");
    let until = Instant::now() + PATIENCE;
    for client in late.clients() {
        while client.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default(), 1).is_err() {
            assert!(Instant::now() < until, "the port is held by nobody");
        }
    }
}

#[test]
fn a_stack_that_shows_itself_is_found_in_its_directory() {
    let base = tempfile::tempdir().unwrap();
    let config = crate::config::RunConfig { name: Some("mine".into()), ..Default::default() };
    let presence = Presence::new_in(base.path(), &config, "test").unwrap().unwrap();
    let rig = Rig::new(&small(), None);
    let door = Door::open_for(&presence, Vec::new(), Terms::default()).unwrap();
    let path = crate::run_dir::running_in(base.path()).unwrap()[0].path.join("control");
    let mut process = Process::connect(&path, "").unwrap();
    assert_eq!(process.clients().len(), 0, "it has no shards");
    let directory = presence.dir().path();
    let users = || crate::inspect::users(directory).unwrap();
    assert_eq!(users().iter().map(|user| user.pid).collect::<Vec<_>>(), [std::process::id()]);
    let child = process.expect_child().unwrap();
    assert_eq!((users().len(), users()[1].pid, door.processes()), (2, 0, 2));
    // Who has come is told of, though the door may not have been looked at yet.
    let mut guests = Vec::new();
    while guests.len() < 20 {
        guests.push(Guest::come(&path).unwrap());
        assert_eq!(users().len(), 2 + guests.len());
    }
    drop((child, process, guests));
    let until = Instant::now() + PATIENCE;
    while !users().is_empty() {
        assert!(Instant::now() < until, "{:?}", users());
    }
    drop((door, rig));
    assert!(matches!(Process::connect(&path, ""), Err(Error::Io(..))));
}

#[test]
fn sockets_on_their_way_are_bounded_for_each_domain() {
    let rig = Rig::new(&small(), None);
    let (mut greedy, mut good) = (rig.attach("greedy"), rig.attach("good"));
    listen(&mut greedy.clients()[0], 80);
    listen(&mut good.clients()[0], 81);
    let listener = [Held::listener(0, 0)];
    let mut on_their_way: Vec<OwnedFd> =
        (0..serve::PLACEHOLDERS_MAX).map(|_| greedy.share(&listener).unwrap()).collect();
    assert!(matches!(greedy.share(&listener), Err(Error::Refused(Refusal::Placeholders))));
    assert_eq!(rig.door.stats().no_room, 1);
    let placeholder = good.share(&listener).unwrap();
    assert_eq!(good.resolve(&placeholder).unwrap(), listener);
    // One arrives nowhere, and there is room for another.
    on_their_way.pop();
    let until = Instant::now() + PATIENCE;
    while greedy.share(&listener).is_err() {
        assert!(Instant::now() < until);
    }
}

#[test]
fn those_who_come_and_say_nothing_make_room_for_those_who_do() {
    let rig = Rig::new(&small(), None);
    let mut early = rig.attach("");
    let silent: Vec<OwnedFd> = (0..3 * serve::SILENT_MAX).map(|_| rig.door.hand_in("").unwrap()).collect();
    let mut late = rig.attach("");
    assert!(rig.door.stats().turned_away >= 2 * serve::SILENT_MAX as u64);
    for process in [&mut early, &mut late] {
        let client = &mut process.clients()[0];
        let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
        client.send(conn, b"as ever").unwrap();
        wait_for_text(client, conn, b"as ever");
    }
    drop(silent);
}

#[test]
fn a_guest_takes_no_place_and_leads_in_whoever_has_its_connection() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let rig = Rig::new(&ChannelConfig { clients_max: 2, ..small() }, Some(&path));
    let guests: Vec<Guest> = (0..10).map(|_| Guest::come(&path).unwrap()).collect();
    let until = Instant::now() + PATIENCE;
    while rig.door.processes() < guests.len() {
        assert!(Instant::now() < until, "they are known");
    }
    assert_eq!(rig.door.stats().admitted, 0);
    // A forked process has the same connection.
    let (mut first, second) = (guests[0].enter().unwrap(), guests[0].enter().unwrap());
    assert!(matches!(guests[1].enter(), Err(Error::Refused(Refusal::Clients))), "there are two places");
    let client = &mut first.clients()[0];
    let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    client.send(conn, b"as ever").unwrap();
    wait_for_text(client, conn, b"as ever");
    drop(second);
    while guests[1].enter().is_err() {
        assert!(Instant::now() < until, "one went");
    }
    drop((guests, first));
    while rig.door.processes() > 0 {
        assert!(Instant::now() < until, "nobody is there any more: {:?}", rig.door.users());
    }
    let more: Vec<Guest> = (0..=serve::GUESTS_MAX).map(|_| Guest::come(&path).unwrap()).collect();
    while rig.door.stats().turned_away == 0 {
        assert!(Instant::now() < until, "there are only so many");
    }
    assert_eq!(rig.door.processes(), serve::GUESTS_MAX);
    assert!(more[serve::GUESTS_MAX].enter().is_err());
    assert!(more[0].enter().is_ok());
}

/// What another user's program says does not matter: which user has made its connection the kernel knows.
#[test]
fn who_follows_somebody_inside_as_another_user_has_a_domain_of_its_own_and_no_low_ports() {
    use rustix::thread::{Uid, set_thread_res_uid};
    use std::os::unix::process::CommandExt;

    const FOLLOWER: &str = "GINNEL_TEST_FOLLOWER";
    if std::env::var_os(FOLLOWER).is_some() {
        let line = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        let mut process = Guest::over(line).unwrap().enter().unwrap();
        let client = &mut process.clients()[0];
        for low in [80, 1023] {
            let refused = client.listen(([0, 0, 0, 0], low).into(), ListenOptions::default(), 4);
            assert!(matches!(refused, Err(Error::Refused(Refusal::Port(1024)))), "{refused:?}");
        }
        listen(client, 1024);
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return ginnel_testkit::skip("door::tests other users", "only root can be another user");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let terms = Terms { unprivileged_port_start: 1024, ..Terms::default() };
    let rig = Rig::on_terms(1, &ChannelConfig { domains_max: 2, ..small() }, Some(&path), terms);
    let (inside, guest) = (rig.attach(""), Guest::come(&path).unwrap());
    let nobody = Uid::from_raw(65_534);
    // Of this thread alone, and for good.
    let follow = move || {
        set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let lines = [inside.followed().unwrap(), guest.followed().unwrap()];
        (inside, lines)
    };
    let (mut inside, [from_inside, from_guest]) = std::thread::spawn(follow).join().unwrap();
    let spoken = from_inside.as_fd().try_clone_to_owned().unwrap();
    let come = |line: OwnFd| Guest::over(line.as_fd().try_clone_to_owned().unwrap()).unwrap();
    let (first, second) = (come(from_inside), come(from_guest));
    let (mut one, mut two) = (first.enter().unwrap(), second.enter().unwrap());
    // Both are in the second domain, and there is no third.
    assert!(matches!(
        Process::over(rig.door.hand_in("another").unwrap()),
        Err(Error::Refused(Refusal::Domains))
    ));
    // What one holds the other may share; what the first domain holds, neither.
    listen(&mut one.clients()[0], 8000);
    listen(&mut inside.clients()[0], 8001);
    let sockets =
        [one.share(&[Held::listener(0, 0)]).unwrap(), inside.share(&[Held::listener(0, 0)]).unwrap()];
    assert!(two.resolve(&sockets[0]).is_ok());
    assert!(matches!(two.resolve(&sockets[1]), Err(Error::Refused(Refusal::Unknown))));
    // In a process of its own, whose rights count and not this one's.
    let name = "who_follows_somebody_inside_as_another_user_has_a_domain_of_its_own_and_no_low_ports";
    let mut follower = std::process::Command::new(std::env::current_exe().unwrap());
    follower.args(["--exact", &format!("door::tests::{name}")]).env(FOLLOWER, "1").uid(65_534);
    let output = follower.stdin(spoken.try_clone().unwrap()).current_dir("/").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    listen(&mut inside.clients()[0], 80);
    // What a guest says that makes no sense is counted.
    let before = rig.door.stats().refused;
    line::send(&spoken, &[9], &[]).unwrap();
    let until = Instant::now() + PATIENCE;
    while rig.door.stats().refused == before {
        assert!(Instant::now() < until);
    }
    assert!(first.enter().is_ok(), "it stays");
}

/// The door's thread is one for all: it waits for nobody who is at the door.
#[test]
fn who_asks_without_end_reads_no_answer_or_says_nothing_keeps_no_other_waiting() {
    use super::message::{Ask, Hello, MAGIC, encode};
    use std::sync::atomic::AtomicBool;

    let rig = Rig::new(&small(), None);
    let mut good = rig.attach("good");
    let _silent = rig.door.hand_in("silent").unwrap();
    let (stop, asked) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let flood = || {
            while !stop.load(Ordering::Relaxed) {
                let line = rig.door.hand_in("greedy").unwrap();
                let this = rustix::process::pidfd_open(
                    rustix::process::getpid(),
                    rustix::process::PidfdFlags::empty(),
                );
                let hello = Hello { magic: MAGIC, version: VERSION, domain: String::new() };
                line::send(&line, &encode(0, &hello), &[this.unwrap().as_fd()]).unwrap();
                // Until it is sent away, because nobody takes the answers. Full is not yet away.
                loop {
                    match line::send(&line, &encode(1, &Ask::Attach(0)), &[]) {
                        Ok(()) => drop(asked.fetch_add(1, Ordering::Relaxed)),
                        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                            std::thread::yield_now();
                        }
                        Err(_) => break,
                    }
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            }
        };
        let flooder = scope.spawn(flood);
        let until = Instant::now() + PATIENCE;
        while asked.load(Ordering::Relaxed) < 100 && Instant::now() < until {
            std::thread::yield_now();
        }
        let client = &mut good.clients()[0];
        let mut longest = Duration::ZERO;
        for port in 100..150 {
            let begun = Instant::now();
            let listener = listen(client, port);
            client.unlisten(listener).unwrap();
            longest = longest.max(begun.elapsed());
        }
        stop.store(true, Ordering::Relaxed);
        flooder.join().unwrap();
        // On a busy machine a turn of a thread takes its time; who is stuck is so for good.
        assert!(longest < Duration::from_secs(2), "{longest:?}");
        assert!(asked.load(Ordering::Relaxed) >= 100);
    });
}
