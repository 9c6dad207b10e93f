//! Explains `EADDRINUSE` of a wildcard address whose port a program on another stack holds on the kernel: a
//! socket on a wildcard address takes its port on the kernel, too, so two stacks in one network namespace
//! cannot both have it.

use crate::Ops;
use crate::descriptor_report;
use crate::standard_error::write_line;
use core::sync::atomic::{AtomicU32, Ordering};
use rustix::fd::RawFd;
use std::fs;
use std::path::Path;

/// Maximum number of searches of a process. A program may try one port after another, and each search reads
/// /proc.
const SEARCHES_MAX: u32 = 16;
/// Name of the variable with the stack's control socket in the environment of a program.
const STACK_VARIABLE: &str = "GINNEL_STACK";

static SEARCHES: AtomicU32 = AtomicU32::new(0);

/// A process that holds a port on the kernel, on another stack.
#[derive(Debug, PartialEq, Eq)]
struct PortOwner {
    program: String,
    pid: u32,
    stack: String,
}

impl Ops {
    /// Writes a line to standard error if a program on another stack than `own_stack`, the path of a control
    /// socket, holds the port of `address` on the kernel. Must be called after `bind` or `listen` of the
    /// descriptor `fd` failed with `EADDRINUSE`.
    #[cold]
    pub fn explain_address_in_use(&self, fd: RawFd, address: &[u8], own_stack: &str) {
        let Some(port) = wildcard_port(address).filter(|port| *port != 0) else { return };
        if !self.config.kernel_listen || SEARCHES.fetch_add(1, Ordering::Relaxed) >= SEARCHES_MAX {
            return;
        }
        let is_udp = self.lock().is_ok_and(|mut state| {
            let file = self.file_of(&mut state, fd);
            file.is_ok_and(|file| state.files.socket(file).is_ok_and(|socket| socket.is_udp))
        });
        if let Some(PortOwner { program, pid, stack }) = find_owner(port, is_udp, own_stack) {
            write_line(&format!(
                "ginnel: {program} (process {pid}) on the stack \"{stack}\" has port {port} on the kernel, which a socket on a wildcard address takes, too: start one of the programs with \"ginnel run --kernel-listen off\" to have the port on both stacks\n"
            ));
        }
    }
}

/// Returns the port of an address if it is a wildcard address.
fn wildcard_port(address: &[u8]) -> Option<u16> {
    let family = u16::from_ne_bytes(address.get(..2)?.try_into().ok()?);
    let ip = match i32::from(family) {
        libc::AF_INET => address.get(4..8)?,
        libc::AF_INET6 => address.get(8..24)?,
        _ => return None,
    };
    let port = u16::from_be_bytes(address.get(2..4)?.try_into().ok()?);
    ip.iter().all(|byte| *byte == 0).then_some(port)
}

/// Finds a process of another stack with a kernel socket on the port: a listener, or a UDP socket.
fn find_owner(port: u16, is_udp: bool, own_stack: &str) -> Option<PortOwner> {
    let tables = if is_udp { ["udp", "udp6"] } else { ["tcp", "tcp6"] };
    let read = |table: &str| fs::read_to_string(format!("/proc/self/net/{table}")).unwrap_or_default();
    let mut targets = Vec::new();
    for table in tables {
        let text = read(table);
        targets.extend(text.lines().filter_map(|line| inode_of(line, port, is_udp)));
    }
    let targets: Vec<String> = targets.into_iter().map(|inode| format!("socket:[{inode}]")).collect();
    if targets.is_empty() {
        return None;
    }
    let processes = fs::read_dir("/proc").ok()?;
    processes.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let path = entry.path();
        // Fails for processes of other users.
        let mut fds = fs::read_dir(path.join("fd")).ok()?.flatten();
        let is_target = |link: &Path| targets.iter().any(|target| Path::new(target) == link);
        fds.find(|fd| fs::read_link(fd.path()).is_ok_and(|link| is_target(&link)))?;
        let control = stack_of(pid)?;
        if control == own_stack {
            return None;
        }
        let stack = Path::new(&control).parent()?.file_name()?.to_str()?.to_owned();
        let program = fs::read_to_string(path.join("comm")).unwrap_or_default().trim_end().to_owned();
        Some(PortOwner { program, pid, stack })
    })
}

/// Returns the control socket of the stack on which a process was started. nginx, redis and others overwrite
/// their environment with a title; the descriptor report of such a process names the stack.
fn stack_of(pid: u32) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let variable = environment
        .split(|byte| *byte == 0)
        .find_map(|text| core::str::from_utf8(text).ok()?.strip_prefix(STACK_VARIABLE)?.strip_prefix('='));
    variable.map(str::to_owned).or_else(|| descriptor_report::stack_of(pid))
}

/// Returns the inode of a socket in a line of /proc/net/tcp or udp: number, local, remote, state, queues,
/// timers, retransmissions, user, probes, inode.
fn inode_of(line: &str, port: u16, is_udp: bool) -> Option<u64> {
    /// `TCP_LISTEN` (include/net/tcp_states.h).
    const LISTEN: &str = "0A";
    let mut cells = line.split_whitespace();
    let (_, local_port) = cells.nth(1)?.split_once(':')?;
    let state = cells.nth(1)?;
    let inode = cells.nth(5)?.parse().ok()?;
    let is_on_port = u16::from_str_radix(local_port, 16) == Ok(port);
    (is_on_port && (is_udp || state == LISTEN)).then_some(inode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::AsFd;

    #[test]
    fn only_wildcard_addresses_have_a_port_here() {
        let v4 = |ip: [u8; 4]| [&[2, 0, 0x1f, 0x90][..], &ip, &[0; 8]].concat();
        assert_eq!((wildcard_port(&v4([0; 4])), wildcard_port(&v4([127, 0, 0, 1]))), (Some(8080), None));
        let v6 = |last: u8| [&[10, 0, 0x1f, 0x90][..], &[0; 4], &[0; 15], &[last], &[0; 4]].concat();
        assert_eq!((wildcard_port(&v6(0)), wildcard_port(&v6(1))), (Some(8080), None));
        for short in [&[][..], &[2, 0, 0x1f], &[2, 0, 0x1f, 0x90, 0, 0], &[1, 0, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(wildcard_port(short), None);
        }
    }

    #[test]
    fn sockets_of_the_kernel_are_found_by_port() {
        let inode = |fd: &dyn AsFd| rustix::fs::fstat(fd.as_fd()).unwrap().st_ino;
        let tcp = TcpListener::bind("0.0.0.0:0").unwrap();
        let udp = UdpSocket::bind("0.0.0.0:0").unwrap();
        for (port, is_udp, table, expected) in [
            (tcp.local_addr().unwrap().port(), false, "tcp", inode(&tcp)),
            (udp.local_addr().unwrap().port(), true, "udp", inode(&udp)),
        ] {
            let text = fs::read_to_string(format!("/proc/self/net/{table}")).unwrap();
            let found: Vec<u64> = text.lines().filter_map(|line| inode_of(line, port, is_udp)).collect();
            assert_eq!(found, [expected]);
            // This process is on no stack.
            assert_eq!(find_owner(port, is_udp, "/run/ginnel/own/control"), None);
        }
    }
}
