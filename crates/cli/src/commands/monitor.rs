//! `ginnel monitor`: measures how long servers take to answer, from their traffic alone.

mod output;
pub mod protocol;
mod stdin;

use super::metrics;
use crate::failure::Failure;
use crate::metrics::monitor::channel;
use crate::output::note;
use crate::signals;
use clap::Args;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::StopFlag;
use ginnel::run_dir;
use ginnel_apps::units::{parse_bytes, parse_duration};
use ginnel_devices::mirror::ring::{RING_BYTES_MAX, RING_BYTES_MIN};
use ginnel_monitor::engine::{Engine, EngineConfig};
use ginnel_monitor::session::Session;
use ginnel_monitor::sources::capture_file::CaptureFile;
use ginnel_monitor::sources::interface::Interface;
use ginnel_monitor::sources::stack::RunningStackSource;
use ginnel_monitor::sources::{PacketSource, SourceError, SourceState};
use output::Output;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;
use stdin::StdinUntilEnd;

/// How long to wait for packets before the clock is looked at.
const WAIT: Duration = Duration::from_millis(20);
/// Interval of reports from a live source unless stated otherwise.
const LIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Bytes of the longest frame: the largest IP packet, an Ethernet header and a VLAN tag.
pub const FRAME_BYTES_MAX: u32 = 65_535 + 18;

/// Options of `ginnel monitor`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Formats and definitions: docs/monitor.md")]
pub struct MonitorOptions {
    /// Name of a running stack (see "ginnel stat --list"). May be left out if only one runs.
    #[arg(help_heading = "Source", conflicts_with_all = ["read", "interface"])]
    name: Option<String>,

    /// Read a capture, pcap or pcapng; "-" is standard input.
    #[arg(long, short, value_name = "FILE", help_heading = "Source", conflicts_with = "interface")]
    read: Option<PathBuf>,

    /// Listen at an interface of the kernel, in both directions. Needs CAP_NET_RAW.
    #[arg(long, short, value_name = "INTERFACE", help_heading = "Source")]
    interface: Option<String>,

    /// Copy only the first BYTES of each frame of a stack. The heads of all messages must be in them.
    #[arg(long, value_name = "BYTES", help_heading = "Source", default_value_t = FRAME_BYTES_MAX, value_parser = clap::value_parser!(u32).range(64..), conflicts_with_all = ["read", "interface"])]
    snaplen: u32,

    /// Memory for the copies of frames, for each device and direction of each shard. The stack's process uses
    /// it while it is observed.
    #[arg(long, value_name = "SIZE", help_heading = "Source", default_value = "8MiB", value_parser = ring_bytes, conflicts_with_all = ["read", "interface"])]
    ring_bytes: u64,

    #[command(flatten)]
    protocol: protocol::ProtocolOptions,

    /// Report every SECONDS. Default: 10s from a live source; only the total of a capture.
    #[arg(long, value_name = "SECONDS", value_parser = interval)]
    interval: Option<Duration>,

    /// Stop after SECONDS. Default: at the end of the source, or at Ctrl-C.
    #[arg(long, short, value_name = "SECONDS", value_parser = parse_duration)]
    duration: Option<Duration>,

    /// Print JSON: a line for each interval and one for the total.
    #[arg(long)]
    json: bool,

    /// Write cdf.txt, sketch.txt and cdf.svg into this directory.
    #[arg(long, short, value_name = "DIRECTORY")]
    output: Option<PathBuf>,

    /// Export the measurements to Prometheus at this address, as "ginnel metrics" does.
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics: Option<SocketAddr>,

    /// Most connections to follow. One over IPv4 takes at most 64 bytes while it is idle.
    #[arg(long, value_name = "N", default_value_t = 16_000_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000_000))]
    connections_max: u32,

    /// Memory for the heads of messages of which a part was seen, of all connections together.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = parse_bytes)]
    head_bytes_max: u64,

    /// Forget connections without packets for this time.
    #[arg(long, value_name = "SECONDS", default_value = "1h", value_parser = parse_duration)]
    idle_timeout: Duration,
}

/// Parses the size of a ring for copies of frames.
pub fn ring_bytes(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text)?;
    let is_valid = (RING_BYTES_MIN as u64..=RING_BYTES_MAX as u64).contains(&bytes);
    if is_valid { Ok(bytes) } else { Err("not 64KiB to 1GiB".into()) }
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    let is_valid = (Duration::from_millis(10)..=Duration::from_secs(86_400)).contains(&interval);
    if is_valid { Ok(interval) } else { Err("not 10ms to 24h".into()) }
}

/// Runs the monitor.
pub fn run(options: &MonitorOptions) -> Result<(), Failure> {
    let rules = options.protocol.rules()?;
    let config = EngineConfig {
        connections_max: options.connections_max as usize,
        head_bytes_max: usize::try_from(options.head_bytes_max).unwrap_or(usize::MAX),
        idle_timeout: options.idle_timeout,
        // Keyed at random, once for each process.
        seed: RandomState::new().build_hasher().finish(),
        ..EngineConfig::new(rules)
    };
    let engine = Engine::new(&config).map_err(Failure::usage)?;
    let stop = signals::stop_on_signal("the measurement")?;
    let (name, mut source) = open_source(options, &stop)?;
    let interval = match source.now() {
        Some(_) => Some(options.interval.unwrap_or(LIVE_INTERVAL)),
        None => options.interval,
    };
    if source.now().is_some() {
        note(format_args!("observing {name}; Ctrl-C ends"));
    }
    let mut output = Output::new(&name, options.json, options.output.as_deref())?;
    let mut session = Session::new(engine, interval);
    let mut publisher = match options.metrics {
        None => None,
        Some(listen) => {
            let (publisher, published) = channel(&name);
            let address = metrics::serve(listen, published)?;
            note(format_args!("metrics at http://{address}/metrics"));
            Some(publisher)
        }
    };
    let mut publish = |session: &Session, lost| {
        publisher.iter_mut().for_each(|publisher| publisher.publish_if_due(session, lost));
    };
    let result = measure(&mut session, &mut *source, &mut output, &stop, options.duration, &mut publish);
    let lost = source.lost();
    let total = session.finish(lost, &mut |interval| output.interval(interval));
    output.total(&total, session.total())?;
    result.map_err(|e| {
        let packets = total.counters.packets;
        Failure::running(format!("{name}: {e}; the report covers the {packets} packets before that"))
    })
}

/// Passes packets from the source to the session until the source ends, a signal, or the end of `duration`.
/// Calls `publish` again and again with the number of packets that the source has lost.
fn measure(
    session: &mut Session,
    source: &mut dyn PacketSource,
    output: &mut Output,
    stop: &StopFlag,
    duration: Option<Duration>,
    publish: &mut dyn FnMut(&Session, u64),
) -> Result<(), SourceError> {
    let started = Instant::now();
    let mut lost = 0;
    while !stop.is_set()
        && duration.is_none_or(|duration| started.elapsed() < duration)
        && !output.is_closed()
    {
        let polled = source.poll(&mut |link, packets| {
            session.process(link, packets, lost, &mut |interval| output.interval(interval));
        });
        // The end of the run may have cut a packet of standard input.
        let has_ended = || stop.is_set() || duration.is_some_and(|duration| started.elapsed() >= duration);
        let state = match polled {
            Err(SourceError::CutShort) if has_ended() => SourceState::End,
            polled => polled?,
        };
        lost = source.lost();
        publish(session, lost);
        match state {
            SourceState::More => {}
            SourceState::End => break,
            SourceState::Idle => {
                if let Some(now) = source.now() {
                    session.advance(now, lost, &mut |interval| output.interval(interval));
                }
                source.wait(WAIT)?;
            }
        }
    }
    Ok(())
}

/// Opens the source, and returns its name for messages.
fn open_source(
    options: &MonitorOptions,
    stop: &StopFlag,
) -> Result<(String, Box<dyn PacketSource>), Failure> {
    if let Some(interface) = &options.interface {
        let source = Interface::open(interface).map_err(|e| Failure::running(e.to_string()))?;
        return Ok((format!("interface {interface}"), Box::new(source)));
    }
    let Some(path) = &options.read else { return open_stack(options) };
    let end = options.duration.and_then(|duration| Instant::now().checked_add(duration));
    let opened = open_capture(path, StdinUntilEnd::new(stop.clone(), end));
    let (name, source) = opened.map_err(|failure| match stop.is_set() {
        true => Failure::running("interrupted before the head of a capture came"),
        false => failure,
    })?;
    Ok((name, Box::new(source)))
}

/// Opens a capture, or `stdin` if the path is "-". Returns its name for messages, too.
pub fn open_capture(path: &Path, stdin: impl Read + 'static) -> Result<(String, CaptureFile), Failure> {
    let is_stdin = path.as_os_str() == "-";
    let name = if is_stdin { "standard input".to_owned() } else { path.display().to_string() };
    let failed = |e: SourceError| Failure::running(format!("{name}: {e}"));
    let input: Box<dyn Read> = match is_stdin {
        true => Box::new(stdin),
        false => Box::new(File::open(path).map_err(|e| failed(e.into()))?),
    };
    let source = CaptureFile::open(input).map_err(failed)?;
    Ok((name, source))
}

/// Starts to observe a running stack.
fn open_stack(options: &MonitorOptions) -> Result<(String, Box<dyn PacketSource>), Failure> {
    let running = run_dir::find(options.name.as_deref()).map_err(|e| {
        let hint = if options.name.is_none() { "; other sources: --read, --interface" } else { "" };
        Failure::running(format!("{e}{hint}"))
    })?;
    let name = format!("stack \"{}\"", running.name);
    let source =
        RunningStackSource::attach(&running.path, options.ring_bytes as usize, options.snaplen as usize);
    let source = source.map_err(|e| Failure::running(format!("{name}: {e}")))?;
    if !source.has_rings() {
        return Err(Failure::running(format!("{name}: the stack has no devices (yet)")));
    }
    Ok((name, Box::new(source)))
}
