//! `ginnel ss`: shows the sockets of a running stack in the columns of Linux's `ss`.

mod filter;
mod show;
mod socket;
mod stages;
mod users;

use crate::failure::Failure;
use clap::Args;
use core::time::Duration;
use filter::Filter;
use ginnel::inspect::{self, SocketCloser};
use ginnel::run_dir::{self, RunningStack};
use ginnel_apps::units::parse_duration;
use socket::{Columns, SocketLine};
use stages::StagesByConn;
use std::io::{self, BufRead, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use users::SocketUsers;

/// Options of `ginnel ss`.
#[derive(Clone, Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "ss has them")]
pub struct SsOptions {
    /// Name of the stack, if several run (see ginnel stat --list), then a filter as in ss: state established,
    /// exclude time-wait, sport = :80, dport gt :1024, src 10.0.0.0/8, dst 10.1.0.1:443, not …. A socket is
    /// shown if it meets all conditions.
    #[arg(value_name = "NAME|FILTER")]
    words: Vec<String>,

    /// Show TCP sockets.
    #[arg(long, short)]
    tcp: bool,

    /// Show UDP sockets.
    #[arg(long, short)]
    udp: bool,

    /// Show only listening sockets. Recv-Q is the number of connections that wait to be accepted, Send-Q the
    /// backlog.
    #[arg(long, short)]
    listening: bool,

    /// Show all sockets, also listening sockets and those in a handshake or in TIME-WAIT.
    #[arg(long, short)]
    all: bool,

    /// Show only IPv4 sockets.
    #[arg(long, short = '4')]
    ipv4: bool,

    /// Show only IPv6 sockets.
    #[arg(long, short = '6')]
    ipv6: bool,

    /// Show TCP details of each connection: round-trip time, windows, retransmissions.
    #[arg(long, short)]
    info: bool,

    /// Sample the connections that are shown for this long (such as 2 or 500ms), and show how long data take
    /// on their way: "receive" from the device into the program's buffer, "read" until the program has read
    /// them, "answer" until the stack has the program's next bytes, "send" until the device has them. For
    /// each the smoothed mean and the maximum in microseconds; then the numbers of samples. Only connections
    /// of programs on the stack ("ginnel run") that exist at the beginning are sampled. It is an error if
    /// more than 1024 connections are shown, or if none of them is sampled. Only the stack's own user and
    /// root may do that.
    #[arg(long, value_name = "SECONDS", value_parser = parse_duration)]
    #[arg(conflicts_with_all = ["kill", "summary"])]
    stages: Option<Duration>,

    /// Show the timer of each connection: its type, the remaining time, and how often it has expired.
    #[arg(long, short)]
    options: bool,

    /// Show the memory of each socket as ss does: received bytes (r) and their limit (rb), bytes to be sent
    /// (w) and their limit (tb), unused allocation (f), drops (d); then the socket's total memory in bytes.
    #[arg(long, short)]
    memory: bool,

    /// Show the program, the process id and the descriptor of each process that has the socket. Sockets that
    /// share an address and port (SO_REUSEPORT) show the processes of all of them. Processes of other users
    /// are shown to root only.
    #[arg(long, short)]
    processes: bool,

    /// Close the sockets that are shown, and print those that were closed. The programs get ECONNABORTED, and
    /// the peers of connections RST. As in ss, a UDP socket reports the error and is disconnected, but stays
    /// bound. Without a filter this closes every connection of the stack! Only the stack's own user and root
    /// may do that.
    #[arg(short = 'K', long, conflicts_with = "summary")]
    kill: bool,

    /// Accepted for compatibility with ss: addresses and ports are always shown as numbers.
    #[arg(long, short)]
    numeric: bool,

    /// Do not print the line of column names.
    #[arg(long, short = 'H')]
    no_header: bool,

    /// Print the number of sockets in each state.
    #[arg(long, short)]
    summary: bool,

    /// Print a JSON object per line for each socket.
    #[arg(long, conflicts_with = "summary")]
    json: bool,
}

/// Longest line of an answer in bytes.
const LINE_BYTES_MAX: u64 = 1 << 14;

/// Prints the sockets.
pub fn run(options: &SsOptions) -> Result<(), Failure> {
    let (name, words) = match options.words.split_first() {
        Some((first, rest)) if !filter::is_keyword(first) => (Some(first.as_str()), rest),
        _ => (None, &options.words[..]),
    };
    let filter = Filter::parse(words).map_err(Failure::usage)?;
    let running = run_dir::find(name).map_err(|e| Failure::running(e.to_string()))?;
    let answer = connect(&running)?;
    let shown = if options.kill {
        kill(options, &filter, &running, answer)
    } else {
        let (stages, answer) = match options.stages {
            Some(interval) => {
                let stages = StagesByConn::sample(options, &filter, &running, answer, interval)?;
                (stages, connect(&running)?)
            }
            None => (StagesByConn::default(), answer),
        };
        let users = options.processes.then(|| SocketUsers::read(&running));
        show_all(options, &filter, (users.as_ref(), &stages), answer)
    };
    shown.or_else(|failure| if failure.is_closed_pipe() { Ok(()) } else { Err(failure) })
}

/// Requests the sockets of a stack.
fn connect(running: &RunningStack) -> Result<BufReader<UnixStream>, Failure> {
    let stream = inspect::list_sockets(&running.path).map_err(|e| unreachable_shards(running, &e))?;
    Ok(BufReader::new(stream))
}

/// Returns the error for shards that do not accept a connection. The process of the stack may run without
/// shards: they have died, and are being started again.
pub fn unreachable_shards(running: &RunningStack, error: &io::Error) -> Failure {
    let name = &running.name;
    let problem = match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            format!("the shards of the stack \"{name}\" do not run, and are started again if possible")
        }
        _ => format!("the stack \"{name}\" does not answer ({error})"),
    };
    Failure::running(format!("{problem}: see \"ginnel log {name}\""))
}

/// Calls `visit` with each socket of a stack.
pub fn for_each_socket(
    running: &RunningStack,
    mut visit: impl FnMut(&SocketLine<'_>),
) -> Result<(), Failure> {
    let mut lines = AnswerLines(connect(running)?);
    let columns = lines.columns()?;
    lines.for_each(&columns, |socket, _| {
        visit(socket);
        Ok(())
    })
}

/// Reads an answer of the stack line by line.
struct AnswerLines<R>(R);

impl<R: BufRead> AnswerLines<R> {
    /// Reads the next line without its end.
    fn next(&mut self, line: &mut String) -> Result<(), Failure> {
        line.clear();
        match self.0.by_ref().take(LINE_BYTES_MAX).read_line(line) {
            Ok(_) if !line.ends_with('\n') => Err(Failure::running("the answer of the stack is truncated")),
            Ok(_) => {
                line.truncate(line.trim_end_matches('\n').len());
                Ok(())
            }
            Err(e) => {
                Err(Failure::running(format!("the answer of the stack: {}", inspect::explain_timeout(e))))
            }
        }
    }

    /// Reads the line with the names of the fields.
    fn columns(&mut self) -> Result<Columns, Failure> {
        let mut line = String::new();
        self.next(&mut line)?;
        match line.strip_prefix("!\t") {
            Some(problem) => Err(Failure::running(problem)),
            None => Ok(Columns::new(&line)),
        }
    }

    /// Calls `visit` with each socket and its line. A problem that the stack reports in between is returned
    /// after the last socket.
    fn for_each(
        &mut self,
        columns: &Columns,
        mut visit: impl FnMut(&SocketLine<'_>, &str) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut line = String::new();
        let mut problem = None;
        loop {
            self.next(&mut line)?;
            if line == "." {
                return problem.map_or(Ok(()), Err);
            }
            if let Some(text) = line.strip_prefix("!\t") {
                problem = Some(Failure::running(text));
                continue;
            }
            let socket = columns
                .socket(&line)
                .ok_or_else(|| Failure::running("the answer of the stack is malformed"))?;
            visit(&socket, &line)?;
        }
    }
}

fn show_all(
    options: &SsOptions,
    filter: &Filter,
    (users, stages): (Option<&SocketUsers>, &StagesByConn),
    answer: impl BufRead,
) -> Result<(), Failure> {
    let mut lines = AnswerLines(answer);
    let columns = lines.columns()?;
    let mut out = BufWriter::new(io::stdout().lock());
    let mut summary = show::SocketSummary::default();
    if !options.json && !options.summary && !options.no_header {
        show::header(&mut out, users.is_some())?;
    }
    let listed = lines.for_each(&columns, |socket, line| {
        if options.summary {
            summary.add(socket);
        } else if is_wanted(options, filter, socket) {
            if options.json {
                let users = users.map(|users| users.json(socket));
                show::json(&mut out, &columns, line, [("users", users), ("stages", stages.json(socket))])?;
            } else {
                show::row(&mut out, socket, options, (users, stages))?;
            }
        }
        Ok(())
    });
    if options.summary {
        write!(out, "{}", summary.table())?;
    }
    out.flush()?;
    listed
}

/// Closes the sockets that are wanted, and prints them. The list is complete before the first one is closed.
fn kill(
    options: &SsOptions,
    filter: &Filter,
    running: &RunningStack,
    answer: impl BufRead,
) -> Result<(), Failure> {
    let mut lines = AnswerLines(answer);
    let columns = lines.columns()?;
    let mut wanted = Vec::new();
    lines.for_each(&columns, |socket, line| {
        if is_wanted(options, filter, socket) {
            wanted.push(line.to_owned());
        }
        Ok(())
    })?;
    let users = options.processes.then(|| SocketUsers::read(running));
    let failed = |e| Failure::running(format!("the stack \"{}\" closes no sockets: {e}", running.name));
    let mut closer = SocketCloser::connect(&running.path).map_err(|e| unreachable_shards(running, &e))?;
    let mut out = BufWriter::new(io::stdout().lock());
    let mut shown: Result<(), Failure> = Ok(());
    if !options.json && !options.no_header {
        shown = show::header(&mut out, users.is_some()).map_err(Failure::from);
    }
    for line in &wanted {
        let Some(socket) = columns.socket(line) else { continue };
        let handle = socket.text("sk").ok_or_else(|| {
            Failure::running(format!(
                "the stack \"{}\" is of an earlier version, which does not close this socket: start it again",
                running.name
            ))
        })?;
        if !closer.close(socket.shard, handle, socket.local, socket.peer).map_err(failed)? {
            // It has ended in the meantime.
            continue;
        }
        // All of them are closed, even if nobody reads their list to its end.
        if shown.is_ok() {
            let users = users.as_ref();
            shown = match options.json {
                true => {
                    let users = users.map(|users| users.json(&socket));
                    show::json(&mut out, &columns, line, [("users", users), ("stages", None)])
                }
                false => show::row(&mut out, &socket, options, (users, &StagesByConn::default())),
            }
            .map_err(Failure::from);
        }
    }
    shown.and_then(|()| out.flush().map_err(Failure::from))
}

/// Returns whether a socket is to be shown. A filter for states replaces --all and --listening.
fn is_wanted(options: &SsOptions, filter: &Filter, socket: &SocketLine<'_>) -> bool {
    let protocol = options.tcp == options.udp || options.tcp == (socket.netid == "tcp");
    let family = options.ipv4 == options.ipv6 || options.ipv4 == socket.local.is_ipv4();
    let waits = matches!(socket.state, "LISTEN" | "UNCONN");
    let usual = !waits && !matches!(socket.state, "TIME-WAIT" | "SYN-RECV");
    let state = filter.has_states() || options.all || if options.listening { waits } else { usual };
    protocol && family && state && filter.matches(socket)
}

#[cfg(test)]
mod tests {
    use super::{Filter, SsOptions, StagesByConn, show_all};
    use clap::{Args, Command, FromArgMatches};

    /// Parses options.
    pub fn options(words: &[&str]) -> SsOptions {
        let command = SsOptions::augment_args(Command::new("ss")).no_binary_name(true);
        SsOptions::from_arg_matches(&command.get_matches_from(words)).unwrap()
    }

    /// Returns the error for an answer that cannot be shown.
    fn refused(answer: &[u8]) -> String {
        show_all(&options(&["-s"]), &Filter::default(), (None, &StagesByConn::default()), answer)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_malformed_answer_is_an_error() {
        const NAMES: &str = "shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer\n";
        let (early, garbled) =
            ("the answer of the stack is truncated", "the answer of the stack is malformed");
        for (answer, expected) in [
            (String::new(), early),
            ("shard".into(), early),
            (NAMES.into(), early),
            ("x".repeat(1 << 20), early),
            (format!("{NAMES}0\ttcp\tESTAB\n.\n"), garbled),
            (format!("{NAMES}0\ttcp\tESTAB\t0\t0\there\tthere\n.\n"), garbled),
            (format!("{NAMES}\x1b[2J\ttcp\tESTAB\t0\t0\t1.2.3.4:5\t1.2.3.4:5\n.\n"), garbled),
            ("state\n0\n.\n".into(), garbled),
            ("!\t8 other clients are being served\n".into(), "8 other clients are being served"),
            (format!("{NAMES}!\tshard 1 has ended\n.\n"), "shard 1 has ended"),
        ] {
            assert_eq!(refused(answer.as_bytes()), expected, "{answer:.100}");
        }
        assert!(refused(b"\xff\xfe\n").starts_with("the answer of the stack: "));
    }
}
