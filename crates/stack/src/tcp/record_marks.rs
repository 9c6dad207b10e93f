//! Push and record marks: places before the end of the queued data where a record ends (`MSG_EOR`) or a long
//! write pushes.
//!
//! Linux collects written data in buffers of whole segments (skbs), each of at most half of the largest
//! window that the peer has offered, and sends while it collects. A full buffer pushes (PSH) if more than
//! half of that window was written since the last push (`forced_push`). Ginnel sends written data when the
//! turn ends and needs no such buffers, but a receiver sees where the pushes are. So this module computes the
//! pushes as Linux would set them: write by write, with what Linux would have sent in the meantime. A
//! complete write of at most half of that window pushes only at its end and usually needs no computation.

use super::Tcp;
use super::active::SlowPathFlags;
use super::conn::{Flags, NONE};
use super::output::SendQuota;
use crate::handle::Conn;
use crate::wire::tcp::SeqNumber;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Marks that a connection has at most. The pushes of 4 MiB, the default send buffer, fit if the peer has
/// offered a window of 32 KiB or more: they are more than half of it apart. Further marks are dropped, and
/// the data are sent without them.
// limit: record and push marks of a connection
pub(crate) const MARKS_MAX: usize = 256;

/// Bytes of the largest buffer (`sk_gso_max_size`), less the headers before the payload.
const SKB_BYTES_MAX: u32 = 65_536 - 321;

/// A mark inside of the queued data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RecordMark {
    /// Sequence number after the byte that pushes.
    end: SeqNumber,
    /// True if a record ends here: no segment reaches beyond the mark.
    is_record_end: bool,
    /// True if nothing holds back the data before the mark (see [`Tcp::push_before_held`]).
    is_released: bool,
}

impl RecordMark {
    /// Returns a mark that pushes at `end` and ends no record.
    fn push_at(end: SeqNumber) -> Self {
        Self { end, is_record_end: false, is_released: false }
    }
}

/// Marks of one connection. They are valid only while [`SlowPathFlags::RECORD_MARKS`] is set.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RecordMarks {
    /// Marks in the order of the stream.
    marks: VecDeque<RecordMark>,
    /// Where the last buffer (skb) begins.
    skb_start: SeqNumber,
    /// Last push of a write that continues, or the start of that write.
    pushed_seq: Option<SeqNumber>,
}

impl RecordMarks {
    /// Returns the bytes of memory of the list.
    pub fn list_bytes(&self) -> usize {
        self.marks.capacity() * size_of::<RecordMark>()
    }

    pub fn clear(&mut self) {
        self.marks.clear();
        self.pushed_seq = None;
    }

    fn is_needed(&self) -> bool {
        self.pushed_seq.is_some() || !self.marks.is_empty()
    }

    /// Discards marks up to `sent`.
    fn discard_before(&mut self, sent: SeqNumber) {
        while self.marks.front().is_some_and(|mark| mark.end.le(sent)) {
            self.marks.pop_front();
        }
    }

    fn push(&mut self, mark: RecordMark) {
        let count = self.marks.len();
        match self.marks.back_mut() {
            Some(last) if last.end == mark.end => {
                last.is_record_end |= mark.is_record_end;
                last.is_released |= mark.is_released;
            }
            _ if count < MARKS_MAX => self.marks.push_back(mark),
            _ => {}
        }
    }

    /// Moves what is after `at` by `len` bytes, which were inserted there.
    pub fn on_inserted(&mut self, at: SeqNumber, len: u32) {
        for mark in self.marks.iter_mut().filter(|mark| mark.end.gt(at)) {
            mark.end += len;
        }
        if self.skb_start.gt(at) {
            self.skb_start += len;
        }
        if let Some(pushed) = self.pushed_seq.as_mut().filter(|pushed| pushed.gt(at)) {
            *pushed += len;
        }
    }

    /// Moves pushes inside of a packet that ends at `end` to its end, because a packet is filled from the
    /// buffers that follow (`tcp_grow_skb`).
    fn coalesce_pushes(&mut self, end: SeqNumber) {
        let before = self.marks.len();
        while self.marks.front().is_some_and(|mark| mark.end.lt(end) && !mark.is_record_end) {
            self.marks.pop_front();
        }
        if self.marks.len() < before && self.marks.front().is_none_or(|mark| mark.end != end) {
            self.marks.push_front(RecordMark::push_at(end));
        }
    }

    /// Returns whether the first mark after `sent` is at or before `end`.
    fn has_mark_within(&self, sent: SeqNumber, end: SeqNumber) -> bool {
        self.marks.iter().map(|mark| mark.end).find(|at| at.gt(sent)).is_some_and(|at| at.le(end))
    }
}

/// Number of buffers after which the model stops: for the remaining bytes of a huge write to a peer with a
/// tiny window, room is assumed.
const SKBS_MAX: u32 = 1 << 16;

/// A write as Linux executes it (`tcp_sendmsg`). Positions are counted in bytes from `snd_nxt`.
struct SendmsgModel {
    /// Bytes of a full buffer, and of a segment.
    size_goal: u32,
    mss: u32,
    /// Half of the largest window.
    half_window: u32,
    /// End of the peer's window, number of segments that the congestion window still admits, and number of
    /// segments that leave together.
    window: u32,
    cwnd_quota: u32,
    tso_segs: u32,
    /// End of what was sent so far.
    snd_nxt: u32,
    /// Start of the last buffer, and position of the last push.
    skb_start: u32,
    pushed_seq: i64,
    /// End of what was written so far.
    write_seq: u32,
    /// Bytes before `snd_nxt` that are not acknowledged.
    unacked: u32,
}

/// Effect of a write on the marks.
enum SendmsgStep {
    /// The last buffer ends at `to` and no longer at `from`. `is_new`: it is a new buffer.
    Extend { from: u32, to: u32, is_new: bool },
    /// The write pushes at this position.
    Push(u32),
}

impl SendmsgModel {
    /// Writes `len` bytes, as long as fewer than `unsent_max` bytes are unsent and fewer than `unacked_max`
    /// bytes are unacknowledged when a buffer begins (`sk_stream_memory_free`). Returns the number of bytes
    /// written.
    fn write(
        &mut self,
        len: u32,
        unsent_max: u32,
        unacked_max: u32,
        mut step: impl FnMut(SendmsgStep),
    ) -> u32 {
        let (start, end) = (self.write_seq, self.write_seq + len);
        let mut skbs = 0;
        while self.write_seq < end {
            self.skb_start = self.skb_start.max(self.snd_nxt);
            let is_new =
                self.write_seq == self.skb_start || self.write_seq - self.skb_start >= self.size_goal;
            if is_new {
                if self.write_seq - self.snd_nxt >= unsent_max || self.unacked + self.write_seq >= unacked_max
                {
                    break;
                }
                self.skb_start = self.write_seq;
                skbs += 1;
                if skbs > SKBS_MAX {
                    self.write_seq = end;
                    break;
                }
            }
            let count = (self.size_goal - (self.write_seq - self.skb_start)).min(end - self.write_seq);
            step(SendmsgStep::Extend { from: self.write_seq, to: self.write_seq + count, is_new });
            self.write_seq += count;
            if self.write_seq == end || self.write_seq - self.skb_start < self.size_goal {
                continue;
            }
            if i64::from(self.write_seq) - self.pushed_seq > i64::from(self.half_window) {
                self.pushed_seq = self.write_seq.into();
                step(SendmsgStep::Push(self.write_seq));
                self.send(u32::MAX);
            } else if self.skb_start == self.snd_nxt {
                self.send(self.tso_segs);
            }
        }
        self.write_seq - start
    }

    /// Sends at most `max_segments` segments, as far as the windows admit them.
    fn send(&mut self, max_segments: u32) {
        let fits = (self.write_seq.min(self.window).saturating_sub(self.snd_nxt)) / self.mss;
        let count = fits.min(self.cwnd_quota).min(max_segments);
        self.cwnd_quota -= count;
        self.snd_nxt += count * self.mss;
    }
}

impl Tcp {
    /// Returns half of the largest window that the peer has offered.
    fn half_window(&self, idx: u32) -> u32 {
        let c = &self.conns[idx];
        self.active[c.active].max_window.max(c.snd_wnd) / 2
    }

    /// Returns the model of a write that begins after the first `queued` unsent bytes.
    fn sendmsg_model(&self, idx: u32, a: &SendQuota, queued: u32) -> SendmsgModel {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let half = self.half_window(idx);
        // As `tcp_bound_to_half_wnd`: a window of at most 536 bytes counts whole, and 48 bytes always
        // fit in a buffer.
        let max_bytes = if half > 268 { half } else { 2 * half };
        let size_goal = (SKB_BYTES_MAX.min(max_bytes.max(48)) / a.mss).max(1) * a.mss;
        let mut skb_start = 0;
        if b.slow_path.has(SlowPathFlags::RECORD_MARKS) {
            let offset = b.record_marks.skb_start - c.snd_nxt;
            skb_start = u32::try_from(offset).map_or(0, |offset| if offset <= queued { offset } else { 0 });
            if b.record_marks
                .marks
                .back()
                .is_some_and(|last| last.is_record_end && last.end == c.snd_nxt + queued)
            {
                skb_start = queued;
            }
        }
        // Small writes have filled buffers in the meantime.
        skb_start += (queued - skb_start) / size_goal * size_goal;
        let pushed_seq = b.record_marks.pushed_seq.filter(|_| b.slow_path.has(SlowPathFlags::RECORD_MARKS));
        SendmsgModel {
            size_goal,
            mss: a.mss,
            half_window: half,
            window: a.window,
            cwnd_quota: a.cwnd_quota,
            tso_segs: self.tso_segs(idx, a.mss).max(1),
            snd_nxt: 0,
            skb_start,
            pushed_seq: pushed_seq.map_or(queued.into(), |pushed| (pushed - c.snd_nxt).into()),
            write_seq: queued,
            unacked: (c.snd_nxt - c.snd_una) as u32,
        }
    }

    /// Sets the marks for the last `len` queued bytes, which were just written. `continues`: the write is not
    /// complete.
    #[cold]
    pub(super) fn mark_write(&mut self, idx: u32, len: u32, continues: bool) {
        let c = &self.conns[idx];
        if !c.state.is_synchronized() {
            return;
        }
        let a = self.send_quota(idx);
        let Some(queued) = a.unsent.checked_sub(len) else { return };
        let mut model = self.sendmsg_model(idx, &a, queued);
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        if !b.slow_path.has(SlowPathFlags::RECORD_MARKS) {
            b.record_marks.clear();
        }
        let (snd_nxt, marks) = (c.snd_nxt, &mut b.record_marks);
        marks.discard_before(snd_nxt);
        let mut continues_write = marks.pushed_seq.is_some();
        model.write(len, u32::MAX, u32::MAX, |step| match step {
            SendmsgStep::Extend { from, to, is_new } => {
                if !is_new
                    && let Some(last) = marks.marks.back_mut().filter(|last| last.end == snd_nxt + from)
                {
                    last.end = snd_nxt + to;
                    if !continues_write {
                        // A new write removes the push of the buffer that it extends (`tcp_sendmsg`).
                        marks.marks.pop_back();
                    }
                }
                continues_write = true;
            }
            SendmsgStep::Push(at) => marks.push(RecordMark::push_at(snd_nxt + at)),
        });
        marks.skb_start = snd_nxt + model.skb_start;
        marks.pushed_seq = continues.then(|| snd_nxt + model.pushed_seq as u32);
        let needed = marks.is_needed();
        b.slow_path.assign(SlowPathFlags::RECORD_MARKS, needed);
    }

    /// Marks the end of the queued data as the end of a record: data that are written later share no segment
    /// with it (`MSG_EOR`).
    pub fn end_record(&mut self, conn: Conn) {
        let Some(idx) = self.index(conn).filter(|idx| self.conns[*idx].state.is_synchronized()) else {
            return;
        };
        self.end_record_at_queue_end(idx, false);
    }

    fn end_record_at_queue_end(&mut self, idx: u32, is_released: bool) {
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let end = c.snd_una + b.send.len() as u32;
        if end.gt(c.snd_nxt) {
            if !b.slow_path.has(SlowPathFlags::RECORD_MARKS) {
                b.record_marks.clear();
            }
            b.record_marks.discard_before(c.snd_nxt);
            b.record_marks.push(RecordMark { end, is_record_end: true, is_released });
            b.slow_path.set(SlowPathFlags::RECORD_MARKS);
        }
    }

    /// Separates the queued data from data that are written later and held back (`MSG_MORE`, `TCP_CORK`),
    /// if Linux would have sent the queued data when they were written: the windows and Nagle's algorithm
    /// admit all of them. A hold that begins now does not affect them.
    #[cold]
    pub fn push_before_held(&mut self, conn: Conn) {
        let Some(idx) = self.index(conn).filter(|idx| self.conns[*idx].state.is_synchronized()) else {
            return;
        };
        if self.conns[idx].active == NONE {
            return;
        }
        let a = self.send_quota(idx);
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let holds_partial = !c.has(Flags::NODELAY) && !b.rtx_queue.is_empty() && b.snd_sml.is_some();
        let is_held = holds_partial && !a.unsent.is_multiple_of(a.mss);
        if a.unsent <= a.window && a.unsent.div_ceil(a.mss) <= a.cwnd_quota && !is_held {
            self.end_record_at_queue_end(idx, true);
        }
    }

    /// Returns whether nothing holds back the next `len` bytes, after which a record ends.
    #[cold]
    pub(super) fn is_released_after(&self, idx: u32, len: u32) -> bool {
        let c = &self.conns[idx];
        let end = c.snd_nxt + len;
        let marks = &self.active[c.active].record_marks.marks;
        marks.iter().find(|mark| mark.is_record_end).is_some_and(|mark| mark.end == end && mark.is_released)
    }

    /// Returns how many of `len` bytes (at most 2^30) Linux would accept now, if a write ended when
    /// `unsent_max` bytes are unsent (`TCP_NOTSENT_LOWAT`) or `unacked_max` bytes are unacknowledged
    /// (`SO_SNDBUF`).
    pub fn sendable_within(&mut self, conn: Conn, len: u32, unsent_max: u32, unacked_max: u32) -> u32 {
        let Some(idx) = self.index(conn).filter(|idx| self.conns[*idx].state.is_synchronized()) else {
            return len;
        };
        self.ensure_active(idx);
        let a = self.send_quota(idx);
        self.sendmsg_model(idx, &a, a.unsent).write(len, unsent_max, unacked_max, |_| {})
    }

    /// Returns the number of bytes from `snd_nxt` to the end of the first record, `None` without such an end.
    /// `starts_packet`: the next segment is the first one of a packet, whose pushes move to its end.
    #[cold]
    pub(super) fn bytes_to_record_end(
        &mut self,
        idx: u32,
        a: &SendQuota,
        starts_packet: bool,
    ) -> Option<u32> {
        let segments = self.tso_segs(idx, a.mss).max(1).min(a.cwnd_quota);
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        b.record_marks.discard_before(c.snd_nxt);
        if !b.record_marks.is_needed() {
            b.slow_path.take(SlowPathFlags::RECORD_MARKS);
        }
        let record = b
            .record_marks
            .marks
            .iter()
            .find(|mark| mark.is_record_end)
            .map(|mark| (mark.end - c.snd_nxt) as u32);
        if starts_packet {
            let max_bytes = a.unsent.min(record.unwrap_or(u32::MAX));
            b.record_marks.coalesce_pushes(c.snd_nxt + max_bytes.min(segments.saturating_mul(a.mss)));
        }
        record
    }

    /// Returns whether one of the next `len` bytes pushes.
    #[cold]
    pub(super) fn pushes_within(&self, idx: u32, len: u32) -> bool {
        let c = &self.conns[idx];
        self.active[c.active].record_marks.has_mark_within(c.snd_nxt, c.snd_nxt + len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(end: u32, record: bool) -> RecordMark {
        RecordMark { end: SeqNumber(end), is_record_end: record, is_released: false }
    }

    // limit: record and push marks of a connection
    #[test]
    fn marks_are_bounded_and_discarded_once_passed() {
        let mut marks = RecordMarks::default();
        for n in 1..=2 * MARKS_MAX as u32 {
            marks.push(mark(10 * n, true));
        }
        assert_eq!(marks.marks.len(), MARKS_MAX);
        assert!(marks.has_mark_within(SeqNumber(10 * MARKS_MAX as u32 - 1), SeqNumber(u32::MAX / 4)));
        assert!(!marks.has_mark_within(SeqNumber(10 * MARKS_MAX as u32), SeqNumber(u32::MAX / 4)));
        marks.discard_before(SeqNumber(20));
        marks.push(mark(10_000, false));
        marks.push(mark(10_000, true));
        assert_eq!((marks.marks.len(), marks.marks.back()), (MARKS_MAX - 1, Some(&mark(10_000, true))));
    }

    /// Writes `len` bytes until `most` bytes are unsent. Returns the number of bytes written, the pushes, and
    /// the number of bytes sent.
    fn write(mut model: SendmsgModel, len: u32, most: u32) -> (u32, Vec<u32>, u32) {
        let mut pushes = Vec::new();
        let taken = model.write(len, most, u32::MAX, |step| {
            if let SendmsgStep::Push(at) = step {
                pushes.push(at);
            }
        });
        (taken, pushes, model.snd_nxt)
    }

    /// A connection with a window of 32,896 bytes, segments of 1,000 bytes, and a congestion window of ten
    /// segments.
    fn new_model(tso_segs: u32) -> SendmsgModel {
        let (size, mss, half) = (16_000, 1000, 16_448);
        let (window, segments) = (32_896, 10);
        SendmsgModel {
            size_goal: size,
            mss,
            half_window: half,
            window,
            cwnd_quota: segments,
            tso_segs,
            snd_nxt: 0,
            skb_start: 0,
            pushed_seq: 0,
            write_seq: 0,
            unacked: 0,
        }
    }

    #[test]
    fn write_fills_skbs_and_pushes_as_linux() {
        assert_eq!(
            write(new_model(65), 16_000, u32::MAX),
            (16_000, vec![], 0),
            "the end of the data is not marked"
        );
        // Ten segments of the first buffer are sent, six remain, and ten more fill it again: it is the first
        // one to push.
        assert_eq!(write(new_model(65), 60_000, u32::MAX), (60_000, vec![26_000, 58_000], 10_000));
        assert_eq!(write(new_model(1), 60_000, u32::MAX), (60_000, vec![17_000, 42_000], 10_000));
    }

    #[test]
    fn write_stops_at_limit_after_filling_its_skb() {
        assert_eq!(write(new_model(65), 60_000, 32_000).0, 42_000);
        assert_eq!(write(new_model(65), 60_000, 1).0, 26_000);
        assert_eq!(write(new_model(65), 3000, 1).0, 3000);
        let later = SendmsgModel { write_seq: 5000, cwnd_quota: 0, ..new_model(65) };
        assert_eq!(write(later, 60_000, 1).0, 11_000, "the rest of the skb");
        let mut small = new_model(65);
        assert_eq!(small.write(60_000, u32::MAX, 50_000, |_| {}), 58_000, "data in flight count");
        let mut in_flight = SendmsgModel { unacked: 30_000, ..new_model(65) };
        assert_eq!(in_flight.write(60_000, u32::MAX, 50_000, |_| {}), 26_000);
        let full = SendmsgModel { write_seq: 16_000, cwnd_quota: 0, ..new_model(65) };
        assert_eq!(write(full, 60_000, 16_000).0, 0);
    }
}
