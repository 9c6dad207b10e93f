//! Unmodified servers and their configuration: one worker, no logs, equal on the kernel and on a stack.

use crate::MeasureError;
use rustix::fs::{Access, access};
use std::ffi::OsString;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

/// Length of the body of nginx's response in bytes.
pub const BODY_BYTES: usize = 64;
/// Directories that are searched after those of `PATH`: servers are often installed there, and the `PATH` of
/// an ordinary user lacks them.
const SYSTEM_FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Returns the path of an installed program.
///
/// # Errors
/// [`MeasureError::Skipped`] if it is in no directory of `PATH` and in none of the system's.
pub fn find(program: &str) -> Result<PathBuf, MeasureError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(SYSTEM_FOLDERS.map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|path| path.is_file() && access(path, Access::EXEC_OK).is_ok())
        .ok_or_else(|| MeasureError::Skipped(format!("{program} is not installed")))
}

/// Returns the command line of a program with these arguments.
fn to_command_line(program: &str, arguments: &[&str]) -> Result<Vec<OsString>, MeasureError> {
    let program = find(program)?.into_os_string();
    Ok([program].into_iter().chain(arguments.iter().map(OsString::from)).collect())
}

/// Returns the command line of nginx with a response of [`BODY_BYTES`] bytes from memory. Writes its files to
/// `folder`.
///
/// # Errors
/// If nginx is not installed, or a file cannot be written.
pub fn nginx(folder: &Path, address: Ipv4Addr, port: u16) -> Result<Vec<OsString>, MeasureError> {
    let at = folder.display();
    let body = "x".repeat(BODY_BYTES);
    // A user namespace has no other user than root, and nginx gives its directories to its user.
    let config = format!(
        "daemon off; master_process off; user root; error_log stderr crit; pid {at}/nginx.pid;\n\
         events {{ worker_connections 4096; multi_accept on; }}\n\
         http {{\n access_log off; keepalive_requests 1000000000; tcp_nodelay on;\n\
         client_body_temp_path {at}/1; proxy_temp_path {at}/2; fastcgi_temp_path {at}/3; uwsgi_temp_path {at}/4; scgi_temp_path {at}/5;\n\
         server {{ listen {address}:{port} backlog=4096; location / {{ return 200 \"{body}\"; }} }}\n}}\n"
    );
    let path = folder.join("nginx.conf");
    fs::write(&path, config)?;
    to_command_line("nginx", &["-c", &path.to_string_lossy(), "-p", &at.to_string()])
}

/// Returns the command line of HAProxy with one thread, which forwards from `port` to a server at
/// `server_port` of the same address.
///
/// # Errors
/// If HAProxy is not installed, or a file cannot be written.
pub fn haproxy(
    folder: &Path,
    address: Ipv4Addr,
    port: u16,
    server_port: u16,
) -> Result<Vec<OsString>, MeasureError> {
    let config = format!(
        "global\n nbthread 1\n maxconn 4000\n\
         defaults\n mode http\n timeout connect 5s\n timeout client 30s\n timeout server 30s\n\
         frontend front\n bind {address}:{port} backlog 4096\n default_backend back\n\
         backend back\n server nginx {address}:{server_port}\n"
    );
    let path = folder.join("haproxy.cfg");
    fs::write(&path, config)?;
    to_command_line("haproxy", &["-db", "-f", &path.to_string_lossy()])
}

/// Returns the command line of Redis without persistence.
///
/// # Errors
/// If Redis is not installed.
pub fn redis(folder: &Path, address: Ipv4Addr, port: u16) -> Result<Vec<OsString>, MeasureError> {
    let (at, address, port) = (folder.to_string_lossy(), address.to_string(), port.to_string());
    let mut words = vec!["--bind", &address, "--port", &port, "--dir", &at];
    words.extend(["--save", "", "--appendonly", "no", "--protected-mode", "no", "--daemonize", "no"]);
    to_command_line("redis-server", &words)
}

/// Returns the command line of memcached with one worker thread, on TCP port 11211.
///
/// # Errors
/// If memcached is not installed.
pub fn memcached(address: Ipv4Addr) -> Result<Vec<OsString>, MeasureError> {
    let address = address.to_string();
    let words = ["-u", "root", "-l", &address, "-p", "11211", "-U", "0", "-t", "1", "-c", "4096"];
    to_command_line("memcached", &words)
}

#[cfg(test)]
mod tests {
    use super::find;

    #[test]
    fn missing_program_is_named() {
        assert!(find("sh").unwrap().is_absolute());
        let missing = find("no-such-program-anywhere").unwrap_err().to_string();
        assert_eq!(missing, "skipped: no-such-program-anywhere is not installed");
        // A file that is not executable.
        assert!(find("../../etc/passwd").is_err());
    }
}
