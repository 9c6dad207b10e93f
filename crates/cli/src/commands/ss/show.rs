//! Formats sockets as `ss` does.

use super::SsOptions;
use super::socket::{Columns, SocketLine};
use super::stages::StagesByConn;
use super::users::SocketUsers;
use crate::commands::stat::quoted;
use crate::table::{Table, with_thousands_separators};
use std::collections::BTreeMap;
use std::io::{self, Write};

/// Writes the line of column names.
pub fn header(out: &mut impl Write, with_processes: bool) -> io::Result<()> {
    let (state, local, peer) = ("State", "Local Address:Port", "Peer Address:Port");
    let process = if with_processes { " Process" } else { "" };
    writeln!(out, "Netid {state:<10} Recv-Q Send-Q {local:>26} {peer:>26} Shard{process}")
}

/// Writes a socket and its owners, and below it the details that the options ask for.
pub fn row(
    out: &mut impl Write,
    socket: &SocketLine<'_>,
    options: &SsOptions,
    (users, stages): (Option<&SocketUsers>, &StagesByConn),
) -> io::Result<()> {
    let SocketLine { shard, netid, state, recv_q, send_q, local, .. } = socket;
    let (local, peer) = (format_endpoint(local), format_endpoint(&socket.peer));
    write!(out, "{netid:<5} {state:<10} {recv_q:>6} {send_q:>6} {local:>26} {peer:>26} ")?;
    match users.map(|users| users.column(socket)).filter(|column| !column.is_empty()) {
        Some(column) => write!(out, "{shard:<5} {column}")?,
        None => write!(out, "{shard}")?,
    }
    if options.options
        && let (Some(kind), Some(ms), Some(count)) =
            (socket.text("timer"), socket.number("timer_ms"), socket.text("timer_count"))
    {
        write!(out, " timer:({kind},{},{count})", duration(ms))?;
    }
    let info = (options.info && socket.text("snd_cwnd").is_some()).then(|| details(socket));
    // A stack of an earlier version does not report it.
    let memory = (options.memory && socket.text("memory_bytes").is_some()).then(|| memory(socket));
    let words: Vec<String> = [memory, info, stages.words(socket)].into_iter().flatten().collect();
    if words.is_empty() { writeln!(out) } else { writeln!(out, "\n\t{}", words.join(" ")) }
}

/// Formats the memory of a socket in the fields of `ss`, all of which are present for programs that parse
/// them, except for drops that are not counted; then the total in bytes.
fn memory(socket: &SocketLine<'_>) -> String {
    let number = |name| socket.number(name).unwrap_or(0);
    let [r, rb, w, tb, f] = ["rmem_alloc", "rcvbuf", "wmem_queued", "sndbuf", "fwd_alloc"].map(number);
    let drops = socket.number("drops").map(|drops| format!(",d{drops}")).unwrap_or_default();
    // Ginnel has no counterpart of t (bytes in the device), o (options) and bl (backlog).
    format!("skmem:(r{r},rb{rb},t0,tb{tb},f{f},w{w},o0,bl0{drops}) memory:{}", number("memory_bytes"))
}

/// Formats an endpoint as `ss` does: with `*` as the port if both address and port are unspecified.
fn format_endpoint(end: &core::net::SocketAddr) -> String {
    if end.port() == 0 && end.ip().is_unspecified() {
        return if end.is_ipv4() { "0.0.0.0:*".into() } else { "[::]:*".into() };
    }
    end.to_string()
}

/// Formats a duration; `min` and `sec` appear only if they are nonzero.
fn duration(ms: u64) -> String {
    match (ms / 60_000, ms / 1000 % 60, ms % 1000) {
        (0, 0, ms) => format!("{ms}ms"),
        (0, seconds, ms) if ms > 0 && seconds < 10 => format!("{seconds}.{ms:03}sec"),
        (0, seconds, _) => format!("{seconds}sec"),
        (minutes, 0, _) => format!("{minutes}min"),
        (minutes, seconds, _) => format!("{minutes}min{seconds}sec"),
    }
}

/// Formats the TCP details in the words and units of `ss`.
fn details(socket: &SocketLine<'_>) -> String {
    let number = |name| socket.number(name).unwrap_or(0);
    let ms = |name| {
        let us = number(name);
        let text = format!("{}.{:03}", us / 1000, us % 1000);
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    };
    let mut words: Vec<String> = Vec::new();
    for (name, word) in [("timestamps", "ts"), ("sack", "sack"), ("ecn", "ecn")] {
        if number(name) > 0 {
            words.push(word.into());
        }
    }
    // A stack of an earlier version reports neither this nor the rates.
    words.extend(socket.text("congestion").map(String::from));
    if number("snd_wscale") + number("rcv_wscale") > 0 {
        words.push(format!("wscale:{},{}", number("snd_wscale"), number("rcv_wscale")));
    }
    words.push(format!("rto:{}", ms("rto_us")));
    if number("backoff") > 0 {
        words.push(format!("backoff:{}", number("backoff")));
    }
    words.push(format!("rtt:{}/{}", ms("rtt_us"), ms("rttvar_us")));
    words.push(format!("ato:{}", ms("ato_us")));
    for (name, word) in [
        ("snd_mss", "mss"),
        ("pmtu", "pmtu"),
        ("rcv_mss", "rcvmss"),
        ("advmss", "advmss"),
        ("snd_cwnd", "cwnd"),
    ] {
        words.push(format!("{word}:{}", number(name)));
    }
    // `u32::MAX` means that no slow-start threshold has been set yet.
    if number("snd_ssthresh") < u64::from(u32::MAX) {
        words.push(format!("ssthresh:{}", number("snd_ssthresh")));
    }
    if let Some(state) = socket.text("ca_state").filter(|state| *state != "open") {
        words.push(format!("ca_state:{state}"));
    }
    words.extend(rates(socket));
    if number("unacked") > 0 {
        words.push(format!("unacked:{}", number("unacked")));
    }
    if number("retrans") + number("total_retrans") > 0 {
        words.push(format!("retrans:{}/{}", number("retrans"), number("total_retrans")));
    }
    for name in ["lost", "sacked", "probes"] {
        if number(name) > 0 {
            words.push(format!("{name}:{}", number(name)));
        }
    }
    if number("notsent_bytes") > 0 {
        words.push(format!("notsent:{}", number("notsent_bytes")));
    }
    words.push(format!("rcv_wnd:{}", number("rcv_wnd")));
    words.push(format!("snd_wnd:{}", number("snd_wnd")));
    if number("min_rtt_us") > 0 {
        words.push(format!("minrtt:{}", ms("min_rtt_us")));
    }
    words.join(" ")
}

/// Formats the model of BBR and the rates, in bits per second.
fn rates(socket: &SocketLine<'_>) -> Vec<String> {
    let bits = |name| socket.number(name).map(|bytes| bytes.saturating_mul(8));
    let gain = |name| {
        let hundredths = socket.number(name).unwrap_or(0) * 100 / 256;
        format!("{}.{:02}", hundredths / 100, hundredths % 100)
    };
    let mut words = Vec::new();
    if let (Some(bw), Some(mrtt)) = (bits("bbr_bw"), socket.number("bbr_mrtt_us")) {
        let (pacing, cwnd) = (gain("bbr_pacing_gain"), gain("bbr_cwnd_gain"));
        let mrtt = if mrtt == u64::from(u32::MAX) { 0 } else { mrtt };
        let mrtt = format!("{}.{:03}", mrtt / 1000, mrtt % 1000);
        words.push(format!("bbr:(bw:{bw}bps,mrtt:{mrtt},pacing_gain:{pacing},cwnd_gain:{cwnd})"));
    }
    if let Some(rate) = bits("pacing_rate") {
        let max = bits("max_pacing_rate").map(|max| format!("/{max}bps")).unwrap_or_default();
        words.push(format!("pacing_rate {rate}bps{max}"));
    }
    if let Some(rate) = bits("delivery_rate").filter(|rate| *rate > 0) {
        words.push(format!("delivery_rate {rate}bps"));
        if socket.number("app_limited") == Some(1) {
            words.push("app_limited".into());
        }
    }
    words
}

/// Formats a socket as a JSON object with all fields that the stack reported, and further ones whose values
/// are JSON.
pub fn json(
    out: &mut impl Write,
    columns: &Columns,
    line: &str,
    others: [(&str, Option<String>); 2],
) -> io::Result<()> {
    out.write_all(b"{")?;
    for (index, (name, value)) in columns.fields(line).enumerate() {
        let comma = if index > 0 { "," } else { "" };
        // A shard's name is a string even if it looks like a number.
        let is_number = name != "shard" && value.parse::<u64>().is_ok();
        let value = if is_number { value.into() } else { quoted(value) };
        write!(out, "{comma}{}:{value}", quoted(name))?;
    }
    for (name, value) in others {
        if let Some(value) = value {
            write!(out, ",{}:{value}", quoted(name))?;
        }
    }
    out.write_all(b"}\n")
}

/// The number of sockets in each state.
#[derive(Default)]
pub struct SocketSummary {
    /// Counts by protocol and state, then by shard.
    counts: BTreeMap<(String, String), BTreeMap<String, u64>>,
    shards: Vec<String>,
}

impl SocketSummary {
    /// Counts a socket.
    pub fn add(&mut self, socket: &SocketLine<'_>) {
        if !self.shards.iter().any(|known| known == socket.shard) {
            self.shards.push(socket.shard.into());
        }
        let key = (socket.netid.to_string(), socket.state.to_string());
        *self.counts.entry(key).or_default().entry(socket.shard.into()).or_default() += 1;
    }

    /// Returns a table with a row for each state and a column for each shard.
    pub fn table(&self) -> Table {
        let mut heads = vec!["sockets"];
        heads.extend(self.shards.iter().map(String::as_str));
        heads.push("all");
        let mut table = Table::new(&heads);
        for ((netid, state), shards) in &self.counts {
            let each = self.shards.iter().map(|shard| shards.get(shard).copied().unwrap_or(0));
            let all: u64 = each.clone().sum();
            let cells = each.chain([all]).map(with_thousands_separators);
            table.add_row(core::iter::once(format!("{netid} {state}")).chain(cells));
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::super::socket::Columns;
    use super::super::tests::options;
    use super::{SocketSummary, StagesByConn, duration, row};

    #[test]
    fn durations_have_the_format_of_ss() {
        let shown = [7, 200, 1_500, 12_345, 60_000, 95_000].map(duration);
        assert_eq!(shown, ["7ms", "200ms", "1.500sec", "12sec", "1min", "1min35sec"]);
    }

    #[test]
    fn a_connection_is_shown_with_requested_details() {
        let columns = Columns::new(
            "shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer\ttimer\ttimer_ms\ttimer_count\trto_us\trtt_us\trttvar_us\tsnd_cwnd\tsnd_ssthresh\ttotal_retrans",
        );
        let line = "1\ttcp\tESTAB\t3\t1448\t10.0.0.1:80\t10.0.0.2:999\ton\t204\t1\t204000\t4125\t2000\t10\t4294967295\t2";
        let shown = |words: &[&str]| {
            let mut out = Vec::new();
            row(&mut out, &columns.socket(line).unwrap(), &options(words), (None, &StagesByConn::default()))
                .unwrap();
            String::from_utf8(out).unwrap()
        };
        let plain = "tcp   ESTAB           3   1448                10.0.0.1:80               10.0.0.2:999 1";
        assert_eq!(shown(&[]), format!("{plain}\n"));
        assert_eq!(shown(&["-m"]), shown(&[]), "a stack that does not tell of memory");
        let all = shown(&["-io"]);
        assert!(all.starts_with(&format!("{plain} timer:(on,204ms,1)\n\trto:204 rtt:4.125/2 ")), "{all}");
        assert!(
            all.contains(" cwnd:10 ") && all.contains(" retrans:0/2 ") && !all.contains("ssthresh"),
            "{all}"
        );
    }

    #[test]
    fn rates_have_the_format_of_ss() {
        const NAMES: &str = "snd_cwnd\tcongestion\tpacing_rate\tmax_pacing_rate\tdelivery_rate\tapp_limited\tbbr_bw\tbbr_mrtt_us\tbbr_pacing_gain\tbbr_cwnd_gain";
        let columns = Columns::new(&format!("shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer\t{NAMES}"));
        let shown = |rest: &str| {
            let line = format!("0\ttcp\tESTAB\t3\t4\t10.0.0.1:80\t10.0.0.2:999\t10\t{rest}");
            let mut out = Vec::new();
            row(
                &mut out,
                &columns.socket(&line).unwrap(),
                &options(&["-i"]),
                (None, &StagesByConn::default()),
            )
            .unwrap();
            String::from_utf8(out).unwrap()
        };
        let bbr = shown("bbr\t125000\t250000\t120000\t1\t130000\t40125\t739\t512");
        let expected = "bbr:(bw:1040000bps,mrtt:40.125,pacing_gain:2.88,cwnd_gain:2.00) \
                        pacing_rate 1000000bps/2000000bps delivery_rate 960000bps app_limited";
        assert!(bbr.contains(expected) && bbr.contains("\tbbr rto:"), "{bbr}");
        let cubic = shown("cubic\t-\t-\t0\t1\t-\t-\t-\t-");
        assert!(cubic.contains("\tcubic rto:") && !cubic.contains("rate"), "{cubic}");
    }

    #[test]
    fn memory_has_the_format_of_ss() {
        const NAMES: &str = "rmem_alloc\trcvbuf\twmem_queued\tsndbuf\tfwd_alloc\tdrops\tmemory_bytes";
        let columns =
            Columns::new(&format!("shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer\tsnd_cwnd\t{NAMES}"));
        let shown = |words: &[&str], rest: &str| {
            let line = format!("0\ttcp\tESTAB\t3\t4\t10.0.0.1:80\t10.0.0.2:999\t{rest}");
            let mut out = Vec::new();
            row(&mut out, &columns.socket(&line).unwrap(), &options(words), (None, &StagesByConn::default()))
                .unwrap();
            String::from_utf8(out).unwrap().split_once('\n').unwrap().1.to_string()
        };
        let (counted, all) =
            ("skmem:(r3,rb600,t0,tb400,f4089,w4,o0,bl0,d2) memory:5032", "10\t3\t600\t4\t400\t4089\t2\t5032");
        assert_eq!(shown(&["--memory"], all), format!("\t{counted}\n"));
        assert!(shown(&["-mi"], all).starts_with(&format!("\t{counted} rto:")));
        assert_eq!(shown(&[], all), "");
        // Drops are not counted for listeners.
        let some = shown(&["-mi"], "-\t0\t600\t0\t400\t0\t-\t152");
        assert_eq!(some, "\tskmem:(r0,rb600,t0,tb400,f0,w0,o0,bl0) memory:152\n");
    }

    #[test]
    fn sockets_are_counted_by_state_and_shard() {
        let columns = Columns::new("shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer");
        let mut summary = SocketSummary::default();
        for (shard, state) in [(0, "ESTAB"), (1, "ESTAB"), (1, "ESTAB"), (0, "TIME-WAIT")] {
            let line = format!("{shard}\ttcp\t{state}\t0\t0\t10.0.0.1:80\t10.0.0.2:999");
            summary.add(&columns.socket(&line).unwrap());
        }
        let table = summary.table().to_string();
        assert!(table.contains("| tcp ESTAB     | 1 | 2 |   3 |"), "{table}");
        assert!(table.contains("| tcp TIME-WAIT | 1 | 0 |   1 |"), "{table}");
    }
}
