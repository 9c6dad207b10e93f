//! A stack with its broker, a peer, and control of the scripted processes.

use crate::fixture::BrokerFixture;
use crate::peer::{ConnRecord, ConnRecords, Peer, PeerCommand};
use crate::scripted_process::ADDRESS_ENV;
use ginnel::broker::{Broker, BrokerStats};
use ginnel::channel::ChannelConfig;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Path of the control socket, for a process that runs a stack.
pub const STACK_PATH_ENV: &str = "GINNEL_TEST_STACK";
/// Limit of every wait.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Starts a stack at 10.0.0.1 with a peer, on threads of this process.
fn start_stack(path: &Path, records: ConnRecords) -> BrokerFixture {
    let channel = ChannelConfig { sockets_max: 64, socket_buffer_bytes: 4096, ..ChannelConfig::default() };
    BrokerFixture::with_peers(&channel, [Peer::new(records)], |servers| {
        Broker::open(Some(path), servers).unwrap()
    })
}

/// Runs a stack in this process until it is killed.
pub fn run_stack(path: &Path) -> ! {
    let _stack = start_stack(path, ConnRecords::default());
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Control of a scripted process.
pub struct ProcessControl {
    pub pid: u32,
    to: UnixStream,
    from: BufReader<UnixStream>,
}

pub struct ProcessFixture {
    stack: BrokerFixture,
    records: ConnRecords,
    directory: tempfile::TempDir,
    callers: UnixListener,
    children: Vec<Child>,
    /// Processes that connected, to be killed at the end.
    pids: Vec<u32>,
    next: usize,
}

impl ProcessFixture {
    pub fn new(name: &str) -> Self {
        let directory = tempfile::Builder::new().prefix(&name[..name.len().min(20)]).tempdir().unwrap();
        let callers = UnixListener::bind(directory.path().join("test")).unwrap();
        let records = ConnRecords::default();
        let stack = start_stack(&directory.path().join("control"), records.clone());
        Self { stack, records, directory, callers, children: Vec::new(), pids: Vec::new(), next: 0 }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn program(&mut self, variable: &str, value: &Path) -> u32 {
        let program = std::env::current_exe().unwrap();
        let child = Command::new(program).env(variable, value).spawn().unwrap();
        let pid = child.id();
        self.children.push(child);
        self.pids.push(pid);
        pid
    }

    /// Starts a stack in another process, at a path of its own.
    pub fn spawn_stack(&mut self) -> (u32, PathBuf) {
        let path = self.path("other");
        let pid = self.program(STACK_PATH_ENV, &path);
        eventually("the other stack's control socket exists", || path.exists());
        (pid, path)
    }

    /// Starts a scripted process.
    pub fn spawn_process(&mut self) -> ProcessControl {
        let address = self.path("test");
        self.program(ADDRESS_ENV, &address);
        self.accept_process("new")
    }

    /// Starts a scripted process that is attached to the stack.
    pub fn spawn_attached(&mut self, domain: &str) -> ProcessControl {
        let mut process = self.spawn_process();
        let path = self.path("control");
        process.request_ok(&format!("attach {} {domain}", path.display()));
        process
    }

    /// Accepts the next process that connects, and checks its name.
    pub fn accept_process(&mut self, who: &str) -> ProcessControl {
        let (to, _) = self.callers.accept().unwrap();
        to.set_read_timeout(Some(TIMEOUT)).unwrap();
        let mut from = BufReader::new(to.try_clone().unwrap());
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        let (name, pid) = line.trim_end().split_once(' ').unwrap();
        assert_eq!(name, who);
        let pid = pid.parse().unwrap();
        self.pids.push(pid);
        ProcessControl { pid, to, from }
    }

    /// Kills a process that does not connect to the test when the scenario ends.
    pub fn kill_at_end(&mut self, pid: u32) {
        self.pids.push(pid);
    }

    /// Makes the peer open a connection and send `text`. Returns the connection's number.
    pub fn connect_peer(&mut self, port: u16, text: &str) -> usize {
        self.command_peer(PeerCommand::Connect(port, text.into()));
        self.next += 1;
        self.next - 1
    }

    pub fn command_peer(&self, what: PeerCommand) {
        self.stack.peers[0].send(Box::new(what)).unwrap();
    }

    /// Returns what the peer has recorded about a connection.
    pub fn conn_record(&self, number: usize) -> ConnRecord {
        self.records.lock().unwrap().get(number).cloned().unwrap_or_default()
    }

    pub fn broker_stats(&self) -> BrokerStats {
        self.stack.broker.stats()
    }

    /// Waits until the peer has received exactly `text`.
    pub fn await_received(&self, number: usize, text: &str) {
        eventually(&format!("the peer receives {text:?}"), || {
            self.conn_record(number).received == text.as_bytes()
        });
    }

    /// Waits until the peer has received FIN.
    pub fn await_fin(&self, number: usize) {
        eventually("the peer receives FIN", || self.conn_record(number).has_fin);
    }

    /// Checks that the connection stays open for 100 ms.
    pub fn assert_stays_open(&self, number: usize) {
        std::thread::sleep(Duration::from_millis(100));
        let seen = self.conn_record(number);
        assert!(!seen.has_fin && seen.close_reason.is_none(), "{seen:?}");
    }
}

impl Drop for ProcessFixture {
    fn drop(&mut self) {
        for pid in &self.pids {
            signal(*pid, Signal::KILL);
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

/// Waits until a condition holds.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !so() {
        assert!(Instant::now() < until, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends a signal to a process that this test has started directly or indirectly.
pub fn signal(pid: u32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
}

impl ProcessControl {
    /// Sends a line without waiting for an answer.
    pub fn send(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    pub fn read_answer(&mut self) -> String {
        let mut answer = String::new();
        self.from.read_line(&mut answer).unwrap();
        answer.trim_end().to_string()
    }

    /// Sends a line and returns the answer.
    pub fn request(&mut self, line: &str) -> String {
        self.send(line);
        self.read_answer()
    }

    /// Sends a line whose command must succeed, and returns the answer.
    pub fn request_ok(&mut self, line: &str) -> String {
        let answer = self.request(line);
        assert!(!answer.starts_with("error") && !answer.is_empty(), "{line}: {answer:?}");
        answer
    }

    pub fn kill(&self) {
        signal(self.pid, Signal::KILL);
    }
}
