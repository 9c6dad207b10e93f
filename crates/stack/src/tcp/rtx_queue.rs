//! The retransmission queue: transmissions that are not acknowledged, with the scoreboard of RFC 6675.
//!
//! ```text
//!   snd_una                                              snd_nxt
//!      │ lost,resent │ sacked │ sacked │ lost │ in flight │
//! ```
//!
//! Entries are in sequence order. An entry is one transmission: a segment, or a super-frame of several
//! segments. All counters count segments.

use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The receiver has reported the segment in a SACK block (`TCPCB_SACKED_ACKED`).
pub(crate) const SACKED: u8 = 1;
/// The segment is considered lost (`TCPCB_LOST`).
pub(crate) const LOST: u8 = 2;
/// The segment was retransmitted, and the retransmission is in flight (`TCPCB_SACKED_RETRANS`).
pub(crate) const SACKED_RETRANS: u8 = 4;
/// The segment was retransmitted at some time and gives no round-trip time sample (Karn;
/// `TCPCB_EVER_RETRANS`).
pub(crate) const EVER_RETRANS: u8 = 8;

/// Kind of the end of a transmission; decides whether a retransmission of it has PSH.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum EndKind {
    /// Only a segment ends here.
    #[default]
    Segment,
    /// A packet of several segments that Linux would have sent as one ends here ([`super::burst`]).
    Packet,
    /// All data that were queued when it was sent end here, or a long write pushes here, or a record ends
    /// here ([`super::record_marks`]).
    Push,
}

/// One transmission.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct RtxEntry {
    pub seq: SeqNumber,
    pub end_seq: SeqNumber,
    /// Time of the last transmission.
    pub xmit_ts: Instant,
    /// Number of segments on the wire.
    pub segments: u16,
    pub sacked_flags: u8,
    pub end_kind: EndKind,
}

impl RtxEntry {
    #[inline]
    pub fn has(&self, flag: u8) -> bool {
        self.sacked_flags & flag != 0
    }

    fn bytes(&self) -> u32 {
        (self.end_seq - self.seq) as u32
    }
}

/// When a segment was sent, and where it ends, which orders segments that were sent at one time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SentAt {
    pub xmit_ts: Instant,
    pub end_seq: SeqNumber,
}

impl SentAt {
    /// Returns whether the segment was sent after the one given (RACK_sent_after of RFC 8985 §6.2).
    #[inline]
    pub fn sent_after(&self, xmit_ts: Instant, end_seq: SeqNumber) -> bool {
        self.xmit_ts > xmit_ts || (self.xmit_ts == xmit_ts && self.end_seq.gt(end_seq))
    }
}

/// A segment that an acknowledgement newly covers, as RACK needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeliveredSegment {
    pub xmit_ts: Instant,
    pub end_seq: SeqNumber,
    pub is_retransmitted: bool,
}

impl From<&RtxEntry> for DeliveredSegment {
    fn from(sent: &RtxEntry) -> Self {
        Self { xmit_ts: sent.xmit_ts, end_seq: sent.end_seq, is_retransmitted: sent.has(EVER_RETRANS) }
    }
}

/// Segments that one acknowledgement delivered.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Delivery {
    /// Segments newly known to have arrived, acknowledged cumulatively or selectively.
    pub delivered: u32,
    /// Segments of `delivered` that were acknowledged selectively.
    pub sacked: u32,
    /// Transmission time of the earliest sent, newly acknowledged segment that was never retransmitted.
    pub first_ackt: Option<Instant>,
    /// Transmission time of the latest sent, newly acknowledged segment that was never retransmitted.
    pub last_ackt: Option<Instant>,
    /// Transmission time of the latest sent segment that was newly acknowledged selectively and never
    /// retransmitted.
    pub last_sackt: Option<Instant>,
    /// The most recently sent segment of all that were newly acknowledged.
    pub most_recent: Option<DeliveredSegment>,
    /// Lowest start of the original transmissions that were delivered below the highest sequence number known
    /// to have arrived (Linux's `reord`).
    pub reord: Option<SeqNumber>,
    /// Number of kinds of acknowledgement, selective and cumulative, that reported reordering.
    pub reord_kinds: u8,
    /// The last segment in sequence order of those acknowledged cumulatively, or else selectively. As on
    /// Linux, RACK uses its round-trip time.
    pub last_in_sequence: Option<DeliveredSegment>,
    /// True if a retransmitted segment is among those acknowledged cumulatively.
    pub has_retrans_acked: bool,
    /// Lowest end of the newly acknowledged segments that were never retransmitted.
    pub original_end: Option<SeqNumber>,
}

impl Delivery {
    /// Returns the round-trip time in µs of the latest sent segment that was never retransmitted.
    pub fn rtt_us(&self, now: Instant) -> Option<u32> {
        self.last_ackt.map(|at| now.micros_since(at) as u32)
    }

    fn note_original(&mut self, end: SeqNumber) {
        self.original_end = Some(self.original_end.map_or(end, |e| e.min(end)));
    }

    /// Notes what a cumulative acknowledgement covers: segments that were acknowledged selectively before
    /// are not delivered again.
    fn note_acked(&mut self, sent: &RtxEntry, fack: SeqNumber) {
        self.has_retrans_acked |= sent.has(EVER_RETRANS);
        if !sent.has(SACKED) {
            self.count_delivered(sent, fack);
            self.last_in_sequence = Some(DeliveredSegment::from(sent));
        }
    }

    fn count_delivered(&mut self, sent: &RtxEntry, fack: SeqNumber) {
        self.delivered += u32::from(sent.segments);
        let retransmitted = sent.has(EVER_RETRANS);
        if !retransmitted {
            self.first_ackt = Some(self.first_ackt.map_or(sent.xmit_ts, |t| t.min(sent.xmit_ts)));
            self.last_ackt = Some(self.last_ackt.map_or(sent.xmit_ts, |t| t.max(sent.xmit_ts)));
            self.note_original(sent.end_seq);
            if sent.end_seq.lt(fack) {
                self.reord = Some(self.reord.map_or(sent.seq, |low| low.min(sent.seq)));
            }
        }
        let sent_at = SentAt { xmit_ts: sent.xmit_ts, end_seq: sent.end_seq };
        if self.most_recent.is_none_or(|known| sent_at.sent_after(known.xmit_ts, known.end_seq)) {
            self.most_recent = Some(DeliveredSegment::from(sent));
        }
    }
}

/// The queue and its counters.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RtxQueue {
    queue: VecDeque<RtxEntry>,
    /// Segments sent and not acknowledged cumulatively.
    pub packets_out: u32,
    /// Segments of `packets_out` that were acknowledged selectively, or that duplicate acknowledgements count
    /// if SACK is not in use.
    pub sacked_out: u32,
    /// Segments of `packets_out` that are considered lost.
    pub lost_out: u32,
    /// Retransmissions in flight.
    pub retrans_out: u32,
    /// Segments ever marked lost, retransmissions included. Wraps around, and is not reset: only differences
    /// count.
    pub lost: u32,
    /// Until everything before this sequence number is acknowledged, acknowledgements take the slow path: the
    /// end of the last segment that was retransmitted or is an MTU probe.
    slow_path_until: Option<SeqNumber>,
    /// No segment below this sequence number needs a retransmission.
    retransmit_hint: Option<SeqNumber>,
    /// SACK blocks of the previous acknowledgement, whose contents need not be visited again.
    recv_sack_cache: [(SeqNumber, SeqNumber); 4],
}

impl RtxQueue {
    /// Returns the bytes of memory of the queue.
    pub fn list_bytes(&self) -> usize {
        self.queue.capacity() * size_of::<RtxEntry>()
    }

    /// Returns the number of segments that are estimated to be in the network ("pipe" of RFC 6675).
    #[inline]
    pub fn in_flight(&self) -> u32 {
        (self.packets_out + self.retrans_out).saturating_sub(self.sacked_out + self.lost_out)
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Returns whether no unacknowledged segment from `una` on is lost, was selectively acknowledged, was
    /// ever retransmitted or requires the slow path for another reason.
    #[inline]
    pub fn has_no_loss_pending(&mut self, una: SeqNumber) -> bool {
        if self.slow_path_until.is_some_and(|end| end.le(una)) {
            self.slow_path_until = None;
        }
        self.sacked_out | self.lost_out | self.retrans_out == 0 && self.slow_path_until.is_none()
    }

    pub fn front(&self) -> Option<&RtxEntry> {
        self.queue.front()
    }

    /// Returns whether the first data in flight were selectively acknowledged (SACK): the receiver has
    /// discarded them.
    pub fn is_front_sacked(&self) -> bool {
        self.front().is_some_and(|s| s.has(SACKED))
    }

    pub fn back(&self) -> Option<&RtxEntry> {
        self.queue.back()
    }

    /// Returns the entry inside of which `seq` lies, not at its begin or end.
    pub fn entry_around(&self, seq: SeqNumber) -> Option<&RtxEntry> {
        self.queue.get(self.position(seq)).filter(|entry| entry.seq.lt(seq))
    }

    pub fn iter(&self) -> impl Iterator<Item = &RtxEntry> {
        self.queue.iter()
    }

    /// Releases the memory of the queue if it is empty.
    pub fn release_memory(&mut self) {
        if self.queue.is_empty() {
            self.queue = VecDeque::new();
        }
    }

    /// Removes all entries; keeps the capacity unless it is large.
    pub fn clear(&mut self) {
        let Self {
            queue,
            packets_out,
            sacked_out,
            lost_out,
            retrans_out,
            lost: _,
            slow_path_until,
            retransmit_hint,
            recv_sack_cache,
        } = self;
        queue.clear();
        if queue.capacity() > 256 {
            *queue = VecDeque::new();
        }
        (*packets_out, *sacked_out, *lost_out, *retrans_out) = (0, 0, 0, 0);
        (*slow_path_until, *retransmit_hint) = (None, None);
        *recv_sack_cache = Default::default();
    }

    /// Appends a first transmission.
    pub fn push(&mut self, start: SeqNumber, end: SeqNumber, at: Instant, segments: u16, ends: EndKind) {
        self.packets_out += u32::from(segments);
        self.queue.push_back(RtxEntry {
            seq: start,
            end_seq: end,
            xmit_ts: at,
            segments,
            sacked_flags: 0,
            end_kind: ends,
        });
    }

    /// Returns the index of the first entry that ends after `seq`.
    fn position(&self, seq: SeqNumber) -> usize {
        self.queue.partition_point(|s| s.end_seq.le(seq))
    }

    fn uncount(&mut self, sent: &RtxEntry, sack: bool) {
        let n = u32::from(sent.segments);
        self.packets_out -= n;
        // Without SACK the counter counts duplicate acknowledgements, and the caller corrects it.
        if sack && sent.has(SACKED) {
            self.sacked_out -= n;
        }
        if sent.has(LOST) {
            self.lost_out -= n;
        }
        if sent.has(SACKED_RETRANS) {
            self.retrans_out -= n;
        }
    }

    /// Returns the only entry, if there is just one, it was sent only once and it ends at `end`.
    #[inline(always)]
    pub fn sole_entry_ending_at(&self, end: SeqNumber) -> Option<&RtxEntry> {
        self.queue
            .front()
            .filter(|entry| self.queue.len() == 1 && entry.end_seq == end && entry.sacked_flags == 0)
    }

    /// Removes the only entry, which is acknowledged.
    #[inline(always)]
    pub fn remove_sole_entry(&mut self) {
        self.packets_out = 0;
        self.queue.clear();
    }

    /// Removes the first entry if it ends at `una` and was sent only once.
    #[inline]
    pub fn remove_first_entry(&mut self, una: SeqNumber) -> Option<RtxEntry> {
        let first = *self.queue.front().filter(|first| first.end_seq == una && first.sacked_flags == 0)?;
        self.packets_out -= u32::from(first.segments);
        self.queue.pop_front();
        Some(first)
    }

    /// Removes what a cumulative acknowledgement of `una` covers. `fack` is the highest sequence number
    /// known to have arrived.
    pub fn clean_acked(&mut self, una: SeqNumber, mss: u32, sack: bool, fack: SeqNumber, out: &mut Delivery) {
        while let Some(front) = self.queue.front().copied() {
            if front.end_seq.gt(una) {
                if una.gt(front.seq) {
                    self.trim_front(una, mss, fack, out);
                }
                break;
            }
            self.queue.pop_front();
            self.uncount(&front, sack);
            out.note_acked(&front, fack);
        }
        out.reord_kinds = out.reord.is_some().into();
    }

    /// Removes the acknowledged segments of the first entry, inside of which `una` lies.
    fn trim_front(&mut self, una: SeqNumber, mss: u32, fack: SeqNumber, out: &mut Delivery) {
        let front = &mut self.queue[0];
        let mut acked_part = RtxEntry { end_seq: una, ..*front };
        front.seq = una;
        let left = u16::try_from(front.bytes().div_ceil(mss).max(1)).unwrap_or(u16::MAX).min(front.segments);
        acked_part.segments = front.segments - left;
        front.segments = left;
        if acked_part.segments == 0 {
            return;
        }
        out.note_acked(&acked_part, fack);
        let (acked, flags) = (u32::from(acked_part.segments), acked_part.sacked_flags);
        self.packets_out -= acked;
        if flags & SACKED != 0 {
            self.sacked_out -= acked;
        }
        if flags & LOST != 0 {
            self.lost_out -= acked;
        }
        if flags & SACKED_RETRANS != 0 {
            self.retrans_out -= acked;
        }
    }

    /// Splits the entry at `index`, so that a new entry begins at `at`, which lies strictly inside of it.
    fn split(&mut self, index: usize, at: SeqNumber, mss: u32) {
        let entry = self.queue[index];
        let mut left = entry;
        let mut right = entry;
        left.end_seq = at;
        left.end_kind = EndKind::Segment;
        right.seq = at;
        let left_segments = left.bytes().div_ceil(mss).max(1);
        let right_segments = right.bytes().div_ceil(mss).max(1);
        left.segments = u16::try_from(left_segments).unwrap_or(u16::MAX);
        right.segments = u16::try_from(right_segments).unwrap_or(u16::MAX);
        let grown = (u32::from(left.segments) + u32::from(right.segments)) as i64 - i64::from(entry.segments);
        self.adjust_counters(entry.sacked_flags, grown);
        self.queue[index] = left;
        self.queue.insert(index + 1, right);
    }

    fn adjust_counters(&mut self, flags: u8, by: i64) {
        let add = |counter: &mut u32| *counter = (i64::from(*counter) + by).max(0) as u32;
        add(&mut self.packets_out);
        if flags & SACKED != 0 {
            add(&mut self.sacked_out);
        }
        if flags & LOST != 0 {
            add(&mut self.lost_out);
        }
        if flags & SACKED_RETRANS != 0 {
            add(&mut self.retrans_out);
        }
    }

    /// Marks what SACK blocks cover. The caller has checked that the blocks lie within `snd_una..=snd_nxt`.
    /// Only complete segments are marked: a block that ends inside of a segment says nothing about the rest
    /// of it.
    pub fn mark_sacked(
        &mut self,
        blocks: &[(SeqNumber, SeqNumber)],
        mss: u32,
        fack: SeqNumber,
        out: &mut Delivery,
    ) {
        let (lowest, last) = (out.reord.take(), out.last_in_sequence.take());
        for &(start, end) in blocks {
            // Continues where the block of the previous acknowledgement with an equal start ended.
            let known = self.recv_sack_cache.iter().find(|p| p.0 == start && p.1.le(end) && p.1.gt(p.0));
            let from = known.map_or(start, |p| p.1);
            if from.ge(end) {
                continue;
            }
            self.mark_block(from, start, end, mss, fack, out);
        }
        out.reord_kinds += u8::from(out.reord.is_some());
        out.reord = lowest.into_iter().chain(out.reord).reduce(SeqNumber::min);
        out.last_in_sequence = last.or(out.last_in_sequence);
        self.recv_sack_cache = [(SeqNumber(0), SeqNumber(0)); 4];
        for (slot, block) in self.recv_sack_cache.iter_mut().zip(blocks) {
            *slot = *block;
        }
    }

    /// Marks the entries of one block, beginning at `from`. The entry there may begin before `from` and be
    /// covered completely only now.
    fn mark_block(
        &mut self,
        from: SeqNumber,
        start: SeqNumber,
        end: SeqNumber,
        mss: u32,
        fack: SeqNumber,
        out: &mut Delivery,
    ) {
        let mut i = self.position(from);
        while i < self.queue.len() {
            let sent = self.queue[i];
            if sent.seq.ge(end) {
                return;
            }
            if sent.has(SACKED) {
                i += 1;
                continue;
            }
            if sent.seq.lt(start) {
                // The block begins inside of the entry: rounds up to a segment boundary.
                let cut = ((start - sent.seq) as u32).div_ceil(mss) * mss;
                if sent.segments > 1 && cut < sent.bytes() {
                    self.split(i, sent.seq + cut, mss);
                }
                i += 1;
                continue;
            }
            if sent.end_seq.gt(end) {
                let cut = ((end - sent.seq) as u32) / mss * mss;
                if sent.segments == 1 || cut == 0 {
                    return;
                }
                self.split(i, sent.seq + cut, mss);
            }
            self.mark_entry_sacked(i, fack, out);
            i += 1;
        }
    }

    fn mark_entry_sacked(&mut self, i: usize, fack: SeqNumber, out: &mut Delivery) {
        let sent = &mut self.queue[i];
        let n = u32::from(sent.segments);
        let before = *sent;
        sent.sacked_flags = (sent.sacked_flags | SACKED) & !(LOST | SACKED_RETRANS);
        self.sacked_out += n;
        if before.has(LOST) {
            self.lost_out -= n;
        }
        if before.has(SACKED_RETRANS) {
            self.retrans_out -= n;
        }
        out.sacked += n;
        // A segment that was considered lost may have arrived long ago, with a late report, so it gives no
        // sample.
        if !before.has(EVER_RETRANS | LOST) {
            out.last_sackt = Some(out.last_sackt.map_or(before.xmit_ts, |t| t.max(before.xmit_ts)));
        }
        out.count_delivered(&before, fack);
        if out.last_in_sequence.is_none_or(|last| before.end_seq.gt(last.end_seq)) {
            out.last_in_sequence = Some(DeliveredSegment::from(&before));
        }
    }

    /// Marks an entry lost; a retransmission of it counts as lost, too.
    fn mark_lost_at(&mut self, i: usize) {
        let sent = &mut self.queue[i];
        let n = u32::from(sent.segments);
        if sent.has(SACKED_RETRANS) || !sent.has(LOST) {
            self.lost = self.lost.wrapping_add(n);
        }
        if sent.has(SACKED_RETRANS) {
            sent.sacked_flags &= !SACKED_RETRANS;
            self.retrans_out -= n;
        }
        if !sent.has(LOST) {
            sent.sacked_flags |= LOST;
            self.lost_out += n;
        }
        let start = sent.seq;
        if self.retransmit_hint.is_none_or(|h| start.lt(h)) {
            self.retransmit_hint = Some(start);
        }
    }

    /// Marks segments lost that were sent long enough before the most recent delivered segment (RFC 8985
    /// §6.2, step 5). Returns the number of newly marked segments, and when to check again if some may have
    /// been reordered.
    pub fn mark_lost_by_time(
        &mut self,
        most_recent: SentAt,
        reo_timeout: core::time::Duration,
        now: Instant,
    ) -> (u32, Option<Instant>) {
        let mut marked = 0;
        let mut again: Option<Instant> = None;
        for i in 0..self.queue.len() {
            let sent = self.queue[i];
            if !most_recent.sent_after(sent.xmit_ts, sent.end_seq) {
                // Entries that were never retransmitted are in order of time, so none after this one is
                // older.
                if !sent.has(EVER_RETRANS) {
                    break;
                }
                continue;
            }
            if sent.has(SACKED) || (sent.has(LOST) && !sent.has(SACKED_RETRANS)) {
                continue;
            }
            let due = sent.xmit_ts + reo_timeout;
            if due <= now {
                marked += u32::from(sent.segments);
                self.mark_lost_at(i);
            } else {
                again = Some(again.map_or(due, |t| t.max(due)));
            }
        }
        (marked, again)
    }

    /// Marks the first segment lost, after duplicate or partial acknowledgements without SACK (RFC 6582).
    /// Returns the number of newly marked segments.
    pub fn mark_head_lost(&mut self, mss: u32) -> u32 {
        let Some(front) = self.queue.front().copied() else { return 0 };
        if front.has(LOST) {
            return 0;
        }
        if front.segments > 1 && front.bytes() > mss {
            self.split(0, front.seq + mss, mss);
        }
        self.mark_lost_at(0);
        u32::from(self.queue[0].segments)
    }

    /// Marks every segment that was not selectively acknowledged as lost, after a retransmission time-out.
    /// With `forget_sacks` selective acknowledgements are discarded, too (the receiver reneged, RFC 2018 §8).
    pub fn mark_all_lost(&mut self, forget_sacks: bool) {
        if forget_sacks {
            self.recv_sack_cache = [(SeqNumber(0), SeqNumber(0)); 4];
            self.sacked_out = 0;
        }
        for i in 0..self.queue.len() {
            if forget_sacks {
                self.queue[i].sacked_flags &= !SACKED;
            }
            if !self.queue[i].has(SACKED) {
                self.mark_lost_at(i);
            }
        }
    }

    /// Marks the entry with the byte at `start` lost, unless it was selectively acknowledged.
    pub fn mark_lost(&mut self, start: SeqNumber) {
        let i = self.position(start);
        if self.queue.get(i).is_some_and(|sent| !sent.has(SACKED)) {
            self.mark_lost_at(i);
        }
    }

    /// Returns the first lost entry that has no retransmission in flight, cut at a segment boundary to at
    /// most `bytes_max` bytes. Returns `None` if it begins beyond `window_end`, to which the peer's window
    /// may have shrunk (RFC 9293 §3.8.6); the first entry of the queue is always returned. An entry is cut at
    /// `window_end` if the window has no room for a segment (`__tcp_retransmit_skb`): the peer may drop a
    /// segment that is partly beyond its window.
    pub fn next_lost(&mut self, mss: u32, bytes_max: u32, window_end: SeqNumber) -> Option<RtxEntry> {
        if self.lost_out == 0 {
            return None;
        }
        let mut i = self.retransmit_hint.map_or(0, |h| self.position(h));
        while i < self.queue.len() {
            let sent = self.queue[i];
            if sent.has(LOST) && !sent.has(SACKED_RETRANS) {
                let room = window_end - sent.seq;
                if room <= 0 && i > 0 {
                    return None;
                }
                let limit = (bytes_max.min(room.max(0) as u32) / mss).max(1) * mss;
                if sent.segments > 1 && sent.bytes() > limit {
                    self.split(i, sent.seq + limit, mss);
                }
                self.cut(i, room, mss);
                self.retransmit_hint = Some(sent.seq);
                return Some(self.queue[i]);
            }
            i += 1;
        }
        self.retransmit_hint = self.queue.back().map(|s| s.end_seq);
        None
    }

    /// Records that the entry with the byte at `start` was retransmitted at `now`.
    pub fn on_retransmitted(&mut self, start: SeqNumber, now: Instant) {
        let i = self.position(start);
        let Some(sent) = self.queue.get_mut(i) else { return };
        sent.xmit_ts = now;
        if !sent.has(SACKED_RETRANS) {
            self.retrans_out += u32::from(sent.segments);
        }
        sent.sacked_flags |= SACKED_RETRANS | EVER_RETRANS;
        let end = sent.end_seq;
        self.require_slow_path_until(end);
    }

    /// Requires the slow path until everything before `end` is acknowledged.
    pub fn require_slow_path_until(&mut self, end: SeqNumber) {
        self.slow_path_until = Some(self.slow_path_until.map_or(end, |known| known.max(end)));
    }

    /// Returns the last segment, split off if it is part of a super-frame: a tail loss probe retransmits it
    /// (RFC 8985 §7.3). It is cut at `window_end`; `None` if it begins beyond that, as in
    /// [`next_lost`](Self::next_lost).
    pub fn tail(&mut self, mss: u32, window_end: SeqNumber) -> Option<RtxEntry> {
        let last = self.queue.len().checked_sub(1)?;
        let sent = self.queue[last];
        if sent.segments > 1 && sent.bytes() > mss {
            let cut = (sent.bytes() - 1) / mss * mss;
            self.split(last, sent.seq + cut, mss);
        }
        let tail = self.queue.len() - 1;
        let room = window_end - self.queue[tail].seq;
        if room <= 0 && tail > 0 {
            return None;
        }
        self.cut(tail, room, mss);
        Some(self.queue[tail])
    }

    /// Cuts the entry at `index` after `room` bytes, unless it fits or no room is left.
    fn cut(&mut self, index: usize, room: i32, mss: u32) {
        let entry = self.queue[index];
        if room > 0 && i64::from(entry.bytes()) > i64::from(room) {
            self.split(index, entry.seq + room as u32, mss);
        }
    }

    /// Counts all entries in segments of the new size `mss`, so that each is cut to that size when it is
    /// retransmitted.
    pub fn resegment(&mut self, mss: u32) {
        for i in 0..self.queue.len() {
            self.recount(i, mss);
        }
    }

    /// Counts the entry with the byte at `start` in segments of the size `mss`.
    pub fn resegment_one(&mut self, start: SeqNumber, mss: u32) {
        let i = self.position(start);
        if i < self.queue.len() {
            self.recount(i, mss);
        }
    }

    fn recount(&mut self, i: usize, mss: u32) {
        let sent = self.queue[i];
        let segments = u16::try_from(sent.bytes().div_ceil(mss).max(1)).unwrap_or(u16::MAX);
        self.adjust_counters(sent.sacked_flags, i64::from(segments) - i64::from(sent.segments));
        self.queue[i].segments = segments;
    }

    /// Marks entries lost that are larger than `mss`, because the path now accepts only that size.
    pub fn mark_oversized_lost(&mut self, old_mss: u32, mss: u32) {
        for i in 0..self.queue.len() {
            let sent = self.queue[i];
            if !sent.has(SACKED) && (sent.bytes() > mss) && old_mss > mss {
                self.mark_lost_at(i);
            }
        }
    }

    /// Marks no entry as lost any more, because a reduction was undone: the segments are in flight after all.
    pub fn unmark_lost(&mut self) {
        for sent in &mut self.queue {
            sent.sacked_flags &= !LOST;
        }
        self.lost_out = 0;
    }

    /// Checks counters against entries, for tests and fuzzing. Panics if they differ.
    pub fn check(&self) {
        if let Err(error) = self.check_image() {
            panic!("{error}");
        }
    }

    /// Checks a queue that was read from an image.
    ///
    /// # Errors
    /// The queue has a gap, or a counter is wrong.
    pub fn check_image(&self) -> Result<(), &'static str> {
        let mut sums = [0u32; 4];
        let pairs = self.queue.iter().zip(self.queue.iter().skip(1));
        if !pairs.into_iter().all(|(before, after)| before.end_seq == after.seq) {
            return Err("the retransmission queue has a gap");
        }
        for s in &self.queue {
            let n = u32::from(s.segments);
            sums[0] += n;
            sums[1] += n * u32::from(s.has(SACKED));
            sums[2] += n * u32::from(s.has(LOST));
            sums[3] += n * u32::from(s.has(SACKED_RETRANS));
        }
        let counted = [self.packets_out, self.lost_out, self.retrans_out];
        if counted != [sums[0], sums[2], sums[3]] || self.sacked_out < sums[1] {
            return Err("segments in flight were counted wrong");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seq(n: u32) -> SeqNumber {
        SeqNumber(n)
    }

    fn at(ms: u64) -> Instant {
        Instant::from_millis(ms)
    }

    fn queue(segments: u32) -> RtxQueue {
        let mut q = RtxQueue::default();
        for i in 0..segments {
            q.push(seq(i * 1000), seq((i + 1) * 1000), at(u64::from(i)), 1, EndKind::Segment);
        }
        q
    }

    #[test]
    fn retransmission_requires_slow_path_until_acknowledged() {
        let mut q = queue(3);
        assert!(q.has_no_loss_pending(seq(0)));
        q.mark_all_lost(false);
        q.on_retransmitted(seq(1000), at(50));
        q.mark_all_lost(false);
        q.unmark_lost();
        assert_eq!((q.sacked_out, q.lost_out, q.retrans_out), (0, 0, 0));
        assert!(!q.has_no_loss_pending(seq(0)), "its transmission time is that of the retransmission");
        assert!(!q.has_no_loss_pending(seq(1000)));
        assert!(q.has_no_loss_pending(seq(2000)));
        q.check();
    }

    #[test]
    fn acknowledgement_inside_segment_keeps_its_rest() {
        let mut q = queue(3);
        let mut d = Delivery::default();
        q.clean_acked(seq(1500), 1000, true, seq(0), &mut d);
        assert_eq!((q.packets_out, d.delivered), (2, 1));
        assert_eq!(q.front().unwrap().seq, seq(1500));
        q.check();
    }

    #[test]
    fn acknowledged_part_of_a_super_frame_counts_as_a_whole_one() {
        let of = |act: fn(&mut RtxQueue)| {
            let mut q = RtxQueue::default();
            q.push(seq(0), seq(10_000), at(3), 10, EndKind::Push);
            act(&mut q);
            let mut d = Delivery::default();
            q.clean_acked(seq(3500), 1000, true, seq(0), &mut d);
            q.check();
            assert_eq!((q.packets_out, q.front().unwrap().seq), (7, seq(3500)));
            let sent = d.most_recent.map(|segment| segment.xmit_ts);
            (d.delivered, d.has_retrans_acked, d.first_ackt, sent)
        };
        assert_eq!(of(|_| {}), (3, false, Some(at(3)), Some(at(3))));
        // Karn's algorithm: no sample of the round-trip time (RFC 6298, section 3).
        let retransmitted = |q: &mut RtxQueue| {
            q.mark_all_lost(false);
            q.on_retransmitted(seq(0), at(50));
        };
        assert_eq!(of(retransmitted), (3, true, None, Some(at(50))));
        let sacked = |q: &mut RtxQueue| {
            q.mark_sacked(&[(seq(0), seq(10_000))], 1000, seq(0), &mut Delivery::default());
        };
        assert_eq!(of(sacked), (0, false, None, None));
    }

    #[test]
    fn sack_block_splits_super_frame_at_segment_boundaries() {
        let mut q = RtxQueue::default();
        q.push(seq(0), seq(10_000), at(0), 10, EndKind::Push);
        let mut d = Delivery::default();
        q.mark_sacked(&[(seq(2500), seq(6500))], 1000, seq(0), &mut d);
        assert_eq!((q.packets_out, q.sacked_out, d.sacked), (10, 3, 3));
        let sacked: Vec<_> = q.iter().filter(|s| s.has(SACKED)).map(|s| (s.seq.0, s.end_seq.0)).collect();
        assert_eq!(sacked, [(3000, 6000)]);
        q.check();
    }

    #[test]
    fn grown_sack_block_counts_only_new_segments() {
        let mut q = queue(10);
        let mut d = Delivery::default();
        q.mark_sacked(&[(seq(2000), seq(4000))], 1000, seq(0), &mut d);
        let mut d = Delivery::default();
        q.mark_sacked(&[(seq(2000), seq(7000))], 1000, seq(4000), &mut d);
        assert_eq!((d.sacked, q.sacked_out), (3, 5));
        q.check();
    }

    #[test]
    fn segments_sent_long_before_delivered_are_lost() {
        let mut q = queue(5);
        let mut d = Delivery::default();
        q.mark_sacked(&[(seq(4000), seq(5000))], 1000, seq(0), &mut d);
        let newest = d.most_recent.unwrap();
        let (marked, again) = q.mark_lost_by_time(
            SentAt { xmit_ts: newest.xmit_ts, end_seq: newest.end_seq },
            core::time::Duration::from_millis(10),
            at(12),
        );
        assert_eq!(marked, 3, "sent at 0, 1 and 2 ms");
        assert_eq!(again, Some(at(13)));
        let first = q.next_lost(1000, 1000, seq(1 << 20)).unwrap();
        assert_eq!(first.seq, seq(0));
        q.on_retransmitted(first.seq, at(12));
        assert_eq!(q.next_lost(1000, 1000, seq(1 << 20)).unwrap().seq, seq(1000));
        assert_eq!(q.in_flight(), 5 - 1 - 3 + 1);
        q.check();
    }

    #[test]
    fn sacked_retransmission_restores_all_counters() {
        let mut q = queue(4);
        q.mark_all_lost(false);
        let s = q.next_lost(1000, 1000, seq(1 << 20)).unwrap();
        q.on_retransmitted(s.seq, at(50));
        let mut d = Delivery::default();
        q.mark_sacked(&[(seq(0), seq(1000))], 1000, seq(0), &mut d);
        assert_eq!((q.lost_out, q.retrans_out, q.sacked_out), (3, 0, 1));
        q.clean_acked(seq(4000), 1000, true, seq(1000), &mut d);
        assert_eq!((q.packets_out, q.lost_out, q.retrans_out, q.sacked_out), (0, 0, 0, 0));
        q.check();
    }

    #[test]
    fn tail_of_super_frame_is_one_segment() {
        let mut q = RtxQueue::default();
        q.push(seq(0), seq(2500), at(0), 3, EndKind::Push);
        let tail = q.tail(1000, SeqNumber(u32::MAX / 2)).unwrap();
        assert_eq!((tail.seq, tail.end_seq, tail.segments), (seq(2000), seq(2500), 1));
        q.check();
    }
}
