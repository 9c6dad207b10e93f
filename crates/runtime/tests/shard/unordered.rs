//! Unordered receive and unordered send of handlers and of tasks.

use crate::placement_suite::pair::ShardPair;
use core::time::Duration;
use ginnel::net::{TcpListener, TcpStream};
use ginnel::{
    Conn, ConnectOptions, Context, Error, Executor, Handler, ListenOptions, SocketOptions, StreamPosition,
    TcpOption, UnorderedBytes,
};
use std::io;

const SECOND: Duration = Duration::from_secs(1);
const HIGH: u8 = 6;
const MESSAGES: usize = 200;
const MESSAGE_BYTES: usize = 300;

fn byte_at(offset: u64) -> u8 {
    (offset * 7 % 251) as u8
}

/// Sends a message each millisecond, every second one with a high priority.
#[derive(Default)]
struct Client {
    conn: Option<Conn>,
    sent: usize,
    /// The messages have their priorities, instead of the connection.
    as_messages: bool,
}

impl Handler for Client {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
        let options = ConnectOptions { socket, ..ConnectOptions::default() };
        cx.connect("10.0.0.1:80".parse().unwrap(), options).map(|_| ())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.conn = Some(conn);
        cx.set_timer(Duration::from_millis(1), 0).unwrap();
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        let conn = self.conn.unwrap();
        let start = (self.sent * MESSAGE_BYTES) as u64;
        let message: Vec<u8> = (start..start + MESSAGE_BYTES as u64).map(byte_at).collect();
        let priority = if self.sent % 2 == 1 { HIGH } else { 0 };
        if self.as_messages {
            assert_eq!(cx.send_message(conn, &message, priority), Ok(()));
        } else {
            cx.set_priority(conn, priority).unwrap();
            assert_eq!(cx.send(conn, &message), Ok(MESSAGE_BYTES));
        }
        self.sent += 1;
        if self.sent == MESSAGES {
            return cx.shutdown_write(conn).unwrap();
        }
        cx.set_timer(Duration::from_millis(1), 0).unwrap();
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// Counts how often each byte is received.
struct Counts {
    seen: Vec<u8>,
    early: usize,
}

impl Counts {
    fn new() -> Self {
        Self { seen: vec![0; MESSAGES * MESSAGE_BYTES], early: 0 }
    }

    fn add(&mut self, offset: u64, data: &[u8], is_early: bool) {
        for (at, &byte) in (offset..).zip(data) {
            assert_eq!(byte, byte_at(at), "{at}");
            self.seen[at as usize] += 1;
        }
        self.early += usize::from(is_early);
    }

    fn check(&self, expects_early: bool) {
        assert!(self.seen.iter().all(|&count| count == 1));
        assert_eq!(self.early > 0, expects_early, "{} pieces were early", self.early);
    }
}

struct Server {
    unordered: bool,
    /// Bytes that a call of `data` consumes at most.
    appetite: usize,
    position: StreamPosition,
    counts: Counts,
    has_ended: bool,
}

impl Handler for Server {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { unordered: self.unordered, ..SocketOptions::default() };
        let options = ListenOptions { socket, ..ListenOptions::default() };
        cx.listen("0.0.0.0:80".parse().unwrap(), options).map(|_| ())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let consumed = data.len().min(self.appetite);
        self.counts.add(self.position.on_data(consumed), &data[..consumed], false);
        if consumed < data.len() {
            cx.resume_reading(conn);
        }
        consumed
    }

    fn unordered(&mut self, _: &mut Context<'_>, _: Conn, bytes: UnorderedBytes, data: &[u8]) {
        assert_eq!(bytes.len, data.len());
        self.counts.add(self.position.on_unordered(bytes), data, true);
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.has_ended = true;
        cx.close(conn).unwrap();
    }
}

#[test]
fn handler_receives_each_byte_once_with_its_offset() {
    for (unordered, appetite) in [(true, usize::MAX), (true, 113), (false, usize::MAX)] {
        let server = Server {
            unordered,
            appetite,
            position: StreamPosition::new(),
            counts: Counts::new(),
            has_ended: false,
        };
        let mut pair = ShardPair::with_losses(server, Client::default(), |_| ());
        assert!(pair.run_until(60 * SECOND, |server, _| server.has_ended));
        pair.server.handler().counts.check(unordered);
    }
}

/// The frames of a message carry its priority to the receiver.
#[test]
fn frames_carry_the_priority_of_their_message() {
    let server = Server {
        unordered: true,
        appetite: usize::MAX,
        position: StreamPosition::new(),
        counts: Counts::new(),
        has_ended: false,
    };
    let client = Client { as_messages: true, ..Client::default() };
    let mut pair = ShardPair::with_losses(server, client, |_| ());
    assert!(pair.run_until(60 * SECOND, |server, _| server.has_ended));
    pair.server.handler().counts.check(true);
}

async fn serve(unordered: bool, buffer_bytes: usize) -> io::Result<()> {
    let listener = TcpListener::bind("10.0.0.1:80").await?;
    let (stream, _) = listener.accept().await?;
    stream.set_unordered(unordered)?;
    let (mut position, mut counts, mut buffer) =
        (StreamPosition::new(), Counts::new(), vec![0; buffer_bytes]);
    loop {
        let received = stream.recv_unordered(&mut position, &mut buffer).await?;
        if received.len == 0 {
            break;
        }
        counts.add(received.offset, &buffer[..received.len], received.is_early);
    }
    counts.check(unordered);
    Ok(())
}

async fn send_messages() -> io::Result<()> {
    let mut stream = TcpStream::connect("10.0.0.1:80").await?;
    stream.set_nodelay(true)?;
    for number in 0..MESSAGES {
        stream.set_priority(if number % 2 == 1 { HIGH } else { 0 })?;
        let start = (number * MESSAGE_BYTES) as u64;
        let message: Vec<u8> = (start..start + MESSAGE_BYTES as u64).map(byte_at).collect();
        stream.write_all(&message).await?;
        ginnel::time::sleep(Duration::from_millis(1)).await;
    }
    stream.shutdown().await?;
    assert_eq!(stream.read(&mut [0]).await?, 0);
    Ok(())
}

#[test]
fn task_receives_each_byte_once_with_its_offset() {
    for (unordered, buffer_bytes) in [(true, 4096), (true, 77), (false, 4096)] {
        let server = Executor::new(move || serve(unordered, buffer_bytes));
        let mut pair = ShardPair::with_losses(server, Executor::new(send_messages), |_| ());
        pair.run(60 * SECOND);
    }
}

/// Queues messages of 1,000 bytes of low priority, and then one of high priority.
struct Sender {
    as_messages: bool,
}

impl Handler for Sender {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).map(|_| ())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        for (bytes, priority) in [(b'1', 0), (b'2', 0), (b'3', 1), (b'4', HIGH), (b'5', 7)] {
            let message = [bytes; 1000];
            if self.as_messages {
                assert_eq!(cx.send_message(conn, &message, priority), Ok(()));
            } else {
                assert_eq!(cx.send(conn, &message), Ok(1000));
            }
        }
        let endless = vec![0; 64 << 20];
        assert_eq!(cx.send_message(conn, &endless, 0), Err(ginnel::SendError::TooLong));
        cx.shutdown_write(conn).unwrap();
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// Collects what arrives.
#[derive(Default)]
struct Collector {
    received: Vec<u8>,
    has_ended: bool,
}

impl Handler for Collector {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("0.0.0.0:80".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        self.received.extend(data);
        data.len()
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.has_ended = true;
        cx.close(conn).unwrap();
    }
}

/// Returns the first byte of each message.
fn order(received: &[u8]) -> String {
    assert!(received.chunks(1000).all(|message| message.iter().all(|&byte| byte == message[0])));
    received.chunks(1000).map(|message| char::from(message[0])).collect()
}

#[test]
fn messages_of_handlers_leave_by_priority() {
    for (as_messages, expected) in [(true, "54123"), (false, "12345")] {
        let sender = Sender { as_messages };
        let mut pair = ShardPair::without_transcript(Collector::default(), sender, |_| ());
        assert!(pair.run_until(60 * SECOND, |server, _| server.has_ended));
        assert_eq!(order(&pair.server.handler().received), expected, "{as_messages}");
    }
}

#[test]
fn messages_of_tasks_wait_for_room_and_leave_by_priority() {
    let client = async || {
        let stream = TcpStream::connect("10.0.0.1:80").await?;
        stream.set_option(TcpOption::SendBuffer(5000))?;
        for (bytes, priority) in [(b'1', 0), (b'2', 0), (b'3', 1), (b'4', HIGH), (b'5', 7), (b'6', 0)] {
            stream.send_message(&[bytes; 1000], priority).await?;
        }
        let error = stream.send_message(&[0; 5001], 0).await.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
        io::Result::Ok(())
    };
    let mut pair = ShardPair::without_transcript(Collector::default(), Executor::new(client), |_| ());
    assert!(pair.run_until(60 * SECOND, |server, _| server.has_ended));
    assert_eq!(order(&pair.server.handler().received), "541236");
}
