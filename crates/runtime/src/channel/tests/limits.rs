//! The budget of a domain at its limit: refused and counted, recovered, and the domain beside it unhurt.

use super::*;
use crate::channel::simulation::SimulatedDomain;
use ginnel_stack::udp::{UdpError, UdpOptions, UdpSendParams};

fn peer() -> Peer {
    Peer { listens: true, echoes: true, ..Peer::default() }
}

/// Two domains beside each other.
fn two(rig: &Fixture) -> [(SimulatedDomain, Client); 2] {
    let server = SameThread(rig.server.clone());
    [(); 2].map(|()| {
        let (domain, parts) = server.open_domain().unwrap();
        let client = Client::open(parts, Box::new(domain.clone())).unwrap();
        (domain, client)
    })
}

fn connect(client: &mut Client) -> Result<Conn, Error> {
    client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default())
}

/// Sends a line and gets it back.
fn is_served(rig: &mut Fixture, client: &mut Client, conn: Conn) {
    client.send(conn, b"as ever").unwrap();
    rig.events(client);
    let mut out = [0; 64];
    assert_eq!(client.recv(conn, &mut out), Ok(7));
    assert_eq!(&out[..7], b"as ever");
}

// limit: channel.buffer_bytes_max
#[test]
fn buffer_bytes_max_limits_each_domain_separately() {
    let config = ChannelConfig { buffer_bytes_max: 3 * 2 * 4096, ..small_config() };
    let mut rig = Fixture::new(&config, peer());
    let [(_, mut greedy), (_, mut good)] = two(&rig);
    let conn = connect(&mut good).unwrap();
    let conns: Vec<Conn> = (0..3).map(|_| connect(&mut greedy).unwrap()).collect();
    for _ in 0..5 {
        let error = connect(&mut greedy).unwrap_err().to_string();
        assert_eq!(error, "connect to 10.0.0.2:90: too many connections");
    }
    let error = greedy.udp_bind("0.0.0.0:53".parse().unwrap(), UdpOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "bind 0.0.0.0:53: too many sockets");
    assert_eq!(rig.stats().sockets_refused, 6);
    is_served(&mut rig, &mut good, conn);
    connect(&mut good).unwrap();
    // One goes, and one fits again.
    greedy.abort(conns[0]).unwrap();
    greedy.release(conns[0]).unwrap();
    rig.run(SECOND);
    let conn = connect(&mut greedy).unwrap();
    is_served(&mut rig, &mut greedy, conn);
    drop(greedy);
    rig.run(300 * SECOND);
    assert_eq!(rig.sockets_in_use(), 2, "those of the other");
}

// limit: channel.datagram_bytes_max
#[test]
fn datagram_bytes_max_limits_each_domain_separately() {
    let mut rig = Fixture::new(&ChannelConfig { datagram_bytes_max: 1 << 16, ..small_config() }, peer());
    let [(_, mut lazy), (_, mut good)] = two(&rig);
    let bind = |client: &mut Client, port: u16| {
        client.udp_bind(([0, 0, 0, 0], port).into(), UdpOptions::default()).unwrap()
    };
    let (waits, also, taken) = (bind(&mut lazy, 53), bind(&mut lazy, 54), bind(&mut good, 55));
    let from = rig
        .peer
        .with(rig.now, |_, cx| cx.udp_bind("0.0.0.0:1000".parse().unwrap(), UdpOptions::default()).unwrap());
    let send = |rig: &mut Fixture, port: u16| {
        let sent =
            rig.peer.with(rig.now, |_, cx| cx.udp_send(from, Some(([10, 0, 0, 1], port).into()), &[7; 1400]));
        rig.run(Duration::from_millis(1));
        rig.run(Duration::from_millis(1));
        sent.unwrap();
    };
    for port in [53, 54, 55].into_iter().cycle().take(300) {
        send(&mut rig, port);
        let _ = good.udp_recv(taken);
    }
    let fit = (1 << 16) / 1400;
    assert_eq!(rig.stats().datagrams_dropped, 200 - fit, "those of the other were all taken");
    let count = |client: &mut Client, socket| {
        (0..).take_while(|_| client.udp_recv(socket) != Err(UdpError::WouldBlock)).count() as u64
    };
    let first = count(&mut lazy, waits);
    assert!(first > 0);
    // There is room again, for all sockets of the domain.
    (0..first).for_each(|_| send(&mut rig, 54));
    assert_eq!(rig.stats().datagrams_dropped, 200 - fit);
    assert_eq!((first, count(&mut lazy, also)), (23, fit));
    drop(lazy);
    rig.run(SECOND);
    assert_eq!(rig.sockets_in_use(), 1);
}

// limit: bytes of a socket in one turn
#[test]
fn datagrams_of_one_socket_leave_in_chunks() {
    // 131,072 bytes, charged 1,024 for each, and the one that passes it.
    const IN_A_TURN: u64 = 128;
    let mut rig = Fixture::new(&ChannelConfig { socket_buffer_bytes: 1 << 18, ..small_config() }, peer());
    let [(_, mut greedy), (_, mut good)] = two(&rig);
    let conn = connect(&mut good).unwrap();
    let socket = greedy.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
    rig.peer.with(rig.now, |_, cx| cx.udp_bind("0.0.0.0:9".parse().unwrap(), UdpOptions::default()).unwrap());
    greedy.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
    let small = UdpSendParams { to: None, source: None, gso_size: 0, hop_limit: None, tos: None };
    let write = |client: &mut Client| {
        (0..).take_while(|_| client.udp_send_queued(socket, &small, &[]).is_ok()).count() as u64
    };
    rig.run(Duration::from_millis(1));
    let written = write(&mut greedy);
    assert!(written > 30 * IN_A_TURN, "{written}");
    assert_eq!(good.send(conn, b"as ever"), Ok(7));
    let turn = |rig: &mut Fixture| {
        let before = rig.peer.stats().frames_received;
        let turn = rig.server.lock().unwrap().poll_once(rig.now).unwrap();
        // A burst is 64 frames.
        for _ in 0..4 {
            rig.peer.poll_once(rig.now).unwrap();
        }
        rig.now += Duration::from_micros(1);
        (turn.work > 0, rig.peer.stats().frames_received - before)
    };
    assert_eq!(turn(&mut rig), (true, IN_A_TURN + 1), "its part, and a segment of the other's");
    assert!(!rig.server.lock().unwrap().handler_mut().before_sleep(), "there is more to do");
    rig.server.lock().unwrap().handler_mut().after_sleep(false);
    let (worked, more) = turn(&mut rig);
    assert!(worked && (IN_A_TURN..IN_A_TURN + 3).contains(&more), "{more}");
    // However often it rings, and while it writes on.
    let before = rig.stats().sockets_deferred;
    for _ in 0..20 {
        write(&mut greedy);
        let (_, more) = turn(&mut rig);
        assert!(more < IN_A_TURN + 3, "{more}");
    }
    assert_eq!(rig.stats().sockets_deferred - before, 20);
    assert_eq!(good.recv(conn, &mut [0; 64]), Ok(7), "it was answered meanwhile");
    is_served(&mut rig, &mut good, conn);
    // Nor does it change where they go what comes behind them.
    while turn(&mut rig).1 > 2 {}
    for _ in 0..200 {
        greedy.udp_send_queued(socket, &small, &[]).unwrap();
    }
    greedy.udp_connect(socket, "10.0.0.2:10".parse().unwrap()).unwrap();
    assert!((200..204).contains(&turn(&mut rig).1));
    // Who found no room hears of it, whoever made it: here a question before which the rest of a portion is sent.
    while greedy.next_event().is_some() {}
    assert!(write(&mut greedy) > 2 * IN_A_TURN);
    turn(&mut rig);
    while greedy.next_event().is_some() {}
    assert_eq!(
        greedy.udp_send_queued(socket, &small, &[]),
        Ok(()),
        "there is room, of which it will hear nothing"
    );
    write(&mut greedy);
    greedy.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
    turn(&mut rig);
    let events: Vec<_> = core::iter::from_fn(|| greedy.next_event()).collect();
    assert_eq!(events, [ClientEvent::Writable { conn: socket }]);
    // All of it goes in the end, also what was written last, and in portions.
    let written = write(&mut greedy);
    while turn(&mut rig).1 > 2 {}
    let written = written.max(write(&mut greedy));
    greedy.udp_send_queued(socket, &small, &[std::io::IoSlice::new(b"last")]).unwrap_err();
    greedy.release(socket).unwrap();
    let mut sent = 0;
    for _ in 0..written / IN_A_TURN {
        let (_, more) = turn(&mut rig);
        assert!(more < IN_A_TURN + 3, "{more}");
        sent += more;
        assert_eq!(rig.sockets_in_use(), 2, "{sent} of {written}");
    }
    turn(&mut rig);
    rig.run(SECOND);
    assert_eq!((rig.sockets_in_use(), rig.stats().violations), (1, 0));
    // So does what a process leaves behind, and then its domain goes.
    let domains = |rig: &Fixture| rig.server.lock().unwrap().handler().domains();
    let socket = greedy.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
    greedy.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
    assert!((0..10 * IN_A_TURN).all(|_| greedy.udp_send_queued(socket, &small, &[]).is_ok()));
    let before = domains(&rig);
    drop(greedy);
    turn(&mut rig);
    assert_eq!(domains(&rig), before);
    rig.run(SECOND);
    assert_eq!(domains(&rig), before - 1);
    is_served(&mut rig, &mut good, conn);
}

/// However many sockets a domain has.
// limit: bytes of a domain in one turn
#[test]
fn sockets_of_a_domain_share_one_turn_budget() {
    // 1,048,576 bytes, charged 1,024 for each datagram, and what each portion passes its end by.
    const IN_A_TURN: u64 = 1024 + 8;
    const SOCKETS: usize = 20;
    let config = ChannelConfig { sockets_max: 32, socket_buffer_bytes: 1 << 18, ..small_config() };
    let mut rig = Fixture::new(&config, peer());
    let [(_, mut greedy), (_, mut good)] = two(&rig);
    let conn = connect(&mut good).unwrap();
    rig.peer.with(rig.now, |_, cx| cx.udp_bind("0.0.0.0:9".parse().unwrap(), UdpOptions::default()).unwrap());
    let small = UdpSendParams { to: None, source: None, gso_size: 0, hop_limit: None, tos: None };
    let sockets: Vec<Conn> = (0..SOCKETS)
        .map(|_| {
            let socket = greedy.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
            greedy.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
            socket
        })
        .collect();
    rig.run(Duration::from_millis(1));
    for &socket in &sockets {
        while greedy.udp_send_queued(socket, &small, &[]).is_ok() {}
    }
    good.send(conn, b"as ever").unwrap();
    let turn = |rig: &mut Fixture| {
        let before = rig.peer.stats().frames_received;
        rig.server.lock().unwrap().poll_once(rig.now).unwrap();
        for _ in 0..20 {
            rig.peer.poll_once(rig.now).unwrap();
        }
        rig.now += Duration::from_micros(1);
        rig.peer.stats().frames_received - before
    };
    // Eight have their part, then eight others, and then the rest.
    let mut had = [false; SOCKETS];
    for expected in [8, 16, SOCKETS] {
        let sent = turn(&mut rig);
        assert!((900..=IN_A_TURN + 2).contains(&sent), "{sent}");
        assert!(!rig.server.lock().unwrap().handler_mut().before_sleep());
        rig.server.lock().unwrap().handler_mut().after_sleep(false);
        for (had, &socket) in had.iter_mut().zip(&sockets) {
            // There is room for one only if something was taken.
            *had |= greedy.udp_send_queued(socket, &small, &[]).is_ok();
        }
        assert_eq!(had.iter().filter(|had| **had).count(), expected);
    }
    while good.next_event().is_some() {}
    assert_eq!(good.recv(conn, &mut [0; 64]), Ok(7), "it was answered in the first of them");
    // A process that ends leaves no more to each turn than one that lives.
    for &socket in &sockets {
        while greedy.udp_send_queued(socket, &small, &[]).is_ok() {}
    }
    drop(greedy);
    for _ in 0..40 {
        let sent = turn(&mut rig);
        assert!(sent <= 2 * (IN_A_TURN + 2), "{sent}");
    }
    rig.run(SECOND);
    assert_eq!((rig.sockets_in_use(), rig.stats().violations), (1, 0));
    is_served(&mut rig, &mut good, conn);
}

// limit: channel.backlog_max
#[test]
fn backlog_max_limits_the_requested_backlog() {
    let mut rig = Fixture::new(&ChannelConfig { sockets_max: 64, backlog_max: 4, ..small_config() }, peer());
    let [(_, mut lazy), (_, mut good)] = two(&rig);
    let long = ListenOptions { backlog: u32::MAX, ..ListenOptions::default() };
    lazy.listen("0.0.0.0:80".parse().unwrap(), long, 0).unwrap();
    good.listen("0.0.0.0:81".parse().unwrap(), ListenOptions::default(), 8).unwrap();
    for _ in 0..40 {
        // Who has something to say comes again until it is heard: an accept queue that is full answers with cookies.
        rig.connect_peer(b"?");
    }
    rig.run(Duration::from_millis(100));
    assert_eq!(rig.sockets_in_use(), 4, "the others wait in the engine, or for its answer");
    rig.peer.with(rig.now, |peer, cx| {
        let conn = cx.connect("10.0.0.1:81".parse().unwrap(), ConnectOptions::default()).unwrap();
        peer.add(conn, b"as ever");
    });
    rig.run(SECOND);
    let conn = accepted(&rig.events(&mut good))[0];
    assert_eq!(good.readable(conn), Ok(7));
    // It begins to take them, and in the end has all.
    let mut got = 0;
    for _ in 0..600 {
        lazy.set_credits(0, 8);
        got += accepted(&rig.events(&mut lazy)).len();
        rig.run(Duration::from_millis(200));
    }
    assert_eq!(got, 40);
}

// limit: listeners of a domain
#[test]
fn listeners_of_a_domain_are_limited() {
    let mut rig = Fixture::new(&small_config(), peer());
    let [(_, mut greedy), (_, mut good)] = two(&rig);
    let mut listen = |client: &mut Client, port: u16| {
        let listener = client.listen(([0, 0, 0, 0], port).into(), ListenOptions::default(), 1);
        rig.run(Duration::from_millis(1));
        listener
    };
    for port in 0..64 {
        listen(&mut greedy, 1000 + port).unwrap();
    }
    let error = listen(&mut greedy, 2000).unwrap_err().to_string();
    assert_eq!(error, "listen on 0.0.0.0:2000: too many listeners");
    listen(&mut good, 2000).unwrap();
    greedy.unlisten(7).unwrap();
    assert_eq!(listen(&mut greedy, 2001).unwrap(), 7);
    assert_eq!(rig.stats().listeners_refused, 1);
}
