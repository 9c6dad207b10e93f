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

// limit: channel.clients_max
// limit: channel.domains_max
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
fn a_child_goes_on_without_an_answer_and_nobody_else_says_that_it_is_one() {
    use super::message::{Answer, CHILD, Hello, decode, encode};

    let rig = Rig::with_shards(2, &small(), None);
    let mut process = rig.attach("");
    let client = &mut process.clients()[1];
    let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    client.send(conn, b"of the parent").unwrap();
    wait_for_text(client, conn, b"of the parent");
    let child = process.expect_child().unwrap();
    // Here the parent goes by that, and the child has what it held.
    process.become_child(child).unwrap();
    let client = &mut process.clients()[1];
    client.send(conn, b"of the child").unwrap();
    wait_for_text(client, conn, b"of the child");
    let until = Instant::now() + PATIENCE;
    while (rig.door.stats().buried, rig.door.stats().admitted) != (1, 2) {
        assert!(Instant::now() < until, "one has come, and one gone: {:?}", rig.door.stats());
    }
    let pids: Vec<u32> = rig.door.users().iter().map(|user| user.pid).collect();
    assert_eq!(pids, [std::process::id()]);
    // A program asks for its places, and a stranger has none.
    let program = process.expect_program(&[]).unwrap();
    let this = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty());
    let this = this.unwrap();
    for (line, version, why) in [
        (program.line().try_clone_to_owned().unwrap(), VERSION, Refusal::Unknown),
        (rig.door.hand_in("").unwrap(), VERSION, Refusal::Unknown),
        (rig.door.hand_in("").unwrap(), VERSION + 1, Refusal::Version(VERSION)),
    ] {
        let hello = Hello { magic: CHILD, version, domain: String::new() };
        line::send(&line, &encode(0, &hello), &[this.as_fd()]).unwrap();
        let mut buffer = line::buffer();
        let bytes = loop {
            match line::receive(&line, &mut buffer) {
                line::Received::Packet(bytes, _) => break bytes,
                line::Received::Nothing => assert!(Instant::now() < until),
                other => panic!("{other:?}"),
            }
        };
        let (0, Some(Answer::Refused(told))) = decode(&buffer[..bytes]) else { panic!("an answer") };
        assert_eq!(told, why);
    }
    assert_eq!(rig.door.stats().turned_away, 3);
}

// limit: sockets of a domain in SCM_RIGHTS messages
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

// limit: connections to the broker before their first message
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

// limit: unattached processes
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
    // Where the process may have few descriptors, guests leave half of them to others.
    assert_eq!([Some(1024), Some(1 << 20), None].map(serve::guests_max), [256, 2048, 2048]);
    // One user has no more than it leaves free.
    let most = serve::GUESTS_MAX / 2;
    let mut more: Vec<Guest> = (0..=most).map(|_| Guest::come(&path).unwrap()).collect();
    while rig.door.stats().turned_away == 0 {
        assert!(Instant::now() < until, "there are only so many");
    }
    assert_eq!(rig.door.processes(), most);
    let last = more.pop().unwrap();
    assert!(matches!(last.enter(), Err(Error::Refused(Refusal::Crowd))));
    assert!(more[0].enter().is_ok());
    // Another user's, who come after one of those that are there.
    if rustix::process::geteuid().is_root() {
        let (first, refused) = (more.remove(0), rig.door.stats().turned_away);
        let (its, first) = as_nobody(move || {
            // The door may not have read what came before.
            let come = |_| std::iter::repeat_with(|| first.followed()).find_map(Result::ok).unwrap();
            ((0..=most / 2).map(come).collect::<Vec<OwnFd>>(), first)
        });
        while rig.door.stats().turned_away == refused {
            assert!(Instant::now() < until, "of these there are only so many, too");
        }
        assert_eq!(rig.door.processes(), most + most / 2);
        // When they have gone there is room for others again.
        drop((its, first));
        while rig.door.processes() >= most {
            assert!(Instant::now() < until, "they went");
        }
    }
    let refused = rig.door.stats().turned_away;
    let late = Guest::come(&path).unwrap();
    assert!(late.enter().is_ok());
    assert_eq!(rig.door.stats().turned_away, refused);
}

/// Does something as user nobody.
fn as_nobody<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> T {
    as_user(65_534, what)
}

/// Does something as another user.
fn as_user<T: Send + 'static>(user: u32, what: impl FnOnce() -> T + Send + 'static) -> T {
    use rustix::thread::{Uid, set_thread_res_uid};

    let user = Uid::from_raw(user);
    // Of this thread alone, and for good.
    let done = std::thread::spawn(move || {
        set_thread_res_uid(user, user, user).unwrap();
        what()
    });
    done.join().unwrap()
}

// limit: connections to the broker before their first message
#[test]
fn of_those_who_say_nothing_the_user_with_most_makes_room_and_no_other() {
    use super::message::guest;

    if !rustix::process::geteuid().is_root() {
        return ginnel_testkit::skip("door::tests other users", "only root can be another user");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let rig = Rig::new(&small(), Some(&path));
    let inside = Guest::come(&path).unwrap();
    let early = rig.door.hand_in("").unwrap();
    let silent = as_nobody(move || {
        let come = |_| {
            let (its, stacks) = line::pair().unwrap();
            // As `Guest::followed`, and without a word.
            loop {
                match inside.tell(guest::IS_FOLLOWED, &stacks) {
                    Ok(()) => break its,
                    // The door has not read what came before.
                    Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
                }
            }
        };
        (0..3 * serve::SILENT_MAX).map(come).collect::<Vec<OwnedFd>>()
    });
    let until = Instant::now() + PATIENCE;
    let over = 2 * serve::SILENT_MAX as u64 + 1;
    while rig.door.stats().turned_away < over {
        assert!(Instant::now() < until, "there are only so many: {:?}", rig.door.stats());
    }
    // Whose were most was told so.
    assert!(matches!(Process::over(silent.into_iter().next().unwrap()), Err(Error::Refused(Refusal::Crowd))));
    assert!(Process::over(early).is_ok(), "it had as much time as ever");
    assert_eq!(rig.door.stats().turned_away, over);
}

/// A person is many users in a namespace of users, each with few connections.
// limit: unattached processes
#[test]
fn many_users_that_may_be_one_person_keep_no_other_out() {
    use super::message::guest;

    if !rustix::process::geteuid().is_root() {
        return ginnel_testkit::skip("door::tests many users", "only root can be another user");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let rig = Rig::new(&small(), Some(&path));
    let inside = Arc::new(Guest::come(&path).unwrap());
    let users = |count: usize| (100_000u32..).take(count);
    let until = Instant::now() + PATIENCE;
    // Each says nothing, behind one of an ordinary user's who has said nothing yet, either.
    let silent = |user| {
        let inside = inside.clone();
        as_user(user, move || {
            let (its, stacks) = line::pair().unwrap();
            loop {
                match inside.tell(guest::IS_FOLLOWED, &stacks) {
                    Ok(()) => break its,
                    Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
                }
            }
        })
    };
    let early = [silent(1001), silent(1001)];
    let many: Vec<OwnedFd> = users(2 * serve::SILENT_MAX).map(silent).collect();
    let over = (2 + serve::SILENT_MAX) as u64;
    while rig.door.stats().turned_away < over {
        assert!(Instant::now() < until, "there are only so many: {:?}", rig.door.stats());
    }
    for line in early {
        assert!(Process::over(line).is_ok(), "it had as much time as ever");
    }
    assert_eq!(rig.door.stats().turned_away, over);
    drop(many);
    // And each comes, and does not use the stack.
    let come = |user| {
        let inside = inside.clone();
        as_user(user, move || std::iter::repeat_with(|| inside.followed()).find_map(Result::ok).unwrap())
    };
    let most = serve::GUESTS_MAX / 4;
    let before = rig.door.stats().turned_away;
    let many: Vec<OwnFd> = users(most + 1).map(come).collect();
    while rig.door.stats().turned_away == before {
        assert!(Instant::now() < until, "of these there are only so many: {}", rig.door.processes());
    }
    let known = || rig.door.processes();
    assert_eq!(known(), 1 + most, "with the one inside");
    let other = come(1001);
    let own = Guest::come(&path).unwrap();
    while known() < most + 3 {
        assert!(Instant::now() < until, "for another user, and for the stack's own, there is room");
    }
    drop((many, other, own));
}

/// What another user's program says does not matter: which user has made its connection the kernel knows.
#[test]
fn who_follows_somebody_inside_as_another_user_has_a_domain_of_its_own_and_no_low_ports() {
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
    let (mut inside, [from_inside, from_guest]) = as_nobody(move || {
        let lines = [inside.followed().unwrap(), guest.followed().unwrap()];
        (inside, lines)
    });
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
        assert!(longest < PATIENCE, "{longest:?}");
        assert!(asked.load(Ordering::Relaxed) >= 100);
    });
}
