//! A stack with its door, a peer, and the strings of puppets.

use crate::peer::{Book, Peer, Seen, Tell};
use crate::puppet::ADDRESS;
use ginnel::channel::{ChannelConfig, ChannelServer};
use ginnel::config::{Config, DeviceConfig, DeviceKind};
use ginnel::door::{Door, DoorStats};
use ginnel::{Commander, Shard, StopFlag};
use ginnel_devices::memory::{MemoryConfig, pair};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The path of the door, for a program that is to be a stack.
pub const STACK: &str = "GINNEL_STACK";
/// Nothing takes longer.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The shards, each on a thread.
struct Stack {
    door: Option<Door>,
    peer: Commander,
    book: Book,
    stop: StopFlag,
    threads: Vec<JoinHandle<()>>,
}

fn config(address: &str) -> Config {
    let device = DeviceConfig::new("cable", DeviceKind::Memory);
    let mut config = Config::single(device, &[address.parse().unwrap()], &[]);
    config.tcp.connections_max = 1000;
    config
}

impl Stack {
    fn new(path: &Path) -> Self {
        let channel =
            ChannelConfig { sockets_max: 64, socket_buffer_bytes: 4096, ..ChannelConfig::default() };
        let (a, b) = pair(MemoryConfig::default());
        let served = ChannelServer::for_processes(&channel).unwrap();
        let server = Shard::builder(config("10.0.0.1/24")).handler(served).device("cable", a);
        let book = Book::default();
        let peer = Shard::builder(config("10.0.0.2/24")).handler(Peer::new(book.clone())).device("cable", b);
        let (mut server, mut peer) = (server.build().unwrap(), peer.build().unwrap());
        let stop = StopFlag::new().unwrap();
        let (to_server, to_peer) = (server.commander(), peer.commander());
        let (first, second) = (stop.clone(), stop.clone());
        let threads = vec![
            std::thread::spawn(move || server.run(&first).unwrap()),
            std::thread::spawn(move || peer.run(&second).unwrap()),
        ];
        let door = Some(Door::open(Some(path), vec![to_server]).unwrap());
        Self { door, peer: to_peer, book, stop, threads }
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        self.door = None;
        self.stop.stop();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

/// A stack in a process of its own, to be killed.
pub fn be_the_stack(path: &Path) -> ! {
    let _stack = Stack::new(path);
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// A puppet's strings.
pub struct Strings {
    pub pid: u32,
    to: UnixStream,
    from: BufReader<UnixStream>,
}

pub struct Rig {
    stack: Option<Stack>,
    directory: tempfile::TempDir,
    callers: UnixListener,
    children: Vec<Child>,
    /// Everybody who came, to be ended.
    pids: Vec<u32>,
    next: usize,
}

impl Rig {
    pub fn new(name: &str) -> Self {
        let directory = tempfile::Builder::new().prefix(&name[..name.len().min(20)]).tempdir().unwrap();
        let callers = UnixListener::bind(directory.path().join("test")).unwrap();
        let stack = Some(Stack::new(&directory.path().join("control")));
        Self { stack, directory, callers, children: Vec::new(), pids: Vec::new(), next: 0 }
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

    /// A stack in another process, at a path of its own.
    pub fn other_stack(&mut self) -> (u32, PathBuf) {
        let path = self.path("other");
        let pid = self.program(STACK, &path);
        eventually("the other stack's door", || path.exists());
        (pid, path)
    }

    /// A new puppet.
    pub fn puppet(&mut self) -> Strings {
        let address = self.path("test");
        self.program(ADDRESS, &address);
        self.meet("puppet")
    }

    /// A new puppet that is attached to the stack.
    pub fn attached(&mut self, domain: &str) -> Strings {
        let mut puppet = self.puppet();
        let path = self.path("control");
        puppet.ok(&format!("attach {} {domain}", path.display()));
        puppet
    }

    /// Whoever comes next.
    pub fn meet(&mut self, who: &str) -> Strings {
        let (to, _) = self.callers.accept().unwrap();
        to.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut from = BufReader::new(to.try_clone().unwrap());
        let mut line = String::new();
        from.read_line(&mut line).unwrap();
        let (name, pid) = line.trim_end().split_once(' ').unwrap();
        assert_eq!(name, who);
        let pid = pid.parse().unwrap();
        self.pids.push(pid);
        Strings { pid, to, from }
    }

    /// Has the peer open a connection; its number.
    pub fn dial(&mut self, port: u16, text: &str) -> usize {
        self.tell(Tell::Dial(port, text.into()));
        self.next += 1;
        self.next - 1
    }

    pub fn tell(&self, what: Tell) {
        self.stack.as_ref().unwrap().peer.send(Box::new(what)).unwrap();
    }

    /// What the peer saw of a connection.
    pub fn seen(&self, number: usize) -> Seen {
        self.stack.as_ref().unwrap().book.lock().unwrap().get(number).cloned().unwrap_or_default()
    }

    pub fn door(&self) -> DoorStats {
        self.stack.as_ref().unwrap().door.as_ref().unwrap().stats()
    }

    /// Waits until the peer has received this.
    pub fn received(&self, number: usize, text: &str) {
        eventually(&format!("{text:?} at the peer"), || self.seen(number).received == text.as_bytes());
    }

    /// Waits until the peer got a FIN.
    pub fn finished(&self, number: usize) {
        eventually("a FIN at the peer", || self.seen(number).finished);
    }

    /// For a while, the connection stays open.
    pub fn stays(&self, number: usize) {
        std::thread::sleep(Duration::from_millis(100));
        let seen = self.seen(number);
        assert!(!seen.finished && seen.ended.is_none(), "{seen:?}");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        for pid in &self.pids {
            signal(*pid, Signal::KILL);
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
    }
}

/// Waits until it is so.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < until, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A signal to a process that this test has started, itself or through one that it has started.
pub fn signal(pid: u32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
}

impl Strings {
    /// Says a line, and does not wait for an answer.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    pub fn answer(&mut self) -> String {
        let mut answer = String::new();
        self.from.read_line(&mut answer).unwrap();
        answer.trim_end().to_string()
    }

    /// Says a line; the answer.
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer()
    }

    /// Says a line that must succeed; the answer.
    pub fn ok(&mut self, line: &str) -> String {
        let answer = self.ask(line);
        assert!(!answer.starts_with("error") && !answer.is_empty(), "{line}: {answer:?}");
        answer
    }

    pub fn kill(&self) {
        signal(self.pid, Signal::KILL);
    }
}
