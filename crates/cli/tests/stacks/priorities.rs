//! Priorities of unmodified programs, and the socket options of programs that know Ginnel.

use crate::fixture::{Fixture, run_to_end, skipped};
use serde_json::Value;
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

/// Returns how many messages of [`SERVE`] were answered before the urgent one.
fn place_of_urgent(fixture: &Fixture, options: &[&str]) -> usize {
    let options = [&["--loopback", "stack"], options].concat();
    fixture.script_output(&options, SERVE).trim().parse().unwrap()
}

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
        place_of_urgent(&fixture, &["--config", "rules.toml"])
    };
    let (with, without) = (place(true), place(false));
    assert!(with < 10, "{with} of 1,000 messages came before the urgent one");
    assert!(without > 150, "without priorities: {without}");
}

/// Expressions about the first byte of the payload, whose offset is computed: the one of a request, and one
/// with which no message begins.
const REQUEST: &str = "tcp[(tcp[12] & 0xf0) >> 2] = 0x72";
const NO_MESSAGE: &str = "tcp[(tcp[12] & 0xf0) >> 2] = 0x7a";

/// Returns true, and prints a note, if expressions cannot be compiled here.
fn skipped_without_libpcap(fixture: &Fixture, test: &str) -> bool {
    let output = fixture.run(&["run", "--loopback", "stack", "--priority-rule", "6 tcp", "--", "true"]);
    let text = String::from_utf8_lossy(&output.stderr);
    let is_missing = text.contains("apt-get install libpcap0.8");
    if is_missing {
        ginnel_testkit::skip(test, &text);
    }
    is_missing
}

/// The option of `ginnel run` and the key of the configuration that it stands for.
#[test]
fn messages_that_match_an_expression_are_answered_first() {
    let test = "messages_that_match_an_expression_are_answered_first";
    let fixture = Fixture::new("expression");
    if skipped(test) || skipped_without_libpcap(&fixture, test) {
        return;
    }
    for (expression, is_first) in [(REQUEST, true), (NO_MESSAGE, false)] {
        let rule = format!("[[priority.rules]]\npriority = 6\nexpression = \"{expression}\"\n");
        std::fs::write(fixture.path().join("rules.toml"), rule).unwrap();
        let option = format!("6 {expression}");
        for options in [["--priority-rule", &option], ["--config", "rules.toml"]] {
            let place = place_of_urgent(&fixture, &options);
            let is_expected = if is_first { place < 10 } else { place > 150 };
            assert!(is_expected, "{options:?}: {place} of 1,000 messages came before the request");
        }
    }
}

/// Sends 20 requests and 30 other messages, one at a time.
const SEND: &str = "
listener = server('127.0.0.1', 8000)
client = socket.create_connection(('127.0.0.1', 8000))
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
peer, _ = listener.accept()
for message in [b'request'] * 20 + [b'usual'] * 30:
    client.sendall(message)
    assert exactly(peer, len(message)) == message
";

/// Returns how many frames of the usual priority and of priority 6 a stack has received.
fn frames_by_priority(fixture: &Fixture, name: &str) -> [u64; 2] {
    let text = fixture.run_ok(&["stat", name, "--json", "--since-start"]);
    let report: Value = serde_json::from_str(&text).unwrap();
    ["shard.priority0_frames", "shard.priority6_frames"].map(|counter| {
        report["shards"][0]["counters"][counter].as_u64().unwrap_or_else(|| panic!("{counter}: {text}"))
    })
}

#[test]
fn frames_that_match_an_expression_count_as_urgent() {
    let test = "frames_that_match_an_expression_count_as_urgent";
    let fixture = Fixture::new("count-urgent");
    if skipped(test) || skipped_without_libpcap(&fixture, test) {
        return;
    }
    for (name, expression) in [("match", REQUEST), ("other", NO_MESSAGE)] {
        let rule = format!("6 {expression}");
        let _up = fixture.start_stack(name, &["--loopback", "stack", "--priority-rule", &rule]);
        fixture.script_output(&["--stack", name], SEND);
        // The handshake, the other messages, and acknowledgements have the usual priority. A few frames may
        // be sent twice if the machine is busy.
        let [usual, urgent] = frames_by_priority(&fixture, name);
        let expected = if name == "match" { (30, 20..30) } else { (50, 0..1) };
        assert!(usual > expected.0 && expected.1.contains(&urgent), "{name}: {usual} and {urgent} frames");
    }
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
