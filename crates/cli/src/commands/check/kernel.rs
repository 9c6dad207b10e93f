//! Sockets of the kernel, as /proc/net lists them.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::collections::HashMap;
use std::fs;

/// A socket of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelSocket {
    pub kind: &'static str,
    pub local: String,
    pub remote: String,
    pub state: String,
    /// Local port, or 0.
    pub port: u16,
}

impl Default for KernelSocket {
    fn default() -> Self {
        let nothing = String::new;
        Self { kind: "other", local: nothing(), remote: nothing(), state: nothing(), port: 0 }
    }
}

impl KernelSocket {
    /// Describes an epoll set; /proc/net does not list them.
    pub fn epoll() -> Self {
        Self { kind: "epoll", ..Self::default() }
    }
}

/// Names of the states in `ss`, by their number in `include/net/tcp_states.h`.
const STATES: [&str; 13] = [
    "",
    "ESTAB",
    "SYN-SENT",
    "SYN-RECV",
    "FIN-WAIT-1",
    "FIN-WAIT-2",
    "TIME-WAIT",
    "UNCONN",
    "CLOSE-WAIT",
    "LAST-ACK",
    "LISTEN",
    "CLOSING",
    "NEW-SYN-RECV",
];

/// Lists all sockets in the network namespace of process `pid`, by inode.
pub fn sockets(pid: u32) -> HashMap<u64, KernelSocket> {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/net/{file}")).unwrap_or_default();
    let mut all = HashMap::new();
    for (file, kind) in [("tcp", "tcp"), ("tcp6", "tcp"), ("udp", "udp"), ("udp6", "udp")] {
        all.extend(read(file).lines().skip(1).filter_map(|line| parse_inet(line, kind)));
    }
    all.extend(read("unix").lines().skip(1).filter_map(parse_unix));
    all
}

/// Parses a line of `tcp` or `udp`: number, local, remote, state, queues, timers, retransmissions, user,
/// probes, inode.
fn parse_inet(line: &str, kind: &'static str) -> Option<(u64, KernelSocket)> {
    let cells: Vec<&str> = line.split_whitespace().collect();
    let (local, remote) = (parse_address(cells.get(1)?)?, parse_address(cells.get(2)?)?);
    let state = STATES.get(usize::from_str_radix(cells.get(3)?, 16).ok()?).copied().unwrap_or_default();
    let remote_text = if remote.port() == 0 { String::new() } else { remote.to_string() };
    let (local_text, port) = (local.to_string(), local.port());
    let socket = KernelSocket { kind, local: local_text, remote: remote_text, state: state.into(), port };
    Some((cells.get(9)?.parse().ok()?, socket))
}

/// Parses `0100007F:1F90`: the address in words of the host's byte order, then the port.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip: IpAddr = match ip.len() {
        8 => Ipv4Addr::from(word(0)?).into(),
        32 => {
            let mut octets = [0; 16];
            for (at, place) in octets.chunks_exact_mut(4).enumerate() {
                place.copy_from_slice(&word(8 * at)?);
            }
            Ipv6Addr::from(octets).into()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

/// Parses a line of `unix`: number, references, protocol, flags, type, state, inode, path.
fn parse_unix(line: &str) -> Option<(u64, KernelSocket)> {
    let cells: Vec<&str> = line.split_whitespace().collect();
    let listens = *cells.get(3)? == "00010000";
    let state = match (listens, *cells.get(5)?) {
        (true, _) => "LISTEN",
        (false, "03") => "ESTAB",
        _ => "UNCONN",
    };
    let local = cells.get(7..).map(|path| path.join(" ")).unwrap_or_default();
    let socket = KernelSocket { kind: "unix", local, state: state.into(), ..KernelSocket::default() };
    Some((cells.get(6)?.parse().ok()?, socket))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::AsFd;

    #[test]
    fn sockets_of_this_process_are_found() {
        let inode = |fd: &dyn AsFd| rustix::fs::fstat(fd.as_fd()).unwrap().st_ino;
        let four = TcpListener::bind("127.0.0.1:0").unwrap();
        let six = TcpListener::bind("[::1]:0").ok();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.connect("127.0.0.1:9").unwrap();
        let (unix, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let all = sockets(std::process::id());
        let found = all[&inode(&four)].clone();
        assert_eq!(
            (found.kind, &found.local, &*found.state),
            ("tcp", &four.local_addr().unwrap().to_string(), "LISTEN")
        );
        if let Some(six) = six {
            assert_eq!(all[&inode(&six)].local, six.local_addr().unwrap().to_string());
        }
        let found = all[&inode(&udp)].clone();
        assert_eq!((found.kind, &*found.remote, &*found.state), ("udp", "127.0.0.1:9", "ESTAB"));
        assert_eq!((all[&inode(&unix)].kind, &*all[&inode(&unix)].state), ("unix", "ESTAB"));
    }

    #[test]
    fn truncated_lines_are_skipped() {
        for line in
            ["", "0: 0100007F:1F90", "0: 0100007F:1F90 00000000:0000 0A", "0: 01:1 01:1 0A 0 0 0 0 0 5"]
        {
            assert_eq!(parse_inet(line, "tcp"), None, "{line}");
        }
        assert_eq!(parse_unix("0: 00000002 00000000 00000000"), None);
    }
}
