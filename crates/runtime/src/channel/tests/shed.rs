//! Datagrams that clients do not read in time are dropped by priority. Each test also runs without
//! priorities.

use super::prioritized::fixture_with;
use super::*;
use ginnel_stack::udp::{UdpError, UdpOptions};
use std::io::IoSliceMut;

const HIGH: u8 = 6;
const DATAGRAM_BYTES: usize = 300;

/// The way by which a client gets datagrams: through its region, or by requests.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Path {
    Region,
    Requests,
}

const PATHS: [Path; 2] = [Path::Region, Path::Requests];

/// A client with sockets on the ports from 53 on, and a peer that sends to them.
struct Overload {
    fixture: Fixture,
    client: Client,
    path: Path,
    sockets: Vec<Conn>,
    /// Sockets of the peer: the usual priority, and a high one.
    senders: [UdpHandle; 2],
    /// Bytes of the datagrams of each.
    lengths: [usize; 2],
}

impl Overload {
    fn new(
        has_priorities: bool,
        path: Path,
        count: u16,
        channel: ChannelConfig,
        options: UdpOptions,
    ) -> Self {
        let mut fixture = fixture_with(has_priorities, channel);
        let mut client = fixture.client();
        let sockets = (53..53 + count).map(|port| {
            let local = SocketAddr::from(([0, 0, 0, 0], port));
            match path {
                Path::Region => client.udp_open(local, options),
                Path::Requests => client.udp_bind(local, options),
            }
            .unwrap()
        });
        let sockets = sockets.collect();
        let senders = [0, HIGH].map(|priority| {
            let options = UdpOptions { priority, ..UdpOptions::default() };
            fixture
                .peer
                .with(fixture.now, |_, cx| cx.udp_bind("0.0.0.0:0".parse().unwrap(), options).unwrap())
        });
        Self { fixture, client, path, sockets, senders, lengths: [DATAGRAM_BYTES; 2] }
    }

    /// Sends datagrams to the socket of this index, and lets them arrive.
    fn send(&mut self, is_high: bool, socket: u16, count: usize) {
        let (sender, to) = (self.senders[usize::from(is_high)], ([10, 0, 0, 1], 53 + socket).into());
        for _ in 0..count {
            let data = vec![u8::from(is_high); self.lengths[usize::from(is_high)]];
            self.fixture.peer.with(self.fixture.now, |_, cx| cx.udp_send(sender, Some(to), &data)).unwrap();
            self.fixture.run(Duration::from_micros(20));
        }
        self.fixture.run(Duration::from_micros(200));
    }

    /// Takes the next datagram of a socket. Returns whether it is a high one.
    fn take(&mut self, socket: u16) -> Option<bool> {
        let socket = self.sockets[usize::from(socket)];
        let mut bytes = vec![0; 65_536];
        let taken = match self.path {
            Path::Region => self
                .client
                .udp_recv_into(socket, &mut [IoSliceMut::new(&mut bytes)])
                .map(|datagram| (datagram.unwrap().len, bytes[0])),
            Path::Requests => self.client.udp_recv(socket).map(|(datagram, data)| (datagram.len, data[0])),
        };
        let taken = match taken {
            Ok((len, first)) => {
                assert_eq!(len, self.lengths[usize::from(first)]);
                Some(first == 1)
            }
            Err(UdpError::WouldBlock) => None,
            Err(error) => panic!("{error:?}"),
        };
        self.fixture.run(Duration::from_micros(50));
        taken
    }

    /// Takes all datagrams of a socket. Returns how many were low and high.
    fn take_all(&mut self, socket: u16) -> [u64; 2] {
        let mut counts = [0; 2];
        while let Some(is_high) = self.take(socket) {
            counts[usize::from(is_high)] += 1;
        }
        counts
    }

    /// Returns how many datagrams were dropped, and of them how many were counted as low and as high.
    fn dropped(&self) -> (u64, [u64; 2]) {
        let server = self.fixture.server.lock().unwrap();
        let stats = server.stats();
        let all = server.handler().stats().datagrams_dropped;
        (all, [stats.priority0_shed, stats.priority6_shed])
    }
}

/// Checks the counters and what has arrived of `low` and `high` sent datagrams.
fn assert_shed(overload: &Overload, has_priorities: bool, sent: [u64; 2], arrived: [u64; 2]) {
    let (dropped, shed) = overload.dropped();
    assert_eq!(dropped, sent.iter().sum::<u64>() - arrived.iter().sum::<u64>());
    assert!(dropped > 0, "no overload");
    if has_priorities {
        assert_eq!((arrived[1], shed), (sent[1], [dropped, 0]));
    } else {
        assert_eq!(shed, [0, 0]);
        assert!(arrived[1] < sent[1], "{arrived:?} of {sent:?}");
    }
}

/// A client reads one of five low datagrams. Some high ones come in between.
// limit: priority.reserve_percent
#[test]
fn slow_reader_loses_low_datagrams_only() {
    for (path, has_priorities) in PATHS.into_iter().flat_map(|path| [(path, true), (path, false)]) {
        let mut overload =
            Overload::new(has_priorities, path, 1, ChannelConfig::default(), UdpOptions::default());
        let mut arrived = [0; 2];
        for round in 0..400 {
            overload.send(false, 0, 5);
            overload.send(true, 0, usize::from(round % 8 == 7));
            arrived[usize::from(overload.take(0).unwrap())] += 1;
        }
        let rest = overload.take_all(0);
        let arrived = [arrived[0] + rest[0], arrived[1] + rest[1]];
        assert_shed(&overload, has_priorities, [2000, 50], arrived);
        // After the overload nothing is dropped.
        let before = overload.dropped();
        overload.send(false, 0, 30);
        assert_eq!((overload.take_all(0), overload.dropped()), ([30, 0], before), "{path:?}");
    }
}

/// The receive buffer that the program has set is smaller than the queue.
#[test]
fn receive_buffer_full_of_low_datagrams_has_room_for_high() {
    for has_priorities in [true, false] {
        let mut overload =
            Overload::new(has_priorities, Path::Region, 1, ChannelConfig::default(), UdpOptions::default());
        let options = UdpOptions { rcvbuf: Some(50_000), ..UdpOptions::default() };
        overload.client.udp_set_options(overload.sockets[0], options).unwrap();
        overload.send(false, 0, 100);
        overload.send(true, 0, 5);
        let arrived = overload.take_all(0);
        assert_shed(&overload, has_priorities, [100, 5], arrived);
    }
}

/// The buffer in the region has no part for high datagrams: they wait behind it, where they have one.
/// Datagrams that are longer than the buffer wait there, too.
#[test]
fn region_full_of_low_datagrams_of_any_length_loses_no_high() {
    for (low, high) in [(1, 1), (1, 1400), (1400, 1), (300, 6000), (6000, 300), (6000, 6000)] {
        for has_priorities in [true, false] {
            let channel = ChannelConfig { socket_buffer_bytes: 4096, ..ChannelConfig::default() };
            let mut overload = Overload::new(has_priorities, Path::Region, 1, channel, UdpOptions::default());
            overload.lengths = [low, high];
            let mut arrived = [0; 2];
            for _ in 0..3 {
                overload.send(false, 0, 400);
                overload.send(true, 0, 4);
                let taken = overload.take_all(0);
                arrived = [arrived[0] + taken[0], arrived[1] + taken[1]];
            }
            assert_shed(&overload, has_priorities, [1200, 12], arrived);
            // All room was returned.
            let before = overload.dropped();
            overload.send(false, 0, 20);
            overload.send(true, 0, 2);
            assert_eq!((overload.take_all(0), overload.dropped()), ([20, 2], before), "{low} {high}");
        }
    }
}

/// Low datagrams of several sockets use up the bytes of their domain; another socket gets high ones.
// limit: channel.datagram_bytes_max
#[test]
fn low_datagrams_of_a_domain_leave_room_for_another_socket() {
    for (path, has_priorities) in PATHS.into_iter().flat_map(|path| [(path, true), (path, false)]) {
        let channel = ChannelConfig {
            datagram_bytes_max: 65_536,
            socket_buffer_bytes: 4096,
            large_buffers_max: 0,
            ..ChannelConfig::default()
        };
        let mut overload = Overload::new(has_priorities, path, 4, channel, UdpOptions::default());
        (0..3).for_each(|socket| overload.send(false, socket, 120));
        // More than the region holds.
        overload.send(true, 3, 35);
        let mut arrived = [0; 2];
        for socket in 0..4 {
            let counts = overload.take_all(socket);
            arrived = [arrived[0] + counts[0], arrived[1] + counts[1]];
        }
        assert_shed(&overload, has_priorities, [360, 35], arrived);
    }
}
