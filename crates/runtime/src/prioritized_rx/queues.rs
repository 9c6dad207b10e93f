//! Bounded queues of received frames, one for each class of priority.
//!
//! Frames of one flow leave the queues in the order in which they arrived: a frame pulls earlier frames of
//! its flow along that wait in lower classes. Frames are copied into a ring of bytes, since devices need
//! their memory back.

use super::flow::{self, FrameKind};
use crate::config::PriorityConfig;
use ginnel_stack::device::{BURST_FRAMES_MAX, Gso, Label, RxBurst, RxChecksum, RxFrame};
use ginnel_stack::handle::PortId;
use ginnel_stack::priority::{self, CLASSES, ClassSet};
use std::collections::hash_map::Entry as MapEntry;
use std::collections::{HashMap, VecDeque};

/// Frames of control of a class may use this many times the frames that may wait.
const CONTROL_FACTOR: usize = 2;

/// One byte of a queue in this many is for control frames alone.
const CONTROL_BYTES_PART: usize = 8;

/// Frames are pulled along into a queue only while fewer than one in this many of its entries are in use, so
/// that they do not push out the frames of its class.
const PULLED_PART: usize = 2;

/// The windows of the flows that wait in a queue admit together one byte of the queue in this many.
const WINDOWS_PART: usize = 4;

/// The result of queuing a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queued {
    /// The frame waits.
    Waiting,
    /// The queue of its class had no room, and the frame was dropped.
    Shed,
    /// The queue of its class had no room, and the frame must not be dropped: it has to be processed after
    /// the frames of its flow ([`ReceiveQueues::take_flow`]).
    Refused {
        /// The flow.
        flow: u32,
    },
}

/// The queues.
pub(crate) struct ReceiveQueues {
    classes: [FrameQueue; CLASSES],
    with_frames: ClassSet,
    limits: Limits,
}

/// Limits of each queue.
#[derive(Clone, Copy, Debug)]
struct Limits {
    frames: usize,
    bytes: usize,
}

/// Frames that are processed together.
pub(crate) struct QueuedBurst<'a> {
    pub(crate) class: u8,
    pub(crate) port: PortId,
    /// True if earlier frames of the flows of these frames wait in lower classes.
    pub(crate) is_overtaking: bool,
    pub(crate) frames: RxBurst<'a>,
    /// Entries of the queue that the burst stands for, including those that were pulled along before.
    entries: usize,
}

/// The part of a burst that has to be removed from its queue when it was processed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Processed {
    class: u8,
    entries: usize,
}

impl QueuedBurst<'_> {
    /// Returns what to pass to [`ReceiveQueues::remove`].
    pub(crate) fn processed(&self) -> Processed {
        Processed { class: self.class, entries: self.entries }
    }
}

/// A frame in a queue.
struct Entry {
    /// Position in the ring of bytes.
    offset: u32,
    len: u32,
    checksum: RxChecksum,
    gso: Option<Gso>,
    label: Label,
    port: PortId,
    flow: u32,
    /// Distance to the next frame of the flow in this queue, in entries; 0 if there is none.
    to_next: u32,
    /// True if the frame belongs to the flow's frames, whose order is kept.
    is_ordered: bool,
    /// True if the frame has left for a higher class.
    is_moved: bool,
    /// True if the socket of the flow wants this frame before earlier ones.
    may_overtake: bool,
}

/// The first and the last frame of a flow in a queue, by their numbers since the queue exists.
#[derive(Clone, Copy)]
struct FlowFrames {
    first: u64,
    last: u64,
}

/// The queue of one class.
#[derive(Default)]
struct FrameQueue {
    entries: VecDeque<Entry>,
    /// Number of the first entry.
    first: u64,
    /// Frames that have not moved to a higher class.
    frames: usize,
    /// The bytes of the frames; allocated with the first frame. Pages that were never used take no memory.
    ring: Vec<u8>,
    /// The flows of the frames that have not moved. Like `entries`, it has its full size from the first frame
    /// on.
    flows: HashMap<u32, FlowFrames>,
}

impl ReceiveQueues {
    pub(crate) fn new(config: &PriorityConfig) -> Self {
        let limits = Limits { frames: config.queue_frames as usize, bytes: config.queue_bytes as usize };
        Self { classes: core::array::from_fn(|_| FrameQueue::default()), with_frames: 0, limits }
    }

    /// Returns the classes with frames.
    pub(crate) fn with_frames(&self) -> ClassSet {
        self.with_frames
    }

    /// Copies a frame to the queue of its class. `wants_overtaking` tells whether the socket of the frame's
    /// flow wants it before earlier frames; it is asked only if there are such frames.
    pub(crate) fn push(
        &mut self,
        port: PortId,
        frame: &RxFrame<'_>,
        wants_overtaking: impl FnOnce(&[u8]) -> bool,
    ) -> Queued {
        let kind = flow::inspect(frame.bytes);
        let mut class = usize::from(priority::class(frame.label.priority()));
        let lower = self.with_frames & ((1 << class) - 1) as ClassSet;
        let mut may_overtake = false;
        if lower != 0
            && kind.is_ordered
            && let Some(lowest) = (0..class).find(|lower| self.classes[*lower].has_flow(kind.flow))
        {
            may_overtake = wants_overtaking(frame.bytes);
            if !may_overtake && !self.pull_along(kind.flow, class) {
                // The frame keeps its place behind the earlier ones of its flow.
                class = lowest;
            }
        }
        let pushed = self.classes[class].push(self.limits, port, frame, kind, may_overtake);
        match pushed {
            Queued::Waiting => self.with_frames |= 1 << class,
            Queued::Shed if kind.is_control => return Queued::Refused { flow: kind.flow },
            Queued::Shed | Queued::Refused { .. } => {}
        }
        pushed
    }

    /// Takes the frames of a flow out of the queues and passes them to `process`, in their order, and with
    /// the information whether they have overtaken others that follow.
    pub(crate) fn take_flow(&mut self, flow: u32, process: &mut dyn FnMut(PortId, RxFrame<'_>, bool)) {
        for class in (0..CLASSES).rev() {
            let has_lower = self.classes[..class].iter().any(|queue| queue.has_flow(flow));
            let queue = &mut self.classes[class];
            while let Some(frames) = queue.flows.get(&flow) {
                let entry = queue.entry(frames.first);
                process(entry.port, queue.frame(entry), entry.may_overtake && has_lower);
                queue.move_first(flow);
            }
            self.settle(class);
        }
    }

    /// Removes the entries of a class that has no frames any more.
    fn settle(&mut self, class: usize) {
        let queue = &mut self.classes[class];
        if queue.frames == 0 {
            queue.clear();
            self.with_frames &= !(1 << class);
        }
    }

    /// Moves the frames of a flow that wait in lower classes to the end of `class`, in their order. Returns
    /// false if there is no room for all of them; those that have moved stay there.
    fn pull_along(&mut self, flow: u32, class: usize) -> bool {
        // Earlier frames of a flow never wait in a lower class than later ones.
        for lower in (0..class).rev() {
            let [queue, target] = self.classes.get_disjoint_mut([lower, class]).expect("two classes");
            while let Some(frames) = queue.flows.get(&flow) {
                if target.entries.len() >= self.limits.frames / PULLED_PART {
                    return false;
                }
                let entry = queue.entry(frames.first);
                let frame = queue.frame(entry);
                let kind = FrameKind { flow, is_control: true, is_ordered: true };
                if target.push(self.limits, entry.port, &frame, kind, entry.may_overtake) == Queued::Shed {
                    return false;
                }
                queue.move_first(flow);
                self.with_frames |= 1 << class;
            }
            self.settle(lower);
        }
        true
    }

    /// Lends up to `max` frames of a class that arrived on one device. Before a frame whose flow has earlier
    /// frames in a higher class, those are lent.
    pub(crate) fn next_burst(&self, class: u8, max: usize) -> Option<QueuedBurst<'_>> {
        let mut class = class;
        let mut head = self.classes[usize::from(class)].next(0)?;
        // Each step leads to a higher class.
        while let Some(higher) = self.higher_with_flow(class, head.1) {
            class = higher;
            head = self.classes[usize::from(class)].next(0)?;
        }
        let queue = &self.classes[usize::from(class)];
        let port = head.1.port;
        let is_overtaking = self.overtakes(class, head.1);
        let mut frames = RxBurst::new();
        let mut entries = 0;
        while frames.len() < max.min(BURST_FRAMES_MAX)
            && let Some((index, entry)) = queue.next(entries)
            && entry.port == port
            && self.overtakes(class, entry) == is_overtaking
            && (index == head.0 || self.higher_with_flow(class, entry).is_none())
        {
            frames.push(queue.frame(entry));
            entries = index + 1;
        }
        Some(QueuedBurst { class, port, is_overtaking, frames, entries })
    }

    /// Returns the highest class above `class`, the class of this entry, that has a frame of the flow of the
    /// entry.
    fn higher_with_flow(&self, class: u8, entry: &Entry) -> Option<u8> {
        let higher = self.with_frames >> class >> 1;
        if higher == 0 || !entry.is_ordered {
            return None;
        }
        (class + 1..CLASSES as u8)
            .rev()
            .find(|higher| self.classes[usize::from(*higher)].has_flow(entry.flow))
    }

    /// Returns whether earlier frames of the flow of a frame wait in lower classes.
    fn overtakes(&self, class: u8, entry: &Entry) -> bool {
        entry.may_overtake && (0..usize::from(class)).any(|lower| self.classes[lower].has_flow(entry.flow))
    }

    /// Returns how many bytes each peer of a class may send ahead, so that the frames of those that wait now
    /// fill a part of the queue; `u32::MAX` if none waits.
    pub(crate) fn window_limit(&self, class: u8) -> u32 {
        self.classes[usize::from(class)].window_limit(self.limits)
    }

    /// Removes the frames of a burst, which was the last one that was lent.
    pub(crate) fn remove(&mut self, processed: Processed) {
        let queue = &mut self.classes[usize::from(processed.class)];
        queue.remove(processed.entries);
        self.settle(processed.class.into());
    }
}

impl FrameQueue {
    fn push(
        &mut self,
        limits: Limits,
        port: PortId,
        frame: &RxFrame<'_>,
        kind: FrameKind,
        may_overtake: bool,
    ) -> Queued {
        let (frames_max, bytes_max) = match kind.is_control {
            true => (limits.frames * CONTROL_FACTOR, limits.bytes),
            false => (limits.frames, limits.bytes - limits.bytes / CONTROL_BYTES_PART),
        };
        if self.ring.is_empty() {
            self.ring = vec![0; limits.bytes];
            self.entries.reserve_exact(limits.frames * CONTROL_FACTOR);
            self.flows.reserve(limits.frames * CONTROL_FACTOR);
        }
        // Moved entries stay until those before them leave, so they count as well.
        let Some(offset) =
            self.room(frame.bytes.len(), bytes_max).filter(|_| self.entries.len() < frames_max)
        else {
            return Queued::Shed;
        };
        self.ring[offset..offset + frame.bytes.len()].copy_from_slice(frame.bytes);
        let number = self.first + self.entries.len() as u64;
        if kind.is_ordered {
            self.link(kind.flow, number);
        }
        let RxFrame { bytes, checksum, gso, label } = *frame;
        self.entries.push_back(Entry {
            // Neither can truncate: the ring has at most 1 GiB.
            offset: offset as u32,
            len: bytes.len() as u32,
            checksum,
            gso,
            label,
            port,
            flow: kind.flow,
            to_next: 0,
            is_ordered: kind.is_ordered,
            is_moved: false,
            may_overtake,
        });
        self.frames += 1;
        Queued::Waiting
    }

    /// Returns the position of `len` free contiguous bytes of the ring; `None` if there are none, or if more
    /// than `bytes_max` bytes would be in use.
    fn room(&self, len: usize, bytes_max: usize) -> Option<usize> {
        let (Some(oldest), Some(newest)) = (self.entries.front(), self.entries.back()) else {
            return (len <= bytes_max).then_some(0);
        };
        let (start, end) = (oldest.offset as usize, (newest.offset + newest.len) as usize);
        let is_wrapped = newest.offset < oldest.offset;
        if self.used() + len > bytes_max {
            return None;
        }
        if is_wrapped {
            // One byte stays free, so that a full ring differs from an empty one.
            return (end + len < start).then_some(end);
        }
        if end + len <= self.ring.len() {
            return Some(end);
        }
        (len < start).then_some(0)
    }

    /// Returns the number of bytes of the ring in use.
    fn used(&self) -> usize {
        let (Some(oldest), Some(newest)) = (self.entries.front(), self.entries.back()) else { return 0 };
        let (start, end) = (oldest.offset as usize, (newest.offset + newest.len) as usize);
        if newest.offset < oldest.offset { self.ring.len() - start + end } else { end - start }
    }

    fn window_limit(&self, limits: Limits) -> u32 {
        if self.flows.is_empty() {
            return u32::MAX;
        }
        // Many small frames reach the limit of frames first.
        let frame_bytes = self.used() / self.entries.len().max(1);
        let bytes = limits.bytes.min(limits.frames * frame_bytes) / WINDOWS_PART;
        // Cannot truncate: the ring has at most 1 GiB.
        (bytes / self.flows.len()) as u32
    }

    /// Appends the entry with this number, which is about to be pushed, to the frames of its flow.
    fn link(&mut self, flow: u32, number: u64) {
        match self.flows.entry(flow) {
            MapEntry::Occupied(mut frames) => {
                let last = core::mem::replace(&mut frames.get_mut().last, number);
                // Cannot truncate: a queue has at most 2^21 entries.
                self.entries[(last - self.first) as usize].to_next = (number - last) as u32;
            }
            MapEntry::Vacant(vacant) => {
                vacant.insert(FlowFrames { first: number, last: number });
            }
        }
    }

    fn entry(&self, number: u64) -> &Entry {
        &self.entries[(number - self.first) as usize]
    }

    fn has_flow(&self, flow: u32) -> bool {
        self.frames != 0 && self.flows.contains_key(&flow)
    }

    /// Marks the first frame of a flow as moved.
    fn move_first(&mut self, flow: u32) {
        let Some(frames) = self.flows.get(&flow).copied() else { return };
        let entry = &mut self.entries[(frames.first - self.first) as usize];
        entry.is_moved = true;
        let to_next = entry.to_next;
        self.frames -= 1;
        self.unlink_first(flow, to_next);
    }

    /// Removes the first frame of a flow, which the next one follows after `to_next` entries, from the flow.
    fn unlink_first(&mut self, flow: u32, to_next: u32) {
        if to_next == 0 {
            self.flows.remove(&flow);
        } else if let Some(frames) = self.flows.get_mut(&flow) {
            frames.first += u64::from(to_next);
        }
    }

    /// Returns the first frame at or after an index that has not moved, with its index.
    fn next(&self, from: usize) -> Option<(usize, &Entry)> {
        (from..self.entries.len()).map(|index| (index, &self.entries[index])).find(|(_, e)| !e.is_moved)
    }

    fn frame(&self, entry: &Entry) -> RxFrame<'_> {
        let start = entry.offset as usize;
        let bytes = &self.ring[start..start + entry.len as usize];
        RxFrame { bytes, checksum: entry.checksum, gso: entry.gso, label: entry.label }
    }

    /// Removes the first `count` entries.
    fn remove(&mut self, count: usize) {
        for _ in 0..count {
            let Some(entry) = self.entries.pop_front() else { return };
            self.first += 1;
            if entry.is_moved {
                continue;
            }
            self.frames -= 1;
            if entry.is_ordered {
                // The first entry of a queue is the first of its flow.
                self.unlink_first(entry.flow, entry.to_next);
            }
        }
    }

    /// Removes all entries of a queue whose frames have left.
    fn clear(&mut self) {
        self.remove(self.entries.len());
    }
}

#[cfg(test)]
mod tests;
