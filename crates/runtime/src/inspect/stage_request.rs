//! Samples the latency stages of connections for another process (`ginnel ss --stages`).
//!
//! ```text
//!   ginnel ss ──"stages 1 …"──► thread "inspect" ──a request in the shard's mailbox──► shard: puts layers around
//!             ◄──a line for each connection──                                           its devices, marks sockets
//! ```

use super::mirror::{IS_OBSERVED, remove_layers};
use super::server::{CLIENT_TIMEOUT, KILL_LINE_BYTES_MAX, SOCKET, explain_timeout, parse_kill};
use super::{SLOTS_PER_TURN, send_request, wait_for_reply};
use crate::command::Commander;
use crate::context::{Context, ShardCore};
use crate::handler::Handler;
use crate::shard::RxPort;
use crate::stages::{MACHINE_CLOCK, STAGE_NAMES, StageSampler, StageTimes};
use core::net::SocketAddr;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use ginnel_devices::mirror::{wrap_rx, wrap_tx};
use ginnel_stack::handle::Conn;
use ginnel_stack::stack::SocketHandle;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Instant;

/// Request to sample connections, with the version of the answer. The milliseconds follow, and on further
/// lines shard, `sk`, local address and peer of the connections, separated by tabs; `.` is the last line. The
/// answer has a line for each connection that was sampled: shard, `sk`, and of each stage the number of
/// samples, the smoothed mean and the maximum in nanoseconds; `.` is the last line.
pub(super) const STAGES: &str = "stages 1 ";

/// Connections that are sampled at a time.
// limit: connections whose latency stages are sampled
pub const STAGE_CONNS_MAX: usize = 1024;

/// Longest time for which connections are sampled.
const INTERVAL_MAX: Duration = Duration::from_secs(600);

/// Interval at which the stack looks whether its shards still run.
const LIVENESS_INTERVAL: Duration = Duration::from_millis(100);

/// A request in the shard's mailbox. The shard undoes one whose requester is gone.
pub(crate) enum StageRequest {
    /// Puts layers around the devices.
    Attach { sampler: Arc<StageSampler>, reply: SyncSender<()> },
    /// Begins to sample connections, at most [`SLOTS_PER_TURN`], with these addresses. Their slots begin with
    /// `first_slot`. The reply says for each whether it is sampled.
    Mark {
        sampler: Arc<StageSampler>,
        first_slot: usize,
        conns: Vec<(Conn, [SocketAddr; 2])>,
        reply: SyncSender<Vec<bool>>,
    },
    /// Ends the sampling of connections, at most [`SLOTS_PER_TURN`].
    Unmark { conns: Vec<Conn>, reply: SyncSender<()> },
    /// Removes the layers.
    Detach(SyncSender<()>),
}

impl StageRequest {
    /// Handles the request on the shard, between two bursts.
    #[cold]
    pub(crate) fn answer<H: Handler>(self, ports: &mut [RxPort], core: &mut ShardCore, handler: &mut H) {
        match self {
            Self::Attach { sampler, reply } => {
                // A shard without an engine has no connections to sample.
                let Some(stack) = core.stack.local_mut() else {
                    let _ = reply.try_send(());
                    return;
                };
                for port in &mut *ports {
                    let received = sampler.received(port.is_loopback);
                    port.replace_rx(|rx| wrap_rx(rx, received));
                    if !port.is_loopback {
                        stack.replace_tx(port.id, |tx| Some(wrap_tx(tx, sampler.sent())));
                    }
                    port.is_mirrored = true;
                }
                if reply.try_send(()).is_err() {
                    remove_layers(ports, stack);
                }
            }
            Self::Mark { sampler, first_slot, conns, reply } => {
                let begin = |(slot, (conn, ends)): (usize, &(Conn, [SocketAddr; 2]))| {
                    let slot = first_slot + slot;
                    let stack = core.stack.local().filter(|stack| stack.endpoints(*conn) == Some(*ends));
                    let Some(next) = stack.and_then(|stack| stack.next_sequence_numbers(*conn)) else {
                        return false;
                    };
                    // Cannot truncate: a request names few connections.
                    let stages = Some((sampler.clone(), slot as u32));
                    let is_sampled = handler.set_stages(&mut Context::new(core), *conn, stages);
                    if is_sampled {
                        sampler.begin(slot, next);
                    }
                    is_sampled
                };
                let sampled = conns.iter().enumerate().map(begin).collect();
                if reply.try_send(sampled).is_err() {
                    for (conn, _) in conns {
                        handler.set_stages(&mut Context::new(core), conn, None);
                    }
                }
            }
            Self::Unmark { conns, reply } => {
                for conn in conns {
                    handler.set_stages(&mut Context::new(core), conn, None);
                }
                // Fails only if the requester is gone.
                let _ = reply.try_send(());
            }
            Self::Detach(reply) => {
                if let Some(stack) = core.stack.local_mut() {
                    remove_layers(ports, stack);
                }
                // Fails only if the requester is gone.
                let _ = reply.try_send(());
            }
        }
    }
}

/// A connection of a request: its `sk` and its place at the shard.
type NamedConn = (String, Conn, [SocketAddr; 2]);

/// Connections of a shard that are sampled.
struct ShardSamples<'a> {
    label: &'a str,
    shard: &'a Commander,
    conns: Vec<NamedConn>,
    sampler: Arc<StageSampler>,
    /// Says of each connection whether it is sampled, as far as the shard has answered.
    sampled: Vec<bool>,
}

impl ShardSamples<'_> {
    /// Makes the shard begin, by requests that take a short time each.
    fn begin(&mut self) -> Result<(), &'static str> {
        let (reply, replies) = sync_channel(1);
        send_request(self.shard, Box::new(StageRequest::Attach { sampler: self.sampler.clone(), reply }))?;
        wait_for_reply(self.shard, &replies)?;
        for chunk in self.conns.chunks(SLOTS_PER_TURN) {
            let (reply, replies) = sync_channel(1);
            let conns = chunk.iter().map(|(_, conn, ends)| (*conn, *ends)).collect();
            let (sampler, first_slot) = (self.sampler.clone(), self.sampled.len());
            send_request(self.shard, Box::new(StageRequest::Mark { sampler, first_slot, conns, reply }))?;
            self.sampled.extend(wait_for_reply(self.shard, &replies)?);
        }
        Ok(())
    }

    /// Makes the shard end what it began, or will begin before it gets these requests: it handles requests in
    /// order. A shard that has ended has no layers any more.
    fn end(&self) {
        let mut answers = true;
        for chunk in self.conns.chunks(SLOTS_PER_TURN) {
            let conns: Vec<Conn> = chunk.iter().map(|(_, conn, _)| *conn).collect();
            let unmark = |reply| StageRequest::Unmark { conns: conns.clone(), reply };
            answers = self.request_end(unmark, answers);
        }
        self.request_end(StageRequest::Detach, answers);
    }

    /// Sends a request and returns whether the shard answers. `waits`: it has answered until now, so the
    /// answer is awaited.
    fn request_end(&self, request: impl Fn(SyncSender<()>) -> StageRequest, waits: bool) -> bool {
        let (reply, replies) = sync_channel(1);
        while !self.shard.has_ended() {
            if send_request(self.shard, Box::new(request(reply.clone()))).is_ok() {
                return waits && wait_for_reply(self.shard, &replies).is_ok();
            }
        }
        false
    }
}

/// Samples the connections that the client names, and answers when the time is over. `is_mirrored` is set
/// meanwhile, since a device has one layer of an observer at a time.
pub(super) fn serve(
    (mut client, lines): (&UnixStream, BufReader<&UnixStream>),
    milliseconds: &str,
    shards: &[(String, Commander)],
    is_mirrored: &AtomicBool,
) -> io::Result<()> {
    let interval = milliseconds.parse().map(Duration::from_millis);
    let Some(interval) = interval.ok().filter(|interval| *interval <= INTERVAL_MAX) else {
        return writeln!(client, "!\tthe longest interval is {} s", INTERVAL_MAX.as_secs());
    };
    let named = match read_conns(lines, shards)? {
        Ok(named) => named,
        Err(problem) => return writeln!(client, "!\t{problem}"),
    };
    if is_mirrored.swap(true, Ordering::AcqRel) {
        return writeln!(client, "{IS_OBSERVED}");
    }
    let mut begun: Vec<ShardSamples<'_>> = Vec::new();
    let mut problem = None;
    for ((label, shard), conns) in shards.iter().zip(named) {
        if conns.is_empty() {
            continue;
        }
        let ends: Vec<_> = conns.iter().map(|(.., ends)| *ends).collect();
        let sampler = StageSampler::new(MACHINE_CLOCK, &ends);
        let sampled = Vec::with_capacity(conns.len());
        let mut samples = ShardSamples { label, shard, conns, sampler, sampled };
        if let Err(what) = samples.begin() {
            problem = Some(format!("shard {label} {what}"));
        }
        // Also one that has not answered: it may begin later.
        begun.push(samples);
    }
    let is_sampling = begun.iter().any(|samples| samples.sampled.contains(&true));
    let waited = match problem {
        None if is_sampling => wait(client, interval, &begun),
        _ => Ok(()),
    };
    let mut text = String::new();
    for samples in &begun {
        samples.end();
        let ShardSamples { label, conns, sampler, sampled, .. } = samples;
        for (slot, (handle, ..)) in conns.iter().enumerate() {
            if !sampled.get(slot).is_some_and(|is_sampled| *is_sampled) {
                continue;
            }
            // Writing to a string cannot fail.
            let _ = write!(text, "{label}\t{handle}");
            for StageTimes { count, mean, max } in sampler.times(slot) {
                let _ = write!(text, "\t{count}\t{}\t{}", mean.as_nanos(), max.as_nanos());
            }
            text.push('\n');
        }
    }
    is_mirrored.store(false, Ordering::Release);
    waited?;
    if let Some(problem) = problem {
        let _ = writeln!(text, "!\t{problem}");
    }
    client.write_all((text + ".\n").as_bytes())
}

/// Reads the connections, by shard. The inner error is the client's.
fn read_conns(
    mut lines: BufReader<&UnixStream>,
    shards: &[(String, Commander)],
) -> io::Result<Result<Vec<Vec<NamedConn>>, String>> {
    let mut named: Vec<Vec<NamedConn>> = shards.iter().map(|_| Vec::new()).collect();
    let mut line = String::new();
    for count in 0.. {
        line.clear();
        lines.by_ref().take(KILL_LINE_BYTES_MAX).read_line(&mut line)?;
        if line == ".\n" {
            break;
        }
        if count >= STAGE_CONNS_MAX {
            return Ok(Err(format!("at most {STAGE_CONNS_MAX} connections are sampled at a time")));
        }
        let Some((label, SocketHandle::Conn(conn), ends)) = parse_kill(&line) else {
            return Ok(Err(format!("malformed line: {:?}", line.trim_end())));
        };
        let Some(shard) = shards.iter().position(|(known, _)| known == label) else {
            return Ok(Err(format!("there is no shard {label:?}")));
        };
        let handle = line.split('\t').nth(1).unwrap_or_default().to_owned();
        named[shard].push((handle, conn, ends));
    }
    Ok(Ok(named))
}

/// Waits until the interval is over, the client is gone, or all shards have ended.
fn wait(mut client: &UnixStream, interval: Duration, begun: &[ShardSamples<'_>]) -> io::Result<()> {
    let until = Instant::now() + interval;
    while !begun.is_empty() && !begun.iter().all(|samples| samples.shard.has_ended()) {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        client.set_read_timeout(Some(left.min(LIVENESS_INTERVAL)))?;
        // The client sends nothing more.
        match client.read(&mut [0; 16]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Err(e) if !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

/// The latency stages of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampledStages {
    /// Field `shard` of the connection in a listing.
    pub shard: String,
    /// Field `sk` of the connection in a listing.
    pub handle: String,
    /// The stages, in the order of [`STAGE_NAMES`].
    pub stages: [StageTimes; STAGE_NAMES.len()],
}

impl SampledStages {
    fn parse(line: &str) -> Option<Self> {
        let mut cells = line.split('\t');
        let (shard, handle) = (cells.next()?.to_owned(), cells.next()?.to_owned());
        let mut stages = [StageTimes::default(); STAGE_NAMES.len()];
        for StageTimes { count, mean, max } in &mut stages {
            *count = cells.next()?.parse().ok()?;
            *mean = Duration::from_nanos(cells.next()?.parse().ok()?);
            *max = Duration::from_nanos(cells.next()?.parse().ok()?);
        }
        cells.next().is_none().then_some(Self { shard, handle, stages })
    }
}

/// Samples connections of the stack with this directory for a while. The fields `shard`, `sk`, `local` and
/// `peer` of a listing name a connection. Connections that have ended, and those whose application is not a
/// program on the stack, are missing in the result.
///
/// # Errors
/// The stack refuses the request, or does not answer.
pub fn sample_stages<'a>(
    dir: &Path,
    interval: Duration,
    conns: impl IntoIterator<Item = (&'a str, &'a str, SocketAddr, SocketAddr)>,
) -> io::Result<Vec<SampledStages>> {
    let mut client = UnixStream::connect(dir.join(SOCKET))?;
    client.set_read_timeout(Some(interval + CLIENT_TIMEOUT))?;
    let mut request = format!("{STAGES}{}\n", interval.as_millis());
    for (shard, handle, local, peer) in conns {
        // Writing to a string cannot fail.
        let _ = writeln!(request, "{shard}\t{handle}\t{local}\t{peer}");
    }
    // Fails after a refusal, which the answer tells.
    let _ = client.write_all((request + ".\n").as_bytes());
    let mut sampled = Vec::new();
    for line in BufReader::new(client).lines() {
        let line = line.map_err(explain_timeout)?;
        if line == "." {
            return Ok(sampled);
        }
        if let Some(problem) = line.strip_prefix("!\t") {
            return Err(io::Error::other(problem.to_owned()));
        }
        let malformed = || io::Error::new(ErrorKind::InvalidData, format!("malformed answer: {line:?}"));
        sampled.push(SampledStages::parse(&line).ok_or_else(malformed)?);
    }
    Err(ErrorKind::UnexpectedEof.into())
}
