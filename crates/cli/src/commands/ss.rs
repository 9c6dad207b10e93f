//! `ginnel ss`: the sockets of a running stack, in the columns of Linux's `ss`.

mod filter;
mod show;
mod socket;

use crate::failure::Failure;
use clap::Args;
use filter::Filter;
use ginnel::{inspect, run_dir};
use socket::{Columns, SocketLine};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};

/// Options of `ginnel ss`.
#[derive(Clone, Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "ss has them")]
pub struct SsOptions {
    /// The stack, if several run (see ginnel stat --list), and then a filter as ss has it: state established, exclude time-wait, sport = :80,
    /// dport gt :1024, src 10.0.0.0/8, dst 10.1.0.1:443, not …; all of them must hold.
    #[arg(value_name = "NAME|FILTER")]
    words: Vec<String>,

    /// TCP.
    #[arg(long, short)]
    tcp: bool,

    /// UDP.
    #[arg(long, short)]
    udp: bool,

    /// Those that listen, and no others. Recv-Q is how many connections wait to be accepted, Send-Q how many may.
    #[arg(long, short)]
    listening: bool,

    /// All: those that listen and those that are in a handshake or in TIME-WAIT, too.
    #[arg(long, short)]
    all: bool,

    /// IPv4 only.
    #[arg(long, short = '4')]
    ipv4: bool,

    /// IPv6 only.
    #[arg(long, short = '6')]
    ipv6: bool,

    /// What TCP knows of each connection: round trip time, windows, what was lost.
    #[arg(long, short)]
    info: bool,

    /// What each connection waits for: kind of timer, how much longer, how often it has run out.
    #[arg(long, short)]
    options: bool,

    /// What each socket occupies: bytes received (r, of rb at the most) and to be sent (w, of tb), room in their memory (f), what was dropped (d), as ss
    /// has it; and all its memory in bytes.
    #[arg(long, short)]
    memory: bool,

    /// Addresses and ports are always numbers: for those who are used to say so.
    #[arg(long, short)]
    numeric: bool,

    /// Without the line of column names.
    #[arg(long, short = 'H')]
    no_header: bool,

    /// How many sockets there are in each state.
    #[arg(long, short)]
    summary: bool,

    /// For programs: a JSON object on a line for each socket.
    #[arg(long, conflicts_with = "summary")]
    json: bool,
}

/// No line of an answer is longer.
const LINE_BYTES_MAX: u64 = 1 << 14;

/// Shows sockets.
pub fn run(options: &SsOptions) -> Result<(), Failure> {
    let (name, words) = match options.words.split_first() {
        Some((first, rest)) if !filter::is_keyword(first) => (Some(first.as_str()), rest),
        _ => (None, &options.words[..]),
    };
    let filter = Filter::parse(words).map_err(Failure::usage)?;
    let running = run_dir::find(name).map_err(|e| Failure::running(e.to_string()))?;
    let stream = inspect::list_sockets(&running.path)
        .map_err(|e| Failure::running(format!("the stack \"{}\" cannot be asked: {e}", running.name)))?;
    let shown = show_all(options, &filter, BufReader::new(stream));
    shown.or_else(|failure| if failure.is_closed_pipe() { Ok(()) } else { Err(failure) })
}

fn show_all(options: &SsOptions, filter: &Filter, mut answer: impl BufRead) -> Result<(), Failure> {
    let cut = || Failure::running("the answer of the stack ends too early");
    let mut line = String::new();
    let mut next = |line: &mut String| -> Result<(), Failure> {
        line.clear();
        match answer.by_ref().take(LINE_BYTES_MAX).read_line(line) {
            Ok(_) if !line.ends_with('\n') => Err(cut()),
            Ok(_) => {
                line.truncate(line.trim_end_matches('\n').len());
                Ok(())
            }
            Err(e) => Err(Failure::running(format!("the answer of the stack: {e}"))),
        }
    };
    next(&mut line)?;
    if let Some(problem) = line.strip_prefix("!\t") {
        return Err(Failure::running(problem));
    }
    let columns = Columns::new(&line);
    let mut out = BufWriter::new(io::stdout().lock());
    let mut summary = show::SocketSummary::default();
    if !options.json && !options.summary && !options.no_header {
        show::header(&mut out)?;
    }
    let mut problem = None;
    loop {
        next(&mut line)?;
        if line == "." {
            break;
        }
        if let Some(text) = line.strip_prefix("!\t") {
            problem = Some(Failure::running(text));
            continue;
        }
        let socket =
            columns.socket(&line).ok_or_else(|| Failure::running("the answer of the stack is garbled"))?;
        if options.summary {
            summary.add(&socket);
        } else if is_wanted(options, filter, &socket) {
            if options.json {
                show::json(&mut out, &columns, &line)?;
            } else {
                show::row(&mut out, &socket, options)?;
            }
        }
    }
    if options.summary {
        write!(out, "{}", summary.table())?;
    }
    out.flush()?;
    problem.map_or(Ok(()), Err)
}

/// Whether a socket is one of those asked for. A filter for states takes the place of --all and --listening.
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
    use super::{Filter, SsOptions, show_all};
    use clap::{Args, Command, FromArgMatches};

    /// These options.
    pub fn options(words: &[&str]) -> SsOptions {
        let command = SsOptions::augment_args(Command::new("ss")).no_binary_name(true);
        SsOptions::from_arg_matches(&command.get_matches_from(words)).unwrap()
    }

    /// Why an answer cannot be shown.
    fn refused(answer: &[u8]) -> String {
        show_all(&options(&["-s"]), &Filter::default(), answer).unwrap_err().to_string()
    }

    #[test]
    fn an_answer_that_is_none_is_an_error() {
        const NAMES: &str = "shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer\n";
        let (early, garbled) =
            ("the answer of the stack ends too early", "the answer of the stack is garbled");
        for (answer, expected) in [
            (String::new(), early),
            ("shard".into(), early),
            (NAMES.into(), early),
            ("x".repeat(1 << 20), early),
            (format!("{NAMES}0\ttcp\tESTAB\n.\n"), garbled),
            (format!("{NAMES}0\ttcp\tESTAB\t0\t0\there\tthere\n.\n"), garbled),
            (format!("{NAMES}\x1b[2J\ttcp\tESTAB\t0\t0\t1.2.3.4:5\t1.2.3.4:5\n.\n"), garbled),
            ("state\n0\n.\n".into(), garbled),
            ("!\t8 others are asking already\n".into(), "8 others are asking already"),
            (format!("{NAMES}!\tshard 1 has ended\n.\n"), "shard 1 has ended"),
        ] {
            assert_eq!(refused(answer.as_bytes()), expected, "{answer:.100}");
        }
        assert!(refused(b"\xff\xfe\n").starts_with("the answer of the stack: "));
    }
}
