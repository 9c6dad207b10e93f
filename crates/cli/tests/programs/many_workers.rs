//! Servers with many processes: nginx with many workers and with workers that a reload leaves behind, and a
//! server that forks for each connection.

use crate::open_loop::{Client, requests_during};
use crate::processes::{children, is_alive, pid_in_time, signal, wait_until};
use crate::server::{ADDRESS, Nginx, Side, assert_accelerated};
use crate::{assert_same, distinct_bytes};
use ginnel_testkit::interop::ProgramFixture;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// Bytes of a page that no send and receive buffers hold completely.
const PAGE_BYTES: usize = 24 << 20;
/// Number of reloads during which downloads wait.
const RELOADS: usize = 3;
/// Number of downloads that begin before each reload.
const DOWNLOADS: usize = 4;

/// Reloads nginx, and returns its workers from before and its new ones.
#[track_caller]
fn reload(nginx: &Nginx, workers: usize) -> (Vec<String>, Vec<String>) {
    let old = children(&nginx.master);
    signal(&nginx.master, "HUP");
    let new = || -> Vec<String> {
        children(&nginx.master).into_iter().filter(|worker| !old.contains(worker)).collect()
    };
    wait_until("there are new workers", || new().len() == workers);
    let new = new();
    (old, new)
}

/// Waits until the new workers have attached, and asserts that all of them are accelerated.
#[track_caller]
fn assert_all_accelerated(fixture: &ProgramFixture, workers: &[String]) {
    wait_until("the workers wait for events", || {
        let wait = |worker: &String| std::fs::read_to_string(format!("/proc/{worker}/wchan"));
        workers
            .iter()
            .all(|worker| wait(worker).is_ok_and(|wait| wait.contains("poll") || wait.contains("futex")))
    });
    workers.iter().for_each(|worker| assert_accelerated(fixture, worker));
}

#[test]
fn twenty_nginx_workers_run_on_the_stack() {
    let test = "twenty_nginx_workers_run_on_the_stack";
    let Some(fixture) = Side::Stack.fixture(test, &["nginx", "pgrep"]) else { return };
    let nginx = Nginx::start(&fixture, Side::Stack, 20, "");
    wait_until("all workers are there", || children(&nginx.master).len() == 20);
    assert_all_accelerated(&fixture, &children(&nginx.master));
    let answers = requests_during(&fixture, Client::Kernel, &format!("http://{ADDRESS}/ok"), 500, 3, |_| {
        let (old, new) = reload(&nginx, 20);
        assert_all_accelerated(&fixture, &new);
        wait_until("the old workers are gone", || !old.iter().any(|worker| is_alive(worker)));
    });
    assert_eq!(answers.failed, 0, "{answers}");
    nginx.finish(false);
}

/// A download of which only the head has been read.
struct Download {
    stream: TcpStream,
    /// The part of the page that came with the head.
    body: Vec<u8>,
    /// Process id of the worker.
    worker: String,
}

impl Download {
    #[track_caller]
    fn begin(fixture: &ProgramFixture) -> Self {
        let mut stream = fixture.connect(ADDRESS).unwrap();
        stream.write_all(b"GET /page HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n").unwrap();
        let mut got = Vec::new();
        let mut buffer = [0; 1024];
        let end = loop {
            let n = stream.read(&mut buffer).unwrap();
            assert!(n > 0, "the connection ends in the head");
            got.extend_from_slice(&buffer[..n]);
            if let Some(end) = got.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break end + 4;
            }
        };
        let head = String::from_utf8_lossy(&got[..end]).into_owned();
        let worker = head.lines().find_map(|line| line.strip_prefix("Worker: "));
        let worker = worker.unwrap_or_else(|| panic!("{head}")).to_string();
        Self { stream, body: got.split_off(end), worker }
    }

    #[track_caller]
    fn finish(mut self, page: &[u8]) {
        self.stream.read_to_end(&mut self.body).unwrap();
        assert_same(&self.worker, &self.body, page);
    }
}

#[test]
fn old_workers_stay_until_their_downloads_end() {
    let test = "old_workers_stay_until_their_downloads_end";
    const WORKERS: usize = 10;
    let page = distinct_bytes(PAGE_BYTES);
    for side in Side::BOTH {
        let Some(fixture) = side.fixture(test, &["nginx", "pgrep"]) else { return };
        let nginx = Nginx::start(&fixture, side, WORKERS as u32, "");
        wait_until("all workers are there", || children(&nginx.master).len() == WORKERS);
        fixture.write("site/page", &page);
        let mut downloads = Vec::new();
        for _ in 0..RELOADS {
            downloads.extend((0..DOWNLOADS).map(|_| Download::begin(&fixture)));
            let serves = |worker: &String| downloads.iter().any(|download| download.worker == *worker);
            let (old, new) = reload(&nginx, WORKERS);
            if side == Side::Stack {
                assert_all_accelerated(&fixture, &new);
            }
            wait_until("old workers without downloads are gone", || {
                !old.iter().any(|worker| !serves(worker) && is_alive(worker))
            });
            assert!(downloads.iter().all(|download| is_alive(&download.worker)), "{side:?}");
            let answer = fixture.client_text("curl", &["-sSi", "-m", "30", &format!("http://{ADDRESS}/ok")]);
            assert!(new.iter().any(|worker| answer.contains(&format!("Worker: {worker}\r"))), "{answer}");
        }
        downloads.into_iter().for_each(|download| download.finish(&page));
        wait_until("the old workers are gone", || children(&nginx.master).len() == WORKERS);
        nginx.finish(false);
    }
}

#[test]
fn a_python_server_forks_for_each_connection() {
    let test = "a_python_server_forks_for_each_connection";
    const CONNECTIONS: usize = 100;
    for side in Side::BOTH {
        let Some(fixture) = side.fixture(test, &["python3", "pgrep"]) else { return };
        let script = "
import os, socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile: self.wfile.write(b'%d %s' % (os.getpid(), line))
class Server(socketserver.ForkingTCPServer):
    max_children = 200; request_queue_size = 200
server = Server(('0.0.0.0', 8000), Echo)
open('pid', 'w').write(str(os.getpid()))
server.serve_forever()";
        let _running = side.start(&fixture, &["python3", "-c", script]);
        let server = pid_in_time(&fixture, "pid");
        let mut streams: Vec<_> = (0..CONNECTIONS).map(|_| fixture.connect(ADDRESS).unwrap()).collect();
        let mut ask = |text: &str| -> Vec<String> {
            for stream in &mut streams {
                stream.write_all(text.as_bytes()).unwrap();
            }
            let answer = |stream: &TcpStream| {
                let mut line = String::new();
                BufReader::new(stream).read_line(&mut line).unwrap();
                line.strip_suffix(text).unwrap_or_else(|| panic!("{side:?}: {line:?}")).trim().to_string()
            };
            streams.iter().map(answer).collect()
        };
        let workers = ask("first\n");
        assert_eq!(ask("second\n"), workers, "{side:?}: a connection stays at its child");
        let mut sorted = workers.clone();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), CONNECTIONS, "{side:?}: each connection has a child");
        if side == Side::Stack {
            workers.iter().for_each(|worker| assert_accelerated(&fixture, worker));
        }
        drop(streams);
        wait_until("the children end", || !workers.iter().any(|worker| is_alive(worker)));
        assert!(is_alive(&server), "{side:?}");
    }
}
