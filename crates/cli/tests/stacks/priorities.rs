//! Priorities of unmodified programs, and the socket options of programs that know Ginnel.

use crate::fixture::{Fixture, run_to_end, skipped};
use std::path::Path;
use std::process::Command;

/// Serves 200 connections that have sent five messages each. After the first events a message arrives on
/// another connection. Prints how many messages were answered before that one.
const SERVE: &str = "
import fcntl
def unread(s): return struct.unpack('i', fcntl.ioctl(s, 0x541B, b'1234'))[0]
ep, peers = select.epoll(), {}
def connect(listener, port):
    client = socket.create_connection(('127.0.0.1', port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer, _ = listener.accept()
    peers[peer.fileno()] = peer
    ep.register(peer, select.EPOLLIN)
    return client, peer
low, high = server('127.0.0.1', 8000), server('127.0.0.1', 8001)
lows = [connect(low, 8000) for _ in range(200)]
urgent, urgent_peer = connect(high, 8001)
for _ in range(5):
    for client, _ in lows: client.sendall(b'heartbeat 012345')
while any(unread(peer) < 80 for _, peer in lows): time.sleep(0.01)
answered, place = 0, None
while answered < 1001:
    for fd, _ in ep.poll(-1, 4):
        assert len(peers[fd].recv(16)) == 16
        peers[fd].sendall(b'!')
        if fd == urgent_peer.fileno(): place = answered
        answered += 1
    if answered == 4:
        urgent.sendall(b'request 01234567')
        while unread(urgent_peer) < 16: time.sleep(0.001)
assert exactly(urgent, 1) == b'!' and all(exactly(client, 5) == b'!!!!!' for client, _ in lows)
print(place)
";

#[test]
fn a_program_answers_urgent_messages_first() {
    if skipped("a_program_answers_urgent_messages_first") {
        return;
    }
    let fixture = Fixture::new("urgent-first");
    let place = |is_enabled: bool| -> usize {
        let rules = "[[priority.rules]]\npriority = 6\nprotocol = \"tcp\"\nports = 8001\n";
        let config = format!("[priority]\nenabled = {is_enabled}\n{rules}");
        std::fs::write(fixture.path().join("rules.toml"), config).unwrap();
        let output = fixture.script_output(&["--loopback", "stack", "--config", "rules.toml"], SERVE);
        output.trim().parse().unwrap()
    };
    let (with, without) = (place(true), place(false));
    assert!(with < 10, "{with} of 1,000 messages came before the urgent one");
    assert!(without > 150, "without priorities: {without}");
}

/// Compiles the example of docs/unordered.md, and runs it on a stack and without one.
#[test]
fn the_example_of_unordered_sockets_works() {
    let fixture = Fixture::new("unordered");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/unordered.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let example = docs.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    std::fs::write(fixture.path().join("unordered_example.c"), example).unwrap();
    let program = fixture.compile_c("unordered");
    let output = run_to_end(fixture.ginnel(&["run", "--loopback", "stack", "--", &program]));
    let text = String::from_utf8_lossy(&output.stdout);
    let place: usize = text.trim().parse().unwrap_or_else(|e| panic!("{e}: {output:?}"));
    // What was sent before it fits into the window, 16 KiB or somewhat more.
    assert!((1..200).contains(&place), "{place} of 1,000 messages came before the urgent one");
    let output = run_to_end(Command::new(&program));
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text, "unordered receive: Protocol not available\n", "{output:?}");
}
