// The echo server with a client that sends much before it reads.

use crate::common::SERVER;
use core::time::Duration;
use ginnel::{CloseReason, Conn, ConnectOptions, Context, Datagram, Error, Handler, UdpHandle, UdpOptions};
use ginnel_apps::echo::{Echo, EchoOptions};

const BYTES: usize = 32 << 20;

fn echo(udp: bool, keepalive: bool) -> Echo {
    Echo::new(&EchoOptions { listen: vec!["0.0.0.0:7".parse().unwrap()], udp, keepalive })
}

fn pattern(range: core::ops::Range<usize>) -> Vec<u8> {
    range.map(|i| (i * 31 % 251) as u8).collect()
}

/// Sends until the send buffer stays full, and only then begins to read.
struct Client {
    sent: usize,
    received: usize,
    reads: bool,
    stalled_at: usize,
    reason: Option<CloseReason>,
}

impl Client {
    fn push(&mut self, cx: &mut Context<'_>, conn: Conn) {
        while self.sent < BYTES {
            let piece = pattern(self.sent..BYTES.min(self.sent + 10_000));
            let accepted = cx.send(conn, &piece).unwrap();
            self.sent += accepted;
            if accepted < piece.len() {
                return;
            }
        }
        cx.shutdown_write(conn).unwrap();
    }
}

impl Handler for Client {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.connect(format!("{SERVER}:7").parse().unwrap(), ConnectOptions::default())?;
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.set_token(conn, 1).unwrap();
        self.push(cx, conn);
        // Both directions are full by then.
        cx.set_timer(Duration::from_secs(5), u64::from(conn.index()) << 32 | u64::from(conn.generation()));
    }

    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        self.stalled_at = self.sent;
        self.reads = true;
        cx.resume_reading(Conn::new((token >> 32) as u32, token as u32));
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.push(cx, conn);
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        if !self.reads {
            return 0;
        }
        assert!(data == pattern(self.received..self.received + data.len()), "at {}", self.received);
        self.received += data.len();
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, _: Conn, reason: CloseReason) {
        self.reason = Some(reason);
        cx.stop();
    }
}

fn run(faults: Option<&str>) -> Client {
    let server = echo(true, false);
    let client = Client { sent: 0, received: 0, reads: false, stalled_at: 0, reason: None };
    let mut pair = Pair::new(server, client, faults, &["10.0.0.2/16"]);
    pair.run(Duration::from_secs(3600));
    let done = core::mem::replace(
        pair.client.handler_mut(),
        Client { sent: 0, received: 0, reads: false, stalled_at: 0, reason: None },
    );
    assert_eq!((done.sent, done.received, done.reason), (BYTES, BYTES, Some(CloseReason::Normal)));
    done
}

#[test]
fn back_pressure_loses_no_data() {
    let client = run(None);
    assert!(client.stalled_at < BYTES, "all {} bytes fitted into buffers", client.stalled_at);
}

/// A client that is silent for a while.
struct SilentClient;

impl Handler for SilentClient {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.connect(format!("{SERVER}:7").parse().unwrap(), ConnectOptions::default())?;
        cx.set_timer(Duration::from_secs(5 * 3600), 0);
        Ok(())
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        cx.stop();
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

#[test]
fn idle_connections_are_probed_on_request() {
    // Every two hours by default.
    for (keepalive, expected) in [(true, 2), (false, 0)] {
        let mut pair = Pair::new(echo(false, keepalive), SilentClient, None, &["10.0.0.2/16"]);
        pair.run(Duration::from_secs(6 * 3600));
        let stats = pair.server.with(pair.now, |_, cx| *cx.tcp_stats());
        assert_eq!(stats.keepalive_probes, expected);
    }
}

/// Sends datagrams of many sizes in turn, and expects each of them back.
struct UdpClient {
    socket: Option<UdpHandle>,
    sizes: Vec<usize>,
    answered: usize,
}

impl UdpClient {
    fn ask(&mut self, cx: &mut Context<'_>) {
        let Some(size) = self.sizes.get(self.answered) else { return cx.stop() };
        let server = format!("{SERVER}:7").parse().unwrap();
        cx.udp_send(self.socket.unwrap(), Some(server), &pattern(*size..2 * size)).unwrap();
    }
}

impl Handler for UdpClient {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = cx.udp_bind("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
        self.socket = Some(socket);
        self.ask(cx);
        Ok(())
    }

    fn datagram(&mut self, cx: &mut Context<'_>, _: UdpHandle, datagram: &Datagram, data: &[u8]) {
        let size = self.sizes[self.answered];
        assert_eq!((datagram.len, datagram.from), (size, format!("{SERVER}:7").parse().unwrap()));
        assert!(data == pattern(size..2 * size));
        self.answered += 1;
        self.ask(cx);
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// Sends a request to an address of the server that is not its first, from a connected socket, which accepts
/// datagrams only from that address.
struct UdpRequester {
    answers: usize,
}

impl Handler for UdpRequester {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        for server in ["10.0.0.1:7", "10.0.0.9:7", "10.0.0.8:7"] {
            let socket = cx.udp_bind("0.0.0.0:0".parse().unwrap(), UdpOptions::default()).unwrap();
            cx.udp_connect(socket, server.parse().unwrap()).unwrap();
            cx.udp_send(socket, None, b"anybody?").unwrap();
        }
        Ok(())
    }

    fn datagram(&mut self, cx: &mut Context<'_>, _: UdpHandle, _: &Datagram, data: &[u8]) {
        assert_eq!(data, b"anybody?");
        self.answers += 1;
        if self.answers == 3 {
            cx.stop();
        }
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

#[test]
fn datagrams_are_answered_from_their_destination_address() {
    let server = echo(true, false);
    // The roles are swapped: the client's side of the pair has several addresses.
    let addresses = ["10.0.0.1/16", "10.0.0.9/16", "10.0.0.8/16"];
    let mut pair = Pair::at("10.0.0.2/16", UdpRequester { answers: 0 }, server, None, &addresses);
    for _ in 0..2000 {
        let asker = pair.server.poll_once(pair.now).unwrap();
        pair.client.poll_once(pair.now).unwrap();
        if asker.stopped {
            return;
        }
        pair.now += Duration::from_millis(1);
    }
    panic!("{} answers", pair.server.handler().answers);
}

#[test]
fn datagrams_of_all_sizes_are_echoed() {
    // In one frame, in fragments, and the largest datagram.
    let sizes = vec![0, 1, 100, 1472, 1473, 4000, 65_507];
    let server = echo(true, false);
    let client = UdpClient { socket: None, sizes, answered: 0 };
    let mut pair = Pair::new(server, client, None, &["10.0.0.2/16"]);
    pair.run(Duration::from_secs(60));
    assert_eq!(pair.client.handler().answered, 7);
    assert_eq!(pair.server.handler().datagrams_dropped(), 0);
}

#[test]
fn everything_is_echoed_over_a_faulty_link() {
    run(Some("delay=1ms loss=1% reorder=1%"));
}
