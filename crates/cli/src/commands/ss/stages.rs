//! Latency stages of connections (`--stages`).

use super::filter::Filter;
use super::socket::SocketLine;
use super::{AnswerLines, SsOptions, is_wanted};
use crate::failure::Failure;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::inspect::{STAGE_CONNS_MAX, STAGE_NAMES, SampledStages, StageTimes, sample_stages};
use ginnel::run_dir::RunningStack;
use std::collections::HashMap;
use std::io::BufRead;

/// The stages of sampled connections, by their fields `shard` and `sk`.
#[derive(Default)]
pub struct StagesByConn(HashMap<(String, String), [StageTimes; STAGE_NAMES.len()]>);

impl StagesByConn {
    /// Samples the connections of a listing that are wanted.
    pub fn sample(
        options: &SsOptions,
        filter: &Filter,
        running: &RunningStack,
        answer: impl BufRead,
        interval: Duration,
    ) -> Result<Self, Failure> {
        let mut lines = AnswerLines(answer);
        let columns = lines.columns()?;
        let mut conns: Vec<(String, String, SocketAddr, SocketAddr)> = Vec::new();
        lines.for_each(&columns, |socket, _| {
            // Only the handles of connections begin with "c".
            let handle = socket.text("sk").filter(|handle| handle.starts_with('c'));
            if let Some(handle) = handle.filter(|_| is_wanted(options, filter, socket)) {
                conns.push((socket.shard.into(), handle.into(), socket.local, socket.peer));
            }
            Ok(())
        })?;
        if conns.len() > STAGE_CONNS_MAX {
            return Err(Failure::usage(format!(
                "--stages samples at most {STAGE_CONNS_MAX} connections, and {} are shown: add a filter, such as \
                 \"dst 10.0.0.1\"",
                conns.len()
            )));
        }
        let named = conns.iter().map(|(shard, handle, local, peer)| (&**shard, &**handle, *local, *peer));
        let sampled = sample_stages(&running.path, interval, named)
            .map_err(|e| Failure::running(format!("the stack \"{}\" samples nothing: {e}", running.name)))?;
        if sampled.is_empty() && !conns.is_empty() {
            return Err(none_sampled(conns.len()));
        }
        Ok(Self::new(sampled))
    }

    fn new(sampled: Vec<SampledStages>) -> Self {
        let entry = |conn: SampledStages| ((conn.shard, conn.handle), conn.stages);
        Self(sampled.into_iter().map(entry).collect())
    }

    fn get(&self, socket: &SocketLine<'_>) -> Option<&[StageTimes; STAGE_NAMES.len()]> {
        if self.0.is_empty() {
            return None;
        }
        self.0.get(&(socket.shard.to_owned(), socket.text("sk")?.to_owned()))
    }

    /// Formats the stages of a connection that was sampled: the smoothed means and the maxima in
    /// microseconds, and the numbers of samples.
    pub fn words(&self, socket: &SocketLine<'_>) -> Option<String> {
        let stages = self.get(socket)?;
        let mut words: Vec<String> = Vec::new();
        for (name, times) in STAGE_NAMES.iter().zip(stages).filter(|(_, times)| times.count > 0) {
            words.push(format!("{name}:{}/{}us", micros(times.mean), micros(times.max)));
        }
        let counts: Vec<String> = stages.iter().map(|times| times.count.to_string()).collect();
        words.push(format!("samples:{}", counts.join(",")));
        Some(words.join(" "))
    }

    /// Formats the stages of a connection that was sampled as a JSON object.
    pub fn json(&self, socket: &SocketLine<'_>) -> Option<String> {
        let stage = |(name, times): (&&str, &StageTimes)| {
            let StageTimes { count, mean, max } = times;
            let (mean, max) = (micros(*mean), micros(*max));
            format!("\"{name}\":{{\"samples\":{count},\"mean_us\":{mean},\"max_us\":{max}}}")
        };
        let stages: Vec<String> = STAGE_NAMES.iter().zip(self.get(socket)?).map(stage).collect();
        Some(format!("{{{}}}", stages.join(",")))
    }
}

/// Returns the error if a stack samples none of this many connections.
fn none_sampled(shown: usize) -> Failure {
    Failure::running(format!(
        "--stages samples connections of programs on the stack (\"ginnel run\"), and none of the {shown} \
         shown is one: leave the option out, or change the filter"
    ))
}

/// Formats a duration in microseconds with one decimal.
fn micros(duration: Duration) -> String {
    let tenths = (duration.as_nanos() + 50) / 100;
    format!("{}.{}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::super::show;
    use super::super::socket::Columns;
    use super::super::tests::options;
    use super::{SampledStages, StageTimes, StagesByConn, micros};
    use core::time::Duration;

    #[test]
    fn microseconds_are_rounded_to_tenths() {
        let shown = [0, 49, 50, 1_049, 999_950].map(|ns| micros(Duration::from_nanos(ns)));
        assert_eq!(shown, ["0.0", "0.0", "0.1", "1.0", "1000.0"]);
    }

    #[test]
    fn stages_are_shown_with_their_connection() {
        let stage = |count, mean, max| StageTimes {
            count,
            mean: Duration::from_nanos(mean),
            max: Duration::from_nanos(max),
        };
        let stages =
            [stage(7, 3_100, 12_000), stage(7, 20_000, 81_500), stage(0, 0, 0), stage(6, 900, 1_000)];
        let conn = SampledStages { shard: "0".into(), handle: "c3.4".into(), stages };
        let by_conn = StagesByConn::new(vec![conn]);
        let columns = Columns::new("shard\tnetid\tstate\trecv_q\tsend_q\tlocal\tpeer\tsk");
        let row = |handle: &str| {
            let line = format!("0\ttcp\tESTAB\t0\t0\t10.0.0.1:80\t10.0.0.2:999\t{handle}");
            let (socket, mut out) = (columns.socket(&line).unwrap(), Vec::new());
            show::row(&mut out, &socket, &options(&[]), (None, &by_conn)).unwrap();
            (String::from_utf8(out).unwrap(), by_conn.json(&socket))
        };
        let (text, json) = row("c3.4");
        let expected = "\n\treceive:3.1/12.0us read:20.0/81.5us send:0.9/1.0us samples:7,7,0,6\n";
        assert!(text.ends_with(expected), "{text}");
        let json = json.unwrap();
        assert!(json.starts_with("{\"receive\":{\"samples\":7,\"mean_us\":3.1,\"max_us\":12.0},"), "{json}");
        let (text, json) = row("c3.5");
        assert!(text.ends_with(" 0\n") && json.is_none(), "{text}");
    }
}
