//! The events of a handler, and their order: two shards in simulated time.

use crate::placement_suite::pair::ShardPair;
use core::time::Duration;
use ginnel::{
    CloseReason, Conn, ConnectOptions, Context, Datagram, Error, Handler, Instant, ListenOptions, Listener,
    SocketOptions, UdpError, UdpHandle, UdpOptions,
};

const SECOND: Duration = Duration::from_secs(1);

/// One line for each event.
#[derive(Default)]
struct Log(Vec<String>);

impl Log {
    fn add(&mut self, text: impl Into<String>) {
        self.0.push(text.into());
    }

    fn count(&self, text: &str) -> usize {
        self.0.iter().filter(|line| line.starts_with(text)).count()
    }
}

/// A server that consumes at most `appetite` bytes per call and echoes them.
struct Server {
    log: Log,
    appetite: usize,
    received: Vec<u8>,
    conn: Option<Conn>,
    listener: Option<Listener>,
    keep_open: bool,
}

impl Server {
    fn new(appetite: usize) -> Self {
        Self {
            log: Log::default(),
            appetite,
            received: Vec::new(),
            conn: None,
            listener: None,
            keep_open: false,
        }
    }
}

impl Handler for Server {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.listener = Some(cx.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default())?);
        Ok(())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, listener: Listener) {
        assert_eq!(Some(listener), self.listener);
        cx.set_token(conn, 77).unwrap();
        self.conn = Some(conn);
        self.log.add("accepted");
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        assert!(!data.is_empty());
        let n = data.len().min(self.appetite);
        let sent = cx.send(conn, &data[..n]).unwrap();
        self.received.extend(&data[..sent]);
        self.log.add(format!("data {}", data.len()));
        sent
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.resume_reading(conn);
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.log.add(format!("peer closed after {}", self.received.len()));
        if !self.keep_open {
            cx.close(conn).unwrap();
        }
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        assert_eq!(cx.token(conn), Ok(77));
        self.log.add(format!("closed {reason:?}"));
    }
}

/// A client that sends a message, shuts down its side, and collects the response.
struct Client {
    log: Log,
    to_send: Vec<u8>,
    sent: usize,
    received: Vec<u8>,
    acked: u64,
    conn: Option<Conn>,
    port: u16,
    finish: bool,
}

impl Client {
    fn new(bytes: usize) -> Self {
        let to_send = (0..bytes).map(|i| (i / 7) as u8).collect();
        Self {
            log: Log::default(),
            to_send,
            sent: 0,
            received: Vec::new(),
            acked: 0,
            conn: None,
            port: 80,
            finish: true,
        }
    }

    fn push(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.sent += cx.send(conn, &self.to_send[self.sent..]).unwrap();
        if self.sent == self.to_send.len() && self.finish {
            cx.shutdown_write(conn).unwrap();
            self.finish = false;
        }
    }
}

impl Handler for Client {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let options = ConnectOptions {
            socket: SocketOptions { ack_events: true, ..SocketOptions::default() },
            ..ConnectOptions::default()
        };
        self.conn = Some(cx.connect(format!("10.0.0.1:{}", self.port).parse().unwrap(), options)?);
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        assert_eq!(self.conn, Some(conn));
        self.log.add("connected");
        self.push(cx, conn);
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        self.received.extend(data);
        data.len()
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.push(cx, conn);
    }

    fn acked(&mut self, _: &mut Context<'_>, _: Conn, bytes: u32) {
        self.acked += u64::from(bytes);
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, reason: CloseReason) {
        self.log.add(format!("closed {reason:?}"));
    }
}

#[test]
fn echo_is_complete_and_each_end_reported_once() {
    let mut pair = ShardPair::new(Server::new(usize::MAX), Client::new(300_000));
    let done = pair.run_until(10 * SECOND, |s, c| s.log.count("closed") + c.log.count("closed") == 2);
    let (server, client) = (pair.server.handler(), pair.client.handler());
    assert!(done, "{:?} {:?}", server.log.0, client.log.0);
    assert_eq!(client.received, client.to_send);
    assert_eq!(client.acked, 300_000);
    assert_eq!((client.log.count("connected"), client.log.count("closed Normal")), (1, 1));
    assert_eq!((server.log.count("accepted"), server.log.count("closed Normal")), (1, 1));
    assert_eq!(server.log.count("peer closed after 300000"), 1);
}

#[test]
fn end_of_stream_follows_unread_data() {
    let mut pair = ShardPair::new(Server::new(700), Client::new(50_000));
    pair.run_until(SECOND, |_, _| false);
    let mut resumed = 0;
    while pair.server.handler().received.len() < 50_000 {
        assert_eq!(pair.server.handler().log.count("peer closed"), 0);
        let conn = pair.server.handler().conn.unwrap();
        pair.server.with(pair.now, |_, cx| cx.resume_reading(conn));
        pair.run_until(SECOND, |_, _| false);
        resumed += 1;
    }
    assert!(resumed > 10, "little was left unread");
    assert!(pair.run_until(10 * SECOND, |_, c| c.log.count("closed") == 1));
    assert_eq!(pair.server.handler().log.count("peer closed after 50000"), 1);
    assert_eq!(pair.client.handler().received, pair.client.handler().to_send);
}

/// Consumes complete messages only.
#[derive(Default)]
struct MessageServer {
    messages: usize,
}

impl MessageServer {
    const BYTES: usize = 700;
}

impl Handler for MessageServer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        let messages = data.len() / Self::BYTES;
        self.messages += messages;
        messages * Self::BYTES
    }
}

/// Messages begin and end anywhere in the memory of the receive buffer.
#[test]
fn kept_bytes_are_delivered_with_those_after_them() {
    let client = Client::new(1000 * MessageServer::BYTES);
    let mut pair = ShardPair::new(MessageServer::default(), client);
    assert!(
        pair.run_until(10 * SECOND, |server, _| server.messages == 1000),
        "{} messages",
        pair.server.handler().messages
    );
}

/// Takes one message in each call, once it has begun.
#[derive(Default)]
struct MessageByMessage {
    has_begun: bool,
    conn: Option<Conn>,
    messages: usize,
    /// Length of the longest call since it has begun.
    longest: usize,
}

impl Handler for MessageByMessage {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn read_bytes_max(&self) -> usize {
        3 * MessageServer::BYTES
    }

    fn data(&mut self, _: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        self.conn = Some(conn);
        if !self.has_begun || data.len() < MessageServer::BYTES {
            return 0;
        }
        self.longest = self.longest.max(data.len());
        self.messages += 1;
        MessageServer::BYTES
    }
}

/// Kept bytes are not all copied again for each message among them.
#[test]
fn calls_have_as_many_kept_bytes_as_asked_for() {
    let mut pair = ShardPair::new(MessageByMessage::default(), Client::new(60 * MessageServer::BYTES));
    pair.run_until(SECOND, |_, _| false);
    let conn = pair.server.handler().conn.unwrap();
    pair.server.with(pair.now, |server, cx| {
        server.has_begun = true;
        cx.resume_reading(conn);
    });
    // While there are bytes that a call did not have, the next call follows in the next turn.
    assert!(pair.run_until(SECOND, |server, _| server.messages >= 58), "{}", pair.server.handler().messages);
    assert_eq!(pair.server.handler().longest, 3 * MessageServer::BYTES);
}

#[test]
fn handler_that_reads_nothing_stops_the_peer() {
    let mut pair = ShardPair::with(Server::new(0), Client::new(10 << 20), |config| {
        config.tcp.recv_buffer_bytes = 64 << 10;
        config.tcp.send_buffer_bytes = 64 << 10;
    });
    pair.run_until(30 * SECOND, |_, _| false);
    let sent = pair.client.handler().sent;
    assert!((64 << 10..=400 << 10).contains(&sent), "{sent} bytes were sent");
    pair.server.handler_mut().appetite = usize::MAX;
    let conn = pair.server.handler().conn.unwrap();
    pair.server.with(pair.now, |_, cx| cx.resume_reading(conn));
    assert!(pair.run_until(600 * SECOND, |_, c| c.log.count("closed") == 1));
    assert_eq!(pair.client.handler().received, pair.client.handler().to_send);
}

/// Leaves data unread until it is told to answer; then it closes within the call that delivers the data
/// again.
#[derive(Default)]
struct BriefHandler {
    answers: bool,
    conn: Option<Conn>,
    ends: Vec<CloseReason>,
}

impl Handler for BriefHandler {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default())?;
        Ok(())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        self.conn = Some(conn);
        if !self.answers {
            return 0;
        }
        assert_eq!(cx.send(conn, b"enough"), Ok(6));
        cx.close(conn).unwrap();
        data.len()
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, reason: CloseReason) {
        self.ends.push(reason);
    }
}

#[test]
fn data_shown_when_closing_counts_as_read() {
    let mut client = Client::new(1000);
    client.finish = false;
    let mut pair = ShardPair::new(BriefHandler::default(), client);
    assert!(pair.run_until(SECOND, |server, _| server.conn.is_some()));
    pair.run_until(SECOND, |_, _| false);
    let conn = pair.server.handler().conn.unwrap();
    pair.server.with(pair.now, |server, cx| {
        server.answers = true;
        cx.resume_reading(conn);
    });
    assert!(pair.run_until(SECOND, |server, client| client.log.count("closed") + server.ends.len() == 2));
    assert_eq!(pair.client.handler().received, b"enough");
    assert_eq!(pair.client.handler().log.0, ["connected", "closed Normal"]);
    assert_eq!(pair.server.handler().ends, [CloseReason::Normal]);
}

#[test]
fn refused_connection_is_closed_never_connected() {
    let mut client = Client::new(1);
    client.port = 81;
    let mut pair = ShardPair::new(Server::new(0), client);
    assert!(pair.run_until(10 * SECOND, |_, c| c.log.count("closed") == 1));
    assert_eq!(pair.client.handler().log.0, ["closed Refused"]);
}

#[test]
fn abort_is_a_reset_for_the_peer() {
    let mut client = Client::new(10);
    client.finish = false;
    let mut pair = ShardPair::new(Server::new(usize::MAX), client);
    assert!(pair.run_until(10 * SECOND, |_, c| c.received.len() == 10));
    let conn = pair.client.handler().conn.unwrap();
    pair.client.with(pair.now, |_, cx| cx.abort(conn)).unwrap();
    assert!(pair.run_until(10 * SECOND, |s, c| s.log.count("closed") + c.log.count("closed") == 2));
    assert_eq!(pair.client.handler().log.count("closed Aborted"), 1);
    assert_eq!(pair.server.handler().log.count("closed Reset"), 1);
    let stale = pair.client.with(pair.now, |_, cx| cx.send(conn, b"x"));
    assert_eq!(stale, Err(ginnel::SendError::Stale));
}

#[test]
fn urgent_byte_is_outside_of_the_stream() {
    let mut client = Client::new(3);
    client.finish = false;
    let mut pair = ShardPair::new(Server::new(usize::MAX), client);
    assert!(pair.run_until(10 * SECOND, |_, c| c.received.len() == 3));
    let conn = pair.client.handler().conn.unwrap();
    pair.client.with(pair.now, |_, cx| {
        cx.send_urgent(conn, b"xyz!").unwrap();
        cx.shutdown_write(conn).unwrap();
    });
    assert!(
        pair.run_until(10 * SECOND, |s, _| s.log.count("closed") == 1),
        "{:?}",
        pair.server.handler().log.0
    );
    assert!(pair.server.handler().received.ends_with(b"xyz"), "{:?}", pair.server.handler().received);
    assert_eq!(pair.server.handler().log.count("closed Normal"), 1, "{:?}", pair.server.handler().log.0);
}

#[test]
fn response_leaves_with_the_acknowledgement() {
    let mut client = Client::new(10);
    client.finish = false;
    let mut pair = ShardPair::new(Server::new(usize::MAX), client);
    assert!(pair.run_until(10 * SECOND, |_, c| c.received.len() == 10));
    // SYN+ACK and one segment with the echo; ARP may add two.
    let before = pair.client.stack_stats().frames_received;
    let conn = pair.client.handler().conn.unwrap();
    pair.client.with(pair.now, |_, cx| cx.send(conn, b"0123456789")).unwrap();
    assert!(pair.run_until(10 * SECOND, |_, c| c.received.len() == 20));
    assert_eq!(pair.client.stack_stats().frames_received - before, 1);
}

#[derive(Default)]
struct Ticker {
    fired: Vec<(u64, Instant)>,
    commands: Vec<u32>,
}

impl Handler for Ticker {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.set_timer(Duration::from_millis(30), 30).unwrap();
        cx.set_timer(Duration::from_millis(10), 10).unwrap();
        let cancelled = cx.set_timer(Duration::from_millis(20), 20).unwrap();
        assert!(cx.cancel_timer(cancelled));
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn timer(&mut self, cx: &mut Context<'_>, token: u64) {
        self.fired.push((token, cx.now()));
    }

    fn command(&mut self, _: &mut Context<'_>, command: ginnel::Command) {
        self.commands.push(*command.downcast::<u32>().unwrap());
    }
}

#[test]
fn timers_expire_in_order_unless_cancelled() {
    let mut pair = ShardPair::new(Server::new(0), Ticker::default());
    pair.run_until(SECOND, |_, c| c.fired.len() == 3);
    let start = Instant::from_millis(1000);
    let fired: Vec<(u64, u64)> = pair
        .client
        .handler()
        .fired
        .iter()
        .map(|(token, at)| (*token, (*at - start).as_micros() as u64 / 1000))
        .collect();
    assert_eq!(fired, [(10, 10), (30, 30)]);
}

#[test]
fn commands_of_other_threads_arrive_in_order() {
    let mut pair = ShardPair::new(Server::new(0), Ticker::default());
    let commander = pair.client.commander();
    std::thread::spawn(move || {
        for i in 0..100u32 {
            commander.send(Box::new(i)).unwrap();
        }
    })
    .join()
    .unwrap();
    assert!(pair.run_until(SECOND, |_, c| c.commands.len() == 100));
    assert!(pair.client.handler().commands.iter().copied().eq(0..100));
}

/// Opens a connection whenever one has ended, and aborts it at once.
#[derive(Default)]
struct ReconnectingHandler {
    ended: u64,
    ticks: u64,
}

impl ReconnectingHandler {
    fn reconnect(cx: &mut Context<'_>) {
        let conn = cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).unwrap();
        cx.abort(conn).unwrap();
    }
}

impl Handler for ReconnectingHandler {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        Self::reconnect(cx);
        cx.set_timer(Duration::from_millis(1), 0);
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, _: Conn, _: CloseReason) {
        self.ended += 1;
        Self::reconnect(cx);
    }

    fn timer(&mut self, _: &mut Context<'_>, _: u64) {
        self.ticks += 1;
    }
}

#[test]
fn endless_connects_do_not_block_the_shard() {
    let mut pair = ShardPair::new(Ticker::default(), ReconnectingHandler::default());
    pair.discard_transcript();
    assert!(pair.run_until(10 * SECOND, |_, c| c.ticks == 1), "its timer must expire");
    let before = pair.client.handler().ended;
    pair.client.poll_once(pair.now).unwrap();
    pair.client.poll_once(pair.now).unwrap();
    assert!((1..20_000).contains(&(pair.client.handler().ended - before)));
}

#[test]
fn handler_starts_when_ipv6_address_is_usable() {
    struct Listens(Option<Instant>);
    impl Handler for Listens {
        fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
            self.0 = Some(cx.now());
            cx.listen("[fd00::1]:80".parse().unwrap(), ListenOptions::default()).map(|_| ())
        }

        fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
            data.len()
        }
    }
    let pair = || {
        ShardPair::with(Listens(None), Ticker::default(), |config| {
            let last =
                config.links[0].addresses[0].to_string().replace("10.0.0.", "fd00::").replace("/24", "/64");
            config.links[0].addresses.push(last.parse().unwrap());
            // Otherwise its timers end the sleep, too.
            config.network.router_solicitations = 0;
        })
    };
    let waited =
        |pair: &ShardPair<Listens, Ticker>| pair.server.handler().0.unwrap() - Instant::from_millis(1000);
    let mut both = pair();
    assert!(both.run_until(10 * SECOND, |s, _| s.0.is_some()));
    assert!(waited(&both) >= SECOND, "{:?}", waited(&both));
    // RFC 4862 §5.4.2: a random delay of up to a second, then a second for an answer. Nothing else wakes the
    // shard then.
    let mut alone = pair();
    while alone.server.handler().0.is_none() {
        let turn = alone.server.poll_once(alone.now).unwrap();
        if turn.work == 0 {
            alone.now = turn.next_deadline.expect("the shard would sleep forever").max(alone.now);
        }
    }
    assert!((SECOND..=2 * SECOND).contains(&waited(&alone)), "{:?}", waited(&alone));
}

/// Sends a datagram to port 7, which echoes it, and one to port 8, which is closed.
#[derive(Default)]
struct DatagramEcho {
    serve: bool,
    sockets: Vec<UdpHandle>,
    received: Vec<Vec<u8>>,
    errors: Vec<(usize, UdpError)>,
}

impl Handler for DatagramEcho {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let local = if self.serve { "0.0.0.0:7" } else { "0.0.0.0:0" };
        for port in if self.serve { 7..8 } else { 7..9 } {
            let socket = cx.udp_bind(local.parse().unwrap(), UdpOptions::default()).unwrap();
            if !self.serve {
                cx.udp_connect(socket, format!("10.0.0.1:{port}").parse().unwrap()).unwrap();
                cx.udp_send(socket, None, &[port as u8; 5000]).unwrap();
            }
            self.sockets.push(socket);
        }
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn datagram(&mut self, cx: &mut Context<'_>, socket: UdpHandle, datagram: &Datagram, data: &[u8]) {
        assert_eq!(datagram.len, data.len());
        if self.serve {
            cx.udp_send(socket, Some(datagram.from), data).unwrap();
        }
        self.received.push(data.to_vec());
    }

    fn datagram_error(&mut self, _: &mut Context<'_>, socket: UdpHandle, error: UdpError) {
        self.errors.push((self.sockets.iter().position(|s| *s == socket).unwrap(), error));
    }
}

#[test]
fn datagrams_echo_and_closed_port_is_an_error() {
    let mut pair =
        ShardPair::new(DatagramEcho { serve: true, ..DatagramEcho::default() }, DatagramEcho::default());
    assert!(pair.run_until(10 * SECOND, |_, c| c.received.len() + c.errors.len() == 2));
    let client = pair.client.handler();
    assert_eq!(client.received, [vec![7; 5000]]);
    assert_eq!(client.errors, [(1, UdpError::ConnectionRefused)]);
}
