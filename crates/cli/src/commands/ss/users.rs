//! The processes that own the sockets of a stack, from their descriptor reports, as `ss` finds the owners of
//! kernel sockets from /proc.

use super::socket::SocketLine;
use crate::commands::stat::quoted;
use core::fmt::Write;
use core::net::SocketAddr;
use ginnel::broker::SOCKET_NAME;
use ginnel::inspect;
use ginnel::run_dir::RunningStack;
use ginnel_posix_ops::descriptor_report::{self, ReportEntry};
use std::collections::HashMap;
use std::fs;

/// A process that owns a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SocketUser {
    program: String,
    pid: u32,
    /// `None` if the socket has no descriptor.
    fd: Option<i32>,
}

/// Identifies a socket by its protocol and its addresses. Sockets that share an address (`SO_REUSEPORT`)
/// are not told apart.
type SocketKey = (bool, SocketAddr, Option<SocketAddr>);

/// The owners of a stack's sockets.
#[derive(Debug, Default)]
pub struct SocketUsers {
    by_socket: HashMap<SocketKey, Vec<SocketUser>>,
    /// The stack's own process, if it has no other programs: then all sockets are its own.
    own_process: Option<SocketUser>,
}

fn program_name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().into()
}

impl SocketUsers {
    /// Reads the descriptor reports of the stack's processes. Those that this user may not read are left out,
    /// as are those that have just ended.
    pub fn read(running: &RunningStack) -> Self {
        let mut users = Self::default();
        if !running.path.join(SOCKET_NAME).exists() {
            // The number in the PID namespace of this command, unlike `running.pid`.
            let owner = inspect::owner_pid(&running.path).ok().flatten();
            users.own_process = owner.map(|owner| {
                let pid = owner.as_raw_nonzero().get().cast_unsigned();
                SocketUser { program: program_name(pid), pid, fd: None }
            });
            return users;
        }
        let mut pids: Vec<u32> =
            inspect::list_processes(&running.path).unwrap_or_default().into_iter().map(|of| of.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        // 0: the process is in a PID namespace that is not visible here, or has sent no message yet.
        for pid in pids.into_iter().filter(|pid| *pid != 0) {
            users.add_process(pid);
        }
        users
    }

    fn add_process(&mut self, pid: u32) {
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return };
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        let mut fds: Vec<i32> = entries.flatten().filter_map(number).collect();
        fds.sort_unstable();
        let Ok(Some(report)) = descriptor_report::read(pid, &fds) else { return };
        let program = program_name(pid);
        for (fd, entry) in fds.into_iter().zip(report) {
            if let Some(key) = entry.and_then(key_of_entry) {
                let user = SocketUser { program: program.clone(), pid, fd: Some(fd) };
                self.by_socket.entry(key).or_default().push(user);
            }
        }
    }

    fn of(&self, socket: &SocketLine<'_>) -> &[SocketUser] {
        let users = self.by_socket.get(&key_of_line(socket));
        users.map_or(self.own_process.as_slice(), Vec::as_slice)
    }

    /// Formats the owners of a socket as `ss` does. Empty if none is known.
    pub fn column(&self, socket: &SocketLine<'_>) -> String {
        let users = self.of(socket);
        if users.is_empty() {
            return String::new();
        }
        let mut text = String::from("users:(");
        for (at, SocketUser { program, pid, fd }) in users.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            // Writing to a string cannot fail.
            let _ = write!(text, "{comma}({},pid={pid}", quoted(program));
            let _ = fd.map_or(Ok(()), |fd| write!(text, ",fd={fd}"));
            text.push(')');
        }
        text.push(')');
        text
    }

    /// Formats the owners of a socket as a JSON array.
    pub fn json(&self, socket: &SocketLine<'_>) -> String {
        let user = |SocketUser { program, pid, fd }: &SocketUser| {
            let fd = fd.map_or("null".into(), |fd| fd.to_string());
            format!("{{\"program\":{},\"pid\":{pid},\"fd\":{fd}}}", quoted(program))
        };
        format!("[{}]", self.of(socket).iter().map(user).collect::<Vec<_>>().join(","))
    }
}

fn key_of_line(socket: &SocketLine<'_>) -> SocketKey {
    let has_peer = socket.peer.port() != 0 || !socket.peer.ip().is_unspecified();
    (socket.netid == "udp", socket.local, has_peer.then_some(socket.peer))
}

/// Returns which socket of the stack a descriptor refers to, if any.
fn key_of_entry(entry: ReportEntry) -> Option<SocketKey> {
    match entry {
        ReportEntry::Listener(local, _) => Some((false, local, None)),
        ReportEntry::Stream([local, remote]) => Some((false, local, Some(remote))),
        ReportEntry::Udp([local, _], _) if local.port() == 0 => None,
        ReportEntry::Udp([local, peer], _) => Some((true, local, (peer.port() != 0).then_some(peer))),
        ReportEntry::Unconnected
        | ReportEntry::Bound(_)
        | ReportEntry::Epoll
        | ReportEntry::Kernel(..)
        | ReportEntry::Internal => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::socket::Columns;
    use super::*;

    #[test]
    fn owners_have_the_format_of_ss() {
        let columns = Columns::new("shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer");
        let mut users = SocketUsers::default();
        let local = "10.0.0.1:80".parse().unwrap();
        let entries = [
            (7, 5, ReportEntry::Listener(local, true)),
            (8, 5, ReportEntry::Listener(local, true)),
            (8, 9, ReportEntry::Stream([local, "10.0.0.2:999".parse().unwrap()])),
        ];
        for (pid, fd, entry) in entries {
            let user = SocketUser { program: "ng\"inx".into(), pid, fd: Some(fd) };
            users.by_socket.entry(key_of_entry(entry).unwrap()).or_default().push(user);
        }
        let column = |state, peer| {
            let line = format!("0\ttcp\t{state}\t0\t0\t10.0.0.1:80\t{peer}");
            let socket = columns.socket(&line).unwrap();
            (users.column(&socket), users.json(&socket))
        };
        let both = r#"users:(("ng\"inx",pid=7,fd=5),("ng\"inx",pid=8,fd=5))"#;
        assert_eq!(column("LISTEN", "0.0.0.0:0").0, both);
        let (text, json) = column("ESTAB", "10.0.0.2:999");
        assert_eq!(text, r#"users:(("ng\"inx",pid=8,fd=9))"#);
        assert_eq!(json, r#"[{"program":"ng\"inx","pid":8,"fd":9}]"#);
        assert_eq!(column("ESTAB", "10.0.0.2:998"), (String::new(), "[]".into()));
        users.own_process = Some(SocketUser { program: "ginnel".into(), pid: 3, fd: None });
        let line = "0\ttcp\tLISTEN\t0\t0\t10.0.0.1:81\t0.0.0.0:0";
        let socket = columns.socket(line).unwrap();
        assert_eq!(users.column(&socket), r#"users:(("ginnel",pid=3))"#);
        assert_eq!(users.json(&socket), r#"[{"program":"ginnel","pid":3,"fd":null}]"#);
    }
}
