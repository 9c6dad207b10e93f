//! Processing of a segment's contents: payload in and out of order, urgent data, FIN; and when it is
//! acknowledged.

use super::Tcp;
use super::active::ActiveConn;
use super::conn::{Flags, NONE, SlotState, Tcb};
use super::input::{PayloadPosition, Segment};
use super::listen::advmss;
use super::memory_waiters::BYTES_UNDER_PRESSURE_MAX;
use super::mtu_search::MtuSearchState;
use super::pending::PendingQueue;
use super::profile::Profile;
use super::state::State;
use crate::chunk_pool::{CHUNK_BYTES, ChunkPool};
use crate::device::{BURST_FRAMES_MAX, RxBurst};
use crate::error::Stale;
use crate::events::{CloseReason, Event, InlineData};
use crate::handle::Conn;
use crate::ip::Network;
use crate::priority::{BEST_EFFORT, COMPILED};
use crate::wire::tcp::{SeqNumber, TcpFlags};
use arrayvec::ArrayVec;
use std::collections::VecDeque;

/// Maximum number of doublings of the receive window: [`Tcb::rcv_grow`] has four bits.
const WINDOW_DOUBLINGS_MAX: u8 = 15;

/// Immediate acknowledgements that a connection begins with (Linux's `TCP_MAX_QUICKACKS`): the sender is in
/// slow start.
const QUICK_ACKS_MAX: u32 = 16;

/// Largest payload of a segment over Ethernet without IP and TCP options.
const ETHERNET_MSS: u16 = 1460;

impl Tcp {
    /// Processes payload and FIN (RFC 9293 §3.10.7.4, seventh and eighth check).
    ///
    /// `burst` is the burst with the segment. It is needed only for data after a gap.
    pub fn on_payload(
        &mut self,
        net: &mut Network,
        idx: u32,
        seg: &Segment<'_>,
        burst: Option<&RxBurst<'_>>,
    ) {
        let fin = seg.header.flags.contains(TcpFlags::FIN);
        if seg.payload.is_empty() && !fin {
            return;
        }
        let c = &self.conns[idx];
        if seg.end().le(c.rcv_nxt) {
            // Everything in the segment is old: the peer missed the acknowledgement.
            self.note_duplicate(idx, seg);
            self.enter_quickack_mode(idx);
            return;
        }
        if !c.state.may_receive() {
            // After the peer's FIN no data are accepted (RFC 9293 §3.10.7.4).
            if seg.header.seq.lt(c.rcv_nxt) && (seg.header.seq + seg.payload.len() as u32).gt(c.rcv_nxt) {
                self.abort_on_data(net, idx, seg);
            }
            return;
        }
        let new_data = !seg.payload.is_empty() && (seg.header.seq + seg.payload.len() as u32).gt(c.rcv_nxt);
        if c.has(Flags::ORPHAN) && new_data {
            // No application reads these data, so the peer must learn that they are lost (RFC 2525 §2.17).
            self.send_reset(net, seg);
            self.destroy(idx, CloseReason::Aborted);
            return;
        }
        if seg.header.seq.gt(c.rcv_nxt) {
            self.on_out_of_order(idx, seg, burst);
        } else {
            self.on_in_order(net, idx, seg);
        }
    }

    /// Ends a connection whose peer has put data where its FIN was (`TCPAbortOnData` of Linux).
    #[cold]
    fn abort_on_data(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) {
        self.send_reset(net, seg);
        let is_orphan = self.conns[idx].has(Flags::ORPHAN);
        self.destroy(idx, if is_orphan { CloseReason::Normal } else { CloseReason::Reset });
    }

    fn on_in_order(&mut self, net: &mut Network, idx: u32, seg: &Segment<'_>) {
        let c = &self.conns[idx];
        let skip = (c.rcv_nxt - seg.header.seq) as usize;
        let room = c.rcv_wnd() as usize;
        let data = seg.payload.get(skip..).unwrap_or(&[]);
        let data = &data[..data.len().min(room)];
        if skip > 0 && skip.min(seg.payload.len()) > 0 {
            let end = c.rcv_nxt;
            self.note_dsack(idx, seg.header.seq, end);
        }
        let active = self.conns[idx].active;
        if active != NONE
            && seg.header.flags.contains(TcpFlags::FIN)
            && data.len() == seg.payload.len().saturating_sub(skip)
        {
            // Nothing can follow this FIN, which is next: data that claim to do so must not hide it.
            let b = &mut self.active[active];
            if b.recv.range_count() > 0 {
                b.recv.discard_out_of_order(&mut self.chunks);
            }
        }
        // RFC 5681 §4.2: a segment that fills a gap completely or in part is acknowledged at once.
        let fills_hole = active != NONE && self.active[active].recv.reported_range_count() > 0;
        let taken = if data.is_empty() { 0 } else { self.queue_in_order(idx, seg, skip, data) };
        let refused = taken < data.len() || data.is_empty();
        let due = if taken > 0 { self.on_in_order_bytes(idx, seg, taken, fills_hole) } else { AckDue::Later };
        let fin_seq = seg.header.seq + seg.payload.len() as u32;
        let fin_here = seg.header.flags.contains(TcpFlags::FIN) && fin_seq == self.conns[idx].rcv_nxt;
        if fin_here || self.is_ooo_fin_next(idx) {
            if due == AckDue::Now {
                self.ack_now(idx);
            }
            // After a FIN no quick acknowledgement is sent: the local FIN may follow soon and acknowledges
            // it.
            self.on_fin(net, idx);
        } else if due == AckDue::Now || refused {
            // Data that were refused for lack of memory are also answered with the current state.
            self.ack_now(idx);
        } else if due == AckDue::Quick {
            self.quick_ack_or_defer(idx);
        }
    }

    /// Returns whether the payload of a segment may be delivered inline, that is, read where it is in the
    /// burst: it is next in order, no earlier data wait, and memory is available in case that the application
    /// does not consume it.
    #[inline(always)]
    pub fn can_deliver_inline(&self, idx: u32, seg: &Segment<'_>) -> bool {
        let c = &self.conns[idx];
        seg.position.is_some()
            && seg.header.seq.le(c.rcv_nxt)
            && !c.has(Flags::URGENT_OR_FILTERED)
            && !seg.header.flags.contains(TcpFlags::URG)
            && (c.active == NONE || self.active[c.active].recv.is_empty())
            && self.chunks.available() >= chunks_for(seg.payload.len())
            && self.may_use_memory(idx, seg.payload.len())
    }

    /// Returns whether a connection may take memory for `bytes` more bytes: the last quarter of the pool is
    /// reserved for connections that use little memory, so that connections whose data are not read do not
    /// stop the others.
    #[inline(always)]
    fn may_use_memory(&self, idx: u32, bytes: usize) -> bool {
        self.chunks.spare() >= chunks_for(bytes) || self.unread(idx) <= BYTES_UNDER_PRESSURE_MAX
    }

    /// Delivers data that begin at `rcv_nxt` inline; [`Tcp::can_deliver_inline`] has allowed it.
    fn deliver_inline(&mut self, idx: u32, data: InlineData) {
        queue_inline(&mut self.conns[idx], idx, data, &mut self.chunks, &mut self.events, &mut self.pending);
    }

    /// Stores data that begin at `rcv_nxt`, or delivers them inline. Returns by how many bytes `rcv_nxt`
    /// moved.
    pub fn queue_in_order(&mut self, idx: u32, seg: &Segment<'_>, skip: usize, data: &[u8]) -> usize {
        if let Some(PayloadPosition { frame, start }) =
            seg.position.filter(|_| self.can_deliver_inline(idx, seg))
        {
            self.deliver_inline(
                idx,
                InlineData { frame, start: start + skip as u32, len: data.len() as u32 },
            );
            return data.len();
        }
        if !self.may_use_memory(idx, data.len()) {
            self.stats.pool_exhausted += 1;
            return 0;
        }
        let capacity = self.profile(idx).recv_buffer_bytes as usize + 65_535;
        let active = self.ensure_active(idx);
        let b = &mut self.active[active];
        let (at, dropped) = (b.recv.contiguous(), b.recv.dropped_ranges());
        let out = b.recv.write(&mut self.chunks, at, data, at + capacity);
        self.stats.ofo_ranges_dropped += b.recv.dropped_ranges() - dropped;
        if out.accepted < data.len() {
            self.stats.pool_exhausted += 1;
        }
        self.stats.bytes_copied_in += out.stored as u64;
        if let Some((start, end)) = out.duplicate {
            // The rest had arrived out of order before (RFC 2883 §4.1.2).
            let first = self.conns[idx].rcv_nxt - at as u32;
            self.stats.duplicate_bytes += (end - start) as u64;
            // Of two parts that had arrived the first is reported (RFC 2883 §4.2.3).
            if skip == 0 {
                self.note_dsack(idx, first + start as u32, first + end as u32);
            }
        }
        self.conns[idx].rcv_nxt += out.newly_contiguous as u32;
        if out.newly_contiguous > 0 {
            self.limit_window_growth(idx, at + self.delivered_unread(idx), out.newly_contiguous);
            self.report_readable(idx);
        }
        out.newly_contiguous
    }

    /// Stores data after a gap in place and acknowledges them at once with SACK blocks (RFC 5681 §4.2, RFC
    /// 2018 §4), unless they have overtaken the data in the gap here (see [`Tcp::set_overtaking`]).
    fn on_out_of_order(&mut self, idx: u32, seg: &Segment<'_>, burst: Option<&RxBurst<'_>>) {
        self.stats.out_of_order += 1;
        if seg.wire_payload() > usize::from(self.conns[idx].rcv_mss) {
            let c = &mut self.conns[idx];
            measure_rcv_mss(c, self.profiles.get(c.profile), seg.wire_payload());
        }
        let active = self.ensure_active(idx);
        let c = &self.conns[idx];
        let b = &mut self.active[active];
        let gap = (seg.header.seq - c.rcv_nxt) as usize;
        let room = (c.rcv_wnd() as usize).saturating_sub(gap);
        let data = &seg.payload[..seg.payload.len().min(room)];
        let (base, dropped) = (b.recv.contiguous(), b.recv.dropped_ranges());
        let mut accepted = 0;
        if !data.is_empty() {
            let out = b.recv.write(&mut self.chunks, base + gap, data, base + gap + room);
            self.stats.ofo_ranges_dropped += b.recv.dropped_ranges() - dropped;
            self.stats.bytes_copied_in += out.stored as u64;
            accepted = out.accepted;
            if let Some((start, end)) = out.duplicate {
                let seq = |position: usize| c.rcv_nxt + (position - base) as u32;
                if !self.is_overtaking {
                    b.dsack = Some((seq(start), seq(end)));
                }
                self.stats.duplicate_bytes += (end - start) as u64;
            }
            if out.accepted < data.len() && b.recv.dropped_ranges() == dropped {
                self.stats.pool_exhausted += 1;
            }
        }
        if seg.header.flags.contains(TcpFlags::FIN) && data.len() == seg.payload.len() {
            // The FIN counts when the gap before it is filled, not before.
            b.ooo_fin_seq = Some(seg.header.seq + seg.payload.len() as u32);
            b.is_ooo_fin_reported = !self.is_overtaking;
        }
        if COMPILED && self.is_unordered_used | self.is_overtaking {
            return self.on_out_of_order_stored(idx, seg, base + gap, accepted, burst);
        }
        self.ack_now(idx);
    }

    /// Returns whether a FIN that arrived out of order is next.
    fn is_ooo_fin_next(&self, idx: u32) -> bool {
        let c = &self.conns[idx];
        c.active != NONE && self.active[c.active].ooo_fin_seq == Some(c.rcv_nxt)
    }

    /// Accounts for `count` bytes that were received in order, and returns when they are acknowledged.
    fn on_in_order_bytes(&mut self, idx: u32, seg: &Segment<'_>, count: usize, fills_hole: bool) -> AckDue {
        self.stats.bytes_in += count as u64;
        let now_ms = self.now_ms();
        let c = &mut self.conns[idx];
        if c.active != NONE {
            self.active[c.active].lrcvtime = now_ms;
        }
        event_data_recv(c, self.profiles.get(c.profile), now_ms, seg, fills_hole)
    }

    /// Records that a segment was received twice, so that the next acknowledgement reports it first (RFC
    /// 2883).
    pub fn note_duplicate(&mut self, idx: u32, seg: &Segment<'_>) {
        let c = &self.conns[idx];
        if seg.seq_len() == 0 || !seg.end().le(c.rcv_nxt) {
            return;
        }
        self.stats.duplicate_bytes += seg.payload.len() as u64;
        self.note_dsack(idx, seg.header.seq, seg.end());
    }

    fn note_dsack(&mut self, idx: u32, start: SeqNumber, end: SeqNumber) {
        if !self.conns[idx].has(Flags::SACK) {
            return;
        }
        let active = self.ensure_active(idx);
        self.active[active].dsack = Some((start, end));
    }

    /// Acknowledges at once and enters quickack mode, because the path has loss or reordering
    /// (`tcp_enter_quickack_mode`).
    pub fn enter_quickack_mode(&mut self, idx: u32) {
        let c = &mut self.conns[idx];
        c.raise_quick_acks(QUICK_ACKS_MAX as u8);
        c.flags.clear(Flags::PINGPONG);
        c.flags.set(Flags::ATO_SET);
        self.ack_now(idx);
    }

    /// Processes a FIN in order (RFC 9293 §3.10.7.4, eighth check).
    fn on_fin(&mut self, net: &mut Network, idx: u32) {
        if self.conns[idx].active != NONE {
            let active = self.conns[idx].active;
            let b = &mut self.active[active];
            b.ooo_fin_seq = None;
            // Everything was received: neither duplicates nor data after the FIN are reported any more
            // (`tcp_fin`).
            b.dsack = None;
            if b.recv.range_count() > 0 {
                b.recv.discard_out_of_order(&mut self.chunks);
            }
        }
        let (now_ms, delay) = (self.now_ms(), self.profile(idx).delayed_ack_ms);
        let c = &mut self.conns[idx];
        c.rcv_nxt += 1;
        c.flags.set(Flags::PEER_FIN);
        let state = c.state;
        let unacked = (c.rcv_nxt - c.rcv_wup) as u32;
        if state == State::Established && c.has(Flags::ATO_SET) && unacked <= u32::from(c.rcv_mss) {
            // The local FIN very likely follows soon (`tcp_fin`) and acknowledges this one.
            c.flags.set(Flags::PINGPONG);
            if !c.has(Flags::ACK_NOW | Flags::ACK_DELAYED) {
                c.flags.set(Flags::ACK_DELAYED);
                c.ack_deadline = now_ms.wrapping_add(delay) as u16;
            }
        } else {
            c.flags.set(Flags::ACK_NOW);
        }
        if c.has(Flags::ACCEPTED) && !c.has(Flags::ORPHAN) {
            let conn = self.conns.handle(idx);
            self.events.push_back(Event::PeerClosed { conn });
        }
        match state {
            State::Established => {
                self.conns[idx].state = State::CloseWait;
                self.want_transmit(idx);
            }
            State::FinWait1 => {
                self.conns[idx].state = State::Closing;
                self.want_transmit(idx);
            }
            State::FinWait2 => {
                self.send_ack_at_once(net, idx);
                self.enter_time_wait(idx);
            }
            _ => debug_assert!(false, "FIN in a state that cannot receive"),
        }
    }

    /// Queues a `Readable` event, unless one is queued that the owner has not taken yet.
    #[inline]
    pub fn report_readable(&mut self, idx: u32) {
        let c = &mut self.conns[idx];
        if !c.has(Flags::ACCEPTED) {
            return;
        }
        if !c.has(Flags::READABLE_QUEUED) {
            c.flags.set(Flags::READABLE_QUEUED);
            let conn = self.conns.handle(idx);
            self.events.push_back(Event::Readable { conn });
        } else if self.event_classes.current() > BEST_EFFORT {
            self.report_readable_urgently(idx);
        }
    }

    /// Queues another `Readable` event, in the current class, if the one that is queued may be of a lower
    /// class. The event that is taken later finds nothing new.
    #[cold]
    fn report_readable_urgently(&mut self, idx: u32) {
        let event = Event::Readable { conn: self.conns.handle(idx) };
        if self.event_classes.others_wait() && self.events.back() != Some(&event) {
            self.events.push_back(event);
        }
    }

    /// Moves all data of a connection that wait in the burst to its receive buffer.
    pub fn buffer_pending(&mut self, idx: u32, burst: &RxBurst<'_>) {
        if !self.conns[idx].has(Flags::INLINE) {
            return;
        }
        let conn = self.conns.handle(idx);
        let undelivered: ArrayVec<InlineData, BURST_FRAMES_MAX> =
            self.pending.of_conn(conn).filter(|p| !p.delivered).map(|p| p.data).collect();
        for data in undelivered {
            self.chunks.unreserve(chunks_for(data.len()));
            self.append_received(idx, data.bytes(burst));
        }
        // The owner is reading data that were delivered: the rest of those is moved by `consume`.
        self.pending.remove_of(conn, |p| !p.delivered);
        let delivered = self.pending.of_conn(conn).next().is_some();
        self.conns[idx].flags.assign(Flags::INLINE, delivered);
    }

    /// Appends bytes that `rcv_nxt` has passed already to the receive buffer. Memory is available: it was
    /// reserved when the bytes arrived, and the caller has just released the reservation.
    pub fn append_received(&mut self, idx: u32, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let active = self.ensure_active(idx);
        let b = &mut self.active[active];
        let at = b.recv.contiguous();
        let out = b.recv.write(&mut self.chunks, at, bytes, usize::MAX);
        debug_assert_eq!(out.accepted, bytes.len());
        self.stats.bytes_copied_in += out.stored as u64;
        let queued = at + b.delivered_unread as usize;
        self.limit_window_growth(idx, queued, bytes.len());
        self.report_readable(idx);
    }

    /// Returns the bytes received and not read. Counts bytes that were taken early as unread while bytes
    /// before them are.
    #[inline]
    pub fn unread(&self, idx: u32) -> usize {
        let c = &self.conns[idx];
        let buffered = if c.active == NONE { 0 } else { self.active[c.active].recv.contiguous() };
        if c.has(Flags::INLINE) { self.unread_inline(idx, buffered) } else { buffered }
    }

    #[inline(never)]
    fn unread_inline(&self, idx: u32, buffered: usize) -> usize {
        let conn = self.conns.handle(idx);
        let pending = self.pending.of_conn(conn).filter(|p| !p.delivered);
        buffered + pending.map(|p| p.data.len()).sum::<usize>()
    }

    fn delivered_unread(&self, idx: u32) -> usize {
        let active = self.conns[idx].active;
        if active == NONE { 0 } else { self.active[active].delivered_unread as usize }
    }

    /// Sets how many bytes that the owner has consumed were not read by their final reader; they reduce the
    /// advertised window.
    pub fn set_unread(&mut self, conn: Conn, bytes: u32) -> Result<(), Stale> {
        let idx = self.index(conn).ok_or(Stale::Handle)?;
        // After the peer's FIN no window is advertised.
        let receives = self.conns[idx].state.may_receive();
        let bytes = if receives { bytes } else { 0 };
        if self.delivered_unread(idx) == bytes as usize {
            return Ok(());
        }
        let active = self.ensure_active(idx);
        let before = core::mem::replace(&mut self.active[active].delivered_unread, bytes);
        if bytes < before && receives {
            self.after_read(idx);
        } else {
            let queued = self.active[active].recv.contiguous() + before as usize;
            self.limit_window_growth(idx, queued, bytes.saturating_sub(before) as usize);
        }
        self.rearm(idx);
        Ok(())
    }

    /// Takes back the growth of the receive window by `bytes` bytes that arrived and were not read, if the
    /// application does not keep up with what arrives: `queued` bytes were unread when these arrived. Up to
    /// its usual size the window grows nevertheless: see [`Profile::usual_recv_window`].
    ///
    /// Linux measures what the application reads in a round trip (`tcp_rcv_space_adjust`). Here the fill
    /// level of the buffer tells the same without a clock: the buffer of an application that is slower than
    /// its peer is full.
    #[inline(always)]
    fn limit_window_growth(&mut self, idx: u32, queued: usize, bytes: usize) {
        if queued > 0 {
            self.take_back_growth(idx, queued, bytes);
        }
    }

    #[inline(never)]
    fn take_back_growth(&mut self, idx: u32, queued: usize, bytes: usize) {
        let c = &self.conns[idx];
        if c.has(Flags::ORPHAN) || !c.state.may_receive() {
            return;
        }
        let profile = self.profiles.get(c.profile);
        let window = rcv_ssthresh(c, profile);
        let grown = window.saturating_sub(profile.usual_recv_window().into());
        // What grew before the last doubling stays.
        let since_doubling = u64::try_from(c.rcv_nxt - c.rcv_grow_seq).unwrap_or(0);
        if grown > 0 && queued as u64 > window / 4 {
            self.conns[idx].rcv_grow_seq += grown.min(bytes as u64).min(since_doubling) as u32;
        }
    }

    /// Returns whether the receive window has grown to more than twice its usual size, because the
    /// application kept up with what arrived. Also true if the usual size is the largest one, and for a stale
    /// handle. (A burst counts as read until the owner was told of it, so a smaller window may have grown too
    /// early.)
    pub fn has_grown_window(&self, conn: Conn) -> bool {
        self.index(conn).is_none_or(|idx| {
            let c = &self.conns[idx];
            let profile = self.profiles.get(c.profile);
            let usual = profile.usual_recv_window();
            usual == profile.recv_buffer_bytes || rcv_ssthresh(c, profile) > 2 * u64::from(usual)
        })
    }

    /// Sends a window update if reading has opened the window enough (RFC 9293 §3.8.6.2.2), and finishes a
    /// closed connection when everything was read.
    #[inline(always)]
    pub fn after_read(&mut self, idx: u32) {
        let c = &self.conns[idx];
        if !c.state.may_receive() {
            if c.slot_state == SlotState::Unread && self.unread(idx) == 0 {
                self.finish(idx, CloseReason::Normal);
            }
            return;
        }
        if c.flags.has_first_only(Flags::ACK_DELAYED, Flags::PINGPONG) {
            self.ack_after_read(idx);
        }
        let c = &self.conns[idx];
        let left = u64::from(c.rcv_wnd());
        if 2 * left > rcv_ssthresh(c, self.profiles.get(c.profile)) {
            // The window cannot have doubled.
            return;
        }
        let window = self.select_window(idx);
        if window > 0 && u64::from(window) >= 2 * left {
            self.ack_now(idx);
        }
    }

    /// Acknowledges at once after the end of a write of the peer was read completely: the peer may not have
    /// room for its next write before that (`tcp_cleanup_rbuf`). Interactive connections piggyback the
    /// acknowledgement on their answer instead.
    #[inline(never)]
    fn ack_after_read(&mut self, idx: u32) {
        let c = &self.conns[idx];
        if c.is_pushed() && c.quick_acks() == 0 && self.unread(idx) + self.delivered_unread(idx) == 0 {
            self.ack_now(idx);
        }
    }

    /// Returns the window to advertise in the next segment, in bytes, with silly window avoidance (RFC 9293
    /// §3.8.6.2.2).
    #[inline(always)]
    pub fn select_window(&self, idx: u32) -> u32 {
        let c = &self.conns[idx];
        let profile = self.profiles.get(c.profile);
        let capacity = rcv_ssthresh(c, profile).min(profile.recv_buffer_bytes.into()) as u32;
        let is_empty = |b: &ActiveConn| b.recv.readable() == 0 && b.delivered_unread == 0;
        let idle = !c.has(Flags::INLINE) && (c.active == NONE || is_empty(&self.active[c.active]));
        if idle && self.chunks.available() * CHUNK_BYTES / 2 >= capacity as usize {
            // Nothing is unread and memory is available: the complete window is offered.
            return self.window_limits.limit(c, capacity.max(c.rcv_wnd()));
        }
        let unread = if idle { 0 } else { self.unread(idx) + self.delivered_unread(idx) };
        self.window_limits.limit(c, self.select_window_slow(idx, capacity, unread))
    }

    /// Returns the window to advertise when bytes are unread or memory is scarce.
    #[inline(never)]
    fn select_window_slow(&self, idx: u32, capacity: u32, unread: usize) -> u32 {
        let c = &self.conns[idx];
        // The window does not exceed the available memory, so that a peer is slowed down by the window and
        // not by losses.
        let chunks =
            if unread > BYTES_UNDER_PRESSURE_MAX { self.chunks.spare() } else { self.chunks.available() };
        let pool = u32::try_from(chunks * CHUNK_BYTES / 2).unwrap_or(u32::MAX);
        let free = capacity.saturating_sub(unread as u32).min(pool);
        let left = c.rcv_wnd();
        let mut step = u32::from(c.rcv_mss).min(capacity / 2);
        if left == 0 {
            // A closed window opens by a sixteenth of the buffer at least (`__tcp_select_window`), or by all
            // of the pool: a sixteenth may be more than the pool ever has.
            step = step.max((capacity >> 4).min(pool));
        }
        if free < left + step && free < capacity { left } else { free.max(left) }
    }
}

/// Queues data that begin at `rcv_nxt` for inline delivery, where they are in the burst. Memory was checked
/// to be available in case that the application does not consume them.
#[inline(always)]
pub(super) fn queue_inline(
    c: &mut Tcb,
    idx: u32,
    data: InlineData,
    chunks: &mut ChunkPool,
    events: &mut VecDeque<Event>,
    pending: &mut PendingQueue,
) {
    let conn = Conn::new(idx, c.generation);
    chunks.reserve(chunks_for(data.len()));
    events.push_back(Event::Data { conn, data });
    pending.push(conn, data, c.has(Flags::INLINE));
    c.flags.set(Flags::INLINE);
    c.rcv_nxt += data.len;
}

/// When received data are acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AckDue {
    /// In this turn.
    Now,
    /// In this turn, for no other reason than quickack mode.
    Quick,
    /// With the next segment that is sent, or when the delayed acknowledgement expires.
    Later,
}

/// Updates the estimate of the peer's segment size, the receive window and the acknowledgement state after
/// bytes were received in order (Linux's `tcp_event_data_recv`).
#[inline(always)]
pub(super) fn event_data_recv(
    c: &mut Tcb,
    profile: &Profile,
    now_ms: u32,
    seg: &Segment<'_>,
    fills_hole: bool,
) -> AckDue {
    let wire = seg.wire_payload();
    if wire > usize::from(c.rcv_mss) {
        measure_rcv_mss(c, profile, wire);
    }
    if i64::from(c.rcv_nxt - c.rcv_grow_seq) >= i64::from(profile.recv_window_step) << c.rcv_grow() {
        double_window(c, profile);
    }
    if !c.has(Flags::ATO_SET) {
        c.flags.set(Flags::ATO_SET);
        let grant = (c.rcv_wnd() / (2 * u32::from(c.rcv_mss.max(1)))).clamp(2, QUICK_ACKS_MAX);
        c.raise_quick_acks(grant as u8);
    }
    let unacked = (c.rcv_nxt - c.rcv_wup) as u32;
    if unacked > u32::from(c.rcv_mss) || fills_hole {
        return AckDue::Now;
    }
    if c.quick_acks() > 0 && !c.has(Flags::PINGPONG) {
        return AckDue::Quick;
    }
    if !c.has(Flags::ACK_DELAYED) {
        c.flags.set(Flags::ACK_DELAYED);
        c.ack_deadline = now_ms.wrapping_add(profile.delayed_ack_ms) as u16;
        if wire < usize::from(c.rcv_mss) || seg.header.flags.contains(TcpFlags::PSH) {
            c.set_pushed();
        }
    }
    AckDue::Later
}

/// Doubles the receive window, unless it is as large as the buffer, after as many bytes as it had arrived.
#[cold]
fn double_window(c: &mut Tcb, profile: &Profile) {
    let window = u64::from(profile.recv_window_step) << c.rcv_grow();
    if window < profile.recv_buffer_bytes.into() && c.rcv_grow() < WINDOW_DOUBLINGS_MAX {
        c.rcv_grow_and_mtu_search += 1;
    }
    c.rcv_grow_seq = c.rcv_nxt;
}

/// Raises the estimate of the peer's segment size to `wire` bytes, within what was announced.
#[inline(never)]
fn measure_rcv_mss(c: &mut Tcb, profile: &Profile, wire: usize) {
    let announced = advmss(c, profile);
    // While the path MTU is searched for, the local `pmtu` does not bound what arrives here.
    let is_searching = c.mtu_search() != MtuSearchState::Off;
    let max = if is_searching { announced.max(ETHERNET_MSS) } else { announced };
    let wire = wire.min(max.into()) as u16;
    c.rcv_mss = c.rcv_mss.max(wire);
}

/// Returns the largest window that a connection may offer now. It grows by one byte with each byte that
/// arrives, so that it doubles in a round trip like the window of a sender in slow start, without steps,
/// which would cause bursts. [`Tcp::limit_window_growth`] takes the growth back if the application does not
/// keep up.
#[inline]
fn rcv_ssthresh(c: &Tcb, profile: &Profile) -> u64 {
    let step = u64::from(profile.recv_window_step) << c.rcv_grow();
    if c.has(Flags::ORPHAN) {
        // The window of an orphan does not grow, and in FIN-WAIT-2 `rcv_grow_seq` is a deadline.
        return step;
    }
    // Below the step until as much has arrived as the first window was rounded down by; never below half of
    // it, although the application may have changed the step.
    let grown = i64::from(c.rcv_nxt - c.rcv_grow_seq).clamp(-(step as i64 / 2), step as i64);
    step.wrapping_add_signed(grown)
}

/// Returns how many chunks `bytes` bytes may need in a receive buffer: they may begin and end inside of
/// chunks.
pub(super) fn chunks_for(bytes: usize) -> usize {
    bytes / CHUNK_BYTES + 2
}
