//! `ginnel capture`: writes the frames of a running stack to a pcapng file or to a pipe.

use super::monitor::{FRAME_BYTES_MAX, ring_bytes};
use crate::failure::Failure;
use crate::output::note;
use crate::signals;
use crate::table::with_thousands_separators;
use clap::Args;
use core::time::Duration;
use ginnel::inspect::{MirrorDirection, MirrorRing};
use ginnel::{StopFlag, clock, run_dir};
use ginnel_apps::units::parse_duration;
use ginnel_devices::capture::pcapng::{CapturedInterface, CapturedPacket, Direction, PcapngStream};
use ginnel_matcher::Expression;
use ginnel_monitor::sources::SourceState;
use ginnel_monitor::sources::stack::{StackFrame, StackFrames};
use ginnel_stack::wire::gso::complete_checksum;
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// How long to wait for frames before the signals and the clock are looked at.
const WAIT: Duration = Duration::from_millis(20);
/// After this time the frames that were sent or received before a signal have been published.
const LAST_FRAMES: Duration = Duration::from_millis(3);
/// Bytes that are collected before they are written, while there are more frames.
const BUFFER_BYTES: usize = 256 << 10;

/// Options of `ginnel capture`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Examples:
  ginnel capture web tcp port 80 | tshark -r -
  ginnel capture web --write trace.pcapng --duration 10s")]
pub struct CaptureOptions {
    /// Name of a running stack (see "ginnel stat --list"). May be left out if only one runs and there is no
    /// filter.
    name: Option<String>,

    /// Write only frames that this expression in tcpdump's language accepts (pcap-filter(7)). Needs libpcap.
    #[arg(value_name = "FILTER")]
    filter: Vec<String>,

    /// Write to this file instead of standard output.
    #[arg(long, short, value_name = "FILE")]
    write: Option<PathBuf>,

    /// Write only the first BYTES of each frame. Without a filter, no more is copied from the stack; then
    /// checksums that are left to a device stay incomplete in frames that are cut.
    #[arg(long, short, value_name = "BYTES", default_value_t = FRAME_BYTES_MAX, value_parser = clap::value_parser!(u32).range(64..))]
    snaplen: u32,

    /// Stop after this many frames.
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Stop after SECONDS. Default: at the end of the stack, or at Ctrl-C.
    #[arg(long, short, value_name = "SECONDS", value_parser = parse_duration)]
    duration: Option<Duration>,

    /// Memory for the copies of frames, for each device and direction of each shard. The stack's process uses
    /// it during the capture.
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = ring_bytes)]
    ring_bytes: u64,
}

/// Captures frames until the stack ends, a signal, or the end that the options name.
pub fn run(options: &CaptureOptions) -> Result<(), Failure> {
    let filter = match options.filter.join(" ") {
        text if text.is_empty() => None,
        text => {
            let expression = text.parse::<Expression>();
            Some(expression.map_err(|e| Failure::usage(format!("filter \"{text}\": {e}")))?)
        }
    };
    if options.write.is_none() && io::stdout().is_terminal() {
        return Err(Failure::usage(
            "standard output is a terminal: use --write FILE, or a pipe as in \"| tshark -r -\"",
        ));
    }
    let running = run_dir::find(options.name.as_deref()).map_err(|e| Failure::running(e.to_string()))?;
    let name = format!("stack \"{}\"", running.name);
    // A filter sees the whole frame, as that of tcpdump does.
    let copied = if filter.is_some() { FRAME_BYTES_MAX } else { options.snaplen };
    let frames = StackFrames::attach(&running.path, options.ring_bytes as usize, copied as usize, true);
    let mut frames = frames.map_err(|e| Failure::running(format!("{name}: {e}")))?;
    if frames.rings().is_empty() {
        return Err(Failure::running(format!("{name}: the stack has no devices (yet)")));
    }
    let (out, path): (Box<dyn Write>, _) = match &options.write {
        None => (Box::new(io::stdout()), "standard output".to_owned()),
        Some(path) => {
            let name = path.display().to_string();
            let file = File::create(path).map_err(|e| Failure::running(format!("{name}: {e}")))?;
            (Box::new(file), name)
        }
    };
    let stop = signals::stop_on_signal("the capture")?;
    note(format_args!("capturing from {name}; Ctrl-C ends"));
    let written = CaptureOutput::create(out, options, filter, frames.rings()).and_then(|mut output| {
        output.copy(&mut frames, &stop, options)?;
        Ok(output)
    });
    match written {
        Ok(output) => {
            note(output.summary(frames.rings()));
            Ok(())
        }
        // A reader that has seen enough.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(Failure::running(format!("{path}: {e}"))),
    }
}

/// A capture that is being written, and its counts.
struct CaptureOutput {
    stream: PcapngStream<BufWriter<Box<dyn Write>>>,
    filter: Option<Expression>,
    snaplen: usize,
    /// UNIX time at time 0 of the frames' clock.
    epoch: Duration,
    /// Interface, in the file, of each ring.
    interfaces: Vec<u32>,
    /// Frames of each ring that were taken.
    taken: Vec<u64>,
    written: u64,
    scratch: Vec<u8>,
}

impl CaptureOutput {
    /// Writes the head of the file. Its interfaces are the devices of all shards.
    fn create(
        out: Box<dyn Write>,
        options: &CaptureOptions,
        filter: Option<Expression>,
        rings: &[MirrorRing],
    ) -> io::Result<Self> {
        let has_shards = rings.iter().any(|ring| ring.shard != rings[0].shard);
        let mut names: Vec<String> = Vec::new();
        let mut interfaces = Vec::new();
        for ring in rings {
            let name =
                if has_shards { format!("{}@{}", ring.device, ring.shard) } else { ring.device.clone() };
            let known = names.iter().position(|known| *known == name);
            interfaces.push(known.unwrap_or(names.len()) as u32);
            if known.is_none() {
                names.push(name);
            }
        }
        let text = filter.as_ref().map(|filter| filter.text().to_owned());
        let described: Vec<_> = names
            .into_iter()
            .map(|name| CapturedInterface { name, snaplen: options.snaplen, filter: text.clone() })
            .collect();
        let mut stream = PcapngStream::create(BufWriter::with_capacity(BUFFER_BYTES, out), &described)?;
        stream.flush()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self {
            stream,
            filter,
            snaplen: options.snaplen as usize,
            epoch: now.saturating_sub(Duration::from_nanos(clock::now().as_nanos())),
            interfaces,
            taken: vec![0; rings.len()],
            written: 0,
            scratch: Vec::new(),
        })
    }

    /// Writes frames until the end of the capture.
    fn copy(
        &mut self,
        frames: &mut StackFrames,
        stop: &StopFlag,
        options: &CaptureOptions,
    ) -> io::Result<()> {
        let started = Instant::now();
        let count_max = options.count.unwrap_or(u64::MAX);
        // The end of the capture, once it is known; frames until then may still be in the rings.
        let mut until = None;
        loop {
            let must_end = stop.is_set() || options.duration.is_some_and(|max| started.elapsed() >= max);
            if must_end && until.is_none() {
                until = Some(clock::now());
                std::thread::sleep(LAST_FRAMES);
            }
            let mut is_past_end = false;
            let directions: Vec<_> = frames.rings().iter().map(|ring| ring.direction).collect();
            let mut result = Ok(());
            let state = frames.poll(|frame| {
                if until.is_some_and(|until| frame.frame.at > until) {
                    is_past_end = true;
                } else if result.is_ok() && self.written < count_max {
                    result = self.put(&frame, directions[frame.ring]);
                }
            })?;
            result?;
            if state != SourceState::More {
                self.stream.flush()?;
            }
            let is_drained = until.is_some() && (is_past_end || state != SourceState::More);
            if is_drained || state == SourceState::End || self.written >= count_max {
                return self.finish(frames.rings());
            }
            if state == SourceState::Idle {
                frames.wait(WAIT);
            }
        }
    }

    /// Writes a frame if the filter accepts it.
    fn put(&mut self, frame: &StackFrame<'_>, direction: MirrorDirection) -> io::Result<()> {
        let StackFrame { ring, frame, bytes } = *frame;
        self.taken[ring] += 1;
        self.scratch.clear();
        self.scratch.extend_from_slice(bytes);
        if let Some((start, offset)) = frame.meta.partial_checksum
            && frame.copied_len == frame.frame_len
        {
            // A partial checksum that contradicts the frame stays as it is.
            let _ = complete_checksum(&mut self.scratch, start.into(), offset.into());
        }
        if self.filter.as_ref().is_some_and(|filter| !filter.accepts(&self.scratch)) {
            return Ok(());
        }
        self.scratch.truncate(self.snaplen);
        let packet = CapturedPacket {
            direction: match direction {
                MirrorDirection::Received => Direction::Received,
                MirrorDirection::Sent => Direction::Sent,
            },
            bytes: &self.scratch,
            original_len: frame.frame_len,
            segment_bytes: frame.meta.gso.map(|gso| gso.size),
        };
        self.written += 1;
        let at = self.epoch + Duration::from_nanos(frame.at.as_nanos());
        self.stream.write(self.interfaces[ring], at, &packet)
    }

    /// Writes what passed each interface, and what was lost.
    fn finish(&mut self, rings: &[MirrorRing]) -> io::Result<()> {
        let at = self.epoch + Duration::from_nanos(clock::now().as_nanos());
        let count = self.interfaces.iter().max().map_or(0, |last| last + 1);
        for interface in 0..count {
            let (mut taken, mut lost) = (0, 0);
            for (ring, reader) in
                rings.iter().enumerate().filter(|(ring, _)| self.interfaces[*ring] == interface)
            {
                taken += self.taken[ring];
                lost += reader.reader.lost();
            }
            self.stream.write_statistics(interface, at, taken + lost, lost)?;
        }
        self.stream.flush()
    }

    /// Returns a line about the frames, as that of tcpdump.
    fn summary(&self, rings: &[MirrorRing]) -> String {
        let lost: u64 = rings.iter().map(|ring| ring.reader.lost()).sum();
        let taken: u64 = self.taken.iter().sum();
        let mut text = format!("{} frames written", with_thousands_separators(self.written));
        if self.filter.is_some() {
            text +=
                &format!(", {} not accepted by the filter", with_thousands_separators(taken - self.written));
        }
        if lost > 0 {
            text += &format!(
                ", {} lost because the capture was too slow (--ring-bytes makes more room)",
                with_thousands_separators(lost)
            );
        }
        text
    }
}
