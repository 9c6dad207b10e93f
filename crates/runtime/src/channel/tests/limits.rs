//! A domain at the limits of its budget: excess is refused and counted, the domain recovers, and other
//! domains are unharmed.

use super::*;
use crate::channel::simulation::SimulatedDomain;
use ginnel_stack::udp::{UdpError, UdpOptions, UdpSendParams};

fn peer() -> Peer {
    Peer { listens: true, echoes: true, ..Peer::default() }
}

/// Creates two domains.
fn open_two_domains(fixture: &Fixture) -> [(SimulatedDomain, Client); 2] {
    let server = SameThread(fixture.server.clone());
    [(); 2].map(|()| {
        let (domain, parts) = server.open_domain().unwrap();
        let client = Client::open(parts, Box::new(domain.clone())).unwrap();
        (domain, client)
    })
}

fn connect(client: &mut Client) -> Result<Conn, Error> {
    client.connect("10.0.0.2:90".parse().unwrap(), ConnectOptions::default())
}

/// Sends a line and receives its echo.
fn assert_echo(fixture: &mut Fixture, client: &mut Client, conn: Conn) {
    client.send(conn, b"as ever").unwrap();
    fixture.events(client);
    let mut out = [0; 64];
    assert_eq!(client.recv(conn, &mut out), Ok(7));
    assert_eq!(&out[..7], b"as ever");
}

// limit: channel.buffer_bytes_max
#[test]
fn buffer_bytes_max_limits_each_domain_separately() {
    let config = ChannelConfig { buffer_bytes_max: 3 * 2 * 4096, ..small_config() };
    let mut fixture = Fixture::new(&config, peer());
    let [(_, mut greedy), (_, mut good)] = open_two_domains(&fixture);
    let conn = connect(&mut good).unwrap();
    let conns: Vec<Conn> = (0..3).map(|_| connect(&mut greedy).unwrap()).collect();
    for _ in 0..5 {
        let error = connect(&mut greedy).unwrap_err().to_string();
        assert_eq!(error, "connect to 10.0.0.2:90: too many connections");
    }
    let error = greedy.udp_bind("0.0.0.0:53".parse().unwrap(), UdpOptions::default()).unwrap_err();
    assert_eq!(error.to_string(), "bind 0.0.0.0:53: too many sockets");
    assert_eq!(fixture.stats().sockets_refused, 6);
    assert_echo(&mut fixture, &mut good, conn);
    connect(&mut good).unwrap();
    // After one socket is freed, another one can be opened.
    greedy.abort(conns[0]).unwrap();
    greedy.release(conns[0]).unwrap();
    fixture.run(SECOND);
    let conn = connect(&mut greedy).unwrap();
    assert_echo(&mut fixture, &mut greedy, conn);
    drop(greedy);
    fixture.run(300 * SECOND);
    assert_eq!(fixture.sockets_in_use(), 2, "sockets of the other domain");
}

// limit: channel.datagram_bytes_max
#[test]
fn datagram_bytes_max_limits_each_domain_separately() {
    let mut fixture = Fixture::new(&ChannelConfig { datagram_bytes_max: 1 << 16, ..small_config() }, peer());
    let [(_, mut lazy), (_, mut good)] = open_two_domains(&fixture);
    let bind = |client: &mut Client, port: u16| {
        client.udp_bind(([0, 0, 0, 0], port).into(), UdpOptions::default()).unwrap()
    };
    let (waits, also, taken) = (bind(&mut lazy, 53), bind(&mut lazy, 54), bind(&mut good, 55));
    let from = fixture.peer.with(fixture.now, |_, cx| {
        cx.udp_bind("0.0.0.0:1000".parse().unwrap(), UdpOptions::default()).unwrap()
    });
    let send = |fixture: &mut Fixture, port: u16| {
        let sent = fixture
            .peer
            .with(fixture.now, |_, cx| cx.udp_send(from, Some(([10, 0, 0, 1], port).into()), &[7; 1400]));
        fixture.run(Duration::from_millis(1));
        fixture.run(Duration::from_millis(1));
        sent.unwrap();
    };
    for port in [53, 54, 55].into_iter().cycle().take(300) {
        send(&mut fixture, port);
        let _ = good.udp_recv(taken);
    }
    let fit = (1 << 16) / 1400;
    assert_eq!(
        fixture.stats().datagrams_dropped,
        200 - fit,
        "the other domain's datagrams were all received"
    );
    let count = |client: &mut Client, socket| {
        (0..).take_while(|_| client.udp_recv(socket) != Err(UdpError::WouldBlock)).count() as u64
    };
    let first = count(&mut lazy, waits);
    assert!(first > 0);
    // There is space again, for all sockets of the domain.
    (0..first).for_each(|_| send(&mut fixture, 54));
    assert_eq!(fixture.stats().datagrams_dropped, 200 - fit);
    assert_eq!((first, count(&mut lazy, also)), (23, fit));
    drop(lazy);
    fixture.run(SECOND);
    assert_eq!(fixture.sockets_in_use(), 1);
}

// limit: bytes of a socket in one turn
#[test]
fn datagrams_of_one_socket_leave_in_chunks() {
    // 131,072 bytes, of which each datagram is charged 1,024; one more exceeds the limit.
    const PER_TURN: u64 = 128;
    let mut fixture = Fixture::new(&ChannelConfig { socket_buffer_bytes: 1 << 18, ..small_config() }, peer());
    let [(_, mut greedy), (_, mut good)] = open_two_domains(&fixture);
    let conn = connect(&mut good).unwrap();
    let socket = greedy.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
    fixture
        .peer
        .with(fixture.now, |_, cx| cx.udp_bind("0.0.0.0:9".parse().unwrap(), UdpOptions::default()).unwrap());
    greedy.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
    let small =
        UdpSendParams { to: None, source: None, gso_size: 0, hop_limit: None, tos: None, flow_label: None };
    let write = |client: &mut Client| {
        (0..).take_while(|_| client.udp_send_queued(socket, &small, &[]).is_ok()).count() as u64
    };
    fixture.run(Duration::from_millis(1));
    let written = write(&mut greedy);
    assert!(written > 30 * PER_TURN, "{written}");
    assert_eq!(good.send(conn, b"as ever"), Ok(7));
    let turn = |fixture: &mut Fixture| {
        let before = fixture.peer.stats().frames_received;
        let turn = fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
        // A burst has 64 frames.
        for _ in 0..4 {
            fixture.peer.poll_once(fixture.now).unwrap();
        }
        fixture.now += Duration::from_micros(1);
        (turn.work > 0, fixture.peer.stats().frames_received - before)
    };
    assert_eq!(turn(&mut fixture), (true, PER_TURN + 1), "its share, and a segment of the other domain");
    assert!(!fixture.server.lock().unwrap().handler_mut().before_sleep(), "more work is queued");
    fixture.server.lock().unwrap().handler_mut().after_sleep(false);
    let (worked, frames) = turn(&mut fixture);
    assert!(worked && (PER_TURN..PER_TURN + 3).contains(&frames), "{frames}");
    // The share is the same however often the client notifies, and while it continues to write.
    let before = fixture.stats().sockets_deferred;
    for _ in 0..20 {
        write(&mut greedy);
        let (_, frames) = turn(&mut fixture);
        assert!(frames < PER_TURN + 3, "{frames}");
    }
    assert_eq!(fixture.stats().sockets_deferred - before, 20);
    assert_eq!(good.recv(conn, &mut [0; 64]), Ok(7), "the other domain was served meanwhile");
    assert_echo(&mut fixture, &mut good, conn);
    // A later connect does not redirect datagrams that were written before.
    while turn(&mut fixture).1 > 2 {}
    for _ in 0..200 {
        greedy.udp_send_queued(socket, &small, &[]).unwrap();
    }
    greedy.udp_connect(socket, "10.0.0.2:10".parse().unwrap()).unwrap();
    assert!((200..204).contains(&turn(&mut fixture).1));
    // A client that found no space is notified when a request frees it, before which the rest of a chunk is
    // sent.
    while greedy.next_event().is_some() {}
    assert!(write(&mut greedy) > 2 * PER_TURN);
    turn(&mut fixture);
    while greedy.next_event().is_some() {}
    assert_eq!(
        greedy.udp_send_queued(socket, &small, &[]),
        Ok(()),
        "there is space, of which it is not notified"
    );
    write(&mut greedy);
    greedy.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
    turn(&mut fixture);
    let events: Vec<_> = core::iter::from_fn(|| greedy.next_event()).collect();
    assert_eq!(events, [ClientEvent::Writable { conn: socket }]);
    // All datagrams are sent eventually, in chunks, including the last one written.
    let written = write(&mut greedy);
    while turn(&mut fixture).1 > 2 {}
    let written = written.max(write(&mut greedy));
    greedy.udp_send_queued(socket, &small, &[std::io::IoSlice::new(b"last")]).unwrap_err();
    greedy.release(socket).unwrap();
    let mut sent = 0;
    for _ in 0..written / PER_TURN {
        let (_, frames) = turn(&mut fixture);
        assert!(frames < PER_TURN + 3, "{frames}");
        sent += frames;
        assert_eq!(fixture.sockets_in_use(), 2, "{sent} of {written}");
    }
    turn(&mut fixture);
    fixture.run(SECOND);
    assert_eq!((fixture.sockets_in_use(), fixture.stats().violations), (1, 0));
    // Datagrams that a process leaves are sent, too, and then its domain is removed.
    let domains = |fixture: &Fixture| fixture.server.lock().unwrap().handler().domains();
    let socket = greedy.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
    greedy.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
    assert!((0..10 * PER_TURN).all(|_| greedy.udp_send_queued(socket, &small, &[]).is_ok()));
    let before = domains(&fixture);
    drop(greedy);
    turn(&mut fixture);
    assert_eq!(domains(&fixture), before);
    fixture.run(SECOND);
    assert_eq!(domains(&fixture), before - 1);
    assert_echo(&mut fixture, &mut good, conn);
}

/// The limit does not depend on the number of sockets.
// limit: bytes of a domain in one turn
#[test]
fn sockets_of_a_domain_share_one_turn_budget() {
    // 1,048,576 bytes, of which each datagram is charged 1,024, and the amount by which each chunk exceeds
    // its limit.
    const PER_TURN: u64 = 1024 + 8;
    const SOCKETS: usize = 20;
    let config = ChannelConfig { sockets_max: 32, socket_buffer_bytes: 1 << 18, ..small_config() };
    let mut fixture = Fixture::new(&config, peer());
    let [(_, mut greedy), (_, mut good)] = open_two_domains(&fixture);
    let conn = connect(&mut good).unwrap();
    fixture
        .peer
        .with(fixture.now, |_, cx| cx.udp_bind("0.0.0.0:9".parse().unwrap(), UdpOptions::default()).unwrap());
    let small =
        UdpSendParams { to: None, source: None, gso_size: 0, hop_limit: None, tos: None, flow_label: None };
    let sockets: Vec<Conn> = (0..SOCKETS)
        .map(|_| {
            let socket = greedy.udp_open("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
            greedy.udp_connect(socket, "10.0.0.2:9".parse().unwrap()).unwrap();
            socket
        })
        .collect();
    fixture.run(Duration::from_millis(1));
    for &socket in &sockets {
        while greedy.udp_send_queued(socket, &small, &[]).is_ok() {}
    }
    good.send(conn, b"as ever").unwrap();
    let turn = |fixture: &mut Fixture| {
        let before = fixture.peer.stats().frames_received;
        fixture.server.lock().unwrap().poll_once(fixture.now).unwrap();
        for _ in 0..20 {
            fixture.peer.poll_once(fixture.now).unwrap();
        }
        fixture.now += Duration::from_micros(1);
        fixture.peer.stats().frames_received - before
    };
    // Eight sockets get a share, then eight others, and then the rest.
    let mut had_share = [false; SOCKETS];
    for expected in [8, 16, SOCKETS] {
        let sent = turn(&mut fixture);
        assert!((900..=PER_TURN + 2).contains(&sent), "{sent}");
        assert!(!fixture.server.lock().unwrap().handler_mut().before_sleep());
        fixture.server.lock().unwrap().handler_mut().after_sleep(false);
        for (had_share, &socket) in had_share.iter_mut().zip(&sockets) {
            // There is space for a datagram only if one was taken.
            *had_share |= greedy.udp_send_queued(socket, &small, &[]).is_ok();
        }
        assert_eq!(had_share.iter().filter(|had_share| **had_share).count(), expected);
    }
    while good.next_event().is_some() {}
    assert_eq!(good.recv(conn, &mut [0; 64]), Ok(7), "the other domain was served in the first turn");
    // A process that exits takes no larger share of a turn than one that lives.
    for &socket in &sockets {
        while greedy.udp_send_queued(socket, &small, &[]).is_ok() {}
    }
    drop(greedy);
    for _ in 0..40 {
        let sent = turn(&mut fixture);
        assert!(sent <= 2 * (PER_TURN + 2), "{sent}");
    }
    fixture.run(SECOND);
    assert_eq!((fixture.sockets_in_use(), fixture.stats().violations), (1, 0));
    assert_echo(&mut fixture, &mut good, conn);
}

// limit: channel.backlog_max
#[test]
fn backlog_max_limits_the_requested_backlog() {
    let mut fixture =
        Fixture::new(&ChannelConfig { sockets_max: 64, backlog_max: 4, ..small_config() }, peer());
    let [(_, mut lazy), (_, mut good)] = open_two_domains(&fixture);
    let long = ListenOptions { backlog: u32::MAX, ..ListenOptions::default() };
    lazy.listen("0.0.0.0:80".parse().unwrap(), long, 0).unwrap();
    good.listen("0.0.0.0:81".parse().unwrap(), ListenOptions::default(), 8).unwrap();
    for _ in 0..40 {
        // A peer that sends a request retries until it is served: a full accept queue is answered with SYN
        // cookies.
        fixture.connect_peer(b"?");
    }
    fixture.run(Duration::from_millis(100));
    assert_eq!(fixture.sockets_in_use(), 4, "further connections wait in the engine or for a SYN-ACK");
    fixture.peer.with(fixture.now, |peer, cx| {
        let conn = cx.connect("10.0.0.1:81".parse().unwrap(), ConnectOptions::default()).unwrap();
        peer.add(conn, b"as ever");
    });
    fixture.run(SECOND);
    let conn = accepted(&fixture.events(&mut good))[0];
    assert_eq!(good.readable(conn), Ok(7));
    // The client begins to accept, and accepts all of them eventually.
    let mut got = 0;
    for _ in 0..600 {
        lazy.set_credits(0, 8);
        got += accepted(&fixture.events(&mut lazy)).len();
        fixture.run(Duration::from_millis(200));
    }
    assert_eq!(got, 40);
}

// limit: channel.listeners_max
#[test]
fn listeners_of_a_domain_are_limited() {
    let config = ChannelConfig { listeners_max: 64, ..small_config() };
    let mut fixture = Fixture::new(&config, peer());
    let [(_, mut greedy), (_, mut good)] = open_two_domains(&fixture);
    let mut listen = |client: &mut Client, port: u16| {
        let listener = client.listen(([0, 0, 0, 0], port).into(), ListenOptions::default(), 1);
        fixture.run(Duration::from_millis(1));
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
    assert_eq!(fixture.stats().listeners_refused, 1);
}
