//! Unordered send with the kernel as the receiver: whole messages in a contiguous stream, those of high
//! priority before queued ones of low priority.

use crate::case::{Case, Family};
use crate::network::{Network, Node};
use crate::suite;
use ginnel::{Conn, ConnectOptions, Context, Error, Handler, SendError, SocketOptions, TcpOption};
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

const PORT: u16 = 7000;
/// Messages of each priority.
const MESSAGES: usize = 400;
const LOW: u8 = 0;
const HIGH: u8 = 6;

/// Returns the message with this number: its length, its priority, its number, and other bytes.
fn message(number: usize, priority: u8) -> Vec<u8> {
    let len = 7 + if priority == HIGH { 50 } else { 1 + number * 37 % 5000 };
    let mut bytes = (len as u16).to_be_bytes().to_vec();
    bytes.push(priority);
    bytes.extend((number as u32).to_be_bytes());
    bytes.extend((7..len).map(|at| (at * 3 + number) as u8));
    bytes
}

/// Queues all messages as fast as the send buffer accepts them: two of low priority for each of high
/// priority.
struct Sender {
    to: SocketAddr,
    /// Numbers of the next message of low and of high priority.
    next: [usize; 2],
    /// True if messages are sent with their own priorities; otherwise all with the low one.
    has_priorities: bool,
}

impl Sender {
    fn push(&mut self, cx: &mut Context<'_>, conn: Conn) {
        while self.next[0] < 2 * MESSAGES || self.next[1] < MESSAGES {
            let is_high = self.next[0] >= 2 * (self.next[1] + 1);
            let number = self.next[usize::from(is_high)];
            let priority = if is_high { HIGH } else { LOW };
            let effective = if self.has_priorities { priority } else { LOW };
            match cx.send_message(conn, &message(number, priority), effective) {
                Ok(()) => self.next[usize::from(is_high)] += 1,
                Err(SendError::Full) => return,
                Err(error) => panic!("{error}"),
            }
        }
        let _ = cx.shutdown_write(conn);
    }
}

impl Handler for Sender {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let socket = SocketOptions { send_buffer_bytes: Some(64 << 10), ..SocketOptions::default() };
        let options = ConnectOptions { socket, ..ConnectOptions::default() };
        cx.connect(self.to, options).map(|_| ())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.push(cx, conn);
        // Segments of other sizes cut messages elsewhere.
        cx.set_option(conn, TcpOption::MaxSegment(1000)).expect("the connection is open");
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.push(cx, conn);
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// Returns the messages of a stream, as (priority, number).
fn parse(mut stream: &[u8]) -> Result<Vec<(u8, usize)>, String> {
    let mut messages = Vec::new();
    while let [high, low, priority, n0, n1, n2, n3, ..] = *stream {
        let len = usize::from(u16::from_be_bytes([high, low]));
        let number = u32::from_be_bytes([n0, n1, n2, n3]) as usize;
        if stream.get(..len) != Some(&message(number, priority)[..]) {
            return Err(format!("message {number} of priority {priority} is not whole"));
        }
        messages.push((priority, number));
        stream = &stream[len..];
    }
    if stream.is_empty() { Ok(messages) } else { Err("the last message is cut off".into()) }
}

fn run(case: &Case, has_priorities: bool) -> Result<(), String> {
    let (network, device) = Network::new(case)?;
    let address = SocketAddr::new(network.kernel, PORT);
    let listener = network.host.run(|| TcpListener::bind(address)).map_err(|e| e.to_string())?;
    let sender = Sender { to: address, next: [0; 2], has_priorities };
    let node = Node::start(case, &network, device, sender)?;
    let (mut stream, _) = listener.accept().map_err(|e| e.to_string())?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(|e| e.to_string())?;
    let mut received = Vec::new();
    // A slow reader, so that windows close.
    let mut buffer = vec![0; 20_000];
    loop {
        std::thread::sleep(Duration::from_micros(300));
        match stream.read(&mut buffer).map_err(|e| e.to_string())? {
            0 => break,
            n => received.extend(&buffer[..n]),
        }
    }
    drop(stream);
    node.stop()?;
    let messages = parse(&received)?;
    for (priority, count) in [(LOW, 2 * MESSAGES), (HIGH, MESSAGES)] {
        let numbers: Vec<usize> = messages.iter().filter(|m| m.0 == priority).map(|m| m.1).collect();
        if !numbers.iter().copied().eq(0..count) {
            return Err(format!("messages of priority {priority}: {numbers:?}"));
        }
    }
    // In the order of the calls, high message n follows 2 (n + 1) low ones.
    let mut low = 0;
    let mut overtaken = 0;
    for (priority, number) in messages {
        if priority == LOW {
            low += 1;
        } else {
            overtaken += (2usize * (number + 1)).saturating_sub(low);
        }
    }
    match (has_priorities, overtaken) {
        (true, 0) => Err("no message of high priority has overtaken others".into()),
        (false, 1..) => Err(format!("{overtaken} messages were overtaken")),
        _ => Ok(()),
    }
}

fn cases(what: &str) -> Vec<Case> {
    let mut cases = Vec::new();
    for family in [Family::V4, Family::V6] {
        for link in ["", "delay=2ms loss=2% duplicate=1% reorder=1%"] {
            let name = format!("{what}, {family:?}, link \"{link}\"");
            cases.push(Case { name, family, link, ..Case::default() });
        }
    }
    cases
}

#[test]
fn kernel_receives_whole_messages_by_priority() {
    let test = "kernel_receives_whole_messages_by_priority";
    suite::check(test, 2, cases("messages with priorities"), |case| run(case, true));
}

#[test]
fn messages_of_one_priority_keep_their_order() {
    let test = "messages_of_one_priority_keep_their_order";
    suite::check(test, 2, cases("messages of one priority"), |case| run(case, false));
}
