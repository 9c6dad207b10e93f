//! Runs the generator against a small server on the kernel's own sockets, over loopback.

use super::super::options::tests::job;
use super::super::stats::Failure;
use super::super::{Report, measure_on_kernel};
use super::{connect_failure, receive_failure, send_failure};
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use ginnel::StopFlag;
use ginnel_testkit::steal;
use rustix::io::Errno;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Reaction of the server to each request; false closes the connection.
type Behaviour = fn(&mut TcpStream, &[u8]) -> bool;

/// A server with a thread per connection.
struct TestServer {
    address: SocketAddr,
    accepted: Arc<AtomicU64>,
    requests: Arc<AtomicU64>,
    /// Times at which the requests arrived.
    arrivals: Arc<Mutex<Vec<Instant>>>,
    peers: Arc<Mutex<Vec<IpAddr>>>,
}

fn serve(behaviour: Behaviour) -> TestServer {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = TestServer {
        address: listener.local_addr().unwrap(),
        accepted: Arc::default(),
        requests: Arc::default(),
        arrivals: Arc::default(),
        peers: Arc::default(),
    };
    let (accepted, requests) = (Arc::clone(&server.accepted), Arc::clone(&server.requests));
    let (arrivals, peers) = (Arc::clone(&server.arrivals), Arc::clone(&server.peers));
    std::thread::spawn(move || {
        while let Ok((mut stream, peer)) = listener.accept() {
            accepted.fetch_add(1, Ordering::Relaxed);
            peers.lock().unwrap().push(peer.ip());
            let (requests, arrivals) = (Arc::clone(&requests), Arc::clone(&arrivals));
            std::thread::spawn(move || {
                let (mut buffer, mut piece) = (Vec::new(), [0; 4096]);
                loop {
                    match stream.read(&mut piece) {
                        Ok(n) if n > 0 => buffer.extend_from_slice(&piece[..n]),
                        _ => return,
                    }
                    while let Some(end) = memchr::memmem::find(&buffer, b"\r\n\r\n") {
                        requests.fetch_add(1, Ordering::Relaxed);
                        arrivals.lock().unwrap().push(Instant::now());
                        let head: Vec<u8> = buffer.drain(..end + 4).collect();
                        if !behaviour(&mut stream, &head) {
                            return;
                        }
                    }
                }
            });
        }
    });
    server
}

/// A correct server: closes if the request asks for it.
fn answer(stream: &mut TcpStream, head: &[u8]) -> bool {
    let close = memchr::memmem::find(head, b"Connection: close").is_some();
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello").is_ok() && !close
}

fn load(address: SocketAddr, options: &str) -> Report {
    let job = job(&format!("http://{address}/x --stack kernel -q {options}"));
    measure_on_kernel(&job, &StopFlag::new().unwrap()).unwrap()
}

#[test]
fn short_connections_are_answered() {
    let server = serve(answer);
    let report = load(server.address, "-n 500 -c 20");
    assert_eq!((report.requests.started, report.requests.completed), (500, 500));
    assert_eq!(report.statuses["2xx"], 500);
    assert_eq!(report.latency_ns.total.count, 500);
    assert!(report.failures.is_empty() && report.latency_ns.connect.count > 0);
    assert_eq!(server.accepted.load(Ordering::Relaxed), 500);
}

#[test]
fn connect_timeouts_differ_from_later_timeouts() {
    assert_eq!(connect_failure(Errno::TIMEDOUT), Failure::ConnectTimeout);
    assert_eq!(receive_failure(Errno::TIMEDOUT), Failure::Timeout);
    assert_eq!(send_failure(Errno::TIMEDOUT), Failure::Timeout);
    for error in [Errno::CONNRESET, Errno::PIPE] {
        assert_eq!([receive_failure(error), send_failure(error)], [Failure::Reset; 2]);
    }
}

#[test]
fn several_threads_pipeline_on_persistent_connections() {
    let server = serve(answer);
    let report = load(server.address, "-k --pipeline 4 -n 2000 -c 8 --threads 2");
    assert_eq!(report.requests.completed, 2000);
    assert_eq!((report.achieved.connections_max, server.accepted.load(Ordering::Relaxed)), (8, 8));
}

#[test]
fn connections_come_from_all_source_addresses() {
    let server = serve(answer);
    let report = load(server.address, "-n 90 -c 3 --source 127.0.1.1-3 --close client");
    assert_eq!(report.requests.completed, 90);
    let mut peers = server.peers.lock().unwrap().clone();
    peers.sort_unstable();
    for last in 1..=3 {
        assert_eq!(peers.iter().filter(|p| **p == IpAddr::from([127, 0, 1, last])).count(), 30);
    }
}

#[test]
fn an_open_loop_sends_at_its_rate() {
    let measured = steal::repeat_if_stalled(|| {
        let (server, begun) = (serve(answer), Instant::now());
        let report = load(server.address, "-k -c 50 --rate 400 -d 1s --setup 50ms");
        let started = report.requests.started;
        assert_eq!(started + report.requests.not_started, 400);
        let mut arrivals = server.arrivals.lock().unwrap().clone();
        assert_eq!(arrivals.len() as u64, started);
        assert!(report.latency_ns.lag.is_some_and(|lag| lag.count == started));
        arrivals.sort_unstable();
        for (arrival, due) in arrivals.iter().zip((0..).map(|n| n * Duration::from_micros(2500))) {
            assert!(*arrival - begun >= due, "a request arrived before it was due after {due:?}");
        }
        // A generator or a server that does not run falls behind.
        if started < 360 { Err(format!("{started} of 400 requests were sent")) } else { Ok(()) }
    });
    assert!(measured.is_ok(), "{measured:?}");
}

#[test]
fn large_bodies_arrive_whole() {
    let server = serve(|stream, _| {
        let body = vec![b'x'; 3_000_000];
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).is_ok() && stream.write_all(&body).is_ok()
    });
    let report = load(server.address, "-k -n 12 -c 2");
    assert_eq!(report.requests.completed, 12);
    let bytes = report.achieved.bytes_per_second * report.measured_seconds;
    assert!(bytes > 12.0 * 3e6, "{bytes}");
}

#[test]
fn failures_are_distinguished() {
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert!(load(nobody, "-n 5 -c 1").failures["connect refused"] == 5);

    let server = serve(|stream, _| {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello");
        false
    });
    assert_eq!(load(server.address, "-n 5 -c 1").failures["closed early"], 5);

    let server = serve(|stream, _| stream.write_all(b"220 mail ready\r\n").is_ok());
    assert_eq!(load(server.address, "-n 5 -c 1").failures["bad response"], 5);

    let server = serve(|stream, _| {
        let _ = rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO));
        false
    });
    assert_eq!(load(server.address, "-n 5 -c 1").failures["reset"], 5);

    let server = serve(|_, _| true);
    assert_eq!(load(server.address, "-n 3 -c 3 --timeout 200ms").failures["timeout"], 3);
}

#[test]
fn responses_can_end_with_the_connection() {
    let server = serve(|stream, _| {
        let _ = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nuntil the end");
        false
    });
    let report = load(server.address, "-n 20 -c 4");
    assert_eq!((report.requests.completed, report.failures.len()), (20, 0));
}

#[test]
fn a_stopped_run_reports_its_results() {
    let server = serve(answer);
    let job = job(&format!("http://{}/ --stack kernel -q -k -c 2 -d 1h", server.address));
    let stop = StopFlag::new().unwrap();
    let requests = Arc::clone(&server.requests);
    let flag = stop.clone();
    std::thread::spawn(move || {
        while requests.load(Ordering::Relaxed) < 100 {
            std::thread::sleep(Duration::from_millis(1));
        }
        flag.stop();
    });
    let report = measure_on_kernel(&job, &stop).unwrap();
    assert!(report.requests.completed >= 98 && report.measured_seconds < 3600.0);
}

#[test]
fn too_many_connections_for_the_descriptors_are_refused() {
    let job = job("http://127.0.0.1:1/ --stack kernel -q -c 268435456");
    let error = measure_on_kernel(&job, &StopFlag::new().unwrap()).unwrap_err().to_string();
    assert!(error.contains("RLIMIT_NOFILE"), "{error}");
}
