//! Filters of clients' sockets: what they drop, who may set them, and the memory of a domain for them.

use super::*;
use crate::channel::SocketId;
use crate::channel::simulation::SimulatedDomain;
use crate::socket_filter::FilterError;
use ginnel_stack::udp::{UdpError, UdpOptions};

/// An instruction: code, `jt`, `jf`, `k`.
type Instruction = (u16, u8, u8, u32);

const DROP_ALL: [Instruction; 1] = [(0x06, 0, 0, 0)];
const KEEP_ALL: [Instruction; 1] = [(0x06, 0, 0, u32::MAX)];

fn encode(program: &[Instruction]) -> Vec<u8> {
    let bytes = |(code, jt, jf, k): &Instruction| {
        let [c0, c1] = code.to_ne_bytes();
        let [k0, k1, k2, k3] = k.to_ne_bytes();
        [c0, c1, *jt, *jf, k0, k1, k2, k3]
    };
    program.iter().flat_map(bytes).collect()
}

/// Drops segments whose payload begins with `x`.
fn drop_segments_of_x() -> Vec<u8> {
    encode(&[
        (0x30, 0, 0, 12),
        (0x74, 0, 0, 2),
        (0x54, 0, 0, 0x3c),
        (0x07, 0, 0, 0),
        (0x80, 0, 0, 0),
        (0x2d, 0, 2, 0),
        (0x50, 0, 0, 0),
        (0x15, 1, 0, u32::from(b'x')),
        (0x06, 0, 0, u32::MAX),
        (0x06, 0, 0, 0),
    ])
}

fn id(conn: Conn) -> SocketId {
    SocketId::Socket { socket: conn.index(), generation: conn.generation() }
}

fn any() -> SocketAddr {
    "0.0.0.0:80".parse().unwrap()
}

fn udp_open(client: &mut Client, port: u16, code: Option<&[u8]>) -> Result<Conn, Error> {
    client.udp_open_filtered(([0, 0, 0, 0], port).into(), UdpOptions::default(), None, code)
}

#[test]
fn datagrams_pass_the_filter_of_their_socket() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let mut client = fixture.client();
    // Drops what begins with `x`, and keeps three bytes of the others.
    let code = encode(&[(0x30, 0, 0, 8), (0x15, 0, 1, u32::from(b'x')), DROP_ALL[0], (0x06, 0, 0, 8 + 3)]);
    let socket = udp_open(&mut client, 53, Some(&code)).unwrap();
    let from = fixture.peer.with(fixture.now, |_, cx| {
        cx.udp_bind("0.0.0.0:1000".parse().unwrap(), UdpOptions::default()).unwrap()
    });
    let receive = |fixture: &mut Fixture, client: &mut Client, bytes: &[u8]| {
        let to = Some("10.0.0.1:53".parse().unwrap());
        fixture.run(Duration::from_millis(20));
        fixture.peer.with(fixture.now, |_, cx| cx.udp_send(from, to, bytes)).unwrap();
        fixture.run(Duration::from_millis(20));
        fixture.events(client);
        let mut out = [0; 64];
        let got = client.udp_recv_into(socket, &mut [std::io::IoSliceMut::new(&mut out)]);
        got.map(|got| out[..got.unwrap().len].to_vec())
    };
    let mut receive_now = |bytes: &[u8]| receive(&mut fixture, &mut client, bytes);
    assert_eq!(receive_now(b"x is dropped"), Err(UdpError::WouldBlock));
    assert_eq!(receive_now(b"kept"), Ok(b"kep".to_vec()));
    assert_eq!(receive_now(b"ab"), Ok(b"ab".to_vec()));
    assert_eq!(client.filter(id(socket)), Ok(code));
    client.set_filter(id(socket), None).unwrap();
    assert_eq!(receive(&mut fixture, &mut client, b"x passes"), Ok(b"x passes".to_vec()));
    assert_eq!(client.filter(id(socket)), Ok(Vec::new()));
    client.set_filter(id(socket), Some(&encode(&DROP_ALL))).unwrap();
    assert_eq!(receive(&mut fixture, &mut client, b"nothing"), Err(UdpError::WouldBlock));
}

#[test]
fn listener_drops_syns_until_filter_is_removed() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let mut client = fixture.client();
    let code = encode(&DROP_ALL);
    let number = client.listen_shared(any(), ListenOptions::default(), 4, 0, Some(&code)).unwrap();
    fixture.connect_peer(b"hello");
    fixture.run(500 * Duration::from_millis(1));
    assert_eq!(accepted(&fixture.events(&mut client)), []);
    client.set_filter(SocketId::Listener(number), None).unwrap();
    fixture.run(2 * SECOND);
    let conn = accepted(&fixture.events(&mut client))[0];
    assert_eq!(client.recv(conn, &mut [0; 8]), Ok(5));
}

#[test]
fn connections_lose_segments_by_inherited_filters() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let mut client = fixture.client();
    let code = drop_segments_of_x();
    let number = client.listen_shared(any(), ListenOptions::default(), 4, 0, Some(&code)).unwrap();
    let peer = fixture.connect_peer(b"first");
    let conn = accepted(&fixture.events(&mut client))[0];
    assert_eq!(client.filter(id(conn)), Ok(code.clone()));
    assert_eq!(client.recv(conn, &mut [0; 8]), Ok(5));
    // Options of the listener do not remove its filter, nor do options of a connection.
    client
        .set_listener_options(number, crate::SocketOptions { nodelay: true, ..Default::default() })
        .unwrap();
    assert_eq!(client.filter(SocketId::Listener(number)), Ok(code.clone()));
    client.set_option(conn, crate::TcpOption::KeepCount(3)).unwrap();
    client.set_filter(SocketId::Listener(number), None).unwrap();
    let send = |fixture: &mut Fixture, text: &[u8]| {
        fixture.peer.with(fixture.now, |handler, cx| {
            handler.to_send[peer].0.extend(text);
            handler.push(cx, handler.conns[peer]);
        });
    };
    send(&mut fixture, b"x lost");
    fixture.run(5 * SECOND);
    assert_eq!(client.recv(conn, &mut [0; 8]), Ok(0));
    assert_eq!(client.filter(id(conn)), Ok(code));
    client.set_filter(id(conn), None).unwrap();
    fixture.run(60 * SECOND);
    let mut out = [0; 16];
    assert_eq!(client.recv(conn, &mut out), Ok(6), "the peer sends it again");
    assert_eq!(&out[..6], b"x lost");
    send(&mut fixture, b"x");
    fixture.run(SECOND);
    assert_eq!(client.recv(conn, &mut out), Ok(1));
}

/// Connections that are half-open when the filter of their listener changes have the new one, as on Linux.
#[test]
fn half_open_connections_take_over_the_filter_of_their_listener() {
    let (drops_x, drops_all) = (drop_segments_of_x(), encode(&DROP_ALL));
    // The filter at the SYN, that of the final acknowledgement, what the peer sends, and whether the
    // connection is accepted with the first segment.
    let cases = [
        (None, Some(&drops_all), &b"yes"[..], false),
        (None, Some(&drops_x), b"x", false),
        (None, Some(&drops_x), b"y", true),
        (Some(&drops_x), None, b"x", true),
        (Some(&drops_x), Some(&drops_all), b"yes", false),
        (None, None, b"x", true),
    ];
    for (before, now, sent, is_accepted) in cases {
        let mut fixture = Fixture::new(&small_config(), Peer::default());
        let mut client = fixture.client();
        let mut options = ListenOptions::default();
        options.socket.defer_accept = 6;
        let number = client.listen_shared(any(), options, 4, 0, before.map(|code| &code[..])).unwrap();
        let peer = fixture.connect_peer(b"");
        assert_eq!(accepted(&fixture.events(&mut client)), []);
        client.set_filter(SocketId::Listener(number), now.map(|code| &code[..])).unwrap();
        fixture.peer.with(fixture.now, |handler, cx| {
            handler.to_send[peer].0.extend(sent);
            handler.push(cx, handler.conns[peer]);
        });
        fixture.run(Duration::from_millis(50));
        let conns = accepted(&fixture.events(&mut client));
        let case = (before.is_some(), now.map(Vec::len), sent);
        assert_eq!(conns.len(), usize::from(is_accepted), "{case:?}");
        for conn in conns {
            assert_eq!(client.filter(id(conn)), Ok(now.cloned().unwrap_or_default()), "{case:?}");
            assert_eq!(client.readable(conn), Ok(sent.len()), "{case:?}");
        }
        if !is_accepted {
            // The peer sends it again.
            client.set_filter(SocketId::Listener(number), None).unwrap();
            fixture.run(5 * SECOND);
            assert_eq!(accepted(&fixture.events(&mut client)).len(), 1, "{case:?}");
        }
    }
}

/// A half-open connection whose listener was closed has the filter of the listener that takes it over.
#[test]
fn half_open_connections_move_to_the_filter_of_another_listener() {
    let (drops_x, drops_all) = (drop_segments_of_x(), encode(&DROP_ALL));
    let cases = [
        (None, Some(&drops_all), false),
        (None, Some(&drops_x), true),
        (Some(&drops_all), None, true),
        (Some(&drops_x), Some(&drops_all), false),
    ];
    for (of_old, of_new, is_accepted) in cases {
        for attached_late in [false, true] {
            let mut fixture = Fixture::new(&small_config(), Peer::default());
            let [(_, mut old), (_, mut new)] = open_two_domains(&fixture);
            let mut options = ListenOptions { reuse_port: true, ..ListenOptions::default() };
            options.socket.defer_accept = 6;
            let number = old.listen(any(), options, 4).unwrap();
            let peer = fixture.connect_peer(b"");
            fixture.run(Duration::from_millis(20));
            if let Some(code) = of_old {
                old.set_filter(SocketId::Listener(number), Some(code)).unwrap();
            }
            let at_once = of_new.filter(|_| !attached_late).map(|code| &code[..]);
            let sibling = new.listen_shared(any(), options, 4, 0, at_once).unwrap();
            old.unlisten(number).unwrap();
            if attached_late {
                new.set_filter(SocketId::Listener(sibling), of_new.map(|code| &code[..])).unwrap();
            }
            fixture.peer.with(fixture.now, |handler, cx| {
                handler.to_send[peer].0.extend(b"yes");
                handler.push(cx, handler.conns[peer]);
            });
            fixture.run(Duration::from_millis(50));
            let conns = accepted(&fixture.events(&mut new));
            let case = (of_old.map(Vec::len), of_new.map(Vec::len), attached_late);
            assert_eq!(conns.len(), usize::from(is_accepted), "{case:?}");
            for conn in conns {
                assert_eq!(new.filter(id(conn)), Ok(of_new.cloned().unwrap_or_default()), "{case:?}");
            }
        }
    }
}

/// The steps of programs are counted for each turn anew.
#[test]
fn long_programs_pass_packets_of_many_turns() {
    let mut fixture = Fixture::new(&small_config(), Peer::default());
    let mut client = fixture.client();
    let code = encode(&[vec![(0x80, 0, 0, 0); 4095], vec![(0x06, 0, 0, u32::MAX)]].concat());
    let socket = udp_open(&mut client, 53, Some(&code)).unwrap();
    let from = fixture.peer.with(fixture.now, |_, cx| {
        cx.udp_bind("0.0.0.0:1000".parse().unwrap(), UdpOptions::default()).unwrap()
    });
    for turn in 0..100 {
        let to = Some("10.0.0.1:53".parse().unwrap());
        fixture.peer.with(fixture.now, |_, cx| cx.udp_send(from, to, b"hello")).unwrap();
        fixture.run(Duration::from_millis(20));
        fixture.events(&mut client);
        let mut out = [0; 8];
        let got = client.udp_recv_into(socket, &mut [std::io::IoSliceMut::new(&mut out)]);
        assert_eq!(got.map(|got| got.unwrap().len), Ok(5), "{turn}");
    }
}

#[test]
fn bad_programs_open_nothing() {
    let mut fixture = Fixture::new(&small_config(), Peer { listens: true, ..Peer::default() });
    let mut client = fixture.client();
    let remote = "10.0.0.2:90".parse().unwrap();
    for code in [&[][..], &[0; 7], &[0; 8], &encode(&DROP_ALL)[..4], &[1; 100]] {
        let bad = Some(code);
        let refused = |error| matches!(error, Error::Filter(FilterError::Invalid));
        assert!(refused(udp_open(&mut client, 53, bad).unwrap_err()));
        assert!(refused(client.listen_shared(any(), ListenOptions::default(), 1, 0, bad).unwrap_err()));
        assert!(refused(client.connect_filtered(remote, ConnectOptions::default(), bad).unwrap_err()));
    }
    fixture.run(SECOND);
    assert_eq!(fixture.sockets_in_use(), 0);
    // Nothing has remained on the addresses.
    client.listen(any(), ListenOptions::default(), 1).unwrap();
    let socket = udp_open(&mut client, 53, Some(&encode(&KEEP_ALL))).unwrap();
    assert_eq!(client.set_filter(id(socket), Some(&[0; 8])), Err(FilterError::Invalid));
    assert_eq!(client.filter(id(socket)), Ok(encode(&KEEP_ALL)));
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

#[test]
fn filters_belong_to_the_owners_of_sockets() {
    let fixture = Fixture::new(&small_config(), Peer::default());
    let [(_, mut owner), (_, mut other)] = open_two_domains(&fixture);
    let code = encode(&DROP_ALL);
    let socket = udp_open(&mut owner, 53, Some(&code)).unwrap();
    let number = owner.listen_shared(any(), ListenOptions::default(), 1, 0, Some(&code)).unwrap();
    let ids = [id(socket), SocketId::Listener(number)];
    let unknown = [
        id(Conn::new(socket.index(), socket.generation() + 1)),
        id(Conn::new(1 << 20, 0)),
        SocketId::Listener(number + 1),
        SocketId::Listener(u32::MAX),
    ];
    let keep = encode(&KEEP_ALL);
    for of in ids.into_iter().chain(unknown) {
        assert_eq!(other.set_filter(of, Some(&keep)), Err(FilterError::Stale), "{of:?}");
        assert_eq!(other.set_filter(of, None), Err(FilterError::Stale), "{of:?}");
        assert!(other.filter(of).is_err(), "{of:?}");
    }
    for of in unknown {
        assert_eq!(owner.set_filter(of, Some(&keep)), Err(FilterError::Stale), "{of:?}");
        assert!(owner.filter(of).is_err(), "{of:?}");
    }
    for of in ids {
        assert_eq!(owner.filter(of), Ok(code.clone()));
    }
}

// limit: channel.filter_bytes_max
#[test]
fn filter_bytes_max_limits_each_domain_separately() {
    let config = ChannelConfig { filter_bytes_max: 1 << 16, sockets_max: 128, ..small_config() };
    let mut fixture = Fixture::new(&config, Peer::default());
    let [(_, mut greedy), (_, mut good)] = open_two_domains(&fixture);
    let code = encode(&KEEP_ALL);
    let mut opened = Vec::new();
    let refused = loop {
        match udp_open(&mut greedy, 1000 + opened.len() as u16, Some(&code)) {
            Ok(socket) => opened.push(socket),
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, Error::Filter(FilterError::NoMemory)), "{refused:?}");
    let fit = opened.len();
    // Each takes 1,024 bytes and those of one instruction.
    assert!((62..64).contains(&fit), "{fit}");
    assert_eq!(fixture.stats().filters_refused, 1);
    // A socket keeps the filter that it has, and others go on without one.
    let longer = encode(&[KEEP_ALL[0]; 4000]);
    assert_eq!(greedy.set_filter(id(opened[0]), Some(&longer)), Err(FilterError::NoMemory));
    assert_eq!(greedy.filter(id(opened[0])), Ok(code.clone()));
    assert_eq!(fixture.stats().filters_refused, 2);
    udp_open(&mut greedy, 2000, None).unwrap();
    let refused = greedy.listen_shared(any(), ListenOptions::default(), 1, 0, Some(&code)).unwrap_err();
    assert!(matches!(refused, Error::Filter(FilterError::NoMemory)), "{refused:?}");
    udp_open(&mut good, 3000, Some(&code)).unwrap();
    // The memory of filters comes back when they are removed or replaced, and when sockets are closed.
    greedy.set_filter(id(opened[0]), None).unwrap();
    greedy.set_filter(id(opened[1]), Some(&code)).unwrap();
    greedy.set_filter(id(opened[0]), Some(&code)).unwrap();
    assert_eq!(greedy.set_filter(id(opened[1]), Some(&code)), Err(FilterError::NoMemory));
    greedy.release(opened[2]).unwrap();
    fixture.run(SECOND);
    greedy.set_filter(id(opened[1]), Some(&code)).unwrap();
    drop(greedy);
    fixture.run(SECOND);
    assert_eq!(fixture.sockets_in_use(), 1);
}

#[test]
fn listeners_and_connections_return_memory_together() {
    let config = ChannelConfig { filter_bytes_max: 1 << 16, ..small_config() };
    let mut fixture = Fixture::new(&config, Peer { close_when_sent: true, ..Peer::default() });
    let mut client = fixture.client();
    // More than half of the memory.
    let code = encode(&[KEEP_ALL[0]; 2000]);
    let listen =
        |client: &mut Client| client.listen_shared(any(), ListenOptions::default(), 1, 0, Some(&code));
    let number = listen(&mut client).unwrap();
    fixture.connect_peer(b"hello");
    let conn = accepted(&fixture.events(&mut client))[0];
    client.unlisten(number).unwrap();
    fixture.run(SECOND);
    assert!(listen(&mut client).is_err(), "the connection has the filter");
    let unfiltered = client.listen(any(), ListenOptions::default(), 1).unwrap();
    client.unlisten(unfiltered).unwrap();
    client.abort(conn).unwrap();
    client.release(conn).unwrap();
    fixture.run(SECOND);
    listen(&mut client).unwrap();
}
