//! Redis servers for a test: started with this process, and ended with it.

use crate::commands::with_parent;
use crate::failure::Failure;
use core::time::Duration;
use ginnel_apps::iot::RedisAddress;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;
use tempfile::TempDir;

/// Time for a server to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between attempts to connect to a server that starts.
const TRY_INTERVAL: Duration = Duration::from_millis(10);

/// Servers with Unix sockets in a temporary directory, without persistence. They are killed, and the
/// directory is removed, when the value is dropped; if this process is killed, the kernel kills the servers.
#[derive(Debug)]
pub struct RedisServers {
    servers: Vec<RedisProcess>,
    _folder: TempDir,
}

#[derive(Debug)]
struct RedisProcess {
    socket: PathBuf,
    log: PathBuf,
    child: Child,
}

impl RedisServers {
    /// Starts `count` servers and waits until each accepts connections. Call it in a thread that lives as
    /// long as the process.
    pub fn start(count: u32) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("ginnel-redis-").tempdir();
        let folder = folder.map_err(|e| Failure::running(format!("directory of the redis servers: {e}")))?;
        let mut servers = Self { servers: Vec::new(), _folder: folder };
        for number in 0..count {
            let server = RedisProcess::start(servers._folder.path(), number)?;
            servers.servers.push(server);
        }
        servers.servers.iter_mut().try_for_each(RedisProcess::wait_until_it_accepts)?;
        Ok(servers)
    }

    /// Returns the addresses of the servers.
    pub fn addresses(&self) -> Vec<RedisAddress> {
        self.servers.iter().map(|server| RedisAddress::Unix(server.socket.clone())).collect()
    }
}

impl Drop for RedisServers {
    fn drop(&mut self) {
        for server in &mut self.servers {
            // Fails only if it has ended already.
            let _ = server.child.kill();
            let _ = server.child.wait();
        }
    }
}

impl RedisProcess {
    fn start(folder: &Path, number: u32) -> Result<Self, Failure> {
        let socket = folder.join(format!("{number}.sock"));
        let log = folder.join(format!("{number}.log"));
        let mut command = with_parent::command("redis-server".as_ref())?;
        command.args(["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no"]);
        command.arg("--unixsocket").arg(&socket).arg("--logfile").arg(&log).arg("--dir").arg(folder);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.map_err(|e| Failure::not_started("redis-server", &e))?;
        Ok(Self { socket, log, child })
    }

    fn wait_until_it_accepts(&mut self) -> Result<(), Failure> {
        let end = Instant::now() + START_TIMEOUT;
        while UnixStream::connect(&self.socket).is_err() {
            let exit = self.child.try_wait().map_err(|e| Failure::running(format!("redis-server: {e}")))?;
            if exit.is_some() || Instant::now() >= end {
                let log = std::fs::read_to_string(&self.log).unwrap_or_default();
                let last = log.lines().last().unwrap_or("it has written no log: is it installed?");
                let problem = if exit.is_some() { "has ended" } else { "does not accept connections" };
                return Err(Failure::running(format!("redis-server {problem}: {last}")));
            }
            std::thread::sleep(TRY_INTERVAL);
        }
        Ok(())
    }
}
