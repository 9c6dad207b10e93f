//! State that connections need only now and then: a message of which a part was seen, and segments that
//! arrived before earlier ones. A connection takes a record for this state from a pool.

use crate::flow_table::NONE;
use crate::framing::Framing;
use ginnel_stack::time::Instant;

/// Maximum number of segments that wait for earlier ones in one direction of a connection.
// limit: early segments of a monitored stream
const EARLY_SEGMENTS_MAX: usize = 64;

/// A segment that arrived before earlier ones.
#[derive(Debug)]
pub(crate) struct EarlySegment {
    /// When the segment arrived.
    pub(crate) at: Instant,
    pub(crate) seq: u32,
    /// Acknowledgement number of the segment.
    pub(crate) ack: u32,
    pub(crate) len: u32,
    pub(crate) is_fin: bool,
    /// The captured beginning of the payload.
    pub(crate) bytes: Vec<u8>,
}

/// The streams of both directions of a connection.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Changed only through [`StreamPool`], which counts its bytes.
    framing: [Framing; 2],
    /// Ordered by sequence number.
    pub(crate) early: [Vec<EarlySegment>; 2],
}

impl Streams {
    fn is_idle(&self) -> bool {
        self.framing.iter().all(Framing::is_at_start) && self.early.iter().all(Vec::is_empty)
    }
}

/// The records of all connections.
#[derive(Debug)]
pub(crate) struct StreamPool {
    records: Vec<Streams>,
    free: Vec<u32>,
    /// Payload bytes of early segments, and their limit.
    early_bytes: usize,
    early_bytes_max: usize,
    /// Bytes of the buffers for partial heads, and their limit.
    head_bytes: usize,
    head_bytes_max: usize,
}

/// Result of [`StreamPool::keep_early`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EarlyResult {
    /// The segment was kept.
    Kept,
    /// A segment that begins at this byte and is at least as long had been kept already.
    Known,
    /// The direction has too many early segments, or all early segments together too many bytes.
    Full,
}

impl StreamPool {
    pub(crate) fn new(early_bytes_max: usize, head_bytes_max: usize) -> Self {
        let (records, free) = (Vec::new(), Vec::new());
        Self { records, free, early_bytes: 0, early_bytes_max, head_bytes: 0, head_bytes_max }
    }

    /// Returns the record of a connection, which gets one if it has none.
    pub(crate) fn of(&mut self, index: &mut u32) -> &mut Streams {
        if *index == NONE {
            *index = self.free.pop().unwrap_or_else(|| {
                self.records.push(Streams::default());
                self.records.len() as u32 - 1
            });
        }
        &mut self.records[*index as usize]
    }

    /// Returns the record of a connection if it has one.
    pub(crate) fn get(&self, index: u32) -> Option<&Streams> {
        self.records.get(index as usize)
    }

    /// Takes the current message of a direction out of the record of a connection. A connection without a
    /// record is at the start of a message.
    pub(crate) fn take_framing(&mut self, index: u32, direction: usize) -> Framing {
        let Some(record) = self.records.get_mut(index as usize) else { return Framing::default() };
        let framing = core::mem::take(&mut record.framing[direction]);
        self.head_bytes -= framing.buffer_bytes();
        framing
    }

    /// Puts the current message of a direction into the record of a connection, which gets one if it has
    /// none. Returns false if the message was dropped because all partial heads together would take too many
    /// bytes.
    #[must_use]
    pub(crate) fn put_framing(&mut self, index: &mut u32, direction: usize, mut framing: Framing) -> bool {
        if self.head_bytes + framing.buffer_bytes() > self.head_bytes_max {
            framing.shrink_buffer();
            if self.head_bytes + framing.buffer_bytes() > self.head_bytes_max {
                return false;
            }
        }
        self.head_bytes += framing.buffer_bytes();
        self.of(index).framing[direction] = framing;
        true
    }

    /// Returns the record of a connection to the pool if its state is empty.
    pub(crate) fn release_if_idle(&mut self, index: &mut u32) {
        if self.get(*index).is_some_and(Streams::is_idle) {
            self.release(index);
        }
    }

    /// Returns the record of a connection to the pool.
    pub(crate) fn release(&mut self, index: &mut u32) {
        let Some(record) = self.records.get_mut(*index as usize) else { return };
        for framing in &mut record.framing {
            self.head_bytes -= core::mem::take(framing).buffer_bytes();
        }
        for segments in &mut record.early {
            self.early_bytes -= segments.drain(..).map(|segment| segment.bytes.len()).sum::<usize>();
        }
        self.free.push(core::mem::replace(index, NONE));
    }

    /// Keeps a segment that begins after `next`, the sequence number of the next byte.
    pub(crate) fn keep_early(
        &mut self,
        index: &mut u32,
        direction: usize,
        next: u32,
        segment: EarlySegment,
    ) -> EarlyResult {
        let has_room = self.early_bytes + segment.bytes.len() <= self.early_bytes_max;
        let bytes = segment.bytes.len();
        let segments = &mut self.of(index).early[direction];
        let distance = |seq: u32| seq.wrapping_sub(next);
        let at = segments.partition_point(|other| distance(other.seq) < distance(segment.seq));
        if let Some(same) = segments.get(at).filter(|other| other.seq == segment.seq)
            && same.len >= segment.len
        {
            return EarlyResult::Known;
        }
        if segments.len() >= EARLY_SEGMENTS_MAX || !has_room {
            return EarlyResult::Full;
        }
        segments.insert(at, segment);
        self.early_bytes += bytes;
        EarlyResult::Kept
    }

    /// Returns the sequence number of the first early segment of a direction.
    pub(crate) fn first_early(&self, index: u32, direction: usize) -> Option<u32> {
        self.get(index)?.early[direction].first().map(|segment| segment.seq)
    }

    /// Removes the first early segment of a direction.
    pub(crate) fn take_early(&mut self, index: u32, direction: usize) -> Option<EarlySegment> {
        let segments = &mut self.records.get_mut(index as usize)?.early[direction];
        if segments.is_empty() {
            return None;
        }
        let first = segments.remove(0);
        self.early_bytes -= first.bytes.len();
        Some(first)
    }

    /// Returns the bytes of the buffers for partial heads, as counted and as allocated.
    #[cfg(test)]
    pub(crate) fn head_bytes(&self) -> (usize, usize) {
        let framings = self.records.iter().flat_map(|record| &record.framing);
        (self.head_bytes, framings.map(Framing::buffer_bytes).sum())
    }

    /// Returns the number of records in use.
    #[cfg(test)]
    pub(crate) fn in_use(&self) -> usize {
        self.records.len() - self.free.len()
    }
}
