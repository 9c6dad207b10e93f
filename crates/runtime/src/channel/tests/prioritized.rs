//! Events by priority: events of a high class overtake those that wait in the channel. Bytes, datagrams and
//! connections of a high class are called urgent here.

use super::*;
use crate::SocketOptions;
use crate::fixture::{CLIENT_ADDRESS, SERVER_ADDRESS, config, host};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::priority::{self, BEST_EFFORT};
use ginnel_stack::udp::UdpOptions;
use std::io::IoSliceMut;

const HIGH: u8 = 6;

/// A domain with room for `sockets_max` sockets, on a stack with or without priorities.
fn fixture(has_priorities: bool, sockets_max: u32) -> Fixture {
    let channel = ChannelConfig {
        sockets_max,
        socket_buffer_bytes: 4096,
        large_buffers_max: 0,
        ..ChannelConfig::default()
    };
    fixture_with(has_priorities, channel)
}

/// A domain on a stack with or without priorities.
pub(super) fn fixture_with(has_priorities: bool, channel: ChannelConfig) -> Fixture {
    let (a, b) = pair(MemoryConfig { labels: true, ..MemoryConfig::default() });
    let mut server = config(&[SERVER_ADDRESS]);
    server.priority.enabled = Some(has_priorities);
    let server = Shard::builder(server).handler(ChannelServer::new(&channel).unwrap()).device("cable", a);
    let server = server.seed([1; 32]).now(START).build().unwrap();
    let peer = host(CLIENT_ADDRESS, Peer::default(), b).seed([2; 32]).now(START).build().unwrap();
    let mut fixture = Fixture { server: Arc::new(Mutex::new(server)), peer, now: START };
    fixture.run(Duration::from_millis(1));
    fixture
}

impl Fixture {
    /// Opens `count` connections of this priority to the client, which accepts them.
    fn connect_many(&mut self, client: &mut Client, count: usize, priority: u8) -> Vec<Conn> {
        let mut conns = Vec::new();
        // The client has 64 offers at a time.
        while conns.len() < count {
            for _ in 0..(count - conns.len()).min(32) {
                self.peer.with(self.now, |peer, cx| {
                    let socket = SocketOptions { nodelay: true, priority, ..SocketOptions::default() };
                    let options = ConnectOptions { socket, ..ConnectOptions::default() };
                    let conn = cx.connect("10.0.0.1:80".parse().unwrap(), options).unwrap();
                    peer.add(conn, b"");
                });
            }
            conns.extend(accepted(&self.events(client)));
        }
        // What the stack reports when it learns that they were accepted.
        assert!(accepted(&self.events(client)).is_empty());
        conns
    }

    /// Makes the peer send on its connections of these numbers.
    fn send(&mut self, numbers: core::ops::Range<usize>, text: &[u8]) {
        for number in numbers {
            self.peer.with(self.now, |peer, cx| {
                assert_eq!(cx.send(peer.conns[number], text), Ok(text.len()));
            });
            self.run(Duration::from_micros(20));
        }
        self.run(Duration::from_micros(200));
    }

    fn set_priority(&mut self, number: usize, priority: u8) {
        self.peer.with(self.now, |peer, cx| cx.set_priority(peer.conns[number], priority).unwrap());
    }
}

/// Returns the next connection that became readable.
fn next_readable(client: &mut Client) -> Option<Conn> {
    core::iter::from_fn(|| client.next_event()).find_map(|event| match event {
        ClientEvent::Readable { conn } => Some(conn),
        _ => None,
    })
}

#[test]
fn urgent_socket_comes_before_waiting_ones() {
    for has_priorities in [true, false] {
        let mut fixture = fixture(has_priorities, 256);
        let mut client = fixture.client();
        listen(&mut client, 64);
        let low = fixture.connect_many(&mut client, 100, 0);
        let high = fixture.connect_many(&mut client, 1, HIGH)[0];
        fixture.send(0..100, b"heartbeat");
        let first = next_readable(&mut client);
        assert_eq!((first, client.event_class()), (Some(low[0]), BEST_EFFORT));
        fixture.send(100..101, b"request");
        let expected = if has_priorities { high } else { low[1] };
        assert_eq!(next_readable(&mut client), Some(expected));
        let expected = if has_priorities { priority::class(HIGH) } else { BEST_EFFORT };
        assert_eq!(client.event_class(), expected);
        assert_eq!(client.has_priorities(), has_priorities);
        assert!(!client.before_sleep(), "the others wait");
        client.after_sleep(false);
        let rest = core::iter::from_fn(|| next_readable(&mut client)).count();
        assert_eq!(rest, 99, "every socket once");
        assert_eq!(client.event_class(), BEST_EFFORT);
        assert!(client.before_sleep());
        client.after_sleep(false);
    }
}

/// A client does not sleep while sockets wait in its queues, though its ring is empty.
#[test]
fn client_with_queued_sockets_does_not_sleep() {
    let mut fixture = fixture(true, 256);
    let mut client = fixture.client();
    listen(&mut client, 64);
    fixture.connect_many(&mut client, 2, HIGH);
    fixture.send(0..2, b"request");
    assert!(next_readable(&mut client).is_some());
    assert!(!client.before_sleep());
    client.after_sleep(false);
    assert!(next_readable(&mut client).is_some() && next_readable(&mut client).is_none());
}

/// An urgent message on a socket that waits with earlier bytes takes the socket along.
#[test]
fn waiting_socket_moves_up_with_urgent_bytes() {
    let mut fixture = fixture(true, 256);
    let mut client = fixture.client();
    listen(&mut client, 64);
    let conns = fixture.connect_many(&mut client, 50, 0);
    fixture.send(0..50, b"heartbeat");
    assert_eq!(next_readable(&mut client), Some(conns[0]));
    fixture.set_priority(40, HIGH);
    fixture.send(40..41, b"request");
    assert_eq!(next_readable(&mut client), Some(conns[40]));
    assert_eq!(client.readable(conns[40]), Ok(16), "both messages, in order");
    assert_eq!(client.data_class(conns[40]), Ok(Some(priority::class(HIGH))));
    assert_eq!(client.data_class(conns[41]), Ok(Some(BEST_EFFORT)));
    client.recv(conns[40], &mut [0; 64]).unwrap();
    assert_eq!(client.data_class(conns[40]), Ok(None));
    let rest = core::iter::from_fn(|| next_readable(&mut client)).count();
    assert_eq!(rest, 48, "the socket is not reported again");
}

/// Urgent bytes that wait in the engine, because the region has no space, keep their class.
#[test]
fn bytes_behind_a_full_region_keep_their_class() {
    let mut fixture = fixture(true, 256);
    let mut client = fixture.client();
    listen(&mut client, 64);
    let conn = fixture.connect_many(&mut client, 1, 0)[0];
    fixture.send(0..1, &[1; 6000]);
    fixture.send(0..1, &[1; 6000]);
    assert_eq!((next_readable(&mut client), client.readable(conn)), (Some(conn), Ok(4096)));
    fixture.set_priority(0, HIGH);
    fixture.send(0..1, &[2; 100]);
    fixture.set_priority(0, 0);
    fixture.send(0..1, &[3; 3000]);
    let high = priority::class(HIGH);
    let mut read = 0;
    while read < 12_100 {
        assert_eq!(client.data_class(conn), Ok(Some(high)), "{read}");
        let mut bytes = [0; 4096];
        read += client.recv(conn, &mut bytes).unwrap();
        while client.next_event().is_some() {}
        fixture.run(Duration::from_millis(1));
        if read < 12_000 {
            assert_eq!((next_readable(&mut client), client.event_class()), (Some(conn), high), "{read}");
        }
    }
    assert_eq!(client.data_class(conn), Ok(Some(BEST_EFFORT)), "{read}");
}

/// Urgent datagrams that wait, because the region has no space, keep their class.
#[test]
fn datagrams_behind_a_full_region_keep_their_class() {
    let mut fixture = fixture(true, 256);
    let mut client = fixture.client();
    let socket = client.udp_open("0.0.0.0:7".parse().unwrap(), UdpOptions::default()).unwrap();
    let send = |fixture: &mut Fixture, priority, len| {
        fixture.peer.with(fixture.now, |_, cx| {
            let own =
                cx.udp_bind("0.0.0.0:0".parse().unwrap(), UdpOptions { priority, ..UdpOptions::default() });
            let own = own.unwrap();
            cx.udp_send(own, Some("10.0.0.1:7".parse().unwrap()), &vec![priority; len]).unwrap();
            cx.udp_close(own).unwrap();
        });
        fixture.run(Duration::from_millis(1));
    };
    (0..6).for_each(|_| send(&mut fixture, 0, 1000));
    while client.next_event().is_some() {}
    assert_eq!(client.data_class(socket), Ok(Some(BEST_EFFORT)));
    send(&mut fixture, HIGH, 1200);
    send(&mut fixture, 0, 900);
    // Longer than the region.
    send(&mut fixture, 5, 5000);
    let expected = [HIGH; 7].into_iter().chain([5, 5]).map(priority::class);
    for (number, class) in expected.enumerate() {
        assert_eq!(client.data_class(socket), Ok(Some(class)), "{number}");
        let is_reported = next_readable(&mut client).is_some();
        assert!(is_reported && client.event_class() == class || !is_reported && number > 0, "{number}");
        let mut bytes = [0; 8192];
        let received = client.udp_recv_into(socket, &mut [IoSliceMut::new(&mut bytes)]);
        assert_eq!(
            received.unwrap().unwrap().len,
            [1000, 1000, 1000, 1000, 1000, 1000, 1200, 900, 5000][number]
        );
        fixture.run(Duration::from_millis(1));
    }
    assert_eq!(client.data_class(socket), Ok(None));
}

/// Lower classes get `priority.lower_share_percent` of the events while urgent ones wait.
#[test]
fn lower_sockets_get_their_share() {
    // Without priorities all of the low sockets come first: they became readable first.
    for (has_priorities, expected) in [(true, 18..=22), (false, 100..=100)] {
        let mut fixture = fixture(has_priorities, 1024);
        let mut client = fixture.client();
        listen(&mut client, 64);
        let low = fixture.connect_many(&mut client, 100, 0);
        fixture.connect_many(&mut client, 400, HIGH);
        fixture.send(0..500, b"message");
        let order: Vec<Conn> = core::iter::from_fn(|| next_readable(&mut client)).collect();
        assert_eq!(order.len(), 500);
        let low_before = order[..400].iter().filter(|conn| low.contains(conn)).count();
        assert!(expected.contains(&low_before), "{has_priorities}: {low_before} of 400");
    }
}

/// A ring that overflowed keeps the classes: the flags of all sockets say them.
#[test]
fn overflow_keeps_the_order_of_classes() {
    let mut fixture = fixture(true, 4096);
    let mut client = fixture.client();
    listen(&mut client, 64);
    // The ring has 1,024 slots.
    let low = fixture.connect_many(&mut client, 1200, 0);
    let high = fixture.connect_many(&mut client, 2, HIGH);
    fixture.send(0..1200, b"heartbeat");
    fixture.send(1200..1202, b"request");
    let order: Vec<Conn> = core::iter::from_fn(|| next_readable(&mut client)).collect();
    assert_eq!(order[..2], high[..]);
    assert_eq!(order.len(), low.len() + 2);
}

/// Connections of a higher class are offered as such, and so are those whose first bytes are urgent.
#[test]
fn offers_have_the_class_of_their_connection() {
    let mut fixture = fixture(true, 256);
    let mut client = fixture.client();
    client.accept_explicitly();
    let listener = listen(&mut client, 64);
    assert_eq!(client.offer_class(listener), None);
    let connect = |fixture: &mut Fixture, priority| {
        fixture.peer.with(fixture.now, |peer, cx| {
            let socket = SocketOptions { priority, ..SocketOptions::default() };
            let options = ConnectOptions { socket, ..ConnectOptions::default() };
            peer.add(cx.connect("10.0.0.1:80".parse().unwrap(), options).unwrap(), b"");
        });
        fixture.run(Duration::from_millis(5));
    };
    connect(&mut fixture, 0);
    assert_eq!(client.next_event(), Some(ClientEvent::Offered { listener }));
    assert_eq!((client.offer_class(listener), client.event_class()), (Some(BEST_EFFORT), BEST_EFFORT));
    connect(&mut fixture, HIGH);
    assert_eq!(client.next_event(), Some(ClientEvent::Offered { listener }));
    let high = priority::class(HIGH);
    assert_eq!((client.offer_class(listener), client.event_class()), (Some(high), high));
    assert!(client.accept(listener).is_some() && client.accept(listener).is_some());
    assert_eq!(client.offer_class(listener), None);
    connect(&mut fixture, 0);
    while client.next_event().is_some() {}
    fixture.set_priority(2, HIGH);
    fixture.send(2..3, b"urgent from the start");
    assert_eq!(client.next_event(), Some(ClientEvent::Offered { listener }), "reported again");
    assert_eq!((client.offer_class(listener), client.event_class()), (Some(high), high));
}

/// Connections of a high class are accepted first, those that the client was offered and those that wait for
/// an offer. Lower ones get their share.
#[test]
fn connections_are_accepted_by_class() {
    let mut fixture = fixture(true, 1024);
    let mut client = fixture.client();
    client.accept_explicitly();
    let listener = listen(&mut client, 8);
    let connect = |fixture: &mut Fixture, priority, count| {
        for _ in 0..count {
            fixture.peer.with(fixture.now, |peer, cx| {
                let socket = SocketOptions { nodelay: true, priority, ..SocketOptions::default() };
                let options = ConnectOptions { socket, ..ConnectOptions::default() };
                peer.add(cx.connect("10.0.0.1:80".parse().unwrap(), options).unwrap(), b"");
            });
            fixture.run(Duration::from_micros(200));
        }
        fixture.run(Duration::from_millis(1));
    };
    connect(&mut fixture, 0, 60);
    connect(&mut fixture, HIGH, 40);
    // The last ordinary one becomes urgent while it waits.
    fixture.set_priority(59, HIGH);
    fixture.send(59..60, b"urgent");
    while client.next_event().is_some() {}
    let port_of = |fixture: &mut Fixture, number: usize| {
        fixture.peer.with(fixture.now, |peer, cx| cx.endpoints(peer.conns[number]).unwrap()[0].port())
    };
    let ports: Vec<u16> = (0..100).map(|number| port_of(&mut fixture, number)).collect();
    let mut order = Vec::new();
    while order.len() < 100 {
        while let Some(conn) = client.accept(listener) {
            let port = client.endpoints(conn).unwrap()[1].port();
            order.push(ports.iter().position(|other| *other == port).unwrap());
            fixture.run(Duration::from_millis(1));
            while client.next_event().is_some() {}
        }
    }
    // Eight were offered before the urgent ones came.
    let urgent = order.iter().take(52).filter(|number| **number >= 59).count();
    assert_eq!(urgent, 41, "{order:?}");
    let ordinary: Vec<usize> = order.into_iter().filter(|number| *number < 59).collect();
    assert_eq!(ordinary, (0..59).collect::<Vec<_>>(), "within a class in the order of arrival");
}
