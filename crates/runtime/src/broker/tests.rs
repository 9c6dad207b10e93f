//! The broker with a shard on a thread, connected in memory to a peer on another thread.

mod hand_over;

use super::*;
use crate::channel::tests::{ConnectCommand, Peer, small_config};
use crate::channel::{ChannelConfig, Client, ClientEvent};
use crate::fixture::BrokerFixture;
use crate::internal_fd::InternalFd;
use crate::{Conn, ConnectOptions, ListenOptions};
use rustix::fd::AsFd;
use std::time::{Duration, Instant};

/// Longer than any step of a test takes.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Limits that tests reach with the descriptors of one process.
const LIMITS: AdmissionLimits = AdmissionLimits { pending_max: 64, unattached_max: 2048 };

impl BrokerFixture {
    fn new(channel: &ChannelConfig, path: Option<&Path>) -> Self {
        Self::with_shards(1, channel, path)
    }

    fn with_shards(count: usize, channel: &ChannelConfig, path: Option<&Path>) -> Self {
        Self::with_stack_info(count, channel, path, StackInfo::default())
    }

    /// Creates a stack whose peers echo.
    fn with_stack_info(
        count: usize,
        channel: &ChannelConfig,
        path: Option<&Path>,
        stack_info: StackInfo,
    ) -> Self {
        let peer = || Peer { echoes: true, listens: true, ..Peer::default() };
        let open = |servers: Vec<Commander>| {
            let shards = servers.into_iter().map(ShardLink::InProcess).collect();
            Broker::open_with(path, shards, stack_info, LIMITS).unwrap()
        };
        Self::with_peers(channel, std::iter::repeat_with(peer).take(count), open)
    }

    fn connect_peer(&self, port: u16, text: &[u8]) {
        self.connect_peer_from(0, port, text);
    }

    fn connect_peer_from(&self, peer: usize, port: u16, text: &[u8]) {
        self.peers[peer].send(Box::new(ConnectCommand(port, text.to_vec()))).unwrap();
    }

    /// Attaches a process to this domain. A thread of this process stands for it.
    fn attach(&self, domain: &str) -> Attachment {
        Attachment::from_connection(self.broker.open_connection(domain).unwrap()).unwrap()
    }
}

/// Returns the first result of `wanted`, which is called for each event.
fn wait_for<T>(client: &mut Client, mut wanted: impl FnMut(&mut Client, ClientEvent) -> Option<T>) -> T {
    let until = Instant::now() + TEST_TIMEOUT;
    loop {
        while let Some(event) = client.next_event() {
            if let Some(found) = wanted(client, event) {
                return found;
            }
        }
        assert!(Instant::now() < until, "no event came");
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
fn two_domains_listen_and_connect_independently() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let fixture = BrokerFixture::new(&small_config(), Some(&path));
    let mut first = Attachment::connect(&path, "first").unwrap();
    let mut second = fixture.attach("second");
    let (one, two) = (&mut first.clients()[0], &mut second.clients()[0]);
    listen(one, 80);
    let error = two.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default(), 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "listen on 0.0.0.0:80: address already in use",
        "the other domain listens there"
    );
    listen(two, 81);
    fixture.connect_peer(80, b"to the first");
    fixture.connect_peer(81, b"to the second");
    let (to_one, to_two) = (accept(one), accept(two));
    wait_for_text(one, to_one, b"to the first");
    wait_for_text(two, to_two, b"to the second");
    assert_eq!(one.info(to_one).unwrap().local, "10.0.0.1:80".parse().unwrap());
    let out = two.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    two.send(out, b"there and back").unwrap();
    two.flush();
    wait_for_text(two, out, b"there and back");
    let stats = fixture.broker.stats();
    assert_eq!((stats.admitted, stats.reaped, stats.requests_refused), (2, 0, 0));
    drop(first);
    // Its port is free as soon as it is reaped.
    let until = Instant::now() + TEST_TIMEOUT;
    while second.clients()[0].listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default(), 1).is_err() {
        assert!(Instant::now() < until);
    }
    assert_eq!(fixture.broker.stats().reaped, 1);
    assert!(!second.is_disconnected());
    drop(fixture);
    // A program that another test starts has a copy of the broker's end until it is executed.
    let until = Instant::now() + TEST_TIMEOUT;
    while !second.is_disconnected() {
        assert!(Instant::now() < until);
    }
    let error = second.clients()[0].connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default());
    assert!(matches!(error, Err(Error::StackGone)));
}

// limit: channel.clients_max
// limit: channel.domains_max
#[test]
fn limits_and_other_versions_are_refused() {
    let fixture = BrokerFixture::new(&ChannelConfig { domains_max: 2, ..small_config() }, None);
    let refused = |domain: &str| {
        Attachment::from_connection(fixture.broker.open_connection(domain).unwrap()).err().unwrap()
    };
    let first: Vec<Attachment> = (0..3).map(|_| fixture.attach("first")).collect();
    assert!(matches!(refused("first"), Error::Refused(Refusal::Clients(3))));
    let _second = fixture.attach("second");
    assert!(matches!(refused("third"), Error::Refused(Refusal::Domains(2))));
    assert_eq!(fixture.broker.stats().limit_reached, 2);
    drop(first);
    // The domain ends with its last process; then there is room for another.
    let until = Instant::now() + TEST_TIMEOUT;
    while Attachment::from_connection(fixture.broker.open_connection("third").unwrap()).is_err() {
        assert!(Instant::now() < until);
    }
    let connection = fixture.broker.open_connection("").unwrap();
    let hello =
        message::Hello { magic: message::MAGIC, version: PROTOCOL_VERSION + 1, domain: String::new() };
    seqpacket::send(&connection, &message::encode(5, &hello), &[]).unwrap();
    let mut buffer = seqpacket::buffer();
    let bytes = loop {
        if let seqpacket::RecvResult::Packet(bytes, _) = seqpacket::receive(&connection, &mut buffer) {
            break bytes;
        }
    };
    let (5, Some(message::ControlReply::Refused(refusal))) = message::decode(&buffer[..bytes]) else {
        panic!("{bytes}")
    };
    assert_eq!(refusal, Refusal::Version(PROTOCOL_VERSION));
}

/// A process that inherited a connection may run as another user than the one that opened it.
#[test]
fn only_connections_to_the_socket_may_upgrade() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let fixture = BrokerFixture::new(&small_config(), Some(&path));
    let executable: OwnedFd = std::fs::File::open("/bin/true").unwrap().into();
    let hello =
        message::Hello { magic: message::MAGIC_UPGRADE, version: PROTOCOL_VERSION, domain: String::new() };
    let refusal_on = |connection: &OwnedFd| {
        seqpacket::send(connection, &message::encode(1, &hello), &[executable.as_fd()]).unwrap();
        let mut buffer = seqpacket::buffer();
        let until = Instant::now() + TEST_TIMEOUT;
        loop {
            match seqpacket::receive(connection, &mut buffer) {
                seqpacket::RecvResult::Packet(bytes, _) => {
                    match message::decode::<message::ControlReply>(&buffer[..bytes]) {
                        (1, Some(message::ControlReply::Refused(refusal))) => break refusal,
                        other => panic!("{other:?}"),
                    }
                }
                _ => assert!(Instant::now() < until, "no reply"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let inherited = fixture.broker.open_connection("").unwrap();
    assert!(matches!(refusal_on(&inherited), Refusal::User(_)));
    let error = upgrade(&path, executable.as_fd(), ConnectionPolicy::default(), TEST_TIMEOUT)
        .unwrap_err()
        .to_string();
    assert!(error.contains("no supervisor") || error.contains("only root"), "{error}");
}

#[test]
fn truncated_or_changed_messages_do_not_decode() {
    use super::codec::Codec;
    use super::message::{ControlRequest, decode, encode};
    let ask = encode(7, &ControlRequest::Resolve(77));
    assert!(matches!(decode::<ControlRequest>(&ask), (7, Some(ControlRequest::Resolve(77)))));
    for end in 0..ask.len() {
        assert!(decode::<ControlRequest>(&ask[..end]).1.is_none(), "{end}");
    }
    let mut longer = ask.clone();
    0u8.encode(&mut longer);
    assert!(decode::<ControlRequest>(&longer).1.is_none());
    // A list whose count is larger than any memory.
    let mut list = encode(1, &ControlRequest::Exec(Vec::new()));
    let end = list.len();
    list[end - 4..].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(decode::<ControlRequest>(&list).1.is_none());
}

/// A process has a client on each shard, and one descriptor wakes it for all of them.
#[test]
fn one_descriptor_wakes_for_all_shards() {
    let fixture = BrokerFixture::with_shards(3, &small_config(), None);
    let mut process = fixture.attach("");
    for client in process.clients() {
        listen(client, 80);
    }
    for shard in [2, 0, 1, 1] {
        fixture.connect_peer_from(shard, 80, &[b'a' + shard as u8; 10]);
        // It sleeps on the descriptor of the client of another shard.
        let until = Instant::now() + TEST_TIMEOUT;
        let mut came = Vec::new();
        while came.is_empty() {
            assert!(Instant::now() < until, "no event came");
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
    // Sockets of several shards are passed together.
    let mut other = fixture.attach("");
    let mut sockets: Vec<GlobalSocketId> = (0..3).map(|shard| GlobalSocketId::listener(shard, 0)).collect();
    sockets.extend(process.owned_sockets());
    assert_eq!(sockets.len(), 3 + 4);
    let proxy = process.share(&sockets).unwrap();
    assert_eq!(other.resolve(&proxy).unwrap(), sockets);
    assert_eq!(other.owned_sockets().len(), 4);
    let error = process.share(&[GlobalSocketId::listener(3, 0)]).unwrap_err();
    assert!(matches!(error, Error::Refused(Refusal::Unknown)));
    let error = process.share(&[GlobalSocketId::listener(0, 0), GlobalSocketId::listener(1, 7)]).unwrap_err();
    assert!(matches!(error, Error::Refused(Refusal::Unknown)), "it does not own the second socket");
    // The references that were taken before the second socket was refused are released: only the first
    // process and the proxy descriptor own the listeners.
    drop((process, proxy));
    for client in other.clients() {
        client.set_credits(0, 4);
        client.flush();
    }
    fixture.connect_peer_from(1, 80, b"still served");
    accept(&mut other.clients()[1]);
    drop(other);
    let mut late = fixture.attach("");
    let until = Instant::now() + TEST_TIMEOUT;
    for client in late.clients() {
        while client.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default(), 1).is_err() {
            assert!(Instant::now() < until, "the port was not freed");
        }
    }
}

#[test]
fn a_published_stack_is_found_by_name() {
    let base = tempfile::tempdir().unwrap();
    let config = crate::config::RunConfig { name: Some("mine".into()), ..Default::default() };
    let published = PublishedStack::new_in(base.path(), &config, "test").unwrap().unwrap();
    let fixture = BrokerFixture::new(&small_config(), None);
    let broker = Broker::open_for(&published, Vec::new(), StackInfo::default()).unwrap();
    let path = crate::run_dir::running_in(base.path()).unwrap()[0].path.join("control");
    let mut process = Attachment::connect(&path, "").unwrap();
    assert_eq!(process.clients().len(), 0, "the stack has no shards");
    let directory = published.dir().path();
    let users = || crate::inspect::list_processes(directory).unwrap();
    assert_eq!(users().iter().map(|user| user.pid).collect::<Vec<_>>(), [std::process::id()]);
    let child = process.prepare_fork().unwrap();
    assert_eq!((users().len(), users()[1].pid, broker.processes()), (2, 0, 2));
    // The list has all processes that connected before, even if the broker has not read their messages.
    let mut unattached = Vec::new();
    while unattached.len() < 20 {
        unattached.push(UnattachedProcess::connect(&path).unwrap());
        assert_eq!(users().len(), 2 + unattached.len());
    }
    drop((child, process, unattached));
    let until = Instant::now() + TEST_TIMEOUT;
    while !users().is_empty() {
        assert!(Instant::now() < until, "{:?}", users());
    }
    drop((broker, fixture));
    assert!(matches!(Attachment::connect(&path, ""), Err(Error::Unreachable(..))));
}

#[test]
fn only_an_announced_child_continues_without_reply() {
    use super::message::{ControlReply, Hello, MAGIC_CHILD, decode, encode};

    let fixture = BrokerFixture::with_shards(2, &small_config(), None);
    let mut process = fixture.attach("");
    let client = &mut process.clients()[1];
    let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    client.send(conn, b"of the parent").unwrap();
    wait_for_text(client, conn, b"of the parent");
    let child = process.prepare_fork().unwrap();
    // The parent's own value becomes the child here; the child owns what the parent owned.
    process.become_child(child).unwrap();
    let client = &mut process.clients()[1];
    client.send(conn, b"of the child").unwrap();
    wait_for_text(client, conn, b"of the child");
    let until = Instant::now() + TEST_TIMEOUT;
    while (fixture.broker.stats().reaped, fixture.broker.stats().admitted) != (1, 2) {
        assert!(
            Instant::now() < until,
            "one child was not admitted or not reaped: {:?}",
            fixture.broker.stats()
        );
    }
    let pids: Vec<u32> = fixture.broker.attached_processes().iter().map(|user| user.pid).collect();
    assert_eq!(pids, [std::process::id()]);
    // A program has to ask for its clients, and an unknown process has none.
    let program = process.prepare_exec(&[]).unwrap();
    let this = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty());
    let this = this.unwrap();
    for (connection, version, refusal) in [
        (program.connection().try_clone_to_owned().unwrap(), PROTOCOL_VERSION, Refusal::Unknown),
        (fixture.broker.open_connection("").unwrap(), PROTOCOL_VERSION, Refusal::Unknown),
        (
            fixture.broker.open_connection("").unwrap(),
            PROTOCOL_VERSION + 1,
            Refusal::Version(PROTOCOL_VERSION),
        ),
    ] {
        let hello = Hello { magic: MAGIC_CHILD, version, domain: String::new() };
        seqpacket::send(&connection, &encode(0, &hello), &[this.as_fd()]).unwrap();
        let mut buffer = seqpacket::buffer();
        let bytes = loop {
            match seqpacket::receive(&connection, &mut buffer) {
                seqpacket::RecvResult::Packet(bytes, _) => break bytes,
                seqpacket::RecvResult::WouldBlock => assert!(Instant::now() < until),
                other => panic!("{other:?}"),
            }
        };
        let (0, Some(ControlReply::Refused(received))) = decode(&buffer[..bytes]) else {
            panic!("no refusal")
        };
        assert_eq!(received, refusal);
    }
    assert_eq!(fixture.broker.stats().rejected, 3);
}

// limit: sockets of a domain in SCM_RIGHTS messages
#[test]
fn proxy_descriptors_are_bounded_per_domain() {
    let fixture = BrokerFixture::new(&small_config(), None);
    let (mut flooder, mut good) = (fixture.attach("greedy"), fixture.attach("good"));
    listen(&mut flooder.clients()[0], 80);
    listen(&mut good.clients()[0], 81);
    let listener = [GlobalSocketId::listener(0, 0)];
    let mut on_their_way: Vec<OwnedFd> =
        (0..thread::PROXY_FDS_MAX).map(|_| flooder.share(&listener).unwrap()).collect();
    assert!(matches!(flooder.share(&listener), Err(Error::Refused(Refusal::ProxyDescriptors))));
    assert_eq!(fixture.broker.stats().limit_reached, 1);
    let proxy = good.share(&listener).unwrap();
    assert_eq!(good.resolve(&proxy).unwrap(), listener);
    // Closing one makes room for another.
    on_their_way.pop();
    let until = Instant::now() + TEST_TIMEOUT;
    while flooder.share(&listener).is_err() {
        assert!(Instant::now() < until);
    }
}

// limit: connections to the broker before their first message
#[test]
fn oldest_silent_connection_is_evicted() {
    let fixture = BrokerFixture::new(&small_config(), None);
    let mut early = fixture.attach("");
    let pending: Vec<OwnedFd> =
        (0..3 * LIMITS.pending_max).map(|_| fixture.broker.open_connection("").unwrap()).collect();
    let mut late = fixture.attach("");
    assert!(fixture.broker.stats().rejected >= 2 * LIMITS.pending_max as u64);
    for process in [&mut early, &mut late] {
        let client = &mut process.clients()[0];
        let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
        client.send(conn, b"as ever").unwrap();
        wait_for_text(client, conn, b"as ever");
    }
    drop(pending);
}

// limit: unattached processes
#[test]
fn unattached_process_has_no_client_and_may_attach_others() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let fixture = BrokerFixture::new(&ChannelConfig { clients_max: 2, ..small_config() }, Some(&path));
    let unattached: Vec<UnattachedProcess> =
        (0..10).map(|_| UnattachedProcess::connect(&path).unwrap()).collect();
    let until = Instant::now() + TEST_TIMEOUT;
    while fixture.broker.processes() < unattached.len() {
        assert!(Instant::now() < until, "unattached processes are not listed");
    }
    assert_eq!(fixture.broker.stats().admitted, 0);
    // A forked process shares the connection.
    let (mut first, second) = (unattached[0].attach().unwrap(), unattached[0].attach().unwrap());
    assert!(
        matches!(unattached[1].attach(), Err(Error::Refused(Refusal::Clients(2)))),
        "channel.clients_max is 2"
    );
    let client = &mut first.clients()[0];
    let conn = client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default()).unwrap();
    client.send(conn, b"as ever").unwrap();
    wait_for_text(client, conn, b"as ever");
    drop(second);
    while unattached[1].attach().is_err() {
        assert!(Instant::now() < until, "one process was not reaped");
    }
    drop((unattached, first));
    while fixture.broker.processes() > 0 {
        assert!(
            Instant::now() < until,
            "processes are still listed: {:?}",
            fixture.broker.attached_processes()
        );
    }
    // If the process may have few descriptors, unattached processes get no more than half of them.
    let limits = [Some(1024), Some(1 << 20), None].map(|descriptors| LIMITS.unattached(descriptors));
    assert_eq!(limits, [256, 2048, 2048]);
    // One user has no more than it leaves free.
    let most = LIMITS.unattached_max / 2;
    let mut more: Vec<UnattachedProcess> =
        (0..=most).map(|_| UnattachedProcess::connect(&path).unwrap()).collect();
    while fixture.broker.stats().rejected == 0 {
        assert!(Instant::now() < until, "the limit was not reached");
    }
    assert_eq!(fixture.broker.processes(), most);
    let last = more.pop().unwrap();
    let answer = last.attach().map(|_| ());
    assert!(matches!(answer, Err(Error::Refused(Refusal::Unattached(_)))), "{answer:?}");
    assert!(more[0].attach().is_ok());
    // Successors of one of them, as another user.
    if rustix::process::geteuid().is_root() {
        let (first, refused) = (more.remove(0), fixture.broker.stats().rejected);
        let (process_end, first) = run_as_nobody(move || {
            // The queue is full as long as the broker has not read the messages before.
            let connect =
                |_| std::iter::repeat_with(|| first.successor_connection()).find_map(Result::ok).unwrap();
            ((0..=most / 2).map(connect).collect::<Vec<InternalFd>>(), first)
        });
        while fixture.broker.stats().rejected == refused {
            assert!(Instant::now() < until, "the limit of successors was not reached");
        }
        assert_eq!(fixture.broker.processes(), most + most / 2);
        // When they are gone, there is room again.
        drop((process_end, first));
        while fixture.broker.processes() >= most {
            assert!(Instant::now() < until, "processes were not reaped");
        }
    }
    let refused = fixture.broker.stats().rejected;
    let late = UnattachedProcess::connect(&path).unwrap();
    assert!(late.attach().is_ok());
    assert_eq!(fixture.broker.stats().rejected, refused);
}

/// Runs `act` as user nobody.
fn run_as_nobody<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    run_as_user(65_534, act)
}

/// Runs `act` as another user.
fn run_as_user<T: Send + 'static>(user: u32, act: impl FnOnce() -> T + Send + 'static) -> T {
    use rustix::thread::{Uid, set_thread_res_uid};

    let user = Uid::from_raw(user);
    // Changes the user of this thread alone, irrevocably.
    let done = std::thread::spawn(move || {
        set_thread_res_uid(user, user, user).unwrap();
        act()
    });
    done.join().unwrap()
}

// limit: connections to the broker before their first message
#[test]
fn user_with_most_silent_connections_is_evicted() {
    use super::message::unattached;

    if !rustix::process::geteuid().is_root() {
        return ginnel_testkit::skip("broker::tests other users", "only root can be another user");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let fixture = BrokerFixture::new(&small_config(), Some(&path));
    let inside = UnattachedProcess::connect(&path).unwrap();
    let early = fixture.broker.open_connection("").unwrap();
    let pending = run_as_nobody(move || {
        let connect = |_| {
            let (process_end, broker_end) = seqpacket::pair().unwrap();
            // As `UnattachedProcess::successor_connection`, without the first message.
            loop {
                match inside.send(unattached::SUCCESSOR, &broker_end) {
                    Ok(()) => break process_end,
                    // The broker has not read the messages before.
                    Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
                }
            }
        };
        (0..3 * LIMITS.pending_max).map(connect).collect::<Vec<OwnedFd>>()
    });
    let until = Instant::now() + TEST_TIMEOUT;
    let over = 2 * LIMITS.pending_max as u64 + 1;
    while fixture.broker.stats().rejected < over {
        assert!(Instant::now() < until, "the limit was not reached: {:?}", fixture.broker.stats());
    }
    // The user with most connections was refused.
    assert!(matches!(
        Attachment::from_connection(pending.into_iter().next().unwrap()),
        Err(Error::Refused(Refusal::Pending(limit))) if limit as usize == LIMITS.pending_max
    ));
    assert!(Attachment::from_connection(early).is_ok(), "an older connection of another user was closed");
    assert_eq!(fixture.broker.stats().rejected, over);
}

/// In a user namespace one person owns many users, each with few connections.
// limit: unattached processes
#[test]
fn users_of_one_range_exclude_no_other_user() {
    use super::message::unattached;

    if !rustix::process::geteuid().is_root() {
        return ginnel_testkit::skip("broker::tests many users", "only root can be another user");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let fixture = BrokerFixture::new(&small_config(), Some(&path));
    let inside = Arc::new(UnattachedProcess::connect(&path).unwrap());
    let users = |count: usize| (100_000u32..).take(count);
    let until = Instant::now() + TEST_TIMEOUT;
    // Each is a successor of a process of an ordinary user, and sends no first message either.
    let pending = |user| {
        let inside = inside.clone();
        run_as_user(user, move || {
            let (process_end, broker_end) = seqpacket::pair().unwrap();
            loop {
                match inside.send(unattached::SUCCESSOR, &broker_end) {
                    Ok(()) => break process_end,
                    Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
                }
            }
        })
    };
    let early = [pending(1001), pending(1001)];
    let many: Vec<OwnedFd> = users(2 * LIMITS.pending_max).map(pending).collect();
    let over = (2 + LIMITS.pending_max) as u64;
    while fixture.broker.stats().rejected < over {
        assert!(Instant::now() < until, "the limit was not reached: {:?}", fixture.broker.stats());
    }
    for connection in early {
        assert!(
            Attachment::from_connection(connection).is_ok(),
            "an older connection of another user was closed"
        );
    }
    assert_eq!(fixture.broker.stats().rejected, over);
    drop(many);
    // Each sends its first message and does not attach.
    let connect = |user| {
        let inside = inside.clone();
        run_as_user(user, move || {
            std::iter::repeat_with(|| inside.successor_connection()).find_map(Result::ok).unwrap()
        })
    };
    let most = LIMITS.unattached_max / 4;
    let before = fixture.broker.stats().rejected;
    let many: Vec<InternalFd> = users(most + 1).map(connect).collect();
    while fixture.broker.stats().rejected == before {
        assert!(Instant::now() < until, "the limit was not reached: {}", fixture.broker.processes());
    }
    let known = || fixture.broker.processes();
    assert_eq!(known(), 1 + most, "with the attached process");
    let other = connect(1001);
    let own = UnattachedProcess::connect(&path).unwrap();
    while known() < most + 3 {
        assert!(Instant::now() < until, "another user or the stack's own was refused");
    }
    drop((many, other, own));
}

/// The user of a successor is the one who created its connection, as the kernel says, whatever the messages
/// say.
#[test]
fn successor_as_another_user_is_isolated() {
    use std::os::unix::process::CommandExt;

    const SUCCESSOR_VARIABLE: &str = "GINNEL_TEST_SUCCESSOR";
    if std::env::var_os(SUCCESSOR_VARIABLE).is_some() {
        let connection = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        let mut process = UnattachedProcess::from_connection(connection).unwrap().attach().unwrap();
        let client = &mut process.clients()[0];
        for low in [80, 1023] {
            let refused = client.listen(([0, 0, 0, 0], low).into(), ListenOptions::default(), 4);
            assert!(matches!(refused, Err(Error::Refused(Refusal::Port(1024)))), "{refused:?}");
        }
        listen(client, 1024);
        return;
    }
    if !rustix::process::geteuid().is_root() {
        return ginnel_testkit::skip("broker::tests other users", "only root can be another user");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control");
    let stack_info = StackInfo { unprivileged_port_start: 1024, ..StackInfo::default() };
    let fixture = BrokerFixture::with_stack_info(
        1,
        &ChannelConfig { domains_max: 2, ..small_config() },
        Some(&path),
        stack_info,
    );
    let (inside, unattached) = (fixture.attach(""), UnattachedProcess::connect(&path).unwrap());
    let (mut inside, [from_inside, from_unattached]) = run_as_nobody(move || {
        let connections =
            [inside.successor_connection().unwrap(), unattached.successor_connection().unwrap()];
        (inside, connections)
    });
    let request = from_inside.as_fd().try_clone_to_owned().unwrap();
    let connect = |connection: InternalFd| {
        UnattachedProcess::from_connection(connection.as_fd().try_clone_to_owned().unwrap()).unwrap()
    };
    let (first, second) = (connect(from_inside), connect(from_unattached));
    let (mut one, mut two) = (first.attach().unwrap(), second.attach().unwrap());
    // Both are in the second domain, and a third is refused.
    assert!(matches!(
        Attachment::from_connection(fixture.broker.open_connection("another").unwrap()),
        Err(Error::Refused(Refusal::Domains(_)))
    ));
    // They share each other's listener, but not the listener of the first domain.
    listen(&mut one.clients()[0], 8000);
    listen(&mut inside.clients()[0], 8001);
    let sockets = [
        one.share(&[GlobalSocketId::listener(0, 0)]).unwrap(),
        inside.share(&[GlobalSocketId::listener(0, 0)]).unwrap(),
    ];
    assert!(two.resolve(&sockets[0]).is_ok());
    assert!(matches!(two.resolve(&sockets[1]), Err(Error::Refused(Refusal::Unknown))));
    // In a process of its own, because its user must differ from the user of this process.
    let name = "successor_as_another_user_is_isolated";
    let mut successor = std::process::Command::new(std::env::current_exe().unwrap());
    successor.args(["--exact", &format!("broker::tests::{name}")]).env(SUCCESSOR_VARIABLE, "1").uid(65_534);
    let output = successor.stdin(request.try_clone().unwrap()).current_dir("/").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    listen(&mut inside.clients()[0], 80);
    // A malformed message of an unattached process is counted.
    let before = fixture.broker.stats().requests_refused;
    seqpacket::send(&request, &[9], &[]).unwrap();
    let until = Instant::now() + TEST_TIMEOUT;
    while fixture.broker.stats().requests_refused == before {
        assert!(Instant::now() < until);
    }
    assert!(first.attach().is_ok(), "the connection was closed");
}

/// The one thread of the broker waits for no process.
#[test]
fn a_misbehaving_process_delays_no_other() {
    use super::message::{ControlRequest, Hello, MAGIC, encode};
    use std::sync::atomic::AtomicBool;

    let fixture = BrokerFixture::new(&small_config(), None);
    let mut good = fixture.attach("good");
    let _silent = fixture.broker.open_connection("silent").unwrap();
    let (stop, requests) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let flood = || {
            while !stop.load(Ordering::Relaxed) {
                let connection = fixture.broker.open_connection("greedy").unwrap();
                let this = rustix::process::pidfd_open(
                    rustix::process::getpid(),
                    rustix::process::PidfdFlags::empty(),
                );
                let hello = Hello { magic: MAGIC, version: PROTOCOL_VERSION, domain: String::new() };
                seqpacket::send(&connection, &encode(0, &hello), &[this.unwrap().as_fd()]).unwrap();
                // Until it is disconnected because it does not read its replies. A full queue is not enough.
                loop {
                    match seqpacket::send(&connection, &encode(1, &ControlRequest::Attach(0)), &[]) {
                        Ok(()) => drop(requests.fetch_add(1, Ordering::Relaxed)),
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
        let until = Instant::now() + TEST_TIMEOUT;
        while requests.load(Ordering::Relaxed) < 100 && Instant::now() < until {
            std::thread::yield_now();
        }
        let client = &mut good.clients()[0];
        let mut longest = Duration::ZERO;
        for port in 100..150 {
            let started = Instant::now();
            let listener = listen(client, port);
            client.unlisten(listener).unwrap();
            longest = longest.max(started.elapsed());
        }
        stop.store(true, Ordering::Relaxed);
        flooder.join().unwrap();
        // On a busy machine a turn may take long; only a broker that is stuck exceeds the limit.
        assert!(longest < TEST_TIMEOUT, "{longest:?}");
        assert!(requests.load(Ordering::Relaxed) >= 100);
    });
}
