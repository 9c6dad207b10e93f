//! Where the stream is cut, or pushes, before its end: behind a record (`MSG_EOR`), and inside of a long write.
//!
//! Linux collects what is written in buffers of whole segments, none of more than half of the largest window that the peer has offered, and sends while it collects. A buffer that is full pushes (PSH)
//! if more than half of that window was written since something last pushed (`forced_push`). Here what is written leaves when the turn ends, and nobody needs such buffers; but where the pushes are a
//! receiver sees, so it is reckoned as Linux does: write by write, with what would have left meanwhile. Writes of less than that cost nothing.

use super::Tcp;
use super::active::SlowPathFlags;
use super::output::SendQuota;
use crate::handle::Conn;
use crate::wire::tcp::SeqNumber;
use std::collections::VecDeque;

/// Marks that a connection has at the most: 4 MiB in steps of half of the usual window without scaling. What would be more is sent without.
// limit: record and push marks of a connection
pub(crate) const MARKS_MAX: usize = 256;

/// Bytes of the largest buffer (`sk_gso_max_size`): of a packet, without what may stand in front of them.
const SKB_BYTES_MAX: u32 = 65_536 - 321;

/// A place in what is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RecordMark {
    /// Behind the byte that pushes.
    end: SeqNumber,
    /// No segment reaches beyond it.
    is_record_end: bool,
}

/// Places of one connection. Nothing of it counts unless [`Extras::CUTS`] is set.
#[derive(Debug, Default)]
pub(crate) struct RecordMarks {
    /// In the order of the stream.
    marks: VecDeque<RecordMark>,
    /// Where the last buffer begins.
    skb_start: SeqNumber,
    /// Where a write that goes on last pushed, or began.
    pushed_seq: Option<SeqNumber>,
}

impl RecordMarks {
    /// Bytes of the list's memory.
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

    /// Forgets what lies before `sent`.
    fn discard_before(&mut self, sent: SeqNumber) {
        while self.marks.front().is_some_and(|mark| mark.end.le(sent)) {
            self.marks.pop_front();
        }
    }

    fn push(&mut self, mark: RecordMark) {
        let count = self.marks.len();
        match self.marks.back_mut() {
            Some(last) if last.end == mark.end => last.is_record_end |= mark.is_record_end,
            _ if count < MARKS_MAX => self.marks.push_back(mark),
            _ => {}
        }
    }

    /// A packet is filled from the buffers that follow: what pushes inside of it pushes at its end (`tcp_grow_skb`).
    fn coalesce_pushes(&mut self, end: SeqNumber) {
        let before = self.marks.len();
        while self.marks.front().is_some_and(|mark| mark.end.lt(end) && !mark.is_record_end) {
            self.marks.pop_front();
        }
        if self.marks.len() < before && self.marks.front().is_none_or(|mark| mark.end != end) {
            self.marks.push_front(RecordMark { end, is_record_end: false });
        }
    }

    /// Whether there is one behind `sent` and no further than `end`.
    fn has_mark_within(&self, sent: SeqNumber, end: SeqNumber) -> bool {
        self.marks.iter().map(|mark| mark.end).find(|at| at.gt(sent)).is_some_and(|at| at.le(end))
    }
}

/// Buffers that are reckoned with: of what a program says it is going to write to a peer whose window is a few bytes, the rest is taken for what there is room for.
const SKBS_MAX: u32 = 1 << 16;

/// A write as Linux does it. Places are counted in bytes from `snd_nxt`.
struct SendmsgModel {
    /// Bytes of a full buffer, and of a segment.
    size_goal: u32,
    mss: u32,
    /// Half of the largest window.
    half_window: u32,
    /// Where the peer's window ends, how many segments the congestion window still takes, and how many leave together.
    window: u32,
    cwnd_quota: u32,
    tso_segs: u32,
    /// What has left by now.
    snd_nxt: u32,
    /// Where the last buffer begins, and where something last pushed.
    skb_start: u32,
    pushed_seq: i64,
    /// Where what is written ends.
    write_seq: u32,
    /// Bytes before `snd_nxt` that are not acknowledged.
    unacked: u32,
}

/// What a write does to the marks.
enum SendmsgStep {
    /// The last buffer ends here and not there any more. `fresh`: it is another one.
    Extend { from: u32, to: u32, fresh: bool },
    /// It pushes.
    Push(u32),
}

impl SendmsgModel {
    /// Writes `len` bytes as long as fewer than the one number are not sent, and fewer than the other not acknowledged, when a buffer begins (`sk_stream_memory_free`). Returns how many.
    fn write(&mut self, len: u32, (unsent, queued): (u32, u32), mut step: impl FnMut(SendmsgStep)) -> u32 {
        let (begin, end) = (self.write_seq, self.write_seq + len);
        let mut buffers = 0;
        while self.write_seq < end {
            self.skb_start = self.skb_start.max(self.snd_nxt);
            let fresh = self.write_seq == self.skb_start || self.write_seq - self.skb_start >= self.size_goal;
            if fresh {
                if self.write_seq - self.snd_nxt >= unsent || self.unacked + self.write_seq >= queued {
                    break;
                }
                self.skb_start = self.write_seq;
                buffers += 1;
                if buffers > SKBS_MAX {
                    self.write_seq = end;
                    break;
                }
            }
            let count = (self.size_goal - (self.write_seq - self.skb_start)).min(end - self.write_seq);
            step(SendmsgStep::Extend { from: self.write_seq, to: self.write_seq + count, fresh });
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
        self.write_seq - begin
    }

    /// So many segments leave, if windows allow it.
    fn send(&mut self, most: u32) {
        let fits = (self.write_seq.min(self.window).saturating_sub(self.snd_nxt)) / self.mss;
        let count = fits.min(self.cwnd_quota).min(most);
        self.cwnd_quota -= count;
        self.snd_nxt += count * self.mss;
    }
}

impl Tcp {
    /// Half of the largest window that the peer has offered.
    fn half_window(&self, idx: u32) -> u32 {
        let c = &self.conns[idx];
        self.active[c.active].max_window.max(c.snd_wnd) / 2
    }

    /// The write of what lies behind the first `queued` bytes that were not sent, of which all but those are queued by now or will be: `len` in all.
    fn sendmsg_model(&self, idx: u32, a: &SendQuota, queued: u32) -> SendmsgModel {
        let c = &self.conns[idx];
        let b = &self.active[c.active];
        let half = self.half_window(idx);
        let most = if half > 268 { half } else { 2 * half };
        let size = (SKB_BYTES_MAX.min(most.max(48)) / a.mss).max(1) * a.mss;
        let mut buffer = 0;
        if b.slow_path.has(SlowPathFlags::RECORD_MARKS) {
            let known = b.record_marks.skb_start - c.snd_nxt;
            buffer = u32::try_from(known).map_or(0, |known| if known <= queued { known } else { 0 });
            if b.record_marks
                .marks
                .back()
                .is_some_and(|last| last.is_record_end && last.end == c.snd_nxt + queued)
            {
                buffer = queued;
            }
        }
        // Small writes have filled buffers meanwhile.
        buffer += (queued - buffer) / size * size;
        let open = b.record_marks.pushed_seq.filter(|_| b.slow_path.has(SlowPathFlags::RECORD_MARKS));
        SendmsgModel {
            size_goal: size,
            mss: a.mss,
            half_window: half,
            window: a.window,
            cwnd_quota: a.cwnd_quota,
            tso_segs: self.tso_segs(idx, a.mss).max(1),
            snd_nxt: 0,
            skb_start: buffer,
            pushed_seq: open.map_or(queued.into(), |pushed| (pushed - c.snd_nxt).into()),
            write_seq: queued,
            unacked: (c.snd_nxt - c.snd_una) as u32,
        }
    }

    /// The last `len` bytes of what is queued were written now, and perhaps are not all of their write.
    #[cold]
    pub(super) fn mark_write(&mut self, idx: u32, len: u32, continues: bool) {
        let c = &self.conns[idx];
        if !c.state.is_synchronized() {
            return;
        }
        let a = self.send_quota(idx);
        let Some(queued) = a.unsent.checked_sub(len) else { return };
        let mut writing = self.sendmsg_model(idx, &a, queued);
        let c = &self.conns[idx];
        let b = &mut self.active[c.active];
        if !b.slow_path.has(SlowPathFlags::RECORD_MARKS) {
            b.record_marks.clear();
        }
        let (nxt, cuts) = (c.snd_nxt, &mut b.record_marks);
        cuts.discard_before(nxt);
        let mut goes_on = cuts.pushed_seq.is_some();
        writing.write(len, (u32::MAX, u32::MAX), |step| match step {
            SendmsgStep::Extend { from, to, fresh } => {
                if !fresh && let Some(last) = cuts.marks.back_mut().filter(|last| last.end == nxt + from) {
                    last.end = nxt + to;
                    if !goes_on {
                        // Of a buffer that another write goes on with only the end may push.
                        cuts.marks.pop_back();
                    }
                }
                goes_on = true;
            }
            SendmsgStep::Push(at) => cuts.push(RecordMark { end: nxt + at, is_record_end: false }),
        });
        cuts.skb_start = nxt + writing.skb_start;
        cuts.pushed_seq = continues.then(|| nxt + writing.pushed_seq as u32);
        let needed = cuts.is_needed();
        b.slow_path.assign(SlowPathFlags::RECORD_MARKS, needed);
    }

    /// What is queued is the end of a record: nothing that is written later shares a segment with it (`MSG_EOR`).
    pub fn end_record(&mut self, conn: Conn) {
        let Some(idx) = self.index(conn).filter(|idx| self.conns[*idx].state.is_synchronized()) else {
            return;
        };
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let end = c.snd_una + b.send.len() as u32;
        if end.gt(c.snd_nxt) {
            if !b.slow_path.has(SlowPathFlags::RECORD_MARKS) {
                b.record_marks.clear();
            }
            b.record_marks.discard_before(c.snd_nxt);
            b.record_marks.push(RecordMark { end, is_record_end: true });
            b.slow_path.set(SlowPathFlags::RECORD_MARKS);
        }
    }

    /// How many of `len` bytes, 2^30 at the most, Linux would take now if a write ended where so many or more are not sent (`TCP_NOTSENT_LOWAT`), or not acknowledged (`SO_SNDBUF`).
    pub fn sendable_within(&mut self, conn: Conn, len: u32, most: (u32, u32)) -> u32 {
        let Some(idx) = self.index(conn).filter(|idx| self.conns[*idx].state.is_synchronized()) else {
            return len;
        };
        self.ensure_active(idx);
        let a = self.send_quota(idx);
        self.sendmsg_model(idx, &a, a.unsent).write(len, most, |_| {})
    }

    /// Bytes from `snd_nxt` to the end of the first record. `begins`: what is sent next is the first segment of those that leave together.
    #[cold]
    pub(super) fn bytes_to_record_end(&mut self, idx: u32, a: &SendQuota, begins: bool) -> Option<u32> {
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
        if begins {
            let most = a.unsent.min(record.unwrap_or(u32::MAX));
            b.record_marks.coalesce_pushes(c.snd_nxt + most.min(segments.saturating_mul(a.mss)));
        }
        record
    }

    /// Whether one of the next `len` bytes pushes.
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
        RecordMark { end: SeqNumber(end), is_record_end: record }
    }

    // limit: record and push marks of a connection
    #[test]
    fn there_are_no_more_marks_than_may_be_and_what_is_passed_makes_room() {
        let mut cuts = RecordMarks::default();
        for n in 1..=2 * MARKS_MAX as u32 {
            cuts.push(mark(10 * n, true));
        }
        assert_eq!(cuts.marks.len(), MARKS_MAX);
        assert!(cuts.has_mark_within(SeqNumber(10 * MARKS_MAX as u32 - 1), SeqNumber(u32::MAX / 4)));
        assert!(!cuts.has_mark_within(SeqNumber(10 * MARKS_MAX as u32), SeqNumber(u32::MAX / 4)));
        cuts.discard_before(SeqNumber(20));
        cuts.push(mark(10_000, false));
        cuts.push(mark(10_000, true));
        assert_eq!((cuts.marks.len(), cuts.marks.back()), (MARKS_MAX - 1, Some(&mark(10_000, true))));
    }

    /// A write of `len` bytes, of which no more are taken when `most` were not sent: how many were, where it pushes, and how many have left.
    fn write(mut writing: SendmsgModel, len: u32, most: u32) -> (u32, Vec<u32>, u32) {
        let mut pushes = Vec::new();
        let taken = writing.write(len, (most, u32::MAX), |step| {
            if let SendmsgStep::Push(at) = step {
                pushes.push(at);
            }
        });
        (taken, pushes, writing.snd_nxt)
    }

    /// A connection with a window of 32,896 bytes, segments of 1,000, and room for ten of them.
    fn fresh(together: u32) -> SendmsgModel {
        let (size, mss, half) = (16_000, 1000, 16_448);
        let (window, segments) = (32_896, 10);
        SendmsgModel {
            size_goal: size,
            mss,
            half_window: half,
            window,
            cwnd_quota: segments,
            tso_segs: together,
            snd_nxt: 0,
            skb_start: 0,
            pushed_seq: 0,
            write_seq: 0,
            unacked: 0,
        }
    }

    #[test]
    fn a_write_fills_buffers_and_pushes_as_linux_does() {
        assert_eq!(write(fresh(65), 16_000, u32::MAX), (16_000, vec![], 0), "the end is not its affair");
        // Ten segments of the first buffer leave, six stay, and ten more fill it again: it is the first to push.
        assert_eq!(write(fresh(65), 60_000, u32::MAX), (60_000, vec![26_000, 58_000], 10_000));
        assert_eq!(write(fresh(1), 60_000, u32::MAX), (60_000, vec![17_000, 42_000], 10_000));
    }

    #[test]
    fn a_write_ends_where_too_much_would_be_ahead_but_fills_its_buffer() {
        assert_eq!(write(fresh(65), 60_000, 32_000).0, 42_000);
        assert_eq!(write(fresh(65), 60_000, 1).0, 26_000);
        assert_eq!(write(fresh(65), 3000, 1).0, 3000);
        let later = SendmsgModel { write_seq: 5000, cwnd_quota: 0, ..fresh(65) };
        assert_eq!(write(later, 60_000, 1).0, 11_000, "what is left of the buffer");
        let mut small = fresh(65);
        assert_eq!(small.write(60_000, (u32::MAX, 50_000), |_| {}), 58_000, "what is in flight counts");
        let mut behind = SendmsgModel { unacked: 30_000, ..fresh(65) };
        assert_eq!(behind.write(60_000, (u32::MAX, 50_000), |_| {}), 26_000);
        let full = SendmsgModel { write_seq: 16_000, cwnd_quota: 0, ..fresh(65) };
        assert_eq!(write(full, 60_000, 16_000).0, 0);
    }
}
