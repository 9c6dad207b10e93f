//! A real redis-server for tests, on a Unix socket or a port of 127.0.0.1, without persistence.

use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Upper limit of every wait, however busy the machine is.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Hash slots of a cluster.
const SLOTS: usize = 16_384;

/// Returns why no test can use redis-server here; `None` if it is installed.
pub fn redis_unavailable() -> Option<String> {
    let found = Command::new("redis-server").arg("--version").stdout(Stdio::null()).status();
    found.err().map(|error| format!("redis-server: {error}"))
}

/// Where a server listens.
#[derive(Clone, Debug)]
enum Address {
    Unix(PathBuf),
    Tcp(u16),
}

/// A redis-server that is killed when the value is dropped.
#[derive(Debug)]
pub struct RedisServer {
    address: Address,
    arguments: Vec<String>,
    process: Option<Child>,
}

impl RedisServer {
    /// Starts a server with a Unix socket in `folder` and waits until it answers.
    pub fn on_unix_socket(folder: &Path, name: &str) -> Self {
        let path = folder.join(name);
        let arguments = vec!["--port".into(), "0".into(), "--unixsocket".into(), path.display().to_string()];
        Self::start_at(Address::Unix(path), arguments)
    }

    /// Starts a server on a free port of 127.0.0.1 and waits until it answers. `more` are further arguments.
    pub fn on_port(more: &[&str]) -> Self {
        let free_port = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        // The server of a cluster also listens on a port that is higher by 10,000.
        let port =
            std::iter::repeat_with(free_port).find(|port| *port < 55_000).expect("there are lower ones");
        let mut arguments = vec!["--port".into(), port.to_string(), "--bind".into(), "127.0.0.1".into()];
        arguments.extend(more.iter().map(ToString::to_string));
        Self::start_at(Address::Tcp(port), arguments)
    }

    /// Starts the servers of a cluster, each with an equal share of the hash slots and its state in `folder`.
    pub fn cluster(folder: &Path, count: usize) -> Vec<Self> {
        let servers: Vec<Self> = (0..count).map(|number| Self::cluster_node(folder, number)).collect();
        for (number, server) in servers.iter().enumerate() {
            let slot = |number| number * SLOTS / count;
            let (first, last) = (slot(number), slot(number + 1) - 1);
            assert_eq!(server.command(&format!("CLUSTER ADDSLOTSRANGE {first} {last}")), "+OK");
            assert_eq!(server.command(&format!("CLUSTER SET-CONFIG-EPOCH {}", number + 1)), "+OK");
            let Address::Tcp(port) = servers[0].address else { continue };
            assert_eq!(server.command(&format!("CLUSTER MEET 127.0.0.1 {port}")), "+OK");
        }
        servers.iter().for_each(|server| server.wait_for_cluster(count));
        servers
    }

    /// Starts a replica of the server `number` of a cluster, and waits until the replica has the server's
    /// data and all servers know the replica.
    pub fn replica_of(folder: &Path, servers: &[Self], number: usize) -> Self {
        let replica = Self::cluster_node(folder, servers.len());
        let id = servers[number].command("CLUSTER MYID");
        let Address::Tcp(port) = servers[number].address else { panic!("not a cluster") };
        assert_eq!(replica.command(&format!("CLUSTER MEET 127.0.0.1 {port}")), "+OK");
        servers.iter().chain([&replica]).for_each(|server| server.wait_for_cluster(servers.len() + 1));
        assert_eq!(replica.command(&format!("CLUSTER REPLICATE {id}")), "+OK");
        let is_known = |server: &Self| server.command("CLUSTER NODES").contains(&format!("slave {id}"));
        let is_ready = || replica.command("INFO replication").contains("master_link_status:up");
        wait_until("the replica is not ready", || is_ready() && servers.iter().all(is_known));
        replica
    }

    /// Starts a node of a cluster. The node knows no other one yet.
    fn cluster_node(folder: &Path, number: usize) -> Self {
        let (dir, nodes) = (folder.display().to_string(), format!("nodes-{number}.conf"));
        let cluster = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"];
        Self::on_port(&[&cluster[..], &["--cluster-config-file", &nodes, "--dir", &dir]].concat())
    }

    /// Waits until the server knows `count` nodes and all slots have a server.
    fn wait_for_cluster(&self, count: usize) {
        let known = format!("cluster_known_nodes:{count}");
        wait_until("the cluster is not complete", || {
            let info = self.command("CLUSTER INFO");
            info.contains("cluster_state:ok") && info.contains(&known)
        });
    }

    fn start_at(address: Address, arguments: Vec<String>) -> Self {
        let mut server = Self { address, arguments, process: None };
        server.start();
        server
    }

    /// Starts the server again after [`kill`](Self::kill), without its data, and waits until it answers.
    pub fn start(&mut self) {
        let mut command = Command::new("redis-server");
        command.args(&self.arguments).args(["--save", "", "--appendonly", "no"]);
        self.process = Some(command.stdout(Stdio::null()).spawn().expect("redis-server starts"));
        let end = Instant::now() + TIMEOUT;
        while self.try_command("PING").is_err() {
            assert!(Instant::now() < end, "redis-server does not answer");
            let exit = self.process.as_mut().and_then(|process| process.try_wait().unwrap());
            assert_eq!(exit, None, "redis-server has ended");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the server and waits for its end.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().expect("it is a child of this process");
            process.wait().expect("it is a child of this process");
        }
    }

    /// Stops the process (`SIGSTOP`): it accepts connections and does not answer.
    pub fn suspend(&self) {
        self.signal(Signal::STOP);
    }

    /// Continues the process after [`suspend`](Self::suspend).
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("it runs");
        kill_process(Pid::from_child(process), signal).expect("it is a child of this process");
    }

    /// Returns the address in the form that `ginnel iot --redis` takes.
    pub fn address(&self) -> String {
        match &self.address {
            Address::Unix(path) => format!("unix:{}", path.display()),
            Address::Tcp(port) => format!("127.0.0.1:{port}"),
        }
    }

    /// Executes a command, whose arguments must not contain spaces. Returns its reply without the length of a
    /// bulk string.
    pub fn command(&self, command: &str) -> String {
        self.try_command(command).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    fn try_command(&self, command: &str) -> std::io::Result<String> {
        let request = format!("{command}\r\n");
        match &self.address {
            Address::Unix(path) => exchange(UnixStream::connect(path)?, &request),
            Address::Tcp(port) => exchange(TcpStream::connect(("127.0.0.1", *port))?, &request),
        }
    }

    /// Returns how often a command was executed since the start or `CONFIG RESETSTAT`.
    pub fn calls(&self, command: &str) -> u64 {
        let stats = self.command("INFO commandstats");
        let prefix = format!("cmdstat_{command}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(&prefix));
        line.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn wait_until(failure: &str, is_done: impl Fn() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is_done() {
        assert!(Instant::now() < end, "{failure}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends an inline command and reads its reply.
fn exchange(mut stream: impl Read + Write, request: &str) -> std::io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let line = line.trim_end();
    match line.strip_prefix('$').and_then(|len| len.parse::<usize>().ok()) {
        Some(len) => {
            let mut value = vec![0; len];
            reader.read_exact(&mut value)?;
            Ok(String::from_utf8_lossy(&value).into_owned())
        }
        None if line.is_empty() => Err(std::io::ErrorKind::UnexpectedEof.into()),
        None => Ok(line.to_owned()),
    }
}
