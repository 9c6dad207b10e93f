//! redis-server with I/O threads and children, and its own clients on both sides.

use crate::{assert_same, distinct_bytes, fixture};
use ginnel_testkit::interop::ProgramFixture;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// Sends many transactions before it reads the responses.
fn pipeline(mut stream: &TcpStream) {
    const COUNT: usize = 500;
    let transaction = "MULTI\r\nINCR x\r\nINCR y\r\nEXEC\r\n";
    stream.write_all(transaction.repeat(COUNT).as_bytes()).unwrap();
    let mut lines = BufReader::new(stream).lines();
    for number in 1..=COUNT {
        let mut line = || lines.next().unwrap().unwrap();
        let answer = [line(), line(), line(), line(), line(), line()];
        assert_eq!(answer[..4], ["+OK", "+QUEUED", "+QUEUED", "*2"]);
        assert_eq!(answer[4..], [format!(":{number}"), format!(":{number}")]);
    }
}

/// Reads as many bytes as expected, and compares them.
fn assert_reads(mut stream: &TcpStream, expected: &str) {
    let mut bytes = vec![0; expected.len()];
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(String::from_utf8_lossy(&bytes), expected);
}

fn info(fixture: &ProgramFixture, key: &str) -> String {
    let text = fixture.client_text("redis-cli", &["-h", "10.9.0.2", "info"]);
    let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {key}: {text}")).trim().to_string()
}

#[test]
fn redis_server_serves_while_a_child_saves() {
    let programs = ["redis-server", "redis-cli", "redis-benchmark"];
    let Some(fixture) = fixture("redis_server_serves_while_a_child_saves", &programs) else { return };
    let mut redis = fixture.start_on_stack(&[
        "redis-server",
        "--bind",
        "10.9.0.2",
        "127.0.0.1",
        "--protected-mode",
        "no",
        "--save",
        "",
        "--io-threads",
        "2",
        "--io-threads-do-reads",
        "yes",
        // Microseconds for each key: the child saves while the load runs.
        "--rdb-key-save-delay",
        "500000",
    ]);
    redis.wait_until_listening("10.9.0.2:6379");
    let value = distinct_bytes(2_000_000);
    let mut stream = fixture.connect("10.9.0.2:6379").unwrap();
    write!(stream, "*3\r\n$3\r\nSET\r\n$3\r\nbig\r\n${}\r\n", value.len()).unwrap();
    stream.write_all(&[&value[..], b"\r\n"].concat()).unwrap();
    assert_reads(&stream, "+OK\r\n");
    for host in ["10.9.0.2", "127.0.0.1"] {
        let got = fixture.client_output("redis-cli", &["-h", host, "--raw", "get", "big"]);
        assert_same(host, got.strip_suffix(b"\n").unwrap(), &value);
    }
    pipeline(&stream);

    let subscriber = fixture.connect("10.9.0.2:6379").unwrap();
    (&subscriber).write_all(b"SUBSCRIBE news\r\n").unwrap();
    assert_reads(&subscriber, "*3\r\n$9\r\nsubscribe\r\n$4\r\nnews\r\n:1\r\n");
    stream.write_all(b"PUBLISH news hello\r\nBGSAVE\r\n").unwrap();
    assert_reads(&stream, ":1\r\n+Background saving started\r\n");
    assert_reads(&subscriber, "*3\r\n$7\r\nmessage\r\n$4\r\nnews\r\n$5\r\nhello\r\n");
    assert_eq!(info(&fixture, "rdb_bgsave_in_progress"), "1");
    // Few requests: the server's I/O threads spin for each other, which is slow with fewer CPUs than threads.
    let load = ["-h", "10.9.0.2", "-c", "10", "-n", "500", "-t", "set,get", "-q"];
    let rates = fixture.client_text("redis-benchmark", &load);
    assert_eq!(rates.matches("requests per second").count(), 2, "{rates}");
    while info(&fixture, "rdb_bgsave_in_progress") != "0" {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(info(&fixture, "rdb_last_bgsave_status"), "ok");
    assert_eq!(info(&fixture, "rdb_saves"), "1");
    assert_eq!(redis.stop(), 0, "{}", redis.read_stderr());
}

#[test]
fn a_replica_follows_over_the_stack() {
    let Some(fixture) = fixture("a_replica_follows_over_the_stack", &["redis-server", "redis-cli"]) else {
        return;
    };
    let common = ["--protected-mode", "no", "--save", "", "--repl-diskless-sync-delay", "0"];
    fixture.start_on_kernel("redis-server", &[&["--port", "6380"][..], &common].concat());
    fixture.wait_until_listening("127.0.0.1:6380");
    let value = distinct_bytes(1_000_000);
    let mut first = fixture.connect("127.0.0.1:6380").unwrap();
    write!(first, "*3\r\n$3\r\nSET\r\n$1\r\na\r\n${}\r\n", value.len()).unwrap();
    first.write_all(&[&value[..], b"\r\n"].concat()).unwrap();
    assert_reads(&first, "+OK\r\n");
    let follows = ["redis-server", "--bind", "10.9.0.2", "--replicaof", "10.9.0.1", "6380"];
    let mut replica = fixture.start_on_stack(&[&follows[..], &common].concat());
    replica.wait_until_listening("10.9.0.2:6379");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while info(&fixture, "master_link_status") != "up" {
        assert!(std::time::Instant::now() < end, "the replica is not synchronized");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    // A change after the initial copy.
    first.write_all(b"SET b later\r\n").unwrap();
    assert_reads(&first, "+OK\r\n");
    while fixture.client_text("redis-cli", &["-h", "10.9.0.2", "--raw", "get", "b"]).trim() != "later" {
        assert!(
            std::time::Instant::now() < end,
            "master_link_status {}",
            info(&fixture, "master_link_status")
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let got = fixture.client_output("redis-cli", &["-h", "10.9.0.2", "--raw", "get", "a"]);
    assert_same("copy", got.strip_suffix(b"\n").unwrap(), &value);
    assert_eq!(replica.stop(), 0, "{}", replica.read_stderr());
}

#[test]
fn redis_clients_run_on_a_stack() {
    let programs = ["redis-server", "redis-cli", "redis-benchmark"];
    let Some(fixture) = fixture("redis_clients_run_on_a_stack", &programs) else {
        return;
    };
    fixture.start_on_kernel("redis-server", &["--protected-mode", "no", "--save", ""]);
    fixture.wait_until_listening("127.0.0.1:6379");
    let value = fixture.write("value", distinct_bytes(2_000_000));
    let script = format!(
        "set -e\nredis-cli -h 10.9.0.1 -x set big <{value}\nredis-cli -h 10.9.0.1 --raw get big >back\n\
         redis-benchmark -h 10.9.0.1 -n 5000 -t set,get -q\n\
         redis-benchmark -h 10.9.0.1 -n 5000 -t set,get -q --threads 2 -P 16\n\
         redis-benchmark -h 10.9.0.1 -n 500 -t set,get -q -k 0\n"
    );
    let mut clients = fixture.start_on_stack(&["sh", "-c", &script]);
    let stdout = clients.read_stdout();
    assert_eq!(clients.wait_for_exit(), 0, "{}", clients.read_stderr());
    assert_eq!(stdout.matches("requests per second").count(), 6, "{stdout}");
    assert_same("value", fixture.read("back").strip_suffix(b"\n").unwrap(), &fixture.read("value"));
}
