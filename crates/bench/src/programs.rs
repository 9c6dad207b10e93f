//! Unmodified servers and their configuration: one worker, no logs, equal on the kernel and on a stack.

use crate::harness::MeasureError;
use crate::http;
use std::ffi::OsString;
use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};

/// Fails if a program is not installed.
pub fn require(program: &str) -> Result<(), MeasureError> {
    // The program may not know the option; if it starts, it is installed.
    let started = Command::new(program).arg("-v").stdin(Stdio::null()).output();
    started.map(drop).map_err(|e| MeasureError::Skipped(format!("{program}: {e}")))
}

fn to_command_line(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// Returns the command line of nginx with a response of 64 bytes from memory. Writes its files to `folder`.
pub fn nginx(folder: &Path, address: Ipv4Addr, port: u16) -> Result<Vec<OsString>, MeasureError> {
    let at = folder.display();
    let body = "x".repeat(http::BODY_BYTES);
    let config = format!(
        "daemon off; master_process off; error_log stderr crit; pid {at}/nginx.pid;\n\
         events {{ worker_connections 4096; multi_accept on; }}\n\
         http {{\n access_log off; keepalive_requests 1000000000; tcp_nodelay on;\n\
         client_body_temp_path {at}/1; proxy_temp_path {at}/2; fastcgi_temp_path {at}/3; uwsgi_temp_path {at}/4; scgi_temp_path {at}/5;\n\
         server {{ listen {address}:{port} backlog=4096; location / {{ return 200 \"{body}\"; }} }}\n}}\n"
    );
    let path = folder.join("nginx.conf");
    fs::write(&path, config)?;
    Ok(to_command_line(&["nginx", "-c", &path.to_string_lossy(), "-p", &at.to_string()]))
}

/// Returns the command line of HAProxy with one thread, in front of a server on another port of the same
/// address.
pub fn haproxy(
    folder: &Path,
    address: Ipv4Addr,
    port: u16,
    behind: u16,
) -> Result<Vec<OsString>, MeasureError> {
    let config = format!(
        "global\n nbthread 1\n maxconn 4000\n\
         defaults\n mode http\n timeout connect 5s\n timeout client 30s\n timeout server 30s\n\
         frontend front\n bind {address}:{port} backlog 4096\n default_backend back\n\
         backend back\n server nginx {address}:{behind}\n"
    );
    let path = folder.join("haproxy.cfg");
    fs::write(&path, config)?;
    Ok(to_command_line(&["haproxy", "-db", "-f", &path.to_string_lossy()]))
}

/// Returns the command line of Redis without persistence.
pub fn redis(folder: &Path, address: Ipv4Addr) -> Vec<OsString> {
    let (at, address) = (folder.to_string_lossy(), address.to_string());
    let mut words = vec!["redis-server", "--bind", &address, "--port", "6379", "--dir", &at];
    words.extend(["--save", "", "--appendonly", "no", "--protected-mode", "no", "--daemonize", "no"]);
    to_command_line(&words)
}

/// Returns the command line of memcached with one worker thread.
pub fn memcached(address: Ipv4Addr) -> Vec<OsString> {
    let address = address.to_string();
    to_command_line(&[
        "memcached",
        "-u",
        "root",
        "-l",
        &address,
        "-p",
        "11211",
        "-U",
        "0",
        "-t",
        "1",
        "-c",
        "4096",
    ])
}
