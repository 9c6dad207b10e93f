//! The frames of a running stack, in the order of their times.

use super::{PacketSource, PacketVisitor, SourceError, SourceState, TimedPacket};
use crate::frame::LinkType;
use arrayvec::ArrayVec;
use core::time::Duration;
use ginnel::inspect::{MirrorDirection, MirrorRing, StackMirror};
use ginnel::{Instant, clock};
use ginnel_devices::mirror::ring::MirroredFrame;
use std::collections::VecDeque;
use std::io;
use std::path::Path;

/// Frames that are taken from a ring at a time.
const FRAMES_MAX: usize = 1024;
/// Packets that are passed on together.
const PACKETS_MAX: usize = 64;
/// A shard publishes a burst at most this long after it has read the clock for it, unless it loses its CPU.
const PUBLICATION_TIME: Duration = Duration::from_millis(1);

/// A frame that was taken from a ring, and where its bytes begin.
type TakenFrame = (MirroredFrame, usize);

/// A frame of a stack.
#[derive(Clone, Copy, Debug)]
pub struct StackFrame<'a> {
    /// Index of the ring in [`StackFrames::rings`].
    pub ring: usize,
    /// Time, length, and the offloads that the device completes.
    pub frame: MirroredFrame,
    /// The bytes that were copied: the beginning of the frame.
    pub bytes: &'a [u8],
}

/// The frames of all devices and shards of a stack.
pub struct StackFrames {
    mirror: StackMirror,
    /// For each ring the frames that were taken from it and not passed on, and the bytes of them.
    frames: Vec<VecDeque<TakenFrame>>,
    bytes: Vec<Vec<u8>>,
    has_ended: bool,
}

/// Takes frames from a ring if all frames taken from it before were passed on. Returns the time up to which
/// `frames` is complete; `None` if the ring was emptied.
fn refill(
    ring: &mut MirrorRing,
    frames: &mut VecDeque<TakenFrame>,
    bytes: &mut Vec<u8>,
) -> io::Result<Option<Instant>> {
    let is_refilled = frames.is_empty();
    if is_refilled {
        bytes.clear();
        let end = ring.reader.written()?;
        while frames.len() < FRAMES_MAX {
            let start = bytes.len();
            let Some(frame) = ring.reader.read(end, bytes)? else { break };
            frames.push_back((frame, start));
        }
        ring.reader.release();
    }
    let is_complete = is_refilled && frames.len() < FRAMES_MAX;
    Ok(frames.back().filter(|_| !is_complete).map(|(frame, _)| frame.at))
}

impl StackFrames {
    /// Starts to observe the stack with this directory: see [`StackMirror::attach`].
    ///
    /// # Errors
    /// The errors of [`StackMirror::attach`].
    pub fn attach(dir: &Path, ring_bytes: usize, snaplen: usize, with_loopback: bool) -> io::Result<Self> {
        let mut mirror = StackMirror::attach(dir, ring_bytes, snaplen, with_loopback)?;
        // What a shard has received comes before what it sends in the same turn.
        mirror.rings.sort_by_key(|ring| ring.direction == MirrorDirection::Sent);
        let count = mirror.rings.len();
        Ok(Self {
            mirror,
            frames: vec![VecDeque::new(); count],
            bytes: vec![Vec::new(); count],
            has_ended: false,
        })
    }

    /// Returns the rings, of which there are none until the shards of the stack are built.
    #[must_use]
    pub fn rings(&self) -> &[MirrorRing] {
        &self.mirror.rings
    }

    /// Passes the next frames to `visit`, in the order of their times. Frames of the last millisecond stay,
    /// because earlier ones may still be published.
    ///
    /// # Errors
    /// A ring is corrupt.
    pub fn poll<'a>(&'a mut self, mut visit: impl FnMut(StackFrame<'a>)) -> io::Result<SourceState> {
        // Before the rings are read: a burst that is published later has a later time.
        let now = clock::now();
        self.has_ended |= self.mirror.has_ended();
        let mut limit = match self.has_ended {
            true => Instant::MAX,
            false => Instant::from_nanos(now.as_nanos().saturating_sub(PUBLICATION_TIME.as_nanos() as u64)),
        };
        let Self { mirror, frames, bytes, has_ended } = self;
        // Sent frames first: the received frames that caused them are in their rings by then.
        for number in (0..frames.len()).rev() {
            let ring = &mut mirror.rings[number];
            if let Some(until) = refill(ring, &mut frames[number], &mut bytes[number])? {
                limit = limit.min(until);
            }
        }
        let (bytes, mut count): (&'a [Vec<u8>], _) = (bytes, 0);
        loop {
            let firsts = frames.iter().enumerate();
            let first = firsts.filter_map(|(number, frames)| Some((frames.front()?.0.at, number))).min();
            let Some((_, ring)) = first.filter(|(at, _)| *at <= limit) else { break };
            let Some((frame, start)) = frames[ring].pop_front() else { break };
            visit(StackFrame { ring, frame, bytes: &bytes[ring][start..start + frame.copied_len] });
            count += 1;
        }
        Ok(match (count, *has_ended) {
            (0, false) => SourceState::Idle,
            // The rings were read after the stack had ended.
            (0, true) => SourceState::End,
            _ => SourceState::More,
        })
    }

    /// Waits for frames after [`SourceState::Idle`], `timeout` at most.
    pub fn wait(&self, timeout: Duration) {
        // The shards wake nobody for a monitor.
        std::thread::sleep(timeout.min(PUBLICATION_TIME));
    }
}

/// The frames of a stack as packets for the monitor.
pub struct RunningStackSource {
    frames: StackFrames,
}

impl RunningStackSource {
    /// Starts to observe the devices of the stack with this directory: see [`StackMirror::attach`].
    ///
    /// # Errors
    /// The errors of [`StackMirror::attach`].
    pub fn attach(dir: &Path, ring_bytes: usize, snaplen: usize) -> io::Result<Self> {
        // What the stack sends to itself is on no wire.
        Ok(Self { frames: StackFrames::attach(dir, ring_bytes, snaplen, false)? })
    }

    /// Returns whether the stack has devices, which it has as soon as its shards are built.
    #[must_use]
    pub fn has_rings(&self) -> bool {
        !self.frames.rings().is_empty()
    }
}

impl PacketSource for RunningStackSource {
    fn poll(&mut self, visit: &mut PacketVisitor<'_>) -> Result<SourceState, SourceError> {
        let mut packets = ArrayVec::<TimedPacket<'_>, PACKETS_MAX>::new();
        let state = self.frames.poll(|StackFrame { frame, bytes, .. }| {
            packets.push((frame.at, bytes));
            if packets.is_full() {
                visit(LinkType::Ethernet, &packets);
                packets.clear();
            }
        })?;
        if !packets.is_empty() {
            visit(LinkType::Ethernet, &packets);
        }
        Ok(state)
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.frames.wait(timeout);
        Ok(())
    }

    fn now(&self) -> Option<Instant> {
        let nanos = clock::now().as_nanos().saturating_sub(2 * PUBLICATION_TIME.as_nanos() as u64);
        Some(Instant::from_nanos(nanos))
    }

    fn lost(&mut self) -> u64 {
        self.frames.rings().iter().map(|ring| ring.reader.lost()).sum()
    }
}
