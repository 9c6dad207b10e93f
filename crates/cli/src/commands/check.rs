//! `ginnel check`: shows whether a process runs on a stack, since when, and which of its sockets the stack
//! handles.

mod kernel;
mod process;

use super::stat::quoted;
use crate::failure::Failure;
use clap::Args;
use ginnel::inspect;
use ginnel::run_dir::{self, RunningStack, restarts};
use ginnel_posix_ops::descriptor_report::{self, KernelReason, ReportEntry};
use kernel::KernelSocket;
use process::{EPOLL_INODE, InspectedProcess, StackFinding};
use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest time without a byte of the shards' answer after which the shards count as stopped.
const SHARDS_TIMEOUT: Duration = Duration::from_secs(2);

/// Options of `ginnel check`.
#[derive(Clone, Debug, Args)]
pub struct CheckOptions {
    /// Process id.
    #[arg(value_name = "PID", value_parser = clap::value_parser!(u32).range(1..=4_194_304))]
    pid: u32,

    /// Print a JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// A socket or epoll descriptor of the process.
struct DescriptorRow {
    fd: i32,
    kind: &'static str,
    local: String,
    remote: String,
    state: String,
    location: &'static str,
    why: String,
}

/// The stack that a process is attached to.
struct Attachment {
    stack: String,
    since_ms: u64,
}

/// States of the stack's connections by local and remote address.
type ConnectionStates = BTreeMap<(String, String), String>;

/// Prints the report. The exit status is 1 if the process is attached to no stack, or if the shards of its
/// stack do not answer.
pub fn run(options: &CheckOptions) -> Result<(), Failure> {
    let process = InspectedProcess::find(options.pid)?;
    // First of all, because another user may not see why the process is not attached.
    let sockets = process.sockets()?;
    let (attachment, running, why_not) = match find_attachment(&process)? {
        Ok((attachment, running)) => (Some(attachment), Some(running), None),
        Err(stack) => (None, None, Some(process.why_not_attached(&stack))),
    };
    let (states, problem) = match running.as_ref().map(connection_states) {
        Some(Ok(states)) => (states, None),
        Some(Err(problem)) => (None, Some(problem)),
        None => (None, None),
    };
    let rows = rows(&process, &sockets, why_not.as_deref(), states.as_ref())?;
    let attachment = attachment.filter(|_| problem.is_none());
    let why_not = why_not.or(problem);
    let mut out = io::stdout().lock();
    let written = if options.json {
        writeln!(out, "{}", json(&process, attachment.as_ref(), why_not.as_deref(), &rows))
    } else {
        writeln!(out, "{}", headline(&process, attachment.as_ref(), why_not.as_deref()))
            .and_then(|()| if rows.is_empty() { Ok(()) } else { write!(out, "{}", table(&rows)) })
    };
    match written {
        // The reader closed the pipe: that is no error.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
        written => written?,
    }
    if attachment.is_some() { Ok(()) } else { Err(Failure::program(1)) }
}

/// Finds the stack that lists the process as attached: one of this user's stacks, or the one on which the
/// process was started, which may be in the runtime directory of another user. The inner error describes the
/// stack on which the process was started.
fn find_attachment(
    process: &InspectedProcess,
) -> Result<Result<(Attachment, RunningStack), StackFinding>, Failure> {
    let mut candidates = run_dir::running().map_err(|e| Failure::running(e.to_string()))?;
    let own_stack = process.stack_directory();
    let mut finding = match &own_stack {
        None => StackFinding::None,
        Some(path) => match run_dir::stack_at(path) {
            Ok(None) => StackFinding::Ended,
            Ok(Some(running)) => {
                candidates.retain(|other| other.path != running.path);
                let name = running.name.clone();
                // First, because a stack that does not answer takes long.
                candidates.insert(0, running);
                StackFinding::NotListed(name)
            }
            Err(e) => StackFinding::NoAnswer(e.to_string()),
        },
    };
    for running in candidates {
        let users = match inspect::list_processes(&running.path) {
            Ok(users) => users,
            Err(e) => {
                // Another stack that does not answer is left out: it may have just ended.
                if own_stack.as_ref() == Some(&running.path) {
                    let RunningStack { name, pid, .. } = &running;
                    finding = StackFinding::NoAnswer(format!(
                        "its stack \"{name}\" (process {pid}) does not answer: {e}"
                    ));
                }
                continue;
            }
        };
        if let Some(user) = users.iter().rev().find(|user| user.pid == process.pid) {
            let name = &running.name;
            if restarts::has_failed(&running.path) {
                return Ok(Err(StackFinding::NoAnswer(format!(
                    "the shards of its stack \"{name}\" could not be started again: see ginnel log {name}"
                ))));
            }
            let attachment = Attachment { stack: name.clone(), since_ms: user.since_ms };
            return Ok(Ok((attachment, running)));
        }
    }
    Ok(Err(finding))
}

/// Returns the states of the stack's connections, or `None` if the stack refuses to list them: this user may
/// not ask, or too many others do.
///
/// # Errors
/// The shards do not run, or do not answer. The text says which.
fn connection_states(running: &RunningStack) -> Result<Option<ConnectionStates>, String> {
    let name = &running.name;
    let silent = |cause: &str| format!("the shards of its stack \"{name}\" {cause}: see ginnel log {name}");
    let failed = |e: io::Error| match e.kind() {
        // A read that timed out.
        ErrorKind::WouldBlock => {
            let seconds = SHARDS_TIMEOUT.as_secs();
            silent(&format!("do not answer within {seconds} s, because they are stopped or overloaded"))
        }
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => silent("do not run"),
        _ => silent(&format!("do not answer ({e})")),
    };
    let answer = match inspect::list_sockets(&running.path) {
        Err(e) if e.kind() == ErrorKind::PermissionDenied => return Ok(None),
        answer => answer.map_err(failed)?,
    };
    answer.set_read_timeout(Some(SHARDS_TIMEOUT)).map_err(failed)?;
    read_states(BufReader::new(answer)).map_err(failed)
}

/// Reads the answer to [`inspect::list_sockets`]. Returns `None` for a refusal.
///
/// # Errors
/// The answer ends early, or a shard did not answer.
fn read_states(answer: impl BufRead) -> io::Result<Option<ConnectionStates>> {
    let mut lines = answer.lines();
    let names = lines.next().ok_or(ErrorKind::UnexpectedEof)??;
    if names.starts_with('!') {
        return Ok(None);
    }
    let column = |name: &str| names.split('\t').position(|known| known == name);
    let (Some(state), Some(local), Some(peer)) = (column("state"), column("local"), column("peer")) else {
        return Ok(None);
    };
    let mut states = ConnectionStates::new();
    for line in lines {
        let line = line?;
        if line == "." {
            return Ok(Some(states));
        }
        if let Some(problem) = line.strip_prefix("!\t") {
            return Err(io::Error::other(problem.to_owned()));
        }
        let cells: Vec<&str> = line.split('\t').collect();
        if let (Some(state), Some(local), Some(peer)) = (cells.get(state), cells.get(local), cells.get(peer))
        {
            states.insert(((*local).into(), (*peer).into()), (*state).into());
        }
    }
    Err(ErrorKind::UnexpectedEof.into())
}

fn rows(
    process: &InspectedProcess,
    sockets: &[(i32, u64)],
    why_not: Option<&str>,
    states: Option<&ConnectionStates>,
) -> Result<Vec<DescriptorRow>, Failure> {
    let fds: Vec<i32> = sockets.iter().map(|(fd, _)| *fd).collect();
    let cannot = |e| Failure::running(format!("descriptors of process {}: {e}", process.pid));
    let entries = match why_not {
        None => descriptor_report::read(process.pid, &fds).map_err(cannot)?.unwrap_or_default(),
        // A descriptor report of a process that no stack lists is out of date.
        Some(_) => Vec::new(),
    };
    let kernel_sockets = kernel::sockets(process.pid);
    let entry_of = |at: usize| entries.get(at).copied().flatten();
    let internal_inodes: Vec<u64> = sockets
        .iter()
        .enumerate()
        .filter(|(at, _)| entry_of(*at) == Some(ReportEntry::Internal))
        .map(|(_, (_, inode))| *inode)
        .collect();
    let dual_listener_ports: Vec<u16> = entries
        .iter()
        .filter_map(|entry| match entry {
            Some(ReportEntry::Listener(at, true)) => Some(at.port()),
            _ => None,
        })
        .collect();
    let mut rows = Vec::new();
    for (at, (fd, inode)) in sockets.iter().enumerate() {
        let nothing = String::new;
        let row = |kind, local: String, remote: String, state: &str, place, why: &str| DescriptorRow {
            fd: *fd,
            kind,
            local,
            remote,
            state: state.into(),
            location: place,
            why: why.into(),
        };
        rows.push(match entry_of(at) {
            Some(ReportEntry::Internal) => continue,
            Some(ReportEntry::Epoll) => row(
                "epoll",
                nothing(),
                nothing(),
                "",
                "both",
                "waits for sockets of the stack and of the kernel",
            ),
            Some(ReportEntry::Unconnected) => row(
                "tcp",
                nothing(),
                nothing(),
                "UNCONN",
                "open",
                "undecided until it is bound, listens or connects",
            ),
            Some(ReportEntry::Bound(at)) => {
                row("tcp", at.to_string(), nothing(), "UNCONN", "stack", "the stack has the address")
            }
            Some(ReportEntry::Listener(at, true)) => row(
                "tcp",
                at.to_string(),
                nothing(),
                "LISTEN",
                "both",
                "wildcard address: accepts connections from the stack and from the kernel",
            ),
            Some(ReportEntry::Listener(at, false)) => {
                row("tcp", at.to_string(), nothing(), "LISTEN", "stack", "the stack has the address")
            }
            Some(ReportEntry::Stream(ends)) => {
                let [local, remote] = ends.map(|end| end.to_string());
                let state = states.map_or("", |states| {
                    states.get(&(local.clone(), remote.clone())).map_or("CLOSED", String::as_str)
                });
                row("tcp", local, remote, state, "stack", "reached over the stack")
            }
            Some(ReportEntry::Udp([own, _], _)) if own.port() == 0 => row(
                "udp",
                nothing(),
                nothing(),
                "UNCONN",
                "open",
                "undecided until it is bound, connects or sends",
            ),
            Some(ReportEntry::Udp([own, peer], kernel)) => {
                let connected = peer.port() != 0;
                let (location, why) = match kernel {
                    true => ("both", "wildcard address: receives from the stack and from the kernel"),
                    false => ("stack", "reached over the stack"),
                };
                let remote = if connected { peer.to_string() } else { nothing() };
                row("udp", own.to_string(), remote, if connected { "ESTAB" } else { "UNCONN" }, location, why)
            }
            // Not shown: proxy descriptors that are kept for the next socket, and the kernel's epoll set that
            // belongs to a descriptor listed above.
            None if internal_inodes.contains(inode) || why_not.is_none() && *inode == EPOLL_INODE => continue,
            entry => {
                let known = if *inode == EPOLL_INODE {
                    KernelSocket::epoll()
                } else {
                    kernel_sockets.get(inode).cloned().unwrap_or_default()
                };
                let why = match (why_not, entry) {
                    (Some(_), _) if known.kind == "unix" => why_on_kernel(&known, &[]),
                    (Some(why_not), _) => format!("not attached: {why_not}"),
                    (None, Some(ReportEntry::Kernel(why, of))) if of == *inode => match why {
                        KernelReason::Unreachable => "the stack has no route to the destination".into(),
                        KernelReason::NotLocal => "the stack does not have the address".into(),
                    },
                    (None, _) => why_on_kernel(&known, &dual_listener_ports),
                };
                let KernelSocket { kind, local, remote, state, .. } = known;
                DescriptorRow { fd: *fd, kind, local, remote, state, location: "kernel", why }
            }
        });
    }
    Ok(rows)
}

/// Returns why a socket without an entry in the library's report is on the kernel.
fn why_on_kernel(socket: &KernelSocket, dual_listener_ports: &[u16]) -> String {
    match socket.kind {
        "unix" => "Unix socket",
        "udp" => "created inside libc, or before the library was loaded",
        "tcp" if dual_listener_ports.contains(&socket.port) => {
            "accepted by the kernel socket of a wildcard listener"
        }
        "tcp" => "created, inherited or received before the library was loaded",
        _ => "neither TCP nor UDP",
    }
    .into()
}

fn headline(process: &InspectedProcess, attachment: Option<&Attachment>, why_not: Option<&str>) -> String {
    let subject = format!("process {} ({})", process.pid, process.name);
    match attachment {
        Some(attachment) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
            let seconds = now.saturating_sub(attachment.since_ms) / 1000;
            format!(
                "{subject} is accelerated by the stack \"{}\", for {} now",
                attachment.stack,
                format_age(seconds)
            )
        }
        None => format!("{subject} is not accelerated: {}", why_not.unwrap_or_default()),
    }
}

fn format_age(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, ..) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

/// Formats the rows as a table with the columns of `ss`.
fn table(rows: &[DescriptorRow]) -> String {
    let heads = ["Fd", "Kind", "Local", "Remote", "State", "Where", "Why"].map(String::from);
    let cells = |row: &DescriptorRow| {
        let or_none = |text: &str| if text.is_empty() { "-".to_string() } else { text.into() };
        [
            row.fd.to_string(),
            row.kind.into(),
            or_none(&row.local),
            or_none(&row.remote),
            or_none(&row.state),
            row.location.into(),
            row.why.clone(),
        ]
    };
    let lines: Vec<[String; 7]> = core::iter::once(heads).chain(rows.iter().map(cells)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 7] = core::array::from_fn(width);
    let mut text = String::new();
    for line in &lines {
        let padded = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(padded.collect::<Vec<_>>().join(" ").trim_end());
        text.push('\n');
    }
    text
}

fn json(
    process: &InspectedProcess,
    attachment: Option<&Attachment>,
    why_not: Option<&str>,
    rows: &[DescriptorRow],
) -> String {
    let text = |text: Option<&str>| text.map_or("null".into(), quoted);
    let row = |row: &DescriptorRow| {
        format!(
            "{{\"fd\":{},\"kind\":{},\"local\":{},\"remote\":{},\"state\":{},\"where\":{},\"why\":{}}}",
            row.fd,
            quoted(row.kind),
            quoted(&row.local),
            quoted(&row.remote),
            quoted(&row.state),
            quoted(row.location),
            quoted(&row.why)
        )
    };
    let rows: Vec<String> = rows.iter().map(row).collect();
    format!(
        "{{\"pid\":{},\"program\":{},\"accelerated\":{},\"stack\":{},\"since_ms\":{},\"why_not\":{},\"sockets\":[{}]}}",
        process.pid,
        quoted(&process.name),
        attachment.is_some(),
        text(attachment.map(|by| by.stack.as_str())),
        attachment.map_or("null".into(), |by| by.since_ms.to_string()),
        text(why_not),
        rows.join(",")
    )
}

#[cfg(test)]
mod tests {
    use super::{KernelSocket, format_age, read_states, why_on_kernel};

    #[test]
    fn kernel_sockets_have_a_reason() {
        let why = |kind, port| why_on_kernel(&KernelSocket { kind, port, ..KernelSocket::default() }, &[80]);
        assert!(
            why("tcp", 80).contains("wildcard listener") && why("tcp", 81).contains("before the library")
        );
        assert!(why("udp", 80).contains("before the library"), "the stack serves UDP, too");
        assert_eq!(why("other", 0), "neither TCP nor UDP");
    }

    #[test]
    fn states_need_a_whole_answer() {
        let read = |text: &str| read_states(text.as_bytes());
        let listed = read("state\tlocal\tpeer\nESTAB\ta:1\tb:2\n.\n").unwrap().unwrap();
        assert_eq!(listed[&("a:1".into(), "b:2".into())], "ESTAB");
        assert!(read("!\t8 other clients are being served\n").unwrap().is_none());
        for incomplete in ["", "state\tlocal\tpeer\n", "state\tlocal\tpeer\n!\tshard 0 does not answer\n.\n"]
        {
            assert!(read(incomplete).is_err(), "{incomplete:?}");
        }
    }

    #[test]
    fn ages_have_at_most_two_units() {
        let ages: Vec<String> = [0, 59, 61, 3600, 7322, 90_000].into_iter().map(format_age).collect();
        assert_eq!(ages, ["0 s", "59 s", "1 min 1 s", "1 h 0 min", "2 h 2 min", "1 d 1 h"]);
    }
}
