//! memcached with its four threads, each with an event loop of its own.

use crate::{distinct_bytes, fixture};
use ginnel_testkit::interop::ProgramFixture;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

fn connect(fixture: &ProgramFixture) -> BufReader<TcpStream> {
    BufReader::new(fixture.connect("10.9.0.2:11211").unwrap())
}

fn line(stream: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    line
}

fn set(stream: &mut BufReader<TcpStream>, key: &str, value: &[u8]) {
    let mut message = format!("set {key} 0 0 {}\r\n", value.len()).into_bytes();
    message.extend([value, b"\r\n"].concat());
    stream.get_mut().write_all(&message).unwrap();
    assert_eq!(line(stream), "STORED\r\n");
}

/// Reads the response to `get`, which must have the expected value.
fn value(stream: &mut BufReader<TcpStream>, key: &str, expected: &[u8]) {
    assert_eq!(line(stream), format!("VALUE {key} 0 {}\r\n", expected.len()));
    let mut got = vec![0; expected.len()];
    stream.read_exact(&mut got).unwrap();
    assert!(got == expected, "{key}: other bytes");
    assert_eq!((line(stream), line(stream)), ("\r\n".into(), "END\r\n".into()));
}

/// A `get` over UDP, whose response takes several datagrams.
const GET_OVER_UDP: &str = "
import socket, sys
s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(20)
for number in range(3):
    s.sendto(bytes([0, number, 0, 0, 0, 1, 0, 0]) + b'get k\\r\\n', ('10.9.0.2', 11211))
    parts = [s.recv(2000) for _ in range(4)]
    assert all(part[:2] == bytes([0, number]) for part in parts), parts
    parts.sort(key=lambda part: part[3])
    print(b''.join(part[8:] for part in parts) == b'VALUE k 0 5000\\r\\n' + b'x' * 5000 + b'\\r\\nEND\\r\\n')";

#[test]
fn memcached_answers_datagrams() {
    let Some(fixture) = fixture("memcached_answers_datagrams", &["memcached", "python3"]) else { return };
    let mut memcached = fixture.start_on_stack(&["memcached", "-u", "root", "-l", "10.9.0.2", "-U", "11211"]);
    memcached.wait_until_listening("10.9.0.2:11211");
    set(&mut connect(&fixture), "k", &[b'x'; 5000]);
    assert_eq!(fixture.client_text("python3", &["-c", GET_OVER_UDP]), "True\n".repeat(3));
    assert_eq!(memcached.stop(), 0, "{}", memcached.read_stderr());
}

#[test]
fn memcached_serves_many_with_several_threads() {
    let Some(fixture) = fixture("memcached_serves_many_with_several_threads", &["memcached"]) else { return };
    let mut memcached =
        fixture.start_on_stack(&["memcached", "-u", "root", "-l", "10.9.0.2,127.0.0.1", "-I", "8m"]);
    memcached.wait_until_listening("10.9.0.2:11211");
    memcached.wait_until_listening("127.0.0.1:11211");
    let large = distinct_bytes(5_000_000);
    let mut one = connect(&fixture);
    set(&mut one, "large", &large);

    std::thread::scope(|scope| {
        for number in 0..20 {
            let (fixture, large) = (&fixture, &large);
            // The sockets are opened here, inside the namespace.
            let mut stream = connect(fixture);
            scope.spawn(move || {
                for round in 0..20 {
                    let (key, small) = (format!("k{number}"), &large[number..number + 100 * round]);
                    set(&mut stream, &key, small);
                    write!(stream.get_mut(), "get {key}\r\n").unwrap();
                    value(&mut stream, &key, small);
                }
                write!(stream.get_mut(), "get large\r\n").unwrap();
                value(&mut stream, "large", large);
            });
        }
    });

    // A client that reads no response until all others have theirs does not delay them.
    let mut lazy = connect(&fixture);
    lazy.get_mut().write_all("get large\r\n".repeat(10).as_bytes()).unwrap();
    let mut many: Vec<_> = (0..200).map(|_| connect(&fixture)).collect();
    many.iter_mut().for_each(|stream| stream.get_mut().write_all(b"get k1\r\nversion\r\n").unwrap());
    for stream in &mut many {
        value(stream, "k1", &large[1..1 + 1900]);
        assert!(line(stream).starts_with("VERSION "));
    }
    (0..10).for_each(|_| value(&mut lazy, "large", &large));
    assert_eq!(memcached.stop(), 0, "{}", memcached.read_stderr());
}
