//! Counts the frames in a ring that its consumer has not returned. Frames are counted when the backlog is
//! asked for, so that sending costs nothing more.

use super::ring::RecordProducer;
use std::collections::VecDeque;

/// Frames of a ring that were counted. A super-frame counts as its segments.
#[derive(Default)]
pub(super) struct RingBacklog {
    /// Position after the last record that was counted.
    counted_to: usize,
    /// Positions after the records that wait, and their segments.
    waiting: VecDeque<(usize, usize)>,
    /// Segments of the records in `waiting`.
    segments: usize,
}

impl RingBacklog {
    /// Returns whether at least `segments` segments of committed frames have not been returned by the
    /// consumer. Reads each record once, and the position of the consumer only if the segments seem to be
    /// enough. Memory is allocated when more records wait than ever before.
    pub(super) fn has_segments(&mut self, ring: &mut RecordProducer, segments: usize) -> bool {
        if segments == 0 {
            return true;
        }
        self.remove_returned(ring.head());
        while let Some((segments, end)) = ring.record_at(self.counted_to) {
            self.waiting.push_back((end, segments));
            self.segments += segments;
            self.counted_to = end;
        }
        if self.segments >= segments {
            let head = ring.load_head();
            self.remove_returned(head);
        }
        self.segments >= segments
    }

    /// Removes the records before `head`.
    fn remove_returned(&mut self, head: usize) {
        // Positions wrap around: what is not before the head is less than half of all positions after it.
        let is_before = |position: usize| position.wrapping_sub(head).cast_signed() <= 0;
        while let Some(&(end, segments)) = self.waiting.front()
            && is_before(end)
        {
            self.waiting.pop_front();
            self.segments -= segments;
        }
        if is_before(self.counted_to) {
            self.counted_to = head;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::ring::{capacity_min, ring};
    use super::*;
    use ginnel_stack::device::{Gso, GsoKind, RxBurst, TxMeta};

    fn send(producer: &mut RecordProducer, len: usize, meta: TxMeta) -> bool {
        let Some(room) = producer.reserve(len) else { return false };
        room.fill(0);
        producer.commit(len, meta);
        true
    }

    /// Compares the count with a count of what was sent and returned, over many laps.
    #[test]
    fn count_is_exact_over_many_laps() {
        let gso = Gso { kind: GsoKind::Tcp4, size: 100, header_len: 54, ecn: false };
        for ask_every in [1, 7, 1000] {
            let (mut producer, mut consumer) = ring(capacity_min(700) * 8, 500);
            let mut backlog = RingBacklog::default();
            let mut model = VecDeque::new();
            let (mut lent, mut most, mut received) = (0, 0, 0);
            for step in 0..20_000_usize {
                let (is_long, len) = (step % 5 == 0, 60 + step * 37 % 500);
                let meta = if is_long { TxMeta { gso: Some(gso), ..TxMeta::NONE } } else { TxMeta::NONE };
                if send(&mut producer, len, meta) {
                    model.push_back(if is_long { (len - 54).div_ceil(100) } else { 1 });
                }
                if step % 3 == 0 {
                    let _ = producer.publish();
                }
                if step % 11 == 0 && step / 300 % 3 != 0 {
                    let mut burst = RxBurst::new();
                    consumer.burst(&mut burst);
                    // The frames of the burst before were returned.
                    model.drain(..lent);
                    lent = burst.len();
                    received += lent;
                }
                if step % ask_every == 0 {
                    let expected = model.iter().sum::<usize>();
                    assert!(backlog.has_segments(&mut producer, expected), "{step}: {expected}");
                    assert!(!backlog.has_segments(&mut producer, expected + 1), "{step}: {expected}");
                    most = most.max(expected);
                }
            }
            assert!(most > 20 && received > 5000, "{most} {received}");
        }
    }

    #[test]
    fn nothing_waits_without_a_consumer() {
        let (mut producer, consumer) = ring(capacity_min(700), 500);
        let mut backlog = RingBacklog::default();
        assert!(send(&mut producer, 60, TxMeta::NONE) && backlog.has_segments(&mut producer, 1));
        drop(consumer);
        assert!(backlog.has_segments(&mut producer, 0) && !backlog.has_segments(&mut producer, 1));
    }
}
