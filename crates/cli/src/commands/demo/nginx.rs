//! Measures unmodified nginx on Ginnel and on the kernel, with equal configuration and client. Both servers
//! run at the same time and are measured in turn.

use super::kernel::wrk;
use super::{DemoRow, site_of};
use crate::failure::Failure;
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Addresses of the two servers, with the port that their configuration names.
const ON_GINNEL: &str = "10.99.1.2:8080";
const ON_KERNEL: &str = "10.99.2.2:8080";
/// Longest time to wait until a server accepts connections.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Directories in which nginx may be, besides `PATH`.
const ADDITIONAL_PATH: &str = "/usr/sbin:/sbin";

/// A server process that is stopped when the value is dropped.
struct NginxServer(Child);

impl NginxServer {
    fn start(command: &mut Command, address: &str) -> Result<Self, String> {
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{path}:{ADDITIONAL_PATH}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::inherit());
        let name = command.get_program().to_string_lossy().into_owned();
        Ok(Self(command.spawn().map_err(|e| format!("{name}: {e}"))?)).and_then(|server| server.wait(address))
    }

    /// Waits until the server accepts connections.
    fn wait(mut self, address: &str) -> Result<Self, String> {
        let to: SocketAddr = address.parse().map_err(|e| format!("{address}: {e}"))?;
        let end = Instant::now() + START_TIMEOUT;
        while let Err(error) = TcpStream::connect_timeout(&to, Duration::from_secs(1)) {
            if let Ok(Some(status)) = self.0.try_wait() {
                return Err(format!("the server for {address} ended ({status})"));
            }
            if Instant::now() > end {
                return Err(format!("{address}: {error}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(self)
    }
}

impl Drop for NginxServer {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.0.id().cast_signed()) {
            // The process may have ended.
            let _ = kill_process(pid, Signal::TERM);
        }
        let end = Instant::now() + Duration::from_secs(5);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures both servers with wrk, inside the namespace.
pub(super) fn rows(folder: &Path, seconds: u32) -> Result<Vec<DemoRow>, String> {
    let failed = |e: Failure| e.to_string();
    let ginnel = std::env::current_exe().map_err(|e| format!("this program's path: {e}"))?;
    let conf = write_configuration(folder, "ginnel").map_err(failed)?;
    let mut run = Command::new(ginnel);
    run.args([
        "run",
        "--device",
        "tap:gtap1",
        "--address",
        "10.99.1.2/24",
        "--kernel-address",
        "10.99.1.1/24",
    ]);
    run.args(["--", "nginx", "-c", &conf]).env("XDG_RUNTIME_DIR", folder).env_remove("GINNEL_RUN_DIR");
    let _on_ginnel = NginxServer::start(&mut run, ON_GINNEL)?;
    let conf = write_configuration(folder, "kernel").map_err(failed)?;
    let _on_kernel = on_kernel(&conf)?;

    let mut rows = Vec::new();
    for (kind, header) in [("keep-alive", None), ("short", Some("Connection: close"))] {
        for (place, address) in [("Ginnel, TAP", ON_GINNEL), ("the kernel, veth", ON_KERNEL)] {
            let name = format!("nginx on {place}: 64 B, {kind}");
            rows.push(wrk(&name, address, header, seconds)?);
        }
    }
    Ok(rows)
}

/// Starts nginx on the kernel in a network namespace of its own, at the other end of a veth pair, so that the
/// clients are as far away as from the nginx on Ginnel.
fn on_kernel(conf: &str) -> Result<NginxServer, String> {
    let script = "until ip link set far up 2>/dev/null; do sleep 0.05; done
        ip address add 10.99.2.2/24 dev far && exec nginx -c \"$0\"";
    let mut command = Command::new("unshare");
    command.args(["--net", "--", "sh", "-c", script, conf]);
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:{ADDITIONAL_PATH}")).stdin(Stdio::null()).stdout(Stdio::null());
    let server = NginxServer(command.spawn().map_err(|e| format!("unshare: {e}"))?);
    let pid = server.0.id().to_string();
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let end = Instant::now() + START_TIMEOUT;
    while namespace(&pid) == namespace("self") && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    for arguments in [
        &["link", "add", "near", "type", "veth", "peer", "name", "far", "netns", &pid][..],
        &["address", "add", "10.99.2.1/24", "dev", "near"],
        &["link", "set", "near", "up"],
    ] {
        let status = Command::new("ip").args(arguments).status().map_err(|e| format!("ip: {e}"))?;
        if !status.success() {
            return Err(format!("ip {}: {status}", arguments.join(" ")));
        }
    }
    server.wait(ON_KERNEL)
}

/// Writes the configuration of one nginx process that serves the site, and returns its path. Only the paths
/// that nginx writes to depend on `name`. The user namespace maps no user except root.
fn write_configuration(folder: &Path, name: &str) -> Result<String, Failure> {
    let (at, site) = (folder.display(), site_of(folder));
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary: String = temporary.iter().map(|what| format!("{what}_temp_path {at};\n")).collect();
    let text = format!(
        "daemon off; master_process off; user root; pid {at}/{name}.pid; error_log {at}/{name}.log;\n\
         events {{ worker_connections 1024; }}\n\
         http {{ access_log off; keepalive_requests 1000000; {temporary}\n\
         server {{ listen 8080; root {}; }} }}\n",
        site.display()
    );
    let path = folder.join(format!("{name}.conf"));
    fs::write(&path, text)?;
    Ok(path.display().to_string())
}
